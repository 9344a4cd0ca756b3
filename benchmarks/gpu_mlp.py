"""A tensor-parallel MLP block, forward and backward: torch's own async TP beside the same compiled graph on ours.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_mlp.py [--rounds 9] [--tokens 8192] [--into FOLDER]

One process a GPU, as many as there are. Llama-3 70B's block (8192 columns, 28672 of them hidden), bf16, built with
torch's ``parallelize_module``: tokens are sharded, gathered, multiplied by w1 and w3, silu(.) * ., multiplied by w2 and
reduce-scattered. ``nccl``: compiled as it is. ``torch``: with the compiler's pass, on torch's fused ops. ``ours``: that
graph once more, the ops run by `tilestream.distributed.async_tp`; since ops are called by name, nothing is compiled
anew. Milliseconds by events, L2 flushed, the ranks met on their streams before; ways in turn, each way's median, the
largest over ranks. Outputs and gradients are compared with those of ``nccl`` before anything is timed. The sites that
were fused, and why others were not, are in the record: ``gpu_mlp_x<world>``.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import tilestream as ts
from harness import RESULTS, GpuRecord
from tilestream import distributed as tsd

DIM, HIDDEN = 8192, 28672
#: Sequences: a batch of one is gathered by a view, which torch's pass does not know.
BATCH = 2
_FLUSH = 256 << 20
#: Cycles in which the host issues a call: 10 ms and more.
_PAUSE = 20_000_000

#: What is open while a way runs, and the way.
Way = tuple[Callable[[], contextlib.AbstractContextManager[Any]], Callable[[], Any]]


class Mlp(nn.Module):
    """Gate, up, down."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """SwiGLU."""
        product: torch.Tensor = self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))
        return product


class Block(nn.Module):
    """What `made` cuts: styles are of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Its MLP, of tokens that are sharded."""
        y: torch.Tensor = self.mlp(x)
        return y


def made(world: int) -> nn.Module:
    """The block, in torch's parallel styles, the same numbers on each rank before they are cut."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Block().to(torch.bfloat16)
    styles = {
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.w1": ColwiseParallel(), "mlp.w3": ColwiseParallel(), "mlp.w2": RowwiseParallel(output_layouts=Shard(1)),
    }  # fmt: skip
    return parallelize_module(model, init_device_mesh("cuda", (world,)), styles)


def compiled(model: nn.Module, fused: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """The block as torch's compiler has it, with its pass for tensor parallelism or without.

    The pass is on or off from here on: the backward part is compiled when it is first run.
    """
    import torch._inductor.config as inductor

    torch._dynamo.reset()
    inductor._micro_pipeline_tp = fused
    function: Callable[[torch.Tensor], torch.Tensor] = torch.compile(model)
    return function


def step(
    model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, grad: torch.Tensor
) -> list[torch.Tensor]:
    """Forward and backward: the output, and the gradients of input and weights."""
    x.grad = None
    for parameter in model.parameters():
        parameter.grad = None
    y = call(x)
    y.backward(grad)
    assert x.grad is not None
    return [y.detach(), x.grad, *(parameter.grad.to_local() for parameter in model.parameters())]  # type: ignore[union-attr]


def timed(ways: dict[str, Way], rounds: int) -> dict[str, float]:
    """Milliseconds: the largest over ranks of each way's median."""
    flush, meet = torch.empty(_FLUSH, dtype=torch.uint8, device="cuda"), torch.zeros(1, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in ways}
    for at in range(rounds + 1):
        for name, (opened, way) in ways.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with opened():
                torch.cuda.synchronize()
                flush.zero_()
                torch.cuda._sleep(_PAUSE)
                dist.all_reduce(meet)
                begin.record()
                way()
                end.record()
                torch.cuda.synchronize()
            if at:
                times[name].append(begin.elapsed_time(end))
    medians = torch.tensor([statistics.median(times[name]) for name in ways]).cuda()
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return {name: round(ms, 4) for name, ms in zip(ways, medians.tolist(), strict=True)}


def rank_main(rank: int, world: int, where: str, arguments: argparse.Namespace) -> None:
    """One rank."""
    import torch.distributed._symmetric_memory as symmetric

    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{where}", rank=rank, world_size=world,
        timeout=timedelta(seconds=120),
    )  # fmt: skip
    symmetric.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    record = GpuRecord(f"gpu_mlp_x{world}", Path(arguments.into), world=world) if rank == 0 else None
    model = made(world)
    shape = (BATCH, arguments.tokens // BATCH // world, DIM)
    x = torch.randn(shape, device="cuda").to(torch.bfloat16).requires_grad_()
    grad = torch.randn(shape, device="cuda").to(torch.bfloat16)
    want = [y.clone() for y in step(model, model, x, grad)]
    errors: dict[str, list[float]] = {}

    def check(name: str, found: list[torch.Tensor]) -> None:
        differences = (((a - b).float().norm() / b.float().norm()).item() for a, b in zip(found, want, strict=True))
        errors[name] = [float(f"{x:.2g}") for x in differences]
        assert max(errors[name]) < 2e-2, (name, errors[name])

    plain = compiled(model, False)
    check("nccl", step(model, plain, x, grad))
    ms = {"forward and backward": timed({"nccl": (contextlib.nullcontext, lambda: step(model, plain, x, grad))}, 5)}
    pipelined = compiled(model, True)
    check("torch", step(model, pipelined, x, grad))
    with tsd.async_tp() as handle:
        check("ours", step(model, pipelined, x, grad))
        torch.cuda.synchronize()
        ts.check()
        sites = [str(site) for site in handle.report()]

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return pipelined(x)

    def both() -> list[torch.Tensor]:
        return step(model, pipelined, x, grad)

    for name, way in (("forward", forward), ("forward and backward", both)):
        way()
        with tsd.async_tp():
            way()
        ways: dict[str, Way] = {"torch": (contextlib.nullcontext, way), "ours": (tsd.async_tp, way)}
        ms[name] = ms.get(name, {}) | timed(ways, arguments.rounds)
    ts.check()
    if record is not None:
        record.rows.append({"tokens": arguments.tokens, "ms": ms, "errors": errors, "sites": sites})
        record.write()
        print(ms, errors, *sites, sep="\n", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """All ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--into", default=str(RESULTS), help="the folder of the record")
    arguments = parser.parse_args()
    world = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(world, f"{folder}/store", arguments), nprocs=world)


if __name__ == "__main__":
    main()
