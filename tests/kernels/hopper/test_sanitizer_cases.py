"""Every kernel, variant and way to read operands has a case under compute-sanitizer and under ConSan, without a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("triton")

import tilestream
from tilestream.core.exchange import CLUSTERS
from tilestream.core.gpu_specs import named
from tilestream.launch.hopper.realign import RealignArguments
from tilestream.plan.candidate import ONE_TILE
from tilestream.plan.policy import hopper, portable

H200 = named("h200")
KERNELS = Path(tilestream.__file__).parent / "kernels"
#: Files of kernels of NVIDIA's GPUs with an entry that takes items: ``("hopper", "grouped")``.
ENTRIES = {
    (backend, path.stem)
    for backend in ("hopper", "portable")
    for path in (KERNELS / backend).glob("*.py")
    if re.search("^@entry", path.read_text(encoding="utf-8"), re.MULTILINE)
}


@pytest.fixture
def sanitize(cases):
    """The module of compute-sanitizer's cases; ``cases`` makes it one that can be imported."""
    import sanitize

    return sanitize


@pytest.fixture
def planned(sanitize):
    """The cases of GEMMs, each with its plan and layout."""
    return [(case, *case.plan(H200)) for case in sanitize.products()]


def grouped_entry(case):
    return case.backend, "grouped_sources" if case.sources else "grouped"


def test_every_kernel_is_sanitized(sanitize, planned):
    seen = {(plan.backend, "gemm") for _, plan, _ in planned}
    seen |= {("portable", "one_tile") for one in sanitize.PROGRAMS if sanitize.plan_of_programs(*one, H200)}
    seen |= {grouped_entry(case) for case in sanitize.GROUPED if case.plan(H200)}
    seen |= {(more.get("backend", "hopper"), "attention") for _, more in sanitize.ATTENTION}
    assert len(ENTRIES) >= 8
    assert seen == ENTRIES


def test_every_variant_of_hopper_is_sanitized(planned):
    plans = [plan for _, plan, _ in planned if plan.backend == "hopper"]
    assert {plan.variant for plan in plans} == set(hopper.VARIANTS)
    tiles = {(plan.variant, *plan.tile) for plan in plans}
    assert tiles >= {row[:3] for row in (*hopper.TRIPLE, *hopper.PAIRED)}
    for case, plan, _ in planned:
        assert (plan.backend, plan.variant) == (case.backend, case.variant or "persistent")
        assert plan.tile == case.tile
        assert plan.workers >= min(plan.schedule.grid.tiles, 4) or plan.schedule.grid.tiles > 2 * plan.workers


def test_grouped_cases_have_each_variant_form_and_scale(sanitize):
    mine = [case for case in sanitize.GROUPED if case.backend == "hopper"]
    variants = {row.variant for row in hopper.TILES}
    for sources in (False, True):
        assert {case.variant for case in mine if bool(case.sources) == sources} == variants
        assert any(case.scales == "block" for case in mine if bool(case.sources) == sources)
    assert {case.scales for case in mine} == {"none", "row", "block"}
    assert {case.along for case in mine} == {"rows", "k"}
    assert {(case.arrives, case.publishes) for case in mine} == {(False, False), (True, False), (False, True)}
    assert any(case.activation == "swiglu" for case in mine)


def test_every_row_of_the_portable_tiles_is_sanitized(planned, monkeypatch):
    used = set()

    class Watched(dict):
        def __getitem__(self, name):
            used.add(name)
            return super().__getitem__(name)

    monkeypatch.setattr(portable, "TILES", Watched(portable.TILES))
    problems = [plan.problem for _, plan, _ in planned if plan.backend == "portable"]
    for problem in problems:
        portable.tiles(problem, H200)
    assert used == set(portable.TILES)
    assert {problem.vector for problem in problems if not problem.aligned} == {1, 2, 4, 8}


def test_programs_of_a_tile_have_each_cluster_and_the_sum_in_memory(sanitize):
    assert {parts for parts, _ in sanitize.PROGRAMS} == {1, 3, *CLUSTERS}
    assert {sanitize.plan_of_programs(*one, H200).variant for one in sanitize.PROGRAMS} == {ONE_TILE}


def test_operands_are_copied_in_words_of_each_width(planned):
    copied = [(plan, layout) for _, plan, layout in planned if plan.realigned]
    assert {plan.realigned for plan, _ in copied} >= {"a", "ab"}
    made = [RealignArguments(plan, layout, 0, (True, True)) for plan, layout in copied]
    assert {one.word for arguments in made for one in arguments.copies.values()} == {1, 2, 4, 8}
    assert any(plan.schedule.slots for plan, _ in copied), "partial results lie before the copies"


def test_every_kernel_and_variant_has_a_case_under_consan(cases):
    import consan_attention
    import consan_grouped
    import consan_portable
    import consan_program

    assert set(consan_program.CASES) == set(hopper.VARIANTS)
    seen = {("hopper", "gemm")} | {("hopper", "attention") for _ in consan_attention.CASES}
    seen |= {grouped_entry(case) for case in consan_grouped.CASES.values()}
    assert seen == {(backend, name) for backend, name in ENTRIES if backend == "hopper"}
    assert {name.partition(" ")[0] for name in consan_portable.CASES} == {ONE_TILE, "portable"}
    for case in consan_grouped.CASES.values():
        plan = case.plan(H200, 1)
        assert plan.workers == 1
        assert plan.schedule.grid.k_steps > 2, "more than stages"


@pytest.mark.parametrize("name", ["grouped", "grouped by source"])
def test_grouped_arguments_of_consan_are_made_without_a_gpu(cases, name):
    import consan_grouped

    x, made, filled = consan_grouped.prepared(consan_grouped.CASES[name], "cpu", H200)
    given = dict(zip(made.kernel.arg_names, filled, strict=True))
    assert given["log"].numel() == 64
    assert given["out"] is x.out
    assert (given["counters"] is None) == (name == "grouped")
    with pytest.raises(AssertionError):
        consan_grouped.CASES[name].check(x)
