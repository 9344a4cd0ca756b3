"""The ring without mbarriers: stages of shared memory between the copies of all warps and their multiplications.

There is no load warp: load and math are one loop, and every warp copies its share of a stage. A stage is full when each
warp's count of copies in flight says so and all warps have met at a barrier.

``direct``: copies go past the registers, and stages are filled ``STAGES - 1`` steps ahead::

    for step in the first STAGES - 1:    copy into stage step; commit
    for step in the item's K steps:
      wait until STAGES - 2 groups are in flight         this warp's copies of the step have landed
      barrier                                            all warps' have; and all have read the stage before
      read the step's stage
      copy step + STAGES - 1 into the stage before it; commit
      multiply
    barrier                                              all have read the last stages: the next item may begin

``staged``: copies go through registers, one step ahead, and there is one stage::

    fetch the first step, A's part, then B's
    for step in the item's K steps:
      barrier                                            all have read the stage
      for operand in A, B:
        wait until the other's loads are in flight       this warp's part of the step is in its registers
        put it into the stage; fetch the next step's
      barrier                                            all have put
      read the stage; multiply

`tilestream_tools.verify.shared_ring` explores both with the hardware's units: a wait counts instructions (`vmcnt`, at
most 63), not groups, and a barrier waits for no copy. The compiler places the loops' barriers between a wait, or a put,
and the read that follows; a barrier written here would wait for all copies, too. So **the read comes before the copy**:
a copy between wait and read would come before the barrier. The compiler also places the waits for fetched operands.
They stay minimal while it knows the order of the loads: so loads keep one order before and inside the loop
(`in_order`), and elements are rearranged where they are put (`fetched`). Tests look at what was compiled.

**Inverse swizzle.** A copy past the registers writes shared memory linearly, a lane's bytes behind those of the lane
before. Cells are read without bank conflicts where they are permuted (`tilestream.core.swizzle`). So the *global*
address is permuted by the inverse, which is the swizzle itself, and the stage is read through the swizzled layout.
With a swizzled destination instead, each copy brings each lane's offset from another lane. A step of a bare loop,
compiled with Triton 3.6 for bfloat16, and its registers:

====================  =====================  ===========================  =====================
                      inverse swizzle        swizzled destination         of these, ds_bpermute
====================  =====================  ===========================  =====================
gfx950, 256x256x32    148 lines, 162 VGPRs   168 lines, 172 VGPRs         0, 4
gfx942, 128x128x32    156 lines, 116 VGPRs   249 lines, 133 VGPRs         0, 16
====================  =====================  ===========================  =====================

A stage's tile is ``[rows, K]`` for a K-major operand, else ``[K, rows]``: the inner elements are contiguous.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestream.core import ring, swizzle
from tilestream.kernels.cdna.compat import (
    as_loaded,
    buffer_load,
    commit,
    copy_to_shared,
    device,
    elements,
    load_landed,
    load_words,
    opaque_zero,
    viewed,
    wait_for_groups,
)

swizzled = device(swizzle.swizzled)
before = device(ring.before)
after = device(ring.after)


@gluon.constexpr_function
def copy_layout(inner, vector, warps):
    """``vector`` elements a lane, lanes side by side: what a warp copies lies in one piece of a linear stage."""
    lanes = min(64, inner // vector)
    return gl.BlockedLayout([1, vector], [64 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def turned_layout(outer, inner, vector, warps):
    """A square of elements a lane, as large as a lane's share allows: contiguous both ways, in registers.

    Read along the inner dimension and written along the outer one, by vectors each.
    """
    share = outer * inner // (64 * warps)
    side = vector
    while side * side > share and side > 1:
        side //= 2
    lanes = min(64, inner // side)
    return gl.BlockedLayout([side, side], [64 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def linear():
    """How copies see a stage: one element behind the other."""
    return gl.SwizzledSharedLayout(1, 1, 1, [1, 0])


@gluon.constexpr_function
def permuted(how):
    """How a stage is read. ``how``: the swizzle's vector, every and period."""
    return gl.SwizzledSharedLayout(how[0], how[1], how[2], [1, 0])


@gluon.constexpr_function
def tile_shape(rows, block_k, k_major):
    """A stage's tile: the contiguous dimension last."""
    return [rows, block_k] if k_major else [block_k, rows]


