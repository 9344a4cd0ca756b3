"""The registered ops: schemas, CPU and fake implementations, autograd, FLOP counts.

Two ops, each with an ``out`` form: ``tilestream::gemm``, and ``tilestream::gemm_arriving`` for operands that come in;
and ``tilestream::gemm_published_out``, which signals each chunk of the output's rows.
They take tensors and integers only: an `Arrival` travels as a list of integers (`FlatArrival`) beside its signal words.
They are canonical: ``[M, K] @ [K, N]`` or ``[B, M, K] @ [B, K, N]``; torch's other forms are views, made by the callers
in this package, so that their gradients are torch's own.

Defined by ``torch.library.Library`` and not by the ``custom_op`` decorator, which costs three times as much a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import register_flop_formula

from tilestream.arrival.flat import DEFAULT_DEADLINE, Awaited, FlatArrival, check_deadline
from tilestream.core.operands import GemmOperands
from tilestream.ops import gpu
from tilestream.ops.execute import execute, make_epilogue, problem_of
from tilestream.ops.overlap import refuse_overlap
from tilestream.ops.scales import FP8_DTYPES, FP8_RESULT_DTYPE, check_pair, refuse_gradients
from tilestream.plan import limit as limits
from tilestream.plan.api import SCHEDULES
from tilestream.plan.planner import plan_problem
from tilestream.plan.problem import dtype_name, result_name

_OPERANDS = (
    "Tensor a, Tensor b, Tensor? bias, Tensor? residual, float alpha, float beta, str activation, ScalarType? out_dtype"
)
_HOW = "str schedule, int workers"
# SymInt, or a compiled graph would be made anew for every epoch of an arrival; op, for messages.
_ARRIVING = (
    "Tensor? row_signals, SymInt[] row_arrival, Tensor? column_signals, SymInt[] column_arrival, float deadline, str op"
)
_PUBLISH = "Tensor? signals, SymInt[] publish, str op"
# Scales have one element, or are [M, 1] and [1, N], with the batch in front where there is one.
# worker_limit: of the blocks of `tilestream.worker_limit` around the call; 0: none.
_OPTIONAL = "Tensor? scale_a=None, Tensor? scale_b=None, bool fast_accum=True, int worker_limit=0"

#: Arguments of all ops behind the two operands.
_COMMON = 8

library = torch.library.Library("tilestream", "DEF")
library.define(f"gemm({_OPERANDS}, {_HOW}, {_OPTIONAL}) -> Tensor")
library.define(f"gemm_out({_OPERANDS}, {_HOW}, Tensor(a!) out, {_OPTIONAL}) -> ()")
# A graph that torch.compile captures by itself would replay without the signals, which are issued outside of it.
_alone = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()
library.define(f"gemm_arriving({_OPERANDS}, {_HOW}, {_ARRIVING}, {_OPTIONAL}) -> Tensor", tags=_alone)
library.define(f"gemm_arriving_out({_OPERANDS}, {_HOW}, {_ARRIVING}, Tensor(a!) out, {_OPTIONAL}) -> ()", tags=_alone)
library.define(f"gemm_published_out({_OPERANDS}, {_HOW}, {_PUBLISH}, Tensor(a!) out, {_OPTIONAL}) -> ()", tags=_alone)
library.define("clear_signals(Tensor(a!) signals) -> ()")

gemm_op = torch.ops.tilestream.gemm.default
gemm_out_op = torch.ops.tilestream.gemm_out.default
gemm_arriving_op = torch.ops.tilestream.gemm_arriving.default
gemm_arriving_out_op = torch.ops.tilestream.gemm_arriving_out.default
gemm_published_out_op = torch.ops.tilestream.gemm_published_out.default
clear_signals_op = torch.ops.tilestream.clear_signals.default


def result_dtype(a: torch.Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the result.

    Raises
    ------
    TypeError
        If ``out_dtype`` is finer than what products are added up in, or of 8 bits.
    """
    if out_dtype is None:
        return FP8_RESULT_DTYPE if a.dtype in FP8_DTYPES else a.dtype
    result_name(dtype_name(a.dtype), dtype_name(out_dtype))
    return out_dtype


def _must(holds: bool | torch.SymBool, message: Callable[[], str]) -> None:
    """`torch._check`, but not where it is known to hold: that imports sympy, a second of a process's first call."""
    if holds is not True:
        torch._check(holds, message)


