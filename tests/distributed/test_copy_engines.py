"""What a gather issues on a GPU, on fake ones: two or three ranks in one process, their streams run in any order."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import weakref

import pytest
import torch
from fake_gather_ranks import report, world
from hypothesis import given, settings
from hypothesis import strategies as st

import tilestream.arrival.device
from fake_cuda import DEVICE, fake_cuda
from tilestream.core.errors import ArrivalTimeout, GroupBroken
from tilestream.core.protocols import gather
from tilestream.distributed import call_queue, copy_engines, dispatch
from tilestream.distributed.gathered import ScaledRows
from tilestream.distributed.shards import Shards

#: Of each world, shapes whose chunks are others' from call to call.
SHARDS = {
    2: (Shards(1, 2, 3, 2), Shards(1, 2, 3, 2, parts=2), Shards(2, 2, 3, 1)),
    3: (Shards(1, 3, 3, 2, parts=2), Shards(1, 3, 2, 2), Shards(2, 3, 3, 1)),
}
#: Ways of a call's shards, of the next one's, and so on.
WAYS = st.lists(st.sampled_from(dispatch.WAYS), min_size=1, max_size=3)
HOW = st.fixed_dictionaries({"strided": st.booleans(), "ways": WAYS, "apart": st.booleans()})


@given(data=st.data(), size=st.sampled_from((2, 3)))
@settings(max_examples=60)
def test_every_call_reads_its_own_epoch_whatever_the_order_of_streams(data, size):
    with world(size) as (cuda, ranks):
        calls = data.draw(st.lists(st.sampled_from(SHARDS[size]), min_size=6, max_size=6))
        how = data.draw(HOW)
        while any(len(rank.results) < len(calls) for rank in ranks):
            rank = data.draw(st.sampled_from(ranks))
            what = data.draw(st.integers(0, 2))
            if what == 0 and len(rank.shapes) < len(calls) and rank.room():
                rank.call(calls[len(rank.shapes)], **how)
            else:
                rank.run(what, data.draw(st.integers(1, 3)))
            if data.draw(st.integers(0, 9)) == 0:
                cuda.run()
                for each in ranks:
                    if len(each.shapes) < len(calls) and each.room():
                        each.call(calls[len(each.shapes)], **how)
        for rank in ranks:
            for call in range(1, len(calls) + 1):
                assert rank.results[call].equal(rank.expected(call)), (rank.rank, call)
            rank.poll()
            assert not rank.state.broken, "a watchdog saw what is not there"


@given(data=st.data(), size=st.sampled_from((2, 3)))
@settings(max_examples=60)
def test_whoever_gives_up_whenever_no_number_is_wrong_and_nobody_is_stuck(data, size):
    with world(size) as (cuda, ranks):
        how = data.draw(HOW)
        shapes = data.draw(st.lists(st.sampled_from(SHARDS[size]), min_size=1, max_size=4))
        for _ in range(data.draw(st.integers(5, 80))):
            rank = data.draw(st.sampled_from(ranks))
            what = data.draw(st.integers(0, 9))
            if what <= 1 and rank.room() and not rank.state.broken:
                with contextlib.suppress(GroupBroken):  # what it asks before it issues
                    rank.call(shapes[len(rank.shapes) % len(shapes)], **how)
            elif what == 2 and rank.shapes:
                rank.over.add(data.draw(st.integers(1, len(rank.shapes))))  # a deadline has passed, if it still waits
            elif what == 3:
                rank.poll()
            else:
                rank.run(what, data.draw(st.integers(1, 4)))
        for rank in ranks:  # at last every deadline passes, and every watchdog looks
            rank.over.update(range(1, len(rank.shapes) + 1))
        for _ in range(8):
            cuda.run()
            for rank in ranks:
                rank.poll()
        for rank in ranks:
            assert rank.idle, "stuck"
            for call, result in rank.results.items():
                assert result is None or result.equal(rank.expected(call)), (rank.rank, call)
            expired = any(result is None for result in rank.results.values())
            with contextlib.suppress(ArrivalTimeout, GroupBroken):
                rank.channel.check()
            assert rank.state.broken or not expired, "who has given up knows that the group is broken"
        if any(rank.state.broken for rank in ranks):
            cuda.run()
            assert all(rank.state.broken or rank.gatherer.flags.aborted() for rank in ranks), "all are told"


def test_one_set_of_signals_for_all_slots_would_be_mistaken():
    # What the sets are for: a word that is another rank's in the next call, and that rank is a call ahead.
    def hands_in(sets: int) -> torch.Tensor | None:
        with world(3) as (cuda, ranks):
            for rank in ranks:
                memory = rank.gatherer.memory
                signals, signal = memory.signals, memory.signal
                memory.signals = lambda slot, signals=signals: signals(slot % sets)
                memory.signal = lambda of, slot, chunk, signal=signal: signal(of, slot % sets, chunk)
                rank.call(SHARDS[3][1])
                rank.call(SHARDS[3][0])
            late = ranks[1].side  # it pushes to rank 0, and not yet to rank 2
            for _, stream in itertools.product(range(9), cuda.streams):
                if stream is not late:
                    stream.run()
                elif stream.done < 3:
                    stream.run(3 - stream.done)
            assert ranks[0].results[1].equal(ranks[0].expected(1))
            return ranks[2].results.get(1)

    assert hands_in(gather.SLOTS) is None, "it waits for rank 1's rows"
    assert hands_in(1)[0, 1].isnan().all(), "rank 0's signal of the next call is taken for rank 1's"


def signals_of(rank, places):
    """The words of a call in slot 1: on which rank, and of which chunk of the whole."""
    return [ctypes.c_int32.from_address(rank.gatherer.memory.signal(peer, 1, c)) for peer, c in places]


def test_what_is_pushed_is_the_text():
    shards = Shards(1, 3, 4, 1, parts=2)
    with world(3) as (_, ranks):
        first = ranks[0]
        first.call(shards)
        signals = signals_of(first, [(peer, chunk) for peer in (2, 1) for chunk in (0, 1)])
        first.side.run()
        assert [word.value for word in signals] == [0] * 4, "nothing before the call's place on its stream"
        assert first.side.issued == 1 + 8, "the wait for that; of each chunk to each peer a copy, and a signal"
        first.calling.run(1)  # the caller's write
        first.side.run(2)
        assert [word.value for word in signals] == [0] * 4, "not before its copy"
        first.side.run(1)
        assert [word.value for word in signals] == [1, 0, 0, 0], "the rank before it is the first to come to its rows"
        assert ranks[2].gatherer.memory.slot(2, 1).view(torch.float32)[:2].tolist() == [1.0, 1.0]
        first.side.run()
        assert [word.value for word in signals] == [1] * 4
        assert not first.results, "its peers have not pushed"


def test_what_is_pulled_is_the_text():
    shards = Shards(1, 3, 4, 1, parts=2)
    with world(3) as (_, ranks):
        first, second, third = ranks
        for rank in ranks:
            rank.call(shards, ways=["pull"])
        signals = signals_of(first, [(0, chunk) for chunk in (2, 3, 4, 5)])
        assert first.side.issued == 1 + 2 + 2 * (1 + 4), "the wait; two flags; of each peer its flag, and its chunks"
        first.side.run()
        first.calling.run()
        first.side.run()
        assert [rank.gatherer.flags.peer_flags() for rank in ranks] == [[0, 0, 0], [1, 0, 0], [1, 0, 0]]
        assert [word.value for word in signals] == [0] * 4, "its peers have not told"
        third.calling.run()
        third.side.run()
        first.side.run()
        assert [word.value for word in signals] == [0] * 4, "one peer after the other, the next rank first"
        second.calling.run()
        second.side.run()
        first.side.run(2)
        assert [word.value for word in signals] == [0] * 4, "not before its copy"
        first.side.run(1)
        assert [word.value for word in signals] == [1, 0, 0, 0]
        first.side.run()
        first.calling.run()
        assert first.results[1].equal(first.expected(1))


def test_pushes_go_beside_the_copy_into_the_own_slot_unless_the_shard_is_in_pieces():
    with world(2) as (_, (first, _)):
        for strided in (False, True):
            before = first.side.done
            first.call(SHARDS[2][0], strided=strided, apart=False)
            first.calling.run(1)
            first.side.run()
            assert (first.side.done > before) == (not strided)
            while not first.calling.query() and first.calling.run(1):
                pass
            first.side.run()
            assert first.side.query() == (not strided), "behind the first call's kernel"


@pytest.mark.parametrize("shards", [Shards(1, 2, 3, 2, parts=2), Shards(2, 2, 3, 1)], ids=str)
def test_a_shard_that_is_read_where_the_caller_has_it_is_copied_nowhere(shards):
    with world(2) as (cuda, ranks):
        for rank in ranks:
            rank.call(shards)
        cuda.run()
        for rank in ranks:
            slot = rank.gatherer._slot(rank.rank, 1, shards, ScaledRows(rank.tensor, None)).data
            assert slot[:, rank.rank].view(torch.uint8).eq(255).all()
            assert slot[:, 1 - rank.rank].equal(rank.expected(1)[:, 1 - rank.rank])
            assert rank.results[1].equal(rank.expected(1))


@pytest.mark.parametrize("products", [1, 3])
def test_it_is_copied_once_for_all_launches_that_read_it_in_the_slot(monkeypatch, products):
    shards = Shards(2, 2, 3, 1)
    with world(2) as (cuda, ranks):
        copied, copy = [], copy_engines.copy
        monkeypatch.setattr(copy_engines, "copy", lambda to, source: (copied.append(to), copy(to, source)))
        for rank in ranks:
            rank.call(shards, apart=False, products=products)
        assert len(copied) == len(ranks) * shards.batches
        cuda.run()
        for rank in ranks:
            assert rank.results[1].equal(rank.expected(1))


@pytest.mark.parametrize("fails", [False, True])
def test_a_callers_tensor_is_not_kept(fails):
    with world(2) as (_, (first, _)):
        with pytest.raises(RuntimeError, match="out of memory") if fails else contextlib.nullcontext():
            first.call(SHARDS[2][0], fails=fails)
        assert [arrival._signals.apart for arrival in first.gatherer._arrivals.values()] == [None]


def test_new_slots_are_made_when_the_old_ones_are_quiet(monkeypatch):
    with world(2) as (cuda, (first, second)):
        met, grown = [], []
        monkeypatch.setattr(call_queue, "barrier", lambda state, device: met.append(state.rank))
        memory = first.gatherer.memory
        memory.grow = lambda size, chunks: grown.append((size, chunks))
        for rank in (first, second):
            rank.call(SHARDS[2][0])
        assert not first.gatherer.reserve(memory.slot_bytes, memory.chunks)
        with first.here():
            assert first.gatherer.reserve(1, memory.chunks + 1)
        assert first.results, "its kernel has ended"
        assert met == [0]
        assert grown == [(memory.slot_bytes, memory.chunks + 1)], "neither becomes less"
        assert not first.gatherer._arrivals, "they are of the old signals"
        first.call(SHARDS[2][0])
        first.over.add(2)
        with first.here():
            first.gatherer.reserve(memory.slot_bytes + 1, 0)
        with pytest.raises(GroupBroken, match="has given up waiting"):
            first.call(SHARDS[2][0])
        cuda.run()


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("of_rows", [False, True])
def test_scales_travel_with_the_rows(strided, of_rows):
    shards = Shards(2, 2, 3, 1)
    with world(2) as (cuda, ranks):
        scales = [torch.rand((2, 3, 1) if of_rows else (1, 1, 1)).expand(2, 3, 1) for _ in ranks]
        for rank, mine in zip(ranks, scales, strict=True):
            rank.call(shards, strided=strided, scales=mine)
        cuda.run()
        for rank in ranks:
            assert rank.results[1].equal(rank.expected(1))
            assert rank.scales.equal(torch.stack(scales, 1))


def test_the_caller_may_write_to_his_tensor_behind_a_call():
    with world(2) as (cuda, (first, second)):
        for rank in (first, second):
            rank.call(SHARDS[2][0])
        for _ in range(3):  # the second's kernel has all; the first's own lane has not begun
            for stream in (first.calling, second.calling, second.side):
                stream.run()
        assert first.results
        first.call(SHARDS[2][0])  # its first work is a write to the same tensor
        first.calling.run()
        assert first.tensor.eq(1.0).all(), "it is pushed first"
        cuda.run()
        assert second.results[1].equal(second.expected(1))


def test_what_was_gathered_is_copied_out_of_the_slot_and_nan_where_it_did_not_come():
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        shards = Shards(2, 2, 3, 2, parts=2)
        slot = torch.arange(24, dtype=torch.float32).view(shards.shape).to(dtype)
        words = torch.full((8,), 5, dtype=torch.int32)
        words[[1, 6]] = torch.tensor([2, -5], dtype=torch.int32)
        with fake_cuda():
            signals = copy_engines.PeerSignals(words, DEVICE)
            signals.begin(5)
            whole = torch.zeros(shards.shape, dtype=dtype)
            copy_engines.take_out(whole, slot, signals, shards)
        expected = slot.float()
        expected[0, 0, 1:] = expected[1, 1, :1] = float("nan")
        assert torch.equal(whole.float().nan_to_num(-1.0), expected.nan_to_num(-1.0)), dtype


def test_the_whole_is_there_behind_the_call():
    shards = Shards(1, 2, 3, 2, parts=2)
    with world(2) as (cuda, ranks):
        halves = [torch.full(shards.shape, 7.0, dtype=torch.float16) for _ in ranks]
        for rank, whole in zip(ranks, halves, strict=True):
            rank.data = lambda r, call, s: torch.full((s.batches, s.rows, s.width), 100.0 * r + call).half()
            rank.call(shards, whole)
        for rank in ranks:
            rank.call(shards)
        cuda.run()
        for rank, whole in zip(ranks, halves, strict=True):
            assert whole.equal(rank.expected(1))


def test_the_host_waits_where_it_is_too_far_ahead():
    with world(2) as (_, (first, second)):
        first.call(SHARDS[2][0])
        first.call(SHARDS[2][0])
        with pytest.raises(AssertionError, match="waits for ever"):  # as the fake device says it
            first.call(SHARDS[2][0])
        del first.shapes[2:]
        second.call(SHARDS[2][0])
        first.cuda.run()
        first.call(SHARDS[2][0])  # the first is done: the third may begin


def test_the_host_asks_what_the_device_has_reported_before_it_goes_on():
    # No watchdog looks here, and nobody has raised what was reported.
    with world(2) as (cuda, (first, second)):
        first.call(SHARDS[2][0])
        first.call(SHARDS[2][0])
        first.over |= {1, 2}
        cuda.run()
        assert not first.state.broken
        with pytest.raises(GroupBroken, match="rank 0 has given up waiting for a peer"):
            first.call(SHARDS[2][0])
        cuda.run()
        assert second.gatherer.flags.aborted()


def test_a_call_on_another_stream_does_not_push_before_the_last_kernel_has_ended():
    shards = SHARDS[2][0]
    with world(2) as (cuda, (first, second)):
        first.call(shards)
        one = first.calling
        first.calling = cuda.stream()
        first.tensor = None
        first.call(shards)
        for _ in range(5):
            for stream in (one, first.calling, first.side):
                stream.run()
        assert second.gatherer.memory.slot(1, 2).eq(255).all(), "the second slot is untouched: the first kernel waits"
        second.call(shards)
        second.call(shards)
        cuda.run()
        assert first.results[1].equal(first.expected(1))
        assert first.results[2].equal(first.expected(2))


@pytest.mark.parametrize("way", dispatch.WAYS)
@pytest.mark.parametrize("what", ["copy_across", "PeerSignals", "copy", "stream_write"])
def test_half_a_call_breaks_the_group_on_all_ranks(monkeypatch, what, way):
    strided = what == "copy"  # else what is pushed is not copied
    with world(2) as (cuda, (first, second)):
        monkeypatch.setattr(copy_engines, what, lambda *args: (_ for _ in ()).throw(RuntimeError("no driver")))
        with pytest.raises(RuntimeError, match="no driver"):
            first.call(SHARDS[2][0], ways=[way], strided=strided)
        monkeypatch.undo()
        with pytest.raises(GroupBroken, match="on rank 0: RuntimeError: no driver"):
            first.call(SHARDS[2][0])
        cuda.run()
        first.poll()
        cuda.run()
        assert second.gatherer.flags.aborted()
        assert first.idle


def test_half_a_pull_that_waits_for_a_peer_is_let_go(monkeypatch):
    with world(2) as (cuda, (first, _)):
        monkeypatch.setattr(copy_engines, "copy_across", lambda *args: (_ for _ in ()).throw(RuntimeError("no driver")))
        with pytest.raises(RuntimeError, match="no driver"):
            first.call(SHARDS[2][0], ways=["pull"])
        cuda.run()
        assert not first.idle, "its side stream is at the peer's flag, and the calling stream waits for it"
        first.poll()
        cuda.run()
        assert first.idle


def release(cuda, rank, peer_seconds=1.0):
    """The driver, which loads a kernel when the side stream is done, and the watchdog meanwhile."""

    def loads() -> None:
        cuda.run()
        assert not rank.side.query(), "it waits for the peer"
        with rank.here(), pytest.MonkeyPatch.context() as patch:
            for module in (tilestream.arrival.device, copy_engines):  # a driver that loads does nothing else
                for name in ("stream_write", "aside"):
                    patch.setattr(module, name, lambda *_: pytest.fail("it asks the driver"), raising=False)
            rank.gatherer.poll()
            cuda.run()
            assert not rank.side.query(), "the deadline has not passed"
            rank.gatherer._pending.begun -= 1.0 + peer_seconds
            rank.gatherer.poll()
        cuda.run()
        assert rank.side.query(), "waits for ever"

    return loads


def test_a_kernel_that_cannot_be_loaded_while_a_stream_waits_for_a_peer_does_not_wait_for_ever():
    with world(2) as (cuda, (first, second)):
        shards = SHARDS[2][0]
        for rank in (first, second):
            rank.call(shards, ways=["pull"])
        cuda.run()
        whole = torch.zeros(shards.shape)
        first.call(shards, whole, ways=["pull"], loads=release(cuda, first))  # and the second does not
        cuda.run()
        theirs = torch.zeros(shards.total, dtype=torch.bool)
        for part in shards.of_rank(1):
            begin, rows = shards.place(1, part)
            theirs[begin : begin + rows] = True
        (out,) = first.outs
        for x in (out, whole.view(shards.total, shards.width)):
            assert x[theirs].isnan().all(), "whatever the kernel made of rows that had not come"
            assert x[~theirs].isfinite().all()
        with pytest.raises(ArrivalTimeout, match=r"rank 1's part of a_shard's chunk .* did not arrive") as raised:
            first.channel.check()
        assert raised.value.rank == 0
        first.channel.check()  # once
        with pytest.raises(GroupBroken, match="rank 0 has given up waiting"):
            first.call(shards)
        first.poll()
        cuda.run()
        assert first.idle
        assert second.gatherer.flags.aborted()


def test_a_kernel_is_loaded_when_a_peer_has_given_up():
    with world(2) as (cuda, (first, second)):
        shards = SHARDS[2][0]

        def loads() -> None:
            second.gatherer.abort_group("out of patience")
            cuda.run()
            with first.here():
                first.gatherer.poll()
            cuda.run()
            assert first.side.query()

        first.call(shards, ways=["pull"], loads=loads)
        assert first.outs[0].isnan().any()
        with pytest.raises(GroupBroken, match="a peer has given up"):
            first.channel.check()


def test_a_host_that_takes_its_time_gives_nobody_up():
    with world(2) as (cuda, (first, second)):
        shards = SHARDS[2][0]

        def loads() -> None:
            second.call(shards, ways=["pull"])
            cuda.run()
            first.gatherer._pending.begun -= 100.0  # it compiles
            first.poll()

        first.call(shards, ways=["pull"], loads=loads)
        cuda.run()
        assert not first.state.broken
        assert first.results[1].equal(first.expected(1))
        assert first.outs[0].isfinite().all()
        assert first.gatherer._pending is None


def test_a_call_without_a_kernel_is_waited_for_by_the_host():
    with world(2) as (cuda, (first, second)):
        with pytest.raises(RuntimeError, match="out of memory"):
            first.call(SHARDS[2][0], fails=True)
        second.call(SHARDS[2][0])
        for rank in (first, second):
            rank.call(SHARDS[2][0])
        cuda.run()
        assert second.results[1].equal(second.expected(1)), "it was pushed all the same"
        for rank in (first, second):
            rank.call(SHARDS[2][0])  # by now the rows of the first call are there
        cuda.run()
        assert first.results[3].equal(first.expected(3))
        with pytest.raises(RuntimeError, match="out of memory"):
            first.call(SHARDS[2][0], fails=True)
        first.call(SHARDS[2][0])
        first.over.add(5)
        first.gatherer._without_kernel[4] = (first.gatherer._without_kernel[4][0], -1.0)  # of no patience
        with pytest.raises(GroupBroken, match="has given up waiting"):
            first.call(SHARDS[2][0])


@pytest.mark.parametrize("ways", [("push",), ("pull",), ("push", "pull"), ("pull", "push")], ids="-".join)
def test_an_expiry_breaks_the_group_on_both_ranks_and_ends_their_kernels(ways):
    with world(2) as (cuda, ranks):
        first, second = ranks
        for rank in ranks:
            rank.call(SHARDS[2][0], ways=ways)
        cuda.run()
        first.call(SHARDS[2][0], ways=ways)
        first.call(SHARDS[2][0], ways=ways)
        first.over.add(2)  # the second rank does not come
        cuda.run()
        assert first.results[2] is None
        assert 3 not in first.results
        first.poll()
        cuda.run()
        assert first.results[3] is None, "of the third call the deadline has not passed: it was overruled"
        assert first.idle
        assert first.results[1].equal(first.expected(1))
        with pytest.raises(GroupBroken, match="rank 0 has given up waiting for a peer"):
            first.call(SHARDS[2][0])
        second.call(SHARDS[2][0], ways=ways)  # it has not heard yet, and has all that it needs
        second.call(SHARDS[2][1], ways=ways)
        cuda.run()
        assert second.results[2].equal(second.expected(2))
        if second.idle:  # it has pulled all of the third call, too, and hears of it in the next one
            second.call(SHARDS[2][0], ways=ways)
        second.poll()
        cuda.run()
        assert second.idle
        with pytest.raises(GroupBroken, match="a peer has given up waiting"):
            second.call(SHARDS[2][0])


def test_a_record_of_an_expiry_names_the_rank_and_whose_part_is_missing():
    shards = Shards(1, 2, 3, 2, parts=2)
    with world(2) as (_, (first, _)):
        first.call(shards)
        signals = next(iter(first.gatherer._arrivals.values()))._signals
        report(first.channel, signals, 3)
        assert not first.state.broken
        with pytest.raises(ArrivalTimeout) as raised:
            first.channel.check()
        assert (raised.value.rank, raised.value.chunk) == (0, 3)
        assert str(raised.value).startswith(
            "all_gather_matmul: rank 1's part of a_shard's chunk 3 did not arrive within the deadline of 1 s: rank 0, "
            "worker 5 waited 1.000 s"
        )
        assert first.state.broken, "with the first news of it"


def test_a_late_rank_is_not_taken_for_a_lost_one():
    with world(2) as (cuda, (first, second)):
        first.call(SHARDS[2][0])
        cuda.run()
        first.poll()
        assert not first.state.broken
        second.call(SHARDS[2][0])
        cuda.run()
        assert first.results[1].equal(first.expected(1))
        assert second.results[1].equal(second.expected(1))


def test_of_many_shapes_the_last_are_kept():
    with world(2) as (_, (first, _)):
        gatherer = first.gatherer
        for width in range(copy_engines._MOST_ARRIVALS):
            gatherer.arrival(Shards(1, 2, 3, 1 + width), 1)
        kept = gatherer.arrival(Shards(1, 2, 3, 1), 4)
        gatherer.arrival(Shards(1, 2, 4, 1), 4)
        assert len(gatherer._arrivals) == copy_engines._MOST_ARRIVALS
        assert kept in gatherer._arrivals.values(), "it was used again"
        assert (Shards(1, 2, 3, 2), 1) not in gatherer._arrivals


def test_nothing_keeps_a_gatherer_when_its_calls_are_over():
    with world(2) as (cuda, ranks):
        for rank in ranks:
            rank.call(SHARDS[2][0])
        cuda.run()
        gatherer = weakref.ref(ranks[0].gatherer)
        ranks[0].gatherer._watchdog = None
        ranks.clear()
        rank = None
        gc.collect()
        assert rank is gatherer()


def test_a_host_that_asks_while_the_watchdog_has_just_heard_issues_nothing():
    # The watchdog's thread has heard that call 1 has expired, and has not broken the group yet; now the host's runs.
    with world(2) as (cuda, (first, _)):
        first.call(SHARDS[2][0])
        first.over.add(1)
        cuda.run()
        gatherer, begun = first.gatherer, []
        abort_group = gatherer.abort_group

        def late(why: str) -> None:
            gatherer.abort_group = abort_group
            begun.append(gatherer.admit(3))
            abort_group(why)

        gatherer.abort_group = late
        with first.here():
            assert gatherer._ask(None)
        assert begun == [None]
        assert first.state.broken