@gluon.jit
def make_stages(dtype: gl.constexpr, STAGES: gl.constexpr, S: gl.constexpr):
    """Room for so many stages of an operand. ``S``, here and below: `tilestream.kernels.config.Stage`."""
    TILE: gl.constexpr = tile_shape(S.ROWS, S.K, S.K_MAJOR or S.TURNED)
    return gl.allocate_shared_memory(dtype, [STAGES, TILE[0], TILE[1]], linear())


@gluon.jit
def indices(LAYOUT: gl.constexpr, OUTER: gl.constexpr, INNER: gl.constexpr):
    """The outer index of each element, and the inner one."""
    i = gl.arange(0, OUTER, gl.SliceLayout(1, LAYOUT)) + opaque_zero()
    j = gl.arange(0, INNER, gl.SliceLayout(0, LAYOUT))
    return i, j


@gluon.jit
def offsets_of(i, j, cell, x, last_k, VECTOR: gl.constexpr, LANE: gl.constexpr, S: gl.constexpr):
    """Where the elements of a step of ``x`` (`Strided`) lie, from the tile's first row and the step's first of K.

    Parameters
    ----------
    i, j, cell
        Outer and inner index in the stage, and the cell of ``VECTOR`` elements that is to be there.
    last_k
        The last that there is, from the first. What would lie past it, or past ``x.last``, is read from there again:
        such rows are not stored, such of K are set to zero. The last cell may hold elements past the end, of the same
        16 bytes.
    LANE
        Elements that a lane copies: they are neighbours, which no compiler sees behind the permutation.
    """
    if S.K_MAJOR:
        outer = gl.minimum(i, x.last)[:, None]
        inner = gl.minimum(cell, last_k // VECTOR)
    else:
        outer = gl.minimum(i, last_k)[:, None]
        inner = gl.minimum(cell, x.last // VECTOR)
    if S.OFFSETS_64BIT:
        outer = outer.to(gl.int64)
    at = outer * x.stride + inner * VECTOR + (j % VECTOR)[None, :]
    return gl.max_contiguous(gl.multiple_of(at, [1, LANE]), [1, LANE])


@gluon.jit
def copy_offsets(x, S: gl.constexpr):
    """What each lane copies past the registers: the inverse swizzle of where it writes."""
    SWIZZLE: gl.constexpr = S.SWIZZLE
    TILE: gl.constexpr = tile_shape(S.ROWS, S.K, S.K_MAJOR)
    LAYOUT: gl.constexpr = copy_layout(TILE[1], S.LANE, S.WARPS)
    i, j = indices(LAYOUT, TILE[0], TILE[1])
    cell = swizzled(i[:, None], (j // SWIZZLE[0])[None, :], SWIZZLE[1], SWIZZLE[2])
    return offsets_of(i, j, cell, x, S.K - 1, SWIZZLE[0], S.LANE, S)


@gluon.jit
def copy(x, x_offsets, x_stages, y, y_offsets, y_stages, stage):
    """Start the copies of a step into a stage, as one group."""
    copy_to_shared(x_stages.index(stage), x, x_offsets)
    copy_to_shared(y_stages.index(stage), y, y_offsets)
    commit()


@gluon.jit
def landed(AHEAD: gl.constexpr):
    """Wait until ``AHEAD`` groups of this warp are in flight. The barrier comes with the read that follows."""
    wait_for_groups(AHEAD)


@gluon.constexpr_function
def fetch_layout(rows, block_k, k_major, turned, vector, warps):
    """Who fetches what of a step into registers."""
    tile = tile_shape(rows, block_k, k_major)
    return turned_layout(*tile, vector, warps) if turned else copy_layout(tile[1], vector, warps)


@gluon.constexpr_function
def word_layout(rows, block_k, k_major, vector, warps):
    """The same of an operand of 8 bits that is turned, in words of four."""
    made = fetch_layout(rows, block_k, k_major, True, vector, warps)
    down, across = made.size_per_thread
    return gl.BlockedLayout([down, across // 4], made.threads_per_warp, made.warps_per_cta, made.order)


@gluon.constexpr_function
def in_words(dtype, turned):
    """Whether an operand is fetched so: of elements that no register holds, LLVM would make one each."""
    return turned and dtype.primitive_bitwidth == 8


@gluon.jit
def fetch_offsets(x, last_k, S: gl.constexpr):
    """What each lane fetches into registers: see `offsets_of`. Of an operand `in_words`, in words of four elements."""
    TILE: gl.constexpr = tile_shape(S.ROWS, S.K, S.K_MAJOR)
    if in_words(x.at.dtype.element_ty, S.TURNED):
        WORDS: gl.constexpr = word_layout(S.ROWS, S.K, S.K_MAJOR, S.VECTOR, S.WARPS)
        LANE: gl.constexpr = WORDS.size_per_thread[1]
        i, j = indices(WORDS, TILE[0], TILE[1] // 4)
        j = j * 4
        cell = (j // S.VECTOR)[None, :] + i[:, None] * 0
        at = offsets_of(i, j, cell, x, last_k, S.VECTOR, 1, S) // 4
        return gl.max_contiguous(gl.multiple_of(at, [1, LANE]), [1, LANE])
    else:
        LAYOUT: gl.constexpr = fetch_layout(S.ROWS, S.K, S.K_MAJOR, S.TURNED, S.VECTOR, S.WARPS)
        i, j = indices(LAYOUT, TILE[0], TILE[1])
        cell = (j // S.VECTOR)[None, :] + i[:, None] * 0
        return offsets_of(i, j, cell, x, last_k, S.VECTOR, LAYOUT.size_per_thread[1], S)


@gluon.jit
def fetch(x, offsets, OFFSETS_64BIT: gl.constexpr, WORDS: gl.constexpr = False):
    """A step of an operand, into registers."""
    if WORDS:
        return load_words(x, offsets, OFFSETS_64BIT)
    elif OFFSETS_64BIT:
        return gl.load(x + offsets)
    else:
        return buffer_load(x, offsets)


@gluon.jit
def fetched(tile, dtype: gl.constexpr, S: gl.constexpr):
    """What `fetch` brought, as elements, which are rearranged here and no earlier."""
    if S.TURNED:
        tile = as_loaded(tile)
    if in_words(dtype, S.TURNED):
        LAYOUT: gl.constexpr = fetch_layout(S.ROWS, S.K, S.K_MAJOR, S.TURNED, S.VECTOR, S.WARPS)
        tile = elements(tile, dtype, tile_shape(S.ROWS, S.K, S.K_MAJOR), LAYOUT)
    return tile


@gluon.jit
def cut_off(tile, rest, S: gl.constexpr):
    """Zeros in place of what a fetched step has from ``rest`` of K on, of which nothing is known."""
    TILE: gl.constexpr = tile_shape(S.ROWS, S.K, S.K_MAJOR)
    LAYOUT: gl.constexpr = fetch_layout(S.ROWS, S.K, S.K_MAJOR, S.TURNED, S.VECTOR, S.WARPS)
    BITS: gl.constexpr = gl.int16 if tile.dtype.primitive_bitwidth == 16 else gl.int8
    i, j = indices(LAYOUT, TILE[0], TILE[1])
    kept = ((j < rest)[None, :] & (i >= 0)[:, None]) if S.K_MAJOR else ((i < rest)[:, None] & (j >= 0)[None, :])
    bits = gl.where(kept, tile.to(BITS, bitcast=True), gl.full(TILE, 0, BITS, LAYOUT))
    return bits.to(tile.dtype, bitcast=True)


@gluon.jit
def put(tile, stage, S: gl.constexpr):
    """Write what was fetched to its stage, permuted."""
    SWIZZLE: gl.constexpr = S.SWIZZLE
    SHAPE: gl.constexpr = tile_shape(S.ROWS, S.K, S.K_MAJOR or S.TURNED)
    if S.TURNED:
        tile = tile.permute(1, 0)
    viewed(stage, SHAPE, permuted(SWIZZLE)).store(tile)


@gluon.jit
def operand(
    stage, S: gl.constexpr, INDEX: gl.constexpr, MATH: gl.constexpr, WIDTH: gl.constexpr, LANDED: gl.constexpr
):  # fmt: skip
    """A stage's tile as operand ``INDEX`` of the multiplication, ``WIDTH`` elements of K a lane.

    ``LANDED``: a wait and its barrier are behind us, and no other wait for copies is needed.
    """
    SWIZZLE: gl.constexpr = S.SWIZZLE
    K_MAJOR: gl.constexpr = S.K_MAJOR or S.TURNED
    SHAPE: gl.constexpr = tile_shape(S.ROWS, S.K, K_MAJOR)
    LAYOUT: gl.constexpr = gl.DotOperandLayout(INDEX, MATH, WIDTH)
    tile = viewed(stage, SHAPE, permuted(SWIZZLE))
    if (INDEX == 1) == K_MAJOR:
        tile = tile.permute([1, 0])
    if LANDED:
        return load_landed(tile, LAYOUT)
    else:
        return tile.load(LAYOUT)
