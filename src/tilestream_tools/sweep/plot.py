"""Sweeps as a picture: throughput against units left, with the line of what is left of the whole device's.

A panel a shape. Several sweeps are laid over one another: a colour an implementation, a dash a sweep. Needs matplotlib.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilestream_tools.sweep.record import Point, Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DPI = 100
_TEXT, _FAINT = "#22262b", "#6b7280"
#: Colours for colour-blind readers, in the order of the implementations.
_COLOURS = {
    "auto": "#0072b2", "dynamic": "#0072b2", "static": "#d55e00", "stream_k": "#009e73", "told": "#56b4e9",
    "torch": "#22262b", "quack": "#cc79a7", "quack-dynamic": "#e69f00",
}  # fmt: skip
_DASHES = ("-", "--", ":", "-.")
_MARKS = ("o", "s", "^", "D")


def draw(sweeps: Sequence[tuple[str, Sweep]], path: str | os.PathLike[str]) -> Path:
    """Draw sweeps, each with the name that the legend calls it, into one picture.

    Parameters
    ----------
    sweeps
        ``(name, sweep)``.
    path
        PNG, SVG or PDF, by its ending.

    Raises
    ------
    ValueError
        If there is no point to draw.
    ImportError
        If matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing a sweep takes matplotlib: pip install 'tilestream[plot]'") from error
    shapes = list(dict.fromkeys(point.shape for _, sweep in sweeps for point in sweep.points))
    if not shapes:
        raise ValueError("the sweeps hold no point: there is nothing to draw")
    columns = min(len(shapes), 2 if len(shapes) <= 4 else 3)
    rows = math.ceil(len(shapes) / columns)
    figure = Figure(figsize=(1.2 + 5.4 * columns, 1.3 + 3.7 * rows), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    lines: dict[str, Any] = {}
    for at, shape in enumerate(shapes):
        axes = figure.add_subplot(rows, columns, at + 1)
        lines |= _panel(axes, shape, sweeps, at >= len(shapes) - columns)
    figure.legend(
        lines.values(),
        lines.keys(),
        loc="lower center",
        ncols=min(len(lines), 2 * columns),
        frameon=False,
        fontsize=9.5,
    )
    below = 0.35 + 0.22 * math.ceil(len(lines) / (2 * columns))
    figure.tight_layout(rect=(0, below / figure.get_figheight(), 1, 1))
    path = Path(path)
    figure.savefig(path, dpi=DPI)
    return path


def whole(points: Sequence[Point]) -> float:
    """The better throughput on the whole device, of ours and torch's: what the proportional line is of; 0: unknown."""
    rates = [point.tflops for point in points if point.taken == 0]
    return max(rates, default=0.0)


def _panel(axes: Axes, shape: str, sweeps: Sequence[tuple[str, Sweep]], lowest: bool) -> dict[str, Any]:
    mine = [(name, [point for point in sweep.points if point.shape == shape]) for name, sweep in sweeps]
    every = [point for _, points in mine for point in points]
    lines: dict[str, Any] = {}
    if best := whole(every):
        units = max(point.units for point in every)
        (line,) = axes.plot([0, units], [0, best], color=_FAINT, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
        lines["in proportion to what is left"] = line
    for number, (name, points) in enumerate(mine):
        for label in dict.fromkeys(point.label for point in points):
            own = sorted((point for point in points if point.label == label), key=lambda point: point.left)
            queues = own[0].queues
            style: dict[str, Any] = {
                "color": _COLOURS.get(own[0].implementation, _FAINT), "linestyle": _DASHES[number % len(_DASHES)],
                "marker": _MARKS[int(math.log2(queues)) % len(_MARKS)], "markersize": 4, "linewidth": 1.6,
            }  # fmt: skip
            x = [point.left for point in own]
            (line,) = axes.plot(x, [point.tflops for point in own], zorder=3, **style)
            # What the quartiles of the times make of the same work.
            low = [point.tflops * point.seconds / point.high for point in own]
            high = [point.tflops * point.seconds / point.low for point in own]
            axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0, zorder=2)
            lines[f"{name}: {label}" if len(sweeps) > 1 else label] = line
    title = next((f"{shape}  {point.name}".strip() for point in every), shape)
    axes.set_title(title, fontsize=11, color=_TEXT, loc="left")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.tick_params(colors=_FAINT, labelsize=9)
    axes.grid(color="#e8eaee", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_ylabel("TFLOP/s", color=_FAINT, fontsize=9.5)
    if lowest:
        axes.set_xlabel("cores left" if every[0].by == "busy" else "SMs left", color=_FAINT, fontsize=9.5)
    return lines
