"""Kernels that plans take only where they are asked for: one rule for matmul and attention, and its switch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_up import reason

import tilestream
from tilestream.core.gpu_specs import named
from tilestream.plan import Problem, experimental, plan_attention, plan_problem
from tilestream.plan.attention_problem import AttentionProblem

CDNA = experimental.KERNELS["cdna"].environment
ATTENTION = AttentionProblem(4, 16, 16, 4096, 4096, 128)
ASKS = {"matmul": (plan_problem, Problem(8192, 8192, 8192, dtype="bfloat16")), "attention": (plan_attention, ATTENTION)}
each = pytest.mark.parametrize("op", ASKS)
on_amd = pytest.mark.parametrize("name", ["mi300x", "mi325x", "mi350x", "mi355x"])


def plan(op: str, name: str, change=(), **how):
    function, problem = ASKS[op]
    return function(replace(problem, **dict(change)), device=named(name), **how)


@pytest.fixture(autouse=True)
def switch(monkeypatch):
    """Sets a variable, or none; plans and what was read of the environment are forgotten."""

    def set_(**variables: str) -> None:
        for kernel in experimental.KERNELS.values():
            monkeypatch.delenv(kernel.environment, raising=False)
        for variable, text in variables.items():
            monkeypatch.setenv(variable, text)
        experimental._of_environment.cache_clear()
        plan_problem.cache_clear()
        plan_attention.cache_clear()

    set_()
    yield set_
    set_()


@each
@on_amd
def test_without_the_switch_a_caller_must_ask_for_it(op, name, switch):
    for variables in ({}, {CDNA: ""}, {CDNA: "0"}):
        switch(**variables)
        made = plan(op, name)
        assert (made.backend, reason(made, "cdna")) == ("portable", experimental.opt_in("cdna"))
        assert f"cdna: {experimental.opt_in('cdna')}" in made.explain()
        assert plan(op, name, backend="cdna").backend == "cdna"


@each
@on_amd
def test_the_switch_is_for_all_calls_that_the_kernel_does(op, name, switch):
    switch(**{CDNA: "1"})
    made = plan(op, name)
    assert made.backend == "cdna"
    assert "executed on an emulator, not run: no gfx9" in made.explain()
    assert plan(op, name, backend="portable").backend == "portable"
    assert plan(op, "h100").backend == "hopper"
    other = plan(op, name, {"dtype": "float32"})
    assert other.backend == "portable"
    assert reason(other, "cdna").startswith("it multiplies")


@each
@pytest.mark.parametrize("text", ["yes", "cdna", "2", " 1"])
def test_a_switch_is_zero_or_one(op, text, switch):
    switch(**{CDNA: text})
    with pytest.raises(ValueError, match=f"TILESTREAM_CDNA='{text}': it is 1 to take the CDNA kernels"):
        plan(op, "mi300x")


@pytest.mark.parametrize("name", ["h100", "h200"])
@pytest.mark.parametrize("change", [{}, {"dtype": "float8_e4m3fn", "scaled": True}], ids=["16 bits", "8 bits"])
def test_attention_on_hopper_has_run(name, change):
    made = plan("attention", name, change)
    assert made.backend == "hopper"
    assert experimental.NOT_RUN not in made.explain()
    assert plan("attention", name, change, backend="portable").backend == "portable"


def test_a_row_is_all_it_takes(monkeypatch, switch):
    """What has not run can be any fast kernel: its row has it asked for."""
    monkeypatch.setitem(experimental.KERNELS, "hopper", experimental.Experimental("TILESTREAM_SOME", "some kernels"))
    switch()
    made = plan("attention", "h100")
    assert (made.backend, reason(made, "hopper")) == ("portable", experimental.opt_in("hopper"))
    assert plan("attention", "h100", backend="hopper").backend == "hopper"
    switch(TILESTREAM_SOME="1")
    assert plan("attention", "h100").backend == "hopper"
    assert plan("attention", "mi300x").backend == "portable", "the other kernel's variable is its own"


@pytest.mark.parametrize("k", [4096, 4104])
def test_pairs_of_ctas_are_taken_where_they_are_forced(k):
    of = {"dtype": "bfloat16", "layout": "nt", "device": named("h100")}
    assert tilestream.plan(4096, 4096, k, **of).variant != "paired"
    made = tilestream.plan(4096, 4096, k, variant="paired", **of)
    assert (made.variant, made.ctas, made.workers, made.schedule.kind) == ("paired", 2, 66, "static")
    assert made.tile in ((256, 256), (512, 192), (192, 512))
    assert "slower than single ones" in made.explain()
    assert "66 workers of 2 CTAs" in made.explain()
    assert made.floor == tilestream.plan(4096, 4096, k, workers=132, schedule="static", **of).floor, "a CTA has an SM"


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"schedule": "dynamic"}, "pairs of CTAs take a static grid, of which both know their items, not dynamic"),
        ({"schedule": "stream_k"}, "pairs of CTAs take a static grid, of which both know their items, not stream_k"),
        ({"workers": 1}, "a pair of CTAs takes two workers"),
        ({"arrival": tilestream.Arrival.uniform(512, 8)}, "pairs of CTAs wait for no chunks and publish none"),
        ({"tile": (128, 256)}, "it has no 128x256 tile here with variant=paired"),
        ({"tile": (512, 192), "batch": 3}, "it has no 512x192 tile here with variant=paired"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_pairs_of_ctas_do_not_do_is_said(how, why):
    with pytest.raises(NotImplementedError, match=why):
        tilestream.plan(4096, 4096, 4096, dtype="bfloat16", device=named("h100"), variant="paired", **how)
