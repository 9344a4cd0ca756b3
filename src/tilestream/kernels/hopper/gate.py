"""The gate of the Hopper kernel: `tilestream.kernels.device.gate`, asked by the load warp for each item.

::

    item = take();  none: hand STOP on, leave
    over already, or told so at the gate:   hand the item on *void*, and load nothing
    all its chunks are there:               fence; hand the item on; load it

Only the load warp waits, and before it hands an item on: behind that nothing is waited for that can fail to come. Of a
void item K runs backwards, from its end to its beginning: the load warp has no step of it to load, and the math warps,
who are told so many steps fewer than none, take NaN for its product and hand that in as they would a product. So each
tile is written once, stream-K's counts are restored, and both rings come to their end: see
`tilestream_tools.verify.protocol`, which the checker explores.

*Order* (invariant 7). One lane looks at a signal, an acquire at system scope, and tells the warp's others what it saw,
behind a barrier of theirs. Copies by TMA are of the asynchronous proxy, to which that acquire says nothing: so each
lane fences, whichever of them then starts the copies.

*Leaving.* The load warp counts itself out when it has started its last copies, its math warps still at work. What the
last one out resets (counters, signals, abort word) no math warp touches. But signals that are zero again say that all
were seen, not that what they announced has been read: the end of the launch says that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestream.kernels.device.arrival_order import take_ready
from tilestream.kernels.device.clock import present
from tilestream.kernels.device.gate import leave_gate, pass_gate, quarantined
from tilestream.kernels.device.schedule import LINE

#: Arguments that say nothing about alignment, and words that lie anywhere: a caller's own, or slices of ours.
UNSPECIALISED = (
    "row_epoch", "row_key", "row_chunks", "rows_per_chunk", "row_unread", "rows_per_batch", "row_tiles_per_batch",
    "column_epoch", "column_key", "column_chunks", "columns_per_chunk", "column_unread", "allowed", "op",
)  # fmt: skip
UNALIGNED = ("row_signals", "row_quarantine", "column_signals", "column_quarantine")


class Arriving(NamedTuple):
    """What the kernel is told of an operand's chunks: see `tilestream.kernels.portable.gemm.gemm`."""

    signals: Any
    quarantine: Any
    table: Any
    epoch: Any
    key: Any
    chunks: Any
    per_chunk: Any
    unread: Any


class Gate(NamedTuple):
    """What the kernel is told of what arrives.

    Attributes
    ----------
    rows, columns
        Of A and of B.
    queue_table
        In arrival order: see `tilestream.kernels.device.arrival_order`.
    rows_per_batch, tiles_per_batch
        Rows, and row tiles, from one batch to the next in what arrives.
    records, claims, op, allowed
        Where a record goes, the op's number in it, and the deadline.
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
    """What a worker watches while it waits: the abort word, the clock, and when it began."""

    abort: Any
    clock: Any
    begin: Any


@gluon.jit
def fenced(value):
    """``value``, behind a fence: what this thread has seen in global memory, copies that it starts see, too."""
    return gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def counts_out(gate, reset):
    """Whether workers count themselves out: there are words that the last of them zeroes."""
    return tl.where((gate.rows.epoch == 0) | (gate.columns.epoch == 0), 1, reset)


@gluon.jit
def begin_gate(gate, worker, counters, base, queues, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """What a worker that begins watches, and what it carries from item to item.

    That is whether the launch is over, and the chunks of the item before: first and last of rows, and of columns.
    """
    watch = Watch(counters + (queues + 1) * LINE, gate.claims + LINE, present(gate.claims + LINE))
    over = quarantined(
        worker, gate.rows.epoch, gate.rows.quarantine, gate.rows.key,
        gate.columns.epoch, gate.columns.quarantine, gate.columns.key,
        watch.abort, base, gate.records, gate.claims, gate.op, gate.allowed, ROWS, COLUMNS,
    )  # fmt: skip
    zero = tl.cast(0, tl.int32)
    return watch, (over, zero, zero - 1, zero, zero - 1)


@gluon.jit
def take_arrived(
    gate, watch, carried, worker, queue, empty, base, counters, queues, batches, num_m, num_n, k_steps, tiles, table,
    group, first, band, first_batch, probe, capacity, noted, ORDER: gl.constexpr, TRANSPOSED: gl.constexpr,
    ROWS: gl.constexpr, PROBE: gl.constexpr,
):  # fmt: skip
    """An item in arrival order: see `tilestream.kernels.device.arrival_order.take_ready`."""
    if ROWS != "none":
        coming = gate.rows
    else:
        coming = gate.columns
    return take_ready(
        worker, queue, empty, carried[0], coming.signals, coming.epoch, gate.queue_table, watch.abort, base,
        watch.clock, watch.begin, gate.allowed, counters, queues, batches, num_m, num_n, k_steps, tiles, table,
        group, first, band, first_batch, probe, capacity, noted, ORDER, TRANSPOSED, PROBE,
    )  # fmt: skip


@gluon.jit
def pass_item(
    gate, watch, carried, worker, batch, pm, pn, k_begin, k_end, m, n, batches, num_m, num_n, base,
    probe, capacity, noted, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    PROBE: gl.constexpr, before,
):  # fmt: skip
    """Wait for what an item reads: ``(carried, k_begin, k_end, noted)``, of a void item with K backwards."""
    over, row_low, row_high, column_low, column_high = carried
    over, row_low, row_high, column_low, column_high, noted = pass_gate(
        over, worker, batch, pm, pn, (batch * num_m + pm) * num_n + pn, tl.where(batches > 1, batch, -1),
        row_low, row_high, column_low, column_high,
        gate.rows.signals, gate.rows.epoch, gate.rows.key, gate.rows.per_chunk, gate.rows.table,
        gate.rows_per_batch, gate.tiles_per_batch,
        gate.columns.signals, gate.columns.epoch, gate.columns.key, gate.columns.per_chunk, gate.columns.table,
        m, n, watch.abort, base, watch.clock, watch.begin, gate.allowed, gate.records, gate.claims, gate.op,
        probe, capacity, noted, BLOCK_M, BLOCK_N, ROWS, COLUMNS, PROBE, before,
    )  # fmt: skip
    over = fenced(over)
    first = tl.where(over != 0, k_end, k_begin)
    end = tl.where(over != 0, k_begin, k_end)
    return (over, row_low, row_high, column_low, column_high), first, end, noted


@gluon.jit
def end_gate(
    gate, watch, over, counts_out, reset, worker, workers, queues, counters, base, batches, num_m, num_n,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """After STOP: see `tilestream.kernels.device.gate.leave_gate`."""
    leave_gate(
        counts_out, reset, over, worker, workers, queues, counters, base, watch.abort, watch.clock, watch.begin,
        gate.allowed, gate.records, gate.claims, gate.op, batches, num_m, num_n,
        gate.rows.signals, gate.rows.epoch, gate.rows.key, gate.rows.quarantine, gate.rows.table, gate.rows.chunks,
        gate.rows.unread, gate.tiles_per_batch,
        gate.columns.signals, gate.columns.epoch, gate.columns.key, gate.columns.quarantine, gate.columns.table,
        gate.columns.chunks, gate.columns.unread, ROWS, COLUMNS,
    )  # fmt: skip
