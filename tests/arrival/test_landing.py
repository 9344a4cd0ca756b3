"""Where a stream's rows land beyond the source's tensor: in order, whole, and signalled after they were copied."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from device_builders import on_gpu, pinned
from hypothesis import given, settings
from hypothesis import strategies as st

import tilestream as ts
from fake_cuda import DEVICE, fake_cuda
from strategies import chunkings
from tilestream.arrival.files import RangeReader, find_matrix
from tilestream.arrival.landing import DeviceLanding, Landing
from tilestream.arrival.sources import as_rows, file_source, iterator_source, tensor_source
from tilestream.arrival.stream import Stream
from tilestream.core.chunks import Chunks
from tilestream.core.error_record import FAILED, Record
from tilestream.core.errors import ProducerStopped
from tilestream.runtime import channel as channels
from tilestream.runtime.channel import Channel

LONG = 30.0


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
    def test_the_last_copy_is_torchs_so_that_its_allocator_knows_of_the_source(self, cuda, monkeypatch, bounds, pivot):
        landed, land = [], DeviceLanding.land
        monkeypatch.setattr(DeviceLanding, "land", lambda *a: (landed.append(a[1:]), land(*a)))
        stream = on_gpu(pinned(cuda, matrix(bounds[-1])), Chunks(bounds), pivot)
        order = [(pivot + step) % (len(bounds) - 1) for step in range(len(bounds) - 1)]
        with_rows = [bounds[c : c + 2] for c in order if bounds[c] < bounds[c + 1]]
        assert landed == with_rows[-1:]
        stream.wait()


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
        with on_gpu(pinned(cuda, matrix(6)), Chunks.uniform(6, 2)) as second:
            assert second._landing.stream is not copies, "it is still at work"
            cuda.run()
        assert torch.equal(kept, matrix(6))


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
