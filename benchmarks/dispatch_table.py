"""From records of gpu_all_gather.py to the table by which ops across ranks decide: fused or not, in how many chunks.

    PYTHONPATH=src:benchmarks python benchmarks/dispatch_table.py RECORD.json ... [--check]

Writes the entries of ``src/tilestream/distributed/table.json``, all of them from the records that are given, and leaves
its rates. Of each shape the form that took least counts; one in more chunks has to be faster by `WORTH`, and so has any
fused form beside NCCL and the faster matmul behind it: what is as fast without is simpler, and holds no memory.
``--check`` writes nothing, and fails where the table is not what the records say.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tilestream.distributed import dispatch

TABLE = Path(dispatch.__file__).with_name("table.json")
#: Share of the time by which more chunks, or a fused form, must be faster than what is simpler.
WORTH = 0.01
#: What a record's device is compiled for.
ARCH = {"H100": "sm_90", "H200": "sm_90"}


def decided(ms: dict[str, float]) -> tuple[bool, int]:
    """Fused or not, and in how many chunks, by what each form took."""
    best: tuple[bool, int] = (False, 1)
    least = min(ms[name] for name in ("nccl + mm", "nccl + ours") if name in ms)
    fused = sorted(int(name.split()[1]) for name in ms if name.startswith("fused "))
    for chunks in fused:
        if ms[f"fused {chunks}"] < least * (1 - WORTH):
            best, least = (True, chunks), ms[f"fused {chunks}"]
    return best


def entries(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries that a record makes, one a shape class.

    Raises
    ------
    ValueError
        If a device is not known, or two shapes of a class are decided otherwise: then the classes are too coarse.
    """
    device = next((arch for name, arch in ARCH.items() if name in record["device"]), None)
    if device is None:
        raise ValueError(f"device={record['device']!r}; it is one of {', '.join(ARCH)}")
    made: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in record["rows"]:
        fused, chunks = decided(row["ms"])
        case = dispatch.Case(
            row["op"], row["rows"], row["n"], row["k"], row["width"], record["world"], record["dtype"], 2, device
        )
        entry = {
            "op": case.op, "rows": case.rows, "n": case.n, "k": case.k, "world": case.world, "dtype": case.dtype,
            "device": device, "fused": fused, "chunks": chunks,
            "source": f"{record['world']} x {record['device'].removeprefix('NVIDIA ')}, {record['date']}",
        }  # fmt: skip
        other = made.setdefault((case.op, case.shape_class), entry)
        if (other["fused"], other["chunks"]) != (fused, chunks):
            raise ValueError(f"{row['op']} {row['m']}x{row['n']}x{row['k']}: {entry}, and of the same class {other}")
    return list(made.values())


def text(before: str, found: Iterable[dict[str, Any]]) -> str:
    """The table's text with these entries, one a line, and its rates as they stand."""
    head = before[: before.index('"entries":')]
    lines = ",\n".join(f"    {json.dumps(entry)}" for entry in found)
    return f'{head}"entries": [\n{lines}\n  ]\n}}\n'


def main() -> None:
    """Write the table, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    found = [entry for path in arguments.records for entry in entries(json.loads(path.read_text(encoding="utf-8")))]
    if arguments.check:
        same = dispatch.table()["entries"] == found
        sys.exit(0 if same else f"{TABLE} is not what the records say: write it anew")
    TABLE.write_text(text(TABLE.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
