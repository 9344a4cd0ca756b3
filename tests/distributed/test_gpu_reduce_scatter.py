"""What a sum issues on a GPU, on fake ones: two or three ranks in one process, their streams run in any order."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch
from fake_ranks import GroupState, Memory, look, pretend, refused_once
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_cuda import DEVICE, FakeCuda, fake_cuda
from tilestream.core.errors import ArrivalTimeout, GroupBroken
from tilestream.core.protocols import gather
from tilestream.core.protocols import reduce_scatter as protocol
from tilestream.distributed import gpu_reduce_scatter, reduce_scatter
from tilestream.distributed.gpu_reduce_scatter import ReduceScatterQueue
from tilestream.distributed.request import REDUCE_SCATTER, Request
from tilestream.distributed.shards import Shards
from tilestream.kernels.portable import add


class Publication:
    """As `tilestream.ops.publish.Publication`, in the CPU's memory."""

    def __init__(self, chunks: int) -> None:
        self.chunks, self.words = chunks, torch.zeros(chunks, dtype=torch.int32)

    def address(self, chunk: int) -> int:
        return self.words.data_ptr() + 4 * chunk


class Fake(ReduceScatterQueue):
    def make_publication(self, chunks: int) -> Publication:
        return Publication(chunks)


class Rank:
    """A rank: its gpu_reduce_scatter, its calling stream, and what has come of its calls (None: void)."""

    def __init__(self, cuda: FakeCuda, memory: Memory, rank: int) -> None:
        self.cuda, self.rank, self.world = cuda, rank, memory.ranks
        self.state = GroupState(rank, memory.ranks)
        self.calling = cuda.stream()
        self.shapes: list[Shards] = []
        self.received: torch.Tensor | None = None
        self.results: dict[int, torch.Tensor | None] = {}
        with cuda.on(self.calling):
            self.scatterer = Fake(self.state, DEVICE, memory.of(rank))
        self.scatterer._watchdog.wake = lambda: None  # the test looks
        self.side = self.scatterer._side

    def product(self, rank: int, call: int, shards: Shards) -> torch.Tensor:
        """What ``rank`` computes in a call: no two rows alike."""
        rows = torch.arange(shards.total, dtype=torch.float32).view(*shards.shape[:-1], 1)
        return (rows + 1000.0 * rank + 10000.0 * call).expand(shards.shape).contiguous()

    def call(self, shards: Shards, peer_seconds: float = 0.0) -> None:
        """The next call."""
        self.shapes.append(shards)
        number = len(self.shapes)

        def kernel(out, publication, epoch, rows_per_chunk, pivot):
            values = self.product(self.rank, number, shards).view(shards.total, shards.width)
            chunks = shards.total // rows_per_chunk
            for i in range(chunks):
                at = slice((pivot + i) % chunks * rows_per_chunk, ((pivot + i) % chunks + 1) * rows_per_chunk)

                def compute(at=at):
                    out[at] = values[at]

                def publish(chunk=(pivot + i) % chunks):
                    publication.words[chunk] = epoch

                self.calling.give(compute)
                self.calling.give(publish)

        def add_up(whole, over, epoch):
            def add() -> None:
                parts = [whole[:, r] if r == self.rank else received[r] for r in range(self.world)]
                void = 0 < int(over) <= epoch
                self.results[number] = None if void else torch.stack(parts).sum(0)

            self.calling.give(add)

        shape = (self.world, shards.batches, shards.rows, shards.width)
        if self.received is None or self.received.shape != shape:  # one buffer for all calls, as a state has it
            self.received = torch.full(shape, float("nan"))
        received = self.received
        with self.cuda.on(self.calling):
            self.scatterer.issue(shards, torch.float32, received, kernel, add_up, peer_seconds)

    def expected(self, call: int) -> torch.Tensor:
        shards = self.shapes[call - 1]
        return torch.stack([self.product(r, call, shards)[:, self.rank] for r in range(self.world)]).sum(0)


