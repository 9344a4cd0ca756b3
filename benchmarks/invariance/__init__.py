"""The same bits whatever the batch: what adds alike, and what the promise costs."""

from benchmarks.core.section import Section

SECTIONS = {
    "alike": Section("invariance.alike:alike", "every tile's bits beside every other's: what adds alike", 110, True),
    "cost": Section("invariance.cost:cost", "the promise's cost, beside cuBLAS and the peers that promise it", 90),
    "_cost": Section("invariance.cost:share", tool=True),
    "pairs": Section("invariance.pairs:pairs", "10,000 random pairs of calls that share rows, bit for bit", 110),
    "_pairs": Section("invariance.pairs:share", tool=True),
    "_alike": Section("invariance.alike:share", tool=True),
}
