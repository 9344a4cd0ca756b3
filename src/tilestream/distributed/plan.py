"""`DistributedPlan`: how a call across ranks is run, and why not otherwise."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from tilestream.distributed import nodes as over_nodes
from tilestream.distributed.dispatch import Case, Decision, Form, Op, decide, on_trial, table_hash
from tilestream.distributed.group_state import Member
from tilestream.distributed.handshake import greeting
from tilestream.distributed.protocol import Way
from tilestream.plan.candidate import Refusal
from tilestream.plan.problem import dtype_name

#: Plans that a member keeps.
_MOST_PLANS = 1024
#: What `protocol.Way` is, for people.
_WAYS: Mapping[Way, str] = {
    "push": "each rank pushes its shard to one peer after the other: the data are the handshake",
    "pull": "each rank pulls from one peer after the other, behind a handshake",
}
#: Where the own kernel reads the own shard.
_OWN: Mapping[Way, str] = {
    "push": "where the caller has it, if it is in one piece, and whole tiles of the Hopper kernel; else in the slot",
    "pull": "in the slot, where it is copied first: the peers pull it from there",
}
#: What is done where it is fused, and where not. An all-reduce's rows are too few to overlap with anything.
_OVERLAP, _ONE_SHOT = "transfer and matmul overlap", "in one shot: each rank reads the partial sums of all, and adds"
_IN_TURN = "one after the other"
#: Whose matmul comes before the group's all-reduce, where it is not ours.
_LIBRARY = "torch's, of operands of one dtype without scales: measured to be the faster one for this shape class"
#: Why neither a sum nor an all-reduce is fused there.
ONE_QUEUE = (
    "CUDA_DEVICE_MAX_CONNECTIONS is 1: all streams share a queue, and the one that waits for a peer would hold the "
    "others without a bound, that of the watchdog too; set it to 8, or not at all"
)
#: What each node decides by itself, by what its GPUs can do: nodes need not agree on it.
_OF_A_NODE = ("form", "chunks", "way")
#: What carries data: messages of gloo; copy engines over symmetric memory; a collective of whatever backend.
Transport = Literal["gloo", "symmetric memory", "collective"]


@dataclass(frozen=True)
class DistributedPlan:
    """How an op across ranks is run.

    Attributes
    ----------
    case
        What all ranks know alike.
    rank
        This one.
    decision
        Fused or not, by table, model or caller, whatever can be had here.
    transport
        What carries the data.
    refused
        Why not fused, where it is not.
    agreed
        What the ranks compare: see `tilestream.distributed.handshake`.
    nodes
        How often this is done, once for each node's rows: ``case`` is of the ranks of one.
    """

    case: Case
    rank: int
    decision: Decision
    transport: Transport
    refused: tuple[Refusal, ...]
    agreed: Mapping[str, object]
    nodes: int = 1

    @functools.cached_property
    def greeting(self) -> bytes:
        """``agreed``, as ranks say it to each other."""
        return greeting(self.agreed)

    @property
    def fused(self) -> bool:
        """Whether transfer and matmul overlap; of an all-reduce, whether it is done in one shot."""
        return not self.refused

    @property
    def chunks(self) -> int:
        """Chunks of a shard, in each batch."""
        return self.decision.chunks if self.fused else 1

    def over(self, nodes: int) -> DistributedPlan:
        """The plan of a call over as many nodes, of which this is a step."""
        return replace(self, nodes=nodes)

    @functools.cached_property
    def between_nodes(self) -> DistributedPlan:
        """The same, with what nodes compare."""
        return replace(self, agreed={name: value for name, value in self.agreed.items() if name not in _OF_A_NODE})

    def explain(self) -> str:
        """What was chosen and what was refused, for people."""
        case, shard = self.case, f"{self.case.rows} x {self.case.width} {self.case.dtype}"
        if case.op == "matmul_all_reduce":
            how, what = _ONE_SHOT, ("partial", f"{shard} of each rank")
        else:
            pivot = (self.rank + (case.op == "matmul_reduce_scatter")) % case.world  # of a sum the own part comes last
            how, what = _OVERLAP, ("chunks", f"{self.chunks} a shard of {shard}, pivot rank {pivot}")
        lines = [
            ("form", f"{f'fused: {how}' if self.fused else f'unfused: {_IN_TURN}'}, by {self.transport}"),
            ("why", self.decision.why),
            what,
            ("agreed", ", ".join(f"{name} {value}" for name, value in self.agreed.items())),
        ]
        if "way" in self.agreed:
            lines[3:3] = [("way", _WAYS[self.decision.way]), ("own shard", f"read {_OWN[self.decision.way]}")]
        if not self.fused and self.decision.library:
            lines[2:2] = [("matmul", _LIBRARY)]
        lines += [("refused", f"{refusal.what}: {refusal.why}") for refusal in self.refused]
        if self.nodes > 1:
            lines += over_nodes.explain(self.nodes, case)
        ranks = f"{case.world} ranks" if self.nodes == 1 else f"{self.nodes} nodes of {case.world} ranks"
        head = f"{case.op}, {ranks} on {case.device}: N {case.n}, K {case.k}"
        return "\n".join([head, *(f"  {name:<9} {text}" for name, text in lines)])


def make_plan(
    op: Op,
    member: Member,
    shard: tuple[int, ...],
    dim: int,
    x: torch.Tensor,
    n: int,
    k: int,
    form: Form,
    agreed: Mapping[str, object],
    no_form: str = "",
    unmeasured: str = "",
) -> DistributedPlan:
    """The plan of a call.

    Parameters
    ----------
    shard, dim
        Shape of one rank's share of what travels, and the dimension that is cut.
    x
        A tensor on the call's device, of the operands' dtype.
    n, k
        Columns of all B together, and the length of the sums that a rank computes.
    agreed
        What the ranks must call alike; the decision and the table's hash are added.
    no_form
        Why not fused, where that is known beforehand.
    unmeasured
        Of an op that is fused only where that was measured to be faster: what is said where it was not.
    """
    capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    key = (
        op, shard, dim, x.dtype, x.device, n, k, form, tuple(agreed.items()), capturing, member.unreachable, on_trial(),
        no_form,
    )  # fmt: skip
    found = member.plans.get(key)
    if found is None:
        if len(member.plans) >= _MOST_PLANS:
            member.plans.clear()
        found = member.plans[key] = _make(op, member, shard, dim, x, n, k, form, agreed, no_form, unmeasured)
    return found


def _make(
    op: Op, member: Member, shard: tuple[int, ...], dim: int, x: torch.Tensor, n: int, k: int, form: Form,
    agreed: Mapping[str, object], no_form: str, unmeasured: str,
) -> DistributedPlan:  # fmt: skip
    rows, width = math.prod(shard[:-1]), shard[-1]
    case = Case(op, rows, n, k, width, member.world, dtype_name(x.dtype), x.element_size(), _device_class(x.device))
    decision = decide(case, form)
    if op == "matmul_all_reduce":
        decision = replace(decision, chunks=1)
    transport, refused = _transport(member, x, dim == len(shard) - 1)
    one_queue = transport == "symmetric memory" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    if unmeasured and form == "auto" and not decision.measured and on_trial() is None:
        no_form = no_form or unmeasured
    if one_queue and op != "all_gather_matmul" and decision.fused:
        no_form = no_form or ONE_QUEUE
    if no_form:
        decision, transport, refused = Decision(False, 1, no_form), "collective", (Refusal("fused", no_form),)
    if not refused and not all((rows, width, n, k)):
        refused = (Refusal("fused", "no rows, columns or K: there is nothing to overlap with"),)
    if not refused and member.world == 1:
        refused = (Refusal("fused", "one rank: nothing travels"),)
    if not refused and not decision.fused:
        refused = (Refusal("fused", decision.why),)
    if refused and transport == "symmetric memory":
        transport = "collective"
    if transport == "symmetric memory" and op == "matmul_reduce_scatter":
        decision = decision.alike(math.prod(shard[dim:-1]))  # what is published is in chunks of one size
    if one_queue and transport == "symmetric memory" and on_trial() is None:
        decision = in_one_queue(decision)
    all_agreed: dict[str, object] = {
        "op": op, **agreed, "columns": n, "form": "fused" if decision.fused else "unfused",
        "chunks": decision.chunks, "table": table_hash(),
    }  # fmt: skip
    if transport == "symmetric memory" and op == "all_gather_matmul":
        all_agreed["way"] = decision.way
    return DistributedPlan(case, member.rank, decision, transport, refused, all_agreed)


def in_one_queue(decision: Decision) -> Decision:
    """What is done of a gather where all streams share one queue: no stream may wait for a peer, and so none pulls.

    That stream would hold the others, the kernel and its deadline too, and what the watchdog lets it go with.
    """
    if decision.way != "pull":
        return decision
    return replace(decision, way="push", why=f"{decision.why}; pushed, since CUDA_DEVICE_MAX_CONNECTIONS is 1")


def _device_class(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    from tilestream.runtime.properties import cuda_properties

    return cuda_properties(device.index).arch


def _transport(member: Member, x: torch.Tensor, last: bool) -> tuple[Transport, tuple[Refusal, ...]]:
    """What carries data between ranks on this device, and what forbids that it overlaps with a matmul."""
    backend = member.backend(x.device.type)
    if not backend:
        raise ValueError(
            f"group: {member.name!r} has no backend for {x.device.type}; make it with one: "
            'init_process_group("cpu:gloo,cuda:nccl")'
        )
    cut = (Refusal("fused", "the last dimension is cut: no tile can begin before all ranks' parts are there"),)
    if x.device.type == "cpu":
        if backend != "gloo":
            return "collective", (Refusal("fused", f"{backend} on the CPU; messages of gloo are what overlaps there"),)
        return "gloo", cut if last else ()
    if last:
        return "collective", cut
    from tilestream.distributed.symmetric import refuse

    why = refuse(member, x)
    return ("collective", (Refusal("fused", why),)) if why else ("symmetric memory", ())
