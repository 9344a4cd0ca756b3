"""The file that the demonstration streams: a safetensors file of its own in the cache folder, or the user's."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilestream.arrival.files import StoredMatrix, drop_from_page_cache, find_matrix
from tilestream.cli import ui
from tilestream.plan.problem import FP8

if TYPE_CHECKING:
    from collections.abc import Callable

#: The demonstration's activations: 256 MiB of fp32.
SHAPE = (16384, 4096)
TENSOR, SEED = "x", 20250
_FORMAT = "1"  # of what is in the file; another one is written anew
_BLOCK = 16 * 2**20


@dataclass(frozen=True)
class Source:
    """A matrix in a file, the tensor asked for (None: the only one), and whether reads can be made cold: ``how``."""

    matrix: StoredMatrix
    tensor: str | None
    cold: bool
    how: str

    @property
    def path(self) -> Path:
        """The file."""
        return self.matrix.path

    @property
    def rows(self) -> int:
        """Rows of the matrix, leading dimensions counted as rows."""
        rows = 1
        for extent in self.matrix.shape[:-1]:
            rows *= extent
        return rows

    @property
    def columns(self) -> int:
        """Columns of the matrix."""
        return self.matrix.shape[-1]

    def facts(self) -> dict[str, Any]:
        """What it is, for JSON."""
        matrix = self.matrix
        return {
            "path": str(self.path),
            "tensor": matrix.name,
            "shape": list(matrix.shape),
            "dtype": matrix.dtype,
            "bytes": matrix.nbytes,
        }

    def drop(self) -> None:
        """Make the next read cold, where possible."""
        drop_from_page_cache(self.path)


def open_source(path: Path, tensor: str | None) -> Source:
    """The matrix ``tensor`` of the file ``path``, checked for what the demonstration needs.

    Raises
    ------
    OSError, ValueError, TypeError
        As `find_matrix`; and if there is nothing to multiply.
    """
    matrix = find_matrix(path, tensor)
    if not matrix.nbytes:
        raise ValueError(f"{path}: tensor {matrix.name!r} has shape {list(matrix.shape)}: there is nothing to read")
    if matrix.dtype in FP8:
        raise TypeError(
            f"{path}: tensor {matrix.name!r} is {matrix.dtype}; the demonstration compares with torch.mm, which takes "
            "16 bits or more: convert it, or read it with tilestream.stream_in"
        )
    cold, how = _coldness(path)
    return Source(matrix, tensor, cold, how)


def _coldness(path: Path) -> tuple[bool, str]:
    if not drop_from_page_cache(path):
        return False, "this system has no posix_fadvise, so the file may be read from memory instead of the disk"
    if _cached(path):
        return False, "the system keeps the file in memory (a tmpfs, or somebody has it mapped), so reads are not cold"
    return True, "cold: dropped from the page cache before each read"


def _cached(path: Path) -> bool:
    """Whether the file's middle is in the page cache, as far as the system says so (Linux)."""
    if not (hasattr(os, "preadv") and hasattr(os, "RWF_NOWAIT")):
        return False
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(fd, [bytearray(1)], path.stat().st_size // 2, os.RWF_NOWAIT) == 1
    except OSError:
        return False  # would have to wait for the disk; or the file system cannot say
    finally:
        os.close(fd)
        drop_from_page_cache(path)  # asking may have started to read


def default_folder() -> Path:
    """Where the demonstration keeps its file: ``$XDG_CACHE_HOME/tilestream``, or ``~/.cache/tilestream``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification (freedesktop.org, XDG Base Directory) has relative paths ignored.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "tilestream"


def demo_file(folder: Path, tell: Callable[[str], None] = lambda _: None) -> tuple[Path, str]:
    """The demonstration's own file in ``folder``, written if it is not there or not as it was written.

    Parameters
    ----------
    folder
        Made if need be.
    tell
        Called with what is being done, when it takes long.

    Returns
    -------
    (path, what)
        The file, and whether it was there, was written, or was written anew and why.

    Raises
    ------
    OSError
        If the folder cannot be written, or has not enough room.
    """
    rows, columns = SHAPE
    path = folder / f"activations-{rows}x{columns}-float32.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    damage = ""
    if path.exists():
        tell("checking the cached file")
        damage = _damage(path)
        if not damage:
            return path, "cached"
    tell(f"writing {ui.size(4 * rows * columns)} of random activations, once")
    _write(path)
    return path, f"written anew: the cached file was damaged ({damage})" if damage else "written now"


def _damage(path: Path) -> str:
    """What is wrong with the cached file; empty if nothing is."""
    from safetensors import SafetensorError, safe_open

    try:
        found = find_matrix(path, TENSOR)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (ValueError, TypeError, OSError, SafetensorError) as error:
        return ui.one_line(error)
    if (found.shape, found.dtype, metadata.get("format_version")) != (SHAPE, "float32", _FORMAT):
        return "of another version"
    return "" if metadata.get("crc32") == f"{_checksum(found):08x}" else "its checksum is wrong"


def _checksum(matrix: StoredMatrix) -> int:
    value, left = 0, matrix.nbytes
    with matrix.path.open("rb") as file:
        file.seek(matrix.offset)
        while left > 0 and (block := file.read(min(left, _BLOCK))):
            value, left = zlib.crc32(block, value), left - len(block)
    return value


def _write(path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    wanted = 4 * SHAPE[0] * SHAPE[1] + 2**16
    free = shutil.disk_usage(path.parent).free
    if path.exists():
        free += path.stat().st_size
        path.unlink()
    if free < wanted:
        raise OSError(
            errno.ENOSPC,
            f"{ui.size(free)} free, the file takes {ui.size(wanted)}; give another folder with --cache-dir",
            str(path.parent),
        )
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(SEED))
    crc = zlib.crc32(x.numpy().data.cast("B"))
    metadata = {"format_version": _FORMAT, "seed": str(SEED), "crc32": f"{crc:08x}"}
    # Whoever looks finds the whole file or none: written beside it, then renamed.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    os.close(handle)
    try:
        save_file({TENSOR: x}, name, metadata=metadata)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)
