"""Signals on a GPU, on a fake one: in whatever order its streams run, a launch sees what was signalled.

What a real one does is in ``tests/gpu/test_gpu_arrival.py``.
"""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from device_builders import make, own, refused, seen, there
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_cuda import DEVICE, FakeCuda, Stream, fake_cuda
from tilestream.arrival import device_words
from tilestream.arrival.device import DeviceSignals, PeerSignals
from tilestream.arrival.flat import Awaited
from tilestream.core.error_record import EXPIRED, FAILED, FIELDS, RECORDS, Record
from tilestream.core.errors import ArrivalTimeout, ProducerStopped
from tilestream.runtime import driver
from tilestream.runtime.channel import channel

GONE = OSError("the disk is gone")


def signal_on(cuda: FakeCuda, stream: Stream, signals: DeviceSignals, *chunks: int, epoch: int | None = None) -> None:
    with cuda.on(stream):
        for chunk in chunks:
            signals.set(chunk, epoch)


def in_row(cuda: FakeCuda, stream: Stream, signals: DeviceSignals, *chunks: int) -> None:
    address = signals.begin_row(stream)
    for chunk in chunks:
        driver.stream_write(stream.cuda_stream, address + 4 * chunk, signals.epoch)
    signals.end_row(chunks, stream, device_words.event_on(stream))


def failed(key: int, epoch: int = 1, why: int = FAILED) -> Record:
    """What a launch reports that found the producer of ``epoch`` failed."""
    return Record(why, 0, 0, 0, 0, key, epoch, 0, -1, 0, 0, 10**6, 10**9)


