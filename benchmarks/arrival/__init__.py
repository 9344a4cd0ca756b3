"""Inputs that arrive while the kernel runs: what waiting costs, what a signal announces, copies beside a matmul."""

from __future__ import annotations

from benchmarks.core.section import Section

SECTIONS = {
    "order": Section(
        "arrival.signals:order", "whether TMA reads what a signal announces, with and without the fence", 120,
        usual=True, nvidia="it looks at TMA, and at the fence before it",
    ),
    "polling": Section(
        "arrival.signals:polling", "the power and the time that waiting workers cost", 120, usual=True,
        nvidia="pauses and power are read as NVIDIA's driver has them",
    ),
    "stream": Section("arrival.stream:stream", "a matmul whose input is copied to the GPU while it runs", 300),
}  # fmt: skip
