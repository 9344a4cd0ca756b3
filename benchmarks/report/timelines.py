"""Timelines on the pages: a call, or what whole GPUs did, as a picture and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.core.paths import ROOT
from benchmarks.core.records import Data, load, paths
from benchmarks.report.tables import device_of
from tilestream.trace import LaunchTrace, draw
from tilestream_tools import palette
from tilestream_tools.trace.perfetto import load as load_trace

#: Pixels of a page: of a worker's row, and of a lane.
_ROW, _LANE = 3, 17
#: Of the lanes of a block, by their names in records: on the picture, their colour, and what the legend says of it.
_LANES = {
    "gather: w1, w3": ("w1, w3 as rows arrive", palette.OURS, "matmul"),
    "w2, and publish": ("w2, which publishes", palette.OURS, "matmul"),
    "silu, sum": ("SiLU, final sum", palette.NEUTRAL, "other kernels"),
    "own rows": ("own rows", palette.BRING, "copy of its own rows"),
    "rows of others": ("peers' rows", palette.SECOND, "all-gather (copies)"),
    "sums of others": ("peers' sums", palette.REDUCE, "reduce-scatter (copies)"),
}
#: The same of a mixture of experts.
_MIXTURE = {
    "sort, add": ("sort, add", palette.NEUTRAL, "other kernels"),
    "push rows": ("push rows", palette.BRING, "dispatch"),
    "wait": ("wait for peers", palette.FAINT, "wait (one warp)"),
    "own rows": ("own rows", palette.OURS, "grouped matmul"),
    "rows of others": ("peers' rows", palette.OURS, "grouped matmul"),
    "push results": ("push results", palette.REDUCE, "combine"),
}
#: Records of what whole GPUs did.
BLOCKS = ("mlp_timeline_x*.json", "moe_timeline_x*.json")
#: Of a way to gather, by the end of a record's name: what the title says.
_WAYS = {"_push": ", pushed", "_pull": ", pulled"}


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
        Pixels of a page beside the workers' rows.
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
            # Without the plan, which is in the text.
            way = next((text for end, text in _WAYS.items() if end in path.name), "")
            title = f"{launch.op}: {launch.label.partition(': ')[0]}{way}"
            draw(launch, images / self._picture(path), title=title, size=(
                palette.SCALE * palette.WIDTH, palette.SCALE * (self.head + _ROW * launch.workers)
            ))  # fmt: skip

    def _paths(self, results: Path) -> list[Path]:
        return paths(results, f"{self.records}*.json.gz")

    def _picture(self, path: Path) -> str:
        name = path.name.removesuffix(".json.gz").replace(self.records, self.picture)
        return f"{name}_{path.parent.name}.png"

    def _section(self, path: Path) -> str:
        (launch,) = load_trace(path)
        return self.says(launch, name_of(path), self._picture(path))


def lanes_picture(path: Path) -> str:
    """The picture of a record of what whole GPUs did: ``mlp_timeline_x<world>``, ``moe_timeline_x<world>``."""
    return f"{path.stem.replace('_timeline', '')}_{path.parent.name}.png"


def plot_lanes(results: Path, images: Path) -> None:
    """A picture of each such record."""
    for path in (path for names in BLOCKS for path in paths(results, names)):
        images.mkdir(parents=True, exist_ok=True)
        _draw_lanes(load(path), images / lanes_picture(path))


def _draw_lanes(data: Data, path: Path) -> None:
    from matplotlib.patches import Patch

    rows, inner = data["rows"], _LANE * len(data["rows"])
    height = inner + 124
    lanes, block = _LANES, f"A tensor-parallel MLP block, forward, {data['tokens']} tokens"
    if "of" in data:
        lanes, block = _MIXTURE, f"A mixture of experts ({data['of']}), {data['tokens']} tokens a rank, {data['skew']}"
    title = f"{block}, {data['dtype']}, {device_of(data)}"
    made = palette.figure(palette.WIDTH, height)
    axes = made.add_axes((0.21, 76 / height, 0.77, inner / height))
    legend = {}
    for y, row in enumerate(rows):
        spans = [(begin / 1e3, (end - begin) / 1e3) for begin, end in row["spans"]]
        _, colour, what = lanes[row["lane"]]
        axes.broken_barh(spans, (y - 0.4, 0.8), facecolors=colour)
        if spans:
            legend[what] = Patch(facecolor=colour, label=what)
        if y and row["rank"] != rows[y - 1]["rank"]:
            axes.axhline(y - 0.5, color=palette.FAINT, linewidth=0.8)
            axes.axhline(y - 0.5, -0.27, 0, color=palette.FAINT, linewidth=0.8, clip_on=False)
    axes.set_yticks(
        range(len(rows)), [lanes[row["lane"]][0] for row in rows], fontsize=palette.SMALL, color=palette.TEXT
    )
    for rank in dict.fromkeys(row["rank"] for row in rows):
        places = [y for y, row in enumerate(rows) if row["rank"] == rank]
        made.text(12 / palette.WIDTH, (76 + inner - _LANE * (sum(places) / len(places) + 0.5)) / height, f"GPU {rank}",
                  fontsize=palette.SMALL, fontweight="bold", va="center", color=palette.TEXT)  # fmt: skip
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.01 * data["ms"])
    axes.set_xlabel("ms from the block's start", fontsize=palette.SMALL, color=palette.FAINT)
    axes.tick_params(axis="x", labelsize=palette.SMALL, colors=palette.FAINT)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=palette.GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    made.text(12 / palette.WIDTH, 1 - 24 / height, title, fontsize=palette.TITLE, fontweight="bold", color=palette.TEXT)
    made.legend(handles=list(legend.values()), loc="lower center", ncols=len(legend), frameon=False,
                fontsize=palette.SMALL, columnspacing=1.2, handlelength=1.5, labelcolor=palette.TEXT)  # fmt: skip
    palette.save(made, path, title)
