"""The Hopper grouped GEMM: `kernels.hopper.gemm`, whose items have one coordinate more, the group.

::

    before the warps part: row tiles of all groups, added up, in shared memory; zeros in rows of no group
    load warp                                           math warps
      for item in schedule:                               for item in item ring:
        find the item's group                               for stage in ring: wgmma
        hand it on, with the group's end                    epilogue, clipped at the group's end
        for stage in ring: TMA loads of the group's part

Of two halves, the parts of a tile's columns are as many of each half of B, whose accumulators the epilogue makes one.

Groups of rows: a tile of A begins at any row, and may end in the rows of the next group, which the output's tensor map
clips. B has a matrix a group. Groups of K: the maps of A and B clip at the group's end, so that what lies behind it is
zero; K is not the contiguous dimension. A group without K has one step, all of it behind its end.

What offsets, rows and K mean is said in `tilestream.kernels.device.groups`; the protocol of the rings is the plain
kernel's.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tilestream.core.structs import (
    BlockScales,
    Epilogue,
    Groups,
    Item,
    Items,
    Loads,
    LocalRows,
    Matrix,
    Place,
    Progress,
    Ring,
    Span,
    Vector,
    Words,
    Work,
)
from tilestream.kernels.device.groups import count_rows, find_longest, find_rows, k_of_group, row_tiles
from tilestream.kernels.device.items import next_item, with_steps
from tilestream.kernels.device.jit import entry
from tilestream.kernels.device.schedule import add, cdiv
from tilestream.kernels.device.trace import end_span
from tilestream.kernels.hopper.block_scales import scaled_product
from tilestream.kernels.hopper.compat import barrier, tma_load, viewed
from tilestream.kernels.hopper.epilogue import BEYOND, await_prefetch, prefetch_epilogue, start_of, store_tile
from tilestream.kernels.hopper.gemm import (
    await_turn,
    begin,
    finish,
    hand_on,
    is_mine,
    make_stages,
    prefetch_next,
    receive,
    skip_stages,
)
from tilestream.kernels.hopper.load import Source, load_steps
from tilestream.kernels.hopper.multiply import product
from tilestream.kernels.hopper.publish import publish_source
from tilestream.kernels.hopper.queues import EARLY, await_ticket, pick_victim_of_slim_warp, pick_victim_of_warp
from tilestream.kernels.hopper.ring import ITEMS, get, make_barriers, make_slots, put, step

# Fields of an item's slot, behind the plain kernel's: the first row of the group, and the one behind its last; where
# results of sources are published, whose tile it is, and how many the source has.
BEGIN, END, SOURCE, TILES = map(gl.constexpr, (8, 9, 10, 11))


@gluon.constexpr_function
def lane_layout(count, warps):
    """How so many warps hold an element a group."""
    return gl.BlockedLayout([max(1, count // (32 * warps))], [32], [warps], [0])


@gluon.jit
def clear_rows(out, first, rows, columns):
    """Store zeros in rows [first, rows) of the output, which belong to no group: all warps of the CTA, row by row.

    Where chunks of columns are whole, a mask is the same for all of a chunk, and each is one store.
    """
    CHUNK: gl.constexpr = 8
    WIDTH: gl.constexpr = 32 * CHUNK * gl.num_warps()
    column = gl.arange(0, WIDTH, gl.BlockedLayout([CHUNK], [32], [gl.num_warps()], [0]))
    zeros = (column * 0).to(out.at.dtype.element_ty)
    whole = columns % CHUNK == 0
    for row in range(first + gl.program_id(0), rows, gl.num_programs(0)):
        at = out.at + row.to(gl.int64) * out.row
        for start in range(0, columns, WIDTH):
            j = start + column
            at_j = at + j.to(gl.int64) * out.column
            if whole:
                gl.store(at_j, zeros, mask=j // CHUNK < columns // CHUNK)
            else:
                gl.store(at_j, zeros, mask=j < columns)


@gluon.jit
def find_group(item, groups, table, valid, C: gl.constexpr):
    """``(item, span)``: the item in its group, whose number is its batch; void where offsets are no groups."""
    pm, k_end = item.pm, item.k_end
    if C.ALONG == "rows":
        LANES: gl.constexpr = lane_layout(C.LANES, 1)
        behind = table.index(0).load(LANES)
        ends = table.index(1).load(LANES)
        span, pm = find_rows(pm, behind, ends, groups.extent, valid)
    else:
        span = k_of_group(item.batch, groups, valid)
        k_end = tl.maximum(cdiv(span.end - span.begin, C.BLOCK_K), 1)
    item = Item(span.group, pm, item.pn, item.k_begin, k_end, item.part, item.parts, item.slot, item.place)
    return with_steps(item, tl.where(valid != 0, 0, k_end), tl.where(valid != 0, k_end, 0)), span


@gluon.jit
def load_k_steps(item, span, loads, ring, place, C: gl.constexpr):
    """Load an item's steps of its group's K into the ring, zeros behind its end: the `Place` behind them."""
    BYTES: gl.constexpr = (
        (C.ROWS * loads.x.dtype.primitive_bitwidth + C.COLUMNS * loads.y[0].dtype.primitive_bitwidth) * C.BLOCK_K // 8
    )
    HALVES: gl.constexpr = C.HALVES
    stage, phase = place
    row, column = item.pm * C.ROWS, item.pn * C.COLUMNS
    if C.SWAP_AB:
        row, column = item.pn * C.ROWS, item.pm * C.COLUMNS
    for k in range(item.k_begin, item.k_end):
        mbarrier.wait(ring.empty.index(stage), phase ^ 1)
        bar = ring.full.index(stage)
        mbarrier.expect(bar, BYTES)
        at = BEYOND - span.end + span.begin + k * C.BLOCK_K
        for half in gl.static_range(HALVES):
            box = viewed(ring.x.index(stage * HALVES + half), loads.x)
            tma_load(loads.x, [BEYOND, span.end, at, row + half * C.HALF_ROWS], bar, box)
        for i in gl.static_range(len(C.WIDTHS)):
            box = viewed(ring.y[i].index(stage), loads.y[i])
            tma_load(loads.y[i], [BEYOND, span.end, at, column + start_of(C.WIDTHS, i)], bar, box)
        stage, phase = step(stage, phase, C.STAGES)
    return Place(stage, phase)


@gluon.jit
def load_group_steps(item, span, loads, ring, place, k_begin, k_end, C: gl.constexpr):
    """Load some of an item's steps."""
    item = with_steps(item, k_begin, k_end)
    if C.ALONG == "k":
        place = load_k_steps(item, span, loads, ring, place, C)
    else:
        first, other = span.begin + item.pm * C.BLOCK_M, item.pn * (C.OUT_COLUMNS if C.TWO_HALVES else C.BLOCK_N)
        x_batch, y_batch = item.batch * loads.x_batched, item.batch * loads.y_batched
        if C.SWAP_AB:
            source = Source(x_batch, y_batch, other, first, False)
        else:
            source = Source(x_batch, y_batch, first, other, False)
        place = load_steps(item.k_begin, item.k_end, source, loads, ring, place, C)
    return place


