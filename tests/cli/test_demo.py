import json
import sys
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import tilestream as ts
from tilestream.cli.demo import file_bench, measure, source
from tilestream.cli.demo.settings import Settings

QUICK = ("--repeats", 2, "--device", "cpu")
WAYS = {"read", "multiply", "torch", "sequential", "streamed"}


@pytest.fixture
def demo(cli, tmp_path, monkeypatch):
    """The demo command, which writes into ``tmp_path / "out"`` and leaves no thread behind."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))

    def run(*arguments):
        result = cli("demo", "--out-dir", tmp_path / "out", *QUICK, *arguments)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("tilestream")]
        return result

    return run


@pytest.fixture
def safetensors(tmp_path):
    path = tmp_path / "mine.safetensors"
    save_file({"acts": torch.randn(512, 96), "more": torch.randn(64, 32), "bias": torch.randn(96)}, path)
    return path


def test_end_to_end_on_a_file_of_its_own(demo, tmp_path, monkeypatch):
    monkeypatch.setattr(source, "SHAPE", (1024, 128))
    result = demo("--json", tmp_path / "figures.json")
    assert result.exit_code == 0, result.output
    for words in (
        "written now",
        "read alone",
        "multiply alone",
        "one after the other",
        "streamed",
        "answer right",
        "backend   cpu",
        "float64",
        "chunks arrived",
    ):
        assert words in result.stdout
    assert "overlap won" in result.stdout or "no overlap" in result.stdout
    assert (tmp_path / "xdg" / "tilestream").is_dir()
    assert (tmp_path / "out" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    (launch,) = ts.trace.load(tmp_path / "out" / "trace.json")
    assert launch.tiles_done == launch.tiles
    assert launch.started.keys() == launch.arrivals.keys() == {0}

    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["answer"]["right"]
    assert figures["problem"]["n_calibrated"]
    assert figures["problem"]["n"] % 16 == 0
    assert figures["versions"]["torch"] == torch.__version__
    assert figures["device"]
    assert figures["samples_ms"].keys() == figures["median_ms"].keys() == WAYS
    assert figures["gb_per_s"]["read"] == pytest.approx(1024 * 128 * 4e-6 / figures["median_ms"]["read"])
    for way in WAYS:
        assert len(figures["samples_ms"][way]) == 2
        assert min(figures["samples_ms"][way]) <= figures["median_ms"][way] <= max(figures["samples_ms"][way])
    assert "cached" in demo().stdout


def test_your_own_safetensors_file_is_not_changed(demo, safetensors):
    before = safetensors.read_bytes()
    result = demo("--input", safetensors, "--tensor", "acts", "--n", 48)
    assert result.exit_code == 0, result.output
    assert "[512, 96] @ [96, 48], float32" in result.stdout
    assert safetensors.read_bytes() == before


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_your_own_npy_file(demo, tmp_path, dtype):
    path = tmp_path / "mine.npy"
    np.save(path, np.random.default_rng(0).standard_normal((300, 70)).astype(dtype))
    result = demo("--input", path, "--n", 33, "--rows-per-chunk", 64)
    assert result.exit_code == 0, result.output
    assert f"[300, 70] @ [70, 33], {np.dtype(dtype).name}" in result.stdout
    assert "5 chunks of 64 rows" in result.stdout


@pytest.mark.parametrize(
    ("shape", "dtype"), [((200, 64), torch.bfloat16), ((4, 30, 64), torch.float32), ((1, 8), torch.float32)]
)
def test_other_shapes_and_dtypes(demo, tmp_path, shape, dtype):
    save_file({"t": torch.randn(shape).to(dtype)}, tmp_path / "f.safetensors")
    result = demo("-i", tmp_path / "f.safetensors", "--n", 16)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("schedule", ["static", "dynamic", "stream_k"])
def test_schedules_and_workers(demo, safetensors, schedule):
    result = demo("-i", safetensors, "--tensor", "acts", "--n", 32, "--schedule", schedule, "--workers", 3)
    assert result.exit_code == 0, result.output
    assert f"schedule  {schedule}, 3 workers" in result.stdout


def test_infinities_in_your_file_are_no_error(demo, tmp_path):
    x = torch.randn(128, 32)
    x[5, 3], x[77, 1] = float("inf"), float("nan")
    save_file({"t": x}, tmp_path / "f.safetensors")
    result = demo("-i", tmp_path / "f.safetensors", "--n", 16)
    assert result.exit_code == 0, result.output


def assert_wrong(result):
    assert result.exit_code == 1, result.output
    assert "ANSWER WRONG" in result.stdout
    assert result.stderr == "tilestream: the streamed answer is wrong\n"


@pytest.mark.parametrize("value", [7.0, float("nan")])
def test_a_wrong_answer_is_status_1(demo, safetensors, monkeypatch, value):
    right = ts.matmul

    def corrupt(a, b, *, out, arrival=None, **options):
        right(a, b, out=out, arrival=arrival, **options)
        if arrival is not None:
            out[300:310, 10:20] = value
        return out

    monkeypatch.setattr(ts, "matmul", corrupt)
    assert_wrong(demo("-i", safetensors, "--tensor", "acts", "--n", 32))


def test_a_matmul_that_does_not_wait_is_found(demo, safetensors, monkeypatch):
    restart, wait, pending = ts.Stream.restart, ts.Stream.wait, []

    def late_wait(self, timeout=None):
        if pending:
            restart(pending.pop())
        return wait(self, timeout)

    # The producer begins when somebody waits for it, which this matmul does not.
    monkeypatch.setattr(ts.Stream, "restart", lambda self: pending.append(self))
    monkeypatch.setattr(ts.Stream, "wait", late_wait)
    monkeypatch.setattr(ts, "matmul", lambda a, b, *, out, **_: torch.mm(a, b, out=out))
    # Nor does it leave a trace.
    monkeypatch.setattr(file_bench.FileBench, "_trace_of", lambda self, recorder: None)
    assert_wrong(demo("-i", safetensors, "--tensor", "acts", "--n", 32))


def missing_file(folder):
    return folder / "none.safetensors", "No such file"


def folder_itself(folder):
    return folder, "Is a directory"


def text(folder):
    (folder / "f").write_text("hello, I am no matrix")
    return folder / "f", "neither a safetensors nor a .npy file"


def column_major(folder):
    np.save(folder / "f.npy", np.asfortranarray(np.ones((8, 6), np.float32)))
    return folder / "f.npy", "column-major"


def truncated(folder):
    save_file({"x": torch.ones(64, 64)}, folder / "f")
    (folder / "f").write_bytes((folder / "f").read_bytes()[:-1000])
    return folder / "f", "cut off"


def truncated_npy(folder):
    np.save(folder / "f.npy", np.ones((64, 64), np.float32))
    (folder / "f.npy").write_bytes((folder / "f.npy").read_bytes()[:1000])
    return folder / "f.npy", "cut off"


def integers(folder):
    np.save(folder / "f.npy", np.ones((8, 6), np.int64))
    return folder / "f.npy", "dtype"


def vector(folder):
    np.save(folder / "f.npy", np.ones(8, np.float32))
    return folder / "f.npy", "at least 2 dimensions"


def several(folder):
    save_file({"x": torch.ones(4, 4), "y": torch.ones(4, 4)}, folder / "f")
    return folder / "f", "holds 2 matrices"


def no_rows(folder):
    save_file({"x": torch.ones(0, 4)}, folder / "f")
    return folder / "f", "nothing to read"


@pytest.mark.parametrize(
    "make",
    [missing_file, folder_itself, text, column_major, truncated, truncated_npy, integers, vector, several, no_rows],
)
def test_a_bad_file_is_one_line_and_status_2(demo, tmp_path, make):
    path, says = make(tmp_path)
    result = demo("--input", path)
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.startswith("tilestream: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tensor", "nope"], "no tensor 'nope'; there are acts"),
        (["--tensor", "bias"], "at least 2 dimensions"),
        (["--tensor", "acts", "--schedule", "best"], "schedule='best'"),
        (["--tensor", "acts", "--n", "0"], "--n"),
        (["--tensor", "acts", "--json", "/nowhere/at/all.json"], "/nowhere/at"),
    ],
)
def test_bad_options_are_status_2(demo, safetensors, arguments, says):
    result = demo("--input", safetensors, *arguments)
    assert result.exit_code == 2
    assert says in result.stderr


def test_a_tensor_without_a_file_is_refused(demo):
    assert "--input" in demo("--tensor", "x").stderr


def test_an_out_dir_that_cannot_be_made_is_said_first(cli, tmp_path, safetensors):
    (tmp_path / "file").write_text("")
    result = cli("demo", "--out-dir", tmp_path / "file", "--input", safetensors)
    assert (result.exit_code, result.stdout) == (2, "")
    assert str(tmp_path / "file") in result.stderr


def test_a_matrix_larger_than_memory_is_refused(demo, safetensors, monkeypatch):
    monkeypatch.setattr(file_bench, "available_memory", lambda: 1000)
    result = demo("--input", safetensors, "--tensor", "acts")
    assert result.exit_code == 2
    assert "memory" in result.stderr


def test_a_file_cut_off_while_it_is_read_is_one_line(demo, safetensors, monkeypatch):
    restart = ts.Stream.restart

    def cut(self):
        with safetensors.open("r+b") as file:
            file.truncate(5000)
        restart(self)

    monkeypatch.setattr(ts.Stream, "restart", cut)
    result = demo("--input", safetensors, "--tensor", "acts")
    assert result.exit_code == 2
    assert "ends at byte" in result.stderr


def test_without_matplotlib_it_says_so_and_goes_on(demo, safetensors, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    result = demo("--input", safetensors, "--tensor", "acts", "--n", 16)
    assert result.exit_code == 0
    assert "tilestream[plot]" in result.stdout
    assert (tmp_path / "out" / "trace.json").exists()
    assert not (tmp_path / "out" / "timeline.png").exists()


def test_where_reads_cannot_be_cold_the_report_says_so(demo, safetensors, monkeypatch):
    monkeypatch.setattr(source, "drop_from_page_cache", lambda path: False)
    assert "no posix_fadvise" in demo("--input", safetensors, "--tensor", "acts", "--n", 16).stdout


@pytest.mark.parametrize(
    ("read", "speed", "least", "most"), [(0.02, 2e-5, 900, 1100), (1e-6, 1e-3, 16, 16), (1e3, 1e-6, 16384, 16384)]
)
def test_calibration_balances_reading_and_multiplying(read, speed, least, most):
    class Fake:
        n = 0
        x = torch.empty(64, 64)

        def bring_alone(self):
            return read

        def multiply(self):
            return speed * self.n

        def set_n(self, n):
            self.n = n

    bench = Fake()
    n = file_bench.calibrate(bench)
    assert least <= n <= most
    assert n % 16 == 0
    assert bench.n == n


def test_the_watcher_sees_chunks_and_tiles_grow(safetensors):
    seen = []
    found = source.open_source(safetensors, "acts")
    settings = Settings(n=32, repeats=1, rows_per_chunk=64, workers=2)
    result = measure.run(file_bench.FileBench(found, settings), watcher=lambda *now: seen.append(now))
    assert seen == sorted(seen)
    assert seen[-1] == (8, 8, result.trace.tiles, result.trace.tiles)
    assert result.plan.workers == 2
