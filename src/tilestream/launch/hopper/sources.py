"""Launches the Hopper grouped GEMM by source, as `tilestream.launch.hopper.grouped`."""

from __future__ import annotations

from typing import Any

from tilestream.arrival.flat import Awaited
from tilestream.core.operands import GroupedOperands
from tilestream.kernels.config import HopperGroupedConfig, HopperSourcesConfig
from tilestream.kernels.hopper.grouped_sources import grouped_gemm_by_source
from tilestream.launch.gate import NO_PUBLISH
from tilestream.launch.gemm_arguments import Layout
from tilestream.launch.grouped_arguments import Bias, problem_of
from tilestream.launch.hopper.grouped import HopperGroupedArguments, HopperGroupedLaunch
from tilestream.launch.launch import Launch, Probe, gate_of
from tilestream.launch.launcher import Launcher
from tilestream.launch.trace import SpanLog
from tilestream.plan.plan import Plan
from tilestream.runtime.device_workspace import Words


class HopperSourcesArguments(HopperGroupedArguments):
    """As `HopperGroupedArguments`; ``publishes``: whether each source's result is signalled."""

    kernel: Any = grouped_gemm_by_source
    matrices = ("x_map", "y_map", "y_map_1", "y_map_2", "out_map", "source_counts")

    def __init__(
        self, plan: Plan, layout: Layout, bias: Bias, out_aligned: bool = True, publishes: bool = False,
        trace: bool = False,
    ) -> None:  # fmt: skip
        self._publishes = publishes
        super().__init__(plan, layout, bias, out_aligned, trace)
        self.options["launch_pdl"] = self.config.CHAINED

    def _numbers(self) -> dict[str, Any]:
        problem = problem_of(self.plan)
        mine = {"num_sources": problem.sources, "place_rows": problem.m // problem.sources, "pivot": problem.pivot}
        return super()._numbers() | mine

    def _config(self, **logs: bool) -> HopperGroupedConfig:
        arrives = problem_of(self.plan).arrives
        own = {
            "ARRIVES": arrives, "ROW_CHUNKS": "sources" if arrives else "none", "PUBLISHES": self._publishes,
            "CHAINED": not arrives,  # see `tilestream.launch.hopper.arguments`
        }  # fmt: skip
        return HopperSourcesConfig(**vars(super()._config(**logs)) | own)


class HopperSourcesLaunch(HopperGroupedLaunch):
    """The Hopper grouped GEMM by source for one plan and one layout of the operands."""

    def __init__(self, plan: Plan, layout: Layout, bias: Bias, out_aligned: bool, publishes: bool = False) -> None:
        Launch.__init__(self, plan, True)
        self._made = {
            traced: HopperSourcesArguments(plan, layout, bias, out_aligned, publishes, traced)
            for traced in (False, True)
        }
        self._launchers: dict[bool, Launcher] = {}

    def issue(
        self, stream: int, x: GroupedOperands, words: Words, awaited: Awaited | None, probe: Probe | SpanLog | None
    ) -> None:
        """See `Launch.issue`."""
        publish = NO_PUBLISH if x.epilogue.publish is None else x.epilogue.publish
        self._launch(stream, x, words, probe, gate_of(x.a.device, awaited, "row"), publish)
