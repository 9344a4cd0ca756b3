"""All-gather + matmul and matmul + reduce-scatter on the CPU, over a gloo group: what has arrived is computed with.

Gather::

    threads, one a peer:   their chunk lands in the whole; signal it; the next one
    persistent workers:    schedule, gate, load, math, epilogue; a tile begins when its rows' chunks are signalled
    raster:                from the own shard on, which is there from the beginning

Scatter::

    workers:               the part of the output that belongs to the next rank first, the own one last
    threads, one a peer:   send each part as soon as it is computed; receive theirs
    calling thread:        add the parts of all ranks in float32, in the order of the ranks: the same bits each time
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from tilestream.arrival.arrival import Arrival
from tilestream.core.errors import ArrivalTimeout, GroupBroken, TilestreamError
from tilestream.distributed.exchange import Exchange, Receive
from tilestream.distributed.gathered import Product, Whole
from tilestream.distributed.group_state import Member
from tilestream.distributed.plan import DistributedPlan
from tilestream.distributed.shards import Part, Shards


class _Gathering:
    """`Traffic`: each rank's shard goes to all others, a chunk at a time."""

    def __init__(self, rank: int, shards: Shards, whole: Whole, arrival: Arrival) -> None:
        self._rank, self._shards, self._whole, self._arrival = rank, shards, whole, arrival

    def _tensors(self, rank: int, part: Part) -> list[torch.Tensor]:
        tensors = [self._whole.data] if self._whole.scales is None else [self._whole.scales, self._whole.data]
        return [x[part.batch, rank, part.begin : part.end] for x in tensors]

    def incoming(self, peer: int) -> Sequence[Receive]:
        """See `Traffic`."""
        receives = []
        for part in self._shards.of_rank(peer):
            *before, last = self._tensors(peer, part)
            receives += [Receive(x, _nothing) for x in before]
            receives.append(Receive(last, lambda chunk=part.chunk: self._arrival.signal(chunk)))  # type: ignore[misc]
        return receives

    def outgoing(self, peer: int) -> Iterator[torch.Tensor]:
        """See `Traffic`."""
        return (x for part in self._shards.of_rank(self._rank) for x in self._tensors(self._rank, part))

    def failed(self, peer: int, error: BaseException) -> None:
        """See `Traffic`."""
        self._arrival.fail(error)


def _nothing() -> None:
    """What is done when a scale has landed: its rows come next."""


def gather_matmul(
    member: Member,
    plan: DistributedPlan,
    shards: Shards,
    shard: Whole,
    whole: Whole,
    products: Sequence[Product],
    seconds: float,
) -> list[torch.Tensor]:
    """Gather ``shard`` (``[batches, rows, width]``) into ``whole``, and compute ``products`` of it meanwhile.

    Where the plan is not fused they begin when everything is there. Hold the member's call.

    Raises
    ------
    ArrivalTimeout
        If a chunk did not come in time: the group is broken then, on all ranks.
    GroupBroken
        If a peer was lost.
    ValueError
        If a peer calls something else: the group works on.
    """
    op, end = plan.case.op, time.perf_counter() + seconds
    rank, arrival = member.rank, shards.arrival(member.rank)
    for mine, all_ in zip(shard, whole, strict=True):
        if mine is not None and all_ is not None:
            all_[:, rank].copy_(mine)
    for part in shards.of_rank(rank):
        arrival.signal(part.chunk)
    exchange = Exchange(op, member, plan.greeting, _Gathering(rank, shards, whole, arrival), seconds)
    data = whole.data.view(shards.total, shards.width)
    scales = None if whole.scales is None else whole.scales.view(shards.total, 1)

    def compute() -> list[torch.Tensor]:
        if not plan.fused:
            exchange.finish()
        return [product(data, scales, arrival, max(end - time.perf_counter(), 1e-3)) for product in products]

    try:
        return exchanging(member, exchange, compute)
    except ArrivalTimeout as error:
        if error.rank is not None:
            raise
        peer = shards.rank_of(error.chunk)
        whose = f"rank {peer}'s part of a_shard"
        raise ArrivalTimeout(
            op, error.worker, error.chunk, error.item, error.waited, seconds, rank, whose
        ) from error.__cause__


