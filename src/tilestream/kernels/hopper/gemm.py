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
`tilestream.kernels.portable.copy_items`.
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

from tilestream.kernels.hopper.compat import barrier
from tilestream.kernels.hopper.epilogue import (
    add_up,
    finish_strip,
    hold,
    pending,
    settle,
    start_of,
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
from tilestream.kernels.hopper.publish import UNALIGNED as PUBLISH_UNALIGNED
from tilestream.kernels.hopper.publish import UNSPECIALISED as PUBLISH_UNSPECIALISED
from tilestream.kernels.hopper.publish import Publishing, publish
from tilestream.kernels.hopper.queues import EARLY, ask, look_at_many, told
from tilestream.kernels.hopper.ring import ITEMS, get, make_barriers, make_slots, put, skip, step
from tilestream.kernels.portable.copy_items import copy_items
from tilestream.kernels.portable.schedule import add, enter, home_queue, leave, source_queue, take
from tilestream.kernels.portable.spans import begin_span, end_span, place_of, ready_span

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
def load_loop(
    x_map, apart, y_maps, x_stages, y_stages, full, empty, slots, item_full, item_empty,
    x_batched, y_batched, counters, base, reset, table, probe,
    batches, num_m, num_n, k_steps, full_tiles, shares, units, queues, group, first, band, first_batch, capacity,
    gate, rows, columns,
    ROWS: gl.constexpr, WIDTHS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
    BYTES: gl.constexpr, X_K_MAJOR: gl.constexpr, Y_K_MAJOR: gl.constexpr, BATCHED: gl.constexpr,
    SWAPPED: gl.constexpr, KIND: gl.constexpr, SPLIT: gl.constexpr, STEAL: gl.constexpr, ORDER: gl.constexpr,
    TRANSPOSED: gl.constexpr, PROBE: gl.constexpr, CHAINED: gl.constexpr,
    ROW_CHUNKS: gl.constexpr, COLUMN_CHUNKS: gl.constexpr, TRACE: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    """The load warp: takes items, passes their gates, hands them on, and loads their K steps into the ring."""
    GATED: gl.constexpr = ROW_CHUNKS != "none" or COLUMN_CHUNKS != "none"
    COLUMNS: gl.constexpr = start_of(WIDTHS, len(WIDTHS))
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    worker = gl.program_id(0)
    workers = gl.num_programs(0)
    leaves = reset
    if GATED:
        leaves = counts_out(gate, reset)
    enter(counters, base, worker, queues, leaves, KIND == "static", GATED)
    zero = tl.cast(0, tl.int32)
    ticket = zero
    source = zero
    share = zero - 1
    unit = zero
    unit_end = zero
    noted = zero
    found = zero + 1
    stage = zero
    phase = zero
    slot = zero
    slot_phase = zero
    if GATED:
        watch, carried = begin_gate(gate, worker, counters, base, queues, ROW_CHUNKS, COLUMN_CHUNKS)
    # At a gate a worker may wait for long: it holds no ticket then that somebody else could use. And stream_k leaves
    # the load warp no registers for it.
    ASKS: gl.constexpr = KIND == "dynamic" and not GATED
    asked = tl.cast(0, tl.int64)
    if ASKS:
        asked = ask(counters, home_queue(worker, queues), zero + 1)
    waited = tl.cast(0, tl.int64)
    if SPLIT == "chunks":
        queue = zero - 1
        found_empty = zero
    while found != 0:
        if SPLIT == "chunks":
            found, batch, pm, pn, queue, found_empty, waited, noted = take_arrived(
                gate, watch, carried, worker, queue, found_empty, base, counters, queues, batches, num_m, num_n,
                k_steps, full_tiles, table, group, first, band, first_batch, probe, capacity, noted,
                ORDER, TRANSPOSED, ROW_CHUNKS, PROBE,
            )  # fmt: skip
            k_begin, k_end, part, parts, partial = zero, zero + k_steps, zero, zero + 1, zero - 1
        else:
            (
                found, batch, pm, pn, k_begin, k_end, part, parts, partial, ticket, source, share, unit, unit_end,
                noted,
            ) = take(
                worker, workers, ticket, source, share, unit, unit_end,
                counters, base, queues, batches, num_m, num_n, k_steps, full_tiles, shares, units, table, group, first,
                band, first_batch, probe, capacity, noted,
                KIND, SPLIT, STEAL, ORDER, TRANSPOSED, PROBE, asked, told if ASKS else add, look_at_many,
            )  # fmt: skip
        if SWAPPED:
            pr, pc = pn, pm
        else:
            pr, pc = pm, pn
        if TRACE:
            place = zero
            if found != 0:
                place = place_of(batch, pm, pn, parts, partial, batches, num_m, num_n)
                begin_span(probe, place, worker)
        if GATED:
            if found != 0:
                carried, k_begin, k_end, noted = pass_item(
                    gate, watch, carried, worker, batch, pm, pn, k_begin, k_end,
                    columns if SWAPPED else rows, rows if SWAPPED else columns, batches, num_m, num_n, base,
                    probe, capacity, noted, COLUMNS if SWAPPED else ROWS, ROWS if SWAPPED else COLUMNS,
                    ROW_CHUNKS, COLUMN_CHUNKS, PROBE, waited,
                )  # fmt: skip
        if TRACE:
            if found != 0:
                ready_span(probe, place)
        mbarrier.wait(item_empty.index(slot), slot_phase ^ 1)
        put(slots, slot, 0, (k_end - k_begin) * found, 1)
        put(slots, slot, 1, pr, 1)
        put(slots, slot, 2, pc, 1)
        if BATCHED:
            put(slots, slot, 3, batch, 1)
        if KIND == "stream_k":
            put(slots, slot, 4, parts, 1)
            put(slots, slot, 5, part, 1)
            put(slots, slot, 6, partial, 1)
        if TRACE:
            put(slots, slot, 7, place, 1)
        mbarrier.arrive(item_full.index(slot))
        slot, slot_phase = step(slot, slot_phase, ITEMS)
        if found != 0:
            is_apart = False
            row = pr
            if APART:
                is_apart, row = stands(apart, pr)
            if ASKS:
                early = tl.maximum(k_begin, k_end - EARLY)
                stage, phase = load_steps(
                    k_begin, early, x_map, apart, is_apart, y_maps, x_stages, y_stages, full, empty, stage, phase,
                    batch * x_batched, batch * y_batched, row * ROWS, pc * COLUMNS,
                    WIDTHS, BLOCK_K, STAGES, HALVES, ROWS // HALVES, BYTES, X_K_MAJOR, Y_K_MAJOR, BATCHED, APART,
                )  # fmt: skip
                k_begin = early
                # Not where the worker's queue is empty, and it will look before it takes.
                go = tl.where(source <= queues, 1, 0)
                asked = ask(counters, source_queue(source, home_queue(worker, queues)), go)
            stage, phase = load_steps(
                k_begin, k_end, x_map, apart, is_apart, y_maps, x_stages, y_stages, full, empty, stage, phase,
                batch * x_batched, batch * y_batched, row * ROWS, pc * COLUMNS,
                WIDTHS, BLOCK_K, STAGES, HALVES, ROWS // HALVES, BYTES, X_K_MAJOR, Y_K_MAJOR, BATCHED, APART,
            )  # fmt: skip
    if GATED:
        end_gate(
            gate, watch, carried[0], leaves, reset, worker, workers, queues, counters, base, batches, num_m, num_n,
            ROW_CHUNKS, COLUMN_CHUNKS,
        )  # fmt: skip
    else:
        leave(counters, queues, reset, workers, KIND == "static")


@gluon.jit
def math_loop(
    WHO: gl.constexpr, x_stages, y_stages, full, empty, slots, item_full, item_empty, order,
    partials, counts, out_map, out_buffers, out, bias, residual, row_scale, column_scale, rows, columns,
    stride_ob, stride_or, stride_oc, stride_bias, stride_rb, stride_rr, stride_rc, stride_sb, stride_sr,
    stride_tb, stride_tc, alpha, beta,
    ROWS: gl.constexpr, WIDTHS: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr, STRIP: gl.constexpr,
    BUFFERS: gl.constexpr, X_K_MAJOR: gl.constexpr, Y_K_MAJOR: gl.constexpr, BATCHED: gl.constexpr,
    KIND: gl.constexpr, CONSUMERS: gl.constexpr, PROMOTE: gl.constexpr,
    STORE: gl.constexpr, FLIPPED: gl.constexpr, WIDE: gl.constexpr, EIGHTS: gl.constexpr, SCALED: gl.constexpr,
    SCALES: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, ACTIVATION: gl.constexpr, CHAINED: gl.constexpr,
    GATED: gl.constexpr, probe, TRACE: gl.constexpr, publishing, PUBLISH: gl.constexpr,
):  # fmt: skip
    """A consumer: multiplies the items that it is handed, and finishes them."""
    if CHAINED:
        gdc_wait()
    HALF_ROWS: gl.constexpr = ROWS // HALVES
    COLUMNS: gl.constexpr = start_of(WIDTHS, len(WIDTHS))
    stage = tl.cast(0, tl.int32)
    phase = tl.cast(0, tl.int32)
    slot = tl.cast(0, tl.int32)
    slot_phase = tl.cast(0, tl.int32)
    number = tl.cast(0, tl.int32)
    going = tl.cast(1, tl.int32)
    while going != 0:
        mbarrier.wait(item_full.index(slot), slot_phase)
        steps = get(slots, slot, 0, 4)
        pr = get(slots, slot, 1, 4)
        pc = get(slots, slot, 2, 4)
        batch = tl.cast(0, tl.int32)
        if BATCHED:
            batch = get(slots, slot, 3, 4)
        parts = tl.cast(1, tl.int32)
        part = tl.cast(0, tl.int32)
        partial = tl.cast(0, tl.int32)
        if KIND == "stream_k":
            parts = get(slots, slot, 4, 4)
            part = get(slots, slot, 5, 4)
            partial = get(slots, slot, 6, 4)
        if TRACE:
            place = get(slots, slot, 7, 4)
        mbarrier.arrive(item_empty.index(slot))
        slot, slot_phase = step(slot, slot_phase, ITEMS)
        mine = steps > 0
        if GATED:
            mine = steps != 0
        if CONSUMERS == "ping_pong":
            mine = mine & (number % 2 == WHO)
        if mine:
            if CONSUMERS == "ping_pong":
                # A barrier that is new is in phase 0: the consumer that begins waits for the phase "before" it.
                mbarrier.wait(order.index(WHO), (number // 2) ^ (1 - WHO))
            row = pr * ROWS
            if HALVES == 2:
                row += WHO * HALF_ROWS
            early = touch(
                batch, row, pc * COLUMNS, rows, columns, bias, stride_bias, residual, stride_rb, stride_rr, stride_rc,
                row_scale, stride_sb, stride_sr, column_scale, stride_tb, stride_tc,
                HALF_ROWS, WIDTHS, FLIPPED, SCALES, BIAS, RESIDUAL,
            )  # fmt: skip
            accs, stage, phase = product(
                x_stages, y_stages, full, empty, stage, phase, steps, order, WHO, STAGES, HALVES, HALF_ROWS,
                WIDTHS, X_K_MAJOR, Y_K_MAJOR, CONSUMERS, PROMOTE, GATED,
            )  # fmt: skip
            hold(early)
            finishes = parts == 1
            at = partials
            size: gl.constexpr = ROWS * COLUMNS
            if KIND == "stream_k":
                if parts > 1:
                    # Each half of a tile is settled by itself: nobody waits for the other consumer.
                    HALF: gl.constexpr = WHO if HALVES == 2 else 0
                    at = partials + (partial - part).to(gl.int64) * size + HALF * HALF_ROWS * COLUMNS
                    finishes = settle(
                        accs, counts + (partial - part) * 2 + HALF, at + part.to(gl.int64) * size, parts,
                        HALF_ROWS, WIDTHS, STRIP,
                    )  # fmt: skip
            if finishes:
                for i in gl.static_range(COLUMNS // STRIP):
                    x = strip_of(accs, i * STRIP, WIDTHS, STRIP, HALF_ROWS)
                    if KIND == "stream_k":
                        if parts > 1:
                            x = add_up(
                                x, at + i * HALF_ROWS * STRIP, part, parts, size, HALF_ROWS, COLUMNS, STRIP,
                                SCALED or SCALES or BIAS != "none" or RESIDUAL,
                            )  # fmt: skip
                    finish_strip(
                        x, batch, row, pc * COLUMNS + i * STRIP, rows, columns, WHO * BUFFERS + i % BUFFERS,
                        pending(i, COLUMNS // STRIP, BUFFERS),
                        out_map, out_buffers, out, stride_ob, stride_or, stride_oc, bias, stride_bias,
                        residual, stride_rb, stride_rr, stride_rc, row_scale, stride_sb, stride_sr,
                        column_scale, stride_tb, stride_tc, alpha, beta,
                        HALF_ROWS, STRIP, STORE, FLIPPED, BATCHED, WIDE, EIGHTS, SCALED, SCALES, BIAS, RESIDUAL,
                        ACTIVATION,
                    )  # fmt: skip
                if PUBLISH == "rows":
                    publish(row, HALF_ROWS, rows, publishing)
                elif PUBLISH == "columns":  # of the accumulator: the output's rows, where the operands are swapped
                    publish(pc * COLUMNS, COLUMNS, columns, publishing)
            if TRACE:
                barrier()
                end_span(probe, place, WHO if HALVES == 2 else 0, finishes & (steps > 0))  # not of what is void
        if CONSUMERS == "ping_pong":
            if not mine:
                ahead = steps
                if GATED:
                    ahead = tl.maximum(steps, 0)
                stage, phase = skip(stage, phase, ahead, STAGES)
            number = (number + 1) % 4
        going = steps
    if STORE == "tma":
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
    ROWS: gl.constexpr, WIDTHS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, STRIP: gl.constexpr,
    BUFFERS: gl.constexpr, X_K_MAJOR: gl.constexpr, Y_K_MAJOR: gl.constexpr, BATCHED: gl.constexpr,
    SWAPPED: gl.constexpr, KIND: gl.constexpr, SPLIT: gl.constexpr, STEAL: gl.constexpr, ORDER: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    CONSUMERS: gl.constexpr, PROMOTE: gl.constexpr, LOAD_REGISTERS: gl.constexpr,
    MATH_REGISTERS: gl.constexpr, STORE: gl.constexpr, FLIPPED: gl.constexpr, WIDE: gl.constexpr,
    EIGHTS: gl.constexpr,
    SCALED: gl.constexpr, SCALES: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
    ACTIVATION: gl.constexpr, CHAINED: gl.constexpr, ROW_CHUNKS: gl.constexpr, COLUMN_CHUNKS: gl.constexpr,
    COPIES: gl.constexpr, COPY_BLOCK: gl.constexpr, COPY_VECTOR: gl.constexpr,
    PROBE: gl.constexpr, TRACE: gl.constexpr, PUBLISH: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    """``out = activation(alpha * row_scale * column_scale * x @ y^T + bias + beta * residual)``, one CTA a worker."""
    HALVES: gl.constexpr = 2 if CONSUMERS == "cooperative" else 1
    LOOPS: gl.constexpr = 1 if CONSUMERS == "single" else 2
    y_maps = (y_map,)
    if len(WIDTHS) > 1:
        y_maps = y_maps + (y_map_1,)
    if len(WIDTHS) > 2:
        y_maps = y_maps + (y_map_2,)
    x_stages = make_stages(x_map, STAGES * HALVES)
    BYTES: gl.constexpr = HALVES * ROWS // HALVES * BLOCK_K * x_map.dtype.primitive_bitwidth // 8 + (
        start_of(WIDTHS, len(WIDTHS)) * BLOCK_K * y_maps[0].dtype.primitive_bitwidth // 8
    )
    y_stages = ()
    for i in gl.static_range(len(WIDTHS)):
        y_stages = y_stages + (make_stages(y_maps[i], STAGES),)
    if STORE == "tma":
        out_shape: gl.constexpr = out_map.block_type.shape[-2:]
        out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(out_shape, out_map.dtype)
        out_buffers = gl.allocate_shared_memory(
            out_map.dtype, [LOOPS * BUFFERS, out_shape[0], out_shape[1]], out_layout
        )
    else:
        out_buffers: gl.constexpr = None
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, HALVES)
    item_full = make_barriers(ITEMS, 1)
    item_empty = make_barriers(ITEMS, LOOPS)
    if CONSUMERS == "ping_pong":  # no barrier that nobody uses: see `tilestream.kernels.hopper.ring`
        order = make_barriers(2, 1)
    else:
        order: gl.constexpr = None
    slots = make_slots()
    GATED: gl.constexpr = ROW_CHUNKS != "none" or COLUMN_CHUNKS != "none"
    gate = Gate(
        Arriving(row_signals, row_quarantine, row_table, row_epoch, row_key, row_chunks, rows_per_chunk, row_unread),
        Arriving(
            column_signals, column_quarantine, column_table, column_epoch, column_key, column_chunks,
            columns_per_chunk, column_unread,
        ),
        queue_table, rows_per_batch, row_tiles_per_batch, records, claims, op, allowed,
    )  # fmt: skip
    apart = Apart(apart_map, apart_first, apart_tiles, apart_period)
    publishing = Publishing(out_signals, out_counts, out_epoch, out_per_chunk, out_times)
    if COPIES != "none":
        # Before the warps part: all that math has, and their registers.
        LANES: gl.constexpr = gl.BlockedLayout([COPY_VECTOR], [32], [gl.num_warps()], [0])
        copy_items(
            copy_source, copy_target, copy_table, copy_words, row_signals if COPIES == "rows" else column_signals,
            row_epoch if COPIES == "rows" else column_epoch, copiers, gl.num_programs(0),
            gl.arange(0, COPY_BLOCK, LANES), COPY_BLOCK, COPY_VECTOR,
        )  # fmt: skip
    if LOOPS == 2:
        gl.warp_specialize([
            (math_loop, (
                0, x_stages, y_stages, full, empty, slots, item_full, item_empty, order,
                partials, counts, out_map, out_buffers, out, bias, residual, row_scale, column_scale, rows, columns,
                stride_ob, stride_or, stride_oc, stride_bias, stride_rb, stride_rr, stride_rc, stride_sb, stride_sr,
                stride_tb, stride_tc, alpha, beta,
                ROWS, WIDTHS, STAGES, HALVES, STRIP, BUFFERS, X_K_MAJOR, Y_K_MAJOR, BATCHED, KIND, CONSUMERS, PROMOTE,
                STORE, FLIPPED, WIDE, EIGHTS, SCALED, SCALES, BIAS, RESIDUAL, ACTIVATION, CHAINED,
                GATED, probe, TRACE, publishing, PUBLISH,
            )),
            (math_loop, (
                1, x_stages, y_stages, full, empty, slots, item_full, item_empty, order,
                partials, counts, out_map, out_buffers, out, bias, residual, row_scale, column_scale, rows, columns,
                stride_ob, stride_or, stride_oc, stride_bias, stride_rb, stride_rr, stride_rc, stride_sb, stride_sr,
                stride_tb, stride_tc, alpha, beta,
                ROWS, WIDTHS, STAGES, HALVES, STRIP, BUFFERS, X_K_MAJOR, Y_K_MAJOR, BATCHED, KIND, CONSUMERS, PROMOTE,
                STORE, FLIPPED, WIDE, EIGHTS, SCALED, SCALES, BIAS, RESIDUAL, ACTIVATION, CHAINED,
                GATED, probe, TRACE, publishing, PUBLISH,
            )),
            (load_loop, (
                x_map, apart, y_maps, x_stages, y_stages, full, empty, slots, item_full, item_empty,
                x_batched, y_batched, counters, base, reset, table, probe,
                batches, num_m, num_n, k_steps, full_tiles, shares, units, queues, group, first, band, first_batch,
                capacity, gate, rows, columns,
                ROWS, WIDTHS, BLOCK_K, STAGES, HALVES, BYTES, X_K_MAJOR, Y_K_MAJOR, BATCHED, SWAPPED,
                KIND, SPLIT, STEAL, ORDER, TRANSPOSED, PROBE, CHAINED, ROW_CHUNKS, COLUMN_CHUNKS, TRACE, APART,
            )),
        ], [4, 1], [MATH_REGISTERS, LOAD_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (math_loop, (
                0, x_stages, y_stages, full, empty, slots, item_full, item_empty, order,
                partials, counts, out_map, out_buffers, out, bias, residual, row_scale, column_scale, rows, columns,
                stride_ob, stride_or, stride_oc, stride_bias, stride_rb, stride_rr, stride_rc, stride_sb, stride_sr,
                stride_tb, stride_tc, alpha, beta,
                ROWS, WIDTHS, STAGES, HALVES, STRIP, BUFFERS, X_K_MAJOR, Y_K_MAJOR, BATCHED, KIND, CONSUMERS, PROMOTE,
                STORE, FLIPPED, WIDE, EIGHTS, SCALED, SCALES, BIAS, RESIDUAL, ACTIVATION, CHAINED,
                GATED, probe, TRACE, publishing, PUBLISH,
            )),
            (load_loop, (
                x_map, apart, y_maps, x_stages, y_stages, full, empty, slots, item_full, item_empty,
                x_batched, y_batched, counters, base, reset, table, probe,
                batches, num_m, num_n, k_steps, full_tiles, shares, units, queues, group, first, band, first_batch,
                capacity, gate, rows, columns,
                ROWS, WIDTHS, BLOCK_K, STAGES, HALVES, BYTES, X_K_MAJOR, Y_K_MAJOR, BATCHED, SWAPPED,
                KIND, SPLIT, STEAL, ORDER, TRANSPOSED, PROBE, CHAINED, ROW_CHUNKS, COLUMN_CHUNKS, TRACE, APART,
            )),
        ], [1], [LOAD_REGISTERS])  # fmt: skip
