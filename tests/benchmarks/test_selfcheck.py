"""The self-check that somebody with a GPU runs: bounded, and with a report whatever happens; here without a GPU."""

from __future__ import annotations

import itertools
import json
import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks.amd import answers
from benchmarks.amd import selfcheck as check
from benchmarks.core.section import SUBJECTS, Section, sections

LONG = 120.0


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    folder = tmp_path / "suite"
    folder.mkdir()
    (folder / "test_fine.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('no')\ndef test_c(): assert 1 == 2, 'one\\ntwo'\n"
    )
    (folder / "test_hangs.py").write_text(
        "import os, time\ndef test_d(): pass\ndef test_e(): time.sleep(60)\ndef test_f(): os._exit(9)\n"
        "def test_g(): pass\n"
    )
    (folder / "test_breaks.py").write_text("raise RuntimeError('broken')\n")
    return folder


def test_a_command_is_ended_with_all_it_started(tmp_path):
    pipe, progress = tmp_path / "pipe", tmp_path / "progress"
    os.mkfifo(pipe)
    child = f"import time; file = open({str(pipe)!r}, 'w'); open({str(progress)!r}, 'w').write('x'); time.sleep(600)"
    code = f"import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    held = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        ran = check.run([sys.executable, "-c", code], 1.0, progress)
        assert progress.exists(), "the child has the pipe"
        assert (ran.status, ran.how) == (None, "timed out")
        assert "begun" in ran.said
        assert ran.seconds < LONG, "the child, too, held its output"
        assert select.select([held], [], [], LONG)[0], "the child lives on"
        assert os.read(held, 1) == b"", "a pipe ends with its last writer"
    finally:
        os.close(held)
    assert check.run([sys.executable, "-c", "import time; time.sleep(600)"], 0.5).how == "timed out"
    assert check.run([sys.executable, "-c", "raise SystemExit(3)"], 20).how == "status 3"
    assert check.run([sys.executable, "-c", "print('x' * 9999)"], 20).said == "x" * 3999 + "\n"


def test_a_test_that_hangs_or_kills_its_process_costs_itself_only(suite, tmp_path, capsys):
    status = check.main([str(tmp_path / "out"), "--steps", "tests", "--seconds", "4"], tests=suite)
    found = json.loads((tmp_path / "out" / "report.json").read_text())["tests"]
    assert status == 1
    fine, hangs, breaks = found["test_fine.py"], found["test_hangs.py"], found["test_breaks.py"]
    assert (fine["passed"], fine["failed"], fine["skipped"]) == (1, 1, 1)
    assert fine["failures"][0].startswith("test_c: AssertionError: one")
    assert (hangs["passed"], hangs["failed"]) == (2, 2), "those behind are run, and those before not again"
    assert hangs["failures"] == ["test_e: it did not end: timed out", "test_f: it did not end: status 9"]
    assert (breaks["error"], breaks["passed"]) == ("status 2", 0)
    assert "broken" in breaks["said"]
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| test_hangs.py | 2 | 2 | 0 |" in text
    assert "- test_fine.py: test_c: AssertionError: one" in text
    assert "please send both" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["report.json", "report.md"]


def test_when_the_time_is_up_what_is_left_says_so(suite, tmp_path):
    check.main([str(tmp_path / "out"), "--total", "0", "--steps", "tests,speed", "--quick"], tests=suite)
    data = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {one["error"] for one in (*data["tests"].values(), *data["speed"])} == {"no time left"}
    assert len(data["speed"]) == len(check.QUICK) + len(check.QUICK_ATTENTION)


def test_steps_are_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        check.main([str(tmp_path), "--steps", "test"])
    assert "--steps test: steps are machine, isa, tests, speed, benchmarks" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path):
    pytest.importorskip("triton", exc_type=ImportError)
    assert check.main([str(tmp_path), "--steps", "machine", "--seconds", "60"]) == 1
    assert "**torch sees no GPU here: nothing to check**" in (tmp_path / "report.md").read_text()


