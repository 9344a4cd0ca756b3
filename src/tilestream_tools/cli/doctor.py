"""``tilestream doctor``: versions and hardware found, backends that can run, kernels that are warm, missing extras.

It runs after a plain install, too: neither typer nor rich is imported here.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tilestream._version import __version__
from tilestream.plan.experimental import opt_in
from tilestream_tools.units import size

#: Extras of the package, and what each is for.
EXTRAS = (
    ("cli", ("typer", "rich", "safetensors", "numpy"), "the command line, and reading .npy files"),
    ("plot", ("matplotlib",), "the timeline as a picture"),
)
#: Backends in the order in which they are preferred, with the package of `tilestream.kernels` that is one.
BACKENDS = ("hopper", "cdna", "portable", "cpu")


def doctor(as_json: bool = False) -> None:
    """Print versions, this machine, the backends that can run, and the extras: what a bug report should hold."""
    if as_json:
        print(json.dumps({title: dict(rows) for title, rows in sections()}))
        return
    for title, rows in sections():
        print(title)
        for name, value in rows:
            print(f"  {name:<13}{value}")


def sections() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """What `doctor` prints: titles, and under each names and values."""
    import torch

    yield (
        "versions",
        [
            ("tilestream", __version__),
            ("python", f"{platform.python_version()} ({platform.python_implementation()})"),
            ("torch", f"{torch.__version__}, {_build()}"),
            ("triton", _version("triton") or "not installed"),
        ],
    )
    from tilestream.plan import cpu_properties

    cpu = cpu_properties()
    yield (
        "machine",
        [
            ("system", platform.platform()),
            ("cpu", f"{cpu.name}, {cpu.workers} cores for this process ({torch.backends.cpu.get_cpu_capability()})"),
            ("threads", f"torch uses {torch.get_num_threads()}: as many as one operation gets"),
            ("memory", _memory()),
            ("gpu", _gpu()),
            ("files", _files()),
        ],
    )
    yield "backends", [(name, backend(name)) for name in BACKENDS]
    yield "host", [("native calls", _native())]
    yield "kernels", list(_kernels())
    yield "extras", [(name, _extra(needs, use)) for name, needs, use in EXTRAS]


def _native() -> str:
    """Whether equal calls are launched natively, and if not, why not."""
    if importlib.util.find_spec("triton") is None:
        return "no: triton is not installed"
    import torch

    from tilestream.launch.native import why_not

    why = why_not() if torch.cuda.is_available() else "torch sees no GPU, and calls on a CPU have no use for them"
    return f"no: {why}" if why else "yes"


def _kernels() -> Iterator[tuple[str, str]]:
    """What is warm: where Triton's cache is, and this package's kernels in it, by what they were compiled for."""
    if importlib.util.find_spec("triton") is None:
        yield "warm", "nothing: triton is not installed"
        return
    from tilestream_tools.warm import kernel_cache

    yield "cache", str(kernel_cache.folder())
    kinds: dict[tuple[str, str], list[kernel_cache.CachedKernel]] = {}
    for kernel in kernel_cache.kernels():
        kinds.setdefault((kernel.arch, kernel.triton), []).append(kernel)
    here = _version("triton")
    for (arch, triton), found in sorted(kinds.items()):
        names = Counter(kernel.name for kernel in found)
        said = ", ".join(f"{count} {name}" for name, count in sorted(names.items()))
        other = "" if triton == here else ", which is not installed"
        yield arch, f"{said}: {size(sum(kernel.size for kernel in found))}, of Triton {triton}{other}"
    if not kinds:
        yield "warm", "nothing: a first call compiles, or `tilestream warm` does"
    yield "not warmed", "ragged or published chunks, copies by the kernel: their first calls compile"


def backend(name: str) -> str:
    """Whether the backend ``name`` can run here, and if not, why not."""
    if importlib.util.find_spec(f"tilestream.kernels.{name}") is None:
        return f"no: not in tilestream {__version__}"
    if name == "cpu":
        return "yes: worker threads over torch.mm"
    import torch

    if not torch.cuda.is_available():
        return "no: torch sees no GPU"
    if importlib.util.find_spec("triton") is None:
        return "no: triton is not installed"
    if name == "portable":
        on_amd = "yes: compiled and checked; run on other GPUs, never on an AMD one; docs/amd.md"
        return "yes" if torch.version.hip is None else on_amd
    properties = torch.cuda.get_device_properties(0)
    if name == "cdna":
        architecture = str(getattr(properties, "gcnArchName", "")).split(":")[0]
        fits, what = torch.version.hip is not None and architecture in ("gfx942", "gfx950"), "CDNA 3 or 4"
    else:
        fits, what = torch.version.hip is None and properties.major == 9, "Hopper"
    if not fits:
        return f"no: {properties.name} is no {what}"
    why = opt_in(name)
    return f"yes: {why}" if why else "yes"


def _build() -> str:
    import torch

    builds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    kind = next((f"{name} {version}" for name, version in builds.items() if version is not None), "CPU build")
    backends = {"MKL": torch.backends.mkl, "oneDNN": torch.backends.mkldnn}
    libraries = [name for name, library in backends.items() if library.is_available()]
    return f"{kind}, {' and '.join(libraries) or 'neither MKL nor oneDNN'}"


def _gpu() -> str:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ", ".join(map(torch.cuda.get_device_name, range(count))) or "none"


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


def _memory() -> str:
    here = available_memory()
    return "unknown" if here is None else f"{size(here)} available"


def _files() -> str:
    direct = "O_DIRECT" if hasattr(os, "O_DIRECT") else "no O_DIRECT, so reads go through the page cache"
    cold = "can be read cold" if hasattr(os, "posix_fadvise") else "cannot be made cold (no posix_fadvise)"
    return f"{direct}; {cold}"


def _extra(needs: tuple[str, ...], use: str) -> str:
    found = [(name, _version(name)) for name in needs]
    here = ", ".join(f"{name} {version}" for name, version in found if version)
    missing = ", ".join(name for name, version in found if not version)
    return f"missing {missing}, for {use}" if missing else f"{here}: {use}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
