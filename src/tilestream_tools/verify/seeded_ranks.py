"""The seeded bugs of ranks: gathers, pushed and pulled, sums, and all-reduces."""

from __future__ import annotations

from typing import Any

from tilestream_tools.verify import seeded_gather as g
from tilestream_tools.verify import seeded_one_shot as o
from tilestream_tools.verify import seeded_sums as q
from tilestream_tools.verify.gather import GatherCase
from tilestream_tools.verify.one_shot import OneShotCase
from tilestream_tools.verify.seeded_bug import SeededBug, says
from tilestream_tools.verify.sums import SumCase


def bugs() -> tuple[SeededBug, ...]:
    """All of them."""
    return (*_gathers(), *_pulls(), *_sums(), *_reduces())


def _gathers() -> tuple[SeededBug, ...]:
    def bug(name: str, kind: str, wrong: object, calls: int, *expires: tuple[int, int], **more: Any) -> SeededBug:
        # What has many states is not tried where it is too small to show.
        cases = (calls,) if expires or {"streams", "world"} & more.keys() else range(1, calls + 1)
        return SeededBug(
            name, kind, "gather", says(wrong), tuple(GatherCase(epochs=n, expires=expires, **more) for n in cases)
        )

    early, overwritten = "read before arrival", "overwritten while read"
    asks, side, ahead = g.begins_without_asking, g.begins_behind_the_side, g.begins_ahead
    one, two, words = g.publish_one_slot, g.publish_two_slots, g.publish_in_one_set
    return (
        bug("not asked for expiry", overwritten, asks, 4, (0, 1), (0, 2), begin=asks, strided=True),
        bug("host waits for the side stream", overwritten, side, 4, (0, 1), begin=side, strided=True),
        bug("too far ahead", overwritten, ahead, 4, (0, 1), begin=ahead, strided=True),
        bug("one slot", overwritten, one, 2, publish=one, side=g.side_one_slot, slots=1, sets=1),
        bug(
            "two slots and an expiry", overwritten, two, 3, (0, 1), publish=two, side=g.side_two_slots, slots=2,
            sets=2, strided=True,
        ),
        bug("own rows not in the slot", early, g.fills_nothing, 1, publish=g.fills_nothing),
        bug("own rows not signalled", "deadlock", g.own_not_signalled, 1, publish=g.own_not_signalled),
        bug(
            "pushed before the slot is full", early, g.posts_before_filled, 1, publish=g.posts_before_filled,
            strided=True,
        ),
        bug(
            "order of one stream taken for granted", overwritten, g.publishes_at_once, 4, publish=g.publishes_at_once,
            streams=2,
        ),
        bug("tensor free too early", overwritten, g.frees_at_once, 2, finish=g.frees_at_once),
        bug("slot of the wrong epoch", early, g.pushes_to_the_next_slot, 1, side=g.pushes_to_the_next_slot),
        bug("pushed before the last kernel", early, g.begins_before_posted, 1, side=g.begins_before_posted),
        bug("signal before copy", early, g.signals_before_copy, 1, side=g.signals_before_copy),
        bug(
            "one set of signals", early, words, 2, publish=words, side=g.signals_in_one_set, sets=1, world=3,
            chunks=(1, 2), strided=True,
        ),
        bug("expiry kept to oneself", "not told", g.tells_nobody, 1, (0, 1), watch=g.tells_nobody),
        bug("kernels not ended", "deadlock", g.overrules_nothing, 2, (0, 1), watch=g.overrules_nothing),
    )  # fmt: skip


