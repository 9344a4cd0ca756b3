"""How the load warp of a Hopper kernel draws tickets: it asks for one while it loads, and looks at many queues at once.

An add to a counter takes as long as some stages do in the math warps. `ask` issues it `EARLY` steps before an item's
last, and goes on loading; `told` waits for the answer when the next item is due. So a ticket is drawn a little earlier
than `tilestream.schedule.take` has it, and otherwise nothing is different: each ticket that was asked for is looked at.
One lane asks, and tells the others: what `tl.atomic_add` makes of a scalar waits for the answer at once, to share it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestream.kernels.device.queues import AT_ONCE, look_by_lanes
from tilestream.kernels.device.schedule import LINE

#: Steps of K that are loaded between asking for a ticket and needing it, of attention key blocks, which take longer: an
#: add takes about a microsecond.
EARLY: gl.constexpr = gl.constexpr(4)


@gluon.jit
def ask(counters, queue, go):
    """Begin to add one to a queue's counter, if ``go`` is 1 and not 0. The answer, for `told`, is one lane's.

    Nothing waits for it: not a copy either, which is why it is left undefined where nobody asks. The address seems to
    be each lane's own, so that ptxas does not gather the lanes' adds first.
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
        "=l,l,r", [(counters + queue * LINE).to(gl.int64), go], dtype=gl.int64, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def told(counters, queue, base, asked):
    """`tilestream.kernels.device.schedule.add`, begun by `ask`.

    All 64 bits of the answer count, or ptxas copies the lower ones as soon as it comes, and waits for it to come.
    """
    ticket = gl.minimum(asked - base, 2147483647).to(gl.int32)
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [ticket], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def look_at_many(
    counters, base, worker, home, queues, batch, num_m, num_n, tickets, probe, capacity, noted,
    SPLIT: gl.constexpr, PROBE: gl.constexpr,
):  # fmt: skip
    """`tilestream.kernels.device.queues.look_by_lanes`, of a warp."""
    return look_by_lanes(
        gl.arange(0, AT_ONCE, gl.BlockedLayout([1], [32], [1], [0])), counters, base, worker, home, queues, batch,
        num_m, num_n, tickets, probe, capacity, noted, SPLIT, PROBE,
    )  # fmt: skip
