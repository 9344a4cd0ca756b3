"""CDNA3's and CDNA4's machine code, executed on the CPU: what Triton compiles for gfx942 and gfx950, without the GPU.

It is functional: every instruction does what AMD's ISA documents say, on numpy's arrays of 64 lanes. Time is a count of
instructions. What the documents leave open is decided against the program:

* loads and stores land early, late or at random, by a seed; a register that a load fills may not be used before a wait
  covers it (`machine`);
* caches are never coherent by themselves: `order` refuses what one could let down;
* two waves that touch the same dword of LDS without a barrier between are a fault, as are LDS that nothing has written
  and an address of no tensor (`memory`).

Where to look: `program` decodes an assembly text; `instructions` has what each instruction does, `operands` how it
reads and writes registers, `numbers` the arithmetic; `kernel` launches what Triton has compiled.

It is no proof: it runs a few orders of many, with sums along K taken in float64, and knows neither time nor errata.
"""

from tilestream_tools.emulator.fault import Fault
from tilestream_tools.emulator.kernel import Tensor, launch
from tilestream_tools.emulator.machine import Machine
from tilestream_tools.emulator.memory import Memory
from tilestream_tools.emulator.program import decode

__all__ = ["Fault", "Machine", "Memory", "Tensor", "decode", "launch"]
