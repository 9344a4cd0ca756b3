"""The experts of a model of Hugging Face's transformers, run by `tilestream.grouped_mm`.

``python examples/mixture_of_experts.py`` takes a small Qwen3-MoE with random weights. transformers asks its
`ExpertsInterface` for the function of a layer's experts; this one is registered there, and fits every model whose
experts are such modules: gated or not, with a bias or not, either way round. Without a GPU it runs on the CPU.
"""

from __future__ import annotations

import torch

import tilestream as ts

EXPERTS, TOP_K, WIDTH, HIDDEN, SEQUENCES, TOKENS = 16, 4, 256, 192, 2, 96


def experts(
    layer: torch.nn.Module, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    """Each token's row through the experts that its router chose, weighted and added; ``x`` is [tokens, width].

    Counts stay on the device: nothing waits for the host, so that a CUDA graph takes those of each replay.
    """
    top_k = chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)  # the tokens' choices, expert by expert
    counts = torch.zeros(layer.num_experts, dtype=torch.int32, device=x.device)
    counts = counts.index_add(0, chosen.flatten(), torch.ones_like(chosen.flatten(), dtype=torch.int32))
    ends = counts.cumsum(0).to(torch.int32)  # where each expert's rows end

    def linear(rows: torch.Tensor, name: str, activation: str | None = None) -> torch.Tensor:
        weight = getattr(layer, name)
        return ts.grouped_mm(
            rows, weight if layer.is_transposed else weight.mT, ends,
            bias=getattr(layer, f"{name}_bias") if layer.has_bias else None, activation=activation,
        )  # fmt: skip

    rows = x[order // top_k]
    is_silu = isinstance(layer.act_fn, torch.nn.SiLU) or type(layer.act_fn).__name__ == "SiLUActivation"
    if layer.has_gate and layer.is_concatenated and is_silu:
        rows = linear(rows, "gate_up_proj", "swiglu")  # the gate's and the other half meet in the product's epilogue
    elif layer.has_gate:
        rows = layer._apply_gate(linear(rows, "gate_up_proj"))
    else:
        rows = layer.act_fn(linear(rows, "up_proj"))
    rows = linear(rows, "down_proj") * weights.flatten()[order, None]
    place = order.argsort()  # where each choice's row lies
    return rows[place].view(-1, top_k, x.shape[1]).sum(1).to(x.dtype)


def model(device: str) -> torch.nn.Module:
    """Two layers, random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=WIDTH, moe_intermediate_size=HIDDEN, intermediate_size=HIDDEN,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=EXPERTS,
        num_experts_per_tok=TOP_K, decoder_sparse_step=1, max_position_embeddings=TOKENS,
    )  # fmt: skip
    made = Qwen3MoeForCausalLM(config).to(device, torch.float16 if device == "cuda" else torch.float32)
    with torch.no_grad():  # transformers leaves experts' weights small: outputs are to depend on them
        for name, parameter in made.named_parameters():
            if "experts" in name:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return made


def run(made: torch.nn.Module, implementation: str, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits, and the gradient of the first layer's experts."""
    made.set_experts_implementation(implementation)
    made.zero_grad()
    logits = made(tokens).logits
    logits.float().square().mean().backward()
    return logits.detach(), made.model.layers[0].mlp.experts.gate_up_proj.grad.clone()


def main() -> None:
    """Print how far logits and gradients are from those of transformers' own loop over experts."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("tilestream", experts)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = model(device)
    tokens = torch.randint(0, 512, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(1)).to(device)
    theirs, ours = (run(made, name, tokens) for name in ("eager", "tilestream"))
    plan = ts.grouped_plan(
        SEQUENCES * TOKENS * TOP_K, 2 * HIDDEN, WIDTH, EXPERTS, dtype=theirs[0].dtype, device=device,
        activation="swiglu",
    )  # fmt: skip
    print(f"{SEQUENCES * TOKENS} tokens, {TOP_K} of {EXPERTS} experts each, on {device}: {plan.label}")
    logits, gradient = (float((x - y).abs().max() / y.abs().max()) for x, y in zip(ours, theirs, strict=True))
    print(f"gradient of the experts, largest difference: {gradient:.2g}")
    print(f"largest difference from torch: {logits:.2g}")


if __name__ == "__main__":
    main()
