"""The public functions: matmuls that overlap with a collective, and their plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.compiler import is_compiling

from tilestream.arrival.stream import open_streams
from tilestream.distributed import all_gather, all_reduce, reduce_scatter
from tilestream.distributed.dispatch import Form
from tilestream.distributed.group_state import Group, GroupState, groups_of, name_of, state_of
from tilestream.distributed.library import (
    all_gather_matmul_op,
    equal_call,
    matmul_all_reduce_op,
    matmul_reduce_scatter_op,
)
from tilestream.distributed.plan import DistributedPlan
from tilestream.distributed.repeats import plain_call
from tilestream.distributed.request import (
    ALL_REDUCE,
    GATHER,
    REDUCE_SCATTER,
    ReduceOp,
    Request,
    Tensors,
    check_request,
    given_request,
    refuse_unfilled,
)
from tilestream.ops.limit import limit
from tilestream.ops.operands import untracked
from tilestream.plan.limit import is_invariant, promising


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
    """``A @ b`` for each ``b``, where ``A`` is ``a_shard`` of all ranks, concatenated along ``gather_dim``.

    All ranks of the group make the same call, with shards of one shape. The matmul begins at once with this rank's own
    rows, and multiplies the other ranks' rows as they arrive. Transfer and matmul together take about as long as the
    longer of the two.

    Parameters
    ----------
    a_shard
        ``[..., M / world, ..., K]``, at least 2-D, any strides: this rank's part of ``A``.
    b
        ``[K, N]``, or a list of matrices, each with its own N; one gather serves them all. Each rank may have
        other columns.
    gather_dim
        The dimension that is divided between the ranks. For a dimension before the last the call overlaps, and gathers
        without a copy; for the last dimension it does neither.
    group
        The process group, of at most 8 ranks; None: the default group. Or a `torch.distributed.DeviceMesh`. A mesh of
        one dimension means its group. A mesh of two, ``(nodes, ranks of a node)``, means all its ranks in its order:
        each shard is sent to every other node once, and distributed inside that node. See the guide.
    bias, activation, scale_b
        See `tilestream.matmul`; a list with one for each ``b``, or one activation for all.
    scale_a
        float32: one element, or one a row of ``a_shard`` (broadcastable to ``[..., M / world, ..., 1]``). Each rank
        gives its own scales, which are gathered, too.
    out_dtype, use_fast_accum
        See `tilestream.matmul`.
    return_a
        Whether to return ``A``, too.
    form
        ``"fused"`` or ``"unfused"``, the same on all ranks; ``"auto"``: a table of measurements decides, or else a
        model. An eager call without a deadline that is so small that the host would hold it up is unfused, unless
        TILESTREAM_GRAPH_RANKS is 1. See `plan_all_gather_matmul`.
    deadline
        Seconds from the call (on a GPU, from the kernel's start) after which the call stops waiting; None, on all ranks
        or on none: the group's own timeout.

    Returns
    -------
    torch.Tensor or list of torch.Tensor
        ``[..., M, ..., N]``, a list with one for each ``b``, or a tensor if ``b`` is one. With ``return_a``: a tuple of
        ``A`` and this result.

    Raises
    ------
    ValueError, TypeError
        For invalid arguments, before anything is sent; or on every rank, if the ranks' calls differ.
    ArrivalTimeout
        If a chunk did not arrive in time. It names the reporting rank and the rank whose chunk is missing. Tiles that
        were not computed are NaN. On a GPU the next call on the device, or `tilestream.check`, raises it.
    GroupBroken
        If a peer was lost, or a rank has given up waiting: by every later call with the group, on all its ranks.
    """
    if not is_compiling() and open_streams:
        refuse_unfilled(GATHER, a_shard=a_shard, b=b, bias=bias, scale_a=scale_a, scale_b=scale_b)
    has_none = bias is None and activation is None and scale_a is None and scale_b is None
    extras = None if has_none else (bias, activation, scale_a, scale_b)
    options = out_dtype, use_fast_accum, form, return_a
    plain = plain_call(GATHER, group, a_shard, b, gather_dim, deadline, *options, extras=extras)
    if plain is not None and (made := plain.repeated()) is not None:
        gathered, outs = made
        repeated = outs[0] if isinstance(b, torch.Tensor) else outs
        return (gathered, repeated) if return_a else repeated
    given: dict[str, Any] = {
        "dim": gather_dim, "bias": bias, "activation": activation, "scale_a": scale_a, "scale_b": scale_b,
        "out_dtype": out_dtype, "fast_accum": use_fast_accum, "return_a": return_a, "form": form, "deadline": deadline,
    }  # fmt: skip
    request = given_request(GATHER, a_shard, b, **given)
    if request is not None and (found := equal_call(group, request)):
        with untracked():
            gathered, outs = all_gather.run(found.state, request, key=found.key, plain=plain)
    else:
        request = check_request(GATHER, a_shard, b, **given)
        biases = [request.a.new_empty(0) if x is None else x for x in request.biases]
        gathered, outs = all_gather_matmul_op(
            request.a, request.bs, request.dim, name_of(GATHER, group), biases, request.activations, scale_a,
            request.scales_b, out_dtype, use_fast_accum, return_a, form, _op_deadline(request), limit(),
        )  # fmt: skip
    result = outs[0] if isinstance(b, torch.Tensor) else list(outs)
    return (gathered, result) if return_a else result


def plan_all_gather_matmul(
    a_shard: torch.Tensor,
    b: torch.Tensor | Sequence[torch.Tensor],
    *,
    gather_dim: int = 0,
    group: Group = None,
    scale_a: torch.Tensor | None = None,
    form: Form = "auto",
    invariant: bool | None = None,
) -> DistributedPlan:
    """The plan of an `all_gather_matmul`, without sending anything. ``print(plan.explain())`` states the reasons.

    ``invariant``: see `tilestream.plan`.
    """
    request = check_request(GATHER, a_shard, b, dim=gather_dim, scale_a=scale_a, form=form)
    request = _promising(request, invariant)
    return _over_nodes(request, group, lambda state, nodes, step: all_gather.plan_of(state, step))


def matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    scatter_dim: int = 0,
    reduce_op: ReduceOp = "sum",
    group: Group = None,
    bias: torch.Tensor | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = True,
    form: Form = "auto",
    deadline: float | None = None,
) -> torch.Tensor:
    """The rank's own part, along ``scatter_dim``, of the sum over all ranks of ``a @ b``; plus ``bias``.

    All ranks of the group make the same call, with operands of one shape. The other ranks' parts are computed first,
    and sent while the rest is computed. Parts travel in the result's dtype. They are added in float32, in the order of
    the ranks, which gives the same bits each time. An unfused call on GPUs uses the group's own reduce-scatter.

    Parameters
    ----------
    a
        ``[..., M, ..., K]``, at least 2-D: this rank's part of K.
    b
        ``[K, N]``.
    scatter_dim
        The dimension of the result that is divided, before the last; its size is a multiple of the number of ranks.
    reduce_op
        ``"sum"``, or ``"avg"`` for the sum divided by the number of ranks.
    group, form, deadline
        See `all_gather_matmul`; on a GPU the deadline counts from the end of this rank's own matmul.
    bias
        ``[N]``: added once, after the sum (or average).
    scale_a, scale_b, out_dtype, use_fast_accum
        See `tilestream.matmul`; for ``a @ b``.

    Returns
    -------
    torch.Tensor
        ``[..., M / world, ..., N]``.

    Raises
    ------
    ValueError, TypeError, ArrivalTimeout, GroupBroken
        See `all_gather_matmul`.
    """
    if not is_compiling() and open_streams:
        refuse_unfilled(REDUCE_SCATTER, a=a, b=b, bias=bias, scale_a=scale_a, scale_b=scale_b)
    has_none = bias is None and scale_a is None and scale_b is None
    extras = None if has_none else (bias, None, scale_a, scale_b)
    options = reduce_op, out_dtype, use_fast_accum, form
    plain = plain_call(REDUCE_SCATTER, group, a, b, scatter_dim, deadline, *options, extras=extras)
    if plain is not None and (made := plain.repeated()) is not None:
        repeated: torch.Tensor = made
        return repeated
    given: dict[str, Any] = {
        "dim": scatter_dim, "reduce_op": reduce_op, "bias": bias, "scale_a": scale_a, "scale_b": scale_b,
        "out_dtype": out_dtype, "fast_accum": use_fast_accum, "form": form, "deadline": deadline,
    }  # fmt: skip
    request = given_request(REDUCE_SCATTER, a, b, **given)
    if request is not None and (found := equal_call(group, request)):
        with untracked():
            return reduce_scatter.run(found.state, request, found.key, plain)
    request = check_request(REDUCE_SCATTER, a, b, **given)
    result: torch.Tensor = matmul_reduce_scatter_op(
        request.a, request.b, request.dim, reduce_op, name_of(REDUCE_SCATTER, group), bias, scale_a, scale_b, out_dtype,
        use_fast_accum, form, _op_deadline(request), limit(),
    )  # fmt: skip
    return result


def plan_matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    scatter_dim: int = 0,
    group: Group = None,
    form: Form = "auto",
    invariant: bool | None = None,
) -> DistributedPlan:
    """The plan of a `matmul_reduce_scatter`, without sending anything. ``print(plan.explain())`` states the reasons.

    ``invariant``: see `tilestream.plan`; such a sum is fused, or `NotImplementedError` is raised.
    """
    request = _promising(check_request(REDUCE_SCATTER, a, b, dim=scatter_dim, form=form), invariant)
    reduce_scatter.travel_dtype(request)

    def of_node(state: GroupState, nodes: int, step: Request) -> DistributedPlan:
        reduce_scatter.part_shape(step, nodes * state.world)
        rows = step.a.narrow(step.dim, 0, step.a.shape[step.dim] // nodes)
        return reduce_scatter.plan_of(state, step._replace(a=rows))

    return _over_nodes(request, group, of_node)


def matmul_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    reduce_op: ReduceOp = "sum",
    group: Group = None,
    bias: torch.Tensor | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = True,
    form: Form = "auto",
    deadline: float | None = None,
) -> torch.Tensor:
    """The sum over all ranks of ``a @ b``, on each rank; plus ``bias``.

    All ranks of the group make the same call, with operands of one shape. It is meant for a few rows, as in decoding.
    For many rows use `matmul_reduce_scatter`, which overlaps, and `all_gather_matmul`, which gathers its rows again.

    Parameters
    ----------
    a
        ``[..., M, K]``, at least 2-D: this rank's part of K.
    b
        ``[K, N]``.
    group
        See `all_gather_matmul`; with a mesh of two dimensions the sum is made inside each node, then between nodes.
    reduce_op, bias, scale_a, scale_b, out_dtype, use_fast_accum
        See `matmul_reduce_scatter`.
    form
        ``"fused"``: a kernel reads and adds all ranks' partial sums, on GPUs that can reach each other. The sums travel
        in the result's dtype and are added in float32, in the order of the ranks. ``"unfused"``: the group's own
        all-reduce. ``"auto"``: fused if a table has a measurement that shows it to be faster, or if the call has so few
        rows that the host takes longer than the GPU, and issues the fused form sooner.
    deadline
        See `matmul_reduce_scatter`; the group's own all-reduce always has the group's timeout.

    Returns
    -------
    torch.Tensor
        ``[..., M, N]``, the same bits on each rank.

    Raises
    ------
    ValueError, TypeError, ArrivalTimeout, GroupBroken
        See `all_gather_matmul`.
    """
    if not is_compiling() and open_streams:
        refuse_unfilled(ALL_REDUCE, a=a, b=b, bias=bias, scale_a=scale_a, scale_b=scale_b)
    has_none = bias is None and scale_a is None and scale_b is None
    extras = None if has_none else (bias, None, scale_a, scale_b)
    options = reduce_op, out_dtype, use_fast_accum, form
    plain = plain_call(ALL_REDUCE, group, a, b, 0, deadline, *options, extras=extras)
    if plain is not None and (made := plain.repeated()) is not None:
        repeated: torch.Tensor = made
        return repeated
    given: dict[str, Any] = {
        "reduce_op": reduce_op, "bias": bias, "scale_a": scale_a, "scale_b": scale_b, "out_dtype": out_dtype,
        "fast_accum": use_fast_accum, "form": form, "deadline": deadline,
    }  # fmt: skip
    request = given_request(ALL_REDUCE, a, b, **given)
    if request is not None and (found := equal_call(group, request)):
        with untracked():
            return all_reduce.run([found.state], request, found.key, plain)
    request = check_request(ALL_REDUCE, a, b, **given)
    result: torch.Tensor = matmul_all_reduce_op(
        request.a, request.b, reduce_op, name_of(ALL_REDUCE, group), bias, scale_a, scale_b, out_dtype, use_fast_accum,
        form, _op_deadline(request), limit(),
    )  # fmt: skip
    return result


def plan_matmul_all_reduce(
    a: torch.Tensor, b: torch.Tensor, *, group: Group = None, form: Form = "auto", invariant: bool | None = None
) -> DistributedPlan:
    """The plan of a `matmul_all_reduce`, without sending anything. ``print(plan.explain())`` states the reasons.

    ``invariant``: see `plan_matmul_reduce_scatter`.
    """
    request = _promising(check_request(ALL_REDUCE, a, b, form=form), invariant)
    reduce_scatter.travel_dtype(request)
    return _over_nodes(request, group, lambda state, nodes, step: all_reduce.plan_of(state, step, nodes))


def _promising(request: Request, invariant: bool | None) -> Request:
    """``request`` with a caller's ``invariant=``."""
    return request._replace(invariant=is_invariant(promising(invariant)))


def _over_nodes(
    request: Request, group: Group, of_node: Callable[[GroupState, int, Request], DistributedPlan]
) -> DistributedPlan:
    """The plan over all nodes of ``group``; ``of_node(state, nodes, step)`` makes that of one step, inside a node."""
    *internode, intranode = (state_of(request.op, x) for x in groups_of(request.op, group))
    nodes = internode[0].world if internode else 1
    step = request._replace(deadline=1.0) if internode else request  # a step has what is left of the call's
    return replace(of_node(intranode, nodes, step), nodes=nodes)


def _op_deadline(request: Request) -> float:
    """The deadline argument of a registered op: -1 for None."""
    return -1.0 if request.deadline is None else request.deadline
