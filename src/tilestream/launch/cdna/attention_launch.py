"""Launches the CDNA attention. A plan and a layout decide most arguments once; a call gives the addresses."""

from __future__ import annotations

from typing import Any

from tilestream.arrival.flat import Awaited
from tilestream.core.operands import AttentionOperands
from tilestream.kernels.cdna.attention import attend
from tilestream.launch.attention_arguments import AttentionLayout
from tilestream.launch.cdna.attention_arguments import CdnaAttentionArguments
from tilestream.launch.launch import Kernel, Launch, Probe
from tilestream.launch.portable.attention_launch import ListLaunch, given_to
from tilestream.launch.trace import SpanLog
from tilestream.plan.attention_plan import AttentionPlan
from tilestream.runtime.device_workspace import Words


class CdnaAttentionLaunch(Launch):
    """The CDNA attention for one plan, one layout of operands at multiples of 16 bytes, and one of the output.

    Parameters
    ----------
    aligned
        Whether the output's address is a multiple of 16.
    """

    kernel: Any = attend
    refuses = "attention: keys arrive, and the CDNA kernel has no gate: plan with the problem's keys="

    def __init__(self, plan: AttentionPlan, layout: AttentionLayout, aligned: bool = True) -> None:
        self._arguments, self._list = CdnaAttentionArguments(plan, layout, aligned), ListLaunch(plan)
        self._pack = self._arguments.pack(attend)
        super().__init__(plan, plan.schedule.kind != "static" or plan.problem.varlen, self._list.listed)
        self._kernel: Kernel | None = None

    def issue(
        self, stream: int, x: AttentionOperands, words: Words, awaited: Awaited | None = None,
        probe: Probe | SpanLog | None = None,
    ) -> None:  # fmt: skip
        """See `Launch.issue`."""
        if self._kernel is None:
            self._kernel = Kernel(self.kernel, (self.plan.schedule.workers, 1, 1), self._arguments.options)
        static = self.plan.schedule.kind == "static"
        given = given_to(x, self._list(stream, x, words), None if static else words.counters, None)
        numbers = words.base, words.reset, *self._arguments.scales(x.scale)
        self._kernel(stream, self._pack((*self._kernel.take(given), *numbers)))
