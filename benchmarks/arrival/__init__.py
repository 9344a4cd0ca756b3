"""Inputs that arrive while the kernel runs: what waiting costs, what a signal announces, copies beside a matmul."""

from __future__ import annotations

from functools import partial

from benchmarks.core.section import Section

_signals = partial(Section, seconds=120, usual=True, nvidia="TMA and its fence; power as NVIDIA's driver has it")
SECTIONS = {
    "order": _signals("arrival.signals:order", "whether TMA reads what a signal announces, with and without the fence"),
    "polling": _signals("arrival.signals:polling", "the power and the time that waiting workers cost"),
    "stream": Section("arrival.stream:stream", "a matmul whose input is copied to the GPU while it runs", 300),
}
