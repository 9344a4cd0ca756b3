"""What an all-reduce of a few rows issues on a GPU, on fake ones: ranks in a process, streams run in any order."""

from __future__ import annotations

import contextlib
import ctypes
import types

import pytest
import torch
from fake_ranks import GroupState, Memory, look, pretend, refused_once
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_cuda import DEVICE, FakeCuda, fake_cuda
from tilestream.core.errors import ArrivalTimeout, GroupBroken
from tilestream.core.protocols import gather
from tilestream.distributed import gpu_reduce_scatter, one_shot
from tilestream.distributed.one_shot import AllReduceQueue
from tilestream.kernels.portable import add

#: Rows and columns of a partial sum.
SHAPES = ((1, 8), (3, 4), (5, 2))


class Rank:
    """A rank: its all-reduces, its calling streams, and what has come of its calls (None: void)."""

    def __init__(self, cuda: FakeCuda, memory: Memory, rank: int, streams: int) -> None:
        self.cuda, self.rank, self.world = cuda, rank, memory.ranks
        self.state = GroupState(rank, memory.ranks)
        self.calling = [cuda.stream() for _ in range(streams)]
        self.shapes: list[tuple[int, int]] = []
        self.results: dict[int, torch.Tensor | None] = {}
        with cuda.on(self.calling[0]):
            self.reducer = AllReduceQueue(self.state, DEVICE, memory.of(rank))
        self.reducer._watchdog.wake = lambda: None  # the test looks

    def product(self, rank: int, call: int) -> torch.Tensor:
        """What ``rank`` computes in a call."""
        rows, columns = self.shapes[call - 1]
        return torch.arange(rows * columns).view(rows, columns) + 1000.0 * rank + 10000.0 * call

    def call(self, shape: tuple[int, int], peer_seconds: float = 0.0) -> None:
        """The next call, on the next stream."""
        self.shapes.append(shape)
        number = len(self.shapes)
        stream = self.calling[number % len(self.calling)]

        def multiply(out):
            stream.give(lambda: out.fill_(float("nan")))  # it is being written
            stream.give(lambda: out.copy_(self.product(self.rank, number)))

        def add_up(addresses, over, epoch):
            parts: list[torch.Tensor] = []

            def add(at: int) -> None:
                memory = (ctypes.c_float * (shape[0] * shape[1])).from_address(at)
                parts.append(torch.tensor(memory[:]).view(shape))

            def round_once() -> None:
                void = 0 < int(over) <= epoch
                self.results[number] = None if void else torch.stack(parts).sum(0)

            for at in addresses.tolist():
                stream.give(lambda at=at: add(at))
            stream.give(round_once)

        with self.cuda.on(stream):
            self.reducer.reduce(shape, torch.float32, multiply, add_up, peer_seconds)

    @property
    def room(self) -> bool:
        """Whether the host of a real rank would go on."""
        return len(self.reducer._under_way()) <= gather.AHEAD and not self.state.broken

    def expected(self, call: int) -> torch.Tensor:
        return torch.stack([self.product(r, call) for r in range(self.world)]).sum(0)


@contextlib.contextmanager
def world(ranks: int, streams: int = 1):
    with fake_cuda() as cuda, pytest.MonkeyPatch.context() as patch:
        pretend(cuda, patch)
        for name in ("stream_write", "stream_wait"):
            patch.setattr(one_shot, name, getattr(gpu_reduce_scatter, name))
        posted: list[BaseException] = []
        patch.setattr(gpu_reduce_scatter, "channel", lambda device: types.SimpleNamespace(post=posted.append))
        memory = Memory(ranks, 64)
        yield cuda, [Rank(cuda, memory, rank, streams) for rank in range(ranks)], posted


@given(data=st.data(), ranks=st.sampled_from((2, 3)), streams=st.sampled_from((1, 2)))
@settings(max_examples=60)
def test_every_sum_is_of_its_own_epoch_whatever_the_order_of_streams(data, ranks, streams):
    with world(ranks, streams) as (cuda, all_ranks, posted):
        calls = data.draw(st.lists(st.sampled_from(SHAPES), min_size=5, max_size=5))
        while any(len(rank.results) < len(calls) for rank in all_ranks):
            rank = data.draw(st.sampled_from(all_ranks))
            if data.draw(st.booleans()) and len(rank.shapes) < len(calls) and rank.room:
                rank.call(calls[len(rank.shapes)])
            else:
                data.draw(st.sampled_from(rank.calling)).run(data.draw(st.integers(1, 5)))
            if data.draw(st.integers(0, 9)) == 0:
                cuda.run()
                for each in all_ranks:
                    if len(each.shapes) < len(calls) and each.room:
                        each.call(calls[len(each.shapes)])
        for rank in all_ranks:
            for call in range(1, len(calls) + 1):
                assert rank.results[call].equal(rank.expected(call)), (rank.rank, call)
            look(rank.reducer)
            assert not rank.state.broken, "a watchdog saw what is not there"
        assert not posted


