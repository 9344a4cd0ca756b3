"""GEMM while other kernels hold SMs."""

from __future__ import annotations

from benchmarks.core.section import Section

_GREEN, _NCCL = "green contexts are CUDA's", "NCCL's variables set how many SMs it takes"
SECTIONS = {
    "held": Section(
        "contention.neighbours:held", "a neighbour on 0 to 64 SMs: every schedule, torch, quack if there", 45,
        usual=True,
    ),
    "idle": Section("contention.neighbours:idle", "what a queue costs on an idle GPU", 15, usual=True),
    "split": Section("contention.neighbours:split", "what stream-K gains in few waves", 15, usual=True),
    "green": Section("contention.neighbours:green", "green contexts of 96, 64 and 32 SMs", 20, nvidia=_GREEN),
    "queues": Section("contention.neighbours:queues", "1, 2 and 8 queues, with and without a neighbour", 10),
    "nccl": Section(
        "contention.neighbours:nccl", "beside an all-reduce that is under way", 25, gpus=2, nvidia=_NCCL
    ),
    "together": Section(
        "contention.neighbours:together", "the same, both possible at once", 15, gpus=2, nvidia=_NCCL
    ),
    "_compile": Section("contention.neighbours:compile_share", "", tool=True),
}  # fmt: skip
