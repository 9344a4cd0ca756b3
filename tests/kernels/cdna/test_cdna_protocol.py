"""CDNA's kernels do, operation by operation, what the checker explores.

The kernels' own texts are run on the stand-ins of `emulated` and `emulated_attention`, which here write down what is
asked of the stages, and are compared with the operations of `tilestream_tools.verify.shared_ring` and
`tilestream_tools.verify.shared_attention` for the same items. The barriers inside the loops are the compiler's, and the
compile gate looks for them: those that the texts have themselves are compared.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon.language")

import emulated_attention
from emulated import Machine, Stages
from emulated_attention import AttentionMachine
from test_attention_numbers import check
from test_cdna_numbers import Case as GemmCase
from test_cdna_numbers import prepared
from turns import operations

from attention_maths import Case as AttentionCase
from tilestream_tools.verify import shared_attention, shared_ring
from tilestream_tools.verify.shared_ring import Arrive, Copy, Fetch, Item, Put, Read, SharedRing, WaitLoads

BLOCK_K = 64
BLOCK, COLUMNS = 32, 32


class Noted:
    """A view that tells who reads and writes through it."""

    def __init__(self, machine: Any, view: Any, place: Any) -> None:
        self.machine, self.view, self.place = machine, view, place

    def permute(self, order: list[int]) -> Noted:
        return Noted(self.machine, self.view.permute(order), self.place)

    def load(self, layout: Any) -> Any:
        self.machine.note("read", self.place)
        return self.view.load(layout)

    def store(self, tensor: Any) -> None:
        self.machine.note("put", self.place)
        self.view.store(tensor)


class Recording:
    """Of a machine: what the stages are asked for, in the words of the models. Each item has rooms of its own.

    A subclass says which ``place`` of the model's a room's stage is, and which ``step`` lies at an address.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.log: list[Any] = []
        self.rooms: list[list[Any]] = []
        self.names["gl"].allocate_shared_memory = self.allocate
        self.names["barrier"] = lambda: self.log.append("barrier")
        self.names["viewed"] = lambda stage, shape, layout: Noted(self, stage.seen(shape, layout), self.place_of(stage))

    def allocate(self, dtype: Any, shape: list[int], _: Any) -> Stages:
        made = Stages(dtype, shape)
        self.rooms.append(made.stages)
        return made

    def place_of(self, stage: Any) -> Any:
        return next(
            self.place(i, number)
            for i, room in enumerate(self.rooms)
            for number, one in enumerate(room)
            if one is stage.flat
        )

    def copy(self, stage: Any, at: Any, offsets: Any) -> None:
        super().copy(stage, at, offsets)
        self.note("copy", self.place_of(stage), self.step(at))

    def buffer_load(self, at: Any, offsets: Any, *more: Any, **named: Any) -> Any:
        self.log.append(("fetch", *self.fetched(at)))
        return super().buffer_load(at, offsets, *more, **named)

    def wait(self, left: int) -> None:
        super().wait(left)
        self.log.append(("wait", left))


# GEMM -----------------------------------------------------------------------------------------------------------------


class GemmMachine(Recording, Machine):
    """Rooms are A's, then B's. Copies and reads of B are asked for as A's, right behind them: they are left out."""

    def place(self, room: int, number: int) -> tuple[int, int]:
        return room % 2, number

    def step(self, at: Any) -> int:
        return at.at % self.k // BLOCK_K

    def fetched(self, at: Any) -> tuple[int, int]:
        return int(at.memory is not self.a), self.step(at)

    def note(self, what: str, place: tuple[int, int], *step: int) -> None:
        operand, number = place
        if what == "put":
            self.log.append((what, operand, number))
        elif operand == 0:
            self.log.append((what, number, *step))


def gemm_does(case: GemmCase) -> list[Any]:
    """What the kernel's text does."""
    filled, items, a = prepared(case)
    machine = GemmMachine(items, False)
    machine.a, machine.k = a, case.k
    machine.run(filled)
    return machine.log


