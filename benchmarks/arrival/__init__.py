"""Inputs that arrive while the kernel runs: what waiting costs, what a signal announces, copies beside a matmul."""

from __future__ import annotations

from functools import partial

from benchmarks.core.section import Section

_signals = partial(Section, seconds=120, usual=True, nvidia="TMA and its fence; power as NVIDIA's driver has it")
SECTIONS = {
    "order": _signals("arrival.signals:order", "whether TMA reads what a signal announces, with and without the fence"),
    "polling": _signals("arrival.signals:polling", "the power and the time that waiting workers cost"),
    "host_to_device": Section(
        "arrival.host_to_device:host_to_device",
        "a pinned tensor and its matmul beside the same by hand, two clocks",
        120,
    ),
    "experts": Section("arrival.experts:experts", "experts in pinned memory, beside a copy and a matmul by hand", 90),
    "chunk_cost": Section(
        "arrival.host_to_device:chunk_cost", "what a chunk costs the link, by what stands between two copies", 20
    ),
    "captured_timeline": Section(
        "arrival.timeline:captured_timeline",
        "copies and tiles of a replay on one time axis",
        30,
        nvidia="a picture of the Hopper kernel",
    ),
    "stream": Section("arrival.stream:stream", "a matmul whose input is copied to the GPU while it runs", 300),
}
