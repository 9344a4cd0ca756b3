"""Sweeps as a picture: throughput against units left, with the line of what is left of the whole device's.

A panel a shape. Several sweeps are laid over one another: a colour an implementation, a dash a sweep. Needs matplotlib.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilestream_tools import palette
from tilestream_tools.palette import FAINT, GRID, SMALL, TEXT
from tilestream_tools.sweep.record import Point, Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Colours in the order of the implementations.
_COLOURS = {
    "auto": palette.OURS, "dynamic": palette.OURS, "static": palette.REDUCE, "stream_k": palette.SECOND,
    "told": palette.OTHER, "torch": palette.TEXT, "quack": palette.PINK, "quack-dynamic": palette.BRING,
}  # fmt: skip
#: What takes units away, by a point's ``by``, as a heading says it.
_TAKERS = {
    "neighbour": "while another kernel holds SMs", "green": "in green contexts", "nccl": "beside a collective",
    "busy": "while other processes hold cores",
}  # fmt: skip
#: Pixels of a panel, of the heading, and of a line of the legend.
_PANEL, _HEAD, _LEGEND = 265, 34, 19
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
    shapes = list(dict.fromkeys(point.shape for _, sweep in sweeps for point in sweep.points))
    if not shapes:
        raise ValueError("the sweeps hold no point: there is nothing to draw")
    columns = min(len(shapes), 2)
    rows = math.ceil(len(shapes) / columns)
    entries = len({(name, point.label) for name, sweep in sweeps for point in sweep.points}) + 1
    per_line = 4 if len(sweeps) == 1 else 2
    below = _LEGEND * math.ceil(entries / per_line) + 8
    height = _HEAD + _PANEL * rows + below
    try:
        figure = palette.figure(palette.WIDTH, height)
    except ImportError as error:
        raise ImportError("drawing a sweep takes matplotlib: pip install 'tilestream[plot]'") from error
    lines: dict[str, Any] = {}
    for at, shape in enumerate(shapes):
        axes = figure.add_subplot(rows, columns, at + 1)
        lines |= _panel(axes, shape, sweeps, at >= len(shapes) - columns)
    figure.legend(lines.values(), lines.keys(), loc="lower center", ncols=per_line, frameon=False, fontsize=SMALL)
    title = heading(sweeps)
    figure.text(0.015, 1 - 20 / height, title, fontsize=palette.TITLE, fontweight="bold", color=TEXT)
    figure.tight_layout(rect=(0, below / height, 1, 1 - _HEAD / height), h_pad=1.2)
    return palette.save(figure, Path(path), title)


def heading(sweeps: Sequence[tuple[str, Sweep]]) -> str:
    """What is shown, of which dtype, and, where there is one record, on which device."""
    points = [point for _, sweep in sweeps for point in sweep.points]
    taker = _TAKERS.get(points[0].by, points[0].by)
    device = sweeps[0][1].about.get("device") if len(sweeps) == 1 else None
    dtypes = ", ".join(dict.fromkeys(point.dtype for point in points))
    return f"GEMM {taker}, {dtypes}{f', {device}' if device else ''}"


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
        (line,) = axes.plot([0, units], [0, best], color=FAINT, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
        lines["in proportion to what is left"] = line
    for number, (name, points) in enumerate(mine):
        for label in dict.fromkeys(point.label for point in points):
            own = sorted((point for point in points if point.label == label), key=lambda point: point.left)
            queues = own[0].queues
            style: dict[str, Any] = {
                "color": _COLOURS.get(own[0].implementation, FAINT), "linestyle": _DASHES[number % len(_DASHES)],
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
    axes.set_title(title, fontsize=SMALL + 1, color=TEXT, loc="left")
    axes.set_ylim(bottom=0)
    left, right = (limit(point.left for point in every) for limit in (min, max))
    axes.set_xlim(left - 0.06 * (right - left or right), right + 0.04 * (right - left or right))
    axes.tick_params(colors=FAINT, labelsize=SMALL)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_ylabel("TFLOP/s", color=FAINT, fontsize=SMALL)
    if lowest:
        axes.set_xlabel("cores left" if every[0].by == "busy" else "SMs left", color=FAINT, fontsize=SMALL)
    return lines