def _pulls() -> tuple[SeededBug, ...]:
    def bug(name: str, kind: str, wrong: object, calls: int, *expires: tuple[int, int], **text: Any) -> SeededBug:
        case = GatherCase(epochs=calls, expires=expires, ways=("pull",), **text)
        return SeededBug(name, kind, "gather", says(wrong), (case,))

    early, gives_up = "read before arrival", (0, 1)
    return (
        bug("told before the slot is full", early, g.posts_before_filled, 1, publish=g.posts_before_filled),
        bug("signal before pull", early, g.signals_before_copy, 1, side=g.signals_before_copy),
        bug("flags written by the reader", early, g.reader_writes_flags, 1, side=g.reader_writes_flags),
        bug("flags ignored", early, g.waits_for_nobody, 1, side=g.waits_for_nobody),
        bug("told after the pull", "deadlock", g.tells_afterwards, 1, side=g.tells_afterwards),
        bug("side stream not let go", "deadlock", g.releases_nothing, 1, gives_up, watch=g.releases_nothing),
        bug("side stream let go once", "deadlock", g.releases_once, 2, gives_up, watch=g.releases_once),
        bug(
            "two slots and a flag that lies", "overwritten while read", g.publish_two_slots, 3, (0, 2),
            publish=g.publish_two_slots, side=g.side_two_slots, slots=2, sets=2,
        ),
        bug(
            "side stream let go under the kernel", early, g.releases_under_the_kernel, 1, gives_up,
            watch=g.releases_under_the_kernel,
        ),
    )  # fmt: skip


def _sums() -> tuple[SeededBug, ...]:
    def bug(name: str, kind: str, role: str, wrong: Any, epochs: int = 1, **more: Any) -> SeededBug:
        least = more.get("streams", 1)
        cases = tuple(SumCase(**{"epochs": n, role: wrong, **more}) for n in range(least, epochs + 1))
        return SeededBug(name, kind, "sums", says(wrong), cases)

    early, gives_up = "read before arrival", ((0, 1),)
    return (
        bug("told of what is not published", early, "scatter", q.tells_of_what_is_not_published),
        bug("published before it is computed", early, "produce", q.publishes_before_computed),
        bug("waited for before telling", "deadlock", "scatter", q.waits_before_it_tells),
        bug("waited for in a circle", "deadlock", "scatter", q.pulls_from_the_next, world=3),
        bug("added before it was pulled", early, "add_up", q.sums_at_once),
        bug("sum on another stream", early, "produce", q.produces_at_once, 2, streams=2),
        bug("one slot for all products", early, "produce", q.produces_in_one_slot, 3, scatter=q.scatters_one_slot),
        bug("let go and not overruled", early, "watch", q.overrules_nothing, expires=gives_up),
        bug("overruled too late", early, "watch", q.overrules_afterwards, expires=gives_up),
    )


def _reduces() -> tuple[SeededBug, ...]:
    def bug(name: str, kind: str, role: str, wrong: Any, epochs: int = 1, **more: Any) -> SeededBug:
        least = epochs if "expires" in more else 1  # what has many states is not tried where it is too small to show
        cases = tuple(OneShotCase(**{"epochs": n, role: wrong, **more}) for n in range(least, epochs + 1))
        return SeededBug(name, kind, "reduce", says(wrong), cases)

    early, over, gives_up = "read before arrival", "overwritten while read", ((0, 1),)
    return (
        bug("told before it is multiplied", early, "reduce", o.tells_before_multiplied),
        bug("one peer heard for all", early, "reduce", o.hears_the_next_rank_alone, world=3),
        bug("one peer told", "deadlock", "reduce", o.tells_the_next_rank_alone, world=3),
        bug("told when added", "deadlock", "reduce", o.tells_when_added),
        bug("let go and not made NaN", early, "watch", q.overrules_nothing, expires=gives_up),
        bug("made NaN too late", early, "watch", q.overrules_afterwards, expires=gives_up),
        bug("given up, and not said", "not told", "watch", g.tells_nobody, expires=gives_up),
        bug("one slot for all calls", over, "reduce", o.reduces_in_one_slot, 2),
        bug("two slots, and one gives up", over, "reduce", o.reduces_in_two_slots, 3, expires=((0, 2),)),
        bug("two calls ahead, and one gives up", over, "begin", o.begins_ahead, 4, expires=((0, 2),)),
    )
