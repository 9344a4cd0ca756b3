"""The kernels of a mixture of experts over ranks, compiled for GPUs that need not be here."""

from __future__ import annotations

import re

import pytest
import torch

triton = pytest.importorskip("triton")

from compiled_ahead import ARCHS, compiled_by, meta  # noqa: E402

from tilestream.core.protocols import experts as text  # noqa: E402
from tilestream.kernels.device.jit import INTERPRETED  # noqa: E402
from tilestream.launch.choices import Chosen  # noqa: E402
from tilestream.launch.layout import Layout  # noqa: E402
from tilestream.launch.portable import experts, rank_calls  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
WAITS, TELLS = {"take_rows", "take_results"}, {"push_rows", "push_results", "take_rows", "take_results"}


def launched(layout: Layout, tokens: int, top_k: int, dtype: torch.dtype) -> None:
    world, e = layout.world, layout.experts
    x, weights = meta(tokens, layout.width, dtype=dtype), meta(tokens, top_k, dtype=torch.float32)
    chosen = Chosen(
        meta(tokens * top_k, dtype=torch.int64), meta(tokens * top_k, dtype=torch.int64), meta(world * e + 1)
    )
    local = experts.Local(
        meta(world * e), meta(world, 4), meta(world, 4), meta(world, -(-e // 4) * 4), meta(2 * world, dtype=torch.int64)
    )
    words = rank_calls.SlotWords(
        meta(text.signals(world, e)), meta(6 + 2 * world), meta(2 * world, dtype=torch.int64), 1, world, "moe", 7, 5
    )
    rows = meta(layout.capacity, layout.width, dtype=dtype)
    experts.push_rows(words, layout, local, x, top_k, chosen, 16, 132)
    experts.take_rows(words, layout, local, 1, 1800.0)
    experts.multiply_rows(rows, rows, local.ends[1, :e])
    experts.push_results(words, layout, local, 1, rows, 16)
    experts.take_results(words, layout, 1800.0)
    experts.add_results(words, rows, weights, chosen, torch.empty_like(x))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("layout", [Layout(2, 32, 4096 * 8, 4096, 2), Layout(8, 1024, 16384 * 8, 7168, 2)], ids=str)
def test_the_kernels_spill_nothing_and_copy_whole_vectors(arch, layout, monkeypatch):
    found = compiled_by(lambda: launched(layout, 4096, 8, torch.bfloat16), arch, monkeypatch)
    assert set(found) == {"push_rows", "multiply_rows", "push_results", "add_results"} | WAITS
    for name, kernel in found.items():
        ptx = kernel.asm["ptx"]
        assert (kernel.metadata.num_warps == 1) == (name in WAITS), name
        if name in TELLS:
            assert ".sys.release" in ptx or ".sys.acq_rel" in ptx, f"{name} tells peers"
        words = re.findall(r"atom\.global\.(\w+\.\w+)\.\w+\.[bu]32", ptx)
        assert set(words) <= {"sys.acquire", "sys.release", "sys.acq_rel"}, f"{name} orders what peers share"
        if name in WAITS:
            assert ".sys.acquire" in ptx, f"{name} looks at what peers write"
        else:
            assert ".v4.b32" in ptx, f"{name} has no vectors of 16 bytes"
    assert found["push_rows"].asm["ptx"].count("st.global.v4.b32") >= 8, "what a worker has on its way"
    fused = [line for line in found["add_results"].asm["ptx"].splitlines() if "fma.rn.f32" in line]
    assert not fused, "a product is rounded before it is added, as torch's is"
