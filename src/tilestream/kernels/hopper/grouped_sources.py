"""The Hopper grouped GEMM by source: `kernels.hopper.grouped`, whose rows lie in places of sources.

::

    load warp                                           math warps
      while there is a tile:  device.sources.next_tile    for item in item ring:
        hand it on, with its group's end                    for stage in ring: wgmma       (void: NaN)
        for stage in ring: TMA loads                        epilogue, clipped at the group's end
                                                            publish: count the tile; the source's last signals it

The load warp takes a tile and passes its gate as the portable kernel does. It fences before it loads, and hands a void
tile on backwards: see `kernels.hopper.gate`. A lane looks at several groups where there are more than a warp's lanes.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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
    Publishing,
    Ring,
    Sources,
    Span,
    Vector,
    Words,
    Work,
)
from tilestream.kernels.device.clock import now
from tilestream.kernels.device.jit import entry
from tilestream.kernels.device.schedule import LINE
from tilestream.kernels.device.sources import leave_sources, log_tile, next_tile, publish_empty, tile_of
from tilestream.kernels.hopper.gate import backwards
from tilestream.kernels.hopper.gemm import begin, make_stages
from tilestream.kernels.hopper.grouped import SOURCE, TILES, hand_on_group, lane_layout, load_group_steps, math_loop
from tilestream.kernels.hopper.ring import ITEMS, make_barriers, make_slots, put


@gluon.jit
def load_loop(loads, ring, items, sources, work, words, gate, C: gl.constexpr):
    """Producer, the load warp: take tiles whose rows are there, hand them on, load their K steps."""
    if C.CHAINED:
        gdc_launch_dependents()
    lane = gl.arange(0, C.LANES, lane_layout(C.LANES, 1))
    zero = tl.cast(0, tl.int32)
    progress, watch = begin(work, words, gate, C)
    passed = progress.passed
    stage, slot, found = Place(zero, zero), Place(zero, zero), zero + 1
    finished = tl.cast(0, tl.int32)
    while found != 0:
        if C.TRACE:
            began = now()
        found, its, finished, passed = next_tile(finished, passed, sources, work, words, gate, watch, lane, C)
        item, span = Item(zero, zero, zero, zero, zero, zero, zero + 1, zero - 1, zero), Span(zero, zero, zero)
        if found != 0:
            item, span = tile_of(its, work.k_steps, work, C)
            if C.TRACE:
                item = log_tile(item, its, began, sources, work, words, watch, lane, C)
            item, _ = backwards(item, 1 - its.valid)
        if C.PUBLISHES:
            mbarrier.wait(items.empty.index(slot.at), slot.phase ^ 1)
            put(items.slots, slot.at, SOURCE, its.source, 1)
            put(items.slots, slot.at, TILES, its.tiles, 1)
        slot = hand_on_group(items, slot, found, item, span, C)
        if found != 0:
            stage = load_group_steps(item, span, loads, ring, stage, item.k_begin, item.k_end, C)
    leave_sources(sources, work, words, gate, watch, lane, C)


@entry(
    gluon.jit,
    specialised=("stride_or", "stride_oc", "stride_bias", "stride_sr", "stride_tc"),
    unaligned=("source_counts",),
)
def grouped_gemm_by_source(
    x_map, y_map, y_map_1, y_map_2, out_map, source_counts, out, bias, row_scale, column_scale, counters, log,
    row_signals, row_quarantine, records, claims, out_signals, out_counts,
    base: tl.int64, reset, row_epoch, row_key, allowed: tl.int64, op, out_epoch,
    num_sources, num_groups, place_rows, pivot, x_batched, y_batched, rows, columns,
    stride_ob, stride_or, stride_oc, stride_bias_batch, stride_bias, stride_sb, stride_sr, stride_sk, stride_tb,
    stride_tc, stride_tk,
    batches, num_m, num_n, k_steps, full_tiles, shares, units, queues, group, first, band, first_batch, capacity,
    C: gl.constexpr,
):  # fmt: skip
    """``out = activation(row_scale * column_scale * x @ y^T + bias)`` by source and group, one CTA a worker.

    Parameters
    ----------
    x_map, y_map, y_map_1, y_map_2, out_map
        Tensor maps, as of `tilestream.kernels.hopper.grouped.grouped_gemm` with groups of rows.
    source_counts, row_signals
        As of `tilestream.kernels.portable.grouped_sources.grouped_gemm_by_source`.
    C
        A `tilestream.kernels.config.HopperSourcesConfig`.

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
    loads = Loads(x_map, y_maps, LocalRows(None, 0, 0, 0), x_batched, y_batched, columns if C.TWO_HALVES else 0)
    words = Words(counters, base, reset, log, capacity, None, None)
    tickets = counters + (queues + 2) * LINE
    sources = Sources(
        source_counts, num_sources, num_groups, place_rows, pivot, tickets, tickets + num_sources * num_groups
    )  # fmt: skip
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
    work = Work(
        batches, num_m, num_n, k_steps, full_tiles, shares, units, queues, None, group, first, band, first_batch
    )  # fmt: skip
    if C.ARRIVES:
        coming = Incoming(row_signals, row_quarantine, None, row_epoch, row_key, 0, 1, 0, 0)
        everything = Incoming(None, None, None, 1, 0, 0, 1, 0, 0)
        gate = Gate(coming, everything, None, 0, 0, records, claims, op, allowed)
    else:
        gate: gl.constexpr = None
    if C.CHAINED:
        gdc_wait()
    publishing: gl.constexpr = None
    if C.PUBLISHES:
        publishing = Publishing(out_signals, out_counts, out_epoch, 1, 1)
        lane = gl.arange(0, C.LANES, lane_layout(C.LANES, gl.num_warps()))
        publish_empty(sources, publishing, gl.program_id(0), gl.num_programs(0), lane)
    if C.LOOPS == 2:
        gl.warp_specialize([
            (math_loop, (0, ring, items, order, words, epilogue, scales, publishing, C)),
            (math_loop, (1, ring, items, order, words, epilogue, scales, publishing, C)),
            (load_loop, (loads, ring, items, sources, work, words, gate, C)),
        ], [4, 1], [C.MATH_REGISTERS, C.LOAD_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (math_loop, (0, ring, items, order, words, epilogue, scales, publishing, C)),
            (load_loop, (loads, ring, items, sources, work, words, gate, C)),
        ], [1], [C.LOAD_REGISTERS])  # fmt: skip
