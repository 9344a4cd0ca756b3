"""Where a stream's rows land beyond the source's tensor: in order, whole, and signalled after they were copied."""

from __future__ import annotations

import contextlib
import gc
import math
import pickle
import re
import sys
import threading
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from device_builders import on_gpu, pinned, seen, there
from hypothesis import given, settings
from hypothesis import strategies as st

import tilestream as ts
from fake_cuda import DEVICE, fake_cuda
from strategies import chunkings
from tilestream.arrival import device_words, landing, lanes, signals
from tilestream.arrival.arrival import Arrival
from tilestream.arrival.device import DeviceSignals
from tilestream.arrival.files import RangeReader, find_matrix
from tilestream.arrival.landing import Landing
from tilestream.arrival.sources import as_rows, file_source, iterator_source, tensor_source
from tilestream.arrival.stream import Stream, onto, open_streams
from tilestream.core.chunks import Chunks
from tilestream.core.error_record import EXPIRED, FAILED, Record
from tilestream.core.errors import ProducerStopped
from tilestream.runtime import channel as channels
from tilestream.runtime import streams as streams_module
from tilestream.runtime.channel import Channel

LONG = 300.0


@pytest.fixture(autouse=True)
def no_producer_left():
    yield
    left = [thread for thread in threading.enumerate() if thread.name.startswith("tilestream-producer")]
    for thread in left:
        thread.join(LONG)
        assert not thread.is_alive()


class Onward(Landing):
    """Rows are copied on as `DeviceLanding` copies them, but at once; says in which order."""

    def __init__(self, host: torch.Tensor) -> None:
        super().__init__(torch.full_like(host, float("nan")))
        self._rows = as_rows(host)
        self.landed: list[tuple[int, int]] = []
        self.here = threading.local()

    @contextlib.contextmanager
    def issuing(self):
        self.here.now = True
        yield
        self.here.now = False

    def land(self, begin: int, end: int) -> None:
        assert self.here.now
        self.landed.append((begin, end))
        as_rows(self.tensor)[begin:end].copy_(self._rows[begin:end])


def matrix(rows: int, columns: int = 5) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)


def failing(rows: int = 2):
    """A source that fails after its first block."""

    def blocks():
        yield torch.zeros(rows, 4)
        raise OSError("the disk is gone")

    return iterator_source(blocks(), (6, 4), torch.float32)


class TestOrder:
    ROWS, CHUNKS = 64, 16

    @pytest.fixture
    def saved(self, tmp_path):
        """Chunks of 16000 bytes: each shares a page with the one before it and the one after it."""
        data = torch.randn(self.ROWS, 1000) + 10
        np.save(tmp_path / "x.npy", data.numpy())
        return tmp_path / "x.npy", data

    @pytest.fixture
    def delay(self, monkeypatch):
        """``delay(late)``: of the reads of a file, the ``late``-th claimed ends only when all others have."""

        def made(late: int) -> None:
            done, all_done = [], threading.Event()
            fill, claim, order = RangeReader._fill, RangeReader.claim, []

            def slow(self, start, stop):
                if order.index(start) == late:
                    assert all_done.wait(LONG)
                fill(self, start, stop)
                done.append(start)
                if len(done) == TestOrder.CHUNKS - 1:
                    all_done.set()

            def claimed(self, begin, end):
                job = claim(self, begin, end)
                order.append(job.__closure__[1].cell_contents)  # where it starts
                return job

            monkeypatch.setattr(RangeReader, "_fill", slow)
            monkeypatch.setattr(RangeReader, "claim", claimed)

        return made

    @pytest.mark.parametrize("direct", [None, False])
    @pytest.mark.parametrize("pivot", [0, 5])
    @pytest.mark.parametrize("late", [0, 7])
    def test_a_page_that_two_chunks_share_has_come_before_the_second_lands(self, saved, delay, late, pivot, direct):
        path, data = saved
        delay(late)
        source = file_source(RangeReader(find_matrix(path, None), direct))
        landing = Onward(source.tensor)
        with Stream(ts.Arrival.uniform(4, self.CHUNKS, pivot), source, landing) as x:
            x.wait(LONG)
        order = [(pivot + step) % self.CHUNKS for step in range(self.CHUNKS)]
        assert landing.landed == [(4 * chunk, 4 * chunk + 4) for chunk in order]
        assert torch.equal(x.tensor, data)

    def test_on_to_a_gpu_too(self, saved, delay, cuda):
        path, data = saved
        delay(3)
        with on_gpu(file_source(RangeReader(find_matrix(path, None))), Chunks.uniform(self.ROWS, 4), 2) as x:
            assert torch.equal(x.wait(), data)
            assert all(x.arrival._signals.state())


