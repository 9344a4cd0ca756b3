"""Calls that CUDA graphs may hold, on fake GPUs: eager calls and replays in any order, late ranks, expiries."""

from __future__ import annotations

import contextlib
import gc
import itertools
import types
import weakref

import pytest
import torch
from fake_graph_ranks import KINDS, capture, graph_world
from hypothesis import given, settings
from hypothesis import strategies as st
from replaying import check, in_any_order, prepared, with_expiries

from tilestream.core.errors import ArrivalTimeout, GroupBroken
from tilestream.core.protocols import replay
from tilestream.distributed import graph_calls
from tilestream.distributed.graph_calls import GraphAllReduce, GraphGather, GraphScatter
from tilestream.distributed.shards import ScaledRows, Shards

SHARDS = {
    GraphGather: {2: Shards(2, 2, 3, 2, parts=2), 3: Shards(1, 3, 3, 2, parts=2)},
    GraphScatter: {2: Shards(1, 2, 3, 2), 3: Shards(1, 3, 3, 2)},
    GraphAllReduce: {2: Shards(1, 2, 3, 2), 3: Shards(1, 3, 3, 2)},
}


#: As far as a call of a queue's uses it.
def test_a_gather_whose_arrival_is_dropped_is_prepared_again(monkeypatch):
    """Its next eager call makes the arrival, which a capture cannot."""
    queue, unprepared = object.__new__(graph_calls.GraphGather), []
    queue._arrivals, queue._made = {}, lambda shards: object()
    queue._state = lambda: types.SimpleNamespace(unprepare=lambda: unprepared.append(1))
    monkeypatch.setattr(graph_calls, "_MOST_SHARDS", 2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for shards in "aabab":
        queue.arrival(shards)
    assert not unprepared
    queue.arrival("c")
    assert (list(queue._arrivals), unprepared) == (["c"], [1])


PLAN = types.SimpleNamespace(number=5, handshake=b"a call")


@contextlib.contextmanager
def no_graph(cuda):
    """A capture of which the driver makes no graph."""
    with pytest.raises(RuntimeError, match="previous error during capture"), capture(cuda):
        yield


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), size=st.sampled_from((2, 3)))
@settings(max_examples=25)
def test_each_call_is_of_its_own_rows_whichever_ranks_replay_it(kind, data, size):
    with graph_world(size, kind, SHARDS[kind][size]) as (cuda, ranks):
        in_any_order(data, cuda, ranks, 6)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), size=st.sampled_from((2, 3)))
@settings(max_examples=40)
def test_expiries_in_replays_yield_no_wrong_number_and_no_deadlock(kind, data, size):
    with graph_world(size, kind, SHARDS[kind][size]) as (cuda, ranks):
        with_expiries(data, cuda, ranks, 60)


@pytest.mark.parametrize("kind", KINDS)
def test_a_late_peer_is_waited_for_and_a_lost_one_breaks_every_rank(kind):
    with graph_world(3, kind, SHARDS[kind][3]) as (cuda, ranks):
        prepared(cuda, ranks)
        *others, late = ranks
        for rank in others:
            rank.next(True)
            rank.next(True)
        cuda.run()
        assert [len(rank.results) for rank in ranks] == [1, 1, 1], "they wait for the last rank's rows"
        late.next(True)
        late.next(False)
        cuda.run()
        for rank in ranks:
            check(rank, 3)
            assert len(rank.results) == 3
        for rank in others:  # now it does not come
            rank.next(True)
        cuda.run()
        first = others[0]
        first.gpu.impatient = True
        cuda.run()
        assert first.results[-1].isnan().all()
        with pytest.raises(ArrivalTimeout, match="rank 2's part of"):
            first.gpu.channel.check()
        assert first.state.broken
        with pytest.raises(GroupBroken):
            first.next(False)
        late.next(True)  # a broken group computes nothing
        cuda.run()
        assert late.results[-1].isnan().all()
        with pytest.raises(GroupBroken):
            late.gpu.channel.check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eager", [False, True])
def test_ranks_that_replay_calls_of_another_form_are_told_and_get_no_number(kind, eager):
    """Two graphs, replayed in another order on another rank: the calls' numbers are the same."""
    with graph_world(3, kind, SHARDS[kind][3]) as (cuda, ranks):
        prepared(cuda, ranks)
        last = ranks[-1]
        last.form = 6
        if not eager:
            last.capture()
        for rank in ranks:
            rank.next(not (eager and rank is last))
        cuda.run()
        for rank in ranks:
            assert rank.results[-1].isnan().all()
            with pytest.raises(GroupBroken, match="or made another call"):
                rank.gpu.channel.check()
            with pytest.raises(GroupBroken):
                rank.next(False)


