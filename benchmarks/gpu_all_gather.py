"""All-gather + matmul and matmul + reduce-scatter across GPUs, beside NCCL + torch.mm and torch's own fused ops.

    PYTHONPATH=src python benchmarks/gpu_all_gather.py [RESULT.json] [--op gather|scatter|both] [--rounds 15]

One process a GPU, as many as there are. bf16, B as a Linear has it (``[N, K]``, transposed). Each call begins on GPUs
that are idle and have met (a barrier before, not in the time); what is timed is the stream, by events, handshakes
included; the functions take turns; of each the median over rounds, and of that the largest over ranks. Before anything
is timed each answer is checked against float64, from buffers of NaN.

``floor`` is max(the faster matmul alone, the faster of NCCL's transfer and ours): no overlap goes below it. ``win`` is
(best - ours) / (best - floor), best being the best of the others.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tilestream as ts
from harness import gpu_record
from tilestream import distributed as tsd

#: M, N of one rank, K.
GATHERS = [
    (8192, 3584, 8192), (16384, 7168, 8192), (4096, 12288, 4096), (4096, 3584, 8192), (2048, 3584, 8192),
    (8192, 1024, 8192), (1024, 3584, 8192), (256, 3584, 8192),
]  # fmt: skip
#: M, N, K of one rank.
SCATTERS = [(8192, 8192, 3584), (16384, 8192, 7168), (4096, 4096, 12288), (4096, 8192, 3584), (2048, 8192, 3584)]


def bench(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Milliseconds: the largest over ranks of each function's median."""
    for function in functions.values():
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    dist.barrier()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            dist.barrier()
            torch.cuda.synchronize()
            torch.cuda._sleep(2_000_000)  # what follows is issued before it begins: the host's cost is not in it
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end))
    ts.check()
    out = {}
    for name, samples in times.items():
        worst = torch.tensor(statistics.median(samples), device="cuda")
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        out[name] = round(worst.item(), 4)
    return out


def checked(name: str, function: Callable[[], torch.Tensor], exact: torch.Tensor) -> dict[str, float] | None:
    """The relative Frobenius error, or None where the function cannot be had; raises where it is wrong."""
    try:
        got = function()
        torch.cuda.synchronize()
    except Exception as error:  # a peer that this torch, or this machine, does not have
        if name.startswith("ours"):
            raise
        print(f"{name}: {type(error).__name__}: {error}"[:200], file=sys.stderr)
        return None
    error = ((got.double() - exact).norm() / exact.norm()).item()
    if not error < 1e-2:
        raise AssertionError(f"{name}: wrong answer: relative error {error:.3g}")
    return {"frobenius": error}


