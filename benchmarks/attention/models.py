"""Models of Hugging Face's transformers at real sizes, random weights, few layers: ours beside its own attentions.

It needs transformers, which `.[dev]` brings. Two clocks: the host's, to the end of the GPU's work, is what a user of
transformers sees; the GPU's leaves out what the host takes to launch. Hidden states are checked against eager attention
in the run that times them. ``--dry`` runs all of it on the CPU with small models.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import tilestream as ts
from benchmarks.attention.bench import Run
from benchmarks.core.records import Record, Row
from benchmarks.core.timing import interleave, medians

Call = Callable[[], torch.Tensor]
OURS = "tilestream"
_SHARED = {"vocab_size": 1024, "max_position_embeddings": 16384, "pad_token_id": 0}
_8B = {**_SHARED, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
       "head_dim": 128}  # fmt: skip
#: Name -> configuration's class and sizes. The vocabulary is small, and all experts get every token: attention is what
#: differs, and no token may change its expert by a rounding.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.1-8B": ("LlamaConfig", _8B),
    "Mistral-7B": ("MistralConfig", {**_8B, "sliding_window": 4096}),
    "Gemma-2-9B": (
        "Gemma2Config",
        {**_8B, "hidden_size": 3584, "num_attention_heads": 16, "head_dim": 256, "sliding_window": 4096},
    ),
    "gpt-oss-20b": (
        "GptOssConfig",
        {**_8B, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "head_dim": 64,
         "sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 4},
    ),
}  # fmt: skip
#: Of a dry run: what a model is changed by.
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SMALL_WINDOW = 8
#: Of hidden states, and of gradients, relative to eager attention's: bfloat16 through a few layers.
MOST_ERROR, MOST_ERROR_OF_GRADIENTS = 0.03, 0.1
LAYERS, ROUNDS = 4, 7
#: Steps of decoding before a cache is taken back to its prompt.
STEPS = 64


class Case(NamedTuple):
    """A call of a model: what is done, with how many sequences of how many tokens."""

    what: str  # "prefill", "decode", "train"; padded: its prompts are
    batch: int
    tokens: int
    padded: bool = False

    @property
    def name(self) -> str:
        """The name of its row."""
        return f"{self.what}{' padded' if self.padded else ''} {self.batch} x {self.tokens}"


CASES = (Case("prefill", 1, 8192), Case("prefill", 4, 4096, padded=True), Case("decode", 8, 8192),
         Case("decode", 8, 8192, padded=True), Case("train", 1, 4096))  # fmt: skip
SMALL_CASES = tuple(case._replace(batch=2, tokens=24) for case in CASES)


# Models and calls -----------------------------------------------------------------------------------------------------


def model_of(name: str, device: str, small: bool = False) -> Any:
    """A model with random weights, without its head."""
    import transformers

    config, sizes = MODELS[name]
    changes: dict[str, Any] = {**SMALL, "num_hidden_layers": 2} if small else {"num_hidden_layers": LAYERS}
    if small and "sliding_window" in sizes:
        changes["sliding_window"] = SMALL_WINDOW
    torch.manual_seed(0)
    with torch.device(device):
        made = getattr(transformers, config)(**{**sizes, **changes})
        return transformers.AutoModel.from_config(made, dtype=torch.bfloat16).eval()


def implementations() -> list[str]:
    """The names of attentions that can be tried here: eager first, ours last."""
    from transformers.utils import import_utils

    found = ["eager", "sdpa"]
    for version in (2, 3, 4):  # by the packages that are installed; transformers of today knows three
        is_here = getattr(import_utils, f"is_flash_attn_{version}_available", None)
        if is_here is not None and is_here():
            found.append(f"flash_attention_{version}")
    return [*found, ts.register_attention(OURS)]


def padding(case: Case, device: torch.device, more: int = 0) -> torch.Tensor | None:
    """The mask of prompts of several lengths, padded on the left, and of ``more`` tokens behind them."""
    if not case.padded:
        return None
    first = torch.arange(case.batch, device=device)[:, None] * case.tokens // (2 * case.batch)
    return (torch.arange(case.tokens + more, device=device) >= first).long()


def call_of(model: Any, case: Case, implementation: str) -> Call:
    """The call by one implementation; it returns the hidden states of tokens that are no padding, or a gradient."""
    tokens = torch.randint(1, 1024, (case.batch, case.tokens), generator=torch.Generator().manual_seed(1))
    ids, mask = tokens.to(model.device), padding(case, model.device)
    if case.what == "decode":
        return decoding(model, case, implementation, ids)

    def prefill() -> torch.Tensor:
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            out: torch.Tensor = model(ids, attention_mask=mask, use_cache=False).last_hidden_state
        return out if mask is None else out * mask[..., None]

    direction = torch.randn(model.config.hidden_size, generator=torch.Generator().manual_seed(2)).to(
        model.device, torch.bfloat16
    )

    def train() -> torch.Tensor:
        model.set_attn_implementation(implementation)
        model.zero_grad()
        (model(ids, use_cache=False).last_hidden_state * direction).float().sum().backward()
        gradient: torch.Tensor = model.layers[0].self_attn.o_proj.weight.grad
        return gradient

    return train if case.what == "train" else prefill


def decoding(model: Any, case: Case, implementation: str, ids: torch.Tensor) -> Call:
    """A step of one token a sequence behind a prompt in a static cache. Each step sees one key more than the last."""
    from transformers import StaticCache

    mask = padding(case, model.device, STEPS)
    cache = StaticCache(config=model.config, max_cache_len=case.tokens + STEPS)
    with torch.no_grad():  # the prompt by our attention, whichever is timed: eager's memory grows with its square
        model.set_attn_implementation(OURS)
        model(ids, attention_mask=None if mask is None else mask[:, : case.tokens], past_key_values=cache)
    prompt, step = lengths(cache), ids[:, :1]
    done = 0

    def decode() -> torch.Tensor:
        nonlocal done
        model.set_attn_implementation(implementation)
        if done == STEPS:
            done = 0
            rewind(cache, prompt)
        done += 1
        seen = None if mask is None else mask[:, : case.tokens + done]
        with torch.no_grad():
            out: torch.Tensor = model(step, attention_mask=seen, past_key_values=cache).last_hidden_state
        return out

    return decode


def lengths(cache: Any) -> list[dict[str, Any]]:
    """What each layer of a cache counts, in numbers and in tensors of one."""
    return [
        {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in vars(layer).items()
            if type(value) is int or (isinstance(value, torch.Tensor) and value.dim() == 0)
        }
        for layer in cache.layers
    ]


def rewind(cache: Any, prompt: list[dict[str, Any]]) -> None:
    """Take a cache back to its `lengths` of before. The keys of a window stay shifted: only its first steps count."""
    for layer, counted in zip(cache.layers, prompt, strict=True):
        for name, value in counted.items():
            if isinstance(value, torch.Tensor):
                getattr(layer, name).copy_(value)
            else:
                setattr(layer, name, value)


# Measuring ------------------------------------------------------------------------------------------------------------


def row(run: Run, record: Record, name: str, case: Case, model: Any) -> Row:
    """Milliseconds of each implementation by both clocks.

    Ours must run and agree with eager attention, or it is a failure. Another one may refuse a model, and is then named
    with its reason; one that disagrees is a failure, and is not timed.
    """
    calls, refused, errors = right(record, f"{name} {case.name}", case, model)
    rounds = 1 if run.dry else ROUNDS
    ms = medians(interleave({what: synchronized(run, call) for what, call in calls.items()}, rounds=rounds), 3)
    gpu, waits = on_the_gpu(run, calls, rounds)
    return {"name": f"{name} {case.name}", "model": name, **case._asdict(), "ms": ms, "gpu_ms": gpu, "waits": waits,
            "refused": refused, "errors": errors}  # fmt: skip


def right(
    record: Record, what: str, case: Case, model: Any
) -> tuple[dict[str, Call], dict[str, str], dict[str, float]]:
    """The calls whose answers are eager's, why others were refused, and how far each answer is from eager's."""
    calls: dict[str, Call] = {}
    refused, errors, expected = {}, {}, None
    most = MOST_ERROR_OF_GRADIENTS if case.what == "train" else MOST_ERROR
    for implementation in implementations():
        try:
            call = call_of(model, case, implementation)
            out = call().float()
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # what a GPU reports is known when it has run
            ts.check()
        except Exception as error:
            refused[implementation] = f"{type(error).__name__}: {error}"[:100]
            if implementation == OURS:
                record.fail(f"{what} {refused[implementation]}")
            continue
        expected = out if expected is None else expected
        errors[implementation] = ((out - expected).norm() / expected.norm()).item()
        if errors[implementation] < most:
            calls[implementation] = call
        else:
            record.fail(f"{what} {implementation}: differs from eager attention by {errors[implementation]:.3g}")
    return calls, refused, errors


def on_the_gpu(run: Run, calls: dict[str, Call], rounds: int) -> tuple[dict[str, float], list[str]]:
    """Milliseconds by the GPU's clock, and the calls that cannot be timed by it: they wait for the GPU themselves."""
    free, waits = dict(calls), []
    for what, call in calls.items():
        try:
            run.clock.interleave({what: call}, rounds=1)
        except RuntimeError as error:
            if "does it wait" not in str(error):
                raise
            waits.append(what)
            del free[what]
    return (medians(run.clock.interleave(free, rounds=rounds).seconds, 3) if free else {}), waits


def synchronized(run: Run, call: Call) -> Callable[[], None]:
    """The call, to the end of the GPU's work."""

    def whole() -> None:
        call()
        run.clock.synchronize()

    return whole


def models(run: Run) -> None:
    """A row a model and case."""
    record = run.attention_record("attention_transformers", layers=2 if run.dry else LAYERS)
    for name in MODELS:
        begin = time.perf_counter()
        model = model_of(name, run.clock.device, run.dry)
        print(f"{name}: made in {time.perf_counter() - begin:.1f} s", flush=True)
        cases = {f"{name} {case.name}": case for case in (SMALL_CASES if run.dry else CASES)}
        run.each(record, cases, lambda _, case, name=name, model=model: row(run, record, name, case, model))
        del model
