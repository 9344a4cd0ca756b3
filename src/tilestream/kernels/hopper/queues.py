"""The tickets of a Hopper kernel's load warp: it prefetches one while it loads, and reads many queues at once.

An add to a counter takes as long as several stages in the math warps. `prefetch_ticket` issues it `EARLY` steps before
an item's last, and loading continues; `await_ticket` waits for the answer when the next item is due. So a ticket is
drawn slightly earlier than in `tilestream.core.schedule.take`, but every ticket is still checked. One lane adds, and
shares the answer later. `tl.atomic_add` of a scalar would wait for the answer at once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestream.kernels.device.queues import AT_ONCE, part_sizes, pick_victim_simd
from tilestream.kernels.device.schedule import (
    LINE,
    PEEKED,
    RECORD,
    count_out,
    home_queue,
    left,
    queue_size,
    rank,
    ranked,
)

#: The number of K steps (key blocks in attention, which take longer) that are loaded between the request of a ticket
#: and its use. An add takes about a microsecond.
EARLY: gl.constexpr = gl.constexpr(4)
#: Threads of the load warp, and how many counters each reads at once: those of 132 queues take one wait. A load warp of
#: 24 registers has none for so many.
LANES: gl.constexpr = gl.constexpr(32)
READS: gl.constexpr = gl.constexpr(5)


@gluon.jit
def prefetch_ticket(words, queue, go):
    """Start to add one to a queue's counter if ``go`` is 1. The answer, int64, is for `await_ticket`.

    Only lane 0 has the answer. The call does not block, and does not copy the answer, which is undefined if ``go`` is
    0. The address depends on the lane, so that ptxas does not combine the lanes' adds first.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 lane;
        .reg .b64 at;
        mov.u32 lane, %laneid;
        setp.lt.u32 first, lane, $2;
        mad.wide.u32 at, lane, 8, $1;
        @first atom.relaxed.gpu.global.add.u64 $0, [at], 1;
        }""",
        "=l,l,r", [(words.counters + queue * LINE).to(gl.int64), go], dtype=gl.int64, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def await_ticket(words, queue, asked):
    """The rest of `tilestream.kernels.device.schedule.add`, which `prefetch_ticket` started.

    It uses all 64 bits of the answer. Otherwise ptxas would copy the lower bits, and wait for them, at the request.
    """
    ticket = gl.minimum(asked - words.base, 2147483647).to(gl.int32)
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [ticket], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def read_queues(work, words, watch, tickets, noted, SPLIT: gl.constexpr, PROBE: gl.constexpr):
    """The highest rank of a queue but the worker's own, with a wait for each `READS` counters of a thread.

    Only the lower 32 bits are read, since a load warp has few registers. They tell wrongly only of a counter that is
    2**31 or more below ``base``. A queue that then seems empty is emptied by its own worker, so it must have one.
    One that seems to have tickets is asked for one, by all 64 bits.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [LANES], [1], [0])
    lane = gl.arange(0, LANES, LAYOUT)
    home = home_queue(watch.worker, work.queues)
    base = words.base.to(gl.int32)
    low = words.counters.to(gl.pointer_type(gl.int32))
    best = lane * 0
    for first in range(0, work.queues, LANES * READS):
        counts = ()
        for i in gl.static_range(READS):
            queue = first + i * LANES + lane
            seen = (queue < work.queues) & (queue != home)
            counts = counts + (gl.load(low + queue * (2 * LINE), mask=seen, other=0, volatile=True),)
        for i in gl.static_range(READS):
            queue = first + i * LANES + lane
            seen = (queue < work.queues) & (queue != home)
            taken = gl.maximum(counts[i] - base, 0)
            rest = left(queue_size(queue, work, tickets, SPLIT, part_sizes), taken)
            best = gl.maximum(best, gl.where(seen, rank(rest, queue, home), 0))
            if PROBE:
                place = noted + queue - (queue > home)
                at = words.log + (watch.worker.to(gl.int64) * words.capacity + place) * RECORD
                noting = seen & (place < words.capacity)
                gl.store(at, queue * 0 + PEEKED, mask=noting)
                gl.store(at + 1, queue, mask=noting)
                gl.store(at + 2, taken, mask=noting)
    return gl.max(best, 0)


@gluon.jit
def pick_victim_of_slim_warp(work, words, watch, tickets, noted, SPLIT: gl.constexpr, PROBE: gl.constexpr):
    """`tilestream.kernels.device.queues.pick_victim_simd` for one warp, whose registers may be few."""
    lane = gl.arange(0, AT_ONCE, gl.BlockedLayout([1], [LANES], [1], [0]))
    return pick_victim_simd(lane, work, words, watch, tickets, noted, SPLIT, PROBE)


@gluon.jit
def pick_victim_of_warp(work, words, watch, tickets, noted, SPLIT: gl.constexpr, PROBE: gl.constexpr):
    """The same by `read_queues`, which has registers, if each queue has a worker."""
    if watch.workers < work.queues:
        best, noted = pick_victim_of_slim_warp(work, words, watch, tickets, noted, SPLIT, PROBE)
    else:
        best = read_queues(work, words, watch, tickets, noted, SPLIT, PROBE)
        if PROBE:
            noted = noted + work.queues - 1
        victim, some = ranked(best, home_queue(watch.worker, work.queues))
        if some != 0:
            gl.atomic_max(words.counters + victim * LINE, words.base, sem="relaxed")
    return best, noted


@gluon.jit
def prefetch_leaving(work, words):
    """Fetch the word that workers count themselves out with into L2, in a captured launch: at its end all add to it."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred leaves;
        setp.ne.s32 leaves, $2, 0;
        @leaves prefetch.global.L2 [$1];
        mov.b32 $0, 0;
        }""",
        "=r,l,r", [(words.counters + work.queues * LINE).to(gl.int64), words.reset.to(gl.int32)], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def leave_as_warp(work, words, watch):
    """`tilestream.kernels.device.schedule.leave` for one warp, whose threads restore a word each."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [LANES], [1], [0])
    if words.reset != 0:
        if count_out(work, words, 0, watch.workers):
            lane = gl.arange(0, LANES, LAYOUT)
            for first in range(0, work.queues + 1, LANES):
                word = first + lane
                gl.store(words.counters + word * LINE, gl.zeros_like(word).to(gl.int64), mask=word <= work.queues)
