"""What Triton 3.6, 3.7 and 3.9 call by different names, bound once: kernels of this package call these."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna3, cdna4
from triton.experimental.gluon.language.amd.cdna4 import async_copy

# gfx942 has no module of its own for these; they lower there, too, at 32 bits a lane.
copy_to_shared = async_copy.buffer_load_to_shared
commit = async_copy.commit_group
wait_for_groups = async_copy.wait_group
load_landed = async_copy.load_shared_relaxed
buffer_load = cdna3.buffer_load
buffer_store = cdna3.buffer_store
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
reinterpret = getattr(gl.shared_memory_descriptor, "_reinterpret", None) or gl.shared_memory_descriptor.reinterpret
#: A plain integer function as kernels of this package call it: see `tilestream.kernels.device.jit`.
device = gluon.jit


@gluon.jit
def viewed(buffer, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The same bytes of shared memory, seen through another layout."""
    return reinterpret(buffer, buffer.dtype, SHAPE, LAYOUT)


@gluon.jit
def multiply_add(a, b, acc, FORMATS: gl.constexpr):
    """``acc + a @ b``. ``FORMATS``: of 8 bits on gfx950, whose fast instruction is the one with scales; they are 1."""
    if FORMATS is None:
        return cdna3.mfma(a, b, acc)
    else:
        A_FORMAT: gl.constexpr = FORMATS[0]
        B_FORMAT: gl.constexpr = FORMATS[1]
        return cdna4.mfma_scaled(a, None, A_FORMAT, b, None, B_FORMAT, acc)


@gluon.jit
def uniform(x):
    """``x``, of which all lanes have the same value, in a scalar register.

    What comes of an atomic or of a load is in vector registers. A buffer's address made of it would be taken for one
    that differs from lane to lane, and each copy would become a loop over the lanes.

    The compiler does not look into assembly for hazards: on gfx942 a lane's register may be read so one state after it
    was written, and what is read so may be an address five states later (LLVM's GCNHazardRecognizer).
    """
    return gl.inline_asm_elementwise(
        "s_nop 0\n\tv_readfirstlane_b32 $0, $1\n\ts_nop 4", "=s,v", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def reciprocal(x):
    """``1 / x`` to the last bit or the one before: the instruction, without the ten that make a division of it.

    On gfx942 another unit may read what it gives one state later.
    """
    return gl.inline_asm_elementwise("v_rcp_f32 $0, $1\n\ts_nop 0", "=v,v", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def load_scalar(at):
    """The int32 at an address that is the same for all lanes, which nobody writes while the kernel runs.

    By way of the scalar cache, and counted apart: a load of a lane's is counted with the copies in flight, in order, so
    that who waits for it waits for all of them.
    """
    return gl.inline_asm_elementwise(
        "s_load_dword $0, $1, 0x0\n\ts_waitcnt lgkmcnt(0)", "=s,s", [at.to(gl.int64, bitcast=True)], dtype=gl.int32,
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def opaque_zero():
    """0, of which the compiler does not know it.

    What is made of it is made where it stands. Else all that is the same for each item, such as the offsets of a
    tile's elements from its corner, is made once before the loop, and takes registers in all of it.
    """
    return gl.inline_asm_elementwise("s_mov_b32 $0, 0", "=s", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def in_order():
    """Keeps loads and stores on their side of it.

    A wait counts loads from the oldest on. If those before a loop are started in another order than those in it, a wait
    in the loop is for whatever came last in either, and so for all.
    """
    gl.inline_asm_elementwise("s_mov_b32 $0, 0", "=s", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def as_loaded(tile):
    """``tile``, of 16 or 32 bits, in the registers that it was loaded into, until here.

    What rearranges elements is otherwise moved up to the load, a step before, and waits there for all that is on its
    way.
    """
    EACH: gl.constexpr = 32 // tile.dtype.primitive_bitwidth
    return gl.inline_asm_elementwise("", "=v,0", [tile], dtype=tile.dtype, is_pure=False, pack=EACH)


@gluon.jit
def load_words(at, offsets, OFFSETS_64BIT: gl.constexpr):
    """Four neighbours of 8 bits as one word, at offsets in words."""
    words = at.to(gl.pointer_type(gl.int32))
    if OFFSETS_64BIT:
        return gl.load(words + offsets)
    else:
        return cdna3.buffer_load(words, offsets)


@gluon.jit
def elements(words, dtype: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Words as the elements that they are made of, four neighbours each."""
    even = gl.join(words.to(gl.int8), (words >> 16).to(gl.int8))
    odd = gl.join((words >> 8).to(gl.int8), (words >> 24).to(gl.int8))
    tile = gl.join(even, odd).reshape(SHAPE)
    return gl.convert_layout(tile, LAYOUT, assert_trivial=True).to(dtype, bitcast=True)


@gluon.jit
def settled(x):
    """``x``, before which nothing is read of shared memory that stands behind it: it would wait in registers."""
    return gl.inline_asm_elementwise("; settled", "=v,0", [x], dtype=x.dtype, is_pure=False, pack=1)
