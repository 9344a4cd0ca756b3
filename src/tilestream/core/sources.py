"""Sources: rows that several producers bring, each sorted by group, whose counts are known only when they come.

A source has a place of ``capacity`` rows. Its rows fill the place from the beginning, group by group. Its counts (the
number of rows of each group) and the rows of each group arrive in any order and at any time. Each has a signal.

Each group of each source has a queue of tiles. All tickets of a queue become ready together: when the source's counts
and that group's rows have arrived. Only memory limits the number of queues, which is sources times groups.

`take` is the protocol by which a worker takes its next tile: a generator of operations, like
`tilestream.core.schedule.take`. It repeats `poll_sources`::

    for each source, from the pivot on, those that are finished left out:
        its counts are not there:            look at the next source; the launch is over -> settle it as lost
        settle it as counted                 the first to settle decides, for all workers
        left = tiles left of each group whose rows are there
        any:    a queue among them by `share_of`; ticket = add(queue, 1); valid -> tile; void -> look again
    something is not there:                  nap, look again; deadline passed or abort word set -> the launch is over
    nothing is missing:                      STOP

A worker blocks only when no source has a tile whose rows are there. When the launch is over, workers take all tiles
that are left and store NaN. The number of rows of a lost source is unknown, so its whole place is one group and becomes
NaN. Workers settle each source for this reason: a source may arrive after some workers have given it up, and all
workers must count the same tiles.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Literal, NamedTuple

from tilestream.core import queues
from tilestream.core.integers import cdiv

#: The state of a source: not settled; settled, its counts are read; settled as lost, its counts are never read.
UNKNOWN, COUNTED, LOST = 0, 1, 2


# Leaves ---------------------------------------------------------------------------------------------------------------


def counts_word(source: int, groups: int) -> int:
    """The signal that a source's counts are there."""
    return source * (groups + 1)


def rows_word(source: int, group: int, groups: int) -> int:
    """The signal that the rows of a group of a source are there."""
    return source * (groups + 1) + 1 + group


def source_of_turn(turn: int, pivot: int, sources: int) -> int:
    """The source that a worker looks at in a turn."""
    return (pivot + turn) % sources


def share_of(worker: int, left: int) -> int:
    """Which of ``left`` tiles a worker takes. Workers that look at the same time take different ones, so few meet."""
    return worker % left


# Host -----------------------------------------------------------------------------------------------------------------


class SourcePlaces(NamedTuple):
    """Where sources' rows lie, and how they are cut into tiles."""

    sources: int
    groups: int
    capacity: int  # rows of a source's place
    block_m: int  # rows of a tile
    num_n: int = 1  # tiles across the output's columns
    pivot: int = 0  # the source that each worker looks at first
    arrives: bool = True  # whether signals say what is there; else everything is

    def queue(self, source: int, group: int) -> int:
        """The queue of a group of a source."""
        return source * self.groups + group

    def tiles(self, counts: Sequence[int] | None) -> tuple[int, ...]:
        """The tiles of each group; ``counts`` None or not valid: the whole place is the first group's."""
        if counts is None or not self.is_valid(counts):
            counts = (self.capacity, *[0] * (self.groups - 1))
        return tuple(cdiv(count, self.block_m) * self.num_n for count in counts)

    def is_valid(self, counts: Sequence[int]) -> bool:
        """Whether counts fit a source's place."""
        return min(counts) >= 0 and sum(counts) <= self.capacity


class SourceTile(NamedTuple):
    """A tile of a group of a source."""

    source: int
    group: int
    ticket: int  # its number among the group's tiles
    counts: tuple[int, ...] | None  # rows of the source's groups; None: the source is lost


class Look(NamedTuple):
    """Poll the signal of a source's counts (acquire). Answer: 1 there, 0 not."""

    source: int


class Settle(NamedTuple):
    """Settle a source as `COUNTED` or `LOST` if no worker has (acquire and release). Answer: its state."""

    source: int
    state: int


class Count(NamedTuple):
    """Read a source's counts. Answer: the rows of each group."""

    source: int


class Taken(NamedTuple):
    """Read a queue's counter. Answer: tickets handed out so far."""

    queue: int


class Arrived(NamedTuple):
    """Poll the signal of a group's rows. Answer: 1 there, 0 not."""

    source: int
    group: int


class Draw(NamedTuple):
    """Add one to a queue's counter atomically. Answer: the ticket."""

    queue: int


class Nap(NamedTuple):
    """Wait for a signal that was not there, under the deadline and the abort word. Answer: 1 the launch is over."""


class Place(NamedTuple):
    """A worker's state between two calls of `take`."""

    finished: int = 0  # turns, from the first on, whose sources have no tile left
    over: bool = False  # whether the worker knows that the launch is over


Operations = Generator[Any, Any, tuple[SourceTile | None, Place]]
#: The result of a poll of all sources that yields no tile.
Left = Literal["nothing", "missing", "again"]


def take(places: SourcePlaces, worker: int, place: Place) -> Operations:
    """The worker's next tile, and its state behind it; None for STOP. See the module."""
    while True:
        tile, place, left = yield from poll_sources(places, worker, place)
        if tile is not None or left == "nothing":
            return tile, place
        if left == "missing":
            place = place._replace(over=bool((yield Nap())))


def poll_sources(
    places: SourcePlaces, worker: int, place: Place
) -> Generator[Any, Any, tuple[SourceTile | None, Place, Left]]:
    """Poll all sources once: ``(tile, place, left)``.

    Without a tile, ``left`` says whether nothing is left, something is missing, or another worker took the tile.
    """
    finished, over = place
    missing = False
    for turn in range(finished, places.sources):
        source = source_of_turn(turn, places.pivot, places.sources)
        there = (not places.arrives) or bool((yield Look(source)))
        if not there and not over:
            missing = True
            continue
        counts = None
        if (yield Settle(source, COUNTED if there else LOST)) == COUNTED:
            counts = yield Count(source)
        sizes = places.tiles(counts)
        left, late = yield from _left(places, source, sizes, all_there=over or counts is None)
        if any(left):
            group = _group_of(left, share_of(worker, sum(left)))
            ticket = yield Draw(places.queue(source, group))
            tile = SourceTile(source, group, ticket, counts) if ticket < sizes[group] else None
            return tile, Place(finished, over), "again"
        missing = missing or late
        if turn == finished and not late:
            finished += 1
    return None, Place(finished, over), "missing" if missing else "nothing"


def _left(
    places: SourcePlaces, source: int, sizes: Sequence[int], all_there: bool
) -> Generator[Any, Any, tuple[tuple[int, ...], bool]]:
    """The tiles left of each group whose rows are there; whether groups whose rows are missing have tiles left."""
    left: tuple[int, ...] = ()
    late = False
    for group, size in enumerate(sizes):
        rest = queues.left(size, (yield Taken(places.queue(source, group)))) if size else 0
        if rest and places.arrives and not all_there and not (yield Arrived(source, group)):
            rest, late = 0, True
        left += (rest,)
    return left, late


def _group_of(left: Sequence[int], tile: int) -> int:
    """The group of a tile, counted over what is left of all."""
    group = 0
    while tile >= left[group]:
        tile, group = tile - left[group], group + 1
    return group
