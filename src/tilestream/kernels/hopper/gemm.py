"""The Hopper GEMM: warp-specialised, persistent, in Gluon.

::

    load warp                                   math warps (one or two consumers of four warps)
      for item in schedule:                       for item in item ring:
        gate.wait(item)                             for stage in ring: wgmma        (void: NaN)
        hand it on through the item ring            epilogue, drained by TMA under the next item
        for stage in ring: TMA loads

The protocol between them is at the head of `tilestream.kernels.hopper.ring`. Where an operand arrives (``ROW_CHUNKS``,
``COLUMN_CHUNKS``), the load warp waits at the gate, `tilestream.kernels.hopper.gate`; else there is no code of it.
Where the kernel makes such an operand's copies itself (``COPIES``), it does so before its warps part:
`tilestream.kernels.device.copy_items`.
Where rows of x stand apart from the others (``APART``), tiles of them are loaded from there:
`tilestream.kernels.hopper.load`.
Where the output is published (``PUBLISH``: its rows are the accumulator's, or its columns), a consumer does so behind
an item's epilogue: `tilestream.kernels.hopper.publish`.

The kernel knows an accumulator of rows and columns: rows are those of ``x`` ``[rows, K]``, columns those of ``y``
``[columns, K]``. ``SWAPPED`` says that ``x`` is B and ``y`` is A: an instruction of the tensor cores takes 64 rows or
more, but as few as 8 columns, so few rows of A go there. Each operand lies K-major or the other way round.

Variants (``CONSUMERS``):

- ``single``: one consumer.
- ``cooperative``: two, each with half of a tile's rows.
- ``ping_pong``: two, a tile each; one's epilogue runs under the other's multiplications.

``CHAINED``: the launch may begin before the kernel ahead of it in the stream has ended (programmatic dependent launch),
and waits before it touches memory. What comes after it may do likewise, once all workers run. Not with a gate.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tilestream.kernels.device.copy_items import copy_items
from tilestream.kernels.device.schedule import add, enter, home_queue, leave, source_queue, take
from tilestream.kernels.device.trace import begin_span, end_span, place_of, ready_span
from tilestream.kernels.hopper.compat import barrier
from tilestream.kernels.hopper.epilogue import (
    add_up,
    finish_strip,
    hold,
    pending,
    settle,
    strip_of,
    touch,
)
from tilestream.kernels.hopper.gate import (
    UNALIGNED,
    Arriving,
    Gate,
    begin_gate,
    counts_out,
    end_gate,
    pass_item,
    take_arrived,
)
from tilestream.kernels.hopper.gate import UNSPECIALISED as GATE_UNSPECIALISED
from tilestream.kernels.hopper.load import Apart, load_steps, stands
from tilestream.kernels.hopper.multiply import product
from tilestream.kernels.hopper.parts import (
    Cursor,
    Epilogue,
    Item,
    Items,
    Loads,
    Matrix,
    Place,
    Ring,
    Vector,
    Words,
    Work,
)
from tilestream.kernels.hopper.publish import UNALIGNED as PUBLISH_UNALIGNED
from tilestream.kernels.hopper.publish import UNSPECIALISED as PUBLISH_UNSPECIALISED
from tilestream.kernels.hopper.publish import Publishing, publish
from tilestream.kernels.hopper.queues import EARLY, ask, look_at_many, told
from tilestream.kernels.hopper.ring import ITEMS, get, make_barriers, make_slots, put, skip, step

#: Arguments that say nothing about alignment: one compiled kernel serves all their values.
UNSPECIALISED = (
    "base", "reset", "queues", "batches", "num_m", "num_n", "k_steps", "full_tiles", "shares", "units", "group",
    "first", "band", "first_batch", "capacity", "rows", "columns", "x_batched", "y_batched", "stride_ob", "stride_rb",
    "stride_sb", "stride_tb", "alpha", "beta", "copiers", "apart_first", "apart_tiles", "apart_period",
    *GATE_UNSPECIALISED, *PUBLISH_UNSPECIALISED,
)  # fmt: skip


@gluon.jit
def make_stages(tensor_map, STAGES: gl.constexpr):
    """Room for so many boxes of an operand."""
    shape: gl.constexpr = tensor_map.block_type.shape[-2:]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, tensor_map.dtype)
    return gl.allocate_shared_memory(tensor_map.dtype, [STAGES, shape[0], shape[1]], layout)


@gluon.jit
def begin(work, words, gate, C: gl.constexpr):
    """What a worker that begins knows: ``(cursor, watch, leaves)``."""
    zero = tl.cast(0, tl.int32)
    worker = gl.program_id(0)
    leaves = words.reset
    if C.GATED:
        leaves = counts_out(gate, words.reset)
    enter(words.counters, words.base, worker, work.queues, leaves, C.KIND == "static", C.GATED)
    watch, carried = None, (zero, zero, zero - 1, zero, zero - 1)
    if C.GATED:
        watch, carried = begin_gate(
            gate, worker, words.counters, words.base, work.queues, C.ROW_CHUNKS, C.COLUMN_CHUNKS
        )
    # At a gate a worker may wait for long: it holds no ticket then that somebody else could use. And stream_k leaves
    # the load warp no registers for it.
    asked = tl.cast(0, tl.int64)
    if C.ASKS:
        asked = ask(words.counters, home_queue(worker, work.queues), zero + 1)
    return Cursor(zero, zero, zero - 1, zero, zero, zero - 1, zero, zero, asked, carried), watch, leaves


@gluon.jit
def next_item(at, work, words, gate, watch, rows, columns, C: gl.constexpr):
    """``(found, item, place, cursor)``: the worker's next item, its gate passed (void where over), or STOP."""
    zero = tl.cast(0, tl.int32)
    worker = gl.program_id(0)
    ticket, source, share, unit, unit_end, queue, empty, noted, asked, carried = at
    waited = tl.cast(0, tl.int64)
    if C.SPLIT == "chunks":
        found, batch, pm, pn, queue, empty, waited, noted = take_arrived(
            gate, watch, carried, worker, queue, empty, words.base, words.counters, work.queues, work.batches,
            work.num_m, work.num_n, work.k_steps, work.full_tiles, work.table, work.group, work.first, work.band,
            work.first_batch, words.probe, words.capacity, noted, C.ORDER, C.TRANSPOSED, C.ROW_CHUNKS, C.PROBE,
        )  # fmt: skip
        k_begin, k_end, part, parts, partial = zero, zero + work.k_steps, zero, zero + 1, zero - 1
    else:
        (
            found, batch, pm, pn, k_begin, k_end, part, parts, partial, ticket, source, share, unit, unit_end, noted,
        ) = take(
            worker, gl.num_programs(0), ticket, source, share, unit, unit_end,
            words.counters, words.base, work.queues, work.batches, work.num_m, work.num_n, work.k_steps,
            work.full_tiles, work.shares, work.units, work.table, work.group, work.first, work.band,
            work.first_batch, words.probe, words.capacity, noted,
            C.KIND, C.SPLIT, C.STEAL, C.ORDER, C.TRANSPOSED, C.PROBE, asked, told if C.ASKS else add, look_at_many,
        )  # fmt: skip
    place = zero
    if C.TRACE:
        if found != 0:
            place = place_of(batch, pm, pn, parts, partial, work.batches, work.num_m, work.num_n)
            begin_span(words.probe, place, worker)
    if C.GATED:
        if found != 0:
            carried, k_begin, k_end, noted = pass_item(
                gate, watch, carried, worker, batch, pm, pn, k_begin, k_end,
                columns if C.SWAPPED else rows, rows if C.SWAPPED else columns, work.batches, work.num_m,
                work.num_n, words.base, words.probe, words.capacity, noted, C.COLUMNS if C.SWAPPED else C.ROWS,
                C.ROWS if C.SWAPPED else C.COLUMNS, C.ROW_CHUNKS, C.COLUMN_CHUNKS, C.PROBE, waited,
            )  # fmt: skip
    if C.TRACE:
        if found != 0:
            ready_span(words.probe, place)
    at = Cursor(ticket, source, share, unit, unit_end, queue, empty, noted, asked, carried)
    return found, Item(batch, pm, pn, k_begin, k_end, part, parts, partial), place, at


