"""Operands: what they are called in assembly, and how an instruction reads and writes them.

A kind is one letter: ``u i f`` 32 bits (unsigned, signed, floating point), ``H I h`` 16 bits, ``q Q d`` 64 bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilestream_tools.emulator.numbers import (
    F16,
    F32,
    F64,
    I16,
    I32,
    I64,
    MASK32,
    U16,
    U32,
    U64,
    Array,
    extended,
    to_lanes,
    to_mask,
    uniform,
)  # fmt: skip
from tilestream_tools.emulator.registers import ACCUMULATORS, EXEC, M0, SCALARS, VCC, Registers

Read = Callable[[Registers], Array]
Write = Callable[[Registers, Array], None]

_NAMED = {
    "vcc": (VCC, 2), "vcc_lo": (VCC, 1), "vcc_hi": (VCC + 1, 1), "m0": (M0, 1), "exec": (EXEC, 2),
    "exec_lo": (EXEC, 1), "exec_hi": (EXEC + 1, 1), "flat_scratch": (102, 2), "flat_scratch_lo": (102, 1),
    "flat_scratch_hi": (103, 1),
}  # fmt: skip
_RANGE = re.compile(r"([vsa])(?:(\d+)|\[(\d+)(?::(\d+))?\])")
_INTEGER = re.compile(r"-?(0x[0-9a-fA-F]+|\d+)")
_REAL = re.compile(r"-?\d*\.\d+(e[+-]?\d+)?")
#: 1 / (2 pi), which assembly abbreviates.
_INVERSE_TAU = 0x3E22F983
_UPPER = uniform(32, U64)
KINDS: dict[str, Any] = {"u": U32, "i": I32, "f": F32, "H": U16, "I": I16, "h": F16, "q": U64, "Q": I64, "d": F64}


class Unknown(NotImplementedError):
    """An instruction, or a form of one, that the emulator does not know."""


@dataclass(frozen=True)
class Operand:
    """A register, several, or a constant.

    Attributes
    ----------
    file
        ``v``: vector registers, accumulators among them; ``s``: scalar ones; ``k``: a constant; else a word, as `off`.
    index, count
        The first register, and how many.
    value
        Of a constant.
    negated, absolute, sign_extended
        Modifiers of a source.
    """

    text: str
    file: str
    index: int = 0
    count: int = 1
    value: int | float = 0
    negated: bool = False
    absolute: bool = False
    sign_extended: bool = False

    @classmethod
    def parse(cls, text: str) -> Operand:
        """As assembly has it.

        Raises
        ------
        Unknown
            If it is none.
        """
        inner, more = text.strip(), {}
        if inner.startswith("sext("):
            inner, more["sign_extended"] = inner[5:-1], True
        if re.match(r"-(?:[vsa|]|vcc)", inner):
            inner, more["negated"] = inner[1:], True
        if inner.startswith("neg("):  # of a constant: neg(0) is -0.0
            inner, more["negated"] = inner[4:-1], True
        if inner.startswith("|"):
            inner, more["absolute"] = inner.strip("|"), True
        found = _RANGE.fullmatch(inner)
        if found:
            first = int(found[2] or found[3])
            count = int(found[4]) - first + 1 if found[4] else 1
            file = "s" if found[1] == "s" else "v"
            return cls(text, file, first + (ACCUMULATORS if found[1] == "a" else 0), count, **more)
        if inner in _NAMED:
            return cls(text, "s", *_NAMED[inner], **more)
        if _INTEGER.fullmatch(inner):
            return cls(text, "k", value=int(inner, 0), **more)
        if _REAL.fullmatch(inner):
            return cls(text, "k", value=float(inner), **more)
        if inner in ("off", "scc"):
            return cls(text, inner)
        raise Unknown(f"operand {text}")

    @property
    def registers(self) -> frozenset[int]:
        """Those that it names: see `SCALARS`."""
        base = {"v": 0, "s": SCALARS}.get(self.file)
        return frozenset() if base is None else frozenset(range(base + self.index, base + self.index + self.count))

    @property
    def plain(self) -> Operand:
        """Without modifiers."""
        return replace(self, negated=False, absolute=False, sign_extended=False)

    def part(self, which: int) -> Operand:
        """One of its registers; a constant stays whole."""
        return self if self.file == "k" else replace(self, index=self.index + which, count=1)

    def bits(self, width: int, kind: str = "u") -> int:
        """A constant's bits, as a source of so many bits has it."""
        if isinstance(self.value, float):
            if abs(self.value - 0.15915494) < 1e-6 and width == 32:
                return _INVERSE_TAU
            real: Any = {16: F16, 32: F32, 64: F64}[width]
            return int(np.array(self.value, real).view({16: U16, 32: U32, 64: U64}[width]))
        # A 32-bit literal is the upper half of a float64; small integers are what they are, as integers.
        if kind == "d" and not -16 <= self.value <= 64:
            return (self.value & MASK32) << 32
        return self.value & ((1 << width) - 1)


