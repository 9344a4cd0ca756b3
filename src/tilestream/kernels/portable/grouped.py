"""Grouped GEMM in Triton: `kernels.portable.gemm`, whose items have one coordinate more, the group.

::

    ALONG = "rows":  out[rows of g] = epilogue(A[rows of g] @ B[g]);     rows of no group: 0
    ALONG = "k":     out[g] = epilogue(A[:, K of g] @ B[K of g])
    TWO_HALVES:      a tile multiplies as many columns of each half of B, and stores silu(first) * second
    blocks' scales:  acc += (A[...] @ B[...]) * scale of rows * scale of columns, for each step

    count the tiles of all groups: this launch's grid                   # device.groups
    store zeros in rows of no group
    for item in schedule:                                               # items.next_item, as of a plain GEMM
        find the item's group in the offsets
        gate.wait(the group's chunk), where its B arrives               # gate.pass_group
        acc = 0;  for step in item: acc += A[...] @ B[...]              # product, of the group's part of the operands
        out[tile] = epilogue(acc)

A tile belongs to one group. The host does not know the grid: its schedule is that of the most tiles that there can be.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.core.structs import (
    Epilogue,
    Gate,
    Groups,
    Incoming,
    Item,
    Matrix,
    Progress,
    Region,
    Vector,
    Words,
    Work,
)
from tilestream.kernels.device.gate import pass_group
from tilestream.kernels.device.groups import (
    count_rows,
    find_loaded,
    find_longest,
    find_rows,
    k_of_group,
    row_tiles,
    tiles_by_load,
)
from tilestream.kernels.device.items import begin_worker, finish_worker, next_item
from tilestream.kernels.device.jit import entry
from tilestream.kernels.device.queues import pick_victim_of_block
from tilestream.kernels.device.schedule import add, cdiv
from tilestream.kernels.device.trace import end_span
from tilestream.kernels.portable.epilogue import addresses, halves, store_halves, store_tile
from tilestream.kernels.portable.gemm import no_steps, product


@triton.jit
def find_group(item, groups, loaded, valid, C: tl.constexpr):
    """``(item, span)``: the item in its group, whose number is its batch, and the group's rows or K.

    ``loaded``: of groups that arrive, `tiles_by_load`.
    """
    pm, k_end = item.pm, item.k_end
    if C.ARRIVES:
        span, pm = find_loaded(pm, loaded, tl.arange(0, C.LANES), groups, valid, C.BLOCK_M)
    elif C.ALONG == "rows":
        behind, ends = row_tiles(groups, tl.arange(0, C.LANES), C.BLOCK_M)
        span, pm = find_rows(pm, behind, ends, groups.extent, valid)
    else:
        span = k_of_group(item.batch, groups, valid)
        k_end = cdiv(span.end - span.begin, C.BLOCK_K)
    return Item(
        span.group, pm, item.pn, item.k_begin, k_end, item.part, item.parts, item.slot, item.place
    ), span  # fmt: skip


@triton.jit
def from_row(m, row):
    """A `Matrix` from a row on."""
    return Matrix(m.at + row.to(tl.int64) * m.row, m.batch, m.row, m.column)


@triton.jit
def from_column(m, column):
    """A `Matrix` from a column on."""
    return Matrix(m.at + column.to(tl.int64) * m.column, m.batch, m.row, m.column)


@triton.jit
def group_product(x, y, item, span, m, n, k, scales, C: tl.constexpr):
    """The product of an item in its group; ``scales``: of blocks, `Matrix` of A's rows and of B; else None."""
    if C.ALONG == "rows":
        if C.SCALES == "block":
            scales = (from_row(scales[0], span.begin), scales[1])
        acc = product(from_row(x, span.begin), y, item, span.end - span.begin, n, k, scales, C)
    else:
        acc = product(
            from_column(x, span.begin), from_row(y, span.begin), item, m, n, span.end - span.begin, None, C
        )  # fmt: skip
    return acc


@triton.jit
def clear_rows(out, first, rows, columns, worker, workers, C: tl.constexpr):
    """Store zeros in rows [first, rows) of the output, which belong to no group."""
    across = cdiv(columns, C.STRIP)
    for t in range(worker, cdiv(rows - first, C.BLOCK_M) * across, workers):
        i = first + t // across * C.BLOCK_M + tl.arange(0, C.BLOCK_M)
        j = t % across * C.STRIP + tl.arange(0, C.STRIP)
        inside = (i < rows)[:, None] & (j < columns)[None, :]
        region = Region(tl.cast(0, tl.int32), 0, 0, i.to(tl.int64), j.to(tl.int64), inside)
        TILE: tl.constexpr = (C.BLOCK_M, C.STRIP)
        tl.store(addresses(out, region), tl.zeros(TILE, out.at.dtype.element_ty), mask=inside)


