"""The work of attention's load warp on an item: it hands the item on, and copies its Q, K and V by TMA.

A copy must end with its sequence. Rows of another sequence or page may be NaN, and 0 times NaN is not 0. So rows past
the end are loaded as zeros, and are not stored. For a dense batch the tensor map's extents clip. For packed sequences
and pages a map with two more dimensions clips (`place`). Its extent of rows is ``BEYOND`` for all sequences, and a copy
begins before this extent by the number of remaining rows. The other two dimensions correct the address, one by
``BEYOND`` steps that wrap around 64 bits, the other by the rows. Triton's `triton.tools.ragged_tma` has this technique.

If keys arrive, the load warp passes the gate inside the item, before a block whose chunks it has not seen, and takes
the first block first. When the launch is over (`tilestream.kernels.device.gate`), consumers still wait for stages. The
load warp signals these without a copy, and marks the item's slot void before the last of them, so that the result
becomes NaN. Later items have no blocks.

*Taking ahead.* The stage of an item's last values becomes free when the previous block is multiplied, one step after
the stage of the last keys. So the load warp takes the next item in between, by a ticket that it prefetched some blocks
earlier (`tilestream.kernels.hopper.queues`). The order of the consumers' waits does not change.

A page with less than a key block needs a separate copy for each 128 bytes of a row. The copies are consecutive in the
swizzled block; 8 rows or more keep its pattern.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilestream.core.attention_structs import KeyLoads, KeyRows, LastValues, LoadPlace
from tilestream.core.structs import Place
from tilestream.kernels.device.attention_gate import chunk_at, pass_keys
from tilestream.kernels.device.items import with_over
from tilestream.kernels.device.trace import chunk_span, ready_span
from tilestream.kernels.hopper.compat import boxes, tma_load
from tilestream.kernels.hopper.epilogue import BEYOND
from tilestream.kernels.hopper.gate import fenced
from tilestream.kernels.hopper.queues import EARLY, prefetch_ticket
from tilestream.kernels.hopper.ring import ITEMS, put, step

#: Rows of a consumer.
ROWS: gl.constexpr = gl.constexpr(64)

# Fields of an item's slot: the number of key blocks plus one (0 is STOP); first query position, bounds of key blocks,
# keys and offsets, see `tilestream.core.attention_structs.Tile`.
BLOCKS, FIRST, BEGIN, PLAIN_BEGIN, PLAIN_END, KEYS, OFFSET_RIGHT, OFFSET_LEFT = map(gl.constexpr, range(8))
# Fields for the output: first query head, sequence, the sequence's first row, its rows. Fields for the log-sum-exp:
# offset of the sequence and head, strides of rows and of heads. Last: whether the launch ended during the wait for
# keys.
HEAD, BATCH, ORIGIN, QUERIES, LSE, LSE_ROW, LSE_HEAD, VOID = map(gl.constexpr, range(8, 16))


# Copies --------------------------------------------------------------------------------------------------------------


@gluon.jit
def place(batch, origin, length, first, head, column, RAGGED: gl.constexpr):
    """The coordinates of a copy that begins at row ``first`` of ``length`` rows at row ``origin`` of the tensor."""
    if RAGGED:
        return (BEYOND, origin + length, BEYOND - length + first, head, column)
    else:
        return (batch, first, head, column)


@gluon.jit
def load_block(loads, pages, stage, rows, first, COLUMNS: gl.constexpr, C: gl.constexpr):
    """Start the copies, from K or V to a stage, of the key block that begins at key ``first``.

    The order of a stage's boxes is column-major.
    """
    WIDTH: gl.constexpr = loads.map.block_type.shape[-1]
    HEIGHT: gl.constexpr = loads.map.block_type.shape[-3]
    HIGH: gl.constexpr = C.BLOCK // HEIGHT
    WIDE: gl.constexpr = COLUMNS // WIDTH
    bar = loads.full.index(stage)
    origin = rows.origin
    for i in range(HIGH):  # not unrolled: the load warp has few registers
        row = first + i * HEIGHT
        length = rows.keys
        if C.PAGE:
            # Pages without keys are not in the table. Their copies read no row of the last page in it.
            table = pages.table + rows.batch.to(gl.int64) * pages.stride
            page = gl.load(table + gl.minimum(row, rows.keys - 1) // C.PAGE)
            origin = page * loads.page_rows
            length = gl.minimum(gl.maximum(rows.keys - row + row % C.PAGE, 0), C.PAGE)
            row = gl.minimum(row % C.PAGE, length)
        for j in gl.static_range(WIDE):
            at = place(rows.batch, origin, length, row, rows.head, j * WIDTH, C.RAGGED_K)
            tma_load(loads.map, at, bar, loads.boxes.index((stage * WIDE + j) * HIGH + i))


@gluon.jit
def fill_stage(loads, pages, at, over, rows, first, COLUMNS: gl.constexpr, C: gl.constexpr):
    """Load a block of K or V into the next stage, or nothing if the launch is ``over``. Returns the stage after it."""
    BYTES: gl.constexpr = C.BLOCK * COLUMNS * loads.map.dtype.primitive_bitwidth // 8
    mbarrier.wait(loads.empty.index(at.at), at.phase ^ 1)
    if over != 0:
        mbarrier.arrive(loads.full.index(at.at))
    else:
        mbarrier.expect(loads.full.index(at.at), BYTES)
        load_block(loads, pages, at.at, rows, first, COLUMNS, C)
    return next_stage(at, C.STAGES)


@gluon.jit
def next_stage(at, STAGES: gl.constexpr):
    """The stage after ``at``."""
    stage, phase = step(at.at, at.phase, STAGES)
    return Place(stage, phase)


@gluon.jit
def load_queries(tile, source, ring, at, C: gl.constexpr):
    """Load each consumer's rows of queries. Returns the stage of the next item's queries."""
    CONSUMERS: gl.constexpr = C.CONSUMERS
    PARTS: gl.constexpr = C.PARTS
    WIDTH: gl.constexpr = ring.q.shape[2]
    BYTES: gl.constexpr = C.PARTS * ROWS * WIDTH * ring.q.dtype.primitive_bitwidth // 8
    q_boxes = boxes(ring.q, source.q_map)
    for who in gl.static_range(CONSUMERS):
        stage = who * C.QUERIES + at.at
        mbarrier.wait(ring.q_empty.index(stage), at.phase ^ 1)
        mbarrier.expect(ring.q_full.index(stage), BYTES)
        for part in gl.static_range(PARTS):
            box = place(
                tile.batch, tile.origin_q, tile.queries, tile.first + who * C.CONSUMER_POSITIONS,
                tile.head * C.PACK, part * WIDTH, C.RAGGED_Q
            )  # fmt: skip
            tma_load(source.q_map, box, ring.q_full.index(stage), q_boxes.index(stage * C.PARTS + part))
    return next_stage(at, C.QUERIES)


@gluon.jit
def make_loads(source, ring):
    """The `KeyLoads` of keys and of values."""
    k = KeyLoads(source.k_map, boxes(ring.k, source.k_map), ring.k_full, ring.k_empty, source.page_rows_k)
    v = KeyLoads(source.v_map, boxes(ring.v, source.v_map), ring.v_full, ring.v_empty, source.page_rows_v)
    return k, v


# Items ---------------------------------------------------------------------------------------------------------------


@gluon.jit
def hand_on(items, slot, found, tile, over, source, work, C: gl.constexpr):
    """Hand a tile on to the math loops, or STOP if none is ``found``. Returns the next slot."""
    slots, at, lse = items.slots, slot.at, source.lse
    mbarrier.wait(items.empty.index(at), slot.phase ^ 1)
    put(slots, at, BLOCKS, (tile.end - tile.begin + 1) * found, 1)
    put(slots, at, FIRST, tile.first, 1)
    put(slots, at, BEGIN, tile.begin, 1)
    put(slots, at, PLAIN_BEGIN, tile.plain_begin, 1)
    put(slots, at, PLAIN_END, tile.plain_end, 1)
    put(slots, at, KEYS, tile.keys, 1)
    put(slots, at, OFFSET_RIGHT, tile.causal_offset_right, 1)
    put(slots, at, OFFSET_LEFT, tile.causal_offset_left, 1)
    put(slots, at, HEAD, tile.head * C.PACK, 1)
    # Each share has its own output: the sequences, or the rows of packed sequences, are repeated for each share.
    batch, row = tile.batch, tile.origin_q
    if C.SPLIT_KEYS:
        if C.RAGGED_Q:
            row = tile.origin_q + tile.share * source.extents.tokens_q
        else:
            batch = tile.batch + tile.share * (source.extents.sequences - 1)
    put(slots, at, BATCH, batch, 1)
    put(slots, at, ORIGIN, row, 1)
    put(slots, at, QUERIES, tile.queries, 1)
    put(slots, at, LSE, batch * lse.batch + row * lse.row + tile.head * C.PACK * lse.head, 1)
    put(slots, at, LSE_ROW, lse.row, 1)
    put(slots, at, LSE_HEAD, lse.head, 1)
    if C.GATED:
        put(slots, at, VOID, over, 1)
    if C.TRACE:
        put(items.places, at, 0, tile.pm * work.num_n + tile.pn, 1)
    if C.SCALED:
        hand_scales_on(items, at, found, tile, source, C)
    mbarrier.arrive(items.full.index(at))
    return next_stage(slot, ITEMS)


@gluon.jit
def hand_scales_on(items, at, found, tile, source, C: gl.constexpr):
    """Hand on a tile's scales of scores and of values, as bits of float32."""
    scales, per_kv = source.scales, source.extents.q_heads_per_kv
    # Rows after the last sequence see no key, and have no scales.
    batch = gl.minimum(tile.batch, source.extents.sequences - 2)
    of_scores = tl.cast(1.0, tl.float32)
    of_values = tl.cast(1.0, tl.float32)
    if found != 0:
        if scales.q is not None:
            of_scores = of_scores * gl.load(scales.q + batch * C.SCALES[0] + tile.head * C.SCALES[1])
        if scales.k is not None:
            of_scores = of_scores * gl.load(scales.k + batch * C.SCALES[2] + tile.head // per_kv * C.SCALES[3])
        if scales.v is not None:
            of_values = gl.load(scales.v + batch * C.SCALES[4] + tile.head // per_kv * C.SCALES[5])
    put(items.scales, at, 0, of_scores.to(gl.int32, bitcast=True), 1)
    put(items.scales, at, 1, of_values.to(gl.int32, bitcast=True), 1)


@gluon.jit
def load_last_values(last, at, over, loads, source, C: gl.constexpr):
    """Load the previous tile's last values if the next tile was taken ahead of them. Returns the stage after them."""
    if C.TAKES_AHEAD:
        if last.pending != 0:
            at = fill_stage(loads[1], source.pages, at, over, last.rows, last.first, C.COLUMNS, C)
    return at


@gluon.jit
def load_keys(at, tile, slot, loads, source, items, work, words, watch, C: gl.constexpr):
    """Load a tile's key blocks. Keys are one block ahead of values, because the next block's scores precede P V.

    ``slot`` is the item's slot; ``at`` and the result are `LoadPlace`. `load_last_values` loads a tile's last values.
    """
    KEYS: gl.constexpr = C.KEYS
    extents, pages, gate = source.extents, source.pages, source.gate
    K_COLUMNS: gl.constexpr = C.PARTS * source.k_map.block_type.shape[-1]
    begin, end, zero = tile.begin, tile.end, tl.cast(0, tl.int32)
    k, v, passed, asked = at.k, at.v, at.passed, at.asked
    if C.GATED:
        # The rows of all sequences arrive as one concatenation.
        first_row = tile.origin_k if extents.cu_seqlens_k is not None else tile.batch * extents.seqlen_k
        ready = first_row
    if C.PREFETCHES_TICKETS:
        if begin == end:
            asked = prefetch_ticket(words, zero, tl.cast(1, tl.int32))
    for j in range(begin, end if C.TAKES_AHEAD else end + 1):
        if C.PREFETCHES_TICKETS:
            if j == gl.maximum(begin, end - EARLY):
                asked = prefetch_ticket(words, zero, tl.cast(1, tl.int32))
        if C.ASCENDING:
            first_key = j * C.BLOCK
            first_value = first_key - C.BLOCK
        else:
            first_key = (end - 1 - (j - begin)) * C.BLOCK
            first_value = first_key + C.BLOCK
        if C.GATED:
            if C.ASCENDING:
                row = first_row + first_key
                last_row = first_row + gl.minimum(first_key + C.BLOCK, tile.keys)
            else:  # the first block waits for all of the tile's keys
                row = first_row + begin * C.BLOCK
                last_row = first_row + gl.minimum(end * C.BLOCK, tile.keys)
            if (j < end) & (passed.over == 0) & (last_row > ready):
                passed, ready = pass_keys(
                    gl.maximum(row, ready), last_row, passed, tile, work, words, gate, watch, KEYS
                )
                passed = with_over(passed, fenced(passed.over))
                put(items.slots, slot, VOID, passed.over, 1)
            if C.TRACE:
                if (j == begin) & (j < end):
                    ready_span(items.log, tile.pm * work.num_n + tile.pn)
                    chunk_span(items.log, tile.pm * work.num_n + tile.pn, chunk_at(last_row - 1, gate.rows, KEYS))
        if j < end:
            rows = KeyRows(tile.batch, tile.origin_k, tile.keys, tile.head // extents.q_heads_per_kv)
            k = fill_stage(loads[0], pages, k, passed.over, rows, first_key, K_COLUMNS, C)
        if j > begin:
            rows = KeyRows(tile.batch, tile.origin_v, tile.keys, tile.head // extents.q_heads_per_kv)
            v = fill_stage(loads[1], pages, v, passed.over, rows, first_value, C.COLUMNS, C)
    return LoadPlace(k, v, asked, passed)


@gluon.jit
def last_values_of(tile, last, extents, C: gl.constexpr):
    """The `LastValues` of a tile with key blocks, for `load_last_values`; else ``last``, which is not pending."""
    if C.TAKES_AHEAD:
        if tile.begin < tile.end:
            rows = KeyRows(tile.batch, tile.origin_v, tile.keys, tile.head // extents.q_heads_per_kv)
            if C.ASCENDING:
                first = (tile.end - 1) * C.BLOCK
            else:
                first = tile.begin * C.BLOCK
            last = LastValues(tl.cast(1, tl.int32), rows, first)
    return last
