"""The GEMM part of ``docs/performance.md``: tables and plots from the records of `gpu_gemm`. For `render`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gemm.shapes import GROUPS, geomean, group_of, verdict
from benchmarks.report.gemm_losses import losses, of_epilogue, of_fp8, of_quack

Record = dict[str, Any]
Row = dict[str, Any]

MARK = {"won": "won", "even": "even", "lost": "**lost**"}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, numbers right-aligned."""
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows])


def where(data: Record) -> str:
    """On what the record was made."""
    driver = f"driver {data['driver']}, {data['power_limit']}, " if "driver" in data else ""
    versions = f"torch {data['torch']}, Triton {data['triton']}, {driver}commit `{data['commit']}`, {data['date']}"
    return f"{data['device']}, {versions}"


def incomplete(data: Record) -> list[str]:
    """A sentence on what the record lacks, if it does."""
    parts = []
    if data.get("failures"):
        parts.append("Failed: " + "; ".join(f"{one['what']} ({one['error']})" for one in data["failures"]) + ".")
    planned, done = data.get("planned"), len(data["rows"]) + len(data.get("failures", ()))
    if planned and done < planned:
        why = "" if data.get("missing") else ": the run was cut off"
        parts.append(f"{len(data['rows'])} of {planned} planned rows{why}.")
    if data.get("missing"):
        parts.append("Not measured, for want of time: " + ", ".join(data["missing"]) + ".")
    return [" ".join(parts).replace("|", "/").replace("\n", " ")] if parts else []


def outcome(row: Row) -> str:
    """``won``, ``even``, ``lost``."""
    return verdict(row["ratio"], row["band"])


#: Where the part of a call that an epilogue takes is told apart.
SHORT_K = 2048
#: Where the plot ends: what is beyond stands at its edge, with its ratio.
HIGHEST = 1.3


def counts(rows: Sequence[Row]) -> str:
    """``won / even / lost``."""
    found = [outcome(row) for row in rows]
    return " / ".join(str(found.count(one)) for one in MARK)


