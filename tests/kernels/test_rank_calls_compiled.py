"""The kernels around calls between ranks, compiled for GPUs that need not be here."""

from __future__ import annotations

import re

import pytest
import torch

triton = pytest.importorskip("triton")

from compiled_ahead import ARCHS, compiled_by, meta  # noqa: E402

from tilestream.kernels.device.jit import INTERPRETED  # noqa: E402
from tilestream.launch.portable import rank_calls  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")


def launched() -> None:
    words = rank_calls.SlotWords(meta(1024), meta(16), meta(6, dtype=torch.int64), 1, 3, "all_gather_matmul", 7)
    rank_calls.begin_call(words, 1800.0, 2, 2)
    rank_calls.await_parts(words, 1e-3, 2)
    rank_calls.end_call(words)
    out = meta(512, 512, dtype=torch.bfloat16)
    rank_calls.void_out(words, out)
    rank_calls.end_call(words, out)


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_around_a_call_are_one_warp_without_spills(arch, monkeypatch):
    found = compiled_by(launched, arch, monkeypatch)
    assert set(found) == {"begin_call", "await_parts", "end_call", "void_out", "end_or_void"}
    for name, kernel in found.items():
        ptx = kernel.asm["ptx"]
        if name != "void_out":
            assert kernel.metadata.num_warps == 1
            assert ".sys.acquire" in ptx, f"{name} looks at what peers write"
            told = re.findall(r"\batom\S+\.exch\.\S+", ptx)
            assert told
            assert all(".sys.release." in one for one in told), f"{name} tells peers, or the host: {told}"
