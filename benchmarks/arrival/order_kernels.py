"""Kernels of `signals`: a box that is written, announced and copied by TMA, again and again; a poller.

::

    producer, round r                                   consumer, round r
      wait until acknowledged > r - SLOTS                 wait until flag > r        (SEM: acquire, or relaxed)
      write VALUE(r) to every element of a box            FENCED: fence generic -> asynchronous proxy
      flag = r + 1                                        copy that box by TMA; count elements that are not VALUE(r)
                                                          acknowledged = r + 1

The boxes are taken in turn, and there is no common divisor of their number and that of the values: what was in a box
before is another value. The producer is a copy engine (copy and flag issued by the host, nothing on an SM), or a worker
of the same launch that stores and releases. All waits end at a deadline.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilestream.core.structs import Incoming
from tilestream.kernels.device.clock import latest, nap, present
from tilestream.kernels.device.gate import PENDING, poll_signal
from tilestream.kernels.hopper.compat import barrier, tma_load
from tilestream.kernels.hopper.gate import fenced

#: A box: 16 KB, 128 registers of a thread of one warp.
ROWS: gl.constexpr = gl.constexpr(64)
COLUMNS: gl.constexpr = gl.constexpr(64)
SLOTS: gl.constexpr = gl.constexpr(64)


@gluon.jit
def awaited(word, least, clock, begin, allowed, SEM: gl.constexpr):
    """Wait until ``word`` is at least ``least``; 0 at the deadline."""
    there = tl.atomic_add(word, 0, sem=SEM, scope="sys") >= least
    late = begin < 0
    while (there | late) == 0:
        late = latest(clock) - begin > allowed
        there = tl.atomic_add(word, 0, sem=SEM, scope="sys") >= least
    return there


@gluon.jit
def consume(
    box_map, boxes, flag, acknowledged, wrong, clock, rounds, values, allowed: tl.int64, SEM: gl.constexpr,
    FENCED: gl.constexpr,
):  # fmt: skip
    """Worker 0 consumes; worker 1, where there is one, produces.

    Parameters
    ----------
    wrong
        ``int64[3]``: rounds done, rounds with a wrong element, wrong elements.
    values
        VALUE(r) is ``r % values``.
    """
    begin = present(clock)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [1, 1], [1, 0])
    going = tl.cast(1, tl.int32)
    r = tl.cast(0, tl.int32)
    if gl.program_id(0) == 0:
        buffer = gl.allocate_shared_memory(box_map.dtype, [ROWS, COLUMNS], box_map.layout)
        bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(bar, count=1)
        bad_rounds = tl.cast(0, tl.int64)
        bad = tl.cast(0, tl.int64)
        while (r < rounds) & (going != 0):
            going = awaited(flag, r + 1, clock, begin, allowed, SEM).to(tl.int32)
            if going != 0:
                if FENCED:
                    going = fenced(going)
                mbarrier.expect(bar, ROWS * COLUMNS * 4)
                tma_load(box_map, [r % SLOTS * ROWS, 0], bar, buffer)
                mbarrier.wait(bar, r % 2)
                found = gl.sum(gl.sum((buffer.load(layout) != r % values).to(gl.int32), 1), 0)
                bad_rounds += (found > 0).to(tl.int64)
                bad += found.to(tl.int64)
                barrier()
                tl.atomic_xchg(acknowledged, r + 1, sem="release", scope="sys")
                r += 1
        mbarrier.invalidate(bar)
        tl.store(wrong, r.to(tl.int64))
        tl.store(wrong + 1, bad_rounds)
        tl.store(wrong + 2, bad)
    else:
        row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
        at = row[:, None] * COLUMNS + column[None, :]
        while (r < rounds) & (going != 0):
            going = awaited(acknowledged, r + 1 - SLOTS, clock, begin, allowed, "acquire").to(tl.int32)
            if going != 0:
                gl.store(
                    boxes + r % SLOTS * (ROWS * COLUMNS) + at,
                    gl.full([ROWS, COLUMNS], 0, gl.int32, layout) + r % values,
                )
                barrier()
                tl.atomic_xchg(flag, r + 1, sem="release", scope="sys")
                r += 1


@triton.jit
def poll(word, clock, looks, allowed: tl.int64, pause, NAPS: tl.constexpr):
    """Poll as a worker at a gate does, with pauses of one length, until the word is set or time is up; count polls."""
    begin = present(clock)
    count = tl.cast(0, tl.int64)
    coming = Incoming(word, word, word, 1, 0, 1, 1, 0, 1)
    state = poll_signal(coming, 0)
    late = begin < 0
    while (state == PENDING) & (late == 0):
        if NAPS:
            nap(pause)
        late = latest(clock) - begin > allowed
        state = poll_signal(coming, 0)
        count += 1
    tl.atomic_add(looks, count, sem="relaxed")
