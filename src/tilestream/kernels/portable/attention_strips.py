"""Attention of few queries over many keys, with the bits of the Hopper kernel's running softmax, on many workers.

Under `tilestream.invariant` a tile's keys are not split, because the sums of shares have other bits than one sum. But
only the sums of weighted values and of weights depend on the order of keys, and each column of V has a sum of its own::

    score_blocks    a program for each key block:    masked scores, and each row's maximum in the block
    weigh_blocks    a program for each key block:    the running maximum; weights, their sum, the factor of earlier sums
    chain_strips    a program for a strip of V:      for each key block, the last first: o = o * factor + weights V

The first is here, the others are in `tilestream.kernels.hopper.attention_strips`. A launch may begin before the one
before has ended, and waits for it first. Maxima are exact in any order, so each block finds its running maximum from
the other blocks' maxima. The third has the only loop over blocks. Its chain of multiplications is the lower bound of
the time: one of 16 keys after the other.

Each number is computed as in `tilestream.kernels.hopper.attention_math`: a score from its columns, in their order; the
weights by the same functions; a sum from its products, in the order of keys. Tensor cores give the same bits for each
shape of their instruction (``benchmarks/results/h100/invariance_alike.json``).

Scratch has a *tile's* (sequence's and head tile's) real rows: ``scores`` and ``weights`` ``[tiles, blocks, rows,
BLOCK]``, ``rescales`` and ``sums`` ``[tiles, blocks, rows]``, ``maxima`` ``[tiles, rows, blocks]``, ``tops`` ``[tiles,
rows]``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tilestream.core.attention_structs import Extents, Mask, Rows
from tilestream.core.structs import Item
from tilestream.kernels.device.attention_tile import locate_tile, sees
from tilestream.kernels.portable.attention import keys_of_tile, load_block, load_queries, rows_of_tile

#: Numbers that one compiled kernel serves, and pointers that need no alignment.
NUMBERS = (
    "sequences", "seqlen_q", "seqlen_k", "pages", "head_tiles", "q_heads_per_kv", "left", "right", "table_stride",
    "blocks", "lse_batch", "lse_row", "lse_head",
)  # fmt: skip
UNALIGNED = ("seqlens_k", "block_table", "sinks", "lse")


@triton.jit
def tile_of(number, extents, C: tl.constexpr):
    """The `Tile` of a sequence and head tile. It has all of the sequence's queries."""
    zero = tl.cast(0, tl.int32)
    item = Item(zero, zero, number, zero, zero, zero, zero, zero, zero)
    _, tile = locate_tile(tl.cast(1, tl.int32), item, extents, 1, C)
    return tile


@triton.jit
def place_of_block(number, block, blocks, tile, C: tl.constexpr):
    """The place of a block's first real row among all rows of scratch: 64 bits."""
    return (number.to(tl.int64) * blocks + block) * (tile.queries * C.PACK)


@triton.jit(do_not_specialize=NUMBERS[:-3], do_not_specialize_on_alignment=UNALIGNED[:2])
def score_blocks(
    q, k, seqlens_k, block_table, partials, maxima, sequences, seqlen_q, seqlen_k, pages, head_tiles, q_heads_per_kv,
    left, right, table_stride, blocks, stride_qb, stride_qr, stride_qh, stride_kb, stride_kr, stride_kh,
    C: tl.constexpr,
):  # fmt: skip
    """The masked scores of a tile's rows and a key block (``partials``), and their maxima.

    The grid is ``(blocks, tiles)``. The other parameters are fields of the structs of
    `tilestream.core.attention_structs`.
    """
    gdc_wait()
    gdc_launch_dependents()
    extents = Extents(
        None, None, sequences, None, None, seqlens_k, 0, 0, seqlen_q, seqlen_k, head_tiles, q_heads_per_kv, 1, left,
        right, 0, 0,
    )  # fmt: skip
    block, number = tl.program_id(0), tl.program_id(1)
    tile = tile_of(number, extents, C)
    if (block >= tile.begin) & (block < tile.end):
        row, position = rows_of_tile(tl.minimum(tile.first, 0), tile.first, C)
        real = position < tile.queries
        x = load_queries(Rows(q, stride_qb, stride_qr, stride_qh), tile, row, position, C)
        k_rows = Rows(k, stride_kb, stride_kr, stride_kh)
        keys = keys_of_tile(tile, k_rows, k_rows, (block_table, table_stride, pages), extents, C)
        start = block * C.BLOCK
        key = tl.arange(0, C.BLOCK)
        y = load_block(keys.k, start, keys, C.D, C.BLOCK_D, True, C)
        scores = tl.dot(x, tl.trans(y), input_precision=C.PRECISION)
        mask = Mask(position, tile.keys, tile.causal_offset_left, tile.causal_offset_right)
        scores = tl.where(sees(mask, start + key, C), scores, float("-inf"))
        place = place_of_block(number, block, blocks, tile, C) + row
        tl.store(partials + (place[:, None] * C.BLOCK + key[None, :]), scores, mask=real[:, None] & (key >= 0)[None, :])
        of_tile = number.to(tl.int64) * (tile.queries * C.PACK) + row
        tl.store(maxima + (of_tile * blocks + block), tl.max(scores, 1), mask=real)
