"""Calls of the public API on emulated AMD GPUs, from the op to the result; see `emulated_hip`.

``python tests/tools/emulator/end_to_end.py ARCH LANDING SEED [NAME...]`` prints a JSON object a case that is right: the
functions of HIP that were called, and the instructions that each kernel executed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "src"))
sys.path.insert(0, str(Path(__file__).parents[2]))

import pytest
import torch

import emulated_hip
import tilestream as ts
from emulated_hip import Hip
from error_rule import Maths, check
from tilestream.core.errors import ArrivalTimeout
from tilestream.distributed import async_input

BF16 = torch.bfloat16
GPU = "cuda:0"


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


A, B = rand(192, 128), rand(128, 128, seed=1)


def matmul(schedule: str, k: int = 128) -> Callable[[Hip], None]:
    def case(hip: Hip) -> None:
        a, b, bias = rand(192, k), rand(k, 128, seed=1), rand(128, seed=2)
        out = ts.matmul(a.to(GPU), b.to(GPU), bias=bias.to(GPU), activation="relu", schedule=schedule, workers=4)
        check(out.cpu(), Maths(a, b, bias, activation="relu"))

    return case


def cdna(hip: Hip) -> None:
    """The CDNA kernel, which is taken on request."""
    a, b = rand(256, 256), rand(256, 256, seed=1)
    plan = ts.plan(256, 256, 256, dtype="bfloat16", layout="nt", device="cuda", backend="cdna", workers=2)
    assert plan.backend == "cdna"
    check(plan.run(a.to(GPU), b.t().contiguous().to(GPU).t()).cpu(), Maths(a, b))


def attention(hip: Hip) -> None:
    q, k, v = rand(1, 100, 4, 64), rand(1, 130, 2, 64, seed=1), rand(1, 130, 2, 64, seed=2)
    with ts.worker_limit(3):
        found = ts.attention(q.to(GPU), k.to(GPU), v.to(GPU), causal=True).cpu().float()
    heads = [x.float().transpose(1, 2) for x in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))]
    mask = torch.ones(100, 130, dtype=torch.bool).tril(30)
    exact = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2)
    assert (found - exact).abs().max() < 2e-2


def streamed(hip: Hip) -> None:
    """Chunks that copy engines bring while the kernel runs, each followed by its signal."""
    stream = ts.stream_in(hip.pin(hip.place(A, "pinned memory")), rows_per_chunk=64, device=GPU)
    out = ts.matmul(stream, B.to(GPU), workers=3)
    check(out.cpu(), Maths(A, B))
    ts.check()


def lost(hip: Hip) -> None:
    """A chunk whose signal never comes: NaN where it is needed, and the error names it."""
    arrival = ts.Arrival.uniform(64, 3, signals=torch.zeros(3, dtype=torch.int32).to(GPU))
    a, words = A.to(GPU), arrival.signals
    words.copy_(torch.tensor([1, 0, 1], dtype=torch.int32))
    out = ts.matmul(a, B.to(GPU), arrival=arrival, workers=3, deadline=2e-3).cpu()
    assert out[64:128].isnan().all()
    with pytest.raises(ArrivalTimeout, match="chunk 1"):
        ts.check()


def async_tp(hip: Hip) -> None:
    """torch's ``_async_input_mm`` on two GPUs at once: each has its own rows; copy engines bring the other's late."""
    library = torch.library.Library("symm_mem", "IMPL")
    async_input.register(library)
    shards = [rand(64, 128, seed=rank) for rank in (0, 1)]
    b, gathered, words, outs = [], [], [], []
    for rank in (0, 1):
        with torch.cuda.device(rank):
            b.append(rand(128, 128, seed=5 + rank).to(f"cuda:{rank}"))
            whole = torch.full((128, 128), float("nan"), dtype=BF16, device=f"cuda:{rank}")
            whole[64 * rank : 64 * rank + 64].copy_(shards[rank])
            word = torch.zeros(2, dtype=torch.uint32, device=f"cuda:{rank}")
            word.view(torch.int32)[rank].fill_(1)
            gathered.append(whole)
            words.append(word)
    for rank in (0, 1):
        with torch.cuda.device(rank):
            beside, at = hip.stream().cuda_stream, 128 * 2 * 64 * (1 - rank)
            ts.runtime.driver.copy_across(
                beside, gathered[rank].data_ptr() + at, gathered[1 - rank].data_ptr() + at, 64 * 128 * 2
            )
            ts.runtime.driver.stream_write(beside, words[rank].data_ptr() + 4 * (1 - rank), 1)
            with ts.worker_limit(4):
                outs.append(torch.ops.symm_mem._async_input_mm(gathered[rank], b[rank], words[rank], rank))
    assert not hip.machines, "nothing has been executed yet, no copy either"
    for rank in (0, 1):
        check(outs[rank].cpu(), Maths(torch.cat(shards), b[rank].cpu()))
        assert not words[rank].view(torch.int32).cpu().any(), "the words are not zeroed"
    ts.check()


CASES: dict[str, Callable[[Hip], None]] = {
    "matmul, static": matmul("static"),
    "matmul, dynamic": matmul("dynamic"),
    "matmul, stream-K": matmul("stream_k", 512),
    "matmul, cdna": cdna,
    "attention": attention,
    "matmul, streamed": streamed,
    "matmul, a chunk is lost": lost,
    "async TP, two GPUs": async_tp,
}


def main(arch: str, landing: str, seed: str, *names: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        library = emulated_hip.build(Path(folder))
        os.environ["TRITON_LIBHIP_PATH"] = str(library)
        cache = Path(os.environ["TRITON_CACHE_DIR"])
        how: dict[str, Any] = {"landing": landing, "seed": int(seed)}
        with emulated_hip.emulated_hip(library, cache, arch, devices=2, **how) as hip:
            for name in (n for n in CASES if not names or n in names):
                hip.asked.clear()
                hip.machines.clear()
                CASES[name](hip)
                executed = [machine.executed for machine in hip.machines]
                print(json.dumps({"name": name, "executed": executed, "asked": sorted(set(hip.asked))}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
