"""The portable grouped kernel in Triton's interpreter: where groups end, what no group has, offsets that are none."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from interpreted import DEVICE, Words, awaited, crossed, laid_out, recorded
from test_portable_arrival import expired

from error_rule import ACTIVATIONS, check, passes, rand
from grouped_cases import expected, offsets_of
from tilestream.core.groups import by_load
from tilestream.core.operands import HALVES, Epilogue, GroupedOperands
from tilestream.ops.grouped_library import launch_of, problem_of
from tilestream.plan.grouped import plan_groups
from tilestream.runtime.device_workspace import DeviceWorkspace, captured_words

F16, F32 = torch.float16, torch.float32
SCHEDULES = ("static", "dynamic")
#: Rows (K) of each group: uneven ones; all in one; empty ones, at either end too; fewer than there are; one group.
SIZES = [(5, 17, 1, 32, 16), (0, 0, 71, 0, 0), (0, 3, 0, 0, 64, 0), (16, 0, 7), (71,)]
#: Rows (K) of all operands.
EXTENT = 71


def made(a, b, sizes, schedule="dynamic", workers=5, epilogue=Epilogue(), out=None, arrives=False):  # noqa: B008
    """``(plan, operands)`` with an output of NaN."""
    columns = b.shape[-1] // (2 if epilogue.activation in HALVES else 1)
    shape = (a.shape[0], columns) if b.dim() == 3 else (len(sizes), a.shape[0], columns)
    out = (
        torch.full(shape, float("nan"), dtype=torch.bfloat16 if a.dtype.itemsize == 1 else a.dtype)
        if out is None
        else out
    )
    x = GroupedOperands(a, b, out, epilogue, offsets_of(sizes))
    problem = replace(problem_of(x), arrives=arrives)
    return plan_groups.__wrapped__(problem, workers, schedule, device=DEVICE, backend="portable"), x


def run(a, b, sizes, *how, **more):
    """The result of the kernel, which keeps the error rule."""
    plan, x = made(a, b, sizes, *how, **more)
    launch_of(plan, x)(x)
    for answer, maths in expected(x):
        check(answer, maths)
    if b.dim() == 3:
        assert not x.out[sum(sizes) :].any(), "rows of no group are zero"
    return x.out


def operands(sizes, along, dtype=F32, layout="nt", n=33, k=40):
    if along == "k":
        return laid_out(n, EXTENT, layout[0], dtype), laid_out(EXTENT, 18, layout[1], dtype)
    b = torch.stack([laid_out(k, n, layout[1], dtype, 0) for _ in sizes])
    return laid_out(EXTENT, k, layout[0], dtype), b.mT.contiguous().mT if layout[1] == "t" else b


@pytest.mark.parametrize("along", ["rows", "k"])
@crossed("sizes, schedule", SIZES, SCHEDULES, ids=str)
def test_groups_of_any_size(sizes, schedule, along):
    run(*operands(sizes, along), sizes, schedule)


@pytest.mark.parametrize("along", ["rows", "k"])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "ss"])
def test_layouts(layout, along):
    sizes = SIZES[0]
    run(*operands(sizes, along, F16, layout), sizes)


@pytest.mark.parametrize("along", ["rows", "k"])
@crossed("workers, schedule", [1, 2, 7, 33], SCHEDULES)
def test_every_number_of_workers(workers, schedule, along):
    run(*operands(SIZES[2], along), SIZES[2], schedule, workers)


def test_every_small_size():
    for first, second, k in itertools.product((0, 1, 15, 16, 17), (0, 1, 16, 33), (0, 1, 17)):
        rows = first + second + 2
        run(rand(rows, k), rand(2, k, 17), (first, second), workers=3)


@pytest.mark.parametrize("groups", [32, 33, 256])
def test_more_groups_than_rows(groups):
    sizes = [0] * groups
    for row in range(0, 40, 3):
        sizes[row * 7 % groups] += 3
    run(rand(50, 16), rand(groups, 16, 16), sizes)


@pytest.mark.parametrize("along", ["rows", "k"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogue(activation, along):
    sizes = SIZES[2]
    a, b = operands(sizes, along)
    groups, (rows, columns) = len(sizes), (a.shape[0], b.shape[-1])
    bias = rand(groups, columns)[:, None, :]
    scale_a = rand(rows, 1, seed=3) if along == "rows" else rand(groups, rows, seed=3)[:, :, None]
    epilogue = Epilogue(1.0, bias, None, 1.0, activation or "none", scale_a, rand(groups, 2 * columns)[:, None, ::2])
    run(a, b, sizes, epilogue=epilogue)


def test_a_bias_a_row_and_a_scale_an_operand():
    sizes = SIZES[0]
    a, b = operands(sizes, "rows")
    run(a, b, sizes, epilogue=Epilogue(bias=rand(EXTENT, 1), scale_a=rand(1), scale_b=rand(1)))


def test_operands_of_8_bits():
    sizes = SIZES[0]
    a, b = rand(EXTENT, 48).to(torch.float8_e4m3fn), rand(5, 33, 48).to(torch.float8_e4m3fn).mT
    run(a, b, sizes, epilogue=Epilogue(scale_a=rand(EXTENT, 1), scale_b=rand(5, 1, 33)))


@crossed("columns, sizes", [2, 14, 66], SIZES[:3], ids=str)
def test_swiglu_of_two_halves(columns, sizes):
    """Of halves that end inside a tile, and of ones that are several."""
    run(*operands(sizes, "rows", n=columns), sizes, epilogue=Epilogue(activation="swiglu"))


def test_swiglu_with_everything():
    sizes, halves = SIZES[2], 2 * 27
    a, b = operands(sizes, "rows", F16, "nn", n=halves)
    bias, scale_b = rand(len(sizes), 2 * halves)[:, None, ::2], rand(len(sizes), 1, halves)
    epilogue = Epilogue(1.0, bias, None, 1.0, "swiglu", rand(EXTENT, 1, seed=3), scale_b)
    store = torch.full((EXTENT + 2, 60), float("nan"), dtype=F16)
    run(a, b, sizes, epilogue=epilogue, out=store[1:-1, 2 : 2 + 27])
    assert store[[0, -1]].isnan().all()
    assert store[:, :2].isnan().all()
    assert store[:, 29:].isnan().all()


def blocks(sizes, k, n, seed=5):
    """Operands of 8 bits, and their scales of blocks, whose neighbours differ much."""
    a, b = rand(EXTENT, k).to(torch.float8_e4m3fn), rand(len(sizes), n, k).to(torch.float8_e4m3fn).mT
    of_k, of_n = -(-k // 128), -(-n // 128)
    scale_a = torch.exp2(rand(EXTENT, of_k, seed=seed).clamp(-2, 2).round())
    return a, b, scale_a, torch.exp2(rand(len(sizes), of_n, of_k, seed=seed + 1).clamp(-2, 2).round()).mT


@crossed("activation, shape", ["none", "swiglu"], [(140, 150), (160, 130), (40, 33), (272, 264)], ids=str)
def test_scales_of_blocks(activation, shape):
    """Of K that ends inside a block; of halves of which the second begins inside one."""
    (k, n), sizes = shape, SIZES[2]
    n -= n % 2
    a, b, scale_a, scale_b = blocks(sizes, k, n)
    bias = rand(len(sizes), n)[:, None, :] if activation == "swiglu" else None
    run(a, b, sizes, epilogue=Epilogue(bias=bias, activation=activation, scale_a=scale_a, scale_b=scale_b))


def test_a_scale_of_another_block_is_found():
    """The check of these tests sees a block's scale that is another's."""
    sizes = SIZES[0]
    a, b, scale_a, scale_b = blocks(sizes, 140, 150)
    plan, x = made(a, b, sizes, epilogue=Epilogue(scale_a=scale_a, scale_b=scale_b))
    launch_of(plan, x)(x)
    changes = [{"scale_a": scale_a.roll(1, dim)} for dim in range(2)]
    changes += [{"scale_b": scale_b.roll(1, dim)} for dim in range(3)]
    for change in changes:
        wrong = x._replace(epilogue=x.epilogue._replace(**change))
        assert not all(passes(answer, maths.finer(), maths.by_torch()) for answer, maths in expected(wrong))


def test_outputs_of_any_strides_and_nothing_beside_them():
    sizes = SIZES[0]
    a, b = operands(sizes, "rows")
    store = torch.full((EXTENT + 2, 101), float("nan"))
    run(a, b, sizes, out=store[1:-1, 1:100:3])
    assert store[:, ::3].isnan().all()
    assert store[:, 2::3].isnan().all()
    assert store[[0, -1]].isnan().all()
    columns = torch.full((33, EXTENT), float("nan"))
    run(a, b, sizes, out=columns.t())


@pytest.mark.parametrize("along", ["rows", "k"])
@pytest.mark.parametrize("ends", [(5, 3, 71), (-1, 4, 71), (3, 9, 72), (2**31 - 1, 3, 71), (0, -(2**31), 5)], ids=str)
def test_offsets_that_are_none_give_nan_and_touch_nothing_else(ends, along):
    a, b = operands(ends, along)
    plan, x = made(a, b, (0, 0, 0))
    store = torch.full((2 * x.out.numel() + 64,), 7.0)
    out = store[32 : 32 + x.out.numel()].view(x.out.shape)
    x = x._replace(out=out, offsets=torch.tensor(ends, dtype=torch.int32))
    launch_of(plan, x)(x)
    assert out.isnan().all()
    assert (store[:32] == 7).all()
    assert (store[32 + out.numel() :] == 7).all()


def test_a_launch_that_a_graph_replays_reads_the_offsets_of_each_replay(monkeypatch):
    a, b = operands(SIZES[0], "rows")
    plan, x = made(a, b, SIZES[0])
    own = captured_words(torch.device("cpu"), plan.schedule, plan.block)
    space = DeviceWorkspace(torch.device("cpu"))
    monkeypatch.setattr(space, "open", lambda *_: own)
    monkeypatch.setattr("tilestream.launch.launch.device_workspace", lambda *_: space)
    launch = launch_of(plan, x)
    for sizes in (SIZES[0], (0, 71, 0, 0, 0), (0, 0, 0, 0, 0), (1, 1, 1, 1, 1)):
        x.offsets.copy_(offsets_of(sizes))
        x.out.fill_(float("nan"))
        launch(x)
        for answer, maths in expected(x):
            check(answer, maths)
        assert not x.out[sum(sizes) :].any()
        assert not own.counters.any(), "the last worker out restores the counters"


def test_a_trace_has_each_tile_that_there_is():
    sizes = SIZES[2]
    plan, x = made(*operands(sizes, "rows"), sizes)
    launch = recorded("grouped_mm", plan, lambda log: launch_of(plan, x)(x, None, log))
    tiles = [(span.pm, span.pn) for spans in launch.by_worker for span in spans]
    assert len(set(tiles)) == len(tiles) == sum(-(-size // 16) for size in sizes) * 3


@crossed("sizes, schedule", SIZES, SCHEDULES, ids=str)
def test_groups_whose_matrices_arrive(sizes, schedule):
    """What has rows has come; what has none never does."""
    plan, x = made(*operands(sizes, "rows"), sizes, schedule, arrives=True)
    assert "each group's matrix of B" in plan.explain()
    words = Words(len(sizes), epoch=3).arrive(*(g for g, size in enumerate(sizes) if not size))
    launch_of(plan, x)(x, awaited(columns=words))
    for answer, maths in expected(x):
        check(answer, maths)
    assert not x.out[sum(sizes) :].any()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("missing", range(5))
def test_a_matrix_that_does_not_come_is_nan_and_named(missing, schedule):
    sizes = SIZES[0]
    plan, x = made(*operands(sizes, "rows"), sizes, schedule, arrives=True)
    launch_of(plan, x)(x, awaited(columns=Words(5).arrive(missing)))
    late = [rows.isnan() for rows, _ in expected(x)]
    assert late[missing].all()
    for rows, maths in expected(x):
        there = ~rows.isnan()
        torch.testing.assert_close(rows[there], (maths.a @ maths.b)[there])
    error = expired("weight_arrival's chunk")
    assert error.chunk == missing
    assert f"batch {missing}, " in error.item


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_tiles_are_taken_most_rows_first(sizes):
    """The device's order is that in which the host has the matrices copied."""
    plan, x = made(*operands(sizes, "rows", n=16), sizes, "dynamic", 1, arrives=True)
    words = Words(len(sizes)).arrive()
    launch = recorded("grouped_mm", plan, lambda log: launch_of(plan, x)(x, awaited(columns=words), log))
    tiles = [span.pm for span in sorted(launch.by_worker[0], key=lambda span: span.begin)]
    assert tiles == sorted(tiles)
    order, used = by_load(x.offsets.tolist())
    seen, begins = [], [0, *x.offsets.tolist()]
    for count in range(used):  # those behind are late: a prefix of the order is right
        plan, x = made(*operands(sizes, "rows", n=16), sizes, "dynamic", 1, arrives=True)
        words = Words(len(sizes)).arrive(*order[count:])
        launch_of(plan, x)(x, awaited(columns=words))
        expired()
        seen.append([g for g in order[:used] if not x.out[begins[g] : begins[g + 1]].isnan().any()])
    assert seen == [order[:count] for count in range(used)]


def test_offsets_that_are_none_wait_for_nothing():
    plan, x = made(*operands((0, 0, 0), "rows"), (0, 0, 0), arrives=True)
    x = x._replace(offsets=torch.tensor((5, 3, 71), dtype=torch.int32))
    launch_of(plan, x)(x, awaited(columns=Words(3)))
    assert x.out.isnan().all()


def test_the_reference_finds_a_wrong_group():
    """The check of these tests sees a row that was multiplied with a neighbour's matrix."""
    sizes = (3, 2)
    plan, x = made(rand(5, 8), rand(2, 8, 4), sizes)
    launch_of(plan, x)(x)
    x.out[3] = x.a[3] @ x.b[0]
    (_, _), (answer, maths) = expected(x)
    with pytest.raises(AssertionError):
        check(answer, maths)
