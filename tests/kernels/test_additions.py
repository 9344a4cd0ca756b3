"""The order of additions that a plan states is the one that the kernels' texts add in: they are run on stand-ins.

An accumulator of a stand-in is the list of what was added: a *run* is what the matrix units added up by themselves, and
runs are added in float32. What follows a run is in K order, or the test fails.
"""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from texts import bind, jitted_of

import tilestream as ts
from mutants.engine import at, replace
from tilestream.core import ring as ring_rules
from tilestream.core.structs import Place
from tilestream.kernels.hopper import multiply as multiply_text
from tilestream.kernels.portable import gemm as portable_text
from tilestream.plan.additions import MMA, Additions, cuts_of
from tilestream.plan.policy.hopper import TILES, rs_tail, widths
from tilestream.plan.policy.portable import TILES as PORTABLE
from tilestream.schedule import Grid, Schedule

STAGES = 3


class Sum(tuple):
    """What an accumulator holds: runs of K steps. Several are added in float32."""

    def __add__(self, other: Any) -> Sum:
        return Sum((*self, *other))


class Ring:
    """A ring whose stages hold K step after K step, as the load loop fills them: see test_hopper_protocol."""

    def __init__(self) -> None:
        self.step, self.held = 0, {}
        self.full = SimpleNamespace(index=lambda stage: stage)
        self.empty = SimpleNamespace(index=lambda stage: stage)
        self.x = SimpleNamespace(index=lambda at: Operand(self, at), dtype=SimpleNamespace(primitive_bitwidth=16))

    def wait(self, stage: int, _: int) -> None:
        self.held[stage] = self.step
        self.step += 1


class Operand:
    """A stage's part, or what was read of it into registers."""

    def __init__(self, ring: Ring, stage: int) -> None:
        self.k = ring.held[stage]

    def permute(self, _: object) -> Operand:
        return self

    def load(self, _: object) -> Operand:
        return self


def by_text(name: str, parts: tuple[int, ...], steps: int, edits: tuple[Any, ...] = ()) -> list[Sum]:
    """What each part of a tile is the sum of, after a K loop of Hopper's."""
    ring = Ring()
    ring.y = [ring.x] * len(parts)

    def mma(x: Operand, y: Operand, acc: Sum, *, is_async: bool, use_acc: bool) -> Sum:
        assert x.k == y.k, "both operands are of one K step"
        return Sum(((*acc[-1], x.k),)) if use_acc and acc else Sum(((x.k,),))

    names: dict[str, Any] = {
        "gl": SimpleNamespace(static_range=range, constexpr=None),
        "mbarrier": SimpleNamespace(wait=ring.wait, arrive=lambda _, count=1: None),
        "warpgroup_mma": mma,
        "warpgroup_mma_wait": lambda _, values: values if len(values) > 1 else values[0],
        "zero": lambda *_: Sum(), "fragment": lambda *_: None, "step": ring_rules.step, "before": ring_rules.before,
        "Place": Place, "range": range, "len": len,
    }  # fmt: skip
    bind(names, jitted_of(multiply_text), edits)
    config = SimpleNamespace(
        WIDTHS=parts, HALVES=1, HALF_ROWS=64, STAGES=STAGES, CONSUMERS="single", CTAS=1, X_K_MAJOR=True, Y_K_MAJOR=False
    )
    accs, _ = names[name](ring, None, Place(0, 0), steps, 0, config)
    return list(accs)


def stated(additions: Additions, k: int, block_k: int) -> Sum:
    """What a plan says, as runs of K steps."""
    assert additions.cuts == ((),)
    steps = range(-(-k // block_k))
    size = additions.promoted // block_k if additions.promoted else len(steps)
    assert size * block_k == (additions.promoted or size * block_k), "a run is whole steps"
    return Sum(tuple(steps[i : i + size]) for i in range(0, len(steps), size))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "promoted"])
@pytest.mark.parametrize("k", [64, 1008, 1024])
def test_hopper_adds_as_each_of_its_plans_says(dtype, k):
    promoted = dtype == "promoted"
    for tile in TILES:
        parts = widths(tile.columns, 128 if promoted else 256)
        try:
            plan = ts.plan(
                300, 512, k, dtype="float8_e4m3fn" if promoted else dtype, use_fast_accum=not promoted, device="h100",
                layout="nt", variant=tile.variant, tile=(tile.rows, tile.columns), schedule="static",
            )  # fmt: skip
        except NotImplementedError:
            continue
        assert plan.additions.unit == MMA
        narrow = rs_tail(parts, 16) and not promoted
        name = "multiply_promoted" if promoted else "multiply_rs_tail" if narrow else "multiply"
        runs = by_text(name, parts, plan.schedule.grid.k_steps)
        assert runs == [stated(plan.additions, k, plan.block[2])] * len(parts), plan.label


