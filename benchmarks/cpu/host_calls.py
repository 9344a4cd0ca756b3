"""What a call costs the host beside torch's own op, on a GPU: microseconds, warm and cold, in one process.

    python -m tilestream_tools.native_build   # on any machine; the library is found in the source tree
    python benchmarks/cpu/host_calls.py [--size 256] [--rounds 9] [--out RECORD.json]

A round times every call of a pair in turn: torch's, this package's by the native call path, and by Python alone.
*Warm*: `BATCH` calls without a wait, the GPU idle when they begin. *Cold*: one call after the host's caches were swept.
The figures are medians over the rounds. ``linear`` with an activation is compared to the two ops that do the same, and
``merge_attention`` to ``torch.logaddexp`` and two scaled adds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 -- as everybody has it

import tilestream as ts
from tilestream.launch.native import extension, why_not
from tilestream.ops import native

#: Calls between two synchronisations: few enough that the queue of launches never fills.
BATCH, BATCHES, COLD = 64, 8, 12
#: Bytes that sweep the host's caches.
SWEPT = 64 << 20

Call = Callable[[], object]


class Pair(NamedTuple):
    """Torch's op, and this package's."""

    torch: Call
    ours: Call


def pairs(size: int) -> dict[str, Pair]:
    """The calls, by name."""

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    a, b, w, bias, out = made(size, size), made(size, size), made(size, size), made(size), made(size, size)
    x, batches, out_3d = made(2, size // 2, size), made(4, size, size), made(2, size // 2, size)
    found = {
        "mm": Pair(lambda: torch.mm(a, b), lambda: ts.mm(a, b)),
        "mm, out=": Pair(lambda: torch.mm(a, b, out=out), lambda: ts.mm(a, b, out=out)),
        "matmul, out=": Pair(lambda: torch.matmul(a, b, out=out), lambda: ts.matmul(a, b, out=out)),
        "bmm": Pair(lambda: torch.bmm(batches, batches), lambda: ts.bmm(batches, batches)),
        "linear, 2-D": Pair(lambda: F.linear(a, w), lambda: ts.linear(a, w)),
        "linear, 2-D, bias": Pair(lambda: F.linear(a, w, bias), lambda: ts.linear(a, w, bias)),
        "linear, 3-D, bias": Pair(lambda: F.linear(x, w, bias), lambda: ts.linear(x, w, bias)),
        "linear, 3-D, out=": Pair(lambda: torch.matmul(x, w.t(), out=out_3d), lambda: ts.linear(x, w, out=out_3d)),
        "linear, bias, relu": Pair(
            lambda: F.relu(F.linear(a, w, bias)), lambda: ts.linear(a, w, bias, activation="relu")
        ),
        "addmm": Pair(lambda: torch.addmm(out, a, b), lambda: ts.addmm(out, a, b)),
        "addmm, alpha, beta": Pair(
            lambda: torch.addmm(out, a, b, alpha=0.5, beta=2.0), lambda: ts.addmm(out, a, b, alpha=0.5, beta=2.0)
        ),
    }
    if torch.cuda.get_device_capability() >= (8, 9):
        a8, w8 = a.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
        one = torch.ones((), device="cuda")
        rows, columns = torch.ones(size, 1, device="cuda"), torch.ones(1, size, device="cuda")
        kind = {"out_dtype": torch.bfloat16}
        for name, scales in (("a scale a tensor", (one, one)), ("a scale a row", (rows, columns))):
            of = dict(zip(("scale_a", "scale_b"), scales, strict=True))
            found[f"fp8, {name}"] = Pair(
                lambda of=of: torch._scaled_mm(a8, w8.t(), **of, **kind), lambda of=of: ts.linear(a8, w8, **of)
            )
    found["linear, inference_mode"] = Pair(
        torch.inference_mode()(lambda: F.linear(a, w, bias)), torch.inference_mode()(lambda: ts.linear(a, w, bias))
    )
    eager = {"torch": lambda x: F.linear(x, w, bias), "ours": lambda x: ts.linear(x, w, bias)}
    compiled = {name: torch.compile(call, fullgraph=True) for name, call in eager.items()}
    found["linear, torch.compile"] = Pair(lambda: compiled["torch"](a), lambda: compiled["ours"](a))
    return found | training_pairs(size) | attention_pairs(size)


def training_pairs(size: int) -> dict[str, Pair]:
    """A linear layer within a model, forward and backward: gradients of the input, the weight and the bias."""

    def step(linear: Callable[..., torch.Tensor], *shape: int) -> Call:
        leaves = [
            torch.randn(*of, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for of in ((*shape, size), (size, size), (size,))
        ]
        grad = torch.randn(*shape, size, device="cuda", dtype=torch.bfloat16)

        def call() -> None:
            with torch.enable_grad():
                linear(*leaves).backward(grad)
            for leaf in leaves:
                leaf.grad = None

        return call

    shapes = {"2-D": (size,), "3-D": (2, size // 2)}
    return {
        f"linear, {name}, forward + backward": Pair(step(F.linear, *shape), step(ts.linear, *shape))
        for name, shape in shapes.items()
    }


def attention_pairs(size: int) -> dict[str, Pair]:
    """Attention beside ``F.scaled_dot_product_attention`` of as many dense keys, in torch's layout."""

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    heads, shared, columns, page = 8, 2, 64, 64
    q, k, v = made(2, heads, size, columns), made(2, heads, size, columns), made(2, heads, size, columns)
    k2, v2 = made(2, shared, size, columns), made(2, shared, size, columns)
    rows = made(2, size, heads, columns)
    flat = made(2 * size, heads, columns)
    pages = made(2 * size // page, page, heads, columns)
    ends = torch.tensor([0, size, 2 * size], device="cuda", dtype=torch.int32)
    table = torch.arange(2 * size // page, device="cuda", dtype=torch.int32).view(2, -1)
    lengths = torch.full((2,), size, device="cuda", dtype=torch.int32)
    out = torch.empty_like(rows)

    lse_a, lse_b = (torch.randn(2, size, heads, device="cuda") for _ in range(2))
    of_heads = lse_a.transpose(1, 2), lse_b.transpose(1, 2)

    def merged() -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.logaddexp(lse_a, lse_b)
        share_a, share_b = torch.exp(lse_a - lse).unsqueeze(-1), torch.exp(lse_b - lse).unsqueeze(-1)
        return (rows * share_a + out * share_b).to(rows.dtype), lse

    def dense() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    return {
        "attention, dense": Pair(dense, lambda: ts.attention(q, k, v, layout="bhsd")),
        "attention, rows first": Pair(dense, lambda: ts.attention(rows, rows, rows)),
        "attention, out=": Pair(dense, lambda: ts.attention(rows, rows, rows, out=out)),
        "attention, causal": Pair(
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            lambda: ts.attention(q, k, v, layout="bhsd", causal="top_left"),
        ),
        "attention, GQA": Pair(
            lambda: F.scaled_dot_product_attention(q, k2, v2, enable_gqa=True),
            lambda: ts.attention(q, k2, v2, layout="bhsd"),
        ),
        "attention, packed": Pair(dense, lambda: ts.attention(flat, flat, flat, cu_seqlens_q=ends, cu_seqlens_k=ends)),
        "attention, paged": Pair(
            dense, lambda: ts.attention(rows, pages, pages, block_table=table, seqlens_k=lengths)
        ),
        "merge_attention": Pair(merged, lambda: ts.merge_attention(rows, of_heads[0], out, of_heads[1])),
    }  # fmt: skip


def warm(call: Call) -> float:
    """Microseconds until a call returns: the median of some batches."""
    means = []
    for _ in range(BATCHES):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(BATCH):
            call()
        means.append((time.perf_counter() - begin) / BATCH * 1e6)
    torch.cuda.synchronize()
    return statistics.median(means)


def cold(call: Call, swept: torch.Tensor) -> float:
    """Microseconds until one call returns after the host's caches were swept: the median of some."""
    found = []
    for _ in range(COLD):
        swept.add_(1)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        found.append((time.perf_counter() - begin) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(found)


def measure(size: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """``[warm, cold]`` by call and by way."""
    library, swept = extension(), torch.empty(SWEPT, dtype=torch.uint8)
    samples: dict[str, dict[str, list[tuple[float, float]]]] = {}
    cases = pairs(size)
    with torch.no_grad():
        for _ in range(rounds):
            for name, pair in cases.items():
                for way, call in (("torch", pair.torch), ("native", pair.ours), ("python", pair.ours)):
                    native._loaded.extension = library if way == "native" else None
                    for _ in range(8):
                        call()
                    samples.setdefault(name, {}).setdefault(way, []).append((warm(call), cold(call, swept)))
    native._loaded.extension = library

    def medians(found: list[tuple[float, float]]) -> list[float]:
        return [round(statistics.median(one), 2) for one in zip(*found, strict=True)]

    return {name: {way: medians(found) for way, found in ways.items()} for name, ways in samples.items()}


def main() -> None:
    """Measure, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="record of the medians")
    options = parser.parse_args()
    if extension() is None:
        raise SystemExit(f"no native call path: {why_not()}")
    native._load()
    found = measure(options.size, options.rounds)
    print(f"{'us a call, warm (cold)':<34}{'torch':>18}{'native':>18}{'python':>18}{'native/torch':>18}")
    for name, ways in found.items():
        cells = "".join(f"{f'{one:.1f} ({other:.0f})':>18}" for one, other in ways.values())
        ratios = [ours / theirs for ours, theirs in zip(ways["native"], ways["torch"], strict=True)]
        print(f"{name:<34}{cells}{f'{ratios[0]:.2f} ({ratios[1]:.2f})':>18}")
    if options.out:
        made = {
            "name": "host_calls", "device": torch.cuda.get_device_name(), "torch": torch.__version__,
            "commit": os.environ.get("COMMIT", ""), "date": time.strftime("%Y-%m-%d"), "size": options.size,
            "warm_and_cold_microseconds": found,
        }  # fmt: skip
        options.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
