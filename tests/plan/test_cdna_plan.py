"""The cost model of CDNA 3 and 4, held to published measurements: there was no such GPU."""

from __future__ import annotations

import dataclasses

import pytest

from tilestream import Arrival, plan
from tilestream.core.gpu_specs import GPU_SPECS, PER_CYCLE, gpu_properties, named
from tilestream.core.grid import Grid
from tilestream.core.order import Raster
from tilestream.core.schedule import Schedule
from tilestream.plan.policy import cdna
from tilestream.plan.policy.portable import CDNA
from tilestream.plan.problem import ITEMSIZE, Problem, result_name

MI300X, MI355X = named("mi300x"), named("mi355x")

#: Device, dtype, m, n, k, the share of the main loop's cycles that the matrix units are busy, TFLOP/s; tiles of 256 x
#: 256 x 128 bytes, a queue a die.
PUBLISHED = (
    # ROCm blogs, "Measuring Max-Achievable FLOPs, part 2": hipBLASLt, "up to 94 %" with everything.
    ("mi300x", "bfloat16", 4096, 4864, 32896, 0.95, 708),
    ("mi300x", "float16", 4096, 4864, 32896, 0.95, 654),
    ("mi325x", "bfloat16", 4096, 4864, 32896, 0.95, 843),
    ("mi325x", "float16", 4096, 4864, 32896, 0.95, 794),
    # AMD, gfx950-gluon-tutorials, kernels/gemm/gfx942/README.md: inter_wave, then intra_wave, busy by thread traces.
    ("mi300x", "bfloat16", 4096, 4864, 2112, 0.865, 609),
    ("mi300x", "bfloat16", 4096, 4864, 4160, 0.865, 651),
    ("mi300x", "bfloat16", 4096, 4864, 8256, 0.865, 609),  # AMD: the noisiest point, by 5 %
    ("mi300x", "bfloat16", 4096, 4864, 16448, 0.865, 659),
    ("mi300x", "bfloat16", 4096, 4864, 2112, 0.697, 565),
    ("mi300x", "bfloat16", 4096, 4864, 4160, 0.697, 586),
    ("mi300x", "bfloat16", 4096, 4864, 8256, 0.697, 567),
    ("mi300x", "bfloat16", 4096, 4864, 16448, 0.697, 600),
    # The same, "From Naive to Near-Peak": v9, v0, v4, and bf8; busy by thread traces.
    ("mi355x", "float16", 4096, 4096, 8192, 0.9875, 1489),
    ("mi355x", "float16", 4096, 4096, 8192, 0.25, 520),
    ("mi355x", "float16", 4096, 4096, 8192, 0.58, 1123),
    ("mi355x", "float8_e5m2", 4096, 4096, 16384, 0.9972, 3257),
    # HipKittens, analysis/mi350x_data_to_log.json: AITER, HipKittens. Their busy share is not published.
    ("mi350x", "bfloat16", 8192, 8192, 8192, 0.95, 1188),
    ("mi350x", "bfloat16", 4096, 4096, 4096, 0.9, 1075),
)
TOLERANCE = 0.12


def modelled(function, device, dtype, m, n, k, block, efficiency, queues=8):
    """A function of the model, for a queue a die in AMD's groups."""
    grid = Grid.of(m, n, k, *block)
    raster = Raster("grouped", group=cdna.group_of(block, grid, device.workers, device.xcds))
    schedule = Schedule("dynamic", grid, raster, device.workers, queues, "columns" if queues > 1 else "items")
    return function(Problem(m, n, k, 1, dtype, result_name(dtype, None)), device, schedule, block, efficiency)


