"""Compile what the GPU tests and benchmarks launch, on all cores at once, before they run one by one.

``python tests/gpu/precompile.py [tests] [schedules] [arrival] [copies] [benchmarks] [publish] [distributed]``. It only
saves time: a kernel that it leaves out is compiled at its launch. Without a GPU it compiles for an H100.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import hopper_cases as hopper
import schedule_cases as schedules
from benchmarks.gemm.shapes import EPILOGUE, FP8, QUACK, SEARCH, VARIANTS, suite
from gates import hopper_gemm
from gates.hopper import no_gpu
from gpu_cases import BOUNDS, BOUNDS_N, CASES, E4M3, F32, FP8_CASES, KINDS, UNIFORM, WORKER_CASES, Case, K, M, N

from tilestream.core.chunks import Chunks
from tilestream.core.device import DeviceProperties
from tilestream.core.operands import Epilogue
from tilestream.kernels.portable.gemm import gemm as portable_gemm
from tilestream.launch.gemm_arguments import Layout, is_aligned
from tilestream.launch.portable.arguments import Arguments
from tilestream.ops import gpu
from tilestream.ops.scales import FP8_DTYPES
from tilestream.plan.plan import Plan
from tilestream.plan.planner import plan_problem
from tilestream.plan.problem import Incoming, Problem, dtype_name
from tilestream.plan.search import search_space
from tilestream_tools.isa.build import Pointer
from tilestream_tools.isa.build import build as compiled
from tilestream_tools.isa.kernels import copy_arguments, gate_arguments

#: The device where there is no GPU. A plan depends a little on the clock.
STAND_IN = DeviceProperties(
    "an H100", "portable", 132, 256 * 1.98e9, 3.35e12, "a stand-in", "sm_90", 232448,
    (("float16", 4096 * 1.98e9), ("bfloat16", 4096 * 1.98e9), ("tf32", 2048 * 1.98e9), ("fp8", 8192 * 1.98e9)),
)  # fmt: skip


class Job(NamedTuple):
    """A launch: its plan and layout, addresses modulo 16 of a, b and out, whether there is a probe, or a trace.

    ``apart``: rows of A that stand apart.
    """

    plan: Plan
    layout: Layout
    address: tuple[int, int, int] = (0, 0, 0)
    probe: bool = False
    trace: bool = False
    apart: int | None = None


def job(
    device: DeviceProperties, case: Case, *, tile=None, queues=None, order=None, rows=None, columns=None,
    backend=None, probe=False, copied=(0, 0),
) -> Job | None:  # fmt: skip
    """What `tilestream.ops.gpu` would launch for a case."""
    operands, out = case.operands("meta"), case.output("meta")
    a, b, bias, residual = operands.values()
    scale_a, scale_b = case.scale("meta").values()
    if not out.numel():
        return None
    address = (a.data_ptr() % 16, b.data_ptr() % 16, out.data_ptr() % 16)
    batch = a.shape[0] if a.dim() == 3 else 1
    layout = Layout(
        gpu._strides(a), gpu._strides(b), gpu._strides(out), None if bias is None else 1,
        None if residual is None or case.beta == 0 else gpu._strides(residual), case.alpha != 1,
        case.activation or "none", gpu._scale_strides(scale_a, -2), gpu._scale_strides(scale_b, -1),
    )  # fmt: skip
    scales = Epilogue(scale_a=scale_a, scale_b=scale_b).scales
    plain = not (bias is not None or residual is not None or case.activation or case.alpha != 1 or scales != "none")
    (m, k), n = a.shape[-2:], b.shape[-1]
    problem = Problem(
        m, n, k, batch, dtype_name(a.dtype), dtype_name(out.dtype),
        None if rows is None else Incoming(rows, 0, copied[0]),
        None if columns is None else Incoming(columns, 0, copied[1]),
        batch > 1 and a.stride(0) == 0,
        tf32=case.tf32,
        aligned=is_aligned((m, k), layout.a[1:], layout.a[0], address[0])
        and is_aligned((k, n), layout.b[1:], layout.b[0], address[1]),
        no_tma=gpu._no_tma(a, b, layout),
        plain=plain and gpu._by_tma(out, layout),
        b_dtype=dtype_name(b.dtype) if b.dtype != a.dtype else "", scales=scales,
        fast_accum=case.fast_accum or case.dtype not in FP8_DTYPES,
    )  # fmt: skip
    make = plan_problem.__wrapped__ if order else plan_problem
    plan = make(problem, case.workers, case.schedule, tile, order, queues, device=device, backend=backend)
    return Job(plan, layout, address, probe)


# What is launched ----------------------------------------------------------------------------------------------------


def of_matmul_tests(device: DeviceProperties) -> Iterator[Job | None]:
    """Of `test_gpu_matmul` and `test_gpu_launches`."""
    for case in (*CASES, *WORKER_CASES, *FP8_CASES):
        yield job(device, case)
        yield job(device, case, backend="portable")
    for kind, backend in itertools.product((*KINDS, "auto"), (None, "portable")):
        for m, n, k, bias, workers in (
            (1000, 1104, 512, False, None), (1000, 1104, 512, True, None), (1000, 1104, 4096, False, None),
            (900, 1304, 512, False, 60), (1000, 1304, 512, False, 60), (500, 700, 128, False, None),
        ):  # fmt: skip
            yield job(device, Case(m, n, k, schedule=kind, bias=bias, workers=workers), backend=backend)
        for m, workers in itertools.product((700, 764, 828, 892), (132, 17, 101)):
            yield job(device, Case(m, 904, 256, schedule=kind, workers=workers), backend=backend)
    for activation, backend in itertools.product((None, "relu", "gelu"), (None, "portable")):
        for case in (Case(300, 200, 104), Case(1000, 1104, 512, residual=True)):
            yield job(device, replace(case, activation=activation, bias=not case.residual), backend=backend)
    for fast, out_dtype in ((True, None), (False, F32)):
        how = {"scales": "row", "fast_accum": fast, "out_dtype": out_dtype}
        yield job(device, Case(2048, 2048, 8192, E4M3, "nt", **how))
    for kind, workers in itertools.product(KINDS, range(1, 133)):
        yield job(device, Case(700, 900, 256, schedule=kind, workers=workers))
    for kind, queues in (*((kind, None) for kind in KINDS), ("dynamic", 2)):
        case = Case(1000, 1400, 512, schedule=kind)
        yield job(device, case, tile=(64, 64), queues=queues, backend="portable", probe=True)
        yield job(device, Case(500, 700, 128, schedule=kind), tile=(64, 64), order=tuple(range(88)), backend="portable")
    yield job(device, Case(2**20 + 1024, 2304, 2048))
    yield job(device, Case(300, 300, 300, F32))


def of_arrival_tests(device: DeviceProperties) -> Iterator[Job | None]:
    """Of `test_gpu_arrival` and `test_gpu_demo`, and of `benchmarks/arrival/stream.py`."""
    for kind, backend in itertools.product((*KINDS, "auto"), (None, "portable")):
        for chunking in (*UNIFORM, "ragged"):
            rows = Chunks(BOUNDS) if chunking == "ragged" else Chunks.uniform(M, UNIFORM[chunking])
            for workers in (None, 37, 60, 1):
                yield job(device, Case(M, N, K, schedule=kind, workers=workers), rows=rows, backend=backend)
            yield job(device, Case(M, N, K, schedule=kind, activation="relu"), rows=rows, backend=backend)
        for columns in (Chunks.uniform(N, 256), Chunks(BOUNDS_N)):
            case = Case(210, N, K, layout="nt", schedule=kind, bias=True, activation="gelu")
            yield job(device, case, columns=columns, backend=backend)
        yield job(device, Case(130, 140, K, batch=5, schedule=kind), rows=Chunks.uniform(650, 150), backend=backend)
    case = Case(M, N, K, layout="nt", workers=60)
    yield job(device, case, rows=Chunks.uniform(M, 128), columns=Chunks.uniform(N, 100))
    yield job(device, Case(M, N, K, F32), rows=Chunks.uniform(M, 256))
    for layout, rows in itertools.product(("nn", "nt"), (512, 1024)):
        yield job(device, Case(16384, 8192, 8192, layout=layout), rows=Chunks.uniform(16384, rows))
        yield job(device, Case(16384, 8192, 8192, layout=layout))
    for m, n, k, rows in ((8192, 8192, 8192, 512), (16384, 4096, 8192, 512), (4096, 14336, 4096, 1024), (M, N, K, 128)):
        yield job(device, Case(m, n, k), rows=Chunks.uniform(m, rows))
        yield job(device, Case(m, n, k))


def of_copy_tests(device: DeviceProperties) -> Iterator[Job | None]:
    """Of `test_gpu_copy_items`, and of `benchmarks/arrival/stream.py`."""
    rows, columns = Chunks.uniform(M, UNIFORM["uniform"]), Chunks.uniform(N, 256)
    by_kernel, weight = {"copied": (16, 0)}, {"copied": (0, 16)}
    for backend in (None, "portable"):
        for cut in (*(Chunks.uniform(M, size) for size in UNIFORM.values()), Chunks(BOUNDS)):
            for kind in (*KINDS, "auto"):
                yield job(device, Case(M, N, K, schedule=kind), rows=cut, backend=backend, **by_kernel)
            for workers in (37, 3, 1):
                yield job(device, Case(M, N, K, workers=workers), rows=cut, backend=backend, **by_kernel)
        for cut in (columns, Chunks(BOUNDS_N)):
            yield job(device, Case(210, N, K, layout="nt", bias=True), columns=cut, backend=backend, **weight)
        for m, n, k, size in ((8192, 256, 1024, 2048), (4096, 4096, 1024, 256)):
            yield job(device, Case(m, n, k), rows=Chunks.uniform(m, size), backend=backend, **by_kernel)
        case = Case(M, N, K, layout="nt")
        yield job(device, case, rows=rows, columns=columns, backend=backend, copied=(16, 16))
        yield job(device, case, rows=rows, columns=Chunks.uniform(N, N), backend=backend, copied=(16, 0))
    for k, word in ((500, 8), (203, 2)):
        yield job(device, Case(300, 136, k), rows=Chunks.uniform(300, 77), copied=(word, 0))
    for m, n, k, size in ((16384, 8192, 8192, 512), (65536, 4096, 4096, 1024), (8192, 8192, 8192, 512)):
        for copied, backend in itertools.product(((0, 0), (16, 0)), (None, "portable")):
            yield job(device, Case(m, n, k), rows=Chunks.uniform(m, size), backend=backend, copied=copied)
        yield job(device, Case(m, n, k))
    for m, copied in itertools.product((8192, 16384), ((0, 0), (0, 16))):
        yield job(device, Case(m, 8192, 8192, layout="nt"), columns=Chunks.uniform(8192, 512), copied=copied)


def of_hopper_tests(device: DeviceProperties) -> Iterator[Job | None]:
    """Of `test_gpu_hopper`."""
    for case in hopper.launched():
        yield Job(*case.plan(device), (0, 0, case.output("meta")[0].data_ptr() % 16))
    for case in hopper.PROBE_CASES:
        yield Job(*case.plan(device), probe=True)
    for case in (*hopper.AUTO, *hopper.UNALIGNED):
        yield job(device, case)


def of_schedule_tests(device: DeviceProperties) -> Iterator[Job | None]:
    """Of `test_gpu_schedules`."""
    strides = (0, schedules.K, 1), (0, 1, schedules.K), (0, schedules.N, 1)
    for plan, trace in itertools.product(schedules.plans(device), (False, True)):
        yield Job(plan, Layout(*strides), (0, 0, 0), trace=trace)
    for kind in (*KINDS, "auto"):
        yield job(device, Case(schedules.M, schedules.N, schedules.K, layout="nt", schedule=kind))


def of_hopper_arrival_tests(device: DeviceProperties) -> Iterator[Job | None]:
    """Of `test_gpu_hopper_arrival`."""
    for case in (*hopper.ARRIVING, *hopper.GATED):
        yield Job(*case.plan(device))
    for case in hopper.GATED:
        yield Job(*case.plan(device), probe=True)
    for of in hopper.APART:
        plan, layout = of.case.plan(device)
        rows = plan.problem.m // of.period * of.height
        yield Job(plan, layout)
        if of.there:
            yield Job(plan, layout, apart=rows)


def of_benchmarks(device: DeviceProperties) -> Iterator[Job | None]:
    """Of the GEMM sections: what `tilestream` picks there, and the search space."""
    for kind, layout in itertools.product((*KINDS, "auto"), ("nn", "nt")):
        for size in (2048, 4096, 8192):
            yield job(device, Case(size, size, size, layout=layout, schedule=kind))
    for shape in (*suite(), *QUACK, *SEARCH):
        yield job(device, Case(*shape[:3], layout="nt"))
    for shape, activation in EPILOGUE:
        yield job(device, Case(*shape[:3], layout="nt", bias=True, activation=activation))
    for shape in (*SEARCH, *VARIANTS):
        own = job(device, Case(*shape[:3], layout="nt"))
        assert own is not None
        yield from (own._replace(plan=plan) for plan in search_space(own.plan.problem, device))
    for shape, scales, fast in itertools.product(FP8, ("tensor", "row"), (True, False)):
        yield job(device, Case(*shape[:3], E4M3, "nt", scales=scales, fast_accum=fast))


def of_distributed(device: DeviceProperties) -> Iterator[Job | None]:
    """Of `test_gpu_publish`, of `test_gpu_distributed`, most, and of benchmarks/distributed/all_gather.py.

    Between as many ranks as there are GPUs.
    """
    import gather_jobs
    import test_gpu_publish as publish
    import torch
    from benchmarks.distributed import all_gather as bench

    world = max(2, torch.cuda.device_count())
    for rows, n, k, layout in (
        (96, 256, 256, "nn"), (256, 256, 256, "nn"), (128, 256, 256, "nn"), (512, 512, 512, "nn"), (1, 256, 256, "nt"),
        (256, 256, 256, "nt"), (200, 136, 512, "nt"), (200, 72, 512, "nt"), (4096, 128, 4096, "nt"),
    ):  # fmt: skip
        more = {"bias": True, "activation": "gelu"} if rows == 200 else {}
        for chunks in (1, 2) if rows == 4096 else (1,):
            yield from gathered(device, world, rows, n, k, chunks, layout, **more)
        yield job(device, Case(world * rows, n, k, layout=layout, **more))
    for shape, _, dtype, chunks, _, how in gather_jobs.SHAPES:
        more = {"scales": "row", "fast_accum": False} if how == "scaled" else {}
        batches, rows, k = math.prod(shape[:-2]), *shape[-2:]
        yield from gathered(device, world, rows, 128, k, chunks, batches=batches, dtype=getattr(torch, dtype), **more)
    for m, n, k in bench.gathers(world):
        for chunks in bench.chunk_counts(m // world):
            yield from gathered(device, world, m // world, n, k, chunks)
            yield from gathered(device, world, m // world, 8, k, chunks, "nn")
        yield job(device, Case(m, n, k, layout="nt"))
    for m, n, k in bench.scatters(world):
        yield job(device, Case(m, n, k, layout="nt"))
        for chunks in bench.chunk_counts(m // world):
            yield published(device, m, n, k, m // world // chunks)
    for rows, n, k, layout in ((160, 192, 256, "nn"), (256, 256, 256, "nt"), (64, 256, 128, "nn")):
        yield published(device, world * rows, n, k, rows, layout)
    for m, n, k, rows, _ in publish.CASES:
        yield published(device, m, n, k, rows)


def gathered(
    device: DeviceProperties, world: int, rows: int, n: int, k: int, chunks: int, layout: str = "nt",
    batches: int = 1, **more: Any,
) -> Iterator[Job | None]:  # fmt: skip
    """What a gather of so many rows a rank, in each batch, launches: the own rows in the slot, and apart."""
    from tilestream.distributed.shards import Shards

    shards = Shards(batches, world, rows, k, min(chunks, rows))
    uniform = rows % chunks == 0
    chunking = Chunks.uniform(shards.total, rows // chunks) if uniform else Chunks(shards.bounds())
    made = job(device, Case(shards.total, n, k, layout=layout, **more), rows=chunking)
    yield made
    if made is not None and made.plan.backend == "hopper":
        tiles = hopper_gemm.Arguments(made.plan, made.layout).local_tiles(rows, rows, world * rows)
        if tiles is not None:
            yield made._replace(apart=batches * rows)


def of_publish(device: DeviceProperties) -> Iterator[Job | None]:
    """Of `test_gpu_publish`: what publishes, and what reads it."""
    import test_gpu_publish as publish

    for m, n, k, rows, _ in publish.CASES:
        yield published(device, m, n, k, rows)
    others = [  # two readers; words of the caller's, and such as are taken back
        (4096, 1024, 512, 512, 512), (2048, 1024, 512, 512, 512), (512, 1024, 512, 512, 128),
    ]  # fmt: skip
    for m, hidden, n, k, rows in (*(chain[:5] for chain in publish.CHAINS), *others):
        yield published(device, m, hidden, k, rows, schedule="dynamic")
        yield job(device, Case(m, n, hidden, layout="nt"), rows=Chunks.uniform(m, rows))


def published(
    device: DeviceProperties, m: int, n: int, k: int, rows: int, layout: str = "nt", schedule: str = "auto"
) -> Job | None:
    """What a matmul launches that publishes chunks of so many rows."""
    made = job(device, Case(m, n, k, layout=layout))
    if made is None:
        return None
    problem = replace(made.plan.problem, publishes=Incoming(Chunks.uniform(m, rows)))
    plan = plan_problem(problem, schedule=schedule, device=device)
    return made._replace(plan=plan) if plan.backend == "hopper" else None  # else: a launch a chunk


SECTIONS = {
    "tests": (of_matmul_tests, of_hopper_tests),
    "schedules": (of_schedule_tests,),
    "arrival": (of_arrival_tests, of_hopper_arrival_tests),
    "copies": (of_copy_tests,),
    "benchmarks": (of_benchmarks,),
    "publish": (of_publish,),
    "distributed": (of_distributed,),
}


# Compiling -----------------------------------------------------------------------------------------------------------


def fill(job: Job) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Options and arguments of a launch, without addresses."""
    if job.plan.backend == "hopper":
        return hopper_gemm.fill(job.plan, job.layout, job.address[2], probe=job.probe, trace=job.trace, apart=job.apart)
    plan, layout, address, probe, trace, _ = job
    problem, schedule = plan.problem, plan.schedule
    words = schedule.kind != "static" or plan.gate is not None
    addend = "bfloat16" if problem.fp8 else problem.dtype
    scale = None if problem.scales == "none" else Pointer("float32")

    def pointer(there: Any, dtype: str) -> Any:
        return Pointer(dtype) if there else None

    arguments = Arguments(plan, layout, probe, trace)
    operands = (
        *(Pointer(dtype, at) for dtype, at in zip((*problem.dtypes, problem.out_dtype), address, strict=True)),
        pointer(layout.bias, addend), pointer(layout.residual, addend), scale, scale,
        pointer(schedule.slots, "float32"), pointer(schedule.slots, "int32"), pointer(words, "int64"),
        pointer(schedule.raster.table, "int32"),
        pointer(probe or trace, "int64" if trace else "int32"), 0, 0, 1.5, 0.5,
    )  # fmt: skip
    capacity = 4096 if probe else 0
    return arguments.options, arguments.fill(operands, capacity, gate_arguments(plan), copies=copy_arguments(plan))


