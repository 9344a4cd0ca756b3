"""Draws mutants of the package, runs the tests closest to each, and writes down what they saw.

    cd tests; python -m mutants.drawn [--count N] [--only REGEX] [--processes 2] [--seconds 600] [--again] [--check]

One mutant is a copy of ``src`` with one module changed, in front of all others on PYTHONPATH: so the processes that
tests start run the mutant, too. It is killed if a test fails or runs out of CPU time: one that runs the function
(`mutants.reach`), or of a file of `mutants.closest`. The record, ``record.json``, is written after each mutant, with
the commit whose tests ran. A later run goes on with what is missing or has changed: a verdict counts for as long as the
module's text and the key are the same. A mutant that few tests do not see is open until a later run judges it by more.
``survivors.txt`` has a reason for each that was not killed. ``--check`` runs what has killed on the package as it is; a
verdict by a test that fails there is void.

``--page`` writes docs/mutants.md from the record; ``--holes`` judges the mistakes of tables/holes.txt.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from mutants import reach
from mutants.closest import INTERPRETED, ROOT, SRC, closest, module_of, path_of
from mutants.engine import Edit, edited
from mutants.operators import Mutant, draw, rank, sites
from mutants.table import read
from mutants.warm import Outcome, Warm

SEED = "tilestream"
HERE = Path(__file__).parent
RECORD, SURVIVORS, PAGE = HERE / "record.json", HERE / "tables" / "survivors.txt", ROOT / "docs" / "mutants.md"
#: CPU seconds of one process of a test run, where the tests' own time is not known. The slowest test file takes 60; a
#: mutant may loop for ever.
CPU_SECONDS = 400
#: Seconds of a test run: a mutant may wait for ever.
SECONDS = 1200
#: How the reason of a survivor begins that no test could kill, and of one that a test on a GPU may.
ALIKE, ON_GPUS = "Changes nothing", "GPU:"
#: Files that run on a mutant at first.
NEXT = 3
#: Groups of modules, by the beginning of their names, and how many mutants are drawn of each.
GROUPS = {
    "schedule": (("tilestream.core",), 50),
    "arrival": (("tilestream.arrival",), 40),
    "kernels: shared": (("tilestream.kernels.device", "tilestream.kernels.config", "tilestream.kernels.attention"), 25),
    "kernels: CPU": (("tilestream.kernels.cpu",), 12),
    "kernels: portable": (("tilestream.kernels.portable",), 18),
    "kernels: Hopper": (("tilestream.kernels.hopper",), 20),
    "kernels: CDNA": (("tilestream.kernels.cdna",), 15),
    "plan": (("tilestream.plan",), 35),
    "launch": (("tilestream.launch",), 30),
    "ops": (("tilestream.ops",), 35),
    "distributed": (("tilestream.distributed",), 30),
    "runtime": (("tilestream.runtime",), 20),
    "verify": (("tilestream_tools.verify",), 30),
    # Parts across these folders: what is drawn already is not drawn again.
    "grouped products": (
        (
            "tilestream.arrival.by_source", "tilestream.core.groups", "tilestream.core.sources",
            "tilestream.kernels.device.groups", "tilestream.kernels.device.sources",
            "tilestream.kernels.hopper.grouped", "tilestream.kernels.portable.grouped",
            "tilestream.launch.grouped_arguments", "tilestream.launch.hopper.grouped",
            "tilestream.launch.hopper.sources", "tilestream.launch.portable.grouped",
            "tilestream.launch.portable.sources", "tilestream.ops.grouped", "tilestream.plan.grouped",
        ),
        27,
    ),
    "mixtures of experts": (
        (
            "tilestream.core.protocols.experts", "tilestream.distributed.graph_experts", "tilestream.distributed.moe",
            "tilestream.kernels.portable.experts", "tilestream.launch.portable.experts",
        ),
        14,
    ),
    "costs, realign": (
        (
            "tilestream.kernels.portable.realign", "tilestream.launch.hopper.realign",
            "tilestream.plan.policy.hopper_costs", "tilestream.plan.realign",
        ),
        13,
    ),
}  # fmt: skip
NUM_TENTH = sum(count for _, count in GROUPS.values()) // 10
#: What only says how something is shown, or is not reached without a GPU.
_LEFT_OUT = re.compile(r"\.__init__$|\._version$|\.explain$|\.runtime\.driver\.|\.kernels\.device\.jit$|\.compat$")


def modules(group: str) -> list[str]:
    """The modules of a group."""
    folders, _ = GROUPS[group]
    every = (module_of(path) for path in sorted(SRC.rglob("*.py")))
    return [one for one in every if one.startswith(folders) and not _LEFT_OUT.search(one)]


@functools.cache
def drawn(seed: str = SEED) -> list[tuple[str, Mutant]]:
    """The mutants of every group, and the group of each."""
    found: dict[str, tuple[str, Mutant]] = {}
    for group, (_, count) in GROUPS.items():
        every = (one for module in modules(group) for one in sites(module, path_of(module).read_text(encoding="utf-8")))
        found |= {one.key: (group, one) for one in draw((one for one in every if one.key not in found), count, seed)}
    return list(found.values())


class Hole(NamedTuple):
    """A mistake of ``tables/holes.txt``: made by hand, and seen by no test once."""

    name: str
    module: str
    edits: tuple[Edit, ...]
    test: str

    def apply(self, text: str) -> str:
        """As `Mutant.apply`."""
        return edited(text, self.edits)


class _Modules(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return f"tilestream.{name}"


def holes() -> list[Hole]:
    """The table's holes; each edits one module."""
    rows = read("holes.txt", _Modules())
    found = []
    for row in rows:
        test = "::".join(filter(None, (row.found, row.options.get("only"))))
        found.append(Hole(row.name, row.edits[0].module, row.edits, test))
    return found


