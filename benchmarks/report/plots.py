"""The plots of the pages. Each needs matplotlib, which is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.core.records import Data, records
from benchmarks.report import attention, contention, distributed, gemm, timelines
from benchmarks.report.tables import geomean

#: Where the plot of ratios ends: a ratio beyond stands at its edge, with its number.
HIGHEST = 1.3
_OURS, _PEER, _OTHER, _RED = "#e09f3e", "#5c6b73", "#9db4c0", "#c0392b"
_WIDTHS = {64: _PEER, 128: _OURS, 256: "#9e2a2b"}


def draw_all(results: Path, images: Path) -> None:
    for data in records(results, "stream"):
        if data["folder"] == "cpu":
            cpu_stream(data, images / "cpu_stream.png")
    for data in records(results, "gemm_suite"):
        suite(data, images / gemm.picture(data))
    for data in records(results, "attention"):
        lengths(data, images / f"attention_{data['folder']}.png")
    for data in records(results, "attention*"):
        if attention.sizes_of(data):
            sizes(data, images / f"attention_sizes_{data['folder']}.png")
    contention.plots(results, images)
    for of in (attention.TIMELINES, distributed.TIMELINES):
        of.plots(results, images)
    timelines.plot_lanes(results, images)


@contextmanager
def _figure(path: Path, title: str, size: tuple[float, float], panels: tuple[int, int] = (1, 1), dpi: int = 110,
            **how: Any) -> Iterator[Any]:  # fmt: skip
    """Panels to draw in, which are saved afterwards."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(*panels, figsize=size, layout="constrained", squeeze=False, **how)
    for one in axes.flat:
        one.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    yield axes
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    plt.close(figure)


def cpu_stream(data: Data, path: Path) -> None:
    """Streamed beside in turn, and the longer of its two parts."""
    title = f"256 MiB read cold and multiplied, {data['device']}, {data['cores']} cores"
    with _figure(path, title, (8, 4)) as ((axes,),):
        place = range(len(data["rows"]))
        read, multiply, streamed = (
            [row["ms"][name] for row in data["rows"]] for name in ("read", "multiply", "streamed")
        )
        axes.bar([x - 0.2 for x in place], read, 0.38, label="read", color=_OTHER)
        axes.bar([x - 0.2 for x in place], multiply, 0.38, bottom=read, label="then multiply", color=_PEER)
        axes.bar([x + 0.2 for x in place], streamed, 0.38, label="streamed", color=_OURS)
        for x, pair in enumerate(zip(read, multiply, strict=True)):
            label = None if x else "the longer of the two"
            axes.hlines(max(pair), x, x + 0.4, color="black", linewidth=1.5, label=label)
        axes.set_xticks(list(place), [str(row["shape"][1]) for row in data["rows"]])
        axes.set_xlabel("N: columns of the weight")
        axes.set_ylabel("ms")
        axes.legend(frameon=False)


def suite(data: Data, path: Path) -> None:
    """The ratio of each shape to cuBLAS with its quartiles, by class, and each class's geometric mean."""
    colours = {"won": _PEER, "even": _OTHER, "lost": _OURS}
    title = f"ts.mm beside torch.mm, {data['dtype']}, {data['device']}: M and weight, or M x N x K"
    with _figure(path, title, (13, 5)) as ((axes,),):
        axes.axhline(1, color="black", linewidth=0.8)
        x, places, labels, shown = 0.0, [], [], set()
        for name, rows in gemm.by_group(data["rows"]).items():
            begin = x
            for row in rows:
                kind, beyond = gemm.outcome(row), row["ratio"] > HIGHEST
                axes.vlines(x, *row["band"], color=colours[kind], linewidth=1.5, alpha=0.6)
                axes.plot(x, min(row["ratio"], HIGHEST), "^" if beyond else "o", color=colours[kind], markersize=4.5,
                          label=None if kind in shown else kind, clip_on=False)  # fmt: skip
                if beyond:
                    axes.annotate(f"{row['ratio']:.1f}", (x, HIGHEST), xytext=(0, -12), textcoords="offset points",
                                  ha="center", fontsize=7)  # fmt: skip
                shown.add(kind)
                places.append(x)
                labels.append(f"{gemm.extents(row)[0]} {row['name']}" if row["name"] else row["shape"])
                x += 1
            mean = geomean(row["ratio"] for row in rows)
            label = "geometric mean" if begin == 0 else None
            axes.hlines(min(mean, HIGHEST), begin - 0.4, x - 0.6, color=_RED, linewidth=1.5, label=label)
            axes.annotate(f"{name}\n{mean:.3f}", ((begin + x - 1) / 2, 1), xycoords=("data", "axes fraction"),
                          ha="center", va="bottom", fontsize=8)  # fmt: skip
            x += 1
        axes.set_xticks(places, labels, rotation=90, fontsize=6.5)
        axes.set_xlim(-1, x - 1)
        axes.set_ylim(min(0.8, *(row["ratio"] - 0.02 for row in data["rows"])), HIGHEST)
        axes.set_ylabel("cuBLAS's time / ours")
        axes.legend(frameon=False, fontsize=8, ncols=4, loc="lower right")


