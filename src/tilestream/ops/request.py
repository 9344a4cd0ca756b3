"""`Request`: a call of a matmul op. It is validated once and brought to the canonical form of the registered ops."""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from tilestream.arrival.arrival import Arrival
from tilestream.arrival.flat import FlatArrival, check_deadline
from tilestream.core.arguments import is_one_of
from tilestream.core.operands import ACTIVATIONS as KERNEL_ACTIVATIONS
from tilestream.core.operands import Epilogue
from tilestream.launch.observe import PRODUCTS
from tilestream.ops import checks, gated, library, native
from tilestream.ops.gradients import Derivative, product_gradients, save_product
from tilestream.ops.inline import PLAIN
from tilestream.ops.limit import limit, within_limit
from tilestream.ops.operands import Overlap, made_fresh, unviewed
from tilestream.ops.scales import FP8_DTYPES, canonical_scales
from tilestream.ops.sharding import dtensor_views, is_dtensor, refuse_dtensors
from tilestream.plan import limit as limits
from tilestream.plan.api import SCHEDULES, check_publish
from tilestream.runtime import shutdown

#: Public names of the activations.
ACTIVATIONS = tuple(name for name in KERNEL_ACTIVATIONS if name != "none")
#: The number of fields of a `Request` that are arguments of `tilestream.ops.native.product`: the first ones.
_NUM_NATIVE = 15
#: By op: its names of tensors that `Request` calls otherwise.
_NAMES = {"linear": {"a": "x", "b": "weight"}, "addmm": {"residual": "input"}}


# Each may have to see a call of plain tensors.
_is_grad_enabled, _dispatch_modes = torch.is_grad_enabled, torch._C._len_torch_dispatch_stack
_is_autocast_enabled = torch._C._is_any_autocast_enabled
_transform, _jit_trace = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
#: The arguments of `_launch`, after the operands, for a product without options.
_PLAINLY = (None, None, 1.0, 1.0, "none", None, "auto", 0, None, None, True, 0)


class Request(NamedTuple):
    """A call of any matmul op: the operands and all options. `multiply` validates it once and runs it."""

    # The first fields are the arguments of `tilestream.ops.native.product`, in its order.
    op: str  # the public op's name, for messages
    #: a, b: the operands, with torch.matmul's rules for dimensions. For ``linear``, b is the weight.
    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    alpha: float = 1.0
    beta: float = 1.0
    activation: str | None = None
    out_dtype: torch.dtype | None = None
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    fast_accum: bool = True
    schedule: str = "auto"
    workers: int | None = None
    arrival: Arrival | None = None
    weight_arrival: Arrival | None = None
    publish: Arrival | None = None
    deadline: float | None = None

    def check(self) -> None:
        """Raise for options that are wrong for all operands."""
        op = self.op
        if self.activation is not None and not is_one_of(self.activation, ACTIVATIONS):
            raise ValueError(
                f"{op}: activation={self.activation!r}; it must be None or one of {', '.join(ACTIVATIONS)}"
            )
        if not is_one_of(self.schedule, SCHEDULES):
            raise ValueError(f"{op}: schedule={self.schedule!r}; it must be one of {', '.join(SCHEDULES)}")
        for name, factor in (("alpha", self.alpha), ("beta", self.beta)):
            number = checks.as_number(factor)
            if number is None:
                raise TypeError(f"{op}: {name}={factor!r}; it must be a number")
            is_wide = getattr(self.a, "dtype", None) == torch.float64
            most, kind = (sys.float_info.max, "float64") if is_wide else (checks.FLOAT32_MAX, "float32")
            if most < abs(number) and abs(factor) < math.inf:
                raise ValueError(f"{op}: {name}={factor!r}; it is applied in {kind}, and at most {most:.3g}")
        if self.out_dtype is not None and not isinstance(self.out_dtype, torch.dtype):
            raise TypeError(f"{op}: out_dtype={self.out_dtype!r}; it must be a torch.dtype")
        if not isinstance(self.fast_accum, bool):
            raise TypeError(f"{op}: use_fast_accum={self.fast_accum!r}; it must be True or False")
        arriving = self.arrives()
        if arriving or self.publish is not None or self.workers is not None or self.deadline is not None:
            checks.check_waiting(
                op, self.workers, self.deadline, arrival=self.arrival, weight_arrival=self.weight_arrival,
                publish=self.publish,
            )  # fmt: skip
        if arriving or self.publish is not None:
            refuse_dtensors(op, a=self.a, b=self.b, out=self.out)
        if self.publish is not None:
            check_publish(op, self.schedule, arriving)

    def name(self, field: str) -> str:
        """The caller's name of a tensor of the request."""
        return _NAMES.get(self.op, {}).get(field, field)

    def arrives(self) -> bool:
        """Whether an operand arrives. Not a property: torch 2.10's compiler follows no property of a named tuple."""
        return self.arrival is not None or self.weight_arrival is not None

    def epilogue(self, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None) -> Epilogue:
        """The epilogue of a product of two matrices that has no residual."""
        return Epilogue(self.alpha, self.bias, None, 1.0, self.activation or "none", scale_a, scale_b)

    def needs_gradient(self, *more: torch.Tensor | None) -> bool:
        """Whether a tensor of this call, or of ``more``, requires a gradient."""
        tensors = (self.a, self.b, self.bias, self.residual, *more)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def multiply(r: Request) -> torch.Tensor:
    """``a @ b`` with torch.matmul's rules for 1-D, 2-D and batched operands, through the registered ops.

    The next equal call is launched by the extension, or on the CPU by `inline`.
    """
    if torch.compiler.is_compiling() or not isinstance(r.a, torch.Tensor) or not isinstance(r.b, torch.Tensor):
        return _multiply(r)
    if r.arrives() or r.publish is not None or r.deadline is not None:
        gate = None
        if r.a.is_cuda:
            gate = gated.Gate.of(r.op, r.a.get_device(), r.arrival, r.weight_arrival, r.publish, r.deadline)
        return gated.product(_call_of(r), gate, lambda: _multiply(r))
    if _is_autocast_enabled():
        a, b = checks.autocast(r.op, False, r.a, r.b)
        r = r._replace(a=a, b=b)
        with checks.below_autocast():
            made = native.product(*_call_of(r))
            return multiply(r) if made is None else made
    if _is_seen_by_autograd_alone(r):
        return _Product.apply(r.a, r.b, r.bias, r.residual, r)  # type: ignore[attr-defined, no-any-return]
    with dtensor_views(r.a, r.b):
        return native.observed(_call_of(r), lambda: _multiply(r))


