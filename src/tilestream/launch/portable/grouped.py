"""Launches the portable grouped GEMM, as `tilestream.launch.portable.launch`."""

from __future__ import annotations

from typing import Any

from tilestream.arrival.flat import Awaited
from tilestream.core.operands import GroupedOperands
from tilestream.kernels.config import PortableGroupedConfig
from tilestream.kernels.portable.grouped import grouped_gemm
from tilestream.launch.gate import NO_GATE, GateArguments
from tilestream.launch.gemm_arguments import Layout
from tilestream.launch.grouped_arguments import Bias, lanes_of, problem_of
from tilestream.launch.launch import Kernel, Launch, Probe, gate_of
from tilestream.launch.portable.arguments import Arguments
from tilestream.launch.trace import SpanLog
from tilestream.plan.plan import Plan
from tilestream.runtime.device_workspace import Words

#: Columns of a strip of an epilogue that is more than a store: with `tilestream.plan.policy.portable.STRIP` of them a
#: tile of 128x128, beside a group's rows, spills up to 40 bytes.
_STRIP = 16


class GroupedArguments(Arguments):
    """As `Arguments`. ``layout``: of the operands, without a bias."""

    kernel: Any = grouped_gemm
    matrices = ("a", "b", "offsets")

    def __init__(self, plan: Plan, layout: Layout, bias: Bias, trace: bool = False) -> None:
        self._bias = bias
        super().__init__(plan, layout, trace=trace)

    def _numbers(self) -> dict[str, Any]:
        bias, problem, (of_a, of_b) = self._bias, problem_of(self.plan), self.layout.scale_k
        mine = {
            "num_groups": problem.groups, "stride_bias_batch": bias.batch, "stride_bias": bias.step,
            "stride_sk": of_a, "stride_tk": of_b, "n": problem.out_columns,
        }  # fmt: skip
        return super()._numbers() | mine

    def _config(self, **logs: bool) -> PortableGroupedConfig:
        problem = problem_of(self.plan)
        even = super()._config(**logs)
        own = {"BIAS": self._bias.along, "EVEN_K": even.EVEN_K and problem.along == "rows"}
        if not problem.plain:
            own["STRIP"] = _STRIP
        return PortableGroupedConfig(
            **vars(even) | own,
            ALONG=problem.along,
            LANES=lanes_of(problem.groups),
            ARRIVES=problem.arrives,
        )


class GroupedLaunch(Launch):
    """The portable grouped GEMM for one plan, one layout of the operands and one alignment of their addresses."""

    def __init__(self, plan: Plan, layout: Layout, bias: Bias) -> None:
        super().__init__(plan, plan.schedule.kind != "static" or plan.gate is not None)
        grid = (plan.schedule.workers, 1, 1)
        self._made = {traced: GroupedArguments(plan, layout, bias, traced) for traced in (False, True)}
        self._kernels = {traced: Kernel(grouped_gemm, grid, one.options) for traced, one in self._made.items()}

    def issue(
        self, stream: int, x: GroupedOperands, words: Words, awaited: Awaited | None, probe: Probe | SpanLog | None
    ) -> None:
        """See `Launch.issue`."""
        kernel, arguments = self._kernels[probe is not None], self._made[probe is not None]
        e, gate = x.epilogue, gate_of(x.a.device, awaited, "column")
        operands = kernel.take((
            x.a, x.b, x.offsets, x.out, e.bias, None, e.scale_a, e.scale_b, words.partials, words.counts,
            words.counters, None, None if probe is None else probe.words, words.base, words.reset, 1.0, 1.0,
        ))  # fmt: skip
        if gate is not NO_GATE:
            gate = GateArguments._make(kernel.take(gate))
        kernel(stream, arguments.fill(tuple(operands), 0, gate))
