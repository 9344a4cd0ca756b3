"""Others' calls of attention, routed here: torch's `scaled_dot_product_attention`, Hugging Face's attention registry.

What is not done here, an arbitrary mask or dropout, goes to torch as before, and a log line says so once (invariant
12). Nothing of torch or of transformers is patched.
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
from tilestream.plan.attention_problem import HEAD_DIM_STEP, MOST_HEAD_DIM

logger = logging.getLogger(__name__)

#: Dtypes that torch's function takes, too.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ON_CPU = (
    "on the CPU tilestream.attention runs torch's own kernel, which is no faster from here: use_attention(cpu=True) "
    "has it all the same"
)
_DEVICES, _KINDS = ("cpu", "cuda"), (torch.Tensor, torch.nn.Parameter)


class use_attention(TorchFunctionMode):  # noqa: N801
    """In this block, ``F.scaled_dot_product_attention`` is `tilestream.attention`.

    With torch's own meaning: ``is_causal`` is counted from the first key, ``[..., H, S, D]``. Calls with a mask, with
    dropout, of 12 columns a head, and whatever else is not done here go to torch.

    Parameters
    ----------
    gradients
        Whether calls that need a gradient come here too: the backward pass is right, but not fast.
    cpu
        Whether calls on the CPU come here too. `tilestream.attention` runs torch's own kernel there, and looks a call
        up first: a call of 64 rows and 2 heads takes 1.25 times as long, through this block 1.75 times
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
        call = _arguments(*args, **(kwargs or {}))
        why = "" if self._cpu or call["query"].device.type != "cpu" else _ON_CPU
        if why or (why := _refusal(call, self._gradients)):
            _say_once("scaled_dot_product_attention", why)
            return func(*args, **(kwargs or {}))
        return _attend(call)


def attention_of_torch(*args: Any, **kwargs: Any) -> torch.Tensor:
    """``F.scaled_dot_product_attention`` by `tilestream.attention`.

    Raises
    ------
    NotImplementedError
        For what only torch does: a mask, dropout.
    """
    call = _arguments(*args, **kwargs)
    if why := _refusal(call, gradients=True):
        raise NotImplementedError(
            f"scaled_dot_product_attention under use_invariant_torch: {why}; call it without, or leave the block for it"
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
    """Torch's own signature, by name."""
    return dict(locals())


def _refusal(call: dict[str, Any], gradients: bool) -> str:
    """Why a call of torch's function goes to torch; empty where it need not."""
    q, *_ = tensors = (call["query"], call["key"], call["value"])
    columns = {x.shape[-1] for x in tensors if x.dim()}
    heads = {x.shape[-3] for x in tensors if x.dim() >= 3}
    checks: tuple[tuple[object, str], ...] = (
        (call["attn_mask"] is not None, "attn_mask= is any mask at all; here they are causal, or windows"),
        (call["dropout_p"], f"dropout_p={call['dropout_p']}"),
        (any(type(x) not in _KINDS or x.is_nested for x in tensors), "tensors of a kind of their own"),
        (q.device.type not in _DEVICES, f"tensors on {q.device}"),
        (any(x.dim() not in (3, 4) or x.dim() != q.dim() for x in tensors), f"{q.dim()} dimensions, not 3 or 4"),
        (any(x.dtype != q.dtype for x in tensors) or q.dtype not in _DTYPES, f"dtype {q.dtype}"),
        (max(heads, default=0) > MOST_HEADS, f"{max(heads, default=0)} heads"),
        (len(heads) > 1 and not call["enable_gqa"], f"{sorted(heads)} heads, without enable_gqa="),
        (any(c % HEAD_DIM_STEP or not 0 < c <= MOST_HEAD_DIM for c in columns), f"{sorted(columns)} columns a head"),
        (any(x.numel() and x.stride(-1) != 1 for x in tensors), "columns that do not lie side by side"),
        (not all(x.numel() for x in tensors), "nothing to compute"),
        (
            not gradients and torch.is_grad_enabled() and any(x.requires_grad for x in tensors),
            "a gradient is asked for, and is not fast here: use_attention(gradients=True) has it all the same",
        ),
    )
    return next((why for fails, why in checks if fails), "")


@functools.lru_cache(maxsize=256)
def _say_once(what: str, why: str) -> None:
    logger.info("%s goes to torch: %s", what, why)


# Hugging Face ---------------------------------------------------------------------------------------------------------


def register_attention(name: str = "tilestream") -> str:
    """Make `tilestream.attention` known to Hugging Face's transformers, as ``attn_implementation=name``.

    Its masks are made as for ``"sdpa"``, which makes none where a layer is simply causal. Calls with a mask or with
    dropout go to its own ``"sdpa"``.

    Returns
    -------
    str
        The name, for ``AutoModel.from_pretrained(..., attn_implementation=...)``.

    Raises
    ------
    ImportError
        If there is no transformers, or one without the registry (before 4.51).
    """
    try:
        from transformers import AttentionInterface
    except ImportError as error:
        raise ImportError(
            f"register_attention: {error}; it registers with Hugging Face's transformers, 4.51 or later: pip install "
            "transformers"
        ) from None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(name, functools.partial(_of_transformers, sdpa_attention_forward))
    try:
        from transformers import AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError:  # masks are made by the models themselves there
        return name
    # Without this no mask would be made at all, not for padding either.
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def _of_transformers(
    sdpa: Callable[..., Any], module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    is_causal: bool | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None, **more: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """As transformers calls it: ``[B, H, S, D]`` in, ``[B, S, H, D]`` out, and no weights."""
    causal = query.shape[2] > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    call = _arguments(query, key, value, attention_mask, dropout, bool(causal), scaling, True)
    why = _refusal(call, gradients=False)
    if why and (softcap or s_aux is not None):
        raise NotImplementedError(
            f"tilestream for transformers: {why}, and a soft cap or sinks, which torch's function does not know; use "
            "attn_implementation='eager'"
        )
    if why:
        _say_once("transformers' attention", why)
        answer: tuple[torch.Tensor, None] = sdpa(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **more
        )
        return answer
    out = attention(
        query, key, value, layout="bhsd", causal=bool(causal), scale=scaling, softcap=softcap or None, sinks=s_aux
    )
    return out.transpose(1, 2), None