# Running --------------------------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """How the tests ended, and the test that failed first.

    ``killed``; ``time``: killed, too, it ran out; ``open``: the few tests that run at first have not seen it;
    ``survived``: those of a thorough run have not.
    """

    how: str
    by: str
    seconds: float


class Run(NamedTuple):
    """Tests that run in one process.

    Attributes
    ----------
    tests, only
        As of `warm.run`.
    cpu
        CPU seconds of each process.
    cases
        Cases of each test function at most; 0: all.
    """

    tests: Sequence[str]
    only: Sequence[str] = ()
    cpu: int = CPU_SECONDS
    cases: int = 0

    @property
    def interpreted(self) -> bool:
        return self.tests[0].startswith(INTERPRETED)


@functools.cache
def commit() -> str:
    """The commit of the working tree. COMMIT names it where the tree is a copy without its history."""
    if named := os.environ.get("COMMIT"):
        return named
    run = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return run.stdout.strip()


def copied(source: Path, folder: Path) -> Path:
    """A copy of the package's sources, beside links to what else the repository has (its examples)."""
    for other in ROOT.iterdir():
        if other.name != SRC.name and not other.name.startswith("."):
            (folder / other.name).symlink_to(other)
    return Path(shutil.copytree(source, folder / SRC.name))


class Servers:
    """A `Warm` for each thread that judges, without Triton's interpreter and with it; and the package, compiled."""

    def __init__(self) -> None:
        self._all: list[Warm] = []
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._package: tempfile.TemporaryDirectory[str] | None = None
        self.stop = False  # begin no more

    def package(self) -> Path:
        """A copy of `SRC` as it is now, with its bytecode: what every mutant is a copy of."""
        with self._lock:
            if self._package is None:
                self._package = tempfile.TemporaryDirectory(prefix="mutants-")
                compileall.compile_dir(copied(SRC, Path(self._package.name)), quiet=2)
            return Path(self._package.name) / "src"

    def run(self, source: Path, one: Run) -> Outcome:
        if self.stop:
            raise SystemExit("judging ends")
        mine: dict[bool, Warm] = vars(self._mine).setdefault("servers", {})
        if one.interpreted not in mine:
            mine[one.interpreted] = Warm(one.interpreted)
            self._all.append(mine[one.interpreted])
        return mine[one.interpreted].run(
            source, one.tests, one.only, cpu=one.cpu, seconds=SECONDS, cases=one.cases
        )  # fmt: skip

    def close(self) -> None:
        while self._all:
            self._all.pop().close()
        self._mine = threading.local()
        if self._package is not None:
            self._package.cleanup()
            self._package = None


