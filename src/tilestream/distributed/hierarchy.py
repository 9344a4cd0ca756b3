"""All-gather + matmul and matmul + reduce-scatter over several nodes, made of those inside one.

Gather::

    between nodes:  this rank's shard to its like in all other nodes, once to each, from the beginning
    step 0:         gather the own node's shards inside the node, with their matmul
    step j:         the shards of the node j before, when this rank's like there has sent its own: likewise

Sum::

    step j:         the part of the node j after: the matmul, and the sum inside the node; send it to this rank's like
    last:           the own part; then all nodes' sums of it are added, in the order of the nodes

What a rank computes is what one node of all ranks would: rows in the order of the mesh. A step is the op inside the
node, fused or not as the dispatch says of it, and the steps of a call overlap with what travels between nodes:
`tilestream.distributed.nodes` is a model of how far.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch

from tilestream.distributed import all_gather, checks, reduce_scatter
from tilestream.distributed.checks import Operands
from tilestream.distributed.collective import sum_of_parts
from tilestream.distributed.dispatch import Form
from tilestream.distributed.group_state import Member, member_by_name, member_names
from tilestream.distributed.internode import Steps, over_nodes
from tilestream.distributed.plan import DistributedPlan
from tilestream.ops.library import result_dtype
from tilestream.ops.request import Request, multiply
from tilestream.runtime.channel import check_device

T = TypeVar("T")


class Hierarchy(NamedTuple):
    """What this process is in the two groups of a mesh: of its like in each node, and of its own node."""

    between: Member
    inside: Member

    @property
    def world(self) -> int:
        """Ranks of all nodes."""
        return self.between.world * self.inside.world

    def begin(self, x: torch.Tensor, deadline: float | None) -> float:
        """Raise what is known to be wrong; until when (of `time.perf_counter`) a call that begins now may wait."""
        if x.is_cuda:
            check_device(x.device.index)
        for member in self:
            member.check()
        return time.perf_counter() + checks.seconds_of(deadline, self.between, x.device.type)

    def call(self, plan: DistributedPlan, like: Sequence[torch.Tensor], end: float, compute: Callable[[Steps], T]) -> T:
        """`over_nodes`; what it ends with breaks the node's group, too: its ranks will not find this one at a step."""
        with self.between.call(), torch.no_grad():
            try:
                return over_nodes(self.between, plan.between_nodes, like, _left(end), compute)
            except BaseException as error:
                if self.between.broken and not self.inside.broken:
                    self.inside.break_(f"between nodes: {type(error).__name__}: {error}")
                raise


def of_name(op: str, name: str) -> Member | Hierarchy:
    """What a registered op's ``group`` says."""
    names = [member_by_name(op, x) for x in member_names(name)]
    return names[0] if len(names) == 1 else Hierarchy(*names)


def _left(end: float) -> float:
    return max(end - time.perf_counter(), 1e-3)


