"""Calls that `tilestream warm` describes, the kernels that they launch, and that a launch finds these."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from found_warm import CALLS

import tilestream as ts
from tilestream.core.gpu_specs import named
from tilestream_tools.warm import kernel_cache
from tilestream_tools.warm.ahead import ahead, kernels_of
from tilestream_tools.warm.calls import Attention, Gemm, Grouped, of_model, parse
from tritons import environment

H100 = named("h100")
LLAMA = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 1000, "torch_dtype": "float16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "text", "call"),
    [
        ("gemm", "512,4096,1024", Gemm(512, 4096, 1024)),
        ("gemm", "5, 6, 7, float16, tn, bias, gelu", Gemm(5, 6, 7, "float16", "tn", True, "gelu")),
        ("gemm", "5,6,7,float8_e4m3fn,scales=row", Gemm(5, 6, 7, "float8_e4m3fn", scales="row")),
        ("gemm", "512,6,7,chunk=128,backward", Gemm(512, 6, 7, chunk=128, backward=True)),
        ("grouped", "512,256,64,8", Grouped(512, 256, 64, 8)),
        (
            "grouped", "512,256,64,8,float16,bias,swiglu,sources=4,arrives",
            Grouped(512, 256, 64, 8, "float16", True, "swiglu", 4, True),
        ),
        ("attention", "1,512,32,8,128,chunk=64", Attention(1, 512, 32, 8, 128, chunk=64)),
        ("attention", "1,512,32,8,128", Attention(1, 512, 32, 8, 128)),
        (
            "attention", "1,1,32,8,128,float16,causal,lse,bhsd,keys=4096",
            Attention(1, 1, 32, 8, 128, "float16", True, 4096, True, "bhsd"),
        ),
    ],
)  # fmt: skip
def test_a_call_by_its_shape(kind, text, call):
    assert parse(kind, text) == call


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("gemm", "5,6", "gemm 5,6: give M,N,K, positive whole numbers"),
        ("gemm", "5,6,0", "give M,N,K"),
        ("gemm", "5,6,x", "give M,N,K"),
        ("gemm", "5,6,7,causal", "'causal' is neither a dtype nor an option of gemm"),
        ("gemm", "5,6,7,chunk=0", "'chunk=0' is neither"),
        ("gemm", "5,6,7,float8_e4m3fn,backward", "operands of 8 bits and scales get no gradient: leave backward away"),
        ("gemm", "5,6,7,scales=row,backward", "operands of 8 bits and scales get no gradient"),
        ("attention", "1,512,32,8,128,backward", "'backward' is neither"),
        ("gemm", "5,6,7,scales=none of these", "scales=none of these"),
        ("attention", "1,512,32,8", "attention 1,512,32,8: give B,S,H,Hkv,D"),
        ("attention", "1,512,32,8,128,bias", "'bias' is neither a dtype nor an option of attention"),
        ("attention", "1,512,32,8,128,keys=0", "'keys=0' is neither"),
        ("grouped", "5,6,7", "grouped 5,6,7: give M,N,K,G"),
        ("grouped", "5,6,7,8,sources=2", "give sources=N, which divide the 5 rows in equal places"),
        ("grouped", "5,6,7,8,arrives", "give sources=N"),
    ],
)
def test_what_is_no_shape_is_refused(kind, text, says):
    with pytest.raises(ValueError, match=says):
        parse(kind, text)


def test_the_calls_of_a_model():
    calls = of_model(LLAMA, (1, 512), (4096,))
    dtype = "float16"
    weights = {(2048, 2048), (512, 2048), (8192, 2048), (2048, 8192), (1000, 2048)}
    assert {call for call in calls if isinstance(call, Gemm)} == {
        Gemm(m, n, k, dtype) for m in (1, 512) for n, k in weights
    }
    assert [call for call in calls if isinstance(call, Attention)] == [
        call
        for layout in ("bshd", "bhsd")
        for call in (
            Attention(1, 512, 32, 8, 64, dtype, causal=True, layout=layout),
            Attention(1, 1, 32, 8, 64, dtype, keys=4096, layout=layout),
        )
    ]


def test_a_model_s_biases_heads_and_dtype():
    config = {"text_config": LLAMA | {"head_dim": 128, "num_key_value_heads": None, "model_type": "qwen2"}}
    calls = of_model(config, (16,), dtype="bfloat16")
    biases = {(call.n, call.k): call.bias for call in calls if isinstance(call, Gemm)}
    assert biases == {(4096, 2048): True, (2048, 4096): False, (8192, 2048): False, (2048, 8192): False, (1000, 2048): False}  # fmt: skip # noqa: E501
    assert {call.dtype for call in calls} == {"bfloat16"}
    assert all(call.heads_kv == 32 for call in calls if isinstance(call, Attention))
    biases = {call.bias for call in of_model(LLAMA | {"attention_bias": True, "mlp_bias": True}, (1,))}
    assert biases == {True, False}


def test_a_configuration_without_widths_is_refused():
    with pytest.raises(ValueError, match="no hidden_size, num_attention_heads: describe its layers by --gemm"):
        of_model({"intermediate_size": 8}, (1,))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ([], "the configuration is no JSON object"),
        ({"text_config": "x"}, "the configuration is no JSON object"),
        (LLAMA | {"hidden_size": -4}, "the configuration's hidden_size is -4, and no positive whole number"),
        (LLAMA | {"hidden_size": True}, "hidden_size is True"),
        (LLAMA | {"num_attention_heads": 0}, "num_attention_heads is 0"),
        (LLAMA | {"num_key_value_heads": "8"}, "num_key_value_heads is '8'"),
        (LLAMA | {"num_key_value_heads": [8, 4]}, "num_key_value_heads is "),
        (LLAMA | {"head_dim": 12.5}, "head_dim is 12.5"),
        (LLAMA | {"vocab_size": 0}, "vocab_size is 0"),
        (LLAMA | {"num_key_value_heads": 5}, "num_key_value_heads 5 does not divide its 32 heads"),
        (LLAMA | {"torch_dtype": "auto"}, "the configuration's dtype auto is none that is multiplied"),
    ],
)
def test_a_configuration_that_is_no_model_s_is_refused(config, says):
    with pytest.raises(ValueError, match=says):
        of_model(config, (1,))


def test_a_model_s_dtype_is_one_that_is_multiplied():
    assert {call.dtype for call in of_model(LLAMA | {"torch_dtype": "torch.float32", "text_config": None}, (1,))} == {
        "float32"
    }
    with pytest.raises(ValueError, match="--dtype int8 is none that is multiplied: give --dtype bfloat16"):
        of_model(LLAMA, (1,), dtype="int8")


def test_calls_of_equal_kernels_are_one_and_nothing_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    calls = [Gemm(4096, 4096, 4096), Gemm(4096, 4096, 8192), Gemm(16, 4096, 4096), Attention(1, 1, 8, 8, 64, keys=8192)]
    found = kernels_of(calls, H100)
    # Of these the first two differ in K alone; keys that are split are joined by a kernel of its own.
    assert list(found.values()) == [calls[0], calls[2], calls[3], calls[3]]
    assert not any(map(kernel_cache.is_cached, found))
    assert list(kernels_of(calls[:1], H100)) == list(found)[:1]
    assert list(kernels_of(calls[:1], named("mi300x"))) != list(found)[:1]


@pytest.mark.parametrize("layout", ["linear", "nn", "tt"])
def test_a_backward_pass_has_the_kernels_of_the_gradients_products(tmp_path, monkeypatch, layout):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    forward, both = (Gemm(512, 1024, 256, layout=layout, backward=backward) for backward in (False, True))
    there = {"linear": ("nt", "nn", "tn"), "nn": ("nn", "nt", "tn"), "tt": ("tt", "tt", "tt")}[layout]
    (made,), found = kernels_of([forward], H100), list(kernels_of([both], H100))
    assert found[0] == made
    assert len(found) > 1, there
    if layout == "linear":
        # dX = dY [512, 1024] @ W [1024, 256], and dW = dY^T @ X: [1024, 512] @ [512, 256].
        products = Gemm(512, 256, 1024, layout="nn"), Gemm(1024, 256, 512, layout="tn")
        assert set(found) == {made, *kernels_of(products, H100)}


def test_a_model_s_backward_passes():
    assert {call.backward for call in of_model(LLAMA, (16,), backward=True) if isinstance(call, Gemm)} == {True}


def test_what_arrives_has_kernels_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for there, arriving in (
        (Gemm(512, 1024, 256), Gemm(512, 1024, 256, chunk=128)),
        (Attention(1, 512, 8, 8, 64), Attention(1, 512, 8, 8, 64, chunk=128)),
        (Grouped(512, 256, 128, 4), Grouped(512, 256, 128, 4, sources=2)),
        (Grouped(512, 256, 128, 4, sources=2), Grouped(512, 256, 128, 4, sources=2, arrives=True)),
        (Grouped(512, 256, 128, 4, bias=True, sources=2, arrives=True), Grouped(512, 256, 128, 4)),
    ):
        without, with_gate = (set(kernels_of([call], H100)) for call in (there, arriving))
        assert with_gate - without
        assert without - with_gate


def test_calls_ahead_answer_as_on_the_meta_device():
    with ahead(H100):
        empty = ts.linear(torch.empty(0, 8, device="meta"), torch.empty(4, 8, device="meta"))
    assert (tuple(empty.shape), empty.device.type) == ((0, 4), "meta")


def test_a_launch_finds_what_was_compiled_ahead(tmp_path):
    shapes = tmp_path / "shapes.txt"
    shapes.write_text("".join(f"{name}  # a comment\n" for name in CALLS) + "\n")
    settings = environment(tmp_path / "cache")
    code = "from tilestream_tools.cli import main; main()"
    warm = subprocess.run(
        [sys.executable, "-c", code, "warm", "--shapes", shapes, "--device", "h100", "--jobs", "1"],
        env=settings, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "10 calls launch 13 kernels, of which 13 were compiled" in " ".join(warm.stdout.split())
    run = subprocess.run(
        [sys.executable, Path(__file__).parent / "found_warm.py", *CALLS], env=settings, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    launched = [json.loads(line) for line in run.stdout.splitlines()]
    names = [[name for name, _ in one["kernels"]] for one in launched]
    assert names == [
        ["one_tile"], ["gemm"], ["attend"], ["attend", "merge_shares"], ["one_tile"] * 3, ["gemm"], ["attend"],
        ["grouped_gemm"], *[["grouped_gemm_by_source"]] * 2,
    ]  # fmt: skip
    assert all(found for one in launched for _, found in one["kernels"]), launched
