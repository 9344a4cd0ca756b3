"""Vector memory: buffer, global and scratch accesses, loads straight to LDS, atomics, cache controls."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tilestream_tools.emulator.fault import Fault
from tilestream_tools.emulator.instructions.lds import (
    part_to_store,
    put_part,
    put_words,
    registers_of,
    words_to_store,
)  # fmt: skip
from tilestream_tools.emulator.instructions.table import Decoded, instruction
from tilestream_tools.emulator.machine import Act, Pending, Wave
from tilestream_tools.emulator.memory import spot_of
from tilestream_tools.emulator.numbers import I64, LANES, MASK32, MASK64, U8, U16, U32, Array, signed, to_mask, uniform
from tilestream_tools.emulator.operands import Operand, Unknown, bits_of, scalar
from tilestream_tools.emulator.order import words_of
from tilestream_tools.emulator.registers import M0, UNWRITTEN

#: Bytes of an access, by what the name ends in, and the kind of a load of fewer than four.
_SIZES = {
    "ubyte": (1, "u8"), "sbyte": (1, "i8"), "byte": (1, ""), "ushort": (2, "u16"), "sshort": (2, "i16"),
    "short": (2, "u16"), "dword": (4, ""), "dwordx2": (8, ""), "dwordx3": (12, ""), "dwordx4": (16, ""),
}  # fmt: skip
_NAMES = "|".join(_SIZES)
_SCOPES = "sc0 sc1 nt"
_SPACE = "(buffer|global|flat)"


class Places(NamedTuple):
    """Where the lanes of an access go.

    Attributes
    ----------
    addresses
        Of the lanes that access memory.
    on
        Those lanes; None: all of them.
    outside
        The lanes that are on and past a buffer's end: their loads are 0, their stores nothing. None: there are none.
    """

    addresses: Array
    on: Array | None
    outside: Array | None = None


def _of_all(w: Wave, addresses: Array) -> Places:
    return Places(addresses, None) if w.on is None else Places(addresses[w.on], w.on)


_LANE = np.arange(LANES)
#: ``(wave, bytes) -> Places``.
Where = Callable[[Wave, int], Places]


def buffer_places(one: Decoded, operands: tuple[Operand, ...]) -> Where:
    """Of a buffer: the base and the size of a resource, a lane's offset, a scalar one."""
    (n, r), wave_offset = (o.index for o in operands[:2]), scalar(operands[2])
    has_offset, offset = "offen" in one.modifiers, uniform(one.offset, I64)

    def where(w: Wave, size: int) -> Places:
        if w.s[r + 1] >> 16 & 0x3FFF:
            raise Fault("a buffer with a stride is not emulated")
        inside = w.rows[n].astype(I64) + offset if has_offset else offset
        fits = inside <= uniform(w.s[r + 2] - size, I64)
        addresses = inside + uniform((w.s[r] | (w.s[r + 1] & 0xFFFF) << 32) + wave_offset(w), I64)
        if np.count_nonzero(fits) == LANES:
            return _of_all(w, addresses)
        on = fits if w.on is None else fits & w.on
        return Places(addresses[on], on, w.lanes & ~fits)

    return where


def global_places(one: Decoded, operands: tuple[Operand, ...]) -> Where:
    """A lane's address, of 64 bits, or of 32 from a scalar base on."""
    n, offset = operands[0].index, one.offset
    if len(operands) > 1 and operands[1].file == "s":
        base = scalar(operands[1], True)
        return lambda w, size: _of_all(w, w.rows[n].astype(I64) + uniform(base(w) + offset, I64))
    get, more = bits_of(operands[0], 64), uniform(offset, I64)
    return lambda w, size: _of_all(w, get(w).view(I64) + more)


def places(one: Decoded, space: str, operands: tuple[Operand, ...]) -> Where:
    """Of the operands behind the data."""
    return (buffer_places if space == "buffer" else global_places)(one, operands)


def is_device_scope(one: Decoded) -> bool:
    """Whether an access is performed where all dies see it. ``sc0`` alone is the workgroup's scope."""
    return "sc1" in one.modifiers


def is_system_scope(one: Decoded) -> bool:
    """Whether a load or a cache control counts for the host and other devices, too."""
    return "sc0" in one.modifiers and "sc1" in one.modifiers


def registers_from(raw: Array) -> Array:
    """``[accesses, size]`` bytes as ``[registers, accesses]`` dwords."""
    return raw.view(U32).T


