"""Signals on a GPU, on a fake one: whatever the order in which its streams run, a launch sees what was signalled.

What a real one does is in ``tests/gpu/test_gpu_arrival.py``.
"""

from __future__ import annotations

import gc
import re
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_cuda import DEVICE, FakeCuda, Stream, fake_cuda
from tilestream.arrival import device as module
from tilestream.arrival.device import DeviceSignals, GateWords, PeerSignals
from tilestream.core.error_record import EXPIRED, FAILED, Record
from tilestream.core.errors import ProducerStopped


def make(count: int = 3, words: torch.Tensor | None = None) -> DeviceSignals:
    return DeviceSignals(count, DEVICE, words)


def own(count: int = 3) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


def refused(error, message):
    return pytest.raises(error, match=f"^{re.escape(message)}")


def seen(launch: GateWords) -> list[str]:
    """What the launch finds now, chunk by chunk: as `tilestream.kernels.device.gate.look` has it."""
    words, epoch = launch.words.tolist(), launch.epoch
    return [
        "here" if (word >= epoch if epoch else word) else "failed" if epoch and word == -epoch else "missing"
        for word in words
    ]


def there(launch: GateWords) -> list[int]:
    return [chunk for chunk, state in enumerate(seen(launch)) if state == "here"]


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
        assert signals.state() == [False, True, False]
        assert signals.arrived(1)
        assert not signals.arrived(2)

    def test_the_words_are_zeroed_before_any_stream_touches_them(self, cuda):
        first, second = cuda.stream(), cuda.stream()
        with cuda.on(first):
            first.give(lambda: None)  # where `zeros` would be
            signals = make()
        with cuda.on(second):
            signals.set(0)
        second.run()
        assert not any(signals.state())
        cuda.run()
        assert signals.state() == [True, False, False]

    def test_also_where_a_stream_came_to_know_them_under_capture(self, cuda):
        first, second = cuda.stream(), cuda.stream()
        with cuda.on(first):
            first.give(lambda: None)
            signals = make()
        with cuda.on(second):
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
            with cuda.on(user):
                signals.use()
                theirs.use()
            with cuda.on(producer):
                signals.set(i)
                theirs.set(i)
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
                with cuda.on(cuda.stream()) as _:
                    signals.set(chunk)
                cuda.run()
            assert signals.advance() == epoch + 1
            assert there(launch) == [0, 1, 2]
            assert signals.state() == [False] * 3
            assert all(signals.arrived(chunk, epoch) for chunk in range(3))

    @given(order=st.lists(st.sampled_from("ab"), max_size=6), copied=st.booleans())
    @settings(max_examples=60)
    def test_a_later_epochs_signal_on_another_stream_comes_after_an_earlier_ones(self, order, copied):
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

    def test_a_late_signal_of_an_earlier_epoch_reaches_the_launch_that_waits_for_it(self, cuda):
        signals, producer = make(), cuda.stream()
        before = signals.use()
        with cuda.on(producer):
            signals.set(0, epoch=1)
            signals.advance()
            after = signals.use()
            signals.set(1, epoch=1)
        producer.run()
        assert there(before) == [0, 1]
        assert there(after) == []

    def test_a_late_signal_does_not_speak_for_the_next_epoch_nor_take_it_back(self, cuda):
        signals, producer = make(1), cuda.stream()
        signals.advance()
        launch = signals.use()
        with cuda.on(producer):
            signals.set(0, epoch=1)
            producer.run()
            assert there(launch) == []
            signals.set(0, epoch=2)
            signals.set(0, epoch=1)
        producer.run()
        assert there(launch) == [0]

    def test_an_epoch_that_has_not_begun(self, cuda):
        signals = make()
        with refused(ValueError, "signal: epoch=2; the present epoch is 1: advance() begins the next"):
            signals.set(0, epoch=2)
        assert cuda.current.issued == 0

    @pytest.mark.parametrize("chunk", [-1, 3, 10**6])
    def test_a_chunk_that_does_not_exist(self, cuda, chunk):
        with refused(IndexError, f"signal: chunk={chunk}; there are 3 chunks, from 0"):
            make().set(chunk)

    def test_not_made_under_capture(self, cuda):
        with cuda.capture(), refused(RuntimeError, "Arrival: made while a CUDA graph is captured"):
            make()


