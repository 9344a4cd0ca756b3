"""What reduce-scatters and all-reduces issue on GPUs, on fake ones: ranks in one process, streams run in any order."""

from __future__ import annotations

import contextlib
import ctypes
import types
from typing import ClassVar

import pytest
import torch
from fake_ranks import (
    Memory,
    Rank,
    call_again_after_memory_error,
    call_in_any_order,
    check_results,
    patch_driver,
    raises,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_cuda import fake_cuda
from tilestream.core.errors import ArrivalTimeout, GroupBroken
from tilestream.core.protocols import reduce_scatter as protocol
from tilestream.distributed import call_queue, gpu_reduce_scatter, one_shot, reduce_scatter
from tilestream.distributed.gpu_reduce_scatter import ReduceScatterQueue
from tilestream.distributed.one_shot import AllReduceQueue
from tilestream.distributed.request import REDUCE_SCATTER, Request
from tilestream.distributed.shards import Shards
from tilestream.launch.portable import add
from tilestream.runtime import driver

#: Patience that does not end in a test.
LONG = 1e6


class Publication:
    """As `tilestream.ops.publish.Publication`, in the CPU's memory."""

    def __init__(self, chunks: int) -> None:
        self.chunks, self.words = chunks, torch.zeros(chunks, dtype=torch.int32)

    def address(self, chunk: int) -> int:
        return self.words.data_ptr() + 4 * chunk


class SumRank(Rank):
    """A rank whose calls add up products."""

    def between(self, what: str) -> None:
        """Its host launches a kernel, or the sum."""

    def expected(self, call: int) -> torch.Tensor:
        return torch.stack([self.part(r, call) for r in range(self.world)]).sum(0)

    def add(self, number: int, parts: list[torch.Tensor], void: torch.Tensor, epoch: int) -> None:
        self.results[number] = None if 0 < int(void) <= epoch else torch.stack(parts).sum(0)


class ScatterRank(SumRank):
    """A rank of reduce-scatters, on `Shards`."""

    class kind(ReduceScatterQueue):  # noqa: N801
        def make_publication(self, chunks: int) -> Publication:
            return Publication(chunks)

    refusing, sum_waits_for, op = "make_publication", "side", "matmul_reduce_scatter"
    received: torch.Tensor | None = None
    shapes_of: ClassVar = {
        2: (Shards(1, 2, 3, 2), Shards(1, 2, 4, 1, parts=2), Shards(3, 2, 2, 1)),
        3: (Shards(1, 3, 2, 2), Shards(1, 3, 4, 1, parts=2), Shards(2, 3, 2, 1, parts=2)),
    }

    def product(self, rank: int, call: int) -> torch.Tensor:
        """What ``rank`` computes in a call: no two rows are equal."""
        shards = self.shapes[call - 1]
        rows = torch.arange(shards.total, dtype=torch.float32).view(*shards.shape[:-1], 1)
        return (rows + 1000.0 * rank + 10000.0 * call).expand(shards.shape).contiguous()

    def part(self, rank: int, call: int) -> torch.Tensor:
        return self.product(rank, call)[:, self.rank]

    def call(self, shards: Shards, seconds: float = 0.0, reduce_partials=None) -> None:
        """Issue the next call; ``reduce_partials`` in place of the sum."""
        calling = self.calling
        self.shapes.append(shards)
        number = len(self.shapes)

        def kernel(out, publication, epoch, rows_per_chunk, pivot):
            self.between("kernel")
            assert pivot // shards.parts % shards.world == (self.rank + 1) % shards.world, "the next rank's rows first"
            values = self.product(self.rank, number).view(shards.total, shards.width)
            chunks = shards.total // rows_per_chunk
            for i in range(chunks):
                chunk = (pivot + i) % chunks
                at = slice(chunk * rows_per_chunk, (chunk + 1) * rows_per_chunk)
                calling.give(lambda at=at: out.__setitem__(at, values[at]))
                calling.give(lambda chunk=chunk: publication.words.__setitem__(chunk, epoch))

        def issue_sum(whole, void, epoch):
            self.between("sum")
            parts = [whole[:, r] if r == self.rank else received[r] for r in range(self.world)]
            calling.give(lambda: self.add(number, parts, void, epoch))

        shape = (self.world, shards.batches, shards.rows, shards.width)
        if self.received is None or self.received.shape != shape:  # one buffer for all calls, as a group's state has it
            self.received = torch.full(shape, float("nan"))
        received = self.received
        with self.cuda.on(calling):
            self.queue.issue(shards, torch.float32, received, kernel, reduce_partials or issue_sum, seconds)

    def matmul(self, bias: torch.Tensor) -> None:
        """A whole call, with a bias of two elements."""
        self.state.buffer = lambda name, shape, dtype, device: torch.empty(shape, dtype=dtype)
        request = Request(REDUCE_SCATTER, torch.empty(0), [None], [bias], ["none"], None, [None])
        shards = Shards(1, 2, 3, 2)
        gpu_reduce_scatter.matmul_scatter(self.state, None, shards, request, torch.float32, lambda *_: None, 0.0)


class AllReduceRank(SumRank):
    """A rank of all-reduces, on shapes of partial sums."""

    kind = AllReduceQueue
    refusing, sum_waits_for, op = "_slots", "calling", "matmul_all_reduce"
    shapes_of: ClassVar = dict.fromkeys((2, 3), ((1, 8), (3, 4), (5, 2)))

    def part(self, rank: int, call: int) -> torch.Tensor:
        rows, columns = self.shapes[call - 1]
        return torch.arange(rows * columns).view(rows, columns) + 1000.0 * rank + 10000.0 * call

    def call(self, shape: tuple[int, int], seconds: float = 0.0, reduce_partials=None) -> None:
        """Issue the next call; ``reduce_partials`` in place of the sum."""
        calling = self.calling
        self.shapes.append(shape)
        number = len(self.shapes)

        def multiply(out):
            self.between("kernel")
            calling.give(lambda: out.fill_(float("nan")))  # it is being written
            calling.give(lambda: out.copy_(self.part(self.rank, number)))

        def issue_sum(addresses, void, epoch):
            self.between("sum")
            parts: list[torch.Tensor] = []

            def read(at: int) -> None:
                memory = (ctypes.c_float * (shape[0] * shape[1])).from_address(at)
                parts.append(torch.tensor(memory[:]).view(shape))

            for at in addresses.tolist():
                calling.give(lambda at=at: read(at))
            calling.give(lambda: self.add(number, parts, void, epoch))

        with self.cuda.on(calling):
            self.queue.reduce(shape, torch.float32, multiply, reduce_partials or issue_sum, seconds)

    def matmul(self, bias: torch.Tensor) -> None:
        """A whole call, with a bias of two elements."""
        request = types.SimpleNamespace(
            a=torch.empty(4, 3), b=torch.empty(3, 2), bias=bias, seconds=lambda state: 0.0, divisor=float,
            product=lambda *_, **__: None,
        )  # fmt: skip
        one_shot.matmul_reduce(self.state, None, request, torch.float32)


@contextlib.contextmanager
def world(kind: type[SumRank], ranks: int, streams: int = 1):
    """The device, the ranks, and what they post to be raised."""
    with fake_cuda() as cuda, pytest.MonkeyPatch.context() as patch:
        cuda.clock = patch_driver(cuda, patch)
        posted: list[BaseException] = []
        patch.setattr(gpu_reduce_scatter, "channel", lambda device: types.SimpleNamespace(post=posted.append))
        memory = Memory(ranks, 4 * 64)
        yield cuda, [kind(cuda, memory, rank, streams) for rank in range(ranks)], posted


both = pytest.mark.parametrize("kind", [ScatterRank, AllReduceRank])


@both
@given(data=st.data(), ranks=st.sampled_from((2, 3)), streams=st.sampled_from((1, 2)))
@settings(max_examples=50)
def test_every_sum_is_of_its_own_epoch_in_any_order_of_streams(kind, data, ranks, streams):
    with world(kind, ranks, streams) as (cuda, all_ranks, posted):
        calls = data.draw(st.lists(st.sampled_from(kind.shapes_of[ranks]), min_size=5, max_size=5))
        call_in_any_order(data, cuda, all_ranks, calls)
        assert not posted


@both
@given(data=st.data(), ranks=st.sampled_from((2, 3)))
@settings(max_examples=50)
def test_expiries_at_any_time_yield_no_wrong_number_and_no_deadlock(kind, data, ranks):
    with world(kind, ranks) as (cuda, all_ranks, _):
        shape = data.draw(st.sampled_from(kind.shapes_of[ranks]))
        for _ in range(data.draw(st.integers(5, 80))):
            rank = data.draw(st.sampled_from(all_ranks))
            what = data.draw(st.integers(0, 9))
            if what <= 1 and rank.room():
                rank.call(shape)
            elif what == 2:
                rank.watch()  # its peers' time is over at once
            else:
                rank.run(data, 6)
        for _ in range(8):
            cuda.run()
            for rank in all_ranks:
                rank.watch()
        for rank in all_ranks:
            assert rank.idle, "stuck"
            for call in range(1, len(rank.shapes) + 1):
                result = rank.results[call]
                assert result is None or result.equal(rank.expected(call)), (rank.rank, call)
        if any(rank.state.broken for rank in all_ranks):
            assert all(rank.state.broken or rank.queue.flags.aborted() for rank in all_ranks), "all are aborted"


@both
def test_an_expiry_names_the_missing_rank_and_peers_are_aborted(kind):
    with world(kind, 3) as (cuda, (first, second, third), posted):
        for rank in (first, second):
            rank.call(kind.shapes_of[3][0])
            cuda.run()
        assert not first.idle, "the third is missing"
        first.watch()
        cuda.run()
        assert first.results == {1: None}
        error = posted.pop()
        assert isinstance(error, ArrivalTimeout)
        assert error.rank == 0
        assert "rank 2's part of the sum's chunk 0 did not arrive" in str(error)
        with pytest.raises(GroupBroken, match=f"{kind.op}: rank 0 has given up waiting for a peer"):
            first.call(kind.shapes_of[3][0])
        second.queue.poll()
        cuda.run()
        assert second.results == {1: None}
        assert isinstance(posted.pop(), GroupBroken)
        assert third.queue.flags.aborted()


@both
def test_the_peers_time_counts_from_the_end_of_the_kernel(kind):
    with world(kind, 2) as (cuda, (first, _), posted):
        first.call(kind.shapes_of[2][0], 10.0)
        first.watch()  # the kernel has not begun
        cuda.clock.now = 100.0
        first.watch()
        cuda.run()
        first.watch()
        cuda.clock.now = 109.0
        first.watch()
        assert not first.state.broken
        assert not posted
        cuda.clock.now = 111.0
        first.watch()
        assert first.state.broken


@pytest.mark.parametrize(
    ("kind", "what", "waits"),  # whether it waits for a peer, behind the first operation of this kind
    [
        (ScatterRank, "stream_write", True), (ScatterRank, "stream_wait", False), (ScatterRank, "copy_across", True),
        (AllReduceRank, "stream_write", False), (AllReduceRank, "stream_wait", True),
    ],
)  # fmt: skip
def test_a_call_that_is_half_issued_breaks_the_group_and_leaves_nothing_stuck(monkeypatch, kind, what, waits):
    with world(kind, 3) as (cuda, (first, second, third), posted):
        original, calls = getattr(driver, what), []

        def second_fails(*args) -> None:
            calls.append(args)
            if len(calls) > 1:
                raise RuntimeError("no driver")
            original(*args)

        with monkeypatch.context() as patch:
            patch.setattr(driver, what, second_fails)
            with pytest.raises(RuntimeError, match="no driver"):
                first.call(kind.shapes_of[3][0], LONG)
        with pytest.raises(GroupBroken, match="on rank 0: SequenceError: no driver"):
            first.call(kind.shapes_of[3][0])
        assert second.queue.flags.aborted()
        assert third.queue.flags.aborted()
        cuda.run()
        assert first.idle != waits, "it waits for a peer's flag"
        first.watch()
        cuda.run()
        assert first.idle, "at once: a peer of a broken group sends nothing"
        assert not waits or "SequenceError: no driver" in str(posted.pop()), "not that the peers' time is over"


@both
def test_a_sum_that_is_not_issued_breaks_the_group_and_leaves_nothing_stuck(kind):
    with world(kind, 2) as (cuda, (first, second), _):
        with pytest.raises(RuntimeError, match="no kernel"):
            first.call(kind.shapes_of[2][0], reduce_partials=raises(RuntimeError("no kernel")))
        cuda.run()
        assert not first.idle, "it waits for the second, which does not come"
        first.watch()
        cuda.run()
        assert first.idle
        assert second.queue.flags.aborted()


@both
def test_the_watchdog_sees_a_call_whose_sum_is_being_launched(kind):
    """A blocking launch waits for the peers, and the host with it."""
    with world(kind, 2) as (cuda, (first, _), _):
        seen = []

        def blocks(*args) -> None:
            stream = getattr(first, kind.sum_waits_for)
            cuda.run()
            assert not stream.query(), "the peer is missing"
            first.watch()
            cuda.run()
            seen.append(stream.query())

        first.call(kind.shapes_of[2][0], reduce_partials=blocks)
        assert seen == [True]


class WaitsForPeer:
    """As a `NativeProgram` that repeats a rank's call: its kernel ends, and the rest waits for the next rank's flag."""

    progress = None

    def __init__(self, rank: SumRank) -> None:
        self._rank = rank

    def issue(self, device: int, stream: int, epoch: int, *values: int) -> bool:
        rank, events = self._rank, self._rank.queue.events(epoch)
        waits = getattr(rank, rank.sum_waits_for)
        events.kernel.record(rank.calling)
        flag = rank.queue.flags.flag(rank.rank, (rank.rank + 1) % rank.world)
        driver.stream_wait(waits.cuda_stream, flag, epoch)
        events.side.record(waits)
        events.end.record(waits)
        return True


@both
def test_the_watchdog_bounds_the_wait_of_a_repeated_call(kind):
    with world(kind, 2) as (cuda, (first, second), _):
        received = torch.empty(2, 1, 3, 2) if kind is ScatterRank else None
        with cuda.on(first.calling):
            assert first.queue.repeat(WaitsForPeer(first), 0, 0, 1, received, (), 10.0)
        cuda.run()
        first.watch()
        cuda.clock.now = 9.0
        first.watch()
        assert not first.idle, "the second does not come"
        assert not first.state.broken, "it has 10 seconds"
        cuda.clock.now = 11.0
        first.watch()
        cuda.run()
        assert first.idle
        assert second.queue.flags.aborted()


@both
def test_a_memory_error_is_raised_before_the_call_is_counted(kind):
    with world(kind, 2) as (cuda, ranks, _):
        for rank in ranks:
            rank.queue._publication = Publication(1)
        call_again_after_memory_error(cuda, ranks, kind.shapes_of[2][0], kind.refusing)


@both
def test_a_bias_of_any_strides_is_made_contiguous(monkeypatch, kind):
    """A column, every other element, or one number that is expanded: the kernel takes no strides."""
    read = []

    class Kernel:
        def take(self, values):
            return values

        def __call__(self, stream, filled):
            read.append((filled[3 if kind is ScatterRank else 2], filled[-2]))

    monkeypatch.setattr(add, "_kernel", lambda *_: Kernel())
    monkeypatch.setattr(call_queue, "agree", lambda *args: None)
    whole = torch.arange(4.0)
    for bias in (whole[::2], whole.view(2, 2)[:, 1], whole[1:2].expand(2), whole[:2]):
        with world(kind, 2) as (cuda, (first, _), _), cuda.on(first.calling):
            first.state.queue = lambda kind, device, first=first: first.queue
            first.matmul(bias)
        given, has = read.pop()
        assert has
        assert given.is_contiguous()
        assert given.equal(bias)
    assert given.data_ptr() == whole.data_ptr(), "a contiguous one is not copied"


def test_an_all_reduce_reads_the_slots_that_have_grown():
    with world(AllReduceRank, 2) as (cuda, ranks, _):
        for shape in ((1, 8), (16, 32), (3, 4)):
            for rank in ranks:
                rank.queue.reserve(4 * shape[0] * shape[1])
                rank.call(shape)
            cuda.run()
        check_results(ranks, 1, 2, 3)


def test_the_kernel_is_issued_before_the_side_stream_waits_for_it():
    with world(ScatterRank, 2) as (_, (first, _), _):
        given = []
        for stream, name in ((first.calling, "calling"), (first.side, "side")):
            stream.give = lambda work, give=stream.give, name=name: (given.append(name), give(work))[1]
        first.call(ScatterRank.shapes_of[2][0])
        # The side stream first waits for the calling stream to reach the call; the rest comes behind the kernel.
        own = [i for i, name in enumerate(given) if name == "side"]
        kernel = given.index("calling")
        assert own[1] > kernel + 3, given


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
            assert count == sum(to == peer for to, _ in sent[: step + 1]), "how many were signalled"


def test_rows_that_no_view_has_are_copied(monkeypatch):
    """As torch's compiler has what was gathered along a later dimension."""
    a = torch.arange(2 * 6 * 4.0).view(6, 2, 4).transpose(0, 1)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        a.view(12, 4)
    multiplied = []
    monkeypatch.setattr(reduce_scatter, "matmul_published", lambda rows, *_, **__: multiplied.append(rows))
    monkeypatch.setattr(
        gpu_reduce_scatter, "matmul_scatter",
        lambda state, plan, shards, a, dtype, product, *_: product(None, None, 1, 1, 0),
    )  # fmt: skip
    request = Request(REDUCE_SCATTER, a, [None], [None], ["none"], None, [None])
    reduce_scatter._by_copy_engines(None, None, Shards.of((2, 3, 4), 1, 2, 1), request, torch.float32, 1.0)
    assert torch.equal(multiplied[0], a.reshape(12, 4))
