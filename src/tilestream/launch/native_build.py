"""Building the native call path: ``python -m tilestream.launch.native_build``.

Needs a C++20 compiler (``$CXX``, or c++, g++, clang++) and the torch that is installed, of which any build will do: the
library has no CUDA in it, and runs under every torch from `OLDEST` on.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

#: The oldest torch that the library runs under: as pyproject.toml has it.
OLDEST = (2, 10)
HERE = Path(__file__).resolve()
#: As in `tilestream.launch.native`, which imports Triton.
LIBRARY = HERE.parents[1] / "_native" / "libtilestream_native.so"
#: In an installed package, and in a source tree.
SOURCES = (LIBRARY.parent / "csrc", HERE.parents[3] / "csrc")
#: -fvisibility: what is not exported cannot clash with other libraries.
FLAGS = ("-O2", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")


def compiler() -> str:
    """The C++ compiler; empty if there is none."""
    asked = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [asked] if asked else ["c++", "g++", "clang++"])), "")


def sources() -> list[Path]:
    """The files to compile; none if they are not here."""
    return next((found for folder in SOURCES if (found := sorted(folder.glob("*.cpp")))), [])


def command(files: list[Path], to: Path, *more: str) -> list[str]:
    """How ``files`` are compiled to a library.

    Parameters
    ----------
    more
        Further flags of the compiler.
    """
    root = Path(torch.__file__).parent
    target = f"-DTORCH_TARGET_VERSION=0x{OLDEST[0]:02x}{OLDEST[1]:02x}000000000000ULL"
    # Not -I: torch's headers have warnings of their own.
    include = [
        part for path in ("include", "include/torch/csrc/api/include") for part in ("-isystem", str(root / path))
    ]
    link = [f"-L{root / 'lib'}", "-ltorch_cpu", "-ldl"]
    return [compiler(), *FLAGS, *more, target, *include, *map(str, files), "-o", str(to), *link]


def build(to: Path = LIBRARY, *more: str) -> str:
    """Build the library, in place of an earlier one; returns why it cannot be built, empty if it was.

    Parameters
    ----------
    to
        The library.
    more
        Further flags of the compiler.
    """
    files = sources()
    if not files:
        return f"no sources in {' or '.join(map(str, SOURCES))}"
    if not compiler():
        return "no C++ compiler: set CXX"
    to.parent.mkdir(parents=True, exist_ok=True)
    # A process may have the earlier one loaded: its file is replaced, and not written over.
    with tempfile.TemporaryDirectory(dir=to.parent) as folder:
        made = Path(folder) / to.name
        done = subprocess.run(command(files, made, *more), capture_output=True, text=True, check=False)
        if done.returncode:
            return f"the compiler failed:\n{done.stderr}"
        made.replace(to)
    return ""


if __name__ == "__main__":
    failed = build()
    print(failed or f"built {LIBRARY}", file=sys.stderr if failed else sys.stdout)
    sys.exit(bool(failed))
