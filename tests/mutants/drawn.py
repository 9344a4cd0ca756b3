"""Draws mutants of the package, runs the tests closest to each, and writes down what they saw.

    cd tests; python -m mutants.drawn [--count N] [--only REGEX] [--processes 2] [--seconds 600] [--again] [--page]

One mutant is a copy of ``src`` with one module changed, in front of all others on PYTHONPATH: so the processes that
tests start run the mutant, too. It is killed if a test of `mutants.closest` fails or runs out of CPU time. The record,
``record.json``, is written after each mutant, and a later run goes on with what is missing, or has changed: a verdict
counts for as long as the module's text and the key are the same. ``survivors.txt`` has a reason for each that was not
killed. At the end the tests that killed are run on the package as it is; a verdict by one that fails there is void.

``--page`` writes docs/mutants.md from the record; ``--holes`` judges the mistakes of tables/holes.txt.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from mutants.closest import ROOT, SRC, TESTS, closest, module_of, path_of
from mutants.engine import Edit, edited
from mutants.operators import Mutant, draw, rank, sites
from mutants.table import read

SEED = "tilestream"
HERE = Path(__file__).parent
RECORD, SURVIVORS, PAGE = HERE / "record.json", HERE / "tables" / "survivors.txt", ROOT / "docs" / "mutants.md"
#: CPU seconds of one process of a test run. The slowest test file takes 60; a mutant may loop for ever.
CPU_SECONDS = 400
#: Seconds of a test run: a mutant may wait for ever.
SECONDS = 1200
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
}
NUM_TENTH = sum(count for _, count in GROUPS.values()) // 10
#: What only says how something is shown, or is not reached without a GPU.
_LEFT_OUT = re.compile(r"\.__init__$|\._version$|\.explain$|\.runtime\.driver\.|\.kernels\.device\.jit$|\.compat$")
_INTERPRETED = "kernels/portable/"


def modules(group: str) -> list[str]:
    """The modules of a group."""
    folders, _ = GROUPS[group]
    every = (module_of(path) for path in sorted(SRC.rglob("*.py")))
    return [one for one in every if one.startswith(folders) and not _LEFT_OUT.search(one)]


@functools.cache
def drawn(seed: str = SEED) -> list[tuple[str, Mutant]]:
    """The mutants of every group, and the group of each."""
    found = []
    for group, (_, count) in GROUPS.items():
        every = (one for module in modules(group) for one in sites(module, path_of(module).read_text(encoding="utf-8")))
        found += [(group, one) for one in draw(every, count, seed)]
    return found


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
    """How the tests ended: ``killed``, ``time`` (killed, too: it ran out), ``survived``; the test that failed first."""

    how: str
    by: str
    seconds: float


class _UnderWay(set[subprocess.Popen[bytes]]):
    stop = False  # begin no more


_under_way = _UnderWay()


def _limited() -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 10))


def _pytest(source: Path, tests: Sequence[str], interpreted: bool) -> tuple[int, str]:
    """Pytest's status, -1 where it ran out of time, and what it printed; up to the first failure."""
    command = [
        sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow and not gpu",
        "--tb=no", "--timeout", str(CPU_SECONDS), *tests,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(source)} | ({"TRITON_INTERPRET": "1"} if interpreted else {})
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        run = subprocess.Popen(
            command, cwd=TESTS, env=environment, stdout=output, stderr=output, preexec_fn=_limited
        )  # fmt: skip
        _under_way.add(run)
        try:
            status = run.wait(SECONDS)
        except subprocess.TimeoutExpired:
            status = -1
        finally:
            _end_session(run)
        output.seek(0)
        return -1 if status in (-signal.SIGXCPU, -signal.SIGKILL) else status, output.read()


def _end_session(run: subprocess.Popen[bytes]) -> None:
    """Kill what a run has left: it is the first of its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    _under_way.discard(run)


@contextlib.contextmanager
def _ending_what_runs() -> Iterator[None]:
    """A block whose test runs end with it, by Ctrl-C and by SIGTERM, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    except BaseException:
        _under_way.stop = True
        for one in list(_under_way):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
        raise


def judge(mutant: Mutant | Hole, tests: Sequence[str]) -> Verdict:
    """Run tests, files of `TESTS`, on a mutant."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(SRC, source)
        path = source / path_of(mutant.module).relative_to(SRC)
        path.write_text(mutant.apply(path.read_text(encoding="utf-8")), encoding="utf-8")
        for interpreted, files in _runs(tests):
            status, output = _pytest(source, files, interpreted)
            if status not in (0, 5):  # 5: a file whose tests are all slow
                by = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
                return Verdict("time" if status == -1 else "killed", by[1] if by else files[0], _since(began))
    return Verdict("survived", "", _since(began))


def _since(began: float) -> float:
    return round(time.monotonic() - began, 1)


def _runs(tests: Iterable[str]) -> Iterator[tuple[bool, list[str]]]:
    """Neighbours that run in one process: whether in Triton's interpreter, and which."""
    group: list[str] = []
    for test in tests:
        if group and test.startswith(_INTERPRETED) != group[0].startswith(_INTERPRETED):
            yield group[0].startswith(_INTERPRETED), group
            group = []
        group.append(test)
    if group:
        yield group[0].startswith(_INTERPRETED), group


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
    how = {"operator": mutant.operator, "says": mutant.says, "text": text_hash(mutant.module)}
    return about | how | verdict._asdict()


