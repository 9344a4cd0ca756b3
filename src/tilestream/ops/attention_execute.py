"""From canonical operands of attention on the CPU to a launch."""

from __future__ import annotations

from itertools import pairwise

import torch

from tilestream.arrival.flat import DEFAULT_DEADLINE, Awaited, FlatArrival
from tilestream.core.gate import RowGate
from tilestream.core.grid import WorkItem
from tilestream.core.operands import AttentionOperands
from tilestream.kernels.cpu.attention import AttentionBody, SequenceRows, Tiles, WholeBody, flash_calls, seen_by
from tilestream.launch.observe import observation
from tilestream.ops.attention_operands import Settings, problem_of
from tilestream.ops.execute import launch
from tilestream.plan.attention_plan import AttentionPlan
from tilestream.plan.attention_planner import plan_attention


def execute(
    x: AttentionOperands, s: Settings, keys: FlatArrival | None, deadline: float = DEFAULT_DEADLINE, limit: int = 0
) -> None:
    """Run attention on the CPU; returns when the outputs are complete. Parameters as of `attention_gpu.run`.

    Raises
    ------
    ValueError
        If lengths, pages or extents do not fit. Raised before anything is computed.
    ArrivalTimeout
        If a chunk did not arrive in time. Tiles that were not computed are NaN.
    """
    plan = plan_attention(
        problem_of(x, s, keys), s.workers or None, s.schedule, torch.get_num_threads(), limit=limit,
        splits=s.splits or None,
    )  # fmt: skip
    if plan.variant == "torch":
        p = plan.problem
        calls = flash_calls(x, p.causal and (p.alignment == "top_left" or p.seqlen_q > 1))  # one row sees all keys
        if (seen := observation()) is not None:
            seen.launches += calls
        launch("attention", plan, None, lambda scratch: WholeBody(x, calls), None)
        return
    tiles = Tiles(plan, sequences_of(x, s))
    gate = None if keys is None else _gate(plan, tiles)
    awaited = Awaited.of(keys, None, deadline, "attention", x.q.device)
    launch("attention", plan, gate, lambda scratch: AttentionBody(plan, x, tiles, scratch), awaited)


def _gate(plan: AttentionPlan, tiles: Tiles) -> RowGate:
    """The gate of a plan: a tile waits for the chunks of the keys that its rows see."""
    assert plan.problem.keys is not None
    packed = plan.problem.tokens_k > 0

    def rows(item: WorkItem) -> tuple[int, int]:
        tile = tiles.of(item)
        if tile is None or not tile.sequence.keys:
            return 0, 0
        s, seen = tile.sequence, seen_by(plan, tile, plan.block[1])
        base = s.first_key if packed else s.number * plan.problem.seqlen_k
        return base + seen.low, base + seen.high

    return RowGate(plan.problem.keys.chunks, rows)


def sequences_of(x: AttentionOperands, s: Settings) -> list[SequenceRows]:
    """The rows of each sequence; for packed queries, last the rows that belong to no sequence.

    Raises
    ------
    ValueError
        If cumulative lengths fall or exceed their tensors; if a page number is out of range.
    """
    batch, longest = x.batch, x.keys_of_sequence
    queries = _packed("cu_seqlens_q", x.cu_seqlens_q, x.q, "q", s.max_seqlen_q)
    keys = _packed("cu_seqlens_k", x.cu_seqlens_k, x.k, "k", s.max_seqlen_k)
    lengths = [longest] * batch if x.seqlens_k is None else x.seqlens_k.tolist()
    found: list[SequenceRows] = []
    for i in range(batch):
        if not 0 <= lengths[i] <= longest:
            raise ValueError(f"attention: seqlens_k[{i}] is {lengths[i]}; a sequence has from 0 to {longest} keys here")
        first_query, rows = queries[i] if queries is not None else (0, x.q.shape[1])
        first_key, length = keys[i] if keys is not None else (0, lengths[i])
        found.append(SequenceRows(i, first_query, rows, first_key, length))
    if x.block_table is not None:
        _check_pages(x, lengths)
    if queries is not None:
        past = sum(queries[-1]) if queries else 0
        found.append(SequenceRows(-1, past, x.q.shape[0] - past, 0, 0))
    return found


def _packed(
    name: str, cumulative: torch.Tensor | None, tensor: torch.Tensor, of: str, most: int
) -> list[tuple[int, int]] | None:
    if cumulative is None:
        return None
    bounds: list[int] = cumulative.tolist()
    if bounds[0] != 0:
        raise ValueError(f"attention: {name}[0] is {bounds[0]}; the first sequence begins at row 0")
    if bounds[-1] > tensor.shape[0]:
        raise ValueError(f"attention: {name}[-1] is {bounds[-1]}; {of} has {tensor.shape[0]} rows")
    for i, (begin, end) in enumerate(pairwise(bounds)):
        if end < begin:
            raise ValueError(f"attention: {name}[{i + 1}] is {end}, after {begin}; cumulative lengths do not fall")
        if most and end - begin > most:
            raise ValueError(f"attention: max_seqlen_{of}={most}; sequence {i} has {end - begin} rows: {name} says so")
    return [(begin, end - begin) for begin, end in pairwise(bounds)]


def _check_pages(x: AttentionOperands, lengths: list[int]) -> None:
    assert x.block_table is not None
    page = x.k.shape[1]
    for i, length in enumerate(lengths):
        used = x.block_table[i, : -(-length // page)]
        if used.numel() and (int(used.min()) < 0 or int(used.max()) >= x.k.shape[0]):
            raise ValueError(
                f"attention: block_table[{i}] names pages {int(used.min())} to {int(used.max())}; there are "
                f"{x.k.shape[0]}, counted from 0"
            )
