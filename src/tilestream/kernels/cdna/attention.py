"""Persistent attention for CDNA in Gluon, for gfx942 and gfx950. Run on an emulator, not on a GPU.

::

    for tile in schedule:                            # take, locate_tile: a queue an XCD, stealing; longest first
        Q into registers, by way of shared memory
        for each key block; masked at the window's edge, at the diagonal and at the end:
            direct: wait for the block's copies; barrier
                    S = Q K^T; start the copies of K and V for the block STAGES - 1 ahead
                    softmax; O += P V
            staged: put K; barrier; fetch the next block's K; S = Q K^T; softmax
                    put V; barrier; fetch the next block's V; O += P V
        O / l; log-sum-exp

A tile is a query block of one head, or of several that share a K/V head (`PACK`), with 32 rows a warp. In the matrix
units' transposed results a lane has one row. So a row needs one exchange between two lanes, and the weights are
operands of the next multiplication without a move. That multiplication takes four keys of a lane at once (`KEYS`).

``direct``: every block starts the same number of copies, so that a wait can count them; past the last block they copy
it again. ``staged``: one stage in shared memory, and one block in registers. K is put while V's fetches are in flight,
and V while K's are, so no wait is for all loads. If rows are gathered from pages, the table is read one block ahead,
before the fetches. On gfx942, which cannot read values transposed, they are transposed in registers, and a row's two
lanes exchange by a shuffle through LDS, once a block; gfx950 has an instruction for it.

The protocol is that of `tilestream.kernels.cdna.ring`; `tilestream_tools.verify.shared_attention` explores it.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestream.core import queues as queues_
from tilestream.core.attention_structs import Extents, Fetched, Keys, Rows, Scores, Softmax, Tile
from tilestream.core.structs import Words, Work
from tilestream.kernels.cdna.attention_copy import (
    VECTOR,
    copies_by_registers,
    copies_past_registers,
    copy_block,
    entries_of,
    fetch_block,
    load_queries,
    make_parts,
    page_of,
    put_keys,
    put_values,
    values_layout,
)
from tilestream.kernels.cdna.attention_softmax import KEYS, math_of, pair_layout, weigh
from tilestream.kernels.cdna.compat import (
    barrier,
    buffer_store,
    commit,
    device,
    in_order,
    multiply_add,
    opaque_zero,
    uniform,
)
from tilestream.kernels.cdna.epilogue import within
from tilestream.kernels.cdna.ring import after, before, fetch_layout, landed, operand
from tilestream.kernels.device.attention_tile import locate_tile, seen_keys_of
from tilestream.kernels.device.items import begin_worker, finish_worker
from tilestream.kernels.device.jit import entry
from tilestream.kernels.device.schedule import take
from tilestream.kernels.device.softmax import finalize

neighbour = device(queues_.neighbour)


# A key block ---------------------------------------------------------------------------------------------------------


@gluon.jit
def scores_of(queries, stages, stage, LANDED: gl.constexpr, C: gl.constexpr):
    """``Q K^T`` of an item's rows and the keys of a stage."""
    MATH: gl.constexpr = math_of(C)
    S: gl.constexpr = C.KEY_STAGE
    PARTS: gl.constexpr = C.K.PARTS
    TILE: gl.constexpr = (C.ROWS, C.BLOCK)
    scores = gl.zeros(TILE, gl.float32, MATH)
    for part in gl.static_range(PARTS):
        x = operand(stages[part].index(stage), S, 1, MATH, VECTOR, LANDED)
        scores = multiply_add(queries[part], x, scores, None)
    return scores


@gluon.jit
def add_values(o, rescale, weights, stages, stage, LANDED: gl.constexpr, C: gl.constexpr):
    """The item's sums, rescaled, plus the weighted values of a stage."""
    S: gl.constexpr = C.VALUE_STAGE
    PARTS: gl.constexpr = C.V.PARTS
    made = ()
    for part in gl.static_range(PARTS):
        x = operand(stages[part].index(stage), S, 1, math_of(C), KEYS, LANDED)
        made += (multiply_add(weights, x, o[part] * rescale[:, None], None),)
    return made


@gluon.jit
def copy_ahead(block, stage, copies, keys, tile, C: gl.constexpr):
    """Start the copies of a key block into a stage. Past the tile's last block, that one is copied again."""
    K: gl.constexpr = C.K
    V: gl.constexpr = C.V
    first = gl.minimum(block, tile.end - 1) * C.BLOCK
    page = page_of(first, keys, C)
    copy_block(copies[0], first, keys, page, stage, K, C)
    copy_block(copies[1], first, keys, page, stage, V, C)
    commit()


