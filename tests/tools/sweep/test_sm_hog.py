"""The kernel that holds SMs, compiled with no GPU: it has all the shared memory, looks at the clock, spills nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SRC = Path(__file__).parents[3] / "src"
CODE = """
import json
from tilestream_tools.isa.build import Pointer, build
from tilestream_tools.sweep.sm_hog import PIECE, hold
words = [Pointer("int32") for _ in range(3)]
arguments = (*words, Pointer("int64"), 30_000_000_000, 232448 // PIECE)
kernel, said = build(hold, arguments, {"num_warps": 4}, "sm_90a")
ptx = kernel.asm["ptx"]
print(json.dumps({
    "shared": kernel.metadata.shared,
    "said": said,
    "counts": {text: ptx.count(text) for text in ("globaltimer", "nanosleep", "%smid", "sys.acquire", "sys.release")},
}))
"""


def test_it_compiles_as_it_should(tmp_path):
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=850, check=False,
        env={**kept, "PYTHONPATH": str(SRC), "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert 232448 - 32768 < found["shared"] <= 232448
    assert "0 bytes spill stores" in found["said"]
    assert all(found["counts"].values()), found["counts"]
