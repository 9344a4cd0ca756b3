"""Streams of our own: lent only when idle, given back when the borrower is gone."""

from __future__ import annotations

import gc
import threading

import pytest

from fake_cuda import DEVICE, fake_cuda
from tilestream.runtime import streams
from tilestream.runtime.streams import aside, give_back, lend, lend_to

LONG = 300.0  # a bound, never waited out by a test that passes


class Borrower:
    pass


def test_what_comes_back_is_lent_again_when_it_is_idle(cuda):
    one, busy, idle = (lend(DEVICE) for _ in range(3))
    assert len({one, busy, idle, lend(DEVICE)}) == 4
    busy.give(lambda: None)
    give_back(busy)
    assert lend(DEVICE) not in (one, busy, idle)
    give_back(idle)
    assert lend(DEVICE) is idle, "the one behind a busy one"
    busy.run()
    assert lend(DEVICE) is busy
    give_back(one)
    give_back(idle)
    assert {lend(DEVICE), lend(DEVICE)} == {one, idle}
    assert lend(DEVICE) not in (one, busy, idle)


def test_until_the_borrower_is_gone(cuda):
    borrower = Borrower()
    stream = lend_to(borrower, DEVICE)
    assert lend(DEVICE) is not stream
    del borrower
    gc.collect()
    assert lend(DEVICE) is stream


def test_a_stream_of_a_test_before_is_not_lent():
    """Its borrower may be garbage that is collected later."""
    with fake_cuda():
        borrower = Borrower()
        lend_to(borrower, DEVICE)
    with fake_cuda() as cuda:
        del borrower
        assert lend(DEVICE) in cuda.streams


def test_aside_is_current_within_the_block_and_comes_back(cuda):
    before = cuda.current
    with aside(DEVICE) as stream:
        assert cuda.current is stream is not before
        with aside(DEVICE) as second:
            assert second is not stream
    assert cuda.current is before
    with pytest.raises(OSError, match="in the block"), aside(DEVICE) as again:
        raise OSError("in the block")
    assert again in (stream, second)
    assert cuda.current is before
    with aside(DEVICE), aside(DEVICE):
        assert cuda.current in (stream, second)


def test_no_more_of_torchs_objects_are_kept_than_there_may_be(cuda, monkeypatch):
    monkeypatch.setattr(streams, "_objects", {})
    monkeypatch.setattr(streams, "_MOST_OBJECTS", 2)
    monkeypatch.setattr(streams, "_identity", lambda index: (cuda.current.stream_id, index, 1))
    kept = []
    for stream in (one := cuda.stream(), cuda.stream(), one, cuda.stream()):
        with cuda.on(stream):
            assert streams.current_stream(DEVICE) is stream
        kept.append(len(streams._objects))
    assert kept == [1, 2, 2, 1]


@pytest.mark.parametrize("known", [False, True])
def test_the_garbage_collector_gives_back_in_the_midst_of_lending(cuda, known, monkeypatch):
    """A borrower in a cycle, as a stream whose producer failed, is found at any bytecode: here, while one is asked."""
    borrower = Borrower()
    borrower.me = borrower
    held, idle = lend_to(borrower, DEVICE), lend(DEVICE)
    give_back(idle)
    if known:
        held.give(lambda: None)
    del borrower
    query = type(idle).query
    monkeypatch.setattr(type(idle), "query", lambda stream: gc.collect() >= 0 and query(stream))
    lent = []
    thread = threading.Thread(target=lambda: lent.append(lend(DEVICE)), daemon=True)
    thread.start()
    thread.join(LONG)
    stuck = thread.is_alive()
    if stuck:
        streams._lock.release()  # for the tests after this one
        thread.join(LONG)
    assert not stuck, "waits for itself"
    assert lent == [idle]
    assert held in streams._idle[DEVICE.index]
    assert lend(DEVICE) is not held if known else held
