"""`stream_in`: each source fills its tensor chunk by chunk and signals in order; errors come out; no thread stays."""

# ruff: noqa: E501  (tables of messages: each in one piece, so that it can be searched for)

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilestream as ts
from strategies import chunkings
from tilestream.arrival import Outcome, Signals
from tilestream.arrival.files import RangeReader, find_matrix
from tilestream.arrival.sources import Source, file_source, tensor_source
from tilestream.arrival.stream import (
    CHUNK_BYTES,
    CHUNK_SECONDS,
    LINK_BYTES,
    Stream,
    default_rows_per_chunk,
    gpu_rows_per_chunk,
    stream_in,
)

LONG = 300.0
F32 = torch.float32


def producers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("tilestream-producer")]


@pytest.fixture(autouse=True)
def no_producer_left():
    yield
    for thread in producers():
        thread.join(LONG)
    assert producers() == []


def refused(error, message):
    return pytest.raises(error, match=f"^{re.escape(message)}$")


def matrix(rows=50, cols=6, dtype=F32, seed=0) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One matrix, bytes enough for several pages, by every kind of source: the source, its name there; the matrix."""
    np, safetensors = pytest.importorskip("numpy"), pytest.importorskip("safetensors.torch")
    folder, x = tmp_path_factory.mktemp("saved"), matrix(500, 19)
    safetensors.save_file({"other": matrix(3, 3), "x": x}, folder / "x.safetensors")
    np.save(folder / "x.npy", x.numpy())
    return {"safetensors": (folder / "x.safetensors", "x"), "npy": (folder / "x.npy", None), "tensor": (x, None)}, x


def open_descriptors(path) -> list[int]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # listing the folder opens it
            if link.readlink() == path.resolve():
                found.append(int(link.name))
    return found


class Steps:
    """A stream of six chunks, each of whose jobs waits to be let go; for what happens between chunks."""

    def __init__(self, readers: int = 1, fail: dict[int, BaseException] | None = None, go: bool = False) -> None:
        self.fail = fail or {}
        self.go = [threading.Event() for _ in range(6)]
        self.at = [threading.Event() for _ in range(6)]
        self.ended = self.closed = 0
        self.end_waits = threading.Event()
        self.end_waits.set()
        self.let_go(6 if go else 0)
        self.source = Source(
            torch.zeros(6, 2), lambda: "steps", self._claim, end=self._end, close=self._close, readers=readers
        )
        self.stream = Stream(ts.Arrival.uniform(1, 6), self.source)

    def let_go(self, count: int = 6) -> None:
        for go in self.go[:count]:
            go.set()

    def let_go_of(self, chunk: int) -> None:
        assert self.at[chunk].wait(LONG)
        self.go[chunk].set()

    def _claim(self, begin: int, end: int):
        def job() -> None:
            self.at[begin].set()
            assert self.go[begin].wait(LONG)
            if begin in self.fail:
                raise self.fail[begin]
            self.source.tensor[begin:end] = begin + 1

        return job

    def _end(self) -> None:
        self.ended += 1
        assert self.end_waits.wait(LONG)

    def _close(self) -> None:
        self.closed += 1


@pytest.fixture
def steps():
    """``steps(readers, fail, go)``: see `Steps`; ended after the test."""
    made: list[Steps] = []

    def make(*how, **more) -> Steps:
        made.append(Steps(*how, **more))
        return made[-1]

    yield make
    for one in made:
        one.end_waits.set()
        one.let_go()
        one.stream.close()


def wait_for(stream: Stream, chunk: int) -> Outcome:
    """Sleep until the chunk is signalled, or its producer fails."""
    arrival = stream.arrival
    return Signals.by_key(arrival.key).wait(chunk, arrival.epoch, time.perf_counter() + LONG, lambda: False)


class TestSources:
    @pytest.mark.parametrize("kind", ["safetensors", "npy"])
    @pytest.mark.parametrize("direct", [None, False])
    @pytest.mark.parametrize("rows_per_chunk", [None, 1, 7, 54, 500, 501])
    def test_files(self, saved, kind, direct, rows_per_chunk):
        (path, name), x = saved[0][kind], saved[1]
        with ts.stream_in(path, tensor=name, direct=direct, rows_per_chunk=rows_per_chunk) as stream:
            assert torch.equal(stream.wait(LONG), x)
            assert stream.tensor.dtype == x.dtype

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_other_dtypes_from_a_file(self, tmp_path, dtype):
        safetensors = pytest.importorskip("safetensors.torch")
        x = matrix(333, 7, dtype)
        safetensors.save_file({"pad": torch.zeros(3, dtype=torch.uint8), "x": x}, tmp_path / "x.safetensors")
        with ts.stream_in(tmp_path / "x.safetensors", rows_per_chunk=10, pivot=11) as stream:
            assert torch.equal(stream.wait(LONG), x)

    @pytest.mark.parametrize("shape", [(0, 4), (4, 0), (3, 0, 2)])
    def test_empty_matrices(self, shape, tmp_path):
        safetensors = pytest.importorskip("safetensors.torch")
        safetensors.save_file({"x": torch.zeros(shape)}, tmp_path / "x.safetensors")
        blocks = ts.stream_in(iter([torch.zeros(shape)] if shape[0] else []), shape=shape, dtype=F32)
        for stream in (ts.stream_in(tmp_path / "x.safetensors"), ts.stream_in(torch.zeros(shape)), blocks):
            with stream:
                assert stream.wait(LONG).shape == shape

    @pytest.mark.parametrize(
        "x",
        [
            matrix(), matrix().t(), matrix(24).view(2, 3, 4, 6), matrix(12).view(3, 4, 6).transpose(0, 1),
            matrix(20)[::2], matrix().requires_grad_(),
        ],
        ids=["plain", "transposed", "4-D", "3-D, odd strides", "every other row", "requires grad"],
    )  # fmt: skip
    def test_tensors_are_copied(self, x):
        with ts.stream_in(x, rows_per_chunk=5, pivot=1) as stream:
            got = stream.wait(LONG).clone()
            assert torch.equal(got, x)
            assert not stream.tensor.requires_grad
            x.detach().zero_()
            assert torch.equal(stream.tensor, got)

    def test_a_tensor_that_goes_on_to_a_gpu_is_read_where_it_is(self):
        x = matrix()
        source = tensor_source(x, onward=True)
        assert source.tensor is x
        assert source.readers == 1, "that pins what it reads"

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    @pytest.mark.parametrize(
        ("made", "what"),
        [
            (lambda: torch.nested.nested_tensor([torch.ones(2, 3)]), "is nested"),
            (lambda: torch.ones(2, 3).to_sparse(), "has layout torch.sparse_coo"),
        ],
    )
    def test_what_is_not_dense_is_refused(self, made, what):
        with pytest.raises(TypeError, match=f"^stream_in: the source {what}; a dense tensor streams in"):
            ts.stream_in(made())

    @given(st.data(), st.integers(1, 60))
    def test_iterators_of_odd_blocks(self, data, rows):
        """It brings the pivot's rows first."""
        x = matrix(rows)
        cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=6)))
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]
        chunks = data.draw(chunkings(rows))
        pivot = data.draw(st.integers(0, chunks.count - 1))
        blocks = x.roll(-chunks.bounds[pivot], 0).split(sizes)
        with ts.stream_in(blocks, shape=(rows, 6), dtype=x.dtype, bounds=chunks.bounds, pivot=pivot) as stream:
            assert torch.equal(stream.wait(LONG), x)

    def test_an_iterator_of_single_rows_and_of_more_dimensions(self):
        x = matrix(12)
        blocks = [x[0], x[1:7].view(2, 3, 6), x[7:12]]
        with ts.stream_in(blocks, shape=(3, 4, 6), dtype=x.dtype) as stream:
            assert torch.equal(stream.wait(LONG), x.view(3, 4, 6))

    def test_an_iterator_is_asked_for_no_more_than_it_takes(self):
        yielded = []

        def endless():
            while True:
                yielded.append(1)
                yield torch.ones(2, 3)

        with ts.stream_in(endless(), shape=(6, 3), dtype=F32, rows_per_chunk=2) as stream:
            stream.wait(LONG)
        assert len(yielded) == 3

    def test_what_a_stream_says_of_itself(self, saved):
        (path, name), x = saved[0]["safetensors"], saved[1]
        with ts.stream_in(path, tensor=name, rows_per_chunk=100, direct=False) as stream:
            stream.wait(LONG)
            assert stream.explain() == "x.safetensors: x [500, 19] float32, through the page cache (asked to); 500 rows in 5 chunks"  # fmt: skip
            assert repr(stream).startswith("Stream([500, 19], torch.float32, Arrival(rows_per_chunk=100, num_chunks=5")
            assert stream.done
            assert 0 <= stream.cpu_seconds < LONG
        with ts.stream_in(x) as stream:
            assert stream.explain() == "a CPU tensor [500, 19] float32, copied; 500 rows in 4 chunks"
        with ts.stream_in([x], shape=x.shape, dtype=x.dtype) as stream:
            assert stream.explain() == "an iterator of blocks for [500, 19] float32; 500 rows in 4 chunks"


