"""``tilestream demo``, from a file and on a GPU that is the CPU; tests/gpu/test_gpu_demo.py runs it on a real one."""

import json
import shutil
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tilestream as ts
from streaming import threads_at_work
from tilestream.core import whole_file
from tilestream_tools.cli import doctor
from tilestream_tools.installed import _PACKAGE, _PLACES, example

demo_example = example("demo")
check, Error = demo_example.check, demo_example.Error
WAYS = {"multiply", "torch.mm", "in turn", "streamed"}
SMALL = ("--device", "cuda", "--rows", 300, "--k", 64, "--n", 40)


@pytest.fixture
def demo(cli, tmp_path, monkeypatch):
    """The demo command, which writes into ``tmp_path / "out"`` and leaves no thread behind."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))

    def run(*arguments):
        result = cli("demo", "--out-dir", tmp_path / "out", "--repeats", 2, *arguments)
        assert not [thread for thread in threads_at_work() if thread.name.startswith("tilestream")]
        return result

    return run


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is the CPU: copies are made by a thread, and calls return when they are done."""
    monkeypatch.setattr(demo_example, "backend", lambda name: "yes")
    monkeypatch.setattr(demo_example, "GPU", "cpu")


@pytest.fixture
def safetensors(tmp_path):
    path = tmp_path / "mine.safetensors"
    save_file({"acts": torch.randn(512, 96), "more": torch.randn(64, 32), "bias": torch.randn(96)}, path)
    return path


def assert_right(result, *words):
    assert result.exit_code == 0, result.output
    for word in ("answer right", *words):
        assert word in result.stdout


def assert_refused(result, says):
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.startswith(("tilestream: ", "Usage:"))
    assert result.stderr.count("\n") == 1 or result.stderr.startswith("Usage:")


def test_end_to_end_on_a_file_of_its_own(demo, tmp_path, monkeypatch):
    monkeypatch.setattr(demo_example, "FILE_SHAPE", (1024, 128))
    result = demo("--device", "cpu", "--figures", tmp_path / "figures.json")
    assert_right(
        result, "- writing 512 KiB", "read ", "in turn", "backend   cpu", "float64", "read cold", "overlap won"
    )
    assert (tmp_path / "xdg" / "tilestream").is_dir()
    assert (tmp_path / "out" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    (launch,) = ts.trace.load(tmp_path / "out" / "trace.json")
    assert launch.tiles_done == launch.tiles
    assert launch.started.keys() == launch.arrivals.keys() == {0}

    figures = json.loads((tmp_path / "figures.json").read_text())
    median, problem = figures["median_ms"], figures["problem"]
    lesser, larger = sorted((median["read"], median["multiply"]))
    won = median["in turn"] - median["streamed"]
    assert figures["answer"]["right"]
    assert problem["n"] % 16 == 0
    assert (figures["versions"]["torch"], bool(figures["device"])) == (torch.__version__, True)
    assert figures["samples_ms"].keys() == median.keys() == WAYS | {"read"}
    for found, expected in (
        (figures["gb_per_s"]["read"], 1024 * 128 * 4e-6 / median["read"]),
        (figures["tflop_per_s"]["multiply"], 2e-9 * 1024 * 128 * problem["n"] / median["multiply"]),
        (figures["overlap_won_ms"], won),
        (figures["overlap_won_share"], won / lesser),
        (figures["streamed_over_larger"], median["streamed"] / larger),
    ):
        assert found == pytest.approx(expected)
    for way, samples in figures["samples_ms"].items():
        assert len(samples) == 2
        assert min(samples) <= median[way] <= max(samples)
    assert "- writing" not in demo("--device", "cpu", "--n", 16).stdout


@pytest.mark.parametrize("schedule", ["static", "dynamic", "stream_k"])
def test_your_own_safetensors_file_is_not_changed(demo, safetensors, schedule):
    before = safetensors.read_bytes()
    result = demo("-i", safetensors, "--tensor", "acts", "--n", 48, "--schedule", schedule, "--workers", 3)
    assert_right(result, "[512, 96] @ [96, 48], float32", f"schedule  {schedule}, 3 workers")
    assert safetensors.read_bytes() == before


def file(name, values, left=None):
    """Writes such a file, cut off behind the first bytes, and gives its path."""

    def make(folder):
        path = folder / name
        if isinstance(values, str):
            path.write_text(values)
        elif name.endswith(".npy"):
            np.save(path, values)
        else:
            save_file(values, path)
        path.write_bytes(path.read_bytes()[:left])
        return path

    return make


def infinite():
    x = torch.randn(128, 32)
    x[5, 3], x[77, 1] = float("inf"), float("nan")
    return x


NPY = np.random.default_rng(0).standard_normal((300, 70))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        *((file("f.npy", NPY.astype(dtype)), ("[300, 70] @ [70, 33]", np.dtype(dtype).name, "5 chunks of 64 rows"))
          for dtype in (np.float32, np.float64, np.float16)),
        *((file("f.safetensors", {"t": values}), ())
          for values in (torch.randn(200, 64).bfloat16(), torch.randn(4, 30, 64), torch.randn(1, 8), infinite())),
    ],
)  # fmt: skip
def test_your_own_file_of_any_format_shape_and_dtype(demo, tmp_path, make, words):
    assert_right(demo("--input", make(tmp_path), "--n", 33, "--rows-per-chunk", 64), *words)


