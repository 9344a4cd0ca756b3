"""A pytest plugin for `amd_selfcheck`: each outcome is on disk as soon as it is known, and is not tried for again.

The file is named by TILESTREAM_OUTCOMES: a JSON object a line, ``{"test": id}`` when a test begins, and with
``outcome`` and ``message`` when it has ended. Whoever ends a process that hangs learns from it which test that was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def read(file: Path) -> dict[str, dict[str, str]]:
    """The last word on each test; of one that has not ended only its name."""
    if not file.exists():
        return {}
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    return {line["test"]: line for line in lines}


def write(file: Path, **line: str) -> None:
    """One line more, for good."""
    with file.open("a", encoding="utf-8") as to:
        to.write(json.dumps(line) + "\n")
        to.flush()
        os.fsync(to.fileno())


def _file() -> Path:
    return Path(os.environ["TILESTREAM_OUTCOMES"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What has ended is not run again."""
    known = read(_file())
    done = [item for item in items if item.nodeid in known]
    items[:] = [item for item in items if item.nodeid not in known]
    config.hook.pytest_deselected(items=done)


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    write(_file(), test=nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    """A test has ended: after its call, or where it did not come to that."""
    report: Any = yield
    if report.when == "call" or report.outcome != "passed":
        message = ""
        if report.outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            message = (crash.message if crash else str(report.longrepr)).splitlines()[0][:300]
        write(_file(), test=item.nodeid, outcome=report.outcome, message=message)
    return report
