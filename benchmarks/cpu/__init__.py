"""The CPU backend, and what a process's first call does before a GPU has anything to do."""

from __future__ import annotations

from benchmarks.core.section import Section

SECTIONS = {
    "matmul": Section(
        "cpu.matmul:matmul", "everything arrived, beside torch.mm on as many threads", usual=True, gpus=0
    ),
    "calls": Section("cpu.calls:calls", "small products beside torch's own", usual=True, gpus=0),
    "calls_attention": Section("cpu.calls:attention", "attention beside torch's own", usual=True, gpus=0),
    "stream": Section("cpu.stream:stream", "input read cold from disk while it is multiplied", usual=True, gpus=0),
    "first_call": Section("cpu.first_call:first_call", "a first call, taken apart in fresh processes", gpus=0),
    "planning": Section("cpu.planning:planning", "plans of new shapes for an H100, without it", gpus=0),
    "_process": Section("cpu.first_call:process", tool=True),
}
