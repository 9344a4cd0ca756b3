import dataclasses
import json
import sys

import pytest

pytest.importorskip("triton")

from tilestream.core.gpu_specs import named
from tilestream_tools.cli import warm
from tilestream_tools.warm import kernel_cache
from tilestream_tools.warm.calls import Attention, Gemm, Grouped, described

CONFIG = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "torch_dtype": "bfloat16"}


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """A cache of this test's own, in which "compiling" a call writes a kernel of its key."""
    from tilestream_tools.warm import ahead

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_cache.triton_cache, "triton_key", lambda: "this Triton")
    made = []

    def compile_call(call, device):
        made.append(call)
        home = kernel_cache.home(str(call))
        home.mkdir(parents=True)
        (home / "gemm.source").write_text("/tilestream/kernels/hopper/gemm.py")
        (home / "gemm.json").write_text(json.dumps({
            "target": {"backend": "cuda", "arch": 90}, "triton_version": kernel_cache.triton.__version__
        }))  # fmt: skip
        (home / "__grp__gemm.json").write_text("{}")

    monkeypatch.setattr(ahead, "kernels_of", lambda found, device: {str(call): call for call in found})
    monkeypatch.setattr(ahead, "compile_call", compile_call)
    return made


def test_what_is_missing_is_compiled_and_found_afterwards(cli, compiled):
    asked = ("warm", "--gemm", "8,16,24", "--attention", "1,8,2,2,64,causal", "--device", "h100", "--jobs", 1)
    result = cli(*asked)
    assert result.exit_code == 0, result.stderr
    assert "NVIDIA H100 SXM: 2 calls launch 2 kernels, of which 2 were compiled" in result.stdout
    assert compiled == [Gemm(8, 16, 24), Attention(1, 8, 2, 2, 64, causal=True)]
    assert "of which 0 were compiled" in cli(*asked).stdout
    assert len(compiled) == 2


def test_the_doctor_says_what_is_warm(cli, compiled, monkeypatch):
    assert "nothing: a first call compiles" in cli("doctor").stdout
    cli("warm", "--gemm", "8,16,24", "--gemm", "8,16,48", "--device", "h100", "--jobs", 1)
    lines = [" ".join(line.split()) for line in cli("doctor").stdout.splitlines()]
    assert f"cache {kernel_cache.folder()}" in lines
    (told,) = [line for line in lines if line.startswith("sm_90")]
    size = sum(one.size for one in kernel_cache.kernels())
    assert told == f"sm_90 2 gemm: {size} bytes, of Triton {kernel_cache.triton.__version__}"
    monkeypatch.setattr("tilestream_tools.cli.doctor._version", lambda name: "another")
    assert ", which is not installed" in cli("doctor").stdout


def test_kernels_are_carried_to_another_cache(cli, compiled, tmp_path, monkeypatch):
    pack = tmp_path / "pack.tar.gz"
    result = cli("warm", "--gemm", "8,16,24", "--device", "h100", "--jobs", 1, "--to", pack)
    assert result.exit_code == 0, result.stderr
    assert f"{pack}: 1 kernels; there: tilestream warm --from pack.tar.gz" in result.stdout
    again = cli("warm", "--gemm", "8,16,24", "--device", "h100", "--to", pack)
    assert (again.exit_code, "exists already" in again.stderr) == (2, True)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "there"))
    result = cli("warm", "--from", pack)
    assert f"{pack}: 1 kernels, 1 of them new in {tmp_path / 'there'}" in result.stdout
    assert "of which 0 were compiled" in cli("warm", "--gemm", "8,16,24", "--device", "h100").stdout


def test_a_kernel_that_is_not_there_after_compiling_is_a_failure(cli, compiled, monkeypatch):
    monkeypatch.setattr("tilestream_tools.warm.ahead.compile_call", lambda call, device: None)
    result = cli("warm", "--gemm", "8,16,24", "--device", "h100", "--jobs", 1)
    assert result.exit_code == 1
    assert "1 of 1 kernels are not in" in result.stderr


