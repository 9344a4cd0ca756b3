"""Reads of many queues' counters at once: with a queue for each worker, one after the other would take too long.

All threads of a block must decide by one word that all of them read: counters change, and warps that read them
separately would diverge. On NVIDIA's GPUs `AT_ONCE` counters take two warps, so the best one goes through shared
memory. A wave of AMD's has 64 lanes: each wave would read all counters and keep its own answer, by loads that a cache
may serve (Triton drops ``volatile`` there). So AMD's GPUs, which have few queues, read one counter after the other by
atomics, whose answers Triton shares through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from tilestream.kernels.device.jit import INTERPRETED
from tilestream.kernels.device.schedule import (
    LINE,
    PEEKED,
    RECORD,
    home_queue,
    left,
    pick_victim,
    queue_size,
    rank,
    ranked,
)

#: Counters that are read at once: in a warp that loads, more of them spill what it keeps.
AT_ONCE: tl.constexpr = tl.constexpr(64)


@triton.jit
def part_sizes(total, parts, part):
    """`tilestream.core.integers.part_size` of a vector of parts."""
    return total // parts + tl.where(part < total % parts, 1, 0)


@triton.jit
def pick_victim_simd(lane, work, words, watch, tickets, noted, SPLIT: tl.constexpr, PROBE: tl.constexpr):
    """`tilestream.kernels.device.schedule.pick_victim`, which waits a few times, not once for each queue.

    In no order: a counter only rises, so a queue that is seen empty is empty, whenever that was; and how full the
    others are is a hint. Of the counters only the best victim's is raised to the launch's base.

    Parameters
    ----------
    lane
        int32 ``[AT_ONCE]``: 0, 1, ...; its layout is the caller's.
    """
    home = home_queue(watch.worker, work.queues)
    best = tl.cast(0, tl.int32)
    for first in range(0, work.queues, AT_ONCE):
        queue = first + lane
        seen = (queue < work.queues) & (queue != home)
        count = tl.load(words.counters + queue * LINE, mask=seen, other=0, volatile=True)
        taken = (tl.maximum(count, words.base) - words.base).to(tl.int32)
        rest = left(queue_size(queue, work, tickets, SPLIT, part_sizes), taken)
        best = tl.maximum(best, tl.max(tl.where(seen, rank(rest, queue, home), 0), 0))
        if PROBE:
            place = noted + queue - (queue > home)
            at = words.log + (watch.worker.to(tl.int64) * words.capacity + place) * RECORD
            seen = seen & (place < words.capacity)
            tl.store(at, queue * 0 + PEEKED, mask=seen)
            tl.store(at + 1, queue, mask=seen)
            tl.store(at + 2, taken, mask=seen)
    if PROBE:
        noted = noted + work.queues - 1
    victim, some = ranked(best, home)
    if some != 0:
        tl.atomic_max(words.counters + victim * LINE, words.base, sem="relaxed")
    return best, noted


@triton.jit
def _pick_at_once(work, words, watch, tickets, noted, SPLIT: tl.constexpr, PROBE: tl.constexpr):
    """`pick_victim_simd`, of a block."""
    return pick_victim_simd(tl.arange(0, AT_ONCE), work, words, watch, tickets, noted, SPLIT, PROBE)


@triton.jit
def _pick_on_device(work, words, watch, tickets, noted, SPLIT: tl.constexpr, PROBE: tl.constexpr):
    """At once where all threads are then told one answer, and with a probe the one that is written down."""
    if is_cuda() and not PROBE:
        best, noted = _pick_at_once(work, words, watch, tickets, noted, SPLIT, PROBE)
    else:
        best, noted = pick_victim(work, words, watch, tickets, noted, SPLIT, PROBE)
    return best, noted


pick_victim_of_block = _pick_at_once if INTERPRETED else _pick_on_device
