"""Which stores an access may rely on: happens-before by vector clocks, so that a missing cache control needs no luck.

No cache is modelled. Instead an access that a cache could let down is a fault, whatever the cache holds. A plain load
of what another wave has stored since the launch began needs all of this in between, in this order:

1. a wait has covered the store;
2. ``buffer_wbl2`` has brought it to memory, and a wait has covered that; a barrier may come before, where another wave
   of the workgroup writes back;
3. an atomic or a store past the caches (``sc1``) has published, and a load past the caches or an atomic has seen it;
4. a wait has covered that one, and ``buffer_inv`` has followed.

Between waves of a workgroup 1 and a barrier suffice: they share the first-level cache. What a host writes is in memory
at once, and needs the system's scope in 3 and 4 (``sc0 sc1``); so does what it reads, in 3. A plain store over another
wave's, and an access past the caches to it, need 1 to 3.

It is stricter than the documents in this: dies are not told apart, since none says on which a workgroup runs; and a
plain load of a published word needs what that word's writer publishes later.
"""

from __future__ import annotations

import functools

import numpy as np

from tilestream_tools.emulator.fault import Fault
from tilestream_tools.emulator.numbers import I64, Array

_TWO = np.array(2)  # no number of Python's: numpy takes twice as long with those
#: The agent of what is written past the waves. Waves follow.
HOST = 0


#: A store as a number: its own among its agent's, above the agent's, above whether it went past the caches.
_AGENT_BITS = 20
_PLAIN, _PUBLISHED = np.array(0), np.array(1)
_AGENTS, _ABOVE, _ABOVE_AGENT = np.array((1 << _AGENT_BITS) - 1), np.array(1), np.array(1 + _AGENT_BITS)


def _tag(agent: int, number: int, is_published: bool) -> int:
    return (number << _AGENT_BITS | agent) << 1 | is_published


def _agent_of(tags: Array) -> Array:
    found: Array = tags >> _ABOVE & _AGENTS
    return found


def _number_of(tags: Array) -> Array:
    found: Array = tags >> _ABOVE_AGENT
    return found


class Knowledge:
    """What a wave, or the host, may rely on: of each agent, how many of its stores.

    Attributes
    ----------
    stores
        How many it has issued itself.
    landed
        Are in the L2 that its workgroup uses.
    in_memory
        Are in memory.
    visible
        No cache that it reads through has an older copy of.
    """

    def __init__(self, agent: int, agents: int) -> None:
        self.agent, self.stores = agent, 0
        self.landed, self.in_memory, self.visible = (np.zeros(agents, I64) for _ in range(3))


