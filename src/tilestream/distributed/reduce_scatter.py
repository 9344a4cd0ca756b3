"""Matmul + reduce-scatter inside a node: `tilestream.distributed.matmul_reduce_scatter`, planned and run."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from tilestream.distributed import gloo, gpu_reduce_scatter, graph_calls
from tilestream.distributed.collective import agree, reduce_scatter
from tilestream.distributed.group_state import GroupState
from tilestream.distributed.plan import DistributedPlan
from tilestream.distributed.planner import connected_plan, due, make_plan
from tilestream.distributed.repeats import PlainCall
from tilestream.distributed.request import Request
from tilestream.distributed.shards import Part, Shards
from tilestream.distributed.unfused import UnfusedSum, can_repeat, finished
from tilestream.kernels.cpu.epilogue import wide_dtype
from tilestream.ops.limit import limit
from tilestream.ops.publish import Publication, matmul_published
from tilestream.ops.scales import canonical_scales


def travel_dtype(request: Request) -> torch.dtype:
    """Check the matmul's operands, and return the dtype of the partial sums that travel."""
    (dtype,) = request.rehearse(math.prod(request.a.shape[:-1]), request.a.shape[-1])
    return dtype


def part_shape(request: Request, world: int) -> tuple[int, ...]:
    """The shape of one rank's part of the result."""
    a, dim = request.a, request.dim
    if request.cuts_last:
        raise ValueError(f"{request.op}: scatter_dim={dim} is the last; one before it is cut: 0 to {a.dim() - 2}")
    if a.shape[dim] % world:
        raise ValueError(
            f"{request.op}: a {list(a.shape)} has {a.shape[dim]} rows along scatter_dim={dim}; it must be a multiple "
            f"of the {world} ranks: pad it, and cut the padding off the result"
        )
    shape = [*a.shape[:-1], request.b.shape[-1]]
    shape[dim] //= world
    return tuple(shape)


def plan_of(state: GroupState, request: Request, **more: object) -> DistributedPlan:
    """The plan of a call; ``more``: further values that the ranks compare."""
    a = request.a
    agreed = {"a": f"{list(a.shape)[:-1]} rows {a.dtype}".replace("torch.", ""), "scatter_dim": request.dim, **more}
    return make_plan(state, request, part_shape(request, state.world), a.shape[-1], agreed)


class _Decided(NamedTuple):
    """The decisions that equal calls share: ``shape`` is a part's, ``dtype`` is that of the data that travel."""

    plan: DistributedPlan
    shards: Shards
    shape: tuple[int, ...]
    dtype: torch.dtype


def run(state: GroupState, request: Request, key: object = None, plain: PlainCall | None = None) -> torch.Tensor:
    """The rank's own part of the sum over all ranks.

    Parameters
    ----------
    key
        The request's key, if the caller has it.
    plain
        The call, if equal ones can be repeated.
    """
    request.begin(state)
    key, seconds, a, b = key or request.key(state), request.seconds(state), request.a, request.b
    found: _Decided | None = state.decided(key)
    if found is None:
        dtype = travel_dtype(request)
        make = functools.partial(plan_of, state, request, travels=str(dtype), reduce_op=request.reduce_op)
        shape, plan = part_shape(request, state.world), make()
    rows = math.prod(a.shape[:-1])
    if request.scale_a is not None or request.scale_b is not None:
        shape_of_all = (rows, b.shape[-1])
        of_a, of_b = canonical_scales(request.op, request.scale_a, request.scale_b, a.shape[:-1], (), shape_of_all)
        request = request._replace(scale_a=of_a, scales_b=[of_b])
    with request.running(state):
        if found is None:
            plan = connected_plan(state, plan, a.device, make)
            shards = Shards.of(shape, request.dim, state.world, plan.chunks)
            found = state.decide(key, _Decided(plan, shards, shape, dtype))
        plan, shards, shape, dtype = found
        if (first := due(state, plan)) is not None:
            parts = Shards.of(shape, request.dim, state.world, first.chunks)
            graph_calls.matmul_scatter(state, first, parts, request, _by_rank(parts, a), dtype, seconds)
        if plan.transport == "symmetric memory" and plan.fused:
            if plan.counted:
                by_rank = _by_rank(shards, a)
                return graph_calls.matmul_scatter(state, plan, shards, request, by_rank, dtype, seconds).view(shape)
            return _by_copy_engines(state, plan, shards, request, dtype, seconds, plain).view(shape)
        if plan.transport == "gloo":
            total = _by_gloo(state, plan, shards, request, dtype, seconds)
        else:
            by_rank = _by_rank(shards, a).reshape(rows, -1)
            whole = request.product(by_rank, bias=None, out_dtype=dtype).view(shards.shape)
            agree(state, plan, a.device)
            total = reduce_scatter(state, whole.transpose(0, 1).contiguous())  # a single batch needs no copy
            if plain is not None and request.reduce_op == "sum" and can_repeat(plan, plain):
                UnfusedSum.of(plain, a.device, dtype, request.fast_accum)
    return finish(request, total, state.world, dtype).view(shape)


def finish(request: Request, total: torch.Tensor, world: int, dtype: torch.dtype) -> torch.Tensor:
    """The result from a sum over all ranks: the sum, or the average if requested, plus the bias."""
    return finished(total, dtype, request.bias, world if request.reduce_op == "avg" else None)


def _by_rank(shards: Shards, a: torch.Tensor) -> torch.Tensor:
    """``a`` as ``[batches, world, rows, K]``: a view if its strides allow one, else a copy."""
    return a.reshape(*shards.shape[:-1], a.shape[-1])


def _by_gloo(
    state: GroupState, plan: DistributedPlan, shards: Shards, request: Request, dtype: torch.dtype, seconds: float
) -> torch.Tensor:
    scale, a = request.scale_a, _by_rank(shards, request.a)
    of_rows = None if scale is None or scale.numel() == 1 else scale.reshape(*shards.shape[:-1], 1)

    def product(rank: int, part: Part, into: torch.Tensor) -> None:
        at = (part.batch, rank, slice(part.begin, part.end))
        if into.numel():
            scale_a = scale if of_rows is None else of_rows[at]
            request.product(a[at], bias=None, out=into, out_dtype=into.dtype, scale_a=scale_a)

    return gloo.matmul_scatter(state, plan, shards, product, (dtype, wide_dtype(dtype)), seconds)


def _by_copy_engines(
    state: GroupState, plan: DistributedPlan, shards: Shards, request: Request, dtype: torch.dtype, seconds: float,
    plain: PlainCall | None = None,
) -> torch.Tensor:  # fmt: skip
    rows, workers = _by_rank(shards, request.a).reshape(shards.total, -1), limit()

    def product(out: torch.Tensor, publication: Publication, epoch: int, rows_per_chunk: int, pivot: int) -> str:
        return matmul_published(
            rows, request.b, out, publication, epoch, rows_per_chunk, pivot, scale_a=request.scale_a,
            scale_b=request.scale_b, fast_accum=request.fast_accum, limit=workers, op=request.op,
        )  # fmt: skip

    return gpu_reduce_scatter.matmul_scatter(state, plan, shards, request, dtype, product, seconds, plain)