class TestSignals:
    def test_chunks_are_signalled_after_they_were_written_and_not_before(self, steps):
        one = steps()
        for chunk in range(6):
            assert one.at[chunk].wait(LONG)
            assert not one.stream.arrival.arrived(chunk)
            one.go[chunk].set()
            assert wait_for(one.stream, chunk) is Outcome.ARRIVED
            assert one.stream.tensor[chunk].tolist() == [chunk + 1] * 2
        one.stream.wait(LONG)
        assert one.ended == 1

    def test_two_readers_signal_in_order(self, steps):
        one = steps(readers=2)
        assert one.at[0].wait(LONG)
        one.let_go_of(1)
        assert one.at[2].wait(LONG), "the second reader goes on"
        assert not one.stream.arrival.arrived(1), "a page that both share is read with chunk 0"
        one.go[0].set()
        assert wait_for(one.stream, 1) is Outcome.ARRIVED
        one.let_go()
        one.stream.wait(LONG)
        assert one.ended == 1, "the end is looked at once"
        assert one.stream.arrival.times == tuple(sorted(one.stream.arrival.times))

    @pytest.mark.parametrize("pivot", range(5))
    def test_from_the_pivot_on_and_around(self, saved, pivot):
        (path, name), x = saved[0]["safetensors"], saved[1]
        with ts.stream_in(path, tensor=name, rows_per_chunk=100, pivot=pivot) as stream:
            assert torch.equal(stream.wait(LONG), x)
            times = stream.arrival.times
        assert [times[(pivot + i) % 5] for i in range(5)] == sorted(times)

    @pytest.mark.parametrize("direct", [None, False])
    def test_a_signalled_chunk_is_there_and_stays(self, saved, direct):
        # Tiny chunks inside shared pages, from the middle on: each is checked, then scribbled on, at its signal.
        (path, name), x = saved[0]["safetensors"], saved[1]
        with ts.stream_in(path, tensor=name, rows_per_chunk=3, pivot=83, direct=direct) as stream:
            count = stream.arrival.num_chunks
            for step in range(count):
                chunk = (83 + step) % count
                assert wait_for(stream, chunk) is Outcome.ARRIVED
                rows = slice(*stream.arrival.chunks(500).range_of(chunk))
                assert torch.equal(stream.tensor[rows], x[rows])
                stream.tensor[rows] = -1.0
            stream.wait(LONG)
            assert (stream.tensor == -1.0).all()