@given(data=st.data(), ranks=st.sampled_from((2, 3)))
@settings(max_examples=60)
def test_whoever_gives_up_whenever_no_number_is_wrong_and_nobody_is_stuck(data, ranks):
    with world(ranks) as (cuda, all_ranks, _):
        for _ in range(data.draw(st.integers(5, 80))):
            rank = data.draw(st.sampled_from(all_ranks))
            what = data.draw(st.integers(0, 9))
            if what <= 2 and rank.room:
                rank.call(SHAPES[0])
            elif what == 3:
                look(rank.reducer)  # the peers' time is over at once
            else:
                rank.calling[0].run(data.draw(st.integers(1, 6)))
        for _ in range(8):
            cuda.run()
            for rank in all_ranks:
                look(rank.reducer)
        for rank in all_ranks:
            assert rank.calling[0].query(), "stuck"
            for call in range(1, len(rank.shapes) + 1):
                result = rank.results[call]
                assert result is None or result.equal(rank.expected(call)), (rank.rank, call)
        if any(rank.state.broken for rank in all_ranks):
            assert all(rank.state.broken or rank.reducer.flags.aborted() for rank in all_ranks), "all are told"


def test_who_has_given_up_says_whose_part_is_missing_and_a_peer_that_it_was_told():
    with world(3) as (cuda, (first, second, third), posted):
        for rank in (first, second):
            rank.call(SHAPES[0])
            cuda.run()
        assert not first.calling[0].query(), "the third is missing"
        look(first.reducer)
        cuda.run()
        assert first.results == {1: None}
        error = posted.pop()
        assert isinstance(error, ArrivalTimeout)
        assert error.rank == 0
        assert "rank 2's part of the sum" in str(error)
        with pytest.raises(GroupBroken, match="matmul_all_reduce: rank 0 has given up waiting for a peer"):
            first.call(SHAPES[0])
        second.reducer.poll()
        cuda.run()
        assert second.results == {1: None}
        assert isinstance(posted.pop(), GroupBroken)
        assert third.reducer.flags.aborted()


def test_patience_counts_from_the_end_of_the_matmul():
    with world(2) as (cuda, (first, _), posted):
        first.call(SHAPES[0], peer_seconds=1e6)
        cuda.run()
        look(first.reducer)
        assert not first.state.broken
        assert not posted


def test_half_a_call_breaks_the_group_on_all_ranks_and_leaves_nothing_stuck(monkeypatch):
    with world(2) as (cuda, (first, second), _):
        monkeypatch.setattr(one_shot, "stream_wait", lambda *args: (_ for _ in ()).throw(RuntimeError("no driver")))
        with pytest.raises(RuntimeError, match="no driver"):
            first.call(SHAPES[0])
        monkeypatch.undo()
        with pytest.raises(GroupBroken, match="on rank 0: RuntimeError: no driver"):
            first.call(SHAPES[0])
        assert second.reducer.flags.aborted()
        cuda.run()
        assert first.calling[0].query()


def test_half_a_call_that_waits_for_a_peer_is_let_go(monkeypatch):
    """The matmul has ended, one peer is waited for, and of the other the wait was refused."""
    with world(3) as (cuda, (first, second, _), _):
        wait, waits = one_shot.stream_wait, []

        def once(*args: int) -> None:
            waits.append(args)
            if len(waits) > 1:
                raise RuntimeError("no driver")
            wait(*args)

        monkeypatch.setattr(one_shot, "stream_wait", once)
        with pytest.raises(RuntimeError, match="no driver"):
            first.call(SHAPES[0], peer_seconds=1e6)
        cuda.run()
        assert not first.calling[0].query(), "it is at the peer's flag"
        look(first.reducer)
        cuda.run()
        assert first.calling[0].query(), "at once: nobody sends anything any more"
        assert second.reducer.flags.aborted()


def test_the_watchdog_sees_a_call_whose_sum_is_being_launched():
    """Where launches block, that one is behind the wait for the peers: the host is in it until they come."""
    with world(2) as (cuda, (first, _), _):
        seen = []

        def add_up(addresses, over, epoch):
            cuda.run()
            assert not first.calling[0].query(), "the peer is missing"
            look(first.reducer)
            cuda.run()
            seen.append(first.calling[0].query())

        with cuda.on(first.calling[0]):
            first.reducer.reduce(SHAPES[0], torch.float32, lambda out: None, add_up, 0.0)
        assert seen == [True]


def test_no_room_for_the_addresses_is_found_before_the_call_is_counted(monkeypatch):
    with world(2) as (cuda, ranks, _):
        refused_once(monkeypatch, cuda, ranks, SHAPES[0], "reducer", "_slots")


def test_a_bias_of_any_strides_is_read_as_it_is(monkeypatch):
    """The kernel knows no strides: a column, every other element, or one number that is seen as many."""
    read = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda addresses, out, bias, *args, **kwargs: read.append((bias, kwargs["BIAS"]))

    monkeypatch.setattr(add, "add_slots", Kernel())
    monkeypatch.setattr(one_shot, "agree", lambda *args: None)
    whole = torch.arange(16.0)
    biases = [whole[::2], whole.view(8, 2)[:, 1], whole[:1].expand(8), whole[:8]]
    for bias in biases:
        with world(2) as (cuda, (first, _), _), cuda.on(first.calling[0]):
            first.state.queue = lambda kind, device: first.reducer
            one_shot.matmul_reduce(
                first.state, None, (1, 8), torch.float32, lambda out: None, False, bias, 0.0, DEVICE
            )  # fmt: skip
        given, has = read.pop()
        assert has
        assert given.is_contiguous()
        assert given.equal(bias)
    assert given.data_ptr() == biases[-1].data_ptr(), "of one that is, no copy is made"
