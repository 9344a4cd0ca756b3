"""Memory: the device's, and a workgroup's LDS.

What all dies and the host share has no caches before it: `tilestream_tools.emulator.order` refuses each access that one
could let down. Tensors lie in it with gaps between them; an access outside of any is a fault.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tilestream_tools.emulator.fault import Fault
from tilestream_tools.emulator.numbers import I64, U8, U16, U32, U64, Array, to_lanes
from tilestream_tools.emulator.order import Order

#: Bytes that memory is a multiple of.
LINE = 128
#: Bytes between two tensors, which no kernel may touch.
GAP = 4096
#: Under way, no wait has covered it: later than each barrier.
_OPEN = 1 << 30
_ONE, _THREE = np.array(1), np.array(3)
#: The numbers of no access.
_UNREAD, _UNWRITTEN = 0, 1


def gather(memory: Array, at: Array, size: int, words: Array) -> Array:
    """``[accesses, size]`` bytes at these offsets; ``words``: their dwords, as `words_of` has them."""
    if size >= 4 and not np.count_nonzero(at & _THREE):
        found: Array = memory.view(U32)[words]
        return found.view(U8).reshape(-1, size)
    if size == 2 and not np.count_nonzero(at & _ONE):
        return memory.view(U16)[at >> _ONE].view(U8).reshape(-1, 2)
    return memory[at[:, None] + np.arange(size)]


def scatter(memory: Array, at: Array, data: Array, words: Array) -> None:
    """Write ``[accesses, size]`` bytes at these offsets, in the order of the accesses; ``words``: see `gather`."""
    size = data.shape[1]
    if size >= 4 and not np.count_nonzero(at & _THREE):
        memory.view(U32)[words] = data.view(U32).reshape(-1)
    elif size == 2 and not np.count_nonzero(at & _ONE):
        memory.view(U16)[at >> _ONE] = data.view(U16).reshape(-1)
    else:
        memory[at[:, None] + np.arange(size)] = data


class Memory:
    """The device's memory.

    Parameters
    ----------
    base
        The address of its first byte.
    bytes_
        Where it is, of a size that stays: a part of this process's own memory, say. Else it grows.
    """

    def __init__(self, base: int = 0x7F10_0000_0000, bytes_: Array | None = None) -> None:
        self.base, self._first, self._grows = base, np.array(base, I64), bytes_ is None
        self.bytes = np.zeros(0, U8) if bytes_ is None else bytes_
        self.owner = np.zeros(self.bytes.size, np.uint16)  # 0: nobody's
        self._end = 0
        self.names = ["nothing"]
        #: Of the launches under way.
        self.orders: list[Order] = []
        self._grow(GAP)

    def _grow(self, size: int) -> None:
        self._end = -(-size // LINE) * LINE
        if self._grows:
            more = self._end - self.bytes.size
            self.bytes = np.concatenate([self.bytes, np.full(more, 0xFF, U8)])  # of floating-point numbers: NaN
            self.owner = np.concatenate([self.owner, np.zeros(more, self.owner.dtype)])
        elif self._end > self.bytes.size:
            raise MemoryError(f"the emulated memory has {self.bytes.size} bytes; {self._end} are asked for")

    def reserve(self, size: int, name: str, align: int = 256) -> int:
        """So many bytes that hold anything. Returns their address, modulo ``align`` 0."""
        at = -(-self._end // align) * align
        self._grow(at + size + GAP)
        self.names.append(name)
        self.owner[at : at + size] = len(self.names) - 1
        return self.base + at

    def free(self, address: int, size: int) -> None:
        """Nobody may access a tensor's bytes any more, which are not given away again."""
        self.owner[address - self.base : address - self.base + size] = 0

    def allocate(self, array: Array, name: str, align: int = 256) -> int:
        """Copy an array in. Returns its address, modulo ``align`` 0."""
        raw = np.ascontiguousarray(array).view(U8).reshape(-1)
        address = self.reserve(raw.size, name, align)
        self.write(address, raw)
        return address

    def read(self, address: int, like: Array) -> Array:
        """A copy of an array of this shape and dtype."""
        at = address - self.base
        for order in self.orders:
            order.host_reads(at, like.nbytes)
        return self.bytes[at : at + like.nbytes].copy().view(like.dtype).reshape(like.shape)

    def write(self, address: int, array: Array) -> None:
        """What a host or a copy engine writes, past all caches."""
        raw = np.ascontiguousarray(array).view(U8).reshape(-1)
        at = address - self.base
        self.bytes[at : at + raw.size] = raw
        for order in self.orders:
            order.host_writes(at, raw.size)

    def load(self, at: Array, size: int, words: Array) -> Array:
        """``[accesses, size]`` bytes at these offsets; ``words``: their dwords, as `words_of` has them."""
        return gather(self.bytes, at, size, words)

    def store(self, at: Array, data: Array, words: Array) -> None:
        """Write ``[accesses, size]`` bytes at these offsets, in the order of the accesses."""
        scatter(self.bytes, at, data, words)

    def update(self, at: int, size: int, update: Callable[[int], int]) -> int:
        """Update an unsigned number; the number before."""
        place = slice(at, at + size)
        before = int.from_bytes(self.bytes[place].tobytes(), "little")
        after = update(before) & ((1 << 8 * size) - 1)
        self.bytes[place] = np.frombuffer(after.to_bytes(size, "little"), U8)
        return before

    def _are_in_one(self, at: Array, size: int) -> bool:
        """Whether one tensor has all of these accesses: it has what lies between the first and the last."""
        first, last = at.item(at.argmin()), at.item(at.argmax()) + size - 1
        if first < 0 or last >= self.bytes.size:
            return False
        owner: int = self.owner.item(first)
        return owner > 0 and owner == self.owner.item(last)

    def offsets(self, addresses: Array, size: int) -> Array:
        """The offsets of accesses of ``size`` bytes each, of addresses in 64 bits.

        Raises
        ------
        Fault
            If one of them is outside of any tensor.
        """
        at: Array = addresses - self._first
        if at.size and self._are_in_one(at, size):
            return at
        if np.count_nonzero(at.view(U64) > np.array(self.bytes.size - size, U64)):  # those before it are large numbers
            raise Fault(f"addresses {int(addresses.min()):#x} to {int(addresses.max()):#x} are outside of memory")
        first, last = self.owner[at], self.owner[at + np.array(size - 1)]
        if np.count_nonzero(first) < first.size or np.count_nonzero(first != last):
            wrong = (first == 0) | (first != last)
            bad = int(at[wrong][0])
            near = np.flatnonzero(self.owner[: bad + 1])
            behind = f"{bad - near[-1]} bytes behind the end of {self.names[self.owner[near[-1]]]}" if near.size else ""
            raise Fault(f"{size} bytes at {self.base + bad:#x} are of no tensor: {behind}")
        return at


