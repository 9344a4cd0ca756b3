"""Kernels that launches compile for a GPU that is not here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilestream.launch import compiling
from tilestream.launch.portable import add

ARCHS = ["sm_90", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_80", "sm_89", "sm_100", "sm_120"))]


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """An operand without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


def compiled_by(launch: Callable[[], object], arch: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The kernels that ``launch`` compiles, by name. None of them spills."""
    found, compiled = {}, compiling.compiled

    def kept(function: Any, filled: Any, options: Any) -> Any:
        found[function.fn.__name__] = made = compiled(function, filled, options)
        return made

    monkeypatch.setattr(compiling, "compiled", kept)
    add._kernel.cache_clear()
    with compiling.ahead(arch):
        launch()
    add._kernel.cache_clear()
    for name, kernel in found.items():
        assert "st.local" not in kernel.asm["ptx"], name
    return found
