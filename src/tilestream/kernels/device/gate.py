"""The gate on the device: the wait between a work item and the chunks it reads, its deadline, and how it ends.

::

    over already:                  go on without waiting: this item, and all after it, become NaN
    for chunk of the item's rows (columns), those of the item before left out:
        poll its signal            acquire, system scope, one lane
        not there:                 nap, poll; abort word set -> over; deadline passed -> set it, write the record, over

A worker that finds the launch over leaves no hole: it goes on taking items and stores NaN for them. So every tile is
written exactly once, stream-K's counts come back to zero, and the host need not look at the output.

Uniform chunks of an item come from `tilestream.core.chunks.chunk_of`. Ragged ones come from a table that the host makes
with `Gate.needs`: the chunks of each row tile, those without rows left out (`tilestream.launch.gate.chunk_table`).

Words (invariants 4 and 5). *Signals*: int32; a chunk has arrived when its signal is at least the call's epoch. With an
epoch of 0 (captured launches, a caller's own words) every nonzero word is a signal, and the last worker out zeroes the
words.
``-epoch`` says that the producer failed. *Abort*: a 64-bit word behind the counters; a launch is over when it is at
least ``base + 1``. *Quarantine*: an expired launch may leave signals behind whose epoch is 0; the launches after it
give NaN until the host has cleared the word.

The protocol is `tilestream_tools.verify.gpu_loop.work_through` and `leave`. The last worker out polls only chunks that
no tile reads: the workers before it have polled the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.core import chunks
from tilestream.core import error_record as record
from tilestream.core.structs import Passed
from tilestream.kernels.device.clock import LONGEST, SHORTEST, latest, nap, present
from tilestream.kernels.device.jit import device
from tilestream.kernels.device.schedule import GATE, WAITED, count_out, note, restore

chunk_of = device(chunks.chunk_of)

# How a wait ended.
PENDING, ARRIVED, OVER = map(tl.constexpr, range(3))
EXPIRED, FAILED, QUARANTINED = map(tl.constexpr, (record.EXPIRED, record.FAILED, record.QUARANTINED))

RECORDS, FIELDS = map(tl.constexpr, (record.RECORDS, record.FIELDS))


@triton.jit
def poll_signal(coming, chunk):
    """`PENDING`, `ARRIVED` or `FAILED`. A worker that is told `ARRIVED` reads what was written before the signal."""
    word = tl.atomic_add(coming.signals + chunk, 0, sem="acquire", scope="sys")
    here = ((coming.epoch == 0) & (word != 0)) | ((coming.epoch > 0) & (word >= coming.epoch))
    failed = (coming.epoch > 0) & (word == -coming.epoch)
    return tl.where(here, ARRIVED, tl.where(failed, FAILED, PENDING))


@triton.jit
def is_over(words, watch):
    """Whether the abort word of this launch is set."""
    return tl.atomic_add(watch.abort, 0, sem="relaxed") > words.base


@triton.jit
def wait(coming, chunk, gate, words, watch):
    """Wait for one chunk of `Incoming`: how it ended, and the nanoseconds waited (int64)."""
    state = poll_signal(coming, chunk)
    waited = tl.cast(0, tl.int64)
    if state == PENDING:
        first = present(watch.clock)
        pause = tl.cast(SHORTEST, tl.int32)
        while state == PENDING:
            nap(pause)
            pause = tl.minimum(2 * pause, LONGEST)
            state = poll_signal(coming, chunk)
            if state == PENDING:
                if is_over(words, watch):
                    state = tl.cast(OVER, tl.int32)
                elif latest(watch.clock) - watch.begin > gate.allowed:
                    state = tl.cast(EXPIRED, tl.int32)
        waited = present(watch.clock) - first
    return state, waited


@triton.jit
def end_launch(state, operand, chunk, key, epoch, named, waited, gate, words, watch):
    """Set the abort word. The first worker to set it writes the record: `tilestream.core.error_record`.

    ``named``: tile, batch, pm, pn; -1 for what is not to be named.
    """
    tile, batch, pm, pn = named
    if tl.atomic_max(watch.abort, words.base + 1, sem="relaxed") <= words.base:
        number = tl.atomic_add(gate.claims, 1, sem="relaxed")
        at = gate.records + (number % RECORDS) * FIELDS
        tl.store(at + 1, state)
        tl.store(at + 2, gate.op)
        tl.store(at + 3, watch.worker)
        tl.store(at + 4, operand)
        tl.store(at + 5, chunk)
        tl.store(at + 6, key)
        tl.store(at + 7, epoch)
        tl.store(at + 8, tile)
        tl.store(at + 9, batch)
        tl.store(at + 10, pm)
        tl.store(at + 11, pn)
        tl.store(at + 12, waited)
        tl.store(at + 13, gate.allowed)
        tl.debug_barrier()
        tl.atomic_xchg(at, number + 1, sem="release", scope="sys")


@triton.jit
def pass_operand(rows, seen, coming, gate, words, watch, noted, OPERAND: tl.constexpr, C: tl.constexpr):
    """Wait for the chunks that one operand's part of an item reads.

    Parameters
    ----------
    rows
        ``(row, end, tile)``: rows [row, end) of the operand, and the row tile that they are.
    seen
        ``(low, high)``: the chunks of the item before, which need no second look.

    Returns
    -------
    (state, chunk, waited, low, high, noted)
    """
    row, end, tile = rows
    low, high = seen
    CHUNKS: tl.constexpr = C.COLUMN_CHUNKS if OPERAND else C.ROW_CHUNKS
    if CHUNKS == "uniform":
        i = chunk_of(row, coming.per_chunk)
        stop = chunk_of(end - 1, coming.per_chunk) + 1
        first = i
        last = stop - 1
    else:
        i = tl.load(coming.table + tile)
        stop = tl.load(coming.table + tile + 1)
        first = tl.load(coming.table + i)
        last = tl.load(coming.table + stop - 1)
    state = tl.cast(ARRIVED, tl.int32)
    waited = tl.cast(0, tl.int64)
    # Not `i`: Triton's compiler takes a loop's variable that is set to what it began with for one that never changes.
    chunk = tl.cast(-1, tl.int32)
    while (i < stop) & (state == ARRIVED):
        chunk = i
        if CHUNKS == "ragged":
            chunk = tl.load(coming.table + i)
        if (chunk < low) | (chunk > high):
            state, waited = wait(coming, chunk, gate, words, watch)
            noted = note(words, watch, noted, WAITED, (OPERAND, chunk, state), C.PROBE)
        i += 1
    return state, chunk, waited, first, last, noted


@triton.jit
def pass_gate(item, passed, work, words, gate, watch, noted, before, C: tl.constexpr):
    """Wait for what an item reads: ``(passed, noted)``.

    ``before``: the nanoseconds that the worker had waited when it took the item; a record counts them in.
    """
    over, row_low, row_high, column_low, column_high = passed
    batch, pm, pn = item.batch, item.pm, item.pn
    tile = (batch * work.num_m + pm) * work.num_n + pn
    named = (tile, tl.where(work.batches > 1, batch, -1), pm, pn)
    if over == 0:
        over = is_over(words, watch).to(tl.int32)
    if C.ROW_CHUNKS != "none":
        if over == 0:
            offset = batch * gate.rows_per_batch
            begin = offset + pm * C.BLOCK_M
            end = offset + tl.minimum(gate.rows.extent, pm * C.BLOCK_M + C.BLOCK_M)
            rows = (begin, end, batch * gate.tiles_per_batch + pm)
            state, chunk, waited, row_low, row_high, noted = pass_operand(
                rows, (row_low, row_high), gate.rows, gate, words, watch, noted, 0, C
            )
            if state != ARRIVED:
                over = tl.cast(1, tl.int32)
                if state != OVER:
                    end_launch(
                        state, 0, chunk, gate.rows.key, gate.rows.epoch, named, waited + before, gate, words, watch
                    )
    if C.COLUMN_CHUNKS != "none":
        if over == 0:
            columns = (pn * C.BLOCK_N, tl.minimum(gate.columns.extent, pn * C.BLOCK_N + C.BLOCK_N), pn)
            state, chunk, waited, column_low, column_high, noted = pass_operand(
                columns, (column_low, column_high), gate.columns, gate, words, watch, noted, 1, C
            )
            if state != ARRIVED:
                over = tl.cast(1, tl.int32)
                if state != OVER:
                    end_launch(
                        state, 1, chunk, gate.columns.key, gate.columns.epoch, named, waited + before, gate, words,
                        watch,
                    )  # fmt: skip
    noted = note(words, watch, noted, GATE, (over,), C.PROBE)
    return Passed(over, row_low, row_high, column_low, column_high), noted


@triton.jit
def pass_group(item, tile, passed, words, gate, watch):
    """``passed`` behind the chunk of an item's group, its batch: the matrix of B that it is multiplied with.

    ``passed.column_low``, ``column_high``: the group of the item before. ``tile``: the item's, for a record.
    """
    over, row_low, row_high, column_low, column_high = passed
    if over == 0:
        if (item.batch < column_low) | (item.batch > column_high):
            state, waited = wait(gate.columns, item.batch, gate, words, watch)
            column_low = item.batch
            column_high = item.batch
            if state != ARRIVED:
                over = tl.cast(1, tl.int32)
                if state != OVER:
                    named = (tile, item.batch, item.pm, item.pn)
                    end_launch(
                        state, 1, item.batch, gate.columns.key, gate.columns.epoch, named, waited, gate, words, watch
                    )  # fmt: skip
    return Passed(over, row_low, row_high, column_low, column_high)


@triton.jit
def look_at_mark(over, coming, gate, words, watch, OPERAND: tl.constexpr, CHUNKS: tl.constexpr):
    """Whether the launch is over, now that an operand's mark was looked at."""
    if CHUNKS != "none":
        if coming.epoch == 0:
            none = tl.cast(-1, tl.int32)
            if tl.atomic_add(coming.quarantine, 0, sem="relaxed") != 0:
                over = over * 0 + 1
                named = (none, none, none, none)
                end_launch(QUARANTINED, OPERAND, none, coming.key, none, named, none, gate, words, watch)
    return over


