"""Memory: the device's, the caches before it, and a workgroup's LDS.

The hierarchy is the least coherent one that AMD's documents allow, so that a missing cache control shows:

* `Memory`: what all dies and the host share. Tensors lie in it with gaps between them; an access outside of any is a
  fault.
* `Die`: the L2 of an XCD. It never evicts: stores stay in it until a write-back (``buffer_wbl2 sc1``) or the end of the
  launch, and what it has once read it keeps until an invalidation (``buffer_inv sc1``).
* `Unit`: the first-level cache of a compute unit. Stores go through it to the die; what it has read it keeps until an
  invalidation.
* Accesses at the device's scope or wider (``sc1``), and all atomics, are performed in `Memory`.

With ``stale`` each cache begins with all that memory holds at the launch: the worst that earlier reads can have left.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilestream_tools.emulator.numbers import I64, U8, U32, Array

LINE = 128
#: Bytes between two tensors, which no kernel may touch.
GAP = 4096
#: Under way, no wait has covered it: later than each barrier.
_OPEN = 1 << 30


class Fault(Exception):
    """The program did what no program may do."""


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
    """

    def __init__(self, base: int = 0x7F10_0000_0000) -> None:
        self.base = base
        self.bytes = np.zeros(0, U8)
        self.owner = np.zeros(0, U8)  # 0: nobody's
        self.names = ["nothing"]
        self._grow(GAP)

    def _grow(self, size: int) -> None:
        more = -(-size // LINE) * LINE - self.bytes.size
        self.bytes = np.concatenate([self.bytes, np.full(more, 0xFF, U8)])  # of floating-point numbers: NaN
        self.owner = np.concatenate([self.owner, np.zeros(more, U8)])

    def allocate(self, array: Array, name: str, align: int = 256) -> int:
        """Copy an array in. Returns its address, modulo ``align`` 0."""
        raw = np.ascontiguousarray(array).view(U8).reshape(-1)
        at = -(-self.bytes.size // align) * align
        self._grow(at + raw.size + GAP)
        self.bytes[at : at + raw.size] = raw
        self.names.append(name)
        self.owner[at : at + raw.size] = len(self.names) - 1
        return self.base + at

    def read(self, address: int, like: Array) -> Array:
        """A copy of an array of this shape and dtype."""
        at = address - self.base
        return self.bytes[at : at + like.nbytes].copy().view(like.dtype).reshape(like.shape)

    def write(self, address: int, array: Array) -> None:
        """What a host or a copy engine writes, past all caches."""
        raw = np.ascontiguousarray(array).view(U8).reshape(-1)
        at = address - self.base
        self.bytes[at : at + raw.size] = raw

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


class Die:
    """An XCD's L2. See the module."""

    def __init__(self, memory: Memory, stale: bool) -> None:
        self.memory = memory
        self.bytes = memory.bytes.copy()
        self.present = np.full(self.bytes.size // LINE, stale)
        self.dirty = np.zeros(self.bytes.size, np.bool_)

    def fill(self, lines: Array) -> None:
        """Have these lines."""
        lines = lines[~self.present[lines]]
        if lines.size:
            ours, theirs = self.bytes.reshape(-1, LINE), self.memory.bytes.reshape(-1, LINE)
            ours[lines] = np.where(self.dirty.reshape(-1, LINE)[lines], ours[lines], theirs[lines])
            self.present[lines] = True

    def store(self, at: Array, data: Array) -> None:
        """What a compute unit has written through."""
        scatter(self.bytes, at, data)
        scatter(self.dirty.view(U8), at, np.ones_like(data))

    def write_back(self, index: Array | None = None) -> None:
        """Bring to memory what is dirty: all of it, or these bytes."""
        index = np.flatnonzero(self.dirty) if index is None else index[self.dirty[index]]
        self.memory.bytes[index] = self.bytes[index]
        self.dirty[index] = False

    def invalidate(self) -> None:
        """Forget what was read; what is dirty stays."""
        self.present[:] = False


class Unit:
    """A compute unit's first-level cache. See the module."""

    def __init__(self, die: Die, stale: bool) -> None:
        self.die = die
        self.bytes = die.bytes.copy()
        self.present = np.full(die.present.size, stale)

    def load(self, at: Array, size: int, device_scope: bool) -> Array:
        """``[accesses, size]`` bytes."""
        if device_scope:
            self.die.write_back(at[:, None] + np.arange(size))
            return gather(self.die.memory.bytes, at, size)
        lines = at // LINE
        if not self.present[lines].all():
            self._fill(lines)
        if size > 1 and (at & (size - 1)).any():  # may reach into the next line
            self._fill((at + size - 1) // LINE)
        return gather(self.bytes, at, size)

    def _fill(self, lines: Array) -> None:
        lines = lines[~self.present[lines]]
        if lines.size:
            self.die.fill(lines)
            self.bytes.reshape(-1, LINE)[lines] = self.die.bytes.reshape(-1, LINE)[lines]
            self.present[lines] = True

    def store(self, at: Array, data: Array, device_scope: bool) -> None:
        """Write ``[accesses, size]`` bytes, in the order of the accesses."""
        scatter(self.bytes, at, data)
        self.die.store(at, data)
        if device_scope:
            self.die.write_back(at[:, None] + np.arange(data.shape[1]))

    def atomic(self, at: int, size: int, update: Any) -> int:
        """Perform ``update`` on an unsigned number in memory; the number before."""
        place = slice(at, at + size)
        self.die.write_back(np.arange(at, at + size))
        memory = self.die.memory.bytes
        before = int.from_bytes(memory[place].tobytes(), "little")
        after = update(before) & ((1 << 8 * size) - 1)
        memory[place] = np.frombuffer(after.to_bytes(size, "little"), U8)
        self.bytes[place] = self.die.bytes[place] = memory[place]
        return before

    def invalidate(self) -> None:
        """At the device's scope: the die's, too."""
        self.present[:] = False
        self.die.invalidate()


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
