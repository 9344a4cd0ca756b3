"""Attention on the CPU: persistent worker threads, each tile one query block of one head.

::

    row_max = sink; total = 1 (no sink: -inf, 0); acc = 0
    for block of the keys that some row of the tile sees:
        s = scale * Q[rows] @ K[block]^T, capped; masked only in the blocks at an edge
        row_max' = max(row_max, row maximum of s);  p = exp(s - row_max')
        total, acc = total and acc * exp(row_max - row_max') + row sums of p, and p @ V[block]
    out = acc / total;  lse = row_max + log(total)

This is the online softmax (Milakov, Gimelshein, 2018) of FlashAttention (Dao et al., 2022): each worker needs memory
for one block of scores at any length. It computes in float32, or float64 for float64. Without a soft cap, torch's own
CPU kernel (`flash`) computes the blocks that each row sees whole: it keeps scores in a core's cache and takes 0.65 of
the time. Its result for a run of keys joins the softmax as one score, the log-sum-exp, and one value.

A call that torch's kernel computes as a whole is one item: `WholeBody`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from tilestream.core.attention import diagonal, key_blocks, seen_keys
from tilestream.core.grid import WorkItem
from tilestream.core.integers import cdiv
from tilestream.core.operands import AttentionOperands
from tilestream.core.raster import longest_first
from tilestream.kernels.cpu.convert import Scratch, widened
from tilestream.kernels.cpu.epilogue import wide_dtype

#: Keys of one call of `flash`. Keys of other dtypes, and of pages, are copied first.
FLASH_KEYS = 4096


def flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention ``[B, H, S, D]`` and its log-sum-exp ``[B, H, S]`` by torch's own kernel for CPUs.

    All last strides are 1, there is at least one key, and the head dims of keys and values are equal. ``causal`` is
    aligned to the top left. The output is contiguous as ``[B, S, H, D]``. Its bits do not depend on the number of
    threads. The log-sum-exp of a row whose scores all overflow to -inf is 0.
    """
    out, lse = torch._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse


