"""Operands that a `tilestream.Stream` brings: which candidate ends first behind the host's link.

The link is slower than most products of what it brings. Then the launch ends when the last chunk's tiles do, which
begin when that chunk is there: large tiles leave workers without one, and take long. So a slower candidate of smaller
tiles may end first. Where the product is slower than the link, its own time counts, from the first chunk on.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilestream.core.chunks import LINK_BYTES, Incoming
from tilestream.core.integers import cdiv
from tilestream.plan.candidate import Candidate
from tilestream.plan.problem import ITEMSIZE, Problem

#: The model is coarse: of candidates whose ends differ by less than this share, the fastest is taken.
WITHIN = 0.005
#: Seconds on the link below which the host's latencies decide, and not the tiles: 5.5 MB.
LEAST_SECONDS = 1e-4


def linked(problem: Problem) -> Incoming | None:
    """The operand that a stream brings; None if none is, or both are, or if it is small."""
    both = problem.rows, problem.columns
    found = [incoming for incoming in both if incoming is not None]
    if len(found) != 1 or not found[0].linked:
        return None
    return found[0] if found[0].chunks.rows * _row_seconds(problem) >= LEAST_SECONDS else None


def _row_seconds(problem: Problem) -> float:
    return problem.k * ITEMSIZE[problem.dtype] / LINK_BYTES


def first_to_end(problem: Problem, incoming: Incoming, ranking: Sequence[Candidate]) -> list[Candidate]:
    """Those of ranked candidates, in their order, that end first if ``incoming`` comes at the link's speed."""
    seconds = [_end(problem, incoming, candidate) for candidate in ranking]
    most = (1 + WITHIN) * min(seconds)
    return [candidate for candidate, end in zip(ranking, seconds, strict=True) if end <= most]


def _end(problem: Problem, incoming: Incoming, candidate: Candidate) -> float:
    """Seconds from the first copy to the end of the launch."""
    chunks, pivot = incoming.chunks, incoming.pivot
    row = _row_seconds(problem)
    first, last_rows = (high - low for low, high in map(chunks.range_of, (pivot, (pivot - 1) % chunks.count)))
    grid = candidate.schedule.grid
    is_rows = incoming is problem.rows
    side, extent = (candidate.block[0], grid.num_m) if is_rows else (candidate.block[1], grid.num_n)
    last = cdiv(last_rows, side) * (candidate.tiles // max(extent, 1))
    item = candidate.predicted / max(candidate.tiles / candidate.workers, 1.0)
    return max(first * row + candidate.predicted, chunks.rows * row + cdiv(last, candidate.workers) * item)
