"""Matmul + all-reduce of a few rows across GPUs (decode): ours, NCCL, and torch's one-shot and two-shot.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_all_reduce.py [--rounds 25] [--into FOLDER]

One process a GPU. bf16, B as a Linear has it. Timed as `gpu_all_gather` does it: events on the stream, L2 flushed, the
ranks met there before, functions in turn, medians, the largest over ranks. Answers are checked against float64 first.

Of ours: ``ours`` as the table decides, ``nccl + ours`` and ``fused 1`` each form whatever it says. ``torch one shot +
mm`` and ``torch two shot + mm``: torch's symmetric memory, whose kernels spin at two barriers without a bound.

The record, ``gpu_all_reduce_x<world>`` with the device behind it, is what `dispatch_table` makes the op's entries from.
That by which it was decided to have the form at all, written out by hand then, is ``gpu_reduce_by_hand_x2_h200.json``.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tilestream as ts
from benchmarks.core.harness import RESULTS, GpuRecord
from benchmarks.distributed.all_gather import Forms, bench, wrong
from benchmarks.distributed.ranks import on_each_gpu
from tilestream import distributed as tsd
from tilestream.distributed.dispatch import trial

BF16 = torch.bfloat16
ROWS = (1, 16, 64, 128, 256)
_DEADLINE = 10.0


def shapes(world: int) -> list[tuple[int, int]]:
    """N and K of one rank: Llama-3-70B's w2 and wo."""
    return [(8192, 28672 // world), (8192, 8192 // world)]


def forms(rows: int, n: int, k: int, theirs: torch.Tensor) -> tuple[Forms, torch.Tensor]:
    """Each way as a call, and the exact answer; ``theirs``: symmetric memory, as torch's ops want it."""
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    a = torch.randn(rows, k, device="cuda").to(BF16)
    w = (torch.randn(n, k, device="cuda") * k**-0.5).to(BF16).t()
    exact = a.double() @ w.double()
    dist.all_reduce(exact)
    partial = theirs[: rows * n].view(rows, n)

    def nccl() -> torch.Tensor:
        product = a @ w
        dist.all_reduce(product)
        return product

    def by_torch(op: Callable[..., torch.Tensor]) -> torch.Tensor:
        torch.mm(a, w, out=partial)
        return op(partial, "sum", name)

    def ours(fused: bool | None) -> torch.Tensor:
        if fused is None:
            return tsd.matmul_all_reduce(a, w, deadline=_DEADLINE)
        with trial(fused, 1):
            return tsd.matmul_all_reduce(a, w, deadline=_DEADLINE)

    alone = torch.empty(rows, n, device="cuda", dtype=BF16)
    return {
        "nccl + mm": nccl, "nccl + ours": functools.partial(ours, False), "fused 1": functools.partial(ours, True),
        "ours": functools.partial(ours, None),
        "torch one shot + mm": functools.partial(by_torch, torch.ops.symm_mem.one_shot_all_reduce),
        "torch two shot + mm": functools.partial(by_torch, torch.ops.symm_mem.two_shot_all_reduce_),
        "mm": lambda: torch.mm(a, w), "ours mm": lambda: ts.matmul(a, w), "nccl": lambda: dist.all_reduce(alone),
    }, exact  # fmt: skip


def rank_main(rank: int, world: int, arguments: argparse.Namespace) -> None:
    """One rank."""
    import torch.distributed._symmetric_memory as symmetric

    torch.manual_seed(rank)
    record = (
        GpuRecord(f"gpu_all_reduce_x{world}", Path(arguments.into), world=world, dtype="bfloat16")
        if rank == 0
        else None
    )
    most = max(ROWS) * max(n for n, _ in shapes(world))
    theirs = symmetric.empty(most, dtype=BF16, device=f"cuda:{rank}")
    symmetric.rendezvous(theirs, dist.group.WORLD.group_name)  # type: ignore[union-attr]
    for n, k in shapes(world):
        for rows in ROWS:
            functions, exact = forms(rows, n, k, theirs)
            failures: dict[str, str] = {}
            errors: dict[str, float] = {}
            for name in [name for name in functions if name not in ("mm", "ours mm", "nccl")]:
                if failed := wrong(functions[name], exact, errors, name):
                    failures[name] = failed
                    del functions[name]
            ms, host = bench(functions, arguments.rounds, failures)
            if record is not None:
                row: dict[str, Any] = {
                    "op": "matmul_all_reduce", "m": rows, "rows": rows, "n": n, "k": k, "width": n, "ms": ms,
                    "host ms": host, "errors": errors,
                }  # fmt: skip
                record.rows.append(row)
                record.data["failures"] += [f"{rows}x{n}x{k} {name}: {text}" for name, text in failures.items()]
                record.write()
                print(rows, n, k, ms, failures, flush=True)


def main() -> None:
    """All ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--into", default=str(RESULTS), help="the folder of the record")
    on_each_gpu(rank_main, parser.parse_args())
