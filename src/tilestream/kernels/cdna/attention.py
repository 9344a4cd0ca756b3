"""Attention for CDNA: persistent, in Gluon, for gfx942 and gfx950. Compiled and checked, not run: nobody here has one.

::

    for item in schedule:                            # schedule.take: queues of the XCDs, stolen from; longest first
        Q into registers, by way of shared memory
        for each of its key blocks, masked at the window's edge, plain, masked at the diagonal and the end:
            direct: wait for the block's copies; barrier
                    S = Q K^T; start the copies of K and V of the block that is STAGES - 1 ahead
                    softmax; O += P V
            staged: put K; barrier; fetch the next block's K; S = Q K^T; softmax
                    put V; barrier; fetch the next block's V; O += P V
        O / l; log-sum-exp

A tile is a query block of one head, or of several that share a K/V head (`PACK`), 32 rows to a warp. A lane of the
matrix units' transposed results has one row: what a row needs of others is one exchange between two lanes, and weights
are operands of the next multiplication where they lie. That multiplication takes four keys of a lane at once (`KEYS`).

``direct``: every block starts as many copies, those behind the last one bring it again, so that a wait can count them.
``staged``: one stage, and a block in registers. K is put when V's fetches are still under way, and V when K's are: no
wait need be for everything. Where rows are gathered from pages, the table is read a block ahead, before the fetches.
Where values cannot be read across (gfx942), they are transposed on their way through registers, and the exchange of a
row's two lanes is a shuffle by way of LDS, one a block: gfx950 has an instruction.

The protocol is that of `tilestream.kernels.cdna.ring`; `tilestream_tools.verify.shared_attention` explores it.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestream.core import queues as queues_
from tilestream.core.structs import Watch, Words, Work
from tilestream.kernels.cdna.attention_copy import (
    VECTOR,
    copied_columns,
    copy_block,
    entries_of,
    fetch_block,
    fetched_columns,
    gathered,
    load_queries,
    make_parts,
    page_of,
    put_keys,
    put_values,
)
from tilestream.kernels.cdna.attention_softmax import KEYS, pair_layout, weights_of
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
from tilestream.kernels.cdna.epilogue import math_layout, within
from tilestream.kernels.cdna.ring import (
    after,
    before,
    copy_layout,
    fetch_layout,
    indices,
    landed,
    operand,
)
from tilestream.kernels.device.schedule import enter, first_cursor, leave, schedule_config, take
from tilestream.kernels.hopper.attention_load import item_of
from tilestream.kernels.hopper.attention_softmax import finished

neighbour = device(queues_.neighbour)

#: Arguments that say nothing about alignment: one compiled kernel serves all their values.
UNSPECIALISED = (
    "base", "reset", "sequences", "rows_q", "rows_k", "queries", "keys", "columns", "shared_by", "left", "right",
    "pages", "stride_table", "stride_lb", "stride_lr", "stride_lh", "queues", "tiles", "num_m", "num_n", "group",
    "scale", "inner",
)  # fmt: skip
#: Words and numbers that lie anywhere.
UNALIGNED = ("lse", "sinks", "cu_queries", "cu_keys", "lengths", "table", "starts", "order_of")


@gluon.jit
def scores_of(
    queries, k_stages, stage, ROWS: gl.constexpr, BLOCK: gl.constexpr, FORM: gl.constexpr, MATH: gl.constexpr,
    LANDED: gl.constexpr,
):  # fmt: skip
    """``Q K^T`` of an item's rows and a stage."""
    PARTS: gl.constexpr = FORM[0]
    WIDTH: gl.constexpr = FORM[1]
    HOW: gl.constexpr = FORM[3]
    scores = gl.zeros([ROWS, BLOCK], gl.float32, MATH)
    for part in gl.static_range(PARTS):
        x = operand(k_stages[part].index(stage), BLOCK, WIDTH, True, HOW, 1, MATH, VECTOR, LANDED)
        scores = multiply_add(queries[part], x, scores, None)
    return scores


