"""The compile gate of Hopper's GEMM whose clusters share a tile's K: `tilestream.plan.policy.hopper_cluster`.

Each tile, both ways round, in each number of parts:

* ``plain``: no epilogue, or of 8-bit operands a scale each;
* ``full``: alpha, a scale a row and column, bias, residual, gelu;
* ``odd``: an output that TMA cannot address; ``batch``: several products.

Registers of a thread, by ``setmaxnreg``, are those of `gates.hopper_gemm`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from gates.engine import RELEASE, Case, IsWanted, Rules, fill_gemm, shared_memory
from gates.hopper import DEVICE, Assembly, described
from gates.hopper_gemm import WAITING
from tilestream.core.exchange import cluster_of
from tilestream.launch.gemm_arguments import Layout
from tilestream.launch.hopper.arguments import ClusterArguments
from tilestream.plan.candidate import Forced
from tilestream.plan.plan import of_candidate
from tilestream.plan.policy import hopper_cluster
from tilestream.plan.policy.hopper_cluster import room, ways
from tilestream.plan.problem import FP8, ITEMSIZE, Problem
from tilestream_tools.isa import sass

_K = 4096
_DTYPES = ("bfloat16", "float8_e4m3fn")
HOWS = {"plain": ("nt", "nn"), "full": ("nt",), "odd": ("tn",), "batch": ("nt",)}
QUICK = (
    "bfloat16 64x64 in 2 plain nt", "bfloat16 64x128 in 4 swapped full nt", "bfloat16 128x128 in 8 odd tn",
    "float8_e4m3fn 128x64 in 2 plain nt", "bfloat16 32x64 in 2 swapped batch nt",
)  # fmt: skip


def cases(is_wanted: IsWanted) -> Iterator[Case]:
    for dtype, out_dtype in ((dtype, out) for dtype in _DTYPES for out in ("bfloat16", "float32")):
        for way, swapped, how in itertools.product(ways(dtype, out_dtype, DEVICE.shared), (False, True), HOWS):
            layouts = ("nt",) if dtype in FP8 else HOWS[how]
            for layout in layouts:
                rows, columns = way.tile.rows, way.tile.columns
                tile = f"{columns}x{rows}" if swapped else f"{rows}x{columns}"
                to = " to float32" * (out_dtype != "bfloat16")
                name = f"{dtype}{to} {tile} in {way.parts}{' swapped' * swapped} {how} {layout}"
                if (not swapped or rows != columns) and (dtype not in FP8 or how != "odd") and is_wanted("sm_90a", name):
                    yield from _made(name, way, swapped, dtype, out_dtype, how, layout)


def _made(
    name: str, way: hopper_cluster.Way, swapped: bool, dtype: str, out_dtype: str, how: str, layout: str
) -> Iterator[Case]:
    rows, columns = way.tile.rows, way.tile.columns
    block = (columns, rows) if swapped else (rows, columns)
    m, n, batch = 2 * block[0], 3 * block[1], 2 if how == "batch" else 1
    full = how == "full"
    problem = Problem(
        m, n, _K, batch, dtype, out_dtype, scales="row" if full else "tensor" if dtype in FP8 else "none",
        fast_accum=dtype in FP8, plain=how in ("plain", "batch"),
    )  # fmt: skip
    found = hopper_cluster.candidates(
        problem, DEVICE, DEVICE.workers, kinds=("stream_k",), forced=Forced(block, shares=way.parts * 6 * batch)
    )
    chosen = next((one for one in found if one.swap_ab == swapped), None)
    if chosen is None:
        return
    a = (_K * m, _K, 1) if layout[0] == "n" else (_K * m, 1, m)
    b = (_K * n, n, 1) if layout[1] == "n" else (_K * n, 1, _K)
    out = (0, n + 1, 1) if how == "odd" else (m * n, n, 1)
    made = Layout(*(x if batch > 1 else (0, *x[1:]) for x in (a, b, out)))
    if full:
        made = made._replace(
            bias=1, residual=made.out, scaled=True, activation="gelu", scale_a=(0, 1), scale_b=(0, 1)
        )
    yield Case("sm_90a", name, of_candidate(problem, DEVICE, "hopper", chosen, "the gate's"), made, way)


def source(case: Case) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    arguments, problem = ClusterArguments(case.plan, case.layout), case.plan.problem
    x, y = problem.dtypes[::-1] if case.plan.swap_ab else problem.dtypes
    maps = [described(made, dtype) for made, dtype in (
        (arguments.x, x), *((part, y) for part in arguments.y), (arguments.out, problem.out_dtype),
    )]  # fmt: skip
    return arguments.kernel, fill_gemm(arguments, case.plan, case.layout, maps), arguments.options


def rules(case: Case, kernel: Any, said: str) -> Rules:
    plan, found = case.plan, Assembly(kernel, said)
    problem, arguments = plan.problem, ClusterArguments(plan, case.layout)
    tile, parts, size = case.how.tile, cluster_of(plan.schedule), ITEMSIZE[problem.dtype]
    out_size = ITEMSIZE[problem.out_dtype]
    names = {"bfloat16": "bf16", "float8_e4m3fn": "e4m3"}
    stored = arguments.out is not None
    loops = sass.k_loops(found.sass)
    copies = [
        tile.lines if made.box[-1] == plan.block[2] else -(-made.box[-1] * size // 128)
        for made in (arguments.x, arguments.y[0])
        if made is not None
    ]
    buffers = tile.loops * plan.buffers * tile.rows_per_loop * plan.strip * out_size
    lines = tile.loops * tile.rows_per_loop * arguments.config.STRIP * out_size * (arguments.config.STORE == "lines")
    ring = plan.stages * 128 * tile.lines * (tile.rows + tile.columns)
    strips = arguments.config.STRIPS
    a_float = tile.rows_per_loop * tile.columns // 128  # floats that a thread sends, two at once
    return {
        **found.rules(
            registers={*plan.registers, *WAITING[tile.loops]},
            products={f"m64n{tile.columns}k{32 // size}.f32.{names[problem.dtype]}.{names[problem.dtype]}"},
            loads=copies[0] * tile.loops + copies[1], stores=tile.loops * strips * stored, looks=0, naps=0,
        ),
        # Each part of a worker's warps arrives twice and waits twice. The three that only do that have one text on 3.9.
        "waits for the cluster": (
            found.count_ptx(r"\bbarrier\.cluster\.wait"), 2 * (tile.loops + 1 + (1 if RELEASE >= (3, 9) else 3)),
        ),
        "sums that are sent, two at once": (
            found.count_ptx(r"\bst\.shared::cluster\.v2\.f32"), tile.loops * a_float // 2
        ),
        "sums that are read, two at once": (found.count_sass(r"\bLDS\.64"), range(tile.loops * a_float // 2, 10**6)),
        "K loops": ([loop["gmma"] for loop in loops], [plan.block[2] * size // 32] * tile.loops),
        "multiplications in flight": ({loop["in_flight"] for loop in loops}, {1}),
        "stages": shared_memory(kernel, case.arch, ring + (buffers if stored else lines)),
        "shared memory has room for the sums": (
            kernel.metadata.shared + room(tile.rows, tile.columns) <= DEVICE.shared, True
        ),
        "parts": (parts, case.how.parts),
    }  # fmt: skip
