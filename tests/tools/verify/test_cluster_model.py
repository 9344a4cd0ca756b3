"""CTAs that add up a tile in each other's shared memory: the right protocol passes, and what the model means by it.

The seeded bugs are in `tests/mutants/tables/clusters.txt`.
"""

from __future__ import annotations

import pytest
from exploring import explored, kind_of

from mutants.checker import seeded_bugs
from mutants.engine import at, mutated, replace
from tilestream.core.exchange import CLUSTERS
from tilestream_tools.verify import configurations
from tilestream_tools.verify.cluster import Arrive, Await, Cluster, ClusterCase, Fetch, Product, Write
from tilestream_tools.verify.report import explore
from tilestream_tools.verify.search import search

BUGS = [bug for bug in seeded_bugs() if bug.model == "cluster"]
HOME = "tilestream_tools.verify.cluster"


def text(*edits):
    return mutated(f"{HOME}:add_shares", [edit for one in edits for edit in one])


def violation_of(case):
    return explore("cluster", case).violation


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("short", [{}, {"k": 3}, {"k": 1}, {"pieces": 1}, {"k": 2, "pieces": 1}], ids=str)
def test_the_right_protocol_passes(size, short):
    assert kind_of(ClusterCase(Cluster(size, 2, **short)), "cluster") is None


def test_sweeps_are_of_one_tile_as_the_kernel_is_and_reach_cut_tiles_of_every_size():
    cases = [case for level in ("quick", "full") for case in configurations("cluster", level)]
    assert all(case.tiles == 1 for case in cases)
    assert {case.cluster.size for case in cases if case.cluster.k and case.cluster.pieces} == set(CLUSTERS)


@pytest.mark.parametrize("warps", [1, 2])
def test_reductions_change_no_verdict(warps):
    for made in [ClusterCase(Cluster(2, 2, warps=warps)), *(bug.cases[0] for bug in BUGS if warps == 1)]:
        reduced, plain = (search(made.build(reduce)) for reduce in (True, False))
        assert (reduced.fault is None) == (plain.fault is None), str(made)
        assert reduced.states <= plain.states


def test_the_announcement_needs_no_order():
    # Nobody has read or written a room before: that its CTA has begun is enough.
    case = ClusterCase(Cluster(2), text=text(at(f"{HOME}:await_all", replace("Await(acquire=True)", "Await(False)"))))
    assert violation_of(case) is None


def test_a_second_tile_of_a_program_would_need_an_announcement_with_release():
    # The kernel's programs have one tile each. A text for more is not the kernel's with a loop around it.
    found = violation_of(ClusterCase(Cluster(2), tiles=2))
    assert found.kind == "overwritten while read"
    assert [line for line in found.trace if "tile 1" in line], "at the second use, not at the first"
    released = text(at(f"{HOME}:announce", replace("Arrive(release=False)", "Arrive(release=True)")))
    for size, tiles in ((2, 2), (2, 3), (4, 2)):
        assert violation_of(ClusterCase(Cluster(size), tiles, released)) is None


def test_a_warp_that_has_ended_counts_as_arrived():
    def leaves(cluster, cta, tile):
        yield Arrive(release=True)
        if cta:
            yield Await(acquire=True)
            yield Arrive(release=True)
            yield Await(acquire=True)

    found = search(ClusterCase(Cluster(2), text=leaves).build())
    assert found.fault.kind == "missing work", "no deadlock: nothing is stored here"
    lines = explored(ClusterCase(Cluster(2)).build(False))[1]
    assert {"CTA 0: exit()", "CTA 1: exit()"} <= lines


@pytest.mark.parametrize(("acquires", "kind"), [(True, "missing work"), (False, "read before arrival")])
def test_an_access_may_be_ordered_by_way_of_a_third(acquires, kind):
    def relayed(cluster, cta, tile):
        yield Arrive(release=False)
        yield Await(acquire=False)
        if cta == 0:
            yield Product(tile, 0, 1)
            yield Write(2, 0, 2)
        for source, sink in ((0, 1), (1, 2)):
            yield Arrive(release=cta == source)
            yield Await(acquire=cta == sink and (acquires or sink == 2))
        if cta == 2:
            yield Fetch(2, 0)

    assert violation_of(ClusterCase(Cluster(3), text=relayed)).kind == kind, "nothing is stored here"


def test_shortest_counterexample_known_by_hand():
    bug = next(one for one in BUGS if one.name == "cluster: arrival without release")
    trace = bug.find().violation.trace
    last = [line for line in trace if line.startswith("CTA 1")][-1]
    assert last == "CTA 1: fetch(owner 1, place 0)"
    assert "CTA 0: write(owner 1, place 0, piece 1)" in trace
    assert "CTA 0: arrive(release False)" in trace[trace.index("CTA 0: write(owner 1, place 0, piece 1)") :]
