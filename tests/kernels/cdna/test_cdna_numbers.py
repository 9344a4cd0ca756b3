"""The numbers of the CDNA kernel's text, run on numpy: tails, layouts, swizzle, epilogue, parts of a tile.

Values are small whole numbers, so every sum is exact, and an answer is right or wrong. See `emulated` for what runs.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("triton.experimental.gluon.language")

from emulated import BEHIND, BFLOAT16, FLOAT32, FP8, INT32, Machine, Memory, Pointer

from tilestream.core.chunks import Chunks
from tilestream.core.device import DeviceProperties
from tilestream.core.grid import Grid, WorkItem
from tilestream.core.order import Raster
from tilestream.core.schedule import Schedule
from tilestream.launch.cdna.arguments import Arguments
from tilestream.launch.gate import GateArguments
from tilestream.launch.gemm_arguments import Layout
from tilestream.plan.candidate import Candidate
from tilestream.plan.plan import of_candidate
from tilestream.plan.problem import Incoming, Problem


@dataclass(frozen=True)
class Case:
    """A launch.

    ``gap``, ``out_gap``: elements between a row of an operand, of the output, and the next. ``far``: addresses have 64
    bits. ``shared``: the batches share A. ``over``: the launch is over before it begins.
    """

    m: int
    n: int
    k: int
    arch: str = "gfx950"
    copies: str = "direct"
    layout: str = "nt"
    block: tuple[int, int, int] = (64, 64, 64)
    stages: int = 3
    batch: int = 1
    kind: str = "dynamic"
    workers: int = 2
    epilogue: bool = False
    gap: int = 0
    out_gap: int = 0
    far: bool = False
    late: bool = True
    shared: bool = False
    over: bool = False
    dtype: str = "bfloat16"


class Launch(NamedTuple):
    """The kernel's arguments, its items, and what they are made of and for."""

    filled: tuple[Any, ...]
    items: list[WorkItem]
    a: Memory
    out: Memory
    counts: Memory
    right: np.ndarray


def prepared(case: Case) -> tuple[tuple[Any, ...], list[WorkItem], Memory]:
    """The kernel's arguments, its items, and A's memory."""
    made = launch(case)
    return made.filled, made.items, made.a


