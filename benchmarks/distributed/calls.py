"""What a call across GPUs costs its host, and what a program sees of it: calls one after another, the host included.

A row is a shape; of each way, microseconds, the median over rounds and of that the largest over ranks:

- ``host us``: to issue a call while the GPU is busy with something else, the second of two. Ours waits for the last but
  one call's kernel, so that no more than two are issued ahead.
- ``wall us``: a call of many, one behind the other, from idle to idle.
- ``gpu us``: on the GPU, from when all ranks have met, the host far ahead: see `ranks.MeetingClock`.

Ways: ``ours`` as the table decides, without a deadline, ``ours invariant`` (with one, under `tilestream.invariant`),
``ours unfused``, ``nccl + mm`` (by hand: a collective and torch.mm), and ``torch fused`` (symmetric memory). They take
turns, in another order each round. Each answer is checked first.

`captured` measures replays of a CUDA graph of one call in each way; the device counts ours.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import tilestream as ts
from benchmarks.core.session import Session
from benchmarks.core.timing import repeat
from benchmarks.distributed.all_gather import checked
from benchmarks.distributed.ranks import (
    BF16,
    DEADLINE,
    Forms,
    MeetingClock,
    device,
    operands,
    pause,
    record_of,
    rows_of,
    slowest,
    small,
    synchronize,
)
from benchmarks.invariance.cost import promised
from tilestream import distributed as tsd

#: Op, rows of all ranks, N and K of one rank; those that are measured first count most.
ROWS = [
    ("gather", 3072, 5120, 8192), ("sum", 3072, 8192, 5120), ("gather", 1536, 5120, 8192),
    ("all_reduce", 16, 8192, 4096), ("gather", 12288, 5120, 8192), ("gather", 6144, 5120, 8192),
    ("sum", 12288, 8192, 5120), ("gather", 256, 5120, 8192), ("sum", 1536, 8192, 5120), ("all_reduce", 128, 8192, 4096),
    ("sum", 256, 8192, 5120), ("sum", 1024, 8192, 5120), ("all_reduce", 1, 8192, 4096), ("gather", 1024, 5120, 8192),
]  # fmt: skip
#: Those whose replays are measured: small ones, too.
CAPTURED = [
    ("gather", 3072, 5120, 8192), ("sum", 3072, 8192, 5120), ("all_reduce", 16, 8192, 4096),
    ("gather", 12288, 5120, 8192), ("sum", 12288, 8192, 5120), ("all_reduce", 128, 8192, 4096),
    ("gather", 256, 5120, 8192), ("gather", 1024, 5120, 8192), ("sum", 256, 8192, 5120), ("sum", 1024, 8192, 5120),
    ("all_reduce", 1, 8192, 4096), ("gather", 6144, 5120, 8192), ("sum", 6144, 8192, 5120),
]  # fmt: skip
#: Cycles that the GPU sleeps while the host issues: 3 ms and more.
_PAUSE = 6_000_000
#: Calls one behind the other.
_MANY = 30


def gathers(m: int, n: int, k: int, world: int) -> tuple[Forms, torch.Tensor]:
    """The ways of a gather, and the exact answer."""
    a, w = operands(m // world, n, k)
    full, name = torch.empty(m, k, device=device(), dtype=BF16), dist.group.WORLD.group_name  # type: ignore[union-attr]
    dist.all_gather_into_tensor(full, a)
    exact = full.double() @ w.double()

    def nccl() -> torch.Tensor:
        dist.all_gather_into_tensor(full, a)
        return torch.mm(full, w)

    return {
        "ours": lambda: tsd.all_gather_matmul(a, w),
        "ours invariant": promised(lambda: tsd.all_gather_matmul(a, w, deadline=DEADLINE)),
        "ours unfused": lambda: tsd.all_gather_matmul(a, w, form="unfused", deadline=DEADLINE),
        "nccl + mm": nccl,
        "torch fused": lambda: torch.ops.symm_mem.fused_all_gather_matmul(a, [w], 0, name)[1][0],
    }, exact


def sums(m: int, n: int, k: int, world: int) -> tuple[Forms, torch.Tensor]:
    """The ways of a reduce-scatter, and the exact answer."""
    a, w = operands(m, n, k)
    part, name = torch.empty(m // world, n, device=device(), dtype=BF16), dist.group.WORLD.group_name  # type: ignore[union-attr]
    exact = a.double() @ w.double()
    dist.all_reduce(exact)

    def nccl() -> torch.Tensor:
        dist.reduce_scatter_tensor(part, torch.mm(a, w))
        return part

    return {
        "ours": lambda: tsd.matmul_reduce_scatter(a, w),
        "ours invariant": promised(lambda: tsd.matmul_reduce_scatter(a, w, deadline=DEADLINE)),
        "ours unfused": lambda: tsd.matmul_reduce_scatter(a, w, form="unfused", deadline=DEADLINE),
        "nccl + mm": nccl,
        "torch fused": lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(a, w, "sum", 0, name),
    }, exact.chunk(world)[dist.get_rank()].clone()


def all_reduces(m: int, n: int, k: int, world: int) -> tuple[Forms, torch.Tensor]:
    """The ways of an all-reduce, and the exact answer."""
    a, w = operands(m, n, k)
    exact = a.double() @ w.double()
    dist.all_reduce(exact)

    def nccl() -> torch.Tensor:
        product = torch.mm(a, w)
        dist.all_reduce(product)
        return product

    # On the CPU no all-reduce is fused, and the promise refuses others.
    invariant = promised(lambda: tsd.matmul_all_reduce(a, w, deadline=DEADLINE))
    return {
        "ours": lambda: tsd.matmul_all_reduce(a, w),
        **({"ours invariant": invariant} if a.is_cuda else {}),
        "ours unfused": lambda: tsd.matmul_all_reduce(a, w, form="unfused", deadline=DEADLINE),
        "nccl + mm": nccl,
    }, exact


WAYS: dict[str, Callable[[int, int, int, int], tuple[Forms, torch.Tensor]]] = {
    "gather": gathers, "sum": sums, "all_reduce": all_reduces,
}  # fmt: skip


def idle() -> None:
    """Wait until all ranks are here, and their GPUs have nothing to do."""
    synchronize()
    dist.barrier()
    synchronize()


def host_us(call: Callable[[], Any]) -> float:
    """To issue the second of two calls."""
    idle()
    pause(_PAUSE)
    call()
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def wall_us(call: Callable[[], Any]) -> float:
    """Of one of many calls, from idle to idle."""
    idle()
    begin, many = time.perf_counter(), _MANY if torch.cuda.is_available() else 2
    repeat(call, many, synchronize)
    return (time.perf_counter() - begin) * 1e6 / many


class Replayed:
    """A call that is captured when it is first made, behind three eager ones, and replayed from then on.

    Without a GPU it is made again.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._graph = torch.cuda.CUDAGraph() if torch.cuda.is_available() else None
        self._out: Any = None

    def __call__(self) -> Any:
        """Replay it; its result, in the graph's memory."""
        if self._graph is None:
            return self._call()
        if self._out is None:
            for _ in range(3):
                self._call()
            idle()
            with torch.cuda.graph(self._graph):
                self._out = self._call()
        self._graph.replay()
        return self._out


