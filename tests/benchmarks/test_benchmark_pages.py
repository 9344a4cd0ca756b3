"""The pages of docs/performance: what the records and the notes say, and no part of the notes unused."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.core.paths import RESULTS
from benchmarks.core.records import records
from benchmarks.core.timing import quartiles
from benchmarks.report import (
    arrival,
    attention,
    blocks,
    contention,
    cpu,
    distributed,
    gemm,
    gemm_losses,
    gemm_random,
    grouped,
    index,
    invariance,
    pages,
    tables,
)
from benchmarks.report import notes as notes_module
from benchmarks.report.notes import NOTES, Notes

from tilestream_tools.sweep.record import Sweep

ROOT = Path(__file__).parents[2]


def test_the_pages_are_made_from_the_records():
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "report", "pages", "--check"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_the_check_of_the_pages_can_fail(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pages, "FOLDER", tmp_path)
    for name in pages.PAGES:
        (tmp_path / f"{name}.md").write_text(pages.text(name), encoding="utf-8")
    assert pages.main(["--check"]) == 0
    (tmp_path / "gemm.md").write_text(pages.text("gemm").replace("1", "2"), encoding="utf-8")
    (tmp_path / "old.md").write_text("", encoding="utf-8")
    assert pages.main(["--check"]) == 1
    assert "gemm.md, old.md: not what records and notes say" in capsys.readouterr().err


def lost(data):
    return gemm_losses.losses(data, {"rows": []})


def reduce_scatter(data):
    return distributed.of_op({**data, "world": 2}, "matmul_reduce_scatter")


ABOUT = {
    "device": "a GPU", "torch": "2", "triton": "3", "commit": "c", "date": "d", "dtype": "bfloat16", "failures": [],
}  # fmt: skip
GEMM = {"shape": "256x6144x4096", "us": {"ours": 28.0, "cublas": 25.0}, "of_floor": 0.61, "binds": "bytes",
        "ratio": 0.9, "scales": "row", "fast_accum": True}  # fmt: skip
SUM = {
    "op": "matmul_reduce_scatter", "m": 8192, "n": 4096, "k": 2048, "decided": "fused", "chunks": 2,
    "ms": {"mm": 0.7, "ours mm": 0.6, "nccl": 0.3, "nccl + mm": 1.3, "fused 2": 1.0, "ours": 1.0, "nccl + ours": 1.2},
}  # fmt: skip
WAYS = (
    "copy",
    "multiply",
    "torch.mm",
    "by hand",
    "by hand, our chunks",
    "restarted",
    "streamed",
    "captured",
    "by hand, captured",
)
BY_HAND = {
    "shape": "s", "chunks": [8, 1], "ms": dict(zip(WAYS, (3.5, 3.9, 3.6, 3.8, 3.7, 3.9, 4.0, 3.6, 3.7), strict=True)),
    "gpu_ms": dict(zip(WAYS, (3.5, 3.4, 3.4, 3.8, 3.6, 3.75, 3.7, 3.5, 3.6), strict=True)),
}  # fmt: skip
EXPERTS = {
    "active": 8, "rows": 100, "ms": {"copy": 5.0, "multiply": 0.2, "by hand": 6.0, "restarted": 5.2, "streamed": 5.5},
    "of_larger": {"restarted": 1.04, "by hand": 1.2}, "of_by_hand": {"restarted": 1.14, "streamed": 1.09},
}  # fmt: skip
LISTS = {"name": "lists, causal", "tflops": {"packed": 500.0}, "lengths": [1000, 3000]}
ORDER = {
    "section": "order", "producer": "worker", "way": "x", "rounds": 10000, "wrong_rounds": 1234, "wrong_elements": 5,
}  # fmt: skip
POLLING = {
    "section": "polling", "pause_ns": 64, "watts": None, "looks_per_us_and_poller": 1.25, "ms": 2.5, "matmul": "",
    "pollers_beside": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("section", "row", "more", "says"),
    [
        (attention.lists, LISTS, {}, "The record has no dense call to compare with. | packed |"),
        (arrival.order, ORDER, {"failures": ["a: 7 of 9"]}, "| 10,000 | 1,234 | 5 | Not finished: a: 7 of 9."),
        (arrival.polling, POLLING, {}, "| 64 | 1.250 | not readable | 2.500 | - |"),
        (arrival.host_to_device, BY_HAND, {"missing": [], "folder": "h100"}, "| s | 1.026 : 0.987 |"),
        (arrival.host_to_device, BY_HAND, {"missing": [], "folder": "h100"}, "| 3.77 : 3.67 | +132 : +85 |"),
        (arrival.host_to_device, BY_HAND, {"missing": [], "folder": "h100"}, "| s | 8 | 3.50 : 3.50 | 3.90 : 3.40 |"),
        (arrival.stream_experts, EXPERTS, {}, "the longer of copy and multiply with 8 active experts, and is 1.15 x"),
        (arrival.stream_experts, EXPERTS, {}, "by hand with no number of experts. By hand takes 1.200 to 1.200"),
        (arrival.stream_experts, EXPERTS, {}, "| 8 | 100 | 5.00 | 0.20 | 6.00 | 5.20 | 5.50 | 1.040 | 1.154 | 1.091 |"),
        (reduce_scatter, SUM, {}, "No handshake was measured of this op: the floor is too low by it, and more was"),
        (reduce_scatter, SUM, {}, "No shape is behind"),
        (lost, GEMM | {"plan": "96 workers, 128x128 tiles"}, {"device": "H100"}, "what is known is of 128x96 tiles"),
        (lost, GEMM | {"plan": "portable"}, {}, "| - | - | - | 56 MB | 1.98 | 0.61, bytes | not looked into |"),
    ],
)
def test_what_no_record_has_now(section, row, more, says):
    assert says in " ".join("\n".join(section({**ABOUT, **more, "rows": [row]})).split())


def test_what_is_not_there_has_no_sentence():
    won = {**GEMM, "ratio": 1.01}
    assert gemm_losses.losses({"rows": [won]}, {"rows": []}) == gemm_losses.of_fp8([won]) == []
    assert gemm_losses.of_epilogue([won]) == gemm_losses.of_quack([{"ratios": {"quack": 0.99}}], []) == []
    assert gemm.behind_torch({"rows": [{"call": "mm", "ratio": {"warm": 1.0, "cold": 0.9}}]}) == ""
    assert gemm.weights_read([won]) == distributed.of_op({"rows": [SUM]}, "all_gather_matmul") == []
    (_, said) = gemm_losses.of_fp8([GEMM])
    assert "Precise" not in said


def test_what_a_record_lacks_is_told():
    cut = {"rows": [{}] * 4, "planned": 48, "failures": [], "missing": []}
    assert tables.incomplete(cut) == ["4 of 48 planned rows: the run was cut off."]
    failure = {"what": "1x2x3", "error": "E: a|b"}
    said = "Failed: 1x2x3 (E: a/b). 4 of 6 planned rows. Not measured, for want of time: 5x6x7."
    assert tables.incomplete({**cut, "planned": 6, "failures": [failure], "missing": ["5x6x7"]}) == [said]
    assert tables.incomplete({**cut, "planned": 4}) == []
    many = {**cut, "planned": 12, "missing": list("abcdefgh")}
    said = "4 of 12 planned rows. Not measured, for want of time: a, b, c, d, and 4 more, which the record names."
    assert tables.incomplete(many) == [said]
    sweep = Sweep({**ABOUT, "missing": ["1x2x3"]}, [], [{"shape": "s", "taken": 4, "way": "quack", "why": "a|b"}])
    _, said, _ = contention.idle(sweep)
    assert said == "Refused: s, 4 taken, quack (a/b). Not measured, for want of time: 1x2x3."


def test_a_sweep_has_a_column_for_each_of_its_ways():
    sweep = contention.sweeps(RESULTS, "held")[0]
    sweep.points[:] = [point for point in sweep.points if point.implementation in ("torch", "dynamic")]
    heads = [line for line in "\n".join(contention.held(sweep)).splitlines() if line.startswith("| SMs held")]
    assert set(heads) == {"| SMs held | torch | dynamic | dynamic / torch | of proportion | of whole waves |"}


def test_ratios_are_judged_by_their_quartiles():
    assert quartiles([5, 1, 4, 2, 3]) == (2, 4)
    assert quartiles([7]) == (7, 7)
    bands = {(1.01, (0.99, 1.02)): "even", (1.05, (1.02, 1.08)): "won", (0.97, (0.95, 0.99)): "lost"}
    assert {key: tables.verdict(*key) for key in bands} == bands
    assert tables.geomean([1.0, 1.0, 8.0]) == pytest.approx(2)
    assert math.isnan(tables.geomean([]))


def test_without_records_a_page_is_its_head(results):
    for name, page in pages.PAGES.items():
        if name != "index":
            notes = Notes(name)
            assert page(results) == [notes(part) for part in ("page", "none") if part in notes.parts]
    assert "| --- |" not in pages.text("index", results)


@pytest.mark.parametrize("name", pages.PAGES)
def test_every_part_of_the_notes_is_used(name, monkeypatch):
    used = set()

    class Parts(dict):
        def __getitem__(self, part):
            used.add(part)
            return super().__getitem__(part)

    modules = (
        arrival, attention, blocks, contention, cpu, distributed, gemm, gemm_losses, gemm_random, grouped, index,
        invariance,
    )  # fmt: skip
    for module in modules:
        monkeypatch.setattr(module.NOTES, "parts", Parts(module.NOTES.parts))
    text = pages.text(name, RESULTS)
    # Words on shapes that were lost then, and sentences on what no record has now.
    now = {
        part
        for part in Notes(name).parts
        if not re.match(r"why |loss |behind |unknown|title|timeline|lanes|ranks ", part)
    }
    now -= {"search wrong", "host hidden", "means no handshake", "all_reduce no loss", "no loss", "lists alone", "none"}
    now -= {"failed", "not random", "not calls", "left out", "absent peers", "counters of the worst"}
    if not any(data.get("peers") for data in records(RESULTS, "gemm_grouped")):  # no run has had it yet
        now -= {part for part in now if "peer" in part or part == "configurations"}
    if not records(RESULTS, "attention_transformers"):  # it has not run on a GPU yet
        now -= {part for part in now if part.startswith("transformers")}
    assert not now - used - {part for part in now if part.endswith("title")}
    assert not re.findall(r"\{[a-z_]+[^}]*\}", text.replace("{toctree}", "")), "a field without its figure"


def test_the_readme_has_the_gains_of_the_performance_page():
    table = re.search(r"^\*\*Measured on.*?\n\n(.*?)\n\n", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    gains = " ".join(index.short(RESULTS))
    figures = re.findall(r"\d\.\d\d", table[1])
    assert sorted(figures) == sorted(re.findall(r"\d\.\d\d", gains))


def test_the_readme_says_how_often_torch_is_faster_on_random_problems():
    said = re.search(r"torch is faster on \[(.*?)\]", (ROOT / "README.md").read_text().replace("\n", " "))[1]
    assert re.findall(r"\d+ of \d+", said) == [one.partition(" (")[0] for one in index.lost_of_random(RESULTS)]


def test_notes_are_named_and_filled(tmp_path, monkeypatch):
    monkeypatch.setattr(notes_module, "NOTES", tmp_path)
    (tmp_path / "x.md").write_text("<!-- a -->\nA {ms:.1f}\nb\n\n<!--\nb 1\nb 2\n-->\n{tiles}: {no}\n")
    notes = Notes("x")
    assert list(notes.parts) == ["a", "b 1", "b 2"]
    assert notes("a", ms=1.25) == "A 1.2\nb"
    assert notes.line("b 2", {"tiles": "5"}) == "5: -"
    with pytest.raises(KeyError):
        notes("a")


def test_what_a_page_names_of_the_benchmarks_is_there():
    """Paths of records and files, and subjects and sections, in the pages, the documentation, the source and tests."""
    from benchmarks.core.section import SUBJECTS, sections

    there = {(subject, name) for subject in SUBJECTS for name in sections(subject)}
    files = [ROOT / "CONTRIBUTING.md", ROOT / "README.md"]
    files += [path for folder in ("docs", "src", "benchmarks") for path in (ROOT / folder).rglob("*.*")
              if path.suffix in (".md", ".py")]  # fmt: skip
    wrong = []
    for path in files:
        text = path.read_text(encoding="utf-8")
        named = re.findall(r"benchmarks/[\w/.*-]*\w", text)
        wrong += [f"{path.relative_to(ROOT)}: {one}" for one in named if not list(ROOT.glob(one))]
        for subject, names in re.findall(r"benchmarks/run\.py (\w+) ([\w,]+)", text):
            wrong += [f"{path.relative_to(ROOT)}: run.py {subject} {name}" for name in names.split(",")
                      if (subject, name) not in there and subject.islower()]  # fmt: skip
    assert not wrong
    assert RESULTS.is_dir()
    assert NOTES.is_dir()
