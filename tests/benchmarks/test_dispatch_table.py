"""The table of the ops across ranks is what its records say, and what they say is read as it is meant."""

from __future__ import annotations

import json

import pytest
from benchmarks.core.paths import RESULTS
from benchmarks.core.records import paths
from benchmarks.distributed import dispatch_table as made_by

from tilestream.distributed import dispatch

RECORDS = [path for op in ("gather", "reduce") for path in paths(RESULTS, f"all_{op}_x*.json")]


def record(op="all_gather_matmul", **ms):
    ms = {name.replace("_", " ").replace("nccl ", "nccl + "): value for name, value in ms.items()}
    row = {"op": op, "m": 8192, "n": 3584, "k": 8192, "rows": 4096, "width": 8192, "ms": ms}
    return {"device": "NVIDIA H200", "world": 2, "dtype": "bfloat16", "date": "a day", "rows": [row]}


@pytest.mark.parametrize(
    ("ms", "says"),
    [
        ({"nccl_ours": 1.1, "fused_1": 0.9, "fused_2": 0.8}, (True, 2, "pull")),
        ({"nccl_ours": 1.1, "fused_1": 0.9, "fused_2": 0.895}, (True, 1, "pull")),
        ({"nccl_ours": 0.8, "fused_1": 0.9}, (False, 1, "pull")),
        ({"fused_1": 0.995, "fused_2": 1.1}, (False, 1, "pull")),
        ({}, (False, 1, "pull")),
        ({"fused_push_1": 0.801, "fused_pull_1": 0.8}, (True, 1, "pull")),
        ({"fused_pull_1": 0.8, "fused_push_1": 0.799}, (True, 1, "push")),
        ({"fused_push_1": 0.8, "fused_pull_2": 0.795}, (True, 1, "push")),
        ({"fused_push_1": 0.8, "fused_pull_1": 0.9, "fused_pull_2": 0.7}, (True, 2, "pull")),
        ({"fused_push_1": 0.995}, (False, 1, "pull")),
    ],
)
def test_the_fastest_counts_and_what_is_not_worth_it_does_not(ms, says):
    (entry,) = made_by.entries(record(nccl_mm=1.0, **ms))
    assert (entry["fused"], entry["chunks"], entry["way"]) == says
    if not any("pu" in form for form in ms):
        (entry,) = made_by.entries(record("matmul_reduce_scatter", nccl_mm=1.0, **ms))
        assert (entry["fused"], entry["chunks"], "way" in entry) == (*says[:2], False)


def test_an_entry_decides_its_class(monkeypatch):
    found = made_by.entries(record(nccl_mm=1.0, fused_4=0.5))
    table = json.loads(made_by.text(made_by.TABLE.read_text(), found))
    assert table["rates"] == dispatch.table()["rates"]
    monkeypatch.setattr(dispatch, "table", lambda: table)
    case = dispatch.Case("all_gather_matmul", 4096, 3584, 8192, 8192, 2, "bfloat16", 2, "sm_90")
    decision = dispatch.decide(case)
    assert (decision.fused, decision.chunks, decision.measured) == (True, 4, True)
    assert "2 x H200, a day" in decision.why


def test_shapes_of_one_class_that_are_decided_otherwise_are_refused():
    both = record(nccl_mm=1.0, fused_4=0.5)
    both["rows"] += record(nccl_mm=1.0, fused_4=2.0)["rows"]
    with pytest.raises(ValueError, match="and of the same class"):
        made_by.entries(both)
    with pytest.raises(ValueError, match="device='an A100'"):
        made_by.entries({**both, "device": "an A100"})


def test_the_table_is_what_the_records_say():
    found = [entry for path in RECORDS for entry in made_by.entries(json.loads(path.read_text()))]
    assert dispatch.table()["entries"] == found


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_what_is_decided_is_not_slower_than_nccl_and_torch(path):
    data = json.loads(path.read_text())
    for row in data["rows"]:
        slower = made_by.taken(row["op"], row["ms"]) / row["ms"]["nccl + mm"] - 1
        assert slower <= made_by.BAR, (row["op"], row["m"], row["n"], row["k"], slower)


def test_what_the_form_that_is_decided_took():
    gather, few = "all_gather_matmul", "matmul_all_reduce"
    assert (
        made_by.taken(gather, {"nccl + mm": 1.0, "nccl + ours": 1.1, "fused push 1": 0.9, "fused pull 1": 0.8}) == 0.8
    )
    assert made_by.taken(gather, {"nccl + mm": 1.0, "nccl + ours": 1.1, "fused 1": 0.999}) == 1.1, "not worth it"
    assert made_by.taken(few, {"nccl + mm": 1.0, "nccl + ours": 1.1, "fused 1": 0.999}) == 1.0, "by torch's matmul"
    assert made_by.taken(few, {"nccl + mm": 1.0, "nccl + ours": 1.004, "fused 1": 1.0}) == 1.004


def test_an_entry_says_whose_matmul():
    """Of an all-reduce that is not fused; ranks decide it by the table alone."""
    few = [entry for entry in dispatch.table()["entries"] if entry["op"] == "matmul_all_reduce"]
    assert any(entry.get("library") for entry in few)
    assert not any(entry.get("library") for entry in dispatch.table()["entries"] if entry["fused"] or entry not in few)
    for entry in few:
        case = dispatch.Case(
            entry["op"], entry["rows"], entry["n"], entry["k"], entry["n"], entry["world"], entry["dtype"], 2, "sm_90"
        )
        assert dispatch.decide(case).library == entry.get("library", False)
        assert not dispatch.decide(case, "unfused").library, "what is asked for is ours"


def test_an_entry_is_of_the_day_of_its_row():
    both = record(nccl_mm=1.0, fused_4=0.5)
    both["rows"][0]["date"] = "another day"
    (entry,) = made_by.entries(both)
    assert entry["source"] == "2 x H200, another day"
