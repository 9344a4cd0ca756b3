"""The time of planning a new shape: CPU time of plans for an H100, made without it.

The process is warm: earlier shapes had the same dtypes and flags, and none had these extents. Each shape is planned
``ROUNDS`` times. Plans are forgotten between rounds, and the least time counts, because other work may run on the
machine.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import tilestream as ts
from benchmarks.core.records import Row
from benchmarks.core.session import Session
from benchmarks.gemm.draw import Draw, draws
from tilestream.plan import plan_attention, plan_groups, plan_problem

DEVICE = "h100"
#: Shapes of a row; the shapes planned before, for the caches of what no extent decides; the seed; rounds.
COUNT, BEFORE, SEED, ROUNDS = 300, 60, 77, 5
Plan = Callable[[], object]


def matmul(shape: Draw, **more: object) -> Plan:
    """A matmul's plan."""
    how = {"batch": shape.batch, "dtype": shape.dtype, "layout": shape.layout, "scales": shape.scales, **more}
    return lambda: ts.plan(shape.m, shape.n, shape.k, device=DEVICE, **how)


def in_chunks(rows: int) -> ts.Arrival:
    """Eight chunks; seldom a whole number of tiles each."""
    return ts.Arrival.uniform(-(-rows // 8), 8)


def groups(chance: random.Random) -> Plan:
    """A grouped matmul's plan."""
    m, n, k = (16 * chance.randrange(4, 600) for _ in range(3))
    count = chance.choice((8, 64))
    return lambda: ts.grouped_plan(m, n, k, count, device=DEVICE)


def attention(chance: random.Random) -> Plan:
    """An attention's plan: half of them causal, some with few queries."""
    queries = chance.choice((1, chance.randrange(2, 512), chance.randrange(512, 8192)))
    keys = queries + chance.choice((0, chance.randrange(8192)))
    how = {"batch": chance.choice((1, 2, 8)), "heads_kv": chance.choice((4, 8, 32))}
    how |= {"head_dim": chance.choice((64, 128)), "causal": chance.random() < 0.5}
    return lambda: ts.attention_plan(queries, keys, heads_q=32, device=DEVICE, **how)


def problems(count: int) -> dict[str, list[Plan]]:
    """The plans of each row."""
    shapes, chance = draws(SEED, count), random.Random(SEED)
    large = [shape for shape in shapes if shape.outputs >= 64]
    return {
        "matmul": [matmul(shape) for shape in shapes],
        "matmul, invariant": [matmul(shape, invariant=True) for shape in shapes],
        "matmul, rows arrive": [matmul(shape, arrival=in_chunks(shape.outputs)) for shape in large],
        "matmul, rows are published": [matmul(shape, publish=in_chunks(shape.outputs)) for shape in large],
        "grouped_mm": [groups(chance) for _ in range(count)],
        "attention": [attention(chance) for _ in range(count)],
    }


def milliseconds(plan: Plan) -> float:
    begin = time.process_time_ns()
    plan()
    return (time.process_time_ns() - begin) * 1e-6


def row_of(what: str, plans: list[Plan], before: int) -> Row:
    """The quantiles of a row's shapes, without those that are planned ``before``."""
    rounds = []
    for _ in range(ROUNDS):
        for planner in (plan_problem, plan_groups, plan_attention):
            planner.cache_clear()
        rounds.append([milliseconds(plan) for plan in plans][before:])
    least = [min(times) for times in zip(*rounds, strict=True)]
    parts = statistics.quantiles(least, n=20, method="inclusive")
    ms = {"25 %": parts[4], "median": parts[9], "75 %": parts[14], "95 %": parts[18]}
    return {"what": what, "shapes": len(least), "ms": {name: round(value, 3) for name, value in ms.items()}}


def planning(session: Session) -> None:
    """A row for each op."""
    record = session.record("planning", cpu=True, gpu=DEVICE, rounds=ROUNDS)
    for what, plans in problems(COUNT + BEFORE).items():
        record.add(row_of(what, plans, BEFORE))
