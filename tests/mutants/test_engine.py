"""The engine edits what a pattern names, says so where that is not one place, and leaves no file behind."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from mutants import engine
from mutants.engine import (
    MatchError,
    after,
    at,
    before,
    body,
    by_rule,
    delete,
    edited,
    load,
    move,
    mutated,
    replace,
    signature,
    swap,
)

TEXT = '''\
"""A module."""


def double(x: int, by: int = 2) -> int:
    """Twice x."""
    y = x * by  # a comment
    if y > 4:
        y = min(
            y, 4
        )
    return y


class Holder:
    def value(self):
        return double(3) + double(3)
'''


def of(*edits, functions="double"):
    return edited(TEXT, at(f"a:{functions}", *edits))


def changed_lines(text):
    pairs = zip(TEXT.splitlines(), text.splitlines(), strict=False)
    return [(number, new) for number, (old, new) in enumerate(pairs, 1) if old != new]


@pytest.mark.parametrize(
    ("edit", "lines"),
    [
        (replace("x * by", "x + by"), [(6, "    y = (x + by)  # a comment")]),
        (replace("__a * __b", "__b ** __a"), [(6, "    y = (by ** x)  # a comment")]),
        (delete("y = x * by"), [(6, "    pass  # a comment")]),
        (replace("y = min(...)", "y = 4"), [(8, "        y = 4"), (9, ""), (10, "")]),
        (replace("if y > 4:\n    ...", "y = 4"), [(7, "    y = 4"), (8, ""), (9, ""), (10, "")]),
        (replace("4", "5", 2, nth=0), [(7, "    if y > 5:")]),
        (body("return by"), [(6, "    return by"), *((n, "") for n in range(7, 12))]),
        (signature("x, by=3"), [(4, "def double(x, by=3) -> int:")]),
    ],
)
def test_the_named_place_changes_and_nothing_else(edit, lines):
    text = of(edit)
    assert changed_lines(text) == lines
    assert text.splitlines()[13:] == TEXT.splitlines()[13:]


def test_statements_are_inserted_moved_and_swapped():
    assert of(before("return y", "y += 1\ny += 2")).splitlines()[10:13] == ["    y += 1", "    y += 2", "    return y"]
    assert of(after("y = x * by", "y += 1")).splitlines()[5:7] == ["    y = x * by", "    y += 1  # a comment"]
    moved = of(move("y = x * by", after="if y > 4:\n    ...")).splitlines()
    assert (moved[5], moved[10]) == ("    pass  # a comment", "    y = x * by")
    swapped = of(swap("y = x * by", "return y")).splitlines()
    assert (swapped[5], swapped[10]) == ("    return y  # a comment", "    y = x * by")


@pytest.mark.parametrize(
    ("edit", "functions", "message"),
    [
        (delete("y = 7"), "double", "0 places, not 1, of a:double match 'y = 7'"),
        (replace("double(3)", "3"), "Holder.value", "2 places, not 1, of a:Holder.value"),
        (replace("y", "x", 2), "double", "5 places, not 2"),
        (move("y = x * by", after="y = 7"), "double", "0 places, not 1, of a:double match 'y = 7'"),
        (delete("return y"), "Holder", "0 places, not 1"),
        (delete("return y"), "triple", "0 definitions, not one, are called 'triple'"),
    ],
)
def test_a_pattern_that_matches_elsewhere_or_nowhere_is_refused(edit, functions, message):
    with pytest.raises(MatchError, match=message):
        of(edit, functions=functions)


def test_functions_of_several_modules_see_each_others_edits_and_classes_stay():
    from tilestream.core import gate, loop

    edits = (
        *at("tilestream.core.gate:pass_gate", replace("return True, seen", "return 7, seen")),
        *at("tilestream.core.loop:hand_in", delete("yield done")),
    )
    work = mutated("tilestream.core.loop:work", edits, name="a mutant")
    assert work.__name__ == "a mutant"
    assert work.__globals__["pass_gate"].__code__ is not gate.pass_gate.__code__
    assert work.__globals__["Poll"] is loop.Poll
    assert "yield done" not in inspect.getsource(work.__globals__["hand_in"])
    assert "yield done" in inspect.getsource(loop.hand_in)
    assert loop.pass_gate is gate.pass_gate


def test_loaded_modules_import_each_other_and_are_seen_by_inspect(monkeypatch):
    import tilestream.core.ring as real

    copy = load(["tilestream.core.ring"], at("tilestream.core.ring:before", body("return -1")))["tilestream.core.ring"]
    assert copy.before(1, 3) == -1
    assert "return -1" in inspect.getsource(copy.before)
    assert sys.modules["tilestream.core.ring"] is real
    assert real.before(1, 3) == 0
    with pytest.raises(ValueError, match=r"edits of tilestream\.core\.loop, which are not among"):
        load(["tilestream.core.ring"], at("tilestream.core.loop:work", body("return None")))


def test_a_process_imports_what_is_installed():
    program = (
        "from mutants.engine import at, body, install\n"
        "install(at('tilestream.core.ring:before', body('return -1')))\n"
        "import inspect\n"
        "from tilestream.core.ring import before\n"
        "assert before(1, 3) == -1 and 'return -1' in inspect.getsource(before)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1]
    )
    assert run.returncode == 0, run.stderr
    with pytest.raises(ImportError, match=r"mutants\.engine: imported already"):
        engine.install(at("mutants.engine:at", body("return ()")))


def test_mutants_by_rule_each_change_a_module_in_one_place():
    text = engine.source_of("tilestream.core.ring")
    made = dict(by_rule("tilestream.core.ring"))
    assert len(made) >= 10
    changed = [edited(text, [edit]) for edit in made.values()]
    assert text not in changed
    assert len(set(changed)) == len(made)
