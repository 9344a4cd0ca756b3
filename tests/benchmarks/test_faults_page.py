"""The page of faults is what the records say."""

from __future__ import annotations

import json

from benchmarks.core.paths import RESULTS
from benchmarks.report import faults


def test_the_page_is_made_from_the_records():
    assert faults.main(["--check"]) == 0
    recorded = json.loads((RESULTS / "cpu" / "faults.json").read_text(encoding="utf-8"))
    assert len(recorded["rows"]) >= 30
    assert not recorded["failures"]


def test_the_check_of_the_page_can_fail(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(faults, "PAGE", tmp_path / "faults.md")
    assert faults.main(["--check"]) == 1
    assert faults.main([]) == 0
    assert faults.main(["--check"]) == 0
    faults.PAGE.write_text(faults.page().replace("right", "wrong"), encoding="utf-8")
    assert faults.main(["--check"]) == 1
    assert "not what the records say" in capsys.readouterr().err


def test_a_device_without_a_row_leaves_its_cell_empty(tmp_path):
    about = {"device": "x", "torch": "2", "commit": "c", "date": "d", "failures": []}
    row = {"part": "chunks", "name": "late", "does": "a | b", "within": 60.0, "ended": "right", "seconds": 0.5}
    gone = {**row, "name": "lost", "within": 0.3, "ended": "ArrivalTimeout: a|b", "seconds": 0.05}
    for folder, rows in (("cpu", [row]), ("h100", [row, gone])):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "faults.json").write_text(json.dumps({**about, "rows": rows}), encoding="utf-8")
    text = faults.page(tmp_path)
    assert "| fault | what is done | ends | may wait | CPU | H100 |" in text
    assert "| late | a / b | right | until it comes | 0.50 s | 0.50 s |" in text
    assert "| lost | a / b | `ArrivalTimeout: a/b` | 0.3 s |  | 50.0 ms |" in text


def test_a_device_that_ends_otherwise_says_how_and_what_it_could_not_make(tmp_path):
    about = {"device": "x", "torch": "2", "commit": "c", "date": "d", "failures": []}
    row = {"part": "ranks", "name": "killed", "does": "a", "within": 0.0, "ended": "GroupBroken: x", "seconds": 0.5}
    expired = {**row, "ended": "ArrivalTimeout: y", "within": 0.5}
    alike = {**row, "ended": "GroupBroken: z"}
    for folder, one, missing in (("cpu", row, []), ("h100", alike, ["ranks: late: needs two"]), ("h200", expired, [])):
        (tmp_path / folder).mkdir()
        text = json.dumps({**about, "missing": missing, "rows": [one]})
        (tmp_path / folder / "faults.json").write_text(text, encoding="utf-8")
    text = faults.page(tmp_path)
    assert "| killed | a | `GroupBroken: x`; H200: `ArrivalTimeout: y` after 0.5 s | - |" in text
    assert "none ended otherwise; not made: ranks: late: needs two." in text
    assert text.count("not made") == 1


def test_runs_by_the_thousand_add_up(tmp_path):
    assert not faults._many(tmp_path)
    about = {"device": "x", "torch": "2", "commit": "c", "date": "d"}
    rows = [{"seed": seed, "cpu_seconds": 30.0, "launches": 600_000, "wrong": [], "drifted": []} for seed in (0, 1)]
    for folder, drifted in (("cpu", ["files: 3 at first, 4 in the end"]), ("h100", [])):
        (tmp_path / folder).mkdir()
        made = [rows[0], {**rows[1], "drifted": drifted}]
        (tmp_path / folder / "soak.json").write_text(json.dumps({**about, "rows": made}), encoding="utf-8")
    _, table = faults._many(tmp_path)
    what = "launches of random shapes, schedules and arrivals"
    assert f"| {what} | H100 | 1,200,000 | 1.0 | 0 to 1 | nothing |" in table
    assert f"| {what} | CPU | 1,200,000 | 1.0 | 0 to 1 | files: 3 at first, 4 in the end |" in table
    made[1]["mended"] = "abc"
    rows = [made[0], {**made[1], "seed": 7, "drifted": ["it grew"]}]
    (tmp_path / "cpu" / "soak.json").write_text(json.dumps({**about, "rows": rows}), encoding="utf-8")
    assert "| 0, 7 | nothing (memory of seed 7, mended at `abc`) |" in faults._many(tmp_path)[1]


def test_the_records_have_as_many_launches_calls_and_files_as_the_page_is_to_show():
    """A million launches on one GPU, 100,000 malformed calls, every parser; and nothing wrong in any."""
    found = {(name, data["folder"]): data["rows"] for name, *_ in faults.MANY for data in map(
        faults.load, faults.paths(RESULTS, f"{name}.json"))}  # fmt: skip
    assert sum(row["launches"] for row in found["soak", "h100"]) >= 1_000_000
    assert sum(row["calls"] for row in found["malformed", "cpu"]) >= 100_000
    assert sum(row["files"] for row in found["parsers", "cpu"]) >= 10_000
    for (_, device), rows in found.items():
        assert not [one for row in rows for one in row["wrong"]]
        assert not [one for row in rows if "mended" not in row for one in row.get("drifted", ())], device
        assert len({row["seed"] for row in rows}) == len(rows), "a seed counts once"
