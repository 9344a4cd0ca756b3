"""Which tests run: a quick share of all cases, or a part of the rest. A plugin of pytest; `conftest` names it.

`times.json` has the seconds of each test function that takes longer than `SECONDS` in all. Of such a function the quick
tier keeps as many cases, evenly spaced, as take `SECONDS`, one that takes up to `LONG`, and else none. Functions
without a time are kept whole, and those of `WHOLE`. So `make test` takes minutes, however many cases there are, and no
case is lost: `make test TIER=1/2` runs a half of the others, and `make test-all` runs everything.

    pytest --tier quick         the quick tier
    pytest --tier 2/3           the second of three equal parts of what the quick tier leaves out
    pytest --tier quick,2/3     both, in one run: what is imported and collected is so once
    pytest --tier all           every case, as without --tier
    python tests/tiers.py FILE  add functions of a JUnit record to `times.json`: make test ARGS="--junitxml FILE", on an
                                idle machine; functions with a time keep it
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

#: Seconds of a function's cases in the quick tier; and of its only case there, or of all if it has no time.
SECONDS, LONG = 0.5, 1.0
#: Functions of which the quick tier keeps every case: each is a fault of its own, and none tells of another.
WHOLE = frozenset({"tests/fault_table/test_fault_table.py::test_a_fault_on_the_cpu"})
#: What a case without a record is taken to last, for the time that is left.
OTHERS = 0.02
#: Seconds between two lines that say how far the run is.
PERIOD = 15.0
TIMES = Path(__file__).with_name("times.json")


def function_of(case: str) -> str:
    """The name of a case's function: its node's without the parameters."""
    return case.partition("[")[0]


def kept(cases: Sequence[str], seconds: float) -> set[str]:
    """Those that the quick tier keeps, of a function whose cases take so long on average."""
    count = min(len(cases), max(int(SECONDS / seconds), seconds <= LONG) if seconds else len(cases))
    return {cases[place * len(cases) // count] for place in range(count)}


def quick(cases: Sequence[str], times: dict[str, float]) -> set[str]:
    """The quick tier of these cases; ``times``: seconds a case, by function."""
    functions = defaultdict(list)
    for case in cases:
        functions[function_of(case)].append(case)
    found: set[str] = set()
    for function, its in functions.items():
        is_cut = function in times and function not in WHOLE
        found |= kept(its, times[function]) if is_cut else set(its)
    return found


def part(cases: Sequence[str], which: str, times: dict[str, float]) -> set[str]:
    """The part ``"i/n"`` of what the quick tier leaves out. The parts take about equally long."""
    found = re.fullmatch(r"(\d+)/(\d+)", which)
    index, count = map(int, found.groups()) if found else (0, 0)
    if not 1 <= index <= count:
        raise pytest.UsageError(f"--tier {which}: give 'quick', 'all', or a part such as 1/3")
    chosen = quick(cases, times)
    rest = sorted((case for case in cases if case not in chosen), key=lambda case: -times[function_of(case)])
    return set(rest[index - 1 :: count])


def chosen(cases: Sequence[str], tiers: str, times: dict[str, float]) -> set[str]:
    """The cases of the tiers, separated by commas, that ``--tier`` names."""
    found: set[str] = set()
    for tier in tiers.split(","):
        found |= set(cases) if tier == "all" else quick(cases, times) if tier == "quick" else part(cases, tier, times)
    return found


# The plugin -----------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", default="all", help="quick, a part of the rest such as 1/3, both (quick,1/3), or all")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # of several processes, in the one that reports
        config.pluginmanager.register(Progress(config), "progress")


# After -m and -k, whose cases it shares out.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = config.getoption("--tier")
    if tier == "all":
        return
    taken = chosen([item.nodeid for item in items], tier, json.loads(TIMES.read_text()))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in taken])
    items[:] = [item for item in items if item.nodeid in taken]


class Progress:
    """Says from time to time how much of the run is left."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._times = config, json.loads(TIMES.read_text()) if TIMES.exists() else {}
        self._all = self._done = 0.0
        self._began = self._said = time.monotonic()

    def _seconds(self, case: str) -> float:
        return self._times.get(function_of(case), OTHERS)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._expect(item.nodeid for item in items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._expect(ids)

    def _expect(self, cases) -> None:
        self._all, self._began = sum(map(self._seconds, cases)), time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "teardown":
            return
        self._done += self._seconds(report.nodeid)
        now = time.monotonic()
        if now - self._said < PERIOD or not self._all:
            return
        self._said = now
        share = min(self._done / self._all, 1.0)
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and share:
            left = round((now - self._began) * (1 - share) / share)
            reporter.ensure_newline()
            reporter.write_line(
                f"[{'#' * round(40 * share):.<40}] {share:4.0%}, about {left // 60}:{left % 60:02} left"
            )


# Times ----------------------------------------------------------------------------------------------------------------


def updated(times: dict[str, float], path: Path) -> dict[str, float]:
    """The times, and those of a JUnit record's other functions that take longer than `SECONDS`: seconds a case.

    A time is kept, since a quick record may have some of the function's cases alone.
    """
    seconds: dict[str, list[float]] = defaultdict(list)
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        if case.find("skipped") is not None:
            continue
        file, _, inside = re.sub(r"\.(?=test_\w+(\.Test|$))", "/", case.attrib["classname"]).rpartition("/")
        module, *classes = inside.split(".")
        name = "::".join([f"{file.replace('.', '/')}/{module}.py", *classes, function_of(case.attrib["name"])])
        seconds[name].append(float(case.attrib["time"]))
    found = {name: round(sum(its) / len(its), 3) for name, its in seconds.items() if sum(its) > SECONDS}
    return dict(sorted((found | times).items()))


if __name__ == "__main__":
    before = json.loads(TIMES.read_text(encoding="utf-8"))
    TIMES.write_text(json.dumps(updated(before, Path(sys.argv[1])), indent=0) + "\n", encoding="utf-8")
