"""GPUs by name, for plans without the device and for figures that drivers do not report.

Sources: NVIDIA's data sheets of A100, L40S, H100, H200, HGX B200 and HGX B300, of Jetson AGX Thor (T5000), its white
papers of Ada and of RTX Blackwell (RTX 4090, RTX 5090), and the CUDA programming guide (shared memory by compute
capability); AMD's data sheets of MI300X, MI325X, MI350X and MI355X, and its white papers of CDNA 3 and CDNA 4 (dies,
L2, Infinity Cache). Operations a cycle times compute units times the clock give the data sheets' peaks: MI300X
304 x 2048 x 2.1 GHz = 1.307e15 of bfloat16, MI355X 256 x 4096 x 2.4 GHz = 2.517e15. NVIDIA publishes no clock of B200
and B300: theirs is the one that gives the published 2.25e15 of bfloat16 with the 148 SMs that the driver reports.

The clock of an AMD GPU falls by up to half while its matrix units are busy: AMD publishes it beside its own libraries'
"max-achievable" rates (ROCm blogs, *Measuring Max-Achievable FLOPs, part 2*, 2025: hipBLASLt on normally distributed
inputs; MI300X, MI325X). Of MI355X and MI350X it publishes none, and the clock here is the one that makes the model's
rate a published one: of MI355X AMD's 1489 TFLOP/s of float16 with the matrix units busy 98.75 % of the main loop
(*From Naive to Near-Peak: Building High-Performance GEMM Kernels with Gluon*, 2026), of MI350X AITER's 1188 of bfloat16
(HipKittens, ``analysis/mi350x_data_to_log.json``, 8192^3).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from tilestream.core.device import DeviceProperties

#: Dense operations a cycle of one SM or CU, accumulated in float32, from the vendors' data sheets: fp32, 16-bit, tf32,
#: 8-bit. A GeForce's matrix units accumulate in float32 at half the rate: see `rates`.
PER_CYCLE = {
    "sm_80": (128, 2048, 1024, 2048),
    "sm_86": (256, 1024, 512, 1024),
    "sm_89": (256, 1024, 512, 2048),
    "sm_90": (256, 4096, 2048, 8192),
    "sm_100": (256, 8192, 4096, 16384),
    "sm_103": (256, 8192, 4096, 16384),
    "sm_110": (256, 8192, 4096, 16384),
    "sm_120": (256, 1024, 512, 2048),
    "gfx942": (256, 2048, 1024, 4096),
    "gfx950": (256, 4096, 256, 8192),
}
#: For GPUs without a known data sheet.
_ASSUMED = (128, 512, 256, 512)


class Dies(NamedTuple):
    """A die of an AMD GPU: active compute units, shader engines, bytes of its L2 and bytes a cycle from it.

    ``cache`` is the peak bandwidth of the Infinity Cache, in bytes a second.
    """

    workers: int
    shader_engines: int
    l2: int
    l2_bytes: int
    cache: float


DIES = {
    "gfx942": Dies(38, 4, 4 << 20, 2048, 17.2e12),
    "gfx950": Dies(32, 4, 4 << 20, 2048, 17.2e12),
}


class GpuSpec(NamedTuple):
    """A GPU by its data sheet; see `DeviceProperties`."""

    name: str
    arch: str
    workers: int
    hertz: float
    bandwidth: float
    shared: int
    sustained: tuple[tuple[str, float], ...] = ()
    l2: int = 0  # bytes of an NVIDIA GPU's L2, if published; `DIES` has AMD's


def _busy(float16: float, bfloat16: float, fp8: float) -> tuple[tuple[str, float], ...]:
    return (("float16", float16), ("bfloat16", bfloat16), ("fp8", fp8))


GPU_SPECS = {
    "a100": GpuSpec("NVIDIA A100 SXM 80GB", "sm_80", 108, 1.41e9, 2.039e12, 166912, l2=40 << 20),
    "l40s": GpuSpec("NVIDIA L40S", "sm_89", 142, 2.52e9, 864e9, 101376),
    "rtx4090": GpuSpec("NVIDIA GeForce RTX 4090", "sm_89", 128, 2.52e9, 1.008e12, 101376, l2=72 << 20),
    "h100": GpuSpec("NVIDIA H100 SXM", "sm_90", 132, 1.83e9, 3.35e12, 232448),
    "h200": GpuSpec("NVIDIA H200 SXM", "sm_90", 132, 1.83e9, 4.8e12, 232448),
    "b200": GpuSpec("NVIDIA B200", "sm_100", 148, 1.856e9, 8.0e12, 232448),
    "b300": GpuSpec("NVIDIA B300", "sm_103", 148, 1.856e9, 8.0e12, 232448),
    "thor": GpuSpec("NVIDIA Thor", "sm_110", 20, 1.575e9, 273e9, 232448, l2=32 << 20),
    "rtx5090": GpuSpec("NVIDIA GeForce RTX 5090", "sm_120", 170, 2.407e9, 1.792e12, 101376, l2=96 << 20),
    "mi300x": GpuSpec("AMD Instinct MI300X", "gfx942", 304, 2.1e9, 5.3e12, 65536, _busy(1.115e9, 1.207e9, 1.230e9)),
    "mi325x": GpuSpec("AMD Instinct MI325X", "gfx942", 304, 2.1e9, 6.0e12, 65536, _busy(1.354e9, 1.447e9, 1.464e9)),
    "mi350x": GpuSpec("AMD Instinct MI350X", "gfx950", 256, 2.2e9, 8.0e12, 163840, _busy(1.23e9, 1.23e9, 1.23e9)),
    "mi355x": GpuSpec("AMD Instinct MI355X", "gfx950", 256, 2.4e9, 8.0e12, 163840, _busy(1.6e9, 1.6e9, 1.6e9)),
}


def rates(name: str, arch: str, hertz: float) -> tuple[float, tuple[tuple[str, float], ...]]:
    """Peak operations a second of one worker: fp32, and the matrix units by kind of input."""
    flops, *matrix = (n * hertz for n in PER_CYCLE.get(arch, _ASSUMED))
    half, tf32, fp8 = (rate / 2 if "geforce" in name.lower() else rate for rate in matrix)
    return flops, (("float16", half), ("bfloat16", half), ("tf32", tf32), ("fp8", fp8))


@functools.lru_cache(maxsize=64)
def named(name: str) -> DeviceProperties | None:
    """The properties of the GPU of this name (``"mi300x"``, ``"H100"``); None if it is not in `GPU_SPECS`."""
    known = GPU_SPECS.get(name.lower())
    return None if known is None else gpu_properties(*known[:7])


def published_bandwidth(name: str, arch: str, workers: int) -> float:
    """Bytes a second from the memory of an AMD GPU, by its name; 0: unknown.

    MI300's driver reports the memory controller's clock, a quarter of the pins' rate.
    """
    known = _alike(name, arch)[:1] if arch in DIES else []
    return sum(one.bandwidth * workers / one.workers for one in known)


def _alike(name: str, arch: str) -> list[GpuSpec]:
    """The GPUs of this arch whose names occur in ``name``."""
    plain = name.lower().replace(" ", "")
    return [known for key, known in GPU_SPECS.items() if known.arch == arch and key in plain]


def gpu_properties(
    name: str, arch: str, workers: int, hertz: float, bandwidth: float, shared: int,
    sustained: tuple[tuple[str, float], ...] | None = None,
) -> DeviceProperties:  # fmt: skip
    """A GPU's properties from the figures of its driver, or of its data sheet.

    ``sustained`` None: the published clocks of the GPU of `GPU_SPECS` whose name occurs in ``name``, or of its arch.
    """
    flops, tensor = rates(name, arch, hertz)
    dies = DIES.get(arch)
    if sustained is None:
        alike = _alike(name, arch) or [known for known in GPU_SPECS.values() if known.arch == arch]
        sustained = alike[0].sustained if alike else ()
    # A GPU may be partitioned into fewer dies, or sold with fewer.
    xcds = max(1, round(workers / dies.workers)) if dies else 1
    return DeviceProperties(
        name=name,
        backend="portable",
        workers=workers,
        flops=flops,
        bandwidth=bandwidth,
        source=(
            f"{arch}, one worker {'a CU' if dies else 'an SM'}; nominal: data sheet's operations a cycle at "
            f"{hertz / 1e9:.2f} GHz"
        ),
        arch=arch,
        shared=shared,
        tensor=tensor,
        clock=hertz,
        sustained=sustained,
        xcds=xcds,
        shader_engines=dies.shader_engines * xcds if dies else 0,
        l2=dies.l2 if dies else max((known.l2 for known in _alike(name, arch)), default=0),
        l2_bandwidth=dies.l2_bytes * hertz if dies else 0.0,
        cache_bandwidth=dies.cache * xcds / 8 if dies else 0.0,
    )
