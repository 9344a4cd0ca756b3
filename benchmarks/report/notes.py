"""The prose of the performance pages: Markdown in ``benchmarks/notes``, with named fields for the figures.

A file holds parts. A part begins with a comment that names it, ``<!-- suite -->``, or names it several times, one name
a line: the words on a loss are named by the device, shape and plan that they are of. A field is one of Python's format
fields, ``{ratio:.3f}``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

NOTES = Path(__file__).parents[1] / "notes"


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

    def line(self, part: str, figures: dict[str, str]) -> str:
        """A part in one line, for a table or a list; ``-`` for figures that a record lacks."""
        return " ".join(self.parts[part].split()).format_map(_Given(figures))


class _Given(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return "-"
