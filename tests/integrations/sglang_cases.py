"""The plugin with SGLang itself, on the CPU: its pools, its forward batches, its registry.

`test_engines` runs this file where SGLang is installed.
SGLang's model runner needs a GPU, so the backend is given what it keeps of one.
"""

from __future__ import annotations

import torchvision_stand_in  # noqa: F401  # isort: skip

import logging
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from error_rule import errors, passes
from tilestream.integrations import paged, sglang
from tilestream.integrations.sglang import attention

HEADS, KV_HEADS, DIM, LAYERS, SLOTS, CONTEXT = 4, 2, 32, 2, 256, 128
#: A chunk behind a cached prefix, a whole prompt, a row that decodes in a mixed batch.
QUERIES, KEYS = (21, 37, 1), (50, 37, 33)


@pytest.fixture(scope="module", autouse=True)
def registered():
    sglang.register()
    sglang.register()


class Batch:
    """Requests, their slots in pages of a random order, and the keys of two layers."""

    def __init__(self, page: int, mode=ForwardMode.EXTEND) -> None:
        torch.manual_seed(0)
        self.pool = MHATokenToKVPool(SLOTS, page, torch.float32, KV_HEADS, DIM, LAYERS, "cpu", False)
        self.requests = ReqToTokenPool(8, CONTEXT, "cpu", False)
        free, rows, new = torch.randperm(SLOTS // page) + 1, [3, 1, 5], []
        for row, n, queries in zip(rows, KEYS, QUERIES, strict=True):
            pages, free = free[: -(-n // page)], free[-(-n // page) :]
            slots = (pages[:, None] * page + torch.arange(page)).flatten()[:n]
            self.requests.req_to_token[row, :n] = slots.int()
            new.append(slots[-queries:])
        for cache in (*self.pool.k_buffer, *self.pool.v_buffer):
            cache.copy_(torch.randn(cache.shape))
        lengths, queries = torch.tensor(KEYS), torch.tensor(QUERIES)
        self.forward = ForwardBatch(
            forward_mode=mode, batch_size=len(KEYS), input_ids=torch.zeros(sum(QUERIES), dtype=torch.int64),
            req_pool_indices=torch.tensor(rows), seq_lens=lengths, out_cache_loc=torch.cat(new),
            seq_lens_sum=sum(KEYS), seq_lens_cpu=lengths, extend_seq_lens=queries, extend_seq_lens_cpu=list(QUERIES),
            extend_prefix_lens=lengths - queries,
        )  # fmt: skip
        self.q = torch.randn(sum(QUERIES), HEADS * DIM)
        self.k, self.v = (torch.randn(sum(QUERIES), KV_HEADS, DIM) for _ in range(2))

    def backend(self) -> attention.TilestreamAttnBackend:
        """What the backend's methods read of a model runner."""
        made = object.__new__(attention.TilestreamAttnBackend)
        made.token_to_kv_pool, made.req_to_token = self.pool, self.requests.req_to_token
        made.page_size, made.dcp_size, made.use_mla, made.enable_deterministic = self.pool.page_size, 1, False, False
        made.forward_metadata = SimpleNamespace(swa_out_cache_loc=None)
        return made

    def native(self) -> TorchNativeAttnBackend:
        """SGLang's own, in torch's operations."""
        runner = SimpleNamespace(device="cpu", req_to_token_pool=self.requests, token_to_kv_pool=self.pool)
        return TorchNativeAttnBackend(runner)


def layer(number=0, **options) -> RadixAttention:
    return RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, number, **options)


@pytest.fixture
def theirs(monkeypatch):
    """Calls that stayed with SGLang."""
    calls = []
    monkeypatch.setattr(TritonAttnBackend, "forward_extend", lambda self, *args, **more: calls.append(more))
    paged.say_once.cache_clear()
    return calls


def test_the_backend_can_be_asked_for():
    assert ATTENTION_BACKEND_CHOICES.count("tilestream") == 1
    runner = SimpleNamespace(model_config=SimpleNamespace(is_encoder_decoder=True))
    with pytest.raises(ValueError, match="the model has cross attention, which neither"):
        ATTENTION_BACKENDS["tilestream"](runner)
    with mock.patch.object(attention.TilestreamAttnBackend, "__init__", return_value=None) as made:
        runner.model_config.is_encoder_decoder = False
        assert isinstance(ATTENTION_BACKENDS["tilestream"](runner), TritonAttnBackend)
    made.assert_called_once_with(runner)


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED])
@pytest.mark.parametrize("window", [-1, 12])
def test_a_batch_is_computed_here_as_by_sglang(page, mode, window, theirs):
    batch = Batch(page, mode)
    backend, native = batch.backend(), batch.native()
    for number in range(LAYERS):
        at = layer(number, sliding_window_size=window)
        ours = backend.forward_extend(batch.q, batch.k, batch.v, at, batch.forward)
        assert batch.pool.k_buffer[number][batch.forward.out_cache_loc].equal(batch.k)
        native.init_forward_metadata(batch.forward)
        expected = native.forward_extend(batch.q, batch.k, batch.v, at, batch.forward, save_kv_cache=False)
        batch.pool.k_buffer[number], batch.pool.v_buffer[number] = (
            x[number].double() for x in (batch.pool.k_buffer, batch.pool.v_buffer)
        )
        exact = native.forward_extend(batch.q.double(), None, None, at, batch.forward, save_kv_cache=False)
        assert passes(ours, exact, expected), (errors(ours, exact), errors(expected, exact))
    assert not theirs


