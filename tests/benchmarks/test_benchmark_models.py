"""The benchmark of models of transformers without a GPU: a dry run, its record and page; what is not timed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", minversion="5.4", reason="pip install '.[dev]' brings transformers")

from benchmarks.attention import models
from benchmarks.attention.bench import Run
from benchmarks.attention.models import CASES, MODELS, OURS, SMALL_CASES, Case
from benchmarks.core.timing import WallClock
from benchmarks.report import attention
from benchmarks.run import options


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Products this small take longer with more, and by far where cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(results: Path) -> Run:
    """A dry run."""
    return Run(options("attention", "transformers", str(results), "--dry", "--seconds", "1000"))


@pytest.fixture
def llama():
    return models.model_of("Llama-3.1-8B", "cpu", small=True)


def test_a_dry_run_times_every_model_by_both_clocks(run: Run, results: Path) -> None:
    models.models(run)
    (record,) = run._records.values()
    assert run.bad == 0
    assert record.data["failures"] == record.data["missing"] == []
    assert [row["name"] for row in record.rows] == [f"{name} {case.name}" for name in MODELS for case in SMALL_CASES]
    for row in record.rows:
        knows_sdpa = row["model"] in ("Llama-3.1-8B", "Mistral-7B")  # a soft cap and sinks are not torch's
        assert set(row["ms"]) == set(row["gpu_ms"]) == {"eager", OURS} | ({"sdpa"} if knows_sdpa else set())
        assert set(row["refused"]) == (set() if knows_sdpa else {"sdpa"})
        assert row["errors"]["eager"] == 0 < min(row["ms"].values())
    text = "\n".join(attention.page(results))
    assert "### Models, no GPU" in text
    assert "Gemma-2-9B has no sdpa, gpt-oss-20b has no sdpa" in text
    assert text.count("| Mistral-7B decode padded 2 x 24 |") == 2, "a row a clock"


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_widths_of_those_they_are_named_after(name: str) -> None:
    """On the meta device: nothing is allocated."""
    width, heads, dim = {
        "Llama-3.1-8B": (4096, 32, 128), "Mistral-7B": (4096, 32, 128), "Gemma-2-9B": (3584, 16, 256),
        "gpt-oss-20b": (2880, 64, 64),
    }[name]  # fmt: skip
    model = models.model_of(name, "meta")
    assert len(model.layers) == models.LAYERS
    assert model.layers[0].self_attn.q_proj.weight.shape == (heads * dim, width)
    assert model.layers[0].self_attn.k_proj.weight.shape == (8 * dim, width)
    assert max(case.tokens + models.STEPS for case in CASES) <= model.config.max_position_embeddings


def test_padding_is_on_the_left_and_of_several_lengths() -> None:
    mask = models.padding(Case("prefill", 4, 32, padded=True), torch.device("cpu"))
    assert mask.sum(1).tolist() == [32, 28, 24, 20]
    assert mask[:, -1].all()
    assert models.padding(Case("prefill", 4, 32), torch.device("cpu")) is None


@pytest.mark.parametrize("padded", [False, True])
def test_decoding_starts_again_behind_the_prompt(llama, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "STEPS", 3)
    decode = models.call_of(llama, Case("decode", 2, 24, padded), models.implementations()[-1])
    answers = [decode() for _ in range(7)]
    for later, earlier in ((3, 0), (4, 1), (6, 0)):
        torch.testing.assert_close(answers[later], answers[earlier], rtol=0, atol=0)
    assert not torch.equal(answers[1], answers[0]), "a step sees one key more than the last"


def test_a_wrong_answer_is_a_failure_and_is_not_timed(run: Run, llama, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    def wrong(module, query, key, value, mask, **_):
        return query.transpose(1, 2).contiguous() * 0, None

    AttentionInterface.register("wrong", wrong)
    AttentionMaskInterface.register("wrong", eager_mask)
    monkeypatch.setattr(models, "implementations", lambda: ["eager", "wrong", "no such attention"])
    record = run.attention_record("attention_transformers", layers=2)
    found = models.row(run, record, "Llama-3.1-8B", SMALL_CASES[0], llama)
    assert set(found["ms"]) == {"eager"}
    assert list(found["refused"]) == ["no such attention"]
    (failure,) = record.data["failures"]
    assert failure.startswith("Llama-3.1-8B prefill 2 x 24 wrong: differs from eager attention by")


def test_ours_must_run(run: Run, llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "implementations", lambda: ["eager", OURS])
    monkeypatch.setattr(models.ts, "check", _second_raises())
    record = run.attention_record("attention_transformers", layers=2)
    calls, refused, _ = models.right(record, "a row", SMALL_CASES[0], llama)
    assert list(calls) == ["eager"]
    assert refused == {OURS: "RuntimeError: what the GPU has reported"}
    assert record.data["failures"] == ["a row RuntimeError: what the GPU has reported"]


def _second_raises():
    times = 0

    def check() -> None:
        nonlocal times
        times += 1
        if times == 2:
            raise RuntimeError("what the GPU has reported")

    return check


class _NoWait(WallClock):
    """A clock as the GPU's is to a call that waits."""

    def _sample(self, call) -> float:
        if call() == "waits":
            raise RuntimeError("a call took the host 1 s to issue, longer than the GPU is made to spin: does it wait?")
        return 1e-3


def test_calls_that_wait_have_no_time_of_the_gpu() -> None:
    run = SimpleNamespace(clock=_NoWait())
    calls = {"eager": lambda: "waits", "sdpa": lambda: "", OURS: lambda: ""}
    assert models.on_the_gpu(run, calls, 3) == ({"sdpa": 1.0, OURS: 1.0}, ["eager"])
    assert models.on_the_gpu(run, {"eager": calls["eager"]}, 3) == ({}, ["eager"])

    def lost() -> str:
        raise RuntimeError("CUDA error: an illegal memory access")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        models.on_the_gpu(run, {"sdpa": lost}, 3)
