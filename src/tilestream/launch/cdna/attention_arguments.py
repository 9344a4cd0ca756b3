"""What `tilestream.kernels.cdna.attention.attend` is launched with: the part that a plan and a layout decide.

No torch here, as in `tilestream.launch.portable.attention_arguments`, whose `AttentionLayout` it takes.
"""

from __future__ import annotations

import math
from typing import Any

from tilestream.launch.cdna.arguments import VERSION, grain
from tilestream.launch.portable.attention_arguments import AttentionLayout
from tilestream.plan.attention_plan import AttentionPlan
from tilestream.plan.policy.cdna_attention import ROWS, Tile, instruction, lane_bytes, parts_of, swizzles, turned
from tilestream.plan.policy.cdna_tiles import REACH
from tilestream.plan.problem import ITEMSIZE

_LOG2_E = math.log2(math.e)


class CdnaAttentionArguments:
    """The kernel's arguments for one plan and one layout, but for addresses and what changes from call to call.

    Parameters
    ----------
    aligned
        Whether the output's address is a multiple of 16.

    Attributes
    ----------
    tile
        The plan's, as it is launched: what copies past the registers do not reach goes through them.
    keys, values
        Parts of the columns of queries and keys, and of values.
    options
        How the kernel is compiled.
    """

    def __init__(self, plan: AttentionPlan, layout: AttentionLayout, aligned: bool = True) -> None:
        self.plan, self.layout, self._aligned = plan, layout, aligned
        p = plan.problem
        self.keys, self.values = (parts_of(x, plan.device.arch) for x in (p.head_dim, p.head_dim_v))
        block = plan.block[1]
        self._far_q = self._far(layout.q, plan.positions, self.keys.columns)
        rows = (layout.k, self.keys.columns), (layout.v, self.values.columns)
        self._far_keys = any(self._far((0, strides[1], 0), block, columns) for strides, columns in rows)
        gathered = 0 < p.page_size < block
        whole = self.keys.rest == self.keys.width
        #: Copies past the registers reach as far as a buffer does, begin where all rows of a block do, and bring what
        #: is there: the zeros behind a head's last column they do not.
        self.direct = plan.variant == "direct" and whole and not (self._far_q or self._far_keys or gathered)
        self.tile = Tile(0, plan.warps, block, plan.stages, "direct" if self.direct else "staged", 1.0)
        self.options: dict[str, Any] = {"num_warps": plan.warps, "waves_per_eu": self.tile.waves}

    def scales(self, scale: float) -> tuple[float, float]:
        """The kernel's ``scale`` and ``inner`` for a scale of scores."""
        cap = self.plan.problem.softcap
        return (cap * _LOG2_E, scale / cap) if cap else (scale * _LOG2_E, 0.0)

    def fill(self, *operands: Any) -> tuple[Any, ...]:
        """All of them, in the kernel's order.

        Parameters
        ----------
        operands
            q, k, v, out, lse, sinks, cu_queries, cu_keys, lengths, table, starts, order_of, counters (tensors,
            addresses, or whatever stands in for them), base, reset, scale, inner.
        """
        *given, scale, inner = operands
        return (*given, *self._extents(), scale, inner, *self.constants().values())

    def _far(self, strides: tuple[int, int, int], rows: int, columns: int) -> bool:
        """Whether a tile reaches beyond what a buffer's offset can say."""
        size = ITEMSIZE[self.plan.problem.dtype]
        return ((rows - 1) * strides[1] + self.plan.pack * strides[2] + columns) * size > REACH

    def _extents(self) -> tuple[int, ...]:
        plan, p, s = self.plan, self.plan.problem, self.layout
        schedule, lse = plan.schedule, s.lse or (0, 0, 0)
        return (
            p.batch + 1, p.tokens_q, p.tokens_k, p.seqlen_q, p.seqlen_k, p.heads_q // plan.pack,
            max(1, p.ratio // plan.pack), *(side or 0 for side in p.sides), p.pages, *s.q, *s.k, *s.v, *s.out,
            *lse, s.table, schedule.queues, schedule.full_tiles, schedule.grid.num_m,
            schedule.grid.num_n, plan.group,
        )  # fmt: skip

    def constants(self) -> dict[str, Any]:
        """The kernel's compile-time arguments, in its order."""
        plan, p, tile, keys, values = self.plan, self.plan.problem, self.tile, self.keys, self.values
        arch, schedule = plan.device.arch, plan.schedule
        hows = swizzles(tile, keys, values, arch)
        q, k, v = (
            lane_bytes(rows, parts.width, tile.warps, arch) // 2 if self.direct else 0
            for rows, parts in ((tile.rows, keys), (tile.block, keys), (tile.block, values))
        )
        return {
            "ROWS": ROWS * plan.warps,
            "BLOCK": tile.block,
            "STAGES": tile.stages,
            "PACK": plan.pack,
            "DIRECT": self.direct,
            "K": (*keys, (hows.k.vector, hows.k.every, hows.k.period), k),
            "V": (*values, (hows.v.vector, hows.v.every, hows.v.period), v),
            "Q_HOW": (hows.q.vector, hows.q.every, hows.q.period),
            "Q_LANE": q,
            "TURNED": turned(arch, tile.copies),
            "VERSION": VERSION[arch],
            "SHAPE": instruction(arch),
            "GROUPS": plan.device.xcds,
            "KIND": schedule.kind,
            "SPLIT": schedule.split,
            "STEAL": schedule.queues > 1,
            "ORDER": schedule.raster.order,
            "PAGE": p.page_size,
            "TOP_LEFT": p.alignment == "top_left",
            "LEFT": p.left is not None,
            "RIGHT": p.right is not None,
            "CAPPED": p.softcap > 0,
            "FAR_Q": self._far_q,
            "FAR_KEYS": self._far_keys,
            "FAR_OUT": self._far(self.layout.out, plan.positions, values.columns),
            "GRAIN": grain((*self.layout.out, 1), p.head_dim_v, self._aligned),
        }
