"""Mutants: what is drawn, which tests are closest, and that what survives has a reason."""

from __future__ import annotations

from collections import Counter

import pytest

from mutants import drawn
from mutants.closest import ALSO, ALWAYS, SRC, TESTS, closest, module_of, path_of
from mutants.operators import OPERATORS, draw, sites

TEXT = '''\
def take(tiles, key):
    """Docstring 1 < 2."""
    for at in range(tiles):
        if at < tiles and key:
            count += at * 2
        wait(at, key)
    if not tiles:
        raise ValueError(f"{tiles < 1} 3")
    key = (at, count, True)
    add(at, 1, sem="release", scope="sys")
    return min(at, 5)
'''


def of(operator):
    return [one for one in sites("a", TEXT) if one.operator == operator]


@pytest.mark.parametrize(
    ("operator", "says"),
    [
        ("comparison", ["at < tiles  ->  at <= tiles"]),
        ("off_by_one", ["range(tiles)  ->  range(tiles + 1)", "at < tiles  ->  at < tiles + 1"]),
        ("arithmetic", ["at * 2  ->  at + 2", "min(at, 5)  ->  max(at, 5)"]),
        ("constant", ["2  ->  3", "True  ->  False", "1  ->  2", "5  ->  6"]),
        ("condition", [
            "at < tiles and key  ->  not (at < tiles and key)", "at < tiles and key  ->  at < tiles or key",
            "not tiles  ->  not not tiles",
        ]),
        ("dropped", [
            "count += at * 2  ->  pass", "wait(at, key)  ->  pass",
            "if not tiles: raise ValueError(f'{tiles < 1} 3')  ->  pass",
            "add(at, 1, sem='release', scope='sys')  ->  pass",
        ]),
        ("swapped", ["wait(at, key)  ->  wait(key, at)"]),
        ("key_element", [
            "key = (at, count, True)  ->  key = (count, True)", "key = (at, count, True)  ->  key = (at, True)",
            "key = (at, count, True)  ->  key = (at, count)",
        ]),
        ("memory_order", ["sem='release'  ->  sem='relaxed'", "scope='sys'  ->  scope='gpu'"]),
    ],
)  # fmt: skip
def test_an_operator_changes_one_thing(operator, says):
    found = of(operator)
    assert [one.says for one in found] == says
    for one in found:
        assert one.apply(TEXT) != TEXT
        assert one.apply(TEXT).count("\n") <= TEXT.count("\n")


def test_all_operators_are_tested():
    assert {one.operator for one in sites("a", TEXT)} == OPERATORS.keys()


def test_a_key_outlives_changes_of_other_lines():
    moved = {one.key: one for one in sites("a", "import os\n\n" + TEXT.replace("range(tiles)", "range(0, tiles)"))}
    kept = [one for one in sites("a", TEXT) if one.key in moved]
    assert all(moved[one.key].line == one.line + 2 for one in kept)
    assert len(kept) == len(list(sites("a", TEXT))) - 1


def test_a_draw_is_even_and_the_same_again():
    every = list(sites("a", TEXT))
    found = draw(every, 9, "seed")
    assert found == draw(reversed(every), 9, "seed")
    assert Counter(one.operator for one in found) == dict.fromkeys(OPERATORS, 1)
    assert found != draw(every, 9, "another")


def test_at_least_300_are_drawn_of_every_part_and_by_every_operator():
    every = drawn.drawn()
    assert len(every) >= 300
    assert len({one.key for _, one in every}) == len(every)
    assert Counter(group for group, _ in every) == {group: count for group, (_, count) in drawn.GROUPS.items()}
    assert {one.operator for _, one in every} == OPERATORS.keys()
    for _, one in every:
        text = path_of(one.module).read_text(encoding="utf-8")
        assert one.apply(text) != text


# The closest tests ----------------------------------------------------------------------------------------------------


def test_every_module_has_tests_that_are_close():
    far = [module for group in drawn.GROUPS for module in drawn.modules(group) if not closest(module)]
    assert not far, "name their tests in mutants.closest._ALWAYS"
    for group in drawn.GROUPS:
        assert all((TESTS / test).exists() for module in drawn.modules(group) for test in closest(module))
    modules = [module_of(path) for path in SRC.rglob("*.py")]
    assert all(any(module.startswith(name) for module in modules) for name in (*ALWAYS, *ALSO))


