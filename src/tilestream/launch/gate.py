"""GPU kernels' arguments for operands that arrive, for copies and for publishing.

See `tilestream.kernels.device.gate` and `tilestream.kernels.hopper.publish`.

This module needs no torch: the compile gate, and the tools that fill a cache without a GPU, make the same arguments
from shapes.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from tilestream.core.error_record import op_number
from tilestream.core.gate import Gate, chunks_of
from tilestream.core.grid import WorkItem
from tilestream.plan.plan import Plan

#: The longest deadline of a kernel, which counts nanoseconds: 30 years.
LONGEST_SECONDS = 1e9


class GateArguments(NamedTuple):
    """A launch's arguments for what arrives: see `tilestream.kernels.device.gate`. Tensors, or stand-ins for them."""

    #: row_signals, row_quarantine, row_table, row_epoch, row_key: for A's rows; None, and an epoch of 1, if they do not
    #: arrive. The same for B's columns.
    row_signals: Any = None
    row_quarantine: Any = None
    row_table: Any = None
    column_signals: Any = None
    column_quarantine: Any = None
    column_table: Any = None
    #: records, claims: the device's error channel.
    records: Any = None
    claims: Any = None
    queue_table: Any = None  # for arrival order, see `queue_table`
    row_epoch: int = 1
    row_key: int = 0
    column_epoch: int = 1
    column_key: int = 0
    allowed: int = 0  # nanoseconds
    op: int = 0  # the op's number in a record

    @property
    def pointers(self) -> tuple[Any, ...]:
        """The tensors, in the kernels' order."""
        return self[:9]

    @property
    def numbers(self) -> tuple[Any, ...]:
        """The numbers, in the kernels' order."""
        return self[9:]


NO_GATE = GateArguments()


def bounds_of(deadline: float, op: str) -> tuple[int, int]:
    """A deadline in seconds as a gate's nanoseconds, and the number of the op."""
    return nanoseconds(deadline), op_number(op)


def nanoseconds(deadline: float) -> int:
    """A deadline in seconds as a gate has it."""
    return int(1e9 * min(deadline, LONGEST_SECONDS))


class PublishArguments(NamedTuple):
    """A launch's arguments for the chunks that it publishes: see `tilestream.kernels.hopper.publish`.

    Tensors and an epoch, or stand-ins for them; None if nothing is published.
    """

    signals: Any = None
    counts: Any = None
    epoch: Any = 1


NO_PUBLISH = PublishArguments()


def chunk_numbers(plan: Plan) -> dict[str, int]:
    """The kernel's numbers of the chunks of rows (of all batches) and of columns, by name."""
    problem = plan.problem
    several = bool(problem.row_of_batch)
    return {
        **_sizes(plan, 0),
        "rows_per_batch": problem.m if several else 0,
        "row_tiles_per_batch": plan.schedule.grid.num_m if several else 0,
        **_sizes(plan, 1),
    }


def _sizes(plan: Plan, operand: int) -> dict[str, int]:
    """The numbers of chunks, of rows of a chunk, and of chunks that no tile reads."""
    incoming, name = (plan.problem.columns, "column") if operand else (plan.problem.rows, "row")
    if incoming is None:
        chunks, per_chunk, unread = 0, 1, 0
    else:
        chunks, per_chunk = incoming.chunks.count, incoming.chunks.rows_per_chunk or 1
        unread = len(_unread(plan, operand))
    return {f"{name}_chunks": chunks, f"{name}s_per_chunk": per_chunk, f"{name}_unread": unread}


def _tiles(plan: Plan, operand: int) -> list[WorkItem]:
    """An item of each row tile (column tile), in the order of the operand's rows (columns)."""
    grid = plan.schedule.grid
    if operand:
        return [WorkItem(0, 0, 0, pn, 0, 0) for pn in range(grid.num_n)]
    batches = grid.batch if plan.problem.row_of_batch else 1
    return [WorkItem(0, batch, pm, 0, 0, 0) for batch in range(batches) for pm in range(grid.num_m)]


def _needs(gate: Gate, item: WorkItem, operand: int) -> list[int]:
    return [wait.chunk for wait in gate.needs(item) if wait.operand == operand]


def _unread(plan: Plan, operand: int) -> list[int]:
    """The chunks that no tile reads: those without rows, or all if there is no tile."""
    incoming, gate = plan.problem.columns if operand else plan.problem.rows, plan.gate
    assert incoming is not None
    assert gate is not None
    chunks = incoming.chunks
    if not plan.schedule.grid.tiles:
        return list(range(chunks.count))
    return [c for c in range(chunks.count) if chunks.bounds[c] == chunks.bounds[c + 1]]


def chunk_table(plan: Plan, operand: int) -> list[int] | None:
    """A table, for the kernel, of the chunks that each row (column) tile reads; None for uniform chunks.

    Tile ``t``'s chunks are in the table from the index in entry ``t`` to that in entry ``t + 1``. The chunks that no
    tile reads follow those of the last tile.
    """
    incoming, gate = plan.problem.columns if operand else plan.problem.rows, plan.gate
    if incoming is None or gate is None or incoming.chunks.rows_per_chunk:
        return None
    needed = [_needs(gate, item, operand) for item in _tiles(plan, operand)]
    starts = itertools.accumulate(map(len, needed), initial=len(needed) + 1)
    return [*starts, *itertools.chain.from_iterable(needed), *_unread(plan, operand)]


def queue_table(plan: Plan) -> list[int] | None:
    """The queues of arrival order, for the kernel; None for other schedules.

    Entry ``q`` is the first position of queue ``q``; one more entry has the number of tiles. Then follow as many
    entries with the index, in the table, of each queue's first chunk, and the end of the last queue's.
    """
    schedule, gate = plan.schedule, plan.gate
    if schedule.split != "chunks" or gate is None:
        return None
    chunks = chunks_of(schedule, gate)
    starts = itertools.accumulate(map(len, chunks), initial=2 * schedule.queues + 2)
    return [0, *schedule.ends, *starts, *itertools.chain.from_iterable(chunks)]
