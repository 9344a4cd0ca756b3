"""Two CTAs of a cluster compute one tile: each a half of its rows, and y is read from L2 once for both (TMA multicast).

::

    load warp of each CTA                       math warps of each CTA
      wait empty[stage]                           wait full[stage]: x and y are there whole
      expect bytes at full[stage]: x, all of y    wgmma
      load x                                      arrive empty[stage], in both CTAs
      load the CTA's half of y -> both CTAs

A load brings a half of y to the same place in both CTAs, and counts its bytes at ``full`` of both. So a load waits
until the consumers of both are done with the stage: ``empty`` counts the arrivals of both CTAs. Bytes may come before
the CTA that they come to expects them: the phase does not end before its own load warp has arrived.

Both halves together lie in shared memory as one copy of all of y would: `tilestream.launch.hopper.arguments.part_map`.

All warps of both CTAs meet when barriers have been made, before the other CTA touches them, and once more before either
CTA ends: an arrival for a CTA that has left goes nowhere.

Triton 3.6 knows no multicast, and 3.7 compiles it wrong. The text of the kernel says what a CTA would do by itself;
`tilestream.launch.hopper.multicast` rewrites in its PTX the copies between `begin_multicast` and `end_multicast`, and
the arrivals that count for `CTAS`. `tilestream_tools.verify.pair` explores the protocol. On an H100
pairs are right, and slower than single CTAs at every pitch of rows (`benchmarks/results/h100/gemm_pitch.json`).
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestream.kernels.hopper.compat import in_blocks


@gluon.jit
def rank(C: gl.constexpr):
    """Which of its cluster's CTAs this is."""
    return gl.program_id(0) % C.CTAS


@gluon.jit
def do(TEXT: gl.constexpr):
    """Have each thread execute an instruction without operands."""
    gl.inline_asm_elementwise(TEXT, "=r,r", [tl.cast(0, tl.int32)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def announce_barriers():
    """Order the making of barriers before the other CTA's arrivals at them."""
    do("fence.mbarrier_init.release.cluster; mov.b32 $0, $1;")


@gluon.jit
def meet():
    """Wait until all warps of both CTAs are here."""
    do("barrier.cluster.arrive.release; barrier.cluster.wait.acquire; mov.b32 $0, $1;")


@gluon.jit
def begin_multicast():
    """From here on copies go to all CTAs of the cluster."""
    do("// multicast begins\n mov.b32 $0, $1;")


@gluon.jit
def end_multicast():
    """From here on copies go to this CTA."""
    do("// multicast ends\n mov.b32 $0, $1;")


@gluon.jit
def idle(ring):
    """A warp of the load warp's group that only meets the others: a cluster's barrier counts all warps."""
    meet()
    meet()


@gluon.jit
def find_half(tensor_map, row, k, WIDTH: gl.constexpr, C: gl.constexpr):
    """``(row, k)`` where this CTA's half of a part of y begins: of its rows, or of K where a box has all its rows."""
    BOX: gl.constexpr = tensor_map.block_type.shape[-2:]
    if C.Y_K_MAJOR:
        row += rank(C) * BOX[0]
    elif BOX[1] < WIDTH:
        row += rank(C) * BOX[1]
    else:
        k += rank(C) * BOX[0]
    return row, k


@gluon.jit
def in_parts(y_stages, C: gl.constexpr):
    """The stages of y as math loops read them: both CTAs' halves are one."""
    parts = ()
    for i in gl.static_range(len(C.WIDTHS)):
        if C.Y_K_MAJOR:
            parts = parts + (in_blocks(y_stages[i], C.WIDTHS[i], C.BLOCK_K),)
        else:
            parts = parts + (in_blocks(y_stages[i], C.BLOCK_K, C.WIDTHS[i]),)
    return parts
