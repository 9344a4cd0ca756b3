"""What travels between nodes: each rank exchanges with those of its local index in the other nodes, a node a step.

::

    step j = 1, 2, ...:   mine for the node j after;   theirs from the node j before

So each step a rank sends to one node and receives from one, and no two send to one at a time. A step is NCCL's send and
receive, of which the current stream waits for what it needs. Where the group between nodes has gloo, it is
messages, in threads: of GPUs' tensors through the CPU, which is right, and slow. That is what has run on GPUs: NCCL's
branch has been tried on the CPU, over gloo's sends and receives, and not yet between GPUs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from tilestream.distributed.collective import agree
from tilestream.distributed.exchange import Exchange, Receive
from tilestream.distributed.gloo import exchanging
from tilestream.distributed.group_state import Member
from tilestream.distributed.plan import DistributedPlan

T = TypeVar("T")


class Steps(Protocol):
    """The steps of one call. Each is put once, then got; both on the calling thread and stream."""

    def put(self, step: int, tensors: Sequence[torch.Tensor]) -> None:
        """What goes to the node ``step`` after this one is there (on the current stream)."""

    def get(self, step: int) -> list[torch.Tensor]:
        """What the node ``step`` before this one has sent, of the shapes of what was put. Waits for it."""


class _ByNccl:
    """See `Steps`."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._under_way: dict[int, tuple[list[Any], list[torch.Tensor], list[torch.Tensor]]] = {}

    def put(self, step: int, tensors: Sequence[torch.Tensor]) -> None:
        """See `Steps`."""
        rank, world, group = self._member.rank, self._member.world, self._member.group
        sent = [x.contiguous() for x in tensors]
        got = [torch.empty_like(x) for x in sent]
        to, source = (dist.get_global_rank(group, (rank + x) % world) for x in (step, -step))
        operations = [dist.P2POp(dist.isend, _bytes(x), to, group) for x in sent if x.numel()]
        operations += [dist.P2POp(dist.irecv, _bytes(x), source, group) for x in got if x.numel()]
        works = dist.batch_isend_irecv(operations) if operations else []
        self._under_way[step] = works, sent, got

    def get(self, step: int) -> list[torch.Tensor]:
        """See `Steps`."""
        works, _, got = self._under_way.pop(step)  # what was sent is kept until here
        for work in works:
            work.wait()
        return got


class _ByMessages:
    """See `Steps`, and `tilestream.distributed.exchange.Traffic`: a peer is a node."""

    def __init__(self, member: Member, like: Sequence[torch.Tensor]) -> None:
        self._rank, self._world, self._like = member.rank, member.world, like
        peers = [(self._rank + x) % self._world for x in range(1, self._world)]
        self._mine: dict[int, list[torch.Tensor]] = {}
        self._ready = {peer: threading.Event() for peer in peers}
        self._theirs = {peer: [torch.empty(x.shape, dtype=x.dtype) for x in like] for peer in peers}
        self._landed = {peer: threading.Event() for peer in peers}
        self._lost: dict[int, BaseException] = {}
        self._failed = False

    def incoming(self, peer: int) -> Sequence[Receive]:
        """See `Traffic`."""
        *before, last = self._theirs[peer]
        return [*(Receive(x, _nothing) for x in before), Receive(last, self._landed[peer].set)]

    def outgoing(self, peer: int) -> Iterator[torch.Tensor]:
        """See `Traffic`."""
        self._ready[peer].wait()  # set by `put`, or by `fail`
        if self._failed:
            raise RuntimeError("this rank could not compute its part")
        yield from self._mine[peer]

    def failed(self, peer: int, error: BaseException) -> None:
        """See `Traffic`."""
        self._lost[peer] = error
        self._landed[peer].set()

    def fail(self) -> None:
        """Nothing more will be put."""
        self._failed = True
        for event in self._ready.values():
            event.set()

    def put(self, step: int, tensors: Sequence[torch.Tensor]) -> None:
        """See `Steps`."""
        peer = (self._rank + step) % self._world
        self._mine[peer] = [x.detach().cpu().contiguous() for x in tensors]
        self._ready[peer].set()

    def get(self, step: int) -> list[torch.Tensor]:
        """See `Steps`."""
        peer = (self._rank - step) % self._world
        self._landed[peer].wait()  # the thread that receives has a deadline, and sets it whatever happens
        if peer in self._lost:
            raise self._lost[peer]
        return [x.to(like.device) for x, like in zip(self._theirs[peer], self._like, strict=True)]


def _nothing() -> None:
    """What is done when a tensor has landed that is not the last."""


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


def over_nodes(
    member: Member, plan: DistributedPlan, like: Sequence[torch.Tensor], seconds: float, compute: Callable[[Steps], T]
) -> T:
    """``compute``, which is given the steps of this call, and the exchange that it goes with.

    Parameters
    ----------
    member
        Of the group between nodes. Hold its call.
    plan
        What all ranks call alike: nodes compare it, too.
    like
        What travels each step: shapes, dtypes and device.

    Raises
    ------
    ArrivalTimeout, GroupBroken, ValueError
        As `tilestream.distributed.gloo.gather_matmul`. Whatever ``compute`` raises breaks the group here, too. Of NCCL
        the peers are not told: what they wait for ends at NCCL's own timeout.
    """
    device = like[0].device
    if device.type == "cuda" and member.backend("cuda") != "gloo":
        agree(member, plan, device)
        try:
            return compute(_ByNccl(member))
        except BaseException as error:  # what was sent already would be taken for the next call's
            member.break_(f"{plan.case.op} on rank {member.rank}: {type(error).__name__}: {error}")
            raise
    steps, results = _ByMessages(member, like), []

    def computed() -> list[torch.Tensor]:
        try:
            results.append(compute(steps))
        except BaseException:
            steps.fail()
            raise
        return []

    exchanging(member, Exchange(plan.case.op, member, plan.greeting, steps, seconds), computed)
    return results[0]
