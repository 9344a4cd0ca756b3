"""What `tilestream.kernels.portable.attention.attention` is launched with: the part that a plan and a layout decide.

No torch here: the compile gate, and whoever fills a cache for a machine with a GPU, make the same arguments from
shapes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tilestream.launch.portable.arguments import registers
from tilestream.plan.attention_plan import AttentionPlan
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.policy.portable import has_fp8_units
from tilestream.plan.problem import ITEMSIZE

_INT31 = 2**31
_LOG2_E = math.log2(math.e)
#: Columns of a head that the matrix units take at least.
_LEAST_COLUMNS = 16

Strides = tuple[int, int, int]
ScaleStrides = tuple[int, int]


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


class KeyGate(NamedTuple):
    """What a launch is told of keys that arrive: see `tilestream.kernels.device.attention_gate`.

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


class AttentionArguments:
    """The kernels' arguments for one plan and one layout, but for addresses and what changes from call to call."""

    def __init__(self, plan: AttentionPlan, layout: AttentionLayout, trace: bool = False) -> None:
        problem, schedule = plan.problem, plan.schedule
        chunks = (
            (0, 1) if problem.keys is None else (problem.keys.chunks.count, problem.keys.chunks.rows_per_chunk or 1)
        )
        packs = max(1, problem.heads_q // plan.pack)
        left, right = (-1 if side is None else side for side in problem.sides)
        self._numbers = (
            *chunks, problem.batch, problem.seqlen_q, problem.seqlen_k, problem.tokens_q, problem.tokens_k,
            problem.pages, packs, problem.ratio, left, right, int(problem.alignment == "top_left"),
        )  # fmt: skip
        self._layout = (
            *layout.q, *layout.k, *layout.v, *layout.out, *(layout.lse or (0, 0, 0)), layout.table,
            *(layout.scale_q or (0, 0)), *(layout.scale_k or (0, 0)), *(layout.scale_v or (0, 0)),
            schedule.grid.num_m, schedule.grid.num_n, schedule.grid.tiles, schedule.queues, plan.group,
        )  # fmt: skip
        self._constants = tuple(constants(plan, layout, trace).values())
        self._cap = problem.softcap
        #: How the kernel is compiled.
        self.options = {"num_warps": plan.warps, "num_stages": plan.stages, **registers(plan.device.arch, plan.warps)}

    def fill(self, *operands: Any, gate: KeyGate = NO_KEY_GATE) -> tuple[Any, ...]:
        """All arguments of the kernel, in its order.

        Parameters
        ----------
        operands
            q, k, v, out, lse, sinks, the scales, the four lists of lengths and pages, starts, order, counters, log
            (tensors, addresses, or whatever stands in for them), base, reset, scale.
        """
        *tensors, base, reset, scale = operands
        return (
            *tensors, *gate[:5], base, reset, *gate[5:], *self._numbers, scale * _LOG2_E, self._cap, *self._layout,
            *self._constants,
        )  # fmt: skip


def constants(plan: AttentionPlan, layout: AttentionLayout, trace: bool = False) -> dict[str, Any]:
    """The kernel's compile-time arguments, in its order."""
    problem, schedule = plan.problem, plan.schedule
    block_m, block_n = plan.block
    scaled = any(strides is not None for strides in (layout.scale_q, layout.scale_k))
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_D": padded(problem.head_dim),
        "BLOCK_DV": padded(problem.head_dim_v),
        "D": problem.head_dim,
        "DV": problem.head_dim_v,
        "PACK": plan.pack,
        "ALIGN": _alignment(problem.dtype, layout.q, layout.k, layout.v),
        "ALIGN_OUT": _alignment(problem.out_dtype, layout.out),
        "WIDE": _wide(plan, layout),
        "KIND": schedule.kind,
        "SPLIT": schedule.split,
        "STEAL": schedule.queues > 1,
        "ORDER": schedule.raster.order,
        "VARLEN": problem.varlen,
        "PACKED_K": problem.tokens_k > 0,
        "LENGTHS": problem.lengths,
        "PAGE": problem.page_size,
        "LEFT": problem.left is not None,
        "RIGHT": problem.right is not None,
        "SOFTCAP": problem.softcap > 0,
        "POSITIVE": problem.positive and not scaled,
        "PRECISION": "tf32" if problem.dtype == "float32" and problem.tf32 else "ieee",
        "CONVERT": problem.dtype == "float8_e4m3fn" and not has_fp8_units(plan.device.arch),
        "KEYS": chunk_kind(problem),
        "TRACE": trace,
    }


def chunk_kind(problem: AttentionProblem) -> str:
    """How keys arrive: ``"none"``: they are there; in ``"uniform"`` chunks, or in ``"ragged"`` ones."""
    return "none" if problem.keys is None else "uniform" if problem.keys.chunks.rows_per_chunk else "ragged"


def padded(columns: int) -> int:
    """Columns of a head as the matrix units see them: a power of two."""
    return max(_LEAST_COLUMNS, 1 << (columns - 1).bit_length())


def _alignment(dtype: str, *strides: Strides) -> int:
    """Elements of 16 bytes where strides are multiples of that, else 1. Of addresses Triton finds out by itself."""
    elements = 16 // ITEMSIZE[dtype]
    return elements if all(stride % elements == 0 for each in strides for stride in each) else 1


def _wide(plan: AttentionPlan, layout: AttentionLayout) -> bool:
    """Whether an offset inside a tile or a block leaves 31 bits: never in a tensor that is not a strange view."""
    problem: AttentionProblem = plan.problem
    rows = max(plan.block)
    tiles = (layout.q, layout.out)
    return any(rows * strides[1] + problem.heads_q * strides[2] >= _INT31 for strides in (*tiles, layout.k, layout.v))


def share_layout(problem: AttentionProblem, layout: AttentionLayout) -> AttentionLayout:
    """How the shares' outputs and log-sum-exps lie: as contiguous ones of ``shares`` times as many sequences (rows)."""
    p = problem
    row = p.heads_q * p.head_dim_v
    out, lse = (p.seqlen_q * row, row, p.head_dim_v), (p.seqlen_q * p.heads_q, p.heads_q, 1)
    if p.varlen:
        out, lse = (0, *out[1:]), (0, *lse[1:])
    return layout._replace(out=out, lse=lse)
