"""The tickets of a Hopper kernel's load warp: it prefetches one while it loads, and reads many queues at once.

An add to a counter takes as long as several stages in the math warps. `prefetch_ticket` issues it `EARLY` steps before
an item's last, and loading continues; `await_ticket` waits for the answer when the next item is due. So a ticket is
drawn slightly earlier than in `tilestream.core.schedule.take`, but every ticket is still checked. One lane adds, and
shares the answer later. `tl.atomic_add` of a scalar would wait for the answer at once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestream.kernels.device.queues import AT_ONCE, pick_victim_simd
from tilestream.kernels.device.schedule import LINE

#: The number of K steps (key blocks in attention, which take longer) that are loaded between the request of a ticket
#: and its use. An add takes about a microsecond.
EARLY: gl.constexpr = gl.constexpr(4)


@gluon.jit
def prefetch_ticket(words, queue, go):
    """Start to add one to a queue's counter if ``go`` is 1. The answer, int64, is for `await_ticket`.

    Only lane 0 has the answer. The call does not block, and does not copy the answer, which is undefined if ``go`` is
    0. The address depends on the lane, so that ptxas does not combine the lanes' adds first.
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
    """The rest of `tilestream.kernels.device.schedule.add`, which `prefetch_ticket` started.

    It uses all 64 bits of the answer. Otherwise ptxas would copy the lower bits, and wait for them, at the request.
    """
    ticket = gl.minimum(asked - words.base, 2147483647).to(gl.int32)
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [ticket], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def pick_victim_of_warp(work, words, watch, tickets, noted, SPLIT: gl.constexpr, PROBE: gl.constexpr):
    """`tilestream.kernels.device.queues.pick_victim_simd` for one warp."""
    lane = gl.arange(0, AT_ONCE, gl.BlockedLayout([1], [32], [1], [0]))
    return pick_victim_simd(lane, work, words, watch, tickets, noted, SPLIT, PROBE)
