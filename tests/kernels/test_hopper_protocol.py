"""The Hopper kernel does, operation by operation, what the checker explores.

The kernel's own text is run here, as plain Python, on stand-ins that write down what they are asked to do. What comes
of it is compared with the operations of `tilestream_tools.verify.protocol` and of `gpu_loop.fixup` for the same items.
So whatever is changed in one of the texts, and not in the other, fails here.

With a gate the launch is over at some item, or not at all: the text up to the waits themselves is run, which are those
of `tilestream.kernels.device.gate`, and the stand-ins answer for them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton")

from texts import bind, jitted_of, structs_of
from turns import operations

from mutants import kernel_text
from mutants.engine import Edit, at, replace
from tilestream.core import chunks, ring, structs
from tilestream.core.consumers import sharing
from tilestream.core.copy_items import CopyArguments
from tilestream.core.loop import Announce, Compute, CountRows, Landed, RestoreRows, Share, publish
from tilestream.core.structs import Cursor, Gate, Item, Passed, Progress, Ready, Watch, Words, Work
from tilestream.kernels.config import HopperConfig
from tilestream.kernels.device import epilogue as formula_text
from tilestream.kernels.device import items as items_text
from tilestream.kernels.device import schedule as schedule_text
from tilestream.kernels.hopper import epilogue as epilogue_text
from tilestream.kernels.hopper import gate as gate_text
from tilestream.kernels.hopper import gemm as gemm_text
from tilestream.kernels.hopper import load as load_text
from tilestream.kernels.hopper import multiply as multiply_text
from tilestream.kernels.hopper import pair as pair_text
from tilestream.kernels.hopper import publish as publish_text
from tilestream.kernels.hopper import queues as queues_text
from tilestream.plan.policy.hopper import TILES, rs_tail, widths
from tilestream.schedule import WorkItem
from tilestream_tools.verify.gpu_loop import Add, Look, ReducePartials, Restore, Write, fixup
from tilestream_tools.verify.protocol import (
    Acquired,
    Arrive,
    Barrier,
    Drain,
    Expect,
    Fence,
    Fill,
    Get,
    Load,
    LoadState,
    MathState,
    Next,
    Pass,
    Poisoned,
    Put,
    Retire,
    Ring,
    Store,
    WaitBarrier,
    gated,
    k_steps,
    load_turn,
    math_turn,
    store,
    voided,
)  # fmt: skip

ROWS, BLOCK_K = 384, 32
#: Of the accumulator's output.
EXTENTS = 1000, 2000
#: When a launch is over: at no item, or before the first (its signals are in quarantine); else at the item so numbered.
NEVER, ALREADY = 99, -1
NAMES = ("full", "empty", "item_full", "item_empty", "order")


class Meet(NamedTuple):
    """The threads of a consumer wait for each other."""


class MeetBoth(NamedTuple):
    """All warps of both CTAs of a pair wait for each other."""


class LeftGate(NamedTuple):
    """The load warp counts itself out. Not an operation of the rings: it comes when all has been handed on."""

    over: bool


class Integer(int):
    """An integer of the device."""

    def to(self, _: object) -> Integer:
        return self

    def __sub__(self, other: int) -> Integer:
        return Integer(int(self) - other)


class Anything:
    """Stands for layouts, types and the like, of which nothing is asked."""

    def __getattr__(self, _: str) -> Anything:
        return self

    def __call__(self, *_: object, **__: object) -> Anything:
        return self

    def __getitem__(self, _: object) -> Anything:
        return self

    def __add__(self, _: object) -> Anything:
        return self

    __radd__ = __lt__ = __and__ = __add__


class Barriers(NamedTuple):
    name: str

    def index(self, at: int) -> Barrier:
        return Barrier(self.name, at)


class Multiply(NamedTuple):
    """Start the multiplication of one part of a stage."""

    stage: int
    part: int


class Shape(NamedTuple):
    """A ring, and the parts that a tile's columns are multiplied in."""

    ring: Ring
    widths: tuple[int, ...] = (64,)

    @property
    def columns(self) -> int:
        return sum(self.widths)

    @property
    def narrow(self) -> bool:
        return rs_tail(self.widths, 16) and not self.ring.promoted

    @property
    def strip(self) -> int:
        return self.columns // self.ring.strips if self.ring.strips else self.widths[-1]

    def __str__(self) -> str:
        ring = self.ring
        how = "promoted" if ring.promoted else "fast"
        how = f"paired-{how}" if ring.ctas > 1 else how
        return f"{ring.consumers}-{ring.depth}-{how}-{ring.strips}:{ring.buffers}-{'+'.join(map(str, self.widths))}"


class Dtype(NamedTuple):
    """The type of what a tensor map is of. It says which map that is."""

    name: str
    primitive_bitwidth: int


class TensorMap(NamedTuple):
    dtype: Dtype
    shape: list[int]
    local: bool = False

    @property
    def block_type(self) -> TensorMap:
        return self


class Nan(NamedTuple):
    """NaN for a part of an accumulator."""

    part: int


class Accumulator(NamedTuple):
    """An accumulator, or a product to be added to one: of how many K steps, of which part, being written or not.

    NaN has -1 steps.
    """

    width: int
    steps: int = 0
    part: int | None = None
    under_way: bool = False

    def __add__(self, product: Accumulator | Nan) -> Accumulator:  # type: ignore[override]
        assert not self.under_way
        if isinstance(product, Nan):
            return self._replace(steps=-1, part=product.part)
        assert not product.under_way
        assert self.part in (None, product.part)
        return product._replace(steps=self.steps + product.steps)


class Strip(NamedTuple):
    """A strip of an accumulator."""

    strip: int

    def to(self, _: object) -> Strip:
        return self


