"""How the load warp of a Hopper kernel draws tickets: it prefetches one while it loads, and reads many queues at once.

An add to a counter takes as long as some stages do in the math warps. `prefetch_ticket` issues it `EARLY` steps before
an item's last, and loading goes on; `await_ticket` waits for the answer when the next item is due. So a ticket is drawn
a little earlier than in `tilestream.core.schedule.take`; every ticket is still looked at. One lane adds and tells the
others: `tl.atomic_add` of a scalar would wait for the answer at once, to share it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestream.kernels.device.queues import AT_ONCE, pick_victim_simd
from tilestream.kernels.device.schedule import LINE

#: Steps of K that are loaded between drawing a ticket and needing it; of attention, key blocks, which take longer. An
#: add takes about a microsecond.
EARLY: gl.constexpr = gl.constexpr(4)


@gluon.jit
def prefetch_ticket(words, queue, go):
    """Begin to add one to a queue's counter, if ``go`` is 1 and not 0. The answer, int64, is for `await_ticket`.

    It is one lane's. Non-blocking: the answer is not copied either, so it is undefined if ``go`` is 0. The address
    seems to be each lane's own, so that ptxas does not gather the lanes' adds first.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 lane;
        .reg .b64 at;
        mov.u32 lane, %laneid;
        setp.lt.u32 first, lane, $2;
        mad.wide.u32 at, lane, 8, $1;
        @first atom.relaxed.gpu.global.add.u64 $0, [at], 1;
        }""",
        "=l,l,r", [(words.counters + queue * LINE).to(gl.int64), go], dtype=gl.int64, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def await_ticket(words, queue, asked):
    """`tilestream.kernels.device.schedule.add`, begun by `prefetch_ticket`.

    All 64 bits of the answer count, or ptxas copies the lower ones as soon as it comes, and waits for it to come.
    """
    ticket = gl.minimum(asked - words.base, 2147483647).to(gl.int32)
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [ticket], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def pick_victim_of_warp(work, words, watch, tickets, noted, SPLIT: gl.constexpr, PROBE: gl.constexpr):
    """`tilestream.kernels.device.queues.pick_victim_simd`, of a warp."""
    lane = gl.arange(0, AT_ONCE, gl.BlockedLayout([1], [32], [1], [0]))
    return pick_victim_simd(lane, work, words, watch, tickets, noted, SPLIT, PROBE)
