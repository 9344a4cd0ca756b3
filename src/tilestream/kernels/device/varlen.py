"""The list of a packed call's sequences, longest first, which the device makes of their lengths: nobody asks the host.

::

    place   starts           order
    0       0                the sequence with the most keys
    1       its tiles        the next
    ...
    n       all tiles

That is `tilestream.core.attention`: a sequence's place is the number of those that come before it, and the tiles
before it are theirs. The last sequence of all is none: it is the rows of queries that belong to no sequence, behind the
last one, which see no key.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.core import attention
from tilestream.kernels.device.jit import device
from tilestream.kernels.device.schedule import cdiv

comes_before = device(attention.comes_before)
halved = device(attention.halved)

#: Sequences that a program of `list_sequences` places, and how many it compares them with at a time.
PLACED: tl.constexpr = tl.constexpr(64)
COMPARED: tl.constexpr = tl.constexpr(64)


@triton.jit
def rows_of(cumulative, sequence, sequences, rows):
    """``(first, count)``: the rows of a sequence, or of what lies behind the last one; never outside ``rows`` rows."""
    first = tl.minimum(tl.maximum(tl.load(cumulative + sequence), 0), rows)
    end = rows
    if sequence < sequences - 1:
        end = tl.minimum(tl.maximum(tl.load(cumulative + sequence + 1), first), rows)
    return first, end - first


@triton.jit
def measured(sequence, cu_queries, cu_keys, lengths, sequences, rows_q, rows_k, keys, columns, POSITIONS: tl.constexpr):
    """``(tiles, keys)`` of some sequences; 0 and 0 of those that there are not."""
    there = sequence < sequences
    last = sequence == sequences - 1
    real = there & (last == 0)
    first = tl.minimum(tl.maximum(tl.load(cu_queries + sequence, mask=there, other=0), 0), rows_q)
    end = tl.load(cu_queries + sequence + 1, mask=real, other=0)
    end = tl.minimum(tl.maximum(tl.where(last, rows_q, end), first), rows_q)
    length = tl.where(real, keys, 0)
    if cu_keys is not None:
        first_k = tl.minimum(tl.maximum(tl.load(cu_keys + sequence, mask=real, other=0), 0), rows_k)
        end_k = tl.load(cu_keys + sequence + 1, mask=real, other=0)
        length = tl.minimum(tl.maximum(end_k, first_k), rows_k) - first_k
    if lengths is not None:
        length = tl.minimum(tl.maximum(tl.load(lengths + sequence, mask=real, other=0), 0), length)
    return tl.where(there, cdiv(end - first, POSITIONS) * columns, 0), length


@triton.jit(
    do_not_specialize=("sequences", "rows_q", "rows_k", "keys", "columns"),
    do_not_specialize_on_alignment=("cu_queries", "cu_keys", "lengths"),
)
def list_sequences(
    cu_queries, cu_keys, lengths, starts, order, sequences, rows_q, rows_k, keys, columns, POSITIONS: tl.constexpr
):
    """Make the list.

    Parameters
    ----------
    cu_queries, cu_keys, lengths
        As of `tilestream.launch.attention.Operands`; the last two, or one of them, may be None.
    starts, order
        int32, of ``sequences + 1`` and ``sequences`` elements.
    sequences
        One more than there are.
    rows_q, rows_k
        Of the tensors.
    keys
        What a sequence has at most.
    columns
        Tiles of a query block: heads, or packs of them.
    POSITIONS
        Query positions of a tile.
    """
    mine = tl.program_id(0) * PLACED + tl.arange(0, PLACED)
    _, my_keys = measured(mine, cu_queries, cu_keys, lengths, sequences, rows_q, rows_k, keys, columns, POSITIONS)
    entry = tl.zeros([PLACED], tl.int32)
    start = tl.zeros([PLACED], tl.int32)
    total = tl.cast(0, tl.int32)
    for first in range(0, sequences, COMPARED):
        other = first + tl.arange(0, COMPARED)
        tiles, length = measured(
            other, cu_queries, cu_keys, lengths, sequences, rows_q, rows_k, keys, columns, POSITIONS
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
    """The place whose tiles hold ``position``: `tilestream.core.attention.halved`."""
    low = tl.cast(0, tl.int32)
    high = low + sequences
    while high - low > 1:
        low, high = halved(low, high, tl.load(starts + (low + high) // 2), position)
    return low
