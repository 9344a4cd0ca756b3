"""Reductions change how many states are explored, not what is found."""

from __future__ import annotations

import pytest

from mutants.checker import seeded_bugs
from tilestream.core.protocols import replay
from tilestream_tools.verify.attention import AttentionCase
from tilestream_tools.verify.attention_protocol import AttentionRing
from tilestream_tools.verify.dispatch import DispatchCase
from tilestream_tools.verify.experts import ExpertsCase
from tilestream_tools.verify.gather import GatherCase
from tilestream_tools.verify.one_shot import OneShotCase
from tilestream_tools.verify.processes import LEFT, NotAlikeError
from tilestream_tools.verify.product import ProductCase
from tilestream_tools.verify.protocol import Ring
from tilestream_tools.verify.replay import ReplayCase
from tilestream_tools.verify.ring import RingCase
from tilestream_tools.verify.search import search
from tilestream_tools.verify.shared_ring import SharedCase, SharedRing, direct, staged
from tilestream_tools.verify.sums import SumCase
from tilestream_tools.verify.sweep import LAYOUTS, UNREAD, matmul
from tilestream_tools.verify.workers import WorkersModel

#: States without reductions up to which a bug's cases are compared, and how many of them: the quick tests, and all.
FEW, MANY = (4_000, 1), (15_000, 6)

SLOW = pytest.mark.slow

EVERY = ("single", "cooperative", "triple", "ping_pong")

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
    *(
        matmul("dynamic", w, n, bounds=b, pivot=p, drain="reset")
        for w, n in ((1, 2), (2, 1), (2, 2))
        for b in (*LAYOUTS[n], *UNREAD[n])
        for p in (0, 1)
        if p < len(b) - 1
    ),
    *(matmul(kind, 2, 2, bounds=(0, 3, 4), k=2, drain="reset") for kind in ("static", "stream_k")),
    matmul("stream_k", 2, 1, bounds=(0, 1, 2), k=2, drain="reset"),
    matmul("dynamic", 3, 2, bounds=(0, 3, 4), drain="poison", queues=2),
    matmul("dynamic", 2, 2, bounds=(0, 3, 4), drain="reset", quarantined=True),
    matmul("dynamic", 2, 3, drain="reset", queues=2),
    *(
        matmul("stream_k", w, n, k=k, shares=shares, drain="poison", fixup=True)
        for w, n, k, shares in ((2, 1, 2, 0), (3, 1, 3, 0), (2, 3, 2, 0), (3, 2, 2, 0), (4, 3, 2, 2), (2, 1, 3, 3))
    ),
    matmul("stream_k", 2, 1, bounds=(0, 1, 2), k=2, drain="reset", fixup=True),
    *(
        RingCase(Ring(d, i, who, promoted=d == 1), ks)
        for d in (1, 2)
        for i in (1, 2)
        for who in EVERY
        for ks in ((1,), (2,))
        if (who, d, i) != ("triple", 2, 2)  # too many states without reductions
    ),
    RingCase(Ring(1, 1, "cooperative", promoted=True), (1, 2)),
    RingCase(Ring(2, 1), (1, 2)),
    *(RingCase(Ring(2, 1, strips=n), (1,), split=True) for n in (1, 2)),
    *(pytest.param(RingCase(Ring(2, 1, "ping_pong", strips=n), (1,), split=True), marks=SLOW) for n in (1, 2)),
    RingCase(Ring(2, 1, strips=3), (1,)),
    RingCase(Ring(1, 1, "cooperative", promoted=True, strips=2), (1,)),
    *(RingCase(Ring(2, 1, who), (1,), expires=True) for who in ("single", "ping_pong")),
    RingCase(Ring(1, 2, promoted=True), (1, 2), expires=True),
    ProductCase(matmul("dynamic", 2, 1, bounds=(0, 2), drain="reset"), Ring(2, 1)),
    ProductCase(matmul("dynamic", 1, 2, bounds=(0, 2, 4), k=2, drain="reset"), Ring(2, 1)),
    ProductCase(matmul("stream_k", 2, 1, bounds=(0, 2), k=2, drain="poison", running=(0,)), Ring(1, 1, promoted=True)),
    ProductCase(matmul("stream_k", 2, 1, k=2, fixup=True), Ring(2, 1)),
    ProductCase(matmul("stream_k", 2, 1, k=2, running=(1,), fixup=True), Ring(2, 1, "ping_pong")),
]  # fmt: skip