def test_stamps_tell_calls_and_forms_apart():
    forms = [replay.form_number(x) for x in (b"", b"[64, 256]", b"[128, 256]")]
    assert all(0 <= form < 2**31 for form in forms)
    marks = {replay.stamp(call, form) for call, form in itertools.product(range(1000), forms)}
    assert len(marks) == 3000
    assert all(-(2**31) <= replay.stamp(-(2**31) + i, form) < 2**31 for i, form in enumerate(forms))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_may_capture_in_another_order_what_they_replay_in_one(kind):
    with graph_world(2, kind, SHARDS[kind][2]) as (cuda, ranks):
        prepared(cuda, ranks)
        graphs = {}
        for rank, forms in zip(ranks, ((5, 6), (6, 5)), strict=True):
            for rank.form in forms:
                rank.capture()
                graphs[rank, rank.form] = rank.graph, rank.out
        for form in (6, 5, 5, 6):
            for rank in ranks:
                rank.graph, rank.out = graphs[rank, form]
                rank.next(True)
            cuda.run()
        for rank in ranks:
            check(rank)
            assert len(rank.results) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_groups_failure_is_raised_once_however_many_replays_report_it(kind):
    """Else the next calls of any op on the device would raise it, one for each report."""
    with graph_world(2, kind, SHARDS[kind][2]) as (cuda, ranks):
        prepared(cuda, ranks)
        first, _ = ranks
        first.next(True)
        cuda.run()
        first.gpu.impatient = True
        cuda.run()
        with pytest.raises(ArrivalTimeout):
            first.gpu.channel.check()
        first.gpu.channel.check()
        for _ in range(2):
            for _ in range(10):
                first.next(True)
            cuda.run()
            assert all(result.isnan().all() for result in first.results[1:])
            with pytest.raises(GroupBroken):
                first.gpu.channel.check()
            first.gpu.channel.check()


def test_a_replay_needs_no_host():
    """It is work of streams alone: what its queue and its group keep may be gone."""
    with graph_world(2, GraphGather, SHARDS[GraphGather][2]) as (cuda, ranks):
        prepared(cuda, ranks)
        for rank in ranks:
            rank.queue.gather = rank.queue.run = rank.state = None
        for _, rank in itertools.product(range(3), ranks):
            rank.next(True)
        cuda.run()
        for rank in ranks:
            assert len(rank.results) == 4
            check(rank)


def test_calls_of_one_capture_come_one_behind_another_from_any_stream():
    with graph_world(2, GraphAllReduce, SHARDS[GraphAllReduce][2]) as (cuda, ranks):
        for rank in ranks:
            rank.next(False)
        cuda.run()
        others = [cuda.stream() for _ in ranks]
        for rank, other in zip(ranks, others, strict=True):
            with capture(cuda) as rank.graph:
                first = rank.calling
                rank.call()
                rank.calling = other
                rank.out = rank.call()
                rank.calling = first
            waits = [work for stream, work in rank.graph.work if stream is other and isinstance(work, tuple)]
            assert waits[0][0] is first, "behind the first call"


def test_a_shape_that_was_not_called_is_not_captured():
    with graph_world(2, GraphGather, SHARDS[GraphGather][2]) as (_, ranks):
        with pytest.raises(RuntimeError, match="call it once with these shapes before the capture"):
            ranks[0].capture()
        assert not ranks[0].state.broken


@pytest.mark.parametrize("kind", KINDS)
def test_a_shape_that_fills_the_slots_is_captured_in_them(kind):
    with graph_world(2, kind, SHARDS[kind][2]) as (cuda, ranks):
        prepared(cuda, ranks)
        queue = ranks[0].queue
        size = queue.memory.slot_bytes
        with cuda.on(ranks[0].calling), ranks[0].here(), capture(cuda):
            assert not queue.reserve(size)
            with pytest.raises(RuntimeError, match="call it once with these shapes before the capture"):
                queue.reserve(size + 1)