@contextlib.contextmanager
def world(ranks: int):
    with fake_cuda() as cuda, pytest.MonkeyPatch.context() as patch:
        pretend(cuda, patch)
        posted: list[BaseException] = []
        patch.setattr(gpu_reduce_scatter, "channel", lambda device: types.SimpleNamespace(post=posted.append))
        memory = Memory(ranks, 4 * 64)
        for of in range(ranks):
            assert memory.of(of).slot_bytes >= 4 * max(s.total * s.width for s in SHARDS[ranks])
        yield cuda, [Rank(cuda, memory, rank) for rank in range(ranks)], posted


SHARDS = {
    2: (Shards(1, 2, 3, 2), Shards(1, 2, 4, 1, parts=2), Shards(3, 2, 2, 1)),
    3: (Shards(1, 3, 2, 2), Shards(1, 3, 4, 1, parts=2), Shards(2, 3, 2, 1, parts=2)),
}


@given(data=st.data(), ranks=st.sampled_from((2, 3)))
@settings(max_examples=40)
def test_every_sum_is_of_its_own_epoch_whatever_the_order_of_streams(data, ranks):
    with world(ranks) as (cuda, all_ranks, posted):
        calls = data.draw(st.lists(st.sampled_from(SHARDS[ranks]), min_size=5, max_size=5))
        while any(len(rank.results) < len(calls) for rank in all_ranks):
            rank = data.draw(st.sampled_from(all_ranks))
            what = data.draw(st.integers(0, 2))
            # The host of a real rank would wait where its side stream is further behind.
            room = len(rank.scatterer._under_way()) <= gather.AHEAD
            if what == 0 and len(rank.shapes) < len(calls) and room:
                rank.call(calls[len(rank.shapes)])
            else:
                (rank.calling if what == 1 else rank.side).run(data.draw(st.integers(1, 5)))
            if data.draw(st.integers(0, 9)) == 0:
                cuda.run()
                for each in all_ranks:
                    if len(each.shapes) < len(calls) and len(each.scatterer._under_way()) <= gather.AHEAD:
                        each.call(calls[len(each.shapes)])
        for rank in all_ranks:
            for call in range(1, len(calls) + 1):
                assert rank.results[call].equal(rank.expected(call)), (rank.rank, call)
            look(rank.scatterer)
            assert not rank.state.broken, "a watchdog saw what is not there"
        assert not posted


@given(data=st.data(), ranks=st.sampled_from((2, 3)))
@settings(max_examples=40)
def test_whoever_gives_up_whenever_no_number_is_wrong_and_nobody_is_stuck(data, ranks):
    with world(ranks) as (cuda, all_ranks, _):
        shards = data.draw(st.sampled_from(SHARDS[ranks]))
        for _ in range(data.draw(st.integers(5, 80))):
            rank = data.draw(st.sampled_from(all_ranks))
            what = data.draw(st.integers(0, 9))
            if what <= 1 and len(rank.scatterer._under_way()) <= gather.AHEAD and not rank.state.broken:
                rank.call(shards)
            elif what == 2:
                look(rank.scatterer)  # the peers' time is over at once
            else:
                (rank.calling if what % 2 else rank.side).run(data.draw(st.integers(1, 6)))
        for _ in range(8):
            cuda.run()
            for rank in all_ranks:
                look(rank.scatterer)
        for rank in all_ranks:
            assert rank.calling.query(), "stuck"
            assert rank.side.query(), "stuck"
            for call in range(1, len(rank.shapes) + 1):
                result = rank.results[call]
                assert result is None or result.equal(rank.expected(call)), (rank.rank, call)
        if any(rank.state.broken for rank in all_ranks):
            assert all(rank.state.broken or rank.scatterer.flags.aborted() for rank in all_ranks), "all are told"


