"""quack-kernels beside ours and cuBLAS.

quack is not installed for this: its wheels are unpacked to a folder on PYTHONPATH. Where there is a network,

    pip download -d wheels --no-deps --only-binary=:all: --python-version 3.12 --implementation cp
        --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64
        quack-kernels==0.6.5 nvidia-cutlass-dsl nvidia-cutlass-dsl-libs-base nvidia-cutlass-dsl-libs-core
        nvidia-cutlass-dsl-libs-cu13 apache-tvm-ffi torch-c-dlpack-ext cuda-bindings
    for wheel in wheels/*.whl; do python -m zipfile -e $wheel peers; done

and then

    PYTHONPATH=src:peers:peers/nvidia_cutlass_dsl/dsl_packages python benchmarks/run.py gemm quack OUT
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch

import tilestream as ts
from benchmarks.core.timing import Call
from benchmarks.gemm.bench import Bench, Row, label, operands
from benchmarks.gemm.sections import checked, compared, timed
from benchmarks.gemm.shapes import QUACK, Shape
from tilestream_tools.sweep.check import poison


def quack(bench: Bench) -> None:
    """Ours and cuBLAS beside quack: as it comes, with its dynamic scheduler, and tuned."""
    os.environ.setdefault("QUACK_COMPILE_WORKERS", str(os.cpu_count() or 8))
    from quack import __version__
    from quack.gemm_interface import gemm

    shapes = bench.shapes(QUACK)
    bench.compile_ahead("mm", shapes)
    bench.measure("quack", shapes, lambda shape: quack_row(bench, shape, gemm), quack=__version__)


def quack_row(bench: Bench, shape: Shape, gemm: Any) -> Row:
    """One shape. quack takes B as ``[K, N]`` with any strides; its answers are checked like ours."""
    a, w = operands(shape, bench.device)
    b = w.t()
    check, errors = checked(a, b)
    functions: dict[str, Call] = {
        "cublas": lambda: torch.mm(a, b),
        "ours": lambda: ts.mm(a, b),
        "quack": lambda: gemm(a, b, tuned=False),
        "quack dynamic": lambda: gemm(a, b, tuned=False, dynamic_scheduler=True),
        "quack tuned": lambda: gemm(a, b, tuned=True),
    }
    refused: dict[str, str] = {}
    first: dict[str, float] = {}
    for name in [name for name in functions if "quack" in name]:
        begin = time.perf_counter()
        try:
            poison(shape.m, shape.n, a.dtype, bench.device)
            check(functions[name]())
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {error}"[:200]
            del functions[name]
        first[name] = round(time.perf_counter() - begin, 2)
    # Not all of its launches can be captured: the spin hides the host instead, for all functions.
    timing = timed(bench, shape, functions, check, graphs=False)
    quacks = {name: timing.median(name) for name in functions if "quack" in name}
    best = min(quacks, key=lambda name: quacks[name]) if quacks else "cublas"
    row = {"plan": label(shape), **compared(bench, shape, timing, best), "best": best, "errors": errors}
    row["ratios"] = {name: round(seconds / timing.median("ours"), 4) for name, seconds in timing.medians().items()}
    return row | {"first_call_s": first, "refused": refused}
