"""`tilestream.distributed.matmul_all_reduce`: a matmul whose sum over ranks each rank gets, as decoding wants it.

One after the other: the matmul, then the group's own all-reduce. `NO_FORM` says why there is no other form.
"""

from __future__ import annotations

from typing import Literal

import torch

from tilestream.distributed import checks
from tilestream.distributed.checks import Operands
from tilestream.distributed.collective import all_reduce, reduced
from tilestream.distributed.dispatch import Op
from tilestream.distributed.hierarchy import Hierarchy, of_name
from tilestream.distributed.members import Group, Member, groups_of, member_of, name_of
from tilestream.distributed.plan import DistributedPlan, make_plan
from tilestream.distributed.reduce_scatter import check_one, check_reduce_op, rehearse
from tilestream.ops.limit import limit
from tilestream.ops.operands import Options, autocast, multiply
from tilestream.runtime import exit
from tilestream.runtime.channel import check_device

OP: Op = "matmul_all_reduce"
#: Why an all-reduce is the group's own. The arithmetic: docs/distributed.md.
NO_FORM = (
    "of the few rows that it is for nothing is left to overlap: the matmul reads the whole weight whatever the rows, "
    "and the sum is latencies; and decoding is captured into graphs, where an epoch would be the same at each replay"
)


def matmul_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    reduce_op: Literal["sum", "avg"] = "sum",
    group: Group = None,
    bias: torch.Tensor | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = True,
) -> torch.Tensor:
    """The sum over all ranks of ``a @ b``, on each rank; then ``bias``.

    All ranks of the group make the same call, with operands of one shape. For a few rows, as of decoding; of many,
    `matmul_reduce_scatter` overlaps, and `all_gather_matmul` brings its rows together again.

    Parameters
    ----------
    a
        ``[..., M, K]``, at least 2-D: of each rank another part of K.
    b
        ``[K, N]``.
    reduce_op
        ``"sum"``, or ``"avg"`` for the sum divided by the number of ranks.
    group
        As for `all_gather_matmul`; of a mesh of two dimensions inside each node first, and then between them.
    bias
        ``[N]``: added once, after the sum (or average).
    scale_a, scale_b, out_dtype, use_fast_accum
        As for `tilestream.matmul`, on ``a @ b``.

    Returns
    -------
    torch.Tensor
        ``[..., M, N]``, the same on each rank. What travels has its dtype (on the CPU float32 at least), and is added
        up as the group's backend does it.

    Raises
    ------
    ValueError, TypeError, GroupBroken
        As `all_gather_matmul`.
    """
    operands = _check(a, b, reduce_op, bias, scale_a, scale_b)
    from tilestream.distributed.library import matmul_all_reduce_op

    a, b = autocast(Options(OP), a, operands.bs[0])
    result: torch.Tensor = matmul_all_reduce_op(
        a, b, reduce_op, name_of(OP, group), bias, scale_a, scale_b, out_dtype, use_fast_accum, limit()
    )
    return result


def plan_matmul_all_reduce(a: torch.Tensor, b: torch.Tensor, *, group: Group = None) -> DistributedPlan:
    """How `matmul_all_reduce` would run such a call: nothing is sent. ``print(plan.explain())`` says it, and why."""
    operands = _check(a, b, "sum", None, None, None)
    a, b = autocast(Options(OP), a, operands.bs[0])
    *between, inside = (member_of(OP, x) for x in groups_of(OP, group))
    rehearse(a, operands._replace(bs=[b]), None, None)
    plan = _plan(inside, a, b)
    return plan.over(between[0].world) if between else plan


def _check(
    a: torch.Tensor, b: torch.Tensor, reduce_op: str, bias: torch.Tensor | None, scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
) -> Operands:  # fmt: skip
    checks.check_dim(OP, "dim", -1, a)
    check_one(OP, b)
    check_reduce_op(OP, reduce_op)
    operands = checks.as_lists(OP, b, bias, scale_b, None)
    checks.check_devices(OP, a, b=operands.bs, bias=operands.biases, scale_a=[scale_a], scale_b=operands.scales)
    return operands


def _plan(member: Member, a: torch.Tensor, b: torch.Tensor, **more: object) -> DistributedPlan:
    agreed = {"a": f"{list(a.shape)[:-1]} rows {a.dtype}".replace("torch.", ""), **more}
    shape = (*a.shape[:-1], b.shape[-1])
    return make_plan(OP, member, shape, 0, a, b.shape[-1], a.shape[-1], "unfused", agreed, NO_FORM)


def sum_over(name: str, x: torch.Tensor) -> torch.Tensor:
    """The sum of ``x`` over all ranks of the group, or mesh, of this name: ranks know that they agree."""
    group = of_name(OP, name)
    total = x.clone(memory_format=torch.contiguous_format)
    for member in [group] if isinstance(group, Member) else [group.inside, group.between]:
        with member.call():
            total = reduced(member, total)
    return total


def run(
    group: Member | Hierarchy, a: torch.Tensor, b: torch.Tensor, reduce_op: str, bias: torch.Tensor | None,
    scale_a: torch.Tensor | None, scale_b: torch.Tensor | None, out_dtype: torch.dtype | None, fast_accum: bool,
) -> torch.Tensor:  # fmt: skip
    """What the registered op does."""
    if a.is_cuda:
        check_device(a.device.index)
    # Inside each node first: then what travels between them travels once.
    members = [group] if isinstance(group, Member) else [group.inside, group.between]
    for member in members:
        member.check()
    travels = rehearse(a, Operands([b], [bias], [scale_b], ["none"]), scale_a, out_dtype)
    wide = travels if a.is_cuda else torch.promote_types(travels, torch.float32)
    with exit.call(), torch.no_grad(), torch.autocast(a.device.type, enabled=False):
        options = Options(OP, out_dtype=travels, scale_a=scale_a, scale_b=scale_b, fast_accum=fast_accum)
        total = multiply(a, b, options).to(wide)
        for member in members:
            with member.call():
                total = all_reduce(member, _plan(member, a, b, travels=str(travels), reduce_op=reduce_op), total)
        if reduce_op == "avg":
            total /= group.world
        if bias is not None:
            total = total + bias
    return total.to(travels)
