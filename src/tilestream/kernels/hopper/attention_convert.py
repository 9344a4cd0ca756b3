"""The convert loop of attention: it converts 8-bit values to float16 for the tensor cores.

::

    for item in item ring:
      for each of its key blocks:
        wait raw_full; wait v_empty; e4m3 -> float16, a few rows at a time; arrive raw_empty; arrive v_full

The tensor cores take 8-bit operands only if the reduced dimension is contiguous. The columns of Q and K are contiguous,
the keys of V are not. So Q K^T is multiplied in 8 bits and P V in float16, in which e4m3 is exact. V is read, and
copied to shared memory, in half the bytes of float16. Four warps without other work convert it once for all consumers.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tilestream.kernels.hopper.compat import barrier, in_blocks
from tilestream.kernels.hopper.ring import ITEMS, get, step

#: Rows, and columns of a box, of one conversion. With 64 rows Triton 3.9 spills in the largest kernels.
HEIGHT: gl.constexpr = gl.constexpr(32)
WIDTH: gl.constexpr = gl.constexpr(64)


@gluon.jit
def convert_loop(loaded, ring, items, C: gl.constexpr):
    """Convert the values of each item's key blocks, stage by stage, from the stages ``loaded.v`` to ``ring.v``."""
    BLOCKS: gl.constexpr = C.BLOCK * C.COLUMNS // (HEIGHT * WIDTH)
    # A thread has 8 columns of a row: 8 bytes before the conversion, and 16 after it.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    sources = in_blocks(loaded.v, HEIGHT, WIDTH)
    targets = in_blocks(ring.v, HEIGHT, WIDTH)
    stage = tl.cast(0, tl.int32)
    phase = tl.cast(0, tl.int32)
    slot = tl.cast(0, tl.int32)
    slot_phase = tl.cast(0, tl.int32)
    going = tl.cast(1, tl.int32)
    while going != 0:
        mbarrier.wait(items.full.index(slot), slot_phase)
        going = get(items.slots, slot, 0, 4)  # key blocks, and one more
        mbarrier.arrive(items.empty.index(slot))
        slot, slot_phase = step(slot, slot_phase, ITEMS)
        for _ in range(1, going):
            mbarrier.wait(loaded.v_full.index(stage), phase)
            mbarrier.wait(ring.v_empty.index(stage), phase ^ 1)
            for i in range(BLOCKS):
                x = sources.index(stage * BLOCKS + i).load(layout)
                targets.index(stage * BLOCKS + i).store(x.to(ring.v.dtype))
            fence_async_shared()
            barrier()
            mbarrier.arrive(loaded.v_empty.index(stage))
            mbarrier.arrive(ring.v_full.index(stage))
            stage, phase = step(stage, phase, C.STAGES)
