"""Timelines on docs/performance.md: a call, or what whole GPUs did, as a picture and what is said of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tilestream.trace import LaunchTrace, draw
from tilestream.trace.perfetto import load

#: Pixels of a picture: across, and of a worker's row.
_WIDTH, _ROW = 1100, 4


class Timelines(NamedTuple):
    """Records of one kind, one launch each: ``gpu_trace_...json.gz``, of which there may be one a device.

    Attributes
    ----------
    records
        Their names begin so.
    picture
        A picture's name begins so, and ends as the record's.
    head
        Pixels beside the workers' rows.
    says
        Title, text and caption of a launch, told where its record is.
    """

    records: str
    picture: str
    head: int
    says: Callable[[LaunchTrace, str], tuple[str, str, str]]

    def sections(self, folder: Path) -> list[str]:
        """Markdown of each record in ``folder``."""
        return [self._section(path) for path in self._paths(folder)]

    def plots(self, folder: Path, images: Path) -> None:
        """A picture of each."""
        for path in self._paths(folder):
            images.mkdir(parents=True, exist_ok=True)
            (launch,) = load(path)
            # Without the plan, which is in the text: a line of it all is wider than the picture.
            title = f"{launch.op}: {launch.label.partition(': ')[0]}"
            draw(launch, images / self._picture(path), title=title, size=(_WIDTH, self.head + _ROW * launch.workers))

    def _paths(self, folder: Path) -> list[Path]:
        return sorted(folder.glob(f"{self.records}*.json.gz"))

    def _picture(self, path: Path) -> str:
        return path.name.replace(self.records, self.picture).replace(".json.gz", ".png")

    def _section(self, path: Path) -> str:
        (launch,) = load(path)
        title, text, caption = self.says(launch, f"`benchmarks/results/{path.name}`, for https://ui.perfetto.dev")
        return "\n\n".join([f"## {title}", text, f"![{caption}](images/{self._picture(path)})"])


#: Of what the lanes of a `mlp_timeline` are: matmuls, other kernels, copies.
_COLOURS = {
    "gather": "#3b6ea8",
    "w2": "#3b6ea8",
    "silu": "#7c93ab",
    "own": "#c9a227",
    "rows": "#2a9d6f",
    "sums": "#e4572e",
}
_LANE = 26


class Lanes(NamedTuple):
    """Records of what whole GPUs did: rows of a rank, a lane, and its spans in microseconds from the first."""

    records: str
    picture: str

    def sections(self, folder: Path) -> list[str]:
        """Markdown of each record in ``folder``."""
        return [self._section(path) for path in self._paths(folder)]

    def plots(self, folder: Path, images: Path) -> None:
        """A picture of each."""
        for path in self._paths(folder):
            images.mkdir(parents=True, exist_ok=True)
            _draw_lanes(json.loads(path.read_text(encoding="utf-8")), images / self._picture(path))

    def _paths(self, folder: Path) -> list[Path]:
        return sorted(folder.glob(f"{self.records}_x*.json"))

    def _picture(self, path: Path) -> str:
        return path.name.replace(self.records, self.picture).replace(".json", ".png")

    def _section(self, path: Path) -> str:
        data = json.loads(path.read_text(encoding="utf-8"))
        device = data["device"].removeprefix("NVIDIA ")
        mine = {row["lane"]: row["spans"] for row in data["rows"] if row["rank"] == 0}
        matmuls = [span for lane in ("gather: w1, w3", "w2, and publish") for span in mine[lane]]
        copies = [span for lane in ("rows of others", "sums of others") for span in mine[lane]]
        beside = sum(max(0.0, min(end, e) - max(begin, b)) for begin, end in copies for b, e in matmuls)
        copied = sum(end - begin for begin, end in copies)
        text = (
            f"Llama-3-70B's block, forward, its calls eager and not compiled, {data['tokens']} tokens, in "
            f"{data['ms']:.3f} ms, as profiled "
            f"(`benchmarks/results/{path.name}`, by `benchmarks/mlp_timeline.py`; torch {data['torch']}, Triton "
            f"{data['triton']}, {data['date']}). Of rank 0's {copied / 1e3:.3f} ms of copies from its peers "
            f"{beside / copied:.0%} lie beside a matmul."
        )
        title = f"The timeline of an MLP block, {data['world']} x {device}"
        caption = "A row what a GPU was at: matmuls, what is between, and the copies of both halves"
        return "\n\n".join([f"## {title}", text, f"![{caption}](images/{self._picture(path)})"])


def _draw_lanes(data: dict[str, Any], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = data["rows"]
    made = Figure(figsize=(_WIDTH / 100, (_LANE * len(rows) + 60) / 100), dpi=100, facecolor="white")
    FigureCanvasAgg(made)
    axes = made.add_axes((0.17, 46 / (_LANE * len(rows) + 60), 0.81, _LANE * len(rows) / (_LANE * len(rows) + 60)))
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
