"""Launches the Hopper GEMM. A plan and a layout decide most arguments once; a call gives the addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tilestream.arrival.flat import Awaited
from tilestream.core.copy_items import NO_COPIES, CopyArguments
from tilestream.core.operands import GemmOperands
from tilestream.kernels.hopper.gemm import gemm
from tilestream.launch import compiling, launch
from tilestream.launch.gate import NO_GATE, NO_PUBLISH, GateArguments, PublishArguments
from tilestream.launch.gemm_arguments import NO_LOCAL, Layout, LocalTiles
from tilestream.launch.hopper.arguments import Arguments
from tilestream.launch.hopper.maps import described_by
from tilestream.launch.hopper.multicast import rewritten
from tilestream.launch.launch import Probe
from tilestream.launch.launcher import VARIES, Descriptor, Launcher, NoLauncher
from tilestream.launch.trace import SpanLog
from tilestream.plan.plan import Plan
from tilestream.runtime.device_workspace import NO_WORDS, Words

if TYPE_CHECKING:
    from tilestream.launch.hopper.realign_launch import Realign

#: With so few rows or columns the other operand is read once and as fast as memory gives it: larger reads are better.
_FEW, _FAR = 64, 256


class GemmLaunch(launch.GemmLaunch):
    """The Hopper GEMM for one plan, one layout of the operands and one alignment of their addresses.

    ``out_aligned``, ``aligned``: whether the addresses of the output, and of A and B, are multiples of 16.

    The kernel is compiled, or found in Triton's cache, at the first call; calls go to the driver directly, and remember
    tensor maps by address: a map says all of what it was made from, so there is no address to trust.
    """

    def __init__(
        self, plan: Plan, layout: Layout, out_aligned: bool = True, aligned: tuple[bool, bool] = (True, True)
    ) -> None:
        super().__init__(plan)
        self._realign: Realign | None = None
        if plan.realigned:
            from tilestream.launch.hopper.realign_launch import Realign

            partials = plan.schedule.slots * plan.tile[0] * plan.tile[1]
            self._realign = Realign(plan, layout, partials, aligned)
            layout, self._floats = self._realign.layout, self._realign.floats
        self._arguments = Arguments(plan, layout, out_aligned)
        self._out_aligned = out_aligned
        self._layout = layout
        #: By what is recorded, and the number of local rows.
        self._launchers: dict[tuple[type, int | None], Launcher] = {}
        self._stored_by_map, self._parts = self._arguments.out is not None, len(self._arguments.widths)

    def issue(
        self, stream: int, x: GemmOperands, words: Words, awaited: Awaited | None, probe: Probe | SpanLog | None
    ) -> None:
        """See `Launch.issue`."""
        if self._realign is not None:
            assert words.partials is not None
            x, words = self._realign(stream, x, words.partials), self._of_product(words)
        a, b, out, epilogue = x
        swap_ab = self.plan.swap_ab
        scales = (epilogue.scale_b, epilogue.scale_a) if swap_ab else (epilogue.scale_a, epilogue.scale_b)
        given = (
            out, epilogue.bias, epilogue.residual, *scales, words.partials, words.counts, words.counters,
            self.table.on(a.device), None if probe is None else probe.words,
        )  # fmt: skip
        copies, local, tiles = self.copies(awaited), *self._local_rows(a, awaited)
        gate = self.gate(a.device, awaited, local is not None)
        kind = type(probe), None if local is None else local.shape[0]
        launcher = self._launchers.get(kind)
        if launcher is None:
            launcher = self._launchers[kind] = self._compiled(x, given, gate, copies, kind[1], probe)
        first, y = (b, a) if swap_ab else (a, b)
        maps = ((y.data_ptr(),) * self._parts) + ((out.data_ptr(),) if self._stored_by_map else ())
        pointers, numbers = (given, ()) if awaited is None else ((*given, *gate.pointers), gate.numbers)
        if copies is not NO_COPIES:
            pointers, numbers = (*pointers, *copies.pointers), (*numbers, copies.copiers)
        if (publish := epilogue.publish) is not None:
            pointers, numbers = (*pointers, *publish[:2]), (*numbers, publish.epoch)
        if local is not None:
            maps, numbers = (local.data_ptr(), *maps), (*numbers, *tiles)
        launcher(
            stream, first.data_ptr(), *maps,
            *[tensor.data_ptr() for tensor in pointers if tensor is not None],
            words.base, words.reset, *numbers, epilogue.alpha, epilogue.beta,
        )  # fmt: skip

    def _of_product(self, words: Words) -> Words:
        """What the product's kernel has of the words of a launch that copies operands first."""
        schedule = self.plan.schedule
        if schedule.kind == "static":
            return NO_WORDS
        return words if schedule.slots else words._replace(partials=None)

    def _local_rows(self, a: torch.Tensor, awaited: Awaited | None) -> tuple[torch.Tensor | None, LocalTiles]:
        """The local rows of ``a``, if they can be read in their own tensor; and which tiles."""
        local = None if awaited is None or awaited.rows is None else awaited.rows.local_rows
        if local is None or local.rows.dtype != a.dtype or local.rows.data_ptr() % 16:
            return None, NO_LOCAL
        tiles = self._arguments.local_tiles(local.first, local.height, local.period)
        return (None, NO_LOCAL) if tiles is None else (local.rows, tiles)

    def _compiled(
        self, operands: GemmOperands, given: tuple[torch.Tensor | None, ...], gate: GateArguments,
        copies: CopyArguments, local: int | None, probe: Probe | SpanLog | None,
    ) -> Launcher:  # fmt: skip
        """The kernel, compiled for operands like these."""
        a, b, out, epilogue = operands
        trace, probed = isinstance(probe, SpanLog), isinstance(probe, Probe)
        arguments, capacity = Arguments(self.plan, self._layout, self._out_aligned, probed, trace, local), 0
        if isinstance(probe, Probe):
            capacity = probe.capacity
        x, y = (b, a) if self.plan.swap_ab else (a, b)
        parts = ((part, y.dtype) for part in arguments.y)
        maps = (arguments.x, x.dtype), (arguments.local, x.dtype), *parts, (arguments.out, out.dtype)
        publish = epilogue.publish or NO_PUBLISH
        if (publish is NO_PUBLISH) != (self.plan.problem.publishes is None):
            raise ValueError(
                f"epilogue.publish={epilogue.publish}: the problem of the plan has "
                f"publishes={self.plan.problem.publishes}; there are both or none"
            )
        described = [None if made is None else described_by(made, dtype) for made, dtype in maps]
        filled = arguments.fill(
            (*described, *given, 0, 0, epilogue.alpha, epilogue.beta), capacity, gate, publish, copies
        )
        kernel = compiling.compiled(gemm, filled, arguments.options)
        if self.plan.ctas > 1:
            kernel = compiling.compiled(gemm, filled, arguments.options | rewritten(kernel))
        if compiling.is_ahead():
            return NoLauncher()
        problem = self.plan.problem
        promotion = _FAR if min(problem.m, problem.n) <= _FEW else 128
        last = len(maps) - 1
        varying: list[Any] = [
            # What an operand is rounded to; the output, the last, is what it is.
            None
            if made is None
            else Descriptor(made.shape, made.strides, tf32=problem.kind == "tf32" and i < last, promotion=promotion)
            for i, (made, _) in enumerate(maps)
        ]
        varying += [None if tensor is None else VARIES for tensor in given]
        if gate is not NO_GATE:
            gate = GateArguments._make(None if x is None else VARIES for x in gate)
        if copies is not NO_COPIES:
            copies = CopyArguments._make([VARIES] * 5)
        if publish is not NO_PUBLISH:
            publish = PublishArguments(VARIES, VARIES, VARIES)
        tiles = NO_LOCAL if local is None else (VARIES, VARIES, VARIES)
        filled = arguments.fill((*varying, VARIES, VARIES, VARIES, VARIES), capacity, gate, publish, copies, tiles)
        ctas = self.plan.ctas
        return Launcher(kernel, (self.plan.schedule.workers * ctas, 1, 1), filled, ctas)
