"""What a build puts into a wheel: the native call path, where it can be compiled; and its platform."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tilestream.launch import native_build

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "tilestream/_native/libtilestream_native.so"
#: A compiler that copies a library to where the next one is to be, to save the time of compiling.
COPY = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
exec cp "{library}" "$2"
"""
OPEN = """
import sys, tilestream
from tilestream.launch import native
library = native.FOLDER / native.LIBRARY
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
        timeout=110,
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
        env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (None, None), ("0", None), ("1", "the native call path cannot be built: no C++ compiler: set CXX"),
        ("yes", "TILESTREAM_BUILD_NATIVE=yes: must be 0 (without), 1 (required), or unset (if it can be built)"),
    ],
)  # fmt: skip
def test_a_build_goes_without_the_library_unless_it_is_required(tmp_path, monkeypatch, asked, says):
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    monkeypatch.setenv("CXX", "no-such-compiler")
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
    monkeypatch.setattr(native_build, "compiler", lambda: "c++")
    assert native_build.why_not(None) == "torch is not installed"
    assert native_build.why_not(tmp_path) == f"no headers of torch >= 2.10 in {tmp_path}"
    monkeypatch.setattr(native_build, "compiler", lambda: "")
    assert native_build.build(tmp_path / "x.so") == "no C++ compiler: set CXX"
    monkeypatch.setattr(native_build, "SOURCES", (tmp_path,))
    assert native_build.build(tmp_path / "x.so") == f"no sources in {tmp_path}"
