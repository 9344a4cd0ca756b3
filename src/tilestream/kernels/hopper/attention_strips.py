"""The Hopper kernels of attention in strips: see `tilestream.kernels.portable.attention_strips`.

*The weights of a key block.* A row's weights are added by the threads that have them, so the sum's bits depend on the
layout. It is that of `tilestream.kernels.hopper.attention_math`: a consumer's 64 rows. Few of them are real.

*A strip's sums.* An instruction of four warps multiplies 64 rows; it reads weights and values from shared memory. The
same warps copy them, block by block, into a ring of stages, while their instructions run::

    for each key block, the last first
      start o = o * factor + weights V: 8 instructions, a chain
      start to copy a block that comes later into the stage of two blocks before: values, weights, factors, sums
      wait for the next block's copies; barrier; fence; load its factors
      wait for o

Copies write shared memory as threads do, and these instructions read it in another way, so a fence stands between.

Rows past the tile's real ones have whatever is in shared memory. A row's products are its own, and these rows are not
stored.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tilestream.core.attention_structs import Extents, Rows
from tilestream.kernels.device.softmax import exp_scores, finalize, update_max
from tilestream.kernels.hopper.attention_load import ROWS
from tilestream.kernels.hopper.compat import barrier, commit, copy_to_shared, wait_for_groups
from tilestream.kernels.hopper.epilogue import mma_layout
from tilestream.kernels.portable.attention import first_of, keys_of_tile, offset_of
from tilestream.kernels.portable.attention_strips import NUMBERS, UNALIGNED, place_of_block, tile_of


@gluon.jit
def running_max(maxima, of_tile, block, blocks, end, real, C: gl.constexpr):
    """Each row's maximum in the key blocks that come before ``block``, which are those behind it."""
    layout: gl.constexpr = mma_layout(C.BLOCK)
    other = gl.arange(0, C.BLOCK, gl.SliceLayout(0, layout))
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    for first in range(block + 1, end, C.BLOCK):
        behind = first + other
        x = gl.load(
            maxima + ((of_tile * blocks)[:, None] + behind[None, :]), mask=real[:, None] & (behind < end)[None, :],
            other=float("-inf"),
        )  # fmt: skip
        row_max = gl.maximum(row_max, gl.max(x, 1))
    return row_max


@gluon.jit(do_not_specialize=(*NUMBERS[:-3], "scale"), do_not_specialize_on_alignment=("seqlens_k",))
def weigh_blocks(
    seqlens_k, partials, maxima, weights, rescales, sums, tops, scale, sequences, seqlen_q, seqlen_k, head_tiles,
    q_heads_per_kv, left, right, blocks, C: gl.constexpr,
):  # fmt: skip
    """The weights of a tile's rows and a key block, their sums, and the factors of earlier sums.

    The grid is ``(blocks, tiles)``. The program of a tile's first block, which comes last, stores the rows' maxima
    (``tops``).
    """
    gdc_wait()
    gdc_launch_dependents()
    extents = Extents(
        None, None, sequences, None, None, seqlens_k, 0, 0, seqlen_q, seqlen_k, head_tiles, q_heads_per_kv, 1, left,
        right, 0, 0,
    )  # fmt: skip
    block, number = gl.program_id(0), gl.program_id(1)
    tile = tile_of(number, extents, C)
    if (block >= tile.begin) & (block < tile.end):
        layout: gl.constexpr = mma_layout(C.BLOCK)
        row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        column = gl.arange(0, C.BLOCK, gl.SliceLayout(0, layout))
        rows = tile.queries * C.PACK
        real = row < rows
        inside = real[:, None] & (column >= 0)[None, :]
        place = place_of_block(number, block, blocks, tile, C) + row
        at = place[:, None] * C.BLOCK + column[None, :]
        of_tile = number.to(tl.int64) * rows + row
        row_max = running_max(maxima, of_tile, block, blocks, tile.end, real, C)
        # Scores after the other maxima: not both at a time are in registers.
        x = gl.load(partials + at, mask=inside, other=float("-inf"))
        row_max, shift, rescale = update_max(x, row_max, scale, True, False, C.LEFT)
        p = exp_scores(x, scale, shift)
        gl.store(weights + at, p.to(weights.dtype.element_ty), mask=inside)
        gl.store(rescales + place, rescale, mask=real)
        gl.store(sums + place, gl.sum(p, 1), mask=real)
        gl.store(tops + of_tile, row_max, mask=real & (block == tile.begin))


@gluon.constexpr_function
def copy_layout(columns):
    """Four warps' layout of a matrix of 16-bit elements of ``columns`` columns, copied 16 bytes at a time."""
    threads = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // threads, threads], [4, 1], [1, 0])


