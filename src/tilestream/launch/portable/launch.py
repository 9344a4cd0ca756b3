"""Launches the portable GEMMs. A plan and a layout decide most arguments once; a call gives the addresses."""

from __future__ import annotations

from typing import Any

from tilestream.arrival.flat import Awaited
from tilestream.core.copy_items import NO_COPIES, CopyArguments
from tilestream.core.exchange import room
from tilestream.core.operands import GemmOperands
from tilestream.launch import launch
from tilestream.launch.gate import NO_GATE, GateArguments
from tilestream.launch.gemm_arguments import GemmArguments, Layout
from tilestream.launch.launch import Kernel, Probe
from tilestream.launch.portable.arguments import Arguments, OneTileArguments, arguments_of
from tilestream.launch.trace import SpanLog
from tilestream.plan.candidate import ONE_TILE
from tilestream.plan.plan import Plan
from tilestream.runtime.device_workspace import Words


class GemmLaunch(launch.GemmLaunch):
    """The portable GEMM for one plan, one layout of the operands and one alignment of their addresses."""

    kernel: Any = Arguments.kernel

    def __init__(self, plan: Plan, layout: Layout) -> None:
        super().__init__(plan)
        self.layout = layout
        self._grid = (plan.schedule.workers, 1, 1)
        self._arguments = self.arguments()
        self._kernel: Kernel | None = None

    def arguments(self, probe: bool = False, trace: bool = False) -> GemmArguments:
        """What the kernel is launched with, but for addresses."""
        return Arguments(self.plan, self.layout, probe, trace)

    @property
    def logging(self) -> Any:
        """The kernel that writes a log of the same plan."""
        return self.kernel

    def _made(self) -> Kernel:
        """The kernel with its grid."""
        return Kernel(self.kernel, self._grid, self._arguments.options)

    def issue(
        self, stream: int, x: GemmOperands, words: Words, awaited: Awaited | None, probe: Probe | SpanLog | None
    ) -> None:
        """See `Launch.issue`."""
        a, b, out, epilogue = x
        copies, gate = self.copies(awaited), self.gate(a.device, awaited)
        arguments, capacity = self._arguments, 0
        if probe is not None:
            traced = isinstance(probe, SpanLog)
            arguments = self.arguments(probe=not traced, trace=traced)
            capacity = 0 if isinstance(probe, SpanLog) else probe.capacity
            kernel = Kernel(self.logging, (self.plan.workers, 1, 1), arguments.options)
        else:
            kernel = self._kernel = self._kernel or self._made()
        operands = kernel.take((
            a, b, out, epilogue.bias, epilogue.residual, epilogue.scale_a, epilogue.scale_b, words.partials,
            words.counts, words.counters, self.table.on(a.device), None if probe is None else probe.words, words.base,
            words.reset, epilogue.alpha, epilogue.beta,
        ))  # fmt: skip
        if gate is not NO_GATE:
            gate = GateArguments._make(kernel.take(gate))
        if copies is not NO_COPIES:
            copies = CopyArguments._make(kernel.take(copies))
        kernel(stream, arguments.fill(tuple(operands), capacity, gate, copies=copies))


class OneTileLaunch(GemmLaunch):
    """The portable GEMM whose programs have a tile or a share each. A trace is of the other one's workers."""

    kernel: Any = OneTileArguments.kernel

    def __init__(self, plan: Plan, layout: Layout) -> None:
        super().__init__(plan, layout)
        schedule, grid = plan.schedule, plan.schedule.grid
        if (schedule.kind == "static" and grid.tiles > schedule.workers) or schedule.kind == "dynamic":
            raise ValueError(f"plan: {schedule.kind}, {grid.tiles} tiles on {schedule.workers} programs; each has one")
        if schedule.kind == "stream_k" and schedule.full_tiles:
            raise ValueError(
                f"plan: {schedule.full_tiles} of {grid.tiles} tiles are not cut; programs have shares of all tiles"
            )
        shares = (schedule.num_shares, 1, 1)
        self._grid = (grid.num_n, grid.num_m, grid.batch) if schedule.kind == "static" else shares
        if self._arguments.config.CLUSTER > 1:  # it needs no words
            self._schedule = None

    def __call__(self, x: GemmOperands, awaited: Awaited | None = None, probe: Probe | SpanLog | None = None) -> None:
        """See `Launch`. What logs is the persistent kernel, which needs words where a cluster needs none."""
        if probe is not None and self._schedule is None and self.plan.schedule.slots:
            GemmLaunch(self.plan, self.layout)(x, awaited, probe)
        else:
            super().__call__(x, awaited, probe)

    def _made(self) -> Kernel:
        """See `GemmLaunch`."""
        size, block = self._arguments.config.CLUSTER, self.plan.block
        if size == 1:
            return super()._made()
        return Kernel(self.kernel, self._grid, self._arguments.options, size, room(*block[:2]))

    @property
    def logging(self) -> Any:
        """See `GemmLaunch.logging`."""
        return GemmLaunch.kernel

    def arguments(self, probe: bool = False, trace: bool = False) -> GemmArguments:
        """See `GemmLaunch.arguments`."""
        return super().arguments(probe, trace) if probe or trace else arguments_of(self.plan, self.layout)


def launch_of(plan: Plan, layout: Layout) -> GemmLaunch:
    """The launch of a plan."""
    return (OneTileLaunch if plan.variant == ONE_TILE else GemmLaunch)(plan, layout)
