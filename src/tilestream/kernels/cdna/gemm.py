"""The persistent CDNA GEMM in Gluon, for gfx942 and gfx950. Run on an emulator, not on a GPU.

::

    for item in schedule:                        # items.next_item, shared with the portable kernel:
        gate.wait(item)                          # schedule.take; gate.pass_gate, no code where nothing arrives
        for step in item: load into the ring, multiply     # one loop: see kernels/cdna/ring.py
        whole tile:      out[tile] = epilogue(acc)
        part of a tile:  slot = acc; count; the last to count: out[tile] = epilogue(sum of slots, in K order)

``x`` ``[rows, K]`` and ``y`` ``[columns, K]`` are A and B^T. Either of their dimensions is contiguous, in aligned
vectors of 16 bytes. A partial step at the end of K goes through registers, where its rest is set to zero.

`tilestream isa` estimates the main loop, by published rates in bfloat16, at 0.73 of the peak with tiles of 256x256 on
gfx942 (staged), and 0.59 on gfx950 (direct).

``DIRECT``: copies bypass the registers, with ``STAGES`` stages in the ring. Otherwise they go through registers, with
one stage.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestream.core import queues as queues_
from tilestream.core.structs import Epilogue, Gate, Incoming, Matrix, Progress, Strided, Vector, Words, Work
from tilestream.kernels.cdna.compat import barrier, device, in_order, multiply_add, uniform
from tilestream.kernels.cdna.epilogue import math_layout, reduce_partials, store_partial, store_tile
from tilestream.kernels.cdna.ring import (
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
from tilestream.kernels.device.items import begin_worker, finish_worker, next_item
from tilestream.kernels.device.jit import entry
from tilestream.kernels.device.schedule import count_in

neighbour = device(queues_.neighbour)


@gluon.jit
def read(x_stage, y_stage, MATH: gl.constexpr, LANDED: gl.constexpr, C: gl.constexpr):
    """Read the operands of a step from its stage."""
    X: gl.constexpr = C.X
    Y: gl.constexpr = C.Y
    return operand(x_stage, X, 0, MATH, C.WIDTH, LANDED), operand(y_stage, Y, 1, MATH, C.WIDTH, LANDED)


@gluon.jit
def multiply_direct(acc, x, y, k_begin, k_end, most, x_stages, y_stages, C: gl.constexpr):
    """Multiply whole K steps [k_begin, k_end), with copies past the registers. ``most`` is the last step of K."""
    X: gl.constexpr = C.X
    Y: gl.constexpr = C.Y
    FORMATS: gl.constexpr = C.FORMATS
    MATH: gl.constexpr = acc.type.layout
    AHEAD: gl.constexpr = C.STAGES - 1
    x_offsets, y_offsets = copy_offsets(x, X), copy_offsets(y, Y)
    # Each round commits the same number of groups for every item, since waits count groups.
    for i in gl.static_range(AHEAD):
        step = gl.minimum(k_begin + i, most)
        copy(x.at + step * x.step, x_offsets, x_stages, y.at + step * y.step, y_offsets, y_stages, i)
    stage = tl.cast(0, tl.int32)
    for step in range(k_begin, k_end - AHEAD):
        landed(AHEAD - 1)
        a, b = read(x_stages.index(stage), y_stages.index(stage), MATH, True, C)
        ahead = step + AHEAD
        copy(
            x.at + ahead * x.step, x_offsets, x_stages, y.at + ahead * y.step, y_offsets, y_stages,
            before(stage, C.STAGES),
        )  # fmt: skip
        acc = multiply_add(a, b, acc, FORMATS)
        stage = after(stage, C.STAGES)
    # The last steps: nothing is left to copy.
    for i in gl.static_range(AHEAD):
        landed(AHEAD - 1 - i)
        if gl.maximum(k_begin, k_end - AHEAD) + i < k_end:
            a, b = read(x_stages.index(stage), y_stages.index(stage), MATH, True, C)
            acc = multiply_add(a, b, acc, FORMATS)
        stage = after(stage, C.STAGES)
    # The rest of K, or the next item's copies, go to stages that other waves may still be reading.
    barrier()
    return acc


@gluon.jit
def fetch_step(at, offsets, S: gl.constexpr):
    """Start to fetch an operand's part of a step, from ``at`` on, into registers."""
    WORDS: gl.constexpr = in_words(at.dtype.element_ty, S.TURNED)
    return fetch(at, offsets, S.OFFSETS_64BIT, WORDS)


