"""The choice of a call's plan: fused or not, the transport, and the reasons."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from tilestream.distributed.collective import agree
from tilestream.distributed.counting import NONE_COUNTED, VARIABLE, counting
from tilestream.distributed.dispatch import Case, Decision, as_called, decide, on_trial, table_hash
from tilestream.distributed.environment import has_one_queue
from tilestream.distributed.group_state import GroupState
from tilestream.distributed.plan import DistributedPlan, Transport
from tilestream.distributed.request import ALL_REDUCE, GATHER, REDUCE_SCATTER, Request
from tilestream.distributed.symmetric import connect, why_not
from tilestream.plan.candidate import Refusal
from tilestream.plan.problem import dtype_name
from tilestream.runtime.properties import cuda_properties

#: The most plans that a group keeps.
_MOST_PLANS = 1024
#: The reason why a capture holds a call unfused that could be fused.
UNPREPARED = (
    "a CUDA graph is being captured, and no equal call has made what its ranks share: call it once before the capture"
)
#: The reason why no sum is fused in a single hardware queue.
ONE_QUEUE = (
    "CUDA_DEVICE_MAX_CONNECTIONS is 1: all streams share a queue, and the one that waits for a peer would hold the "
    "others without a bound, that of the watchdog too; set it to 8, or not at all"
)


def make_plan(
    state: GroupState, request: Request, shard: tuple[int, ...], k: int, agreed: Mapping[str, object],
    unfused: str = "", unmeasured: str = "",
) -> DistributedPlan:  # fmt: skip
    """The plan of a call, from the group's cache if there is one.

    Parameters
    ----------
    shard
        The shape of one rank's share of the data that travel.
    k
        The length of the sums that a rank computes.
    agreed
        The values that the ranks compare, to which the decision and the table's hash are added.
    unfused
        The reason why the call is not fused, if it is known beforehand.
    unmeasured
        The reason for an unfused call without a measurement, for an op that is fused only on measurements.
    """
    x, n = request.a, sum(b.shape[-1] for b in request.bs)
    key = (
        request.op, shard, request.dim, x.dtype, x.device, n, k, request.form, tuple(agreed.items()),
        state.capture(x), counting(), state.unreachable, on_trial(), unfused, request.promises,
        request.deadline is None, request.kind if counting() == "captured" else "",
    )  # fmt: skip
    found = state.plans.get(key)
    if found is None:
        if len(state.plans) >= _MOST_PLANS:
            state.plans.clear()
        counted = counting() == "all" or (counting() == "captured" and state.capture(x) > 0)
        of_call = state, request, shard, n, k, agreed, unfused, unmeasured
        promises = request.promises and request.op != GATHER and state.world > 1  # that may change the form
        found = _make(*of_call, counted, promises)
        # Only symmetric memory carries calls of graphs; ranks compare the variable where it could carry this one.
        if counting() == "captured" and not counted and on_trial() is None and VARIABLE in found.agreed:
            first = _make(*of_call, True, promises)
            found = replace(found, first=first if first.counted and first.fused else None)
        if request.promises:
            free = _make(*of_call, counted, False) if promises else found
            found = replace(found, promise=_cost(found, free))
        state.plans[key] = found
    return found


def due(state: GroupState, plan: DistributedPlan) -> DistributedPlan | None:
    """The plan by which an eager call with ``plan`` is made before, for captures: `DistributedPlan.first`, once.

    The result is that of ``plan``, which every eager call has. So after a kind's first call nothing is collective and
    all kernels are loaded: a load waits for the GPU, and calls of two groups in other orders for each other's loads. A
    rank whose first call fails makes both again, as its peers do, which wait for it.
    """
    first = plan.first
    return None if first is None or first.handshake in state.prepared else first


def connected_plan(
    state: GroupState, plan: DistributedPlan, device: torch.device, make: Callable[[], DistributedPlan]
) -> DistributedPlan:
    """``plan``; or ``make()`` if the ranks connect in this call, and cannot all reach each other.

    Collective before the first fused call on GPUs.
    """
    is_fused = plan.first is not None or (plan.transport == "symmetric memory" and plan.fused)
    if state.connected or not is_fused:
        return plan
    agree(state, plan, device)
    state.connected = True
    return make() if connect(state, device) else plan


def _make(
    state: GroupState, request: Request, shard: tuple[int, ...], n: int, k: int, agreed: Mapping[str, object],
    unfused: str, unmeasured: str, counted: bool, promises: bool,
) -> DistributedPlan:  # fmt: skip
    """See `make_plan`. ``counted``: whether the device counts the call, if it is fused; ``promises``: a sum's."""
    op, x, dim, form = request.op, request.a, request.dim, request.form
    rows, width = math.prod(shard[:-1]), shard[-1]
    case = Case(op, rows, n, k, width, state.world, dtype_name(x.dtype), x.element_size(), _device_class(x.device))
    if promises and form == "auto":
        form = "fused"  # this form adds in the order of the ranks, for any cut of the rows
    decision = decide(case, form)
    if form != request.form:
        decision = replace(decision, why="tilestream.invariant: a fused sum is added in the order of the ranks")
    if unmeasured and form == "auto" and not decision.measured and on_trial() is None:
        # As if it lost: what the host takes may decide, below.
        decision = Decision(False, 1, unmeasured, measured=True, way=decision.way)
    if form == "auto" and on_trial() is None and not counted:  # a replay has no host's part
        called = as_called(case, decision)
        if called.fused or request.deadline is None:  # a deadline bounds the wait of a fused call alone
            decision = called
    if op == ALL_REDUCE:
        decision = replace(decision, chunks=1)
    transport, refused = _transport(state, x, op == GATHER and dim == len(shard) - 1)
    reaches = transport == "symmetric memory"
    one_queue = reaches and has_one_queue()
    if one_queue and op != GATHER and decision.fused:
        unfused = unfused or ONE_QUEUE
    if unfused:
        decision, transport, refused = Decision(False, 1, unfused), "collective", (Refusal("fused", unfused),)
    if not refused and not all((rows, width, n, k)):
        refused = (Refusal("fused", "no rows, columns or K: there is nothing to overlap with"),)
    if not refused and state.world == 1:
        refused = (Refusal("fused", "one rank: nothing travels"),)
    if not refused and not decision.fused:
        refused = (Refusal("fused", decision.why),)
    if refused and transport == "symmetric memory":
        transport = "collective"
    if promises and transport == "collective":
        raise _adds_in_another_order(state, request, refused[0].why if refused else decision.why)
    counted = counted and transport == "symmetric memory"
    if counted:
        decision = replace(decision, way="push", chunks=decision.chunks if op == GATHER else 1)
    if transport == "symmetric memory" and op == REDUCE_SCATTER:
        decision = decision.with_equal_chunks(math.prod(shard[dim:-1]))  # a kernel publishes chunks of one size
    if one_queue and transport == "symmetric memory" and on_trial() is None:
        decision = without_pulls(decision)
    compared: dict[str, object] = {
        "op": op, **agreed, "columns": n, "form": "fused" if decision.fused else "unfused",
        "chunks": decision.chunks, "table": table_hash(),
    }  # fmt: skip
    if reaches:  # a rank whose device counts other calls would wait for peers that do not come
        compared[VARIABLE] = counting()
    if transport == "symmetric memory" and op == GATHER:
        compared["way"] = decision.way
    if counted:
        compared["counted"] = "by the device"
        if counting() == "captured":
            compared["kind"] = request.kind
    plan = DistributedPlan(case, state.rank, decision, transport, refused, compared, counted)
    if counted and state.capture(x) and plan.handshake not in state.prepared:
        if promises:
            raise _adds_in_another_order(state, request, UNPREPARED)
        return replace(plan, transport="collective", refused=(Refusal("fused", UNPREPARED),))
    return plan


