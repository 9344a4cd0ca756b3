"""The five parts of a kernel as values: what host, device, checker and tests hand each other.

::

    Work      the schedule: how many tiles, how they are queued       Cursor   where a worker is in it
    Gate      the chunks that arrive, and the deadline                Passed   what a worker knows of them
                                                                  Watch    what a worker looks at while it waits
    Ring      stages between loads and math, and their barriers       Place    where a loop is in a ring
    Item      a work item                                             Items    the item ring
    Epilogue  what becomes of an accumulator, and where it goes       Publishing  the output's chunks
    Groups    runs of rows, or of K, that the device counts           Span        a group's
    Sources   places of rows that several producers bring             SourceItem  a tile of one of their groups

A kernel groups its arguments in these in its first lines, and passes parts from there on, never fields. On the device
a field is a scalar, a pointer, a descriptor or shared memory; on the host a number, a tensor, or what stands in for
one. ``int32`` unless a field says otherwise. What is compiled in is `tilestream.kernels.config`'s.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Matrix(NamedTuple):
    """A matrix in global memory."""

    at: Any  # pointer to the first element; None where there is no such matrix
    #: batch, row, column: strides, in elements.
    batch: Any
    row: Any
    column: Any


class Vector(NamedTuple):
    """A vector a batch, in global memory: a bias, or scales."""

    at: Any  # pointer to the first element; None where there is no such vector
    #: batch, step: strides, in elements; 0 where one element serves all.
    batch: Any
    step: Any


class Work(NamedTuple):
    """A schedule, in numbers: `tilestream.core.schedule.Schedule`."""

    #: batches, num_m, num_n: the grid of tiles.
    batches: Any
    num_m: Any
    num_n: Any
    k_steps: Any  # steps of ``BLOCK_K`` in a whole tile
    full_tiles: Any  # tiles that are done whole: all of them, but for ``stream_k``
    #: shares, units: ``stream_k``: shares of the last tiles' K, and K steps in all of these tiles.
    shares: Any
    units: Any
    queues: Any  # queues, at least 1
    table: Any  # pointer to int32 ``[tiles]``: tile ids by position, where the raster is a table; else None
    #: group, first, band: the raster's parameters: see `tilestream.core.raster`.
    group: Any
    first: Any
    band: Any
    first_batch: Any  # the batch that is taken first


class Words(NamedTuple):
    """Words of memory that belong to one launch at a time."""

    #: Pointer to int64 words, `kernels.device.schedule.LINE` of them apart: a counter a queue, the count of the workers
    #: that have left, the abort word. None for a static schedule without a gate.
    counters: Any
    base: Any  # int64: what the launch's counters count from
    reset: Any  # whether the last worker out zeroes the counters: those of a captured launch
    log: Any  # pointer: int32 records of a probe, int64 spans of a trace; else None
    capacity: Any  # records of a probe that a worker has room for
    partials: Any  # ``stream_k``: pointer to float32 slots, a tile's accumulator each; else None
    counts: Any  # ``stream_k``: pointer to int32, two words a slot, 0 before and after a launch; else None


class Incoming(NamedTuple):
    """An operand's chunks, as a kernel waits for them."""

    signals: Any  # pointer to int32, one a chunk
    quarantine: Any  # pointer to int32: not 0 where an earlier launch may have left signals behind
    table: Any  # pointer to int32 (`tilestream.launch.gate.chunk_table`) where chunks are ragged; else None
    epoch: Any  # A chunk has arrived when its signal is at least so much; 0: when it is not 0
    key: Any  # the call's number in an error record
    chunks: Any  # how many there are
    per_chunk: Any  # rows (columns) of a chunk, where chunks are uniform
    unread: Any  # chunks that no tile reads
    extent: Any  # rows (columns) of the operand in one batch


