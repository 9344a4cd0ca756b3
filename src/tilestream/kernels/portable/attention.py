"""Attention prefill in Triton: resident programs, each of which takes query blocks until there are none.

::

    for item in schedule:                                # schedule.take: longest first, heads in groups
        top = sink; total = 1 (no sink: -inf, 0); acc = 0
        for stretch of the item's key blocks:            # all at once, but where keys are still arriving
            gate.wait(stretch)                           # over: out, lse = NaN
            for block at the window's edge, then plain, then at the diagonal and the end:
                s = Q K[block]^T, capped; masked, but the plain ones
                top' = max(top, s);  p = 2^(s - top');  total, acc = total and acc * 2^(top - top') + p and p V[block]
        out = acc / total;  lse = ln 2 (top + log2 total)

Scores are in base 2: the scale has log2 e in it, and the exponential is one instruction. Load and math share one loop,
which Triton pipelines; there is no item ring. Nobody waits for another worker.

K and V are read where some row of the tile sees the key, and nowhere else: what lies behind the last key, or has not
arrived, may be anything, NaN too.

Which keys a tile sees, and where a tile of packed sequences lies, is `tilestream.core.attention`; the list of
packed sequences is made by `attention_list.list_sequences`, a launch before this one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.core import attention as rules
from tilestream.core.structs import Gate, Incoming, Watch, Words, Work
from tilestream.kernels.device.attention_gate import chunk_at, leave_keys, look_at_keys, pass_keys
from tilestream.kernels.device.clock import present
from tilestream.kernels.device.epilogue import power_of_2, sigmoid
from tilestream.kernels.device.gate import is_over
from tilestream.kernels.device.jit import device
from tilestream.kernels.device.schedule import (
    LINE,
    cdiv,
    enter,
    first_cursor,
    leave,
    longest_first,
    schedule_config,
    take,
)
from tilestream.kernels.device.trace import begin_span, chunk_span, end_span, ready_span
from tilestream.kernels.device.varlen import place_of, rows_of
from tilestream.kernels.portable.gemm import to_tf32

diagonal = device(rules.diagonal)
key_blocks = device(rules.key_blocks)
seen_keys = device(rules.seen_keys)

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)

#: Arguments that say nothing about alignment: one compiled kernel serves all their values.
UNSPECIALISED = (
    "base", "reset", "epoch", "key", "allowed", "op", "chunks", "rows_per_chunk", "batch", "seqlen_q", "seqlen_k",
    "tokens_q", "tokens_k", "pages", "packs", "ratio", "left", "right", "top_left", "scale", "cap", "stride_table",
    "stride_lb", "stride_ls", "stride_lh", "stride_sqb", "stride_sqh", "stride_skb", "stride_skh", "stride_svb",
    "stride_svh", "num_m", "num_n", "tiles", "queues", "group",
)  # fmt: skip
#: Words and numbers that lie anywhere.
UNALIGNED = (
    "lse", "sinks", "scale_q", "scale_k", "scale_v", "cu_seqlens_q", "cu_seqlens_k", "block_table", "seqlens_k",
    "starts", "order", "signals", "quarantine", "bounds",
)  # fmt: skip


# Load and math -------------------------------------------------------------------------------------------------------


@triton.jit
def rows_of_tile(nothing, first, BLOCK_M: tl.constexpr, PACK: tl.constexpr):
    """``(row, position)`` of a tile's rows: see `schedule.attention.row_of`.

    ``nothing`` is 0, which the compiler does not know: what depends on rows alone it would work out once for all items,
    and keep in registers that the loops want.
    """
    row = tl.arange(0, BLOCK_M) + nothing
    return row, first + row // PACK


@triton.jit
def offset_of(row, stride_row, stride_head, PACK: tl.constexpr, ALIGN: tl.constexpr, WIDE: tl.constexpr):
    """Where a tile's rows lie, counted from its first: the heads of a position side by side."""
    if WIDE:
        row = row.to(tl.int64)
    return tl.multiple_of(row // PACK * stride_row + row % PACK * stride_head, ALIGN)


@triton.jit
def load_block(
    at, start, low, high, table, pages, stride_page, stride_row, columns,
    BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr, WIDE: tl.constexpr, MASK: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Rows [start, start + BLOCK_N) of K or V of a head; 0 outside of [low, high), where MASK says that there is such.

    Pages: a block lies in one, or its rows are gathered.
    """
    row = tl.arange(0, BLOCK_N)
    key = start + row
    column = tl.arange(0, BLOCK)
    real = (key >= low) & (key < high)
    if PAGE == 0:
        at += start.to(tl.int64) * stride_row
    elif PAGE >= BLOCK_N:
        page = tl.minimum(tl.maximum(tl.load(table + start // PAGE), 0), pages - 1)
        at += page.to(tl.int64) * stride_page + (start % PAGE).to(tl.int64) * stride_row
    if WIDE:
        row = row.to(tl.int64)
    if (PAGE == 0) or (PAGE >= BLOCK_N):
        pointers = at + (tl.multiple_of(row * stride_row, ALIGN)[:, None] + column[None, :])
    else:
        if MASK:
            page = tl.load(table + key // PAGE, mask=real, other=0)
        else:
            page = tl.load(table + key // PAGE)
        page = tl.minimum(tl.maximum(page, 0), pages - 1)
        offset = page.to(tl.int64) * stride_page + (key % PAGE).to(tl.int64) * stride_row
        pointers = at + (tl.multiple_of(offset, ALIGN)[:, None] + column[None, :])
    if MASK:
        block = tl.load(pointers, mask=real[:, None] & (column < columns)[None, :], other=0.0)
    elif columns == BLOCK:
        block = tl.load(pointers)
    else:
        block = tl.load(pointers, mask=(column < columns)[None, :], other=0.0)
    return block


@triton.jit
def capped(x, PRECISE: tl.constexpr):
    """``tanh(x)``: by one exponential, and where float32 is asked for by a series around 0, where that one cancels."""
    y = 2.0 * sigmoid(2.0 * x) - 1.0
    if PRECISE:
        # Taylor's, up to x^13: the first term left out is 6e-8 of the sum at 0.5.
        z = x * x
        near = 0.021869488536155202 + z * (-0.008863235529902197 + z * 0.003592128036572481)
        near = -0.3333333333333333 + z * (0.13333333333333333 + z * (-0.05396825396825397 + z * near))
        y = tl.where(tl.abs(x) < 0.5, x + x * z * near, y)
    return y


@triton.jit
def add_blocks(
    begin, end, q, acc, total, top, k, v, low, high, at, behind, left, right, factor, cap, table, pages,
    stride_kp, stride_ks, stride_vp, stride_vs,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    ALIGN: tl.constexpr, WIDE: tl.constexpr, MASK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, POSITIVE: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """Blocks [begin, end) of a tile's keys, added to its sums: ``(acc, total, top)``.

    ``at`` is each row's position among the queries, moved ahead by the diagonal; ``factor`` is the scale with log2 e.
    """
    for block in range(begin, end):
        start = block * BLOCK_N
        x = load_block(
            k, start, low, high, table, pages, stride_kp, stride_ks, D, BLOCK_N, BLOCK_D, ALIGN, WIDE, MASK, PAGE
        )
        if PRECISION == "tf32":
            x = to_tf32(x)
        if q.dtype != x.dtype:
            x = x.to(q.dtype)
        s = tl.dot(q, tl.trans(x), input_precision=PRECISION)
        # The scale of what is largest is applied to the largest alone, and to the others by the exponential's own
        # multiply-add; but not through a cap, nor a scale that turns the order around.
        after = factor
        if SOFTCAP:
            s = (cap * _LOG2_E) * capped(s * (factor / (cap * _LOG2_E)), tl.float32 == MATH)
            after = 1.0
        elif not POSITIVE:
            s = s * factor
            after = 1.0
        if MASK:
            key = start + tl.arange(0, BLOCK_N)
            real = ((key >= low) & (key < high))[None, :]
            if RIGHT:
                real = real & ((key + behind)[None, :] <= (at + right)[:, None])
            if LEFT:
                real = real & ((key + behind + left)[None, :] >= at[:, None])
            s = tl.where(real, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1) * after)
        # Of a row that has seen nothing yet: 2^(-inf - 0), not 2^(-inf + inf).
        level = tl.where(new == float("-inf"), 0.0, new)
        shrink = power_of_2(top - level)
        p = power_of_2(s * after - level[:, None])
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        y = load_block(
            v, start, low, high, table, pages, stride_vp, stride_vs, DV, BLOCK_N, BLOCK_DV, ALIGN, WIDE, MASK, PAGE
        )
        if PRECISION == "tf32":
            acc = tl.dot(to_tf32(p), to_tf32(y), acc, input_precision=PRECISION)
        else:
            acc = tl.dot(p.to(MATH), y.to(MATH), acc, input_precision=PRECISION)
        top = new
    return acc, total, top


@triton.jit
def add_stretch(
    begin, end, plain_begin, plain_end, q, acc, total, top, k, v, low, high, at, behind, left, right, factor, cap,
    table, pages, stride_kp, stride_ks, stride_vp, stride_vs,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    ALIGN: tl.constexpr, WIDE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, POSITIVE: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """Blocks [begin, end), each run of `schedule.attention.key_blocks` in a loop of its own: see `add_blocks`."""
    if LEFT:
        acc, total, top = add_blocks(
            begin, tl.minimum(end, plain_begin), q, acc, total, top, k, v, low, high, at, behind, left, right,
            factor, cap, table, pages, stride_kp, stride_ks, stride_vp, stride_vs,
            BLOCK_N, BLOCK_D, BLOCK_DV, D, DV, ALIGN, WIDE, True, LEFT, RIGHT, SOFTCAP, POSITIVE, PAGE, PRECISION, MATH,
        )  # fmt: skip
    acc, total, top = add_blocks(
        tl.maximum(begin, plain_begin), tl.minimum(end, plain_end), q, acc, total, top, k, v, low, high, at, behind,
        left, right, factor, cap, table, pages, stride_kp, stride_ks, stride_vp, stride_vs,
        BLOCK_N, BLOCK_D, BLOCK_DV, D, DV, ALIGN, WIDE, False, LEFT, RIGHT, SOFTCAP, POSITIVE, PAGE, PRECISION, MATH,
    )  # fmt: skip
    acc, total, top = add_blocks(
        tl.maximum(begin, plain_end), end, q, acc, total, top, k, v, low, high, at, behind, left, right,
        factor, cap, table, pages, stride_kp, stride_ks, stride_vp, stride_vs,
        BLOCK_N, BLOCK_D, BLOCK_DV, D, DV, ALIGN, WIDE, True, LEFT, RIGHT, SOFTCAP, POSITIVE, PAGE, PRECISION, MATH,
    )  # fmt: skip
    return acc, total, top


# The kernel ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=UNSPECIALISED, do_not_specialize_on_alignment=UNALIGNED)
def attention(
    q, k, v, out, lse, sinks, scale_q, scale_k, scale_v, cu_seqlens_q, cu_seqlens_k, block_table, seqlens_k, starts,
    order, counters, log, signals, quarantine, bounds, records, claims,
    base: tl.int64, reset, epoch, key, allowed: tl.int64, op, chunks, rows_per_chunk,
    batch, seqlen_q, seqlen_k, tokens_q, tokens_k, pages, packs, ratio, left, right, top_left, scale, cap,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_ob, stride_os, stride_oh, stride_lb, stride_ls, stride_lh, stride_table,
    stride_sqb, stride_sqh, stride_skb, stride_skh, stride_svb, stride_svh,
    num_m, num_n, tiles, queues, group,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, PACK: tl.constexpr, ALIGN: tl.constexpr, ALIGN_OUT: tl.constexpr,
    WIDE: tl.constexpr, KIND: tl.constexpr, SPLIT: tl.constexpr, STEAL: tl.constexpr, ORDER: tl.constexpr,
    VARLEN: tl.constexpr, PACKED_K: tl.constexpr, LENGTHS: tl.constexpr, PAGE: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, POSITIVE: tl.constexpr,
    PRECISION: tl.constexpr, CONVERT: tl.constexpr, KEYS: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """``out = softmax(mask(scale * q @ k^T)) @ v``, one resident program a worker.

    See `tilestream.plan.attention_problem`.

    Parameters
    ----------
    q, k, v, out, lse, sinks, scale_q, scale_k, scale_v, cu_seqlens_q, cu_seqlens_k, block_table, seqlens_k
        As in `tilestream.launch.attention.Operands`; None where there is none.
    starts, order
        Of a packed call: see `attention_list`.
    counters, base, reset
        See `tilestream.kernels.device.schedule`.
    log
        A record an item, where ``TRACE``: see `tilestream.kernels.device.trace`.
    signals, quarantine, bounds, epoch, key, chunks, rows_per_chunk, records, claims, allowed, op
        How keys arrive, where ``KEYS`` says that they do: see `tilestream.kernels.device.attention_gate`.
    seqlen_q, seqlen_k, tokens_q, tokens_k, pages
        Rows of a dense sequence; the most keys of one; rows of packed ones; pages there are.
    packs, ratio
        Packs of `PACK` query heads; query heads that share a head of keys.
    left, right
        Of the window; -1: all.
    scale, cap
        Of scores, in base 2; of the soft cap.
    ALIGN, ALIGN_OUT
        What the strides of q, k and v, and of the output, are multiples of.
    CONVERT
        Whether the matrix units take q and k as float16: where they know no 8-bit operands. P and V they always do.
    """
    worker = tl.program_id(0)
    workers = tl.num_programs(0)
    POSITIONS: tl.constexpr = BLOCK_M // PACK
    GATED: tl.constexpr = KEYS != "none"
    NARROW: tl.constexpr = q.dtype.element_ty == tl.float8e4nv
    MATH: tl.constexpr = tl.float16 if NARROW else q.dtype.element_ty
    zero = tl.zeros((), tl.int32)
    counts_out = reset
    if GATED:
        counts_out = tl.where(epoch == 0, 1, reset)
    SCHEDULE: tl.constexpr = schedule_config(KIND, SPLIT, STEAL, ORDER)
    work = Work(1, num_m, num_n, 1, tiles, 0, 0, queues, None, group, 0, 1, 0)
    words = Words(counters, base, reset, log, 0, None, None)
    gate = Gate(
        Incoming(signals, quarantine, bounds, epoch, key, chunks, rows_per_chunk, chunks, 0), None, None, 0, 0, records,
        claims, op, allowed,
    )  # fmt: skip
    enter(work, words, worker, counts_out, KIND == "static", GATED)
    found = zero + 1
    over = zero
    seen_low = zero
    seen_high = zero - 1
    watch = Watch(worker, workers, counts_out, None, None, None)
    if GATED:
        clock = claims + LINE
        watch = Watch(worker, workers, counts_out, counters + (queues + 1) * LINE, clock, present(clock))
        over = look_at_keys(gate, words, watch)
    cursor = first_cursor()
    while found != 0:
        found, item, cursor = take(cursor, work, words, watch, SCHEDULE)
        pm, pn = item.pm, item.pn
        block = pm
        sequence = pn // packs
        pack = pn % packs
        first_query = zero
        queries = zero + seqlen_q
        first_key = zero
        keys = zero + seqlen_k
        if VARLEN:
            # Tickets only grow: what comes behind the list's last tile is behind it, too, and there is no more.
            found = tl.where(pm < tl.load(starts + batch + 1), found, 0)
            at_tile = tl.where(found != 0, pm, 0)
            place = place_of(at_tile, starts, batch + 1)
            sequence = tl.load(order + place)
            first_query, queries = rows_of(cu_seqlens_q, sequence, batch + 1, tokens_q)
            if PACKED_K:
                in_keys = tl.maximum(tl.minimum(sequence, batch - 1), 0)
                first_key, keys = rows_of(cu_seqlens_k, in_keys, batch + 1, tokens_k)
            blocks = tl.maximum(cdiv(queries, POSITIONS), 1)
            block, pack = longest_first(at_tile - tl.load(starts + place), blocks, packs, group)
        if LENGTHS:
            keys = tl.minimum(tl.maximum(tl.load(seqlens_k + sequence, mask=sequence < batch, other=0), 0), keys)
        # Rows of queries behind the last sequence are one that sees no key, and has no scales.
        real = sequence < batch
        keys = tl.where(real, keys, 0)
        if found != 0:
            if TRACE:
                tile = pm * num_n + pn
                begin_span(log, tile, worker)
                if not GATED:
                    ready_span(log, tile)
            head = pack * PACK
            head_kv = head // ratio
            ahead, behind = diagonal(queries, keys)
            if top_left != 0:
                ahead = ahead * 0
                behind = behind * 0
            widest = queries + keys
            to_left = tl.where(left < 0, widest, tl.minimum(left, widest))
            to_right = tl.where(right < 0, widest, tl.minimum(right, widest))
            first = block * POSITIONS
            last = tl.minimum(queries, first + POSITIONS) - 1
            low, _ = seen_keys(first, ahead, behind, to_left, to_right, keys)
            _, high = seen_keys(last, ahead, behind, to_left, to_right, keys)
            low = tl.minimum(low, high)
            begin, plain_begin, plain_end, end = key_blocks(
                first, last, ahead, behind, to_left, to_right, keys, BLOCK_N
            )
            row, position = rows_of_tile(tl.minimum(block, 0), first, BLOCK_M, PACK)

            # Batches are dense: packed sequences lie one behind the other, and pages anywhere.
            at_batch = sequence.to(tl.int64)
            at_row = (first_query + first).to(tl.int64)
            if VARLEN:
                q_at = q + at_row * stride_qs
            else:
                q_at = q + at_batch * stride_qb + at_row * stride_qs
            k_at = k + tl.multiple_of(head_kv.to(tl.int64) * stride_kh, ALIGN)
            v_at = v + tl.multiple_of(head_kv.to(tl.int64) * stride_vh, ALIGN)
            table = block_table
            if PAGE:
                table = block_table + at_batch * stride_table
            elif PACKED_K:
                k_at += first_key.to(tl.int64) * stride_ks
                v_at += first_key.to(tl.int64) * stride_vs
            else:
                k_at += at_batch * stride_kb
                v_at += at_batch * stride_vb
            q_at += tl.multiple_of(head.to(tl.int64) * stride_qh, ALIGN)
            offset = offset_of(row, stride_qs, stride_qh, PACK, ALIGN, WIDE)
            column = tl.arange(0, BLOCK_D)
            x = tl.load(
                q_at + (offset[:, None] + column[None, :]),
                mask=(position < queries)[:, None] & (column < D)[None, :], other=0.0,
            )  # fmt: skip
            if PRECISION == "tf32":
                x = to_tf32(x)
            if CONVERT:
                x = x.to(tl.float16)

            factor = scale
            if scale_q is not None:
                # A pack is one head wherever there are scales.
                factor = factor * tl.load(scale_q + sequence * stride_sqb + head * stride_sqh, mask=real, other=1.0)
            if scale_k is not None:
                factor = factor * tl.load(scale_k + sequence * stride_skb + head_kv * stride_skh, mask=real, other=1.0)
            acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
            if sinks is not None:
                top = tl.load(sinks + head + row % PACK) * _LOG2_E
                total = tl.full((BLOCK_M,), 1.0, tl.float32)
            else:
                top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
                total = tl.zeros((BLOCK_M,), tl.float32)

            if GATED:
                # The rows of all sequences arrive one behind the other.
                offset = sequence * seqlen_k
                if PACKED_K:
                    offset = first_key
                if over == 0:
                    over = is_over(words, watch).to(tl.int32)
                if TRACE:
                    begin_at = begin
                while (begin < end) & (over == 0):
                    over, ready, seen_low, seen_high = pass_keys(
                        offset + tl.maximum(begin * BLOCK_N, low), offset + tl.minimum(begin * BLOCK_N + BLOCK_N, high),
                        (seen_low, seen_high), over, (pm * num_n + pn, -1, pm, pn), gate, words, watch, KEYS,
                    )  # fmt: skip
                    if TRACE:
                        if begin == begin_at:
                            ready_span(log, tile)
                            chunk_span(log, tile, chunk_at(
                                offset + tl.minimum(begin * BLOCK_N + BLOCK_N, high) - 1,
                                gate.rows, KEYS,
                            ))  # fmt: skip
                    ready = tl.minimum(ready - offset, high)
                    until = tl.where(over != 0, begin, tl.where(ready == high, end, ready // BLOCK_N))
                    acc, total, top = add_stretch(
                        begin, until, plain_begin, plain_end, x, acc, total, top, k_at, v_at, low, high,
                        position + ahead, behind, to_left, to_right, factor, cap, table, pages,
                        stride_kb, stride_ks, stride_vb, stride_vs,
                        BLOCK_N, BLOCK_D, BLOCK_DV, D, DV, ALIGN, WIDE, LEFT, RIGHT, SOFTCAP, POSITIVE, PAGE,
                        PRECISION, MATH,
                    )  # fmt: skip
                    begin = until
            else:
                acc, total, top = add_stretch(
                    begin, end, plain_begin, plain_end, x, acc, total, top, k_at, v_at, low, high,
                    position + ahead, behind, to_left, to_right, factor, cap, table, pages,
                    stride_kb, stride_ks, stride_vb, stride_vs,
                    BLOCK_N, BLOCK_D, BLOCK_DV, D, DV, ALIGN, WIDE, LEFT, RIGHT, SOFTCAP, POSITIVE, PAGE,
                    PRECISION, MATH,
                )  # fmt: skip

            if scale_v is not None:
                acc = acc * tl.load(scale_v + sequence * stride_svb + head_kv * stride_svh, mask=real, other=1.0)
            # What saw nothing: 0, and -inf.
            total = tl.where(total == 0, 1.0, total)
            acc = acc / total[:, None]
            logs = _LN_2 * (top + tl.log2(total))
            if GATED:
                acc = tl.where(over != 0, float("nan"), acc)
                logs = tl.where(over != 0, float("nan"), logs)
            # Once more, and from another 0: not kept through the loops.
            row, position = rows_of_tile(tl.minimum(sequence, 0), first, BLOCK_M, PACK)
            out_at = out + at_row * stride_os + tl.multiple_of(head.to(tl.int64) * stride_oh, ALIGN_OUT)
            if not VARLEN:
                out_at += at_batch * stride_ob
            offset = offset_of(row, stride_os, stride_oh, PACK, ALIGN_OUT, WIDE)
            column = tl.arange(0, BLOCK_DV)
            tl.store(
                out_at + (offset[:, None] + column[None, :]), acc.to(out.dtype.element_ty),
                mask=(position < queries)[:, None] & (column < DV)[None, :],
            )  # fmt: skip
            if lse is not None:
                lse_at = lse + at_row * stride_ls + head.to(tl.int64) * stride_lh
                if not VARLEN:
                    lse_at += at_batch * stride_lb
                tl.store(lse_at + offset_of(row, stride_ls, stride_lh, PACK, 1, WIDE), logs, mask=position < queries)
            if TRACE:
                tl.debug_barrier()  # all threads' stores
                end_span(log, tile, 0, over == 0)
    if GATED:
        leave_keys(work, words, gate, watch, over)
    else:
        leave(work, words, watch, KIND == "static")
