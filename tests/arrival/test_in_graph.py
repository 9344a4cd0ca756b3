"""Streams in CUDA graphs: each replay copies and signals anew, in every order that the graph's nodes allow.

A graph is played here node by node: any node whose predecessors have ended may be next, a copy is begun and ended with
others between, and a launch polls its chunks after each step, as a kernel beside them does.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import time
import weakref

import pytest
import torch
from device_builders import on_gpu, pinned, refused, there
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_cuda import DEVICE, Copy, FakeCuda, Graph, fake_cuda
from strategies import chunkings
from tilestream.arrival import device, landing
from tilestream.arrival.device import GateWords
from tilestream.arrival.device_words import REPLAYED
from tilestream.arrival.flat import Awaited, FlatArrival
from tilestream.arrival.sources import iterator_source, tensor_source
from tilestream.arrival.stream import Stream
from tilestream.core.chunks import Chunks
from tilestream.ops import streamed
from tilestream.runtime import graphs
from tilestream.runtime.sequence import CopyIn, Sequence

ROWS = 7


@pytest.fixture
def cuda():
    with fake_cuda() as made:
        yield made


class Launch:
    """A captured launch: at each `poll` it reads the chunks that its words say are there. Begun by its node."""

    def __init__(self, stream: Stream, told: GateWords | None = None, patient: bool = True) -> None:
        self.told = stream.arrival._signals.use() if told is None else told
        self._stream, self.patient = stream, patient
        self.read: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        self.read = {}

    def poll(self) -> bool:
        """Whether the launch has ended."""
        for chunk in there(self.told):
            if chunk not in self.read:
                begin, end = self._stream._chunks.range_of(chunk)
                self.read[chunk] = self._stream.tensor[begin:end].clone()
        return len(self.read) == self._stream._chunks.count or not self.patient

    def check(self, want: torch.Tensor) -> None:
        """All chunks were read, and their rows were those of ``want``."""
        chunks = self._stream._chunks
        assert sorted(self.read) == list(range(chunks.count)), "a chunk was not signalled"
        for chunk, rows in self.read.items():
            assert torch.equal(rows, want[slice(*chunks.range_of(chunk))]), f"chunk {chunk} is another's"


def launch(cuda: FakeCuda, stream: Stream, patient: bool = True) -> Launch:
    """A launch on the current stream, captured."""
    made = Launch(stream, patient=patient)
    cuda.current.give(made)
    return made


def play(graph: Graph, pick) -> None:
    """One replay. ``pick(n)``: which of ``n`` steps is next."""
    left, ended, running = set(range(len(graph.work))), set(), {}
    while left or running:
        # A launch ends at the first look at which it can: so it is looked at after each step, and no step of its own.
        for node, held in list(running.items()):
            if isinstance(held, Launch) and held.poll():
                ended.add(node)
                del running[node]
        steps = [*(node for node in left if graph.behind[node] <= ended),
                 *(node for node, held in running.items() if not isinstance(held, Launch))]  # fmt: skip
        if not steps:
            assert not left | running.keys(), "a launch waits for ever"
            break
        node = sorted(steps)[pick(len(steps))]
        work = graph.work[node]
        if node in running:
            work.end(running.pop(node))
            ended.add(node)
            continue
        left.remove(node)
        if isinstance(work, Launch):
            work.begin()
            running[node] = work
        elif isinstance(work, Copy):
            running[node] = work.begin()
        else:
            work()
            ended.add(node)


def first(_: int) -> int:
    return 0


def last(count: int) -> int:
    return count - 1


def filled(cuda: FakeCuda, chunks: Chunks | None = None, pivot: int = 0) -> tuple[Stream, torch.Tensor]:
    """A stream whose first filling has come, and its source."""
    source = torch.randn(ROWS, 3)
    stream = on_gpu(pinned(cuda, source), chunks or Chunks.uniform(ROWS, 2), pivot)
    cuda.run()
    return stream, source


def none(patch: pytest.MonkeyPatch) -> None:
    """No bug is seeded."""


def by_turns(pick, chunks: Chunks, pivot: int, seeded=none) -> None:
    """Replays of two graphs of one stream, and eager calls, each with another content of the source."""
    with fake_cuda() as cuda, pytest.MonkeyPatch.context() as patch:
        seeded(patch)
        stream, source = filled(cuda, chunks, pivot)
        made = []
        for _ in range(2):
            with cuda.capture() as graph:
                stream.restart()
                made.append((graph, launch(cuda, stream), launch(cuda, stream)))
        for _ in range(3):
            source.normal_()
            graph, *launches = made[pick(2)]
            play(graph, pick)
            for one in launches:
                one.check(source)
            if pick(2):
                source.normal_()
                stream.restart()
                told = stream.arrival._signals.use()
                assert not there(told), "of this epoch nothing has come"
                cuda.run()
                eager = Launch(stream, told)
                eager.poll()
                eager.check(source)


def twice(pick, seeded=none) -> None:
    """Two fillings of one graph, which itself changes the source between them; the first one's launch gives up."""
    with fake_cuda() as cuda, pytest.MonkeyPatch.context() as patch:
        seeded(patch)
        stream, source = filled(cuda)
        with cuda.capture() as graph:
            stream.restart()
            launch(cuda, stream, patient=False)
            cuda.current.give(source.neg_)
            stream.restart()
            second = launch(cuda, stream)
        for _ in range(2):
            source.normal_()
            play(graph, pick)
            second.check(source)


