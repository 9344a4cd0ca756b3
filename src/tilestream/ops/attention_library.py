"""The registered ops of attention: schemas, CPU, GPU and fake implementations, autograd, FLOP counts.

As `tilestream.ops.library`: tensors and numbers only, heads behind rows (the other layout is a view, whose gradient is
torch's own). Each gives the output and the log-sum-exp; the second is empty unless it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from tilestream.arrival.flat import DEFAULT_DEADLINE, FlatArrival, check_deadline
from tilestream.core.operands import AttentionOperands
from tilestream.launch.observe import observation
from tilestream.ops import attention_gpu, native
from tilestream.ops.attention_backward import gradients
from tilestream.ops.attention_execute import execute
from tilestream.ops.attention_operands import Settings, check_shapes
from tilestream.ops.library import library, register
from tilestream.ops.operands import refuse_shared
from tilestream.plan import limit as limits
from tilestream.plan.problem import FP8_RESULT

# Arguments, in the schemas' order: `AttentionOperands.inputs`, `Settings`, those of keys that arrive, the outputs of an
# ``out`` form, and the limit of the `tilestream.worker_limit` blocks around the call (0: none), which torch leaves out.
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
_INPUTS = (*AttentionOperands._fields[:3], *AttentionOperands._fields[6:])
_NUM_COMMON = len(_INPUTS) + len(Settings._fields)

Pair = tuple[torch.Tensor, torch.Tensor]


def _split(args: Sequence[Any], out: Any = None, lse: torch.Tensor | None = None) -> tuple[AttentionOperands, Settings]:
    (q, k, v, *others), s = args[: len(_INPUTS)], Settings(*args[len(_INPUTS) : _NUM_COMMON])
    return AttentionOperands(q, k, v, out, s.scale, lse, *others), s


def result_dtype(q: torch.Tensor) -> torch.dtype:
    """Of the output: the operands', bfloat16 where those are of 8 bits."""
    return getattr(torch, FP8_RESULT) if q.dtype == torch.float8_e4m3fn else q.dtype


def wide_dtype(q: torch.Tensor) -> torch.dtype:
    """Of the log-sum-exp, and of what is added up."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def lse_shape(x: AttentionOperands) -> tuple[int, ...]:
    """``[B, Hq, Sq]``, packed ``[T, Hq]``."""
    return tuple(x.q.shape[:2]) if x.cu_seqlens_q is not None else (x.q.shape[0], x.q.shape[2], x.q.shape[1])


def _outputs(x: AttentionOperands, s: Settings) -> Pair:
    """Empty outputs of operands that fit together."""
    check_shapes("attention", x)
    *rows, heads, _ = x.q.shape
    dtype = result_dtype(x.q)
    if s.layout == "bhsd":
        out = x.q.new_empty((rows[0], heads, rows[1], x.v.shape[-1]), dtype=dtype).transpose(1, 2)
    else:
        out = x.q.new_empty((*rows, heads, x.v.shape[-1]), dtype=dtype)
    return out, x.q.new_empty(lse_shape(x) if s.return_lse else (0,), dtype=wide_dtype(x.q))


def as_given(shape: Sequence[int], s: Settings) -> list[int]:
    """An output's shape as the caller has it: in "bhsd" the op is given a view."""
    return [shape[i] for i in (0, 2, 1, 3)] if s.layout == "bhsd" and len(shape) == 4 else list(shape)


def _check_outputs(x: AttentionOperands, s: Settings) -> None:
    """Raise unless the outputs that are given fit the operands, and those fit together."""
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
    if lse is not None and (lse.dtype != wide_dtype(x.q) or lse.device != x.q.device):
        raise ValueError(f"lse: {lse.dtype} on {lse.device}; it is {wide_dtype(x.q)} on {x.q.device}")


def _run(
    x: AttentionOperands, s: Settings, out: torch.Tensor, lse: torch.Tensor | None, late: Sequence[Any],
    worker_limit: int = 0,
) -> None:  # fmt: skip
    """What every op does; ``late``: its arguments of keys that arrive."""
    keys, deadline = None, DEFAULT_DEADLINE
    if late:
        words, ints, seconds = late
        keys, deadline = FlatArrival.from_ints(ints, words), check_deadline(seconds)
    x = AttentionOperands(x.q.detach(), x.k.detach(), x.v.detach(), out, x.scale, lse, *x[6:])
    # A compiled function's argument knows of the blocks inside it, this thread of those around it.
    bound = limits.tighter(worker_limit, limits.limit())
    (attention_gpu.run if out.is_cuda else execute)(x, s, keys, deadline, bound)


