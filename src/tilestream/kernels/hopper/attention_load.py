"""The load warp of attention: items, and their copies of Q, K and V, all by TMA.

What a copy may bring ends with its sequence, whoever lies behind it in memory: rows that are not the sequence's come as
zeros (what another sequence or a page has there may be NaN, and 0 times NaN is no 0), and are not stored. Of a dense
batch the tensor map's extents see to that. Of packed sequences and of pages a map of two more dimensions does
(`place`): the rows' extent is ``BEYOND`` for all, and a copy begins so far before it as there are rows left; the other
two bring the address back, one by ``BEYOND`` steps that wrap around 64 bits, the other by the rows. A technique of
Triton's `triton.tools.ragged_tma`.

Where keys arrive (``KEYS``), the load warp asks the gate before a block whose chunks it does not know to be there,
inside of the item, and takes blocks from the first key on. It is told "over" (`tilestream.kernels.device.gate`)
with stages still to fill that consumers will wait for: those it fills with nothing, and says so in the item's slot
before the last of them, so that nobody takes the result for one. Items after that have no blocks.

*Ahead.* The stage of an item's last values comes free when the block before is multiplied, a step behind the last
keys'. So the next item is taken in between, by a ticket that was asked for some blocks before
(`tilestream.kernels.hopper.queues`): of what consumers wait for, nothing changes its order.

A page that holds less than a key block is a copy of its own, for each 128 bytes of a row: they lie one behind the other
in the swizzled block, where those of 8 rows and more keep its pattern.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tilestream.core import attention
from tilestream.core.structs import Gate, Incoming, Watch, Words, Work
from tilestream.kernels.device.attention_gate import chunk_at, leave_keys, look_at_keys, pass_keys
from tilestream.kernels.device.clock import present
from tilestream.kernels.device.gate import is_over
from tilestream.kernels.device.schedule import (
    LINE,
    add,
    cdiv,
    enter,
    first_cursor,
    leave,
    longest_first,
    schedule_config,
    take,
    with_asked,
)
from tilestream.kernels.device.trace import begin_span, chunk_span, ready_span
from tilestream.kernels.device.varlen import place_of, rows_of
from tilestream.kernels.hopper.compat import boxes, device, tma_load
from tilestream.kernels.hopper.gate import fenced
from tilestream.kernels.hopper.queues import EARLY, await_ticket, prefetch_ticket
from tilestream.kernels.hopper.ring import ITEMS, put, step

diagonal = device(attention.diagonal)
share_of_keys = device(attention.share_of_keys)
key_blocks = device(attention.key_blocks)

#: The extent of the rows of a map that clips at any row: `BEYOND` times its stride, and one more, is 2**34 elements.
BEYOND: gl.constexpr = gl.constexpr(2**30)


#: The field of an item's slot that says that it is void.
VOID: gl.constexpr = gl.constexpr(15)


class Arriving(NamedTuple):
    """What the kernel is told of keys that arrive: see `tilestream.launch.portable.attention_arguments.KeyGate`."""

    signals: Any
    quarantine: Any
    bounds: Any
    records: Any
    claims: Any
    epoch: Any
    key: Any
    allowed: Any
    op: Any
    rows_per_chunk: Any
    chunks: Any


@gluon.jit
def place(batch, origin, length, first, head, column, RAGGED: gl.constexpr):
    """Where a copy of rows from ``first`` on is, of ``length`` rows that begin at row ``origin`` of the tensor."""
    if RAGGED:
        return (BEYOND, origin + length, BEYOND - length + first, head, column)
    else:
        return (batch, first, head, column)


@gluon.jit
def load_block(
    tensor_map, bar, stages, stage, batch, origin, keys, first, head, table, table_stride, page_rows,
    BLOCK: gl.constexpr, COLUMNS: gl.constexpr, PAGE: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Start the copies of a key block, of K or of V, into a stage.

    ``stages`` are boxes: of a stage, the rows of one column of boxes before those of the next.
    """
    WIDTH: gl.constexpr = tensor_map.block_type.shape[-1]
    HEIGHT: gl.constexpr = tensor_map.block_type.shape[-3]
    HIGH: gl.constexpr = BLOCK // HEIGHT
    WIDE: gl.constexpr = COLUMNS // WIDTH
    for i in range(HIGH):  # not unrolled: the load warp has few registers
        row = first + i * HEIGHT
        length = keys
        if PAGE:
            # A page that holds none of the keys is not in the table: nothing of the one before it is copied then.
            pages = table + batch.to(gl.int64) * table_stride
            page = gl.load(pages + gl.minimum(row, keys - 1) // PAGE)
            origin = page * page_rows
            length = gl.minimum(gl.maximum(keys - row + row % PAGE, 0), PAGE)
            row = gl.minimum(row % PAGE, length)
        for j in gl.static_range(WIDE):
            at = place(batch, origin, length, row, head, j * WIDTH, RAGGED)
            tma_load(tensor_map, at, bar, stages.index((stage * WIDE + j) * HIGH + i))


@gluon.jit
def fill_stage(
    tensor_map, full, empty, stages, stage, phase, over, batch, origin, keys, first, head, table, table_stride,
    page_rows, BYTES: gl.constexpr, BLOCK: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    PAGE: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """A key block, of K or of V, into the next stage; nothing, where the launch is ``over``. Where the next one is."""
    mbarrier.wait(empty.index(stage), phase ^ 1)
    if over != 0:
        mbarrier.arrive(full.index(stage))
    else:
        mbarrier.expect(full.index(stage), BYTES)
        load_block(
            tensor_map, full.index(stage), stages, stage, batch, origin, keys, first, head, table, table_stride,
            page_rows, BLOCK, COLUMNS, PAGE, RAGGED,
        )  # fmt: skip
    return step(stage, phase, STAGES)


@gluon.jit
def item_of(
    found, pm, pn, starts, order_of, sequences, cu_queries, cu_keys, lengths, rows_q, rows_k,
    queries, keys, columns, shares, group, batch_rows_k, batch_rows_v, left, right,
    POSITIONS: gl.constexpr, BLOCK: gl.constexpr, SPLIT: gl.constexpr, TOP_LEFT: gl.constexpr, LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
):  # fmt: skip
    """What a tile is: its sequence, rows, head, keys and key blocks.

    Returns
    -------
    (found, batch, first, head, share, origin, queries, origin_k, origin_v, keys, begin, plain_begin, plain_end, end,
    until, since)
        ``found`` is 0 from the end of a packed call's list on: how long it is, only the device knows. ``head`` counts
        columns of tiles: heads, or packs of them; ``share`` the shares of its keys, where they are split. Origins are
        rows of the tensors. For the last two see `tilestream.kernels.hopper.attention_softmax.masked`.
    """
    zero = tl.cast(0, tl.int32)
    origin, origin_k, origin_v, begin, plain_begin, plain_end, end = zero, zero, zero, zero, zero, zero, zero
    until, since, share = zero, zero, zero
    heads = columns
    if SPLIT:
        columns = columns * shares
    batch = pn // columns
    head = pn % columns
    if cu_queries is not None:
        if found != 0:
            # Behind the list stands the number of tiles.
            found = (pm < gl.load(starts + sequences)).to(tl.int32)
        if found != 0:
            entry = place_of(pm, starts, sequences)
            batch = gl.load(order_of + entry)
            origin, queries = rows_of(cu_queries, batch, sequences, rows_q)
            pm, head = longest_first(
                pm - gl.load(starts + entry), cdiv(queries, POSITIONS), columns, gl.minimum(group, columns)
            )  # fmt: skip
    if found != 0:
        origin_k = batch * batch_rows_k
        origin_v = batch * batch_rows_v
        if cu_queries is not None and batch == sequences - 1:
            keys = zero  # the rows behind the last sequence
        else:
            if cu_keys is not None:
                origin_k, keys = rows_of(cu_keys, batch, sequences, rows_k)
                origin_v = origin_k
            if lengths is not None:
                keys = gl.minimum(gl.maximum(gl.load(lengths + batch), 0), keys)
        ahead, behind = zero, zero
        if not TOP_LEFT:
            ahead, behind = diagonal(queries, keys)
        if not LEFT:
            left = queries + keys
        if not RIGHT:
            right = queries + keys
        begin, plain_begin, plain_end, end = key_blocks(
            pm * POSITIONS, gl.minimum((pm + 1) * POSITIONS, queries) - 1, ahead, behind, left, right, keys, BLOCK
        )  # fmt: skip
        if SPLIT:
            # A sequence's first keys before its later ones, which may not have arrived.
            share = head // heads
            head = head % heads
            begin, plain_begin, plain_end, end = share_of_keys(begin, plain_begin, plain_end, end, shares, share)
        until = ahead - behind + right + 1
        since = ahead - behind - left
    return (
        found, batch, pm * POSITIONS, head, share, origin, queries, origin_k, origin_v, keys, begin, plain_begin,
        plain_end, end, until, since,
    )  # fmt: skip


@gluon.jit
def load_loop(source_of, ring, items, work, arriving, C: gl.constexpr):
    """The load warp: takes items, hands them on, and loads their queries, keys and values.

    ``arriving``: an `Arriving`, where ``KEYS`` says how keys arrive.
    """
    if C.CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    ROWS: gl.constexpr = ring.q.shape[1]
    WIDTH: gl.constexpr = ring.q.shape[2]
    COLUMNS: gl.constexpr = ring.v.shape[2]
    POSITIONS: gl.constexpr = C.CONSUMERS * ROWS // C.PACK
    Q_BYTES: gl.constexpr = C.PARTS * ROWS * WIDTH * ring.q.dtype.primitive_bitwidth // 8
    K_BYTES: gl.constexpr = C.PARTS * C.BLOCK * WIDTH * ring.k.dtype.primitive_bitwidth // 8
    V_BYTES: gl.constexpr = C.BLOCK * COLUMNS * ring.v.dtype.primitive_bitwidth // 8
    q_boxes = boxes(ring.q, source_of.q_map)
    k_boxes = boxes(ring.k, source_of.k_map)
    v_boxes = boxes(ring.v, source_of.v_map)
    worker = gl.program_id(0)
    workers = gl.num_programs(0)
    one = tl.cast(1, tl.int32)
    zero = tl.cast(0, tl.int32)
    over, seen_low, seen_high, leaves = zero, zero, zero - 1, work.reset
    if C.KEYS != "none":
        leaves = tl.where(arriving.epoch == 0, 1, work.reset)
    SCHEDULE: gl.constexpr = schedule_config(C.KIND, "items", False, C.ORDER)
    tiles = Work(one, work.num_m, work.num_n, one, work.tiles, zero, zero, one, None, work.group, zero, one, zero)
    words = Words(work.counters, work.base, work.reset, work.log, zero, None, None)
    keys = Incoming(
        arriving.signals, arriving.quarantine, arriving.bounds, arriving.epoch, arriving.key, arriving.chunks,
        arriving.rows_per_chunk, arriving.chunks, 0,
    )  # fmt: skip
    gate = Gate(keys, None, None, 0, 0, arriving.records, arriving.claims, arriving.op, arriving.allowed)
    enter(tiles, words, worker, leaves, C.KIND == "static", C.KEYS != "none")
    watch = Watch(worker, workers, leaves, None, None, None)
    if C.KEYS != "none":
        clock = arriving.claims + LINE
        watch = Watch(worker, workers, leaves, work.counters + 2 * LINE, clock, present(clock))
        over = look_at_keys(gate, words, watch)
    cursor = first_cursor()
    stage, phase, v_stage, v_phase = zero, zero, zero, zero
    slot, slot_phase, q_stage, q_phase = zero, zero, zero, zero
    found = one
    # There are no registers for that with pages, and where rows are cut off at the left too. Who may wait at a gate
    # holds no ticket meanwhile that another could use.
    AHEAD: gl.constexpr = not (C.PAGE or C.LEFT)
    ASKS: gl.constexpr = AHEAD and C.KIND == "dynamic" and C.KEYS == "none"
    late, v_batch, v_origin, v_keys, v_head, v_first = zero, zero, zero, zero, zero, zero
    asked = tl.cast(0, tl.int64)
    if ASKS:
        asked = prefetch_ticket(words, zero, one)
    while found != 0:
        found, item, cursor = take(
            with_asked(cursor, asked), tiles, words, watch, SCHEDULE, await_ticket if ASKS else add
        )  # fmt: skip
        pm, pn = item.pm, item.pn
        (
            found, batch, first, head, share, origin, own_queries, origin_k, origin_v, own_keys, begin, plain_begin,
            plain_end, end, until, since,
        ) = item_of(
            found, pm, pn, source_of.starts, source_of.order_of, source_of.sequences, source_of.cu_queries,
            source_of.cu_keys, source_of.lengths, source_of.rows_q, source_of.rows_k,
            source_of.queries, source_of.keys, source_of.columns, source_of.shares, work.group,
            source_of.batch_rows_k, source_of.batch_rows_v, source_of.left, source_of.right,
            POSITIONS, C.BLOCK, C.SPLIT, C.TOP_LEFT, C.LEFT, C.RIGHT,
        )  # fmt: skip
        if AHEAD:
            if late != 0:
                v_stage, v_phase = fill_stage(
                    source_of.v_map, ring.v_full, ring.v_empty, v_boxes, v_stage, v_phase, over, v_batch, v_origin,
                    v_keys, v_first,
                    v_head, source_of.table, source_of.table_stride, source_of.page_rows_v, V_BYTES, C.BLOCK,
                    COLUMNS, C.STAGES, C.PAGE, C.RAGGED_K,
                )  # fmt: skip
            late = zero
        if C.TRACE:
            tile = pm * work.num_n + pn
            if found != 0:
                begin_span(work.log, tile, worker)
                if C.KEYS == "none":
                    ready_span(work.log, tile)
        if C.KEYS != "none":
            if over == 0:
                over = is_over(words, watch).to(tl.int32)
            end = tl.where(over != 0, begin, end)
        mbarrier.wait(items.empty.index(slot), slot_phase ^ 1)
        put(items.slots, slot, 0, (end - begin + 1) * found, 1)
        put(items.slots, slot, 1, first, 1)
        put(items.slots, slot, 2, begin, 1)
        put(items.slots, slot, 3, plain_begin, 1)
        put(items.slots, slot, 4, plain_end, 1)
        put(items.slots, slot, 5, own_keys, 1)
        put(items.slots, slot, 6, until, 1)
        put(items.slots, slot, 7, since, 1)
        put(items.slots, slot, 8, head * C.PACK, 1)
        # Shares have outputs of their own: as many sequences, or rows of packed ones, once more for each.
        to_batch, to_row = batch, origin
        if C.SPLIT:
            if C.RAGGED_Q:
                to_row = origin + share * source_of.rows_q
            else:
                to_batch = batch + share * (source_of.sequences - 1)
        put(items.slots, slot, 9, to_batch, 1)
        put(items.slots, slot, 10, to_row, 1)
        put(items.slots, slot, 11, own_queries, 1)
        put(
            items.slots,
            slot,
            12,
            to_batch * source_of.stride_lb + to_row * source_of.stride_lr + head * C.PACK * source_of.stride_lh,
            1,
        )
        put(items.slots, slot, 13, source_of.stride_lr, 1)
        put(items.slots, slot, 14, source_of.stride_lh, 1)
        if C.KEYS != "none":
            put(items.slots, slot, VOID, over, 1)
        if C.TRACE:
            put(items.places, slot, 0, tile, 1)
        if C.SCALED:
            # Rows behind the last sequence see no key, and have no scales.
            of = gl.minimum(batch, source_of.sequences - 2)
            factor = tl.cast(1.0, tl.float32)
            of_values = tl.cast(1.0, tl.float32)
            if found != 0:
                if source_of.scale_q is not None:
                    factor = factor * gl.load(source_of.scale_q + of * C.SCALES[0] + head * C.SCALES[1])
                if source_of.scale_k is not None:
                    factor = factor * gl.load(
                        source_of.scale_k + of * C.SCALES[2] + head // source_of.shared_by * C.SCALES[3]
                    )
                if source_of.scale_v is not None:
                    of_values = gl.load(
                        source_of.scale_v + of * C.SCALES[4] + head // source_of.shared_by * C.SCALES[5]
                    )
            put(items.scales, slot, 0, factor.to(gl.int32, bitcast=True), 1)
            put(items.scales, slot, 1, of_values.to(gl.int32, bitcast=True), 1)
        mbarrier.arrive(items.full.index(slot))
        own_slot = slot
        slot, slot_phase = step(slot, slot_phase, ITEMS)
        if found != 0:
            for who in gl.static_range(C.CONSUMERS):
                q_at = who * C.QUERIES + q_stage
                mbarrier.wait(ring.q_empty.index(q_at), q_phase ^ 1)
                mbarrier.expect(ring.q_full.index(q_at), Q_BYTES)
                for part in gl.static_range(C.PARTS):
                    at = place(
                        batch, origin, own_queries, first + who * (ROWS // C.PACK), head * C.PACK, part * WIDTH,
                        C.RAGGED_Q
                    )  # fmt: skip
                    tma_load(source_of.q_map, at, ring.q_full.index(q_at), q_boxes.index(q_at * C.PARTS + part))
            q_stage, q_phase = step(q_stage, q_phase, C.QUERIES)
            if C.KEYS != "none":
                # The rows of all sequences arrive one behind the other.
                first_row = origin_k if source_of.cu_keys is not None else batch * source_of.keys
                ready = first_row
            # Scores of the next block are started before this block's weights meet its values: keys go one block ahead.
            if ASKS:
                if begin == end:
                    asked = prefetch_ticket(words, zero, one)
            for j in range(begin, end if AHEAD else end + 1):
                if ASKS:
                    if j == gl.maximum(begin, end - EARLY):
                        asked = prefetch_ticket(words, zero, one)
                if C.KEYS != "none":
                    first_key = j * C.BLOCK
                    behind = first_key - C.BLOCK
                    row = first_row + first_key
                    last_row = first_row + gl.minimum(first_key + C.BLOCK, own_keys)
                    if (j < end) & (over == 0) & (last_row > ready):
                        over, ready, seen_low, seen_high = pass_keys(
                            gl.maximum(row, ready), last_row, (seen_low, seen_high), over,
                            (pm * work.num_n + pn, -1, pm, pn), gate, words, watch, C.KEYS,
                        )  # fmt: skip
                        over = fenced(over)
                        put(items.slots, own_slot, VOID, over, 1)
                    if C.TRACE:
                        if (j == begin) & (j < end):
                            ready_span(work.log, tile)
                            chunk_span(work.log, tile, chunk_at(
                                last_row - 1, gate.rows, C.KEYS
                            ))  # fmt: skip
                else:
                    first_key = (end - 1 - (j - begin)) * C.BLOCK
                    behind = first_key + C.BLOCK
                if j < end:
                    stage, phase = fill_stage(
                        source_of.k_map, ring.k_full, ring.k_empty, k_boxes, stage, phase, over, batch, origin_k,
                        own_keys, first_key,
                        head // source_of.shared_by, source_of.table, source_of.table_stride, source_of.page_rows_k,
                        K_BYTES, C.BLOCK, C.PARTS * WIDTH, C.STAGES, C.PAGE, C.RAGGED_K,
                    )  # fmt: skip
                if j > begin:
                    v_stage, v_phase = fill_stage(
                        source_of.v_map, ring.v_full, ring.v_empty, v_boxes, v_stage, v_phase, over, batch, origin_v,
                        own_keys, behind,
                        head // source_of.shared_by, source_of.table, source_of.table_stride, source_of.page_rows_v,
                        V_BYTES, C.BLOCK, COLUMNS, C.STAGES, C.PAGE, C.RAGGED_K,
                    )  # fmt: skip
            if AHEAD:
                if begin < end:
                    late, v_batch, v_origin, v_keys, v_head = (
                        one,
                        batch,
                        origin_v,
                        own_keys,
                        head // source_of.shared_by,
                    )
                    if C.KEYS != "none":
                        v_first = (end - 1) * C.BLOCK
                    else:
                        v_first = begin * C.BLOCK
    if C.KEYS != "none":
        leave_keys(tiles, words, gate, watch, over)
    else:
        leave(tiles, words, watch, C.KIND == "static")
