"""The size of attention's groups of heads. L2 keeps a group's keys, and the last group's workers should end together.

Under a causal mask a head's tiles differ in length. Heads are taken in groups, with a group's longest tiles first. So a
group's last tiles are short, and its workers end together if each has several tiles. The last group has the remaining
heads; if these are few, each worker has one tile, and the launch waits for the longest. 32 heads of 64 tiles in groups
of 5 leave 2 heads, which costs 5 % of the time; with 32 tiles, half as long, 13 %. With groups of 4 no worker idles.
This holds for dynamic schedules; a static grid is limited by other effects.

A model of the queue finds the sizes that end evenly. For sizes timed on an H100 and an H200 with 512 to 4k keys
(``benchmarks/results/h100/attention_sizes.json``) it ranks losses of 4 % and more correctly, except those of groups
that crowd L2 (on an H100 from 16 MB on), which the caller gives. Powers of two are always tried: most of those between
8 and 17 MB were within 2 % of the fastest.
"""

from __future__ import annotations

import heapq

from tilestream.core.attention import diagonal, key_blocks
from tilestream.core.integers import cdiv
from tilestream.core.schedule import Kind
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.problem import ITEMSIZE

#: The share of a launch that a smaller group must save; the most sizes tried in addition to powers of two; the number
#: of last tiles of each worker that the model follows; the tiles of a worker above which an uneven end is negligible.
_LITTLE, _SIZES, _FOLLOWED, _CERTAIN = 0.01, 6, 24, 200


def heads_kept(problem: AttentionProblem, pack: int, room: float) -> int:
    """The number of the grid's columns, of ``pack`` query heads each, whose keys and values fit into ``room`` bytes.

    It is at least the number of columns that share one head of keys.
    """
    bytes_of_head = max(1, problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * ITEMSIZE[problem.dtype])
    return max(1, int(room // bytes_of_head)) * _sharing(problem, pack)


def heads_together(
    problem: AttentionProblem, kind: Kind, rows: int, pack: int, room: float, workers: int, block: int, beside: float,
    crowding: float = 0.0,
) -> int:  # fmt: skip
    """The number of columns of a group, for tiles of ``rows`` and ``pack`` query heads: `heads_kept`, or down to half.

    It is `heads_kept` for static grids, for tiles of equal length, and for sequences whose lengths the host does not
    know. In these cases half the room counts if groups can be crowded.

    Parameters
    ----------
    room
        The bytes of L2 for keys and values.
    block, beside
        The keys of a block; the fixed cost of a tile, in units of a block's cost.
    crowding
        The share of a launch that is lost if a group's keys take all of the room instead of at most half. With 0 the
        group becomes smaller only for a gain of more than `_LITTLE`.
    """
    positions, heads = rows // pack, problem.batch * problem.heads_q // pack
    kept = heads_kept(problem, pack, room)
    most = min(kept, heads)
    tiles = cdiv(problem.seqlen_q, positions) * heads
    unknown = problem.varlen or problem.lengths
    if kind != "dynamic" or problem.alike or unknown or not workers < tiles <= _CERTAIN * workers:
        return min(heads_kept(problem, pack, room / 2), heads) if crowding else most
    sizes = _sizes(most, _sharing(problem, pack))
    if len(sizes) < 2:
        return most
    costs = [blocks + beside for blocks in _blocks(problem, positions, block)]
    whole = heads * sum(costs) / workers
    best, least = most, float("inf")
    # The model takes up to some milliseconds for a size. Crowded sizes are last, as crowding alone may exclude them.
    for group in reversed(sizes) if crowding else sizes:
        crowded = crowding * max(0.0, 2 * group / kept - 1)
        if crowded > least if crowding else least < _LITTLE:
            break
        lost = _lost(costs, heads, group, workers) / whole + crowded
        if lost <= least if crowding else lost < least - _LITTLE:
            best, least = group, lost
    return best


def _sizes(most: int, unit: int) -> list[int]:
    """The sizes to try, the largest first: multiples of ``unit`` from ``most`` to its half, and powers of two."""
    units = most // unit
    power = 1 << units.bit_length() - 1
    found = {*range(units, units // 2, -cdiv(units, 2 * _SIZES)), power, power // 2}
    return sorted((unit * size for size in found if units <= 2 * size), reverse=True)


def _sharing(problem: AttentionProblem, pack: int) -> int:
    """The number of columns that share keys and values."""
    return max(1, problem.ratio // pack)


def _blocks(problem: AttentionProblem, positions: int, block: int) -> list[int]:
    """The number of key blocks of each tile of a head, in the order of queries."""
    queries, keys = problem.seqlen_q, problem.seqlen_k
    diagonal_k, diagonal_q = diagonal(queries, keys) if problem.alignment == "bottom_right" else (0, 0)
    found = []
    for first in range(0, queries, positions):
        last = min(first + positions, queries) - 1
        begin, _, _, end = key_blocks(
            first, last, diagonal_k, diagonal_q, queries + keys, min(problem.right or 0, queries + keys), keys, block
        )
        found.append(end - begin)
    return found


def _lost(costs: list[float], heads: int, group: int, workers: int) -> float:
    """The time from the workers' average end to the last worker's, if each takes the next tile when it is free.

    Only the last tiles are simulated: the workers end those before at about the same time.
    """
    skipped, per_group = max(0, len(costs) * heads - _FOLLOWED * workers), len(costs) * group
    begin = skipped // per_group * group
    # As `tilestream.core.raster.longest_first` has them, without its arithmetic for each.
    followed = [
        cost
        for first in range(begin, heads, group)
        for cost in reversed(costs)
        for _ in range(min(group, heads - first))
    ]
    until = [0.0] * workers
    for cost in followed[skipped % per_group :]:
        heapq.heapreplace(until, until[0] + cost)
    return max(until) - sum(until) / workers