def _define(name: str) -> None:
    """Register an op: whether keys arrive, and whether it writes into its arguments, is in its name."""
    arriving, into = "_arriving" in name, name.endswith("_out")
    end = _NUM_COMMON + _NUM_ARRIVING * arriving

    def run(*args: Any) -> Pair | None:
        x, s = _split(args, *(args[end : end + 2] if into else ()))
        made, apart = None, False
        if into:
            _check_outputs(x, s)
            apart = x.out.numel() > 0 and x.out.stride(-1) != 1  # kernels write a head's columns side by side
            if apart and arriving:
                raise ValueError(
                    f"attention: out has strides {as_given(x.out.stride(), s)}; with arrival= it is written in place, "
                    "a head's columns side by side: give one whose last stride is 1, and copy it"
                )
            read = dict(zip(_INPUTS, x.inputs, strict=True))
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
        if into:  # autograd knows nothing of what a kernel writes
            torch._C._increment_version([y for y in (x.out, x.lse) if y is not None])
        return made

    def real(*args: Any) -> Pair | None:
        worker_limit = args[end] if len(args) > end else 0
        by_graph = not into and not arriving and observation() is None  # and not by a public op, which is observed
        if not by_graph or not args[0].is_cuda or worker_limit not in (0, limits.limit()):
            return run(*args)
        s = Settings(*args[len(_INPUTS) : _NUM_COMMON])
        call = (
            *args[: len(_INPUTS)], None, s.layout, s.causal and s.alignment,
            None if s.left == s.right == -1 else (s.left, s.right), s.softcap or None, s.scale, s.max_seqlen_q or None,
            s.max_seqlen_k or None, s.return_lse, s.workers or None, s.schedule, s.splits or None,
        )  # fmt: skip
        return native.attention_op(call, lambda: run(*args))

    def fake(*args: Any) -> Pair | None:
        if not into:
            return _outputs(*_split(args))
        _check_outputs(*_split(args, *args[end : end + 2]))
        return None

    more = (_ARRIVING if arriving else "") + (_INTO if into else "")
    result = "()" if into else "(Tensor, Tensor)"
    register(name, f"({_TENSORS}, {_SETTINGS}{more}, int worker_limit=0) -> {result}", real, fake, alone=arriving)


for _name in ("attention", "attention_out", "attention_arriving", "attention_arriving_out"):
    _define(_name)

attention_op = torch.ops.tilestream.attention.default
attention_out_op = torch.ops.tilestream.attention_out.default
attention_arriving_op = torch.ops.tilestream.attention_arriving.default
attention_arriving_out_op = torch.ops.tilestream.attention_arriving_out.default


# Autograd -----------------------------------------------------------------------------------------------------------


def _real_backward(
    grad: torch.Tensor, grad_lse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, ...]:
    x, s = _split(args, out, lse)
    return gradients(grad, grad_lse, x, s)


def _fake_backward(grad: Any, grad_lse: Any, out: Any, lse: Any, *args: Any) -> tuple[torch.Tensor, ...]:
    q, k, v, sinks = args[:4]
    of_sinks = q.new_empty((0,), dtype=torch.float32) if sinks is None else torch.empty_like(sinks)
    return (*(x.new_empty(x.shape) for x in (q, k, v)), of_sinks)


def _no_second(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(
        "attention: no second derivative; use torch.nn.functional.scaled_dot_product_attention with its math backend"
    )


register(
    "attention_backward",
    f"(Tensor grad, Tensor? grad_lse, Tensor out, Tensor lse, {_TENSORS}, {_SETTINGS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _real_backward,
    _fake_backward,
)
attention_backward_op = torch.ops.tilestream.attention_backward.default
torch.library.register_autograd("tilestream::attention_backward", _no_second, lib=library)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    ctx.settings, ctx.worker_limit = Settings(*inputs[len(_INPUTS) : _NUM_COMMON]), inputs[-1]
    ctx.save_for_backward(*output, *inputs[: len(_INPUTS)])
    if not ctx.settings.return_lse:
        ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: torch.Tensor, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
    out, lse, *tensors = ctx.saved_tensors
    s = ctx.settings
    if not s.return_lse:  # the registered op, called by itself: what it did not give is worked out once more
        s, grad_lse = s._replace(return_lse=True), None
        _, lse = attention_op(*tensors, *s, ctx.worker_limit)
    grads = attention_backward_op(grad, grad_lse, out, lse, *tensors, *s)
    needed = [x if need else None for x, need in zip(grads, ctx.needs_input_grad[:4], strict=True)]
    return *needed, *([None] * (_NUM_COMMON - 4 + 1))  # no gradient of the limit either


def _backward_arriving(ctx: Any, grad: torch.Tensor, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
    # By now everything has arrived: the operands are ordinary tensors.
    return *_backward(ctx, grad, grad_lse), *([None] * _NUM_ARRIVING)


for _name, _formula in (("attention", _backward), ("attention_arriving", _backward_arriving)):
    torch.library.register_autograd(f"tilestream::{_name}", _formula, setup_context=_setup_context, lib=library)


def _extents(shapes: Sequence[Any]) -> tuple[int, int, int]:
    """Scores of a call, and columns of a head of keys and of values: from shapes alone, so masks do not count.

    Packed sequences count as if all were of the mean length, keys in pages as if no place in a page were free.
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


@register_flop_formula(torch.ops.tilestream.attention_backward)
def _backward_flops(*shapes: Any, **kwargs: Any) -> int:
    scores, columns, columns_v = _extents(shapes[4:])
    # Scores once more, dQ and dK of the keys' columns; dV and dP of the values'.
    return 2 * scores * (3 * columns + 2 * columns_v)