def test_the_report_is_a_page():
    row = {
        "shape": "bfloat16 1 2 3", "plan": "portable", "tflops": {"ours": 1.5, "torch": 2.0}, "of_torch": 0.75,
        "expected_ms": 0.1, "ms": {"ours": 0.2, "torch": 0.15},
    }  # fmt: skip
    data = {
        "date": "today",
        "machine": {"device": "an MI300X", "backends": {"cpu": "yes"}, "plans": {}},
        "isa": {
            "arch": "gfx942",
            "portable-gemm": {
                "plan": "p", "registers": {"vgpr": 1}, "spilled": {"a": 0}, "shared": 5, "cycles": {"share": 0.5}
            },
        },
        "speed": [row, {"shape": "bfloat16 4 5 6", "error": "timed out"}],
    }  # fmt: skip
    text = check.markdown(data)
    for line in (
        "- device: an MI300X", "- backend cpu: yes", "| bfloat16 1 2 3 | portable | 1.5 | 2.0 | 0.75 | 0.1 | 0.2 |",
        "| bfloat16 4 5 6 | timed out | | | | | |",
        "- portable-gemm: p; {'vgpr': 1}, spilled 0, LDS 5, 50% of the peak estimated",
    ):  # fmt: skip
        assert line in text
    assert check.failed(data)
    assert not check.failed({**data, "speed": [row]})


def test_every_benchmark_of_a_gpu_runs_or_says_why_not():
    """The rest needs NVIDIA's GPUs, and says why; hidden sections and tools are no benchmarks."""
    found = check.benchmarks()
    assert {name.split()[0] for name in found} == {
        "attention",
        "gemm",
        "arrival",
        "contention",
        "distributed",
        "invariance",
    }
    assert found["distributed gather"].gpus == 2
    for subject in SUBJECTS:
        for name, section in sections(subject).items():
            assert callable(section.load()), name
            if section.gpus and not section.tool and f"{subject} {name}" not in found:
                assert len(section.nvidia) > 2


def test_benchmarks_leave_their_records(tmp_path, monkeypatch):
    scripts = {
        "good": "(folder / 'h').mkdir()\n(folder / 'h' / 'a.json').write_text('{\"rows\": [1, 2]}')\n"
        "(folder / 'b.json').write_text('{')\n",
        "hangs": "(folder / 'c.json').write_text('{}')\ntime.sleep(60)\n",
        "says_nothing": "print('nothing')\n",
        "wants_two": "",
    }
    for name, text in scripts.items():
        head = "import sys, time, pathlib\nfolder = pathlib.Path(sys.argv[2])\n"
        (tmp_path / f"{name}.py").write_text(head + text)
    monkeypatch.setattr(
        check, "benchmarks", lambda: {f"{name} it": Section("", "", gpus=1 + (name == "wants_two")) for name in scripts}
    )
    monkeypatch.setattr(check, "command", lambda subject, *rest: [sys.executable, tmp_path / f"{subject}.py", *rest])
    report = check.Report(tmp_path / "out", 60)
    check.check_benchmarks(report, 3)
    found = json.loads((tmp_path / "out" / "report.json").read_text())["benchmarks"]
    found = {name.split()[0]: one for name, one in found.items()}
    assert found["good"]["records"] == {"a.json": {"rows": [1, 2]}}, "and one that was being written is left out"
    assert "error" not in found["good"]
    assert (found["hangs"]["error"], found["hangs"]["records"]) == ("timed out", {"c.json": {}})
    assert found["says_nothing"]["error"] == "it left no record"
    assert found["wants_two"] == {"refused": "it needs 2 GPUs, here is 1"}
    assert check.failed({"benchmarks": found})
    assert not check.failed({"benchmarks": {name: found[name] for name in ("good", "wants_two")}})
    text = (tmp_path / "out" / "report.md").read_text()
    assert ", 2 rows" in text
    assert "- hangs it: timed out" in text