@gluon.jit
def load_loop(loads, ring, items, work, words, groups, table, valid, C: gl.constexpr):
    """Producer, the load warp: take items, find their groups, hand them on, load their K steps."""
    if C.CHAINED:
        gdc_launch_dependents()
    zero = tl.cast(0, tl.int32)
    progress, watch = begin(work, words, None, C)
    cursor = progress.cursor
    stage, slot, found = Place(zero, zero), Place(zero, zero), zero + 1
    passed, ready = progress.passed, progress.ready
    ADD: gl.constexpr = await_ticket if C.PREFETCHES_TICKETS else add
    # The other way round than the plain kernel: beside a group's fields either one spills where the other does not.
    PICK: gl.constexpr = pick_victim_of_warp if C.SLIM else pick_victim_of_slim_warp
    while found != 0:
        found, item, progress = next_item(
            Progress(cursor, ready, passed), work, words, None, watch, C, ADD, PICK
        )  # fmt: skip
        cursor, ready, passed = progress
        span = Span(zero, zero, zero)
        if found != 0:
            item, span = find_group(item, groups, table, valid, C)
        # The fields of a group are written before its slot is full, so after the slot before is empty.
        slot = hand_on_group(items, slot, found, item, span, C)
        if found != 0:
            k_begin = item.k_begin
            if C.PREFETCHES_TICKETS:
                k_begin = tl.maximum(k_begin, item.k_end - EARLY)
                stage = load_group_steps(item, span, loads, ring, stage, item.k_begin, k_begin, C)
                cursor = prefetch_next(cursor, work, words, watch)
            stage = load_group_steps(item, span, loads, ring, stage, k_begin, item.k_end, C)
    finish(passed, work, words, None, watch, C)


@gluon.jit
def hand_on_group(items, slot, found, item, span, C: gl.constexpr):
    """`kernels.hopper.gemm.hand_on`, with where the group begins and ends."""
    if C.ALONG == "rows":
        mbarrier.wait(items.empty.index(slot.at), slot.phase ^ 1)
        put(items.slots, slot.at, BEGIN, span.begin, 1)
        put(items.slots, slot.at, END, span.end, 1)
    return hand_on(items, slot, found, item, C)