@pytest.mark.parametrize(("name", "dtype", "m", "n", "k", "busy", "tflops"), PUBLISHED)
def test_what_is_published_is_what_the_model_says(name, dtype, m, n, k, busy, tflops):
    block = (256, 256, 128 // ITEMSIZE[dtype])
    seconds = modelled(cdna.seconds, named(name), dtype, m, n, k, block, busy)
    assert 2e-12 * m * n * k / seconds == pytest.approx(tflops, rel=TOLERANCE)


#: AMD, gfx950-gluon-tutorials, docs/tcp_bound_tile_model.md, section 3: tile, share of the cycles that the matrix units
#: are busy in the main loop, measured, with K steps of 64 in float16.
BUSY = {
    (256, 256): 0.96, (256, 128): 0.83, (128, 256): 0.84, (128, 128): 0.69, (256, 64): 0.55, (64, 256): 0.57,
    (128, 64): 0.47, (64, 128): 0.47,
}  # fmt: skip


@pytest.mark.parametrize(("tile", "busy"), BUSY.items())
def test_small_tiles_are_bound_by_what_can_be_under_way(tile, busy):
    found = modelled(cdna.step, MI355X, "float16", 16 * tile[0], 16 * tile[1], 8192, (*tile, 64), 0.96)
    assert found.share == pytest.approx(busy, abs=0.1)
    assert (found.under_way == max(found[1:])) == (tile != (256, 256))


def test_groups_are_amds_for_square_tiles():
    """*gfx950-gluon-tutorials*, v9 and kernels/gemm/gfx942/README.md, 3.2: of 32, 4 to 8 are best; of 38, 5 to 8."""
    grid = Grid.of(8192, 8192, 8192, 256, 256, 64)
    assert cdna.group_of((256, 256, 64), grid, 256, 8) == 4
    assert cdna.group_of((256, 256, 64), grid, 304, 8) == 5
    assert cdna.group_of((128, 256, 64), grid, 256, 8) == 8, "twice as many rows of half the height"
    assert cdna.group_of((256, 256, 64), Grid.of(300, 8192, 64, 256, 256, 64), 256, 8) == 2, "no more than there are"


def test_a_queue_a_die_reads_less_from_beyond_l2():
    tiny = dataclasses.replace(MI300X, l2=64 << 10)
    one, each, alone = (
        modelled(cdna.step, device, "bfloat16", 8192, 8192, 8192, (256, 256, 64), 0.9, queues)
        for device, queues in ((MI300X, 1), (MI300X, 8), (tiny, 8))
    )
    assert 1.5 < one.beyond / each.beyond < 4
    assert one.cycles > each.cycles
    assert alone.beyond > 2 * one.beyond, "what L2 does not keep, each worker reads"


def test_a_wave_more_costs_a_wave():
    full, more = (modelled(cdna.seconds, MI300X, "bfloat16", 4096, n, 8192, (256, 256, 64), 0.9) for n in (4864, 4865))
    assert more / full > 1.8, "16 x 19 tiles are a wave of 304; 16 x 20 are two"


def test_the_clock_falls_with_the_load():
    assert cdna.clock(MI300X, "bfloat16", 0.0) == MI300X.clock == 2.1e9
    assert cdna.clock(MI300X, "bfloat16", 1.0) == pytest.approx(1.207e9)
    assert cdna.clock(MI300X, "float64", 1.0) == MI300X.clock, "of which nothing is published"


# Plans ----------------------------------------------------------------------------------------------------------------


def on(device, *shape, dtype="bfloat16", **more):
    return plan(*shape, dtype=dtype, device=device, layout="nt", **more)


def test_large_problems_get_a_queue_a_die():
    for name in ("mi300x", "mi355x"):
        made = on(name, 8192, 8192, 8192)
        assert (made.schedule.queues, made.schedule.split) == (8, "columns")
        assert made.workers == named(name).workers
        assert made.schedule.raster.group == cdna.group_of(made.block, made.schedule.grid, made.workers, 8)
    tall = on("mi355x", 65536, 1024, 4096)
    assert (tall.schedule.queues, tall.schedule.split) == (8, "rows"), "fewer columns of tiles than dies"
    assert on("mi300x", 8192, 8192, 8192, queues=3).schedule.queues == 3
    assert on("mi300x", 8192, 8192, 8192, order=lambda t, m, n: (t // n, t % n)).schedule.queues == 1


def test_few_tiles_are_split_along_k():
    assert on("mi300x", 64, 8192, 8192).schedule.kind == "stream_k"
    assert on("mi300x", 64, 8192, 8192).tile[0] == 64
    assert on("mi300x", 1, 8192, 8192).tile[0] <= 64
    assert on("mi355x", 8192, 8192, 8192).schedule.kind == "dynamic", "2048 tiles are eight waves of 256"


def test_a_limit_on_workers_is_counted_with():
    few, all_ = on("mi355x", 8192, 8192, 8192, workers=64), on("mi355x", 8192, 8192, 8192)
    assert few.workers == 64
    assert few.schedule.raster.group < all_.schedule.raster.group, "8 of a die read less together than 32"
    assert 2.5 < few.predicted / all_.predicted <= 4


def test_large_tiles_where_they_fit():
    assert on("mi355x", 8192, 8192, 8192).tile == (128, 256)
    for device in (MI300X, MI355X):
        for kind, size in (("16-bit", 2), ("8-bit", 1)):
            assert all(row.ring_bytes(size) <= device.shared for row in CDNA[device.arch][kind])


def test_a_unit_of_each_shader_engine_is_left_to_producers():
    assert MI300X.shader_engines == MI355X.shader_engines == 32
    for name, argument, asked, workers, refused in (
        ("mi300x", "arrival", None, 272, 304), ("mi355x", "arrival", None, 224, 256),
        ("mi300x", "weight_arrival", 300, 272, 300), ("mi300x", "arrival", 100, 100, None),
        ("h100", "arrival", None, 132, None),  # NVIDIA's stream writes take no SM
    ):  # fmt: skip
        made = on(name, 8192, 8192, 8192, workers=asked, **{argument: Arrival.uniform(1024, 8)})
        assert made.workers == workers
        assert (f"{refused} workers: an operand arrives: a CU of each" in made.explain()) == bool(refused)
        assert ("an operand arrives" in made.explain()) == bool(refused)


def test_explain_says_that_it_was_not_run():
    says = "checked   compiled, and executed on an emulator, not run: no gfx942 GPU was there"
    assert says in on("mi300x", 64, 64, 64).explain()
    assert "not run" not in on("h100", 64, 64, 64).explain()


# Devices by name ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [("mi300x", "bfloat16", 1307.4), ("mi300x", "fp8", 2614.9), ("mi325x", "bfloat16", 1307.4),
     ("mi350x", "bfloat16", 2306.9), ("mi355x", "bfloat16", 2516.6), ("mi355x", "fp8", 5033.2),
     ("mi355x", "float32", 157.3), ("h100", "bfloat16", 989.4), ("h200", "fp8", 1979)],
)  # fmt: skip
def test_peaks_are_the_data_sheets(name, dtype, tflops):
    device = named(name)
    assert device.peak(dtype, device.workers) / 1e12 == pytest.approx(tflops, rel=2e-3)


def test_devices_have_names():
    assert named("MI300X") == MI300X
    assert named("cpu") is None
    for name in GPU_SPECS:
        device = named(name)
        assert device.arch in PER_CYCLE
        assert cdna.knows(device) == name.startswith("mi")
        assert plan(4096, 4096, 4096, dtype="float16", device=name).device == device
    with pytest.raises(ValueError, match=r"device='mi100' is unknown: .*h100, .*mi355x"):
        plan(1, 1, 1, device="mi100")


def test_a_partition_of_a_gpu_has_its_share():
    """What the driver says of a partition, one die: 38 units."""
    part = gpu_properties("AMD Instinct MI300X VF", "gfx942", 38, 2.1e9, 5.3e12 / 8, 65536)
    assert (part.xcds, part.shader_engines) == (1, 4)
    assert part.sustained == MI300X.sustained
    assert part.cache_bandwidth == MI300X.cache_bandwidth / 8
    assert plan(8192, 8192, 8192, dtype="bfloat16", device=part).schedule.queues == 1


def test_a_gpu_that_nobody_published_has_a_plan():
    other = gpu_properties("a GPU", "gfx90a", 104, 1.7e9, 1.6e12, 65536)
    assert not cdna.knows(other)
    assert plan(4096, 4096, 4096, dtype="float16", device=other).workers == 104
    waits = plan(4096, 4096, 4096, dtype="float16", device=other, arrival=Arrival.uniform(1024, 4))
    assert waits.workers == 104 - 13, "an eighth, where its shader engines are not known"
