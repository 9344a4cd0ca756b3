"""The Hopper grouped kernel: its whole text in threads (`hopper_threads`), as real plans launch it.

`test_hopper_experts` has the parts of groups, their epilogues and scales. Here the load warp takes tickets, finds each
item's group, and hands it through the item ring to the math warps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hopper_threads import Deadlock, Machine, Pointer, TensorMap

from error_rule import check, passes, rand
from grouped_cases import expected, offsets_of
from mutants.engine import at, replace
from tilestream.core.gpu_specs import named
from tilestream.core.operands import Epilogue, GroupedOperands
from tilestream.kernels.device.schedule import LINE
from tilestream.ops.grouped_library import launch_of, problem_of
from tilestream.plan.candidate import Asked
from tilestream.plan.grouped import hopper_candidates
from tilestream.plan.plan import of_candidate

BF16 = torch.bfloat16
DEVICE = named("h100")
GROUPED, GEMM = "tilestream.kernels.hopper.grouped", "tilestream.kernels.hopper.gemm"
GROUPS = "tilestream.kernels.device.groups"
#: Rows of each group: several tiles, none, few; and rows that belong to none.
SIZES, REST = (0, 130, 3, 0, 70), 6
COOPERATIVE, PING_PONG = ("cooperative", (128, 128)), ("ping_pong", (64, 128))
SINGLE, SWAPPED = ("single", (64, 32)), ("single", (16, 64))


def of_rows(k: int = 104, n: int = 136, sizes: Any = SIZES, e: Epilogue = Epilogue()) -> GroupedOperands:  # noqa: B008
    rows = sum(sizes) + REST
    a, b = rand(rows, k).to(BF16), rand(len(sizes), n, k, seed=1).to(BF16).mT
    return GroupedOperands(a, b, torch.full((rows, n), float("nan"), dtype=BF16), e, offsets_of(sizes))


def of_k(sizes: Any = (70, 0, 330, 3), m: int = 136, n: int = 72) -> GroupedOperands:
    k = sum(sizes) + REST
    a, b = rand(k, m).to(BF16).mT, rand(k, n, seed=1).to(BF16)
    a[:, sum(sizes) :] = float("nan")  # of no group
    out = torch.full((len(sizes), m, n), float("nan"), dtype=BF16)
    return GroupedOperands(a, b, out, Epilogue(), offsets_of(sizes))


def run(
    x: GroupedOperands, how: tuple[str, tuple[int, int]], schedule: str = "dynamic", workers: int = 2, base: int = 55,
    edits: Any = (),
) -> torch.Tensor:  # fmt: skip
    """Launch the kernel's text; the counters that it leaves."""
    variant, tile = how
    problem = problem_of(x)
    fit = hopper_candidates(problem, DEVICE, workers, Asked(schedule=schedule, tile=tile))
    plan = of_candidate(problem, DEVICE, "hopper", next(one for one in fit if one.variant == variant), "a test's")
    made, swap, along_k = launch_of(plan, x)._made[False], plan.swap_ab, x.b.dim() == 2
    a, b = (x.a.mT, x.b) if along_k else (x.a[None], x.b.mT)
    operands: list[Any] = [(made.x, b if swap else a), *((one, a if swap else b) for one in made.y)]
    maps = [None if one is None else TensorMap(tensor, one.box[-2:]) for one, tensor in operands]
    out, e = TensorMap(x.out, made.out.box[-2:]), x.epilogue
    out.dtype = x.out.dtype
    scales = (e.scale_b, e.scale_a) if swap else (e.scale_a, e.scale_b)
    counters = torch.full((64 * LINE.value,), base, dtype=torch.int64)  # what an earlier launch has left
    given = made.fill((
        *maps, out, x.offsets, x.out, e.bias, None, *scales, None, None, counters, None, None, base, int(not base),
        1.0, 1.0,
    ))  # fmt: skip
    Machine(edits).launch(
        made.kernel, plan.schedule.workers, [Pointer(one) if isinstance(one, torch.Tensor) else one for one in given]
    )
    assert (out.stored <= 1).all(), "an element is stored twice"
    return counters


