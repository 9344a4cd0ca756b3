"""GEMM on one GPU, beside its peers. `gemm.quack` says how to install quack."""

from __future__ import annotations

from benchmarks.core.section import Section

_HOPPER = "plans of the Hopper kernel; the self-check's step speed has the shapes"
SESSION = "gemm.bench:Bench"
SECTIONS = {
    "suite": Section(
        "gemm.sections:suite", "ts.mm beside cuBLAS: squares, Llama-3's layers from 1 to 16384 rows, short K, odd",
        150, usual=True, nvidia=_HOPPER,
    ),
    "quack": Section("gemm.quack:quack", "a dozen of these shapes beside quack-kernels", 270, nvidia=_HOPPER),
    "fp8": Section("gemm.sections:fp8", "ts.matmul beside torch._scaled_mm", 90, usual=True, nvidia=_HOPPER),
    "epilogue": Section(
        "gemm.sections:epilogue", "ts.linear with bias and GELU beside torch.compile", 270, usual=True, nvidia=_HOPPER
    ),
    "search": Section("gemm.search:search", "the plan beside the best of its whole space", 130, nvidia=_HOPPER),
    "variants": Section(
        "gemm.search:variants", "every plan of the space: what the cost model is fitted to", 110, nvidia=_HOPPER
    ),
    "host": Section("gemm.host:host", "what a call, and a process's first call, cost the host", 70, nvidia=_HOPPER),
    "queues": Section(
        "gemm.queues:queues", "a static grid, one queue, a queue a worker; idle and beside a neighbour", nvidia=_HOPPER
    ),
    "counters": Section("gemm.counters:counters", "what ncu counts where cuBLAS is ahead", 300, nvidia="ncu"),
    "portable": Section("gemm.portable:portable", "the portable Triton kernel beside cuBLAS, by schedule", 120),
    "_compile": Section("gemm.compiling:compile_share", "", tool=True),
    "_first_calls": Section("gemm.first_calls:first_calls", "", tool=True),
    "_ncu": Section("gemm.counters:under_ncu", "", tool=True),
}  # fmt: skip
