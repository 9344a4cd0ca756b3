"""Attention prefill in Triton: resident programs that take query blocks until none is left.

::

    for tile in schedule:                                # next_tile, locate_tile: longest first, heads in groups
        for stretch of the tile's key blocks:            # one stretch, unless keys are still arriving
            pass_keys(stretch)                           # over: out, lse = NaN
            for block at the window's edge, then plain, then at the diagonal and the end:
                s = Q K[block]^T, capped; masked unless plain
                p, row_max, row_sum = online softmax;  o = o * rescale + p V[block]
        out, lse = finalize

`tilestream.kernels.device.softmax` has the softmax, `tilestream.kernels.device.attention_tile` the tiles. Load and math
share one loop, which Triton pipelines; there is no item ring. No worker waits for another.

Only keys that some row of the tile sees are read: keys past the last one, or keys that have not arrived, may be NaN. An
earlier launch makes the list of packed sequences: `tilestream.kernels.device.varlen`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.core.attention_structs import Extents, Keys, Mask, Rows, Scales, Scores, Softmax
from tilestream.core.structs import Gate, Incoming, Words, Work
from tilestream.kernels.device.attention_gate import chunk_at, pass_keys, poll_over
from tilestream.kernels.device.attention_tile import locate_tile, seen_keys_of, sees
from tilestream.kernels.device.items import begin_worker, finish_worker
from tilestream.kernels.device.jit import entry
from tilestream.kernels.device.schedule import take
from tilestream.kernels.device.softmax import exp_scores, finalize, softcap, update_scaled_max
from tilestream.kernels.device.trace import begin_span, chunk_span, end_span, ready_span
from tilestream.kernels.portable.gemm import to_tf32

# Addresses -----------------------------------------------------------------------------------------------------------


@triton.jit
def rows_of_tile(opaque_zero, first, C: tl.constexpr):
    """``(row, position)`` of a tile's rows: see `tilestream.core.attention.row_of`.

    ``opaque_zero`` is a 0 that the compiler does not know. Otherwise it would compute all that depends on rows alone
    once for all items, and keep it in registers that the loops need.
    """
    row = tl.arange(0, C.ROWS) + opaque_zero
    return row, first + row // C.PACK


@triton.jit
def offset_of(row, x, ALIGN: tl.constexpr, C: tl.constexpr):
    """Offsets of a tile's rows in ``x`` (`Rows`) from its first row; the heads of a position are neighbours."""
    if C.OFFSETS_64BIT:
        row = row.to(tl.int64)
    return tl.multiple_of(row // C.PACK * x.row + row % C.PACK * x.head, ALIGN)


@triton.jit
def first_of(x, batch, row, head, ALIGN: tl.constexpr):
    """Pointer to a row of a sequence and head of ``x`` (`Rows`). Packed rows have a batch stride of 0."""
    at = x.at + batch.to(tl.int64) * x.batch + row.to(tl.int64) * x.row
    return at + tl.multiple_of(head.to(tl.int64) * x.head, ALIGN)


@triton.jit
def keys_of_tile(tile, k, v, table, extents, C: tl.constexpr):
    """`Keys` of a tile. ``k`` and ``v`` are `Rows`, ``table`` is ``(block_table, stride, pages)``."""
    block_table, stride, pages = table
    low, high = seen_keys_of(tile, C)
    zero = tile.head * 0
    head = tile.head // extents.q_heads_per_kv
    if C.PAGE:  # pages are at any place
        k_at, v_at = first_of(k, zero, zero, head, C.ALIGN), first_of(v, zero, zero, head, C.ALIGN)
        block_table = block_table + tile.batch.to(tl.int64) * stride
    else:
        k_at = first_of(k, tile.batch, tile.origin_k, head, C.ALIGN)
        v_at = first_of(v, tile.batch, tile.origin_k, head, C.ALIGN)
        block_table = zero  # Triton 3.6 cannot return None
    return Keys(Rows(k_at, k.batch, k.row, k.head), Rows(v_at, v.batch, v.row, v.head), block_table, pages, low, high)


@triton.jit
def start_softmax(C: tl.constexpr):
    """The `Softmax` of rows without keys so far."""
    OUTPUT: tl.constexpr = (C.ROWS, C.BLOCK_DV)
    ROW: tl.constexpr = (C.ROWS,)
    return Softmax(
        tl.full(ROW, float("-inf"), tl.float32), tl.zeros(ROW, tl.float32), tl.zeros(OUTPUT, tl.float32)
    )  # fmt: skip


# Load and math -------------------------------------------------------------------------------------------------------


@triton.jit
def load_queries(q, tile, row, position, C: tl.constexpr):
    """A tile's rows of queries; 0 past the sequence's last row and past the last column."""
    at = first_of(q, tile.batch, tile.origin_q + tile.first, tile.head * C.PACK, C.ALIGN)
    column = tl.arange(0, C.BLOCK_D)
    x = tl.load(
        at + (offset_of(row, q, C.ALIGN, C)[:, None] + column[None, :]),
        mask=(position < tile.queries)[:, None] & (column < C.D)[None, :], other=0.0,
    )  # fmt: skip
    if C.PRECISION == "tf32":
        x = to_tf32(x)
    if C.CONVERT:
        x = x.to(tl.float16)
    return x


@triton.jit
def load_block(
    x, start, keys, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Keys [start, start + C.BLOCK) of K or V (`Rows` of `Keys`). If MASKED, keys that no row sees are 0.

    A block lies in one page, or its rows are gathered from several.
    """
    ALIGN: tl.constexpr = C.ALIGN
    row = tl.arange(0, C.BLOCK)
    key = start + row
    column = tl.arange(0, BLOCK)
    real = (key >= keys.low) & (key < keys.high)
    at = x.at
    if C.PAGE == 0:
        at += start.to(tl.int64) * x.row
    elif C.PAGE >= C.BLOCK:
        page = tl.minimum(tl.maximum(tl.load(keys.table + start // C.PAGE), 0), keys.pages - 1)
        at += page.to(tl.int64) * x.batch + (start % C.PAGE).to(tl.int64) * x.row
    if C.OFFSETS_64BIT:
        row = row.to(tl.int64)
    if (C.PAGE == 0) or (C.PAGE >= C.BLOCK):
        pointers = at + (tl.multiple_of(row * x.row, ALIGN)[:, None] + column[None, :])
    else:
        if MASKED:
            page = tl.load(keys.table + key // C.PAGE, mask=real, other=0)
        else:
            page = tl.load(keys.table + key // C.PAGE)
        page = tl.minimum(tl.maximum(page, 0), keys.pages - 1)
        offset = page.to(tl.int64) * x.batch + (key % C.PAGE).to(tl.int64) * x.row
        pointers = at + (tl.multiple_of(offset, ALIGN)[:, None] + column[None, :])
    if MASKED:
        block = tl.load(pointers, mask=real[:, None] & (column < COLUMNS)[None, :], other=0.0)
    elif COLUMNS == BLOCK:
        block = tl.load(pointers)
    else:
        block = tl.load(pointers, mask=(column < COLUMNS)[None, :], other=0.0)
    return block


@triton.jit
def softcap_precisely(scores, softcap_scale):
    """`softcap`, exact to a bit or two of float32 around 0, too, where `softcap` loses bits.

    There it is the Taylor series up to x^13, whose next term is 6e-8 of the sum at 0.5.
    """
    x = softcap_scale * scores
    z = x * x
    near = 0.021869488536155202 + z * (-0.008863235529902197 + z * 0.003592128036572481)
    near = -0.3333333333333333 + z * (0.13333333333333333 + z * (-0.05396825396825397 + z * near))
    return tl.where(tl.abs(x) < 0.5, x + x * z * near, softcap(scores, softcap_scale))


@triton.jit
def softcap_scale_of_tile(scores, scales, tile, extents, C: tl.constexpr):
    """The ``softcap_scale`` of a tile's `Scores`.

    ``scale`` is applied to the largest score, and to the others in the exponential's multiply-add. A scale that may
    reverse the order of scores has to come before: then scores are multiplied by ``softcap_scale``, as for a cap.
    """
    if C.CAPPED:
        before = scores.softcap_scale
    else:
        before = scores.scale
    # With scales a pack is one head. Rows past the last sequence have no scales.
    real = tile.batch < extents.sequences - 1
    if scales.q.at is not None:
        at = scales.q.at + tile.batch * scales.q.batch + tile.head * C.PACK * scales.q.head
        before = before * tl.load(at, mask=real, other=1.0)
    if scales.k.at is not None:
        at = scales.k.at + tile.batch * scales.k.batch + tile.head // extents.q_heads_per_kv * scales.k.head
        before = before * tl.load(at, mask=real, other=1.0)
    return before


@triton.jit
def add_blocks(begin, end, q, softmax, keys, mask, scores, MASKED: tl.constexpr, C: tl.constexpr):
    """Add key blocks [begin, end) of a tile to its `Softmax`."""
    FP8: tl.constexpr = keys.v.at.dtype.element_ty == tl.float8e4nv
    MATH: tl.constexpr = tl.float16 if FP8 else keys.v.at.dtype.element_ty
    o, row_max, row_sum = softmax.o, softmax.row_max, softmax.row_sum
    for block in range(begin, end):
        start = block * C.BLOCK
        x = load_block(keys.k, start, keys, C.D, C.BLOCK_D, MASKED, C)
        if C.PRECISION == "tf32":
            x = to_tf32(x)
        if q.dtype != x.dtype:
            x = x.to(q.dtype)
        s = tl.dot(q, tl.trans(x), input_precision=C.PRECISION)
        scale = scores.scale
        if C.CAPPED:
            if tl.float32 == MATH:
                s = softcap_precisely(s, scores.softcap_scale)
            else:
                s = softcap(s, scores.softcap_scale)
        elif not C.POSITIVE:
            s = s * scores.softcap_scale
            scale = 1.0
        if MASKED:
            s = tl.where(sees(mask, start + tl.arange(0, C.BLOCK), C), s, float("-inf"))
        row_max, shift, rescale = update_scaled_max(s, row_max, scale)
        p = exp_scores(s, scale, shift)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        o = o * rescale[:, None]
        y = load_block(keys.v, start, keys, C.DV, C.BLOCK_DV, MASKED, C)
        if C.PRECISION == "tf32":
            o = tl.dot(to_tf32(p), to_tf32(y), o, input_precision=C.PRECISION)
        else:
            o = tl.dot(p.to(MATH), y.to(MATH), o, input_precision=C.PRECISION)
    return Softmax(row_max, row_sum, o)


@triton.jit
def add_stretch(begin, end, tile, q, softmax, keys, mask, scores, C: tl.constexpr):
    """Add key blocks [begin, end) of a tile, with a loop for each run of `tilestream.core.attention.key_blocks`."""
    if C.LEFT:
        softmax = add_blocks(begin, tl.minimum(end, tile.plain_begin), q, softmax, keys, mask, scores, True, C)
    low, high = tl.maximum(begin, tile.plain_begin), tl.minimum(end, tile.plain_end)
    softmax = add_blocks(low, high, q, softmax, keys, mask, scores, False, C)
    return add_blocks(tl.maximum(begin, tile.plain_end), end, q, softmax, keys, mask, scores, True, C)


@triton.jit
def add_arriving(passed, tile, q, softmax, keys, mask, scores, arrival, C: tl.constexpr):
    """Add all key blocks of a tile, stretch by stretch as their chunks arrive. Returns ``(passed, softmax)``.

    ``arrival``: the arguments of `pass_keys`, and the first row of the sequence's keys among all that arrive.
    """
    KEYS: tl.constexpr = C.KEYS
    work, words, gate, watch, origin = arrival
    passed = poll_over(passed, words, watch)
    begin = tile.begin
    while (begin < tile.end) & (passed.over == 0):
        first = origin + tl.maximum(begin * C.BLOCK, keys.low)
        end = origin + tl.minimum(begin * C.BLOCK + C.BLOCK, keys.high)
        passed, ready = pass_keys(first, end, passed, tile, work, words, gate, watch, KEYS)
        if C.TRACE:
            if begin == tile.begin:
                ready_span(words.log, tile.pm * work.num_n + tile.pn)
                chunk_span(words.log, tile.pm * work.num_n + tile.pn, chunk_at(end - 1, gate.rows, KEYS))
        ready = tl.minimum(ready - origin, keys.high)
        until = tl.where(passed.over != 0, begin, tl.where(ready == keys.high, tile.end, ready // C.BLOCK))
        softmax = add_stretch(begin, until, tile, q, softmax, keys, mask, scores, C)
        begin = until
    return passed, softmax


# Store ---------------------------------------------------------------------------------------------------------------


@triton.jit
def store_tile(softmax, tile, over, scores, scale_v, extents, out, lse, C: tl.constexpr):
    """Store ``O / l`` and the log-sum-exp of a tile: NaN once the launch is ``over``; 0, -inf without keys."""
    # Rows from another opaque 0 than the loops', so that they are not kept through the loops.
    row, position = rows_of_tile(tl.minimum(tile.batch, 0), tile.first, C)
    head = tile.head * C.PACK
    factor, logs = finalize(softmax.row_max, softmax.row_sum, scores.sinks, head, row, 1.0, C.PACK)
    if scale_v.at is not None:
        at = scale_v.at + tile.batch * scale_v.batch + tile.head // extents.q_heads_per_kv * scale_v.head
        factor = factor * tl.load(at, mask=tile.batch < extents.sequences - 1, other=1.0)
    if C.GATED:
        factor = tl.where(over != 0, float("nan"), factor)
        logs = tl.where(over != 0, float("nan"), logs)
    at = first_of(out, tile.batch, tile.origin_q + tile.first, head, C.ALIGN_OUT)
    column = tl.arange(0, C.BLOCK_DV)
    tl.store(
        at + (offset_of(row, out, C.ALIGN_OUT, C)[:, None] + column[None, :]),
        (softmax.o * factor[:, None]).to(out.at.dtype.element_ty),
        mask=(position < tile.queries)[:, None] & (column < C.DV)[None, :],
    )  # fmt: skip
    if lse.at is not None:
        at = first_of(lse, tile.batch, tile.origin_q + tile.first, head, 1)
        tl.store(at + offset_of(row, lse, 1, C), logs, mask=position < tile.queries)


# The kernel ----------------------------------------------------------------------------------------------------------


@entry(triton.jit, specialised=[f"stride_{x}{of}" for x in "qkvo" for of in "brh"])
def attention(
    q, k, v, out, lse, sinks, scale_q, scale_k, scale_v, cu_seqlens_q, cu_seqlens_k, seqlens_k, block_table, starts,
    order, counters, log, signals, quarantine, bounds, records, claims,
    base: tl.int64, reset, epoch, key, allowed: tl.int64, op, rows_per_chunk, chunks,
    sequences, seqlen_q, seqlen_k, tokens_q, tokens_k, pages, head_tiles, q_heads_per_kv, left, right, scale,
    softcap_scale, stride_qb, stride_qr, stride_qh, stride_kb, stride_kr, stride_kh, stride_vb, stride_vr, stride_vh,
    stride_ob, stride_or, stride_oh, lse_batch, lse_row, lse_head, table_stride,
    stride_sqb, stride_sqh, stride_skb, stride_skh, stride_svb, stride_svh,
    queues, tiles, num_m, num_n, group, C: tl.constexpr,
):  # fmt: skip
    """``out = softmax(mask(scale * q @ k^T)) @ v``; each resident program is a worker.

    The parameters are fields of the structs of `tilestream.core.attention_structs`.

    Parameters
    ----------
    log
        int64, a record an item, with ``TRACE``: see `tilestream.kernels.device.trace`.
    pages
        The number of pages.
    C
        A `tilestream.kernels.attention_config.PortableAttentionConfig`.
    """
    extents = Extents(
        starts, order, sequences, cu_seqlens_q, cu_seqlens_k, seqlens_k, tokens_q, tokens_k, seqlen_q, seqlen_k,
        head_tiles, q_heads_per_kv, 1, left, right, 0, 0,
    )  # fmt: skip
    q = Rows(q, stride_qb, stride_qr, stride_qh)
    k = Rows(k, stride_kb, stride_kr, stride_kh)
    v = Rows(v, stride_vb, stride_vr, stride_vh)
    out = Rows(out, stride_ob, stride_or, stride_oh)
    lse = Rows(lse, lse_batch, lse_row, lse_head)
    scales = Scales(
        Rows(scale_q, stride_sqb, 0, stride_sqh), Rows(scale_k, stride_skb, 0, stride_skh),
        Rows(scale_v, stride_svb, 0, stride_svh),
    )  # fmt: skip
    coming = Incoming(signals, quarantine, bounds, epoch, key, chunks, rows_per_chunk, chunks, 0)
    nothing = Incoming(None, None, None, 1, 0, 0, 1, 0, 0)
    gate = Gate(coming, nothing, None, 0, 0, records, claims, op, allowed)
    work = Work(1, num_m, num_n, 1, tiles, 0, 0, queues, None, group, 0, 1, 0)
    words = Words(counters, base, reset, log, 0, None, None)
    scores = Scores(scale, softcap_scale, sinks)

    progress, watch = begin_worker(tl.program_id(0), tl.num_programs(0), work, words, gate, C)
    cursor, passed = progress.cursor, progress.passed
    found = tl.cast(1, tl.int32)
    while found != 0:
        found, item, cursor = take(cursor, work, words, watch, C)
        found, tile = locate_tile(found, item, extents, group, C)
        if found != 0:
            if C.TRACE:
                begin_span(log, tile.pm * num_n + tile.pn, watch.worker)
                if not C.GATED:
                    ready_span(log, tile.pm * num_n + tile.pn)
            row, position = rows_of_tile(tl.minimum(tile.first, 0), tile.first, C)
            x = load_queries(q, tile, row, position, C)
            keys = keys_of_tile(tile, k, v, (block_table, table_stride, pages), extents, C)
            mask = Mask(position, tile.keys, tile.causal_offset_left, tile.causal_offset_right)
            softcap_scale = softcap_scale_of_tile(scores, scales, tile, extents, C)
            of_tile = Scores(scores.scale, softcap_scale, scores.sinks)
            softmax = start_softmax(C)
            if C.GATED:
                # The rows of all sequences arrive in order.
                origin = tile.origin_k if cu_seqlens_k is not None else tile.batch * seqlen_k
                arrival = (work, words, gate, watch, origin)
                passed, softmax = add_arriving(passed, tile, x, softmax, keys, mask, of_tile, arrival, C)
            else:
                softmax = add_stretch(tile.begin, tile.end, tile, x, softmax, keys, mask, of_tile, C)
            store_tile(softmax, tile, passed.over, of_tile, scales.v, extents, out, lse, C)
            if C.TRACE:
                tl.debug_barrier()  # all threads' stores
                end_span(log, tile.pm * num_n + tile.pn, 0, passed.over == 0)
    finish_worker(passed, work, words, gate, watch, C)
