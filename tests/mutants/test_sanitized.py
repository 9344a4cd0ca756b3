"""The sanitizer's mutants can be made of the kernels' text as it is; what ConSan says of them needs a GPU."""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("triton")

from mutants.engine import load
from mutants.sanitized import ATTENTION, BY_SOURCE, GEMM, GROUPED

ROWS = [(kernel, name) for kernel in (GEMM, GROUPED, BY_SOURCE, ATTENTION) for name in ("", *kernel.bugs)]


@pytest.mark.parametrize(("kernel", "name"), ROWS, ids=[f"{kernel.entry} {name}" for kernel, name in ROWS])
def test_each_mutant_is_loaded_and_compiles_from_its_own_text(kernel, name):
    edits = kernel.always + (kernel.bugs[name].edits if name else ())
    made = load(kernel.modules, edits)
    entry = getattr(made[kernel.modules[-1]], kernel.entry)
    assert entry.src in inspect.getsource(made[kernel.modules[-1]])
    assert {edit.module for edit in edits} <= set(made)
    for edit in edits:
        module = made[edit.module]
        assert inspect.getsource(module) != inspect.getsource(__import__(edit.module, fromlist=["text"]))
