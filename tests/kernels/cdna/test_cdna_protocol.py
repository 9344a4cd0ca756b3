"""The CDNA kernel does, operation by operation, what the checker explores.

The kernel's own text is run on the stand-ins of `emulated`, which here write down what is asked of the stages; of B's
only what goes through registers: of copies and reads they are asked for the same as A's, right after it. What comes of
it is compared with the operations of `tilestream_tools.verify.shared_ring` for the same items. The barriers inside
the loops are the compiler's, and the compile gate looks for them: those that the text has itself are compared.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton.experimental.gluon.language")

from emulated import Machine, Stages, View
from test_cdna_numbers import Case, prepared

from tilestream_tools.verify import shared_ring as model

BLOCK_K = 64


class Written(Machine):
    """Writes down what the stages are asked for, in the words of the model."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.log: list[Any] = []
        self.flats: dict[int, list[Any]] = {}
        self.allocated = 0
        gl = self.names["gl"]
        gl.allocate_shared_memory = self.allocate
        self.names["barrier"] = lambda: self.log.append("barrier")
        self.names["buffer_load"] = self.fetch

    def allocate(self, dtype: Any, shape: list[int], layout: Any) -> Stages:
        made = Stages(dtype, shape)
        self.flats[self.allocated % 2] = made.stages  # A's, then B's, for each item
        self.allocated += 1
        return made

    def stage_of(self, flat: Any) -> tuple[int, int]:
        """Which operand's, and which of its stages."""
        return next((of, i) for of, stages in self.flats.items() for i, one in enumerate(stages) if one is flat)

    def copy(self, stage: Any, at: Any, offsets: Any) -> None:
        super().copy(stage, at, offsets)
        operand, number = self.stage_of(stage.flat)
        if operand == 0:
            self.log.append(("copy", number, at.at % self.k // BLOCK_K))

    def fetch(self, at: Any, offsets: Any, *more: Any, **named: Any) -> Any:
        self.log.append(("fetch", int(at.memory is not self.a), at.at % self.k // BLOCK_K))
        return Machine.buffer_load(self, at, offsets, *more, **named)

    def wait(self, left: int) -> None:
        super().wait(left)
        self.log.append(("wait", left))

    def note(self, what: str, view: View) -> None:
        operand, number = self.stage_of(view.flat)
        if what == "put":
            self.log.append((what, operand, number))
        elif operand == 0:
            self.log.append((what, number))


@pytest.fixture(autouse=True)
def views(monkeypatch):
    """Views that tell which machine reads and writes through them."""
    plain_load, plain_store = View.load, View.store
    monkeypatch.setattr(View, "load", lambda self, _: (running[0].note("read", self), plain_load(self, _))[1])
    monkeypatch.setattr(
        View, "store", lambda self, tensor: (running[0].note("put", self), plain_store(self, tensor))[1]
    )
    yield
    running.clear()


running: list[Written] = []


def written(case: Case) -> list[Any]:
    """What the kernel's text does."""
    filled, items, a = prepared(case)
    machine = Written(items, False)
    machine.a, machine.k = a, case.k
    running.append(machine)
    machine.run(filled)
    return machine.log


def meant(case: Case) -> list[Any]:
    """What the model says of the same items, one after the other; a wait in groups, as the text has it."""
    ring = model.SharedRing(case.stages, loads=1, warps=1)
    text = model.direct if case.copies == "direct" else model.staged
    log: list[Any] = []
    tiles = -(-case.m // 64)
    for number in range(tiles):
        item = model.Item(number, case.k // BLOCK_K, bool(case.k % BLOCK_K))
        turn, answer = text(ring, item), None
        behind: Any = None
        while True:
            try:
                op = turn.send(answer)
            except StopIteration:
                break
            answer = 0
            kind = type(op).__name__
            if kind == "Copy":
                log.append(("copy", op.stage, op.step))
            elif kind == "Fetch":
                log.append(("fetch", op.operand, op.step))
            elif kind == "Put":
                log.append(("put", op.operand, op.stage))
            elif kind == "Read":
                log.append(("read", op.stage))
            elif kind == "WaitLoads" and case.copies == "direct" and behind not in ("Fetch", "WaitLoads"):
                log.append(("wait", op.left))
            elif kind == "Arrive" and behind not in ("WaitLoads", "Put", "Fetch") and case.copies == "direct":
                log.append("barrier")
            if kind not in ("Await", "Have"):
                behind = kind
    return log


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("rest", [0, 16])
@pytest.mark.parametrize(("copies", "stages"), [("direct", 3), ("direct", 4), ("staged", 2)])
def test_the_text_does_what_was_checked(copies, stages, rest, steps):
    # Two row tiles, one after the other: the second begins where the first left the ring.
    case = Case(128, 64, 64 * steps + rest, copies=copies, stages=stages)
    assert written(case) == meant(case)


def test_what_is_compared_is_there():
    found = written(Case(128, 64, 64 * 4 + 16))
    assert found.count("barrier") == 4, "two an item: behind its steps, and behind its rest"
    assert {entry[0] for entry in found if entry != "barrier"} == {"copy", "wait", "read", "fetch", "put"}