def _output(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
    """An empty output, after checking the operands: the one text for the real and the fake implementation."""
    if a.dim() not in (2, 3) or b.dim() != a.dim():
        raise ValueError(f"gemm: a has {a.dim()} and b {b.dim()} dimensions; both have 2, or both 3")
    check_pair("gemm", a, b)
    _must(a.shape[-1] == b.shape[-2], lambda: f"gemm: a {list(a.shape)} and b {list(b.shape)} differ in K")
    if a.dim() == 3:
        _must(a.shape[0] == b.shape[0], lambda: f"gemm: a {list(a.shape)} and b {list(b.shape)} differ in batches")
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=result_dtype(a, out_dtype))


class _Nothing(NamedTuple):
    """Nothing arrives, and nothing is published."""


class _Arriving(NamedTuple):
    """The schema's `_ARRIVING`."""

    row_signals: torch.Tensor | None
    row_arrival: Sequence[int]
    column_signals: torch.Tensor | None
    column_arrival: Sequence[int]
    deadline: float | None
    op: str


class _Publish(NamedTuple):
    """The schema's `_PUBLISH`."""

    signals: torch.Tensor | None
    publish: Sequence[int]
    op: str


class _Optional(NamedTuple):
    """The schema's `_OPTIONAL`."""

    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    fast_accum: bool = True
    worker_limit: int = 0


def _run(
    out: torch.Tensor,
    fresh: bool,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    alpha: float,
    beta: float,
    activation: str,
    out_dtype: torch.dtype | None,
    schedule: str,
    workers: int,
    *,
    late: _Nothing | _Arriving | _Publish,
    optional: _Optional,
) -> None:
    """What every op does, given its arguments in the schema's order."""
    scale_a, scale_b, fast_accum, worker_limit = optional
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r}; it is one of {', '.join(SCHEDULES)}")
    x = GemmOperands(a, b, out, make_epilogue(out, bias, residual, alpha, beta, activation, scale_a, scale_b))
    if not fresh:
        refuse_overlap(out, x.epilogue, a=a, b=b)
    rows = columns = publishes = None
    deadline, op = DEFAULT_DEADLINE, "matmul"
    if isinstance(late, _Arriving):
        rows = FlatArrival.from_ints(late.row_arrival, late.row_signals)
        columns = FlatArrival.from_ints(late.column_arrival, late.column_signals)
        deadline, op = check_deadline(late.deadline), late.op
    elif isinstance(late, _Publish):
        publishes, op = FlatArrival.from_ints(late.publish, late.signals), late.op
    # A compiled function's argument knows of the blocks inside it, this thread of those around it.
    how = gpu.How(schedule, workers, fast_accum, limits.tighter(worker_limit, limits.limit()))
    if out.is_cuda and publishes is not None:
        from tilestream.ops.publish import publish

        publish(x, publishes, how, op)
    elif out.is_cuda:
        gpu.run(x, how, None, rows, columns, deadline, op)
    else:
        if a.dim() == 2:
            x = GemmOperands(a.unsqueeze(0), b.unsqueeze(0), out.unsqueeze(0), x.epilogue)
        problem = problem_of(x.a, x.b, out.dtype, rows, columns, x.epilogue.scales, publishes)
        plan = plan_problem(
            problem, workers or None, schedule, default_workers=torch.get_num_threads(), limit=how.limit
        )  # fmt: skip
        execute(plan, x, Awaited.of(rows, columns, deadline, op, a.device), op, publishes)


def _check_out(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None) -> None:
    shape = (*a.shape[:-1], b.shape[-1])
    if tuple(out.shape) != shape:
        raise ValueError(f"out: shape {list(out.shape)}; the result has {list(shape)}")
    if out.dtype != result_dtype(a, out_dtype):
        raise TypeError(
            f"out: dtype {out.dtype}; the result is {result_dtype(a, out_dtype)}: pass out_dtype={out.dtype} to "
            "have it so"
        )


def _define(name: str, kind: type[_Arriving | _Publish | _Nothing], into: bool) -> None:
    """Register the implementations of an op: what its schema has behind the operands, and whether it is an out form."""
    late_fields, nothing = len(kind._fields), _Nothing()
    end = _COMMON + late_fields

    def real(a: torch.Tensor, b: torch.Tensor, *others: Any) -> torch.Tensor | None:
        out = fake(a, b, *others)
        late = kind(*others[_COMMON:end]) if late_fields else nothing
        # torch leaves out arguments that are the schema's defaults: those of `_Optional`, all or the last ones.
        if out is None:
            _run(others[end], False, a, b, *others[:_COMMON], late=late, optional=_Optional(*others[end + 1 :]))
        else:
            _run(out, True, a, b, *others[:_COMMON], late=late, optional=_Optional(*others[end:]))
        return out

    def fake(a: torch.Tensor, b: torch.Tensor, *others: Any) -> torch.Tensor | None:
        if not into:
            return _output(a, b, others[5])
        _check_out(others[end], a, b, others[5])
        return None

    for device in ("CPU", "CUDA"):
        library.impl(name, real, device)
    torch.library.register_fake(f"tilestream::{name}", fake, lib=library)


