"""Derivatives of the registered ops: how they are registered, and the formulas of a product.

The autograd kernel of an op takes one derivative and calls the op again below autograd, as torch's own kernels do. So
transforms of torch.func nest, forward over reverse and under vmap, too. This holds for the public ops and for
``torch.ops.tilestream``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import TracingContext
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from tilestream.kernels.cpu.epilogue import wide_dtype

#: The base class of a `derivative`: torch.func's form of a ``torch.autograd.Function`` for one of its levels.
Derivative = _SingleLevelFunction


#: By op: a function from its arguments to the call that compiled graphs make instead; None to keep the op's own.
InGraphs = Callable[..., tuple[Any, ...] | None]
_in_graphs: dict[Any, InGraphs] = {}


def derivative(
    library: torch.library.Library, op: Any, function: type[Any], in_graphs: InGraphs | None = None
) -> None:  # fmt: skip
    """Register the derivative of ``op``: a subclass of `Derivative` whose ``forward`` calls `below_autograd`.

    ``in_graphs`` maps the arguments to an equal op without a derivative and its arguments. Compiled graphs, whose
    derivative has been taken, call that op: an autograd kernel in Python costs the host as much as a launch, and so
    does each argument.
    """
    if in_graphs is not None:
        _in_graphs[op] = in_graphs
    defaults = tuple(argument.default_value for argument in op._schema.arguments)

    def kernel(*args: Any) -> Any:
        if not _is_asked_for(args):
            with torch._C._AutoDispatchBelowAutograd():
                return _call(op, args)
        args += defaults[len(args) :]  # the dispatcher leaves them out
        if torch._C._functorch.peek_interpreter_stack() is None:
            return function.apply(*args)
        from torch._functorch.utils import enable_single_level_autograd_function

        with enable_single_level_autograd_function():
            return function.apply(*args)

    library.impl(op._opname, kernel, "Autograd")


def _call(op: Any, args: tuple[Any, ...]) -> Any:
    """Call ``op``; while torch.compile traces, its op for graphs, but not for torch.export: a user may train that."""
    # `torch.compiler.is_compiling` is False in torch 2.10 while it traces below its own compiler.
    traced = type(args[0]) is FunctionalTensor and TracingContext.try_get() is not None
    if traced and op in _in_graphs and not torch.compiler.is_exporting():
        found = _in_graphs[op](*args)
        if found is not None:
            return found[0](*found[1:])
    return op(*args)


def is_differentiated(args: Sequence[Any]) -> bool:
    """Whether autograd, forward AD or a transform of torch.func sees a call with these arguments."""
    return _is_asked_for(args) or torch._C._functorch.peek_interpreter_stack() is not None


def _is_asked_for(args: Sequence[Any]) -> bool:
    if forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled():
        return True
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)


def below_autograd(op: Any, *args: Any) -> Any:
    """Call an op from the ``forward`` of its derivative."""
    with torch._C._AutoDispatchBelowAutograd():
        if torch._C._functorch.peek_interpreter_stack() is None:
            return _call(op, args)
        # A ``forward`` has derivatives off, but the transforms around this one need theirs.
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return op(*args)


def save(ctx: Any, *tensors: torch.Tensor | None) -> None:
    """Save tensors for the derivatives, in a ``forward``. Gradients and tangents of 0 are passed as None."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    if forward_ad._current_level >= 0:
        ctx.save_for_forward(*tensors)


# Products -------------------------------------------------------------------------------------------------------------

#: A product, with the parameters of ``tilestream::gemm``.
Gemm = Callable[..., torch.Tensor]


def save_product(ctx: Any, inputs: Sequence[Any], output: torch.Tensor, is_weight: bool = False) -> None:
    """Save what the derivatives of ``tilestream::gemm`` need. ``is_weight``: b is the weight of a linear, ``[N, K]``.

    The output gives relu's derivative. For the other activations the backward pass computes their input once more: this
    costs a matmul and keeps no ``[M, N]`` tensor alive.
    """
    a, b, bias, residual, alpha, beta, activation, _, schedule, workers, scale_a, scale_b, *others = inputs
    again = (bias, residual) if activation not in ("none", "relu") else (None, None)
    save(ctx, a, b, output if activation == "relu" else None, *again, scale_a, scale_b)
    ctx.numbers = alpha, beta, activation, schedule, workers, *others
    ctx.dtypes = output.dtype, None if bias is None else bias.dtype, None if residual is None else residual.dtype
    ctx.is_weight = is_weight


