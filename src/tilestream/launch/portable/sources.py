"""Launches the portable grouped GEMM by source, as `tilestream.launch.portable.grouped`."""

from __future__ import annotations

from typing import Any

from tilestream.arrival.flat import Awaited
from tilestream.core.operands import GroupedOperands
from tilestream.kernels.config import PortableGroupedConfig, PortableSourcesConfig
from tilestream.kernels.portable.grouped_sources import grouped_gemm_by_source
from tilestream.launch.gate import NO_GATE, NO_PUBLISH, GateArguments, PublishArguments
from tilestream.launch.gemm_arguments import Layout
from tilestream.launch.grouped_arguments import Bias, lanes_of, problem_of
from tilestream.launch.launch import Kernel, Launch, Probe, gate_of
from tilestream.launch.portable.grouped import GroupedArguments
from tilestream.launch.trace import SpanLog
from tilestream.plan.plan import Plan
from tilestream.runtime.device_workspace import Words

#: As `tilestream.launch.portable.grouped` has it. Beside a worker's place in the sources 16 columns spill 32 bytes.
_STRIP = 8


class SourcesArguments(GroupedArguments):
    """As `GroupedArguments`; ``publishes``: whether each source's result is signalled."""

    kernel: Any = grouped_gemm_by_source
    matrices = ("a", "b", "source_counts")

    def __init__(
        self, plan: Plan, layout: Layout, bias: Bias, publishes: bool = False, trace: bool = False
    ) -> None:  # fmt: skip
        self._publishes = publishes
        super().__init__(plan, layout, bias, trace)

    def _numbers(self) -> dict[str, Any]:
        problem = problem_of(self.plan)
        mine = {"num_sources": problem.sources, "place_rows": problem.m // problem.sources, "pivot": problem.pivot}
        return super()._numbers() | mine

    def _config(self, **logs: bool) -> PortableGroupedConfig:
        problem, plan = problem_of(self.plan), self.plan
        # A lane for each thread at least: a word that several threads read might change between their reads.
        amd = plan.device.arch.startswith("gfx")
        threads = plan.warps * (64 if amd else 32)
        grouped = super()._config(**logs)
        own = vars(grouped) | {
            "STRIP": grouped.STRIP if problem.plain else _STRIP,
            "LANES": max(lanes_of(problem.groups), threads),
            "ROW_CHUNKS": "sources" if problem.arrives else "none",
            "PUBLISHES": self._publishes,
            "PAST_CACHES": amd,
        }
        return PortableSourcesConfig(**own)


class SourcesLaunch(Launch):
    """The portable grouped GEMM by source for one plan, one layout of the operands and one alignment of addresses."""

    def __init__(self, plan: Plan, layout: Layout, bias: Bias, publishes: bool = False) -> None:
        super().__init__(plan, True)
        grid = (plan.schedule.workers, 1, 1)
        self._made = {traced: SourcesArguments(plan, layout, bias, publishes, traced) for traced in (False, True)}
        self._kernels = {
            traced: Kernel(grouped_gemm_by_source, grid, one.options) for traced, one in self._made.items()
        }

    def issue(
        self, stream: int, x: GroupedOperands, words: Words, awaited: Awaited | None, probe: Probe | SpanLog | None
    ) -> None:
        """See `Launch.issue`."""
        e, gate, traced = x.epilogue, gate_of(x.a.device, awaited, "row"), probe is not None
        kernel, arguments = self._kernels[traced], self._made[traced]
        publish = NO_PUBLISH if e.publish is None else e.publish
        operands = kernel.take((
            x.a, x.b, x.offsets, x.out, e.bias, None, e.scale_a, e.scale_b, words.partials, words.counts,
            words.counters, None, None if probe is None else probe.words, words.base, words.reset, 1.0, 1.0,
        ))  # fmt: skip
        if gate is not NO_GATE:
            gate = GateArguments._make(kernel.take(gate))
        publish = PublishArguments._make(kernel.take(publish))
        kernel(stream, arguments.fill(tuple(operands), 0, gate, publish=publish))
