"""Clocks, by the host and on the GPU; what a call costs the host; and peaks that no figure may be above.

Machines change speed from minute to minute: only ratios within one row can be compared.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from tilestream.plan import cpu_properties
from tilestream.plan.api import device_properties
from tilestream_tools.sweep.clock import Call, GpuClock, Timing, WallClock, host_microseconds, quartiles, torch
from tilestream_tools.sweep.run import StreamClock

__all__ = [
    "Call",
    "GpuClock",
    "HiddenLaunchClock",
    "Timing",
    "WallClock",
    "host_microseconds",
    "interleave",
    "quartiles",
    "torch",
]


def interleave(
    functions: dict[str, Call],
    *,
    rounds: int,
    warmup: int = 2,
    before: Callable[[str], Any] = lambda _: None,
    after: Callable[[str], Any] = lambda _: None,
) -> dict[str, list[float]]:
    """Seconds of each call by the host's clock; the functions take turns, so that a slow minute hits all of them.

    The order changes each round: OpenMP's threads spin for a while after a call, at the cost of the next one.
    ``before`` and ``after`` are given the function's name and are not timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    shuffle, names = random.Random(0).shuffle, list(functions)
    for number in range(-warmup, rounds):
        if number >= 0:
            shuffle(names)
        for name in names:
            before(name)
            begin = time.perf_counter()
            functions[name]()
            took = time.perf_counter() - begin
            after(name)
            if number >= 0:
                seconds[name].append(took)
    return seconds


def repeat(call: Call, many: int, synchronize: Call) -> None:
    """``call`` so many times, one behind the other, and the end of the GPU's work."""
    for _ in range(many):
        call()
    synchronize()


def as_called(
    functions: dict[str, Call], *, rounds: int, many: int, synchronize: Call = torch.cuda.synchronize
) -> dict[str, float]:
    """Milliseconds of a call as a program sees it: of one of ``many``, back to back, the host included; medians."""
    repeated = {name: lambda call=call: repeat(call, many, synchronize) for name, call in functions.items()}
    seconds = interleave(repeated, rounds=rounds, warmup=1, before=lambda _: synchronize())
    return {name: ms / many for name, ms in medians(seconds).items()}


def both_clocks(
    functions: dict[str, Call], clock: Any, *, rounds: int, many: int, waiting: Sequence[str] = ()
) -> dict[str, dict[str, float]]:
    """``ms``: as called; ``gpu_ms``: by ``clock``, the host ahead, of all but those ``waiting`` for the GPU."""
    ahead = {name: call for name, call in functions.items() if name not in waiting}
    return {
        "ms": as_called(functions, rounds=rounds, many=many, synchronize=clock.synchronize),
        "gpu_ms": medians(clock.interleave(ahead, rounds=rounds, warmup=2).seconds),
    }


def medians(seconds: dict[str, list[float]], digits: int | None = None) -> dict[str, float]:
    """Milliseconds."""
    found = {name: statistics.median(samples) * 1e3 for name, samples in seconds.items()}
    return found if digits is None else {name: round(ms, digits) for name, ms in found.items()}


class HiddenLaunchClock(StreamClock):
    """A clock for calls whose launch takes the host long."""

    SPIN_CYCLES = 1_000_000

    def milliseconds(self, functions: dict[str, Call], rounds: int = 11, warmup: int = 2) -> dict[str, float]:
        """The median of each."""
        return medians(self.interleave(functions, rounds=rounds, warmup=warmup).seconds)


def rates(operations: float, ms: dict[str, float]) -> dict[str, float]:
    return {name: round(operations / value * 1e-9, 1) for name, value in ms.items()}


def line(values: dict[str, Any], names: Sequence[str] = ()) -> str:
    return "  ".join(f"{name} {value}" for name, value in values.items() if not names or name in names)


# Peaks ----------------------------------------------------------------------------------------------------------------

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
