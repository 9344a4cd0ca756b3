"""Fused or not: a pure function of what all ranks know, and of the table."""

from __future__ import annotations

import itertools
import json
import re
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilestream.core.protocols.handshake import difference
from tilestream.distributed import dispatch, planner
from tilestream.distributed.counting import counting
from tilestream.distributed.dispatch import Case, decide
from tilestream.distributed.plan import DistributedPlan
from tilestream.distributed.planner import make_plan, without_pulls
from tilestream.distributed.request import Request, check_request, given_request
from tilestream.ops.limit import invariant


def gather(m, n, k, world, dtype="bfloat16", itemsize=2, device="sm_90"):
    return Case("all_gather_matmul", m // world, n, k, k, world, dtype, itemsize, device)


RECORDS = Path(__file__).parents[2] / "benchmarks" / "results"


def measured_rows():
    """Of the kept records: the case, what each form took, and by which name the record has it."""
    for world in (2, 4, 8):
        record = json.loads((RECORDS / "h200" / f"all_gather_x{world}.json").read_text(encoding="utf-8"))
        for row in record["rows"]:
            case = Case(row["op"], row["rows"], row["n"], row["k"], row["width"], world, "bfloat16", 2, "sm_90")
            yield case, row["ms"]


def name_of(case, decision):
    if not decision.fused:
        return "nccl + ours"
    way = f"{decision.way} " if case.op == "all_gather_matmul" else ""
    return f"fused {way}{decision.chunks}"


def test_the_model_is_near_the_fastest_that_was_measured(monkeypatch):
    monkeypatch.setattr(dispatch, "table", lambda: {**dispatch_table, "entries": []})
    losses = {}
    for case, ms in measured_rows():
        decision = decide(case)
        assert decision.why.startswith("modelled: ")
        fastest = min(took for name, took in ms.items() if name == "nccl + ours" or name.startswith("fused "))
        losses[case] = ms[name_of(case, decision)] / fastest
    assert len(losses) == 48
    assert max(losses.values()) < 1.06, losses


def test_the_table_is_the_fastest_that_was_measured():
    for case, ms in measured_rows():
        decision = decide(case)
        assert decision.measured
        assert ms[name_of(case, decision)] <= 1.03 * min(ms["nccl + ours"], ms["nccl + mm"]), case


def test_small_calls_are_not_worth_a_handshake():
    assert not decide(gather(64, 128, 256, 8)).fused
    assert decide(gather(64, 128, 256, 8), "fused").fused, "but the caller may ask for it"
    assert not decide(gather(8192, 3584, 8192, 8), "unfused").fused


def test_a_device_without_rates_is_unfused_and_says_so():
    decision = decide(gather(8192, 3584, 8192, 8, device="sm_70"))
    assert not decision.fused
    assert decision.why == "modelled: no rates of sm_70 are known"
    assert decide(gather(8192, 3584, 8192, 8, device="sm_70"), "fused").chunks == 1


def test_a_measured_entry_goes_before_the_model(monkeypatch):
    case = gather(8192, 3584, 8192, 8)
    entry = {
        "op": case.op, "rows": case.rows, "n": case.n, "k": case.k, "world": 8, "dtype": "bfloat16", "device": "sm_90",
        "fused": False, "chunks": 1, "source": "a test",
    }  # fmt: skip
    monkeypatch.setattr(dispatch, "table", lambda: {**dispatch_table, "entries": [entry]})
    decision = decide(case)
    assert (decision.fused, decision.measured) == (False, True)
    assert decision.why == "measured for this shape class: a test"
    assert decide(replace(case, n=3700)).measured, "of the same class"
    for other in (replace(case, n=8192), replace(case, world=4), replace(case, dtype="float16")):
        assert not decide(other).measured


dispatch_table = dispatch.table()


def test_chunks_grow_with_the_shard_and_stay_in_bounds():
    chunks = [decide(gather(m, 8192, 8192, 2), "fused").chunks for m in (1024, 8192, 16384, 65536)]
    assert chunks == [1, 2, 2, 2]
    assert decide(gather(2, 8, 1 << 26, 2), "fused").chunks == 1, "no more chunks than rows"


@given(
    st.integers(1, 1 << 17), st.integers(1, 1 << 15), st.integers(1, 1 << 15), st.integers(1, 8),
    st.sampled_from(["cpu", "sm_90", "gfx942"]), st.sampled_from(dispatch.FORMS),
)  # fmt: skip
def test_every_shape_has_a_decision_and_always_the_same(m, n, k, world, device, form):
    case = gather(m * world, n, k, world, device=device)
    decision = decide(case, form)
    assert decision == decide(replace(case), form)
    assert 1 <= decision.chunks <= max(1, case.rows)
    assert decision.fused or decision.chunks == 1


@pytest.mark.parametrize(("rows", "chunks"), [(4096, 4), (4098, 3), (4097, 1), (0, 4), (2, 2)])
def test_chunks_of_one_size_are_as_many_as_divide_the_rows(rows, chunks):
    decision = dispatch.Decision(True, 4, "measured, say", measured=True)
    assert decision.with_equal_chunks(rows) == replace(decision, chunks=chunks)


def test_a_trial_overrules_the_table_and_no_caller():
    case = gather(8192, 3584, 8192, 2)
    before = decide(case)
    with dispatch.trial(True, 4):
        assert (decide(case).fused, decide(case).chunks) == (True, 4)
        assert not decide(case, "unfused").fused
        assert decide(gather(2, 8, 8, 2)).chunks == 1, "no more chunks than rows"
        assert decide(case).way == before.way
    for way in dispatch.WAYS:
        with dispatch.trial(True, 4, way):
            assert decide(case).way == way
    assert decide(case) == before


def test_the_tables_hash_is_of_what_is_in_it(monkeypatch):
    before = dispatch.table_hash()
    assert len(before) == 16
    dispatch.table_hash.cache_clear()
    monkeypatch.setattr(dispatch, "table", lambda: {**dispatch_table, "entries": [1]})
    assert dispatch.table_hash() != before
    dispatch.table_hash.cache_clear()
    monkeypatch.setattr(dispatch, "table", lambda: dict(reversed(dispatch_table.items())))
    assert dispatch.table_hash() == before, "in whatever order it is written"
    dispatch.table_hash.cache_clear()


def test_the_table_ships_in_a_form_that_is_known():
    table = dispatch.table()
    assert table["format"] == 2
    for rates in table["rates"].values():
        assert rates["source"]
        assert {"unfused", *dispatch.WAYS} == set(rates["latency"]) - {"sum"} == set(rates["gather"])
        assert set(rates["slower"]) == set(dispatch.WAYS)
    keys = {"op", "rows", "n", "k", "world", "dtype", "device", "fused", "chunks", "source"}
    for entry in table["entries"]:
        gathers = entry["op"] == "all_gather_matmul"
        assert set(entry) - {"library"} == keys | ({"way"} if gathers else set())
        assert "library" not in entry or (entry["op"] == "matmul_all_reduce" and not entry["fused"])
        assert entry.get("way", "pull") in dispatch.WAYS


def test_small_shards_are_pushed_and_large_ones_pulled_where_nobody_has_measured():
    ways = [decide(gather(m, 5000, 8192, 2, "float16")).way for m in (64, 1024, 8192, 65536)]
    assert ways == ["push", "push", "pull", "pull"]
    assert decide(gather(65536, 64, 8192, 2, "float16")).way == "push", "the transfer is the longer part"
    assert decide(replace(gather(64, 5000, 8192, 2), op="matmul_reduce_scatter"), "fused").way == "pull"
    assert decide(gather(8192, 3584, 8192, 8, device="sm_70")).way == "push"


def test_nothing_is_pulled_where_all_streams_share_a_queue():
    pulled, pushed = (decide(gather(m, 5000, 8192, 2, "float16"), "fused") for m in (8192, 64))
    assert without_pulls(pulled) == replace(
        pulled, way="push", why='the caller asks for form="fused"; pushed, since CUDA_DEVICE_MAX_CONNECTIONS is 1'
    )
    assert without_pulls(pushed) == pushed


@pytest.mark.parametrize(
    ("m", "says", "own"),
    [(8192, "pulls from one peer", "in the slot"), (64, "pushes its shard to one peer", "where the caller has it")],
)
def test_a_plan_on_gpus_says_which_way_and_the_ranks_compare_it(m, says, own):
    case = gather(m, 5000, 8192, 2, "float16")
    decision = decide(case, "fused")
    plan = DistributedPlan(case, 0, decision, "symmetric memory", (), {"chunks": 1, "way": decision.way})
    assert f"\n  way       each rank {says}" in plan.explain()
    assert f"\n  own shard read {own}" in plan.explain()
    assert f"way {decision.way}" in plan.explain()
    other = replace(plan, agreed={**plan.agreed, "way": "another"})
    assert other.handshake != plan.handshake
    assert "\n  way " not in replace(plan, transport="gloo", agreed={"chunks": 1}).explain()


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_more_columns_never_make_overlap_less_worth_its_handshake(op):
    for world, m in itertools.product((2, 4, 8), (4096, 16384)):
        wins = [decide(replace(gather(m, n, 8192, world), op=op)).fused for n in (256, 1024, 4096, 16384)]
        assert wins == sorted(wins), (world, m, wins)


def group(rank=0, unreachable="", capture=0, agreed=()):
    """A group's state; ``capture``: as of `GroupState.capture`."""
    return types.SimpleNamespace(
        rank=rank, world=2, plans={}, unreachable=unreachable, capture=lambda x: capture, agreed=set(agreed),
        backend=lambda device: "nccl", prepared=set(agreed),
    )  # fmt: skip


def planned(patch, op, form="fused", unreachable="", rank=0, state=None, rows=4096, deadline=None, **more):
    """A plan of two ranks that reach each other, or do not; as on GPUs. ``state``: of earlier plans."""
    reached = ("collective", (planner.Refusal("fused", unreachable),)) if unreachable else ("symmetric memory", ())
    patch.setattr(planner, "_transport", lambda state, x, last: reached)
    patch.setattr(planner, "_device_class", lambda device: "sm_90")
    state = state or group(rank, unreachable)
    a, b = torch.empty(0, dtype=torch.bfloat16), torch.empty(8192, 3584, device="meta")
    request = Request(op, a, [b], [None], ["none"], None, [None], form=form, deadline=deadline, **more)
    return make_plan(state, request, (rows, 8192), 8192, {"a": "rows"})


def test_calls_that_differ_in_their_form_alone_have_plans_of_their_own(monkeypatch):
    state = group()
    forms = ("fused", "unfused", "fused")
    fused, unfused, again = (planned(monkeypatch, "matmul_reduce_scatter", form, state=state) for form in forms)
    assert fused.fused
    assert not unfused.fused
    assert again is fused, "and is remembered"


def test_calls_that_differ_in_having_a_deadline_alone_have_plans_of_their_own(monkeypatch):
    """A deadline bounds the wait of a fused call: so a call without one may be unfused where a call with one is not."""
    state = group()
    deadlines = (None, 20.0, 30.0, None)
    without, one, other, again = (
        planned(monkeypatch, "all_gather_matmul", "auto", state=state, deadline=deadline) for deadline in deadlines
    )
    assert one is not without
    assert one is other, "its length decides nothing"
    assert again is without


def test_calls_that_differ_in_their_op_alone_have_keys_of_their_own():
    a, b = torch.empty(4, 2), torch.empty(2, 6)
    ops = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
    assert len({Request(op, a, [b], [None], ["none"], None, [None]).key(group()) for op in ops}) == len(ops)


def test_calls_that_differ_in_the_layout_of_a_alone_have_keys_of_their_own():
    """A repeat of one would read the other's rows by the wrong strides."""
    b = torch.empty(4, 6)
    several = [torch.empty(4, 4), torch.empty(4, 4).t(), torch.empty(8, 4), torch.empty(4, 4, dtype=torch.bfloat16)]
    keys = [Request("all_gather_matmul", a, [b], [None], ["none"], None, [None]).key(group()) for a in several]
    assert len(set(keys)) == len(several)
    again = Request("all_gather_matmul", several[0].clone(), [b], [None], ["none"], None, [None])
    assert again.key(group()) == keys[0], "contents and addresses decide nothing"


def test_calls_of_other_shards_and_on_trial_have_plans_of_their_own(monkeypatch):
    state = group()
    first, other = (planned(monkeypatch, "all_gather_matmul", "auto", state=state, rows=rows) for rows in (4096, 2048))
    assert (first.case.rows, other.case.rows) == (4096, 2048)
    with dispatch.trial(True, 7):
        assert planned(monkeypatch, "all_gather_matmul", "auto", state=state).decision.chunks == 7
    assert planned(monkeypatch, "all_gather_matmul", "auto", state=state) is first


OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
#: What the host's part of a call takes on hosts on which it decides.
SLOW_HOST = {"2": {"fused": dict.fromkeys(OPS, 3.7e-4), "unfused": dict.fromkeys(OPS, 2.2e-4), "source": "a slow host"}}
FAST_HOST = {"2": {"fused": dict.fromkeys(OPS, 5e-5), "unfused": dict.fromkeys(OPS, 9e-5), "source": "a fast host"}}


def test_every_op_has_its_hosts_time():
    for device, rates in dispatch.table()["rates"].items():
        for host in rates.get("host", {}).values():
            assert set(host["fused"]) == set(host["unfused"]) == set(OPS), device
            assert host["source"]


@pytest.fixture
def count(monkeypatch):
    """Sets what the device counts, by the variable's text; None unsets it."""

    def set_to(text: str | None) -> None:
        monkeypatch.delenv("TILESTREAM_GRAPH_RANKS", raising=False)
        if text is not None:
            monkeypatch.setenv("TILESTREAM_GRAPH_RANKS", text)
        counting.cache_clear()

    set_to(None)
    yield set_to
    counting.cache_clear()


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_a_call_that_the_host_would_hold_up_is_unfused(monkeypatch, op, count):
    """As programs call it, back to back, on a host on which gathers of 3072 rows win fused, and of 1536 lose."""
    monkeypatch.setitem(dispatch.table()["rates"]["sm_90"], "host", SLOW_HOST)
    large, small = (planned(monkeypatch, op, "auto", rows=rows) for rows in (1536, 768))
    assert large.fused
    assert not small.fused
    assert "0.37 ms fused, 0.22 ms unfused; the host takes 0.37 and 0.22 ms (a slow host)" in small.explain()
    assert planned(monkeypatch, op, "fused", rows=768).fused
    assert planned(monkeypatch, op, "auto", rows=768, deadline=20.0).fused, "which bounds its wait"
    assert small.first.fused, "it makes what a capture needs: a replay has no host's part"
    count("0")
    assert planned(monkeypatch, op, "auto", rows=768).first is None
    count("1")
    eager = planned(monkeypatch, op, "auto", rows=768)
    assert eager.fused
    assert planned(monkeypatch, op, "auto", rows=768, state=group(capture=2, agreed=[eager.handshake])).fused


def test_what_was_measured_stays_measured_where_the_host_would_hold_it_up(monkeypatch):
    """Else an all-reduce would say that no measurement shows it to be faster."""
    monkeypatch.setitem(dispatch.table()["rates"]["sm_90"], "host", SLOW_HOST)
    case = replace(gather(256, 8192, 4096, 2), op="matmul_all_reduce", rows=128)
    measured = dispatch.Decision(True, 1, "measured", True)
    found = dispatch.as_called(case, measured)
    assert (found.fused, found.measured) == (False, True)
    assert "the host takes" in found.why
    large = replace(case, rows=8192)
    assert dispatch.as_called(large, measured) is measured
    assert dispatch.as_called(replace(case, world=4), measured) is measured, "nobody knows its host's part"


def test_a_call_that_the_host_would_hold_up_unfused_is_fused(monkeypatch):
    monkeypatch.setitem(dispatch.table()["rates"]["sm_90"], "host", FAST_HOST)
    case = replace(gather(256, 8192, 4096, 2), op="matmul_all_reduce", rows=16)
    measured = dispatch.Decision(False, 4, "measured", True)
    found = dispatch.as_called(case, measured)
    assert (found.fused, found.measured, found.chunks) == (True, True, 1)
    assert "called back to back: 0.05 ms fused, 0.09 ms unfused" in found.why
    assert dispatch.as_called(replace(case, rows=8192), measured) is measured, "its GPU takes longer than its host"
    # With a deadline, too, which only a fused call has.
    assert planned(monkeypatch, "matmul_reduce_scatter", "auto", rows=128).fused
    assert planned(monkeypatch, "matmul_reduce_scatter", "auto", rows=128, deadline=20.0).fused


def test_few_rows_that_nobody_has_measured_are_reduced_in_the_form_that_the_host_issues_sooner(monkeypatch):
    monkeypatch.setitem(dispatch.table()["rates"]["sm_90"], "host", FAST_HOST)
    monkeypatch.setattr(planner, "_transport", lambda state, x, last: ("symmetric memory", ()))
    monkeypatch.setattr(planner, "_device_class", lambda device: "sm_90")

    def made(rows, counted=False):
        a, b = torch.empty(0, dtype=torch.bfloat16), torch.empty(999, 1333, device="meta")
        request = Request("matmul_all_reduce", a, [b], [None], ["none"], None, [None], form="auto")
        said = {"a": "rows"}, "", "not measured"
        return planner._make(group(), request, (rows, 1333), 1333, 999, *said, counted, False)

    assert made(16).fused
    assert "the host takes 0.05 and 0.09 ms" in made(16).decision.why
    for plan in (made(16384), made(16, counted=True)):
        assert not plan.fused
        assert [one.why for one in plan.refused] == ["not measured"]


def test_a_measurement_says_more_of_the_gpus_part_than_the_model(monkeypatch):
    """A form that was measured to lose on the GPU is modelled to take as long as the other at least."""
    monkeypatch.setitem(dispatch.table()["rates"]["sm_90"], "host", FAST_HOST)
    case = replace(gather(8192, 8192, 4096, 2), op="matmul_reduce_scatter")
    unfused = dispatch.Decision(False, 1, "measured", True)
    assert dispatch.as_called(case, unfused) is unfused
    assert dispatch.as_called(case, replace(unfused, measured=False)).fused


def test_each_rank_multiplies_all_rows_of_an_all_reduce_once():
    """Modelled as measured: its rows are all rows, and are no shard's."""
    rates = dispatch_table["rates"]["sm_90"]
    for world in (2, 4, 8):
        record = json.loads((RECORDS / "h200" / f"all_reduce_x{world}.json").read_text(encoding="utf-8"))
        rows = [row for row in record["rows"] if row["op"] == "matmul_all_reduce" and row["rows"] >= 64]
        assert rows
        for row in rows:
            case = Case(row["op"], row["rows"], row["n"], row["k"], row["width"], world, "bfloat16", 2, "sm_90")
            modelled, measured = dispatch._seconds(case, rates) * 1e3, row["ms"]["nccl + ours"]
            # Few rows take longer than the model's, by the weight's bandwidth, and never less.
            assert 0.5 * measured < modelled < 1.05 * measured, (case, modelled, measured)
    for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        case = Case(op, 8192, 4096, 4096, 4096, 8, "bfloat16", 2, "sm_90")
        shard = case if op == "matmul_all_reduce" else replace(case, rows=8192 // 8)
        assert shard.all_rows == 8192
        assert shard.unfused_bytes == 8192 // 8 * 4096 * 2 * (2 if op == "matmul_all_reduce" else 1)


def test_calls_with_and_without_a_deadline_have_keys_of_their_own():
    a, b = torch.empty(4, 2), torch.empty(2, 6)
    requests = [Request("all_gather_matmul", a, [b], [None], ["none"], None, [None], deadline=d) for d in (None, 1, 2)]
    without, one, other = (request.key(group()) for request in requests)
    assert one == other != without


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_no_stream_waits_for_a_peer_where_all_share_a_queue(monkeypatch, op):
    """The watchdog's stream would stand behind it: the wait would have no bound."""
    free = planned(monkeypatch, op)
    assert free.fused
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    plan = planned(monkeypatch, op)
    assert not plan.fused
    assert plan.transport == "collective"
    assert "refused   fused: CUDA_DEVICE_MAX_CONNECTIONS is 1" in plan.explain()
    assert plan.handshake != free.handshake, "a rank with another environment differs"
    unfused = planned(monkeypatch, op, "unfused")
    assert unfused.decision.why == 'the caller asks for form="unfused"'
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert planned(monkeypatch, op) == free


def test_a_gather_is_fused_and_pushed_where_all_share_a_queue(monkeypatch):
    assert planned(monkeypatch, "all_gather_matmul").decision.way == "pull"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    plan = planned(monkeypatch, "all_gather_matmul")
    assert plan.fused
    assert plan.decision.way == "push"


def test_an_all_reduce_says_that_nothing_overlaps_and_a_sum_where_it_begins(monkeypatch):
    said = planned(monkeypatch, "matmul_all_reduce").explain()
    assert "\n  form      fused: in one shot: each rank reads the partial sums of all, and adds, by symmetric" in said
    assert "\n  partial   4096 x 8192 bfloat16 of each rank\n" in said
    assert "overlap" not in said
    assert "pivot" not in said
    for rank in range(2):
        assert f"pivot rank {1 - rank}\n" in planned(monkeypatch, "matmul_reduce_scatter", rank=rank).explain()
        assert f"pivot rank {rank}\n" in planned(monkeypatch, "all_gather_matmul", rank=rank).explain()


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_nodes_need_not_reach_inside_alike(monkeypatch, op):
    """From a node's first call on it knows that its GPUs do not reach each other; others' do."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    here, there = planned(monkeypatch, op), planned(monkeypatch, op, unreachable="rank 0: no peer access")
    assert here.handshake != there.handshake
    assert here.internode.handshake == there.internode.handshake
    other = replace(here, agreed={**here.agreed, "a": "other rows"})
    assert other.internode.handshake != here.internode.handshake


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_a_capture_holds_what_was_called_before_it(monkeypatch, op, count):
    count("1")
    eager = planned(monkeypatch, op)
    assert eager.counted
    assert eager.fused
    assert (eager.decision.way, eager.chunks == 1) == ("push", op != "all_gather_matmul")
    assert "counted   by the device: CUDA graphs may hold the call" in eager.explain()
    before = planned(monkeypatch, op, state=group(capture=1))
    assert (before.fused, before.transport) == (False, "collective")
    assert f"refused   fused: {planner.UNPREPARED}" in before.explain()
    behind = planned(monkeypatch, op, state=group(capture=2, agreed=[eager.handshake]))
    assert behind == eager
    state = group()
    assert planned(monkeypatch, op, state=state) is planned(monkeypatch, op, state=state)
    state.capture = lambda x: 1
    assert not planned(monkeypatch, op, state=state).fused
    state.prepared.add(eager.handshake)
    state.capture = lambda x: 2
    assert planned(monkeypatch, op, state=state).fused, "a call between two captures counts"


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_the_first_eager_call_of_a_kind_makes_what_a_capture_needs(monkeypatch, op, count):
    state = group()
    eager = planned(monkeypatch, op, state=state)
    first = eager.first
    assert (eager.counted, first.counted, first.fused) == (False, True, True)
    assert "in graphs fused, counted by the device" in eager.explain()
    assert planner.due(state, eager) is first
    state.agreed.add(first.handshake)
    assert planner.due(state, eager) is first, "one that failed behind the comparison is made again"
    state.prepared.add(first.handshake)
    assert planner.due(state, eager) is None, "once"
    captured = planned(monkeypatch, op, state=group(capture=2, agreed=[first.handshake]))
    assert captured == first
    assert planner.due(state, captured) is None
    assert not planned(monkeypatch, op, state=group(capture=2, agreed=[eager.handshake])).fused, "another kind"


@pytest.mark.parametrize(
    "change",
    [
        {"a": torch.empty(0, 16, dtype=torch.bfloat16)}, {"bs": [torch.empty(8192, 1792, device="meta")] * 2},
        {"biases": [torch.empty(3584)]}, {"activations": ["relu"]}, {"out_dtype": torch.float32},
        {"fast_accum": False}, {"return_a": True}, {"scales_b": [torch.empty(1)]}, {"scale_a": torch.empty(8, 1)},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_calls_with_other_kernels_are_other_kinds(monkeypatch, count, change):
    """Each kind's first call loads its kernels, which a capture could not."""
    state = group()
    a, b = torch.empty(0, 8, dtype=torch.bfloat16), torch.empty(8192, 3584, device="meta")
    one = Request("matmul_reduce_scatter", a, [b], [None], ["none"], None, [None], form="fused")
    firsts = []
    for request in (one, one._replace(**change)):
        planned(monkeypatch, "matmul_reduce_scatter")  # as on GPUs
        firsts.append(make_plan(state, request, (4096, 8192), 8192, {"a": "rows"}).first)
    assert firsts[0].handshake != firsts[1].handshake
    error = difference(one.op, firsts[0].handshake, 0, firsts[1].handshake, 1)
    assert re.search(r"differ in kind: K 8, columns 3584, .*rank 0, K \d+, columns .*rank 1\. All ranks", str(error))


def test_a_kind_is_said_in_words():
    a, b = torch.empty(0, 8, dtype=torch.bfloat16), torch.empty(8, 3584, device="meta")
    one = Request("all_gather_matmul", a, [b], [None], ["none"], None, [None], return_a=True)
    assert one.kind == "K 8, columns 3584, fast_accum True, return_a True"
    many = one._replace(
        bs=[b, b], biases=[None, a], activations=["relu", "none"], out_dtype=torch.float32,
        scale_a=torch.empty(1), scales_b=[torch.empty(7), None],
    )  # fmt: skip
    assert many.kind == (
        "K 8, columns 3584+3584, scales 1 7 -, bias -b, activation relu+none, out_dtype float32, fast_accum True, "
        "return_a True"
    )


def test_nothing_is_made_for_captures_that_hold_no_fused_call(monkeypatch, count):
    assert planned(monkeypatch, "all_gather_matmul").first is not None
    assert planned(monkeypatch, "all_gather_matmul", "unfused").first is None
    assert planned(monkeypatch, "all_gather_matmul", unreachable="2 hosts").first is None
    with dispatch.trial(True, 1):
        assert planned(monkeypatch, "all_gather_matmul", "auto").first is None
    for text in ("0", "1"):
        count(text)
        assert planned(monkeypatch, "all_gather_matmul").first is None
    count("2")
    with pytest.raises(
        ValueError, match=r"TILESTREAM_GRAPH_RANKS='2': .*captured, or unset, .*; 1 for all; 0 for none"
    ):
        planned(monkeypatch, "all_gather_matmul")


@pytest.mark.parametrize("form", ["fused", "unfused"])
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_ranks_whose_devices_count_other_calls_differ_by_name(monkeypatch, op, form, count):
    """Else one would make a first call, for a capture, that its peers do not make."""
    ours = planned(monkeypatch, op, form)
    count("0")
    theirs = planned(monkeypatch, op, form, rank=1)
    error = difference(op, ours.handshake.rstrip(), 0, theirs.handshake.rstrip(), 1)
    assert "differ in TILESTREAM_GRAPH_RANKS: captured on rank 0, none on rank 1. All ranks" in str(error)
    assert ours.internode.handshake == theirs.internode.handshake, "each node has its own graphs"
    count("captured")
    assert planned(monkeypatch, op, form).handshake == ours.handshake, "as it is by default"


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
@pytest.mark.parametrize(
    "carried", [("gloo", ()), ("collective", (planner.Refusal("fused", "on ROCm"),))], ids=lambda carried: carried[0]
)
def test_nothing_is_planned_for_graphs_without_symmetric_memory(monkeypatch, op, carried):
    """As on the CPU, where ranks may differ in what their devices would count, too."""
    planned(monkeypatch, op)
    monkeypatch.setattr(planner, "_transport", lambda state, x, last: carried)
    made, counted = planner._make, []
    monkeypatch.setattr(planner, "_make", lambda *given: counted.append(given[-2]) or made(*given))
    a, b = torch.empty(0, dtype=torch.bfloat16), torch.empty(8192, 3584, device="meta")
    request = Request(op, a, [b], [None], ["none"], None, [None], form="fused")
    plan = make_plan(group(), request, (4096, 8192), 8192, {"a": "rows"})
    assert counted == [False]
    assert plan.first is None
    assert "TILESTREAM_GRAPH_RANKS" not in plan.agreed


@pytest.mark.parametrize("text", ["1", "captured"])
def test_a_promise_of_equal_bits_is_not_broken_by_a_capture(monkeypatch, count, text):
    count(text)
    with invariant(), pytest.raises(NotImplementedError, match=r"not fused .*call it once before the capture"):
        planned(monkeypatch, "matmul_reduce_scatter", state=group(capture=1))


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_a_plans_promise_says_what_it_costs(monkeypatch, op):
    decide = planner.decide
    monkeypatch.setattr(planner, "decide", lambda case, form: decide(case, "unfused" if form == "auto" else form))
    monkeypatch.setattr(planner, "as_called", lambda case, decision: decision)
    state = group()
    asked, free = (planned(monkeypatch, op, "auto", state=state, rows=1, invariant=of) for of in (True, None))
    with invariant():
        assert planned(monkeypatch, op, "auto", state=state, rows=1) == asked
        assert planned(monkeypatch, op, "auto", state=state, rows=1, invariant=False) == free
    assert not free.fused
    assert "promise" not in free.explain()
    text, sums = asked.explain(), op != "all_gather_matmul"
    assert asked.fused == sums
    assert "promise   the same bits for each row" in text
    assert ("then in the order of the ranks" in text) == sums
    assert ("why       tilestream.invariant: a fused sum is added in the order of the ranks" in text) == sums
    cost = f"the form: unfused without it ({free.refused[0].why})" if sums else "nothing beside the matmul's own"
    assert f"costs     {cost}" in text


def test_ranks_that_count_otherwise_differ(monkeypatch, count):
    count("1")
    mine = planned(monkeypatch, "all_gather_matmul")
    count("0")
    theirs = planned(monkeypatch, "all_gather_matmul")
    assert not theirs.counted
    assert mine.handshake != theirs.handshake
    assert mine.internode.handshake == theirs.internode.handshake, "nodes need not count alike"


@pytest.mark.parametrize("dim", [-3, 2])
def test_a_dimension_that_a_tensor_has_not_is_no_known_call(dim):
    """The registered op refuses it by its name."""
    a, b = torch.ones(4, 8), torch.ones(8, 4)
    assert given_request("all_gather_matmul", a, b, dim=dim) is None
    assert given_request("all_gather_matmul", a, b, dim=dim % 2) is not None


def test_unchecked_arguments_are_those_of_a_checked_request():
    a, b, bias = torch.zeros(4, 8), torch.zeros(8, 2), torch.zeros(2)
    of_call = {
        "bias": bias, "activation": "relu", "scale_a": torch.ones(()), "scale_b": torch.ones(1, 2),
        "out_dtype": torch.float32, "form": "unfused", "deadline": 5.0,
    }  # fmt: skip
    found, checked = (make("all_gather_matmul", a, b, **of_call) for make in (given_request, check_request))
    assert found._fields == checked._fields
    for name, one, other in zip(found._fields, found, checked, strict=True):
        assert (one is other) or list_of(one) == list_of(other), name


def list_of(x):
    """Tensors by their addresses."""
    parts = x if isinstance(x, (list, tuple)) else [x]
    return [one.data_ptr() if isinstance(one, torch.Tensor) else one for one in parts]
