"""AMDGCN assembly as LLVM writes it: a kernel's registers, its basic blocks, and the meaning of their instructions.

Text in, plain values out: no Triton, no GPU. An instruction is parsed as far as a model or a test needs: its kind, the
bits that each lane moves, the counters that a wait leaves, the registers it writes and reads. The rest stays text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

Kind = Literal[
    "mfma", "load", "load_to_lds", "store", "atomic", "lds_read", "lds_write", "shuffle", "scratch", "wait", "barrier",
    "sleep", "valu", "transcendental", "accumulator_move", "salu", "smem", "branch", "other",
]  # fmt: skip

#: Lanes of a wave: every CDNA kernel is compiled for 64.
WAVE = 64

_WIDTHS = {
    "ubyte": 8, "sbyte": 8, "byte": 8, "ushort": 16, "sshort": 16, "short": 16, "dword": 32, "dwordx2": 64,
    "dwordx3": 96, "dwordx4": 128,
}  # fmt: skip
_WAIT = re.compile(r"(vmcnt|lgkmcnt|expcnt)\((\d+)\)")
_DS_WIDTH = re.compile(r"_[biuf](8|16|32|64|96|128)(?:_|$)")
_MFMA = re.compile(r"v_s?mfma(?:c|_scale)?_[fi](?:32|64)_(\d+)x(\d+)x(\d+)_?(?:(\d+)b_)?(\w+)")
_REGISTER = re.compile(r"\b([vas])(?:(\d+)\b|\[(\d+):(\d+)\])")
_TRANSCENDENTAL = re.compile(r"v_(?:exp|log|rcp|rsq|sqrt|sin|cos)_")
_LABEL = re.compile(r"^(\.?[\w$.]+):")
_BRANCH = re.compile(r"^s_(?:c?branch\w*)$")
_FIELD = re.compile(r"^ *\.(\w+):\s+(\d+)\s*$", re.MULTILINE)
_DIRECTIVE = re.compile(r"^\s*\.amdhsa_(\w+)\s+(\d+)", re.MULTILINE)

Register = tuple[str, int]


class Instruction(NamedTuple):
    """One instruction.

    Attributes
    ----------
    mnemonic, operands
        As written, without the comment.
    line
        Of the text, from 1.
    """

    mnemonic: str
    operands: str
    line: int

    @property
    def kind(self) -> Kind:
        """What it is, as far as a model of its cost cares."""
        return _kind(self.mnemonic, self.operands)

    @property
    def bits(self) -> int:
        """Bits that each lane moves to or from memory or LDS; 0 if it moves none."""
        return _bits(self.mnemonic, self.kind)

    @property
    def mfma(self) -> Mfma | None:
        """Its shape, if it is a matrix instruction."""
        found = _MFMA.match(self.mnemonic)
        if found is None or self.kind != "mfma":
            return None
        m, n, k = int(found[1]), int(found[2]), int(found[3])
        return Mfma(m, n, k, int(found[4] or 1), found[5], _narrow(self.operands))

    @property
    def waits(self) -> dict[str, int]:
        """``vmcnt``, ``lgkmcnt``: how many of each kind may still be under way behind a wait."""
        return {name: int(left) for name, left in _WAIT.findall(self.operands)} if self.kind == "wait" else {}

    @property
    def target(self) -> str:
        """The label that a branch goes to; empty for what is no branch."""
        return self.operands.strip() if self.kind == "branch" else ""

    @property
    def writes(self) -> frozenset[Register]:
        """Vector registers that it writes: its first operand, unless it stores."""
        if self.kind in ("store", "lds_write", "load_to_lds", "wait", "barrier", "branch", "salu", "smem", "sleep"):
            return frozenset()
        return frozenset(_registers(self._operand_list[0])) if self._operand_list else frozenset()

    @property
    def reads(self) -> frozenset[Register]:
        """Vector registers that it reads."""
        stores = self.kind in ("store", "lds_write", "load_to_lds", "atomic")
        return frozenset(x for part in self._operand_list[0 if stores else 1 :] for x in _registers(part))

    @property
    def _operand_list(self) -> list[str]:
        return [part.strip() for part in self.operands.split(",")] if self.operands else []


class Mfma(NamedTuple):
    """A matrix instruction: ``blocks`` products of ``[m, k] @ [k, n]``.

    Attributes
    ----------
    types
        Of its operands, as the mnemonic ends: ``bf16``, ``fp8_bf8``, ``f8f6f4``.
    narrow
        ``f8f6f4`` only: whether both operands have fewer than 8 bits, and it takes half the time.
    """

    m: int
    n: int
    k: int
    blocks: int
    types: str
    narrow: bool = False

    @property
    def operations(self) -> int:
        """Multiply-adds, counted two each."""
        return 2 * self.m * self.n * self.k * self.blocks

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}_{self.types}"


@dataclass(frozen=True)
class Block:
    """A basic block.

    Attributes
    ----------
    label
        Its label; empty where control only falls into it.
    successors
        Indices of the blocks that can come next.
    """

    label: str
    instructions: tuple[Instruction, ...]
    successors: tuple[int, ...]


@dataclass(frozen=True)
class Loop:
    """A natural loop: what runs from its head until it comes back there.

    Attributes
    ----------
    head
        Index of the block that it begins with.
    body
        Indices of its blocks, the head's and those of loops inside it among them.
    instructions
        Of all its blocks, in the text's order: those of a branch that is not always taken count as if it were.
    """

    head: int
    body: frozenset[int]
    instructions: tuple[Instruction, ...]

    @cached_property
    def counts(self) -> Counter[str]:
        """How many of each kind, with the bits that a lane moves: ``load_to_lds 128``, ``lds_read 64``, ``barrier``."""
        return Counter(one.kind + (f" {one.bits}" if one.bits else "") for one in self.instructions)

    @cached_property
    def mfma(self) -> Counter[str]:
        """Matrix instructions by shape and types: ``32x32x8_bf16``."""
        return Counter(str(one.mfma) for one in self.instructions if one.mfma)

    @property
    def waits(self) -> list[dict[str, int]]:
        """What each ``s_waitcnt`` leaves under way, in order."""
        return [one.waits for one in self.instructions if one.waits]


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel.

    Attributes
    ----------
    name, arch
        Its symbol, and what it was compiled for: ``gfx942``.
    fields
        The numbers of its metadata, by their names there: ``vgpr_count``, ``agpr_count``, ``sgpr_count``,
        ``vgpr_spill_count``, ``sgpr_spill_count``, ``private_segment_fixed_size``, ``group_segment_fixed_size``.
    blocks
        Its code.
    """

    name: str
    arch: str
    fields: dict[str, int]
    blocks: tuple[Block, ...]

    @property
    def instructions(self) -> Iterator[Instruction]:
        """All of them, in the text's order."""
        return (instruction for block in self.blocks for instruction in block.instructions)

    @property
    def vgprs(self) -> int:
        """Vector registers of a lane, accumulators among them."""
        return self.fields.get("vgpr_count", 0)

    @property
    def agprs(self) -> int:
        """Of those, accumulators."""
        return self.fields.get("agpr_count", 0)

    @property
    def sgprs(self) -> int:
        """Scalar registers of a wave."""
        return self.fields.get("sgpr_count", 0)

    @property
    def spilled(self) -> dict[str, int]:
        """Vector registers that went to memory, and bytes of it a lane. Scalar ones do not: see `in_lanes`."""
        keys = ("vgpr_spill_count", "private_segment_fixed_size")
        return {key: self.fields.get(key, 0) for key in keys}

    @property
    def in_lanes(self) -> int:
        """Scalar registers that are kept in lanes of vector registers: each write and use is an instruction more."""
        return self.fields.get("sgpr_spill_count", 0)

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """Its natural loops, outer ones before those inside them."""
        return tuple(_loops(self.blocks))

    @property
    def main_loop(self) -> Loop | None:
        """The innermost loop with the most matrix operations, of several the shortest; None where no loop has any."""
        multiplying = [loop for loop in self.loops if any(one.mfma for one in loop.instructions)]
        inner = [loop for loop in multiplying if not any(other.body < loop.body for other in multiplying)]

        def size(loop: Loop) -> tuple[int, int]:
            return sum(x.mfma.operations for x in loop.instructions if x.mfma), -len(loop.instructions)

        return max(inner, key=size, default=None)


