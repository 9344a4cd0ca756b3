"""What all benchmarks share: the command line, the clocks and the check, sessions and records."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks.core import timing
from benchmarks.core.records import Record, folder_of, load, paths, text_of
from benchmarks.core.section import SUBJECTS, sections
from benchmarks.core.session import OutOfTime, Session

from benchmarks import run
from tilestream_tools.sweep.check import Check, sampled_rows

ROOT = Path(__file__).parents[2]


# The command line -----------------------------------------------------------------------------------------------------


def test_without_a_subject_all_are_listed(capsys):
    assert run.main([]) == 0
    said = capsys.readouterr().out
    for subject in SUBJECTS:
        assert f"\n{subject}: " in said
        assert all(section.what in said for section in sections(subject).values())
    assert "  _" not in said, "processes that sections start are no sections for people"


def test_the_list_needs_neither_torch_nor_triton():
    code = "import sys, benchmarks.run as run; run.main([]); assert not {'torch', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def test_sections_and_options():
    found = run.options("gemm", "suite,fp8", "folder", "--shapes", "1x2x3", "--seconds", "9")
    assert (found.sections, found.out, found.shapes, found.seconds) == (["suite", "fp8"], Path("folder"), "1x2x3", 9)
    assert run.options("attention").sections == ["dense", "lists", "heads"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("gemm", "suit"), "no section suit; there are:"),
        (("cpu", "_process"), "no section _process"),
        (("report",), "name a section"),
        (("gemm", "--dry"), "--dry: name a folder"),
        (("gem",), "invalid choice: 'gem'"),
    ],
)
def test_what_is_no_section(arguments, says, capsys):
    with pytest.raises(SystemExit):
        run.options(*arguments)
    assert says in capsys.readouterr().err


def test_modules_import_one_another_without_a_circle():
    folder = ROOT / "benchmarks"
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in folder.rglob("*.py")}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    arrows: dict[str, set[str]] = {}
    for name, path in files.items():
        named = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                named |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        arrows[name] = named & set(files) - {name}
    assert not any(name.split(".")[1:2] == ["core"] and to.split(".")[1] not in ("core",)
                   for name, tos in arrows.items() for to in tos if "." in to), "core imports no subject"  # fmt: skip
    while leaves := {name for name, tos in arrows.items() if not tos}:
        arrows = {name: tos - leaves for name, tos in arrows.items() if name not in leaves}
    assert not arrows, f"a circle: {arrows}"


# Records --------------------------------------------------------------------------------------------------------------


def test_folders_of_devices():
    names = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200", "NVIDIA A100-SXM4": "nvidia_a100-sxm4"}
    assert {device: folder_of(device) for device in names} == names
    for path in paths(ROOT / "benchmarks" / "results", "*.json"):
        device = load(path).get("device", "")
        assert path.parent.name in ("cpu", "amd") or not device or folder_of(device) == path.parent.name


def test_devices_in_the_order_of_the_pages(results):
    for device in ("zeta", "h200", "h100", "cpu"):
        (results / device).mkdir(parents=True)
        (results / device / "x.json").touch()
    assert [path.parent.name for path in paths(results, "x.json")] == ["h100", "h200", "cpu", "zeta"]


def test_a_record_is_whole_after_each_row(results):
    record = Record("matmul", results, cpu=True, bytes=5)
    record.add({"a": 1})
    record.fail("b: " + "x" * 999)
    record.add({"a": 2})
    data = load(record.path)
    assert (record.path.parent.name, data["bytes"], data["rows"]) == ("cpu", 5, [{"a": 1}, {"a": 2}])
    assert len(data["failures"][0]) == 300
    assert json.loads(text_of({"b": 1, "rows": []})) == {"b": 1, "rows": []}


# The clock and the check --------------------------------------------------------------------------------------------


class Graph:
    """Work that was captured."""

    current: Graph | None = None

    def __init__(self) -> None:
        self.work: list[object] = []

    def replay(self) -> None:
        for work in self.work:
            work()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """A `GpuClock` whose GPU is fake: events count calls, graphs keep what `Graph.current` is given."""

    class Capture:
        def __init__(self, graph: Graph) -> None:
            self.graph = graph

        def __enter__(self) -> None:
            Graph.current = self.graph

        def __exit__(self, *_: object) -> None:
            Graph.current = None

    class Event:
        ticks = 0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            Event.ticks += 1
            self.at = Event.ticks

        def synchronize(self) -> None: ...

        def elapsed_time(self, other: Event) -> float:
            return float(other.at - self.at)

    fake = SimpleNamespace(
        Event=Event, CUDAGraph=Graph, graph=Capture, synchronize=lambda: None, _sleep=lambda cycles: None
    )
    monkeypatch.setattr(timing.GpuClock, "device", "cpu")
    monkeypatch.setattr(timing.GpuClock, "FLUSH_BYTES", 64)
    monkeypatch.setattr(timing.torch, "cuda", fake)
    return timing.GpuClock()


def kernel(result: torch.Tensor, value: float):
    """A call that writes ``result``, now or in the graph that is being captured."""

    def call() -> torch.Tensor:
        write = lambda: result.fill_(value)  # noqa: E731
        Graph.current.work.append(write) if Graph.current is not None else write()
        return result

    return call


def test_every_function_is_timed_in_every_round(gpu) -> None:
    timing = gpu.interleave({"a": lambda: None, "b": lambda: None}, rounds=7)
    assert timing.mode == "eager"
    assert timing.rounds == 7
    assert timing.medians() == {"a": 1e-3, "b": 1e-3}
    assert timing.band("a", "b") == (1, 1)
    assert not timing.results


def test_graphs_give_what_their_replay_wrote(gpu) -> None:
    result = torch.zeros(4)
    timing = gpu.interleave({"ours": kernel(result, 3.0)}, rounds=3, graphs=True)
    assert timing.mode == "graph"
    assert timing.results["ours"].tolist() == [3.0] * 4
    assert timing.results["ours"] is not result


def test_a_replay_that_writes_nothing_leaves_nan(gpu) -> None:
    timing = gpu.interleave({"ours": lambda: torch.ones(4)}, rounds=3, graphs=True)
    assert timing.results["ours"].isnan().all()


def test_where_one_cannot_be_captured_all_are_timed_eagerly(gpu) -> None:
    def refuses() -> torch.Tensor:
        if Graph.current is not None:
            raise RuntimeError("not in a capture")
        return torch.ones(4)

    timing = gpu.interleave({"cublas": kernel(torch.zeros(4), 1.0), "ours": refuses}, rounds=3, graphs=True)
    assert timing.mode == "eager: RuntimeError in capture"
    assert not timing.results
    assert timing.rounds == 3


def test_rows_are_sampled_over_all() -> None:
    assert sampled_rows(3).tolist() == [0, 1, 2]
    rows = sampled_rows(16384)
    assert len(rows) == 256
    assert rows[0] == 0
    assert rows[-1] == 16383


@pytest.fixture
def checked():
    a, b = torch.randn(600, 64, dtype=torch.bfloat16), torch.randn(64, 96, dtype=torch.bfloat16)
    peer = torch.mm(a, b)
    return peer, Check.of_product(a, b, peer)


def test_a_right_answer_passes(checked) -> None:
    peer, check = checked
    assert check(peer.clone())["frobenius"] == check(peer)["peer_frobenius"]


@pytest.mark.parametrize(
    ("sampled", "spoil", "message"),
    [
        (False, lambda row: row[5].fill_(float("nan")), "1 elements are not finite"),
        (False, lambda row: row.zero_(), "distance of all rows to the peer's answer"),
        (True, lambda row: row.mul_(1.5), "wrong answer: max error"),
    ],
    ids=["not written", "outside the sample", "in the sample"],
)
def test_a_wrong_row_does_not_pass(checked, sampled, spoil, message) -> None:
    peer, check = checked
    got = peer.clone()
    spoil(got[next(row for row in range(600) if (row in check.rows.tolist()) == sampled)])
    with pytest.raises(AssertionError, match=message):
        check(got)


# Sessions -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def session(tmp_path: Path):
    """A dry session that measures nothing, and its record."""
    made = Session(run.options("gemm", "suite", str(tmp_path), "--dry", "--seconds", "60"))
    return made, made.record("gemm_suite")


def written(record) -> tuple[list[str], list[str]]:
    """The shapes that a record's file has, and those that it says are missing."""
    data = json.loads(record.path.read_text(encoding="utf-8"))
    return [row["shape"] for row in data["rows"]], data["missing"]


