"""The page of faults, ``docs/faults.md``: what was done, how the call ended, in what time; and the soak's sums.

python benchmarks/run.py report faults            # writes
python benchmarks/run.py report faults --check    # status 1 if the page is not what the records say
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.core.paths import DOCS, RESULTS
from benchmarks.core.records import Data, Row, load, paths
from benchmarks.report.notes import Notes

NOTES = Notes("faults")
PAGE = DOCS / "faults.md"
#: From how many seconds on a bound is that of a call which waits for what is sure to come.
LONG = 60.0
#: Records of `tests/soak`, what of a row counts, and what that is.
MANY = (
    ("soak", "launches", "launches of random shapes, schedules and arrivals"),
    ("malformed", "calls", "malformed calls"),
    ("parsers", "files", "damaged files"),
)


def page(results: Path = RESULTS) -> str:
    found = [load(path) for path in paths(results, "faults.json")]
    found.sort(key=lambda data: data["folder"] != "cpu")
    parts = [NOTES("page", what=" ".join(map(_made_on, found)))]
    rows = {(row["part"], row["name"]): row for data in reversed(found) for row in data["rows"]}
    order = list(dict.fromkeys(row["part"] for data in found for row in data["rows"]))
    for part in order:
        of_part = {key: row for key, row in sorted(rows.items(), key=lambda one: _at(found, one[0])) if key[0] == part}
        heads = ["fault", "what is done", "ends", "may wait", *(_name(data) for data in found)]
        rule = ["---"] * 3 + ["---:"] * (len(heads) - 3)
        lines = [heads, rule, *(_line(key, row, found) for key, row in of_part.items())]
        parts += [f"## {part[0].upper()}{part[1:]}", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
    return "\n\n".join([*parts, *_many(results)]) + "\n"


def _many(results: Path) -> list[str]:
    """What was launched, called and read by the thousand; nothing where there is no record of it."""
    lines = []
    for name, counted, what in MANY:
        for data in map(load, paths(results, f"{name}.json")):
            rows = data["rows"]
            # What a run found and a commit has mended since is no fault of what is here.
            drifted = [row for row in rows if row.get("drifted")]
            wrong = [one for row in rows for one in row["wrong"]]
            wrong += [one for row in drifted if "mended" not in row for one in row["drifted"]]
            seeds = ranges(row["seed"] for row in rows)
            spent = sum(row["cpu_seconds"] for row in rows) / 60
            count = sum(row[counted] for row in rows)
            ended = "nothing" if not wrong else "; ".join(wrong[:3]).replace("|", "/")
            mended = [f"seed {row['seed']}, mended at `{row['mended']}`" for row in drifted if "mended" in row]
            ended += f" (memory of {', '.join(mended)})" if mended else ""
            lines.append([what, _name(data), f"{count:,}", f"{spent:.1f}", seeds, ended])
    if not lines:
        return []
    heads = ["what", "on", "how many", "CPU minutes", "seeds", "wrong, or drifted"]
    rule = ["---", "---", "---:", "---:", "---", "---"]
    return [NOTES("many"), "\n".join(f"| {' | '.join(line)} |" for line in [heads, rule, *lines])]


def ranges(seeds: Iterable[int]) -> str:
    """Numbers in order, neighbours as a range."""
    found: list[list[int]] = []
    for seed in sorted(set(seeds)):
        if found and seed == found[-1][-1] + 1:
            found[-1].append(seed)
        else:
            found.append([seed])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in found)


def _at(found: list[Data], key: tuple[str, str]) -> int:
    """Where a row stands in the first record that has it."""
    for data in found:
        for at, row in enumerate(data["rows"]):
            if (row["part"], row["name"]) == key:
                return at
    return -1


def _line(key: tuple[str, str], row: Row, found: list[Data]) -> list[str]:
    within = float(row["within"])
    waits = "-" if not within else ("until it comes" if within >= LONG else f"{within:g} s")
    seconds = [
        next((_shown(one["seconds"]) for one in data["rows"] if (one["part"], one["name"]) == key), "")
        for data in found
    ]
    ends = {_kind(row): _ended(row)}
    for data in found:  # where a device ends otherwise, after its own wait
        for one in data["rows"]:
            if (one["part"], one["name"]) == key and (kind := _kind(one)) not in ends:
                after = f" after {one['within']:g} s" if one["within"] not in (0, row["within"]) else ""
                ends[kind] = f"{_name(data)}: {_ended(one)}{after}"
    return [row["name"], row["does"].replace("|", "/"), "; ".join(ends.values()), waits, *seconds]


def _kind(row: Row) -> str:
    """The exception's name, or ``right``."""
    return str(row["ended"]).partition(":")[0]


def _ended(row: Row) -> str:
    ended = str(row["ended"])
    return ended if ended == "right" else f"`{ended.replace('|', '/')}`"


def _shown(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"


def _name(data: Data) -> str:
    return "CPU" if data["folder"] == "cpu" else str(data["folder"]).upper()


def _made_on(data: Data) -> str:
    failed = "none ended otherwise" if not data["failures"] else f"otherwise ended: {'; '.join(data['failures'])}"
    cores = f" with {data['cores']} cores" if "cores" in data else ""
    missing = f"; not made: {'; '.join(data['missing'])}" if data.get("missing") else ""
    return (
        f"{_name(data)}: {len(data['rows'])} faults on {data['device']}{cores}, torch {data['torch']}, "
        f"commit {data['commit']}, {data['date']}; {failed}{missing}."
    )


def main(arguments: list[str]) -> int:
    made = page()
    if arguments == ["--check"]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != made:
            print(
                "docs/faults.md: not what the records say: run python benchmarks/run.py report faults", file=sys.stderr
            )
            return 1
        return 0
    PAGE.write_text(made, encoding="utf-8")
    return 0
