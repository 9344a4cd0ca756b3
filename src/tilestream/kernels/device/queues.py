"""A look at many queues at once: where each worker has a queue of its own, one after the other would take too long.

What a block decides by must be one word that all its threads read: counters move, and warps that have each read them
for themselves would go different ways. On NVIDIA's GPUs `AT_ONCE` counters are two warps', so the best of them goes
through shared memory. A wave of AMD's has 64 lanes: each wave would read all counters and keep its own answer, by loads
that may be served from a cache at that (Triton drops ``volatile`` there). So AMD's GPUs, which have few queues, look at
one counter after the other, by atomics, whose answer Triton hands on through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from tilestream.kernels.device.jit import INTERPRETED
from tilestream.kernels.device.schedule import LINE, PEEKED, RECORD, left, look, queue_size, rank, ranked

#: Counters that are read at once: in a warp that loads, more of them spill what it keeps.
AT_ONCE: tl.constexpr = tl.constexpr(64)


@triton.jit
def part_sizes(total, parts, part):
    """`tilestream.core.integers.part_size` of a vector of parts."""
    return total // parts + tl.where(part < total % parts, 1, 0)


@triton.jit
def look_by_lanes(
    lane, counters, base, worker, home, queues, batch, num_m, num_n, tickets, probe, capacity, noted,
    SPLIT: tl.constexpr, PROBE: tl.constexpr,
):  # fmt: skip
    """`tilestream.kernels.device.schedule.look`, which waits a few times, not once for each queue.

    In no order: a counter only rises, so a queue that is seen empty is empty, whenever that was; and how full the
    others are is a hint. Of the counters only the best victim's is raised to the launch's base.

    Parameters
    ----------
    lane
        0 to `AT_ONCE` - 1, a vector: its layout is the caller's.
    """
    best = tl.cast(0, tl.int32)
    for first in range(0, queues, AT_ONCE):
        queue = first + lane
        seen = (queue < queues) & (queue != home)
        count = tl.load(counters + queue * LINE, mask=seen, other=0, volatile=True)
        taken = (tl.maximum(count, base) - base).to(tl.int32)
        rest = left(queue_size(queue, queues, batch, num_m, num_n, tickets, SPLIT, part_sizes), taken)
        best = tl.maximum(best, tl.max(tl.where(seen, rank(rest, queue, home), 0), 0))
        if PROBE:
            place = noted + queue - (queue > home)
            at = probe + (worker.to(tl.int64) * capacity + place) * RECORD
            seen = seen & (place < capacity)
            tl.store(at, queue * 0 + PEEKED, mask=seen)
            tl.store(at + 1, queue, mask=seen)
            tl.store(at + 2, taken, mask=seen)
    if PROBE:
        noted = noted + queues - 1
    victim, some = ranked(best, home)
    if some != 0:
        tl.atomic_max(counters + victim * LINE, base, sem="relaxed")
    return best, noted


@triton.jit
def _look_at_once(
    counters, base, worker, home, queues, batch, num_m, num_n, tickets, probe, capacity, noted,
    SPLIT: tl.constexpr, PROBE: tl.constexpr,
):  # fmt: skip
    """`look_by_lanes`, of a block."""
    return look_by_lanes(
        tl.arange(0, AT_ONCE), counters, base, worker, home, queues, batch, num_m, num_n, tickets,
        probe, capacity, noted, SPLIT, PROBE,
    )  # fmt: skip


@triton.jit
def _look_on_device(
    counters, base, worker, home, queues, batch, num_m, num_n, tickets, probe, capacity, noted,
    SPLIT: tl.constexpr, PROBE: tl.constexpr,
):  # fmt: skip
    """At once where all threads are then told one answer, and with a probe the one that is written down."""
    if is_cuda() and not PROBE:
        best, noted = _look_at_once(
            counters, base, worker, home, queues, batch, num_m, num_n, tickets, probe, capacity, noted, SPLIT, PROBE
        )
    else:
        best, noted = look(
            counters, base, worker, home, queues, batch, num_m, num_n, tickets, probe, capacity, noted, SPLIT, PROBE
        )
    return best, noted


look_at_many = _look_at_once if INTERPRETED else _look_on_device