def test_what_there_is_no_time_for_is_missing(session) -> None:
    made, record = session

    def slow(item: str) -> dict:
        made.section_end -= 30
        return {"shape": item}

    made.rows(record, "abcd", slow)
    assert written(record) == (["a", "b"], ["c", "d"])


def cut_off(item: str) -> dict:
    """Measures what comes before ``c``."""
    if item == "c":
        raise OutOfTime
    return {"shape": item}


def test_a_run_goes_on_where_another_was_cut_off(session, tmp_path: Path) -> None:
    made, record = session
    made.section = "suite"

    with pytest.raises(OutOfTime):
        made.rows(record, "abcd", cut_off)
    again = Session(run.options("gemm", "suite", str(tmp_path), "--dry", "--resume", str(tmp_path)))
    again.section, measured = "suite", []

    def measure(item: str) -> dict:
        measured.append(item)
        return {"shape": item}

    record = again.record("gemm_suite")  # it lies where the one before lay
    again.rows(record, "abcd", measure)
    assert measured == ["c", "d"]
    again.section = "another"  # with items of the same names
    again.rows(record, "ab", measure)
    assert measured == ["c", "d", "a", "b"]
    assert written(record) == ([*"abcdab"], [])
    assert not again.record("gemm_none").rows, "nothing to go on with"


def test_what_is_cut_off_is_missing(session) -> None:
    made, record = session

    with pytest.raises(OutOfTime):
        made.rows(record, "abcd", cut_off)
    assert written(record) == (["a", "b"], ["c", "d"])


def test_a_run_that_is_killed_has_said_what_is_missing(session) -> None:
    made, record = session

    def measure(item: str) -> dict:
        seen.append(written(record)[1])
        return {"shape": item}

    seen: list[list[str]] = []
    made.rows(record, "abc", measure)
    assert seen == [["a", "b", "c"], ["b", "c"], ["c"]]
    made.rows(record, "d", measure)
    assert record.data["missing"] == []


def test_a_failure_is_kept_and_the_next_is_measured(session, capsys: pytest.CaptureFixture) -> None:
    made, record = session

    def measure(item: str) -> dict:
        if item == "b":
            raise AssertionError("wrong answer")
        return {"shape": item}

    made.rows(record, "abc", measure)
    assert made.bad == 1
    assert "FAILED b: AssertionError: wrong answer" in capsys.readouterr().out
    assert written(record) == (["a", "c"], [])
    assert [(one["what"], one["error"]) for one in record.data["failures"]] == [("b", "AssertionError: wrong answer")]


def test_a_section_that_only_fails_is_given_up(session) -> None:
    made, record = session

    def measure(item: str) -> dict:
        raise TypeError("no such argument")

    made.rows(record, "abcdefgh", measure)
    assert (len(record.data["failures"]), record.data["missing"]) == (4, ["e", "f", "g", "h"])