def product_gradients(ctx: Any, grad: torch.Tensor, gemm: Gemm) -> tuple[torch.Tensor | None, ...]:
    """Gradients of a, b, bias and residual; None for each that is not needed. ``gemm`` computes the products.

    Gradients have torch's layout: that of a column-major matrix is column-major, so that of a linear's weight is
    contiguous.
    """
    a, b, *_, scale_a, scale_b = saved = ctx.saved_tensors  # read once: checkpointing allows no second read
    alpha, beta, activation, schedule, workers, _, worker_limit = ctx.numbers
    _, bias_dtype, residual_dtype = ctx.dtypes
    needs_a, needs_b, needs_bias, needs_residual, *_ = ctx.needs_input_grad
    if activation != "none":
        grad = _through_activation(ctx, saved, grad, gemm)
    how = None, None, alpha, 1.0, "none", None, schedule, workers, None, None, True, worker_limit
    shape, folded = a.shape, grad
    if len(shape) > b.dim():  # leading dimensions are rows
        rows = shape[:-1].numel()
        a, folded = a.reshape(rows, shape[-1]), grad.reshape(rows, grad.shape[-1])
    grad_a = grad_b = grad_bias = grad_residual = None
    if needs_a or needs_b:
        product = folded
        for scale in (scale_a, scale_b):  # operands of 8 bits have no gradient
            product = product if scale is None else product * scale
        if product.dtype != a.dtype:
            product = product.to(a.dtype)
        weight = b if ctx.is_weight else b.mT
        if needs_a:
            grad_a = gemm(weight.mT, product.mT, *how).mT if _is_column_major(a) else gemm(product, weight, *how)
            grad_a = grad_a if grad_a.dim() == len(shape) else grad_a.view(shape)
        if needs_b and weight.dim() == 2 and weight.stride() == (weight.shape[1], 1):
            grad_weight = gemm(product.mT, a, *how)
            grad_b = grad_weight if ctx.is_weight else grad_weight.mT
        elif needs_b:
            grad_b = gemm(a.mT, product, *how)
            grad_b = grad_b.mT if ctx.is_weight else grad_b
    if needs_bias:
        grad_bias = folded.sum(dim=0 if folded.dim() == 2 else (0, 1), dtype=bias_dtype)
    if needs_residual:
        grad_residual = (grad if beta == 1 else beta * grad).to(residual_dtype)
    return grad_a, grad_b, grad_bias, grad_residual


def product_tangent(ctx: Any, tangents: Sequence[torch.Tensor | None], gemm: Gemm) -> torch.Tensor:
    """The tangent of the output, from those of a, b, bias and residual."""
    a, b, *_, scale_a, scale_b = saved = ctx.saved_tensors
    alpha, beta, _, schedule, workers, *others = ctx.numbers
    of_a, of_b, of_bias, of_residual = tangents[:4]
    wide = wide_dtype(a.dtype)
    found, factor = of_residual, beta
    for x, y in ((of_a, b), (a, of_b)):
        if x is not None and y is not None:
            how = schedule, workers, scale_a, scale_b, *others
            found = gemm(x, y, of_bias, found, alpha, factor, "none", wide, *how)
            of_bias, factor = None, 1.0
    if of_a is None and of_b is None:  # neither product has a tangent
        found = a.new_zeros((*a.shape[:-1], b.shape[-1]), dtype=wide)
        found = found if of_bias is None else found + of_bias
        found = found if of_residual is None or beta == 0 else found + beta * of_residual
    assert found is not None
    return _through_activation(ctx, saved, found, gemm).to(ctx.dtypes[0])


