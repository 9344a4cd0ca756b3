"""The Hopper kernel does, operation by operation, what the checker explores.

The kernel's own text is run here, as plain Python, on stand-ins that write down what they are asked to do. What comes
of it is compared with the operations of `tilestream.verify.protocol` and of `tilestream.kernels.loop.settle` for the
same items. So whatever is changed in one of the texts, and not in the other, fails here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton")

from tilestream.kernels.hopper import epilogue as epilogue_text
from tilestream.kernels.hopper import gemm as gemm_text
from tilestream.kernels.loop import Add, AddUp, Compute, Look, Restore, Write, settle
from tilestream.plan.hopper import TILES
from tilestream.schedule import WorkItem, ring
from tilestream.verify.protocol import (
    Arrive,
    Barrier,
    Drain,
    Epilogue,
    Expect,
    Fence,
    Fill,
    Get,
    Load,
    LoadState,
    MathState,
    Mma,
    Put,
    Retire,
    Ring,
    Store,
    WaitBarrier,
    load_turn,
    math_turn,
    store,
)  # fmt: skip

COLUMNS, ROWS, BLOCK_K = 64, 128, 32
NAMES = ("full", "empty", "item_full", "item_empty", "order")


class Meet(NamedTuple):
    """The threads of a consumer wait for each other."""


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


class Part(NamedTuple):
    """A strip of an accumulator."""

    strip: int

    def to(self, _: object) -> Part:
        return self


class Kernel:
    """The kernel for a ring and a script of items, run loop by loop; ``last``: the answers to looks and counts."""

    def __init__(self, shape: Ring, items: list[WorkItem], counted: tuple[int, ...] = (), split: bool = False) -> None:
        self.ring, self.items, self.counted = shape, items, counted
        self.log: list[Any] = []
        self.made: dict[Barrier, int] = {}
        self.handed_on: list[dict[int, int]] = []
        self.halves = 2 if shape.consumers == "cooperative" else 1
        strip = COLUMNS // max(1, shape.strips)
        gl = SimpleNamespace(
            program_id=lambda _: 0, num_programs=lambda _: 1, static_range=range, zeros=lambda *_: 0.0,
            atomic_add=self.atomic_add, store=self.store, warp_specialize=self.warp_specialize,
            allocate_shared_memory=lambda dtype, shape, _: Stages(dtype, shape, self),
            NVMMASharedLayout=Anything(), SliceLayout=Anything(), arange=Anything(), int64=None, int32=None,
            float32=None,
        )  # fmt: skip
        mbarrier = SimpleNamespace(
            wait=lambda bar, parity: self.log.append(WaitBarrier(bar, int(parity))),
            arrive=lambda bar: self.log.append(Arrive(bar)),
            expect=self.expect,
        )
        self.names = {
            "gl": gl, "tl": SimpleNamespace(cast=lambda value, _: value, int32=None), "mbarrier": mbarrier,
            "tma": SimpleNamespace(store_wait=lambda left: self.log.append(Drain(left))), "range": range,
            "gdc_wait": Anything(), "gdc_launch_dependents": Anything(), "enter": Anything(), "leave": Anything(),
            "take": self.take, "put": self.put, "get": self.get, "step": ring.step, "skip": ring.skip,
            "before": ring.before, "ITEMS": gemm_text.ITEMS.value, "make_barriers": self.make_barriers,
            "make_slots": Anything(), "load_operand": self.load_operand, "mma_layout": Anything(),
            "operand": lambda stages, at, *_: at, "warpgroup_mma": self.mma, "warpgroup_mma_wait": self.retire,
            "strip_of": lambda acc, start, *_: Part(start // strip), "add_up": self.add_up, "barrier": self.meet,
            "hand_in": self.hand_in, "activate": lambda x, _: x,
            "fence_async_shared": lambda: self.log.append(Fence()),
            "tma_store": lambda _, at, buffer: self.log.append(Store(buffer.own, self.item, at[1] % COLUMNS // strip)),
        }  # fmt: skip
        for name in ("load_loop", "math_loop", "multiply", "multiply_precisely", "finish_strip", "settle"):
            self.names[name] = self.text(getattr(gemm_text, name))
        if not shape.strips:
            self.names["finish_strip"] = Anything()
        self.strip = strip
        gemm = self.text(gemm_text.gemm)
        code = gemm.__code__
        given = dict.fromkeys(code.co_varnames[: code.co_argcount], 0)
        block = SimpleNamespace(shape=[16, 16])
        given |= {
            "x_map": SimpleNamespace(dtype=SimpleNamespace(primitive_bitwidth=16), block_type=Box(3, block.shape)),
            "y_map": SimpleNamespace(dtype=SimpleNamespace(primitive_bitwidth=16), block_type=Box(100, block.shape)),
            "out_map": SimpleNamespace(dtype="out", block_type=block), "STAGES": shape.depth, "ROWS": ROWS,
            "COLUMNS": COLUMNS, "STRIP": strip, "BLOCK_K": BLOCK_K, "STORE": "tma" if shape.strips else "direct",
            "KIND": "stream_k" if split else "dynamic", "CONSUMERS": shape.consumers, "PROMOTE": shape.precise,
            "CHAINED": True, "BIAS": "none", "SCALES": False, "RESIDUAL": False, "SCALED": False, "FLIPPED": False,
            "BATCHED": False, "SWAPPED": False,
        }  # fmt: skip
        self.left = iter(items)
        self.item: WorkItem | None = None
        self.answers: Iterator[int] = iter(())
        gemm(**given)

    def text(self, jitted: Any) -> FunctionType:
        """A function of the kernel, with the stand-ins for all that it calls."""
        return FunctionType(jitted.fn.__code__, self.names, jitted.fn.__name__, jitted.fn.__defaults__)

    def operations(self, who: int | None) -> list[Any]:
        """What a loop does: ``who`` of the math loops, or the load loop."""
        self.log, self.who, self.at, self.answers = [], who, -1, itertools.cycle(self.counted)
        function, arguments = self.loops[-1 if who is None else who]
        function(*arguments)
        return told(self.log)

    # What the kernel asks for ---------------------------------------------------------------------------------------

    def warp_specialize(self, loops, warps, registers) -> None:
        self.loops = loops
        assert warps == [4, 1][-len(warps) :]
        assert len(loops) == len(warps) + 1 == len(registers) + 1 == self.ring.num_consumers + 1

    def make_barriers(self, count: int, arrivals: int) -> Barriers:
        name = NAMES[len({bar.name for bar in self.made})]
        self.made |= {Barrier(name, i): arrivals for i in range(count)}
        return Barriers(name)

    def take(self, *_: object) -> tuple[int, ...]:
        item = self.item = next(self.left, None)
        if item is None:
            return (0, 7, 7, 7, 3, 9, 7, 7, 7, *[0] * 6)  # what a void ticket says is of no account
        return (1, 0, item.pm, item.pn, item.k_begin, item.k_end, item.part, item.parts, item.slot, *[0] * 6)

    def put(self, _, slot: int, field: int, value: int, warps: int) -> None:
        assert warps == 1
        if field == 0:
            self.handed_on.append({})
        self.handed_on[-1][field] = value
        self.log.append(Put(slot, self.item))

    def get(self, _, slot: int, field: int, warps: int) -> Integer:
        assert warps == 4
        if field == 0:
            self.at += 1
            self.item = self.items[self.at] if self.at < len(self.items) else None
        self.log.append(Get(slot))
        return Integer(self.handed_on[self.at][field])

    def expect(self, bar: Barrier, nbytes: int) -> None:
        self.log.append(Expect(bar))
        self.nbytes = nbytes

    def load_operand(self, tensor_map, bar, stages, at, batch, row, k, halves, rows, *_: object) -> None:
        first = tensor_map.block_type.nbytes == 3
        self.nbytes -= halves * tensor_map.block_type.nbytes
        assert (halves, row) == ((self.halves, self.item.pm * ROWS) if first else (1, self.item.pn * COLUMNS))
        load = Load(at, self.item, k // BLOCK_K, bar)
        if first:
            self.log.append(load)
        else:
            assert told(self.log[-1:]) == told([load])
            assert self.nbytes == 0, "what is expected is what is loaded"

    def mma(self, x: int, y: int, acc, is_async: bool, use_acc: bool = True) -> float:
        assert is_async
        assert (x // self.halves, x % self.halves) == (y, self.half)
        self.log.append(Mma(y))
        return acc

    def retire(self, left: int, values: tuple[float]) -> float:
        self.log.append(Retire(left))
        return values[0]

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
        return self.who if self.halves == 2 else 0

    def place(self, slot: int, strip: int = 0) -> int:
        """Where a strip of a partial result lies: slots of whole tiles, halves of rows, strips."""
        half_rows = ROWS // self.halves
        return slot * ROWS * COLUMNS + half_rows * (self.half * COLUMNS + strip * self.strip)

    def hand_in(self, acc, at: int, *_: object) -> None:
        assert at == self.place(self.item.slot)
        self.log.append(Write(self.item))

    def add_up(self, mine: Part, at: int, part: int, parts: int, size: int, *_: object) -> Part:
        assert (part, parts, size) == (self.item.part, self.item.parts, ROWS * COLUMNS)
        assert at == self.place(self.item.slot - part, mine.strip)
        if mine.strip == 0:
            self.log.append(AddUp(self.item))
        return mine


class Box(NamedTuple):
    nbytes: int
    shape: list[int]


class Stages(NamedTuple):
    """Shared memory: of stages, or of C buffers."""

    dtype: Any
    shape: list[int]
    kernel: Kernel

    def index(self, at: int) -> Buffer:
        return Buffer(at - (self.kernel.who or 0) * self.kernel.ring.buffers, self.kernel)


class Buffer(NamedTuple):
    own: int
    kernel: Kernel

    def store(self, part: Part) -> None:
        self.kernel.log.append(Fill(self.own, self.kernel.item, part.strip))


# What the checker explores --------------------------------------------------------------------------------------------


def of_load(shape: Ring, items: list[WorkItem]) -> list[Any]:
    left = iter(items)

    def scripted(state):
        yield from ()
        return next(left, None), state

    return told(performed(load_turn, shape, scripted, state=LoadState()))


def of_math(shape: Ring, items: list[WorkItem], who: int, counted: tuple[int, ...] = ()) -> list[Any]:
    left, answers = iter(items), itertools.cycle(counted)

    def finish(ring, item):
        yield Epilogue(item)
        last = item.parts == 1
        if not last:
            settling, answer = settle(Compute(item)), None
            while True:
                try:
                    op = settling.send(answer)
                except StopIteration:
                    break
                answer = next(answers) if isinstance(op, Look | Add) else 0
                last = last or isinstance(op, AddUp)
                yield op
        if last:
            yield from store(ring, item)

    found = performed(math_turn, shape, finish, who, state=MathState(), get=lambda: next(left, None))
    return told([op for op in found if not isinstance(op, Epilogue | Compute)])


def performed(turn, *how, state, get=lambda: None) -> list[Any]:
    log: list[Any] = []
    while state is not None:
        loop, answer = turn(*how, state), None
        while True:
            try:
                op = loop.send(answer)
            except StopIteration as end:
                state = end.value
                break
            log.append(op)
            answer = get() if isinstance(op, Get) else 0
    return log


def told(log: list[Any]) -> list[tuple[Any, ...]]:
    """Operations, by name: as tuples ``Look(item) == Add(item)``. Fields of one item that are put or got are one."""
    named = [(type(op).__name__, *op) for op in log]
    return [op for op, last in zip(named, [None, *named], strict=False) if op != last or op[0] not in ("Put", "Get")]


SHAPES = [
    Ring(depth, 2, who, precise, strips)
    for who in ("single", "cooperative", "ping_pong")
    for depth, precise in ((2, False), (3, False), (4, False), (1, True), (2, True), (3, True))
    for strips in (0, 1, 2, 4)
]
SCRIPTS = [(), (1,), (2, 1), (1, 1, 1, 1, 1), (3, 1, 4, 1, 5, 2)]


def items_of(script: tuple[int, ...], parts: tuple[int, ...] = ()) -> list[WorkItem]:
    items = []
    for i, steps in enumerate(script):
        split = (i % 2, parts[i % len(parts)], 4 + i) if parts and parts[i % len(parts)] > 1 else ()
        items.append(WorkItem(i, 0, i, 2 * i, i, i + steps, *split))
    return items


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_loops_do_what_is_explored(shape):
    for script in SCRIPTS:
        items = items_of(script)
        kernel = Kernel(shape, items)
        assert kernel.operations(None) == of_load(shape, items)
        assert kernel.handed_on[-1][0] == 0, "STOP is an item of no K steps"
        for who in range(shape.num_consumers):
            assert kernel.operations(who) == of_math(shape, items, who)


@pytest.mark.parametrize("consumers", ["single", "cooperative", "ping_pong"])
@pytest.mark.parametrize("strips", [1, 2])
@pytest.mark.parametrize("counted", [(0, 0), (1,), (2,), (0, 1), (0, 2), (1, 1, 2), (0, 2, 2, 1, 1)])
def test_parts_are_settled_as_is_explored(consumers, strips, counted):
    shape = Ring(2, 2, consumers, strips=strips)
    items = items_of((1, 2, 1, 3, 1), (2, 1, 3))
    kernel = Kernel(shape, items, counted, split=True)
    kernel.operations(None)
    for who in range(shape.num_consumers):
        done = kernel.operations(who)
        assert [op for op in done if op[0] != "Meet"] == of_math(shape, items, who, counted)
        names = [op[0] for op in done]
        for at, name in enumerate(names):
            if name == "Write":
                assert names[at + 1 : at + 3] == ["Meet", "Add"], "one thread's count speaks for what all have written"
            if name == "Restore":
                assert names[at - 1] == "Meet", "and what it was told goes for all"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_barriers_count_the_same_arrivals(shape):
    made = Kernel(shape, []).made
    used = {barrier: count for barrier, count in made.items() if barrier in shape.barriers()}
    assert used == shape.barriers()
    assert {barrier.name for barrier in made.keys() - used.keys()} <= {"order"}


@pytest.mark.parametrize("out_size", [2, 4])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_c_buffers_are_those_of_the_plan(tile, out_size):
    assert Ring(2, strips=tile.columns // tile.strip(out_size)).buffers == tile.buffers(out_size)


def test_a_text_that_differs_is_seen(monkeypatch):
    # The comparison is one: with another phase in the protocol nothing of the above would hold.
    shape, items = SHAPES[0], items_of((2, 1))
    monkeypatch.setattr("tilestream.verify.protocol.before", lambda stage, depth: stage)
    kernel = Kernel(shape, items)
    kernel.operations(None)
    assert kernel.operations(0) != of_math(shape, items, 0)
    assert epilogue_text.settle is gemm_text.settle
