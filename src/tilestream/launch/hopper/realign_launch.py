"""Launches the copies of operands ahead of a product: see `tilestream.plan.realign`."""

from __future__ import annotations

import torch

from tilestream.core.operands import GemmOperands
from tilestream.kernels.portable.realign import realign
from tilestream.launch.gemm_arguments import Layout
from tilestream.launch.hopper.realign import Copy, RealignArguments
from tilestream.launch.launch import Kernel
from tilestream.plan.plan import Plan


class Realign(RealignArguments):
    """The copies of a plan's operands, with one launch. Parameters and attributes as of `RealignArguments`."""

    def __init__(self, plan: Plan, layout: Layout, before: int, aligned: tuple[bool, bool]) -> None:
        super().__init__(plan, layout, before, aligned)
        self._kernel = Kernel(realign, (self.programs, 1, 1))

    def __call__(self, stream: int, x: GemmOperands, partials: torch.Tensor) -> GemmOperands:
        """Launch on ``stream``; the operands with the copies, which the next launch on it can read."""
        a, b = self.copies.get("a"), self.copies.get("b")
        given = [None if a is None else x.a, None if b is None else x.b, partials]
        self._kernel(stream, self.fill(*self._kernel.take(given)))
        memory = partials.view(torch.int8)
        return x._replace(a=_copied(memory, a, x.a), b=_copied(memory, b, x.b))


def _copied(memory: torch.Tensor, one: Copy | None, operand: torch.Tensor) -> torch.Tensor:
    """The copy of an operand; the operand itself where it is not copied."""
    if one is None:
        return operand
    strides = one.strides if operand.dim() == 3 else one.strides[1:]
    return memory[one.begin : one.begin + one.bytes].view(operand.dtype).as_strided(operand.shape, strides)
