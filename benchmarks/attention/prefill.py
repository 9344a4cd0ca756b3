"""Calls of `tilestream.attention`, dense and in lists, beside the peers; the host's part; arrival; shares."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilestream as ts
from benchmarks.attention.bench import (
    LENGTHS,
    SHAPES,
    Calls,
    Run,
    Shape,
    beside_cudnn,
    cudnn,
    operands_of,
    refuse_wrong,
)
from benchmarks.core.records import Row
from benchmarks.core.timing import host_microseconds

#: SMs that a neighbour holds.
HELD = 16


def dense(run: Run, shapes: Sequence[Shape] = tuple(SHAPES)) -> None:
    """Ours, by the plan's own choice, beside the peers."""

    def calls(shape: Shape) -> Calls:
        q, k, v = operands_of(shape)
        peers: Calls = {"cudnn": lambda: cudnn(q, k, v, shape.causal)}
        if run.flash is not None:
            peers["fa4"] = lambda: run.flash(q, k, v, shape.causal)  # type: ignore[misc]
        return {**peers, "ts": lambda: ts.attention(q, k, v, causal=shape.causal)}

    run.measure("", shapes, calls)


def heads(run: Run) -> None:
    """GQA 8:1 beside as many K/V heads as query heads."""
    for kv in (2, 16):
        shapes = [Shape(128, 16, length, causal, kv) for length in LENGTHS[1::2] for causal in (True, False)]
        run.measure(f"heads 16:{kv}", shapes, beside_cudnn)


def host(run: Run) -> None:
    """The host's microseconds of a call like the one before, beside torch's."""
    shape = Shape(128, 4, 128, True)
    q, k, v = (torch.randn(1, shape.length, shape.heads, shape.dim, device="cuda", dtype=torch.bfloat16)
               for _ in range(3))  # fmt: skip
    swapped = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    bounds = torch.tensor([0, 50, shape.length], device="cuda", dtype=torch.int32)
    packed = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 128, "max_seqlen_k": 128}
    out = torch.empty_like(q)

    def torchs() -> torch.Tensor:
        return F.scaled_dot_product_attention(*swapped, is_causal=True)

    def cudnns() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*swapped, is_causal=True)

    calls: dict[str, Callable[[], Any]] = {
        "sdpa": torchs,
        "sdpa, cudnn asked for": cudnns,
        "ts": lambda: ts.attention(q, k, v, causal=True),
        "ts, bhsd": lambda: ts.attention(*swapped, causal=True, layout="bhsd"),
        "ts, log-sum-exp": lambda: ts.attention(q, k, v, causal=True, return_lse=True),
        "ts, packed": lambda: ts.attention(q[0], k[0], v[0], causal=True, **packed),
        "ts, out=": lambda: ts.attention(q, k, v, causal=True, out=out),
    }
    us, _ = host_microseconds(calls, batches=30)
    run.attention_record().add({"name": "host", "us": us})
    print("host, us:", us, flush=True)


def arrival(run: Run) -> None:
    """A chunk of a prefill whose cache comes from the host's memory: milliseconds of the copy, of attention, of both.

    By two clocks: ``ms``, the host's, calls back to back; ``gpu_ms``, the GPU's, the host ahead. ``over_larger`` is the
    time of both together in units of the longer of the two, by each clock; 1 is the limit.
    """
    cases = ((4096, 32768, 8), (4096, 32768, 32), (2048, 65536, 32), (8192, 16384, 16))
    if run.dry:
        cases = ((32, 256, 4), (64, 128, 2))
    items = {f"arrival {rows} x {keys} in {count} chunks": (rows, keys, count) for rows, keys, count in cases}
    run.each(run.attention_record(), items, lambda name, case: arrival_row(run, name, *case))


