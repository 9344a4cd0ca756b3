"""What ``docs/performance.md`` says of attention: the record of `gpu_attention` as tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gemm_shapes import geomean
from render_gemm import table

Record = dict[str, Any]
#: Who a row's peers are; all others are ours.
PEERS = {"cudnn": "cuDNN", "fa4": "FA4"}


def sections(results: Path) -> list[str]:
    """Markdown of all records there are, a device each."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("gpu_attention*.json"))]
    return [section(data) for data in found if data["rows"]]


def section(data: Record) -> str:
    """Kernels beside their peers, calls through `ts.attention`, and packed and paged keys."""
    where = (
        f"{data['device']}, torch {data['torch']}, Triton {data['triton']}, commit `{data['commit']}`, {data['date']}"
    )
    kernels = [row for row in data["rows"] if row["name"].startswith("variants")]
    calls = [row for row in data["rows"] if "length" in row and row not in kernels]
    lists = [row for row in data["rows"] if "lengths" in row]
    parts = [f"## Attention prefill, {data['device']}"]
    if kernels:
        ratios = [best(row)[1] / peer(row)[1] for row in kernels]
        parts += [
            f"The Hopper kernel, launched by itself, beside cuDNN of SDPA: 16k tokens of {data['dtype']} in sequences "
            f"of S, L2 flushed before each call ({where}). TFLOP/s; causal counts half. *Turns*: they take turns at "
            f"the tensor cores. Geometric mean of the ratios {geomean(ratios):.3f}, the worst {min(ratios):.3f}.",
            compared(kernels),
        ]
    if calls:
        parts += [
            "Calls of `ts.attention`, the host's part among it where a call is short (what the calls above leave out):",
            compared(calls),
        ]
    for row in lists:
        names = list(row["tflops"])
        parts += [
            f"A mix of {len(row['lengths'])} sequences of {min(row['lengths'])} to {max(row['lengths'])}, "
            f"{row['name'].partition(', ')[2]}, TFLOP/s:",
            table(names, [[f"{row['tflops'][name]:.0f}" for name in names]]),
        ]
    if data.get("missing"):
        parts.append(f"Not measured, for want of time: {', '.join(data['missing'])}.")
    return "\n\n".join(parts)


def best(row: Record) -> tuple[str, float]:
    """The fastest of ours."""
    return max(((name, x) for name, x in row["tflops"].items() if name not in PEERS), key=lambda one: one[1])


def peer(row: Record) -> tuple[str, float]:
    """The fastest peer."""
    return max(((name, x) for name, x in row["tflops"].items() if name in PEERS), key=lambda one: one[1])


def compared(rows: list[Record]) -> str:
    """A table of ours beside the fastest peer."""
    made = []
    for row in rows:
        (name, ours), (other, theirs) = best(row), peer(row)
        mask = "causal" if row["causal"] else "full"
        made.append(
            [f"D {row['dim']}, {mask}, S {row['length']}", f"{theirs:.0f} ({PEERS[other]})", f"{ours:.0f}",
             f"{ours / theirs:.3f}", "" if name == "ts" else name]
        )  # fmt: skip
    return table(["", "peer", "ours", "ratio", "our tile"], made)