@entry(
    triton.jit,
    specialised=(
        "m", "n", "k", "stride_am", "stride_ak", "stride_bb", "stride_bk", "stride_bn", "stride_ob", "stride_or",
        "stride_oc",
    ),
    unaligned=("row_scale", "column_scale", "offsets"),
)  # fmt: skip
def grouped_gemm(
    a, b, offsets, out, bias, row_scale, column_scale, counters, log,
    base: tl.int64, reset, num_groups, m, n, k, stride_am, stride_ak, stride_bb, stride_bk, stride_bn, stride_ob,
    stride_or, stride_oc, stride_bias_batch, stride_bias, stride_sb, stride_sr, stride_sk, stride_tb, stride_tc,
    stride_tk,
    batches, num_m, num_n, k_steps, full_tiles, shares, units, queues, group, first, band, first_batch, capacity,
    column_signals, column_quarantine, records, claims, column_epoch, column_key, allowed: tl.int64, op,
    C: tl.constexpr,
):  # fmt: skip
    """``out = activation(row_scale * column_scale * a @ b + bias)``, group by group, one program a worker.

    Parameters
    ----------
    a, b, out
        ``ALONG = "rows"``: ``[m, k]``, ``[num_groups, k, n]``, ``[m, n]``. ``"k"``: ``[m, k]``, ``[k, n]``,
        ``[num_groups, m, n]``. Any strides.
    offsets
        int32 ``[num_groups]``: where each group ends.
    bias, row_scale, column_scale
        Vectors a group; where the groups divide the rows, what goes along rows is one vector. Scales of blocks:
        matrices, ``[m, blocks of k]`` and, a group, ``[blocks of k, blocks of columns]``.
    n
        The output's columns: of two halves, those of one.
    C
        A `tilestream.kernels.config.PortableGroupedConfig`.

    The others are fields of `tilestream.core.structs`, as they are grouped here.
    """
    worker, workers = tl.program_id(0), tl.num_programs(0)
    groups = Groups(offsets, num_groups, m if C.ALONG == "rows" else k)
    words = Words(counters, base, reset, log, capacity, None, None)
    x, y = Matrix(a, 0, stride_am, stride_ak), Matrix(b, stride_bb, stride_bk, stride_bn)
    place = Matrix(out, stride_ob, stride_or, stride_oc)
    if C.ALONG == "rows":
        num_m, last, valid = count_rows(groups, tl.arange(0, C.LANES), C.BLOCK_M)
        full_tiles = num_m * num_n
        clear_rows(place, last, m, n, worker, workers, C)
    else:
        first_batch, valid = find_longest(groups, tl.arange(0, C.LANES))
    work = Work(
        batches, num_m, num_n, k_steps, full_tiles, shares, units, queues, None, group, first, band, first_batch
    )  # fmt: skip
    if C.ARRIVES:
        everything = Incoming(None, None, None, 1, 0, 0, 1, 0, 0)
        coming = Incoming(column_signals, column_quarantine, None, column_epoch, column_key, num_groups, 1, 0, 0)
        gate = Gate(everything, coming, None, 0, 0, records, claims, op, allowed)
        loaded = tiles_by_load(groups, tl.arange(0, C.LANES), C.BLOCK_M)
    else:
        gate: tl.constexpr = None
        loaded: tl.constexpr = None
    progress, watch = begin_worker(worker, workers, work, words, gate, C)
    cursor, ready, passed = progress
    found = tl.cast(1, tl.int32)
    while found != 0:
        found, item, progress = next_item(
            Progress(cursor, ready, passed), work, words, gate, watch, C, add, pick_victim_of_block, no_steps
        )  # fmt: skip
        cursor, ready, passed = progress
        if found != 0:
            tile = item.pm * num_n + item.pn
            item, span = find_group(item, groups, loaded, valid, C)
            right = valid
            if C.ARRIVES:
                if valid != 0:
                    passed = pass_group(item, tile, passed, words, gate, watch)
                item, over = no_steps(item, passed.over)
                right = tl.where(over != 0, 0, valid)
            if C.SCALES == "block":
                scales = (
                    Matrix(row_scale, 0, stride_sr, stride_sk),
                    Matrix(column_scale, stride_tb, stride_tk, stride_tc),
                )
            else:
                scales: tl.constexpr = None
            acc = group_product(x, y, item, span, m, n, k, scales, C)
            acc = tl.where(right != 0, acc, float("nan"))
            row, end = item.pm * C.BLOCK_M, m
            if C.ALONG == "rows":
                row, end = span.begin + row, span.end
            epilogue = Epilogue(
                place, Matrix(None, 0, 0, 0), Vector(bias, stride_bias_batch, stride_bias),
                Vector(row_scale, stride_sb, stride_sr), Vector(column_scale, stride_tb, stride_tc),
                1.0, 1.0, end, n, None, None,
            )  # fmt: skip
            if C.TWO_HALVES:
                HALF: tl.constexpr = C.BLOCK_N // 2
                low, high = halves(acc, C.BLOCK_N, C)
                store_halves(low, high, epilogue, item.batch, row, item.pn * HALF, HALF, C)
            else:
                store_tile(acc, epilogue, item.batch, row, item.pn * C.BLOCK_N, C.BLOCK_N, C)
            if C.TRACE:
                tl.debug_barrier()  # all threads' stores
                end_span(words.log, item.place, 0, right != 0)
    finish_worker(passed, work, words, gate, watch, C)
