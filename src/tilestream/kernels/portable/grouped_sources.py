"""Grouped GEMM by source in Triton: `kernels.portable.grouped`, whose rows lie in places of sources.

::

    out[rows of g of s] = epilogue(A[rows of g of s] @ B[g])             rows behind a source's last one: not written

    while there is a tile:                                               # device.sources.next_tile
        of the first source, from the pivot on, that has tiles whose rows are there
        gate.wait(its group's rows)
        acc = A[...] @ B[g];  out[tile] = epilogue(acc)                  # as for groups of rows
        publish: count the tile; the source's last signals it

The number of tiles is known of no source before its counts are there: `tilestream.core.sources`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.core.structs import (
    Epilogue,
    Gate,
    Incoming,
    Matrix,
    Publishing,
    Sources,
    Vector,
    Words,
    Work,
)
from tilestream.kernels.device.clock import now
from tilestream.kernels.device.items import begin_worker
from tilestream.kernels.device.jit import entry
from tilestream.kernels.device.schedule import LINE
from tilestream.kernels.device.sources import (
    leave_sources,
    log_tile,
    next_tile,
    publish_empty,
    publish_tile,
    tile_of,
)
from tilestream.kernels.device.trace import end_span
from tilestream.kernels.portable.epilogue import halves, store_halves, store_tile
from tilestream.kernels.portable.grouped import group_product


@entry(
    triton.jit,
    specialised=(
        "m", "n", "k", "stride_am", "stride_ak", "stride_bb", "stride_bk", "stride_bn", "stride_ob", "stride_or",
        "stride_oc",
    ),
    unaligned=("row_scale", "column_scale", "source_counts"),
)  # fmt: skip
def grouped_gemm_by_source(
    a, b, source_counts, out, bias, row_scale, column_scale, counters, log,
    base: tl.int64, reset, num_sources, num_groups, place_rows, pivot, m, n, k, stride_am, stride_ak, stride_bb,
    stride_bk, stride_bn, stride_ob, stride_or, stride_oc, stride_bias_batch, stride_bias, stride_sb, stride_sr,
    stride_sk, stride_tb, stride_tc, stride_tk,
    batches, num_m, num_n, k_steps, full_tiles, shares, units, queues, group, first, band, first_batch, capacity,
    row_signals, row_quarantine, records, claims, row_epoch, row_key, allowed: tl.int64, op,
    out_signals, out_counts, out_epoch,
    C: tl.constexpr,
):  # fmt: skip
    """``out = activation(row_scale * column_scale * a @ b + bias)`` by source and group, one program a worker.

    Parameters
    ----------
    a, b, out
        ``[num_sources * place_rows, k]``, ``[num_groups, k, n]``, ``[num_sources * place_rows, n]``. Any strides.
    source_counts
        int32 ``[num_sources, num_groups]``: the rows of each group of each source.
    bias, row_scale, column_scale
        As of `tilestream.kernels.portable.grouped.grouped_gemm`.
    row_signals
        int32 ``[num_sources, num_groups + 1]``: of each source its counts', and each group's rows'.
    C
        A `tilestream.kernels.config.PortableSourcesConfig`.

    The others are fields of `tilestream.core.structs`, as they are grouped here.
    """
    worker, workers = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, C.LANES)
    words = Words(counters, base, reset, log, capacity, None, None)
    tickets = counters + (queues + 2) * LINE
    sources = Sources(
        source_counts, num_sources, num_groups, place_rows, pivot, tickets, tickets + num_sources * num_groups
    )  # fmt: skip
    x, y = Matrix(a, 0, stride_am, stride_ak), Matrix(b, stride_bb, stride_bk, stride_bn)
    place = Matrix(out, stride_ob, stride_or, stride_oc)
    work = Work(
        batches, num_m, num_n, k_steps, full_tiles, shares, units, queues, None, group, first, band, first_batch
    )  # fmt: skip
    publishing = Publishing(out_signals, out_counts, out_epoch, 1, 1)
    if C.ARRIVES:
        coming = Incoming(row_signals, row_quarantine, None, row_epoch, row_key, 0, 1, 0, 0)
        everything = Incoming(None, None, None, 1, 0, 0, 1, 0, 0)
        gate = Gate(coming, everything, None, 0, 0, records, claims, op, allowed)
    else:
        gate: tl.constexpr = None
    if C.PUBLISHES:
        publish_empty(sources, publishing, worker, workers, lane)
    progress, watch = begin_worker(worker, workers, work, words, gate, C)
    passed = progress.passed
    finished = tl.cast(0, tl.int32)
    found = tl.cast(1, tl.int32)
    while found != 0:
        if C.TRACE:
            began = now()
        found, its, finished, passed = next_tile(finished, passed, sources, work, words, gate, watch, lane, C)
        if found != 0:
            item, span = tile_of(its, tl.where(its.valid != 0, k_steps, 0), work, C)
            if C.TRACE:
                item = log_tile(item, its, began, sources, work, words, watch, lane, C)
            if C.SCALES == "block":
                scales = (
                    Matrix(row_scale, 0, stride_sr, stride_sk),
                    Matrix(column_scale, stride_tb, stride_tk, stride_tc),
                )
            else:
                scales: tl.constexpr = None
            acc = group_product(x, y, item, span, m, n, k, scales, C)
            acc = tl.where(its.valid != 0, acc, float("nan"))
            epilogue = Epilogue(
                place, Matrix(None, 0, 0, 0), Vector(bias, stride_bias_batch, stride_bias),
                Vector(row_scale, stride_sb, stride_sr), Vector(column_scale, stride_tb, stride_tc),
                1.0, 1.0, span.end, n, None, None,
            )  # fmt: skip
            row = span.begin + item.pm * C.BLOCK_M
            if C.TWO_HALVES:
                HALF: tl.constexpr = C.BLOCK_N // 2
                low, high = halves(acc, C.BLOCK_N, C)
                store_halves(low, high, epilogue, item.batch, row, item.pn * HALF, HALF, C)
            else:
                store_tile(acc, epilogue, item.batch, row, item.pn * C.BLOCK_N, C.BLOCK_N, C)
            if C.PUBLISHES:
                publish_tile(its.source, its.tiles, publishing)
            if C.TRACE:
                tl.debug_barrier()  # all threads' stores
                end_span(words.log, item.place, 0, its.valid != 0)
    leave_sources(sources, work, words, gate, watch, lane, C)
