"""Launches of the kernels of a mixture of experts over ranks, on the current stream."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilestream.core.integers import cdiv
from tilestream.kernels.portable import experts
from tilestream.launch.choices import Chosen
from tilestream.launch.gate import bounds_of
from tilestream.launch.launch import records_of
from tilestream.launch.layout import Layout
from tilestream.launch.portable.add import launch_keyed
from tilestream.launch.portable.rank_calls import SlotWords

#: Programs of `multiply_rows` at most.
_MOST_PROGRAMS = 1024
#: The most blocks of rows that a worker counts at once; and it has as many counts at least, if there are rows for them.
_BLOCKS = 4
#: Programs of `add_results`, whatever the number of tokens.
_ADDERS = 1024


class Local(NamedTuple):
    """What the kernels of one layout count and note, in memory of the rank's own."""

    done: torch.Tensor  # ``int32[world * E]``, zeros: rows that have landed, by rank and expert
    returned: torch.Tensor  # ``int32[world, 4]``, zeros: workers that have stored a source's results
    taken: torch.Tensor  # ``int32[world, 4]``: see `take_rows`
    ends: torch.Tensor  # ``int32[world, E]``, rows of 16 bytes: see `take_rows`
    slots: torch.Tensor  # ``int64[2 * world]``: where each rank's memory begins, then its signals


def push_rows(
    words: SlotWords, layout: Layout, local: Local, x: torch.Tensor, top_k: int, chosen: Chosen, pushers: int,
    own_workers: int,
) -> None:  # fmt: skip
    """Push the rows of ``x`` ``[T, width]`` to the ranks of their experts, with ``pushers`` to others than the own."""
    expected = x.shape[0] * top_k // layout.world  # rows for one rank

    def blocks(workers: int) -> int:
        return min(max(expected // (workers * experts.ROWS * _BLOCKS), 1), _BLOCKS)

    launch_keyed(
        experts.push_rows, (pushers + own_workers, 1, 1),
        (x, chosen.order, chosen.starts, local.done, words.control, words.places, local.slots),
        (words.rank, pushers, blocks(pushers), blocks(own_workers)),
        (
            layout.experts, top_k, layout.capacity, layout.width, layout.heads, layout.world,
            _lanes(layout.experts), experts.ROWS, min(experts.COLUMNS, _power(layout.width)),
        ),
        num_warps=experts.WARPS,
    )  # fmt: skip


def take_rows(words: SlotWords, layout: Layout, local: Local, source: int, seconds: float) -> None:
    """Wait for the rows of ``source``; note where those of each expert end."""
    allowed, op = bounds_of(seconds, words.op)
    launch_keyed(
        experts.take_rows, (1, 1, 1),
        (
            words.signals, words.control, words.places, local.slots, local.taken[source], local.ends[source],
            *records_of(words.signals.device),
        ),
        (allowed, op, words.key, words.rank, source),
        (layout.experts, layout.heads, layout.world, _lanes(layout.experts)), num_warps=1,
    )  # fmt: skip


def multiply_rows(gate: torch.Tensor, up: torch.Tensor, ends: torch.Tensor) -> None:
    """``gate *= up``, of the rows up to the last of ``ends``."""
    if count := gate.numel():
        grid = min(cdiv(count, experts.BLOCK), _MOST_PROGRAMS), 1, 1
        launch_keyed(
            experts.multiply_rows, grid, (gate, up, ends), (), (len(ends), gate.shape[1], experts.BLOCK), num_warps=8
        )


def push_results(
    words: SlotWords, layout: Layout, local: Local, source: int, results: torch.Tensor, workers: int
) -> None:
    """Push the ``results`` of the rows of ``source`` to that rank, with so many workers."""
    launch_keyed(
        experts.push_results, (workers, 1, 1),
        (results, local.taken[source], local.ends[source], local.returned[source], local.slots), (words.rank, source),
        (layout.experts, layout.width, layout.results, layout.world, experts.PUSHED), num_warps=experts.WARPS,
    )  # fmt: skip


def take_results(words: SlotWords, layout: Layout, seconds: float) -> None:
    """Wait for the results of all ranks."""
    allowed, op = bounds_of(seconds, words.op)
    launch_keyed(
        experts.take_results, (1, 1, 1), (*words[:3], *records_of(words.signals.device)),
        (allowed, op, words.key, words.rank), (layout.experts, layout.world, _lanes(layout.world)), num_warps=1,
    )  # fmt: skip


def add_results(
    words: SlotWords, results: torch.Tensor, weights: torch.Tensor, chosen: Chosen, out: torch.Tensor
) -> None:
    """``out[token]``: the sum of its weighted results. ``weights``: ``[T, top_k]``, contiguous."""
    tokens, width = out.shape
    if tokens:
        launch_keyed(
            experts.add_results, (_ADDERS, 1, 1),
            (results, weights, chosen.place, chosen.starts, words.control, out), (tokens,),
            (len(chosen.starts) - 1, width, weights.shape[1], experts.ADDED), enable_fp_fusion=False,
        )  # fmt: skip


def _lanes(count: int) -> int:
    """Elements of a block of so many words, at least one a thread of a warp.

    A word that two threads read might change between their reads, and they must not decide differently.
    """
    return max(32, _power(count))


def _power(count: int) -> int:
    """The least power of two that is not less."""
    return 1 << (count - 1).bit_length()
