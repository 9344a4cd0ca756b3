"""Packed instructions: two numbers a lane, of 32 bits in two registers or of 16 bits in one."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from tilestream_tools.emulator import numbers as n_
from tilestream_tools.emulator.instructions.table import Decoded, instruction
from tilestream_tools.emulator.instructions.vector import Function
from tilestream_tools.emulator.machine import Act, Wave
from tilestream_tools.emulator.numbers import I16, LANES, U16, U32, uniform
from tilestream_tools.emulator.operands import Operand, Read, source, target

_SELECTS = "op_sel op_sel_hi neg_lo neg_hi"
_FIFTEEN = uniform(15, U16)
_OF_32: dict[str, Function] = {
    "fma": n_.fma, "mul": lambda a, b: a * b, "add": lambda a, b: a + b,
}  # fmt: skip
#: By name and type: the kind of the numbers, and the function.
_OF_16: dict[str, tuple[str, Function]] = {
    "add_f16": ("h", lambda a, b: a + b), "mul_f16": ("h", lambda a, b: a * b), "fma_f16": ("h", n_.fma16),
    "max_f16": ("h", np.fmax), "min_f16": ("h", np.fmin),
    "add_u16": ("H", lambda a, b: a + b), "sub_u16": ("H", lambda a, b: a - b),
    "sub_i16": ("H", lambda a, b: a - b), "mul_lo_u16": ("H", lambda a, b: a * b),
    "max_u16": ("H", np.maximum), "min_u16": ("H", np.minimum),
    "max_i16": ("I", np.maximum), "min_i16": ("I", np.minimum),
    "lshlrev_b16": ("H", lambda a, b: b << (a & _FIFTEEN)), "lshrrev_b16": ("H", lambda a, b: b >> (a & _FIFTEEN)),
    "ashrrev_i16": ("I", lambda a, b: b >> (a & I16(15))),
}  # fmt: skip


def _halves(one: Decoded) -> list[list[tuple[Operand, int]]]:
    """Of the low and of the high result: each source with its sign, and which of its two numbers it is."""
    found = []
    for select, default, sign in (("op_sel", 0, "neg_lo"), ("op_sel_hi", 1, "neg_hi")):
        which, signs = one.numbers(select, default), one.numbers(sign)
        found.append([
            (replace(o, negated=bool(signs[i])), which[i]) for i, o in enumerate(one.operands[1:])
        ])  # fmt: skip
    return found


def _pair(low: tuple[Operand, int], high: tuple[Operand, int]) -> Read | None:
    """A source's two numbers in vector registers, ``[2, lanes]``, or ``[1, lanes]`` if they are one; None: others."""
    (o, first), (other, second) = low, high
    if o.file != "v" or o.negated or other.negated or o.absolute or first > second:
        return None
    begin, end = o.index + first, o.index + second + 1
    return lambda w: w.f[begin:end]


def _of_both(compute: Function, to: int, sources: list[Read]) -> Act:
    """Both numbers at once."""

    def act(w: Wave) -> None:
        found = compute(*(get(w) for get in sources)).view(U32)
        if w.on is None:
            w.v[to : to + 2] = found
        else:
            w.v[to : to + 2, w.on] = np.broadcast_to(found, (2, LANES))[:, w.on]

    return act


@instruction("v_pk_(fma|mul|add)_f32", _SELECTS)
def _floats(one: Decoded, found: re.Match[str]) -> Act:
    compute, to = _OF_32[found[1]], one.operands[0]
    pairs = [_pair(*sources) for sources in zip(*_halves(one), strict=True)]
    if None not in pairs:
        return _of_both(compute, to.index, pairs)  # type: ignore[arg-type]
    low, high = ([source(o.part(which), "f") for o, which in half] for half in _halves(one))
    put_low, put_high = target(to.part(0), "f"), target(replace(to.part(0), index=to.index + 1), "f")

    def act(w: Wave) -> None:
        x, y = compute(*(get(w) for get in low)), compute(*(get(w) for get in high))
        put_low(w, x)
        put_high(w, y)

    return act


@instruction("v_pk_mov_b32", _SELECTS)
def _move(one: Decoded, _: re.Match[str]) -> Act:
    (first, _second), (_first, second) = _halves(one)
    low, high = (source(o.part(which), "u") for o, which in (first, second))
    n = one.operands[0].index

    def act(w: Wave) -> None:
        x, y = low(w).copy(), high(w).copy()
        w.put(n, x)
        w.put(n + 1, y)

    return act


@instruction(rf"v_pk_({'|'.join(_OF_16)})", _SELECTS)
def _halfwords(one: Decoded, found: re.Match[str]) -> Act:
    kind, compute = _OF_16[found[1]]
    low, high = ([source(o, kind, (16 * which, 16)) for o, which in half] for half in _halves(one))
    n = one.operands[0].index

    def act(w: Wave) -> None:
        x, y = (compute(*(get(w) for get in half)) for half in (low, high))
        w.put(n, x.view(U16).astype(U32) | y.view(U16).astype(U32) << uniform(16))

    return act


@instruction("v_fma_mix(lo|hi)_f16|v_fma_mix_f32", "op_sel op_sel_hi")
def _mixed(one: Decoded, found: re.Match[str]) -> Act:
    half, is_half = one.numbers("op_sel"), one.numbers("op_sel_hi")

    def read(i: int, o: Operand) -> Read:
        if not is_half[i]:
            return source(o, "f")
        get = source(o, "h", (16 * half[i], 16))
        return lambda w: get(w).astype(n_.F32)

    a, b, c = (read(i, o) for i, o in enumerate(one.operands[1:]))
    if found[1] is None:
        whole = target(one.operands[0], "f")
        return lambda w: whole(w, n_.fma(a(w), b(w), c(w)))
    put = target(one.operands[0], "h", (16 if found[1] == "hi" else 0, 16))
    return lambda w: put(w, n_.fma(a(w), b(w), c(w)).astype(n_.F16))  # rounded twice
