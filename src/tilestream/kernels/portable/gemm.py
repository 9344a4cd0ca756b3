"""GEMM in Triton: resident programs, each of which takes work items until there are none.

::

    take a copy item, if the kernel makes the copies of what arrives, and copy until no piece is left     # copy_items
    for item in schedule:                        # items.next_item, shared with the CDNA kernel:
        gate.wait(item)                          # schedule.take or arrival_order.take_ready; gate.pass_gate
        acc = 0;  for step in item: acc += A[rows, step] @ B[step, columns]        # over: acc = NaN
        whole tile:      out[tile] = epilogue(acc)
        part of a tile:  slot = acc; count; the last to count: out[tile] = epilogue(sum of slots, in K order)

Load and math share one loop, which Triton pipelines; there is no item ring. No worker waits for another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.core.copy_items import CopyArguments
from tilestream.core.operands import SCALE_BLOCK as BLOCK
from tilestream.core.structs import Epilogue, Gate, Incoming, Matrix, Progress, Vector, Words, Work
from tilestream.kernels.device.copy_items import copy_items
from tilestream.kernels.device.items import begin_worker, finish_worker, next_item, with_steps
from tilestream.kernels.device.jit import entry
from tilestream.kernels.device.queues import pick_victim_of_block
from tilestream.kernels.device.schedule import add, count_in
from tilestream.kernels.device.trace import end_span
from tilestream.kernels.portable.convert import to_float16
from tilestream.kernels.portable.epilogue import reduce_partials, store_partial, store_tile

SCALE_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def to_tf32(x):
    """Round to tf32's ten bits, halves away from zero, as cuBLAS does: the matrix units would cut the rest off."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True), x)


@triton.jit
def columns_of(item, n, C: tl.constexpr):
    """The columns of b that a tile multiplies.

    Of two halves of ``n`` columns each: the gates' first, and then as many of the other half.
    """
    j = tl.arange(0, C.BLOCK_N)
    if C.TWO_HALVES:
        HALF: tl.constexpr = C.BLOCK_N // 2
        cols = (item.pn * HALF + j % HALF) % n + j // HALF * n
    else:
        cols = (item.pn * C.BLOCK_N + j) % n
    return cols


