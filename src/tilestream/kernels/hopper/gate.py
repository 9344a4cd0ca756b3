"""The gate of the Hopper kernels: the load warp passes `tilestream.kernels.device.gate` for each item.

::

    item = take();  none: hand STOP on, leave
    the launch is over:                     hand the item on *void*, and load nothing
    all its chunks have arrived:            fence; hand the item on; load it

Only the load warp waits, and it waits before it hands an item on. So the math warps never wait for an arrival. K of a
void item runs backwards, from its end to its beginning. The load warp therefore loads no step of it, and the math warps
get a negative number of steps and store NaN in the same way as a product. Each tile is written once, stream-K's counts
are restored, and both rings end as usual: see `tilestream_tools.verify.protocol`, which the checker explores.

*Order* (invariant 7). One lane polls a signal, by an acquire at system scope, and shares the answer with the warp's
other lanes through a barrier. TMA copies belong to the asynchronous proxy, which that acquire does not order. So each
lane fences, because any lane may then start the copies.

*Leaving.* The load warp counts itself out when it has started its last copies, while its math warps still work. The
last worker to leave resets counters, signals and abort word, which no math warp uses. Reset signals show that all
chunks were seen; only the end of the launch shows that they were read.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestream.kernels.device.items import with_steps


@gluon.jit
def fenced(value):
    """``value`` (int32) after a fence: this thread's later copies see the global memory that it has seen."""
    return gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def backwards(item, over):
    """``(item, over)`` after the gate's fence. K of a void item runs backwards."""
    over = fenced(over)
    first = tl.where(over != 0, item.k_end, item.k_begin)
    end = tl.where(over != 0, item.k_begin, item.k_end)
    return with_steps(item, first, end), over