@gluon.jit
def add_values(
    sums, shrink, weights, v_stages, stage, BLOCK: gl.constexpr, FORM: gl.constexpr, TURNED: gl.constexpr,
    MATH: gl.constexpr, LANDED: gl.constexpr,
):  # fmt: skip
    """The sums of an item's parts, ``shrink`` of them, and a stage's values by their weights."""
    PARTS: gl.constexpr = FORM[0]
    WIDTH: gl.constexpr = FORM[1]
    HOW: gl.constexpr = FORM[3]
    made = ()
    for part in gl.static_range(PARTS):
        x = operand(v_stages[part].index(stage), WIDTH, BLOCK, TURNED, HOW, 1, MATH, KEYS, LANDED)
        made += (multiply_add(weights, x, sums[part] * shrink[:, None], None),)
    return made


@gluon.jit
def step_direct(
    block, last, stage, queries, sums, top, total, k_source, k_stages, v_source, v_stages, seen, mask, table, pages,
    scale, inner, ROWS: gl.constexpr, PACK: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, PAGE: gl.constexpr, MATH: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr,
    RIGHT: gl.constexpr, CAPPED: gl.constexpr,
):  # fmt: skip
    """A key block that lies in ``stage``; and the copies of the one that is to come into the stage before it."""
    landed(STAGES - 2)
    scores = scores_of(queries, k_stages, stage, ROWS, BLOCK, K, MATH, True)
    ahead = gl.minimum(block + STAGES - 1, last) * BLOCK
    page = page_of(ahead, table, pages, BLOCK, PAGE)
    free = before(stage, STAGES)
    copy_block(k_source, ahead, seen, pages, page, k_stages, free, K, BLOCK, PAGE)
    copy_block(v_source, ahead, seen, pages, page, v_stages, free, V, BLOCK, PAGE)
    commit()
    weights, top, total, shrink = weights_of(
        scores, top, total, block * BLOCK, mask, scale, inner, v_stages[0].dtype, PACK, MATH, MASKED, LEFT, RIGHT,
        CAPPED,
    )  # fmt: skip
    sums = add_values(sums, shrink, weights, v_stages, stage, BLOCK, V, False, MATH, True)
    return sums, top, total, after(stage, STAGES)


