"""The order in which GPUs push rows to the ranks of their experts, and results back, in calls that graphs may hold.

No host takes part or knows how many rows go where: the sender's kernel writes its counts in front of its rows. The
words, and the wait for the previous call, are those of `tilestream.core.protocols.replay`. In addition, a rank's memory
has for each source: a head (the counts, and the place for the source's results), rows, and the signals of both. It also
has the results of the rank's own rows, with a signal for each rank that sends them::

    calling stream                                      side stream
      a kernel: count = count + 1;
        for each peer: wait until taken >= count - 1
      the side stream may begin                           a kernel: for each rank, the own first:
      for each source, the own first:                       mark = count; head; signal it;
        a kernel: wait for head and rows;                    rows; signal each expert's when all have landed
          is the mark count? clear the signals
        the experts; the side stream may go on            for each source, when its rows are computed:
      a kernel: wait for all results; clear their signals   a kernel: results -> the source; signal them
      a kernel: for each peer: taken = count there
      weigh and add; NaN, where the group is broken
      the side stream

*Who waits for whom* (invariant 10). A kernel that pushes waits for nothing once it runs. A kernel that waits for a peer
is one warp, and while it does its rank holds no other SM. So on every GPU there is room for the side stream, and the
peers' rows come. In one hardware queue the order of issue is a legal one, too: a rank pushes before it waits for rows,
and sends the results of a source back before it waits for the next source. No rank's push waits for another rank's
results of the same call, so there is no circle. The deadline ends the rest.

*Rows are overwritten behind their reader*: a rank pushes call n + 1 when each peer has written `Taken` n, which is
behind all its products of n. Results need no such handshake: they come only to a rank whose rows of that call were
read, and it sent those after its last sum. One slot suffices; graphs hold its address.

*A broken group*: a rank that gives up says so in the memory of all. Unlike what a graph copies, kernels look before
they push: nothing is pushed, nor signalled, for a call that is not computed. A mark names call and form, and comes
before the head. A source whose mark is another one breaks the group: it has replayed another graph.

`tilestream_tools.verify.experts` explores this: replays, calls that expire, and ranks lost.
"""

from __future__ import annotations

from typing import NamedTuple

from tilestream.core.protocols.gather import Operations, peers
from tilestream.core.protocols.replay import (
    AwaitFork,
    AwaitJoin,
    Fork,
    HandIn,
    Intact,
    Joined,
    Mark,
    Taken,
    Unbroken,
    admit,
    give_up,
)


def signals(world: int, experts: int) -> int:
    """The signals of a rank: of each source's head; of each source's rows by expert; of each rank's results."""
    return world * (2 + experts)


def turns(rank: int, world: int) -> tuple[int, ...]:
    """The ranks to which ``rank`` pushes, in order. No two ranks push to one at the same time."""
    return tuple((rank + turn) % world for turn in range(world))


def sources(rank: int, world: int) -> tuple[int, ...]:
    """The ranks whose rows ``rank`` computes, in the order in which they push to it."""
    return tuple((rank - turn) % world for turn in range(world))


class Head(NamedTuple):
    """Write the counts of the rows for ``peer`` in its memory, and where their results go."""

    peer: int
    call: int


class SignalHead(NamedTuple):
    """Signal them there."""

    peer: int
    call: int


class PushRows(NamedTuple):
    """Start writing the rows for ``peer`` in its memory."""

    peer: int
    call: int


class PushedRows(NamedTuple):
    """All have landed."""

    peer: int
    call: int


class SignalRows(NamedTuple):
    """Signal them there."""

    peer: int
    call: int


class AwaitHead(NamedTuple):
    """A kernel waits for a source's head. Answer: 1; 0 if the group is broken, or its time is up."""

    source: int
    call: int


class AwaitRows(NamedTuple):
    """It waits for the source's rows. Answer: 1; 0 if the group is broken, or its time is up."""

    source: int
    call: int


