"""vLLM's attention backend: prefill, chunked prefill and mixed batches by `tilestream.attention`.

Everything else is vLLM's own Triton backend: the cache, its writes, the metadata and the CUDA graphs. That backend also
computes what is not computed here: batches of one row a sequence (decoding), 8-bit caches, ALiBi, encoders, ranges of a
prompt that see each other. Each reason is logged once.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from tilestream.integrations.paged import attend, heads_refused, pages_refused, say_once


class TilestreamBuilder(TritonAttentionMetadataBuilder):
    """Metadata of vLLM's Triton backend. Full CUDA graphs hold decoding alone, which that backend computes."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


class TilestreamBackend(TritonAttentionBackend):
    """The backend, as vLLM's selector sees it."""

    @staticmethod
    def get_name() -> str:
        """The name of a member of vLLM's ``AttentionBackendEnum``."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TilestreamImpl]:
        """The class of a layer's attention."""
        return TilestreamImpl

    @staticmethod
    def get_builder_cls() -> type[TilestreamBuilder]:
        """The class that makes a batch's metadata."""
        return TilestreamBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """Keys of a page: vLLM cuts its blocks into such pages where they are larger."""
        return [16, 32, 64, 128, 256]

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Keys are split into shares by the size of the batch, so bits depend on it."""
        return False


class TilestreamImpl(TritonAttentionImpl):
    """One layer's attention. Arguments as vLLM gives them to each backend."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: list[float] | None,
        sliding_window: int | None, kv_cache_dtype: str, *more: Any, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, *more, **options
        )
        checks = (
            (self.attn_type != AttentionType.DECODER, f"attention of type {self.attn_type}"),
            (self.alibi_slopes is not None, "ALiBi"),
            (self.chunk_lookback > -1, "chunks with lookback"),
            (is_quantized_kv_cache(kv_cache_dtype), f"a cache of {kv_cache_dtype}"),
        )
        self._never = next((why for found, why in checks if found), "") or heads_refused(
            num_heads, num_kv_heads, head_size
        )

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Outputs are quantized after the attention, not in it."""
        return False

    def forward(
        self, layer: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        kv_cache: torch.Tensor, attn_metadata: TritonAttentionMetadata | None, output: torch.Tensor,
        output_scale: torch.Tensor | None = None, output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Queries ``[T, H, D]`` to a cache ``[P, Hkv, page, 2 D]``, which has this batch's keys already."""
        why = "a profiling run, without a batch"
        if attn_metadata is not None:
            tokens = attn_metadata.num_actual_tokens
            k, v = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
            why = self._refusal(attn_metadata, output_scale, output_block_scale) or pages_refused(query, k, v)
        if attn_metadata is None or why:
            say_once("vLLM", why)
            theirs: torch.Tensor = super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
            return theirs
        attend(
            query[:tokens], k, v, attn_metadata.block_table, starts=attn_metadata.query_start_loc,
            lengths=attn_metadata.seq_lens, most_queries=attn_metadata.max_query_len,
            most_keys=attn_metadata.max_seq_len, scale=self.scale, left=self.sliding_window[0],
            softcap=self.logits_soft_cap, sinks=self.sinks, out=output[:tokens],
        )  # fmt: skip
        return output

    def _refusal(self, batch: TritonAttentionMetadata, *scales: torch.Tensor | None) -> str:
        """Why vLLM's own kernel computes this batch; empty if it need not."""
        if self._never:
            return self._never
        checks = (
            (batch.max_query_len == 1, "one row a sequence: decoding is its kernel's"),
            (batch.causal is not True, "a mask that is not causal"),
            (batch.mm_prefix_range is not None, "ranges of a prompt that see each other"),
            (batch.rswa_prefix_lens is not None, "a window with a prefix that all see"),
            (any(scale is not None for scale in scales), "a quantized output"),
        )
        return next((why for found, why in checks if found), "")
