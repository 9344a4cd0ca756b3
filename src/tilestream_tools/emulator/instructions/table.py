"""The table of instructions: by a pattern of the name, what makes the function of a wave.

`tilestream_tools.emulator.instructions` imports the modules that fill it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from tilestream_tools.emulator.machine import Act
from tilestream_tools.emulator.operands import Operand, Unknown

#: What an encoding adds to a name; DPP and SDWA have operands of their own.
_ENCODING = re.compile(r"_(?:e32|e64|sdwa|dpp)$")
_MODIFIER = re.compile(r"(\w+):(\[[^\]]*\]|swizzle\(.*\)|\S+)")
_FLAGS = frozenset(("offen", "sc0", "sc1", "nt", "lds", "clamp"))
#: Modifiers of the two encodings that move or select parts of a source: each vector instruction may have them.
DPP = frozenset((
    "quad_perm", "row_shl", "row_shr", "row_ror", "row_bcast", "row_newbcast", "row_mirror", "row_half_mirror",
    "row_mask", "bank_mask", "bound_ctrl",
))  # fmt: skip
SDWA = frozenset(("dst_sel", "dst_unused", "src0_sel", "src1_sel"))


@dataclass(frozen=True)
class Decoded:
    """An instruction in parts.

    Attributes
    ----------
    name
        Without its encoding.
    operands, modifiers
        ``v_add_u32 v0, v1, v2 clamp`` has three and one.
    target
        Of a branch: the index of the instruction that it goes to.
    fnuz
        Whether 8-bit floating point is of gfx942's kinds.
    """

    name: str
    operands: tuple[Operand, ...]
    modifiers: dict[str, str] = field(default_factory=dict)
    text: str = ""
    target: int = 0
    fnuz: bool = False

    @property
    def is_dpp(self) -> bool:
        """Whether lanes of the first source are moved."""
        return not DPP.isdisjoint(self.modifiers)

    @property
    def is_sdwa(self) -> bool:
        """Whether parts of registers are selected."""
        return not SDWA.isdisjoint(self.modifiers)

    @property
    def offset(self) -> int:
        """Its immediate offset, in bytes."""
        return int(self.modifiers.get("offset", "0"), 0)

    def numbers(self, modifier: str, default: int = 0) -> list[int]:
        """A modifier's list, such as ``op_sel:[0,1]``; as many defaults as there are operands if it has none."""
        said = self.modifiers.get(modifier)
        return [int(x) for x in said.strip("[]").split(",")] if said else [default] * len(self.operands)


Make = Callable[[Decoded, "re.Match[str]"], Act]
_TABLE: list[tuple[re.Pattern[str], frozenset[str], Make]] = []


def instruction(pattern: str, modifiers: str = "") -> Callable[[Make], Make]:
    """Enter what makes the instructions whose whole name matches, with at most these modifiers."""

    def enter(make: Make) -> Make:
        _TABLE.append((re.compile(pattern), frozenset(modifiers.split()), make))
        return make

    return enter


@functools.cache
def _entry(name: str) -> tuple[re.Match[str], frozenset[str], Make]:
    for pattern, allowed, make in _TABLE:
        found = pattern.fullmatch(name)
        if found:
            return found, allowed, make
    raise Unknown(name)


def act_of(one: Decoded) -> Act:
    """The function of a wave.

    Raises
    ------
    Unknown
        If the table has no such instruction, or not with such operands or modifiers.
    """
    found, allowed, make = _entry(one.name)
    strange = one.modifiers.keys() - allowed
    if strange:
        raise Unknown(f"{one.name} with {', '.join(sorted(strange))}")
    return make(one, found)


def parse(mnemonic: str, operands: str, target: int = 0, fnuz: bool = False) -> Decoded:
    """An instruction of an assembly text, in parts.

    Raises
    ------
    Unknown
        If an operand or a modifier is.
    """
    text = f"{mnemonic} {operands}".strip()
    name = _ENCODING.sub("", mnemonic)
    if target or name.startswith(("s_branch", "s_cbranch")):
        return Decoded(name, (), {}, text, target, fnuz)
    if name in ("s_waitcnt", "s_getreg_b32"):  # counters and fields of registers have a grammar of their own
        return Decoded(name, (), {"of": operands}, text, target, fnuz)
    found: list[Operand] = []
    modifiers: dict[str, str] = {}
    for part in _split(operands):
        first, *rest = part.split()
        found.append(Operand.parse(first)) if first not in _FLAGS else modifiers.update({first: "1"})
        for word in rest:
            said = _MODIFIER.fullmatch(word)
            if said is None and word not in _FLAGS | DPP:
                raise Unknown(f"modifier {word}")
            modifiers[word if said is None else said[1]] = "1" if said is None else said[2]
    return Decoded(name, tuple(found), modifiers, text, target, fnuz)


def _split(operands: str) -> list[str]:
    """At the commas that are in no bracket."""
    parts, depth = [""], 0
    for letter in operands:
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]