class TestTwoStreams:
    """Streams run in any order; a word must not go back."""

    def test_the_old_epoch_s_stream_is_stuck(self, cuda):
        signals, old, new = make(1), cuda.stream(), cuda.stream()
        with cuda.on(old):
            signals.set(0)
        signals.advance()
        launch = signals.use()
        with cuda.on(new):
            signals.set(0)
        new.run()
        old.run()
        new.run()
        assert there(launch) == [0]

    def test_through_signals_in_a_row(self, cuda):
        signals, streams = make(), [cuda.stream() for _ in range(3)]
        for stream in streams:
            with cuda.on(stream):
                write, end = signals.set_in_row(range(3))
                for chunk in (1, 2, 0):
                    write(chunk)
                end()
            launch = signals.use()
            signals.advance()
        for stream in reversed(streams):
            stream.run()
        cuda.run()
        assert there(launch) == [0, 1, 2]

    @pytest.mark.parametrize("row_first", [True, False])
    def test_in_a_row_and_one_by_one(self, cuda, row_first):
        signals, old, new = make(2), cuda.stream(), cuda.stream()

        def in_row():
            write, end = signals.set_in_row([1, 0])
            write(1)
            write(0)
            end()

        def one_by_one():
            signals.set(0)
            signals.set(1)

        with cuda.on(old):
            (in_row if row_first else one_by_one)()
        signals.advance()
        launch = signals.use()
        with cuda.on(new):
            (one_by_one if row_first else in_row)()
        new.run()
        old.run()
        new.run()
        assert there(launch) == [0, 1]

    def test_two_streams_signal_one_chunk_in_one_epoch(self, cuda):
        signals, streams = make(1), [cuda.stream(), cuda.stream()]
        launch = signals.use()
        for stream in streams:
            with cuda.on(stream):
                signals.set(0)
        assert streams[1].issued == 1, "the wait until the words are zeroed; once signalled is enough"
        cuda.run()
        assert there(launch) == [0]

    def test_one_stream_waits_for_nothing_of_its_own(self, cuda):
        signals, stream = make(1), cuda.stream()
        with cuda.on(stream):
            for _ in range(3):
                signals.set(0)
                signals.advance()
        assert stream.issued == 3 + 1, "the writes, and once the wait until the words are zeroed"

    def test_a_row_that_ends_early_is_known_of(self, cuda):
        signals, stream = make(), cuda.stream()
        launch = signals.use()
        with cuda.on(stream):
            write, _ = signals.set_in_row(range(3))
            write(1)
        signals.fail(OSError("the disk is gone"))
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
        self.written: list[list[int]] = [[0] for _ in range(self.CHUNKS)]

    def signal(self, stream: Stream, chunk: int, epoch: int) -> None:
        with self.cuda.on(stream):
            self.signals.set(chunk, epoch)
        self.issued[chunk].append(epoch)

    def in_row(self, stream: Stream) -> None:
        with self.cuda.on(stream):
            write, end = self.signals.set_in_row(range(self.CHUNKS))
            for chunk in range(self.CHUNKS):
                write(chunk)
                self.issued[chunk].append(self.signals.epoch)
            end()

    def check(self) -> None:
        draw = self.data.draw
        for _ in range(draw(st.integers(1, 14))):
            stream = self.streams[draw(st.integers(0, 1))]
            match draw(st.sampled_from(["signal", "signal", "run", "advance", "row"])):
                case "signal":
                    epoch = draw(st.integers(max(1, self.signals.epoch - 2), self.signals.epoch))
                    self.signal(stream, draw(st.integers(0, self.CHUNKS - 1)), epoch)
                case "run":
                    stream.run(draw(st.integers(1, 3)))
                case "row":
                    self.in_row(stream)
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
        for chunk, word in enumerate(self.launches[0].words.tolist()):
            assert word >= self.written[chunk][-1]
            assert word in self.issued[chunk]
            self.written[chunk].append(word)


class TestItsOwnStream:
    MESSAGE = "signal: chunk 1 is signalled on the stream on which a launch already waits for it"

    def test_a_signal_behind_its_own_launch_is_refused(self, cuda):
        signals, stream = make(), cuda.stream()
        with cuda.on(stream):
            signals.set(0)
            signals.use()
            signals.set(0)  # signalled before: not waited for
            with refused(RuntimeError, self.MESSAGE):
                signals.set(1)
            assert not signals._issued[1]
        with cuda.on(cuda.stream()) as _:
            signals.set(1)
        cuda.run()
        assert signals.state() == [True, True, False]

    def test_not_in_the_next_epoch(self, cuda):
        signals, stream = make(), cuda.stream()
        with cuda.on(stream):
            signals.use()
            signals.advance()
            signals.set(1)
        stream.run()
        assert signals.state() == [False, True, False]

    def test_not_in_a_graph_of_which_it_is_a_branch(self, cuda):
        signals = make()
        with cuda.capture():
            signals.use()
            signals.set(1)