def all_gather_matmul(
    group: Hierarchy, a_shard: torch.Tensor, operands: Operands, dim: int, scale_a: torch.Tensor | None,
    out_dtype: torch.dtype | None, fast_accum: bool, return_a: bool, form: Form, deadline: float | None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:  # fmt: skip
    """As `tilestream.distributed.all_gather.run`."""
    if dim == a_shard.dim() - 1:
        return _whole_then_products(
            group, a_shard, operands, scale_a, out_dtype, fast_accum, return_a, form, deadline
        )  # fmt: skip
    between, inside, end = *group, group.begin(a_shard, deadline)
    plan = all_gather.prepare(inside, a_shard, operands, dim, scale_a, out_dtype, fast_accum, form).plan
    mine = [a_shard.contiguous()]
    if scale_a is not None:  # each rank's own
        rows = (*a_shard.shape[:-1], 1)
        seen = scale_a.unsqueeze(-1) if scale_a.dim() == 1 and scale_a.numel() > 1 else scale_a
        mine.append((scale_a.view(()) if scale_a.numel() == 1 else seen).expand(rows).contiguous())
    shape = list(a_shard.shape[:-1])
    shape[dim] *= group.world
    outs = [
        a_shard.new_empty((*shape, b.shape[-1]), dtype=result_dtype(a_shard, out_dtype)) for b in operands.bs
    ]  # fmt: skip
    in_place = math.prod(shape[:dim]) == 1  # a node's rows lie together

    def compute(steps: Steps) -> list[torch.Tensor]:
        for step in range(1, between.world):
            steps.put(step, mine)
        wholes: dict[int, torch.Tensor] = {}
        for step in range(between.world):
            node = (between.rank - step) % between.world
            shard, *scale = steps.get(step) if step else mine
            places = [x.narrow(dim, node * (shape[dim] // between.world), shape[dim] // between.world) for x in outs]
            wholes[node], products = all_gather.run(
                inside, shard, operands, dim, scale[0] if scale else None, out_dtype, fast_accum, return_a, form,
                _left(end), [x.view(-1, x.shape[-1]) for x in places] if in_place else (),
            )  # fmt: skip
            for place, product in () if in_place else zip(places, products, strict=True):
                place.copy_(product)
        return [wholes[node] for node in range(between.world)]

    wholes = group.call(plan, mine, end, compute)
    return torch.cat(wholes, dim) if return_a else wholes[0], outs


def _whole_then_products(
    group: Hierarchy, a_shard: torch.Tensor, operands: Operands, scale_a: torch.Tensor | None,
    out_dtype: torch.dtype | None, fast_accum: bool, return_a: bool, form: Form, deadline: float | None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:  # fmt: skip
    """Of columns that are gathered: no tile can begin before all of K is there."""
    if scale_a is not None and scale_a.numel() > 1:
        raise ValueError(
            f"{all_gather.OP}: scale_a has {scale_a.numel()} elements; with K cut (gather_dim={a_shard.dim() - 1}) it "
            "has one"
        )
    k = a_shard.shape[-1] * group.world
    rows = math.prod(a_shard.shape[:-1])
    checks.rehearse(all_gather.OP, ((rows, k), a_shard.dtype), operands, scale_a, out_dtype)
    none = Operands([], [], [], [])
    shard = a_shard.unsqueeze(0)  # ranks side by side, and then their columns
    whole, _ = all_gather_matmul(group, shard, none, 0, None, None, True, True, form, deadline)
    a = whole.movedim(0, -2).reshape(*a_shard.shape[:-1], k)
    outs = []
    for b, bias, scale_b, activation in zip(*operands, strict=True):
        request = Request(
            all_gather.OP, a, b, bias=bias, activation=None if activation == "none" else activation,
            out_dtype=out_dtype, scale_a=scale_a, scale_b=scale_b, fast_accum=fast_accum,
        )  # fmt: skip
        with torch.no_grad(), torch.autocast(a.device.type, enabled=False):
            outs.append(multiply(request))
    return a if return_a else a_shard.new_empty(0), outs


def matmul_reduce_scatter(
    group: Hierarchy, a: torch.Tensor, b: torch.Tensor, dim: int, reduce_op: str, bias: torch.Tensor | None,
    scale_a: torch.Tensor | None, scale_b: torch.Tensor | None, out_dtype: torch.dtype | None, fast_accum: bool,
    form: Form, deadline: float | None,
) -> torch.Tensor:  # fmt: skip
    """As `tilestream.distributed.reduce_scatter.run`."""
    between, inside, end = *group, group.begin(a, deadline)
    travels = reduce_scatter.rehearse(
        reduce_scatter.OP, a, Operands([b], [bias], [scale_b], ["none"]), scale_a, out_dtype
    )
    shape = reduce_scatter.part_shape(group.world, a, b, dim)
    parts = a.split(max(a.shape[dim] // between.world, 1), dim) if a.shape[dim] else [a] * between.world
    scales = [scale_a] * between.world
    if scale_a is not None and scale_a.numel() > 1:
        seen = scale_a.unsqueeze(-1) if scale_a.dim() == 1 else scale_a
        scales = list(seen.expand(*a.shape[:-1], 1).split(parts[0].shape[dim], dim))
    plan = reduce_scatter.plan_of(inside, parts[0], b, dim, form, travels=str(travels), reduce_op=reduce_op)
    wide = torch.float64 if travels == torch.float64 else torch.float32

    def compute(steps: Steps) -> torch.Tensor:
        for step in (*range(1, between.world), 0):
            node = (between.rank + step) % between.world
            mine = reduce_scatter.run(
                inside, parts[node], b, dim, "sum", None, scales[node], scale_b, travels, fast_accum, form, _left(end)
            )  # fmt: skip
            if step:
                steps.put(step, [mine])
        theirs = {(between.rank - step) % between.world: steps.get(step)[0] for step in range(1, between.world)}
        total = torch.zeros(shape, dtype=wide, device=a.device)
        for node in range(between.world):  # in the order of the nodes: the same bits each time
            total += mine if node == between.rank else theirs[node]
        return total

    total = group.call(plan, [torch.empty(shape, dtype=travels, device=a.device)], end, compute)
    if reduce_op == "avg":
        total /= group.world
    if bias is not None:
        total += bias
    return total.to(travels)


def sum_of_shards(op: str, name: str, whole: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum over ranks of this rank's part of ``whole``, by the groups' own reduce-scatters, inside and between."""
    group = of_name(op, name)
    if isinstance(group, Member):
        return sum_of_parts(group, torch.stack(whole.chunk(group.world, dim)))
    between, inside = group
    parts = torch.stack(whole.chunk(group.world, dim)).unflatten(0, (between.world, inside.world))
    return sum_of_parts(between, sum_of_parts(inside, parts.transpose(0, 1).contiguous()))
