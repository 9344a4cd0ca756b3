import pytest
import torch

from tilestream.plan import tuned
from tilestream_tools.sweep import run, tune


@pytest.mark.parametrize(
    ("arguments", "file", "message"),
    [
        (("64x64",), "", "shape '64x64': give M, N and K"),
        (("64x64x64", "--dtype", "float64"), "", "--dtype float64: it is bfloat16 or float16"),
        (("64x64x64", "--layout", "nx"), "", "--layout nx: it is nn, nt, tn or tt"),
        (("64x64x64",), "0", "TILESTREAM_TUNED=0: plans look at no file"),
        (("64x64x64",), "", "there is no GPU here: tune where the plans will run"),
    ],
)
def test_bad_input_is_one_line(cli, monkeypatch, arguments, file, message):
    monkeypatch.setenv(tuned.ENVIRONMENT, file)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = cli("tune", *arguments)
    assert (result.exit_code, message in result.stderr) == (2, True)


@pytest.mark.parametrize(("wrong", "status"), [([], 0), (["a plan: AssertionError: wrong answer"], 1)])
def test_it_says_what_it_found_and_where_it_is_kept(cli, monkeypatch, tmp_path, wrong, status):
    import tilestream as ts
    from tilestream_tools.sweep import clock

    monkeypatch.setenv(tuned.ENVIRONMENT, str(tmp_path / "tuned.json"))
    monkeypatch.setattr(run, "device_of", lambda backend: None)
    monkeypatch.setattr(clock, "GpuClock", lambda: None)
    model, other = (ts.plan(512, 512, 512, device="h100", dtype="float16", tile=tile) for tile in ((128, 128), None))
    asked = []

    def measured(*given):
        asked.append(given[:5])
        return tune.Tuned(model if given[0] == 64 else other, model, 2e-6, 3e-6, 12, wrong)

    monkeypatch.setattr(tune, "tune", measured)
    result = cli("tune", "64x72x80", "512x512x512", "--dtype", "float16", "--layout", "nn")
    assert result.exit_code == status
    assert asked == [(64, 72, 80, torch.float16, "nn"), (512, 512, 512, torch.float16, "nn")]
    first, second, last = result.stdout.splitlines()
    assert first == f"64x72x80: 2 us, the cost model's choice, of 12 plans: {model.label}"
    assert second == f"512x512x512: 2 us, 1.500 x the cost model's choice, of 12 plans: {other.label}"
    assert last == f"kept in {tmp_path / 'tuned.json'}"
    assert ("2 plans gave no right answer" in result.stderr) == bool(wrong)
