"""Execute cases on the emulator, and print what came of each, a JSON object a line.

``quick`` or ``all``, or a part of names; ``--seeds N`` orders of each ``--landing late,random,early``. Instead of
cases:

* ``faults`` seeds ``--seeds N`` faults of each kind, or of those with ``--kind`` in their names; ``undrained`` takes
  the drain out of each hand-over (`executed.faults`);
* ``elementwise`` and ``moves`` compare single operations with numpy (the modules of these names), ``folding`` with
  LLVM's constant folding, ``interpreted --file FILE`` with Triton's interpreter: a process that has it, by
  TRITON_INTERPRET=1, writes the file, another one compares;
* ``mnemonics`` runs each case once, and says which instructions that has executed;
* ``alike`` says in which order each tile of a GEMM adds, ``alike-quick`` that of a sample (`executed.alike`). Their
  record is ``benchmarks/results/amd/alike.json``.

``--record FILE`` adds the rows to a record, which ``python benchmarks/run.py amd table`` puts into docs/amd.md.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton

from executed import elementwise, moves
from executed.cases import ARCHS, Case, cases
from executed.problems import MNEMONICS

#: What a record has, beside Triton's version.
_KINDS = ("rows", "faults", "mnemonics")


def chosen(what: str) -> Iterator[Case]:
    """Those of the sample, all of them, or those with this in their names."""
    for case in cases():
        full = f"{case.arch} {case.kernel}: {case.name}"
        if what == "all" or (what == "quick" and case.quick) or what in full:
            yield case


def row(case: Case, seeds: int, landings: tuple[str, ...]) -> dict[str, Any]:
    """A case under several orders: how many are right, and what the first wrong one had."""
    problem, right, wrong, executed, seconds = case.make(), 0, "", 0, 0.0
    orders = [(landing, seed) for seed in range(seeds) for landing in landings]
    for landing, seed in orders:
        try:
            machine = problem.run(landing=landing, seed=seed)
            executed, seconds, right = executed + machine.executed, seconds + machine.seconds, right + 1
        except Exception as error:
            wrong = wrong or f"{landing} {seed}: {type(error).__name__}: {error}"[:600]
        gc.collect()
    return {
        "kernel": case.kernel, "name": case.name, "arch": case.arch, "orders": len(orders), "right": right,
        "wrong": wrong, "instructions": executed, "seconds": round(seconds, 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--landing", default="late,random")
    parser.add_argument("--kind", default="")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--file", type=Path)
    given = parser.parse_args()
    # What has been imported is no garbage, and what a launch leaves is collected behind it: to look at all again and
    # again while it runs takes a third of the time.
    gc.freeze()
    gc.disable()
    rows = []
    if given.what == "faults":
        from executed import faults

        rows = faults.table(list(faults.tried(given.seeds, only=given.kind)))
        print("\n".join(map(json.dumps, rows)))
    if given.what == "undrained":
        from executed import faults

        rows = [faults.undrained(*names) for names in faults.HAND_OVERS]
        print("\n".join(map(json.dumps, rows)))
    if given.what == "interpreted":
        rows = elementwise.interpreted(ARCHS, given.file)
        print("\n".join(map(json.dumps, rows)))
    if given.what in ("elementwise", "moves", "folding"):
        rows = [row for arch in ARCHS for row in compared(given.what, arch)]
        print("\n".join(map(json.dumps, rows)))
    if given.what in ("alike", "alike-quick"):
        from executed import alike

        for one in alike.cases(given.what == "alike-quick"):
            rows.append(alike.row(one))
            print(json.dumps(rows[-1]), flush=True)
            gc.collect()
        if given.record:
            alike.write(given.record, rows)
        return
    if given.what == "mnemonics":
        rows = [mnemonics()]
        print(json.dumps(rows[0]))
    for case in chosen(given.what):
        rows.append(row(case, given.seeds, tuple(given.landing.split(","))))
        print(json.dumps(rows[-1]), flush=True)
    if given.record:
        write(given.record, rows, given.what if given.what in _KINDS else "rows")


def compared(what: str, arch: str) -> list[dict[str, Any]]:
    """Single operations beside an oracle, a row each."""
    if what == "folding":
        from executed import folding  # which needs Triton's LLVM

        return folding.rows(arch)
    return (elementwise if what == "elementwise" else moves).rows(arch)


def mnemonics() -> dict[str, Any]:
    """Of all cases; and of single operations, which are compared with oracles."""
    for arch, what in itertools.product(ARCHS, ("elementwise", "moves", "folding")):
        compared(what, arch)
    alone = {*MNEMONICS}
    MNEMONICS.clear()
    for case in cases():
        case.make().run(landing="random", seed=1)
        gc.collect()
    return {"executed": sorted(MNEMONICS), "compared": sorted(alone)}


def _of(row: dict[str, Any]) -> tuple[str, ...]:
    return row["kernel"], row["name"], row["arch"]


def write(file: Path, rows: list[dict[str, Any]], kind: str) -> None:
    """Put rows into a record, a line each: those of cases in place of the same cases', else of all of their kind."""
    record = {name: [] for name in _KINDS} | (json.loads(file.read_text(encoding="utf-8")) if file.exists() else {})
    if kind == "rows":
        new = {_of(row): row for row in rows}
        kept = {_of(row): row for row in record[kind]}
        rows = [row for case in cases() if (row := new.get(key := _of(case._asdict()), kept.get(key)))]
    record |= {kind: rows, "triton": triton.__version__.partition("+")[0]}
    parts = [f' "triton": {json.dumps(record["triton"])}']
    for name in _KINDS:
        lines = ",\n".join(f"  {json.dumps(row)}" for row in record[name])
        parts.append(f' "{name}": [\n{lines}\n ]')
    file.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
