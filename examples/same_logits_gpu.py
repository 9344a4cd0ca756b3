"""A model's logits for one prompt, alone and in a batch: with torch's own kernels, and in `use_invariant_torch`.

``python examples/same_logits_gpu.py`` takes a small Llama of Hugging Face's transformers with random weights. It is for
a GPU: on the CPU torch computes elements at the end of a vector otherwise than others, in silu for one.
"""

from __future__ import annotations

import torch

import tilestream as ts

#: Few tokens: torch adds along K in another order for 16 rows than for 128.
PROMPTS, TOKENS = 8, 16


def llama(device: str) -> torch.nn.Module:
    """Two layers, random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=2048, intermediate_size=5632, num_hidden_layers=2, num_attention_heads=16,
        num_key_value_heads=4, max_position_embeddings=256,
    )  # fmt: skip
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return LlamaForCausalLM(config).to(device, dtype).eval()


def differing(model: torch.nn.Module, prompts: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Logits of the first prompt that have other bits in batches of 2, 4, ... than alone; and those alone."""
    with torch.no_grad():
        alone = model(prompts[:1]).logits
        sizes = [2**i for i in range(1, PROMPTS.bit_length())]
        return sum(int((model(prompts[:size]).logits[:1] != alone).sum()) for size in sizes), alone


def main() -> None:
    """Print how many logits differ, before and after."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = llama(device)
    prompts = torch.randint(0, 1024, (PROMPTS, TOKENS), generator=torch.Generator().manual_seed(1)).to(device)
    before, by_torch = differing(model, prompts)
    print(f"{device}, torch's own kernels: {before:,} logits have other bits in a batch than alone")
    with ts.use_invariant_torch():
        after, ours = differing(model, prompts)
    print(f"{device}, use_invariant_torch: {after:,} logits have other bits in a batch than alone")
    print(f"largest difference from torch: {float((ours - by_torch).abs().max() / by_torch.abs().max()):.2g}")


if __name__ == "__main__":
    main()
