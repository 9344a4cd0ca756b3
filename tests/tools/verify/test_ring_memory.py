"""What rings' operations mean: barriers as mbarriers, stages read by wgmma, C buffers read by TMA stores."""

from __future__ import annotations

import pytest
from exploring import explored

from tilestream.schedule import WorkItem
from tilestream_tools.verify.barriers import RingMemory, arrived, blocks, fresh
from tilestream_tools.verify.faults import Fault
from tilestream_tools.verify.protocol import (
    Barrier,
    Drain,
    Expect,
    Fence,
    Fill,
    Fixup,
    Get,
    Load,
    Mma,
    Place,
    Put,
    Retire,
    Ring,
    Store,
    store,
)  # fmt: skip
from tilestream_tools.verify.ring import RingCase, RingModel

ITEM, NEXT = WorkItem(0, 0, 0, 0, 0, 3), WorkItem(1, 0, 0, 0, 0, 3)
PART = WorkItem(2, 0, 0, 0, 0, 1, 0, 2)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_phase_completes_with_the_last_arrival(count):
    barrier = fresh(count)
    for _ in range(count):
        assert (blocks(barrier, 0), blocks(barrier, 1)) == (True, False)
        barrier = arrived(barrier, count, 1)
    assert (blocks(barrier, 0), blocks(barrier, 1)) == (False, True)
    assert barrier == fresh(count) | 1, "the arrivals count anew"
    assert count > 1 or blocks(arrived(barrier, 1, 1), 0), "two phases later a waiter cannot tell"


def test_a_phase_waits_for_arrivals_and_for_bytes():
    expecting = arrived(fresh(2), 2, 1, 1)
    assert blocks(expecting, 0)
    assert blocks(landed := arrived(expecting, 2, 0, -1), 0)
    assert not blocks(arrived(landed, 2, 1), 0)
    assert blocks(late := arrived(expecting, 2, 1), 0)
    assert not blocks(arrived(late, 2, 0, -1), 0)
    with pytest.raises(Fault, match="all of its arrivals"):
        arrived(arrived(fresh(1), 1, 1, 1), 1, 1, 1)
    with pytest.raises(Fault):
        arrived(fresh(1), 1, 0, -1)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_the_phase_of_a_place_flips_with_each_round(depth):
    place = Place()
    for step in range(4 * depth):
        assert place == Place().plus(step, depth) == Place(step % depth, step // depth % 2)
        place = place.next(depth)


class Bench:
    """A ring's memory, to try single operations on."""

    def __init__(self, *ops, ring=None, item=ITEM) -> None:
        self.rings = RingMemory(ring or Ring(2, strips=2), 0, "", [ITEM, NEXT, PART])
        self.m = self.rings.memory()
        self.rings.finish(item, 0, self.m)
        self.m[self.rings.consumer] = 1  # the next item to read is item 0
        self.do(*ops)

    def do(self, *ops, consumer=0, answer=0):
        for op in ops:
            if isinstance(op, int):
                self.rings.land(op, self.m)
            elif (perform := self.rings.performer_of(op, consumer)) is not None:
                perform(0, op, answer, self.m)

    def end(self):
        self.rings.at_end(self.m)


def load(stage, k=0, land=True):
    """A load that is expected, and lands."""
    begun = Expect(Barrier("full", stage)), begin(stage, k)
    return (*begun, stage) if land else begun


def begin(stage, k):
    return Load(stage, ITEM, k, Barrier("full", stage))


def out(buffer, item, strip):
    return Fill(buffer, item, strip), Fence(), Store(buffer, item, strip)


BOTH = (*load(0), Mma(0), *load(1, 1), Mma(1))


@pytest.mark.parametrize(
    ("ops", "kind", "message"),
    [
        ((*load(0, land=False), Mma(0)), "read before arrival", None),
        ((Mma(0),), "wrong data", "nothing that was loaded"),
        ((*load(0, 1), Mma(0)), "wrong data", "K step 1 of item 0 in stage 0, meant is K step 0"),
        ((begin(0, 0), begin(0, 1)), "overwritten while read", "still being loaded"),
        ((*BOTH, Retire(1), begin(1, 2)), "overwritten while read", "while an mma reads it"),
        ((Get(0),), "wrong data", "before anything was put"),
        # A buffer is read until its store is drained, the oldest first.
        ((*out(0, ITEM, 0), *out(1, ITEM, 1), Fill(0, NEXT, 0)), "overwritten while read", None),
        ((*out(0, ITEM, 0), *out(1, ITEM, 1), Drain(1), Fill(1, NEXT, 0)), "overwritten while read", None),
        # A fence is for what was written before it.
        ((Fill(0, ITEM, 0), Store(0, ITEM, 0)), "read before arrival", None),
        ((Fence(), Fill(0, ITEM, 0), Store(0, ITEM, 0)), "read before arrival", None),
        # Each strip once, in turn, of the item at hand, from the buffer that it was filled in.
        ((Store(0, ITEM, 0),), "wrong data", None),
        ((Fill(1, ITEM, 0), Fence(), Store(0, ITEM, 0)), "wrong data", None),
        ((Fill(0, ITEM, 1), Fence(), Store(0, ITEM, 0)), "wrong data", None),
        (out(0, ITEM, 1), "wrong data", None),
        (out(0, NEXT, 0), "wrong data", None),
        ((*out(0, ITEM, 0), *out(1, ITEM, 0)), "wrong data", None),
        ((*out(0, ITEM, 0), *out(1, ITEM, 1), Drain(0), *out(0, ITEM, 2)), "wrong data", None),
    ],
)
def test_what_an_operation_must_not_do(ops, kind, message):
    bench = Bench(*ops[:-1])
    with pytest.raises(Fault, match=message) as fault:
        bench.do(ops[-1])
    assert fault.value.kind == kind


@pytest.mark.parametrize(
    "ops",
    [
        (*BOTH, Retire(1), begin(0, 2)),
        (*BOTH, Retire(0), begin(1, 2)),
        (*out(0, ITEM, 0), *out(1, ITEM, 1), Drain(1), Fill(0, NEXT, 0)),
    ],
)
def test_what_an_operation_may_do(ops):
    Bench(*ops)


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        (load(0, land=False), "a load is still under way"),
        (load(0), r"full\[0\] and empty\[0\] are not in the same round"),
        ((*store(Ring(2, strips=2), ITEM), Drain(1)), "a store may still read C buffer 1"),
        ((*out(0, ITEM, 0), Drain(0)), "strip 1 of item 0 is not stored"),
    ],
)
def test_what_a_ring_must_not_be_left_with(ops, message):
    bench = Bench(*ops, item=ITEM if "strip" in message or "store" in message else PART)
    with pytest.raises(Fault, match=message):
        bench.end()