@pytest.mark.parametrize(
    ("module", "test"),
    [
        ("core.schedule", "core/test_schedule.py"), ("arrival.signals", "arrival/test_signals.py"),
        ("arrival.files", "arrival/test_files.py"), ("plan.policy.cdna", "plan/test_cdna_plan.py"),
        ("kernels.device.gate", "kernels/portable/test_portable_arrival.py"),
        ("kernels.hopper.publish", "kernels/test_hopper_protocol.py"),
        ("kernels.cdna.attention_copy", "kernels/cdna/test_attention_numbers.py"),
        ("launch.cache", "ops/test_launch_cache.py"), ("runtime.channel", "runtime/test_channel.py"),
        ("distributed.copy_engines", "distributed/test_copy_engines.py"),
    ],
)  # fmt: skip
def test_the_closest_test_of(module, test):
    assert closest(f"tilestream.{module}")[0] == test


# Verdicts -------------------------------------------------------------------------------------------------------------


def test_every_hole_can_be_made_and_has_a_test():
    for hole in drawn.holes():
        text = path_of(hole.module).read_text(encoding="utf-8")
        assert hole.apply(text) != text
        assert (TESTS / hole.test.partition("::")[0]).exists()


@pytest.fixture(scope="module")
def _judging():
    with drawn.judging():
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("_judging")
@pytest.mark.timeout(2 * drawn.SECONDS)
@pytest.mark.parametrize("hole", drawn.holes(), ids=lambda hole: hole.name)
def test_a_hole_is_closed(hole):
    assert drawn.judge(hole, [drawn.Run([hole.test])]).how == "killed"


def test_every_survivor_has_a_reason_and_no_other_mutant_has():
    assert drawn.reasons().keys() == {key for key, row in drawn.read_record().items() if row["how"] == "survived"}


def test_the_page_is_of_this_record():
    page = drawn.PAGE.read_text(encoding="utf-8")
    assert f"of record {drawn.record_hash()} -->" in page, "python -m mutants.drawn --page"
    assert all(f"| {group} | {count} | " in page for group, (_, count) in drawn.GROUPS.items())


def test_the_page_counts_what_is_drawn(monkeypatch):
    """And of it the verdicts on the text as it is now: none on what is not drawn any more, has changed, or is open."""
    killed, survivor, changed, still_open, new = drawn.drawn()[:5]
    old = drawn.Verdict("killed", "a.py::test_old", 1.0)

    def row(group, mutant, how, by="", **other):
        return drawn.entry(group, mutant, drawn.Verdict(how, by, 1.0)) | other

    record = {
        killed[1].key: row(*killed, "killed", "a.py::test_a"), survivor[1].key: row(*survivor, "survived"),
        changed[1].key: row(*changed, "killed", "a.py::test_b", text="before"),
        still_open[1].key: row(*still_open, "open"), "f" * 12: drawn.entry(*killed, old),
    }  # fmt: skip
    monkeypatch.setattr(drawn, "drawn", lambda: [killed, survivor, changed, still_open, new])
    monkeypatch.setattr(drawn, "read_record", lambda: record)
    monkeypatch.setattr(drawn, "reasons", lambda: {survivor[1].key: "Changes nothing: so it is."})
    page = drawn.page()
    assert "drawn 5; judged 2, since their module changed last; killed 1 (50 %)." in page
    assert "Of the 1 survivors 1 change nothing that can be seen: 1 of the other 1 are killed (100 %)." in page
    group, (_, count) = next(iter(drawn.GROUPS.items()))
    assert f"| {group} | {count} | 2 | 1 | 1 |" in page
    assert f"| {survivor[1].key} |" in page
    assert page.endswith("| test file | mutants |\n|---|---|\n| `a.py` | 1 |\n")


@pytest.mark.slow
@pytest.mark.usefixtures("_judging")
@pytest.mark.timeout(2 * drawn.SECONDS)
@pytest.mark.parametrize("number", range(drawn.NUM_TENTH))
def test_a_tenth_by_the_commit_is_killed_or_has_a_reason(number):
    mutant = drawn.tenth(drawn.commit())[number]
    by = drawn.read_record().get(mutant.key, {}).get("by", "")
    runs = (drawn.runs_of(mutant, by, thorough) for thorough in (False, True))
    is_killed = any(drawn.judge(mutant, some).how != "survived" for some in runs)
    assert is_killed or mutant.key in drawn.reasons(), f"{mutant.module}:{mutant.line}: {mutant.says}"
