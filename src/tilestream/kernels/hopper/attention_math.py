"""The math warps of attention: consumers of 64 rows each, which multiply and weigh what the load warp brings.

A consumer's block of scores is multiplied while it weighs the one before, in registers throughout; masked blocks, plain
ones and those of a window's edge are loops of their own. See `tilestream.kernels.hopper.attention` for the whole.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from tilestream.kernels.hopper.attention_load import VOID, place
from tilestream.kernels.hopper.attention_softmax import (
    as_operand,
    capped,
    carried,
    finished,
    masked,
    peaks,
    shrunk,
    weighed,
)
from tilestream.kernels.hopper.compat import barrier, device, tma_store, viewed
from tilestream.kernels.hopper.epilogue import mma_layout, pending, strip_of
from tilestream.kernels.hopper.ring import ITEMS, get, step
from tilestream.kernels.portable.spans import end_span
from tilestream.schedule import attention as rules

blocks_of_part = device(rules.blocks_of_part)

#: Rows of a consumer.
ROWS: gl.constexpr = gl.constexpr(64)


@gluon.jit
def start_scores(q_parts, k_parts, q_at, stage, PARTS: gl.constexpr, BLOCK: gl.constexpr):
    """Start ``Q K^T`` of an item's rows and a stage: a multiplication for each part of the head's columns."""
    scores = gl.zeros((ROWS, BLOCK), gl.float32, mma_layout(BLOCK, 256 // q_parts.dtype.primitive_bitwidth))
    for part in gl.static_range(PARTS):
        scores = warpgroup_mma(
            q_parts.index(q_at * PARTS + part), k_parts.index(stage * PARTS + part).permute((1, 0)), scores,
            is_async=True, use_acc=part > 0,
        )  # fmt: skip
    return scores


@gluon.jit
def settled(scores, inner, BLOCK: gl.constexpr, CAPPED: gl.constexpr, SCALED: gl.constexpr):
    """Scores that are done, capped, or multiplied by what their heads' scales are; no data moves."""
    scores = gl.convert_layout(scores, mma_layout(BLOCK), assert_trivial=True)
    if CAPPED:
        scores = capped(scores, inner)
    elif SCALED:
        scores = scores * inner
    return scores


