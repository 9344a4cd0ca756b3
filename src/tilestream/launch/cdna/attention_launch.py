"""Launching the CDNA attention: what a plan and a layout decide is worked out once, a call gives the addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilestream.arrival.flat import Awaited
from tilestream.core.operands import Operands
from tilestream.kernels.cdna.attention import attend
from tilestream.launch.cdna.attention_arguments import CdnaAttentionArguments
from tilestream.launch.launch import address, with_words
from tilestream.launch.portable.attention_arguments import AttentionLayout
from tilestream.launch.portable.attention_launch import ListLaunch
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
        starts, order = self._list(stream, x, words)
        static = self.plan.schedule.kind == "static"
        given = (
            x.q, x.k, x.v, x.out, x.lse, x.sinks, x.cu_seqlens_q, x.cu_seqlens_k, x.seqlens_k, x.block_table, starts,
            order, None if static else words.counters,
        )  # fmt: skip
        scales = self._arguments.scales(x.scale)
        if self._compiled is not None:
            # Addresses and no tensors: the launcher asks the driver about each tensor.
            self._compiled(stream, self._arguments.fill(*map(address, given), words.base, words.reset, *scales))
            return
        filled = self._arguments.fill(*given, words.base, words.reset, *scales)
        kernel = self.kernel[self._grid](*filled, **self._arguments.options)
        self._compiled = direct(kernel, self._grid)
