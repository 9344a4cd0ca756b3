"""All-gather + matmul inside a node: the call of `tilestream.distributed.all_gather_matmul`, planned and run."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tilestream.arrival.arrival import Arrival
from tilestream.distributed import copy_engines, gloo
from tilestream.distributed.collective import agree, all_gather
from tilestream.distributed.gathered import Product, ScaledRows
from tilestream.distributed.group_state import GroupState
from tilestream.distributed.plan import DistributedPlan
from tilestream.distributed.planner import connected_plan, make_plan
from tilestream.distributed.request import Request
from tilestream.distributed.shards import Shards


class Call(NamedTuple):
    """A checked and planned call; ``shape`` is that of all ranks' rows."""

    plan: DistributedPlan
    shards: Shards
    shape: tuple[int, ...]
    shard: ScaledRows
    products: list[Product]


def plan_of(state: GroupState, request: Request) -> DistributedPlan:
    """Check a call, and plan it. Nothing is sent."""
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


def _prepare(state: GroupState, request: Request, plan: DistributedPlan, into: Sequence[torch.Tensor]) -> Call:
    a = request.a
    shards, scales = Shards.of(a.shape, request.dim, state.world, plan.chunks), None
    if request.cuts_last:  # gathered as whole shards, rank by rank
        shards = Shards(1, state.world, math.prod(a.shape[:-1]), a.shape[-1])
    elif request.scale_a is not None:
        of_rows = request.scales_of_rows()
        assert of_rows is not None
        scales = of_rows.reshape(shards.batches, shards.rows, 1)

    def product(i: int, out: torch.Tensor | None) -> Product:
        def compute(
            a: torch.Tensor, scale: torch.Tensor | None, arrival: Arrival | None, deadline: float
        ) -> torch.Tensor:
            scale = request.scale_a if request.cuts_last else scale
            late = None if arrival is None else deadline
            return request.product(a, i, out=out, scale_a=scale, arrival=arrival, deadline=late)

        return compute

    places: Sequence[torch.Tensor | None] = into or [None] * len(request.bs)
    products = [product(i, place) for i, place in enumerate(places)]
    shard = ScaledRows(a.reshape(shards.batches, shards.rows, shards.width), scales)
    return Call(plan, shards, _gathered_shape(state, request), shard, products)


def run(
    state: GroupState, request: Request, into: Sequence[torch.Tensor] = ()
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """All ranks' rows (empty unless ``return_a``), and the products.

    ``into``: the products' memory, ``[rows of all ranks, N]`` each; if empty, it is allocated.
    """
    request.begin(state)
    seconds, a = request.seconds(state), request.a
    plan = plan_of(state, request)
    with request.running(state):
        plan = connected_plan(state, plan, a.device, functools.partial(plan_of, state, request))
        call = _prepare(state, request, plan, into)
        if plan.transport == "symmetric memory" and plan.fused:
            rows, outs = copy_engines.gather_matmul(
                state, plan, call.shards, call.shard, call.products, seconds, request.return_a
            )
        else:
            rows, outs = _gather_in_host_order(state, request, call, seconds)
    whole = rows.view(call.shape) if request.return_a else a.new_empty(0)
    return whole, [out.view(*call.shape[:-1], out.shape[-1]) for out in outs]


def _gather_in_host_order(
    state: GroupState, request: Request, call: Call, seconds: float
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """By gloo's messages, or unfused by a collective."""
    a, plan, shards, last = request.a, call.plan, call.shards, request.cuts_last

    def memory(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if a.is_cuda or (request.return_a and not last):  # on a GPU another stream may still use the previous call's
            return a.new_empty(shape, dtype=dtype)
        return state.buffer(name, shape, dtype, a.device)

    data, scales = memory("gathered", shards.shape, a.dtype), None
    if call.shard.scales is not None:
        scales = memory("scales", (*shards.shape[:-1], 1), torch.float32)
    gathered, by_gloo = ScaledRows(data, scales), plan.transport == "gloo"
    if by_gloo:
        products = [] if last else call.products
        outs = gloo.gather_matmul(state, plan, shards, call.shard, gathered, products, seconds)
        if not last:
            return data, outs
    else:
        agree(state, plan, a.device)
        all_gather(state, call.shard, gathered)
    if last:  # the ranks' columns side by side
        data = data[0].permute(1, 0, 2).reshape(shards.rows, shards.world * shards.width)
    rows, of_rows = data.view(-1, call.shape[-1]), None if scales is None else scales.view(-1, 1)
    return data, [product(rows, of_rows, None, seconds) for product in call.products]
