"""The tests that run kernels in Triton's interpreter: only in a process that was started for it.

The interpreter is chosen when Triton's functions are made, which is when Triton is imported, and other tests compile.
So `tests/kernels/test_portable_interpreted.py` runs these in a process of their own, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os

import pytest

INTERPRETED = [
    "test_attention_merge.py",
    "test_cluster.py",
    "test_one_tile.py",
    "test_portable_add.py",
    "test_portable_arrival.py",
    "test_portable_attention.py",
    "test_portable_copy_items.py",
    "test_portable_experts.py",
    "test_portable_fp8.py",
    "test_portable_gemm.py",
    "test_portable_grouped.py",
    "test_portable_grouped_sources.py",
    "test_portable_order.py",
    "test_portable_rank_calls.py",
    "test_portable_realign.py",
    "test_portable_trace.py",
]

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else INTERPRETED


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Tiles of 16 x 16 x 16, so that small operands have many."""
    from interpreted import small_tiles

    small_tiles(monkeypatch)


@pytest.fixture(autouse=True)
def _nothing_pending():
    """Each error of a launch is looked at by the test that caused it."""
    import torch

    from tilestream.runtime.channel import channel

    yield
    assert not channel(torch.device("cpu")).pending
