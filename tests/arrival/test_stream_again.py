"""A stream like an earlier one: its copies are issued first, and the rest is made while they are under way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tilestream as ts
from fake_cuda import DEVICE, FakeCuda, fake_cuda
from tilestream.arrival import stream as streams
from tilestream.runtime.sequence import Sequence

ROWS, PER = 8, 2


@pytest.fixture
def cuda(monkeypatch):
    """A fake GPU, which `stream_in` takes for the current one."""
    with fake_cuda() as made:
        onto = streams._onto
        gpu = SimpleNamespace(type="cuda", index=DEVICE.index)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(streams, "target_of", lambda op, source, device: gpu)
        monkeypatch.setattr(streams, "_onto", lambda device, *given, **more: onto(DEVICE, *given, **more))
        monkeypatch.setattr(streams, "_made", {})
        yield made


def matrix(cuda: FakeCuda, begin: float = 0.0, rows: int = ROWS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return cuda.pin(torch.arange(rows * 3, dtype=dtype).view(rows, 3) + begin)


def refuse_looking(*_: Any, **__: Any) -> None:
    raise AssertionError("it is looked at as if there had been none before")


def test_it_is_right_and_costs_no_look(cuda, monkeypatch):
    first = ts.stream_in(matrix(cuda), rows_per_chunk=PER, pivot=1)
    cuda.run()
    assert torch.equal(first.wait(), first._source.tensor)
    lane = first._landing._lane
    del first
    monkeypatch.setattr(streams, "tensor_source", refuse_looking)
    cuda.driver.calls.clear()
    other = matrix(cuda, 50.0)
    again = ts.stream_in(other, rows_per_chunk=PER, pivot=1)
    assert cuda.driver.calls == [
        "record_event",
        "wait_event",
        *["copy_in", "stream_write"] * (ROWS // PER),
        "record_event",
    ]
    assert again._landing._lane is lane
    assert (again.arrival.pivot, again.arrival.num_chunks, again.arrival.rows_per_chunk) == (1, ROWS // PER, PER)
    assert not again.done
    assert [again.arrival.arrived(chunk) for chunk in range(4)] == [False] * 4
    cuda.run()
    assert torch.equal(again.wait(), other)
    assert again.explain() == f"a CPU tensor [{ROWS}, 3] float32, copied to cpu; {ROWS} rows in 4 chunks"
    other.add_(1.0)
    again.restart()
    cuda.run()
    assert torch.equal(again.wait(), other)


def test_the_memory_is_known_to_torch_before_the_first_copy(cuda, monkeypatch):
    ts.stream_in(matrix(cuda)).wait()
    seen: list[bool] = []
    copy_in = cuda.driver.copy_in

    def copied(stream: int, to: int, *more: int) -> None:
        seen.append(any(storage == to for storage, handle in cuda._recorded if handle == stream))
        copy_in(stream, to, *more)

    monkeypatch.setattr(cuda.driver, "copy_in", copied)
    again = ts.stream_in(matrix(cuda))
    assert seen
    assert seen[0]
    again.wait()


def steps_to_the_first_copy(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> int:
    """Functions that Python calls until the driver is given the first operation."""
    counted: list[str] = []
    first: list[int] = []

    def issue(sequence: Sequence, *values: int) -> None:
        first.append(len(counted))
        sequence.issue_rest(0, *values)

    with monkeypatch.context() as patch:
        patch.setattr(Sequence, "issue", issue)
        patch.setattr(torch.Tensor, "is_pinned", lambda x: True)  # the fake's own steps are not counted
        patch.setattr(torch.Tensor, "record_stream", lambda x, stream: None)
        sys.setprofile(lambda frame, event, argument: counted.append(event) if event in ("call", "c_call") else None)
        try:
            made = call()
        finally:
            sys.setprofile(None)
        cuda.run()
        del made
    return first[0]


def test_until_the_first_copy_it_takes_few_steps(cuda, monkeypatch):
    """The link is idle meanwhile, so all that can be decided once a shape is."""
    x = matrix(cuda)
    kept = ts.stream_in(x, rows_per_chunk=PER)
    ts.stream_in(x, rows_per_chunk=PER).wait()
    kept.wait()
    again = steps_to_the_first_copy(cuda, monkeypatch, kept.restart)
    assert again <= 40
    assert steps_to_the_first_copy(cuda, monkeypatch, lambda: ts.stream_in(x, rows_per_chunk=PER)) <= again
    # More chunks are no more steps, and what was dropped while it is copied adds few.
    long = matrix(cuda, rows=60)
    held = [ts.stream_in(long, rows_per_chunk=1) for _ in range(3)]
    cuda.run()
    held.clear()
    assert steps_to_the_first_copy(cuda, monkeypatch, lambda: ts.stream_in(long, rows_per_chunk=1)) <= again


@pytest.mark.parametrize(
    "change",
    [
        lambda x: {"rows_per_chunk": 4},
        lambda x: {"pivot": 1},
        lambda x: {"bounds": (0, 3, ROWS)},
        lambda x: {"source": x.double()},
        lambda x: {"source": torch.cat([x, x])},
        lambda x: {"source": x.clone().requires_grad_()},
        lambda x: {"source": torch.stack([x, x], 2)[..., 0]},
    ],
    ids=["chunk", "pivot", "bounds", "dtype", "shape", "gradient", "strides"],
)
def test_what_differs_is_looked_at(cuda, monkeypatch, change):
    x = matrix(cuda)
    ts.stream_in(x, rows_per_chunk=PER).wait()
    monkeypatch.setattr(streams, "tensor_source", refuse_looking)
    given = {"source": x, "rows_per_chunk": PER} | change(x)
    if given.get("bounds"):
        del given["rows_per_chunk"]
    cuda.pin(given["source"])
    with pytest.raises(AssertionError, match="as if there had been none"):
        ts.stream_in(**given)


def test_what_is_not_pinned_or_not_dense_is_looked_at(cuda, monkeypatch):
    ts.stream_in(matrix(cuda), rows_per_chunk=PER).wait()
    monkeypatch.setattr(streams, "tensor_source", refuse_looking)
    for source in (torch.zeros(ROWS, 3), torch.zeros(ROWS, 3).to_sparse()):
        with pytest.raises(AssertionError, match="as if there had been none"):
            ts.stream_in(source, rows_per_chunk=PER)
    with cuda.capture(), pytest.raises(AssertionError, match="as if there had been none"):
        ts.stream_in(matrix(cuda), rows_per_chunk=PER)


def test_of_copies_that_the_driver_refuses_none_is_said_to_arrive(cuda, monkeypatch):
    ts.stream_in(matrix(cuda), rows_per_chunk=PER).wait()
    copies: list[int] = []

    def copy_in(stream: int, to: int, source: int, size: int) -> None:
        if len(copies) == 2:
            raise RuntimeError("out of pinned luck")
        copies.append(to)
        type(cuda.driver).copy_in(cuda.driver, stream, to, source, size)

    monkeypatch.setattr(cuda.driver, "copy_in", copy_in)
    again = ts.stream_in(matrix(cuda), rows_per_chunk=PER)
    cuda.run()
    assert [again.arrival.arrived(chunk) for chunk in range(4)] == [True, True, False, False]
    with pytest.raises(RuntimeError, match="out of pinned luck"):
        again.wait()


def test_no_more_kinds_than_a_bound_are_kept(cuda, monkeypatch):
    monkeypatch.setattr(streams, "_MOST_MADE", 3)
    for rows in range(2, 9):
        ts.stream_in(matrix(cuda, rows=rows), rows_per_chunk=1).wait()
        assert 1 <= len(streams._made) <= 3
