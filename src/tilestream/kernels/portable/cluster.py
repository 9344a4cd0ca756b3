"""CTAs of a cluster multiply a tile, each a share of its K, and add their sums up in each other's shared memory.

::

    each CTA:  arrive                                       (it runs: others may write to its memory)
               acc = its share's K steps
               wait                                         (all run)
               for each CTA: its rows of acc -> its memory, at the place of this share
               arrive, wait                                 (all have written)
               its rows: the sum of all shares in K order;  out[its rows] = epilogue(sum)

There is no partial result in global memory, no count, and no CTA that does the end of the whole tile by itself: of a
tile in parts those took 1.9 us and more on an H200, of products that take 5. (Each CTA reading the others' memory took
0.1 to 2 us more than writing to it: a read waits for its answer.)

The room is behind what Triton gives the kernel, which does not know of it: `tilestream.core.exchange.room` says how
much a launch adds. Addresses follow from rows and columns, whatever layout the compiler chooses. A pair of elements
that is side by side in registers and in memory is stored at once.

`tilestream_tools.verify.cluster` explores the protocol. There is no barrier before the end: others write to a CTA's
room before they meet, and it alone reads it. A program has one tile. For a second one, the arrival that announces it
would have to release what the CTA has read.
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
def announce():
    """Say that this CTA runs. Does not wait."""
    do("barrier.cluster.arrive.relaxed;")


@triton.jit
def await_all():
    """Wait until all CTAs run: those that have not begun have no memory to write to."""
    do("barrier.cluster.wait;")


@triton.jit
def meet():
    """Wait until all CTAs are here. What they have written before is seen."""
    do("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;")


@triton.jit
def own_room(BYTES: tl.constexpr):
    """Where the room begins, of so many bytes at the end of the dynamic shared memory: an address in shared memory."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 size; mov.u32 size, %dynamic_smem_size; mov.u32 $0, global_smem; add.u32 $0, $0, size;"
        " sub.u32 $0, $0, $1; and.b32 $0, $0, -16; }",
        "=&r,r", [tl.cast(BYTES, tl.int32)], tl.int32, True, 1,
    )  # fmt: skip


@triton.jit
def send(acc, at, owner):
    """Store each element of ``acc`` at the address ``at`` of the CTA ``owner``."""
    tl.inline_asm_elementwise(
        "{ .reg .pred near; .reg .b32 first, second, behind; mapa.shared::cluster.u32 first, $2, $4;"
        " mapa.shared::cluster.u32 second, $3, $5; add.u32 behind, first, 4; setp.eq.u32 near, behind, second;"
        " @near st.shared::cluster.v2.f32 [first], {$6, $7}; @!near st.shared::cluster.f32 [first], $6;"
        " @!near st.shared::cluster.f32 [second], $7; mov.b32 $0, 0; mov.b32 $1, 0; }",
        "=r,=r,r,r,r,r,f,f", [at, owner, acc], tl.int32, False, 2,
    )  # fmt: skip


@triton.jit
def fetch(at, FETCHED: tl.constexpr):
    """The floats at addresses of this CTA's own shared memory; ``FETCHED`` together, where they are side by side.

    A thread that stores 16 bytes of the output holds 8 elements of a row: of loads of one each, eight lanes of a warp
    would ask the same bank at once.
    """
    if FETCHED == 4:
        x = tl.inline_asm_elementwise(
            "{ .reg .pred near; .reg .b32 behind, odd; add.u32 behind, $4, 4; setp.eq.u32 near, behind, $5;"
            " add.u32 behind, $4, 8; setp.eq.and.u32 near, behind, $6, near; add.u32 behind, $4, 12;"
            " setp.eq.and.u32 near, behind, $7, near; and.b32 odd, $4, 15; setp.eq.and.u32 near, odd, 0, near;"
            " @near ld.shared.v4.f32 {$0, $1, $2, $3}, [$4]; @!near ld.shared.f32 $0, [$4];"
            " @!near ld.shared.f32 $1, [$5]; @!near ld.shared.f32 $2, [$6]; @!near ld.shared.f32 $3, [$7]; }",
            "=&f,=&f,=&f,=&f,r,r,r,r", [at], tl.float32, False, 4,
        )  # fmt: skip
    else:
        x = tl.inline_asm_elementwise("ld.shared.f32 $0, [$1];", "=f,r", [at], tl.float32, False, 1)
    return x


@triton.jit
def summed(acc, part, C: tl.constexpr):
    """The CTA's rows of the sum of all shares: ``[BLOCK_M // CLUSTER, BLOCK_N]``.

    ``acc``: the product of the share ``part``, ``[BLOCK_M, BLOCK_N]``. All have announced themselves.
    """
    SIZE: tl.constexpr = C.CLUSTER
    ROWS: tl.constexpr = C.BLOCK_M // C.CLUSTER
    PITCH: tl.constexpr = C.BLOCK_N + PAD
    BYTES: tl.constexpr = 4 * C.BLOCK_M * PITCH
    base = own_room(BYTES)
    rows, columns = tl.arange(0, C.BLOCK_M)[:, None], tl.arange(0, C.BLOCK_N)[None, :]
    await_all()
    send(acc, base + 4 * ((part * ROWS + rows % ROWS) * PITCH + columns), rows // ROWS)
    meet()
    at = base + 4 * (tl.arange(0, ROWS)[:, None] * PITCH + columns)
    total = fetch(at, C.FETCHED)
    for i in tl.static_range(1, SIZE):
        total += fetch(at + 4 * i * ROWS * PITCH, C.FETCHED)
    return total
