"""Attention's work items: the key blocks that a query block sees, and the place of an item of a varlen call.

A tile is a query block: consecutive query positions of ``pack`` query heads that share a K/V head, with one row for
each position and head (`row_of`). Its work is a range of key blocks. Query position ``i`` of ``queries`` sees key ``j``
of ``keys`` if::

    i + shift - left <= j <= i + shift + right          causal: right = 0

``shift`` is ``keys - queries`` for a bottom-right diagonal (the default: the last query sees the last key) and 0 for a
top-left one. These functions take no negative numbers, so ``shift`` is passed as ``diagonal_k - diagonal_q``, one of
which is 0 (`diagonal`). A side without a limit is ``queries + keys`` wide, which covers all keys from every position.

A tile's key blocks form three runs (`key_blocks`). Only blocks that some row sees in part are masked::

    begin       plain_begin        plain_end          end
      | window's edge |  plain        |  diagonal, tail |

Tiles are taken in the order of `tilestream.core.raster.longest_first`: rows are query blocks, columns are the heads
of all sequences, in groups whose K and V stay in L2 together.

Varlen: the lengths are on the device, so the device makes a list of the sequences once a call. A sequence's place in
the list is the number of sequences that come before it (`comes_before`), and its first tile follows theirs. A worker
finds the sequence of a position by bisection (`halved`), and the tile inside it by the raster.

The functions are leaves in the sense of `tilestream.core.integers`. They stay in 31 bits if ``2 * (queries + keys) +
block`` does.
"""

from __future__ import annotations


def row_of(row: int, pack: int) -> tuple[int, int]:
    """``(position, head)`` of a tile's row, both counted from the tile's first. The heads of a position are neighbours.

    This way few queries of many heads on one K/V head fill a tile, and K and V are read once for all of them.
    """
    return row // pack, row % pack


def diagonal(queries: int, keys: int) -> tuple[int, int]:
    """``(diagonal_k, diagonal_q)`` of a bottom-right diagonal: how far keys are ahead of, or behind, query positions.

    For a top-left diagonal it is ``(0, 0)``.
    """
    return keys - min(queries, keys), queries - min(queries, keys)


def seen_keys(position: int, diagonal_k: int, diagonal_q: int, left: int, right: int, keys: int) -> tuple[int, int]:
    """The keys ``[begin, end)`` that a query position sees; none if ``begin == end``."""
    at = position + diagonal_k
    past = at + right + 1
    end = min(keys, past - min(past, diagonal_q))
    begin = min(end, at - min(at, diagonal_q + left))
    return begin, end


def key_blocks(
    first: int, last: int, diagonal_k: int, diagonal_q: int, left: int, right: int, keys: int, block: int
) -> tuple[int, int, int, int]:
    """The key blocks of query positions ``first`` to ``last``, both included, in three runs.

    Returns
    -------
    (begin, plain_begin, plain_end, end)
        Blocks ``[begin, end)`` hold all keys that some position sees. Each position sees all ``block`` keys of each
        block in ``[plain_begin, plain_end)``.
    """
    at = first + diagonal_k
    past = at + right + 1
    until_first = min(keys, past - min(past, diagonal_q))
    from_first = at - min(at, diagonal_q + left)
    at = last + diagonal_k
    past = at + right + 1
    until_last = min(keys, past - min(past, diagonal_q))
    from_last = at - min(at, diagonal_q + left)
    from_first = min(from_first, until_last)
    begin = from_first // block
    end = (until_last + block - 1) // block
    if from_first == until_last:  # no position sees a key; both may be inside a block
        end = begin
    plain_begin = min(end, max(begin, (from_last + block - 1) // block))
    plain_end = min(end, max(plain_begin, until_first // block))
    return begin, plain_begin, plain_end, end


def blocks_of_part(
    low: int, high: int, from_first: int, from_last: int, until_first: int, until_last: int, block: int
) -> tuple[int, int, int, int]:
    """Those of a tile's key blocks ``[low, high)`` that some of its rows see, in three runs as of `key_blocks`.

    The first of these rows sees keys from ``from_first`` to ``until_first``, the last likewise; an empty range means no
    keys. There is at least one block if the tile has one; it is masked for rows that see none of its keys.
    """
    end = min(high, max(low + 1, (until_last + block - 1) // block))
    begin = max(low, min(from_first // block, end - 1))
    plain_begin = min(end, max(begin, (from_last + block - 1) // block))
    return begin, plain_begin, min(end, max(plain_begin, until_first // block)), end


def share_of_keys(
    begin: int, plain_begin: int, plain_end: int, end: int, shares: int, share: int
) -> tuple[int, int, int, int]:
    """One of ``shares`` nearly equal shares of a tile's key blocks, in the same three runs.

    For few queries over many keys each share is a work item. If there are more shares than blocks, some are empty.
    """
    size = (end - begin) // shares
    rest = (end - begin) % shares
    low = begin + size * share + min(share, rest)
    high = low + size
    if share < rest:
        high = high + 1
    return low, min(high, max(low, plain_begin)), min(high, max(low, plain_end)), high


def late_bound(begin: int, end: int, now: int, step: int, place: int, places: int) -> int:
    """The key block where a share of a tile's keys begins, or ends, if keys arrive.

    A share's items are taken one after the other, while more keys come. So the tile at a later ``place`` of ``places``
    has more keys in the share: between ``now`` and ``now + step`` 256ths of its key blocks [begin, end) lie before the
    bound.
    """
    at = now + step * place // places
    blocks = end - begin
    return begin + blocks // 256 * at + blocks % 256 * at // 256


def comes_before(keys: int, sequence: int, other_keys: int, other: int) -> int:
    """1 if a sequence comes before another in a varlen call's list, else 0: the longest first, ties in order.

    It has no branch, since kernels call it with vectors; so does `row_of`.
    """
    return (keys > other_keys) * 1 + (keys == other_keys) * (sequence < other)


def halved(low: int, high: int, start: int, position: int) -> tuple[int, int]:
    """One step of the search for the place ``low`` in a list whose tiles hold ``position``.

    ``start`` is the first tile of place ``(low + high) // 2`` among the candidates ``[low, high)``. After as many steps
    as the list's length has bits one candidate is left; a further step changes nothing. A place without tiles has the
    start of the next place, and is never the result.
    """
    middle = (low + high) // 2
    if start <= position:
        low = middle
    else:
        high = middle
    return low, high