@settings(max_examples=30)
@given(chunks=chunkings(ROWS), data=st.data())
def test_replays_and_eager_calls_by_turns_in_any_order(chunks, data):
    by_turns(lambda count: data.draw(st.integers(0, count - 1)), chunks, data.draw(st.integers(0, chunks.count - 1)))


@settings(max_examples=30)
@given(data=st.data())
def test_a_second_filling_behind_a_launch_that_has_given_up(data):
    twice(lambda count: data.draw(st.integers(0, count - 1)))


def not_zeroed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(device, "zero", lambda words: None)


def not_behind(patch: pytest.MonkeyPatch) -> None:
    """The second filling's copies do not come behind the first's."""
    init = graphs.Branch.__init__
    patch.setattr(graphs.Branch, "__init__", lambda self, stream, behind=(): init(self, stream))


def signalled_early(patch: pytest.MonkeyPatch) -> None:
    """All chunks are signalled before the first is copied."""
    made = landing.filling

    @functools.lru_cache
    def early(*how, **more):
        (one,), done = made(*how, **more)
        return landing.Prepared((Sequence(8, sorted(one._operations, key=lambda x: isinstance(x, CopyIn))),), done)

    patch.setattr(landing, "filling", early)


def eager_words(patch: pytest.MonkeyPatch) -> None:
    """A graph signals the words of eager launches."""

    @contextlib.contextmanager
    def shared(self):
        with graphs.Branch(torch.cuda.current_stream().cuda_stream) as branch:
            yield self._eager
        graph = device.capture_id(torch.cuda.current_stream().cuda_stream)
        self._in_a_graph = device.InGraph(graph, self._eager, branch, set())

    patch.setattr(device.DeviceSignals, "filling_in_graph", shared)


@pytest.mark.parametrize("seeded", [not_zeroed, not_behind, signalled_early, eager_words])
def test_these_plays_find_seeded_bugs(seeded):
    def play_all() -> None:
        for seed in range(100):
            twice(random.Random(seed).randrange, seeded)
            by_turns(random.Random(seed).randrange, Chunks.uniform(ROWS, 2), 1, seeded)

    with pytest.raises(AssertionError, match=r"is another's|nothing has come"):
        play_all()


def test_no_copy_is_in_front_of_the_launch_that_waits_for_it(cuda):
    """The launch is behind the zeroing alone, and the copies are behind no launch that was captured later."""
    stream, _ = filled(cuda)
    with cuda.capture() as graph:
        cuda.current.give(lambda: None)
        stream.restart()
        launch(cuda, stream)
    zeroed, node = 1, len(graph.work) - 1
    assert graph.behind[node] == {zeroed}
    assert graph.behind[zeroed + 1] == {zeroed}, "the first copy"
    assert all(graph.behind[i] == {i - 1} for i in range(zeroed + 1, node))


def test_a_launch_on_another_stream_of_the_graph_is_behind_the_zeroing(cuda):
    stream, source = filled(cuda)
    with cuda.capture() as graph:
        stream.restart()
        with cuda.on(cuda.stream()):
            one = launch(cuda, stream)
    assert graph.behind[-1] == {0}
    for _ in range(2):
        source.normal_()
        play(graph, last)
        one.check(source)


def test_eager_epochs_lanes_and_tensors_are_apart_from_graphs(cuda):
    stream, _ = filled(cuda)
    signals, lane = stream.arrival._signals, stream._landing._lane
    before = signals.epoch, lane.behind, signals.use()
    with cuda.capture() as graph:
        stream.restart()
        told = signals.use()
    assert (told.epoch, told.words.data_ptr() != signals._eager.data_ptr()) == (REPLAYED, True)
    assert (signals.epoch, lane.behind, signals.use()) == before
    assert stream.done
    play(graph, first)
    assert told.words.tolist() == [REPLAYED] * 4
    assert there(before[2]) == [0, 1, 2, 3]
    assert "at each replay" in stream.explain()