class Gate(NamedTuple):
    """What arrives, and until when a launch waits for it."""

    #: rows, columns: `Incoming`: A's rows, B's columns.
    rows: Any
    columns: Any
    queue_table: Any  # pointer to int32 (`tilestream.launch.gate.queue_table`) in arrival order; else None
    #: rows_per_batch, tiles_per_batch: rows, and row tiles, from one batch to the next in what arrives; 0 where batches
    #: share A.
    rows_per_batch: Any
    tiles_per_batch: Any
    #: records, claims: the error channel: pointers to int64, see `tilestream.core.error_record`.
    records: Any
    claims: Any
    op: Any  # the op's number in a record
    allowed: Any  # int64: nanoseconds from a worker's start to its deadline


class Watch(NamedTuple):
    """A worker, and what it looks at while it waits. It stays the same from item to item."""

    #: worker, workers: which one of how many.
    worker: Any
    workers: Any
    leaves: Any  # whether the worker counts itself out
    #: abort, clock: pointers to int64: the launch's abort word, and its clock. None without a gate.
    abort: Any
    clock: Any
    #: int64, nanoseconds: when the worker began. None without a gate.
    begin: Any


class Passed(NamedTuple):
    """What a worker knows of its gate."""

    over: Any  # whether the launch is over
    #: row_low, row_high, column_low, column_high: first and last chunk of the item before, of A's rows and of B's
    #: columns: they need no second look.
    row_low: Any
    row_high: Any
    column_low: Any
    column_high: Any


class Ready(NamedTuple):
    """What a worker knows of the queues, in arrival order."""

    queue: Any  # that of the item before; -1: none
    empty: Any  # those that it has found empty, a bit each


class Cursor(NamedTuple):
    """Where a worker is in the schedule."""

    ticket: Any  # ``static``: items taken so far
    source: Any  # where it draws tickets: 0 its own queue, ``q + 1`` queue ``q``, ``queues + 1`` none of them
    #: share, unit, unit_end: ``stream_k``: the share in progress (-1: none), and the K steps that are left of it.
    share: Any
    unit: Any
    unit_end: Any
    noted: Any  # records that a probe has written
    asked: Any  # int64: the answer to `kernels.hopper.queues.prefetch_ticket`


class Progress(NamedTuple):
    """How far a worker has come: `Cursor`, `Ready`, `Passed`."""

    cursor: Any
    ready: Any
    passed: Any


class Item(NamedTuple):
    """A work item."""

    #: batch, pm, pn: its tile.
    batch: Any
    pm: Any
    pn: Any
    #: k_begin, k_end: its K steps. On Hopper a void item's run backwards, from its end to its beginning.
    k_begin: Any
    k_end: Any
    #: part, parts: which part of the tile it is, of how many.
    part: Any
    parts: Any
    slot: Any  # the slot of its partial result; -1 for a whole tile
    place: Any  # its record in a trace: see `kernels.device.trace`


class Groups(NamedTuple):
    """Runs of A's rows, or of K, one behind the other: see `tilestream.kernels.device.groups`."""

    offsets: Any  # pointer to int32 ``[count]``: where each group ends
    count: Any  # how many there are, at least 1
    extent: Any  # rows of A, or K: what offsets are at most


class Span(NamedTuple):
    """A group's rows, or its part of K."""

    group: Any
    #: begin, end: its first row, and the one behind its last.
    begin: Any
    end: Any


class Sources(NamedTuple):
    """Rows of several sources, each sorted by group: see `tilestream.core.sources`."""

    counts: Any  # pointer to int32 ``[count, groups]``: rows of each group of each source
    #: count, groups, capacity: how many there are, and the rows of a source's place.
    count: Any
    groups: Any
    capacity: Any
    pivot: Any  # the source that each worker looks at first
    #: tickets, settled: pointers to int64: a counter for each group of each source, and a word for each source. They
    #: lie side by side, since a worker reads those of a source at once.
    tickets: Any
    settled: Any


class SourceItem(NamedTuple):
    """A tile of a group of a source."""

    #: source, group, ticket: whose, and its number among the group's tiles.
    source: Any
    group: Any
    ticket: Any
    #: begin, rows: the group's first row, and how many it has.
    begin: Any
    rows: Any
    #: valid, tiles: whether the source's counts are known and fit its place; the tiles of all its groups.
    valid: Any
    tiles: Any


