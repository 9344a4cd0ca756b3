"""The arguments of all backends' attention kernels that a plan and a layout decide."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tilestream.launch.pack import Pack, named
from tilestream.plan.attention_plan import AttentionPlan
from tilestream.plan.attention_problem import AttentionProblem

_LOG2_E = math.log2(math.e)

Strides = tuple[int, int, int]
ScaleStrides = tuple[int, int]

#: The arguments of each call, in order.
GIVEN = (
    "q", "k", "v", "out", "lse", "sinks", "scale_q", "scale_k", "scale_v", "cu_seqlens_q", "cu_seqlens_k", "seqlens_k",
    "block_table", "starts", "order", "counters", "log", "base", "reset", "scale", "softcap_scale",
)  # fmt: skip


class KeyGate(NamedTuple):
    """A launch's arguments for keys that arrive, in addition to `GIVEN`."""

    #: signals, quarantine, bounds: the words; for ragged chunks the first row of each, and the end of the last.
    signals: Any = None
    quarantine: Any = None
    bounds: Any = None
    #: records, claims: the device's error channel.
    records: Any = None
    claims: Any = None
    #: epoch, key: the signals' epoch and key.
    epoch: int = 1
    key: int = 0
    allowed: int = 0  # nanoseconds
    op: int = 0  # the op's number in a record


NO_KEY_GATE = KeyGate()


class AttentionLayout(NamedTuple):
    """Strides of the canonical operands, in elements; None for those that are not given."""

    #: q, k, v, out: strides from one batch (page), row and head to the next; the first is 0 for packed rows.
    q: Strides
    k: Strides
    v: Strides
    out: Strides
    lse: Strides | None = None  # likewise; None if it is not an output
    table: int = 0  # stride from one sequence's pages to the next's
    #: scale_q, scale_k, scale_v: strides from one sequence's and one head's scale to the next's; None without scales.
    scale_q: ScaleStrides | None = None
    scale_k: ScaleStrides | None = None
    scale_v: ScaleStrides | None = None


class AttentionArguments:
    """A kernel's arguments for one plan and one layout, except addresses and other arguments of a call."""

    options: dict[str, Any]  # the compiler's options

    def __init__(self, plan: AttentionPlan, layout: AttentionLayout, trace: bool = False) -> None:
        self.plan, self.layout, self._trace = plan, layout, trace

    def pack(self, kernel: Any) -> Pack:
        """The `Pack` of the kernel's arguments, for values in the order of `GIVEN`, then of a `KeyGate`."""
        fixed = {**NO_KEY_GATE._asdict(), **self._numbers(), "C": self.config()}
        return Pack(kernel, fixed, GIVEN, KeyGate._fields)

    def scales(self, scale: float) -> tuple[float, float]:
        """``scale`` and ``softcap_scale`` of `tilestream.core.attention_structs.Scores`, for the caller's ``scale``."""
        softcap = self.plan.problem.softcap
        return (softcap * _LOG2_E, scale / softcap) if softcap else (scale * _LOG2_E, 0.0)

    def config(self) -> Any:
        """The compile-time configuration: a `tilestream.kernels.attention_config.AttentionConfig`."""
        raise NotImplementedError

    def _numbers(self) -> dict[str, int]:
        """The numbers that a plan and a layout decide, by the names of the kernel's parameters."""
        plan, p, schedule, s = self.plan, self.plan.problem, self.plan.schedule, self.layout
        left, right = (side or 0 for side in p.sides)
        chunks = None if p.keys is None else p.keys.chunks
        return {
            "sequences": p.batch + 1,
            "tokens_q": p.tokens_q,
            "tokens_k": p.tokens_k,
            "seqlen_q": p.seqlen_q,
            "seqlen_k": p.seqlen_k,
            "head_tiles": max(1, p.heads_q // plan.pack),
            "q_heads_per_kv": max(1, p.ratio // plan.pack),
            "shares": plan.shares,
            "left": left,
            "right": right,
            "queues": schedule.queues,
            "tiles": schedule.full_tiles,
            "num_m": schedule.grid.num_m,
            "num_n": schedule.grid.num_n,
            "group": plan.group,
            "rows_per_chunk": (chunks and chunks.rows_per_chunk) or 1,
            "chunks": chunks.count if chunks else 0,
            "table_stride": s.table,
            "pages": p.pages,
            **named("lse_", ("batch", "row", "head"), s.lse or (0, 0, 0)),
            **named("stride_q", "brh", s.q),
            **named("stride_k", "brh", s.k),
            **named("stride_v", "brh", s.v),
            **named("stride_o", "brh", s.out),
            **named("stride_sq", "bh", s.scale_q or (0, 0)),
            **named("stride_sk", "bh", s.scale_k or (0, 0)),
            **named("stride_sv", "bh", s.scale_v or (0, 0)),
        }


def share_layout(problem: AttentionProblem, layout: AttentionLayout) -> AttentionLayout:
    """The layout of the shares' outputs and log-sum-exps: contiguous, with ``shares`` times the sequences (rows)."""
    p = problem
    row = p.heads_q * p.head_dim_v
    out, lse = (p.seqlen_q * row, row, p.head_dim_v), (p.seqlen_q * p.heads_q, p.heads_q, 1)
    if p.varlen:
        out, lse = (0, *out[1:]), (0, *lse[1:])
    return layout._replace(out=out, lse=lse)
