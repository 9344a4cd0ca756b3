"""Gradients of attention by recompute: right, and bounded in memory, but not fast.

With ``P = exp(S - lse)`` and ``delta = sum(dO * O)`` a row (Dao et al., 2022, appendix B)::

    dV = P^T dO;  dP = dO V^T;  dS = P * (dP - delta + dlse);  dQ = scale * dS K;  dK = scale * dS^T Q

A soft cap multiplies dS by its slope, ``1 - (S / softcap)^2``. A sink has the weight ``exp(sink - lse)`` in each of its
head's rows, and so the gradient ``sum(weight * (dlse - delta))``. In torch's own operations, a block of query rows at a
time, sequence by sequence: packed sequences on a GPU cost a look at their lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import torch

from tilestream.core.operands import AttentionOperands
from tilestream.ops.attention_operands import Settings

#: Scores at a time: 128 MiB of float32.
_SCORES = 2**25


#: Where a sequence's rows lie in a tensor.
_Rows = tuple[slice | int, ...]


def gradients(
    grad: torch.Tensor, grad_lse: torch.Tensor | None, x: AttentionOperands, s: Settings
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k, v and the sinks; the last is empty where there are none.

    Parameters
    ----------
    grad, grad_lse
        Of the output, ``[..., Hq, Dv]``, and of the log-sum-exp, or None.
    x
        Operands with their outputs, the log-sum-exp included.
    """
    assert x.lse is not None
    of_inputs = [torch.zeros(y.shape, dtype=x.lse.dtype, device=y.device) for y in (x.q, x.k, x.v)]
    sinks = x.q.new_zeros((0 if x.sinks is None else x.q.shape[-2],), dtype=torch.float32)
    for number, (queries, keys) in enumerate(_sequences(x)):
        _add(number, queries, keys, grad, grad_lse, x, s, (*of_inputs, sinks))
    return *(of.to(y.dtype) for of, y in zip(of_inputs, (x.q, x.k, x.v), strict=True)), sinks


def _sequences(x: AttentionOperands) -> Iterator[tuple[_Rows, _Rows]]:
    """The rows of queries, and of keys, of each sequence."""
    lengths = [x.k.shape[1]] * x.batch if x.seqlens_k is None else x.seqlens_k.tolist()
    queries: Iterable[_Rows] = ((i,) for i in range(x.batch))
    keys: Iterable[_Rows] = ((i, slice(0, length)) for i, length in enumerate(lengths))
    if x.cu_seqlens_q is not None:
        queries = ((slice(*ends),) for ends in pairwise(x.cu_seqlens_q.tolist()))
    if x.cu_seqlens_k is not None:
        keys = ((slice(*ends),) for ends in pairwise(x.cu_seqlens_k.tolist()))
    return zip(queries, keys, strict=True)


def _add(
    number: int, rows_q: _Rows, rows_k: _Rows, grad: torch.Tensor, grad_lse: torch.Tensor | None, x: AttentionOperands,
    s: Settings, into: tuple[torch.Tensor, ...],
) -> None:  # fmt: skip
    """Add one sequence's gradients; heads of keys first, then the query heads of each, then rows."""
    assert x.lse is not None
    wide = x.lse.dtype
    k, v = (y[rows_k].to(wide).transpose(0, 1).unsqueeze(1) for y in (x.k, x.v))
    heads, _, keys, _ = k.shape
    queries = x.q[rows_q].shape[0]
    if not heads or not queries:
        return

    # [rows, Hq, columns] -> [Hkv, ratio, rows, columns]
    q, dout, o = (y[rows_q].to(wide).transpose(0, 1).unflatten(0, (heads, -1)) for y in (x.q, grad, x.out))

    def of_rows(y: torch.Tensor) -> torch.Tensor:  # to [Hkv, ratio, rows, 1]
        rows = y[number] if x.cu_seqlens_q is None else y[rows_q].transpose(0, 1)
        return rows.to(wide).unflatten(0, (heads, -1)).unsqueeze(-1)  # type: ignore[no-any-return]

    top, dlse = of_rows(x.lse), None if grad_lse is None else of_rows(grad_lse)
    delta = (dout * o).sum(-1, keepdim=True)
    pull = -delta if dlse is None else dlse - delta
    top = torch.where(top == float("-inf"), 0.0, top)  # rows that see nothing: exp(-inf - 0) is 0
    scale, scale_v = _scales(x, s, number, heads, wide)
    v = v * scale_v
    dq, dk, dv = (y[of] for y, of in zip(into, (rows_q, rows_k, rows_k), strict=False))
    if x.sinks is not None:
        sink = x.sinks.to(wide).unflatten(0, (heads, -1))[..., None, None]
        into[3].add_((torch.exp(sink - top) * pull).sum((-1, -2)).flatten())
    step = max(1, _SCORES // max(1, q.shape[0] * q.shape[1] * keys))
    for first in range(0, queries, step):
        rows = slice(first, min(queries, first + step))
        scores = (q[:, :, rows] * scale) @ k.mT
        slope = None
        if s.softcap:
            slope = torch.tanh(scores / s.softcap)
            scores, slope = s.softcap * slope, 1 - slope * slope
        scores = scores.masked_fill(_hidden(rows, queries, keys, s, q.device), float("-inf"))
        p = torch.exp(scores - top[:, :, rows])
        dv += ((p.mT @ dout[:, :, rows]).sum(1) * scale_v[:, 0]).transpose(0, 1)
        ds = p * (dout[:, :, rows] @ v.mT + pull[:, :, rows])
        ds = (ds if slope is None else ds * slope) * scale
        dq[rows] += (ds @ k).flatten(0, 1).transpose(0, 1)
        dk += (ds.mT @ q[:, :, rows]).sum(1).transpose(0, 1)


def _scales(
    x: AttentionOperands, s: Settings, index: int, heads: int, wide: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What scores are multiplied by, ``[Hkv, ratio, 1, 1]``, and values, ``[Hkv, 1, 1, 1]``."""
    scale = torch.full((heads, 1, 1, 1), s.scale, dtype=wide, device=x.q.device)
    if x.scale_q is not None:
        scale = scale * x.scale_q[index].to(wide).unflatten(0, (heads, -1))[..., None, None]
    if x.scale_k is not None:
        scale = scale * x.scale_k[index].to(wide)[:, None, None, None]
    scale_v = torch.ones((heads, 1, 1, 1), dtype=wide, device=x.q.device)
    if x.scale_v is not None:
        scale_v = x.scale_v[index].to(wide)[:, None, None, None]
    return scale, scale_v


def _hidden(rows: slice, queries: int, keys: int, s: Settings, device: torch.device) -> torch.Tensor:
    """Which keys these rows do not see."""
    shift = keys - queries if s.alignment == "bottom_right" else 0
    position = torch.arange(rows.start, rows.stop, device=device)[:, None] + shift
    key = torch.arange(keys, device=device)
    right = 0 if s.causal else s.right
    hidden = torch.zeros((position.shape[0], keys), dtype=torch.bool, device=device)
    if s.left >= 0:
        hidden |= key < position - s.left
    if right >= 0:
        hidden |= key > position + right
    return hidden
