"""Random pairs of calls that share rows: under `tilestream.invariant` a row has the same bits in both.

A pair is two calls with the same weight, or with the same keys. They differ in how many rows there are and which, where
the shared ones lie among them, what the others hold (NaN, too), how A lies, in the schedule, in the number of workers,
in whether rows arrive in chunks, in whether the call is captured, and in whether another kernel holds SMs beside it. Of
attention the calls are a prefill, a chunk of it, a step of decoding, one sequence of a batch or of a packed call, and
keys in pages.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tilestream as ts
from benchmarks.core.paths import command
from benchmarks.core.session import Session
from tilestream.runtime.properties import cuda_properties
from tilestream_tools.sweep.contention import Neighbour

RECORD = "invariance_pairs"
#: Calls that share rows: many, as most of the time goes into the kernels of the first.
CALLS_OF_SHARE = 33
#: The most rows of a product and K, and columns of weights: few, as each makes other kernels.
MOST_ROWS, MOST_K, COLUMNS = 16384, 8192, (512, 1024, 1536, 4096, 6144)
#: Rows that both calls have, at most.
SHARED = 48
#: Dtypes of operands with 8-bit products added fast or promoted, and how often each is taken.
DTYPES = {
    ("bfloat16", True): 8, ("float16", True): 2, ("float8_e4m3fn", True): 2, ("float8_e4m3fn", False): 2,
    ("float32", True): 1,
}  # fmt: skip
EPILOGUES = ("none", "none", "none", "bias, gelu", "residual", "scales")
#: How A lies: beside others' columns, behind an odd address, transposed.
LAYOUTS = ("plain", "plain", "plain", "padded", "odd", "transposed")
#: How a call is made.
CALLS = ("auto", "auto", "auto", "static", "dynamic", "workers", "captured", "arriving", "out", "neighbour")


class Weight(NamedTuple):
    """What the calls of a pair have in common: a weight, an epilogue, the rows they share."""

    b: torch.Tensor
    rows: torch.Tensor
    scale: torch.Tensor
    residual: torch.Tensor
    fast: bool
    epilogue: str


def log_uniform(draw: random.Random, most: int) -> int:
    """A number from 1 to ``most``, of all sizes alike."""
    return min(most, int(math.exp(draw.uniform(0.0, math.log(most + 1)))))


def weight_of(draw: random.Random) -> Weight:
    """A random weight, ``[K, N]`` of either layout, 8-bit operands in the one that tensor cores take."""
    name, fast = draw.choices(list(DTYPES), list(DTYPES.values()))[0]
    dtype, k, n = getattr(torch, name), 16 * log_uniform(draw, MOST_K // 16), draw.choice(COLUMNS)
    eight = dtype.itemsize == 1
    w = torch.randn(n, k, device="cuda").to(dtype)
    b = w.t() if eight or draw.random() < 0.7 else w.t().contiguous()
    rows = (torch.randn(SHARED, k, device="cuda") * torch.rand(SHARED, 1, device="cuda").exp2()).to(dtype)
    wide = torch.bfloat16 if eight else dtype
    return Weight(
        b, rows, torch.rand(SHARED, 1, device="cuda") + 0.5, torch.randn(SHARED, n, device="cuda").to(wide), fast,
        draw.choice(EPILOGUES),
    )  # fmt: skip


def product(w: Weight, draw: random.Random, seen: Counter[str]) -> tuple[torch.Tensor, int]:
    """What one call gives the shared rows, and how many of them it has."""
    m, (k, n) = log_uniform(draw, MOST_ROWS), w.b.shape
    kept = min(m, SHARED)
    places = torch.tensor(draw.sample(range(m), kept), device="cuda")
    layout, how = draw.choice(LAYOUTS), draw.choice(CALLS)
    if w.b.element_size() == 1 or w.b.dtype == torch.float32:
        layout = "plain" if layout in ("odd", "transposed") else layout
    seen.update((f"layout {layout}", f"call {how}", f"{w.b.dtype}, {w.epilogue}", f"rows to {2 ** m.bit_length()}"))
    other = float("nan") if draw.random() < 0.3 else draw.uniform(-4, 4)
    a = _lying(layout, m, k, w.b.dtype, other)
    _put(a, places, w.rows[:kept])
    given: dict[str, Any] = {"use_fast_accum": w.fast}
    if w.epilogue == "bias, gelu":
        given |= {"bias": w.residual[0], "activation": "gelu"}
    elif w.epilogue == "scales":
        scale = torch.ones(m, 1, device="cuda")
        scale[places] = w.scale[:kept]
        given |= {"scale_a": scale, "scale_b": w.scale[:1].expand(1, n).contiguous()}
    residual = torch.zeros(m, n, device="cuda", dtype=w.residual.dtype)
    residual[places] = w.residual[:kept]

    def call(**more: Any) -> torch.Tensor:
        if w.epilogue == "residual":
            return ts.addmm(residual, a, w.b, beta=0.3, alpha=0.7, **more)
        return ts.matmul(a, w.b, **given, **more)

    return _made(how, draw, call, a, m)[places], kept


def _lying(layout: str, m: int, k: int, dtype: torch.dtype, other: float) -> torch.Tensor:
    """A's memory, as ``layout`` says, full of other rows."""
    shape = {"plain": (m, k), "padded": (m, k + 64), "odd": (m, k + 1), "transposed": (k, m)}[layout]
    whole = torch.full(shape, other, device="cuda", dtype=torch.float32).to(dtype)
    return {"plain": whole, "padded": whole[:, 16 : 16 + k], "odd": whole[:, 1:], "transposed": whole.t()}[layout]


