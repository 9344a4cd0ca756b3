"""What the promise costs: plans with and without it, cuBLAS and the peers that promise it, in one process, in turns.

Peers are on PYTHONPATH, in a folder of their own: ``pip download --no-deps sgemm-bi==0.1.2``, unpacked; and
``batch_invariant_ops`` of https://github.com/thinking-machines-lab/batch_invariant_ops. One that is not there is left
out. Attention has no such peer: it is timed beside itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

import tilestream as ts
from benchmarks.core.compiling import compile_ahead
from benchmarks.core.session import Session
from tilestream_tools.sweep.clock import GpuClock

RECORD = "invariance_cost"
ROWS = (1, 16, 64, 128, 256, 1024, 4096)
#: Columns and K of Llama's layers of 8B and 70B, and a weight of few columns.
WEIGHTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (1024, 8192))
#: Sequences, queries, keys: prefills, and steps of decoding.
ATTENTION = (
    (1, 512, 512), (1, 1024, 1024), (1, 4096, 4096), (1, 8192, 8192), (4, 1024, 1024), (1, 1, 8192), (16, 1, 4096),
    (64, 1, 4096),
)  # fmt: skip
HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128
#: Samples of a call, and below how many seconds it is replayed from a graph.
SAMPLES = 25


def promised(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call inside `tilestream.invariant`."""

    def run() -> Any:
        with ts.invariant():
            return call()

    return run


def peers() -> dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """What multiplies ``x @ w.t()`` with the same promise, where it is installed."""
    found: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {}
    try:
        peer = importlib.import_module("batch_invariant_ops")
        found["batch_invariant_ops"] = lambda x, w: peer.matmul_persistent(x, w.t())
    except ImportError:
        pass
    try:
        engine = importlib.import_module("sgemm_bi").Engine(0)
    except (ImportError, RuntimeError):
        return found
    kept: dict[int, torch.Tensor] = {}

    def sgemm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        # It takes weights [K, N].
        turned = kept.setdefault(w.data_ptr(), w.t().contiguous())
        out = torch.empty(x.shape[0], w.shape[0], device=x.device, dtype=x.dtype)
        stream = torch.cuda.current_stream().cuda_stream
        engine.forward(
            out.data_ptr(), x.data_ptr(), turned.data_ptr(), None, x.shape[0], x.shape[1], w.shape[0], "bfloat16",
            stream, True,
        )  # fmt: skip
        return out

    found["sgemm-bi"] = sgemm
    return found


def product_calls(m: int, n: int, k: int) -> dict[str, Callable[[], Any]]:
    x, w = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (m, n))
    calls: dict[str, Callable[[], Any]] = {
        "cublas": lambda: torch.mm(x, w.t()),
        "free": lambda: ts.mm(x, w.t()),
        "invariant": promised(lambda: ts.mm(x, w.t())),
    }
    for name, peer in peers().items():
        calls[name] = lambda peer=peer: peer(x, w)
    return calls


def attention_calls(batch: int, queries: int, keys: int) -> dict[str, Callable[[], Any]]:
    q = torch.randn(batch, queries, HEADS, HEAD_DIM, device="cuda").bfloat16()
    k, v = (torch.randn(batch, keys, HEADS_KV, HEAD_DIM, device="cuda").bfloat16() for _ in range(2))
    return {
        "free": lambda: ts.attention(q, k, v, causal=True),
        "invariant": promised(lambda: ts.attention(q, k, v, causal=True)),
    }


def cases() -> list[tuple[str, tuple[int, int, int]]]:
    """Each kind of call with its extents."""
    products = [("product", (m, n, k)) for n, k in WEIGHTS for m in ROWS]
    return [*products, *(("attention", shape) for shape in ATTENTION)]


def calls_of(kind: str, shape: tuple[int, int, int]) -> dict[str, Callable[[], Any]]:
    return product_calls(*shape) if kind == "product" else attention_calls(*shape)


def share(arguments: list[str]) -> int:
    """A process of a core: makes its calls once, so that their kernels are compiled."""
    index, count = map(int, arguments)
    for kind, shape in cases()[index::count]:
        for name, call in calls_of(kind, shape).items():
            if name in ("free", "invariant"):
                call()
    torch.cuda.synchronize()
    return 0


def cost(session: Session) -> None:
    """A row for each shape: microseconds, and ratios above 1 where ours with the promise is the faster."""
    compile_ahead("invariance", limit=max(0.6 * session.left, 1), section="_cost")
    clock = GpuClock()
    record = session.record(RECORD, dtype="bfloat16", peers=sorted(peers()))

    def measure(item: tuple[str, tuple[int, int, int]]) -> dict[str, Any]:
        kind, shape = item
        calls = calls_of(kind, shape)
        timing = clock.interleave(calls, rounds=SAMPLES, warmup=2, graphs=True)
        us = {name: round(1e6 * timing.median(name), 2) for name in calls}
        ratios = {name: round(timing.median(name) / timing.median("invariant"), 4) for name in calls}
        row: dict[str, Any] = {"what": kind, "shape": "x".join(map(str, shape)), "timed": timing.mode, "us": us}
        if kind == "product":
            m, n, k = shape
            plan = ts.plan(m, n, k, dtype="bfloat16", device="cuda", layout="nt", invariant=True)
            row |= {"plan": plan.label, "expected": plan.promise}
        return row | {"ratios": ratios}

    session.rows(record, cases(), measure)