@gluon.jit
def hand_on(items, slot, found, item, pr, pc, place, C: gl.constexpr):
    """An item, or STOP, into the next slot of the item ring; the slot after it."""
    mbarrier.wait(items.empty.index(slot.at), slot.phase ^ 1)
    put(items.slots, slot.at, 0, (item.k_end - item.k_begin) * found, 1)
    put(items.slots, slot.at, 1, pr, 1)
    put(items.slots, slot.at, 2, pc, 1)
    if C.BATCHED:
        put(items.slots, slot.at, 3, item.batch, 1)
    if C.KIND == "stream_k":
        put(items.slots, slot.at, 4, item.parts, 1)
        put(items.slots, slot.at, 5, item.part, 1)
        put(items.slots, slot.at, 6, item.partial, 1)
    if C.TRACE:
        put(items.slots, slot.at, 7, place, 1)
    mbarrier.arrive(items.full.index(slot.at))
    next_slot, next_phase = step(slot.at, slot.phase, ITEMS)
    return Place(next_slot, next_phase)


@gluon.jit
def load_loop(loads, ring, items, work, words, gate, rows, columns, C: gl.constexpr):
    """The load warp: takes items, passes their gates, hands them on, and loads their K steps into the ring."""
    if C.CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    at, watch, leaves = begin(work, words, gate, C)
    zero = tl.cast(0, tl.int32)
    stage, phase, slot = zero, zero, Place(zero, zero)
    found = zero + 1
    while found != 0:
        found, item, place, at = next_item(at, work, words, gate, watch, rows, columns, C)
        if C.SWAPPED:
            pr, pc = item.pn, item.pm
        else:
            pr, pc = item.pm, item.pn
        slot = hand_on(items, slot, found, item, pr, pc, place, C)
        if found != 0:
            is_apart, row, k_begin = False, pr, item.k_begin
            if C.APART:
                is_apart, row = stands(loads.apart, pr)
            row, column = row * C.ROWS, pc * C.COLUMNS
            if C.ASKS:
                early = tl.maximum(k_begin, item.k_end - EARLY)
                stage, phase = load_steps(
                    k_begin, early, loads, ring, stage, phase, item.batch, is_apart, row, column, C
                )  # fmt: skip
                k_begin = early
                # Not where the worker's queue is empty, and it will look before it takes.
                home = home_queue(gl.program_id(0), work.queues)
                go = tl.where(at.source <= work.queues, 1, 0)
                asked = ask(words.counters, source_queue(at.source, home), go)
                at = Cursor(
                    at.ticket, at.source, at.share, at.unit, at.unit_end, at.queue, at.empty, at.noted, asked,
                    at.carried
                )  # fmt: skip
            stage, phase = load_steps(
                k_begin, item.k_end, loads, ring, stage, phase, item.batch, is_apart, row, column, C
            )  # fmt: skip
    if C.GATED:
        end_gate(
            gate, watch, at.carried[0], leaves, words.reset, gl.program_id(0), gl.num_programs(0), work.queues,
            words.counters, words.base, work.batches, work.num_m, work.num_n, C.ROW_CHUNKS, C.COLUMN_CHUNKS,
        )  # fmt: skip
    else:
        leave(words.counters, work.queues, words.reset, gl.num_programs(0), C.KIND == "static")


