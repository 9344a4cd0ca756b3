"""The order of a protocol's operations, where the order of a stream hides it from the tests on fake GPUs."""

from __future__ import annotations

from tilestream.core.protocols import dispatch, gather
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


def test_a_part_is_sent_back_when_it_is_computed_and_nothing_behind_a_failure():
    begin = [dispatch.SendCounts, dispatch.AwaitCounts, dispatch.SendRows, dispatch.AwaitRows, dispatch.Signal]
    back = [dispatch.AwaitComputed, dispatch.SendResult, dispatch.AwaitResult]
    assert operations(dispatch.converse(1, 1)) == [*begin, *back]
    assert operations(dispatch.converse(1, 1), -1) == [dispatch.SendCounts, dispatch.AwaitCounts, dispatch.Fail]

    thread, found, answer = dispatch.converse(1, 1), [], None
    while not found or found[-1] is not dispatch.Fail:
        found.append(type(op := thread.send(answer)))
        answer = -1 if isinstance(op, dispatch.AwaitComputed) else 1
    assert found == [*begin, dispatch.AwaitComputed, dispatch.Fail]
