"""C buffers behave as shared memory that TMA stores read."""

from __future__ import annotations

import pytest
from exploring import explored

from tilestream.schedule import WorkItem
from tilestream_tools.verify.barriers import RingMemory
from tilestream_tools.verify.buffers import Buffers
from tilestream_tools.verify.faults import Fault
from tilestream_tools.verify.protocol import Drain, Fence, Fill, Fixup, Ring, Store, store
from tilestream_tools.verify.ring import RingCase, RingModel

ITEM, NEXT = WorkItem(0, 0, 0, 0, 0, 1), WorkItem(1, 0, 0, 0, 0, 1)
PART = WorkItem(2, 0, 0, 0, 0, 1, 0, 2)


class Bench:
    """The C buffers of a ring, to try single operations on."""

    def __init__(self, ring: Ring) -> None:
        self.rings = RingMemory(ring, 0, "", [ITEM, NEXT, PART])
        self.m = self.rings.memory()

    def do(self, *ops, consumer=0, answer=0):
        for op in ops:
            self.rings.performer_of(op, consumer)(0, op, answer, self.m)

    def begin(self, item, consumer=0):
        self.rings.finish(item, consumer, self.m)

    def fault(self, *ops, consumer=0):
        with pytest.raises(Fault) as fault:
            self.do(*ops, consumer=consumer)
        return fault.value.kind


@pytest.fixture
def bench():
    bench = Bench(Ring(2, strips=2))
    bench.begin(ITEM)
    return bench


def out(buffer, item, strip):
    return Fill(buffer, item, strip), Fence(), Store(buffer, item, strip)


class TestStores:
    def test_a_tile_goes_out_under_the_next(self, bench):
        bench.do(*store(bench.rings.ring, ITEM))
        bench.begin(NEXT)
        bench.do(*store(bench.rings.ring, NEXT), Drain(0))
        bench.rings.at_end(bench.m)

    def test_a_buffer_is_read_until_its_store_is_drained_the_oldest_first(self, bench):
        bench.do(*out(0, ITEM, 0), *out(1, ITEM, 1))
        assert bench.fault(Fill(0, NEXT, 0)) == "overwritten while read"
        bench.do(Drain(1))
        assert bench.fault(Fill(1, NEXT, 0)) == "overwritten while read"
        bench.do(Fill(0, NEXT, 0))

    def test_a_tile_of_odd_strips_begins_with_the_buffer_that_the_one_before_ended_with(self):
        bench = Bench(Ring(2, strips=3))
        for tile in (ITEM, NEXT):
            bench.begin(tile)
            bench.do(*store(bench.rings.ring, tile))
        bench.begin(ITEM)
        bench.do(Drain(1))
        assert bench.fault(Fill(0, ITEM, 0)) == "overwritten while read"
        assert [Ring(2, strips=n).pending(0) for n in (1, 2, 3, 4)] == [0, 1, 0, 1]
        assert [Ring(2, strips=3).pending(strip) for strip in range(3)] == [0, 1, 1]
        assert Ring(2, strips=2, most_buffers=1).pending(1) == 0

    def test_the_other_consumer_cannot_drain_it(self):
        bench = Bench(Ring(2, 2, "ping_pong", strips=1))
        bench.begin(ITEM)
        bench.do(*out(0, ITEM, 0))
        bench.do(Drain(0), consumer=1)
        assert bench.fault(Fill(0, NEXT, 0)) == "overwritten while read"
        bench.do(Fill(0, NEXT, 0), consumer=1)  # into a buffer of its own

    def test_what_is_not_fenced_a_store_may_not_see(self, bench):
        assert bench.fault(Fill(0, ITEM, 0), Store(0, ITEM, 0)) == "read before arrival"

    def test_a_fence_is_for_what_was_written_before_it(self, bench):
        assert bench.fault(Fence(), Fill(0, ITEM, 0), Store(0, ITEM, 0)) == "read before arrival"

    @pytest.mark.parametrize(
        "ops",
        [
            (Store(0, ITEM, 0),),  # nothing was filled
            (Fill(1, ITEM, 0), Fence(), Store(0, ITEM, 0)),  # another buffer
            (Fill(0, ITEM, 1), Fence(), Store(0, ITEM, 0)),  # another strip
            out(0, ITEM, 1),  # out of turn
            out(0, NEXT, 0),  # an item that is not at hand
            (*out(0, ITEM, 0), *out(1, ITEM, 0)),  # again
            (*out(0, ITEM, 0), *out(1, ITEM, 1), Drain(0), *out(0, ITEM, 2)),  # more than there are
        ],
    )
    def test_each_strip_once_from_where_it_is(self, bench, ops):
        assert bench.fault(*ops) == "wrong data"


class TestEnds:
    def test_left_while_a_store_reads(self, bench):
        bench.do(*store(bench.rings.ring, ITEM), Drain(1))
        with pytest.raises(Fault) as fault:
            bench.rings.at_end(bench.m)
        assert (fault.value.kind, fault.value.message) == ("left too early", "a store may still read C buffer 1")

    def test_a_strip_that_was_never_stored(self, bench):
        bench.do(*out(0, ITEM, 0), Drain(0))
        for end in (lambda: bench.begin(NEXT), lambda: bench.begin(PART), lambda: bench.rings.at_end(bench.m)):
            with pytest.raises(Fault, match="strip 1 of item 0 is not stored"):
                end()

    def test_a_part_is_stored_by_the_last_and_by_no_other(self):
        for last in (0, 1):
            bench = Bench(Ring(2, strips=1))
            bench.begin(PART)
            bench.do(Fixup(PART), answer=last)
            if last:
                bench.do(*out(0, PART, 0), Drain(0))
            else:
                assert bench.fault(*out(0, PART, 0)) == "wrong data"
            bench.rings.at_end(bench.m)

    def test_a_ring_without_strips_has_no_buffers(self):
        assert Buffers.memory(Ring(2)) == []
        assert Ring(2, strips=1).buffers == Ring(2, strips=2, most_buffers=1).buffers == 1
        assert Ring(2, strips=2).buffers == Ring(2, strips=3).buffers == Ring(2, strips=4).buffers == 2


def test_both_answers_to_a_fixup_are_explored():
    _, lines = explored(RingModel(RingCase(Ring(2, 2, strips=2), (1,), split=True)))
    answers = {line.split(" of ")[-1] for line in lines if "fixup" in line}
    assert any(answer.endswith("the last part") for answer in answers)
    assert any(answer.endswith("others are to come") for answer in answers)
