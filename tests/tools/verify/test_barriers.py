"""Barriers and stages behave as mbarriers, TMA loads and wgmma do."""

from __future__ import annotations

import pytest

from tilestream.schedule import WorkItem
from tilestream_tools.verify.barriers import RingMemory, arrived, blocks, fresh
from tilestream_tools.verify.faults import Fault
from tilestream_tools.verify.protocol import Barrier, Expect, Get, Load, Mma, Place, Put, Retire, Ring

ITEM = WorkItem(1, 0, 0, 0, 0, 3)


class TestBarrier:
    def test_new_barrier_blocks_phase_0_and_passes_phase_1(self):
        assert blocks(fresh(1), 0)
        assert not blocks(fresh(1), 1)

    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_phase_completes_with_the_last_arrival(self, count):
        barrier = fresh(count)
        for _ in range(count - 1):
            barrier = arrived(barrier, count, 1)
            assert blocks(barrier, 0)
        barrier = arrived(barrier, count, 1)
        assert not blocks(barrier, 0)
        assert blocks(barrier, 1)
        assert barrier == fresh(count) | 1, "the arrivals count anew"

    def test_two_phases_later_a_waiter_cannot_tell(self):
        once = arrived(fresh(1), 1, 1)
        twice = arrived(once, 1, 1)
        assert not blocks(once, 0)
        assert blocks(twice, 0)

    def test_phase_waits_for_bytes_expected(self):
        barrier = arrived(fresh(1), 1, 1, 1)
        assert blocks(barrier, 0)
        assert not blocks(arrived(barrier, 1, 0, -1), 0)

    def test_bytes_alone_do_not_complete_a_phase_with_arrivals_pending(self):
        barrier = arrived(fresh(2), 2, 1, 1)
        barrier = arrived(barrier, 2, 0, -1)
        assert blocks(barrier, 0)
        assert not blocks(arrived(barrier, 2, 1), 0)

    def test_arrival_too_many_is_a_fault(self):
        barrier = arrived(fresh(1), 1, 1, 1)
        with pytest.raises(Fault, match="all of its arrivals"):
            arrived(barrier, 1, 1, 1)

    def test_unexpected_bytes_are_a_fault(self):
        with pytest.raises(Fault):
            arrived(fresh(1), 1, 0, -1)


class TestPlace:
    @pytest.mark.parametrize("depth", [1, 2, 3, 4])
    def test_phase_flips_with_each_round(self, depth):
        place = Place()
        for step in range(4 * depth):
            assert place == Place(step % depth, step // depth % 2)
            assert Place().plus(step, depth) == place
            place = place.next(depth)


class Bench:
    """A ring memory to try single operations on."""

    def __init__(self, ring: Ring) -> None:
        self.rings = RingMemory(ring, 0, "", [ITEM])
        self.m = self.rings.memory()

    def do(self, op, consumer=0):
        perform = self.rings.performer_of(op, consumer)
        if perform is not None:
            perform(0, op, 0, self.m)

    def load(self, stage, k=0):
        self.do(Expect(Barrier("full", stage)))
        self.do(Load(stage, ITEM, k, Barrier("full", stage)))


@pytest.fixture
def bench():
    bench = Bench(Ring(2))
    bench.m[bench.rings.consumer] = 1 + ITEM.tile * 64  # item 1 is the next to read
    return bench


class TestStages:
    def test_load_fills_and_completes_full_when_it_lands(self, bench):
        bench.load(0)
        assert blocks(bench.m[bench.rings.where[Barrier("full", 0)]], 0)
        bench.rings.land(0, bench.m)
        assert not blocks(bench.m[bench.rings.where[Barrier("full", 0)]], 0)
        bench.do(Mma(0))

    def test_mma_before_the_load_landed(self, bench):
        bench.load(0)
        with pytest.raises(Fault) as fault:
            bench.do(Mma(0))
        assert fault.value.kind == "read before arrival"

    def test_mma_of_an_empty_stage(self, bench):
        with pytest.raises(Fault, match="nothing that was loaded") as fault:
            bench.do(Mma(0))
        assert fault.value.kind == "wrong data"

    def test_mma_out_of_order(self, bench):
        bench.load(0, k=1)
        bench.rings.land(0, bench.m)
        with pytest.raises(Fault, match="K step 1 of item 1 in stage 0, meant is K step 0"):
            bench.do(Mma(0))

    def test_load_into_a_stage_being_loaded(self, bench):
        bench.do(Load(0, ITEM, 0, Barrier("full", 0)))
        with pytest.raises(Fault) as fault:
            bench.do(Load(0, ITEM, 1, Barrier("full", 0)))
        assert fault.value.kind == "overwritten while read"

    @pytest.mark.parametrize(("in_flight", "free"), [(1, [0]), (0, [0, 1])])
    def test_retire_frees_the_oldest_first(self, bench, in_flight, free):
        for stage in (0, 1):
            bench.load(stage, k=stage)
            bench.rings.land(stage, bench.m)
            bench.do(Mma(stage))
        bench.do(Retire(in_flight))
        for stage in (0, 1):
            if stage in free:
                bench.do(Load(stage, ITEM, 2, Barrier("full", stage)))
            else:
                with pytest.raises(Fault, match="while an mma reads it"):
                    bench.do(Load(stage, ITEM, 2, Barrier("full", stage)))

    def test_slots_hold_items_and_stop(self, bench):
        with pytest.raises(Fault, match="before anything was put"):
            bench.do(Get(0))
        answers = bench.rings.answers_of(Get(0))
        bench.do(Put(0, ITEM))
        assert answers(0, Get(0), bench.m) == (ITEM,)
        bench.do(Put(0, None))
        assert answers(0, Get(0), bench.m) == (None,)


class TestEnd:
    def test_new_rings_are_a_good_end(self, bench):
        bench.rings.at_end(bench.m)

    def test_load_under_way(self, bench):
        bench.load(0)
        with pytest.raises(Fault, match="a load is still under way"):
            bench.rings.at_end(bench.m)

    def test_stage_not_given_back(self, bench):
        bench.load(0)
        bench.rings.land(0, bench.m)
        with pytest.raises(Fault, match=r"full\[0\] and empty\[0\] are not in the same round"):
            bench.rings.at_end(bench.m)

    def test_arrivals_counted(self):
        assert set(Ring(2, 1, "cooperative").barriers().values()) == {1, 2}
        assert Ring(2, 1, "cooperative").barriers()[Barrier("empty", 0)] == 2
        assert Ring(2, 1, "ping_pong").barriers()[Barrier("empty", 0)] == 1
        assert Ring(2, 1, "ping_pong").barriers()[Barrier("item_empty", 0)] == 2