def test_a_callers_generator_runs_on_the_callers_stream(cuda):
    seen = []

    def blocks():
        for _ in range(3):
            seen.append(cuda.current)
            yield torch.zeros(2, 4)

    with on_gpu(iterator_source(blocks(), (6, 4), torch.float32), Chunks.uniform(6, 2)) as x:
        x.wait()
    assert seen == [cuda.streams[0]] * 3
    assert not x.tensor.any()


class TestRows:
    @pytest.mark.parametrize("is_pinned", [False, True])
    def test_restart_brings_what_the_source_holds_now_though_its_rows_are_no_view(self, cuda, is_pinned):
        base = torch.zeros(4, 3, 8)  # [B, M, K] whose leading dimensions do not merge
        x = base.transpose(0, 1)
        source = pinned(cuda, x) if is_pinned else tensor_source(x, onward=True)
        with on_gpu(source, Chunks.uniform(12, 5)) as stream:
            for value in (0.0, 7.0, 9.0):
                base.fill_(value)
                stream.restart() if value else None
                assert (stream.wait() == value).all()
                assert all(stream.arrival._signals.state())

    @settings(max_examples=80)
    @given(data=st.data())
    def test_all_at_once_or_chunk_by_chunk_the_same_bytes_each_signalled_after_its_own(self, data):
        chunks = data.draw(chunkings(data.draw(st.integers(0, 20))))
        pivot = data.draw(st.integers(0, chunks.count - 1))
        dtype = data.draw(st.sampled_from([torch.float32, torch.uint8, torch.float64]))
        x = matrix(chunks.rows).to(dtype)
        with fake_cuda() as cuda:
            at_once = on_gpu(pinned(cuda, x), chunks, pivot, fill=255)
            signals = at_once.arrival._signals
            stream = at_once._landing.stream
            assert stream.issued >= chunks.count
            order = [(pivot + step) % chunks.count for step in range(chunks.count)]
            while stream.run(1):
                here = signals.state()
                assert here == [chunk in order[: sum(here)] for chunk in range(chunks.count)], "in order"
                for chunk in order[: sum(here)]:
                    begin, end = chunks.range_of(chunk)
                    assert torch.equal(at_once.tensor[begin:end], x[begin:end])
            assert all(signals.state())
        with fake_cuda() as cuda:
            one_by_one = on_gpu(tensor_source(x, onward=True), chunks, pivot, fill=255)
            one_by_one.wait()
            assert all(one_by_one.arrival._signals.state())
        assert torch.equal(at_once.tensor, x)
        assert torch.equal(one_by_one.tensor, x)

    @pytest.mark.parametrize("bounds", [(0, 0, 4, 6), (0, 4, 6, 6), (0, 0, 0, 6, 6, 6), (0, 0, 0), (0, 2, 2, 6)])
    @pytest.mark.parametrize("pivot", [0, 1])
    def test_all_is_issued_by_one_sequence_and_nothing_else(self, cuda, bounds, pivot):
        """A copy for each chunk with rows, a signal for each chunk: between what orders them, and the event behind."""
        chunks = len(bounds) - 1
        stream = on_gpu(pinned(cuda, matrix(bounds[-1])), Chunks(bounds), pivot)
        for _ in range(2):
            asked = []
            for step in range(chunks):
                chunk = (pivot + step) % chunks
                asked += ["copy_in"] * (bounds[chunk] < bounds[chunk + 1]) + ["stream_write"]
            assert cuda.driver.calls == ["record_event", "wait_event", *asked, "record_event"]
            stream.wait()
            cuda.driver.calls.clear()
            stream.restart()

    @pytest.mark.parametrize("done", range(9))
    def test_where_the_driver_refuses_what_was_issued_is_there_and_the_rest_has_failed(self, cuda, monkeypatch, done):
        left = [done]

        def limited(function):
            def call(*how):
                left[0] -= 1
                if left[0] == -1:
                    raise RuntimeError("CUDA error: out of memory")
                function(*how)

            return call

        x = on_gpu(pinned(cuda, matrix(6)), Chunks.uniform(6, 2), 1)
        x.wait()
        x.tensor.fill_(math.nan)
        with monkeypatch.context() as patch:
            for name in ("record_event", "wait_event", "copy_in", "stream_write"):
                patch.setattr(cuda.driver, name, limited(getattr(cuda.driver, name)))
            x.restart()
            launch = x.arrival._signals.use()
        order = [1, 2, 0][: max(0, (done - 2) // 2)]
        cuda.run()
        assert there(launch) == sorted(order)
        assert [state for state in seen(launch) if state != "here"] == ["failed"] * (3 - len(order))
        for chunk in order:
            assert torch.equal(x.tensor[2 * chunk : 2 * chunk + 2], matrix(6)[2 * chunk : 2 * chunk + 2])
        with pytest.raises(RuntimeError, match=rf"out of memory; this is operation {done} of 9"):
            x.wait()
        x.restart()
        assert torch.equal(x.wait(), matrix(6))


@pytest.fixture
def short_sequences(monkeypatch):
    monkeypatch.setattr(landing, "MOST_OPERATIONS", 4)
    landing.filling.cache_clear()
    yield
    landing.filling.cache_clear()


class TestManyChunks:
    """More operations than one sequence takes."""

    def test_all_come(self, cuda, short_sequences):
        x = on_gpu(pinned(cuda, matrix(40)), Chunks.uniform(40, 1))
        assert torch.equal(x.wait(), x._source.tensor)
        assert x.arrival._signals.state() == [True] * 40

    def test_a_refusal_in_a_later_sequence_leaves_what_was_issued(self, cuda, short_sequences, monkeypatch):
        copy_in, calls = cuda.driver.copy_in, []

        def refuse(*operands: int) -> None:
            calls.append(operands)
            if len(calls) == 6:
                raise RuntimeError("the driver refused")
            copy_in(*operands)

        monkeypatch.setattr(cuda.driver, "copy_in", refuse)
        x = on_gpu(pinned(cuda, matrix(10)), Chunks.uniform(10, 1))
        launch = x.arrival._signals.use()
        cuda.run()
        assert seen(launch) == ["here"] * 5 + ["failed"] * 5
        with pytest.raises(RuntimeError, match="the driver refused"):
            x.wait(LONG)


class TestHeld:
    """A producer whose copies the driver holds up, as behind another thread's copy to pageable memory."""

    def expired(self, stream):
        return Record(EXPIRED, 0, 0, 0, 1, stream.arrival.key, stream.arrival.epoch, 0, -1, 0, 0, 10**6, 10**9).error()

    def stream(self, held, begun):
        class Held(Onward):
            def land(self, begin: int, end: int) -> None:
                if begin:
                    begun.set()
                    assert held.wait(LONG)
                super().land(begin, end)

        source = tensor_source(matrix(4))
        return Stream(ts.Arrival.uniform(2, 2), source, Held(source.tensor))

    def test_an_expiry_says_for_how_long(self, monkeypatch):
        monkeypatch.setattr(signals, "HELD_SECONDS", 1e-9)
        held, begun = threading.Event(), threading.Event()
        stream = self.stream(held, begun)
        assert begun.wait(LONG)
        error = self.expired(stream)  # while it is held up
        assert error.held > 0
        assert re.search(r"The driver held up a copy of its producer for \d\.\d{3} s: while a thread", str(error))
        assert str(error).endswith("Wait for the chunks before that (stream.wait()), or copy on another stream")
        again = pickle.loads(pickle.dumps(error))
        assert (again.held, str(again)) == (error.held, str(error))
        held.set()
        stream.wait(LONG)
        monkeypatch.setattr(signals, "HELD_SECONDS", error.held)
        time.sleep(0.01)
        assert self.expired(stream).held >= error.held, "also when it goes on"

    def test_one_that_takes_no_longer_than_a_copy_is_not_held(self):
        held, begun = threading.Event(), threading.Event()
        held.set()
        stream = self.stream(held, begun)
        stream.wait(LONG)
        error = self.expired(stream)
        assert error.held == 0
        assert str(error).endswith("or pass a larger deadline=")

    def test_the_next_epoch_begins_anew(self, monkeypatch):
        monkeypatch.setattr(signals, "HELD_SECONDS", 0.0)
        held, begun = threading.Event(), threading.Event()
        held.set()
        stream = self.stream(held, begun)
        stream.wait(LONG)
        before = stream.arrival._signals.longest_issue
        stream.arrival._signals.longest_issue = 1e6
        stream.restart()
        stream.wait(LONG)
        assert 0 < before < 1e6
        assert stream.arrival._signals.held < 1e6


class TestLanes:
    def stream(self, cuda, rows=6, per=2, source=None):
        source = matrix(rows) + cuda.driver.calls.count("copy_in") if source is None else source
        return on_gpu(pinned(cuda, source), Chunks.uniform(rows, per))

    def test_a_stream_takes_the_lane_that_one_before_has_left(self, cuda):
        x = self.stream(cuda)
        lane, epoch = x._landing._lane, x.arrival.epoch
        x.wait()
        del x
        made = len(cuda.streams)
        y = self.stream(cuda)
        assert y._landing._lane is lane
        assert y.arrival.epoch == epoch + 1
        assert torch.equal(y.wait(), y._source.tensor)
        assert len(cuda.streams) == made
        other = self.stream(cuda, per=3)  # of two chunks
        assert other._landing._lane is not lane

    def test_while_the_copies_are_under_way_it_is_taken_behind_the_same_stream_alone(self, cuda):
        x, elsewhere = self.stream(cuda), cuda.stream()
        lane = x._landing._lane
        kept = x.tensor, x._source.tensor
        del x
        with cuda.on(elsewhere):
            y = self.stream(cuda)
        assert y._landing._lane is not lane
        z = self.stream(cuda)
        assert z._landing._lane is lane
        cuda.run()
        assert torch.equal(*kept)
        assert torch.equal(y.tensor, y._source.tensor)
        assert torch.equal(z.tensor, z._source.tensor)

    @settings(max_examples=60)
    @given(data=st.data())
    def test_a_launch_of_an_earlier_stream_finds_its_own_chunks_in_any_order(self, data):
        """Streams one after the other on one lane; their launches run late, and look at what they were told."""
        with fake_cuda() as cuda:
            readers = [cuda.streams[0], cuda.stream(), cuda.stream()]
            launches = []
            for _ in range(data.draw(st.integers(1, 5))):
                x = self.stream(cuda, source=torch.rand(6, 4))
                source, tensor, launch = x._source.tensor, x.tensor, None
                if data.draw(st.booleans()):
                    with cuda.on(data.draw(st.sampled_from(readers))):
                        launch = x.arrival._signals.use()
                launches.append((source, tensor.fill_(math.nan), launch))
                if data.draw(st.booleans()):
                    x.restart()
                del x
                for _ in range(data.draw(st.integers(0, 4))):
                    data.draw(st.sampled_from(cuda.streams)).run(data.draw(st.integers(1, 5)))
                    for rows, landed, told in launches:
                        for chunk in [] if told is None else there(told):
                            here = slice(2 * chunk, 2 * chunk + 2)
                            assert torch.equal(landed[here], rows[here]), "signalled before it was copied"
            cuda.run()
            assert all(told is None or len(there(told)) == 3 for _, _, told in launches)
            assert all(torch.equal(rows, landed) for rows, landed, _ in launches)

    def test_a_lane_that_a_callers_own_stream_waits_on_is_dropped(self, cuda):
        """That stream may be gone when the lane's next filling comes behind its launches."""
        x, reader = self.stream(cuda), cuda.stream()
        reader.stream_id = reader.cuda_stream
        lane = x._landing._lane
        with cuda.on(reader):
            x.arrival._signals.use()
        x.wait()
        del x
        assert self.stream(cuda)._landing._lane is not lane

    def test_a_lane_is_dropped_before_its_epochs_are_no_32_bit_words(self, cuda, monkeypatch):
        monkeypatch.setattr(device_words, "_MOST_EPOCHS", 3)
        first = self.stream(cuda)
        lane = first._landing._lane
        del first
        second = self.stream(cuda)
        assert second._landing._lane is lane
        second.restart()
        assert second.arrival.epoch == 3
        del second
        assert self.stream(cuda)._landing._lane is not lane

    @pytest.mark.parametrize("whole", [True, False])
    def test_a_stream_in_a_cycle_leaves_a_lane_with_its_events(self, cuda, whole):
        """The garbage collector finalises a cycle's objects in any order: events ahead of what asks them, too."""
        x = self.stream(cuda)
        lane, raised = x._landing._lane, []
        events = lane.ready.handle, lane.landed.handle
        if not whole:
            x.arrival.fail(OSError("gone"))
        cycle = [x]
        cycle.append(cycle)
        del lane
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "unraisablehook", raised.append)
            del x, cycle
            gc.collect()
        assert not raised, raised[0].exc_value
        y = self.stream(cuda)
        assert ((y._landing._lane.ready.handle, y._landing._lane.landed.handle) == events) == whole
        assert torch.equal(y.wait(), y._source.tensor)

    def test_a_lane_whose_signals_cannot_be_made_is_given_up(self, cuda, monkeypatch):
        def fails(*given, **named):
            raise MemoryError("no words")

        chunked, source = Arrival.uniform(2, 3), pinned(cuda, matrix(6))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeviceSignals, "__init__", fails)
            with pytest.raises(MemoryError):
                onto(DEVICE, source, chunked, False)
        gc.collect()
        assert not lanes._lent
        x = onto(DEVICE, source, chunked, False)
        assert lanes._lent == {x._landing._lane}

    def test_a_late_signal_takes_no_word_of_the_stream_before_back(self, cuda):
        x = self.stream(cuda)
        launch = x.arrival._signals.use()
        x.restart()
        x.wait()
        lane = x._landing._lane
        del x
        gc.collect()
        assert any(lane in idle for idle in lanes._idle.values())
        signals = DeviceSignals(3, DEVICE, lane=lane)
        signals.set(0, epoch=1)
        cuda.run()
        assert there(launch) == [0, 1, 2]
        assert lane.words.eager.tolist() == [2, 2, 2]

    @pytest.mark.parametrize("spoilt", ["failed", "signalled elsewhere", "missing"])
    def test_a_lane_whose_last_epoch_is_not_whole_is_dropped(self, cuda, spoilt):
        x = self.stream(cuda)
        x.wait()
        lane = x._landing._lane
        if spoilt == "failed":
            x.arrival.fail(OSError("gone"))
        else:
            x.arrival.advance()
            for chunk in range(3 if spoilt == "signalled elsewhere" else 0):
                x.arrival.signal(chunk)
        del x
        assert self.stream(cuda)._landing._lane is not lane

    def test_an_iterators_failure_is_told_though_launches_of_the_lanes_last_stream_still_look(self, cuda):
        reader = cuda.stream()
        x = self.stream(cuda)
        with cuda.on(reader):
            earlier = x.arrival._signals.use()
            found = []
            reader.give(lambda: found.extend(there(earlier)))
        lane = x._landing._lane
        del x
        y = on_gpu(failing(), Chunks.uniform(6, 2))
        assert y._landing._lane is lane
        for thread in y._filling.threads:
            thread.join(LONG)
        launch = y.arrival._signals.use()
        for stream in reversed(cuda.streams):
            stream.run()
        cuda.run()
        assert found == [0, 1, 2]
        assert seen(launch) == ["here", "failed", "failed"]

    def test_at_most_so_many_wait(self, cuda):
        streams = [self.stream(cuda) for _ in range(12)]
        cuda.run()
        del streams
        gc.collect()
        (idle,) = lanes._idle.values()
        assert len(idle) == 8
        assert sum(one in cuda.streams for given in streams_module._idle.values() for one in given) == 4, (
            "the others' streams were given back"
        )

    def test_the_source_outlives_a_dropped_stream_until_a_filling_behind_its_copies(self, cuda):
        gone = []
        for _ in range(3):  # one behind the other on one lane, none of them copied
            x = self.stream(cuda)
            gone.append(weakref.ref(x._source.tensor))
            cuda._pinned.clear()
            lane = x._landing._lane
            del x
        assert [source() is None for source in gone] == [False] * 3
        lane.stream.run(2 + 6 + 1)  # of the first: waits, copies and signals, the event behind them is no work
        self.stream(cuda)
        assert [source() is None for source in gone] == [True, False, False], "each by its own copies"
        cuda.run()
        y = self.stream(cuda)
        assert [source() is None for source in gone] == [True] * 3
        events = cuda.driver._events
        count = len(events)
        y.wait()
        del y
        assert not landing._kept, "nothing is under way"
        for _ in range(5):
            z = self.stream(cuda)
            del z
            cuda.run()
        assert len(events) <= count + 1, "events are used again"

    def test_a_source_is_kept_though_the_driver_makes_no_event(self, cuda, monkeypatch):
        x, waited = self.stream(cuda), []

        def refuse():
            raise RuntimeError("the driver made no event")

        monkeypatch.setattr(cuda.driver, "create_event", refuse)
        monkeypatch.setattr(cuda.driver, "await_event", waited.append)
        landed = x._landing._lane.landed.handle
        del x
        assert waited == [landed]

    def test_a_source_that_is_dropped_in_a_capture_is_kept_until_the_next_filling(self, cuda):
        x = self.stream(cuda)
        source = weakref.ref(x._source.tensor)
        cuda._pinned.clear()
        with cuda.capture() as graph:
            del x
            gc.collect()
        assert source() is not None
        assert graph.work == []
        cuda.run()
        self.stream(cuda)
        assert source() is None


