"""The plugin with vLLM itself, on the CPU: its caches, its metadata, its Triton kernels interpreted beside ours.

`test_engines` runs this file where vLLM is installed, in a process with ``TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES=``:
so vLLM takes Triton without a GPU.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, KVCacheTensor, create_kv_cache_views

from error_rule import errors, passes
from tilestream.integrations import paged, vllm
from tilestream.integrations.vllm import attention, linear

HEADS, KV_HEADS, DIM, PAGE, PAGES = 4, 2, 32, 16, 24
#: Of a mixed batch: a chunk behind a cached prefix, a whole prompt, a decoding row, a page that is just full.
QUERIES, KEYS = (21, 37, 1, 16), (50, 37, 33, 48)
DECODING = (1, 1, 1, 1)


@pytest.fixture(scope="module", autouse=True)
def config():
    vllm.register()
    vllm.register()  # as in each of vLLM's processes
    made = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(made), mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)):
        yield made


@pytest.fixture
def ran(monkeypatch):
    """The calls that each side computed."""
    calls = []
    forward, attend = TritonAttentionImpl.forward, attention.attend
    monkeypatch.setattr(
        TritonAttentionImpl, "forward", lambda *args, **more: (calls.append("vllm"), forward(*args, **more))[1]
    )
    monkeypatch.setattr(
        attention, "attend", lambda *args, **more: (calls.append("tilestream"), attend(*args, **more))[1]
    )
    return calls


def caches(layout: KVCacheLayout, page: int = PAGE, dim: int = DIM) -> list[torch.Tensor]:
    """Two layers' caches as vLLM lays them out, full of NaN."""
    spec = FullAttentionSpec(block_size=page, num_kv_heads=KV_HEADS, head_size=dim, dtype=torch.float32)
    size, layers = spec.page_size_bytes, ["layers.0", "layers.1"]
    strides = (size * PAGES, size) if layout.is_layer_compact else (size, 2 * size)
    placed = KVCacheTensor(2 * PAGES * size, layers, *strides)
    made = create_kv_cache_views(torch.zeros(placed.size, dtype=torch.int8), spec, PAGES, layout, placed)
    for cache in made:
        cache.fill_(float("nan"))
    return made


class Batch:
    """Random sequences, their keys in pages of a random order, and the metadata that vLLM's runner would give."""

    def __init__(self, queries=QUERIES, keys=KEYS, page=PAGE, dim=DIM, padded=3) -> None:
        torch.manual_seed(0)
        self.queries, self.keys, tokens = queries, keys, sum(queries)
        self.q = torch.randn(tokens + padded, 3 * HEADS * dim)[:, : HEADS * dim].view(-1, HEADS, dim)  # of a fused qkv
        self.k, self.v = ([torch.randn(n, KV_HEADS, dim) for n in keys] for _ in range(2))
        free, table = torch.randperm(PAGES), torch.zeros(len(keys), 8, dtype=torch.int32)
        for i, n in enumerate(keys):
            used = -(-n // page)
            table[i, :used], free = free[:used], free[used:]
        places = [table[i, torch.arange(n) // page].long() * page + torch.arange(n) % page for i, n in enumerate(keys)]
        starts = torch.tensor([0, *queries]).cumsum(0).int()
        self.slots = torch.cat(places)
        self.common = CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=torch.tensor(keys).int(), num_reqs=len(keys),
            num_actual_tokens=tokens, max_query_len=max(queries), max_seq_len=max(keys), block_table_tensor=table,
            slot_mapping=torch.cat([p[-n:] for p, n in zip(places, queries, strict=True)]),
        )  # fmt: skip

    def store(self, impl, layer, cache) -> None:
        """All keys, by the backend's own writes."""
        impl.do_kv_cache_update(layer, torch.cat(self.k), torch.cat(self.v), cache, self.slots)

    def expected(self, dtype, *, scale=DIM**-0.5, window=None, softcap=0.0, sinks=None) -> torch.Tensor:
        """A sequence at a time, in plain operations."""
        q, found = self.q.to(dtype), []
        for i, (first, n) in enumerate(zip(self.common.query_start_loc.tolist(), self.queries, strict=False)):
            k, v = (x[i].to(dtype).repeat_interleave(HEADS // KV_HEADS, 1) for x in (self.k, self.v))
            scores = torch.einsum("qhd,khd->hqk", q[first : first + n], k) * scale
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            behind = torch.arange(len(k))[None] - torch.arange(len(k) - n, len(k))[:, None]
            seen = (behind <= 0) & (behind > -window if window else True)
            scores = scores.masked_fill(~seen, float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks.to(dtype)[:, None, None].expand(-1, n, 1)], -1)
            weights = scores.softmax(-1)[..., : len(k)]
            found.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(found)


def layer() -> SimpleNamespace:
    one = torch.ones(1)
    return SimpleNamespace(_q_scale=one, _k_scale=one, _v_scale=one, _k_scale_float=1.0, _v_scale_float=1.0)


def implementation(dim=DIM, **options) -> attention.TilestreamImpl:
    given = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto", **options}
    return AttentionBackendEnum.CUSTOM.get_class().get_impl_cls()(HEADS, dim, dim**-0.5, KV_HEADS, **given)


def metadata(common, config):
    """As the backend's builder makes it, for a model of these heads."""
    model = SimpleNamespace(
        get_num_kv_heads=lambda _: KV_HEADS, get_num_attention_heads=lambda _: HEADS, get_head_size=lambda: DIM,
        rswa_window=None,
    )  # fmt: skip
    about = SimpleNamespace(
        model_config=model, compilation_config=config.compilation_config, scheduler_config=config.scheduler_config,
        parallel_config=config.parallel_config, speculative_config=None,
    )  # fmt: skip
    about.compilation_config.cudagraph_capture_sizes = [1, 8]
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=KV_HEADS, head_size=DIM, dtype=torch.float32)
    builder = AttentionBackendEnum.CUSTOM.get_class().get_builder_cls()
    assert builder.get_cudagraph_support(about, spec) is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    return builder(spec, [], about, torch.device("cpu")).build(0, common)


def compute(batch, impl, cache, batch_metadata, out=None, **more) -> torch.Tensor:
    out = torch.full_like(batch.q, float("nan"), memory_format=torch.contiguous_format) if out is None else out
    assert impl.forward(layer(), batch.q, None, None, cache, batch_metadata, out, **more) is out
    return out[: sum(batch.queries)]


def check(found, batch, **maths) -> None:
    exact, peer = batch.expected(torch.float64, **maths), batch.expected(torch.float32, **maths)
    assert passes(found, exact, peer), (errors(found, exact), errors(peer, exact))


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLNHC, KVCacheLayout.BLHNC])
def test_a_mixed_batch_is_computed_here_in_each_layout_of_the_cache(layout, config, ran):
    batch, impl = Batch(), implementation()
    for cache in caches(layout):
        batch.store(impl, layer(), cache)
        check(compute(batch, impl, cache, metadata(batch.common, config)), batch)
    assert ran == ["tilestream"] * 2


