"""GEMM in Triton: resident programs, each of which takes work items until there are none.

::

    take a copy item, if the kernel makes the copies of what arrives, and copy until no piece is left     # copy_items
    for item in schedule:                        # items.next_item, shared with the CDNA kernel:
        gate.wait(item)                          # schedule.take or arrival_order.take_ready; gate.pass_gate
        acc = 0;  for step in item: acc += A[rows, step] @ B[step, columns]        # over: acc = NaN
        whole tile:      out[tile] = epilogue(acc)
        part of a tile:  slot = acc; count; the last to count: out[tile] = epilogue(sum of slots, in K order)

Load and math share one loop, which Triton pipelines; there is no item ring. Nobody waits for another worker.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.kernels.device.copy_items import copy_items
from tilestream.kernels.device.epilogue import finish
from tilestream.kernels.device.items import begin, end, next_item
from tilestream.kernels.device.queues import look_at_many
from tilestream.kernels.device.schedule import count_in
from tilestream.kernels.device.trace import end_span
from tilestream.kernels.portable.convert import to_float16

#: Arguments that say nothing about alignment: one compiled kernel serves all their values.
UNSPECIALISED = (
    "base", "reset", "queues", "batches", "num_m", "num_n", "k_steps", "full_tiles", "shares", "units", "group",
    "first", "band", "first_batch", "capacity", "stride_bias", "stride_sab", "stride_sam", "stride_sbb", "stride_sbn",
    "alpha", "beta", "row_epoch", "row_key", "row_chunks", "rows_per_chunk", "rows_per_batch", "row_tiles_per_batch",
    "column_epoch", "column_key", "column_chunks", "columns_per_chunk", "row_unread", "column_unread", "allowed", "op",
    "copiers",
)  # fmt: skip
#: Words and scales that lie anywhere: a caller's own, or slices of ours.
UNALIGNED = ("row_signals", "row_quarantine", "column_signals", "column_quarantine", "scale_a", "scale_b")


@triton.jit
def to_tf32(x):
    """Round to tf32's ten bits, halves away from zero, as cuBLAS does: the matrix units would cut the rest off."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True), x)


@triton.jit
def product(
    a, b, batch, pm, pn, k_begin, k_end, m, n, k,
    stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, IMPRECISE: tl.constexpr,
    A_KIND: tl.constexpr, B_KIND: tl.constexpr,
):  # fmt: skip
    """K steps [k_begin, k_end) of a tile, in fp32.

    Rows and columns past the end wrap around: what they give is not stored, and no mask is needed. Where an extent is
    a multiple of 16 the compiler sees that a vector never straddles the end.
    """
    rows = (pm * BLOCK_M + tl.arange(0, BLOCK_M)) % m
    cols = (pn * BLOCK_N + tl.arange(0, BLOCK_N)) % n
    step = tl.arange(0, BLOCK_K)
    depth = k_begin * BLOCK_K + step
    if WIDE:
        rows = rows.to(tl.int64)
        cols = cols.to(tl.int64)
        depth = depth.to(tl.int64)
    at_a = a + batch.to(tl.int64) * stride_ab + rows[:, None] * stride_am + depth[None, :] * stride_ak
    at_b = b + batch.to(tl.int64) * stride_bb + depth[:, None] * stride_bk + cols[None, :] * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # The loop's own barriers stand where the compiler first finds one missing. The schedule's atomics hand their
    # answers on by way of shared memory that becomes B's stages: where that is still being read, the first barrier of
    # the ring comes between A's stage and B's, and with it, in the loop, one between the reads of A and those of B
    # (gfx950, 128x256: 0.49 of the peak becomes 0.43 by the estimate). Behind a barrier here the ring begins afresh.
    tl.debug_barrier()
    for i in range(k_begin, k_end):
        if EVEN_K:
            x = tl.load(at_a)
            y = tl.load(at_b)
        else:
            rest = k - i * BLOCK_K
            x = tl.load(at_a, mask=step[None, :] < rest, other=0.0)
            y = tl.load(at_b, mask=step[:, None] < rest, other=0.0)
        if PRECISION == "tf32":
            x = to_tf32(x)
            y = to_tf32(y)
        if A_KIND != "":
            x = to_float16(x, A_KIND)
            y = to_float16(y, B_KIND)
        acc = tl.dot(x, y, acc, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE)
        at_a += BLOCK_K * stride_ak
        at_b += BLOCK_K * stride_bk
    return acc