def arrival_row(run: Run, name: str, rows: int, keys: int, count: int) -> Row:
    device, (batch, heads_q, heads_kv, dim) = run.clock.device, ((1, 4, 2, 16) if run.dry else (1, 32, 8, 128))
    q = torch.randn(batch, rows, heads_q, dim, device=device, dtype=torch.bfloat16)
    kept = [torch.randn(batch, keys, heads_kv, dim, dtype=torch.bfloat16) for _ in range(2)]
    kept = kept if run.dry else [x.pin_memory() for x in kept]
    k, v = (x.to(device, copy=True) for x in kept)
    right = ts.attention(q, k, v, causal=True)
    coming = ts.Arrival.uniform(keys // count, count, device=device)
    side = None if run.dry else torch.cuda.Stream()

    def copy() -> None:
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        with contextlib.nullcontext() if side is None else torch.cuda.stream(side):
            for chunk in range(count):
                part = slice(chunk * keys // count, (chunk + 1) * keys // count)
                for x, y in zip((k, v), kept, strict=True):
                    x[:, part].copy_(y[:, part], non_blocking=True)
                coming.signal(chunk)

    def join() -> None:
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)

    def joined() -> None:
        copy()
        join()

    def attend() -> torch.Tensor:
        return ts.attention(q, k, v, causal=True)

    def both(splits: int | None = None) -> torch.Tensor:
        coming.advance()
        copy()
        out = ts.attention(q, k, v, causal=True, arrival=coming, deadline=10.0, splits=splits)
        join()
        return out

    def in_turn() -> torch.Tensor:
        joined()
        return attend()

    coming.advance()
    for x in (k, v):
        x.fill_(math.nan)
    both()
    refuse_wrong(both(), right)
    ts.check()
    clocks = run.both_clocks({
        "copy": joined, "attention": attend, "one after the other": in_turn, "overlapped": both,
        "overlapped, tiles whole": functools.partial(both, splits=1),
    })  # fmt: skip
    ts.check()
    over = {clock: round(ms["overlapped"] / max(ms["copy"], ms["attention"]), 3) for clock, ms in clocks.items()}
    plan = ts.attention_plan(
        rows, keys, heads_q=heads_q, heads_kv=heads_kv, head_dim=dim, causal=True, arrival=coming, device=device
    )
    return {"name": name, **clocks, "over_larger": over, "backend": plan.backend}


def neighbour(run: Run) -> None:
    """Beside a kernel that holds 16 SMs: the share of the idle GPU's rate that is left, of what is proportional."""
    from tilestream.runtime.properties import cuda_properties
    from tilestream_tools.sweep.contention import taker

    device = cuda_properties(torch.cuda.current_device())
    fair = (device.workers - HELD) / device.workers
    shapes = (Shape(128, 16, 2048, True), Shape(128, 16, 8192, True), Shape(64, 32, 8192, False))
    items = {f"neighbour {shape.name}": shape for shape in shapes}

    def measure(name: str, shape: Shape) -> Row:
        calls = beside_cudnn(shape)
        idle = run.time(calls)
        with taker("neighbour", device).taking(HELD):
            beside = run.time(calls)
        shares = {what: round(idle[what] / beside[what] / fair, 3) for what in calls}
        return {"name": name, "share": shares, "held": HELD, **shape._asdict()}

    run.each(run.attention_record(), items, measure)


def split(run: Run) -> None:
    """Few queries over many keys: with keys in shares, with none, and cuDNN; GB/s of K and V."""
    cases = ((1, 1, 32768), (1, 1, 131072), (4, 1, 16384), (16, 1, 8192), (1, 64, 32768), (1, 256, 32768),
             (2, 128, 8192))  # fmt: skip
    items = {f"split {batch} x {rows} queries, {keys} keys": (batch, rows, keys) for batch, rows, keys in cases}
    run.each(run.attention_record(), items, lambda name, case: split_row(run, name, *case))


def split_row(run: Run, name: str, batch: int, rows: int, keys: int) -> Row:
    heads_q, heads_kv, dim = 32, 8, 128
    q = torch.randn(batch, rows, heads_q, dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, keys, heads_kv, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    plan = ts.attention_plan(
        rows, keys, batch=batch, heads_q=heads_q, heads_kv=heads_kv, head_dim=dim, device="cuda"
    )  # fmt: skip
    right = ts.attention(q, k, v, splits=1)
    calls: Calls = {
        "cudnn": lambda: cudnn(q, k, v, False),
        "ts": lambda: ts.attention(q, k, v),
        "ts, not split": lambda: ts.attention(q, k, v, splits=1),
        "ts, half the shares": lambda: ts.attention(q, k, v, splits=max(2, plan.shares // 2)),
        "ts, twice the shares": lambda: ts.attention(q, k, v, splits=min(128, 2 * plan.shares)),
    }
    kept = run.right(run.attention_record(), name, calls, right)
    us = {what: round(1e3 * ms, 1) for what, ms in run.time(kept).items()}
    rate = round(4 * batch * keys * heads_kv * dim / us["ts"] * 1e-3)
    return {"name": name, "us": us, "shares": plan.shares, "GB/s": rate}


def mix() -> list[int]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.exp(6.5 + 1.2 * torch.randn(64, generator=generator)).long().clamp(1, 8192)
    return [int(length) for length in lengths]


def lists(run: Run) -> None:
    """Packed sequences, and the same keys in pages, beside dense calls of the same sequences one by one."""
    lengths, dim, count = mix(), 128, 16
    total = sum(lengths)
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    q, k, v = (torch.randn(total, count, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    operations = sum(2 * count * dim * length * (length + 1) for length in lengths)
    alone = torch.cat([
        ts.attention(*(x[None, low : low + n] for x in (q, k, v)), causal=True)[0]
        for low, n in zip(bounds.tolist(), lengths, strict=False)
    ])  # fmt: skip
    how = {"causal": True, "cu_seqlens_q": bounds, "max_seqlen_q": max(lengths)}
    calls: Calls = {"packed": lambda: ts.attention(q, k, v, cu_seqlens_k=bounds, max_seqlen_k=max(lengths), **how)}
    sizes = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    for page in (16, 64):
        table, pages = in_pages(lengths, page)
        kept = [torch.zeros(pages, page, count, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        for i, (low, n) in enumerate(zip(bounds.tolist(), lengths, strict=False)):
            at = torch.arange(n, device="cuda")
            for x, y in zip(kept, (k, v), strict=True):
                x[table[i, at // page].long(), at % page] = y[low : low + n]
        calls[f"pages of {page}"] = lambda x=kept, t=table: ts.attention(q, *x, block_table=t, seqlens_k=sizes, **how)
    record = run.attention_record()

    run.rows(record, ["lists, causal"],
             lambda name: run.row(record, name, operations, calls, alone.float(), lengths=lengths))  # fmt: skip
    shapes = [Shape(dim, count, length, True) for length in (512, 1024, 2048, like(lengths))]
    items = {f"lists dense S{shape.length}": shape for shape in shapes}

    def dense_row(name: str, shape: Shape) -> Row:
        return run.row(record, name, shape.operations, {"ts": beside_cudnn(shape)["ts"]}, **shape._asdict())

    run.each(record, items, dense_row)


def like(lengths: Sequence[int]) -> int:
    """The length of equal sequences with as many operations a token as these, in whole blocks of 64."""
    return max(64, round(sum(x * x for x in lengths) / sum(lengths) / 64) * 64)


def in_pages(lengths: list[int], page: int) -> tuple[torch.Tensor, int]:
    """A table of pages in random order, and the number of pages."""
    needed = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(needed), device="cuda", dtype=torch.int32)
    table = torch.zeros(len(lengths), max(needed), dtype=torch.int32, device="cuda")
    for i, part in enumerate(torch.split(order, needed)):
        table[i, : len(part)] = part
    return table, sum(needed)
