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
from tilestream.core.structs import Item, Matrix, Place, Span
from tilestream.kernels.device import items as items_text
from tilestream.kernels.hopper import grouped as grouped_text
from tilestream.kernels.hopper import load as load_text
from tilestream.kernels.hopper import multiply as multiply_text
from tilestream.kernels.hopper.epilogue import BEYOND
from tilestream.kernels.portable import gemm as portable_text
from tilestream.kernels.portable import grouped as grouped_portable_text
from tilestream.kernels.portable import one_tile as one_tile_text
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
        #: Of what K each step is; None: of its own number.
        self.loaded: list[int] | None = None
        self.full = SimpleNamespace(index=lambda stage: stage)
        self.empty = SimpleNamespace(index=lambda stage: stage)
        self.x = SimpleNamespace(index=lambda at: Operand(self, at), dtype=SimpleNamespace(primitive_bitwidth=16))

    def wait(self, stage: int, _: int) -> None:
        self.held[stage] = self.step if self.loaded is None else self.loaded[self.step]
        self.step += 1


class Operand:
    """A stage's part, or what was read of it into registers."""

    def __init__(self, ring: Ring, stage: int) -> None:
        self.k = ring.held[stage]

    def permute(self, _: object) -> Operand:
        return self

    def load(self, _: object) -> Operand:
        return self


def by_text(
    name: str, parts: tuple[int, ...], steps: int, edits: tuple[Any, ...] = (), loaded: list[int] | None = None
) -> list[Sum]:
    """What each part of a tile is the sum of, after a K loop of Hopper's. ``loaded``: see `Ring`."""
    ring = Ring()
    ring.loaded = loaded
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


def loads_of_group(along: str, span: Span, steps: int, block_k: int, edits: tuple[Any, ...] = ()) -> list[int]:
    """Of what K the stages are that the Hopper grouped kernel's load warp fills for an item: x's, and y's."""
    found: dict[str, list[int]] = {"x": [], "y": []}

    def tma_load(name: str, at: list[int], *_: object) -> None:
        # Groups of K: a box's place in a map that ends behind the group.
        found[name].append(at[-1] if along == "rows" else at[2] - BEYOND.value + span.end)

    names: dict[str, Any] = {
        "gl": SimpleNamespace(static_range=range, constexpr=None), "tl": SimpleNamespace(maximum=max), "range": range,
        "len": len, "mbarrier": SimpleNamespace(wait=lambda *_: None, expect=lambda *_: None), "tma_load": tma_load,
        "viewed": lambda buffer, _: buffer, "start_of": lambda *_: 0, "BEYOND": BEYOND.value, "step": ring_rules.step,
        "Place": Place, "Source": load_text.Source, "Item": Item, "with_steps": items_text.with_steps.fn,
    }  # fmt: skip
    bind(names, jitted_of(grouped_text, load_text), edits)
    config = SimpleNamespace(
        ALONG=along, ROWS=128, COLUMNS=128, BLOCK_M=128, BLOCK_N=128, BLOCK_K=block_k, HALVES=1, HALF_ROWS=64,
        WIDTHS=(128,), STAGES=STAGES, SWAP_AB=False, TWO_HALVES=False, X_K_MAJOR=True, Y_K_MAJOR=True, BATCHED=True,
        LOCAL_ROWS=False, CTAS=1,
    )  # fmt: skip
    stages = SimpleNamespace(index=lambda at: at)
    ring = SimpleNamespace(x=stages, y=[stages], full=stages, empty=stages)
    size = SimpleNamespace(primitive_bitwidth=16)
    loads = SimpleNamespace(x=Map("x", size), y=[Map("y", size)], x_batched=0, y_batched=1, half=0)
    item, place = Item(0, 1, 2, 0, steps, 0, 1, 0, 0), Place(0, 0)
    early = max(0, steps - 2)  # where the load warp prefetches a ticket
    for begin, end in ((0, early), (early, steps)):
        place = names["load_group_steps"](item, span, loads, ring, place, begin, end, config)
    assert found["x"] == found["y"], "both operands are of one K step"
    return found["x"]


class Map(str):
    """A tensor map, by its name."""

    __slots__ = ("dtype",)

    def __new__(cls, name: str, dtype: Any) -> Map:
        made = super().__new__(cls, name)
        made.dtype = dtype
        return made


GROUPS = {"rows": Span(1, 100, 1100), "k": Span(1, 100, 1108)}


