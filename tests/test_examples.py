"""Every example runs as a user would run it, and says that it agrees with torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

#: The demo has its own tests, tests/tools/cli/test_demo.py.
EXAMPLES = sorted(path for path in (Path(__file__).parent.parent / "examples").glob("*.py") if path.stem != "demo")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_agrees_with_torch(path: Path) -> None:
    if "gpu" in path.stem and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if "from transformers" in path.read_text(encoding="utf-8"):
        pytest.importorskip("transformers")
    arguments = ["1000"] if path.stem == "weights_from_disk" else []
    run = subprocess.run([sys.executable, str(path), *arguments], capture_output=True, text=True, timeout=850)
    assert run.returncode == 0, run.stderr
    found = re.search(r"largest difference from torch: (\S+)", run.stdout)
    assert found is not None
    assert float(found.group(1)) < 1e-2


def test_there_are_examples() -> None:
    assert EXAMPLES
