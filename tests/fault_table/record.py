"""Make every fault of the table once, and write down how each ended.

    PYTHONPATH=src python -m fault_table.record [--out DIR] [--only REGEX]     # from tests/, on the CPU

Writes DIR/<device>/faults.json (default: benchmarks/results), from which ``benchmarks/run.py report faults`` makes
docs/faults.md. The exit status is 1 if a fault ended otherwise than its row says. On GPUs the pass ``faults`` of
tests/gpu/record.py writes it; ``--device cuda`` makes them without pytest.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

if str(Path(__file__).parents[2]) not in sys.path:
    sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.core.paths import RESULTS
from benchmarks.core.records import Record

from fault_table import rows  # noqa: F401
from fault_table.engine import TABLE, Fault, Outcome, Place, run
from fault_table.ranks import Ranks, ranks_of, why_not


def made(row: Fault, device: str, ranks: Ranks) -> Outcome:
    """Make a fault in a folder of its own."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        place = Place(device, Path(folder), pytest.MonkeyPatch(), ranks)
        if place.is_gpu and torch.cuda.is_available():
            place.again()  # kernels are loaded when nothing waits
        return run(row.on(device), place)


def note(record: Record, row: Fault, outcome: Outcome) -> None:
    """Add how a fault ended."""
    about = {"part": row.part, "name": row.name, "does": row.does, "within": row.within}
    if outcome.wrong:
        record.fail(f"{row.part}: {row.name}: {outcome.wrong}")
    record.add(about | {"ended": _shown(outcome.ended), "seconds": round(outcome.seconds, 4)})


def leave_out(record: Record, why: str) -> None:
    """Note a fault that this machine cannot make."""
    record.data["missing"].append(why)
    record.write()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make every fault of the table, and write down how it ended.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the records")
    parser.add_argument("--only", default="", help="a regular expression of part and name")
    given = parser.parse_args(arguments)
    chosen = [row for row in TABLE if given.device in row.where and re.search(given.only, f"{row.part}: {row.name}")]
    record = Record("faults", given.out, cpu=given.device == "cpu")
    with ranks_of(given.device) as ranks:
        for row in chosen:
            if why := why_not(row, given.device):
                leave_out(record, why)
                print(f"   left out  {why}", flush=True)
                continue
            outcome = made(row, given.device, ranks)
            note(record, row.on(given.device), outcome)
            print(
                f"{outcome.seconds:7.3f} s  {row.part}: {row.name}: {outcome.wrong or outcome.ended[:100]}", flush=True
            )
    return int(bool(record.data["failures"]))


def _shown(ended: str) -> str:
    """The beginning of the first line, without the folders of this run."""
    line = re.sub(r"/\S*/(?=fault)", "", next(iter(ended.splitlines()), "")).removesuffix(": ")
    return line if len(line) <= 120 else f"{line[:117].rpartition(' ')[0]} ..."


if __name__ == "__main__":
    sys.exit(main())
