"""LDS: reads and writes of 8 to 128 bits a lane, pairs of them, transposing reads, and moves between lanes by it."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from tilestream_tools.emulator.fault import Fault
from tilestream_tools.emulator.instructions.table import Decoded, instruction
from tilestream_tools.emulator.machine import Act, Pending, Wave
from tilestream_tools.emulator.numbers import I64, LANES, U8, U16, U32, Array, extended
from tilestream_tools.emulator.operands import Operand, Unknown

_LANE = np.arange(LANES)


def registers_of(o: Operand, count: int) -> frozenset[int]:
    """So many vector registers from an operand's first on."""
    return frozenset(range(o.index, o.index + count))


def put_loaded(w: Wave, to: int, raw: Array, lanes: Array, small: str = "", half: str = "") -> None:
    """Write ``[lanes, size]`` loaded bytes to registers from ``to`` on.

    Parameters
    ----------
    small
        Of fewer than 32 bits: ``u8``, ``i8``, ``u16``, ``i16``.
    half
        ``_d16`` or ``_d16_hi``: the half of the register that is written; the other stays.
    """
    if not small:
        words = np.ascontiguousarray(raw).view(U32)
        for i in range(words.shape[1]):
            w.v[to + i][lanes] = words[:, i]
        return
    x = np.ascontiguousarray(raw).view(U16 if raw.shape[1] == 2 else U8)[:, 0].astype(U32)
    if small[0] == "i":
        x = extended(x, int(small[1:]))
    if half:
        before = w.v[to][lanes]
        x = before & U32(0xFFFF) | x << U32(16) if half == "_d16_hi" else before & U32(0xFFFF0000) | x & U32(0xFFFF)
    w.v[to][lanes] = x


