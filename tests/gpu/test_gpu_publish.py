"""Published outputs: a chunk that is signalled is there for every reader; counts are left as they were found.

PYTHONPATH=src python -m pytest -o addopts= -q tests/gpu/test_gpu_publish.py
"""

from __future__ import annotations

import pytest
import torch
from gpu_cases import BF16, E4M3, F32
from gpu_runs import captured, expired, nan, poison, randn, settle

import tilestream as ts
from error_rule import Maths, check
from tilestream.ops.publish import Publication, matmul_published
from tilestream.runtime.driver import stream_wait
from tilestream.runtime.streams import aside

#: M, N, K, rows of a chunk, pivot: whole tiles, tails, tiles in several chunks, few rows, few columns.
CASES = [
    (2048, 1024, 512, 1024, 1), (2048, 1024, 4096, 512, 3), (1000, 776, 512, 250, 2), (1030, 520, 256, 103, 9),
    (16, 4096, 1024, 8, 1), (4096, 16, 1024, 1024, 0), (96, 256, 256, 48, 1), (4096, 4096, 1024, 2048, 1),
]  # fmt: skip


def operands(m: int, n: int, k: int, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor]:
    return randn(m, k, dtype=dtype), randn(n, k, dtype=dtype).t()


@pytest.mark.parametrize(("m", "n", "k", "rows", "pivot"), CASES)
def test_each_chunk_is_read_as_soon_as_it_is_signalled(m, n, k, rows, pivot):
    a, b = operands(m, n, k)
    chunks = -(-m // rows)
    publication = Publication(chunks, a.device)
    for epoch in range(1, 6):
        a.normal_()
        out, copy = nan(m, n), nan(m, n)
        torch.cuda.synchronize()
        why = matmul_published(a, b, out, publication, epoch, rows, pivot)
        assert torch.cuda.get_device_capability()[0] != 9 or not why, why
        with aside(a.device) as stream:  # behind the launch, of which it waits for nothing but the words
            for i in range(chunks):
                chunk = (pivot + i) % chunks
                stream_wait(stream.cuda_stream, publication.address(chunk), epoch)
                copy[chunk * rows : (chunk + 1) * rows].copy_(out[chunk * rows : (chunk + 1) * rows])
        settle()
        assert copy.equal(out)
        assert publication.state() == ([epoch] * chunks, [0] * chunks)
    check(out, Maths(a, b))


def test_what_the_kernel_does_not_take_is_published_a_launch_a_chunk():
    a, b = operands(300, 130, 129)  # a stride that TMA cannot address
    publication, out = Publication(3, a.device), nan(300, 130)
    assert matmul_published(a, b, out, publication, 1, 100, 2)
    assert publication.state() == ([1, 1, 1], [0, 0, 0])
    check(out, Maths(a, b))


@pytest.mark.parametrize("kind", ["tensor", "row"])
def test_fp8_with_scales(kind):
    a, b = operands(512, 256, 512, E4M3)
    one = kind == "tensor"
    scale_a = torch.rand(1 if one else 512, 1, device="cuda") + 0.5
    scale_b = torch.rand(1, 1 if one else 256, device="cuda") + 0.5
    publication, out = Publication(2, a.device), nan(512, 256)
    matmul_published(a, b, out, publication, 1, 256, 1, scale_a=scale_a, scale_b=scale_b)
    assert publication.state() == ([1, 1], [0, 0])
    check(out, Maths(a, b, scale_a=scale_a, scale_b=scale_b))


def test_more_chunks_than_signals_are_refused():
    a, b = operands(256, 64, 64)
    with pytest.raises(ValueError, match="4 chunks to publish; there are signals for 2"):
        matmul_published(a, b, nan(256, 64), Publication(2, a.device), 1, 64)


# Public: publish=, and a matmul on another stream that reads ---------------------------------------------------------

#: M, hidden, N, K, rows of a chunk, pivot: many waves, one wave, tails, chunks smaller than a tile.
CHAINS = [
    (8192, 4096, 1024, 1024, 1024, 3), (1024, 512, 256, 512, 256, 1), (1000, 776, 264, 512, 250, 2),
    (300, 256, 256, 256, 40, 5),
]  # fmt: skip


def weight(k: int, n: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return randn(n, k, dtype=dtype).t() / k**0.5


def streams(count: int) -> list[torch.cuda.Stream]:
    torch.cuda.synchronize()
    return [torch.cuda.Stream() for _ in range(count)]


class Chain:
    """``(a @ w) @ w2`` through one buffer, with other numbers each turn: a reader that is early or late errs."""

    TIMES = (1, -2, 4)  # exact in every dtype

    def __init__(self, m: int = 2048, k: int = 512, hidden: int = 1024, n: int = 512) -> None:
        a, self.w, self.w2 = randn(m, k), weight(k, hidden), weight(hidden, n)
        self.inputs = [times * a for times in self.TIMES]
        self.expected = [(x @ self.w) @ self.w2 for x in self.inputs]
        self.h = nan(m, hidden)
        self.read_: list[tuple[int, torch.Tensor]] = []

    def publish(self, turn: int, publish: ts.Arrival) -> None:
        assert ts.matmul(self.inputs[turn % 3], self.w, out=self.h, publish=publish) is self.h

    def read(self, turn: int, publish: ts.Arrival, deadline: float = 10.0) -> torch.Tensor:
        y = ts.matmul(self.h, self.w2, arrival=publish, deadline=deadline)
        self.read_.append((turn, y))
        return y

    def check(self) -> None:
        """Each turn's numbers are that turn's."""
        settle()
        for turn, y in self.read_:
            wrong = (y.float() - self.expected[turn % 3].float()).abs().nan_to_num(torch.inf).max().item()
            assert wrong < 0.25 * abs(self.TIMES[turn % 3]), (turn, wrong)


@pytest.mark.parametrize(("m", "hidden", "n", "k", "rows", "pivot"), CHAINS)
def test_two_matmuls_read_what_another_publishes_beside_a_neighbour(m, hidden, n, k, rows, pivot):
    chain, x, (producer, other, *readers) = Chain(m, k, hidden, n), randn(4096, 4096), streams(4)
    publish = ts.Arrival.uniform(rows, -(-m // rows), pivot, device="cuda")
    for turn in range(40):
        with torch.cuda.stream(other):
            x @ x
        with torch.cuda.stream(producer):
            if turn % 2:  # else what readers of the epoch before still read is written by the matmul alone
                for reader in readers:
                    producer.wait_stream(reader)
                poison(chain.h)
            if turn % 4 == 1:
                torch.cuda._sleep(2_000_000)  # the reader is issued long before the matmul begins
            chain.publish(turn, publish)
        for reader in readers:
            with torch.cuda.stream(reader):
                if turn % 4 == 2:
                    torch.cuda._sleep(2_000_000)
                chain.read(turn, publish)
        publish.advance()
    assert len(chain.read_) == 80
    chain.check()
    check(chain.h, Maths(chain.inputs[turn % 3], chain.w))
    check(chain.read_[-1][1], Maths(chain.h, chain.w2))


@pytest.mark.parametrize("how", ["one reader", "readers in turn", "some unread", "advanced elsewhere"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32], ids=str)
def test_words_of_the_callers(dtype, how):
    chain, words = Chain(), torch.zeros(4, dtype=dtype, device="cuda")
    publish, (producer, other, *readers) = ts.Arrival.uniform(512, 4, signals=words), streams(4)
    for turn in range(20):
        with torch.cuda.stream(producer):
            chain.publish(turn, publish)
        if how == "some unread" and turn % 3:
            continue
        with torch.cuda.stream(readers[turn % 2 if how == "readers in turn" else 0]):
            if turn % 4 == 1:
                torch.cuda._sleep(1_000_000)
            chain.read(turn, publish)
        if how == "advanced elsewhere":
            with torch.cuda.stream(other):
                publish.advance()
    torch.cuda.synchronize()
    left = [int(how == "some unread")] * 4
    assert words.view(torch.int32).tolist() == left, "a reader that has seen them zeroes them"
    chain.check()


def test_a_reader_of_the_callers_words_that_were_taken_back_expires():
    """No stream waits for them, which nothing would end: the launch does, and that has a deadline."""
    chain, words = Chain(512), torch.zeros(4, dtype=torch.int32, device="cuda")
    publish, (producer, consumer) = ts.Arrival.uniform(128, 4, signals=words), streams(2)
    with torch.cuda.stream(producer):
        chain.publish(0, publish)
        words.zero_()
    consumer.wait_stream(producer)
    with torch.cuda.stream(consumer):
        y = chain.read(0, publish, deadline=0.5)
    expired()
    assert y.isnan().all()
    publish.reset()
    chain.read_.clear()
    with torch.cuda.stream(producer):
        chain.publish(1, publish)
    with torch.cuda.stream(consumer):
        chain.read(1, publish)
    chain.check()


def test_in_a_graph_the_reader_comes_behind_the_matmul():
    chain, publish, (consumer,) = Chain(), ts.Arrival.uniform(512, 4, device="cuda"), streams(1)
    chain.publish(0, publish)  # compiled
    with torch.cuda.stream(consumer):
        chain.read(0, publish)
    publish.advance()
    chain.check()
    with captured() as graph:
        chain.publish(0, publish)
        consumer.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(consumer):
            y = chain.read(0, publish)
        torch.cuda.current_stream().wait_stream(consumer)
    for _ in range(20):
        chain.inputs[0].normal_()
        poison(chain.h)
        graph.replay()
        settle()
        check(chain.h, Maths(chain.inputs[0], chain.w))
        check(y, Maths(chain.h, chain.w2))


@pytest.mark.parametrize("kind", ["ragged", "batches", "odd", "float32"])
def test_what_is_published_a_launch_a_chunk_is_read_behind_the_last(kind):
    dtype = F32 if kind == "float32" else BF16
    k, hidden = (129, 130) if kind == "odd" else (128, 128)  # 130: strides that TMA cannot address
    a = randn(*((3, 100) if kind == "batches" else (300,)), k, dtype=dtype)
    w, w2 = weight(k, hidden, dtype), weight(hidden, 64, dtype)
    if kind == "batches":
        w = w.expand(3, -1, -1) + randn(3, 1, 1, dtype=dtype)
    publish = ts.Arrival.uniform(90, 4, 1, device="cuda")
    if kind == "ragged":
        publish = ts.Arrival.ragged([0, 7, 7, 180, 300], 2, device="cuda")
    residual = randn(*a.shape[:-1], hidden, dtype=dtype)
    inputs, found, (producer, consumer) = [times * a for times in Chain.TIMES], [], streams(2)
    for turn in range(10):
        with torch.cuda.stream(producer):
            h = ts.matmul(inputs[turn % 3], w, residual=residual, activation="gelu", publish=publish)
        with torch.cuda.stream(consumer):
            found.append((h, ts.matmul(h, w2, arrival=publish, deadline=10)))
        publish.advance()
    settle()
    for turn, (h, y) in enumerate(found):
        check(h, Maths(inputs[turn % 3], w, residual=residual, activation="gelu"))
        check(y, Maths(h, w2))
