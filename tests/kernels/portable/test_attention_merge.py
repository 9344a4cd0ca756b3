"""Shares of keys joined, in Triton's interpreter: by the formula, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from attention_operands import joined

from tilestream.core.gpu_specs import named
from tilestream.core.operands import AttentionOperands
from tilestream.launch.portable import attention_launch
from tilestream.ops.attention_gpu import layout_of
from tilestream.plan.attention_plan import of_candidate
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.policy.hopper_attention import candidates

H = 6


def plan_of(shares: int, varlen: bool, dim: int):
    more = {"varlen": True, "tokens_q": 10} if varlen else {}
    problem = AttentionProblem(2, H, 2, 5, 700, 64, dim, dtype="float16", return_lse=True, **more)
    found = next(candidates(problem, named("h100"), 132, kind="dynamic", splits=shares))
    return of_candidate(problem, named("h100"), "hopper", found, "a test's", ())


def operands(varlen: bool, dim: int, layout: str, sinks: bool | float) -> AttentionOperands:
    rows = (10,) if varlen else (2, 5)
    q = torch.zeros(*rows, H, 64, dtype=torch.float16)
    k, v = torch.zeros(2, 700, 2, 64, dtype=torch.float16), torch.zeros(2, 700, 2, dim, dtype=torch.float16)
    out = torch.full((*rows, H, dim), math.nan, dtype=torch.float16)
    if layout == "bhsd":
        out = torch.full((2, H, 5, dim), math.nan, dtype=torch.float16).transpose(1, 2)
    lse = torch.full((10, H) if varlen else (2, H, 5), math.nan)
    given = torch.randn(H) if sinks is True else torch.full((H,), float(sinks))
    return AttentionOperands(q, k, v, out, 0.1, lse, given if sinks else None)


@pytest.mark.parametrize("sinks", [False, True, 100.0])  # 100: above all scores, and beyond what exp takes
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "packed"])
@pytest.mark.parametrize(("shares", "dim"), [(2, 64), (7, 40), (35, 16)])
def test_shares_are_joined(shares, dim, layout, sinks):
    varlen = layout == "packed"
    plan, x = plan_of(shares, varlen, dim), operands(varlen, dim, layout, sinks)
    launch = attention_launch.MergeLaunch(plan, layout_of(x))
    rows = 10 * H
    assert launch.floats == shares * rows * (dim + 1)
    scratch = torch.full((launch.floats + 50,), math.nan)
    outs, sums = launch.scratch(scratch)
    parts = torch.randn(shares, rows, dim)
    lse = 5 * torch.randn(shares, rows)
    lse[torch.rand(shares, rows) < 0.3] = -math.inf
    lse[:, ::7] = -math.inf  # rows that see no key at all
    parts[lse == -math.inf] = 0
    outs[: parts.numel()] = parts.flatten()
    sums[: lse.numel()] = lse.flatten()
    launch(0, (outs, sums), x)
    out, whole = joined(parts.view(shares, 10, H, dim), lse.view(shares, 10, H), x.sinks)
    torch.testing.assert_close(x.out.double(), out.view(x.out.shape), rtol=2e-3, atol=2e-3)
    assert x.lse is not None
    lse_out = x.lse if varlen else x.lse.transpose(1, 2)
    torch.testing.assert_close(lse_out.double(), whole.view(lse_out.shape), rtol=1e-5, atol=1e-5)
    assert scratch[launch.floats :].isnan().all(), "nothing is read or written behind the shares"


def test_nobody_asks_for_the_log_sum_exp():
    plan, x = plan_of(3, False, 64), operands(False, 64, "bshd", False)._replace(lse=None)
    launch = attention_launch.MergeLaunch(plan, layout_of(x))
    scratch = torch.zeros(launch.floats)
    launch(0, launch.scratch(scratch), x)
    assert (x.out == 0).all()


def test_what_is_not_split_needs_no_scratch():
    x = operands(False, 64, "bshd", False)
    assert attention_launch.MergeLaunch(plan_of(1, False, 64), layout_of(x)).floats == 0
