"""Timing side by side: interleaved rounds, medians, answers checked in the same run, impossible figures refused, JSON.

Machines change speed from minute to minute, so only ratios inside one row mean anything; absolute times stand beside
the device's name.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tilestream as ts
from benchmarks.core.paths import RESULTS
from tilestream.plan import cpu_properties
from tilestream.plan.ask import device_properties
from tilestream.sweep.check import errors as errors

#: Dense bf16 of an H100 or H200, TFLOP/s, rounded up: see `gpu_peak`.
GPU_PEAK = 1000.0


def interleave(
    functions: dict[str, Callable[[], Any]],
    *,
    rounds: int,
    warmup: int = 2,
    before: Callable[[str], Any] = lambda _: None,
    after: Callable[[str], Any] = lambda _: None,
) -> dict[str, list[float]]:
    """Seconds of each call, the functions taken in turn, so that a slow minute hits all of them.

    In another order each round: OpenMP's threads spin for a while after a call that used them, at the cost of whoever
    comes next. ``before`` and ``after`` are given the function's name, and cost nothing.
    """
    for name, function in functions.items():
        for _ in range(warmup):
            before(name)
            function()
            after(name)
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    shuffle = random.Random(0).shuffle
    names = list(functions)
    for _ in range(rounds):
        shuffle(names)
        for name in names:
            function = functions[name]
            before(name)
            begin = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - begin)
            after(name)
    return seconds


def medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Milliseconds."""
    return {name: statistics.median(samples) * 1e3 for name, samples in seconds.items()}


def refuse_impossible(name: str, operations: int, milliseconds: float, dtype: str = "float32") -> None:
    """Raise if a figure is above the device's peak: then the answer or the timing is wrong."""
    device = cpu_properties()
    rate, peak = operations / milliseconds * 1e3, device.peak(dtype, device.workers)
    if rate > peak:
        raise AssertionError(f"{name}: {rate / 1e9:.0f} GFLOP/s, above the peak of {peak / 1e9:.0f}")


def record(name: str, rows: list[dict[str, Any]], **extra: Any) -> Path:
    """Write ``results/<name>.json``: what ran where, and the rows."""
    device = cpu_properties()
    data = {
        "name": name,
        "device": device.name,
        "cores": device.workers,
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tilestream": ts.__version__,
        "commit": _git("rev-parse", "--short", "HEAD") + ("+changes" if _git("status", "--porcelain", "src") else ""),
        "date": time.strftime("%Y-%m-%d"),
        **extra,
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return path


def gpu_peak() -> float:
    """Dense bf16 of this GPU, TFLOP/s, no less: a figure above it is an error."""
    if torch.version.hip is None:
        return GPU_PEAK
    device = device_properties("cuda")
    return device.peak("bfloat16", device.workers) / 1e12


def gpu_about(name: str) -> dict[str, Any]:
    """What ran where. COMMIT names the commit where the tree is a copy without its history."""
    try:
        import triton
    except ImportError:  # a dry run where there is none
        triton = None

    return {
        "name": name,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__ if triton else "none",
        "tilestream": ts.__version__,
        "commit": os.environ.get("COMMIT") or _git("rev-parse", "--short", "HEAD"),
        "date": time.strftime("%Y-%m-%d"),
        "dtype": "bfloat16",
    }


def gpu_record(name: str, rows: list[dict[str, Any]], path: Path | None = None, **extra: Any) -> Path:
    """`record` for a GPU."""
    path = path or RESULTS / f"{name}.json"
    path.write_text(json.dumps({**gpu_about(name), **extra, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return path


def device_suffix(device: str) -> str:
    """What a record's name ends with, so that those of several GPUs stand side by side: nothing for an H100."""
    return "" if "H100" in device else "_h200" if "H200" in device else "_" + "_".join(device.lower().split())


class GpuRecord:
    """A record that is written anew with each row, so that what a killed run has measured is there."""

    def __init__(self, name: str, folder: Path, **extra: Any) -> None:
        about = gpu_about(name)
        self.path = folder / f"{name}{device_suffix(about['device'])}.json"
        self.data: dict[str, Any] = {**about, **extra, "failures": [], "missing": [], "rows": []}
        folder.mkdir(parents=True, exist_ok=True)
        self.write()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows so far."""
        rows: list[dict[str, Any]] = self.data["rows"]
        return rows

    def write(self) -> None:
        """Whole or not at all. A row a line."""
        lines = ",\n".join(f"  {json.dumps(row)}" for row in self.rows)
        head = json.dumps({key: value for key, value in self.data.items() if key != "rows"}, indent=1)
        text = f'{head[:-2]},\n "rows": [\n{lines}\n ]\n}}\n'
        new = self.path.with_suffix(".tmp")
        new.write_text(text, encoding="utf-8")
        new.replace(self.path)


def _git(*arguments: str) -> str:
    try:
        run = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    except OSError:  # a machine without git
        return ""
    return run.stdout.strip()
