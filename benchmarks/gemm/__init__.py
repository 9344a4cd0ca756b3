"""GEMM on one GPU, beside its peers. `gemm.quack` says how to install quack."""

from __future__ import annotations

from functools import partial

from benchmarks.core.section import Section

_hopper = partial(Section, nvidia="plans of the Hopper kernel; the self-check's step speed has the shapes")
SESSION = "gemm.bench:Bench"
SECTIONS = {
    "suite": _hopper("gemm.sections:suite", "cuBLAS: squares, Llama-3's layers, short K, odd", 150, usual=True),
    "random": _hopper("gemm.board:random", "cuBLAS on problems that a seed draws: --seed, --count, --resume", 200),
    "quack": _hopper("gemm.quack:quack", "quack-kernels and cuBLAS on a dozen shapes", 270),
    "fp8": _hopper("gemm.sections:fp8", "torch._scaled_mm", 90, usual=True),
    "epilogue": _hopper("gemm.sections:epilogue", "torch.compile of bias and GELU", 270, usual=True),
    "grouped": _hopper("gemm.grouped:grouped", "torch._grouped_mm, a loop, peers, on layers of experts", 120),
    "experts": _hopper("gemm.grouped:experts", "torch's product, and SwiGLU behind it; 8 bits with blocks' scales", 60),
    "grouped_sources": _hopper(
        "gemm.grouped_sources:grouped_sources", "rows by source: the Hopper kernel beside the portable one", 90
    ),
    "grouped_search": _hopper("gemm.grouped_search:grouped_search", "the same layers, by every likely tile", 90),
    "search": _hopper("gemm.search:search", "the best plan of the whole space", 130),
    "sweep": _hopper("gemm.sweep:sweep", "every plan of drawn problems: what the cost model is fitted to", 150),
    "host": _hopper("gemm.host:host", "what a call, and a process's first call, cost the host", 70),
    "queues": _hopper("gemm.queues:queues", "a static grid, one queue, a queue a worker; idle and contended"),
    "pitch": _hopper("gemm.pitch:pitch", "rows that begin anywhere: large tiles, pairs of CTAs, narrow copies", 60),
    "counters": Section("gemm.counters:counters", "what ncu counts where cuBLAS is ahead", 300, nvidia="ncu"),
    "portable": Section("gemm.portable:portable", "the portable Triton kernel beside cuBLAS, by schedule", 120),
    "fit": Section("gemm.fit:main", "the cost model's constants, of records of sweeps", tool=True, gpus=0),
    "_compile": Section("gemm.compiling:compile_share", tool=True),
    "_first_calls": Section("gemm.first_calls:first_calls", tool=True),
    "_ncu": Section("gemm.counters:under_ncu", tool=True),
}