@gluon.jit
def step_direct(block, stage, softmax, queries, copies, keys, tile, scores, MASKED: gl.constexpr, C: gl.constexpr):
    """Compute the key block in ``stage``, and start the copies of the block for the previous stage."""
    landed(C.STAGES - 2)
    x = scores_of(queries, copies[0].stages, stage, True, C)
    copy_ahead(block + C.STAGES - 1, before(stage, C.STAGES), copies, keys, tile, C)
    dtype: gl.constexpr = copies[1].stages[0].dtype
    weights, row_max, row_sum, rescale = weigh(x, softmax, block * C.BLOCK, tile, scores, dtype, MASKED, C)
    o = add_values(softmax.o, rescale, weights, copies[1].stages, stage, True, C)
    return Softmax(row_max, row_sum, o), after(stage, C.STAGES)


@gluon.jit
def attend_direct(queries, softmax, keys, tile, scores, C: gl.constexpr):
    """The `Softmax` of an item, with copies that bypass the registers."""
    K: gl.constexpr = C.K
    V: gl.constexpr = C.V
    gl.static_assert(not C.GATHERED, "rows of several pages go through registers")
    KS: gl.constexpr = C.KEY_STAGE
    VS: gl.constexpr = C.VALUE_STAGE
    k = copies_past_registers(keys.k, KS, K, C)
    v = copies_past_registers(keys.v, VS, V, C)
    copies = (k, v)
    STAGES: gl.constexpr = C.STAGES
    for i in gl.static_range(STAGES - 1):
        copy_ahead(tile.begin + i, i, copies, keys, tile, C)
    stage = tl.cast(0, tl.int32)
    if C.LEFT:
        for block in range(tile.begin, tile.plain_begin):
            softmax, stage = step_direct(block, stage, softmax, queries, copies, keys, tile, scores, True, C)
    for block in range(tile.plain_begin, tile.plain_end):
        softmax, stage = step_direct(block, stage, softmax, queries, copies, keys, tile, scores, False, C)
    for block in range(tile.plain_end, tile.end):
        softmax, stage = step_direct(block, stage, softmax, queries, copies, keys, tile, scores, True, C)
    # The copies past the last block are complete, and all waves have read: the stages are free.
    landed(0)
    barrier()
    return softmax


@gluon.jit
def pages_of_next(block, k_page, v_page, copies, keys, tile, C: gl.constexpr):
    """The pages of the next block's rows of keys and of values; see `entries_of`."""
    first = gl.minimum(block, tile.end - 1) * C.BLOCK
    k_next = entries_of(copies[0].i, first, keys, k_page, C)
    v_next = entries_of(copies[1].i, first, keys, v_page, C)
    in_order()
    return k_next, v_next


@gluon.jit
def step_staged(block, softmax, fetched, queries, copies, keys, tile, scores, MASKED: gl.constexpr, C: gl.constexpr):
    """Compute a key block that has been `Fetched` into registers, and fetch the next one."""
    K: gl.constexpr = C.K
    V: gl.constexpr = C.V
    V_LAYOUT: gl.constexpr = values_layout(C)
    V_LANE: gl.constexpr = V_LAYOUT.size_per_thread[1]
    k, v = copies
    k_page, v_page = fetched.k_page, fetched.v_page
    ahead = gl.minimum(block + 1, tile.end - 1) * C.BLOCK
    if not C.GATHERED:
        k_page = page_of(ahead, keys, C)
        v_page = k_page
    k_next, v_next = pages_of_next(block + 2, k_page, v_page, copies, keys, tile, C)
    put_keys(fetched.k, k.stages, C)
    k_tiles = fetch_block(k, ahead, keys, k_page, VECTOR, K, C)
    x = scores_of(queries, k.stages, 0, False, C)
    dtype: gl.constexpr = v.stages[0].dtype
    weights, row_max, row_sum, rescale = weigh(x, softmax, block * C.BLOCK, tile, scores, dtype, MASKED, C)
    put_values(fetched.v, v.stages, C)
    v_tiles = fetch_block(v, ahead, keys, v_page, V_LANE, V, C)
    o = add_values(softmax.o, rescale, weights, v.stages, 0, False, C)
    return Softmax(row_max, row_sum, o), Fetched(k_tiles, v_tiles, k_next, v_next)


