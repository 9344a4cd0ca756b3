"""The kernels around calls between ranks, compiled for GPUs that need not be here."""

from __future__ import annotations

import re

import pytest
import torch

triton = pytest.importorskip("triton")

from tilestream.kernels.device.jit import INTERPRETED  # noqa: E402
from tilestream.launch import compiling  # noqa: E402
from tilestream.launch.portable import add, rank_calls  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
ARCHS = ["sm_90", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_80", "sm_89", "sm_100", "sm_120"))]


def meta(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(count, dtype=dtype, device="meta")


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_around_a_call_are_one_warp_without_spills(arch, monkeypatch):
    found = {}
    compiled = compiling.compiled

    def kept(function, filled, options):
        found[function.fn.__name__] = made = compiled(function, filled, options)
        return made

    monkeypatch.setattr(compiling, "compiled", kept)
    add._kernel.cache_clear()
    with compiling.ahead(arch):
        control, places = meta(16, torch.int32), meta(6, torch.int64)
        words = rank_calls.SlotWords(meta(1024, torch.int32), control, places, 1, 3, "all_gather_matmul", 7)
        rank_calls.begin_call(words, 1800.0, 2, 2)
        rank_calls.await_parts(words, 1e-3, 2)
        rank_calls.end_call(words)
        rank_calls.void_out(words, torch.empty(512, 512, dtype=torch.bfloat16, device="meta"))
    add._kernel.cache_clear()
    assert set(found) == {"begin_call", "await_parts", "end_call", "void_out"}
    for name, kernel in found.items():
        ptx = kernel.asm["ptx"]
        assert "st.local" not in ptx, name
        if name != "void_out":
            assert kernel.metadata.num_warps == 1
            assert ".sys.acquire" in ptx, f"{name} looks at what peers write"
            told = re.findall(r"\batom\S+\.exch\.\S+", ptx)
            assert told
            assert all(".sys.release." in one for one in told), f"{name} tells peers, or the host: {told}"
