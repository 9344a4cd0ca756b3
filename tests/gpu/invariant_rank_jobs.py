"""What ranks do in ``test_gpu_invariant_ranks.py``: calls whose rows are compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from distributed_jobs import finish, late_in_turn, random

import tilestream as ts
from rank_checks import raised
from tilestream import distributed as tsd
from tilestream.distributed.dispatch import trial

K, N, DEADLINE = 1024, 512, 20
#: Rows of a rank: less than a tile; ragged ones; several tiles.
ROWS = (3, 130, 640)


def differing(one: torch.Tensor, other: torch.Tensor) -> int:
    """Numbers that have other bits."""
    finish()
    return int((one.view(torch.int16) != other.view(torch.int16)).sum())


def replayed(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The result of the second of two replays; the call was made before."""
    call()
    finish()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for _ in range(2):
        out.fill_(float("nan"))
        graph.replay()
    finish()
    return out.clone()


def gathers(rank, world, counted):
    """Rows of a gather have the bits of the same rows multiplied alone, on one rank; numbers that differ, by way."""
    b, found = random(1, N, K).t(), {}
    with ts.invariant():
        for rows in ROWS:
            whole = random(10 + rows, rows * world, K)
            shard = whole[rows * rank : rows * (rank + 1)].contiguous()
            wanted = torch.cat([ts.mm(whole[i : i + 7], b) for i in range(0, len(whole), 7)])

            def call(shard=shard, form="auto"):
                return tsd.all_gather_matmul(shard, b, form=form, deadline=DEADLINE)

            ways = {f"{way} {chunks}": (chunks, way) for way in ("push", "pull") for chunks in (1, 2)}
            for name, (chunks, way) in ways.items():
                late_in_turn(rows, rank)
                with trial(True, chunks, way):
                    found[f"{rows} rows, {name}"] = differing(call(), wanted)
            found[f"{rows} rows, unfused"] = differing(call(form="unfused"), wanted)
            if counted:
                found[f"{rows} rows, captured"] = differing(replayed(lambda call=call: call(form="fused")), wanted)
    return found


def sums(rank, world, counted):
    """Rows of a sum have the same bits on each rank and wherever they lie; numbers that differ, by way."""
    b, found = random(1, N, K).t(), {}
    with ts.invariant():
        for rows in ROWS:
            a = random(100 * rows + rank, rows * world, K)
            step = max(1, rows // 3)

            def scattered(a=a):
                return tsd.matmul_reduce_scatter(a, b, form="fused", deadline=DEADLINE)

            def reduced(a=a):
                return tsd.matmul_all_reduce(a, b, form="fused", deadline=DEADLINE)

            whole, everywhere = scattered(), reduced()
            first_rank = everywhere.clone()
            dist.broadcast(first_rank, 0)
            found[f"{rows} rows, on rank 0"] = differing(everywhere, first_rank)
            for first in range(0, rows, step):
                # The same rows of each rank's part, alone.
                size = min(step, rows - first)
                some = a.view(world, rows, K)[:, first : first + size].flatten(0, 1).contiguous()
                alone = tsd.matmul_reduce_scatter(some, b, form="fused", deadline=DEADLINE)
                found[f"{rows} rows, from {first}"] = differing(alone, whole[first : first + size])
                alone = tsd.matmul_all_reduce(some[:size], b, form="fused", deadline=DEADLINE)
                found[f"{rows} rows, all-reduce from {first}"] = differing(alone, everywhere[first : first + size])
            for chunks in (1, 2):
                with trial(True, chunks):
                    again = tsd.matmul_reduce_scatter(a, b, deadline=DEADLINE)
                found[f"{rows} rows, in {chunks}"] = differing(again, whole)
            if counted:
                found[f"{rows} rows, captured"] = differing(replayed(scattered), whole)
                found[f"{rows} rows, all-reduce captured"] = differing(replayed(reduced), everywhere)
        unfused = raised(lambda: tsd.matmul_all_reduce(a, b, form="unfused", deadline=DEADLINE))
    assert "adds in an order that depends on the rows" in unfused, unfused
    return found


def free(rank, world):
    """Without the promise a split of K decides the bits: the most numbers that differ from whole or split products'."""
    b, whole = random(1, 1024, 8192).t(), random(5, 16 * world, 8192)
    shard = whole[16 * rank : 16 * (rank + 1)].contiguous()
    with trial(True, 1, "push"):
        many = tsd.all_gather_matmul(shard, b, deadline=DEADLINE)
    return max(differing(many, ts.matmul(whole, b, schedule=schedule)) for schedule in ("static", "stream_k"))