def _call_of(r: Request) -> tuple[Any, ...]:
    """The arguments of `tilestream.ops.native.product`. A collective's product, checked before, counts as matmul."""
    return r[:_NUM_NATIVE] if r.op in PRODUCTS else ("matmul", *r[1:_NUM_NATIVE])


class _Product(Derivative):
    """A product of plain tensors, and its gradients, whose products are launched as calls of their own.

    The formulas are those of the registered ops. Their autograd kernels would cost the host more than the launches.
    """

    @staticmethod
    def forward(
        ctx: Any, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, r: Request
    ) -> torch.Tensor:  # fmt: skip
        call = _call_of(r)
        output = native.product(*call)
        if output is None:
            output = native.observed(call, lambda: _multiply(r))
        how = r.activation or "none", r.out_dtype, r.schedule, r.workers or 0, None, None, r.fast_accum, limits.limit()
        save_product(
            ctx, (a, b, bias, residual, float(r.alpha), float(r.beta), *how), output, is_weight=r.op == "linear"
        )
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None,) * 5 if grad is None else (*product_gradients(ctx, grad, _launch), None)


def _is_seen_by_autograd_alone(r: Request) -> bool:
    """Whether a call of plain tensors requires a gradient, and nothing but autograd has to see it.

    Asked for calls that wait for nothing.
    """
    _, a, b, out, bias, residual, *_ = r
    if not _is_grad_enabled() or out is not None or r.scale_a is not None or r.scale_b is not None:
        return False
    if type(a) not in PLAIN or type(b) not in PLAIN or (bias is not None and type(bias) not in PLAIN):
        return False
    wants = a.requires_grad or b.requires_grad or (bias is not None and bias.requires_grad)
    if residual is not None:  # it must have the result's shape: of one that broadcasts, torch sums the gradient
        if type(residual) not in PLAIN or residual.is_nested or a.is_nested or b.is_nested:
            return False
        if type(r.alpha) not in (float, int) or type(r.beta) not in (float, int):
            return False
        if residual.shape != (*a.shape[:-1], b.shape[0 if r.op == "linear" else -1]):
            return False
        wants = wants or residual.requires_grad
    if not wants:
        return False
    if not (a.is_cuda or a.is_cpu) or a.is_nested or b.is_nested or a.dtype in FP8_DTYPES:
        return False
    dims = b.dim()
    if not (a.dim() >= dims == 2 or (a.dim() == dims == 3 and a.shape[0] == b.shape[0])):
        return False
    return not _dispatch_modes() and _transform() is None and _jit_trace() is None and forward_ad._current_level < 0


