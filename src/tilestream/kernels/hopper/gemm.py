"""The Hopper GEMM: warp-specialised, persistent, in Gluon.

::

    load warp                                   math warps (up to three consumers of four warps)
      for item in schedule:                       for item in item ring:
        gate.wait(item)                             for stage in ring: wgmma        (void: NaN)
        hand it on through the item ring            epilogue, drained by TMA under the next item
        for stage in ring: TMA loads

The protocol between them is at the head of `tilestream.kernels.hopper.ring`. What is not configured has no code:

- an operand arrives (``ROW_CHUNKS``, ``COLUMN_CHUNKS``): the load warp waits at the gate, `kernels.hopper.gate`;
- the kernel copies that operand itself (``COPIES``), before its warps part: `kernels.device.copy_items`;
- some row tiles of x lie in a tensor of their own (``LOCAL_ROWS``): `kernels.hopper.load`;
- the output is published (``PUBLISH``), behind an item's epilogue: `kernels.hopper.publish`.

The accumulator's rows are those of ``x`` ``[rows, K]``, its columns those of ``y`` ``[columns, K]``. With ``SWAP_AB``
``x`` is B and ``y`` is A: an instruction of the tensor cores takes at least 64 rows, but as few as 8 columns, so few
rows of A go there. Each operand is K-major or not.

Variants (``CONSUMERS``):

- ``single``: one consumer.
- ``cooperative``: two, each with half of a tile's rows.
- ``triple``: three, each with a third of them. Where the text says half, it is a third.
- ``ping_pong``: two, a tile each; one's epilogue runs under the other's multiplications.

``CTAS``: two CTAs of a cluster may be one worker, each ``cooperative``: `kernels.hopper.pair`.

``CHAINED``: the launch may begin before the kernel ahead of it in the stream has ended (programmatic dependent launch),
and waits before it touches memory. What comes after it may do likewise, once all workers run. Not with a gate.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tilestream.core.copy_items import CopyArguments
from tilestream.core.structs import (
    Epilogue,
    Gate,
    Incoming,
    Item,
    Items,
    Loads,
    LocalRows,
    Matrix,
    Place,
    Progress,
    Publishing,
    Ring,
    Vector,
    Words,
    Work,
)
from tilestream.kernels.device.copy_items import copy_items
from tilestream.kernels.device.items import begin_worker, finish_worker, next_item
from tilestream.kernels.device.jit import entry
from tilestream.kernels.device.schedule import add, home_queue, source_queue, with_asked
from tilestream.kernels.device.trace import end_span
from tilestream.kernels.hopper.compat import barrier
from tilestream.kernels.hopper.epilogue import (
    await_prefetch,
    first_partial,
    fixup,
    load_alpha,
    prefetch_epilogue,
    store_tile,
)
from tilestream.kernels.hopper.gate import backwards
from tilestream.kernels.hopper.load import load_steps, locate
from tilestream.kernels.hopper.multiply import product
from tilestream.kernels.hopper.pair import announce_barriers, idle, in_parts, meet, rank
from tilestream.kernels.hopper.publish import publish_tile
from tilestream.kernels.hopper.queues import (
    EARLY,
    await_ticket,
    leave_as_warp,
    pick_victim_of_slim_warp,
    pick_victim_of_warp,
    prefetch_leaving,
    prefetch_ticket,
)
from tilestream.kernels.hopper.ring import ITEMS, get, make_barriers, make_slots, put, skip, step


@gluon.jit
def make_stages(tensor_map, STAGES: gl.constexpr):
    """Room for so many boxes of an operand."""
    shape: gl.constexpr = tensor_map.block_type.shape[-2:]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, tensor_map.dtype)
    return gl.allocate_shared_memory(tensor_map.dtype, [STAGES, shape[0], shape[1]], layout)


@gluon.jit
def begin(work, words, gate, C: gl.constexpr):
    """``(progress, watch)`` of a load warp that begins; where it prefetches tickets, its first is on the way."""
    worker, workers = gl.program_id(0), gl.num_programs(0)
    if C.CTAS > 1:
        worker, workers = worker // C.CTAS, workers // C.CTAS
    progress, watch = begin_worker(worker, workers, work, words, gate, C)
    if C.PREFETCHES_TICKETS:
        go = tl.cast(1, tl.int32)
        asked = prefetch_ticket(words, home_queue(watch.worker, work.queues), go)
        if not C.SLIM:
            prefetch_leaving(work, words)
        progress = Progress(with_asked(progress.cursor, asked), progress.ready, progress.passed)
    return progress, watch


@gluon.jit
def prefetch_next(cursor, work, words, watch):
    """Begin to draw the next ticket, unless the worker's queue is empty, and it will look before it takes."""
    home = home_queue(watch.worker, work.queues)
    go = tl.where(cursor.source <= work.queues, 1, 0)
    return with_asked(cursor, prefetch_ticket(words, source_queue(cursor.source, home), go))


