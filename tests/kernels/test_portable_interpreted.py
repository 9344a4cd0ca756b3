"""The tests of `tests/kernels/portable` that need Triton's interpreter, each file in a process of its own.

    TRITON_INTERPRET=1 python -m pytest tests/kernels/portable -k ...

runs them one by one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent / "portable"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("file", "least"),
    [
        ("test_portable_add.py", 7),
        ("test_attention_merge.py", 19),
        ("test_portable_gemm.py", 90),
        ("test_portable_order.py", 60),
        ("test_portable_arrival.py", 35),
        ("test_portable_fp8.py", 60),
        ("test_portable_trace.py", 12),
        ("test_portable_copy_items.py", 27),
        ("test_portable_attention.py", 45),
    ],
)
def test_in_the_interpreter(file, least):
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / file)],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=290, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed, run.stdout[-1000:]
    assert int(passed[1]) >= least