@gluon.jit
def attend_direct(
    queries, sums, top, total, k, stride_kr, stride_kp, v, stride_vr, stride_vp, blocks, seen, mask, table, pages,
    scale, inner, ROWS: gl.constexpr, PACK: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, PAGE: gl.constexpr, MATH: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    CAPPED: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """An item's key blocks by copies past the registers: ``(sums, top, total)``."""
    gl.static_assert(not gathered(BLOCK, PAGE), "rows of several pages go through registers")
    K_HOW: gl.constexpr = K[3]
    V_HOW: gl.constexpr = V[3]
    begin, plain_begin, plain_end, end = blocks
    k_stages = make_parts(k.dtype.element_ty, K[0], STAGES, BLOCK, K[1], True)
    v_stages = make_parts(v.dtype.element_ty, V[0], STAGES, BLOCK, V[1], True)
    k_i, k_j = indices(copy_layout(K[1], K[4], WARPS), BLOCK, K[1])
    v_i, v_j = indices(copy_layout(V[1], V[4], WARPS), BLOCK, V[1])
    k_source = (k, stride_kr, stride_kp, k_i, copied_columns(k_i, k_j, K_HOW))
    v_source = (v, stride_vr, stride_vp, v_i, copied_columns(v_i, v_j, V_HOW))
    last = end - 1
    for i in gl.static_range(STAGES - 1):
        first = gl.minimum(begin + i, last) * BLOCK
        page = page_of(first, table, pages, BLOCK, PAGE)
        copy_block(k_source, first, seen, pages, page, k_stages, i, K, BLOCK, PAGE)
        copy_block(v_source, first, seen, pages, page, v_stages, i, V, BLOCK, PAGE)
        commit()
    stage = tl.cast(0, tl.int32)
    if LEFT:
        for block in range(begin, plain_begin):
            sums, top, total, stage = step_direct(
                block, last, stage, queries, sums, top, total, k_source, k_stages, v_source, v_stages, seen, mask,
                table, pages, scale, inner, ROWS, PACK, BLOCK, STAGES, K, V, PAGE, MATH, True, LEFT, RIGHT, CAPPED,
            )  # fmt: skip
    for block in range(plain_begin, plain_end):
        sums, top, total, stage = step_direct(
            block, last, stage, queries, sums, top, total, k_source, k_stages, v_source, v_stages, seen, mask,
            table, pages, scale, inner, ROWS, PACK, BLOCK, STAGES, K, V, PAGE, MATH, False, LEFT, RIGHT, CAPPED,
        )  # fmt: skip
    for block in range(plain_end, end):
        sums, top, total, stage = step_direct(
            block, last, stage, queries, sums, top, total, k_source, k_stages, v_source, v_stages, seen, mask,
            table, pages, scale, inner, ROWS, PACK, BLOCK, STAGES, K, V, PAGE, MATH, True, LEFT, RIGHT, CAPPED,
        )  # fmt: skip
    # The copies of blocks behind the last one have landed, and everybody has read: the room is free.
    landed(0)
    barrier()
    return sums, top, total


@gluon.jit
def pages_of_next(
    block, last, k_source, v_source, seen, k_page, v_page, table, BLOCK: gl.constexpr, PAGE: gl.constexpr
):  # fmt: skip
    """What the table says of the rows of a block that is to be fetched, of keys' and of values'; see `entries_of`."""
    first = gl.minimum(block, last) * BLOCK
    k_next = entries_of(k_source[3], first, seen, k_page, table, BLOCK, PAGE)
    v_next = entries_of(v_source[3], first, seen, v_page, table, BLOCK, PAGE)
    in_order()
    return k_next, v_next


@gluon.jit
def step_staged(
    block, last, queries, sums, top, total, k_tiles, v_tiles, k_page, v_page, k_source, k_rest, k_stages, v_source,
    v_rest, v_stages, seen, mask, table, pages, scale, inner, ROWS: gl.constexpr, PACK: gl.constexpr,
    BLOCK: gl.constexpr, K: gl.constexpr, V: gl.constexpr, V_LANE: gl.constexpr, TURNED: gl.constexpr,
    PAGE: gl.constexpr, FAR: gl.constexpr, MATH: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr,
    RIGHT: gl.constexpr, CAPPED: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """A key block that has been fetched into registers; and the next one's fetches.

    ``k_page``, ``v_page``: what the table says of the next one's rows, where they are gathered.
    """
    ahead = gl.minimum(block + 1, last) * BLOCK
    if not gathered(BLOCK, PAGE):
        k_page = page_of(ahead, table, pages, BLOCK, PAGE)
        v_page = k_page
    k_next, v_next = pages_of_next(block + 2, last, k_source, v_source, seen, k_page, v_page, table, BLOCK, PAGE)
    put_keys(k_tiles, k_stages, K, BLOCK, WARPS)
    k_tiles = fetch_block(k_source, k_rest, ahead, seen, pages, k_page, K, BLOCK, PAGE, VECTOR, FAR)
    scores = scores_of(queries, k_stages, 0, ROWS, BLOCK, K, MATH, False)
    weights, top, total, shrink = weights_of(
        scores, top, total, block * BLOCK, mask, scale, inner, v_stages[0].dtype, PACK, MATH, MASKED, LEFT, RIGHT,
        CAPPED,
    )  # fmt: skip
    put_values(v_tiles, v_stages, V, BLOCK, TURNED)
    v_tiles = fetch_block(v_source, v_rest, ahead, seen, pages, v_page, V, BLOCK, PAGE, V_LANE, FAR)
    sums = add_values(sums, shrink, weights, v_stages, 0, BLOCK, V, TURNED, MATH, False)
    return sums, top, total, k_tiles, v_tiles, k_next, v_next


@gluon.jit
def attend_staged(
    queries, sums, top, total, k, stride_kr, stride_kp, v, stride_vr, stride_vp, blocks, seen, mask, table, pages,
    scale, inner, ROWS: gl.constexpr, PACK: gl.constexpr, BLOCK: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    TURNED: gl.constexpr, PAGE: gl.constexpr, FAR: gl.constexpr, MATH: gl.constexpr, LEFT: gl.constexpr,
    RIGHT: gl.constexpr, CAPPED: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """An item's key blocks by way of registers: ``(sums, top, total)``."""
    begin, plain_begin, plain_end, end = blocks
    V_LAYOUT: gl.constexpr = fetch_layout(V[1], BLOCK, False, TURNED, VECTOR, WARPS)
    V_LANE: gl.constexpr = V_LAYOUT.size_per_thread[1]
    k_stages = make_parts(k.dtype.element_ty, K[0], 1, BLOCK, K[1], True)
    v_stages = make_parts(v.dtype.element_ty, V[0], 1, V[1], BLOCK, TURNED)
    k_i, k_j = indices(fetch_layout(BLOCK, K[1], True, False, VECTOR, WARPS), BLOCK, K[1])
    v_i, v_j = indices(V_LAYOUT, BLOCK, V[1])
    k_source = (k, stride_kr, stride_kp, k_i, fetched_columns(k_i, k_j, K[1], K[1]))
    v_source = (v, stride_vr, stride_vp, v_i, fetched_columns(v_i, v_j, V[1], V[1]))
    k_rest = fetched_columns(k_i, k_j, K[2], K[1])
    v_rest = fetched_columns(v_i, v_j, V[2], V[1])
    last = end - 1
    first = begin * BLOCK
    page = page_of(first, table, pages, BLOCK, PAGE)
    k_first, v_first = pages_of_next(begin, last, k_source, v_source, seen, page, page, table, BLOCK, PAGE)
    k_page, v_page = pages_of_next(begin + 1, last, k_source, v_source, seen, page, page, table, BLOCK, PAGE)
    k_tiles = fetch_block(k_source, k_rest, first, seen, pages, k_first, K, BLOCK, PAGE, VECTOR, FAR)
    in_order()
    v_tiles = fetch_block(v_source, v_rest, first, seen, pages, v_first, V, BLOCK, PAGE, V_LANE, FAR)
    if LEFT:
        for block in range(begin, plain_begin):
            sums, top, total, k_tiles, v_tiles, k_page, v_page = step_staged(
                block, last, queries, sums, top, total, k_tiles, v_tiles, k_page, v_page, k_source, k_rest, k_stages,
                v_source, v_rest, v_stages, seen, mask, table, pages, scale, inner, ROWS, PACK, BLOCK, K, V, V_LANE,
                TURNED, PAGE, FAR, MATH, True, LEFT, RIGHT, CAPPED, WARPS,
            )  # fmt: skip
    for block in range(plain_begin, plain_end):
        sums, top, total, k_tiles, v_tiles, k_page, v_page = step_staged(
            block, last, queries, sums, top, total, k_tiles, v_tiles, k_page, v_page, k_source, k_rest, k_stages,
            v_source, v_rest, v_stages, seen, mask, table, pages, scale, inner, ROWS, PACK, BLOCK, K, V, V_LANE, TURNED,
            PAGE, FAR, MATH, False, LEFT, RIGHT, CAPPED, WARPS,
        )  # fmt: skip
    for block in range(plain_end, end):
        sums, top, total, k_tiles, v_tiles, k_page, v_page = step_staged(
            block, last, queries, sums, top, total, k_tiles, v_tiles, k_page, v_page, k_source, k_rest, k_stages,
            v_source, v_rest, v_stages, seen, mask, table, pages, scale, inner, ROWS, PACK, BLOCK, K, V, V_LANE, TURNED,
            PAGE, FAR, MATH, True, LEFT, RIGHT, CAPPED, WARPS,
        )  # fmt: skip
    return sums, top, total


@gluon.jit
def store_tile(
    sums, factor, out, i, last, stride_row, stride_head, PACK: gl.constexpr, PARTS: gl.constexpr, WIDTH: gl.constexpr,
    COLUMNS: gl.constexpr, GRAIN: gl.constexpr, FAR: gl.constexpr, MATH: gl.constexpr,
):  # fmt: skip
    """A tile of the output: rows up to position ``last``, ``COLUMNS`` of all its parts."""
    j = gl.arange(0, WIDTH, gl.SliceLayout(0, MATH))
    position = i // PACK
    for part in gl.static_range(PARTS):
        x = (sums[part] * factor[:, None]).to(out.dtype.element_ty)
        column = j + part * WIDTH
        at = within(stride_row, 1, position, column, GRAIN, FAR)
        if PACK > 1:
            at = within(stride_head, 0, i % PACK, column, 1, FAR) + at
            if GRAIN > 1:
                at = gl.max_contiguous(gl.multiple_of(at, [1, GRAIN]), [1, GRAIN])
        inside = (position <= last)[:, None] & (column < COLUMNS)[None, :]
        if FAR:
            gl.store(out + at, x, mask=inside)
        else:
            buffer_store(x, out, at, mask=inside)


@gluon.jit(do_not_specialize=UNSPECIALISED, do_not_specialize_on_alignment=UNALIGNED)
def attend(
    q, k, v, out, lse, sinks, cu_queries, cu_keys, lengths, table, starts, order_of, counters,
    base: tl.int64, reset, sequences, rows_q, rows_k, queries, keys, columns, shared_by, left, right, pages,
    stride_qb, stride_qr, stride_qh, stride_kb, stride_kr, stride_kh, stride_vb, stride_vr, stride_vh,
    stride_ob, stride_or, stride_oh, stride_lb, stride_lr, stride_lh, stride_table,
    queues, tiles, num_m, num_n, group, scale, inner,
    ROWS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, PACK: gl.constexpr, DIRECT: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, Q_HOW: gl.constexpr, Q_LANE: gl.constexpr, TURNED: gl.constexpr,
    VERSION: gl.constexpr, SHAPE: gl.constexpr, GROUPS: gl.constexpr, KIND: gl.constexpr, SPLIT: gl.constexpr,
    STEAL: gl.constexpr, ORDER: gl.constexpr, PAGE: gl.constexpr, TOP_LEFT: gl.constexpr, LEFT: gl.constexpr,
    RIGHT: gl.constexpr, CAPPED: gl.constexpr,
    FAR_Q: gl.constexpr, FAR_KEYS: gl.constexpr, FAR_OUT: gl.constexpr, GRAIN: gl.constexpr,
):  # fmt: skip
    """``out = softmax(mask(scale * q @ k^T)) @ v``, a workgroup a worker.

    Parameters
    ----------
    lse, sinks, cu_queries, cu_keys, lengths, table, starts, order_of, sequences, rows_q, rows_k, queries, keys
        As of `tilestream.kernels.hopper.attention.attend`; so are columns, shared_by, left, right, scale, inner, PACK.
    pages
        How many there are.
    K, V
        Forms of keys and of values: see `tilestream.kernels.cdna.attention_copy.copy_block`. Queries are cut as keys.
    Q_HOW, Q_LANE
        Swizzle of queries (vector, every, period), and elements of a lane in a copy past the registers.
    TURNED
        Whether values are transposed on their way through registers.
    GROUPS
        XCDs: neighbouring program ids are on different ones.
    GRAIN
        Neighbouring columns of the output that are one aligned vector.
    """
    WARPS: gl.constexpr = ROWS // SHAPE[0]
    MATH: gl.constexpr = math_layout(VERSION, SHAPE, (WARPS, 1))
    POSITIONS: gl.constexpr = ROWS // PACK
    V_PARTS: gl.constexpr = V[0]
    V_WIDTH: gl.constexpr = V[1]
    worker = gl.program_id(0)
    workers = gl.num_programs(0)
    if KIND == "static":
        worker = neighbour(worker, workers, GROUPS)
    one = tl.cast(1, tl.int32)
    zero = tl.cast(0, tl.int32)
    SCHEDULE: gl.constexpr = schedule_config(KIND, SPLIT, STEAL, ORDER)
    work = Work(one, num_m, num_n, one, tiles, zero, zero, queues, None, group, zero, one, zero)
    words = Words(counters, base, reset, None, zero, None, None)
    watch = Watch(worker, workers, reset, None, None, None)
    enter(work, words, worker, reset, KIND == "static", False)
    cursor = first_cursor()
    found = one
    while found != 0:
        found, item, cursor = take(cursor, work, words, watch, SCHEDULE)
        pm, pn = item.pm, item.pn
        (
            found, batch, first, head, _, origin, own_queries, origin_k, _, own_keys, begin, plain_begin,
            plain_end, end, until, since,
        ) = item_of(
            found, pm, pn, starts, order_of, sequences, cu_queries, cu_keys, lengths, rows_q, rows_k,
            queries, keys, columns, one, group, zero, zero, left, right, POSITIONS, BLOCK, False, TOP_LEFT, LEFT, RIGHT,
        )  # fmt: skip
        if found != 0:
            batch, first, head = uniform(batch), uniform(first), uniform(head)
            origin, own_queries, origin_k, own_keys = (
                uniform(origin), uniform(own_queries), uniform(origin_k), uniform(own_keys)
            )  # fmt: skip
            begin, plain_begin, plain_end, end = uniform(begin), uniform(plain_begin), uniform(plain_end), uniform(end)
            until, since = uniform(until), uniform(since)
            last = gl.minimum(own_queries - first, POSITIONS) - 1
            top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, MATH))
            total = gl.full([ROWS, 2], 0.0, gl.float32, pair_layout(WARPS))
            sums = ()
            for _part in gl.static_range(V_PARTS):
                sums += (gl.zeros([ROWS, V_WIDTH], gl.float32, MATH),)
            # Batches are dense: packed sequences lie one behind the other, and have a stride of 0; pages lie anywhere.
            at_row = (origin + first).to(tl.int64)
            at_batch = batch.to(tl.int64)
            if begin < end:
                # What some row of the tile sees.
                high = own_keys
                if RIGHT:
                    high = gl.minimum(own_keys, first + last + until)
                low = zero
                if LEFT:
                    low = gl.maximum(first + since, 0)
                at = q + at_batch * stride_qb + at_row * stride_qr + (head * PACK).to(tl.int64) * stride_qh
                parts = load_queries(
                    gl.multiple_of(at, 16), last, stride_qr, stride_qh, PACK, ROWS, K[0], K[1], K[2], DIRECT,
                    Q_LANE, Q_HOW, FAR_Q, MATH, WARPS,
                )  # fmt: skip
                head_kv = (head // shared_by).to(tl.int64)
                k_at = k + head_kv * stride_kh
                v_at = v + head_kv * stride_vh
                pages_of = table
                if PAGE > 0:
                    pages_of = table + at_batch * stride_table
                else:
                    k_at = k_at + at_batch * stride_kb + origin_k.to(tl.int64) * stride_kr
                    v_at = v_at + at_batch * stride_vb + origin_k.to(tl.int64) * stride_vr
                blocks = (begin, plain_begin, plain_end, end)
                mask = (first, own_keys, until, since)
                if DIRECT:
                    sums, top, total = attend_direct(
                        parts, sums, top, total, k_at, stride_kr, stride_kb, v_at, stride_vr, stride_vb, blocks,
                        (low, high), mask, pages_of, pages, scale, inner, ROWS, PACK, BLOCK, STAGES, K, V, PAGE, MATH,
                        LEFT, RIGHT, CAPPED, WARPS,
                    )  # fmt: skip
                else:
                    sums, top, total = attend_staged(
                        parts, sums, top, total, k_at, stride_kr, stride_kb, v_at, stride_vr, stride_vb, blocks,
                        (low, high), mask, pages_of, pages, scale, inner, ROWS, PACK, BLOCK, K, V, TURNED, PAGE,
                        FAR_KEYS, MATH, LEFT, RIGHT, CAPPED, WARPS,
                    )  # fmt: skip
            total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, MATH))
            # Not kept through the loops.
            row = gl.arange(0, ROWS, gl.SliceLayout(1, MATH)) + opaque_zero()
            factor, logs = finished(top, total, sinks, head * PACK, row, scale, PACK)
            if lse is not None:
                at = lse + at_batch * stride_lb + at_row * stride_lr + (head * PACK).to(tl.int64) * stride_lh
                gl.store(at + row // PACK * stride_lr + row % PACK * stride_lh, logs, mask=row // PACK <= last)
            at = out + at_batch * stride_ob + at_row * stride_or + (head * PACK).to(tl.int64) * stride_oh
            if GRAIN > 1:
                at = gl.multiple_of(at, 2 * GRAIN)
            store_tile(
                sums, factor, at, row, last, stride_or, stride_oh, PACK, V_PARTS, V_WIDTH,
                (V_PARTS - 1) * V_WIDTH + V[2], GRAIN, FAR_OUT, MATH,
            )  # fmt: skip
    leave(work, words, watch, KIND == "static")