class Matches(NamedTuple):
    """It looks at the source's mark. Answer: 1 if it is of ``call``, and of its form."""

    source: int
    call: int


class ClearRows(NamedTuple):
    """It zeroes the signals of the source's head and rows, and takes the head along."""

    source: int


class Compute(NamedTuple):
    """The experts start on a source's rows."""

    source: int
    call: int


class Computed(NamedTuple):
    """They have computed them."""

    source: int
    call: int


class Hand(NamedTuple):
    """Calling stream: the side stream may go on with a source. ``computed``: whether there are results."""

    source: int
    replay: int
    computed: int


class AwaitHand(NamedTuple):
    """Side stream: wait for `Hand`. Answer: ``computed``."""

    source: int
    replay: int


class PushResults(NamedTuple):
    """Start writing a source's results in its memory."""

    source: int
    call: int


class PushedResults(NamedTuple):
    """All have landed."""

    source: int
    call: int


class SignalResults(NamedTuple):
    """Signal them there."""

    source: int
    call: int


class AwaitResults(NamedTuple):
    """A kernel waits for the results from ``peer``. Answer: 1; 0 if the group is broken, or its time is up."""

    peer: int
    call: int


class ClearResults(NamedTuple):
    """All results are there: it zeroes their signals."""


class Add(NamedTuple):
    """The results from ``peer`` are read, weighted and added."""

    peer: int
    call: int


class Added(NamedTuple):
    """They are added."""

    peer: int
    call: int


def take(rank: int, world: int, source: int, call: int) -> Operations:
    """The kernel in front of a source's products. Returns 1 if they may begin."""
    if not (yield Unbroken()):
        return 0
    if not (yield AwaitHead(source, call)):
        yield from give_up(rank, world)
        return 0
    if not (yield AwaitRows(source, call)):
        yield from give_up(rank, world)
        return 0
    if source != rank and not (yield Matches(source, call)):
        yield from give_up(rank, world)
        return 0
    yield ClearRows(source)
    return 1


def collect(rank: int, world: int, call: int) -> Operations:
    """The kernel in front of the sum. Returns 1 if all results are there."""
    if not (yield Unbroken()):
        return 0
    for peer in turns(rank, world):
        if not (yield AwaitResults(peer, call)):
            yield from give_up(rank, world)
            return 0
    yield ClearResults()
    return 1


def calling(rank: int, world: int, replay: int) -> Operations:
    """The calling stream: the whole call."""
    admitted = yield from admit(rank, world, 0)
    assert admitted is not None
    call = abs(admitted)
    yield Fork(replay, call)
    for source in sources(rank, world):
        here = yield from take(rank, world, source, call)
        if here:
            yield Compute(source, call)
            yield Computed(source, call)
        yield Hand(source, replay, here or 0)
    intact = yield from collect(rank, world, call)
    if intact and not (yield Intact(0, call)):
        intact = 0
        yield from give_up(rank, world)
    for peer in peers(rank, world):
        yield Taken(peer, 0, call)
    if intact:
        for peer in turns(rank, world):
            yield Add(peer, call)
            yield Added(peer, call)
        yield HandIn(replay)
    yield AwaitJoin(replay)
    return None


def side(rank: int, world: int, replay: int) -> Operations:
    """The side stream: rows to every rank, then results."""
    call = yield AwaitFork(replay)
    if (yield Unbroken()):
        for peer in turns(rank, world):
            if peer != rank:
                yield Mark(peer, 0, call)
            yield Head(peer, call)
            yield SignalHead(peer, call)
            yield PushRows(peer, call)
            yield PushedRows(peer, call)
            yield SignalRows(peer, call)
    for source in sources(rank, world):
        if (yield AwaitHand(source, replay)):
            yield PushResults(source, call)
            yield PushedResults(source, call)
            yield SignalResults(source, call)
    yield Joined(replay)
    return None
