"""CUDA's driver without a device (`cuda_stub.c`): it records launches."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("cuda_stub.c")


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_uint64), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    ]  # fmt: skip


class _Launch(ctypes.Structure):
    _fields_ = [
        ("config", _Config), ("attributes", ctypes.c_int * 4 * 4), ("function", ctypes.c_uint64),
        ("parameters", ctypes.c_ubyte * 1024),
    ]  # fmt: skip


class Stub:
    """The library, and what it was given."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        for name in ("launched", "encoded", "pause_us", "fails", "parameters"):
            self.set(name, 0)
        self.set("version", 13000)

    def set(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self.library, name).value = value

    def get(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.library, name).value

    def expect(self, sizes: list[int]) -> None:
        """Kernels have parameters of these sizes."""
        (ctypes.c_int * 64).in_dll(self.library, "sizes")[: len(sizes)] = sizes
        self.set("parameters", len(sizes))

    @property
    def launches(self) -> list[Any]:
        """All launches so far, 4096 at most."""
        return list((_Launch * 4096).in_dll(self.library, "launches")[: self.get("launched")])

    def function(self, hip: bool, name: str, arguments: tuple[type, ...]) -> Any:
        """In place of `tilestream.runtime.driver._function`."""
        function = self.library[name]  # one of its own
        function.argtypes = arguments
        return function


@functools.cache
def _loaded() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        return ctypes.CDLL(str(build(Path(folder))))


def build(folder: Path) -> Path:
    """The library, as libcuda.so.1."""
    to = folder / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-pthread", "-o", to, SOURCE], check=True)
    (folder / "libcuda.so").symlink_to(to)
    return to


@contextlib.contextmanager
def cuda_stub() -> Iterator[Stub]:
    """The stub in place of libcuda, for the length of the block."""
    import pytest

    from tilestream.launch import tensor_map
    from tilestream.runtime import driver

    made = Stub(_loaded())
    tensor_map._driver_version.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_function", made.function)
        yield made
    tensor_map._driver_version.cache_clear()
