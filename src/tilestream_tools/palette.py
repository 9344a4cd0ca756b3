"""What all pictures share: Okabe and Ito's colours, told apart by colour-blind readers, and sizes read at 800 pixels.

A picture is laid out in pixels of a page that shows it `WIDTH` wide, and saved with `SCALE` pixels for each. Neither
matplotlib nor numpy is imported before `figure` makes one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

WIDTH, SCALE = 800, 2
#: Pixels an inch of the layout: matplotlib counts in inches.
DPI = 100
#: Points of text: 8.5 are 12 pixels. Nothing is smaller.
SMALL, TITLE = 8.5, 11.5

OURS, PEER, OTHER, SECOND = "#0072b2", "#4a4f57", "#56b4e9", "#009e73"
BRING, REDUCE, PINK = "#e69f00", "#d55e00", "#cc79a7"
#: A tile that waited for nothing, where its edges are seen.
NEUTRAL = "#7c93ab"
TEXT, FAINT, GRID = "#22262b", "#5b6470", "#e4e7eb"


def figure(width: float, height: float, scale: float = SCALE) -> Figure:
    """An empty picture of ``width`` x ``height`` pixels of a page, outside pyplot's state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A hundredth of a pixel more: matplotlib rounds down.
    made = Figure(figsize=((width + 0.01) / DPI, (height + 0.01) / DPI), dpi=DPI * scale, facecolor="white")
    FigureCanvasAgg(made)
    return made


def save(made: Figure, path: Path, title: str) -> Path:
    """Write a picture, with its title as a property of the file; a picture made again has the same bytes."""
    endings: dict[str, dict[str, Any]] = {
        ".png": {"metadata": {"Title": title, "Software": None}, "pil_kwargs": {"optimize": True}},
        ".svg": {"metadata": {"Title": title, "Date": None}},
    }
    made.savefig(path, dpi="figure", **endings.get(path.suffix, {}))
    return path