def test_new_slots_leave_a_captured_graph_its_own():
    with graph_world(2, GraphGather, SHARDS[GraphGather][2]) as (cuda, ranks):
        prepared(cuda, ranks)
        for rank in ranks:
            with cuda.on(rank.calling), rank.here():
                assert rank.queue.reserve(10 * rank.queue.memory.slot_bytes)
        for rank in ranks:
            rank.next(False)  # in the new slots
        cuda.run()
        for rank in ranks:
            rank.next(True)  # in the old ones
        cuda.run()
        for rank in ranks:
            check(rank)
            assert len(rank.results) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_capture_uses_is_kept_for_ever(kind):
    """As `replay.prepare` has it: neither its graph's end nor larger slots free what peers may write to."""
    with graph_world(2, kind, SHARDS[kind][2]) as (cuda, ranks):
        for rank in ranks:
            rank.next(False)
        cuda.run()
        assert not graph_calls._captured, "an eager call keeps nothing for ever"
        rank = ranks[0]
        rank.capture()
        kept = [one for one in graph_calls._captured if isinstance(one, tuple)]
        assert kept[0][0] is rank.queue._words
        assert kept[0][1][0] is rank.queue.memory._slots
        slots, words = weakref.ref(rank.queue.memory._slots[0]), weakref.ref(rank.queue._words.control)
        with cuda.on(rank.calling), rank.here():
            rank.queue.reserve(10 * rank.queue.memory.slot_bytes)
        rank.graph = rank.out = None
        rank.queue.memory._memory.made.clear()  # the peers' mappings, and the maker of slots
        del kept
        gc.collect()
        assert slots() is not None
        assert words() is not None


def test_a_call_that_fails_while_it_is_issued_breaks_the_group():
    with graph_world(2, GraphScatter, SHARDS[GraphScatter][2]) as (cuda, ranks):
        prepared(cuda, ranks)
        first, second = ranks

        def product(rank, into):
            raise MemoryError("no room")

        with pytest.raises(MemoryError), cuda.on(first.calling), first.here():
            first.queue.reduce(torch.empty(3, 2), torch.empty(2, 3, 2), product, None, 1.0, 1.0, 5)
        assert first.state.broken
        with pytest.raises(GroupBroken):
            second.next(False)  # told by the host's flag


def test_a_capture_that_fails_says_why_and_leaves_the_group_whole(monkeypatch):
    """A capture that is lost takes no event any more."""
    with graph_world(2, GraphScatter, SHARDS[GraphScatter][2]) as (cuda, ranks):
        prepared(cuda, ranks)
        first = ranks[0]

        def product(rank, into):
            lost.setattr(torch.cuda.Event, "record", refuse)
            raise MemoryError("no room")

        def refuse(*_):
            raise RuntimeError("the capture is lost")

        with monkeypatch.context() as lost, no_graph(cuda), cuda.on(first.calling), first.here():
            with pytest.raises(MemoryError, match="no room"):
                first.queue.reduce(torch.empty(3, 2), torch.empty(2, 3, 2), product, None, 1.0, 1.0, 5)
            lost.undo()
        assert not first.state.broken
        for replays in (False, True):
            for rank in ranks:
                rank.next(replays)
            cuda.run()
        for rank in ranks:
            check(rank)
            assert len(rank.results) == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["begin_call", "await_parts", "end_call", "void_out"])
