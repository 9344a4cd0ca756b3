"""`Schedule`: the assignment of work items to workers; and `take`, the protocol by which a worker takes its next item.

`take` is a generator: it yields operations on shared memory (`Take`, `Peek`, `Ready`) and is sent their results. The
CPU backend performs them on locked counters, `tilestream_tools.verify` in every interleaving of several workers, tests
in chosen orders. All run the same text.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

from tilestream.core import queues as queue_rules
from tilestream.core import stream_k
from tilestream.core.grid import INT31, Grid, WorkItem
from tilestream.core.integers import part_begin, part_of, part_size
from tilestream.core.order import ROW_MAJOR, Raster

Kind = Literal["static", "dynamic", "stream_k"]
Split = Literal["items", "columns", "rows", "strides", "chunks"]
KINDS, SPLITS = get_args(Kind), get_args(Split)

#: The largest number of queues of a schedule that is split at its chunks. A worker keeps the empty ones as bits of one
#: word, since the load warp of the Hopper kernel has one register for them.
MOST_QUEUES = 32


class Take(NamedTuple):
    """Add one to a queue's counter atomically. Answer: the ticket, counted from the launch's base."""

    queue: int


class Peek(NamedTuple):
    """Read a queue's counter atomically. Answer: the number of tickets handed out since the launch's base."""

    queue: int


class Ready(NamedTuple):
    """Wait until the chunks of one of several queues have arrived, under the launch's deadline and abort word.

    Answer: the first of these queues whose chunks were seen; -1: the launch is over, or its deadline has passed.
    """

    queues: int  # as bits


class Cursor(NamedTuple):
    """A worker's place in the schedule: its state between two calls of `take`."""

    ticket: int = 0  # ``static``: the number of items that this worker has taken
    #: The next queue: 0 for the worker's own; ``q + 1`` for queue ``q``, from which it has stolen; the number of queues
    #: plus 1 if it has to pick a victim.
    source: int = 0
    #: share, unit, unit_end: ``stream_k``: the share in progress and its remaining units; none if ``unit == unit_end``.
    share: int = -1
    unit: int = 0
    unit_end: int = 0
    #: queue, empty: in arrival order: the queue of the previous item; the queues found empty, as bits.
    queue: int = -1
    empty: int = 0