def gemm_is_explored(case: GemmCase) -> list[Any]:
    """What the model says of the same items, one after the other; a wait in groups, as the text has it."""
    ring, direct = SharedRing(case.stages, loads=1, warps=1), case.copies == "direct"
    log: list[Any] = []
    for number in range(-(-case.m // 64)):
        item = Item(number, case.k // BLOCK_K, bool(case.k % BLOCK_K))
        ops, _ = operations((shared_ring.direct if direct else shared_ring.staged)(ring, item))
        behind: Any = None
        for op in ops:
            match op:
                case Copy():
                    log.append(("copy", op.stage, op.step))
                case Fetch():
                    log.append(("fetch", op.operand, op.step))
                case Put():
                    log.append(("put", op.operand, op.stage))
                case Read():
                    log.append(("read", op.stage))
                case WaitLoads() if direct and behind not in (Fetch, WaitLoads):
                    log.append(("wait", op.left))
                case Arrive() if direct and behind not in (WaitLoads, Put, Fetch):
                    log.append("barrier")
            if type(op).__name__ not in ("Await", "Have"):
                behind = type(op)
    return log


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("rest", [0, 16])
@pytest.mark.parametrize(("copies", "stages"), [("direct", 3), ("direct", 4), ("staged", 2)])
def test_gemm_does_what_was_checked(copies, stages, rest, steps):
    # Two row tiles, one after the other: the second begins where the first left the ring.
    case = GemmCase(128, 64, 64 * steps + rest, copies=copies, stages=stages)
    assert gemm_does(case) == gemm_is_explored(case)


# Attention ------------------------------------------------------------------------------------------------------------


class WrittenAttention(Recording, AttentionMachine):
    """Rooms are the queries', the keys' and the values'."""

    made: list[WrittenAttention]

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.made.append(self)

    def place(self, room: int, number: int) -> Any:
        return "queries" if room % 3 == 0 else number * shared_attention.OPERANDS + (room % 3 - 1)

    def step(self, at: Any) -> int:
        """0 of queries; of keys and values, the block's, and one."""
        return 0 if at.memory is self.queries else 1 + at.at // (BLOCK * COLUMNS)

    def fetched(self, at: Any) -> tuple[int]:
        return (self.step(at),)

    def note(self, what: str, *more: Any) -> None:
        self.log.append((what, *more))

    def attend(self, filled: tuple[Any, ...]) -> None:
        self.queries = filled[0].memory
        super().attend(filled)


def attention_does(monkeypatch: Any, arch: str, copies: str, stages: int, blocks: int) -> list[Any]:
    """What the kernel's text does: two tiles of the same keys, one after the other."""
    monkeypatch.setattr(WrittenAttention, "made", [], raising=False)
    monkeypatch.setattr(emulated_attention, "AttentionMachine", WrittenAttention)
    case = AttentionCase((2 * 64,), (blocks * BLOCK,), (1, 1), (COLUMNS, COLUMNS))
    check(case, arch, copies, stages, block=BLOCK)
    (machine,) = WrittenAttention.made
    return machine.log


def attention_is_explored(copies: str, stages: int, blocks: int) -> list[Any]:
    """What the model says of the same items; a wait in blocks, as the text has it."""
    direct = copies == "direct"
    ring = SharedRing(stages if direct else 1, loads=1, warps=1, operands=shared_attention.OPERANDS)
    text = shared_attention.attend_direct if direct else shared_attention.attend_staged
    log: list[Any] = []
    for number in range(2):
        ops, _ = operations(text(ring, Item(number, blocks)))
        for i, op in enumerate(ops):
            behind = next((x for x in ops[i + 2 :] if type(x) is not WaitLoads), None)
            match op:
                # The queries' room is both slots of a stage.
                case Copy(slot, _, step) | Put(slot, _, step) | Read(slot, _, step) if (
                    step or slot == shared_attention.KEYS
                ):
                    place = slot if step else "queries"
                    what = type(op).__name__.lower()
                    log.append((what, place, step) if what == "copy" else (what, place))
                case Fetch(_, step):
                    log.append(("fetch", step))
                case WaitLoads(left) if direct:
                    if log[-1][0] == "wait":  # one wait for what several are for
                        log.pop()
                    log.append(("wait", left // shared_attention.OPERANDS))
                case Arrive() if not isinstance(behind, Read | Put):
                    log.append("barrier")
    return log


@pytest.mark.parametrize("blocks", [1, 2, 3, 6])
@pytest.mark.parametrize(
    ("arch", "copies", "stages"), [("gfx950", "direct", 3), ("gfx950", "direct", 4), ("gfx942", "staged", 2)]
)
def test_attention_does_what_was_checked(monkeypatch, arch, copies, stages, blocks):
    found = attention_does(monkeypatch, arch, copies, stages, blocks)
    assert found == attention_is_explored(copies, stages, blocks)


def test_what_is_compared_is_there(monkeypatch):
    gemm = gemm_does(GemmCase(128, 64, 64 * 4 + 16))
    attention = attention_does(monkeypatch, "gfx950", "direct", 3, 4)
    # Two an item: behind its steps, and behind its rest; behind its queries, and behind its blocks.
    assert gemm.count("barrier") == attention.count("barrier") == 4
    assert {entry[0] for entry in gemm if entry != "barrier"} == {"copy", "wait", "read", "fetch", "put"}
    assert {entry[0] for entry in attention if entry != "barrier"} == {"copy", "wait", "read"}
