"""A tensor-parallel Llama block for inference: prefill and decode; eager, compiled by torch, and replayed.

Widths of Llama-3 8B and 70B, bf16: norm, q, k and v, causal attention of the call's own tokens, o, norm, gate and up,
down. *prefill*: tokens are sharded between the parts (gather + matmul, matmul + reduce-scatter). *decode*, of a few
tokens: they are on each rank (matmul + all-reduce).

Ways: ``ours``, as the table decides; ``nccl``: the same block with the group's collectives and torch.mm. Each is run
``eager``, ``compiled`` (torch.compile; ops of ours are nodes of its graph), and ``captured`` (a CUDA graph of the eager
block, in a run of its own; the device counts calls of ours). Microseconds on the GPU from
when all ranks have met (`ranks.MeetingClock`), and of one block of many, from idle to idle, host included.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import tilestream as ts
from benchmarks.core.session import Session
from benchmarks.distributed.all_gather import checked
from benchmarks.distributed.calls import Replayed, wall_us
from benchmarks.distributed.ranks import BF16, Forms, MeetingClock, device, record_of, rows_of, slowest
from tilestream import distributed as tsd

#: Model: width, hidden, heads of queries, heads of keys; a head has 128 columns.
MODELS = {"8B": (4096, 14336, 32, 8), "70B": (8192, 28672, 64, 8), "dry": (512, 512, 4, 2)}
PREFILL, DECODE = (2048, 8192), (1, 16, 64, 256)
#: Models of a run, and its tokens; of a dry one, the second.
RUNS = {False: (("8B", "70B"), PREFILL, DECODE), True: (("dry",), (32,), (2,))}
_HEAD = 128
#: Cycles that the GPU sleeps while the host issues: 5 ms and more.
_PAUSE = 10_000_000

Gather = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Weights(NamedTuple):
    """A rank's part of a block, each ``[K, N]``."""

    qkv: torch.Tensor
    o: torch.Tensor
    up: torch.Tensor  # gate and up side by side
    down: torch.Tensor

    @classmethod
    def random(cls, model: str, world: int) -> Weights:
        """Of the scale that keeps activations' size."""
        width, hidden, queries, keys = MODELS[model]
        columns = (queries + 2 * keys) * _HEAD // world
        shapes = (
            (columns, width),
            (width, queries * _HEAD // world),
            (2 * hidden // world, width),
            (width, hidden // world),
        )
        return cls(*((torch.randn(n, k, device=device()) * k**-0.5).to(BF16).t() for n, k in shapes))


def attended(qkv: torch.Tensor, queries: int, keys: int) -> torch.Tensor:
    """Causal attention of ``[tokens, columns]`` with themselves."""
    q, k, v = (x.unflatten(-1, (-1, _HEAD)).transpose(0, 1)[None] for x in qkv.split(
        [queries * _HEAD, keys * _HEAD, keys * _HEAD], -1
    ))  # fmt: skip
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


def block(model: str, world: int, w: Weights, into: Gather, out_of: Gather) -> Callable[[torch.Tensor], torch.Tensor]:
    """The block; ``into`` multiplies what it may gather first, ``out_of`` sums, or scatters, what it has multiplied."""
    width, _, queries, keys = MODELS[model]

    def run(x: torch.Tensor) -> torch.Tensor:
        qkv = into(nn.functional.rms_norm(x, (width,)), w.qkv)
        x = x + out_of(attended(qkv, queries // world, keys // world), w.o)
        gate, up = into(nn.functional.rms_norm(x, (width,)), w.up).chunk(2, -1)
        return x + out_of(nn.functional.silu(gate) * up, w.down)

    return run


def ways_of(prefill: bool) -> dict[str, tuple[Gather, Gather]]:
    """What goes into a block's parts, and out of them, by way."""
    group = dist.group.WORLD
    if not prefill:

        def reduced(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            total = torch.mm(a, b)
            dist.all_reduce(total)
            return total

        return {"ours": (ts.mm, tsd.matmul_all_reduce), "nccl": (torch.mm, reduced)}

    def gathered(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        whole = a.new_empty(a.shape[0] * dist.get_world_size(group), a.shape[1])
        dist.all_gather_into_tensor(whole, a)
        return torch.mm(whole, b)

    def scattered(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        part = a.new_empty(a.shape[0] // dist.get_world_size(group), b.shape[1])
        dist.reduce_scatter_tensor(part, torch.mm(a, b))
        return part

    return {
        "ours": (tsd.all_gather_matmul, tsd.matmul_reduce_scatter),
        "nccl": (gathered, scattered),
    }


def _measure(rank: int, world: int, session: Session, of: str, made: Callable[[Callable[[], Any]], Forms]) -> None:
    """``made``: the ways in which a block's call is run, by name."""
    record, clock, shuffle = record_of(session, rank, of), MeetingClock(_PAUSE), random.Random(0).shuffle
    models, prefills, decodes = RUNS[session.dry]
    kept: dict[str, Weights] = {}

    def measure(item: tuple[str, str, int]) -> dict[str, Any]:
        model, prefill, tokens = item[0], item[1] == "prefill", item[2]
        if model not in kept:
            kept.clear()
            torch.manual_seed(rank)
            kept[model] = Weights.random(model, world)
        torch.manual_seed(100 + rank if prefill else 100)
        x = torch.randn(tokens // world if prefill else tokens, MODELS[model][0], device=device()).to(BF16)
        blocks = {name: block(model, world, kept[model], *how) for name, how in ways_of(prefill).items()}
        with torch.no_grad():
            exact = blocks["nccl"](x).double()
            ways: Forms = {
                f"{name} {how}": call
                for name, run in blocks.items()
                for how, call in made(lambda run=run, x=x: run(x)).items()  # type: ignore[misc]
            }
            right, errors, failures = checked(ways, exact)
            samples: dict[str, dict[str, list[float]]] = {
                what: {name: [] for name in right} for what in ("gpu us", "wall us")
            }
            names = list(right)
            for _ in range(session.options.rounds or 7):
                shuffle(names)
                for name in names:
                    samples["gpu us"][name].append(clock(right[name])[0] * 1e3)
                    samples["wall us"][name].append(wall_us(right[name]))
        ts.check()
        row = {"model": model, "tokens": tokens, "prefill": prefill, "errors": errors, "failures": failures}
        return row | {what: slowest(found) for what, found in samples.items()}

    shapes = [(kind, n) for kind, of_kind in (("prefill", prefills), ("decode", decodes)) for n in of_kind]
    rows_of(session, record, [(model, *shape) for model in models for shape in shapes], measure)


def served(rank: int, world: int, session: Session) -> None:
    """Eager and compiled."""
    backend = "eager" if session.dry else "inductor"

    def made(call: Callable[[], Any]) -> Forms:
        torch._dynamo.reset()  # of the earlier blocks, which count towards the limit of recompilations
        return {"eager": call, "compiled": torch.compile(call, dynamic=False, backend=backend)}

    _measure(rank, world, session, "served", made)


def served_captured(rank: int, world: int, session: Session) -> None:
    """Replayed."""
    _measure(rank, world, session, "served_captured", lambda call: {"captured": Replayed(call)})
