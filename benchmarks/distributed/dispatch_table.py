"""From records of `all_gather` and `all_reduce` to the table by which ops across ranks decide: fused, chunks, way.

    PYTHONPATH=src python benchmarks/run.py distributed dispatch_table RECORD.json ... [--check]

Writes the entries of ``src/tilestream/distributed/table.json``, all of them from the records that are given, and leaves
its rates. Of each shape the fastest form counts. A form in more chunks has to be faster by `WORTH`, and so has any
fused form beside NCCL and the faster matmul behind it: unfused is simpler, and holds no memory. Of an all-reduce that
is not fused torch's own matmul is taken where it is the faster by `LIBRARY`. Rows of another day than their record say
so. ``--check`` writes nothing, and fails where the table is not what the records say.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tilestream.distributed import dispatch

TABLE = Path(dispatch.__file__).with_name("table.json")
#: Share of the time by which more chunks, or a fused form, must be faster than the simpler form.
WORTH = 0.01
#: Share of the time by which torch's own matmul must be faster than ours.
LIBRARY = 0.005
#: The decided form may be slower than NCCL and torch.mm by this share at most; a test holds it.
BAR = 0.02
#: How shards travelled when records did not say.
PULL = "pull"
#: The arch of a record's device.
ARCH = {"H100": "sm_90", "H200": "sm_90"}


class Decided(NamedTuple):
    """A form: fused or not, the number of chunks, and the way of a gather."""

    fused: bool
    chunks: int
    way: str = PULL


def form(name: str) -> Decided:
    """Of ``fused 2``, and of ``fused push 2``."""
    *way, chunks = name.split()[1:]
    return Decided(True, int(chunks), *way)


def decided(ms: dict[str, float]) -> Decided:
    """The form to take, by the time of each."""
    best = Decided(False, 1)
    least = min(ms[name] for name in ("nccl + mm", "nccl + ours") if name in ms)
    forms = {name: form(name) for name in ms if name.startswith("fused ")}
    fewest = min((one.chunks for one in forms.values()), default=1)
    for name in sorted(forms, key=lambda name: (forms[name].chunks, ms[name])):
        worth = WORTH if forms[name].chunks > fewest or not best.fused else 0.0
        if ms[name] < least * (1 - worth):
            best, least = forms[name], ms[name]
    return best


def by_library(op: str, ms: dict[str, float]) -> bool:
    """Whether torch's own matmul is taken where the op is not fused."""
    return op == "matmul_all_reduce" and ms["nccl + mm"] < ms["nccl + ours"] * (1 - LIBRARY)


def taken(op: str, ms: dict[str, float]) -> float:
    """Milliseconds of the form that is decided."""
    made_of = decided(ms)
    if not made_of.fused:
        return ms["nccl + mm"] if by_library(op, ms) else ms["nccl + ours"]
    return min(ms[name] for name in ms if name.startswith("fused ") and form(name) == made_of)


def shape_of(row: dict[str, Any]) -> str:
    return f"{row['m']}x{row['n']}x{row['k']}"


def entries(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries that a record makes, one a shape class.

    Raises
    ------
    ValueError
        If a device is not known, or two shapes of a class are decided otherwise: then the classes are too coarse.
    """
    device = next((arch for name, arch in ARCH.items() if name in record["device"]), None)
    if device is None:
        raise ValueError(f"device={record['device']!r}; it must be one of {', '.join(ARCH)}")
    made: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in record["rows"]:
        made_of = decided(row["ms"])
        case = dispatch.Case(
            row["op"], row["rows"], row["n"], row["k"], row["width"], record["world"], record["dtype"], 2, device
        )
        day = row.get("date", record["date"])
        entry = {
            "op": case.op, "rows": case.rows, "n": case.n, "k": case.k, "world": case.world, "dtype": case.dtype,
            "device": device, "fused": made_of.fused, "chunks": made_of.chunks,
            **({"way": made_of.way} if case.op == "all_gather_matmul" else {}),
            **({"library": True} if not made_of.fused and by_library(case.op, row["ms"]) else {}),
            "source": f"{record['world']} x {record['device'].removeprefix('NVIDIA ')}, {day}",
        }  # fmt: skip
        other = made.setdefault((case.op, case.shape_class), entry)
        if any(other.get(name) != entry.get(name) for name in Decided._fields):
            raise ValueError(f"{row['op']} {shape_of(row)}: {entry}, and of the same class {other}")
    return list(made.values())


def text(before: str, found: Iterable[dict[str, Any]]) -> str:
    """The table's text with these entries, one a line, and its rates as they stand."""
    head = before[: before.index('"entries":')]
    lines = ",\n".join(f"    {json.dumps(entry)}" for entry in found)
    return f'{head}"entries": [\n{lines}\n  ]\n}}\n'


def main(given: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args(given)
    found = [entry for path in arguments.records for entry in entries(json.loads(path.read_text(encoding="utf-8")))]
    if arguments.check:
        same = dispatch.table()["entries"] == found
        sys.exit(0 if same else f"{TABLE} is not what the records say: write it again")
    TABLE.write_text(text(TABLE.read_text(encoding="utf-8"), found), encoding="utf-8")
