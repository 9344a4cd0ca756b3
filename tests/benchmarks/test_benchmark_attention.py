"""The timeline of a call of attention: what the page says of its record, and the picture. Operands of 8 bits: numbers,
plans and checks of their benchmark, as far as it goes without a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.attention.bench import Run, Shape
from benchmarks.core.records import Record
from benchmarks.report import attention, plots
from benchmarks.run import options

import tilestream as ts
from tilestream.core.gpu_specs import named
from tilestream.trace import LaunchTrace, export
from tilestream.trace.record import Span


def launch() -> LaunchTrace:
    """Four workers of which one leaves after 0.9 ms, the others after 1."""
    made = LaunchTrace("attention", "causal, 16384 tokens, a GPU: hopper dynamic, 4 workers", 4, 9, 10.0)
    for worker in range(4):
        made.by_worker[worker].append(Span(worker, "tile", 10.0, 10.0006, 0, 3, worker, 0, 1))
        end = 10.0009 if worker == 2 else 10.001
        made.by_worker[worker].append(Span(worker, "tile", 10.0006, end, 0, 2, worker, 0, 1))
    made.by_worker[3][-1] = made.by_worker[3][-1]._replace(end=10.0008)
    made.by_worker[3].append(Span(3, "tile", 10.0008, 10.001, 0, 1, 0, 0, 1))
    made.end = 10.001
    return made


def test_how_even_a_launch_is() -> None:
    busy, first, least, most, longest = attention.evenness(launch())
    assert (least, most) == (2, 3)
    assert busy == pytest.approx(0.975)
    assert first == pytest.approx(0.9)
    assert longest == pytest.approx(0.6)


def traced(results: Path, name: str = "trace_attention") -> None:
    (results / "h200").mkdir(parents=True)
    export(launch(), results / "h200" / f"{name}.json.gz")


def test_the_page_says_whose_timeline_it_is(results: Path) -> None:
    assert attention.TIMELINES.sections(results) == []
    traced(results)
    (text,) = attention.TIMELINES.sections(results)
    text = " ".join(text.split())
    assert "## The timeline of a call causal, 16384 tokens, a GPU: `ts.attention`, hopper dynamic, 4 workers;" in text
    assert "4 workers; 9 tiles in 1.000 ms" in text
    assert "at a tile 97.5% of the launch; the first worker leaves after 90.0% of it. Each did 2 to 3 tiles" in text
    assert "The longest tile took 60.0% of the launch" in text
    assert "(../images/attention_timeline_h200.png)" in text


def test_the_picture_is_drawn(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    traced(results)
    attention.TIMELINES.plots(results, tmp_path / "images")
    assert (tmp_path / "images" / "attention_timeline_h200.png").read_bytes().startswith(b"\x89PNG")


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


def test_the_page_has_a_table_of_8_bits() -> None:
    about = {"device": "a GPU", "torch": "2", "triton": "3", "commit": "c", "date": "d", "dtype": "float8_e4m3fn"}
    rates = ({"cudnn": 500.0, "hopper": 600.0, "portable": 300.0}, {"cudnn": 450.0, "portable": 310.0})
    rows = [{"name": f"fp8 D128 causal S{1024 << i}", "tflops": one} for i, one in enumerate(rates)]
    text = "\n".join(attention.fp8({**about, "rows": rows}))
    assert text.startswith("### 8 bits, a GPU")
    assert "| D128 causal S1024 | 500 | 600 | 300 | 1.200 |" in text
    assert "| D128 causal S2048 | 450 |  | 310 |  |" in text


# Tables of dense calls, shared heads, mixes ---------------------------------------------------------------------------

ABOUT = {
    "device": "NVIDIA H200", "torch": "2", "triton": "3", "commit": "c", "date": "d", "dtype": "bfloat16", "stem": "x",
}  # fmt: skip


def dense(dim: int, causal: bool, length: int, heads_kv: int = 0, name: str = "", **tflops: float) -> dict:
    made = {"dim": dim, "heads": 16, "length": length, "causal": causal, "heads_kv": heads_kv, "tflops": tflops}
    return {"name": name or f"D{dim} {'causal' if causal else 'full'} S{length}", **made}


def test_means_by_the_columns_of_a_head_against_each_peer() -> None:
    rows = [
        dense(128, True, 512, cudnn=400.0, fa4=500.0, ts=500.0), dense(128, True, 1024, cudnn=400.0, ts=600.0),
        dense(64, False, 512, cudnn=400.0, fa4=200.0, ts=200.0),
    ]  # fmt: skip
    text = attention.by_width(rows)
    assert "| geometric mean of ours by | cuDNN | FA4 | the faster peer | the worst of these |" in text
    assert f"| D 128 | {(1.25 * 1.5) ** 0.5:.3f} | 1.000 | {1.5**0.5:.3f} | 1.000 |" in text
    assert "| D 128, full | - | - | - | - |" in text
    assert "| D 64 | 0.500 | 1.000 | 0.500 | 0.500 |" in text
    assert "| all |" in text


def test_what_is_behind_is_counted_by_class() -> None:
    rows = [
        dense(64, True, 512, cudnn=400.0, fa4=500.0, ts=450.0), dense(64, False, 1024, cudnn=400.0, ts=300.0),
        dense(64, False, 4096, cudnn=400.0, fa4=500.0, ts=400.0), dense(128, False, 4096, cudnn=400.0, ts=300.0),
        dense(128, False, 1024, cudnn=400.0, ts=400.0), dense(256, False, 4096, cudnn=400.0, ts=300.0),
    ]  # fmt: skip
    head, text = attention.behind(rows)
    assert head == "**Behind the faster peer**, below 0.98:"
    few, narrow, wide, other = text.splitlines()
    assert few.startswith("- few keys: 2 of 3, down to 0.750 (D 64, full, S 1024, cuDNN): an item has few blocks")
    assert narrow.startswith("- 64 columns: 1 of 3, down to 0.800 (D 64, full, S 4096, FA4): ")
    assert wide.startswith("- 128 columns: 1 of 2, down to 0.750 (D 128, full, S 4096, cuDNN): the tensor cores wait")
    assert other == "- others: 1 of 6, down to 0.750 (D 256, full, S 4096, cuDNN): not looked into."
    assert attention.behind(rows[-2:-1]) == []


def test_heads_that_share_keys_beside_those_that_have_their_own() -> None:
    rows = [
        dense(128, True, 1024, 2, "heads 16:2", cudnn=420.0, ts=450.0),
        dense(128, True, 1024, 16, "heads 16:16", cudnn=400.0, ts=500.0),
        dense(128, False, 1024, 2, "heads 16:2", cudnn=420.0, ts=450.0),
    ]
    *_, said, text = attention.heads({**ABOUT, "rows": rows})
    assert "geometric mean of ours 0.900, the least 0.900" in " ".join(said.split())
    assert text.splitlines()[-1] == "| causal, S 1024, 16:2 | 0.900 | 1.050 |"
    assert len(text.splitlines()) == 3, "of the other there is nothing to compare with"
    assert len(attention.heads({**ABOUT, "rows": rows[1:2]})) == 2, "no table of sharing"


def test_a_mix_of_lengths_beside_the_dense_call_that_is_like_it() -> None:
    mix = {"name": "lists, causal", "tflops": {"packed": 500.0, "pages of 16": 450.0}, "lengths": [1000, 3000]}
    alone, _ = attention.lists({**ABOUT, "rows": [mix]})
    assert alone.endswith("The record has no dense call to compare with.")
    rows = [mix, *(dense(128, True, s, 0, f"lists dense S{s}", ts=s / 4.0) for s in (512, 2500))]
    said, text = attention.lists({**ABOUT, "rows": rows})
    assert "beside the 625 of a dense call of sequences of 2500" in said
    assert text.splitlines()[-1] == "| 0.800 | 0.720 |"


def test_dense_calls_that_a_mix_is_like() -> None:
    from benchmarks.attention import prefill as gpu

    assert gpu.like([512] * 7) == 512
    assert gpu.like([1000, 3000]) == 2496
    assert gpu.like([3]) == 64


def test_a_device_has_one_plot(results: Path, tmp_path: Path, write) -> None:
    pytest.importorskip("matplotlib")
    both = {**ABOUT, "rows": [dense(128, c, s, cudnn=400.0, fa4=500.0, ts=500.0) for c in (0, 1) for s in (512, 1024)]}
    one = {**ABOUT, "date": "e", "rows": [dense(128, True, 512, cudnn=400.0, ts=500.0)]}
    other = {**one, "device": "NVIDIA H100 80GB HBM3", "rows": [*one["rows"], dense(64, True, 512, ts=1.0, cudnn=2.0)]}
    write("h200", "attention", both)
    write("h200", "attention_b", one)
    write("h100", "attention", other)
    write("third", "attention", {**one, "device": "a third", "rows": []})
    text = "\n".join(attention.page(results))
    assert text.count("](../images/attention_h200.png)") == text.count("](../images/attention_h100.png)") == 1
    plots.draw_all(results, tmp_path / "images")
    pictures = sorted(path.name for path in (tmp_path / "images").iterdir())
    assert pictures == ["attention_h100.png", "attention_h200.png"]


def test_the_sizes_of_groups_that_are_timed() -> None:
    from benchmarks.attention import tiles

    shape = tiles.Shape(128, 16, 1024, True)
    sizes = tiles.sizes_of(shape)
    assert sizes == sorted(set(sizes))
    assert {4, 8, 16, 32, 16896 // 1024, 61} <= set(sizes)  # 61 heads of 512 KB are 32 MB
    # Never more than there are.
    assert max(tiles.sizes_of(shape._replace(length=16384, heads=2))) == 2


def test_groups_by_the_heads_in_them_are_drawn(results: Path, tmp_path: Path, write) -> None:
    row = {"dim": 128, "length": 1024, "causal": True, "name": "sizes D128 causal S1024"}
    data = {
        "device": "NVIDIA H200", "torch": "t", "triton": "t", "commit": "c", "date": "d", "dtype": "bfloat16",
        "note": "By hand.",
        "rows": [
            {**row, "run": 1, "tflops": {"cudnn": 400.0, "15 heads": 450.0, "16 heads": 500.0}},
            # The GPU was slower: as fast as before beside cuDNN.
            {**row, "run": 2, "tflops": {"cudnn": 200.0, "16 heads": 250.0}},
            {**row, "length": 512, "run": 1, "tflops": {"cudnn": 400.0, "8 heads": 300.0}},
        ],
    }  # fmt: skip
    write("h200", "attention_sizes", data)
    text = "\n".join(attention.page(results))
    assert "### By number, NVIDIA H200\n" in text
    assert "3 sizes of 2 shapes" in text
    assert "loses 0% to\n10%. By hand." in text
    plots.draw_all(results, tmp_path / "images")
    (picture,) = (tmp_path / "images").iterdir()
    assert f"(../images/{picture.name})" in text
    assert picture.read_bytes()[:4] == b"\x89PNG"
