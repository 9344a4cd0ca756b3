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

from tilestream.core import attention as rules
from tilestream.kernels.device.trace import end_span
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
from tilestream.kernels.hopper.parts import At, Mask, Sums
from tilestream.kernels.hopper.ring import ITEMS, get, step

blocks_of_part = device(rules.blocks_of_part)

#: Rows of a consumer.
ROWS: gl.constexpr = gl.constexpr(64)


@gluon.jit
def start_scores(ring, q_at, stage, C: gl.constexpr):
    """Start ``Q K^T`` of an item's rows and a stage: a multiplication for each part of the head's columns."""
    scores = gl.zeros((ROWS, C.BLOCK), gl.float32, mma_layout(C.BLOCK, 256 // ring.q.dtype.primitive_bitwidth))
    for part in gl.static_range(C.PARTS):
        scores = warpgroup_mma(
            ring.q.index(q_at * C.PARTS + part), ring.k.index(stage * C.PARTS + part).permute((1, 0)), scores,
            is_async=True, use_acc=part > 0,
        )  # fmt: skip
    return scores


@gluon.jit
def settled(scores, inner, C: gl.constexpr):
    """Scores that are done, capped, or multiplied by what their heads' scales are; no data moves."""
    scores = gl.convert_layout(scores, mma_layout(C.BLOCK), assert_trivial=True)
    if C.CAPPED:
        scores = capped(scores, inner)
    elif C.SCALED:
        scores = scores * inner
    return scores


@gluon.jit
def masked_by(scores, mask, block, C: gl.constexpr):
    """Scores of a key block, -inf where a row does not see the key."""
    return masked(scores, mask.position, block * C.BLOCK, mask.keys, mask.until, mask.since, C.BLOCK, C.LEFT, C.RIGHT)


@gluon.jit
def math_step(ring, order, at, q_at, sums, mask, block, scale, inner, WHO: gl.constexpr, MASKED: gl.constexpr,
              C: gl.constexpr):  # fmt: skip
    """A key block that is not an item's first: its scores, and meanwhile the block before it times V.

    ``at`` is the place of the block before, whose weights are ``sums.p``, as `carried`.
    """
    stage, phase = step(at.stage, at.phase, C.STAGES)
    mbarrier.wait(ring.k_full.index(stage), phase)
    if C.ORDERED:
        # A barrier that is new is in phase 0: the consumer that begins waits for the phase "before" it.
        mbarrier.wait(order.index(WHO), at.turn ^ (WHO == 0))
    scores = start_scores(ring, q_at, stage, C)
    mbarrier.wait(ring.v_full.index(at.stage), at.phase)
    factors = as_operand(sums.p, C.COLUMNS, ring.v.dtype)
    product = warpgroup_mma(factors, ring.v.index(at.stage), sums.o, is_async=True)
    if C.ORDERED:
        mbarrier.arrive(order.index((WHO + 1) % C.CONSUMERS))
    scores = warpgroup_mma_wait(1, (scores,))
    mbarrier.arrive(ring.k_empty.index(stage))
    scores = settled(scores, inner, C)
    if MASKED:
        scores = masked_by(scores, mask, block, C)
    # Wherever that is said, the compiler waits for the product before most of the exponentials, and scales O under
    # them. Held back behind them, by a branch, launches took 4 % longer.
    LAZILY: gl.constexpr = C.COLUMNS > 128
    top, shift, shrink = peaks(scores, sums.top, scale, MASKED, LAZILY)
    o, _ = warpgroup_mma_wait(0, (product, factors))
    mbarrier.arrive(ring.v_empty.index(at.stage))
    o = shrunk(o, shrink, C.COLUMNS, LAZILY)
    weights, total = weighed(scores, sums.total, scale, shift, shrink)
    p = carried(weights, C.COLUMNS, ring.v.dtype, C.LEFT or C.CAPPED)
    return Sums(o, p, top, total), At(stage, phase, at.turn ^ 1)


@gluon.jit
def own_blocks(
    first, low, high, keys, until, since, POSITIONS: gl.constexpr, BLOCK: gl.constexpr, LEFT: gl.constexpr
):  # fmt: skip
    """Of a tile's key blocks ``low`` to ``high`` those of a consumer's rows, in three runs; ``POSITIONS`` are theirs.

    ``until`` and ``since`` have signs: see `masked`.

    Returns
    -------
    (begin, plain_begin, plain_end, last)
        As of `tilestream.core.attention.blocks_of_part`; ``last`` is a block.
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
def leave_out(blocks, ring, order, at, WHO: gl.constexpr, C: gl.constexpr):
    """Give back stages of key blocks that none of the consumer's rows sees, and its turns at them.

    They are waited for, so that what is given back is this round of the ring's, and not the one before's.
    """
    stage, phase, turn = at.stage, at.phase, at.turn
    for _ in range(blocks):
        mbarrier.wait(ring.k_full.index(stage), phase)
        mbarrier.arrive(ring.k_empty.index(stage))
        if C.ORDERED:
            mbarrier.wait(order.index(WHO), turn ^ (WHO == 0))
            mbarrier.arrive(order.index((WHO + 1) % C.CONSUMERS))
        mbarrier.wait(ring.v_full.index(stage), phase)
        mbarrier.arrive(ring.v_empty.index(stage))
        stage, phase = step(stage, phase, C.STAGES)
        turn = turn ^ 1
    return At(stage, phase, turn)


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
def math_loop(WHO: gl.constexpr, ring, items, order, scores_of, out_map, out_buffers, log, C: gl.constexpr):
    """A consumer: 64 rows of each tile. Of keys that arrive blocks are taken from the first on, else from the last.

    ``OWN``: it leaves out blocks that none of its rows sees.
    """
    if C.CHAINED:
        gdc_wait()
    slots, scale = items.slots, scores_of.scale
    STRIP: gl.constexpr = out_buffers.shape[2]
    STRIPS: gl.constexpr = C.COLUMNS // STRIP
    out_layout: gl.constexpr = mma_layout(C.COLUMNS)
    rows_layout: gl.constexpr = gl.SliceLayout(1, mma_layout(C.BLOCK))
    row = gl.arange(0, ROWS, rows_layout)
    zero = tl.cast(0, tl.int32)
    stage, phase, turn, slot, slot_phase, q_stage, q_phase = zero, zero, zero, zero, zero, zero, zero
    at = At(stage, phase, turn)
    going = tl.cast(1, tl.int32)
    while going != 0:
        mbarrier.wait(items.full.index(slot), slot_phase)
        going = get(slots, slot, 0, 4)  # key blocks, and one more
        if going != 0:
            first = get(slots, slot, 1, 4) + WHO * (ROWS // C.PACK)
            position = first + row // C.PACK
            top = gl.full([ROWS], float("-inf"), gl.float32, rows_layout)
            total = gl.full([ROWS], 0.0, gl.float32, rows_layout)
            o = gl.zeros((ROWS, C.COLUMNS), gl.float32, out_layout)
            inner = scores_of.inner
            if C.SCALED:
                inner = get(items.scales, slot, 0, 4).to(gl.float32, bitcast=True)
                if C.CAPPED:
                    inner = inner * scores_of.inner
            q_at = WHO * C.QUERIES + q_stage
            mbarrier.wait(ring.q_full.index(q_at), q_phase)
            if going > 1:
                begin = get(slots, slot, 2, 4)
                last = begin + going - 2
                plain_begin = get(slots, slot, 3, 4)
                plain_end = get(slots, slot, 4, 4)
                mask = Mask(position, get(slots, slot, 5, 4), get(slots, slot, 6, 4), get(slots, slot, 7, 4))
                if C.OWN:
                    of_tile = begin if C.ARRIVING else last
                    begin, plain_begin, plain_end, last = own_blocks(
                        first, begin, last, mask.keys, mask.until, mask.since, ROWS // C.PACK, C.BLOCK, C.LEFT
                    )
                    if C.LEFT if C.ARRIVING else C.RIGHT:
                        at = leave_out(begin - of_tile if C.ARRIVING else of_tile - last, ring, order, at, WHO, C)
                mbarrier.wait(ring.k_full.index(at.stage), at.phase)
                scores = warpgroup_mma_wait(0, (start_scores(ring, q_at, at.stage, C),))
                mbarrier.arrive(ring.k_empty.index(at.stage))
                scores = settled(scores, inner, C)
                first_block = begin if C.ARRIVING else last
                if (first_block >= plain_end) | (first_block < plain_begin):
                    scores = masked_by(scores, mask, first_block, C)
                top, shift, shrink = peaks(scores, top, scale, True, False)
                weights, total = weighed(scores, total, scale, shift, shrink)
                sums = Sums(o, carried(weights, C.COLUMNS, ring.v.dtype, C.LEFT or C.CAPPED), top, total)
                if C.ARRIVING:
                    plain_begin = gl.maximum(plain_begin, begin + 1)
                    plain_end = gl.maximum(plain_end, plain_begin)
                    if C.LEFT:
                        for j in range(begin + 1, plain_begin):
                            sums, at = math_step(ring, order, at, q_at, sums, mask, j, scale, inner, WHO, True, C)
                else:
                    plain_begin = gl.minimum(plain_begin, last)
                    plain_end = gl.minimum(plain_end, last)
                    if C.RIGHT:
                        for j in range(plain_end, last):
                            block = last - 1 - (j - plain_end)
                            sums, at = math_step(ring, order, at, q_at, sums, mask, block, scale, inner, WHO, True, C)
                for _ in range(plain_begin, plain_end):
                    sums, at = math_step(ring, order, at, q_at, sums, mask, 0, scale, inner, WHO, False, C)
                if C.ARRIVING:
                    for j in range(plain_end, last + 1):
                        sums, at = math_step(ring, order, at, q_at, sums, mask, j, scale, inner, WHO, True, C)
                elif C.LEFT:
                    for j in range(begin, plain_begin):
                        block = plain_begin - 1 - (j - begin)
                        sums, at = math_step(ring, order, at, q_at, sums, mask, block, scale, inner, WHO, True, C)
                o, top, total = sums.o, sums.top, sums.total
                mbarrier.arrive(ring.q_empty.index(q_at))
                mbarrier.wait(ring.v_full.index(at.stage), at.phase)
                factors = as_operand(sums.p, C.COLUMNS, ring.v.dtype)
                o = warpgroup_mma_wait(0, (warpgroup_mma(factors, ring.v.index(at.stage), o, is_async=True),))
                mbarrier.arrive(ring.v_empty.index(at.stage))
                next_stage, next_phase = step(at.stage, at.phase, C.STAGES)
                at = At(next_stage, next_phase, at.turn)
                if C.OWN and (C.RIGHT if C.ARRIVING else C.LEFT):
                    of_tile = get(slots, slot, 2, 4)
                    at = leave_out(
                        of_tile + going - 2 - last if C.ARRIVING else begin - of_tile, ring, order, at, WHO, C
                    )
            else:
                mbarrier.arrive(ring.q_empty.index(q_at))
            q_stage, q_phase = step(q_stage, q_phase, C.QUERIES)
            # What only the epilogue needs is read when there are registers for it: until then the slot is kept.
            if ring.q.dtype.primitive_bitwidth == 8:  # of which there are fewer with warps that convert values
                first = get(slots, slot, 1, 4) + WHO * (ROWS // C.PACK)
                position = first + row // C.PACK
            head = get(slots, slot, 8, 4)
            batch = get(slots, slot, 9, 4)
            origin = get(slots, slot, 10, 4)
            queries = get(slots, slot, 11, 4)
            factor, sum_ = finished(top, total, scores_of.sinks, head, row, scale, C.PACK)
            if C.SCALED:
                factor = factor * get(items.scales, slot, 1, 4).to(gl.float32, bitcast=True)
            if C.ARRIVING:
                void = get(slots, slot, VOID, 4) != 0
                factor = gl.where(void, float("nan"), factor)
                sum_ = gl.where(void, float("nan"), sum_)
            if scores_of.lse is not None:
                lse = scores_of.lse + get(slots, slot, 12, 4) + position * get(slots, slot, 13, 4)
                gl.store(lse + row % C.PACK * get(slots, slot, 14, 4), sum_, mask=position < queries)
            o = o * gl.convert_layout(factor, gl.SliceLayout(1, out_layout))[:, None]
            for i in gl.static_range(STRIPS):
                store_strip(
                    out_map, out_buffers.index(WHO * C.BUFFERS + i % C.BUFFERS),
                    strip_of((o,), i * STRIP, (C.COLUMNS,), STRIP, ROWS),
                    place(batch, origin, queries, first, head, i * STRIP, C.RAGGED_Q), pending(i, STRIPS, C.BUFFERS),
                )  # fmt: skip
            if C.TRACE:
                whole = going != 0
                if C.ARRIVING:
                    whole = get(slots, slot, VOID, 4) == 0
                barrier()
                end_span(log, get(items.places, slot, 0, 4), WHO, whole)
        mbarrier.arrive(items.empty.index(slot))
        slot, slot_phase = step(slot, slot_phase, ITEMS)
    tma.store_wait(0)
