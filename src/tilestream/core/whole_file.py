"""Files that appear whole or not at all, also where the disk is full or another process writes the same one."""

from __future__ import annotations

import tempfile
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, readable by its owner alone; an `OSError` leaves the old one, and nothing beside it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        new = Path(file.name)
        try:
            file.write(data)
            file.flush()
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