class TestEpochs:
    def test_a_signal_is_written_when_the_stream_gets_there(self, cuda):
        signals, stream, copied = make(), cuda.stream(), []
        launch = signals.use()
        with cuda.on(stream):
            stream.give(lambda: copied.append(1))
            signals.set(1)
        assert there(launch) == []
        stream.run()
        assert copied
        assert there(launch) == [1]
        assert signals.state() == [signals.arrived(chunk) for chunk in range(3)] == [False, True, False]

    def test_the_gradient_of_a_captured_launch_looks_at_no_epoch(self, cuda, monkeypatch):
        """A replay's epoch is another than that of its capture."""
        signals = make()
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        monkeypatch.setattr(Awaited, "of", classmethod(lambda cls, *_: cls(signals, None, epochs=(3, 4))))
        for captured, epochs in ((False, (3, 4)), (True, (0, 0))):
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captured=captured: captured)
            assert Awaited.for_gradient(None, None, "mm", torch.ones(1)).epochs == epochs
        monkeypatch.setattr(torch.Tensor, "is_cuda", False)
        assert Awaited.for_gradient(None, None, "mm", torch.ones(1)) is None, "on the CPU it has raised"

    def test_a_gradient_is_void_where_a_chunk_has_not_come(self, cuda):
        signals, other = make(), cuda.stream()
        awaited = Awaited(signals, None, epochs=(1, 0))

        def gradient() -> list[float]:
            return awaited.void_if_late(torch.ones(2, dtype=torch.bfloat16)).tolist()

        for chunk in range(3):
            assert all(math.isnan(x) for x in gradient())
            signals.set(chunk)
            cuda.run()
        assert gradient() == [1.0, 1.0]
        signals.advance()
        assert gradient() == [1.0, 1.0], "of its own epoch"
        signals.set(1)
        cuda.run()
        later = Awaited(None, signals, epochs=(0, 2))
        for needs in ([0, 1, 0], [0, 0, 0], [0, 1, 1]):
            found = later.void_if_late(torch.ones(1), torch.tensor(needs, dtype=torch.bool))
            assert bool(found.isnan()) == (needs == [0, 1, 1]), "what no group with rows needs is not looked at"
        with cuda.on(other):
            assert awaited._replace(epochs=(2, 0)).void_if_late(torch.ones(1)).isnan().all()
        both = Awaited(signals, make(), epochs=(1, 1))
        assert both.void_if_late(torch.ones(1)).isnan().all()

    def test_a_graph_of_a_gradient_keeps_the_words(self, cuda):
        signals = make()
        signals.void_if_late(1)
        assert not device_words._captured_stores
        with cuda.capture():
            signals.void_if_late(1)
        assert device_words._captured_stores[0] is signals._store

    @pytest.mark.parametrize("captured", [False, True])
    def test_a_gradient_is_void_under_quarantine(self, cuda, captured):
        """The words of a captured launch, and a caller's own, are zeroed by the launch that has seen them all."""
        signals = make() if captured else make(words=own())
        awaited = Awaited(signals, None, epochs=(0, 0) if captured else (1, 0))
        assert awaited.void_if_late(torch.ones(1)).tolist() == [1.0]
        signals._quarantine.fill_(1)
        assert awaited.void_if_late(torch.ones(1)).isnan().all()
        signals.reset()
        cuda.run()
        assert awaited.void_if_late(torch.ones(1)).tolist() == [1.0]

    @pytest.mark.parametrize("captured_first", [False, True])
    def test_the_words_are_zeroed_before_any_stream_touches_them(self, cuda, captured_first):
        first, second = cuda.stream(), cuda.stream()
        with cuda.on(first):
            first.give(lambda: None)  # where `zeros` would be
            signals = make()
        with cuda.on(second):
            if captured_first:
                with cuda.capture() as graph:
                    signals.use()
                    signals.set(0)
                assert len(graph.work) == 1, "the signal; torch synchronises before it captures"
            signals.set(0)
        second.run()
        assert not any(signals.state())
        cuda.run()
        assert signals.state() == [True, False, False]

    def test_the_allocator_knows_each_stream_that_uses_them(self, cuda):
        words = own()
        signals, theirs = make(), make(words=words)
        for i in range(2):
            user, producer = cuda.stream(), cuda.stream()
            for both in (signals, theirs):
                with cuda.on(user):
                    both.use()
                signal_on(cuda, producer, both, i)
            for stream in (user, producer):
                assert cuda.records(signals._store, stream)
                assert cuda.records(words, stream)
        with cuda.capture(), cuda.on(cuda.stream()) as _:
            signals.use()
            assert cuda.records(signals._store, cuda.current)

    def test_a_new_epoch_clears_nothing_and_nothing_has_arrived_in_it(self, cuda):
        signals = make()
        for epoch in range(1, 5):
            launch = signals.use()
            assert launch.epoch == signals.epoch == epoch
            for chunk in range(3):
                assert there(launch) == list(range(chunk))
                signal_on(cuda, cuda.stream(), signals, chunk)
                cuda.run()
            assert signals.advance() == epoch + 1
            assert there(launch) == [0, 1, 2]
            assert signals.state() == [False] * 3
            assert all(signals.arrived(chunk, epoch) for chunk in range(3))

    def test_a_late_signal_reaches_its_own_epochs_launch_and_no_other(self, cuda):
        signals, producer = make(), cuda.stream()
        before = signals.use()
        signal_on(cuda, producer, signals, 0, epoch=1)
        signals.advance()
        after = signals.use()
        signal_on(cuda, producer, signals, 1, epoch=1)
        producer.run()
        assert (there(before), there(after)) == ([0, 1], [])
        signal_on(cuda, producer, signals, 0, epoch=2)
        signal_on(cuda, producer, signals, 0, epoch=1)  # takes nothing back
        producer.run()
        assert there(after) == [0]

    def test_what_cannot_be_signalled(self, cuda):
        with refused(ValueError, "signal: epoch=2; the present epoch is 1: advance() begins the next"):
            make().set(0, epoch=2)
        for chunk in (-1, 3, 10**6):
            with refused(IndexError, f"signal: chunk={chunk}; there are 3 chunks, from 0"):
                make().set(chunk)
        assert cuda.current.issued == 0
        with cuda.capture(), refused(RuntimeError, "Arrival: made while a CUDA graph is captured"):
            make()