def _clear_signals(signals: torch.Tensor) -> None:
    with torch.inference_mode():  # the words may be an inference tensor
        signals.zero_()


_define("gemm", _Nothing, False)
_define("gemm_out", _Nothing, True)
_define("gemm_arriving", _Arriving, False)
_define("gemm_arriving_out", _Arriving, True)
_define("gemm_published_out", _Publish, True)
library.impl("clear_signals", _clear_signals, "CompositeExplicitAutograd")


# Autograd -----------------------------------------------------------------------------------------------------------


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, bias, residual, alpha, beta, activation, _, schedule, workers, *others = inputs
    scale_a, scale_b, ctx.fast_accum, ctx.worker_limit = others[-4:]
    refuse_gradients("gemm", a=a, b=b, scale_a=scale_a, scale_b=scale_b)
    # What the derivative of the activation needs: relu's is in the output; the others' input is computed once more
    # in the backward pass, which costs a matmul and keeps no [M, N] tensor alive.
    kept = (a, b, output if activation == "relu" else None)
    again = (bias, residual) if activation not in ("none", "relu") else (None, None)
    ctx.save_for_backward(*kept, *again, scale_a, scale_b)
    ctx.alpha, ctx.beta, ctx.activation = alpha, beta, activation
    ctx.schedule, ctx.workers = schedule, workers
    ctx.bias = None if bias is None else (bias.shape, bias.dtype)
    ctx.residual = None if residual is None else residual.dtype


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    a, b, output, bias, residual, scale_a, scale_b = ctx.saved_tensors
    how, plain = (ctx.schedule, ctx.workers), (None, None, True, ctx.worker_limit)
    if ctx.activation == "relu":
        grad = torch.ops.aten.threshold_backward(grad, output, 0)
    elif ctx.activation != "none":
        wide = torch.float64 if a.dtype == torch.float64 else torch.float32
        scaled = (scale_a, scale_b, ctx.fast_accum, ctx.worker_limit)
        before = gemm_op(a, b, bias, residual, ctx.alpha, ctx.beta, "none", wide, *how, *scaled)
        grad = _activation_backward(ctx.activation, grad.to(wide), before)
    grad_a = grad_b = grad_bias = grad_residual = None
    if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
        product = grad
        for scale in (scale_a, scale_b):  # of operands that have more than 8 bits
            product = product if scale is None else product * scale
        narrow = product.to(a.dtype)
        if ctx.needs_input_grad[0]:
            grad_a = gemm_op(narrow, b.mT, None, None, ctx.alpha, 1.0, "none", None, *how, *plain)
        if ctx.needs_input_grad[1]:
            grad_b = gemm_op(a.mT, narrow, None, None, ctx.alpha, 1.0, "none", None, *how, *plain)
    if ctx.bias is not None and ctx.needs_input_grad[2]:
        grad_bias = grad.sum(dim=tuple(range(grad.dim() - 1))).to(ctx.bias[1])
    if ctx.residual is not None and ctx.needs_input_grad[3]:
        grad_residual = (ctx.beta * grad).to(ctx.residual)
    return grad_a, grad_b, grad_bias, grad_residual, *([None] * 10)


def _backward_arriving(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    # By now everything has arrived: the operands are ordinary tensors.
    return *_backward(ctx, grad), *([None] * 6)


def _activation_backward(activation: str, grad: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    if activation == "silu":
        # In plain operations: aten::silu_backward has no derivative of its own.
        gate = torch.sigmoid(before)
        return grad * gate * (1 + before * (1 - gate))
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    result: torch.Tensor = torch.ops.aten.gelu_backward(grad, before, approximate=approximate)
    return result


torch.library.register_autograd("tilestream::gemm", _backward, setup_context=_setup_context, lib=library)
torch.library.register_autograd(
    "tilestream::gemm_arriving", _backward_arriving, setup_context=_setup_context, lib=library
)


@register_flop_formula(
    [
        torch.ops.tilestream.gemm,
        torch.ops.tilestream.gemm_out,
        torch.ops.tilestream.gemm_arriving,
        torch.ops.tilestream.gemm_arriving_out,
        torch.ops.tilestream.gemm_published_out,
    ]
)
def _flops(a_shape: Sequence[int], b_shape: Sequence[int], *args: Any, **kwargs: Any) -> int:
    flops = 2 * b_shape[-1]
    for extent in a_shape:
        flops *= extent
    return flops
