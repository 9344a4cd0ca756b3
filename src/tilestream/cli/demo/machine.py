"""The machine, as far as the demonstration and the doctor must know it."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def available_memory() -> int | None:
    """Bytes that can still be allocated; None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def load_average() -> float | None:
    """Processes that wanted a core in the last minute, on average; None where the system does not say."""
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return None


def free_device_memory() -> int:
    """Bytes of the current GPU's memory that nobody has taken."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    return int(free)


def versions(*, gpu: bool = False) -> dict[str, str]:
    """Versions that a figure depends on; ``gpu``: also those of what makes and runs kernels."""
    import torch

    from tilestream._version import __version__

    found = {"tilestream": __version__, "python": platform.python_version(), "torch": torch.__version__}
    if gpu:
        import triton

        found["triton"] = triton.__version__
        for name in ("cuda", "hip"):
            if version := getattr(torch.version, name):
                found[name] = version
    return found