class TestTwoStreams:
    """Streams run in any order; a word must not go back."""

    @pytest.mark.parametrize("first", [signal_on, in_row])
    @pytest.mark.parametrize("second", [signal_on, in_row])
    def test_the_old_epochs_stream_is_stuck(self, cuda, first, second):
        signals, old, new = make(2), cuda.stream(), cuda.stream()
        first(cuda, old, signals, 1, 0)
        signals.advance()
        launch = signals.use()
        second(cuda, new, signals, 0, 1)
        for stream in (new, old, new):
            stream.run()
        assert there(launch) == [0, 1]

    @given(order=st.lists(st.sampled_from("ab"), max_size=6), copied=st.booleans())
    @settings(max_examples=60)
    def test_a_later_epochs_signal_comes_after_an_earlier_ones(self, order, copied):
        """Else the word would be taken back, and the launch of the later epoch would wait for ever."""
        with fake_cuda() as cuda:
            streams = {name: cuda.stream() for name in "ab"}
            signals = make()
            for name in "ab":
                with cuda.on(streams[name]):
                    if copied:
                        cuda.current.give(lambda: None)
                    signals.set(0)
                if name == "a":
                    signals.advance()
            for name in order:
                before = signals._eager[0].item()
                streams[name].run(1)
                assert signals._eager[0] >= before
            cuda.run()
            assert signals._eager[0] == 2

    def test_no_wait_is_issued_that_is_not_needed(self, cuda):
        signals, streams = make(1), [cuda.stream() for _ in range(3)]
        launch = signals.use()
        for stream in streams[:2]:
            signal_on(cuda, stream, signals, 0)
        assert streams[1].issued == 1, "the wait until the words are zeroed; once signalled is enough"
        cuda.run()
        assert there(launch) == [0]
        other = make(1)
        for _ in range(3):
            signal_on(cuda, streams[2], other, 0)
            other.advance()
        assert streams[2].issued == 3 + 1, "the writes, and once the wait until the words are zeroed"

    def test_a_row_that_ends_early_is_known_of(self, cuda):
        signals, stream = make(), cuda.stream()
        launch = signals.use()
        in_row(cuda, stream, signals, 1)
        signals.fail(GONE)
        cuda.run()
        assert seen(launch) == ["failed", "here", "failed"]

    @settings(max_examples=300)
    @given(data=st.data())
    def test_any_schedule(self, data):
        with fake_cuda() as cuda:
            Schedules(cuda, data).check()


class Schedules:
    """Signals, epochs and launches at random, on two streams that go on at random."""

    CHUNKS = 2

    def __init__(self, cuda: FakeCuda, data: st.DataObject) -> None:
        self.cuda, self.data = cuda, data
        self.signals = make(self.CHUNKS)
        self.streams = [cuda.stream(), cuda.stream()]
        self.launches = [self.signals.use()]
        self.issued: list[list[int]] = [[0] for _ in range(self.CHUNKS)]
        self.written = [0] * self.CHUNKS

    def check(self) -> None:
        draw = self.data.draw
        for _ in range(draw(st.integers(1, 14))):
            stream = self.streams[draw(st.integers(0, 1))]
            match draw(st.sampled_from(["signal", "signal", "run", "advance", "row"])):
                case "signal":
                    epoch = draw(st.integers(max(1, self.signals.epoch - 2), self.signals.epoch))
                    chunk = draw(st.integers(0, self.CHUNKS - 1))
                    signal_on(self.cuda, stream, self.signals, chunk, epoch=epoch)
                    self.issued[chunk].append(epoch)
                case "run":
                    stream.run(draw(st.integers(1, 3)))
                case "row":
                    in_row(self.cuda, stream, self.signals, *range(self.CHUNKS))
                    for issued in self.issued:
                        issued.append(self.signals.epoch)
                case "advance":
                    self.signals.advance()
                    self.launches.append(self.signals.use())
            self.look()
        self.cuda.run()
        self.look()
        for launch in self.launches:
            assert there(launch) == [c for c in range(self.CHUNKS) if max(self.issued[c]) >= launch.epoch]

    def look(self) -> None:
        """No word goes back, or says what was not issued."""
        now = self.launches[0].words.tolist()
        assert all(a <= b for a, b in zip(self.written, now, strict=True))
        assert all(word in issued for word, issued in zip(now, self.issued, strict=True))
        self.written = now


