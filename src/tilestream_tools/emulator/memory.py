"""Memory: the device's, and a workgroup's LDS.

What all dies and the host share has no caches before it: `tilestream_tools.emulator.order` refuses each access that one
could let down. Tensors lie in it with gaps between them; an access outside of any is a fault.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilestream_tools.emulator.fault import Fault
from tilestream_tools.emulator.numbers import I64, U8, U32, Array
from tilestream_tools.emulator.order import Order

#: Bytes that memory is a multiple of.
LINE = 128
#: Bytes between two tensors, which no kernel may touch.
GAP = 4096
#: Under way, no wait has covered it: later than each barrier.
_OPEN = 1 << 30


def gather(memory: Array, at: Array, size: int) -> Array:
    """``[accesses, size]`` bytes at these offsets."""
    if size % 4 == 0 and not (at & 3).any():
        found: Array = memory.view(U32)[(at >> 2)[:, None] + np.arange(size // 4)]
        return found.view(U8)
    return memory[at[:, None] + np.arange(size)]


def scatter(memory: Array, at: Array, data: Array) -> None:
    """Write ``[accesses, size]`` bytes at these offsets, in the order of the accesses."""
    size = data.shape[1]
    if size % 4 == 0 and not (at & 3).any():
        memory.view(U32)[(at >> 2)[:, None] + np.arange(size // 4)] = data.view(U32)
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
        self.base, self._grows = base, bytes_ is None
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
        """Nobody may access these bytes any more, which are not given away again."""
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

    def load(self, at: Array, size: int) -> Array:
        """``[accesses, size]`` bytes at these offsets."""
        return gather(self.bytes, at, size)

    def store(self, at: Array, data: Array) -> None:
        """Write ``[accesses, size]`` bytes at these offsets, in the order of the accesses."""
        scatter(self.bytes, at, data)

    def update(self, at: int, size: int, update: Callable[[int], int]) -> int:
        """Update an unsigned number; the number before."""
        place = slice(at, at + size)
        before = int.from_bytes(self.bytes[place].tobytes(), "little")
        after = update(before) & ((1 << 8 * size) - 1)
        self.bytes[place] = np.frombuffer(after.to_bytes(size, "little"), U8)
        return before

    def offsets(self, addresses: Array, size: int) -> Array:
        """The offsets of accesses of ``size`` bytes each.

        Raises
        ------
        Fault
            If one of them is outside of any tensor.
        """
        at = addresses.astype(I64) - self.base
        if not at.size:
            return at
        if int(at.min()) < 0 or int(at.max()) + size > self.bytes.size:
            raise Fault(f"addresses {int(addresses.min()):#x} to {int(addresses.max()):#x} are outside of memory")
        first = self.owner[at]
        wrong = (first == 0) | (self.owner[at + size - 1] != first)
        if wrong.any():
            bad = int(at[wrong][0])
            near = np.flatnonzero(self.owner[: bad + 1])
            behind = f"{bad - near[-1]} bytes behind the end of {self.names[self.owner[near[-1]]]}" if near.size else ""
            raise Fault(f"{size} bytes at {self.base + bad:#x} are of no tensor: {behind}")
        return at


class Shared:
    """A workgroup's LDS, and who has touched which dword of it since which barrier.

    An access lasts from its issue until a wait covers it. Two accesses of two waves to a dword, one of them a write,
    are a race unless a barrier lies between the end of the first and the issue of the second; a write of what is there
    already is none.
    """

    def __init__(self, size: int, waves: int) -> None:
        self.size = -(-max(size, 1) // 4) * 4
        self.bytes = np.full(self.size, 0xFF, U8)
        self._issued = self.bytes.copy()
        words = self.size // 4
        self._writer = np.full(words, -1, np.int16)
        self._written_until = np.full(words, -1, np.int32)
        self._read_until = np.full((waves, words), -1, np.int32)

    def begin(self, wave: int, epoch: int, at: Array, size: int, data: Array | None = None) -> Array:
        """Issue an access of ``size`` bytes at each offset, a write where there is ``data``. Returns its dwords.

        Raises
        ------
        Fault
            If it is outside of LDS, not aligned, or a race.
        """
        if at.size and (int(at.min()) < 0 or int(at.max()) + size > self.size):
            raise Fault(f"LDS has {self.size} bytes; {size} at {int(at.max())}")
        if (at % (4 if size == 12 else min(size, 8))).any():
            raise Fault(f"LDS: {size} bytes at an offset that is not aligned")
        words = at >> 2 if size <= 4 else ((at >> 2)[:, None] + np.arange(size // 4)).ravel()
        other = (self._written_until[words] >= epoch) & (self._writer[words] != wave)
        if data is None:
            if (self._writer[words] < 0).any():
                raise Fault(f"reads LDS {4 * words[self._writer[words] < 0][0]:#x}, which nothing has written")
            self._read_until[wave, words] = _OPEN
        else:
            index = at[:, None] + np.arange(size)
            if other.any() and np.array_equal(self._issued[index], data):
                other[:] = False
            self._issued[index] = data
            readers = self._read_until[:, words] >= epoch
            readers[wave] = False
            if readers.any():
                who, which = np.argwhere(readers)[0]
                raise Fault(f"race: writes LDS {4 * words[which]:#x}, which wave {who} reads; no barrier is between")
        if other.any():
            word = words[other][0]
            what = "reads" if data is None else "writes"
            raise Fault(
                f"race: {what} LDS {4 * word:#x}, which wave {self._writer[word]} writes; no barrier is between"
            )
        if data is not None:
            self._writer[words], self._written_until[words] = wave, _OPEN
        return words

    def end(self, wave: int, epoch: int, words: Array, is_write: bool) -> None:
        """A wait has covered an access."""
        if is_write:
            self._written_until[words[self._writer[words] == wave]] = epoch
        else:
            self._read_until[wave, words] = epoch

    def load(self, at: Array, size: int) -> Array:
        """``[accesses, size]`` bytes."""
        return gather(self.bytes, at, size)

    def store(self, at: Array, data: Array) -> None:
        """Write ``[accesses, size]`` bytes."""
        scatter(self.bytes, at, data)