class TestDevice:
    @pytest.fixture
    def x(self, cuda):
        return on_gpu(pinned(cuda, matrix(6)), Chunks.uniform(6, 2))

    def test_copies_come_behind_what_reads_the_tensor_on_the_current_stream(self, cuda, x):
        reader, signals = cuda.stream(), x.arrival._signals
        x.wait()
        with cuda.on(reader):
            launch = signals.use()
            reader.give(lambda: None)  # a matmul
            x.restart()
        x._landing.stream.run()
        assert signals.state() == [False] * 3
        assert not x.done
        cuda.run()
        assert signals.state() == [True] * 3
        assert x.done
        assert launch.words.tolist() == [2] * 3

    def test_a_signal_of_the_next_epoch_comes_after_its_own(self, cuda, x):
        other = cuda.stream()
        x.arrival.advance()
        with cuda.on(other):
            for chunk in range(3):
                x.arrival.signal(chunk)
        other.run()
        cuda.run()
        assert x.arrival._signals.state() == [True] * 3

    def test_it_is_not_done_before_the_copies_are(self, cuda, x):
        assert not x.done
        for run, left, first in ((0, 3, 0), (4, 2, 1)):  # two waits, a copy, its signal
            x._landing.stream.run(run)
            with pytest.raises(
                TimeoutError, match=rf"after 0\.0 s {left} chunks not delivered, the first of them {first}"
            ):
                x.wait(0.0)
        assert torch.equal(x.wait(), matrix(6))
        assert x.done

    def test_its_memory_and_its_stream_outlive_it(self, cuda):
        x = on_gpu(pinned(cuda, matrix(6)), Chunks.uniform(6, 2))
        copies = x._landing.stream
        assert cuda.records(x.tensor, copies)
        gone, kept = weakref.ref(x), x.tensor
        del x
        gc.collect()
        assert gone() is None
        with cuda.on(cuda.stream()), on_gpu(pinned(cuda, matrix(6)), Chunks.uniform(6, 2)) as second:
            assert second._landing.stream is not copies, "it is still at work"
            cuda.run()
        assert torch.equal(kept, matrix(6))