@gluon.jit
def multiply_staged(acc, x, y, k_begin, k_end, most, x_stages, y_stages, C: gl.constexpr):
    """`multiply_direct` with copies through registers: a step is fetched while the previous one is multiplied."""
    X: gl.constexpr = C.X
    Y: gl.constexpr = C.Y
    FORMATS: gl.constexpr = C.FORMATS
    MATH: gl.constexpr = acc.type.layout
    X_TYPE: gl.constexpr = x.at.dtype.element_ty
    Y_TYPE: gl.constexpr = y.at.dtype.element_ty
    x_offsets, y_offsets = fetch_offsets(x, C.BLOCK_K - 1, X), fetch_offsets(y, C.BLOCK_K - 1, Y)
    first = gl.minimum(k_begin, most)
    x_tile = fetch_step(x.at + first * x.step, x_offsets, X)
    in_order()
    y_tile = fetch_step(y.at + first * y.step, y_offsets, Y)
    in_order()
    for step in range(k_begin, k_end):
        ahead = gl.minimum(step + 1, most)
        put(fetched(x_tile, X_TYPE, X), x_stages.index(0), X)
        x_tile = fetch_step(x.at + ahead * x.step, x_offsets, X)
        in_order()
        put(fetched(y_tile, Y_TYPE, Y), y_stages.index(0), Y)
        y_tile = fetch_step(y.at + ahead * y.step, y_offsets, Y)
        a, b = read(x_stages.index(0), y_stages.index(0), MATH, False, C)
        acc = multiply_add(a, b, acc, FORMATS)
    return acc


@gluon.jit
def multiply_rest(acc, x, y, whole, rest, x_stages, y_stages, C: gl.constexpr):
    """Multiply the ``rest`` of K after ``whole`` steps as one step, with zeros past the end."""
    X: gl.constexpr = C.X
    Y: gl.constexpr = C.Y
    FORMATS: gl.constexpr = C.FORMATS
    MATH: gl.constexpr = acc.type.layout
    X_TYPE: gl.constexpr = x.at.dtype.element_ty
    Y_TYPE: gl.constexpr = y.at.dtype.element_ty
    x_at, y_at = x.at + whole * x.step, y.at + whole * y.step
    x_offsets, y_offsets = fetch_offsets(x, rest - 1, X), fetch_offsets(y, rest - 1, Y)
    x_tile, y_tile = fetch_step(x_at, x_offsets, X), fetch_step(y_at, y_offsets, Y)
    x_tile, y_tile = fetched(x_tile, X_TYPE, X), fetched(y_tile, Y_TYPE, Y)
    x_tile, y_tile = cut_off(x_tile, rest, X), cut_off(y_tile, rest, Y)
    put(x_tile, x_stages.index(0), X)
    put(y_tile, y_stages.index(0), Y)
    a, b = read(x_stages.index(0), y_stages.index(0), MATH, False, C)
    return multiply_add(a, b, acc, FORMATS)


