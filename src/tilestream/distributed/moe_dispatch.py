"""Rows travel to the ranks of their experts, and their results travel back.

A rank sends rows sorted by expert, so the rows for one rank are contiguous. Results come back in the order of the rows.

*gloo*, with all peers at once (`tilestream.distributed.exchange`), each in its own thread::

    a peer's thread:  round 1: the number of rows for each expert, both ways    known only now
                      round 2: the rows, both ways, part by part (`parts_of`); signal each part that arrives
                      round 3: send the results of a part as soon as it is computed; receive the results of mine
    calling thread:   this rank's own rows; then parts from any source in the order of arrival: through their experts

An expert's rows of one source are a separate product, so the bits are independent of the order of arrival. The order of
the operations is `tilestream.core.protocols.dispatch`, which the checker explores: the calling thread performs its
``compute``, and a peer's thread performs its ``converse`` in rounds.

*Any other backend*: an all-to-all of the counts, one of the rows, all rows through the experts, an all-to-all back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import NamedTuple

import torch

from tilestream.arrival.signals import Outcome, Signals
from tilestream.core.errors import ArrivalTimeout
from tilestream.core.protocols import dispatch as text
from tilestream.distributed.collective import agree, all_to_all
from tilestream.distributed.exchange import Exchange, Receive, Round
from tilestream.distributed.group_state import GroupState
from tilestream.distributed.moe_experts import by_expert
from tilestream.distributed.plan import Call
from tilestream.launch.choices import Chosen, sort

#: Rows of several tensors; row i of each is of the same token and expert.
Rows = tuple[torch.Tensor, ...]
#: ``compute(place, rows, counts)`` returns the results of rows sorted by expert; ``counts``: each expert's rows.
#: ``place``: the source and the first expert; (0, 0) for all sources together.
Compute = Callable[[tuple[int, int], Rows, torch.Tensor], Rows]
#: The least bytes of rows that arrive together: a message of gloo costs about 20 us.
PART_BYTES = 2**20


class Part(NamedTuple):
    """Rows that arrive together: the rows of one source for neighbouring experts."""

    #: first, end: the range of experts.
    first: int
    end: int
    rows: slice  # the range of the source's rows


def parts_of(counts: torch.Tensor, row_bytes: int) -> list[Part]:
    """The parts of a source's rows; ``counts``: each expert's rows. Both ranks compute the same parts.

    Each part except the last has at least `PART_BYTES`; each expert's rows are in one part.
    """
    found, first, begin, end = [], 0, 0, 0
    for expert, rows in enumerate(counts.tolist()):
        end += rows
        if (end - begin) * row_bytes >= PART_BYTES or expert == len(counts) - 1:
            found.append(Part(first, expert + 1, slice(begin, end)))
            first, begin = expert + 1, end
    return found


class _Dispatch:
    """`Traffic`: counts, rows, results.

    Parameters
    ----------
    counts
        int64 ``[world, E]``: the rows that this rank sends, by rank and its experts.
    sent, back
        Rows that are sent, and the memory for their results.
    """

    def __init__(self, state: GroupState, counts: torch.Tensor, sent: Rows, back: Rows) -> None:
        self._counts, self._sent, self._back = counts, sent, back
        ends = counts.sum(1).cumsum(0).tolist()
        self.runs = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
        self._row_bytes = sum(math.prod(x.shape[1:]) * x.element_size() for x in sent)
        #: For each source, one signal for each possible part.
        self.arrived = Signals(state.world * counts.shape[1])
        #: Counts, rows and parts of each source, once its counts have arrived.
        self.received: dict[int, tuple[torch.Tensor, Rows, list[Part]]] = {}
        self._results: list[SimpleQueue[Rows | None]] = [SimpleQueue() for _ in range(state.world)]

    def chunk(self, source: int, part: int) -> int:
        """The number of a part's signal."""
        return source * self._counts.shape[1] + part

    def rounds(self, peer: int) -> Iterator[Round]:
        """See `Traffic`."""
        with torch.inference_mode(False):
            counts = torch.empty_like(self._counts[peer])
        yield Round([Receive(counts)], [self._counts[peer]])
        with torch.inference_mode(False):
            rows = tuple(x.new_empty((int(counts.sum()), *x.shape[1:])) for x in self._sent)
        theirs, ours = parts_of(counts, self._row_bytes), parts_of(self._counts[peer], self._row_bytes)
        self.received[peer] = counts, rows, theirs
        receives = [receive for i, part in enumerate(theirs) for receive in self._receives(peer, rows, i, part)]
        sent, back = (tuple(x[self.runs[peer]] for x in tensors) for tensors in (self._sent, self._back))
        yield Round(receives, [x[part.rows] for part in ours for x in sent])
        yield Round([Receive(x[part.rows]) for part in ours for x in back], self._outgoing(peer, len(theirs)))

    def _receives(self, peer: int, rows: Rows, i: int, part: Part) -> list[Receive]:
        *before, last = (x[part.rows] for x in rows)
        return [*map(Receive, before), Receive(last, lambda: self.arrived.set(self.chunk(peer, i)))]

    def _outgoing(self, peer: int, parts: int) -> Iterator[torch.Tensor]:
        for _ in range(parts):
            results = self._results[peer].get()
            if results is None:
                raise RuntimeError("this rank could not compute its part")
            yield from results

    def failed(self, peer: int, error: BaseException) -> None:
        """See `Traffic`."""
        self.arrived.fail(error)

    def computed(self, source: int, results: Rows) -> None:
        """Hand over the results of the next part of ``source``, which are sent back."""
        self._results[source].put(results)

    def stop(self) -> None:
        """Declare that no more results will be computed."""
        for results in self._results:
            results.put(None)


