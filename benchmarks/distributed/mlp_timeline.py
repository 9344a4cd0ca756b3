"""The timeline of a tensor-parallel MLP block: computation and copies of both halves, on one time axis.

Llama-3 70B's block (8192 columns, 28672 of them hidden), bf16, forward: tokens are gathered into w1 and w3, silu(.) *
., and w2's product is summed and scattered. What each GPU did is what torch's profiler saw: kernels and copies, by
stream, in nanoseconds of the host's clock, which all ranks share. The ranks meet on their streams before, behind a
pause in which the hosts issue the block. `CALLS` blocks are profiled, and the one that took the median time on rank 0
is kept, of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import tilestream as ts
from benchmarks.core.session import Session
from benchmarks.distributed.mlp import DIM, HIDDEN
from benchmarks.distributed.ranks import DEADLINE, Activity, on_each_gpu, profiled, record_of
from tilestream import distributed as tsd

CALLS = 5
#: Cycles in which the host issues a block: 10 ms and more.
_PAUSE = 20_000_000
#: Copies of less than this are no rows: descriptors, tables.
_ROWS_BYTES = 1 << 20


def lanes(found: Sequence[Activity], rank: int) -> dict[str, list[Activity]]:
    """What a GPU did, by what it was for, in order.

    Parameters
    ----------
    found
        Of one block, behind NCCL's kernel by which the ranks have met: two gated matmuls, what is between, a matmul
        that publishes, a sum; copies that gather on one side stream, and copies of partial sums on another.

    Raises
    ------
    RuntimeError
        If it is not that: what is missing, and what was seen.
    """
    met = max((one.end for one in found if "nccl" in one.name.lower()), default=0.0)
    found = [one for one in found if one.begin >= met]
    kernels = [one for one in found if not one.size]
    matmuls = [one for one in kernels if "gemm" in one.name]
    copies = [one for one in found if one.size >= _ROWS_BYTES]
    if len(matmuls) != 3 or not copies:
        names = sorted({one.name[:60] for one in kernels})
        raise RuntimeError(
            f"rank {rank}: {len(matmuls)} matmuls and {len(copies)} copies of rows; a block has 3, and some. Kernels: "
            f"{names}"
        )
    calling, last = matmuls[0].stream, matmuls[2]
    beside = [one for one in copies if one.stream != calling]
    return {
        "gather: w1, w3": matmuls[:2],
        "w2, and publish": matmuls[2:],
        "silu, sum": [one for one in kernels if one not in matmuls and one.stream == calling],
        "own rows": [one for one in copies if one.stream == calling],
        "rows of others": [one for one in beside if one.begin < last.begin],
        "sums of others": [one for one in beside if one.begin >= last.begin],
    }


def mlp_timeline(session: Session) -> None:
    """The block, into ``mlp_timeline_x<world>``."""
    on_each_gpu(session, rank_main, seconds=120)


def rank_main(rank: int, world: int, session: Session) -> None:
    """One rank."""
    tokens = session.options.tokens
    torch.manual_seed(rank)
    x = torch.randn(tokens // world, DIM, device="cuda").to(torch.bfloat16)
    w1, w3 = (torch.randn(HIDDEN // world, DIM, device="cuda").to(torch.bfloat16).t() / DIM**0.5 for _ in range(2))
    w2 = torch.randn(DIM, HIDDEN // world, device="cuda").to(torch.bfloat16).t() / HIDDEN**0.5

    def block() -> torch.Tensor:
        gate, up = tsd.all_gather_matmul(x, [w1, w3], form="fused", deadline=DEADLINE)
        hidden = torch.nn.functional.silu(gate) * up
        return tsd.matmul_reduce_scatter(hidden, w2, form="fused", deadline=DEADLINE)

    record = record_of(session, rank, "mlp_timeline")
    meet = torch.zeros(1, device="cuda")

    def together() -> torch.Tensor:
        torch.cuda._sleep(_PAUSE)
        dist.all_reduce(meet)
        return block()

    right = together()
    profiled(together)  # compiled, and the profiler begun
    calls = []
    for i in range(CALLS):
        out, found = profiled(together)
        assert torch.equal(out, right), "a profile changed the answer"
        calls.append(lanes(found, rank))
        print(f"rank {rank}: block {i + 1} of {CALLS}, {len(found)} activities", flush=True)
    lengths = torch.tensor([_end(call) - _begin(call) for call in calls], dtype=torch.float64)
    kept = torch.tensor(int(lengths.argsort()[CALLS // 2]), device="cuda")
    dist.broadcast(kept, 0)
    everybody: list[Any] = [None] * world
    dist.all_gather_object(everybody, calls[int(kept.item())])
    ts.check()
    if record is not None:
        zero = min(map(_begin, everybody))
        for other, call in enumerate(everybody):
            for lane, of in call.items():
                spans = [_microseconds(one, zero) for one in of]
                record.rows.append({"rank": other, "lane": lane, "spans": spans})
        record.data["tokens"], record.data["ms"] = tokens, round((max(map(_end, everybody)) - zero) / 1e6, 4)
        record.write()
        print(record.path, record.data["ms"], "ms", flush=True)


def _begin(call: dict[str, list[Activity]]) -> float:
    return min(one.begin for of in call.values() for one in of)


def _end(call: dict[str, list[Activity]]) -> float:
    return max(one.end for of in call.values() for one in of)


def _microseconds(one: Activity, zero: float) -> list[float]:
    return [round((when - zero) / 1e3, 2) for when in (one.begin, one.end)]
