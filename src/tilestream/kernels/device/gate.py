"""The gate on the device: the wait between a work item and the chunks it reads, its deadline, and how it ends.

::

    over already:                  go on with nothing: this item, and all after it, become NaN
    for chunk of the item's rows (columns), those of the item before left out:
        look at its signal         acquire, system scope, one lane
        not there:                 nap, look; abort word set -> over; deadline passed -> set it, write the record, over

A worker that is told "over" leaves no hole: it goes on taking items and hands in NaN for them (`gemm`), so every tile
is written exactly once, stream-K's counts come back to zero, and the host need not look at the output.

Which chunks an item reads is `tilestream.core.chunks.chunk_of` where they are uniform, else a table that the host
made with `Gate.needs`: by row tile, the chunks, none without rows among them; see `arguments.chunk_table`.

Words (invariants 4 and 5). *Signals*: int32, arrived when at least the call's epoch; an epoch of 0 says that any word
but 0 will do (captured launches, a caller's own words), and that the last worker out zeroes them. ``-epoch`` says that
the producer failed. *Abort*: a 64-bit word behind the counters and with the same rule: a launch is over when it is at
least ``base + 1``. *Quarantine*: after an expiry, signals whose epoch is 0 may hold what the next launch must not take
for news; so the launches after it give NaN until the host has cleared the word.

The protocol is `tilestream.core.loop.work_through` and `leave`, which the checker explores; of the chunks that
`leave` sees, only those that no tile reads are looked at here: the others' looks were made, by workers that have left.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.core import chunks
from tilestream.core import error_record as record
from tilestream.kernels.device.clock import LONGEST, SHORTEST, latest, nap, present
from tilestream.kernels.device.jit import device
from tilestream.kernels.device.schedule import GATE, WAITED, count_out, note, restore

chunk_of = device(chunks.chunk_of)

#: How a wait ended.
PENDING: tl.constexpr = tl.constexpr(0)
ARRIVED: tl.constexpr = tl.constexpr(1)
OVER: tl.constexpr = tl.constexpr(2)
EXPIRED: tl.constexpr = tl.constexpr(record.EXPIRED)
FAILED: tl.constexpr = tl.constexpr(record.FAILED)
QUARANTINED: tl.constexpr = tl.constexpr(record.QUARANTINED)

RECORDS: tl.constexpr = tl.constexpr(record.RECORDS)
FIELDS: tl.constexpr = tl.constexpr(record.FIELDS)


@triton.jit
def look(signals, chunk, epoch):
    """`PENDING`, `ARRIVED` or `FAILED`. Whoever is told that it arrived reads what was written before the signal."""
    word = tl.atomic_add(signals + chunk, 0, sem="acquire", scope="sys")
    here = ((epoch == 0) & (word != 0)) | ((epoch > 0) & (word >= epoch))
    failed = (epoch > 0) & (word == -epoch)
    return tl.where(here, ARRIVED, tl.where(failed, FAILED, PENDING))


@triton.jit
def is_over(abort, base):
    """Whether the abort word of this launch is set."""
    return tl.atomic_add(abort, 0, sem="relaxed") > base


@triton.jit
def wait(signals, chunk, epoch, abort, base, clock, begin, allowed):
    """Wait for one chunk; how it ended, and the nanoseconds waited."""
    state = look(signals, chunk, epoch)
    waited = tl.cast(0, tl.int64)
    if state == PENDING:
        first = present(clock)
        pause = tl.cast(SHORTEST, tl.int32)
        while state == PENDING:
            nap(pause)
            pause = tl.minimum(2 * pause, LONGEST)
            state = look(signals, chunk, epoch)
            if state == PENDING:
                if is_over(abort, base):
                    state = tl.cast(OVER, tl.int32)
                elif latest(clock) - begin > allowed:
                    state = tl.cast(EXPIRED, tl.int32)
        waited = present(clock) - first
    return state, waited


@triton.jit
def end_launch(
    state, abort, base, records, claims, op, worker, operand, chunk, key, epoch, tile, batch, pm, pn,
    waited, allowed,
):  # fmt: skip
    """Set the abort word. Whoever was the first to set it writes the record: `tilestream.core.error_record`."""
    if tl.atomic_max(abort, base + 1, sem="relaxed") <= base:
        number = tl.atomic_add(claims, 1, sem="relaxed")
        at = records + (number % RECORDS) * FIELDS
        tl.store(at + 1, state)
        tl.store(at + 2, op)
        tl.store(at + 3, worker)
        tl.store(at + 4, operand)
        tl.store(at + 5, chunk)
        tl.store(at + 6, key)
        tl.store(at + 7, epoch)
        tl.store(at + 8, tile)
        tl.store(at + 9, batch)
        tl.store(at + 10, pm)
        tl.store(at + 11, pn)
        tl.store(at + 12, waited)
        tl.store(at + 13, allowed)
        tl.debug_barrier()
        tl.atomic_xchg(at, number + 1, sem="release", scope="sys")


@triton.jit
def pass_operand(
    row, end, tile, signals, epoch, rows_per_chunk, table, low, high, abort, base, clock, begin, allowed,
    probe, capacity, worker, noted, operand, CHUNKS: tl.constexpr, PROBE: tl.constexpr,
):  # fmt: skip
    """Wait for the chunks of rows [row, end), which row tile ``tile`` reads.

    ``low`` to ``high`` are the chunks of the item before, which need no second look.

    Returns
    -------
    (state, chunk, waited, low, high, noted)
    """
    if CHUNKS == "uniform":
        i = chunk_of(row, rows_per_chunk)
        stop = chunk_of(end - 1, rows_per_chunk) + 1
        first = i
        last = stop - 1
    else:
        i = tl.load(table + tile)
        stop = tl.load(table + tile + 1)
        first = tl.load(table + i)
        last = tl.load(table + stop - 1)
    state = tl.cast(ARRIVED, tl.int32)
    waited = tl.cast(0, tl.int64)
    # Not `i`: Triton's compiler takes a loop's variable that is set to what it began with for one that never changes.
    chunk = tl.cast(-1, tl.int32)
    while (i < stop) & (state == ARRIVED):
        chunk = i
        if CHUNKS == "ragged":
            chunk = tl.load(table + i)
        if (chunk < low) | (chunk > high):
            state, waited = wait(signals, chunk, epoch, abort, base, clock, begin, allowed)
            noted = note(probe, capacity, worker, noted, WAITED, operand, chunk, state, 0, 0, 0, PROBE)
        i += 1
    return state, chunk, waited, first, last, noted


@triton.jit
def pass_gate(
    over, worker, batch, pm, pn, tile, batch_named, row_low, row_high, column_low, column_high,
    row_signals, row_epoch, row_key, rows_per_chunk, row_table, rows_per_batch, row_tiles_per_batch,
    column_signals, column_epoch, column_key, columns_per_chunk, column_table,
    m, n, abort, base, clock, begin, allowed, records, claims, op, probe, capacity, noted,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PROBE: tl.constexpr,
    before=0,
):  # fmt: skip
    """Wait for what an item reads: ``(over, row_low, row_high, column_low, column_high, noted)``.

    ``before``: the nanoseconds that the worker had waited when it took the item; a record counts them in.
    """
    if over == 0:
        over = is_over(abort, base).to(tl.int32)
    if ROWS != "none":
        if over == 0:
            offset = batch * rows_per_batch
            state, chunk, waited, row_low, row_high, noted = pass_operand(
                offset + pm * BLOCK_M, offset + tl.minimum(m, pm * BLOCK_M + BLOCK_M), batch * row_tiles_per_batch + pm,
                row_signals, row_epoch, rows_per_chunk, row_table, row_low, row_high, abort, base, clock, begin,
                allowed, probe, capacity, worker, noted, 0, ROWS, PROBE,
            )  # fmt: skip
            if state != ARRIVED:
                over = tl.cast(1, tl.int32)
                if state != OVER:
                    end_launch(
                        state, abort, base, records, claims, op, worker, 0, chunk, row_key, row_epoch,
                        tile, batch_named, pm, pn, waited + before, allowed,
                    )  # fmt: skip
    if COLUMNS != "none":
        if over == 0:
            state, chunk, waited, column_low, column_high, noted = pass_operand(
                pn * BLOCK_N, tl.minimum(n, pn * BLOCK_N + BLOCK_N), pn, column_signals, column_epoch,
                columns_per_chunk, column_table, column_low, column_high, abort, base, clock, begin, allowed,
                probe, capacity, worker, noted, 1, COLUMNS, PROBE,
            )  # fmt: skip
            if state != ARRIVED:
                over = tl.cast(1, tl.int32)
                if state != OVER:
                    end_launch(
                        state, abort, base, records, claims, op, worker, 1, chunk, column_key, column_epoch,
                        tile, batch_named, pm, pn, waited + before, allowed,
                    )  # fmt: skip
    noted = note(probe, capacity, worker, noted, GATE, over, 0, 0, 0, 0, 0, PROBE)
    return over, row_low, row_high, column_low, column_high, noted


@triton.jit
def quarantined(
    worker, row_epoch, row_quarantine, row_key, column_epoch, column_quarantine, column_key,
    abort, base, records, claims, op, allowed, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Whether an earlier launch left signals behind that nobody has reset; then this one is over, and says so."""
    over = tl.cast(0, tl.int32)
    if ROWS != "none":
        if row_epoch == 0:
            over = look_at_mark(over, row_quarantine, 0, worker, row_key, abort, base, records, claims, op, allowed)
    if COLUMNS != "none":
        if column_epoch == 0:
            over = look_at_mark(
                over, column_quarantine, 1, worker, column_key, abort, base, records, claims, op, allowed
            )
    return over