def test_the_forgotten_arrival_is_refused_in_a_graph_too(cuda):
    stream, _ = filled(cuda)
    assert stream.is_filled_here
    with cuda.capture():
        assert stream.is_filled_here, "what a replay finds there is for the owner of the graph to say"
        stream.restart()
        assert not stream.is_filled_here
        stream.arrival._signals.use()
        assert stream.is_filled_here
        with cuda.on(cuda.stream()):
            assert not stream.is_filled_here, "no launch in front of it on this stream waits"
    with cuda.capture():
        assert stream.is_filled_here, "another graph"


def test_an_op_is_refused_the_tensor_alone_after_a_restart_in_a_graph(cuda):
    """Though the filling before the capture was known to have come, and the tensor was free to be read."""
    stream, _ = filled(cuda)
    stream.wait()
    assert streamed.operand("matmul", "a", stream.tensor, "arrival", None)[0] is stream.tensor
    with cuda.capture():
        stream.restart()
        with refused(ValueError, "matmul: a is a tensor that ts.stream_in has not filled yet; give the Stream itself"):
            streamed.operand("matmul", "a", stream.tensor, "arrival", None)
    assert streamed.operand("matmul", "a", stream.tensor, "arrival", None)[0] is stream.tensor, "the eager filling's"


def test_nothing_is_asked_of_events_while_a_graph_is_captured(cuda, monkeypatch):
    """An event's query would end the capture."""
    stream, _ = filled(cuda)
    with cuda.capture(), monkeypatch.context() as patch:
        for name in ("has_come", "await_event"):
            patch.delattr(type(cuda.driver), name)
        with stream:
            stream.restart()
            assert not stream.done
        assert not stream.close()
        with refused(
            RuntimeError, "stream_in: wait() while a CUDA graph is captured; give the Stream to what reads it"
        ):
            stream.wait()
    assert stream.done


def test_a_captured_restart_is_a_modification_to_autograd(cuda):
    stream, _ = filled(cuda)
    before = stream.tensor._version
    with cuda.capture():
        stream.restart()
    assert stream.tensor._version == before + 1


@pytest.mark.parametrize("own_graph", [None, False, True])
def test_a_gradient_is_void_where_a_replay_has_missed_a_chunk(cuda, monkeypatch, own_graph):
    """In the graph of the launch, eagerly behind it, or in a graph of its own, which keeps the words."""
    stream, _ = filled(cuda)
    signals = stream.arrival._signals
    with cuda.capture() as graph, monkeypatch.context() as patch:
        stream.restart()
        words = signals.use().words
        patch.setattr(torch.Tensor, "is_cuda", True)
        patch.setattr(FlatArrival, "signals", lambda *_: signals)
        late = Awaited.for_gradient(FlatArrival.of(stream.arrival), None, "matmul", torch.ones(2))
    with cuda.capture():
        stream.restart()  # another filling, which has not come
    if own_graph is None:
        cuda.graph = graph
    with cuda.capture() if own_graph else contextlib.nullcontext():
        play(graph, first)
        assert late.void_if_late(torch.ones(2)).tolist() == [1.0, 1.0]
        words[1] = 0
        assert late.void_if_late(torch.ones(2)).isnan().all()
        assert any(words is kept for objects in list(graphs._kept.values())[2:] for kept in objects) == bool(own_graph)
    assert signals.void_if_late(signals.epoch).item() == 0, "an eager launch's words"


def test_what_is_refused(cuda):
    x = torch.randn(ROWS, 3)
    with cuda.capture():
        stream, _ = filled_outside(cuda)
        with refused(RuntimeError, "arrival: a CUDA graph is being captured, and what ts.stream_in copies is not in it; call the Stream's restart()"):  # fmt: skip  # noqa: E501
            stream.arrival._signals.use()
    unpinned = on_gpu(tensor_source(x, onward=True), Chunks.uniform(ROWS, 2))
    strided = on_gpu(pinned(cuda, torch.randn(3, ROWS).t()), Chunks.uniform(ROWS, 2))
    blocks = on_gpu(iterator_source(iter([x]), (ROWS, 3), torch.float32), Chunks.uniform(ROWS, 2))
    by_kernel = on_gpu(pinned(cuda, x), Chunks.uniform(ROWS, 2), by_kernel=True)
    for one in (unpinned, strided, blocks):
        while not one._filling.issued:
            time.sleep(0.001)
    with cuda.capture() as graph:
        for one in (unpinned, strided, blocks):
            with refused(RuntimeError, f"stream_in: restart() while a CUDA graph is captured, from {one._source.describe()}; a replay copies from a contiguous pinned tensor: give source.contiguous().pin_memory()"):  # fmt: skip  # noqa: E501
                one.restart()
        with refused(RuntimeError, "stream_in: restart() while a CUDA graph is captured; with copies='kernel'"):
            by_kernel.restart()
    assert not graph.work


