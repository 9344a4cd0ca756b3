"""``publish=`` on the CPU: a chunk is complete when it is signalled, for all chunks and schedules."""

from __future__ import annotations

import threading

import pytest
import torch

import tilestream as ts
from error_rule import Maths, check, nans, rand
from streaming import no_thread_left
from tilestream.launch.cpu.publish import Publisher

pytestmark = pytest.mark.usefixtures("small_tiles")

UNIFORM, RAGGED = (13, 4), (0, 5, 5, 37, 50)


def arrival_of(rows: tuple[int, ...], pivot: int = 0, **how) -> ts.Arrival:
    return ts.Arrival.uniform(*rows, pivot, **how) if len(rows) == 2 else ts.Arrival.ragged(rows, pivot, **how)


class Reader:
    """Copies each chunk of ``out`` when it is signalled, and is told by the signals themselves."""

    def __init__(self, publish: ts.Arrival, out: torch.Tensor) -> None:
        self._signals, self._out, self._bounds = publish._signals, out, publish.chunks(out.shape[0]).bounds
        self.seen = nans(*out.shape, dtype=out.dtype)
        self.order: list[int] = []
        original = self._signals.set

        def announced(chunk: int, epoch: int | None = None) -> None:
            rows = slice(self._bounds[chunk], self._bounds[chunk + 1])
            self.seen[rows] = out[rows]  # before any other reader can know of it
            self.order.append(chunk)
            original(chunk, epoch)

        self._signals.set = announced  # type: ignore[method-assign]


@pytest.mark.parametrize("rows", [UNIFORM, RAGGED], ids=["uniform", "ragged"])
@pytest.mark.parametrize("schedule", ["auto", "dynamic"])
@pytest.mark.parametrize("pivot", [0, 2])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_chunk_is_whole_when_it_is_signalled(rows, schedule, pivot, workers):
    a, b, bias, residual = rand(50, 40), rand(40, 37), rand(37), rand(50, 37)
    publish, out = arrival_of(rows, pivot), nans(50, 37)
    reader = Reader(publish, out)
    for _ in range(3):
        with torch.inference_mode(), no_thread_left():
            result = ts.matmul(
                a, b, out=out, bias=bias, residual=residual, activation="silu", publish=publish, schedule=schedule,
                workers=workers,
            )  # fmt: skip
        assert result is out
        assert sorted(reader.order) == list(range(publish.num_chunks)), "each chunk once"
        if workers == 1 and rows == UNIFORM:
            assert reader.order[0] == pivot
        assert reader.seen.equal(out)
        check(out, Maths(a, b, bias, residual, activation="silu"))
        a.normal_()
        out.fill_(float("nan"))
        reader.order.clear()
        publish.advance()


def test_a_second_matmul_reads_what_the_first_publishes():
    a, b, c = rand(50, 40), rand(40, 37), rand(37, 20)
    publish, hidden, results = ts.Arrival.uniform(13, 4, pivot=1), nans(50, 37), []
    for _ in range(5):
        consumer = threading.Thread(
            target=lambda: results.append(ts.matmul(hidden, c, arrival=publish, workers=2, deadline=600))
        )
        consumer.start()  # waits at its gate
        ts.matmul(a, b, out=hidden, publish=publish, workers=2)
        consumer.join()
        check(results.pop(), Maths(hidden, c))
        check(hidden, Maths(a, b))
        hidden.fill_(float("nan"))
        a = rand(50, 40)
        publish.advance()