class TestFail:
    def test_before_any_signal(self, cuda):
        signals = make()
        launch = signals.use()
        signals.fail(OSError("the disk is gone"))
        assert cuda.current.issued == 0, "beside the launch that waits"
        cuda.run()
        assert seen(launch) == ["failed"] * 3

    def test_what_was_issued_still_comes(self, cuda):
        signals, producer = make(), cuda.stream()
        launch = signals.use()
        with cuda.on(producer):
            signals.set(2)
            signals.fail(OSError("the disk is gone"))
        cuda.streams[-1].run()
        assert seen(launch) == ["failed", "failed", "missing"]
        cuda.run()
        assert seen(launch) == ["failed", "failed", "here"]

    def test_of_an_epoch_that_is_over(self, cuda):
        signals = make()
        signals.advance()
        launch = signals.use()
        signals.fail(OSError("the disk is gone"), epoch=1)
        cuda.run()
        assert seen(launch) == ["missing"] * 3
        assert signals.error(2) is None

    def test_the_next_epoch_is_none_the_worse(self, cuda):
        signals, producer = make(), cuda.stream()
        signals.fail(OSError("the disk is gone"))
        cuda.run()
        signals.advance()
        launch = signals.use()
        assert seen(launch) == ["missing"] * 3
        with cuda.on(producer):
            for chunk in range(3):
                signals.set(chunk)
        cuda.run()
        assert there(launch) == [0, 1, 2]

    def test_a_failure_that_is_still_under_way_does_not_end_the_next_epoch(self, cuda):
        signals, producer = make(1), cuda.stream()
        signals.fail(OSError("the disk is gone"))
        signals.advance()
        launch = signals.use()
        with cuda.on(producer):
            signals.set(0)
        producer.run()
        cuda.run()
        assert there(launch) == [0]

    def test_an_earlier_signal_that_is_still_under_way_does_not_hide_it(self, cuda):
        signals, stuck = make(2), cuda.stream()
        with cuda.on(stuck):
            signals.set(0)
        signals.advance()
        launch = signals.use()
        signals.fail(OSError("the disk is gone"))
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
            with cuda.on(producer):
                for chunk in range(3):
                    signals.set(chunk)
            signals.advance()
        with cuda.on(user):
            last = signals.use()
        signals.fail(OSError("the disk is gone"))
        producer.run()
        for stream in reversed(cuda.streams):
            stream.run()
        cuda.run()
        assert found == [["here"] * 3] * 2
        assert seen(last) == ["failed"] * 3

    def test_it_waits_for_nothing_of_a_graph(self, cuda):
        signals = make()
        signals.use()
        with cuda.capture() as graph:
            signals.advance()
        assert not signals._over
        assert not graph.work

    def test_it_waits_for_no_launch_of_its_own_epoch(self, cuda):
        signals, user = make(), cuda.stream()
        with cuda.on(user):
            signals.use()
            signals.advance()
            launch = signals.use()
            user.run()
            user.give((cuda.stream(), 1))  # a kernel that waits
        signals.fail(OSError("the disk is gone"))
        cuda.run()
        assert seen(launch) == ["failed"] * 3

    def test_the_exception_outlives_the_arrival_until_it_is_reported(self, cuda):
        signals = make()
        key = signals.key
        signals.fail(OSError("the disk is gone"))
        gone = weakref.ref(signals)
        del signals
        gc.collect()
        error = failed(key).error()
        assert isinstance(error, OSError)
        assert str(error) == "the disk is gone"
        del error
        gc.collect()
        assert gone() is None, "kept no longer than needed"
        assert isinstance(failed(key).error(), ProducerStopped)

    def test_the_exception_outlives_the_epoch(self, cuda):
        signals = make()
        signals.fail(OSError("the disk is gone"))
        signals.advance()
        assert isinstance(failed(signals.key).error(), OSError)

    def test_two_launches_of_one_epoch_report_it_once(self, cuda):
        signals = make()
        signals.fail(OSError("the disk is gone"))
        assert isinstance(failed(signals.key).error(), OSError)
        assert failed(signals.key).error() is None

    def test_raised_where_the_stream_was_waited_for_it_is_not_reported_again(self, cuda):
        signals = make()
        signals.fail(OSError("the disk is gone"))
        assert isinstance(signals.take_error(1), OSError)
        assert failed(signals.key).error() is None
        signals.advance()
        signals.fail(OSError("again"))
        assert str(failed(signals.key, 2).error()) == "again"

    def test_a_launch_that_expired_says_why(self, cuda):
        signals = make()
        error = OSError("the disk is gone")
        signals.fail(error)
        assert failed(signals.key, why=EXPIRED).error().__cause__ is error

    def test_a_caller_s_own_words_are_left_alone(self, cuda):
        words = own()
        signals = make(words=words)
        signals.fail(OSError("the disk is gone"))
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
        assert eager.words.data_ptr() != captured.words.data_ptr()
        assert eager.quarantine.data_ptr() == captured.quarantine.data_ptr()
        assert captured.words.numel() == 3
        assert captured.quarantine.numel() == 1
        addresses = {x.data_ptr() + 4 * i for x in (eager.words, captured.words) for i in range(3)}
        assert len(addresses | {captured.quarantine.data_ptr()}) == 7
        assert eager.key == captured.key == signals.key

    def test_signals_are_in_the_graph_and_at_each_replay_again(self, cuda):
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

    def test_a_signal_under_capture_counts_for_no_epoch(self, cuda):
        signals = make()
        with cuda.capture():
            signals.set(0)
        launch = signals.use()
        with cuda.on(cuda.stream()) as _:
            signals.set(0)
        cuda.run()
        assert there(launch) == [0]

    def test_advance_beside_a_replay_takes_nothing_away(self, cuda):
        signals = make()
        with cuda.capture() as graph:
            launch = signals.use()
            signals.set(0)
            signals.set(1)
        graph.replay(cuda.current)
        cuda.run()
        launch.quarantine[0] = 1
        signals.advance()
        cuda.run()
        assert there(launch) == [0, 1]
        assert launch.quarantine.tolist() == [1]

    def test_reset_ends_the_quarantine_and_leaves_eager_launches_alone(self, cuda):
        signals = make()
        eager = signals.use()
        with cuda.capture() as graph:
            captured = signals.use()
            signals.set(0)
        with cuda.on(cuda.stream()) as _:
            signals.set(1)
        graph.replay(cuda.stream())
        cuda.run()
        captured.quarantine[0] = 1
        signals.reset()
        cuda.run()
        assert there(captured) == []
        assert captured.quarantine.tolist() == [0]
        assert there(eager) == [1]

    def test_reset_of_a_caller_s_own_words(self, cuda):
        words = own()
        signals = make(words=words)
        with cuda.capture():
            launch = signals.use()
        words[1] = launch.quarantine[0] = 1
        signals.reset()
        cuda.run()
        assert not words.any()
        assert not launch.quarantine.any()

    @pytest.mark.parametrize("theirs", [False, True])
    def test_a_second_launch_in_one_graph_is_refused(self, cuda, theirs):
        signals = make(words=own() if theirs else None)
        message = "arrival: a launch of this graph waits for these signals already, and zeroes them"
        for _ in range(2):
            with cuda.capture():
                signals.use()
                with refused(RuntimeError, message):
                    signals.use()
        signals.use()

    def test_what_a_stream_brings_is_in_no_graph(self, cuda):
        signals = make()
        signals.filled_by_stream()
        with (
            cuda.capture(),
            refused(RuntimeError, "arrival: a CUDA graph is being captured, and what ts.stream_in copies is not in it"),
        ):
            signals.use()
        assert signals.use().epoch == 1

    @pytest.mark.parametrize("how", ["launch", "signal"])
    @pytest.mark.parametrize("theirs", [False, True])
    def test_a_graph_keeps_its_words(self, cuda, theirs, how):
        words = own() if theirs else None
        signals = make(words=words)
        with cuda.capture():
            signals.use() if how == "launch" else signals.set(0)
        used = signals._captured if words is None else words
        needed = {x.untyped_storage().data_ptr() for x in ([used, signals._quarantine] if how == "launch" else [used])}
        del signals, words, used
        gc.collect()
        assert needed <= {x.untyped_storage().data_ptr() for x in module._captured_stores}

    def test_an_eager_life_keeps_nothing(self, cuda):
        signals = make()
        signals.use()
        with cuda.on(cuda.stream()) as _:
            signals.set(0)
        signals.advance()
        signals.reset()
        gone = weakref.ref(signals._store)
        cuda.run()
        del signals
        gc.collect()
        assert gone() is None


class TestOwnWords:
    def test_any_word_will_do(self, cuda):
        words = own()
        signals = make(words=words)
        assert signals.self_reset
        launch = signals.use()
        assert (launch.epoch, launch.words.data_ptr()) == (0, words.data_ptr())
        words[2] = -7
        signals.set(0)
        assert there(launch) == [2]
        cuda.run()
        assert there(launch) == [0, 2]
        assert signals.state() == [True, False, True]

    def test_advance_zeroes_them(self, cuda):
        words = own()
        signals = make(words=words)
        words.fill_(1)
        signals.advance()
        cuda.run()
        assert not words.any()

    def test_ours_are_not_self_reset(self, cuda):
        assert not make().self_reset


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
