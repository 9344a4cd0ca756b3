"""Real kernels, compiled for an H100 without one: does the extension give the driver what Python's launch gives it?

A process of its own, because Triton's driver is replaced for good. ``real_kernels.py LIBRARY FAKE_DRIVER NAME...``
prints a line a case: its name, the bytes that were compared, and "equal".
"""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import triton
from stand_ins import CPU_INDEX, Matmul

from conftest import Driver
from tilestream.core.operands import Epilogue, GemmOperands
from tilestream.launch import launcher, native, tensor_map
from tilestream.launch.hopper.launch import GemmLaunch as HopperLaunch
from tilestream.launch.launch import Kernel
from tilestream.launch.observe import Call, observation, observe
from tilestream.launch.portable.arguments import Layout
from tilestream.launch.portable.launch import GemmLaunch as PortableLaunch
from tilestream.plan.api import plan as make_plan
from tilestream_tools.isa.build import TARGETS, NoGpu

BF16 = torch.bfloat16


def strides(x: torch.Tensor) -> tuple[int, int, int]:
    return (x.stride(0) if x.dim() == 3 else 0, *x.stride()[-2:])


def case(backend: str, schedule: str, epilogue: bool, m: int, n: int, k: int) -> tuple[Any, Matmul]:
    """A launch, and the call that it is of."""
    a, b = torch.zeros(m, k, dtype=BF16), torch.zeros(n, k, dtype=BF16).T
    out = torch.zeros(m, n, dtype=BF16)
    x = Matmul(0, a, b)
    if epilogue:
        x = x._replace(
            bias=torch.zeros(n, dtype=BF16), residual=torch.zeros(m, n, dtype=BF16), scale_a=torch.ones(m, 1),
            scale_b=torch.ones(1, n), alpha=0.5, beta=0.25,
        )  # fmt: skip
    layout = Layout(
        strides(a), strides(b), strides(out), 1 if epilogue else None, strides(x.residual) if epilogue else None,
        epilogue, "none", (0, 1) if epilogue else (0, 0), (0, 1) if epilogue else (0, 0),
    )  # fmt: skip
    plan = make_plan(
        m, n, k, dtype="bfloat16", device="h100", backend=backend, schedule=schedule,
        scales="row" if epilogue else "none",
    )  # fmt: skip
    return (HopperLaunch(plan, layout) if backend == "hopper" else PortableLaunch(plan, layout)), x


CASES = {
    "hopper, static": ("hopper", "static", False, 1024, 1024, 256),
    "hopper, stream-K, epilogue": ("hopper", "stream_k", True, 1152, 1152, 4096),
    "hopper, few rows": ("hopper", "dynamic", True, 16, 4096, 1024),
    "portable, dynamic": ("portable", "dynamic", False, 1024, 1024, 256),
    "portable, stream-K, epilogue": ("portable", "stream_k", True, 1152, 1152, 4096),
}


def compared(extension: native.Extension, driver: Driver, launch: Any, x: Matmul) -> int:
    """Bytes of a launch that are equal."""
    extension._words.clear()  # counted from 0 again
    out = torch.zeros(x.a.shape[0], x.b.shape[1], dtype=BF16)
    operands = GemmOperands(x.a, x.b, out, Epilogue(x.alpha, x.bias, x.residual, x.beta, "none", x.scale_a, x.scale_b))
    with observe() as seen:
        launch(operands)
    assert len(seen.issued) == 1, seen.issued
    assert seen.issued[0] is not None, "only Triton launches it"
    python, values = seen.issued[0]
    driver.function(python._function.value, [parameter.size for parameter in python.parameters])
    fields = ("a", "b", "bias", "residual", "scale_a", "scale_b")
    call = Call({**{name: getattr(x, name) for name in fields}, "out": out}, (x.alpha, x.beta))
    assert extension.remember(seen, call, 0, False, tuple(x)), native.recipe_of(seen, call)
    driver.forget()
    fresh = extension.try_matmul(*x)
    assert fresh is not None
    names = [parameter.name for parameter in python.parameters if parameter.value is launcher.VARIES]
    words = extension._words.get((CPU_INDEX, 0))
    addresses = [one.data_ptr() for one in words or ()]
    there = dict(zip(("counters", "counts", "partials"), addresses, strict=False))
    there |= {"base": 0, "out": fresh.data_ptr(), "out_map": fresh.data_ptr()}
    python(0, *[there.get(name, value) for name, value in zip(names, values, strict=True)])
    native_launch, python_launch = driver.launches()
    different = [i for i, pair in enumerate(zip(native_launch, python_launch, strict=True)) if pair[0] != pair[1]]
    assert not different, (different, [(one.name, one.size) for one in python.parameters])
    return len(native_launch)


def main() -> None:
    library, fake, *names = sys.argv[1:]
    triton.runtime.driver.set_active(NoGpu(TARGETS["sm_90a"]))
    handles = iter(range(0x1000, 0x10000, 0x10))
    compiled = triton.compiler.CompiledKernel
    compiled._init_handles = lambda kernel: setattr(kernel, "function", kernel.function or next(handles))

    def load_first(kernel: Kernel, stream: int, filled: Any) -> None:
        """`Kernel.__call__`, where nothing can be launched."""
        kernel.load(filled)
        made = native.issued(kernel._compiled, kernel._grid, [getattr(x, "data_ptr", lambda x=x: x)() for x in filled])
        if (seen := observation()) is not None:
            seen.issued.append(made)

    Kernel.__call__ = load_first
    cdll = ctypes.CDLL(fake)

    def function(name: str, *arguments: type) -> Any:
        found = getattr(cdll, name)
        found.argtypes = arguments
        return found

    for module in (launcher, tensor_map):
        module.cuda_function = function
    driver = Driver(Path(fake))
    driver.thread()
    extension = native.Extension(Path(library), fake, fake)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    for name in ("try_matmul", "remember_matmul"):
        setattr(extension, name, functools.partial(getattr(torch.ops.tilestream, name).default.redispatch, keys))
    for name in names:
        print(name, compared(extension, driver, *case(*CASES[name])), "equal", flush=True)


if __name__ == "__main__":
    main()
