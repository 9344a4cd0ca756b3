"""From a call of the public API to its result on an AMD GPU, with HIP and the GPU emulated: see `emulated_hip`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tritons import environment

SCRIPT = Path(__file__).with_name("end_to_end.py")
LAUNCH = {"hipModuleLoadDataEx", "hipModuleGetFunction", "hipModuleLaunchKernel"}
#: What a case calls beside that.
MORE = {
    "matmul, static": set(), "matmul, dynamic": set(), "matmul, stream-K": set(), "matmul, cdna": set(),
    "grouped, rows": set(), "grouped, K": set(), "attention": set(),
    "attention, sinks of 16 bits": set(), "matmul, a chunk is lost": set(),
    "matmul, streamed": {"hipMemcpyHtoDAsync", "hipStreamWriteValue32", "hipStreamWaitEvent"},
    "captured, dynamic": set(), "captured, stream-K": set(),
    "captured, a gate": {"hipMemcpyHtoDAsync", "hipStreamWriteValue32", "hipStreamGetCaptureInfo_v2"},
    "async TP, two GPUs": {"hipMemcpyDtoDAsync", "hipStreamWriteValue32"},
}  # fmt: skip

#: Kernels that a case executes, where it is not one.
LAUNCHES = {"async TP, two GPUs": 2, "captured, dynamic": 4, "captured, stream-K": 4, "captured, a gate": 5}


def run(arch: str, landing: str, seed: int, cache: Path, *names: str) -> None:
    if shutil.which("cc") is None or shutil.which("c++") is None:
        pytest.skip("needs a C and a C++ compiler")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("needs Python's headers: Triton builds its launcher")
    done = subprocess.run(
        [sys.executable, SCRIPT, arch, landing, str(seed), *names], env=environment(cache), capture_output=True,
        text=True, timeout=1750, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(row["name"] for row in rows) == sorted(names or MORE)
    for row in rows:
        asked = set(row["asked"])
        assert asked >= MORE[row["name"]] | {"hipModuleLaunchKernel"}, row
        assert MORE[row["name"]] or asked <= LAUNCH, row
        assert len(row["executed"]) == LAUNCHES.get(row["name"], 1)
        assert min(row["executed"]) > 5000, "kernels of that size"


@pytest.mark.timeout(1800)
def test_matmul_attention_a_capture_and_async_tp(tmp_path):
    names = "matmul, dynamic", "attention", "attention, sinks of 16 bits", "captured, a gate", "async TP, two GPUs"
    run("gfx942", "random", 1, tmp_path, *names)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("landing", ["late", "random"])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_every_call(arch, landing, tmp_path):
    run(arch, landing, 2, tmp_path)
