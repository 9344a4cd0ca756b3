"""Launches the Hopper attention. A plan and a layout decide most arguments once; a call gives the addresses."""

from __future__ import annotations

from typing import Any

import torch

from tilestream.arrival.flat import Awaited
from tilestream.core.operands import AttentionOperands
from tilestream.kernels.hopper.attention import attend
from tilestream.launch.attention_arguments import NO_KEY_GATE, AttentionLayout, KeyGate
from tilestream.launch.compiling import compiled, is_ahead, side_by_side
from tilestream.launch.hopper.attention_arguments import HopperAttentionArguments
from tilestream.launch.hopper.maps import described_by
from tilestream.launch.launch import Launch, Probe, address
from tilestream.launch.launcher import VARIES, Descriptor, Launcher, NoLauncher
from tilestream.launch.portable.attention_launch import KeyGateLaunch, ListLaunch, MergeLaunch, given_to
from tilestream.launch.trace import SpanLog
from tilestream.plan.attention_plan import AttentionPlan
from tilestream.runtime.device_workspace import Words


class HopperAttentionLaunch(Launch):
    """The Hopper attention for one plan and one layout of operands at multiples of 16 bytes.

    The first call compiles the kernel, or finds it in Triton's cache. Calls go to the driver directly: see
    `tilestream.launch.hopper.launch.GemmLaunch`. It keeps no operand.
    """

    def __init__(self, plan: AttentionPlan, layout: AttentionLayout) -> None:
        self._made = {traced: HopperAttentionArguments(plan, layout, traced) for traced in (False, True)}
        self._list, self._gate, self._merge = ListLaunch(plan), KeyGateLaunch(plan), MergeLaunch(plan, layout)
        #: A static schedule takes no tickets, but the abort word lies beside the counters.
        self._counts = plan.schedule.kind != "static" or plan.problem.keys is not None
        counts = self._counts or plan.problem.varlen or self._merge.floats > 0
        super().__init__(plan, counts, self._list.listed, self._merge.floats)
        self._launchers: dict[bool, Launcher] = {}

    def issue(
        self, stream: int, x: AttentionOperands, words: Words, awaited: Awaited | None, probe: Probe | SpanLog | None
    ) -> None:
        """See `Launch.issue`."""
        shares = None
        whole = x
        if words.partials is not None and self._floats:
            shares = self._merge.scratch(words.partials)
            # A sink is added once, when shares are joined.
            x = x._replace(out=shares[0], lse=shares[1], sinks=None)
        gate = self._gate(x.q.device, awaited)
        given = given_to(x, words.listed, words.counters if self._counts else None, probe)
        made = self._made[probe is not None]
        scales = made.scales(x.scale)
        launcher = self._launchers.get(probe is not None)
        if launcher is None:
            merges = () if shares is None else (lambda: self._merge.compile(shares, whole),)
            launcher = self._launchers[probe is not None] = side_by_side(
                lambda: self._compiled(made, given, scales, gate), lambda: self._list.compile(x, words), *merges
            )
        if shares is not None:
            self._merge.load(shares, whole)  # before the launch that may wait
        self._list(stream, x, words)
        arriving = () if awaited is None else [address(one) for one in gate if one is not None]
        launcher(
            stream, *[tensor.data_ptr() for tensor in given if tensor is not None], words.base, words.reset, *scales,
            *arriving,
        )  # fmt: skip
        if shares is not None:
            self._merge(stream, shares, whole)

    def _compiled(
        self, made: HopperAttentionArguments, given: tuple[torch.Tensor | None, ...], scales: tuple[float, float],
        gate: KeyGate,
    ) -> Launcher:  # fmt: skip
        """The kernel, compiled for operands like these."""
        maps, pack = (made.q, made.k, made.v, made.out), made.pack(attend)
        described = [described_by(m, x.dtype) for m, x in zip(maps, given[:4], strict=True) if x is not None]
        kernel = compiled(attend, pack((*described, *given[4:], 0, 0, *scales), gate), made.options)
        if is_ahead():
            return NoLauncher()
        varying: list[Any] = [Descriptor(m.shape, m.strides) for m in maps]
        varying += [None if tensor is None else VARIES for tensor in given[4:]]
        if gate is not NO_KEY_GATE:
            gate = KeyGate._make(None if one is None else VARIES for one in gate)
        grid = (self.plan.schedule.workers, 1, 1)
        return Launcher(kernel, grid, pack((*varying, VARIES, VARIES, VARIES, VARIES), gate))
