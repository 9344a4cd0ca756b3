"""Timelines on the pages: a call, or what whole GPUs did, as a picture and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.core.paths import ROOT
from benchmarks.core.records import Data, load, paths
from tilestream.trace import LaunchTrace, draw
from tilestream_tools.trace.perfetto import load as load_trace

#: Pixels of a picture: across, of a worker's row, and of a lane.
_WIDTH, _ROW, _LANE = 1100, 4, 26
#: Of the lanes of a block, by their first word: matmuls, other kernels, copies.
_COLOURS = {
    "gather": "#3b6ea8", "w2": "#3b6ea8", "silu": "#7c93ab", "own": "#c9a227", "rows": "#2a9d6f", "sums": "#e4572e",
}  # fmt: skip


def name_of(path: Path) -> str:
    """A record's path, as a page names it."""
    there = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return f"`{there.as_posix()}`, for https://ui.perfetto.dev"


class Timelines(NamedTuple):
    """Traces of one kind, one launch each.

    Attributes
    ----------
    records
        The files' names begin so.
    picture
        A picture's name begins so, and ends as the record's, and with the device.
    head
        Pixels beside the workers' rows.
    says
        What is said of a launch, told where its record is and the picture's name.
    """

    records: str
    picture: str
    head: int
    says: Callable[[LaunchTrace, str, str], str]

    def sections(self, results: Path) -> list[str]:
        """Markdown of each record."""
        return [self._section(path) for path in self._paths(results)]

    def plots(self, results: Path, images: Path) -> None:
        """A picture of each."""
        for path in self._paths(results):
            images.mkdir(parents=True, exist_ok=True)
            (launch,) = load_trace(path)
            # Without the plan, which is in the text: a line of it all is wider than the picture.
            title = f"{launch.op}: {launch.label.partition(': ')[0]}"
            draw(launch, images / self._picture(path), title=title, size=(_WIDTH, self.head + _ROW * launch.workers))

    def _paths(self, results: Path) -> list[Path]:
        return paths(results, f"{self.records}*.json.gz")

    def _picture(self, path: Path) -> str:
        name = path.name.removesuffix(".json.gz").replace(self.records, self.picture)
        return f"{name}_{path.parent.name}.png"

    def _section(self, path: Path) -> str:
        (launch,) = load_trace(path)
        return self.says(launch, name_of(path), self._picture(path))


def lanes_picture(path: Path) -> str:
    """The picture of a record of what whole GPUs did: ``mlp_timeline_x<world>``."""
    return f"{path.stem.replace('_timeline', '')}_{path.parent.name}.png"


def plot_lanes(results: Path, images: Path) -> None:
    """A picture of each such record."""
    for path in paths(results, "mlp_timeline_x*.json"):
        images.mkdir(parents=True, exist_ok=True)
        _draw_lanes(load(path), images / lanes_picture(path))


def _draw_lanes(data: Data, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = data["rows"]
    inner, height = _LANE * len(rows), _LANE * len(rows) + 60
    made = Figure(figsize=(_WIDTH / 100, height / 100), dpi=100, facecolor="white")
    FigureCanvasAgg(made)
    axes = made.add_axes((0.17, 46 / height, 0.81, inner / height))
    for y, row in enumerate(rows):
        spans = [(begin / 1e3, (end - begin) / 1e3) for begin, end in row["spans"]]
        colour = _COLOURS[row["lane"].replace(":", " ").replace(",", " ").split()[0]]
        axes.broken_barh(spans, (y - 0.4, 0.8), facecolors=colour)
        if y and row["rank"] != rows[y - 1]["rank"]:
            axes.axhline(y - 0.5, color="#c4c4c4", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [f"GPU {row['rank']}  {row['lane']}" for row in rows], fontsize=8.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, data["ms"])
    axes.set_xlabel("ms", fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    made.savefig(path, dpi=100)
