"""The gate of the Hopper kernels: `tilestream.kernels.device.gate`, passed by the load warp for each item.

::

    item = take();  none: hand STOP on, leave
    over already, or told so at the gate:   hand the item on *void*, and load nothing
    all its chunks are there:               fence; hand the item on; load it

Only the load warp waits, and before it hands an item on: behind that nothing is waited for that can fail to come. Of a
void item K runs backwards, from its end to its beginning: the load warp has no step of it to load, and the math warps,
which are told so many steps fewer than none, take NaN for its product and store that as they would a product. So each
tile is written once, stream-K's counts are restored, and both rings come to their end: see
`tilestream_tools.verify.protocol`, which the checker explores.

*Order* (invariant 7). One lane looks at a signal, an acquire at system scope, and tells the warp's others what it saw,
behind a barrier of theirs. Copies by TMA are of the asynchronous proxy, to which that acquire says nothing: so each
lane fences, whichever of them then starts the copies.

*Leaving.* The load warp counts itself out when it has started its last copies, its math warps still at work. What the
last one out resets (counters, signals, abort word) no math warp touches. But signals that are zero again say that all
were seen, not that what they announced has been read: the end of the launch says that.
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
