"""All-gather + matmul and matmul + reduce-scatter on the CPU, over a gloo group, overlapped with its messages.

Gather::

    threads, one a peer:   receive its chunk into the gathered rows; signal it; repeat
    persistent workers:    schedule, gate, load, math, epilogue; a tile begins when its rows' chunks are signalled
    raster:                begins with the own shard, which has arrived from the beginning

Reduce-scatter::

    workers:               compute the next rank's part of the output first, the own part last
    threads, one a peer:   send each part as soon as it is computed; receive the peer's parts
    calling thread:        add the parts of all ranks in float32, in the order of the ranks: the same bits each time
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from tilestream.arrival.arrival import Arrival
from tilestream.core.errors import ArrivalTimeout
from tilestream.distributed.exchange import Exchange, Receive, Round
from tilestream.distributed.group_state import GroupState
from tilestream.distributed.plan import DistributedPlan
from tilestream.distributed.shards import Part, Product, ScaledRows, Shards


class _Gathering:
    """The `Traffic` of a gather: each rank sends its shard to all others, a chunk at a time."""

    def __init__(self, rank: int, shards: Shards, gathered: ScaledRows, arrival: Arrival) -> None:
        self._rank, self._shards, self._gathered, self._arrival = rank, shards, gathered, arrival

    def _tensors(self, rank: int, part: Part) -> list[torch.Tensor]:
        """The tensors of a chunk: its scales, then its rows."""
        rows = self._gathered
        tensors = [rows.data] if rows.scales is None else [rows.scales, rows.data]
        return [x[part.batch, rank, part.begin : part.end] for x in tensors]

    def rounds(self, peer: int) -> Sequence[Round]:
        """See `Traffic`."""
        receives = []
        for part in self._shards.of_rank(peer):
            *before, last = self._tensors(peer, part)
            receives += [Receive(x) for x in before]
            receives.append(Receive(last, lambda chunk=part.chunk: self._arrival.signal(chunk)))  # type: ignore[misc]
        sent = (x for part in self._shards.of_rank(self._rank) for x in self._tensors(self._rank, part))
        return [Round(receives, sent)]

    def failed(self, peer: int, error: BaseException) -> None:
        """See `Traffic`."""
        self._arrival.fail(error)


def gather_matmul(
    state: GroupState, plan: DistributedPlan, shards: Shards, shard: ScaledRows, gathered: ScaledRows,
    products: Sequence[Product], seconds: float,
) -> list[torch.Tensor]:  # fmt: skip
    """Gather ``shard`` (``[batches, rows, width]``) into ``gathered`` while ``products`` of it are computed.

    If the plan is not fused, the products begin when all rows have arrived. Hold the group's call.

    Raises
    ------
    ArrivalTimeout
        If a chunk did not come in time: the group is broken on all ranks.
    GroupBroken
        If a peer was lost.
    ValueError
        If a peer makes another call: the group stays usable.
    """
    op, rank, end = plan.case.op, state.rank, time.perf_counter() + seconds
    arrival = shards.arrival(rank)
    for mine, all_ in zip(shard, gathered, strict=True):
        if mine is not None and all_ is not None:
            all_[:, rank].copy_(mine)
    for part in shards.of_rank(rank):
        arrival.signal(part.chunk)
    exchange = Exchange(state, plan, _Gathering(rank, shards, gathered, arrival), seconds)
    data = gathered.data.view(shards.total, shards.width)
    scales = None if gathered.scales is None else gathered.scales.view(shards.total, 1)

    def compute() -> list[torch.Tensor]:
        if not plan.fused:
            exchange.finish()
        return [product(data, scales, arrival, max(end - time.perf_counter(), 1e-3)) for product in products]

    try:
        return exchange.run(compute)
    except ArrivalTimeout as error:
        if error.rank is not None:
            raise
        whose = f"rank {shards.rank_of(error.chunk)}'s part of a_shard"
        raise ArrivalTimeout(
            op, error.worker, error.chunk, error.item, error.waited, seconds, rank, whose
        ) from error.__cause__


class _Scattering:
    """The `Traffic` of a reduce-scatter: each part of the output is sent to its rank once it is computed."""

    def __init__(self, rank: int, shards: Shards, sent: torch.Tensor, received: torch.Tensor) -> None:
        self._rank, self._shards, self._sent, self._received = rank, shards, sent, received
        parts = range(shards.batches * shards.parts)
        self._ready = {(peer, i): threading.Event() for peer in range(shards.world) for i in parts}
        self._failed = False

    def rounds(self, peer: int) -> Sequence[Round]:
        """See `Traffic`."""
        parts = self._shards.of_rank(peer)
        return [Round([Receive(self._received[p.batch, peer, p.begin : p.end]) for p in parts], self._outgoing(peer))]

    def _outgoing(self, peer: int) -> Iterator[torch.Tensor]:
        for i, part in enumerate(self._shards.of_rank(peer)):
            self._ready[peer, i].wait()
            if self._failed:
                raise RuntimeError("this rank could not compute its part")
            yield self._sent[part.batch, peer, part.begin : part.end]

    def computed(self, peer: int, i: int) -> None:
        """Note that part ``i`` of ``peer`` is computed."""
        self._ready[peer, i].set()

    def all_computed(self, failed: bool = False) -> None:
        """Note that all parts are computed; or, if ``failed``, that no more will be."""
        self._failed = failed
        for event in self._ready.values():
            event.set()

    def failed(self, peer: int, error: BaseException) -> None:
        """See `Traffic`. The error is raised at the end of the exchange."""


def matmul_scatter(
    state: GroupState, plan: DistributedPlan, shards: Shards, product: Callable[[int, Part, torch.Tensor], None],
    dtypes: tuple[torch.dtype, torch.dtype], seconds: float,
) -> torch.Tensor:  # fmt: skip
    """The sum over all ranks of this rank's part of their products: ``[batches, rows, width]``.

    Parameters
    ----------
    product
        ``product(rank, part, into)`` computes a part of the output of ``rank``.
    dtypes
        The dtypes of the parts that travel, and of the sum.

    Raises
    ------
    ArrivalTimeout, GroupBroken, ValueError
        See `gather_matmul`.
    """
    travels, wide = dtypes
    rank, world, cpu = state.rank, state.world, torch.device("cpu")
    sent = state.buffer("sent", shards.shape, travels, cpu)
    received = state.buffer("received", shards.shape, travels, cpu)
    own = state.buffer("own", (shards.batches, shards.rows, shards.width), wide, cpu)
    traffic = _Scattering(rank, shards, sent, received)

    def compute() -> None:
        try:
            for x in range(1, world + 1):
                peer = (rank + x) % world
                for i, part in enumerate(shards.of_rank(peer)):
                    into = own[part.batch] if peer == rank else sent[part.batch, peer]
                    product(peer, part, into[part.begin : part.end])
                    if plan.fused:
                        traffic.computed(peer, i)
            traffic.all_computed()
        except BaseException:
            traffic.all_computed(failed=True)
            raise

    Exchange(state, plan, traffic, seconds).run(compute)
    total = torch.zeros_like(own)
    for peer in range(world):  # in the order of the ranks, for the same bits each time
        total += own if peer == rank else received[:, peer]
    return total
