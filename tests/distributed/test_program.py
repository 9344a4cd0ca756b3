"""What a call gives the driver: as its protocol says, in its order, call by call and slot by slot.

The protocols' texts are performed here once more, operation by operation, without anything that was recorded before.
"""

from __future__ import annotations

import contextlib
import functools
import itertools

import pytest
import torch
from fake_gather_ranks import world as gathering_world
from test_gpu_reduce_scatter import LONG, AllReduceRank, ScatterRank
from test_gpu_reduce_scatter import world as summing_world

from tilestream.core.protocols import gather, one_shot, reduce_scatter
from tilestream.distributed import copy_engines, dispatch, gpu_reduce_scatter, program, slots
from tilestream.distributed import one_shot as one_shot_call
from tilestream.distributed.program import no_op, run_protocol
from tilestream.distributed.shards import Shards
from tilestream.runtime import driver
from tilestream.runtime.sequence import Write

#: Of `tilestream.runtime.driver`; and events are recorded, by it or by torch.
FUNCTIONS = ("stream_write", "stream_wait", "copy_across", "copy_in", "wait_event")
#: More than one round of the slots.
CALLS = 2 * gather.SLOTS + 1


@contextlib.contextmanager
def logging(rank):
    """A list of what a rank gives the driver, and of what its host does between."""
    log = []
    of_queue = {event.cuda_event for event in (rank.queue._posted, *itertools.chain(*rank.queue._events))}
    with pytest.MonkeyPatch.context() as patch:
        for name in FUNCTIONS:
            perform = getattr(driver, name)
            patch.setattr(
                driver, name, lambda *given, name=name, perform=perform: (log.append((name, *given)), perform(*given))
            )
        copy, record = slots.copy, torch.cuda.Event.record

        def log_copy(to, source):
            log.append(("copy", to.data_ptr(), source.data_ptr(), source.stride()))
            copy(to, source)

        def log_record(event, stream=None):
            if event.cuda_event in of_queue:
                log.append(("record_event", stream.cuda_stream, event.cuda_event))
            record(event, stream)

        patch.setattr(slots, "copy", log_copy)
        patch.setattr(torch.cuda.Event, "record", log_record)
        yield log


def end(queue, epoch):
    return queue._events[epoch % gather.SLOTS].end.cuda_event