@gluon.jit
def attend_staged(queries, softmax, keys, tile, scores, C: gl.constexpr):
    """The `Softmax` of an item, with copies through registers."""
    K: gl.constexpr = C.K
    V: gl.constexpr = C.V
    V_LAYOUT: gl.constexpr = values_layout(C)
    V_LANE: gl.constexpr = V_LAYOUT.size_per_thread[1]
    KS: gl.constexpr = C.KEY_STAGE
    VS: gl.constexpr = C.VALUE_STAGE
    k_stages = make_parts(keys.k.at.dtype.element_ty, C.K.PARTS, 1, KS)
    v_stages = make_parts(keys.v.at.dtype.element_ty, C.V.PARTS, 1, VS)
    K_LAYOUT: gl.constexpr = fetch_layout(C.BLOCK, C.K.WIDTH, True, False, VECTOR, C.WARPS)
    k = copies_by_registers(keys.k, k_stages, K_LAYOUT, K, C)
    v = copies_by_registers(keys.v, v_stages, V_LAYOUT, V, C)
    copies = (k, v)
    begin = tile.begin
    first = begin * C.BLOCK
    page = page_of(first, keys, C)
    k_first, v_first = pages_of_next(begin, page, page, copies, keys, tile, C)
    k_page, v_page = pages_of_next(begin + 1, page, page, copies, keys, tile, C)
    k_tiles = fetch_block(k, first, keys, k_first, VECTOR, K, C)
    in_order()
    v_tiles = fetch_block(v, first, keys, v_first, V_LANE, V, C)
    fetched = Fetched(k_tiles, v_tiles, k_page, v_page)
    if C.LEFT:
        for block in range(begin, tile.plain_begin):
            softmax, fetched = step_staged(block, softmax, fetched, queries, copies, keys, tile, scores, True, C)
    for block in range(tile.plain_begin, tile.plain_end):
        softmax, fetched = step_staged(block, softmax, fetched, queries, copies, keys, tile, scores, False, C)
    for block in range(tile.plain_end, tile.end):
        softmax, fetched = step_staged(block, softmax, fetched, queries, copies, keys, tile, scores, True, C)
    return softmax


# A tile --------------------------------------------------------------------------------------------------------------


@gluon.jit
def in_scalars(tile):
    """The tile in scalar registers."""
    return Tile(
        tile.pm, tile.pn, uniform(tile.batch), uniform(tile.head), tile.share, uniform(tile.first),
        uniform(tile.queries), uniform(tile.keys), uniform(tile.origin_q), uniform(tile.origin_k), tile.origin_v,
        uniform(tile.begin), uniform(tile.plain_begin), uniform(tile.plain_end), uniform(tile.end),
        uniform(tile.causal_offset_left), uniform(tile.causal_offset_right),
    )  # fmt: skip


