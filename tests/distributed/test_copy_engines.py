"""What a gather issues on GPUs, on fake ones: two or three ranks in one process, their streams run in any order."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import weakref

import pytest
import torch
from fake_gather_ranks import report, world
from fake_ranks import call_all, call_in_any_order, check_results, raises
from hypothesis import given, settings
from hypothesis import strategies as st

import tilestream.arrival.device
import tilestream.arrival.device_words
from fake_cuda import DEVICE, fake_cuda
from tilestream.core.errors import ArrivalTimeout, GroupBroken
from tilestream.core.protocols import gather
from tilestream.distributed import call_queue, copy_engines, dispatch, slots
from tilestream.distributed.shards import Shards
from tilestream.runtime import driver

#: For each world, shapes in which a chunk's number belongs to different ranks.
SHARDS = {
    2: (Shards(1, 2, 3, 2), Shards(1, 2, 3, 2, parts=2), Shards(2, 2, 3, 1)),
    3: (Shards(1, 3, 3, 2, parts=2), Shards(1, 3, 2, 2), Shards(2, 3, 3, 1)),
}
PAIR = SHARDS[2][0]
#: The ways of consecutive calls' shards, repeated.
WAYS = st.lists(st.sampled_from(dispatch.WAYS), min_size=1, max_size=3)
HOW = st.fixed_dictionaries({"strided": st.booleans(), "ways": WAYS, "local": st.booleans()})


@given(data=st.data(), size=st.sampled_from((2, 3)))
@settings(max_examples=60)
def test_every_call_reads_its_own_epoch_in_any_order_of_streams(data, size):
    with world(size) as (cuda, ranks):
        calls = data.draw(st.lists(st.sampled_from(SHARDS[size]), min_size=6, max_size=6))
        call_in_any_order(data, cuda, ranks, calls, **data.draw(HOW))


@given(data=st.data(), size=st.sampled_from((2, 3)))
@settings(max_examples=60)
def test_expiries_at_any_time_yield_no_wrong_number_and_no_deadlock(data, size):
    with world(size) as (cuda, ranks):
        how = data.draw(HOW)
        shapes = data.draw(st.lists(st.sampled_from(SHARDS[size]), min_size=1, max_size=4))
        for _ in range(data.draw(st.integers(5, 80))):
            rank = data.draw(st.sampled_from(ranks))
            what = data.draw(st.integers(0, 9))
            if what <= 1 and rank.room():
                with contextlib.suppress(GroupBroken):  # found by the host before it issues
                    rank.call(shapes[len(rank.shapes) % len(shapes)], **how)
            elif what == 2 and rank.shapes:
                rank.over.add(data.draw(st.integers(1, len(rank.shapes))))  # expires if it still waits
            elif what == 3:
                rank.watch()
            else:
                rank.run(data, 4)
        for rank in ranks:  # finally every deadline passes, and every watchdog polls
            rank.over.update(range(1, len(rank.shapes) + 1))
        for _ in range(8):
            cuda.run()
            for rank in ranks:
                rank.watch()
        for rank in ranks:
            assert rank.idle, "stuck"
            for call, result in rank.results.items():
                assert result is None or result.equal(rank.expected(call)), (rank.rank, call)
            expired = any(result is None for result in rank.results.values())
            with contextlib.suppress(ArrivalTimeout, GroupBroken):
                rank.channel.check()
            assert rank.state.broken or not expired, "a rank that has given up knows that its group is broken"
        if any(rank.state.broken for rank in ranks):
            cuda.run()
            assert all(rank.state.broken or rank.queue.flags.aborted() for rank in ranks), "all are aborted"


def test_one_set_of_signals_for_all_slots_would_be_mistaken():
    # The next call's signal of the same number belongs to another rank, and that rank is a call ahead.
    def result_with(sets: int) -> torch.Tensor | None:
        with world(3) as (cuda, ranks):
            for rank in ranks:
                memory = rank.queue.memory
                signals, signal = memory.signals, memory.signal
                memory.signals = lambda slot, signals=signals: signals(slot % sets)
                memory.signal = lambda of, slot, chunk, signal=signal: signal(of, slot % sets, chunk)
                rank.call(SHARDS[3][1])
                rank.call(SHARDS[3][0])
            late = ranks[1].side  # has pushed to rank 0, but not to rank 2
            for _, stream in itertools.product(range(9), cuda.streams):
                if stream is not late:
                    stream.run()
                elif stream.done < 3:
                    stream.run(3 - stream.done)
            assert ranks[0].results[1].equal(ranks[0].expected(1))
            return ranks[2].results.get(1)

    assert result_with(gather.SLOTS) is None, "it waits for rank 1's rows"
    assert result_with(1)[0, 1].isnan().all(), "rank 0's signal of the next call is taken for rank 1's"


def signals_of(rank, places):
    """The signals of a call in slot 1, at these (rank, chunk of all shards)."""
    return [ctypes.c_int32.from_address(rank.queue.memory.signal(peer, 1, c)) for peer, c in places]


def test_pushes_follow_the_protocol():
    shards = Shards(1, 3, 4, 1, parts=2)
    with world(3) as (_, ranks):
        first = ranks[0]
        first.call(shards)
        signals = signals_of(first, [(peer, chunk) for peer in (2, 1) for chunk in (0, 1)])
        first.side.run()
        assert [word.value for word in signals] == [0] * 4, "nothing before the calling stream reaches the call"
        assert first.side.issued == 1 + 8, "one wait; for each chunk and peer a copy and a signal"
        first.calling.run(2)  # the caller's write, and the call before, of which there is none
        first.side.run(2)
        assert [word.value for word in signals] == [0] * 4, "no signal before its copy"
        first.side.run(1)
        assert [word.value for word in signals] == [1, 0, 0, 0], "the previous rank is the first to need its rows"
        assert ranks[2].queue.memory.slot(2, 1).view(torch.float32)[:2].tolist() == [1.0, 1.0]
        first.side.run()
        assert [word.value for word in signals] == [1] * 4
        assert not first.results, "its peers have not pushed"


def test_pulls_follow_the_protocol():
    shards = Shards(1, 3, 4, 1, parts=2)
    with world(3) as (_, ranks):
        first, second, third = ranks
        call_all(ranks, shards, ways=["pull"])
        signals = signals_of(first, [(0, chunk) for chunk in (2, 3, 4, 5)])
        assert first.side.issued == 1 + 2 + 2 * (1 + 4), "one wait; two flags; for each peer its flag and its chunks"
        first.side.run()
        first.calling.run()
        first.side.run()
        assert [rank.queue.flags.peer_flags() for rank in ranks] == [[0, 0, 0], [1, 0, 0], [1, 0, 0]]
        assert [word.value for word in signals] == [0] * 4, "its peers have not set their flags"
        third.calling.run()
        third.side.run()
        first.side.run()
        assert [word.value for word in signals] == [0] * 4, "one peer after the other, the next rank first"
        second.calling.run()
        second.side.run()
        first.side.run(2)
        assert [word.value for word in signals] == [0] * 4, "no signal before its copy"
        first.side.run(1)
        assert [word.value for word in signals] == [1, 0, 0, 0]
        first.side.run()
        first.calling.run()
        check_results([first], 1)


def test_pushes_overlap_the_copy_into_the_own_slot_unless_the_shard_is_strided():
    with world(2) as (_, (first, _)):
        for strided in (False, True):
            before = first.side.done
            first.call(PAIR, strided=strided, local=False)
            first.calling.run(2)  # the caller's write, and the wait for the call before
            first.side.run()
            assert (first.side.done > before) == (not strided)
            while not first.calling.query() and first.calling.run(1):
                pass
            first.side.run()
            assert first.side.query() == (not strided), "behind the first call's kernel"


@pytest.mark.parametrize("shards", [Shards(1, 2, 3, 2, parts=2), Shards(2, 2, 3, 1)], ids=str)
def test_a_shard_that_is_read_in_place_is_not_copied(shards):
    with world(2) as (cuda, ranks):
        call_all(ranks, shards)
        cuda.run()
        for rank in ranks:
            slot = rank.queue.memory.slot(rank.rank, 1)[: 4 * shards.total * shards.width]
            slot = slot.view(torch.float32).view(shards.shape)
            assert slot[:, rank.rank].view(torch.uint8).eq(255).all()
            assert slot[:, 1 - rank.rank].equal(rank.expected(1)[:, 1 - rank.rank])
            assert rank.results[1].equal(rank.expected(1))


@pytest.mark.parametrize("products", [1, 3])
def test_a_shard_is_copied_once_for_all_launches_that_read_it_in_the_slot(monkeypatch, products):
    shards = Shards(2, 2, 3, 1)
    with world(2) as (cuda, ranks):
        copied, copy = [], slots.copy
        monkeypatch.setattr(slots, "copy", lambda to, source: (copied.append(to), copy(to, source)))
        call_all(ranks, shards, local=False, products=products)
        assert len(copied) == len(ranks) * shards.batches
        cuda.run()
        check_results(ranks, 1)


@pytest.mark.parametrize("fails", [False, True])
def test_the_callers_tensor_is_not_kept(fails):
    with world(2) as (_, (first, _)):
        with pytest.raises(RuntimeError, match="out of memory") if fails else contextlib.nullcontext():
            first.call(PAIR, fails=fails)
        assert [arrival._signals.local_rows for arrival in first.queue._arrivals.values()] == [None]


def test_new_slots_are_made_after_the_old_calls_have_ended(monkeypatch):
    with world(2) as (cuda, (first, second)):
        met, grown = [], []
        monkeypatch.setattr(call_queue, "barrier", lambda state, device: met.append(state.rank))
        memory = first.queue.memory
        memory.grow = lambda size, chunks: grown.append((size, chunks))
        call_all((first, second), PAIR)
        assert not first.queue.reserve(memory.slot_bytes, memory.chunks)
        with first.here():
            assert first.queue.reserve(1, memory.chunks + 1)
        assert first.results, "its kernel has ended"
        assert met == [0]
        assert grown == [(memory.slot_bytes, memory.chunks + 1)], "neither shrinks"
        assert not first.queue._arrivals, "they wait for the old signals"
        first.call(PAIR)
        first.over.add(2)
        with first.here():
            first.queue.reserve(memory.slot_bytes + 1, 0)
        with pytest.raises(GroupBroken, match="has given up waiting"):
            first.call(PAIR)
        cuda.run()


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("of_rows", [False, True])
@pytest.mark.parametrize(
    ("shards", "dtype"), [(Shards(2, 2, 3, 1), torch.float32), (Shards(1, 3, 1, 1), torch.float16)], ids=["", "odd"]
)
def test_scales_travel_with_the_rows(strided, of_rows, shards, dtype):
    """Also where the rows' bytes are no multiple of a scale's."""
    shape = (shards.batches, shards.rows, 1)
    with world(shards.world) as (cuda, ranks):
        scales = [torch.rand(shape if of_rows else (1, 1, 1)).expand(shape) for _ in ranks]
        for rank, mine in zip(ranks, scales, strict=True):
            rank.dtype = dtype
            rank.call(shards, strided=strided, scales=mine)
        cuda.run()
        for rank in ranks:
            assert rank.results[1].equal(rank.expected(1))
            assert rank.scales.equal(torch.stack(scales, 1))


def test_the_caller_may_overwrite_the_shard_behind_a_call():
    with world(2) as (cuda, (first, second)):
        call_all((first, second), PAIR)
        for _ in range(3):  # the second's kernel has all rows; the first's side stream has not begun
            for stream in (first.calling, second.calling, second.side):
                stream.run()
        assert first.results
        first.call(PAIR)  # its first work is a write to the same tensor
        first.calling.run()
        assert first.tensor.eq(1.0).all(), "it is pushed first"
        cuda.run()
        check_results([second], 1)


def test_gathered_rows_are_copied_out_of_the_slot_and_missing_chunks_are_nan():
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        shards = Shards(2, 2, 3, 2, parts=2)
        slot = torch.arange(24, dtype=torch.float32).view(shards.shape).to(dtype)
        words = torch.full((8,), 5, dtype=torch.int32)
        words[[1, 6]] = torch.tensor([2, -5], dtype=torch.int32)
        with fake_cuda():
            signals = copy_engines.PeerSignals(words, DEVICE)
            signals.begin(5)
            gathered = torch.zeros(shards.shape, dtype=dtype)
            copy_engines.take_out(gathered, slot, signals, shards, {})
        expected = slot.float()
        expected[0, 0, 1:] = expected[1, 1, :1] = float("nan")
        assert torch.equal(gathered.float().nan_to_num(-1.0), expected.nan_to_num(-1.0)), dtype


def test_gathered_rows_are_complete_behind_the_call():
    shards = Shards(1, 2, 3, 2, parts=2)
    with world(2) as (cuda, ranks):
        gathered = [torch.full(shards.shape, 7.0, dtype=torch.float16) for _ in ranks]
        for rank, into in zip(ranks, gathered, strict=True):
            rank.dtype = torch.float16
            rank.call(shards, into)
        call_all(ranks, shards)
        cuda.run()
        for rank, into in zip(ranks, gathered, strict=True):
            assert into.equal(rank.expected(1))


def test_the_host_waits_where_it_is_too_far_ahead():
    with world(2) as (_, (first, second)):
        first.call(PAIR)
        first.call(PAIR)
        with pytest.raises(AssertionError, match="waits for ever"):  # the fake device's message
            first.call(PAIR)
        del first.shapes[2:]
        second.call(PAIR)
        first.cuda.run()
        first.call(PAIR)  # the first call is done: the third may begin


def test_the_host_reads_the_devices_report_before_it_issues():
    # No watchdog polls here, and nothing has raised the report.
    with world(2) as (cuda, (first, second)):
        first.call(PAIR)
        first.call(PAIR)
        first.over |= {1, 2}
        cuda.run()
        assert not first.state.broken
        with pytest.raises(GroupBroken, match="rank 0 has given up waiting for a peer"):
            first.call(PAIR)
        cuda.run()
        assert second.queue.flags.aborted()


def test_a_call_on_another_stream_does_not_push_before_the_last_kernel_has_ended():
    with world(2) as (cuda, (first, second)):
        first.call(PAIR)
        one = first.calling
        first.calling_streams = [cuda.stream()]
        first.tensor = None
        first.call(PAIR)
        for _ in range(5):
            for stream in (one, first.calling, first.side):
                stream.run()
        assert second.queue.memory.slot(1, 2).eq(255).all(), "the second slot is untouched: the first kernel waits"
        second.call(PAIR)
        second.call(PAIR)
        cuda.run()
        check_results([first], 1, 2)


@pytest.mark.parametrize("way", dispatch.WAYS)
@pytest.mark.parametrize("what", ["copy_across", "PeerSignals", "copy", "stream_write"])
def test_a_call_that_is_half_issued_breaks_the_group_on_all_ranks(monkeypatch, what, way):
    strided = what == "copy"  # otherwise a pushed shard is not copied
    with world(2) as (cuda, (first, second)):
        with monkeypatch.context() as patch:
            home = next(module for module in (driver, slots, copy_engines) if hasattr(module, what))
            patch.setattr(home, what, raises(RuntimeError("no driver")))
            with pytest.raises(RuntimeError, match="no driver"):
                first.call(PAIR, ways=[way], strided=strided)
        with pytest.raises(GroupBroken, match=r"on rank 0: \w+Error: no driver"):
            first.call(PAIR)
        cuda.run()
        stuck = way == "pull" and what == "copy_across"
        assert first.idle != stuck, "the side stream waits for the peer's flag, and the calling stream for it"
        first.watch()
        cuda.run()
        assert second.queue.flags.aborted()
        assert first.idle


def loads_a_kernel_until_released(cuda, rank):
    """The driver, which loads a kernel only when the side stream is done; meanwhile the watchdog polls."""

    def polls_at(waited: float) -> bool:
        cuda.clock.now = rank.queue._pending.begun + waited
        rank.queue.poll()
        cuda.run()
        return rank.side.query()

    def loads() -> None:
        cuda.run()
        assert not rank.side.query(), "it waits for the peer"
        with rank.here(), pytest.MonkeyPatch.context() as patch:
            for module in (tilestream.arrival.device, tilestream.arrival.device_words, driver):
                # a driver that loads does nothing else
                for name in ("stream_write", "aside"):
                    patch.setattr(module, name, lambda *_: pytest.fail("it calls the driver"), raising=False)
            assert not polls_at(0.9), "the deadline has not passed"
            assert not polls_at(1.0 + 0.9 * copy_engines._LOADING), "a launched kernel would report its own expiry"
            assert polls_at(1.0 + 1.1 * copy_engines._LOADING), "waits for ever"

    return loads


def test_a_kernel_that_loads_while_a_stream_waits_for_a_lost_peer_is_loaded():
    with world(2) as (cuda, (first, second)):
        call_all((first, second), PAIR, ways=["pull"])
        cuda.run()
        gathered = torch.zeros(PAIR.shape)
        first.call(PAIR, gathered, ways=["pull"], loads=loads_a_kernel_until_released(cuda, first))  # first alone
        cuda.run()
        theirs = torch.zeros(PAIR.total, dtype=torch.bool)
        for part in PAIR.of_rank(1):
            begin, rows = PAIR.place(1, part)
            theirs[begin : begin + rows] = True
        (out,) = first.outs
        for x in (out, gathered.view(PAIR.total, PAIR.width)):
            assert x[theirs].isnan().all(), "whatever the kernel computed from missing rows"
            assert x[~theirs].isfinite().all()
        with pytest.raises(ArrivalTimeout, match=r"rank 1's part of a_shard's chunk .* did not arrive") as raised:
            first.channel.check()
        assert raised.value.rank == 0
        first.channel.check()  # raised once
        with pytest.raises(GroupBroken, match="rank 0 has given up waiting"):
            first.call(PAIR)
        first.watch()
        cuda.run()
        assert first.idle
        assert second.queue.flags.aborted()


def test_a_kernel_is_loaded_when_a_peer_has_given_up():
    with world(2) as (cuda, (first, second)):

        def loads() -> None:
            second.queue.abort_group("it has given up")
            cuda.run()
            with first.here():
                first.queue.poll()
            cuda.run()
            assert first.side.query()

        first.call(PAIR, ways=["pull"], loads=loads)
        assert first.outs[0].isnan().any()
        with pytest.raises(GroupBroken, match="a peer has given up"):
            first.channel.check()


def test_a_host_that_compiles_for_long_breaks_no_group():
    with world(2) as (cuda, (first, second)):

        def loads() -> None:
            second.call(PAIR, ways=["pull"])
            cuda.run()
            cuda.clock.now += 100.0
            first.watch()

        first.call(PAIR, ways=["pull"], loads=loads)
        cuda.run()
        assert not first.state.broken
        check_results([first], 1)
        assert first.outs[0].isfinite().all()
        assert first.queue._pending is None


def test_the_host_waits_for_the_rows_of_a_call_without_a_kernel():
    with world(2) as (cuda, (first, second)):
        with pytest.raises(RuntimeError, match="out of memory"):
            first.call(PAIR, fails=True)
        second.call(PAIR)
        call_all((first, second), PAIR)
        cuda.run()
        assert second.results[1].equal(second.expected(1)), "the rows were pushed all the same"
        call_all((first, second), PAIR)  # by now the rows of the first call have arrived
        cuda.run()
        check_results([first], 3)
        with pytest.raises(RuntimeError, match="out of memory"):
            first.call(PAIR, fails=True)
        first.call(PAIR)
        first.over.add(5)
        with pytest.raises(GroupBroken, match="has given up waiting"):
            first.call(PAIR)


@pytest.mark.parametrize("ways", [("push",), ("pull",), ("push", "pull"), ("pull", "push")], ids="-".join)
def test_an_expiry_breaks_the_group_on_both_ranks_and_ends_their_kernels(ways):
    with world(2) as (cuda, ranks):
        first, second = ranks
        call_all(ranks, PAIR, ways=ways)
        cuda.run()
        first.call(PAIR, ways=ways)
        first.call(PAIR, ways=ways)
        first.over.add(2)  # the second rank does not come
        cuda.run()
        assert first.results[2] is None
        assert 3 not in first.results
        first.watch()
        cuda.run()
        assert first.results[3] is None, "overruled before its deadline"
        assert first.idle
        check_results([first], 1)
        with pytest.raises(GroupBroken, match="rank 0 has given up waiting for a peer"):
            first.call(PAIR)
        second.call(PAIR, ways=ways)  # it does not know yet, and has all that it needs
        second.call(SHARDS[2][1], ways=ways)
        cuda.run()
        check_results([second], 2)
        if second.idle:  # it has pulled all of the third call, too, and learns of it in the next one
            second.call(PAIR, ways=ways)
        second.watch()
        cuda.run()
        assert second.idle
        with pytest.raises(GroupBroken, match="a peer has given up waiting"):
            second.call(PAIR)


def test_the_report_of_an_expiry_names_the_rank_and_the_missing_part():
    shards = Shards(1, 2, 3, 2, parts=2)
    with world(2) as (_, (first, _)):
        first.call(shards)
        signals = next(iter(first.queue._arrivals.values()))._signals
        report(first.channel, signals, 3)
        assert not first.state.broken
        with pytest.raises(ArrivalTimeout) as raised:
            first.channel.check()
        assert (raised.value.rank, raised.value.chunk) == (0, 3)
        assert str(raised.value).startswith(
            "all_gather_matmul: rank 1's part of a_shard's chunk 3 did not arrive within the deadline of 1 s: rank 0, "
            "worker 5 waited 1.000 s"
        )
        assert first.state.broken, "as soon as the report is read"


def test_a_late_rank_is_not_taken_for_a_lost_one():
    with world(2) as (cuda, (first, second)):
        first.call(PAIR)
        cuda.run()
        first.watch()
        assert not first.state.broken
        second.call(PAIR)
        cuda.run()
        check_results([first, second], 1)


def test_the_most_recent_shapes_are_kept():
    with world(2) as (_, (first, _)):
        queue = first.queue
        for width in range(copy_engines._MOST_ARRIVALS):
            queue.arrival(Shards(1, 2, 3, 1 + width), 1)
        kept = queue.arrival(Shards(1, 2, 3, 1), 4)
        queue.arrival(Shards(1, 2, 4, 1), 4)
        assert len(queue._arrivals) == copy_engines._MOST_ARRIVALS
        assert kept in queue._arrivals.values(), "it was used again"
        assert (Shards(1, 2, 3, 2), 1) not in queue._arrivals


def test_nothing_keeps_a_queue_when_its_calls_are_over():
    with world(2) as (cuda, ranks):
        call_all(ranks, PAIR)
        cuda.run()
        queue = weakref.ref(ranks[0].queue)
        ranks[0].queue._watchdog = None
        ranks.clear()
        rank = None
        gc.collect()
        assert rank is queue()


def test_a_host_issues_nothing_after_the_watchdog_has_read_an_expiry():
    # The watchdog's thread has read that call 1 has expired, and has not broken the group yet; now the host runs.
    with world(2) as (cuda, (first, _)):
        first.call(PAIR)
        first.over.add(1)
        cuda.run()
        queue, admitted = first.queue, []
        abort_group = queue.abort_group

        def late(why: str) -> None:
            queue.abort_group = abort_group
            admitted.append(queue.admit(3))
            abort_group(why)

        queue.abort_group = late
        with first.here():
            assert queue._check_expired(None)
        assert admitted == [None]
        assert first.state.broken
