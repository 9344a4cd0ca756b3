"""The timeline of a launch as a picture: one row a worker, tiles coloured by chunk, waits and arrivals visible.

Needs matplotlib (``pip install 'tilestream[plot]'``), which is imported when a picture is drawn. Each kind of span is
one collection: thousands of tiles on hundreds of workers draw in a second.
"""

from __future__ import annotations

import functools
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from tilestream.core.errors import kind_of
from tilestream.trace.record import LaunchTrace, SpanKind
from tilestream_tools import palette
from tilestream_tools.palette import FAINT, SMALL, TEXT
from tilestream_tools.trace.page import summary

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tilestream.trace.record import Span

_WAIT_FACE, _WAIT_LINES, _WAIT_THIN = "#f0f0f0", "#c4c4c4", "#d9d9d9"
_IDLE = "#f8f9fb"
#: Colour maps of A's and of B's chunks: ordered by lightness, their ends cut off where they vanish on white.
_MAPS = (("viridis", 0.0, 0.93), ("Reds", 0.3, 1.0))
_OPERANDS = ("A's rows", "B's columns")

# Bars, as parts of a row. A part of a tile is thinner than a whole one, so that stream-K's split shows without colour.
_BAR, _PART, _WAIT = 0.80, 0.46, 0.64
_MARKER_ROW, _MARKER_PIXELS = 0.62, 18  # height of an arrivals row and of a transfer row: of a worker's, and at least

# Margins in pixels of a page. A colour bar takes _COLOUR_BAR more on the right, a line of the heading _HEADING on top.
_LEFT, _RIGHT, _TOP, _LOW = 84, 18, 48, 66
_COLOUR_BAR, _HEADING = 62, 19
#: Characters of a line of the heading; pixels between the middles of two labels.
_LINE, _APART = 84, 14
#: Rows of fewer pixels have no room for an edge or a hatch: tiles differ by colour, and end a little early.
_THIN = 8

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
        Pixels of the file; None: `default_size`. Text is as large as a page that shows it 800 wide needs.

    Returns
    -------
    Path
        The picture.

    Raises
    ------
    ImportError
        If matplotlib is missing.
    TypeError
        If ``launch`` is no launch, but a list of them, say.

    Examples
    --------
    >>> with ts.trace.record() as recorder:  # doctest: +SKIP
    ...     ts.matmul(x.tensor, w, arrival=x.arrival)
    >>> recorder.launches[0].started[0] = x.started  # doctest: +SKIP
    >>> ts.trace.draw(recorder.launches[0], "timeline.png")  # doctest: +SKIP
    """
    return palette.save(figure(launch, title=title, size=size), Path(path), heading(launch, title))


def figure(launch: LaunchTrace, *, title: str | None = None, size: tuple[int, int] | None = None) -> Figure:
    """The same timeline as a matplotlib figure outside pyplot's state. Parameters as for `draw`."""
    if not isinstance(launch, LaunchTrace):
        raise TypeError(f"draw: launch is {kind_of(launch)}; it must be one launch, such as recorder.launches[0]")
    width, height = size or default_size(launch)
    scale = max(width / palette.WIDTH, 1.0)
    try:
        made = palette.figure(width / scale, height / scale, scale)
    except ImportError as error:
        raise ImportError("drawing a timeline takes matplotlib: pip install 'tilestream[plot]'") from error
    _Picture(launch).draw(made, textwrap.wrap(heading(launch, title), _LINE), width / scale, height / scale)
    return made


def heading(launch: LaunchTrace, title: str | None) -> str:
    """The title of a picture: the operation and the plan in a line, unless another is given."""
    return title if title is not None else f"{launch.op}: {launch.label}"


def default_size(launch: LaunchTrace) -> tuple[int, int]:
    """1600 pixels wide, two for each of a page; the height grows with the workers, up to a screen's."""
    workers, markers = launch.workers, len(launch.arrivals) + len(launch.started)
    rows = 30.0 * min(workers, 3) + _APART * max(0, min(workers, 16) - 3) + 3.5 * max(0, workers - 16)
    height = _TOP + 2 * _HEADING + _LOW + min((_MARKER_PIXELS + 6) * markers + rows, 448)
    return palette.SCALE * palette.WIDTH, round(palette.SCALE * height)


