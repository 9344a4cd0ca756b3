"""The registered ops of matmul: schemas, CPU, GPU and fake implementations, derivatives, batching, FLOP counts.

There are ``tilestream::gemm``, ``tilestream::gemm_arriving`` for operands that arrive (both also with ``out``), and
``tilestream::gemm_published_out``, which signals each chunk of the output's rows. They take tensors and numbers only:
an `Arrival` is passed as a list of integers (`FlatArrival`) and its signal words. Operands are canonical: ``[M, K] @
[K, N]`` or ``[B, M, K] @ [B, K, N]``. The public ops make views for torch's other forms, and torch's own gradients of
these views apply.

Compiled graphs call ``tilestream::gemm_forward`` for products with at most a bias and an activation. It has no
derivative and few arguments: both would cost the host as much as the launch.

The ops are defined by ``torch.library.Library``: the ``custom_op`` decorator costs three times as much a call.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilestream.arrival.flat import DEFAULT_DEADLINE, Awaited, FlatArrival, check_deadline
from tilestream.arrival.stream import open_streams
from tilestream.core.device import DeviceProperties
from tilestream.core.operands import GemmOperands
from tilestream.launch.observe import observation
from tilestream.ops import execute, gpu, native, streamed
from tilestream.ops.checks import check_pair, check_written, refuse_given, refuse_gradients
from tilestream.ops.flops import register_flop_formula
from tilestream.ops.gradients import (
    Derivative,
    batched_product,
    below_autograd,
    derivative,
    product_gradients,
    product_tangent,
    save_product,
)
from tilestream.ops.operands import epilogue_of, refuse_overlap
from tilestream.ops.scales import FP8_DTYPES, FP8_RESULT_DTYPE
from tilestream.ops.sharding import with_strategies
from tilestream.plan import limit as limits
from tilestream.plan.api import SCHEDULES
from tilestream.plan.problem import dtype_name, result_name

library = torch.library.Library("tilestream", "DEF")
# torch.compile must not capture such an op in a CUDA graph: a replay would lack the signals, issued outside of it.
_alone = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()


def register(name: str, schema: str, real: Callable[..., Any], fake: Callable[..., Any], alone: bool = False) -> None:
    """Define ``tilestream::name``. ``real`` runs on CPUs and GPUs, ``fake`` without data; ``alone``: see `_alone`."""
    library.define(name + schema, tags=_alone if alone else ())
    for device in ("CPU", "CUDA"):
        library.impl(name, real, device)
    torch.library.register_fake(f"tilestream::{name}", with_strategies(name, fake), lib=library)


# The schemas' arguments, in order: the common ones; what arrives or is published; the output of an ``out`` form; those
# with defaults. Torch leaves out trailing defaults.
_COMMON = (
    "Tensor a, Tensor b, Tensor? bias, Tensor? residual, float alpha, float beta, str activation, "
    "ScalarType? out_dtype, str schedule, int workers"
)
# SymInt, since a compiled graph would else be compiled anew for each epoch of an arrival. op: for messages.
_LATE = {
    "": "",
    "_arriving": ", Tensor? row_signals, SymInt[] row_arrival, Tensor? column_signals, SymInt[] column_arrival, "
    "float deadline, str op",
    "_published": ", Tensor? signals, SymInt[] publish, str op",
}
# Scales have one element, or are [M, 1] and [1, N], with the batch in front where there is one.
# worker_limit: the limit of the blocks of `tilestream.worker_limit` around the call; 0: no limit.
_OPTIONAL = ", Tensor? scale_a=None, Tensor? scale_b=None, bool fast_accum=True, int worker_limit=0"
_DEFAULTS: tuple[Any, ...] = (None, None, True, 0)
_NUM_COMMON = 10
#: The tensors of an op, by name.
_OPERANDS = "a", "b", "bias", "residual", "out", "scale_a", "scale_b"


def result_dtype(a: torch.Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the result.

    Raises
    ------
    TypeError
        If ``out_dtype`` has more precision than the accumulator, or 8 bits.
    """
    if out_dtype is None:
        return FP8_RESULT_DTYPE if a.dtype in FP8_DTYPES else a.dtype
    result_name(dtype_name(a.dtype), dtype_name(out_dtype))
    return out_dtype


