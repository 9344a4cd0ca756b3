"""Who makes a stream's copies, and when, on a fake GPU: a launch that can, once an epoch; else the copy engine.

What a kernel does with what it is told is in `tests/kernels/portable/test_portable_copy_items.py`, and on a GPU in
`tests/gpu/test_gpu_copy_items.py`.
"""

from __future__ import annotations

import contextlib
import gc
import re
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

import tilestream as ts
import tilestream.arrival.landing
from fake_cuda import DEVICE, FakeCuda, Until
from tilestream.arrival.arrival import Arrival
from tilestream.arrival.device import DeviceSignals, GateWords
from tilestream.arrival.flat import Awaited
from tilestream.arrival.landing import DeviceLanding
from tilestream.arrival.sources import TensorSource
from tilestream.arrival.stream import Stream
from tilestream.core.copy_items import CopyArguments
from tilestream.launch.launch import GemmLaunch

ROWS, K, PER_CHUNK = 10, 8, 4


def offered(cuda: FakeCuda, source: torch.Tensor | None = None, pivot: int = 1) -> tuple[Stream, torch.Tensor]:
    """A stream that a kernel may copy; its source."""
    source = torch.randn(ROWS, K) if source is None else source
    arrival = Arrival.uniform(PER_CHUNK, -(-ROWS // PER_CHUNK), pivot)
    arrival._signals = DeviceSignals(arrival.num_chunks, DEVICE)
    made = TensorSource(cuda.pin(source), onward=True)
    stream = Stream(arrival, made, DeviceLanding(made.tensor, DEVICE), by_kernel=True)
    stream.tensor.fill_(float("nan"))
    return stream, source


def launch(cuda: FakeCuda, x: Stream, fails: bool = False) -> tuple[CopyArguments, GateWords]:
    """A launch on the current stream of a kernel that makes copies: what it is told, and its work in the stream."""
    signals = x.arrival._signals
    with signals.copying():
        copies = signals.take_copies(4)
        words = signals.use()
        if fails:
            raise RuntimeError("out of shared memory")
        give(cuda, copies, words)
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


def other_launch(cuda: FakeCuda, x: Stream) -> GateWords:
    """A launch of a kernel that makes none."""
    words = x.arrival._signals.use()
    cuda.current.give(waiting(words))
    return words


def check_there(x: Stream, source: torch.Tensor) -> None:
    assert torch.equal(x.tensor, source)
    assert all(x.arrival._signals.state())
    assert x.done


def test_nothing_happens_before_somebody_reads_and_the_first_launch_copies(cuda):
    x, source = offered(cuda)
    assert all(stream.query() for stream in cuda.streams)
    assert not x.done
    assert "by the kernel that reads it first" in x.explain()
    first, second = launch(cuda, x)[0], launch(cuda, x)[0]
    assert (first.copiers, second.copiers) == (4, 0)
    assert not x.done
    cuda.run()
    check_there(x, source)
    assert x.wait(0.1) is x.tensor
    assert "by the kernel that read it first" in x.explain()


@pytest.mark.parametrize("restarts", [1, 3])
def test_each_epoch_is_copied_once(cuda, restarts):
    x, source = offered(cuda)
    for _ in range(restarts):
        launch(cuda, x)
        x.restart()
        assert not x.done
    source.fill_(5.0)
    assert launch(cuda, x)[0].copiers == 4
    cuda.run()
    check_there(x, source)


def test_a_launch_elsewhere_waits_for_the_one_that_copies(cuda):
    x, source = offered(cuda)
    first, second = cuda.stream(), cuda.stream()
    with cuda.on(first):
        launch(cuda, x)
    with cuda.on(second):
        assert launch(cuda, x)[0].copiers == 0
    assert second.run() == 1, "its words are zeroed, and then it waits"
    first.run()
    second.run()
    assert second.query()
    check_there(x, source)
    x.restart()
    with cuda.on(second):  # the next epoch's copies come after the last one's
        x.tensor.fill_(float("nan"))
        assert launch(cuda, x)[0].copiers == 4
        third = cuda.stream()
    with cuda.on(third):
        other_launch(cuda, x)
    third.run()
    assert not third.query()
    cuda.run()
    check_there(x, source)


def test_copies_come_after_what_the_stream_was_given_that_read_the_tensor(cuda):
    x, source = offered(cuda)
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
    cuda.run()
    assert torch.equal(read[0], old)
    check_there(x, source)


@pytest.mark.parametrize("who", ["wait", "another kernel"])
def test_who_reads_without_such_a_kernel_has_the_engine_copy(cuda, who, caplog):
    caplog.set_level("INFO")
    x, source = offered(cuda)
    if who == "wait":
        assert x.wait() is x.tensor
    else:
        other_launch(cuda, x)
    cuda.run()
    check_there(x, source)
    assert launch(cuda, x)[0].copiers == 0
    assert "by a copy engine: who read it first makes no copies" in x.explain()
    assert caplog.messages == ["stream_in: a copy engine makes the copies: who reads this epoch's first makes none"]
    x.restart()  # the engine's late signals of the first epoch come before the second's
    source.fill_(2.0)
    x.tensor.fill_(float("nan"))
    assert launch(cuda, x)[0].copiers == 4
    cuda.run()
    check_there(x, source)


def test_a_kernels_copies_come_after_an_engines_of_the_epoch_before(cuda):
    x, source = offered(cuda)
    other_launch(cuda, x)  # the engine has not begun
    x.restart()
    reader = cuda.stream()
    with cuda.on(reader):
        launch(cuda, x)
    reader.run()
    assert not reader.query()
    cuda.run()
    check_there(x, source)


def test_a_launch_that_fails_has_taken_nothing(cuda):
    x, source = offered(cuda)
    with pytest.raises(RuntimeError, match="out of shared memory"):
        launch(cuda, x, fails=True)
    assert launch(cuda, x)[0].copiers == 4
    cuda.run()
    check_there(x, source)


def test_a_launch_that_raises_after_it_was_issued_is_waited_for(cuda):
    """By whoever copies next, with the same counts."""
    x, source = offered(cuda)
    first, second = cuda.stream(), cuda.stream()
    signals = x.arrival._signals

    def interrupted() -> None:
        with signals.copying():
            give(cuda, signals.take_copies(4), signals.use())
            raise KeyboardInterrupt

    with cuda.on(first), pytest.raises(KeyboardInterrupt):
        interrupted()
    with cuda.on(second):
        assert launch(cuda, x)[0].copiers == 4
    second.run()
    assert not second.query()
    cuda.run()
    check_there(x, source)


@pytest.mark.parametrize("issued", [0, 1])
@pytest.mark.parametrize("who", ["engine", "kernel"])
def test_copies_that_the_engine_failed_to_begin_are_still_to_be_made(cuda, monkeypatch, issued, who):
    """After ``issued`` copies the driver raises. Who copies next comes behind those."""
    x, source = offered(cuda)
    left = [issued]

    def copy_in(*how):
        if not left[0]:
            raise RuntimeError("CUDA error: out of memory")
        left[0] -= 1
        cuda._copy(*how)

    with monkeypatch.context() as patch:
        patch.setattr(tilestream.arrival.landing, "copy_in", copy_in)
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
    cuda.run()
    check_there(x, source)


def test_a_reader_behind_the_engine_waits_at_its_gates_alone(cuda):
    """Not for the last copy: an engine needs none of its SMs. What comes before the engine may."""
    x, _ = offered(cuda)
    before = []
    cuda.current.give(lambda: before.append(1))
    other_launch(cuda, x)
    reader, seen = cuda.stream(), []
    with cuda.on(reader):
        signals = x.arrival._signals
        with signals.copying():
            signals.take_copies(4)
            signals.use()
            reader.give(lambda: seen.append(x.arrival._signals.state()))
    reader.run()
    assert not seen
    cuda.streams[0].run()
    reader.run()
    assert before == [1]
    assert seen == [[False] * 3]


def test_what_the_launch_touches_is_known_to_the_allocator(cuda):
    x, _ = offered(cuda)
    stream = cuda.stream()
    with cuda.on(stream):
        copies, words = launch(cuda, x)
    assert all(cuda.records(y, stream) for y in (x.tensor, copies.table, copies.words, words.words))
    assert cuda.records(x._copies._mark, x._landing._stream)


def threads(*work) -> list[threading.Thread]:
    """Run all of this, each in a thread, for five seconds at most; those that have not ended."""
    made = [threading.Thread(target=each, daemon=True) for each in work]
    for thread in made:
        thread.start()
    for thread in made:
        thread.join(5.0)
    return [thread for thread in made if thread.is_alive()]


def test_two_threads_that_launch_with_operands_swapped(cuda, monkeypatch):
    """Each launch's kernel copies one, and has the engine copy the other: neither waits for the other's launch."""
    x, y = offered(cuda)[0], offered(cuda)[0]
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


def test_while_a_kernel_is_compiled_nothing_is_there_and_nobody_waits_for_longer_than_asked(cuda):
    x, source = offered(cuda)
    launch(cuda, x)
    cuda.run()
    x.restart()
    signals = x.arrival._signals
    found = []

    def look() -> None:
        found.extend((x.done, x.close(0.01)))
        with pytest.raises(TimeoutError):
            x.wait(0.01)

    with signals.copying():
        copies, words = signals.take_copies(4), signals.use()
        assert not threads(look)
        give(cuda, copies, words)
    assert found == [False, False]
    cuda.run()
    check_there(x, source)


def test_a_failure_is_signalled_for_no_chunk_that_a_kernel_has_brought(cuda):
    x, source = offered(cuda)
    launch(cuda, x)
    x.arrival.fail(OSError("the link is down"))
    cuda.run()
    check_there(x, source)


@pytest.mark.parametrize("captured", [False, True])
def test_no_matmul_publishes_what_a_stream_fills(cuda, captured):
    x, _ = offered(cuda)
    with cuda.capture() if captured else contextlib.nullcontext():
        for publish in (x.arrival._signals.publish, x.arrival._signals.begin_publishing):
            with pytest.raises(ValueError, match=r"^publish: the arrival of a stream"):
                publish()


def test_reset_zeroes_what_is_counted_with(cuda):
    x, source = offered(cuda)
    copies, _ = launch(cuda, x)
    cuda.run()
    copies.words.fill_(7)
    x.arrival.reset()
    assert not copies.words.any()
    x.restart()
    launch(cuda, x)
    cuda.run()
    check_there(x, source)


def test_the_source_is_marked_behind_the_launch(cuda, monkeypatch):
    """Torch's allocator of pinned memory knows of copies alone."""
    x, source = offered(cuda)
    marks, copy = [], torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor, "copy_",
        lambda to, other, non_blocking=False: marks.append((other.data_ptr(), cuda.current)) or copy(to, other),
    )  # fmt: skip
    stream = cuda.stream()
    with cuda.on(stream):
        launch(cuda, x)
    assert marks[-1] == (source.data_ptr(), x._landing._stream), "not in the caller's, which would wait for an engine"
    x._landing._stream.run()
    assert not x._landing._stream.query()
    stream.run()
    x._landing._stream.run()
    assert x._landing._stream.query()


def test_nothing_keeps_the_tensor_alive_but_who_holds_it(cuda):
    x, _ = offered(cuda)
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


@pytest.mark.parametrize("close_first", [False, True])
def test_closed_it_can_still_be_read(cuda, close_first):
    x, source = offered(cuda)
    if close_first:
        assert x.close()
    launch(cuda, x)
    cuda.run()
    assert x.close()
    check_there(x, source)


def test_of_nothing_there_is_nothing_to_offer(cuda):
    arrival = Arrival.uniform(4, 1)
    arrival._signals = DeviceSignals(1, DEVICE)
    made = TensorSource(torch.zeros(0, K), onward=True)
    x = Stream(arrival, made, DeviceLanding(made.tensor, DEVICE), by_kernel=True)
    assert arrival._signals.copied == 0
    x.wait()


def test_what_no_kernel_can_read_is_refused(cuda):
    base = torch.zeros(4, 3, 8)
    odd = torch.zeros(12 * 8 + 1)[1:].view(12, 8)
    cases = [
        (TensorSource(cuda.pin(base.transpose(0, 1)), onward=True), "strides"),
        (TensorSource(cuda.pin(odd), onward=True), "a kernel copies from a multiple of 16 on"),
        (TensorSource(torch.zeros(12, 8), onward=True), "[12, 8], torch.float32, on cpu, strides (8, 1), not pinned"),
    ]
    for source, text in cases:
        arrival = Arrival.uniform(6, 2)
        arrival._signals = DeviceSignals(2, DEVICE)
        with pytest.raises(ValueError, match=re.escape("or copies='engine'")) as caught:
            Stream(arrival, source, DeviceLanding(source.tensor, DEVICE), by_kernel=True)
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"copies": "sm"}, "stream_in: copies='sm'; it is 'engine' or 'kernel'"),
        ({"copies": "kernel"}, "stream_in: copies='kernel' of a Tensor to cpu; a kernel copies a pinned CPU tensor"),
    ],
)
def test_bad_arguments(how, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        ts.stream_in(torch.zeros(8, 8), **how)
