"""Attention prefill on a GPU, beside cuDNN (through SDPA) and FlashAttention 4 where it is installed.

``python benchmarks/gpu_attention.py [section,section] [folder] [seconds]``

Sections: ``dense`` (16k tokens, S = 512 to 16k, D = 64, 128, 256, causal and full), ``lists`` (a log-normal mix of 64
sequences; pages of 16 and 64; dense calls of equal lengths), ``heads`` (GQA 8:1 beside as many K/V heads as query
heads), ``host`` (the host's part of a call), ``arrival`` (keys that come from pinned memory while the kernel runs),
``neighbour`` (16 SMs held by another kernel), ``split`` (few queries over many keys). What the plan chooses from is
timed by `gpu_attention_tiles`.
``python tests/gpu/precompile_attention.py benchmark`` before it saves compiling one by one.

Calls are interleaved, L2 is flushed before each, medians; an answer is checked before it is timed, and a peer that is
missing or fails is named. What has not been measured when ``seconds`` are over is left out, and said to be.
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilestream as ts
from harness import GPU_PEAK, RESULTS, GpuRecord
from tilestream.core.operands import Operands
from tilestream.launch.attention_arguments import AttentionLayout
from tilestream.plan.attention_problem import AttentionProblem

TOKENS = 16384
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
DIMS = ((128, 16), (64, 32), (256, 8))
#: Of each call; the first ones are not counted.
ROUNDS, WARMUP = 11, 2
#: Cycles that the GPU sleeps at first while a call is issued: its host time is no part of these figures.
_SLEEP = 1_000_000
#: How often a sleep that was too short is doubled.
_DOUBLINGS = 8
#: Seconds of a cycle, at least: an H100's highest clock.
_CYCLE = 1 / 1.98e9
#: Calls between two looks at the host's clock, and how often.
BATCH, BATCHES = 64, 30


class Shape(NamedTuple):
    """A dense call: columns and heads of 16k tokens, in sequences of a length."""

    dim: int
    heads: int
    length: int
    causal: bool
    heads_kv: int = 0

    @property
    def batch(self) -> int:
        """Sequences."""
        return TOKENS // self.length

    @property
    def operations(self) -> float:
        """Causal counted half."""
        return 4 * self.batch * self.heads * self.length**2 * self.dim * (0.5 if self.causal else 1.0)


SHAPES = [Shape(dim, heads, length, causal) for dim, heads in DIMS for causal in (True, False) for length in LENGTHS]


def problem_of_shape(shape: Shape) -> tuple[AttentionProblem, AttentionLayout]:
    """As the plan, and the launch, see it."""
    kv = shape.heads_kv or shape.heads
    problem = AttentionProblem(
        shape.batch, shape.heads, kv, shape.length, shape.length, shape.dim, causal=shape.causal
    )  # fmt: skip
    lies = (shape.length * shape.heads * shape.dim, shape.heads * shape.dim, shape.dim)
    lies_kv = (shape.length * kv * shape.dim, kv * shape.dim, shape.dim)
    return problem, AttentionLayout(lies, lies_kv, lies_kv, lies)


class Timer:
    """Milliseconds of calls, interleaved, after a flush of L2; the launch is hidden under a sleep of the GPU."""

    def __init__(self) -> None:
        self._flush = torch.empty(2**26, dtype=torch.int32, device="cuda")
        self._sleep = _SLEEP

    def __call__(self, calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
        """The median of each."""
        found: dict[str, list[float]] = {name: [] for name in calls}
        for i in range(WARMUP + ROUNDS):
            for name, call in calls.items():
                milliseconds = self._once(call)
                if i >= WARMUP:
                    found[name].append(milliseconds)
        return {name: statistics.median(times) for name, times in found.items()}

    def _once(self, call: Callable[[], Any]) -> float:
        """Once more, with a longer sleep, if the GPU may have been awake before all was issued."""
        for _ in range(_DOUBLINGS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            torch.cuda.current_stream().synchronize()  # not the device: a neighbour may be at work
            since = time.perf_counter()
            torch.cuda._sleep(self._sleep)
            begin.record()
            call()
            end.record()
            issued = time.perf_counter() - since
            end.synchronize()
            if issued < 0.8 * self._sleep * _CYCLE:
                return begin.elapsed_time(end)
            self._sleep *= 2
        raise RuntimeError(f"a call took the host {issued:.3g} s to issue, longer than the GPU can be made to sleep")


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """``[B, S, H, D]``, as ours."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=k.shape[2] != q.shape[2]
        )
    return out.transpose(1, 2)


def launched(launch: Callable[[Operands], None], x: Operands) -> Callable[[], torch.Tensor]:
    """A call of a launch that is prepared, on operands that have an output."""

    def call() -> torch.Tensor:
        launch(x)
        return x.out

    return call


