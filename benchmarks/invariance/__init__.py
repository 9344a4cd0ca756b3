"""The same bits whatever the batch: what adds alike, and what the promise costs."""

from benchmarks.core.section import Section

SECTIONS = {
    "alike": Section("invariance.alike:alike", "every tile's bits beside every other's: what adds alike", 110, True),
    "_alike": Section("invariance.alike:share", tool=True),
}
