"""The operands of attention as every backend is told of them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Operands(NamedTuple):
    """Tensors in canonical form: heads behind rows, whatever layout the caller has; any strides, the last 1.

    Attributes
    ----------
    q, out
        ``[B, Sq, Hq, D]`` and ``[B, Sq, Hq, Dv]``; where queries are packed ``[T, Hq, D]`` and ``[T, Hq, Dv]``.
    k, v
        ``[B, Sk, Hkv, D]`` and ``[B, Sk, Hkv, Dv]``; packed ``[T, Hkv, D]``; in pages ``[P, page, Hkv, D]``.
    scale
        Of the products of queries and keys.
    lse
        float32 (float64 for float64): ``[B, Hq, Sq]``, packed ``[T, Hq]``; None where nobody asks for it.
    sinks
        float32 ``[Hq]``.
    scale_q, scale_k, scale_v
        float32 ``[B, Hq]``, ``[B, Hkv]``, ``[B, Hkv]``, any strides; None: 1.
    cu_seqlens_q, cu_seqlens_k
        int32 ``[B + 1]``: first rows of the sequences, and behind the last.
    block_table
        int32 ``[B, n]``: the pages of a sequence, in order.
    seqlens_k
        int32 ``[B]``: keys of a sequence, where they are not all of its rows.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    scale: float
    lse: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    scale_q: torch.Tensor | None = None
    scale_k: torch.Tensor | None = None
    scale_v: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    seqlens_k: torch.Tensor | None = None
