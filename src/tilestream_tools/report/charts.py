"""The report's charts, as SVG that takes its colours from the page's style, drawn for a page of 800 pixels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

from tilestream_tools.units import duration

WIDTH = 752
_LEFT, _RIGHT = 62, 24


class Point(NamedTuple):
    """A call on the roofline: its number in the tables, operations a byte, rates of ours and of torch's."""

    number: int
    name: str
    intensity: float
    ours: float
    torch: float


class Roof(NamedTuple):
    """A roof: its dtype's peak, in operations a second."""

    name: str
    peak: float


def _svg(height: float, title: str, parts: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title, quote=True)}">'
        f"{''.join(parts)}</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str = "middle", kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}>{escape(text)}</text>'


def _line(x: float, y: float, to_x: float, to_y: float, kind: str, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" class="{kind}"{dashed}/>'


def rate(operations: float) -> str:
    """Operations a second, in three digits."""
    for unit, factor in (("PFLOP/s", 1e15), ("TFLOP/s", 1e12)):
        if operations >= factor:
            return f"{operations / factor:.3g} {unit}"
    return f"{operations / 1e9:.3g} GFLOP/s"


def roofline(points: Sequence[Point], roofs: Sequence[Roof], bandwidth: float, read: float) -> str:
    """Rates over operations a byte, both in powers of ten, under what the device can do.

    Parameters
    ----------
    bandwidth, read
        Bytes a second: the slope of the roof, as the data sheet says or as is assumed; and as a read measured it.
    """
    xs = [point.intensity for point in points]
    ys = [y for point in points for y in (point.ours, point.torch)] + [roof.peak for roof in roofs]
    ys += [x * min(bandwidth, read) for x in xs]
    low_x, high_x = math.floor(math.log10(min(xs))), math.ceil(math.log10(max(xs) * 1.2))
    low_y, high_y = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys) * 1.05))
    top, bottom, right = 26, 340, WIDTH - _RIGHT
    unit, factor = ("TFLOP/s", 1e12) if high_y > 13 else ("GFLOP/s", 1e9)

    def x_of(value: float) -> float:
        return _LEFT + (math.log10(value) - low_x) / (high_x - low_x) * (right - _LEFT)

    def y_of(value: float) -> float:
        return bottom - (math.log10(value) - low_y) / (high_y - low_y) * (bottom - top)

    parts = []
    for power in range(low_x, high_x + 1):
        x = x_of(10.0**power)
        parts += [_line(x, top, x, bottom, "grid"), _text(x, bottom + 17, f"{10.0**power:g}", kind="faint")]
    for power in range(low_y, high_y + 1):
        y = y_of(10.0**power)
        parts += [
            _line(_LEFT, y, right, y, "grid"),
            _text(_LEFT - 6, y + 4, f"{10.0**power / factor:g}", "end", "faint"),
        ]
    below = "operations a byte that has to be moved"
    parts += [_text((_LEFT + right) / 2, bottom + 36, below, kind="faint"), _text(4, 12, unit, "start", "faint")]
    parts += [_line(_LEFT, bottom, right, bottom, "axis")]
    highest = max(roof.peak for roof in roofs)
    for slope, dashes in ((bandwidth, ""), (read, "5 4")):
        begin = max(10.0**low_x, 10.0**low_y / slope)
        end = min(10.0**high_x, highest / slope)
        parts.append(_line(x_of(begin), y_of(begin * slope), x_of(end), y_of(end * slope), "roof", dashes))
    for roof in roofs:
        begin = min(max(roof.peak / max(bandwidth, read), 10.0**low_x), 10.0**high_x)
        parts.append(_line(x_of(begin), y_of(roof.peak), right, y_of(roof.peak), "roof"))
        parts.append(_text(right, y_of(roof.peak) - 5, f"{roof.name}: {rate(roof.peak)}", "end"))
    placed: list[tuple[float, float]] = []
    for point in points:
        x, ours, theirs = x_of(point.intensity), y_of(point.ours), y_of(point.torch)
        told = f"{point.number}: {point.name}: tilestream {rate(point.ours)}, torch {rate(point.torch)}"
        parts.append(
            f"<g><title>{escape(told)}</title>"
            f'<rect x="{x - 5:.1f}" y="{theirs - 5:.1f}" width="10" height="10" class="peer"/>'
            f'<circle cx="{x:.1f}" cy="{ours:.1f}" r="4" class="ours"/></g>'
        )
        at = _free(x, max(ours, theirs) + 18, placed)
        placed.append(at)
        parts.append(_text(*at, str(point.number)))
    return _svg(bottom + 44, "Roofline: rates of the calls over operations a byte", parts)


