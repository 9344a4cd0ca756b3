"""The same launches by Triton's own launcher and by this package's; the driver, `cuda_stub.c`, says what it was given.

Run by `test_launcher`, in a process of its own that finds the stub as libcuda.so.1, and by whatever Python has the
Triton that is meant: needs Triton, Python's headers and a C compiler, no torch. Prints JSON: of each kernel what Triton
launched and what the launcher did.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import sys
from pathlib import Path

import tma_kernel
import triton
from cuda_stub import Stub
from tma_kernel import TensorDescriptor, every, gl, specialised
from triton.backends.nvidia import driver

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from tilestream.launch.launcher import VARIES, Descriptor, Launcher

ROUNDS = "round_f32_to_tf32" in {field.name for field in dataclasses.fields(TensorDescriptor)}  # not in 3.6
STREAM, GRID = 0xAB0, (132, 2, 1)


class Tensor(tma_kernel.Tensor):
    """A device tensor, as far as its address."""

    def __init__(self, dtype: str, address: int) -> None:
        super().__init__(dtype)
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class _Driver(tma_kernel._NoGpu):
    launcher_cls = driver.CudaLauncher

    def __init__(self) -> None:
        self.utils = driver.CudaUtils()


def described(dtype, shape, box, address, rounds=False, **how):
    strides = [1]
    for extent in shape[:0:-1]:
        strides.insert(0, strides[0] * extent)
    if rounds and ROUNDS:
        how["round_f32_to_tf32"] = True
    layout = gl.NVMMASharedLayout.get_default_for(box, getattr(gl, dtype))
    return TensorDescriptor(Tensor(dtype, address), shape, strides, box, layout, **how)


def descriptor(x) -> Descriptor:
    return Descriptor(tuple(x.shape), tuple(x.strides), getattr(x, "round_f32_to_tf32", False), x.padding == "nan")


def main() -> None:
    triton.runtime.driver.set_active(_Driver())
    stub = Stub(ctypes.CDLL("libcuda.so.1"))
    stub.set("version", 13000)
    x = described("bfloat16", [1000, 4096], [64, 64], 1 << 40)
    y = described("bfloat16", [8 if ROUNDS else 8000, 4096], [64, 64], 3 << 40)  # small ones are maps of their own
    z = described("float32", [3, 100, 4096], [1, 64, 32], 5 << 40, rounds=True, padding="nan")
    words = Tensor("float32", 7 << 40)
    calls = [
        (every, (x, y, z, words, None, 16, 1, 1, 2**40 + 1, 2.7, True, (3, 2**33 + 1), 9, 5),
         (descriptor(x), descriptor(y), descriptor(z), VARIES, None, 16, 1, 1, 2**40 + 1, VARIES, True, (3, VARIES),
          VARIES, 5), (1 << 40, 3 << 40, 5 << 40, 7 << 40, 2.7, 2**33 + 1, 9), {}),
        (specialised, (words, 16), (VARIES, 16), (7 << 40,), {"num_warps": 4}),
        (specialised, (words, 16), (VARIES, 16), (7 << 40,), {"num_warps": 4, "launch_pdl": True}),
        (tma_kernel._work, (words, 16), (VARIES, 16), (7 << 40,), {"num_ctas": 2}),
    ]  # fmt: skip
    told = []
    for function, whole, shared, varying, options in calls:
        kernel = function.warmup(*whole, grid=GRID, **options)
        kernel = getattr(kernel, "result", lambda kernel=kernel: kernel)()
        stub.expect(tma_kernel.declared(kernel.asm["cubin"]))
        stub.set("launched", 0)
        kernel[GRID](*whole, stream=STREAM)
        Launcher(kernel, GRID, shared)(STREAM, *varying)
        told.append([
            {
                "grid": one.config.grid[:], "block": one.config.block[:], "shared": one.config.shared,
                "stream": one.config.stream, "function": one.function, "parameters": bytes(one.parameters).hex(),
                "attributes": [attribute[:] for attribute in one.attributes[: one.config.count]],
            }
            for one in stub.launches
        ])  # fmt: skip
    print(json.dumps({"triton": triton.__version__, "launches": told}))


if __name__ == "__main__":
    main()
