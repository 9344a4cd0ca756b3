"""CUTLASS's grouped product for Hopper, a peer of the section ``grouped``: ``cutlass_grouped.cu`` through ctypes.

Its headers are no package of their own: DeepGEMM's wheel (see `deepgemm`) has those of CUTLASS 4.2.1 in
``deep_gemm/include``, where they are looked for; ``CUTLASS_INCLUDE`` names another folder. nvcc of CUDA 13 compiles
each of `CONFIGS` in one to two minutes, all of them side by side before anything is timed, into ``CUTLASS_LIBRARIES``
(without it, a folder of the temporary one).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

NAME = "CUTLASS"
SOURCE = Path(__file__).with_name("cutlass_grouped.cu")
#: What the source has under each number.
CONFIGS = {
    "256x128 cooperative, cluster 2x1": 0, "128x256 cooperative, cluster 2x1": 1, "128x128 ping-pong, cluster 1x2": 2,
    "16x128 swapped ping-pong": 3,
}  # fmt: skip
_FLAGS = ("-std=c++17", "-O3", "-DNDEBUG", "-gencode", "arch=compute_90a,code=sm_90a", "--expt-relaxed-constexpr",
          "-Xcompiler", "-fPIC", "-shared")  # fmt: skip


def _headers() -> Path | None:
    if given := os.environ.get("CUTLASS_INCLUDE"):
        return Path(given)
    folders = (Path(place) / "deep_gemm" / "include" for place in sys.path)
    return next((folder for folder in folders if (folder / "cutlass").is_dir()), None)


def _file(config: int) -> Path:
    named = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    folder = Path(os.environ.get("CUTLASS_LIBRARIES") or Path(tempfile.gettempdir()) / "cutlass_grouped")
    return folder / f"cutlass_grouped_{config}_{named}.so"


def imported() -> tuple[list[str], str]:
    """The configurations that are compiled or can be, and the version; or none, and the reason."""
    headers, nvcc = _headers(), shutil.which("nvcc")
    names = [name for name, config in CONFIGS.items() if _file(config).exists()]
    if headers is not None and nvcc is not None:
        names = list(CONFIGS)
    if not names:
        return [], "no nvcc on PATH" if nvcc is None else "no headers: CUTLASS_INCLUDE names their folder"
    text = (headers / "cutlass" / "version.h").read_text() if headers is not None else ""
    said = [line.split()[-1] for line in text.splitlines() if line.startswith("#define CUTLASS_M") and "OR" in line]
    patch = [line.split()[-1] for line in text.splitlines() if line.startswith("#define CUTLASS_PATCH")]
    return names, ".".join(said + patch) or "compiled before"


def build(name: str) -> None:
    """Compile a configuration, unless it was compiled.

    Raises
    ------
    RuntimeError
        If nvcc fails: the end of what it said.
    """
    path = _file(CONFIGS[name])
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_suffix(f".{os.getpid()}")
    command = ["nvcc", *_FLAGS, f"-I{_headers()}", f"-DCONFIG={CONFIGS[name]}", "-o", str(made), str(SOURCE)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"nvcc: {(ran.stderr or ran.stdout)[-300:]}")
    made.replace(path)


@functools.cache
def library(name: str) -> Any:
    """The library of a configuration.

    Raises
    ------
    RuntimeError
        If it was not compiled.
    """
    path = _file(CONFIGS[name])
    if not path.exists():
        raise RuntimeError("nvcc did not compile it, or not in time")
    ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)  # the library asks for its functions by name
    found = ctypes.CDLL(str(path))
    found.create.restype = ctypes.c_void_p
    found.create.argtypes = [
        ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int, *[ctypes.c_void_p] * 3,
        ctypes.POINTER(ctypes.c_int),
    ]  # fmt: skip
    found.run.argtypes = [ctypes.c_void_p] * 2
    found.destroy.argtypes = [ctypes.c_void_p]
    return found


class Product:
    """A call of ``a [rows, K]`` and ``b [groups, K, N]`` by one configuration, made outside of what is timed."""

    def __init__(self, name: str, a: torch.Tensor, b: torch.Tensor, given: list[int]) -> None:
        self._library, self._kept, status = library(name), (a, b), ctypes.c_int()
        self.out = a.new_empty(a.shape[0], b.shape[2])
        sizes = (ctypes.c_int * len(given))(*given)
        self._call = self._library.create(
            len(given), sizes, b.shape[2], b.shape[1], a.data_ptr(), b.data_ptr(), self.out.data_ptr(),
            ctypes.byref(status),
        )  # fmt: skip
        if not self._call:
            raise RuntimeError(f"CUTLASS refuses it: status {status.value}")

    def __call__(self) -> torch.Tensor:
        """The product, always in the same memory."""
        status = self._library.run(self._call, torch.cuda.current_stream().cuda_stream)
        if status:
            raise RuntimeError(f"CUTLASS: status {status}")
        return self.out

    def __del__(self) -> None:
        if getattr(self, "_call", None):
            self._library.destroy(self._call)
