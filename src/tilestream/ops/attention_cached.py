"""A call of attention equal to an earlier one: its launch is issued at once. See `tilestream.launch.cache`.

A launch takes nothing of a tensor but its address; how it lies was worked out when the launch was made. So the caller's
tensors are handed on as they are, without views in canonical form.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tilestream.core.operands import AttentionOperands
from tilestream.launch.cache import can_bypass_dispatcher, is_plain, launch_cache, signature
from tilestream.ops import attention_gpu
from tilestream.ops.attention_operands import Settings, Tensors
from tilestream.ops.overlap import span
from tilestream.plan import limit as limits
from tilestream.runtime.channel import check_device

#: The tensors of a call behind q, k and v, in the order of `Tensors`, then the output, as the caller gives them.
Others = tuple[torch.Tensor | None, ...]


class CachedCall(NamedTuple):
    """What is left to do for a call equal to an earlier one.

    Attributes
    ----------
    shape, dtype
        Of the output, as the caller sees it.
    like
        Whether it lies as q does: torch makes such a one in half the time.
    lse
        The log-sum-exp's shape, where the caller asks for it.
    spans
        Of an output that is given, and of the tensors that are read: bytes from the first to the last.
    """

    launch: Any
    scale: float
    shape: torch.Size
    dtype: torch.dtype
    like: bool
    lse: torch.Size | None
    spans: tuple[int, ...]


def signature_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, others: Others, settings: tuple[object, ...]
) -> object | None:
    """What the checks and the plan of a call depend on; None for a call that is always checked.

    Parameters
    ----------
    settings
        All that the caller says beside tensors.
    """
    if not (is_plain(q) and q.is_cuda and can_bypass_dispatcher(q.device)):
        return None
    sinks = others[0]
    if sinks is not None and getattr(sinks, "dtype", None) != torch.float32:  # they are converted first
        return None
    tensors, gradients = (q, k, v, *others), torch.is_grad_enabled()
    for x in tensors:
        if x is not None and (not is_plain(x) or (gradients and x.requires_grad)):
            return None
    key = signature("attention call", tensors, settings)
    try:
        hash(key)
    except TypeError:  # a window that is a list
        return None
    return key


def replay(
    key: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, others: Others
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
    """What `tilestream.attention` returns, if such a call went through before; else None, and nothing has happened."""
    found: Any = launch_cache.get(key)
    if found is None:
        return None
    out = others[-1]
    if out is not None and _may_meet(out, (q, k, v, *others[:-1]), found.spans):
        return None
    check_device(q.device.index)
    if out is None:
        out = torch.empty_like(q) if found.like else q.new_empty(found.shape, dtype=found.dtype)
    lse = None if found.lse is None else q.new_empty(found.lse, dtype=torch.float32)
    found.launch(AttentionOperands(q, k, v, out, found.scale, lse, *others[:-1]), None)
    return out if lse is None else (out, lse)


def _may_meet(out: torch.Tensor, read: tuple[torch.Tensor | None, ...], spans: tuple[int, ...]) -> bool:
    """Whether one of them begins before the output ends, and the other way round: the long way looks closer."""
    begin = out.data_ptr()
    end = begin + spans[0]
    return any(
        x is not None and x.data_ptr() < end and begin < x.data_ptr() + length
        for x, length in zip(read, spans[1:], strict=True)
    )


def insert(
    key: object, q: torch.Tensor, t: Tensors, s: Settings, answer: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:  # fmt: skip
    """Keep what a call that went through decided.

    Parameters
    ----------
    q, answer
        Queries and output as the caller sees them.
    t, s, out, lse
        The call in canonical form.
    """
    if not out.numel():
        return
    operands = AttentionOperands(t.q, t.k, t.v, out, s.scale, lse, *t[3:])
    launch = attention_gpu.find(operands, t, s, None, limits.limit())
    like = q.shape == answer.shape and q.dtype == answer.dtype and q.is_contiguous()
    spans = tuple(0 if x is None else span(x) for x in (out, *t))
    launch_cache.insert(
        key, CachedCall(launch, s.scale, answer.shape, answer.dtype, like, None if lse is None else lse.shape, spans)
    )