def test_a_batch_that_is_filled_anew_in_place_has_new_pages(theirs):
    batch = Batch(16)
    backend, native = batch.backend(), batch.native()
    native.init_forward_metadata(batch.forward)
    for _ in range(2):
        for number in range(LAYERS):
            at = layer(number)
            ours = backend.forward_extend(batch.q, batch.k, batch.v, at, batch.forward)
            expected = native.forward_extend(batch.q, batch.k, batch.v, at, batch.forward)
            torch.testing.assert_close(ours, expected)
        batch.forward.req_pool_indices.copy_(batch.forward.req_pool_indices.flip(0))
        for x in (batch.forward.seq_lens, batch.forward.extend_seq_lens, batch.forward.extend_prefix_lens):
            x.copy_(x.flip(0))
        batch.forward.extend_seq_lens_cpu.reverse()
    assert not theirs


def test_caps_and_sinks_are_passed_on(theirs, monkeypatch):
    batch, calls = Batch(16), []
    monkeypatch.setattr(attention, "attend", lambda *args, **more: calls.append(more))
    sinks = torch.zeros(HEADS)
    batch.backend().forward_extend(batch.q, batch.k, batch.v, layer(logit_cap=30.0), batch.forward, sinks=sinks)
    (call,) = calls
    assert (call["softcap"], call["sinks"] is sinks, call["left"]) == (30.0, True, -1)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"mode": ForwardMode.TARGET_VERIFY}, "a batch of kind TARGET_VERIFY"),
        ({"forward": {"spec_info": object()}}, "speculative decoding"),
        ({"backend": {"use_mla": True}}, "a cache of MHATokenToKVPool"),
        ({"backend": {"dcp_size": 2}}, "a context that is divided between ranks"),
        ({"backend": {"enable_deterministic": True}}, "deterministic inference"),
        ({"layer": {"attn_type": AttentionType.ENCODER_ONLY}}, "attention of"),
        ({"layer": {"use_irope": True}}, "scores that depend on the place"),
        ({"layer": {"logit_cap": 1.0, "logit_capping_method": "other"}}, "a cap by other"),
        ({"layer": {"k_scale": torch.ones(1)}}, "a cache with scales"),
        ({"more": {"score_mod": print}}, "arguments score_mod"),
        ({"forward": {"seq_lens_cpu": None}}, "lengths that the host does not know"),
        ({"layer": {"qk_head_dim": 36}}, "head dim 36"),
        ({"q": torch.float16}, "queries are torch.float16, keys torch.float32"),
    ],
)
def test_what_is_not_done_here_stays_with_sglang_and_is_said_once(change, why, theirs, caplog):
    batch, at = Batch(16, change.get("mode", ForwardMode.EXTEND)), layer()
    backend = batch.backend()
    for target, name in ((batch.forward, "forward"), (backend, "backend"), (at, "layer")):
        for attribute, value in change.get(name, {}).items():
            setattr(target, attribute, value)
    q, more = batch.q.to(change.get("q", torch.float32)), change.get("more", {})
    with caplog.at_level(logging.INFO, logger=paged.logger.name):
        for _ in range(2):
            backend.forward_extend(q, batch.k, batch.v, at, batch.forward, save_kv_cache=False, **more)
    assert [call["save_kv_cache"] for call in theirs] == [False, False]
    said = [record.message for record in caplog.records if record.name == paged.logger.name]
    assert len(said) == 1
    assert said[0].startswith(f"SGLang runs its own attention: {why}")


def test_another_release_is_left_alone(monkeypatch, caplog):
    monkeypatch.setattr("sglang.version.__version__", "0.9.1")
    with caplog.at_level(logging.WARNING, logger=sglang.logger.name):
        sglang.register()
    assert "for SGLang 0.5.23 and is not registered with 0.9.1" in caplog.text