@pytest.mark.parametrize("name", ["config.json", ""])
def test_a_model_is_its_configuration_or_its_folder(cli, compiled, tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    result = cli("warm", tmp_path / name, "--tokens", "1, 8", "--keys", 32, "--device", "h100", "--jobs", 1)
    assert result.exit_code == 0, result.stderr
    assert {call.m for call in compiled if isinstance(call, Gemm)} == {1, 8}
    assert Attention(1, 1, 4, 4, 16, keys=32) in compiled


@pytest.mark.parametrize("options", [(), ("--backward",)])
def test_a_model_s_backward_passes(cli, tmp_path, compiled, options):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert cli("warm", tmp_path, "--tokens", "8", "--device", "h100", "--jobs", 1, *options).exit_code == 0
    assert {call.backward for call in compiled if isinstance(call, Gemm)} == {bool(options)}


def test_a_file_of_shapes(tmp_path):
    path = tmp_path / "shapes.txt"
    path.write_text("# of a test\n\ngemm 8,16,24,bias   # with one\nattention 1,8,2,2,64\ngrouped 8,16,24,2\n")
    assert described(None, (), (), path, "1", "", None) == [
        Gemm(8, 16, 24, bias=True), Attention(1, 8, 2, 2, 64), Grouped(8, 16, 24, 2)
    ]  # fmt: skip


def test_a_gpu_s_properties_are_carried_in_a_file(cli, tmp_path, monkeypatch):
    path = tmp_path / "gpu.json"
    there = dataclasses.replace(named("mi300x"), clock=1.98e9)
    monkeypatch.setattr(sys.modules["tilestream.plan.api"], "device_properties", lambda device: there)
    assert cli("warm", "--save-device", path).exit_code == 0
    assert warm.gpu(str(path)) == there
    assert hash(warm.gpu(str(path))) == hash(there)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "nothing to compile: give a model, --gemm, --attention, --grouped or --shapes"),
        (("--to", "pack"), "nothing to compile"),
        (("--gemm", "8,16"), "gemm 8,16: give M,N,K"),
        (("--gemm", "8,16,24", "--device", "cpu"), "--device cpu: nothing is compiled for a CPU"),
        (("--gemm", "8,16,24", "--device", "b100"), "device='b100'"),
        (("--gemm", "8,16,24", "--device", "{text}"), "no file of --save-device"),
        (("--gemm", "8,16,24", "--device", "nowhere.json"), "nowhere.json: No such file"),
        (("--gemm", "8,16,24", "--device", "{broken}"), "no file of --save-device"),
        (("--shapes", "{binary}"), "no text"),
        (("--shapes", "{text}"), "a line is one of 'gemm M,N,K...', 'attention"),
        (("--from", "nowhere.tar"), "nowhere.tar: No such file"),
        (("nowhere",), "nowhere: No such file"),
        (("{folder}",), "config.json: No such file"),
        (("{text}", "--device", "h100"), "text.json: the configuration has no hidden_size"),
        (("{broken}",), "no configuration"),
        (("{config}", "--tokens", "1,x"), "--tokens 1,x: give positive whole numbers"),
        (("{config}", "--keys", "0"), "--keys 0: give positive whole numbers"),
        (("--gemm", "8,16,24", "--jobs", "0"), "--jobs"),
    ],
)
def test_bad_input_is_one_line_and_status_2(cli, compiled, tmp_path, arguments, says):
    (tmp_path / "text.json").write_text('{"no": 1}')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").write_bytes(b"\xff")
    names = {
        "binary": "binary",
        "text": "text.json",
        "broken": "broken.json",
        "config": "config.json",
        "folder": "folder",
    }
    paths = {name: tmp_path / path for name, path in names.items()}
    result = cli("warm", *(str(one).format(**paths) for one in arguments))
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert not compiled


def test_without_a_gpu_it_asks_for_a_name(cli, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = cli("warm", "--gemm", "8,16,24")
    assert result.exit_code == 2
    assert "torch sees no GPU here; name the GPU to plan or compile for" in result.stderr
