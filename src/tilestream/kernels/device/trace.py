"""Spans: a traced kernel's records of its work items, for `tilestream.launch.trace`.

Each item has its own record: at its tile's id, or for a part of a tile after all tiles at its slot. So records need no
counter, none is lost, and an item that was done twice or never is visible. Times are of the clock that all units of the
device share (`%globaltimer`). ``TRACE`` is a compile-time argument: a kernel that is not traced has no code for it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import smid
from triton.language.target_info import is_cuda

from tilestream.kernels.device.clock import now
from tilestream.kernels.device.jit import INTERPRETED

#: 64-bit words of a record.
WORDS: tl.constexpr = tl.constexpr(9)
#: How often the item was taken; the worker; its SM, or -1 if unknown.
TIMES: tl.constexpr = tl.constexpr(0)
WORKER: tl.constexpr = tl.constexpr(1)
UNIT: tl.constexpr = tl.constexpr(2)
#: When it was taken, and when its gate was passed.
BEGIN: tl.constexpr = tl.constexpr(3)
READY: tl.constexpr = tl.constexpr(4)
#: For each part of a tile's rows that is finished separately, at most `ENDS`: twice the time of its last store, plus 1
#: if the tile is complete.
END: tl.constexpr = tl.constexpr(5)
ENDS: tl.constexpr = tl.constexpr(3)
#: One more than the chunk it waited for, if its place in the schedule does not give it: for attention, that of its
#: first keys.
CHUNK: tl.constexpr = tl.constexpr(8)


@triton.jit
def _unit_on_device():
    if is_cuda():
        unit = smid()
    else:
        unit = tl.full((), -1, tl.int32)
    return unit


def _unit_on_host():
    return tl.full((), -1, tl.int32)


unit_of = _unit_on_host if INTERPRETED else _unit_on_device


@triton.jit
def place_of(item, work):
    """The place of the item's record."""
    place = (item.batch * work.num_m + item.pm) * work.num_n + item.pn
    if item.parts > 1:
        place = work.batches * work.num_m * work.num_n + item.slot
    return place


@triton.jit
def begin_span(log, place, worker, began=None):
    """Record that the item was taken, now or where the worker began to look for it."""
    at = log + place.to(tl.int64) * WORDS
    tl.atomic_add(at + TIMES, 1, sem="relaxed")
    tl.store(at + WORKER, worker.to(tl.int64))
    tl.store(at + UNIT, unit_of().to(tl.int64))
    if began is None:
        tl.store(at + BEGIN, now())
    else:
        tl.store(at + BEGIN, began)


@triton.jit
def ready_span(log, place):
    """Record that its gate was passed."""
    tl.store(log + place.to(tl.int64) * WORDS + READY, now())


@triton.jit
def chunk_span(log, place, chunk):
    """Record the chunk that it waited for."""
    tl.store(log + place.to(tl.int64) * WORDS + CHUNK, chunk.to(tl.int64) + 1)


@triton.jit
def end_span(log, place, half, complete):
    """Record that the stores of the item, or of its half, are issued; ``complete``: the tile's output is complete."""
    tl.store(log + place.to(tl.int64) * WORDS + END + half, now() * 2 + complete.to(tl.int64))
