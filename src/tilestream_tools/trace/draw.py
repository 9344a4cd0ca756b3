"""The timeline of a launch as a picture: one row a worker, tiles coloured by chunk, waits and arrivals visible.

Needs matplotlib (``pip install 'tilestream[plot]'``), which is imported when a picture is drawn. Each kind of span is
one collection: thousands of tiles on hundreds of workers draw in a second.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from tilestream.trace.record import SpanKind

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tilestream.trace.record import LaunchTrace, Span

DPI = 100
_NEUTRAL = "#7c93ab"  # a tile that waited for nothing
_REDUCE = "#e4572e"
_WAIT_FACE, _WAIT_LINES, _WAIT_THIN = "#f0f0f0", "#c4c4c4", "#d9d9d9"
_IDLE = "#f8f9fb"
_TEXT, _FAINT = "#22262b", "#6b7280"
#: Colour maps of A's and of B's chunks: ordered by lightness, their ends cut off where they vanish on white.
_MAPS = (("viridis", 0.0, 0.93), ("Reds", 0.3, 1.0))
_OPERANDS = ("A's rows", "B's columns")

# Bars, as parts of a row. A part of a tile is thinner than a whole one, so that stream-K's split shows without colour.
_BAR, _PART, _WAIT = 0.80, 0.46, 0.64
_MARKER_ROW, _MARKER_PIXELS = 0.62, 18  # height of an arrivals row and of a reading row: of a worker's, and at least

# Margins in pixels. A colour bar takes _COLOUR_BAR more on the right.
_LEFT, _RIGHT, _TOP, _LOW = 92, 24, 84, 78
_COLOUR_BAR = 100

Range = tuple[float, float]
Colour = str | tuple[float, float, float, float]


def draw(
    launch: LaunchTrace, path: str | os.PathLike[str], *, title: str | None = None, size: tuple[int, int] | None = None
) -> Path:
    """Draw the timeline of ``launch`` into the picture ``path`` (PNG, SVG or PDF, by its ending).

    Parameters
    ----------
    launch
        One launch of a `record`. Where its `started` is known, a row shows what the producer was bringing when.
    title
        Heading; None: the operation and the plan in a line.
    size
        Pixels; None: `default_size`.

    Returns
    -------
    Path
        The picture.

    Raises
    ------
    ImportError
        If matplotlib is missing.

    Examples
    --------
    >>> with ts.trace.record() as recorder:  # doctest: +SKIP
    ...     ts.matmul(x.tensor, w, arrival=x.arrival)
    >>> recorder.launches[0].started[0] = x.started  # doctest: +SKIP
    >>> ts.trace.draw(recorder.launches[0], "timeline.png")  # doctest: +SKIP
    """
    path = Path(path)
    figure(launch, title=title, size=size).savefig(path, dpi=DPI)
    return path


def figure(launch: LaunchTrace, *, title: str | None = None, size: tuple[int, int] | None = None) -> Figure:
    """The same timeline as a matplotlib figure outside pyplot's state. Parameters as for `draw`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing a timeline takes matplotlib: pip install 'tilestream[plot]'") from error

    picture = _Picture(launch)
    width, height = size or default_size(launch)
    made = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor="white")
    FigureCanvasAgg(made)
    picture.draw(made, title, width, height)
    return made


def default_size(launch: LaunchTrace) -> tuple[int, int]:
    """1600 pixels wide; the height grows with the workers, up to a screen's."""
    workers = launch.workers
    rows = 60 * min(workers, 4) + 17 * max(0, min(workers, 20) - 4) + 4 * max(0, workers - 20)
    return 1600, 250 + min(950, rows)


