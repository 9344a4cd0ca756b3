"""All-gather + matmul and matmul + reduce-scatter across GPUs, beside NCCL + torch.mm and torch's own fused ops.

bf16, B as a Linear has it (``[N, K]``, transposed). What is timed is the stream, by events, handshakes included. Before
each call, not in its time: L2 is flushed, and the GPUs meet on their streams (a small all-reduce behind a pause in
which the host issues the call, so that the host's time is not in the figure either). Functions take turns, in another
order each round; of each the median over rounds, and of that the largest over ranks. Each answer is checked against
float64 first. A form that fails is left out and named. ``host ms`` is what issuing a call costs the host.

Of ours: ``ours`` as the table or the model decides; of gathers ``fused push 1 2 4`` and ``fused pull 1 2 4``, in so
many chunks a shard, whatever the table says; of sums ``fused 1 2 4``. Alone: the matmul (torch's, ours, and ours in as
many chunks: behind a gate that is open, or published), NCCL's transfer, our copies (a call with few columns; of a sum
with a short K) and our handshake (a call with few bytes), of a gather pushed and pulled. ``floor`` is max(the faster
matmul alone, the fastest transfer alone + one tile) + the shortest handshake: no overlap goes below it. ``win`` is
(best - ours) / (best - floor), best being the best of the others; there is none where the floor lies above the best or
above ours (`floors`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import tilestream as ts
from benchmarks.core.session import Session
from benchmarks.distributed.floors import judged
from benchmarks.distributed.ranks import (
    BF16,
    DEADLINE,
    Forms,
    MeetingClock,
    device,
    operands,
    record_of,
    rows_of,
    slowest,
    small,
    some,
    synchronize,
)
from tilestream import distributed as tsd
from tilestream.core.protocols.gather import Way
from tilestream.distributed.dispatch import WAYS, trial
from tilestream.distributed.plan import DistributedPlan
from tilestream.distributed.shards import Shards
from tilestream.ops.publish import Publication, matmul_published

#: Chunks of a shard that are tried.
CHUNKS = (1, 2, 4)
#: Cycles in which the host issues a call: 3 ms and more.
_PAUSE = 6_000_000


def gathers(world: int) -> list[tuple[int, int, int]]:
    """M, N of one rank, K."""
    return [
        (8192, 3584, 8192), (8192, 14336 // world, 4096), (4096, 12288, 4096), (4096, 3584, 8192), (2048, 3584, 8192),
        (8192, 1024, 8192), (1024, 3584, 8192), (256, 3584, 8192), (16384, 7168, 8192),
    ]  # fmt: skip


def scatters(world: int) -> list[tuple[int, int, int]]:
    """M, N, K of one rank."""
    return [
        (8192, 8192, 3584), (8192, 4096, 14336 // world), (4096, 4096, 12288), (4096, 8192, 3584), (2048, 8192, 3584),
        (256, 8192, 3584), (16384, 8192, 7168),
    ]  # fmt: skip


def everywhere(said: str) -> str:
    """The first rank's message, on all ranks, so that they leave a form out together."""
    heard: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(heard, said)
    return next((f"rank {rank}: {x}" for rank, x in enumerate(heard) if x), "")


def attempt(function: Callable[[], Any]) -> str:
    """What went wrong on this rank, or nothing."""
    try:
        function()
        synchronize()
        ts.check()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def wrong(function: Callable[[], torch.Tensor], exact: torch.Tensor, errors: dict[str, float], name: str) -> str:
    """What is wrong with a form's answer; its relative error goes to ``errors``."""

    def check() -> None:
        difference = function().double() - exact
        errors[name] = float(f"{(difference.norm() / exact.norm()).item():.3g}")
        if not errors[name] < 1e-2:
            raise AssertionError(f"wrong answer: relative error {errors[name]}")

    return everywhere(attempt(check))


def checked(forms: Forms, exact: torch.Tensor) -> tuple[Forms, dict[str, float], dict[str, str]]:
    """Those whose answers are right, the relative errors, and what is wrong with the others."""
    errors: dict[str, float] = {}
    failures = {name: failed for name, form in forms.items() if (failed := wrong(form, exact, errors, name))}
    return {name: form for name, form in forms.items() if name not in failures}, errors, failures


