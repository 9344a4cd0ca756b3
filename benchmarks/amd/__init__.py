"""What is known of the kernels for AMD without a GPU, and the self-check for a machine with one."""

from __future__ import annotations

from benchmarks.core.section import Section

SECTIONS = {
    "table": Section("amd.table:main", "record: compile and count; render [--check]: docs/amd.md", tool=True),
    "selfcheck": Section("amd.selfcheck:main", "one report from a machine with a GPU, to send back", tool=True),
    "_answer": Section("amd.answers:main", tool=True),
}
