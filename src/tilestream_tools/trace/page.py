"""Timelines as a page for a browser: one HTML file with all it needs, zoomed and panned by mouse and keyboard.

`timeline` makes of a launch what the page's script draws, as JSON; `figure` is its place in a page; `page` is the frame
that the report has, too. Nothing is loaded from elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from tilestream._version import __version__
from tilestream.trace.record import SpanKind
from tilestream_tools.units import count, duration

if TYPE_CHECKING:
    import os

    from tilestream.trace.record import LaunchTrace, Span

Data = dict[str, Any]
#: What a span's kind is called in a legend.
KINDS = {
    "tile": "a tile", "part": "a part of a tile's K range", "reduce": "adding up a tile's parts",
    "wait": "waiting at the gate",
}  # fmt: skip
#: Open gates are passed in less, in seconds: such waits are left out.
_SHORTEST_WAIT = 5e-8
_OPERANDS = ("A's rows", "B's columns")


def write(launches: Sequence[LaunchTrace], path: str | os.PathLike[str], title: str = "Timelines") -> Path:
    """Write the timelines of ``launches`` as one HTML file.

    Parameters
    ----------
    launches
        Those of a `Recorder`, or of a loaded trace.
    path
        ``.html``.
    title
        The page's heading.

    Returns
    -------
    Path
        The file.
    """
    path = Path(path)
    body = "".join(figure(timeline(launch)) for launch in launches)
    path.write_text(page(title, f"<main><h1>{escape(title)}</h1>{HELP}{body}</main>"), encoding="utf-8")
    return path


def page(title: str, body: str) -> str:
    """A whole HTML document around ``body``, with the style and the timelines' script in it."""
    folder = resources.files("tilestream_tools.trace")
    style, script = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "timeline.js"))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<meta name="generator" content="tilestream {__version__}">\n'
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n<style>\n{style}</style>\n</head>\n'
        f"<body>\n{body}\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def timeline(launch: LaunchTrace, title: str = "") -> Data:
    """A launch as the script draws it: times in microseconds from the launch, a list of numbers a span.

    A span is ``[kind, begin, length, batch, row tile, column tile, first K step, last, chunk, operand]``, its kind a
    place in `KINDS`.
    """
    kinds = get_args(SpanKind)
    last = launch.end or max([launch.begin, *(span.end for span in launch.spans)])

    def us(when: float) -> float:
        return round((when - launch.begin) * 1e6, 2)

    def told(span: Span) -> list[float]:
        begin = us(span.begin)
        return [
            kinds.index(span.kind), begin, round(us(span.end) - begin, 2), span.batch, span.pm, span.pn, span.k_begin,
            span.k_end, span.chunk, span.operand,
        ]  # fmt: skip

    return {
        "title": title or launch.op, "label": launch.label, "op": launch.op, "length": us(last),
        "tiles": launch.tiles, "done": launch.tiles_done, "summary": summary(launch),
        "arrivals": {
            str(operand): [None if when is None else us(when) for when in times]
            for operand, times in launch.arrivals.items()
        },
        "started": {str(operand): us(when) for operand, when in launch.started.items()},
        "workers": [
            [told(span) for span in spans if span.kind != "wait" or span.end - span.begin > _SHORTEST_WAIT]
            for spans in launch.by_worker
        ],
    }  # fmt: skip


def summary(launch: LaunchTrace) -> str:
    """The launch in numbers, in a line."""
    total = (launch.end or max([launch.begin, *(span.end for span in launch.spans)])) - launch.begin
    done = f"{launch.tiles_done} of {count(launch.tiles, 'tile')}"
    words = [f"{done} on {count(launch.workers, 'worker')} in {duration(total)}"]
    if launch.arrivals and total > 0:
        words.append(f"{launch.waited / (total * launch.workers):.1%} of the workers' time spent waiting")
    for operand, times in sorted(launch.arrivals.items()):
        there = [when for when in times if when is not None]
        if there:
            of = f" of {_OPERANDS[operand]}" if len(launch.arrivals) > 1 else ""
            words.append(f"last of {count(len(times), 'chunk')}{of} after {duration(max(there) - launch.begin)}")
    return " · ".join(words)


#: How a timeline is used, above the first.
HELP = (
    '<p class="hint">Zoom: the buttons, <kbd>+</kbd> and <kbd>-</kbd>, a double click, or the wheel with '
    "<kbd>Ctrl</kbd>. Pan: drag, or <kbd>←</kbd> and <kbd>→</kbd>. <kbd>0</kbd> shows all. <kbd>↑</kbd>, <kbd>↓</kbd>, "
    "<kbd>n</kbd> and <kbd>p</kbd> go from worker to worker and from item to item; what is chosen, or under the "
    "pointer, is told below.</p>"
)


def figure(found: Data) -> str:
    """The place of a timeline in a page, with its data; the page's script draws it."""
    seen = {span[0] for spans in found["workers"] for span in spans}
    legend = "".join(
        f'<li><span class="swatch {kind}" aria-hidden="true"></span>{escape(text)}</li>'
        for place, (kind, text) in enumerate(KINDS.items())
        if place in seen
    )
    if any(found["arrivals"].values()):
        legend += '<li><span class="swatch arrival" aria-hidden="true"></span>a chunk arrives</li>'
    legend += f'<li class="scale"><span class="ramp" aria-hidden="true"></span>{escape(colours(found))}</li>'
    buttons = "".join(
        f'<button type="button" data-do="{what}" aria-label="{text}">{sign}</button>'
        for what, text, sign in (
            ("in", "Zoom in", "+"), ("out", "Zoom out", "-"), ("left", "Pan left", "←"), ("right", "Pan right", "→"),
            ("all", "Show all", "All"),
        )
    )  # fmt: skip
    name = escape(f"{found['title']}: {found['label']}", quote=True)
    data = json.dumps(found, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<figure class="timeline"><figcaption><strong>{escape(found["title"])}</strong>'
        f'<span class="label">{escape(found["label"])}</span><span class="label">{escape(found["summary"])}</span>'
        f'</figcaption><div class="tools" role="group" aria-label="Timeline controls">{buttons}'
        '<output class="range"></output></div>'
        f'<canvas tabindex="0" role="application" aria-roledescription="timeline" aria-label="{name}"></canvas>'
        f'<p class="chosen" aria-live="polite"></p><ul class="legend">{legend}</ul>'
        "<noscript><p>The timeline is drawn by a script, which this browser does not run.</p></noscript>"
        f'<script type="application/json">{data}</script></figure>'
    )


def colours(found: Data) -> str:
    """What a tile's colour says: its chunk where something arrives, else its row of tiles."""
    if any(found["arrivals"].values()):
        return "first to last chunk"
    return "first to last row of tiles"


def table(launches: Iterable[LaunchTrace]) -> list[Data]:
    """What each worker of each launch did: counts, and seconds busy and waiting."""
    told = []
    for launch in launches:
        workers = []
        for spans in launch.by_worker:
            tiles, parts = (sum(span.kind == kind for span in spans) for kind in ("tile", "part"))
            busy = sum(span.end - span.begin for span in spans if span.kind != "wait")
            waited = sum(span.end - span.begin for span in spans if span.kind == "wait")
            workers.append({"tiles": tiles, "parts": parts, "busy_seconds": busy, "waited_seconds": waited})
        seconds = max(launch.end - launch.begin, 0.0)
        told.append(
            {"op": launch.op, "label": launch.label, "tiles": launch.tiles, "seconds": seconds, "workers": workers}
        )
    return told
