import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "isa"))

from loops import gemm, text

from tilestream_tools.isa.kernels import KERNELS


@pytest.fixture
def file(tmp_path):
    made = tmp_path / "kernel.amdgcn"
    made.write_text(text(gemm(128, 128), arch="gfx950"))
    return made


def test_without_a_name_it_lists_the_kernels(cli):
    output = cli("isa").stdout
    for name, entry in KERNELS.items():
        line = next(line for line in output.splitlines() if line.startswith(name))
        assert all(arch in line for arch in entry.archs)


def test_a_file_is_read(cli, file):
    result = cli("isa", file)
    assert result.exit_code == 0, result.stderr
    for part in (
        "gemm for gfx950: compiled and read, not run", "matrix 16x16x32_f16", "load to lds 128", "vmcnt(8)",
        "floor: mfma", "bound by", "share of the peak",
    ):  # fmt: skip
        assert part in result.stdout


def test_json_is_one_line(cli, file):
    found = json.loads(cli("isa", file, "--json", "--lds", 65536, "--warps", 8, "--memory-cycles", 700).stdout)
    assert (found["arch"], found["shared"], found["warps"]) == ("gfx950", 65536, 8)
    assert found["loop"]["waits"][0] == {"vmcnt": 8}
    assert found["cycles"]["binds"] in ("MFMA", "LDS", "L2")


def test_what_it_does_not_know(cli, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("hello")
    assert "KERNEL 'nothing'; there are" in cli("isa", "nothing").stderr
    assert "no AMDGCN kernel" in cli("isa", other).stderr
    assert "--tile 128: give rows and columns" in cli("isa", "portable-gemm", "--tile", 128).stderr
