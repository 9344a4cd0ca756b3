"""Launching the portable GEMM: what a plan and a layout decide is worked out once, a call fills in the addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilestream.arrival.flat import Awaited
from tilestream.core.copy_items import CopyArguments
from tilestream.core.operands import Epilogue
from tilestream.kernels.device.jit import INTERPRETED
from tilestream.kernels.portable.gemm import gemm
from tilestream.launch.gate import NO_GATE, GateArguments
from tilestream.launch.launch import Launch, Probe, address
from tilestream.launch.launcher import watched
from tilestream.launch.portable.arguments import Arguments, Layout
from tilestream.launch.trace import SpanLog
from tilestream.plan.plan import Plan
from tilestream.runtime.device_workspace import Words


class GemmLaunch(Launch):
    """The portable GEMM for one plan, one layout of the operands and one alignment of their addresses.

    The compiled kernel is looked up by Triton at the first call and then launched directly, which takes a third of the
    time.
    """

    kernel: Any = gemm

    def __init__(self, plan: Plan, layout: Layout) -> None:
        super().__init__(plan)
        self.layout = layout
        self._arguments = self.arguments()
        self._grid = (plan.schedule.workers, 1, 1)
        self._compiled: Callable[[int, tuple[Any, ...]], None] | None = None

    def arguments(self, probe: bool = False, trace: bool = False) -> Any:
        """What the kernel is launched with, but for addresses: of another kernel that takes the same, that one's."""
        return Arguments(self.plan, self.layout, probe, trace)

    def issue(
        self, stream: int, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, epilogue: Epilogue, words: Words,
        incoming: Awaited | None, probe: Probe | SpanLog | None,
    ) -> None:  # fmt: skip
        """As `Launch.issue`."""
        copies, gate = self.copies(incoming), self.gate(a.device, incoming)
        operands = (
            a, b, out, epilogue.bias, epilogue.residual, words.partials, words.counts, words.counters,
            self.table.on(a.device), None if probe is None else probe.words, words.base, words.reset,
            epilogue.alpha, epilogue.beta,
        )  # fmt: skip
        scales = epilogue.scale_a, epilogue.scale_b
        if probe is not None:
            traced = isinstance(probe, SpanLog)
            arguments = self.arguments(probe=not traced, trace=traced)
            capacity = 0 if isinstance(probe, SpanLog) else probe.capacity
            self.kernel[self._grid](
                *arguments.fill(*operands, capacity=capacity, gate=gate, scales=scales, copies=copies),
                **arguments.options,
            )
        elif self._compiled is not None:
            # Addresses and no tensors: the launcher asks the driver about each tensor.
            if gate is not NO_GATE:
                gate = GateArguments(*map(address, gate))
            there = address(scales[0]), address(scales[1])
            made = CopyArguments(*map(address, copies))
            self._compiled(stream, self._arguments.fill(*map(address, operands), gate=gate, scales=there, copies=made))
        else:
            filled = self._arguments.fill(*operands, gate=gate, scales=scales, copies=copies)
            kernel = self.kernel[self._grid](*filled, **self._arguments.options)
            self._compiled = None if INTERPRETED else direct(kernel, self._grid)


def direct(kernel: Any, grid: tuple[int, int, int]) -> Callable[[int, tuple[Any, ...]], None]:
    """A compiled kernel's own launcher, without what Triton does around it each time."""
    run, function, metadata = kernel.run, kernel.function, kernel.packed_metadata

    def launch(stream: int, filled: tuple[Any, ...]) -> None:
        if watched():
            kernel[grid](*filled, stream=stream)
        else:
            run(*grid, stream, function, metadata, None, None, None, *filled)

    return launch