def by_messages(
    state: GroupState, call: Call, counts: torch.Tensor, sent: Rows, back: Rows, compute: Compute, seconds: float
) -> None:
    """Fill ``back`` over a gloo group; each part is computed when it has arrived. Hold the group's call.

    Raises
    ------
    ArrivalTimeout, GroupBroken, ValueError
        See `tilestream.distributed.gloo.gather_matmul`.
    """
    end = time.perf_counter() + seconds
    traffic = _Dispatch(state, counts, sent, back)

    def own() -> None:
        run = traffic.runs[state.rank]
        results = compute((state.rank, 0), tuple(x[run] for x in sent), counts[state.rank])
        for into, result in zip(back, results, strict=True):
            into[run].copy_(result)

    def await_any(parts: Sequence[tuple[int, int]]) -> int:
        begin = time.perf_counter()
        outcome, i = traffic.arrived.wait_any([(traffic.chunk(*one),) for one in parts], 1, end, lambda: False)
        if outcome is Outcome.FAILED:
            raise traffic.arrived.failure(1)
        if outcome is not Outcome.ARRIVED:
            (source, part), waited = parts[0], time.perf_counter() - begin
            item, whose = f"part {part} of rank {source}'s rows", f"rank {source}'s part"
            raise ArrivalTimeout(
                call.op, 0, traffic.chunk(source, part), item, waited, seconds, state.rank, whose
            )  # fmt: skip
        return i

    def of_source(op: text.Compute) -> tuple[Rows, bool]:
        their_counts, rows, parts = traffic.received[op.source]
        part = parts[op.part]
        mine = torch.zeros_like(their_counts)
        mine[part.first : part.end] = their_counts[part.first : part.end]
        results = compute((op.source, part.first), tuple(x[part.rows] for x in rows), mine)
        return results, op.part + 1 == len(parts)

    def run() -> None:
        operations = text.compute(state.rank, state.world)
        results: Rows = ()
        try:
            op = next(operations)
            while not isinstance(op, text.Stop):
                answer = 0
                if isinstance(op, text.ComputeOwn):
                    own()
                elif isinstance(op, text.AwaitAny):
                    answer = await_any(op.parts)
                elif isinstance(op, text.Compute):
                    results, answer = of_source(op)
                else:
                    traffic.computed(op.source, results)
                op = operations.send(answer)
        finally:  # `Exchange.run` does what the text does after Stop
            traffic.stop()

    Exchange(state, call, traffic, seconds).run(run)


def by_collectives(state: GroupState, call: Call, counts: torch.Tensor, sent: Rows, compute: Compute) -> Rows:
    """The results, by all-to-all; the host reads the counts. Hold the group's call.

    Raises
    ------
    ValueError
        On every rank, if the ranks' calls differ.
    """
    device = sent[0].device
    agree(state, call, device)
    mine = counts.to(device)
    theirs = all_to_all(state, mine, [1] * state.world, [1] * state.world)
    ours, received = (x.sum(1).tolist() for x in (counts, theirs))
    rows = [all_to_all(state, x, ours, received) for x in sent]
    order = by_expert(theirs, sum(received))
    results = compute((0, 0), tuple(x[order] for x in rows), theirs.sum(0))
    return tuple(all_to_all(state, _unsorted(x, order), received, ours) for x in results)


def _unsorted(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(x)
    made[order] = x
    return made


def sorted_rows(experts: torch.Tensor, count: int, world: int) -> tuple[Chosen, torch.Tensor]:
    """The choices ``experts``, sorted, and the count of each expert's: int64 ``[world, E]``. The host waits once.

    ``count``: the number of experts of all ranks.

    Raises
    ------
    ValueError
        If a chosen expert does not exist.
    """
    chosen = sort(experts, count)
    starts = chosen.starts.cpu()
    if starts[-1] < len(chosen.order):
        wrong = experts.reshape(-1)[chosen.order[starts[-1]]].item()
        raise ValueError(f"moe: router: expert {wrong} is chosen; the {world} ranks have {count}, numbered from 0")
    return chosen, starts.long().diff().view(world, count // world)
