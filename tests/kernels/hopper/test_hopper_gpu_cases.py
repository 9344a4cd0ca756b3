"""What the GPU tests of the Hopper kernel are made of, as far as it can be seen without a GPU: the data they run on."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

pytest.importorskip("triton")

import torch

from tilestream.kernels.hopper.attention import attend


def test_every_case_has_a_plan_of_its_own(cases):
    assert len(cases.CASES) >= 400
    names = Counter(case.name for case in cases.CASES)
    assert names.most_common(1)[0][1] == 1
    for case in (*cases.launched(), *cases.PROBE_CASES):
        plan, layout = case.plan(cases._ANY)
        assert plan.backend == "hopper"
        assert (plan.variant, plan.tile) == (case.variant, case.tile)
        assert case.swapped in (None, plan.swap_ab)
        assert layout.scaled == (case.alpha != 1)


def test_every_tile_is_run_both_ways_round_and_stored_both_ways(cases):
    from tilestream.launch.hopper.arguments import Arguments

    seen = Counter()
    for case in cases.CASES:
        plan, layout = case.plan(cases._ANY)
        made = Arguments(plan, layout, case.output("meta")[0].data_ptr() % 16 == 0)
        rows = plan.tile[::-1] if plan.swap_ab else plan.tile
        seen[(plan.variant, *rows, plan.swap_ab, made.out is None)] += 1
    for row in (*cases.TILES, *cases.TRIPLE, *cases.PAIRED):
        for swapped in (False, True)[: len(cases.ways(row))]:
            assert seen[row.variant, row.rows, row.columns, swapped, False] >= 2
            assert seen[row.variant, row.rows, row.columns, swapped, True] >= 2


def test_rows_that_stand_apart_do_where_it_says(cases):
    from tilestream.launch.hopper.arguments import Arguments

    seen = Counter()
    for case, first, height, period, there in cases.APART:
        plan, layout = case.plan(cases._ANY)
        assert plan.problem.m % period == 0
        tiles = Arguments(plan, layout).local_tiles(first, height, period)
        assert (tiles is not None) == there, case.name
        seen[plan.variant, there] += 1
        seen["batches", plan.problem.m // period] += there
        seen["first", first > 0] += there
    assert min(seen[key] for key in itertools.product(("single", "cooperative", "ping_pong"), (True, False))) >= 1
    assert min(seen[key] for key in (("batches", 1), ("batches", 3), ("first", False), ("first", True))) >= 3


def test_arriving_cases_wait_and_leave_sms_to_whoever_copies(cases):
    seen = Counter()
    for case in (*cases.ARRIVING, *cases.GATED):
        plan, _ = case.plan(cases._ANY)
        assert plan.gate is not None
        assert plan.workers <= 66
        assert plan.schedule.raster.order in ("chunk_major", "table")
        for bounds, incoming in ((case.rows, plan.problem.rows), (case.columns, plan.problem.columns)):
            assert (incoming.chunks.bounds, incoming.pivot) == (bounds, case.pivot) if bounds else incoming is None
            ragged = None if incoming is None else not incoming.chunks.rows_per_chunk
            seen[plan.variant, plan.schedule.kind, ragged] += 1
        seen[case.layout] += 1
        seen[plan.variant, plan.swap_ab] += 1
    for variant in ("cooperative", "ping_pong", "single"):
        assert all(seen[variant, kind, how] for kind in ("static", "dynamic", "stream_k") for how in (True, False))
        assert seen[variant, False]
    assert seen["ping_pong", True]
    assert all(seen[layout] >= 5 for layout in ("nn", "nt", "tn", "tt"))


def test_operands_and_outputs_lie_in_nan(cases):
    import torch

    for case in cases.CASES[::29]:
        if case.m * case.n * max(case.batch, 1) > 1e6:
            continue
        operands, (out, around) = case.operands("cpu"), case.output("cpu")
        given = [x for x in operands.values() if x is not None]
        assert not any(x.float().isnan().any() for x in given)
        assert around.isnan().all()
        for x in (operands["a"], operands["b"]):
            whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
            shared = 0 in x.stride()
            assert int(whole.float().isnan().sum()) == whole.numel() - x.numel() // (x.shape[0] if shared else 1)
        out.zero_()
        assert int(around.isnan().sum()) == around.numel() - out.numel()


def test_operands_that_are_spoiled_hold_nan_and_infinity(cases):
    """Of each dtype that does; a result has other rows and columns."""
    seen = Counter()
    for case in cases.SPOILED:
        operands = case.operands("cpu")
        a, b = operands["a"], operands["b"]
        cases.spoil(a, b)
        assert a[7].float().isnan().all()
        assert b[:, 3].float().isinf().all()
        finite = torch.isfinite(a.float().double() @ b.float().double())
        assert int(finite.sum()) == (case.m - 1) * (case.n - 1)
        seen.update([*{(case.variant, case.dtype), (case.variant, case.schedule)}])
    for variant in {case.variant for case in cases.CASES}:
        assert all(seen[variant, dtype] for dtype in (torch.bfloat16, torch.float16, torch.float32)), variant
    assert sum(seen[variant, torch.float8_e5m2] for variant, *_ in cases.TILES)
    assert sum(seen[variant, "stream_k"] for variant, *_ in cases.TILES)


def test_cases_of_the_sanitizer_fill_their_rings(cases):
    import consan_attention as attention
    import consan_program as program

    for case in program.CASES.values():
        plan, _ = program.plan_of(case, cases._ANY)
        assert plan.stages == 2
        assert plan.schedule.grid.tiles > 2, "more than the item ring has slots"
        assert plan.schedule.grid.k_steps > 3
        assert plan.workers == 1
    for case in attention.CASES.values():
        plan = case.plan(cases._ANY)
        assert (plan.block, plan.stages, plan.variant, plan.shares) == ((128, 32), 1, case.variant, case.shares)
        assert plan.schedule.grid.tiles > 2
        assert min(case.keys) // plan.shares > 2 * plan.block[1]
        assert plan.workers == 1


@pytest.mark.parametrize(
    "name",
    ["attention", "attention in turns", "attention, pages of 8", "attention in shares", "attention in 8 bits"],
)  # fmt: skip
def test_what_goes_through_the_sanitizer_is_right(cases, name):
    """Its arguments, on the machine that runs the kernel's text, and its own check of the answer."""
    import consan_attention as attention
    import numpy as np
    from attention_machine import Machine

    ready = attention.prepared(attention.CASES[name], "cpu", cases._ANY)
    with pytest.raises(AssertionError):
        ready.check()
    given = dict(zip(attend.arg_names, ready.filled, strict=True))
    stored = {key: given[f"{key}_map"].base for key in ("q", "k", "v", "out")}
    stored |= {
        key: given[key]
        for key in ("lse", "seqlens_k", "block_table", "scale_q", "scale_k", "scale_v")
        if given[key] is not None
    }
    kept = {
        key: x.detach().as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,)) for key, x in stored.items()
    }
    flat = {key: x.numpy() if x.dtype == torch.int32 else x.double().numpy() for key, x in kept.items()}
    plan = ready.arguments.plan
    for key, made in (("q", ready.arguments.q), ("out", ready.arguments.out)):
        assert list(made.strides) == list(given[f"{key}_map"].strides)
    Machine(ready.arguments, flat, list(range(plan.schedule.full_tiles)), 64**-0.5)
    for key in ("out", "lse"):
        kept[key].copy_(torch.from_numpy(np.asarray(flat[key])))
    ready.check()