@pytest.mark.parametrize(("along", "dtype"), [("rows", "bfloat16"), ("rows", "float8_e4m3fn"), ("k", "bfloat16")])
def test_hopper_adds_each_group_as_its_plan_says(along, dtype):
    span, k = GROUPS[along], 1008
    for tile in ((128, 128), (64, 256), (256, 128)):
        how = {"along": along, "dtype": dtype, "device": "h100", "tile": tile}
        plan = ts.grouped_plan(4096, 512, k if along == "rows" else 4 * k, 4, **how)
        assert plan.backend == "hopper"
        block_k, first = plan.block[2], 0 if along == "rows" else span.begin
        steps = -(-k // block_k)
        loaded = loads_of_group(along, span, steps, block_k)
        runs = by_text("multiply", (128,), steps, loaded=loaded)
        want = stated(plan.additions, k, block_k)
        assert runs == [Sum(tuple(first + block_k * step for step in run) for run in want)], plan.label


@pytest.mark.parametrize(("along", "where"), [("rows", "load:load_steps"), ("k", "grouped:load_k_steps")])
def test_groups_that_are_loaded_otherwise_would_be_seen(along, where):
    """Neighbours change places."""
    edits = at(f"tilestream.kernels.hopper.{where}", replace("k * C.BLOCK_K", "(k ^ 1) * C.BLOCK_K"))
    span = GROUPS[along]
    right, wrong = (loads_of_group(along, span, 16, 64, how) for how in ((), edits))
    assert sorted(wrong) == right != wrong
    assert by_text("multiply", (128,), 16, loaded=right) != by_text("multiply", (128,), 16, loaded=wrong)


def portable_sum(
    k: int, block_k: int, promoted: bool, text: str = "product", span: Span | None = None, edits: tuple[Any, ...] = ()
) -> Sum:
    """What a portable kernel's loop adds: K indices of each of its products."""
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
    names |= {"Matrix": Matrix}
    bind(names, jitted_of(portable_text, grouped_portable_text, one_tile_text), edits)
    item = SimpleNamespace(pm=0, pn=0, k_begin=0, k_end=-(-k // block_k), batch=Integer(0))
    config = SimpleNamespace(
        A_KIND="", B_KIND="", BLOCK_M=16, BLOCK_N=16, BLOCK_K=block_k, OFFSETS_64BIT=False, EVEN_K=k % block_k == 0,
        PRECISION="ieee", IMPRECISE=128 if promoted else None, PROMOTED=False, TWO_HALVES=False, SCALES="none",
        VECTORS=(1, 1), CLUSTER=1, K_MAJOR=(True, False), ALONG="k" if span is not None and span.begin else "rows",
    )  # fmt: skip
    a, b = Matrix(0, 0, 0, 1), Matrix(0, 0, 1, 0)
    of_group = () if span is None else (Span(*map(Integer, span)),)
    names[text](a, b, item, *of_group, 64, 64, k, *([] if text == "tile_product" else [None]), config)
    return Sum(log)


class Integer(int):
    """A number that a kernel widens."""

    def to(self, _: object) -> int:
        return int(self)


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


@pytest.mark.parametrize("k", [64, 1008])
def test_a_program_of_a_tile_adds_k_upwards(k):
    """All of a tile's K in one program; shares are in `test_one_tile.py`."""
    plans = [
        ts.plan(96, 512, k, dtype=dtype, device="h100", layout="nt", variant="one_tile", schedule="static")
        for dtype in ("bfloat16", "float16")
    ]
    for plan in plans:
        assert plan.variant == "one_tile"
        assert plan.additions == Additions(MMA)
        steps = portable_sum(k, plan.block[2], False, "tile_product")
        assert [i for step in steps for i in step] == list(range(k))
        assert stated(plan.additions, k, plan.block[2]) == Sum((tuple(range(len(steps))),))


@pytest.mark.parametrize("along", ["rows", "k"])
def test_the_portable_kernel_adds_each_groups_k_upwards(along):
    k = 1008
    span = Span(1, 0, 100) if along == "rows" else Span(1, 100, 100 + k)
    plan = ts.grouped_plan(
        4096, 512, k if along == "rows" else 4 * k, 4, along=along, device="h100", backend="portable"
    )
    assert plan.additions == Additions(MMA)
    steps = portable_sum(k, plan.block[2], False, "group_product", span)
    assert [i for step in steps for i in step] == list(range(span.begin, span.begin + k))
    assert stated(plan.additions, k, plan.block[2]) == Sum((tuple(range(len(steps))),))


@pytest.mark.parametrize(
    ("module", "text", "span"),
    [("gemm:product", "product", None), ("one_tile:tile_product", "tile_product", None),
     ("gemm:product", "group_product", Span(1, 0, 100)), ("gemm:product", "group_product", Span(1, 100, 1124))],
)  # fmt: skip
def test_another_portable_text_would_be_seen(module, text, span):
    """A loop that begins at its last step, and goes down."""
    downwards = (
        replace("depth = item.k_begin * C.BLOCK_K + step", "depth = (item.k_end - 1) * C.BLOCK_K + step"),
        *(replace(f"{at_x} += C.BLOCK_K * {along}", f"{at_x} -= C.BLOCK_K * {along}")
          for at_x, along in (("at_a", "a.column"), ("at_b", "b.row"))),
    )  # fmt: skip
    edits = at(f"tilestream.kernels.portable.{module}", *downwards)
    right, wrong = (portable_sum(1024, 64, False, text, span, how) for how in ((), edits))
    assert sorted(wrong) == list(right)
    assert wrong != right


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
