"""Clock and checks of the GPU benchmarks: those of `tilestream.sweep`."""

from tilestream.sweep.check import Check, poison, sampled_rows
from tilestream.sweep.clock import Call, GpuClock, Timing, WallClock, quartiles, torch

__all__ = ["Call", "Check", "GpuClock", "Timing", "WallClock", "poison", "quartiles", "sampled_rows", "torch"]
