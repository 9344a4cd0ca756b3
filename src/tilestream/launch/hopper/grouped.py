"""Launches the Hopper grouped GEMM, as `tilestream.launch.hopper.launch`."""

from __future__ import annotations

from typing import Any

from tilestream.arrival.flat import Awaited
from tilestream.core.operands import GroupedOperands
from tilestream.kernels.config import HopperGroupedConfig
from tilestream.kernels.hopper.grouped import grouped_gemm
from tilestream.launch import compiling
from tilestream.launch.gate import NO_GATE, NO_PUBLISH, GateArguments, PublishArguments
from tilestream.launch.gemm_arguments import GemmArguments, Layout
from tilestream.launch.grouped_arguments import Bias, lanes_of, problem_of
from tilestream.launch.hopper.arguments import (
    DIRECT,
    SINGLE_REGISTERS,
    WIDE_STRIP,
    Operand,
    has_room,
    matrix_map,
    operand_map,
    store_of,
)
from tilestream.launch.hopper.maps import Map, clipped, described_by
from tilestream.launch.launch import Launch, Probe
from tilestream.launch.launcher import VARIES, Descriptor, Launcher, NoLauncher
from tilestream.launch.trace import SpanLog
from tilestream.plan.grouped import parts_of
from tilestream.plan.plan import Plan
from tilestream.plan.policy.hopper import MOST_PARTS, rs_tail
from tilestream.plan.policy.hopper_attention import BEYOND
from tilestream.plan.problem import ITEMSIZE
from tilestream.plan.tma import store_major_of
from tilestream.runtime.device_workspace import Words

_INT31 = 2**31


