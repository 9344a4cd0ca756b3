"""The registered ops of attention: schemas, CPU, GPU and fake implementations, autograd, FLOP counts.

As `tilestream.ops.library`: tensors and numbers only, heads behind rows (the other layout is a view, whose gradient is
torch's own). Each gives the output and the log-sum-exp; the second is empty unless it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import register_flop_formula

from tilestream.arrival.flat import DEFAULT_DEADLINE, FlatArrival, check_deadline
from tilestream.core.operands import AttentionOperands
from tilestream.ops import attention_gpu
from tilestream.ops.attention_backward import gradients
from tilestream.ops.attention_execute import execute
from tilestream.ops.attention_operands import Settings, Tensors, check_shapes
from tilestream.ops.library import library
from tilestream.ops.overlap import refuse_shared
from tilestream.plan import limit as limits
from tilestream.plan.problem import FP8_RESULT

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? scale_q, Tensor? scale_k, Tensor? scale_v, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? block_table, Tensor? seqlens_k"
)
_SETTINGS = (
    "bool causal, str alignment, SymInt left, SymInt right, float softcap, float scale, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, str layout, bool return_lse, str schedule, int workers, int splits"
)
_ARRIVING = "Tensor? key_signals, SymInt[] key_arrival, float deadline"
_INTO = "Tensor(a!) out, Tensor(b!)? lse"
# Of the blocks of `tilestream.worker_limit` around the call; 0: none.
_LIMIT = "int worker_limit=0"

# A graph that torch.compile captures by itself would replay without the signals, which are issued outside of it.
_alone = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()
library.define(f"attention({_TENSORS}, {_SETTINGS}, {_LIMIT}) -> (Tensor, Tensor)")
library.define(f"attention_out({_TENSORS}, {_SETTINGS}, {_INTO}, {_LIMIT}) -> ()")
library.define(f"attention_arriving({_TENSORS}, {_SETTINGS}, {_ARRIVING}, {_LIMIT}) -> (Tensor, Tensor)", tags=_alone)
library.define(f"attention_arriving_out({_TENSORS}, {_SETTINGS}, {_ARRIVING}, {_INTO}, {_LIMIT}) -> ()", tags=_alone)
library.define(
    f"attention_backward(Tensor grad, Tensor? grad_lse, Tensor out, Tensor lse, {_TENSORS}, {_SETTINGS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)

attention_op = torch.ops.tilestream.attention.default
attention_out_op = torch.ops.tilestream.attention_out.default
attention_arriving_op = torch.ops.tilestream.attention_arriving.default
attention_arriving_out_op = torch.ops.tilestream.attention_arriving_out.default
attention_backward_op = torch.ops.tilestream.attention_backward.default

_NUM_TENSORS = len(Tensors._fields)
_COMMON = _NUM_TENSORS + len(Settings._fields)


class _Nothing(NamedTuple):
    """Nothing arrives."""


class _Arriving(NamedTuple):
    """The schema's `_ARRIVING`."""

    words: torch.Tensor | None
    keys: Sequence[int]
    deadline: float


def _split(args: Sequence[Any]) -> tuple[Tensors, Settings]:
    return Tensors(*args[:_NUM_TENSORS]), Settings(*args[_NUM_TENSORS:_COMMON])


def result_dtype(q: torch.Tensor) -> torch.dtype:
    """Of the output: the operands', bfloat16 where those are of 8 bits."""
    return getattr(torch, FP8_RESULT) if q.dtype == torch.float8_e4m3fn else q.dtype


def wide_dtype(q: torch.Tensor) -> torch.dtype:
    """Of the log-sum-exp, and of what is added up."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _outputs(t: Tensors, s: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty outputs, after checking the operands: the one text for the real and the fake implementation."""
    check_shapes("attention", t)
    *rows, heads, _ = t.q.shape
    dtype = result_dtype(t.q)
    if s.layout == "bhsd":
        out = t.q.new_empty((rows[0], heads, rows[1], t.v.shape[-1]), dtype=dtype).transpose(1, 2)
    else:
        out = t.q.new_empty((*rows, heads, t.v.shape[-1]), dtype=dtype)
    return out, t.q.new_empty(lse_shape(t) if s.return_lse else (0,), dtype=wide_dtype(t.q))