def test_a_signal_behind_its_own_launch_is_refused(cuda):
    message = "signal: chunk 1 is signalled on the stream on which a launch already waits for it"
    signals, stream = make(), cuda.stream()
    with cuda.on(stream):
        signals.set(0)
        signals.use()
        signals.set(0)  # signalled before: not waited for
        with refused(RuntimeError, message):
            signals.set(1)
        assert not signals._issued[1]
    signal_on(cuda, cuda.stream(), signals, 1)
    cuda.run()
    assert signals.state() == [True, True, False]
    signals.advance()
    signal_on(cuda, stream, signals, 1)  # the next epoch's
    stream.run()
    assert signals.state() == [False, True, False]
    with cuda.capture():  # there it may be another branch of the graph
        signals.use()
        signals.set(1)


@pytest.mark.parametrize("raised", [False, True])
def test_a_signal_behind_a_launch_that_has_given_up_is_taken(cuda, raised):
    """Its stream has later work: it is not idle. Until then, and for a launch after that, it is refused."""
    signals, stream, other = make(), cuda.stream(), make()
    found = channel(DEVICE)

    def report(key):
        number = found.newest
        record = failed(key, why=EXPIRED)
        at = number % RECORDS * FIELDS
        found.records[at + 1 : at + 1 + len(record)] = torch.tensor(record)
        found.records[at] = number + 1
        if raised:
            with pytest.raises(ArrivalTimeout):
                found.check()

    with cuda.on(stream):
        for _ in range(2):
            signals.use()
            stream.give(lambda: None)
            report(other.key)
            assert signals.awaited_here
            with refused(RuntimeError, "signal: chunk 1 is signalled on the stream on which a launch already waits"):
                signals.set(1)
            report(signals.key)
            assert not signals.awaited_here, "what it waited for has not come"
            while found.pending:
                found.take()
        signals.set(1)
        assert stream.run()
    assert signals.state() == [False, True, False]


