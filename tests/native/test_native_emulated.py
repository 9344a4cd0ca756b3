"""Native calls on AMD GPUs: HIP is `emulated_hip`, and what is launched executes on the emulator.

`test_native_calls` compares a launch's bytes with Triton's; here the result is computed from them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tritons import environment

SCRIPT = Path(__file__).parents[1] / "tools" / "emulator" / "end_to_end.py"


def run(libraries: tuple[Path, ...], arch: str, landing: str, cache: Path, *names: str) -> None:
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("needs Python's headers: Triton builds its launcher")
    done = subprocess.run(
        [sys.executable, SCRIPT, arch, landing, "1", *names], capture_output=True, text=True, timeout=850, check=False,
        env={**environment(cache), "TILESTREAM_TEST_NATIVE": str(libraries[0])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[:4000]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["name"] for row in rows] == list(names)
    for row in rows:
        assert len(row["executed"]) == 3, "one launch of Python's, two of the extension's"
        assert min(row["executed"]) > 5000, "kernels of that size"
        assert "aoti_torch_get_current_cuda_stream" in row["asked"], "the extension has asked for the stream"


def test_an_equal_call_is_launched_natively_and_right(libraries, tmp_path):
    run(libraries, "gfx942", "late", tmp_path, "native, dynamic")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_each_schedule_is_launched_natively_and_right(libraries, arch, tmp_path):
    run(libraries, arch, "random", tmp_path, "native, static", "native, dynamic", "native, stream-K")
