"""The CDNA GEMM: persistent, in Gluon, for gfx942 and gfx950. Compiled and checked, not run: nobody here has one.

::

    for item in schedule:                        # items.next_item, shared with the portable kernel:
        gate.wait(item)                          # schedule.take; gate.pass_gate, no code where nothing arrives
        for step in item: load into the ring, multiply     # one loop: see kernels/cdna/ring.py
        whole tile:      out[tile] = epilogue(acc)
        part of a tile:  slot = acc; count; the last to count: out[tile] = epilogue(sum of slots, in K order)

``x`` ``[rows, K]`` and ``y`` ``[columns, K]`` are A and B^T; each lies K-major or the other way round, with its
contiguous elements in aligned vectors of 16 bytes. A step that is not a whole one, at the end of K, goes through
registers, where it is cut off.

What `tilestream isa` estimates of the main loop, by published rates, in bfloat16: 0.73 of the peak with tiles of
256x256 on gfx942 (staged), 0.59 on gfx950 (direct).

``DIRECT``: copies past the registers, ``STAGES`` of them in the ring; else through registers, and one stage.
``FAR_X``, ``FAR_Y``: a tile's rows lie too far apart for a buffer's 32-bit offsets.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestream.core import queues as queues_
from tilestream.kernels.cdna.compat import barrier, device, in_order, multiply_add, uniform
from tilestream.kernels.cdna.epilogue import add_up, count_in, finish, hand_in, math_layout
from tilestream.kernels.cdna.ring import (
    CELL,
    after,
    before,
    copy,
    copy_offsets,
    cut_off,
    fetch,
    fetch_offsets,
    fetched,
    in_words,
    landed,
    make_stages,
    operand,
    put,
)
from tilestream.kernels.device.items import begin, end, next_item

neighbour = device(queues_.neighbour)

#: Arguments that say nothing about alignment: one compiled kernel serves all their values.
UNSPECIALISED = (
    "base", "reset", "queues", "batches", "num_m", "num_n", "k_steps", "full_tiles", "shares", "units", "group",
    "first", "band", "first_batch", "capacity", "rows", "columns", "k", "stride_ob", "stride_or", "stride_bias",
    "stride_rb", "stride_rr", "stride_sb", "stride_sr", "stride_tb", "stride_tc", "alpha", "beta",
    "row_epoch", "row_key", "row_chunks", "rows_per_chunk", "rows_per_batch", "row_tiles_per_batch",
    "column_epoch", "column_key", "column_chunks", "columns_per_chunk", "row_unread", "column_unread", "allowed", "op",
)  # fmt: skip
#: Words and scales that lie anywhere: a caller's own, or slices of ours.
UNALIGNED = ("row_signals", "row_quarantine", "column_signals", "column_quarantine", "row_scale", "column_scale")


@gluon.jit
def read(
    x_stage, y_stage, ROWS: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_K: gl.constexpr, X_K_MAJOR: gl.constexpr,
    Y_K_MAJOR: gl.constexpr, X_HOW: gl.constexpr, Y_HOW: gl.constexpr, MATH: gl.constexpr, WIDTH: gl.constexpr,
    LANDED: gl.constexpr,
):  # fmt: skip
    """A step's operands, from its stage."""
    x = operand(x_stage, ROWS, BLOCK_K, X_K_MAJOR, X_HOW, 0, MATH, WIDTH, LANDED)
    y = operand(y_stage, COLUMNS, BLOCK_K, Y_K_MAJOR, Y_HOW, 1, MATH, WIDTH, LANDED)
    return x, y


