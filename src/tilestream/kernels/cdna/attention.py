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
wait need be for everything. Where values cannot be read across (gfx942), they are transposed on their way through
registers, and the exchange of a row's two lanes is a shuffle by way of LDS, one a block: gfx950 has an instruction.

The protocol is that of `tilestream.kernels.cdna.ring`; `tilestream.verify.shared_attention` explores it.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestream.kernels.cdna.attention_copy import (
    VECTOR,
    copied_columns,
    copy_block,
    fetch_block,
    fetched_columns,
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
    multiply_add,
    nothing,
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
from tilestream.kernels.hopper.attention_load import item_of
from tilestream.kernels.hopper.attention_softmax import finished
from tilestream.kernels.portable.schedule import enter, leave, take
from tilestream.schedule import queues as queues_

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
    queries, k_stages, stage, ROWS: gl.constexpr, BLOCK: gl.constexpr, PARTS: gl.constexpr, WIDTH: gl.constexpr,
    HOW: gl.constexpr, MATH: gl.constexpr, LANDED: gl.constexpr,
):  # fmt: skip
    """``Q K^T`` of an item's rows and a stage."""
    scores = gl.zeros([ROWS, BLOCK], gl.float32, MATH)
    for part in gl.static_range(PARTS):
        x = operand(k_stages[part].index(stage), BLOCK, WIDTH, True, HOW, 1, MATH, VECTOR, LANDED)
        scores = multiply_add(queries[part], x, scores, None)
    return scores


@gluon.jit
def add_values(
    sums, shrink, weights, v_stages, stage, BLOCK: gl.constexpr, PARTS: gl.constexpr, WIDTH: gl.constexpr,
    TURNED: gl.constexpr, HOW: gl.constexpr, MATH: gl.constexpr, LANDED: gl.constexpr,
):  # fmt: skip
    """The sums of an item's parts, ``shrink`` of them, and a stage's values by their weights."""
    made = ()
    for part in gl.static_range(PARTS):
        x = operand(v_stages[part].index(stage), WIDTH, BLOCK, TURNED, HOW, 1, MATH, KEYS, LANDED)
        made += (multiply_add(weights, x, sums[part] * shrink[:, None], None),)
    return made


@gluon.jit
def step_direct(
    block, last, stage, queries, sums, top, total, k, k_i, k_columns, k_stages, v, v_i, v_columns, v_stages,
    first_query, low, high, keys, until, since, scale, inner, stride_kr, stride_kp, stride_vr, stride_vp, table, pages,
    ROWS: gl.constexpr, PACK: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, K_PARTS: gl.constexpr,
    K_WIDTH: gl.constexpr, V_PARTS: gl.constexpr, V_WIDTH: gl.constexpr, K_HOW: gl.constexpr, V_HOW: gl.constexpr,
    K_LANE: gl.constexpr, V_LANE: gl.constexpr, PAGE: gl.constexpr, MATH: gl.constexpr, MASKED: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, CAPPED: gl.constexpr,
):  # fmt: skip
    """A key block that lies in ``stage``; and the copies of the one that is to come into the stage before it."""
    landed(STAGES - 2)
    scores = scores_of(queries, k_stages, stage, ROWS, BLOCK, K_PARTS, K_WIDTH, K_HOW, MATH, True)
    ahead = gl.minimum(block + STAGES - 1, last) * BLOCK
    page = page_of(ahead, table, pages, BLOCK, PAGE)
    free = before(stage, STAGES)
    copy_block(
        k, k_i, k_columns, ahead, low, high, stride_kr, table, pages, page, stride_kp, k_stages, free,
        K_WIDTH, BLOCK, PAGE, K_LANE,
    )  # fmt: skip
    copy_block(
        v, v_i, v_columns, ahead, low, high, stride_vr, table, pages, page, stride_vp, v_stages, free,
        V_WIDTH, BLOCK, PAGE, V_LANE,
    )  # fmt: skip
    commit()
    weights, top, total, shrink = weights_of(
        scores, top, total, first_query, block * BLOCK, keys, until, since, scale, inner, v_stages[0].dtype,
        PACK, MATH, MASKED, LEFT, RIGHT, CAPPED,
    )  # fmt: skip
    sums = add_values(sums, shrink, weights, v_stages, stage, BLOCK, V_PARTS, V_WIDTH, False, V_HOW, MATH, True)
    return sums, top, total, after(stage, STAGES)


