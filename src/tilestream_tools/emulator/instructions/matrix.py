"""Matrix instructions (MFMA): one product of the wave's 64 lanes.

Of ``[rows, K] @ [K, rows]`` with ``rows`` 16 or 32, lane ``l`` has row (of A) or column (of B) ``l % rows`` and the
``K * rows / 64`` neighbouring elements along K from ``l // rows`` times as many on. Of the result it has column
``l % rows``, in groups of four neighbouring rows.

Products and sums are taken in float64 and rounded once, at the end: documents leave the order along K open.
"""

from __future__ import annotations

import functools
import re

import numpy as np

from tilestream_tools.emulator.fault import Fault
from tilestream_tools.emulator.instructions.table import Decoded, instruction
from tilestream_tools.emulator.machine import Act, Wave
from tilestream_tools.emulator.numbers import F16, F32, F64, LANES, U8, U16, U32, Array, fp8_values, from_bf16
from tilestream_tools.emulator.operands import Unknown

_F8F6F4 = {"0": "fp8", "1": "bf8"}


@functools.lru_cache(1 << 9)
def matrix(registers: bytes, rows: int, kind: str, fnuz: bool) -> Array:
    """``[registers, 64]`` dwords as ``[rows, K]`` float64 numbers of a kind. Tiles use an operand several times."""
    lanes = np.ascontiguousarray(np.frombuffer(registers, U32).reshape(-1, LANES // rows, rows).T).reshape(rows, -1)
    if kind == "f32":
        return lanes.view(F32).astype(F64)
    if kind == "bf16":
        return from_bf16(lanes.view(U16)).astype(F64)
    if kind == "f16":
        return lanes.view(F16).astype(F64)
    return fp8_values(kind, fnuz)[lanes.view(U8)].astype(F64)


def in_registers(product: Array) -> Array:
    """A result ``[rows, rows]``, as ``[registers, 64]``."""
    rows = len(product)
    return product.reshape(-1, LANES // rows, 4, rows).transpose(0, 2, 1, 3).reshape(-1, LANES)


@instruction(
    r"v_mfma_(scale_)?f32_(16|32)x(?:16|32)x\d+_?(f32|f16|bf16|f8f6f4|(?:fp8|bf8)_(?:fp8|bf8))",
    "cbsz blgp op_sel op_sel_hi",
)
def _multiply(one: Decoded, found: re.Match[str]) -> Act:
    rows, kinds = int(found[2]), found[3]
    if kinds == "f8f6f4":
        a_code, b_code = one.modifiers.get("cbsz", "0"), one.modifiers.get("blgp", "0")
        if a_code not in _F8F6F4 or b_code not in _F8F6F4:
            raise Unknown(f"{one.text}: fewer than 8 bits")
        a_kind, b_kind = _F8F6F4[a_code], _F8F6F4[b_code]
    elif one.modifiers:
        raise Unknown(f"{one.text}: broadcasts")
    else:
        a_kind, _, b_kind = kinds.partition("_")
        b_kind = b_kind or a_kind
    if any(one.numbers("op_sel") + one.numbers("op_sel_hi")):
        raise Unknown(f"{one.text}: a scale in another byte than the lowest")
    scales = []
    for o in one.operands[4:]:
        if o.file == "v":
            scales.append(o.index)
        elif o.value not in (127, 0x7F7F7F7F):
            raise Unknown(f"{one.text}: scales other than 1")
    to, a, b, c = one.operands[:4]
    fnuz, count = one.fnuz, rows * rows // LANES
    constant = None if c.file == "v" else np.array(c.bits(32), U32).view(F32)

    def act(w: Wave) -> None:
        if w.on is not None:
            raise Fault("a matrix instruction while lanes are off")
        if any((w.v[n] & U32(0xFF) != 127).any() for n in scales):
            raise Fault("scales other than 1 are not emulated")
        x = matrix(w.v[a.index : a.index + a.count].tobytes(), rows, a_kind, fnuz)
        y = matrix(w.v[b.index : b.index + b.count].tobytes(), rows, b_kind, fnuz)
        before = w.f[c.index : c.index + count] if constant is None else constant
        w.f[to.index : to.index + count] = in_registers(x @ y.T) + before

    return act