class HopperGroupedArguments(GemmArguments):
    """As `tilestream.launch.hopper.arguments.Arguments`. ``layout``: of the operands, without a bias."""

    kernel: Any = grouped_gemm
    matrices = ("x_map", "y_map", "y_map_1", "y_map_2", "out_map", "offsets")

    def __init__(
        self, plan: Plan, layout: Layout, bias: Bias, out_aligned: bool = True, trace: bool = False
    ) -> None:  # fmt: skip
        problem, swap_ab = problem_of(plan), plan.swap_ab
        block_m, block_n, block_k = plan.block
        (_, am, ak), (bb, bk, bn), (ob, om, on) = layout.a, layout.b, layout.out
        a = Operand(problem.m, block_m, 0, am, ak, problem.dtypes[0])
        b = Operand(problem.n, block_n, bb, bn, bk, problem.dtypes[1])
        x, y = (b, a) if swap_ab else (a, b)
        self._bias, self._along_rows = bias, problem.along == "rows"
        self._halves = 2 if plan.variant == "cooperative" else 1
        self.rows, self.widths = x.tile_rows, parts_of(problem, y.tile_rows)
        half = self.rows // self._halves
        if self._along_rows:
            maps = [operand_map(one, box, problem.k, block_k, problem.groups) for one, box in self._boxes(x, y, half)]
        else:
            maps = [(clipped(one.k, one.rows, (block_k, box)), False) for one, box in self._boxes(x, y, half)]
        (self.x, self._x_major), *parts = maps
        self.y = (*(part for part, _ in parts), *[None] * (MOST_PARTS - len(parts)))
        self._y_major = parts[0][1]
        self._batched = [int(one is b) if self._along_rows else 0 for one in (x, y)]
        self.out, self._flipped = None, False
        extents, strides = (x.rows, y.rows), (on, om) if swap_ab else (om, on)
        if problem.two_halves:  # which are not swapped
            extents = problem.m, problem.out_columns
        size, batch = ITEMSIZE[problem.out_dtype], 0 if self._along_rows else ob
        major = store_major_of(extents, strides, batch, size) if out_aligned else None
        contiguous = 0 if swap_ab else 1  # of the accumulator's dimensions, the one of the output's columns
        if major is not None and not self._along_rows:
            self._flipped = major == 0
            self.out = matrix_map(extents, strides, (half, plan.strip), problem.groups, ob, self._flipped)
        elif major == contiguous and problem.m < BEYOND:
            self._flipped = swap_ab
            box = (plan.strip, half) if swap_ab else (half, plan.strip)
            self.out = clipped(om, problem.out_columns, box)
        self._store = "tma"
        if self.out is None:
            roomy = has_room(layout, problem, self.widths, half, splits=False)
            self._store, self._flipped = store_of(None, strides, roomy and bias.along == "none")
        super().__init__(plan, layout, trace=trace)
        self.options = {"num_warps": plan.warps, "launch_pdl": True}
        if plan.variant == "single":
            self.options["maxnreg"] = SINGLE_REGISTERS

    def _boxes(self, x: Operand, y: Operand, half: int) -> list[tuple[Operand, int]]:
        """The operand, and the rows of a copy, of each map."""
        return [(x, half), *((y, width) for width in self.widths)]

    def _numbers(self) -> dict[str, Any]:
        (x, y), problem, scale_k = self._batched, problem_of(self.plan), self.layout.scale_k
        of_rows, of_columns = reversed(scale_k) if self.plan.swap_ab else scale_k
        numbers = super()._numbers() | {"stride_sk": of_rows, "stride_tk": of_columns}
        if problem.two_halves:
            numbers["columns"] = problem.out_columns
        return numbers | {
            "x_batched": x, "y_batched": y, "num_groups": problem.groups,
            "extent": problem.m if self._along_rows else problem.k,
            "stride_bias_batch": self._bias.batch, "stride_bias": self._bias.step,
        }  # fmt: skip

    def _config(self, **logs: bool) -> HopperGroupedConfig:
        plan, problem = self.plan, problem_of(self.plan)
        columns = problem.out_columns
        wide = (problem.m - 1) * self.layout.out[1] + (columns - 1) * self.layout.out[2] >= _INT31
        strip = plan.strip
        if self.out is None:  # no C buffer, and registers are short
            strip = min(strip, DIRECT * self._halves // self.rows, WIDE_STRIP if wide else DIRECT)
        turned = {"none": "none", "rows": "columns", "columns": "rows"}
        bias = turned[self._bias.along] if plan.swap_ab else self._bias.along
        # A group's last row is at any place.
        divisible = (problem.m % 8 == 0 and not self._along_rows) if plan.swap_ab else columns % 8 == 0
        return HopperGroupedConfig.of(
            plan, self.layout, **logs, SCALES="row" if problem.scales == "tensor" else problem.scales, BIAS=bias,
            WIDTHS=self.widths, STAGES=plan.stages, STRIP=strip, BUFFERS=plan.buffers, X_K_MAJOR=self._x_major,
            Y_K_MAJOR=self._y_major, BATCHED=True, SWAP_AB=plan.swap_ab, CONSUMERS=plan.variant,
            PROMOTED=problem.promoted, RS_TAIL=rs_tail(self.widths, 8 * ITEMSIZE[problem.dtype]),
            LOAD_REGISTERS=plan.registers[0], MATH_REGISTERS=plan.registers[1],
            STORE=self._store, FLIPPED=self._flipped, OFFSETS_64BIT=wide,
            N_DIVISIBLE_BY_8=divisible, CHAINED=True, PUBLISH="none", LOCAL_ROWS=False, ALONG=problem.along,
            LANES=lanes_of(problem.groups),
        )  # fmt: skip

    @property
    def maps(self) -> tuple[Map | None, ...]:
        """Of x, of y, of the output: in the kernel's order."""
        return (self.x, *self.y, self.out)


class HopperGroupedLaunch(Launch):
    """The Hopper grouped GEMM for one plan and one layout of the operands."""

    def __init__(self, plan: Plan, layout: Layout, bias: Bias, out_aligned: bool) -> None:
        super().__init__(plan, plan.schedule.kind != "static")
        self._made = {
            traced: HopperGroupedArguments(plan, layout, bias, out_aligned, traced) for traced in (False, True)
        }
        self._launchers: dict[bool, Launcher] = {}

    def issue(
        self, stream: int, x: GroupedOperands, words: Words, awaited: Awaited | None, probe: Probe | SpanLog | None
    ) -> None:
        """See `Launch.issue`."""
        self._launch(stream, x, words, probe, NO_GATE, NO_PUBLISH)

    def _launch(
        self, stream: int, x: GroupedOperands, words: Words, probe: Probe | SpanLog | None, gate: GateArguments,
        publish: PublishArguments,
    ) -> None:  # fmt: skip
        """Launch the kernel with what rows by source wait for, and what is published of them."""
        made, e, swap_ab = self._made[probe is not None], x.epilogue, self.plan.swap_ab
        scales = (e.scale_b, e.scale_a) if swap_ab else (e.scale_a, e.scale_b)
        given = (
            x.offsets, x.out, e.bias, None, *scales, None, None, words.counters, None,
            None if probe is None else probe.words,
        )  # fmt: skip
        mapped = [(made.x, x.b if swap_ab else x.a), *((one, x.a if swap_ab else x.b) for one in made.y)]
        mapped.append((made.out, x.out))
        launcher = self._launchers.get(probe is not None)
        if launcher is None:
            launcher = self._launchers[probe is not None] = self._compiled(made, mapped, given, gate, publish)
        numbers: tuple[Any, ...] = ()
        if gate is not NO_GATE:
            numbers = (gate.row_epoch, gate.row_key, gate.allowed, gate.op)
        if publish is not NO_PUBLISH:
            numbers += (publish.epoch,)
        launcher(
            stream, *[tensor.data_ptr() for one, tensor in mapped if one is not None],
            *[tensor.data_ptr() for tensor in (*given, *gate.pointers, *publish[:2]) if tensor is not None],
            words.base, words.reset, *numbers,
        )  # fmt: skip

    def _compiled(
        self, made: HopperGroupedArguments, mapped: Any, given: tuple[Any, ...], gate: GateArguments = NO_GATE,
        publish: PublishArguments = NO_PUBLISH,
    ) -> Launcher:  # fmt: skip
        """The kernel, compiled for operands like these."""
        described = [None if one is None else described_by(one, tensor.dtype) for one, tensor in mapped]
        filled = made.fill((*described, *given, 0, 0, 1.0, 1.0), gate=gate, publish=publish)
        kernel = compiling.compiled(made.kernel, filled, made.options)
        if compiling.is_ahead():
            return NoLauncher()
        tf32, last = self.plan.problem.kind == "tf32", len(mapped) - 1
        varying: list[Any] = [
            None if one is None else Descriptor(one.shape, one.strides, tf32=tf32 and i < last)
            for i, (one, _) in enumerate(mapped)
        ]
        varying += [None if tensor is None else VARIES for tensor in given]
        if gate is not NO_GATE:
            gate = GateArguments._make(None if x is None else VARIES for x in gate)
        if publish is not NO_PUBLISH:
            publish = PublishArguments(VARIES, VARIES, VARIES)
        filled = made.fill((*varying, VARIES, VARIES, 1.0, 1.0), gate=gate, publish=publish)
        return Launcher(kernel, (self.plan.schedule.workers, 1, 1), filled)
