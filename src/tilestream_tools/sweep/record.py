"""What a sweep measured: points, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tilestream_tools import records

#: Of the file's layout: a reader refuses what it does not know.
SCHEMA = 1
_KIND = "tilestream sweep"


@dataclass(frozen=True)
class Point:
    """One way of running one shape, with a part of the device taken away.

    Attributes
    ----------
    shape, name, dtype
        The problem, ``MxNxK``.
    by
        What took it: ``neighbour``, ``green``, ``busy``, ``nccl``.
    taken, left, units
        SMs (cores) taken, left, and of the device. By ``nccl``: how many it was allowed.
    implementation, queues
        ``static``, ``dynamic``, ``stream_k``, ``torch``, ``quack``, ...; queues of dynamic.
    seconds, low, high, rounds
        Median and quartiles of so many calls.
    tflops
        Of the median; of the shape's multiply-adds, counted two each.
    plan
        The plan in a line, where it is ours.
    error
        Largest error beside fp64, as a share of the result's scale, on a sample of rows.
    more
        What only this way of taking knows, by name.
    """

    shape: str
    name: str
    dtype: str
    by: str
    taken: int
    left: int
    units: int
    implementation: str
    queues: int
    seconds: float
    low: float
    high: float
    rounds: int
    tflops: float
    plan: str
    error: float
    more: dict[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The implementation with its queues."""
        return f"{self.implementation}, {self.queues} queues" if self.queues > 1 else self.implementation


@dataclass
class Sweep:
    """A run: where, how, the points, and what was refused and why."""

    about: dict[str, Any]
    points: list[Point] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)

    def write(self, path: str | os.PathLike[str]) -> Path:
        """As JSON, whole or not at all; a point a line. Beside it, the points as CSV."""
        path = Path(path)
        lines = ",\n".join(f"  {json.dumps(asdict(point))}" for point in self.points)
        head = {"kind": _KIND, "schema": SCHEMA, "about": self.about, "refused": self.refused}
        text = json.dumps(head, indent=1)[:-2] + f',\n "points": [\n{lines}\n ]\n}}\n'
        records.write(path, text)
        write_csv(self.points, path.with_suffix(".csv"))
        return path


def read(path: str | os.PathLike[str]) -> Sweep:
    """The sweep that `Sweep.write` wrote.

    Raises
    ------
    ValueError
        If the file is no such thing, or of another version's layout.
    """
    path = Path(path)
    found = records.read(path, _KIND, SCHEMA, "record of a sweep", "sweep anew")
    try:
        return Sweep(found["about"], [Point(**point) for point in found["points"]], found["refused"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: no record of a sweep: {error}") from None


def write_csv(points: Iterable[Point], path: Path) -> Path:
    """A line a point, under the points' own names."""
    names = [entry.name for entry in fields(Point) if entry.name != "more"]
    points = list(points)
    more = sorted({name for point in points for name in point.more})
    text = io.StringIO()
    writer = csv.DictWriter(text, [*names, *more], lineterminator="\n")
    writer.writeheader()
    for point in points:
        row = asdict(point)
        writer.writerow({**row.pop("more"), **row})
    records.write(path, text.getvalue())
    return path
