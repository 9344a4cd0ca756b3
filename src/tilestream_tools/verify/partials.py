"""Stream-K's counts and slots in the memory of model 1: what both ways to hand in a part mean, and parts that are NaN.

A product that a worker holds is identified by its slot, as a partial result is. A part is done once, by one worker, so
the slot identifies the worker that holds it.
"""

from __future__ import annotations

from typing import Any

from tilestream.core import stream_k as stream_k_rules
from tilestream.schedule import Schedule, WorkItem
from tilestream_tools.verify.faults import Fault
from tilestream_tools.verify.gpu_loop import ReducePartials
from tilestream_tools.verify.model import Memory
from tilestream_tools.verify.operations import ReduceNumbers


class Partials:
    """A count a split tile, a slot a part, and the truth about poison, from ``base`` on in the memory of a model.

    A slot holds nothing (0) or the number of a part (`parts`) that is written, and whether it is visible (odd). With
    ``holding``, each also has an entry for the part as its worker holds it: nothing (0) or twice its number.
    """

    def __init__(self, schedule: Schedule, base: int, holding: bool = False) -> None:
        self.schedule = schedule
        self.holding = holding
        self.count = base
        self.slot = self.count + schedule.remainder
        self.poisoned = self.slot + schedule.slots  # tiles with a poisoned part, as bits, until they are stored
        self.held = self.poisoned + 1
        self.end = self.held + (schedule.slots if holding else 0)
        self.parts: list[tuple[WorkItem, bool]] = []  # (part, whether it is NaN) by number
        self.position = {schedule.remainder_tile(t).tile: t for t in range(schedule.remainder)}

    def memory(self) -> Memory:
        """The memory at the start."""
        return [0] * (self.end - self.count)

    def count_of(self, item: WorkItem) -> int:
        """Where the count of the item's tile lies."""
        return self.count + self.position[item.tile]

    def write(self, who: str, item: WorkItem, nan: bool, m: Memory) -> None:
        """A partial result is written; others cannot see it yet."""
        slot = self._place(self.slot, who, item)
        if m[slot]:
            raise Fault("overwritten while read", f"{who} writes slot {item.slot}, where a partial is still needed")
        m[slot] = self._code(item, nan)
        m[self.poisoned] |= nan << self.position[item.tile]

    def hold(self, who: str, item: WorkItem, nan: bool, m: Memory) -> None:
        """A worker holds a part's product, invisible to others."""
        m[self._place(self.held, who, item)] = self._code(item, nan)
        m[self.poisoned] |= nan << self.position[item.tile]

    def write_held(self, who: str, item: WorkItem, m: Memory) -> None:
        """What a worker holds is written; others cannot see it yet."""
        held = m[self._place(self.held, who, item)]
        if not held:
            raise Fault("wrong data", f"{who} writes a part of tile {item.tile} that it does not hold")
        part, nan = self.parts[held // 2 - 1]
        self.write(who, part, nan, m)

    def _place(self, begin: int, who: str, item: WorkItem) -> int:
        if not 0 <= item.slot < self.schedule.slots:
            raise Fault("wrong data", f"{who} has a partial for slot {item.slot} of {self.schedule.slots}")
        return begin + item.slot

    def _code(self, item: WorkItem, nan: bool) -> int:
        if (item, nan) not in self.parts:
            self.parts.append((item, nan))
        return 2 * (self.parts.index((item, nan)) + 1)

    def add(self, op: Any, before: int, m: Memory) -> None:
        """The count grows by one, and what the worker has written for this tile is visible."""
        m[self.count_of(op.item)] = before + 1
        slot = self.slot + op.item.slot
        if self._holds(m[slot], op.item):
            m[slot] |= 1

    def count_in(self, op: Any, before: int, m: Memory) -> None:
        """As `add`, and the last restores the count."""
        self.add(op, before, m)
        if before == op.item.parts - 1:
            self.restore(op.item, m)

    def restore(self, item: WorkItem, m: Memory) -> None:
        """The count is 0 again."""
        m[self.count_of(item)] = 0

    def reduce(self, who: str, op: Any, m: Memory) -> None:
        """The partials of a tile are added, in K order: each once, each visible, and NaN if one of them is.

        Of `ReducePartials`, the worker's own is the one that it holds.
        """
        tile = op.item.tile
        k, nan = 0, False
        for share in self.schedule.contributors(self.position[tile]):
            at = stream_k_rules.slot(share, self.position[tile])
            slot, held = self.slot + at, self.held + at
            own = type(op) is ReducePartials and op.item.slot == at
            if own:
                if not m[held]:
                    raise Fault("wrong data", f"{who} adds a part of tile {tile} that it does not hold")
                m[slot] = m[held]  # if it was written, too, no worker reads that copy
            elif not m[slot] & 1 and (
                type(op) is ReducePartials or not self._holds(m[slot], op.item)
            ):  # its own it can see
                raise Fault(
                    "partial not visible",
                    f"{who} adds slot {at} of tile {tile} before its partial is visible",
                )
            if self.holding:
                m[held] = 0
            part, part_nan = self.parts[m[slot] // 2 - 1]
            if part.tile != tile or part.k_begin != k:
                raise Fault(
                    "wrong data",
                    f"{who} adds K steps {part.k_begin} to {part.k_end} of tile {part.tile} to {k} of tile {tile}",
                )
            k, nan = part.k_end, nan or part_nan
            m[slot] = 0
        if k != self.schedule.grid.k_steps:
            raise Fault("missing work", f"{who} stores tile {tile} with {k} of {self.schedule.grid.k_steps} K steps")
        nan = nan and type(op) is not ReduceNumbers
        bit = 1 << self.position[tile]
        if nan != bool(m[self.poisoned] & bit):
            kind, what = ("wrong data", "NaN, of numbers") if nan else ("poison lost", "a number, with a poisoned part")
            raise Fault(kind, f"{who} stores tile {tile} as {what}")
        m[self.poisoned] &= ~bit

    def at_end(self, m: Memory) -> None:
        """All have left, and every tile is stored: raise `Fault` unless all is as it was."""
        if any(m[self.count : self.slot]):
            raise Fault("count not restored", f"the counts of stream-K's tiles are {m[self.count : self.slot]}")
        if any(m[self.slot : self.poisoned]) or any(m[self.held : self.end]):
            raise Fault("missing work", "a partial result was never added")

    def _holds(self, slot: int, item: WorkItem) -> bool:
        return bool(slot) and self.parts[slot // 2 - 1][0] == item
