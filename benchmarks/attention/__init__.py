"""Attention prefill on one GPU, beside cuDNN (through SDPA) and FlashAttention 4 where it is installed.

``python tests/gpu/precompile.py attention`` before saves compiling one by one.
"""

from __future__ import annotations

from functools import partial

from benchmarks.core.section import Section

_cudnn = partial(Section, nvidia="beside cuDNN; the self-check's step speed has attention beside torch's")
_tiles = partial(Section, nvidia="tiles of a kernel for Hopper, beside cuDNN")
SESSION = "attention.bench:Run"
SECTIONS = {
    "dense": _cudnn("attention.prefill:dense", "16k tokens, S = 512 to 16k, D = 64, 128, 256", 120, usual=True),
    "lists": _cudnn("attention.prefill:lists", "a mix of 64 sequences, packed and in pages", 30, usual=True),
    "heads": _cudnn("attention.prefill:heads", "GQA 8:1 beside as many K/V heads as query heads", 30, usual=True),
    "host": _cudnn("attention.prefill:host", "the host's part of a call", 20),
    "arrival": _cudnn("attention.prefill:arrival", "keys that arrive while the kernel runs"),
    "neighbour": _cudnn("attention.prefill:neighbour", "16 SMs held by another kernel", 20),
    "split": _cudnn("attention.prefill:split", "few queries over many keys", 30),
    "fp8": _cudnn("attention.fp8:fp8", "8 bits, by the Hopper kernel and the portable one", 120),
    "transformers": Section("attention.models:models", "models of transformers, beside its own attentions", 300),
    "variants": _tiles("attention.tiles:variants", "every tile, with turns and without", 120),
    "blocks": _tiles("attention.tiles:blocks", "the same at short lengths, without turns"),
    "groups": _tiles("attention.tiles:groups", "the plan's tile, by the bytes of a group of heads"),
    "sizes": _tiles("attention.tiles:sizes", "the plan's tile, by the number of heads in a group", 90),
    "portable": _tiles("attention.tiles:portable", "every tile of the portable kernel"),
    "timeline": _tiles("attention.timeline:timeline", "who did which tile when, in one causal call"),
}