@triton.jit
def quarantined(gate, words, watch, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Whether an earlier launch left signals behind that the host has not reset; then this one is over, and says so.

    ``ROWS``, ``COLUMNS``, here and below: how operands arrive.
    """
    over = look_at_mark(tl.cast(0, tl.int32), gate.rows, gate, words, watch, 0, ROWS)
    return look_at_mark(over, gate.columns, gate, words, watch, 1, COLUMNS)


@triton.jit
def see_rest(over, coming, tiles, gate, words, watch, OPERAND: tl.constexpr, CHUNKS: tl.constexpr):
    """Wait for the chunks that no tile reads, those without rows; whether the launch is over.

    Only then may the signals be zeroed: one that comes later would count for the next call (invariant 4).
    """
    if CHUNKS != "none":
        if coming.epoch == 0:
            i = tl.cast(0, tl.int32)
            while (i < coming.unread) & (over == 0):
                chunk = i
                if CHUNKS == "ragged":
                    chunk = tl.load(coming.table + tl.load(coming.table + tiles) + i)
                state, waited = wait(coming, chunk, gate, words, watch)
                if state != ARRIVED:
                    over = over * 0 + 1
                    if state != OVER:
                        named = (-1, -1, -1, -1)
                        end_launch(state, OPERAND, chunk, coming.key, coming.epoch, named, waited, gate, words, watch)
                i += 1
    return over


@triton.jit
def clear(over, coming, CHUNKS: tl.constexpr):
    """Zero the signals, or put them under quarantine."""
    if CHUNKS != "none":
        if coming.epoch == 0:
            if over == 0:
                for chunk in range(coming.chunks):
                    tl.store(coming.signals + chunk, 0)
            else:
                tl.store(coming.quarantine, 1)


@triton.jit
def leave_gate(work, words, gate, watch, over, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """After STOP: the last worker out zeroes the signals whose epoch is 0, and a captured launch's own words.

    Signals only once all were seen. Else they stay as they are, under quarantine.
    """
    if watch.leaves != 0:
        if count_out(work, words, words.base, watch.workers):
            over = is_over(words, watch).to(tl.int32)
            tiles = tl.maximum(work.num_m, work.batches * gate.tiles_per_batch)
            over = see_rest(over, gate.rows, tiles, gate, words, watch, 0, ROWS)
            over = see_rest(over, gate.columns, work.num_n, gate, words, watch, 1, COLUMNS)
            clear(over, gate.rows, ROWS)
            clear(over, gate.columns, COLUMNS)
            if words.reset != 0:
                restore(work, words, True)
