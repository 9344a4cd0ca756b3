"""The board of random problems, and the sweep and the fit behind the cost model: everything but the GPU's times."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.core.section import sections
from benchmarks.gemm import board, compiling, fit, modelled, sweep
from benchmarks.gemm.bench import Bench
from benchmarks.gemm.draw import (
    CLASSES,
    FITTED_BYTES,
    FITTED_FROM,
    LEAST_OPERATIONS,
    MOST_BYTES,
    PUBLISHED,
    ROWS,
    SHARES,
    SMALL_OPERATIONS,
    SMALL_SHARES,
    Draw,
    draws,
    fit_draws,
    small_draws,
)
from benchmarks.gemm.plans import key_of
from benchmarks.report import gemm_random, pages, plots
from board_records import board_record, sweep_record, written

from benchmarks import run
from tilestream.core.gpu_specs import named
from tilestream.core.operands import Epilogue, GemmOperands
from tilestream.ops import gpu
from tilestream_tools.sweep.check import Check

H100 = named("h100")


# Drawing --------------------------------------------------------------------------------------------------------------


def test_a_seed_draws_the_same_problems_and_the_first_of_more_are_the_same() -> None:
    assert draws(1, 50) == draws(1, 200)[:50] != draws(2, 50)
    for seed in PUBLISHED:
        assert len(set(draws(seed, 200))) == 200


def test_problems_are_what_the_issue_asks_for() -> None:
    found = [problem for seed in range(5) for problem in draws(seed, 200)]
    extents = [extent for problem in found for extent in problem[:3] if problem.itemsize == 2]
    assert min(extents) >= 16
    assert max(extents) <= 16384
    long = [extent for extent in extents if extent >= 1024]  # where a multiple of 128 is no chance
    kinds = Counter("128" if x % 128 == 0 else "8" if x % 8 == 0 else "nothing" for x in long)
    for kind, share in {"128": 0.5, "8": 0.25 + 0.25 / 8, "nothing": 0.25 * 7 / 8}.items():
        assert kinds[kind] / len(long) == pytest.approx(share, abs=0.05)
    logs = [math.log(extent) for extent in extents]
    assert np.mean(logs) == pytest.approx((math.log(16) + math.log(16384)) / 2, rel=0.1), "as likely below 512 as above"
    dtypes = Counter(problem.dtype for problem in found)
    assert dtypes["bfloat16"] / len(found) == pytest.approx(0.5, abs=0.05)
    assert set(dtypes) == {"bfloat16", "float16", "float8_e4m3fn"}
    assert {problem.layout for problem in found} == {"nn", "nt", "tn", "tt"}
    assert sum(problem.batch > 1 for problem in found if problem.itemsize == 2) / len(found) == pytest.approx(
        0.08, abs=0.04
    )
    assert max(problem.bytes(problem.itemsize) for problem in found) <= MOST_BYTES
    for problem in found:
        if problem.itemsize == 1:
            assert (problem.layout, problem.batch, problem.n % 16, problem.k % 16) == ("nt", 1, 0, 0)
            assert problem.scales in ("tensor", "row")
        else:
            assert problem.scales == "none"


@pytest.mark.parametrize(
    ("problem", "lies", "classes"),
    [
        (Draw(4096, 4096, 4096), "rows of 64", ("16-bit", "big", "rows of 64")),
        (Draw(2048, 13312, 15800), "rows of 8", ("16-bit", "rows of 8")),
        (Draw(512, 4097, 4096), "rows of 64", ("16-bit", "middle", "rows of 64")),
        (Draw(512, 4097, 4096, layout="nn"), "odd rows", ("16-bit", "middle", "odd rows")),
        (Draw(4098, 512, 512, layout="tn"), "even rows", ("16-bit", "even rows")),
        (Draw(64, 4096, 4096, "float16", batch=3), "rows of 64", ("16-bit", "few rows", "batched", "rows of 64")),
        (Draw(4096, 4096, 4096, "float8_e4m3fn", scales="row"), "rows of 64", ("fp8",)),
    ],
    ids=str,
)
def test_classes_go_by_rows_in_memory_and_by_m(problem, lies, classes) -> None:
    assert problem.lies == lies
    assert set(problem.classes) == set(classes)
    assert problem.kind == ("fp8" if problem.itemsize == 1 else lies)
    assert set(classes) <= set(CLASSES)
    assert lies in ROWS.values()


def test_figures_of_a_batch_are_of_all_of_it() -> None:
    problem = Draw(2, 3, 5, batch=7)
    assert (problem.outputs, problem.operations) == (14, 2 * 7 * 2 * 3 * 5)
    assert problem.bytes() == 2 * 7 * (2 * 5 + 3 * 5 + 2 * 3)
    assert str(problem) == "7*2x3x5 bfloat16 nt"


def test_what_the_model_is_fitted_to_is_on_no_board() -> None:
    found = fit_draws(1, 64)
    counts = Counter("few rows" if p.itemsize == 2 and p.m <= 64 else p.kind for p in found)
    assert sum(counts.values()) == 64
    assert all(abs(counts[kind] - 64 * share) < 1 for kind, share in SHARES.items())
    published = {problem[:3] for seed in PUBLISHED for problem in draws(seed, 200)}
    assert not published & {problem[:3] for problem in found}
    assert max(PUBLISHED) < FITTED_FROM
    assert min(problem.operations for problem in found) >= LEAST_OPERATIONS
    assert max(problem.bytes(problem.itemsize) for problem in found) <= FITTED_BYTES
    plans = [board.planned(problem, "h100") for problem in found]  # of small ones a program a tile may be faster
    assert {plan.backend for plan in plans if plan.variant != "one_tile"} == {"hopper"}
    assert {(problem.dtype, problem.layout, problem.scales) for problem in found} == {
        ("bfloat16", "nt", "none"), ("float8_e4m3fn", "nt", "tensor"),
    }  # fmt: skip
    assert fit_draws(1, 64) == found != fit_draws(2, 64)


def test_small_problems_are_of_all_layouts_and_on_no_board() -> None:
    found = small_draws(1, 64)
    assert small_draws(1, 64) == found != small_draws(2, 64)
    counts = Counter(problem.kind for problem in found)
    assert all(abs(counts[kind] - 64 * share) < 1.5 for kind, share in SMALL_SHARES.items())
    published = {problem[:3] for seed in PUBLISHED for problem in draws(seed, 200)}
    assert not published & {problem[:3] for problem in found}
    assert max(problem.operations for problem in found) <= SMALL_OPERATIONS
    assert {problem.layout for problem in found} == {"nn", "nt", "tn", "tt"}
    assert sum(problem.n % 16 > 0 for problem in found) > 10
    assert sweep.named(["small:1:64:3", "1:64:3", "3x4x5"]) == [found[3], fit_draws(1, 64)[3], Draw(3, 4, 5)]


def test_a_sweep_has_candidates_of_each_model_that_is_near() -> None:
    """``within`` is beside the best of each model: few of the persistent kernel's would be within the best of all."""
    seen = Counter()
    for problem in small_draws(1, 12):
        plans = sweep.candidates(problem, H100, 1.2)
        assert len({key_of(plan) for plan in plans}) == len(plans)
        best: dict[tuple[str, bool], float] = {}
        for plan in plans:
            best[model] = min(best.get(model := sweep.model_of(plan), math.inf), plan.predicted)
        assert all(plan.predicted <= 1.2 * best[sweep.model_of(plan)] for plan in plans[1:])
        assert max(best.values()) <= sweep.FAR * min(best.values())
        seen.update(best.keys())
    assert len(seen) == 3