def stored(w: Wave, of: int, size: int, lanes: Array, is_high: bool = False) -> Array:
    """``[lanes, size]`` bytes of registers from ``of`` on; of a dword's upper half if ``is_high``."""
    if size >= 4:
        return np.ascontiguousarray(w.v[of : of + size // 4, lanes].T).view(U8)
    x = w.v[of][lanes] >> U32(16 if is_high else 0)
    return x.astype(U16 if size == 2 else U8)[:, None].view(U8)


def _issue_read(w: Wave, one: Pending, end: Callable[[], None]) -> None:
    """Issue a read of LDS. Where LDS works in order, it is performed now, behind all that its wave issued before."""
    if w.machine.lds_in_order:
        for earlier in w.other:
            earlier.go()
        one.go()
        end()
    else:
        one.end = end
    w.issue(w.other, one)


def _read(w: Wave, address: Array, parts: list[tuple[int, int, int]], one: Decoded, put: Callable[..., None]) -> None:
    """Read ``parts``: offset, bytes, first register."""
    shared, index, lanes = w.group.shared, w.index, w.lanes
    if w.on is not None:
        lanes = lanes.copy()
    accesses = []
    for offset, size, to in parts:
        at = address[lanes].astype(I64) + offset
        accesses.append((at, size, to, shared.begin(index, w.epoch, at, size)))

    def land() -> None:
        for at, size, to, _ in accesses:
            put(w, to, shared.load(at, size), lanes)

    def end() -> None:
        for *_, words in accesses:
            shared.end(index, w.epoch, words, False)

    registers = frozenset(to + i for _, size, to in parts for i in range(max(1, size // 4)))
    _issue_read(w, Pending(land, registers, one.text), end)


def _write(w: Wave, address: Array, parts: list[tuple[int, int, int]], one: Decoded, is_high: bool = False) -> None:
    """Write ``parts``: offset, bytes, first register."""
    shared, index, lanes = w.group.shared, w.index, w.lanes
    accesses = []
    for offset, size, of in parts:
        at, data = address[lanes].astype(I64) + offset, stored(w, of, size, lanes, is_high)
        accesses.append((at, data, shared.begin(index, w.epoch, at, size, data)))

    def land() -> None:
        for at, data, _ in accesses:
            shared.store(at, data)

    def end() -> None:
        for *_, words in accesses:
            shared.end(index, w.epoch, words, True)

    w.issue(w.other, Pending(land, text=one.text, end=end))


@instruction(r"ds_(read|write)2(st64)?_b(32|64)", "offset0 offset1")
def _pair(one: Decoded, found: re.Match[str]) -> Act:
    size = int(found[3]) // 8
    step = size * (64 if found[2] else 1)
    first, second = (int(one.modifiers.get(name, "0"), 0) * step for name in ("offset0", "offset1"))
    if found[1] == "read":
        to, a = one.operands[0].index, one.operands[1].index
        parts = [(first, size, to), (second, size, to + size // 4)]
        return lambda w: _read(w, w.v[a], parts, one, put_loaded)
    a, x, y = (o.index for o in one.operands)
    parts = [(first, size, x), (second, size, y)]
    return lambda w: _write(w, w.v[a], parts, one)


@instruction(r"ds_(read|write)_b(32|64|96|128)", "offset")
def _dwords(one: Decoded, found: re.Match[str]) -> Act:
    size, (x, y) = int(found[2]) // 8, (o.index for o in one.operands)
    if found[1] == "read":
        return lambda w: _read(w, w.v[y], [(one.offset, size, x)], one, put_loaded)
    return lambda w: _write(w, w.v[x], [(one.offset, size, y)], one)


@instruction(r"ds_read_([ui](?:8|16))(_d16(?:_hi)?)?", "offset")
def _read_small(one: Decoded, found: re.Match[str]) -> Act:
    small, half, (to, a) = found[1], found[2] or "", (o.index for o in one.operands)

    def put(w: Wave, to: int, raw: Array, lanes: Array) -> None:
        put_loaded(w, to, raw, lanes, small, half)

    return lambda w: _read(w, w.v[a], [(one.offset, int(small[1:]) // 8, to)], one, put)


@instruction(r"ds_write_b(8|16)(_d16_hi)?", "offset")
def _write_small(one: Decoded, found: re.Match[str]) -> Act:
    size, is_high, (a, x) = int(found[1]) // 8, bool(found[2]), (o.index for o in one.operands)
    return lambda w: _write(w, w.v[a], [(one.offset, size, x)], one, is_high)


@instruction(r"ds_read_b64_tr_b(8|16)", "offset")
def _read_transposed(one: Decoded, found: re.Match[str]) -> Act:
    """Within 16 lanes: of their 16 x 8 bytes, seen as rows of 16 elements, a lane gets a column."""
    to, a = (o.index for o in one.operands)
    size = int(found[1]) // 8
    rows = 8 // size

    def put(w: Wave, to: int, raw: Array, lanes: Array) -> None:
        if len(raw) != LANES:
            raise Fault("a transposing read while lanes are off")
        columns = raw.reshape(4, rows, 16, size).transpose(0, 2, 1, 3)
        put_loaded(w, to, np.ascontiguousarray(columns).reshape(LANES, 8), lanes)

    return lambda w: _read(w, w.v[a], [(one.offset, 8, to)], one, put)


# Moves between lanes --------------------------------------------------------------------------------------------------


def _shuffle(one: Decoded, origin: Callable[[Wave], Array], of: int) -> Act:
    """Each lane gets another lane's register; 0 of one that is off. No LDS is touched, its counter counts."""
    to = one.operands[0]

    def act(w: Wave) -> None:
        where = origin(w)
        found = np.where(w.lanes[where], w.v[of][where], U32(0))
        lanes = w.lanes.copy()
        w.issue(w.other, Pending(lambda: np.copyto(w.v[to.index], found, where=lanes), to.registers, one.text))

    return act


@instruction("ds_bpermute_b32", "offset")
def _permute(one: Decoded, _: re.Match[str]) -> Act:
    a, of = one.operands[1].index, one.operands[2].index
    return _shuffle(one, lambda w: (w.v[a] + U32(one.offset)) >> U32(2) & U32(63), of)


@instruction("ds_swizzle_b32", "offset")
def _swizzle(one: Decoded, _: re.Match[str]) -> Act:
    found = re.fullmatch(r'swizzle\((\w+), ?"?([^")]*)"?\)', one.modifiers.get("offset", ""))
    if found is None:
        raise Unknown(one.text)
    how, said = found[1], found[2]
    if how == "SWAP":
        origin = _LANE ^ int(said)
    elif how == "REVERSE":
        origin = _LANE ^ (int(said) - 1)
    elif how == "BROADCAST":
        width, which = map(int, said.split(","))
        origin = _LANE // width * width + which
    elif how == "QUAD_PERM":
        origin = (_LANE & ~3) + np.array([int(x) for x in said.split(",")])[_LANE & 3]
    elif how == "BITMASK_PERM":
        origin = _LANE.copy()
        for i, letter in enumerate(reversed(said)):
            bit = 1 << i
            origin = {"0": origin & ~bit, "1": origin | bit, "p": origin, "i": origin ^ bit}[letter]
    else:
        raise Unknown(one.text)
    return _shuffle(one, lambda w: origin, one.operands[1].index)
