"""The gate: the wait between a work item and the chunks it reads.

`Gate.needs` gives the chunks that an item needs. They depend only on the rows that the item reads, after raster and
pivot (invariant 2). `pass_gate` is the protocol of the wait, a generator like `tilestream.schedule.take`: it yields
`Wait`, and the answer is whether the chunk has arrived.

In arrival order a worker takes an item only after it has seen the item's chunks, and still passes this gate. The gate
makes the result right; the order avoids waits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tilestream.core.chunks import Chunks
from tilestream.core.grid import WorkItem
from tilestream.core.schedule import Schedule


class Wait(NamedTuple):
    """Wait for a chunk, under the launch's deadline and its abort word. Answer: 1 arrived, 0 the launch is over."""

    operand: int  # 0: A's rows, 1: B's columns (a weight's rows)
    chunk: int  # which chunk of that operand
    item: WorkItem  # the item that needs it, for the record of an expiry


class See(NamedTuple):
    """Wait for a chunk without an item: the last worker to leave does so before it zeroes the signals.

    Answer: 1 arrived, 0 the launch is over. A record of an expiry names no item.
    """

    operand: int
    chunk: int


class Needs(Protocol):
    """A gate, for a launch."""

    def needs(self, item: WorkItem) -> tuple[Wait, ...]:
        """The chunks ``item`` reads, each once."""

    def every(self) -> tuple[See, ...]:
        """Every chunk."""


@dataclass(frozen=True)
class Gate:
    """The gate of a GEMM: items wait for chunks of A's rows, of B's columns, or both.

    Parameters
    ----------
    m, n
        Rows and columns of the output of one batch.
    block_m, block_n
        Rows and columns of a tile.
    rows, columns
        The chunks of each operand that arrives; None for one that is there. At least one is given.
    row_of_batch
        The first row of each batch among the rows that arrive. Empty for one batch, or if all batches share A.
    """

    m: int
    n: int
    block_m: int
    block_n: int
    rows: Chunks | None = None
    columns: Chunks | None = None
    row_of_batch: tuple[int, ...] = ()

    def needs(self, item: WorkItem) -> tuple[Wait, ...]:
        """The chunks ``item`` reads, each once, A's first."""
        needs: list[Wait] = []
        if self.rows is not None:
            base = self.row_of_batch[item.batch] if self.row_of_batch else 0
            begin = item.pm * self.block_m
            end = min(self.m, begin + self.block_m)
            needs += [Wait(0, chunk, item) for chunk in self.rows.of_rows(base + begin, base + end)]
        if self.columns is not None:
            begin = item.pn * self.block_n
            end = min(self.n, begin + self.block_n)
            needs += [Wait(1, chunk, item) for chunk in self.columns.of_rows(begin, end)]
        return tuple(needs)

    def every(self) -> tuple[See, ...]:
        """Every chunk, A's first, also those that no tile reads (as one without rows)."""
        operands = enumerate((self.rows, self.columns))
        return tuple(See(o, chunk) for o, chunks in operands if chunks is not None for chunk in range(chunks.count))


@dataclass(frozen=True)
class RowGate:
    """A gate of one operand, with a function from an item to the ``rows`` ``[begin, end)`` that it reads."""

    chunks: Chunks
    rows: Callable[[WorkItem], tuple[int, int]]

    def needs(self, item: WorkItem) -> tuple[Wait, ...]:
        """The chunks ``item`` reads, in order, each once."""
        return tuple(Wait(0, chunk, item) for chunk in self.chunks.of_rows(*self.rows(item)))

    def every(self) -> tuple[See, ...]:
        """Every chunk."""
        return tuple(See(0, chunk) for chunk in range(self.chunks.count))


class Seen(NamedTuple):
    """The chunks that a worker has waited for, as bits. It waits once for each chunk, not once for each item."""

    rows: int = 0
    columns: int = 0


def pass_gate(gate: Needs, item: WorkItem, seen: Seen) -> Generator[Wait, int, tuple[bool, Seen]]:
    """Wait for each chunk that ``item`` reads and this worker has not seen. False: the launch is over, do nothing."""
    for need in gate.needs(item):
        bit = 1 << need.chunk
        if not seen[need.operand] & bit:
            if not (yield need):
                return False, seen
            seen = seen._replace(**{Seen._fields[need.operand]: seen[need.operand] | bit})
    return True, seen


def arrival_order(schedule: Schedule, gate: Gate) -> tuple[int, ...]:
    """The ends of a schedule's queues in arrival order: the positions after which tiles read other chunks.

    The schedule has one queue, and its raster goes chunk by chunk: between two neighbouring multiples of the other
    dimension's tiles all positions read the same chunks. The gate has one operand.
    """
    grid = schedule.grid
    ends: list[int] = []
    before: tuple[int, ...] = ()
    for position in range(0, grid.tiles, grid.num_m if gate.rows is None else grid.num_n):
        chunks = tuple(need.chunk for need in gate.needs(schedule.ticket(0, position)[0]))
        if position and chunks != before:
            ends.append(position)
        before = chunks
    return (*ends, grid.tiles)


def chunks_of(schedule: Schedule, gate: Needs) -> tuple[tuple[int, ...], ...]:
    """For each queue in arrival order: the chunks that all its items read."""
    firsts = (schedule.ticket(queue, 0)[0] for queue in range(schedule.queues))
    return tuple(tuple(need.chunk for need in gate.needs(item)) for item in firsts)