class FlashCall(NamedTuple):
    """Operands and output of a call of `flash`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    causal: bool
    scale: float

    def run(self) -> None:
        """Run the call."""
        out, lse = flash(self.q, self.k, self.v, self.causal, self.scale)
        self.out.copy_(out)
        if self.lse is not None:
            self.lse.copy_(lse)


def flash_calls(x: AttentionOperands, causal: bool) -> list[FlashCall]:
    """The calls that compute dense attention: one, or without a copy one a sequence if heads share keys."""
    q, k, v, out = (y.transpose(1, 2) for y in (x.q, x.k, x.v, x.out))
    heads, shared = q.shape[1], k.shape[1]
    if heads == shared:
        return [FlashCall(q, k, v, out, x.lse, causal, x.scale)]
    of_q, of_k = (shared, heads // shared), (-1, heads // shared, -1, -1)
    return [
        FlashCall(
            q[i].unflatten(0, of_q), k[i].unsqueeze(1).expand(of_k), v[i].unsqueeze(1).expand(of_k),
            out[i].unflatten(0, of_q), None if x.lse is None else x.lse[i].unflatten(0, of_q), causal, x.scale,
        )
        for i in range(q.shape[0])
    ]  # fmt: skip


class WholeBody:
    """A call that `flash` computes as a whole, as one item: a `tilestream.launch.cpu.launch.Body`."""

    def __init__(self, x: AttentionOperands, calls: list[FlashCall]) -> None:
        self._x, self._calls = x, calls

    def compute(self, item: WorkItem) -> None:
        """See `tilestream.launch.cpu.launch.Body`."""
        for call in self._calls:
            call.run()

    def reduce(self, item: WorkItem, slots: Sequence[int]) -> None:
        """See `tilestream.launch.cpu.launch.Body`: the item is whole."""
        raise AssertionError("a part of a tile, from a schedule that makes none")

    def poison(self, item: WorkItem) -> None:
        """See `tilestream.launch.cpu.launch.Body`."""
        self._x.out.fill_(float("nan"))
        if self._x.lse is not None:
            self._x.lse.fill_(float("nan"))


class SequenceRows(NamedTuple):
    """A sequence: first row and number of its queries, first row and number of its keys.

    A dense sequence begins at row 0. ``number`` is -1 for the rows of a packed call that belong to no sequence: queries
    without keys.
    """

    number: int
    first_query: int
    queries: int
    first_key: int
    keys: int


class Tile(NamedTuple):
    """A work item: a block of query rows of a sequence, and a query head."""

    sequence: SequenceRows
    block: int
    head: int


class Tiles:
    """The work items of a `tilestream.plan.AttentionPlan`, for sequences whose lengths are known."""

    def __init__(self, plan: Any, sequences: Sequence[SequenceRows]) -> None:
        self._heads, self._group = plan.problem.heads_q, plan.group
        self._packed, self._positions = plan.problem.varlen, plan.positions
        # The list of a packed call begins with the longest sequence.
        self._list = sorted(sequences, key=lambda s: -s.keys) if self._packed else list(sequences)
        self._starts = [0, *accumulate(cdiv(s.queries, self._positions) * self._heads for s in self._list)]

    def of(self, item: WorkItem) -> Tile | None:
        """The tile of ``item``; None for a void position of a packed call's list."""
        if not self._packed:
            return Tile(self._list[item.pn // self._heads], item.pm, item.pn % self._heads)
        if item.pm >= self._starts[-1]:
            return None
        place = bisect_right(self._starts, item.pm) - 1
        sequence = self._list[place]
        blocks = cdiv(sequence.queries, self._positions)
        block, head = longest_first(item.pm - self._starts[place], blocks, self._heads, self._group)
        return Tile(sequence, block, head)


class Seen(NamedTuple):
    """The keys ``[low, high)`` that a tile's rows see, and their blocks as from `core.attention.key_blocks`."""

    first: int
    last: int
    shift: int
    left: int
    right: int
    low: int
    high: int
    begin: int
    plain_begin: int
    plain_end: int
    end: int


def seen_by(plan: Any, tile: Tile, block_n: int) -> Seen:
    """The keys that the rows of ``tile`` see."""
    problem, s = plan.problem, tile.sequence
    offsets = diagonal(s.queries, s.keys) if problem.alignment == "bottom_right" else (0, 0)
    left, right = (s.queries + s.keys if side is None else side for side in problem.sides)
    mask = *offsets, left, right, s.keys
    first = tile.block * plan.positions
    last = min(s.queries, first + plan.positions) - 1
    low, high = seen_keys(first, *mask)[0], seen_keys(last, *mask)[1]
    blocks = key_blocks(first, last, *mask, block_n)
    return Seen(first, last, offsets[0] - offsets[1], left, right, min(low, high), high, *blocks)


class AttentionBody:
    """Load, math and epilogue of one call: the `tilestream.launch.cpu.launch.Body` of attention."""

    def __init__(self, plan: Any, operands: AttentionOperands, tiles: Tiles, workspace: Scratch) -> None:
        self._plan, self._x, self._tiles, self._workspace = plan, operands, tiles, workspace
        self._wide = wide_dtype(operands.q.dtype)
        self._copies = bool(plan.promise)  # copy keys and values: the BLAS's bits depend on strides and alignment

    def compute(self, item: WorkItem) -> None:
        """See `tilestream.launch.cpu.launch.Body`."""
        tile = self._tiles.of(item)
        if tile is None:
            return
        x, plan, wide = self._x, self._plan, self._wide
        head, block_n = tile.head // plan.problem.ratio, plan.block[1]
        seen = seen_by(plan, tile, block_n)
        rows = seen.last + 1 - seen.first
        out, lse = self._outputs(tile)
        acc = torch.zeros(out.shape, dtype=wide)
        row_max, total = torch.full((rows, 1), float("-inf"), dtype=wide), torch.zeros((rows, 1), dtype=wide)
        if x.sinks is not None:
            row_max.fill_(x.sinks[tile.head].item())
            total.fill_(1.0)
        factor = x.scale * self._scale(x.scale_q, tile, tile.head) * self._scale(x.scale_k, tile, head)
        queries = self._queries(x.q, tile)
        with (
            widened(queries.clone() if self._copies else queries, wide, self._workspace) as q,
            self._workspace.borrow((rows, block_n), wide) as block_of_scores,
        ):
            blocks: Sequence[int] = range(seen.begin, seen.end)
            if not plan.problem.softcap and x.k.shape[-1] == x.v.shape[-1]:
                for begin in range(seen.plain_begin * block_n, seen.plain_end * block_n, FLASH_KEYS):
                    end = min(begin + FLASH_KEYS, seen.plain_end * block_n)
                    with (
                        widened(self._keys(x.k, tile, head, begin, end), wide, self._workspace) as k,
                        widened(self._keys(x.v, tile, head, begin, end), wide, self._workspace) as v,
                    ):
                        _join(*flash(q[None, None], k[None, None], v[None, None], False, factor), row_max, total, acc)
                blocks = [*range(seen.begin, seen.plain_begin), *range(seen.plain_end, seen.end)]
            for block in blocks:
                # Keys that no row sees are left out: those that have not arrived, or padding, may be NaN.
                begin, end = max(block * block_n, seen.low), min((block + 1) * block_n, seen.high)
                scores = block_of_scores[:, : end - begin]
                with widened(self._keys(x.k, tile, head, begin, end), wide, self._workspace) as k:
                    torch.addmm(scores, q, k.t(), beta=0, alpha=factor, out=scores)  # beta 0: not read
                if softcap := plan.problem.softcap:
                    scores.div_(softcap).tanh_().mul_(softcap)
                if not seen.plain_begin <= block < seen.plain_end:
                    position = torch.arange(seen.first, seen.last + 1)[:, None] + seen.shift
                    key = torch.arange(begin, end)
                    scores.masked_fill_((key < position - seen.left) | (key > position + seen.right), float("-inf"))
                with widened(self._keys(x.v, tile, head, begin, end), wide, self._workspace) as v:
                    _add(scores, v, row_max, total, acc)
        acc.mul_(self._scale(x.scale_v, tile, head))
        out.copy_(torch.where(total > 0, acc / total, acc + total))  # 0 for rows without keys; NaN stays NaN
        if lse is not None:
            lse.copy_((row_max + total.log()).squeeze(1))

    def reduce(self, item: WorkItem, slots: Sequence[int]) -> None:
        """See `tilestream.launch.cpu.launch.Body`: a tile's keys are not split here."""
        raise AssertionError("a part of a tile, from a schedule that makes none")

    def poison(self, item: WorkItem) -> None:
        """See `tilestream.launch.cpu.launch.Body`."""
        tile = self._tiles.of(item)
        if tile is not None:
            out, lse = self._outputs(tile)
            out.fill_(float("nan"))
            if lse is not None:
                lse.fill_(float("nan"))

    # Views ------------------------------------------------------------------------------------------------------

    def _rows(self, tile: Tile) -> slice:
        s, positions = tile.sequence, self._plan.positions
        begin = tile.block * positions
        return slice(s.first_query + begin, s.first_query + min(s.queries, begin + positions))

    def _queries(self, tensor: torch.Tensor, tile: Tile) -> torch.Tensor:
        whole = tensor if self._plan.problem.varlen else tensor[tile.sequence.number]
        return whole[self._rows(tile), tile.head]

    def _outputs(self, tile: Tile) -> tuple[torch.Tensor, torch.Tensor | None]:
        lse = self._x.lse
        if lse is not None:
            rows = self._rows(tile)
            lse = lse[rows, tile.head] if self._plan.problem.varlen else lse[tile.sequence.number, tile.head, rows]
        return self._queries(self._x.out, tile), lse

    def _keys(self, tensor: torch.Tensor, tile: Tile, head: int, begin: int, end: int) -> torch.Tensor:
        found = self._find_keys(tensor, tile, head, begin, end)
        return found.clone(memory_format=torch.contiguous_format) if self._copies else found

    def _find_keys(self, tensor: torch.Tensor, tile: Tile, head: int, begin: int, end: int) -> torch.Tensor:
        s, page = tile.sequence, self._plan.problem.page_size
        if page:
            assert self._x.block_table is not None
            key = torch.arange(begin, end)
            pages = self._x.block_table[s.number].index_select(0, key // page)
            return tensor[pages, key % page, head]
        if self._plan.problem.tokens_k or tensor.dim() == 3:
            return tensor[s.first_key + begin : s.first_key + end, head]
        return tensor[s.number, begin:end, head]

    def _scale(self, scale: torch.Tensor | None, tile: Tile, head: int) -> float:
        # Rows of no sequence have no keys, so nothing is scaled.
        return 1.0 if scale is None or tile.sequence.number < 0 else float(scale[tile.sequence.number, head])


def _add(scores: torch.Tensor, v: torch.Tensor, row_max: torch.Tensor, total: torch.Tensor, acc: torch.Tensor) -> None:
    """A step of the online softmax, in place."""
    base = _rescale(scores.amax(1, keepdim=True), row_max, total, acc)
    torch.exp(scores.sub_(base), out=scores)
    total.add_(scores.sum(1, keepdim=True))
    acc.addmm_(scores, v)


def _join(out: torch.Tensor, lse: torch.Tensor, row_max: torch.Tensor, total: torch.Tensor, acc: torch.Tensor) -> None:
    """A step of the online softmax with keys whose attention and log-sum-exp are known; they count as one key."""
    score = lse.reshape(row_max.shape)
    weight = torch.exp(score - _rescale(score, row_max, total, acc))
    total.add_(weight)
    acc.addcmul_(out.reshape(acc.shape), weight)


def _rescale(new: torch.Tensor, row_max: torch.Tensor, total: torch.Tensor, acc: torch.Tensor) -> torch.Tensor:
    """Rescale the sums to the new row maximum, which is returned."""
    new = torch.maximum(row_max, new)
    # For a row without keys so far: exp(-inf - 0) instead of exp(-inf + inf).
    base = torch.where(new == float("-inf"), 0.0, new)
    factor = torch.exp(row_max - base)
    total.mul_(factor)
    acc.mul_(factor)
    row_max.copy_(new)
    return base