def reasons() -> dict[str, str]:
    """The reasons why survivors survive, by key: lines ``key reason``."""
    lines = (line for line in SURVIVORS.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#"))
    return {key: reason for key, _, reason in (line.partition(" ") for line in lines)}


def tenth(commit: str) -> list[Mutant]:
    """A tenth of the mutants, chosen by a commit."""
    every = sorted((one for _, one in drawn()), key=lambda one: rank(commit, one.key))
    return every[:NUM_TENTH]


def run(chosen: Sequence[tuple[str, Mutant]], processes: int, seconds: float) -> None:
    """Judge mutants, those first that the record does not know, until the time is over."""
    record, end = read_record(), time.monotonic() + seconds

    def judged(group: str, mutant: Mutant) -> tuple[str, Mutant, Verdict | None]:
        begins = time.monotonic() < end and not _under_way.stop
        return group, mutant, judge(mutant, closest(mutant.module)) if begins else None

    with ThreadPoolExecutor(processes) as pool, _ending_what_runs():
        futures = [pool.submit(judged, *one) for one in chosen]
        for done, future in enumerate(as_completed(futures), 1):
            group, mutant, verdict = future.result()
            if verdict is None:
                continue
            record[mutant.key] = entry(group, mutant, verdict)
            write_record(record)
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
        tests = [test for test in killers if test.startswith(_INTERPRETED) == interpreted]
        while tests:
            status, output = _pytest(SRC, tests, interpreted)
            if status == 0:
                break
            by = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
            if by is None or by[1] not in tests:
                raise SystemExit(f"the tests cannot be run on the package as it is:\n{output[-2000:]}")
            failed.append(by[1])
            tests.remove(by[1])
    for test in failed:
        for key in killers[test]:
            del record[key]
    write_record(record)
    return failed


# The page -------------------------------------------------------------------------------------------------------------


_INTRODUCTION = """\
# Mutants

<!-- made by `make mutants` (tests/mutants/drawn.py) -->

A mutant is this package with one small mistake: a comparison, a bound, an operation, a number, a condition, an
argument, a statement, an element of a key or a memory order is another, or is not there. Mutants are drawn by a seed,
evenly over operators, and the tests closest to the module run on each. A survivor is a mistake that these tests do not
see, or one that changes nothing; each has a reason.
"""


def page() -> str:
    """docs/mutants.md."""
    record, why = read_record(), reasons()
    of_group: dict[str, Counter[str]] = defaultdict(Counter)
    for row in record.values():
        of_group[row["group"]][row["how"]] += 1
    survivors = [(key, row) for key, row in record.items() if row["how"] == "survived"]
    by = Counter(row["by"].partition("::")[0] for row in record.values() if row["by"])
    total = sum(of_group.values(), Counter())
    judged, killed = total.total(), total["killed"] + total["time"]
    share = f" ({100 * killed / judged:.0f} %)" if judged else ""
    lines = [
        *_INTRODUCTION.splitlines(),
        "",
        f"Drawn: {sum(count for _, count in GROUPS.values())}; judged: {judged}; killed: {killed}{share}.",
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
    parser.add_argument("--only", default="", help="a regular expression of group, module and operator")
    parser.add_argument("--count", type=int, default=10**6, help="mutants to judge, at most")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no mutant after these")
    parser.add_argument("--again", action="store_true", help="judge survivors anew")
    parser.add_argument("--holes", action="store_true", help="judge the mistakes of tables/holes.txt, nothing else")
    parser.add_argument("--page", action="store_true", help="judge nothing; write the page")
    given = parser.parse_args(arguments)
    if given.holes:
        with _ending_what_runs():
            for hole in holes():
                if re.search(given.only, f"{hole.name} {hole.module}"):
                    print(*judge(hole, [hole.test]), hole.name, flush=True)
        return
    if not given.page:
        record = read_record()

        def is_open(mutant: Mutant) -> bool:
            row = record.get(mutant.key)
            is_known = row is not None and row["text"] == text_hash(mutant.module)
            return not is_known or (given.again and row["how"] == "survived")

        wanted = [
            (group, one) for group, one in drawn() if re.search(given.only, f"{group} {one.module} {one.operator}")
        ]
        chosen = sorted((x for x in wanted if is_open(x[1])), key=lambda x: rank(SEED, x[1].key))[: given.count]
        keys = {one.key for _, one in drawn()}
        write_record({key: row for key, row in record.items() if key in keys})
        run(chosen, given.processes, given.seconds)
        record = read_record()
        for test in check_killers(record, [one.key for _, one in chosen if one.key in record]):
            print(f"fails without a mutant, too, and its verdicts are void: {test}")
    PAGE.write_text(page(), encoding="utf-8")
    print(page().partition("## Killed by")[0])


if __name__ == "__main__":
    main()
