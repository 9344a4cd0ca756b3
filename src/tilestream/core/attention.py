"""Attention's work items: which keys a query block sees, in blocks, and where an item of a varlen call lies.

A tile is a query block: consecutive query positions of ``pack`` query heads that share a K/V head, a row for each
position and head (`row_of`). Its work is a range of key blocks. Query position ``i`` of ``queries`` sees key ``j`` of
``keys`` if::

    i + shift - left <= j <= i + shift + right          causal: right = 0

``shift`` is ``keys - queries`` where the diagonal ends in the last corner (bottom-right, the default: the last query
sees the last key), and 0 where it begins in the first (top-left). It may be negative, and these functions know no such
numbers: it comes as ``ahead - behind``, of which one is 0 (`diagonal`). A side without a limit is ``queries + keys``
wide, which reaches over all keys from anywhere.

A tile's key blocks fall into three runs (`key_blocks`), so that only the blocks that some row sees in part are masked::

    begin       plain_begin        plain_end          end
      | window's edge |  plain        |  diagonal, tail |

Tiles are taken in the order of `tilestream.core.raster.longest_first`: rows are query blocks, columns are the heads
of all sequences, in groups whose K and V stay in L2 together.

Varlen: the lengths are on the device, so the device makes the list of what the raster needs, once a call: a sequence's
place in the list is the number of sequences that come before it (`comes_before`), the tiles before it are theirs. A
worker finds the sequence of a position by halving (`halved`), and the tile inside it by the raster.

Leaves in the sense of `tilestream.core.integers`, in 31 bits while ``2 * (queries + keys) + block`` is.
"""

from __future__ import annotations


def row_of(row: int, pack: int) -> tuple[int, int]:
    """``(position, head)`` of a tile's row, both counted from the tile's first: the heads of a position side by side.

    Few queries of many heads on one K/V head fill a tile's rows this way, and K and V are read once for all of them.
    """
    return row // pack, row % pack


def diagonal(queries: int, keys: int) -> tuple[int, int]:
    """``(ahead, behind)``: how far key positions are ahead of query positions, or behind, bottom-right.

    Top-left is ``(0, 0)``.
    """
    return keys - min(queries, keys), queries - min(queries, keys)


def seen_keys(position: int, ahead: int, behind: int, left: int, right: int, keys: int) -> tuple[int, int]:
    """The keys ``[begin, end)`` that a query position sees; none where ``begin == end``."""
    at = position + ahead
    past = at + right + 1
    end = min(keys, past - min(past, behind))
    begin = min(end, at - min(at, behind + left))
    return begin, end


def key_blocks(
    first: int, last: int, ahead: int, behind: int, left: int, right: int, keys: int, block: int
) -> tuple[int, int, int, int]:
    """The key blocks of query positions ``first`` to ``last``, both included, in three runs.

    Returns
    -------
    (begin, plain_begin, plain_end, end)
        Blocks ``[begin, end)`` hold every key that one of the positions sees. Of those in ``[plain_begin, plain_end)``
        each position sees all keys, and there are ``block`` of them.
    """
    at = first + ahead
    past = at + right + 1
    until_first = min(keys, past - min(past, behind))
    from_first = at - min(at, behind + left)
    at = last + ahead
    past = at + right + 1
    until_last = min(keys, past - min(past, behind))
    from_last = at - min(at, behind + left)
    from_first = min(from_first, until_last)
    begin = from_first // block
    end = (until_last + block - 1) // block
    if from_first == until_last:  # no position sees a key; that place may be inside a block
        end = begin
    plain_begin = min(end, max(begin, (from_last + block - 1) // block))
    plain_end = min(end, max(plain_begin, until_first // block))
    return begin, plain_begin, plain_end, end


def blocks_of_part(
    low: int, high: int, from_first: int, from_last: int, until_first: int, until_last: int, block: int
) -> tuple[int, int, int, int]:
    """Of a tile's key blocks ``[low, high)`` those of some of its rows, in three runs as of `key_blocks`.

    The first of them sees keys from ``from_first`` until ``until_first``, the last likewise; none where that is no
    range. One block at least, if the tile has one: rows that see none of its keys have it masked.
    """
    end = min(high, max(low + 1, (until_last + block - 1) // block))
    begin = max(low, min(from_first // block, end - 1))
    plain_begin = min(end, max(begin, (from_last + block - 1) // block))
    return begin, plain_begin, min(end, max(plain_begin, until_first // block)), end


def share_of_keys(
    begin: int, plain_begin: int, plain_end: int, end: int, shares: int, share: int
) -> tuple[int, int, int, int]:
    """One of ``shares`` nearly equal shares of a tile's key blocks, in the same three runs.

    For few queries over many keys: a tile's shares are work items of their own. Some are empty where there are more
    shares than blocks.
    """
    size = (end - begin) // shares
    rest = (end - begin) % shares
    low = begin + size * share + min(share, rest)
    high = low + size
    if share < rest:
        high = high + 1
    return low, min(high, max(low, plain_begin)), min(high, max(low, plain_end)), high


def comes_before(keys: int, sequence: int, other_keys: int, other: int) -> int:
    """Whether a sequence comes before another in a varlen call's list, 1 or 0: the longest first, ties in order.

    Without a branch, as is `row_of`: kernels call them with vectors.
    """
    return (keys > other_keys) * 1 + (keys == other_keys) * (sequence < other)


def halved(low: int, high: int, start: int, position: int) -> tuple[int, int]:
    """One step of the search for the place ``low`` in a list whose tiles hold ``position``.

    ``start`` is the first tile of place ``(low + high) // 2``, of the candidates ``[low, high)``. As many steps as the
    list's length has bits leave one candidate; a step more changes nothing. Places without tiles share their start with
    the place after them, and are never the answer.
    """
    middle = (low + high) // 2
    if start <= position:
        low = middle
    else:
        high = middle
    return low, high
