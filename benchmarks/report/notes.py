"""The prose of the performance pages: Markdown in ``benchmarks/notes``, with named fields for the figures.

A file holds parts. A part begins with a comment that names it, ``<!-- suite -->``, or names it several times, one name
a line: the words on a loss are named by the device, shape and plan that they are of. A field is one of Python's format
fields, ``{ratio:.3f}``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.core.records import Data
from benchmarks.report.tables import where

NOTES = Path(__file__).parents[1] / "notes"
Section = Callable[[Data], list[str]]


class Notes:
    """The parts of a page's notes."""

    def __init__(self, page: str) -> None:
        text = (NOTES / f"{page}.md").read_text(encoding="utf-8")
        pieces = re.split(r"^<!--\s*(.*?)\s*-->\n", text, flags=re.DOTALL | re.MULTILINE)
        self.parts = {
            name.strip(): words.strip()
            for names, words in zip(pieces[1::2], pieces[2::2], strict=True)
            for name in names.splitlines()
        }

    def __call__(self, part: str, **figures: Any) -> str:
        """A part with its figures.

        Raises
        ------
        KeyError
            If there is no such part, or a field has no figure.
        """
        return self.parts[part].format_map(figures)

    def of(self, data: Data, part: str, **figures: Any) -> str:
        """The note on a record, with what it was made on."""
        known = {"device": data["device"], "dtype": data.get("dtype"), "where": where(data)}
        return self(f"{part} record", **known | figures)

    def page(self, sections: dict[str, Section], found: Callable[[str], list[Data]]) -> list[str]:
        """The head of a page; then of each section its note and what it makes of its records, if it makes anything."""
        parts = [self("page")]
        for name, section in sections.items():
            made = [part for data in found(name) for part in section(data)]
            parts += [self(name), *made] if made and self.parts[name] else made
        return parts

    def line(self, part: str, figures: dict[str, str]) -> str:
        """A part in one line, for a table or a list; ``-`` for figures that a record lacks."""
        return " ".join(self.parts[part].split()).format_map(_Given(figures))


class _Given(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return "-"
