"""Model 13: workers that take tiles of sources whose counts are known only when they come.

It explores `tilestream.core.sources.poll_sources` and the GPU's loop around it, `work_by_source`: several workers,
sources whose counts and rows come in any order, late, twice (a signal of the next epoch, while this launch still runs),
or never, and deadlines that may pass in any wait.

Properties: counts are read and tiles computed behind their signals only. Each tile is stored once, by whatever workers
run: those of a source's counts if it is settled as counted, those of its whole place if as lost; a worker that was not
told that the launch is over stores NaN for a lost source alone. No worker waits while there is a tile to take. All
workers leave, and a launch that resets its words leaves them as at the start, or signals in quarantine.

Reductions: *Compute*, *Poison* and *Count* are eager: no other worker reads what they store, what they read only grows,
and counts do not change. Signals come while a worker waits, or once the launch is over: they let waits be answered,
and one that comes as late as possible shows all reads before arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar, NamedTuple

from tilestream.core import sources as text
from tilestream.core.loop import Poll
from tilestream.core.sources import COUNTED, LOST, Nap, Place, SourcePlaces, SourceTile, poll_sources
from tilestream_tools.verify.faults import Fault
from tilestream_tools.verify.gpu_loop import Leave
from tilestream_tools.verify.model import Memory, Model
from tilestream_tools.verify.processes import LEFT, Process

Counts = tuple[tuple[int, ...], ...]
Program = Callable[[SourcePlaces, int, int, Place, bool], Generator[Any, Any, Place | None]]


class AwaitRows(NamedTuple):
    """The gate: wait for the rows of a group. Answer: 1 there, 0 the launch is over."""

    source: int
    group: int


class SeeWord(NamedTuple):
    """Wait for a signal, behind all tiles. Answer: 1 there, 0 the launch is over."""

    word: int


class Compute(NamedTuple):
    """Compute a tile, and store it."""

    tile: SourceTile


class Poison(NamedTuple):
    """Store NaN in the place of a tile."""

    tile: SourceTile


class ResetWords(NamedTuple):
    """Zero the signals, or (0) put them under quarantine; and zero the counters."""

    signals: int


def work_by_source(
    places: SourcePlaces, workers: int, worker: int, place: Place, reset: bool = False
) -> Generator[Any, Any, Place | None]:
    """One look of a worker at all sources, as `take` repeats it; the state for the next, or None to leave."""
    tile, place, left = yield from poll_sources(places, worker, place)
    if tile is None and left == "again":
        return place
    if tile is None and left == "missing":
        return place._replace(over=bool((yield Nap())))
    if tile is None:
        if reset and (yield Leave()) == workers - 1:
            arrived = not (yield Poll())
            for word in range(places.sources * (places.groups + 1)):
                arrived = arrived and bool((yield SeeWord(word)))
            yield ResetWords(int(arrived))
        return None
    over = place.over or bool((yield Poll()))
    if not over and tile.counts is not None:
        over = not (yield AwaitRows(tile.source, tile.group))
    if over or tile.counts is None:
        yield Poison(tile)
    else:
        yield Compute(tile)
    return place._replace(over=over)


@dataclass(frozen=True)
class SourcesCase:
    """One configuration of model 13.

    Attributes
    ----------
    counts
        The rows of each group of each source; a tile has one row.
    workers, running
        How many there are, and which of them run; empty for all.
    capacity, pivot
        See `SourcePlaces`.
    expires
        Whether deadlines may pass. Else everything comes.
    twice
        Whether sources may signal the next epoch meanwhile.
    reset
        Whether the last worker out resets the words.
    program
        The loop.
    """

    counts: Counts
    workers: int = 2
    running: tuple[int, ...] = ()
    capacity: int = 2
    pivot: int = 0
    expires: bool = False
    twice: bool = False
    reset: bool = False
    program: Program = work_by_source

    @property
    def places(self) -> SourcePlaces:
        """The places of the sources."""
        return SourcePlaces(len(self.counts), len(self.counts[0]), self.capacity, 1, 1, self.pivot)

    def build(self, reduce: bool = True, symmetry: bool = True) -> SourcesModel:
        """The model of this configuration."""
        return SourcesModel(self, reduce)

    def __str__(self) -> str:
        words = [f"{self.workers} workers, counts {'; '.join(', '.join(map(str, row)) for row in self.counts)}"]
        words += [f"places of {self.capacity}"] + [f"from source {self.pivot}"] * bool(self.pivot)
        words += [f"running {list(self.running)}"] if self.running else []
        flags = (
            ("deadlines may pass", self.expires),
            ("signals come twice", self.twice),
            ("words are reset", self.reset),
        )
        words += [said for said, flag in flags if flag]
        return ", ".join(words + [self.program.__name__] * (self.program is not work_by_source))


def configurations(full: bool) -> Iterator[SourcesCase]:
    """1 and 2 workers, 1 and 2 sources of up to 2 groups, empty ones too. Full: 3 of both, more deadlines."""
    flags: tuple[dict[str, Any], ...] = ({}, {"expires": True}, {"reset": True, "expires": True}, {"twice": True})
    alone: tuple[Counts, ...] = (((1,),), ((0,),), ((2,),), ((0, 1),), ((1, 1),))
    pairs: tuple[Counts, ...] = (((1,), (1,)), ((0,), (1,)), ((0,), (0,)))
    large: tuple[Counts, ...] = (((2, 0), (1, 0)), ((1,), (0,), (1,)))
    for counts, workers, how in product(alone, (1, 2), flags):
        yield SourcesCase(counts, workers, **how)
    for counts, how in product(pairs, flags):
        yield SourcesCase(counts, 1, pivot=1, **how)
        if full or "expires" not in how:
            yield SourcesCase(counts, 2, pivot=1, **how)
    yield SourcesCase(((1,), (1,)), 2, expires=True, reset=True)
    for counts in large:
        yield SourcesCase(counts)
        yield SourcesCase(counts, 3, running=(2,), twice=True)
    if full:
        for counts in (((1, 1), (0, 1)), *large):
            yield SourcesCase(counts, expires=True, pivot=1)
        for counts in (alone[0], alone[2], alone[4]):
            yield SourcesCase(counts, 3, expires=True)
            yield SourcesCase(counts, 3, expires=True, reset=True)


class SourcesModel(Model):
    """See the module. Memory: the signals, what is settled, tickets, tiles done, and words of the launch."""

    eager = frozenset({Compute, Poison, text.Count})
    progress = frozenset({text.Draw})

    def __init__(self, case: SourcesCase, reduce: bool = True) -> None:
        self.case, self.places = case, case.places
        names = case.running or tuple(range(case.workers))
        processes = [
            Process(
                f"worker {w}",
                lambda place, w=w: case.program(case.places, case.workers, w, place, case.reset),  # type: ignore[misc]
                Place(), ("worker", w),
            )
            for w in names
        ]  # fmt: skip
        sources, groups = self.places.sources, self.places.groups
        base = len(processes)
        self.signals = base
        self.settled = base + sources * (groups + 1)
        self.tickets = self.settled + sources
        self.done = self.tickets + sources * groups
        self.over = self.done + sources * groups
        self.exits, self.restored = self.over + 1, self.over + 2
        super().__init__(processes, reduce)

    def memory(self) -> Memory:
        """See `Model.memory`."""
        return [0] * (self.restored + 1 - len(self.processes))

    def has(self, m: Memory, source: int, group: int = -1) -> int:
        """The word of a source's counts, or of a group's rows."""
        groups = self.places.groups
        word = text.counts_word(source, groups) if group < 0 else text.rows_word(source, group, groups)
        return int(m[self.signals + word])

    def sizes(self, m: Memory, source: int) -> tuple[int, ...]:
        """The tiles of a source's groups as it is settled."""
        is_lost = m[self.settled + source] == LOST
        return self.places.tiles(None if is_lost else self.case.counts[source])

    def left(self, m: Memory) -> tuple[bool, bool]:
        """Whether there is a tile to take; whether something is missing that would bring others."""
        some = missing = False
        for source in range(self.places.sources):
            if not self.has(m, source):
                missing = True
                continue
            for group, size in enumerate(self.sizes(m, source)):
                if m[self.tickets + self.places.queue(source, group)] < size:
                    some, missing = some or bool(self.has(m, source, group)), missing or not self.has(m, source, group)
        return some, missing

    def may_go_on(self, m: Memory) -> bool:
        """Whether another look at all sources finds a tile, a source that nobody has settled, or that none is left."""
        some, missing = self.left(m)
        sources = range(self.places.sources)
        return some or not missing or any(self.has(m, source) and not m[self.settled + source] for source in sources)

    # Answers --------------------------------------------------------------------------------------------------------

    def domain(self, op: Any, past: Any) -> Sequence[Any]:
        """See `Model.domain`."""
        most = self.case.capacity + len(self.processes)
        if isinstance(op, text.Look | text.Arrived):
            return (0, 1, 2) if self.case.twice else (0, 1)
        if isinstance(op, text.Settle):
            return (COUNTED, LOST)
        if isinstance(op, text.Count):
            return (self.case.counts[op.source],)
        if isinstance(op, text.Taken | text.Draw):
            return range(most + 1)
        if isinstance(op, Leave):
            return range(len(self.processes))
        return (0, 1) if isinstance(op, Nap | Poll | AwaitRows | SeeWord) else (0,)

    def answers_of(self, op: Any) -> Callable[[int, Any, Memory], Sequence[Any]] | None:
        """See `Model.answers_of`."""
        return lambda pid, op, m: self._answers_of(op, m)

    def _answers_of(self, op: Any, m: Memory) -> Sequence[Any]:
        match op:
            case text.Look(source):
                return (self.has(m, source),)
            case text.Arrived(source, group):
                return (self.has(m, source, group),)
            case text.Settle(source, state):
                return (m[self.settled + source] or state,)
            case text.Count(source):
                return (self.case.counts[source],)
            case text.Taken(queue) | text.Draw(queue):
                return (m[self.tickets + queue],)
            case Nap():
                return (1,) if m[self.over] else (0,) if self.may_go_on(m) else ()
            case Poll():
                return (m[self.over],)
            case Leave():
                return (m[self.exits],)
            case AwaitRows(source, group):
                return (1,) if self.has(m, source, group) else (0,) if m[self.over] else ()
            case SeeWord(word):
                return (1,) if m[self.signals + word] else (0,) if m[self.over] else ()
        return (0,)

    # What operations do ---------------------------------------------------------------------------------------------

    def _settle(self, pid: int, op: text.Settle, answer: int, m: Memory) -> None:
        m[self.settled + op.source] = answer

    def _count(self, pid: int, op: text.Count, answer: Any, m: Memory) -> None:
        if not self.has(m, op.source):
            raise Fault("read before arrival", f"{self.processes[pid].name} reads the counts of source {op.source}")

    def _draw(self, pid: int, op: text.Draw, answer: int, m: Memory) -> None:
        m[self.tickets + op.queue] += 1

    def _store(self, pid: int, tile: SourceTile, m: Memory) -> None:
        at, bit = self.done + self.places.queue(tile.source, tile.group), 1 << tile.ticket
        if m[at] & bit:
            raise Fault("double work", f"{self.processes[pid].name} stores {tile} once more")
        m[at] |= bit

    def _compute(self, pid: int, op: Compute, answer: int, m: Memory) -> None:
        source, group = op.tile.source, op.tile.group
        if not self.has(m, source) or not self.has(m, source, group):
            raise Fault("read before arrival", f"{self.processes[pid].name} computes {op.tile}")
        self._store(pid, op.tile, m)

    def _poison(self, pid: int, op: Poison, answer: int, m: Memory) -> None:
        if not m[self.over]:
            raise Fault("poisoned in vain", f"{self.processes[pid].name} gives up {op.tile}, and the launch goes on")
        self._store(pid, op.tile, m)

    def _leave(self, pid: int, op: Leave, answer: int, m: Memory) -> None:
        m[self.exits] += 1

    def _reset(self, pid: int, op: ResetWords, answer: int, m: Memory) -> None:
        words = range(self.signals, self.settled)
        if m[self.exits] < len(self.processes):
            raise Fault("reset too early", f"{self.processes[pid].name} resets words that others still use")
        if op.signals and not all(m[word] for word in words):
            raise Fault("reset too early", f"{self.processes[pid].name} zeroes a signal that may still come")
        m[self.restored] = 1 + op.signals

    performed: ClassVar[dict[type, Callable[..., None]]] = {
        text.Settle: _settle, text.Count: _count, text.Draw: _draw, Compute: _compute, Poison: _poison, Leave: _leave,
        ResetWords: _reset,
    }  # fmt: skip

    # The world outside, and ends ------------------------------------------------------------------------------------

    def environment(self, m: Memory) -> list[tuple[str, Memory]]:
        """See `Model.environment`."""
        out, waits = [], False
        for pid, process in enumerate(self.processes):
            op = self.locals.op[m[pid]] if m[pid] != LEFT else None
            if not isinstance(op, Nap | AwaitRows | SeeWord) or self._answers_of(op, m):
                continue
            waits = True
            if isinstance(op, AwaitRows) and self.left(m)[0]:
                what = f"{process.name} is at {self.describe(op)}, and there is a tile to take"
                raise Fault("idle beside work", what)
            if self.case.expires:
                n = m.copy()
                n[self.over] = 1
                n[pid] = self.locals.next(m[pid], int(isinstance(op, Nap)))
                out.append((f"{process.name}: {self.describe(op)} -> the deadline expires, abort is set", n))
        if waits or m[self.over] or not self.reduce:
            out += [(f"{self._named(word)} comes", self._with(m, word, 1)) for word in self._words(m, 0)]
            if self.case.twice:
                out += [(f"{self._named(word)} comes again", self._with(m, word, 2)) for word in self._words(m, 1)]
        return out

    def _words(self, m: Memory, value: int) -> list[int]:
        return [word for word in range(self.signals, self.settled) if m[word] == value and not m[self.restored]]

    def _with(self, m: Memory, word: int, value: int) -> Memory:
        n = m.copy()
        n[word] = value
        return n

    def _named(self, word: int) -> str:
        source, group = divmod(word - self.signals, self.places.groups + 1)
        return f"source {source}'s " + (f"rows of group {group - 1}" if group else "counts")

    def at_end(self, m: Memory) -> None:
        """Check the memory after all workers have left."""
        for source in range(self.places.sources):
            if not m[self.settled + source]:
                raise Fault("missing work", f"nobody has settled source {source}")
            for group, size in enumerate(self.sizes(m, source)):
                if m[self.done + self.places.queue(source, group)] != (1 << size) - 1:
                    raise Fault("missing work", f"tiles of source {source}, group {group} are not stored")
            if m[self.settled + source] == LOST and not m[self.over]:
                raise Fault("missing work", f"source {source} is given up, and the launch was not over")
        if self.case.reset and m[self.restored] != (1 if m[self.over] else 2):
            raise Fault("not reset", "the words are not as the next launch has to find them")
