"""Model 2 and the product: their text, and what they explore."""

from __future__ import annotations

import pytest
from exploring import explored

from tilestream_tools.verify import protocol as p
from tilestream_tools.verify.product import ProductCase
from tilestream_tools.verify.ring import NUMBERS, RingCase
from tilestream_tools.verify.search import search
from tilestream_tools.verify.sweep import matmul


class TestProtocolText:
    def operations(self, turn, answers):
        out = []
        try:
            op = next(turn)
            while True:
                out.append(type(op).__name__)
                op = turn.send(answers.get(type(op).__name__, 0))
        except StopIteration as end:
            return out, end.value

    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_loops_step_through_the_same_stages(self, depth):
        item = next(matmul("static", 1, 1, k=3).schedule.items())
        ring = p.Ring(depth, promoted=depth == 1)
        load, after_load = self.operations(p.load_turn(ring, p.gated, p.LoadState()), {"Next": item, "Pass": 1})
        math, after_math = self.operations(p.math_turn(ring, p.epilogue, 0, p.MathState()), {"Get": item})
        assert load.count("Load") == math.count("Mma") == 3
        assert math.count("Arrive") == 3 + 1, "every stage and the slot are given back"
        assert after_load.stage == after_math.stage == p.Place().plus(3, depth)
        assert after_load.slot == after_math.slot

    def test_stop_leaves(self):
        load, after = self.operations(p.load_turn(p.Ring(2), p.gated, p.LoadState()), {"Next": None})
        assert (load, after) == (["Next", "WaitBarrier", "Put", "Arrive"], None)
        math, after = self.operations(p.math_turn(p.Ring(2), p.epilogue, 0, p.MathState()), {"Get": None})
        assert (math, after) == (["WaitBarrier", "Get", "Arrive"], None)

    def test_gate_before_handing_on(self):
        item = next(matmul("static", 1, 1).schedule.items())
        load, after = self.operations(p.load_turn(p.Ring(2), p.gated, p.LoadState()), {"Next": item, "Pass": 1})
        assert load.index("Pass") < load.index("Acquired") < load.index("Put") < load.index("Load")
        assert not after.source

    def test_void_items_are_neither_loaded_nor_multiplied_and_the_gate_is_not_asked_again(self):
        item = next(matmul("static", 1, 1, k=3).schedule.items())
        load, after = self.operations(p.load_turn(p.Ring(2), p.gated, p.LoadState()), {"Next": item, "Pass": 0})
        assert load == ["Next", "Pass", "Acquired", "WaitBarrier", "Put", "Arrive"]
        assert after.source
        assert after.stage == p.Place()
        load, _ = self.operations(p.load_turn(p.Ring(2), p.gated, after), {"Next": item})
        assert "Pass" not in load
        assert (p.k_steps(p.voided(item)), p.voided(p.voided(item))) == (-3, item)
        for ring, order in ((p.Ring(2), []), (p.Ring(2, 2, "ping_pong"), ["WaitBarrier", "Arrive"])):
            math, after = self.operations(p.math_turn(ring, p.epilogue, 0, p.MathState()), {"Get": p.voided(item)})
            assert math == ["WaitBarrier", "Get", "Arrive", *order, "Poisoned", "Epilogue"]
            assert after.stage == p.Place()
        math, after = self.operations(p.math_turn(ring, p.epilogue, 1, p.MathState()), {"Get": p.voided(item)})
        assert math == ["WaitBarrier", "Get", "Arrive"], "the other's"
        assert after.stage == p.Place()

    def test_ping_pong_steps_over_the_other_items(self):
        item = next(matmul("static", 1, 1, k=3).schedule.items())
        math, after = self.operations(
            p.math_turn(p.Ring(2, 2, "ping_pong"), p.epilogue, 1, p.MathState()), {"Get": item}
        )
        assert "Mma" not in math
        assert after.stage == p.Place().plus(3, 2)


class TestWhatIsExplored:
    @pytest.mark.parametrize("consumers", ["single", "cooperative", "triple", "ping_pong"])
    def test_items_without_end_in_finitely_many_states(self, consumers):
        model = RingCase(p.Ring(2, 2, consumers), (1, 2)).build()
        states, _ = explored(model)
        numbers = {state[model.number] for state in states}
        under_way = max(sum(bool(x) for x in state[model.left : model.left + NUMBERS]) for state in states)
        assert numbers == set(range(NUMBERS))
        assert under_way >= 2, "the load loop runs ahead"

    def test_deeper_rings_have_more_states(self):
        sizes = [search(RingCase(p.Ring(depth, promoted=True), (1, 2)).build()).states for depth in (1, 2, 3)]
        assert sizes == sorted(sizes)
        assert len(set(sizes)) == 3

    def test_product_takes_consumers_of_whole_items(self):
        with pytest.raises(ValueError, match="consumers that do whole items"):
            ProductCase(matmul("dynamic", 1, 1), p.Ring(2, 2, "cooperative")).build()

    def test_load_loops_with_a_gate_work_through(self):
        with pytest.raises(ValueError, match="drain='leave'; load loops with a gate work their launch through"):
            ProductCase(matmul("dynamic", 1, 1, bounds=(0, 2)), p.Ring(2, 2)).build()

    def test_void_items_are_explored_where_the_launch_may_be_over(self):
        sizes = [search(RingCase(p.Ring(2, 2), (1,), expires=how).build()).states for how in (False, True)]
        assert sizes[0] * 2 < sizes[1]
