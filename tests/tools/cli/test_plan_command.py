import pytest

import tilestream as ts


def test_prints_what_explain_says(cli):
    result = cli("plan", 512, 256, 128, "--workers", 2, "--schedule", "dynamic", "--tile", "128x64")
    assert result.exit_code == 0
    assert result.stdout == ts.plan(512, 256, 128, workers=2, schedule="dynamic", tile=(128, 64)).explain() + "\n"


def test_dtype_and_batch(cli):
    output = cli("plan", 64, 64, 64, "--dtype", "bfloat16", "--batch", 3).stdout
    assert "3 x [64, 64] @ [64, 64], bfloat16" in output


@pytest.mark.parametrize(("short", "name"), [("bf16", "bfloat16"), ("half", "float16"), ("e4m3", "float8_e4m3fn")])
def test_short_dtypes(cli, short, name):
    assert f", {name} ->" in cli("plan", 64, 64, 64, "--dtype", short).stdout


def test_large_numbers_have_no_exponent(cli):
    output = cli("plan", 20000, 20000, 20000, "--device", "h100", "--dtype", "bf16").stdout
    assert "16,000 GFLOP" in output
    assert "e+0" not in output


def test_a_gpu_that_is_not_here(cli):
    output = cli("plan", 8192, 8192, 8192, "--dtype", "bfloat16", "--layout", "nt", "--device", "mi300x").stdout
    asked = {"dtype": "bfloat16", "layout": "nt", "device": "mi300x"}
    assert output == ts.plan(8192, 8192, 8192, **asked).explain() + "\n"
    assert "AMD Instinct MI300X, 304 workers" in output
    assert "checked   compiled, and executed on an emulator, not run: no gfx942 GPU was there" in output


@pytest.mark.parametrize(
    ("options", "chunks", "rows"),
    [(["--chunks", 4], 4, 64), (["--rows-per-chunk", 100], 3, 100), (["--chunks", 3, "--rows-per-chunk", 100], 3, 100)],
)
def test_arrival(cli, options, chunks, rows):
    output = cli("plan", 256, 64, 64, *options).stdout
    assert f"{chunks} chunks of {rows} rows, pivot 0" in output


def test_pivot(cli):
    assert "pivot 2" in cli("plan", 256, 64, 64, "--chunks", 4, "--pivot", 2).stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([4, 4, 4, "--schedule", "best"], "schedule='best'"),
        ([4, 4, 4, "--dtype", "int8"], "int8"),
        ([4, 4, 4, "--device", "v100"], "is unknown: give"),
        ([4, 4, 4, "--device", "mps"], "use torch.matmul there"),
        ([4, 4, 4, "--tile", "64"], "--tile 64"),
        ([4, 4, 4, "--tile", "0x64"], "tile"),
        ([4, 4, 4, "--pivot", 1], "--pivot 1"),
        ([0, 4, 4, "--chunks", 2], "no rows"),
        ([256, 4, 4, "--chunks", 4, "--pivot", 4], "pivot=4"),
        ([256, 4, 4, "--chunks", 9, "--rows-per-chunk", 100], "num_chunks=3"),
        ([-1, 4, 4], "greater than or equal to 0"),
    ],
)
def test_bad_input_is_one_line_and_status_2(cli, arguments, says):
    # A negative number would be taken for an option, but for the "--".
    arguments = ["--", *arguments] if arguments[0] == -1 else arguments
    result = cli("plan", *arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr
