"""Compile gates: each kernel that a plan can pick, compiled with no GPU, and rules on what the compiler made of it.

``python tests/kernels/gates GATE all|quick|names|NAME`` prints a JSON object a case: see `gates.engine`. It runs in a
process of its own, by any Python that has the Triton that is meant, and needs no torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from pathlib import Path

_TESTS = Path(__file__).parents[2]
sys.path.insert(0, str(_TESTS))
# Where PYTHONPATH has the package, as of a mutant, that is meant.
_given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
if not any(Path(folder, "tilestream").is_dir() for folder in _given):
    sys.path.insert(1, str(_TESTS.parent / "src"))

with contextlib.suppress(ImportError):
    import torch  # noqa: F401
if "torch" not in sys.modules:  # Triton's AMD backend asks whether an argument is a tensor
    sys.modules["torch"] = types.ModuleType("torch")
    sys.modules["torch"].Tensor = type("Tensor", (), {})  # type: ignore[attr-defined]
    sys.modules["torch"]._C = None  # type: ignore[attr-defined] # modules look up what a torch without CUDA has not