def test_a_capture_with_a_part_of_a_call_makes_no_graph(kind, name, monkeypatch):
    """Though its user has caught the error: replays would leave signals that the next call takes for its own."""
    with graph_world(2, kind, SHARDS[kind][2]) as (cuda, ranks):
        prepared(cuda, ranks)
        first = ranks[0]

        def fail(*_):
            raise MemoryError("no room")

        if kind is GraphGather and name == "await_parts":
            pytest.skip("a gather's matmul waits")
        if kind is not GraphGather and name == "void_out":
            pytest.skip("a sum has one result, of which its last kernel makes NaN")
        first.gives_rows = name == "void_out"
        before, whole = first.graph, getattr(first.gpu, name)
        monkeypatch.setattr(first.gpu, name, fail)
        with no_graph(cuda), pytest.raises(MemoryError, match="no room"):
            first.call()
        monkeypatch.setattr(first.gpu, name, whole)
        first.gives_rows = False
        assert not first.state.broken
        assert first.graph is before
        for rank in ranks:
            rank.next(True)
        cuda.run()
        for rank in ranks:
            check(rank)
            assert len(rank.results) == 2


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("void", [False, True])
def test_a_gather_of_several_products_scales_and_rows(strided, scaled, void):
    """The first product waits; the others come behind it. All read the ranks' rows, and so does the caller.

    ``void``: the ranks' calls are of two forms, which the marks show when all rows have been read.
    """
    shards = SHARDS[GraphGather][2]
    with graph_world(2, GraphGather, shards) as (cuda, ranks):
        found = {}
        for rank in ranks:
            rows = torch.full((shards.batches, shards.rows, 2 * shards.width), 5.0 + rank.rank)
            mine = rows[..., ::2] if strided else rows[..., : shards.width].contiguous()
            scales = torch.full((shards.batches, shards.rows, 1), 0.5 + rank.rank) if scaled else None
            rank._kept += mine, scales

            def product(a, scale_a, arrival, deadline, rank=rank):
                out = torch.empty_like(a)
                if arrival is not None:
                    rank.await_rows(a.view(shards.shape), arrival, out.view(shards.shape))
                else:
                    rank.cuda.current.give(lambda: out.copy_(a))
                if scale_a is not None:
                    rank.cuda.current.give(lambda: out.mul_(scale_a))
                return out

            with cuda.on(rank.calling), rank.here():
                plan = types.SimpleNamespace(**{**vars(PLAN), "number": PLAN.number + void * rank.rank})
                found[rank] = graph_calls.gather_matmul(
                    rank.state, plan, shards, ScaledRows(mine, scales), [product] * 3, 1.0, True
                )
        cuda.run()
        expected = torch.empty(shards.shape)
        for rank in ranks:
            expected[:, rank.rank] = 5.0 + rank.rank
        factor = expected - 4.5 if scaled else torch.ones(())
        for rows, outs in found.values():
            assert len(outs) == 3
            if void:
                assert all(one.isnan().all() for one in (rows, *outs))
                continue
            assert rows.equal(expected)
            assert all(out.view(shards.shape).equal(expected * factor) for out in outs)


@pytest.mark.parametrize("scaled", ["", "one", "rows"])
@pytest.mark.parametrize("op", ["scatter", "reduce"])
def test_sums_are_of_what_the_request_says(op, scaled):
    world, batches, rows, k, n = 2, 2, 3, 4, 5
    shards = Shards(batches, world, rows, n)
    kind = GraphScatter if op == "scatter" else GraphAllReduce
    with graph_world(world, kind, Shards(1, world, batches * rows * world, n)) as (cuda, ranks):
        bias, b = torch.randn(n), [torch.randn(k, n) for _ in ranks]
        a = [torch.randn(batches, world, rows, k) for _ in ranks]
        whole = (batches * world * rows, 1)
        scales = [{"": None, "one": torch.tensor(2.0), "rows": torch.rand(whole)}[scaled] for _ in ranks]
        outs = []
        for rank in ranks:

            def product(x, rank=rank, bias=None, out_dtype=None, out=None, scale_a=scales[rank.rank]):
                found = x @ b[rank.rank]
                if scale_a is not None:
                    found = found * (scale_a.view(*x.shape[:-1], 1) if scale_a.numel() > 1 else scale_a)
                rank.cuda.current.give(lambda: out.copy_(found))

            given = types.SimpleNamespace(
                a=a[rank.rank], b=b[rank.rank], bias=bias, scale_a=scales[rank.rank], divisor=lambda world: 2.0,
                product=product, seconds=lambda state: 1.0,
            )  # fmt: skip
            with cuda.on(rank.calling), rank.here():
                if op == "scatter":
                    outs.append(
                        graph_calls.matmul_scatter(rank.state, PLAN, shards, given, a[rank.rank], torch.float32, 1.0)
                    )
                else:
                    outs.append(graph_calls.matmul_reduce(rank.state, PLAN, given, torch.float32))
        cuda.run()
        products = [
            (x @ w) * (1.0 if scale is None else scale.view(*x.shape[:-1], 1) if scale.numel() > 1 else scale)
            for x, w, scale in zip(a, b, scales, strict=True)
        ]
        total = (products[0] + products[1]) / 2.0
        for rank, out in zip(ranks, outs, strict=True):
            part = total[:, rank.rank].reshape(batches * rows, n) if op == "scatter" else total
            torch.testing.assert_close(out, part + bias)
