"""The CDNA kernel's tiles: what bounds them, and how a plan comes by one."""

from __future__ import annotations

import pytest
from made_up import BF16, reason

from tilestream.core.gpu_specs import named
from tilestream.plan import plan
from tilestream.plan.policy.cdna_tiles import (
    DIRECT_BYTES,
    MOST_IN_FLIGHT,
    TILES,
    Tile,
    candidates,
    fitting,
    in_flight,
    instruction,
    is_far,
    lane_bytes,
    spread,
    stage_cost,
    stage_swizzle,
    why_not,
)
from tilestream.plan.problem import Problem

SHARED = {"gfx942": 65536, "gfx950": 163840}
MI300X, MI355X = named("mi300x"), named("mi355x")
ROWS = [(arch, tile) for arch, rows in TILES.items() for tile in rows]


@pytest.mark.parametrize(("arch", "tile"), ROWS, ids=str)
def test_every_row_fits_its_architecture(arch, tile):
    assert why_not(tile, arch, SHARED[arch]) == ""
    assert tile.block_k(2) % instruction(arch, 2)[2] == 0
    down, across = spread(tile.block_m, tile.block_n, tile.warps)
    assert down * across == tile.warps
    assert tile.block_m % (16 * down) == tile.block_n % (16 * across) == 0
    assert in_flight(tile, arch) <= MOST_IN_FLIGHT
    for rows in (tile.block_m, tile.block_n):
        stage_swizzle(rows, tile.block_k(2), 2, arch, True).check(tile.block_k(2))
        stage_swizzle(rows, tile.block_k(2), 2, arch, False).check(rows)


def test_copies_are_counted_in_instructions():
    tile = Tile(256, 256, 1, 8, 4, "direct", 0.5)
    # 32 KiB of a stage, 4 KiB of a warp: four copies of 16 bytes a lane, sixteen of 4.
    assert stage_cost(tile, 16, "direct") == (4, 0)
    assert stage_cost(tile, 4, "direct") == (16, 0)
    assert stage_cost(tile, 16, "staged") == (4, 4)
    assert (in_flight(tile, "gfx950"), in_flight(tile, "gfx942")) == (12, 48)
    assert lane_bytes(tile, "gfx942") == 4
    # Of 32 rows a warp of four has 512 bytes, of which no lane gets 16.
    assert lane_bytes(Tile(32, 64, 1, 4, 3, "direct", 0.5), "gfx950") == 4


def better_copies(tile, arch):
    """The variant of copies with fewer instructions; ``staged`` only if its registers fit."""
    direct = stage_cost(tile, DIRECT_BYTES[arch][0], "direct")
    staged = stage_cost(tile, 16, "staged")
    fits = not why_not(tile._replace(copies="staged", stages=2), arch, 2**20)
    return "staged" if staged.total < direct.total and fits else "direct"


def test_the_way_is_that_of_fewer_instructions():
    for arch, rows in TILES.items():
        for tile in rows:
            assert better_copies(tile, arch) == ("staged" if arch == "gfx942" else "direct"), tile
        assert {tile.copies for tile in rows} == {"direct", "staged"}, "both can be asked for"
    # Where a step does not fit the registers beside the accumulator, it goes past them.
    assert better_copies(Tile(256, 256, 4, 8, 2, "staged", 0.5), "gfx942") == "direct"


@pytest.mark.parametrize(
    ("tile", "arch", "why"),
    [
        (Tile(256, 256, 2, 8, 4, "direct", 0.5), "gfx950", "4 stages of 65536 bytes, shared memory has 163840"),
        (Tile(256, 256, 1, 8, 2, "direct", 0.5), "gfx950", "2 stages: with fewer than three each step waits"),
        (Tile(128, 128, 1, 4, 5, "direct", 0.5), "gfx942", "5 stages of 16384 bytes, shared memory has 65536"),
        (Tile(16, 64, 1, 8, 3, "direct", 0.5), "gfx950", "8 warps: a warp's share of a stage is less than a copy"),
        (Tile(64, 64, 2, 2, 3, "direct", 0.5), "gfx942", "64 copies in flight, a wait counts 63"),
        (Tile(256, 256, 4, 4, 2, "staged", 0.5), "gfx950", "384 registers for the accumulator and a step, of 256"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_told(tile, arch, why):
    assert why_not(tile, arch, SHARED[arch]).startswith(why)


def test_stages_of_a_ring_that_fills_shared_memory_leave_room_beside_it():
    # 160 KiB of 160: an atomic's answer would find no place.
    assert why_not(Tile(256, 256, 1, 8, 5, "direct", 0.5), "gfx950", SHARED["gfx950"])


def test_instructions_bound_the_step():
    assert instruction("gfx942", 2) == (16, 16, 16)
    assert instruction("gfx950", 2) == (16, 16, 32)
    assert instruction("gfx950", 1) == (16, 16, 128)
    assert instruction("gfx942", 1) == (16, 16, 32)
    # 64 elements of 8 bits are half an instruction.
    assert Tile(256, 256, 1, 8, 4, "direct", 0.5) not in fitting(TILES["gfx950"], MI355X, 1)
    assert fitting(TILES["gfx950"], MI355X, 1)


def test_what_reaches_beyond_a_buffer():
    assert not is_far(256, 64, 2**22, 2, True)
    assert is_far(256, 64, 2**23, 2, True)
    assert not is_far(256, 64, 2**23, 2, False), "64 rows of K, not 256"
    assert is_far(256, 64, 2**25, 2, False)


def test_a_large_accumulator_is_not_cut():
    problem = Problem(4096, 4096, 4096, **BF16)
    made = list(candidates(problem, MI300X, 304, kinds=("dynamic", "stream_k")))
    assert {c.schedule.kind for c in made if c.block[:2] == (256, 256)} == {"dynamic"}
    assert "stream_k" in {c.schedule.kind for c in made if c.block[:2] == (128, 128)}


def asked(**more):
    return plan(8192, 8192, 8192, dtype="bfloat16", device=MI300X, layout="nt", **more)


def test_a_caller_who_asks_gets_it():
    made = asked(backend="cdna")
    assert made.label.startswith("cdna staged dynamic, 8 queues, 304 workers")
    assert "executed on an emulator, not run: no gfx942 GPU was there" in made.explain()
    assert reason(made, "portable") == "the CDNA kernel does this"
    assert asked(variant="direct").variant == "direct"
    assert asked(stages=3, tile=(128, 128)).stages == 3
    assert asked(backend="cdna", tile=(256, 256)).block == (256, 256, 32)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        ({"backend": "hopper"}, "it is not for gfx942"),
        ({"backend": "cdna", "tile": (48, 48)}, "it has no 48x48 tile here"),
        ({"backend": "cdna", "stages": 9}, "no tile of it fits with variant=None, stages=9"),
    ],
    ids=str,
)
def test_what_is_asked_for_and_not_to_be_had(ask, message):
    with pytest.raises(NotImplementedError, match=message):
        asked(**ask)
