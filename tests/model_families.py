"""Small random models of eight families of Hugging Face's transformers, for tests on the CPU and on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import torch

WINDOW, LAYERS = 8, 2
#: Weights so large that each key matters.
_SIZES = {"initializer_range": 0.3, "vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = {
    **_SIZES, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
_WINDOW = {"sliding_window": WINDOW}
_BOTH = {**_WINDOW, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
_GPT2 = {
    **_SIZES, "n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": 256, "attn_pdrop": 0.0, "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}  # fmt: skip
#: Family -> class, configuration, and its layers' windows.
FAMILIES: dict[str, tuple[str, str, dict[str, Any], tuple[int | None, ...]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA, (None, None)),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**LLAMA, **_WINDOW}, (WINDOW, WINDOW)),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**LLAMA, **_BOTH, "attn_logit_softcapping": 2.0}, (WINDOW, None)),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**LLAMA, **_BOTH}, (WINDOW, None)),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**LLAMA, "head_dim": 16}, (None, None)),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**LLAMA, **_BOTH, **_EXPERTS}, (WINDOW, None)),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**LLAMA, **_WINDOW}, (WINDOW, WINDOW)),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2, (None, None)),
}


@functools.cache
def model_of(family: str) -> Any:
    """One model a family, in float32 on the CPU."""
    import transformers

    cls, config, sizes, _ = FAMILIES[family]
    torch.manual_seed(0)
    return getattr(transformers, cls)(getattr(transformers, config)(**sizes)).eval()


def tokens(seed: int = 1, count: int = 21) -> torch.Tensor:
    """Two sequences."""
    return torch.randint(3, 99, (2, count), generator=torch.Generator().manual_seed(seed))
