"""These tests run the kernels in Triton's interpreter, which is chosen when Triton's functions are made: at import.

Where there is a GPU, `tests/gpu` needs the compiler in the same process: then they run only if TRITON_INTERPRET=1 is
set.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

collect_ignore = ["gate.py"]


def pytest_collection_modifyitems(items):
    here = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here) and os.environ.get("TRITON_INTERPRET") != "1":
            item.add_marker(pytest.mark.skip(reason="a GPU is here: set TRITON_INTERPRET=1 to run the interpreter"))
