"""Properties of a device for plans: the number of its workers, and the rates that give the floor."""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import dataclass
from pathlib import Path

#: fp32 operations a cycle and core, with two FMA pipes, by the CPU's flags.
_FLOPS_PER_CYCLE = (("avx512f", 64), ("avx2", 32), ("avx", 16), ("asimd", 16))
#: The clock if the system reports none. It is high, since the floor is a lower bound.
_ASSUMED_HZ = 4.0e9
#: The memory bandwidth, which the system does not report. The plan calls it an assumption.
_ASSUMED_BYTES_PER_CORE = 12e9
_ASSUMED_BYTES = 400e9


@dataclass(frozen=True)
class DeviceProperties:
    """A device's properties, as plans use them."""

    name: str  # for people
    backend: str  # which backend of `tilestream.kernels` runs on it
    workers: int  # workers that run at the same time: cores of a CPU, SMs of a GPU
    flops: float  # peak fp32 operations a second of one worker (a multiply-add counts two)
    bandwidth: float  # bytes a second from memory, all workers together
    source: str  # where these figures come from
    arch: str = ""  # the architecture of a GPU's code: ``sm_90``, ``gfx942``
    shared: int = 0  # bytes of shared memory that one worker can have
    #: Peak operations a second of one worker's matrix units, by kind of input; ``flops`` for other kinds.
    tensor: tuple[tuple[str, float], ...] = ()
    clock: float = 0.0  # cycles a second of the peaks; 0: unknown
    #: Cycles a second while the matrix units are busy, by kind of input, if published.
    sustained: tuple[tuple[str, float], ...] = ()
    xcds: int = 1  # dies with an L2 each; the hardware assigns programs to them in turn
    #: Parts of the device to which work groups are assigned in turn. A work group that waits for its part stays there.
    shader_engines: int = 0
    #: l2, l2_bandwidth: bytes of one L2, and bytes a second from one L2 to its workers; 0: unknown.
    l2: int = 0
    l2_bandwidth: float = 0.0
    cache_bandwidth: float = 0.0  # bytes a second from a cache that all L2 share; 0: there is none

    def peak(self, dtype: str, workers: int) -> float:
        """Peak operations a second of ``workers`` workers.

        ``dtype`` is a dtype's name, or ``"tf32"``. On a CPU 16-bit inputs are multiplied at fp32's rate.
        """
        rate = dict(self.tensor).get(dtype, self.flops)
        return rate * workers * (0.5 if dtype == "float64" else 1.0)


@functools.cache
def cpu_properties() -> DeviceProperties:
    """The CPU of this machine.

    The cores are those that this process may use. The peaks are nominal: from the flags and the clock that the system
    reports.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    info = _cpuinfo()
    flags = f"{info.get('flags', '')} {info.get('Features', '')}".split()
    isa, per_cycle = next(((isa, n) for isa, n in _FLOPS_PER_CYCLE if isa in flags), ("scalar", 8))
    hertz = max(_clock(info), _ASSUMED_HZ)
    return DeviceProperties(
        name=info.get("model name", platform.processor() or platform.machine()),
        backend="cpu",
        workers=cores,
        flops=per_cycle * hertz,
        bandwidth=min(_ASSUMED_BYTES_PER_CORE * cores, _ASSUMED_BYTES),
        source=f"nominal: {isa}, {per_cycle} fp32 operations a cycle at {hertz / 1e9:.1f} GHz; bandwidth assumed",
    )


def _cpuinfo() -> dict[str, str]:
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _clock(info: dict[str, str]) -> float:
    try:
        kilohertz = int(Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        try:
            return float(info.get("cpu MHz", "0")) * 1e6
        except ValueError:
            return 0.0
    return kilohertz * 1e3
