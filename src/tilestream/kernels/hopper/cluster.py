"""The Hopper GEMM of few tiles: the CTAs of a cluster have a part of a tile's K each, and add up in shared memory.

::

    load warp of each CTA                   math warps of each CTA
      announce                                announce
      for stage in its K steps: TMA loads     for stage in ring: wgmma
      await all                               await all                                (all CTAs run)
      meet                                    for each CTA: its strips of the tile -> that CTA's room
                                              meet                                     (all have written)
                                              its strips: the sum of all parts in K order; epilogue; store

With fewer tiles than SMs, an SM's way from L2 bounds the time, and not memory. Smaller tiles keep more SMs busy, but
each of them reads more for what it multiplies. Parts of K do not: of 64 x 4096 x 4096, 128 SMs with tiles of 32 x 64
read 100 MB, and 128 SMs with halves of tiles of 64 x 64 read 67 MB.

The protocol is that of `tilestream.kernels.portable.cluster`, and `tilestream_tools.verify.cluster` explores it: no
partial result goes through global memory, nothing is counted, and all CTAs finish a part of the tile. Here a strip of
the accumulator keeps its layout on the way, so a thread reads what the threads in its place have sent.

A cluster's barrier counts all threads of its CTAs. So the load warp takes part, and so do the three warps that only
fill its warp group.

The room lies behind what Triton gives the kernel, which does not know of it: `room` says how much a launch adds.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tilestream.core.structs import Epilogue, Item, Loads, LocalRows, Matrix, Place, Ring, Vector, Work
from tilestream.kernels.device.jit import entry
from tilestream.kernels.device.schedule import tile_at
from tilestream.kernels.hopper.epilogue import (
    load_alpha,
    mma_layout,
    pending,
    place_in_partial,
    store_strip,
    strip_of,
)
from tilestream.kernels.hopper.gemm import make_stages
from tilestream.kernels.hopper.load import load_steps, locate
from tilestream.kernels.hopper.multiply import product
from tilestream.kernels.hopper.pair import do, meet
from tilestream.kernels.hopper.ring import make_barriers


@gluon.jit
def announce():
    """Say that this warp runs. Does not wait."""
    do("barrier.cluster.arrive.relaxed; mov.b32 $0, $1;")


@gluon.jit
def await_all():
    """Wait until all CTAs run: those that have not begun have no memory to write to."""
    do("barrier.cluster.wait; mov.b32 $0, $1;")


@gluon.jit
def own_room(BYTES: gl.constexpr):
    """Where the room begins, of so many bytes at the end of the dynamic shared memory: an address in shared memory."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 size; mov.u32 size, %dynamic_smem_size; mov.u32 $0, global_smem; add.u32 $0, $0, size;"
        " sub.u32 $0, $0, $1; and.b32 $0, $0, -16; }",
        "=&r,r", [tl.cast(BYTES, tl.int32)], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def room_of(base, owner):
    """The address of the room of the CTA ``owner``, whose own address for it is ``base``."""
    return gl.inline_asm_elementwise(
        "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", [base, owner], dtype=gl.int32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def send(x, at):
    """Store a strip at the addresses ``at`` of a CTA of the cluster: pairs that are side by side at once."""
    gl.inline_asm_elementwise(
        "st.shared::cluster.v2.f32 [$2], {$4, $5}; mov.b32 $0, 0; mov.b32 $1, 0;", "=r,=r,r,r,f,f", [at, x],
        dtype=gl.int32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def fetch(at):
    """The floats at addresses of this CTA's own shared memory, two at once."""
    return gl.inline_asm_elementwise(
        "ld.shared.v2.f32 {$0, $1}, [$2];", "=f,=f,r,r", [at], dtype=gl.float32, is_pure=False, pack=2
    )  # fmt: skip


@gluon.jit
def part_item(work, C: gl.constexpr):
    """The `Item` of this CTA: its part of a tile's K."""
    tile, part = gl.program_id(0) // C.PARTS, gl.program_id(0) % C.PARTS
    steps = work.k_steps // C.PARTS
    ORDER: gl.constexpr = C.ORDER
    each = work.num_m * work.num_n
    pm, pn = tile_at(tile % each, work.num_m, work.num_n, work, ORDER, C.TRANSPOSED)
    return Item(tile // each, pm, pn, part * steps, (part + 1) * steps, part, C.PARTS, 0, 0)


@gluon.jit
def load_part(loads, ring, work, C: gl.constexpr):
    """Producer, the load warp: load the K steps of this CTA."""
    announce()
    if C.CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    zero = tl.cast(0, tl.int32)
    item = part_item(work, C)
    load_steps(item.k_begin, item.k_end, locate(loads, item, C), loads, ring, Place(zero, zero), C)
    await_all()
    meet()


@gluon.jit
def idle(ring):
    """A warp of the load warp's group that only takes part in the cluster's barriers."""
    announce()
    await_all()
    meet()


@gluon.jit
def math_part(WHO: gl.constexpr, ring, work, e, C: gl.constexpr):
    """Consumer ``WHO``: multiply this CTA's K steps, send the sums to their CTAs, and finish this CTA's strips."""
    announce()
    if C.CHAINED:
        gdc_wait()
    epilogue = Epilogue(
        e.out, e.residual, e.bias, e.row_scale, e.column_scale, load_alpha(e, C), e.beta, e.rows, e.columns, e.map,
        e.buffers,
    )  # fmt: skip
    WIDTHS: gl.constexpr = C.WIDTHS
    HALF: gl.constexpr = WHO if C.HALVES > 1 else 0
    SIZE: gl.constexpr = C.HALF_ROWS * C.STRIP  # floats of a consumer's strip
    PARTS: gl.constexpr = C.PARTS
    STRIPS: gl.constexpr = C.STRIPS
    EACH: gl.constexpr = C.STRIPS * C.HALVES * SIZE  # floats of a CTA's strips
    zero = tl.cast(0, tl.int32)
    item = part_item(work, C)
    pr, pc = item.pm, item.pn
    if C.SWAP_AB:
        pr, pc = item.pn, item.pm
    order: gl.constexpr = None
    accs, _ = product(ring, order, Place(zero, zero), item.k_end - item.k_begin, WHO, C)
    await_all()
    BYTES: gl.constexpr = 4 * PARTS * EACH
    base = own_room(BYTES)
    place = 4 * (HALF * C.STRIPS * SIZE + place_in_partial(C.HALF_ROWS, 0, C.STRIP, C.STRIP))
    for owner in gl.static_range(PARTS):
        there = room_of(base, zero + owner) + 4 * item.part * EACH
        for i in gl.static_range(STRIPS):
            x = strip_of(accs, (owner * C.STRIPS + i) * C.STRIP, WIDTHS, C.STRIP, C.HALF_ROWS)
            send(x, there + place + 4 * i * SIZE)
    meet()
    row = pr * C.ROWS + HALF * C.HALF_ROWS
    column = pc * C.COLUMNS + item.part * C.STRIPS * C.STRIP
    for i in gl.static_range(STRIPS):
        x = fetch(base + place + 4 * i * SIZE)
        for part in gl.static_range(1, PARTS):
            x += fetch(base + place + 4 * (part * EACH + i * SIZE))
        store_strip(
            x, epilogue, item.batch, row, column + i * C.STRIP, WHO * C.BUFFERS + i % C.BUFFERS,
            pending(i, C.STRIPS, C.BUFFERS), C,
        )  # fmt: skip
    if C.STORE == "tma":
        tma.store_wait(0)


@entry(
    gluon.jit,
    first="x_batched",
    specialised=("stride_or", "stride_oc", "stride_bias", "stride_rr", "stride_rc", "stride_sr", "stride_tc"),
)
def clustered(
    x_map, y_map, y_map_1, y_map_2, out_map, out, bias, residual, row_scale, column_scale, table,
    x_batched, y_batched, rows, columns,
    stride_ob, stride_or, stride_oc, stride_bias, stride_rb, stride_rr, stride_rc, stride_sb, stride_sr,
    stride_tb, stride_tc, alpha, beta,
    batches, num_m, num_n, k_steps, group, first, band,
    C: gl.constexpr,
):  # fmt: skip
    """``out = activation(alpha * row_scale * column_scale * x @ y^T + bias + beta * residual)``, a CTA for each part.

    The parameters are those of `tilestream.kernels.hopper.gemm.gemm`; ``C`` is a
    `tilestream.kernels.config.HopperClusterConfig`. The CTAs of a cluster follow each other in the grid, which is
    (tiles x parts,).
    """
    y_maps = (y_map,)
    if len(C.WIDTHS) > 1:
        y_maps = y_maps + (y_map_1,)
    if len(C.WIDTHS) > 2:
        y_maps = y_maps + (y_map_2,)
    x_stages = make_stages(x_map, C.STAGES * C.HALVES)
    y_stages = ()
    for i in gl.static_range(len(C.WIDTHS)):
        y_stages = y_stages + (make_stages(y_maps[i], C.STAGES),)
    if C.STORE == "tma":
        out_buffers = make_stages(out_map, C.LOOPS * C.BUFFERS)
    else:
        out_buffers: gl.constexpr = None
    ring = Ring(x_stages, y_stages, make_barriers(C.STAGES, 1), make_barriers(C.STAGES, C.HALVES))
    loads = Loads(x_map, y_maps, LocalRows(None, 0, 0, 1), x_batched, y_batched, 0)
    work = Work(batches, num_m, num_n, k_steps, 0, 0, 0, 0, table, group, first, band, 0)
    epilogue = Epilogue(
        Matrix(out, stride_ob, stride_or, stride_oc), Matrix(residual, stride_rb, stride_rr, stride_rc),
        Vector(bias, 0, stride_bias), Vector(row_scale, stride_sb, stride_sr),
        Vector(column_scale, stride_tb, stride_tc),
        alpha, beta, rows, columns, out_map, out_buffers,
    )  # fmt: skip
    if C.LOOPS == 2:
        gl.warp_specialize([
            (math_part, (0, ring, work, epilogue, C)),
            (math_part, (1, ring, work, epilogue, C)),
            (load_part, (loads, ring, work, C)),
            (idle, (ring,)), (idle, (ring,)), (idle, (ring,)),
        ], [4, 1, 1, 1, 1], [C.MATH_REGISTERS] + [C.LOAD_REGISTERS] * 4)  # fmt: skip
    else:
        gl.warp_specialize([
            (math_part, (0, ring, work, epilogue, C)),
            (load_part, (loads, ring, work, C)),
            (idle, (ring,)), (idle, (ring,)), (idle, (ring,)),
        ], [1, 1, 1, 1], [C.LOAD_REGISTERS] * 4)  # fmt: skip
