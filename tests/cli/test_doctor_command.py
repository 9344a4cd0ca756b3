from types import SimpleNamespace

import pytest
import torch

import tilestream
from tilestream.cli import doctor


def test_names_what_is_here(cli):
    result = cli("doctor")
    assert result.exit_code == 0
    for what in (tilestream.__version__, torch.__version__, "backends", "extras", "threads", "memory"):
        assert what in result.stdout


def test_every_backend_says_whether_it_runs_and_why_not():
    told = {name: doctor.backend(name) for name in doctor.BACKENDS}
    assert told["cpu"].startswith("yes")
    for answer in told.values():
        assert answer.startswith(("yes", "no: "))


def test_a_gpu_backend_without_a_gpu(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.backend("hopper") == "no: torch sees no GPU"


@pytest.mark.parametrize(
    ("name", "major", "arch", "hip", "runs"),
    [
        ("hopper", 9, "", None, True),
        ("hopper", 8, "", None, False),
        ("cdna", 9, "gfx942:sramecc+", "6.4", True),
        ("cdna", 9, "gfx90a", "6.4", False),
        ("hopper", 9, "gfx942", "6.4", False),
        ("portable", 8, "", None, True),
    ],
)
def test_a_gpu_backend_wants_its_own_architecture(monkeypatch, name, major, arch, hip, runs):
    properties = SimpleNamespace(name="a GPU", major=major, gcnArchName=arch)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert doctor.backend(name).startswith("yes" if runs else "no: ")


def test_on_an_amd_gpu_it_says_that_nobody_has_run_it(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for hip, said in (
        (None, "yes"),
        ("7.0", "yes: compiled and checked; run on other GPUs, never on an AMD one; docs/amd.md"),
    ):
        monkeypatch.setattr(torch.version, "hip", hip)
        assert doctor.backend("portable") == said


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "matplotlib" else "1")
    assert doctor._extra(("matplotlib",), "pictures") == "missing matplotlib, for pictures"
    assert doctor._extra(("rich",), "the command line") == "rich 1: the command line"
