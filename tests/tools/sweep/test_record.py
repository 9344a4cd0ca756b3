"""Records of sweeps: written whole, read back, refused where they are something else; CSV beside them."""

from __future__ import annotations

import csv
import json

import pytest

from tilestream_tools.sweep import record


def test_what_is_written_is_read(swept, make_point, tmp_path):
    swept.points.append(make_point(by="nccl", more={"comm": 0.5, "floor": 1.25}))
    path = swept.write(tmp_path / "sweep.json")
    assert record.read(path) == swept
    assert json.loads(path.read_text())["schema"] == record.SCHEMA
    assert not list(tmp_path.glob("*.tmp"))


def test_nothing_measured_is_a_record_too(tmp_path):
    path = record.Sweep({"device": "x"}).write(tmp_path / "sweep.json")
    assert record.read(path).points == []


def test_the_csv_has_a_line_a_point(swept, make_point, tmp_path):
    swept.points.append(make_point(by="nccl", more={"comm": 0.5}))
    swept.write(tmp_path / "sweep.json")
    with (tmp_path / "sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(swept.points)
    assert {rows[0]["shape"], rows[0]["implementation"], rows[0]["left"]} == {"8192x8192x8192", "static", "132"}
    assert (rows[0]["comm"], rows[-1]["comm"]) == ("", "0.5")
    assert float(rows[1]["tflops"]) == swept.points[1].tflops


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "no record of a sweep"),
        ("[]", "no record of a sweep"),
        ('{"kind": "something else", "schema": 1}', "no record of a sweep"),
        ('{"kind": "tilestream sweep", "schema": 7}', "schema 7; this version reads 1: sweep anew"),
        ('{"kind": "tilestream sweep", "schema": 1, "about": {}}', "no record of a sweep: 'points'"),
        ('{"kind": "tilestream sweep", "schema": 1, "about": {}, "refused": [], "points": [{"m": 1}]}', "no record of"),
    ],
)
def test_what_is_no_record(text, what, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError) as raised:
        record.read(path)
    assert what in str(raised.value)
    assert str(path) in str(raised.value)


def test_labels_name_queues(make_point):
    assert make_point(queues=1).label == "dynamic"
    assert make_point(queues=8).label == "dynamic, 8 queues"
