"""CDNA3's and CDNA4's instructions, as LLVM writes them, each in one place.

`table` says how one is found; `scalar`, `vector`, `packed`, `matrix`, `lds` and `vmem` have what they do.
"""

from tilestream_tools.emulator.instructions import lds, matrix, packed, scalar, vector, vmem
from tilestream_tools.emulator.instructions.table import Decoded, act_of, parse

__all__ = ["Decoded", "act_of", "lds", "matrix", "packed", "parse", "scalar", "vector", "vmem"]