def lengths(data: Data, path: Path) -> None:
    """Rates of attention by the length of a sequence: a panel a width and mask, a line for ours and each peer."""
    rows = attention.dense_calls(data)
    dims = list(dict.fromkeys(row["dim"] for row in rows))
    colours = {"ts": _OURS, "cudnn": _PEER, "fa4": _OTHER}
    title = f"ts.attention, {data['dtype']}, {data['device']}"
    size = (4.2 * len(dims), 6.4)
    with _figure(path, title, size, (2, len(dims)), 100, sharex=True, sharey=True) as panels:
        for line, causal in zip(panels, (True, False), strict=True):
            for axes, dim in zip(line, dims, strict=True):
                some = sorted((r for r in rows if (r["dim"], r["causal"]) == (dim, causal)), key=lambda r: r["length"])
                for name, label in {"ts": "tilestream", **attention.PEERS}.items():
                    points = [(row["length"], row["tflops"][name]) for row in some if name in row["tflops"]]
                    if points:
                        axes.plot(*zip(*points, strict=True), "o-", color=colours[name], markersize=4, label=label)
                axes.set_xscale("log", base=2)
                axes.set_title(f"D {dim}, {'causal' if causal else 'full'}", fontsize=9)
                axes.grid(visible=True, color="#e4e4e4", linewidth=0.6)
            line[0].set_ylabel("TFLOP/s")
        panels[0][0].set_ylim(0, 1.05 * max(rate for row in rows for rate in row["tflops"].values()))
        ticks = sorted({row["length"] for row in rows})
        panels[0][0].set_xticks(ticks, [str(x) if x < 1024 else f"{x // 1024}k" for x in ticks])
        for axes in panels[-1]:
            axes.set_xlabel("S, of 16k tokens")
        panels[0][0].legend(frameon=False, fontsize=8, loc="lower right")


def sizes(data: Data, path: Path) -> None:
    """A panel a length, a line a width: the rate, by the fastest, over the bytes of a group's keys and values."""
    found = attention.sizes_of(data)
    lengths = sorted({length for _, length in found})
    title = f"Heads that are taken together, causal; filled: a power of two; {data['device']}"
    size = (3.4 * len(lengths), 3.4)
    with _figure(path, title, size, (1, len(lengths)), 100, sharex=True, sharey=True) as (panels,):
        for axes, length in zip(panels, lengths, strict=True):
            for dim in sorted(dim for dim, of in found if of == length):
                rates, colour = found[dim, length], _WIDTHS[dim]
                most = max(rates.values())
                points = {size: (4e-6 * size * length * dim, rate / most) for size, rate in rates.items()}
                axes.plot(*zip(*points.values(), strict=True), "-", color=colour, linewidth=1, label=f"D {dim}")
                for power, face in ((False, "white"), (True, colour)):
                    some = [at for size, at in points.items() if (size & (size - 1) == 0) == power]
                    if some:
                        axes.plot(*zip(*some, strict=True), "o", color=colour, markerfacecolor=face, markersize=4)
            axes.set_xscale("log", base=2)
            axes.set_xticks([2, 4, 8, 16, 32], ["2", "4", "8", "16", "32"])
            axes.set_title(f"S {length}", fontsize=9)
            axes.set_xlabel("MB of keys and values")
            axes.grid(visible=True, color="#e4e4e4", linewidth=0.6)
        panels[0].set_ylabel("rate, by the fastest")
        panels[0].legend(frameon=False, fontsize=8, loc="lower left")
