"""What attention gives where keys are taken in a stated order: an oracle of a few lines, for texts on stand-ins.

Queries are 0, so all scores are equal, each weight is 1 and no sum is rescaled. A row's output is then the mean of its
values, and what float32 rounds off on the way depends on nothing but which values are added together, and in which
order. Values are large ones that cancel and small ones beside them, so the output shows what was rounded off, in 16
bits, too. The products of a block are added exactly: what a matrix unit does inside is no part of the stated order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attention_operands import Prepared

from tilestream.plan.additions import KeyOrder


def prepare(case: Prepared, order: KeyOrder | None = None, seed: int = 0) -> Prepared:
    """The case with queries of 0, and with values that show the order in which they are added.

    Large values cancel in each share of ``order``; without it in the last half of the keys, where windows are.
    """
    random = np.random.default_rng(seed)
    case.operands.q.zero_()
    v = case.operands.v
    keys, columns = v.shape[-3], v.shape[:-3] + v.shape[-2:]
    values, spans = np.empty((*columns, keys)), [(keys - keys // 2, keys)]
    if order is not None:
        shares = blocks_of(order, keys)
        spans = [(min(share) * order.block, min((max(share) + 1) * order.block, keys)) for share in shares]
    for at in np.ndindex(columns):
        small = random.integers(-9, 10, keys) / 1024
        for begin, end in spans:
            places = begin + random.permutation(end - begin)[: (end - begin) // 4 * 2].reshape(2, -1)
            large = random.integers(1, 2048, places.shape[1]) * 16
            small[places[0]], small[places[1]] = large, -large
        values[at] = small
    order = (*range(v.dim() - 3), v.dim() - 1, *range(v.dim() - 3, v.dim() - 1))
    v.copy_(torch.from_numpy(values.transpose(order)))
    return case


def seen(case: Prepared) -> np.ndarray:
    """Which keys a dense case's rows see: ``[queries, keys]``."""
    p = case.problem
    shift = p.seqlen_k - p.seqlen_q if p.alignment == "bottom_right" else 0
    distance = np.arange(p.seqlen_k) - np.arange(p.seqlen_q)[:, None] - shift
    left, right = p.window
    right = 0 if p.causal else right
    return (distance >= (-np.inf if left is None else -left)) & (distance <= (np.inf if right is None else right))


def blocks_of(order: KeyOrder, keys: int) -> list[Sequence[int]]:
    """The key blocks of each share, in the order in which they are taken."""
    shares = np.array_split(np.arange(-(-keys // order.block)), order.shares)
    return [list(share[::-1] if order.downwards else share) for share in shares]


def outputs(case: Prepared, order: KeyOrder) -> np.ndarray:
    """What the stated order gives: ``[shares, batch, queries, heads, columns]``."""
    v, sees = case.operands.v.double().numpy(), seen(case)
    p = case.problem
    made = np.zeros((order.shares, p.batch, p.seqlen_q, p.heads_q, p.head_dim_v))
    for share, batch, head in np.ndindex(order.shares, p.batch, p.heads_q):
        total, count = np.zeros((p.seqlen_q, p.head_dim_v), np.float32), np.zeros((p.seqlen_q, 1), np.float32)
        for block in blocks_of(order, p.seqlen_k)[share]:
            keys = slice(block * order.block, (block + 1) * order.block)
            weights = sees[:, keys].astype(np.float64)
            total = (total + weights @ v[batch, keys, head // (p.heads_q // p.heads_kv)]).astype(np.float32)
            count += weights.sum(1, keepdims=True, dtype=np.float32)
        with np.errstate(divide="ignore"):
            factor = np.where(count == 0, np.float32(0), np.float32(1) / count)
        made[share, batch, :, head] = (total * factor).astype(np.float16)
    return made
