"""LDS: reads and writes of 8 to 128 bits a lane, pairs of them, transposing reads, and moves between lanes by it."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from tilestream_tools.emulator.fault import Fault
from tilestream_tools.emulator.instructions.table import Decoded, instruction
from tilestream_tools.emulator.machine import Act, Pending, Wave
from tilestream_tools.emulator.memory import spot_of
from tilestream_tools.emulator.numbers import LANES, U8, U16, U32, Array, extended
from tilestream_tools.emulator.operands import Operand, Unknown

_LANE = np.arange(LANES)


def registers_of(o: Operand, count: int) -> frozenset[int]:
    """So many vector registers from an operand's first on."""
    return frozenset(range(o.index, o.index + count))


def put_words(w: Wave, to: int, words: Array, on: Array | None) -> None:
    """Write ``[registers, lanes]`` dwords to registers from ``to`` on, in the lanes ``on``; None: all of them."""
    if on is None:
        w.v[to : to + len(words)] = words
    else:
        w.v[to : to + len(words), on] = words


def put_part(w: Wave, to: int, x: Array, on: Array | None, small: str, half: str) -> None:
    """Write ``[lanes]`` numbers of fewer than 32 bits.

    Parameters
    ----------
    small
        ``u8``, ``i8``, ``u16``, ``i16``.
    half
        ``_d16`` or ``_d16_hi``: the half of the register that is written; the other stays. Else empty.
    """
    x = x.astype(U32)
    if small[0] == "i":
        x = extended(x, int(small[1:]))
    row = w.rows[to]
    if half:
        before = row if on is None else row[on]
        x = before & U32(0xFFFF) | x << U32(16) if half == "_d16_hi" else before & U32(0xFFFF0000) | x & U32(0xFFFF)
    row[... if on is None else on] = x


def words_to_store(w: Wave, of: int, count: int, on: Array | None) -> Array:
    """``[registers, lanes]`` dwords of registers from ``of`` on: a copy."""
    found: Array = w.v[of : of + count].copy() if on is None else w.v[of : of + count, on]
    return found


def part_to_store(w: Wave, of: int, size: int, on: Array | None, is_high: bool) -> Array:
    """``[1, lanes]`` numbers of 8 or 16 bits: a register's lowest, or of its upper half."""
    x = w.rows[of] if on is None else w.rows[of][on]
    return (x >> U32(16) if is_high else x).astype(U16 if size == 2 else U8)[None]


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


#: Write what was read: ``(wave, first register, elements, lanes)``.
Put = Callable[[Wave, int, Array, "Array | None"], None]


def _reader(one: Decoded, offsets: tuple[int, ...], size: int, put: Put = put_words) -> Act:
    """Read ``size`` bytes at each offset from an address, to neighbouring registers."""
    to, address, text = one.operands[0].index, one.operands[1].index, one.text
    registers = registers_of(one.operands[0], len(offsets) * max(1, size // 4))

    def act(w: Wave) -> None:
        shared, on = w.group.shared, w.on
        spot = spot_of(w.rows[address].tobytes(), w.exec, offsets, size)
        number = shared.begin(w.index, w.epoch, spot)
        _issue_read(
            w, Pending(lambda: put(w, to, shared.load(spot), on), registers, text),
            lambda: shared.end_read(number, w.epoch),
        )  # fmt: skip

    return act


def _writer(one: Decoded, offsets: tuple[int, ...], size: int, is_high: bool = False) -> Act:
    """Write ``size`` bytes of each of the operands behind an address, at its offset."""
    address, *of = (o.index for o in one.operands)
    text, count = one.text, size // 4

    def act(w: Wave) -> None:
        shared, on = w.group.shared, w.on
        spot = spot_of(w.rows[address].tobytes(), w.exec, offsets, size)
        if not count:
            data = part_to_store(w, of[0], size, on, is_high)
        elif len(of) == 1:
            data = words_to_store(w, of[0], count, on)
        else:
            data = np.concatenate([words_to_store(w, n, count, on) for n in of])
        number = shared.begin(w.index, w.epoch, spot, data)
        w.issue(w.other, Pending(
            lambda: shared.store(spot, data), text=text, end=lambda: shared.end_write(number, w.epoch)
        ))  # fmt: skip

    return act


@instruction(r"ds_(read|write)2(st64)?_b(32|64)", "offset0 offset1")
def _pair(one: Decoded, found: re.Match[str]) -> Act:
    size = int(found[3]) // 8
    step = size * (64 if found[2] else 1)
    offsets = tuple(int(one.modifiers.get(name, "0"), 0) * step for name in ("offset0", "offset1"))
    return (_reader if found[1] == "read" else _writer)(one, offsets, size)


@instruction(r"ds_(read|write)_b(32|64|96|128)", "offset")
def _dwords(one: Decoded, found: re.Match[str]) -> Act:
    return (_reader if found[1] == "read" else _writer)(one, (one.offset,), int(found[2]) // 8)


@instruction(r"ds_read_([ui](?:8|16))(_d16(?:_hi)?)?", "offset")
def _read_small(one: Decoded, found: re.Match[str]) -> Act:
    small, half = found[1], found[2] or ""

    def put(w: Wave, to: int, x: Array, on: Array | None) -> None:
        put_part(w, to, x[0], on, small, half)

    return _reader(one, (one.offset,), int(small[1:]) // 8, put)


@instruction(r"ds_write_b(8|16)(_d16_hi)?", "offset")
def _write_small(one: Decoded, found: re.Match[str]) -> Act:
    return _writer(one, (one.offset,), int(found[1]) // 8, bool(found[2]))


@instruction(r"ds_read_b64_tr_b(8|16)", "offset")
def _read_transposed(one: Decoded, found: re.Match[str]) -> Act:
    """Within 16 lanes: of their 16 x 8 bytes, seen as rows of 16 elements, a lane gets a column."""
    size = int(found[1]) // 8
    rows = 8 // size

    def put(w: Wave, to: int, words: Array, on: Array | None) -> None:
        if on is not None:
            raise Fault("a transposing read while lanes are off")
        raw = np.ascontiguousarray(words.T).view(U8)
        columns = np.ascontiguousarray(raw.reshape(4, rows, 16, size).transpose(0, 2, 1, 3))
        put_words(w, to, columns.reshape(LANES, 8).view(U32).T, None)

    return _reader(one, (one.offset,), 8, put)


# Moves between lanes --------------------------------------------------------------------------------------------------


def _shuffle(one: Decoded, origin: Callable[[Wave], Array], of: int) -> Act:
    """Each lane gets another lane's register; 0 of one that is off. No LDS is touched, its counter counts."""
    to = one.operands[0]

    def act(w: Wave) -> None:
        where = origin(w)
        found = np.where(w.lanes[where], w.v[of][where], U32(0))
        on = w.lanes
        w.issue(w.other, Pending(lambda: np.copyto(w.rows[to.index], found, where=on), to.registers, one.text))

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
