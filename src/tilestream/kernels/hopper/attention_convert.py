"""The convert loop of attention: values of 8 bits, as they were copied, become float16 for the tensor cores.

::

    for item in item ring:
      for each of its key blocks:
        wait raw_full; wait v_empty; e4m3 -> float16, a few rows at a time; arrive raw_empty; arrive v_full

The tensor cores take operands of 8 bits only with the columns that are added up side by side: those of Q and K are, the
keys of V are not. So Q K^T is multiplied in 8 bits and P V in float16, in which e4m3 is exact: V is read, and copied to
shared memory, in half the bytes, and converted once for all consumers by four warps that do nothing else.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tilestream.kernels.hopper.compat import barrier, in_blocks
from tilestream.kernels.hopper.ring import ITEMS, get, step

#: Rows, and columns of a box, that are converted at a time. Of 64 rows Triton 3.9 spills in the largest kernels.
HEIGHT: gl.constexpr = gl.constexpr(32)
WIDTH: gl.constexpr = gl.constexpr(64)


@gluon.jit
def convert_loop(
    v_raw, v_stages, raw_full, raw_empty, v_full, v_empty, slots, item_full, item_empty,
    BLOCK: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Convert the values of each item's key blocks, stage by stage."""
    BLOCKS: gl.constexpr = BLOCK * COLUMNS // (HEIGHT * WIDTH)
    # A thread has 8 columns of a row: 8 bytes, and then 16.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    sources = in_blocks(v_raw, HEIGHT, WIDTH)
    targets = in_blocks(v_stages, HEIGHT, WIDTH)
    stage = tl.cast(0, tl.int32)
    phase = tl.cast(0, tl.int32)
    slot = tl.cast(0, tl.int32)
    slot_phase = tl.cast(0, tl.int32)
    going = tl.cast(1, tl.int32)
    while going != 0:
        mbarrier.wait(item_full.index(slot), slot_phase)
        going = get(slots, slot, 0, 4)  # key blocks, and one more
        mbarrier.arrive(item_empty.index(slot))
        slot, slot_phase = step(slot, slot_phase, ITEMS)
        for _ in range(1, going):
            mbarrier.wait(raw_full.index(stage), phase)
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            for i in range(BLOCKS):
                x = sources.index(stage * BLOCKS + i).load(layout)
                targets.index(stage * BLOCKS + i).store(x.to(v_stages.dtype))
            fence_async_shared()
            barrier()
            mbarrier.arrive(raw_empty.index(stage))
            mbarrier.arrive(v_full.index(stage))
            stage, phase = step(stage, phase, STAGES)
