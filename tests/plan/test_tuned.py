"""What `tilestream tune` has measured, as plans find it: where it counts, and where it must not."""

from __future__ import annotations

import dataclasses
import json
import logging

import pytest
from made_up import BF16, H100, reason

from tilestream.plan import Problem, plan_problem, search_space, tuned

PROBLEM = Problem(2048, 6144, 4096, **BF16)


@pytest.fixture(autouse=True)
def path(monkeypatch, tmp_path):
    """A file of the test's own, which is not there yet."""
    path = tmp_path / "kept" / "tuned.json"
    monkeypatch.setenv(tuned.ENVIRONMENT, str(path))
    anew()
    yield path
    anew()


def anew() -> None:
    tuned.forget()
    plan_problem.cache_clear()


def keep(plan, problem=PROBLEM, device=H100, **change) -> None:
    entry = {"knobs": tuned.knobs(plan), "us": 90.0, "model_us": 100.0, "plans": 7, "date": "2026-11-21", **change}
    tuned.save(problem, device, entry)
    plan_problem.cache_clear()


def planned(**how):
    return plan_problem(PROBLEM, device=H100, **how)


def other_plan():
    """One that the model does not choose."""
    model = planned(consult=False)
    return next(plan for plan in search_space(PROBLEM, H100) if plan.block != model.block)


def test_without_a_file_nothing_is_different():
    assert planned() == planned(consult=False)


@pytest.mark.parametrize("key", ["swap_ab", "swapped"], ids=["as it is written", "as older files have it"])
def test_what_was_measured_is_what_is_planned_and_explained(key):
    model, other = planned(consult=False), other_plan()
    knobs = tuned.knobs(other)
    keep(other, knobs={key if name == "swap_ab" else name: value for name, value in knobs.items()})
    made = planned()
    assert tuned.knobs(made) == knobs != tuned.knobs(model)
    assert made.why == "fastest of 7 plans that tilestream tune measured here on 2026-11-21"
    assert reason(made, "the cost model's choice") == "measured: 100 us, this 90 us"
    assert planned(consult=False) == model


def test_where_the_model_was_right_that_is_said():
    model = planned(consult=False)
    keep(model)
    made = planned()
    assert tuned.knobs(made) == tuned.knobs(model)
    assert "tilestream tune measured here" in made.explain()
    assert reason(made, "the cost model's choice") is None


@pytest.mark.parametrize(
    "change",
    [{"m": 2049}, {"k": 4104}, {"dtype": "float16"}, {"out_dtype": "float32"}, {"plain": False}, {"scales": "row"}],
    ids=str,
)
def test_another_problem_is_not_concerned(change):
    keep(other_plan())
    problem = dataclasses.replace(PROBLEM, **change)
    assert tuned.lookup(problem, H100) is None
    assert "tilestream tune" not in plan_problem(problem, device=H100).explain()


def test_another_device_and_other_versions_are_not_concerned(monkeypatch):
    keep(other_plan())
    for change in ({"name": "another"}, {"workers": 114}):
        assert tuned.lookup(PROBLEM, dataclasses.replace(H100, **change)) is None
    tuned._triton.cache_clear()
    monkeypatch.setattr("importlib.metadata.version", lambda package: "9.9.9")
    assert tuned.lookup(PROBLEM, H100) is None
    tuned._triton.cache_clear()


@pytest.mark.parametrize(
    "how", [{"schedule": "dynamic"}, {"workers": 100}, {"tile": (128, 128)}, {"limit": 90}, {"backend": "hopper"}],
    ids=str,
)  # fmt: skip
def test_what_is_forced_goes_before_what_was_measured(how):
    keep(other_plan())
    assert "tilestream tune" not in planned(**how).explain()


def test_switched_off(monkeypatch):
    keep(other_plan())
    monkeypatch.setenv(tuned.ENVIRONMENT, "0")
    anew()
    assert tuned.tuned_path() is None
    assert "tilestream tune" not in planned().explain()
    with pytest.raises(ValueError, match=r"^TILESTREAM_TUNED=0: .*; unset it, or give a path$"):
        tuned.save(PROBLEM, H100, {"knobs": {}})


def test_a_plan_that_no_longer_exists_is_said_and_not_taken():
    keep(other_plan(), knobs={**tuned.knobs(other_plan()), "stages": 99})
    assert tuned.knobs(planned()) == tuned.knobs(planned(consult=False))
    assert reason(planned(), "what was measured").startswith("tilestream tune kept a plan that no longer exists")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', '{"a": {"b": {}}}', '{"a": {"b": 3}}'])
def test_a_file_that_cannot_be_read_is_as_none_and_said_once(text, path, caplog):
    path.parent.mkdir()
    path.write_text(text)
    with caplog.at_level(logging.WARNING, "tilestream"):
        for m in (64, 128):
            made = plan_problem(dataclasses.replace(PROBLEM, m=m), device=H100)
            assert "tilestream tune" not in made.explain()
    assert caplog.text.count("cannot be read") == 1
    assert str(path) in caplog.text


def test_entries_are_kept_beside_each_other(path):
    other = dataclasses.replace(PROBLEM, m=64)
    for problem, device in ((PROBLEM, H100), (other, H100), (PROBLEM, dataclasses.replace(H100, name="a second"))):
        keep(other_plan(), problem, device)
    data = json.loads(path.read_text())
    assert sorted(map(len, data.values())) == [1, 2]
    assert tuned.lookup(other, H100)["us"] == 90.0
    assert [file.name for file in path.parent.iterdir()] == ["tuned.json"], "no half of one"
    assert path.stat().st_mode & 0o077 == 0, "its owner's alone"


def test_the_folder_is_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv(tuned.ENVIRONMENT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuned.tuned_path() == tmp_path / "tilestream" / "tuned.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert tuned.tuned_path() == tmp_path / "home" / ".cache" / "tilestream" / "tuned.json"