def words_of(at: Array, size: int) -> Array:
    """The dwords of accesses of ``size`` bytes each."""
    first: Array = at >> _TWO
    return first if size <= 4 else first.repeat(size // 4) + _dwords(first.size, size)


@functools.cache
def _dwords(accesses: int, size: int) -> Array:
    return np.tile(np.arange(size // 4), accesses)


class Order:
    """The stores of a launch: by dword of memory, whose the last one was, and its how many-th.

    Parameters
    ----------
    size
        Bytes of memory.
    """

    def __init__(self, size: int, waves: int) -> None:
        self._agents = 1 + waves
        #: By word: the last store's number, its agent, whether it went past the caches (`_tag`); 0: none is known.
        self._last = np.zeros(size // 4, I64)
        #: By word: what was in memory when it was published; and whether that was for the system.
        self._released: dict[int, tuple[Array, bool]] = {}
        self._host = Knowledge(HOST, self._agents)

    def wave(self, number: int) -> Knowledge:
        """What a wave knows that begins: what was there before the launch."""
        return Knowledge(1 + number, self._agents)

    # The host ---------------------------------------------------------------------------------------------------------

    def host_writes(self, at: int, size: int) -> None:
        """The host or a copy engine has written."""
        self._host.stores += 1
        words = np.arange(at // 4, -(-(at + size) // 4))
        self._last[words] = _tag(HOST, self._host.stores, True)

    def host_reads(self, at: int, size: int) -> None:
        """The host reads.

        Raises
        ------
        Fault
            If what is there may still be in a cache.
        """
        words = np.arange(at // 4, -(-(at + size) // 4))
        self.acquire(self._host, self.observe(self._host, words, True))

    # Waves ------------------------------------------------------------------------------------------------------------

    def store(self, wave: Knowledge, words: Array, is_small: bool) -> None:
        """A plain store is issued, the last that the wave has counted.

        Raises
        ------
        Fault
            If another wave's may be under way.
        """
        if not is_small:
            self._check(wave, words, "writes over")
            self._last[words] = _tag(wave.agent, wave.stores, False)
            return
        last = self._last[words]
        self._last[words] = _tag(wave.agent, wave.stores, False)
        if np.count_nonzero(last):  # a dword of which two waves write a part each has no one writer
            self._last[words[(last != 0) & (_agent_of(last) != wave.agent)]] = 0

    @staticmethod
    def land(wave: Knowledge, number: int) -> None:
        """A wait has covered a store."""
        wave.landed[wave.agent] = number

    def publish(self, wave: Knowledge, number: int, words: Array, released: Array, is_system: bool) -> None:
        """An access past the caches, this one of a wave's stores, has written.

        ``released``: what was in memory when it was issued.
        """
        self._last[words] = _tag(wave.agent, number, True)
        for word in words.tolist():
            before = self._released.get(word)
            self._released[word] = released if before is None else np.maximum(before[0], released), is_system

    def observe(self, wave: Knowledge, words: Array, is_system: bool) -> Array:
        """What an access past the caches learns from these words.

        Raises
        ------
        Fault
            If another wave has stored there through its caches, which may still have it.
        """
        learned = np.zeros(self._agents, I64)
        for word in words.tolist() if self._released else ():
            found = self._released.get(word)
            if found is not None and (found[1] or wave.agent != HOST):
                np.maximum(learned, found[0], out=learned)
        last = self._last[words]
        if np.count_nonzero(last):
            if is_system:
                seen = _number_of(last[_agent_of(last) == HOST])
                learned[HOST] = max(int(learned[HOST]), int(seen.max(initial=0)))
            self._check(wave, words, "reads past the caches", learned)
        return learned

    @staticmethod
    def acquire(wave: Knowledge, learned: Array) -> None:
        """A wait has covered an access that has learned this."""
        np.maximum(wave.in_memory, learned, out=wave.in_memory)

    @staticmethod
    def write_back(wave: Knowledge) -> Array:
        """A write-back is issued: what it covers. The wave's own stores come before it."""
        covered = wave.landed.copy()
        covered[wave.agent] = wave.stores
        return covered

    @staticmethod
    def invalidate(wave: Knowledge, is_system: bool) -> None:
        """The caches that the wave reads through have forgotten what they had."""
        host = wave.visible[HOST]
        np.maximum(wave.visible, wave.in_memory, out=wave.visible)
        if not is_system:
            wave.visible[HOST] = host

    @staticmethod
    def meet(waves: list[Knowledge]) -> None:
        """A workgroup's waves pass a barrier."""
        landed, in_memory, visible = (
            np.maximum.reduce([getattr(wave, name) for wave in waves]) for name in ("landed", "in_memory", "visible")
        )
        for wave in waves:
            wave.landed, wave.in_memory, wave.visible = landed.copy(), in_memory.copy(), np.maximum(visible, landed)

    def load(self, wave: Knowledge, words: Array) -> None:
        """A plain load is issued.

        Raises
        ------
        Fault
            If what is there may not have come to the caches that the wave reads through.
        """
        last = self._last[words]
        if np.count_nonzero(last):
            writer = _agent_of(last)
            self._refuse((_number_of(last) > wave.visible[writer]) & (writer != wave.agent), writer, "reads")

    # ------------------------------------------------------------------------------------------------------------------

    def _check(self, wave: Knowledge, words: Array, what: str, learned: Array | None = None) -> None:
        """Refuse words that another wave has stored through caches, unless they are known to be in memory."""
        last = self._last[words]
        if np.count_nonzero(last):
            known = np.maximum(wave.landed, wave.in_memory)
            if learned is not None:
                np.maximum(known, learned, out=known)
            writer = _agent_of(last)
            is_plain = last & _PUBLISHED == _PLAIN
            self._refuse((_number_of(last) > known[writer]) & (writer != wave.agent) & is_plain, writer, what)

    @staticmethod
    def _refuse(which: Array, writer: Array, what: str) -> None:
        if np.count_nonzero(which):
            agent = int(writer[which][0])
            whose = "the host" if agent == HOST else f"wave {agent - 1} of the launch"
            raise Fault(f"{what} what {whose} has written, with no release and acquire between")
