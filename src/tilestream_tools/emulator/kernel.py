"""Launching a kernel that Triton has compiled: its arguments in memory, its grid, its execution."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilestream_tools.emulator.machine import Grid, Machine, Step
from tilestream_tools.emulator.memory import Memory
from tilestream_tools.emulator.numbers import U8, Array
from tilestream_tools.emulator.program import Program, decode

#: How an argument of Triton's type is packed.
_FORMATS = {"i1": "<B", "i8": "<b", "i16": "<h", "i32": "<i", "i64": "<q", "u32": "<I", "u64": "<Q", "fp32": "<f"}


class Tensor:
    """An array in the emulated memory, as a launch sees a tensor.

    Parameters
    ----------
    array
        What it holds at first; its shape and dtype are those that `numpy` gives back.
    dtype
        As torch calls it: numpy has no bfloat16, nor 8-bit floating point.
    align
        Of its address; ``address % (2 * align)`` is ``align``, so that it is not more aligned than it says.
    """

    def __init__(self, memory: Memory, array: Array, dtype: str, name: str, align: int = 256) -> None:
        self._memory, self._like, self.dtype = memory, array, _Dtype(dtype)
        if align < 256:
            padded = np.concatenate([np.zeros(align, U8), np.ascontiguousarray(array).view(U8).reshape(-1)])
            self.address = memory.allocate(padded, name) + align
        else:
            self.address = memory.allocate(array, name, align)

    def data_ptr(self) -> int:
        """Its address."""
        return self.address

    def ptr_range(self) -> int:
        """Bytes that it has: not said, so that offsets are not taken to be small."""
        return 0

    def numpy(self, count: int | None = None) -> Array:
        """What it holds; of one dimension, the first ``count`` elements."""
        return self._memory.read(self.address, self._like[:count])

    def write(self, array: Array, offset: int = 0) -> None:
        """Write bytes from ``offset`` on, as a host or a copy engine does."""
        self._memory.write(self.address + offset, array)


class _Dtype(str):
    def __str__(self) -> str:
        return f"torch.{str.__str__(self)}"


def pack(program: Program, compiled: Any, names: Sequence[str], filled: Sequence[Any], grid: int, waves: int) -> bytes:
    """A kernel's arguments as its launch lays them out.

    Parameters
    ----------
    compiled
        What Triton made: its signature says which parameters are arguments, and of which types.
    names, filled
        The kernel's parameters and their values.
    grid, waves
        Workgroups, and waves of each.
    """
    raw, values, signature = (
        bytearray(program.argument_bytes),
        dict(zip(names, filled, strict=True)),
        compiled.src.signature,
    )
    passed = [(values[name], signature[name]) for name in names if signature[name] != "constexpr"]
    for (value, kind), place in zip(passed, program.arguments, strict=False):
        if kind.startswith("*"):
            struct.pack_into("<Q", raw, place.offset, value.data_ptr())
        else:
            number = float(value) if kind == "fp32" else int(value)
            if kind == "i64" and number >= 1 << 63:
                number -= 1 << 64
            struct.pack_into(_FORMATS[kind], raw, place.offset, number)
    fill_hidden(program, raw, grid, waves)
    return bytes(raw)


def fill_hidden(program: Program, raw: bytearray, grid: int, waves: int) -> None:
    """Fill in the arguments that the runtime adds behind the kernel's own."""
    sizes = {
        "hidden_block_count_x": ("<I", grid), "hidden_block_count_y": ("<I", 1), "hidden_block_count_z": ("<I", 1),
        "hidden_group_size_x": ("<H", 64 * waves), "hidden_group_size_y": ("<H", 1), "hidden_group_size_z": ("<H", 1),
    }  # fmt: skip
    for place in program.arguments:
        if place.kind in sizes:
            form, value = sizes[place.kind]
            struct.pack_into(form, raw, place.offset, value)


def launch(
    compiled: Any, names: Sequence[str], filled: Sequence[Any], memory: Memory, groups: int, *, text: str | None = None,
    dies: int = 1, resident: int = 0, replaced: Callable[[list[Step]], list[Step]] | None = None, **how: Any,
) -> Machine:  # fmt: skip
    """Execute a compiled kernel.

    Parameters
    ----------
    compiled, names, filled
        See `pack`; tensors among the values are `Tensor`.
    groups, dies, resident
        See `Grid`.
    text
        Assembly that is executed in place of the kernel's own.
    replaced
        Gives the steps that are executed in place of the program's own: see `tilestream_tools.emulator.sums`.
    how
        See `Machine`.

    Returns
    -------
    Machine
        As the launch left it: ``executed`` is the number of instructions.

    Raises
    ------
    Fault
        If the program does what no program may.
    """
    program = decode(compiled.asm["amdgcn"] if text is None else text)
    waves = compiled.metadata.num_warps
    packed = pack(program, compiled, names, filled, groups, waves)
    machine = Machine(memory, **how)
    steps = program.steps if replaced is None else replaced(program.steps)
    machine.execute(steps, grid_of(program, memory, packed, groups, waves, compiled.metadata.shared)._replace(
        dies=dies, resident=resident
    ))  # fmt: skip
    return machine


def grid_of(program: Program, memory: Memory, packed: bytes, groups: int, waves: int, shared: int) -> Grid:
    """A launch with arguments that are packed, the hidden ones among them: these go to the memory. See `Grid`."""
    arguments = memory.allocate(np.frombuffer(packed, U8), "the kernel's arguments")
    return Grid(groups, waves, shared, arguments, program.entry, program.preloaded, program.user_registers)
