from types import SimpleNamespace

import pytest
import torch

import tilestream
from tilestream_tools.cli import doctor


def test_names_what_is_here(cli):
    result = cli("doctor")
    assert result.exit_code == 0
    for what in (tilestream.__version__, torch.__version__, "backends", "extras", "threads", "memory"):
        assert what in result.stdout


def test_says_what_no_call_can_have_warm(cli):
    pytest.importorskip("triton")
    assert "ragged or published chunks, copies by the kernel" in " ".join(cli("doctor").stdout.split())


def test_every_backend_says_whether_it_runs_and_why_not():
    told = {name: doctor.backend(name) for name in doctor.BACKENDS}
    assert told["cpu"].startswith("yes")
    for answer in told.values():
        assert answer.startswith(("yes", "no: "))


@pytest.mark.parametrize(
    ("why", "says"), [("", "yes"), ("this torch is built without CUDA", "no: this torch is built without CUDA")]
)
def test_says_whether_calls_are_native_and_why_not(cli, monkeypatch, why, says):
    native = pytest.importorskip("tilestream.launch.native", exc_type=ImportError)
    monkeypatch.setattr(native, "why_not", lambda: why)
    monkeypatch.setattr(doctor, "_gpu", lambda: "a GPU")
    monkeypatch.setattr(doctor, "backend", lambda name: "yes")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (told,) = [line.split() for line in cli("doctor").stdout.splitlines() if line.startswith("  native calls")]
    assert told == ["native", "calls", *says.split()]


def test_sends_nobody_to_build_native_calls_where_no_gpu_would_use_them(cli, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (told,) = [line for line in cli("doctor").stdout.splitlines() if line.startswith("  native calls")]
    assert "no: t" in told  # torch sees no GPU, or triton is not installed
    assert "native_build" not in told


def test_calls_are_not_native_without_triton(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert doctor._native() == "no: triton is not installed"


@pytest.fixture
def machine(monkeypatch):
    """Pretends that all packages are here, and a GPU of these properties, or none."""

    def set_(hip=None, **properties):
        monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(properties))
        found = SimpleNamespace(name="a GPU", **properties)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
        monkeypatch.setattr(torch.version, "hip", hip)

    return set_


ON_AMD = "yes: compiled and checked; run on other GPUs, never on an AMD one; docs/amd.md"


@pytest.mark.parametrize(
    ("name", "major", "arch", "hip", "says"),
    [
        ("hopper", 9, "", None, "yes"),
        ("hopper", 8, "", None, "no: a GPU is no Hopper"),
        (
            "cdna",
            9,
            "gfx942:sramecc+",
            "6.4",
            "yes: compiled and checked, not run on a GPU yet: backend='cdna' takes it",
        ),
        ("cdna", 9, "gfx90a", "6.4", "no: a GPU is no CDNA 3 or 4"),
        ("hopper", 9, "gfx942", "6.4", "no: a GPU is no Hopper"),
        ("portable", 8, "", None, "yes"),
        ("portable", 9, "gfx942", "7.0", ON_AMD),
    ],
)
def test_a_gpu_backend_wants_its_own_architecture(machine, name, major, arch, hip, says):
    machine(hip, major=major, gcnArchName=arch)
    assert doctor.backend(name).partition(", or ")[0] == says
    machine()
    assert doctor.backend(name) == "no: torch sees no GPU"


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "matplotlib" else "1")
    assert doctor._extra(("matplotlib",), "pictures") == "missing matplotlib, for pictures"
    assert doctor._extra(("rich",), "the command line") == "rich 1: the command line"
