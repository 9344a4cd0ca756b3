"""What a build puts into a wheel: the native call path, where it can be compiled; and its platform."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tilestream_tools import native_build

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIBRARY = "tilestream/_native/libtilestream_native.so"
#: A kind of machine that wheels are made for, and this is none of.
OTHER = next(machine for machine in native_build.MACHINES if machine != native_build.MACHINE)
#: The libraries that one for manylinux may need, beside torch's.
NEEDED = re.compile(r"lib(torch_cpu|stdc\+\+|m|gcc_s|c|dl)\.so.*|ld-linux.*")
#: What it may take from torch: the stable ABI.
STABLE = re.compile(r"(aoti_)?torch_\w+")
#: A compiler that copies a library to where the next one is to be, to save the time of compiling.
COPY = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
exec cp "{library}" "$2"
"""
OPEN = """
import sys, tilestream
from tilestream.launch import native
from tilestream.runtime import extension
library = extension.FOLDER / extension.LIBRARY
assert str(library) == sys.argv[1], library
assert "is not there" not in native.why_not(), native.why_not()
native.Extension(library, sys.argv[2], sys.argv[2])
"""


def pip(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    options = ["--disable-pip-version-check", "--no-input", "--no-deps", "--no-build-isolation", "--no-index"]
    return subprocess.run(
        [sys.executable, "-m", "pip", *arguments[:1], *options, *arguments[1:]],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )


@pytest.fixture(params=["copied", pytest.param("compiled", marks=pytest.mark.slow)])
def compiler(request, libraries, tmp_path) -> dict[str, str]:
    """A compiler, as an environment."""
    pytest.importorskip("hatchling")
    # Not by an import: setuptools takes one for pip's own process, and inductor then fails in this one (Python 3.11).
    if not any(importlib.metadata.distributions(name="pip")):
        pytest.skip("needs pip")
    if request.param == "compiled":
        return {}
    script = tmp_path / "copy"
    script.write_text(COPY.format(library=libraries[0]))
    script.chmod(0o755)
    return {"CXX": str(script)}


def test_a_wheel_with_the_library_is_found_where_it_is_installed(compiler, libraries, tmp_path):
    made = pip("wheel", "-w", tmp_path, ROOT, TILESTREAM_BUILD_NATIVE="1", **compiler)
    assert made.returncode == 0, made.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.split("-")[2:4] == ["py3", "none"], "one wheel for all Pythons"
    assert wheel.stem.endswith(os.uname().machine)
    assert LIBRARY in zipfile.ZipFile(wheel).namelist()
    target = tmp_path / "target"
    installed = pip("install", "--target", target, wheel)
    assert installed.returncode == 0, installed.stderr
    environment = {**os.environ, "PYTHONPATH": str(target)}
    found = subprocess.run(
        [sys.executable, "-c", OPEN, target / LIBRARY, libraries[1]],
        env=environment, capture_output=True, text=True, timeout=850, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr


@pytest.fixture(params=["copied", pytest.param("compiled", marks=pytest.mark.slow)])
def cross_compiler(request, libraries, tmp_path, monkeypatch) -> None:
    """A compiler for the other kind of machine."""
    if request.param == "copied":
        script = tmp_path / "copy"
        script.write_text(COPY.format(library=libraries[0]))
        script.chmod(0o755)
        monkeypatch.setenv(f"CXX_{OTHER}", str(script))
    elif not native_build.compiler(OTHER):
        pytest.skip(f"no compiler for {OTHER}")


def test_make_wheel_builds_for_each_machine_that_it_has_a_compiler_for(libraries, tmp_path, monkeypatch):
    monkeypatch.setenv(f"CXX_{OTHER}", "sh -c")  # is not called here
    log, pip = tmp_path / "log", tmp_path / "pip"
    pip.write_text(f"#!/bin/sh\necho $TILESTREAM_BUILD_NATIVE $* >> {log}\n")
    pip.chmod(0o755)

    def make() -> tuple[int, str, list[str]]:
        log.write_text("")
        stamp = tmp_path / "venv" / ".stamp-dev"
        done = subprocess.run(
            ["make", "wheel", f"VENV={stamp.parent}", "-o", stamp, f"BIN={Path(sys.executable).parent}", f"PIP={pip}"],
            cwd=ROOT, capture_output=True, text=True, timeout=850, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout, log.read_text().splitlines()

    how = "wheel --no-deps --no-build-isolation -w dist ."
    assert make()[::2] == (0, [f"{machine} {how}" for machine in native_build.MACHINES])
    monkeypatch.setenv(f"CXX_{OTHER}", "no-such-compiler")
    status, told, made = make()
    assert (status, made) == (0, [f"{native_build.MACHINE} {how}"])
    assert f"left out: {OTHER}: no C++ compiler for it: set CXX_{OTHER}" in told
    monkeypatch.setenv("CXX", "no-such-compiler")
    status, told, made = make()
    assert (status != 0, made) == (True, [])
    assert f"left out: {native_build.MACHINE}: no C++ compiler: set CXX" in told


def test_a_wheel_for_another_kind_of_machine(cross_compiler, tmp_path):
    made = pip("wheel", "-w", tmp_path, ROOT, TILESTREAM_BUILD_NATIVE=OTHER)
    assert made.returncode == 0, made.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stem.endswith(OTHER)
    assert LIBRARY in zipfile.ZipFile(wheel).namelist()


def readelf(library: Path, *options: str) -> str:
    return subprocess.run(["readelf", "-W", *options, library], capture_output=True, text=True, check=True).stdout


def undefined(library: Path) -> list[str]:
    """Symbols that it takes from other libraries."""
    rows = map(str.split, readelf(library, "--dyn-syms").splitlines())
    return [row[7] for row in rows if len(row) > 7 and row[6] == "UND"]


@pytest.mark.parametrize("machine", [native_build.MACHINE, pytest.param(OTHER, marks=pytest.mark.slow)])
def test_the_library_needs_the_stable_abi_alone(libraries, tmp_path, machine):
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf")
    library = libraries[0]
    if machine == OTHER:
        library = cross_built(tmp_path)
        assert {"aarch64": "AArch64", "x86_64": "X86-64"}[machine] in readelf(library, "-h")
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", readelf(library, "-d"))
    assert "libtorch_cpu.so" in needed
    assert not [name for name in needed if not NEEDED.fullmatch(name)]
    of_torch = [name for name in undefined(library) if "@" not in name and not name.startswith(("_ITM_", "__gmon"))]
    assert len(of_torch) > 10
    assert not [name for name in of_torch if not STABLE.fullmatch(name)]


def cross_built(folder: Path) -> Path:
    """The library for the other kind of machine."""
    library = folder / "libtilestream_native.so"
    if why := native_build.build(library, "-O1", "-Werror", machine=OTHER):
        pytest.skip(why)
    return library


def compiled(machine: str, *arguments: str | Path) -> None:
    flags = ["-std=c++20", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*native_build.compiler(machine), *flags, *arguments], check=True)


@pytest.fixture
def emulator(tmp_path) -> list[str | Path]:
    """How a program of the other kind of machine is run; its libraries are in ``tmp_path``."""
    found = shutil.which(f"qemu-{OTHER}")
    if found is None or not native_build.compiler(OTHER):
        pytest.skip(f"needs qemu-{OTHER} (Debian's qemu-user) and a compiler for {OTHER}")
    return [found, "-L", f"/usr/{OTHER}-linux-gnu", "-E", f"LD_LIBRARY_PATH={tmp_path}"]


@pytest.mark.slow
def test_the_library_of_another_kind_of_machine_is_loaded_in_an_emulator(emulator, tmp_path):
    """Beside stand-ins of torch's functions; it finds a driver. `foreign.cpp` says what it is asked."""
    library, torch = cross_built(tmp_path), tmp_path / "torch.cpp"
    torch.write_text(
        "\n".join(f'extern "C" int {name}() {{ return 0; }}' for name in undefined(library) if STABLE.fullmatch(name))
    )
    compiled(OTHER, "-shared", "-Wl,-soname,libtorch_cpu.so", torch, "-o", tmp_path / "libtorch_cpu.so")
    compiled(OTHER, "-shared", HERE / "fake_driver.cpp", "-o", tmp_path / "libfake.so")
    compiled(OTHER, HERE / "foreign.cpp", "-o", tmp_path / "foreign", "-ldl")
    done = subprocess.run(
        [*emulator, tmp_path / "foreign", library, tmp_path / "libfake.so"],
        capture_output=True, text=True, timeout=850, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "found, given, cleared\n"), done.stderr


@pytest.mark.slow
def test_another_kind_of_machine_gives_the_driver_the_same_bytes(libraries, emulator, tmp_path):
    sources = [path for path in native_build.sources() if path.name not in ("ops.cpp", "control.cpp")]
    told = {}
    for machine, run in ((native_build.MACHINE, []), (OTHER, emulator)):
        program, fake = tmp_path / f"issue_{machine}", tmp_path / f"libfake_{machine}.so"
        compiled(machine, HERE / "issue.cpp", *sources, "-o", program, "-ldl")
        compiled(machine, "-shared", HERE / "fake_driver.cpp", "-o", fake)
        done = subprocess.run([*run, program, fake], capture_output=True, text=True, timeout=850, check=False)
        assert done.returncode == 0, done.stderr
        told[machine] = done.stdout.splitlines()
    first, second = told[native_build.MACHINE]
    assert first != second
    assert len(first) == len(second) > 2 * 200
    assert told[OTHER] == [first, second]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (None, None), ("0", None), ("1", "the native call path cannot be built: no C++ compiler: set CXX"),
        (OTHER, f"the native call path cannot be built: no C++ compiler for it: set CXX_{OTHER}"),
        (
            "yes",
            "TILESTREAM_BUILD_NATIVE=yes: must be 0 (without), 1 (required), x86_64 or aarch64 (required, for such "
            "machines), or unset (if it can be built)",
        ),
    ],
)  # fmt: skip
def test_a_build_goes_without_the_library_unless_it_is_required(tmp_path, monkeypatch, asked, says):
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    for name in ("CXX", f"CXX_{OTHER}"):
        monkeypatch.setenv(name, "no-such-compiler")
    monkeypatch.delenv("TILESTREAM_BUILD_NATIVE", raising=False)
    if asked is not None:
        monkeypatch.setenv("TILESTREAM_BUILD_NATIVE", asked)
    if says:
        with pytest.raises((RuntimeError, ValueError)) as raised:
            list(builder.build(directory=str(tmp_path)))
        assert str(raised.value) == says
        return
    (wheel,) = builder.build(directory=str(tmp_path))
    assert wheel.endswith("-py3-none-any.whl")
    assert LIBRARY not in zipfile.ZipFile(wheel).namelist()


