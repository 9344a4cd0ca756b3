"""Make every fault of the table once, and write down how each ended.

    PYTHONPATH=src python -m fault_table.record [--device cuda] [--out DIR] [--only REGEX]     # from tests/

Writes DIR/<device>/faults.json (default: benchmarks/results), from which ``benchmarks/run.py report faults`` makes
docs/faults.md. The exit status is 1 if a fault ended otherwise than its row says. On a GPU: a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

if str(Path(__file__).parents[2]) not in sys.path:
    sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.core.paths import RESULTS
from benchmarks.core.records import Record

from fault_table import rows  # noqa: F401
from fault_table.engine import TABLE, Place, run, use_folders


@contextlib.contextmanager
def pool_of_ranks() -> Iterator[Callable[[], Any]]:
    """Gives the ranks' pool, which is made at the first use."""
    use_folders("distributed")
    made: list[Any] = []

    def pool() -> Any:
        from pool import Pool

        if not made:
            made.append(Pool())
        return made[0]

    yield pool
    for one in made:
        one.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make every fault of the table, and write down how it ended.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the records")
    parser.add_argument("--only", default="", help="a regular expression of part and name")
    given = parser.parse_args(arguments)
    chosen = [row for row in TABLE if given.device in row.where and re.search(given.only, f"{row.part}: {row.name}")]
    record = Record("faults", given.out, cpu=given.device == "cpu")
    with pool_of_ranks() as pool:
        for row in chosen:
            torch.manual_seed(0)
            with tempfile.TemporaryDirectory(prefix="fault-") as folder:
                place = Place(given.device, Path(folder), pytest.MonkeyPatch(), pool)
                if place.is_gpu:
                    place.again()  # kernels are loaded when nothing waits
                outcome = run(row, place)
            about = {"part": row.part, "name": row.name, "does": row.does, "within": row.within}
            record.add(about | {"ended": _shown(outcome.ended), "seconds": round(outcome.seconds, 4)})
            if outcome.wrong:
                record.fail(f"{row.part}: {row.name}: {outcome.wrong}")
                record.write()
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