def test_end_to_end_on_a_gpu(demo, gpu, tmp_path):
    result = demo(*SMALL, "--figures", tmp_path / "figures.json", "--rows-per-chunk", 100)
    assert_right(
        result, "37.5 KiB of random bfloat16 in pinned memory", "[300, 64] @ [64, 40], bfloat16", "copy ",
        "rows in 3 chunks of 100 rows",
    )  # fmt: skip
    assert not (tmp_path / "out").exists(), "nothing is drawn"
    samples = json.loads((tmp_path / "figures.json").read_text())["samples_ms"]
    assert {way: len(times) for way, times in samples.items()} == dict.fromkeys(WAYS | {"copy"}, 2)


def test_without_options_a_gpus_input_has_its_default_shape(demo, gpu, monkeypatch):
    monkeypatch.setattr(demo_example, "GPU_SHAPE", (96, 32))
    monkeypatch.setattr(demo_example, "GPU_COLUMNS", 48)
    assert_right(demo(), "[96, 32] @ [32, 48], bfloat16")
    first, second = (demo_example.host_matrix(None, None, 64, 32)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert 0.9 < float(first.float().std()) < 1.1


def test_a_gpus_file_goes_through_pinned_memory(demo, gpu, tmp_path):
    np.save(tmp_path / "mine.npy", np.random.default_rng(0).standard_normal((5, 40, 24)).astype(np.float16))
    result = demo("--device", "cuda", "-i", tmp_path / "mine.npy", "--n", 16)
    assert_right(result, "mine.npy (9.375 KiB), read into pinned memory first", "[200, 24] @ [24, 16], float16")


# Wrong answers ------------------------------------------------------------------------------------------------------


def assert_wrong(result):
    assert result.exit_code == 1, result.output
    assert "ANSWER WRONG" in result.stdout
    assert result.stderr == "tilestream: the streamed answer is wrong\n"


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("value", [7.0, float("nan")])
def test_a_wrong_answer_is_status_1(demo, gpu, safetensors, monkeypatch, value, on_gpu):
    right = ts.matmul

    def corrupt(a, b, *, out, arrival=None, **options):
        right(a, b, out=out, arrival=arrival, **options)
        if arrival is not None:
            out[200:210, 10:20] = value
        return out

    monkeypatch.setattr(ts, "matmul", corrupt)
    assert_wrong(demo(*SMALL) if on_gpu else demo("-i", safetensors, "--tensor", "acts", "--n", 32))


def test_a_matmul_that_does_not_wait_is_found(demo, safetensors, monkeypatch):
    restart, wait, pending = ts.Stream.restart, ts.Stream.wait, []

    def late_wait(self, timeout=None):
        if pending:
            restart(pending.pop())
        return wait(self, timeout)

    # The producer begins when a caller waits for it, which this matmul does not.
    monkeypatch.setattr(ts.Stream, "restart", lambda self: pending.append(self))
    monkeypatch.setattr(ts.Stream, "wait", late_wait)
    monkeypatch.setattr(ts, "matmul", lambda a, b, *, out, **_: torch.mm(a, b, out=out))
    monkeypatch.setattr(demo_example.Bench, "draw", lambda self, folder: {})  # such a matmul leaves no trace
    assert_wrong(demo("-i", safetensors, "--tensor", "acts", "--n", 32))


def test_a_stream_that_brings_the_wrong_rows_is_found(demo, gpu, monkeypatch):
    right = ts.stream_in
    monkeypatch.setattr(ts, "stream_in", lambda host, **how: right(host.flip(0), **how))
    assert_wrong(demo(*SMALL))


def product(m=96, n=80, k=64, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(m, k, generator=generator).to(dtype)
    w = torch.randn(k, n, generator=generator).to(dtype)
    return x, w, torch.mm(x, w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_torchs_own_answer_is_right(dtype):
    x, w, y = product(dtype=dtype)
    error = check(x, w, y, y.clone())
    assert error.right
    assert error.ours == error.torch < error.allowed
    assert error.missing == 0


def added(*where):
    def change(out):
        out[where] += 0.01

    return change


def undone(out):
    out[40:48, 32:40] = float("nan")


def rows_exchanged(out):
    out[[1050, 1051]] = out[[1051, 1050]]


@pytest.mark.parametrize(
    ("change", "missing"),
    [*((added(*at), 0) for at in ((0, 0), (1999, 79), (1040, 33), (1863, 64))), (undone, 64), (rows_exchanged, 0)],
)
def test_a_wrong_answer_anywhere_is_found(change, missing):
    x, w, y = product(m=2000)
    assert check(x, w, y, y * (1 + 2**-24)).right, "a few units in the last place are allowed"
    out = y.clone()
    change(out)
    error = check(x, w, y, out)
    assert (error.right, error.missing) == (False, missing)


def test_many_small_errors_are_found_by_the_frobenius_norm():
    x, w, y = product(k=512)
    most = (y.double() - x.double() @ w.double()).abs().max()
    error = check(x, w, y, y.double().add(0.9 * 2 * most).float())
    assert error.ours[1] > error.allowed[1]
    assert not error.right


def test_rows_that_are_not_finite_are_left_out():
    x, w, _ = product()
    x[3, 5], x[60, 1] = float("nan"), float("inf")
    y = torch.mm(x, w)
    assert check(x, w, y, y.clone()).right
    out = y.clone()
    out[10, 10] = float("nan")
    assert not check(x, w, y, out).right
    y = torch.mm(x.fill_(float("nan")), w)  # nothing finite: nothing to measure
    assert check(x, w, y, y.clone()).right


def test_overflow_to_infinity_as_torch_does_is_allowed():
    x, w = torch.full((32, 64), 100.0, dtype=torch.float16), torch.full((64, 32), 100.0, dtype=torch.float16)
    y = torch.mm(x, w)
    assert y.isinf().all()
    assert check(x, w, y, y.clone()).right
    assert not check(x, w, y, torch.full_like(y, float("nan"))).right


# The devices, and bad input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "file", "expected"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_auto_is_the_gpu_where_there_is_one_and_no_file(monkeypatch, here, file, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here)
    assert demo_example.uses_gpu("auto", file=file) is expected
    assert demo_example.uses_gpu("cpu", file=file) is False


@pytest.mark.parametrize("why", ["torch sees no GPU", "triton is not installed"])
def test_cuda_without_a_gpu_is_one_line(cli, monkeypatch, why):
    monkeypatch.setattr(demo_example, "backend", lambda name: f"no: {why}")
    assert not demo_example.uses_gpu("auto", file=False)
    result = cli("demo", "--device", "cuda")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"tilestream: --device cuda: {why}; --device cpu streams from the disk to the CPU\n"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: folder / "none.safetensors", "No such file"),
        (lambda folder: folder, "Is a directory"),
        (file("f", "hello, I am no matrix"), "neither a safetensors nor a .npy file"),
        (file("f.npy", np.asfortranarray(np.ones((8, 6), np.float32))), "column-major"),
        (file("f", {"x": torch.ones(64, 64)}, -1000), "cut off"),
        (file("f.npy", np.ones((64, 64), np.float32), 1000), "cut off"),
        (file("f.npy", np.ones((8, 6), np.int64)), "dtype"),
        (file("f.npy", np.ones(8, np.float32)), "at least 2 dimensions"),
        (file("f", {"x": torch.ones(4, 4), "y": torch.ones(4, 4)}), "holds 2 matrices"),
        (file("f", {"x": torch.ones(0, 4)}), "nothing to read"),
        (file("f", {"x": torch.zeros(4, 8, dtype=torch.float8_e5m2)}), "takes 16 bits or more: convert it"),
    ],
)
def test_a_bad_file_is_one_line_and_status_2(demo, tmp_path, make, says):
    assert_refused(demo("--input", make(tmp_path)), says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--device", "tpu"], "--device tpu: it is one of auto, cpu, cuda"),
        (["--device", "cpu", "--rows", 8], "--rows 8: the input is a file's; --device cuda without --input"),
        (["--device", "cpu", "--k", 8], "--k 8: the input is a file's"),
        (["--device", "cuda", "--input", "x.npy", "--k", 8], "--k 8: the input is a file's"),
        (["--device", "cuda", "--cache-dir", "here"], "--cache-dir here: "),
        (["--device", "cuda", "--tensor", "x"], "--tensor x: give the file"),
        (["--device", "cuda", "--figures", "/nowhere/at/all.json"], "/nowhere/at"),
        ([*SMALL, "--schedule", "best"], "schedule='best'"),
        (["--device", "cuda", "--rows", 0], "--rows"),
        (["--input", "mine.safetensors", "--tensor", "nope"], "no tensor 'nope'; there are acts"),
        (["--input", "mine.safetensors", "--tensor", "bias"], "at least 2 dimensions"),
        (["--input", "mine.safetensors", "--tensor", "acts", "--n", "0"], "--n"),
    ],
)
def test_bad_options_are_status_2(demo, gpu, safetensors, monkeypatch, arguments, says):
    monkeypatch.chdir(safetensors.parent)
    assert_refused(demo(*arguments), says)


