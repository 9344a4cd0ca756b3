"""What the launches of GPU kernels are told of what arrives, of what they copy and of what they publish.

See `tilestream.kernels.device.gate` and `tilestream.kernels.hopper.publish`.

No torch here: the compile gate and the tools that fill a cache without a GPU make the same arguments from shapes.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from tilestream.core.error_record import op_number
from tilestream.core.gate import Gate, chunks_of
from tilestream.core.grid import WorkItem
from tilestream.plan.plan import Plan

#: The longest deadline that a kernel can count to in nanoseconds: 30 years.
LONGEST_SECONDS = 1e9


class GateArguments(NamedTuple):
    """What a launch is told of what arrives: see `tilestream.kernels.device.gate`. Tensors, or stand-ins for them."""

    #: row_signals, row_quarantine, row_table, row_epoch, row_key: of A's rows; None, and an epoch of 1, where they are
    #: all there. The same for B's columns.
    row_signals: Any = None
    row_quarantine: Any = None
    row_table: Any = None
    column_signals: Any = None
    column_quarantine: Any = None
    column_table: Any = None
    #: records, claims: the device's error channel.
    records: Any = None
    claims: Any = None
    queue_table: Any = None  # in arrival order, see `queue_table`
    row_epoch: int = 1
    row_key: int = 0
    column_epoch: int = 1
    column_key: int = 0
    allowed: int = 0  # nanoseconds
    op: int = 0  # the op's number in a record

    @property
    def pointers(self) -> tuple[Any, ...]:
        """What has an address, in the kernels' order."""
        return self[:9]

    @property
    def numbers(self) -> tuple[Any, ...]:
        """The rest."""
        return self[9:]


NO_GATE = GateArguments()


def bounds_of(deadline: float, op: str) -> tuple[int, int]:
    """Nanoseconds that a gate may wait, of a deadline in seconds; and the number of the op."""
    return int(1e9 * min(deadline, LONGEST_SECONDS)), op_number(op)


class PublishArguments(NamedTuple):
    """What a launch is told of the chunks of its output that it publishes: see `tilestream.kernels.hopper.publish`.

    Tensors and an epoch, or stand-ins for them; None where nothing is published.
    """

    signals: Any = None
    counts: Any = None
    epoch: Any = 1


NO_PUBLISH = PublishArguments()


def chunk_numbers(plan: Plan) -> dict[str, int]:
    """What the kernel is told of the chunks of rows (of several batches, too) and of columns, by name."""
    problem = plan.problem
    several = bool(problem.row_of_batch)
    return {
        **_sizes(plan, 0),
        "rows_per_batch": problem.m if several else 0,
        "row_tiles_per_batch": plan.schedule.grid.num_m if several else 0,
        **_sizes(plan, 1),
    }


def _sizes(plan: Plan, operand: int) -> dict[str, int]:
    """Chunks, rows of a chunk, chunks that no tile reads."""
    incoming, name = (plan.problem.columns, "column") if operand else (plan.problem.rows, "row")
    if incoming is None:
        chunks, per_chunk, unread = 0, 1, 0
    else:
        chunks, per_chunk = incoming.chunks.count, incoming.chunks.rows_per_chunk or 1
        unread = len(_unread(plan, operand))
    return {f"{name}_chunks": chunks, f"{name}s_per_chunk": per_chunk, f"{name}_unread": unread}


def _tiles(plan: Plan, operand: int) -> list[WorkItem]:
    """An item of each row tile (column tile), in the order of what arrives."""
    grid = plan.schedule.grid
    if operand:
        return [WorkItem(0, 0, 0, pn, 0, 0) for pn in range(grid.num_n)]
    batches = grid.batch if plan.problem.row_of_batch else 1
    return [WorkItem(0, batch, pm, 0, 0, 0) for batch in range(batches) for pm in range(grid.num_m)]


def _needs(gate: Gate, item: WorkItem, operand: int) -> list[int]:
    return [wait.chunk for wait in gate.needs(item) if wait.operand == operand]


def _unread(plan: Plan, operand: int) -> list[int]:
    """The chunks that no tile reads: those without rows, or all where there is no tile."""
    incoming, gate = plan.problem.columns if operand else plan.problem.rows, plan.gate
    assert incoming is not None
    assert gate is not None
    chunks = incoming.chunks
    if not plan.schedule.grid.tiles:
        return list(range(chunks.count))
    return [c for c in range(chunks.count) if chunks.bounds[c] == chunks.bounds[c + 1]]


def chunk_table(plan: Plan, operand: int) -> list[int] | None:
    """The chunks that each row (column) tile reads, where no arithmetic describes them, as the kernel reads them.

    Entry ``t`` says where in the table tile ``t``'s chunks begin, entry ``t + 1`` where they end. Behind the last
    tile's stand the chunks that no tile reads.
    """
    incoming, gate = plan.problem.columns if operand else plan.problem.rows, plan.gate
    if incoming is None or gate is None or incoming.chunks.rows_per_chunk:
        return None
    needed = [_needs(gate, item, operand) for item in _tiles(plan, operand)]
    starts = itertools.accumulate(map(len, needed), initial=len(needed) + 1)
    return [*starts, *itertools.chain.from_iterable(needed), *_unread(plan, operand)]


def queue_table(plan: Plan) -> list[int] | None:
    """In arrival order, what a worker knows of the queues; None otherwise.

    Entry ``q`` is the position that queue ``q`` begins with, and the last of these the number of tiles. As many entries
    behind them say where in the table each queue's chunks begin, and the last where they all end.
    """
    schedule, gate = plan.schedule, plan.gate
    if schedule.split != "chunks" or gate is None:
        return None
    chunks = chunks_of(schedule, gate)
    starts = itertools.accumulate(map(len, chunks), initial=2 * schedule.queues + 2)
    return [0, *schedule.ends, *starts, *itertools.chain.from_iterable(chunks)]