def outcome(case, limit=400_000, **how):
    try:
        return search(case.build(**how), limit)
    except NotAlikeError:
        return search(case.build(reduce=how.get("reduce", True), symmetry=False), limit)


@pytest.mark.parametrize("case", SOUND, ids=str)
def test_sound_protocols_are_sound_either_way(case):
    found = {how: outcome(case, reduce=how[0], symmetry=how[1]) for how in ((r, s) for r in (0, 1) for s in (0, 1))}
    assert all(o.complete and o.fault is None for o in found.values())
    assert found[1, 1].states <= found[0, 1].states <= found[0, 0].states
    assert found[1, 1].states <= found[1, 0].states <= found[0, 0].states


@pytest.mark.parametrize("limit", [FEW, pytest.param(MANY, marks=SLOW)], ids=("few", "many"))
@pytest.mark.parametrize("bug", seeded_bugs(), ids=lambda bug: bug.name)
def test_seeded_bugs_are_found_or_not_at_the_same_sizes(bug, limit):
    # Of keys that arrive only the smallest are small enough.
    ranks = bug.model in ("gather", "sums", "reduce", "replay", "dispatch", "experts")
    least = 1 if limit is FEW or ranks or bug.model == "attention" else 2
    compared = compare(bug, *limit) or compare(bug, MANY[0], least)
    if ranks and not compared:
        pytest.skip("of several calls ranks have more states than are compared here")
    assert compared >= least


def compare(bug, limit, most):
    """How many of a bug's cases of at most so many states were compared, up to ``most``."""
    compared = 0
    for case in bug.cases:
        plain = outcome(case, limit, reduce=False)
        if plain.states > limit:
            continue
        reduced, named = outcome(case), outcome(case, symmetry=False)
        assert (reduced.fault is None) == (plain.fault is None) == (named.fault is None), str(case)
        compared += 1
        if compared == most:
            break
    return compared


@pytest.mark.parametrize(
    "case",
    [
        GatherCase(epochs=1),
        GatherCase(epochs=2, strided=True),
        GatherCase(epochs=1, ways=("pull",)),
        GatherCase(epochs=1, expires=((0, 1),)),
        ReplayCase(replays=2),
        ReplayCase(replays=2, slots=(0, 1), chunks=2),
        ReplayCase(replays=1, expires=((0, 1),)),
        ReplayCase(replays=1, lost=1, expires=((0, 1),)),
        ReplayCase(replays=2, calling=replay.adding),
        ReplayCase(replays=2, others=((0, 1), (1, 2))),
        ReplayCase(replays=1, destroyed=(0, 1)),
        ReplayCase(replays=1, expires=((0, 1),), destroyed=(0,), calling=replay.adding),
        ReplayCase(replays=2, shared=True),
        DispatchCase(),
        DispatchCase(((2,), (1,)), lost=1),
        DispatchCase(((1,), (2,)), expires=True),
        ExpertsCase(replays=1),
        ExpertsCase(replays=1, lost=1, expires=((0, 1),)),
        SumCase(epochs=1),
        OneShotCase(epochs=2),
        OneShotCase(epochs=1, expires=((0, 1),)),
        SharedCase(SharedRing(3, 1, 2), ((2, True), (1, False)), direct),
        SharedCase(SharedRing(3, 1, 2), ((2, True), (1, False)), staged),
        AttentionCase(AttentionRing(1), (1,)),
    ],
    ids=str,
)
def test_other_sound_protocols_are_sound_either_way(case):
    plain, reduced = outcome(case, reduce=False), outcome(case)
    assert plain.complete
    assert reduced.complete
    assert plain.fault is reduced.fault is None
    gain = 5 if isinstance(case, GatherCase | SumCase) else 1
    assert gain * reduced.states <= plain.states


@pytest.mark.parametrize("text", [replay.calling, replay.adding])
def test_marks_that_name_no_form_are_found_either_way(text):
    """A rank replays a call of another shape, of the same number: without the form its rows pass for right."""
    case = ReplayCase(replays=2, others=((0, 1), (1, 2)), names_form=False, calling=text)
    for found in (outcome(case, reduce=False), outcome(case)):
        assert found.fault is not None
        assert "made of rows of another call" in str(found.fault)


