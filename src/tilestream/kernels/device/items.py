"""A worker's items, from the first to STOP: what the loops of the portable GEMM and of the CDNA GEMM share.

::

    at, waiting = begin(...)                     # the counters, the clock, chunks in quarantine
    while found:
        found, item, at, waiting = next_item(...)      # schedule.take or arrival_order.take_ready; gate.pass_gate
        if found: multiply, finish
    end(...)                                     # the words, as the next launch expects them

Only what happens to an item is a kernel's own. Triton and Gluon call the same functions; what arrives, and how the
schedule is cut, are constexprs, so that a kernel has no more of this than it uses.

Tuples, here and in both kernels::

    launch   (counters, base, reset, queues, worker, workers)
    problem  (batches, num_m, num_n, k_steps, full_tiles, shares, units)
    raster   (table, group, first, band, first_batch)
    rows     (signals, epoch, quarantine, key, table, chunks, rows_per_chunk, unread, extent), of A; columns: of B
    batched  (rows_per_batch, row_tiles_per_batch)
    channel  (records, claims, op, allowed)
    log      (probe, capacity)
    at       (ticket, source, share, unit, unit_end, queue, empty, noted): what has been taken so far
    waiting  (over, row_low, row_high, column_low, column_high, abort, clock, began, counts_out)
    item     (batch, pm, pn, k_begin, k_end, part, parts, slot, place)
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.kernels.device.arrival_order import take_ready
from tilestream.kernels.device.clock import present
from tilestream.kernels.device.gate import leave_gate, pass_gate, quarantined
from tilestream.kernels.device.schedule import LINE, enter, leave, look, take
from tilestream.kernels.device.trace import begin_span, place_of, ready_span


@triton.jit
def begin(launch, rows, columns, channel, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """``(at, waiting)`` of a worker that has taken nothing yet."""
    counters, base, reset, queues, worker, _ = launch
    records, claims, op, allowed = channel
    _, row_epoch, row_quarantine, row_key, _, _, _, _, _ = rows
    _, column_epoch, column_quarantine, column_key, _, _, _, _, _ = columns
    GATED: tl.constexpr = (ROWS != "none") or (COLUMNS != "none")
    counts_out = reset
    if GATED:
        # Words that the last worker out zeroes: a captured launch's, a caller's own.
        counts_out = tl.where((row_epoch == 0) | (column_epoch == 0), 1, reset)
    enter(counters, base, worker, queues, counts_out, KIND == "static", GATED)
    zero = tl.cast(0, tl.int32)
    over = zero
    # Addresses only where there is a gate: a static launch has no words at all.
    abort = zero
    clock = zero
    began = tl.cast(0, tl.int64)
    if GATED:
        abort = counters + (queues + 1) * LINE
        clock = claims + LINE
        began = present(clock)
        over = quarantined(
            worker, row_epoch, row_quarantine, row_key, column_epoch, column_quarantine, column_key,
            abort, base, records, claims, op, allowed, ROWS, COLUMNS,
        )  # fmt: skip
    at = (zero, zero, zero - 1, zero, zero, zero - 1, zero, zero)
    return at, (over, zero, zero - 1, zero, zero - 1, abort, clock, began, counts_out)


@triton.jit
def next_item(
    launch, problem, raster, rows, columns, batched, channel, log, queue_table, at, waiting,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr, SPLIT: tl.constexpr, STEAL: tl.constexpr,
    ORDER: tl.constexpr, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PROBE: tl.constexpr,
    TRACE: tl.constexpr, LOOK: tl.constexpr = look,
):  # fmt: skip
    """``(found, item, at, waiting)``: the worker's next item, whose chunks have arrived, or STOP where not ``found``.

    Where the launch is over (``waiting``'s first), the item is to be filled with NaN. ``LOOK``: see `schedule.take`.
    """
    counters, base, _, queues, worker, workers = launch
    batches, num_m, num_n, k_steps, full_tiles, shares, units = problem
    table, group, first, band, first_batch = raster
    records, claims, op, allowed = channel
    probe, capacity = log
    row_signals, row_epoch, _, row_key, row_table, _, rows_per_chunk, _, m = rows
    column_signals, column_epoch, _, column_key, column_table, _, columns_per_chunk, _, n = columns
    rows_per_batch, row_tiles_per_batch = batched
    ticket, source, share, unit, unit_end, queue, empty, noted = at
    over, row_low, row_high, column_low, column_high, abort, clock, began, counts_out = waiting
    waited = tl.cast(0, tl.int64)
    if SPLIT == "chunks":
        found, batch, pm, pn, queue, empty, waited, noted = take_ready(
            worker, queue, empty, over, row_signals if ROWS != "none" else column_signals,
            row_epoch if ROWS != "none" else column_epoch, queue_table, abort, base, clock, began, allowed,
            counters, queues, batches, num_m, num_n, k_steps, full_tiles, table, group, first, band, first_batch,
            probe, capacity, noted, ORDER, TRANSPOSED, PROBE,
        )  # fmt: skip
        zero = tl.cast(0, tl.int32)
        k_begin, k_end, part, parts, slot = zero, zero + k_steps, zero, zero + 1, zero - 1
    else:
        found, batch, pm, pn, k_begin, k_end, part, parts, slot, ticket, source, share, unit, unit_end, noted = take(
            worker, workers, ticket, source, share, unit, unit_end,
            counters, base, queues, batches, num_m, num_n, k_steps, full_tiles, shares, units, table, group, first,
            band, first_batch, probe, capacity, noted,
            KIND, SPLIT, STEAL, ORDER, TRANSPOSED, PROBE, LOOK=LOOK,
        )  # fmt: skip
    place = tl.cast(0, tl.int32)
    if found != 0:
        if TRACE:
            place = place_of(batch, pm, pn, parts, slot, batches, num_m, num_n)
            begin_span(probe, place, worker)
        if (ROWS != "none") or (COLUMNS != "none"):
            over, row_low, row_high, column_low, column_high, noted = pass_gate(
                over, worker, batch, pm, pn, (batch * num_m + pm) * num_n + pn, tl.where(batches > 1, batch, -1),
                row_low, row_high, column_low, column_high,
                row_signals, row_epoch, row_key, rows_per_chunk, row_table, rows_per_batch, row_tiles_per_batch,
                column_signals, column_epoch, column_key, columns_per_chunk, column_table,
                m, n, abort, base, clock, began, allowed, records, claims, op, probe, capacity, noted,
                BLOCK_M, BLOCK_N, ROWS, COLUMNS, PROBE, waited,
            )  # fmt: skip
        if TRACE:
            ready_span(probe, place)
    item = (batch, pm, pn, k_begin, k_end, part, parts, slot, place)
    at = (ticket, source, share, unit, unit_end, queue, empty, noted)
    waiting = (over, row_low, row_high, column_low, column_high, abort, clock, began, counts_out)
    return found, item, at, waiting


@triton.jit
def end(
    launch, problem, rows, columns, batched, channel, waiting, KIND: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """After STOP: the words are left as the next launch expects them."""
    counters, base, reset, queues, worker, workers = launch
    if (ROWS != "none") or (COLUMNS != "none"):
        batches, num_m, num_n, _, _, _, _ = problem
        records, claims, op, allowed = channel
        row_signals, row_epoch, row_quarantine, row_key, row_table, row_chunks, _, row_unread, _ = rows
        (
            column_signals, column_epoch, column_quarantine, column_key, column_table, column_chunks, _, column_unread,
            _,
        ) = columns  # fmt: skip
        _, row_tiles_per_batch = batched
        over, _, _, _, _, abort, clock, began, counts_out = waiting
        leave_gate(
            counts_out, reset, over, worker, workers, queues, counters, base, abort, clock, began, allowed,
            records, claims, op, batches, num_m, num_n,
            row_signals, row_epoch, row_key, row_quarantine, row_table, row_chunks, row_unread, row_tiles_per_batch,
            column_signals, column_epoch, column_key, column_quarantine, column_table, column_chunks, column_unread,
            ROWS, COLUMNS,
        )  # fmt: skip
    else:
        leave(counters, queues, reset, workers, KIND == "static")
