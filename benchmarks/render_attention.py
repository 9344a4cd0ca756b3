"""What ``docs/performance.md`` says of attention: records of `gpu_attention` as tables, a timeline as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gemm_shapes import geomean
from render_gemm import table
from render_timeline import Timelines
from tilestream.trace import LaunchTrace

Record = dict[str, Any]
#: What a record's part of the page is called, by its file, where it is not simply attention prefill.
TITLES = {
    "gpu_attention_dense": "Attention, calls, beside cuDNN and FlashAttention 4",
    "gpu_attention_arrival": "Attention, keys that arrive, in shares",
    "gpu_attention_calls": "Attention, calls",
    "gpu_attention_fp8": "Attention in 8 bits",
    "gpu_attention_split": "Attention, few queries, and keys that arrive",
}
#: The columns of a table of 8 bits, by what a row calls them.
_NARROW = {"cudnn": "cuDNN, bfloat16", "hopper": "Hopper", "portable": "portable"}
#: Who a row's peers are; all others are ours.
PEERS = {"cudnn": "cuDNN", "fa4": "FA4"}


def sections(results: Path) -> list[str]:
    """Markdown of all records there are, a device each."""
    found = {
        path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("gpu_attention*.json"))
    }
    parts = [section(data, name) for name, data in found.items() if data["rows"]]
    return parts + TIMELINES.sections(results)


def evenness(launch: LaunchTrace) -> tuple[float, float, int, int, float]:
    """How even a launch is.

    Returns
    -------
    (busy, first, least, most, longest)
        Shares of the launch: of its workers' time, what they spend at tiles; when the first worker ends its last tile;
        the longest tile. ``least`` and ``most`` are the tiles of a worker.
    """
    whole = launch.end - launch.begin
    tiles = [[span for span in own if span.kind == "tile"] for own in launch.by_worker]
    spent = [span.end - span.begin for own in tiles for span in own]
    first = min((max(span.end for span in own) - launch.begin for own in tiles if own), default=0.0)
    counts = [len(own) for own in tiles]
    return sum(spent) / (whole * launch.workers), first / whole, min(counts), max(counts), max(spent) / whole


def timeline(launch: LaunchTrace, record: str) -> tuple[str, str, str]:
    """Of a call: how even its workers are."""
    busy, first, least, most, longest = evenness(launch)
    head, _, plan = launch.label.partition(": ")
    text = (
        f"`ts.attention`, {plan}; {launch.tiles_done} tiles in {1e3 * (launch.end - launch.begin):.3f} ms "
        f"({record}). Workers are at a tile {busy:.1%} of the launch; the first of them leaves after {first:.1%} of it."
        f" Each did {least} to {most} tiles, of which the longest took {longest:.1%} of it: the last rows of queries, "
        "which come first."
    )
    return f"Attention, the timeline of a call: {head}", text, "A row a worker, a bar a tile"


#: Of `attention_timeline`.
TIMELINES = Timelines("gpu_trace_attention", "attention_timeline", 162, timeline)


def section(data: Record, name: str) -> str:
    """Kernels beside their peers, calls through `ts.attention`, packed and paged keys, shares, arrival, neighbours."""
    where = (
        f"{data['device']}, torch {data['torch']}, Triton {data['triton']}, commit `{data['commit']}`, {data['date']}"
    )
    kernels = [row for row in data["rows"] if row["name"].startswith("variants")]
    calls = [row for row in data["rows"] if row["name"].startswith("D")]
    blocks = [row for row in data["rows"] if row["name"].startswith("blocks")]
    heads = [row for row in data["rows"] if row["name"].startswith("heads")]
    lists = [row for row in data["rows"] if "lengths" in row]
    parts = [f"## {TITLES.get(name.removesuffix('_h200'), 'Attention prefill')}, {data['device']}"]
    if kernels:
        ratios = [best(row)[1] / peer(row)[1] for row in kernels]
        parts += [
            f"The Hopper kernel, launched by itself, beside cuDNN of SDPA: 16k tokens of {data['dtype']} in sequences "
            f"of S, L2 flushed before each call ({where}). TFLOP/s; causal counts half. *Turns*: they take turns at "
            f"the tensor cores. Geometric mean of the ratios {geomean(ratios):.3f}, the worst {min(ratios):.3f}.",
            compared(kernels),
        ]
    if calls:
        ratios = [best(row)[1] / peer(row)[1] for row in calls]
        parts += [
            f"Calls of `ts.attention`, issued while the GPU sleeps: 16k tokens of {data['dtype']} in sequences of S, "
            f"L2 flushed before each ({where}). TFLOP/s. Geometric mean of the ratios {geomean(ratios):.3f}, the worst "
            f"{min(ratios):.3f}.",
            compared(calls),
        ]
    if heads:
        parts += [f"Query heads that share keys, beside as many that each have their own ({where}):", compared(heads)]
    for row in (row for row in data["rows"] if row["name"] == "host"):
        parts += [
            f"The host's microseconds of a call like the one before ({where}):",
            table(list(row["us"]), [[f"{value:.1f}" for value in row["us"].values()]]),
        ]
    if blocks:
        names = list(dict.fromkeys(name for row in blocks for name in row["tflops"]))
        rows = [
            [row["name"].removeprefix("blocks "), *(_rate(row["tflops"].get(name)) for name in names)] for row in blocks
        ]
        parts += [f"Key blocks of half the size at short sequences ({where}), TFLOP/s:", table(["", *names], rows)]
    parts += _narrow(data["rows"], where)
    parts += _beside(data["rows"], where)
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


def _narrow(rows: list[Record], where: str) -> list[str]:
    """Operands of 8 bits beside cuDNN on the same numbers in 16."""
    found = [row for row in rows if row["name"].startswith("fp8 ")]
    if not found:
        return []
    made = []
    for row in found:
        rates = row["tflops"]
        ratio = f"{rates['hopper'] / rates['cudnn']:.3f}" if {"hopper", "cudnn"} <= set(rates) else ""
        made.append([row["name"].removeprefix("fp8 "), *(_rate(rates.get(name)) for name in _NARROW), ratio])
    text = (
        "Queries, keys and values in e4m3, with a scale a sequence and head, by the Hopper kernel and by the portable "
        "one, beside cuDNN on the same numbers in bfloat16: 16k tokens in sequences of S, L2 flushed before each call "
        f"({where}). TFLOP/s; causal counts half. Each answer kept the error rule in the same run."
    )
    return [text, table(["", *_NARROW.values(), "Hopper / cuDNN"], made)]


def _beside(rows: list[Record], where: str) -> list[str]:
    """Keys in shares, keys that arrive, and a neighbour: a table each, if it was measured."""
    parts = []
    for name, key, text in (
        ("split", "us", "Few queries over many keys, 32 query heads on 8 heads of keys, microseconds"),
        ("arrival", "ms", "Keys that come from pinned memory while the kernel runs, milliseconds"),
        ("neighbour", "share", "Beside a kernel that holds 16 SMs: share of the idle rate, of what is proportional"),
    ):
        found = [row for row in rows if row["name"].startswith(name + " ")]
        if found:
            heads = list(found[0][key])
            more = ["shares"] if "shares" in found[0] else []
            made = [
                [row["name"].removeprefix(name + " "), *(str(row[key].get(head, "")) for head in heads),
                 *(str(row[what]) for what in more)]
                for row in found
            ]  # fmt: skip
            parts += [f"{text} ({where}):", table(["", *heads, *more], made)]
    return parts


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


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
        many = f", heads {row['heads']}:{row['heads_kv']}" if row["heads_kv"] else ""
        made.append(
            [f"D {row['dim']}, {mask}, S {row['length']}{many}", f"{theirs:.0f} ({PEERS[other]})", f"{ours:.0f}",
             f"{ours / theirs:.3f}", "" if name == "ts" else name]
        )  # fmt: skip
    return table(["", "peer", "ours", "ratio", "our tile"], made)
