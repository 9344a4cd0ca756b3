"""The arguments of the kernels that take attention's values in strips, which a plan and a layout decide."""

from __future__ import annotations

from typing import Any, NamedTuple

from tilestream.core.integers import cdiv
from tilestream.kernels.hopper.attention_strips import chain_strips, weigh_blocks
from tilestream.kernels.portable.attention_strips import score_blocks
from tilestream.launch.attention_arguments import GIVEN, AttentionLayout
from tilestream.launch.pack import Pack
from tilestream.launch.portable.attention_arguments import AttentionArguments
from tilestream.plan.attention_plan import AttentionPlan
from tilestream.plan.policy.hopper_strips import copied_rows

#: Registers of a thread of the second launch, of which four programs run on an SM at a time, and of the third one.
REGISTERS, CHAIN_REGISTERS = 128, 160


class Scratch(NamedTuple):
    """A launch's scratch: see `tilestream.kernels.portable.attention_strips`."""

    partials: Any  # the scores
    maxima: Any
    weights: Any
    rescales: Any
    sums: Any
    tops: Any


class StripArguments(AttentionArguments):
    """The arguments of the three kernels. A launch gives operands, its `Scratch` and the scale of scores."""

    def __init__(self, plan: AttentionPlan, layout: AttentionLayout) -> None:
        super().__init__(plan, layout)
        p = plan.problem
        self.blocks = cdiv(p.seqlen_k, plan.block[1])
        self.tiles = p.batch * p.heads_q // plan.pack
        self.strip = p.head_dim_v // plan.strips
        self.copied = copied_rows(p, plan.pack)

    def pack(self, kernel: Any) -> Pack:
        """The `Pack` of a kernel's arguments, for values in the order of `GIVEN`, then of `Scratch`."""
        fixed = {**self._numbers(), "blocks": self.blocks, "STRIP": self.strip, "C": self.config()}
        fixed |= {"STAGES": self.plan.stages, "COPIED": self.copied}
        return Pack(kernel, fixed, GIVEN, Scratch._fields)

    def kernels(self) -> list[tuple[Any, tuple[int, int, int], dict[str, int]]]:
        """Each kernel with its grid and the compiler's options, in the order of launches."""
        a_block, a_strip = (self.blocks, self.tiles, 1), (self.plan.strips, self.tiles, 1)
        four = {"num_warps": 4, "launch_pdl": True}
        # A program of the third launch begins beside those of the second, if there are registers left for it.
        return [
            (score_blocks, a_block, four), (weigh_blocks, a_block, four | {"maxnreg": REGISTERS}),
            (chain_strips, a_strip, four | {"maxnreg": CHAIN_REGISTERS}),
        ]  # fmt: skip