def by_group(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by class, in the classes' order, those of a weight together; without the classes that have none."""
    group = [group_of(_extents(row)[0]) if row["name"] else row["group"] for row in rows]
    names = [*GROUPS, *dict.fromkeys(name for name in group if name not in GROUPS)]
    found = {
        name: sorted((row for row, its in zip(rows, group, strict=True) if its == name), key=_place) for name in names
    }
    return {name: found[name] for name in names if found[name]}


def _place(row: Row) -> tuple[object, ...]:
    model, m, n, k = row["name"].partition(" ")[0], *_extents(row)
    return len(model), model, n * k, row["name"], n, k, m


def _extents(row: Row) -> tuple[int, ...]:
    return tuple(int(extent) for extent in row["shape"].split("x"))


def _shape(row: Row) -> str:
    return f"{row['shape']} {row['name']}".strip()


def _band(row: Row) -> str:
    low, high = row["band"]
    return f"{low:.3f} to {high:.3f}"


def suite(data: Record) -> str:
    """Every shape beside cuBLAS, by class."""
    groups = by_group(data["rows"])
    every = data["rows"]
    summary = [_of(f"{name}: {GROUPS.get(name, '')}".rstrip(": "), rows) for name, rows in groups.items()]
    summary.append(_of("all", every))
    summary += [_of(name, rows) for name, rows in by_rows(every).items() if rows]
    empty = data["empty_us"]
    parts = [
        f"### Beside cuBLAS, {data['device']}",
        f"`ts.mm(a, b)` and `torch.mm(a, b)`, {data['dtype']}, B as it lies in a Linear weight, both allocating their "
        f"output; L2 flushed ({data['flush']}) ({where(data)}). Ratio: cuBLAS's time by ours. *Even*: 1 lies between "
        "the quartiles of the rounds' ratios. Calls whose floor is below 50 us are replayed from CUDA graphs, both. "
        f"In each time is what the clock itself adds: a kernel that writes one word reads {empty['eager']:.1f} us, in "
        f"a graph {empty['graph']:.1f} us.",
        *incomplete(data),
        table(["class", "shapes", "ratio, geometric mean", "worst", "won / even / lost"], summary),
        *weights_read(every),
        *[f"**{name[0].upper()}{name[1:]}**\n\n{_group(name, rows)}" for name, rows in groups.items()],
    ]
    return "\n\n".join(parts)


def by_rows(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by M alone, whatever they are of."""
    big = [row for row in rows if _extents(row)[0] >= 1024]
    return {
        "**big**: M of 1024 and more": big,
        "**big**, without the odd shapes": [row for row in big if row["group"] != "odd"],
        "**middle**: M of 65 to 1023": [row for row in rows if 64 < _extents(row)[0] < 1024],
        "**few rows**: M of 1 to 64": [row for row in rows if _extents(row)[0] <= 64],
    }


def weights_read(rows: Sequence[Row]) -> list[str]:
    """What share of the rate of a kernel that only reads the weights decoding has, in the mean."""
    found = [row["weight_read"] for row in rows if "of_cublas" in row.get("weight_read", {})]
    if not found:
        return []
    ours, peer = (sum(read[name] for read in found) / len(found) for name in ("of_ours", "of_cublas"))
    least = min(read["of_ours"] for read in found)
    return [
        f"Of the rate of a kernel that only reads the weights, decoding has in the mean over {len(found)} shapes "
        f"{ours:.1%} (the least {least:.1%}), cuBLAS {peer:.1%}."
    ]


def _of(name: str, rows: Sequence[Row]) -> list[str]:
    """A class in a line."""
    ratios = [row["ratio"] for row in rows]
    told = [f"{geomean(ratios):.3f}", f"{min(ratios):.3f}", counts(rows)] if rows else ["-"] * 3
    return [name, str(len(rows)), *told]


def _group(name: str, rows: Sequence[Row]) -> str:
    """One class's table: TFLOP/s, or for decoding microseconds beside a kernel that only reads the weights."""
    if name == "decode":
        head = ["M x N x K", "cuBLAS, us", "ours, us", "weights read, us", "ours, GB/s", "weights read / ours"]
        lines = [
            [
                _shape(row), f"{row['us']['cublas']:.1f}", f"{row['us']['ours']:.1f}",
                *((f"{read['us']:.1f}", f"{row['gbps']['ours']}", f"{read['of_ours']:.3f}")
                  if (read := row.get("weight_read")) else ("-", f"{row['gbps']['ours']}", "-")),
            ]
            for row in rows
        ]  # fmt: skip
    else:
        head = ["M x N x K", "cuBLAS, us", "ours, us", "cuBLAS, TFLOP/s", "ours, TFLOP/s", "floor / ours"]
        lines = [
            [
                _shape(row), f"{row['us']['cublas']:.1f}", f"{row['us']['ours']:.1f}",
                f"{row['tflops']['cublas']:.0f}", f"{row['tflops']['ours']:.0f}", f"{row['of_floor']:.3f}",
            ]
            for row in rows
        ]  # fmt: skip
    ends = [[f"{row['ratio']:.3f}", _band(row), MARK[outcome(row)]] for row in rows]
    body = [[*line, *end] for line, end in zip(lines, ends, strict=True)]
    return table([*head, "ratio", "quartiles", ""], body)


def quack(data: Record) -> str:
    """Beside quack's three ways, and cuBLAS."""
    ways = ["cublas", "quack", "quack dynamic", "quack tuned"]
    rows = [
        [
            row["shape"],
            f"{row['tflops']['ours']:.0f}",
            *(f"{row['tflops'][way]:.0f} ({row['ratios'][way]:.3f})" if way in row["ratios"] else "-" for way in ways),
            MARK[outcome(row)],
        ]
        for row in data["rows"]
    ]
    means = [
        f"{way} {geomean(row['ratios'][way] for row in data['rows'] if way in row['ratios']):.3f}"
        for way in ways
        if any(way in row["ratios"] for row in data["rows"])
    ]
    bests = [min(row["ratios"][way] for way in ways if way in row["ratios"]) for row in data["rows"]]
    return "\n\n".join(
        [
            f"### Beside quack {data['quack']}, {data['device']}",
            f"TFLOP/s, and in brackets the peer's time by ours; {data['dtype']}, as above ({where(data)}). *Tuned*: "
            "the best of quack's own autotuner, which took seconds to minutes a shape; the last column compares with "
            f"the best of the three. Geometric means of the ratios: {', '.join(means)}. Of the best of all, cuBLAS or "
            f"quack, a shape at a time: {geomean(bests):.3f}, the worst {min(bests, default=float('nan')):.3f}.",
            *incomplete(data),
            table(["M x N x K", "ours", *ways, ""], rows),
        ]
    )


def fp8(data: Record) -> str:
    """Beside torch._scaled_mm."""
    rows = [
        [
            row["shape"],
            f"{row['scales']}, {'fast' if row['fast_accum'] else 'precise'}",
            *(f"{row['us'][name]:.1f}" for name in ("scaled_mm", "ours")),
            *(f"{row['tflops'][name]:.0f}" for name in ("scaled_mm", "ours")),
            f"{row['ratio']:.3f}",
            MARK[outcome(row)],
        ]
        for row in data["rows"]
    ]
    kinds = dict.fromkeys((row["scales"], row["fast_accum"]) for row in data["rows"])
    means = ", ".join(
        f"{scales}, {'fast' if fast else 'precise'} "
        f"{geomean(r['ratio'] for r in data['rows'] if (r['scales'], r['fast_accum']) == (scales, fast)):.3f}"
        for scales, fast in kinds
    )
    whole = ", ".join(
        f"{scales}-wise {geomean(row['ratio'] for row in data['rows'] if row['scales'] == scales):.3f}"
        for scales in dict.fromkeys(row["scales"] for row in data["rows"])
    )
    head = ["M x N x K", "scales, sum", "_scaled_mm, us", "ours, us", "_scaled_mm, TFLOP/s", "ours, TFLOP/s", "ratio"]
    return "\n\n".join(
        [
            f"### fp8, {data['device']}",
            f"`ts.matmul` beside `torch._scaled_mm`, {data['dtype']}; one scale a tensor, or one a row of A and a "
            f"column of B; `use_fast_accum` (*fast*) or not ({where(data)}). Geometric means of the ratios: {whole}; "
            f"{means}.",
            *incomplete(data),
            table([*head, ""], rows),
            *of_fp8(data["rows"]),
        ]
    )


def epilogue(data: Record) -> str:
    """Beside torch.compile."""
    rows = [
        [
            row["shape"],
            row["activation"],
            f"{row['us']['torch']:.0f}",
            f"{row['us'][row['best']]:.0f} ({row['best'].removeprefix('compile, ').partition('-no')[0]})",
            f"{row['us']['ours']:.0f}",
            f"{row['us']['ours, no epilogue']:.0f}",
            f"{row['ratio']:.3f}",
            MARK[outcome(row)],
        ]
        for row in data["rows"]
    ]
    means = [f"{geomean(row['ratio'] for row in data['rows']):.3f}"]
    for text, short in ((f"K of {SHORT_K} and less", True), ("longer K", False)):
        some = [row["ratio"] for row in data["rows"] if (_extents(row)[2] <= SHORT_K) == short]
        means += [f"{geomean(some):.3f} of the {len(some)} with {text}"] if some else []
    head = ["M x N x K", "activation", "torch, us", "torch.compile's best, us", "ours, us", "ours without, us", "ratio"]
    return "\n\n".join(
        [
            f"### Bias and activation, {data['device']}",
            "`ts.linear(x, w, bias, activation=...)` beside `F.gelu(F.linear(x, w, bias))`, eager, and compiled, the "
            f"better of `default` and `max-autotune-no-cudagraphs`, {data['dtype']} ({where(data)}). *Ours without*: "
            f"the product alone. Geometric means of the ratios: {', '.join(means)}.",
            *incomplete(data),
            table([*head, ""], rows),
            *of_epilogue(data["rows"]),
        ]
    )


def search(data: Record) -> str:
    """The plan beside the best of its space."""
    rows = [
        [
            row["shape"], str(row["space"]), f"{row['us']['plan']:.1f}", f"{row['us']['best']:.1f}",
            f"{row['of_best']:.3f}", f"{row['ratio']:.3f}", row["plan"], row["best"],
        ]
        for row in data["rows"]
    ]  # fmt: skip
    shares = [row["of_best"] for row in data["rows"]]
    wrong = sum(len(row["wrong"]) for row in data["rows"])
    text = (
        f"The plan's choice beside the fastest of every plan there is, for shapes that the cost model was not fitted "
        f"to ({where(data)}). Geometric mean {geomean(shares):.3f}, worst {min(shares, default=float('nan')):.3f}."
    )
    if wrong:
        text += f" {wrong} plans failed or gave a wrong answer, and do not count."
    head = ["M x N x K", "plans", "plan, us", "best, us", "best / plan", "cuBLAS / plan", "plan", "best"]
    return "\n\n".join([f"### The plan's choice, {data['device']}", text, *incomplete(data), table(head, rows)])


def host(data: Record) -> str:
    """Microseconds of a call, seconds of the first."""
    calls = [row for row in data["rows"] if row["what"] == "call"]
    firsts = [row for row in data["rows"] if row["what"] == "first call"]
    names = list(dict.fromkeys(name for row in calls for name in row["us"]))
    parts = [
        f"### The host's part, {data['device']}",
        f"Host microseconds of an eager call like an earlier one, {data['batch']} calls without a wait, median of "
        f"{data['batches']} batches ({where(data)}).",
        *incomplete(data),
        table(
            ["M x N x K", *names],
            [[row["shape"], *(f"{row['us'][n]:.1f}" if n in row["us"] else "-" for n in names)] for row in calls],
        ),
    ]
    if firsts:
        shapes = [one["shape"] for one in firsts[0]["shapes"]]
        parts += [
            "Seconds of the first call of a shape, in this order in a fresh process, until its result is there. What "
            "the first of them takes with a filled cache is imports and look-ups, which *A process's first call, taken "
            "apart* has step by step; those behind it are what a kernel's own first call takes:",
            table(
                ["Triton's cache", *shapes],
                [[row["name"], *(f"{one['first_s']:.3f}" for one in row["shapes"])] for row in firsts],
            ),
        ]
    return "\n\n".join(parts)


def cluster(data: Record) -> str:
    """Workers of two CTAs that share a tile's columns, which were tried and not taken."""
    ways = ["torch.mm", "one CTA", "two CTAs"]
    rows = [
        [row["shape"], *(f"{row['us'][way]:.1f}" for way in ways),
         f"{row['us']['one CTA'] / row['us']['two CTAs']:.3f}",
         row["plans"]["two CTAs"].partition(", ")[2].replace(", grouped raster", "")]
        for row in data["rows"]
    ]  # fmt: skip
    return "\n\n".join([
        f"### Clusters, tried and not taken, {data['device']}",
        "A worker of two CTAs, which load their half of B's tile each and hand it to both (TMA multicast), beside "
        f"the same kernel without (Triton {data['triton']}, torch {data['torch']}, {data['date']}; branch "
        f"{data['branch']}: Triton 3.6 has no multicast, 3.7 compiles it wrong). The best of each kind's schedules, "
        "microseconds. What an SM reads from L2 stays the same, so it gains nothing where that binds.",
        table(["M x N x K", *ways, "one / two", "the two"], rows),
    ])  # fmt: skip


#: How a plan of the section `queues` gets its tiles: as the records have it, and for people.
HANDED_OUT = {"static": "static", "queue": "one queue", "queues": "a queue each"}


def queues(data: Record) -> str:
    """How tiles are handed out to workers: each way with the raster's group that suits it best on an idle device."""
    rows = []
    for row in data["rows"]:
        idle, held = row["us"], row["held_us"]
        for tile in dict.fromkeys(" ".join(name.split()[:2]) for name in idle if name != "cublas"):
            best = {
                way: min((name for name in idle if name.startswith(f"{tile} {way} ")), key=lambda name: idle[name])
                for way in HANDED_OUT
            }
            rows.append([
                row["shape"], tile.replace("_", "-"), f"{idle['cublas']:.1f}",
                *(f"{idle[name]:.1f} ({name.split()[-1]})" for name in best.values()), f"{held['cublas']:.1f}",
                *(f"{held[name]:.1f}" for name in best.values()),
            ])  # fmt: skip
    early = data["early"]
    drawn = f"asked for {early} steps of K before the present item's last" if early else "drawn when they are needed"
    head = ["M x N x K", "tile", "cuBLAS", *HANDED_OUT.values(), "held: cuBLAS", *HANDED_OUT.values()]
    return "\n\n".join([
        f"### How tiles are handed out, {data['device']}",
        f"Microseconds, {data['dtype']}, and in brackets the rows of tiles in the raster's group that suit it best on "
        f"the idle device; then with the same group while another kernel holds {data['held']} SMs. Tickets are {drawn} "
        f"({where(data)}).",
        *incomplete(data),
        table(head, rows),
    ])  # fmt: skip


SECTIONS: dict[str, Callable[[Record], str]] = {
    "suite": suite, "quack": quack, "fp8": fp8, "epilogue": epilogue, "search": search, "host": host,
    "queues": queues, "cluster": cluster,
}  # fmt: skip


def suffixes(results: Path) -> list[str]:
    """What the records' names end with, one a device: an H100's first."""
    found = {path.stem.removeprefix(f"gpu_gemm_{name}") for name in SECTIONS for path in _records(results, name)}
    return sorted(found)


def _records(results: Path, section: str) -> list[Path]:
    return sorted(results.glob(f"gpu_gemm_{section}*.json"))


def sections(results: Path) -> list[str]:
    """Markdown of all records there are, device by device. One without a row says nothing."""
    made = []
    for suffix in suffixes(results):
        parts = []
        for name, section in SECTIONS.items():
            data = _record(results, name, suffix)
            if not data["rows"]:
                continue
            if not parts:
                parts.append(f"## GEMM, {data['device']}")
            parts.append(section(data))
            if name == "suite":
                parts.append(f"![Ratio to cuBLAS by shape, {data['device']}](images/gpu_gemm{suffix}.png)")
                parts += [found] if (found := losses(data, _record(results, "counters", suffix), table)) else []
            if name == "quack":
                parts += of_quack(data["rows"], _record(results, "suite", suffix)["rows"])
        made += parts
    return made


def _record(results: Path, name: str, suffix: str) -> Record:
    """A section's record; one without rows where there is none."""
    path = results / f"gpu_gemm_{name}{suffix}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}


def plots(results: Path, images: Path) -> None:
    """One a device that has a suite."""
    for suffix in suffixes(results):
        path = results / f"gpu_gemm_suite{suffix}.json"
        data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
        if data["rows"]:
            plot(data, images / f"gpu_gemm{suffix}.png")


def plot(data: Record, path: Path) -> None:
    """The ratio of each shape with its quartiles, by class, and each class's geometric mean."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    colours = {"won": "#5c6b73", "even": "#9db4c0", "lost": "#e09f3e"}
    figure, axes = plt.subplots(figsize=(13, 5), layout="constrained")
    axes.axhline(1, color="black", linewidth=0.8)
    x, places, labels, shown = 0.0, [], [], set()
    for name, rows in by_group(data["rows"]).items():
        begin = x
        for row in rows:
            kind, (low, high) = outcome(row), row["band"]
            axes.vlines(x, low, high, color=colours[kind], linewidth=1.5, alpha=0.6)
            beyond = row["ratio"] > HIGHEST
            axes.plot(x, min(row["ratio"], HIGHEST), "^" if beyond else "o", color=colours[kind], markersize=4.5,
                      label=None if kind in shown else kind, clip_on=False)  # fmt: skip
            if beyond:
                axes.annotate(f"{row['ratio']:.1f}", (x, HIGHEST), xytext=(0, -12), textcoords="offset points",
                              ha="center", fontsize=7)  # fmt: skip
            shown.add(kind)
            places.append(x)
            labels.append(f"{_extents(row)[0]} {row['name']}" if row["name"] else row["shape"])
            x += 1
        mean = geomean(row["ratio"] for row in rows)
        label = "geometric mean" if begin == 0 else None
        axes.hlines(min(mean, HIGHEST), begin - 0.4, x - 0.6, color="#c0392b", linewidth=1.5, label=label)
        axes.annotate(f"{name}\n{mean:.3f}", ((begin + x - 1) / 2, 1), xycoords=("data", "axes fraction"),
                      ha="center", va="bottom", fontsize=8)  # fmt: skip
        x += 1
    axes.set_xticks(places, labels, rotation=90, fontsize=6.5)
    axes.set_xlim(-1, x - 1)
    axes.set_ylim(min(0.8, *(row["ratio"] - 0.02 for row in data["rows"])), HIGHEST)
    axes.set_ylabel("cuBLAS's time / ours")
    axes.set_title(f"ts.mm beside torch.mm, {data['dtype']}, {data['device']}: M and weight, or M x N x K", fontsize=10,
                   pad=30)  # fmt: skip
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
