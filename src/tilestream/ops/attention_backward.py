"""Derivatives of attention by recomputing the scores: exact and bounded in memory, but not fast.

With ``P = exp(S - lse)`` and ``delta = sum(dO * O)`` a row (Dao et al., 2022, appendix B)::

    dV = P^T dO;  dP = dO V^T;  dS = P * (dP - delta + dlse);  dQ = scale * dS K;  dK = scale * dS^T Q

A soft cap multiplies dS by its derivative, ``1 - (S / softcap)^2``. A sink has the weight ``exp(sink - lse)`` in each
row of its head, and so the gradient ``sum(weight * (dlse - delta))``. Torch's own operations compute a block of query
rows at a time, sequence by sequence. The lengths of packed sequences are read from the GPU.

`gradients` writes into buffers. `second` is its derivative and also gives the tangents of the outputs. It writes into
no buffer, so torch can differentiate it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from tilestream.core.operands import AttentionOperands
from tilestream.ops.attention_operands import Settings

#: The number of scores of a block: 128 MiB of float32.
_SCORES = 2**25


#: Where a sequence's rows lie in a tensor.
_Rows = tuple[slice | int, ...]


def gradients(
    grad: torch.Tensor, grad_lse: torch.Tensor | None, x: AttentionOperands, s: Settings
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k, v and the sinks, each in the layout of its operand; the last is empty if there are no sinks.

    Parameters
    ----------
    grad, grad_lse
        Gradients of the output, ``[..., Hq, Dv]``, and of the log-sum-exp, or None.
    x
        The operands and their outputs, with the log-sum-exp.
    """
    assert x.lse is not None
    of_inputs = [torch.zeros_like(y, dtype=x.lse.dtype) for y in (x.q, x.k, x.v)]
    sinks = x.q.new_zeros((0 if x.sinks is None else x.q.shape[-2],), dtype=x.lse.dtype)
    for number, (queries, keys) in enumerate(_sequences(x)):
        _add(number, queries, keys, grad, grad_lse, x, s, (*of_inputs, sinks))
    return *(of.to(y.dtype) for of, y in zip(of_inputs, (x.q, x.k, x.v), strict=True)), sinks


def _sequences(x: AttentionOperands) -> Iterator[tuple[_Rows, _Rows]]:
    """The rows of queries and of keys of each sequence."""
    if not x.k.shape[-2]:
        return iter(())  # no heads
    queries: Iterable[_Rows] = [(i,) for i in range(x.batch)]
    keys = queries
    if x.seqlens_k is not None:
        keys = ((i, slice(0, length)) for i, length in enumerate(x.seqlens_k.tolist()))
    if x.cu_seqlens_q is not None:
        queries = ((slice(*ends),) for ends in pairwise(x.cu_seqlens_q.tolist()))
    if x.cu_seqlens_k is not None:
        keys = ((slice(*ends),) for ends in pairwise(x.cu_seqlens_k.tolist()))
    return zip(queries, keys, strict=True)


def _add(
    number: int, rows_q: _Rows, rows_k: _Rows, grad: torch.Tensor, grad_lse: torch.Tensor | None, x: AttentionOperands,
    s: Settings, into: tuple[torch.Tensor, ...],
) -> None:  # fmt: skip
    """Add the gradients of one sequence."""
    assert x.lse is not None
    one = _Part.of(number, rows_q, rows_k, x, s)
    dout, o, top = one.by_head(grad), one.by_head(x.out), one.by_row(x.lse)
    delta = (dout * o).sum(-1, keepdim=True)
    pull = -delta if grad_lse is None else one.by_row(grad_lse) - delta
    top = torch.where(top == float("-inf"), 0.0, top)  # rows that see no key: exp(-inf - 0) is 0
    dq, dk, dv = (y[of] for y, of in zip(into, (rows_q, rows_k, rows_k), strict=False))
    if one.sinks is not None:
        into[3].add_((torch.exp(one.sinks - top) * pull).sum((-1, -2)).flatten())
    for rows in one.blocks():
        scores, tanh, hidden = one.scores(rows, s)
        p = torch.exp(scores.masked_fill(hidden, float("-inf")) - top[:, :, rows])
        dv += ((p.mT @ dout[:, :, rows]).sum(1) * one.scale_v[:, 0]).transpose(0, 1)
        ds = p * (dout[:, :, rows] @ one.v.mT + pull[:, :, rows])
        ds = (ds if tanh is None else ds * (1 - tanh * tanh)) * one.scale
        dq[rows] += (ds @ one.k).flatten(0, 1).transpose(0, 1)
        dk += (ds.mT @ one.q[:, :, rows]).sum(1).transpose(0, 1)


