"""The ring without mbarriers: stages of shared memory between the copies of all warps and their multiplications.

There is no load warp: load and math are one loop, and every warp copies its share of a stage. A stage is full when each
warp has waited for its own copies and all warps have met at a barrier.

``direct``: copies bypass the registers, and stages are filled ``STAGES - 1`` steps ahead::

    for step in the first STAGES - 1:    copy into stage step; commit
    for step in the item's K steps:
      wait until STAGES - 2 groups are in flight         this warp's copies of the step are complete
      barrier                                            so are all warps'; all have read the previous stage
      read the step's stage
      copy step + STAGES - 1 into the previous stage; commit
      multiply
    barrier                                              all have read the last stages: the next item may begin

``staged``: copies go through registers, one step ahead, and there is one stage::

    fetch the first step, A's part, then B's
    for step in the item's K steps:
      barrier                                            all have read the stage
      for operand in A, B:
        wait until only the other's loads are in flight  this warp's part of the step is in its registers
        put it into the stage; fetch the next step's
      barrier                                            all have put
      read the stage; multiply

`tilestream_tools.verify.shared_ring` explores both with the hardware's units: a wait counts instructions (`vmcnt`, at
most 63), not groups, and a barrier does not wait for copies. The compiler places the loops' barriers between a wait, or
a put, and the read that follows; a barrier written here would wait for all copies, too. So **the read comes before the
copy**: a copy between wait and read would precede the barrier. The compiler also places the waits for fetched operands.
They are minimal if it knows the order of the loads. So loads have one order before and inside the loop (`in_order`),
and elements are rearranged when they are put (`fetched`). Tests check the compiled code.

**Inverse swizzle.** A copy past the registers writes shared memory linearly: each lane's bytes follow those of the
previous lane. Permuted cells are read without bank conflicts (`tilestream.core.swizzle`). So the *global* address is
permuted by the inverse, which is the swizzle itself, and the stage is read through the swizzled layout. With a swizzled
destination instead, each copy needs each lane's offset from another lane. A step of a bare loop, compiled with Triton
3.6 for bfloat16, has:

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
    """``vector`` elements a lane, neighbouring lanes: a warp copies one contiguous piece of a linear stage."""
    lanes = min(64, inner // vector)
    return gl.BlockedLayout([1, vector], [64 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def turned_layout(outer, inner, vector, warps):
    """A square of elements a lane, as large as a lane's share allows, for a transpose in registers.

    It is read by vectors along the inner dimension, and written by vectors along the outer one.
    """
    share = outer * inner // (64 * warps)
    side = vector
    while side * side > share and side > 1:
        side //= 2
    lanes = min(64, inner // side)
    return gl.BlockedLayout([side, side], [64 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def linear():
    """The layout of a stage for copies: linear."""
    return gl.SwizzledSharedLayout(1, 1, 1, [1, 0])


@gluon.constexpr_function
def permuted(how):
    """The layout of a stage for reads. ``how``: the swizzle's vector, every and period."""
    return gl.SwizzledSharedLayout(how[0], how[1], how[2], [1, 0])


@gluon.constexpr_function
def tile_shape(rows, block_k, k_major):
    """The shape of a stage's tile, with the contiguous dimension last."""
    return [rows, block_k] if k_major else [block_k, rows]


@gluon.jit
def make_stages(dtype: gl.constexpr, STAGES: gl.constexpr, S: gl.constexpr):
    """Shared memory for the stages of an operand. ``S``, here and below: `tilestream.kernels.config.Stage`."""
    TILE: gl.constexpr = tile_shape(S.ROWS, S.K, S.K_MAJOR or S.TURNED)
    return gl.allocate_shared_memory(dtype, [STAGES, TILE[0], TILE[1]], linear())


@gluon.jit
def indices(LAYOUT: gl.constexpr, OUTER: gl.constexpr, INNER: gl.constexpr):
    """The outer and the inner index of each element."""
    i = gl.arange(0, OUTER, gl.SliceLayout(1, LAYOUT)) + opaque_zero()
    j = gl.arange(0, INNER, gl.SliceLayout(0, LAYOUT))
    return i, j


