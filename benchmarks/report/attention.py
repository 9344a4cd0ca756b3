"""What ``docs/performance.md`` says of attention: records of `gpu_attention` as tables, a timeline as a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.gemm.shapes import geomean
from benchmarks.report import attention_sizes as group_sizes
from benchmarks.report.attention_why import behind
from benchmarks.report.gemm import table
from benchmarks.report.timelines import Timelines
from tilestream.trace import LaunchTrace

Record = dict[str, Any]
#: What a record's part of the page is called, by its file, where it is not simply attention prefill.
TITLES = {
    "gpu_attention_groups": "Attention, groups of heads",
    "gpu_attention_tiles": "Attention, every tile",
    "gpu_attention_arrival": "Attention, keys that arrive, in shares",
    "gpu_attention_arrival_whole": "Attention, keys that arrive, tiles whole",
    "gpu_attention_fp8": "Attention in 8 bits",
    "gpu_attention_sizes": "Attention, how many heads are taken together",
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
    parts = []
    for name, data in found.items():
        if data["rows"]:
            parts.append(section(data, name))
        if name == drawn(found).get(data["device"]):
            parts.append(f"![TFLOP/s by the length of a sequence, {data['device']}](images/{_picture(data)})")
    return parts + TIMELINES.sections(results)


def drawn(found: dict[str, Record]) -> dict[str, str]:
    """By device, the record that its plot is made from: that of dense calls beside most peers, the latest of such."""
    best: dict[str, tuple[tuple[int, str, str], str]] = {}
    for name, data in found.items():
        calls = dense_calls(data)
        peers = {one for row in calls for one in row["tflops"] if one in PEERS}
        if calls:
            key = len(peers), data["date"], name
            best[data["device"]] = max(best.get(data["device"], (key, name)), (key, name))
    return {device: name for device, (_, name) in best.items()}


def dense_calls(data: Record) -> list[Record]:
    """Its rows of dense calls of `ts.attention`."""
    return [row for row in data["rows"] if row["name"].startswith("D") and "ts" in row["tflops"]]


def _picture(data: Record) -> str:
    return f"gpu_attention{suffix_of(data['device'])}.png"


def suffix_of(device: str) -> str:
    """As `harness.device_suffix`, which imports torch: nothing for an H100."""
    return "" if "H100" in device else "_h200" if "H200" in device else "_" + "_".join(device.lower().split())


def plots(results: Path, images: Path) -> None:
    """A plot a device."""
    found = {
        path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("gpu_attention*.json"))
    }
    for name in drawn(found).values():
        plot(found[name], images / _picture(found[name]))
    for data in found.values():
        if group_sizes.rows_of(data):
            group_sizes.plot(data, images / group_sizes.picture(suffix_of(data["device"])))


def plot(data: Record, path: Path) -> None:
    """Rates by the length of a sequence: a panel a width and mask, a line for ours and each peer."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = dense_calls(data)
    dims = list(dict.fromkeys(row["dim"] for row in rows))
    figure, panels = plt.subplots(2, len(dims), figsize=(4.2 * len(dims), 6.4), sharex=True, sharey=True,
                                  squeeze=False, layout="constrained")  # fmt: skip
    colours = {"ts": "#e09f3e", "cudnn": "#5c6b73", "fa4": "#9db4c0"}
    for line, causal in zip(panels, (True, False), strict=True):
        for axes, dim in zip(line, dims, strict=True):
            some = sorted((r for r in rows if (r["dim"], r["causal"]) == (dim, causal)), key=lambda r: r["length"])
            for name, label in {"ts": "tilestream", **PEERS}.items():
                points = [(row["length"], row["tflops"][name]) for row in some if name in row["tflops"]]
                if points:
                    axes.plot(*zip(*points, strict=True), "o-", color=colours[name], markersize=4, label=label)
            axes.set_xscale("log", base=2)
            axes.set_title(f"D {dim}, {'causal' if causal else 'full'}", fontsize=9)
            axes.grid(visible=True, color="#e4e4e4", linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
        line[0].set_ylabel("TFLOP/s")
    panels[0][0].set_ylim(0, 1.05 * max(rate for row in rows for rate in row["tflops"].values()))
    ticks = sorted({row["length"] for row in rows})
    panels[0][0].set_xticks(ticks, [str(x) if x < 1024 else f"{x // 1024}k" for x in ticks])
    for axes in panels[-1]:
        axes.set_xlabel("S, of 16k tokens")
    panels[0][0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.suptitle(f"ts.attention, {data['dtype']}, {data['device']}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


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
    heads = [row for row in data["rows"] if row["name"].startswith("heads")]
    lists = [row for row in data["rows"] if "lengths" in row]
    parts = [f"## {TITLES.get(name.removesuffix('_h200'), 'Attention prefill')}, {data['device']}"]
    if kernels:
        ratios = [best(row)[1] / peer(row)[1] for row in kernels]
        parts += [
            f"The Hopper kernel, launched by itself, beside cuDNN of SDPA: 16k tokens of {data['dtype']} in sequences "
            f"of S, L2 flushed before each call ({where}). TFLOP/s; causal counts half. *Turns*: they take turns at "
            f"the tensor cores. Geometric mean of the ratios {geomean(ratios):.3f}, the worst {min(ratios):.3f}.",
            by_width(kernels),
            compared(kernels),
            *losses(kernels),
        ]
    if calls:
        ratios = [best(row)[1] / peer(row)[1] for row in calls]
        parts += [
            f"Calls of `ts.attention`, issued while the GPU sleeps: 16k tokens of {data['dtype']} in sequences of S, "
            f"L2 flushed before each ({where}). TFLOP/s. Geometric mean of the ratios {geomean(ratios):.3f}, the worst "
            f"{min(ratios):.3f}.",
            by_width(calls),
            compared(calls),
            *losses(calls),
        ]
    if heads:
        parts += [
            f"Query heads that share keys, beside as many that each have their own ({where}):", compared(heads),
            *sharing(heads),
        ]  # fmt: skip
    for row in (row for row in data["rows"] if row["name"] == "host"):
        parts += [
            f"The host's microseconds of a call like the one before ({where}):",
            table(list(row["us"]), [[f"{value:.1f}" for value in row["us"].values()]]),
        ]
    parts += _chosen(data["rows"], where)
    parts += group_sizes.section(data, where, suffix_of(data["device"]))
    parts += _narrow(data["rows"], where)
    parts += _beside(data["rows"], where)
    parts += [text for row in lists for text in packed(row, data["rows"])]
    if data.get("missing"):
        parts.append(f"Not measured, for want of time: {', '.join(data['missing'])}.")
    return "\n\n".join(parts)


def by_width(rows: list[Record]) -> str:
    """Geometric means of ours by each peer, by the columns of a head and the mask."""
    peers = [name for name in PEERS if any(name in row["tflops"] for row in rows)]
    groups: dict[str, Callable[[Record], bool]] = {}
    for dim in dict.fromkeys(row["dim"] for row in rows):
        groups[f"D {dim}"] = lambda row, dim=dim: row["dim"] == dim
        for causal in (True, False):
            name = f"D {dim}, {'causal' if causal else 'full'}"
            groups[name] = lambda row, dim=dim, causal=causal: (row["dim"], row["causal"]) == (dim, causal)
    groups["all"] = lambda row: True
    made = []
    for name, of in groups.items():
        some = [row for row in rows if of(row)]
        cells = [_mean(best(row)[1] / row["tflops"][one] for row in some if one in row["tflops"]) for one in peers]
        fastest = [best(row)[1] / peer(row)[1] for row in some]
        made.append([name, *cells, _mean(fastest), f"{min(fastest):.3f}" if fastest else "-"])
    head = ["geometric mean of ours by", *(PEERS[name] for name in peers), "the faster peer", "the worst of these"]
    return table(head, made)


def _mean(ratios: Iterable[float]) -> str:
    found = list(ratios)
    return f"{geomean(found):.3f}" if found else "-"


def losses(rows: list[Record]) -> list[str]:
    """Where the fastest peer is ahead, and why."""
    return behind([(row, best(row)[1] / peer(row)[1], PEERS[peer(row)[0]]) for row in rows])


def sharing(rows: list[Record]) -> list[str]:
    """What heads that share keys gain over as many that each have their own: nothing would be 1."""
    own = {(row["causal"], row["length"]): row["tflops"] for row in rows if row["heads_kv"] == row["heads"]}
    made, ratios = [], []
    for row in rows:
        beside = own.get((row["causal"], row["length"]))
        if row["heads_kv"] == row["heads"] or beside is None:
            continue
        name = f"{'causal' if row['causal'] else 'full'}, S {row['length']}, {row['heads']}:{row['heads_kv']}"
        both = {one: row["tflops"][one] / beside[one] for one in row["tflops"] if one in beside}
        ratios.append(both["ts"])
        made.append([name, f"{both['ts']:.3f}", f"{both['cudnn']:.3f}" if "cudnn" in both else "-"])
    if not made:
        return []
    text = (
        f"The rate of heads that share keys by that of heads that have their own: geometric mean of ours "
        f"{geomean(ratios):.3f}, the least {min(ratios):.3f}."
    )
    return [text, table(["shared / own", "ours", "cuDNN"], made)]


def packed(row: Record, rows: list[Record]) -> list[str]:
    """A mix of lengths, packed and in pages, beside a dense call that has about as many operations a token."""
    lengths, rates, what = row["lengths"], row["tflops"], row["name"].partition(", ")[2]
    same = sum(x * x for x in lengths) / sum(lengths)
    dense = [one for one in rows if one["name"].startswith("lists dense ")]
    near = min(dense, key=lambda one: abs(one["length"] - same), default=None)
    cells = [[f"{rates[name]:.0f}" for name in rates]]
    text = f"A mix of {len(lengths)} sequences of {min(lengths)} to {max(lengths)}, {what}, TFLOP/s"
    if near is None:
        return [f"{text}; the record has no dense call to compare with:", table(list(rates), cells)]
    rate = near["tflops"]["ts"]
    cells.append([f"{rates[name] / rate:.3f}" for name in rates])
    text = (
        f"{text}; below, by the {rate:.0f} of a dense call of sequences of {near['length']}, which has about as many "
        "operations a token:"
    )
    return [text, table(list(rates), cells)]


def _chosen(rows: list[Record], where: str) -> list[str]:
    """What the plan chooses from: a table each, if it was measured."""
    parts = []
    for what, text in (
        ("blocks", "Key blocks of half the size at short sequences"),
        ("groups", "Heads that are taken together, by the bytes of their keys and values"),
    ):
        found = [row for row in rows if row["name"].startswith(what + " ")]
        if found:
            names = list(dict.fromkeys(name for row in found for name in row["tflops"]))
            made = [
                [row["name"].removeprefix(what + " "), *(_rate(row["tflops"].get(name)) for name in names)]
                for row in found
            ]
            parts += [f"{text} ({where}), TFLOP/s:", table(["", *names], made)]
    return parts


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
