"""Gradients of attention by recompute: right, and bounded in memory, but not fast.

With ``P = exp(S - lse)`` and ``delta = sum(dO * O)`` a row (Dao et al., 2022, appendix B)::

    dV = P^T dO;  dP = dO V^T;  dS = P * (dP - delta + dlse);  dQ = scale * dS K;  dK = scale * dS^T Q

A soft cap multiplies dS by its slope, ``1 - (S / softcap)^2``. A sink has the weight ``exp(sink - lse)`` in each of its
head's rows, and so the gradient ``sum(weight * (dlse - delta))``. In torch's own operations, a block of query rows at a
time, sequence by sequence: packed sequences on a GPU cost a look at their lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilestream.ops.attention_operands import Settings, Tensors

#: Scores at a time: 128 MiB of float32.
_SCORES = 2**25


class _Sequence(NamedTuple):
    queries: tuple[slice | int, ...]
    keys: tuple[slice | int, ...]
    lse: tuple[slice | int, ...]
    number: int


def gradients(
    grad: torch.Tensor, grad_lse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, t: Tensors, s: Settings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v and the sinks; the last is empty where there are none.

    Parameters
    ----------
    grad, grad_lse
        Of the output, ``[..., Hq, Dv]``, and of the log-sum-exp, or None.
    """
    wide = lse.dtype
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (t.q, t.k, t.v))
    sinks = t.q.new_zeros((0 if t.sinks is None else t.q.shape[-2],), dtype=torch.float32)
    for sequence in _sequences(t):
        _add(sequence, grad, grad_lse, out, lse, t, s, (dq, dk, dv, sinks))
    return dq.to(t.q.dtype), dk.to(t.k.dtype), dv.to(t.v.dtype), sinks


def _sequences(t: Tensors) -> list[_Sequence]:
    every = slice(None)
    if t.cu_seqlens_q is None:
        lengths = [t.k.shape[1]] * t.batch if t.seqlens_k is None else t.seqlens_k.tolist()
        return [_Sequence((i, every), (i, slice(0, n)), (i, every, every), i) for i, n in enumerate(lengths)]
    bounds = t.cu_seqlens_q.tolist()
    rows = [slice(bounds[i], bounds[i + 1]) for i in range(t.batch)]
    if t.cu_seqlens_k is not None:
        ends = t.cu_seqlens_k.tolist()
        keys: list[tuple[slice | int, ...]] = [(slice(ends[i], ends[i + 1]),) for i in range(t.batch)]
    else:
        lengths = [t.k.shape[1]] * t.batch if t.seqlens_k is None else t.seqlens_k.tolist()
        keys = [(i, slice(0, n)) for i, n in enumerate(lengths)]
    return [_Sequence((rows[i],), keys[i], (rows[i],), i) for i in range(t.batch)]


def _add(
    sequence: _Sequence, grad: torch.Tensor, grad_lse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor,
    t: Tensors, s: Settings, into: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:  # fmt: skip
    """Add one sequence's gradients; heads of keys first, then the query heads of each, then rows."""
    wide = lse.dtype
    k, v = (x[sequence.keys].to(wide).transpose(0, 1).unsqueeze(1) for x in (t.k, t.v))
    heads, _, keys, _ = k.shape
    queries = t.q[sequence.queries].shape[0]
    if not heads or not queries:
        return

    def by_head(x: torch.Tensor) -> torch.Tensor:  # [rows, Hq, columns] -> [Hkv, ratio, rows, columns]
        heads_first: torch.Tensor = x.to(wide).transpose(0, 1).unflatten(0, (heads, -1))
        return heads_first

    q, dout, o = by_head(t.q[sequence.queries]), by_head(grad[sequence.queries]), by_head(out[sequence.queries])
    packed = t.cu_seqlens_q is not None
    rows_of = [None if x is None else x[sequence.lse] for x in (lse, grad_lse)]
    top, dlse = (
        None if x is None else (x.transpose(0, 1) if packed else x).to(wide).unflatten(0, (heads, -1)).unsqueeze(-1)
        for x in rows_of
    )
    assert top is not None
    delta = (dout * o).sum(-1, keepdim=True)
    pull = -delta if dlse is None else dlse - delta
    top = torch.where(top == float("-inf"), 0.0, top)  # rows that see nothing: exp(-inf - 0) is 0
    scale, scale_v = _scales(t, s, sequence.number, heads, wide)
    v = v * scale_v
    dq, dk, dv = (x[of] for x, of in zip(into, (sequence.queries, sequence.keys, sequence.keys), strict=False))
    if t.sinks is not None:
        sink = t.sinks.to(wide).unflatten(0, (heads, -1))[..., None, None]
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


def _scales(t: Tensors, s: Settings, index: int, heads: int, wide: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What scores are multiplied by, ``[Hkv, ratio, 1, 1]``, and values, ``[Hkv, 1, 1, 1]``."""
    scale = torch.full((heads, 1, 1, 1), s.scale, dtype=wide, device=t.q.device)
    if t.scale_q is not None:
        scale = scale * t.scale_q[index].to(wide).unflatten(0, (heads, -1))[..., None, None]
    if t.scale_k is not None:
        scale = scale * t.scale_k[index].to(wide)[:, None, None, None]
    scale_v = torch.ones((heads, 1, 1, 1), dtype=wide, device=t.q.device)
    if t.scale_v is not None:
        scale_v = t.scale_v[index].to(wide)[:, None, None, None]
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