class _Part(NamedTuple):
    """One sequence in float32 or float64: key heads first, then the query heads of each, then rows."""

    number: int
    rows_q: _Rows
    packed: bool  # queries
    q: torch.Tensor  # ``[Hkv, ratio, rows, D]``
    k: torch.Tensor  # ``[Hkv, 1, keys, D]``
    v: torch.Tensor  # ``[Hkv, 1, keys, Dv]``, scaled
    sinks: torch.Tensor | None  # ``[Hkv, ratio, 1, 1]``
    scale: torch.Tensor  # factor of the scores: ``[Hkv, ratio, 1, 1]``
    scale_v: torch.Tensor  # ``[Hkv, 1, 1, 1]``

    @classmethod
    def of(cls, number: int, rows_q: _Rows, rows_k: _Rows, x: AttentionOperands, s: Settings) -> _Part:
        """Sequence ``number`` of a call, given its rows."""
        assert x.lse is not None
        wide, heads = x.lse.dtype, x.k.shape[-2]
        k, v = (y[rows_k].to(wide).transpose(0, 1).unsqueeze(1) for y in (x.k, x.v))
        scale, scale_v = _scales(x, s, number, heads, wide)
        sinks = None if x.sinks is None else _by_head(x.sinks.to(wide), heads)[..., None, None]
        q = _by_head(x.q[rows_q].to(wide).transpose(0, 1), heads)
        return cls(number, rows_q, x.cu_seqlens_q is not None, q, k, v * scale_v, sinks, scale, scale_v)

    def by_head(self, y: torch.Tensor, rows: _Rows | None = None) -> torch.Tensor:
        """The sequence's rows of a tensor in the layout ``"bshd"``: those of its queries, or ``rows``."""
        own = y[self.rows_q if rows is None else rows].to(self.k.dtype).transpose(0, 1)
        return _by_head(own, self.k.shape[0])

    def by_row(self, y: torch.Tensor) -> torch.Tensor:
        """The sequence's part of a tensor like the log-sum-exp: ``[Hkv, ratio, rows, 1]``."""
        rows = y[self.rows_q].transpose(0, 1) if self.packed else y[self.number]
        return _by_head(rows.to(self.k.dtype), self.k.shape[0]).unsqueeze(-1)

    def blocks(self) -> Iterator[slice]:
        """Blocks of query rows with at most `_SCORES` scores."""
        step = max(1, _SCORES // max(1, self.q.shape[0] * self.q.shape[1] * self.k.shape[2]))
        for first in range(0, max(1, self.q.shape[2]), step):
            yield slice(first, min(self.q.shape[2], first + step))

    def scores(self, rows: slice, s: Settings) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """The scores of some rows before the mask; the tanh of a soft cap, or None; which scores are masked."""
        scores, tanh = (_narrow(self.q, rows) * self.scale) @ self.k.mT, None
        if s.softcap:
            tanh = torch.tanh(scores / s.softcap)
            scores = s.softcap * tanh
        return scores, tanh, _hidden(rows, self.q.shape[2], self.k.shape[2], s, self.q.device)


def _by_head(y: torch.Tensor, heads: int) -> torch.Tensor:
    """``[Hq, ...]`` as ``[Hkv, ratio, ...]``."""
    return y.reshape(heads, y.shape[0] // heads, *y.shape[1:])


def _narrow(y: torch.Tensor, rows: slice) -> torch.Tensor:
    """``y[:, :, rows]``. Older torch's vmap has no rule for a slice of all rows."""
    return y.narrow(2, rows.start, rows.stop - rows.start)


# Second derivatives ---------------------------------------------------------------------------------------------------

#: Tangents or gradients of q, k, v and the sinks, in their operands' layout; None for 0.
Changes = Sequence[torch.Tensor | None]


def tangents(changes: Changes, x: AttentionOperands, s: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Tangents of the output and the log-sum-exp, from those of q, k, v and the sinks."""
    found = second(None, None, changes, x, s)
    assert found[0] is not None
    assert found[1] is not None
    return found[0], found[1]


def second(
    grad: torch.Tensor | None, grad_lse: torch.Tensor | None, changes: Changes, x: AttentionOperands, s: Settings
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of `gradients` with respect to ``grad``, ``grad_lse``, q, k, v and the sinks.

    `gradients` is linear in ``grad`` and ``grad_lse``, so their gradients are the tangents of the output and the
    log-sum-exp. Both outputs are functions of q, k, v and the sinks, and are computed again.

    Parameters
    ----------
    grad, grad_lse
        As for `gradients`. If ``grad`` is None, only the tangents are computed.
    changes
        Gradients of the results of `gradients`. For the tangents: tangents of q, k, v and the sinks.
    """
    assert x.lse is not None
    changes = [torch.zeros_like(y) if y is not None and c is None else c
               for c, y in zip(changes, (x.q, x.k, x.v, x.sinks), strict=True)]  # fmt: skip
    parts = [
        _second(_Part.of(number, rows_q, rows_k, x, s), rows_k, grad, grad_lse, changes, s)
        for number, (rows_q, rows_k) in enumerate(_sequences(x))
    ]
    if not parts:  # no sequences
        zeros = [torch.zeros_like(y) for y in (x.q, x.k, x.v)]
        return x.q.new_zeros((*x.q.shape[:-1], x.v.shape[-1])), torch.zeros_like(x.lse), *zeros, changes[3]
    out, lse, *of_inputs = zip(*parts, strict=True)
    packed_q, packed_k = x.cu_seqlens_q is not None, x.cu_seqlens_k is not None
    like_q, like_k = (x.q.shape[1 - packed_q], packed_q), (x.k.shape[1 - packed_k], packed_k)
    of_lse = _joined(lse, *like_q)
    found = _joined(out, *like_q), of_lse if packed_q else of_lse.transpose(1, 2)
    if grad is None:
        return found
    q, k, v, sinks = of_inputs
    of_sinks = None if x.sinks is None else torch.stack(sinks).sum(0)
    return *found, _joined(q, *like_q), _joined(k, *like_k), _joined(v, *like_k), of_sinks


def _joined(parts: Sequence[torch.Tensor], rows: int, packed: bool) -> torch.Tensor:
    """The rows of all sequences in an operand's layout with ``rows`` rows; rows of no sequence are 0."""
    parts = [torch.cat(list(parts))] if packed else parts
    parts = [pad(y, (*[0, 0] * (y.dim() - 1), 0, rows - y.shape[0])) for y in parts]
    return parts[0] if packed else torch.stack(parts)


def _second(
    one: _Part, rows_k: _Rows, grad: torch.Tensor | None, grad_lse: torch.Tensor | None, changes: Changes, s: Settings
) -> tuple[torch.Tensor, ...]:
    """`second` for one sequence, with rows first.

    ``W`` is the tangent of the scores before the soft cap, ``Y = P * W * slope`` that of the weights before they are
    normalised, and ``y`` that of the log-sum-exp::

        dlse = y = sum(Y) + P_sink dsink;  dO = P dV + Y V - y O

    The gradients of q, k, v and the sinks are those of the loss ``<W, dS> + <dV, P^T G> + dsink * ..``, whose gradient
    with respect to ``G`` is ``dO``.
    """
    of_q, of_k, of_v, of_sinks = changes
    assert of_q is not None
    assert of_k is not None
    assert of_v is not None
    a_rows, b, c = one.by_head(of_q), one.by_head(of_k, rows_k), one.by_head(of_v, rows_k) * one.scale_v
    nothing = one.k.new_zeros(())
    sink = nothing if of_sinks is None else _by_head(of_sinks.to(one.k.dtype), one.k.shape[0])[..., None, None]
    out, lse, dq = [], [], []
    dk = dv = dsinks = nothing
    for rows in one.blocks():
        scores, tanh, hidden = one.scores(rows, s)
        p, p_sink = _weights(scores, hidden, one.sinks)
        slope = torch.ones_like(scores[:1, :1, :1, :1]) if tanh is None else 1 - tanh * tanh
        q, a = _narrow(one.q, rows), _narrow(a_rows, rows)
        w = one.scale * (a @ one.k.mT + q @ b.mT)
        o, y = p @ one.v, p * (w * slope)
        of_lse = y.sum(-1, keepdim=True) + p_sink * sink
        lse.append(of_lse)
        out.append(p @ c + y @ one.v - of_lse * o)
        if grad is None:
            continue
        g = _narrow(one.by_head(grad), rows)
        dp = g @ one.v.mT
        pull = -(g * o).sum(-1, keepdim=True)
        if grad_lse is not None:
            pull = pull + _narrow(one.by_row(grad_lse), rows)
        ds = p * (dp + pull)
        of_p, of_sink = w * slope * (dp + pull) + g @ c.mT - of_lse * dp, sink * pull
        mean = (p * of_p).sum(-1, keepdim=True) + p_sink * of_sink
        of_scores = p * (of_p - mean) * slope
        if tanh is not None:
            of_scores = of_scores - w * ds * slope * tanh * (2 / s.softcap)
        ds = ds * slope
        dq.append(one.scale * (ds @ b + of_scores @ one.k))
        dk = dk + (one.scale * (ds.mT @ a + of_scores.mT @ q)).sum(1)
        dv = dv + (y.mT @ g - p.mT @ (of_lse * g)).sum(1) * one.scale_v[:, 0]
        dsinks = dsinks + (p_sink * (of_sink - mean)).sum((-1, -2)).reshape(-1)
    heads = one.q.shape[0] * one.q.shape[1]
    wholes = (torch.cat(blocks, 2) for blocks in (out, lse, dq) if blocks)
    joined = [y.reshape(heads, *y.shape[2:]).transpose(0, 1) for y in wholes]
    joined[1] = joined[1][..., 0]
    return (*joined, dk.transpose(0, 1), dv.transpose(0, 1), dsinks) if dq else tuple(joined)


def _weights(
    scores: torch.Tensor, hidden: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The softmax over the scores that are not masked, 0 for the others, and the sinks' weight."""
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is None:  # softmax of a row that sees no key would be NaN
        p = torch.softmax(scores.masked_fill(hidden.all(-1, keepdim=True), 0.0), -1)
        return p.masked_fill(hidden, 0.0), scores.new_zeros(())
    both = torch.softmax(torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1), -1)
    return both[..., :-1], both[..., -1:]


def _scales(
    x: AttentionOperands, s: Settings, index: int, heads: int, wide: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of the scores, ``[Hkv, ratio, 1, 1]``, and of the values, ``[Hkv, 1, 1, 1]``."""
    scale = torch.full((heads, 1, 1, 1), s.scale, dtype=wide, device=x.q.device)
    if x.scale_q is not None:
        scale = scale * _by_head(x.scale_q[index].to(wide), heads)[..., None, None]
    if x.scale_k is not None:
        scale = scale * x.scale_k[index].to(wide)[:, None, None, None]
    scale_v = torch.ones((heads, 1, 1, 1), dtype=wide, device=x.q.device)
    if x.scale_v is not None:
        scale_v = x.scale_v[index].to(wide)[:, None, None, None]
    return scale, scale_v


def _hidden(rows: slice, queries: int, keys: int, s: Settings, device: torch.device) -> torch.Tensor:
    """Which keys are masked for these rows."""
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
