"""A server of vLLM or SGLang with its own attention, and with this library's plugin: answers compared, and timed."""

from __future__ import annotations

from benchmarks.core.section import Section

SECTIONS = {
    "vllm": Section("serving.servers:vllm", "vLLM: its own attention, ours, and our linear layers", 600, tool=True),
    "sglang": Section("serving.servers:sglang", "SGLang: its own prefill, and ours", 600, tool=True),
}
