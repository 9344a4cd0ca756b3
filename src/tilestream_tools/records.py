"""What a command leaves in a file for a later one: written whole or not at all, read only in a layout that is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write(path: Path, text: str) -> None:
    """Write a file for everyone who may read its folder; an `OSError` leaves the old one, and nothing beside it."""
    new = path.with_name(path.name + ".tmp")
    try:
        with new.open("w", newline="", encoding="utf-8") as file:
            file.write(text)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def read(path: Path, kind: str, schema: int, what: str, anew: str, way_out: str = "") -> dict[str, Any]:
    """The JSON object in a file.

    Parameters
    ----------
    kind, schema
        What its entries of these names are: of what command, and in which layout.
    what, anew, way_out
        What an error calls such a file, and says to do: about another layout, and about another kind of file.

    Raises
    ------
    ValueError
        If the file is no such thing, or of another version's layout.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: no {what}: {error}") from None
    if not isinstance(found, dict) or found.get("kind") != kind:
        raise ValueError(f"{path}: no {what}{way_out}")
    if found.get("schema") != schema:
        raise ValueError(f"{path}: schema {found.get('schema')}; this version reads {schema}: {anew}")
    return found