@triton.jit
def in_vectors(x, ALONG_ROWS: tl.constexpr, VECTOR: tl.constexpr):
    """The `Matrix` ``x``, with its strides written as multiples of ``VECTOR`` for the compiler, except the one of 1."""
    batch = x.batch // VECTOR * VECTOR
    if ALONG_ROWS:
        return Matrix(x.at, batch, x.row, x.column // VECTOR * VECTOR)
    else:
        return Matrix(x.at, batch, x.row // VECTOR * VECTOR, x.column)


@triton.jit
def as_they_lie(a, b, m, n, k, C: tl.constexpr):
    """``(a, b, m, n, k of a, k of b)``: operands and extents, written as multiples of the operands' vectors."""
    A_VECTOR: tl.constexpr = C.VECTORS[0]
    B_VECTOR: tl.constexpr = C.VECTORS[1]
    A_ALONG_K: tl.constexpr = C.K_MAJOR[0]
    B_ALONG_K: tl.constexpr = C.K_MAJOR[1]
    k_of_a, k_of_b = k, k
    if A_VECTOR > 1:
        a = in_vectors(a, not A_ALONG_K, A_VECTOR)
        if A_ALONG_K:
            k_of_a = k // A_VECTOR * A_VECTOR
        else:
            m = m // A_VECTOR * A_VECTOR
    if B_VECTOR > 1:
        b = in_vectors(b, B_ALONG_K, B_VECTOR)
        if B_ALONG_K:
            k_of_b = k // B_VECTOR * B_VECTOR
        else:
            n = n // B_VECTOR * B_VECTOR
    return a, b, m, n, k_of_a, k_of_b


@triton.jit
def product(a, b, item, m, n, k, scales, C: tl.constexpr):
    """The item's K steps of its tile: float32 ``[BLOCK_M, BLOCK_N]``.

    ``a`` and ``b`` are `Matrix`: ``[m, k]`` and ``[k, n]`` a batch. Rows and columns past the end wrap around: their
    products are not stored, and no mask is needed. Where an extent is a multiple of 16 the compiler sees that a vector
    never straddles the end. ``scales``: of blocks, a's and b's `Matrix`; else None.
    """
    A_KIND: tl.constexpr = C.A_KIND
    B_KIND: tl.constexpr = C.B_KIND
    a, b, m, n, k_of_a, k_of_b = as_they_lie(a, b, m, n, k, C)
    rows = (item.pm * C.BLOCK_M + tl.arange(0, C.BLOCK_M)) % m
    cols = columns_of(item, n, C)
    step = tl.arange(0, C.BLOCK_K)
    depth = item.k_begin * C.BLOCK_K + step
    if C.OFFSETS_64BIT:
        rows = rows.to(tl.int64)
        cols = cols.to(tl.int64)
        depth = depth.to(tl.int64)
    at_a = a.at + item.batch.to(tl.int64) * a.batch + rows[:, None] * a.row + depth[None, :] * a.column
    at_b = b.at + item.batch.to(tl.int64) * b.batch + depth[:, None] * b.row + cols[None, :] * b.column
    TILE: tl.constexpr = (C.BLOCK_M, C.BLOCK_N)
    acc = tl.zeros(TILE, tl.float32)
    # The loop's own barriers stand where the compiler first finds one missing. The schedule's atomics hand their
    # answers on by way of shared memory that becomes B's stages: where that is still being read, the first barrier of
    # the ring comes between A's stage and B's, and with it, in the loop, one between the reads of A and those of B
    # (gfx950, 128x256: 0.49 of the peak becomes 0.43 by the estimate). Behind a barrier here the ring begins afresh.
    tl.debug_barrier()
    for i in range(item.k_begin, item.k_end):
        if C.EVEN_K:
            x = tl.load(at_a)
            y = tl.load(at_b)
        else:
            passed = i * C.BLOCK_K
            x = tl.load(at_a, mask=step[None, :] < k_of_a - passed, other=0.0)
            y = tl.load(at_b, mask=step[:, None] < k_of_b - passed, other=0.0)
        if C.PRECISION == "tf32":
            x = to_tf32(x)
            y = to_tf32(y)
        if C.A_KIND != "":
            x = to_float16(x, A_KIND)
            y = to_float16(y, B_KIND)
        if C.SCALES == "block":
            part = tl.dot(x, y, input_precision=C.PRECISION, max_num_imprecise_acc=C.IMPRECISE)
            acc += part * block_factor(scales, item, rows, cols, i, C)
        elif C.PROMOTED:  # with IMPRECISE, which keeps the compiler from making one sum of it again
            acc += tl.dot(x, y, input_precision=C.PRECISION, max_num_imprecise_acc=C.IMPRECISE)
        else:
            acc = tl.dot(x, y, acc, input_precision=C.PRECISION, max_num_imprecise_acc=C.IMPRECISE)
        at_a += C.BLOCK_K * a.column
        at_b += C.BLOCK_K * b.row
    return acc


@triton.jit
def block_factor(scales, item, rows, cols, step, C: tl.constexpr):
    """The scale of each product of a K step, which lies in one block of K."""
    SIZE: tl.constexpr = SCALE_BLOCK
    of_rows, of_columns = scales
    block = tl.cast(step // (SIZE // C.BLOCK_K), tl.int64)
    factor = tl.load(of_rows.at + rows.to(tl.int64) * of_rows.row + block * of_rows.column)
    at = of_columns.at + item.batch.to(tl.int64) * of_columns.batch + block * of_columns.row
    if C.TWO_HALVES or C.BLOCK_N > SIZE:
        factor = factor[:, None] * tl.load(at + (cols // SIZE) * of_columns.column)[None, :]
    else:  # the tile's columns are of one block
        factor = (factor * tl.load(at + (item.pn * C.BLOCK_N // SIZE) * of_columns.column))[:, None]
    return factor


@triton.jit
def no_steps(item, over):
    """``(item, over)``: a void item has no K steps."""
    return with_steps(item, item.k_begin, tl.where(over != 0, item.k_begin, item.k_end)), over


@triton.jit
def fixup(acc, words, item, e, C: tl.constexpr):
    """Store a part of a tile, count it, and if it was the last to be counted finish the tile; whether it was."""
    size: tl.constexpr = C.BLOCK_M * C.BLOCK_N
    store_partial(acc, words.partials + item.slot.to(tl.int64) * size, C.BLOCK_M, C.BLOCK_N, C.STRIP)
    last = count_in(words.counts + item.slot - item.part, item.parts)
    if last:
        # A tile's contributors are neighbouring shares, so their slots are neighbours too, in K order.
        first_slot = words.partials + (item.slot - item.part).to(tl.int64) * size
        for strip in range(C.BLOCK_N // C.STRIP):
            store_tile(
                reduce_partials(first_slot + strip * C.BLOCK_M * C.STRIP, item.parts, size, C.BLOCK_M, C.STRIP),
                e, item.batch, item.pm * C.BLOCK_M, item.pn * C.BLOCK_N + strip * C.STRIP, C.STRIP, C,
            )  # fmt: skip
    return last


@entry(
    triton.jit,
    specialised=(
        "m", "n", "k", "stride_ab", "stride_am", "stride_ak", "stride_bb", "stride_bk", "stride_bn", "stride_ob",
        "stride_or", "stride_oc", "stride_rb", "stride_rr", "stride_rc",
    ),
    unaligned=("row_scale", "column_scale"),
)  # fmt: skip
def gemm(
    a, b, out, bias, residual, row_scale, column_scale, partials, counts, counters, table, log,
    row_signals, row_quarantine, row_table, column_signals, column_quarantine, column_table, records, claims,
    queue_table, copy_source, copy_target, copy_table, copy_words,
    base: tl.int64, reset, row_epoch, row_key, column_epoch, column_key, allowed: tl.int64, op, copiers,
    row_chunks, rows_per_chunk, row_unread, rows_per_batch, row_tiles_per_batch,
    column_chunks, columns_per_chunk, column_unread,
    m, n, k, stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn, stride_ob, stride_or, stride_oc,
    stride_bias, stride_rb, stride_rr, stride_rc, stride_sb, stride_sr, stride_tb, stride_tc, alpha, beta,
    batches, num_m, num_n, k_steps, full_tiles, shares, units, queues, group, first, band, first_batch, capacity,
    C: tl.constexpr,
):  # fmt: skip
    """``out = activation(alpha * row_scale * column_scale * a @ b + bias + beta * residual)``, one program a worker.

    Parameters
    ----------
    a, b, out, residual
        ``[batches, m, k]``, ``[batches, k, n]``, ``[batches, m, n]``, any strides.
    C
        A `tilestream.kernels.config.PortableConfig`.

    The others are fields of `tilestream.core.structs`, as they are grouped here.
    """
    worker, workers = tl.program_id(0), tl.num_programs(0)
    work = Work(
        batches, num_m, num_n, k_steps, full_tiles, shares, units, queues, table, group, first, band, first_batch
    )  # fmt: skip
    words = Words(counters, base, reset, log, capacity, partials, counts)
    rows = Incoming(
        row_signals, row_quarantine, row_table, row_epoch, row_key, row_chunks, rows_per_chunk, row_unread, m
    )  # fmt: skip
    columns = Incoming(
        column_signals, column_quarantine, column_table, column_epoch, column_key, column_chunks, columns_per_chunk,
        column_unread, n,
    )  # fmt: skip
    gate = Gate(rows, columns, queue_table, rows_per_batch, row_tiles_per_batch, records, claims, op, allowed)
    x, y = Matrix(a, stride_ab, stride_am, stride_ak), Matrix(b, stride_bb, stride_bk, stride_bn)
    epilogue = Epilogue(
        Matrix(out, stride_ob, stride_or, stride_oc), Matrix(residual, stride_rb, stride_rr, stride_rc),
        Vector(bias, 0, stride_bias), Vector(row_scale, stride_sb, stride_sr),
        Vector(column_scale, stride_tb, stride_tc),
        alpha, beta, m, n, None, None,
    )  # fmt: skip
    if C.COPIES != "none":
        copies = CopyArguments(copy_source, copy_target, copy_table, copy_words, copiers)
        copy_items(
            copies, rows if C.COPIES == "rows" else columns, workers, tl.arange(0, C.COPY_BLOCK), C.COPY_BLOCK,
            C.COPY_VECTOR,
        )  # fmt: skip
    progress, watch = begin_worker(worker, workers, work, words, gate, C)
    cursor, ready, passed = progress
    found = tl.cast(1, tl.int32)
    while found != 0:
        found, item, progress = next_item(
            Progress(cursor, ready, passed), work, words, gate, watch, C, add, pick_victim_of_block, no_steps
        )  # fmt: skip
        cursor, ready, passed = progress
        if found != 0:
            over = passed.over
            acc = product(x, y, item, m, n, k, None, C)
            if C.GATED:
                acc = tl.where(over != 0, float("nan"), acc)
            complete = item.parts == 1
            if complete:
                store_tile(acc, epilogue, item.batch, item.pm * C.BLOCK_M, item.pn * C.BLOCK_N, C.BLOCK_N, C)
            elif C.KIND == "stream_k":
                complete = fixup(acc, words, item, epilogue, C)
            if C.TRACE:
                tl.debug_barrier()  # all threads' stores
                end_span(words.log, item.place, 0, complete & (over == 0))
    finish_worker(passed, work, words, gate, watch, C)
