"""The quick tier and the parts of the rest are all cases, each once; times are of functions that exist."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiers

ROOT = Path(__file__).parent.parent


def cases(count: int, name: str) -> list[str]:
    return [f"a.py::{name}[{number}]" for number in range(count)]


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0.001, 10) | st.none()), max_size=8), st.integers(1, 4))
def test_every_case_is_in_the_quick_tier_or_in_one_part_of_the_rest(functions, count):
    times = {f"a.py::{number}": seconds for number, (_, seconds) in enumerate(functions) if seconds is not None}
    every = [case for number, (size, _) in enumerate(functions) for case in cases(size, str(number))]
    quick = tiers.quick(every, times)
    parts = [tiers.part(every, f"{index}/{count}", times) for index in range(1, count + 1)]
    assert sorted([*quick, *(case for part in parts for case in part)]) == sorted(every)
    for function, seconds in times.items():
        most = tiers.LONG if seconds > tiers.SECONDS else tiers.SECONDS
        assert sum(tiers.function_of(case) == function for case in quick) * seconds <= most
    assert quick >= {case for case in every if tiers.function_of(case) not in times}


def test_cases_are_evenly_spaced():
    assert tiers.kept(cases(8, "f"), tiers.SECONDS / 4) == {f"a.py::f[{number}]" for number in (0, 2, 4, 6)}
    assert tiers.kept(cases(8, "f"), tiers.LONG) == {*cases(1, "f")}
    assert tiers.kept(cases(8, "f"), tiers.LONG + 0.1) == set()


def test_every_fault_is_in_the_quick_tier():
    (name,) = tiers.WHOLE
    times, every = json.loads(tiers.TIMES.read_text()), [f"{name}[{number}]" for number in range(35)]
    assert len(every) * times[name] > tiers.SECONDS, "else no exception is needed"
    assert tiers.quick(every, times) == set(every)


def test_parts_take_about_equally_long():
    times = {f"a.py::{name}": seconds for name, seconds in (("f", 9.0), ("g", 5.0), ("h", 4.0))}
    every = [case for name in "fgh" for case in cases(4, name)]
    spent = [sum(times[tiers.function_of(case)] for case in tiers.part(every, f"{one}/3", times)) for one in (1, 2, 3)]
    assert max(spent) - min(spent) <= 9.0


@pytest.mark.parametrize("which", ["", "fast", "0/3", "4/3", "1/0", "1"])
def test_a_tier_that_is_none_is_refused(which):
    with pytest.raises(pytest.UsageError, match=f"--tier {which}: give 'quick', 'all', or a part such as 1/3"):
        tiers.part([], which, {})


def test_tiers_are_joined_by_commas():
    times, every = {"a.py::f": 1.0, "a.py::g": 3.0}, [*cases(6, "f"), *cases(3, "g"), *cases(2, "h")]
    both = tiers.chosen(every, "quick,2/3", times)
    assert both == tiers.quick(every, times) | tiers.part(every, "2/3", times)
    assert tiers.quick(every, times) < both < set(every)
    assert tiers.chosen(every, "quick,1/1", times) == tiers.chosen(every, "all", times) == set(every)
    with pytest.raises(pytest.UsageError, match="--tier slow: give 'quick'"):
        tiers.chosen(every, "quick,slow", times)


def test_times_are_of_functions_that_exist():
    for function in (*json.loads(tiers.TIMES.read_text()), *tiers.WHOLE):
        file, *_, name = function.split("::")
        assert (ROOT / file).exists(), f"{file} is gone; remove its lines from {tiers.TIMES.name}"
        assert f"def {name}(" in (ROOT / file).read_text(), f"{name} is gone; remove its line from {tiers.TIMES.name}"


def test_times_are_read_from_a_record(tmp_path):
    record = tmp_path / "record.xml"
    record.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="tests.core.test_a" name="test_one[1-2]" time="3.0"/>'
        '<testcase classname="tests.core.test_a" name="test_one[2-2]" time="1.0"/>'
        '<testcase classname="tests.test_b.TestC" name="test_two" time="2.5"/>'
        '<testcase classname="tests.test_b.TestC" name="test_short" time="0.1"/>'
        '<testcase classname="tests.test_b.TestC" name="test_skipped" time="9"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    two, short = (f"tests/test_b.py::TestC::{name}" for name in ("test_two", "test_short"))
    assert tiers.updated({}, record) == {"tests/core/test_a.py::test_one": 2.0, two: 2.5}
    before = {two: 9.0, short: 0.5, "tests/test_d.py::test": 4.0}
    assert tiers.updated(before, record) == {"tests/core/test_a.py::test_one": 2.0, **before}
