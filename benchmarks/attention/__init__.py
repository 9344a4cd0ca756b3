"""Attention prefill on one GPU, beside cuDNN (through SDPA) and FlashAttention 4 where it is installed."""

from __future__ import annotations

from benchmarks.core.section import Section

_CUDNN = "beside cuDNN and FlashAttention 4; the self-check's step speed has attention beside torch's"
_TILES = "tiles of a kernel for Hopper, beside cuDNN"
SESSION = "attention.bench:Run"
#: ``python tests/gpu/precompile_attention.py benchmark`` before saves compiling one by one.
SECTIONS = {
    "dense": Section(
        "attention.prefill:dense", "16k tokens, S = 512 to 16k, D = 64, 128, 256, causal and full", 120, usual=True,
        nvidia=_CUDNN,
    ),
    "lists": Section(
        "attention.prefill:lists", "a log-normal mix of 64 sequences, packed and in pages", 30, usual=True,
        nvidia=_CUDNN,
    ),
    "heads": Section(
        "attention.prefill:heads", "GQA 8:1 beside as many K/V heads as query heads", 30, usual=True, nvidia=_CUDNN
    ),
    "host": Section("attention.prefill:host", "the host's part of a call", 20, nvidia=_CUDNN),
    "arrival": Section("attention.prefill:arrival", "keys that arrive while the kernel runs", nvidia=_CUDNN),
    "neighbour": Section("attention.prefill:neighbour", "16 SMs held by another kernel", 20, nvidia=_CUDNN),
    "split": Section("attention.prefill:split", "few queries over many keys", 30, nvidia=_CUDNN),
    "fp8": Section("attention.fp8:fp8", "8 bits, by the Hopper kernel and the portable one", 120, nvidia=_CUDNN),
    "variants": Section("attention.tiles:variants", "every tile, with turns and without", 120, nvidia=_TILES),
    "blocks": Section("attention.tiles:blocks", "the same at short lengths, without turns", nvidia=_TILES),
    "groups": Section("attention.tiles:groups", "the plan's tile, by the bytes of a group of heads", nvidia=_TILES),
    "sizes": Section("attention.tiles:sizes", "the plan's tile, by the number of heads in a group", 90, nvidia=_TILES),
    "portable": Section("attention.portable:portable", "tiles and workers of the portable kernel", nvidia=_TILES),
    "timeline": Section("attention.timeline:timeline", "who did which tile when, in one causal call", nvidia=_TILES),
}  # fmt: skip
