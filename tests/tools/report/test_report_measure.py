"""What the report measures: small calls on this CPU; what is refused, late or wrong is said and not timed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import tilestream as ts
from tilestream_tools.report import measure, page
from tilestream_tools.sweep.check import Check
from tilestream_tools.sweep.run import CpuClock
from tilestream_tools.warm.calls import Gemm, parse

TEXTS = (
    "gemm 96,80,64,float32", "gemm 33,31,30,float32,bias,gelu_tanh,tn", "gemm 16,48,32,bfloat16,silu,nn",
    "attention 2,48,4,2,16,float32,causal", "attention 1,5,4,4,16,float32,causal,keys=24",
    "attention 1,16,2,2,16,float32,causal,bhsd,keys=24", "attention 1,64,8,8,512,float32",
)  # fmt: skip


def call(text):
    return parse(*text.split(" ", 1))


@pytest.mark.parametrize("text", [
    *TEXTS, "gemm 8,16,24,float8_e4m3fn,tt,scales=row,chunk=4", "gemm 8,16,24,float16,backward,relu",
    "attention 1,8,4,2,64,float16,causal,lse,bhsd,keys=16,chunk=8",
])  # fmt: skip
def test_a_call_is_told_as_it_is_given(text):
    assert str(call(text)) == text
    assert call(str(call(text))) == call(text)


@pytest.fixture
def small(monkeypatch):
    """Machine and stream in milliseconds; one thread, which waits for no other process of a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(measure, "READ", {"cpu": 2**16})
    monkeypatch.setattr(measure, "FILE", {True: (512, 64), False: (512, 64)})
    monkeypatch.setattr(measure, "SAMPLES", {True: 0.01, False: 0.01})
    yield
    torch.set_num_threads(threads)


def test_a_whole_report_of_this_cpu(small, tmp_path):
    pytest.importorskip("safetensors")
    told = []
    data = measure.report(
        [call(text) for text in TEXTS], device="cpu", quick=True, tell=lambda *one: told.append(one), folder=tmp_path
    )
    assert list(tmp_path.iterdir()) == [], "the stream's file is gone"
    assert [row["call"] for row in data["calls"]] == list(TEXTS)
    *measured, refused = data["calls"]
    assert "head_dim=512" in refused["why"]
    for row in measured:
        assert "why" not in row, row
        one = row["clocks"]["device"]
        low, median, high = one["tilestream"]
        assert 0 < low <= median <= high
        assert one["band"][0] <= one["ratio"] <= one["band"][1]
        assert row["explain"].startswith(("matmul", "attention"))
        assert row["errors"]["max"] < 0.05
    assert data["stream"]["answer"]["right"]
    assert data["stream"]["bring"] == "read"
    titles = [one["title"] for one in data["timelines"]]
    assert titles == ["streamed from a file", TEXTS[0]], "the largest matmul"
    assert all(any(one["workers"]) for one in data["timelines"])
    shares = [share for share, _ in told]
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert shares == sorted(shares)
    assert any("round 1 of 3" in what for _, what in told)
    assert TEXTS[0] in page.html(json.loads(json.dumps(data)))


def test_what_begins_too_late_is_not_measured(small, monkeypatch):
    monkeypatch.setattr(measure, "streamed", lambda *_: {"why": "left out"})
    data = measure.report([call(TEXTS[0])], device="cpu", seconds=1e-9)
    assert data["calls"][0]["why"] == "not measured: 0 s had passed"
    assert "No call was measured" in page.html(data)


def measured(text, monkeypatch=None, product=None):
    if product is not None:
        monkeypatch.setattr(Gemm, "product", product)
    row = measure.planned(call(text), "cpu")
    return measure.measured(call(text), row, CpuClock(), True)


def test_a_wrong_answer_is_not_timed(small, monkeypatch):
    found = measured(TEXTS[0], monkeypatch, lambda self, a, b, **_: torch.mm(a, b) * 1.001)
    assert found["why"].startswith("AssertionError: wrong answer")
    assert "clocks" not in found


def test_what_fails_is_said(small, monkeypatch):
    def product(self, a, b, **_):
        raise RuntimeError("the device\nis lost")

    assert measured(TEXTS[0], monkeypatch, product) == {"why": "RuntimeError: the device is lost"}


@pytest.mark.parametrize(("text", "says"), [
    ("gemm 8,8,8,float32,chunk=4", "rows that arrive are measured by the stream"),
    ("gemm 8,8,8,float8_e4m3fn", "operands of 8 bits and scales are measured by no peer here"),
    ("gemm 8,8,8,float32,scales=row", "operands of 8 bits and scales are measured by no peer here"),
    ("gemm 8,8,8,float32,backward", "forward passes are measured: leave backward away"),
    ("attention 1,8,2,2,16,float32,chunk=4", "rows that arrive are measured by the stream"),
    ("attention 1,8,2,2,16,float32,causal,keys=4", "rows that see no key have no answer"),
])  # fmt: skip
def test_what_has_no_peer_is_planned_and_not_measured(text, says):
    assert measure.measured(call(text), {}, CpuClock(), True) == {"why": says}
    assert "explain" in measure.planned(call(text), "cpu")


@pytest.mark.parametrize("keys", [24, 40])
@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_the_check_of_attention_knows_its_mask(causal, keys):
    q, k, v = (torch.randn(2, rows, heads, 16) for rows, heads in ((24, 4), (keys, 2), (keys, 2)))
    seen = torch.ones(24, keys, dtype=torch.bool)
    if causal:
        seen = seen.tril(0 if causal == "top_left" else keys - 24)

    def answer(mask):
        out = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, enable_gqa=True
        ).transpose(1, 2)
        return out.reshape(48, -1)

    check = Check.of_attention(q, k, v, answer(seen), causal)
    check(answer(seen).clone())
    wrong = seen.clone()
    wrong[-1, 0] = False
    with pytest.raises(AssertionError, match="wrong answer"):
        check(answer(wrong))


def test_an_unknown_device_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="device='tpu': it must be one of auto, cpu, cuda"):
        measure.report([], device="tpu")
    monkeypatch.setattr(measure.doctor, "backend", lambda name: "no: torch sees no GPU")
    with pytest.raises(ValueError, match="device='cuda': torch sees no GPU; device='cpu' measures the CPU"):
        measure.report([], device="cuda")
    assert measure.device_name("auto") == "cpu"


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_the_default_calls_end_with_one_that_is_refused(where):
    device = {"cpu": "cpu", "cuda": "h100"}[where]
    for quick, count in ((True, 1 + measure.QUICK), (False, len(measure.DEFAULT[where]))):
        *taken, last = measure.default_calls(where, quick)
        assert len(taken) + 1 == count
        assert "why" in measure.planned(last, device)
        assert not [one for one in taken if "why" in measure.planned(one, device)]


def test_a_report_names_no_folder_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setattr(measure.Path, "home", lambda: tmp_path / "me")
    monkeypatch.chdir(tmp_path)
    assert measure.at_home(f"in {tmp_path}/me/x and {tmp_path}/y") == "in ./me/x and ./y"
    monkeypatch.chdir("/")
    assert measure.at_home(f"in {tmp_path}/me/x") == "in ~/x"
    assert measure.at_home(f"{Path(ts.__file__).parent}/_native/x.so") == "tilestream/_native/x.so"
