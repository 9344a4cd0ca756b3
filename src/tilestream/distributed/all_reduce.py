"""`tilestream.distributed.matmul_all_reduce`: a matmul whose sum over ranks each rank gets, as decoding wants it.

Of a few rows there is nothing to overlap with: all of a matmul's tiles are done at about the same time. What counts is
how soon ranks know of each other's partial sums. Two forms: the matmul and then the group's own all-reduce; and the
matmul into memory that the peers can read, and a kernel that reads and adds all of them (`one_shot`), where that was
measured to be faster.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import torch

from tilestream.arrival.flat import check_deadline
from tilestream.distributed import checks
from tilestream.distributed.checks import Operands
from tilestream.distributed.collective import all_reduce, reduced
from tilestream.distributed.dispatch import Form, Op
from tilestream.distributed.group_state import Group, Member, groups_of, member_of, name_of
from tilestream.distributed.hierarchy import Hierarchy, of_name
from tilestream.distributed.plan import DistributedPlan, make_plan
from tilestream.distributed.reduce_scatter import check_one, check_reduce_op, rehearse
from tilestream.ops.limit import limit
from tilestream.ops.operands import Options, autocast, multiply
from tilestream.runtime import shutdown
from tilestream.runtime.channel import check_device

OP: Op = "matmul_all_reduce"
#: Why the group's own all-reduce is taken. The arithmetic: docs/distributed.md.
UNMEASURED = "nobody has measured this shape class to be faster than the group's own all-reduce"
ON_THE_CPU = "on the CPU the group's own all-reduce adds what it has received as it comes"
OVER_NODES = "over several nodes: the groups' own all-reduces, inside each node and then between them"


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
    form: Form = "auto",
    deadline: float | None = None,
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
    form
        ``"fused"``: partial sums are read by the kernel that adds them, on GPUs that reach each other; they travel in
        the result's dtype and are added in float32, in the order of the ranks. ``"unfused"``: by the group's own
        all-reduce. ``"auto"``: the first where a table says that it was measured to be faster.
    deadline
        As for `matmul_reduce_scatter`; of no use where it is the group's own all-reduce, which has the group's timeout.

    Returns
    -------
    torch.Tensor
        ``[..., M, N]``, the same bits on each rank.

    Raises
    ------
    ValueError, TypeError, ArrivalTimeout, GroupBroken
        As `all_gather_matmul`.
    """
    checks.check_form(OP, form)
    operands = _check(a, b, reduce_op, bias, scale_a, scale_b)
    from tilestream.distributed.library import matmul_all_reduce_op

    a, b = autocast(Options(OP), a, operands.bs[0])
    result: torch.Tensor = matmul_all_reduce_op(
        a, b, reduce_op, name_of(OP, group), bias, scale_a, scale_b, out_dtype, use_fast_accum, form,
        -1.0 if deadline is None else check_deadline(deadline), limit(),
    )  # fmt: skip
    return result


def plan_matmul_all_reduce(
    a: torch.Tensor, b: torch.Tensor, *, group: Group = None, form: Form = "auto"
) -> DistributedPlan:
    """How `matmul_all_reduce` would run such a call: nothing is sent. ``print(plan.explain())`` says it, and why."""
    checks.check_form(OP, form)
    operands = _check(a, b, "sum", None, None, None)
    a, b = autocast(Options(OP), a, operands.bs[0])
    *between, inside = (member_of(OP, x) for x in groups_of(OP, group))
    rehearse(OP, a, operands._replace(bs=[b]), None, None)
    if between:
        return _plan(inside, a, b, form, OVER_NODES).over(between[0].world)
    return _plan(inside, a, b, form)


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


def _plan(
    member: Member, a: torch.Tensor, b: torch.Tensor, form: Form, no_form: str = "", **more: object
) -> DistributedPlan:
    no_form = no_form or ("" if a.is_cuda else ON_THE_CPU)
    agreed = {"a": f"{list(a.shape)[:-1]} rows {a.dtype}".replace("torch.", ""), **more}
    shape = (*a.shape[:-1], b.shape[-1])
    return make_plan(OP, member, shape, 0, a, b.shape[-1], a.shape[-1], form, agreed, no_form, UNMEASURED)


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
    form: Form, deadline: float | None,
) -> torch.Tensor:  # fmt: skip
    """What the registered op does."""
    if a.is_cuda:
        check_device(a.device.index)
    # Inside each node first: then what travels between them travels once.
    members = [group] if isinstance(group, Member) else [group.inside, group.between]
    for member in members:
        member.check()
    travels = rehearse(OP, a, Operands([b], [bias], [scale_b], ["none"]), scale_a, out_dtype)
    wide = travels if a.is_cuda else torch.promote_types(travels, torch.float32)
    more: dict[str, Any] = {"travels": str(travels), "reduce_op": reduce_op}
    options = Options(OP, out_dtype=travels, scale_a=scale_a, scale_b=scale_b, fast_accum=fast_accum)
    with shutdown.call(), torch.no_grad(), torch.autocast(a.device.type, enabled=False):
        if isinstance(group, Member) and a.is_cuda:
            with group.call():
                total = _one_shot(group, a, b, options, travels, bias, form, deadline, more)
            if total is not None:
                return total
        plans = [_plan(member, a, b, form, OVER_NODES if len(members) > 1 else "", **more) for member in members]
        plain = scale_a is scale_b is None and travels == a.dtype == b.dtype
        library = plain and a.is_cuda and plans[0].decision.library
        total = torch.matmul(a, b) if library else multiply(a, b, options).to(wide)
        for member, plan in zip(members, plans, strict=True):
            with member.call():
                total = all_reduce(member, plan, total)
        if reduce_op == "avg":
            total /= group.world
        if bias is not None:
            total = total + bias
    return total.to(travels)


def _one_shot(
    member: Member, a: torch.Tensor, b: torch.Tensor, options: Options, travels: torch.dtype,
    bias: torch.Tensor | None, form: Form, deadline: float | None, more: dict[str, Any],
) -> torch.Tensor | None:  # fmt: skip
    """The sum, and the bias, where the plan is fused; else None, and nothing has been sent."""
    from tilestream.distributed.symmetric import reach

    plan = _plan(member, a, b, form, **more)
    if reach(member, plan, a.device):
        plan = _plan(member, a, b, form, **more)
    if not plan.fused:
        return None
    from tilestream.distributed.one_shot import matmul_reduce

    shape, average = (*a.shape[:-1], b.shape[-1]), more["reduce_op"] == "avg"

    def product(out: torch.Tensor) -> None:
        multiply(a, b, replace(options, out=out.view(shape)))

    rows, seconds = math.prod(shape[:-1]), checks.seconds_of(deadline, member, a.device.type)
    return matmul_reduce(
        member, plan, (rows, shape[-1]), travels, product, average, bias, seconds, a.device
    ).view(shape)  # fmt: skip
