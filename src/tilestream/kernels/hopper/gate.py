"""The gate of the Hopper kernels: `tilestream.kernels.device.gate`, passed by the load warp for each item.

::

    item = take();  none: hand STOP on, leave
    the launch is over:                     hand the item on *void*, and load nothing
    all its chunks are there:               fence; hand the item on; load it

Only the load warp waits, and it waits before it hands an item on; nothing behind it can fail to come. K of a void item
runs backwards, from its end to its beginning. So the load warp has no step of it to load, and the math warps, told a
negative number of steps, store NaN as they would store a product. Each tile is written once, stream-K's counts are
restored, and both rings end as always: see `tilestream_tools.verify.protocol`, which the checker explores.

*Order* (invariant 7). One lane polls a signal, an acquire at system scope, and tells the warp's other lanes behind a
barrier. TMA copies belong to the asynchronous proxy, which that acquire does not order: so each lane fences, whichever
of them then starts the copies.

*Leaving.* The load warp counts itself out when it has started its last copies, while its math warps still work. The
last worker out resets counters, signals and abort word, which no math warp touches. Signals that are zero again say
that all chunks were seen, not that they were read: the end of the launch says that.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestream.kernels.device.items import with_steps


@gluon.jit
def fenced(value):
    """``value`` (int32), behind a fence: what this thread has seen in global memory, copies that it starts see, too."""
    return gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def backwards(item, over):
    """``(item, over)`` behind the gate's fence: K of a void item runs backwards."""
    over = fenced(over)
    first = tl.where(over != 0, item.k_end, item.k_begin)
    end = tl.where(over != 0, item.k_begin, item.k_end)
    return with_steps(item, first, end), over
