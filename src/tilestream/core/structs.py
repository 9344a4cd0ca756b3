"""The five parts of a kernel as values: what host, device, checker and tests hand each other.

::

    Work      the schedule: how many tiles, how they are queued       Cursor   where a worker is in it
    Gate      the chunks that arrive, and the deadline                Passed   what a worker knows of them
                                                                  Watch    what a worker looks at while it waits
    Ring      stages between loads and math, and their barriers       Place    where a loop is in a ring
    Item      a work item                                             Items    the item ring
    Epilogue  what becomes of an accumulator, and where it goes       Publishing  the output's chunks

A kernel groups its arguments in these in its first lines, and passes parts from there on, never fields. On the device
a field is a scalar, a pointer, a descriptor or shared memory; on the host a number, a tensor, or what stands in for
one. ``int32`` unless a field says otherwise. What is compiled in is `tilestream.kernels.config`'s.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Matrix(NamedTuple):
    """A matrix in global memory.

    Attributes
    ----------
    at
        Pointer to the first element; None where there is no such matrix.
    batch, row, column
        Strides, in elements.
    """

    at: Any
    batch: Any
    row: Any
    column: Any


class Vector(NamedTuple):
    """A vector a batch, in global memory: a bias, or scales.

    Attributes
    ----------
    at
        Pointer to the first element; None where there is no such vector.
    batch, step
        Strides, in elements; 0 where one element serves all.
    """

    at: Any
    batch: Any
    step: Any


class Work(NamedTuple):
    """A schedule, in numbers: `tilestream.core.schedule.Schedule`.

    Attributes
    ----------
    batches, num_m, num_n
        The grid of tiles.
    k_steps
        Steps of ``BLOCK_K`` in a whole tile.
    full_tiles
        Tiles that are done whole: all of them, but for ``stream_k``.
    shares, units
        ``stream_k``: shares of the last tiles' K, and K steps in all of these tiles.
    queues
        Queues, at least 1.
    table
        Pointer to int32 ``[tiles]``: tile ids by position, where the raster is a table; else None.
    group, first, band
        The raster's parameters: see `tilestream.core.raster`.
    first_batch
        The batch that is taken first.
    """

    batches: Any
    num_m: Any
    num_n: Any
    k_steps: Any
    full_tiles: Any
    shares: Any
    units: Any
    queues: Any
    table: Any
    group: Any
    first: Any
    band: Any
    first_batch: Any


class Words(NamedTuple):
    """Words of memory that belong to one launch at a time.

    Attributes
    ----------
    counters
        Pointer to int64 words, `kernels.device.schedule.LINE` of them apart: a counter a queue, the count of the
        workers that have left, the abort word. None for a static schedule without a gate.
    base
        int64: what the launch's counters count from.
    reset
        Whether the last worker out zeroes the counters: those of a captured launch.
    log
        Pointer: int32 records of a probe, int64 spans of a trace; else None.
    capacity
        Records of a probe that a worker has room for.
    partials
        ``stream_k``: pointer to float32 slots, a tile's accumulator each; else None.
    counts
        ``stream_k``: pointer to int32, two words a slot, 0 before and after a launch; else None.
    """

    counters: Any
    base: Any
    reset: Any
    log: Any
    capacity: Any
    partials: Any
    counts: Any


class Incoming(NamedTuple):
    """An operand's chunks, as a kernel waits for them.

    Attributes
    ----------
    signals
        Pointer to int32, one a chunk.
    quarantine
        Pointer to int32: not 0 where an earlier launch may have left signals behind.
    table
        Pointer to int32 (`tilestream.launch.gate.chunk_table`) where chunks are ragged; else None.
    epoch
        A chunk has arrived when its signal is at least so much; 0: when it is not 0.
    key
        The call's number in an error record.
    chunks
        How many there are.
    per_chunk
        Rows (columns) of a chunk, where chunks are uniform.
    unread
        Chunks that no tile reads.
    extent
        Rows (columns) of the operand in one batch.
    """

    signals: Any
    quarantine: Any
    table: Any
    epoch: Any
    key: Any
    chunks: Any
    per_chunk: Any
    unread: Any
    extent: Any


class Gate(NamedTuple):
    """What arrives, and until when a launch waits for it.

    Attributes
    ----------
    rows, columns
        `Incoming`: A's rows, B's columns.
    queue_table
        Pointer to int32 (`tilestream.launch.gate.queue_table`) in arrival order; else None.
    rows_per_batch, tiles_per_batch
        Rows, and row tiles, from one batch to the next in what arrives; 0 where batches share A.
    records, claims
        The error channel: pointers to int64, see `tilestream.core.error_record`.
    op
        The op's number in a record.
    allowed
        int64: nanoseconds from a worker's start to its deadline.
    """

    rows: Any
    columns: Any
    queue_table: Any
    rows_per_batch: Any
    tiles_per_batch: Any
    records: Any
    claims: Any
    op: Any
    allowed: Any


class Watch(NamedTuple):
    """A worker, and what it looks at while it waits. It stays the same from item to item.

    Attributes
    ----------
    worker, workers
        Which one of how many.
    leaves
        Whether the worker counts itself out.
    abort, clock
        Pointers to int64: the launch's abort word, and its clock. None without a gate.
    begin
        int64, nanoseconds: when the worker began. None without a gate.
    """

    worker: Any
    workers: Any
    leaves: Any
    abort: Any
    clock: Any
    begin: Any


class Passed(NamedTuple):
    """What a worker knows of its gate.

    Attributes
    ----------
    over
        Whether the launch is over.
    row_low, row_high, column_low, column_high
        First and last chunk of the item before, of A's rows and of B's columns: they need no second look.
    """

    over: Any
    row_low: Any
    row_high: Any
    column_low: Any
    column_high: Any


class Ready(NamedTuple):
    """What a worker knows of the queues, in arrival order.

    Attributes
    ----------
    queue
        That of the item before; -1: none.
    empty
        Those that it has found empty, a bit each.
    """

    queue: Any
    empty: Any


class Cursor(NamedTuple):
    """Where a worker is in the schedule.

    Attributes
    ----------
    ticket
        ``static``: items taken so far.
    source
        Where it draws tickets: 0 its own queue, ``q + 1`` queue ``q``, ``queues + 1`` none of them.
    share, unit, unit_end
        ``stream_k``: the share in progress (-1: none), and the K steps that are left of it.
    noted
        Records that a probe has written.
    asked
        int64: the answer to `kernels.hopper.queues.prefetch_ticket`.
    """

    ticket: Any
    source: Any
    share: Any
    unit: Any
    unit_end: Any
    noted: Any
    asked: Any


class Progress(NamedTuple):
    """How far a worker has come: `Cursor`, `Ready`, `Passed`."""

    cursor: Any
    ready: Any
    passed: Any


class Item(NamedTuple):
    """A work item.

    Attributes
    ----------
    batch, pm, pn
        Its tile.
    k_begin, k_end
        Its K steps. On Hopper a void item's run backwards, from its end to its beginning.
    part, parts
        Which part of the tile it is, of how many.
    slot
        The slot of its partial result; -1 for a whole tile.
    place
        Its record in a trace: see `kernels.device.trace`.
    """

    batch: Any
    pm: Any
    pn: Any
    k_begin: Any
    k_end: Any
    part: Any
    parts: Any
    slot: Any
    place: Any


class Place(NamedTuple):
    """Where a loop is in a ring.

    Attributes
    ----------
    at
        The stage, or the slot.
    phase
        0 or 1: the parity of the rounds before this one.
    """

    at: Any
    phase: Any


class Ring(NamedTuple):
    """Stages of shared memory between loads and math, and their barriers.

    Attributes
    ----------
    x, y
        Stages of the operands; of ``y`` a tuple, one for each part of a tile's columns.
    full, empty
        Barriers, one a stage.
    """

    x: Any
    y: Any
    full: Any
    empty: Any


class Items(NamedTuple):
    """The item ring: by it the load warp hands work items, and STOP, to the math warps.

    Attributes
    ----------
    slots
        Shared memory: the fields of an item, slot by slot.
    full, empty
        Barriers, one a slot.
    """

    slots: Any
    full: Any
    empty: Any


class LocalRows(NamedTuple):
    """Row tiles of x that lie in a tensor of their own: of each ``period`` of them ``tiles``, from ``first`` on.

    Attributes
    ----------
    map
        Tensor map of that tensor, K-major; None where there are no such rows.
    first, tiles, period
        In row tiles of the whole x.
    """

    map: Any
    first: Any
    tiles: Any
    period: Any


class Loads(NamedTuple):
    """Where a load loop copies operands from.

    Attributes
    ----------
    x, y
        Tensor maps; of ``y`` a tuple, one for each part of a tile's columns.
    local
        `LocalRows`.
    x_batched, y_batched
        1 where the operand has batches, 0 where all batches share it.
    """

    x: Any
    y: Any
    local: Any
    x_batched: Any
    y_batched: Any


class Strided(NamedTuple):
    """A tile's rows of an operand ``[rows, K]`` that is read in vectors.

    Attributes
    ----------
    at
        Pointer to the first row's first element of K.
    last
        The last row that there is, from the first.
    stride
        The stride that is not 1.
    step
        int64: elements from one K step to the next.
    """

    at: Any
    last: Any
    stride: Any
    step: Any


class Epilogue(NamedTuple):
    """What an accumulator becomes, and where it is stored.

    ``activation(alpha * row_scale * column_scale * acc + bias + beta * residual)``.

    Attributes
    ----------
    out, residual
        `Matrix`.
    bias, row_scale, column_scale
        `Vector`.
    alpha, beta
        float32.
    rows, columns
        The accumulator's extents in one batch: they are the output's columns and rows where operands are swapped.
    map, buffers
        Tensor map of the output, and the shared memory that it is stored from; None where it is stored from registers.
    """

    out: Any
    residual: Any
    bias: Any
    row_scale: Any
    column_scale: Any
    alpha: Any
    beta: Any
    rows: Any
    columns: Any
    map: Any
    buffers: Any


class Region(NamedTuple):
    """The part of an accumulator that the epilogue finishes at a time.

    Attributes
    ----------
    batch, row, column
        Where its first element is in the output.
    i, j
        Vectors, in the accumulator's layout: its rows and columns in the output; on CDNA, from ``row`` and ``column``.
    inside
        bool ``[rows, columns]``: which elements the output has; on Hopper, which rows and which columns; on CDNA, how
        many rows and columns are left from ``row`` and ``column`` on.
    """

    batch: Any
    row: Any
    column: Any
    i: Any
    j: Any
    inside: Any


class Publishing(NamedTuple):
    """The chunks of the output that a kernel signals.

    Attributes
    ----------
    signals, counts
        Pointers to int32, one a chunk each: what it is signalled by, and its rows that are complete.
    epoch
        What a chunk is signalled by.
    per_chunk
        Rows of a chunk.
    times
        How often each row is counted: by the column tiles, and where two consumers share a tile's columns by both.
    """

    signals: Any
    counts: Any
    epoch: Any
    per_chunk: Any
    times: Any
