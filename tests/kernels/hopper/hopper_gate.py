"""The Hopper GEMM compiled with no GPU: as its launch has it compiled.

Needs Triton, no torch: run by whatever Python has the Triton that is meant.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "portable"))

import triton
from gate import TARGETS, Pointer, _caught, _NoGpu
from gate import gemm as portable_gemm  # noqa: F401
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilestream.kernels.hopper.arguments import Arguments, Map
from tilestream.kernels.hopper.gemm import gemm
from tilestream.kernels.portable.arguments import Layout
from tilestream.plan.plan import Plan

_TYPES = {
    "bfloat16": gl.bfloat16, "float16": gl.float16, "float32": gl.float32, "float8_e4m3fn": gl.float8e4nv,
    "float8_e5m2": gl.float8e5,
}  # fmt: skip


def described(made: Map | None, dtype: str) -> TensorDescriptor | None:
    """`tilestream.kernels.hopper.launch.described_by`, without torch."""
    if made is None:
        return None
    element = _TYPES[dtype]
    swizzle = gl.NVMMASharedLayout.get_default_for(list(made.box[-2:]), element).swizzle_byte_width
    layout = gl.NVMMASharedLayout(swizzle, element.primitive_bitwidth, len(made.box))
    rank = len(made.box)
    return TensorDescriptor(Pointer(dtype), [16] * rank, [256, 16, 1][-rank:], list(made.box), layout)


def fill(
    plan: Plan, layout: Layout, out_address: int = 0, bias_address: int = 0, probe: bool = False
) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """What `tilestream.kernels.hopper.launch.GemmLaunch` has compiled: options, and arguments of no address.

    Parameters
    ----------
    out_address, bias_address
        Modulo 16.
    """
    arguments = Arguments(plan, layout, out_address % 16 == 0, probe)
    problem, schedule = plan.problem, plan.schedule
    x, y = problem.dtypes[::-1] if plan.swapped else problem.dtypes
    parts = ((arguments.x, x), *((part, y) for part in arguments.y), (arguments.out, problem.out_dtype))
    maps = [described(made, dtype) for made, dtype in parts]
    addend = "bfloat16" if problem.fp8 else problem.dtype
    scale = None if problem.scales == "none" else Pointer("float32")
    given = (
        Pointer(problem.out_dtype, out_address),
        None if layout.bias is None else Pointer(addend, bias_address),
        None if layout.residual is None else Pointer(addend),
        scale, scale,
        Pointer("float32") if schedule.slots else None,
        Pointer("int32") if schedule.slots else None,
        None if schedule.kind == "static" else Pointer("int64"),
        None if schedule.raster.table is None else Pointer("int32"),
        Pointer("int32") if probe else None,
    )  # fmt: skip
    return arguments.options, arguments.fill((*maps, *given, 0, 0, 1.5, 0.5), 1024 if probe else 0)


def no_gpu() -> None:
    """From now on this process compiles for an H100 that is not there."""
    triton.runtime.driver.set_active(_NoGpu(TARGETS["sm_90a"]))


def build(options: dict[str, Any], filled: tuple[Any, ...], kernel: Any = gemm) -> tuple[Any, str]:
    """Compile, by way of the kernel's own launch path: the kernel, and what the assembler said."""
    no_gpu()
    with _caught() as said:
        made = kernel.run(*filled, grid=(1,), warmup=True, **options)
        if hasattr(made, "result"):
            made = made.result()
    return made, said[0]
