"""The Hopper GEMM: warp-specialised, persistent, in Gluon.

::

    load warp                                   math warps (one or two consumers of four warps)
      for item in schedule:                       for item in item ring:
        hand it on through the item ring            for stage in ring: wgmma
        for stage in ring: TMA loads                epilogue, drained by TMA under the next item

The protocol between them is at the head of `tilestream.kernels.hopper.ring`.

The kernel knows an accumulator of rows and columns: rows are those of ``x`` ``[rows, K]``, columns those of ``y``
``[columns, K]``. ``SWAPPED`` says that ``x`` is B and ``y`` is A: an instruction of the tensor cores takes 64 rows or
more, but as few as 8 columns, so few rows of A go there. Each operand lies K-major or the other way round.

Variants (``CONSUMERS``):

- ``single``: one consumer.
- ``cooperative``: two, each with half of a tile's rows.
- ``ping_pong``: two, a tile each; one's epilogue runs under the other's multiplications.

``CHAINED``: the launch may begin before the kernel ahead of it in the stream has ended (programmatic dependent launch),
and waits before it touches memory. What comes after it may do likewise, once all workers run.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tilestream.kernels.hopper.compat import barrier, tma_load, viewed
from tilestream.kernels.hopper.epilogue import (
    add_up,
    finish_strip,
    hold,
    mma_layout,
    pending,
    settle,
    start_of,
    strip_of,
    touch,
)
from tilestream.kernels.hopper.ring import ITEMS, before, get, make_barriers, make_slots, put, skip, step
from tilestream.kernels.portable.schedule import enter, leave, take
from tilestream.kernels.portable.spans import begin_span, end_span, place_of, ready_span

#: Arguments that say nothing about alignment: one compiled kernel serves all their values.
UNSPECIALISED = (
    "base", "reset", "queues", "batches", "num_m", "num_n", "k_steps", "full_tiles", "shares", "units", "group",
    "first", "band", "first_batch", "capacity", "rows", "columns", "x_batched", "y_batched", "stride_ob", "stride_rb",
    "stride_sb", "stride_tb", "alpha", "beta",
)  # fmt: skip


@gluon.jit
def load_operand(
    tensor_map, bar, stages, at, batch, row, k, HALVES: gl.constexpr, HALF_ROWS: gl.constexpr, K_MAJOR: gl.constexpr,
    BATCHED: gl.constexpr,
):  # fmt: skip
    """Start the copies of one operand's part of a stage: a copy for each consumer that has a half of its own."""
    for half in gl.static_range(HALVES):
        first = row + half * HALF_ROWS
        if K_MAJOR:
            outer, inner = first, k
        else:
            outer, inner = k, first
        buffer = stages.index(at * HALVES + half)
        if BATCHED:
            tma_load(tensor_map, [batch, outer, inner], bar, viewed(buffer, tensor_map))
        else:
            tma_load(tensor_map, [outer, inner], bar, buffer)


@gluon.jit
def make_stages(tensor_map, STAGES: gl.constexpr):
    """Room for so many boxes of an operand."""
    shape: gl.constexpr = tensor_map.block_type.shape[-2:]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, tensor_map.dtype)
    return gl.allocate_shared_memory(tensor_map.dtype, [STAGES, shape[0], shape[1]], layout)