def test_a_run_that_fails_leaves_no_folder_behind(cli, tmp_path):
    assert cli("demo", "--out-dir", tmp_path / "out", "--input", tmp_path / "nope.npy").exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_json_to_standard_output(demo, safetensors):
    result = demo("--input", safetensors, "--tensor", "acts", "--n", 16, "--json")
    assert json.loads(result.stdout)["answer"]["right"] is True
    assert "answer right" in result.stderr


def test_an_out_dir_that_cannot_be_made_is_said_first(cli, tmp_path, safetensors):
    (tmp_path / "file").write_text("")
    result = cli("demo", "--out-dir", tmp_path / "file", "--input", safetensors)
    assert (result.exit_code, result.stdout) == (2, "")
    assert str(tmp_path / "file") in result.stderr


@pytest.mark.parametrize(
    ("arguments", "available", "says"),
    [
        (["--device", "cpu"], 1000, "'acts' takes 192 KiB of memory, 1000 bytes are available"),
        # Fits once, but not twice: as read, and pinned.
        (["--device", "cuda"], 300 * 1024, "takes 384 KiB of memory, 300 KiB are available"),
    ],
)
def test_a_matrix_larger_than_memory_is_refused(demo, gpu, safetensors, monkeypatch, arguments, available, says):
    monkeypatch.setattr(demo_example, "available_memory", lambda: available)
    assert_refused(demo(*arguments, "--input", safetensors, "--tensor", "acts"), says)


