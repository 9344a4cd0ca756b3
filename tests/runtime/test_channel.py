"""The error channel: each report once, oldest first; of more than the ring holds, those that are left."""

from __future__ import annotations

import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilestream as ts
from tilestream.arrival.signals import Signals
from tilestream.core.error_record import EXPIRED, FAILED, FIELDS, QUARANTINED, RECORDS, Record, Told, op_number
from tilestream.core.errors import ArrivalTimeout, GroupBroken, ProducerStopped, TilestreamError
from tilestream.runtime import channel as module
from tilestream.runtime.channel import Channel, channel, check_device

CPU = torch.device("cpu")
NOBODY = 10**9


class Ring:
    """A channel, and the kernels that report to it."""

    def __init__(self) -> None:
        self.channel = Channel(CPU)
        self.reports = 0

    def report(
        self, why: int = EXPIRED, *, key: int = NOBODY, epoch: int = 1, meanwhile=lambda: None, **fields: int
    ) -> None:
        """As `tilestream.kernels.device.gate.end_launch` does it; its chunk is the report's number.

        ``meanwhile``: happens before the record's number is written, which is last.
        """
        number = self.reports
        self.reports += 1
        filled = {"chunk": number, "tile": 3, "batch": -1, "pm": 1, "pn": 2, "waited": 5 * 10**6, "allowed": 10**9}
        record = Record(
            **{**dict.fromkeys(Record._fields, 0), **filled, "why": why, "key": key, "epoch": epoch, **fields}
        )
        words, at = self.channel.records, number % RECORDS * FIELDS
        words[at + 1 : at + 1 + len(record)] = torch.tensor(record)
        meanwhile()
        words[at] = number + 1

    def take(self) -> int | None:
        """The number of the record that is taken."""
        taken = self.channel.take()
        if taken is None:
            return None
        number, record = taken
        assert number == record.chunk + 1
        return record.chunk

    def taken(self) -> list[int]:
        """The numbers of all that can be taken."""
        return list(iter(self.take, None))


@pytest.fixture
def ring(monkeypatch):
    made = Ring()
    monkeypatch.setattr(module, "_channels", {None: made.channel})
    return made


def raises_once(error: type[BaseException], message: str | None = None) -> None:
    """`check` raises this, and then nothing more."""
    with pytest.raises(error, match=message):
        ts.check()
    ts.check()


class TestRing:
    @pytest.mark.parametrize("before", [0, 1, RECORDS - 1, RECORDS, RECORDS + 5])
    @pytest.mark.parametrize("more", [0, 1, 3, RECORDS - 1, RECORDS, RECORDS + 1, 3 * RECORDS + 7])
    def test_more_than_it_holds(self, before, more):
        ring = Ring()
        for number in range(before):
            ring.report()
            assert ring.taken() == [number]
        for _ in range(RECORDS + more):
            ring.report()
        assert ring.taken() == list(range(before + more, before + more + RECORDS))
        ring.report()
        assert ring.taken() == [before + more + RECORDS]

    @given(st.lists(st.one_of(st.just("take"), st.integers(1, RECORDS + 9)), max_size=30))
    def test_any_order_of_reports_and_looks(self, steps):
        """Each once and in order, beginning with an empty one."""
        ring, last = Ring(), -1
        for step in ["take", *steps]:
            if step == "take":
                expected = max(last + 1, ring.reports - RECORDS)
                if expected == ring.reports:
                    assert ring.take() is None
                else:
                    assert ring.take() == expected
                    last = expected
            else:
                for _ in range(step):
                    ring.report()
            assert ring.channel.pending == (last + 1 < ring.reports)

    @pytest.mark.parametrize("more", [1, 7, RECORDS - 1, RECORDS, RECORDS + 1, 2 * RECORDS])
    def test_a_record_that_is_overwritten_while_it_is_copied(self, ring, more):
        for _ in range(RECORDS):
            ring.report()
        words, copies = ring.channel._words, []

        class Late:
            """The words, into which more is written between the look at a record's number and the first copy."""

            def __getitem__(self, at):
                if isinstance(at, slice) and not copies:
                    copies.append(at)
                    for _ in range(more):
                        ring.report()
                return words[at]

        ring.channel._words = Late()
        assert ring.taken() == list(range(more, more + RECORDS))

    def test_a_record_of_which_all_but_the_number_is_overwritten(self, ring, monkeypatch):
        for _ in range(RECORDS):
            ring.report()
        went_on, found = threading.Event(), []
        monkeypatch.setattr(module.time, "sleep", lambda _: went_on.set() or writer.join())

        def meanwhile():
            began.set()
            assert went_on.wait(300), "the record is taken as it is"

        began, writer = threading.Event(), threading.Thread(target=lambda: ring.report(meanwhile=meanwhile))
        writer.start()
        assert began.wait(300)
        try:
            found = ring.taken()
        finally:
            went_on.set()
            writer.join()
        assert found == list(range(1, RECORDS + 1))

    @pytest.mark.parametrize("more", [1, 5, 2 * RECORDS + 3])
    def test_how_many_were_lost_is_said_once(self, ring, more):
        ring.report()
        with pytest.raises(ArrivalTimeout):
            ts.check()
        for _ in range(RECORDS + more):
            ring.report()
        with (
            pytest.warns(RuntimeWarning, match=rf"^tilestream: lost reports .*: {more}\."),
            pytest.raises(ArrivalTimeout) as caught,
        ):
            ts.check()
        assert caught.value.chunk == more + 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for chunk in range(more + 2, more + 1 + RECORDS):
                with pytest.raises(ArrivalTimeout) as caught:
                    ts.check()
                assert caught.value.chunk == chunk
            ts.check()

    def test_a_warning_that_is_an_error_costs_no_report(self, ring):
        for _ in range(RECORDS + 2):
            ring.report()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeWarning):
                ts.check()
            with pytest.raises(ArrivalTimeout) as caught:
                ts.check()
        assert caught.value.chunk == 2

    def test_a_number_that_was_claimed_and_not_written_yet(self, ring):
        ring.report()
        ring.reports += 1
        ring.report()
        assert ring.taken() == [0]
        ring.reports = 1
        ring.report()
        assert ring.taken() == [1, 2]