class TestRestart:
    @pytest.mark.parametrize("closed", [False, True])
    @pytest.mark.parametrize("kind", ["safetensors", "npy", "tensor"])
    def test_fills_the_same_tensor_once_more(self, saved, kind, closed):
        (path, name), x = saved[0][kind], saved[1]
        with ts.stream_in(path, tensor=name, rows_per_chunk=64, pivot=3) as stream:
            stream.wait(LONG)
            tensor, how = stream.tensor, stream.explain()
            for round_ in (2, 3):
                if closed:
                    stream.close()
                tensor.fill_(float("nan"))
                stream.restart()
                assert stream.arrival.epoch == round_
                assert torch.equal(stream.wait(LONG), x)
                assert stream.tensor is tensor
                assert stream.explain() == how

    def test_not_while_the_producer_is_at_work_and_nothing_has_arrived_in_the_new_round(self, steps):
        one = steps()
        message = "stream_in: restart() while the producer is at work; wait() for it or close() it first"
        with refused(RuntimeError, message):
            one.stream.restart()
        one.let_go()
        one.stream.wait(LONG)
        for go in one.go:
            go.clear()
        one.stream.restart()
        assert not any(one.stream.arrival.arrived(chunk) for chunk in range(6))
        one.let_go()
        one.stream.wait(LONG)

    def test_an_iterator_is_read_once(self):
        with ts.stream_in([matrix()], shape=(50, 6), dtype=F32) as stream:
            stream.wait(LONG)
            with refused(ValueError, "stream_in: an iterator is read once; make a new stream"):
                stream.restart()
            assert stream.arrival.arrived(0), "and the round before still stands"

    def test_after_a_failure(self, steps):
        one = steps(fail={2: OSError("disk")}, go=True)
        with pytest.raises(OSError, match="disk"):
            one.stream.wait(LONG)
        one.fail.clear()
        one.stream.restart()
        assert one.stream.wait(LONG)[5, 0] == 6


