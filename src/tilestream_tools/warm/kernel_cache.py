"""What of Triton's cache is this package's: listed, and carried from one machine to another.

A kernel is a folder of the cache, named by the hash of all that it depends on. Its index names its files by their
absolute paths; so `unpack` writes that anew, and a plain copy of a cache to another path is not found by Triton.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import lzma
import platform
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import triton
from triton.runtime import cache as triton_cache

from tilestream._version import __version__
from tilestream.core.whole_file import write_whole

#: A kernel's index: the file that names its others.
_INDEX = "__grp__"
#: In a kernel's source, where its text lies.
_OURS = b"tilestream/kernels/"
_MANIFEST = "tilestream.json"
_TARS = (".tar", ".tar.gz", ".tgz")
_MEMBER = re.compile(r"[A-Z2-7]+/[A-Za-z0-9_.]+")


class CachedKernel(NamedTuple):
    """A kernel of the cache: its folder, its name, what it was compiled for (``sm_90``, ``gfx942``), and with what."""

    folder: Path
    name: str
    arch: str
    triton: str
    size: int  # bytes of its files


def folder() -> Path:
    """The folder of Triton's cache."""
    return Path(triton.knobs.cache.dir)


def kernels(within: Path | None = None) -> Iterator[CachedKernel]:
    """The kernels of a cache that are this package's; ``within`` None: of Triton's."""
    for index in sorted((within or folder()).glob(f"*/{_INDEX}*.json")):
        where, name = index.parent, index.name.removeprefix(_INDEX).removesuffix(".json")
        try:
            if _OURS not in (where / f"{name}.source").read_bytes():
                continue
            metadata = json.loads((where / f"{name}.json").read_text(encoding="utf-8"))
            target = metadata["target"]
            arch = f"sm_{target['arch']}" if target["backend"] == "cuda" else str(target["arch"])
            size = sum(one.stat().st_size for one in where.iterdir())
            yield CachedKernel(where, name, arch, metadata["triton_version"], size)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # it is being written, or has been removed


def home(key: str) -> Path:
    """The folder of a kernel, by the key that Triton compiles it under."""
    digest = hashlib.sha256(key.encode("utf-8")).digest()
    return folder() / base64.b32encode(digest).decode().rstrip("=")


def is_cached(key: str) -> bool:
    """Whether a kernel is in the cache."""
    return any(home(key).glob(f"{_INDEX}*.json"))


def made_by() -> dict[str, str]:
    """What a kernel's hash depends on beside the kernel: where one of these differs, Triton finds none of a pack."""
    return {
        "tilestream": __version__,
        "triton": triton.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "triton's files": hashlib.sha256(triton_cache.triton_key().encode()).hexdigest()[:16],
    }


def pack(to: Path, found: Iterable[CachedKernel]) -> int:
    """Copy kernels into a new folder, or a tar (``.tar``, ``.tar.gz``, ``.tgz``); returns how many there were.

    Raises
    ------
    FileExistsError
        If there is such a file or folder already.
    """
    files: dict[str, bytes] = {}
    kernels_of_pack = list(found)
    for kernel in kernels_of_pack:
        for one in kernel.folder.iterdir():
            if one.is_file() and not one.name.startswith(_INDEX):
                files[f"{kernel.folder.name}/{one.name}"] = one.read_bytes()
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    files[_MANIFEST] = json.dumps({**made_by(), "files": digests}, indent=1).encode()
    if to.name.endswith(_TARS):
        with tarfile.open(to, "x:" if to.suffix == ".tar" else "x:gz") as tar:
            for name, data in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    else:
        to.mkdir(parents=True)
        for name, data in files.items():
            (to / name).parent.mkdir(exist_ok=True)
            (to / name).write_bytes(data)
    return len(kernels_of_pack)


def unpack(source: Path) -> tuple[int, int]:
    """Copy a pack's kernels into this machine's cache; returns how many were new, and how many there were.

    Raises
    ------
    ValueError
        If it is no pack, one that is damaged, or one made with other versions: nothing of it would be found.
    """
    files = _files_of(source)
    try:
        by, here = json.loads(files.pop(_MANIFEST)), made_by()
        digests: dict[str, str] = dict(by["files"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{source}: no pack of kernels; `tilestream warm --to` makes one") from None
    other = [f"{what} {by.get(what)}, here {here[what]}" for what in here if by.get(what) != here[what]]
    if other:
        raise ValueError(f"{source}: of {'; '.join(other)}: Triton would find none of its kernels; compile them here")
    homes: dict[str, dict[str, bytes]] = {}
    for name, data in files.items():
        if not _MEMBER.fullmatch(name):
            raise ValueError(f"{source}: {name!r} is no file of a kernel")
        where, _, inner = name.partition("/")
        homes.setdefault(where, {})[inner] = data
    damaged = [name for name in digests if hashlib.sha256(files.get(name, b"")).hexdigest() != digests[name]]
    if damaged or len(files) != len(digests):
        raise ValueError(f"{source}: damaged: {', '.join(damaged[:3]) or 'a file too many'}: copy it again")
    names = {where: next((one for one in members if one.endswith(".json")), "") for where, members in homes.items()}
    if without := [where for where, name in names.items() if not name]:
        raise ValueError(f"{source}: damaged: {without[0]} has no kernel's .json: copy it again")
    new = 0
    for where, members in homes.items():
        name = names[where]
        place = folder() / where
        if (place / f"{_INDEX}{name}").exists():
            continue
        place.mkdir(parents=True, exist_ok=True)
        paths = {inner: str(place / inner) for inner in members}
        for inner, data in members.items():
            write_whole(place / inner, data)
        write_whole(place / f"{_INDEX}{name}", json.dumps({"child_paths": paths}).encode())  # last: now Triton finds it
        new += 1
    return new, len(homes)


def _files_of(source: Path) -> dict[str, bytes]:
    if source.is_dir():
        return {str(one.relative_to(source)): one.read_bytes() for one in source.rglob("*") if one.is_file()}
    try:
        with tarfile.open(source) as tar:
            members = ((one.name, tar.extractfile(one)) for one in tar.getmembers() if one.isfile())
            return {name: file.read() for name, file in members if file is not None}
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the file system, not of what is in the file
        raise ValueError(f"{source}: neither a folder nor a tar: {error}") from None
