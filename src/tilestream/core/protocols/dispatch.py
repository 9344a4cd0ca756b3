"""Rows to the ranks of a mixture's experts and results back: the order in which a rank's threads do it. No torch here.

A rank has a thread for each peer, `converse`, and its calling thread, `compute`. The rows of a source come in parts.
Their number is unknown until that source's counts arrive. The answer to a wait is -1 if its connection is lost, this
rank has given up, or the deadline has passed.

`tilestream.distributed.moe_dispatch` performs `compute`, and each `converse` as rounds of messages;
`tilestream_tools.verify.dispatch` explores both: a source that is silent, late, lost, or that another rank gives up.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

Operations = Generator[Any, int, None]


class SendCounts(NamedTuple):
    """Tell a peer how many rows it gets for each of its experts, and so how many parts."""

    peer: int


class AwaitCounts(NamedTuple):
    """Wait for a peer's counts. Answer: the parts of its rows."""

    peer: int


class SendRows(NamedTuple):
    """Send a peer a part of the rows for it."""

    peer: int
    part: int


class AwaitRows(NamedTuple):
    """Wait for a part of a peer's rows."""

    peer: int
    part: int


class Signal(NamedTuple):
    """A part of a peer's rows is there."""

    peer: int
    part: int


class AwaitComputed(NamedTuple):
    """Wait until a part of a peer's rows is computed. Answer -1: no more will be."""

    peer: int
    part: int


class SendResult(NamedTuple):
    """Send a peer the results of a part of its rows."""

    peer: int
    part: int


class AwaitResult(NamedTuple):
    """Wait for the results of a part of the rows for a peer."""

    peer: int
    part: int


class Fail(NamedTuple):
    """Nothing more will come from a peer: tell the calling thread."""

    peer: int


class ComputeOwn(NamedTuple):
    """The rank's own rows through its experts."""


class AwaitAny(NamedTuple):
    """Wait for the first of several (source, part) that is signalled. Answer: which."""

    parts: tuple[tuple[int, int], ...]


class Compute(NamedTuple):
    """A part of a source's rows through its experts. Answer: 1 where it is that source's last."""

    source: int
    part: int


class Hand(NamedTuple):
    """The results of a part may be sent back."""

    source: int
    part: int


class Stop(NamedTuple):
    """No more will be computed."""


class AwaitPeers(NamedTuple):
    """Wait for the threads of all peers. Answer -1: one has failed."""


class Close(NamedTuple):
    """Give up: close all connections, so that every rank notices."""


def converse(peer: int, ours: int) -> Operations:
    """A peer's thread, with ``ours`` parts of rows for it."""
    yield SendCounts(peer)
    theirs = yield AwaitCounts(peer)
    state = theirs
    if state >= 0:
        for part in range(ours):
            yield SendRows(peer, part)
    for part in range(theirs):
        if state >= 0:
            state = yield AwaitRows(peer, part)
            if state >= 0:
                yield Signal(peer, part)
    for part in range(theirs):
        if state >= 0:
            state = yield AwaitComputed(peer, part)
            if state >= 0:
                yield SendResult(peer, part)
    for part in range(ours):
        if state >= 0:
            state = yield AwaitResult(peer, part)
    if state < 0:
        yield Fail(peer)


def compute(rank: int, world: int) -> Operations:
    """The calling thread: of each source the next part, whichever is there first."""
    yield ComputeOwn()
    coming = [((rank + x) % world, 0) for x in range(1, world)]
    found = 0
    while coming and found >= 0:
        found = yield AwaitAny(tuple(coming))
        if found >= 0:
            source, part = coming.pop(found)
            last = yield Compute(source, part)
            yield Hand(source, part)
            if not last:
                coming.append((source, part + 1))
    yield Stop()
    failed = found
    if found >= 0:
        failed = yield AwaitPeers()
    if failed < 0:
        yield Close()