def test_another_text_would_be_seen():
    """A loop that begins anew at some step adds otherwise."""
    plan = ts.plan(300, 512, 1024, dtype="bfloat16", device="h100", layout="nt", schedule="static")
    want = stated(plan.additions, 1024, 64)
    fresh = replace(
        "start_mma(x, ring.y, stage, accs, 0, True, C.Y_K_MAJOR)",
        "start_mma(x, ring.y, stage, accs, 0, stage != 1, C.Y_K_MAJOR)",
    )
    assert by_text("multiply", (128,), 16) == [want]
    edits = tuple(at("tilestream.kernels.hopper.multiply:multiply", fresh))
    assert by_text("multiply", (128,), 16, edits) != [want]


def portable_sum(k: int, block_k: int, promoted: bool) -> Sum:
    """What the portable kernel's loop adds: K indices of each of its products."""
    log: list[tuple[int, ...]] = []

    def load(at: Any, mask: Any = True, other: float = 0.0) -> Any:
        return np.where(mask, at, -1)

    def dot(x: Any, y: Any, acc: Any, **how: Any) -> Any:
        assert (x[0] == y[:, 0]).all(), "both operands are of one K step"
        log.append(tuple(int(i) for i in x[0] if i >= 0))
        return acc

    tl = SimpleNamespace(
        arange=np.arange, zeros=lambda *_: None, load=load, dot=dot, debug_barrier=lambda: None, constexpr=None,
        float32=None, int64=None,
    )  # fmt: skip
    names: dict[str, Any] = {"tl": tl, "range": range, "to_tf32": None, "to_float16": None}
    bind(names, jitted_of(portable_text))
    batch = SimpleNamespace(to=lambda _: 0)
    item = SimpleNamespace(pm=0, pn=0, k_begin=0, k_end=-(-k // block_k), batch=batch)
    config = SimpleNamespace(
        A_KIND="", B_KIND="", BLOCK_M=16, BLOCK_N=16, BLOCK_K=block_k, OFFSETS_64BIT=False, EVEN_K=k % block_k == 0,
        PRECISION="ieee", IMPRECISE=128 if promoted else None, PROMOTED=False, TWO_HALVES=False, SCALES="none",
        VECTOR=1, K_MAJOR=(True, False),
    )  # fmt: skip
    a, b = SimpleNamespace(at=0, batch=0, row=0, column=1), SimpleNamespace(at=0, batch=0, row=1, column=0)
    names["product"](a, b, item, 64, 64, k, None, config)
    return Sum(log)


@pytest.mark.parametrize("k", [64, 1008, 1024])
def test_the_portable_kernel_adds_k_upwards(k):
    for row in PORTABLE["16-bit"]:
        plan = ts.plan(
            300, 512, k, dtype="bfloat16", device="h100", layout="nt", backend="portable", schedule="static",
            tile=(row.block_m, row.block_n),
        )  # fmt: skip
        assert plan.additions == Additions(MMA)
        steps = portable_sum(k, plan.block[2], False)
        assert [i for step in steps for i in step] == list(range(k))
        assert stated(plan.additions, k, plan.block[2]) == Sum((tuple(range(len(steps))),))


@pytest.mark.parametrize(("tiles", "workers", "shares"), [(3, 2, 0), (5, 4, 0), (5, 4, 3), (7, 3, 2), (4, 2, 0)])
def test_stream_ks_cuts_are_those_of_its_items(tiles, workers, shares):
    schedule = Schedule("stream_k", Grid(1, tiles, 1, 6), workers=workers, shares=shares)
    parts: dict[int, list[tuple[int, int]]] = {}
    for item in schedule.items():
        parts.setdefault(item.tile, []).append((item.k_begin, item.k_end))
    found = set()
    for ranges in parts.values():
        ends = [end for _, end in sorted(ranges)]
        assert list(accumulate(end - begin for begin, end in sorted(ranges))) == ends, "each K step once"
        found.add(tuple(8 * end for end in ends[:-1]))
    assert set(cuts_of(schedule, 8)) == found