@gluon.jit
def math_step(
    q_parts, k_parts, v_stages, q_at, k_full, k_empty, v_full, v_empty, order, stage, phase, turn, o, p, top, total,
    position, first_key, keys, until, since, scale, inner,
    WHO: gl.constexpr, CONSUMERS: gl.constexpr, PARTS: gl.constexpr, BLOCK: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, CAPPED: gl.constexpr,
    ORDERED: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """A key block that is not an item's first: its scores, and meanwhile the block before it times V.

    ``stage`` and ``phase`` are those of the block before, whose weights are ``p``, as `carried`.
    """
    next_stage, next_phase = step(stage, phase, STAGES)
    mbarrier.wait(k_full.index(next_stage), next_phase)
    if ORDERED:
        # A barrier that is new is in phase 0: the consumer that begins waits for the phase "before" it.
        mbarrier.wait(order.index(WHO), turn ^ (WHO == 0))
    scores = start_scores(q_parts, k_parts, q_at, next_stage, PARTS, BLOCK)
    mbarrier.wait(v_full.index(stage), phase)
    factors = as_operand(p, COLUMNS, v_stages.dtype)
    product = warpgroup_mma(factors, v_stages.index(stage), o, is_async=True)
    if ORDERED:
        mbarrier.arrive(order.index((WHO + 1) % CONSUMERS))
    scores = warpgroup_mma_wait(1, (scores,))
    mbarrier.arrive(k_empty.index(next_stage))
    scores = settled(scores, inner, BLOCK, CAPPED, SCALED)
    if MASKED:
        scores = masked(scores, position, first_key, keys, until, since, BLOCK, LEFT, RIGHT)
    # Wherever that is said, the compiler waits for the product before most of the exponentials, and scales O under
    # them. Held back behind them, by a branch, launches took 4 % longer.
    LAZILY: gl.constexpr = COLUMNS > 128
    top, shift, shrink = peaks(scores, top, scale, MASKED, LAZILY)
    o, _ = warpgroup_mma_wait(0, (product, factors))
    mbarrier.arrive(v_empty.index(stage))
    o = shrunk(o, shrink, COLUMNS, LAZILY)
    weights, total = weighed(scores, total, scale, shift, shrink)
    return o, carried(weights, COLUMNS, v_stages.dtype, LEFT or CAPPED), top, total, next_stage, next_phase, turn ^ 1


@gluon.jit
def own_blocks(
    first, low, high, keys, until, since, POSITIONS: gl.constexpr, BLOCK: gl.constexpr, LEFT: gl.constexpr
):  # fmt: skip
    """Of a tile's key blocks ``low`` to ``high`` those of a consumer's rows, in three runs; ``POSITIONS`` are theirs.

    ``until`` and ``since`` have signs: see `masked`.

    Returns
    -------
    (begin, plain_begin, plain_end, last)
        As of `tilestream.schedule.attention.blocks_of_part`; ``last`` is a block.
    """
    at = first + (POSITIONS - 1)
    from_first = tl.cast(0, tl.int32)
    from_last = from_first
    if LEFT:
        from_first = gl.maximum(first + since, 0)
        from_last = gl.maximum(at + since, 0)
    until_first = gl.maximum(gl.minimum(first + until, keys), 0)
    until_last = gl.maximum(gl.minimum(at + until, keys), 0)
    begin, plain_begin, plain_end, end = blocks_of_part(
        low, high + 1, from_first, from_last, until_first, until_last, BLOCK
    )  # fmt: skip
    return begin, plain_begin, plain_end, end - 1


@gluon.jit
def leave_out(
    blocks, k_full, k_empty, v_full, v_empty, order, stage, phase, turn,
    WHO: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Give back stages of key blocks that none of the consumer's rows sees, and its turns at them.

    They are waited for, so that what is given back is this round of the ring's, and not the one before's.
    """
    for _ in range(blocks):
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.arrive(k_empty.index(stage))
        if ORDERED:
            mbarrier.wait(order.index(WHO), turn ^ (WHO == 0))
            mbarrier.arrive(order.index((WHO + 1) % CONSUMERS))
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(v_empty.index(stage))
        stage, phase = step(stage, phase, STAGES)
        turn = turn ^ 1
    return stage, phase, turn


@gluon.jit
def store_strip(out_map, buffer, x, at, PENDING: gl.constexpr):
    """A strip of the output, by TMA, which stores no row that the sequence does not have.

    ``PENDING``: stores that may still be under way when ``buffer`` is written.
    """
    tma.store_wait(PENDING)
    buffer.store(x.to(out_map.dtype))
    fence_async_shared()
    tma_store(out_map, at, viewed(buffer, out_map))


@gluon.jit
def math_loop(
    WHO: gl.constexpr, q_parts, k_parts, v_stages, out_map, out_buffers,
    q_full, q_empty, k_full, k_empty, v_full, v_empty, slots, item_full, item_empty, order,
    lse, sinks, scale, inner,
    CONSUMERS: gl.constexpr, PACK: gl.constexpr, PARTS: gl.constexpr, BLOCK: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr, QUERIES: gl.constexpr, STRIP: gl.constexpr, BUFFERS: gl.constexpr, RAGGED_Q: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, CAPPED: gl.constexpr, OWN: gl.constexpr, ORDERED: gl.constexpr,
    ARRIVING: gl.constexpr, CHAINED: gl.constexpr, log, places, TRACE: gl.constexpr, scales, SCALED: gl.constexpr,
):  # fmt: skip
    """A consumer: 64 rows of each tile. Of keys that arrive blocks are taken from the first on, else from the last.

    ``OWN``: it leaves out blocks that none of its rows sees.
    """
    if CHAINED:
        gdc_wait()
    out_layout: gl.constexpr = mma_layout(COLUMNS)
    rows_layout: gl.constexpr = gl.SliceLayout(1, mma_layout(BLOCK))
    row = gl.arange(0, ROWS, rows_layout)
    stage = tl.cast(0, tl.int32)
    phase = tl.cast(0, tl.int32)
    slot = tl.cast(0, tl.int32)
    slot_phase = tl.cast(0, tl.int32)
    q_stage = tl.cast(0, tl.int32)
    q_phase = tl.cast(0, tl.int32)
    turn = tl.cast(0, tl.int32)
    going = tl.cast(1, tl.int32)
    while going != 0:
        mbarrier.wait(item_full.index(slot), slot_phase)
        going = get(slots, slot, 0, 4)  # key blocks, and one more
        if going != 0:
            first = get(slots, slot, 1, 4) + WHO * (ROWS // PACK)
            position = first + row // PACK
            top = gl.full([ROWS], float("-inf"), gl.float32, rows_layout)
            total = gl.full([ROWS], 0.0, gl.float32, rows_layout)
            o = gl.zeros((ROWS, COLUMNS), gl.float32, out_layout)
            inside = inner
            if SCALED:
                inside = get(scales, slot, 0, 4).to(gl.float32, bitcast=True)
                if CAPPED:
                    inside = inside * inner
            q_at = WHO * QUERIES + q_stage
            mbarrier.wait(q_full.index(q_at), q_phase)
            if going > 1:
                begin = get(slots, slot, 2, 4)
                last = begin + going - 2
                plain_begin = get(slots, slot, 3, 4)
                plain_end = get(slots, slot, 4, 4)
                keys = get(slots, slot, 5, 4)
                until = get(slots, slot, 6, 4)
                since = get(slots, slot, 7, 4)
                if OWN:
                    of_tile = begin if ARRIVING else last
                    begin, plain_begin, plain_end, last = own_blocks(
                        first, begin, last, keys, until, since, ROWS // PACK, BLOCK, LEFT
                    )  # fmt: skip
                    if LEFT if ARRIVING else RIGHT:
                        stage, phase, turn = leave_out(
                            begin - of_tile if ARRIVING else of_tile - last, k_full, k_empty, v_full, v_empty, order,
                            stage, phase, turn, WHO, CONSUMERS, STAGES, ORDERED,
                        )  # fmt: skip
                mbarrier.wait(k_full.index(stage), phase)
                scores = warpgroup_mma_wait(0, (start_scores(q_parts, k_parts, q_at, stage, PARTS, BLOCK),))
                mbarrier.arrive(k_empty.index(stage))
                scores = settled(scores, inside, BLOCK, CAPPED, SCALED)
                first_block = begin if ARRIVING else last
                if (first_block >= plain_end) | (first_block < plain_begin):
                    scores = masked(scores, position, first_block * BLOCK, keys, until, since, BLOCK, LEFT, RIGHT)
                top, shift, shrink = peaks(scores, top, scale, True, False)
                weights, total = weighed(scores, total, scale, shift, shrink)
                p = carried(weights, COLUMNS, v_stages.dtype, LEFT or CAPPED)
                if ARRIVING:
                    plain_begin = gl.maximum(plain_begin, begin + 1)
                    plain_end = gl.maximum(plain_end, plain_begin)
                    if LEFT:
                        for j in range(begin + 1, plain_begin):
                            o, p, top, total, stage, phase, turn = math_step(
                                q_parts, k_parts, v_stages, q_at, k_full, k_empty, v_full, v_empty, order, stage,
                                phase, turn, o, p, top, total, position, j * BLOCK, keys, until, since, scale, inside,
                                WHO, CONSUMERS, PARTS, BLOCK, COLUMNS, STAGES, True, LEFT, RIGHT, CAPPED, ORDERED,
                                SCALED,
                            )  # fmt: skip
                else:
                    plain_begin = gl.minimum(plain_begin, last)
                    plain_end = gl.minimum(plain_end, last)
                    if RIGHT:
                        for j in range(plain_end, last):
                            o, p, top, total, stage, phase, turn = math_step(
                                q_parts, k_parts, v_stages, q_at, k_full, k_empty, v_full, v_empty, order, stage,
                                phase, turn, o, p, top, total, position, (last - 1 - (j - plain_end)) * BLOCK, keys,
                                until, since, scale, inside,
                                WHO, CONSUMERS, PARTS, BLOCK, COLUMNS, STAGES, True, LEFT, RIGHT, CAPPED, ORDERED,
                                SCALED,
                            )  # fmt: skip
                for _ in range(plain_begin, plain_end):
                    o, p, top, total, stage, phase, turn = math_step(
                        q_parts, k_parts, v_stages, q_at, k_full, k_empty, v_full, v_empty, order, stage, phase, turn,
                        o, p, top, total, position, 0, keys, until, since, scale, inside,
                        WHO, CONSUMERS, PARTS, BLOCK, COLUMNS, STAGES, False, LEFT, RIGHT, CAPPED, ORDERED, SCALED,
                    )  # fmt: skip
                if ARRIVING:
                    for j in range(plain_end, last + 1):
                        o, p, top, total, stage, phase, turn = math_step(
                            q_parts, k_parts, v_stages, q_at, k_full, k_empty, v_full, v_empty, order, stage, phase,
                            turn, o, p, top, total, position, j * BLOCK, keys, until, since, scale, inside,
                            WHO, CONSUMERS, PARTS, BLOCK, COLUMNS, STAGES, True, LEFT, RIGHT, CAPPED, ORDERED, SCALED,
                        )  # fmt: skip
                elif LEFT:
                    for j in range(begin, plain_begin):
                        o, p, top, total, stage, phase, turn = math_step(
                            q_parts, k_parts, v_stages, q_at, k_full, k_empty, v_full, v_empty, order, stage, phase,
                            turn, o, p, top, total, position, (plain_begin - 1 - (j - begin)) * BLOCK, keys, until,
                            since, scale, inside,
                            WHO, CONSUMERS, PARTS, BLOCK, COLUMNS, STAGES, True, LEFT, RIGHT, CAPPED, ORDERED, SCALED,
                        )  # fmt: skip
                mbarrier.arrive(q_empty.index(q_at))
                mbarrier.wait(v_full.index(stage), phase)
                factors = as_operand(p, COLUMNS, v_stages.dtype)
                o = warpgroup_mma_wait(0, (warpgroup_mma(factors, v_stages.index(stage), o, is_async=True),))
                mbarrier.arrive(v_empty.index(stage))
                stage, phase = step(stage, phase, STAGES)
                if OWN and (RIGHT if ARRIVING else LEFT):
                    of_tile = get(slots, slot, 2, 4)
                    stage, phase, turn = leave_out(
                        of_tile + going - 2 - last if ARRIVING else begin - of_tile, k_full, k_empty, v_full, v_empty,
                        order, stage, phase, turn, WHO, CONSUMERS, STAGES, ORDERED,
                    )  # fmt: skip
            else:
                mbarrier.arrive(q_empty.index(q_at))
            q_stage, q_phase = step(q_stage, q_phase, QUERIES)
            # What only the epilogue needs is read when there are registers for it: until then the slot is kept.
            if q_parts.dtype.primitive_bitwidth == 8:  # of which there are fewer with warps that convert values
                first = get(slots, slot, 1, 4) + WHO * (ROWS // PACK)
                position = first + row // PACK
            head = get(slots, slot, 8, 4)
            batch = get(slots, slot, 9, 4)
            origin = get(slots, slot, 10, 4)
            queries = get(slots, slot, 11, 4)
            factor, sum_ = finished(top, total, sinks, head, row, scale, PACK)
            if SCALED:
                factor = factor * get(scales, slot, 1, 4).to(gl.float32, bitcast=True)
            if ARRIVING:
                void = get(slots, slot, VOID, 4) != 0
                factor = gl.where(void, float("nan"), factor)
                sum_ = gl.where(void, float("nan"), sum_)
            if lse is not None:
                at = lse + get(slots, slot, 12, 4) + position * get(slots, slot, 13, 4)
                gl.store(at + row % PACK * get(slots, slot, 14, 4), sum_, mask=position < queries)
            o = o * gl.convert_layout(factor, gl.SliceLayout(1, out_layout))[:, None]
            for i in gl.static_range(COLUMNS // STRIP):
                store_strip(
                    out_map, out_buffers.index(WHO * BUFFERS + i % BUFFERS),
                    strip_of((o,), i * STRIP, (COLUMNS,), STRIP, ROWS),
                    place(batch, origin, queries, first, head, i * STRIP, RAGGED_Q),
                    pending(i, COLUMNS // STRIP, BUFFERS),
                )  # fmt: skip
            if TRACE:
                whole = going != 0
                if ARRIVING:
                    whole = get(slots, slot, VOID, 4) == 0
                barrier()
                end_span(log, get(places, slot, 0, 4), WHO, whole)
        mbarrier.arrive(item_empty.index(slot))
        slot, slot_phase = step(slot, slot_phase, ITEMS)
    tma.store_wait(0)
