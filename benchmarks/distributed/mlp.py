"""A tensor-parallel MLP block, forward and backward: torch's own async TP beside the same compiled graph on ours.

Llama-3 70B's block (8192 columns, 28672 of them hidden), bf16, built with torch's ``parallelize_module``: tokens are
sharded, gathered, multiplied by w1 and w3, silu(.) * ., multiplied by w2 and reduce-scattered. ``nccl``: compiled as it
is. ``torch``: with the compiler's pass, on torch's fused ops. ``ours``: the same, compiled and run under
`tilestream.distributed.async_tp`. Milliseconds by events, L2 flushed, the ranks met on their streams before; ways in
turn, each way's median, the largest over ranks. Before anything is timed, outputs and gradients are compared with those
of the block that is not compiled. The record has the sites that were fused, and why others were not.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tilestream as ts
from benchmarks.core.session import Session
from benchmarks.distributed.ranks import MeetingClock, record_of, slowest
from tilestream import distributed as tsd

DIM, HIDDEN = 8192, 28672
#: Sequences: a batch of one is gathered by a view, which torch's pass does not know.
BATCH = 2
#: Cycles in which the host issues a call: 10 ms and more.
_PAUSE = 20_000_000

#: A context that is open while a way runs, and the way.
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
    """A module whose part is the MLP: parallel styles are of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The MLP on sharded tokens."""
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
    clock = MeetingClock(_PAUSE)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for at in range(rounds + 1):
        for name, (opened, way) in ways.items():
            with opened():
                ms, _ = clock(way)
            if at:
                times[name].append(ms)
    return slowest(times)


def mlp(rank: int, world: int, session: Session) -> None:
    import torch._inductor.config as inductor
    import torch.distributed._symmetric_memory as symmetric

    symmetric.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    inductor.force_disable_caches = True
    record, tokens, rounds = record_of(session, rank, "mlp"), session.options.tokens, session.options.rounds or 9
    shape = (BATCH, tokens // BATCH // world, DIM)
    x = torch.randn(shape, device="cuda").to(torch.bfloat16).requires_grad_()
    grad = torch.randn(shape, device="cuda").to(torch.bfloat16)
    eager = made(world)
    want = [y.clone() for y in step(eager, eager, x, grad)]
    del eager
    both: dict[str, Way] = {}
    forward: dict[str, Way] = {}
    errors: dict[str, list[float]] = {}
    sites: list[str] = []
    for name, opened in (("nccl", contextlib.nullcontext), ("torch", contextlib.nullcontext), ("ours", tsd.async_tp)):
        # The options keep the three graphs apart in the compiler's cache: torch's strides differ from ours.
        model, options = made(world), {"_micro_pipeline_tp": name != "nccl", "comment_origin": name == "ours"}
        inductor._micro_pipeline_tp = name != "nccl"
        call = torch.compile(model, options=options)
        with opened() as handle:
            found = step(model, call, x, grad)
            torch.cuda.synchronize()
            ts.check()
            sites = [str(site) for site in handle.report()] if handle is not None else sites
            with torch.no_grad():
                call(x)
        differences = (((a - b).float().norm() / b.float().norm()).item() for a, b in zip(found, want, strict=True))
        errors[name] = [float(f"{difference:.2g}") for difference in differences]
        assert max(errors[name]) < 2e-2, (name, errors[name])
        both[name] = opened, functools.partial(step, model, call, x, grad)
        forward[name] = opened, functools.partial(torch.no_grad()(call), x)
    ms = {"forward and backward": timed(both, rounds), "forward": timed(forward, rounds)}
    ts.check()
    if record is not None:
        record.add({"tokens": tokens, "ms": ms, "errors": errors, "sites": sites})
        print(ms, errors, *sites, sep="\n", flush=True)
