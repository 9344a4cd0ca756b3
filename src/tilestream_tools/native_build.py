"""Building the native call path: ``python -m tilestream_tools.native_build``.

Needs a C++20 compiler and the headers of the torch that is installed, of which any build will do: the library has no
CUDA in it, and runs under every torch from `OLDEST` on. The compiler is ``$CXX``, or c++, g++, clang++; for machines of
another kind ``$CXX_aarch64`` (or ``$CXX_x86_64``), or Debian's ``aarch64-linux-gnu-g++``. With the name of such a kind
as its argument this command says what would build for it. ``hatch_build.py`` loads this file by its path, so it imports
the standard library alone.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

#: The oldest torch that the library runs under: as pyproject.toml has it.
OLDEST = (2, 10)
HERE = Path(__file__).resolve()
#: The kind of this machine, and the kinds that wheels are made for.
MACHINE = platform.machine()
MACHINES = ("x86_64", "aarch64")
#: As in `tilestream.runtime.extension`, which imports torch.
LIBRARY = HERE.parents[1] / "tilestream" / "_native" / "libtilestream_native.so"
#: In an installed package, and in a source tree.
SOURCES = (LIBRARY.parent / "csrc", HERE.parents[2] / "csrc")
#: -fvisibility: what is not exported cannot clash with other libraries.
FLAGS = ("-O2", "-std=c++20", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra")
#: The newest GLIBCXX_3.4.N that distributions have beside their glibc 2.N.
_BESIDE_GLIBC = ((19, 17), (22, 24), (24, 27), (25, 28), (28, 31), (29, 34), (30, 35), (32, 38), (33, 39))


def compiler(machine: str = MACHINE) -> list[str]:
    """The C++ compiler for a kind of machine, and its first flags; empty if there is none."""
    here = machine == MACHINE
    asked = os.environ.get("CXX" if here else f"CXX_{machine}")
    usual = ["c++", "g++", "clang++"] if here else [f"{machine}-linux-gnu-g++"]
    return next((command for command in map(shlex.split, [asked] if asked else usual) if shutil.which(command[0])), [])


def sources() -> list[Path]:
    """The files to compile; none if they are not here."""
    return next((found for folder in SOURCES if (found := sorted(folder.glob("*.cpp")))), [])


def torch_folder() -> Path | None:
    """The folder of the torch that this interpreter would import, if any."""
    found = importlib.util.find_spec("torch")
    return Path(found.origin).parent if found is not None and found.origin else None


def why_not(torch: Path | None, machine: str = MACHINE) -> str:
    """Why the library cannot be built here; empty if it can.

    Parameters
    ----------
    torch
        The folder of torch.
    machine
        Of which kind it is to run on.
    """
    if not sources():
        return f"no sources in {' or '.join(map(str, SOURCES))}"
    if not compiler(machine):
        return "no C++ compiler: set CXX" if machine == MACHINE else f"no C++ compiler for it: set CXX_{machine}"
    if torch is None:
        return "torch is not installed"
    if not (torch / "include" / "torch" / "csrc" / "stable").is_dir():
        return f"no headers of torch >= {'.'.join(map(str, OLDEST))} in {torch}"
    return ""


def commands(files: list[Path], to: Path, torch: Path, *more: str, machine: str = MACHINE) -> list[list[str]]:
    """How ``files`` are compiled to a library.

    First comes an empty library of the name of torch's, which the second is linked to: torch's own may be for another
    kind of machine. It stays beside ``to``.

    Parameters
    ----------
    torch
        The folder of torch.
    more
        Further flags of the compiler.
    machine
        Of which kind it is to run on.
    """
    cxx, stub = compiler(machine), to.parent / "libtorch_cpu.so"
    target = f"-DTORCH_TARGET_VERSION=0x{OLDEST[0]:02x}{OLDEST[1]:02x}000000000000ULL"
    # Not -I: torch's headers have warnings of their own.
    include = [
        part for path in ("include", "include/torch/csrc/api/include") for part in ("-isystem", str(torch / path))
    ]
    link = ["-Wl,--no-as-needed", str(stub), "-ldl"]
    return [
        [*cxx, "-shared", f"-Wl,-soname,{stub.name}", "-x", "c++", os.devnull, "-o", str(stub)],
        [*cxx, *FLAGS, *more, target, *include, *map(str, files), "-o", str(to), *link],
    ]


def build(to: Path = LIBRARY, *more: str, torch: Path | None = None, machine: str = MACHINE) -> str:
    """Build the library, in place of an earlier one; returns why it cannot be built, empty if it was.

    Parameters
    ----------
    to
        The library.
    more
        Further flags of the compiler.
    torch
        The folder of torch; by default, of the one that is installed.
    machine
        Of which kind it is to run on.
    """
    torch = torch or torch_folder()
    why = why_not(torch, machine)
    if why or torch is None:
        return why
    to.parent.mkdir(parents=True, exist_ok=True)
    # A process may have the earlier one loaded: its file is replaced, and not written over.
    with tempfile.TemporaryDirectory(dir=to.parent) as folder:
        made = Path(folder) / to.name
        for command in commands(sources(), made, torch, *more, machine=machine):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
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
    if asked := sys.argv[1:]:
        failed = why_not(torch_folder(), asked[0])
        done = f"for {asked[0]}: {shlex.join(compiler(asked[0]))}"
    else:
        failed, done = build(), f"built {LIBRARY}"
    print(failed or done, file=sys.stderr if failed else sys.stdout)
    sys.exit(bool(failed))
