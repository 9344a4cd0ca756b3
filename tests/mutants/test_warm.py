"""Runs of tests by a server that forks, and the choice of the tests that run a function."""

from __future__ import annotations

import json

import pytest

from mutants import drawn, reach
from mutants.closest import closest
from mutants.warm import Warm

TESTS = """
import os, subprocess, sys, time
import pytest, toy

@pytest.mark.parametrize("x", range(7))
def test_double(x):
    print("ran", x)
    assert toy.double(x) == 2 * x

def test_nothing():
    pass

def test_in_a_process():
    assert subprocess.check_output([sys.executable, "-c", "import toy; print(toy.double(4))"]) == b"8\\n"

def test_for_ever():
    while os.environ.get("FOR_EVER"):
        toy.double(1)
"""


@pytest.fixture(scope="module")
def server():
    made = Warm(interpreted=False)
    yield made
    made.close()


@pytest.fixture
def toy(tmp_path):
    """A package, and the file of its tests."""
    source, tests = tmp_path / "src", tmp_path / "test_toy.py"
    source.mkdir()
    (source / "toy.py").write_text("def double(x):\n    return 2 * x\n", encoding="utf-8")
    tests.write_text(TESTS, encoding="utf-8")

    def change(text):
        (source / "toy.py").write_text(text, encoding="utf-8")

    return source, str(tests), change


def test_what_fails_first_is_named_and_each_run_imports_anew(server, toy):
    source, tests, change = toy
    bounds = {"cpu": 60, "seconds": 300}
    assert server.run(source, [tests], **bounds).status == 0
    change("def double(x):\n    return x + 2\n")
    status, by, output = server.run(source, [tests], **bounds)
    assert (status, by.rpartition("::")[2]) == (1, "test_double[0]"), output
    change("import sys\ndef double(x):\n    return 2 * x + ('pytest' not in sys.modules)\n")
    assert server.run(source, [tests], **bounds).by.endswith("::test_in_a_process"), "a test's process runs the mutant"
    change("def double(x) return x")
    status, by, _ = server.run(source, [tests], **bounds)
    assert status not in (0, 5)
    assert by.endswith("test_toy.py"), "what cannot be imported"


def test_tests_are_chosen_and_ordered(server, toy):
    source, tests, change = toy
    change("def double(x):\n    return 2 * x if x in (0, 4) else 0\n")
    bounds = {"cpu": 60, "seconds": 300}
    name = server.run(source, [tests], **bounds).by.partition("::")[0]
    only = [f"{name}::test_double[{x}]" for x in (4, 3, 2)]
    assert server.run(source, [tests], only, **bounds).by == only[1]
    assert server.run(source, [tests], only[:1], **bounds).status == 0
    assert server.run(source, [tests], ["another"], **bounds).status == 5
    assert server.run(source, [tests], cases=2, **bounds).status == 0, "0 and 4 of the seven"
    assert server.run(source, [tests], cases=3, **bounds).by.endswith("[3]")


def test_what_does_not_end_runs_out_of_time(server, toy, monkeypatch):
    source, tests, change = toy
    change("import itertools\ndef double(x):\n    return 2 * x if x != 3 else max(itertools.count())\n")
    status, by, _ = server.run(source, [tests], cpu=8, seconds=300)
    assert (status, by.rpartition("::")[2]) == (-1, "test_double[3]")
    change("import time\ndef double(x):\n    time.sleep(600)\n")
    assert server.run(source, [tests], cpu=60, seconds=2).status == -1


def test_which_functions_a_test_has_run(server, toy, tmp_path):
    source, tests, _ = toy
    path = tmp_path / "reach.json"
    assert server.run(source, [tests], cpu=60, seconds=300, reach=str(path)).status == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    at = found["names"].index("toy:double")
    ran = {name.rpartition("::")[2]: at in reached for name, (_, reached) in found["tests"].items()}
    assert ran.pop("test_double[0]")
    assert not ran.pop("test_nothing")
    assert len(ran) == 8


def test_the_quickest_case_of_every_test_comes_first():
    tests = [("t::a[1]", 3.0), ("t::a[2]", 1.0), ("t::b", 2.0), ("t::a[3]", 4.0), ("t::c", 9.0)]
    assert reach._batch("t", tests, 7.0) == reach.Batch("t", ["t::a[2]", "t::b", "t::a[1]"], 6.0)
    assert reach._batch("t", tests[-1:], 7.0).tests == ["t::c"], "one at least"


def test_batches_are_by_file_the_closest_first(monkeypatch):
    module = "tilestream.core.schedule"
    near = closest(module)
    known = {
        "other.py": {"hash": "", "tests": {"other.py::x": 0.1}, "names": {f"{module}:f": [0]}},
        near[1]: {"hash": "", "tests": {f"{near[1]}::y": 0.1, f"{near[1]}::z": 0.1}, "names": {f"{module}:f": [1]}},
        near[0]: {"hash": "", "tests": {f"{near[0]}::w": 0.1}, "names": {f"{module}:g": [0]}},
    }
    monkeypatch.setattr(reach, "_read", lambda: known)
    assert [one.tests for one in reach.batches(module, "f.inner")] == [[f"{near[1]}::z"], ["other.py::x"]]
    assert [one.file for one in reach.batches(module, "g")] == [near[0]]
    assert reach.batches(module, "h") == reach.batches(module, "") == []


def test_what_runs_on_a_mutant(monkeypatch):
    mutant = next(one for _, one in drawn.drawn() if one.module == "tilestream.core.schedule")
    near = list(closest(mutant.module))
    monkeypatch.setattr(reach, "batches", lambda module, function, share: [])
    assert [run.tests for run in drawn.runs_of(mutant)] == [near[:1], near[1:3]]
    assert [run.cases for run in drawn.runs_of(mutant)] == [2, 1]
    assert drawn.runs_of(mutant, "a.py::t")[0] == drawn.Run(["a.py"], ["a.py::t"])
    assert [run.tests for run in drawn.runs_of(mutant, thorough=True)] == [near[:1], near[1:]]
    assert [run.cases for run in drawn.runs_of(mutant, thorough=True)] == [4, 2]
    batches = [reach.Batch(near[0], [f"{near[0]}::t"], 2.0), reach.Batch("b.py", ["b.py::u"], 1.0)]
    monkeypatch.setattr(reach, "batches", lambda module, function, share: batches)
    assert [run.only for run in drawn.runs_of(mutant)] == [[f"{near[0]}::t"], ["b.py::u"]]
    assert [run.tests for run in drawn.runs_of(mutant, thorough=True)][2:] == [near[:1], near[1:]]


def test_what_few_tests_do_not_see_is_open_and_then_judged_thoroughly(monkeypatch, tmp_path):
    group, mutant = drawn.drawn()[0]
    asked = []

    def judge(one, runs):
        asked.append(runs)
        return drawn.Verdict("survived", "", 1.0)

    monkeypatch.setattr(drawn, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(drawn, "judge", judge)
    hows = []
    for _ in range(3):
        drawn.run([(group, mutant)], 1, 60.0)
        hows.append(drawn.read_record()[mutant.key]["how"])
    assert hows == ["open", "survived", "survived"]
    assert asked == [drawn.runs_of(mutant), *[drawn.runs_of(mutant, thorough=True)] * 2]