def kernel_of(job: Job) -> Any:
    return hopper_gemm.gemm if job.plan.backend == "hopper" else portable_gemm


def key(job: Job) -> str:
    """The key of its compiled kernel, made by Triton's own binder."""
    options, filled = fill(job)
    *_, bind = kernel_of(job).device_caches[0]
    _, specialization, _ = bind(*filled, **options, debug=False, instrumentation_mode="")
    return repr((job.plan.backend, options, specialization))


def went_wrong(label: str, compile_it: Callable[[], object]) -> str | None:
    """What went wrong; None if nothing did."""
    try:
        compile_it()
    except Exception as error:
        return f"{label}: {type(error).__name__}: {error}"[-400:]
    return None


def build(one: Job) -> str | None:
    options, filled = fill(one)
    return went_wrong(one.plan.label, lambda: compiled(kernel_of(one), filled, options, "sm_90a"))


def device_of_this_machine() -> DeviceProperties:
    """The GPU; `STAND_IN` where there is none."""
    import torch

    from tilestream.runtime.properties import cuda_properties

    return cuda_properties(0) if torch.cuda.is_available() else STAND_IN


def compile_all(build_one: Callable[[Any], str | None], todo: Sequence[Any], begin: float) -> None:
    """On all cores at once; ``begin``: since when time counts."""
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        failed = [error for error in pool.imap_unordered(build_one, todo, 1) if error]
    print(f"{len(todo)} kernels compiled in {time.monotonic() - begin:.0f} s; {len(failed)} failed: {failed[:3]}")


def jobs(device: DeviceProperties, what: Sequence[str] = tuple(SECTIONS)) -> list[Job]:
    """Every launch, a kernel once."""
    no_gpu()
    found: dict[str, Job] = {}
    for section in itertools.chain.from_iterable(SECTIONS[name] for name in what):
        before, launches = len(found), 0
        for one in section(device):
            if one is not None:
                launches += 1
                found.setdefault(key(one), one)
        print(f"{section.__name__}: {launches} launches, {len(found) - before} more kernels", flush=True)
    return list(found.values())


def main() -> None:
    begin = time.monotonic()
    compile_all(build, jobs(device_of_this_machine(), sys.argv[1:] or tuple(SECTIONS)), begin)


if __name__ == "__main__":
    main()
