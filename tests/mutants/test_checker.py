"""Every seeded bug is found, as what it is; counterexamples are the smallest there are."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import pytest

from mutants.checker import seeded_bugs
from tilestream_tools import verify
from tilestream_tools.verify.attention import AttentionCase
from tilestream_tools.verify.cluster import Cluster, ClusterCase
from tilestream_tools.verify.copies import CopyCase
from tilestream_tools.verify.gather import GatherCase
from tilestream_tools.verify.one_shot import OneShotCase
from tilestream_tools.verify.pair import PairCase
from tilestream_tools.verify.protocol import Ring
from tilestream_tools.verify.publish import PublishCase
from tilestream_tools.verify.replay import ReplayCase
from tilestream_tools.verify.report import explore
from tilestream_tools.verify.ring import RingCase
from tilestream_tools.verify.sums import SumCase

BUGS = {bug.name: bug for bug in seeded_bugs()}

#: Of some hundred thousand states.
LONG = ("not asked for expiry", "host waits for the side stream", "too far ahead", "two calls ahead, and one gives up")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in BUGS])
def test_bug_is_found_with_its_kind(name):
    bug = BUGS[name]
    result = bug.find()
    assert result.violation is not None, f"{bug.says} was not found in {len(bug.cases)} configurations"
    assert result.violation.kind == bug.kind, str(result.violation)
    assert result.violation.shortest or bug.model in ("gather", "sums", "replay", "experts")
    assert result.violation.configuration in map(str, bug.cases)


def test_smallest_failing_size_comes_first():
    bug = BUGS["pivot not in the signal"]
    failing = [str(case) for case in bug.cases if explore("workers", case).violation is not None]
    assert bug.find().violation.configuration == failing[0]


def test_shortest_counterexample_known_by_hand():
    # One worker, two tiles, two chunks, pivot 1: the first tile is tile 1, its signal that of tile 0. Nothing shorter
    # can do: the worker must poll, take and wait, and for that wait to end chunk 0 must arrive.
    case = next(
        c for c in BUGS["pivot not in the signal"].cases if c.schedule.grid.tiles == 2 and c.schedule.raster.first
    )
    violation = explore("workers", case).violation
    assert violation.trace == (
        "worker 0: poll() -> go on",
        "worker 0: take(queue 0) -> 0",
        "chunk 0 arrives",
        "worker 0: wait(chunk 0, for tile 1) -> arrived",
        "worker 0: compute(tile 1)",
    )
    assert violation.message == "worker 0 does tile 1 (rows 1, columns 0) before chunk 1"


def test_stream_k_owner_counterexample_by_hand():
    violation = BUGS["stream-K owner waits"].find().violation
    assert "running [0]" in violation.configuration, "the other contributor never runs"
    assert [line.split("(")[0] for line in violation.trace] == ["worker 0: take", "worker 0: compute", "worker 0: add"]
    # All running, it goes well: that bug is one of progress, not of arithmetic.
    all_running = [c for c in BUGS["stream-K owner waits"].cases if not c.running]
    assert all(explore("workers", case).violation is None for case in all_running)


def test_over_asked_too_early_needs_a_worker_that_works_on_after_the_expiry():
    # What makes it a bug lies between a worker's Poll and its Leave: nothing there may be taken for one step.
    violation = BUGS["over asked too early"].find().violation
    assert "2 workers" in violation.configuration
    told = [line for line in violation.trace if line.startswith(violation.message.split(" zeroes")[0])]
    assert [line.split(": ")[1].split("(")[0] for line in told] == ["take", "poll", "leave", "reset"]
    assert "the deadline expires" in "".join(violation.trace[violation.trace.index(told[1]) :])


def test_chunk_without_rows_forgotten_by_hand():
    violation = BUGS["chunk without rows forgotten"].find().violation
    assert violation.trace == (
        "worker 0: take(queue 0) -> 0",
        "worker 0: poll() -> go on",
        "chunk 1 arrives",
        "worker 0: wait(chunk 1, for tile 0) -> arrived",
        "worker 0: compute(tile 0)",
        "worker 0: take(queue 0) -> 1",
        "worker 0: leave() -> 0",
        "worker 0: poll() -> go on",
        "worker 0: reset(signals)",
    )
    assert violation.message == "worker 0 zeroes the signals; chunk 0 may yet come"


def test_poison_taken_for_a_number_needs_a_split_tile_and_an_expiry():
    violation = BUGS["poison taken for a number"].find().violation
    assert "part 0 of 2" in "".join(violation.trace)
    assert "the deadline expires" in "".join(violation.trace)
    assert violation.message.endswith("stores tile 0 as a number, with a poisoned part")


def test_waiting_in_a_circle_is_not_found_where_one_worker_is_alone():
    cases = BUGS["workers wait in a circle"].cases
    assert explore("workers", cases[0]).violation is None
    assert explore("workers", cases[2]).violation is not None


def test_depth_one_needs_its_own_form_and_only_depth_one():
    bug = BUGS["depth 1 in the deep form"]
    one_step = [c for c in bug.cases if c.k_counts == (1,)]
    assert all(explore("ring", case).violation is None for case in one_step), "with one K step the forms are the same"
    assert "2" in bug.find().violation.configuration


def test_handed_on_before_its_gate_needs_the_expiry():
    trace = "\n".join(BUGS["handed on before its gate"].find().violation.trace)
    assert trace.index("put(slot 0, item 0") < trace.index("-> the launch is over")


def test_each_bug_has_a_name_and_an_edit_of_its_own():
    bugs = seeded_bugs()
    assert len(BUGS) == len(bugs)
    assert [bug.name for bug in bugs if not bug.edits] == ["item of no K steps"], "there the configuration is wrong"
    assert all(bug.says.endswith(".") for bug in bugs)
    explored = [(bug.edits, bug.entries, bug.cases[0].build) for bug in bugs]
    assert len({repr(one) for one in explored}) == len(bugs)


def without(bug, case):
    """A case of a bug as it is with the real protocol."""
    if bug.model == "ring":
        ring = Ring(*(getattr(case.ring, name) for name in ("depth", "items", "consumers")))
        ring = replace(ring, promoted=case.ring.promoted or ring.depth == 1, strips=case.ring.strips)
        counts = tuple(k for k in case.k_counts if k) or (1,)
        return RingCase(ring, counts, split=case.split, expires=case.expires)
    if bug.model == "attention":
        return AttentionCase(case.ring, case.counts)
    if bug.model == "cluster":
        return ClusterCase(Cluster(*(getattr(case.cluster, field.name) for field in fields(Cluster))))
    if bug.model == "pair":
        return PairCase(Ring(case.ring.depth, case.ring.items, ctas=2), case.items)
    if bug.model == "workers":
        return replace(case, program=None)
    plain, texts = {
        "gather": (GatherCase(), ("begin", "publish", "side", "finish", "watch", "slots", "sets")),
        "sums": (SumCase(), ("begin", "produce", "scatter", "add_up", "watch")),
        "reduce": (OneShotCase(), ("begin", "reduce", "watch")),
        "publish": (PublishCase(1, 1, 1, 1, 1), ("text",)),
        "copies": (CopyCase(1, 1), ("text",)),
        "replay": (ReplayCase(), ("calling", "side", "prepare")),
    }[bug.model]
    return replace(case, **{name: getattr(plain, name) for name in texts})


def is_short(case):
    return case.world == 2 and case.epochs * (1 + len(case.expires)) < 4


def found_at(bug):
    return next(case for case in bug.cases if str(case) == bug.find().violation.configuration)


@pytest.mark.parametrize(
    ("model", "least", "chosen"),
    [
        ("ring", 8, lambda bug: [found_at(bug)]),
        ("workers", 3, lambda bug: [found_at(bug)] if bug.cases[0].fixup else []),
        ("attention", 4, lambda bug: bug.cases[:3]),
        ("gather", 8, lambda bug: [case for case in bug.cases[-1:] if is_short(case)]),
        ("sums", 8, lambda bug: bug.cases[-1:]),
        ("reduce", 4, lambda bug: [replace(bug.cases[0], epochs=min(bug.cases[0].epochs, 3))]),
        ("publish", 4, lambda bug: bug.cases),
        ("copies", 4, lambda bug: bug.cases),
        ("replay", 25, lambda bug: [case for case in bug.cases[-1:] if case.world == 2]),
        ("cluster", 25, lambda bug: bug.cases[:1]),
        ("pair", 10, lambda bug: bug.cases),
    ],
)
def test_the_real_protocol_passes_where_its_bugs_are_found(model, least, chosen):
    cases = [without(bug, case) for bug in BUGS.values() if bug.model == model for case in chosen(bug)]
    assert len(cases) >= least
    for case in dict.fromkeys(cases):
        assert explore(model, case).violation is None, str(case)


def test_every_model_has_its_seeded_bugs():
    least = {
        "attention": 25, "copies": 10, "gather": 25, "product": 4, "publish": 6, "reduce": 10, "ring": 40,
        "shared": 24, "sums": 9, "workers": 46, "replay": 31, "dispatch": 16,
        "experts": 20, "sources": 15, "cluster": 25, "pair": 10,
    }  # fmt: skip
    assert least.keys() == set(verify.MODELS)
    counts = Counter(bug.model for bug in BUGS.values())
    assert all(counts[model] >= count for model, count in least.items()), counts


def test_copiers_by_name_are_missed_only_where_they_never_run():
    for name in ("copiers by name", "pieces shared out beforehand"):
        assert "running [1]" in BUGS[name].find().violation.configuration


def test_a_tile_in_two_chunks_is_what_the_first_chunk_alone_forgets():
    violation = BUGS["rows of the next chunk not counted"].find().violation
    assert "2 rows in tiles of 2 and chunks of 1" in violation.configuration


def test_two_slots_suffice_while_no_rank_gives_up():
    # What the third slot is for: what is issued behind a kernel that expires. Without an expiry there is none.
    bug = BUGS["two slots and an expiry"]
    assert all(explore("gather", replace(case, expires=())).violation is None for case in bug.cases)
    assert "expires" in "".join(bug.find().violation.trace)


def test_one_set_of_signals_does_while_all_calls_are_alike():
    # A word is compared by >=, and of a rank that is a call ahead says more than was asked for.
    (case,) = BUGS["one set of signals"].cases[-1:]
    assert explore("gather", replace(case, world=2, epochs=4)).violation is None
    assert explore("gather", replace(case, epochs=1, chunks=(1,))).violation is None


def test_the_changelog_counts_them():
    assert f" {len(BUGS)} seeded bugs" in (Path(__file__).parents[2] / "CHANGELOG.md").read_text()
