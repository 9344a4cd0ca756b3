"""The schemas, fakes and gradients of the registered ops, which torch.compile can trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from tilestream.arrival.stream import open_streams
from tilestream.distributed import all_gather, all_reduce, hierarchy, reduce_scatter
from tilestream.distributed.dispatch import Form, Op
from tilestream.distributed.group_state import Group, GroupState, group_of, known_state, states_of, world_of
from tilestream.distributed.hierarchy import NodeMesh, sum_of_parts
from tilestream.distributed.repeats import PlainCall, plain_call
from tilestream.distributed.request import ALL_REDUCE, GATHER, REDUCE_SCATTER, Request, refuse_unfilled
from tilestream.kernels.cpu.epilogue import wide_dtype
from tilestream.ops.gradients import through_activation
from tilestream.ops.inline import PLAIN
from tilestream.ops.library import _alone, gemm_op, library, result_dtype
from tilestream.ops.limit import within_limit

# _alone: for CUDA graphs of its own torch.compile gives calls memory from the graphs' pool, also while it warms up, and
# raises if any of it outlives the call. What the ranks share does, which the first call of a kind makes.
#
# An empty bias means none: torch gives gradients to a list of tensors, not to a list of optional ones. worker_limit:
# the limit of the `tilestream.worker_limit` blocks around the call, as an argument so that a compiled graph sees it; 0:
# none. It has no default: torch drops arguments that equal their default, and then miscounts gradients.
library.define(
    "all_gather_matmul(Tensor a_shard, Tensor[] b, int gather_dim, str group, Tensor[] bias, str[] activation, "
    "Tensor? scale_a, Tensor?[] scale_b, ScalarType? out_dtype, bool fast_accum, bool return_a, str form, "
    "float deadline, int worker_limit) -> (Tensor, Tensor[])",
    tags=_alone,
)
_SUM = (
    "str reduce_op, str group, Tensor? bias, Tensor? scale_a, Tensor? scale_b, ScalarType? out_dtype, bool fast_accum, "
    "str form, float deadline, int worker_limit) -> Tensor"
)
library.define(f"matmul_reduce_scatter(Tensor a, Tensor b, int scatter_dim, {_SUM}", tags=_alone)
library.define(f"matmul_all_reduce(Tensor a, Tensor b, {_SUM}", tags=_alone)
library.define("sum_over_ranks(Tensor x, str group) -> Tensor")
all_gather_matmul_op = torch.ops.tilestream.all_gather_matmul.default
matmul_reduce_scatter_op = torch.ops.tilestream.matmul_reduce_scatter.default
matmul_all_reduce_op = torch.ops.tilestream.matmul_all_reduce.default
sum_over_ranks_op = torch.ops.tilestream.sum_over_ranks.default


def _limited(bound: int) -> AbstractContextManager[None]:
    """A block with this limit of workers; 0: without a limit."""
    return within_limit(bound) if bound else contextlib.nullcontext()


def _deadline(seconds: float) -> float | None:
    """The deadline from a registered op's argument; negative: None."""
    return None if seconds < 0 else seconds


class EqualCall(NamedTuple):
    """The state of an earlier equal call, and the key of its decision."""

    state: GroupState
    key: tuple[object, ...]


def equal_call(group: Group, request: Request | None) -> EqualCall | None:
    """The earlier equal call of a call that needs no dispatcher; None for other calls."""
    state = None if request is None else known_state(group)
    if request is None or state is None:
        return None
    key = request.key(state)
    return None if state.decided(key) is None else EqualCall(state, key)


def _gather_call(
    a_shard: torch.Tensor, b: Sequence[torch.Tensor], gather_dim: int, name: str,
    bias: Sequence[torch.Tensor], activation: Sequence[str], scale_a: torch.Tensor | None,
    scale_b: Sequence[torch.Tensor | None], out_dtype: torch.dtype | None, fast_accum: bool, return_a: bool,
    form: Form, deadline: float, worker_limit: int,
) -> PlainCall | None:  # fmt: skip
    """A gather as one that may repeat an earlier one, as a compiled graph does at each run; None for others."""
    if (group := group_of(name)) is None:
        return None
    biases = [x if x.numel() else None for x in bias]
    has_none = scale_a is None and all(x is None for x in (*biases, *scale_b)) and all(x == "none" for x in activation)
    extras = None if has_none else (biases, list(activation), scale_a, list(scale_b))
    options = out_dtype, fast_accum, form, return_a
    return plain_call(GATHER, group, a_shard, b, gather_dim, _deadline(deadline), *options, extras=extras)


