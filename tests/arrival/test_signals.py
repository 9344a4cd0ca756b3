"""Signals: epochs and self-reset (invariant 4), bounded waits (invariant 5), and no thread spins."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streaming import rest
from tilestream.arrival import Arrival, Outcome, Signals
from tilestream.arrival.signals import POLL_SECONDS

LONG = 300.0  # a bound, never waited out by a test that passes


def never() -> bool:
    return False


def soon() -> float:
    return time.perf_counter() + LONG


@contextmanager
def waiting(signals: Signals, chunk: int = 0, *, epoch: int = 1, deadline: float | None = None, over=never):
    """A thread that waits; gives a function that joins it and returns the outcome."""
    outcome, begun = [], threading.Event()

    def wait():
        begun.set()
        outcome.append(signals.wait(chunk, epoch, soon() if deadline is None else deadline, over))

    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait()

    def join() -> Outcome:
        thread.join(LONG)
        assert not thread.is_alive(), "still waiting"
        return outcome[0]

    yield join
    join()


@pytest.fixture(params=["own", "list", "tensor"])
def signals(request):
    kinds = {"own": lambda: None, "list": lambda: [0] * 3, "tensor": lambda: torch.zeros(3, dtype=torch.int32)}
    return Signals(3, kinds[request.param]())


class TestOutcomes:
    def test_arrived(self, signals):
        with waiting(signals) as a, waiting(signals) as b, waiting(signals, 2) as c:
            signals.set(1)  # another chunk wakes them, and they go on waiting
            signals.set(0)
            signals.set(2)
            assert a() is b() is c() is Outcome.ARRIVED
        assert signals.wait(1, 1, soon(), never) is Outcome.ARRIVED, "already"

    def test_failed(self, signals):
        error = OSError("disk")
        with waiting(signals) as join:
            signals.fail(error)
            assert join() is Outcome.FAILED
        signals.fail(RuntimeError("stopped, for that"))
        assert signals.error(1) is error, "the first failure of an epoch counts"
        assert signals.wait(0, 1, soon(), lambda: True) is Outcome.FAILED, "before the abort that it causes"
        signals.set(0)
        expired = time.perf_counter() - 1
        assert signals.wait(0, 1, expired, lambda: True) is Outcome.ARRIVED, "whatever else happened"

    def test_over(self, signals):
        word = threading.Event()
        with waiting(signals, over=word.is_set) as join:
            word.set()
            signals.ring()
            assert join() is Outcome.OVER

    def test_expired_at_one_deadline_for_all_waits_which_no_waking_prolongs(self, signals):
        begin = time.perf_counter()
        deadline = begin + 0.1
        with waiting(signals, 0, deadline=deadline) as first, waiting(signals, 1, deadline=deadline) as second:
            while time.perf_counter() < deadline:
                signals.ring()
                time.sleep(0.005)
            assert first() is second() is Outcome.EXPIRED
        assert 0.1 <= time.perf_counter() - begin < LONG
        assert signals.wait(2, 1, deadline, never) is Outcome.EXPIRED, "already"


class TestEpochs:
    def test_a_wait_is_for_its_own_epoch_or_a_later_one(self):
        signals = Signals(2)
        signals.set(0)
        signals.fail(OSError())
        now = signals.advance()
        assert now == 2
        assert signals.error(now) is None
        with waiting(signals, epoch=now) as join:
            signals.set(0, epoch=now - 1)
            signals.fail(OSError(), epoch=now - 1)
            signals.set(0, epoch=now)
            assert join() is Outcome.ARRIVED
        assert signals.wait(1, now, time.perf_counter() + 0.01, never) is Outcome.EXPIRED
        signals.set(1)
        assert signals.arrived(1, epoch=1), "words only grow, and are compared by >="

    @given(st.lists(st.tuples(st.sampled_from(["set", "late", "advance", "clear"]), st.integers(0, 2)), max_size=40))
    def test_words_never_fall_and_only_this_epoch_counts(self, steps):
        signals, here, before = Signals(3), set(), [0, 0, 0]
        assert not signals.self_reset
        for step, chunk in steps:
            if step == "set":
                signals.set(chunk)
                here.add(chunk)
            elif step == "late" and signals.epoch > 1:
                signals.set(chunk, epoch=signals.epoch - 1)
            elif step == "advance":
                signals.advance()
                here.clear()
            elif step == "clear":
                signals.clear()
            assert {c for c in range(3) if signals.arrived(c)} == here
            assert {c for c in range(3) if signals.times[c] is not None} == here
            now = list(signals._words)
            assert all(a <= b for a, b in zip(before, now, strict=True))
            before = now

    def test_a_signal_of_an_epoch_to_come_is_refused(self):
        signals = Signals(1)
        with pytest.raises(ValueError, match=r"^signal: epoch=2; the present epoch is 1: advance\(\) begins the next$"):
            signals.set(0, epoch=2)
        assert not signals.arrived(0)


def test_a_callers_own_words_are_any_number_but_zero_and_are_zeroed():
    for mine in ([0, -1, 7], torch.tensor([0, -1, 7], dtype=torch.int32)):
        signals = Signals(3, mine)
        assert [signals.arrived(c) for c in range(3)] == [False, True, True]
        assert signals.self_reset
        signals.clear()
        assert list(mine) == [0, 0, 0]


@pytest.mark.parametrize("by_torch", [False, True])
def test_a_raw_write_into_a_callers_words_is_seen_without_a_notification(by_torch):
    mine = torch.zeros(3, dtype=torch.int32)
    signals = Signals(3, mine)
    with waiting(signals, 1) as join:
        if by_torch:
            mine[1] = 1
        else:
            memoryview(mine.numpy()).cast("B")[4:8] = (1).to_bytes(4, "little")
        assert join() is Outcome.ARRIVED
    assert signals.times[1] is None, "the time is not known"


class TestNoThreadSpins:
    def test_four_waiters_take_no_cpu_time(self):
        signals = Signals(1)
        threads = [threading.Thread(target=signals.wait, args=(0, 1, soon(), never)) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            assert rest(threads)
        finally:
            signals.set(0)
            for thread in threads:
                thread.join()

    def test_a_callers_own_words_are_looked_at_after_pauses_that_double(self, monkeypatch):
        signals, looks, pauses = Signals(1, [0]), [], []

        class Bell:
            """Counts what a waiter sleeps, and lets the time pass at once."""

            def __enter__(self):
                return self

            def __exit__(self, *_):
                return None

            def wait(self, seconds):
                pauses.append(seconds)

        def over():
            looks.append(1)
            return len(looks) > 10

        monkeypatch.setattr(signals, "_bell", Bell())
        assert signals.wait(0, 1, soon(), over) is Outcome.OVER
        first, most = POLL_SECONDS
        assert pauses == [min(first * 2**look, most) for look in range(10)]
        assert first >= 1e-4, "a waiter that spins takes a core"

    def test_a_wait_does_not_hold_the_bell(self):
        signals = Signals(2)
        with waiting(signals, 0) as join:
            begin = time.perf_counter()
            signals.set(1)
            assert signals.times[1] - begin < LONG / 2
            signals.set(0)
            assert join() is Outcome.ARRIVED


def test_keys_are_never_given_twice_and_hold_neither_signals_nor_words_alive():
    assert len({Signals(1).key for _ in range(100)}) == 100, "though each is dropped at once"
    mine = torch.zeros(3, dtype=torch.int32)
    signals = Signals(3, mine)
    key, gone = signals.key, weakref.ref(mine)
    assert Signals.by_key(key) is signals
    del signals, mine
    gc.collect()
    assert gone() is None
    for unknown in (key, 0):
        with pytest.raises(KeyError):
            Signals.by_key(unknown)


def test_what_signals_alone_announce_comes_over_no_link(signals):
    """A plan reckons with the link's speed for what a stream brings to a GPU, and for nothing else."""
    assert not Arrival.uniform(8, 3).with_signals(signals).incoming(24).linked
