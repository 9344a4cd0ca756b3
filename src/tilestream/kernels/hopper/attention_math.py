"""The work of attention's math warps on an item: consumers of 64 rows each attend to its key blocks.

The tensor cores compute a block's scores during the softmax of the previous block. Scores and weights stay in
registers. Blocks at the diagonal, plain blocks, and blocks at a window's edge have separate loops. See
`tilestream.kernels.hopper.attention` for the whole kernel.
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

from tilestream.core import attention as rules
from tilestream.core.attention_structs import Mask, RingPlace, Softmax, Step
from tilestream.kernels.device.softmax import exp_scores, finalize, softcap, update_max
from tilestream.kernels.device.trace import end_span
from tilestream.kernels.hopper.attention_load import (
    BATCH,
    BEGIN,
    FIRST,
    HEAD,
    KEYS,
    LSE,
    LSE_HEAD,
    LSE_ROW,
    OFFSET_LEFT,
    OFFSET_RIGHT,
    ORIGIN,
    PLAIN_BEGIN,
    PLAIN_END,
    QUERIES,
    ROWS,
    VOID,
    place,
)
from tilestream.kernels.hopper.attention_softmax import as_operand, masked, pack_p, rescale_o
from tilestream.kernels.hopper.compat import barrier, device, tma_store, viewed
from tilestream.kernels.hopper.epilogue import mma_layout, pending, strip_of
from tilestream.kernels.hopper.ring import get, step

blocks_of_part = device(rules.blocks_of_part)


@gluon.jit
def rows_of_consumer(items, slot, WHO: gl.constexpr, C: gl.constexpr):
    """``(first, position)``: the consumer's first query position, and the position of each of its rows."""
    first = get(items.slots, slot, FIRST, 4) + WHO * C.CONSUMER_POSITIONS
    row = gl.arange(0, ROWS, gl.SliceLayout(1, mma_layout(C.BLOCK)))
    return first, first + row // C.PACK


@gluon.jit
def start_softmax(C: gl.constexpr):
    """The `Softmax` of rows before their first key."""
    rows_layout: gl.constexpr = gl.SliceLayout(1, mma_layout(C.BLOCK))
    row_max = gl.full([ROWS], float("-inf"), gl.float32, rows_layout)
    row_sum = gl.full([ROWS], 0.0, gl.float32, rows_layout)
    OUTPUT: gl.constexpr = (ROWS, C.COLUMNS)
    o = gl.zeros(OUTPUT, gl.float32, mma_layout(C.COLUMNS))
    return Softmax(row_max, row_sum, o)


@gluon.jit
def softcap_scale_of_item(scores, items, slot, C: gl.constexpr):
    """The factor inside the softcap, including an item's scales."""
    softcap_scale = scores.softcap_scale
    if C.SCALED:
        softcap_scale = get(items.scales, slot, 0, 4).to(gl.float32, bitcast=True)
        if C.CAPPED:
            softcap_scale = softcap_scale * scores.softcap_scale
    return softcap_scale


