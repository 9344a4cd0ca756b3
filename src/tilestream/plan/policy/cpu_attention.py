"""The CPU's policy for attention: tiles of one query block and head on the workers, or one call in the calling thread.

If torch's own CPU kernel computes the same function, ``torch`` is one call of it for all heads. Its products and its
softmax share a cache, which separate BLAS calls from Python cannot.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilestream.core.device import DeviceProperties
from tilestream.core.grid import Grid
from tilestream.core.integers import cdiv
from tilestream.core.order import Raster
from tilestream.core.schedule import Kind, Schedule
from tilestream.plan.attention_plan import AttentionCandidate, schedule_of
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.policy.cpu import INLINE_SECONDS, START_SECONDS, WORKER_SECONDS

#: Query rows of a tile, and keys of a block. Their scores, 256 KiB of float32, stay in a core's second-level cache.
BLOCK = (128, 512)
#: The same under `tilestream.invariant`: single rows, so that a call's shapes depend only on the row's visible keys.
PROMISED_BLOCK = (1, BLOCK[1])
#: The share of the nominal peak that products and exponentials together reach.
EFFICIENCY = 0.2
#: The same share for torch's own kernel.
TORCH_EFFICIENCY = 0.3
#: Seconds of Python for a block of keys, and for a tile.
BLOCK_SECONDS, TILE_SECONDS = 60e-6, 60e-6
#: Heads in a group, whose shared keys stay in the third-level cache.
GROUP = 8


def candidates(
    problem: AttentionProblem, device: DeviceProperties, workers: int, *, kind: Kind, forced: bool,
    block: tuple[int, int] = BLOCK,
) -> Iterator[AttentionCandidate]:  # fmt: skip
    """The candidates on workers and, if nothing arrives or is forced, in the calling thread."""
    schedule, alone = (schedule_of(problem, block[0], 1, GROUP, kind, count) for count in (workers, 1))
    tiles, rate = schedule.grid.tiles, device.peak(problem.dtype, 1) * EFFICIENCY
    blocks = tiles * (TILE_SECONDS + cdiv(max(problem.seqlen_k, 1), block[1]) * BLOCK_SECONDS)
    if problem.keys is None and not forced and not unlike_torch(problem):
        seconds = problem.operations / (device.peak(problem.dtype, workers) * TORCH_EFFICIENCY)
        yield AttentionCandidate("torch", BLOCK, whole(problem, kind), INLINE_SECONDS + seconds)
    if problem.keys is None and not forced:
        together = device.peak(problem.dtype, workers) * EFFICIENCY
        yield AttentionCandidate("inline", BLOCK, alone, INLINE_SECONDS + (problem.operations / together + blocks))
    waves = cdiv(tiles, workers) / max(tiles, 1)
    shared = waves * (problem.operations / rate + blocks)
    yield AttentionCandidate("workers", block, schedule, START_SECONDS + WORKER_SECONDS * workers + shared)


def unlike_torch(problem: AttentionProblem) -> str:
    """The feature of a problem that torch's CPU kernel lacks; empty if it supports the problem."""
    p = problem
    square = p.seqlen_q == p.seqlen_k or p.alignment == "top_left"
    reasons = {
        f"of {p.dtype}": p.dtype == "float8_e4m3fn", "packed sequences": p.varlen, "keys in pages": p.page_size,
        "lengths of keys": p.lengths, "a soft cap": p.softcap, "sinks": p.sinks, "scales of heads": p.scaled,
        "a window": p.window != (None, None), "values of other columns than keys": p.head_dim != p.head_dim_v,
        "a diagonal that ends in the last corner": p.causal and not square and p.seqlen_q != 1,
        "a diagonal and a scale that is not positive": p.causal and not p.positive,  # it scales the mask, too
        "nothing to compute": not (p.seqlen_k and p.rows and p.heads_q),
    }  # fmt: skip
    return next((what for what, there in reasons.items() if there), "")


def whole(problem: AttentionProblem, kind: Kind) -> Schedule:
    """A schedule of one item, with all heads of all sequences."""
    return Schedule(kind, Grid(1, 1, 1), Raster("longest_first", group=1), 1)