class Kernel:
    """The kernel for a shape and a script of items, run loop by loop.

    ``counted``: the answers to looks and counts. ``edits``: what is changed in the text.
    ``over``: at which item the launch is; None: nothing arrives, and there is no gate. ``ordered``: the K steps of each
    item, where they are taken in arrival order; else 0. ``copies``: what the kernel copies itself. ``local``: the first
    row tile that stands apart, how many do, and of how many. ``rank``: which CTA of a pair it is.
    """

    def __init__(
        self, shape: Shape, items: list[WorkItem], counted: tuple[int, ...] = (), split: bool = False,
        edits: tuple[Edit, ...] = (), over: int | None = None, swapped: bool = False,
        ordered: int = 0, copies: str = "none", local: tuple[int, int, int] = (0, 0, 1), rank: int = 0,
    ) -> None:  # fmt: skip
        self.shape, self.ring, self.items, self.counted = shape, shape.ring, items, counted
        self.over, self.swapped, self.ordered, self.split = over, swapped, ordered, split
        first, tiles, period = local
        self.local = [tile for tile in range(99) if first <= tile % period < first + tiles]
        self.log: list[Any] = []
        self.copies: list[tuple[Any, ...]] = []
        self.nbytes = 0
        self.made: dict[Barrier, int] = {}
        self.handed_on: list[dict[int, int]] = []
        ring_ = self.ring
        self.worker: tuple[int, int] | None = None
        self.ctas, self.rank, self.to_both, self.announced = ring_.ctas, rank, False, False
        self.halves = sharing(ring_.consumers)
        self.half_rows = ROWS // self.halves
        gl = SimpleNamespace(
            program_id=lambda _: rank, num_programs=lambda _: self.ctas, static_range=range, zeros=self.zeros,
            atomic_add=self.atomic_add, store=self.store, warp_specialize=self.warp_specialize,
            allocate_shared_memory=lambda dtype, shape, _: Stages(dtype, shape[0], self),
            NVMMASharedLayout=Anything(), SliceLayout=Anything(), arange=Anything(), int64=None, int32=None,
            float32=None, BlockedLayout=Anything(), num_warps=lambda: 4,
        )  # fmt: skip
        mbarrier = SimpleNamespace(
            wait=lambda bar, parity: self.log.append(WaitBarrier(bar, int(parity))),
            arrive=self.arrive,
            expect=self.expect,
        )
        self.names = {
            "gl": gl, "mbarrier": mbarrier,
            "tl": SimpleNamespace(
                cast=lambda value, _: value, int32=None, int64=None, maximum=max,
                where=lambda which, x, y: x if which else y,
            ),
            "tma": SimpleNamespace(store_wait=lambda left: self.log.append(Drain(left))), "range": range,
            "fragment": Anything(), **PARTS, "LINE": schedule_text.LINE.value, "present": lambda clock: 0,
            "quarantined": lambda *_: int(over == ALREADY), "pass_gate": self.pass_gate, "fenced": self.fenced,
            "leave_gate": self.leave_gate, "float": self.nan, "gdc_wait": Anything(),
            "gdc_launch_dependents": Anything(), "enter": Anything(), "leave": Anything(), "take": self.take,
            "take_ready": self.take_ready, "prefetch_ticket": self.ask, "await_ticket": "await", "add": "add",
            "pick_victim_of_warp": "pick", "pick_victim_of_slim_warp": "pick", "prefetch_leaving": Anything(),
            "leave_as_warp": Anything(), "EARLY": queues_text.EARLY.value,
            "home_queue": lambda worker, queues: worker, "source_queue": lambda source, home: home, "put": self.put,
            "get": self.get, "step": ring.step, "skip": ring.skip, "before": ring.before,
            "ITEMS": gemm_text.ITEMS.value, "make_barriers": self.make_barriers, "make_slots": Anything(),
            "tma_load": self.tma_load, "mma_layout": Anything(), "warpgroup_mma": self.mma,
            "warpgroup_mma_wait": self.retire, "columns_of": self.columns_of, "reduce_partials": self.reduce_partials,
            "barrier": self.meet, "store_partial": self.store_partial, "activate": lambda x, _: x,
            "fence_async_shared": lambda: self.log.append(Fence()), "tma_store": self.tma_store,
            "copy_items": self.copy_items, "do": self.do, "in_blocks": self.in_blocks,
        }  # fmt: skip
        self.loops: list[Any] = []
        self.copied: list[tuple[Any, ...]] = []
        bind(self.names, jitted_of(*MODULES), edits)
        if not ring_.strips:
            self.names["store_strip"] = Anything()
        gemm = self.names["gemm"]
        code = gemm.__code__
        given = dict.fromkeys(code.co_varnames[: code.co_argcount], 0)
        self.parts = [f"y{i}" for i in range(len(shape.widths))]
        y_maps = [TensorMap(Dtype(f"y{i}", 8), [width // self.ctas, BLOCK_K]) for i, width in enumerate(shape.widths)]
        given |= dict(zip(("y_map", "y_map_1", "y_map_2"), [*y_maps, None, None], strict=False))
        rows = ROWS * self.ctas
        tile = (shape.columns, rows) if swapped else (rows, shape.columns)
        self.config = HopperConfig(
            KIND="stream_k" if split else "static" if self.ctas > 1 else "dynamic",
            SPLIT="chunks" if ordered else "items", BLOCK_M=tile[0],
            BLOCK_N=tile[1], BLOCK_K=BLOCK_K, STRIP=shape.strip, OFFSETS_64BIT=False, SCALED=False, SCALES="none",
            BIAS="none", RESIDUAL=False, ACTIVATION="none", ROW_CHUNKS="none" if over is None else "uniform",
            COLUMN_CHUNKS="none", COPIES=copies, WIDTHS=shape.widths, STAGES=ring_.depth, BUFFERS=ring_.buffers,
            X_K_MAJOR=True, Y_K_MAJOR=True, BATCHED=False, SWAP_AB=swapped, CONSUMERS=ring_.consumers,
            PROMOTED=ring_.promoted, RS_TAIL=rs_tail(shape.widths, 16), LOAD_REGISTERS=0, MATH_REGISTERS=0,
            STORE="tma" if ring_.strips else "direct", FLIPPED=False, N_DIVISIBLE_BY_8=False, CHAINED=over is None,
            PUBLISH="none", LOCAL_ROWS=bool(tiles), CTAS=self.ctas,
        )  # fmt: skip
        given |= {
            "x_map": TensorMap(Dtype("x", 16), [self.half_rows, BLOCK_K]), "C": self.config,
            "local_map": TensorMap(Dtype("x", 16), [self.half_rows, BLOCK_K], local=True),
            "local_first": first, "local_tiles": tiles, "local_period": period,
            "out_map": TensorMap(Dtype("out", 16), [self.half_rows, shape.strip]),
            "rows": EXTENTS[0], "columns": EXTENTS[1],
            "k_steps": ordered, "row_signals": "of rows", "column_signals": "of columns",
        }  # fmt: skip
        self.left, self.taken = iter(items), 0
        self.item: WorkItem | None = None
        self.poisoned = -1
        self.asked: list[int] = []
        self.told: list[int] = []
        self.answers: Iterator[int] = iter(())
        gemm(**given)

    def operations(self, who: int | None) -> list[Any]:
        """What a loop does: ``who`` of the math loops, or the load loop."""
        self.log, self.who, self.at, self.answers = [], who, -1, itertools.cycle(self.counted)
        function, arguments = self.loops[-1 if who is None else who]
        function(*arguments)
        self.loaded()
        if self.ctas > 1:
            assert self.log[0] == self.log.pop() == MeetBoth(), "before the first operation, and behind the last"
            del self.log[0]
        log = told(self.log)
        parts = len(self.shape.widths)
        return of_stages(in_one(log, parts - 1) if self.shape.narrow else log, parts, self.ring.promoted)

    # What the kernel asks for ---------------------------------------------------------------------------------------

    def warp_specialize(self, loops, warps, registers) -> None:
        if self.ctas > 1:
            assert self.announced, "a barrier is made before the other CTA arrives at it"
            loops, idle = loops[:-3], loops[-3:]
            for function, arguments in idle:
                self.log = []
                function(*arguments)
                assert self.log == [MeetBoth(), MeetBoth()]
            assert warps[-3:] == [1] * 3, "four warps have registers of their own, and each of them is met"
            warps, registers = warps[:-3], registers[:-3]
        self.loops = loops
        assert warps == [4, 4, 1][-len(warps) :]
        assert len(loops) == len(warps) + 1 == len(registers) + 1 == self.ring.num_consumers + 1

    def copy_items(self, *given: Any) -> None:
        assert not self.loops, "a worker copies before its warps part"
        self.copied.append(given)

    def make_barriers(self, count: int, arrivals: int) -> Barriers:
        name = NAMES[len({bar.name for bar in self.made})]
        self.made |= {Barrier(name, i): arrivals for i in range(count)}
        return Barriers(name)

    def take(
        self, cursor: Cursor, work: Work, words: Words, watch: Watch, config: Any, add: str, pick: str
    ) -> tuple[Any, ...]:
        self.worker, prefetches = (watch.worker, watch.workers), self.config.PREFETCHES_TICKETS
        assert (config, add, pick) == (self.config, "await" if prefetches else "add", "pick")
        if prefetches:
            self.told.append(cursor.asked)
        item = self.item = next(self.left, None)
        if item is None:
            return 0, Item(7, 7, 7, 3, 9, 7, 7, 7, 0), cursor  # what a void ticket says is of no account
        return 1, Item(0, item.pm, item.pn, item.k_begin, item.k_end, item.part, item.parts, item.slot, 0), cursor

    def ask(self, words: Words, queue: int, go: int) -> int:
        self.loaded()
        assert go == 1, "the worker's own queue is not found empty"
        self.asked.append(sum(isinstance(op, Expect) for op in self.log))
        return len(self.asked)

    def put(self, _, slot: int, field: int, value: int, warps: int) -> None:
        assert warps == 1
        if field == 0:
            self.handed_on.append({})
            if value < 0:
                self.item = voided(self.item)
            assert value == k_steps(self.item)
        self.handed_on[-1][field] = value
        self.log.append(Put(slot, self.item))

    def get(self, _, slot: int, field: int, warps: int) -> Integer:
        assert warps == 4
        if field == 0:
            self.at += 1
            self.item = self.items[self.at] if self.at < len(self.items) else None
            if self.handed_on[self.at][0] < 0:
                self.item = voided(self.item)
        self.log.append(Get(slot))
        return Integer(self.handed_on[self.at][field])

    def arrive(self, bar: Barrier, count: int = 1) -> None:
        assert count == (self.ctas if bar.name == "empty" else 1), "all that load into a stage are told that it is free"
        self.log.append(Arrive(bar))

    def do(self, text: str) -> None:
        """Instructions of a pair of CTAs: see `tilestream.kernels.hopper.pair`."""
        if "barrier.cluster" in text:
            assert text.index("arrive.release") < text.index("wait.acquire")
            self.log.append(MeetBoth())
        elif "mbarrier_init" in text:
            self.announced = len(self.made) == len(self.ring.barriers())
        else:
            assert self.to_both == ("ends" in text)
            self.to_both = "begins" in text

    def in_blocks(self, stages: Stages, rows: int, columns: int) -> Stages:
        """The halves of y, which two CTAs load, as one."""
        assert (rows, columns) == (self.shape.widths[self.parts.index(stages.dtype.name)], BLOCK_K)
        return Stages(stages.dtype, stages.count // self.ctas, self)

    def expect(self, bar: Barrier, nbytes: int) -> None:
        self.loaded()
        self.log.append(Expect(bar))
        self.nbytes = nbytes

    def tma_load(self, tensor_map: TensorMap, at: list[int], bar: Barrier, buffer: Buffer) -> None:
        name, k = tensor_map.dtype.name, at[1] // BLOCK_K
        assert buffer.stages.dtype == tensor_map.dtype
        stage, half = divmod(buffer.at, self.halves if name == "x" else self.ctas)
        # Of y the other CTA brings as much.
        times = 1 if name == "x" else self.ctas
        assert self.to_both == (times > 1)
        self.nbytes -= times * math.prod(tensor_map.shape) * tensor_map.dtype.primitive_bitwidth // 8
        load = Load(stage, self.item, k, bar)
        if self.copies:
            assert told(self.log[-1:]) == told([load]), "copies of one load, with nothing between them"
        else:
            self.log.append(load)
        x_tile, y_tile = (self.item.pn, self.item.pm) if self.swapped else (self.item.pm, self.item.pn)
        if name == "x":
            assert tensor_map.local == (x_tile in self.local)
            x_tile = self.local.index(x_tile) if tensor_map.local else x_tile
        row = (x_tile * self.ctas + self.rank) * ROWS + half * self.half_rows
        if name != "x":
            assert half == self.rank
            part = self.parts.index(name)
            row = y_tile * self.shape.columns + sum(self.shape.widths[:part])
            row += half * (self.shape.widths[part] // self.ctas)
        assert at == [row, k * BLOCK_K]
        self.copies.append((name, half if name == "x" else 0))

    def loaded(self) -> None:
        """A load brings all that there is of a stage, once, and that is what was expected."""
        assert self.nbytes == 0, "what is expected is what is loaded"
        if self.copies:
            assert sorted(self.copies) == [("x", h) for h in range(self.halves)] + [(part, 0) for part in self.parts]
        self.copies = []

    def take_ready(
        self, progress: Progress, work: Work, words: Words, gate: Gate, watch: Watch, config: Any
    ) -> tuple[Any, ...]:
        """In arrival order: a queue of its own for each item, for which it has waited so many nanoseconds."""
        item = self.item = next(self.left, None)
        assert progress.ready == (self.taken - 1, self.taken), "what it knew of the queues is handed back"
        assert progress.passed.over == int(self.taken > self.over), "who is told that it is over waits no more"
        assert config is self.config
        self.taken += 1
        if item is None:
            return 0, Item(7, 7, 7, 3, 9, 7, 1, 7, 0), 7, progress.cursor, Ready(7, 7)
        made = Item(0, item.pm, item.pn, 0, work.k_steps, 0, 1, -1, 0)
        return 1, made, 100 + self.taken, progress.cursor, Ready(self.taken - 1, self.taken)

    def pass_gate(
        self, passing: Item, passed: Passed, work: Work, words: Words, gate: Gate, watch: Watch, noted: int,
        before: int, config: Any,
    ) -> tuple[Passed, int]:  # fmt: skip
        """The waits of an item; a launch that is over makes none."""
        item = self.item
        assert item is not None, "STOP has no gate"
        assert (passing.pm, passing.pn) == (item.pm, item.pn), "a gate knows rows and columns of the output"
        tile = (ROWS, self.shape.columns)
        assert (tile[::-1] if self.swapped else tile) == (config.BLOCK_M, config.BLOCK_N)
        assert (gate.rows.extent, gate.columns.extent) == (EXTENTS[::-1] if self.swapped else EXTENTS)
        assert (config.ROW_CHUNKS, config.COLUMN_CHUNKS, config.PROBE) == ("uniform", "none", False)
        assert before == (100 + self.taken if self.ordered else 0), "what the item was waited for"
        over = passed.over
        if not over:
            self.log.append(Pass(item))
            over = int(self.items.index(item) >= self.over)
        return Passed(over, 0, 0, 0, 0), 0

    def fenced(self, value: int) -> int:
        self.log.append(Acquired())
        return value

    def leave_gate(
        self, work: Work, words: Words, gate: Gate, watch: Watch, over: int, rows: str, columns: str
    ) -> None:
        assert (rows, columns) == ("uniform", "none")
        self.log.append(LeftGate(bool(over)))

    def nan(self, text: str) -> Nan:
        assert text == "nan"
        self.poisoned = (self.poisoned + 1) % len(self.parts)
        if self.poisoned == 0:
            self.log.append(Poisoned(self.item))
        return Nan(self.poisoned)

    def zeros(self, shape: tuple[int, int], *_: object) -> Accumulator:
        assert shape[0] == self.half_rows
        return Accumulator(shape[1])

    def mma(self, x: Buffer | Held, y: Buffer, acc: Accumulator, is_async: bool, use_acc: bool = True) -> Accumulator:
        part = self.parts.index(y.stages.dtype.name)
        assert is_async
        assert isinstance(x, Held) == (self.shape.narrow and part == len(self.parts) - 1)
        assert x.stages.dtype.name == "x"
        assert divmod(x.at, self.halves) == (y.at, self.half)
        assert acc.width == self.shape.widths[part]
        assert acc.part in (None, part)
        self.log.append(Multiply(y.at, part))
        return Accumulator(acc.width, (acc.steps if use_acc else 0) + 1, part, under_way=True)

    def retire(self, left: int, accs: tuple[Accumulator | Held, ...]) -> Any:
        self.log.append(Retire(left))
        if left == 0:
            accs = tuple(acc._replace(under_way=False) if isinstance(acc, Accumulator) else acc for acc in accs)
        return accs[0] if len(accs) == 1 else accs

    def finished(self, acc: Accumulator, part: int | None) -> None:
        """An accumulator has all K steps of its part."""
        assert part is not None, "neither a product nor NaN"
        assert acc == Accumulator(self.shape.widths[part], max(k_steps(self.item), -1), part)

    def columns_of(self, acc: Accumulator, start: int, width: int, strip: int, rows: int) -> Strip:
        assert (width, strip, rows) == (acc.width, self.shape.strip, self.half_rows)
        assert 0 <= start <= width - strip
        self.finished(acc, acc.part)
        at, beside = divmod(sum(self.shape.widths[: acc.part]) + start, strip)
        assert not beside
        return Strip(at)

    def tma_store(self, out_map: TensorMap, at: list[int], buffer: Buffer) -> None:
        assert buffer.stages.dtype == out_map.dtype
        assert at[0] == (self.item.pm * self.ctas + self.rank) * ROWS + self.half * self.half_rows
        strip, beside = divmod(at[1] - self.item.pn * self.shape.columns, self.shape.strip)
        assert not beside
        self.log.append(Store(buffer.own, self.item, strip))

    def meet(self) -> None:
        self.log.append(Meet())

    def atomic_add(self, count: int, value: int, sem: str, scope: str) -> int:
        assert scope == "gpu"
        assert sem == ("acq_rel" if value else "acquire")
        self.count = count
        assert count == (self.item.slot - self.item.part) * 2 + self.half
        self.log.append((Add if value else Look)(self.item))
        return next(self.answers)

    def store(self, count: int, value: int) -> None:
        assert (count, value) == (self.count, 0)
        self.log.append(Restore(self.item))

    @property
    def half(self) -> int:
        """The half of a tile's rows that the running loop has."""
        return self.who if self.halves > 1 else 0

    def place(self, slot: int, strip: int = 0) -> int:
        """Where a strip of a partial result lies: slots of whole tiles, halves of rows, strips."""
        columns = self.shape.columns
        return slot * ROWS * columns + self.half_rows * (self.half * columns + strip * self.shape.strip)

    def store_partial(self, accs: tuple[Accumulator, ...], at: int, _: object) -> None:
        assert at == self.place(self.item.slot)
        assert len(accs) == len(self.shape.widths)
        for part, acc in enumerate(accs):
            self.finished(acc, part)
        self.log.append(Write(self.item))

    def reduce_partials(self, mine: Strip, at: int, item: Item, _: object) -> Strip:
        assert (item.part, item.parts) == (self.item.part, self.item.parts)
        assert at == self.place(self.item.slot - item.part, mine.strip)
        if mine.strip == 0:
            self.log.append(ReducePartials(self.item))
        return mine


class Stages(NamedTuple):
    """Shared memory: of an operand's stages, or of C buffers."""

    dtype: Dtype
    count: int
    kernel: Kernel

    def index(self, at: int) -> Buffer:
        assert 0 <= at < self.count
        return Buffer(self, at)


class Buffer(NamedTuple):
    stages: Stages
    at: int

    @property
    def own(self) -> int:
        """Which of the C buffers of the running loop it is."""
        kernel = self.stages.kernel
        return self.at - (kernel.who or 0) * kernel.ring.buffers

    def permute(self, _: object) -> Buffer:
        return self

    def load(self, _: object) -> Held:
        return Held(self.stages, self.at)

    def store(self, part: Strip) -> None:
        kernel = self.stages.kernel
        kernel.log.append(Fill(self.own, kernel.item, part.strip))


class Held(NamedTuple):
    """x's part of a stage, in registers."""

    stages: Stages
    at: int


#: Of these all jitted functions that have no stand-in are run as they stand.
MODULES = (
    schedule_text, items_text, formula_text, load_text, multiply_text, epilogue_text, publish_text, gate_text,
    pair_text, gemm_text,
)  # fmt: skip
#: The structs that kernels make.
PARTS = {**structs_of(structs), "CopyArguments": CopyArguments, "Source": load_text.Source}


# What the checker explores --------------------------------------------------------------------------------------------


def of_load(shape: Ring, items: list[WorkItem], over: int | None = None) -> list[Any]:
    left = iter(items)
    if over is None:

        def scripted(state):
            yield from ()
            return next(left, None), state

        return told(performed(load_turn, shape, scripted, state=LoadState()))

    def answer(op: Any) -> Any:
        return next(left, None) if isinstance(op, Next) else int(isinstance(op, Pass) and items.index(op.item) < over)

    done = performed(load_turn, shape, gated, state=LoadState(over == ALREADY), answer=answer)
    return told([*(op for op in done if not isinstance(op, Next)), LeftGate(over < len(items))])


def of_math(
    shape: Ring, items: list[WorkItem], who: int, counted: tuple[int, ...] = (), over: int | None = None
) -> list[Any]:
    void_from = NEVER if over is None else max(over, 0)
    handed_on = [voided(item) if i >= void_from else item for i, item in enumerate(items)]
    left, answers = iter(handed_on), itertools.cycle(counted)

    def finish(ring, item):
        parts: list[Any] = []
        if item.parts > 1:
            parts, _ = operations(
                fixup(Compute(item)), lambda op: next(answers) if isinstance(op, Look | Add) else 0
            )  # fmt: skip
        for op in parts:  # noqa: UP028 -- a list takes no answers
            yield op
        if item.parts == 1 or any(isinstance(op, ReducePartials) for op in parts):
            yield from store(ring, item)

    def answer(op: Any) -> Any:
        return next(left, None) if isinstance(op, Get) else 0

    found = performed(math_turn, shape, finish, who, state=MathState(), answer=answer)
    return told([op for op in found if not isinstance(op, Compute)])


def performed(turn, *how, state, answer=lambda _: 0) -> list[Any]:
    log: list[Any] = []
    while state is not None:
        done, state = operations(turn(*how, state), answer)
        log += done
    return log


def told(log: list[Any]) -> list[tuple[Any, ...]]:
    """Operations, by name: as tuples ``Look(item) == Add(item)``. Fields of one item that are put or got are one."""
    named = [(type(op).__name__, *op) for op in log]
    return [op for op, last in zip(named, [None, *named], strict=False) if op != last or op[0] not in ("Put", "Get")]


def in_one(log: list[tuple[Any, ...]], wide: int) -> list[tuple[Any, ...]]:
    """Operations with a stage's narrow part beside its wide ones.

    Between them there is nothing, or the stage before is waited for and given back: all of it, as no more is in flight
    than the wide parts. What is in another order stays as it is.
    """
    out, at = [], 0
    while at < len(log):
        stage = log[at][1] if log[at][0] == "Multiply" else None
        parts = [("Multiply", stage, part) for part in range(wide + 1)]
        back = log[at + wide : at + wide + 2]
        if log[at : at + wide + 1] == parts:
            out += [*parts, ("Retire", wide + 1)]
            at += wide + 1
        elif (
            log[at : at + wide] == parts[:-1] and back[:1] == [("Retire", wide)] and back[1][0] == "Arrive"
            and log[at + wide + 2] == parts[-1]
        ):  # fmt: skip
            out += [*parts, ("Retire", wide + 1), back[1]]
            at += wide + 3
        else:
            out.append(log[at])
            at += 1
    return out


def of_stages(log: list[tuple[Any, ...]], parts: int, promoted: bool) -> list[tuple[Any, ...]]:
    """Operations with those of a stage's parts as one: all of them, in order, with nothing between.

    In the promoted form each of them is waited for before the next is started. Operations in another order stay as they
    are, and the checker knows no such operations.
    """
    out, at = [], 0
    while at < len(log):
        op = log[at]
        if op[0] == "Multiply":
            whole = [("Multiply", op[1], 0)]
            for part in range(1, parts):
                whole += [*([("Retire", 0)] if promoted else []), ("Multiply", op[1], part)]
            if log[at : at + len(whole)] == whole:
                at += len(whole)
                out.append(("Mma", op[1]))
                continue
        if op[0] == "Retire":
            op = ("Retire", op[1] / parts)
        out.append(op)
        at += 1
    return out


#: Strips, C buffers at most, and the parts of a tile's columns.
LAYOUTS = (
    (0, 2, (64,)), (0, 2, (64, 32)), (1, 2, (64,)), (2, 2, (64,)), (2, 1, (64,)), (2, 2, (64, 64)), (3, 2, (64, 32)),
    (4, 2, (64,)), (5, 2, (128, 32)), (5, 2, (64, 16)), (7, 2, (64, 32, 16)),
)  # fmt: skip
SHAPES = [
    Shape(Ring(depth, 2, who, promoted, strips, most), parts)
    for who in ("single", "cooperative", "triple", "ping_pong")
    for depth, promoted in ((2, False), (3, False), (4, False), (1, True), (2, True), (3, True))
    for strips, most, parts in LAYOUTS
]
SCRIPTS = [(), (1,), (2, 1), (1, 1, 1, 1, 1), (3, 1, 4, 1, 5, 2)]
COUNTED = [(0, 0), (1,), (2,), (0, 1), (0, 2), (1, 1, 2), (0, 2, 2, 1, 1)]


def items_of(script: tuple[int, ...], parts: tuple[int, ...] = ()) -> list[WorkItem]:
    items = []
    for i, steps in enumerate(script):
        split = (i % 2, parts[i % len(parts)], 4 + i) if parts and parts[i % len(parts)] > 1 else ()
        items.append(WorkItem(i, 0, i, 2 * i, i, i + steps, *split))
    return items


def in_parts() -> list[WorkItem]:
    return items_of((1, 2, 1, 3, 1), (2, 1, 3))


def unmet(done: list[Any]) -> list[Any]:
    """What consumers do, less where their threads meet: at the right places."""
    names = [op[0] for op in done]
    for i, name in enumerate(names):
        if name == "Write":
            assert names[i + 1 : i + 3] == ["Meet", "Add"], "one thread's count speaks for what all have written"
        if name == "Restore":
            assert names[i - 1] == "Meet", "and what it was told goes for all"
    assert {"Look", "Add"} & set(names) or "Meet" not in names, "nobody is met where nothing is counted"
    return [op for op in done if op[0] != "Meet"]


def compared(
    shape: Shape, items: list[WorkItem], counted: tuple[int, ...] = (), *, over: int | None = None,
    math_loops: bool = True, **how: Any,
) -> Kernel:  # fmt: skip
    """The kernel, whose loops were seen to do what is explored."""
    kernel = Kernel(shape, items, counted, over=over, **how)
    assert kernel.made == shape.ring.barriers(), "each barrier takes as many arrivals, and each is used"
    assert kernel.operations(None) == of_load(shape.ring, items, over)
    assert kernel.handed_on[-1][0] == 0, "STOP, an item of no K steps, comes whatever happened"
    void = [handed[0] < 0 for handed in kernel.handed_on[:-1]]
    assert void == [over is not None and i >= over for i in range(len(items))]
    for who in range(shape.ring.num_consumers if math_loops else 0):
        assert unmet(kernel.operations(who)) == of_math(shape.ring, items, who, counted, over)
    return kernel


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_loops_do_what_is_explored(shape):
    for script in SCRIPTS:
        compared(shape, items_of(script))


def test_an_item_is_handed_on_with_its_batch():
    kernel = Kernel(SHAPES[0], [])
    bars = SimpleNamespace(index=lambda at: at)
    items = SimpleNamespace(slots=None, empty=bars, full=bars)
    kernel.names["mbarrier"].wait = kernel.names["mbarrier"].arrive = lambda *_: None
    kernel.handed_on.clear()
    item = kernel.item = items_of((2,))[0]._replace(batch=3)
    config = dataclasses.replace(kernel.config, BATCHED=True)
    kernel.names["hand_on"](items, SimpleNamespace(at=0, phase=0), 1, item, config)
    assert kernel.handed_on[0][3] == 3


PAIRED_SHAPES = [
    Shape(Ring(depth, 2, "cooperative", promoted, strips, ctas=2), parts)
    for depth, promoted, strips, parts in (
        (2, False, 0, (64,)), (3, False, 2, (64,)), (3, False, 3, (64, 32)), (4, False, 5, (128, 32)),
        (2, True, 2, (64, 64)),
    )
]  # fmt: skip


@pytest.mark.parametrize("shape", PAIRED_SHAPES, ids=str)
@pytest.mark.parametrize("rank", [0, 1])
def test_pairs_of_ctas_do_what_is_explored(shape, rank):
    for script in SCRIPTS:
        assert compared(shape, items_of(script), rank=rank).worker == (0, 1), "a pair is one worker"
    compared(shape, items_of((2, 1)), rank=rank, swapped=True, math_loops=False)


def test_a_ticket_is_asked_for_shortly_before_an_items_last_steps_and_told_once():
    kernel = compared(SHAPES[0], items_of((9, 1, 4, 5)), math_loops=False)
    assert queues_text.EARLY.value == 4
    assert kernel.asked == [0, 5, 9, 10, 15], "before the first item; with 4 steps of each to come, or all of it"
    assert kernel.told == [1, 2, 3, 4, 5], "none is thrown away: its item would be nobody's"
    gated = compared(SHAPES[0], items_of((9, 1, 4, 5)), math_loops=False, over=NEVER)
    assert not gated.asked, "a worker that waits at a gate holds no ticket that others could use"


@pytest.mark.parametrize("consumers", ["single", "cooperative", "ping_pong"])
@pytest.mark.parametrize(("strips", "parts"), [(1, (64,)), (2, (64,)), (3, (64, 32)), (7, (64, 32, 16))])
@pytest.mark.parametrize("counted", COUNTED)
def test_parts_are_settled_as_is_explored(consumers, strips, parts, counted):
    compared(Shape(Ring(2, 2, consumers, strips=strips), parts), in_parts(), counted, split=True)


GATED_SHAPES = [
    Shape(Ring(depth, 2, who, promoted, strips), parts)
    for who in ("single", "cooperative", "ping_pong")
    for depth, promoted, strips, parts in ((2, False, 0, (64,)), (3, False, 3, (64, 32)), (1, True, 2, (64, 64)))
]
#: Row tiles that stand apart: first, how many, of how many; of several batches, too.
LOCAL_ROWS = ((0, 2, 4), (2, 2, 6), (1, 1, 3), (1, 2, 3))


@pytest.mark.parametrize("shape", GATED_SHAPES, ids=str)
def test_gated_loops_do_what_is_explored(shape):
    for script in SCRIPTS:
        for over in (ALREADY, *range(len(script)), NEVER):
            compared(shape, items_of(script), over=over)
    compared(shape, items_of((2, 1, 3)), over=1, swapped=True, math_loops=False)


@pytest.mark.parametrize("shape", GATED_SHAPES, ids=str)
@pytest.mark.parametrize("counted", COUNTED)
def test_parts_of_a_launch_that_is_over_are_settled_as_is_explored(shape, counted):
    items = in_parts()
    for over in range(-1, len(items)):
        compared(shape, items, counted, split=True, over=over)


@pytest.mark.parametrize("shape", GATED_SHAPES, ids=str)
def test_in_arrival_order_items_go_the_same_way(shape):
    for steps, count in ((1, 1), (1, 4), (3, 3)):
        items = [item._replace(k_begin=0, k_end=steps) for item in items_of((steps,) * count)]  # whole tiles
        for over in (ALREADY, *range(count), NEVER):
            assert compared(shape, items, over=over, ordered=steps).taken == count + 1


@pytest.mark.parametrize("copies", ["none", "rows", "columns"])
def test_copies_are_made_once_before_the_warps_part_and_change_nothing_behind(copies):
    for shape in GATED_SHAPES[:3]:
        kernel = compared(shape, items_of((2, 1)), over=NEVER, copies=copies)
        assert [given[1].signals for given in kernel.copied] == ([] if copies == "none" else [f"of {copies}"])


@pytest.mark.parametrize("local", LOCAL_ROWS)
def test_rows_that_stand_apart_are_loaded_from_there(local):
    items = items_of(SCRIPTS[-1])
    for shape in GATED_SHAPES:
        kernel = compared(shape, items, over=NEVER, local=local, math_loops=False)
        assert any(item.pm in kernel.local for item in items)


@pytest.mark.parametrize("out_size", [2, 4])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_c_buffers_are_those_of_the_plan(tile, out_size):
    buffers = tile.buffers(out_size)
    assert Ring(2, strips=tile.columns // tile.strip(out_size)).buffers == buffers
    for strip in (tile.strip(out_size), tile.strip(out_size, 32)):  # narrow ones go through as many buffers
        assert Ring(2, strips=tile.columns // strip, most_buffers=buffers).buffers == buffers
        assert all(width % strip == 0 for widest in (128, 256) for width in widths(tile.columns, widest))


CHANGED_SHAPES = [shape for shape in SHAPES if shape.ring.depth == 3 and shape.ring.strips]


def differs(edits: tuple[Edit, ...]) -> bool:
    """Whether an edited text is seen to differ: by a stand-in that is asked for nonsense, or in what is done."""
    items = items_of(SCRIPTS[-1])
    try:
        for shape in CHANGED_SHAPES:
            compared(shape, items, edits=edits)
            compared(shape, in_parts(), (0, 1), split=True, edits=edits)
        for shape, rank in itertools.product(PAIRED_SHAPES, (0, 1)):
            assert compared(shape, items, edits=edits, rank=rank).worker == (0, 1), "a pair is one worker"
        for local in LOCAL_ROWS:
            compared(GATED_SHAPES[0], items, edits=edits, over=NEVER, local=local, math_loops=False)
        for shape, over, swapped in itertools.product(GATED_SHAPES, (ALREADY, 1, NEVER), (False, True)):
            compared(shape, items, edits=edits, over=over, swapped=swapped, math_loops=not swapped)
    except AssertionError:
        return True
    return False


# Publish -------------------------------------------------------------------------------------------------------------


class Pending(NamedTuple):
    """The assembly that waits for a thread's stores."""

    text: str


class Announced(NamedTuple):
    """A signal: of which chunk, by what, and how it is ordered."""

    chunk: int
    epoch: int
    sem: str
    scope: str


def published(row: int, count: int, rows: int, per_chunk: int, times: int, counted: dict[int, int]) -> list[Any]:
    """What the kernel's text does to publish rows [row, row + count), ``counted`` of which others have counted."""
    log: list[Any] = []

    def assembly(text: str, constraints: str, arguments: list[int], **_: Any) -> int:
        log.append(Pending(text))
        return arguments[0]

    def add(chunk: int, value: int, sem: str, scope: str) -> int:
        assert (sem, scope) == ("acq_rel", "gpu"), "the count speaks for all that have counted before"
        log.append(CountRows(chunk, value))
        return counted[chunk]

    def store(chunk: int, value: int) -> None:
        assert value == 0
        log.append(RestoreRows(chunk))

    gl = SimpleNamespace(
        inline_asm_elementwise=assembly, minimum=min, atomic_add=add, store=store, int32=None,
        atomic_xchg=lambda chunk, epoch, sem, scope: log.append(Announced(chunk - 100, epoch, sem, scope)),
    )  # fmt: skip
    names: dict[str, Any] = {
        "gl": gl, "range": range, "barrier": lambda: log.append(Meet()), "chunk_of": chunks.chunk_of,
        "rows_in": chunks.rows_in,
    }  # fmt: skip
    for jitted in (publish_text.landed, publish_text.publish):
        names[jitted.fn.__name__] = FunctionType(jitted.fn.__code__, names)
    names["publish"](row, count, rows, structs.Publishing(100, 0, 9, per_chunk, times))
    return log


@pytest.mark.parametrize(("per_chunk", "times"), [(64, 1), (48, 3), (200, 2), (7, 4)])
def test_rows_are_published_as_is_explored(per_chunk, times):
    rows, count = 300, 64
    for row in range(0, rows + count, count):
        end = min(row + count, rows)
        first, last = row // per_chunk, (end - 1) // per_chunk
        shares = [
            Share(c, rows_in, min(rows, (c + 1) * per_chunk) * times - c * per_chunk * times)
            for c in range(first, last + 1)
            if (rows_in := min(end, (c + 1) * per_chunk) - max(row, c * per_chunk)) > 0
        ]
        for complete in itertools.product((False, True), repeat=min(2, len(shares))):
            done = dict(itertools.zip_longest((share.chunk for share in shares), complete, fillvalue=False))
            counted = {share.chunk: share.due - share.rows - (not done[share.chunk]) for share in shares}
            explored, _ = operations(
                publish(0, shares), lambda op, counted=counted: counted[op.chunk] if isinstance(op, CountRows) else 0
            )  # fmt: skip
            wanted = [Announced(op.chunk, 9, "release", "sys") if isinstance(op, Announce) else op for op in explored]
            pending, met, *found = published(row, count, rows, per_chunk, times, counted)
            assert isinstance(wanted.pop(0), Landed)
            assert "cp.async.bulk.wait_group 0;" in pending.text, "its writes, not only its reads of shared memory"
            assert "fence.proxy.async.global" in pending.text
            assert isinstance(met, Meet), "one thread's release speaks for the whole consumer"
            assert [(type(op), *op) for op in found] == [(type(op), *op) for op in wanted]


def test_a_text_that_says_the_same_is_not_seen():
    assert not differs(())
    assert not differs(at(kernel_text.STEPS, replace("phase ^ 1", "phase + 1 - 2 * phase")))


@pytest.mark.parametrize("edits", kernel_text.HOPPER_GEMM.values(), ids=kernel_text.HOPPER_GEMM)
def test_an_edited_text_is_seen(edits):
    assert differs(edits)


def test_a_protocol_that_differs_is_seen(monkeypatch):
    # The comparison is one: with another phase in the protocol nothing of the above would hold.
    shape, items = SHAPES[0], items_of((2, 1))
    monkeypatch.setattr("tilestream_tools.verify.protocol.before", lambda stage, depth: stage)
    kernel = Kernel(shape, items)
    kernel.operations(None)
    assert kernel.operations(0) != of_math(shape.ring, items, 0)
    assert epilogue_text.fixup is gemm_text.fixup