@gluon.jit
def attend_direct(
    queries, sums, top, total, k, v, first_query, begin, plain_begin, plain_end, end, low, high, keys, until, since,
    scale, inner, stride_kr, stride_kp, stride_vr, stride_vp, table, pages, ROWS: gl.constexpr, PACK: gl.constexpr,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, K_PARTS: gl.constexpr, K_WIDTH: gl.constexpr, V_PARTS: gl.constexpr,
    V_WIDTH: gl.constexpr, K_HOW: gl.constexpr, V_HOW: gl.constexpr, K_LANE: gl.constexpr, V_LANE: gl.constexpr,
    PAGE: gl.constexpr, MATH: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, CAPPED: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """An item's key blocks by copies past the registers: ``(sums, top, total)``."""
    k_stages = make_parts(k.dtype.element_ty, K_PARTS, STAGES, BLOCK, K_WIDTH, True)
    v_stages = make_parts(v.dtype.element_ty, V_PARTS, STAGES, BLOCK, V_WIDTH, True)
    k_i, k_j = indices(copy_layout(K_WIDTH, K_LANE, WARPS), BLOCK, K_WIDTH)
    v_i, v_j = indices(copy_layout(V_WIDTH, V_LANE, WARPS), BLOCK, V_WIDTH)
    k_columns = copied_columns(k_i, k_j, K_HOW)
    v_columns = copied_columns(v_i, v_j, V_HOW)
    last = end - 1
    for i in gl.static_range(STAGES - 1):
        first = gl.minimum(begin + i, last) * BLOCK
        page = page_of(first, table, pages, BLOCK, PAGE)
        copy_block(
            k, k_i, k_columns, first, low, high, stride_kr, table, pages, page, stride_kp, k_stages, i,
            K_WIDTH, BLOCK, PAGE, K_LANE,
        )  # fmt: skip
        copy_block(
            v, v_i, v_columns, first, low, high, stride_vr, table, pages, page, stride_vp, v_stages, i,
            V_WIDTH, BLOCK, PAGE, V_LANE,
        )  # fmt: skip
        commit()
    stage = tl.cast(0, tl.int32)
    if LEFT:
        for block in range(begin, plain_begin):
            sums, top, total, stage = step_direct(
                block, last, stage, queries, sums, top, total, k, k_i, k_columns, k_stages, v, v_i, v_columns, v_stages,
                first_query, low, high, keys, until, since, scale, inner, stride_kr, stride_kp, stride_vr, stride_vp,
                table, pages, ROWS, PACK, BLOCK, STAGES, K_PARTS, K_WIDTH, V_PARTS, V_WIDTH, K_HOW, V_HOW, K_LANE,
                V_LANE, PAGE, MATH, True, LEFT, RIGHT, CAPPED,
            )  # fmt: skip
    for block in range(plain_begin, plain_end):
        sums, top, total, stage = step_direct(
            block, last, stage, queries, sums, top, total, k, k_i, k_columns, k_stages, v, v_i, v_columns, v_stages,
            first_query, low, high, keys, until, since, scale, inner, stride_kr, stride_kp, stride_vr, stride_vp, table,
            pages, ROWS, PACK, BLOCK, STAGES, K_PARTS, K_WIDTH, V_PARTS, V_WIDTH, K_HOW, V_HOW, K_LANE, V_LANE, PAGE,
            MATH, False, LEFT, RIGHT, CAPPED,
        )  # fmt: skip
    for block in range(plain_end, end):
        sums, top, total, stage = step_direct(
            block, last, stage, queries, sums, top, total, k, k_i, k_columns, k_stages, v, v_i, v_columns, v_stages,
            first_query, low, high, keys, until, since, scale, inner, stride_kr, stride_kp, stride_vr, stride_vp, table,
            pages, ROWS, PACK, BLOCK, STAGES, K_PARTS, K_WIDTH, V_PARTS, V_WIDTH, K_HOW, V_HOW, K_LANE, V_LANE, PAGE,
            MATH, True, LEFT, RIGHT, CAPPED,
        )  # fmt: skip
    # The copies of blocks behind the last one have landed, and everybody has read: the room is free.
    landed(0)
    barrier()
    return sums, top, total


@gluon.jit
def step_staged(
    block, last, queries, sums, top, total, k_tiles, v_tiles, k, k_i, k_columns, k_rest, k_stages, v, v_i, v_columns,
    v_rest, v_stages, first_query, low, high, keys, until, since, scale, inner, stride_kr, stride_kp, stride_vr,
    stride_vp, table, pages, ROWS: gl.constexpr, PACK: gl.constexpr, BLOCK: gl.constexpr, K_PARTS: gl.constexpr,
    K_WIDTH: gl.constexpr, K_REST: gl.constexpr, V_PARTS: gl.constexpr, V_WIDTH: gl.constexpr, K_HOW: gl.constexpr,
    V_HOW: gl.constexpr, V_LANE: gl.constexpr, TURNED: gl.constexpr, PAGE: gl.constexpr, FAR: gl.constexpr,
    MATH: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, CAPPED: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """A key block that has been fetched into registers; and the next one's fetches."""
    ahead = gl.minimum(block + 1, last) * BLOCK
    page = page_of(ahead, table, pages, BLOCK, PAGE)
    put_keys(k_tiles, k_stages, K_PARTS, K_WIDTH, BLOCK, K_REST, K_HOW, WARPS)
    k_tiles = fetch_block(
        k, k_i, k_columns, k_rest, ahead, low, high, stride_kr, table, pages, page, stride_kp,
        K_PARTS, K_WIDTH, BLOCK, PAGE, VECTOR, FAR,
    )  # fmt: skip
    scores = scores_of(queries, k_stages, 0, ROWS, BLOCK, K_PARTS, K_WIDTH, K_HOW, MATH, False)
    weights, top, total, shrink = weights_of(
        scores, top, total, first_query, block * BLOCK, keys, until, since, scale, inner, v_stages[0].dtype,
        PACK, MATH, MASKED, LEFT, RIGHT, CAPPED,
    )  # fmt: skip
    put_values(v_tiles, v_stages, V_PARTS, V_WIDTH, BLOCK, TURNED, V_HOW)
    v_tiles = fetch_block(
        v, v_i, v_columns, v_rest, ahead, low, high, stride_vr, table, pages, page, stride_vp,
        V_PARTS, V_WIDTH, BLOCK, PAGE, V_LANE, FAR,
    )  # fmt: skip
    sums = add_values(sums, shrink, weights, v_stages, 0, BLOCK, V_PARTS, V_WIDTH, TURNED, V_HOW, MATH, False)
    return sums, top, total, k_tiles, v_tiles


@gluon.jit
def attend_staged(
    queries, sums, top, total, k, v, first_query, begin, plain_begin, plain_end, end, low, high, keys, until, since,
    scale, inner, stride_kr, stride_kp, stride_vr, stride_vp, table, pages, ROWS: gl.constexpr, PACK: gl.constexpr,
    BLOCK: gl.constexpr, K_PARTS: gl.constexpr, K_WIDTH: gl.constexpr, K_REST: gl.constexpr, V_PARTS: gl.constexpr,
    V_WIDTH: gl.constexpr, V_REST: gl.constexpr, K_HOW: gl.constexpr, V_HOW: gl.constexpr, TURNED: gl.constexpr,
    PAGE: gl.constexpr, FAR: gl.constexpr, MATH: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    CAPPED: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """An item's key blocks by way of registers: ``(sums, top, total)``."""
    K_LAYOUT: gl.constexpr = fetch_layout(BLOCK, K_WIDTH, True, False, VECTOR, WARPS)
    V_LAYOUT: gl.constexpr = fetch_layout(V_WIDTH, BLOCK, False, TURNED, VECTOR, WARPS)
    V_LANE: gl.constexpr = V_LAYOUT.size_per_thread[1]
    k_stages = make_parts(k.dtype.element_ty, K_PARTS, 1, BLOCK, K_WIDTH, True)
    v_stages = make_parts(v.dtype.element_ty, V_PARTS, 1, V_WIDTH, BLOCK, TURNED)
    k_i, k_j = indices(K_LAYOUT, BLOCK, K_WIDTH)
    v_i, v_j = indices(V_LAYOUT, BLOCK, V_WIDTH)
    k_columns = fetched_columns(k_i, k_j, K_WIDTH, K_WIDTH)
    k_rest = fetched_columns(k_i, k_j, K_REST, K_WIDTH)
    v_columns = fetched_columns(v_i, v_j, V_WIDTH, V_WIDTH)
    v_rest = fetched_columns(v_i, v_j, V_REST, V_WIDTH)
    last = end - 1
    page = page_of(begin * BLOCK, table, pages, BLOCK, PAGE)
    k_tiles = fetch_block(
        k, k_i, k_columns, k_rest, begin * BLOCK, low, high, stride_kr, table, pages, page, stride_kp,
        K_PARTS, K_WIDTH, BLOCK, PAGE, VECTOR, FAR,
    )  # fmt: skip
    v_tiles = fetch_block(
        v, v_i, v_columns, v_rest, begin * BLOCK, low, high, stride_vr, table, pages, page, stride_vp,
        V_PARTS, V_WIDTH, BLOCK, PAGE, V_LANE, FAR,
    )  # fmt: skip
    if LEFT:
        for block in range(begin, plain_begin):
            sums, top, total, k_tiles, v_tiles = step_staged(
                block, last, queries, sums, top, total, k_tiles, v_tiles, k, k_i, k_columns, k_rest, k_stages, v, v_i,
                v_columns, v_rest, v_stages, first_query, low, high, keys, until, since, scale, inner, stride_kr,
                stride_kp, stride_vr, stride_vp, table, pages, ROWS, PACK, BLOCK, K_PARTS, K_WIDTH, K_REST, V_PARTS,
                V_WIDTH, K_HOW, V_HOW, V_LANE, TURNED, PAGE, FAR, MATH, True, LEFT, RIGHT, CAPPED, WARPS,
            )  # fmt: skip
    for block in range(plain_begin, plain_end):
        sums, top, total, k_tiles, v_tiles = step_staged(
            block, last, queries, sums, top, total, k_tiles, v_tiles, k, k_i, k_columns, k_rest, k_stages, v, v_i,
            v_columns, v_rest, v_stages, first_query, low, high, keys, until, since, scale, inner, stride_kr, stride_kp,
            stride_vr, stride_vp, table, pages, ROWS, PACK, BLOCK, K_PARTS, K_WIDTH, K_REST, V_PARTS, V_WIDTH, K_HOW,
            V_HOW, V_LANE, TURNED, PAGE, FAR, MATH, False, LEFT, RIGHT, CAPPED, WARPS,
        )  # fmt: skip
    for block in range(plain_end, end):
        sums, top, total, k_tiles, v_tiles = step_staged(
            block, last, queries, sums, top, total, k_tiles, v_tiles, k, k_i, k_columns, k_rest, k_stages, v, v_i,
            v_columns, v_rest, v_stages, first_query, low, high, keys, until, since, scale, inner, stride_kr, stride_kp,
            stride_vr, stride_vp, table, pages, ROWS, PACK, BLOCK, K_PARTS, K_WIDTH, K_REST, V_PARTS, V_WIDTH, K_HOW,
            V_HOW, V_LANE, TURNED, PAGE, FAR, MATH, True, LEFT, RIGHT, CAPPED, WARPS,
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
    K_PARTS: gl.constexpr, K_WIDTH: gl.constexpr, K_REST: gl.constexpr, V_PARTS: gl.constexpr, V_WIDTH: gl.constexpr,
    V_REST: gl.constexpr, Q_HOW: gl.constexpr, K_HOW: gl.constexpr, V_HOW: gl.constexpr, Q_LANE: gl.constexpr,
    K_LANE: gl.constexpr, V_LANE: gl.constexpr, TURNED: gl.constexpr, VERSION: gl.constexpr, SHAPE: gl.constexpr,
    GROUPS: gl.constexpr, KIND: gl.constexpr, SPLIT: gl.constexpr, STEAL: gl.constexpr, ORDER: gl.constexpr,
    PAGE: gl.constexpr, TOP_LEFT: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, CAPPED: gl.constexpr,
    FAR_Q: gl.constexpr, FAR_KEYS: gl.constexpr, FAR_OUT: gl.constexpr, GRAIN: gl.constexpr,
):  # fmt: skip
    """``out = softmax(mask(scale * q @ k^T)) @ v``, a workgroup a worker.

    Parameters
    ----------
    lse, sinks, cu_queries, cu_keys, lengths, table, starts, order_of, sequences, rows_q, rows_k, queries, keys
        As of `tilestream.kernels.hopper.attention.attend`; so are columns, shared_by, left, right, scale, inner, PACK.
    pages
        How many there are.
    K_PARTS, K_WIDTH, K_REST
        Parts of the columns of queries and keys; columns of one, and those of the last that there are. Likewise V's.
    Q_HOW, K_HOW, V_HOW, Q_LANE, K_LANE, V_LANE
        Swizzles (vector, every, period), and elements of a lane in a copy past the registers.
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
    worker = gl.program_id(0)
    workers = gl.num_programs(0)
    if KIND == "static":
        worker = neighbour(worker, workers, GROUPS)
    one = tl.cast(1, tl.int32)
    zero = tl.cast(0, tl.int32)
    enter(counters, base, worker, queues, reset, KIND == "static", False)
    ticket, home_open = zero, one
    found = one
    while found != 0:
        found, _, pm, pn, _, _, _, _, _, ticket, home_open, _, _, _, _ = take(
            worker, workers, ticket, home_open, zero, zero, zero,
            counters, base, queues, one, num_m, num_n, one, tiles, zero, zero, None, group, zero, one, zero,
            None, zero, zero, KIND, SPLIT, STEAL, ORDER, False, False,
        )  # fmt: skip
        (
            found, batch, first, head, origin, own_queries, origin_k, _, own_keys, begin, plain_begin,
            plain_end, end, until, since,
        ) = item_of(
            found, pm, pn, starts, order_of, sequences, cu_queries, cu_keys, lengths, rows_q, rows_k,
            queries, keys, columns, group, zero, zero, left, right, POSITIONS, BLOCK, TOP_LEFT, LEFT, RIGHT,
        )  # fmt: skip
        if found != 0:
            batch, first, head = uniform(batch), uniform(first), uniform(head)
            origin, own_queries, origin_k, own_keys = (
                uniform(origin), uniform(own_queries), uniform(origin_k), uniform(own_keys)
            )  # fmt: skip
            begin, plain_begin, plain_end, end = uniform(begin), uniform(plain_begin), uniform(plain_end), uniform(end)
            until, since = uniform(until), uniform(since)
            last = gl.minimum(own_queries - first, POSITIONS) - 1
            row = gl.arange(0, ROWS, gl.SliceLayout(1, MATH)) + nothing()
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
                    gl.multiple_of(at, 16), last, stride_qr, stride_qh, PACK, ROWS, K_PARTS, K_WIDTH, K_REST, DIRECT,
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
                if DIRECT:
                    sums, top, total = attend_direct(
                        parts, sums, top, total, k_at, v_at, first, begin, plain_begin, plain_end, end, low, high,
                        own_keys, until, since, scale, inner, stride_kr, stride_kb, stride_vr, stride_vb, pages_of,
                        pages, ROWS, PACK, BLOCK, STAGES, K_PARTS, K_WIDTH, V_PARTS, V_WIDTH, K_HOW, V_HOW, K_LANE,
                        V_LANE, PAGE, MATH, LEFT, RIGHT, CAPPED, WARPS,
                    )  # fmt: skip
                else:
                    sums, top, total = attend_staged(
                        parts, sums, top, total, k_at, v_at, first, begin, plain_begin, plain_end, end, low, high,
                        own_keys, until, since, scale, inner, stride_kr, stride_kb, stride_vr, stride_vb, pages_of,
                        pages, ROWS, PACK, BLOCK, K_PARTS, K_WIDTH, K_REST, V_PARTS, V_WIDTH, V_REST, K_HOW, V_HOW,
                        TURNED, PAGE, FAR_KEYS, MATH, LEFT, RIGHT, CAPPED, WARPS,
                    )  # fmt: skip
            total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, MATH))
            # Once more, and not kept through the loops.
            row = gl.arange(0, ROWS, gl.SliceLayout(1, MATH)) + nothing()
            factor, logs = finished(top, total, sinks, head * PACK, row, scale, PACK)
            if lse is not None:
                at = lse + at_batch * stride_lb + at_row * stride_lr + (head * PACK).to(tl.int64) * stride_lh
                gl.store(at + row // PACK * stride_lr + row % PACK * stride_lh, logs, mask=row // PACK <= last)
            at = out + at_batch * stride_ob + at_row * stride_or + (head * PACK).to(tl.int64) * stride_oh
            if GRAIN > 1:
                at = gl.multiple_of(at, 2 * GRAIN)
            store_tile(
                sums, factor, at, row, last, stride_or, stride_oh, PACK, V_PARTS, V_WIDTH,
                (V_PARTS - 1) * V_WIDTH + V_REST, GRAIN, FAR_OUT, MATH,
            )  # fmt: skip
    leave(counters, queues, reset, workers, KIND == "static")