class TestFilled:
    """Whether an op that is issued now, and waits for nothing, would find all rows."""

    def test_where_a_launch_in_front_waits_for_them_and_when_they_have_come(self, cuda):
        x, reader, other = on_gpu(pinned(cuda, matrix(6)), Chunks.uniform(6, 2)), cuda.stream(), cuda.stream()
        for _ in range(2):
            assert list(open_streams) == [x.tensor.data_ptr()]
            assert not x.is_filled_here
            with cuda.on(reader):
                x.arrival._signals.use()
                assert x.is_filled_here
            with cuda.on(other):
                assert not x.is_filled_here
            with cuda.capture():
                assert x.is_filled_here, "a replay comes when the graph's owner says so"
            cuda.run()
            assert x.is_filled_here
            assert not open_streams
            with cuda.on(reader):
                x.restart()  # the launch there waits for the epoch before
                assert not x.is_filled_here
        del x
        assert not open_streams

    @pytest.mark.parametrize("fed", ["by a thread", "at once"])
    def test_never_where_the_producer_has_failed(self, cuda, fed):
        x = on_gpu(failing() if fed == "by a thread" else pinned(cuda, matrix(6)), Chunks.uniform(6, 2))
        x._filling.join(None)  # runs the streams
        x.arrival.fail(OSError("gone"))
        cuda.run()
        assert x.done
        assert not x.is_filled_here

    def test_not_before_a_kernel_has_taken_the_copies(self, cuda):
        x = on_gpu(pinned(cuda, matrix(6)), Chunks.uniform(6, 2), by_kernel=True)
        cuda.run()
        assert not x.is_filled_here
        x.wait()
        assert x.is_filled_here
        x.restart()
        assert not x.is_filled_here
        with cuda.capture(), x.arrival._signals.copying():
            x.arrival._signals.take_copies(4)
        assert x.is_filled_here, "by the replays"


