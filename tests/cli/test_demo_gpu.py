"""The demonstration on a GPU, as far as it goes without one: which device is meant, and a GPU made of the CPU.

What really runs on one is in ``tests/gpu/test_gpu_demo.py``.
"""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import tilestream as ts
from tilestream.cli import doctor
from tilestream.cli.demo import file_bench, gpu_bench, machine
from tilestream.cli.demo.settings import Settings, is_gpu

SMALL = ("--rows", 300, "--k", 64, "--n", 40, "--repeats", 2)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is the CPU: copies are made by a thread, and calls return when they are done."""
    monkeypatch.setattr(doctor, "backend", lambda name: "yes")
    monkeypatch.setattr(gpu_bench, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_bench, "settle", lambda: None)
    monkeypatch.setattr(gpu_bench, "pinned", lambda rows, k, dtype: torch.empty(rows, k, dtype=dtype))
    monkeypatch.setattr(machine, "free_device_memory", lambda: 2**36)


@pytest.fixture
def demo(cli, tmp_path, gpu):
    return lambda *arguments: cli("demo", "--out-dir", tmp_path / "out", *arguments)


@pytest.mark.parametrize(
    ("here", "file", "expected"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_auto_is_the_gpu_where_there_is_one_and_no_file(monkeypatch, here, file, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here)
    assert is_gpu("auto", file=file) is expected
    assert is_gpu("cpu", file=file) is False


def test_a_file_asks_no_gpu_whether_it_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("torch was asked"))
    assert not is_gpu("auto", file=True)


def test_cuda_is_the_gpu_or_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert is_gpu("cuda", file=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device cuda: torch sees no GPU; --device cpu streams from the disk"):
        is_gpu("cuda", file=False)


def test_without_triton_auto_is_the_cpu_and_cuda_says_why(monkeypatch):
    monkeypatch.setattr(doctor, "backend", lambda name: "no: triton is not installed")
    assert not is_gpu("auto", file=False)
    with pytest.raises(ValueError, match="--device cuda: triton is not installed"):
        is_gpu("cuda", file=False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--device", "tpu"], "--device tpu: it is one of auto, cpu, cuda"),
        (["--device", "cpu", "--rows", 8], "--rows 8: the input is a file's; --device cuda without --input"),
        (["--device", "cpu", "--k", 8], "--k 8: the input is a file's"),
        (["--device", "cuda", "--input", "x.npy", "--k", 8], "--k 8: the input is a file's"),
        (["--device", "cuda", "--cache-dir", "here"], "--cache-dir here: on a GPU"),
        (["--device", "cuda", "--tensor", "x"], "--tensor x: give the file"),
        (["--device", "cuda", "--json", "/nowhere/at/all.json"], "/nowhere/at"),
        (["--device", "cuda", *SMALL, "--schedule", "best"], "schedule='best'"),
        (["--device", "cuda", "--rows", 0], "--rows"),
    ],
)
def test_bad_options_are_status_2(demo, arguments, says):
    result = demo(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr


def test_cuda_without_a_gpu_is_one_line(cli, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = cli("demo", "--device", "cuda")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "tilestream: --device cuda: torch sees no GPU; --device cpu streams from the disk to the CPU\n"
    )


def test_end_to_end(demo, tmp_path):
    result = demo(*SMALL, "--json", tmp_path / "figures.json", "--rows-per-chunk", 100)
    assert result.exit_code == 0, result.output
    for words in (
        "37.5 KiB of random bfloat16 in pinned memory",
        "[300, 64] @ [64, 40], bfloat16; 40 columns: as asked for",
        "copy alone",
        "answer right",
        "rows in 3 chunks of 100 rows",
        "timeline  none: the demo draws one on the CPU only",
    ):
        assert words in result.stdout
    assert not (tmp_path / "out").exists(), "nothing is drawn"
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["input"]["shape"] == [300, 64]
    assert figures["input"]["bytes"] == 300 * 64 * 2
    assert {way: len(samples) for way, samples in figures["samples_ms"].items()} == dict.fromkeys(
        ("copy", "multiply", "torch", "sequential", "streamed"), 2
    )
    assert figures["answer"]["right"]


def test_without_options_the_input_has_its_default_shape(demo, monkeypatch):
    for name, value in (("ROWS", 96), ("K", 32), ("N", 48)):
        monkeypatch.setattr(gpu_bench, name, value)
    result = demo("--repeats", 1)
    assert result.exit_code == 0, result.output
    assert "[96, 32] @ [32, 48], bfloat16; 48 columns: the default" in result.stdout


def test_a_file_goes_through_pinned_memory(demo, tmp_path):
    np.save(tmp_path / "mine.npy", np.random.default_rng(0).standard_normal((5, 40, 24)).astype(np.float16))
    result = demo("--device", "cuda", "-i", tmp_path / "mine.npy", "--n", 16, "--repeats", 1, "--json", tmp_path / "f")
    assert result.exit_code == 0, result.output
    assert "mine.npy (9.375 KiB, yours), read into pinned memory first" in result.stdout
    assert "[200, 24] @ [24, 16], float16" in result.stdout
    figures = json.loads((tmp_path / "f").read_text())
    assert figures["file"]["shape"] == [5, 40, 24]
    assert figures["input"]["shape"] == [200, 24]


def test_a_file_without_a_device_is_the_cpus(demo, tmp_path):
    save_file({"x": torch.randn(64, 32)}, tmp_path / "f.safetensors")
    result = demo("-i", tmp_path / "f.safetensors", "--n", 16, "--repeats", 1)
    assert result.exit_code == 0, result.output
    assert "read alone" in result.stdout


def test_the_input_is_the_same_each_time(gpu):
    first, second = (gpu_bench.made(64, 32, Settings(n=16), lambda _: None) for _ in range(2))
    assert torch.equal(first.truth, second.truth)
    assert 0.9 < float(first.truth.float().std()) < 1.1
    assert first.truth is not first.x
    assert first.truth.data_ptr() != first.x.data_ptr()
    first.stream.close()
    second.stream.close()


def assert_wrong(result):
    assert result.exit_code == 1, result.output
    assert "ANSWER WRONG" in result.stdout


@pytest.mark.parametrize("value", [7.0, float("nan")])
def test_a_wrong_answer_is_status_1(demo, monkeypatch, value):
    right = ts.matmul

    def corrupt(a, b, *, out, arrival=None, **options):
        right(a, b, out=out, arrival=arrival, **options)
        if arrival is not None:
            out[100:110, 10:20] = value
        return out

    monkeypatch.setattr(ts, "matmul", corrupt)
    assert_wrong(demo(*SMALL))


def test_a_stream_that_brings_the_wrong_rows_is_found(demo, monkeypatch):
    right = ts.stream_in
    # It is what torch.mm is given, too: only what should have arrived can tell.
    monkeypatch.setattr(ts, "stream_in", lambda host, **how: right(host.flip(0), **how))
    assert_wrong(demo(*SMALL))


def test_a_host_too_small_is_refused(demo, monkeypatch):
    monkeypatch.setattr(machine, "available_memory", lambda: 2**20)
    result = demo("--rows", 4096, "--k", 256)
    assert result.exit_code == 2
    assert "--rows 4096 --k 256: the input takes 2 MiB of pinned memory, 1 MiB are available" in result.stderr


def test_a_gpu_too_small_is_refused(demo, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "free_device_memory", lambda: 2**20)
    result = demo("--rows", 1024, "--k", 512, "--n", 256)
    assert result.exit_code == 2
    assert "[1024, 512] @ [512, 256] takes 4.5 MiB of the GPU's memory with its check, 1 MiB are free" in result.stderr
    assert "give a smaller --rows, --k or --n, or --device cpu" in result.stderr
    save_file({"x": torch.zeros(1024, 512)}, tmp_path / "f.safetensors")
    result = demo("--device", "cuda", "--input", tmp_path / "f.safetensors")
    assert result.exit_code == 2
    assert "give a smaller --n, or another file, or --device cpu" in result.stderr


def test_a_file_that_fits_into_memory_but_not_twice_is_refused(demo, tmp_path, monkeypatch):
    monkeypatch.setattr(file_bench, "available_memory", lambda: 8 * 1024 * 2)
    save_file({"x": torch.zeros(64, 32)}, tmp_path / "f.safetensors")
    result = demo("--device", "cuda", "--input", tmp_path / "f.safetensors")
    assert result.exit_code == 2
    assert "the demonstration holds the whole matrix 2 times" in result.stderr