def _through_activation(ctx: Any, saved: Sequence[Any], change: torch.Tensor, gemm: Gemm) -> torch.Tensor:
    """A gradient, or a tangent, times the activation's derivative."""
    alpha, beta, activation, schedule, workers, *others = ctx.numbers
    if activation == "none":
        return change
    a, b, output, bias, residual, scale_a, scale_b = saved
    if activation == "relu":
        return torch.ops.aten.threshold_backward(change.to(output.dtype), output, 0)  # type: ignore[no-any-return]
    wide = wide_dtype(a.dtype)
    b = b.mT if ctx.is_weight else b
    before = gemm(
        a, b, bias, residual, alpha, beta, "none", wide, schedule, workers, scale_a, scale_b, *others
    )  # fmt: skip
    return through_activation(activation, change.to(wide), before)


def through_activation(activation: str, change: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """A gradient, or a tangent, times the derivative, at ``before``, of an activation other than relu."""
    if activation == "silu":
        # In plain operations: aten::silu_backward has no derivative of its own.
        gate = torch.sigmoid(before)
        return change * gate * (1 + before * (1 - gate))
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return torch.ops.aten.gelu_backward(change, before, approximate=approximate)  # type: ignore[no-any-return]


def _is_column_major(x: torch.Tensor) -> bool:
    """Whether a matrix is column-major. As in torch's formulas, a batch of matrices is not."""
    return x.dim() == 2 and bool(x.stride(0) == 1 and x.stride(1) == x.shape[0])


def batched_product(
    count: int, dims: Sequence[int | None], gemm: Gemm, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None,
    residual: torch.Tensor | None, alpha: float, beta: float, *others: Any,
) -> torch.Tensor:  # fmt: skip
    """One product for ``count`` calls of ``gemm``; ``dims``: the dimension of calls of each argument, or None.

    If all calls share b, the rows of all calls form one matrix. Else the calls are batches.

    Returns
    -------
    torch.Tensor
        The results, with the dimension of calls in front.
    """
    *how, scale_a, scale_b, fast_accum, worker_limit = others
    dims = [*dims, *[None] * (6 + len(others) - len(dims))]
    dim_a, dim_b, dim_bias, dim_residual = dims[:4]
    dim_scale_a, dim_scale_b = dims[10:12]
    shape_a, shape_b = (x.shape if d is None else x.movedim(d, 0).shape[1:] for x, d in ((a, dim_a), (b, dim_b)))
    full = (*shape_a[:-1], shape_b[-1])
    is_one_matrix = len(full) == 2 and dim_b is None and dim_scale_b is None
    merges = is_one_matrix or len(full) == 3

    def merged(x: torch.Tensor, dim: int | None, shape: Sequence[int]) -> torch.Tensor:
        x = x.unsqueeze(0) if dim is None else x.movedim(dim, 0)
        if x[:1].numel() == 1:  # a scale of one element has any number of dimensions
            x = x.reshape(-1, *[1] * len(shape))
        x = x.expand(count, *shape)
        return x.flatten(0, 1) if merges else x

    def scale(x: torch.Tensor | None, dim: int | None, shape: Sequence[int]) -> torch.Tensor | None:
        return x if x is None or (dim is None and x.numel() == 1) else merged(x, dim, shape)

    if residual is not None:
        residual = merged(residual, dim_residual, full) if beta != 0 else None
    if bias is not None and dim_bias is not None:  # gemm has one bias for all of its batches
        each = bias.movedim(dim_bias, 0).reshape(count, *[1] * (len(full) - 1), full[-1])
        of_rows = merged(each, 0, full)
        wide = wide_dtype(a.dtype)
        residual = of_rows if residual is None else of_rows.to(wide) + beta * residual.to(wide)
        bias, beta = None, 1.0
    result = gemm(
        merged(a, dim_a, shape_a), b if is_one_matrix else merged(b, dim_b, shape_b), bias, residual, alpha, beta, *how,
        scale(scale_a, dim_scale_a, (*full[:-1], 1)),
        scale_b if is_one_matrix else scale(scale_b, dim_scale_b, (*full[:-2], 1, full[-1])), fast_accum, worker_limit,
    )  # fmt: skip
    return result.reshape(count, *full)