@gluon.jit
def finish(passed, work, words, gate, watch, C: gl.constexpr):
    """`tilestream.kernels.device.items.finish_worker`, sooner where tickets are prefetched."""
    if C.PREFETCHES_TICKETS and not C.SLIM:
        leave_as_warp(work, words, watch)
    else:
        finish_worker(passed, work, words, gate, watch, C)


@gluon.jit
def hand_on(items, slot, found, item, C: gl.constexpr):
    """An item, or STOP, into the next slot of the item ring; the slot after it."""
    pr, pc = item.pm, item.pn
    if C.SWAP_AB:
        pr, pc = item.pn, item.pm
    mbarrier.wait(items.empty.index(slot.at), slot.phase ^ 1)
    put(items.slots, slot.at, 0, (item.k_end - item.k_begin) * found, 1)
    put(items.slots, slot.at, 1, pr, 1)
    put(items.slots, slot.at, 2, pc, 1)
    if C.BATCHED:
        put(items.slots, slot.at, 3, item.batch, 1)
    if C.KIND == "stream_k":
        put(items.slots, slot.at, 4, item.parts, 1)
        put(items.slots, slot.at, 5, item.part, 1)
        put(items.slots, slot.at, 6, item.slot, 1)
    if C.TRACE:
        put(items.slots, slot.at, 7, item.place, 1)
    mbarrier.arrive(items.full.index(slot.at))
    at, phase = step(slot.at, slot.phase, ITEMS)
    return Place(at, phase)


@gluon.jit
def receive(items, slot, C: gl.constexpr):
    """``(steps, item, slot)``: the next item of the item ring, and the slot after it.

    ``steps``: its K steps; 0 for STOP, fewer than none for a void item. Its ``pm`` and ``pn`` are the accumulator's.
    """
    mbarrier.wait(items.full.index(slot.at), slot.phase)
    steps = get(items.slots, slot.at, 0, 4)
    pr = get(items.slots, slot.at, 1, 4)
    pc = get(items.slots, slot.at, 2, 4)
    batch = tl.cast(0, tl.int32)
    if C.BATCHED:
        batch = get(items.slots, slot.at, 3, 4)
    parts = tl.cast(1, tl.int32)
    part = tl.cast(0, tl.int32)
    partial = tl.cast(0, tl.int32)
    if C.KIND == "stream_k":
        parts = get(items.slots, slot.at, 4, 4)
        part = get(items.slots, slot.at, 5, 4)
        partial = get(items.slots, slot.at, 6, 4)
    place = tl.cast(0, tl.int32)
    if C.TRACE:
        place = get(items.slots, slot.at, 7, 4)
    mbarrier.arrive(items.empty.index(slot.at))
    at, phase = step(slot.at, slot.phase, ITEMS)
    return steps, Item(batch, pr, pc, 0, steps, part, parts, partial, place), Place(at, phase)