def parse(text: str) -> Kernel:
    """The kernel of an assembly file: its first, as Triton writes one.

    Parameters
    ----------
    text
        What LLVM writes for ``amdgcn-amd-amdhsa``.

    Raises
    ------
    ValueError
        If there is no kernel in it.
    """
    descriptor = re.search(r"^\s*\.amdhsa_kernel\s+(\S+)", text, re.MULTILINE)
    if descriptor is None:
        raise ValueError("no AMDGCN kernel: the text has no .amdhsa_kernel; give the assembly that LLVM writes")
    name = descriptor[1]
    arch = re.search(r'amdgcn_target\s+"?[\w.-]*?(gfx\w+)', text)
    directives = text[descriptor.start() :].partition(".end_amdhsa_kernel")[0]
    fields = {key: int(value) for key, value in _DIRECTIVE.findall(directives)}
    fields |= {key: int(value) for key, value in _FIELD.findall(_metadata(text, name))}
    fields.setdefault("vgpr_count", fields.get("next_free_vgpr", 0))
    return Kernel(name, arch[1] if arch else "", fields, tuple(_blocks(_code(text, name))))


def _metadata(text: str, name: str) -> str:
    """The entry of a kernel, of the metadata's list of kernels; empty where it has none."""
    kernels = re.split(r"^  - ", text.rpartition(".amdgpu_metadata")[2], flags=re.MULTILINE)
    return next((one for one in kernels if re.search(rf"\.name:\s+{re.escape(name)}\s*$", one, re.MULTILINE)), "")


