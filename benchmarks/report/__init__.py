"""Pages and pictures made from the records: docs/performance, docs/scheduling, the support matrix, the faults."""

from __future__ import annotations

from benchmarks.core.section import Section

SECTIONS = {
    "pages": Section("report.pages:main", "docs/performance, and its plots; --check", tool=True),
    "support": Section("report.support:main", "docs/support.md; --check", tool=True),
    "pictures": Section("report.plots:main", "every picture of the documentation", tool=True),
    "faults": Section("report.faults:main", "docs/faults.md; --check", tool=True),
    "schedule_pictures": Section("report.schedule_pictures:main", "the pictures of docs/scheduling.md", tool=True),
}