# On a machine that says it has an MI300X ------------------------------------------------------------------------------


@pytest.fixture
def mi300x(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A torch for ROCm, and the GPU that it sees."""
    from tilestream.runtime import properties

    def forget() -> None:
        for function in vars(properties).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()

    said = SimpleNamespace(
        name="AMD Instinct MI300X", gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=304,
        shared_memory_per_block=65536, clock_rate=2_100_000, total_memory=192 << 30,
    )  # fmt: skip
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for name, answer in (
        ("is_available", True), ("current_device", 0), ("device_count", 8), ("get_device_properties", said),
        ("get_device_name", said.name),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    forget()
    yield
    forget()


def test_what_it_says_of_an_mi300x(mi300x):
    pytest.importorskip("triton", exc_type=ImportError)
    found = answers.machine()
    assert (found["arch"], found["units"], found["devices"], found["hip"]) == ("gfx942", 304, 8, "7.0")
    assert found["properties"] == {"clock_ghz": 2.1, "bandwidth_tb": 5.3, "xcds": 8}
    assert found["backends"]["cdna"].startswith("yes: compiled and checked, not run on a GPU yet: backend='cdna'")
    assert all("executed on an emulator, not run: no gfx942" in text for text in found["plans"].values())


def test_there_every_kernel_is_compiled_and_timed(mi300x, monkeypatch, tmp_path):
    from tilestream_tools.isa import kernels, report

    asked = []
    monkeypatch.setattr(
        report, "of", lambda name, question: asked.append((name, question.arch)) or report.Report(
            name, question.arch, "3.7.1", "", 8, {}, {}, 0
        )
    )  # fmt: skip
    made = answers.isa()
    assert set(asked) == {(name, "gfx942") for name, entry in kernels.KERNELS.items() if "gfx942" in entry.archs}
    assert {"arch", "portable-gemm", "cdna-gemm"} <= set(made)
    monkeypatch.setenv("TILESTREAM_CDNA", "0")  # which `attend` writes, in a process of its own
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, device, dtype: torch.zeros(*shape, dtype=dtype))
    monkeypatch.setattr(torch, "empty", lambda *shape, device, dtype: torch.zeros(*shape, dtype=dtype))
    assert answers.speed("float32", "64", "64", "64", "cdna")["refused"].startswith(
        "backend='cdna': it multiplies bfloat16"
    )

    monkeypatch.setattr(torch, "randn", lambda *shape, device, dtype: randn(*shape, dtype=dtype))
    monkeypatch.setattr(answers, "timed", lambda plan, operations, ours, theirs, figures: (plan, operations, figures))
    for causal, backend in itertools.product(("True", "False"), ("", "cdna")):
        plan, operations, figures = answers.attend("2", "4", "2", "80", "64", causal, backend)
        assert plan.backend == (backend or "portable")
        assert operations == 4 * 2 * 4 * 80 * 80 * 64 * (0.5 if causal == "True" else 1)
        assert 0 < figures["max"] < 2**-6

    said = []

    def answered(what, *arguments, seconds):
        said.append((what, *arguments))
        return {"arch": "gfx942"} if what == "machine" else {"refused": "it multiplies bfloat16"}

    monkeypatch.setattr(check, "ask", answered)
    assert check.main([str(tmp_path), "--steps", "machine,speed", "--quick"]) == 0, "a refusal is no failure"
    assert [one[-1] for one in said[1:]] == ["", "cdna"] * (len(check.QUICK) + len(check.QUICK_ATTENTION))
    assert {one[0] for one in said[1:]} == {"speed", "attend"}
    assert answers.attend("1", "2", "2", "0", "64", "True", "cdna")["refused"].startswith("backend='cdna': ")
    assert "| bfloat16 1024 1024 1024 cdna | it multiplies bfloat16 |" in (tmp_path / "report.md").read_text()
