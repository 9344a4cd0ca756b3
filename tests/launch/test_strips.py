"""The columns in which the portable kernel stores a tile: as many as leave registers for what is beside them."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import tilestream as ts
from tilestream.launch.gemm_arguments import Layout
from tilestream.launch.portable.arguments import Arguments

N = 4096
STORE = Layout((0, N, 1), (0, N, 1), (0, N, 1))
EPILOGUES = ({"bias": 1}, {"residual": (0, N, 1)}, {"scaled": True}, {"activation": "gelu"})


def strip(device, tile, schedule="dynamic", scales="none", **epilogue):
    dtype = "bfloat16" if scales == "none" else "float8_e4m3fnuz"
    plan = ts.plan(
        N, N, N, dtype=dtype, scales=scales, device=device, backend="portable", tile=tile, schedule=schedule
    )  # fmt: skip
    return Arguments(plan, STORE._replace(**epilogue))._config().STRIP


def test_a_large_tile_of_gfx942_is_stored_in_narrow_strips_where_more_is_done_than_a_store():
    large = (128, 256)
    for schedule in ("static", "dynamic"):
        assert strip("mi300x", large, schedule) == strip("mi300x", large, schedule, "tensor") == 32
        assert {strip("mi300x", large, schedule, **one) for one in EPILOGUES} == {16}
        assert strip("mi300x", large, "dynamic", "row") == 8, "operands of 8 bits leave fewer registers"
    assert strip("mi300x", large, "stream_k") == 16, "a part is stored, and parts are added"
    others = (("mi300x", (128, 128)), ("mi300x", (16, 128)), ("mi355x", large), ("h100", large))
    assert {strip(*one, schedule, bias=1) for one in others for schedule in ("dynamic", "stream_k")} == {32}


def test_tiles_in_tensor_memory_are_stored_in_narrow_strips():
    assert [strip("b200", (64, columns)) for columns in (64, 128)] == [32, 16]
