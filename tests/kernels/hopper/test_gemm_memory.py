"""What loads bring to shared memory is what multiplications read: of each layout, tile, and CTA of a pair."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton")

from gemm_memory import multiplied

from mutants.engine import at, replace
from mutants.kernel_text import HOPPER
from tilestream.core.structs import Item
from tilestream.launch.hopper import arguments as launch_arguments
from tilestream.launch.hopper.arguments import Arguments
from tilestream.plan.problem import ITEMSIZE


def differs(cases, case, edits=()) -> bool:
    """Whether something else is multiplied than is meant: a case's first tile, in its first K steps; its last's last.

    Two steps: a stage of the ring, and the one behind it.
    """
    plan, layout = case.plan(cases._ANY)
    arguments = Arguments(plan, layout)
    config, grid = arguments.config, plan.schedule.grid
    batch, turn = max(case.batch, 1), -1 if plan.swap_ab else 1
    x, y = [
        np.random.default_rng(7).random((1 if name in case.shared else batch, extent, case.k), np.float32)
        for name, extent in (("a", case.m), ("b", case.n))
    ][::turn]
    sizes = tuple(ITEMSIZE[dtype] for dtype in plan.problem.dtypes)[::turn]
    x_mapped = (x if config.X_K_MAJOR else x.swapaxes(1, 2)).reshape(arguments.x.shape)
    y_mapped = (y if config.Y_K_MAJOR else y.swapaxes(1, 2)).reshape(arguments.y[0].shape)
    steps = min(2, grid.k_steps)
    last = batch - 1, grid.num_m - 1, grid.num_n - 1
    for place, begin in (((0, 0, 0), 0), (last, grid.k_steps - steps)):
        item = Item(*place, begin, begin + steps, 0, 1, 0, 0)
        rows, all_columns = multiplied(arguments, x_mapped, y_mapped, sizes, item, edits)
        pr, pc = place[1:][::turn]
        wanted = []
        for operand, tile, extent in ((x, pr, config.ROWS * config.CTAS), (y, pc, config.COLUMNS)):
            there = operand[place[0] % len(operand), tile * extent :, begin * plan.block[2] :]
            there = there[:extent, : steps * plan.block[2]]
            box = np.zeros((extent, steps * plan.block[2]), np.float32)
            box[: there.shape[0], : there.shape[1]] = there
            wanted.append(box)
        if not np.array_equal(rows, wanted[0]) or any(not np.array_equal(one.T, wanted[1]) for one in all_columns):
            return True
    return False


def test_each_tile_is_multiplied_as_it_was_loaded(cases):
    """Of tiles without pairs, too, which GPUs have run: so the machine is right about what lies where."""
    kinds = {}
    for case in (*cases._layouts(), *cases._tf32(), *cases._fp8(), *cases._tiles()):
        kinds.setdefault((case.tile, case.layout, case.dtype, case.fast_accum), case)
    wrong = [case.name for case in kinds.values() if differs(cases, case)]
    assert not wrong


def test_pairs_multiply_what_both_have_loaded(cases):
    wrong = [case.name for case in cases._pairs() if differs(cases, case)]
    assert not wrong


def test_half_of_a_narrow_part_across_k_is_half_of_its_k(cases, monkeypatch):
    """An H100 was wrong just where this is: with halves of 32 columns, whose swizzle is not that of 64."""
    monkeypatch.setattr(launch_arguments, "_SWIZZLE", 0)
    wrong = [case for case in cases._pairs() if differs(cases, case)]
    assert [(case.m, case.n, case.k, case.layout) for case in wrong] == [
        (1531, 568, 201, "nn"), (1531, 568, 201, "tn"), (1, 385, 321, "nn"), (571, 1528, 201, "tn"),
        (571, 1528, 201, "tt"), (189, 8, 29, "tn"),
    ]  # fmt: skip
    assert {case.tile for case in wrong} == {(512, 192), (192, 512)}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("C.Y_K_MAJOR", "True"), ("BOX[1] < WIDTH", "True"), ("BOX[1] < WIDTH", "False"),
        ("row += rank(C) * BOX[0]", "row += 0"), ("row += rank(C) * BOX[1]", "row += 0"),
        ("k += rank(C) * BOX[0]", "k += 0"),
    ],
)  # fmt: skip
def test_an_edited_half_is_seen(cases, old, new):
    edits = at(f"{HOPPER}.pair:find_half", replace(old, new))
    chosen = [case for case in cases._pairs() if case.workers == 4]
    assert {case.layout for case in chosen} == {"nn", "nt", "tn", "tt"}
    assert any(differs(cases, case, edits) for case in chosen)
