"""What the gates of Hopper's GEMM and attention share: tensor maps without torch, rules on PTX and SASS."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gates.engine import Rules
from tilestream.core.device import DeviceProperties
from tilestream.launch.hopper.maps import Map
from tilestream_tools.isa import sass
from tilestream_tools.isa.build import TARGETS, NoGpu, Pointer

DEVICE = DeviceProperties("an H100", "portable", 132, 5e11, 3.3e12, "a stub", "sm_90", 232448)
_TYPES = {
    "bfloat16": gl.bfloat16, "float16": gl.float16, "float32": gl.float32, "float8_e4m3fn": gl.float8e4nv,
    "float8_e5m2": gl.float8e5,
}  # fmt: skip


def no_gpu() -> None:
    """From now on this process compiles for an H100 that is not present."""
    triton.runtime.driver.set_active(NoGpu(TARGETS["sm_90a"]))


def described(made: Map | None, dtype: str) -> TensorDescriptor | None:
    """`tilestream.launch.hopper.maps.described_by`, without torch."""
    if made is None:
        return None
    element = _TYPES[dtype]
    rows = math.prod(made.box[:-1])
    swizzle = gl.NVMMASharedLayout.get_default_for([rows, made.box[-1]], element).swizzle_byte_width
    layout = gl.NVMMASharedLayout(swizzle, element.primitive_bitwidth, len(made.box))
    rank = len(made.box)
    return TensorDescriptor(Pointer(dtype), [16] * rank, [256] * (rank - 2) + [16, 1], list(made.box), layout)


@dataclass
class Assembly:
    """A kernel's PTX and SASS, and what the assembler said."""

    kernel: Any
    said: str

    def __post_init__(self) -> None:
        self.ptx = self.kernel.asm["ptx"]
        self.sass, self.usage = sass.disassembled(self.kernel.asm["cubin"])

    def count_sass(self, pattern: str) -> int:
        return len(re.findall(pattern, self.sass))

    def count_ptx(self, pattern: str) -> int:
        return len(re.findall(pattern, self.ptx))

    @cached_property
    def spills(self) -> tuple[int, int, int]:
        """Bytes that went to memory, bytes of stack, and instructions that use it."""
        return sass.spilled_bytes(self.said), sass.stack_bytes(self.usage), self.count_sass(r"\b(?:LDL|STL)\b")

    def rules(
        self, *, registers: set[int], products: set[str], loads: Any, stores: int, looks: int, naps: int
    ) -> Rules:
        """Rules of both kernels.

        ``registers``: of a thread, by ``setmaxnreg``. ``products``: instructions of the tensor cores. ``looks``:
        places where one lane polls a signal.
        """
        notes = set(re.findall(r"C7[56]\d\d|[^\n]*ignored[^\n]*", self.said))
        split = set(map(int, re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", self.ptx)))
        return {
            "spills": (self.spills, (0, 0, 0)),
            "the assembler's notes": (sorted(notes), []),
            "registers": (sorted(split), sorted(registers)),
            "instructions of the tensor cores": (sorted(sass.wgmma_shapes(self.ptx)), sorted(products)),
            "TMA loads": (self.count_sass(r"\bUTMALDG"), loads),
            "TMA stores": (self.count_sass(r"\bUTMASTG"), stores),
            "looks at signals, each a lane's": (sass.looks(self.ptx), (looks, 0)),
            "naps": (self.count_ptx(r"\bnanosleep\."), naps),
            "barriers whose place something else takes": (sass.reused_barriers(self.ptx), []),
        }
