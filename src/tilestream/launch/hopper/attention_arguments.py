"""What `tilestream.kernels.hopper.attention.attend` is launched with: the part that a plan and a layout decide.

No torch here, as in `tilestream.launch.hopper.arguments`, whose `Map` it takes.
"""

from __future__ import annotations

import math
from typing import Any

from tilestream.kernels.hopper.parts import AttentionConfig
from tilestream.launch.hopper.arguments import Map
from tilestream.launch.portable.attention_arguments import (
    NO_KEY_GATE,
    AttentionLayout,
    KeyGate,
    chunk_kind,
    share_layout,
)
from tilestream.plan.attention_plan import AttentionPlan
from tilestream.plan.policy.hopper_attention import (
    BEYOND,
    LINE,
    NARROW_REGISTERS,
    ROWS,
    WIDTH_OF_VALUES,
    columns_of,
    is_narrow,
    leaves_out,
    out_buffers,
    parts_of,
    queries_of,
    registers,
    share_dtype,
    width,
)
from tilestream.plan.problem import ITEMSIZE

#: Whether launches may begin before the kernel ahead has ended. Not with a gate: see `tilestream.kernels.hopper.gemm`.
_CHAINED = True
#: The extents of the two dimensions that bring a clipped copy's address back: more than any coordinate, less than
#: 2**31, as which kernels are passed them.
_WRAP = 2**31 - 2**16
#: A map that clips at any row has a stride of so many elements less the rows': 2**30 steps of it wrap around 64 bits.
_AROUND = 2**34
_LOG2_E = math.log2(math.e)


class HopperAttentionArguments:
    """The kernel's arguments for one plan and one layout, but for addresses and what changes from call to call.

    Attributes
    ----------
    q, k, v, out
        Maps.
    options
        How the kernel is compiled.
    """

    def __init__(self, plan: AttentionPlan, layout: AttentionLayout, trace: bool = False) -> None:
        p = plan.problem
        self.plan, self._trace = plan, trace
        #: What a share gives is float32, and lies elsewhere.
        self.layout = share_layout(p, layout) if plan.shares > 1 else layout
        self._consumers = plan.block[0] // ROWS
        self._chained = _CHAINED and p.keys is None
        self._ragged_q = p.varlen
        self._ragged_k = bool(p.tokens_k or p.page_size or p.lengths)
        wide = width(p)
        high = min(plan.block[1], p.page_size or plan.block[1])
        tile = ROWS // plan.pack, plan.pack
        keys = p.batch, p.seqlen_k, p.heads_kv
        self.q = _map(layout.q, (p.batch, p.seqlen_q, p.heads_q), p.head_dim, (*tile, wide), self._ragged_q)
        self.k = _map(layout.k, keys, p.head_dim, (high, 1, wide), self._ragged_k)
        self.v = _map(layout.v, keys, p.head_dim_v, (high, 1, WIDTH_OF_VALUES), self._ragged_k)
        out = plan.shares * p.batch, p.seqlen_q, p.heads_q
        strip = LINE // ITEMSIZE[share_dtype(p, plan.shares)]
        self.out = _map(self.layout.out, out, p.head_dim_v, (*tile, strip), self._ragged_q)
        self.options: dict[str, Any] = {"num_warps": plan.warps, "launch_pdl": self._chained}

    def scales(self, scale: float) -> tuple[float, float]:
        """The kernel's ``scale`` and ``inner`` for a scale of scores."""
        cap = self.plan.problem.softcap
        return (cap * _LOG2_E, scale / cap) if cap else (scale * _LOG2_E, 0.0)

    def fill(self, operands: tuple[Any, ...], gate: KeyGate = NO_KEY_GATE) -> tuple[Any, ...]:
        """All of them, in the kernel's order.

        Parameters
        ----------
        operands
            The maps of q, k, v and out; then lse, sinks, the scales, cu_queries, cu_keys, lengths, table, starts,
            order_of, counters, log, base, reset, scale, inner: values, or whatever stands in for them.
        """
        *given, scale, inner = operands
        keys = self.plan.problem.keys
        chunks = (1, 0) if keys is None else (keys.chunks.rows_per_chunk or 1, keys.chunks.count)
        return (*given, *self._extents(), scale, inner, *gate, *chunks, AttentionConfig(**self._constants()))

    def _extents(self) -> tuple[int, ...]:
        plan, p, s = self.plan, self.plan.problem, self.layout
        grid = plan.schedule.grid
        columns = p.heads_q // plan.pack
        per_page, per_sequence = (1, 0) if p.page_size else (0, int(p.batch > 1 and not p.tokens_k))
        if not self._ragged_k:
            per_sequence = 0
        rows = [(stride[0] // stride[1] * per_sequence, stride[0] // stride[1] * per_page) for stride in (s.k, s.v)]
        lse = s.lse or (0, 0, 0)
        return (
            p.batch + 1, p.tokens_q, p.tokens_k, p.seqlen_q, p.seqlen_k, columns, max(1, p.ratio // plan.pack),
            *(side or 0 for side in p.sides), rows[0][0], rows[1][0], rows[0][1], rows[1][1], s.table,
            lse[0], lse[2], lse[1], plan.schedule.full_tiles, grid.num_m, grid.num_n, plan.group, plan.shares,
        )  # fmt: skip

    def _constants(self) -> dict[str, Any]:
        """The kernel's compile-time arguments, in its order."""
        plan, p, s = self.plan, self.plan.problem, self.layout
        math_registers, load_registers = registers(self._consumers, columns_of(p), plan.block[1], p.keys is not None)
        convert_registers = 0
        if is_narrow(p):
            math_registers, convert_registers, load_registers = NARROW_REGISTERS
        return {
            "CONSUMERS": self._consumers,
            "PACK": plan.pack,
            "PARTS": parts_of(p),
            "BLOCK": plan.block[1],
            "COLUMNS": columns_of(p),
            "STAGES": plan.stages,
            "QUERIES": queries_of(p, self._consumers, plan.block[1], plan.stages, plan.device.shared, plan.shares),
            "BUFFERS": out_buffers(p, plan.shares),
            "KIND": plan.schedule.kind,
            "ORDER": plan.schedule.raster.order,
            "PAGE": p.page_size,
            "RAGGED_Q": self._ragged_q,
            "RAGGED_K": self._ragged_k,
            "SPLIT": plan.shares > 1,
            "TOP_LEFT": p.alignment == "top_left",
            "LEFT": p.left is not None,
            "RIGHT": p.right is not None,
            "CAPPED": p.softcap > 0,
            "OWN": leaves_out(p, self._consumers, plan.block[1], plan.pack),
            "ORDERED": plan.variant == "turns",
            "KEYS": chunk_kind(p),
            "CHAINED": self._chained,
            "TRACE": self._trace,
            "SCALED": p.scaled,
            "SCALES": (*(s.scale_q or (0, 0)), *(s.scale_k or (0, 0)), *(s.scale_v or (0, 0))),
            "MATH_REGISTERS": math_registers,
            "LOAD_REGISTERS": load_registers,
            "CONVERT_REGISTERS": convert_registers,
        }


def _map(
    strides: tuple[int, int, int], extents: tuple[int, int, int], columns: int, box: tuple[int, int, int], ragged: bool
) -> Map:
    """The map of ``[sequence, row, head, column]``, or of what begins and ends at any row."""
    batch, row, head = strides
    if ragged:
        return Map((_WRAP, _WRAP, BEYOND, extents[2], columns), (_AROUND - row, row, row, head, 1), (1, 1, *box))
    return Map((*extents, columns), (batch, row, head, 1), (1, *box))