def test_who_has_given_up_says_whose_part_is_missing_and_a_peer_that_it_was_told():
    with world(3) as (cuda, (first, second, third), posted):
        for rank in (first, second):
            rank.call(SHARDS[3][0])
            cuda.run()
        assert not first.side.query(), "the third is missing"
        look(first.scatterer)
        cuda.run()
        assert first.results == {1: None}
        error = posted.pop()
        assert isinstance(error, ArrivalTimeout)
        assert error.rank == 0
        assert "rank 2's part of the sum's chunk 0 did not arrive" in str(error)
        with pytest.raises(GroupBroken, match="matmul_reduce_scatter: rank 0 has given up waiting for a peer"):
            first.call(SHARDS[3][0])
        second.scatterer.poll()
        cuda.run()
        assert second.results == {1: None}
        assert isinstance(posted.pop(), GroupBroken)
        assert third.scatterer.flags.aborted()


def test_patience_counts_from_the_end_of_the_kernel():
    with world(2) as (cuda, (first, _), posted):
        first.call(SHARDS[2][0], peer_seconds=1e6)
        cuda.run()
        look(first.scatterer)
        look(first.scatterer)
        assert not first.state.broken
        assert not posted


def test_the_kernel_is_issued_before_what_waits_for_it():
    with world(2) as (_, (first, _), _):
        given = []
        for stream, name in ((first.calling, "calling"), (first.side, "side")):
            stream.give = lambda work, give=stream.give, name=name: (given.append(name), give(work))[1]
        first.call(SHARDS[2][0])
        # The side stream's first is its wait for the call's place on the calling stream; all else comes behind.
        own = [i for i, name in enumerate(given) if name == "side"]
        kernel = given.index("calling")
        assert own[1] > kernel + 3, given


def test_half_a_call_breaks_the_group_on_all_ranks(monkeypatch):
    with world(2) as (_, (first, second), _):
        monkeypatch.setattr(
            gpu_reduce_scatter, "stream_wait", lambda *args: (_ for _ in ()).throw(RuntimeError("no driver"))
        )
        with pytest.raises(RuntimeError, match="no driver"):
            first.call(SHARDS[2][0])
        monkeypatch.undo()
        with pytest.raises(GroupBroken, match="on rank 0: RuntimeError: no driver"):
            first.call(SHARDS[2][0])
        assert second.scatterer.flags.aborted()


def test_a_sum_that_is_not_issued_breaks_the_group_and_leaves_nothing_stuck():
    with world(2) as (cuda, (first, second), _):
        issue = first.scatterer.issue

        def without_sum(shards, dtype, received, product, add_up, seconds):
            issue(shards, dtype, received, product, lambda *args: (_ for _ in ()).throw(RuntimeError("no kernel")), 0.0)

        first.scatterer.issue = without_sum
        with pytest.raises(RuntimeError, match="no kernel"):
            first.call(SHARDS[2][0])
        cuda.run()
        assert not first.side.query(), "it waits for the second, which does not come"
        look(first.scatterer)
        cuda.run()
        assert first.side.query()
        assert first.calling.query()
        assert second.scatterer.flags.aborted()


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
@pytest.mark.parametrize(("batches", "parts"), [(1, 1), (1, 3), (2, 1), (3, 2)])
def test_each_step_has_one_chunk_to_send_and_one_to_pull(world_size, batches, parts):
    steps = range(batches * world_size * parts)
    for step in steps:
        for rank in range(world_size):
            source = protocol.sender(rank, world_size, parts, step)
            assert protocol.sent(source, world_size, batches, parts, step)[0] == rank
    for rank in range(world_size):
        sent = [protocol.sent(rank, world_size, batches, parts, step) for step in steps]
        assert len(set(sent)) == len(steps)
        assert [peer for peer, _ in sent[-parts:]] == [rank] * parts, "its own last"
        for step in steps:
            peer = sent[step][0]
            count = step // (world_size * parts) * parts + step % parts + 1
            assert count == sum(to == peer for to, _ in sent[: step + 1]), "how many were told"