@gluon.jit
def load_loop(
    x_map, y_maps, x_stages, y_stages, full, empty, slots, item_full, item_empty,
    x_batched, y_batched, counters, base, reset, table, probe,
    batches, num_m, num_n, k_steps, full_tiles, shares, units, queues, group, first, band, first_batch, capacity,
    ROWS: gl.constexpr, WIDTHS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
    BYTES: gl.constexpr, X_K_MAJOR: gl.constexpr, Y_K_MAJOR: gl.constexpr, BATCHED: gl.constexpr,
    SWAPPED: gl.constexpr, KIND: gl.constexpr, SPLIT: gl.constexpr, STEAL: gl.constexpr, ORDER: gl.constexpr,
    TRANSPOSED: gl.constexpr, PROBE: gl.constexpr, CHAINED: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    """The load warp: takes items, hands them on, and loads their K steps into the ring."""
    COLUMNS: gl.constexpr = start_of(WIDTHS, len(WIDTHS))
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    worker = gl.program_id(0)
    workers = gl.num_programs(0)
    enter(counters, base, worker, queues, reset, KIND == "static", False)
    zero = tl.cast(0, tl.int32)
    ticket = zero
    home_open = zero + 1
    share = zero - 1
    unit = zero
    unit_end = zero
    noted = zero
    found = zero + 1
    stage = zero
    phase = zero
    slot = zero
    slot_phase = zero
    while found != 0:
        (
            found, batch, pm, pn, k_begin, k_end, part, parts, partial, ticket, home_open, share, unit, unit_end, noted,
        ) = take(
            worker, workers, ticket, home_open, share, unit, unit_end,
            counters, base, queues, batches, num_m, num_n, k_steps, full_tiles, shares, units, table, group, first,
            band, first_batch, probe, capacity, noted,
            KIND, SPLIT, STEAL, ORDER, TRANSPOSED, PROBE,
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
            for k in range(k_begin, k_end):
                mbarrier.wait(empty.index(stage), phase ^ 1)
                bar = full.index(stage)
                mbarrier.expect(bar, BYTES)
                load_operand(
                    x_map, bar, x_stages, stage, batch * x_batched, pr * ROWS, k * BLOCK_K,
                    HALVES, ROWS // HALVES, X_K_MAJOR, BATCHED,
                )  # fmt: skip
                for i in gl.static_range(len(WIDTHS)):
                    load_operand(
                        y_maps[i], bar, y_stages[i], stage, batch * y_batched, pc * COLUMNS + start_of(WIDTHS, i),
                        k * BLOCK_K, 1, 0, Y_K_MAJOR, BATCHED,
                    )  # fmt: skip
                stage, phase = step(stage, phase, STAGES)
    leave(counters, queues, reset, workers, KIND == "static")


@gluon.jit
def operand(stages, at, K_MAJOR: gl.constexpr, TRANSPOSED: gl.constexpr):
    """A stage's part as the multiplication takes it: ``[rows, K]``, or ``[K, columns]`` where ``TRANSPOSED``."""
    buffer = stages.index(at)
    if K_MAJOR == TRANSPOSED:
        return buffer.permute((1, 0))
    else:
        return buffer


@gluon.jit
def zero(ROWS: gl.constexpr, WIDTH: gl.constexpr, BITS: gl.constexpr):
    """An accumulator of operands of so many bits."""
    return gl.zeros((ROWS, WIDTH), gl.float32, mma_layout(WIDTH, 256 // BITS))


@gluon.jit
def zeros(ROWS: gl.constexpr, WIDTHS: gl.constexpr, BITS: gl.constexpr):
    """An accumulator for each part of a tile."""
    accs = ()
    for i in gl.static_range(len(WIDTHS)):
        accs = accs + (zero(ROWS, WIDTHS[i], BITS),)
    return accs


@gluon.jit
def start_mma(x, y_stages, stage, accs, MORE: gl.constexpr, Y_K_MAJOR: gl.constexpr):
    """Start the multiplications of a stage: into the accumulators, or with ``MORE`` on top of what is there."""
    out = ()
    for i in gl.static_range(len(accs)):
        y = operand(y_stages[i], stage, Y_K_MAJOR, True)
        out = out + (warpgroup_mma(x, y, accs[i], is_async=True, use_acc=MORE),)
    return out


@gluon.jit
def wait_mma(accs, STAGES: gl.constexpr):
    """Wait until the multiplications of no more than ``STAGES`` stages have not finished."""
    if len(accs) == 1:
        return (warpgroup_mma_wait(STAGES, accs),)
    else:
        return warpgroup_mma_wait(STAGES * len(accs), accs)


@gluon.jit
def multiply(
    x_stages, y_stages, full, empty, stage, phase, steps, order, WHO: gl.constexpr, STAGES: gl.constexpr,
    HALVES: gl.constexpr, HALF_ROWS: gl.constexpr, WIDTHS: gl.constexpr, X_K_MAJOR: gl.constexpr,
    Y_K_MAJOR: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """The K loop of one item: ``(accumulators, stage, phase)``.

    A stage is given back when the multiplication after it has been started and the one on it is done: so a ring has two
    stages at least.
    """
    HALF: gl.constexpr = WHO if HALVES == 2 else 0
    accs = zeros(HALF_ROWS, WIDTHS, x_stages.dtype.primitive_bitwidth)
    mbarrier.wait(full.index(stage), phase)
    x = operand(x_stages, stage * HALVES + HALF, X_K_MAJOR, False)
    accs = wait_mma(start_mma(x, y_stages, stage, accs, False, Y_K_MAJOR), 1)
    stage, phase = step(stage, phase, STAGES)
    for _ in range(1, steps):
        mbarrier.wait(full.index(stage), phase)
        x = operand(x_stages, stage * HALVES + HALF, X_K_MAJOR, False)
        accs = wait_mma(start_mma(x, y_stages, stage, accs, True, Y_K_MAJOR), 1)
        mbarrier.arrive(empty.index(before(stage, STAGES)))
        stage, phase = step(stage, phase, STAGES)
    if CONSUMERS == "ping_pong":
        mbarrier.arrive(order.index(1 - WHO))
    accs = wait_mma(accs, 0)
    mbarrier.arrive(empty.index(before(stage, STAGES)))
    return accs, stage, phase


@gluon.jit
def multiply_precisely(
    x_stages, y_stages, full, empty, stage, phase, steps, order, WHO: gl.constexpr, STAGES: gl.constexpr,
    HALVES: gl.constexpr, HALF_ROWS: gl.constexpr, WIDTHS: gl.constexpr, X_K_MAJOR: gl.constexpr,
    Y_K_MAJOR: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """`multiply` for fp8 without fast accumulation: a step's product is added to the accumulators in fp32.

    The tensor core adds products of fp8 with about 14 bits; over a step of K that is harmless, over all of it it shows.
    Parts one after the other: there are registers for the product of one of them.
    """
    HALF: gl.constexpr = WHO if HALVES == 2 else 0
    accs = zeros(HALF_ROWS, WIDTHS, x_stages.dtype.primitive_bitwidth)
    for k in range(steps):
        mbarrier.wait(full.index(stage), phase)
        x = operand(x_stages, stage * HALVES + HALF, X_K_MAJOR, False)
        sums = ()
        for i in gl.static_range(len(WIDTHS)):
            part = zero(HALF_ROWS, WIDTHS[i], x_stages.dtype.primitive_bitwidth)
            y = operand(y_stages[i], stage, Y_K_MAJOR, True)
            part = warpgroup_mma(x, y, part, is_async=True, use_acc=False)
            if CONSUMERS == "ping_pong" and i == len(WIDTHS) - 1:
                if k == steps - 1:
                    mbarrier.arrive(order.index(1 - WHO))
            sums = sums + (accs[i] + warpgroup_mma_wait(0, (part,)),)
        mbarrier.arrive(empty.index(stage))
        accs = sums
        stage, phase = step(stage, phase, STAGES)
    return accs, stage, phase


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
    probe, TRACE: gl.constexpr,
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
            if PROMOTE:
                accs, stage, phase = multiply_precisely(
                    x_stages, y_stages, full, empty, stage, phase, steps, order, WHO, STAGES, HALVES, HALF_ROWS,
                    WIDTHS, X_K_MAJOR, Y_K_MAJOR, CONSUMERS,
                )  # fmt: skip
            else:
                accs, stage, phase = multiply(
                    x_stages, y_stages, full, empty, stage, phase, steps, order, WHO, STAGES, HALVES, HALF_ROWS,
                    WIDTHS, X_K_MAJOR, Y_K_MAJOR, CONSUMERS,
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
                            x = add_up(x, at + i * HALF_ROWS * STRIP, part, parts, size, HALF_ROWS, STRIP)
                    finish_strip(
                        x, batch, row, pc * COLUMNS + i * STRIP, rows, columns, WHO * BUFFERS + i % BUFFERS,
                        pending(i, COLUMNS // STRIP, BUFFERS),
                        out_map, out_buffers, out, stride_ob, stride_or, stride_oc, bias, stride_bias,
                        residual, stride_rb, stride_rr, stride_rc, row_scale, stride_sb, stride_sr,
                        column_scale, stride_tb, stride_tc, alpha, beta,
                        HALF_ROWS, STRIP, STORE, FLIPPED, BATCHED, WIDE, EIGHTS, SCALED, SCALES, BIAS, RESIDUAL,
                        ACTIVATION,
                    )  # fmt: skip
            if TRACE:
                barrier()
                end_span(probe, place, WHO if HALVES == 2 else 0, finishes)
        if CONSUMERS == "ping_pong":
            if not mine:
                stage, phase = skip(stage, phase, steps, STAGES)
            number = (number + 1) % 4
        going = steps
    if STORE == "tma":
        tma.store_wait(0)


@gluon.jit(do_not_specialize=UNSPECIALISED)
def gemm(
    x_map, y_map, y_map_1, y_map_2, out_map, out, bias, residual, row_scale, column_scale, partials, counts,
    counters, table, probe,
    base: tl.int64, reset, x_batched, y_batched, rows, columns,
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
    ACTIVATION: gl.constexpr, CHAINED: gl.constexpr, PROBE: gl.constexpr, TRACE: gl.constexpr,
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
    order = make_barriers(2, 1)
    slots = make_slots()
    if LOOPS == 2:
        gl.warp_specialize([
            (math_loop, (
                0, x_stages, y_stages, full, empty, slots, item_full, item_empty, order,
                partials, counts, out_map, out_buffers, out, bias, residual, row_scale, column_scale, rows, columns,
                stride_ob, stride_or, stride_oc, stride_bias, stride_rb, stride_rr, stride_rc, stride_sb, stride_sr,
                stride_tb, stride_tc, alpha, beta,
                ROWS, WIDTHS, STAGES, HALVES, STRIP, BUFFERS, X_K_MAJOR, Y_K_MAJOR, BATCHED, KIND, CONSUMERS, PROMOTE,
                STORE, FLIPPED, WIDE, EIGHTS, SCALED, SCALES, BIAS, RESIDUAL, ACTIVATION, CHAINED,
                probe, TRACE,
            )),
            (math_loop, (
                1, x_stages, y_stages, full, empty, slots, item_full, item_empty, order,
                partials, counts, out_map, out_buffers, out, bias, residual, row_scale, column_scale, rows, columns,
                stride_ob, stride_or, stride_oc, stride_bias, stride_rb, stride_rr, stride_rc, stride_sb, stride_sr,
                stride_tb, stride_tc, alpha, beta,
                ROWS, WIDTHS, STAGES, HALVES, STRIP, BUFFERS, X_K_MAJOR, Y_K_MAJOR, BATCHED, KIND, CONSUMERS, PROMOTE,
                STORE, FLIPPED, WIDE, EIGHTS, SCALED, SCALES, BIAS, RESIDUAL, ACTIVATION, CHAINED,
                probe, TRACE,
            )),
            (load_loop, (
                x_map, y_maps, x_stages, y_stages, full, empty, slots, item_full, item_empty,
                x_batched, y_batched, counters, base, reset, table, probe,
                batches, num_m, num_n, k_steps, full_tiles, shares, units, queues, group, first, band, first_batch,
                capacity,
                ROWS, WIDTHS, BLOCK_K, STAGES, HALVES, BYTES, X_K_MAJOR, Y_K_MAJOR, BATCHED, SWAPPED,
                KIND, SPLIT, STEAL, ORDER, TRANSPOSED, PROBE, CHAINED, TRACE,
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
                probe, TRACE,
            )),
            (load_loop, (
                x_map, y_maps, x_stages, y_stages, full, empty, slots, item_full, item_empty,
                x_batched, y_batched, counters, base, reset, table, probe,
                batches, num_m, num_n, k_steps, full_tiles, shares, units, queues, group, first, band, first_batch,
                capacity,
                ROWS, WIDTHS, BLOCK_K, STAGES, HALVES, BYTES, X_K_MAJOR, Y_K_MAJOR, BATCHED, SWAPPED,
                KIND, SPLIT, STEAL, ORDER, TRANSPOSED, PROBE, CHAINED, TRACE,
            )),
        ], [1], [LOAD_REGISTERS])  # fmt: skip
