"""Compile what the GPU tests and benchmarks launch, on all cores at once, before they run one by one.

``python tests/gpu/precompile.py``: needs a GPU only to ask what it is.
Whatever is left out here is compiled when it is launched: nothing but time depends on this.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels" / "portable"))

import torch
from gpu_cases import BOUNDS, BOUNDS_N, CASES, E4M3, F32, FP8_CASES, KINDS, UNIFORM, WORKER_CASES, Case, K, M, N

from tilestream.arrival.chunks import Chunks
from tilestream.kernels.epilogue import Epilogue
from tilestream.kernels.portable.arguments import Layout, is_aligned
from tilestream.plan.device import DeviceProperties
from tilestream.plan.plan import plan_problem
from tilestream.plan.problem import Incoming, Problem, dtype_name


def strides(x: torch.Tensor) -> tuple[int, int, int]:
    rows, cols = x.stride()[-2:]
    return (0, rows, cols) if x.dim() == 2 or x.shape[0] == 1 else (x.stride(0), rows, cols)


def scale_strides(x: torch.Tensor | None, dim: int) -> tuple[int, int]:
    if x is None or x.numel() == 1:
        return 0, 0
    return x.stride(0) if x.dim() == 3 else 0, x.stride(dim)


def spec(
    device: DeviceProperties, case: Case, tile=None, queues=None, rows=None, columns=None
) -> tuple[Any, Layout, tuple[int, ...], bool] | None:
    """What `tilestream.ops.gpu` would launch for a case: plan, layout, addresses modulo 16."""
    operands, out, scales = case.operands("meta"), case.output("meta"), tuple(case.scale("meta").values())
    a, b, bias, residual = operands.values()
    if not out.numel():
        return None
    address = [x.storage_offset() * x.element_size() % 16 for x in (a, b, out)]
    batch = a.shape[0] if a.dim() == 3 else 1
    layout = Layout(
        strides(a), strides(b), strides(out), None if bias is None else 1,
        None if residual is None or case.beta == 0 else strides(residual), case.alpha != 1, case.activation or "none",
        scale_strides(scales[0], -2), scale_strides(scales[1], -1),
    )  # fmt: skip
    (m, k), n = a.shape[-2:], b.shape[-1]
    shared = batch > 1 and a.stride(0) == 0
    problem = Problem(
        m, n, k, batch, dtype_name(a.dtype), dtype_name(out.dtype),
        None if rows is None else Incoming(rows), None if columns is None else Incoming(columns), shared,
        tf32=case.tf32,
        aligned=is_aligned((m, k), layout.a[1:], layout.a[0], address[0])
        and is_aligned((k, n), layout.b[1:], layout.b[0], address[1]),
        b_dtype=dtype_name(b.dtype) if b.dtype != a.dtype else "",
        scales=Epilogue(scale_a=scales[0], scale_b=scales[1]).scales,
        fast_accum=case.fast_accum,
    )  # fmt: skip
    plan = plan_problem(problem, case.workers, case.schedule, tile, None, queues, device=device)
    return plan, layout, tuple(address), bias is not None


def specs(device: DeviceProperties) -> list[tuple[Any, Layout, tuple[int, ...], bool]]:
    cases: list[Any] = [(case, {}) for case in (*CASES, *FP8_CASES, *WORKER_CASES)]
    kinds = (*KINDS, "auto")
    for kind in kinds:
        cases += [(Case(m, n, k, schedule=kind, bias=bias, workers=workers), {}) for m, n, k, bias, workers in (
            (700, 900, 256, False, None), (1000, 1100, 512, False, None), (1000, 1100, 512, True, None),
            (900, 1300, 512, False, 60), (1000, 1100, 4096, False, None), (500, 700, 128, False, None),
        )]  # fmt: skip
        cases += [(Case(m, 900, 256, schedule=kind), {}) for m in (764, 828, 892)]
        for layout, size in itertools.product(("nn", "nt"), ((4096, 4096, 4096), (8192, 8192, 8192), (2048,) * 3)):
            cases.append((Case(*size, layout=layout, schedule=kind), {}))
        for chunking in (*UNIFORM, "ragged"):
            rows = Chunks(BOUNDS) if chunking == "ragged" else Chunks.uniform(M, UNIFORM[chunking])
            for workers in (None, 37, 60, 1):
                cases.append((Case(M, N, K, schedule=kind, workers=workers), {"rows": rows}))
            cases.append((Case(M, N, K, schedule=kind, activation="relu"), {"rows": rows}))
        for columns in (Chunks.uniform(N, 256), Chunks(BOUNDS_N)):
            cases.append(
                (Case(210, N, K, layout="nt", schedule=kind, bias=True, activation="gelu"), {"columns": columns})
            )
        cases.append((Case(130, 140, K, batch=5, schedule=kind), {"rows": Chunks.uniform(650, 150)}))
    both = {"rows": Chunks.uniform(M, 128), "columns": Chunks.uniform(N, 100)}
    cases.append((Case(M, N, K, layout="nt", workers=60), both))
    cases.append((Case(M, N, K, F32), {"rows": Chunks.uniform(M, 256)}))
    for kind, scales in itertools.product(KINDS, ("tensor", "row")):
        cases.append((Case(M, N, K, E4M3, "nt", scales=scales, schedule=kind), {"rows": Chunks.uniform(M, 150)}))
    cases += [(Case(2**20 + 1024, 2304, 2048), {}), (Case(300, 300, 300, F32), {})]
    for layout, rows in itertools.product(("nn", "nt"), (512, 1024)):
        cases.append((Case(16384, 8192, 8192, layout=layout), {"rows": Chunks.uniform(16384, rows)}))
        cases.append((Case(16384, 8192, 8192, layout=layout), {}))
    # The other shapes of benchmarks/gpu_stream.py, and of tests/gpu/test_gpu_demo.py.
    for m, n, k, rows in ((8192, 8192, 8192, 512), (16384, 4096, 8192, 512), (4096, 14336, 4096, 1024), (M, N, K, 128)):
        cases += [(Case(m, n, k), {"rows": Chunks.uniform(m, rows)}), (Case(m, n, k), {})]
    found = [spec(device, case, **how) for case, how in cases]
    return [one for one in found if one is not None]


def fill(plan: Any, layout: Layout, address: tuple[int, ...], biased: bool) -> tuple[Any, ...]:
    from gate import Pointer, gate_arguments

    from tilestream.kernels.portable.arguments import Arguments

    problem, schedule = plan.problem, plan.schedule
    words = schedule.kind != "static" or plan.gate is not None

    def pointer(there: Any, dtype: str, at: int = 0) -> Any:
        return Pointer(dtype, at) if there else None

    arguments = Arguments(plan, layout)
    addend = "bfloat16" if problem.fp8 else problem.dtype
    scale = pointer(problem.scales != "none", "float32", 4)
    return arguments.options, arguments.fill(
        *(Pointer(dtype, at) for dtype, at in zip(problem.dtypes, address[:2], strict=True)),
        Pointer(problem.out_dtype, address[2]), pointer(layout.bias, addend), pointer(layout.residual, addend),
        pointer(schedule.slots, "float32"), pointer(schedule.slots, "int32"), pointer(words, "int64"),
        pointer(schedule.raster.table, "int32"), None, 0, 0, 1.5, 0.5, gate=gate_arguments(plan), scales=(scale, scale),
    )  # fmt: skip


def build(job: tuple[Any, Any]) -> str | None:
    import gate
    import triton

    options, filled = job
    triton.runtime.driver.set_active(gate._NoGpu(gate.TARGETS["sm_90a"]))
    try:
        kernel = gate.gemm.run(*filled, grid=(1,), warmup=True, **options)
        if hasattr(kernel, "result"):
            kernel.result()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[-300:]
    return None


def main() -> None:
    begin = time.monotonic()
    from tilestream.runtime.properties import cuda_properties

    device = cuda_properties(0)
    jobs, seen = [], set()
    for one in specs(device):
        options, filled = fill(*one)
        key = repr((options, [(type(x).__name__, getattr(x, "dtype", None), getattr(x, "_address", None))
                              if hasattr(x, "data_ptr") else x for x in filled]))  # fmt: skip
        if key not in seen:
            seen.add(key)
            jobs.append((options, filled))
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        failed = [error for error in pool.imap_unordered(build, jobs, 1) if error]
    print(f"{len(jobs)} launches compiled in {time.monotonic() - begin:.0f} s; failed: {failed[:3]}", flush=True)


if __name__ == "__main__":
    main()
