"""How many heads attention takes together, and how fast it is then, as a picture. For `render_attention`."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

Row = dict[str, Any]
_COLOURS = {64: "#5c6b73", 128: "#e09f3e", 256: "#9e2a2b"}


def rows_of(data: dict[str, Any]) -> list[Row]:
    """A record's rows of that kind: one a shape and run."""
    return [row for row in data["rows"] if row["name"].startswith("sizes ")]


def shapes(data: dict[str, Any]) -> dict[tuple[int, int], dict[int, float]]:
    """Of each width and length: rates by the number of heads, by cuDNN's of the same run; of several runs the mean."""
    found: dict[tuple[int, int], dict[int, list[float]]] = {}
    for row in rows_of(data):
        shape = found.setdefault((row["dim"], row["length"]), {})
        for name, rate in row["tflops"].items():
            if name.endswith(" heads"):
                shape.setdefault(int(name.partition(" ")[0]), []).append(rate / row["tflops"]["cudnn"])
    return {at: {size: fmean(rates) for size, rates in sorted(shape.items())} for at, shape in found.items()}


def picture(device_suffix: str) -> str:
    """The file's name."""
    return f"gpu_attention_sizes{device_suffix}.png"


def section(data: dict[str, Any], where: str, suffix: str) -> list[str]:
    """Words, and the picture."""
    found = shapes(data)
    if not found:
        return []
    lost = [1 - min(rates.values()) / max(rates.values()) for rates in found.values()]
    timed = sum(map(len, found.values()))
    return [
        f"Causal calls by how many heads are taken together: {timed} sizes of {len(found)} shapes ({where}). Against a "
        f"shape's fastest the slowest size loses {min(lost):.0%} to {max(lost):.0%}. {data.get('note', '')}".rstrip(),
        f"![Rates by the size of a group, {data['device']}](images/{picture(suffix)})",
    ]


def plot(data: dict[str, Any], path: Path) -> None:
    """A panel a length, a line a width: the rate, by the fastest, over the bytes of a group's keys and values."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    found = shapes(data)
    lengths = sorted({length for _, length in found})
    figure, panels = plt.subplots(1, len(lengths), figsize=(3.4 * len(lengths), 3.4), sharex=True, sharey=True,
                                  squeeze=False, layout="constrained")  # fmt: skip
    for axes, length in zip(panels[0], lengths, strict=True):
        for dim in sorted(dim for dim, of in found if of == length):
            rates, colour = found[dim, length], _COLOURS[dim]
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
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("rate, by the fastest")
    panels[0][0].legend(frameon=False, fontsize=8, loc="lower left")
    figure.suptitle(f"Heads that are taken together, causal; filled: a power of two; {data['device']}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)