@gluon.jit
def pass_stages(ring, place, steps, C: gl.constexpr):
    """Give an item's stages back as they are filled, and multiply nothing: the `Place` behind them."""
    stage, phase = place
    for _ in range(0, steps):
        mbarrier.wait(ring.full.index(stage), phase)
        mbarrier.arrive(ring.empty.index(stage), count=C.CTAS)
        stage, phase = step(stage, phase, C.STAGES)
    return Place(stage, phase)


@gluon.jit
def finish_tile(ring, order, e, scales, item, place, steps, where, WHO: gl.constexpr, C: gl.constexpr):
    """Multiply an item and store it, in [row, rows) and [column, columns): the `Place` behind its stages."""
    row, column, rows, columns = where
    epilogue = Epilogue(
        e.out, e.residual, e.bias, e.row_scale, e.column_scale, e.alpha, e.beta, rows, columns, e.map, e.buffers
    )  # fmt: skip
    early = prefetch_epilogue(epilogue, item.batch, row, column, C)
    if C.SCALES == "block":
        blocks = BlockScales(scales[0], scales[1], item.batch, row, column, rows, columns)
        accs, place = scaled_product(ring, order, place, steps, blocks, WHO, C)
    else:
        accs, place = product(ring, order, place, steps, WHO, C)
    await_prefetch(early)
    store_tile(accs, None, epilogue, item, row, column, WHO, C)
    return place


@gluon.jit
def math_loop(WHO: gl.constexpr, ring, items, order, words, e, scales, publishing, C: gl.constexpr):
    """Consumer ``WHO``: multiply the items that it is handed, and finish them.

    ``scales``: of blocks, the `Matrix` of the accumulator's rows and that of its columns; else None. ``publishing``: of
    sources' results; else None.
    """
    zero = tl.cast(0, tl.int32)
    stage, slot = Place(zero, zero), Place(zero, zero)
    number = zero
    going = zero + 1
    while going != 0:
        begin, end = zero, zero
        if C.ALONG == "rows":
            mbarrier.wait(items.full.index(slot.at), slot.phase)
            begin = get(items.slots, slot.at, BEGIN, 4)
            end = get(items.slots, slot.at, END, 4)
        if C.PUBLISHES:
            source = get(items.slots, slot.at, SOURCE, 4)
            tiles = get(items.slots, slot.at, TILES, 4)
        steps, item, slot = receive(items, slot, C)
        mine = is_mine(steps, number, WHO, C)
        if mine:
            await_turn(order, number, WHO, C)
            row, column, rows, columns = item.pm * C.ROWS, item.pn * C.OUT_COLUMNS, e.rows, e.columns
            if C.ALONG == "rows":
                if C.SWAP_AB:
                    column, columns = begin + column, end
                else:
                    row, rows = begin + row, end
            if C.HALVES == 2:
                row += WHO * C.HALF_ROWS
                there = row < rows  # the second consumer has no rows of some tiles: then the first has the tensor cores
            else:
                there: gl.constexpr = True
            if there:
                where = row, column, rows, columns
                stage = finish_tile(ring, order, e, scales, item, stage, steps, where, WHO, C)
            else:
                stage = pass_stages(ring, stage, steps, C)
            if C.PUBLISHES:
                publish_source(source, tiles * C.HALVES, publishing)
            if C.TRACE:
                barrier()
                end_span(words.log, item.place, WHO if C.HALVES == 2 else 0, steps > 0)
        if C.CONSUMERS == "ping_pong":
            if not mine:
                stage = skip_stages(stage, steps, C)
            number = (number + 1) % 4
        going = steps
    if C.STORE == "tma":
        tma.store_wait(0)


