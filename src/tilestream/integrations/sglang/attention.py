"""SGLang's attention backend: prefill, chunked prefill and mixed batches by `tilestream.attention`.

Everything else is SGLang's own Triton backend: decoding, speculative decoding, multi-head latent attention, caches of
other pools or of 8 bits, deterministic inference. Each reason is logged once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from tilestream.integrations.paged import attend, heads_refused, pages_refused, say_once


class _Pages(NamedTuple):
    """Where a batch's keys are, for all layers of one forward pass."""

    batch: Any  # the ForwardBatch
    layer: int  # the one that used this last
    table: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    most_queries: int
    most_keys: int


class TilestreamAttnBackend(TritonAttnBackend):
    """A model runner's attention."""

    needs_cpu_seq_lens = True  # the longest sequence bounds the table of pages
    _pages: _Pages | None = None

    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, sinks: torch.Tensor | None = None, **more: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Queries ``[T, H * D]`` to the cached keys of their requests, and to ``k``, which is stored first."""
        why = self._refusal(k, layer, forward_batch, more)
        if not why:
            queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
            keys, values = self._paged(layer)
            why = pages_refused(queries, keys, values)
        if why:
            say_once("SGLang", why)
            given: torch.Tensor = super().forward_extend(
                q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, sinks=sinks, **more
            )
            return given
        if save_kv_cache:
            where = KVWriteLoc.for_batch(forward_batch, swa_loc=self.forward_metadata.swa_out_cache_loc)
            self._set_kv_buffer(forward_batch, layer, where, k, v)
        self._pages = pages = self._pages_of(forward_batch, layer.layer_id)
        columns = layer.tp_q_head_num * layer.v_head_dim
        out = getattr(forward_batch, "_attn_output", None)
        out = q.new_empty((q.shape[0], columns)) if out is None else out
        attend(
            queries, keys, values, pages.table, starts=pages.starts, lengths=pages.lengths,
            most_queries=pages.most_queries, most_keys=pages.most_keys, scale=layer.scaling,
            left=layer.sliding_window_size, softcap=layer.logit_cap, sinks=sinks,
            out=out.view(-1, layer.tp_q_head_num, layer.v_head_dim),
        )  # fmt: skip
        return out

    def _refusal(self, k: torch.Tensor | None, layer: Any, batch: Any, more: dict[str, Any]) -> str:
        """Why SGLang's own kernels compute this; empty if they need not."""
        pool = self.token_to_kv_pool
        checks = (
            (
                batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.MIXED),
                f"a batch of kind {batch.forward_mode.name}",
            ),
            (batch.spec_info is not None, "speculative decoding"),
            (self.use_mla or type(pool) is not MHATokenToKVPool, f"a cache of {type(pool).__name__}"),
            (self.dcp_size > 1, "a context that is divided between ranks"),
            (self.enable_deterministic, "deterministic inference"),
            (layer.attn_type != AttentionType.DECODER or layer.is_cross_attention, f"attention of {layer.attn_type}"),
            (layer.use_irope or layer.xai_temperature_len > 0, "scores that depend on the place"),
            (layer.logit_cap and layer.logit_capping_method != "tanh", f"a cap by {layer.logit_capping_method}"),
            (layer.k_scale is not None, "a cache with scales"),
            (any(value is not None for value in more.values()), f"arguments {', '.join(more)}"),
            (k is None, "keys that are in the cache already"),
            (batch.seq_lens_cpu is None or batch.extend_seq_lens_cpu is None, "lengths that the host does not know"),
        )
        return next((why for found, why in checks if found), "") or heads_refused(
            layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim
        )

    def _paged(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values, ``[slots, Hkv, D]``, as pages ``[P, page, Hkv, D]``."""
        pool = self.token_to_kv_pool
        found = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        keys, values = (x[: x.shape[0] // self.page_size * self.page_size] for x in found)
        return keys.unflatten(0, (-1, self.page_size)), values.unflatten(0, (-1, self.page_size))

    def _pages_of(self, batch: Any, layer: int) -> _Pages:
        """The batch's pages. Layers come in rising order, so a batch whose layers begin again has been filled anew."""
        last = self._pages
        if last is not None and last.batch is batch and last.layer < layer:
            return last._replace(layer=layer)
        slots = self.req_to_token[batch.req_pool_indices, :: self.page_size]
        lengths = batch.extend_seq_lens.cumsum(0)
        return _Pages(
            batch, layer, (slots // self.page_size).int(), torch.nn.functional.pad(lengths, (1, 0)).int(),
            batch.seq_lens.int(), max(batch.extend_seq_lens_cpu), int(batch.seq_lens_cpu.max()),
        )  # fmt: skip