def _cost(plan: DistributedPlan, free: DistributedPlan) -> str:
    """What a promise of equal bits costs a plan across ranks, in words; ``free``: the plan without it."""
    if plan.fused == free.fused:
        return "nothing beside the matmul's own: the form is the same without it"
    return f"the form: unfused without it ({free.refused[0].why})"


def _adds_in_another_order(state: GroupState, request: Request, why: str) -> NotImplementedError:
    """The error for an unfused sum under a promise of equal bits."""
    return NotImplementedError(
        f"{request.op} under tilestream.invariant: not fused ({why}), and the {state.backend(request.a.device.type)} "
        "backend adds in an order that depends on the rows; gather the products, and add them in the order of the ranks"
    )


def without_pulls(decision: Decision) -> Decision:
    """A gather's decision for streams that share one hardware queue: shards are pushed.

    A stream that waits for a peer's flag would block all others: that of the kernel with the deadline, and the
    watchdog's.
    """
    if decision.way != "pull":
        return decision
    return replace(decision, way="push", why=f"{decision.why}; pushed, since CUDA_DEVICE_MAX_CONNECTIONS is 1")


def _device_class(device: torch.device) -> str:
    return device.type if device.type != "cuda" else cuda_properties(device.index).arch


def backend_of(state: GroupState, device: torch.device) -> str:
    """The group's backend for tensors on ``device``; `ValueError` if it has none."""
    backend = state.backend(device.type)
    if not backend:
        raise ValueError(
            f"group: {state.name!r} has no backend for {device.type}; make it with one: "
            'init_process_group("cpu:gloo,cuda:nccl")'
        )
    return backend


def _transport(state: GroupState, x: torch.Tensor, cuts_last: bool) -> tuple[Transport, tuple[Refusal, ...]]:
    """The carrier of data between ranks on this device, and the reasons why it cannot overlap with a matmul."""
    backend = backend_of(state, x.device)
    cut = (Refusal("fused", "the last dimension is cut: no tile can begin before all ranks' parts are there"),)
    if x.device.type == "cpu":
        if backend != "gloo":
            return "collective", (Refusal("fused", f"{backend} on the CPU; messages of gloo are what overlaps there"),)
        return "gloo", cut if cuts_last else ()
    if cuts_last:
        return "collective", cut
    why = why_not(state, x, NONE_COUNTED if counting() == "none" else "")
    return ("collective", (Refusal("fused", why),)) if why else ("symmetric memory", ())