class TestErrors:
    def test_a_chunk_that_did_not_arrive(self, ring):
        ring.report(op=op_number("linear"), worker=7, operand=1)
        with pytest.raises(
            ArrivalTimeout, match=r"^linear: weight_arrival's chunk 0 did not arrive within .* of 1 s"
        ) as e:
            check_device(None)
        assert (e.value.worker, e.value.item, e.value.waited) == (7, "tile 3 (row tile 1, column tile 2)", 0.005)
        check_device(None)

    def test_under_quarantine_it_says_what_ends_it(self, ring):
        ring.report(QUARANTINED)
        raises_once(TilestreamError, r"what is left of them must not be taken for news.*call arrival\.reset\(\)")

    def test_the_next_call_raises_the_next_one(self, ring):
        for _ in range(3):
            ring.report()
        for chunk in range(3):
            with pytest.raises(ArrivalTimeout) as caught:
                ts.check()
            assert caught.value.chunk == chunk
        ts.check()

    def test_what_a_producer_raised_is_raised_once_though_many_launches_report_it(self, ring):
        signals = Signals(1)
        signals.fail(OSError("the disk is gone"))
        signals.advance()  # the epoch that follows is another matter
        for _ in range(3):
            ring.report(FAILED, key=signals.key)
        raises_once(OSError, "the disk is gone")
        assert not ring.channel.pending

    def test_what_was_raised_elsewhere_is_passed_over_and_what_is_behind_it_is_not(self, ring):
        signals = Signals(1)
        signals.fail(OSError("the disk is gone"))
        assert signals.take_error(1) is not None
        ring.report(FAILED, key=signals.key)
        ring.report()
        raises_once(ArrivalTimeout)

    def test_an_exception_that_went_with_its_arrival(self, ring):
        ring.report(FAILED)
        raises_once(ProducerStopped, "its exception went with its Arrival")

    def test_an_epoch_whose_failure_was_not_told(self, ring):
        """Two producers failed, one after the other, and only the second one's exception was raised so far."""
        signals = Signals(1)
        signals.fail(OSError("first"))
        signals.advance()
        signals.fail(OSError("second"))
        with pytest.raises(OSError, match="second"):
            raise signals.take_error(2)
        ring.report(FAILED, key=signals.key, epoch=1)
        raises_once(ProducerStopped, "the producer failed, and began anew")
        for epoch in (1, 2):
            ring.report(FAILED, key=signals.key, epoch=epoch)
        ts.check()


class TestOfRanks:
    """Signals of a group of ranks fail together."""

    @pytest.fixture
    def group(self):
        told, signals = Told(), [Signals(1) for _ in range(3)]
        for one in signals[:2]:
            one.told, one.gave_up, one.failure = told, lambda: None, lambda epoch: GroupBroken("tp", "a peer is late")
        return [one.key for one in signals], signals

    def test_what_had_been_reported_when_it_was_raised_is_not_raised_again(self, ring, group):
        (first, second, _), _ = group
        ring.report(key=first)
        ring.report(QUARANTINED, key=first)  # of the launch behind the one that gave up
        raises_once(ArrivalTimeout)
        for key in 3 * [first, second]:  # replays in a broken group
            ring.report(QUARANTINED, key=key)
        raises_once(GroupBroken, "a peer is late")
        ring.report(QUARANTINED, key=second)  # one more is told again
        raises_once(GroupBroken)

    def test_other_signals_and_expiries_are_raised_all_the_same(self, ring, group):
        (first, second, other), _ = group
        for why, key in ((QUARANTINED, first), (EXPIRED, second), (QUARANTINED, other), (QUARANTINED, second)):
            ring.report(why, key=key)
        for error in (GroupBroken, ArrivalTimeout, TilestreamError):
            with pytest.raises(error):
                ts.check()
        ts.check()

    def test_a_record_that_was_being_written_meanwhile_is_news(self, ring, group):
        (first, *_), _ = group
        ring.report(QUARANTINED, key=first)
        ring.reports += 1
        ring.report(QUARANTINED, key=first)  # it may be of a later launch than the one that is being written
        with pytest.raises(GroupBroken):
            ts.check()
        ring.reports = 1
        ring.report(QUARANTINED, key=first)
        raises_once(GroupBroken)