@triton.jit
def look_at_mark(over, quarantine, operand, worker, key, abort, base, records, claims, op, allowed):
    """Whether the launch is over, now that an operand's mark was looked at."""
    none = tl.cast(-1, tl.int32)
    if tl.atomic_add(quarantine, 0, sem="relaxed") != 0:
        over = over * 0 + 1
        end_launch(
            QUARANTINED, abort, base, records, claims, op, worker, operand, none, key, none,
            none, none, none, none, none, allowed,
        )  # fmt: skip
    return over


@triton.jit
def see_rest(
    over, operand, worker, signals, epoch, key, table, tiles, unread, abort, base, clock, begin, allowed,
    records, claims, op, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Wait for the chunks that no tile reads, those without rows; whether the launch is over.

    Only then may the signals be zeroed: one that comes later would count for the next call (invariant 4).
    """
    i = tl.cast(0, tl.int32)
    while (i < unread) & (over == 0):
        chunk = i
        if CHUNKS == "ragged":
            chunk = tl.load(table + tl.load(table + tiles) + i)
        state, waited = wait(signals, chunk, epoch, abort, base, clock, begin, allowed)
        if state != ARRIVED:
            over = over * 0 + 1
            if state != OVER:
                end_launch(
                    state, abort, base, records, claims, op, worker, operand, chunk, key, epoch,
                    -1, -1, -1, -1, waited, allowed,
                )  # fmt: skip
        i += 1
    return over


@triton.jit
def clear(over, epoch, signals, chunks, quarantine):
    """Zero the signals, or put them under quarantine."""
    if epoch == 0:
        if over == 0:
            for chunk in range(chunks):
                tl.store(signals + chunk, 0)
        else:
            tl.store(quarantine, 1)


@triton.jit
def leave_gate(
    counts_out, reset, over, worker, workers, queues, counters, base, abort, clock, begin, allowed, records, claims, op,
    batches, num_m, num_n, row_signals, row_epoch, row_key, row_quarantine, row_table, row_chunks, row_unread,
    row_tiles_per_batch, column_signals, column_epoch, column_key, column_quarantine, column_table, column_chunks,
    column_unread, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """After STOP: the last worker out zeroes the signals whose epoch is 0, and a captured launch's own words.

    Signals only once all were seen. Else they stay as they are, under quarantine.
    """
    if counts_out != 0:
        if count_out(counters, queues, base, workers):
            over = is_over(abort, base).to(tl.int32)
            if ROWS != "none":
                if row_epoch == 0:
                    over = see_rest(
                        over, 0, worker, row_signals, row_epoch, row_key, row_table,
                        tl.maximum(num_m, batches * row_tiles_per_batch), row_unread,
                        abort, base, clock, begin, allowed, records, claims, op, ROWS,
                    )  # fmt: skip
            if COLUMNS != "none":
                if column_epoch == 0:
                    over = see_rest(
                        over, 1, worker, column_signals, column_epoch, column_key, column_table, num_n, column_unread,
                        abort, base, clock, begin, allowed, records, claims, op, COLUMNS,
                    )  # fmt: skip
            if ROWS != "none":
                clear(over, row_epoch, row_signals, row_chunks, row_quarantine)
            if COLUMNS != "none":
                clear(over, column_epoch, column_signals, column_chunks, column_quarantine)
            if reset != 0:
                restore(counters, queues, True)
