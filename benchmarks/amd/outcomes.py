"""A pytest plugin for `amd_selfcheck`: each outcome is on disk as soon as it is known, and is not tried for again.

The file is named by TILESTREAM_OUTCOMES: a JSON object a line, ``{"test": id}`` when a test begins, and with
``outcome`` and ``message`` when it has ended. It says which test a process that hangs was at.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def read(file: Path) -> dict[str, dict[str, str]]:
    """The latest line of each test; a test that has not ended has only its name."""
    if not file.exists():
        return {}
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    return {line["test"]: line for line in lines}


def write(file: Path, **line: str) -> None:
    """Append a line, and flush it to the disk."""
    with file.open("a", encoding="utf-8") as to:
        to.write(json.dumps(line) + "\n")
        to.flush()
        os.fsync(to.fileno())


def _file() -> Path:
    return Path(os.environ["TILESTREAM_OUTCOMES"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that have ended."""
    known = read(_file())
    done = [item for item in items if item.nodeid in known]
    items[:] = [item for item in items if item.nodeid not in known]
    config.hook.pytest_deselected(items=done)


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    write(_file(), test=nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    """Write the outcome: after the call, or at a set-up that failed."""
    report: Any = yield
    if report.when == "call" or report.outcome != "passed":
        message = ""
        if report.outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            message = (crash.message if crash else str(report.longrepr)).splitlines()[0][:300]
        write(_file(), test=item.nodeid, outcome=report.outcome, message=message)
    return report