@instruction(rf"{_SPACE}_load_({_NAMES})(_d16(?:_hi)?)?", f"offset offen lds {_SCOPES}")
def _load(one: Decoded, found: re.Match[str]) -> Act:
    (size, small), half = _SIZES[found[2]], found[3] or ""
    if "lds" in one.modifiers:
        return _to_lds(one, places(one, found[1], one.operands), size)
    where, device, system = places(one, found[1], one.operands[1:]), is_device_scope(one), is_system_scope(one)
    to, registers = one.operands[0].index, registers_of(one.operands[0], max(1, size // 4))

    def put(w: Wave, raw: Array, on: Array | None) -> None:
        if small:
            put_part(w, to, raw.view(U16 if size == 2 else U8)[:, 0], on, small, half)
        else:
            put_words(w, to, registers_from(raw), on)

    def act(w: Wave) -> None:
        addresses, on, outside = where(w, size)
        memory, order = w.machine.memory, w.machine.order
        offsets = memory.offsets(addresses, size)
        words = words_of(offsets, size)
        learned: Array
        if not device:
            order.load(w.known, words)

        def land() -> None:
            nonlocal learned
            if offsets.size:
                put(w, memory.load(offsets, size, words), on)
            if outside is not None:
                put(w, np.zeros((np.count_nonzero(outside), size), U8), outside)
            if device:
                learned = order.observe(w.known, words, system)

        def end() -> None:
            order.acquire(w.known, learned)

        w.issue(w.vector, Pending(land, registers, one.text, end=end if device else None))

    return act


@instruction(rf"(global)_load_lds_({_NAMES})", f"offset {_SCOPES}")
def _load_to_lds(one: Decoded, found: re.Match[str]) -> Act:
    return _to_lds(one, global_places(one, one.operands), _SIZES[found[2]][0])


def _to_lds(one: Decoded, where: Where, size: int) -> Act:
    """From memory past the registers: to M0's offset and the immediate one, the lanes side by side."""
    if is_device_scope(one):
        raise Unknown(one.text)
    offset, side_by_side = one.offset, np.arange(LANES, dtype=U32) * U32(size)

    def act(w: Wave) -> None:
        addresses, on, outside = where(w, size)
        if outside is not None and outside.any():
            raise Fault("a copy to LDS from past a buffer's end")
        memory, shared = w.machine.memory, w.group.shared
        source = memory.offsets(addresses, size)
        words = words_of(source, size)
        w.machine.order.load(w.known, words)
        to = side_by_side + uniform(w.s[M0] & 0x3FFFF)
        spot = spot_of(to.tobytes(), MASK64 if on is None else to_mask(on), (offset,), size)
        number = shared.begin(w.index, w.epoch, spot, registers_from(memory.load(source, size, words)))
        w.issue(w.vector, Pending(
            lambda: shared.store(spot, registers_from(memory.load(source, size, words))), text=one.text,
            end=lambda: shared.end_write(number, w.epoch),
        ))  # fmt: skip

    return act


@instruction(rf"{_SPACE}_store_({_NAMES})(_d16_hi)?", f"offset offen {_SCOPES}")
def _store(one: Decoded, found: re.Match[str]) -> Act:
    size, is_high = _SIZES[found[2]][0], bool(found[3])
    device, system = is_device_scope(one), is_system_scope(one)
    if found[1] == "buffer":
        data, rest = one.operands[0].index, one.operands[1:]
    else:
        data, rest = one.operands[1].index, (one.operands[0], *one.operands[2:])
    where = places(one, found[1], rest)

    def act(w: Wave) -> None:
        addresses, on, _ = where(w, size)
        memory, order, known = w.machine.memory, w.machine.order, w.known
        offsets = memory.offsets(addresses, size)
        if size < 4:
            values = part_to_store(w, data, size, on, is_high).T.view(U8)
        else:
            values = np.ascontiguousarray(words_to_store(w, data, size // 4, on).T).view(U8)
        known.stores += 1
        number, words = known.stores, words_of(offsets, size)
        released = known.in_memory.copy() if device else None
        if released is None:
            order.store(known, words, size < 4)

        def land() -> None:
            memory.store(offsets, values, words)
            if released is not None:
                order.publish(known, number, words, released, system)

        w.issue(w.vector, Pending(land, text=one.text, end=lambda: order.land(known, number)))

    return act


_UPDATES: dict[str, Callable[[int, int, int], int]] = {
    "add": lambda x, y, bits: x + y, "sub": lambda x, y, bits: x - y, "swap": lambda x, y, bits: y,
    "and": lambda x, y, bits: x & y, "or": lambda x, y, bits: x | y, "xor": lambda x, y, bits: x ^ y,
    "smax": lambda x, y, bits: max(signed(x, bits), signed(y, bits)),
    "smin": lambda x, y, bits: min(signed(x, bits), signed(y, bits)),
    "umax": lambda x, y, bits: max(x, y), "umin": lambda x, y, bits: min(x, y),
}  # fmt: skip


@instruction(rf"{_SPACE}_atomic_({'|'.join(_UPDATES)}|cmpswap)(_x2)?", f"offset offen {_SCOPES}")
def _atomic(one: Decoded, found: re.Match[str]) -> Act:
    """Lane by lane. ``sc0``: the number before comes back."""
    words = 2 if found[3] else 1
    returns, compares, operands = "sc0" in one.modifiers, found[2] == "cmpswap", one.operands
    system = "sc1" in one.modifiers
    update = _UPDATES["swap" if compares else found[2]]
    if found[1] == "buffer":
        data, back, rest = operands[0], operands[0], operands[1:]
    else:
        back, operands = (operands[0], operands[1:]) if returns else (operands[1], operands)
        data, rest = operands[1], (operands[0], *operands[2:])
    where, n = places(one, found[1], rest), data.index

    def number(w: Wave, register: int, lane: int) -> int:
        return int(w.v[register, lane]) | (int(w.v[register + 1, lane]) << 32 if words == 2 else 0)

    def act(w: Wave) -> None:
        addresses, on, _ = where(w, 4 * words)
        lanes, memory = _LANE if on is None else np.flatnonzero(on), w.machine.memory
        offsets = memory.offsets(addresses, 4 * words)
        order, known, released = w.machine.order, w.known, w.known.in_memory.copy()
        known.stores += 1
        count, touched = known.stores, words_of(offsets, 4 * words)
        learned: Array
        given = [(number(w, n, int(lane)), number(w, n + words, int(lane)) if compares else 0) for lane in lanes]

        def land() -> None:
            nonlocal learned
            learned = order.observe(known, touched, system)
            order.publish(known, count, touched, released, system)
            for lane, offset, (value, wanted) in zip(lanes, offsets.tolist(), given, strict=True):

                def updated(x: int, value: int = value, wanted: int = wanted) -> int:
                    return x if compares and x != wanted else update(x, value, 32 * words)

                before = memory.update(offset, 4 * words, updated)
                if returns:
                    w.v[back.index, lane] = before & MASK32
                    if words == 2:
                        w.v[back.index + 1, lane] = before >> 32

        def end() -> None:
            order.land(known, count)
            if returns:
                order.acquire(known, learned)

        w.issue(w.vector, Pending(land, registers_of(back, words) if returns else (), one.text, end=end))

    return act


@instruction("scratch_(load|store)_dword(?:x([234]))?", "offset")
def _scratch(one: Decoded, found: re.Match[str]) -> Act:
    """A lane's own memory, of registers that were spilled: at an immediate offset."""
    (data,), others = ([o for o in one.operands if o.file == "v"], [o for o in one.operands if o.file != "v"])
    if any(o.file != "off" for o in others):
        raise Unknown(one.text)
    count, first = int(found[2] or 1), one.offset // 4

    def act(w: Wave) -> None:
        lanes = w.lanes
        slots = [w.scratch.setdefault(first + i, np.full(LANES, UNWRITTEN, U32)) for i in range(count)]
        if found[1] == "load":

            def load() -> None:
                for i, slot in enumerate(slots):
                    np.copyto(w.v[data.index + i], slot, where=lanes)

            w.issue(w.vector, Pending(load, registers_of(data, count), one.text))
            return
        values = w.v[data.index : data.index + count].copy()

        def store() -> None:
            for slot, value in zip(slots, values, strict=True):
                np.copyto(slot, value, where=lanes)

        w.issue(w.vector, Pending(store, text=one.text))

    return act


# Cache controls -------------------------------------------------------------------------------------------------------


def _nothing() -> None:
    pass


@instruction("buffer_wbl2", _SCOPES)
def _write_back(one: Decoded, _: re.Match[str]) -> Act:
    """At the device's scope or wider: what has landed in the die's L2 goes to memory."""
    device = is_device_scope(one)

    def act(w: Wave) -> None:
        known, order = w.known, w.machine.order
        covered = order.write_back(known) if device else known.in_memory
        w.issue(w.vector, Pending(_nothing, text=one.text, end=lambda: order.acquire(known, covered)))

    return act


@instruction("buffer_inv", _SCOPES)
def _invalidate(one: Decoded, _: re.Match[str]) -> Act:
    """At the device's scope or wider: the compute unit's first level and the die's L2 forget what they have read."""
    device, system = is_device_scope(one), is_system_scope(one)

    def act(w: Wave) -> None:
        if device:
            w.machine.order.invalidate(w.known, system)

    return act
