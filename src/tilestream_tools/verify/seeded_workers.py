"""Seeded bugs of model 1: gates, programs and ways of taking that are wrong in one place each."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from tilestream.core.chunks import chunk_of
from tilestream.core.gate import Gate, Wait, pass_gate
from tilestream.core.loop import Add, Compute, Count, Leave, Poll, Reduce, Reset, WorkerState, work_through
from tilestream.core.queues import home_queue
from tilestream.schedule import Cursor, Peek, Schedule, Take, WorkItem, take
from tilestream_tools.verify.operations import AwaitCount, AwaitTile, SetCounter, WaitForever

Turn = Generator[Any, int, "WorkerState | None"]


# Gates ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PositionGate(Gate):
    """The pivot moves the data, not the signal: the chunk is that of the unpivoted tile (composable_kernel #5776)."""

    first: int = 0
    num_m: int = 1

    def needs(self, item: WorkItem) -> tuple[Wait, ...]:
        """The chunks of the tile that would be here if nothing were pivoted."""
        unpivoted = item._replace(pm=(item.pm - self.first) % self.num_m)
        return tuple(need._replace(item=item) for need in super().needs(unpivoted))


class FirstChunkGate(Gate):
    """A tile over several chunks waits for the first of them only."""

    def needs(self, item: WorkItem) -> tuple[Wait, ...]:
        """The chunk of the tile's first row."""
        return super().needs(item)[:1]


class PaddedGate(Gate):
    """The last row of a tile is taken from the tile's size, not from the rows there are: a ragged tail asks too far."""

    def needs(self, item: WorkItem) -> tuple[Wait, ...]:
        """The chunks of all rows of the tile, padding included."""
        assert self.rows is not None
        size = self.rows.rows_per_chunk or self.rows.bounds[1]
        first, last = chunk_of(item.pm * self.block_m, size), chunk_of((item.pm + 1) * self.block_m - 1, size)
        return tuple(Wait(0, chunk, item) for chunk in range(first, last + 1))


# Ways of taking -------------------------------------------------------------------------------------------------------


def own_queue_only(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """Nobody steals: a pool that no worker calls its own is visited by none."""
    ticket = yield Take(home_queue(worker, schedule.queues))
    if ticket >= schedule.queue_size(home_queue(worker, schedule.queues)):
        return None
    item, _ = schedule.ticket(home_queue(worker, schedule.queues), ticket)
    yield Compute(item)
    return state


def read_then_write(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """A ticket is taken by a read and a write, not by one atomic add."""
    ticket = yield Peek(0)
    yield SetCounter(0, ticket + 1)
    if ticket >= schedule.queue_size(0):
        return None
    item, _ = schedule.ticket(0, ticket)
    yield Compute(item)
    return state


def asks_own_queue_again(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """A worker forgets that its own queue is empty, and draws a void ticket from it before each item it steals."""
    item, _ = yield from take(schedule, worker, Cursor())
    if item is None:
        return None
    yield Compute(item)
    return state


def first_out_resets(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """The first worker that leaves resets the counters, while others have yet to draw their void tickets."""
    after = yield from work_through(schedule, gate, worker, state)
    if after is None and (yield Leave()) == 0:
        for queue in range(schedule.queues):
            yield Reset("counter", queue)
        yield Reset("exits")
    return after


# Waiting for others ---------------------------------------------------------------------------------------------------


def owner_waits(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """Stream-K as in the paper: the owner of a tile's first part spins until the other contributors are done."""
    item, cursor = yield from take(schedule, worker, state.cursor)
    if item is None:
        return None
    yield Compute(item)
    if item.parts > 1:
        yield Add(item)
        if item.part == 0:
            yield AwaitCount(item, item.parts)
            yield Reduce(item)
    return WorkerState(cursor, state.seen)


def waits_for_neighbour(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """A static schedule in which each waits for the first tile of the next."""
    if (yield Poll()):
        return None
    item, cursor = yield from take(schedule, worker, state.cursor)
    if item is None:
        return None
    neighbour, _ = schedule.ticket(0, (worker + 1) % schedule.workers)
    if neighbour.tile != item.tile:
        yield AwaitTile(neighbour.tile)
    yield Compute(item)
    return WorkerState(cursor, state.seen)


# Stream-K's partials --------------------------------------------------------------------------------------------------


def count_not_restored(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """The last contributor leaves the count as it is."""
    item, cursor = yield from take(schedule, worker, state.cursor)
    if item is None:
        return None
    yield Compute(item)
    if item.parts > 1 and (yield Add(item)) == item.parts - 1:
        yield Reduce(item)
    return WorkerState(cursor, state.seen)


def counts_before_writing(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """A contributor counts before its partial is written."""
    item, cursor = yield from take(schedule, worker, state.cursor)
    if item is None:
        return None
    last = item.parts > 1 and (yield Count(item)) == item.parts - 1
    yield Compute(item)
    if last:
        yield Reduce(item)
    return WorkerState(cursor, state.seen)


def one_slot_a_tile(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """All contributors to a tile write to one slot."""
    item, cursor = yield from take(schedule, worker, state.cursor)
    if item is None:
        return None
    item = item._replace(slot=0 if item.parts > 1 else -1)
    yield Compute(item)
    if item.parts > 1 and (yield Count(item)) == item.parts - 1:
        yield Reduce(item)
    return WorkerState(cursor, state.seen)


# Expiry ---------------------------------------------------------------------------------------------------------------


def waits_without_abort(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """Worker 0 waits as it should; the others neither for a deadline nor for the abort word."""
    if (yield Poll()):
        return None
    item, cursor = yield from take(schedule, worker, state.cursor)
    if item is None:
        return None
    for need in gate.needs(item) if gate is not None else ():
        if worker > 0:
            yield WaitForever(need.operand, need.chunk)
        elif not (yield need):
            return None
    yield Compute(item)
    return WorkerState(cursor, state.seen)


def never_polls(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """The abort word is watched at gates only: a worker whose chunks are there goes on after the expiry."""
    item, cursor = yield from take(schedule, worker, state.cursor)
    if item is None:
        return None
    seen = state.seen
    if gate is not None:
        arrived, seen = yield from pass_gate(gate, item, seen)
        if not arrived:
            return None
    yield Compute(item)
    return WorkerState(cursor, seen)


def polls_in_vain(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """The abort word is read, and an item taken all the same."""
    yield Poll()
    return (yield from never_polls(schedule, gate, worker, state))


def computes_all_the_same(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """The gate says that the launch is over, and the item is done all the same."""
    if (yield Poll()):
        return None
    item, cursor = yield from take(schedule, worker, state.cursor)
    if item is None:
        return None
    seen = state.seen
    if gate is not None:
        _, seen = yield from pass_gate(gate, item, seen)
    yield Compute(item)
    return WorkerState(cursor, seen)
