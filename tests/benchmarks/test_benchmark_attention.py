"""The attention benchmarks without a GPU: their sections, the numbers, plans and checks of 8 bits, their shapes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from benchmarks.attention import prefill
from benchmarks.attention.bench import Run, Shape
from benchmarks.core.records import Record
from benchmarks.report import attention
from benchmarks.run import options

import tilestream as ts
from tilestream.core.gpu_specs import named
from tilestream.trace import LaunchTrace, Span


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    """The sections' module on a GPU that is the CPU: few tokens, SDPA for cuDNN, and a clock that only calls."""
    from benchmarks.attention import bench, prefill

    class Clock:
        def milliseconds(self, calls):
            return {name: 1e-6 for name, call in calls.items() if call() is not None}

    def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        x = (x.transpose(1, 2) for x in (q, k, v))
        shared = k.shape[2] != q.shape[2]
        return torch.nn.functional.scaled_dot_product_attention(*x, is_causal=causal, enable_gqa=shared).transpose(1, 2)

    for name in ("randn", "zeros", "tensor", "arange", "randperm"):
        made = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *x, made=made, device="cpu", **how: made(*x, **how))
    for name, value in (("HiddenLaunchClock", Clock), ("TOKENS", 256), ("cudnn", cudnn), ("HOPPER_PEAK", 1e9)):
        monkeypatch.setattr(bench, name, value)
    for name, value in (("LENGTHS", (64, 64)), ("cudnn", cudnn), ("mix", lambda: [5, 40, 17]), ("like", lambda _: 64)):
        monkeypatch.setattr(prefill, name, value)
    monkeypatch.setattr(bench.Run.rated, "__defaults__", (1e9,))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(prefill, "host_microseconds", lambda calls, **_: (dict.fromkeys(calls, 1.0), {}))
    return prefill


def test_a_dry_run_of_keys_that_arrive_has_both_clocks(results: Path) -> None:
    session = Run(options("attention", "arrival", str(results), "--dry", "--seconds", "300"))
    prefill.arrival(session)
    (record,) = session._records.values()
    assert session.bad == 0
    ways = {"copy", "attention", "one after the other", "overlapped", "overlapped, tiles whole"}
    assert len(record.rows) == 2
    for row in record.rows:
        assert set(row["ms"]) == set(row["gpu_ms"]) == ways
        assert set(row["over_larger"]) == {"ms", "gpu_ms"}
    text = "\n".join(attention.page(results))
    (line,) = [line for line in text.splitlines() if line.startswith("| 32 x 256 in 4 chunks |")]
    assert line.count(" : ") == len(ways) + 1


def test_a_record_with_one_clock_is_rendered_as_it_is() -> None:
    ms = {"copy": 2.5, "attention": 2.9, "overlapped": 5.1, "over the larger": 1.759}
    data = {"rows": [{"name": "arrival 4 x 8 in 2 chunks", "ms": ms}], "stem": "attention_arrival", "device": "a GPU",
            "torch": "2", "commit": "c", "date": "d"}  # fmt: skip
    assert "| 4 x 8 in 2 chunks | 2.5 | 2.9 | 5.1 | 1.759 |" in "\n".join(attention.arriving(data))


def test_sections_leave_rows_that_can_be_rendered(on_the_cpu, results: Path) -> None:
    session = Run(options("attention", "dense", str(results), "--seconds", "60"))
    shapes = [Shape(16, 2, 64, True), Shape(16, 2, 128, False)]
    on_the_cpu.dense(session, shapes)
    on_the_cpu.heads(session)
    on_the_cpu.host(session)
    on_the_cpu.lists(session)
    (record,) = session._records.values()
    assert session.bad == 0
    assert {failure.split()[2] for failure in record.data["failures"]} == {"S512", "S1024", "S2048"}, "no such sequence"
    names = [row["name"] for row in record.rows if row.get("tflops") != {}]
    assert names == [
        "D16 causal S64", "D16 full S128", *(f"heads 16:{kv} D128 {mask} S64" for kv in (2, 16) for mask in MASKS),
        "host", "lists, causal", "lists dense S64",
    ]  # fmt: skip
    assert "### Dense calls, no GPU" in "\n".join(attention.page(results))


MASKS = ("causal", "full")


# The page -------------------------------------------------------------------------------------------------------------


def test_how_even_a_launch_is() -> None:
    """Four workers, of which one leaves after 0.9 ms and the others after 1."""
    launch = LaunchTrace("attention", "", 4, 9, 10.0)
    ends = [(10.0006, 10.001), (10.0006, 10.001), (10.0006, 10.0009), (10.0006, 10.0008, 10.001)]
    for worker, of in enumerate(ends):
        spans = [Span(worker, "tile", begin, end, 0, 0, 0, 0, 1) for begin, end in itertools.pairwise((10.0, *of))]
        launch.by_worker[worker] += spans
    launch.end = 10.001
    assert attention.evenness(launch) == pytest.approx((0.975, 0.9, 2, 3, 0.6))


