"""Contrast by WCAG 2, and what colour-blind readers see, by the matrices of Machado et al. (2009)."""

from __future__ import annotations

import math
import re
from pathlib import Path

_BLIND = {
    "nobody": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
BLIND = tuple(_BLIND)


def schemes(css: Path) -> dict[str, dict[str, str]]:
    """The variables of a style sheet, light and dark."""
    light, dark = css.read_text(encoding="utf-8").split("@media (prefers-color-scheme: dark)")[:2]
    found = {
        name: dict(re.findall(r"--([\w-]+): (#\w{6})[;,]", text)) for name, text in (("light", light), ("dark", dark))
    }
    found["dark"] = found["light"] | found["dark"]
    for name, text in (("light", light), ("dark", dark)):
        found[name]["ramp"] = re.search(r"--ramp: ([^;]+);", text)[1]
    return found


def linear(colour: str) -> list[float]:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in channels]


def luminance(colour: str) -> float:
    return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def distance(one: str, other: str, who: str) -> float:
    """CIE76 of two colours as somebody sees them: 2 is just noticed, 10 is seen at a glance."""
    return math.dist(_lab(one, who), _lab(other, who))


def _lab(colour: str, who: str) -> tuple[float, float, float]:
    rgb = linear(colour)
    rgb = [min(max(sum(weight * x for weight, x in zip(row, rgb, strict=True)), 0.0), 1.0) for row in _BLIND[who]]
    rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [sum(weight * x for weight, x in zip(row, rgb, strict=True)) for row in rows]
    x, y, z = (
        value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116
        for value in (xyz[0] / 0.95047, xyz[1], xyz[2] / 1.08883)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)