@gluon.jit
def multiply_direct(
    acc, x, y, last_x, last_y, x_stride, y_stride, x_step, y_step, k_begin, k_end, most, x_stages, y_stages,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, LANE: gl.constexpr,
    X_K_MAJOR: gl.constexpr, Y_K_MAJOR: gl.constexpr, X_HOW: gl.constexpr, Y_HOW: gl.constexpr, WIDTH: gl.constexpr,
    WARPS: gl.constexpr, FORMATS: gl.constexpr,
):  # fmt: skip
    """Whole K steps [k_begin, k_end), of which ``most`` is the last that there is, by copies past the registers."""
    MATH: gl.constexpr = acc.type.layout
    AHEAD: gl.constexpr = STAGES - 1
    x_offsets = copy_offsets(last_x, x_stride, ROWS, BLOCK_K, X_K_MAJOR, X_HOW, LANE, WARPS)
    y_offsets = copy_offsets(last_y, y_stride, COLUMNS, BLOCK_K, Y_K_MAJOR, Y_HOW, LANE, WARPS)
    # Each round commits as many groups, whatever the item: what waits count must not depend on it.
    for i in gl.static_range(AHEAD):
        step = gl.minimum(k_begin + i, most)
        copy(x + step * x_step, x_offsets, x_stages, y + step * y_step, y_offsets, y_stages, i)
    stage = tl.cast(0, tl.int32)
    for step in range(k_begin, k_end - AHEAD):
        landed(AHEAD - 1)
        a, b = read(
            x_stages.index(stage), y_stages.index(stage), ROWS, COLUMNS, BLOCK_K, X_K_MAJOR, Y_K_MAJOR, X_HOW, Y_HOW,
            MATH, WIDTH, True,
        )  # fmt: skip
        ahead = step + AHEAD
        copy(x + ahead * x_step, x_offsets, x_stages, y + ahead * y_step, y_offsets, y_stages, before(stage, STAGES))
        acc = multiply_add(a, b, acc, FORMATS)
        stage = after(stage, STAGES)
    # The last ones: nothing is left to copy.
    for i in gl.static_range(AHEAD):
        landed(AHEAD - 1 - i)
        if gl.maximum(k_begin, k_end - AHEAD) + i < k_end:
            a, b = read(
                x_stages.index(stage), y_stages.index(stage), ROWS, COLUMNS, BLOCK_K, X_K_MAJOR, Y_K_MAJOR, X_HOW,
                Y_HOW, MATH, WIDTH, True,
            )  # fmt: skip
            acc = multiply_add(a, b, acc, FORMATS)
        stage = after(stage, STAGES)
    # What comes next, the rest of K or the next item's copies, goes to stages that others may still be reading.
    barrier()
    return acc


