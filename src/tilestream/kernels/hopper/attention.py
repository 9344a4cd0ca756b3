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

H200, bf16, 16k tokens in sequences of 512, 2k and 16k, TFLOP/s, this / cuDNN (one run of benchmarks/attention)::

    columns  causal                     full
    64       252/248  406/386  569/474  391/374  524/461  587/499
    128      344/320  587/501  727/632  524/501  683/646  729/684
    256      360/324  641/530  822/653  556/502  764/683  839/749

Sources: Shah et al., "FlashAttention-3" (2024), for S of the next block before P V of this one and the consumers'
turns; Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018). The schedule is ours: see
`tilestream.core.attention`.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestream.kernels.hopper.attention_convert import convert_loop
from tilestream.kernels.hopper.attention_load import Arriving, load_loop
from tilestream.kernels.hopper.attention_math import ROWS, math_loop
from tilestream.kernels.hopper.parts import AttentionItems, AttentionRing, AttentionWork, Scores, Source
from tilestream.kernels.hopper.ring import ITEMS, make_barriers, make_slots

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


@gluon.jit(do_not_specialize=UNSPECIALISED, do_not_specialize_on_alignment=UNALIGNED)
def attend(
    q_map, k_map, v_map, out_map, lse, sinks, scale_q, scale_k, scale_v, cu_queries, cu_keys, lengths, table, starts,
    order_of, counters, log,
    base: tl.int64, reset, sequences, rows_q, rows_k, queries, keys, columns, shared_by, left, right,
    batch_rows_k, batch_rows_v, page_rows_k, page_rows_v, table_stride, stride_lb, stride_lh, stride_lr,
    tiles, num_m, num_n, group, shares, scale, inner,
    signals, quarantine, bounds, records, claims, epoch, key, allowed: tl.int64, op, rows_per_chunk, chunks,
    C: gl.constexpr,
):  # fmt: skip
    """``out = softmax(mask(scale * q @ k^T)) @ v``, one CTA a worker.

    Parameters
    ----------
    lse, sinks, scale_q, scale_k, scale_v, cu_queries, cu_keys, lengths, table
        As of `tilestream.launch.attention.Operands`, each of them or None.
    log
        A record an item, where ``TRACE``: see `tilestream.kernels.device.trace`.
    starts, order_of, sequences
        The list that `tilestream.kernels.device.varlen` makes where queries are packed.
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
        How keys arrive, where ``KEYS`` says that they do: see `tilestream.kernels.device.attention_gate`.
    PACK
        Query heads side by side in a tile's rows.
    PARTS
        Parts that queries and keys are multiplied in: boxes of their columns.
    SCALES
        Of each scale, the strides of sequences and of heads.
    OWN
        Whether a tile has whole key blocks that some consumer's rows do not see, and consumers look for them.
    QUERIES
        Items whose queries there is room for: with two, the next item's come while one is at work.
    COLUMNS
        Of V, a power of two; as keys' columns they are more than there are, which copies fill with zeros.
    """
    WIDTH: gl.constexpr = q_map.block_type.shape[-1]
    STRIP: gl.constexpr = out_map.block_type.shape[-1]
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], q_map.dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.BLOCK, WIDTH], k_map.dtype)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.BLOCK, C.COLUMNS], v_map.dtype)
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, STRIP], out_map.dtype)
    q_parts = gl.allocate_shared_memory(q_map.dtype, [C.CONSUMERS * C.QUERIES * C.PARTS, ROWS, WIDTH], q_layout)
    k_parts = gl.allocate_shared_memory(k_map.dtype, [C.STAGES * C.PARTS, C.BLOCK, WIDTH], k_layout)
    NARROW: gl.constexpr = v_map.dtype.primitive_bitwidth == 8
    if NARROW:
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
    k_empty = make_barriers(C.STAGES, C.CONSUMERS)
    v_full = make_barriers(C.STAGES, 1)
    v_empty = make_barriers(C.STAGES, C.CONSUMERS)
    raw_full, raw_empty = v_full, v_empty
    if NARROW:
        raw_full = make_barriers(C.STAGES, 1)
        raw_empty = make_barriers(C.STAGES, 1)
    item_full = make_barriers(ITEMS, 1)
    item_empty = make_barriers(ITEMS, C.CONSUMERS + 1 if NARROW else C.CONSUMERS)
    if C.ORDERED:  # no barrier that nobody uses: see `tilestream.kernels.hopper.ring`
        order = make_barriers(C.CONSUMERS, 1)
    else:
        order: gl.constexpr = None
    slots = make_slots()
    if C.TRACE:
        places = make_slots()  # an item's slot is full
    else:
        places: gl.constexpr = None
    if C.SCALED:
        scales = make_slots()
    else:
        scales: gl.constexpr = None
    items = AttentionItems(slots, item_full, item_empty, places, scales)
    loaded = AttentionRing(q_parts, k_parts, v_raw, q_full, q_empty, k_full, k_empty, raw_full, raw_empty)
    ring = AttentionRing(q_parts, k_parts, v_stages, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    scores_of = Scores(scale, inner, sinks, lse)
    arriving = Arriving(
        signals, quarantine, bounds, records, claims, epoch, key, allowed, op, rows_per_chunk, chunks
    )  # fmt: skip
    source = Source(
        q_map, k_map, v_map, starts, order_of, sequences, cu_queries, cu_keys, lengths, table, table_stride,
        rows_q, rows_k, queries, keys, columns, shared_by, left, right, batch_rows_k, batch_rows_v,
        page_rows_k, page_rows_v, stride_lb, stride_lh, stride_lr, shares, scale_q, scale_k, scale_v,
    )  # fmt: skip
    work = AttentionWork(counters, base, reset, tiles, num_m, num_n, group, log)
    if NARROW:
        gl.warp_specialize([
            (math_loop, (0, ring, items, order, scores_of, out_map, out_buffers, log, C)),
            (math_loop, (1, ring, items, order, scores_of, out_map, out_buffers, log, C)),
            (convert_loop, (v_raw, v_stages, raw_full, raw_empty, v_full, v_empty, slots, item_full, item_empty,
                            C.BLOCK, C.COLUMNS, C.STAGES)),
            (load_loop, (source, loaded, items, work, arriving, C)),
        ], [4, 4, 1], [C.MATH_REGISTERS, C.CONVERT_REGISTERS, C.LOAD_REGISTERS])  # fmt: skip
    elif C.CONSUMERS == 2:
        gl.warp_specialize([
            (math_loop, (0, ring, items, order, scores_of, out_map, out_buffers, log, C)),
            (math_loop, (1, ring, items, order, scores_of, out_map, out_buffers, log, C)),
            (load_loop, (source, loaded, items, work, arriving, C)),
        ], [4, 1], [C.MATH_REGISTERS, C.LOAD_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (math_loop, (0, ring, items, order, scores_of, out_map, out_buffers, log, C)),
            (math_loop, (1, ring, items, order, scores_of, out_map, out_buffers, log, C)),
            (math_loop, (2, ring, items, order, scores_of, out_map, out_buffers, log, C)),
            (load_loop, (source, loaded, items, work, arriving, C)),
        ], [4, 4, 1], [C.MATH_REGISTERS, C.MATH_REGISTERS, C.LOAD_REGISTERS])  # fmt: skip
