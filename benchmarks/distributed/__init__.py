"""Matmuls and collectives across the GPUs of a machine, a process each, beside NCCL and torch's own fused ops."""

from __future__ import annotations

from benchmarks.core.section import Section

_PICTURE = "a picture of the Hopper kernel"
SECTIONS = {
    "gather": Section(
        "distributed.all_gather:gather", "all-gather + matmul, and matmul + reduce-scatter", 300, usual=True, gpus=2
    ),
    "all_reduce": Section(
        "distributed.all_reduce:all_reduce", "matmul + all-reduce of few rows (decode)", 100, usual=True, gpus=2,
        nvidia="slots in torch's symmetric memory, beside its own one-shot and two-shot",
    ),
    "mlp": Section("distributed.mlp:mlp", "an MLP block, compiled, forward and backward", 120, usual=True, gpus=2),
    "llama": Section("distributed.llama:llama", "what is fused of a Llama, and its losses", 120, gpus=2),
    "copies": Section(
        "distributed.copies:copies", "copies between GPUs beside a matmul on each", 100, gpus=2,
        nvidia="copies over NVLink, by torch's symmetric memory",
    ),
    "gather_timeline": Section(
        "distributed.gather_timeline:gather_timeline", "copies and tiles of one call on one time axis", gpus=2,
        nvidia=_PICTURE,
    ),
    "mlp_timeline": Section(
        "distributed.mlp_timeline:mlp_timeline", "computation and copies of an MLP block on one time axis", gpus=2,
        nvidia=_PICTURE,
    ),
    "dispatch_table": Section(
        "distributed.dispatch_table:main", "write the ops' table from RECORD.json ... [--check]", tool=True
    ),
}  # fmt: skip