# Vector instructions --------------------------------------------------------------------------------------------------


def bits_of(o: Operand, width: int, kind: str = "u") -> Read:
    """A source's bits, 32 or 64 of each lane."""
    n = o.index
    if o.file == "v":
        if width == 64:
            return lambda w: w.rows[n] | w.rows[n + 1].astype(U64) << _UPPER
        return lambda w: w.rows[n]
    if o.file == "s":
        if width == 64:
            return lambda w: uniform(w.s[n] | w.s[n + 1] << 32, U64)
        return lambda w: uniform(w.s[n])
    if o.file == "k":
        constant = uniform(o.bits(width, kind), U64 if width == 64 else U32)
        return lambda w: constant
    raise Unknown(f"operand {o.text}")


def source(o: Operand, kind: str, select: tuple[int, int] | None = None) -> Read:
    """A source of a vector instruction.

    Parameters
    ----------
    select
        The offset and the width of the bits that are read, where they are not the lowest.
    """
    as_type, size = KINDS[kind], np.dtype(KINDS[kind]).itemsize
    if size == 2 and o.file == "k":
        # A literal or a small integer has 32 bits, of which an upper half is read; a real has 16, above them zeros.
        bits = o.bits(16) if isinstance(o.value, float) else o.bits(32)
        half = uniform(bits >> (select or (0,))[0] & 0xFFFF, U16).view(as_type)
        return _signed(lambda w: half, o, kind)
    if o.file == "v" and size == 4 and select is None and not (o.negated or o.absolute or o.sign_extended):
        n = o.index
        if kind == "u":
            return lambda w: w.rows[n]
        if kind == "f":
            return lambda w: w.floats[n]
    raw = bits_of(o, 64 if size == 8 else 32, kind)
    if size == 2 and o.file == "v" and select in (None, (0, 16), (16, 16)) and not o.sign_extended:
        n, half = o.index, int(select == (16, 16))

        def get16(w: Registers) -> Array:
            return w.rows[n].view(as_type)[half::2]

        return _signed(get16, o, kind)
    if size == 2:
        select = select or (0, 16)
    if select is not None and select[1] < 32:
        shift, width = uniform(select[0]), select[1]
        field, keep, whole = raw, uniform((1 << width) - 1), o.sign_extended

        def raw(w: Registers) -> Array:
            x = field(w) >> shift & keep
            return extended(x, width) if whole else x

    def get(w: Registers) -> Array:
        x = raw(w)
        return (x.astype(U16) if size == 2 else x).view(as_type)

    return _signed(get, o, kind)