# Measuring ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", draws(3, 40), ids=str)
def test_the_plan_that_is_told_is_the_one_that_the_op_takes(problem, monkeypatch) -> None:
    """`tilestream.plan` makes the same problem of extents and a layout as the op of the operands."""

    class Seen(Exception):
        pass

    def see(asked, *_, **__):
        raise Seen(asked)

    monkeypatch.setattr(gpu, "plan_problem", see)
    a, b, given = board.operands(problem, "meta")
    batches = (problem.batch,) if problem.batch > 1 else ()
    out = torch.empty(*batches, problem.m, problem.n, device="meta", dtype=given.get("out_dtype", a.dtype))
    scales = {name: value for name, value in given.items() if name.startswith("scale")}
    epilogue = Epilogue(scale_a=scales.get("scale_a"), scale_b=scales.get("scale_b"))
    with pytest.raises(Seen) as seen:
        gpu.compile_ahead(GemmOperands(a, b, out, epilogue), gpu.How(fast_accum=True), H100)
    assert seen.value.args[0] == board.planned(problem, "h100").problem


def checked(problem: Draw) -> tuple[torch.Tensor, Check]:
    a, b, given = board.operands(problem, "cpu")
    answer = board.peer(a, b, given)()
    return answer, board.checked(a, b, given, answer)