def bench(functions: Forms, rounds: int, failures: dict[str, str]) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds: the largest over ranks of each function's median; and of what issuing it costs the host."""
    clock = MeetingClock(_PAUSE)

    def warm(function: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: [function() for _ in range(3)]

    for name, function in list(functions.items()):
        if failed := everywhere(attempt(warm(function))):
            failures[name] = failed
            del functions[name]
    times: dict[str, list[float]] = {name: [] for name in functions}
    hosts: dict[str, list[float]] = {name: [] for name in functions}
    shuffle, names = random.Random(0).shuffle, list(functions)  # on each rank the same
    for _ in range(rounds):
        shuffle(names)
        for name in names:
            ms, host = clock(functions[name])
            times[name].append(ms)
            hosts[name].append(host)
    ts.check()
    return slowest(times), slowest(hosts)


def on_trial(
    fused: bool, chunks: int, function: Callable[[], torch.Tensor], way: Way | None = None
) -> Callable[[], torch.Tensor]:
    """``function`` with this decision instead of the table's."""

    def call() -> torch.Tensor:
        with trial(fused, chunks, way):
            return function()

    return call


def chunk_counts(rows: int) -> list[int]:
    """Numbers of chunks to try; each chunk has a whole tile of rows at least."""
    return [c for c in CHUNKS if c == 1 or (rows // c >= 128 and rows % c == 0)]


def gated(full: torch.Tensor, w: torch.Tensor, shards: Shards, rank: int) -> Callable[[], torch.Tensor]:
    """Our matmul of rows that have all arrived, in chunk-major order behind a gate."""
    arrival = shards.arrival(rank, device=str(full.device))

    def call() -> torch.Tensor:
        arrival.advance()
        for chunk in range(arrival.num_chunks):
            arrival.signal(chunk)
        return ts.matmul(full, w, arrival=arrival)

    return call


def gather_row(m: int, n: int, k: int, world: int, rank: int, rounds: int) -> dict[str, Any]:
    import torch.distributed._symmetric_memory as symmetric

    torch.manual_seed(rank)
    a, w = operands(m // world, n, k)
    full = torch.empty(m, k, device=device(), dtype=BF16)
    name = dist.group.WORLD.group_name
    dist.all_gather_into_tensor(full, a)
    exact = full.double() @ w.double()
    narrow, little = w[:, :8].contiguous(), a[:1, :64].contiguous()

    def nccl(mm: Callable[..., torch.Tensor]) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            dist.all_gather_into_tensor(full, a)
            return mm(full, w)

        return call

    def ours(form: str = "auto") -> torch.Tensor:
        return tsd.all_gather_matmul(a, w, form=form, deadline=DEADLINE)

    counts = chunk_counts(m // world)
    forms: Forms = {
        "nccl + mm": nccl(torch.mm),
        "nccl + ours": nccl(ts.matmul),
        "torch fused": lambda: torch.ops.symm_mem.fused_all_gather_matmul(a, [w], 0, name)[1][0],
        "torch native": lambda: symmetric._fused_all_gather_matmul_native(a, w, name)[1],
        "ours": ours,
        **{f"fused {way} {c}": on_trial(True, c, ours, way) for way in WAYS for c in counts},
    }
    alone: Forms = {
        "mm": lambda: torch.mm(full, w),
        "ours mm": lambda: ts.matmul(full, w),
        **{f"gated {c}": gated(full, w, Shards.of(a.shape, 0, world, c), rank) for c in counts},
        "nccl": lambda: dist.all_gather_into_tensor(full, a),
    }
    for way in WAYS:
        alone[f"copies {way}"] = on_trial(True, 1, lambda: tsd.all_gather_matmul(a, narrow, deadline=DEADLINE), way)
        alone[f"handshake {way}"] = on_trial(
            True, 1, lambda: tsd.all_gather_matmul(little, narrow[:64], deadline=DEADLINE), way
        )
    plan = tsd.plan_all_gather_matmul(a, w)
    shape = {"op": "all_gather_matmul", "m": m, "n": n, "k": k, "rows": m // world, "width": k}
    return measured(shape, forms, alone, exact, plan, rounds)


def publishing(a: torch.Tensor, w: torch.Tensor, out: torch.Tensor, rank: int, rows: int) -> Callable[[], Any]:
    """Our matmul that publishes chunks of so many rows, the next rank's first."""
    chunks, epochs = out.shape[0] // rows, itertools.count(1)
    publication = Publication(chunks, a.device)
    pivot = (rank + 1) * (chunks // dist.get_world_size()) % chunks
    return lambda: matmul_published(a, w, out, publication, next(epochs), rows, pivot)


def scatter_row(m: int, n: int, k: int, world: int, rank: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    a, w = operands(m, n, k)
    part = torch.empty(m // world, n, device=device(), dtype=BF16)
    whole = torch.empty(m, n, device=device(), dtype=BF16)
    name = dist.group.WORLD.group_name
    exact = a.double() @ w.double()
    dist.all_reduce(exact)
    exact = exact.chunk(world)[rank].clone()
    # The first sends all that a call sends, the second a tile a rank; both multiply next to nothing.
    short = a[:, :64].contiguous(), w[:64].contiguous()
    little = short[0][: min(m, 128 * world)], short[1][:, :64].contiguous()

    def nccl(mm: Callable[..., torch.Tensor]) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            mm(a, w, out=whole)
            dist.reduce_scatter_tensor(part, whole)
            return part

        return call

    counts = chunk_counts(m // world)

    def ours(form: str = "auto") -> torch.Tensor:
        return tsd.matmul_reduce_scatter(a, w, form=form, deadline=DEADLINE)

    forms: Forms = {
        "nccl + mm": nccl(torch.mm),
        "nccl + ours": nccl(ts.matmul),
        "torch fused": lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(a, w, "sum", 0, name),
        "ours": ours,
        **{f"fused {c}": on_trial(True, c, ours) for c in counts},
    }
    alone: Forms = {
        "mm": lambda: torch.mm(a, w, out=whole),
        "ours mm": lambda: ts.matmul(a, w),
        **{f"published {c}": publishing(a, w, whole, rank, m // world // c) for c in counts if a.is_cuda},
        "nccl": lambda: dist.reduce_scatter_tensor(part, whole),
        "copies": on_trial(True, 1, lambda: tsd.matmul_reduce_scatter(*short, deadline=DEADLINE)),
        "handshake": on_trial(True, 1, lambda: tsd.matmul_reduce_scatter(*little, deadline=DEADLINE)),
    }
    plan = tsd.plan_matmul_reduce_scatter(a, w)
    shape = {"op": "matmul_reduce_scatter", "m": m, "n": n, "k": k, "rows": m // world, "width": n}
    return measured(shape, forms, alone, exact, plan, rounds)


def measured(
    shape: dict[str, Any], forms: Forms, alone: Forms, exact: torch.Tensor, plan: DistributedPlan, rounds: int
) -> dict[str, Any]:
    """A row: times, the floor, and the share of the way to it that was won."""
    right, errors, failures = checked(forms, exact)
    ms, host = bench({**alone, **right}, rounds, failures)
    row = {
        **shape, "decided": "fused" if plan.fused else "unfused", "chunks": plan.chunks, "way": plan.decision.way,
        "why": plan.decision.why, "ms": ms, "host ms": host, "errors": errors, "failures": failures,
    }  # fmt: skip
    if found := judged(row):
        row |= {"floor": round(found.floor, 4), "best": found.best, "ratio": round(found.ratio, 4)}
        row |= {"win": round(found.win, 4)} if found.win is not None else {}
    return row


def gather(rank: int, world: int, session: Session) -> None:
    import torch.distributed._symmetric_memory  # noqa: F401  # torch's fused ops are there from here on

    op, record = session.options.op, record_of(session, rank, "all_gather")
    work = [("gather", gather_row, shape) for shape in gathers(world) if op != "scatter"]
    work += [("scatter", scatter_row, shape) for shape in scatters(world) if op != "gather"]
    made = {(name, *shape): make_row for name, make_row, shape in some(session, work)}

    def measure(item: tuple[str, int, int, int]) -> dict[str, Any]:
        m, n, k = (small(session, extent) for extent in item[1:])
        return made[item](m, n, k, world, rank, session.options.rounds or 15)

    rows_of(session, record, made, measure)
