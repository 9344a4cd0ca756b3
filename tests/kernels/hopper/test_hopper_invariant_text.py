"""A row's bits in calls whose tiles begin at other queries, by the kernel's text in float32.

What differs between the calls is in which blocks of its tile a row sees no key.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton")

from attention_memory import Buffer, Product, of
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
def exact(monkeypatch):
    """Products of matrices are exact, and rounded once: a BLAS may add a row otherwise at another place."""

    def finish(self: Product) -> None:
        x = np.asarray(self.x.read() if isinstance(self.x, Buffer) else self.x, np.float64) @ self.y.read()
        acc = self.acc.value if isinstance(self.acc, Product) else self.acc
        self.value = of((x + np.asarray(acc) if self.more else x).astype(np.float32))

    monkeypatch.setattr(Product, "finish", finish)


@pytest.mark.parametrize("name", CASES)
def test_a_row_has_its_bits_wherever_its_tile_begins(name, exact):
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
