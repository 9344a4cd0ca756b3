"""Shares of keys joined, and two attentions, in Triton's interpreter: by the formula, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from attention_operands import joined

from error_rule import passes
from tilestream.core.gpu_specs import named
from tilestream.core.operands import AttentionOperands, MergeOperands
from tilestream.launch.portable import attention_arguments, attention_launch
from tilestream.launch.portable.attention_arguments import pair_arguments
from tilestream.ops.attention_gpu import layout_of
from tilestream.ops.attention_merge import formula
from tilestream.plan.attention_plan import of_candidate
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.policy.hopper_attention import candidates

H = 6


def plan_of(shares: int, varlen: bool, dim: int):
    more = {"varlen": True, "tokens_q": 10} if varlen else {}
    problem = AttentionProblem(2, H, 2, 5, 700, 64, dim, dtype="float16", return_lse=True, **more)
    found = next(candidates(problem, named("h100"), 132, kind="dynamic", splits=shares))
    return of_candidate(problem, named("h100"), "hopper", found, "a test's", ())


def operands(varlen: bool, dim: int, layout: str, sinks: bool | float | torch.dtype) -> AttentionOperands:
    rows = (10,) if varlen else (2, 5)
    q = torch.zeros(*rows, H, 64, dtype=torch.float16)
    k, v = torch.zeros(2, 700, 2, 64, dtype=torch.float16), torch.zeros(2, 700, 2, dim, dtype=torch.float16)
    out = torch.full((*rows, H, dim), math.nan, dtype=torch.float16)
    if layout == "bhsd":
        out = torch.full((2, H, 5, dim), math.nan, dtype=torch.float16).transpose(1, 2)
    lse = torch.full((10, H) if varlen else (2, H, 5), math.nan)
    given = torch.full((H,), float(sinks)) if isinstance(sinks, float) else torch.randn(H)
    given = given.to(sinks) if isinstance(sinks, torch.dtype) else given
    return AttentionOperands(q, k, v, out, 0.1, lse, given if sinks else None)


# 100: above all scores, and beyond what exp takes
@pytest.mark.parametrize("sinks", [False, True, 100.0, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "packed"])
@pytest.mark.parametrize(("shares", "dim", "many"), [(2, 64, 0), (7, 40, 0), (35, 16, 0), (2, 128, 60), (7, 40, 60)])
def test_shares_are_joined(shares, dim, many, layout, sinks, monkeypatch):
    """``many``: so many rows are many, of which a program adds several; 60 are no multiple of 8 or 16."""
    if many:
        monkeypatch.setattr(attention_arguments, "MANY_ROWS", many)
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


# Two attentions -------------------------------------------------------------------------------------------------------


def placed(shape: tuple[int, ...], how: str, dtype: torch.dtype) -> torch.Tensor:
    """NaN of such a shape, and around it: ``plain``, ``transposed`` (two extents changed places), or ``wide`` rows."""
    if how == "transposed":
        return placed((shape[0], shape[2], shape[1], *shape[3:]), "wide", dtype).transpose(1, 2)
    wide = shape if how == "plain" else (*shape[:-1], shape[-1] + 3)
    return torch.full(wide, math.nan, dtype=dtype)[..., : shape[-1]]


def pair(shape: tuple[int, ...], how: str = "plain", dtypes: tuple[torch.dtype, ...] = (torch.float16,) * 2):
    """Random parts, of which some rows saw nothing; ``how`` of the first one and of the output."""
    plain = "plain" if how == "wide" else "wide" if len(shape) == 3 else "transposed"
    x = MergeOperands(
        placed(shape, how, dtypes[0]), placed(shape[:-1], how if len(shape) == 4 else "plain", torch.float32),
        placed(shape, plain, dtypes[1]), placed(shape[:-1], "wide", torch.float32),
        placed(shape, how, dtypes[0]), placed(shape[:-1], "wide", torch.float32),
    )  # fmt: skip
    for one in x[:4]:
        one.copy_(torch.randn(one.shape))
    for o, lse, share in ((x.o_a, x.lse_a, 0.3), (x.o_b, x.lse_b, 0.5)):
        lse.mul_(5).masked_fill_(torch.rand(lse.shape) < share, -math.inf)
        o[lse == -math.inf] = math.nan  # which does not count
    return x


@pytest.mark.parametrize(
    ("shape", "how", "dtypes"),
    [
        ((2, 5, 6, 64), "plain", (torch.float16,) * 2),
        ((2, 5, 6, 64), "transposed", (torch.bfloat16,) * 2),
        ((3, 7, 5, 40), "wide", (torch.float32,) * 2),
        ((29, 6, 128), "plain", (torch.bfloat16, torch.float32)),
        ((29, 6, 72), "wide", (torch.float32, torch.float16)),
        ((1, 1, 1, 1), "transposed", (torch.float16,) * 2),
        ((1, 33, 1, 264), "transposed", (torch.float16,) * 2),
        ((3, 2, 600), "plain", (torch.float32,) * 2),
    ],
    ids=str,
)
def test_two_attentions_are_joined(shape, how, dtypes):
    x = pair(shape, how, dtypes)
    attention_launch.PairLaunch(x)(x)
    finer = formula(*(one.double() for one in x[:4]))
    by_torch = formula(*x[:4])
    assert passes(x.out, finer[0], by_torch[0])
    assert torch.equal(x.lse == -math.inf, finer[1] == -math.inf)
    assert passes(x.lse.clamp_min(-99), finer[1].clamp_min(-99), by_torch[1].clamp_min(-99))
    for one in (x.out, x.lse):
        around = torch.full_like(one, 0.0)
        one.copy_(around)
        whole = torch.empty(0, dtype=one.dtype).set_(one.untyped_storage())
        assert int((~whole.isnan()).sum()) == one.numel(), "nothing is written around an output"


def test_a_part_that_saw_nothing_leaves_the_others_bits():
    x = pair((29, 6, 40))
    for o, lse in ((x.o_a, x.lse_a), (x.o_b, x.lse_b)):
        o.copy_(torch.randn(o.shape))
        lse.copy_(300 * torch.randn(lse.shape))  # beyond what exp takes
    x.o_b.fill_(math.nan)
    x.lse_b.fill_(-math.inf)
    attention_launch.PairLaunch(x)(x)
    assert torch.equal(x.out, x.o_a)
    assert torch.equal(x.lse, x.lse_a)
    x.lse_a.fill_(-math.inf)
    attention_launch.PairLaunch(x)(x)
    assert not x.out.any()
    assert (x.lse == -math.inf).all()


def test_nan_and_inf_of_a_part_that_counts_are_the_wholes():
    x = pair((7, 2, 16))
    for one in (x.o_a, x.o_b, x.lse_a, x.lse_b):
        one.fill_(1.0)
    x.o_a[0] = math.nan
    x.o_b[1, :, 3] = math.inf
    x.lse_a[2] = math.nan
    x.lse_b[3] = math.inf
    attention_launch.PairLaunch(x)(x)
    out, lse = formula(*x[:4])
    assert out[:4].isnan().any(-1).tolist() == [[True] * 2, [False] * 2, [True] * 2, [True] * 2]
    torch.testing.assert_close(x.out, out, equal_nan=True)
    torch.testing.assert_close(x.lse, lse, equal_nan=True)


@pytest.mark.parametrize(
    ("strides", "align"), [((1024, 64, 8), 8), ((1024, 0, 4), 4), ((1024, 66, 0), 2), ((1024, 65, 64), 1)]
)
def test_strides_are_in_units_that_all_are_multiples_of(strides, align):
    grid, numbers = pair_arguments((3, 5, 7), 64, (strides, (0, 0, 64), (0, 8, 64)), ((1, 2, 3),) * 3)
    assert grid == (4, 1, 1)
    assert numbers[:3] == (105, 5, 7)
    assert [align * step for step in numbers[3:12]] == [*strides, 0, 0, 64, 0, 8, 64]
    assert numbers[12:] == ((1, 2, 3) * 3 + (64, 32, 64, align))
