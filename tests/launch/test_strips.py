"""How much of a tile the portable kernels take at once: columns that are stored, floats that a cluster fetches."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import tilestream as ts
from tilestream.core.schedule import Schedule
from tilestream.launch.gemm_arguments import Layout
from tilestream.launch.portable import arguments
from tilestream.launch.portable.arguments import Arguments, OneTileArguments

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


@pytest.mark.parametrize(("parts", "fetched"), [(2, 4), (4, 1), (8, 1)])
def test_a_cluster_fetches_four_floats_where_a_thread_has_as_many(parts, fetched, monkeypatch):
    """Of 16 x 32 elements two warps' threads have 8 each, of which each CTA of a cluster adds up its share."""
    monkeypatch.setattr(arguments, "INTERPRETED", False)
    plan = ts.plan(
        64, 64, 8192, dtype="bfloat16", device="h100", variant="one_tile", tile=(16, 32), schedule="stream_k"
    )
    shares = parts * plan.schedule.grid.tiles
    grid = replace(plan.schedule.grid, k_steps=64)
    plan = replace(plan, schedule=Schedule("stream_k", grid, plan.schedule.raster, shares, shares=shares))
    assert (plan.block[:2], plan.warps) == ((16, 32), 2)
    config = OneTileArguments(plan, Layout((0, 8192, 1), (0, 64, 1), (0, 64, 1))).config
    assert parts == config.CLUSTER
    assert fetched == config.FETCHED