_servers = Servers()


@contextlib.contextmanager
def judging() -> Iterator[None]:
    """A block whose servers, and what they run, end with it; by Ctrl-C and by SIGTERM, too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    except BaseException:
        _servers.stop = True
        raise
    finally:
        _servers.close()
        signal.signal(signal.SIGTERM, before)


def judge(mutant: Mutant | Hole, runs: Iterable[Run]) -> Verdict:
    """Run tests on a mutant until one fails; inside of `judging`."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        source = copied(_servers.package(), Path(folder))
        path = source / path_of(mutant.module).relative_to(SRC)
        path.write_text(mutant.apply(path.read_text(encoding="utf-8")), encoding="utf-8")
        for one in runs:
            status, by, _ = _servers.run(source, one)
            if status not in (0, 5) and _passes(by or one.tests[0]):  # 5: no test was chosen
                return Verdict("time" if status == -1 else "killed", by or one.tests[0], _since(began))
    return Verdict("survived", "", _since(began))


@functools.cache
def _passes(test: str) -> bool:
    """Whether a test passes on the package as it is. A file, which failed as it was collected: whether it imports."""
    status, _, _ = _servers.run(_servers.package(), Run([test.partition("::")[0]], [test]))
    return status in (0, 5)


def _since(began: float) -> float:
    return round(time.monotonic() - began, 1)


def runs_of(mutant: Mutant, killer: str = "", thorough: bool = False) -> list[Run]:
    """What runs on a mutant: the test that has killed it before, those that run its function, the closest files.

    Not ``thorough``: where it is known which tests run the function (`mutants.reach`), a share of them runs and no
    files; else the three closest files, two cases of each test function of the first, one of the others. ``thorough``:
    all that are known, and twice as many cases of all close files.
    """
    found = [Run([killer.partition("::")[0]], [killer])] if "::" in killer else []
    near, batches = closest(mutant.module), reach.batches(mutant.module, mutant.function, 1.0 if thorough else 0.05)
    for some in (batches[:1], batches[1:]):
        for interpreted in (False, True):
            those = [one for one in some if one.file.startswith(INTERPRETED) == interpreted]
            tests = [test for one in those for test in one.tests]
            if tests:
                cpu = int(30 + 5 * sum(one.seconds for one in those))
                found.append(Run([one.file for one in those], tests, cpu))
    left = list(near) if thorough else [] if batches else near[:NEXT]
    for at, file in enumerate(left):
        last = found[-1] if found else None
        if at > 1 and last and last.interpreted == file.startswith(INTERPRETED):
            found[-1] = last._replace(tests=[*last.tests, file])
        else:
            cases = 1 if at or file.startswith(INTERPRETED) else 2
            found.append(Run([file], cases=2 * cases if thorough else cases))
    return found


# The record -----------------------------------------------------------------------------------------------------------