def in_the_pool(rank, world, slot):
    """A host that makes a slot in the graph's pool and keeps it as long as the graph."""
    yield replay.Reserve(slot, replay.POOL)
    yield replay.Keep(slot, replay.GRAPH)
    return None


@pytest.mark.parametrize(("destroyed", "kind"), [((), None), ((0,), "freed memory")])
def test_what_a_graph_alone_holds_is_freed_with_it(destroyed, kind):
    case = ReplayCase(destroyed=destroyed, prepare=in_the_pool)
    for found in (outcome(case, reduce=False), outcome(case)):
        assert (found.fault and found.fault.kind) == kind
        assert found.complete or kind


def test_bugs_of_many_states_are_found_either_way():
    bugs = {bug.name: bug for bug in seeded_bugs()}
    queries = AttentionCase(AttentionRing(1), (1,), math=bugs["attention: queries not awaited"].cases[0].math)
    one_slot = bugs["one slot for all calls"].cases[-1]
    for case, kind in ((queries, "wrong data"), (one_slot, "overwritten while read")):
        assert {outcome(case, reduce=how).fault.kind for how in (True, False)} == {kind}


class WithEnds(WorkersModel):
    """As `WorkersModel`, with one entry more in its memory: the tiles with a poisoned part."""

    def memory(self):
        return [*super().memory(), 0]

    def _hand_in(self, pid, op, m, nan):
        m[-1] |= nan << op.item.tile
        super()._hand_in(pid, op, m, nan)

    def ends(self):
        """All that a launch can come to: which tiles are NaN, and the words it leaves."""
        first = self.canonical(self.start())
        seen, todo, ends = {first}, [first], set()
        while todo:
            state = todo.pop()
            steps = self.steps(state)
            if not steps and all(local == LEFT for local in state[: len(self.processes)]):
                left_alone = self.case.drain != "reset" or state[self.quarantined] or state[self.signals] == 0
                ends.add((state[-1], state[self.quarantined], state[self.aborted], state[self.left], bool(left_alone)))
            new = {self.canonical(target) for target, _ in steps} - seen
            seen |= new
            todo += new
        return ends


@pytest.mark.parametrize("drain", ["poison", "reset"])
@pytest.mark.parametrize(
    "case",
    [
        *(("dynamic", w, 2, b, p, 1, 1) for w in (1, 2) for b in (*LAYOUTS[2], *UNREAD[2]) for p in (0, len(b) - 2)),
        *((kind, 3, 2, b, 1, 1, 1) for kind in ("dynamic", "static") for b in LAYOUTS[2]),
        *(("stream_k", 2, 1, b, 0, 2, 1) for b in (*LAYOUTS[1], *UNREAD[1])),
        ("stream_k", 3, 1, (0, 1, 2), 1, 2, 1),
        ("dynamic", 2, 2, (0, 3, 4), 1, 1, 2),
    ],
    ids=str,
)
def test_every_pattern_of_computed_and_poisoned_tiles_is_reached_either_way(case, drain):
    # Stronger than equal verdicts: what is skipped between a Poll and its item's end leads nowhere else.
    kind, workers, num_m, bounds, pivot, k, queues = case
    case = matmul(kind, workers, num_m, bounds=bounds, pivot=pivot, k=k, queues=queues, drain=drain)
    assert WithEnds(case).ends() == WithEnds(case, False, False).ends()


def test_reductions_pay():
    case = matmul("dynamic", 3, 3, bounds=(0, 3, 5), queues=2)
    assert outcome(case).states * 10 < outcome(case, reduce=False, symmetry=False).states
    ring = RingCase(Ring(2, 2, "cooperative"), (1, 2))
    assert outcome(ring).states * 5 < search(ring.build(False, False), 400_000).states


def test_programs_that_look_at_their_number_are_not_interchangeable():
    bug = next(b for b in seeded_bugs() if b.name == "wait without abort")
    case = next(c for c in bug.cases if c.schedule.workers == 2)
    with pytest.raises(NotAlikeError, match="worker 0, worker 1"):
        search(case.build())
