"""`tilestream.distributed.matmul_reduce_scatter`: a matmul whose parts are sent to their ranks as they are computed."""

from __future__ import annotations

import math
from typing import Literal

import torch

from tilestream.arrival.flat import check_deadline
from tilestream.distributed import checks, gloo
from tilestream.distributed.checks import Operands
from tilestream.distributed.collective import reduce_parts
from tilestream.distributed.dispatch import Form, Op
from tilestream.distributed.group_state import Group, Member, groups_of, member_of, name_of
from tilestream.distributed.plan import DistributedPlan, make_plan
from tilestream.distributed.shards import Part, Shards
from tilestream.ops.limit import limit
from tilestream.ops.operands import Options, autocast, multiply
from tilestream.ops.scales import canonical_scales
from tilestream.runtime import shutdown
from tilestream.runtime.channel import check_device

OP: Op = "matmul_reduce_scatter"
REDUCE_OPS = ("sum", "avg")


def matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    scatter_dim: int = 0,
    reduce_op: Literal["sum", "avg"] = "sum",
    group: Group = None,
    bias: torch.Tensor | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = True,
    form: Form = "auto",
    deadline: float | None = None,
) -> torch.Tensor:
    """The sum over all ranks of ``a @ b``, of which each rank gets its part along ``scatter_dim``; then ``bias``.

    All ranks of the group make the same call, with operands of one shape. What other ranks need is computed first, and
    sent while the rest is computed. Parts travel in the result's dtype and are added in float32, in the order of the
    ranks: the same bits each time. (Where they do not overlap on GPUs: by the group's own reduce-scatter.)

    Parameters
    ----------
    a
        ``[..., M, ..., K]``, at least 2-D: of each rank another part of K.
    b
        ``[K, N]``.
    scatter_dim
        The dimension of the result that is cut, before the last; its extent is a multiple of the number of ranks.
    reduce_op
        ``"sum"``, or ``"avg"`` for the sum divided by the number of ranks.
    group, form, deadline
        As for `all_gather_matmul`; on a GPU the deadline counts from the end of this rank's own matmul.
    bias
        ``[N]``: added once, after the sum (or average).
    scale_a, scale_b, out_dtype, use_fast_accum
        As for `tilestream.matmul`, on ``a @ b``.

    Returns
    -------
    torch.Tensor
        ``[..., M / world, ..., N]``.

    Raises
    ------
    ValueError, TypeError, ArrivalTimeout, GroupBroken
        As `all_gather_matmul`.
    """
    scatter_dim = checks.check_dim(OP, "scatter_dim", scatter_dim, a)
    checks.check_form(OP, form)
    check_one(OP, b)
    check_reduce_op(OP, reduce_op)
    operands = checks.as_lists(OP, b, bias, scale_b, None)
    checks.check_devices(OP, a, b=operands.bs, bias=operands.biases, scale_a=[scale_a], scale_b=operands.scales)
    from tilestream.distributed.library import matmul_reduce_scatter_op

    a, b = autocast(Options(OP), a, b)
    result: torch.Tensor = matmul_reduce_scatter_op(
        a, b, scatter_dim, reduce_op, name_of(OP, group), bias, scale_a, scale_b, out_dtype, use_fast_accum, form,
        -1.0 if deadline is None else check_deadline(deadline), limit(),
    )  # fmt: skip
    return result


