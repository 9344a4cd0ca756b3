"""A quick share of the soak, of malformed calls and of damaged files; and that each sees what is wrong."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tilestream as ts
from soak import launches, malformed, parsers
from tilestream_tools.sweep import suite

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore::UserWarning")]


# Launches -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_launches_of_random_cases(seed):
    row = launches.soak("cpu", 2.0 if seed == 0 else 30.0, seed, 12 if seed == 0 else launches.CASES)
    assert row["cases"] == (12 if seed == 0 else launches.CASES)
    assert not row["wrong"]
    assert not [what for what in row["drifted"] if not what.startswith("seconds")], "how quick it is, a record says"


def test_cases_are_drawn_from_the_seed_and_are_of_every_kind():
    drawn = [[launches.draw(random.Random(seed), "cpu") for _ in range(50)] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    many = [launches.draw(rng, "cuda") for rng in [random.Random(0)] for _ in range(300)]
    assert {one.arrival for one in many} == {"", "uniform", "ragged", "stream"}
    assert {one.schedule for one in many} == {"auto", "static", "dynamic", "stream_k"}
    assert {one.op for one in many} == {"matmul", "linear"}


def test_a_wrong_launch_is_seen(monkeypatch):
    real, calls = ts.matmul, []

    def matmul(*operands, **how):
        out = real(*operands, **how)
        calls.append(out)
        if len(calls) == 200:
            out[0, 0] += 1
        if len(calls) == 400:
            raise RuntimeError("the run ends here, long before its time")
        return out

    monkeypatch.setattr(launches.ts, "matmul", matmul)
    monkeypatch.setattr(launches.ts, "linear", lambda x, w, **how: matmul(x, w.t(), **how))
    wrong = launches.soak("cpu", 300.0, 0, 4)["wrong"]
    assert wrong
    assert any("answers differ from the first" in one or "AssertionError" in one for one in wrong)


STOPPED = """
import os, signal, subprocess, sys
sys.path[:0] = sys.argv[1:]
from soak.launches import Pulse
pulse = Pulse()
pulse.longest()
subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {os.getpid()}"])
os.kill(os.getpid(), signal.SIGSTOP)
assert pulse.longest() > 1.5
pulse.end()
"""


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no SIGSTOP here")
def test_a_pause_of_the_process_is_seen():
    """A call whose deadline passed meanwhile has not failed: its rows could not come."""
    tests = Path(__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-c", STOPPED, str(tests), str(tests.parent / "src")], capture_output=True, text=True,
        timeout=850, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


def test_a_call_that_expires_in_a_pause_is_no_failure(monkeypatch):
    pauses = iter([2 * launches.LONG, 0.0])
    real, made = launches.Call.launch, []

    def launch(self):
        made.extend([self] * self.is_fed)
        if self.is_fed and len(made) in (20, 60):
            raise ts.ArrivalTimeout("matmul", 0, 0, "tile 0", 861.0, 60.0)
        real(self)

    monkeypatch.setattr(launches.Call, "launch", launch)
    monkeypatch.setattr(launches.Pulse, "longest", lambda self: next(pauses))
    row = launches.soak("cpu", 300.0, 0, 12)
    assert row["paused"] == [2 * launches.LONG]
    (wrong,) = row["wrong"]
    assert "ArrivalTimeout" in wrong, "the second expired while everything ran"


def samples(**last):
    first = {"threads": 3.0, "files": 9.0, "resident": 1e9, "seconds": 1e-3}
    return [first] * (launches.WARM + 10) + [first | last] * 5


@pytest.mark.parametrize(
    ("last", "name"),
    [
        ({}, ""), ({"threads": 4.0}, "threads"), ({"files": 10.0}, "files"), ({"resident": 1.1e9}, "resident"),
        ({"resident": 1e9 + 2**20}, ""), ({"seconds": 3.1e-3}, "seconds"), ({"seconds": 2e-3}, ""),
        ({"files": 8.0}, ""),
    ],
)  # fmt: skip
def test_what_has_grown_is_named(last, name):
    found = launches.drifts(samples(**last), "cpu", 1000)
    assert [one.partition(":")[0] for one in found] == [name] * bool(name)


def test_what_a_gpu_holds_must_not_grow_at_all_and_speed_hardly():
    more = {"allocated": 100.0, "device": 1e9}
    assert not launches.drifts([one | more for one in samples(seconds=1.2e-3)], "cuda", 1000)
    grown = [one | more | ({"allocated": 612.0} if at > 15 else {}) for at, one in enumerate(samples(seconds=1.3e-3))]
    assert [one.partition(":")[0] for one in launches.drifts(grown, "cuda", 1000)] == ["seconds", "allocated"]


def test_few_samples_say_nothing():
    assert not launches.drifts(samples()[: launches.WARM + 3], "cpu", 1000)


def test_runs_add_up_in_the_record(tmp_path, capsys):
    for wrong in ([], ["x"]):
        status = launches.add("cpu", tmp_path, "soak", None, lambda seed, wrong=wrong: {"seed": seed, "wrong": wrong})
        assert status == bool(wrong)
    rows = json.loads((tmp_path / "cpu" / "soak.json").read_text(encoding="utf-8"))["rows"]
    assert [row["seed"] for row in rows] == [0, 1]
    assert all(row["commit"] for row in rows)
    launches.add("cpu", tmp_path, "soak", 77, lambda seed: {"seed": seed, "wrong": []})
    assert '"seed": 77' in capsys.readouterr().out


# Malformed calls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_malformed_calls_are_refused_before_a_launch(count):
    row = malformed.run(count, count)
    assert row["calls"] == count
    assert not row["wrong"], "\n".join(row["wrong"])
    assert row["ends"]["TypeError"] + row["ends"]["ValueError"] > 0.8 * row["calls"]


def test_every_public_function_is_called_with_junk():
    called = {name.partition(".")[0] for name in malformed.FUNCTIONS}
    others = {  # of the process, or without arguments that a call has
        "Plan", "Stream", "check", "distributed", "invariant", "register_attention", "schedule", "trace",
        "use_attention", "use_invariant_torch",
    }  # fmt: skip
    functions = {name for name in ts.__all__ if callable(getattr(ts, name)) and "Error" not in name}
    errors = {
        name
        for name in functions
        if isinstance(getattr(ts, name), type) and issubclass(getattr(ts, name), BaseException)
    }
    assert functions - errors - others == called


def test_a_right_call_is_right_and_counted():
    with malformed.counted() as count:
        for name, (function, base) in malformed.FUNCTIONS.items():
            made = function(**{parameter: make() for parameter, make in base.items()})
            if isinstance(made, ts.Stream):
                made.close()
            assert malformed.attempt(malformed.Malformed(name, ()), count) == ("right", "")
        assert malformed.attempt(malformed.Malformed("matmul", (("schedule", "'static'"),)), count) == ("right", "")
        assert count == [1]


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (ValueError(""), "without a message"), (TypeError("'NoneType' object is not callable"), "an accident at "),
        (KeyError("a"), "KeyError at "), (RuntimeError("x"), "RuntimeError at "), (ValueError("a=3; it is 2"), ""),
        (RuntimeError("worker_limit: as torch's"), ""), (RecursionError("r"), "RecursionError at "),
    ],
)  # fmt: skip
def test_another_end_than_a_refusal_is_seen(monkeypatch, error, fault):
    def fails(count):
        raise error

    monkeypatch.setitem(malformed.FUNCTIONS, "worker_limit", (fails, {"count": lambda: 2}))
    found = malformed.attempt(malformed.Malformed("worker_limit", ()), [0])[1]
    assert fault in found
    assert bool(fault) == bool(found)


def test_a_refusal_behind_a_launch_is_seen(monkeypatch):
    def fails(count):
        ts.matmul(torch.ones(64, 64), torch.ones(64, 64), workers=2, schedule="dynamic")
        raise ValueError("count: too late")

    monkeypatch.setitem(malformed.FUNCTIONS, "worker_limit", (fails, {"count": lambda: 2}))
    with malformed.counted() as count:
        assert "launched, and raised ValueError" in malformed.attempt(malformed.Malformed("worker_limit", ()), count)[1]


# Damaged files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [700, pytest.param(20_000, marks=pytest.mark.slow)])
def test_damaged_files_are_refused_by_name(count):
    row = parsers.run(count, count)
    assert row["files"] >= 0.9 * count
    assert not row["wrong"], "\n".join(row["wrong"])


@pytest.mark.parametrize("name", parsers.PARSERS)
def test_a_good_file_is_read(tmp_path, name):
    parser = parsers.PARSERS[name]
    assert parsers.attempt(parser, tmp_path / f"good{parser.ending}", parser.good) == ("read", "")
    if parser.tree is not None:
        assert parser.encode(parser.tree) == parser.good


def test_another_exception_and_a_message_without_the_file_are_seen(tmp_path):
    def fails(path):
        raise KeyError("x")

    parser = parsers.PARSERS["suite"]
    path = tmp_path / "x.yaml"
    assert parsers.attempt(parser._replace(read=fails), path, b"")[1] == "KeyError: 'x'"
    assert "does not name the file" in parsers.attempt(parser._replace(read=fails, raises=(KeyError,)), path, b"")[1]


@pytest.mark.parametrize(("name", "read"), [("npy", parsers.find_matrix), ("sweep", parsers.records.read)])
def test_what_atheris_gives_is_drawn_from_and_counted(name, read, tmp_path, monkeypatch):
    class EndedError(BaseException):
        pass

    def ends(status):
        raise EndedError(status)

    def fuzz():
        rng = random.Random(0)
        while True:
            calls[-1](rng.randbytes(1000))

    calls, instrumented = [], []
    setup = SimpleNamespace(instrument_func=instrumented.append, Setup=lambda _, one: calls.append(one), Fuzz=fuzz)
    monkeypatch.setitem(sys.modules, "atheris", setup)
    monkeypatch.setattr(parsers.os, "_exit", ends)
    with pytest.raises(EndedError, match="0"):
        parsers.by_coverage(name, 30, 7, tmp_path)
    (row,) = json.loads((tmp_path / "cpu" / "parsers.json").read_text(encoding="utf-8"))["rows"]
    assert (row["seed"], row["by"], row["files"], row["wrong"]) == (7, "atheris", 30, [])
    assert sum(row["ends"].values()) == 30
    assert read in instrumented


def test_a_suite_that_is_no_text_is_refused_by_name(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xef\x8b\x19")
    with pytest.raises(ValueError, match=r"x\.yaml: no YAML: 'utf-8' codec"):
        suite.load(str(path))
