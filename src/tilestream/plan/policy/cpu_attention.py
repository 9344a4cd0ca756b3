"""The CPU's policy for attention: tiles of one query block and head on the workers, or all in the calling thread."""

from __future__ import annotations

from collections.abc import Iterator

from tilestream.core.device import DeviceProperties
from tilestream.core.integers import cdiv
from tilestream.core.schedule import Kind
from tilestream.plan.attention_plan import AttentionCandidate, schedule_of
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.policy.cpu import INLINE_SECONDS, START_SECONDS, WORKER_SECONDS

#: Query rows of a tile, and keys of a block: their scores, 256 KiB of float32, stay in a core's second-level cache.
BLOCK = (128, 512)
#: Share of the nominal peak that products and exponentials together reach.
EFFICIENCY = 0.2
#: Seconds of Python a block of keys, and a tile.
BLOCK_SECONDS, TILE_SECONDS = 60e-6, 60e-6
#: Heads that are taken together: what they share is in the third-level cache.
GROUP = 8


def candidates(
    problem: AttentionProblem, device: DeviceProperties, workers: int, *, kind: Kind, forced: bool
) -> Iterator[AttentionCandidate]:
    """Both ways; in the calling thread only where nothing arrives and no knob is forced."""
    schedule, alone = (schedule_of(problem, BLOCK[0], 1, GROUP, kind, count) for count in (workers, 1))
    tiles, rate = schedule.grid.tiles, device.peak(problem.dtype, 1) * EFFICIENCY
    blocks = tiles * (TILE_SECONDS + cdiv(max(problem.seqlen_k, 1), BLOCK[1]) * BLOCK_SECONDS)
    if problem.keys is None and not forced:
        together = device.peak(problem.dtype, workers) * EFFICIENCY
        yield AttentionCandidate("inline", BLOCK, alone, INLINE_SECONDS + (problem.operations / together + blocks))
    waves = cdiv(tiles, workers) / max(tiles, 1)
    shared = waves * (problem.operations / rate + blocks)
    yield AttentionCandidate("workers", BLOCK, schedule, START_SECONDS + WORKER_SECONDS * workers + shared)