def plan_matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    scatter_dim: int = 0,
    group: Group = None,
    form: Form = "auto",
) -> DistributedPlan:
    """How `matmul_reduce_scatter` would run such a call: nothing is sent. ``print(plan.explain())`` says it."""
    scatter_dim = checks.check_dim(OP, "scatter_dim", scatter_dim, a)
    checks.check_form(OP, form)
    check_one(OP, b)
    operands = checks.as_lists(OP, b, None, None, None)
    checks.check_devices(OP, a, b=operands.bs)
    a, b = autocast(Options(OP), a, b)
    *between, inside = (member_of(OP, x) for x in groups_of(OP, group))
    rehearse(OP, a, operands._replace(bs=[b]), None, None)
    if not between:
        return plan_of(inside, a, b, scatter_dim, form)
    part_shape(between[0].world * inside.world, a, b, scatter_dim)
    of_node = a.narrow(scatter_dim, 0, a.shape[scatter_dim] // between[0].world)
    return plan_of(inside, of_node, b, scatter_dim, form).over(between[0].world)


def check_reduce_op(op: str, reduce_op: str) -> None:
    """Raise unless it is one of `REDUCE_OPS`."""
    if reduce_op not in REDUCE_OPS:
        raise ValueError(f"{op}: reduce_op={reduce_op!r}; it is one of {', '.join(REDUCE_OPS)}")


def check_one(op: str, b: object) -> None:
    """Raise unless B is one tensor."""
    if not isinstance(b, torch.Tensor):
        raise TypeError(
            f"{op}: b is a {type(b).__name__}; it is one torch.Tensor: torch.cat(b, -1), or a call for each of them"
        )


def rehearse(
    op: str, a: torch.Tensor, operands: Operands, scale_a: torch.Tensor | None, out_dtype: torch.dtype | None
) -> torch.dtype:
    """Raise what the matmul would, in the name of ``op``; returns the dtype of what travels."""
    of_rows = (math.prod(a.shape[:-1]), a.shape[-1]), a.dtype
    (travels,) = checks.rehearse(op, of_rows, operands, _of_rows(a, scale_a), out_dtype)
    return travels


def part_shape(world: int, a: torch.Tensor, b: torch.Tensor, dim: int) -> tuple[int, ...]:
    """Of one rank's part of the result."""
    if dim == a.dim() - 1:
        raise ValueError(f"{OP}: scatter_dim={dim} is the last; one before it is cut: 0 to {a.dim() - 2}")
    if a.shape[dim] % world:
        raise ValueError(
            f"{OP}: a {list(a.shape)} has {a.shape[dim]} rows along scatter_dim={dim}; it is a multiple of the "
            f"{world} ranks: pad it, and cut the padding off the result"
        )
    shape = [*a.shape[:-1], b.shape[-1]]
    shape[dim] //= world
    return tuple(shape)


def plan_of(
    member: Member, a: torch.Tensor, b: torch.Tensor, dim: int, form: Form, **more: object
) -> DistributedPlan:  # fmt: skip
    """The plan of a call; ``more``: what else ranks must call alike."""
    agreed = {"a": f"{list(a.shape)[:-1]} rows {a.dtype}".replace("torch.", ""), "scatter_dim": dim, **more}
    return make_plan(OP, member, part_shape(member.world, a, b, dim), dim, a, b.shape[-1], a.shape[-1], form, agreed)


def run(
    member: Member, a: torch.Tensor, b: torch.Tensor, dim: int, reduce_op: str, bias: torch.Tensor | None,
    scale_a: torch.Tensor | None, scale_b: torch.Tensor | None, out_dtype: torch.dtype | None,
    fast_accum: bool, form: Form, deadline: float | None,
) -> torch.Tensor:  # fmt: skip
    """What the registered op does."""
    if a.is_cuda:
        check_device(a.device.index)  # an expiry says more than that the group is broken since
    member.check()
    seconds = checks.seconds_of(deadline, member, a.device.type)
    rows = math.prod(a.shape[:-1])
    operands = Operands([b], [bias], [scale_b], ["none"])
    travels = rehearse(OP, a, operands, scale_a, out_dtype)
    shape = part_shape(member.world, a, b, dim)
    more = {"travels": str(travels), "reduce_op": reduce_op}
    plan = plan_of(member, a, b, dim, form, **more)
    wide = torch.float64 if travels == torch.float64 else torch.float32
    scales, of_b = canonical_scales(OP, scale_a, scale_b, a.shape[:-1], (), (rows, b.shape[-1]))

    with shutdown.call(), member.call(), torch.no_grad(), torch.autocast(a.device.type, enabled=False):
        if a.is_cuda:
            from tilestream.distributed.symmetric import reach

            if reach(member, plan, a.device):
                plan = plan_of(member, a, b, dim, form, **more)
        shards = Shards.of(shape, dim, member.world, plan.chunks)
        of_a = a.reshape(*shards.shape[:-1], a.shape[-1])
        if plan.transport == "symmetric memory" and plan.fused:
            return _pulled(
                member, plan, shards, of_a, b, travels, (scales, of_b), fast_accum, reduce_op, bias, seconds
            ).view(shape)
        if plan.transport == "gloo":
            of_rows = None if scales is None or scales.numel() == 1 else scales.reshape(*shards.shape[:-1], 1)

            def product(rank: int, part: Part, into: torch.Tensor) -> None:
                at = (part.batch, rank, slice(part.begin, part.end))
                scale = scales if of_rows is None else of_rows[at]
                if into.numel():
                    options = Options(
                        OP, out=into, out_dtype=into.dtype, scale_a=scale, scale_b=of_b, fast_accum=fast_accum
                    )
                    multiply(of_a[at], b, options)

            total = gloo.matmul_scatter(member, plan, shards, product, (travels, wide), seconds)
        else:
            options = Options(OP, out_dtype=travels, scale_a=scales, scale_b=of_b, fast_accum=fast_accum)
            whole = multiply(of_a.reshape(rows, -1), b, options).view(shards.shape)
            total = reduce_parts(member, plan, whole.transpose(0, 1).contiguous())  # of one batch no copy
            if reduce_op == "avg" or bias is not None:
                total = total.to(wide)
    if reduce_op == "avg":
        total /= member.world
    if bias is not None:
        total += bias
    return total.to(travels).view(shape)


def _pulled(
    member: Member, plan: DistributedPlan, shards: Shards, a: torch.Tensor, b: torch.Tensor, travels: torch.dtype,
    scales: tuple[torch.Tensor | None, torch.Tensor | None], fast_accum: bool, reduce_op: str,
    bias: torch.Tensor | None, seconds: float,
) -> torch.Tensor:  # fmt: skip
    """By copy engines, while the rest is computed."""
    from tilestream.distributed.gpu_reduce_scatter import matmul_scatter
    from tilestream.ops.publish import Publication, matmul_published

    # A view, unless rows lie otherwise in memory: as torch's compiler has what was gathered along a later dimension.
    rows, workers = a.reshape(shards.total, -1), limit()

    def product(out: torch.Tensor, publication: Publication, epoch: int, rows_per_chunk: int, pivot: int) -> str:
        return matmul_published(
            rows, b, out, publication, epoch, rows_per_chunk, pivot, scale_a=scales[0],
            scale_b=scales[1], fast_accum=fast_accum, limit=workers, op=OP,
        )  # fmt: skip

    return matmul_scatter(member, plan, shards, a, travels, product, reduce_op == "avg", bias, seconds)


def _of_rows(a: torch.Tensor, scale_a: torch.Tensor | None) -> torch.Tensor | None:
    """A stand-in for the scales of ``a``'s rows, seen as a matrix; the real ones are checked by `canonical_scales`."""
    if scale_a is None or scale_a.numel() == 1:
        return scale_a
    return torch.empty(math.prod(a.shape[:-1]), 1, dtype=scale_a.dtype, device="meta")