def test_a_product_of_rows_that_no_view_has(monkeypatch):
    """As torch's compiler has what was gathered along a later dimension, and hands it on."""
    a = torch.arange(2 * 6 * 4.0).view(6, 2, 4).transpose(0, 1)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        a.view(12, 4)
    multiplied = []
    monkeypatch.setattr(reduce_scatter, "matmul_published", lambda rows, *_, **__: multiplied.append(rows))
    monkeypatch.setattr(
        gpu_reduce_scatter,
        "matmul_scatter",
        lambda state, plan, shards, a, travels, product, *_: product(None, None, 1, 1, 0),
    )
    shards = Shards.of((2, 3, 4), 1, 2, 1)
    request = Request(REDUCE_SCATTER, a, [None], [None], ["none"], None, [None])
    reduce_scatter._by_copy_engines(None, None, shards, request, torch.float32, 1.0)
    assert torch.equal(multiplied[0], a.reshape(12, 4))


def test_half_a_sum_that_waits_for_a_peer_is_let_go(monkeypatch):
    with world(2) as (cuda, (first, second), posted):
        monkeypatch.setattr(
            gpu_reduce_scatter, "copy_across", lambda *args: (_ for _ in ()).throw(RuntimeError("copy refused"))
        )
        with pytest.raises(RuntimeError, match="copy refused"):
            first.call(SHARDS[2][0], peer_seconds=1e6)
        cuda.run()
        assert not first.side.query(), "it is at the peer's flag"
        look(first.scatterer)
        cuda.run()
        assert first.side.query(), "at once: nobody sends anything any more"
        assert first.calling.query()
        assert "RuntimeError: copy refused" in str(posted.pop()), "not that it has waited for long enough"
        assert second.scatterer.flags.aborted()


def test_the_watchdog_sees_a_call_whose_sum_is_being_launched():
    """Where launches block, that one is behind the side stream: the host is in it until the peers come."""
    with world(2) as (cuda, (first, _), _):
        issue, seen = first.scatterer.issue, []

        def blocks(*args):
            cuda.run()
            assert not first.side.query(), "the peer is missing"
            look(first.scatterer)
            cuda.run()
            seen.append(first.side.query())

        def blocking(shards, dtype, received, product, add_up, seconds):
            issue(shards, dtype, received, product, blocks, seconds)

        first.scatterer.issue = blocking
        first.call(SHARDS[2][0])
        assert seen == [True]


def test_no_room_for_more_signals_is_found_before_the_call_is_counted(monkeypatch):
    with world(2) as (cuda, ranks, _):
        for rank in ranks:
            rank.scatterer._publication = Publication(1)
        refused_once(monkeypatch, cuda, ranks, SHARDS[2][0], "scatterer", "make_publication")


def test_a_bias_of_any_strides_is_read_as_it_is(monkeypatch):
    read = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda whole, received, out, bias, *args, **kwargs: read.append((bias, kwargs["BIAS"]))

    monkeypatch.setattr(add, "add_parts", Kernel())
    monkeypatch.setattr(gpu_reduce_scatter, "agree", lambda *args: None)
    shards = SHARDS[2][0]
    for bias in (torch.arange(4.0)[::2], torch.arange(4.0).view(2, 2)[:, 1], torch.ones(1).expand(2)):
        with world(2) as (cuda, (first, _), _), cuda.on(first.calling):
            first.state.queue = lambda kind, device: first.scatterer
            first.state.buffer = lambda name, shape, dtype, device: torch.empty(shape, dtype=dtype)
            gpu_reduce_scatter.matmul_scatter(
                first.state, None, shards, torch.empty(0), torch.float32, lambda *args: None, False, bias, 0.0
            )
        given, has = read.pop()
        assert has
        assert given.is_contiguous()
        assert given.equal(bias)
