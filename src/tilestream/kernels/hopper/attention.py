"""Attention for Hopper: warp-specialised, persistent, in Gluon; on the GEMM's schedule, rings and epilogue.

::

    load warp                                   math warps (two or three consumers of four warps, 64 rows each)
      for item in schedule:                       for item in item ring:
        hand it on through the item ring            wait q_full; S = Q K^T of the first block, masked; softmax
        wait q_empty; load Q -> q_full              for each block after it, masked or plain:
        for each of its key blocks:                   wait k_full; (wait order) start S = Q K^T
          wait k_empty; load K -> k_full              wait v_full of the block before; start O += P V
          wait v_empty; load V of the block           (arrive order) S is done: arrive k_empty; softmax
            before -> v_full                          O is done: arrive v_empty of the block before; scale O
        load V of the last block (next item first)  arrive q_empty; O += P V of the last block
                                                    O / l, drained by TMA under the next item; log-sum-exp
                                                    arrive item_empty

A tile is a query block of one head, or of several that share a K/V head (`PACK`: few queries fill a tile's rows so).
Its key blocks run from the diagonal to the window's edge: those that some row sees in part are masked, in loops of
their own. A consumer gives back unread the stages of blocks that none of its own rows sees (`leave_out`). The tensor
cores compute the next block's scores while a consumer is at its softmax; with ``ORDERED`` the consumers also take turns
at starting them, so that one's exponentials run under another's multiplications.

The load warp asks for a ticket while it loads an item's last blocks, and takes the next item before the last of values.
Where keys arrive, it asks the gate before a block's first stage, and blocks are taken from the first key on;
an item whose chunks do not come is void, and NaN: see `tilestream.kernels.hopper.attention_load`.

Values of 8 bits come through four more warps, between the load warp and the consumers, which make them float16: see
`tilestream.kernels.hopper.attention_convert`.

Copies of what has no rectangle in memory, sequences of a packed batch and pages, are clipped by the tensor map all the
same: see `tilestream.kernels.hopper.attention_load`.

H200, bf16, 16k tokens in sequences of 512, 2k and 16k, TFLOP/s, this / cuDNN (one run of benchmarks/gpu_attention)::

    columns  causal                     full
    64       242/249  409/386  573/474  390/375  522/461  590/500
    128      345/322  592/503  737/640  516/507  680/649  737/692
    256      354/327  648/533  830/663  529/504  757/690  840/757

Sources: Shah et al., "FlashAttention-3" (2024), for S of the next block before P V of this one and the consumers'
turns; Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018). The schedule is ours: see
`tilestream.schedule.attention`.
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

from tilestream.kernels.hopper.attention_convert import convert_loop
from tilestream.kernels.hopper.attention_load import VOID, Arriving, load_loop, place
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
from tilestream.kernels.hopper.ring import ITEMS, get, make_barriers, make_slots, step
from tilestream.kernels.portable.spans import end_span
from tilestream.schedule import attention as rules

blocks_of_part = device(rules.blocks_of_part)

#: Rows of a consumer.
ROWS: gl.constexpr = gl.constexpr(64)
#: Arguments that say nothing about alignment: one compiled kernel serves all their values.
UNSPECIALISED = (
    "base", "reset", "sequences", "rows_q", "rows_k", "queries", "keys", "columns", "shared_by", "left", "right",
    "batch_rows_k", "batch_rows_v", "page_rows_k", "page_rows_v", "table_stride", "stride_lb", "stride_lh", "stride_lr",
    "tiles", "num_m", "num_n", "group", "shares", "scale", "inner", "epoch", "key", "allowed", "op",
    "rows_per_chunk", "chunks",
)  # fmt: skip
#: Words and numbers that lie anywhere.
UNALIGNED = (
    "lse", "sinks", "scale_q", "scale_k", "scale_v", "cu_queries", "cu_keys", "lengths", "table", "starts", "order_of",
    "signals", "quarantine", "bounds",
)  # fmt: skip


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
    LEFT: gl.constexpr, RIGHT: gl.constexpr, CAPPED: gl.constexpr, ORDERED: gl.constexpr, ARRIVING: gl.constexpr,
    CHAINED: gl.constexpr, log, places, TRACE: gl.constexpr, scales, SCALED: gl.constexpr,
):  # fmt: skip
    """A consumer: 64 rows of each tile. Of keys that arrive blocks are taken from the first on, else from the last."""
    if CHAINED:
        gdc_wait()
    out_layout: gl.constexpr = mma_layout(COLUMNS)
    rows_layout: gl.constexpr = gl.SliceLayout(1, mma_layout(BLOCK))
    row = gl.arange(0, ROWS, rows_layout)
    # Whether a tile has whole blocks that some consumer's rows do not see: of 128 keys, two consumers' tiles seldom do,
    # and to look for them took 2 % of a launch at 1024 keys. A cap and a window leave no registers for that.
    OWN: gl.constexpr = (LEFT or RIGHT) and not (LEFT and CAPPED) and (CONSUMERS - 1) * (ROWS // PACK) >= BLOCK
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


@gluon.jit(do_not_specialize=UNSPECIALISED, do_not_specialize_on_alignment=UNALIGNED)
def attend(
    q_map, k_map, v_map, out_map, lse, sinks, scale_q, scale_k, scale_v, cu_queries, cu_keys, lengths, table, starts,
    order_of, counters, log,
    base: tl.int64, reset, sequences, rows_q, rows_k, queries, keys, columns, shared_by, left, right,
    batch_rows_k, batch_rows_v, page_rows_k, page_rows_v, table_stride, stride_lb, stride_lh, stride_lr,
    tiles, num_m, num_n, group, shares, scale, inner,
    signals, quarantine, bounds, records, claims, epoch, key, allowed: tl.int64, op, rows_per_chunk, chunks,
    CONSUMERS: gl.constexpr, PACK: gl.constexpr, PARTS: gl.constexpr, BLOCK: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr, QUERIES: gl.constexpr, BUFFERS: gl.constexpr, KIND: gl.constexpr, ORDER: gl.constexpr,
    PAGE: gl.constexpr, RAGGED_Q: gl.constexpr, RAGGED_K: gl.constexpr, SPLIT: gl.constexpr, TOP_LEFT: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, CAPPED: gl.constexpr, ORDERED: gl.constexpr, KEYS: gl.constexpr,
    CHAINED: gl.constexpr, TRACE: gl.constexpr, SCALED: gl.constexpr, SCALES: gl.constexpr,
    MATH_REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr, CONVERT_REGISTERS: gl.constexpr,
):  # fmt: skip
    """``out = softmax(mask(scale * q @ k^T)) @ v``, one CTA a worker.

    Parameters
    ----------
    lse, sinks, scale_q, scale_k, scale_v, cu_queries, cu_keys, lengths, table
        As of `tilestream.kernels.attention.Operands`, each of them or None.
    log
        A record an item, where ``TRACE``: see `tilestream.kernels.portable.spans`.
    starts, order_of, sequences
        The list that `tilestream.kernels.portable.attention_list` makes where queries are packed.
    rows_q, rows_k
        Rows of the packed tensors.
    queries, keys
        Rows of a sequence, where they are not packed; of keys, at most.
    columns, shared_by
        Tiles of a query block (heads, or packs of them), and how many of them share a K/V head.
    left, right
        Of the window, where it has such a side.
    batch_rows_k, batch_rows_v, page_rows_k, page_rows_v
        Rows from one sequence, or page, to the next, where a map counts rows of the whole tensor (``RAGGED_K``).
    table_stride
        From the pages of a sequence to those of the next.
    shares
        Into how many a tile's keys are split, where ``SPLIT`` says that they are. Then ``out`` and ``lse`` are those of
        shares, with as many sequences (rows) for each: see `tilestream.kernels.portable.attention_merge`.
    scale, inner
        Of scores, in base 2: ``softcap`` and ``scale / softcap``, where there is a cap.
    signals, quarantine, bounds, records, claims, epoch, key, allowed, op, rows_per_chunk, chunks
        How keys arrive, where ``KEYS`` says that they do: see `tilestream.kernels.portable.attention_gate`.
    PACK
        Query heads side by side in a tile's rows.
    PARTS
        Parts that queries and keys are multiplied in: boxes of their columns.
    SCALES
        Of each scale, the strides of sequences and of heads.
    QUERIES
        Items whose queries there is room for: with two, the next item's come while one is at work.
    COLUMNS
        Of V, a power of two; as keys' columns they are more than there are, which copies fill with zeros.
    """
    WIDTH: gl.constexpr = q_map.block_type.shape[-1]
    STRIP: gl.constexpr = out_map.block_type.shape[-1]
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], q_map.dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, WIDTH], k_map.dtype)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, COLUMNS], v_map.dtype)
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, STRIP], out_map.dtype)
    q_parts = gl.allocate_shared_memory(q_map.dtype, [CONSUMERS * QUERIES * PARTS, ROWS, WIDTH], q_layout)
    k_parts = gl.allocate_shared_memory(k_map.dtype, [STAGES * PARTS, BLOCK, WIDTH], k_layout)
    NARROW: gl.constexpr = v_map.dtype.primitive_bitwidth == 8
    if NARROW:
        wide_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, COLUMNS], gl.float16)
        v_raw = gl.allocate_shared_memory(v_map.dtype, [STAGES, BLOCK, COLUMNS], v_layout)
        v_stages = gl.allocate_shared_memory(gl.float16, [STAGES, BLOCK, COLUMNS], wide_layout)
    else:
        v_stages = gl.allocate_shared_memory(v_map.dtype, [STAGES, BLOCK, COLUMNS], v_layout)
        v_raw = v_stages
    out_buffers = gl.allocate_shared_memory(out_map.dtype, [CONSUMERS * BUFFERS, ROWS, STRIP], out_layout)
    q_full = make_barriers(CONSUMERS * QUERIES, 1)
    q_empty = make_barriers(CONSUMERS * QUERIES, 1)
    k_full = make_barriers(STAGES, 1)
    k_empty = make_barriers(STAGES, CONSUMERS)
    v_full = make_barriers(STAGES, 1)
    v_empty = make_barriers(STAGES, CONSUMERS)
    raw_full, raw_empty = v_full, v_empty
    if NARROW:
        raw_full = make_barriers(STAGES, 1)
        raw_empty = make_barriers(STAGES, 1)
    item_full = make_barriers(ITEMS, 1)
    item_empty = make_barriers(ITEMS, CONSUMERS + 1 if NARROW else CONSUMERS)
    if ORDERED:  # no barrier that nobody uses: see `tilestream.kernels.hopper.ring`
        order = make_barriers(CONSUMERS, 1)
    else:
        order: gl.constexpr = None
    slots = make_slots()
    if TRACE:
        places = make_slots()  # an item's slot is full
    else:
        places: gl.constexpr = None
    if SCALED:
        scales = make_slots()
    else:
        scales: gl.constexpr = None
    arriving = Arriving(
        signals, quarantine, bounds, records, claims, epoch, key, allowed, op, rows_per_chunk, chunks
    )  # fmt: skip
    if NARROW:
        gl.warp_specialize([
            (math_loop, (
                0, q_parts, k_parts, v_stages, out_map, out_buffers,
                q_full, q_empty, k_full, k_empty, v_full, v_empty, slots, item_full, item_empty, order,
                lse, sinks, scale, inner,
                CONSUMERS, PACK, PARTS, BLOCK, COLUMNS, STAGES, QUERIES, STRIP, BUFFERS, RAGGED_Q, LEFT, RIGHT, CAPPED,
                ORDERED, KEYS != "none", CHAINED, log, places, TRACE, scales, SCALED,
            )),
            (math_loop, (
                1, q_parts, k_parts, v_stages, out_map, out_buffers,
                q_full, q_empty, k_full, k_empty, v_full, v_empty, slots, item_full, item_empty, order,
                lse, sinks, scale, inner,
                CONSUMERS, PACK, PARTS, BLOCK, COLUMNS, STAGES, QUERIES, STRIP, BUFFERS, RAGGED_Q, LEFT, RIGHT, CAPPED,
                ORDERED, KEYS != "none", CHAINED, log, places, TRACE, scales, SCALED,
            )),
            (convert_loop, (
                v_raw, v_stages, raw_full, raw_empty, v_full, v_empty, slots, item_full, item_empty,
                BLOCK, COLUMNS, STAGES,
            )),
            (load_loop, (
                q_map, k_map, v_map, q_parts, k_parts, v_raw,
                q_full, q_empty, k_full, k_empty, raw_full, raw_empty, slots, item_full, item_empty,
                starts, order_of, sequences, cu_queries, cu_keys, lengths, table, table_stride, counters, base, reset,
                rows_q, rows_k, queries, keys, columns, shared_by, left, right, batch_rows_k, batch_rows_v,
                page_rows_k, page_rows_v, stride_lb, stride_lh, stride_lr, tiles, num_m, num_n, group, shares,
                arriving,
                CONSUMERS, PACK, PARTS, BLOCK, STAGES, QUERIES, KIND, ORDER, PAGE, RAGGED_Q, RAGGED_K, SPLIT,
                TOP_LEFT, LEFT, RIGHT, KEYS, CHAINED, log, places, TRACE,
                scale_q, scale_k, scale_v, scales, SCALED, SCALES,
            )),
        ], [4, 4, 1], [MATH_REGISTERS, CONVERT_REGISTERS, LOAD_REGISTERS])  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (math_loop, (
                0, q_parts, k_parts, v_stages, out_map, out_buffers,
                q_full, q_empty, k_full, k_empty, v_full, v_empty, slots, item_full, item_empty, order,
                lse, sinks, scale, inner,
                CONSUMERS, PACK, PARTS, BLOCK, COLUMNS, STAGES, QUERIES, STRIP, BUFFERS, RAGGED_Q, LEFT, RIGHT, CAPPED,
                ORDERED, KEYS != "none", CHAINED, log, places, TRACE, scales, SCALED,
            )),
            (math_loop, (
                1, q_parts, k_parts, v_stages, out_map, out_buffers,
                q_full, q_empty, k_full, k_empty, v_full, v_empty, slots, item_full, item_empty, order,
                lse, sinks, scale, inner,
                CONSUMERS, PACK, PARTS, BLOCK, COLUMNS, STAGES, QUERIES, STRIP, BUFFERS, RAGGED_Q, LEFT, RIGHT, CAPPED,
                ORDERED, KEYS != "none", CHAINED, log, places, TRACE, scales, SCALED,
            )),
            (load_loop, (
                q_map, k_map, v_map, q_parts, k_parts, v_raw,
                q_full, q_empty, k_full, k_empty, raw_full, raw_empty, slots, item_full, item_empty,
                starts, order_of, sequences, cu_queries, cu_keys, lengths, table, table_stride, counters, base, reset,
                rows_q, rows_k, queries, keys, columns, shared_by, left, right, batch_rows_k, batch_rows_v,
                page_rows_k, page_rows_v, stride_lb, stride_lh, stride_lr, tiles, num_m, num_n, group, shares,
                arriving,
                CONSUMERS, PACK, PARTS, BLOCK, STAGES, QUERIES, KIND, ORDER, PAGE, RAGGED_Q, RAGGED_K, SPLIT,
                TOP_LEFT, LEFT, RIGHT, KEYS, CHAINED, log, places, TRACE,
                scale_q, scale_k, scale_v, scales, SCALED, SCALES,
            )),
        ], [4, 1], [MATH_REGISTERS, LOAD_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (math_loop, (
                0, q_parts, k_parts, v_stages, out_map, out_buffers,
                q_full, q_empty, k_full, k_empty, v_full, v_empty, slots, item_full, item_empty, order,
                lse, sinks, scale, inner,
                CONSUMERS, PACK, PARTS, BLOCK, COLUMNS, STAGES, QUERIES, STRIP, BUFFERS, RAGGED_Q, LEFT, RIGHT, CAPPED,
                ORDERED, KEYS != "none", CHAINED, log, places, TRACE, scales, SCALED,
            )),
            (math_loop, (
                1, q_parts, k_parts, v_stages, out_map, out_buffers,
                q_full, q_empty, k_full, k_empty, v_full, v_empty, slots, item_full, item_empty, order,
                lse, sinks, scale, inner,
                CONSUMERS, PACK, PARTS, BLOCK, COLUMNS, STAGES, QUERIES, STRIP, BUFFERS, RAGGED_Q, LEFT, RIGHT, CAPPED,
                ORDERED, KEYS != "none", CHAINED, log, places, TRACE, scales, SCALED,
            )),
            (math_loop, (
                2, q_parts, k_parts, v_stages, out_map, out_buffers,
                q_full, q_empty, k_full, k_empty, v_full, v_empty, slots, item_full, item_empty, order,
                lse, sinks, scale, inner,
                CONSUMERS, PACK, PARTS, BLOCK, COLUMNS, STAGES, QUERIES, STRIP, BUFFERS, RAGGED_Q, LEFT, RIGHT, CAPPED,
                ORDERED, KEYS != "none", CHAINED, log, places, TRACE, scales, SCALED,
            )),
            (load_loop, (
                q_map, k_map, v_map, q_parts, k_parts, v_raw,
                q_full, q_empty, k_full, k_empty, raw_full, raw_empty, slots, item_full, item_empty,
                starts, order_of, sequences, cu_queries, cu_keys, lengths, table, table_stride, counters, base, reset,
                rows_q, rows_k, queries, keys, columns, shared_by, left, right, batch_rows_k, batch_rows_v,
                page_rows_k, page_rows_v, stride_lb, stride_lh, stride_lr, tiles, num_m, num_n, group, shares,
                arriving,
                CONSUMERS, PACK, PARTS, BLOCK, STAGES, QUERIES, KIND, ORDER, PAGE, RAGGED_Q, RAGGED_K, SPLIT,
                TOP_LEFT, LEFT, RIGHT, KEYS, CHAINED, log, places, TRACE,
                scale_q, scale_k, scale_v, scales, SCALED, SCALES,
            )),
        ], [4, 4, 1], [MATH_REGISTERS, MATH_REGISTERS, LOAD_REGISTERS])  # fmt: skip