def read_record() -> dict[str, dict[str, Any]]:
    """Verdicts by key."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def write_record(record: dict[str, dict[str, Any]]) -> None:
    """Write all verdicts, at once or not at all."""
    text = "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(row)}" for key, row in sorted(record.items())) + "\n}\n"
    new = RECORD.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(RECORD)


def text_hash(module: str) -> str:
    return hashlib.sha1(path_of(module).read_bytes()).hexdigest()[:12]


def entry(group: str, mutant: Mutant, verdict: Verdict) -> dict[str, Any]:
    """A row of the record."""
    about = {"group": group, "module": mutant.module, "function": mutant.function, "line": mutant.line}
    how = {"operator": mutant.operator, "says": mutant.says, "text": text_hash(mutant.module), "commit": commit()[:12]}
    return about | how | verdict._asdict()


def reasons() -> dict[str, str]:
    """The reasons why survivors survive, by key: lines ``key reason``."""
    lines = (line for line in SURVIVORS.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#"))
    return {key: reason for key, _, reason in (line.partition(" ") for line in lines)}


def tenth(commit: str) -> list[Mutant]:
    """A tenth of the mutants, chosen by a commit."""
    every = sorted((one for _, one in drawn()), key=lambda one: rank(commit, one.key))
    return every[:NUM_TENTH]


def run(chosen: Sequence[tuple[str, Mutant]], processes: int, seconds: float, thorough: bool = False) -> None:
    """Judge mutants until the time is over. One that is open is judged thoroughly."""
    record, end = read_record(), time.monotonic() + seconds

    def judged(group: str, mutant: Mutant) -> tuple[str, Mutant, Verdict | None]:
        begins = time.monotonic() < end and not _servers.stop
        row = record.get(mutant.key, {})
        if not begins:
            return group, mutant, None
        is_thorough = thorough or row.get("how") in ("open", "survived")
        verdict = judge(mutant, runs_of(mutant, row.get("by", ""), is_thorough))
        is_open = verdict.how == "survived" and not is_thorough
        return group, mutant, verdict._replace(how="open") if is_open else verdict

    with ThreadPoolExecutor(processes) as pool, judging():  # the servers end first: the threads wait for them
        futures = [pool.submit(judged, *one) for one in chosen]
        for done, future in enumerate(as_completed(futures), 1):
            group, mutant, verdict = future.result()
            if verdict is None:
                continue
            write_record(
                read_record() | {mutant.key: entry(group, mutant, verdict)}
            )  # others may have judged meanwhile
            print(f"{done}/{len(chosen)} {verdict.how} {verdict.seconds:.0f} s {mutant.module}:{mutant.line} "
                  f"{mutant.operator}: {mutant.says}  {verdict.by}", flush=True)  # fmt: skip


def check_killers(record: dict[str, dict[str, Any]], keys: Iterable[str]) -> list[str]:
    """Run what killed these mutants on the package as it is; void the verdicts by what fails there. What failed."""
    killers = defaultdict(list)
    for key in keys:
        if record[key]["how"] == "killed":
            killers[record[key]["by"]].append(key)
    failed: list[str] = []
    for interpreted in (False, True):
        tests = [test for test in killers if test.startswith(INTERPRETED) == interpreted]
        while tests:
            files = sorted({test.partition("::")[0] for test in tests})
            status, by, output = _servers.run(_servers.package(), Run(files, tests, cpu=3600))
            if status in (0, 5):  # 5: all have killed as they were imported
                break
            if by not in tests:
                raise SystemExit(f"the tests cannot be run on the package as it is:\n{output[-2000:]}")
            failed.append(by)
            tests.remove(by)
    for test in failed:
        for key in killers[test]:
            del record[key]
    write_record(record)
    return failed


# The page -------------------------------------------------------------------------------------------------------------


_INTRODUCTION = """\
# Mutants

<!-- made by `make mutants` (tests/mutants/drawn.py) of record {record} -->

A mutant is this package with one small mistake: a comparison, a bound, an operation, a number, a condition, an
argument, a statement, an element of a key or a memory order is another, or is not there. Mutants are drawn by a seed,
evenly over operators, and the tests closest to the module run on each. A survivor is a mistake that these tests do not
see, or one that changes nothing; each has a reason.
"""


def counted(record: Mapping[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """The verdicts that count, by key, and the group of each: on a drawn mutant, of its module's text as it is now."""
    found = ((group, one, record.get(one.key)) for group, one in drawn())
    return {
        one.key: (group, row) for group, one, row in found
        if row is not None and row["how"] != "open" and row["text"] == text_hash(one.module)
    }  # fmt: skip


def record_hash() -> str:
    """Of the record that a page is made of."""
    return hashlib.sha1(RECORD.read_bytes()).hexdigest()[:12]


