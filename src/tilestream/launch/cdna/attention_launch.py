"""Launching the CDNA attention: what a plan and a layout decide is worked out once, a call gives the addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilestream.arrival.flat import Awaited
from tilestream.core.operands import Operands
from tilestream.kernels.cdna.attention import attend
from tilestream.launch.attention_arguments import AttentionLayout
from tilestream.launch.cdna.attention_arguments import CdnaAttentionArguments
from tilestream.launch.launch import address, with_words
from tilestream.launch.portable.attention_launch import ListLaunch, given_to
from tilestream.launch.portable.launch import direct
from tilestream.plan.attention_plan import AttentionPlan
from tilestream.runtime.device_workspace import Words


class CdnaAttentionLaunch:
    """The CDNA attention for one plan, one layout of operands at multiples of 16 bytes, and one of the output.

    Holds no operand: a call is given all of them.

    Parameters
    ----------
    aligned
        Whether the output's address is a multiple of 16.
    """

    kernel: Any = attend

    def __init__(self, plan: AttentionPlan, layout: AttentionLayout, aligned: bool = True) -> None:
        self.plan = plan
        self._arguments = CdnaAttentionArguments(plan, layout, aligned)
        self._pack = self._arguments.pack(attend)
        self._grid = (plan.schedule.workers, 1, 1)
        self._list = ListLaunch(plan)
        self._schedule = None if plan.schedule.kind == "static" and not plan.problem.varlen else plan.schedule
        self._compiled: Callable[[int, tuple[Any, ...]], None] | None = None

    def __call__(self, operands: Operands, incoming: Awaited | None = None) -> None:
        """Issue the launch on the current stream of the current device, which is the operands'.

        Raises
        ------
        ValueError
            If keys arrive: such a plan is the portable kernel's.
        """
        if incoming is not None:
            raise ValueError("attention: keys arrive, and the CDNA kernel has no gate: plan with the problem's keys=")

        def issue(stream: int, words: Words) -> None:
            self.issue(stream, operands, words)

        with_words(operands.q.device, self._schedule, self.plan.block, issue, self._list.listed)

    def issue(self, stream: int, x: Operands, words: Words) -> None:
        """Launch the kernel on ``stream``, with ``words`` to work on."""
        static = self.plan.schedule.kind == "static"
        given = given_to(x, self._list(stream, x, words), None if static else words.counters, None)
        numbers = words.base, words.reset, *self._arguments.scales(x.scale)
        if self._compiled is not None:
            # Addresses and no tensors: the launcher asks the driver about each tensor.
            self._compiled(stream, self._pack((*map(address, given), *numbers)))
            return
        kernel = self.kernel[self._grid](*self._pack((*given, *numbers)), **self._arguments.options)
        self._compiled = direct(kernel, self._grid)
