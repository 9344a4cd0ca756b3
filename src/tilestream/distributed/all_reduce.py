"""Matmul + all-reduce: `tilestream.distributed.matmul_all_reduce`, planned and run.

With a few rows nothing can overlap: all tiles of the matmul are done at about the same time. The call has two forms:
the matmul, then the group's own all-reduce; or, if a measurement shows that it is faster, the matmul into memory that
peers can read, then a kernel that reads and adds all ranks' partial sums (`one_shot`).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch

from tilestream.distributed import collective, graph_calls, one_shot
from tilestream.distributed.collective import agree
from tilestream.distributed.group_state import GroupState, states_of
from tilestream.distributed.plan import DistributedPlan
from tilestream.distributed.planner import connected_plan, due, make_plan
from tilestream.distributed.reduce_scatter import travel_dtype
from tilestream.distributed.repeats import PlainCall
from tilestream.distributed.request import ALL_REDUCE, Request
from tilestream.distributed.unfused import UnfusedAllReduce, can_repeat

#: Reasons for the group's own all-reduce. docs/distributed.md has the arithmetic.
UNMEASURED = "this shape class was not measured to be faster than the group's own all-reduce"
ON_THE_CPU = "on the CPU the group's own all-reduce adds what it has received as it comes"
OVER_NODES = "over several nodes: the groups' own all-reduces, inside each node and then between them"


def plan_of(state: GroupState, request: Request, nodes: int = 1, **more: object) -> DistributedPlan:
    """The plan of a call over ``nodes`` nodes; ``more``: further values that the ranks compare."""
    a = request.a
    unfused = OVER_NODES if nodes > 1 else "" if a.is_cuda else ON_THE_CPU
    agreed = {"a": f"{list(a.shape)[:-1]} rows {a.dtype}".replace("torch.", ""), **more}
    return make_plan(state, request, (*a.shape[:-1], request.b.shape[-1]), a.shape[-1], agreed, unfused, UNMEASURED)


def sum_over(name: str, x: torch.Tensor) -> torch.Tensor:
    """The sum of ``x`` over all ranks of the group, or mesh, of this name. The ranks have compared their calls."""
    total = x.clone(memory_format=torch.contiguous_format)
    for state in reversed(states_of(ALL_REDUCE, name)):
        with state.call():
            total = collective.all_reduce(state, total)
    return total


class _Decided(NamedTuple):
    """The decisions that equal calls share.

    Attributes
    ----------
    plans
        One plan for each group, in the order of the sums: the innermost first, so that each sum travels between nodes
        once.
    dtype, wide
        The dtypes of the result and of the sum.
    library
        Whether torch computes the product.
    """

    plans: tuple[DistributedPlan, ...]
    dtype: torch.dtype
    wide: torch.dtype
    library: bool


def run(states: list[GroupState], request: Request, key: object = None, plain: PlainCall | None = None) -> torch.Tensor:
    """The sum over all ranks of their products.

    Parameters
    ----------
    states
        The state of one group; or those of the internode and the intranode group, which sums first.
    key
        The request's key in one group, if the caller has it.
    plain
        The call, if equal ones can be repeated.
    """
    request.begin(*states)
    a, b, inner_first = request.a, request.b, states[::-1]
    if key is None:
        key = request.key(states[0]) if len(states) == 1 else tuple(request.key(state) for state in states)
    found: _Decided | None = states[0].decided(key)
    with request.running():
        if found is None:
            found = states[0].decide(key, _decide(inner_first, request))
        plans, dtype, wide, library = found
        plan = plans[0]
        if len(plans) == 1 and due(states[0], plan) is not None:
            with states[0].call():
                if (first := due(states[0], plan)) is not None:  # no other thread has made it meanwhile
                    graph_calls.matmul_reduce(states[0], first, request, dtype)
        if plan.fused:
            (state,) = states
            with state.call():
                if plan.counted:
                    return graph_calls.matmul_reduce(state, plan, request, dtype)
                return one_shot.matmul_reduce(state, plan, request, dtype, plain)
        total = torch.matmul(a, b) if library else request.product(a, bias=None, out_dtype=dtype)
        total = total.to(wide)
        for state, plan in zip(inner_first, plans, strict=True):
            with state.call():
                agree(state, plan, a.device)
                total = collective.all_reduce(state, total)
        if plain is not None and request.reduce_op == "sum" and wide == dtype and can_repeat(plans[0], plain):
            UnfusedAllReduce.of(plain, a.device, dtype, request.fast_accum, library)
        if request.reduce_op == "avg":
            total /= math.prod(state.world for state in states)
        if request.bias is not None:
            total = total + request.bias
    return total.to(dtype)


def _decide(inner_first: list[GroupState], request: Request) -> _Decided:
    a, b, dtype = request.a, request.b, travel_dtype(request)
    more: dict[str, Any] = {"nodes": len(inner_first), "travels": str(dtype), "reduce_op": request.reduce_op}
    plans = [plan_of(state, request, **more) for state in inner_first]
    if len(plans) == 1 and a.is_cuda:
        (state,) = inner_first
        with state.call():
            plans[0] = connected_plan(state, plans[0], a.device, functools.partial(plan_of, state, request, **more))
    plain = request.scale_a is request.scale_b is None and dtype == a.dtype == b.dtype
    wide = dtype if a.is_cuda else torch.promote_types(dtype, torch.float32)
    return _Decided(tuple(plans), dtype, wide, plain and a.is_cuda and plans[0].decision.library)
