"""`DistributedPlan`: the form of a call across ranks, with the reasons."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from tilestream.core.protocols import handshake
from tilestream.core.protocols.gather import Way
from tilestream.core.protocols.replay import form_number
from tilestream.distributed import nodes
from tilestream.distributed.counting import VARIABLE
from tilestream.distributed.dispatch import Case, Decision
from tilestream.plan.candidate import Refusal
from tilestream.plan.explain import promise_lines

#: `Way` in words.
_WAYS: Mapping[Way, str] = {
    "push": "each rank pushes its shard to one peer after the other: the data are the handshake",
    "pull": "each rank pulls from one peer after the other, behind a handshake",
}
#: The place where the kernel reads this rank's own shard, in words.
_OWN_SHARD: Mapping[Way, str] = {
    "push": "where the caller has it, if it is in one piece, and whole tiles of the Hopper kernel; else in the slot",
    "pull": "in the slot, where it is copied first: the peers pull it from there",
}
#: A fused and an unfused call in words. An all-reduce has too few rows to overlap.
_OVERLAP, _ONE_SHOT = "transfer and matmul overlap", "in one shot: each rank reads the partial sums of all, and adds"
_SEQUENTIAL = "one after the other"
#: The matmul of an unfused all-reduce in words, if it is torch's.
_LIBRARY = "torch's, of operands of one dtype without scales: measured to be the faster one for this shape class"
#: The order in which a call adds under `tilestream.invariant`, in words.
_AS_ON_ONE_RANK, _IN_RANK_ORDER = "added as on one rank", "each rank's as on one rank, then in the order of the ranks"
#: Fields that each node decides by itself, from its GPUs' capabilities. Nodes do not compare them.
_OF_A_NODE = ("form", "chunks", "way", "counted", VARIABLE)
#: The carrier of the data: messages of gloo; copy engines over symmetric memory; a collective of any backend.
Transport = Literal["gloo", "symmetric memory", "collective"]


class Call(Protocol):
    """The part of a plan that the ranks compare."""

    @property
    def op(self) -> str:
        """The op's name, for messages."""

    @property
    def handshake(self) -> bytes:
        """Bytes that are the same on each rank, unless the calls differ."""


class AgreedPlan:
    """What the plans of all ops across ranks share."""

    agreed: Mapping[str, object]
    refused: tuple[Refusal, ...]

    @functools.cached_property
    def handshake(self) -> bytes:
        """``agreed``, encoded."""
        return handshake.encode(self.agreed)

    @functools.cached_property
    def number(self) -> int:
        """A number for `handshake`, by which devices compare calls."""
        return form_number(self.handshake)

    @property
    def fused(self) -> bool:
        """Whether transfers overlap with computation; for an all-reduce, whether it is done in one shot."""
        return not self.refused


@dataclass(frozen=True)
class DistributedPlan(AgreedPlan):
    """The plan of an op across ranks.

    Attributes
    ----------
    case
        The values that all ranks know.
    rank
        This process's rank.
    decision
        Fused or not, by table, model or caller; ``refused`` has the reasons against a fused form here.
    transport
        The carrier of the data.
    refused
        The reasons why the call is not fused; empty if it is.
    agreed
        The values that the ranks compare: see `tilestream.core.protocols.handshake`.
    counted
        Whether the device counts the calls, so that CUDA graphs may hold them (`tilestream.distributed.graph_calls`).
    first
        The plan by which the device makes the kind's first eager call before, for captures
        (`tilestream.distributed.counting`); None for calls that no capture holds fused.
    nodes
        The number of nodes. Each step of the call handles the rows of one node; ``case`` is that of one node's ranks.
    promise
        The cost of `tilestream.invariant` in words; empty without it.
    """

    case: Case
    rank: int
    decision: Decision
    transport: Transport
    refused: tuple[Refusal, ...]
    agreed: Mapping[str, object]
    counted: bool = False
    first: DistributedPlan | None = None
    nodes: int = 1
    promise: str = ""

    @property
    def op(self) -> str:
        """The op's name."""
        return self.case.op

    @property
    def chunks(self) -> int:
        """Chunks of a shard in each batch."""
        return self.decision.chunks if self.fused else 1

    @functools.cached_property
    def internode(self) -> DistributedPlan:
        """The plan with only the fields that nodes compare."""
        return replace(self, agreed={name: value for name, value in self.agreed.items() if name not in _OF_A_NODE})

    def explain(self) -> str:
        """The choices, and the refused ones, in words."""
        case, shard = self.case, f"{self.case.rows} x {self.case.width} {self.case.dtype}"
        if case.op == "matmul_all_reduce":
            how, what = _ONE_SHOT, ("partial", f"{shard} of each rank")
        else:
            pivot = (self.rank + (case.op == "matmul_reduce_scatter")) % case.world  # a sum's own part comes last
            how, what = _OVERLAP, ("chunks", f"{self.chunks} a shard of {shard}, pivot rank {pivot}")
        lines = [
            ("form", f"{f'fused: {how}' if self.fused else f'unfused: {_SEQUENTIAL}'}, by {self.transport}"),
            ("why", self.decision.why),
            what,
            ("agreed", ", ".join(f"{name} {value}" for name, value in self.agreed.items())),
        ]
        if "way" in self.agreed:
            lines[3:3] = [("way", _WAYS[self.decision.way]), ("own shard", f"read {_OWN_SHARD[self.decision.way]}")]
        if self.counted and self.fused:
            lines.append(("counted", "by the device: CUDA graphs may hold the call"))
        if self.first is not None:
            lines.append(("in graphs", "fused, counted by the device, which makes the first eager call of a kind, too"))
        if not self.fused and self.decision.library:
            lines[2:2] = [("matmul", _LIBRARY)]
        gathers = case.op == "all_gather_matmul"
        lines += promise_lines(self.promise, _AS_ON_ONE_RANK if gathers else _IN_RANK_ORDER)
        lines += [("refused", f"{refusal.what}: {refusal.why}") for refusal in self.refused]
        if self.nodes > 1:
            lines += nodes.explain(self.nodes, case)
        ranks = f"{case.world} ranks" if self.nodes == 1 else f"{self.nodes} nodes of {case.world} ranks"
        head = f"{case.op}, {ranks} on {case.device}: N {case.n}, K {case.k}"
        return "\n".join([head, *(f"  {name:<9} {text}" for name, text in lines)])
