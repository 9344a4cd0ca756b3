"""When a plan takes arrival order, and what it says where it does not."""

from __future__ import annotations

import re

import pytest
from made_up import reason

import tilestream as ts

ROWS = ts.Arrival.uniform(256, 16)


def planned(*extents: int, **how) -> ts.Plan:
    m, n, k = extents or (4096, 4096, 4096)
    return ts.plan(m, n, k, dtype="bfloat16", **{"device": "h100", "schedule": "dynamic", "arrival": ROWS, **how})


def why_not(plan: ts.Plan) -> str:
    assert plan.schedule.split != "chunks"
    return reason(plan, "arrival order")


@pytest.mark.parametrize("backend", ["hopper", "portable", "cpu"])
def test_a_dynamic_schedule_of_one_operand_has_it_by_itself(backend):
    how = {"device": "cpu", "workers": 4} if backend == "cpu" else {"backend": backend}
    for arrivals in ({}, {"arrival": None, "weight_arrival": ROWS}):
        plan = planned(**how, **arrivals)
        assert (plan.backend, plan.schedule.split) == (backend, "chunks")
        assert reason(plan, "arrival order") is None
        assert plan.label.count("queues in arrival order") == 1
        assert "queue whose chunks have arrived: costs an atomic add an item" in plan.explain()
        assert "candidates in the cost model" in plan.why


def test_as_many_queues_as_chunks_where_tiles_are_whole_chunks_else_one_more_for_each_tile_across():
    assert planned(tile=(128, 128)).schedule.queues == 16
    ragged = ts.Arrival.ragged((0, 100, 100, 300, 4096))
    # Row tiles 0, 1, 2 and the rest read chunks (0, 2), (2,), (2, 3) and (3,).
    assert planned(tile=(128, 128), arrival=ragged).schedule.ends == (32, 64, 96, 1024)


def test_by_name():
    assert planned(order="arrival", schedule="auto").schedule.split == "chunks"
    plan = planned(order="chunk_major")
    assert (plan.schedule.split, plan.schedule.raster.order) == ("items", "chunk_major")
    assert why_not(plan) == "order='chunk_major' given"
    assert planned(order="chunk_major") is plan, "a name is looked up like any other argument"
    assert planned() != plan


def test_a_batched_arrival_goes_batch_by_batch():
    plan = ts.plan(
        512, 512, 512, batch=4, dtype="bfloat16", device="h100", schedule="dynamic", tile=(128, 128),
        arrival=ts.Arrival.uniform(512, 4, 2),
    )  # fmt: skip
    assert plan.schedule.ends == (16, 32, 48, 64)
    assert [plan.schedule.ticket(queue, 0)[0].batch for queue in range(4)] == [2, 3, 0, 1]


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"schedule": "static"}, "only dynamic schedules have queues for chunks, this one is static"),
        ({"schedule": "stream_k"}, "only dynamic schedules have queues for chunks, this one is stream_k"),
        ({"queues": 3}, "queues=3 given: they split the dimension that does not arrive"),
        ({"weight_arrival": ROWS}, "both operands arrive, and a queue waits for chunks of one"),
        ({"device": "mi300x", "backend": "cdna"}, "the CDNA kernel takes items in the raster's order"),
        ({"arrival": ts.Arrival.uniform(128, 33), "tile": (128, 128), "extents": (4224, 4096, 4096)},
         "33 queues, one for each set of chunks that tiles read: there are 32 at most"),
    ],
)  # fmt: skip
def test_refused_and_why(how, why):
    how = dict(how)
    extents = how.pop("extents", ())
    assert why_not(planned(*extents, **how)) == why
    with pytest.raises(ValueError, match=re.escape(f"order='arrival': {why}; leave order= away")):
        planned(*extents, order="arrival", **how)


def test_the_caller_s_own_order_is_kept_and_nothing_is_as_good_in_any():
    plan = planned(256, 256, 64, arrival=ts.Arrival.uniform(128, 2), tile=(128, 128), order=[3, 2, 1, 0])
    assert why_not(plan) == "the caller's own order is kept"
    assert why_not(planned(0, 64, 64, arrival=ts.Arrival.ragged((0, 0)))) == "there is no tile"


def test_without_arrival_nothing_is_said_of_it():
    plan = planned(arrival=None)
    assert (plan.schedule.ends, why_not(plan)) == ((), None)
