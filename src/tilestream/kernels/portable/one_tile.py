"""GEMM in Triton for small problems: a program a tile, or a share of a tile's K, without queues.

::

    static:    acc = 0;  for step in K: acc += A[rows, step] @ B[step, columns];  out[tile] = epilogue(acc)
    stream_k:  the share of this program, as `tilestream.core.stream_k` cuts all tiles:
               whole tile: as above;  part of a tile: slot = acc; count; the last to count finishes the tile
    clusters:  stream_k with as many parts of each tile as a cluster may have CTAs (`C.CLUSTER`): see
               `tilestream.kernels.portable.cluster`

A persistent worker asks a schedule for its items, and a warp-specialised one starts two loops. Of a product that takes
5 us this is a fifth. Here the position in the grid is the tile or the share, so the first loads begin at once. There is
no gate and no trace: `tilestream.kernels.portable.gemm` does the same plan where a trace is wanted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.core.structs import Epilogue, Item, Matrix, Vector
from tilestream.kernels.device.jit import entry
from tilestream.kernels.device.schedule import count_in, part_begin, part_of, part_size, row_major, share_part, slot_of
from tilestream.kernels.portable import cluster
from tilestream.kernels.portable.epilogue import store_partial, store_tile
from tilestream.kernels.portable.gemm import as_they_lie


@triton.jit
def tile_product(a, b, item, m, n, k, C: tl.constexpr):
    """The item's K steps of its tile: float32 ``[BLOCK_M, BLOCK_N]``.

    ``a`` and ``b`` are `Matrix`: ``[m, k]`` and ``[k, n]`` a batch. Rows and columns past the end are masked: to wrap
    them around takes a division, which the first load would wait for.
    """
    a, b, m, n, k_of_a, k_of_b = as_they_lie(a, b, m, n, k, C)
    rows = item.pm * C.BLOCK_M + tl.arange(0, C.BLOCK_M)
    cols = item.pn * C.BLOCK_N + tl.arange(0, C.BLOCK_N)
    step = tl.arange(0, C.BLOCK_K)
    has_row, has_column = rows[:, None] < m, cols[None, :] < n
    depth = item.k_begin * C.BLOCK_K + step
    if C.OFFSETS_64BIT:
        rows = rows.to(tl.int64)
        cols = cols.to(tl.int64)
        depth = depth.to(tl.int64)
    at_a = a.at + item.batch.to(tl.int64) * a.batch + rows[:, None] * a.row + depth[None, :] * a.column
    at_b = b.at + item.batch.to(tl.int64) * b.batch + depth[:, None] * b.row + cols[None, :] * b.column
    TILE: tl.constexpr = (C.BLOCK_M, C.BLOCK_N)
    acc = tl.zeros(TILE, tl.float32)
    for i in range(item.k_begin, item.k_end):
        if C.EVEN_K:
            x = tl.load(at_a, mask=has_row, other=0.0)
            y = tl.load(at_b, mask=has_column, other=0.0)
        else:
            passed = i * C.BLOCK_K
            x = tl.load(at_a, mask=has_row & (step[None, :] < k_of_a - passed), other=0.0)
            y = tl.load(at_b, mask=has_column & (step[:, None] < k_of_b - passed), other=0.0)
        acc = tl.dot(x, y, acc, input_precision=C.PRECISION, max_num_imprecise_acc=C.IMPRECISE)
        if C.OFFSETS_64BIT:  # a K step may be as wide, too
            at_a += tl.cast(a.column, tl.int64) * C.BLOCK_K
            at_b += tl.cast(b.row, tl.int64) * C.BLOCK_K
        else:
            at_a += C.BLOCK_K * a.column
            at_b += C.BLOCK_K * b.row
    return acc


@triton.jit
def reduced(at, parts, C: tl.constexpr):
    """A strip of a tile's ``parts`` partial results, added in K order.

    Loads bypass the first-level cache, which may be stale. Several are in flight, because L2's latency is long: as many
    as fit a thread's registers.
    """
    SIZE: tl.constexpr = C.BLOCK_M * C.BLOCK_N
    STRIP: tl.constexpr = C.STRIP
    TOGETHER: tl.constexpr = 8 if C.BLOCK_M * C.STRIP <= 2048 else 4
    at = at + tl.arange(0, C.BLOCK_M)[:, None] * STRIP + tl.arange(0, STRIP)[None, :]
    acc = tl.load(at, cache_modifier=".cg")
    for first in range(1, parts, TOGETHER):
        others = ()
        for i in tl.static_range(TOGETHER):
            others = others + (tl.load(at + (first + i) * SIZE, first + i < parts, 0.0, cache_modifier=".cg"),)
        for i in tl.static_range(TOGETHER):
            acc = tl.where(first + i < parts, acc + others[i], acc)
    return acc


@triton.jit
def finish_part(acc, partials, counts, item, epilogue, C: tl.constexpr):
    """Store a part of a tile and count it. The last to be counted adds the parts up, and finishes the tile."""
    SIZE: tl.constexpr = C.BLOCK_M * C.BLOCK_N
    store_partial(acc, partials + item.slot.to(tl.int64) * SIZE, C.BLOCK_M, C.BLOCK_N, C.STRIP)
    if count_in(counts + item.slot - item.part, item.parts):
        first = partials + (item.slot - item.part).to(tl.int64) * SIZE
        for strip in range(C.BLOCK_N // C.STRIP):
            x = reduced(first + strip * C.BLOCK_M * C.STRIP, item.parts, C)
            row, column = item.pm * C.BLOCK_M, item.pn * C.BLOCK_N + strip * C.STRIP
            store_tile(x, epilogue, item.batch, row, column, C.STRIP, C)


@triton.jit
def share_item(share, unit, unit_end, k_steps, shares, units, num_m, num_n):
    """The `Item` of a share that has done its units up to ``unit``."""
    tile, k_begin, k_end = share_part(unit, unit_end, k_steps)
    first = part_of(units, shares, tile * k_steps)
    parts = part_of(units, shares, (tile + 1) * k_steps - 1) - first + 1
    pm, pn = row_major(tile % (num_m * num_n), num_m, num_n)
    return Item(tile // (num_m * num_n), pm, pn, k_begin, k_end, share - first, parts, slot_of(share, tile), 0)


@entry(
    triton.jit,
    first="m",
    specialised=(
        "m", "n", "k", "stride_ab", "stride_am", "stride_ak", "stride_bb", "stride_bk", "stride_bn", "stride_ob",
        "stride_or", "stride_oc", "stride_rb", "stride_rr", "stride_rc",
    ),
    unaligned=("row_scale", "column_scale"),
)  # fmt: skip
def one_tile(
    a, b, out, bias, residual, row_scale, column_scale, partials, counts,
    m, n, k, stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn, stride_ob, stride_or, stride_oc,
    stride_bias, stride_rb, stride_rr, stride_rc, stride_sb, stride_sr, stride_tb, stride_tc, alpha, beta,
    num_m, num_n, k_steps, shares, units, C: tl.constexpr,
):  # fmt: skip
    """``out = activation(alpha * row_scale * column_scale * a @ b + bias + beta * residual)``.

    The grid is (column tiles, row tiles, batches), or (shares,), a tile's in a cluster or not. The parameters are those
    of `tilestream.kernels.portable.gemm.gemm`.
    """
    x, y = Matrix(a, stride_ab, stride_am, stride_ak), Matrix(b, stride_bb, stride_bk, stride_bn)
    epilogue = Epilogue(
        Matrix(out, stride_ob, stride_or, stride_oc), Matrix(residual, stride_rb, stride_rr, stride_rc),
        Vector(bias, 0, stride_bias), Vector(row_scale, stride_sb, stride_sr),
        Vector(column_scale, stride_tb, stride_tc),
        alpha, beta, m, n, None, None,
    )  # fmt: skip
    if C.CLUSTER > 1:
        cluster.announce()
        tile, part = tl.program_id(0) // C.CLUSTER, tl.program_id(0) % C.CLUSTER
        steps = k_steps // C.CLUSTER
        batch = tile // (num_m * num_n)
        pm, pn = row_major(tile % (num_m * num_n), num_m, num_n)
        begin = part * steps
        acc = tile_product(x, y, Item(batch, pm, pn, begin, begin + steps, part, C.CLUSTER, 0, 0), m, n, k, C)
        acc = cluster.summed(acc, part, C)
        row = pm * C.BLOCK_M + part * (C.BLOCK_M // C.CLUSTER)
        store_tile(acc, epilogue, batch, row, pn * C.BLOCK_N, C.BLOCK_N, C)
    elif C.KIND == "stream_k":
        share = tl.program_id(0)
        unit = part_begin(units, shares, share)
        unit_end = unit + part_size(units, shares, share)
        while unit < unit_end:
            item = share_item(share, unit, unit_end, k_steps, shares, units, num_m, num_n)
            unit += item.k_end - item.k_begin
            acc = tile_product(x, y, item, m, n, k, C)
            if item.parts == 1:
                store_tile(acc, epilogue, item.batch, item.pm * C.BLOCK_M, item.pn * C.BLOCK_N, C.BLOCK_N, C)
            else:
                finish_part(acc, partials, counts, item, epilogue, C)
    else:
        pn, pm, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        acc = tile_product(x, y, Item(batch, pm, pn, 0, k_steps, 0, 1, 0, 0), m, n, k, C)
        store_tile(acc, epilogue, batch, pm * C.BLOCK_M, pn * C.BLOCK_N, C.BLOCK_N, C)