def expected_gather(queue, epoch, calling, shards, rows, scales, way, gathered):
    """A gather, performed as its protocol says: before the kernel, and behind it."""
    log, memory, rank, world = [], queue.memory, queue._rank, queue._world
    parts = [list(shards.of_rank(r)) for r in range(world)]
    mine, side = parts[rank], queue._side.cuda_stream
    from_slot = way == "pull" or not rows.is_contiguous()
    number, row_bytes = epoch % gather.SLOTS, shards.width * rows.element_size()
    size = shards.total * row_bytes
    at = -(-size // 256) * 256
    slot = memory.slot(rank, number)

    def fill(op):
        filled = [(rows, 0, row_bytes)] if from_slot else []
        filled += [] if scales is None else [(scales, at, 4)]
        for x, offset, bytes_ in filled:
            for batch in range(shards.batches):
                place = slot.data_ptr() + offset + (batch * world + rank) * shards.rows * bytes_
                log.append(("copy", place, x[batch].data_ptr(), x[batch].stride()))

    def sources():
        yield 0, row_bytes, (slot.data_ptr() if from_slot else rows.data_ptr()), from_slot
        if scales is not None:
            yield at, 4, scales.data_ptr(), False

    def push(op):
        part, (there, count) = mine[op.chunk], shards.place(rank, mine[op.chunk])
        for offset, bytes_, address, in_slot in sources():
            first = there if in_slot else part.batch * shards.rows + part.begin
            to = memory.address(op.peer, op.slot) + offset + there * bytes_
            log.append(("copy_across", side, to, address + first * bytes_, count * bytes_))

    def pull(op):
        first, count = shards.place(op.peer, parts[op.peer][op.chunk])
        for offset, bytes_, _, _ in sources():
            to, source = (memory.address(r, op.slot) + offset + first * bytes_ for r in (rank, op.peer))
            log.append(("copy_across", side, to, source, count * bytes_))

    def signal(stream):
        def write(op):
            log.append(("stream_write", stream, memory.signal(rank, op.slot, parts[op.rank][op.chunk].chunk), op.epoch))

        return write

    def tell(op):
        log.append(("stream_write", side, memory.signal(op.peer, op.slot, mine[op.chunk].chunk), op.epoch))

    flag, posted = queue.flags.flag, queue._posted.cuda_event
    publish = {
        gather.AwaitCall: lambda op: log.append(("wait_event", calling, end(queue, op.epoch))),
        gather.Post: lambda op: log.append(("record_event", calling, posted)),
        gather.Fill: fill, gather.Filled: no_op, gather.Signal: signal(calling),
    }  # fmt: skip
    travel = {
        gather.AwaitPost: lambda op: log.append(("wait_event", side, posted)),
        gather.Push: push, gather.Pushed: no_op, gather.SignalPeer: tell, gather.Pull: pull, gather.Pulled: no_op,
        gather.Flag: lambda op: log.append(("stream_write", side, flag(op.peer, rank), op.epoch)),
        gather.AwaitFlag: lambda op: log.append(("stream_wait", side, flag(rank, op.peer), op.epoch)),
        gather.Signal: signal(side), gather.Done: no_op,
    }  # fmt: skip
    run_protocol(gather.publish(rank, len(mine), epoch, from_slot), publish)
    run_protocol(gather.side(rank, world, len(mine), epoch, way), travel)
    kernel, done, over = (event.cuda_event for event in queue._events[number])
    log += [("kernel",)] if gathered is None else [("kernel",), ("take out",)]
    if gathered is not None and not from_slot:
        log += [("copy", to[rank].data_ptr(), x.data_ptr(), x.stride()) for to, x in zip(gathered, rows, strict=True)]
    log += [("record_event", calling, kernel), ("record_event", side, done)]
    run_protocol(gather.finish(epoch), {gather.AwaitSide: lambda op: log.append(("wait_event", calling, done))})
    return [*log, ("record_event", calling, over)]


@pytest.mark.parametrize(("scaled", "return_a"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("ways", [("push",), ("pull",), ("push", "pull")], ids="-".join)
@pytest.mark.parametrize("shards", [Shards(1, 2, 3, 2, parts=2), Shards(2, 3, 4, 1, parts=2)], ids=str)
def test_gathers_are_issued_as_their_protocol_says(shards, ways, strided, scaled, return_a):
    assert set(ways) <= set(dispatch.WAYS)
    shape = (shards.batches, shards.rows, 1)
    with gathering_world(shards.world) as (cuda, ranks), pytest.MonkeyPatch.context() as patch:
        first = ranks[-1]
        scales, gathered = torch.rand(shape) if scaled else None, torch.empty(shards.shape) if return_a else None
        for number in range(CALLS):
            for rank in ranks[:-1]:
                rank.call(shards, strided=strided, ways=ways, scales=scales)
            with logging(first) as log:
                launch = functools.partial(log.append, ("kernel",))
                patch.setattr(copy_engines, "take_out", lambda *_, log=log: log.append(("take out",)))
                first.call(shards, gathered, strided=strided, ways=ways, scales=scales, products=2, loads=launch)
                issued = list(log)
            calling, way = first.calling_streams[0].cuda_stream, ways[number % len(ways)]
            given = shards, first.tensor, scales, way, gathered
            assert issued == expected_gather(first.queue, number + 1, calling, *given), f"call {number + 1}"
            cuda.run()
        assert len(first.results) == CALLS


@pytest.mark.parametrize("kind", ["gather", ScatterRank, AllReduceRank])
def test_events_and_streams_are_kept(kind):
    """And what a call gives the driver is recorded once a slot."""
    a_world = gathering_world(2) if kind == "gather" else summing_world(kind, 2)
    shape = Shards(1, 2, 3, 2) if kind == "gather" else kind.shapes_of[2][0]
    with a_world as (cuda, ranks, *_), pytest.MonkeyPatch.context() as patch:
        made = []
        init = torch.cuda.Event.__init__
        patch.setattr(torch.cuda.Event, "__init__", lambda event: (made.append(event), init(event))[1])
        for number in range(CALLS):
            if number == gather.SLOTS:  # from here on each slot has been used
                made.clear()
                streams = len(cuda.streams)
                patch.setattr(program, "Recorder", None)
                for module in (copy_engines, gpu_reduce_scatter, one_shot_call):
                    patch.setattr(module, "Recorder", None)
            for rank in ranks:
                rank.call(shape) if kind == "gather" else rank.call(shape, LONG)
            cuda.run()
        assert not made
        assert len(cuda.streams) == streams
        assert all(len(rank.results) == CALLS for rank in ranks)


def test_more_operations_than_a_sequence_has_are_several():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "MOST_OPERATIONS", 2)
        recorder = program.Recorder(1)
        for number in range(5):
            recorder.add(Write(program.CALLING, number, program.EPOCH))
        recorder.host("multiply")
        recorder.add(Write(program.CALLING, 5, program.EPOCH))
    *sequences, name, last = recorder.program()
    assert [len(one) for one in (*sequences, last)] == [2, 2, 1, 1]
    assert name == "multiply"


def around_a_sum(queue, log, calling, number):
    """The operations that both sums have: behind the last call, and the sum itself."""
    kernel, side, over = (event.cuda_event for event in queue._events[number])

    def await_call(op):
        last = queue._events[op.epoch % gather.SLOTS]
        log.append(("wait_event", calling, last.end.cuda_event))  # which is behind the last call's side stream

    def add(op):
        log.append(("copy_in", calling, queue._void.data_ptr(), queue.flags.void.data_ptr(), 4))
        log.append(("sum",))

    def added(op):
        log.append(("record_event", calling, over))

    handlers = {
        gather.AwaitCall: await_call, reduce_scatter.Sum: add, one_shot.AddSlots: add,
        reduce_scatter.Summed: added, one_shot.Added: added,
    }  # fmt: skip
    return handlers, kernel, side


def expected_scatter(queue, epoch, calling, shards, received, before):
    log, rank, world, side = [], queue._rank, queue._world, queue._side.cuda_stream
    handlers, kernel, side_event = around_a_sum(queue, log, calling, epoch % gather.SLOTS)
    mine, flag, posted = list(shards.of_rank(rank)), queue.flags.flag, queue._posted.cuda_event
    of_sum = rank, world, shards.batches, shards.parts
    row_bytes = 4 * shards.width

    def pull(op):
        part = mine[reduce_scatter.sent(op.peer, world, shards.batches, shards.parts, op.step)[1]]
        first, rows = shards.place(rank, part)
        there = (op.peer * shards.batches + part.batch) * shards.rows + part.begin
        source = queue.memory.address(op.peer, op.slot) + first * row_bytes
        log.append(("copy_across", side, received.data_ptr() + there * row_bytes, source, rows * row_bytes))

    def published(op):
        chunk = ((rank + 1) * shards.parts + op.step) % shards.chunks
        log.append(("stream_wait", side, queue._publication.address(chunk), op.epoch))

    handlers |= {
        gather.Post: lambda op: log.append(("record_event", calling, posted)),
        reduce_scatter.Compute: lambda op: log.append(("kernel",)) if op.step == 0 else None,
        reduce_scatter.Computed: no_op, reduce_scatter.Publish: no_op,
        reduce_scatter.Ended: lambda op: log.append(("record_event", calling, kernel)),
        gather.AwaitPost: lambda op: log.append(("wait_event", side, posted)),
        reduce_scatter.AwaitPublished: published,
        reduce_scatter.FlagPart: lambda op: log.append(("stream_write", side, flag(op.peer, rank), before + op.parts)),
        reduce_scatter.AwaitPart: lambda op: log.append(("stream_wait", side, flag(rank, op.peer), before + op.parts)),
        reduce_scatter.PullPart: pull, reduce_scatter.PulledPart: no_op,
        gather.Done: lambda op: log.append(("record_event", side, side_event)),
        gather.AwaitSide: lambda op: log.append(("wait_event", calling, side_event)),
    }  # fmt: skip
    run_protocol(reduce_scatter.produce(*of_sum, epoch), handlers)
    run_protocol(reduce_scatter.scatter(*of_sum, epoch), handlers)
    log.append(("track",))
    run_protocol(reduce_scatter.add_up(epoch), handlers)
    return log


def expected_reduce(queue, epoch, calling):
    log, rank, world, flag = [], queue._rank, queue._world, queue.flags.flag
    handlers, kernel, side_event = around_a_sum(queue, log, calling, epoch % gather.SLOTS)
    handlers |= {
        one_shot.Multiply: lambda op: log.append(("kernel",)),
        one_shot.Multiplied: lambda op: log.append(("record_event", calling, kernel)),
        one_shot.FlagPeer: lambda op: log.append(("stream_write", calling, flag(op.peer, rank), op.epoch)),
        one_shot.AwaitPeer: lambda op: log.append(("stream_wait", calling, flag(rank, op.peer), op.epoch)),
        one_shot.AllFlagged: lambda op: log.extend([("record_event", calling, side_event), ("track",)]),
    }
    run_protocol(one_shot.reduce(rank, world, epoch), handlers)
    return log


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", [ScatterRank, AllReduceRank])
def test_sums_are_issued_as_their_protocol_says(kind, ranks):
    with summing_world(kind, ranks) as (cuda, all_ranks, _):
        first, before = all_ranks[-1], 0
        track, calling = first.queue.track, first.calling_streams[0].cuda_stream
        for number in range(CALLS):
            shape = kind.shapes_of[ranks][number // gather.SLOTS]  # other operations in a slot that was used
            for rank in all_ranks[:-1]:
                rank.call(shape, LONG)
            with logging(first) as log:
                first.queue.track = lambda call, log=log: (log.append(("track",)), track(call))
                first.between = lambda what, log=log: log.append((what,))
                first.call(shape, LONG)
                issued = list(log)
            if kind is ScatterRank:
                expected = expected_scatter(first.queue, number + 1, calling, shape, first.received, before)
                before += shape.batches * shape.parts
            else:
                expected = expected_reduce(first.queue, number + 1, calling)
            assert issued == expected, f"call {number + 1}"
            cuda.run()
        assert len(first.results) == CALLS
