"""Reads the tables of seeded bugs, ``tables/*.txt``.

A table has sections, and a section has bugs::

    == ring: load @protocol:load_turn                    family and role; where an edit is unless it says otherwise
    void item loaded: ring in use (expires=True)         name: found as (options of the family)
      A void item is handed on, and loaded all the same.
        @gpu_loop:take_and_pass,leave x2 Poll() => PollAbort()

Each line under the sentence is a part of an edit; its patterns are those of `mutants.engine`:

- ``A => B``: ``A`` becomes ``B``.
- Lines in the manner of a diff: statements behind ``-`` go, statements behind ``+`` come, the others say where.
- ``=``: the function's new body.
- ``@module:function,function``: where the edits from here on are. ``x2``: the next edit changes two places;
  ``1/2``: it changes the first of two.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from mutants.engine import Edit, at, delete, replace

FOLDER = Path(__file__).parent / "tables"
_TITLE = re.compile(r"(?P<name>.+?)(: (?P<found>[^:()]+?)( \((?P<options>.+)\))?)?$")
_PLACE = re.compile(r"(@(?P<where>\S+) ?)?((x(?P<all>\d+)|(?P<nth>\d+)/(?P<of>\d+))( |$))?(?P<edit>.*)")
_MARKS = ("- ", "+ ", "  ", "= ")


class Row(NamedTuple):
    """A bug of a table: its section and title, what is wrong, and how the text is edited."""

    section: str
    name: str
    found: str
    options: Mapping[str, Any]
    says: str
    edits: tuple[Edit, ...]


def read(file: str, modules: Mapping[str, str]) -> Iterator[Row]:
    """The bugs of a table.

    Parameters
    ----------
    file
        In `FOLDER`.
    modules
        From the table's names of modules to full names.
    """
    section, where, lines = "", "", (FOLDER / file).read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    for number, line in enumerate(lines):
        if line.startswith("== "):
            section, _, where = line[3:].partition(" @")
        elif not line.startswith(" "):
            own = lines[number + 1 :]
            own = own[: next((at for at, other in enumerate(own) if not other.startswith(" ")), None)]
            title = _TITLE.match(line)
            assert title is not None
            yield Row(
                section,
                title["name"],
                title["found"] or "",
                _options(title["options"] or ""),
                " ".join(text.strip() for text in own if not text.startswith("    ")),
                tuple(edits([text[4:] for text in own if text.startswith("    ")], where, modules)),
            )


def _options(text: str) -> dict[str, Any]:
    call: Any = ast.parse(f"dict({text})", mode="eval").body
    return {given.arg: ast.literal_eval(given.value) for given in call.keywords}


def edits(lines: list[str], where: str, modules: Mapping[str, str]) -> Iterator[Edit]:
    """The edits that the lines of one bug describe."""
    parts: list[tuple[str, int, int | None, list[str]]] = []
    for line in lines:
        place = _PLACE.match(line)
        assert place is not None
        where = place["where"] or where
        begins = bool(place["where"] or place["all"] or place["of"])
        edit = place["edit"] if begins else line
        continues = parts and (not parts[-1][3] or all(one.startswith(_MARKS) for one in (edit, parts[-1][3][0])))
        if begins or not continues:
            nth = int(place["nth"]) - 1 if place["nth"] else None
            parts.append((where, int(place["all"] or place["of"] or 1), nth, []))
        parts[-1][3].extend([edit] if edit else [])
    for home, count, nth, part in parts:
        module, _, functions = home.partition(":")
        made = _replacement(part[0], count, nth) if part and not part[0].startswith(_MARKS) else _hunk(part, count, nth)
        yield from at(f"{modules[module]}:{functions}", *made)


def _replacement(line: str, count: int, nth: int | None) -> list[Edit]:
    find, _, put = line.partition(" => ")
    return [replace(find, put, count, nth)]


def _hunk(lines: list[str], count: int, nth: int | None) -> list[Edit]:
    """Edits of one hunk; deletions first, so that what moves is found in one place."""
    blocks = [(mark, "\n".join(line[2:] for line in own)) for mark, own in groupby(lines, lambda line: line[:2])]
    deletions, others = [], []
    for number, (mark, text) in enumerate(blocks):
        last = blocks[number - 1] if number else ("", "")
        coming = blocks[number + 1] if number + 1 < len(blocks) else ("", "")
        if mark == "= ":
            others.append(Edit("body", "", text, True))
        elif mark == "- " and coming[0] != "+ ":
            deletions.append(delete(text, count, nth))
        elif mark == "+ " and last[0] == "- ":
            others.append(replace(last[1], text, count, nth))
        elif mark == "+ ":
            how, beside = ("after", last) if last[0] == "  " else ("before", coming)
            others.append(Edit(how, beside[1], text, True, count, nth))
    return deletions + others
