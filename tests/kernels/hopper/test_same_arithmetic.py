"""Attention's arithmetic as it was compiled: the same instructions, whatever the number of queries and how they lie.

A compiler that may choose what it fuses into a multiply-add chooses by what surrounds it. Then a row's bits depend on
the kernel that has it. Which instructions there are does not say in what order they are; other counts say that a choice
was made.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import tilestream as ts
from tilestream.core.gpu_specs import named
from tilestream.launch import compiling
from tilestream_tools.isa.sass import disassembled
from tilestream_tools.warm.ahead import ahead

KEYS = 681
ARITHMETIC = re.compile(r"\b(FADD|FMUL|FFMA|MUFU)(\.[A-Z0-9]+)*\b")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not compiling._STANDS_IN, reason="this Triton compiles for the GPU that is here alone"),
]


def arithmetic(queries: int, columns: int, tmp_path, monkeypatch, **how: Any) -> Counter[str]:
    """The float instructions of the kernel that so many queries of a prompt launch on an H100."""
    cache = tmp_path / f"{queries} {columns} {sorted(how)}"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    q, k, v = (
        torch.empty(1, rows, heads, columns, dtype=torch.bfloat16, device="meta")
        for rows, heads in ((queries, 16), (KEYS, 2), (KEYS, 2))
    )
    with ahead(named("h100")), torch.no_grad(), ts.invariant():
        ts.attention(q, k, v, causal=True, return_lse=True, **how)
    (cubin,) = cache.glob("*/*.cubin")
    found = (match[0] for match in ARITHMETIC.finditer(disassembled(cubin.read_bytes())[0]))
    return Counter(found)


@pytest.mark.parametrize("how", [{}, {"window": (300, 0)}, {"softcap": 20.0}], ids=["causal", "window", "cap"])
@pytest.mark.parametrize("columns", [64, 128, 256])
def test_a_prompt_and_one_query_are_computed_alike(columns, how, tmp_path, monkeypatch):
    whole, one = (arithmetic(queries, columns, tmp_path, monkeypatch, **how) for queries in (KEYS, 1))
    assert whole["FFMA"] > 0
    assert one == whole