class TestErrors:
    """What a producer raised reaches the caller, and once only where it is reported."""

    @pytest.fixture
    def reports(self, cuda, monkeypatch):
        """A launch's report that the producer of these signals failed, on the device."""
        made, count = Channel(DEVICE), [0]
        monkeypatch.setattr(channels, "_channels", {None: made})

        def report(key: int) -> None:
            record = Record(FAILED, 0, 0, 0, 0, key, 1, 0, -1, 0, 0, 10**6, 10**9)
            at = 16 * count[0]
            count[0] += 1
            made.records[at + 1 : at + 1 + len(record)] = torch.tensor(record)
            made.records[at] = count[0]

        return report

    @pytest.mark.parametrize("first", ["waited for", "reported"])
    def test_waited_for_and_reported(self, reports, first):
        with on_gpu(failing(), Chunks.uniform(6, 2)) as x:
            assert x._filling.join(None)
            if first == "reported":
                reports(x.arrival.key)
                with pytest.raises(OSError, match="the disk is gone"):
                    ts.check()
            with pytest.raises(OSError, match="the disk is gone"):  # in both orders: there is no tensor to return
                x.wait()
            reports(x.arrival.key)
            ts.check()

    def test_reported_after_the_stream_was_dropped(self, reports):
        x = on_gpu(failing(), Chunks.uniform(6, 2))
        assert x._filling.join(None)
        key = x.arrival.key
        del x
        gc.collect()
        reports(key)
        with pytest.raises(OSError, match="the disk is gone"):
            ts.check()
        ts.check()

    def test_what_has_landed_is_there_and_the_rest_is_failed(self, cuda):
        with on_gpu(failing(), Chunks.uniform(6, 2)) as x:
            launch = x.arrival._signals.use()
            x._filling.join(None)
            cuda.run()
            assert launch.words.tolist() == [1, -1, -1]

    def test_closed_in_the_second_epoch_while_a_launch_of_the_first_still_looks(self, cuda):
        go, rewound, reader, found = threading.Event(), threading.Event(), cuda.stream(), []
        source = replace(
            tensor_source(matrix(6), onward=True), rewind=rewound.set,
            claim=lambda begin, end: lambda: go.wait(LONG) if rewound.is_set() else None,
        )  # fmt: skip
        x = on_gpu(source, Chunks.uniform(6, 2))
        launch = x.arrival._signals.use()
        x.wait()
        with cuda.on(reader):
            reader.wait_stream(cuda.streams[0])
            x.arrival._signals.use()
            reader.give(lambda: found.extend(launch.words.tolist()))
            x.restart()
        x._filling.stop.set()
        go.set()
        for thread in x._filling.threads:
            thread.join(LONG)
        for stream in reversed(cuda.streams):
            stream.run()
        cuda.run()
        assert min(found) >= 1
        assert isinstance(x.arrival.error, ProducerStopped)

    def test_a_producer_that_cannot_even_say_that_it_failed_stops_the_others(self, monkeypatch):
        def fail(error, *, epoch=None):
            raise RuntimeError("the driver made no stream: code 201")

        arrival, died = ts.Arrival.uniform(2, 3), []
        monkeypatch.setattr(arrival, "fail", fail)
        monkeypatch.setattr(threading, "excepthook", lambda arguments: died.append(str(arguments.exc_value)))
        stream = Stream(arrival, failing())
        stream._filling.join(LONG)
        assert died == ["the driver made no stream: code 201"]
        assert stream._filling.stop.is_set()
