"""CDNA's attention does, operation by operation, what the checker explores: see `test_cdna_protocol`.

The kernel's own text is run on `emulated_attention`, which here writes down what is asked of the stages of keys and of
values, and is compared with the operations of `tilestream_tools.verify.shared_attention` for the same items.
Barriers that a
read or a put follows are the compiler's, and the compile gate looks for them: those of the text itself are compared.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon.language")

import emulated_attention
from emulated import Stages
from test_attention_numbers import check

from attention_maths import Case
from tilestream_tools.verify import shared_attention as model
from tilestream_tools.verify.shared_ring import Arrive, Copy, Fetch, Item, Put, Read, SharedRing, WaitLoads

BLOCK, COLUMNS = 32, 32


class Noted:
    """A view that tells who reads and writes through it."""

    def __init__(self, machine: Written, view: Any, place: Any) -> None:
        self.machine, self.view, self.place = machine, view, place

    def permute(self, order: list[int]) -> Noted:
        return Noted(self.machine, self.view.permute(order), self.place)

    def load(self, layout: Any) -> Any:
        self.machine.log.append(("read", self.place))
        return self.view.load(layout)

    def store(self, tensor: Any) -> None:
        self.machine.log.append(("put", self.place))
        self.view.store(tensor)


class Written(emulated_attention.AttentionMachine):
    """Writes down what the stages are asked for, in the words of the model. Each item has room of its own, in order."""

    log: list[Any]

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.rooms: list[list[Any]] = []
        self.names["gl"].allocate_shared_memory = self.allocate
        self.names["barrier"] = lambda: self.log.append("barrier")
        self.names["viewed"] = lambda stage, shape, layout: Noted(self, stage.seen(shape, layout), self.place(stage))

    def allocate(self, dtype: Any, shape: list[int], _: Any) -> Stages:
        made = Stages(dtype, shape)
        self.rooms.append(made.stages)
        return made

    def place(self, stage: Any) -> Any:
        """The slot, or that it is the queries' room."""
        at = next(i for i, room in enumerate(self.rooms) if any(one is stage.flat for one in room))
        number = next(i for i, one in enumerate(self.rooms[at]) if one is stage.flat)
        return "queries" if at % 3 == 0 else number * model.OPERANDS + (at % 3 - 1)

    def step(self, at: Any) -> int:
        """0 of queries; of keys and values, the block's, and one."""
        return 0 if at.memory is self.queries else 1 + at.at // (BLOCK * COLUMNS)

    def copy(self, stage: Any, at: Any, offsets: Any) -> None:
        super().copy(stage, at, offsets)
        self.log.append(("copy", self.place(stage), self.step(at)))

    def buffer_load(self, at: Any, offsets: Any, *more: Any, **named: Any) -> Any:
        self.log.append(("fetch", self.step(at)))
        return super().buffer_load(at, offsets, *more, **named)

    def wait(self, left: int) -> None:
        super().wait(left)
        self.log.append(("wait", left))

    def attend(self, filled: tuple[Any, ...]) -> None:
        self.queries = filled[0].memory
        super().attend(filled)


def written(monkeypatch: Any, arch: str, copies: str, stages: int, blocks: int) -> list[Any]:
    """What the kernel's text does: two tiles of the same keys, one after the other."""
    log: list[Any] = []
    monkeypatch.setattr(Written, "log", log, raising=False)
    monkeypatch.setattr(emulated_attention, "AttentionMachine", Written)
    case = Case((2 * 64,), (blocks * BLOCK,), (1, 1), (COLUMNS, COLUMNS))
    check(case, arch, copies, stages, block=BLOCK)
    return log


def meant(copies: str, stages: int, blocks: int) -> list[Any]:
    """What the model says of the same items; a wait in blocks, as the text has it."""
    ring = SharedRing(stages if copies == "direct" else 1, loads=1, warps=1, operands=model.OPERANDS)
    text = model.attend_direct if copies == "direct" else model.attend_staged
    log: list[Any] = []
    for number in range(2):
        turn, answer, ops = text(ring, Item(number, blocks)), None, []
        while True:
            try:
                ops.append(turn.send(answer))
            except StopIteration:
                break
            answer = 0
        for i, op in enumerate(ops):
            behind = next((x for x in ops[i + 2 :] if type(x) is not WaitLoads), None)
            match op:
                # The queries' room is both slots of a stage.
                case Copy(slot, _, step) | Put(slot, _, step) | Read(slot, _, step) if step or slot == model.KEYS:
                    place = slot if step else "queries"
                    what = type(op).__name__.lower()
                    log.append((what, place, step) if what == "copy" else (what, place))
                case Fetch(_, step):
                    log.append(("fetch", step))
                case WaitLoads(left) if copies == "direct":
                    if log[-1][0] == "wait":  # one wait for what several are for
                        log.pop()
                    log.append(("wait", left // model.OPERANDS))
                case Arrive() if not isinstance(behind, Read | Put):
                    log.append("barrier")
    return log


@pytest.mark.parametrize("blocks", [1, 2, 3, 6])
@pytest.mark.parametrize(
    ("arch", "copies", "stages"), [("gfx950", "direct", 3), ("gfx950", "direct", 4), ("gfx942", "staged", 2)]
)
def test_the_text_does_what_was_checked(monkeypatch, arch, copies, stages, blocks):
    found = written(monkeypatch, arch, copies, stages, blocks)
    assert found == meant(copies, stages, blocks)


def test_what_is_compared_is_there(monkeypatch):
    found = written(monkeypatch, "gfx950", "direct", 3, 4)
    assert found.count("barrier") == 4, "two an item: behind its queries, and behind its blocks"
    assert {entry[0] for entry in found if entry != "barrier"} == {"copy", "wait", "read"}
