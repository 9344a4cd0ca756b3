"""Attention for Hopper: a warp-specialised, persistent Gluon kernel with the GEMM's schedule, rings and epilogue.

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

A tile (`tilestream.kernels.device.attention_tile`) is a query block of one head, or of several heads that share a K/V
head (``PACK``), so that few queries fill a tile's rows. Its key blocks run from the diagonal to the window's edge.
Partly visible blocks are masked, in separate loops. A consumer releases the stages of blocks that none of its rows sees
(`leave_out`). The tensor cores compute the next block's scores during a consumer's softmax. With ``ORDERED`` the
consumers take turns at starting them, so that one's exponentials overlap with another's multiplications.

The load warp prefetches a ticket while it loads an item's last blocks, and takes the next item before the last block of
values. If keys arrive, it passes the gate before a block's first stage (`load_keys`), and takes the first block first.
If an item's chunks do not arrive, the item is void and its output is NaN.

Four more warps, between the load warp and the consumers, convert 8-bit values to float16:
`tilestream.kernels.hopper.attention_convert`. The tensor maps clip copies of packed sequences and of pages in the same
way as those of a dense batch: `tilestream.kernels.hopper.attention_load`.

H200, bf16, 16k tokens in sequences of 512, 2k and 16k, TFLOP/s, this / cuDNN (one run of benchmarks/run.py attention)::

    columns  causal                     full
    64       252/248  406/386  569/474  391/374  524/461  587/499
    128      344/320  587/501  727/632  524/501  683/646  729/684
    256      360/324  641/530  822/653  556/502  764/683  839/749

Sources: Shah et al., "FlashAttention-3" (2024), for the next block's S before this block's P V, and for the consumers'
turns; Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018). `tilestream.core.attention` describes
the schedule.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tilestream.core.attention_structs import (
    Extents,
    KeyRows,
    LastValues,
    LoadPlace,
    Output,
    Pages,
    QkvRing,
    RingPlace,
    Rows,
    Scales,
    Scores,
    Source,
    TileRing,
)
from tilestream.core.structs import Gate, Incoming, Place, Words, Work
from tilestream.kernels.device.attention_gate import poll_over
from tilestream.kernels.device.attention_tile import emptied, locate_tile
from tilestream.kernels.device.items import begin_worker, finish_worker
from tilestream.kernels.device.jit import entry
from tilestream.kernels.device.schedule import add, take, with_asked
from tilestream.kernels.device.trace import begin_span, ready_span
from tilestream.kernels.hopper.attention_convert import convert_loop
from tilestream.kernels.hopper.attention_load import (
    BLOCKS,
    ROWS,
    hand_on,
    last_values_of,
    load_keys,
    load_last_values,
    load_queries,
    make_loads,
    next_stage,
)
from tilestream.kernels.hopper.attention_math import (
    attend_blocks,
    rows_of_consumer,
    softcap_scale_of_item,
    start_softmax,
    store_tile,
)
from tilestream.kernels.hopper.queues import await_ticket, prefetch_ticket
from tilestream.kernels.hopper.ring import ITEMS, get, make_barriers, make_slots


@gluon.jit
def load_loop(source, ring, items, work, words, C: gl.constexpr):
    """Producer: takes tiles, hands them on through the item ring, and loads their queries, keys and values."""
    if C.CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    one, zero = tl.cast(1, tl.int32), tl.cast(0, tl.int32)
    loads = make_loads(source, ring)
    progress, watch = begin_worker(gl.program_id(0), gl.num_programs(0), work, words, source.gate, C)
    passed, cursor = progress.passed, progress.cursor
    k, v, slot, q = Place(zero, zero), Place(zero, zero), Place(zero, zero), Place(zero, zero)
    found = one
    last = LastValues(zero, KeyRows(zero, zero, zero, zero), zero)
    asked = cursor.asked
    if C.PREFETCHES_TICKETS:
        asked = prefetch_ticket(words, zero, one)
    while found != 0:
        found, item, cursor = take(
            with_asked(cursor, asked), work, words, watch, C, await_ticket if C.PREFETCHES_TICKETS else add
        )
        found, tile = locate_tile(found, item, source.extents, work.group, C)
        v = load_last_values(last, v, passed.over, loads, source, C)
        last = LastValues(zero, last.rows, last.first)
        if C.TRACE:
            if found != 0:
                begin_span(items.log, tile.pm * work.num_n + tile.pn, watch.worker)
                if not C.GATED:
                    ready_span(items.log, tile.pm * work.num_n + tile.pn)
        if C.GATED:
            passed = poll_over(passed, words, watch)
            tile = emptied(tile, passed.over)
        handed = slot.at
        slot = hand_on(items, slot, found, tile, passed.over, source, work, C)
        if found != 0:
            q = load_queries(tile, source, ring, q, C)
            at = LoadPlace(k, v, asked, passed)
            at = load_keys(at, tile, handed, loads, source, items, work, words, watch, C)
            k, v, asked, passed = at
            last = last_values_of(tile, last, source.extents, C)
    finish_worker(passed, work, words, source.gate, watch, C)


@gluon.jit
def math_loop(WHO: gl.constexpr, ring, items, out, scores, C: gl.constexpr):
    """Consumer: attends to the key blocks of 64 rows of each tile, and stores their output."""
    if C.CHAINED:
        gdc_wait()
    zero = tl.cast(0, tl.int32)
    at, slot, q, turn = Place(zero, zero), Place(zero, zero), Place(zero, zero), zero
    going = tl.cast(1, tl.int32)
    while going != 0:
        mbarrier.wait(items.full.index(slot.at), slot.phase)
        going = get(items.slots, slot.at, BLOCKS, 4)  # key blocks, and one more; 0: STOP
        if going != 0:
            rows = rows_of_consumer(items, slot.at, WHO, C)
            softmax = start_softmax(C)
            of_item = Scores(scores.scale, softcap_scale_of_item(scores, items, slot.at, C), scores.sinks)
            q_at = WHO * C.QUERIES + q.at
            mbarrier.wait(ring.q_full.index(q_at), q.phase)
            if going > 1:
                place = RingPlace(at.at, at.phase, turn)
                softmax, place = attend_blocks(
                    going, softmax, rows, of_item, ring, place, q_at, (items.slots, slot.at), WHO, C
                )
                at, turn = Place(place.stage, place.phase), place.turn
            else:
                mbarrier.arrive(ring.q_empty.index(q_at))
            q = next_stage(q, C.QUERIES)
            # Fields for the epilogue are read late, when registers are free. So the slot is released after it.
            if ring.q.dtype.primitive_bitwidth == 8:  # warps that convert values leave fewer registers
                rows = rows_of_consumer(items, slot.at, WHO, C)
            store_tile(softmax, rows, of_item, items, slot.at, going, out, WHO, C)
        mbarrier.arrive(items.empty.index(slot.at))
        slot = next_stage(slot, ITEMS)
    tma.store_wait(0)


@entry(gluon.jit, specialised=())
def attend(
    q_map, k_map, v_map, out_map, lse, sinks, scale_q, scale_k, scale_v, cu_seqlens_q, cu_seqlens_k, seqlens_k,
    block_table, starts, order, counters, log,
    base: tl.int64, reset, sequences, tokens_q, tokens_k, seqlen_q, seqlen_k, head_tiles, q_heads_per_kv,
    left, right, batch_rows_k, batch_rows_v, page_rows_k, page_rows_v, table_stride, lse_batch, lse_head, lse_row,
    tiles, num_m, num_n, group, shares, scale, softcap_scale,
    signals, quarantine, bounds, records, claims, epoch, key, allowed: tl.int64, op, rows_per_chunk, chunks,
    C: gl.constexpr,
):  # fmt: skip
    """``out = softmax(mask(scale * q @ k^T)) @ v``; each worker is a CTA.

    The parameters are the fields of the structs in `tilestream.core.attention_structs`. If keys are split
    (``SPLIT_KEYS``), ``out`` and ``lse`` are those of the shares, with the number of sequences (rows) for each: see
    `tilestream.kernels.portable.attention_merge`.

    Parameters
    ----------
    log
        int64, a record for each item, if ``TRACE``: see `tilestream.kernels.device.trace`.
    C
        A `tilestream.kernels.attention_config.HopperAttentionConfig`.
    """
    CONSUMERS: gl.constexpr = C.CONSUMERS
    WIDTH: gl.constexpr = q_map.block_type.shape[-1]
    STRIP: gl.constexpr = out_map.block_type.shape[-1]
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], q_map.dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.BLOCK, WIDTH], k_map.dtype)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.BLOCK, C.COLUMNS], v_map.dtype)
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, STRIP], out_map.dtype)
    q_parts = gl.allocate_shared_memory(q_map.dtype, [C.CONSUMERS * C.QUERIES * C.PARTS, ROWS, WIDTH], q_layout)
    k_parts = gl.allocate_shared_memory(k_map.dtype, [C.STAGES * C.PARTS, C.BLOCK, WIDTH], k_layout)
    CONVERTS: gl.constexpr = v_map.dtype.primitive_bitwidth == 8
    if CONVERTS:
        wide_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.BLOCK, C.COLUMNS], gl.float16)
        v_raw = gl.allocate_shared_memory(v_map.dtype, [C.STAGES, C.BLOCK, C.COLUMNS], v_layout)
        v_stages = gl.allocate_shared_memory(gl.float16, [C.STAGES, C.BLOCK, C.COLUMNS], wide_layout)
    else:
        v_stages = gl.allocate_shared_memory(v_map.dtype, [C.STAGES, C.BLOCK, C.COLUMNS], v_layout)
        v_raw = v_stages
    out_buffers = gl.allocate_shared_memory(out_map.dtype, [C.CONSUMERS * C.BUFFERS, ROWS, STRIP], out_layout)
    q_full = make_barriers(C.CONSUMERS * C.QUERIES, 1)
    q_empty = make_barriers(C.CONSUMERS * C.QUERIES, 1)
    k_full = make_barriers(C.STAGES, 1)
    k_empty = make_barriers(C.STAGES, CONSUMERS)
    v_full = make_barriers(C.STAGES, 1)
    v_empty = make_barriers(C.STAGES, CONSUMERS)
    raw_full, raw_empty = v_full, v_empty
    if CONVERTS:
        raw_full = make_barriers(C.STAGES, 1)
        raw_empty = make_barriers(C.STAGES, 1)
    item_full = make_barriers(ITEMS, 1)
    item_empty = make_barriers(ITEMS, C.CONSUMERS + 1 if CONVERTS else C.CONSUMERS)
    if C.ORDERED:  # unused barriers must not be made: see `tilestream.kernels.hopper.ring`
        turns = make_barriers(CONSUMERS, 1)
    else:
        turns: gl.constexpr = None
    slots = make_slots()
    if C.TRACE:
        places = make_slots()  # an item's slot is full
    else:
        places: gl.constexpr = None
    if C.SCALED:
        scales = make_slots()
    else:
        scales: gl.constexpr = None
    items = TileRing(slots, item_full, item_empty, places, scales, log)
    loaded = QkvRing(q_parts, k_parts, v_raw, q_full, q_empty, k_full, k_empty, raw_full, raw_empty, turns)
    ring = QkvRing(q_parts, k_parts, v_stages, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns)
    extents = Extents(
        starts, order, sequences, cu_seqlens_q, cu_seqlens_k, seqlens_k, tokens_q, tokens_k, seqlen_q, seqlen_k,
        head_tiles, q_heads_per_kv, shares, left, right, batch_rows_k, batch_rows_v,
    )  # fmt: skip
    coming = Incoming(signals, quarantine, bounds, epoch, key, chunks, rows_per_chunk, chunks, 0)
    nothing = Incoming(None, None, None, 1, 0, 0, 1, 0, 0)
    gate = Gate(coming, nothing, None, 0, 0, records, claims, op, allowed)
    source = Source(
        q_map, k_map, v_map, extents, Pages(block_table, table_stride), page_rows_k, page_rows_v,
        Scales(scale_q, scale_k, scale_v), Rows(lse, lse_batch, lse_row, lse_head), gate,
    )  # fmt: skip
    work = Work(1, num_m, num_n, 1, tiles, 0, 0, 1, None, group, 0, 1, 0)
    words = Words(counters, base, reset, log, 0, None, None)
    out = Output(out_map, out_buffers, lse)
    scores = Scores(scale, softcap_scale, sinks)
    if CONVERTS:
        gl.warp_specialize([
            (math_loop, (0, ring, items, out, scores, C)),
            (math_loop, (1, ring, items, out, scores, C)),
            (convert_loop, (loaded, ring, items, C)),
            (load_loop, (source, loaded, items, work, words, C)),
        ], [4, 4, 1], [C.MATH_REGISTERS, C.CONVERT_REGISTERS, C.LOAD_REGISTERS])  # fmt: skip
    elif C.CONSUMERS == 2:
        gl.warp_specialize([
            (math_loop, (0, ring, items, out, scores, C)),
            (math_loop, (1, ring, items, out, scores, C)),
            (load_loop, (source, loaded, items, work, words, C)),
        ], [4, 1], [C.MATH_REGISTERS, C.LOAD_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (math_loop, (0, ring, items, out, scores, C)),
            (math_loop, (1, ring, items, out, scores, C)),
            (math_loop, (2, ring, items, out, scores, C)),
            (load_loop, (source, loaded, items, work, words, C)),
        ], [4, 4, 1], [C.MATH_REGISTERS, C.MATH_REGISTERS, C.LOAD_REGISTERS])  # fmt: skip
