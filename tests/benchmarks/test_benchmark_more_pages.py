"""The pages on grouped matmuls and on the cost of the same bits, from records of invented figures."""

from __future__ import annotations

import json
from pathlib import Path

import board_records
from benchmarks.report import grouped, invariance
from board_records import promise_records

ABOUT = {
    "device": "NVIDIA H100", "python": "3.12", "torch": "2.11", "triton": "3.6", "commit": "0" * 7,
    "date": "2026-11-23", "dtype": "bfloat16", "failures": [], "missing": [],
}  # fmt: skip


def written(tmp_path: Path, name: str, rows: list[dict], **more: object) -> Path:
    folder = tmp_path / "h100"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"name": name, **ABOUT, **more, "rows": rows}))
    return tmp_path


def layer(kind: str, skew: str, ratio: float) -> dict:
    return {
        "layer": "a layer", "shape": "64x32x16, 4 experts", "skew": skew, "kind": kind, "largest_group": 16,
        "us": {"torch": 10.0 * ratio, "ours": 10.0, "loop": 30.0}, "tflops": {"ours": 1.0, "torch": 1.0},
        "host_us": {"ours": 3.0, "torch": 4.0}, "ratio": ratio, "band": [ratio - 0.01, ratio + 0.01], "plan": "a plan",
    }  # fmt: skip


def test_pages_without_a_record_say_so(tmp_path: Path) -> None:
    assert "No such run is recorded" in "".join(grouped.page(tmp_path))
    assert "No such run is recorded" in "".join(invariance.page(tmp_path))


def test_layers_are_counted_by_kind_and_skew(tmp_path: Path) -> None:
    rows = [layer("product", "uniform", 1.25), layer("product", "zipf", 0.8), layer("gradient of weights", "zipf", 2.0)]
    lines = "\n".join(grouped.page(written(tmp_path, "gemm_grouped", rows))).splitlines()
    assert "| product | all | 2 | 1.000 | 0.800 | 1 / 0 / 1 |" in lines
    assert "| product | uniform | 1 | 1.250 | 1.250 | 1 / 0 / 0 |" in lines
    assert "| gradient of weights | zipf | 1 | 2.000 | 2.000 | 1 / 0 / 0 |" in lines
    assert sum(line.startswith("| a layer | 64x32x16") for line in lines) == 3


def test_peers_and_what_skew_costs_have_columns_where_they_are_recorded(tmp_path: Path) -> None:
    rows = [layer("product", skew, 1.25) | {"seed": 7} for skew in ("uniform", "zipf")]
    rows += [layer("product", skew, 1.0) | {"layer": "another, decode"} for skew in ("uniform", "zipf")]
    for row, rate, theirs in zip(rows, (100.0, 90.0, 10.0, 12.0), (80.0, 40.0, 10.0, 10.0), strict=True):
        row["tflops"] = {"ours": rate, "torch": theirs}
    without = "\n".join(grouped.page(written(tmp_path, "gemm_grouped", rows)))
    assert "DeepGEMM" not in without
    assert "Seeds: 7 (uniform), 7 (zipf)." in without
    assert "| a layer | 100 | 90 | 0.900 | 0.500 | - | - |" in without.splitlines()
    assert "0.900 with many rows, 1.200 of *decode*; at worst" in without
    assert "1 of 2 products keep 0.95 or more." in without
    for row in rows[:2]:
        row |= {"us": row["us"] | {"DeepGEMM": 8.0}}
        row["peers"] = {"DeepGEMM": {"ratio": 0.8, "band": [0.79, 0.81], "config": ""}}
    rows[0]["us"] |= {"quack": 7.0}
    rows[0]["peers"] |= {"quack": {"ratio": 0.7, "band": [0.69, 0.71], "config": "a tile"}}
    rows[2] |= {"refused": {"DeepGEMM": "RuntimeError: no\ncompiler"}}
    rows.append(layer("gradient of weights", "zipf", 2.0))
    peers = {"DeepGEMM": "0.1.4", "quack": "0.6.5"}
    lines = "\n".join(
        grouped.page(written(tmp_path, "gemm_grouped", rows, peers=peers, absent={"CUTLASS": "no nvcc"}))
    ).splitlines()
    assert "| product | all | 2 | 0.800 | 0.800 | 0 / 0 / 2 |" in lines
    assert "- another, decode, uniform: RuntimeError: no compiler" in lines
    assert "| product | all | 1 | 0.700 | 0.700 | 0 / 0 / 1 |" in lines
    assert "| product | all | 2 | 0.748 | 0.700 | 0 / 0 / 2 |" in lines  # the faster of both
    assert "Its fastest configurations, with the number of products: a tile (1)." in lines
    assert "- CUTLASS: no nvcc" in lines
    shape = "64x32x16, 4 experts | zipf"
    assert f"| a layer | {shape} | 16 | 12 | 30 | 10 | 8 | - | 90 | 1.250 | 0.800 | - | 3 / 4 | a plan |" in lines
    assert f"| another, decode | {shape} | 16 | 10 | 30 | 10 | - | - | 12 | 1.000 | - | - | 3 / 4 | a plan |" in lines
    assert f"| a layer | {shape} | 16 | 20 | 30 | 10 | 1 | 2.000 | 3 / 4 | a plan |" in lines


def test_the_promises_cost_is_by_rows_and_beside_each_peer(tmp_path: Path) -> None:
    board_records.written(tmp_path, *promise_records())
    text = "\n".join(invariance.page(tmp_path))
    assert "| product, M = 1 | 1 | 1.000 (1.000) | 0.700 (0.700) |" in text
    assert "| product, M = 16 | 2 | 0.600 (0.400) | 1.100 (1.100) |" in text
    assert "| attention, decode | 1 | 0.800 (0.800) | - |" in text
    assert "sgemm-bi" not in text.partition("| product")[2]


def test_few_rows_below_the_least_are_named_with_their_reason(tmp_path: Path) -> None:
    record, _ = promise_records()
    rows = record["rows"]
    expected = ("9% by the cost model (stream_k)", "nothing: the plan is the same without it", "2%: static")
    for one, text in zip(rows[:3], expected, strict=True):
        one["expected"] = text
    rows += [rows[0] | {"shape": "128x32x64"}, rows[0] | {"shape": "256x32x64"}]
    rows += [rows[0] | {"shape": "64x32x64", "ratios": {"free": 0.92, "cublas": 0.92}}]
    board_records.written(tmp_path, record)
    parts = invariance.page(tmp_path)
    split, same, other = parts[parts.index("Below 0.92 with M <= 128:") + 1].splitlines()
    assert split.startswith("- 16x32x64 (0.900 of free), 128x32x64 (0.900 of free): K is not split under the promise")
    assert same.startswith("- 16x64x64 (0.400 of free): the promise costs nothing, since the plan without it does not")
    assert other.startswith("- 1x32x64 (0.700 of cublas): the plan without the promise does not split K")
    record["rows"] = rows[-1:]
    board_records.written(tmp_path, record)
    assert "Below 0.92" not in "\n".join(invariance.page(tmp_path))


def test_pairs_that_differ_are_told(tmp_path: Path) -> None:
    board_records.written(tmp_path, *promise_records(("7/0/1: 3 of 5",)))
    text = "\n".join(invariance.page(tmp_path))
    assert "**10,000 pairs, 5 numbers compared; 1 pairs differ.**" in text
    assert "Failed: 7/0/1: 3 of 5" in text
    assert "| static | 1,234 |" in text