@dataclass(frozen=True)
class Schedule:
    """The assignment of work items to workers, and their order: integers alone, the same for every backend.

    Parameters
    ----------
    kind
        ``static``: worker w of W takes the positions w, w + W, ...; there is no shared state and no stealing.
        ``dynamic``: positions are tickets of queues. ``stream_k``: dynamic, with the last wave's tiles split along K.
    grid, raster
        The tiles, and their order.
    workers
        Resident programs. Only ``static`` and the size of stream-K's remainder depend on it. Under ``dynamic`` and
        ``stream_k`` every non-empty set of workers does each work item exactly once.
    queues
        Number of queues (``dynamic``).
    split
        How positions are divided among queues. ``items``: runs of positions. ``strides``: every n-th position; with one
        queue a worker, the positions that ``static`` would give it. ``columns``, ``rows``: stripes of tiles, each in
        the raster's order. If chunks arrive, the stripes divide the other dimension, so that a late chunk leaves no
        queue idle. ``chunks`` (*arrival order*): runs of positions whose tiles read the same chunks; a worker takes
        from the first queue whose chunks it has seen.
    first_batch
        The first batch; the others follow in order and wrap around.
    shares
        The number of shares of stream-K's remainder; 0: one per worker, at most one per unit.
    ends
        ``split="chunks"``: the end of each queue's positions; see `tilestream.core.gate.arrival_order`.

    Raises
    ------
    ValueError
        If a value is out of range, or two values exclude each other.
    """

    kind: Kind
    grid: Grid
    raster: Raster = ROW_MAJOR
    workers: int = 1
    queues: int = 1
    split: Split = "items"
    shares: int = 0
    first_batch: int = 0
    ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, choices in (("kind", KINDS), ("split", SPLITS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"Schedule: {name}={getattr(self, name)!r}; it must be one of {', '.join(choices)}")
        for name, least in (("workers", 1), ("queues", 1), ("shares", 0), ("first_batch", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"Schedule: {name}={getattr(self, name)}; it must be at least {least}")
        if self.queues > queue_rules.MOST_QUEUES:
            raise ValueError(f"Schedule: queues={self.queues}; there are {queue_rules.MOST_QUEUES} at most: take fewer")
        if self.kind != "dynamic" and self.queues != 1:
            raise ValueError(f"Schedule: queues={self.queues} with kind={self.kind!r}; only dynamic has more than one")
        if self.kind != "dynamic" and self.split != "items":
            raise ValueError(
                f"Schedule: split={self.split!r} with kind={self.kind!r}; only dynamic has queues to split"
            )
        if self.split == "chunks" or self.ends:
            self._check_ends()
        if self.kind != "stream_k" and self.shares:
            raise ValueError(f"Schedule: shares={self.shares} with kind={self.kind!r}; only stream_k cuts a remainder")
        if self.units >= INT31:
            raise ValueError(
                f"Schedule: a remainder of {self.remainder} tiles of {self.grid.k_steps} K steps; units are counted in "
                "31 bits: take larger K steps"
            )
        if self.split in ("columns", "rows") and self.raster.order == "table":
            raise ValueError(f"Schedule: split={self.split!r} with a table; a table's positions are split as 'items'")
        if self.split == "rows" and self.raster.order == "chunk_major" and not self.raster.transposed:
            raise ValueError(
                "Schedule: split='rows' where rows arrive; queues split the dimension that does not arrive"
            )
        if self.split == "columns" and self.raster.order == "chunk_major" and self.raster.transposed:
            raise ValueError(
                "Schedule: split='columns' where columns arrive; queues split the one that does not arrive"
            )
        self.raster.check(self.grid)

    def _check_ends(self) -> None:
        ends = self.ends
        if self.split != "chunks" or len(ends) != self.queues or self.queues > MOST_QUEUES:
            raise ValueError(
                f"Schedule: {len(ends)} ends, queues={self.queues}, split={self.split!r}; split='chunks' has an end "
                f"for each queue, and {MOST_QUEUES} queues at most"
            )
        if any(end <= begin for begin, end in pairwise((0, *ends))) or ends[-1] != self.grid.tiles:
            raise ValueError(
                f"Schedule: ends={list(ends)} with {self.grid.tiles} tiles; each queue has a tile at least, and the "
                "last ends with the tiles"
            )

    # Stream-K's remainder ------------------------------------------------------------------------------------------

    @property
    def remainder(self) -> int:
        """The number of tiles split along K, the last ones of the raster; 0 unless ``stream_k``."""
        if self.kind != "stream_k":
            return 0
        return stream_k.remainder_tiles(self.grid.tiles, self.workers)

    @property
    def full_tiles(self) -> int:
        """The number of tiles that are not split."""
        return self.grid.tiles - self.remainder

    @property
    def units(self) -> int:
        """K steps of the remainder."""
        return self.remainder * self.grid.k_steps

    @property
    def num_shares(self) -> int:
        """The number of shares of the remainder."""
        return min(self.shares or self.workers, self.units)

    @functools.cached_property  # each launch reads it
    def slots(self) -> int:
        """The number of slots for partial results; see `stream_k.slot`."""
        return self.num_shares + self.remainder - 1 if self.remainder else 0

    @property
    def packed(self) -> int:
        """The number of counters that lie side by side, behind the queues'."""
        return 0

    @functools.cached_property
    def most_tickets(self) -> int:
        """The largest number of tickets that a queue hands out in a launch, including void ones."""
        return self.full_tiles + self.num_shares + self.workers

    def contributors(self, tile: int) -> range:
        """The shares with a part of remainder tile ``tile``, in K order, which is the order of the additions."""
        k_steps = self.grid.k_steps
        first = part_of(self.units, self.num_shares, tile * k_steps)
        last = part_of(self.units, self.num_shares, (tile + 1) * k_steps - 1)
        return range(first, last + 1)

    def remainder_tile(self, tile: int) -> WorkItem:
        """Remainder tile ``tile`` as one item."""
        return self._whole(self.full_tiles + tile)

    # Tickets -------------------------------------------------------------------------------------------------------

    def queue_size(self, queue: int) -> int:
        """Valid tickets of a queue; for ``static`` the number of all positions."""
        grid = self.grid
        if self.split == "columns":
            return grid.batch * grid.num_m * part_size(grid.num_n, self.queues, queue)
        if self.split == "rows":
            return grid.batch * part_size(grid.num_m, self.queues, queue) * grid.num_n
        if self.split == "chunks":
            return self.ends[queue] - self._begin(queue)
        return part_size(self.full_tiles + self.num_shares, self.queues, queue)

    def _begin(self, queue: int) -> int:
        return self.ends[queue - 1] if queue else 0

    def ticket(self, queue: int, ticket: int) -> tuple[WorkItem, Cursor]:
        """The first work item of a ticket, and the cursor after it."""
        grid = self.grid
        if self.split == "chunks":
            return self._whole(self._begin(queue) + ticket), Cursor()
        if self.split == "strides":
            return self._whole(queue + ticket * self.queues), Cursor()
        if self.split == "items":
            position = part_begin(self.full_tiles + self.num_shares, self.queues, queue) + ticket
            if position < self.full_tiles:
                return self._whole(position), Cursor()
            share = position - self.full_tiles
            begin = part_begin(self.units, self.num_shares, share)
            return self._next_part(share, begin, begin + part_size(self.units, self.num_shares, share))
        rows, cols = grid.num_m, grid.num_n
        if self.split == "columns":
            cols = part_size(cols, self.queues, queue)
        else:
            rows = part_size(rows, self.queues, queue)
        batch, t = divmod(ticket, rows * cols)
        pm, pn = self.raster.tile(t, rows, cols)
        if self.split == "columns":
            pn += part_begin(grid.num_n, self.queues, queue)
        else:
            pm += part_begin(grid.num_m, self.queues, queue)
        return self._item(batch, pm, pn), Cursor()

    def _whole(self, position: int) -> WorkItem:
        grid = self.grid
        batch, t = divmod(position, grid.plane)
        return self._item(batch, *self.raster.tile(t, grid.num_m, grid.num_n))

    def _item(self, batch: int, pm: int, pn: int) -> WorkItem:
        grid = self.grid
        batch = (batch + self.first_batch) % grid.batch
        return WorkItem((batch * grid.num_m + pm) * grid.num_n + pn, batch, pm, pn, 0, grid.k_steps)

    def _next_part(self, share: int, unit: int, unit_end: int) -> tuple[WorkItem, Cursor]:
        tile, k_begin, k_end = stream_k.share_part(unit, unit_end, self.grid.k_steps)
        behind = Cursor(share=share, unit=unit + k_end - k_begin, unit_end=unit_end)
        item = self.remainder_tile(tile)
        sharers = self.contributors(tile)
        if len(sharers) == 1:
            return item, behind
        return item._replace(
            k_begin=k_begin,
            k_end=k_end,
            part=share - sharers.start,
            parts=len(sharers),
            slot=stream_k.slot(share, tile),
        ), behind

    def items(self) -> Iterator[WorkItem]:
        """All work items, queue by queue, for checks and reports."""
        for queue in range(self.queues):
            for ticket in range(self.queue_size(queue)):
                item, cursor = self.ticket(queue, ticket)
                yield item
                while cursor.unit < cursor.unit_end:
                    item, cursor = self._next_part(cursor.share, cursor.unit, cursor.unit_end)
                    yield item


@dataclass(frozen=True)
class SourceSchedule(Schedule):
    """The largest schedule of rows by source, whose tiles `tilestream.core.sources.take` hands out as they come."""

    #: sources, groups: a queue for each group of a source, and a word for each source.
    sources: int = 1
    groups: int = 1

    @property
    def packed(self) -> int:
        """See `Schedule`."""
        return self.sources * (self.groups + 1)


def take(
    schedule: Schedule, worker: int, cursor: Cursor
) -> Generator[Take | Peek | Ready, int, tuple[WorkItem | None, Cursor]]:
    """The protocol by which ``worker`` takes its next work item; None is STOP.

    ::

        a share in progress:  its next part
        static:               the worker's own position, without shared memory
        arrival order:        see `take_ready`
        from its own queue until that is empty, then from the victim until that is empty:
                              ticket = add(queue, 1); valid -> item
        until all queues are empty:
                              read every other counter; ticket = add(the fullest, 1); valid -> item
                              void: another worker was faster, and that queue stays empty; read again

    Each pass of the last loop finds one more queue empty, so the loop ends. A queue that has given a worker a void
    ticket is empty for that worker from then on, so it draws at most one void ticket from each queue.
    """
    if cursor.unit < cursor.unit_end:
        item, behind = schedule._next_part(cursor.share, cursor.unit, cursor.unit_end)
        return item, cursor._replace(share=behind.share, unit=behind.unit, unit_end=behind.unit_end)
    if schedule.kind == "static":
        position = worker + cursor.ticket * schedule.workers
        if position >= schedule.grid.tiles:
            return None, cursor
        item, _ = schedule.ticket(0, position)
        return item, cursor._replace(ticket=cursor.ticket + 1)
    if schedule.split == "chunks":
        return (yield from take_ready(schedule, cursor))
    home, none = queue_rules.home_queue(worker, schedule.queues), schedule.queues + 1
    if cursor.source < none:
        queue = cursor.source - 1 if cursor.source else home
        ticket = yield Take(queue)
        if ticket < schedule.queue_size(queue):
            item, behind = schedule.ticket(queue, ticket)
            return item, behind._replace(source=cursor.source)
    while True:
        best = 0
        for queue in range(schedule.queues):
            if queue != home:
                queue_left = queue_rules.left(schedule.queue_size(queue), (yield Peek(queue)))
                best = max(best, queue_rules.rank(queue_left, queue, home))
        victim, some = queue_rules.ranked(best, home)
        if not some:
            return None, Cursor(source=none)
        ticket = yield Take(victim)
        if ticket < schedule.queue_size(victim):
            item, behind = schedule.ticket(victim, ticket)
            return item, behind._replace(source=victim + 1)


def take_ready(schedule: Schedule, cursor: Cursor) -> Generator[Take | Ready, int, tuple[WorkItem | None, Cursor]]:
    """`take` in arrival order: only from a queue whose chunks were seen. The worker waits for all queues, not for one.

    ::

        until all queues are empty:
            the queue of the previous item, or else the first that is ready     # waits while none is
            ticket = add(queue, 1); valid -> item
            void: that queue stays empty

    If the launch is over, or its deadline has passed, the worker takes from the first queue that it has not found
    empty. That item's gate then finds and records the expiry, and drops the item. So each item is taken once whatever
    arrives, and a worker draws at most one void ticket from each queue.
    """
    queue, empty = cursor.queue, cursor.empty
    every = (1 << schedule.queues) - 1
    while empty != every:
        if queue < 0:
            queue = yield Ready(every & ~empty)
            if queue < 0:
                queue = first_of(every & ~empty)
        ticket = yield Take(queue)
        if ticket < schedule.queue_size(queue):
            item, behind = schedule.ticket(queue, ticket)
            return item, behind._replace(queue=queue, empty=empty)
        queue, empty = -1, empty | 1 << queue
    return None, Cursor(empty=empty)


def first_of(queues: int) -> int:
    """The first of several queues, given as bits."""
    return (queues & -queues).bit_length() - 1