@gluon.jit
def multiply_staged(
    acc, x, y, last_x, last_y, x_stride, y_stride, x_step, y_step, k_begin, k_end, most, x_stages, y_stages,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_K: gl.constexpr,
    X_K_MAJOR: gl.constexpr, Y_K_MAJOR: gl.constexpr, X_TURNED: gl.constexpr, Y_TURNED: gl.constexpr,
    X_HOW: gl.constexpr, Y_HOW: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr, FAR_X: gl.constexpr,
    FAR_Y: gl.constexpr, FORMATS: gl.constexpr,
):  # fmt: skip
    """The same, by way of registers: a step is fetched while the one before it is multiplied."""
    MATH: gl.constexpr = acc.type.layout
    VECTOR: gl.constexpr = CELL // x.dtype.element_ty.primitive_bitwidth
    X_WORDS: gl.constexpr = in_words(x.dtype.element_ty, X_TURNED)
    Y_WORDS: gl.constexpr = in_words(y.dtype.element_ty, Y_TURNED)
    x_offsets = fetch_offsets(
        last_x, BLOCK_K - 1, x_stride, ROWS, BLOCK_K, X_K_MAJOR, X_TURNED, VECTOR, WARPS, FAR_X, X_WORDS
    )
    y_offsets = fetch_offsets(
        last_y, BLOCK_K - 1, y_stride, COLUMNS, BLOCK_K, Y_K_MAJOR, Y_TURNED, VECTOR, WARPS, FAR_Y, Y_WORDS
    )
    first = gl.minimum(k_begin, most)
    x_tile = fetch(x + first * x_step, x_offsets, FAR_X, X_WORDS)
    in_order()
    y_tile = fetch(y + first * y_step, y_offsets, FAR_Y, Y_WORDS)
    in_order()
    for step in range(k_begin, k_end):
        ahead = gl.minimum(step + 1, most)
        a = fetched(x_tile, x.dtype.element_ty, ROWS, BLOCK_K, X_K_MAJOR, X_TURNED, VECTOR, WARPS)
        put(a, x_stages.index(0), ROWS, BLOCK_K, X_TURNED, X_K_MAJOR, X_HOW)
        x_tile = fetch(x + ahead * x_step, x_offsets, FAR_X, X_WORDS)
        in_order()
        b = fetched(y_tile, y.dtype.element_ty, COLUMNS, BLOCK_K, Y_K_MAJOR, Y_TURNED, VECTOR, WARPS)
        put(b, y_stages.index(0), COLUMNS, BLOCK_K, Y_TURNED, Y_K_MAJOR, Y_HOW)
        y_tile = fetch(y + ahead * y_step, y_offsets, FAR_Y, Y_WORDS)
        a, b = read(
            x_stages.index(0), y_stages.index(0), ROWS, COLUMNS, BLOCK_K, X_K_MAJOR or X_TURNED, Y_K_MAJOR or Y_TURNED,
            X_HOW, Y_HOW, MATH, WIDTH, False,
        )  # fmt: skip
        acc = multiply_add(a, b, acc, FORMATS)
    return acc


@gluon.jit
def multiply_rest(
    acc, x, y, last_x, last_y, x_stride, y_stride, rest, x_stages, y_stages,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_K: gl.constexpr,
    X_K_MAJOR: gl.constexpr, Y_K_MAJOR: gl.constexpr, X_TURNED: gl.constexpr, Y_TURNED: gl.constexpr,
    X_HOW: gl.constexpr, Y_HOW: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr, FAR_X: gl.constexpr,
    FAR_Y: gl.constexpr, FORMATS: gl.constexpr,
):  # fmt: skip
    """The ``rest`` of K that is less than a step: fetched, cut off, and multiplied as a whole one."""
    MATH: gl.constexpr = acc.type.layout
    VECTOR: gl.constexpr = CELL // x.dtype.element_ty.primitive_bitwidth
    X_WORDS: gl.constexpr = in_words(x.dtype.element_ty, X_TURNED)
    Y_WORDS: gl.constexpr = in_words(y.dtype.element_ty, Y_TURNED)
    x_offsets = fetch_offsets(
        last_x, rest - 1, x_stride, ROWS, BLOCK_K, X_K_MAJOR, X_TURNED, VECTOR, WARPS, FAR_X, X_WORDS
    )
    y_offsets = fetch_offsets(
        last_y, rest - 1, y_stride, COLUMNS, BLOCK_K, Y_K_MAJOR, Y_TURNED, VECTOR, WARPS, FAR_Y, Y_WORDS
    )
    x_tile = fetch(x, x_offsets, FAR_X, X_WORDS)
    y_tile = fetch(y, y_offsets, FAR_Y, Y_WORDS)
    x_tile = fetched(x_tile, x.dtype.element_ty, ROWS, BLOCK_K, X_K_MAJOR, X_TURNED, VECTOR, WARPS)
    y_tile = fetched(y_tile, y.dtype.element_ty, COLUMNS, BLOCK_K, Y_K_MAJOR, Y_TURNED, VECTOR, WARPS)
    x_tile = cut_off(x_tile, rest, ROWS, BLOCK_K, X_K_MAJOR, X_TURNED, VECTOR, WARPS)
    y_tile = cut_off(y_tile, rest, COLUMNS, BLOCK_K, Y_K_MAJOR, Y_TURNED, VECTOR, WARPS)
    put(x_tile, x_stages.index(0), ROWS, BLOCK_K, X_TURNED, X_K_MAJOR, X_HOW)
    put(y_tile, y_stages.index(0), COLUMNS, BLOCK_K, Y_TURNED, Y_K_MAJOR, Y_HOW)
    a, b = read(
        x_stages.index(0), y_stages.index(0), ROWS, COLUMNS, BLOCK_K, X_K_MAJOR or X_TURNED, Y_K_MAJOR or Y_TURNED,
        X_HOW, Y_HOW, MATH, WIDTH, False,
    )  # fmt: skip
    return multiply_add(a, b, acc, FORMATS)