def _put(a: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
    if a.element_size() == 1:
        a.view(torch.uint8)[places] = rows.view(torch.uint8)
    else:
        a[places] = rows


def _made(how: str, draw: random.Random, call: Callable[..., torch.Tensor], a: torch.Tensor, m: int) -> torch.Tensor:
    """The answer of a call that is made in one of `CALLS`."""
    if how in ("static", "dynamic"):
        return call(schedule=how)
    if how == "workers":
        with ts.worker_limit(draw.randrange(1, 132)):
            return call()
    if how == "captured":
        return captured(lambda: (call(),))[0]
    if how == "neighbour":
        return beside_neighbour(draw, lambda: (call(),))[0]
    if how == "arriving":
        count = draw.randrange(1, min(m, 9) + 1)
        size = -(-m // count)
        arrival = ts.Arrival.uniform(size, -(-m // size), device="cuda")
        order = list(range(arrival.num_chunks))
        draw.shuffle(order)
        for chunk in order:
            arrival.signal(chunk)
        return call(arrival=arrival)
    if how == "out":
        return call(out=torch.empty_like(call()))
    return call()


def captured(call: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """What a graph of the call writes when it is replayed."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call()
    for one in made:
        one.fill_(float("nan"))
    graph.replay()
    return made


class NotHeldError(RuntimeError):
    """A neighbour did not hold its SMs for the whole of a call, which then counts for nothing."""


@functools.cache
def neighbour() -> Neighbour:
    """The neighbour of all calls of the process."""
    return Neighbour(cuda_properties())


def beside_neighbour(draw: random.Random, call: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """What a call gives while another kernel holds some of the SMs, up to seven of eight.

    Raises
    ------
    NotHeldError
        If they were not held.
    """
    taker = neighbour()
    for _ in range(2):  # beside the neighbour no kernel can be loaded, and no memory taken from the driver
        call()
    try:
        with taker.taking(draw.randrange(1, taker.units * 7 // 8)):
            made = call()
            torch.cuda.current_stream().synchronize()
    except RuntimeError as error:
        if not str(error).startswith("the neighbour"):
            raise
        raise NotHeldError(str(error)) from error
    return made


# Attention ------------------------------------------------------------------------------------------------------------

#: Keys of a sequence, from and to; and below how many a packed call's other sequence has.
KEYS, OTHER_KEYS = (64, 3000), 300


class Sequence(NamedTuple):
    """A sequence whose last queries all calls share."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    window: tuple[int, int] | None


def sequence_of(draw: random.Random) -> Sequence:
    """A random sequence, causal; three in ten have a window."""
    length, columns, heads = draw.randrange(*KEYS), draw.choice((64, 128)), draw.choice(((8, 2), (4, 4), (16, 2)))
    q, k, v = (torch.randn(1, length, h, columns, device="cuda").to(torch.bfloat16) for h in (heads[0], *heads[1:] * 2))
    window = (draw.randrange(16, length), 0) if draw.random() < 0.3 else None
    return Sequence(2 * q, k, v, window)


#: How a sequence is attended to.
WAYS = (
    "prefill", "chunk", "few", "decode", "batch", "packed", "pages", "workers", "captured", "arriving", "neighbour",
)  # fmt: skip


def attended(s: Sequence, draw: random.Random, seen: Counter[str]) -> tuple[torch.Tensor, int]:
    """Outputs and log-sum-exps of a sequence's last queries, and how many."""
    way, length = draw.choice(WAYS), s.q.shape[1]
    few = {"few": min(7, length), "decode": 1, "chunk": draw.randrange(1, length), "pages": draw.randrange(1, length)}
    rows = few.get(way, length)
    seen.update((f"attention {way}", f"columns {s.q.shape[-1]}", f"window {s.window is not None}"))
    how: dict[str, Any] = {"causal": True, "return_lse": True, "window": s.window}
    q, k, v = s.q[:, -rows:], s.k, s.v
    if way == "batch":
        before = draw.randrange(3)
        other = [torch.randn_like(x.expand(before + 2, -1, -1, -1)) for x in (q, k, v)]
        for x, mine in zip(other, (q, k, v), strict=True):
            x[before] = mine[0]
        out, lse = ts.attention(*other, **how)
        out, lse = out[before : before + 1], lse[before : before + 1]
    elif way == "packed":
        first = draw.randrange(1, OTHER_KEYS)
        bounds = torch.tensor([0, first, first + length], dtype=torch.int32, device="cuda")
        packed = [torch.cat((torch.randn_like(x[0, :1].expand(first, -1, -1)), x[0])) for x in (q, k, v)]
        out, lse = ts.attention(
            *packed, **how, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=max(first, length),
            max_seqlen_k=max(first, length),
        )  # fmt: skip
        out, lse = out[None, first:], lse[first:].t()[None]
    elif way == "pages":
        pages, where = in_pages(draw.choice((16, 64)), k, v)
        out, lse = ts.attention(q, *pages, **how, **where)
    elif way == "workers":
        with ts.worker_limit(draw.randrange(1, 132)):
            out, lse = ts.attention(q, k, v, **how)
    elif way == "arriving":
        chunk = draw.randrange(1, length + 1)
        arrival = ts.Arrival.uniform(chunk, -(-length // chunk), device="cuda")
        for one in draw.sample(range(arrival.num_chunks), arrival.num_chunks):
            arrival.signal(one)
        out, lse = ts.attention(q, k, v, **how, arrival=arrival)
    elif way == "captured":
        out, lse = captured(lambda: ts.attention(q, k, v, **how))
    elif way == "neighbour":
        out, lse = beside_neighbour(draw, lambda: ts.attention(q, k, v, **how))
    else:
        out, lse = ts.attention(q, k, v, **how)
    rows = out.shape[1]
    return torch.cat((out[0].float().flatten(1), lse[0].t()), 1).flip(0), rows


def in_pages(page: int, *given: torch.Tensor) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Keys and values of one sequence in pages in no order, and the arguments that say so."""
    length = given[0].shape[1]
    count = -(-length // page)
    table = torch.randperm(count, device="cuda")
    pages = []
    for x in given:
        padded = torch.nn.functional.pad(x[0], (0, 0, 0, 0, 0, count * page - length), value=float("nan"))
        of = torch.empty(count, page, *x.shape[2:], device="cuda", dtype=x.dtype)
        of[table] = padded.view(of.shape)
        pages.append(of)
    lengths = torch.tensor([length], dtype=torch.int32, device="cuda")
    return pages, {"block_table": table[None].int(), "seqlens_k": lengths}


# Pairs ----------------------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """What pairs came to."""

    pairs: int
    numbers: int
    differing: list[str]
    refused: list[str]
    seen: Counter[str]


def compare(seed: int, count: int, seconds: float = math.inf, attention: float = 0.3, calls: int = 9) -> Found:
    """Compare ``count`` pairs, or as many as there is time for.

    Parameters
    ----------
    attention
        The share of pairs that are of attention.
    calls
        Calls that share rows: each but the first makes a pair with it and one with the call before.
    """
    draw, seen, end = random.Random(seed), Counter[str](), time.monotonic() + seconds
    torch.manual_seed(seed)
    differing: list[str] = []
    refused: list[str] = []
    pairs = numbers = 0
    tf32, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
    with ts.invariant(), torch.no_grad(), contextlib.ExitStack() as after:
        after.callback(setattr, torch.backends.cuda.matmul, "allow_tf32", tf32)
        for number in itertools.count():
            if pairs >= count or time.monotonic() > end:
                break
            of_attention = draw.random() < attention
            shared: Any = sequence_of(draw) if of_attention else weight_of(draw)
            run: Callable[..., Any] = attended if of_attention else product
            made: list[tuple[torch.Tensor, int]] = []
            for call in range(calls):
                if time.monotonic() > end:
                    break
                state = draw.getstate()
                try:
                    one = run(shared, draw, seen)
                except (NotImplementedError, NotHeldError) as error:
                    refused.append(f"{seed}/{number}/{call}: {error}"[:200])
                    continue
                for other in {0, len(made) - 1} if made else ():
                    rows = min(one[1], made[other][1])
                    x, y = one[0][:rows], made[other][0][:rows]
                    bits = {2: torch.int16, 4: torch.int32}[x.element_size()]
                    wrong = int((x.contiguous().view(bits) != y.contiguous().view(bits)).sum())
                    pairs, numbers = pairs + 1, numbers + x.numel()
                    if wrong:
                        what = run(shared, _again(state), again := Counter()) and dict(again)
                        differing.append(f"{seed}/{number}/{call}: {wrong} of {x.numel()}: {what}")
                made.append(one)
    torch.cuda.synchronize()
    ts.check()
    return Found(pairs, numbers, differing, refused, seen)


def _again(state: Any) -> random.Random:
    draw = random.Random()
    draw.setstate(state)
    return draw


def share(arguments: list[str]) -> int:
    """A process of `pairs`: compares until the time is over, and writes what it found."""
    folder, seed, count, seconds = arguments
    found = compare(int(seed), int(count), float(seconds), calls=CALLS_OF_SHARE)
    Path(folder, f"{seed}.json").write_text(json.dumps(found._asdict()))
    return 0


def pairs(session: Session) -> None:
    """Pairs in as many processes as there are cores, each with its own; PAIRS says how many in all (10,000)."""
    record, wanted = session.record(RECORD, dtype="as each kind says"), int(os.environ.get("PAIRS", "10000"))
    count, begin = min(os.cpu_count() or 1, 16), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        seconds = max(session.left - 20, 10)
        each = str(-(-wanted // count))
        running = [
            subprocess.Popen(command("invariance", "_pairs", folder, str(seed), each, str(seconds)))
            for seed in range(count)
        ]
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(session.left, 0.1))
            if process.poll() is None:
                record.fail("a process did not end in time")
                process.kill()
                process.wait()
            elif process.returncode:
                record.fail(f"a process ended with {process.returncode}")
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    for row in _kinds(found):
        record.rows.append(row)
    record.data["failures"] += [one for part in found for one in part["differing"]][:50]
    record.data["refused"] = sorted({text.partition(": ")[2] for part in found for text in part["refused"]})
    record.data["seconds"] = round(time.monotonic() - begin, 1)
    record.write()


def _kinds(found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """All pairs, and how many calls there were of each kind."""
    total = {key: sum(part[key] for part in found) for key in ("pairs", "numbers")}
    yield {"what": "all", **total, "differing": sum(len(part["differing"]) for part in found)}
    seen: Counter[str] = Counter()
    for part in found:
        seen.update(part["seen"])
    for what, calls in sorted(seen.items()):
        yield {"what": what, "calls": calls}