@pytest.mark.parametrize(
    ("versions", "tag"),
    [
        (["GLIBC_2.2.5", "GLIBC_2.34", "GLIBCXX_3.4.29"], "manylinux_2_34_x86_64"),
        (["GLIBC_2.17", "GLIBCXX_3.4.21", "GLIBCXX_3.4"], "manylinux_2_24_x86_64"),
        (["GLIBC_2.28", "GLIBCXX_3.4.25"], "manylinux_2_28_x86_64"), (["GLIBC_2.14"], "manylinux_2_17_x86_64"),
        (["GLIBC_2.28", "GLIBCXX_3.4.99"], "linux_x86_64"), (["GLIBCXX_3.4.29"], "linux_x86_64"),
    ],
)  # fmt: skip
def test_a_wheel_is_for_systems_that_have_what_the_library_asks_for(versions, tag):
    assert native_build.platform_tag(b"\0".join([b"", *map(str.encode, versions), b""]), "x86_64") == tag


def test_why_the_library_cannot_be_built_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(native_build, "compiler", lambda machine: ["c++"])
    assert native_build.why_not(None) == "torch is not installed"
    assert native_build.why_not(tmp_path) == f"no headers of torch >= 2.10 in {tmp_path}"
    monkeypatch.setattr(native_build, "compiler", lambda machine: [])
    assert native_build.build(tmp_path / "x.so") == "no C++ compiler: set CXX"
    monkeypatch.setattr(native_build, "SOURCES", (tmp_path,))
    assert native_build.build(tmp_path / "x.so") == f"no sources in {tmp_path}"