def _must(holds: bool | torch.SymBool, message: Callable[[], str]) -> None:
    """`torch._check`, but not for what is known to hold: it imports sympy, a second of the first call."""
    if holds is not True:
        torch._check(holds, message)


def _output(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
    """An empty output for operands that fit together; raise for others."""
    if a.dim() not in (2, 3) or b.dim() != a.dim():
        raise ValueError(f"gemm: a has {a.dim()} and b {b.dim()} dimensions; both have 2, or both 3")
    check_pair("gemm", a, b)
    _must(a.shape[-1] == b.shape[-2], lambda: f"gemm: a {list(a.shape)} and b {list(b.shape)} differ in K")
    if a.dim() == 3:
        _must(a.shape[0] == b.shape[0], lambda: f"gemm: a {list(a.shape)} and b {list(b.shape)} differ in batches")
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=result_dtype(a, out_dtype))


def _check_out(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None) -> None:
    """Raise unless ``out`` has the result's dtype and shape. Its first dimension may be split into several."""
    shape, dtype = (*a.shape[:-1], b.shape[-1]), result_dtype(a, out_dtype)
    first = out.dim() - len(shape) + 1
    if first < 1 or (math.prod(out.shape[:first]), *out.shape[first:]) != shape:
        raise ValueError(f"out: shape {list(out.shape)}; the result has {list(shape)}")
    if out.dtype != dtype:
        raise TypeError(f"out: dtype {out.dtype}; the result is {dtype}: pass out_dtype={out.dtype} to have it so")


def _canonical(out: torch.Tensor, args: tuple[Any, ...], optional: tuple[Any, ...]) -> tuple[GemmOperands, gpu.How]:
    """The operands and options of a launch, from the arguments that all ops have."""
    a, b, bias, residual, alpha, beta, activation, _, schedule, workers = args
    scale_a, scale_b, fast_accum, worker_limit = (*optional, *_DEFAULTS[len(optional) :])
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r}; it must be one of {', '.join(SCHEDULES)}")
    epilogue = epilogue_of(out, alpha, bias, residual, beta, activation, scale_a, scale_b)
    # The argument has the limit of blocks inside a compiled function, this thread that of blocks around it.
    how = gpu.How(schedule, workers, fast_accum, limits.tighter(worker_limit, limits.limit()))
    return GemmOperands(a, b, out, epilogue), how


def compile_ahead(args: tuple[Any, ...], out: torch.Tensor, device: DeviceProperties, arriving: bool = False) -> None:
    """Compile what `gemm_op`, or `gemm_arriving_op`, called with ``args``, would launch on ``device`` for ``out``."""
    end = _NUM_COMMON + (_LATE["_arriving"].count(",") if arriving else 0)
    late: tuple[Any, ...] = args[_NUM_COMMON:end] or (None, (), None, ())
    row_words, rows, column_words, columns, *_ = late
    gpu.compile_ahead(
        *_canonical(out, args[:_NUM_COMMON], args[end:]), device, FlatArrival.from_ints(rows, row_words),
        FlatArrival.from_ints(columns, column_words),
    )  # fmt: skip


def _run(
    out: torch.Tensor, fresh: bool, kind: str, args: tuple[Any, ...], late: tuple[Any, ...], optional: tuple[Any, ...]
) -> None:
    """Run an op of a kind of `_LATE`. ``fresh``: the output was made for this call."""
    a, b = args[:2]
    into = out if fresh or out.dim() == a.dim() else _merged(out, (*a.shape[:-1], b.shape[-1]), kind)
    x, how = _canonical(into, args, optional)
    copied = into.data_ptr() != out.data_ptr()
    if not fresh:
        refuse_overlap(x._replace(out=out) if copied else x)
    rows = columns = publishes = None
    deadline, op = DEFAULT_DEADLINE, "matmul"
    if kind == "_arriving":
        row_signals, row_arrival, column_signals, column_arrival, seconds, op = late
        rows = FlatArrival.from_ints(row_arrival, row_signals)
        columns = FlatArrival.from_ints(column_arrival, column_signals)
        deadline = check_deadline(seconds)
    elif kind == "_published":
        signals, publish, op = late
        publishes = FlatArrival.from_ints(publish, signals)
    if not out.is_cuda:
        execute.run(x, how, rows, columns, publishes, deadline, op)
    elif publishes is None:
        if x.epilogue.alpha == 0 and not kind:  # as in torch the operands are not read: NaN times 0 would be NaN
            x = x._replace(a=a[..., :0], b=b[..., :0, :])
        gpu.run(x, how, None, rows, columns, deadline, op)
    else:
        from tilestream.ops import publish as publishing

        publishing.publish(x, publishes, how, op)
    if copied:
        with torch.inference_mode():  # the output may be an inference tensor
            out.copy_(into.view(out.shape))