@gluon.jit
def math_loop(WHO: gl.constexpr, ring, items, order, partials, counts, e, probe, publishing, C: gl.constexpr):
    """A consumer: multiplies the items that it is handed, and finishes them."""
    if C.CHAINED:
        gdc_wait()
    stage = tl.cast(0, tl.int32)
    phase = tl.cast(0, tl.int32)
    slot = tl.cast(0, tl.int32)
    slot_phase = tl.cast(0, tl.int32)
    number = tl.cast(0, tl.int32)
    going = tl.cast(1, tl.int32)
    while going != 0:
        mbarrier.wait(items.full.index(slot), slot_phase)
        steps = get(items.slots, slot, 0, 4)
        pr = get(items.slots, slot, 1, 4)
        pc = get(items.slots, slot, 2, 4)
        batch = tl.cast(0, tl.int32)
        if C.BATCHED:
            batch = get(items.slots, slot, 3, 4)
        parts = tl.cast(1, tl.int32)
        part = tl.cast(0, tl.int32)
        partial = tl.cast(0, tl.int32)
        if C.KIND == "stream_k":
            parts = get(items.slots, slot, 4, 4)
            part = get(items.slots, slot, 5, 4)
            partial = get(items.slots, slot, 6, 4)
        if C.TRACE:
            place = get(items.slots, slot, 7, 4)
        mbarrier.arrive(items.empty.index(slot))
        slot, slot_phase = step(slot, slot_phase, ITEMS)
        mine = steps > 0
        if C.GATED:
            mine = steps != 0
        if C.CONSUMERS == "ping_pong":
            mine = mine & (number % 2 == WHO)
        if mine:
            if C.CONSUMERS == "ping_pong":
                # A barrier that is new is in phase 0: the consumer that begins waits for the phase "before" it.
                mbarrier.wait(order.index(WHO), (number // 2) ^ (1 - WHO))
            row = pr * C.ROWS
            if C.HALVES == 2:
                row += WHO * C.HALF_ROWS
            early = touch(e, batch, row, pc * C.COLUMNS, C)
            accs, stage, phase = product(ring, order, stage, phase, steps, WHO, C)
            hold(early)
            finishes = parts == 1
            at = partials
            size: gl.constexpr = C.ROWS * C.COLUMNS
            if C.KIND == "stream_k":
                if parts > 1:
                    # Each half of a tile is settled by itself: nobody waits for the other consumer.
                    HALF: gl.constexpr = WHO if C.HALVES == 2 else 0
                    at = partials + (partial - part).to(gl.int64) * size + HALF * C.HALF_ROWS * C.COLUMNS
                    finishes = settle(
                        accs, counts + (partial - part) * 2 + HALF, at + part.to(gl.int64) * size, parts,
                        C.HALF_ROWS, C.WIDTHS, C.STRIP,
                    )  # fmt: skip
            if finishes:
                STRIPS: gl.constexpr = C.COLUMNS // C.STRIP
                for i in gl.static_range(STRIPS):
                    x = strip_of(accs, i * C.STRIP, C.WIDTHS, C.STRIP, C.HALF_ROWS)
                    if C.KIND == "stream_k":
                        if parts > 1:
                            x = add_up(
                                x, at + i * C.HALF_ROWS * C.STRIP, part, parts, size, C.HALF_ROWS, C.COLUMNS, C.STRIP,
                                C.FULL,
                            )  # fmt: skip
                    finish_strip(
                        x, e, batch, row, pc * C.COLUMNS + i * C.STRIP, WHO * C.BUFFERS + i % C.BUFFERS,
                        pending(i, STRIPS, C.BUFFERS), C,
                    )  # fmt: skip
                if C.PUBLISH == "rows":
                    publish(row, C.HALF_ROWS, e.rows, publishing)
                elif C.PUBLISH == "columns":  # of the accumulator: the output's rows, where the operands are swapped
                    publish(pc * C.COLUMNS, C.COLUMNS, e.columns, publishing)
            if C.TRACE:
                barrier()
                end_span(probe, place, WHO if C.HALVES == 2 else 0, finishes & (steps > 0))  # not of what is void
        if C.CONSUMERS == "ping_pong":
            if not mine:
                ahead = steps
                if C.GATED:
                    ahead = tl.maximum(steps, 0)
                stage, phase = skip(stage, phase, ahead, C.STAGES)
            number = (number + 1) % 4
        going = steps
    if C.STORE == "tma":
        tma.store_wait(0)


@gluon.jit(do_not_specialize=UNSPECIALISED, do_not_specialize_on_alignment=(*UNALIGNED, *PUBLISH_UNALIGNED))
def gemm(
    x_map, apart_map, y_map, y_map_1, y_map_2, out_map, out, bias, residual, row_scale, column_scale, partials, counts,
    counters, table, probe,
    row_signals, row_quarantine, row_table, column_signals, column_quarantine, column_table, records, claims,
    queue_table, copy_source, copy_target, copy_table, copy_words, out_signals, out_counts,
    base: tl.int64, reset, row_epoch, row_key, column_epoch, column_key, allowed: tl.int64, op, copiers,
    out_epoch, out_per_chunk, out_times, row_chunks, rows_per_chunk, row_unread, rows_per_batch, row_tiles_per_batch,
    column_chunks, columns_per_chunk, column_unread, apart_first, apart_tiles, apart_period,
    x_batched, y_batched, rows, columns,
    stride_ob, stride_or, stride_oc, stride_bias, stride_rb, stride_rr, stride_rc, stride_sb, stride_sr,
    stride_tb, stride_tc, alpha, beta,
    batches, num_m, num_n, k_steps, full_tiles, shares, units, queues, group, first, band, first_batch, capacity,
    C: gl.constexpr,
):  # fmt: skip
    """``out = activation(alpha * row_scale * column_scale * x @ y^T + bias + beta * residual)``, one CTA a worker."""
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
    if C.CONSUMERS == "ping_pong":  # no barrier that nobody uses: see `tilestream.kernels.hopper.ring`
        order = make_barriers(2, 1)
    else:
        order: gl.constexpr = None
    items = Items(make_slots(), item_full, item_empty)
    gate = Gate(
        Arriving(row_signals, row_quarantine, row_table, row_epoch, row_key, row_chunks, rows_per_chunk, row_unread),
        Arriving(
            column_signals, column_quarantine, column_table, column_epoch, column_key, column_chunks,
            columns_per_chunk, column_unread,
        ),
        queue_table, rows_per_batch, row_tiles_per_batch, records, claims, op, allowed,
    )  # fmt: skip
    loads = Loads(x_map, y_maps, Apart(apart_map, apart_first, apart_tiles, apart_period), x_batched, y_batched)
    work = Work(
        batches, num_m, num_n, k_steps, full_tiles, shares, units, queues, table, group, first, band, first_batch
    )  # fmt: skip
    words = Words(counters, base, reset, probe, capacity)
    epilogue = Epilogue(
        out_map, out_buffers, Matrix(out, stride_ob, stride_or, stride_oc),
        Matrix(residual, stride_rb, stride_rr, stride_rc), Vector(bias, 0, stride_bias),
        Vector(row_scale, stride_sb, stride_sr), Vector(column_scale, stride_tb, stride_tc), alpha, beta, rows, columns,
    )  # fmt: skip
    publishing = Publishing(out_signals, out_counts, out_epoch, out_per_chunk, out_times)
    if C.COPIES != "none":
        # Before the warps part: all that math has, and their registers.
        LANES: gl.constexpr = gl.BlockedLayout([C.COPY_VECTOR], [32], [gl.num_warps()], [0])
        copy_items(
            copy_source, copy_target, copy_table, copy_words, row_signals if C.COPIES == "rows" else column_signals,
            row_epoch if C.COPIES == "rows" else column_epoch, copiers, gl.num_programs(0),
            gl.arange(0, C.COPY_BLOCK, LANES), C.COPY_BLOCK, C.COPY_VECTOR,
        )  # fmt: skip
    if C.LOOPS == 2:
        gl.warp_specialize([
            (math_loop, (0, ring, items, order, partials, counts, epilogue, probe, publishing, C)),
            (math_loop, (1, ring, items, order, partials, counts, epilogue, probe, publishing, C)),
            (load_loop, (loads, ring, items, work, words, gate, rows, columns, C)),
        ], [4, 1], [C.MATH_REGISTERS, C.LOAD_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (math_loop, (0, ring, items, order, partials, counts, epilogue, probe, publishing, C)),
            (load_loop, (loads, ring, items, work, words, gate, rows, columns, C)),
        ], [1], [C.LOAD_REGISTERS])  # fmt: skip
