"""Seeded bugs of model 1 in how the parts of a tile are settled: `settle` of `tilestream.core.loop`, gone wrong."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import wraps
from typing import Any

from tilestream.core.gate import Gate
from tilestream.core.loop import Add, AddUp, Compute, Look, Poison, Reduce, Restore, WorkerState, Write, work_through
from tilestream.schedule import Schedule, WorkItem
from tilestream_tools.verify.workers import Program

Settling = Generator[Any, int, None]


def _program(settles: Callable[[WorkItem], Settling]) -> Program:
    """`work_through` whose workers hold the parts of a tile and hand them in so."""

    def finish(done: Compute | Poison) -> Settling:
        if done.item.parts == 1:
            yield done
        else:
            yield done._replace(held=True)
            yield from settles(done.item)

    @wraps(settles)
    def program(
        schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState
    ) -> Generator[Any, int, WorkerState | None]:
        return work_through(schedule, gate, worker, state, finish=finish)

    return program


@_program
def last_too_early(item: WorkItem) -> Settling:
    """Who finds all but one of the others counted takes itself for the last."""
    last = (yield Look(item)) >= item.parts - 2
    if not last:
        yield Write(item)
        last = (yield Add(item)) == item.parts - 1
    if last:
        yield Restore(item)
        yield AddUp(item)


@_program
def counts_without_writing(item: WorkItem) -> Settling:
    """A contributor looks, skips the write, and counts all the same."""
    last = (yield Look(item)) == item.parts - 1
    if not last:
        last = (yield Add(item)) == item.parts - 1
    if last:
        yield Restore(item)
        yield AddUp(item)


@_program
def two_are_the_last(item: WorkItem) -> Settling:
    """A contributor counts, then reads whether it is the last: two may both find that all have counted."""
    yield Write(item)
    yield Add(item)
    if (yield Look(item)) == item.parts:
        yield AddUp(item)
        yield Restore(item)


@_program
def nobody_is_the_last(item: WorkItem) -> Settling:
    """Only the look says who is the last: where all look before any counts, nobody is."""
    if (yield Look(item)) == item.parts - 1:
        yield Restore(item)
        yield AddUp(item)
    else:
        yield Write(item)
        yield Add(item)


@_program
def counts_after_restoring(item: WorkItem) -> Settling:
    """Who looks and is the last counts all the same, behind the count it has restored."""
    last = (yield Look(item)) == item.parts - 1
    if last:
        yield Restore(item)
        yield Add(item)
    else:
        yield Write(item)
        last = (yield Add(item)) == item.parts - 1
        if last:
            yield Restore(item)
    if last:
        yield AddUp(item)


@_program
def restores_only_what_it_counted(item: WorkItem) -> Settling:
    """Who looks and is the last leaves the count as it is."""
    last = (yield Look(item)) == item.parts - 1
    if last:
        yield AddUp(item)
    else:
        yield Write(item)
        if (yield Add(item)) == item.parts - 1:
            yield Restore(item)
            yield AddUp(item)


@_program
def restores_while_others_count(item: WorkItem) -> Settling:
    """Whoever is not the last takes its count back when it leaves: the last never comes."""
    if (yield Look(item)) == item.parts - 1:
        yield Restore(item)
        yield AddUp(item)
        return
    yield Write(item)
    last = (yield Add(item)) == item.parts - 1
    yield Restore(item)
    if last:
        yield AddUp(item)


@_program
def adds_its_own_from_its_slot(item: WorkItem) -> Settling:
    """The last adds its own part from its slot, too, where it may not have written it."""
    last = (yield Look(item)) == item.parts - 1
    if not last:
        yield Write(item)
        last = (yield Add(item)) == item.parts - 1
    if last:
        yield Restore(item)
        yield Reduce(item)
