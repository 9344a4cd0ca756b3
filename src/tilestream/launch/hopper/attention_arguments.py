"""The arguments of `tilestream.kernels.hopper.attention.attend` that a plan and a layout decide."""

from __future__ import annotations

from tilestream.kernels.attention_config import HopperAttentionConfig
from tilestream.launch.attention_arguments import AttentionArguments, AttentionLayout, share_layout
from tilestream.launch.hopper.maps import AROUND, WRAP, Map
from tilestream.plan.attention_plan import AttentionPlan
from tilestream.plan.policy import hopper_attention as policy
from tilestream.plan.problem import ITEMSIZE

#: Whether a launch may begin before the previous kernel has ended. Not with a gate: see `launch.hopper.arguments`.
_CHAINED = True


class HopperAttentionArguments(AttentionArguments):
    """See `AttentionArguments`. A launch gives tensor maps of q, k, v and out.

    Attributes
    ----------
    q, k, v, out
        Maps.
    """

    def __init__(self, plan: AttentionPlan, layout: AttentionLayout, trace: bool = False) -> None:
        p = plan.problem
        # A share's output is float32, in scratch.
        super().__init__(plan, share_layout(p, layout) if plan.shares > 1 else layout, trace)
        self._consumers = plan.block[0] // policy.ROWS
        self._chained = _CHAINED and p.keys is None
        self._ragged_q = p.varlen
        self._ragged_k = bool(p.tokens_k or p.page_size or p.lengths)
        wide = policy.width(p)
        high = min(plan.block[1], p.page_size or plan.block[1])
        tile = policy.ROWS // plan.pack, plan.pack
        keys = p.batch, p.seqlen_k, p.heads_kv
        self.q = _map(layout.q, (p.batch, p.seqlen_q, p.heads_q), p.head_dim, (*tile, wide), self._ragged_q)
        self.k = _map(layout.k, keys, p.head_dim, (high, 1, wide), self._ragged_k)
        self.v = _map(layout.v, keys, p.head_dim_v, (high, 1, policy.WIDTH_OF_VALUES), self._ragged_k)
        out = plan.shares * p.batch, p.seqlen_q, p.heads_q
        strip = policy.LINE // ITEMSIZE[policy.share_dtype(p, plan.shares)]
        self.out = _map(self.layout.out, out, p.head_dim_v, (*tile, strip), self._ragged_q)
        self.options = {"num_warps": plan.warps, "launch_pdl": self._chained}

    def _numbers(self) -> dict[str, int]:
        p, s = self.plan.problem, self.layout
        per_page, per_sequence = (1, 0) if p.page_size else (0, int(p.batch > 1 and not p.tokens_k))
        if not self._ragged_k:
            per_sequence = 0
        return super()._numbers() | {
            "batch_rows_k": s.k[0] // s.k[1] * per_sequence,
            "batch_rows_v": s.v[0] // s.v[1] * per_sequence,
            "page_rows_k": s.k[0] // s.k[1] * per_page,
            "page_rows_v": s.v[0] // s.v[1] * per_page,
        }

    def config(self) -> HopperAttentionConfig:
        """The compile-time configuration."""
        plan, p, s = self.plan, self.plan.problem, self.layout
        math_registers, load_registers = policy.registers(
            self._consumers, policy.columns_of(p), plan.block[1], p.keys is not None
        )
        convert_registers = 0
        if policy.is_8bit(p):
            math_registers, convert_registers, load_registers = policy.REGISTERS_8BIT
        return HopperAttentionConfig.of(
            plan,
            s,
            TRACE=self._trace,
            CONSUMERS=self._consumers,
            PARTS=policy.parts_of(p),
            COLUMNS=policy.columns_of(p),
            STAGES=plan.stages,
            QUERIES=policy.queries_of(p, self._consumers, plan.block[1], plan.stages, plan.device.shared, plan.shares),
            BUFFERS=policy.out_buffers(p, plan.shares),
            RAGGED_Q=self._ragged_q,
            RAGGED_K=self._ragged_k,
            ASCENDING=not plan.downwards,
            OWN=policy.leaves_out(p, self._consumers, plan.block[1], plan.pack),
            ORDERED=plan.variant == "ordered",
            CHAINED=self._chained,
            SCALED=p.scaled,
            SCALES=(*(s.scale_q or (0, 0)), *(s.scale_k or (0, 0)), *(s.scale_v or (0, 0))),
            MATH_REGISTERS=math_registers,
            LOAD_REGISTERS=load_registers,
            CONVERT_REGISTERS=convert_registers,
        )


def _map(
    strides: tuple[int, int, int], extents: tuple[int, int, int], columns: int, box: tuple[int, int, int], ragged: bool
) -> Map:
    """The map of ``[sequence, row, head, column]``, or of packed rows, which begin and end at any row."""
    batch, row, head = strides
    if ragged:
        return Map((WRAP, WRAP, policy.BEYOND, extents[2], columns), (AROUND - row, row, row, head, 1), (1, 1, *box))
    return Map((*extents, columns), (batch, row, head, 1), (1, *box))
