"""Signals: epochs and self-reset (invariant 4), bounded waits (invariant 5), and nobody spins."""

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

from tilestream.arrival import Outcome, Signals

LONG = 30.0  # a bound, never waited out by a test that passes


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
    def test_arrived_already(self, signals):
        signals.set(1)
        assert signals.wait(1, 1, soon(), never) is Outcome.ARRIVED

    def test_arrived_while_waiting(self, signals):
        with waiting(signals) as join:
            signals.set(1)  # another chunk wakes it, and it goes on waiting
            signals.set(0)
            assert join() is Outcome.ARRIVED

    def test_failed(self, signals):
        error = OSError("disk")
        with waiting(signals) as join:
            signals.fail(error)
            assert join() is Outcome.FAILED
        assert signals.error(1) is error

    def test_over(self, signals):
        word = threading.Event()
        with waiting(signals, over=word.is_set) as join:
            word.set()
            signals.ring()
            assert join() is Outcome.OVER

    def test_expired(self, signals):
        begin = time.perf_counter()
        assert signals.wait(0, 1, begin + 0.05, never) is Outcome.EXPIRED
        assert 0.05 <= time.perf_counter() - begin < LONG

    def test_expired_already(self, signals):
        assert signals.wait(0, 1, time.perf_counter() - 1, never) is Outcome.EXPIRED

    def test_the_deadline_is_one_for_all_waits(self, signals):
        deadline = time.perf_counter() + 0.05
        with waiting(signals, 0, deadline=deadline) as first, waiting(signals, 1, deadline=deadline) as second:
            assert first() is second() is Outcome.EXPIRED
        assert signals.wait(2, 1, deadline, never) is Outcome.EXPIRED

    def test_being_woken_does_not_prolong_a_wait(self, signals):
        begin = time.perf_counter()
        with waiting(signals, deadline=begin + 0.1) as join:
            while time.perf_counter() < begin + 0.1:
                signals.ring()
                time.sleep(0.005)
            assert join() is Outcome.EXPIRED

    def test_what_has_arrived_counts_whatever_else_happened(self, signals):
        signals.set(0)
        signals.fail(OSError())
        assert signals.wait(0, 1, time.perf_counter() - 1, lambda: True) is Outcome.ARRIVED

    def test_a_failure_comes_before_the_abort_it_causes(self, signals):
        signals.fail(OSError())
        assert signals.wait(0, 1, soon(), lambda: True) is Outcome.FAILED

    def test_the_first_failure_of_a_round_is_the_one_that_counts(self, signals):
        first = OSError("disk")
        signals.fail(first)
        signals.fail(RuntimeError("stopped, for that"))
        assert signals.error(1) is first

    def test_everybody_is_woken(self, signals):
        with waiting(signals, 0) as a, waiting(signals, 0) as b, waiting(signals, 2) as c:
            signals.set(0)
            signals.set(2)
            assert a() is b() is c() is Outcome.ARRIVED


class TestEpochs:
    def test_an_earlier_round_s_signal_does_not_count(self):
        signals = Signals(2)
        signals.set(0)
        assert signals.advance() == 2
        assert signals.wait(0, 2, time.perf_counter() + 0.01, never) is Outcome.EXPIRED
        signals.set(0, epoch=1)
        assert not signals.arrived(0)
        signals.set(0)
        assert signals.arrived(0)

    def test_a_call_that_waits_for_an_earlier_round_is_content_with_a_later(self):
        signals = Signals(2)
        signals.advance()
        signals.set(1)
        assert signals.arrived(1, epoch=1), "words only grow, and are compared by >="

    def test_a_waiter_sees_its_own_round_only(self):
        signals = Signals(1)
        now = signals.advance()
        with waiting(signals, epoch=now) as join:
            signals.set(0, epoch=now - 1)
            signals.fail(OSError(), epoch=now - 1)
            signals.set(0, epoch=now)
            assert join() is Outcome.ARRIVED

    def test_an_error_of_another_round_is_not_raised_in_this(self):
        signals = Signals(1)
        signals.fail(OSError())
        now = signals.advance()
        assert signals.error(now) is None
        assert signals.wait(0, now, time.perf_counter() + 0.01, never) is Outcome.EXPIRED

    def test_own_words_are_never_cleared(self):
        signals = Signals(2)
        signals.set(1)
        signals.clear()
        assert signals.arrived(1)
        assert not signals.self_reset

    @given(st.lists(st.tuples(st.sampled_from(["set", "late", "advance", "clear"]), st.integers(0, 2)), max_size=40))
    def test_words_never_fall_and_only_this_round_counts(self, steps):
        signals, here, before = Signals(3), set(), [0, 0, 0]
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

    def test_a_signal_of_a_round_to_come_is_refused(self):
        signals = Signals(1)
        with pytest.raises(ValueError, match=r"^signal: epoch=2; the present epoch is 1: advance\(\) begins the next$"):
            signals.set(0, epoch=2)
        assert not signals.arrived(0)


class TestSelfReset:
    def test_any_word_but_zero_has_arrived(self):
        mine = [0, -1, 7]
        signals = Signals(3, mine)
        assert [signals.arrived(c) for c in range(3)] == [False, True, True]
        assert signals.self_reset

    def test_clear_writes_zeros(self):
        mine = torch.tensor([1, 0, 9], dtype=torch.int32)
        Signals(3, mine).clear()
        assert mine.tolist() == [0, 0, 0]

    def test_a_raw_write_is_seen_without_a_word_to_us(self):
        mine = torch.zeros(3, dtype=torch.int32)
        signals = Signals(3, mine)
        with waiting(signals, 2) as join:
            mine[2] = 1
            assert join() is Outcome.ARRIVED
        assert signals.times[2] is None, "nobody told us when"

    def test_a_raw_write_by_a_store_into_memory_is_seen(self):
        mine = torch.zeros(3, dtype=torch.int32)
        signals = Signals(3, mine)
        with waiting(signals, 1) as join:
            memoryview(mine.numpy()).cast("B")[4:8] = (1).to_bytes(4, "little")
            assert join() is Outcome.ARRIVED


class TestNobodySpins:
    @pytest.mark.parametrize(("kind", "most"), [("own", 0.1), ("caller's", 0.2)])
    def test_four_waiters_take_next_to_no_cpu_time(self, kind, most):
        # A caller's own words are looked at every half millisecond: 4 x 600 looks. Spinning would be 0.3 s a core.
        signals = Signals(1, None if kind == "own" else [0])
        threads = [
            threading.Thread(target=signals.wait, args=(0, 1, time.perf_counter() + 0.3, never)) for _ in range(4)
        ]
        cpu = time.process_time()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.process_time() - cpu < most

    def test_a_wait_does_not_hold_the_bell(self):
        signals = Signals(2)
        with waiting(signals, 0) as join:
            begin = time.perf_counter()
            signals.set(1)
            assert signals.times[1] - begin < LONG / 2
            signals.set(0)
            assert join() is Outcome.ARRIVED


class TestRegistry:
    def test_keys_are_never_given_twice(self):
        keys = [Signals(1).key for _ in range(100)]  # each is dropped at once
        assert len(set(keys)) == 100

    def test_holds_neither_signals_nor_words_alive(self):
        mine = torch.zeros(3, dtype=torch.int32)
        signals = Signals(3, mine)
        key, gone = signals.key, weakref.ref(mine)
        assert Signals.by_key(key) is signals
        del signals, mine
        gc.collect()
        assert gone() is None
        with pytest.raises(KeyError):
            Signals.by_key(key)

    def test_unknown_key(self):
        with pytest.raises(KeyError):
            Signals.by_key(0)
