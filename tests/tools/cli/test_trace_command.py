from pathlib import Path

import pytest
import torch

import tilestream as ts


@pytest.fixture
def saved(tmp_path):
    a, b = torch.randn(64, 32), torch.randn(32, 48)
    with ts.trace.record() as recorder:
        for _ in range(2):
            with ts.stream_in(a, rows_per_chunk=16) as x:
                ts.matmul(x.tensor, b, arrival=x.arrival, workers=2)
    return ts.trace.export(recorder.launches, tmp_path / "trace.json.gz")


def test_says_what_each_worker_did(cli, saved):
    result = cli("trace", saved)
    assert result.exit_code == 0
    assert "launch 0: matmul" in result.stdout
    assert "launch 1: matmul" in result.stdout
    assert "busy ms" in result.stdout


def test_draws_a_launch(cli, saved, tmp_path):
    result = cli("trace", saved, "--png", tmp_path / "t.png", "--launch", 0, "--width", 800)
    assert result.exit_code == 0
    assert int.from_bytes((tmp_path / "t.png").read_bytes()[16:20], "big") == 800


def test_writes_a_page_of_all_launches_or_of_one(cli, saved, tmp_path):
    for more, count in (((), 2), (("--launch", 1), 1)):
        result = cli("trace", saved, "--html", tmp_path / "t.html", *more)
        assert result.exit_code == 0
        assert f"page: {tmp_path / 't.html'}" in result.stdout
        text = (tmp_path / "t.html").read_text()
        assert text.count('<figure class="timeline">') == count
        assert "Timelines of trace.json.gz" in text


def test_opens_the_page(cli, saved, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cli("trace", saved, "--open").exit_code == 0
    (address,) = opened
    assert address.startswith("file://")
    assert '<figure class="timeline">' in Path(address.removeprefix("file://")).read_text()
    assert cli("trace", saved, "--html", tmp_path / "t.html", "--open").exit_code == 0
    assert opened[1:] == [(tmp_path / "t.html").as_uri()]


def test_where_there_is_no_browser_it_says_where_the_page_is(cli, saved, tmp_path, monkeypatch):
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    result = cli("trace", saved, "--html", tmp_path / "t.html", "--open")
    assert (result.exit_code, f"copy {tmp_path / 't.html'} to where there is one" in result.stderr) == (0, True)


def test_bad_input(cli, saved, tmp_path):
    result = cli("trace", saved, "--png", tmp_path / "t.foo")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "t.foo: a picture ends with .png, .svg or .pdf" in result.stderr
    assert "a page ends with .html" in cli("trace", saved, "--html", tmp_path / "t.png").stderr
    assert cli("trace", tmp_path / "none.json").exit_code == 2
    (tmp_path / "other.json").write_text("{}")
    result = cli("trace", tmp_path / "other.json")
    assert (result.exit_code, "no trace written by tilestream" in result.stderr) == (2, True)
    assert "the trace has 2" in cli("trace", saved, "--launch", 2).stderr
    ts.trace.export([], tmp_path / "empty.json")
    assert "holds no launch" in cli("trace", tmp_path / "empty.json").stderr