@gluon.jit
def is_mine(steps, number, WHO: gl.constexpr, C: gl.constexpr):
    """Whether a consumer multiplies the item that it is handed: not STOP, nor the other's of two that take turns."""
    mine = steps > 0
    if C.VOIDS:
        mine = steps != 0
    if C.CONSUMERS == "ping_pong":
        mine = mine & (number % 2 == WHO)
    return mine


@gluon.jit
def await_turn(order, number, WHO: gl.constexpr, C: gl.constexpr):
    """Wait until the other consumer has multiplied the item before this one, number ``number`` modulo 4."""
    if C.CONSUMERS == "ping_pong":
        # A barrier that is new is in phase 0: the consumer that begins waits for the phase "before" it.
        mbarrier.wait(order.index(WHO), (number // 2) ^ (1 - WHO))


@gluon.jit
def skip_stages(place, steps, C: gl.constexpr):
    """The `Place` behind the stages of an item that the other consumer multiplies."""
    ahead = steps
    if C.VOIDS:
        ahead = tl.maximum(steps, 0)
    stage, phase = skip(place.at, place.phase, ahead, C.STAGES)
    return Place(stage, phase)


@gluon.jit
def load_loop(loads, ring, items, work, words, gate, C: gl.constexpr):
    """Producer, the load warp: take items, pass their gates, hand them on, load their K steps."""
    if C.CTAS > 1:
        meet()
    if C.CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    zero = tl.cast(0, tl.int32)
    progress, watch = begin(work, words, gate, C)
    cursor = progress.cursor
    stage, slot, found = Place(zero, zero), Place(zero, zero), zero + 1
    passed, ready = progress.passed, progress.ready
    ADD: gl.constexpr = await_ticket if C.PREFETCHES_TICKETS else add
    PICK: gl.constexpr = pick_victim_of_slim_warp if C.SLIM else pick_victim_of_warp
    while found != 0:
        found, item, progress = next_item(
            Progress(cursor, ready, passed), work, words, gate, watch, C, ADD, PICK, backwards
        )  # fmt: skip
        cursor, ready, passed = progress
        slot = hand_on(items, slot, found, item, C)
        if found != 0:
            tile = locate(loads, item, C)
            k_begin = item.k_begin
            if C.PREFETCHES_TICKETS:
                k_begin = tl.maximum(k_begin, item.k_end - EARLY)
                stage = load_steps(item.k_begin, k_begin, tile, loads, ring, stage, C)
                cursor = prefetch_next(cursor, work, words, watch)
            stage = load_steps(k_begin, item.k_end, tile, loads, ring, stage, C)
    finish(passed, work, words, gate, watch, C)
    if C.CTAS > 1:
        meet()


@gluon.jit
def math_loop(WHO: gl.constexpr, ring, items, order, words, e, publishing, C: gl.constexpr):
    """Consumer ``WHO``: multiply the items that it is handed, and finish them."""
    if C.CTAS > 1:
        meet()
    if C.CHAINED:
        gdc_wait()
    epilogue = Epilogue(
        e.out, e.residual, e.bias, e.row_scale, e.column_scale, load_alpha(e, C), e.beta, e.rows, e.columns, e.map,
        e.buffers,
    )  # fmt: skip
    zero = tl.cast(0, tl.int32)
    stage, slot = Place(zero, zero), Place(zero, zero)
    number = zero
    going = zero + 1
    while going != 0:
        steps, item, slot = receive(items, slot, C)
        mine = is_mine(steps, number, WHO, C)
        if mine:
            await_turn(order, number, WHO, C)
            row = item.pm * C.ROWS
            if C.CTAS > 1:
                row = (item.pm * C.CTAS + rank(C)) * C.ROWS
            if C.HALVES > 1:
                row += WHO * C.HALF_ROWS
            early = prefetch_epilogue(epilogue, item.batch, row, item.pn * C.COLUMNS, C)
            accs, stage = product(ring, order, stage, steps, WHO, C)
            await_prefetch(early)
            finishes, partials = item.parts == 1, words.partials
            if C.KIND == "stream_k":
                if item.parts > 1:
                    partials = first_partial(words, item, WHO, C)
                    finishes = fixup(accs, partials, words, item, WHO, C)
            if finishes:
                store_tile(accs, partials, epilogue, item, row, item.pn * C.COLUMNS, WHO, C)
                publish_tile(publishing, epilogue, item, row, C)
            if C.TRACE:
                barrier()
                # Not of a void item.
                end_span(words.log, item.place, WHO if C.HALVES > 1 else 0, finishes & (steps > 0))
        if C.CONSUMERS == "ping_pong":
            if not mine:
                stage = skip_stages(stage, steps, C)
            number = (number + 1) % 4
        going = steps
    if C.STORE == "tma":
        tma.store_wait(0)
    if C.CTAS > 1:
        meet()


@entry(
    gluon.jit,
    specialised=("stride_or", "stride_oc", "stride_bias", "stride_rr", "stride_rc", "stride_sr", "stride_tc"),
)
def gemm(
    x_map, local_map, y_map, y_map_1, y_map_2, out_map, out, bias, residual, row_scale, column_scale, partials, counts,
    counters, table, log,
    row_signals, row_quarantine, row_table, column_signals, column_quarantine, column_table, records, claims,
    queue_table, copy_source, copy_target, copy_table, copy_words, out_signals, out_counts,
    base: tl.int64, reset, row_epoch, row_key, column_epoch, column_key, allowed: tl.int64, op, copiers,
    out_epoch, out_per_chunk, out_times, row_chunks, rows_per_chunk, row_unread, rows_per_batch, row_tiles_per_batch,
    column_chunks, columns_per_chunk, column_unread, local_first, local_tiles, local_period,
    x_batched, y_batched, rows, columns,
    stride_ob, stride_or, stride_oc, stride_bias, stride_rb, stride_rr, stride_rc, stride_sb, stride_sr,
    stride_tb, stride_tc, alpha, beta,
    batches, num_m, num_n, k_steps, full_tiles, shares, units, queues, group, first, band, first_batch, capacity,
    C: gl.constexpr,
):  # fmt: skip
    """``out = activation(alpha * row_scale * column_scale * x @ y^T + bias + beta * residual)``, one CTA a worker.

    Parameters
    ----------
    x_map, local_map, y_map, y_map_1, y_map_2, out_map
        Tensor maps: of ``x`` ``[rows, K]``, of its rows that lie elsewhere, of the parts of ``y`` ``[columns, K]``, and
        of the output ``[rows, columns]``; None where there is none.
    C
        A `tilestream.kernels.config.HopperConfig`.

    The others are fields of `tilestream.core.structs`, as they are grouped here. The entry is flat: a number inside of
    a struct would be specialised, ``do_not_specialize`` or not.
    """
    y_maps = (y_map,)
    if len(C.WIDTHS) > 1:
        y_maps = y_maps + (y_map_1,)
    if len(C.WIDTHS) > 2:
        y_maps = y_maps + (y_map_2,)
    x_stages = make_stages(x_map, C.STAGES * C.HALVES)
    y_stages = ()
    for i in gl.static_range(len(C.WIDTHS)):
        y_stages = y_stages + (make_stages(y_maps[i], C.STAGES * C.CTAS),)
    if C.STORE == "tma":
        out_buffers = make_stages(out_map, C.LOOPS * C.BUFFERS)
    else:
        out_buffers: gl.constexpr = None
    ring = Ring(x_stages, y_stages, make_barriers(C.STAGES, 1), make_barriers(C.STAGES, C.HALVES * C.CTAS))
    item_full, item_empty = make_barriers(ITEMS, 1), make_barriers(ITEMS, C.LOOPS)
    if C.CONSUMERS == "ping_pong":  # no barrier that is not used: see `tilestream.kernels.hopper.ring`
        order = make_barriers(2, 1)
    else:
        order: gl.constexpr = None
    items = Items(make_slots(), item_full, item_empty)
    m, n = rows, columns
    if C.SWAP_AB:
        m, n = columns, rows
    gate = Gate(
        Incoming(
            row_signals, row_quarantine, row_table, row_epoch, row_key, row_chunks, rows_per_chunk, row_unread, m
        ),
        Incoming(
            column_signals, column_quarantine, column_table, column_epoch, column_key, column_chunks,
            columns_per_chunk, column_unread, n,
        ),
        queue_table, rows_per_batch, row_tiles_per_batch, records, claims, op, allowed,
    )  # fmt: skip
    loads = Loads(x_map, y_maps, LocalRows(local_map, local_first, local_tiles, local_period), x_batched, y_batched, 0)
    work = Work(
        batches, num_m, num_n, k_steps, full_tiles, shares, units, queues, table, group, first, band, first_batch
    )  # fmt: skip
    words = Words(counters, base, reset, log, capacity, partials, counts)
    epilogue = Epilogue(
        Matrix(out, stride_ob, stride_or, stride_oc), Matrix(residual, stride_rb, stride_rr, stride_rc),
        Vector(bias, 0, stride_bias), Vector(row_scale, stride_sb, stride_sr),
        Vector(column_scale, stride_tb, stride_tc),
        alpha, beta, rows, columns, out_map, out_buffers,
    )  # fmt: skip
    publishing = Publishing(out_signals, out_counts, out_epoch, out_per_chunk, out_times)
    if C.COPIES != "none":
        # Before the warps part: all that math has, and their registers.
        LANES: gl.constexpr = gl.BlockedLayout([C.COPY_VECTOR], [32], [gl.num_warps()], [0])
        copies = CopyArguments(copy_source, copy_target, copy_table, copy_words, copiers)
        copy_items(
            copies, gate.rows if C.COPIES == "rows" else gate.columns, gl.num_programs(0),
            gl.arange(0, C.COPY_BLOCK, LANES), C.COPY_BLOCK, C.COPY_VECTOR,
        )  # fmt: skip
    if C.CTAS > 1:
        announce_barriers()
        whole = Ring(x_stages, in_parts(y_stages, C), ring.full, ring.empty)
        gl.warp_specialize([
            (math_loop, (0, whole, items, order, words, epilogue, publishing, C)),
            (math_loop, (1, whole, items, order, words, epilogue, publishing, C)),
            (load_loop, (loads, ring, items, work, words, gate, C)),
            (idle, (ring,)), (idle, (ring,)), (idle, (ring,)),
        ], [4, 1, 1, 1, 1], [C.MATH_REGISTERS] + [C.LOAD_REGISTERS] * 4)  # fmt: skip
    elif C.LOOPS == 3:
        gl.warp_specialize([
            (math_loop, (0, ring, items, order, words, epilogue, publishing, C)),
            (math_loop, (1, ring, items, order, words, epilogue, publishing, C)),
            (math_loop, (2, ring, items, order, words, epilogue, publishing, C)),
            (load_loop, (loads, ring, items, work, words, gate, C)),
        ], [4, 4, 1], [C.MATH_REGISTERS, C.MATH_REGISTERS, C.LOAD_REGISTERS])  # fmt: skip
    elif C.LOOPS == 2:
        gl.warp_specialize([
            (math_loop, (0, ring, items, order, words, epilogue, publishing, C)),
            (math_loop, (1, ring, items, order, words, epilogue, publishing, C)),
            (load_loop, (loads, ring, items, work, words, gate, C)),
        ], [4, 1], [C.MATH_REGISTERS, C.LOAD_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (math_loop, (0, ring, items, order, words, epilogue, publishing, C)),
            (load_loop, (loads, ring, items, work, words, gate, C)),
        ], [1], [C.LOAD_REGISTERS])  # fmt: skip
