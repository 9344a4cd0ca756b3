"""The tile of attention at a position of the schedule: its sequence, its head, and the keys that it reads.

::

    position in the schedule --raster--> (pm, pn) = (query block, head tile of a sequence)
    packed queries:          the list of `tilestream.kernels.device.varlen` gives the query block's sequence
    keys:                    `tilestream.core.attention.key_blocks`, or one share of them if keys are split

All backends share it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.core import attention
from tilestream.core.attention_structs import Tile
from tilestream.kernels.device.jit import device
from tilestream.kernels.device.schedule import cdiv, longest_first
from tilestream.kernels.device.varlen import place_of, rows_of

diagonal = device(attention.diagonal)
share_of_keys = device(attention.share_of_keys)
key_blocks = device(attention.key_blocks)
late_bound = device(attention.late_bound)


@triton.jit
def late_bounds(begin, end, share, place, places, C: tl.constexpr):
    """The key blocks ``[low, high)`` of a share of a tile's keys that arrive, by the bounds in ``C.LATE``."""
    zero = begin * 0
    now, step, then, more = zero, zero, zero, zero
    for i in tl.static_range(0, len(C.LATE) // 2 - 1):
        if share == i:
            now, step = zero + C.LATE[2 * i], zero + C.LATE[2 * i + 1]
            then, more = zero + C.LATE[2 * i + 2], zero + C.LATE[2 * i + 3]
    low = late_bound(begin, end, now, step, place, places)
    return low, late_bound(begin, end, then, more, place, places)


@triton.jit
def locate_tile(found, item, extents, group, C: tl.constexpr):
    """``(found, tile)``: an item's `Tile` of the call's `Extents`.

    ``found`` is 0 past the end of a packed call's list, whose length only the device knows. ``group`` is the number of
    head tiles of a group of `tilestream.core.raster.longest_first`.
    """
    block = item.pm
    queries, keys, left, right = extents.seqlen_q, extents.seqlen_k, extents.left, extents.right
    zero = tl.cast(0, tl.int32)
    origin_q, origin_k, origin_v, begin, plain_begin, plain_end, end = zero, zero, zero, zero, zero, zero, zero
    causal_offset_right, causal_offset_left, share = zero, zero, zero
    heads = extents.head_tiles
    if C.SPLIT_KEYS:
        columns = heads * extents.shares
    else:
        columns = heads
    batch = item.pn // columns
    head = item.pn % columns
    if extents.cu_seqlens_q is not None:
        if found != 0:
            # The number of tiles follows the list.
            found = (item.pm < tl.load(extents.starts + extents.sequences)).to(tl.int32)
        if found != 0:
            entry = place_of(item.pm, extents.starts, extents.sequences)
            batch = tl.load(extents.order + entry)
            origin_q, queries = rows_of(extents.cu_seqlens_q, batch, extents.sequences, extents.tokens_q)
            block, head = longest_first(
                item.pm - tl.load(extents.starts + entry),
                cdiv(queries, C.POSITIONS),
                columns,
                tl.minimum(group, columns),
            )
    if found != 0:
        origin_k = batch * extents.batch_rows_k
        origin_v = batch * extents.batch_rows_v
        if extents.cu_seqlens_q is not None and batch == extents.sequences - 1:
            keys = zero  # rows past the last sequence
        else:
            if extents.cu_seqlens_k is not None:
                origin_k, keys = rows_of(extents.cu_seqlens_k, batch, extents.sequences, extents.tokens_k)
                origin_v = origin_k
            if extents.seqlens_k is not None:
                keys = tl.minimum(tl.maximum(tl.load(extents.seqlens_k + batch), 0), keys)
        diagonal_k, diagonal_q = zero, zero
        if not C.TOP_LEFT:
            diagonal_k, diagonal_q = diagonal(queries, keys)
        if not C.LEFT:
            left = queries + keys
        if not C.RIGHT:
            right = queries + keys
        begin, plain_begin, plain_end, end = key_blocks(
            block * C.POSITIONS, tl.minimum((block + 1) * C.POSITIONS, queries) - 1, diagonal_k, diagonal_q, left,
            right, keys, C.BLOCK,
        )  # fmt: skip
        if C.SPLIT_KEYS:
            # A sequence's first keys come before its later ones, which may not have arrived.
            share = head // heads
            head = head % heads
            if len(C.LATE) > 0:
                # The tile's place among those of its share, in the raster's order.
                rows = cdiv(queries, C.POSITIONS)
                first = head // group * group
                place = first * rows + (rows - 1 - block) * tl.minimum(group, heads - first) + head - first
                low, high = late_bounds(begin, end, share, place, tl.maximum(1, heads * rows), C)
                begin, plain_begin, plain_end, end = (
                    low, tl.minimum(high, tl.maximum(low, plain_begin)), tl.minimum(high, tl.maximum(low, plain_end)),
                    high,
                )  # fmt: skip
            else:
                begin, plain_begin, plain_end, end = share_of_keys(
                    begin, plain_begin, plain_end, end, extents.shares, share
                )
        causal_offset_right = diagonal_k - diagonal_q + right + 1
        causal_offset_left = diagonal_k - diagonal_q - left
    return found, Tile(
        item.pm, item.pn, batch, head, share, block * C.POSITIONS, queries, keys, origin_q, origin_k, origin_v, begin,
        plain_begin, plain_end, end, causal_offset_left, causal_offset_right,
    )  # fmt: skip


@triton.jit
def emptied(tile, over):
    """The tile; without key blocks if the launch is ``over``."""
    end = tl.where(over != 0, tile.begin, tile.end)
    return Tile(
        tile.pm, tile.pn, tile.batch, tile.head, tile.share, tile.first, tile.queries, tile.keys, tile.origin_q,
        tile.origin_k, tile.origin_v, tile.begin, tile.plain_begin, tile.plain_end, end, tile.causal_offset_left,
        tile.causal_offset_right,
    )  # fmt: skip


@triton.jit
def seen_keys_of(tile, C: tl.constexpr):
    """``(low, high)``: the keys that some row of the tile sees; none if ``low >= high``."""
    low = tile.keys * 0
    high = tile.keys
    last = tl.minimum(tile.queries - tile.first, C.POSITIONS) - 1
    if C.RIGHT:
        high = tl.minimum(tile.keys, tile.first + last + tile.causal_offset_right)
    if C.LEFT:
        low = tl.maximum(tile.first + tile.causal_offset_left, 0)
    return low, high


@triton.jit
def sees(mask, key, C: tl.constexpr):
    """``[rows, keys]``: which rows of a `Mask` see which keys."""
    # Only a row's position stays in registers through a loop.
    seen = (key < mask.keys)[None, :]
    if C.RIGHT:
        seen = seen & ((key - mask.causal_offset_right)[None, :] < mask.position[:, None])
    if C.LEFT:
        seen = seen & ((key - mask.causal_offset_left)[None, :] >= mask.position[:, None])
    return seen
