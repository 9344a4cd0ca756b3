"""GEMM on one GPU, side by side with its peers.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_gemm.py SECTION[,SECTION...] FOLDER [--budget SECONDS]

| section    | what                                                                                  | seconds |
|------------|---------------------------------------------------------------------------------------|---------|
| `suite`    | `ts.mm` beside cuBLAS: squares, Llama-3's layers from 1 to 16384 rows, short K, odd   | 150     |
| `quack`    | a dozen of these shapes beside quack-kernels: as it comes, dynamic, tuned             | 270     |
| `fp8`      | `ts.matmul` beside `torch._scaled_mm`: tensor- and row-wise scales                    | 90     |
| `epilogue` | `ts.linear` with bias and GELU beside `torch.compile`, default and max-autotune       | 270     |
| `search`   | the plan beside the best of its whole space, for shapes the model was not fitted to   | 130     |
| `host`     | host microseconds of a call; seconds of the first call, caches empty and filled       | 70      |
| `variants` | every plan of the space for some shapes: what the cost model is fitted to             | 110     |
| `queues`   | a static grid, one queue, a queue a worker, by group; idle and beside a neighbour     | 60      |

Each section writes ``FOLDER/gpu_gemm_SECTION.json`` (``..._h200.json`` on an H200) anew after each row, and ends before
the budget does: what it had no time for is in the record's ``missing``. COMMIT names the commit where the tree is a
copy without its history. ``--shapes MxNxK,...`` gives `suite`, `search`, `variants` and `queues` other shapes.
``--dry`` tries everything on the CPU, with small extents; but for `queues`, whose neighbour needs a GPU.

quack is not installed for this: its wheels are unpacked to a folder on PYTHONPATH. Where there is a network,

    pip download -d wheels --no-deps --only-binary=:all: --python-version 3.12 --implementation cp
        --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64
        quack-kernels==0.6.5 nvidia-cutlass-dsl nvidia-cutlass-dsl-libs-base nvidia-cutlass-dsl-libs-core
        nvidia-cutlass-dsl-libs-cu13 apache-tvm-ffi torch-c-dlpack-ext cuda-bindings
    for wheel in wheels/*.whl; do python -m zipfile -e $wheel peers; done

and then

    PYTHONPATH=src:benchmarks:peers:peers/nvidia_cutlass_dsl/dsl_packages python benchmarks/gpu_gemm.py quack FOLDER

A figure that the device cannot reach is refused, and so is an answer that breaks the error rule of docs/design.md; both
are in the record's ``failures``, and the exit code is then 1.
"""

from __future__ import annotations

import time

_begin = time.perf_counter()
import tilestream  # noqa: E402, F401

_import_seconds = time.perf_counter() - _begin

import argparse  # noqa: E402
import json  # noqa: E402
import signal  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402

from benchmarks.gemm import bench as gemm_bench  # noqa: E402
from benchmarks.gemm.bench import Bench, OutOfTime, compile_share, plan_log  # noqa: E402
from benchmarks.gemm.host import first_calls, run_host  # noqa: E402
from benchmarks.gemm.queues import run_queues  # noqa: E402
from benchmarks.gemm.search import run_search, run_variants  # noqa: E402
from benchmarks.gemm.sections import run_epilogue, run_fp8, run_quack, run_suite  # noqa: E402
from benchmarks.gemm.shapes import Shape, parse  # noqa: E402

#: Seconds that a section needs, about: how a budget is shared out.
SECONDS = {
    "suite": 150,
    "quack": 270,
    "fp8": 90,
    "epilogue": 270,
    "search": 130,
    "host": 70,
    "variants": 110,
    "queues": 60,
}


def sections(shapes: list[Shape] | None) -> dict[str, Callable[[Bench], None]]:
    """By name."""
    return {
        "suite": lambda bench: run_suite(bench, shapes),
        "quack": run_quack,
        "fp8": run_fp8,
        "epilogue": run_epilogue,
        "search": lambda bench: run_search(bench, shapes),
        "host": run_host,
        "variants": lambda bench: run_variants(bench, shapes),
        "queues": lambda bench: run_queues(bench, shapes),
    }


def run(names: list[str], bench: Bench, shapes: list[Shape] | None) -> int:
    """The sections in order, each with its share of what is left; how many things went wrong."""
    todo = sections(shapes)
    try:
        for index, name in enumerate(names):
            bench.begin(SECONDS[name] / sum(SECONDS[other] for other in names[index:]))
            print(f"== {name}, {bench.left:.0f} s", flush=True)
            try:
                todo[name](bench)
            except Exception:  # the next section may not need what this one lacks
                bench.bad += 1
                traceback.print_exc()
    except OutOfTime:
        signal.setitimer(signal.ITIMER_REAL, 0)
        print("the time is over", flush=True)
    return bench.bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="?", help=f"of {', '.join(SECONDS)}, with commas")
    parser.add_argument("folder", nargs="?", type=Path, help="where the records go")
    parser.add_argument("--budget", type=float, default=540, help="seconds for all (default: 540)")
    parser.add_argument("--shapes", type=parse, help="for suite, search, variants, queues: MxNxK,...")
    parser.add_argument(
        "--within", type=float, default=gemm_bench.within, help="for search, variants: no plan expected to be as slow"
    )
    parser.add_argument("--dry", action="store_true", help="on the CPU, with small extents")
    parser.add_argument("--compile", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--first-call", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    gemm_bench.within = given.within
    if given.compile:
        what, shapes, index, count = given.compile
        compile_share(what, parse(shapes), int(index), int(count))
        return 0
    if given.first_call:
        print(json.dumps(first_calls(given.first_call, "cpu" if given.dry else "cuda", _import_seconds)))
        return 0
    if given.sections is None or given.folder is None:
        parser.error("name the sections and the folder")
    names = given.sections.split(",")
    unknown = [name for name in names if name not in SECONDS]
    if unknown:
        parser.error(f"sections: {', '.join(unknown)}; there are {', '.join(SECONDS)}")
    if given.dry:
        torch.set_num_threads(1)
    bench = Bench(given.folder, given.budget, given.dry)
    plan_log()  # before the first plan is made
    bench.alarm()
    return 1 if run(names, bench, given.shapes) else 0
