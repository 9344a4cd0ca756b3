"""The order of a protocol's operations, where the order of a stream hides it from the tests on fake GPUs."""

from __future__ import annotations

from tilestream.core.protocols import gather
from tilestream.core.protocols.gather import Abort, AwaitPost, Break, Done, Notice, Push, Pushed, SignalPeer


def operations(protocol, answer: int = 1) -> list[type]:
    """The types of what a protocol yields, each answered alike."""
    found = [type(next(protocol))]
    try:
        while True:
            found.append(type(protocol.send(answer)))
    except StopIteration:
        return found


def test_a_chunk_is_signalled_when_its_push_is_complete():
    assert operations(gather.push(0, 2, 2, 5)) == [AwaitPost, *(Push, Pushed, SignalPeer) * 2, Done]


def test_the_own_group_is_broken_before_the_peers_are_aborted():
    assert operations(gather.give_up(0, 3)) == [Notice, Break, Abort, Abort]
