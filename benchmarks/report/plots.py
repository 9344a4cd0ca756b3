"""The pictures of the documentation, as wide as a page. Matplotlib is imported when one is drawn."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.core.paths import IMAGES, RESULTS
from benchmarks.core.records import Data, records
from benchmarks.distributed.floors import judged
from benchmarks.report import (
    arrival,
    attention,
    contention,
    distributed,
    gemm,
    gemm_random,
    schedule_pictures,
    timelines,
)
from benchmarks.report.tables import geomean
from tilestream_tools import palette
from tilestream_tools.palette import FAINT, GRID, SMALL, TEXT
from tilestream_tools.trace.draw import draw
from tilestream_tools.trace.perfetto import load

#: Where the plot of ratios ends: a ratio beyond stands at its edge, with its number.
HIGHEST = 1.3
#: Of a result.
_OUTCOMES = {"won": palette.OURS, "even": palette.NEUTRAL, "lost": palette.REDUCE}
#: Of the kinds of random problems, and where the axis of their ratios ends.
_KINDS = {
    "rows of 64": palette.OURS, "rows of 8": palette.REDUCE, "even rows": palette.BRING, "odd rows": palette.SECOND,
    "fp8": palette.PINK,
}  # fmt: skip
_RATIOS = (0.5, 0.7, 0.8, 0.9, 1, 1.25, 1.5, 2, 4, 8)
#: Of the ways to multiply rows that come from the host's memory: colour, mark, and what the legend says.
_WAYS = {
    "in turn": (palette.PEER, "s", "copy + torch.mm, in turn"),
    "by hand": (palette.BRING, "^", "by hand, in 8 chunks"),
    "streamed": (palette.OTHER, "o", "stream_in in each call"),
    "restarted": (palette.OURS, "o", "a stream, restarted"),
}  # fmt: skip
#: Of head dims.
_WIDTHS = {64: palette.PEER, 128: palette.OURS, 256: palette.REDUCE}


def main(arguments: list[str]) -> None:
    """Every picture of the documentation, or into another folder."""
    folder = Path(arguments[0]) if arguments else IMAGES
    draw_all(RESULTS, folder)
    schedule_pictures.main([str(folder)])
    (launch,) = load(RESULTS / "cpu" / "trace_demo.json.gz")
    draw(launch, folder / "demo.png", title="matmul, its input read from a disk meanwhile, AMD EPYC, 2 cores")


def draw_all(results: Path, images: Path) -> None:
    """The pictures of docs/performance."""
    for data in records(results, "stream"):
        if data["folder"] == "cpu":
            cpu_stream(data, images / "cpu_stream.png")
    for data in records(results, "gemm_suite"):
        suite(data, images / gemm.picture(data))
    for data in records(results, "gemm_random_*"):
        scatter(data, images / gemm_random.picture(data))
    for data in records(results, "host_to_device"):
        streams(data, images / arrival.picture(data))
    gathers = records(results, "all_gather_x*")
    for folder in dict.fromkeys(data["folder"] for data in gathers):
        some = [data for data in gathers if data["folder"] == folder]
        ranks(some, images / distributed.picture(some[0]))
    for data in records(results, "attention"):
        lengths(data, images / f"attention_{data['folder']}.png")
    for data in records(results, "attention*"):
        if attention.sizes_of(data):
            sizes(data, images / f"attention_sizes_{data['folder']}.png")
    contention.plots(results, images)
    for of in (attention.TIMELINES, arrival.CAPTURED, distributed.TIMELINES, distributed.CAPTURED):
        of.plots(results, images)
    timelines.plot_lanes(results, images)


@contextmanager
def _figure(path: Path, title: str, height: float, panels: tuple[int, int] = (1, 1), **how: Any) -> Iterator[Any]:
    """Panels to draw in, as wide as a page, which are saved afterwards."""
    import matplotlib as mpl

    with mpl.rc_context({"font.size": SMALL, "axes.titlesize": SMALL, "axes.labelcolor": FAINT, "xtick.color": FAINT,
                         "ytick.color": FAINT, "text.color": TEXT, "axes.edgecolor": FAINT}):  # fmt: skip
        figure = palette.figure(palette.WIDTH, height)
        figure.set_layout_engine("constrained", h_pad=0.06, w_pad=0.06)
        axes = figure.subplots(*panels, squeeze=False, **how)
        for one in axes.flat:
            one.spines[["top", "right"]].set_visible(False)
        figure.suptitle(title, fontsize=palette.TITLE, fontweight="bold", x=0.012, ha="left")
        yield axes
        path.parent.mkdir(parents=True, exist_ok=True)
        palette.save(figure, path, title)


def _legend(axes: Any, count: int, **where: Any) -> None:
    """Below the panels, in a line."""
    handles, labels = axes.get_legend_handles_labels()
    axes.figure.legend(handles, labels, loc="outside lower center", ncols=count, frameon=False, **where)


def cpu_stream(data: Data, path: Path) -> None:
    """Streamed beside in turn, and the longer of its two parts."""
    title = f"256 MiB read cold and multiplied, {data['device']}, {data['cores']} cores"
    with _figure(path, title, 380) as ((axes,),):
        place = range(len(data["rows"]))
        read, multiply, streamed = (
            [row["ms"][name] for row in data["rows"]] for name in ("read", "multiply", "streamed")
        )
        axes.bar([x - 0.2 for x in place], read, 0.38, label="read", color=palette.BRING)
        axes.bar([x - 0.2 for x in place], multiply, 0.38, bottom=read, label="then multiply", color=palette.PEER)
        axes.bar([x + 0.2 for x in place], streamed, 0.38, label="streamed", color=palette.OURS)
        for x, pair in enumerate(zip(read, multiply, strict=True)):
            label = None if x else "the longer of the two"
            axes.hlines(max(pair), x, x + 0.4, color="black", linewidth=1.5, label=label)
        axes.set_xticks(list(place), [str(row["shape"][1]) for row in data["rows"]])
        axes.set_xlabel("N: columns of the weight")
        axes.set_ylabel("ms")
        _legend(axes, 4)


def streams(data: Data, path: Path) -> None:
    """A line a shape: the time of each way by the longer of copy and matmul, which no overlap goes below."""
    title = f"Rows copied from the host while multiplied, {data['dtype']}, {data['device']}"
    with _figure(path, title, 460) as ((axes,),):
        axes.axvline(1, color=TEXT, linewidth=0.8)
        place = range(len(data["rows"]))
        for way, (colour, mark, label) in _WAYS.items():
            times = [row["ms"][way] if way in row["ms"] else row["ms"]["copy"] + row["ms"]["torch.mm"]
                     for row in data["rows"]]  # fmt: skip
            shares = [ms / max(row["ms"]["copy"], row["ms"]["multiply"])
                      for ms, row in zip(times, data["rows"], strict=True)]  # fmt: skip
            axes.plot(shares, place, mark, color=colour, markersize=6, label=label)
        axes.set_yticks(list(place), [row["shape"] for row in data["rows"]])
        axes.invert_yaxis()
        axes.set_ylabel("M x N x K; rows of A arrive, or the weight")
        axes.set_xlabel("time / the longer of copy and matmul")
        axes.grid(visible=True, color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        _legend(axes, 4)


def ranks(found: list[Data], path: Path) -> None:
    """A column an op and number of GPUs: the ratio of each shape to the best peer, as ours is called, and the mean."""
    title = f"ts.distributed as called, {found[0]['dtype']}, {found[0]['device']}"
    with _figure(path, title, 430) as ((axes,),):
        axes.axhline(1, color=TEXT, linewidth=0.8)
        labels = []
        for op, name in distributed.TITLES.items():
            for data in found:
                rows = sorted((row for row in data["rows"] if row["op"] == op), key=lambda row: row["m"] * row["n"])
                ratios = [told.ratio for row in rows if (told := judged(row)) is not None]
                if not ratios:
                    continue
                place, mean = len(labels), geomean(ratios)
                for number, ratio in enumerate(ratios):
                    x = place - 0.36 + 0.72 * (number + 0.5) / len(ratios)
                    axes.plot(x, ratio, "o", color=_OUTCOMES["won" if ratio >= 1 else "lost"], markersize=5)
                axes.hlines(mean, place - 0.4, place + 0.4, color=TEXT, linewidth=2, zorder=1)
                shapes = f"{len(ratios)} shape{'s' * (len(ratios) > 1)}"
                labels.append(f"{name}\n{data['world']} GPUs, {shapes}\nmean {mean:.3f}\nworst {min(ratios):.3f}")
        axes.set_xticks(range(len(labels)), labels)
        axes.tick_params(axis="x", length=0, labelcolor=TEXT)
        axes.set_xlim(-0.5, len(labels) - 0.5)
        axes.set_ylabel("best of NCCL and torch: its time / ours")
        axes.set_xlabel("matmul beside its collective; small outputs first")
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        for kind, label in (("won", "faster than the best"), ("lost", "slower")):
            axes.plot([], [], "o", color=_OUTCOMES[kind], label=label)
        axes.plot([], [], "-", color=TEXT, linewidth=2, label="geometric mean")
        _legend(axes, 3)


def suite(data: Data, path: Path) -> None:
    """A column a class: the ratio of each shape to cuBLAS with its quartiles, small shapes first, and the mean."""
    title = f"ts.mm beside torch.mm, {data['dtype']}, {data['device']}"
    groups = gemm.by_group(data["rows"])
    with _figure(path, title, 430) as ((axes,),):
        axes.axhline(1, color=TEXT, linewidth=0.8)
        labels = []
        for place, (name, rows) in enumerate(groups.items()):
            rows = sorted(rows, key=lambda row: math.prod(gemm.extents(row)))
            for number, row in enumerate(rows):
                x = place - 0.36 + 0.72 * (number + 0.5) / len(rows)
                colour, beyond = _OUTCOMES[gemm.outcome(row)], row["ratio"] > HIGHEST
                axes.vlines(x, *(min(edge, HIGHEST) for edge in row["band"]), color=colour, linewidth=1.5, alpha=0.6)
                mark = "^" if beyond else "o"
                axes.plot(x, min(row["ratio"], HIGHEST), mark, color=colour, markersize=5, clip_on=False)
            mean = geomean(row["ratio"] for row in rows)
            axes.hlines(min(mean, HIGHEST), place - 0.4, place + 0.4, color=TEXT, linewidth=2, zorder=1)
            beyond = [f"{row['ratio']:.1f}" for row in rows if row["ratio"] > HIGHEST]
            if beyond:
                text = ",\n".join(beyond)
                axes.annotate(text, (place, HIGHEST), xytext=(0, -9), textcoords="offset points", ha="center", va="top")
            worst = min(row["ratio"] for row in rows)
            shapes = f"{len(rows)} shape{'s' * (len(rows) > 1)}"
            labels.append(f"{name}\n{shapes}\nmean {mean:.3f}\nworst {worst:.3f}")
        axes.set_xticks(range(len(groups)), labels)
        axes.tick_params(axis="x", length=0, labelcolor=TEXT)
        axes.set_xlim(-0.5, len(groups) - 0.5)
        axes.set_ylim(min(0.8, *(row["ratio"] - 0.02 for row in data["rows"])), HIGHEST)
        axes.set_ylabel("cuBLAS's time / ours")
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        there = {gemm.outcome(row) for row in data["rows"]}
        for kind in filter(there.__contains__, _OUTCOMES):
            axes.plot([], [], "o", color=_OUTCOMES[kind], label=kind)
        axes.plot([], [], "-", color=TEXT, linewidth=2, label="geometric mean")
        if any(row["ratio"] > HIGHEST for row in data["rows"]):
            axes.plot([], [], "^", color=FAINT, label="beyond the axis: its number")
        _legend(axes, 5)


def scatter(data: Data, path: Path) -> None:
    """Random problems: the ratio to torch's call by operations, a colour for how rows lie."""
    title = f"ts.matmul beside torch's calls, seed {data['seed']}, {data['device']}"
    with _figure(path, title, 460) as ((axes,),):
        axes.axhline(1, color=TEXT, linewidth=0.8)
        for kind, colour in _KINDS.items():
            some = [row for row in data["rows"] if row["kind"] == kind]
            if some:
                held = [min(max(row["ratio"], _RATIOS[0]), _RATIOS[-1]) for row in some]
                label = f"{kind}: {geomean(row['ratio'] for row in some):.3f}"
                axes.plot([row["operations"] * 1e-9 for row in some], held, "o", color=colour, markersize=4.5,
                          alpha=0.8, label=label, clip_on=False)  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_ylim(_RATIOS[0], _RATIOS[-1])
        axes.set_yticks(_RATIOS, [str(ratio) for ratio in _RATIOS])
        axes.yaxis.minorticks_off()
        axes.xaxis.minorticks_off()
        axes.grid(visible=True, color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_xlabel("GFLOP")
        axes.set_ylabel("torch's time / ours")
        _legend(
            axes, 5, title="lengths of A's and B's rows in memory (multiples of 64, of 8, ...), or fp8: geometric mean"
        )


def lengths(data: Data, path: Path) -> None:
    """Rates of attention by the length of a sequence: a panel a head dim and mask, a line for ours and each peer."""
    rows = attention.dense_calls(data)
    dims = sorted(dict.fromkeys(row["dim"] for row in rows))
    styles = {"ts": (palette.OURS, "o"), "cudnn": (palette.PEER, "s"), "fa4": (palette.BRING, "^")}
    title = f"ts.attention, {data['dtype']}, {data['device']}"
    with _figure(path, title, 500, (2, len(dims)), sharex=True, sharey=True) as panels:
        for line, causal in zip(panels, (True, False), strict=True):
            for axes, dim in zip(line, dims, strict=True):
                some = sorted((r for r in rows if (r["dim"], r["causal"]) == (dim, causal)), key=lambda r: r["length"])
                for name, label in {"ts": "tilestream", **attention.PEERS}.items():
                    points = [(row["length"], row["tflops"][name]) for row in some if name in row["tflops"]]
                    if points:
                        colour, mark = styles[name]
                        axes.plot(*zip(*points, strict=True), mark + "-", color=colour, markersize=4, label=label)
                axes.set_xscale("log", base=2)
                axes.set_title(f"head dim {dim}, {'causal' if causal else 'non-causal'}")
                axes.grid(visible=True, color=GRID, linewidth=0.6)
            line[0].set_ylabel("TFLOP/s")
        panels[0][0].set_ylim(0, 1.05 * max(rate for row in rows for rate in row["tflops"].values()))
        ticks = sorted({row["length"] for row in rows})
        panels[0][0].set_xticks(ticks, [str(x) if x < 1024 else f"{x // 1024}k" for x in ticks])
        panels[0][0].xaxis.minorticks_off()
        for axes in panels[-1]:
            axes.set_xlabel("sequence length, 16k tokens in all")
        _legend(panels[0][0], 3)


def sizes(data: Data, path: Path) -> None:
    """A panel a head dim and length: the rate of each group of heads, by the fastest of the panel."""
    found = attention.sizes_of(data)
    dims, lengths = (sorted({at[which] for at in found}) for which in (0, 1))
    title = f"Attention by heads computed at once, causal, {data['device']}"
    with _figure(path, title, 90 + 130 * len(dims), (len(dims), len(lengths)), sharex=True, sharey=True) as panels:
        for dim, line in zip(dims, panels, strict=True):
            colour = _WIDTHS[dim]
            for length, axes in zip(lengths, line, strict=True):
                rates = found.get((dim, length), {})
                most = max(rates.values(), default=1.0)
                for power, face, label in (
                    (True, colour, "heads at once: a power of two"),
                    (False, "white", "another number"),
                ):
                    some = [(4e-6 * size * length * dim, rate / most) for size, rate in rates.items()
                            if (size & (size - 1) == 0) == power]  # fmt: skip
                    if some:
                        axes.plot(*zip(*some, strict=True), "o", color=colour, markerfacecolor=face, markersize=4.5)
                    axes.plot([], [], "o", color=TEXT, markerfacecolor=TEXT if power else "white", label=label)
                axes.set_xscale("log", base=2)
                axes.set_xticks([2, 4, 8, 16, 32], ["2", "4", "8", "16", "32"])
                axes.xaxis.minorticks_off()
                axes.grid(visible=True, color=GRID, linewidth=0.6)
                if dim == dims[0]:
                    axes.set_title(f"sequence length {length}")
                if dim == dims[-1]:
                    axes.set_xlabel("MB of their keys and values")
            line[0].set_ylabel(f"head dim {dim}:\nrate / fastest")
        _legend(panels[0][0], 2)
