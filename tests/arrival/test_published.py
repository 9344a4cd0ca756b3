"""A matmul that publishes, and its readers, on a fake GPU: in whatever order streams run, the reader comes behind.

The host alone can see to this: a reader's launch cannot take the SMs of a matmul that has not begun, and no matmul
overwrites what is still being read.
"""

from __future__ import annotations

import pytest
from device_builders import make, own, refused

ISSUING = "another thread is issuing"


def issue(cuda, stream, signals, order=(0, 1, 2), kernel=True) -> list[str]:
    """A matmul that signals in this order; the list of what it has done so far."""
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


@pytest.fixture(params=["ours", "theirs"])
def signals(request, cuda):
    return make(words=None if request.param == "ours" else own())


def test_a_reader_begins_behind_the_first_chunk(cuda):
    signals, producer, consumer = make(), cuda.stream(), cuda.stream()
    done = issue(cuda, producer, signals, (1, 2, 0))
    read(cuda, consumer, signals, done)
    with cuda.capture():  # takes no order from eager launches, nor gives them one
        issue(cuda, cuda.stream(), signals)
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


def test_a_reader_that_was_issued_first_is_refused(cuda, signals):
    with cuda.on(cuda.stream()):
        signals.use()
    with cuda.on(cuda.stream()) as _, refused(RuntimeError, "publish: a launch that waits for epoch 1 was issued befo"):
        signals.publish()
    signals.advance()  # its chunks are another's matter
    issue(cuda, cuda.stream(), signals)
    with cuda.on(cuda.stream()) as _:
        signals.use()
    cuda.run()
    assert all(signals.state())


def test_in_a_graph_as_well(cuda, signals):
    with cuda.capture():
        signals.use()
        with refused(RuntimeError, "publish: a launch of this graph that waits for these chunks was captured before"):
            signals.publish()
    with cuda.capture():
        issue(cuda, cuda.current, signals)
        with refused(ValueError, "publish: a matmul of this graph signals these chunks already; give the second one"):
            signals.publish()
    with cuda.capture():  # another graph
        issue(cuda, cuda.current, signals)
        signals.use()


def test_while_a_thread_issues_the_matmul_no_other_reads_or_publishes(cuda, signals):
    with cuda.on(cuda.stream()) as _:
        signals.publish()
    with cuda.on(cuda.stream()) as _:
        with refused(RuntimeError, f"arrival: {ISSUING} the matmul that signals these chunks"):
            signals.use()
        with refused(RuntimeError, f"publish: {ISSUING} a matmul that signals these chunks"):
            signals.publish()
        signals.fail(MemoryError("no room"))
        signals.use()


def test_an_epoch_is_published_once(cuda):
    signals, stream = make(), cuda.stream()
    issue(cuda, stream, signals)
    with cuda.on(stream), refused(ValueError, "publish: chunk 0 of epoch 1 is signalled already"):
        signals.publish()
    signals.advance()
    issue(cuda, stream, signals)
    cuda.run()
    assert all(signals.state())


def test_the_next_epoch_comes_behind_the_readers_of_the_last(cuda, signals):
    """Its matmul may write what they read; and a caller's words are zeroed by them."""
    producer, consumer = cuda.stream(), cuda.stream()
    done = issue(cuda, producer, signals)
    read(cuda, consumer, signals, done)
    producer.run()
    if not signals.self_reset:
        signals.advance()
    more = issue(cuda, cuda.stream(), signals)
    cuda.streams[-1].run()
    assert not more
    consumer.run()
    cuda.run()
    assert done[-1] == "reader"
    assert more == ["chunk 0", "chunk 1", "chunk 2"]


def test_under_capture_a_reader_comes_behind_the_matmul_and_each_replay_has_its_signals(cuda):
    signals, producer, consumer = make(), cuda.stream(), cuda.stream()
    with cuda.capture() as graph:
        done = issue(cuda, producer, signals)
        with cuda.on(consumer):
            words = signals.use()
    assert words.epoch == 0
    assert words.words.data_ptr() == signals._flags.data_ptr()
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


def test_each_replay_begins_with_zeros(cuda, signals):
    """Also where no launch of the graph reads: what the replay before has left is no signal of this one."""
    with cuda.capture() as graph:
        issue(cuda, cuda.current, signals)
    words = signals._flags
    for _ in range(2):
        graph.replay(cuda.streams[0])
        cuda.streams[0].run(1)
        assert words.tolist() == [0, 0, 0]
        cuda.run()
        assert words.tolist() == [1, 1, 1]


def test_a_matmul_that_fails_half_way_is_told_to_its_readers(cuda):
    signals, stream = make(), cuda.stream()
    with cuda.on(stream):
        signals.publish()
        signals.set(0)
        signals.fail(MemoryError("no room"))
    cuda.run()
    assert signals._read() == [1, -1, -1]
