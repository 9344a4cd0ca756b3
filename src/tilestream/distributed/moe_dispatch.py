"""Rows to the ranks of their experts, and what becomes of them back the same way.

A rank sends rows sorted by expert, so those for one rank lie side by side. What comes back lies as what was sent.

*gloo*, with all peers at once (`tilestream.distributed.exchange`), each in its own thread::

    a peer's thread:  round 1: how many rows for each expert, both ways         known only now
                      round 2: the rows, both ways; theirs are there: signal
                      round 3: send what became of theirs, as soon as that is computed; receive what became of mine
    calling thread:   this rank's own rows; then each source's as they come: its rows through all experts

Each source's rows are a product of their own, so bits depend on no order of arrival.

*Any other backend*: an all-to-all of the counts, one of the rows, all rows through the experts, an all-to-all back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import torch

from tilestream.arrival.signals import Outcome, Signals
from tilestream.core.errors import ArrivalTimeout
from tilestream.distributed.collective import agree, all_to_all
from tilestream.distributed.exchange import Exchange, Receive, Round
from tilestream.distributed.group_state import GroupState
from tilestream.distributed.moe_experts import by_expert
from tilestream.distributed.plan import Call

#: Rows of several tensors, row by row of the same token and expert.
Rows = tuple[torch.Tensor, ...]
#: ``compute(source, rows, counts)``: what becomes of rows sorted by expert, of which each has so many; of all sources
#: together, ``source`` is 0.
Compute = Callable[[int, Rows, torch.Tensor], Rows]


class _Dispatch:
    """`Traffic`: counts, rows, results.

    Parameters
    ----------
    counts
        int64 ``[world, E]``: the rows that this rank sends, by rank and its experts.
    sent, back
        Rows that are sent, and the memory of what comes back.
    """

    def __init__(self, state: GroupState, counts: torch.Tensor, sent: Rows, back: Rows) -> None:
        self._counts, self._sent, self._back = counts, sent, back
        ends = counts.sum(1).cumsum(0).tolist()
        self.runs = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
        self.arrived = Signals(state.world)
        #: By source: counts and rows, once they are there.
        self.received: dict[int, tuple[torch.Tensor, Rows]] = {}
        self._results: dict[int, Rows] = {}
        self._computed = [threading.Event() for _ in range(state.world)]

    def rounds(self, peer: int) -> Iterator[Round]:
        """See `Traffic`."""
        run = self.runs[peer]
        with torch.inference_mode(False):
            counts = torch.empty_like(self._counts[peer])
        yield Round([Receive(counts)], [self._counts[peer]])
        with torch.inference_mode(False):
            rows = tuple(x.new_empty((int(counts.sum()), *x.shape[1:])) for x in self._sent)
        self.received[peer] = counts, rows
        *before, last = rows
        receives = [*map(Receive, before), Receive(last, lambda: self.arrived.set(peer))]
        yield Round(receives, [x[run] for x in self._sent])
        yield Round([Receive(x[run]) for x in self._back], self._outgoing(peer))

    def _outgoing(self, peer: int) -> Iterator[torch.Tensor]:
        self._computed[peer].wait()
        if peer not in self._results:
            raise RuntimeError("this rank could not compute its part")
        yield from self._results[peer]

    def failed(self, peer: int, error: BaseException) -> None:
        """See `Traffic`."""
        self.arrived.fail(error)

    def computed(self, source: int, results: Rows) -> None:
        """What became of the rows of ``source``, to be sent back."""
        self._results[source] = results
        self._computed[source].set()

    def stop(self) -> None:
        """No more will be computed."""
        for event in self._computed:
            event.set()


def by_messages(
    state: GroupState, call: Call, counts: torch.Tensor, sent: Rows, back: Rows, compute: Compute, seconds: float
) -> None:
    """Fill ``back`` over a gloo group, each source's rows computed when they are there. Hold the group's call.

    Raises
    ------
    ArrivalTimeout, GroupBroken, ValueError
        As `tilestream.distributed.gloo.gather_matmul`.
    """
    end = time.perf_counter() + seconds
    traffic = _Dispatch(state, counts, sent, back)

    def own() -> None:
        run = traffic.runs[state.rank]
        results = compute(state.rank, tuple(x[run] for x in sent), counts[state.rank])
        for into, result in zip(back, results, strict=True):
            into[run].copy_(result)

    def others() -> None:
        left = [(state.rank + x) % state.world for x in range(1, state.world)]
        while left:
            begin = time.perf_counter()
            outcome, i = traffic.arrived.wait_any([(peer,) for peer in left], 1, end, lambda: False)
            if outcome is Outcome.FAILED:
                raise traffic.arrived.failure(1)
            if outcome is not Outcome.ARRIVED:
                waited, whose = time.perf_counter() - begin, f"rank {left[0]}'s part"
                raise ArrivalTimeout(call.op, 0, left[0], f"rank {left[0]}'s rows", waited, seconds, state.rank, whose)
            source = left.pop(i)
            their_counts, rows = traffic.received.pop(source)
            traffic.computed(source, compute(source, rows, their_counts))

    def run() -> None:
        try:
            own()
            others()
        finally:
            traffic.stop()

    Exchange(state, call, traffic, seconds).run(run)


def by_collectives(state: GroupState, call: Call, counts: torch.Tensor, sent: Rows, compute: Compute) -> Rows:
    """What comes back, by all-to-all; the host reads the counts. Hold the group's call.

    Raises
    ------
    ValueError
        On every rank, if the ranks' calls differ.
    """
    device = sent[0].device
    agree(state, call, device)
    mine = counts.to(device)
    theirs = all_to_all(state, mine, [1] * state.world, [1] * state.world).cpu()
    ours, received = (x.sum(1).tolist() for x in (counts, theirs))
    rows = [all_to_all(state, x, ours, received) for x in sent]
    order = by_expert(theirs).to(device)
    results = compute(0, tuple(x[order] for x in rows), theirs.sum(0))
    return tuple(all_to_all(state, _unsorted(x, order), received, ours) for x in results)


def _unsorted(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(x)
    made[order] = x
    return made


def sorted_rows(experts: torch.Tensor, count: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``(order, counts)`` of the choices ``experts``: the order that sorts them by expert; int64 ``[world, E]``.

    ``count``: experts of all ranks.

    Raises
    ------
    ValueError
        If there is no such expert.
    """
    chosen = experts.reshape(-1)
    if bool(((chosen < 0) | (chosen >= count)).any()):
        wrong = chosen[(chosen < 0) | (chosen >= count)][0].item()
        raise ValueError(f"moe: router: expert {wrong} is chosen; the {world} ranks have {count}, numbered from 0")
    counts = torch.bincount(chosen, minlength=count).cpu().view(world, count // world)
    return chosen.argsort(stable=True), counts
