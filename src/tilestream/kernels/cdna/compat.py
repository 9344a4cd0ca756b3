"""Functions whose names differ between Triton 3.6, 3.7 and 3.9. Kernels of this package call these."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna3, cdna4
from triton.experimental.gluon.language.amd.cdna4 import async_copy

# Gluon has no module for gfx942 with these; they lower there, too, at 32 bits a lane.
copy_to_shared = async_copy.buffer_load_to_shared
commit = async_copy.commit_group
wait_for_groups = async_copy.wait_group
load_landed = async_copy.load_shared_relaxed
buffer_load = cdna3.buffer_load
buffer_store = cdna3.buffer_store
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
reinterpret = getattr(gl.shared_memory_descriptor, "_reinterpret", None) or gl.shared_memory_descriptor.reinterpret
#: A plain integer function for kernels of this package: see `tilestream.kernels.device.jit`.
device = gluon.jit


@gluon.jit
def viewed(buffer, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """A view of shared memory through another layout."""
    return reinterpret(buffer, buffer.dtype, SHAPE, LAYOUT)


@gluon.jit
def multiply_add(a, b, acc, FORMATS: gl.constexpr):
    """``acc + a @ b``. ``FORMATS``: of 8-bit operands on gfx950, whose fast instruction takes scales; these are 1."""
    if FORMATS is None:
        return cdna3.mfma(a, b, acc)
    else:
        A_FORMAT: gl.constexpr = FORMATS[0]
        B_FORMAT: gl.constexpr = FORMATS[1]
        return cdna4.mfma_scaled(a, None, A_FORMAT, b, None, B_FORMAT, acc)


@gluon.jit
def uniform(x):
    """``x``, which is the same in all lanes, in a scalar register.

    The result of an atomic or a load is in vector registers. The compiler would take a buffer address made from it for
    one that differs between lanes, and make a loop over the lanes of each copy.

    The compiler does not check assembly for hazards. On gfx942 a vector register may be read this way one wait state
    after its write, and the result may be used as an address five wait states later (LLVM's GCNHazardRecognizer).
    """
    return gl.inline_asm_elementwise(
        "s_nop 0\n\tv_readfirstlane_b32 $0, $1\n\ts_nop 4", "=s,v", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def reciprocal(x):
    """``1 / x``, exact to the last bit or two: one instruction instead of the ten more of an exact division.

    On gfx942 another unit may read the result one wait state later.
    """
    return gl.inline_asm_elementwise("v_rcp_f32 $0, $1\n\ts_nop 0", "=v,v", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def load_scalar(at):
    """Load the int32 at an address that is the same in all lanes, and constant while the kernel runs.

    It goes through the scalar cache and has a counter of its own. A vector load would be counted in order with the
    copies in flight, so that a wait for it would wait for all of them.
    """
    return gl.inline_asm_elementwise(
        "s_load_dword $0, $1, 0x0\n\ts_waitcnt lgkmcnt(0)", "=s,s", [at.to(gl.int64, bitcast=True)], dtype=gl.int32,
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def opaque_zero():
    """0, as a value that the compiler does not know.

    Values computed from it are computed in place. Otherwise the compiler hoists all that is the same for each item,
    such as the offsets of a tile's elements from its corner, out of the loop, where they occupy registers throughout.
    """
    return gl.inline_asm_elementwise("s_mov_b32 $0, 0", "=s", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def in_order():
    """A barrier of the compiler: loads and stores are not moved across it.

    A wait counts loads from the oldest on. If the loads before a loop were issued in another order than those in it, a
    wait in the loop would have to cover the last of either, and so all.
    """
    gl.inline_asm_elementwise("s_mov_b32 $0, 0", "=s", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def as_loaded(tile):
    """``tile``, of 16 or 32 bits, kept up to here in the registers that it was loaded into.

    Otherwise the compiler moves the rearrangement of elements up to the load, one step earlier, where it waits for all
    loads in flight.
    """
    EACH: gl.constexpr = 32 // tile.dtype.primitive_bitwidth
    return gl.inline_asm_elementwise("", "=v,0", [tile], dtype=tile.dtype, is_pure=False, pack=EACH)


@gluon.jit
def load_words(at, offsets, OFFSETS_64BIT: gl.constexpr):
    """Load four neighbouring 8-bit elements as one word, at offsets in words."""
    words = at.to(gl.pointer_type(gl.int32))
    if OFFSETS_64BIT:
        return gl.load(words + offsets)
    else:
        return cdna3.buffer_load(words, offsets)


@gluon.jit
def elements(words, dtype: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The elements of words, four neighbours each."""
    even = gl.join(words.to(gl.int8), (words >> 16).to(gl.int8))
    odd = gl.join((words >> 8).to(gl.int8), (words >> 24).to(gl.int8))
    tile = gl.join(even, odd).reshape(SHAPE)
    return gl.convert_layout(tile, LAYOUT, assert_trivial=True).to(dtype, bitcast=True)


@gluon.jit
def settled(x):
    """``x``. Later reads of shared memory are not moved before it, where they would occupy registers."""
    return gl.inline_asm_elementwise("; settled", "=v,0", [x], dtype=x.dtype, is_pure=False, pack=1)
