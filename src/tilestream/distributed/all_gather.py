"""`tilestream.distributed.all_gather_matmul`: a matmul whose rows are still being gathered from the other ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tilestream.arrival.arrival import Arrival
from tilestream.arrival.flat import check_deadline
from tilestream.distributed import checks, gloo
from tilestream.distributed.checks import Operands, Tensors
from tilestream.distributed.collective import gather_whole
from tilestream.distributed.dispatch import Form, Op
from tilestream.distributed.gathered import Product, Whole
from tilestream.distributed.group_state import Group, Member, groups_of, member_of, name_of
from tilestream.distributed.plan import DistributedPlan, make_plan
from tilestream.distributed.shards import Shards
from tilestream.ops.limit import limit
from tilestream.ops.operands import Options, autocast, multiply
from tilestream.runtime import shutdown
from tilestream.runtime.channel import check_device

OP: Op = "all_gather_matmul"


def all_gather_matmul(
    a_shard: torch.Tensor,
    b: torch.Tensor | Sequence[torch.Tensor],
    *,
    gather_dim: int = 0,
    group: Group = None,
    bias: torch.Tensor | Tensors | None = None,
    activation: str | Sequence[str | None] | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | Tensors | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = True,
    return_a: bool = False,
    form: Form = "auto",
    deadline: float | None = None,
) -> torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, torch.Tensor | list[torch.Tensor]]:
    """``A @ b`` for each ``b``, where ``A`` is ``a_shard`` of all ranks, one after the other along ``gather_dim``.

    All ranks of the group make the same call, with shards of one shape. The matmul begins at once, with this rank's own
    rows, and takes those of the others as they come in: together they take about as long as the longer of the two.

    Parameters
    ----------
    a_shard
        ``[..., M / world, ..., K]``, at least 2-D, any strides: this rank's part of ``A``.
    b
        ``[K, N]``, or a list of such, each with an N of its own (its columns may be other ones on each rank): one
        gather serves them all.
    gather_dim
        The dimension that is cut. Any before the last overlaps, and is gathered without a copy; the last does not.
    group
        The process group; None: the default one. Of at most 8 ranks. Or a `torch.distributed.DeviceMesh`: of one
        dimension its group; of two, for ranks on several nodes, all its ranks in its order, ``(nodes, ranks of one)``.
        Then what comes from other nodes is sent there once, and passed on inside the node: see the guide.
    bias, activation, scale_b
        As for `tilestream.matmul`; a list with one for each ``b``, or one activation for all.
    scale_a
        float32 of one element, or one a row of ``a_shard`` (what broadcasts to ``[..., M / world, ..., 1]``). It is
        gathered, too: each rank's own.
    out_dtype, use_fast_accum
        As for `tilestream.matmul`.
    return_a
        Whether ``A`` is wanted, too.
    form
        ``"fused"`` or ``"unfused"``, on all ranks alike; ``"auto"``: what a table, or where that is silent a model,
        says. See `plan_all_gather_matmul`.
    deadline
        Seconds from the call (GPU: from the kernel's start) after which nothing is waited for any more; None: the
        group's own timeout.

    Returns
    -------
    torch.Tensor or list of torch.Tensor
        ``[..., M, ..., N]``, one for each ``b``: a tensor where ``b`` is one. With ``return_a``: ``(A, that)``.

    Raises
    ------
    ValueError, TypeError
        For arguments that do not fit, before anything is sent; or on every rank if ranks differ in what must be alike.
    ArrivalTimeout
        If a chunk did not come in time. What was not computed is NaN. Names the rank that reports, and the one whose
        chunk is missing. On a GPU it is raised by the next call on that device, or by `tilestream.check`.
    GroupBroken
        If a peer was lost, or any rank has given up waiting: then by every call with that group, on all its ranks.
    """
    operands = checks.as_lists(OP, b, bias, scale_b, activation)
    gather_dim = checks.check_dim(OP, "gather_dim", gather_dim, a_shard, "a_shard")
    checks.check_form(OP, form)
    checks.check_devices(OP, a_shard, b=operands.bs, bias=operands.biases, scale_a=[scale_a], scale_b=operands.scales)
    from tilestream.distributed.library import all_gather_matmul_op

    a_shard, *bs = autocast(Options(OP), a_shard, *operands.bs)
    biases = [a_shard.new_empty(0) if x is None else x for x in operands.biases]
    whole, outs = all_gather_matmul_op(
        a_shard, bs, gather_dim, name_of(OP, group), biases, operands.activations, scale_a, operands.scales,
        out_dtype, use_fast_accum, return_a, form, -1.0 if deadline is None else check_deadline(deadline), limit(),
    )  # fmt: skip
    result = outs[0] if isinstance(b, torch.Tensor) else list(outs)
    return (whole, result) if return_a else result


def plan_all_gather_matmul(
    a_shard: torch.Tensor,
    b: torch.Tensor | Sequence[torch.Tensor],
    *,
    gather_dim: int = 0,
    group: Group = None,
    scale_a: torch.Tensor | None = None,
    form: Form = "auto",
) -> DistributedPlan:
    """How `all_gather_matmul` would run such a call: nothing is sent. ``print(plan.explain())`` says it, and why."""
    operands = checks.as_lists(OP, b, None, None, None)
    gather_dim = checks.check_dim(OP, "gather_dim", gather_dim, a_shard, "a_shard")
    checks.check_form(OP, form)
    checks.check_devices(OP, a_shard, b=operands.bs, scale_a=[scale_a])
    a_shard, *bs = autocast(Options(OP), a_shard, *operands.bs)
    *between, inside = (member_of(OP, x) for x in groups_of(OP, group))
    plan = prepare(inside, a_shard, operands._replace(bs=bs), gather_dim, scale_a, None, True, form).plan
    return plan.over(between[0].world) if between else plan


def _plan(
    member: Member, a_shard: torch.Tensor, bs: Sequence[torch.Tensor], dim: int, scale_a: torch.Tensor | None,
    form: Form,
) -> DistributedPlan:  # fmt: skip
    agreed = {
        "a_shard": f"{list(a_shard.shape)} {a_shard.dtype}".replace("torch.", ""), "gather_dim": dim,
        "scale_a": "none" if scale_a is None else "one" if scale_a.numel() == 1 else "one a row",
    }  # fmt: skip
    k = a_shard.shape[-1] * (member.world if dim == a_shard.dim() - 1 else 1)
    n = sum(x.shape[-1] for x in bs)
    return make_plan(OP, member, tuple(a_shard.shape), dim, a_shard, n, k, form, agreed)


class Call(NamedTuple):
    """A call, checked: what `run` needs."""

    plan: DistributedPlan
    shards: Shards
    shape: tuple[int, ...]
    shard: Whole
    products: list[Product]


def _scales_of_rows(a_shard: torch.Tensor, scale_a: torch.Tensor | None, shards: Shards) -> torch.Tensor | None:
    """One scale a row of the shard: ``[batches, rows, 1]``; a single one, of every row."""
    if scale_a is None:
        return None
    rows = (*a_shard.shape[:-1], 1)
    seen = scale_a.unsqueeze(-1) if scale_a.dim() == 1 and scale_a.numel() > 1 else scale_a
    try:
        full = scale_a.view(()).expand(rows) if scale_a.numel() == 1 else seen.expand(rows)
    except RuntimeError:
        raise ValueError(
            f"{OP}: scale_a has shape {list(scale_a.shape)}; it has one element, or one a row of a_shard: what "
            f"broadcasts to {list(rows)}"
        ) from None
    return full.reshape(shards.batches, shards.rows, 1)


def prepare(
    member: Member, a_shard: torch.Tensor, operands: Operands, dim: int, scale_a: torch.Tensor | None,
    out_dtype: torch.dtype | None, fast_accum: bool, form: Form, into: Sequence[torch.Tensor] = (),
) -> Call:  # fmt: skip
    """Check a call, and say how it is run. Nothing is sent.

    ``into``: where the products are written, ``[rows of all ranks, N]``; where it is empty, to new tensors.
    """
    last = dim == a_shard.dim() - 1
    if last and scale_a is not None and scale_a.numel() > 1:
        raise ValueError(f"{OP}: scale_a has {scale_a.numel()} elements; with K cut (gather_dim={dim}) it has one")
    shape = list(a_shard.shape)
    shape[dim] *= member.world
    rows = math.prod(shape[:-1])
    full_scale = scale_a if last or scale_a is None else torch.empty(rows, 1, dtype=scale_a.dtype, device="meta")
    checks.rehearse(OP, ((rows, shape[-1]), a_shard.dtype), operands, full_scale, out_dtype)
    plan = _plan(member, a_shard, operands.bs, dim, scale_a, form)
    shards = Shards.of(a_shard.shape, dim, member.world, plan.chunks)
    if last:  # the shard's own rows and columns, rank by rank
        shards = Shards(1, member.world, math.prod(a_shard.shape[:-1]), a_shard.shape[-1])
    scales = None if last else _scales_of_rows(a_shard, scale_a, shards)

    def product(
        b: torch.Tensor, bias: torch.Tensor | None, scale_b: torch.Tensor | None, activation: str,
        out: torch.Tensor | None,
    ) -> Product:  # fmt: skip
        def compute(
            a: torch.Tensor, scale: torch.Tensor | None, arrival: Arrival | None, deadline: float
        ) -> torch.Tensor:
            options = Options(
                OP, out=out, bias=bias, activation=None if activation == "none" else activation, out_dtype=out_dtype,
                scale_a=scale_a if last else scale, scale_b=scale_b, arrival=arrival,
                deadline=None if arrival is None else deadline, fast_accum=fast_accum,
            )  # fmt: skip
            return multiply(a, b, options)

        return compute

    places: Sequence[torch.Tensor | None] = into or [None] * len(operands.bs)
    products = [product(*of) for of in zip(*operands, places, strict=True)]
    shard = Whole(a_shard.reshape(shards.batches, shards.rows, shards.width), scales)
    return Call(plan, shards, tuple(shape), shard, products)


def run(
    member: Member, a_shard: torch.Tensor, operands: Operands, dim: int, scale_a: torch.Tensor | None,
    out_dtype: torch.dtype | None, fast_accum: bool, return_a: bool, form: Form, deadline: float | None,
    into: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, list[torch.Tensor]]:  # fmt: skip
    """What the registered op does; ``into``: see `prepare`."""
    if a_shard.is_cuda:
        check_device(a_shard.device.index)  # an expiry says more than that the group is broken since
    member.check()
    seconds = checks.seconds_of(deadline, member, a_shard.device.type)
    call = prepare(member, a_shard, operands, dim, scale_a, out_dtype, fast_accum, form, into)
    with shutdown.call(), member.call(), torch.no_grad(), torch.autocast(a_shard.device.type, enabled=False):
        if a_shard.is_cuda:
            from tilestream.distributed.symmetric import reach

            if reach(member, call.plan, a_shard.device):
                call = prepare(member, a_shard, operands, dim, scale_a, out_dtype, fast_accum, form, into)
        if call.plan.transport == "symmetric memory" and call.plan.fused:
            from tilestream.distributed.copy_engines import gather_matmul

            whole, outs = gather_matmul(member, call.plan, call.shards, call.shard, call.products, seconds, return_a)
        else:
            whole, outs = _gathered(member, call, a_shard, dim, seconds, return_a)
    a = whole.view(call.shape) if return_a else a_shard.new_empty(0)
    return a, [out.view(*call.shape[:-1], out.shape[-1]) for out in outs]


def _gathered(
    member: Member, call: Call, a_shard: torch.Tensor, dim: int, seconds: float, return_a: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """By gloo's messages, or by a collective."""
    shards, last = call.shards, dim == a_shard.dim() - 1

    def memory(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if a_shard.is_cuda or (return_a and not last):  # on a GPU another stream may be at the call before
            return a_shard.new_empty(shape, dtype=dtype)
        return member.buffer(name, shape, dtype, a_shard.device)

    data, scales = memory("whole", shards.shape, a_shard.dtype), None
    if call.shard.scales is not None:
        scales = memory("scales", (*shards.shape[:-1], 1), torch.float32)
    whole = Whole(data, scales)
    gloo_here = call.plan.transport == "gloo"
    if gloo_here and not last:
        return data, gloo.gather_matmul(member, call.plan, shards, call.shard, whole, call.products, seconds)
    if gloo_here:
        gloo.gather_matmul(member, call.plan, shards, call.shard, whole, [], seconds)
    else:
        gather_whole(member, call.plan, call.shard, whole)
    if last:  # ranks' columns side by side
        data = data[0].permute(1, 0, 2).reshape(shards.rows, shards.world * shards.width)
    a = data.view(-1, call.shape[-1])
    of_rows = None if scales is None else scales.view(-1, 1)
    return data, [product(a, of_rows, None, seconds) for product in call.products]