def flash() -> Callable[..., Any] | None:
    """FlashAttention 4's forward, where it is installed."""
    try:
        from flash_attn.cute.interface import flash_attn_func
    except ImportError:
        return None
    return lambda q, k, v, causal: flash_attn_func(q, k, v, causal=causal)[0]


class Run:
    """One run: the record, the time that is left, the peers."""

    def __init__(self, folder: Path, seconds: float, name: str) -> None:
        self.record = GpuRecord(name, folder, peers={"fa4": flash() is not None})
        self.end = time.monotonic() + seconds
        self.time, self.flash = Timer(), flash()

    def left(self, name: str) -> bool:
        """Whether there is time for a row; else it is written down as missing."""
        if time.monotonic() < self.end:
            return True
        self.record.data["missing"].append(name)
        return False

    def row(
        self, name: str, operations: float, calls: dict[str, Callable[[], torch.Tensor]],
        reference: torch.Tensor | None = None, **more: Any,
    ) -> None:  # fmt: skip
        """Check the calls with one another, time them, write them down."""
        kept: dict[str, Callable[[], torch.Tensor]] = {}
        for what, call in calls.items():
            try:
                out = call()
                torch.cuda.synchronize()
                ts.check()
            except Exception as error:
                self.record.data["failures"].append(f"{name} {what}: {type(error).__name__}: {error}"[:300])
                continue
            reference = out.float() if reference is None else reference
            error = ((out.float() - reference).norm() / reference.norm()).item()
            if not error < 1e-2:  # bf16 of both, and their orders of adding up
                self.record.data["failures"].append(f"{name} {what}: differs by {error:.3g}")
                continue
            kept[what] = call
        times = self.time(kept)
        rates = {what: round(operations / ms * 1e-9, 1) for what, ms in times.items()}
        for what in [what for what, rate in rates.items() if rate > GPU_PEAK]:
            self.record.data["failures"].append(f"{name} {what}: {rates.pop(what)} TFLOP/s is above the peak")
        self.record.rows.append({"name": name, "tflops": rates, **more})
        self.record.write()
        print(f"{name}: " + "  ".join(f"{what} {rate:.0f}" for what, rate in rates.items()), flush=True)