class TestEnds:
    def test_wait_gives_up_after_its_timeout(self, steps):
        one = steps()
        one.end_waits.clear()
        one.go[0].set()
        assert one.at[1].wait(LONG)
        with refused(TimeoutError, "stream_in: after 0.01 s 5 chunks not delivered, the first of them 1"):
            one.stream.wait(0.01)
        one.let_go()
        assert wait_for(one.stream, 5) is Outcome.ARRIVED
        with refused(TimeoutError, "stream_in: after 0.01 s not ended"):
            one.stream.wait(0.01)
        one.end_waits.set()
        assert one.stream.wait(LONG) is one.stream.tensor

    @pytest.mark.parametrize("timeout", ["5", float("nan"), float("inf")])
    def test_a_timeout_is_a_number_of_seconds(self, timeout):
        """No comparison with NaN is ever true: a wait until then would not end."""
        with ts.stream_in(torch.ones(2, 2)) as stream:
            for call in (stream.wait, stream.close):
                with refused(
                    ValueError,
                    f"stream_in: timeout={timeout!r}; it must be a finite number of seconds, or None for no bound",
                ):
                    call(timeout)
            stream.wait(LONG)

    def test_close_stops_after_the_chunk_it_is_at(self, steps):
        one = steps()
        assert one.at[0].wait(LONG)
        assert not one.stream.close(timeout=0.01), "still at its chunk"
        assert one.closed == 0, "nothing is let go of while it is in use"
        one.go[0].set()
        assert one.stream.close()
        assert one.closed == 1
        assert one.stream.arrival.arrived(0)
        assert not one.stream.arrival.arrived(1)
        with refused(ts.ProducerStopped, "stream_in: closed before chunk 1 was delivered"):
            one.stream.wait(LONG)
        assert wait_for(one.stream, 1) is Outcome.FAILED
        assert isinstance(one.stream.arrival.error, ts.TilestreamError)

    def test_close_after_the_end_changes_nothing(self):
        with ts.stream_in(matrix()) as stream:
            stream.wait(LONG)
            assert stream.close()
            assert stream.close()
            assert torch.equal(stream.wait(LONG), matrix())

    def test_the_file_is_closed_when_it_has_been_read_though_the_stream_is_not(self, saved):
        path, name = saved[0]["safetensors"]
        stream = ts.stream_in(path, tensor=name)
        for _ in range(3):
            stream.wait(LONG)
            assert open_descriptors(path) == []
            stream.restart()
        stream.wait(LONG)
        assert open_descriptors(path) == []

    def test_leaving_the_block_closes(self, steps):
        one = steps()
        with one.stream:
            one.go[0].set()
            one.let_go_of(1)
            one.go[2].set()
        assert producers() == []
        assert one.closed == 1

    def test_a_producer_blocked_in_foreign_code_is_left_to_end_by_itself(self):
        let_go = threading.Event()

        def never():
            let_go.wait(LONG)
            yield torch.ones(2, 3)

        stream = ts.stream_in(never(), shape=(2, 3), dtype=F32, rows_per_chunk=1)
        assert not stream.close(timeout=0.01)
        assert not stream.done
        let_go.set()
        assert stream.close()

    def test_an_iterator_that_closes_its_own_stream(self):
        box, ready = [], threading.Event()

        def blocks():
            ready.wait(LONG)
            yield torch.ones(1, 3)
            box[0].close()
            yield torch.ones(1, 3)
            yield torch.ones(1, 3)

        stream = ts.stream_in(blocks(), shape=(3, 3), dtype=F32, rows_per_chunk=1)
        box.append(stream)
        ready.set()
        with pytest.raises(ts.ProducerStopped, match="closed before chunk 2"):
            stream.wait(LONG)
        stream.close()