@pytest.mark.parametrize(
    "problem",
    [Draw(300, 24, 40, batch=3), Draw(70, 32, 48, "float8_e4m3fn", scales="row"),
     Draw(70, 32, 48, "float8_e4m3fn", scales="tensor"), Draw(40, 30, 20, "float16", "tt")],
    ids=str,
)  # fmt: skip
def test_an_answer_is_checked_through_batches_layouts_and_scales(problem) -> None:
    answer, check = checked(problem)
    check(answer.clone())
    wrong = answer.clone()
    wrong[..., -1, :] *= 1.5  # the last row of each batch
    with pytest.raises(AssertionError, match="wrong answer"):
        check(wrong)


def test_a_batch_of_another_is_wrong() -> None:
    answer, check = checked(Draw(64, 24, 40, batch=3))
    with pytest.raises(AssertionError, match="wrong answer"):
        check(answer.flip(0))


def options(results: Path, *more: str):
    return run.options("gemm", "random,sweep", str(results), "--dry", "--seed", "3", "--count", "5", *more)


def recorded(results: Path, name: str = "gemm_random_3") -> dict:
    return json.loads((results / "no_gpu" / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch):
    """A dry run of a board and a sweep of few problems. What it sets for its process is set back."""
    monkeypatch.setattr(Bench, "alarm", lambda self: None)
    threads = torch.get_num_threads()

    def make(results: Path, *more: str) -> Bench:
        return Bench(options(results, *more))

    yield make
    torch.set_grad_enabled(True)
    torch.set_num_threads(threads)


def test_a_run_that_was_cut_off_goes_on(results, bench, capsys) -> None:
    whole = bench(results)
    assert whole.run(sections("gemm"), ["random"]) == 0
    said = capsys.readouterr().out
    assert "| **all** | 5 |" in said
    assert "**The worst 5**" in said
    rows = recorded(results)["rows"]
    assert [row["shape"] for row in rows] == list(dict.fromkeys(str(p.small()) for p in draws(3, 5)))
    assert all({"ours", "torch"} <= set(row["us"]) and row["errors"] and row["why"] and row["host_us"] for row in rows)
    cut = results / "no_gpu" / "gemm_random_3.json"
    data = recorded(results) | {"rows": rows[:2]}
    earlier = results / "cut.json"
    earlier.write_text(json.dumps(data), encoding="utf-8")
    cut.unlink()
    assert bench(results, "--resume", str(earlier)).run(sections("gemm"), ["random"]) == 0
    again = recorded(results)
    assert again["rows"][:2] == rows[:2], "they are not measured again"
    assert [row["shape"] for row in again["rows"]] == [row["shape"] for row in rows]
    assert (again["planned"], again["seed"], again["missing"]) == (len(rows), 3, [])


@pytest.mark.parametrize(("key", "value"), [("name", "gemm_random_4"), ("device", "another"), ("commit", "other")])
def test_rows_of_another_run_are_refused(results, bench, key, value, capsys) -> None:
    assert bench(results, "--count", "1").run(sections("gemm"), ["random"]) == 0
    earlier = results / "cut.json"
    earlier.write_text(json.dumps(recorded(results) | {key: value}), encoding="utf-8")
    assert bench(results, "--resume", str(earlier)).run(sections("gemm"), ["random"]) == 1
    said = capsys.readouterr().err
    assert f"cut.json: its {key} is {value!r}, this run's" in said
    assert "measure anew" in said


def test_a_sweep_measures_every_candidate_and_the_choice(results, bench) -> None:
    assert bench(results).run(sections("gemm"), ["sweep"]) == 0
    for row in recorded(results, "gemm_sweep_3")["rows"]:
        keys = [key for key, *_ in row["plans"]]
        assert len(keys) == len(set(keys)) >= 3
        assert {row["chosen"], row["best"]} <= set(keys)
        assert 0 < row["of_best"] <= 1
        assert not row["wrong"]


def shared_out(monkeypatch, calls: list) -> list[object]:
    """The calls whose kernels two processes compile, between them."""
    compiled: list[object] = []
    monkeypatch.setattr(compiling, "compile_call", lambda call, device: compiled.append(call))
    counts = [compiling.compile_calls(calls, H100, index, 2) for index in range(2)]
    assert sum(counts) == len(compiled) > 1
    assert abs(counts[0] - counts[1]) <= 1
    return compiled


def test_kernels_of_a_board_are_shared_out_and_compiled_without_a_gpu(monkeypatch) -> None:
    shared_out(monkeypatch, [board.on_meta(1, number) for number in (5, 7, 9)])


def test_each_kernel_of_a_sweep_is_compiled_once(monkeypatch) -> None:
    calls = compiling.of_sweep(["1:8:0", "1:8:0", "1:8:1"], 1.1, H100)
    compiled = shared_out(monkeypatch, calls)
    assert 4 < len(compiled) < len(calls)
    assert {call.args[0] for call in compiled} <= set(fit_draws(1, 8)[:2])


# Fitting --------------------------------------------------------------------------------------------------------------


def made_up(constants: modelled.Constants, drawn: list[Draw], noise: float = 0.0) -> list[modelled.Measured]:
    """Measurements of a device whose constants are known, of some candidates of each model."""
    chance, found = np.random.default_rng(1), []
    for problem in drawn:
        some = {}
        for name, one in modelled.of_problem(problem, H100, lambda *_: 1.0).models.items():
            few = one.candidates[:: 1 + len(one.candidates) // 40]
            seconds = dataclasses.replace(one, candidates=few).expected(getattr(constants, name))
            seconds = seconds * np.exp(noise * chance.standard_normal(len(few)))
            some[name] = dataclasses.replace(one, candidates=few, seconds=seconds)
        best = min(one.seconds.min() for one in some.values())
        found.append(modelled.Measured({name: dataclasses.replace(one, best=best) for name, one in some.items()}))
    return found


START = modelled.constants_of(H100)
#: Constants of a device by the model: each of them is to be found again.
OTHERS = {
    "hopper": {"cooperative": 0.86, "ping_pong": 0.97, "feed": 10e12, "crossed": 1.5, "launch": 3.5e-6, "memory": 0.8},
    "persistent": {"launch": 3.5e-6, "tile": 1.2e-6, "narrow": 200e-12},
    "one_tile": {"launch": 3.5e-6, "begin": 0.5e-6, "narrow": 2.5, "latency": 0.7e-6, "store": 3e-9, "meet": 2e-6},
}

#: Those that few of the times show.
FAINT = ("narrow", "store")


@pytest.mark.parametrize("model", OTHERS)
def test_constants_that_are_known_are_found_again(model) -> None:
    """By measurements with half a per cent of noise; and problems that were not fitted to are planned by them."""
    start, known = getattr(START, model), OTHERS[model]
    device = START._replace(**{model: dataclasses.replace(start, **known)})
    some, more = (fit_draws(seed, 10) if model == "hopper" else small_draws(seed, 48) for seed in (1, 2))
    problems, others = fit.of_model(made_up(device, some, 0.005), model), made_up(device, more)
    found = fit.fit(problems, start, tuple(known))
    for name, value in known.items():
        assert getattr(found, name) == pytest.approx(value, rel=0.25 if name in FAINT else 0.06), name
    assert {f.name for f in dataclasses.fields(start) if getattr(found, f.name) != getattr(start, f.name)} == set(known)
    fitted = START._replace(**{model: found})
    before, after = (np.log(fit.shares(constants, others)).mean() for constants in (START, fitted))
    assert after > -0.003 > before
    assert fit.text_of(found, start).count("=") == len(known)
    assert "of the best candidates" in fit.told(fitted, others)
    assert fit.error(found, problems) < 0.01 < fit.error(start, problems)


def test_all_constants_of_a_model_lead_to_the_choices_of_known_ones() -> None:
    """Without names every constant that is not held is fitted: single ones may differ, what they choose may not."""
    known = dataclasses.replace(START.one_tile, **OTHERS["one_tile"])
    device = START._replace(one_tile=known)
    found = fit.fit(fit.of_model(made_up(device, small_draws(1, 12), 0.005), "one_tile"), START.one_tile)
    assert all(getattr(found, name) == getattr(START.one_tile, name) for name in fit.HELD[type(found)])
    others = fit.of_model(made_up(device, small_draws(2, 12)), "one_tile")
    chosen = [one.seconds[one.expected(found).argmin()] / one.seconds.min() for one in others]
    assert np.log(chosen).mean() < 0.005


def test_a_choice_is_the_planners_among_the_candidates_of_all_models() -> None:
    """The least of all, and a queue instead of a static grid of several waves that is hardly faster."""
    planned = set()
    for problem in [*small_draws(1, 10), *fit_draws(1, 6)]:
        seconds: dict[int, str] = {}

        def number(name: str, one, seconds=seconds) -> float:
            seconds[len(seconds) + 1] = key_of(one)
            return float(len(seconds))

        measured = modelled.of_problem(problem, H100, number)
        plan = board.planned(problem, H100)
        assert seconds[int(measured.chosen(modelled.constants_of(H100)))] == key_of(plan), problem
        planned.add((plan.backend, plan.variant == "one_tile"))
        assert (measured.best, measured.count) == (1.0, len(seconds))
    assert planned == {("hopper", False), ("portable", True)}


def test_a_model_counts_less_where_another_one_is_faster() -> None:
    candidates = modelled.of_problem(Draw(512, 512, 512), H100, lambda name, _: 2.0 if name == "hopper" else 1.0)
    assert fit.weight(candidates.models["one_tile"]) == 1
    assert fit.weight(candidates.models["hopper"]) == 2.0**fit.NEAR


def test_a_fit_reads_records_of_sweeps(results, capsys, monkeypatch) -> None:
    monkeypatch.setattr(fit, "fit", lambda problems, start: dataclasses.replace(start, launch=6e-6))
    record = sweep_record()
    first, row = written(results, record)[0], record["rows"][0]
    problems = fit.sweeps([record])
    assert [one.count for one in problems] == [len(row["plans"]) for row in record["rows"]]
    one_tile = [sum("variant=one_tile" in key for key, *_ in row["plans"]) for row in record["rows"]]
    assert [len(one.models["one_tile"].seconds) if "one_tile" in one.models else 0 for one in problems] == one_tile
    assert any(one_tile)
    late = record["empty_us"]["eager"] - 1e6 * fit.EMPTY
    assert late
    known = sorted(us - late for *_, us in row["plans"])
    assert sorted(1e6 * np.concatenate([one.seconds for one in problems[0].models.values()])) == pytest.approx(known)
    fit.main([str(first), "--beside", str(first)])
    said = capsys.readouterr().out
    assert said.splitlines()[-2:] == ["hopper_costs.Costs(launch=6e-06)", "one_tile.Costs(launch=6e-06)"]
    assert said.count("not fitted to") == 2
    row["plans"] = [[f"{key} gone", *rest] for key, *rest in row["plans"]]
    assert len(fit.sweeps([record])) == len(problems) - 1, "a problem without candidates of today is left out"
    (other,) = written(results, record | {"device": "NVIDIA H200", "name": "gemm_sweep_9"})
    with pytest.raises(SystemExit, match="of one device"):
        fit.main([str(first), str(other)])


# The page -------------------------------------------------------------------------------------------------------------


def test_a_page_has_the_classes_the_worst_and_what_the_plan_reaches(results) -> None:
    record = board_record()
    written(results, record, sweep_record())
    text = pages.text("gemm_random", results)
    ratios = [row["ratio"] for row in record["rows"]]
    geomean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    (everything,) = [line for line in text.splitlines() if line.startswith("| **all** |")]
    assert everything.startswith(f"| **all** | 30 | {geomean:.3f} |")
    assert f"| {min(ratios):.3f} |" in everything
    fp8 = [row["ratio"] for row in record["rows"] if row["classes"] == ["fp8"]]
    assert f"| **fp8**: {CLASSES['fp8']} | {len(fp8)} |" in text
    shapes = {row["shape"] for row in record["rows"]}
    shown = [line for line in text.splitlines() if line[2:].partition(" |")[0] in shapes]
    assert len(shown) == gemm_random.SHOWN
    worst = min(record["rows"], key=lambda row: row["ratio"])
    assert shown[0].startswith(f"| {worst['shape']} | {worst['ratio']:.3f} |")
    assert shown[0].endswith(f"| {worst['plan']} | {worst['why']} |")
    assert "gemm_random_1_h100.png" in text
    assert "| all | 4 |" in text
    assert "random GEMM, fp8, seed 1" in pages.text("index", results)


def test_a_record_of_one_problem_has_a_page(results) -> None:
    written(results, board_record(1))
    assert "| **all** | 1 |" in pages.text("gemm_random", results)


def test_a_board_is_drawn(tmp_path, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    record = board_record() | {"folder": "h100", "stem": "gemm_random_1"}
    seen = {}

    def save(figure, path, title):
        (axes,) = figure.axes
        seen["kinds"] = [text.get_text().partition(":")[0] for text in figure.legends[0].get_texts()]
        seen["points"] = sum(len(line.get_xdata()) for line in axes.lines if line.get_marker() == "o")
        seen["range"] = axes.get_ylim()

    monkeypatch.setattr(plots.palette, "save", save)
    plots.scatter(record, tmp_path / "a.png")
    assert set(seen["kinds"]) == {row["kind"] for row in record["rows"]}
    assert seen["points"] == len(record["rows"])
    assert seen["range"] == (0.5, 8)