@functools.lru_cache(1 << 12)
def _number(value: int) -> Array:
    """As an array: numpy takes twice as long to compare with a number of Python's."""
    return np.array(value, np.int32)


def _by_unit(of: Array) -> dict[int, Array]:
    """The same bytes as elements of 1, 2 and 4 bytes."""
    return {1: of, 2: of.view(U16), 4: of.view(U32)}


class Spot(NamedTuple):
    """The places of an access of LDS.

    Attributes
    ----------
    words
        Its dwords ``[registers, accesses]``, or ``[1, accesses]`` where an access has less than one.
    cells
        Where its data are: indices of `Shared`'s elements of ``unit`` bytes.
    """

    words: Array
    cells: Array
    unit: int


@functools.lru_cache(1 << 14)
def spot_of(addresses: bytes, lanes: int, offsets: tuple[int, ...], size: int) -> Spot:
    """The places of ``size`` bytes at each offset from the addresses of the lanes that are on.

    Loops access the same places again and again, so they are kept.

    Parameters
    ----------
    addresses
        A dword a lane.
    lanes
        The lanes that are on, as a mask.

    Raises
    ------
    Fault
        If an address is not aligned.
    """
    at = np.frombuffer(addresses, U32)[to_lanes(lanes)].astype(np.intp)
    cells = np.add.outer(np.array(offsets), at)
    if (cells & ((4 if size == 12 else min(size, 8)) - 1)).any():
        raise Fault(f"LDS: {size} bytes at an offset that is not aligned")
    if size < 4:
        return Spot(cells >> 2, cells // size, size)
    words = (cells >> 2)[:, None, :] + np.arange(size // 4)[:, None]
    words = words.reshape(len(offsets) * size // 4, at.size)
    return Spot(words, words, 4)


class Shared:
    """A workgroup's LDS, and which access has touched which dword of it.

    An access lasts from its issue until a wait covers it. Two accesses of two waves to a dword, one of them a write,
    are a race unless a barrier lies between the end of the first and the issue of the second; a write of what is there
    already is none.
    """

    def __init__(self, size: int, waves: int) -> None:
        self.size = -(-max(size, 1) // 4) * 4
        self.bytes = np.full(self.size, 0xFF, U8)
        self._elements, self._issued = _by_unit(self.bytes), _by_unit(self.bytes.copy())
        #: By dword: the number of the access that wrote it last, and of each wave's that read it last.
        self._written = np.full(self.size // 4, _UNWRITTEN, np.int32)
        self._read = np.full((waves, self.size // 4), _UNREAD, np.int32)
        #: By number: whose access it is, and the barriers that its wave had passed when a wait covered it.
        self._wave, self._until = np.full(1024, -1, np.int16), np.full(1024, _OPEN, np.int32)
        self._until[_UNREAD], self._count = -1, 2
        #: Reads under way, and the barriers before the last one that has ended.
        self._reading, self._read_until = 0, -1

    def begin(self, wave: int, epoch: int, spot: Spot, data: Array | None = None) -> int:
        """Issue an access, a write where there is ``data``. Returns its number.

        Raises
        ------
        Fault
            If it is outside of LDS, or a race.
        """
        words = spot.words
        try:
            last = self._written[words]
        except IndexError:
            end = 4 * int(words.max()) + 4
            raise Fault(f"LDS has {self.size} bytes; an access ends at {end}") from None
        barriers = _number(epoch)
        others = self._until[last] >= barriers
        if np.count_nonzero(others):
            others &= self._wave[last] != wave
            if np.count_nonzero(others):
                self._refuse_race(spot, data, last, others)
        if data is not None:
            if self._reading or self._read_until >= epoch:
                open_reads = self._until[self._read[:, words]] >= barriers
                if np.count_nonzero(open_reads):
                    self._refuse_readers(wave, words, open_reads)
            self._issued[spot.unit][spot.cells] = data
        number = self._count
        if number == self._until.size:
            self._wave = np.concatenate([self._wave, self._wave])
            self._until = np.concatenate([self._until, np.full(number, _OPEN, np.int32)])
        self._wave[number], self._count = wave, number + 1
        if data is None:
            self._read[wave][words] = number
            self._reading += 1
        else:
            self._written[words] = number
        return number

    def _refuse_race(self, spot: Spot, data: Array | None, last: Array, others: Array) -> None:
        """Of words that another wave has written since the last barrier, or none ever."""
        words, nothing = spot.words, last == _UNWRITTEN
        if data is None and nothing.any():
            raise Fault(f"reads LDS {4 * words[nothing][0]:#x}, which nothing has written")
        others &= ~nothing
        if others.any() and not (data is not None and np.array_equal(self._issued[spot.unit][spot.cells], data)):
            what, whose = "reads" if data is None else "writes", self._wave[last[others][0]]
            at = 4 * words[others][0]
            raise Fault(f"race: {what} LDS {at:#x}, which wave {whose} writes; no barrier is between")

    def _refuse_readers(self, wave: int, words: Array, is_open: Array) -> None:
        is_open[wave] = False
        if is_open.any():
            who, *where = np.argwhere(is_open)[0]
            at = 4 * words[tuple(where)]
            raise Fault(f"race: writes LDS {at:#x}, which wave {who} reads; no barrier is between")

    def end_write(self, number: int, epoch: int) -> None:
        """A wait has covered a write."""
        self._until[number] = epoch

    def end_read(self, number: int, epoch: int) -> None:
        """A wait has covered a read."""
        self._until[number] = epoch
        self._reading, self._read_until = self._reading - 1, max(self._read_until, epoch)

    def load(self, spot: Spot) -> Array:
        """The elements of an access."""
        found: Array = self._elements[spot.unit][spot.cells]
        return found

    def store(self, spot: Spot, data: Array) -> None:
        """Write them."""
        self._elements[spot.unit][spot.cells] = data