def calls(rank: int, world: int, session: Session) -> None:
    """Eager calls."""
    _measure(rank, world, session, "calls", ROWS, lambda call: call)


def captured(rank: int, world: int, session: Session) -> None:
    """Replays."""
    _measure(rank, world, session, "captured", CAPTURED, Replayed)


def _measure(
    rank: int, world: int, session: Session, of: str, rows: list[tuple[str, int, int, int]],
    made: Callable[[Callable[[], Any]], Callable[[], Any]],
) -> None:  # fmt: skip
    import torch.distributed._symmetric_memory  # torch's fused ops are there from here on

    record, clock, shuffle = record_of(session, rank, of), MeetingClock(_PAUSE), random.Random(0).shuffle

    def measure_row(item: tuple[str, int, int, int]) -> dict[str, Any]:
        op, (m, n, k) = item[0], (small(session, extent) for extent in item[1:])
        torch.manual_seed(rank)
        plain, exact = WAYS[op](m, n, k, world)
        # Of replays the promise costs what it costs an eager call's GPU time.
        ways = {way: made(call) for way, call in plain.items() if of == "calls" or way != "ours invariant"}
        right, errors, failures = checked(ways, exact)
        del exact
        measures: dict[str, Callable[[Callable[[], Any]], float]] = {
            "host us": host_us, "wall us": wall_us, "gpu us": lambda call: clock(call)[0] * 1e3,
        }  # fmt: skip
        samples: dict[str, dict[str, list[float]]] = {what: {name: [] for name in right} for what in measures}
        names = list(right)
        for name in names:  # all slots, and the recipes of the native call path
            for _ in range(8):
                right[name]()
        for _ in range(session.options.rounds or 9):
            shuffle(names)
            for name in names:
                for what, measure in measures.items():
                    samples[what][name].append(measure(right[name]))
        ts.check()
        row = {"op": op, "m": m, "n": n, "k": k, "failures": failures, "errors": errors}
        row |= {what: slowest(found) for what, found in samples.items()}
        return row | {"host us, least": {name: round(min(found), 1) for name, found in samples["host us"].items()}}

    rows_of(session, record, rows if not session.dry else list({row[0]: row for row in rows}.values()), measure_row)
