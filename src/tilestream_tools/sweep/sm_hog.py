"""A kernel that holds SMs: one CTA an SM, with all of its shared memory, until it is told to stop.

::

    report[me] = SM + 1                   # released: from now on the SM is held
    until stop or the deadline:  nap, poll
    left[me] = why

No CTA that needs shared memory finds room on a held SM, so the measured kernel has the other SMs. CTAs without shared
memory do: a memory-bound kernel of the framework's may run there.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestream.kernels.device.clock import nap, present
from tilestream.kernels.device.trace import unit_of

#: Bytes that shared memory is taken in.
PIECE = 32768
_WORDS: gl.constexpr = gl.constexpr(PIECE // 4)
_NAP: gl.constexpr = gl.constexpr(2000)
#: Why a CTA left.
STOPPED: gl.constexpr = gl.constexpr(1)
EXPIRED: gl.constexpr = gl.constexpr(2)


@gluon.jit(do_not_specialize=("allowed",))
def hold(stop, report, left, clock, allowed: tl.int64, PIECES: gl.constexpr):
    """Hold this CTA's SM.

    Parameters
    ----------
    stop
        ``int32``: non-zero ends it.
    report, left
        ``int32``, a word a CTA: see the module.
    clock
        ``int64``, a word a CTA, 0 at first: see `tilestream.kernels.device.clock.latest`.
    allowed
        Nanoseconds until the deadline.
    """
    me = gl.program_id(0)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    taken = gl.allocate_shared_memory(gl.int32, [PIECES, _WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(PIECES):
        taken.index(i).store(gl.full([_WORDS], me, gl.int32, layout))
    begin = present(clock + me)
    gl.atomic_xchg(report + me, unit_of() + 1, sem="release", scope="sys")
    why = me * 0
    while why == 0:
        nap(_NAP)
        if gl.atomic_add(stop, 0, sem="acquire", scope="sys") != 0:
            why = why + STOPPED
        elif present(clock + me) - begin > allowed:
            why = why + EXPIRED
    gl.store(left + me, why)