@gluon.jit
def copy_values(buffer, values, start, keys, STRIP: gl.constexpr, C: gl.constexpr):
    """Start to copy a strip of keys [start, start + C.BLOCK) of V (`Rows`); keys that no row sees are 0."""
    ALIGN: gl.constexpr = C.ALIGN
    layout: gl.constexpr = copy_layout(STRIP)
    row = gl.arange(0, C.BLOCK, gl.SliceLayout(1, layout))
    column = gl.arange(0, STRIP, gl.SliceLayout(0, layout))
    key = start + row
    real = (key >= keys.low) & (key < keys.high)
    at = values.at
    if C.PAGE == 0:
        at += start.to(tl.int64) * values.row
    elif C.PAGE >= C.BLOCK:
        first = tl.maximum(start, 0)  # before the tile's first key no key is copied
        page = tl.minimum(tl.maximum(tl.load(keys.table + first // C.PAGE), 0), keys.pages - 1)
        # A hint a term: one on their sum is lost where a term is 0.
        at += gl.multiple_of(page.to(tl.int64) * values.batch, ALIGN)
        at += gl.multiple_of((first % C.PAGE).to(tl.int64) * values.row, ALIGN)
    if (C.PAGE == 0) or (C.PAGE >= C.BLOCK):
        if C.OFFSETS_64BIT:
            row = row.to(tl.int64)
        offset = row * values.row
    else:
        page = gl.load(keys.table + key // C.PAGE, mask=real, other=0)
        page = gl.minimum(gl.maximum(page, 0), keys.pages - 1)
        offset = page.to(tl.int64) * values.batch + (key % C.PAGE).to(tl.int64) * values.row
    pointers = at + (gl.multiple_of(offset, ALIGN)[:, None] + column[None, :])
    copy_to_shared(buffer, pointers, mask=real[:, None] & (column >= 0)[None, :])


@gluon.jit
def copy_weights(stages, stage, given, place, rows, there, COPIED: gl.constexpr, C: gl.constexpr):
    """Start to copy a block's weights, factors and sums from ``place``, its first row among all rows of scratch.

    ``there``: whether the block is one of the tile's. ``COPIED``: a multiple of 8 rows, all real ones among them.
    """
    weights, rescales, sums = given
    p, factors, sums_of = stages
    layout: gl.constexpr = copy_layout(C.BLOCK)
    row = gl.arange(0, COPIED, gl.SliceLayout(1, layout))
    column = gl.arange(0, C.BLOCK, gl.SliceLayout(0, layout))
    real = (row < rows) & there
    at = weights + place * C.BLOCK
    copy_to_shared(
        p.index(stage).slice(0, COPIED), at + (row[:, None] * C.BLOCK + column[None, :]),
        mask=real[:, None] & (column >= 0)[None, :],
    )  # fmt: skip
    line = gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [4], [0]))
    real = (line < rows) & there
    copy_to_shared(factors.index(stage), rescales + place + line, mask=real)
    copy_to_shared(sums_of.index(stage), sums + place + line, mask=real)


@gluon.jit
def store_sums(o, row_sum, number, strip, tile, outputs, scale, STRIP: gl.constexpr, C: gl.constexpr):
    """Store a strip of a tile's output; the programs of the first strip also store the log-sum-exp.

    ``outputs``: the output and the log-sum-exp as `Rows`, the sinks, and the rows' maxima.
    """
    out, lse, sinks, tops = outputs
    layout: gl.constexpr = mma_layout(STRIP)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, STRIP, gl.SliceLayout(0, layout))
    rows = tile.queries * C.PACK
    real = row < rows
    of_tile = number.to(tl.int64) * rows + row
    row_max = gl.load(tops + of_tile, mask=real & (tile.begin < tile.end), other=float("-inf"))
    head = tile.head * C.PACK
    factor, logs = finalize(row_max, row_sum, sinks, head, row, scale, C.PACK)
    at = first_of(out, tile.batch, tile.origin_q + tile.first, head, C.ALIGN_OUT) + strip * STRIP
    gl.store(
        at + (offset_of(row, out, C.ALIGN_OUT, C)[:, None] + column[None, :]),
        (o * factor[:, None]).to(out.at.dtype.element_ty), mask=real[:, None] & (column >= 0)[None, :],
    )  # fmt: skip
    if lse.at is not None:
        at = first_of(lse, tile.batch, tile.origin_q + tile.first, head, 1)
        gl.store(at + offset_of(row, lse, 1, C), logs, mask=real & (strip == 0))


@gluon.jit
def add_stages(stages, values, given, keys, place, tile, COPIED: gl.constexpr, C: gl.constexpr):
    """Copy and add a tile's key blocks, the last first. Returns the sums: a strip of the output, and of the weights.

    Of ``STAGES`` stages one is multiplied, and the one before may be: so copies are ``STAGES - 2`` blocks ahead.

    ``values``: the strip's columns of V as `Rows`. ``given``: weights, factors and sums in scratch; ``place``: that of
    the last block's first row. Values of the first stages are copied before the launch before has ended.
    """
    p, y, factors, sums_of = stages
    lines = p, factors, sums_of
    STAGES: gl.constexpr = y.shape[0]
    STRIP: gl.constexpr = y.shape[2]
    AHEAD: gl.constexpr = STAGES - 2
    OUTPUT: gl.constexpr = (ROWS, STRIP)
    layout: gl.constexpr = mma_layout(STRIP)
    rows_layout: gl.constexpr = gl.SliceLayout(1, layout)
    rows = tile.queries * C.PACK
    last = tile.end - 1
    for i in gl.static_range(AHEAD):
        copy_values(y.index(i), values, (last - i) * C.BLOCK, keys, STRIP, C)
    commit()
    gdc_wait()
    for i in gl.static_range(AHEAD):
        copy_weights(lines, i, given, place, rows, last - i >= tile.begin, COPIED, C)
        commit()
        place -= rows
    wait_for_groups(AHEAD - 1)
    barrier()
    fence_async_shared()
    rescale, more = factors.index(0).load(rows_layout), sums_of.index(0).load(rows_layout)
    o = gl.zeros(OUTPUT, gl.float32, layout)
    row_sum = gl.zeros([ROWS], gl.float32, rows_layout)
    stage, free = tl.cast(0, tl.int32), tl.cast(AHEAD, tl.int32)
    for i in range(tile.begin, tile.end):
        product = warpgroup_mma(p.index(stage), y.index(stage), o * rescale[:, None], is_async=True)
        row_sum = row_sum * rescale + more
        block = last - AHEAD - (i - tile.begin)
        copy_values(y.index(free), values, block * C.BLOCK, keys, STRIP, C)
        copy_weights(lines, free, given, place, rows, block >= tile.begin, COPIED, C)
        commit()
        place -= rows
        free = gl.where(free == STAGES - 1, 0, free + 1)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        wait_for_groups(AHEAD - 1)
        barrier()
        fence_async_shared()
        rescale, more = factors.index(stage).load(rows_layout), sums_of.index(stage).load(rows_layout)
        o = warpgroup_mma_wait(0, (product,))
    wait_for_groups(0)
    return o, row_sum


@gluon.jit(do_not_specialize=(*NUMBERS, "scale"), do_not_specialize_on_alignment=UNALIGNED)
def chain_strips(
    v, out, lse, sinks, seqlens_k, block_table, weights, rescales, sums, tops, scale, sequences, seqlen_q, seqlen_k,
    pages, head_tiles, q_heads_per_kv, left, right, table_stride, blocks, lse_batch, lse_row, lse_head, stride_vb,
    stride_vr, stride_vh, stride_ob, stride_or, stride_oh, C: gl.constexpr, STRIP: gl.constexpr, STAGES: gl.constexpr,
    COPIED: gl.constexpr,
):  # fmt: skip
    """``STRIP`` columns of a tile's output; the programs of the first strip also store the log-sum-exp.

    The grid is ``(strips, tiles)``. Values are copied before the launch before has ended. That launch began when all
    before it had ended, so the values are there.
    """
    extents = Extents(
        None, None, sequences, None, None, seqlens_k, 0, 0, seqlen_q, seqlen_k, head_tiles, q_heads_per_kv, 1, left,
        right, 0, 0,
    )  # fmt: skip
    strip, number = gl.program_id(0), gl.program_id(1)
    tile = tile_of(number, extents, C)
    v_rows = Rows(v, stride_vb, stride_vr, stride_vh)
    keys = keys_of_tile(tile, v_rows, v_rows, (block_table, table_stride, pages), extents, C)
    # Strides are multiples of 8 elements. Triton knows those of 16 alone, and has to prove that copies are aligned.
    values = Rows(gl.multiple_of(keys.v.at + strip * STRIP, 16), keys.v.batch, keys.v.row, keys.v.head)

    P_SHAPE: gl.constexpr = (ROWS, C.BLOCK)
    V_SHAPE: gl.constexpr = (C.BLOCK, STRIP)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(P_SHAPE, v.dtype.element_ty)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(V_SHAPE, v.dtype.element_ty)
    line_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    P_STAGES: gl.constexpr = (STAGES, ROWS, C.BLOCK)
    V_STAGES: gl.constexpr = (STAGES, C.BLOCK, STRIP)
    LINES: gl.constexpr = (STAGES, ROWS)
    p = gl.allocate_shared_memory(v.dtype.element_ty, P_STAGES, p_layout)
    y = gl.allocate_shared_memory(v.dtype.element_ty, V_STAGES, v_layout)
    factors = gl.allocate_shared_memory(gl.float32, LINES, line_layout)
    sums_of = gl.allocate_shared_memory(gl.float32, LINES, line_layout)
    given = weights, rescales, sums
    outputs = Rows(out, stride_ob, stride_or, stride_oh), Rows(lse, lse_batch, lse_row, lse_head), sinks, tops
    place = place_of_block(number, tile.end - 1, blocks, tile, C)
    o, row_sum = add_stages((p, y, factors, sums_of), values, given, keys, place, tile, COPIED, C)
    store_sums(o, row_sum, number, strip, tile, outputs, scale, STRIP, C)