def test_a_slot_holds_the_last_item_or_stop():
    bench = Bench(item=PART)
    bench.end()
    for held in (ITEM, None):
        bench.do(Put(0, held))
        assert bench.rings.answers_of(Get(0))(0, Get(0), bench.m) == (held,)


def test_a_tile_of_odd_strips_begins_with_the_buffer_that_the_one_before_ended_with():
    assert [Ring(2, strips=n).pending(0) for n in (1, 2, 3, 4)] == [0, 1, 0, 1]
    assert [Ring(2, strips=3).pending(strip) for strip in range(3)] == [0, 1, 1]
    assert [Ring(2, strips=n).buffers for n in range(5)] == [1, 1, 2, 2, 2]
    assert (Ring(2, strips=2, most_buffers=1).pending(1), Ring(2, strips=2, most_buffers=1).buffers) == (0, 1)


def test_the_other_consumer_has_buffers_of_its_own():
    bench = Bench(*out(0, ITEM, 0), ring=Ring(2, 2, "ping_pong", strips=1))
    bench.do(Drain(0), consumer=1)
    bench.do(Fill(0, NEXT, 0), consumer=1)
    with pytest.raises(Fault, match="C buffer 0"):
        bench.do(Fill(0, NEXT, 0))


@pytest.mark.parametrize("last", [0, 1])
def test_a_part_is_stored_by_the_last_contributor_alone(last):
    bench = Bench(ring=Ring(2, strips=1), item=PART)
    bench.do(Fixup(PART), answer=last)
    if last:
        bench.do(*out(0, PART, 0), Drain(0))
    else:
        with pytest.raises(Fault):
            bench.do(*out(0, PART, 0))
    bench.rings.buffers.at_end(bench.m)


def test_both_answers_to_a_fixup_are_explored():
    _, lines = explored(RingModel(RingCase(Ring(2, 2, strips=2), (1,), split=True)))
    answers = {line.split(" of ")[-1] for line in lines if "fixup" in line}
    assert any(answer.endswith("the last part") for answer in answers)
    assert any(answer.endswith("others are to come") for answer in answers)
