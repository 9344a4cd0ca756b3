"""Models of Hugging Face's transformers at real sizes, random weights, few layers: ours beside "sdpa" and "eager".

It needs transformers, which `.[dev]` brings. Times are the host's, to the end of the GPU's work: what a user of
transformers sees. Hidden states are checked against eager attention in the run that times them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import tilestream as ts
from benchmarks.attention.bench import Run
from benchmarks.core.records import Row
from benchmarks.core.timing import interleave, medians

_SHARED = {"vocab_size": 1024, "max_position_embeddings": 16384, "pad_token_id": 0}
_8B = {**_SHARED, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
#: Name -> configuration's class and sizes. The vocabulary is small: attention is what differs.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3-8B": ("LlamaConfig", {**_8B, "intermediate_size": 14336}),
    "Mistral-7B": ("MistralConfig", {**_8B, "intermediate_size": 14336, "sliding_window": 4096}),
    "Qwen3-8B": ("Qwen3Config", {**_8B, "intermediate_size": 12288}),
    "gemma-2-9b": (
        "Gemma2Config",
        {**_SHARED, "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 4096},
    ),
}  # fmt: skip
#: Of hidden states, and of gradients, relative to eager attention's: bfloat16 through a few layers.
MOST_ERROR, MOST_ERROR_OF_GRADIENTS = 0.03, 0.1
LAYERS, ROUNDS = 4, 7


class Case(NamedTuple):
    """A call of a model: sequences, their tokens, and what is done."""

    what: str  # "prefill", "padded", "decode", "train"
    batch: int
    tokens: int

    @property
    def name(self) -> str:
        """The name of its row."""
        return f"{self.what} {self.batch} x {self.tokens}"


CASES = (Case("prefill", 1, 8192), Case("padded", 4, 4096), Case("decode", 8, 8192), Case("decode padded", 8, 8192),
         Case("train", 1, 4096))  # fmt: skip


def model_of(name: str, layers: int = LAYERS, device: str = "cuda", **changes: Any) -> Any:
    """A model with random weights, without its head."""
    import transformers

    config, sizes = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**sizes, "num_hidden_layers": layers, **changes})
    with torch.device(device):
        return transformers.AutoModel.from_config(made, dtype=torch.bfloat16).eval()


def padding(case: Case, device: str) -> torch.Tensor | None:
    """On the left, another share of each sequence."""
    if "padded" not in case.what:
        return None
    first = torch.arange(case.batch, device=device)[:, None] * case.tokens // (2 * case.batch)
    return (torch.arange(case.tokens, device=device) >= first).long()


def call_of(model: Any, case: Case, implementation: str) -> Callable[[], torch.Tensor]:
    """The call by one implementation; the hidden states of tokens that are no padding."""
    from transformers import StaticCache

    device = str(model.device)
    ids = torch.randint(1, 1024, (case.batch, case.tokens), generator=torch.Generator().manual_seed(1)).to(device)
    mask = padding(case, device)
    real = ... if mask is None else mask.bool()

    def forward() -> torch.Tensor:
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            return model(ids, attention_mask=mask, use_cache=False).last_hidden_state[real]

    def train() -> torch.Tensor:
        model.set_attn_implementation(implementation)
        model.zero_grad()
        out = model(ids, use_cache=False).last_hidden_state
        (out * direction).float().sum().backward()
        return model.layers[0].self_attn.o_proj.weight.grad

    if case.what == "train":
        size = model.config.hidden_size
        direction = torch.randn(size, generator=torch.Generator().manual_seed(2)).to(device, torch.bfloat16)
        return train
    if "decode" not in case.what:
        return forward
    cache = StaticCache(config=model.config, max_cache_len=case.tokens + 64)
    with torch.no_grad():  # the prompt by the fast path: keys and values differ little
        model.set_attn_implementation(ts.register_attention())
        model(ids, attention_mask=mask, past_key_values=cache)
    step, grown = ids[:, :1], mask

    def decode() -> torch.Tensor:
        nonlocal grown
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            if grown is not None:
                grown = torch.cat((grown, grown.new_ones(case.batch, 1)), 1)
            return model(step, attention_mask=grown, past_key_values=cache).last_hidden_state

    return decode


def row(run: Run, name: str, case: Case, model: Any, rounds: int = ROUNDS) -> Row:
    """Milliseconds of each implementation; an answer far from eager's is a failure, "sdpa" may refuse a model."""
    record = run.attention_record("attention_transformers")
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    right, refused = None, {}
    most = MOST_ERROR_OF_GRADIENTS if case.what == "train" else MOST_ERROR
    for what in ("eager", "sdpa", ts.register_attention()):
        try:
            call = call_of(model, case, what)
            out = call().float()
            ts.check()
            if right is None:
                right = out
            error = ((out - right).norm() / right.norm()).item()
            if not error < most:
                raise AssertionError(f"differs from eager attention by {error:.3g}")
        except (ValueError, torch.OutOfMemoryError) as error:
            refused[what] = f"{type(error).__name__}: {error}"[:100]
            if what == ts.register_attention():
                record.fail(f"{name} {case.name} {refused[what]}")
        except AssertionError as error:
            record.fail(f"{name} {case.name} {what}: {type(error).__name__}: {error}")
        else:
            calls[what] = synchronized(call)
    return {"name": f"{name} {case.name}", "ms": medians(interleave(calls, rounds=rounds), 3), "refused": refused,
            **case._asdict()}  # fmt: skip


def synchronized(call: Callable[[], Any]) -> Callable[[], None]:
    """The call, to the end of the GPU's work."""

    def run() -> None:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return run


def models(run: Run, cases: tuple[Case, ...] = CASES, **changes: Any) -> None:
    """A row a model and case."""
    record = run.attention_record("attention_transformers")
    for name in MODELS:
        begin = time.perf_counter()
        model = model_of(name, **changes)
        print(f"{name}: made in {time.perf_counter() - begin:.1f} s", flush=True)
        run.each(record, {f"{name} {case.name}": case for case in cases},
                 lambda _, case, name=name, model=model: row(run, name, case, model))  # fmt: skip
        del model