def test_memory_too_small_for_a_gpus_input_is_refused(demo, gpu, monkeypatch):
    monkeypatch.setattr(demo_example, "available_memory", lambda: 2**20)
    says = "--rows 4096 --k 256: the input takes 2 MiB of memory, 1 MiB are available"
    assert_refused(demo("--rows", 4096, "--k", 256), says)

    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError("tried to allocate much")

    monkeypatch.setattr(ts, "stream_in", out_of_memory)
    assert_refused(demo(*SMALL), "give smaller --rows, --k or --n (tried to allocate much)")


def test_a_file_cut_off_while_it_is_read_is_one_line(demo, safetensors, monkeypatch):
    restart = ts.Stream.restart

    def cut(self):
        with safetensors.open("r+b") as file:
            file.truncate(5000)
        restart(self)

    monkeypatch.setattr(ts.Stream, "restart", cut)
    assert_refused(demo("--input", safetensors, "--tensor", "acts"), "ends at byte")


@pytest.fixture
def of_a_file(demo, safetensors):
    return lambda *arguments: demo("--input", safetensors, "--tensor", "acts", "--n", 16, *arguments)


def test_without_matplotlib_it_says_so_and_goes_on(of_a_file, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert_right(of_a_file(), "tilestream[plot]")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["trace.json"]


def test_where_reads_cannot_be_cold_the_report_says_so(of_a_file, monkeypatch):
    monkeypatch.setattr(demo_example, "drop_from_page_cache", lambda path: False)
    assert "no posix_fadvise" in of_a_file().stdout


# Its own file -------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_example, "FILE_SHAPE", (96, 32))
    return tmp_path / "cache"


def test_the_file_is_written_once_and_is_the_same_each_time(folder, tmp_path):
    path = demo_example.demo_file(folder)
    x, before = load_file(path)["x"], path.stat().st_mtime_ns
    assert x.shape == (96, 32)
    assert 0.9 < float(x.std()) < 1.1
    assert (demo_example.demo_file(folder), path.stat().st_mtime_ns) == (path, before)
    assert list(folder.iterdir()) == [path], "no temporary file is left"
    assert torch.equal(x, load_file(demo_example.demo_file(tmp_path / "other"))["x"])


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        lambda path: path.write_bytes(b""),
        lambda path: save_file({"x": torch.zeros(96, 16)}, path),
        lambda path: save_file({"y": torch.zeros(96, 32)}, path),
    ],
)
def test_a_damaged_file_is_written_anew(folder, damage):
    path = demo_example.demo_file(folder)
    good = load_file(path)["x"].clone()
    damage(path)
    assert torch.equal(load_file(demo_example.demo_file(folder))["x"], good)
    assert list(folder.iterdir()) == [path]


