"""What a gather issues on a GPU, on fake ones: two or three ranks in one process, their streams run in any order."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable

import pytest
import torch
from fake_ranks import Member, Memory, look, pretend
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_cuda import DEVICE, FakeCuda, Until, fake_cuda
from tilestream.arrival.arrival import Arrival
from tilestream.arrival.device import DeviceSignals
from tilestream.distributed import copy_engines, protocol, turns
from tilestream.distributed.copy_engines import Gatherer
from tilestream.distributed.shards import Shards
from tilestream.distributed.whole import Whole
from tilestream.runtime.errors import GroupBroken
from tilestream.runtime.record import EXPIRED, Record, op_number


class Rank:
    """A rank: its gatherer, its calling stream, and what its kernels have handed in."""

    def __init__(self, cuda: FakeCuda, memory: Memory, rank: int, shards: Shards) -> None:
        self.cuda, self.rank, self.shards = cuda, rank, shards
        self.member = Member(rank, memory.ranks)
        self.calling = cuda.stream()
        self.over: set[int] = set()  # calls whose kernel has expired
        self.records: list[Callable[[], None]] = []  # what is done when that is raised
        self.calls: list[int] = []
        self.results: dict[int, torch.Tensor | None] = {}
        with cuda.on(self.calling):
            self.gatherer = Gatherer(self.member, DEVICE, memory.of(rank))
        self.gatherer.make_arrival = self._arrival
        self.gatherer._watchdog.wake = lambda: None  # the test looks
        self.side = self.gatherer._side

    def _arrival(self, shards: Shards) -> Arrival:
        arrival = shards.arrival(self.rank)
        arrival._signals = DeviceSignals(arrival.num_chunks, DEVICE)
        return arrival

    def data(self, rank: int, call: int) -> torch.Tensor:
        s = self.shards
        return torch.full((s.batches, s.rows, s.width), 100.0 * rank + call)

    def call(self, whole: torch.Tensor | None = None) -> None:
        """The next call: a kernel that hands in what is gathered, or None where it has expired.

        What is gathered stands in ``whole``; in a slot, where there is none.
        """
        number = len(self.calls) + 1
        self.calls.append(number)
        calling = self.calling

        def kernel(gathered: Whole, arrival: Arrival) -> list[torch.Tensor]:
            words, whole = arrival._signals.use(), gathered.data

            def ended() -> bool:
                state = words.words.tolist()
                if all(word >= words.epoch for word in state):
                    self.results[number] = whole.clone()
                elif number in self.over or any(word == -words.epoch for word in state):
                    self.results[number] = None
                    self.records.append(arrival._signals.gave_up)
                return number in self.results

            calling.give(Until(ended))
            return []

        mine = Whole(self.data(self.rank, number), None)
        with self.cuda.on(self.calling):
            self.gatherer.issue(self.shards, mine, None if whole is None else Whole(whole, None), kernel)

    def expected(self, call: int) -> torch.Tensor:
        return torch.stack([self.data(r, call) for r in range(self.member.world)], 1)


@contextlib.contextmanager
def world(ranks: int, shards: Shards):
    with fake_cuda() as cuda, pytest.MonkeyPatch.context() as patch:
        pretend(cuda, patch)
        patch.setattr(copy_engines, "copy", lambda to, source: cuda.current.give(lambda: to.copy_(source)))
        memory = Memory(ranks, 4 * shards.total * shards.width)
        yield cuda, [Rank(cuda, memory, rank, shards) for rank in range(ranks)]


SHARDS = (Shards(1, 2, 3, 2), Shards(1, 3, 3, 2, parts=2), Shards(2, 2, 3, 1))


@given(data=st.data(), shards=st.sampled_from(SHARDS))
@settings(max_examples=40)
def test_every_call_reads_its_own_epoch_whatever_the_order_of_streams(data, shards):
    with world(shards.world, shards) as (cuda, ranks):
        calls = 5
        while any(len(rank.results) < calls for rank in ranks):
            rank = data.draw(st.sampled_from(ranks))
            what = data.draw(st.integers(0, 2))
            # The host of a real rank would wait where its side stream is further behind.
            room = len(rank.gatherer._underway()) <= protocol.AHEAD
            if what == 0 and len(rank.calls) < calls and room:
                own = data.draw(st.booleans())
                rank.call(torch.full(shards.shape, float("nan")) if own else None)
            else:
                (rank.calling if what == 1 else rank.side).run(data.draw(st.integers(1, 3)))
            if data.draw(st.integers(0, 9)) == 0:
                cuda.run()
                for each in ranks:
                    if len(each.calls) < calls and len(each.gatherer._underway()) <= protocol.AHEAD:
                        each.call()
        for rank in ranks:
            for call in range(1, calls + 1):
                assert rank.results[call].equal(rank.expected(call)), (rank.rank, call)
            look(rank.gatherer)
            assert not rank.member.broken, "a watchdog saw what is not there"


@given(data=st.data(), shards=st.sampled_from(SHARDS[:2]))
@settings(max_examples=40)
def test_whoever_gives_up_whenever_no_number_is_wrong_and_nobody_is_stuck(data, shards):
    with world(shards.world, shards) as (cuda, ranks):
        for _ in range(data.draw(st.integers(5, 60))):
            rank = data.draw(st.sampled_from(ranks))
            what = data.draw(st.integers(0, 9))
            if what <= 1 and len(rank.gatherer._underway()) <= protocol.AHEAD and not rank.member.broken:
                rank.call()
            elif what == 2 and rank.calls:
                rank.over.add(len(rank.calls))  # its kernel's deadline has passed, if it still waits
            elif what == 3:
                look(rank.gatherer)
            else:
                (rank.calling if what % 2 else rank.side).run(data.draw(st.integers(1, 4)))
        for rank in ranks:  # at last every deadline passes, and every watchdog looks
            rank.over.update(range(1, len(rank.calls) + 1))
        for _ in range(8):
            cuda.run()
            for rank in ranks:
                look(rank.gatherer)
        for rank in ranks:
            assert rank.calling.query(), "stuck"
            assert rank.side.query(), "stuck"
            for call in range(1, len(rank.calls) + 1):
                result = rank.results[call]
                assert result is None or result.equal(rank.expected(call)), (rank.rank, call)
            for raised in rank.records:
                raised()
            assert rank.member.broken or not rank.records, "who has given up knows that the group is broken"
        if any(rank.member.broken for rank in ranks):
            cuda.run()
            assert all(rank.member.broken or rank.gatherer.memory.aborted() for rank in ranks), "all are told"


def test_what_is_issued_is_the_text():
    shards = Shards(1, 3, 2, 1)
    with world(3, shards) as (_cuda, ranks):
        first = ranks[0]
        first.call()
        told = [ctypes.c_int32.from_address(first.gatherer.memory.flag(peer, 0)) for peer in (1, 2)]
        first.side.run()
        assert [word.value for word in told] == [0, 0], "nothing before the slot is full"
        first.calling.run()
        first.side.run()
        assert [word.value for word in told] == [1, 1]
        # Of each peer a wait, a copy and a signal are left: it waits for the first of them.
        assert first.side.issued - first.side.done == 2 * 3
        assert not first.results


def test_the_host_waits_where_it_is_too_far_ahead():
    with world(2, SHARDS[0]) as (_, ranks):
        first, second = ranks
        first.call()
        first.call()
        with pytest.raises(AssertionError, match="waits for ever"):  # as the fake device says it
            first.call()
        second.call()
        first.cuda.run()
        first.call()  # the first is done: the third may begin


def test_a_call_on_another_stream_does_not_write_what_the_last_kernel_still_reads():
    shards = SHARDS[0]
    with world(2, shards) as (cuda, ranks):
        first, second = ranks
        whole = torch.full(shards.shape, float("nan"))
        one = first.calling
        first.call(whole)
        second.call()
        for _ in range(9):  # all but the last of what is on the first stream: its kernel, and the wait after it
            one.run(one.issued - one.done - 2)
            for rank in (second.calling, second.side, first.side):
                rank.run()
        assert first.side.query()
        assert not first.results
        first.calling = cuda.stream()
        first.call(whole)
        second.call()
        for _ in range(9):
            for stream in (first.calling, first.side, second.calling, second.side):
                stream.run()
        assert whole.equal(first.expected(1)), "the first kernel has not run"
        cuda.run()
        assert first.results[1].equal(first.expected(1))
        assert first.results[2].equal(first.expected(2))


def test_half_a_call_breaks_the_group_on_all_ranks(monkeypatch):
    with world(2, SHARDS[0]) as (_, ranks):
        first, second = ranks
        monkeypatch.setattr(copy_engines, "stream_wait", lambda *args: (_ for _ in ()).throw(RuntimeError("no driver")))
        with pytest.raises(RuntimeError, match="no driver"):
            first.call()
        monkeypatch.undo()
        with pytest.raises(GroupBroken, match="on rank 0: RuntimeError: no driver"):
            first.call()
        assert second.gatherer.memory.aborted()


def test_an_expiry_breaks_the_group_on_both_ranks_and_lets_their_streams_go():
    with world(2, SHARDS[0]) as (cuda, ranks):
        first, second = ranks
        for rank in ranks:
            rank.call()
        cuda.run()
        first.call()
        first.call()
        first.over |= {2, 3}  # the second rank does not come
        cuda.run()
        assert first.results[2] is None
        assert not first.side.query()
        look(first.gatherer)
        cuda.run()
        assert first.side.query(), "let go"
        assert first.calling.query()
        assert first.results[3] is None
        assert first.results[1].equal(first.expected(1))
        with pytest.raises(GroupBroken, match="rank 0 has given up waiting for a peer"):
            first.call()
        second.call()  # it has not heard yet
        look(second.gatherer)
        cuda.run()
        assert second.side.query()
        assert second.calling.query()
        with pytest.raises(GroupBroken, match="a peer has given up waiting"):
            second.call()
        assert second.results[1].equal(second.expected(1))


def test_a_kernel_that_could_wait_longer_is_told_though_its_signals_are_issued():
    with world(2, SHARDS[0]) as (cuda, (first, _)):
        first.call()
        first.call()
        first.over.add(1)  # of the second call the deadline has not passed
        cuda.run()
        look(first.gatherer)
        cuda.run()
        assert first.results == {1: None, 2: None}
        assert first.side.query()
        assert first.calling.query()


def test_a_record_of_an_expiry_names_the_rank_and_whose_part_is_missing():
    shards = Shards(1, 2, 3, 2, parts=2)
    with world(2, shards) as (_, ranks):
        ranks[0].call()
        signals = next(iter(ranks[0].gatherer._arrivals.values()))._signals
        assert not ranks[0].member.broken
        record = Record(EXPIRED, op_number("all_gather_matmul"), 5, 0, 3, signals.key, 1, 7, -1, 1, 3, 10**9, 10**9)
        error = record.error()
        assert (error.rank, error.chunk) == (0, 3)
        assert str(error).startswith(
            "all_gather_matmul: rank 1's part of a_shard's chunk 3 did not arrive within the deadline of 1 s: rank 0, "
            "worker 5 waited 1.000 s"
        )
        assert ranks[0].member.broken, "with the first news of it"


def test_looks_at_several_calls_do_not_add_up():
    with world(2, SHARDS[0]) as (cuda, ranks):
        first, second = ranks
        for _ in range(turns.LOOKS + 2):
            for rank in ranks:
                rank.call()
            # The moment in which a kernel has ended, and the event behind its last chunk has not been recorded.
            patched = pytest.MonkeyPatch()
            call = first.gatherer._calls[-1]
            patched.setattr(call.kernel, "query", lambda: True)
            patched.setattr(call.side, "query", lambda: False)
            first.gatherer.look()
            patched.undo()
            cuda.run()
        assert not first.member.broken
        assert len(first.results) == len(second.results) == turns.LOOKS + 2


def test_a_late_rank_is_not_taken_for_a_lost_one():
    with world(2, SHARDS[0]) as (cuda, ranks):
        first, second = ranks
        first.call()
        cuda.run()
        look(first.gatherer)
        assert not first.member.broken
        second.call()
        cuda.run()
        assert first.results[1].equal(first.expected(1))
        assert second.results[1].equal(second.expected(1))


def test_nothing_keeps_a_gatherer_when_its_calls_are_over():
    import gc
    import weakref

    with world(2, SHARDS[0]) as (cuda, ranks):
        for rank in ranks:
            rank.call()
        cuda.run()
        gatherer = weakref.ref(ranks[0].gatherer)
        ranks[0].gatherer._watchdog = None
        ranks.clear()
        gc.collect()
        assert gatherer() is None
