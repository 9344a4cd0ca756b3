"""The registered ops of attention: schemas, CPU, GPU and fake implementations, derivatives, batching, FLOP counts.

The ops take tensors and numbers only, as those of `tilestream.ops.library`, in the layout ``"bshd"``; the other layout
is a view, whose gradient is torch's own. Each returns the output and the log-sum-exp, which is empty unless
``return_lse`` is set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tilestream.arrival.flat import DEFAULT_DEADLINE, Awaited, FlatArrival, check_deadline
from tilestream.arrival.stream import open_streams
from tilestream.core.device import DeviceProperties
from tilestream.core.operands import AttentionOperands
from tilestream.kernels.cpu.epilogue import wide_dtype
from tilestream.launch.observe import observation
from tilestream.ops import attention_gpu, native, streamed
from tilestream.ops.attention_backward import gradients, second, tangents
from tilestream.ops.attention_execute import execute
from tilestream.ops.attention_operands import Settings, check_shapes
from tilestream.ops.checks import check_written, refuse_given
from tilestream.ops.flops import register_flop_formula
from tilestream.ops.gradients import Derivative, below_autograd, derivative, save
from tilestream.ops.library import library, register
from tilestream.ops.operands import refuse_shared
from tilestream.plan import limit as limits
from tilestream.plan.problem import FP8_RESULT

# The schemas' arguments, in order: `AttentionOperands.inputs`, `Settings`, those of keys that arrive, the outputs of an
# ``out`` form, and the limit of the `tilestream.worker_limit` blocks around the call (0: none). Torch leaves out a 0.
_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? scale_q, Tensor? scale_k, Tensor? scale_v, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? block_table, Tensor? seqlens_k"
)
_SETTINGS = (
    "bool causal, str alignment, SymInt left, SymInt right, float softcap, float scale, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, str layout, bool return_lse, str schedule, int workers, int splits"
)
_ARRIVING = ", Tensor? key_signals, SymInt[] key_arrival, float deadline"
_NUM_ARRIVING = 3
_INTO = ", Tensor(a!) out, Tensor(b!)? lse"
# The settings of ``attention_forward``, which compiled graphs call: see `tilestream.ops.library`.
_OF_GRAPHS = "bool causal, str alignment, float scale, str layout, bool return_lse"
_INPUTS = (*AttentionOperands._fields[:3], *AttentionOperands._fields[6:])
_OTHERS = (None,) * (len(_INPUTS) - 3)
_NUM_COMMON = len(_INPUTS) + len(Settings._fields)

Pair = tuple[torch.Tensor, torch.Tensor]


def _settings(causal: bool, alignment: Any, scale: float, layout: Any, return_lse: bool) -> Settings:
    """The settings of a call of ``attention_forward``."""
    return Settings(causal, alignment, -1, -1, 0.0, scale, layout=layout, return_lse=return_lse)


def _split(args: Sequence[Any], out: Any = None, lse: torch.Tensor | None = None) -> tuple[AttentionOperands, Settings]:
    (q, k, v, *others), s = args[: len(_INPUTS)], Settings(*args[len(_INPUTS) : _NUM_COMMON])
    return AttentionOperands(q, k, v, out, s.scale, lse, *others), s


def result_dtype(q: torch.Tensor) -> torch.dtype:
    """The output's dtype: the operands', or bfloat16 for operands of 8 bits."""
    return getattr(torch, FP8_RESULT) if q.dtype == torch.float8_e4m3fn else q.dtype


def lse_shape(x: AttentionOperands) -> tuple[int, ...]:
    """``[B, Hq, Sq]``; ``[T, Hq]`` for packed sequences."""
    return tuple(x.q.shape[:2]) if x.cu_seqlens_q is not None else (x.q.shape[0], x.q.shape[2], x.q.shape[1])


def _outputs(x: AttentionOperands, s: Settings) -> Pair:
    """Empty outputs for operands that fit together; raise for others."""
    check_shapes("attention", x)
    *rows, heads, _ = x.q.shape
    dtype = result_dtype(x.q)
    shape = (*rows, heads, x.v.shape[-1])
    if s.layout == "bhsd":  # not a view: an op's view can neither be changed in place nor have a tangent
        out = torch.empty_permuted(shape, (0, 2, 1, 3), dtype=dtype, device=x.q.device)
    else:
        out = x.q.new_empty(shape, dtype=dtype)
    return out, x.q.new_empty(lse_shape(x) if s.return_lse else (0,), dtype=wide_dtype(x.q.dtype))


def as_given(shape: Sequence[int], s: Settings) -> list[int]:
    """A shape of the op's output in the caller's layout."""
    return [shape[i] for i in (0, 2, 1, 3)] if s.layout == "bhsd" and len(shape) == 4 else list(shape)


def check_outputs(x: AttentionOperands, s: Settings) -> None:
    """Raise unless the operands fit together, and the given outputs fit them."""
    check_shapes("attention", x)
    out, lse, shape, dtype = x.out, x.lse, (*x.q.shape[:-1], x.v.shape[-1]), result_dtype(x.q)
    if out.dtype != dtype:
        raise TypeError(f"attention: out is {out.dtype}, the result {dtype}")
    if tuple(out.shape) != shape:
        found, wanted = (as_given(x, s) for x in (out.shape, shape))
        raise ValueError(
            f"attention: out has shape {found}; the result has {wanted}: give an out of that shape, or one of no "
            "elements, which is resized"
        )
    if out.device != x.q.device:
        raise ValueError(f"out: on {out.device}, the operands on {x.q.device}; they are on one device")
    if (lse is not None) != s.return_lse or (lse is not None and tuple(lse.shape) != lse_shape(x)):
        raise ValueError(f"lse: given with return_lse=True, and only with it, of shape {list(lse_shape(x))}")
    if lse is not None and (lse.dtype != wide_dtype(x.q.dtype) or lse.device != x.q.device):
        raise ValueError(f"lse: {lse.dtype} on {lse.device}; it must be {wide_dtype(x.q.dtype)} on {x.q.device}")


def _launched(
    x: AttentionOperands, out: torch.Tensor, lse: torch.Tensor | None, worker_limit: int = 0
) -> tuple[AttentionOperands, int]:
    """The operands of a launch, and the limit of its workers."""
    x = AttentionOperands(x.q.detach(), x.k.detach(), x.v.detach(), out, x.scale, lse, *x[6:])
    # The argument has the limit of blocks inside a compiled function, this thread that of blocks around it.
    return x, limits.tighter(worker_limit, limits.limit())


def compile_ahead(args: Sequence[Any], made: Pair, device: DeviceProperties, arriving: bool = False) -> None:
    """Compile what `attention_op`, or `attention_arriving_op`, called with ``args``, would launch for ``made``."""
    end = _NUM_COMMON + _NUM_ARRIVING * arriving
    late: Sequence[Any] = args[_NUM_COMMON:end] or (None, ())
    words, ints, *_ = late
    x, s = _split(args)
    x, bound = _launched(x, made[0], made[1] if s.return_lse else None, *args[end:])
    attention_gpu.compile_ahead(x, s, bound, device, FlatArrival.from_ints(ints, words))


def _run(
    x: AttentionOperands, s: Settings, out: torch.Tensor, lse: torch.Tensor | None, late: Sequence[Any],
    worker_limit: int = 0,
) -> None:  # fmt: skip
    """Run any of the ops. ``late``: its arguments for keys that arrive."""
    keys, deadline = None, DEFAULT_DEADLINE
    if late:
        words, ints, seconds = late
        keys, deadline = FlatArrival.from_ints(ints, words), check_deadline(seconds)
    x, bound = _launched(x, out, lse, worker_limit)
    (attention_gpu.run if out.is_cuda else execute)(x, s, keys, deadline, bound)


def _define(name: str) -> None:
    """Register an op. Its name says whether keys arrive and whether it writes into its arguments."""
    arriving, into = "_arriving" in name, name.endswith("_out")
    end = _NUM_COMMON + _NUM_ARRIVING * arriving

    def run(*args: Any) -> Pair | None:
        x, s = _split(args, *(args[end : end + 2] if into else ()))
        made, apart = None, False
        if into:
            check_outputs(x, s)
            check_written("attention", x.out)
            apart = x.out.numel() > 0 and x.out.stride(-1) != 1  # kernels write contiguous columns of a head
            if apart and arriving:
                raise ValueError(
                    f"attention: out has strides {as_given(x.out.stride(), s)}; with arrival= it is written in place, "
                    "a head's columns side by side: give one whose last stride is 1, and copy it"
                )
            read = dict(zip(_INPUTS, x.inputs(), strict=True))
            refuse_shared(x.out, **read)
            if x.lse is not None:
                refuse_shared(x.lse, "lse", **read)
        else:
            made = _outputs(x, s)
        out, lse = made or (x.out.new_empty(x.out.shape) if apart else x.out, x.lse)
        _run(x, s, out, lse if s.return_lse else None, args[_NUM_COMMON:end], *args[end + 2 * into :])
        if apart:
            with torch.inference_mode():  # the output may be an inference tensor
                x.out.copy_(out)
        if into:  # autograd does not see that the kernel writes
            torch._C._increment_version([y for y in (x.out, x.lse) if y is not None])
        return made

    def real(*args: Any) -> Pair | None:
        if open_streams:
            operands = (*args[: len(_INPUTS)], *(args[end : end + 2] if into else ()))
            streamed.refuse_unfilled("attention", (*_INPUTS, "out", "lse"), operands, ("k", "v") if arriving else ())
        worker_limit = args[end] if len(args) > end else 0
        by_graph = not into and not arriving and observation() is None  # calls of public ops are observed
        if not by_graph or not args[0].is_cuda or worker_limit not in (0, limits.limit()):
            return run(*args)
        s = Settings(*args[len(_INPUTS) : _NUM_COMMON])
        call = (
            *args[: len(_INPUTS)], None, s.layout, s.causal and s.alignment,
            None if s.left == s.right == -1 else (s.left, s.right), s.softcap or None, s.scale, s.max_seqlen_q or None,
            s.max_seqlen_k or None, s.return_lse, s.workers or None, s.schedule, s.splits or None,
        )  # fmt: skip
        return native.attention_op(call, lambda: run(*args))

    def forward(
        q: Any, k: Any, v: Any, causal: bool, alignment: str, scale: float, layout: str, return_lse: bool
    ) -> Pair | None:  # fmt: skip
        if open_streams:
            streamed.refuse_unfilled("attention", _INPUTS, (q, k, v))

        def by_python() -> Pair | None:
            return run(q, k, v, *_OTHERS, *_settings(causal, alignment, scale, layout, return_lse))

        if not q.is_cuda or observation() is not None:
            return by_python()
        own_scale = None if scale == 1 / math.sqrt(max(q.shape[-1], 1)) else scale  # fewer arguments
        call = (
            q, k, v, *_OTHERS, None, layout, causal and alignment, None, None, own_scale, None, None, return_lse, None,
            "auto", None,
        )  # fmt: skip
        return native.attention_op(call, by_python)

    def fake(*args: Any) -> Pair | None:
        if not into:
            return _outputs(*_split(args))
        check_outputs(*_split(args, *args[end : end + 2]))
        return None

    if not arriving and not into:
        register(
            "attention_forward", f"(Tensor q, Tensor k, Tensor v, {_OF_GRAPHS}) -> (Tensor, Tensor)", forward,
            lambda q, k, v, *of_graphs: _outputs(AttentionOperands(q, k, v), _settings(*of_graphs)),
        )  # fmt: skip
    more = (_ARRIVING if arriving else "") + (_INTO if into else "")
    result = "()" if into else "(Tensor, Tensor)"
    register(name, f"({_TENSORS}, {_SETTINGS}{more}, int worker_limit=0) -> {result}", real, fake, alone=arriving)


for _name in ("attention", "attention_out", "attention_arriving", "attention_arriving_out"):
    _define(_name)

attention_op = torch.ops.tilestream.attention.default
attention_forward_op = torch.ops.tilestream.attention_forward.default
attention_out_op = torch.ops.tilestream.attention_out.default
attention_arriving_op = torch.ops.tilestream.attention_arriving.default
attention_arriving_out_op = torch.ops.tilestream.attention_arriving_out.default


# Derivatives and batching ---------------------------------------------------------------------------------------------


def _real_backward(
    grad: torch.Tensor, grad_lse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, ...]:
    x, s = _split(args, out, lse)
    return gradients(grad, grad_lse, x, s)


def _fake_backward(grad: Any, grad_lse: Any, out: Any, lse: Any, *args: Any) -> tuple[torch.Tensor, ...]:
    q, k, v, sinks = args[:4]
    of_sinks = lse.new_empty((0,)) if sinks is None else torch.empty_like(sinks, dtype=lse.dtype)
    return (*(torch.empty_like(x) for x in (q, k, v)), of_sinks)


register(
    "attention_backward",
    f"(Tensor grad, Tensor? grad_lse, Tensor out, Tensor lse, {_TENSORS}, {_SETTINGS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _real_backward,
    _fake_backward,
)
attention_backward_op = torch.ops.tilestream.attention_backward.default


def _differentiate(op: Any) -> None:
    """Register the derivative of an op that makes its outputs. It is NaN if keys have not arrived by then."""

    class Attention(Derivative):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Pair:
            inputs, s = args[: len(_INPUTS)], Settings(*args[len(_INPUTS) : _NUM_COMMON])
            _refuse_gradients(inputs)
            # The gradients need the log-sum-exp, also where the caller does not ask for it.
            ctx.settings, ctx.shows_lse = s._replace(return_lse=True), s.return_lse
            out, lse = below_autograd(op, *inputs, *ctx.settings, *args[_NUM_COMMON:])
            kept = out, lse, *inputs
            save(ctx, *kept)
            ctx.awaited = None
            if op is attention_arriving_op:
                words, keys, _ = args[_NUM_COMMON : _NUM_COMMON + _NUM_ARRIVING]
                ctx.awaited = Awaited.for_gradient(FlatArrival.from_ints(keys, words), None, "attention", out)
            if not s.return_lse:
                lse = lse.new_empty((0,))
                ctx.mark_non_differentiable(lse)
            return out, lse

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor | None, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
            out, *_ = kept = ctx.saved_tensors
            grad = torch.zeros_like(out) if grad is None else grad
            grad = grad if ctx.awaited is None else ctx.awaited.void_if_late(grad)
            found = attention_backward_op(grad, grad_lse if ctx.shows_lse else None, *kept, *ctx.settings)
            needs = ctx.needs_input_grad
            needed = [x if need else None for x, need in zip(found, needs[:4], strict=True)]
            if needed[3] is not None:
                needed[3] = needed[3].to(kept[5].dtype)
            return *needed, *[None] * (len(needs) - 4)

        @staticmethod
        def jvp(ctx: Any, *changes: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
            refuse_given("attention", *changes[4:])
            out, lse, *inputs = ctx.saved_tensors
            of_out, of_lse = tangents(changes[:4], *_split((*inputs, *ctx.settings), out, lse))
            of_out = of_out if ctx.awaited is None else ctx.awaited.void_if_late(of_out)
            return of_out.to(out.dtype), of_lse if ctx.shows_lse else None

    derivative(library, op, Attention, _in_graphs if op is attention_op else None)


def _in_graphs(*args: Any) -> tuple[Any, ...] | None:
    """See `tilestream.ops.gradients.derivative`."""
    (q, k, v, *others), s = args[: len(_INPUTS)], Settings(*args[len(_INPUTS) : _NUM_COMMON])
    given = s.causal, s.alignment, s.scale, s.layout, s.return_lse
    if any(x is not None for x in others) or any(args[_NUM_COMMON:]) or type(s.scale) is not float:
        return None
    if any(type(number) is not int for number in (s.left, s.right, s.max_seqlen_q, s.max_seqlen_k)):
        return None
    return (attention_forward_op, q, k, v, *given) if s == _settings(*given) else None


def _refuse_gradients(inputs: Sequence[torch.Tensor | None]) -> None:
    """Raise where nothing computes a gradient that is asked for."""
    for name, tensor in zip(_INPUTS, inputs, strict=True):
        if tensor is not None and tensor.requires_grad:
            if name.startswith("scale_"):
                raise RuntimeError(f"attention: {name} requires a gradient; scales get none: pass {name}.detach()")
            if inputs[_INPUTS.index("block_table")] is not None or tensor.dtype == torch.float8_e4m3fn:
                raise RuntimeError(
                    f"attention: {name} requires a gradient; keys in pages, and operands of 8 bits, get none: gather "
                    "or convert them first, or use torch.no_grad()"
                )


class _Backward(Derivative):
    """The derivative of ``attention_backward``, whose ``out`` and ``lse`` count as functions of the inputs."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, ...]:
        ctx.numbers = args[4 + len(_INPUTS) :]
        save(ctx, *args[: 4 + len(_INPUTS)])
        return below_autograd(attention_backward_op, *args)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *changes: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad, grad_lse, out, lse, *inputs = ctx.saved_tensors
        x, s = _split((*inputs, *ctx.numbers), out, lse)
        of_grad, of_lse, *others = second(
            grad, grad_lse, (*changes[:3], changes[3] if x.sinks is not None else None), x, s
        )
        found = (of_grad, None if grad_lse is None else of_lse, None, None, *others)
        args = (grad, grad_lse, out, lse, *inputs[:4])
        typed = [None if f is None or y is None else f.to(y.dtype) for f, y in zip(found, args, strict=True)]
        return *typed, *[None] * (len(ctx.needs_input_grad) - len(typed))

    @staticmethod
    def jvp(ctx: Any, *changes: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        # Linear in the gradients; by the inputs a Hessian, which is symmetric: `second` multiplies by its transpose.
        grad, grad_lse, out, lse, *inputs = ctx.saved_tensors
        x, s = _split((*inputs, *ctx.numbers), out, lse)
        found = list(second(grad, grad_lse, changes[4:8], x, s)[2:])
        if changes[0] is not None or changes[1] is not None:
            of_grad = torch.zeros_like(out) if changes[0] is None else changes[0]
            more = attention_backward_op(of_grad, changes[1], out, lse, *inputs, *ctx.numbers)
            found = [None if f is None else f + m for f, m in zip(found, more, strict=True)]
        made = (x.q, x.k, x.v, lse)
        return tuple(lse.new_empty((0,)) if f is None else f.to(y.dtype) for f, y in zip(found, made, strict=True))


for _op in (attention_op, attention_arriving_op):
    _differentiate(_op)
derivative(library, attention_backward_op, _Backward)


def _batch(op: Any, num_first: int) -> None:
    """Register the vmap rule of ``op``, which has ``num_first`` tensors before the inputs.

    Calls of dense sequences become one call of all their sequences. Calls of packed sequences, of keys in pages and of
    sinks of their own are computed one after the other.
    """
    tensors = num_first + len(_INPUTS)
    sinks, pages = num_first + _INPUTS.index("sinks"), num_first + _INPUTS.index("block_table")
    packed = num_first + _INPUTS.index("cu_seqlens_q")

    def batched(info: Any, dims: Sequence[int | None], *args: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        count = info.batch_size
        own_sinks = args[sinks] is not None and (num_first > 0 or dims[sinks] is not None)
        if args[packed] is not None or args[pages] is not None or own_sinks:
            own = [x if dim is None else x.movedim(dim, 0).contiguous() for x, dim in zip(args, dims, strict=True)]
            calls = [op(*(x if dim is None else x[i] for x, dim in zip(own, dims, strict=True))) for i in range(count)]
            return tuple(torch.stack(parts) for parts in zip(*calls, strict=True)), (0,) * len(calls[0])

        def merged(i: int) -> torch.Tensor | None:
            x: torch.Tensor | None = args[i]
            dim = dims[i]
            if x is None or i == sinks:
                return x
            x = x.unsqueeze(0) if dim is None else x.movedim(dim, 0)
            x = x.expand(count, *x.shape[1:]).flatten(0, 1)
            return x if x.stride(-1) == 1 else x.contiguous()  # the op takes a last stride of 1

        made = op(*(merged(i) for i in range(tensors)), *args[tensors:])
        # A log-sum-exp that is not asked for has one dimension and no elements.
        shown = [y if y.dim() == 1 else y.reshape(count, y.shape[0] // count, *y.shape[1:]) for y in made]
        return tuple(shown), tuple(None if y.dim() == 1 else 0 for y in made)

    torch.library.register_vmap(op.name(), batched, lib=library)


_batch(attention_op, 0)
_batch(attention_backward_op, 4)


def _extents(shapes: Sequence[Any]) -> tuple[int, int, int]:
    """The number of scores of a call, and the head dims of keys and of values.

    They come from shapes alone: masks are ignored, packed sequences count with their mean length, pages as full.
    """
    x = dict(zip(_INPUTS, shapes, strict=False))
    (*rows, heads, columns), k = x["q"], x["k"]
    keys = k[1] if len(k) == 4 else k[0] // max(1, x["cu_seqlens_q"][0] - 1)
    if x["block_table"] is not None:
        keys = x["block_table"][1] * k[1]
    return math.prod(rows) * heads * keys, columns, x["v"][-1]


@register_flop_formula([
    op.overloadpacket for op in (attention_op, attention_out_op, attention_arriving_op, attention_arriving_out_op)
])  # fmt: skip
def _flops(*shapes: Any, **kwargs: Any) -> int:
    scores, columns, columns_v = _extents(shapes)
    return 2 * scores * (columns + columns_v)


@register_flop_formula(torch.ops.tilestream.attention_forward)
def _forward_flops(*shapes: Any, **kwargs: Any) -> int:
    return _flops(*shapes[:3], *_OTHERS)


@register_flop_formula(torch.ops.tilestream.attention_backward)
def _backward_flops(*shapes: Any, **kwargs: Any) -> int:
    scores, columns, columns_v = _extents(shapes[4:])
    # The scores again, dQ and dK have the keys' head dim; dV and dP the values'.
    return 2 * scores * (3 * columns + 2 * columns_v)
