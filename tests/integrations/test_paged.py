"""Attention of an engine's batch to its pages, as vLLM and SGLang lay them out: without the engines, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from error_rule import errors, passes
from tilestream.integrations import paged

HEADS, KV_HEADS, PAGES = 8, 2, 40
QUERIES, KEYS = (70, 130, 1, 16), (200, 130, 33, 48)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def pools(how, page, dim, dtype):
    """Keys and values ``[P, page, Hkv, D]``: halves of vLLM's combined pages, or SGLang's slots; full of NaN."""
    if how == "slots":
        slots = torch.full((2, PAGES * page, KV_HEADS, dim), float("nan"), dtype=dtype)
        return tuple(x.unflatten(0, (PAGES, page)) for x in slots)
    heads_first = how == "heads first"
    shape = (PAGES, KV_HEADS, page, 2 * dim) if heads_first else (PAGES, page, KV_HEADS, 2 * dim)
    cache = torch.full(shape, float("nan"), dtype=dtype)
    return (cache.transpose(1, 2) if heads_first else cache).split(dim, -1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("how", "page", "dim", "left"),
    [("heads first", 16, 64, -1), ("rows first", 64, 64, 20), ("slots", 16, 32, -1), ("slots", 1, 32, 7)],
)
def test_a_mixed_batch_in_an_engines_pages(how, page, dim, left, device):
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    pages = PAGES if page > 1 else 1000
    k, v = (
        pools(how, page, dim, dtype) if page > 1 else torch.full((2, pages, 1, KV_HEADS, dim), float("nan")).to(dtype)
    )
    q = torch.randn(sum(QUERIES) + 5, 3 * HEADS * dim).to(dtype)[:, : HEADS * dim].view(-1, HEADS, dim)  # of a qkv
    table, free = torch.zeros(len(KEYS), 512 // page, dtype=torch.int32), torch.randperm(pages)
    exact, peer, first = [], [], 0
    for i, (n, rows) in enumerate(zip(KEYS, QUERIES, strict=True)):
        used = -(-n // page)
        table[i, :used], free = free[:used], free[used:]
        keys, values = (torch.randn(n, KV_HEADS, dim).to(dtype) for _ in range(2))
        for place in range(n):
            k[table[i, place // page], place % page], v[table[i, place // page], place % page] = (
                keys[place],
                values[place],
            )
        for found, wide in ((exact, torch.float64), (peer, dtype)):
            x, y, z = q[first : first + rows].to(wide), *(t.to(wide).repeat_interleave(4, 1) for t in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", x, y) * dim**-0.5
            behind = torch.arange(n) - torch.arange(n - rows, n)[:, None]
            seen = (behind <= 0) & (behind >= -left if left >= 0 else True)
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            found.append(torch.einsum("hqk,khd->qhd", weights, z))
        first += rows
    q, k, v, table = (x.to(device) for x in (q, k, v, table))
    starts = torch.tensor([0, *QUERIES], device=device).cumsum(0).int()
    out = torch.full(q.shape, float("nan"), dtype=dtype, device=device)
    assert not paged.pages_refused(q, k, v)
    paged.attend(
        q, k, v, table, starts=starts, lengths=torch.tensor(KEYS, device=device).int(), most_queries=max(QUERIES),
        most_keys=max(KEYS), scale=dim**-0.5, left=left, out=out,
    )  # fmt: skip
    found, exact, peer = out[:first].cpu(), torch.cat(exact), torch.cat(peer)
    assert passes(found, exact, peer), (errors(found, exact), errors(peer, exact))


def test_batches_of_other_lengths_have_few_plans(monkeypatch):
    asked = []

    def run(*args, **options):
        asked.append((options["max_seqlen_q"], options["block_table"].shape[1]))

    q, k, table = torch.zeros(9, HEADS, 32), torch.zeros(PAGES, 16, KV_HEADS, 32), torch.zeros(1, 64, dtype=torch.int32)
    for queries, keys in ((1, 1), (9, 17), (300, 500), (511, 512), (513, 9999)):
        paged.attend(
            q, k, k, table, starts=table[0, :2], lengths=table[0, :1], most_queries=queries, most_keys=keys, scale=1.0,
            run=run,
        )  # fmt: skip
    assert asked == [(1, 1), (16, 2), (512, 32), (512, 32), (1024, 64)]


def test_heads_that_are_not_computed_here():
    assert paged.heads_refused(8, 2, 64, 64) == ""
    assert paged.heads_refused(8, 2, 64, 260).startswith("head dim 260; here it is a multiple of 8, at most 256")
    assert paged.heads_refused(8, 3, 64) == "8 query heads on 3 heads of keys"


@pytest.mark.gpu
def test_what_a_graph_captures_is_the_engines():
    q, k = torch.zeros(4, HEADS, 64, device="cuda"), torch.zeros(PAGES, 16, KV_HEADS, 64, device="cuda")
    assert not paged.pages_refused(q, k, k)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        why = paged.pages_refused(q, k, k)
    assert why.startswith("a CUDA graph is being captured")