def _code(text: str, name: str) -> Iterator[tuple[str, Instruction | None]]:
    """``(label, None)`` and ``("", instruction)`` of the kernel's own text, in order."""
    lines = iter(enumerate(text.splitlines(), 1))
    for _, line in lines:
        if line.startswith(f"{name}:"):
            break
    else:
        raise ValueError(f"no AMDGCN kernel: {name} is described, but its label is missing")
    for number, line in lines:
        if line.startswith((".Lfunc_end", "\t.section\t.rodata", "\t.size")):
            return
        label = _LABEL.match(line)
        if label:
            yield label[1], None
            continue
        written = line.partition(";")[0].partition("//")[0].strip()
        if written and not written.startswith("."):
            mnemonic, _, operands = written.partition(" ")
            yield "", Instruction(mnemonic.strip(), operands.strip(), number)


def _blocks(code: Iterator[tuple[str, Instruction | None]]) -> Iterator[Block]:
    cut: list[tuple[list[str], list[Instruction]]] = [([], [])]
    for label, instruction in code:
        if instruction is None:
            if cut[-1][1]:
                cut.append(([], []))
            cut[-1][0].append(label)
        else:
            cut[-1][1].append(instruction)
            if instruction.kind == "branch" or instruction.mnemonic == "s_endpgm":
                cut.append(([], []))
    if len(cut) > 1 and not any(cut[-1]):  # behind the last instruction
        cut.pop()
    where = {label: i for i, (labels, _) in enumerate(cut) for label in labels}
    for i, (labels, instructions) in enumerate(cut):
        successors = []
        last = instructions[-1] if instructions else None
        if last is not None and last.target in where:
            successors.append(where[last.target])
        leaves = last is not None and last.mnemonic in ("s_branch", "s_endpgm", "s_setpc_b64")
        if not leaves and i + 1 < len(cut):
            successors.append(i + 1)
        yield Block(labels[0] if labels else "", tuple(instructions), tuple(successors))


