"""`use_attention`: calls of torch's `scaled_dot_product_attention`, routed to `tilestream.attention`.

Calls that `tilestream.attention` does not support, such as an arbitrary mask or dropout, go to torch, and a log line
says so once (invariant 12). Nothing of torch is patched.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from tilestream.ops.attention import attention
from tilestream.ops.attention_request import MOST_HEADS, Causal
from tilestream.ops.limit import limit
from tilestream.plan.attention_problem import HEAD_DIM_STEP, MOST_HEAD_DIM
from tilestream.plan.limit import is_invariant

logger = logging.getLogger(__name__)

#: Dtypes that torch's function takes, too.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ON_CPU = (
    "on the CPU tilestream.attention runs torch's own kernel and is no faster: use_attention(cpu=True) routes it all "
    "the same"
)
_DEVICES, _KINDS = ("cpu", "cuda"), (torch.Tensor, torch.nn.Parameter)


class use_attention(TorchFunctionMode):  # noqa: N801
    """In this block, ``F.scaled_dot_product_attention`` is `tilestream.attention`.

    Arguments keep torch's meaning: ``is_causal`` is aligned to the top left, and the layout is ``[..., H, S, D]``.
    Calls that `tilestream.attention` does not support (a mask, dropout, a head dim of 12) go to torch. Under
    `tilestream.invariant` these raise `NotImplementedError`, and all other calls are routed.

    Parameters
    ----------
    gradients
        Whether to route calls that need a gradient, too. The backward pass is exact, but not fast.
    cpu
        Whether to route calls on the CPU, too. There `tilestream.attention` runs torch's own kernel after a look-up: a
        call of 64 rows and 2 heads takes 1.25 times as long, through this block 1.75 times
        (``benchmarks/results/cpu/calls_attention.json``).

    Examples
    --------
    >>> q = torch.ones(1, 2, 16, 8)
    >>> with use_attention(cpu=True):
    ...     torch.nn.functional.scaled_dot_product_attention(q, q, q).shape
    torch.Size([1, 2, 16, 8])
    """

    def __init__(self, *, gradients: bool = False, cpu: bool = False) -> None:
        super().__init__()
        self._gradients, self._cpu = gradients, cpu

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See `torch.overrides.TorchFunctionMode`."""
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        if is_invariant(limit()):
            return attention_of_torch(*args, **(kwargs or {}))
        call = _arguments(*args, **(kwargs or {}))
        why = "" if self._cpu or call["query"].device.type != "cpu" else _ON_CPU
        if why or (why := _refusal(call, self._gradients)):
            say_once("scaled_dot_product_attention", why)
            return func(*args, **(kwargs or {}))
        return _attend(call)


def attention_of_torch(*args: Any, **kwargs: Any) -> torch.Tensor:
    """``F.scaled_dot_product_attention`` by `tilestream.attention`.

    Raises
    ------
    NotImplementedError
        For arguments that only torch supports: a mask, dropout.
    """
    call = _arguments(*args, **kwargs)
    if why := _refusal(call, gradients=True):
        raise NotImplementedError(
            f"scaled_dot_product_attention under tilestream.invariant: {why}; call it without, or outside of the block"
        )
    return _attend(call)


def _attend(call: dict[str, Any]) -> torch.Tensor:
    q, k, v = (x if x.dim() == 4 else x.unsqueeze(0) for x in (call["query"], call["key"], call["value"]))
    causal: Causal = "top_left" if call["is_causal"] else False
    out = attention(q, k, v, layout="bhsd", causal=causal, scale=call["scale"])
    return out if call["query"].dim() == 4 else out.squeeze(0)


def _arguments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The arguments of torch's function by name."""
    return dict(locals())


def _refusal(call: dict[str, Any], gradients: bool) -> str:
    """Why a call of torch's function goes to torch; empty if it does not."""
    tensors = call["query"], call["key"], call["value"]
    if call["attn_mask"] is not None:
        return "attn_mask= is any mask at all; here they are causal, or windows"
    if call["dropout_p"]:
        return f"dropout_p={call['dropout_p']}"
    if why := unfit(*tensors):
        return why
    heads = sorted({x.shape[-3] for x in tensors})
    if len(heads) > 1 and not call["enable_gqa"]:
        return f"{heads} heads, without enable_gqa="
    if not gradients and wants_gradient(*tensors):
        return "it needs a gradient, which is not fast here: use_attention(gradients=True) routes it all the same"
    return ""


def unfit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """Why `tilestream.attention` does not take these operands, in ``"bhsd"``; empty if it does."""
    tensors = q, k, v
    if any(type(x) not in _KINDS or x.is_nested for x in tensors):
        return "tensors of a kind of their own"
    if q.device.type not in _DEVICES:
        return f"tensors on {q.device}"
    if any(x.dim() not in (3, 4) or x.dim() != q.dim() for x in tensors):
        return f"{q.dim()} dimensions, not 3 or 4"
    if q.dtype not in _DTYPES or any(x.dtype != q.dtype for x in tensors):
        return f"dtype {q.dtype}"
    if (heads := max(x.shape[-3] for x in tensors)) > MOST_HEADS:
        return f"{heads} heads"
    dims = [x.shape[-1] for x in tensors]
    if any(c % HEAD_DIM_STEP or not 0 < c <= MOST_HEAD_DIM for c in dims):
        return f"head dim {sorted(set(dims))}"
    if not all(x.numel() for x in tensors):
        return "nothing to compute"
    if any(x.stride(-1) != 1 for x in tensors):
        return "a head dim that is not contiguous"
    return ""


def wants_gradient(*tensors: torch.Tensor) -> bool:
    """Whether autograd records this call."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


@functools.lru_cache(maxsize=256)
def say_once(what: str, why: str) -> None:
    """Log why a call goes to torch."""
    logger.info("%s goes to torch: %s", what, why)
