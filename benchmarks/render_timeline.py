"""Timelines on docs/performance.md: a call that was traced, as a picture and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

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
            draw(launch, images / self._picture(path), size=(_WIDTH, self.head + _ROW * launch.workers))

    def _paths(self, folder: Path) -> list[Path]:
        return sorted(folder.glob(f"{self.records}*.json.gz"))

    def _picture(self, path: Path) -> str:
        return path.name.replace(self.records, self.picture).replace(".json.gz", ".png")

    def _section(self, path: Path) -> str:
        (launch,) = load(path)
        title, text, caption = self.says(launch, f"`benchmarks/results/{path.name}`, for https://ui.perfetto.dev")
        return "\n\n".join([f"## {title}", text, f"![{caption}](images/{self._picture(path)})"])
