"""Launches attention whose values are taken in strips of columns: `tilestream.kernels.portable.attention_strips`."""

from __future__ import annotations

import functools

import torch

from tilestream.arrival.flat import Awaited
from tilestream.core.operands import AttentionOperands
from tilestream.launch.attention_arguments import AttentionLayout
from tilestream.launch.compiling import side_by_side
from tilestream.launch.hopper.strip_arguments import Scratch, StripArguments
from tilestream.launch.launch import Kernel, Launch, Probe
from tilestream.launch.portable.attention_launch import given_to
from tilestream.launch.trace import SpanLog
from tilestream.plan.attention_plan import AttentionPlan
from tilestream.plan.policy.hopper_strips import scratch_of
from tilestream.runtime.device_workspace import Words


class StripLaunch(Launch):
    """The three launches for one plan and one layout of operands at multiples of 16 bytes."""

    def __init__(self, plan: AttentionPlan, layout: AttentionLayout) -> None:
        self._sizes = scratch_of(plan)
        super().__init__(plan, counts=True, floats=sum(self._sizes))
        self._arguments = StripArguments(plan, layout)
        self._dtype = getattr(torch, plan.problem.dtype)
        self._kernels = [
            (Kernel(kernel, grid, options), self._arguments.pack(kernel))
            for kernel, grid, options in self._arguments.kernels()
        ]
        self._compiled = False

    def scratch(self, partials: torch.Tensor) -> Scratch:
        """The parts of a launch's partials."""
        parts = Scratch(*partials[: sum(self._sizes)].split(self._sizes))
        return parts._replace(weights=parts.weights.view(self._dtype))

    def issue(
        self, stream: int, x: AttentionOperands, words: Words, awaited: Awaited | None, probe: Probe | SpanLog | None
    ) -> None:
        """See `Launch.issue`."""
        assert words.partials is not None
        given = (*given_to(x, None, None, None), words.base, words.reset, *self._arguments.scales(x.scale))
        scratch = self.scratch(words.partials)
        if not self._compiled:
            steps = [(kernel.compile, pack(given, scratch)) for kernel, pack in self._kernels]
            side_by_side(*[functools.partial(compiles, filled) for compiles, filled in steps])
            self._compiled = True
        for kernel, pack in self._kernels:
            kernel(stream, pack((*kernel.take(given),), (*kernel.take(scratch),)))
