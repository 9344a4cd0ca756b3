"""Why a reader's stream waits for what it does: every order in which a small GPU could run matmul and readers.

An SM holds one worker. Workers of a launch begin when the driver likes, where one is free, and a reader's hold theirs
until every chunk is there. The rules are those of `tilestream.arrival.device` (invariant 10): with all of them nobody
waits for ever, and without any one of them somebody does.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest


class Machine(NamedTuple):
    """What is issued, in this order of calls; streams and SMs take it in any.

    Attributes
    ----------
    sms, workers, chunks
        SMs; workers of each launch; chunks, each one item.
    dynamic
        Whether a worker takes any item that is left, or those of its own number alone.
    launches
        1, or one a chunk, each behind the one before.
    waits
        What a reader's stream waits for: ``"nothing"``, the ``"first"`` chunk, the ``"end"`` of the last launch.
    readers
        Launches that read, each on a stream of its own.
    """

    sms: int = 2
    workers: int = 2
    chunks: int = 3
    dynamic: bool = True
    launches: int = 1
    waits: str = "first"
    readers: int = 1


class State(NamedTuple):
    """Items that each chunk still waits for, and by worker: ``None`` not begun, ``"in"``, ``"out"``."""

    left: tuple[int, ...]
    matmul: tuple[str | None, ...]
    reading: tuple[str | None, ...]


def steps(machine: Machine, state: State) -> list[State]:
    """Whatever may happen next."""
    per, found = machine.workers, []
    free = machine.sms - state.matmul.count("in") - state.reading.count("in")

    def mine(worker: int) -> list[int]:
        launch, number = divmod(worker, per)
        items = list(state.left) if machine.launches == 1 else [x for x in state.left if x == launch]
        return items if machine.dynamic else [x for x in items if x % per == number or machine.launches > 1]

    def changed(of: tuple[str | None, ...], at: int, to: str) -> tuple[str | None, ...]:
        return (*of[:at], to, *of[at + 1 :])

    for worker, at in enumerate(state.matmul):
        before = state.matmul[: worker // per * per]  # the launches before, in the same stream
        if at is None and free > 0 and all(x == "out" for x in before):
            found.append(state._replace(matmul=changed(state.matmul, worker, "in")))
        elif at == "in" and mine(worker):
            item = mine(worker)[0]
            found.append(state._replace(left=tuple(x for x in state.left if x != item)))
        elif at == "in":
            found.append(state._replace(matmul=changed(state.matmul, worker, "out")))
    may = {
        "nothing": True, "first": 0 not in state.left, "end": all(x == "out" for x in state.matmul),
    }[machine.waits]  # fmt: skip
    for worker, at in enumerate(state.reading):
        if at is None and free > 0 and may:
            found.append(state._replace(reading=changed(state.reading, worker, "in")))
        elif at == "in" and not state.left:
            found.append(state._replace(reading=changed(state.reading, worker, "out")))
    return found


def stuck(machine: Machine) -> State | None:
    """A state out of which nothing leads, and which is not the end of it all; None where there is none."""
    start = State(
        tuple(range(machine.chunks)), (None,) * machine.workers * machine.launches,
        (None,) * machine.workers * machine.readers,
    )  # fmt: skip
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        following = steps(machine, state)
        if not following and (state.left or {*state.matmul, *state.reading} != {"out"}):
            return state
        for after in following:
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return None


@pytest.mark.parametrize("sms", [1, 2, 3])
@pytest.mark.parametrize("readers", [1, 2])
def test_behind_the_first_chunk_of_a_dynamic_launch_nobody_waits_for_ever(sms, readers):
    assert stuck(Machine(sms=sms, readers=readers)) is None


@pytest.mark.parametrize("sms", [1, 2, 3])
@pytest.mark.parametrize("launches", [1, 3], ids=["words of the caller's", "several launches"])
def test_behind_the_last_launch_nobody_waits_for_ever(sms, launches):
    assert stuck(Machine(sms=sms, launches=launches, waits="end")) is None


@pytest.mark.parametrize(
    ("without", "machine"),
    [
        ("a wait", Machine(waits="nothing")),
        ("a dynamic schedule", Machine(dynamic=False)),
        ("waiting for the last of several launches", Machine(launches=3)),
    ],
)
def test_without_any_one_of_the_rules_somebody_does(without, machine):
    found = stuck(machine)
    assert found is not None, without
    assert "in" in found.reading, "a reader holds what the matmul needs"
    assert found.left