def is_right(x: GroupedOperands) -> bool:
    return all(passes(part, maths.finer(), maths.by_torch()) for part, maths in expected(x))


@pytest.mark.parametrize("how", [COOPERATIVE, PING_PONG, SINGLE, SWAPPED], ids=str)
@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_groups_of_rows(how, schedule):
    x = of_rows()
    run(x, how, schedule)
    for part, maths in expected(x):
        check(part, maths)
    assert (x.out[sum(SIZES) :] == 0).all(), "rows of no group are zero"


@pytest.mark.parametrize("how", [COOPERATIVE, PING_PONG, SINGLE], ids=str)
@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_groups_of_k(how, schedule):
    x = of_k()
    run(x, how, schedule)
    for part, maths in expected(x):
        check(part, maths)


def test_a_lane_looks_at_several_groups():
    sizes = [0] * 70
    sizes[3], sizes[33], sizes[69] = 40, 1, 70
    x = of_rows(16, 32, sizes, Epilogue(bias=rand(70, 1, 32), activation="gelu"))
    run(x, SINGLE, workers=3)
    for part, maths in expected(x):
        check(part, maths)


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_a_launch_has_counters_where_it_draws_tickets(schedule):
    problem = problem_of(x := of_rows())
    fit = hopper_candidates(problem, DEVICE, 2, Asked(schedule=schedule, tile=(128, 128)))
    plan = of_candidate(problem, DEVICE, "hopper", next(fit), "a test's")
    assert (launch_of(plan, x)._schedule is not None) == (schedule == "dynamic")


@pytest.mark.parametrize("offsets", [(3, 2, 5, 5, 6), (-1, 2, 5, 5, 6), (0, 2, 5, 5, 300)], ids=str)
def test_offsets_that_are_none_make_all_rows_nan(offsets):
    x = of_rows()
    x.offsets.copy_(torch.tensor(offsets))
    run(x, COOPERATIVE)
    assert x.out.isnan().all()


def test_a_captured_launch_leaves_its_words_as_they_were():
    x = of_rows()
    for _ in range(2):
        x.out.fill_(float("nan"))
        assert not run(x, PING_PONG, base=0).any()
        assert is_right(x)


FAULTS = {
    "a tile has another group's matrix": (
        of_rows, COOPERATIVE, GROUPS + ":find_rows", "tl.sum(before.to(tl.int32), 0)",
        "tl.sum(before.to(tl.int32), 0) * 0",
    ),
    "a tile is clipped at all rows' end": (
        of_rows, COOPERATIVE, GROUPED + ":hand_on_group", "put(items.slots, slot.at, END, span.end, 1)",
        "put(items.slots, slot.at, END, span.end * 0 + 203, 1)",
    ),
    "STOP is not handed on": (
        of_rows, PING_PONG, GROUPED + ":hand_on_group", "hand_on(items, slot, found, item, C)",
        "hand_on(items, slot, found, item, C) if found else slot",
    ),
    "a ticket that was prefetched is lost": (
        of_k, SINGLE, GEMM + ":prefetch_next", "with_asked(cursor, __ticket)", "with_asked(cursor, __ticket + 1)",
    ),
    "the steps before the ticket are loaded twice": (
        of_k, PING_PONG, GROUPED + ":load_loop",
        "load_group_steps(item, span, loads, ring, stage, k_begin, item.k_end, C)",
        "load_group_steps(item, span, loads, ring, stage, item.k_begin, item.k_end, C)",
    ),
    "a group without K has no step": (
        of_k, SINGLE, GROUPED + ":find_group", "tl.maximum(cdiv(span.end - span.begin, C.BLOCK_K), 1)",
        "cdiv(span.end - span.begin, C.BLOCK_K)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_text_is_seen(fault):
    made, how, where, find, text = FAULTS[fault]
    try:
        x = made()
        run(x, how, edits=at(where, replace(find, text)))
        seen = not is_right(x)
    except (Deadlock, AssertionError):
        seen = True
    assert seen