def _free(x: float, y: float, placed: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The place of a number below its point: further down until no other number is there."""
    while any(abs(x - a) < 16 and abs(y - b) < 13 for a, b in placed):
        y += 13
    return x, y


def ratios(rows: Sequence[tuple[str, float, tuple[float, float]]], what: str) -> str:
    """A row a call: torch's time by ours, with the quartiles; further right is faster."""
    left, right, row = 330, WIDTH - 62, 24
    values = [value for _, ratio, band in rows for value in (ratio, *band)]
    low = min(0.5, 2 ** math.floor(math.log2(max(min(values), 2**-6))))
    high = max(2.0, 2 ** math.ceil(math.log2(min(max(values), 2**6))))
    bottom = 18 + row * len(rows)

    def x_of(value: float) -> float:
        value = min(max(value, low), high)
        return left + math.log(value / low) / math.log(high / low) * (right - left)

    parts = []
    tick = low
    while tick <= high * 1.001:
        x = x_of(tick)
        kind = "axis" if tick == 1 else "grid"
        parts += [_line(x, 8, x, bottom, kind), _text(x, bottom + 16, f"{tick:g}", kind="faint")]
        tick *= 2
    parts.append(_text((left + right) / 2, bottom + 34, what, kind="faint"))
    for place, (name, ratio, band) in enumerate(rows):
        y = 18 + row * (place + 0.5)
        x, (begin, end) = x_of(ratio), map(x_of, band)
        parts += [
            _text(left - 12, y + 4, name, "end"),
            f'<rect x="{begin:.1f}" y="{y - 2:.1f}" width="{max(end - begin, 1):.1f}" height="4" class="ours band"/>',
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" class="ours"/>',
            _text(WIDTH - 4, y + 4, f"{ratio:.3f}", "end"),
        ]
    return _svg(bottom + 42, f"Ratios to torch: {what}", parts)


def overlap(ms: dict[str, float], bring: str) -> str:
    """In turn and streamed as bars, and the larger of the two parts as a line."""
    first, second, streamed = ms[bring], ms["multiply"], ms["streamed"]
    longest = max(first + second, streamed, ms["in turn"])
    left, right = 150, WIDTH - 120

    def width(value: float) -> float:
        return value / longest * (right - left)

    larger = left + width(max(first, second))
    bars = (
        (f"{bring}, then multiply", [(first, "first-part"), (second, "second-part")], first + second),
        ("measured in turn", [(ms["in turn"], "second-part")], ms["in turn"]),
        ("streamed", [(streamed, "streamed")], streamed),
    )
    parts = []
    for place, (name, pieces, total) in enumerate(bars):
        x, y = float(left), 8 + 32 * place
        parts.append(_text(left - 10, y + 16, name, "end"))
        for value, kind in pieces:
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(width(value) - 1, 1):.1f}" height="22" class="{kind}"/>'
            )
            x += width(value)
        parts.append(_text(x + 8, y + 16, duration(total / 1e3), "start"))
    parts.append(_line(larger, 4, larger, 104, "bound", "4 3"))
    said = f"the larger of {bring} and multiply: {duration(max(first, second) / 1e3)}"
    parts.append(_text(min(larger, WIDTH - 160), 120, said, kind="faint"))
    return _svg(128, "Time of moving and multiplying in turn, and streamed", parts)


def numbered(calls: Iterable[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Calls that were measured, with their numbers in the page's tables."""
    return [(number, call) for number, call in enumerate(calls, 1) if "clocks" in call]
