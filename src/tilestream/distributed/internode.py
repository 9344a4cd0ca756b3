"""Transfers between nodes: each rank exchanges with its counterparts in the other nodes, one node a step.

::

    step j = 1, 2, ...:   send mine to the node j after;   receive theirs from the node j before

In each step a rank sends to one node and receives from one node, and no two ranks of a group send to the same rank. A
step is a send and a receive of NCCL, and the current stream waits for the received data. If the internode group has
gloo, threads send messages, and GPU tensors are staged on the CPU, which is slow.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from tilestream.distributed.collective import agree, as_bytes
from tilestream.distributed.exchange import Exchange, Receive, Round
from tilestream.distributed.group_state import GroupState
from tilestream.distributed.plan import DistributedPlan

T = TypeVar("T")


class Steps(Protocol):
    """The steps of one call. Each has one `put`, then one `get`, both on the calling thread and stream."""

    def put(self, step: int, tensors: Sequence[torch.Tensor]) -> None:
        """Send these tensors to the node ``step`` after this one, ordered after the current stream's work."""

    def get(self, step: int) -> list[torch.Tensor]:
        """Wait for the tensors of the node ``step`` before this one, which have the shapes of the sent ones."""


class _NcclSteps:
    """`Steps` as NCCL's sends and receives."""

    def __init__(self, state: GroupState) -> None:
        self._state = state
        self._under_way: dict[int, tuple[list[Any], list[torch.Tensor], list[torch.Tensor]]] = {}

    def put(self, step: int, tensors: Sequence[torch.Tensor]) -> None:
        rank, world, group = self._state.rank, self._state.world, self._state.group
        sent = [x.contiguous() for x in tensors]
        received = [torch.empty_like(x) for x in sent]
        to, source = (dist.get_global_rank(group, (rank + x) % world) for x in (step, -step))
        operations = [dist.P2POp(dist.isend, as_bytes(x), to, group) for x in sent if x.numel()]
        operations += [dist.P2POp(dist.irecv, as_bytes(x), source, group) for x in received if x.numel()]
        works = dist.batch_isend_irecv(operations) if operations else []
        self._under_way[step] = works, sent, received

    def get(self, step: int) -> list[torch.Tensor]:
        works, _, received = self._under_way.pop(step)  # the sent tensors are kept alive until here
        for work in works:
            work.wait()
        return received


class _GlooSteps:
    """`Steps` as gloo's messages, and their `tilestream.distributed.exchange.Traffic`; a peer is a node."""

    def __init__(self, state: GroupState, like: Sequence[torch.Tensor]) -> None:
        self._rank, self._world, self._like = state.rank, state.world, like
        peers = [(self._rank + x) % self._world for x in range(1, self._world)]
        self._mine: dict[int, list[torch.Tensor]] = {}
        self._ready = {peer: threading.Event() for peer in peers}
        self._theirs = {peer: [torch.empty(x.shape, dtype=x.dtype) for x in like] for peer in peers}
        self._landed = {peer: threading.Event() for peer in peers}
        self._lost: dict[int, BaseException] = {}
        self._failed = False

    def rounds(self, peer: int) -> Sequence[Round]:
        *before, last = self._theirs[peer]
        incoming = [*(Receive(x) for x in before), Receive(last, self._landed[peer].set)]
        return [Round(incoming, self._outgoing(peer))]

    def _outgoing(self, peer: int) -> Iterator[torch.Tensor]:
        self._ready[peer].wait()  # set by `put`, or by `fail`
        if self._failed:
            raise RuntimeError("this rank could not compute its part")
        yield from self._mine[peer]

    def failed(self, peer: int, error: BaseException) -> None:
        self._lost[peer] = error
        self._landed[peer].set()

    def fail(self) -> None:
        """Declare that no more steps will be put."""
        self._failed = True
        for event in self._ready.values():
            event.set()

    def put(self, step: int, tensors: Sequence[torch.Tensor]) -> None:
        peer = (self._rank + step) % self._world
        self._mine[peer] = [x.detach().cpu().contiguous() for x in tensors]
        self._ready[peer].set()

    def get(self, step: int) -> list[torch.Tensor]:
        peer = (self._rank - step) % self._world
        self._landed[peer].wait()  # bounded: the receiving thread has a deadline, and always sets the event
        if peer in self._lost:
            raise self._lost[peer]
        return [x.to(like.device) for x, like in zip(self._theirs[peer], self._like, strict=True)]


def exchange_between_nodes(
    state: GroupState, plan: DistributedPlan, like: Sequence[torch.Tensor], seconds: float,
    compute: Callable[[Steps], T],
) -> T:  # fmt: skip
    """Return ``compute(steps)``, during which the steps are exchanged.

    Parameters
    ----------
    state
        The state of the internode group. Hold its call.
    plan
        The plan that the nodes compare.
    like
        Tensors with the shapes, dtypes and device of the tensors that travel in each step.

    Raises
    ------
    ArrivalTimeout, GroupBroken, ValueError
        See `tilestream.distributed.gloo.gather_matmul`. An error of ``compute`` also breaks the group. Over NCCL the
        peers are not informed: their receives end at NCCL's own timeout.
    """
    device = like[0].device
    if device.type == "cuda" and state.backend("cuda") != "gloo":
        agree(state, plan, device)
        try:
            return compute(_NcclSteps(state))
        except BaseException as error:  # a later call would receive the data already sent
            state.break_(f"{plan.case.op} on rank {state.rank}: {type(error).__name__}: {error}")
            raise
    steps = _GlooSteps(state, like)

    def computed() -> T:
        try:
            return compute(steps)
        except BaseException:
            steps.fail()
            raise

    return Exchange(state, plan, steps, seconds).run(computed)