class _Picture:
    """The layout: rows from the top are arrivals and reading (an operand each), then the workers."""

    def __init__(self, launch: LaunchTrace) -> None:
        self.launch = launch
        self.spans = launch.spans
        self.last = launch.end or max([launch.begin, *(span.end for span in self.spans)])
        # Arrivals long before the launch are drawn at the left edge.
        self.earliest = launch.begin - 0.12 * max(self.last - launch.begin, 1e-9)
        self.arrivals = {
            operand: sorted((max(when, self.earliest), chunk) for chunk, when in enumerate(times) if when is not None)
            for operand, times in sorted(launch.arrivals.items())
        }
        self.started = {op: max(when, self.earliest) for op, when in launch.started.items() if self.arrivals.get(op)}
        self.colours = {operand: _chunk_colours(operand, len(launch.arrivals[operand])) for operand in self.arrivals}
        self.middle: dict[tuple[str, int], float] = {}
        self.marker_row = self.row_pixels = self.pixel = self.total = 0.0

    def _lay_out(self, inside: int) -> None:
        """Rows into ``inside`` pixels, in units of a worker's row; the axis points down."""
        markers = len(self.arrivals) + len(self.started)
        self.row_pixels = inside / (self.launch.workers + _MARKER_ROW * markers)
        if self.row_pixels * _MARKER_ROW < _MARKER_PIXELS:
            self.row_pixels = max(inside - markers * _MARKER_PIXELS, 0.2 * inside) / self.launch.workers
        self.marker_row = (inside / self.row_pixels - self.launch.workers) / markers if markers else 0.0
        for operand in self.arrivals:
            for what in ("arrivals", "reading"):
                if what == "arrivals" or operand in self.started:
                    self.middle[what, operand] = self.total + self.marker_row / 2
                    self.total += self.marker_row
        for worker in range(self.launch.workers):
            self.middle["worker", worker] = self.total + 0.5
            self.total += 1.0

    def ms(self, when: float) -> float:
        return 1e3 * (when - self.launch.begin)

    # Drawing -------------------------------------------------------------------------------------------------------

    def draw(self, made: Figure, title: str | None, width: int, height: int) -> None:
        right = _RIGHT + _COLOUR_BAR * max(1, len(self.arrivals))
        inside = width - _LEFT - right, height - _TOP - _LOW
        self._lay_out(inside[1])
        axes = made.add_axes((_LEFT / width, _LOW / height, inside[0] / width, inside[1] / height))
        known = [self.ms(when) for ticks in self.arrivals.values() for when, _ in ticks]
        begin = min([0.0, *known, *(self.ms(when) for when in self.started.values())])
        end = max([self.ms(self.last), *known])
        margin = 0.006 * (end - begin) or 1.0
        axes.set_xlim(begin - margin, end + margin)
        axes.set_ylim(self.total, 0)
        self.pixel = (end - begin + 2 * margin) / inside[0]  # ms

        self._frame(axes)
        legend = self._workers(axes)
        for operand, ticks in self.arrivals.items():
            legend += self._arrivals(axes, operand, ticks)
        for place, operand in enumerate(self.arrivals):
            x = width - right + 22 + _COLOUR_BAR * place
            self._colour_bar(made.add_axes((x / width, _LOW / height, 14 / width, inside[1] / height)), operand)
        left = (_LEFT - 2) / width
        heading = title if title is not None else f"{self.launch.op}: {self.launch.label}"
        made.text(left, 1 - 30 / height, heading, fontsize=13.5, fontweight="bold", color=_TEXT)
        made.text(left, 1 - 56 / height, self.summary(), fontsize=10, color=_FAINT)
        # Below the axis' label, in one line.
        made.legend(
            handles=legend, loc="lower left", bbox_to_anchor=((_LEFT - 8) / width, 6 / height),
            ncols=max(1, len(legend)), frameon=False, fontsize=9.5, labelcolor=_TEXT, handlelength=1.6,
            columnspacing=1.8,
        )  # fmt: skip

    def _frame(self, axes: Axes) -> None:
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(_FAINT)
        axes.tick_params(axis="x", colors=_FAINT, labelsize=9.5)
        axes.tick_params(axis="y", length=0, labelsize=9.5, labelcolor=_TEXT)
        axes.set_xlabel("ms from the launch", color=_FAINT, fontsize=10)
        axes.set_axisbelow(True)
        axes.grid(axis="x", color="#e8eaee", linewidth=0.8)
        every = _every(self.launch.workers, self.row_pixels)
        where, labels = [], []
        for (what, which), y in self.middle.items():
            if what != "worker" or which % every == 0:
                where.append(y)
                one = what != "worker" and len(self.arrivals) == 1
                labels.append(what if one else f"{what} {which if what == 'worker' else 'AB'[which]}")
        axes.set_yticks(where, labels)
        if self.launch.workers <= 40:
            # A faint band a worker, seen where the worker was idle.
            boxes = [(self.middle["worker", w] - 0.45, 0.9) for w in range(self.launch.workers)]
            whole = [(0.0, self.ms(self.last))] * len(boxes)
            _bars(axes, whole, boxes, "idle", facecolors=_IDLE, linewidths=0, zorder=0.5)
        axes.axvline(0.0, color=_FAINT, linewidth=1.0, zorder=0.8)

    def _workers(self, axes: Axes) -> list[Any]:
        from matplotlib.patches import Patch

        drawn = {kind: [span for span in self.spans if span.kind == kind] for kind in get_args(SpanKind)}
        # Passing an open gate is recorded too, but too short to see.
        drawn["wait"] = [x for x in drawn["wait"] if self.ms(x.end) - self.ms(x.begin) > self.pixel / 3]
        hatched = self.row_pixels >= 10  # thinner rows have no room for the strokes
        style: dict[str, Any] = {"facecolors": _WAIT_THIN, "linewidths": 0}
        if hatched:
            style = {"facecolors": _WAIT_FACE, "edgecolors": _WAIT_LINES, "linewidths": 0.6, "hatch": "////"}
        self._spans(axes, drawn["wait"], _WAIT if hatched else _BAR, "wait", zorder=2, **style)
        for kind, bar in (("tile", _BAR), ("part", _PART)):
            edge = 0.7 if self._typical(drawn[kind]) >= 5 and self.row_pixels >= 8 else 0.0
            colours = [self._colour(span.operand, span.chunk) for span in drawn[kind]]
            style = {"facecolors": colours, "edgecolors": "white", "linewidths": edge}
            self._spans(axes, drawn[kind], bar, kind, zorder=3, **style)
        self._spans(axes, drawn["reduce"], _BAR, "reduce", facecolors=_REDUCE, linewidths=0, zorder=4)
        sample = _chunk_colours(min(self.arrivals), 5)[2] if self.arrivals else _NEUTRAL
        hatch, face = ("////", _WAIT_FACE) if hatched else (None, _WAIT_THIN)
        legend = {
            "tile": Patch(facecolor=sample, edgecolor="white", label="tile"),
            "part": Patch(facecolor=sample, edgecolor="white", linewidth=3.5, label="part of a tile's K range"),
            "reduce": Patch(facecolor=_REDUCE, edgecolor="white", label="adding up a tile's parts"),
            "wait": Patch(facecolor=face, edgecolor=_WAIT_LINES, hatch=hatch, label="waiting at the gate"),
        }
        return [patch for kind, patch in legend.items() if drawn[kind]]

    def _arrivals(self, axes: Axes, operand: int, ticks: Sequence[tuple[float, int]]) -> list[Any]:
        from matplotlib.lines import Line2D

        if not ticks:
            return []
        colours = [self._colour(operand, chunk) for _, chunk in ticks]
        x = [self.ms(when) for when, _ in ticks]
        y = self.middle["arrivals", operand]
        marks = axes.scatter(x, [y] * len(x), s=62, marker="v", c=colours, edgecolors="white", linewidths=0.6, zorder=6)
        marks.set_gid(f"arrivals {operand}")
        marks.set_clip_on(False)
        if len(x) * 6 <= (x[-1] - x[0]) / self.pixel:
            axes.vlines(x, y, self.total, colors=colours, linewidth=0.8, alpha=0.45, zorder=1)
        if operand in self.started:
            edges = [self.ms(self.started[operand]), *x]
            bar = self.marker_row * _BAR
            boxes = [(self.middle["reading", operand] - bar / 2, bar)] * len(x)
            edge = 0.7 if (edges[-1] - edges[0]) / self.pixel / len(x) >= 5 else 0.0
            style = {"facecolors": colours, "edgecolors": "white", "linewidths": edge, "zorder": 3}
            _bars(axes, list(pairwise(edges)), boxes, f"reading {operand}", **style)
        if operand != min(self.arrivals):
            return []
        return [Line2D([], [], marker="v", linestyle="", color=_FAINT, markersize=7, label="a chunk arrives")]

    def _spans(self, axes: Axes, spans: Sequence[Span], bar: float, name: str, **style: Any) -> None:
        if not spans:
            return
        boxes = [(self.middle["worker", span.worker] - bar / 2, bar) for span in spans]
        _bars(axes, [(self.ms(span.begin), self.ms(span.end)) for span in spans], boxes, name, **style)

    def _typical(self, spans: Sequence[Span]) -> float:
        """The median length in pixels."""
        lengths = sorted(span.end - span.begin for span in spans) or [0.0]
        return 1e3 * lengths[len(lengths) // 2] / self.pixel

    def _colour(self, operand: int, chunk: int) -> Colour:
        colours = self.colours.get(operand, [])
        return colours[chunk] if 0 <= chunk < len(colours) else _NEUTRAL

    def _colour_bar(self, axes: Axes, operand: int) -> None:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import ListedColormap, Normalize
        from matplotlib.ticker import MaxNLocator

        count = len(self.launch.arrivals[operand])
        shown = ScalarMappable(Normalize(-0.5, count - 0.5), ListedColormap(self.colours[operand]))
        bar = axes.figure.colorbar(shown, cax=axes)
        of = f" of {_OPERANDS[operand]}" if len(self.arrivals) > 1 else ""
        bar.set_label(f"chunk{of}", color=_TEXT, fontsize=10)
        bar.outline.set_visible(False)
        axes.set_ylim(count - 0.5, -0.5)  # the first chunk on top
        axes.yaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
        axes.tick_params(labelsize=9.5, colors=_FAINT, length=0)

    def summary(self) -> str:
        """The launch in numbers, in a line."""
        launch, total = self.launch, self.last - self.launch.begin
        workers, room = _count(launch.workers, "worker"), total * launch.workers
        words = [f"{launch.tiles_done} of {launch.tiles} tiles on {workers} in {1e3 * total:.1f} ms"]
        if launch.arrivals and room > 0:
            words.append(f"{launch.waited / room:.0%} of the workers' time spent waiting")
        for operand, ticks in self.arrivals.items():
            if ticks:
                of = f" of {_OPERANDS[operand]}" if len(self.arrivals) > 1 else ""
                chunks = _count(len(launch.arrivals[operand]), "chunk")
                words.append(f"last of {chunks}{of} at {self.ms(ticks[-1][0]):.1f} ms")
        return "   ·   ".join(words)


def _bars(axes: Axes, x: Sequence[Range], boxes: Sequence[Range], gid: str, **style: Any) -> None:
    """Bars from ``x[i][0]`` to ``x[i][1]``, whose lower edge and height are ``boxes[i]``: one collection."""
    from matplotlib.collections import PolyCollection

    corners = [
        [(begin, low), (begin, low + high), (end, low + high), (end, low)]
        for (begin, end), (low, high) in zip(x, boxes, strict=True)
    ]
    made = PolyCollection(corners, **style)
    made.set_gid(gid)
    axes.add_collection(made, autolim=False)


def _chunk_colours(operand: int, count: int) -> list[Colour]:
    import matplotlib

    name, low, high = _MAPS[operand]
    whole = matplotlib.colormaps[name]
    return [whole(low + (high - low) * chunk / max(count - 1, 1)) for chunk in range(count)]


def _every(workers: int, row_pixels: float) -> int:
    """The step between labelled workers, so that labels do not touch."""
    for every in (1, 2, 4, 5, 10, 20, 25, 50):
        if every * row_pixels >= 16 or every >= workers:
            return every
    return 100


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
