"""`tilestream.invariant` in plans: one order of additions for all rows, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import tilestream as ts
from tilestream.core import gpu_specs
from tilestream.plan import additions, experimental, limit
from tilestream.plan.additions import MMA, Additions
from tilestream.plan.api import device_properties
from tilestream.plan.attention_planner import plan_attention
from tilestream.plan.planner import plan_problem
from tilestream.plan.policy import cdna_tiles, hopper_strips, portable
from tilestream.plan.problem import ITEMSIZE, Problem

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "h100" / "invariance_alike.json"
ROWS = (1, 7, 64, 128, 300, 4096, 16384)


def orders(device="h100", rows=ROWS, **how):
    given = {"dtype": "bfloat16", "layout": "nt"} | how
    return {ts.plan(m, 1024, 8192, device=device, invariant=True, **given).additions for m in rows}


@pytest.mark.parametrize(
    "how",
    [{}, {"workers": 5}, {"schedule": "static"}, {"schedule": "dynamic"}, {"dtype": "float16"}, {"queues": 4},
     {"dtype": "float8_e4m3fn"}, {"out_dtype": "float32"}, {"batch": 3}, {"backend": "portable"}],
    ids=str,
)  # fmt: skip
def test_all_rows_are_added_in_one_order(how):
    assert orders(**how) == {Additions(MMA)}


def test_promoted_sums_have_their_interval():
    assert orders(dtype="float8_e4m3fn", use_fast_accum=False) == {Additions(MMA, 128)}


@pytest.mark.parametrize("device", ["h200", "mi300x", "mi350x"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_elsewhere_one_tile_keeps_it(device, dtype):
    (order,) = orders(device, dtype=dtype)
    assert order.cuts == ((),)
    assert (order.unit == MMA) == (device == "h200" and dtype == "bfloat16")


@pytest.fixture
def cdna(monkeypatch):
    """The CDNA kernels are taken, as where they have run."""
    monkeypatch.delitem(experimental.KERNELS, "cdna", raising=False)
    plan_problem.cache_clear()
    yield
    plan_problem.cache_clear()


def several(device, dtype, k=8192, n=28672):
    made = [
        ts.plan(m, n, k, dtype=dtype, layout="nt", device=device, invariant=True)
        for m in (1, 16, 128, 300, 4096, 16384)
    ]
    assert len({plan.additions for plan in made}) == 1
    assert not any("stream_k" in plan.label for plan in made)
    return made


@pytest.mark.parametrize(
    ("device", "dtype", "instruction"),
    [("mi300x", "bfloat16", "32x32x8"), ("mi350x", "float16", "32x32x16"), ("mi300x", "float8_e4m3fnuz", "32x32x16"),
     ("mi350x", "float8_e4m3fn", "32x32x64")],
)  # fmt: skip
def test_on_amd_portable_tiles_of_one_instruction_keep_it(device, dtype, instruction):
    made = several(device, dtype)
    assert len({plan.block for plan in made}) >= 2
    assert made[0].additions == Additions(f"portable mfma {instruction}")
    assert min(plan.tile[0] for plan in made) == 64, "16 rows take another instruction"


@pytest.mark.parametrize(
    ("device", "dtype", "instruction"),
    [("mi300x", "bfloat16", "16x16x16"), ("mi350x", "float16", "16x16x32"), ("mi300x", "float8_e5m2fnuz", "16x16x32"),
     ("mi350x", "float8_e4m3fn", "16x16x128")],
)  # fmt: skip
def test_all_cdna_tiles_keep_it(device, dtype, instruction, cdna):
    made = several(device, dtype)
    assert {plan.backend for plan in made} == {"cdna"}
    assert len({plan.block for plan in made}) >= 3
    assert made[0].additions == Additions(f"cdna mfma {instruction}")
    assert made[1].tile == (32, 64)


@pytest.mark.parametrize("device", ["mi300x", "mi350x"])
@pytest.mark.parametrize("backend", ["portable", "cdna"])
@pytest.mark.parametrize("m", [16, 4096])
def test_tiles_that_add_alike_cost_less_than_one_tile(device, backend, m, request, monkeypatch):
    if backend == "cdna":
        request.getfixturevalue("cdna")
    how = {"dtype": "bfloat16", "layout": "nt", "device": device}
    free = ts.plan(m, 16384, 2048, **how).predicted
    alike = ts.plan(m, 16384, 2048, invariant=True, **how)
    assert alike.backend == backend
    monkeypatch.setattr(additions, "_read", lambda *of: "")
    plan_problem.cache_clear()
    one = ts.plan(m, 16384, 2048, invariant=True, **how)
    plan_problem.cache_clear()
    assert free <= alike.predicted < 0.9 * one.predicted


def test_zeros_at_the_end_of_k_are_part_of_the_order(cdna):
    for k, padded in ((8192, 0), (8192 + 64, 8192 + 128), (8192 + 16, 8192 + 128)):
        made = several("mi300x", "bfloat16", k, 1024)
        assert {plan.additions.padded for plan in made} == {padded}
        assert {-(-k // plan.block[2]) * plan.block[2] for plan in made} == {padded or k}
    assert "zeros up to 8320" in str(made[0].additions)


@pytest.mark.parametrize("how", [("bfloat16", 8191), ("float8_e4m3fn", 8192)], ids=str)
def test_what_was_not_read_keeps_one_tile(how):
    """Unaligned operands, and 8 bits that gfx942 converts."""
    made = several("mi300x", *how)
    assert len({plan.block for plan in made}) == 1
    assert "mfma" not in made[0].additions.unit


def test_tf32_on_amd_was_not_read():
    problem = Problem(128, 4096, 4096, dtype="float32", out_dtype="float32", tf32=True)
    device = gpu_specs.named("mi300x")
    for one in portable.candidates(problem, device, device.workers, kinds=("dynamic",)):
        assert "mfma" not in additions.additions(problem, device, "portable", one).unit


def test_without_it_few_rows_are_cut_along_k():
    free = ts.plan(16, 1024, 8192, device="h100", dtype="bfloat16", layout="nt")
    assert free.schedule.kind == "stream_k"
    assert free.additions.cuts == (tuple(range(1024, 8192, 1024)),)
    kept = ts.plan(16, 1024, 8192, device="h100", dtype="bfloat16", layout="nt", invariant=True)
    text = kept.explain()
    assert "promise   the same bits for each row, whatever is beside it: mma, K whole" in text
    assert "% by the cost model" in text
    assert "stream_k: it cuts K by the numbers of tiles and workers, and invariance is promised" in text
    assert not free.promise
    assert "promise" not in free.explain()


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"schedule": "stream_k"}, "schedule='stream_k' under tilestream.invariant: stream_k cuts K"),
        ({"shares": 3}, "shares=3 under tilestream.invariant: stream_k cuts K"),
        ({"dtype": "float8_e4m3fn", "backend": "portable", "tile": (16, 128)}, "added in another order .*leave tile="),
    ],
)
def test_what_would_add_otherwise_is_refused(how, why):
    with pytest.raises(NotImplementedError, match=why):
        ts.plan(64, 1024, 4096, device="h100", invariant=True, **{"dtype": "bfloat16", "layout": "nt"} | how)


def test_only_true_false_and_none():
    for function, count in ((ts.plan, 3), (ts.attention_plan, 2), (ts.grouped_plan, 4)):
        with pytest.raises(TypeError, match="invariant=1; it must be True, False, or None"):
            function(*[64] * count, invariant=1)


def test_the_context_asks_and_an_argument_overrides():
    with ts.invariant():
        assert ts.plan(64, 64, 64).promise
        assert not ts.plan(64, 64, 64, invariant=False).promise
        with ts.worker_limit(1):
            assert ts.plan(64, 64, 64).promise
            assert ts.plan(64, 64, 64).workers == 1
    assert not ts.plan(64, 64, 64).promise


def test_limits_join():
    promise, few = limit.INVARIANT, 3
    assert limit.tighter(promise, few) == limit.tighter(few, promise) == promise | few
    assert limit.tighter(promise | 5, 3) == promise | 3
    assert limit.tighter(promise, 0) == limit.tighter(promise, promise) == promise
    assert (limit.workers_in(promise | 7), limit.is_invariant(promise | 7), limit.is_invariant(7)) == (7, True, False)


# Groups ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "promoted"),
    [({}, 0), ({"dtype": "float16", "activation": "swiglu"}, 0), ({"along": "k"}, 0), ({"backend": "portable"}, 0),
     ({"dtype": "float8_e4m3fn", "scales": "row"}, 0), ({"dtype": "float8_e4m3fn", "backend": "portable"}, 0)],
    ids=str,
)  # fmt: skip
def test_groups_of_all_lengths_are_added_in_one_order(how, promoted):
    made = [
        ts.grouped_plan(m, 1024, 2048, groups, device="h100", **how)
        for m in (16, 300, 4096, 65536) for groups in (1, 8, 64)
    ]  # fmt: skip
    with ts.invariant():
        kept = [
            ts.grouped_plan(m, 1024, 2048, groups, device="h100", **how)
            for m in (16, 300, 4096, 65536) for groups in (1, 8, 64)
        ]  # fmt: skip
    assert {plan.additions for plan in kept} == {Additions(MMA, promoted)}
    assert len({plan.block for plan in kept}) > 1, "else they could not differ"
    assert all("the same bits for each row" in plan.explain() for plan in kept)
    assert not any(plan.promise for plan in made)
    asked = [
        ts.grouped_plan(m, 1024, 2048, groups, device="h100", invariant=True, **how)
        for m in (16, 300, 4096, 65536) for groups in (1, 8, 64)
    ]  # fmt: skip
    assert asked == kept
    with ts.invariant():
        assert ts.grouped_plan(16, 1024, 2048, 1, device="h100", invariant=False, **how) == made[0]


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"device": "b200"}, "its tiles were not compared on sm_100; multiply group by group"),
        ({"device": "mi300x"}, "its tiles were not compared on gfx942"),
        ({"sources": 4}, "which rows by source do not keep yet"),
        ({"dtype": "float8_e4m3fn", "scales": "block"}, "scales of blocks are applied by each tile"),
        ({"dtype": "float32"}, "added in another order"),
        ({"dtype": "float8_e4m3fn", "backend": "portable", "tile": (16, 128)}, "added in another order"),
    ],
)
def test_groups_that_may_be_added_otherwise_are_refused(how, why):
    with pytest.raises(NotImplementedError, match=why):
        ts.grouped_plan(4096, 1024, 2048, 8, **{"device": "h100", "invariant": True} | how)
    with ts.invariant(), pytest.raises(NotImplementedError, match=why):
        ts.grouped_plan(4096, 1024, 2048, 8, **{"device": "h100"} | how)


# Attention ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"window": (200, 0)}, {"head_dim": 64}, {"head_dim": 256}, {"dtype": "float32"}])
def test_all_queries_take_keys_in_one_order(how):
    shapes = ((1, 8192), (7, 900), (300, 300), (1024, 1024), (4096, 4096))
    made = [
        ts.attention_plan(q, k, heads_q=32, heads_kv=8, causal=True, device="h100", invariant=True, **how)
        for q, k in shapes
    ]
    assert len({plan.key_order for plan in made}) == 1
    assert all(plan.shares == 1 for plan in made)
    assert "the same bits for each row" in made[0].explain()


@pytest.mark.parametrize("device", ["h100", "cpu"])
def test_keys_that_arrive_are_taken_in_the_promised_order(device):
    arrival = ts.Arrival.uniform(64, 4)
    late = ts.attention_plan(256, device=device, arrival=arrival, invariant=True)
    there = ts.attention_plan(256, device=device, invariant=True)
    assert late.key_order == there.key_order
    assert ("a tile waits for all its keys" in late.explain()) == late.downwards == (device == "h100")
    assert (experimental.NOT_RUN in late.explain()) == late.downwards
    assert not ts.attention_plan(256, device=device, arrival=arrival).downwards


def step(batch=1, queries=1, keys=8192, **how):
    """The plan of a decoding step on an H100."""
    given = {"heads_q": 32, "heads_kv": 8, "causal": True, "device": "h100", "invariant": True} | how
    return ts.attention_plan(queries, keys, batch=batch, **given)


@pytest.mark.parametrize(
    "how",
    [{}, {"queries": 4}, {"batch": 2}, {"window": (6000, 0)}, {"head_dim": 64}, {"page_size": 16}, {"sinks": True},
     {"dtype": "float16"}, {"device": "h200"}, {"heads_q": 8}],
    ids=str,
)  # fmt: skip
def test_a_step_over_many_keys_takes_values_in_strips(how):
    plan = step(**how)
    prompt = step(**how | {"queries": 4096, "keys": 4096})
    assert plan.strips > 1
    assert prompt.strips == 0
    assert plan.key_order == prompt.key_order
    assert plan.shares == 1
    assert not step(**how, invariant=False).strips


def test_strips_are_explained():
    plan = step()
    assert plan.label == "hopper strips, 16 query rows of 4 heads x 128 keys, values in 8 strips of 16 columns"
    text = plan.explain()
    assert "scores    of 64 key blocks, each a program; so are their weights, in a second launch" in text
    assert "values    in 8 strips of 16 columns, each a program, in a third launch" in text
    assert "the last first" in text


@pytest.mark.parametrize(
    "how",
    [{"batch": 64, "keys": 4096}, {"keys": 200}, {"queries": 300}, {"head_dim": 256}, {"softcap": 20.0},
     {"workers": 131}, {"schedule": "static"}, {"dtype": "float8_e4m3fn"}, {"dtype": "float32"},
     {"head_dim_v": 72}, {"arrival": ts.Arrival.uniform(64, 128)}],
    ids=str,
)  # fmt: skip
def test_other_steps_do_not(how):
    assert step(**how).strips == 0


def test_wide_strips_where_there_are_many_tiles():
    assert [hopper_strips.width_of(128, tiles, 132) for tiles in (1, 8, 16, 32, 64)] == [16, 16, 16, 32, 64]
    assert hopper_strips.width_of(80, 64, 132) == 16


def test_few_strips_read_values_more_slowly_than_many(monkeypatch):
    """Twice as many programs take half the time, as long as they are fewer than read at the full bandwidth."""
    monkeypatch.setattr(hopper_strips, "CHAIN_SECONDS", 0.0)
    problem, device = step(heads_q=8).problem, device_properties("h100")
    four, eight, sixteen, thirty_two = (
        hopper_strips._seconds(problem, device, 4, width, 128) for width in (128, 64, 32, 16)
    )
    assert four > eight > sixteen > thirty_two
    assert four - eight == pytest.approx(2 * (eight - sixteen))
    assert eight - sixteen == pytest.approx(2 * (sixteen - thirty_two))


@pytest.fixture
def no_plans():
    """No plan is kept from before, or for what follows."""
    plan_attention.cache_clear()
    yield
    plan_attention.cache_clear()


def test_a_cut_that_workers_decide_is_found(monkeypatch, no_plans):
    """Seeded: strips whose keys are also split, by the number of workers or of sequences."""
    made = hopper_strips.candidates

    def cut(problem, device, workers, blocks, **how):
        for one in made(problem, device, workers, blocks, **how):
            yield dataclasses.replace(one, shares=max(1, workers // (33 * problem.batch)), predicted=0.0)

    monkeypatch.setattr(hopper_strips, "candidates", cut)
    assert step(batch=4).strips > 1, "one share"
    for batch in (1, 2):
        plan = step(batch=batch)
        assert plan.strips == 0
        assert f"a tile's blocks in {4 // batch} shares" in plan.explain()


def test_attention_refuses_what_takes_keys_otherwise():
    arrival = ts.Arrival.uniform(64, 4)
    with pytest.raises(NotImplementedError, match="leave arrival= away, and call when the keys have arrived"):
        ts.attention_plan(256, device="b200", arrival=arrival, invariant=True)
    for late in ({}, {"arrival": arrival}):
        with pytest.raises(NotImplementedError, match="the last first\\); leave backend= away"):
            ts.attention_plan(256, device="h100", backend="portable", invariant=True, **late)
    with pytest.raises(NotImplementedError, match=r"splits=4 under tilestream\.invariant"):
        ts.attention_plan(1, 4096, device="h100", splits=4, invariant=True)
    with pytest.raises(NotImplementedError, match="pages of too few keys, or rows that are not aligned: copy them"):
        ts.attention_plan(1, 4096, device="h100", page_size=4, invariant=True)


# The record -----------------------------------------------------------------------------------------------------------


def test_the_record_says_so():
    """What plans take for one order had the same bits on an H100; what they do not is not taken for it."""
    rows = json.loads(RECORD.read_text(encoding="utf-8"))["rows"]
    groups = {row["group"] for row in rows}
    assert len(groups) > 10
    for group in groups - {one for one in groups if one.startswith("attention")}:
        of = [row for row in rows if row["group"] == group and row["like"]]
        whole = [row for row in of if "shares" not in row["way"] and "stream_k" not in row["way"]]
        whole = [row for row in whole if "cuBLAS" not in row["way"] and not any(row["failures"])]
        eight, single = group.startswith("float8"), group.startswith("float32")
        alike = [
            row for row in whole
            if not ("portable" in row["way"] and (single or (eight and "portable 16x" in row["way"])))
        ]  # fmt: skip
        assert len(alike) > 10
        first = alike[0]["way"]
        assert all(set(row["like"].values()) == {first} for row in alike), group
        assert all(not any(row["places"].values()) for row in whole), group


AMD = RECORD.parents[1] / "amd" / "alike.json"


def tiles_of(backend, arch, dtype):
    device, size = gpu_specs.named({"gfx942": "mi300x", "gfx950": "mi350x"}[arch]), ITEMSIZE[dtype]
    if backend == "cdna":
        fit = cdna_tiles.fitting(cdna_tiles.TILES[arch], device, size)
        return {f"{one.block_m}x{one.block_n}x{one.block_k(size)} {one.copies}" for one in fit}
    return {"x".join(map(str, one[:3])) for one in portable.tiles(Problem(512, 512, 768, 1, dtype), device)}


@pytest.mark.parametrize("backend", ["cdna", "portable"])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_the_record_of_amd_says_so(backend, arch):
    """What plans take for one order is one in the compiled code, and has the same bits on the emulator."""
    every = [row for row in json.loads(AMD.read_text(encoding="utf-8"))["rows"] if row["arch"] == arch]
    every = [row for row in every if row["backend"] == backend]
    device = gpu_specs.named({"gfx942": "mi300x", "gfx950": "mi350x"}[arch])
    assert len({row["dtype"] for row in every}) == 4 + (backend == "portable")
    for dtype in {row["dtype"] for row in every}:
        rows, found, bits = [row for row in every if row["dtype"] == dtype], {}, {}
        for row in rows:
            m, n, k = map(int, row["tile"].partition(" ")[0].split("x"))
            candidate = SimpleNamespace(
                block=(m, n, k), tile=(m, n), kind="dynamic", variant=row["tile"], warps=4, stages=2
            )
            problem = Problem(4096, 4096, row["k"], 1, dtype)
            order = additions.additions(problem, device, backend, candidate)
            assert "fault" not in row, f"not read: {row}"
            if "mfma" not in order.unit:
                assert (m, dtype[:6]) == (16, "float8"), "assumed to differ"
            elif "digest" in row:
                bits.setdefault(order, set()).add(row["digest"])
            else:
                assert f"_{order.unit.rpartition(' ')[2]}_" in row["instruction"]
                assert row["end"] == (order.padded or row["k"])
                how = tuple(row[name] for name in ("instruction", "rows", "span", "pattern", "modes"))
                found.setdefault(order.unit, set()).add(how)
        assert {row["tile"] for row in rows if row["how"] == "even"} == tiles_of(backend, arch, dtype)
        assert all(len(hows) == 1 for hows in found.values())
        assert all(len(digests) == 1 for digests in bits.values())
        assert len(set.union(*found.values())) == len(found), "orders that are equal have one name"


def test_the_record_of_attention_says_so():
    rows = json.loads(RECORD.read_text(encoding="utf-8"))["rows"]
    of = [row for row in rows if row["group"].startswith("attention") and "shares" not in row["way"]]
    assert len(of) > 10
    assert all(row["places"] == {"all": []} for row in of)
    classes = {}
    for row in of:
        if "hopper" in row["way"]:
            classes.setdefault((row["group"], row["way"].rpartition("x")[2]), set()).add(row["like"]["all"])
    assert all(len(found) == 1 for found in classes.values()), "tiles of equal blocks of keys"
