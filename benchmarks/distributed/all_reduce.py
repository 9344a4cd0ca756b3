"""Matmul + all-reduce of a few rows across GPUs (decode): ours, NCCL, and torch's one-shot and two-shot.

Timed and checked as `all_gather` does it. Of ours: ``ours`` as the table decides, ``nccl + ours`` and ``fused 1`` each
form whatever the table says. ``torch one shot + mm`` and ``torch two shot + mm``: torch's symmetric memory, whose
kernels spin at two barriers without a bound.

`dispatch_table` makes the op's entries from the record. ``reduce_by_hand_x2``, a form written out by hand, is the
record by which the fused form was taken on.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import tilestream as ts
from benchmarks.core.session import Session
from benchmarks.distributed.all_gather import bench, checked
from benchmarks.distributed.ranks import BF16, DEADLINE, Forms, device, operands, record_of, rows_of, small, some
from tilestream import distributed as tsd
from tilestream.distributed.dispatch import trial

ROWS = (1, 16, 64, 128, 256)


def shapes(world: int) -> list[tuple[int, int]]:
    """N and K of one rank: Llama-3-70B's w2 and wo."""
    return [(8192, 28672 // world), (8192, 8192 // world)]


def forms(rows: int, n: int, k: int, theirs: torch.Tensor) -> tuple[Forms, Forms, torch.Tensor]:
    """Each way as a call, its parts alone, and the exact answer; ``theirs`` is symmetric memory for torch's ops."""
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    a, w = operands(rows, n, k)
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
            return tsd.matmul_all_reduce(a, w, deadline=DEADLINE)
        with trial(fused, 1):
            return tsd.matmul_all_reduce(a, w, deadline=DEADLINE)

    sent = torch.empty(rows, n, device=device(), dtype=BF16)
    ways = {
        "nccl + mm": nccl, "nccl + ours": functools.partial(ours, False), "fused 1": functools.partial(ours, True),
        "ours": functools.partial(ours, None),
        "torch one shot + mm": functools.partial(by_torch, torch.ops.symm_mem.one_shot_all_reduce),
        "torch two shot + mm": functools.partial(by_torch, torch.ops.symm_mem.two_shot_all_reduce_),
    }  # fmt: skip
    alone = {"mm": lambda: torch.mm(a, w), "ours mm": lambda: ts.matmul(a, w), "nccl": lambda: dist.all_reduce(sent)}
    return ways, alone, exact


def all_reduce(rank: int, world: int, session: Session) -> None:
    import torch.distributed._symmetric_memory as symmetric

    torch.manual_seed(rank)
    record = record_of(session, rank, "all_reduce")
    most = max(ROWS) * max(n for n, _ in shapes(world))
    if session.dry:
        theirs = torch.empty(most, dtype=BF16)  # torch's own ops fail there, and are left out
    else:
        theirs = symmetric.empty(most, dtype=BF16, device=f"cuda:{rank}")
        symmetric.rendezvous(theirs, dist.group.WORLD.group_name)  # type: ignore[union-attr]

    def measure(item: tuple[int, int, int]) -> dict[str, Any]:
        rows, n, k = item[0], *(small(session, extent) for extent in item[1:])
        ways, alone, exact = forms(rows, n, k, theirs)
        right, errors, failures = checked(ways, exact)
        ms, host = bench({**right, **alone}, session.options.rounds or 25, failures)
        return {
            "op": "matmul_all_reduce", "m": rows, "rows": rows, "n": n, "k": k, "width": n, "ms": ms, "host ms": host,
            "errors": errors, "failures": failures,
        }  # fmt: skip

    items = [(rows, n, k) for (n, k), rows in itertools.product(shapes(world), ROWS)]
    rows_of(session, record, some(session, items), measure)
