"""torch's modes and transforms: right, or refused; never silently wrong."""

from __future__ import annotations

import pytest
import torch

import tilestream as ts
from error_rule import Maths, check, rand


@pytest.mark.parametrize("source", ["tensor", "iterator"])
def test_streams_in_inference_mode(source):
    with torch.inference_mode():
        x, w = rand(100, 8), rand(8, 3)
        options = {} if source == "tensor" else {"shape": (100, 8), "dtype": torch.float32}
        with ts.stream_in(x if source == "tensor" else iter([x]), **options) as stream:
            check(ts.matmul(stream.tensor, w, arrival=stream.arrival), Maths(x, w))


def test_an_iterator_runs_in_its_callers_mode_not_in_ours():
    seen = []

    def blocks():
        seen.append(torch.is_inference_mode_enabled())
        yield rand(10, 4)

    with ts.stream_in(blocks(), shape=(10, 4), dtype=torch.float32) as stream:
        stream.wait(300)
    assert seen == [False]


def test_own_words_that_are_an_inference_tensor():
    with torch.inference_mode():
        words = torch.ones(4, dtype=torch.int32)
    x, w = rand(100, 8), rand(8, 3)
    arrival = ts.Arrival.uniform(25, 4, signals=words)
    check(ts.matmul(x, w, arrival=arrival), Maths(x, w))
    assert words.tolist() == [0, 0, 0, 0]
    arrival.signal(2)
    assert words.tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("how", ["stream_k", "dynamic"])
def test_a_default_device_changes_nothing(how):
    a = rand(64, 64, dtype=torch.bfloat16)
    plan = ts.plan(64, 64, 64, dtype=torch.bfloat16, schedule=how, workers=3, tile=(32, 32))
    with torch.device("meta"):
        answer = plan.run(a, a, activation="relu")
        with ts.stream_in(a) as stream:
            assert stream.wait(300).device.type == "cpu"
    check(answer, Maths(a, a, activation="relu"))
    check(ts.matmul(a, a, activation="relu", schedule=how, workers=3), Maths(a, a, activation="relu"))


def test_a_plan_is_not_compiled_but_runs():
    a, b = rand(30, 40), rand(40, 50)
    plan = ts.plan(30, 50, 40, schedule="dynamic", workers=2)
    compiled = torch.compile(lambda x, y: plan.run(x, y) * 2, backend="eager")
    check(compiled(a, b) / 2, Maths(a, b))
    check(ts.matmul(a, b), Maths(a, b))


def test_overlap_is_seen_across_storages():
    numpy = pytest.importorskip("numpy")
    array = numpy.zeros((65, 64), "f4")
    out, other = torch.from_numpy(array)[1:], torch.from_numpy(array[:-1])
    for arguments in ({"residual": other}, {}):
        a = rand(64, 64) if arguments else other
        with pytest.raises(ValueError, match="out: overlaps"):
            ts.matmul(a, rand(64, 64), out=out, **arguments)


def test_alpha_0_reads_no_operand():
    a, b, addend = rand(6, 5), rand(5, 4), rand(6, 4)
    a[2, 2] = float("nan")
    assert torch.equal(ts.addmm(addend, a, b, alpha=0), torch.addmm(addend, a, b, alpha=0))