class TestErrors:
    @pytest.mark.parametrize(
        ("blocks", "error", "message"),
        [
            ([torch.ones(5, 3)], ValueError, "stream_in: the iterator ended early; it was to yield 6 rows"),
            ([], ValueError, "stream_in: the iterator ended early; it was to yield 6 rows"),
            ([torch.ones(4, 3), torch.ones(4, 3)], ValueError, "stream_in: the iterator's last block has 2 rows more than shape= says"),
            ([torch.ones(6, 4)], ValueError, "stream_in: the iterator yielded a block [6, 4] torch.float32; rows are 3 long, torch.float32"),
            ([torch.ones(6, 3).double()], ValueError, "stream_in: the iterator yielded a block [6, 3] torch.float64; rows are 3 long, torch.float32"),
            ([torch.ones(2)], ValueError, "stream_in: the iterator yielded a block [2] torch.float32; rows are 3 long, torch.float32"),
            ([torch.tensor(1.0)], ValueError, "stream_in: the iterator yielded a single number; it yields blocks of rows"),
            ([[1.0, 2.0, 3.0]], TypeError, "stream_in: the iterator yielded a list; it yields tensors, blocks of rows"),
            ([torch.ones(3, 3), None], TypeError, "stream_in: the iterator yielded a NoneType; it yields tensors, blocks of rows"),
        ],
    )  # fmt: skip
    def test_wrong_blocks(self, blocks, error, message):
        with ts.stream_in(iter(blocks), shape=(6, 3), dtype=F32, rows_per_chunk=2) as stream:  # noqa: SIM117
            with refused(error, message):
                stream.wait(LONG)

    def test_an_exception_of_the_iterator_is_raised_where_the_chunk_is_waited_for(self):
        class MineError(Exception):
            pass

        def blocks():
            yield torch.ones(2, 3)
            raise MineError("mine")

        with ts.stream_in(blocks(), shape=(6, 3), dtype=F32, rows_per_chunk=2) as stream:
            assert wait_for(stream, 0) is Outcome.ARRIVED
            assert wait_for(stream, 1) is Outcome.FAILED
            with pytest.raises(MineError, match="mine"):
                stream.wait(LONG)
            assert isinstance(stream.arrival.error, MineError)
            assert not stream.arrival.arrived(1)
            with pytest.raises(MineError, match="mine"):
                ts.matmul(stream.tensor, torch.ones(3, 8), arrival=stream.arrival, deadline=LONG)

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()], ids=repr)
    def test_whatever_ends_the_producer_reaches_the_caller(self, steps, error):
        with pytest.raises(type(error)):
            steps(fail={1: error}, go=True).stream.wait(LONG)

    def test_the_first_error_of_two_readers_counts_and_no_chunk_behind_it_is_signalled(self, steps):
        one = steps(readers=2, fail={0: OSError("disk")})
        assert one.at[1].wait(LONG)
        one.go[0].set()
        assert wait_for(one.stream, 0) is Outcome.FAILED
        one.go[1].set()  # this reader finds only now that the round is over
        with pytest.raises(OSError, match="disk"):
            one.stream.wait(LONG)
        assert not any(one.stream.arrival.arrived(chunk) for chunk in range(6))

    def test_a_file_that_is_cut_off_while_it_is_read(self, tmp_path):
        np = pytest.importorskip("numpy")
        path = tmp_path / "x.npy"
        np.save(path, np.zeros((4000, 64), "f4"))
        source = file_source(RangeReader(find_matrix(path), False))
        source.readers = 1
        os.truncate(path, 500_000)
        with Stream(ts.Arrival.uniform(100, 40), source) as stream:
            with pytest.raises(EOFError, match=r"x\.npy: ends at byte 500000, \d+ bytes early"):
                stream.wait(LONG)
            assert stream.arrival.arrived(18)
            assert not stream.arrival.arrived(19)


CPU_TENSOR = "means nothing for a CPU tensor [50, 6] float32, copied"
NO_SIZE = "stream_in: an iterable source does not say how large it is: give shape= and dtype="