def gather_row(m: int, n: int, k: int, world: int, rank: int, rounds: int) -> dict[str, Any]:
    """One shape of all-gather + matmul."""
    torch.manual_seed(rank)
    a = torch.randn(m // world, k, device="cuda").to(torch.bfloat16)
    w = (torch.randn(n, k, device="cuda") * k**-0.5).to(torch.bfloat16).t()
    full = torch.empty(m, k, device="cuda", dtype=torch.bfloat16)
    name = dist.group.WORLD.group_name
    dist.all_gather_into_tensor(full, a)
    exact = full.double() @ w.double()
    nothing = w[:, :8].contiguous()

    def nccl() -> torch.Tensor:
        dist.all_gather_into_tensor(full, a)
        return torch.mm(full, w)

    candidates: dict[str, Callable[[], torch.Tensor]] = {
        "nccl + mm": nccl,
        "torch fused": lambda: torch.ops.symm_mem.fused_all_gather_matmul(a, [w], 0, name)[1][0],
        "ours fused": lambda: tsd.all_gather_matmul(a, w, form="fused"),
        "ours unfused": lambda: tsd.all_gather_matmul(a, w, form="unfused"),
        "ours": lambda: tsd.all_gather_matmul(a, w),
    }
    errors = {which: checked(which, function, exact) for which, function in candidates.items()}
    functions: dict[str, Callable[[], Any]] = {
        "mm": lambda: torch.mm(full, w),
        "ours mm": lambda: ts.matmul(full, w),
        "nccl": lambda: dist.all_gather_into_tensor(full, a),
        "copies": lambda: tsd.all_gather_matmul(a, nothing, form="fused"),  # eight columns: the transfer is all
        **{which: function for which, function in candidates.items() if errors[which] is not None},
    }
    return summary({"op": "all_gather_matmul", "m": m, "n": n, "k": k}, bench(functions, rounds), errors, "copies")


def scatter_row(m: int, n: int, k: int, world: int, rank: int, rounds: int) -> dict[str, Any]:
    """One shape of matmul + reduce-scatter."""
    torch.manual_seed(rank)
    a = torch.randn(m, k, device="cuda").to(torch.bfloat16)
    w = (torch.randn(n, k, device="cuda") * k**-0.5).to(torch.bfloat16).t()
    part = torch.empty(m // world, n, device="cuda", dtype=torch.bfloat16)
    whole = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    name = dist.group.WORLD.group_name
    exact = a.double() @ w.double()
    dist.all_reduce(exact)
    exact = exact.chunk(world)[rank].clone()

    def nccl() -> torch.Tensor:
        torch.mm(a, w, out=whole)
        dist.reduce_scatter_tensor(part, whole)
        return part

    candidates: dict[str, Callable[[], torch.Tensor]] = {
        "nccl + mm": nccl,
        "torch fused": lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(a, w, "sum", 0, name),
        "ours": lambda: tsd.matmul_reduce_scatter(a, w),
    }
    errors = {which: checked(which, function, exact) for which, function in candidates.items()}
    functions: dict[str, Callable[[], Any]] = {
        "mm": lambda: torch.mm(a, w, out=whole),
        "ours mm": lambda: ts.matmul(a, w),
        "nccl": lambda: dist.reduce_scatter_tensor(part, whole),
        **{which: function for which, function in candidates.items() if errors[which] is not None},
    }
    return summary({"op": "matmul_reduce_scatter", "m": m, "n": n, "k": k}, bench(functions, rounds), errors, "nccl")


def summary(shape: dict[str, Any], ms: dict[str, float], errors: dict[str, Any], alone: str) -> dict[str, Any]:
    """A row: times, the floor, and what share of the way to it was won."""
    floor = max(min(ms["mm"], ms["ours mm"]), min(ms["nccl"], ms[alone]))
    best = min(ms[name] for name in ("nccl + mm", "torch fused") if name in ms)
    ours = ms["ours"]
    return {
        **shape, "ms": ms, "errors": errors, "floor": floor, "best": best, "ratio": round(best / ours, 4),
        "win": round((best - ours) / max(best - floor, 1e-6), 4),
    }  # fmt: skip


def rank_main(rank: int, world: int, where: str, path: str, op: str, rounds: int, limit: int) -> None:
    """One rank."""
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{where}", rank=rank, world_size=world)
    rows = []
    work = [(gather_row, shape) for shape in GATHERS if op != "scatter"]
    work += [(scatter_row, shape) for shape in SCATTERS if op != "gather"]
    for row, (m, n, k) in work[:limit]:
        rows.append(row(m, n, k, world, rank, rounds))
        torch.cuda.empty_cache()
        if rank == 0:
            print(rows[-1], flush=True)
            gpu_record(Path(path).stem, rows, Path(path), world=world)
    if rank == 0:
        plan = tsd.plan_all_gather_matmul(
            torch.empty(1024, 8192, device="cuda", dtype=torch.bfloat16),
            torch.empty(8192, 3584, device="cuda", dtype=torch.bfloat16),
        )
        print(plan.explain(), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """All ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("result", nargs="?", default="")
    parser.add_argument("--op", choices=["gather", "scatter", "both"], default="both")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shapes", type=int, default=1000, help="at most so many")
    arguments = parser.parse_args()
    world = torch.cuda.device_count()
    result = arguments.result or str(Path(__file__).parent / "results" / f"gpu_all_gather_x{world}.json")
    with tempfile.TemporaryDirectory() as folder:
        where = os.path.join(folder, "store")  # noqa: PTH118
        args = (world, where, result, arguments.op, arguments.rounds, arguments.shapes)
        mp.spawn(rank_main, args=args, nprocs=world)


if __name__ == "__main__":
    main()