@gluon.jit
def multiply(
    x, y, last_x, last_y, x_stride, y_stride, k_begin, k_end, k,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, DIRECT: gl.constexpr,
    LANE: gl.constexpr, X_K_MAJOR: gl.constexpr, Y_K_MAJOR: gl.constexpr, X_TURNED: gl.constexpr,
    Y_TURNED: gl.constexpr, X_HOW: gl.constexpr, Y_HOW: gl.constexpr, MATH: gl.constexpr, WIDTH: gl.constexpr,
    WARPS: gl.constexpr, EVEN_K: gl.constexpr, FAR_X: gl.constexpr, FAR_Y: gl.constexpr,
    FORMATS: gl.constexpr,
):  # fmt: skip
    """K steps [k_begin, k_end) of a tile, in fp32.

    ``x`` and ``y`` are at the tile's first row and column, of which ``last_x`` and ``last_y`` more are there;
    ``x_stride`` is the stride that is not 1. The stages are an item's own: between items their room is others'.
    """
    HERE: gl.constexpr = STAGES if DIRECT else 1
    x_stages = make_stages(x.dtype.element_ty, HERE, ROWS, BLOCK_K, X_K_MAJOR or X_TURNED)
    y_stages = make_stages(y.dtype.element_ty, HERE, COLUMNS, BLOCK_K, Y_K_MAJOR or Y_TURNED)
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, MATH)
    x_step = tl.cast(BLOCK_K, tl.int64)
    y_step = tl.cast(BLOCK_K, tl.int64)
    if not X_K_MAJOR:
        x_step = x_step * x_stride
    if not Y_K_MAJOR:
        y_step = y_step * y_stride
    whole = gl.minimum(k_end, k // BLOCK_K)
    most = k // BLOCK_K - 1
    if DIRECT:
        acc = multiply_direct(
            acc, x, y, last_x, last_y, x_stride, y_stride, x_step, y_step, k_begin, whole, most, x_stages, y_stages,
            ROWS, COLUMNS, BLOCK_K, STAGES, LANE, X_K_MAJOR, Y_K_MAJOR, X_HOW, Y_HOW, WIDTH, WARPS, FORMATS,
        )  # fmt: skip
    else:
        acc = multiply_staged(
            acc, x, y, last_x, last_y, x_stride, y_stride, x_step, y_step, k_begin, whole, most, x_stages, y_stages,
            ROWS, COLUMNS, BLOCK_K, X_K_MAJOR, Y_K_MAJOR, X_TURNED, Y_TURNED, X_HOW, Y_HOW, WIDTH, WARPS, FAR_X, FAR_Y,
            FORMATS,
        )  # fmt: skip
    if not EVEN_K:
        if whole < k_end:
            acc = multiply_rest(
                acc, x + whole * x_step, y + whole * y_step, last_x, last_y, x_stride, y_stride, k - whole * BLOCK_K,
                x_stages, y_stages, ROWS, COLUMNS, BLOCK_K, X_K_MAJOR, Y_K_MAJOR, X_TURNED, Y_TURNED, X_HOW, Y_HOW,
                WIDTH, WARPS, FAR_X, FAR_Y, FORMATS,
            )  # fmt: skip
            if DIRECT:
                barrier()
    return acc


@gluon.jit
def first_row(at, batch, batch_stride, row, stride, K_MAJOR: gl.constexpr):
    """Where a tile's rows of an operand begin."""
    at = at + batch.to(gl.int64) * batch_stride
    if K_MAJOR:
        at = at + row.to(gl.int64) * stride
    else:
        at = at + row
    return gl.multiple_of(at, 16)


@gluon.jit(do_not_specialize=UNSPECIALISED, do_not_specialize_on_alignment=UNALIGNED)
def gemm(
    x, y, out, bias, residual, row_scale, column_scale, partials, counts, counters, table, probe,
    row_signals, row_quarantine, row_table, column_signals, column_quarantine, column_table, records, claims,
    base: tl.int64, reset, row_epoch, row_key, column_epoch, column_key, allowed: tl.int64, op,
    row_chunks, rows_per_chunk, row_unread, rows_per_batch, row_tiles_per_batch,
    column_chunks, columns_per_chunk, column_unread,
    rows, columns, k, stride_xb, stride_x, stride_yb, stride_y, stride_ob, stride_or, stride_oc,
    stride_bias, stride_rb, stride_rr, stride_rc, stride_sb, stride_sr, stride_tb, stride_tc, alpha, beta,
    batches, num_m, num_n, k_steps, full_tiles, shares, units, queues, group, first, band, first_batch, capacity,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, STRIP: gl.constexpr,
    TALL: gl.constexpr,
    DIRECT: gl.constexpr, LANE: gl.constexpr, X_K_MAJOR: gl.constexpr, Y_K_MAJOR: gl.constexpr,
    X_TURNED: gl.constexpr, Y_TURNED: gl.constexpr, X_HOW: gl.constexpr, Y_HOW: gl.constexpr,
    VERSION: gl.constexpr, SHAPE: gl.constexpr, ACROSS: gl.constexpr, WIDTH: gl.constexpr, FORMATS: gl.constexpr,
    GROUPS: gl.constexpr,
    KIND: gl.constexpr, SPLIT: gl.constexpr, STEAL: gl.constexpr, ORDER: gl.constexpr, TRANSPOSED: gl.constexpr,
    EVEN_K: gl.constexpr, FAR_X: gl.constexpr, FAR_Y: gl.constexpr, FAR_OUT: gl.constexpr, GRAIN: gl.constexpr,
    RESIDUAL_GRAIN: gl.constexpr, SCALED: gl.constexpr, SCALES: gl.constexpr, BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr, ACTIVATION: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, PROBE: gl.constexpr,
):  # fmt: skip
    """``out = activation(alpha * row_scale * column_scale * x @ y^T + bias + beta * residual)``, a workgroup a worker.

    Parameters
    ----------
    x, y, out, residual
        ``[batches, rows, K]``, ``[batches, columns, K]``, ``[batches, rows, columns]``. ``stride_x`` and ``stride_y``
        are the strides that are not 1.
    FORMATS
        A's and B's, of 8 bits on gfx950; else None.
    GROUPS
        XCDs: neighbouring program ids are on different ones.
    ACROSS
        Warps down a tile's rows, and across its columns.

    The others are those of `tilestream.kernels.portable.gemm.gemm`.
    """
    WARPS: gl.constexpr = ACROSS[0] * ACROSS[1]
    MATH: gl.constexpr = math_layout(VERSION, SHAPE, ACROSS)
    worker = gl.program_id(0)
    workers = gl.num_programs(0)
    if KIND == "static":
        worker = neighbour(worker, workers, GROUPS)
    launch = (counters, base, reset, queues, worker, workers)
    problem = (batches, num_m, num_n, k_steps, full_tiles, shares, units)
    raster = (table, group, first, band, first_batch)
    row_chunking = (
        row_signals, row_epoch, row_quarantine, row_key, row_table, row_chunks, rows_per_chunk, row_unread, rows
    )  # fmt: skip
    column_chunking = (
        column_signals, column_epoch, column_quarantine, column_key, column_table, column_chunks, columns_per_chunk,
        column_unread, columns,
    )  # fmt: skip
    batched = (rows_per_batch, row_tiles_per_batch)
    channel = (records, claims, op, allowed)
    at, waiting = begin(launch, row_chunking, column_chunking, channel, KIND, ROWS, COLUMNS)
    found = tl.cast(1, tl.int32)
    while found != 0:
        found, item, at, waiting = next_item(
            launch, problem, raster, row_chunking, column_chunking, batched, channel, (probe, capacity), None,
            at, waiting, BLOCK_M, BLOCK_N, KIND, SPLIT, STEAL, ORDER, TRANSPOSED, ROWS, COLUMNS, PROBE, False,
        )  # fmt: skip
        if found != 0:
            batch, pm, pn, k_begin, k_end, part, parts, slot, _ = item
            over = waiting[0]
            batch = uniform(batch)
            k_begin = uniform(k_begin)
            k_end = uniform(k_end)
            part = uniform(part)
            parts = uniform(parts)
            slot = uniform(slot)
            row = uniform(pm) * BLOCK_M
            column = uniform(pn) * BLOCK_N
            acc = gl.full([BLOCK_M, BLOCK_N], float("nan"), gl.float32, MATH)
            if over == 0:
                acc = multiply(
                    first_row(x, batch, stride_xb, row, stride_x, X_K_MAJOR),
                    first_row(y, batch, stride_yb, column, stride_y, Y_K_MAJOR),
                    rows - 1 - row, columns - 1 - column, stride_x, stride_y, k_begin, k_end, k,
                    BLOCK_M, BLOCK_N, BLOCK_K, STAGES, DIRECT, LANE, X_K_MAJOR, Y_K_MAJOR, X_TURNED, Y_TURNED,
                    X_HOW, Y_HOW, MATH, WIDTH, WARPS, EVEN_K, FAR_X, FAR_Y, FORMATS,
                )  # fmt: skip
            if parts == 1:
                finish(
                    acc, batch, row, column, rows, columns, out, stride_ob, stride_or, stride_oc, bias, stride_bias,
                    residual, stride_rb, stride_rr, stride_rc, row_scale, stride_sb, stride_sr, column_scale,
                    stride_tb, stride_tc, alpha, beta,
                    BLOCK_M, BLOCK_N, STRIP, TALL, MATH, FAR_OUT, GRAIN, RESIDUAL_GRAIN, SCALED, SCALES, BIAS, RESIDUAL,
                    ACTIVATION,
                )  # fmt: skip
            elif KIND == "stream_k":
                SIZE: gl.constexpr = BLOCK_M * BLOCK_N
                hand_in(acc, partials + slot.to(gl.int64) * SIZE, BLOCK_M, BLOCK_N, STRIP, MATH)
                if count_in(counts + slot - part, parts):
                    # A tile's contributors are neighbouring shares, so their slots are neighbours too, in K order.
                    first_slot = partials + (slot - part).to(gl.int64) * SIZE
                    for strip in range(BLOCK_N // STRIP):
                        finish(
                            add_up(first_slot + strip * BLOCK_M * STRIP, parts, SIZE, BLOCK_M, STRIP, MATH),
                            batch, row, column + strip * STRIP, rows, columns, out, stride_ob, stride_or, stride_oc,
                            bias, stride_bias, residual, stride_rb, stride_rr, stride_rc, row_scale, stride_sb,
                            stride_sr, column_scale, stride_tb, stride_tc, alpha, beta,
                            BLOCK_M, STRIP, STRIP, TALL, MATH, FAR_OUT, GRAIN, RESIDUAL_GRAIN, SCALED, SCALES, BIAS,
                            RESIDUAL, ACTIVATION,
                        )  # fmt: skip
    end(launch, problem, row_chunking, column_chunking, batched, channel, waiting, KIND, ROWS, COLUMNS)