def lse_shape(t: Tensors) -> tuple[int, ...]:
    """``[B, Hq, Sq]``, packed ``[T, Hq]``."""
    return tuple(t.q.shape[:2]) if t.cu_seqlens_q is not None else (t.q.shape[0], t.q.shape[2], t.q.shape[1])


def _run(
    out: torch.Tensor, lse: torch.Tensor | None, t: Tensors, s: Settings, late: _Nothing | _Arriving, worker_limit: int
) -> None:
    q, k, v, *others = t
    operands = AttentionOperands(q.detach(), k.detach(), v.detach(), out, s.scale, lse, *others)
    keys, deadline = None, DEFAULT_DEADLINE
    if isinstance(late, _Arriving):
        keys, deadline = FlatArrival.from_ints(late.keys, late.words), check_deadline(late.deadline)
    run = attention_gpu.run if out.is_cuda else execute
    # A compiled function's argument knows of the blocks inside it, this thread of those around it.
    bound = limits.tighter(worker_limit, limits.limit())
    run(operands, t, s, keys, deadline, bound)


def _check_into(t: Tensors, s: Settings, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    check_shapes("attention", t)
    shape = (*t.q.shape[:-1], t.v.shape[-1])
    if tuple(out.shape) != shape:
        raise ValueError(f"out: shape {list(out.shape)}; the result has {list(shape)}")
    if out.dtype != result_dtype(t.q):
        raise TypeError(f"out: dtype {out.dtype}; the result is {result_dtype(t.q)}")
    if out.device != t.q.device:
        raise ValueError(f"out: on {out.device}, the operands on {t.q.device}; they are on one device")
    if out.numel() and out.stride(-1) != 1:
        raise ValueError(f"out: strides {list(out.stride())}; a head's columns lie side by side")
    if (lse is not None) != s.return_lse or (lse is not None and tuple(lse.shape) != lse_shape(t)):
        raise ValueError(f"lse: given with return_lse=True, and only with it, of shape {list(lse_shape(t))}")
    if lse is not None and (lse.dtype != wide_dtype(t.q) or lse.device != t.q.device):
        raise ValueError(f"lse: {lse.dtype} on {lse.device}; it is {wide_dtype(t.q)} on {t.q.device}")


def _define(name: str, kind: type[_Nothing | _Arriving], into: bool) -> None:
    """Register the implementations of an op: what its schema has behind the settings, and whether it is an out form."""
    end = _COMMON + len(kind._fields)
    worker_limit_at = end + 2 * into  # torch leaves it out where it is the schema's default

    def real(*args: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        t, s = _split(args)
        worker_limit = args[worker_limit_at] if len(args) > worker_limit_at else 0
        if not into:
            out, lse = _outputs(t, s)
            _run(out, lse if s.return_lse else None, t, s, kind(*args[_COMMON:end]), worker_limit)
            return out, lse
        out, lse = args[end : end + 2]
        _check_into(t, s, out, lse)
        given = {name: x for name, x in t._asdict().items() if x is not None}
        refuse_shared(out, **given)
        if lse is not None:
            refuse_shared(lse, "lse", **given)
        _run(out, lse, t, s, kind(*args[_COMMON:end]), worker_limit)
        return None

    def fake(*args: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not into:
            return _outputs(*_split(args))
        _check_into(*_split(args), *args[end : end + 2])
        return None

    for device in ("CPU", "CUDA"):
        library.impl(name, real, device)
    torch.library.register_fake(f"tilestream::{name}", fake, lib=library)


_define("attention", _Nothing, False)
_define("attention_out", _Nothing, True)
_define("attention_arriving", _Arriving, False)
_define("attention_arriving_out", _Arriving, True)


# Autograd -----------------------------------------------------------------------------------------------------------


def _backward_op(
    grad: torch.Tensor, grad_lse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    t, s = _split(args)
    return gradients(grad, grad_lse, out, lse, t, s)


library.impl("attention_backward", _backward_op, "CPU")
library.impl("attention_backward", _backward_op, "CUDA")


@torch.library.register_fake("tilestream::attention_backward", lib=library)
def _(grad: torch.Tensor, grad_lse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, *args: Any) -> Any:
    t, _ = _split(args)
    sinks = t.q.new_empty((0,), dtype=torch.float32) if t.sinks is None else torch.empty_like(t.sinks)
    return (*(x.new_empty(x.shape) for x in t[:3]), sinks)


def _no_second(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(
        "attention: no second derivative; use torch.nn.functional.scaled_dot_product_attention with its math backend"
    )


torch.library.register_autograd("tilestream::attention_backward", _no_second, lib=library)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    t, ctx.settings = _split(inputs)
    ctx.worker_limit = inputs[-1]
    out, lse = output
    ctx.save_for_backward(out, lse, *t)
    if not ctx.settings.return_lse:
        ctx.mark_non_differentiable(lse)


def _backward(ctx: Any, grad: torch.Tensor, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
    out, lse, *tensors = ctx.saved_tensors
    t, s = Tensors(*tensors), ctx.settings
    if not s.return_lse:  # the registered op, called by itself: what it did not give is worked out once more
        s, grad_lse = s._replace(return_lse=True), None
        _, lse = attention_op(*t, *s, ctx.worker_limit)
    grads = attention_backward_op(grad, grad_lse, out, lse, *t, *s)
    needed = [x if need else None for x, need in zip(grads[:3], ctx.needs_input_grad[:3], strict=True)]
    sinks = grads[3] if ctx.needs_input_grad[3] else None
    return *needed, sinks, *([None] * (_COMMON - 4 + 1))  # no gradient of the limit either


def _backward_arriving(ctx: Any, grad: torch.Tensor, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
    # By now everything has arrived: the operands are ordinary tensors.
    return *_backward(ctx, grad, grad_lse), *([None] * len(_Arriving._fields))


torch.library.register_autograd("tilestream::attention", _backward, setup_context=_setup_context, lib=library)
torch.library.register_autograd(
    "tilestream::attention_arriving", _backward_arriving, setup_context=_setup_context, lib=library
)


def _extents(shapes: Sequence[Any]) -> tuple[int, int, int]:
    """Scores of a call, and columns of a head of keys and of values: from shapes alone, so masks do not count.

    Packed sequences count as if all were of the mean length, keys in pages as if no place in a page were free.
    """
    t = dict(zip(Tensors._fields, shapes, strict=False))
    (*rows, heads, columns), k = t["q"], t["k"]
    keys = k[1] if len(k) == 4 else k[0] // max(1, t["cu_seqlens_q"][0] - 1)
    if t["block_table"] is not None:
        keys = t["block_table"][1] * k[1]
    return math.prod(rows) * heads * keys, columns, t["v"][-1]


@register_flop_formula(
    [
        torch.ops.tilestream.attention,
        torch.ops.tilestream.attention_out,
        torch.ops.tilestream.attention_arriving,
        torch.ops.tilestream.attention_arriving_out,
    ]
)
def _flops(*shapes: Any, **kwargs: Any) -> int:
    scores, columns, columns_v = _extents(shapes)
    return 2 * scores * (columns + columns_v)


@register_flop_formula(torch.ops.tilestream.attention_backward)
def _backward_flops(*shapes: Any, **kwargs: Any) -> int:
    scores, columns, columns_v = _extents(shapes[4:])
    # Scores once more, dQ and dK of the keys' columns; dV and dP of the values'.
    return 2 * scores * (3 * columns + 2 * columns_v)