def test_hip_is_refused_before_anything_is_captured(cuda, monkeypatch):
    stream, _ = filled(cuda)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with cuda.capture() as graph, refused(NotImplementedError, "stream_in: restart() while a HIP graph is captured, which has no branches for copies; make the Stream with copies='kernel'"):  # fmt: skip  # noqa: E501
        stream.restart()
    assert not graph.work


def filled_outside(cuda: FakeCuda) -> tuple[Stream, torch.Tensor]:
    """`filled`, though a graph is captured."""
    graph, cuda.graph = cuda.graph, None
    try:
        return filled(cuda)
    finally:
        cuda.graph = graph


class TestWhatAGraphKeeps:
    def test_source_tensor_and_words_until_it_is_gone(self, cuda):
        stream, source = filled(cuda)
        with cuda.capture() as graph:
            stream.restart()
            words = weakref.ref(stream.arrival._signals.use().words)
        tensor, host = weakref.ref(stream.tensor), weakref.ref(source)
        cuda._pinned.clear()
        cuda._recorded.clear()
        graph.heads.clear()
        del stream, source
        gc.collect()
        graphs.let_go()
        assert all(one() is not None for one in (tensor, host, words)), "the graph still uses them"
        play(graph, first)
        graph.work.clear()
        graph.destroy()
        gc.collect()
        assert tensor() is not None, "until the next call"
        graphs.let_go()
        gc.collect()
        assert (tensor(), host(), words()) == (None, None, None)

    def test_the_next_filling_lets_go(self, cuda):
        stream, _ = filled(cuda)
        for _ in range(3):
            with cuda.capture() as graph:
                stream.restart()
            assert len(graphs._kept) == 1
            graph.destroy()
        stream.restart()
        assert not graphs._kept

    def test_for_ever_where_the_driver_does_not_say(self, cuda, monkeypatch):
        def refuse(*_):
            raise RuntimeError("the driver does not say when a graph is gone: code 801")

        monkeypatch.setattr(cuda.driver, "call_when_gone", refuse)
        stream, _ = filled(cuda)
        with cuda.capture() as graph:
            stream.restart()
        graph.destroy()
        graphs.let_go()
        assert len(graphs._kept) == 1


def test_a_driver_that_refuses_leaves_the_filling_before_it(cuda, monkeypatch):
    """The capture is lost; the stream is not."""
    stream, source = filled(cuda)

    def refuse(*_):
        raise RuntimeError("the driver refused the copy")

    with cuda.capture():
        monkeypatch.setattr(cuda.driver, "copy_in", refuse)
        with pytest.raises(RuntimeError, match="refused the copy"):
            stream.restart()
        assert stream.arrival._signals._in_a_graph is None
    monkeypatch.undo()
    assert stream.tensor.device == DEVICE
    assert torch.equal(stream.tensor, source)


def test_no_launch_waits_for_a_filling_beside_one_that_failed_half_way(cuda, monkeypatch):
    """Its first copies are in the graph, and may overwrite what the filling before has brought."""
    stream, source = filled(cuda)
    left, copy_in = [True, False], cuda.driver.copy_in

    def refuse(*how):
        if not left.pop(0):
            raise RuntimeError("the driver refused the copy")
        copy_in(*how)

    with cuda.capture():
        stream.restart()
        with monkeypatch.context() as patch:
            patch.setattr(cuda.driver, "copy_in", refuse)
            with pytest.raises(RuntimeError, match="refused the copy"):
                stream.restart()
        with refused(RuntimeError, "arrival: a CUDA graph is being captured, and what ts.stream_in copies is not in"):
            stream.arrival._signals.use()
        stream.restart()
        assert stream.arrival._signals.use().epoch == REPLAYED
    assert there(stream.arrival._signals.use()) == [0, 1, 2, 3]
    assert torch.equal(stream.tensor, source)