@gluon.jit
def product(x, y, k_begin, k_end, k, MATH: gl.constexpr, C: gl.constexpr):
    """K steps [k_begin, k_end) of a tile: float32 ``[BLOCK_M, BLOCK_N]``.

    ``x`` and ``y``: `tilestream.core.structs.Strided`, from the tile's first row and column on. The stages belong to an
    item; between items their memory has other uses.
    """
    STAGES: gl.constexpr = C.STAGES if C.DIRECT else 1
    X: gl.constexpr = C.X
    Y: gl.constexpr = C.Y
    x_stages = make_stages(x.at.dtype.element_ty, STAGES, X)
    y_stages = make_stages(y.at.dtype.element_ty, STAGES, Y)
    TILE: gl.constexpr = (C.BLOCK_M, C.BLOCK_N)
    acc = gl.zeros(TILE, gl.float32, MATH)
    whole = gl.minimum(k_end, k // C.BLOCK_K)
    most = k // C.BLOCK_K - 1
    MULTIPLY: gl.constexpr = multiply_direct if C.DIRECT else multiply_staged
    acc = MULTIPLY(acc, x, y, k_begin, whole, most, x_stages, y_stages, C)
    if not C.EVEN_K:
        if whole < k_end:
            acc = multiply_rest(acc, x, y, whole, k - whole * C.BLOCK_K, x_stages, y_stages, C)
            if C.DIRECT:
                barrier()
    return acc


@gluon.jit
def first_row(m, batch, row, S: gl.constexpr):
    """The address of a tile's first row of a `Matrix`, whose ``row`` is the stride that is not 1."""
    at = m.at + batch.to(gl.int64) * m.batch
    if S.K_MAJOR:
        at = at + row.to(gl.int64) * m.row
    else:
        at = at + row
    return gl.multiple_of(at, 16)


@gluon.jit
def step_of(m, S: gl.constexpr):
    """Elements from one K step of a `Matrix` to the next."""
    step = tl.cast(S.K, tl.int64)
    if not S.K_MAJOR:
        step = step * m.row
    return step


@gluon.jit
def locate(x, y, batch, row, column, e, C: gl.constexpr):
    """A tile's rows of both operands: `Strided`."""
    X: gl.constexpr = C.X
    Y: gl.constexpr = C.Y
    x_at, y_at = first_row(x, batch, row, X), first_row(y, batch, column, Y)
    x_last, y_last = e.rows - 1 - row, e.columns - 1 - column
    return Strided(x_at, x_last, x.row, step_of(x, X)), Strided(y_at, y_last, y.row, step_of(y, Y))


@gluon.jit
def fixup(acc, words, item, e, row, column, MATH: gl.constexpr, C: gl.constexpr):
    """Store a part of a tile and count it. The last part to be counted finishes the tile."""
    SIZE: gl.constexpr = C.BLOCK_M * C.BLOCK_N
    batch, part, parts, slot = item
    store_partial(acc, words.partials + slot.to(tl.int64) * SIZE, C.BLOCK_M, C.BLOCK_N, C.STRIP, MATH)
    if count_in(words.counts + slot - part, parts):
        # A tile's contributors are neighbouring shares, so their slots are neighbours, too, in K order.
        first_slot = words.partials + (slot - part).to(tl.int64) * SIZE
        for strip in range(C.BLOCK_N // C.STRIP):
            store_tile(
                reduce_partials(
                    first_slot + strip * C.BLOCK_M * C.STRIP, parts, C.BLOCK_M, C.BLOCK_N, C.STRIP, MATH
                ),
                e, batch, row, column + strip * C.STRIP, C.BLOCK_M, C.STRIP, MATH, C,
            )  # fmt: skip


@entry(
    gluon.jit,
    specialised=("stride_xb", "stride_x", "stride_yb", "stride_y", "stride_oc", "stride_rc"),
    unaligned=("row_scale", "column_scale"),
)
def gemm(
    x, y, out, bias, residual, row_scale, column_scale, partials, counts, counters, table, log,
    row_signals, row_quarantine, row_table, column_signals, column_quarantine, column_table, records, claims,
    base: tl.int64, reset, row_epoch, row_key, column_epoch, column_key, allowed: tl.int64, op,
    row_chunks, rows_per_chunk, row_unread, rows_per_batch, row_tiles_per_batch,
    column_chunks, columns_per_chunk, column_unread,
    rows, columns, k, stride_xb, stride_x, stride_yb, stride_y, stride_ob, stride_or, stride_oc,
    stride_bias, stride_rb, stride_rr, stride_rc, stride_sb, stride_sr, stride_tb, stride_tc, alpha, beta,
    batches, num_m, num_n, k_steps, full_tiles, shares, units, queues, group, first, band, first_batch, capacity,
    C: gl.constexpr,
):  # fmt: skip
    """``out = activation(alpha * row_scale * column_scale * x @ y^T + bias + beta * residual)``, a workgroup a worker.

    Parameters
    ----------
    x, y, out, residual
        ``[batches, rows, K]``, ``[batches, columns, K]``, ``[batches, rows, columns]``. ``stride_x`` and ``stride_y``
        are the strides that are not 1.
    C
        A `tilestream.kernels.config.CdnaConfig`.

    The other parameters are fields of the structs of `tilestream.core.structs`. There is no arrival order.
    """
    MATH: gl.constexpr = math_layout(C.VERSION, C.SHAPE, C.ACROSS)
    worker, workers = gl.program_id(0), gl.num_programs(0)
    if C.KIND == "static":
        worker = neighbour(worker, workers, C.XCDS)
    work = Work(
        batches, num_m, num_n, k_steps, full_tiles, shares, units, queues, table, group, first, band, first_batch
    )  # fmt: skip
    words = Words(counters, base, reset, log, capacity, partials, counts)
    gate = Gate(
        Incoming(
            row_signals, row_quarantine, row_table, row_epoch, row_key, row_chunks, rows_per_chunk, row_unread, rows
        ),
        Incoming(
            column_signals, column_quarantine, column_table, column_epoch, column_key, column_chunks,
            columns_per_chunk, column_unread, columns,
        ),
        None, rows_per_batch, row_tiles_per_batch, records, claims, op, allowed,
    )  # fmt: skip
    epilogue = Epilogue(
        Matrix(out, stride_ob, stride_or, stride_oc), Matrix(residual, stride_rb, stride_rr, stride_rc),
        Vector(bias, 0, stride_bias), Vector(row_scale, stride_sb, stride_sr),
        Vector(column_scale, stride_tb, stride_tc),
        alpha, beta, rows, columns, None, None,
    )  # fmt: skip
    x, y = Matrix(x, stride_xb, stride_x, 1), Matrix(y, stride_yb, stride_y, 1)
    progress, watch = begin_worker(worker, workers, work, words, gate, C)
    cursor, ready, passed = progress
    found = tl.cast(1, tl.int32)
    while found != 0:
        found, item, progress = next_item(Progress(cursor, ready, passed), work, words, gate, watch, C)
        cursor, ready, passed = progress
        if found != 0:
            batch, k_begin, k_end = uniform(item.batch), uniform(item.k_begin), uniform(item.k_end)
            part, parts, slot = uniform(item.part), uniform(item.parts), uniform(item.slot)
            row, column = uniform(item.pm) * C.BLOCK_M, uniform(item.pn) * C.BLOCK_N
            acc = gl.full([C.BLOCK_M, C.BLOCK_N], float("nan"), gl.float32, MATH)
            if passed.over == 0:
                x_rows, y_rows = locate(x, y, batch, row, column, epilogue, C)
                acc = product(x_rows, y_rows, k_begin, k_end, k, MATH, C)
            if parts == 1:
                store_tile(acc, epilogue, batch, row, column, C.BLOCK_M, C.BLOCK_N, MATH, C)
            elif C.KIND == "stream_k":
                fixup(acc, words, (batch, part, parts, slot), epilogue, row, column, MATH, C)
    finish_worker(passed, work, words, gate, watch, C)