def test_a_file_that_cannot_be_written_leaves_nothing(folder, monkeypatch):
    def broken(*_, **__):
        raise OSError("Input/output error")

    monkeypatch.setattr(whole_file.Path, "replace", broken)
    with pytest.raises(OSError, match="Input/output"):
        demo_example.demo_file(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 1000))
    with pytest.raises(OSError, match="--cache-dir"):
        demo_example.demo_file(folder)
    assert not list(folder.iterdir())


@pytest.mark.parametrize(("value", "used"), [("/there", True), ("relative", False), ("", False)])
def test_the_cache_folder_follows_xdg(monkeypatch, tmp_path, value, used):
    value = str(tmp_path) + value if used else value
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(demo_example, "FILE_SHAPE", (8, 4))
    expected = tmp_path / ("there" if used else "home/.cache") / "tilestream"
    assert demo_example.demo_file(None).parent == expected


# The rest -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "speed", "least", "most"), [(0.02, 2e-5, 900, 1100), (1e-6, 1e-3, 16, 16), (1e3, 1e-6, 16384, 16384)]
)
def test_calibration_balances_reading_and_multiplying(read, speed, least, most):
    class Fake(demo_example.Bench):
        def __init__(self):
            self.x = torch.empty(64, 64)

        def set_columns(self, n):
            self.n = n

        def seconds(self, way):
            return read if way == "read" else speed * self.n

    n = Fake().calibrated_columns()
    assert least <= n <= most
    assert n % 16 == 0


def test_a_loss_is_called_a_loss(demo, gpu, monkeypatch):
    monkeypatch.setattr(
        demo_example.Bench, "seconds", lambda self, way: {"streamed": 0.25, "in turn": 0.22}.get(way, 0.1)
    )
    monkeypatch.setattr(demo_example, "check", lambda *_: Error(0, (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)))
    result = demo(*SMALL)
    assert_right(result, "no overlap won: streamed took 30.0 ms longer than in turn", "2.50 times the larger of copy")


def test_the_example_is_found_in_a_package_and_in_a_checkout(monkeypatch):
    assert (_PACKAGE / "examples", _PACKAGE.parents[1] / "examples") == _PLACES
    monkeypatch.setattr("tilestream_tools.installed._PLACES", ())
    with pytest.raises(ImportError, match=r"examples/none.py is not installed"):
        example("none")


def test_available_memory_is_some():
    assert doctor.available_memory() > 2**20
