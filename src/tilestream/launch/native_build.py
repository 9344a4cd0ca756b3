"""Building the native call path: ``python -m tilestream.launch.native_build``.

Needs a C++20 compiler (``$CXX``, or c++, g++, clang++) and the torch that is installed, of which any build will do: the
library has no CUDA in it, and runs under every torch from `OLDEST` on. ``hatch_build.py`` loads this file by its path,
so it imports the standard library alone.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

#: The oldest torch that the library runs under: as pyproject.toml has it.
OLDEST = (2, 10)
HERE = Path(__file__).resolve()
#: As in `tilestream.launch.native`, which imports Triton.
LIBRARY = HERE.parents[1] / "_native" / "libtilestream_native.so"
#: In an installed package, and in a source tree.
SOURCES = (LIBRARY.parent / "csrc", HERE.parents[3] / "csrc")
#: -fvisibility: what is not exported cannot clash with other libraries.
FLAGS = ("-O2", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")
#: The newest GLIBCXX_3.4.N that distributions have beside their glibc 2.N.
_BESIDE_GLIBC = ((19, 17), (22, 24), (24, 27), (25, 28), (28, 31), (29, 34), (30, 35), (32, 38), (33, 39))


def compiler() -> str:
    """The C++ compiler; empty if there is none."""
    asked = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [asked] if asked else ["c++", "g++", "clang++"])), "")


def sources() -> list[Path]:
    """The files to compile; none if they are not here."""
    return next((found for folder in SOURCES if (found := sorted(folder.glob("*.cpp")))), [])


def torch_folder() -> Path | None:
    """The folder of the torch that this interpreter would import, if any."""
    found = importlib.util.find_spec("torch")
    return Path(found.origin).parent if found is not None and found.origin else None


def why_not(torch: Path | None) -> str:
    """Why the library cannot be built here; empty if it can.

    Parameters
    ----------
    torch
        The folder of torch.
    """
    if not sources():
        return f"no sources in {' or '.join(map(str, SOURCES))}"
    if not compiler():
        return "no C++ compiler: set CXX"
    if torch is None:
        return "torch is not installed"
    if not (torch / "include" / "torch" / "csrc" / "stable").is_dir():
        return f"no headers of torch >= {'.'.join(map(str, OLDEST))} in {torch}"
    return ""


def command(files: list[Path], to: Path, torch: Path, *more: str) -> list[str]:
    """How ``files`` are compiled to a library.

    Parameters
    ----------
    torch
        The folder of torch.
    more
        Further flags of the compiler.
    """
    target = f"-DTORCH_TARGET_VERSION=0x{OLDEST[0]:02x}{OLDEST[1]:02x}000000000000ULL"
    # Not -I: torch's headers have warnings of their own.
    include = [
        part for path in ("include", "include/torch/csrc/api/include") for part in ("-isystem", str(torch / path))
    ]
    link = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-ldl"]
    return [compiler(), *FLAGS, *more, target, *include, *map(str, files), "-o", str(to), *link]


def build(to: Path = LIBRARY, *more: str, torch: Path | None = None) -> str:
    """Build the library, in place of an earlier one; returns why it cannot be built, empty if it was.

    Parameters
    ----------
    to
        The library.
    more
        Further flags of the compiler.
    torch
        The folder of torch; by default, of the one that is installed.
    """
    torch = torch or torch_folder()
    why = why_not(torch)
    if why or torch is None:
        return why
    to.parent.mkdir(parents=True, exist_ok=True)
    # A process may have the earlier one loaded: its file is replaced, and not written over.
    with tempfile.TemporaryDirectory(dir=to.parent) as folder:
        made = Path(folder) / to.name
        done = subprocess.run(command(sources(), made, torch, *more), capture_output=True, text=True, check=False)
        if done.returncode:
            return f"the compiler failed:\n{done.stderr}"
        made.replace(to)
    return ""


def platform_tag(library: bytes, machine: str) -> str:
    """The platform of a wheel with this library, by the versions of glibc and libstdc++ that it asks for (PEP 600).

    Parameters
    ----------
    library
        What its file holds.
    machine
        As ``platform.machine`` names it.
    """
    glibc = [int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)", library)]
    if not glibc:  # another C library: the wheel is for machines like this one
        return f"linux_{machine}"
    newest = max((int(minor) for minor in re.findall(rb"\0GLIBCXX_3\.4\.(\d+)", library)), default=0)
    beside = next((minor for shipped, minor in _BESIDE_GLIBC if newest <= shipped), None)
    return f"linux_{machine}" if beside is None else f"manylinux_2_{max(*glibc, beside)}_{machine}"


if __name__ == "__main__":
    failed = build()
    print(failed or f"built {LIBRARY}", file=sys.stderr if failed else sys.stdout)
    sys.exit(bool(failed))