def _merged(out: torch.Tensor, shape: tuple[int, ...], kind: str) -> torch.Tensor:
    """A canonical view of ``out``, or a new tensor if its strides allow none: the caller copies it."""
    try:
        return out.view(shape)
    except RuntimeError:
        if kind:
            raise ValueError(
                f"out: stride {out.stride()} for shape {list(out.shape)}: its leading dimensions cannot be seen as "
                "one, and with arrival= or publish= it is written in place; give a contiguous output and copy it"
            ) from None
        return out.new_empty(shape)


def _define(kind: str, into: bool) -> None:
    """Register an op of a kind of `_LATE`. ``into``: it writes into its argument ``out``."""
    end = _NUM_COMMON + _LATE[kind].count(",")

    def refuse(args: tuple[Any, ...]) -> None:
        """Raise if the call reads, or writes, what a stream has not filled yet."""
        operands = (*args[:4], args[end] if into else None, *args[end + into :])
        arriving: tuple[str, ...] = ()
        if kind == "_arriving":
            _, rows, _, columns, *_ = args[_NUM_COMMON:end]
            arriving = ("a",) * bool(rows) + ("b",) * bool(columns)
        streamed.refuse_unfilled("gemm", _OPERANDS, operands, arriving)

    def run(*args: Any) -> torch.Tensor:
        made = fake(*args)
        out: torch.Tensor = args[end] if made is None else made
        if into:
            check_written("gemm", out)
        _run(out, not into, kind, args[:_NUM_COMMON], args[_NUM_COMMON:end], args[end + into :])
        if into:  # autograd does not see that the kernel writes
            torch._C._increment_version((out,))
        return out

    def real(*args: Any) -> torch.Tensor | None:
        if open_streams:
            refuse(args)
        if kind or not args[0].is_cuda or observation() is not None:
            made = run(*args)
        else:
            # Compiled graphs call this op: the extension launches an equal call, as for a public op.
            a, b, bias, residual, alpha, beta, activation, out_dtype, schedule, workers = args[:_NUM_COMMON]
            out, optional = args[end] if into else None, args[end + into :]
            scale_a, scale_b, fast_accum, worker_limit = (*optional, *_DEFAULTS[len(optional) :])
            call = (
                "gemm", a, b, out, bias, residual, alpha, beta, None if activation == "none" else activation, out_dtype,
                scale_a, scale_b, fast_accum, schedule, workers or None,
            )  # fmt: skip
            if worker_limit in (0, limits.limit()):
                found = native.product(*call)
                made = native.observed(call, lambda: run(*args)) if found is None else found
            else:
                made = run(*args)
        return None if into else made

    def fake(a: torch.Tensor, b: torch.Tensor, *others: Any) -> torch.Tensor | None:
        if not into:
            return _output(a, b, others[5])
        _check_out(others[end - 2], a, b, others[5])
        return None

    def forward(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor | None:
        if open_streams:
            streamed.refuse_unfilled("gemm", _OPERANDS, (a, b, bias))
        if a.is_cuda and observation() is None:
            asked = None if activation == "none" else activation
            made = native.product("gemm", a, b, None, bias, activation=asked)
            if made is not None:
                return made
        return real(a, b, bias, None, 1.0, 1.0, activation, None, "auto", 0)

    if not kind and not into:
        of_graphs = "(Tensor a, Tensor b, Tensor? bias, str activation) -> Tensor"
        register("gemm_forward", of_graphs, forward, lambda a, b, bias, activation: _output(a, b, None))
    name, out, result = ("_out", ", Tensor(a!) out", "()") if into else ("", "", "Tensor")
    schema = f"({_COMMON}{_LATE[kind]}{out}{_OPTIONAL}) -> {result}"
    register(f"gemm{kind}{name}", schema, real, fake, alone=bool(kind))


def _clear_signals(signals: torch.Tensor) -> None:
    with torch.inference_mode():  # the words may be an inference tensor
        signals.zero_()


for _kind, _into in (("", False), ("", True), ("_arriving", False), ("_arriving", True), ("_published", True)):
    _define(_kind, _into)
library.define("clear_signals(Tensor(a!) signals) -> ()")
library.impl("clear_signals", _clear_signals, "CompositeExplicitAutograd")

gemm_op = torch.ops.tilestream.gemm.default
gemm_forward_op = torch.ops.tilestream.gemm_forward.default
gemm_out_op = torch.ops.tilestream.gemm_out.default
gemm_arriving_op = torch.ops.tilestream.gemm_arriving.default
gemm_arriving_out_op = torch.ops.tilestream.gemm_arriving_out.default
gemm_published_out_op = torch.ops.tilestream.gemm_published_out.default
clear_signals_op = torch.ops.tilestream.clear_signals.default


# Derivatives ----------------------------------------------------------------------------------------------------------


def _differentiate(op: Any) -> None:
    """Register the derivative of an op that makes its output. Gradients of rows that have not arrived are NaN."""
    derivatives = streamed.derivative_of_awaited if op is gemm_arriving_op else contextlib.nullcontext

    class Gemm(Derivative):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> torch.Tensor:
            scale_a, scale_b, *_ = optional = args[-len(_DEFAULTS) :]
            refuse_gradients("gemm", a=args[0], b=args[1], scale_a=scale_a, scale_b=scale_b)
            output: torch.Tensor = below_autograd(op, *args)
            save_product(ctx, (*args[:_NUM_COMMON], *optional), output)
            ctx.awaited = None
            if op is gemm_arriving_op:
                row_words, rows, column_words, columns, _, name = args[_NUM_COMMON : -len(_DEFAULTS)]
                flat = FlatArrival.from_ints(rows, row_words), FlatArrival.from_ints(columns, column_words)
                ctx.awaited = Awaited.for_gradient(*flat, name, output)
            return output

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
            grad = grad if grad is None or ctx.awaited is None else ctx.awaited.void_if_late(grad)
            with derivatives():
                found = () if grad is None else product_gradients(ctx, grad, gemm_op)
            return *found, *[None] * (len(ctx.needs_input_grad) - len(found))

        @staticmethod
        def jvp(ctx: Any, *tangents: torch.Tensor | None) -> torch.Tensor:
            refuse_given("gemm", *tangents[4:])
            with derivatives():
                found = product_tangent(ctx, tangents, gemm_op)
            return found if ctx.awaited is None else ctx.awaited.void_if_late(found)

    derivative(library, op, Gemm, _in_graphs if op is gemm_op else None)


def _in_graphs(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, alpha: float,
    beta: float, activation: str, *others: Any,
) -> tuple[Any, ...] | None:  # fmt: skip
    """See `tilestream.ops.gradients.derivative`."""
    others += _DEFAULTS[len(others) - 3 :]
    if residual is not None or others != (None, "auto", 0, *_DEFAULTS):
        return None
    if type(alpha) is not float or type(beta) is not float or alpha != 1.0:
        return None
    return gemm_forward_op, a, b, bias, activation


def _batched(info: Any, dims: Sequence[int | None], *args: Any) -> tuple[torch.Tensor, int]:
    return batched_product(info.batch_size, dims, gemm_op, *args, *_DEFAULTS[len(args) - _NUM_COMMON :]), 0


for _op in (gemm_op, gemm_arriving_op):
    _differentiate(_op)
torch.library.register_vmap("tilestream::gemm", _batched, lib=library)


@register_flop_formula([
    op.overloadpacket
    for op in (
        gemm_op, gemm_forward_op, gemm_out_op, gemm_arriving_op, gemm_arriving_out_op, gemm_published_out_op
    )
])  # fmt: skip
def _flops(a_shape: Sequence[int], b_shape: Sequence[int], *args: Any, **kwargs: Any) -> int:
    flops = 2 * b_shape[-1]
    for extent in a_shape:
        flops *= extent
    return flops
