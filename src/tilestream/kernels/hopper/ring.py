"""The ring: stages of shared memory between a load loop and the math loops, and the item ring before it.

::

    load loop                                   math loop
      item = next item, its gate passed, or STOP  wait item_full[slot]
      wait item_empty[slot]                       item = slots[slot]
      slots[slot] = item                          arrive item_empty[slot]
      arrive item_full[slot]                      STOP: leave
      STOP: leave                                 for k in the item's K steps:
      for k in the item's K steps:                  wait full[stage]
        wait empty[stage]                           mma on the stage
        expect bytes at full[stage]                 wait until 1 mma is in flight: the one before is done
        load into the stage -> full[stage]          arrive empty[the stage before]
                                                  wait until 0 are in flight; arrive empty[the last stage]
                                                  epilogue

`tilestream_tools.verify.protocol` models this and the epilogue's C buffers, operation by operation; a test runs the
code of both and compares. The checker explores the model for one consumer, for two on one tile (cooperative: ``empty``
counts 2) and for two that take turns (ping-pong: order barriers, and each skips the other's stages). Kernel and model
share the arithmetic of `tilestream.core.ring` for a loop's position.

A new barrier is in phase 0, so a wait for the phase before it passes. The load loop waits for ``empty`` with the
opposite of its phase, so the first round finds all stages free.

Each barrier must be used until the kernel ends. The compiler reuses an unused barrier's memory for the word by which a
warp's lane shares an atomic's answer. If several processes share a GPU, and it preempts and restores the SM, that word
becomes a new barrier again. (PTX leaves this undefined: a barrier's memory must not be reused before
``mbarrier.inval``.) Tickets, and their tiles, were lost this way: `tests/gpu/test_gpu_again.py`. The compile gates
search for such a word, and for unused barriers in GEMMs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilestream.core import ring
from tilestream.kernels.hopper.compat import device

step = device(ring.step)
skip = device(ring.skip)
before = device(ring.before)

#: Slots of the item ring: one for the current item, and one for the next.
ITEMS: gl.constexpr = gl.constexpr(2)
#: The most fields of an item: see the kernels. The first field is 0 for STOP.
FIELDS: gl.constexpr = gl.constexpr(16)


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Make ``COUNT`` barriers. A phase of a barrier completes with ``ARRIVALS`` arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def make_slots():
    """Make the item ring's slots."""
    return gl.allocate_shared_memory(gl.int32, [ITEMS * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def put(slots, slot, field: gl.constexpr, value, WARPS: gl.constexpr):
    """Write a field of the item in a slot."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    slots.index(slot * FIELDS + field).store(gl.full([1], value, gl.int32, layout))


@gluon.jit
def get(slots, slot, field: gl.constexpr, WARPS: gl.constexpr):
    """Read a field of the item in a slot."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(slots.index(slot * FIELDS + field).load(layout), 0)
