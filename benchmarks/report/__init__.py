"""The pages and pictures of docs/performance and docs/scheduling, made from the records."""

from __future__ import annotations

from benchmarks.core.section import Section

SECTIONS = {
    "pages": Section("report.pages:main", "docs/performance, and its plots; --check", tool=True),
    "support": Section("report.support:main", "docs/support.md; --check", tool=True),
    "pictures": Section("report.plots:main", "every picture of the documentation", tool=True),
    "schedule_pictures": Section("report.schedule_pictures:main", "the pictures of docs/scheduling.md", tool=True),
}