def exchanging(member: Member, exchange: Exchange, compute: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """``compute``, and the exchange that it goes with; whatever happens, no thread is left when this returns."""
    try:
        exchange.start()
        results = compute()
        exchange.finish()
    except BaseException as error:
        if isinstance(error, ValueError):  # a peer that differs: with the others all goes its way
            exchange.join()
            lost = next((e for e in exchange.errors.values() if isinstance(e, TilestreamError)), None)
            if lost is None:
                raise
            error = lost
        reason = error.reason if isinstance(error, GroupBroken) else f"{type(error).__name__}: {error}"
        member.break_(reason)
        exchange.close()
        raise
    return results


class _Scattering:
    """`Traffic`: each rank is sent the part of the output that is its own, as soon as it is computed."""

    def __init__(self, rank: int, shards: Shards, sent: torch.Tensor, received: torch.Tensor) -> None:
        self._rank, self._shards, self._sent, self._received = rank, shards, sent, received
        parts = range(shards.batches * shards.parts)
        self._ready = {(peer, i): threading.Event() for peer in range(shards.world) for i in parts}
        self._failed = False

    def incoming(self, peer: int) -> Sequence[Receive]:
        """See `Traffic`."""
        parts = self._shards.of_rank(peer)
        return [Receive(self._received[p.batch, peer, p.begin : p.end], _nothing) for p in parts]

    def outgoing(self, peer: int) -> Iterator[torch.Tensor]:
        """See `Traffic`."""
        for i, part in enumerate(self._shards.of_rank(peer)):
            self._ready[peer, i].wait()
            if self._failed:
                raise RuntimeError("this rank could not compute its part")
            yield self._sent[part.batch, peer, part.begin : part.end]

    def computed(self, peer: int, i: int) -> None:
        """Part ``i`` for ``peer`` is there."""
        self._ready[peer, i].set()

    def fail(self) -> None:
        """No more parts will be computed."""
        self._failed = True
        for event in self._ready.values():
            event.set()

    def failed(self, peer: int, error: BaseException) -> None:
        """See `Traffic`: it is raised when all others have been heard."""


def matmul_scatter(
    member: Member,
    plan: DistributedPlan,
    shards: Shards,
    product: Callable[[int, Part, torch.Tensor], None],
    dtypes: tuple[torch.dtype, torch.dtype],
    seconds: float,
) -> torch.Tensor:
    """The sum over all ranks of this rank's part of their products: ``[batches, rows, width]``.

    Parameters
    ----------
    product
        ``product(rank, part, into)`` computes a part of the output of ``rank``.
    dtypes
        What travels, and what it is added up in.

    Raises
    ------
    ArrivalTimeout, GroupBroken, ValueError
        As `gather_matmul`.
    """
    travels, wide = dtypes
    rank, world, cpu = member.rank, member.world, torch.device("cpu")
    sent = member.buffer("sent", shards.shape, travels, cpu)
    received = member.buffer("received", shards.shape, travels, cpu)
    own = member.buffer("own", (shards.batches, shards.rows, shards.width), wide, cpu)
    traffic = _Scattering(rank, shards, sent, received)
    exchange = Exchange(plan.case.op, member, plan.greeting, traffic, seconds)

    def compute() -> list[torch.Tensor]:
        try:
            for x in range(1, world + 1):
                peer = (rank + x) % world
                for i, part in enumerate(shards.of_rank(peer)):
                    into = own[part.batch] if peer == rank else sent[part.batch, peer]
                    product(peer, part, into[part.begin : part.end])
                    if plan.fused:
                        traffic.computed(peer, i)
            for peer, i in () if plan.fused else traffic._ready:
                traffic.computed(peer, i)
        except BaseException:
            traffic.fail()
            raise
        return []

    exchanging(member, exchange, compute)
    total = torch.zeros_like(own)
    for peer in range(world):  # in the order of the ranks, on each rank: the same bits each time
        total += own if peer == rank else received[:, peer]
    return total
