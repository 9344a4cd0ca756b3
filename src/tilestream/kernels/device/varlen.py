"""The list of a packed call's sequences, longest first. The device makes it, since the lengths are there.

::

    place   starts           order
    0       0                the sequence with the most keys
    1       its tiles        the next
    ...
    n       all tiles

As `tilestream.core.attention` says, a sequence's place is the number of sequences that come before it, and its start is
the number of their tiles. The last "sequence" is the rows of queries past the last one, which see no key.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.core import attention
from tilestream.kernels.device.jit import device
from tilestream.kernels.device.schedule import cdiv

comes_before = device(attention.comes_before)
halved = device(attention.halved)

#: Sequences that a program of `list_sequences` places, and sequences that it compares them with at a time.
PLACED: tl.constexpr = tl.constexpr(64)
COMPARED: tl.constexpr = tl.constexpr(64)


@triton.jit
def rows_of(cumulative, sequence, sequences, rows):
    """``(first, count)``: the rows of a sequence, or those past the last one; always within ``rows`` rows."""
    first = tl.minimum(tl.maximum(tl.load(cumulative + sequence), 0), rows)
    end = rows
    if sequence < sequences - 1:
        end = tl.minimum(tl.maximum(tl.load(cumulative + sequence + 1), first), rows)
    return first, end - first


@triton.jit
def tiles_and_keys(
    sequence, cu_seqlens_q, cu_seqlens_k, seqlens_k, sequences, tokens_q, tokens_k, seqlen_k, head_tiles,
    POSITIONS: tl.constexpr,
):  # fmt: skip
    """``(tiles, keys)`` of some sequences; 0 and 0 for sequences that do not exist."""
    there = sequence < sequences
    last = sequence == sequences - 1
    real = there & (last == 0)
    first = tl.minimum(tl.maximum(tl.load(cu_seqlens_q + sequence, mask=there, other=0), 0), tokens_q)
    end = tl.load(cu_seqlens_q + sequence + 1, mask=real, other=0)
    end = tl.minimum(tl.maximum(tl.where(last, tokens_q, end), first), tokens_q)
    length = tl.where(real, seqlen_k, 0)
    if cu_seqlens_k is not None:
        first_k = tl.minimum(tl.maximum(tl.load(cu_seqlens_k + sequence, mask=real, other=0), 0), tokens_k)
        end_k = tl.load(cu_seqlens_k + sequence + 1, mask=real, other=0)
        length = tl.minimum(tl.maximum(end_k, first_k), tokens_k) - first_k
    if seqlens_k is not None:
        length = tl.minimum(tl.maximum(tl.load(seqlens_k + sequence, mask=real, other=0), 0), length)
    return tl.where(there, cdiv(end - first, POSITIONS) * head_tiles, 0), length


@triton.jit(
    do_not_specialize=("sequences", "tokens_q", "tokens_k", "seqlen_k", "head_tiles"),
    do_not_specialize_on_alignment=("cu_seqlens_q", "cu_seqlens_k", "seqlens_k"),
)
def list_sequences(
    cu_seqlens_q, cu_seqlens_k, seqlens_k, starts, order, sequences, tokens_q, tokens_k, seqlen_k, head_tiles,
    POSITIONS: tl.constexpr,
):  # fmt: skip
    """Make the list.

    Parameters
    ----------
    cu_seqlens_q, cu_seqlens_k, seqlens_k
        As in `tilestream.core.attention_structs.Extents`; the last two may be None.
    starts, order
        int32, of ``sequences + 1`` and ``sequences`` elements.
    sequences
        One more than the call's.
    tokens_q, tokens_k
        Rows of the tensors.
    seqlen_k
        The largest number of keys of a sequence.
    head_tiles
        Tiles of a query block.
    POSITIONS
        Query positions of a tile.
    """
    mine = tl.program_id(0) * PLACED + tl.arange(0, PLACED)
    _, my_keys = tiles_and_keys(
        mine, cu_seqlens_q, cu_seqlens_k, seqlens_k, sequences, tokens_q, tokens_k, seqlen_k, head_tiles, POSITIONS
    )
    entry = tl.zeros([PLACED], tl.int32)
    start = tl.zeros([PLACED], tl.int32)
    total = tl.cast(0, tl.int32)
    for first in range(0, sequences, COMPARED):
        other = first + tl.arange(0, COMPARED)
        tiles, length = tiles_and_keys(
            other, cu_seqlens_q, cu_seqlens_k, seqlens_k, sequences, tokens_q, tokens_k, seqlen_k, head_tiles, POSITIONS
        )
        before = comes_before(length[None, :], other[None, :], my_keys[:, None], mine[:, None])
        before = tl.where((other < sequences)[None, :], before, 0)
        entry += tl.sum(before, 1)
        start += tl.sum(before * tiles[None, :], 1)
        total += tl.sum(tiles, 0)
    tl.store(starts + entry, start, mask=mine < sequences)
    tl.store(order + entry, mine, mask=mine < sequences)
    if tl.program_id(0) == 0:
        tl.store(starts + sequences, total)


@triton.jit
def place_of(position, starts, sequences):
    """The place whose tiles include ``position``: `tilestream.core.attention.halved`."""
    low = tl.cast(0, tl.int32)
    high = low + sequences
    while high - low > 1:
        low, high = halved(low, high, tl.load(starts + (low + high) // 2), position)
    return low
