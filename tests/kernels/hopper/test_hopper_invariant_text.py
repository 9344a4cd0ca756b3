"""A row's bits in calls whose tiles begin at other queries, by the kernel's text with the compiler's fused arithmetic.

ptxas makes one instruction of ``a * b - c``, which rounds once. So does `fused`; what else differs between the calls is
in which blocks of its tile a row sees no key.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from attention_memory import Array, Buffer, Product, of
from test_hopper_attention_text import given, plan_of, run

KEYS = 420
CASES = {
    "window": ({"causal": True, "window": (150, None)}, (128, 128)),
    "window of 64 columns": ({"causal": True, "window": (150, None)}, (64, 64)),
    "window of 256 columns": ({"causal": True, "window": (70, None)}, (256, 256)),
    "window, not causal": ({"window": (70, 30)}, (128, 128)),
    "causal": ({"causal": True}, (128, 128)),
    "cap": ({"causal": True, "window": (150, None), "softcap": 3.0}, (128, 128)),
}  # fmt: skip


@pytest.fixture
def fused(monkeypatch):
    """Products of arrays keep their exact value for a subtraction, as the compiler's fused instruction has it."""

    def multiply(self: Array, other: Any) -> Array:
        if self.dtype != np.float32:
            return of(np.asarray(self) * np.asarray(other))
        exact = np.multiply(np.asarray(self, np.float64), np.asarray(other, np.float64))
        made = of(exact.astype(np.float32))
        made.exact = exact
        return made

    def subtract(self: Array, other: Any) -> Array:
        if self.dtype != np.float32:
            return of(np.asarray(self) - np.asarray(other))
        left = getattr(self, "exact", None)
        left = np.asarray(self if left is None else left, np.float64)
        return of((left - np.asarray(other, np.float64)).astype(np.float32))

    def finish(self: Product) -> None:  # exact, and then rounded: a BLAS may add a row otherwise at another place
        x = np.asarray(self.x.read() if isinstance(self.x, Buffer) else self.x, np.float64) @ self.y.read()
        acc = self.acc.value if isinstance(self.acc, Product) else self.acc
        self.value = of((x + np.asarray(acc) if self.more else x).astype(np.float32))

    monkeypatch.setattr(Product, "finish", finish)
    monkeypatch.setattr(Array, "__mul__", multiply)
    monkeypatch.setattr(Array, "__sub__", subtract)


@pytest.mark.parametrize("name", CASES)
def test_a_row_has_its_bits_wherever_its_tile_begins(name, fused):
    features, dims = CASES[name]
    whole = given(KEYS, KEYS, heads=(1, 1), dims=dims, **features)
    plan = plan_of(whole.problem, promises=True, splits=1)
    (want,), (want_lse,) = run(whole, plan=plan)
    for queries in (330, 247):
        part = given(queries, KEYS, heads=(1, 1), dims=dims, **features)
        part.operands.q.copy_(whole.operands.q[:, -queries:])
        part.operands.k.copy_(whole.operands.k)
        part.operands.v.copy_(whole.operands.v)
        plan = plan_of(part.problem, promises=True, splits=1)
        (made,), (made_lse,) = run(part, plan=plan)
        assert np.array_equal(made_lse, want_lse[-queries:])
        assert np.array_equal(made, want[-queries:])