class TestRefused:
    @pytest.mark.parametrize(
        ("source", "arguments", "error", "message"),
        [
            (matrix(), {"rows_per_chunk": 0}, ValueError, "stream_in: rows_per_chunk=0; a chunk has at least one row"),
            (matrix(), {"rows_per_chunk": -1}, ValueError, "stream_in: rows_per_chunk=-1; a chunk has at least one row"),
            (matrix(), {"rows_per_chunk": 5, "bounds": [0, 50]}, ValueError, "stream_in: rows_per_chunk and bounds; chunks are uniform or ragged, not both"),
            (matrix(), {"rows_per_chunk": 10, "pivot": 5}, ValueError, "pivot=5: the raster starts from one of the 5 chunks, 0 to 4"),
            (matrix(), {"pivot": -1}, ValueError, "pivot=-1: the raster starts from one of the 4 chunks, 0 to 3"),
            (matrix(), {"bounds": [0, 49]}, ValueError, "arrival: its bounds end at row 49, the input has 50 rows; the last bound is the number of rows"),
            (matrix(), {"bounds": [0]}, ValueError, "bounds=[0]: no chunk; give the first row of each chunk and then the number of rows"),
            (matrix(), {"tensor": "x"}, ValueError, f"stream_in: tensor='x' {CPU_TENSOR}"),
            (matrix(), {"direct": False}, ValueError, f"stream_in: direct=False {CPU_TENSOR}"),
            (matrix(), {"shape": (50, 6)}, ValueError, f"stream_in: shape=(50, 6) {CPU_TENSOR}"),
            (matrix(), {"dtype": F32}, ValueError, f"stream_in: dtype=torch.float32 {CPU_TENSOR}"),
            (matrix(), {"copies": "sm"}, ValueError, "stream_in: copies='sm'; it must be 'engine' or 'kernel'"),
            (matrix(), {"copies": "kernel"}, ValueError, "stream_in: copies='kernel' of a Tensor to cpu; a kernel copies a pinned CPU tensor to its GPU: give one, or copies='engine'"),
            (torch.ones(3), {}, ValueError, "stream_in: the source has shape [3]; a matrix has at least 2 dimensions"),
            (torch.tensor(1.0), {}, ValueError, "stream_in: the source has shape []; a matrix has at least 2 dimensions"),
            (torch.ones(2, 2, device="meta"), {}, ValueError, "stream_in: the source is on meta; what streams in is on the CPU: source.cpu()"),
            (3, {}, TypeError, "stream_in: source is an int; it must be a file's path, a CPU tensor or an iterable of tensors"),
            (None, {}, TypeError, "stream_in: source is None; it must be a file's path, a CPU tensor or an iterable of tensors"),
            ([], {}, ValueError, NO_SIZE),
            ([], {"shape": (2, 2)}, ValueError, NO_SIZE),
            ([], {"shape": (4,), "dtype": F32}, ValueError, "stream_in: shape=[4]; a matrix has at least 2 dimensions, none negative"),
            ([], {"shape": (4, -1), "dtype": F32}, ValueError, "stream_in: shape=[4, -1]; a matrix has at least 2 dimensions, none negative"),
            ([], {"shape": (4, 1), "dtype": F32, "tensor": "x"}, ValueError, "stream_in: tensor='x' means nothing for an iterator of blocks for [4, 1] float32"),
        ],
    )  # fmt: skip
    def test_before_anything_is_started(self, source, arguments, error, message):
        before = producers()
        with refused(error, message):
            ts.stream_in(source, **arguments)
        assert producers() == before == []

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"pivot": 99}, r"pivot=99"), ({"bounds": [0, 1]}, "its bounds end at row 1"), ({"rows_per_chunk": 0}, "="),
            ({"shape": (500, 19)}, r"^stream_in: shape=\(500, 19\) means nothing for x\.safetensors: x \[500, 19\] float32, "),
        ],
    )  # fmt: skip
    def test_no_file_stays_open(self, saved, arguments, message):
        path, name = saved[0]["safetensors"]
        with pytest.raises(ValueError, match=message):
            ts.stream_in(path, tensor=name, **arguments)
        left = open_descriptors(path)
        for descriptor in left:
            os.close(descriptor)
        assert left == []