def _sum_call(
    op: Op, a: torch.Tensor, b: torch.Tensor, dim: int, reduce_op: str, name: str, bias: torch.Tensor | None,
    scale_a: torch.Tensor | None, scale_b: torch.Tensor | None, out_dtype: torch.dtype | None, fast_accum: bool,
    form: Form, deadline: float, worker_limit: int,
) -> PlainCall | None:  # fmt: skip
    """A sum, likewise."""
    if (group := group_of(name)) is None:
        return None
    has_none = bias is None and scale_a is None and scale_b is None
    extras = None if has_none else (bias, None, scale_a, scale_b)
    return plain_call(op, group, a, b, dim, _deadline(deadline), reduce_op, out_dtype, fast_accum, form, extras=extras)


def _of_op(op: Op, *given: Any) -> PlainCall | None:
    """A registered op's call as one that may repeat an earlier one. In the call's limit of workers."""
    if op == GATHER:
        return _gather_call(*given)
    if op == ALL_REDUCE:
        a, b, *rest = given
        given = a, b, 0, *rest
    return _sum_call(op, *given)


def _all_gather_matmul(
    a_shard: torch.Tensor, b: Sequence[torch.Tensor], gather_dim: int, group: str,
    bias: Sequence[torch.Tensor], activation: Sequence[str], scale_a: torch.Tensor | None,
    scale_b: Sequence[torch.Tensor | None], out_dtype: torch.dtype | None, fast_accum: bool, return_a: bool,
    form: Form, deadline: float, worker_limit: int,
) -> tuple[torch.Tensor, list[torch.Tensor]]:  # fmt: skip
    if open_streams:
        refuse_unfilled(GATHER, a_shard=a_shard, b=b, bias=bias, scale_a=scale_a, scale_b=scale_b)
    request = Request(
        GATHER, a_shard, b, [x if x.numel() else None for x in bias], activation, scale_a, scale_b, gather_dim, "sum",
        out_dtype, fast_accum, return_a, form, _deadline(deadline),
    )  # fmt: skip
    with _limited(worker_limit):
        states = states_of(GATHER, group)
        plain = _gather_call(
            a_shard, b, gather_dim, group, bias, activation, scale_a, scale_b, out_dtype, fast_accum, return_a, form,
            deadline, worker_limit,
        )  # fmt: skip
        if len(states) == 1:
            return all_gather.run(states[0], request, plain=plain)
        return hierarchy.all_gather_matmul(NodeMesh(*states), request)


def _sum_request(
    op: Op, a: torch.Tensor, b: torch.Tensor, dim: int, reduce_op: str, bias: torch.Tensor | None,
    scale_a: torch.Tensor | None, scale_b: torch.Tensor | None, out_dtype: torch.dtype | None, fast_accum: bool,
    form: Form, deadline: float,
) -> Request:  # fmt: skip
    if open_streams:
        refuse_unfilled(op, a=a, b=b, bias=bias, scale_a=scale_a, scale_b=scale_b)
    return Request(
        op, a, [b], [bias], ["none"], scale_a, [scale_b], dim, reduce_op, out_dtype, fast_accum, form=form,
        deadline=_deadline(deadline),
    )  # fmt: skip


def _matmul_reduce_scatter(
    a: torch.Tensor, b: torch.Tensor, scatter_dim: int, reduce_op: str, group: str, *options: Any
) -> torch.Tensor:
    *of_request, worker_limit = options
    request = _sum_request(REDUCE_SCATTER, a, b, scatter_dim, reduce_op, *of_request)
    with _limited(worker_limit):
        states = states_of(REDUCE_SCATTER, group)
        if len(states) == 1:
            plain = _sum_call(REDUCE_SCATTER, a, b, scatter_dim, reduce_op, group, *options)
            return reduce_scatter.run(states[0], request, plain=plain)
        return hierarchy.matmul_reduce_scatter(NodeMesh(*states), request)


def _matmul_all_reduce(a: torch.Tensor, b: torch.Tensor, reduce_op: str, group: str, *options: Any) -> torch.Tensor:
    *of_request, worker_limit = options
    request = _sum_request(ALL_REDUCE, a, b, 0, reduce_op, *of_request)
    with _limited(worker_limit):
        states = states_of(ALL_REDUCE, group)
        plain = _sum_call(ALL_REDUCE, a, b, 0, reduce_op, group, *options)
        return all_reduce.run(states, request, plain=plain)


def _repeated(op: Op, given: Sequence[Any]) -> Any:
    """The result of a registered op's call on GPUs, if it repeats an earlier one; None for others.

    A compiled graph calls the op at each run, and torch's Python around the op's kernels costs more than a repeat.
    """
    if open_streams or type(given[0]) not in PLAIN:
        return None
    with _limited(given[-1]):
        plain = _of_op(op, *given)
        made = None if plain is None else plain.repeated()
    if made is None or op != GATHER:
        return made
    gathered, outs = made
    return given[0].new_empty(0) if gathered is None else gathered, outs


