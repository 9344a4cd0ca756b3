"""A kernel's assembly, decoded into functions of a wave."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tilestream_tools.emulator.fault import Fault
from tilestream_tools.emulator.instructions import act_of, parse
from tilestream_tools.emulator.machine import Act, Step, Wave
from tilestream_tools.emulator.operands import Operand, Unknown
from tilestream_tools.isa import amdgcn

_ARGUMENT = re.compile(r"\.offset:\s+(\d+)\n\s+\.size:\s+(\d+)\n\s+\.value_kind:\s+(\w+)")
_VCC = Operand.parse("vcc").registers
_M0 = Operand.parse("m0").registers
#: Loads into registers, of which later ones come after earlier ones.
_LOADS = re.compile(r"(buffer|global|flat|scratch)_load(?!_lds)|(ds)_read")


class Argument(NamedTuple):
    """A place among a kernel's arguments. ``kind``: as the metadata has it."""

    offset: int
    size: int
    kind: str


@dataclass(frozen=True)
class Program:
    """A kernel that can be executed.

    Attributes
    ----------
    kernel
        As it was parsed.
    arguments
        In order, those that the compiler adds behind the kernel's own.
    steps
        By index, as a wave's ``pc`` has it. One that the emulator does not know is a fault once it is reached.
    entry
        Where a wave begins.
    unknown
        By mnemonic: an instruction that is not known, and why.
    """

    kernel: amdgcn.Kernel
    arguments: tuple[Argument, ...]
    steps: list[Step]
    entry: int
    unknown: dict[str, str]

    @property
    def argument_bytes(self) -> int:
        """Size of the arguments."""
        return self.kernel.fields["kernarg_size"]

    @property
    def preloaded(self) -> int:
        """Dwords of the arguments that a wave has in registers."""
        return self.kernel.fields.get("user_sgpr_kernarg_preload_length", 0)

    @property
    def user_registers(self) -> int:
        """Scalar registers before the one with the workgroup's number."""
        return self.kernel.fields["user_sgpr_count"]


@functools.lru_cache(8)
def decode(text: str) -> Program:
    """What Triton writes as ``amdgcn``; the same text gives the same object.

    Raises
    ------
    ValueError
        If there is no kernel in it.
    """
    kernel = amdgcn.parse(text)
    arguments = tuple(Argument(int(at), int(size), kind) for at, size, kind in _ARGUMENT.findall(text))
    starts, count = [], 0
    for block in kernel.blocks:
        starts.append(count)
        count += len(block.instructions)
    unknown: dict[str, str] = {}
    steps = [
        _step(
            one, starts[block.successors[0]] if one.kind == "branch" and block.successors else 0, kernel.arch, unknown
        )
        for block in kernel.blocks
        for one in block.instructions
    ]
    program = Program(kernel, arguments, steps, 0, unknown)
    if program.preloaded:
        # Firmware that loads the arguments itself enters 256 bytes on: behind the branch that leads there.
        first = next(i for i, one in enumerate(kernel.instructions) if one.mnemonic == "s_branch")
        return Program(kernel, arguments, steps, first + 1, unknown)
    return program


def _step(one: amdgcn.Instruction, target: int, arch: str, unknown: dict[str, str]) -> Step:
    text = f"{one.mnemonic} {one.operands}".strip()
    try:
        parsed = parse(one.mnemonic, one.operands, target, arch == "gfx942")
        act = act_of(parsed)
    except Unknown as why:
        unknown.setdefault(one.mnemonic, f"{text}: {why}")
        return Step(_refused(text), frozenset(), frozenset(), "", text, one.line)
    registers: frozenset[int] = frozenset().union(*(o.registers for o in parsed.operands))
    if "vcc" in parsed.name or parsed.name == "v_div_fmas_f32":
        registers |= _VCC
    is_to_lds = one.kind == "load_to_lds"
    if is_to_lds:
        registers |= _M0
    found = None if is_to_lds else _LOADS.match(parsed.name)
    counter, loads = "", frozenset[int]()
    if found:
        counter = "vector" if found[1] else "other"
        loads = parsed.operands[0].registers.difference(*(o.registers for o in parsed.operands[1:]))
    return Step(act, registers, loads, counter, text, one.line)


def _refused(text: str) -> Act:
    def act(w: Wave) -> None:
        raise Fault(f"the emulator does not know {text}")

    return act


def unknown_of(examples: Iterable[tuple[str, str, str]]) -> dict[str, str]:
    """Of instructions ``(arch, mnemonic, operands)``: by mnemonic, one that the emulator does not know, and why."""
    unknown: dict[str, str] = {}
    for arch, mnemonic, operands in examples:
        _step(amdgcn.Instruction(mnemonic, operands, 0), 0, arch, unknown)
    return unknown