@gluon.jit
def start_scores(ring, q_at, stage, C: gl.constexpr):
    """Start ``Q K^T`` of an item's rows and a stage, one product for each part of the head's columns."""
    PARTS: gl.constexpr = C.PARTS
    TILE: gl.constexpr = (ROWS, C.BLOCK)
    scores = gl.zeros(TILE, gl.float32, mma_layout(C.BLOCK, 256 // ring.q.dtype.primitive_bitwidth))
    for part in gl.static_range(PARTS):
        scores = warpgroup_mma(
            ring.q.index(q_at * C.PARTS + part), ring.k.index(stage * C.PARTS + part).permute((1, 0)), scores,
            is_async=True, use_acc=part > 0,
        )  # fmt: skip
    return scores


@gluon.jit
def scaled_product(x, scores, C: gl.constexpr):
    """A finished product, capped or multiplied by its heads' scales. No data moves."""
    x = gl.convert_layout(x, mma_layout(C.BLOCK), assert_trivial=True)
    if C.CAPPED:
        x = softcap(x, scores.softcap_scale)
    elif C.SCALED:
        x = x * scores.softcap_scale
    return x


@gluon.jit
def math_step(
    ring, at, q_at, sums, mask, block, scores, WHO: gl.constexpr, MASKED: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Process a key block after an item's first: its scores, overlapped with P V of the previous block.

    ``at`` is the place of the previous block, whose weights are in ``sums``, a `Step`.
    """
    stage, phase = step(at.stage, at.phase, C.STAGES)
    mbarrier.wait(ring.k_full.index(stage), phase)
    if C.ORDERED:
        # A new barrier is in phase 0: the consumer with the first turn waits for the phase "before" it.
        mbarrier.wait(ring.order.index(WHO), at.turn ^ (WHO == 0))
    x = start_scores(ring, q_at, stage, C)
    mbarrier.wait(ring.v_full.index(at.stage), at.phase)
    p = as_operand(sums.p, C.COLUMNS, ring.v.dtype)
    product = warpgroup_mma(p, ring.v.index(at.stage), sums.o, is_async=True)
    if C.ORDERED:
        mbarrier.arrive(ring.order.index((WHO + 1) % C.CONSUMERS))
    x = warpgroup_mma_wait(1, (x,))
    mbarrier.arrive(ring.k_empty.index(stage))
    x = scaled_product(x, scores, C)
    if MASKED:
        x = masked(x, mask, block * C.BLOCK, C)
    # Independently of this order, the compiler waits for the product before most of the exponentials, and scales O
    # during them. With the wait forced behind them, by a branch, launches took 4 % longer.
    # Downwards, blocks of which a row sees no key come after its own at a window's left edge. No promise is upwards.
    KEEPS: gl.constexpr = C.LEFT and not C.ASCENDING
    row_max, shift, rescale = update_max(x, sums.row_max, scores.scale, MASKED, C.LAZY_RESCALE, KEEPS)
    o, _ = warpgroup_mma_wait(0, (product, p))
    mbarrier.arrive(ring.v_empty.index(at.stage))
    o = rescale_o(o, rescale, C.COLUMNS, C.LAZY_RESCALE)
    weights = exp_scores(x, scores.scale, shift)
    row_sum = sums.row_sum * rescale + gl.sum(weights, 1)
    p = pack_p(weights, C.COLUMNS, ring.v.dtype, C.PAIRS)
    return Step(row_max, row_sum, o, p), RingPlace(stage, phase, at.turn ^ 1)


@gluon.jit
def own_blocks(first, low, high, mask, C: gl.constexpr):
    """The key blocks among a tile's ``low`` to ``high`` that a consumer's rows see, in three runs.

    Returns
    -------
    (begin, plain_begin, plain_end, last)
        See `tilestream.core.attention.blocks_of_part`; ``last`` is the last block, inclusive.
    """
    at = first + (C.CONSUMER_POSITIONS - 1)
    from_first = tl.cast(0, tl.int32)
    from_last = from_first
    if C.LEFT:
        from_first = gl.maximum(first + mask.causal_offset_left, 0)
        from_last = gl.maximum(at + mask.causal_offset_left, 0)
    until_first = gl.maximum(gl.minimum(first + mask.causal_offset_right, mask.keys), 0)
    until_last = gl.maximum(gl.minimum(at + mask.causal_offset_right, mask.keys), 0)
    begin, plain_begin, plain_end, end = blocks_of_part(
        low, high + 1, from_first, from_last, until_first, until_last, C.BLOCK
    )
    return begin, plain_begin, plain_end, end - 1


@gluon.jit
def leave_out(blocks, ring, at, WHO: gl.constexpr, C: gl.constexpr):
    """Release the stages, and pass on the turns, of key blocks that none of the consumer's rows sees.

    The consumer waits for each stage first, so that it releases the ring's current round, and not the previous one.
    """
    stage, phase, turn = at.stage, at.phase, at.turn
    for _ in range(blocks):
        mbarrier.wait(ring.k_full.index(stage), phase)
        mbarrier.arrive(ring.k_empty.index(stage))
        if C.ORDERED:
            mbarrier.wait(ring.order.index(WHO), turn ^ (WHO == 0))
            mbarrier.arrive(ring.order.index((WHO + 1) % C.CONSUMERS))
        mbarrier.wait(ring.v_full.index(stage), phase)
        mbarrier.arrive(ring.v_empty.index(stage))
        stage, phase = step(stage, phase, C.STAGES)
        turn = turn ^ 1
    return RingPlace(stage, phase, turn)


@gluon.jit
def attend_blocks(
    going, softmax, rows, scores, ring, at, q_at, item, WHO: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Attend to an item's ``going - 1`` key blocks, and release its queries and stages. Returns ``(softmax, at)``.

    ``item`` is the item's slots and slot; ``rows`` is the result of `rows_of_consumer`. The last block is first, unless
    ``ASCENDING``.
    """
    slots, slot = item
    first, position = rows
    begin = get(slots, slot, BEGIN, 4)
    last = begin + going - 2
    plain_begin = get(slots, slot, PLAIN_BEGIN, 4)
    plain_end = get(slots, slot, PLAIN_END, 4)
    keys = get(slots, slot, KEYS, 4)
    offset_right = get(slots, slot, OFFSET_RIGHT, 4)
    mask = Mask(position, keys, get(slots, slot, OFFSET_LEFT, 4), offset_right)
    if C.OWN:
        of_tile = begin if C.ASCENDING else last
        begin, plain_begin, plain_end, last = own_blocks(first, begin, last, mask, C)
        if C.LEFT if C.ASCENDING else C.RIGHT:
            at = leave_out(begin - of_tile if C.ASCENDING else of_tile - last, ring, at, WHO, C)
    mbarrier.wait(ring.k_full.index(at.stage), at.phase)
    x = warpgroup_mma_wait(0, (start_scores(ring, q_at, at.stage, C),))
    mbarrier.arrive(ring.k_empty.index(at.stage))
    x = scaled_product(x, scores, C)
    first_block = begin if C.ASCENDING else last
    if (first_block >= plain_end) | (first_block < plain_begin):
        x = masked(x, mask, first_block * C.BLOCK, C)
    row_max, shift, rescale = update_max(x, softmax.row_max, scores.scale, True, False, False)
    weights = exp_scores(x, scores.scale, shift)
    row_sum = softmax.row_sum * rescale + gl.sum(weights, 1)
    sums = Step(row_max, row_sum, softmax.o, pack_p(weights, C.COLUMNS, ring.v.dtype, C.PAIRS))
    if C.ASCENDING:
        plain_begin = gl.maximum(plain_begin, begin + 1)
        plain_end = gl.maximum(plain_end, plain_begin)
        if C.LEFT:
            for j in range(begin + 1, plain_begin):
                sums, at = math_step(ring, at, q_at, sums, mask, j, scores, WHO, True, C)
    else:
        plain_begin = gl.minimum(plain_begin, last)
        plain_end = gl.minimum(plain_end, last)
        if C.RIGHT:
            for j in range(plain_end, last):
                block = last - 1 - (j - plain_end)
                sums, at = math_step(ring, at, q_at, sums, mask, block, scores, WHO, True, C)
    for _ in range(plain_begin, plain_end):
        sums, at = math_step(ring, at, q_at, sums, mask, 0, scores, WHO, False, C)
    if C.ASCENDING:
        for j in range(plain_end, last + 1):
            sums, at = math_step(ring, at, q_at, sums, mask, j, scores, WHO, True, C)
    elif C.LEFT:
        for j in range(begin, plain_begin):
            block = plain_begin - 1 - (j - begin)
            sums, at = math_step(ring, at, q_at, sums, mask, block, scores, WHO, True, C)
    mbarrier.arrive(ring.q_empty.index(q_at))
    o, at = last_product(sums, ring, at, C)
    if C.OWN and (C.RIGHT if C.ASCENDING else C.LEFT):
        of_tile = get(slots, slot, BEGIN, 4)
        at = leave_out(of_tile + going - 2 - last if C.ASCENDING else begin - of_tile, ring, at, WHO, C)
    return Softmax(sums.row_max, sums.row_sum, o), at


@gluon.jit
def last_product(sums, ring, at, C: gl.constexpr):
    """``O += P V`` for an item's last block. Returns ``(o, at)``."""
    mbarrier.wait(ring.v_full.index(at.stage), at.phase)
    p = as_operand(sums.p, C.COLUMNS, ring.v.dtype)
    o = warpgroup_mma_wait(0, (warpgroup_mma(p, ring.v.index(at.stage), sums.o, is_async=True),))
    mbarrier.arrive(ring.v_empty.index(at.stage))
    stage, phase = step(at.stage, at.phase, C.STAGES)
    return o, RingPlace(stage, phase, at.turn)


@gluon.jit
def store_strip(out_map, buffer, x, at, PENDING: gl.constexpr):
    """Store a strip of the output by TMA, which clips it at the end of the sequence.

    ``PENDING``: the number of stores that may still be in flight when ``buffer`` is written.
    """
    tma.store_wait(PENDING)
    buffer.store(x.to(out_map.dtype))
    fence_async_shared()
    tma_store(out_map, at, viewed(buffer, out_map))


@gluon.jit
def store_tile(softmax, rows, scores, items, slot, going, out, WHO: gl.constexpr, C: gl.constexpr):
    """Store ``O / l`` and the log-sum-exp of an item's rows; NaN if the item is void."""
    STRIP: gl.constexpr = out.buffers.shape[2]
    STRIPS: gl.constexpr = C.COLUMNS // STRIP
    WIDTHS: gl.constexpr = (C.COLUMNS,)
    slots = items.slots
    first, position = rows
    row = gl.arange(0, ROWS, gl.SliceLayout(1, mma_layout(C.BLOCK)))
    head = get(slots, slot, HEAD, 4)
    batch = get(slots, slot, BATCH, 4)
    origin = get(slots, slot, ORIGIN, 4)
    queries = get(slots, slot, QUERIES, 4)
    factor, lse = finalize(softmax.row_max, softmax.row_sum, scores.sinks, head, row, scores.scale, C.PACK)
    if C.SCALED:
        factor = factor * get(items.scales, slot, 1, 4).to(gl.float32, bitcast=True)
    if C.GATED:
        void = get(slots, slot, VOID, 4) != 0
        factor = gl.where(void, float("nan"), factor)
        lse = gl.where(void, float("nan"), lse)
    if out.lse is not None:
        at = out.lse + get(slots, slot, LSE, 4) + position * get(slots, slot, LSE_ROW, 4)
        gl.store(at + row % C.PACK * get(slots, slot, LSE_HEAD, 4), lse, mask=position < queries)
    o = softmax.o * gl.convert_layout(factor, gl.SliceLayout(1, mma_layout(C.COLUMNS)))[:, None]
    for i in gl.static_range(STRIPS):
        store_strip(
            out.map, out.buffers.index(WHO * C.BUFFERS + i % C.BUFFERS),
            strip_of((o,), i * STRIP, WIDTHS, STRIP, ROWS),
            place(batch, origin, queries, first, head, i * STRIP, C.RAGGED_Q), pending(i, STRIPS, C.BUFFERS),
        )  # fmt: skip
    if C.TRACE:
        whole = going != 0
        if C.GATED:
            whole = get(slots, slot, VOID, 4) == 0
        barrier()
        end_span(items.log, get(items.places, slot, 0, 4), WHO, whole)
