"""CTAs of a cluster multiply a tile, each a share of its K, and add their sums up out of each other's shared memory.

::

    each CTA:  acc = its share's K steps;  its shared memory = acc
               arrive, wait                                 (all have written)
               its rows of the tile: the sum of all CTAs' memories, in K order
               arrive                                       (it has read)
               out[its rows] = epilogue(sum)
               wait                                         (all have read: memory may go)

There is no partial result in global memory, no count, and no CTA that does the end of the whole tile by itself: of a
tile in parts those took 1.8 us and more on an H200, of products that take 5.

The room is behind what Triton gives the kernel, which does not know of it: `tilestream.core.exchange.room` says how
much a launch adds. Addresses follow from rows and columns, whatever layout the compiler chooses. Elements that are side
by side in registers and in memory move together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.core import exchange

PAD = tl.constexpr(exchange.PAD)


@triton.jit
def do(TEXT: tl.constexpr):
    """Have each thread execute an instruction without operands."""
    tl.inline_asm_elementwise(TEXT + " mov.b32 $0, $1;", "=r,r", [tl.cast(0, tl.int32)], tl.int32, False, 1)


@triton.jit
def meet():
    """Wait until all CTAs are here. What they have written before is seen."""
    do("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;")


@triton.jit
def leave():
    """Say that this CTA has read the others' memory. Does not wait for them."""
    do("barrier.cluster.arrive.release;")


@triton.jit
def await_leaving():
    """Wait until all CTAs have left: the memory of one that has ended is no more."""
    do("barrier.cluster.wait;")


@triton.jit
def own_room(BYTES: tl.constexpr):
    """Where the room begins, of so many bytes at the end of the dynamic shared memory: an address in shared memory."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 size; mov.u32 size, %dynamic_smem_size; mov.u32 $0, global_smem; add.u32 $0, $0, size;"
        " sub.u32 $0, $0, $1; and.b32 $0, $0, -16; }",
        "=r,r", [tl.cast(BYTES, tl.int32)], tl.int32, True, 1,
    )  # fmt: skip


@triton.jit
def room_of(room, RANK: tl.constexpr):
    """Where the same room of a CTA of the cluster begins: an address in the cluster's shared memory."""
    return tl.inline_asm_elementwise(
        "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", [room, tl.cast(RANK, tl.int32)], tl.int32, True, 1
    )  # fmt: skip


@triton.jit
def put(acc, at):
    """Store each element of ``acc`` at the address ``at`` of this CTA's shared memory."""
    tl.inline_asm_elementwise(
        "{ .reg .pred near; .reg .b32 behind; add.u32 behind, $2, 4; setp.eq.u32 near, behind, $3;"
        " @near st.shared.v2.f32 [$2], {$4, $5}; @!near st.shared.f32 [$2], $4; @!near st.shared.f32 [$3], $5;"
        " mov.b32 $0, 0; mov.b32 $1, 0; }",
        "=r,=r,r,r,f,f", [at, acc], tl.int32, False, 2,
    )  # fmt: skip


@triton.jit
def get(at, FETCHED: tl.constexpr):
    """The floats at addresses of the cluster's shared memory; ``FETCHED`` together, where they are side by side.

    A thread that stores 16 bytes of the output holds 8 elements of a row: of loads of one each, eight lanes of a warp
    would ask the same bank at once.
    """
    if FETCHED == 4:
        x = tl.inline_asm_elementwise(
            "{ .reg .pred near; .reg .b32 behind, odd; add.u32 behind, $4, 4; setp.eq.u32 near, behind, $5;"
            " add.u32 behind, $4, 8; setp.eq.and.u32 near, behind, $6, near; add.u32 behind, $4, 12;"
            " setp.eq.and.u32 near, behind, $7, near; and.b32 odd, $4, 15; setp.eq.and.u32 near, odd, 0, near;"
            " @near ld.shared::cluster.v4.f32 {$0, $1, $2, $3}, [$4]; @!near ld.shared::cluster.f32 $0, [$4];"
            " @!near ld.shared::cluster.f32 $1, [$5]; @!near ld.shared::cluster.f32 $2, [$6];"
            " @!near ld.shared::cluster.f32 $3, [$7]; }",
            "=&f,=&f,=&f,=&f,r,r,r,r", [at], tl.float32, False, 4,
        )  # fmt: skip
    else:
        x = tl.inline_asm_elementwise("ld.shared::cluster.f32 $0, [$1];", "=f,r", [at], tl.float32, False, 1)
    return x


@triton.jit
def summed(acc, part, C: tl.constexpr):
    """The CTA's rows of the sum of all shares: ``[BLOCK_M // CLUSTER, BLOCK_N]``. Behind it `await_leaving`.

    ``acc``: the product of the share ``part``, ``[BLOCK_M, BLOCK_N]``.
    """
    SIZE: tl.constexpr = C.CLUSTER
    ROWS: tl.constexpr = C.BLOCK_M // C.CLUSTER
    PITCH: tl.constexpr = C.BLOCK_N + PAD
    room = own_room(4 * C.BLOCK_M * PITCH)
    columns = tl.arange(0, C.BLOCK_N)[None, :]
    put(acc, room + 4 * (tl.arange(0, C.BLOCK_M)[:, None] * PITCH + columns))
    meet()
    own = 4 * ((part * ROWS + tl.arange(0, ROWS)[:, None]) * PITCH + columns)
    # All loads before the first sum: a load takes as long as one from L2.
    parts = ()
    for rank in tl.static_range(SIZE):
        parts = parts + (get(room_of(room, rank) + own, C.FETCHED),)
    leave()
    total = parts[0]
    for rank in tl.static_range(1, SIZE):
        total += parts[rank]
    return total
