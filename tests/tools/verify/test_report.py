"""How results are told."""

from __future__ import annotations

import multiprocessing
import time

import pytest

from mutants.checker import seeded_bugs
from tilestream_tools import verify
from tilestream_tools.verify import Report, Result, Violation
from tilestream_tools.verify import report as reports
from tilestream_tools.verify.attention import AttentionCase
from tilestream_tools.verify.attention_protocol import AttentionRing
from tilestream_tools.verify.sweep import matmul

VIOLATION = Violation("deadlock", "worker 0 at wait", "two workers", tuple(f"step {n}" for n in range(10)))


def test_violation_is_readable_lines():
    lines = str(VIOLATION).splitlines()
    assert lines[0] == "deadlock: worker 0 at wait"
    assert lines[1] == "  in two workers"
    assert lines[2] == "   1. step 0"
    assert lines[-1] == "  10. step 9"
    longer = Violation("deadlock", "", "", (), shortest=False)
    assert "a shorter order may exist" in str(longer)


def test_result_says_whether_it_holds():
    assert str(Result("ring", "2 stages", 1234, 0.5)) == "ring: 2 stages: 1,234 states, 0.50 s: holds"
    assert str(Result("ring", "2 stages", 7, 0.5, VIOLATION)).endswith("VIOLATED: deadlock")


def test_report_that_holds():
    report = Report("quick", (Result("ring", "small", 10, 0.1), Result("ring", "large", 90, 0.1)), 0.2)
    assert report.ok
    assert report.states == 100
    assert "every property holds" in str(report)
    assert "largest: 90 states: large" in str(report)
    assert str(report).endswith("OK")


def test_report_that_does_not():
    report = Report("quick", (Result("ring", "small", 10, 0.1, VIOLATION), Result("workers", "x", 1, 0.1)), 0.2)
    assert not report.ok
    assert report.violations == (VIOLATION,)
    assert str(VIOLATION) in str(report)
    assert str(report).endswith("FAILED")


def test_run_stops_a_model_at_its_smallest_failing_size(monkeypatch):
    bug = next(b for b in seeded_bugs() if b.name == "pivot not in the signal")
    cases = {"workers": list(bug.cases), "ring": verify.configurations("ring", "quick")[:1]}
    monkeypatch.setattr("tilestream_tools.verify.report.configurations", lambda model, level: cases[model])
    told = []
    report = verify.run("quick", lambda result, done, total: told.append(result), models=("workers", "ring"))
    assert not report.ok
    assert len(report.violations) == 1
    own = [r for r in report.results if r.model == "workers"]
    assert [r.violation is None for r in own] == [True] * (len(own) - 1) + [False]
    assert len(own) < len(cases["workers"])
    assert report.results[-1].model == "ring", "other models go on"
    assert tuple(told) == report.results


def test_configurations_read_as_sentences():
    text = str(matmul("dynamic", 3, 3, bounds=(0, 3, 5), pivot=1, queues=2, running=(0, 2)))
    assert text == (
        "dynamic, 3 workers, running [0, 2], 2 queues of items, 1 x 3 x 1 tiles of 1 K steps, "
        "chunk_major from row tile 2, rows in chunks [0, 3, 5], 2 a tile"
    )


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"ordered": True}, "in turns"),
        ({"arriving": True}, "keys arriving"),
        ({"converting": True}, "values converted"),
        ({"ordered": True, "converting": True}, "in turns, values converted"),
        ({"ordered": True, "own": "first"}, "in turns, first blocks left out"),
    ],
)
def test_configurations_of_attention_read_as_sentences(how, says):
    case = str(AttentionCase(AttentionRing(2, **how), (0, 2)))
    assert case == f"attention, 2 consumers, {says}, 2 stages, queries of 1 items, 0 or 2 blocks an item"


def test_seconds_are_cpu_time(monkeypatch):
    """Of the process that explored: waiting, and other processes, do not count."""
    times = iter([1.0, 4.5])
    monkeypatch.setattr(reports.time, "process_time", lambda: next(times))
    (case, *_) = verify.configurations("publish", "quick")
    assert reports.explore("publish", case).seconds == 3.5


def test_an_exception_ends_processes_whatever_they_are_at():
    before = set(multiprocessing.active_children())
    with pytest.raises(KeyboardInterrupt), reports._processes(2) as pool:  # noqa: PT012
        under_way = [pool.submit(time.sleep, 1e6) for _ in range(2)]
        while not all(future.running() for future in under_way):
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert set(multiprocessing.active_children()) == before