def test_a_device_on_which_nothing_was_launched(monkeypatch):
    monkeypatch.setattr(module, "_channels", {})
    check_device(5)
    ts.check()
    assert module._channels == {}
    assert channel(CPU) is channel(CPU)


class TestOneFailure:
    """What the host has found, and a kernel may report too."""

    HOSTS = ValueError("the host's")

    def test_of_the_hosts_alone_is_raised_in_order(self, ring):
        ring.channel.post(ValueError("first"))
        ring.channel.post(KeyError("second"))
        with pytest.raises(ValueError, match="first"):
            ts.check()
        raises_once(KeyError)

    def test_of_which_the_kernel_has_reported_is_that(self, ring):
        ring.channel.post(self.HOSTS, key=3)
        ring.report(key=3)
        raises_once(ArrivalTimeout)

    def test_of_which_the_kernel_reports_later_is_the_hosts(self, ring):
        ring.channel.post(self.HOSTS, key=3)
        raises_once(ValueError, "the host's")
        ring.report(key=3)
        ts.check()
        ring.report(key=4)
        raises_once(ArrivalTimeout)

    def test_of_which_the_kernel_only_knows_that_it_failed_is_the_hosts(self, ring, monkeypatch):
        told = []
        monkeypatch.setattr(Record, "error", lambda record: told.append(record.key) or ValueError("the kernel's"))
        ring.report(FAILED, key=3)
        ring.channel.post(KeyError("the host's"), key=3)
        raises_once(KeyError)
        assert told == [3], "its signals are told all the same"
        ring.report(FAILED, key=3)
        ts.check()
        assert told == [3, 3]

    @pytest.mark.filterwarnings("ignore:tilestream. lost reports")
    def test_is_not_lost_behind_others(self, ring):
        ring.channel.post(self.HOSTS, key=3)
        for _ in range(RECORDS + 1):
            ring.report(key=4)
        for _ in range(RECORDS):
            with pytest.raises(ArrivalTimeout):
                ts.check()
        raises_once(ValueError)

    def test_of_which_a_launch_before_has_reported_is_the_hosts_all_the_same(self, ring):
        ring.report(key=3)
        raises_once(ArrivalTimeout)
        ring.channel.post(self.HOSTS, key=3, since=1)
        raises_once(ValueError, "the host's")

    def test_of_which_a_kernel_only_knows_the_failure_hides_what_is_reported_since(self, ring):
        ring.channel.post(self.HOSTS, key=3, since=1)
        failed = SimpleNamespace(key=3, why=module.EXPIRED + 1)
        assert ring.channel._is_news(1, failed)
        assert not ring.channel._is_news(2, failed)
        assert ring.channel._is_news(2, SimpleNamespace(key=4, why=module.EXPIRED + 1))
        assert ring.channel._is_news(2, SimpleNamespace(key=3, why=module.EXPIRED))


class TestHeard:
    """What a host asks that must not go on where a launch of its own has given up."""

    def test_of_whom_it_is_asked(self, ring):
        assert ring.channel.heard(0, {3}) == (0, False)
        ring.report(key=4)
        assert ring.channel.heard(0, {3}) == (1, False)
        ring.report(key=3)
        assert ring.channel.heard(1, {3}) == (2, True)
        assert ring.channel.heard(2, {3}) == (2, False)
        assert ring.channel.newest == 2

    def test_raised_or_not(self, ring):
        ring.report(key=3)
        assert ring.channel.take() is not None
        assert ring.channel.heard(0, {3}) == (1, True)

    def test_behind_one_that_is_still_being_written(self, ring):
        ring.reports = 1
        ring.report(key=3)
        assert ring.channel.heard(0, {3}) == (0, True)
        ring.reports = 0
        ring.report(key=5)
        assert ring.channel.heard(0, {3, 5}) == (2, True)
        assert ring.channel.heard(0, {4}) == (2, False)

    def test_what_was_overwritten_may_have_been_ours(self, ring):
        for _ in range(RECORDS):
            ring.report()
        assert ring.channel.heard(0, {3}) == (RECORDS, False)
        ring.report()
        assert ring.channel.heard(0, {3})[1]
        assert ring.channel.heard(1, {3}) == (RECORDS + 1, False)
