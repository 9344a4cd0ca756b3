"""A Gluon kernel with every kind of argument, compiled to sm_90a with no GPU: what a launcher reads of it, as JSON.

Run by `test_launcher`, in a process of its own and by whatever Python has the Triton that is meant: needs Triton, no
torch.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

with contextlib.suppress(ImportError):
    import torch  # noqa: F401
if "torch" not in sys.modules:
    sys.modules["torch"] = types.ModuleType("torch")
    sys.modules["torch"].Tensor = type("Tensor", (), {})  # type: ignore[attr-defined]
    sys.modules["torch"].version = types.SimpleNamespace(hip=None)  # type: ignore[attr-defined]

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit(do_not_specialize=["epoch", "one"])
def every(x, y, z, words, none, count, unit, one, large, scale, flag, tuple_, epoch, BLOCK: gl.constexpr):
    to = gl.allocate_shared_memory(x.dtype, x.block_type.shape, x.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, x.block_type.nbytes)
    load(x, [0, 0], bar, to)
    mbarrier.wait(bar, 0)
    store(y, [0, 0], to)
    tma.store_wait(0)
    if flag:
        gl.store(words, count + unit + one + large + tuple_[0] + tuple_[1] + epoch + scale + BLOCK)


@gluon.jit
def _work(words, n):
    gl.store(words, n)


@gluon.jit
def specialised(words, n):
    gl.warp_specialize([(_work, (words, n)), (_work, (words, n))], [4], [24])


class _Dtype(str):
    is_floating_point = True

    def __str__(self) -> str:
        return f"torch.{str.__str__(self)}"


class Tensor:
    """A device tensor without the device."""

    def __init__(self, dtype: str) -> None:
        self.dtype = _Dtype(dtype)

    def data_ptr(self) -> int:
        return 0

    def ptr_range(self) -> int:
        return 0


class _NoGpu:
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device=None: 0)
    is_active = staticmethod(lambda: True)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))


def declared(cubin: bytes) -> list[int]:
    """Sizes of the parameters, as the assembler has them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-elf", file.name], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"Ordinal\s*:\s*(0x[0-9a-f]+)\s+Offset\s*:\s*(0x[0-9a-f]+)\s+Size\s*:\s*(0x[0-9a-f]+)", text)
    return [size for _, size in sorted({(int(ordinal, 16), int(size, 16)) for ordinal, _, size in found})]


def told(kernel: Any) -> dict[str, Any]:
    source, metadata = kernel.src, kernel.metadata._asdict()
    del metadata["target"]
    return {
        "triton": triton.__version__, "name": kernel.name, "ptx": kernel.asm["ptx"], "metadata": metadata,
        "signature": source.signature, "attrs": list(source.attrs.items()), "constants": list(source.constants.items()),
        "declared": declared(kernel.asm["cubin"]),
    }  # fmt: skip


def main() -> None:
    triton.runtime.driver.set_active(_NoGpu())
    layout = gl.NVMMASharedLayout.get_default_for
    flat = TensorDescriptor(Tensor("bfloat16"), [1000, 4096], [4096, 1], [64, 64], layout([64, 64], gl.bfloat16))
    deep = TensorDescriptor(
        Tensor("float32"), [3, 100, 4096], [409600, 4096, 1], [1, 64, 32], layout([1, 64, 32], gl.float32)
    )
    words = Tensor("float32")
    kernels = [
        every.warmup(flat, flat, deep, words, None, 16, 1, 1, 2**40 + 1, 2.5, True, (3, 2**33 + 1), 0, 5, grid=(1,)),
        specialised.warmup(words, 16, grid=(1,), num_warps=4),
    ]
    print(json.dumps([told(getattr(kernel, "result", lambda kernel=kernel: kernel)()) for kernel in kernels]))


if __name__ == "__main__":
    main()
