"""Reads of many queues' counters at once. With a queue for each worker, sequential reads would take too long.

All threads of a block must decide by one common value: counters change, and warps that read them separately would
diverge. On NVIDIA GPUs `AT_ONCE` counters take two warps, so the best one is shared through shared memory. On AMD GPUs
a wave has 64 lanes, so each wave would read all counters and keep its own result, by loads that a cache may serve
(Triton drops ``volatile`` there). So AMD GPUs, which have few queues, read the counters one after the other by atomics,
whose results Triton shares through shared memory.
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

#: The number of counters read at once. More would spill registers of a load warp.
AT_ONCE: tl.constexpr = tl.constexpr(64)


@triton.jit
def part_sizes(total, parts, part):
    """`tilestream.core.integers.part_size` of a vector of parts."""
    return total // parts + tl.where(part < total % parts, 1, 0)


@triton.jit
def pick_victim_simd(lane, work, words, watch, tickets, noted, SPLIT: tl.constexpr, PROBE: tl.constexpr):
    """`tilestream.kernels.device.schedule.pick_victim` with a few waits instead of one for each queue.

    The order of the reads does not matter: a counter only rises, so a queue that is seen empty stays empty, and the
    lengths of the others are hints. Only the best victim's counter is raised to the launch's base.

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
    """`pick_victim_simd` for a whole block."""
    return pick_victim_simd(tl.arange(0, AT_ONCE), work, words, watch, tickets, noted, SPLIT, PROBE)


@triton.jit
def _pick_on_device(work, words, watch, tickets, noted, SPLIT: tl.constexpr, PROBE: tl.constexpr):
    """`_pick_at_once` if all threads then get one answer (and a probe records it), else one after the other."""
    if is_cuda() and not PROBE:
        best, noted = _pick_at_once(work, words, watch, tickets, noted, SPLIT, PROBE)
    else:
        best, noted = pick_victim(work, words, watch, tickets, noted, SPLIT, PROBE)
    return best, noted


pick_victim_of_block = _pick_at_once if INTERPRETED else _pick_on_device
