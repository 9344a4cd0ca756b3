"""Problems whose output is published: order, refusals, and that what is counted of a chunk comes to what it is."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from made_up import BF16, H100

import tilestream as ts
from tilestream.core.chunks import Chunks, chunk_of, rows_in
from tilestream.launch.gemm_arguments import Layout
from tilestream.launch.hopper.arguments import Arguments
from tilestream.plan.plan import of_candidate
from tilestream.plan.planner import plan_problem
from tilestream.plan.policy import hopper
from tilestream.plan.problem import Incoming, Problem


def problem(m=1000, n=900, k=512, size=250, pivot=1, **more):
    return Problem(m, n, k, **{**BF16, "publishes": Incoming(Chunks.uniform(m, size), pivot), **more})


def asked(m=512, n=256, k=256, device="h100", **how):
    return ts.plan(m, n, k, dtype="bfloat16", device=device, layout="nt", **how)


def row_tiles(plan):
    """In the order of the raster, which all queues keep."""
    grid = plan.schedule.grid
    return [plan.schedule.raster.tile(t, grid.num_m, grid.num_n)[0] for t in range(grid.plane)]


@pytest.mark.parametrize(("m", "n", "rows"), [(1000, 900, 250), (1000, 900, 103), (64, 4096, 32), (4096, 40, 2048)])
def test_what_is_counted_of_a_chunk_comes_to_its_end_once(m, n, rows):
    asked = problem(m, n, size=rows, pivot=0)
    tried = 0
    for candidate in hopper.candidates(asked, H100, 132, kinds=("dynamic",)):
        plan = of_candidate(asked, H100, "hopper", candidate, "a test's")
        arguments = Arguments(plan, Layout((0, 512, 1), (0, 1, 512), (0, n, 1)))
        per_chunk, times = arguments._published
        halves, counts = arguments._halves, Counter()
        for item in plan.schedule.items():
            pr, columns = (item.pn, item.pm) if plan.swap_ab else (item.pm, item.pn)
            for half in range(halves):  # as `kernels.hopper.gemm.math_loop` publishes
                count = sum(arguments.widths) if plan.swap_ab else arguments.rows // halves
                begin = columns * count if plan.swap_ab else pr * arguments.rows + half * count
                end = min(begin + count, m)
                for chunk in range(chunk_of(begin, rows), chunk_of(end - 1, rows) + 1) if begin < end else ():
                    counts[chunk] += rows_in(begin, end, chunk, per_chunk)
        assert counts == {c: rows_in(0, m, c, rows) * times for c in range(-(-m // rows))}, plan.label
        tried += 1
    assert tried > 20


def test_the_raster_begins_with_the_pivot_and_goes_chunk_by_chunk():
    plan = plan_problem(problem(4096, 2048, size=1024, pivot=3), device=H100, backend="hopper")
    assert plan.backend == "hopper"
    seen = [pm * plan.block[0] // 1024 for pm in row_tiles(plan)]
    assert [chunk for chunk, _ in itertools.groupby(seen)] == [3, 0, 1, 2]
    assert "publish   rows in 4 chunks of 1024, from chunk 3 on" in plan.explain()


def test_a_tile_in_two_chunks_comes_with_the_first_which_waits_for_it():
    plan = plan_problem(problem(4000, 2048, size=2000, pivot=1), device=H100, backend="hopper")
    block = plan.block[0]
    assert 2000 % block, "one row tile is in both"
    order = row_tiles(plan)
    done = max(i for i, pm in enumerate(order) if (pm + 1) * block > 2000)
    assert done + 1 == len([pm for pm in order if (pm + 1) * block > 2000]), "nothing else before the pivot is there"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rows": Incoming(Chunks.uniform(1000, 10))}, "an operand arrives, too"),
        ({"batch": 2}, "chunks of 1000 rows for 2 outputs of 1000 rows"),
        ({"publishes": Incoming(Chunks.uniform(999, 10))}, "chunks of 999 rows"),
    ],
)
def test_what_is_not_published_is_refused(change, says):
    with pytest.raises(ValueError, match=says):
        problem(**change)


def test_no_other_kernel_takes_such_a_problem_silently():
    with pytest.raises(NotImplementedError, match=r"publishes: the portable kernel signals no chunk"):
        plan_problem(problem(), device=H100, backend="portable")


def test_where_no_kernel_publishes_the_plan_says_why_and_is_the_whole_s():
    made = asked(8192, 4096, 4096, publish=ts.Arrival.ragged([0, 5, 8192]))
    assert made.problem.publishes is None
    assert "refused   one launch: publishes: " in made.explain()
    assert "these are ragged): launch them one by one, each signalled behind it" in made.explain()


def test_a_plan_that_publishes_is_run_by_the_op_alone():
    made = ts.plan(50, 20, 30, publish=ts.Arrival.uniform(13, 4))
    assert made.problem.publishes is not None
    with pytest.raises(
        ValueError, match=r"plan.run: the plan signals the chunks of its result, and no signals are given"
    ):
        made.run(torch.ones(50, 30), torch.ones(30, 20))


def test_a_published_plan_is_dynamic_whatever_would_be_faster():
    """One worker of it comes to the end; a static one waits for SMs that a reader may hold."""
    assert asked(512, 256, 4096).schedule.kind != "dynamic"
    for m in (512, 8192):
        assert asked(m, 256, 4096, publish=ts.Arrival.uniform(m, 1)).schedule.kind == "dynamic"


@pytest.mark.parametrize("device", ["h100", "cpu"])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"schedule": "static"}, "plan: schedule='static' with publish=; it must be 'auto' or 'dynamic': with these"),
        ({"schedule": "stream_k"}, "plan: schedule='stream_k' with publish=; it must be 'auto' or 'dynamic'"),
        ({"weight_arrival": ts.Arrival.uniform(64, 4)}, "plan: publish= with arrival=: after an expired deadline"),
        ({"publish": ts.Arrival.uniform(100, 3)},
         "publish: 3 chunks of 100 rows bring 201 to 300 rows, the result has 512"),
    ],
)  # fmt: skip
def test_what_the_op_refuses_the_plan_refuses(device, how, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        asked(device=device, **{"publish": ts.Arrival.uniform(128, 4), **how})


def test_where_a_reader_begins_is_said():
    own = ts.Arrival.uniform(128, 4, signals=torch.zeros(4, dtype=torch.int32))
    for publish, says in ((ts.Arrival.uniform(128, 4), "the first"), (own, "the last, since the words are your own")):
        assert f"a launch that reads them here begins behind {says}" in asked(publish=publish).explain()