def page() -> str:
    """docs/mutants.md: of the mutants that are drawn of the package as it is now."""
    record, why = counted(read_record()), reasons()
    of_group: dict[str, Counter[str]] = defaultdict(Counter)
    for group, row in record.values():
        of_group[group][row["how"]] += 1
    survivors = [(key, row) for key, (_, row) in sorted(record.items()) if row["how"] == "survived"]
    by = Counter(row["by"].partition("::")[0] for _, row in record.values() if row["by"])
    total = sum(of_group.values(), Counter())
    judged, killed = len(record), total["killed"] + total["time"]
    share = f" ({100 * killed / judged:.0f} %)" if judged else ""
    alike, on_gpus = (sum(why.get(key, "").startswith(word) for key, _ in survivors) for word in (ALIKE, ON_GPUS))
    lines = [
        *_INTRODUCTION.format(record=record_hash()).splitlines(),
        "",
        f"At commit {commit()[:8]}: drawn {len(drawn())}; judged {judged}, since their module changed last; killed "
        f"{killed}{share}. Of the {len(survivors)} survivors {alike} change nothing that can be seen: {killed} of the "
        f"other {judged - alike} are killed ({100 * killed / max(judged - alike, 1):.0f} %). {on_gpus} are in what "
        "runs on a GPU alone.",
        "",
        "| part | drawn | judged | killed | survived |",
        "|---|---|---|---|---|",
    ]
    for group, (_, count) in GROUPS.items():
        found = of_group[group]
        numbers = count, found.total(), found["killed"] + found["time"], found["survived"]
        lines.append(f"| {group} | {' | '.join(map(str, numbers))} |")
    lines += ["", "## Survivors", "", "| key | place | mistake | reason |", "|---|---|---|---|"]
    for key, row in survivors:
        place, says = f"{row['module'].partition('.')[2]}:{row['function']}", row["says"].replace("|", "\\|")
        lines.append(f"| {key} | `{place}` | {row['operator']}: `{says}` | {why.get(key, '')} |")
    lines += ["", "## Killed by", "", "| test file | mutants |", "|---|---|"]
    lines += [f"| `{name}` | {count} |" for name, count in sorted(by.items(), key=lambda one: (-one[1], one[0]))]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw mutants, and run the closest tests on each.")
    parser.add_argument("--only", default="", help="a regular expression of group, module, operator and key")
    parser.add_argument("--count", type=int, default=10**6, help="mutants to judge, at most")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no mutant after these")
    parser.add_argument("--again", action="store_true", help="judge survivors anew")
    parser.add_argument("--check", action="store_true", help="then run what has killed on the package as it is")
    parser.add_argument("--holes", action="store_true", help="judge the mistakes of tables/holes.txt, nothing else")
    parser.add_argument("--page", action="store_true", help="judge nothing; write the page")
    given = parser.parse_args(arguments)
    if given.holes:
        with judging():
            for hole in holes():
                if re.search(given.only, f"{hole.name} {hole.module}"):
                    print(*judge(hole, [Run([hole.test])]), hole.name, flush=True)
        return
    if not given.page:
        record = read_record()

        def is_open(mutant: Mutant) -> bool:
            row = record.get(mutant.key)
            is_known = row is not None and row["text"] == text_hash(mutant.module)
            return not is_known or row["how"] == "open" or (given.again and row["how"] == "survived")

        wanted = [
            (group, one)
            for group, one in drawn()
            if re.search(given.only, f"{group} {one.module} {one.operator} {one.key}")
        ]
        missing = (one for one in wanted if is_open(one[1]))
        chosen = sorted(missing, key=lambda one: (one[1].key in record, rank(SEED, one[1].key)))[: given.count]
        keys = {one.key for _, one in drawn()}
        write_record({key: row for key, row in record.items() if key in keys})
        run(chosen, given.processes, given.seconds)
        record = read_record()
        if given.check:
            with judging():
                for test in check_killers(record, record):
                    print(f"fails without a mutant, too, and its verdicts are void: {test}")
    PAGE.write_text(page(), encoding="utf-8")
    print(page().partition("## Killed by")[0])


if __name__ == "__main__":
    main()
