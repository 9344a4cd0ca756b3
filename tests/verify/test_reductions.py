"""Reductions change how many states are explored, not what is found."""

from __future__ import annotations

import pytest

from tilestream import verify
from tilestream.verify.processes import NotAlikeError
from tilestream.verify.product import ProductCase
from tilestream.verify.protocol import Ring
from tilestream.verify.ring import RingCase
from tilestream.verify.search import search
from tilestream.verify.sweep import LAYOUTS, matmul

LIMIT = 15_000

EVERY = ("single", "cooperative", "ping_pong")

SOUND = [
    *(
        matmul("dynamic", w, n, bounds=b, pivot=p)
        for w, n in ((1, 2), (2, 2), (3, 2))
        for b in LAYOUTS[n]
        for p in (0, 1)
    ),
    *(matmul(kind, 2, 3, bounds=b, pivot=1, k=2) for kind in ("static", "stream_k", "dynamic") for b in LAYOUTS[3]),
    matmul("dynamic", 3, 3, queues=2),
    matmul("dynamic", 3, 3, queues=3, running=(0, 2)),
    matmul("dynamic", 2, 2, 2, bounds=(0, 3, 4), queues=2, split="columns"),
    matmul("stream_k", 3, 1, bounds=(0, 1, 2), k=3),
    matmul("stream_k", 3, 4, k=2),
    *(RingCase(Ring(d, i, who), ks) for d in (1, 2) for i in (1, 2) for who in EVERY for ks in ((1,), (2,))),
    RingCase(Ring(1, 1, "cooperative"), (1, 2)),
    RingCase(Ring(2, 1), (1, 2)),
    ProductCase(matmul("dynamic", 2, 1, bounds=(0, 1, 2)), Ring(2, 1)),
    ProductCase(matmul("dynamic", 1, 2, bounds=(0, 2, 4), k=2), Ring(2, 1)),
    ProductCase(matmul("stream_k", 2, 1, bounds=(0, 1, 2), k=2), Ring(1, 1)),
]  # fmt: skip


def outcome(case, **how):
    try:
        return search(case.build(**how), 400_000)
    except NotAlikeError:
        return search(case.build(reduce=how.get("reduce", True), symmetry=False), 400_000)


@pytest.mark.parametrize("case", SOUND, ids=str)
def test_sound_protocols_are_sound_either_way(case):
    found = {how: outcome(case, reduce=how[0], symmetry=how[1]) for how in ((r, s) for r in (0, 1) for s in (0, 1))}
    assert all(o.complete and o.fault is None for o in found.values())
    assert found[1, 1].states <= found[0, 1].states <= found[0, 0].states
    assert found[1, 1].states <= found[1, 0].states <= found[0, 0].states


@pytest.mark.parametrize("bug", verify.seeded_bugs(), ids=lambda bug: bug.name)
def test_seeded_bugs_are_found_or_not_at_the_same_sizes(bug):
    compared = 0
    for case in bug.cases:
        plain = outcome(case, reduce=False)
        if plain.states > LIMIT:
            continue
        reduced, named = outcome(case), outcome(case, symmetry=False)
        assert (reduced.fault is None) == (plain.fault is None) == (named.fault is None), str(case)
        compared += 1
        if compared == 6:
            break
    assert compared >= 2


def test_reductions_pay():
    case = matmul("dynamic", 3, 3, bounds=(0, 3, 5), queues=2)
    assert outcome(case).states * 10 < outcome(case, reduce=False, symmetry=False).states
    ring = RingCase(Ring(2, 2, "cooperative"), (1, 2))
    assert outcome(ring).states * 5 < search(ring.build(False, False), 400_000).states


def test_programs_that_look_at_their_number_are_not_interchangeable():
    bug = next(b for b in verify.seeded_bugs() if b.name == "wait without abort")
    case = next(c for c in bug.cases if c.schedule.workers == 2)
    with pytest.raises(NotAlikeError, match="worker 0, worker 1"):
        search(case.build())
