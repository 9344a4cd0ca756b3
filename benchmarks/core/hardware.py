"""What devices can do at most, and the check that no figure is above it."""

from __future__ import annotations

import torch

from tilestream.plan import cpu_properties
from tilestream.plan.ask import device_properties

#: Dense bf16 of an H100 or H200, TFLOP/s, rounded up.
HOPPER_PEAK = 1000.0


def gpu_peak() -> float:
    """Dense bf16 of this GPU, TFLOP/s, or a little more."""
    if torch.version.hip is None:
        return HOPPER_PEAK
    device = device_properties("cuda")
    return device.peak("bfloat16", device.workers) / 1e12


def cpu_peak(dtype: str = "float32") -> float:
    """Of all cores, TFLOP/s."""
    device = cpu_properties()
    return device.peak(dtype, device.workers) / 1e12


def refuse_impossible(what: str, rates: dict[str, float], peak: float, unit: str = "TFLOP/s") -> None:
    """Raise if a rate is above ``peak``: then the answer or the timing is wrong."""
    for name, rate in rates.items():
        if rate > peak:
            raise AssertionError(
                f"{what}: {name} has {rate:.4g} {unit}, above the peak of {peak:.4g}: the answer or the timing is wrong"
            )