class TestFail:
    def test_what_was_issued_still_comes(self, cuda):
        signals, producer = make(), cuda.stream()
        launch = signals.use()
        signal_on(cuda, producer, signals, 2)
        signals.fail(GONE)
        assert cuda.current.issued == 0, "beside the launch that waits"
        cuda.streams[-1].run()
        assert seen(launch) == ["failed", "failed", "missing"]
        cuda.run()
        assert seen(launch) == ["failed", "failed", "here"]

    @pytest.mark.parametrize("under_way", [False, True])
    def test_a_failure_belongs_to_its_epoch(self, cuda, under_way):
        signals, producer = make(), cuda.stream()
        signals.fail(GONE)
        if not under_way:
            cuda.run()
        signals.advance()
        launch = signals.use()
        signals.fail(OSError("late"), epoch=1)
        assert seen(launch) == ["missing"] * 3
        assert signals.error(2) is None
        signal_on(cuda, producer, signals, 0, 1, 2)
        producer.run()
        cuda.run()
        assert there(launch) == [0, 1, 2]

    def test_an_earlier_signal_that_is_still_under_way_does_not_hide_it(self, cuda):
        signals, stuck = make(2), cuda.stream()
        signal_on(cuda, stuck, signals, 0)
        signals.advance()
        launch = signals.use()
        signals.fail(GONE)
        for stream in cuda.streams[2:]:
            stream.run()
        assert seen(launch) == ["missing", "failed"], "the other one waits for nothing"
        cuda.run()
        assert seen(launch) == ["failed", "failed"]

    def test_a_launch_of_an_earlier_epoch_keeps_what_has_arrived(self, cuda):
        """As where a stream is begun anew behind a launch, and fails or is closed before that launch has looked."""
        signals, user, producer, found = make(), cuda.stream(), cuda.stream(), []
        for _ in range(2):
            with cuda.on(user):
                launch = signals.use()
                user.give(lambda launch=launch: found.append(seen(launch)))
            signal_on(cuda, producer, signals, 0, 1, 2)
            signals.advance()
        with cuda.on(user):
            last = signals.use()
        signals.fail(GONE)
        producer.run()
        for stream in reversed(cuda.streams):
            stream.run()
        cuda.run()
        assert found == [["here"] * 3] * 2
        assert seen(last) == ["failed"] * 3

    def test_it_waits_for_no_graph_and_for_no_launch_of_its_own_epoch(self, cuda):
        signals, user = make(), cuda.stream()
        signals.use()
        with cuda.capture() as graph:
            signals.advance()
        assert not signals._over
        assert not graph.work
        with cuda.on(user):
            signals.use()
            signals.advance()
            launch = signals.use()
            user.run()
            user.give((cuda.stream(), 1))  # a kernel that waits
        signals.fail(GONE)
        cuda.run()
        assert seen(launch) == ["failed"] * 3

    def test_the_exception_outlives_epoch_and_arrival_until_it_is_reported(self, cuda):
        signals = make()
        signals.fail(OSError("the disk is gone"))
        signals.advance()
        key, gone = signals.key, weakref.ref(signals)
        del signals
        gc.collect()
        error = failed(key).error()
        assert isinstance(error, OSError)
        assert str(error) == "the disk is gone"
        del error
        gc.collect()
        assert gone() is None, "kept no longer than needed"
        assert isinstance(failed(key).error(), ProducerStopped)

    def test_one_failure_is_reported_once(self, cuda):
        signals = make()
        for epoch, raised_before in ((1, False), (2, True)):
            signals.fail(OSError(f"epoch {epoch}"))
            if raised_before:  # where the stream was waited for
                assert isinstance(signals.take_error(epoch), OSError)
            else:
                assert str(failed(signals.key, epoch).error()) == f"epoch {epoch}"
            assert failed(signals.key, epoch).error() is None, "a second launch of this epoch"
            signals.advance()
        signals.fail(OSError("again"))
        assert str(failed(signals.key, 3).error()) == "again"

    def test_a_launch_that_expired_says_why(self, cuda):
        signals = make()
        signals.fail(GONE)
        assert failed(signals.key, why=EXPIRED).error().__cause__ is GONE

    def test_a_callers_own_words_are_left_alone(self, cuda):
        words = own()
        signals = make(words=words)
        signals.fail(GONE)
        cuda.run()
        assert words.tolist() == [0] * 3
        assert signals.error(1) is not None
        assert not DeviceSignals._failed


