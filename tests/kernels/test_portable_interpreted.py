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


#: Files, and how many quick and slow tests each has at least.
FILES = {
    "test_portable_add.py": (7, 0),
    "test_portable_rank_calls.py": (53, 0),
    "test_portable_realign.py": (89, 0),
    "test_attention_merge.py": (43, 0),
    "test_portable_gemm.py": (80, 18),
    "test_cluster.py": (9, 0),
    "test_one_tile.py": (82, 0),
    "test_portable_grouped.py": (56, 18),
    "test_portable_grouped_sources.py": (43, 30),
    "test_portable_order.py": (32, 42),
    "test_portable_arrival.py": (29, 16),
    "test_portable_fp8.py": (61, 0),
    "test_portable_trace.py": (25, 0),
    "test_portable_copy_items.py": (21, 6),
    "test_portable_experts.py": (29, 2),
    "test_portable_attention.py": (59, 0),
}


def passed(file: str, which: str) -> int:
    """How many tests of a file passed, all of which are those of the marker expression ``which``."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, str(HERE / file)],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=850, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    found = re.search(r"(\d+) passed", run.stdout)
    assert found, run.stdout[-1000:]
    return int(found[1])


@pytest.mark.parametrize("file", FILES)
def test_in_the_interpreter(file):
    assert passed(file, "not slow") >= FILES[file][0]


@pytest.mark.slow
@pytest.mark.parametrize("file", [file for file, (_, slow) in FILES.items() if slow])
def test_the_rest_in_the_interpreter(file):
    assert passed(file, "slow") >= FILES[file][1]