def operands_of(shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fresh numbers."""
    kv = shape.heads_kv or shape.heads
    return tuple(  # type: ignore[return-value]
        torch.randn(shape.batch, shape.length, heads, shape.dim, device="cuda", dtype=torch.bfloat16)
        for heads in (shape.heads, kv, kv)
    )


def dense(run: Run, shapes: list[Shape] = SHAPES) -> None:
    """Ours, as the plan has it, beside the peers."""
    for shape in shapes:
        name = f"D{shape.dim} {'causal' if shape.causal else 'full'} S{shape.length}"
        if not run.left(name):
            continue
        q, k, v = operands_of(shape)
        calls = {"cudnn": lambda q=q, k=k, v=v, c=shape.causal: cudnn(q, k, v, c)}
        if run.flash is not None:
            calls["fa4"] = lambda q=q, k=k, v=v, c=shape.causal: run.flash(q, k, v, c)  # type: ignore[misc]
        calls["ts"] = lambda q=q, k=k, v=v, c=shape.causal: ts.attention(q, k, v, causal=c)
        run.row(name, shape.operations, calls, **shape._asdict())


def heads(run: Run) -> None:
    """GQA 8:1 beside as many K/V heads as query heads."""
    for length, causal, kv in ((length, c, kv) for length in LENGTHS[1::2] for c in (True, False) for kv in (2, 16)):
        shape = Shape(128, 16, length, causal, kv)
        name = f"heads 16:{kv} {'causal' if causal else 'full'} S{length}"
        if run.left(name):
            q, k, v = operands_of(shape)
            calls = {
                "cudnn": lambda q=q, k=k, v=v, c=causal: cudnn(q, k, v, c),
                "ts": lambda q=q, k=k, v=v, c=causal: ts.attention(q, k, v, causal=c),
            }
            run.row(name, shape.operations, calls, **shape._asdict())


def host(run: Run) -> None:
    """The host's microseconds of a call like the one before, beside torch's: batches in turn, no wait inside one."""
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
    for call in calls.values():
        for _ in range(20):
            call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(BATCHES):
        for name, call in calls.items():
            torch.cuda.synchronize()
            since = time.perf_counter()
            for _ in range(BATCH):
                call()
            samples[name].append((time.perf_counter() - since) / BATCH)
    us = {name: round(1e6 * statistics.median(seconds), 2) for name, seconds in samples.items()}
    run.record.rows.append({"name": "host", "us": us})
    run.record.write()
    print("host, us: " + "  ".join(f"{name} {value}" for name, value in us.items()), flush=True)


def arrival(run: Run) -> None:
    """A chunk of a prefill whose cache comes from the host's memory: milliseconds of the copy, of attention, of both.

    ``over the larger``: what both take together, in units of the longer of the two; 1 is all that can be had.
    """
    batch, heads_q, heads_kv, dim = 1, 32, 8, 128
    for rows, keys, count in ((4096, 32768, 8), (4096, 32768, 32), (2048, 65536, 32), (8192, 16384, 16)):
        name = f"arrival {rows} x {keys} in {count} chunks"
        if not run.left(name):
            continue
        q = torch.randn(batch, rows, heads_q, dim, device="cuda", dtype=torch.bfloat16)
        kept = [torch.randn(batch, keys, heads_kv, dim, dtype=torch.bfloat16).pin_memory() for _ in range(2)]
        k, v = (x.cuda() for x in kept)
        right = ts.attention(q, k, v, causal=True)
        coming = ts.Arrival.uniform(keys // count, count, device="cuda")
        side = torch.cuda.Stream()

        def copy(k=k, v=v, kept=kept, side=side, coming=coming, count=count, keys=keys) -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for chunk in range(count):
                    part = slice(chunk * keys // count, (chunk + 1) * keys // count)
                    for x, y in zip((k, v), kept, strict=True):
                        x[:, part].copy_(y[:, part], non_blocking=True)
                    coming.signal(chunk)

        def joined(copy=copy, side=side) -> None:
            copy()
            torch.cuda.current_stream().wait_stream(side)

        def attend(q=q, k=k, v=v) -> torch.Tensor:
            return ts.attention(q, k, v, causal=True)

        def both(q=q, k=k, v=v, copy=copy, coming=coming, side=side, splits=None) -> torch.Tensor:
            coming.advance()
            copy()
            out = ts.attention(q, k, v, causal=True, arrival=coming, deadline=10.0, splits=splits)
            torch.cuda.current_stream().wait_stream(side)
            return out

        def in_turn(joined=joined, attend=attend) -> torch.Tensor:
            joined()
            return attend()

        coming.advance()
        for x in (k, v):
            x.fill_(math.nan)
        both()
        error = ((both().float() - right.float()).norm() / right.float().norm()).item()
        ts.check()
        if not error < 1e-2:
            run.record.data["failures"].append(f"{name}: differs by {error:.3g}")
            continue
        ms = run.time({
            "copy": joined, "attention": attend, "one after the other": in_turn, "overlapped": both,
            "overlapped, tiles whole": functools.partial(both, splits=1),
        })  # fmt: skip
        over = ms["overlapped"] / max(ms["copy"], ms["attention"])
        found = {what: round(value, 3) for what, value in ms.items()} | {"over the larger": round(over, 3)}
        run.record.rows.append({"name": name, "ms": found, "backend": ts.attention_plan(
            rows, keys, heads_q=heads_q, heads_kv=heads_kv, head_dim=dim, causal=True, arrival=coming, device="cuda"
        ).backend})  # fmt: skip
        run.record.write()
        print(f"{name}: " + "  ".join(f"{what} {value}" for what, value in found.items()), flush=True)


def neighbour(run: Run) -> None:
    """Beside a kernel that holds 16 SMs: the share of the idle GPU's rate that is left, of what is proportional."""
    from tilestream.runtime.properties import cuda_properties
    from tilestream_tools.sweep.contention import taker

    held, device = 16, cuda_properties(torch.cuda.current_device())
    for shape in (Shape(128, 16, 2048, True), Shape(128, 16, 8192, True), Shape(64, 32, 8192, False)):
        name = f"neighbour D{shape.dim} {'causal' if shape.causal else 'full'} S{shape.length}"
        if not run.left(name):
            continue
        q, k, v = operands_of(shape)
        calls = {
            "cudnn": lambda q=q, k=k, v=v, c=shape.causal: cudnn(q, k, v, c),
            "ts": lambda q=q, k=k, v=v, c=shape.causal: ts.attention(q, k, v, causal=c),
        }
        idle = run.time(calls)
        with taker("neighbour", device).taking(held):
            beside = run.time(calls)
        fair = (device.workers - held) / device.workers
        shares = {what: round(idle[what] / beside[what] / fair, 3) for what in calls}
        run.record.rows.append({"name": name, "share": shares, "held": held, **shape._asdict()})
        run.record.write()
        print(f"{name}: " + "  ".join(f"{what} {share}" for what, share in shares.items()), flush=True)


def split(run: Run) -> None:
    """Few queries over many keys: with keys in shares, with none, and cuDNN; GB/s of K and V."""
    heads_q, heads_kv, dim = 32, 8, 128
    for batch, rows, keys in ((1, 1, 32768), (1, 1, 131072), (4, 1, 16384), (16, 1, 8192), (1, 64, 32768),
                              (1, 256, 32768), (2, 128, 8192)):  # fmt: skip
        name = f"split {batch} x {rows} queries, {keys} keys"
        if not run.left(name):
            continue
        q = torch.randn(batch, rows, heads_q, dim, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(batch, keys, heads_kv, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        plan = ts.attention_plan(rows, keys, batch=batch, heads_q=heads_q, heads_kv=heads_kv, head_dim=dim,
                                 device="cuda")  # fmt: skip
        right = ts.attention(q, k, v, splits=1).float()
        fewer, more = max(2, plan.shares // 2), min(128, 2 * plan.shares)
        calls: dict[str, Callable[[], torch.Tensor]] = {
            "cudnn": lambda q=q, k=k, v=v: cudnn(q, k, v, False),
            "ts": lambda q=q, k=k, v=v: ts.attention(q, k, v),
            "ts, not split": lambda q=q, k=k, v=v: ts.attention(q, k, v, splits=1),
            "ts, half the shares": lambda q=q, k=k, v=v, n=fewer: ts.attention(q, k, v, splits=n),
            "ts, twice the shares": lambda q=q, k=k, v=v, n=more: ts.attention(q, k, v, splits=n),
        }
        for what, call in list(calls.items()):
            try:
                error = ((call().float() - right).norm() / right.norm()).item()
            except RuntimeError as failure:
                run.record.data["failures"].append(f"{name} {what}: {failure}"[:200])
                del calls[what]
                continue
            if not error < 1e-2:
                run.record.data["failures"].append(f"{name} {what}: differs by {error:.3g}")
        us = {what: round(1e3 * ms, 1) for what, ms in run.time(calls).items()}
        rate = round(4 * batch * keys * heads_kv * dim / us["ts"] * 1e-3)
        run.record.rows.append({"name": name, "us": us, "shares": plan.shares, "GB/s": rate})
        run.record.write()
        print(f"{name}: " + "  ".join(f"{what} {value}" for what, value in us.items())
              + f"  us, {plan.shares} shares, {rate} GB/s", flush=True)  # fmt: skip


def mix() -> list[int]:
    """64 sequences of a log-normal mix of lengths, 1 to 8k."""
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
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "packed": lambda: ts.attention(q, k, v, cu_seqlens_k=bounds, max_seqlen_k=max(lengths), **how)
    }
    sizes = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    for page in (16, 64):
        table, pages = in_pages(lengths, page)
        kept = [torch.zeros(pages, page, count, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        for i, (low, n) in enumerate(zip(bounds.tolist(), lengths, strict=False)):
            at = torch.arange(n, device="cuda")
            for x, y in zip(kept, (k, v), strict=True):
                x[table[i, at // page].long(), at % page] = y[low : low + n]
        calls[f"pages of {page}"] = lambda x=kept, t=table: ts.attention(q, *x, block_table=t, seqlens_k=sizes, **how)
    if run.left("lists"):
        run.row("lists, causal", operations, calls, alone.float(), lengths=lengths)
    for length in (512, 1024, 2048, like(lengths)):
        shape = Shape(dim, count, length, True)
        if run.left(f"lists dense S{length}"):
            q, k, v = operands_of(shape)
            calls = {"ts": lambda q=q, k=k, v=v: ts.attention(q, k, v, causal=True)}
            run.row(f"lists dense S{length}", shape.operations, calls, **shape._asdict())


def like(lengths: Sequence[int]) -> int:
    """The length of equal sequences that have as many operations a token as these, to a whole block of 64."""
    return max(64, round(sum(x * x for x in lengths) / sum(lengths) / 64) * 64)


def in_pages(lengths: list[int], page: int) -> tuple[torch.Tensor, int]:
    """A table of pages in no order, and how many there are."""
    needed = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(needed), device="cuda", dtype=torch.int32)
    table = torch.zeros(len(lengths), max(needed), dtype=torch.int32, device="cuda")
    for i, part in enumerate(torch.split(order, needed)):
        table[i, : len(part)] = part
    return table, sum(needed)


SECTIONS: dict[str, Callable[[Run], None]] = {
    "dense": dense, "lists": lists, "heads": heads, "host": host, "arrival": arrival, "neighbour": neighbour,
    "split": split,
}  # fmt: skip


def run_sections(sections: dict[str, Callable[[Run], None]], usual: str, record: str) -> None:
    """Those that the command line asks for, or the usual ones, into a record of such a name."""
    given = sys.argv[1:]
    run = Run(Path(given[1]) if len(given) > 1 else RESULTS, float(given[2]) if len(given) > 2 else 300.0, record)
    for name in (given[0] if given else usual).split(","):
        sections[name](run)
    run.record.write()
    print(f"failures: {run.record.data['failures']}; missing: {run.record.data['missing']}")


def main() -> None:
    run_sections(SECTIONS, "dense,lists,heads", "gpu_attention")


if __name__ == "__main__":
    main()
