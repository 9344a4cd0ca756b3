"""Edits of tables change what a pattern names, fail where that is not one place, and leave no file behind."""

from __future__ import annotations

import inspect
import sys

import pytest

from mutants import table
from mutants.engine import Edit, MatchError, at, delete, edited, load, mutated, replace

MINUS_ONE = Edit("body", "", "return -1", True)
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


def of(lines, where="a:double"):
    return edited(TEXT, table.edits(lines, where, {"a": "a"}))


@pytest.mark.parametrize(
    ("lines", "changed"),
    [
        (["x * by => x + by"], {6: "    y = (x + by)  # a comment"}),
        (["__a * __b => __b ** __a"], {6: "    y = (by ** x)  # a comment"}),
        (["- y = x * by"], {6: "    pass  # a comment"}),
        (["y = min(...) => y = 4"], {8: "        y = 4", 9: "", 10: ""}),
        (["if y > 4: ... => y = 4"], {7: "    y = 4", 8: "", 9: "", 10: ""}),
        (["- if y > 4: ...", "+ if y > 4:", "+     y = 4"], {8: "        y = 4", 9: "", 10: ""}),
        (["1/2 4 => 5"], {7: "    if y > 5:"}),
        (["x2 4 => 5"], {7: "    if y > 5:", 9: "            y, 5"}),
        (["@a:Holder.value 2/2 double(3) => 4"], {16: "        return double(3) + 4"}),
        (["= return by"], {6: "    return by", 7: "", 8: "", 9: "", 10: "", 11: ""}),
        (["- y = x * by", "  if y > 4: ...", "- return y"], {6: "    pass  # a comment", 11: "    pass"}),
    ],
)  # fmt: skip
def test_the_named_place_changes_and_nothing_else(lines, changed):
    old, new = TEXT.splitlines(), of(lines).splitlines()
    assert {number: new for number, (old, new) in enumerate(zip(old, new, strict=True), 1) if old != new} == changed


@pytest.mark.parametrize(
    ("lines", "begin", "inserted"),
    [
        (["+ y += 1", "+ y += 2", "  return y"], 10, ["    y += 1", "    y += 2", "    return y"]),
        (["  y = x * by", "+ y += 1"], 5, ["    y = x * by", "    y += 1  # a comment"]),
        (["- y = x * by", "  if y > 4: ...", "+ y = x * by"], 10, ["    y = x * by", "    return y"]),
        (["+ return y", "  y = x * by", "- return y"], 5, ["    return y", "    y = x * by  # a comment"]),
    ],
)
def test_statements_are_inserted_and_moved(lines, begin, inserted):
    assert of(lines).splitlines()[begin : begin + len(inserted)] == inserted


@pytest.mark.parametrize(
    ("line", "function", "message"),
    [
        ("- y = 7", "double", "0 places, not 1, of a:double match 'y = 7'"),
        ("double(3) => 3", "Holder.value", "2 places, not 1, of a:Holder.value"),
        ("x2 y => x", "double", "5 places, not 2"),
        ("- return y", "Holder", "0 places, not 1"),
        ("- return y", "triple", "0 definitions, not one, are called 'triple'"),
    ],
)
def test_a_pattern_that_matches_elsewhere_or_nowhere_is_refused(line, function, message):
    with pytest.raises(MatchError, match=message):
        of([line], f"a:{function}")


def test_a_row_has_its_section_its_kind_its_options_and_its_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "FOLDER", tmp_path)
    title = "first one: deadlock (n=(1,), who='b')"
    text = ["# Comment.", "", "== ring: load @a:f", title, "  It", "  says.", "    x => y", "bare", "    - x"]
    (tmp_path / "one.txt").write_text("\n".join(text))
    first, bare = table.read("one.txt", {"a": "b.c"})
    assert first[:5] == ("ring: load", "first one", "deadlock", {"n": (1,), "who": "b"}, "It says.")
    assert first.edits == at("b.c:f", replace("x", "y"))
    assert bare == ("ring: load", "bare", "", {}, "", at("b.c:f", delete("x")))


def test_functions_of_several_modules_see_each_others_edits_and_classes_stay():
    from tilestream.core import gate, loop

    edits = (
        *at("tilestream.core.gate:pass_gate", replace("return True, seen", "return 7, seen")),
        *at("tilestream.core.loop:store_and_count", delete("yield done")),
    )
    work = mutated("tilestream.core.loop:work", edits, name="a mutant")
    assert work.__name__ == "a mutant"
    assert work.__globals__["pass_gate"].__code__ is not gate.pass_gate.__code__
    assert work.__globals__["Poll"] is loop.Poll
    assert "yield done" not in inspect.getsource(work.__globals__["store_and_count"])
    assert "yield done" in inspect.getsource(loop.store_and_count)
    assert loop.pass_gate is gate.pass_gate


def test_loaded_modules_import_each_other_and_are_seen_by_inspect(monkeypatch):
    import tilestream.core.ring as real

    copy = load(["tilestream.core.ring"], at("tilestream.core.ring:before", MINUS_ONE))["tilestream.core.ring"]
    assert copy.before(1, 3) == -1
    assert "return -1" in inspect.getsource(copy.before)
    assert sys.modules["tilestream.core.ring"] is real
    assert real.before(1, 3) == 0
    with pytest.raises(ValueError, match=r"edits of tilestream\.core\.loop, which are not among"):
        load(["tilestream.core.ring"], at("tilestream.core.loop:work", MINUS_ONE))
