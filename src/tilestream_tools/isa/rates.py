"""Published costs of instructions: CDNA 3 (gfx942) and CDNA 4 (gfx950).

Sources
-------
* Passes of matrix instructions, latencies of other classes: LLVM, ``llvm/lib/Target/AMDGPU/SISchedule.td``, models
  ``SIDPGFX942FullSpeedModel`` and ``SIDPGFX950FullSpeedModel`` (a pass is four cycles); the same passes are in AMD's
  Matrix Instruction Calculator and in the ISA guides' tables of dependencies. They agree with the peaks of the data
  sheets: 32x32x8 of bfloat16 in 8 passes is 512 operations a cycle of one SIMD, 2048 of a compute unit.
* Registers, waves, LDS: "AMD Instinct MI300" (CDNA 3) and CDNA 4 instruction set architecture guides, chapters 2, 3.
* LDS, bytes a cycle (128; reads of CDNA 4: 256), and cycles to its data (50 to 70); how long a wave stalls while it
  hands over what it writes (``ds_write_b128``: 20 cycles); cycles from a load to its data under load (about 1000, where
  L2 has most of it); bytes that a compute unit can have under way (32 KiB of its L1, and 12 entries of 1 KiB before
  it): AMD's *gfx950-gluon-tutorials* (``docs/lds_throughput.md``, ``docs/tcp_bound_tile_model.md``,
  ``kernels/gemm/gfx942/intra_wave/README.md``), measured by thread traces. `tests/tools/isa` holds the model to its
  tables.
* L2: CDNA 3 white paper: 16 channels of 128 bytes a cycle and die.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tilestream.core.gpu_specs import DIES, PER_CYCLE
from tilestream_tools.isa.amdgcn import Mfma

#: Cycles of a pass, and of the turn of a SIMD: a wave issues one instruction in so many.
CYCLES = 4
#: Cycles from a load of global memory to its data, where every compute unit loads.
MEMORY_CYCLES = 1000
#: Bytes that a compute unit can have on their way to it. What is loaded beyond them waits to be issued.
UNDER_WAY = 44 << 10
#: From a read of LDS to its data, beside the time it takes to be served.
LDS_CYCLES = 64
#: Bytes a cycle that a wave hands over to LDS, which it does nothing beside.
HANDED_OVER = 64
#: Turns of a transcendental, and of a branch that is taken: LLVM's classes.
TRANSCENDENTAL_TURNS, BRANCH_TURNS = 4, 8
#: Turns behind a matrix instruction's passes until another kind of instruction may read its result. As an addend of the
#: next matrix instruction on the same registers, it may be read at once.
RESULT_TURNS = 3


@dataclass(frozen=True)
class Rates:
    """A compute unit.

    Attributes
    ----------
    simds
        Each with a vector unit and a matrix unit of its own.
    registers, granule
        Vector registers of a lane on a SIMD, for all its waves together, and how many are given at a time.
    waves
        Of a SIMD, at most.
    lds, lds_granule
        Bytes of LDS, and how many are given at a time.
    lds_read, lds_write
        Bytes a cycle.
    """

    arch: str
    lds: int
    lds_granule: int
    lds_read: int
    lds_write: int = 128
    simds: int = 4
    registers: int = 512
    granule: int = 8
    waves: int = 8

    @property
    def feed(self) -> float:
        """Bytes a cycle that L2 gives each compute unit, where all of a die ask for as many."""
        dies = DIES[self.arch]
        return dies.l2_bytes / dies.workers

    @property
    def operations(self) -> tuple[int, int, int, int]:
        """A cycle, dense: of fp32, 16-bit, xf32, 8-bit."""
        return PER_CYCLE[self.arch]

    def peak(self, types: str) -> int:
        """Operations a cycle of a compute unit on operands of ``types``, as a mnemonic has them."""
        fp32, half, xf32, eight = self.operations
        if types.startswith("f64"):
            return 256 if self.arch == "gfx942" else 128
        if types.startswith("xf32"):
            return xf32
        if types.startswith("f32"):
            return fp32
        return half if types.startswith(("f16", "bf16")) else eight

    def lds_cycles(self, bits: int, read: bool) -> float:
        """Cycles that LDS is busy with one wave's access of ``bits`` a lane."""
        bandwidth = self.lds_read if read else self.lds_write
        return 64 * bits / 8 / bandwidth


RATES = {
    "gfx942": Rates("gfx942", lds=64 << 10, lds_granule=512, lds_read=128),
    "gfx950": Rates("gfx950", lds=160 << 10, lds_granule=1280, lds_read=256),
}

#: Passes by arch and shape: the first pattern that fits.
_PASSES = (
    (r"gfx950 16x16x4_f64", 16),
    (r"\w+ 16x16x4_f64", 8),
    (r"\w+ 4x4x\d+_f64", 4),
    (r"\w+ 4x4x", 2),
    (r"\w+ 16x16x128_f8f6f4", 8),
    (r"\w+ 32x32x64_f8f6f4", 16),
    (r"\w+ 16x16x(8_xf32|16_|32_|64_)", 4),
    (r"\w+ 16x16x(1|2|4)_", 8),
    (r"\w+ 32x32x(4_xf32|8_|16_|32_)", 8),
    (r"\w+ 32x32x(1|2|4)_", 16),
)


def passes(mfma: Mfma, arch: str) -> int:
    """Passes of four cycles that a matrix instruction occupies its SIMD's matrix unit.

    Raises
    ------
    ValueError
        If nothing is known of such an instruction.
    """
    name = f"{arch} {mfma}"
    for pattern, count in _PASSES:
        if re.match(pattern, name):
            return count // 2 if mfma.narrow else count
    raise ValueError(
        f"matrix instruction {mfma} on {arch}: its passes are not in the table of `tilestream_tools.isa.rates`"
    )