class _Picture:
    """The layout: rows from the top are arrivals and transfer (an operand each), then the workers."""

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
        self.tile_rows = 1 + max((span.pm for span in self.spans), default=0)
        self.middle: dict[tuple[str, int], float] = {}
        self.marker_row = self.row_pixels = self.pixel = self.total = 0.0

    @property
    def by_rows(self) -> bool:
        """Whether tiles are coloured by their row: nothing arrives, and rows are too thin for tiles' edges."""
        return not self.arrivals and self.row_pixels < _THIN

    def _lay_out(self, inside: float) -> None:
        """Rows into ``inside`` pixels, in units of a worker's row; the axis points down."""
        markers = len(self.arrivals) + len(self.started)
        self.row_pixels = inside / (self.launch.workers + _MARKER_ROW * markers)
        gap = 0.0
        if self.row_pixels * _MARKER_ROW < _MARKER_PIXELS and markers:
            # Below the last of these, room for the label of a worker whose row is thin.
            self.row_pixels = max(inside - markers * _MARKER_PIXELS - _APART, 0.2 * inside) / self.launch.workers
            gap = max(_APART - (_MARKER_PIXELS + self.row_pixels) / 2, 0.0) / self.row_pixels
        self.marker_row = (inside / self.row_pixels - self.launch.workers - gap) / markers if markers else 0.0
        for operand in self.arrivals:
            for what in ("arrivals", "transfer"):
                if what == "arrivals" or operand in self.started:
                    self.middle[what, operand] = self.total + self.marker_row / 2
                    self.total += self.marker_row
        self.total += gap
        for worker in range(self.launch.workers):
            self.middle["worker", worker] = self.total + 0.5
            self.total += 1.0

    def ms(self, when: float) -> float:
        return 1e3 * (when - self.launch.begin)

    # Drawing -------------------------------------------------------------------------------------------------------

    def draw(self, made: Figure, title: Sequence[str], width: float, height: float) -> None:
        top = _TOP + _HEADING * len(title)
        self._lay_out(height - top - _LOW)
        bars = list(self.arrivals) or [-1] * self.by_rows
        right = _RIGHT + _COLOUR_BAR * len(bars)
        inside = width - _LEFT - right, height - top - _LOW
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
        for place, operand in enumerate(bars):
            x = width - right + 16 + _COLOUR_BAR * place
            self._colour_bar(made.add_axes((x / width, _LOW / height, 12 / width, inside[1] / height)), operand)
        left = 12 / width
        for place, line in enumerate(title):
            y = 1 - (22 + _HEADING * place) / height
            made.text(left, y, line, fontsize=palette.TITLE, fontweight="bold", color=TEXT)
        made.text(left, 1 - (top - 20) / height, summary(self.launch), fontsize=SMALL, color=FAINT)
        # Below the axis' label, in one line.
        made.legend(
            handles=legend, loc="lower left", bbox_to_anchor=(4 / width, 2 / height), ncols=max(1, len(legend)),
            frameon=False, fontsize=SMALL, labelcolor=TEXT, handlelength=1.5, columnspacing=1.2, handletextpad=0.5,
        )  # fmt: skip

    def _frame(self, axes: Axes) -> None:
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(FAINT)
        axes.tick_params(axis="x", colors=FAINT, labelsize=SMALL)
        axes.tick_params(axis="y", length=0, labelsize=SMALL, labelcolor=TEXT)
        unit, factor = ("us", 1e3) if self.ms(self.last) < 1 else ("ms", 1.0)
        axes.xaxis.set_major_formatter(lambda ms, _: f"{factor * ms:.6g}")
        axes.set_xlabel(f"{unit} from the launch", color=FAINT, fontsize=SMALL, labelpad=3)
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
        axes.axvline(0.0, color=FAINT, linewidth=1.0, zorder=0.8)

    def _workers(self, axes: Axes) -> list[Any]:
        from matplotlib.patches import Patch

        drawn = {kind: [span for span in self.spans if span.kind == kind] for kind in get_args(SpanKind)}
        # Passing an open gate is recorded too, but too short to see.
        drawn["wait"] = [x for x in drawn["wait"] if self.ms(x.end) - self.ms(x.begin) > self.pixel / 3]
        hatched = self.row_pixels >= _THIN  # thinner rows have no room for the strokes
        style: dict[str, Any] = {"facecolors": _WAIT_THIN, "linewidths": 0}
        if hatched:
            style = {"facecolors": _WAIT_FACE, "edgecolors": _WAIT_LINES, "linewidths": 0.6, "hatch": "////"}
        whole = _BAR if hatched else 1.0
        self._spans(axes, drawn["wait"], _WAIT if hatched else whole, "wait", zorder=2, **style)
        for kind, bar in (("tile", whole), ("part", _PART)):
            edge = 0.7 if self._typical(drawn[kind]) >= 5 and self.row_pixels >= _THIN else 0.0
            colours = [self._colour(span.operand, span.chunk, span.pm) for span in drawn[kind]]
            style = {"facecolors": colours, "edgecolors": "white", "linewidths": edge}
            self._spans(axes, drawn[kind], bar, kind, zorder=3, **style)
        self._spans(axes, drawn["reduce"], whole, "reduce", facecolors=palette.REDUCE, linewidths=0, zorder=4)
        coloured = min(self.arrivals) if self.arrivals else -1
        sample = _chunk_colours(coloured, 5)[2] if self.arrivals or self.by_rows else palette.NEUTRAL
        hatch, face = ("////", _WAIT_FACE) if hatched else (None, _WAIT_THIN)
        legend = {
            "tile": Patch(facecolor=sample, edgecolor="white", label="tile"),
            "part": Patch(facecolor=sample, edgecolor="white", linewidth=3.5, label="part of a tile's K range"),
            "reduce": Patch(facecolor=palette.REDUCE, edgecolor="white", label="adding up a tile's parts"),
            "wait": Patch(facecolor=face, edgecolor=_WAIT_LINES, hatch=hatch, label="waiting at the gate"),
        }
        # What is there but nowhere a pixel wide is not seen.
        return [patch for kind, patch in legend.items() if any(self._pixels(span) >= 1 for span in drawn[kind])]

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
            boxes = [(self.middle["transfer", operand] - bar / 2, bar)] * len(x)
            edge = 0.7 if (edges[-1] - edges[0]) / self.pixel / len(x) >= 5 else 0.0
            style = {"facecolors": colours, "edgecolors": "white", "linewidths": edge, "zorder": 3}
            _bars(axes, list(pairwise(edges)), boxes, f"transfer {operand}", **style)
        if operand != min(self.arrivals):
            return []
        return [Line2D([], [], marker="v", linestyle="", color=FAINT, markersize=7, label="a chunk arrives")]

    def _spans(self, axes: Axes, spans: Sequence[Span], bar: float, name: str, **style: Any) -> None:
        if not spans:
            return
        boxes = [(self.middle["worker", span.worker] - bar / 2, bar) for span in spans]
        thin = self.row_pixels < _THIN
        ends = [self.ms(x.end) - self.pixel * (0.8 if thin and self._pixels(x) > 3 else 0.0) for x in spans]
        _bars(axes, [(self.ms(x.begin), end) for x, end in zip(spans, ends, strict=True)], boxes, name, **style)

    def _pixels(self, span: Span) -> float:
        return (self.ms(span.end) - self.ms(span.begin)) / self.pixel

    def _typical(self, spans: Sequence[Span]) -> float:
        """The median length in pixels."""
        lengths = sorted(span.end - span.begin for span in spans) or [0.0]
        return 1e3 * lengths[len(lengths) // 2] / self.pixel

    def _colour(self, operand: int, chunk: int, row: int = 0) -> Colour:
        if self.by_rows:
            return _chunk_colours(-1, self.tile_rows)[row]
        colours = self.colours.get(operand, [])
        return colours[chunk] if 0 <= chunk < len(colours) else palette.NEUTRAL

    def _ticks(self) -> int:
        """Of a colour bar: as many as its height has room for."""
        return max(1, min(10, int(self.total * self.row_pixels / 22)))

    def _colour_bar(self, axes: Axes, operand: int) -> None:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import ListedColormap, Normalize
        from matplotlib.ticker import MaxNLocator

        count = len(self.launch.arrivals[operand]) if operand >= 0 else self.tile_rows
        shown = ScalarMappable(Normalize(-0.5, count - 0.5), ListedColormap(_chunk_colours(operand, count)))
        bar = axes.figure.colorbar(shown, cax=axes)
        of = f" of {_OPERANDS[operand]}" if len(self.arrivals) > 1 else ""
        bar.set_label(f"chunk{of}" if operand >= 0 else "row of tiles", color=TEXT, fontsize=SMALL, labelpad=3)
        bar.outline.set_visible(False)
        axes.set_ylim(count - 0.5, -0.5)  # the first chunk on top
        axes.yaxis.set_major_locator(MaxNLocator(nbins=self._ticks(), integer=True, min_n_ticks=1))
        axes.tick_params(labelsize=SMALL, colors=FAINT, length=0)


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


@functools.cache
def _chunk_colours(operand: int, count: int) -> list[Colour]:
    """Of an operand's chunks; of rows of tiles where ``operand`` is -1."""
    import matplotlib

    name, low, high = _MAPS[max(operand, 0)]
    whole = matplotlib.colormaps[name]
    return [whole(low + (high - low) * chunk / max(count - 1, 1)) for chunk in range(count)]


def _every(workers: int, row_pixels: float) -> int:
    """The step between labelled workers, so that labels do not touch."""
    for every in (1, 2, 4, 5, 10, 20, 25, 50):
        if every * row_pixels >= _APART or every >= workers:
            return every
    return 100
