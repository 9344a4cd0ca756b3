"""``publish=`` on a fake GPU: what is launched for which rows, what is signalled behind it, what readers wait for.

What a real one does is in ``tests/gpu/test_gpu_publish.py``.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from error_rule import Maths, check, nans, rand
from fake_cuda import DEVICE
from tilestream.arrival.device import DeviceSignals
from tilestream.arrival.flat import FlatArrival
from tilestream.core.operands import Epilogue, GemmOperands
from tilestream.ops import publish as module
from tilestream.ops.gpu import How


@pytest.fixture
def launches(cuda, monkeypatch):
    """The calls of `gpu.run`, each of which computes when its stream is there."""
    made: list[tuple[int, ...]] = []

    def run(x, how, *, op):
        a, b, out, epilogue = x
        made.append((a.shape[0], b.shape[1], how.limit))
        residual = None if epilogue.residual is None else epilogue.residual[0]
        for name, tensor, shape in (("residual", residual, out.shape), ("a", a, (out.shape[0], b.shape[0]))):
            assert tensor is None or tuple(tensor.shape) == tuple(shape), name

        def compute():
            acc = a.double() @ b.double()
            for scale in (epilogue.scale_a, epilogue.scale_b):
                acc = acc if scale is None else acc * scale.double()
            acc = acc if residual is None else acc + residual.double()
            out.copy_(torch.relu(acc) if epilogue.activation == "relu" else acc)

        cuda.current.give(compute)

    def find(*args, **how):
        raise NotImplementedError("no kernel")

    fake = SimpleNamespace(run=run, find=find, issue=None, How=How)
    monkeypatch.setattr(module, "gpu", fake)
    monkeypatch.setattr(module, "check_device", lambda index: None)
    return made


def flat_of(signals: DeviceSignals, count: int, rows: int, bounds: tuple[int, ...], pivot: int) -> FlatArrival:
    return FlatArrival(signals.key, signals.epoch, pivot, count, rows, bounds, None)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("scaled", ["none", "one", "row"])
def test_a_launch_a_chunk_from_the_pivot_on_and_its_signal_behind_it(cuda, launches, batched, ragged, scaled):
    """Chunks that end inside a batch, that span two, and that have no rows."""
    batch = (3,) if batched else ()
    total, m = (60, 20) if batched else (50, 50)
    a, b, residual, out = (rand(*batch, *s) for s in ((m, 8), (8, 6), (m, 6), (m, 6)))
    out.fill_(float("nan"))
    scales = {
        "none": (None, None), "one": (rand(1).abs(), rand(1).abs()),
        "row": (rand(*batch, m, 1).abs(), rand(*batch, 1, 6).abs()),
    }[scaled]  # fmt: skip
    bounds = (0, 7, 7, 33, total) if ragged else (*range(0, total, 13), total)
    count, pivot = len(bounds) - 1, 2
    signals = DeviceSignals(count, DEVICE)
    flat = flat_of(signals, count, 0 if ragged else 13, bounds if ragged else (), pivot)
    stacked = residual if batched else residual.unsqueeze(0)
    epilogue = Epilogue(1.0, None, stacked, 1.0, "relu", *scales)
    stream = cuda.stream()
    with cuda.on(stream):
        assert module.publish(GemmOperands(a, b, out, epilogue), flat, How(limit=7), "matmul") == "no kernel"
    rows, seen = out.view(total, 6), []
    while stream.run(1):
        there = [chunk for chunk, here in enumerate(signals.state()) if here]
        seen += [chunk for chunk in there if chunk not in seen]
        for chunk in there:
            assert not rows[bounds[chunk] : bounds[chunk + 1]].isnan().any(), "signalled before it was computed"
    assert seen == [(pivot + i) % count for i in range(count)]
    check(out, Maths(a, b, residual=residual, activation="relu", scale_a=scales[0], scale_b=scales[1]))
    assert all(limit == 7 for *_, limit in launches)
    found = signals._published
    assert found is not None
    assert found.first is None, "a reader waits for the last launch"


def test_where_the_kernel_publishes_a_reader_waits_for_the_pivot_chunk(cuda, launches, monkeypatch):
    signals, issued = DeviceSignals(4, DEVICE), []
    monkeypatch.setattr(module.gpu, "find", lambda *args, **how: issued.append(how) or "the launch")
    monkeypatch.setattr(module.gpu, "issue", lambda *args: issued.append(args))
    a, b, out = rand(50, 8), rand(8, 6), nans(50, 6)
    flat = flat_of(signals, 4, 13, (), 3)
    assert module.publish(GemmOperands(a, b, out, Epilogue()), flat, How(limit=0), "matmul") == ""
    asked, (launch, (*_, epilogue), awaited, op) = issued
    assert (asked["publishes"].pivot, launch, awaited, op) == (3, "the launch", None, "matmul")
    assert epilogue.publish.signals.data_ptr() == signals._eager.data_ptr()
    assert epilogue.publish.epoch == 1
    assert signals._published.first == (signals._eager.data_ptr() + 4 * 3, 1)


@pytest.mark.parametrize("by_kernel", [False, True])
def test_a_sums_product_is_published_by_the_kernel_or_a_launch_a_chunk(cuda, launches, monkeypatch, by_kernel):
    told, stream, publication = [], cuda.stream(), module.Publication(4, DEVICE)
    if by_kernel:
        monkeypatch.setattr(module.gpu, "find", lambda *args, **how: told.append(how) or told.append)
    a, b, out = rand(50, 8), rand(8, 6), nans(50, 6)
    with cuda.on(stream):
        why = module.matmul_published(a, b, out, publication, 5, 13, 2, scale_a=torch.ones(1), limit=7)
    if by_kernel:
        asked, x = told
        assert (why, launches, asked["publishes"].pivot, x.epilogue.publish.epoch) == ("", [], 2, 5)
        return
    assert why == "no kernel"
    seen = []
    while stream.run(1):
        there = [chunk for chunk, word in enumerate(publication.state()[0]) if word == 5]
        seen += [chunk for chunk in there if chunk not in seen]
        for chunk in there:
            assert not out[13 * chunk : 13 * chunk + 13].isnan().any(), "signalled before it was computed"
    assert seen == [2, 3, 0, 1]
    assert publication.state() == ([5] * 4, [0] * 4)
    check(out, Maths(a, b))
    assert all(limit == 7 for *_, limit in launches)
    with pytest.raises(ValueError, match="matmul: 5 chunks to publish; there are signals for 4"):
        module.matmul_published(a, b, out, publication, 6, 10)


@pytest.mark.parametrize("captured", [False, True])
def test_a_launch_that_fails_is_told_to_the_readers(cuda, launches, monkeypatch, captured):
    """Not to eager readers of a capture: there is no graph then."""
    signals, calls = DeviceSignals(4, DEVICE), []

    def fails(*args, **how):
        calls.append(args)
        if len(calls) == 2 or captured:
            raise RuntimeError("out of something")

    monkeypatch.setattr(module.gpu, "run", fails)
    x = GemmOperands(rand(50, 8), rand(8, 6), nans(50, 6), Epilogue())
    with cuda.capture() if captured else nullcontext(), pytest.raises(RuntimeError, match="out of something"):
        module.publish(x, flat_of(signals, 4, 13, (), 1), How(limit=0), "matmul")
    cuda.run()
    assert signals._read() == ([0] * 4 if captured else [-1, 1, -1, -1])
    assert type(signals.error(1)) is (type(None) if captured else RuntimeError)