def test_rows_of_several_batches_are_published_as_they_are_read():
    a, b = rand(3, 20, 24), rand(3, 24, 18)
    publish, out = ts.Arrival.uniform(13, 5, pivot=2), nans(3, 20, 18)
    signals = publish._signals
    ts.matmul(a, b, out=out, publish=publish, workers=2)
    assert all(signals.state())
    check(out, Maths(a, b))
    x, weight, publish = rand(3, 20, 24), rand(18, 24), ts.Arrival.ragged([0, 1, 60])
    check(ts.linear(x, weight, publish=publish), Maths(x, weight.t()))
    assert all(publish._signals.state())


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32])
def test_words_of_the_callers_are_written_and_zeroed_by_the_reader(dtype):
    words = torch.zeros(4, dtype=dtype)
    publish = ts.Arrival.uniform(13, 4, signals=words)
    a, b, c = rand(50, 40), rand(40, 37), rand(37, 20)
    for _ in range(2):
        hidden = ts.matmul(a, b, publish=publish, workers=2)
        assert words.tolist() == [1] * 4
        check(ts.matmul(hidden, c, arrival=publish, workers=2), Maths(hidden, c))
        assert words.tolist() == [0] * 4


@pytest.mark.parametrize(("m", "n", "k"), [(50, 0, 40), (0, 37, 40), (50, 37, 0)])
def test_chunks_without_a_tile_are_signalled_too(m, n, k):
    publish = ts.Arrival.ragged([0, 0, m // 2, m])
    out = ts.matmul(rand(m, k), rand(k, n), publish=publish)
    assert out.shape == (m, n)
    assert all(publish.arrived(chunk) for chunk in range(3))


def test_who_waits_for_a_matmul_that_fails_is_told(monkeypatch):
    publish = ts.Arrival.uniform(13, 4)
    stored, calls = Publisher.stored, []

    def fails(self, item):
        calls.append(item)
        if len(calls) > 3:
            raise MemoryError("no room for it")
        stored(self, item)

    monkeypatch.setattr(Publisher, "stored", fails)
    hidden = nans(50, 37)
    with pytest.raises(MemoryError, match="no room for it"), no_thread_left():
        ts.matmul(rand(50, 40), rand(40, 37), out=hidden, publish=publish, workers=1)
    with pytest.raises(MemoryError, match="no room for it"):
        ts.matmul(hidden, rand(37, 20), arrival=publish, workers=2, deadline=600)


def test_through_a_compiler():
    publish = ts.Arrival.uniform(13, 4)
    a, b = rand(50, 40), rand(40, 37)
    compiled = torch.compile(lambda a, b: ts.matmul(a, b, publish=publish) + 1, backend="aot_eager", fullgraph=True)
    check(compiled(a, b) - 1, Maths(a, b))
    assert all(publish.arrived(chunk) for chunk in range(4))


def refused(error: type[BaseException], says: str):
    return pytest.raises(error, match=f"^{says}")


def test_what_is_refused_before_anything_is_computed():
    a, b = rand(50, 40), rand(40, 37)
    publish = ts.Arrival.uniform(13, 4)
    with refused(TypeError, "matmul: publish is a str; it must be a tilestream.Arrival"):
        ts.matmul(a, b, publish="chunks")
    with refused(ValueError, r"publish: 5 chunks of 13 rows bring 53 to 65 rows, the result has 50; it takes num_chu"):
        ts.matmul(a, b, publish=ts.Arrival.uniform(13, 5))
    with refused(ValueError, "publish: its bounds end at row 49, the result has 50 rows"):
        ts.matmul(a, b, publish=ts.Arrival.ragged([0, 20, 49]))
    with refused(ValueError, "matmul: publish= with arrival=: after an expired deadline, NaN would be signalled"):
        ts.matmul(a, b, publish=publish, arrival=ts.Arrival.uniform(13, 4))
    with refused(ValueError, "matmul: schedule='static' with publish=; it must be 'auto' or 'dynamic'"):
        ts.matmul(a, b, publish=publish, schedule="static")
    with refused(RuntimeError, "matmul: publish= has no gradient, and an operand requires one"):
        ts.matmul(a.requires_grad_(), b, publish=publish)
    a = a.detach()
    assert not any(publish.arrived(chunk) for chunk in range(4)), "none of them has signalled"
    ts.matmul(a, b, publish=publish)
    with refused(ValueError, "publish: chunk 0 of epoch 1 is signalled already; arrival.advance\\(\\) begins"):
        ts.matmul(a, b, publish=publish)
