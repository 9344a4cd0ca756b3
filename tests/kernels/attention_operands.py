"""A case of `attention_maths` as an op hands it to a launch: operands whose outputs are NaN, and their problem."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from attention_maths import Call, Case, call_of
from error_rule import FP8, nans
from tilestream.arrival.flat import FlatArrival
from tilestream.core.chunks import Chunks
from tilestream.core.integers import cdiv
from tilestream.core.operands import AttentionOperands
from tilestream.ops.attention_library import lse_shape
from tilestream.ops.attention_operands import Settings, problem_of
from tilestream.plan.attention_plan import AttentionPlan
from tilestream.plan.attention_problem import AttentionProblem


@dataclass(frozen=True)
class Prepared:
    """A case, its operands and its problem."""

    call: Call
    operands: AttentionOperands
    problem: AttentionProblem

    def check(self) -> None:
        """Assert the error rule for the outputs."""
        assert self.operands.lse is not None
        self.call.check(self.operands.out, self.operands.lse)


def prepared(
    case: Case, chunks: Chunks | None = None, *, seed: int = 0, max_seqlen_k: int = 0, scaled: bool = True,
    **features: Any,
) -> Prepared:  # fmt: skip
    """A case. ``chunks``: of keys that arrive. ``scaled``: whether 8-bit operands have scales. ``features``: more."""
    call = call_of(case, seed=seed)
    if features.pop("sinks", False):
        call.options["sinks"] = torch.randn(case.heads[0], generator=torch.Generator().manual_seed(seed))
    call.options |= features
    if not scaled:
        call.scales = None
        call.tensors = {name: x for name, x in call.tensors.items() if not name.startswith("scale")}
    t = AttentionOperands(**call.tensors, sinks=call.options.get("sinks"))
    causal, (left, right) = call.options.get("causal", False), call.options.get("window", (None, None))
    scale = call.options.get("scale", t.q.shape[-1] ** -0.5)
    settings = Settings(
        bool(causal), "top_left" if causal == "top_left" else "bottom_right", -1 if left is None else left,
        -1 if right is None else right, call.options.get("softcap", 0.0), scale, max_seqlen_k=max_seqlen_k,
        return_lse=True,
    )  # fmt: skip
    keys = None
    if chunks is not None:
        keys = FlatArrival(0, 1, 0, chunks.count, chunks.rows_per_chunk, chunks.bounds, None)
    out = nans(*t.q.shape[:-1], t.v.shape[-1], dtype=torch.bfloat16 if case.dtype in FP8 else case.dtype)
    operands = t._replace(out=out, scale=scale, lse=nans(*lse_shape(t)))
    return Prepared(call, operands, problem_of(t, settings, keys))


def listed(plan: AttentionPlan, x: AttentionOperands) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``(starts, order)`` as `tilestream.kernels.device.varlen.list_sequences` makes them of packed queries."""
    p = plan.problem
    if x.cu_seqlens_q is None:
        return None, None
    queries = [*x.cu_seqlens_q.diff().tolist(), p.tokens_q - int(x.cu_seqlens_q[-1])]
    keys = [p.seqlen_k] * p.batch if x.cu_seqlens_k is None else x.cu_seqlens_k.diff().tolist()
    if x.seqlens_k is not None:
        keys = [min(a, b) for a, b in zip(keys, x.seqlens_k.tolist(), strict=True)]
    keys = [*keys, 0]
    order = sorted(range(p.batch + 1), key=lambda i: (-keys[i], i))
    starts = [0]
    for i in order:
        starts.append(starts[-1] + plan.shares * cdiv(queries[i], plan.positions) * (p.heads_q // plan.pack))
    assert starts[-1] <= plan.schedule.full_tiles, "the grid holds the list"
    return torch.tensor(starts, dtype=torch.int32), torch.tensor(order, dtype=torch.int32)


def joined(
    outs: torch.Tensor, lses: torch.Tensor, sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What shares of keys make together, in float64: ``[shares, rows, heads, D]`` and ``[shares, rows, heads]``."""
    lses = lses.double()
    whole = (lses if sinks is None else torch.cat([lses, sinks.double().expand(1, *lses.shape[1:])])).logsumexp(0)
    weights = torch.where(whole == -math.inf, 0.0, (lses - whole).exp())
    return (weights[..., None] * outs).sum(0), whole