@pytest.mark.parametrize(
    ("options", "maths"),
    [
        ({"sliding_window": 20}, {"window": 20}),
        ({"logits_soft_cap": 3.0}, {"softcap": 3.0}),
        ({"sinks": torch.linspace(-2, 2, HEADS)}, {"sinks": torch.linspace(-2, 2, HEADS)}),
    ],
    ids=["window", "softcap", "sinks"],
)
def test_features_are_those_of_vllms_kernel(options, maths, config, ran):
    batch, (cache, _), impl = Batch(), caches(KVCacheLayout.LBNHC), implementation(**options)
    batch.store(impl, layer(), cache)
    made = metadata(batch.common, config)
    check(compute(batch, impl, cache, made), batch, **maths)
    out = torch.full(batch.q.shape, float("nan"))
    TritonAttentionImpl.forward(impl, layer(), batch.q, None, None, cache, made, out)
    check(out[: sum(QUERIES)], batch, **maths)
    assert ran == ["tilestream", "vllm"]


@pytest.mark.parametrize(
    ("queries", "options", "changed", "why"),
    [
        (DECODING, {}, {}, "one row a sequence: decoding is its kernel's"),
        (QUERIES, {}, {"causal": False}, "a mask that is not causal"),
        (QUERIES, {"alibi_slopes": [0.5, 0.25, 0.1, 0.05]}, {}, "ALiBi"),
        (QUERIES, {"chunk_lookback": 2}, {}, "chunks with lookback"),
    ],
)
def test_what_is_not_done_here_stays_with_vllm_and_is_said_once(queries, options, changed, why, config, ran, caplog):
    batch, (cache, _), impl = Batch(queries), caches(KVCacheLayout.LBNHC), implementation(**options)
    batch.store(impl, layer(), cache)
    made = replace(metadata(batch.common, config), **changed)
    paged.say_once.cache_clear()
    with caplog.at_level(logging.INFO, logger=paged.logger.name), mock.patch.object(paged.logger, "propagate", True):
        found = compute(batch, impl, cache, made)
        again = compute(batch, impl, cache, made)
    assert ran == ["vllm"] * 2
    assert found.equal(again)
    if not (options or changed):
        check(found, batch)
    assert [record.message for record in caplog.records] == [f"vLLM runs its own attention: {why}"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kv_cache_dtype": "fp8"}, "a cache of fp8"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attention of type"),
        ({"dim": 36}, "head dim 36; here it is a multiple of 8, at most 256"),
        ({"dim": 512}, "head dim 512"),
    ],
)
def test_layers_that_are_never_computed_here_know_it(options, why):
    assert implementation(**options)._never.startswith(why)


