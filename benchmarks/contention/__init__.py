"""GEMM while other kernels hold SMs."""

from __future__ import annotations

from functools import partial

from benchmarks.core.section import Section

_nccl = partial(Section, gpus=2, nvidia="NCCL's variables set how many SMs it takes")
SECTIONS = {
    "held": Section("contention.neighbours:held", "a neighbour on 0 to 64 SMs, every schedule", 45, usual=True),
    "idle": Section("contention.neighbours:idle", "what a queue costs on an idle GPU", 15, usual=True),
    "split": Section("contention.neighbours:split", "what stream-K gains in few waves", 15, usual=True),
    "green": Section("contention.neighbours:green", "green contexts", 20, nvidia="green contexts are CUDA's"),
    "queues": Section("contention.neighbours:queues", "1, 2 and 8 queues, with and without a neighbour", 10),
    "nccl": _nccl("contention.neighbours:nccl", "beside an all-reduce that is under way", 25),
    "together": _nccl("contention.neighbours:together", "the same, both possible at once", 15),
    "_compile": Section("contention.neighbours:compile_share", tool=True),
}
