"""``tilestream report`` and ``python -m tilestream_tools.report``: options, files, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from reports import made_up
from typer.testing import CliRunner

from tilestream_tools.cli.app import app
from tilestream_tools.report import __main__ as plain
from tilestream_tools.report import measure


@pytest.fixture
def asked(monkeypatch):
    """What the measurement is asked for; it gives a report that no machine made."""
    calls = []

    def report(given, **how):
        calls.append(([str(call) for call in given], how))
        how["tell"](0.5, "half [of] it")
        return made_up("cpu")

    monkeypatch.setattr(measure, "report", report)
    return calls


def by_typer(*arguments):
    result = CliRunner().invoke(app, ["report", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def by_argparse(*arguments):
    import io

    from _pytest.monkeypatch import MonkeyPatch

    with MonkeyPatch.context() as patch:
        out, err = io.StringIO(), io.StringIO()
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        status = plain.main([str(argument) for argument in arguments])
    return status, out.getvalue(), err.getvalue()


BOTH = pytest.mark.parametrize("run", [by_typer, by_argparse])


@BOTH
def test_options_become_calls_and_files(run, asked, tmp_path):
    (tmp_path / "shapes.txt").write_text("gemm 8,8,8,fp32 # small\n")
    out = tmp_path / "r.html"
    status, stdout, stderr = run(
        "--gemm", "64,32,16,float32", "--attention", "1,8,2,2,64,causal", "--shapes", tmp_path / "shapes.txt",
        "--quick", "--device", "cpu", "--seconds", 5, "--out", out,
    )  # fmt: skip
    assert (status, f"report: {out}, {tmp_path / 'r.json'}\n") == (0, stdout)
    assert "half [of] it" in stderr
    ((texts, how),) = asked
    assert texts == ["gemm 64,32,16,float32", "attention 1,8,2,2,64,bfloat16,causal", "gemm 8,8,8,float32"]
    assert (how["device"], how["quick"], how["seconds"], how["folder"]) == ("cpu", True, 5, tmp_path)
    assert out.read_text().startswith("<!doctype html>")
    assert json.loads((tmp_path / "r.json").read_text())["kind"] == "tilestream report"


@BOTH
def test_a_page_is_made_again_of_its_json(run, asked, tmp_path):
    run("--out", tmp_path / "one.html")
    asked.clear()
    status, *_ = run("--from", tmp_path / "one.json", "--out", tmp_path / "two.html")
    assert (status, asked) == (0, [])
    assert (tmp_path / "two.html").read_bytes() == (tmp_path / "one.html").read_bytes()


@BOTH
@pytest.mark.parametrize(("arguments", "says"), [
    (("--out", "x.pdf"), "--out x.pdf: the page ends with .html"),
    (("--out", "nowhere/x.html"), "there is no folder nowhere"),
    (("--seconds", "0"), "--seconds 0: it must be a positive number"),
    (("--seconds", "nan"), "it must be a positive number"),
    (("--gemm", "1,2"), "gemm 1,2: give M,N,K"),
    (("--shapes", "nowhere.txt"), "nowhere.txt: No such file"),
    (("--from", "nowhere.json"), "nowhere.json: No such file"),
])  # fmt: skip
def test_bad_input_is_one_line_and_status_2(run, asked, arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, stdout, stderr = run(*arguments)
    assert (status, stdout, asked) == (2, "", [])
    assert stderr.startswith("tilestream: ")
    assert says in stderr
    assert stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_device_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, stderr = by_typer("--device", "tpu")
    assert (status, "device='tpu'" in stderr, list(tmp_path.iterdir())) == (2, True, [])


def test_answers_with_json_and_opens_the_page(asked, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    status, stdout, _ = by_typer("--json", "--open", "--out", tmp_path / "r.html")
    assert status == 0
    assert json.loads(stdout) == json.loads((tmp_path / "r.json").read_text())
    assert opened == [(tmp_path / "r.html").as_uri()]


def test_on_a_terminal_a_bar_shows_how_far_it_is(asked, tmp_path, monkeypatch):
    from tilestream_tools.cli import report, ui

    class Terminal(type(ui.console(stderr=True))):
        is_terminal = True

    made = Terminal(record=True, width=80, file=sys.stdout, force_terminal=True)
    monkeypatch.setattr(ui, "console", lambda **_: made)
    with report._bar() as tell:
        tell(0.25, "a matmul [1, 2]")
    assert "a matmul [1, 2]" in made.export_text()


def test_needs_neither_typer_nor_rich(tmp_path):
    code = (
        "import sys\nfor name in ('typer', 'rich', 'jinja2', 'matplotlib'):\n    sys.modules[name] = None\n"
        "sys.argv[0] = 'tilestream'\nfrom tilestream_tools.cli import main\nmain()\n"
    )
    (tmp_path / "r.json").write_text(json.dumps(made_up("h100")))
    run = subprocess.run(
        [sys.executable, "-c", code, "report", "--from", str(tmp_path / "r.json"), "--out", str(tmp_path / "r.html")],
        capture_output=True, text=True, timeout=850, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")
    assert (tmp_path / "r.html").is_file()
