"""How the load warp of a Hopper kernel looks at the queues: at many of them at once, each lane at some."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestream.kernels.portable.schedule import LINE, PEEKED, RECORD, left, queue_size, rank, ranked

#: Counters that are read at once: more of them spill what the load warp keeps.
AT_ONCE: gl.constexpr = gl.constexpr(64)


@gluon.jit
def look_at_many(
    counters, base, worker, home, queues, batch, num_m, num_n, tickets, probe, capacity, noted,
    SPLIT: gl.constexpr, PROBE: gl.constexpr,
):  # fmt: skip
    """`tilestream.kernels.portable.schedule.look` by one warp, which waits a few times, not once for each queue.

    In no order: a counter only rises, so a queue that is seen empty is empty, whenever that was; and how full the
    others are is a hint. Of the counters only the best victim's is raised to the launch's base.
    """
    lane = gl.arange(0, AT_ONCE, gl.BlockedLayout([1], [32], [1], [0]))
    best = tl.cast(0, tl.int32)
    for first in range(0, queues, AT_ONCE):
        queue = first + lane
        seen = (queue < queues) & (queue != home)
        count = gl.load(counters + queue * LINE, mask=seen, other=0, volatile=True)
        taken = (gl.maximum(count, base) - base).to(gl.int32)
        rest = left(queue_size(queue, queues, batch, num_m, num_n, tickets, SPLIT), taken)
        best = gl.maximum(best, gl.max(gl.where(seen, rank(rest, queue, worker), 0), 0))
        if PROBE:
            place = noted + queue - (queue > home)
            at = probe + (worker.to(gl.int64) * capacity + place) * RECORD
            seen = seen & (place < capacity)
            gl.store(at, gl.full([AT_ONCE], PEEKED, gl.int32, queue.type.layout), mask=seen)
            gl.store(at + 1, queue, mask=seen)
            gl.store(at + 2, taken, mask=seen)
    if PROBE:
        noted = noted + queues - 1
    victim, some = ranked(best, worker)
    if some != 0:
        gl.atomic_max(counters + victim * LINE, base, sem="relaxed")
    return best, noted