def launch(case: Case) -> Launch:
    """A launch on fresh numbers."""
    rng = np.random.default_rng(0)
    batch, m, n, k = case.batch, case.m, case.n, case.k
    device = DeviceProperties("none", "cdna", 4, 1e12, 1e12, "a test", case.arch, 163840)
    scales = "row" if case.epilogue else "none"
    rows = Incoming(Chunks.uniform(m, 16)) if case.over else None
    problem = Problem(m, n, k, batch, case.dtype, "float32", rows, scales=scales, shared_rows=case.shared)
    grid = Grid.of(m, n, k, *case.block, batch=batch)
    schedule = Schedule(case.kind, grid, Raster("grouped", group=2), case.workers)
    found = Candidate(case.copies, case.block, schedule, 0.0, 4, case.stages)
    plan = of_candidate(problem, device, "cdna", found, "a test's")

    def operand(rows: int, letter: str, batches: int) -> tuple[np.ndarray, Memory, tuple[int, int, int]]:
        # What lies between rows, and in the gap, is not a number.
        outer, inner = (rows, k) if letter == "k" else (k, rows)
        values = rng.integers(-3, 4, (batches, outer, inner)).astype(float)
        wide = np.full((batches, outer, inner + case.gap), np.nan)
        wide[:, :, :inner] = values
        strides = (wide[0].size if batches > 1 else 0, inner + case.gap, 1)
        as_rows = values if letter == "k" else values.transpose(0, 2, 1)
        return (
            as_rows,
            Memory(wide, FP8 if problem.fp8 else BFLOAT16),
            strides if letter == "k" else (strides[0], 1, strides[1]),
        )

    a, a_memory, a_strides = operand(m, "k" if case.layout[0] == "n" else "m", 1 if case.shared else batch)
    b, b_memory, (bb, bn, bk) = operand(n, "m" if case.layout[1] == "n" else "k", batch)
    right = np.einsum("bmk,bnk->bmn", np.broadcast_to(a, (batch, m, k)), b)
    row = n + case.out_gap
    out = Memory(np.full((batch, m, row), np.nan), FLOAT32)
    strides = (m * row if batch > 1 else 0, row, 1)
    layout = Layout(a_strides, (bb, bk, bn), strides)
    extra: dict[str, Memory | None] = dict.fromkeys(("bias", "residual", "scale_a", "scale_b"))
    if case.epilogue:
        shapes = {"bias": (n,), "residual": (batch, m, row), "scale_a": (m,), "scale_b": (n,)}
        made = {name: rng.integers(1, 4, shape).astype(float) for name, shape in shapes.items()}
        kinds = {"bias": BFLOAT16, "residual": BFLOAT16, "scale_a": FLOAT32, "scale_b": FLOAT32}
        extra = {name: Memory(values, kinds[name]) for name, values in made.items()}
        layout = layout._replace(
            bias=1, residual=strides, scaled=True, activation="relu", scale_a=(0, 1), scale_b=(0, 1)
        )
        right = 2.0 * right * made["scale_a"][:, None] * made["scale_b"]
        right = right + made["bias"] + 3.0 * made["residual"][:, :, :n]
        right = np.maximum(right, 0.0)
    arguments = Arguments(plan, layout)
    if case.far:
        arguments.x, arguments.y = (o._replace(far=True) for o in (arguments.x, arguments.y))
        arguments.direct = False
        arguments.config = dataclasses.replace(arguments._config(), OFFSETS_64BIT=True)
    at = {name: None if memory is None else memory.start for name, memory in extra.items()}
    slots = schedule.slots
    counts = Memory(np.zeros(slots), INT32)
    partials = Memory(np.full(slots * case.block[0] * case.block[1], np.nan), FLOAT32)
    operands = (
        a_memory.start, b_memory.start, out.start, at["bias"], at["residual"], at["scale_a"], at["scale_b"],
        partials.start, counts.start, Pointer(counts, 0), None, None, 0, 0, 2.0, 3.0,
    )  # fmt: skip
    filled = arguments.fill(operands, gate=GateArguments(claims=Pointer(counts, 0)))
    return Launch(filled, list(schedule.items()), a_memory, out, counts, right)


def run(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel's text makes of it, and what is right."""
    made = launch(case)
    Machine(made.items, case.late, case.over).run(made.filled)
    assert not made.counts.values[:-BEHIND].any(), "the last to count restores"
    stored = made.out.values[:-BEHIND].reshape(case.batch, case.m, case.n + case.out_gap)
    assert np.isnan(stored[:, :, case.n :]).all(), "between the output's rows"
    return stored[:, :, : case.n], made.right


def check(case: Case) -> None:
    found, right = run(case)
    assert np.array_equal(found, right), np.argwhere(found != right)[:5]


LAYOUTS = ("nt", "nn", "tn", "tt")


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("arch", "copies"), [("gfx950", "direct"), ("gfx950", "staged"), ("gfx942", "staged")])
def test_layouts_and_tails(arch, copies, layout, late):
    # 2 row tiles and 2 column tiles, ragged, and 4 steps of K and a rest.
    check(Case(80, 112, 272, arch, copies, layout, stages=3 if copies == "direct" else 2, late=late))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("arch", "copies", "dtype"),
    [
        ("gfx942", "staged", "float8_e4m3fnuz"), ("gfx942", "direct", "float8_e5m2fnuz"),
        ("gfx950", "direct", "float8_e4m3fn"),
    ],
)  # fmt: skip
def test_operands_of_8_bits(arch, copies, dtype, layout):
    # What gfx942 has to turn comes in words of four. 2 steps of 128, and a rest.
    for far in (False, True):
        check(
            Case(
                80, 112, 272, arch, copies, layout, (64, 64, 128), 3 if copies == "direct" else 2, dtype=dtype, far=far
            )
        )


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
def test_copies_of_four_bytes(late):
    check(Case(48, 80, 240, "gfx942", "direct", late=late))
    check(Case(48, 80, 112, "gfx950", "direct", block=(32, 64, 32), late=late))


