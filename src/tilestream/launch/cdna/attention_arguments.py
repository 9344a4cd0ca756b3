"""The arguments of `tilestream.kernels.cdna.attention.attend` that a plan and a layout decide."""

from __future__ import annotations

from typing import Any

from tilestream.kernels.attention_config import CdnaAttentionConfig, Columns
from tilestream.launch.attention_arguments import AttentionArguments, AttentionLayout
from tilestream.launch.cdna.arguments import VERSION, vector_columns
from tilestream.plan.attention_plan import AttentionPlan
from tilestream.plan.policy.cdna_attention import ROWS, Tile, instruction, lane_bytes, parts_of, swizzles, turned
from tilestream.plan.policy.cdna_tiles import REACH
from tilestream.plan.problem import ITEMSIZE


class CdnaAttentionArguments(AttentionArguments):
    """See `AttentionArguments`.

    Parameters
    ----------
    aligned
        Whether the output's address is a multiple of 16.

    Attributes
    ----------
    tile
        The plan's tile; copies go through registers if those that bypass them cannot reach the operands.
    keys, values
        Parts of the columns of queries and keys, and of values.
    """

    def __init__(self, plan: AttentionPlan, layout: AttentionLayout, aligned: bool = True) -> None:
        super().__init__(plan, layout)
        self._aligned = aligned
        p = plan.problem
        self.keys, self.values = (parts_of(x, plan.device.arch) for x in (p.head_dim, p.head_dim_v))
        block = plan.block[1]
        self._far_q = self._far(layout.q, plan.positions, self.keys.columns)
        rows = (layout.k, self.keys.columns), (layout.v, self.values.columns)
        self._far_keys = any(self._far((0, strides[1], 0), block, columns) for strides, columns in rows)
        gathered = 0 < p.page_size < block
        whole = self.keys.rest == self.keys.width
        #: Copies past the registers cover a buffer's range, need one origin for all rows of a block, and cannot write
        #: zeros past a head's last column.
        self.direct = plan.variant == "direct" and whole and not (self._far_q or self._far_keys or gathered)
        self.tile = Tile(0, plan.warps, block, plan.stages, "direct" if self.direct else "staged", 1.0)
        self.options = {"num_warps": plan.warps, "waves_per_eu": self.tile.waves}

    def _far(self, strides: tuple[int, int, int], rows: int, columns: int) -> bool:
        """Whether a tile exceeds the range of a buffer's offsets."""
        size = ITEMSIZE[self.plan.problem.dtype]
        return ((rows - 1) * strides[1] + self.plan.pack * strides[2] + columns) * size > REACH

    def config(self) -> CdnaAttentionConfig:
        """The compile-time configuration."""
        plan, p, tile, keys, values = self.plan, self.plan.problem, self.tile, self.keys, self.values
        arch = plan.device.arch
        swizzle = swizzles(tile, keys, values, arch)

        def columns(parts: Any, how: Any, rows: int) -> Columns:
            lane = lane_bytes(rows, parts.width, tile.warps, arch) // 2 if self.direct else 0
            return Columns(parts.parts, parts.width, parts.rest, (how.vector, how.every, how.period), lane)

        return CdnaAttentionConfig.of(
            plan,
            self.layout,
            TRACE=self._trace,
            ROWS=ROWS * plan.warps,
            STAGES=tile.stages,
            DIRECT=self.direct,
            Q=columns(keys, swizzle.q, tile.rows),
            K=columns(keys, swizzle.k, tile.block),
            V=columns(values, swizzle.v, tile.block),
            TRANSPOSED_V=turned(arch, tile.copies),
            VERSION=VERSION[arch],
            SHAPE=instruction(arch),
            XCDS=plan.device.xcds,
            Q_64BIT=self._far_q,
            KEYS_64BIT=self._far_keys,
            OUT_64BIT=self._far(self.layout.out, plan.positions, values.columns),
            VECTOR_OUT=vector_columns((*self.layout.out, 1), p.head_dim_v, self._aligned),
        )
