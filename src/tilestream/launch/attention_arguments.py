"""What every backend's attention kernel is launched with, as far as a plan and a layout decide it.

No torch here: the compile gate, and whoever fills a cache for a machine with a GPU, make the same arguments from
shapes.
"""

from __future__ import annotations

import inspect
import math
from operator import itemgetter
from typing import Any, NamedTuple

from tilestream.plan.attention_plan import AttentionPlan
from tilestream.plan.attention_problem import AttentionProblem

_LOG2_E = math.log2(math.e)

Strides = tuple[int, int, int]
ScaleStrides = tuple[int, int]

#: What a launch is given, in order: tensors, addresses, tensor maps, or whatever stands in for them; then numbers.
GIVEN = (
    "q", "k", "v", "out", "lse", "sinks", "scale_q", "scale_k", "scale_v", "cu_seqlens_q", "cu_seqlens_k", "seqlens_k",
    "block_table", "starts", "order", "counters", "log", "base", "reset", "scale", "softcap_scale",
)  # fmt: skip


class KeyGate(NamedTuple):
    """What a launch is given of keys that arrive, beside `GIVEN`.

    Attributes
    ----------
    signals, quarantine, bounds
        The words; the first row of each chunk and the row behind the last, where chunks are ragged.
    records, claims
        The device's error channel.
    epoch, key
        Of the signals.
    allowed
        Nanoseconds.
    op
        The op's number in a record.
    """

    signals: Any = None
    quarantine: Any = None
    bounds: Any = None
    records: Any = None
    claims: Any = None
    epoch: int = 1
    key: int = 0
    allowed: int = 0
    op: int = 0


NO_KEY_GATE = KeyGate()


class AttentionLayout(NamedTuple):
    """Strides of the canonical operands, in elements, and which of them there are.

    Attributes
    ----------
    q, k, v, out
        From one batch (page), row and head to the next; where rows are packed, the first is 0.
    lse
        Likewise; None where it is no output.
    table
        From one sequence's pages to the next's.
    scale_q, scale_k, scale_v
        From one sequence's scale, and one head's, to the next's; None where there is none.
    """

    q: Strides
    k: Strides
    v: Strides
    out: Strides
    lse: Strides | None = None
    table: int = 0
    scale_q: ScaleStrides | None = None
    scale_k: ScaleStrides | None = None
    scale_v: ScaleStrides | None = None


class Pack:
    """A kernel's arguments in its order: what it is given call by call, and what is fixed.

    The kernel's signature is the only list of its parameters: each is found here by its name.

    Parameters
    ----------
    kernel
        The jitted kernel. A tensor map ``x_map`` of it is given as ``x``.
    fixed
        Values by name. Names that the kernel does not have, here and in `GIVEN`, are left out.
    """

    def __init__(self, kernel: Any, fixed: dict[str, Any]) -> None:
        place = {name: i for i, name in enumerate((*GIVEN, *KeyGate._fields, *fixed))}
        names = inspect.signature(kernel.fn).parameters
        self._in_order = itemgetter(*(place[name.removesuffix("_map")] for name in names))
        self._fixed = tuple(fixed.values())

    def __call__(self, given: tuple[Any, ...], gate: KeyGate = NO_KEY_GATE) -> tuple[Any, ...]:
        """All arguments, of values in the order of `GIVEN`."""
        return self._in_order((*given, *gate, *self._fixed))  # type: ignore[no-any-return]


def numbers(plan: AttentionPlan, layout: AttentionLayout) -> dict[str, int]:
    """The numbers of `Extents`, `Work`, `Incoming` and `Rows` that a plan and a layout decide, by name."""
    p, schedule, lse = plan.problem, plan.schedule, layout.lse or (0, 0, 0)
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
        "lse_batch": lse[0],
        "lse_row": lse[1],
        "lse_head": lse[2],
        "table_stride": layout.table,
        "pages": p.pages,
    }


def config_fields(plan: AttentionPlan, trace: bool = False) -> dict[str, Any]:
    """The fields of `tilestream.kernels.attention_config.AttentionConfig`."""
    p, schedule = plan.problem, plan.schedule
    return {
        "ROWS": plan.block[0],
        "BLOCK": plan.block[1],
        "PACK": plan.pack,
        "KIND": schedule.kind,
        "SPLIT": schedule.split,
        "STEAL": schedule.queues > 1,
        "ORDER": schedule.raster.order,
        "PAGE": p.page_size,
        "SPLIT_KEYS": plan.shares > 1,
        "TOP_LEFT": p.alignment == "top_left",
        "LEFT": p.left is not None,
        "RIGHT": p.right is not None,
        "CAPPED": p.softcap > 0,
        "KEYS": chunk_kind(p),
        "TRACE": trace,
    }


def scales_of(problem: AttentionProblem, scale: float) -> tuple[float, float]:
    """``scale`` and ``softcap_scale`` of `tilestream.core.attention_structs.Scores`, for a scale of scores."""
    cap = problem.softcap
    return (cap * _LOG2_E, scale / cap) if cap else (scale * _LOG2_E, 0.0)


def chunk_kind(problem: AttentionProblem) -> str:
    """How keys arrive: ``"none"`` (they are there), in ``"uniform"`` chunks, or in ``"ragged"`` ones."""
    return "none" if problem.keys is None else "uniform" if problem.keys.chunks.rows_per_chunk else "ragged"


def share_layout(problem: AttentionProblem, layout: AttentionLayout) -> AttentionLayout:
    """How the shares' outputs and log-sum-exps lie: as contiguous ones of ``shares`` times as many sequences (rows)."""
    p = problem
    row = p.heads_q * p.head_dim_v
    out, lse = (p.seqlen_q * row, row, p.head_dim_v), (p.seqlen_q * p.heads_q, p.heads_q, 1)
    if p.varlen:
        out, lse = (0, *out[1:]), (0, *lse[1:])
    return layout._replace(out=out, lse=lse)