def _launch(a: torch.Tensor, b: torch.Tensor, *how: Any) -> torch.Tensor:
    """``tilestream::gemm`` as a call of its own, for the gradients of `_Product`."""
    if how == _PLAINLY:
        made = native.product("matmul", a, b)
        return multiply(Request("matmul", a, b)) if made is None else made
    bias, residual, alpha, beta, activation, out_dtype, schedule, workers, scale_a, scale_b, fast_accum, bound = how
    if bound and bound != limits.limit():  # torch's backward thread is outside the blocks around the call
        with within_limit(bound):
            return _launch(a, b, *how[:-1], 0)
    call = (
        "matmul", a, b, None, bias, residual, alpha, beta, None if activation == "none" else activation, out_dtype,
        scale_a, scale_b, fast_accum, schedule, workers or None,
    )  # fmt: skip
    made = native.product(*call)
    return multiply(Request(*call)) if made is None else made


def _multiply(r: Request) -> torch.Tensor:
    r.check()
    op, a, b, out = r.op, r.a, r.b, r.out
    names = of_a, of_b = r.name("a"), r.name("b")
    checks.check_operands(op, {
        of_a: a, of_b: b, "bias": r.bias, r.name("residual"): r.residual, "out": out, "scale_a": r.scale_a,
        "scale_b": r.scale_b,
    })  # fmt: skip
    if a.dim() == 0 or b.dim() == 0:
        raise ValueError(f"{op}: {of_a} has {a.dim()} and {of_b} {b.dim()} dimensions; both have at least 1")
    others = () if out is None and r.publish is None else (a, b, r.bias, r.residual, out)
    checks.refuse_tangents(op, r.scale_a, r.scale_b, *others)
    if torch.is_grad_enabled():
        checks.refuse_gradients(op, a=a, b=b, scale_a=r.scale_a, scale_b=r.scale_b, names=names)
    a, b = checks.autocast(op, r.arrives(), a, b)
    checks.check_pair(op, a, b, names)
    b = b.t() if op == "linear" else b
    # The result's dimensions: a vector is one row or column, which the result does not have.
    rows, columns = a.shape[-2:-1], b.shape[-1:] if b.dim() > 1 else ()
    a = a if rows else a.unsqueeze(0)
    b = b if columns else b.unsqueeze(1)
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"{op}: {of_a} {list(r.a.shape)} and {of_b} {list(r.b.shape)} differ in K: {a.shape[-1]} columns of "
            f"{of_a}, {b.shape[-2]} {'columns' if op == 'linear' else 'rows'} of {of_b}"
        )
    batch = _batch(op, a.shape[:-2], b.shape[:-2])
    full, shape = (*batch, a.shape[-2], b.shape[-1]), (*batch, *rows, *columns)
    if r.bias is not None and tuple(r.bias.shape) != (full[-1],):
        raise ValueError(f"{op}: bias has shape {list(r.bias.shape)}; it has one element a column: [{full[-1]}]")
    residual = None if r.residual is None else _expand(r, r.residual, shape, full)
    if out is not None:
        check_out(r, out, shape, library.result_dtype(a, r.out_dtype))
    resized = out is not None and tuple(out.shape) != shape
    copied = out is not None and is_dtensor(out)  # its views need placements that it may not have
    # With one matrix b, a's leading dimensions are rows: one large product instead of many small ones.
    folded = b.dim() == 2 and a.dim() != 2 and (_as_one(a, a.dim() - 1) or not r.arrives())
    into = None if out is None or resized or copied else out.view(full)
    if folded and into is not None:  # the rows of a column-major out may form no single dimension, its batches may
        folded = _as_one(into, len(full) - 1) or not _as_one(into, len(full) - 2)
    canonical = (math.prod(full[:-1]), full[-1]) if folded or len(full) == 2 else (math.prod(batch), *full[-2:])
    scales = canonical_scales(op, r.scale_a, r.scale_b, full[:-1], () if folded else batch, canonical)
    if folded:
        a = a.reshape(canonical[0], a.shape[-1])
    elif len(full) > 2:
        a, b = _batched(op, of_a, a, batch, r.arrival), _batched(op, of_b, b, batch, None)
    if resized:
        assert out is not None
        into = out.resize_(shape).view(full)
    operands = (
        a, b, r.bias, None if residual is None else residual.reshape(canonical), float(r.alpha), float(r.beta),
        r.activation or "none", r.out_dtype, r.schedule, r.workers or 0,
    )  # fmt: skip
    optional = (*scales, r.fast_accum, limit())
    if torch.compiler.is_compiling():
        result = _call(r, canonical, into, operands, optional)
    else:
        try:
            with shutdown.call():
                result = _call(r, canonical, into, operands, optional)
        except Overlap as error:
            raise Overlap(f"{op}: {error.what}", r.name(error.read)) from None
    if out is None:
        with made_fresh():
            return unviewed(result.reshape(shape))
    return out.copy_(result.reshape(shape)) if copied else out


