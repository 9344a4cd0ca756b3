"""Properties of this machine's GPUs, for plans."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from tilestream.core.device import DeviceProperties
from tilestream.core.gpu_specs import gpu_properties, published_bandwidth
from tilestream.runtime.driver import context_id, context_sms

#: Defaults for what the driver does not report.
_ASSUMED_KHZ = 1.8e6
_ASSUMED_BYTES = 2e12
_ASSUMED_SHARED = 64 * 1024


#: The SMs of a context of a device, by the context's number, which the driver does not use again.
_units: dict[tuple[int, int], int] = {}


def cuda_properties(index: int | None = None) -> DeviceProperties:
    """The GPU with this index (None: the current one). The first call initialises CUDA.

    The number of SMs is that of the current context: a green context has a part of them.
    """
    if not torch.cuda.is_available():
        raise NotImplementedError(
            "device='cuda': torch sees no GPU here; name the GPU to plan or compile for, such as 'h100', or use 'cpu'"
        )
    if index is None:
        index = torch.cuda.current_device()
    return _restricted(index, context_units(index))


def context_units(index: int) -> int:
    """The number of SMs of the current context; 0 if it has all of this GPU. Read once a context."""
    number = context_id()
    if not number:
        return 0
    found = _units.get((index, number))
    if found is None:
        # The current context is one of the current device. Torch's contexts of other devices have all SMs.
        sms = context_sms() if index == torch.cuda.current_device() else 0
        found = _units[index, number] = sms if sms < _device(index).workers else 0
    return found


@functools.cache
def _restricted(index: int, units: int) -> DeviceProperties:
    whole = _device(index)
    if not units:
        return whole
    return replace(whole, workers=units, source=f"{whole.source}; this context has {units} of {whole.workers}")


@functools.cache
def _device(index: int) -> DeviceProperties:
    """The GPU with all its SMs."""
    found = torch.cuda.get_device_properties(index)
    if torch.version.hip is None:
        arch, bytes_ = f"sm_{found.major}{found.minor}", getattr(found, "shared_memory_per_block_optin", 0)
    else:
        arch, bytes_ = found.gcnArchName.partition(":")[0], found.shared_memory_per_block
    hertz = 1e3 * (getattr(found, "clock_rate", 0) or _ASSUMED_KHZ)
    workers = found.multi_processor_count
    # Two transfers a clock; bits to bytes.
    bandwidth = 2e3 * getattr(found, "memory_clock_rate", 0) * getattr(found, "memory_bus_width", 0) / 8
    bandwidth = published_bandwidth(found.name, arch, workers) or bandwidth or _ASSUMED_BYTES
    return gpu_properties(found.name, arch, workers, hertz, bandwidth, bytes_ or _ASSUMED_SHARED)


def allows_tf32() -> bool:
    """Whether torch's settings let a GPU round float32 operands of a matmul to tf32."""
    precision = torch.backends.cuda.matmul.fp32_precision
    return bool(precision == "tf32")