def test_what_is_behind_is_counted_by_class() -> None:
    def dense(dim: int, length: int, ours: float) -> dict:
        return {"dim": dim, "length": length, "causal": False, "tflops": {"cudnn": 400.0, "fa4": 100.0, "ts": ours}}

    rows = [dense(64, 512, 300.0), dense(64, 4096, 350.0), dense(128, 4096, 380.0), dense(256, 4096, 300.0)]
    head, text = attention.behind([*rows, dense(256, 4096, 400.0)])
    assert head == "**Behind the faster peer**, below 0.98:"
    counts = [line.partition(" (")[0] for line in text.splitlines()]
    assert counts == [
        "- few keys: 1 of 1, down to 0.750", "- head dim 64: 1 of 2, down to 0.875",
        "- head dim 128: 1 of 1, down to 0.950", "- others: 1 of 5, down to 0.750",
    ]  # fmt: skip
    assert attention.behind([dense(128, 1024, 400.0)]) == []


# 8 bits ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fp8():
    pytest.importorskip("triton")
    from benchmarks.attention import fp8

    return fp8


def test_cudnn_is_given_the_same_numbers(fp8) -> None:
    torch.manual_seed(0)
    shape = fp8.SHAPES[0]._replace(dim=16, heads=4, length=4096)
    narrow, wide = fp8.numbers(shape, "cpu")
    for x, scale, y in zip(narrow[:3], (narrow.scale_q, narrow.scale_k, narrow.scale_v), wide, strict=True):
        assert x.dtype == torch.float8_e4m3fn
        assert scale.shape == (4, 4)
        assert torch.equal(y.double(), x.double() * scale.double()[:, None, :, None])
        assert len(scale.unique()) > 1
    assert narrow.out.isnan().all()


@pytest.mark.parametrize("causal", [True, False])
def test_an_answer_is_timed_if_it_keeps_the_rule(fp8, causal: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = fp8.Shape(16, 2, 100, causal)
    given = fp8.numbers(shape, "cpu")
    x = given.operands
    scales = {name: getattr(x, name) for name in ("scale_q", "scale_k", "scale_v")}

    def right() -> torch.Tensor:
        return ts.attention(*x[:3], causal=causal, **scales)

    def unscaled() -> torch.Tensor:
        return ts.attention(*x[:3], causal=causal)

    def late() -> torch.Tensor:
        raise RuntimeError("no time")

    def other_mask() -> torch.Tensor:
        return ts.attention(*x[:3], causal=not causal, **scales)

    record = Record("attention_fp8", tmp_path)
    calls = {
        "cudnn": lambda: ts.attention(*given.wide, causal=causal),
        "right": right, "unscaled": unscaled, "late": late, "other mask": other_mask,
    }  # fmt: skip
    kept, found = fp8.checked(record, "a row", shape, given, calls)
    assert list(kept) == ["cudnn", "right"] == list(found)
    assert found["right"]["max"] <= 2 * found["right"]["peer_max"] + torch.finfo(torch.bfloat16).eps
    unscaled_said, late_said, mask_said = record.data["failures"]
    assert unscaled_said.startswith("a row unscaled: AssertionError: wrong answer")
    assert late_said == "a row late: RuntimeError: no time"
    assert mask_said.startswith("a row other mask: AssertionError: wrong answer")


def test_both_kernels_are_launched_whatever_calls_get(fp8) -> None:
    for shape in fp8.SHAPES:
        made = fp8.launches(shape, named("h100"))
        assert [plan.backend for plan, _ in made.values()] == ["hopper", "portable"]
        for plan, layout in made.values():
            assert plan.problem.scaled
            assert layout.q == layout.k == (shape.length * shape.heads * shape.dim, shape.heads * shape.dim, shape.dim)
            assert layout.scale_v == (shape.heads, 1)


# Shapes ---------------------------------------------------------------------------------------------------------------


def test_dense_calls_that_a_mix_is_like() -> None:
    from benchmarks.attention import prefill as gpu

    assert gpu.like([512] * 7) == 512
    assert gpu.like([1000, 3000]) == 2496
    assert gpu.like([3]) == 64


def test_the_sizes_of_groups_that_are_timed() -> None:
    from benchmarks.attention import tiles

    shape = tiles.Shape(128, 16, 1024, True)
    sizes = tiles.sizes_of(shape)
    assert sizes == sorted(set(sizes))
    assert {4, 8, 16, 32, 16896 // 1024, 61} <= set(sizes)  # 61 heads of 512 KB are 32 MB
    # Never more than there are.
    assert max(tiles.sizes_of(shape._replace(length=16384, heads=2))) == 2
