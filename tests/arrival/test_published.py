"""A matmul that publishes, and who reads it, on a fake GPU: in whatever order streams run, the reader comes behind.

What is held here is what no kernel can see to: that a reader's launch cannot take the SMs of a matmul that has not
begun, and that nobody overwrites what is still being read.
"""

from __future__ import annotations

import re

import pytest
import torch

from fake_cuda import DEVICE
from tilestream.arrival.device import DeviceSignals


def make(count: int = 3, words: torch.Tensor | None = None) -> DeviceSignals:
    return DeviceSignals(count, DEVICE, words)


def issue(cuda, stream, signals, order=(0, 1, 2), kernel=True) -> list[str]:
    """A matmul that signals in this order; says in what it has done when."""
    done: list[str] = []
    with cuda.on(stream):
        words = signals.publish()

        def work(chunk: int) -> None:
            done.append(f"chunk {chunk}")
            if kernel:
                words.signals[chunk] = words.epoch

        for chunk in order:
            stream.give(lambda chunk=chunk: work(chunk))
            if not kernel:
                signals.set(chunk)
        signals.published(order[0] if kernel else None)
    return done


def read(cuda, stream, signals, done) -> None:
    """A launch that reads."""
    with cuda.on(stream):
        signals.use()
        stream.give(lambda: done.append("reader"))


@pytest.mark.parametrize("words", [None, torch.zeros(3, dtype=torch.int32)], ids=["ours", "the caller's"])
def test_a_reader_begins_behind_the_first_chunk(cuda, words):
    signals, producer, consumer = make(words=words), cuda.stream(), cuda.stream()
    done = issue(cuda, producer, signals, (1, 2, 0))
    read(cuda, consumer, signals, done)
    consumer.run()
    assert done == [], "its launch would hold the SMs that the matmul needs"
    while not done:
        assert producer.run(1)
    consumer.run()
    assert done == ["chunk 1", "reader"]
    cuda.run()
    assert consumer.query()


def test_behind_several_launches_a_reader_begins_behind_the_last(cuda):
    """A launch that has not begun cannot take an SM that a reader holds until all is there."""
    signals, producer, consumer = make(), cuda.stream(), cuda.stream()
    done = issue(cuda, producer, signals, kernel=False)
    read(cuda, consumer, signals, done)
    while producer.run(1):
        consumer.run()
    assert done == ["chunk 0", "chunk 1", "chunk 2", "reader"]
    assert all(signals.state())


def test_on_the_matmuls_own_stream_nothing_is_waited_for(cuda):
    signals, stream = make(), cuda.stream()
    done = issue(cuda, stream, signals)
    before = stream.issued
    read(cuda, stream, signals, done)
    assert stream.issued == before + 1


def test_a_reader_that_was_issued_first_is_refused(cuda):
    signals = make()
    with cuda.on(cuda.stream()):
        signals.use()
    with cuda.on(cuda.stream()), pytest.raises(RuntimeError, match=r"^publish: a launch that waits for epoch 1 was"):
        signals.publish()


def test_an_epoch_is_published_once(cuda):
    signals, stream = make(), cuda.stream()
    issue(cuda, stream, signals)
    with cuda.on(stream), pytest.raises(ValueError, match=re.escape("publish: chunk 0 of epoch 1 is signalled alread")):
        signals.publish()
    signals.advance()
    issue(cuda, stream, signals)
    cuda.run()
    assert all(signals.state())


def test_the_next_epoch_comes_behind_the_readers_of_the_last(cuda):
    """Its matmul may write what they read; and words of the caller's are zeroed by them."""
    for words in (None, torch.zeros(3, dtype=torch.int32)):
        signals, producer, consumer = make(words=words), cuda.stream(), cuda.stream()
        done = issue(cuda, producer, signals)
        read(cuda, consumer, signals, done)
        producer.run()
        if words is None:
            signals.advance()
        more = issue(cuda, cuda.stream(), signals)
        cuda.streams[-1].run()
        assert not more
        consumer.run()
        cuda.run()
        assert done[-1] == "reader"
        assert more == ["chunk 0", "chunk 1", "chunk 2"]


def test_a_second_reader_of_the_callers_words_waits_for_no_word(cuda):
    """The first one zeroes them: a stream that waited for one would wait for ever."""
    words = torch.zeros(3, dtype=torch.int32)
    signals, producer = make(words=words), cuda.stream()
    done = issue(cuda, producer, signals)
    first, second = cuda.stream(), cuda.stream()
    read(cuda, first, signals, done)
    first.give(words.zero_)
    read(cuda, second, signals, done)
    producer.run()
    first.run()
    cuda.run()
    assert second.query()
    assert done.count("reader") == 2


def test_under_capture_a_reader_comes_behind_the_matmul_and_each_replay_has_its_signals(cuda):
    signals, producer, consumer = make(), cuda.stream(), cuda.stream()
    with cuda.capture() as graph:
        done = issue(cuda, producer, signals)
        with cuda.on(consumer):
            words = signals.use()
    assert words.epoch == 0
    assert words.words.data_ptr() == signals._captured.data_ptr()
    for _ in range(2):
        graph.replay(cuda.streams[0])
        cuda.run()
        assert words.words.tolist() == [1, 1, 1]
        words.words.zero_()  # the launch that has seen them
    assert len(done) == 6
    issue(cuda, producer, signals)  # eager ones are other words
    producer.run()
    assert words.words.tolist() == [0, 0, 0]
    assert all(signals.state())


def test_a_matmul_that_fails_half_way_is_told_to_its_readers(cuda):
    signals, stream = make(), cuda.stream()
    with cuda.on(stream):
        signals.publish()
        signals.set(0)
        signals.fail(MemoryError("no room"))
    cuda.run()
    assert signals._read() == [1, -1, -1]