def test_pages_and_dtypes_that_are_not_computed_here():
    q, k = torch.zeros(3, HEADS, DIM), torch.zeros(PAGES, 48, KV_HEADS, DIM)
    assert paged.pages_refused(q, k, k).startswith("pages of 48 keys; here a page has a power of two")
    assert paged.pages_refused(q.half(), k[:, :16], k[:, :16]).startswith("queries are torch.float16, keys torch.flo")
    assert "not contiguous" in paged.pages_refused(q, *[k[:, :16].transpose(2, 3)] * 2)
    assert not paged.pages_refused(q, k[:, :16], k[:, :16])


def test_a_profiling_run_and_a_quantized_output_are_vllms(config, ran):
    batch, (cache, _), impl = Batch(), caches(KVCacheLayout.LBNHC), implementation()
    assert not compute(batch, impl, cache, None).any()
    assert ran == ["vllm"]
    assert "quantized output" in impl._refusal(metadata(batch.common, config), torch.ones(1), None)
    assert not impl.fused_output_quant_supported(None)


def test_vllms_selector_takes_the_backend(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("needs a GPU's driver"))
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    monkeypatch.setattr(
        NonNvmlCudaPlatform, "get_device_capability", classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
    )
    asked = AttentionSelectorConfig(
        head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=16, has_sink=True,
        has_sliding_window=True,
    )  # fmt: skip
    selected = NonNvmlCudaPlatform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, asked)
    assert selected == vllm.ATTENTION
    with pytest.raises(ValueError, match="batch invariance not supported"):
        NonNvmlCudaPlatform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, asked._replace(use_batch_invariant=True))


def test_blocks_are_cut_into_pages_of_a_power_of_two():
    from vllm.v1.worker.utils import select_common_block_size

    backend = AttentionBackendEnum.CUSTOM.get_class()
    assert [select_common_block_size(n, [backend]) for n in (16, 256, 48, 1024)] == [16, 256, 16, 256]


def test_another_release_and_another_plugin_are_left_alone(monkeypatch, caplog):
    import vllm as engine

    with caplog.at_level(logging.WARNING, logger=vllm.logger.name), mock.patch.object(vllm.logger, "propagate", True):
        monkeypatch.setattr(AttentionBackendEnum.CUSTOM, "get_path", lambda: "other.Backend")
        vllm.register()
        assert "CUSTOM is other.Backend, of another plugin" in caplog.text
        monkeypatch.setattr(engine, "__version__", "0.99.1")
        vllm.register()
    assert "for vLLM 0.33.x and is not registered with 0.99.1" in caplog.text


@pytest.mark.parametrize("bias", [False, True])
def test_vllms_linear_layers_multiply_here(bias, monkeypatch):
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.quantization import get_quantization_config

    config = get_quantization_config("tilestream")()
    for name, value in (("rank", 0), ("world_size", 1)):  # one process, without vLLM's groups
        monkeypatch.setattr(
            f"vllm.model_executor.parameter.get_tensor_model_parallel_{name}", lambda value=value: value
        )
    torch.manual_seed(0)
    made = ReplicatedLinear(48, 64, bias=bias, params_dtype=torch.float32, quant_config=config, disable_tp=True)
    assert type(made.quant_method) is linear.TilestreamLinearMethod
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    made.quant_method.process_weights_after_loading(made)
    calls, multiply = [], linear.linear
    monkeypatch.setattr(linear, "linear", lambda *args: (calls.append(1), multiply(*args))[1])
    x = torch.randn(5, 48)
    expected = torch.nn.functional.linear(x, made.weight, made.bias)
    torch.testing.assert_close(made(x)[0], expected)
    assert calls


def test_the_linear_method_traces_for_any_number_of_rows():
    made = SimpleNamespace(weight=torch.nn.Parameter(torch.randn(64, 48)))
    method = linear.TilestreamLinearMethod()
    with torch.inference_mode():
        compiled = torch.compile(lambda x: method.apply(made, x), fullgraph=True, backend="eager", dynamic=True)
        for rows in (5, 9, 17):
            x = torch.randn(rows, 48)
            torch.testing.assert_close(compiled(x), torch.nn.functional.linear(x, made.weight))


def test_quantized_checkpoints_and_other_layers():
    config = linear.TilestreamConfig()
    with pytest.raises(ValueError, match=r"the checkpoint is quantized \(fp8\); tilestream is for weights as they are"):
        linear.TilestreamConfig.from_config({"quant_method": "fp8"})
    assert config.get_quant_method(torch.nn.Embedding(2, 2), "embed") is None
    assert (config.get_name(), config.get_config_filenames(), config.get_min_capability()) == ("tilestream", [], 80)