@gluon.jit
def keys_of_tile(tile, k, v, table, extents, C: gl.constexpr):
    """`Keys` of a tile. ``k`` and ``v`` are `Rows`, ``table`` is ``(block_table, stride, pages)``."""
    block_table, stride, pages = table
    low, high = seen_keys_of(tile, C)
    batch = tile.batch.to(tl.int64)
    head = (tile.head // extents.q_heads_per_kv).to(tl.int64)
    k_at = k.at + head * k.head
    v_at = v.at + head * v.head
    if C.PAGE > 0:
        block_table = block_table + batch * stride
    else:
        k_at = k_at + batch * k.batch + tile.origin_k.to(tl.int64) * k.row
        v_at = v_at + batch * v.batch + tile.origin_k.to(tl.int64) * v.row
        block_table = tile.head * 0  # Triton 3.6 cannot return None
    return Keys(Rows(k_at, k.batch, k.row, k.head), Rows(v_at, v.batch, v.row, v.head), block_table, pages, low, high)


@gluon.jit
def start_softmax(C: gl.constexpr):
    """The `Softmax` of rows without keys so far: ``o`` in parts, ``row_sum`` in halves."""
    PARTS: gl.constexpr = C.V.PARTS
    MATH: gl.constexpr = math_of(C)
    row_max = gl.full([C.ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, MATH))
    row_sum = gl.full([C.ROWS, 2], 0.0, gl.float32, pair_layout(C.WARPS))
    OUTPUT: gl.constexpr = (C.ROWS, C.V.WIDTH)
    o = ()
    for _part in gl.static_range(PARTS):
        o += (gl.zeros(OUTPUT, gl.float32, MATH),)
    return Softmax(row_max, row_sum, o)


@gluon.jit
def store_output(o, factor, out, at, i, last, C: gl.constexpr):
    """A tile of the output (`Rows`) from ``at`` on: rows ``i`` up to position ``last``."""
    F: gl.constexpr = C.V
    PARTS: gl.constexpr = F.PARTS
    VECTOR_OUT: gl.constexpr = C.VECTOR_OUT
    j = gl.arange(0, F.WIDTH, gl.SliceLayout(0, math_of(C)))
    position = i // C.PACK
    for part in gl.static_range(PARTS):
        x = (o[part] * factor[:, None]).to(at.dtype.element_ty)
        column = j + part * F.WIDTH
        offset = within(out.row, 1, position, column, VECTOR_OUT, C.OUT_64BIT)
        if C.PACK > 1:
            offset = within(out.head, 0, i % C.PACK, column, 1, C.OUT_64BIT) + offset
            if VECTOR_OUT > 1:
                offset = gl.max_contiguous(gl.multiple_of(offset, [1, VECTOR_OUT]), [1, VECTOR_OUT])
        inside = (position <= last)[:, None] & (column < F.COLUMNS)[None, :]
        if C.OUT_64BIT:
            gl.store(at + offset, x, mask=inside)
        else:
            buffer_store(x, at, offset, mask=inside)


@gluon.jit
def store_tile(softmax, tile, last, scores, out, lse, C: gl.constexpr):
    """``O / l`` and the log-sum-exp of a tile's rows up to position ``last`` of it."""
    MATH: gl.constexpr = math_of(C)
    first = (tile.origin_q + tile.first).to(tl.int64)
    batch, head = tile.batch.to(tl.int64), tile.head * C.PACK
    row_sum = gl.convert_layout(gl.sum(softmax.row_sum, 1), gl.SliceLayout(1, MATH))
    # Computed here, so that it needs no registers during the loops.
    row = gl.arange(0, C.ROWS, gl.SliceLayout(1, MATH)) + opaque_zero()
    factor, logs = finalize(softmax.row_max, row_sum, scores.sinks, head, row, scores.scale, C.PACK)
    if lse.at is not None:
        at = lse.at + batch * lse.batch + first * lse.row + head.to(tl.int64) * lse.head
        gl.store(at + row // C.PACK * lse.row + row % C.PACK * lse.head, logs, mask=row // C.PACK <= last)
    at = out.at + batch * out.batch + first * out.row + head.to(tl.int64) * out.head
    if C.VECTOR_OUT > 1:
        at = gl.multiple_of(at, 2 * C.VECTOR_OUT)
    store_output(softmax.o, factor, out, at, row, last, C)


@entry(gluon.jit, specialised=[f"stride_{x}{of}" for x in "qkvo" for of in "brh"])
def attend(
    q, k, v, out, lse, sinks, cu_seqlens_q, cu_seqlens_k, seqlens_k, block_table, starts, order, counters,
    base: tl.int64, reset, sequences, tokens_q, tokens_k, seqlen_q, seqlen_k, head_tiles, q_heads_per_kv, left, right,
    pages, stride_qb, stride_qr, stride_qh, stride_kb, stride_kr, stride_kh, stride_vb, stride_vr, stride_vh,
    stride_ob, stride_or, stride_oh, lse_batch, lse_row, lse_head, table_stride,
    queues, tiles, num_m, num_n, group, scale, softcap_scale, C: gl.constexpr,
):  # fmt: skip
    """``out = softmax(mask(scale * q @ k^T)) @ v``; each workgroup is a worker.

    The parameters are fields of the structs of `tilestream.core.attention_structs`.

    Parameters
    ----------
    pages
        The number of pages.
    C
        A `tilestream.kernels.attention_config.CdnaAttentionConfig`.
    """
    extents = Extents(
        starts, order, sequences, cu_seqlens_q, cu_seqlens_k, seqlens_k, tokens_q, tokens_k, seqlen_q, seqlen_k,
        head_tiles, q_heads_per_kv, 1, left, right, 0, 0,
    )  # fmt: skip
    queries = Rows(q, stride_qb, stride_qr, stride_qh)
    k_rows = Rows(k, stride_kb, stride_kr, stride_kh)
    v_rows = Rows(v, stride_vb, stride_vr, stride_vh)
    out_rows = Rows(out, stride_ob, stride_or, stride_oh)
    lse_rows = Rows(lse, lse_batch, lse_row, lse_head)
    scores = Scores(scale, softcap_scale, sinks)
    work = Work(1, num_m, num_n, 1, tiles, 0, 0, queues, None, group, 0, 1, 0)
    words = Words(counters, base, reset, None, 0, None, None)

    worker = gl.program_id(0)
    if C.KIND == "static":
        worker = neighbour(worker, gl.num_programs(0), C.XCDS)
    progress, watch = begin_worker(worker, gl.num_programs(0), work, words, None, C)
    cursor = progress.cursor
    found = tl.cast(1, tl.int32)
    while found != 0:
        found, item, cursor = take(cursor, work, words, watch, C)
        found, tile = locate_tile(found, item, extents, group, C)
        if found != 0:
            tile = in_scalars(tile)
            last = gl.minimum(tile.queries - tile.first, C.POSITIONS) - 1
            softmax = start_softmax(C)
            if tile.begin < tile.end:
                parts = load_queries(queries, tile, last, C)
                keys = keys_of_tile(tile, k_rows, v_rows, (block_table, table_stride, pages), extents, C)
                if C.DIRECT:
                    softmax = attend_direct(parts, softmax, keys, tile, scores, C)
                else:
                    softmax = attend_staged(parts, softmax, keys, tile, scores, C)
            store_tile(softmax, tile, last, scores, out_rows, lse_rows, C)
    finish_worker(progress.passed, work, words, None, watch, C)