def _signed(get: Read, o: Operand, kind: str) -> Read:
    """A source with its modifiers of the sign."""
    if kind not in "fhd" or not (o.negated or o.absolute):
        if o.negated or o.absolute:
            raise Unknown(f"{o.text}: a sign of an integer")
        return get
    if o.negated and o.absolute:
        return lambda w: -np.abs(get(w))
    return (lambda w: -get(w)) if o.negated else (lambda w: np.abs(get(w)))


def target(o: Operand, kind: str, select: tuple[int, int] | None = None, keeps: bool = True) -> Write:
    """Where the result of a vector instruction goes, in the lanes that are on.

    Parameters
    ----------
    select
        The bits that are written; ``keeps``: the register's others stay, else they become 0. A 16-bit result without it
        makes the upper half 0.
    """
    if o.file != "v":
        raise Unknown(f"a vector result in {o.text}")
    n, size = o.index, np.dtype(KINDS[kind]).itemsize
    if size == 8:

        def put64(w: Registers, x: Array) -> None:
            halves = np.ascontiguousarray(x).view(U32)
            w.put(n, halves[::2])
            w.put(n + 1, halves[1::2])

        return put64
    if select is None and size == 4:
        return (lambda w, x: w.put(n, x)) if kind == "u" else (lambda w, x: w.put(n, x.view(U32)))
    if select is None:
        return lambda w, x: w.put(n, x.view(U16).astype(U32))
    shift, width = select
    low, up = uniform((1 << width) - 1), uniform(shift)
    keep = uniform(MASK32 ^ ((1 << width) - 1) << shift if keeps else 0)

    def put_part(w: Registers, x: Array) -> None:
        bits = x.view(U16).astype(U32) if size == 2 else x.view(U32) & low
        w.put(n, bits << up | (w.rows[n] & keep))

    return put_part


def _unsigned(o: Operand) -> None:
    """Raise `Unknown` for modifiers of the sign, which these operands have not."""
    if o.negated or o.absolute:
        raise Unknown(f"operand {o.text}: a sign")


def lanes_of(o: Operand) -> Read:
    """A mask in scalar registers, a boolean a lane."""
    _unsigned(o)
    if o.file == "k":
        constant = to_lanes(o.bits(64))
        return lambda w: constant
    n = o.index
    return lambda w: to_lanes(w.s[n] | w.s[n + 1] << 32)


def mask_target(o: Operand) -> Write:
    """Where a comparison's answers go: a mask in scalar registers, 0 for the lanes that are off."""
    put = scalar_target(o, True)

    def act(w: Registers, lanes: Array) -> None:
        put(w, to_mask(lanes if w.on is None else lanes & w.on))

    return act


# Scalar instructions --------------------------------------------------------------------------------------------------


def scalar(o: Operand, is_wide: bool = False) -> Callable[[Registers], int]:
    """A source of a scalar instruction, as an unsigned number."""
    _unsigned(o)
    n = o.index
    if o.file == "s":
        return (lambda w: w.s[n] | w.s[n + 1] << 32) if is_wide else (lambda w: w.s[n])
    if o.file == "scc":
        return lambda w: w.scc
    if o.file == "k":
        constant = o.bits(64 if is_wide else 32)
        return lambda w: constant
    raise Unknown(f"operand {o.text}")


def scalar_target(o: Operand, is_wide: bool = False) -> Callable[[Registers, int], None]:
    """Where the result of a scalar instruction goes, without the bits that do not fit."""
    n = o.index
    if o.file != "s":
        raise Unknown(f"a scalar result in {o.text}")

    if n < EXEC - 1:

        def put_plain(w: Registers, x: int) -> None:
            w.s[n] = x & MASK32

        def put_two(w: Registers, x: int) -> None:
            w.s[n], w.s[n + 1] = x & MASK32, x >> 32 & MASK32

        return put_two if is_wide else put_plain

    def put(w: Registers, x: int) -> None:
        w.s[n] = x & MASK32
        if is_wide:
            w.s[n + 1] = x >> 32 & MASK32
        if n >= EXEC:
            w.exec_changed()

    return put
