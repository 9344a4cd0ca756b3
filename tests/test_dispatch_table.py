"""The table of the ops across ranks is what its records say, and what they say is read as it is meant."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tilestream.distributed import dispatch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import dispatch_table as made_by  # noqa: E402

RECORDS = [x for op in ("gather", "reduce") for x in sorted((BENCHMARKS / "results").glob(f"gpu_all_{op}_x*.json"))]


def record(op="all_gather_matmul", **ms):
    ms = {name.replace("_", " ").replace("nccl ", "nccl + "): value for name, value in ms.items()}
    row = {"op": op, "m": 8192, "n": 3584, "k": 8192, "rows": 4096, "width": 8192, "ms": ms}
    return {"device": "NVIDIA H200", "world": 2, "dtype": "bfloat16", "date": "a day", "rows": [row]}


@pytest.mark.parametrize(
    ("ms", "says"),
    [
        ({"nccl_mm": 1.0, "nccl_ours": 1.1, "fused_1": 0.9, "fused_2": 0.8}, (True, 2)),
        ({"nccl_mm": 1.0, "nccl_ours": 1.1, "fused_1": 0.9, "fused_2": 0.895}, (True, 1)),
        ({"nccl_mm": 1.0, "nccl_ours": 0.8, "fused_1": 0.9}, (False, 1)),
        ({"nccl_mm": 1.0, "fused_1": 0.995, "fused_2": 1.1}, (False, 1)),
        ({"nccl_mm": 1.0}, (False, 1)),
    ],
)
def test_the_fastest_counts_and_what_is_not_worth_it_does_not(ms, says):
    for op in ("all_gather_matmul", "matmul_reduce_scatter"):
        (entry,) = made_by.entries(record(op, **ms))
        assert (entry["fused"], entry["chunks"]) == says
        assert entry.get("way", "none") == ("none" if op == "matmul_reduce_scatter" else "pull")


@pytest.mark.parametrize(
    ("ms", "says"),
    [
        ({"nccl_mm": 1.0, "fused_push_1": 0.801, "fused_pull_1": 0.8}, (True, 1, "pull")),
        ({"nccl_mm": 1.0, "fused_pull_1": 0.8, "fused_push_1": 0.799}, (True, 1, "push")),
        ({"nccl_mm": 1.0, "fused_push_1": 0.8, "fused_pull_2": 0.795}, (True, 1, "push")),
        ({"nccl_mm": 1.0, "fused_push_1": 0.8, "fused_pull_1": 0.9, "fused_pull_2": 0.7}, (True, 2, "pull")),
        ({"nccl_mm": 1.0, "fused_push_1": 0.995}, (False, 1, "pull")),
    ],
)
def test_of_a_gather_the_way_that_took_least_counts(ms, says):
    (entry,) = made_by.entries(record(**ms))
    assert (entry["fused"], entry["chunks"], entry["way"]) == says


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


#: What is lost by more than `made_by.BAR` to NCCL and torch.mm, in percent: all-reduces of few rows that are not fused,
#: whose matmul is ours. By ranks, rows, columns and K. Taken out when mended.
LOST = {
    (2, 1, 8192, 4096): 3.4, (2, 16, 8192, 4096): 2.4,
    (4, 16, 8192, 7168): 2.1, (4, 128, 8192, 7168): 2.8,
    (4, 1, 8192, 2048): 3.3, (4, 16, 8192, 2048): 3.9, (4, 64, 8192, 2048): 2.6, (4, 128, 8192, 2048): 2.4,
}  # fmt: skip


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_what_is_decided_is_not_slower_than_nccl_and_torch(path):
    data = json.loads(path.read_text())
    for row in data["rows"]:
        slower = made_by.taken(row["ms"]) / row["ms"]["nccl + mm"] - 1
        lost = LOST.get((data["world"], row["m"], row["n"], row["k"])) if row["op"] == "matmul_all_reduce" else None
        assert (lost is not None) == (slower > made_by.BAR), (row["op"], row["m"], row["n"], row["k"], slower)
        assert lost is None or lost - 0.1 <= 100 * slower <= lost


def test_every_loss_that_is_listed_has_its_record():
    rows = {
        (data["world"], row["m"], row["n"], row["k"])
        for data in (json.loads(path.read_text()) for path in RECORDS)
        for row in data["rows"] if row["op"] == "matmul_all_reduce"
    }  # fmt: skip
    assert set(LOST) <= rows


def test_what_the_form_that_is_decided_took():
    assert made_by.taken({"nccl + mm": 1.0, "nccl + ours": 1.1, "fused push 1": 0.9, "fused pull 1": 0.8}) == 0.8
    assert made_by.taken({"nccl + mm": 1.0, "nccl + ours": 1.1, "fused 1": 0.999}) == 1.1, "not worth it"


def test_an_entry_is_of_the_day_of_its_row():
    both = record(nccl_mm=1.0, fused_4=0.5)
    both["rows"][0]["date"] = "another day"
    (entry,) = made_by.entries(both)
    assert entry["source"] == "2 x H200, another day"