@pytest.mark.parametrize(("stages", "steps"), [*itertools.product((3, 4, 5), range(1, 8))])
def test_any_number_of_steps_through_any_ring(stages, steps):
    # Fewer than are under way, as many, more; and with a rest.
    for rest, late in itertools.product((0, 16), (True, False)):
        check(Case(64, 64, 64 * steps + rest, stages=stages, late=late))


@pytest.mark.parametrize("copies", ["direct", "staged"])
def test_what_lies_between_rows_is_not_read_as_a_number(copies):
    # Rows of 168, of which 152 are K: the rest of K ends inside a step, and what is behind it is not a number.
    for layout in LAYOUTS:
        check(Case(40, 72, 152, copies=copies, layout=layout, gap=16, stages=3 if copies == "direct" else 2))
    # The last 16 bytes of K hold 6 elements of it, and 2 that are not numbers: of either operand they are cut off.
    check(Case(40, 72, 150, copies=copies, gap=18, stages=3 if copies == "direct" else 2))


@pytest.mark.parametrize("kind", ["static", "dynamic", "stream_k"])
def test_schedules(kind):
    check(Case(96, 128, 160, block=(32, 64, 32), kind=kind, workers=4, epilogue=True))


def test_parts_of_a_tile_that_end_anywhere():
    # Of 6 tiles 2 are cut into 4 shares, the last of them the rest of K: a part may have no whole step.
    for k in (32 * 4 + 16, 32 * 2 + 8):
        check(Case(96, 128, k, block=(32, 64, 32), kind="stream_k", workers=4))


def test_parts_of_a_tile_of_several_strips():
    # Of 4 tiles one is cut into 3 shares. A part is stored as two strips of 64 columns, one behind the other.
    check(Case(64, 256, 32 * 3 + 16, block=(32, 128, 32), kind="stream_k", workers=3))


@pytest.mark.parametrize(("copies", "layout"), [*itertools.product(("direct", "staged"), ("nt", "tn"))])
def test_epilogue_and_batches(copies, layout):
    stages = 3 if copies == "direct" else 2
    check(Case(48, 72, 80, copies=copies, layout=layout, batch=3, epilogue=True, stages=stages))
    check(Case(48, 72, 80, copies=copies, layout=layout, batch=3, shared=True, stages=stages))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_addresses_of_64_bits(layout):
    check(Case(48, 80, 112, layout=layout, far=True, epilogue=True))


def test_an_output_whose_rows_are_no_vectors():
    for copies in ("direct", "staged"):
        check(Case(40, 75 + 5, 64, copies=copies, epilogue=True, out_gap=3))


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize(("out_gap", "vector"), [(0, 4), (2, 2), (3, 1)])
def test_neighbours_that_are_a_vector_are_stored_as_one(out_gap, vector, far):
    made = launch(Case(40, 80, 64, out_gap=out_gap, far=far))
    Machine(made.items, True).run(made.filled)
    assert made.out.vectors == {vector}


def test_a_launch_that_is_over_hands_in_nan():
    found, _ = run(Case(80, 112, 96, over=True))
    assert np.isnan(found).all()


@pytest.mark.slow
def test_larger_tiles():
    for arch, copies, block in (
        ("gfx950", "direct", (128, 128, 64)), ("gfx942", "staged", (128, 64, 64)), ("gfx950", "direct", (256, 128, 64)),
    ):  # fmt: skip
        for layout in LAYOUTS:
            check(Case(272, 208, 336, arch, copies, layout, block, stages=3 if copies == "direct" else 2))
