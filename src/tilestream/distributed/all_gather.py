"""All-gather + matmul inside a node: the call of `tilestream.distributed.all_gather_matmul`, planned and run."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tilestream.arrival.arrival import Arrival
from tilestream.distributed import copy_engines, gloo, graph_calls
from tilestream.distributed.collective import agree, all_gather
from tilestream.distributed.group_state import GroupState
from tilestream.distributed.plan import DistributedPlan
from tilestream.distributed.planner import connected_plan, due, make_plan
from tilestream.distributed.repeats import PlainCall
from tilestream.distributed.request import Request
from tilestream.distributed.shards import Product, ScaledRows, Shards
from tilestream.distributed.unfused import UnfusedGather, can_repeat


def plan_of(state: GroupState, request: Request) -> DistributedPlan:
    """Check a call, and plan it, without sending anything."""
    if request.cuts_last:
        request.check_one_scale()
    else:
        request.scales_of_rows()
    a, dim, scale = request.a, request.dim, request.scale_a
    shape = _gathered_shape(state, request)
    request.rehearse(math.prod(shape[:-1]), shape[-1], gathers_scales=not request.cuts_last)
    agreed = {
        "a_shard": f"{list(a.shape)} {a.dtype}".replace("torch.", ""), "gather_dim": dim,
        "scale_a": "none" if scale is None else "one" if scale.numel() == 1 else "one a row",
    }  # fmt: skip
    return make_plan(state, request, tuple(a.shape), shape[-1], agreed)


def _gathered_shape(state: GroupState, request: Request) -> tuple[int, ...]:
    shape = list(request.a.shape)
    shape[request.dim] *= state.world
    return tuple(shape)


def _products(request: Request, into: Sequence[torch.Tensor]) -> list[Product]:
    """The matmuls of the gathered rows; ``into``: see `run`."""

    def product(i: int, out: torch.Tensor | None) -> Product:
        def compute(
            a: torch.Tensor, scale: torch.Tensor | None, arrival: Arrival | None, deadline: float
        ) -> torch.Tensor:
            scale = request.scale_a if request.cuts_last else scale
            late = None if arrival is None else deadline
            return request.product(a, i, out=out, scale_a=scale, arrival=arrival, deadline=late)

        return compute

    places: Sequence[torch.Tensor | None] = into or [None] * len(request.bs)
    return [product(i, place) for i, place in enumerate(places)]


class _Decided(NamedTuple):
    """The decisions that equal calls share."""

    plan: DistributedPlan
    shards: Shards


def run(
    state: GroupState, request: Request, into: Sequence[torch.Tensor] = (), key: object = None,
    plain: PlainCall | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:  # fmt: skip
    """All ranks' rows (empty unless ``return_a``), and the products.

    Parameters
    ----------
    into
        The products' memory, ``[rows of all ranks, N]`` each; if empty, it is allocated.
    key
        The request's key, if the caller has it.
    plain
        The call, if equal ones can be repeated.
    """
    request.begin(state)
    key, seconds, a = key or request.key(state), request.seconds(state), request.a
    found: _Decided | None = state.decided(key)
    planned = plan_of(state, request) if found is None else found.plan
    with request.running(state):
        if found is None:
            plan = connected_plan(state, planned, a.device, functools.partial(plan_of, state, request))
            found = state.decide(key, _Decided(plan, _shards_of(state, request, plan)))
        plan, shards = found
        of_rows = None if request.cuts_last else request.scales_of_rows()
        scales = None if of_rows is None else of_rows.reshape(shards.batches, shards.rows, 1)
        shard = ScaledRows(a.reshape(shards.batches, shards.rows, shards.width), scales)
        products = _products(request, into)
        if (first := due(state, plan)) is not None:
            parts = _shards_of(state, request, first)
            graph_calls.gather_matmul(state, first, parts, shard, products, seconds, request.return_a)
        if plan.transport == "symmetric memory" and plan.fused:
            of_call = state, plan, shards, shard, products, seconds, request.return_a
            if plan.counted:
                rows, outs = graph_calls.gather_matmul(*of_call)
            else:
                rows, outs = copy_engines.gather_matmul(*of_call, plain)
        else:
            rows, outs = _gather_in_host_order(state, request, plan, shards, shard, products, seconds)
            if plain is not None and can_repeat(plan, plain):
                UnfusedGather.of(plain, a.device, request.out_dtype, request.fast_accum, request.return_a)
    shape = _gathered_shape(state, request)
    gathered = rows.view(shape) if request.return_a else a.new_empty(0)
    return gathered, [out.view(*shape[:-1], out.shape[-1]) for out in outs]


def _shards_of(state: GroupState, request: Request, plan: DistributedPlan) -> Shards:
    a = request.a
    if request.cuts_last:  # whole shards are gathered, rank by rank
        return Shards(1, state.world, math.prod(a.shape[:-1]), a.shape[-1])
    return Shards.of(a.shape, request.dim, state.world, plan.chunks)


def _gather_in_host_order(
    state: GroupState, request: Request, plan: DistributedPlan, shards: Shards, shard: ScaledRows,
    products: list[Product], seconds: float,
) -> tuple[torch.Tensor, list[torch.Tensor]]:  # fmt: skip
    """Gather by gloo's messages, or, unfused, by a collective."""
    a, last = request.a, request.cuts_last

    def memory(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if a.is_cuda or (request.return_a and not last):  # on a GPU a stream may still use the previous buffer
            return a.new_empty(shape, dtype=dtype)
        return state.buffer(name, shape, dtype, a.device)

    data, scales = memory("gathered", shards.shape, a.dtype), None
    if shard.scales is not None:
        scales = memory("scales", (*shards.shape[:-1], 1), torch.float32)
    gathered = ScaledRows(data, scales)
    if plan.transport == "gloo":
        outs = gloo.gather_matmul(state, plan, shards, shard, gathered, [] if last else products, seconds)
        if not last:
            return data, outs
    else:
        agree(state, plan, a.device)
        all_gather(state, shard, gathered)
    if last:  # the ranks' columns side by side
        data = data[0].permute(1, 0, 2).reshape(shards.rows, shards.world * shards.width)
    rows, of_rows = data.flatten(0, -2), None if scales is None else scales.view(-1, 1)
    return data, [product(rows, of_rows, None, seconds) for product in products]