@pytest.mark.parametrize("direct", [None, True, False])
@pytest.mark.parametrize("first", [1, 2, 3, 4095])
def test_a_tensor_that_begins_at_any_byte_of_a_file(tmp_path, first, direct):
    """The safetensors format allows it: the bytes are read to where elements are aligned."""
    x = torch.randn(3000, 7)
    header = json.dumps(
        {"x": {"dtype": "F32", "shape": [3000, 7], "data_offsets": [first, first + 4 * 21000]}}
    ).encode()
    header += b" " * (-len(header) % 8)
    path = tmp_path / "x.safetensors"
    data = bytes(range(256)) * 16
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[:first] + x.numpy().tobytes() + data)
    with ts.stream_in(path, rows_per_chunk=110, pivot=3, direct=direct) as stream:
        assert torch.equal(stream.wait(300), x)
        assert stream.tensor.data_ptr() % 4 == 0
        assert re.search(r"through the page cache \(byte \d+ is no multiple of its elements' size\)", stream.explain())
        stream.restart()
        assert torch.equal(stream.wait(300), x)


@pytest.mark.parametrize(
    ("rows", "row_bytes", "expected"),
    [
        (0, 4, 1),
        (1, 4, 1),
        (100, 4, 25),  # four chunks at least
        (4096, 16384, 512),  # 64 MiB in 8
        (10**6, 2**20, 977),  # 1024 chunks at most
        (5, 2 * CHUNK_BYTES, 1),
    ],
)
def test_default_chunks_are_about_eight_mebibytes(rows, row_bytes, expected):
    assert default_rows_per_chunk(rows, row_bytes) == expected


@given(st.integers(1, 10**9), st.integers(1, 10**6))
def test_default_chunks_are_four_to_1024(rows, row_bytes):
    size = default_rows_per_chunk(rows, row_bytes)
    assert 1 <= size <= rows
    assert -(-rows // size) <= 1024
    assert -(-rows // size) >= min(rows, 3), "four, or three where the rounding up leaves the last without rows"


@pytest.mark.parametrize(
    ("rows", "row_bytes", "expected"),
    [
        (16384, 16384, 768),  # 268 MB, 4.9 ms: 22 chunks
        (8192, 16384, 512),  # 134 MB: 16
        (65536, 8192, 2048),  # 537 MB, at the bound of 32
        (4096, 8192, 512),  # 34 MB, 0.6 ms: 8
        (4096, 28672, 256),
        (1 << 20, 1 << 16, 1 << 15),  # 69 GB: still 32
        (1024, 1024, 512),  # 1 MB, 19 us: two
        (128, 1 << 20, 8),  # few rows, and long: 16
        (4097, 281601, 192),  # 33 chunks of 128 are one too many, and 17 of 256 cost nearly twice as much
        (0, 8, 1), (5, 0, 5), (1, 1 << 30, 1),
    ],
)  # fmt: skip
def test_default_chunks_to_a_gpu_are_as_few_as_the_size_is_worth(rows, row_bytes, expected):
    assert gpu_rows_per_chunk(rows, row_bytes) == expected


@given(st.integers(1, 10**7), st.integers(1, 10**6))
def test_default_chunks_to_a_gpu_cost_little_more_than_the_best_number_of_them(rows, row_bytes):
    size, seconds = gpu_rows_per_chunk(rows, row_bytes), rows * row_bytes / LINK_BYTES
    assert 1 <= size <= rows
    assert -(-rows // size) <= 32

    def cost(per: int) -> float:
        return -(-rows // per) * CHUNK_SECONDS + seconds * per / rows

    best = min(cost(-(-rows // count)) for count in range(1, min(rows, 32) + 1))
    # A multiple of 256 is never more than a half off, where there are rows for two chunks.
    assert cost(size) <= 1.5 * best + CHUNK_SECONDS


def test_the_public_name_is_this_one():
    assert ts.stream_in is stream_in


@pytest.mark.parametrize("kind", ["npy", "tensor"])
def test_a_gradient_behind_a_restart_is_refused(saved, kind):
    """What is copied for the launch that saved the tensor is no modification; new contents are one."""
    (source, name), x = saved[0][kind], saved[1]
    w = torch.randn(19, 3, requires_grad=True)
    with stream_in(source, tensor=name, rows_per_chunk=200) as stream:
        y = ts.matmul(stream, w)
        (found,) = torch.autograd.grad(y.sum(), w, retain_graph=True)
        torch.testing.assert_close(found, x.sum(0)[:, None].expand(19, 3))
        stream.wait(LONG)
        stream.restart()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y.sum(), w)
