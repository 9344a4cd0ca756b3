"""A call of attention like an earlier one: the launch issued at once, as `tilestream.ops.again` has it for matmul.

A launch takes nothing of a tensor but its address; how it lies was worked out when the launch was made. So what the
caller gave is handed on as it is: no views of rows first, none of scales.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from tilestream.core.operands import Operands
from tilestream.ops import attention_gpu
from tilestream.ops.again import Known, is_plain, unwatched
from tilestream.ops.attention_operands import Settings, Tensors
from tilestream.ops.overlap import span
from tilestream.plan import limit as limits
from tilestream.runtime.channel import check_device
from tilestream.runtime.properties import allows_tf32, context_units

if TYPE_CHECKING:
    from tilestream.ops.attention_gpu import AnyLaunch

#: The tensors of a call behind q, k and v, in the order of `Tensors`, then the output, as the caller gives them.
Others = tuple[torch.Tensor | None, ...]


class _Decided(NamedTuple):
    """What is left to do for a call like an earlier one.

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

    launch: AnyLaunch
    scale: float
    shape: torch.Size
    dtype: torch.dtype
    like: bool
    lse: torch.Size | None
    spans: tuple[int, ...]


_known: Known[_Decided] = Known()


def key_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, others: Others, settings: tuple[object, ...]
) -> object | None:
    """What the checks and the plan of a call depend on; None for a call that always goes the long way.

    Parameters
    ----------
    settings
        All that the caller said beside tensors.
    """
    if not (is_plain(q) and q.is_cuda and is_plain(k) and is_plain(v) and unwatched(q.device)):
        return None
    sinks = others[0]
    if sinks is not None and getattr(sinks, "dtype", None) != torch.float32:  # they are converted first
        return None
    lie: list[object] = []
    for x in others:
        if x is None:
            lie.append(None)
        elif not is_plain(x) or (x.requires_grad and torch.is_grad_enabled()):
            return None
        else:
            lie.append((x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16))
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    dtype, device = q.dtype, q.device
    key = (
        q.shape, q.stride(), q.data_ptr() % 16, k.shape, k.stride(), k.data_ptr() % 16, v.shape, v.stride(),
        v.data_ptr() % 16, dtype, k.dtype, v.dtype, device, k.device, v.device, *lie, settings,
        limits.limit(), context_units(device.index), dtype == torch.float32 and allows_tf32(),
    )  # fmt: skip
    try:
        hash(key)
    except TypeError:  # a window that is a list
        return None
    return key


def run(
    key: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, others: Others
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
    """What `tilestream.attention` returns, if such a call went through before; else None, and nothing has happened."""
    found = _known.get(key)
    if found is None:
        return None
    out = others[-1]
    if out is not None and _may_meet(out, (q, k, v, *others[:-1]), found.spans):
        return None
    check_device(q.device.index)
    if out is None:
        out = torch.empty_like(q) if found.like else q.new_empty(found.shape, dtype=found.dtype)
    lse = None if found.lse is None else q.new_empty(found.lse, dtype=torch.float32)
    found.launch(Operands(q, k, v, out, found.scale, lse, *others[:-1]), None)
    return out if lse is None else (out, lse)


def _may_meet(out: torch.Tensor, read: tuple[torch.Tensor | None, ...], spans: tuple[int, ...]) -> bool:
    """Whether one of them begins before the output ends, and the other way round: the long way looks closer."""
    begin = out.data_ptr()
    end = begin + spans[0]
    return any(
        x is not None and x.data_ptr() < end and begin < x.data_ptr() + length
        for x, length in zip(read, spans[1:], strict=True)
    )


def remember(
    key: object, q: torch.Tensor, t: Tensors, s: Settings, answer: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:  # fmt: skip
    """Remember that such a call went through.

    Parameters
    ----------
    q, answer
        Queries and output as the caller sees them.
    t, s, out, lse
        The call in canonical form.
    """
    if not out.numel():
        return
    operands = Operands(t.q, t.k, t.v, out, s.scale, lse, *t[3:])
    launch = attention_gpu.find(operands, t, s, None, limits.limit())
    like = q.shape == answer.shape and q.dtype == answer.dtype and q.is_contiguous()
    spans = tuple(0 if x is None else span(x) for x in (out, *t))
    _known.keep(
        key, _Decided(launch, s.scale, answer.shape, answer.dtype, like, None if lse is None else lse.shape, spans)
    )