@triton.jit
def hand_in(acc, at, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, STRIP: tl.constexpr):
    """Store a partial result at ``at``: strips ``[BLOCK_M, STRIP]``, one behind the other."""
    if WIDTH > STRIP:
        low, high = acc.reshape(BLOCK_M, 2, WIDTH // 2).permute(0, 2, 1).split()
        hand_in(low, at, BLOCK_M, WIDTH // 2, STRIP)
        hand_in(high, at + BLOCK_M * (WIDTH // 2), BLOCK_M, WIDTH // 2, STRIP)
    else:
        tl.store(at + tl.arange(0, BLOCK_M)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], acc)


@triton.jit
def add_up(at, parts, size, BLOCK_M: tl.constexpr, STRIP: tl.constexpr):
    """One strip of a tile's partial results, added in K order; past the first-level cache, which may be stale."""
    at = at + tl.arange(0, BLOCK_M)[:, None] * STRIP + tl.arange(0, STRIP)[None, :]
    acc = tl.load(at, cache_modifier=".cg")
    for _ in range(1, parts):
        at += size
        acc += tl.load(at, cache_modifier=".cg")
    return acc


@triton.jit(do_not_specialize=UNSPECIALISED, do_not_specialize_on_alignment=UNALIGNED)
def gemm(
    a, b, out, bias, residual, scale_a, scale_b, partials, counts, counters, table, probe,
    row_signals, row_quarantine, row_table, column_signals, column_quarantine, column_table, records, claims,
    queue_table, copy_source, copy_target, copy_table, copy_words,
    base: tl.int64, reset, row_epoch, row_key, column_epoch, column_key, allowed: tl.int64, op, copiers,
    row_chunks, rows_per_chunk, row_unread, rows_per_batch, row_tiles_per_batch,
    column_chunks, columns_per_chunk, column_unread,
    m, n, k, stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn, stride_ob, stride_om, stride_on,
    stride_bias, stride_rb, stride_rm, stride_rn,
    stride_sab, stride_sam, stride_sbb, stride_sbn, alpha, beta,
    batches, num_m, num_n, k_steps, full_tiles, shares, units, queues, group, first, band, first_batch, capacity,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STRIP: tl.constexpr,
    KIND: tl.constexpr, SPLIT: tl.constexpr, STEAL: tl.constexpr, ORDER: tl.constexpr, TRANSPOSED: tl.constexpr,
    EVEN_K: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, IMPRECISE: tl.constexpr,
    A_KIND: tl.constexpr, B_KIND: tl.constexpr,
    SCALED: tl.constexpr, SCALES: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, COPIES: tl.constexpr, COPY_BLOCK: tl.constexpr,
    COPY_VECTOR: tl.constexpr, PROBE: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """``out = activation(alpha * scale_a * scale_b * a @ b + bias + beta * residual)``, one resident program a worker.

    Parameters
    ----------
    a, b, out, residual
        ``[batches, m, k]``, ``[batches, k, n]``, ``[batches, m, n]``, any strides.
    scale_a, scale_b
        float32: one element each (``SCALES`` is ``"tensor"``), or one a row of A and one a column of B; None: 1.
    partials, counts
        stream_k: slots ``[BLOCK_M, BLOCK_N]`` of fp32, and a word for each, 0 before and after: a tile's count is at
        its first slot.
    counters, base, reset
        See `tilestream.kernels.device.schedule`.
    table
        Tile ids by position, where the raster is a table.
    A_KIND, B_KIND
        Dtypes of 8 bits that become float16 first: see `tilestream.kernels.portable.convert`. Else empty.
    probe, capacity
        Records a worker, and room for how many. Where ``TRACE``, a record an item: see
        `tilestream.kernels.device.trace`.
    row_signals, row_epoch, row_quarantine, row_key, row_chunks, rows_per_chunk, row_unread, row_table
        How A's rows arrive, where ``ROWS`` says that they do (``"uniform"``, ``"ragged"``): see
        `tilestream.kernels.device.gate`. The same for B's columns.
    queue_table
        Where ``SPLIT`` is ``"chunks"``, arrival order: see `tilestream.kernels.device.arrival_order`.
    copy_source, copy_target, copy_table, copy_words, copiers
        Where ``COPIES`` says that the kernel copies A's rows (``"rows"``) or B's columns (``"columns"``) itself: see
        `tilestream.kernels.device.copy_items`.
    rows_per_batch, row_tiles_per_batch
        Rows, and row tiles, from one batch to the next in what arrives; 0 where the batches share A.
    allowed
        The launch's deadline, in nanoseconds from a worker's start.
    records, claims, op
        Where the record goes, and the op's number in it: see `tilestream.runtime.channel`.
    full_tiles, shares, units
        Tiles done whole, and stream-K's remainder.
    """
    GATED: tl.constexpr = (ROWS != "none") or (COLUMNS != "none")
    worker = tl.program_id(0)
    launch = (counters, base, reset, queues, worker, tl.num_programs(0))
    problem = (batches, num_m, num_n, k_steps, full_tiles, shares, units)
    raster = (table, group, first, band, first_batch)
    row_chunking = (
        row_signals, row_epoch, row_quarantine, row_key, row_table, row_chunks, rows_per_chunk, row_unread, m
    )  # fmt: skip
    column_chunking = (
        column_signals, column_epoch, column_quarantine, column_key, column_table, column_chunks, columns_per_chunk,
        column_unread, n,
    )  # fmt: skip
    batched = (rows_per_batch, row_tiles_per_batch)
    channel = (records, claims, op, allowed)
    if COPIES != "none":
        copy_items(
            copy_source, copy_target, copy_table, copy_words, row_signals if COPIES == "rows" else column_signals,
            row_epoch if COPIES == "rows" else column_epoch, copiers, tl.num_programs(0), tl.arange(0, COPY_BLOCK),
            COPY_BLOCK, COPY_VECTOR,
        )  # fmt: skip
    at, waiting = begin(launch, row_chunking, column_chunking, channel, KIND, ROWS, COLUMNS)
    found = tl.cast(1, tl.int32)
    while found != 0:
        found, item, at, waiting = next_item(
            launch, problem, raster, row_chunking, column_chunking, batched, channel, (probe, capacity), queue_table,
            at, waiting, BLOCK_M, BLOCK_N, KIND, SPLIT, STEAL, ORDER, TRANSPOSED, ROWS, COLUMNS, PROBE, TRACE,
            look_at_many,
        )  # fmt: skip
        if found != 0:
            batch, pm, pn, k_begin, k_end, part, parts, slot, place = item
            over = waiting[0]
            if GATED:
                k_end = tl.where(over != 0, k_begin, k_end)
            if TRACE:
                complete = (parts == 1) & (over == 0)
            acc = product(
                a, b, batch, pm, pn, k_begin, k_end, m, n, k,
                stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn,
                BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, WIDE, PRECISION, IMPRECISE, A_KIND, B_KIND,
            )  # fmt: skip
            if GATED:
                acc = tl.where(over != 0, float("nan"), acc)
            if parts == 1:
                finish(
                    acc, batch, pm, pn * BLOCK_N, m, n, out, stride_ob, stride_om, stride_on, bias, stride_bias,
                    residual, stride_rb, stride_rm, stride_rn,
                    scale_a, stride_sab, stride_sam, scale_b, stride_sbb, stride_sbn, alpha, beta,
                    BLOCK_M, BLOCK_N, STRIP, WIDE, SCALED, SCALES, BIAS, RESIDUAL, ACTIVATION,
                )  # fmt: skip
            elif KIND == "stream_k":
                size: tl.constexpr = BLOCK_M * BLOCK_N
                hand_in(acc, partials + slot.to(tl.int64) * size, BLOCK_M, BLOCK_N, STRIP)
                if count_in(counts + slot - part, parts):
                    if TRACE:
                        complete = over == 0
                    # A tile's contributors are neighbouring shares, so their slots are neighbours too, in K order.
                    first_slot = partials + (slot - part).to(tl.int64) * size
                    for strip in range(BLOCK_N // STRIP):
                        finish(
                            add_up(first_slot + strip * BLOCK_M * STRIP, parts, size, BLOCK_M, STRIP),
                            batch, pm, pn * BLOCK_N + strip * STRIP, m, n, out, stride_ob, stride_om, stride_on,
                            bias, stride_bias, residual, stride_rb, stride_rm, stride_rn,
                            scale_a, stride_sab, stride_sam, scale_b, stride_sbb, stride_sbn, alpha, beta,
                            BLOCK_M, STRIP, STRIP, WIDE, SCALED, SCALES, BIAS, RESIDUAL, ACTIVATION,
                        )  # fmt: skip
            if TRACE:
                tl.debug_barrier()  # all threads' stores
                end_span(probe, place, 0, complete)
    end(launch, problem, row_chunking, column_chunking, batched, channel, waiting, KIND, ROWS, COLUMNS)