def _repeating(op: Op, usual: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of a registered op for GPUs, where no gradients are looked for."""

    def run(*given: Any) -> Any:
        made = _repeated(op, given)
        return usual(*given) if made is None else made

    return run


def _empty_gathered(a_shard: torch.Tensor, b: Sequence[torch.Tensor], gather_dim: int, group: str, *others: Any) -> Any:
    out_dtype, return_a = others[4], others[6]
    shape = list(a_shard.shape)
    shape[gather_dim] *= world_of(group)
    a = a_shard.new_empty(shape if return_a else 0)
    return a, [a_shard.new_empty((*shape[:-1], x.shape[1]), dtype=result_dtype(a_shard, out_dtype)) for x in b]


def _empty_part(
    a: torch.Tensor, b: torch.Tensor, scatter_dim: int, reduce_op: str, group: str, *others: Any
) -> torch.Tensor:
    shape = [*a.shape[:-1], b.shape[1]]
    shape[scatter_dim] //= world_of(group)
    return a.new_empty(shape, dtype=result_dtype(a, others[3]))


def _empty_sum(a: torch.Tensor, b: torch.Tensor, *others: Any) -> torch.Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[1]), dtype=result_dtype(a, others[5]))


# Autograd -----------------------------------------------------------------------------------------------------------
#
# The two ops are each other's transpose: the gradient of a gathered operand is a matmul + reduce-scatter, and the
# gradient of a scattered product is an all-gather + matmul. Both overlap like the forward pass. The backward pass
# gathers the shards again.


def _refuse_gradients(op: str, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise RuntimeError(f"{op}: {name} requires a gradient; scales, and operands that have some, get none")


def _gather_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a_shard, b, dim, group, bias, activation, scale_a, scale_b, _, _, return_a, *how = inputs
    if scale_a is not None or any(x is not None for x in scale_b):
        _refuse_gradients(GATHER, a_shard=a_shard, scale_a=scale_a, **{f"b[{i}]": x for i, x in enumerate(b)})
        ctx.set_materialize_grads(False)
    ctx.save_for_backward(a_shard, *b, *bias)
    ctx.count, ctx.dim, ctx.group, ctx.activation = len(b), dim, group, list(activation)
    ctx.return_a, ctx.how = return_a, how  # form, deadline and limit, which the backward pass uses, too


def _gather_backward(ctx: Any, grad_a: torch.Tensor, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    a_shard, *rest = ctx.saved_tensors
    b, bias = rest[: ctx.count], rest[ctx.count :]
    needs_weight = any(ctx.needs_input_grad[1]) if isinstance(ctx.needs_input_grad[1], list | tuple) else True
    gathered = None
    if needs_weight or any(name != "none" for name in ctx.activation):
        none: list[Any] = []
        gathered, _ = all_gather_matmul_op(
            a_shard, none, ctx.dim, ctx.group, none, [], None, none, None, True, True, *ctx.how
        )  # fmt: skip
    before = [
        _before_activation(grad, gathered, weight, added, activation, ctx.how[-1])
        for grad, weight, added, activation in zip(grads, b, bias, ctx.activation, strict=True)
    ]
    summed = torch.cat(before, -1) if len(before) > 1 else before[0]
    weights = torch.cat(b, -1) if len(b) > 1 else b[0]
    shard = matmul_reduce_scatter_op(
        summed, weights.mT, ctx.dim, "sum", ctx.group, None, None, None, None, True, *ctx.how
    )  # fmt: skip
    if ctx.return_a:
        shard = shard + sum_of_parts(GATHER, ctx.group, grad_a, ctx.dim)
    of_b: list[torch.Tensor | None] = [None] * len(b)
    if gathered is not None:
        of_b = [_multiply(_rows(gathered).mT, _rows(grad), ctx.how[-1]) for grad in before]
    of_bias = [
        g.sum(dim=tuple(range(g.dim() - 1))).to(x.dtype) if x.numel() else torch.zeros_like(x)
        for x, g in zip(bias, before, strict=True)
    ]
    return shard, of_b, None, None, of_bias, *[None] * 9


def _before_activation(
    grad: torch.Tensor, gathered: torch.Tensor | None, b: torch.Tensor, bias: torch.Tensor, activation: str,
    worker_limit: int,
) -> torch.Tensor:  # fmt: skip
    """The gradient with respect to the activation's input, which is recomputed."""
    if activation == "none" or gathered is None:
        return grad
    wide = wide_dtype(b.dtype)
    before = _multiply(_rows(gathered), b, worker_limit, bias if bias.numel() else None, wide).view(grad.shape)
    if activation == "relu":
        return torch.ops.aten.threshold_backward(grad.to(wide), before, 0).to(grad.dtype)  # type: ignore[no-any-return]
    return through_activation(activation, grad.to(wide), before).to(grad.dtype)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _multiply(
    a: torch.Tensor, b: torch.Tensor, worker_limit: int, bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    product: torch.Tensor = gemm_op(
        a, b, bias, None, 1.0, 1.0, "none", out_dtype, "auto", 0, None, None, True, worker_limit
    )
    return product


def _sum_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Save the context of a sum; ``ctx.dim`` is empty for an all-reduce."""
    a, b, *ctx.dim, ctx.reduce_op, ctx.group, bias, scale_a, scale_b, _, _, form, deadline, limit = inputs
    if scale_a is not None or scale_b is not None:
        op = REDUCE_SCATTER if ctx.dim else ALL_REDUCE
        _refuse_gradients(op, a=a, b=b, scale_a=scale_a, scale_b=scale_b)
    ctx.save_for_backward(a, b)
    ctx.how, ctx.bias = [form, deadline, limit], None if bias is None else bias.dtype


def _sum_gradients(ctx: Any, of_product: torch.Tensor, of_a: torch.Tensor, grad: torch.Tensor) -> tuple[Any, ...]:
    """Gradients of a sum's arguments; ``of_product``: the gradient of this rank's product of all rows."""
    a, _ = ctx.saved_tensors
    of_b = _multiply(_rows(a).mT, _rows(of_product), ctx.how[-1])
    of_bias = None if ctx.bias is None else grad.sum(dim=tuple(range(grad.dim() - 1))).to(ctx.bias)
    return (of_a, of_b, *[None] * (len(ctx.dim) + 2), of_bias, *[None] * 7)


def _product_gradient(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    """The gradient with respect to a rank's product, in the operands' dtype."""
    a, _ = ctx.saved_tensors
    return (grad / world_of(ctx.group) if ctx.reduce_op == "avg" else grad).to(a.dtype)


def _scatter_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    _, b = ctx.saved_tensors
    gathered, (of_a,) = all_gather_matmul_op(
        _product_gradient(ctx, grad), [b.mT], *ctx.dim, ctx.group, [grad.new_empty(0)], ["none"], None, [None], None,
        True, True, *ctx.how,
    )  # fmt: skip
    return _sum_gradients(ctx, gathered, of_a, grad)


def _all_reduce_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    # Each rank's gradient of the sum contributes to the gradients of every rank's operands.
    of_product = _product_gradient(ctx, sum_over_ranks_op(grad, ctx.group))
    of_a = _multiply(_rows(of_product), b.mT, ctx.how[-1]).view(a.shape)
    return _sum_gradients(ctx, of_product, of_a, grad)


def _register_autograd(op: Op, backward: Callable[..., Any], setup_context: Callable[..., Any]) -> None:
    """Register an op's gradients; on GPUs, behind the question whether a call, which then has none, can be repeated."""
    kernels: list[Callable[..., Any]] = []
    register = library.impl

    def kept(name: Any, kernel: Any, *how: Any, **more: Any) -> None:
        kernels.append(kernel)
        register(name, kernel, *how, **more)  # type: ignore[no-untyped-call]

    library.impl = kept  # type: ignore[method-assign, assignment]
    try:
        torch.library.register_autograd(f"tilestream::{op}", backward, setup_context=setup_context, lib=library)
    finally:
        del library.impl
    if kernels:
        (kernel,) = kernels

        def run(keyset: Any, *given: Any) -> Any:
            made = _repeated(op, given)
            return kernel(keyset, *given) if made is None else made

        library.impl(op, run, "AutogradCUDA", with_keyset=True)


for _op, _run, _fake, _backward, _context in (
    (GATHER, _all_gather_matmul, _empty_gathered, _gather_backward, _gather_context),
    (REDUCE_SCATTER, _matmul_reduce_scatter, _empty_part, _scatter_backward, _sum_context),
    (ALL_REDUCE, _matmul_all_reduce, _empty_sum, _all_reduce_backward, _sum_context),
):
    library.impl(_op, _run, "CPU")
    library.impl(_op, _repeating(_op, _run), "CUDA")
    torch.library.register_fake(f"tilestream::{_op}", _fake, lib=library)
    _register_autograd(_op, _backward, _context)
library.impl("sum_over_ranks", lambda x, group: all_reduce.sum_over(group, x), "CompositeExplicitAutograd")
torch.library.register_fake("tilestream::sum_over_ranks", lambda x, group: x.new_empty(x.shape), lib=library)
