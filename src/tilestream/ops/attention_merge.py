"""``tilestream::merge_attention``: joins two attentions of the same queries over different keys.

The op is canonical: a log-sum-exp has the shape of its output without the columns. Where something has to see torch's
own operations (torch.compile, a transform, forward mode, a tensor of another type), `formula` computes the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from tilestream.core.operands import MergeOperands
from tilestream.launch.cache import launch_cache, signature
from tilestream.ops import native
from tilestream.ops.checks import below_autocast
from tilestream.ops.inline import PLAIN
from tilestream.ops.library import library
from tilestream.ops.operands import made_fresh, unviewed
from tilestream.runtime import collector
from tilestream.runtime.channel import check_device

Pair = tuple[torch.Tensor, torch.Tensor]

_NAME = "merge_attention"
_NOTHING = float("-inf")
#: Dtypes of the kernel. The formula takes others.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
#: The largest number of rows whose last block's row numbers fit into 31 bits.
_MOST_ROWS = 2**31 - 2**11


def merge(o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor, layout: str) -> Pair:
    """`tilestream.merge_attention` for arguments that have been checked.

    A launch on a GPU is observed, so that the extension launches the next equal call.
    """
    call = o_a, lse_a, o_b, lse_b, layout
    if (
        torch.compiler.is_compiling() or any(type(x) not in PLAIN for x in call[:4]) or forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    ):  # fmt: skip
        return _join(formula, *call)
    if torch._C._is_any_autocast_enabled():  # autocast converts nothing of a merge
        with below_autocast():
            return merge(*call)
    return native.observed_merge(call, lambda: _join(merge_attention_op, *call))


def _join(
    op: Any, o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor, layout: str
) -> Pair:  # fmt: skip
    """Call the op, or the formula, with log-sum-exps whose dimensions are in the outputs' order."""
    if layout == "bhsd" or o_a.dim() == 3:
        return op(o_a, lse_a, o_b, lse_b)  # type: ignore[no-any-return]
    out, lse = op(o_a, lse_a.transpose(1, 2), o_b, lse_b.transpose(1, 2))
    with made_fresh():
        return out, unviewed(lse.transpose(1, 2))


def formula(o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor) -> Pair:
    """The op in torch's operations, for all dtypes and layouts."""
    share_a, share_b, lse = _shares(lse_a, lse_b)
    return (_weigh(o_a, share_a) + _weigh(o_b, share_b)).to(o_a.dtype), lse.to(lse_a.dtype)


def _shares(lse_a: torch.Tensor, lse_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The shares of the two parts, and the log-sum-exp of both together."""
    top = torch.maximum(lse_a, lse_b)
    base = torch.where(top == _NOTHING, 0.0, top)
    weight_a, weight_b = torch.exp(lse_a - base), torch.exp(lse_b - base)
    total = weight_a + weight_b
    whole = torch.where(total == 0, 1.0, total)  # 1 for 0, so that neither value nor gradient is NaN
    lse = torch.where(total == 0, _NOTHING, base + torch.log(whole))
    return weight_a / whole, weight_b / whole, lse


def _weigh(o: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """A part times its share."""
    return _seen(o, share) * share.unsqueeze(-1)


def _seen(o: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """A part, with 0 where its share is 0, so that NaN there reaches neither value nor gradient."""
    return o.masked_fill(share.unsqueeze(-1) == 0, 0.0)


# The registered op ----------------------------------------------------------------------------------------------------


def _outputs(o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor) -> Pair:
    """Empty outputs for operands that fit together; raise for others."""
    if o_a.dim() < 1 or o_b.shape != o_a.shape or not lse_a.shape == lse_b.shape == o_a.shape[:-1]:
        shapes = ", ".join(str(list(x.shape)) for x in (o_a, lse_a, o_b, lse_b))
        raise ValueError(f"{_NAME}: o_a, lse_a, o_b and lse_b have shapes {shapes}; they are [..., D], [...] and so on")
    for name, x in (("lse_a", lse_a), ("o_b", o_b), ("lse_b", lse_b)):
        if x.device != o_a.device:
            raise ValueError(f"{_NAME}: {name} is on {x.device}, o_a on {o_a.device}; all are on one device")
    return torch.empty_like(o_a), torch.empty_like(lse_a)


def _by_torch(*parts: torch.Tensor) -> Pair:
    """The op by its formula, with the strides of `_outputs`."""
    made = _outputs(*parts)
    out, lse = (
        x if x.stride() == empty.stride() else empty.copy_(x) for x, empty in zip(formula(*parts), made, strict=True)
    )
    return out, lse


def _by_kernel(o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor) -> Pair:
    """The op on a GPU, on the current stream of the operands' device."""
    x = MergeOperands(o_a, lse_a, o_b, lse_b, *_outputs(o_a, lse_a, o_b, lse_b))
    if not _is_for_kernel(x):
        return _by_torch(*x[:4])
    device = o_a.device
    check_device(device.index)
    key = signature(_NAME, x, None)
    launch: Any = launch_cache.get(key)
    if launch is None:
        generation = launch_cache.generation
        with collector.paused():
            # The first GPU call imports Triton, not `import tilestream`.
            from tilestream.launch.portable.attention_launch import PairLaunch

            launch = launch_cache.insert(key, PairLaunch(x), generation)
    with torch.cuda.device(device):
        launch(x)
    return x.out, x.lse


def _is_for_kernel(x: MergeOperands) -> bool:
    """Whether the kernel takes such operands."""
    return (
        x.o_a.dim() in (3, 4)
        and x.out.numel() > 0
        and x.lse.numel() <= _MOST_ROWS
        and all(one.dtype in _DTYPES for one in x)
        and all(one.stride(-1) == 1 or one.shape[-1] == 1 for one in (x.o_a, x.o_b, x.out))
    )


library.define(f"{_NAME}(Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b) -> (Tensor, Tensor)")
library.impl(_NAME, _by_torch, "CompositeExplicitAutograd")
library.impl(_NAME, _by_kernel, "CUDA")
torch.library.register_fake(f"tilestream::{_NAME}", _outputs, lib=library)
merge_attention_op = torch.ops.tilestream.merge_attention.default


# Autograd -------------------------------------------------------------------------------------------------------------


def _setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: Pair) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: torch.Tensor, grad_lse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The formula's derivative, in operations that have derivatives themselves.

    For ``out = s_a o_a + s_b o_b`` with the shares ``s_x = exp(lse_x - lse)``: ``d s_a / d lse_a = s_a s_b``.
    """
    o_a, lse_a, o_b, lse_b = ctx.saved_tensors
    share_a, share_b, _ = _shares(lse_a, lse_b)
    between: torch.Tensor | float = 0.0
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[3]:
        wide = torch.promote_types(o_a.dtype, share_a.dtype)
        difference = _seen(o_a, share_a).to(wide) - _seen(o_b, share_b)
        between = share_a * share_b * (grad * difference).sum(-1)
    grads = (
        _weigh(grad, share_a), share_a * grad_lse + between, _weigh(grad, share_b), share_b * grad_lse - between
    )  # fmt: skip
    pairs = zip(grads, (o_a, lse_a, o_b, lse_b), ctx.needs_input_grad, strict=True)
    return tuple(made.to(x.dtype) if needed else None for made, x, needed in pairs)


torch.library.register_autograd(f"tilestream::{_NAME}", _backward, setup_context=_setup_context, lib=library)
