"""Launching the Hopper attention: what a plan and a layout decide is worked out once, a call fills in the addresses."""

from __future__ import annotations

from typing import Any

import torch

from tilestream.kernels.attention import Operands
from tilestream.kernels.hopper.attention import attend
from tilestream.kernels.hopper.attention_arguments import HopperAttentionArguments
from tilestream.kernels.hopper.launch import described_by
from tilestream.kernels.launch import with_words
from tilestream.kernels.portable.attention_arguments import AttentionLayout
from tilestream.kernels.portable.attention_launch import IncomingKeys, ListLaunch
from tilestream.plan.attention_plan import AttentionPlan
from tilestream.runtime.device_workspace import Words
from tilestream.runtime.launcher import VARIES, Descriptor, Launcher


class HopperAttentionLaunch:
    """The Hopper attention for one plan and one layout of operands at multiples of 16 bytes.

    The kernel is compiled, or found in Triton's cache, at the first call; calls go to the driver directly: see
    `tilestream.kernels.hopper.launch.GemmLaunch`. Holds no operand: a call is given all of them.
    """

    def __init__(self, plan: AttentionPlan, layout: AttentionLayout) -> None:
        self.plan = plan
        self._arguments = HopperAttentionArguments(plan, layout)
        self._list = ListLaunch(plan)
        self._schedule = None if plan.schedule.kind == "static" and not plan.problem.varlen else plan.schedule
        self._launcher: Launcher | None = None

    def __call__(self, operands: Operands, incoming: IncomingKeys | None = None) -> None:
        """Issue the launch on the current stream of the current device, which is the operands'.

        Raises
        ------
        ValueError
            If keys arrive: such a plan is the portable kernel's.
        """
        if incoming is not None:
            raise ValueError("attention: keys arrive, and the Hopper kernel has no gate: plan with the problem's keys=")

        def issue(stream: int, words: Words) -> None:
            self._issue(stream, operands, words)

        with_words(operands.q.device, self._schedule, self.plan.block, issue, self._list.listed)

    def _issue(self, stream: int, x: Operands, words: Words) -> None:
        starts, order = self._list(stream, x, words)
        static = self.plan.schedule.kind == "static"
        given = (
            x.lse, x.sinks, x.cu_seqlens_q, x.cu_seqlens_k, x.seqlens_k, x.block_table, starts, order,
            None if static else words.counters,
        )  # fmt: skip
        scales = self._arguments.scales(x.scale)
        if self._launcher is None:
            self._launcher = self._compiled(x, given, scales)
        self._launcher(
            stream, x.q.data_ptr(), x.k.data_ptr(), x.v.data_ptr(), x.out.data_ptr(),
            *[tensor.data_ptr() for tensor in given if tensor is not None], words.base, words.reset, *scales,
        )  # fmt: skip

    def _compiled(self, x: Operands, given: tuple[torch.Tensor | None, ...], scales: tuple[float, float]) -> Launcher:
        """The kernel, compiled for operands like these."""
        made = self._arguments
        maps = (made.q, x.q.dtype), (made.k, x.k.dtype), (made.v, x.v.dtype), (made.out, x.out.dtype)
        grid = (self.plan.schedule.workers, 1, 1)
        filled = made.fill((*[described_by(m, dtype) for m, dtype in maps], *given, 0, 0, *scales))
        kernel = attend.warmup(*filled, grid=grid, **made.options)
        varying: list[Any] = [Descriptor(m.shape, m.strides) for m, _ in maps]
        varying += [None if tensor is None else VARIES for tensor in given]
        return Launcher(kernel, grid, made.fill((*varying, VARIES, VARIES, VARIES, VARIES)))
