"""The extension of `csrc/`: its path, whether it can be used, and its driver.

It needs no CUDA to build and is optional. `tilestream.launch.native` launches kernels by it, and
`tilestream.runtime.sequence` issues copies and signals. Without it both take the Python path.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import torch

from tilestream.runtime.driver.hip import library as hip_library

#: 0: the extension is not used. Any other value: its path.
ENVIRONMENT = "TILESTREAM_NATIVE"
#: 1: the extension is used on AMD GPUs, too.
HIP_ENVIRONMENT = "TILESTREAM_NATIVE_HIP"
LIBRARY = "libtilestream_native.so"
#: Where `make native` and the wheel put it: beside the package's own files.
FOLDER = Path(__file__).resolve().parents[1] / "_native"


def find() -> tuple[Path, str, str] | str:
    """The paths of the extension, of the driver and of torch's GPU library; or why the extension cannot be used."""
    asked = os.environ.get(ENVIRONMENT, "")
    if asked == "0":
        return f"{ENVIRONMENT}=0"
    hip = torch.version.hip is not None
    if hip and os.environ.get(HIP_ENVIRONMENT) != "1":
        return f"it has not run on an AMD GPU yet: {HIP_ENVIRONMENT}=1 switches it on"
    path = Path(asked) if asked else FOLDER / LIBRARY
    if not path.exists():
        return f"{path} is not there: `python -m tilestream_tools.native_build` builds it, with a C++ compiler"
    torch_library = Path(torch.__file__).parent / "lib" / f"libtorch_{'hip' if hip else 'cuda'}.so"
    if not torch_library.exists():
        return "this torch is built without CUDA"
    return path, hip_library() if hip else "libcuda.so.1", str(torch_library)


@functools.lru_cache(maxsize=1)  # a second open would look the driver up again while another thread uses it
def open_library(path: Path, driver: str, torch_library: str) -> ctypes.CDLL:
    """Load the extension with its ops, and look its driver's functions up. Makes no CUDA context.

    Raises
    ------
    OSError
        If it cannot be loaded, or the driver lacks a function.
    """
    torch.ops.load_library(str(path))
    found = ctypes.CDLL(str(path))
    found.tilestream_open.restype = ctypes.c_char_p
    why = found.tilestream_open(driver.encode(), torch_library.encode())
    if why is not None:
        raise OSError(why.decode())
    return found


@functools.cache
def library() -> ctypes.CDLL | None:
    """The extension; None if it is missing or cannot be used."""
    found = find()
    try:
        return None if isinstance(found, str) else open_library(*found)
    except (OSError, RuntimeError):  # `tilestream.launch.native.why_not` says which
        return None


def made(found: ctypes.CDLL, function: str, integers: list[int]) -> int:
    """The handle of what a function of the extension makes of integers. The caller frees it.

    Raises
    ------
    ValueError
        If the extension refuses the integers.
    """
    make = getattr(found, function)
    make.restype, why = ctypes.c_void_p, ctypes.c_char_p()
    handle: int | None = make((ctypes.c_int64 * len(integers))(*integers), len(integers), ctypes.byref(why))
    if handle is None:
        raise ValueError((why.value or b"").decode())
    return handle