def _call(
    r: Request, canonical: tuple[int, ...], into: torch.Tensor | None, operands: tuple[Any, ...],
    optional: tuple[object, ...],
) -> torch.Tensor:  # fmt: skip
    """Call the registered op with canonical arguments: ``operands`` first, last the ``optional`` ones.

    ``into`` is the caller's output, ``[..., M, N]``.
    """
    result: torch.Tensor
    if r.publish is not None:
        a, flat = operands[0], FlatArrival.of(r.publish)
        flat.published(math.prod(canonical[:-1]))
        if r.needs_gradient(*operands[:2]):
            raise RuntimeError(
                f"{r.op}: publish= has no gradient, and an operand requires one; leave publish= away, or use "
                "torch.no_grad()"
            )
        result = a.new_empty(canonical, dtype=library.result_dtype(a, r.out_dtype)) if into is None else into
        library.gemm_published_out_op(*operands, flat.words, flat.ints, r.op, result, *optional)
        return result
    late: tuple[Any, ...] = ()
    words: list[torch.Tensor | None] = []
    if r.arrives():
        flats = [None if one is None else FlatArrival.of(one) for one in (r.arrival, r.weight_arrival)]
        words = [None if flat is None else flat.words for flat in flats]
        ints = [[] if flat is None else flat.ints for flat in flats]
        late = (words[0], ints[0], words[1], ints[1], check_deadline(r.deadline), r.op)
    if into is None:
        result = (library.gemm_arriving_op if late else library.gemm_op)(*operands, *late, *optional)
    else:
        (library.gemm_arriving_out_op if late else library.gemm_out_op)(*operands, *late, into, *optional)
        result = into
    clear_signals(*words)
    return result


def clear_signals(*words: torch.Tensor | None) -> None:
    """Zero the caller's own signal words on the CPU. On a GPU the launch does so."""
    for one in words:
        if one is not None and not one.is_cuda:
            library.clear_signals_op(one)


def _batch(op: str, of_a: torch.Size, of_b: torch.Size) -> torch.Size:
    """The batch dimensions of the product."""
    # torch.broadcast_shapes imports sympy: a second of a process's first call.
    if not of_a or not of_b:
        return of_a or of_b
    if all(type(extent) is int for extent in (*of_a, *of_b)) and of_a == of_b:
        return of_a
    try:
        both: torch.Size = torch.broadcast_shapes(of_a, of_b)
    except RuntimeError:
        raise ValueError(f"{op}: batch dimensions {list(of_a)} of a and {list(of_b)} of b do not broadcast") from None
    return both


def _as_one(x: torch.Tensor, dims: int) -> bool:
    """Whether the first ``dims`` dimensions of ``x`` are one by a view. A copy would read before ``x`` has arrived."""
    steps = [(x.shape[i], x.stride(i)) for i in range(dims) if x.shape[i] != 1]
    return not x.numel() or all(outer == extent * inner for (_, outer), (extent, inner) in pairwise(steps))


def _batched(op: str, name: str, x: torch.Tensor, batch: torch.Size, arrival: Arrival | None) -> torch.Tensor:
    """``x`` as ``[B, rows, columns]``, repeated for the batches of the other operand."""
    count = math.prod(batch)
    if x.dim() == 2 or math.prod(x.shape[:-2]) == 1:
        return x.reshape(1, *x.shape[-2:]).expand(count, -1, -1)
    if arrival is not None and (x.shape[:-2] != batch or not _as_one(x, x.dim() - 2)):
        raise ValueError(
            f"{op}: {name} {list(x.shape)} arrives and would have to be copied for the batches {list(batch)}; "
            "arriving operands have all of them, in one piece"
        )
    return x.expand(*batch, *x.shape[-2:]).reshape(count, *x.shape[-2:])


def _expand(r: Request, residual: torch.Tensor, shape: tuple[int, ...], full: tuple[int, ...]) -> torch.Tensor:
    try:
        return residual.expand(shape).reshape(full)
    except RuntimeError:
        raise ValueError(
            f"{r.op}: {r.name('residual')} has shape {list(residual.shape)}; it broadcasts to the result's "
            f"{list(shape)}"
        ) from None


def check_out(r: Request, out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise unless the caller's output can take a result of this shape and dtype."""
    checks.check_written(r.op, out)
    if tuple(out.shape) != shape:
        told = f"{r.op}: out has shape {list(out.shape)}; the result has {list(shape)}"
        if torch.compiler.is_compiling() or is_dtensor(out):
            raise ValueError(f"{told}, and no output is resized in a compiled function, nor a DTensor")
        if out.numel():
            raise ValueError(f"{told}: give an out of that shape, or one of no elements, which is resized")
    if out.dtype != dtype:
        raise TypeError(f"{r.op}: out is {out.dtype}, the result {dtype}; pass out_dtype={out.dtype} to have it so")
    if r.needs_gradient(out):
        raise RuntimeError(
            f"{r.op}: out= has no gradient, and an operand requires one; leave out= away, or use torch.no_grad()"
        )
