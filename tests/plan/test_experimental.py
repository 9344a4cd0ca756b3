"""Kernels that plans take only where they are asked for: one rule for matmul and attention, and its switch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilestream.core.chunks import Chunks
from tilestream.core.gpu_specs import named
from tilestream.plan import Problem, experimental, plan_problem
from tilestream.plan.attention_planner import plan_attention
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.problem import Incoming

MATMUL = Problem(8192, 8192, 8192, dtype="bfloat16")
ATTENTION = AttentionProblem(4, 16, 16, 4096, 4096, 128)
NARROW = replace(ATTENTION, dtype="float8_e4m3fn", scaled=True)
CDNA = experimental.KERNELS["cdna"]
ASKS = {"matmul": (plan_problem, MATMUL), "attention": (plan_attention, ATTENTION)}
each = pytest.mark.parametrize("op", ASKS)
on_amd = pytest.mark.parametrize("name", ["mi300x", "mi325x", "mi350x", "mi355x"])


def plan(op: str, name: str, **how):
    function, problem = ASKS[op]
    return function(problem, device=named(name), **how)


def forget() -> None:
    experimental._of_environment.cache_clear()
    plan_problem.cache_clear()
    plan_attention.cache_clear()


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    for kernel in experimental.KERNELS.values():
        monkeypatch.delenv(kernel.environment, raising=False)
    forget()
    yield
    forget()


@each
@on_amd
def test_nobody_gets_it_who_does_not_ask(op, name):
    made = plan(op, name)
    assert made.backend == "portable"
    assert [r.why for r in made.refused if r.what == "cdna"] == [experimental.opt_in("cdna")]
    assert f"cdna: {experimental.opt_in('cdna')}" in made.explain()
    assert plan(op, name, backend="cdna").backend == "cdna"


@each
@on_amd
def test_the_switch_is_for_all_calls(op, name, monkeypatch):
    monkeypatch.setenv(CDNA.environment, "1")
    forget()
    made = plan(op, name)
    assert made.backend == "cdna"
    assert "compiled and checked, not run" in made.explain()
    assert plan(op, name, backend="portable").backend == "portable"


@each
def test_with_the_switch_what_it_does_not_do_goes_to_the_portable_kernel(op, monkeypatch):
    monkeypatch.setenv(CDNA.environment, "1")
    forget()
    function, problem = ASKS[op]
    made = function(type(problem)(**{**vars(problem), "dtype": "float32"}), device=named("mi300x"))
    assert made.backend == "portable"
    (why,) = [r.why for r in made.refused if r.what == "cdna"]
    assert why.startswith("it multiplies")


@each
def test_other_gpus_are_not_asked(op, monkeypatch):
    monkeypatch.setenv(CDNA.environment, "1")
    forget()
    assert plan(op, "h100").backend == "hopper"


@each
@pytest.mark.parametrize("text", ["", "0"])
def test_zero_and_nothing_are_no(op, text, monkeypatch):
    monkeypatch.setenv(CDNA.environment, text)
    forget()
    assert plan(op, "mi355x").backend == "portable"


@each
@pytest.mark.parametrize("text", ["yes", "cdna", "2", " 1"])
def test_a_switch_is_zero_or_one(op, text, monkeypatch):
    monkeypatch.setenv(CDNA.environment, text)
    forget()
    with pytest.raises(ValueError, match=f"TILESTREAM_CDNA='{text}': it is 1 to take the CDNA kernels"):
        plan(op, "mi300x")


each_hopper = pytest.mark.parametrize("name", ["h100", "h200"])


@each_hopper
@pytest.mark.parametrize("problem", [ATTENTION, NARROW], ids=["16 bits", "8 bits"])
def test_attention_on_hopper_has_run(name, problem):
    made = plan_attention(problem, device=named(name))
    assert made.backend == "hopper"
    assert experimental.NOT_RUN not in made.explain()
    assert plan_attention(problem, device=named(name), backend="portable").backend == "portable"


def test_8_bits_that_arrive_are_the_portable_kernels():
    arrives = replace(NARROW, keys=Incoming(Chunks.uniform(4 * 4096, 512)))
    assert plan_attention(arrives, device=named("h100")).backend == "portable"


def test_a_row_is_all_it_takes(monkeypatch):
    """What has not run can be any fast kernel: its row has it asked for."""
    row = experimental.Experimental("TILESTREAM_SOME", "some kernels")
    monkeypatch.setitem(experimental.KERNELS, "hopper", row)
    forget()
    made = plan_attention(ATTENTION, device=named("h100"))
    assert made.backend == "portable"
    assert f"hopper: {experimental.opt_in('hopper')}" in made.explain()
    assert plan_attention(ATTENTION, device=named("h100"), backend="hopper").backend == "hopper"
    assert plan("attention", "mi300x").backend == "portable", "the other kernel's variable is its own"
    monkeypatch.setenv(row.environment, "1")
    forget()
    assert plan_attention(ATTENTION, device=named("h100")).backend == "hopper"
