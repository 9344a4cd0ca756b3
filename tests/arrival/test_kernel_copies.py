"""What makes a stream's copies, and when, on a fake GPU: a launch that can, once an epoch; else the copy engine.

What a kernel does with what it is told is in `tests/kernels/portable/test_portable_copy_items.py`, and on a GPU in
`tests/gpu/test_gpu_copy_items.py`.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import re
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from device_builders import on_gpu, pinned, refused

from fake_cuda import FakeCuda, Until
from tilestream.arrival import kernel_copies
from tilestream.arrival.device import DeviceSignals, GateWords
from tilestream.arrival.flat import Awaited
from tilestream.arrival.sources import tensor_source
from tilestream.arrival.stream import Stream
from tilestream.core.chunks import Chunks
from tilestream.core.copy_items import CopyArguments
from tilestream.launch.launch import GemmLaunch

ROWS, K, PER_CHUNK = 10, 8, 4


@pytest.fixture(autouse=True)
def _captured(monkeypatch):
    monkeypatch.setattr(kernel_copies, "_captured_tables", [])


def offered(cuda: FakeCuda) -> Stream:
    """A stream that a kernel may copy."""
    return on_gpu(pinned(cuda, torch.randn(ROWS, K)), Chunks.uniform(ROWS, PER_CHUNK), 1, by_kernel=True)


@pytest.fixture
def x(cuda):
    return offered(cuda)


@pytest.fixture
def source(x):
    return x._source.tensor


def launch(cuda: FakeCuda, x: Stream, raises: BaseException | None = None, issued: bool = True):
    """A launch on the current stream of a kernel that makes copies: what it is told, and its work in the stream."""
    signals = x.arrival._signals
    with signals.copying():
        copies = signals.take_copies(4)
        words = signals.use()
        if issued:
            give(cuda, copies, words)
        if raises is not None:
            raise raises
    return copies, words


def give(cuda: FakeCuda, copies: CopyArguments, words: GateWords) -> None:
    """Issue the kernel."""
    cuda.current.give((lambda: kernel(copies, words)) if copies.copiers else waiting(words))


def kernel(copies: CopyArguments, words: GateWords) -> None:
    """Makes the copies, and has seen them all: words that it is to reset are 0 again."""
    copies.target.copy_(copies.source)
    words.words.fill_(words.epoch)


def waiting(words: GateWords) -> Until:
    """A kernel at its gates."""
    return Until(lambda: bool((words.words >= words.epoch).all()))


def other_launch(cuda: FakeCuda, x: Stream) -> None:
    """A launch of a kernel that makes none."""
    cuda.current.give(waiting(x.arrival._signals.use()))


def check_there(cuda: FakeCuda, x: Stream) -> None:
    """After all that was issued."""
    cuda.run()
    assert torch.equal(x.tensor, x._source.tensor)
    assert all(x.arrival._signals.state())
    assert x.done


def not_fit() -> RuntimeError:
    return RuntimeError("out of shared memory")


class TestOnceAnEpoch:
    def test_nothing_happens_before_there_is_a_reader_and_the_first_launch_copies(self, cuda, x):
        cuda.run()
        assert x.tensor.isnan().all()
        assert not x.done
        assert "by the kernel that reads it first" in x.explain()
        first, second = launch(cuda, x)[0], launch(cuda, x)[0]
        assert (first.copiers, second.copiers) == (4, 0)
        assert not x.done
        check_there(cuda, x)
        assert x.wait(0.1) is x.tensor
        assert "by the kernel that read it first" in x.explain()

    @pytest.mark.parametrize("restarts", [1, 3])
    def test_each_epoch_is_copied_once(self, cuda, x, source, restarts):
        for _ in range(restarts):
            launch(cuda, x)
            x.restart()
            assert not x.done
        source.fill_(5.0)
        assert launch(cuda, x)[0].copiers == 4
        check_there(cuda, x)

    def test_a_launch_elsewhere_waits_for_the_one_that_copies(self, cuda, x):
        first, second, third = (cuda.stream() for _ in range(3))
        with cuda.on(first):
            launch(cuda, x)
        with cuda.on(second):
            assert launch(cuda, x)[0].copiers == 0
        assert second.run() == 1, "its words are zeroed, and then it waits"
        first.run()
        second.run()
        assert second.query()
        check_there(cuda, x)
        x.restart()
        with cuda.on(second):  # the next epoch's copies come after the last one's
            x.tensor.fill_(float("nan"))
            assert launch(cuda, x)[0].copiers == 4
        with cuda.on(third):
            other_launch(cuda, x)
        third.run()
        assert not third.query()
        check_there(cuda, x)

    def test_copies_come_after_what_the_stream_was_given_that_read_the_tensor(self, cuda, x, source):
        launch(cuda, x)
        cuda.run()
        reader, other, read = cuda.stream(), cuda.stream(), []
        with cuda.on(reader):
            reader.give(lambda: read.append(x.tensor.clone()))
            x.restart()
        old = source.clone()
        source.fill_(3.0)
        with cuda.on(other):
            launch(cuda, x)
        other.run()
        assert not other.query()
        check_there(cuda, x)
        assert torch.equal(read[0], old)

    @pytest.mark.parametrize("issued", [False, True])
    def test_a_launch_that_raises_has_taken_nothing_and_is_waited_for_if_it_was_issued(self, cuda, x, issued):
        """By the launch that copies next, with the same counts."""
        first, second = cuda.stream(), cuda.stream()
        with cuda.on(first), pytest.raises(RuntimeError, match="out of shared memory"):
            launch(cuda, x, not_fit(), issued)
        with cuda.on(second):
            assert launch(cuda, x)[0].copiers == 4
        second.run()
        assert not second.query()
        check_there(cuda, x)

    def test_a_failure_is_signalled_for_no_chunk_that_a_kernel_has_brought(self, cuda, x):
        launch(cuda, x)
        x.arrival.fail(OSError("the link is down"))
        check_there(cuda, x)

    def test_reset_zeroes_what_is_counted_with(self, cuda, x):
        copies, _ = launch(cuda, x)
        cuda.run()
        copies.words.fill_(7)
        x.arrival.reset()
        assert not copies.words.any()
        x.restart()
        launch(cuda, x)
        check_there(cuda, x)

    def test_reset_elsewhere_comes_after_the_launch_that_copies(self, cuda, x):
        first, second = cuda.stream(), cuda.stream()
        with cuda.on(first):
            launch(cuda, x)
        with cuda.on(second):
            x._copies.reset()
        second.run()
        assert not second.query(), "the kernel still counts"
        first.run()
        second.run()
        assert second.query()

    @pytest.mark.parametrize("close_first", [False, True])
    def test_closed_it_can_still_be_read(self, cuda, x, close_first):
        if close_first:
            assert x.close()
        launch(cuda, x)
        cuda.run()
        assert x.close()
        check_there(cuda, x)


class TestByTheEngine:
    @pytest.mark.parametrize("who", ["wait", "another kernel"])
    def test_where_the_first_reader_cannot_copy(self, cuda, x, source, who, caplog):
        caplog.set_level("INFO")
        if who == "wait":
            assert x.wait() is x.tensor
        else:
            other_launch(cuda, x)
        check_there(cuda, x)
        assert launch(cuda, x)[0].copiers == 0
        assert "by a copy engine: its first reader makes no copies" in x.explain()
        assert caplog.messages == [
            "stream_in: a copy engine makes the copies: this epoch's first reader makes none"
        ]  # fmt: skip
        x.restart()  # the engine's late signals of the first epoch come before the second's
        source.fill_(2.0)
        x.tensor.fill_(float("nan"))
        assert launch(cuda, x)[0].copiers == 4
        check_there(cuda, x)

    def test_a_kernels_copies_come_after_an_engines_of_the_epoch_before(self, cuda, x):
        other_launch(cuda, x)  # the engine has not begun
        x.restart()
        reader = cuda.stream()
        with cuda.on(reader):
            launch(cuda, x)
        reader.run()
        assert not reader.query()
        check_there(cuda, x)

    @pytest.mark.parametrize("issued", [0, 1])
    @pytest.mark.parametrize("who", ["engine", "kernel"])
    def test_copies_that_it_failed_to_begin_are_still_to_be_made(self, cuda, x, monkeypatch, issued, who):
        """After ``issued`` copies the driver raises. The next copies come behind those."""
        left, copy = [issued], cuda.driver.copy_in

        def copy_in(*how):
            if not left[0]:
                raise RuntimeError("CUDA error: out of memory")
            left[0] -= 1
            copy(*how)

        with monkeypatch.context() as patch:
            patch.setattr(cuda.driver, "copy_in", copy_in)
            with pytest.raises(RuntimeError, match="out of memory"):
                x.wait(0.01)
        assert not x.done
        if who == "kernel":
            reader = cuda.stream()
            with cuda.on(reader):
                assert launch(cuda, x)[0].copiers == 4
            cuda.streams[0].run()
            reader.run()
            assert not reader.query(), "behind what the engine was given"
        else:
            x.wait()
        check_there(cuda, x)

    def test_a_reader_behind_it_waits_at_its_gates_alone(self, cuda, x):
        """Not for the last copy: an engine needs none of its SMs. What comes before the engine may."""
        before, seen, reader = [], [], cuda.stream()
        cuda.current.give(lambda: before.append(1))
        other_launch(cuda, x)
        with cuda.on(reader):
            launch(cuda, x, issued=False)
            reader.give(lambda: seen.append(x.arrival._signals.state()))
        reader.run()
        assert not seen
        cuda.streams[0].run()
        reader.run()
        assert before == [1]
        assert seen == [[False] * 3]


class TestMemory:
    def test_what_the_launch_touches_is_known_to_the_allocator(self, cuda, x, source, monkeypatch):
        """Torch's allocator of pinned memory knows of torch's copies alone: one marks the source behind the launch."""
        marks, copy, beside = [], torch.Tensor.copy_, x._landing.stream
        monkeypatch.setattr(
            torch.Tensor, "copy_",
            lambda to, other, non_blocking=False: marks.append((other.data_ptr(), cuda.current)) or copy(to, other),
        )  # fmt: skip
        stream = cuda.stream()
        with cuda.on(stream):
            copies, words = launch(cuda, x)
        assert all(cuda.records(y, stream) for y in (x.tensor, copies.table, copies.words, words.words))
        assert cuda.records(x._copies._mark, beside)
        assert marks[-1] == (source.data_ptr(), beside), "not in the caller's, which would wait for an engine"
        beside.run()
        assert not beside.query()
        stream.run()
        beside.run()
        assert beside.query()

    def test_only_its_holder_keeps_the_tensor_alive(self, cuda):
        x = offered(cuda)
        launch(cuda, x)
        cuda.run()
        gone = [weakref.ref(x.tensor), weakref.ref(x.arrival._signals)]
        cuda.streams[0]._work.clear()
        gc.collect()
        gc.disable()
        try:
            del x
            assert [ref() for ref in gone] == [None, None], "a cycle holds the GPU's memory"
        finally:
            gc.enable()


def threads(*work) -> list[threading.Thread]:
    """Run all of this, each in a thread, under one bound; those that have not ended."""
    made = [threading.Thread(target=each, daemon=True) for each in work]
    for thread in made:
        thread.start()
    for thread in made:
        thread.join(300)
    return [thread for thread in made if thread.is_alive()]


class TestThreads:
    def test_two_that_launch_with_operands_swapped(self, cuda, monkeypatch):
        """Each launch's kernel copies one, and has the engine copy the other: neither waits for the other's launch."""
        x, y = offered(cuda), offered(cuda)
        met, copying = threading.Barrier(2), DeviceSignals.copying

        @contextlib.contextmanager
        def slowly(signals: DeviceSignals):
            with copying(signals):
                with contextlib.suppress(threading.BrokenBarrierError):
                    met.wait(0.2)  # for the other to have entered its first
                yield

        monkeypatch.setattr(DeviceSignals, "copying", slowly)

        class Copying(GemmLaunch):
            def __init__(self) -> None:
                self.plan = SimpleNamespace(block=(), copiers=4)
                self._copies, self._schedule = "rows", None

            def issue(self, stream, x, words, awaited, probe) -> None:
                copies, told = self.copies(awaited), awaited.rows.use()
                awaited.columns.use()
                give(cuda, copies, told)

        def multiply(rows: Stream, columns: Stream, stream) -> None:
            awaited = Awaited(rows.arrival._signals, columns.arrival._signals, 1.0, "matmul")
            with cuda.on(stream):
                Copying()((rows.tensor,), awaited)

        first, second = cuda.stream(), cuda.stream()
        assert not threads(lambda: multiply(x, y, first), lambda: multiply(y, x, second))
        cuda.run()
        assert x.done
        assert y.done

    def test_while_a_kernel_is_compiled_nothing_is_there_and_no_wait_is_longer_than_asked(self, cuda, x):
        launch(cuda, x)
        cuda.run()
        x.restart()
        signals, found = x.arrival._signals, []

        def look() -> None:
            found.extend((x.done, x.close(0.01)))
            with pytest.raises(TimeoutError):
                x.wait(0.01)

        with signals.copying():
            copies, words = signals.take_copies(4), signals.use()
            assert not threads(look)
            give(cuda, copies, words)
        assert found == [False, False]
        check_there(cuda, x)


class TestCaptured:
    """Captured launches make the copies at each replay, each for itself."""

    def test_a_graph_copies_at_each_replay(self, cuda, x, source):
        with cuda.capture() as graph:
            copies, words = launch(cuda, x)
        assert (copies.copiers, words.epoch) == (4, 0)
        cuda.run()
        for value in (1.0, 2.0):
            source.fill_(value)
            x.tensor.fill_(float("nan"))
            graph.replay(cuda.streams[0])
            cuda.run()
            assert (x.tensor == value).all()
            assert not words.words.any()

    def test_graphs_and_eager_launches_count_and_signal_apart(self, cuda, x):
        """They may run at the same time."""
        told = []
        for _ in range(2):
            with cuda.capture():
                told.append(launch(cuda, x))
        told.append(launch(cuda, x))
        used = [y for copies, words in told for y in (copies.words, words.words)]
        spans = sorted((y.data_ptr(), y.data_ptr() + y.nbytes) for y in used)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        assert not any(y.any() for y in used[:4]), "a replay begins at 0"

    def test_a_graph_keeps_no_operand_alive(self, cuda):
        """The owner of the graph keeps the stream."""
        x = offered(cuda)
        with cuda.capture() as graph:
            table = launch(cuda, x)[0].table
        assert {y.data_ptr() for y in kernel_copies._captured_tables} == {table.data_ptr()}
        gone = weakref.ref(x._copies)
        graph.work.clear()
        del x
        gc.collect()
        assert gone() is None

    def test_a_launch_that_fails_or_makes_none_brings_nothing_in(self, cuda, x, source):
        message = (
            "arrival: a CUDA graph is being captured, and what ts.stream_in copies is not in it; this launch makes no "
            "copies: take copies='engine', and call the Stream's restart() in the capture, before this: each replay "
        )
        with cuda.capture() as graph:
            with pytest.raises(RuntimeError, match="out of shared memory"):
                launch(cuda, x, not_fit(), issued=False)
            with refused(RuntimeError, message):
                other_launch(cuda, x)
            launch(cuda, x)  # with a smaller ring
            with refused(RuntimeError, "arrival: a launch of this graph waits for these signals already"):
                launch(cuda, x)
        graph.replay(cuda.streams[0])
        cuda.run()
        assert torch.equal(x.tensor, source)

    def test_restart_while_a_graph_is_captured(self, cuda, x):
        epoch = x.arrival.epoch
        with cuda.capture() as graph, pytest.raises(RuntimeError, match="the graph makes the copies at each replay"):
            x.restart()
        assert not graph.work
        assert x.arrival.epoch == epoch
        launch(cuda, x)
        check_there(cuda, x)


@pytest.mark.parametrize("captured", [False, True])
def test_no_matmul_publishes_what_a_stream_fills(cuda, x, captured):
    signals = x.arrival._signals
    with cuda.capture() if captured else contextlib.nullcontext():
        for publish in (signals.publish, signals.begin_publishing):
            with refused(ValueError, "publish: the arrival of a stream"):
                publish()


def test_of_nothing_there_is_nothing_to_offer(cuda):
    x = on_gpu(tensor_source(torch.zeros(0, K), onward=True), Chunks.uniform(0, 4), by_kernel=True)
    assert x.arrival._signals.copied == 0
    x.wait()


@pytest.mark.parametrize(
    ("x", "is_pinned", "message"),
    [
        (torch.zeros(4, 3, 8).transpose(0, 1), True, "strides"),
        (torch.zeros(12 * 8 + 1)[1:].view(12, 8), True, "a kernel copies from a multiple of 16 on"),
        (torch.zeros(12, 8), False, "[12, 8], torch.float32, on cpu, strides (8, 1), not pinned"),
    ],
)
def test_what_no_kernel_can_read_is_refused(cuda, x, is_pinned, message):
    source = pinned(cuda, x) if is_pinned else tensor_source(x, onward=True)
    with pytest.raises(ValueError, match=re.escape("or copies='engine'")) as caught:
        on_gpu(source, Chunks.uniform(12, 6), by_kernel=True)
    assert message in str(caught.value)


def test_what_was_taken_is_waited_for_as_long_as_is_said():
    copies = SimpleNamespace(pending=False, _taken=None)
    there = SimpleNamespace(query=lambda: True)
    timer = threading.Timer(0.05, setattr, (copies, "_taken", there))
    timer.start()
    assert kernel_copies.KernelCopies.settled(copies, 600.0)
    timer.join()
    copies._taken = SimpleNamespace(query=lambda: False)
    assert not kernel_copies.KernelCopies.settled(copies, 0.001)
