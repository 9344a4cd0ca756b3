"""The ops over several nodes, composed of the ops inside one node.

Gather::

    between nodes:  send this rank's shard to its counterpart in every other node once, from the beginning
    step 0:         gather the own node's shards inside the node, with their matmul
    step j:         the same for the shards of the node j before this one, once its counterpart has sent its shard

Reduce-scatter::

    step j:         compute the part of the node j after this one; sum it inside this node; send it to the counterpart
    last:           compute the own part; then add all nodes' sums of it, in the order of the nodes

A rank's result has the same rows as in one node with all ranks, in the order of the mesh. Each step is the op inside
the node, fused or not, and overlaps with the transfers between nodes. `tilestream.distributed.nodes` models the time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch

from tilestream.distributed import all_gather, collective, reduce_scatter
from tilestream.distributed.group_state import GroupState, states_of
from tilestream.distributed.internode import Steps, exchange_between_nodes
from tilestream.distributed.plan import DistributedPlan
from tilestream.distributed.request import Request
from tilestream.kernels.cpu.epilogue import wide_dtype
from tilestream.ops.library import result_dtype

T = TypeVar("T")


class NodeMesh(NamedTuple):
    """The two groups of a mesh: one of this rank and its counterparts in other nodes, one of its node's ranks."""

    internode: GroupState
    intranode: GroupState

    @property
    def world(self) -> int:
        """Ranks of all nodes."""
        return self.internode.world * self.intranode.world

    def begin(self, request: Request) -> float:
        """Raise if a group is broken; returns the end of the call's deadline on `time.perf_counter`'s clock."""
        request.begin(*self)
        return time.perf_counter() + request.seconds(self.internode)

    def call(self, plan: DistributedPlan, like: Sequence[torch.Tensor], end: float, compute: Callable[[Steps], T]) -> T:
        """Call `exchange_between_nodes`. A failure also breaks the node's group, since its ranks would wait."""
        with self.internode.call(), torch.no_grad():
            try:
                return exchange_between_nodes(self.internode, plan.internode, like, _left(end), compute)
            except BaseException as error:
                if self.internode.broken and not self.intranode.broken:
                    self.intranode.break_(f"between nodes: {type(error).__name__}: {error}")
                raise


def _left(end: float) -> float:
    return max(end - time.perf_counter(), 1e-3)


def all_gather_matmul(mesh: NodeMesh, request: Request) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """See `tilestream.distributed.all_gather.run`."""
    if request.cuts_last:
        return _gather_then_multiply(mesh, request)
    (internode, intranode), end, dim = mesh, mesh.begin(request), request.dim
    a_shard, scales = request.a, request.scales_of_rows()
    plan = all_gather.plan_of(intranode, request._replace(deadline=_left(end)))  # which each step has
    mine = [a_shard.contiguous()]
    if scales is not None:  # each rank has its own
        mine.append(scales.contiguous())
    shape = list(a_shard.shape[:-1])
    shape[dim] *= mesh.world
    dtype = result_dtype(a_shard, request.out_dtype)
    outs = [a_shard.new_empty((*shape, b.shape[-1]), dtype=dtype) for b in request.bs]
    in_place = math.prod(shape[:dim]) == 1  # a node's rows are contiguous

    def compute(steps: Steps) -> list[torch.Tensor]:
        for step in range(1, internode.world):
            steps.put(step, mine)
        gathered: dict[int, torch.Tensor] = {}
        for step in range(internode.world):
            node = (internode.rank - step) % internode.world
            shard, *scale = steps.get(step) if step else mine
            rows = shape[dim] // internode.world
            places = [x.narrow(dim, node * rows, rows) for x in outs]
            of_node = request._replace(a=shard, scale_a=scale[0] if scale else None, deadline=_left(end))
            into = [x.view(-1, x.shape[-1]) for x in places] if in_place else ()
            gathered[node], products = all_gather.run(intranode, of_node, into)
            for place, product in () if in_place else zip(places, products, strict=True):
                place.copy_(product)
        return [gathered[node] for node in range(internode.world)]

    gathered = mesh.call(plan, mine, end, compute)
    return torch.cat(gathered, dim) if request.return_a else gathered[0], outs


def _gather_then_multiply(mesh: NodeMesh, request: Request) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Gather columns, then multiply: no tile can begin before all of K has arrived."""
    request.check_one_scale()
    a_shard = request.a
    k = a_shard.shape[-1] * mesh.world
    request.rehearse(math.prod(a_shard.shape[:-1]), k)
    # The ranks' shards are gathered along a new first dimension, and then concatenated along K.
    rows = request._replace(
        a=a_shard.unsqueeze(0), bs=[], biases=[], activations=[], scales_b=[], scale_a=None, dim=0, out_dtype=None,
        fast_accum=True, return_a=True,
    )  # fmt: skip
    gathered, _ = all_gather_matmul(mesh, rows)
    a = gathered.movedim(0, -2).reshape(*a_shard.shape[:-1], k)
    with torch.no_grad(), torch.autocast(a.device.type, enabled=False):
        outs = [request.product(a, i) for i in range(len(request.bs))]
    return a if request.return_a else a_shard.new_empty(0), outs


def matmul_reduce_scatter(mesh: NodeMesh, request: Request) -> torch.Tensor:
    """See `tilestream.distributed.reduce_scatter.run`."""
    (internode, intranode), end, a, dim = mesh, mesh.begin(request), request.a, request.dim
    nodes, dtype = internode.world, reduce_scatter.travel_dtype(request)
    shape = reduce_scatter.part_shape(request, mesh.world)
    parts = a.split(max(a.shape[dim] // nodes, 1), dim) if a.shape[dim] else [a] * nodes
    scales = [request.scale_a] * nodes
    if request.scale_a is not None and request.scale_a.numel() > 1:
        of_rows = request.scales_of_rows()
        assert of_rows is not None
        scales = list(of_rows.split(parts[0].shape[dim], dim))
    plan = reduce_scatter.plan_of(
        intranode, request._replace(a=parts[0], deadline=_left(end)), travels=str(dtype), reduce_op=request.reduce_op
    )  # fmt: skip
    sums = request._replace(reduce_op="sum", biases=[None], out_dtype=dtype)

    def compute(steps: Steps) -> torch.Tensor:
        for step in (*range(1, nodes), 0):
            node = (internode.rank + step) % nodes
            of_node = sums._replace(a=parts[node], scale_a=scales[node], deadline=_left(end))
            mine = reduce_scatter.run(intranode, of_node)
            if step:
                steps.put(step, [mine])
        theirs = {(internode.rank - step) % nodes: steps.get(step)[0] for step in range(1, nodes)}
        total = torch.zeros(shape, dtype=wide_dtype(dtype), device=a.device)
        for node in range(nodes):  # in the order of the nodes, for the same bits each time
            total += mine if node == internode.rank else theirs[node]
        return total

    total = mesh.call(plan, [torch.empty(shape, dtype=dtype, device=a.device)], end, compute)
    return reduce_scatter.finish(request, total, mesh.world, dtype)


def sum_of_parts(op: str, name: str, whole: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum over all ranks of this rank's part of ``whole``, by the groups' own reduce-scatters."""
    states = states_of(op, name)
    parts = torch.stack(whole.chunk(math.prod(state.world for state in states), dim))
    if len(states) == 1:
        return collective.reduce_scatter(states[0], parts)
    internode, intranode = states
    parts = parts.unflatten(0, (internode.world, intranode.world)).transpose(0, 1).contiguous()
    return collective.reduce_scatter(internode, collective.reduce_scatter(intranode, parts))
