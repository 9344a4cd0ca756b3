"""Properties of the GPUs of this machine, as plans see them."""

from __future__ import annotations

import functools

import torch

from tilestream.plan.device import DeviceProperties
from tilestream.plan.known import made, published

#: Taken where the driver does not say.
_ASSUMED_KHZ = 1.8e6
_ASSUMED_BYTES = 2e12
_ASSUMED_SHARED = 64 * 1024


@functools.cache
def cuda_properties(index: int | None = None) -> DeviceProperties:
    """The GPU with this index (None: the current one). The first call starts CUDA."""
    if not torch.cuda.is_available():
        raise NotImplementedError("device='cuda': torch sees no GPU here; use device='cpu'")
    if index is None:
        return cuda_properties(torch.cuda.current_device())
    found = torch.cuda.get_device_properties(index)
    if torch.version.hip is None:
        arch, bytes_ = f"sm_{found.major}{found.minor}", getattr(found, "shared_memory_per_block_optin", 0)
    else:
        arch, bytes_ = found.gcnArchName.partition(":")[0], found.shared_memory_per_block
    hertz = 1e3 * (getattr(found, "clock_rate", 0) or _ASSUMED_KHZ)
    workers = found.multi_processor_count
    # Two transfers a clock, bits to bytes.
    bandwidth = 2e3 * getattr(found, "memory_clock_rate", 0) * getattr(found, "memory_bus_width", 0) / 8
    bandwidth = published(found.name, arch, workers) or bandwidth or _ASSUMED_BYTES
    return made(found.name, arch, workers, hertz, bandwidth, bytes_ or _ASSUMED_SHARED)


def allows_tf32() -> bool:
    """Whether torch's settings let a GPU round float32 operands of a matmul to tf32."""
    precision = torch.backends.cuda.matmul.fp32_precision
    return bool(precision == "tf32")