@gluon.jit
def offsets_of(i, j, cell, x, last_k, VECTOR: gl.constexpr, LANE: gl.constexpr, S: gl.constexpr):
    """Offsets of the elements of a step of ``x`` (`Strided`), from the tile's first row and the step's first K.

    Parameters
    ----------
    i, j, cell
        Outer and inner index in the stage, and the cell of ``VECTOR`` elements for that place.
    last_k
        The last index of K, counted from the step's first. An element past it, or past row ``x.last``, is replaced by
        that one: such rows are not stored, and such elements of K are set to zero. The last cell may have elements past
        the end within the same 16 bytes.
    LANE
        The number of neighbouring elements that a lane copies, which the compiler cannot derive from the permutation.
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
    """Offsets of the elements that each lane copies past the registers: the inverse swizzle of its place."""
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
    """Wait until only ``AHEAD`` groups of this warp are in flight. The following read brings the barrier."""
    wait_for_groups(AHEAD)


@gluon.constexpr_function
def fetch_layout(rows, block_k, k_major, turned, vector, warps):
    """The layout in which a step is fetched into registers."""
    tile = tile_shape(rows, block_k, k_major)
    return turned_layout(*tile, vector, warps) if turned else copy_layout(tile[1], vector, warps)


@gluon.constexpr_function
def word_layout(rows, block_k, k_major, vector, warps):
    """`fetch_layout` of an 8-bit operand that is transposed in registers, in words of four elements."""
    made = fetch_layout(rows, block_k, k_major, True, vector, warps)
    down, across = made.size_per_thread
    return gl.BlockedLayout([down, across // 4], made.threads_per_warp, made.warps_per_cta, made.order)


@gluon.constexpr_function
def in_words(dtype, turned):
    """Whether an operand is fetched in words. LLVM would use one register for each 8-bit element."""
    return turned and dtype.primitive_bitwidth == 8


@gluon.jit
def fetch_offsets(x, last_k, S: gl.constexpr):
    """Offsets of what each lane fetches into registers, in words for an operand `in_words`: see `offsets_of`."""
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
    """Fetch a step of an operand into registers."""
    if WORDS:
        return load_words(x, offsets, OFFSETS_64BIT)
    elif OFFSETS_64BIT:
        return gl.load(x + offsets)
    else:
        return buffer_load(x, offsets)


@gluon.jit
def fetched(tile, dtype: gl.constexpr, S: gl.constexpr):
    """The elements of a fetched step. They are rearranged here, and not earlier."""
    if S.TURNED:
        tile = as_loaded(tile)
    if in_words(dtype, S.TURNED):
        LAYOUT: gl.constexpr = fetch_layout(S.ROWS, S.K, S.K_MAJOR, S.TURNED, S.VECTOR, S.WARPS)
        tile = elements(tile, dtype, tile_shape(S.ROWS, S.K, S.K_MAJOR), LAYOUT)
    return tile


@gluon.jit
def cut_off(tile, rest, S: gl.constexpr):
    """A fetched step with zeros from ``rest`` of K on, where its elements are undefined."""
    TILE: gl.constexpr = tile_shape(S.ROWS, S.K, S.K_MAJOR)
    LAYOUT: gl.constexpr = fetch_layout(S.ROWS, S.K, S.K_MAJOR, S.TURNED, S.VECTOR, S.WARPS)
    BITS: gl.constexpr = gl.int16 if tile.dtype.primitive_bitwidth == 16 else gl.int8
    i, j = indices(LAYOUT, TILE[0], TILE[1])
    kept = ((j < rest)[None, :] & (i >= 0)[:, None]) if S.K_MAJOR else ((i < rest)[:, None] & (j >= 0)[None, :])
    bits = gl.where(kept, tile.to(BITS, bitcast=True), gl.full(TILE, 0, BITS, LAYOUT))
    return bits.to(tile.dtype, bitcast=True)


@gluon.jit
def put(tile, stage, S: gl.constexpr):
    """Write a fetched step to its stage, permuted."""
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

    ``LANDED``: a wait and its barrier precede this read, so that it needs no other wait for copies.
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