def _loops(blocks: tuple[Block, ...]) -> list[Loop]:
    """By back edges: those to a block that dominates where they come from (Aho, Lam, Sethi, Ullman, 9.6)."""
    before: list[set[int]] = [set() for _ in blocks]
    for i, block in enumerate(blocks):
        for successor in block.successors:
            before[successor].add(i)
    everything = set(range(len(blocks)))
    dominators = [{0}] + [everything] * (len(blocks) - 1)
    changed = True
    while changed:
        changed = False
        for i in range(1, len(blocks)):
            reached = [dominators[j] for j in before[i]]
            now = {i} | (set.intersection(*reached) if reached else set())
            if now != dominators[i]:
                dominators[i], changed = now, True
    bodies: dict[int, set[int]] = {}
    for i, block in enumerate(blocks):
        for head in block.successors:
            if head in dominators[i]:
                body = bodies.setdefault(head, {head})
                todo = [i]
                while todo:
                    at = todo.pop()
                    if at not in body:
                        body.add(at)
                        todo += before[at]
    found = [
        Loop(head, frozenset(body), tuple(x for i in sorted(body) for x in blocks[i].instructions))
        for head, body in bodies.items()
    ]
    return sorted(found, key=lambda loop: -len(loop.body))


def _kind(mnemonic: str, operands: str) -> Kind:
    if mnemonic.startswith("v_"):
        if re.match(r"v_s?mfma(?!_ld_scale)", mnemonic):
            return "mfma"
        if mnemonic.startswith(("v_accvgpr_read", "v_accvgpr_write", "v_accvgpr_mov")):
            return "accumulator_move"
        return "transcendental" if _TRANSCENDENTAL.match(mnemonic) else "valu"
    if mnemonic.startswith("ds_"):
        if mnemonic.startswith(("ds_bpermute", "ds_permute", "ds_swizzle")):
            return "shuffle"
        if mnemonic.startswith("ds_read"):
            return "lds_read"
        return "lds_write" if mnemonic.startswith("ds_write") else "atomic"
    memory = re.match(r"(?:buffer|global|flat|scratch)_(load|store|atomic)", mnemonic)
    if memory:
        if mnemonic.startswith("scratch_"):
            return "scratch"
        if memory[1] == "load" and ("lds" in mnemonic or re.search(r"\blds\b", operands)):
            return "load_to_lds"
        return memory[1]  # type: ignore[return-value]
    if mnemonic == "s_waitcnt":
        return "wait"
    if mnemonic in ("s_barrier", "s_sleep"):
        return "barrier" if mnemonic == "s_barrier" else "sleep"
    if _BRANCH.match(mnemonic):
        return "branch"
    if mnemonic.startswith(("s_load", "s_buffer_load", "s_store", "s_memrealtime", "s_memtime", "s_dcache")):
        return "smem"
    return "salu" if mnemonic.startswith("s_") else "other"


def _bits(mnemonic: str, kind: Kind) -> int:
    if kind in ("lds_read", "lds_write", "shuffle"):
        width = _DS_WIDTH.search(mnemonic)
        several = 2 if re.match(r"ds_(?:read|write)2", mnemonic) else 1
        return several * int(width[1]) if width else 0
    if kind in ("load", "load_to_lds", "store", "scratch"):
        named = re.search(r"_(?:load|store)_(?:lds_)?(?:format_)?(\w+?)(?:_d16\w*)?$", mnemonic)
        return _WIDTHS.get(named[1], 0) if named else 0
    return 0


def _narrow(operands: str) -> bool:
    """Of ``f8f6f4``: ``cbsz`` and ``blgp`` say what A and B are, and 0 and 1 are kinds of 8 bits."""
    said = [re.search(rf"\b{name}:(\d+)", operands) for name in ("cbsz", "blgp")]
    return all(x is not None and int(x[1]) > 1 for x in said)


def _registers(operand: str) -> Iterator[Register]:
    for file, one, first, last in _REGISTER.findall(operand):
        if file != "s":
            numbers = (int(one),) if one else range(int(first), int(last) + 1)
            yield from ((file, number) for number in numbers)
