"""Matmuls and collectives across the GPUs of a machine, a process each, beside NCCL and torch's own fused ops."""

from __future__ import annotations

from functools import partial

from benchmarks.core.section import Section

_any = partial(Section, gpus=2)
_symmetric = partial(Section, gpus=2, nvidia="torch's symmetric memory over NVLink")
_picture = partial(Section, gpus=2, nvidia="a picture of the Hopper kernel")
SESSION = "distributed.ranks:Ranks"
SECTIONS = {
    "gather": _any("distributed.all_gather:gather", "all-gather + matmul, matmul + reduce-scatter", 300, usual=True),
    "all_reduce": _symmetric("distributed.all_reduce:all_reduce", "matmul + all-reduce of few rows", 100, usual=True),
    "calls": _any("distributed.calls:calls", "what a call costs the host, and calls one after another", 150),
    "captured": _any("distributed.calls:captured", "replays of a graph of one call, beside captured NCCL", 170),
    "moe": _symmetric("distributed.moe:moe", "a mixture of experts, 256 to 16k tokens a rank, beside NCCL", 400),
    "moe_shared": Section("distributed.moe:moe", "its smoke: two ranks on one GPU", 120, nvidia="as of moe"),
    "served": _any("distributed.block:served", "a Llama block, prefill and decode, eager and compiled", 200),
    "served_captured": _any("distributed.block:served_captured", "the same block, replayed", 150),
    "mlp": _any("distributed.mlp:mlp", "an MLP block, compiled, forward and backward", 120, usual=True),
    "llama": _any("distributed.llama:llama", "what is fused of a Llama, and its losses", 120),
    "copies": _symmetric("distributed.copies:copies", "copies between GPUs beside a matmul on each", 100),
    "gather_timeline": _picture("distributed.timelines:gather_timeline", "copies and tiles of a call on one time axis"),
    "captured_timeline": _any("distributed.timelines:captured_timeline", "the same of a replay of a captured call"),
    "mlp_timeline": _picture("distributed.timelines:mlp_timeline", "an MLP block's kernels and copies, likewise"),
    "moe_timeline": _symmetric("distributed.moe_timeline:moe_timeline", "a skewed mixture's kernels on one time axis"),
    "dispatch_table": Section("distributed.dispatch_table:main", "the ops' table, from RECORD.json ...", tool=True),
}