class TestCapture:
    def test_a_captured_launch_has_words_of_its_own_and_the_quarantine(self, cuda):
        signals = make()
        eager = signals.use()
        with cuda.capture():
            captured = signals.use()
        assert (eager.epoch, captured.epoch) == (1, 0)
        assert eager.quarantine.data_ptr() == captured.quarantine.data_ptr()
        assert (captured.words.numel(), captured.quarantine.numel()) == (3, 1)
        addresses = {x.data_ptr() + 4 * i for x in (eager.words, captured.words) for i in range(3)}
        assert len(addresses | {captured.quarantine.data_ptr()}) == 7
        assert eager.key == captured.key == signals.key

    def test_signals_are_in_the_graph_and_count_for_no_epoch(self, cuda):
        signals = make()
        with cuda.capture() as graph:
            launch = signals.use()
            for chunk in range(3):
                signals.set(chunk)
        cuda.run()
        assert there(launch) == [], "only captured"
        for _ in range(3):
            graph.replay(cuda.current)
            cuda.run()
            assert there(launch) == [0, 1, 2]
            launch.words.zero_()  # as the launch does that has seen them all
        assert signals.state() == [False] * 3, "eager launches have seen nothing"
        eager = signals.use()
        signal_on(cuda, cuda.stream(), signals, 0)
        cuda.run()
        assert there(eager) == [0]

    def test_advance_takes_nothing_from_a_graph_and_reset_ends_its_quarantine(self, cuda):
        signals = make()
        with cuda.capture() as graph:
            captured = signals.use()
            signals.set(0)
            signals.set(1)
        graph.replay(cuda.stream())
        cuda.run()
        captured.quarantine[0] = 1
        signals.advance()
        eager = signals.use()
        signal_on(cuda, cuda.stream(), signals, 1)
        cuda.run()
        assert there(captured) == [0, 1]
        assert captured.quarantine.tolist() == [1]
        signals.reset()
        cuda.run()
        assert there(captured) == []
        assert captured.quarantine.tolist() == [0]
        assert there(eager) == [1], "eager launches are left alone"

    @pytest.mark.parametrize("theirs", [False, True])
    def test_a_second_launch_in_one_graph_is_refused(self, cuda, theirs):
        signals = make(words=own() if theirs else None)
        for _ in range(2):
            with cuda.capture():
                signals.use()
                with refused(RuntimeError, "arrival: a launch of this graph waits for these signals already, and zero"):
                    signals.use()
        signals.use()

    def test_what_a_stream_brings_is_in_no_graph(self, cuda):
        signals = make()
        signals.streamed = True
        message = "arrival: a CUDA graph is being captured, and what ts.stream_in copies is not in it"
        with cuda.capture(), refused(RuntimeError, message):
            signals.use()
        assert signals.use().epoch == 1

    @pytest.mark.parametrize("how", ["launch", "signal"])
    @pytest.mark.parametrize("theirs", [False, True])
    def test_a_graph_keeps_its_words(self, cuda, theirs, how):
        words = own() if theirs else None
        signals = make(words=words)
        with cuda.capture():
            signals.use() if how == "launch" else signals.set(0)
        used = signals._flags
        needed = {x.untyped_storage().data_ptr() for x in ([used, signals._quarantine] if how == "launch" else [used])}
        del signals, words, used
        gc.collect()
        assert needed <= {x.untyped_storage().data_ptr() for x in device_words._captured_stores}

    def test_an_eager_life_keeps_nothing(self, cuda):
        signals = make()
        signals.use()
        signal_on(cuda, cuda.stream(), signals, 0)
        signals.advance()
        signals.reset()
        gone = weakref.ref(signals._store)
        cuda.run()
        del signals
        gc.collect()
        assert gone() is None


def test_a_callers_own_words(cuda):
    words = own()
    signals = make(words=words)
    assert signals.self_reset
    assert not make().self_reset
    launch = signals.use()
    assert (launch.epoch, launch.words.data_ptr()) == (0, words.data_ptr())
    words[2] = -7  # anything but 0
    signals.set(0)
    assert there(launch) == [2]
    cuda.run()
    assert there(launch) == [0, 2]
    assert signals.state() == [True, False, True]
    with cuda.capture():
        captured = signals.use()
    captured.quarantine[0] = 1
    for zeroes in (signals.advance, signals.reset):
        words.fill_(1)
        zeroes()
        cuda.run()
        assert not words.any()
    assert not captured.quarantine.any()


class TestWordsThatPeersWrite:
    def test_two_shapes_share_them_by_epoch(self, cuda):
        words = own(4)
        long, short = PeerSignals(words, DEVICE), PeerSignals(words[:2], DEVICE)
        long.begin(3)
        launch = long.use()
        assert (launch.epoch, launch.words.data_ptr(), launch.key) == (3, words.data_ptr(), long.key)
        words[:] = torch.tensor([3, 0, 3, 2])
        assert there(launch) == [0, 2]
        words.fill_(3)
        short.begin(6)
        assert seen(short.use()) == ["missing"] * 2, "what the call before has left is of its epoch"
        assert not short.self_reset
        words[1] = 6
        assert short.state() == [False, True]

    def test_a_launch_that_is_overruled_keeps_what_has_come(self, cuda):
        words = own()
        signals = PeerSignals(words, DEVICE)
        signals.begin(5)
        launch = signals.use()
        words[1] = 5
        signals.overrule(RuntimeError("a peer has given up"))
        cuda.run()
        assert seen(launch) == ["failed", "here", "failed"]
        assert "a peer has given up" in str(failed(signals.key, 5).error())
        words[0] = 5  # a late one
        assert seen(launch)[0] == "here"