@entry(
    gluon.jit,
    specialised=("stride_or", "stride_oc", "stride_bias", "stride_sr", "stride_tc"),
    unaligned=("offsets",),
)
def grouped_gemm(
    x_map, y_map, y_map_1, y_map_2, out_map, offsets, out, bias, row_scale, column_scale, counters, log,
    base: tl.int64, reset, num_groups, extent, x_batched, y_batched, rows, columns,
    stride_ob, stride_or, stride_oc, stride_bias_batch, stride_bias, stride_sb, stride_sr, stride_sk, stride_tb,
    stride_tc, stride_tk,
    batches, num_m, num_n, k_steps, full_tiles, shares, units, queues, group, first, band, first_batch, capacity,
    C: gl.constexpr,
):  # fmt: skip
    """``out = activation(row_scale * column_scale * x @ y^T + bias)``, group by group, one CTA a worker.

    Of two halves, ``columns`` are those of one, and ``y`` has twice as many rows. Scales of blocks are matrices, and
    scale K steps.

    Parameters
    ----------
    x_map, y_map, y_map_1, y_map_2, out_map
        Tensor maps, as of `tilestream.kernels.hopper.gemm.gemm`. The output's clips at any row where the groups divide
        the rows, those of ``x`` and ``y`` where they divide K.
    offsets, extent
        int32 ``[num_groups]``: where each group ends, at most at ``extent``.
    C
        A `tilestream.kernels.config.HopperGroupedConfig`.

    The others are fields of `tilestream.core.structs`, as they are grouped here.
    """
    y_maps = (y_map,)
    if len(C.WIDTHS) > 1:
        y_maps = y_maps + (y_map_1,)
    if len(C.WIDTHS) > 2:
        y_maps = y_maps + (y_map_2,)
    x_stages = make_stages(x_map, C.STAGES * C.HALVES)
    y_stages = ()
    for i in gl.static_range(len(C.WIDTHS)):
        y_stages = y_stages + (make_stages(y_maps[i], C.STAGES),)
    if C.STORE == "tma":
        out_buffers = make_stages(out_map, C.LOOPS * C.BUFFERS)
    else:
        out_buffers: gl.constexpr = None
    ring = Ring(x_stages, y_stages, make_barriers(C.STAGES, 1), make_barriers(C.STAGES, C.HALVES))
    item_full, item_empty = make_barriers(ITEMS, 1), make_barriers(ITEMS, C.LOOPS)
    if C.CONSUMERS == "ping_pong":  # no barrier that is not used: see `tilestream.kernels.hopper.ring`
        order = make_barriers(2, 1)
    else:
        order: gl.constexpr = None
    items = Items(make_slots(), item_full, item_empty)
    groups = Groups(offsets, num_groups, extent)
    loads = Loads(x_map, y_maps, LocalRows(None, 0, 0, 0), x_batched, y_batched, columns if C.TWO_HALVES else 0)
    words = Words(counters, base, reset, log, capacity, None, None)
    of_rows, of_columns = Vector(row_scale, stride_sb, stride_sr), Vector(column_scale, stride_tb, stride_tc)
    scales: gl.constexpr = None
    if C.SCALES == "block":
        scales = (
            Matrix(row_scale, stride_sb, stride_sr, stride_sk), Matrix(column_scale, stride_tb, stride_tc, stride_tk),
        )  # fmt: skip
        of_rows, of_columns = Vector(None, 0, 0), Vector(None, 0, 0)
    epilogue = Epilogue(
        Matrix(out, stride_ob, stride_or, stride_oc), Matrix(None, 0, 0, 0),
        Vector(bias, stride_bias_batch, stride_bias), of_rows, of_columns,
        1.0, 1.0, rows, columns, out_map, out_buffers,
    )  # fmt: skip
    if C.CHAINED:
        gdc_wait()
    lane = gl.arange(0, C.LANES, lane_layout(C.LANES, gl.num_warps()))
    if C.ALONG == "rows":
        num_m, last, valid = count_rows(groups, lane, C.BLOCK_M)
        full_tiles = num_m * num_n
        if C.SWAP_AB:
            clear_rows(Matrix(out, 0, stride_oc, stride_or), last, columns, rows)
        else:
            clear_rows(Matrix(out, 0, stride_or, stride_oc), last, rows, columns)
        # What the load warp finds an item's group in.
        behind, ends = row_tiles(groups, lane, C.BLOCK_M)
        table = gl.allocate_shared_memory(gl.int32, [2, C.LANES], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        table.index(0).store(behind)
        table.index(1).store(ends)
    else:
        first_batch, valid = find_longest(groups, lane)
        table: gl.constexpr = None
    work = Work(
        batches, num_m, num_n, k_steps, full_tiles, shares, units, queues, None, group, first, band, first_batch
    )  # fmt: skip
    if C.LOOPS == 2:
        gl.warp_specialize([
            (math_loop, (0, ring, items, order, words, epilogue, scales, None, C)),
            (math_loop, (1, ring, items, order, words, epilogue, scales, None, C)),
            (load_loop, (loads, ring, items, work, words, groups, table, valid, C)),
        ], [4, 1], [C.MATH_REGISTERS, C.LOAD_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (math_loop, (0, ring, items, order, words, epilogue, scales, None, C)),
            (load_loop, (loads, ring, items, work, words, groups, table, valid, C)),
        ], [1], [C.LOAD_REGISTERS])  # fmt: skip