class Place(NamedTuple):
    """Where a loop is in a ring."""

    at: Any  # the stage, or the slot
    phase: Any  # 0 or 1: the parity of the rounds before this one


class Ring(NamedTuple):
    """Stages of shared memory between loads and math, and their barriers."""

    #: x, y: stages of the operands; of ``y`` a tuple, one for each part of a tile's columns.
    x: Any
    y: Any
    #: full, empty: barriers, one a stage.
    full: Any
    empty: Any


class Items(NamedTuple):
    """The item ring: by it the load warp hands work items, and STOP, to the math warps."""

    slots: Any  # shared memory: the fields of an item, slot by slot
    #: full, empty: barriers, one a slot.
    full: Any
    empty: Any


class LocalRows(NamedTuple):
    """Row tiles of x that lie in a tensor of their own: of each ``period`` of them ``tiles``, from ``first`` on."""

    map: Any  # tensor map of that tensor, K-major; None where there are no such rows
    #: first, tiles, period: in row tiles of the whole x.
    first: Any
    tiles: Any
    period: Any


class Loads(NamedTuple):
    """Where a load loop copies operands from."""

    #: x, y: tensor maps; of ``y`` a tuple, one for each part of a tile's columns.
    x: Any
    y: Any
    local: Any  # `LocalRows`
    #: x_batched, y_batched: 1 where the operand has batches, 0 where all batches share it.
    x_batched: Any
    y_batched: Any
    half: Any  # rows of y in each of two halves, of which a tile has as many of both; else 0


class BlockScales(NamedTuple):
    """Scales of an accumulator's rows and columns for every 128 of K, and the part of it that they are for."""

    #: rows, columns: `Matrix`, whose columns are blocks of K: one of them has a row for each of the accumulator's rows
    #: (columns), the other a batch a group and a row for 128 of them.
    rows: Any
    columns: Any
    batch: Any  # the group
    #: row, column, row_end, column_end: where the part begins, and where its group's rows and its columns end.
    row: Any
    column: Any
    row_end: Any
    column_end: Any


class Strided(NamedTuple):
    """A tile's rows of an operand ``[rows, K]`` that is read in vectors."""

    at: Any  # pointer to the first row's first element of K
    last: Any  # the last row that there is, from the first
    stride: Any  # the stride that is not 1
    step: Any  # int64: elements from one K step to the next


class Epilogue(NamedTuple):
    """What an accumulator becomes, and where it is stored.

    ``activation(alpha * row_scale * column_scale * acc + bias + beta * residual)``.
    """

    #: out, residual: `Matrix`.
    out: Any
    residual: Any
    #: bias, row_scale, column_scale: `Vector`.
    bias: Any
    row_scale: Any
    column_scale: Any
    #: alpha, beta: float32.
    alpha: Any
    beta: Any
    #: rows, columns: the accumulator's extents in one batch: they are the output's columns and rows where operands are
    #: swapped.
    rows: Any
    columns: Any
    #: map, buffers: tensor map of the output, and the shared memory that it is stored from; None where it is stored
    #: from registers.
    map: Any
    buffers: Any


class Region(NamedTuple):
    """The part of an accumulator that the epilogue finishes at a time."""

    #: batch, row, column: where its first element is in the output.
    batch: Any
    row: Any
    column: Any
    #: i, j: vectors, in the accumulator's layout: its rows and columns in the output; on CDNA, from ``row`` and
    #: ``column``.
    i: Any
    j: Any
    #: bool ``[rows, columns]``: which elements the output has; on Hopper, which rows and which columns; on CDNA, how
    #: many rows and columns are left from ``row`` and ``column`` on.
    inside: Any


class Publishing(NamedTuple):
    """The chunks of the output that a kernel signals."""

    #: signals, counts: pointers to int32, one a chunk each: what it is signalled by, and its rows that are complete.
    signals: Any
    counts: Any
    epoch: Any  # what a chunk is signalled by
    per_chunk: Any  # rows of a chunk
    #: How often each row is counted: by the column tiles, and where two consumers share a tile's columns by both.
    times: Any
