"""Copies between GPUs beside a matmul on each: how fast they are, and what the matmul loses.

Each GPU copies to, or from, its peers over torch's symmetric memory, by copy engines, in the order of
`tilestream.core.protocols.gather`. What is compared:

- ``op``: a GPU *pushes* to its peers, or *pulls* from them. The other end is always symmetric memory.
- ``own``: whether this end is, too, or a tensor of torch's allocator (``plain``): a caller's.
- ``load``: what each GPU computes meanwhile: nothing, torch's matmul, ours, or ours of an ``a`` in symmetric memory,
  which is what the kernel of a pushed gather reads.
- ``lanes``: all in one stream, one peer after the other; or a stream a peer.

All GPUs meet on their streams, then begin both. Rates are of the bytes that one GPU pushes, or pulls: medians over
rounds, and of those the slowest rank's, as is the time of the matmul (``mm``, ms).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

import tilestream as ts
from benchmarks.core.session import Session
from benchmarks.distributed.ranks import record_of
from tilestream.core.protocols.gather import receivers
from tilestream.runtime.driver import copy_across
from tilestream.runtime.streams import lend

#: Bytes that a GPU copies in all: about as long as a matmul of `SIDE` on an H100.
TOTAL = 192 << 20
SIDE = 8192
ROUNDS = 7
_PAUSE = 6_000_000


class Copies:
    """A rank's ends, its peers', and its streams."""

    def __init__(self, rank: int, world: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.rank, self.world = rank, world
        self.peers = receivers(rank, world)
        shared = symmetric.empty(2 * SIDE * SIDE + 2 * TOTAL, dtype=torch.uint8, device="cuda")
        handle = symmetric.rendezvous(shared, dist.group.WORLD.group_name)
        far = [handle.get_buffer(peer, (shared.numel(),), torch.uint8) for peer in range(world)]
        # Behind a matmul's operand: the copies' source, and their destination.
        begins = [2 * SIDE * SIDE, 2 * SIDE * SIDE + TOTAL]
        plain = torch.empty(2 * TOTAL, dtype=torch.uint8, device="cuda")
        self.own = {
            "symmetric": [shared[at:].data_ptr() for at in begins],
            "plain": [plain[at:].data_ptr() for at in (0, TOTAL)],
        }
        self.far = [[x[at:].data_ptr() for at in begins] for x in far]
        self.lanes = [lend(torch.device("cuda", rank)) for _ in range(max(1, world - 1))]
        self.meet = torch.zeros(1, device="cuda")
        a, b = (torch.randn(SIDE, SIDE, device="cuda").to(torch.bfloat16) for _ in range(2))
        slot = shared[: 2 * SIDE * SIDE].view(torch.bfloat16).view(SIDE, SIDE).copy_(a)
        self.loads: dict[str, Callable[[], object]] = {
            "nothing": lambda: None,
            "torch": lambda: torch.mm(a, b.t()),
            "ours": lambda: ts.matmul(a, b.t()),
            "ours, symmetric": lambda: ts.matmul(slot, b.t()),
        }
        self._keep = plain, shared, handle, far

    def issue(self, op: str, own: str, size: int, lanes: int) -> int:
        """Issue all copies; returns their bytes."""
        of_each = TOTAL // len(self.peers) // size
        for i, peer in enumerate(self.peers):
            handle = self.lanes[i % lanes].cuda_stream
            for chunk in range(of_each):
                at = (i * of_each + chunk) * size
                source, to = self.own[own][0], self.far[peer][1]
                if op == "pull":
                    source, to = self.far[peer][0], self.own[own][1]
                copy_across(handle, to + at, source + at, size)
        return len(self.peers) * of_each * size

    def time(self, op: str, own: str, load: str, size: int, lanes: int) -> tuple[float, float]:
        """GB/s of the copies, and ms of the load beside them. ``op`` "": no copies."""
        torch.cuda.synchronize()
        dist.all_reduce(self.meet)
        torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2 + lanes)]
        torch.cuda._sleep(_PAUSE)
        dist.all_reduce(self.meet)
        events[0].record()
        moved, copied = 0, self.lanes[:lanes]
        for lane in copied:
            lane.wait_event(events[0])
        if op:
            moved = self.issue(op, own, size, lanes)
        for lane, end in zip(copied, events[2:], strict=True):
            end.record(lane)
        self.loads[load]()
        events[1].record()
        torch.cuda.synchronize()
        spent = max(events[0].elapsed_time(end) for end in events[2:])
        return moved / spent * 1e-6, events[0].elapsed_time(events[1])


def slowest(samples: list[tuple[float, float]]) -> tuple[float, float]:
    """The slowest rank's medians: the least rate, the longest time."""
    rates, times = zip(*samples, strict=True)
    worst = torch.tensor([-statistics.median(rates), statistics.median(times)]).cuda()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    rate, time = worst.tolist()
    return round(-rate, 1), round(time, 4)


def copies(rank: int, world: int, session: Session) -> None:
    record, of = record_of(session, rank, "copies"), Copies(rank, world)
    ways = [("", "plain", 64 << 20, 1)]
    ways += itertools.product(("pull", "push"), ("plain", "symmetric"), (64 << 20, 8 << 20), sorted({1, world - 1}))
    cases = list(itertools.product(of.loads, ways))
    samples: dict[int, list[tuple[float, float]]] = {i: [] for i in range(len(cases))}
    for i, (load, (op, own, size, lanes)) in [*enumerate(cases)] * (1 + ROUNDS):
        samples[i].append(of.time(op, own, load, size, lanes))
    for i, (load, (op, own, size, lanes)) in enumerate(cases):
        rate, ms = slowest(samples[i][1:])
        row = {"op": op or "none", "own": own, "load": load, "mib": size >> 20, "lanes": lanes, "gbps": rate, "mm": ms}
        if record is not None:
            record.add(row)
            print(row, flush=True)
