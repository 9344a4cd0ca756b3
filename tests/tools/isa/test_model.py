"""The model of a compute unit, held to what AMD measured with thread traces."""

from __future__ import annotations

import pytest
from loops import gemm, text

from tilestream.core.gpu_specs import PER_CYCLE
from tilestream_tools.isa.amdgcn import Mfma, parse
from tilestream_tools.isa.model import estimate, occupancy
from tilestream_tools.isa.rates import RATES, passes

#: AMD, gfx950-gluon-tutorials, docs/tcp_bound_tile_model.md, section 3: in float16 with K steps of 64, share of the
#: main loop's cycles that the matrix units are busy, measured. 256 x 64 and 64 x 256: 0.55 and 0.57.
MEASURED = {
    (256, 256): 0.96, (256, 128): 0.83, (128, 256): 0.84, (128, 128): 0.69, (256, 64): 0.55, (64, 256): 0.57,
    (128, 64): 0.47, (64, 128): 0.47,
}  # fmt: skip
MFMA = "v_mfma_f32_16x16x32_f16 a[{0}:{1}], v[240:243], v[244:247], a[{0}:{1}]"


def run(body: list[str], warps: int = 4, **more):
    return estimate(parse(text(body, **more)), warps)


@pytest.mark.parametrize(("tile", "busy"), MEASURED.items())
def test_loops_that_were_measured(tile, busy):
    assert run(gemm(*tile, stages=5)).busy == pytest.approx(busy, abs=0.06)


def test_a_ring_that_is_too_shallow_waits_for_memory():
    """The same page, section 6: of 128 x 128, two buffers cover 512 of 1000 cycles."""
    shallow, deep = run(gemm(128, 128, stages=2)), run(gemm(128, 128, stages=5))
    assert shallow.floors == deep.floors
    assert shallow.cycles > 1000
    assert deep.cycles < 800


def products(count: int, apart: int = 16) -> list[str]:
    return [MFMA.format(4 * (i % apart), 4 * (i % apart) + 3) for i in range(count)]


def test_products_that_depend_on_each_other_wait():
    independent, chained = run(products(64)), run(products(64, apart=1))
    assert independent.busy > 0.97
    assert chained.busy > 0.95, "as an addend, a result is there when the next needs it"
    chain = [line for i in range(8) for line in (MFMA.format(0, 3), f"v_add_f32_e32 v{i}, a0, a1")]
    assert run(chain).cycles >= 8 * (16 + 12), "an instruction of another kind waits for it"


def test_what_is_written_to_lds_holds_a_wave_up():
    """kernels/gemm/gfx942/intra_wave/README.md: a ds_write_b128 takes 20 cycles of its wave, 16 for its data."""
    mfma = "v_mfma_f32_16x16x16_f16 a[{0}:{1}], v[240:241], v[242:243], a[{0}:{1}]"
    body = [line for i in range(16) for line in (mfma.format(4 * i, 4 * i + 3), "ds_write_b128 v9, v[0:3]")]
    assert 16 * 20 <= run(body, warps=1, arch="gfx942").cycles <= 16 * 28
    assert run(body, arch="gfx942").floors.lds == 16 * 4 * 1024 / 128, "of four waves"


def test_two_waves_of_a_simd_fill_each_others_gaps():
    body = ["s_waitcnt lgkmcnt(0)", *products(8), "ds_read_b128 v[240:243], v250"]
    one, two = run(body, 4), run(body, 8)
    assert two.floors.mfma == 2 * one.floors.mfma
    assert two.busy > 1.3 * one.busy


def test_floors_name_what_binds():
    lds = run([*products(1), *["ds_read_b128 v[0:3], v9"] * 32])
    assert lds.floors.binds == "LDS"
    assert lds.floors.lds == 32 * 4 * 1024 / 256
    assert lds.cycles >= lds.floors.cycles
    assert run([*products(1), *["v_mov_b32_e32 v1, v2"] * 64]).floors.binds == "issue"
    loads = run([*products(1), *["buffer_load_dwordx4 v9, s[0:3], 0 offen lds"] * 64])
    assert loads.floors.binds == "L2"
    kernel = parse(text(products(64)))
    bound = estimate(kernel, 4, bytes_an_operation=1.0, bandwidth=10.0)
    assert bound.floors.binds == "memory"
    assert bound.floors.memory == bound.operations / 10
    assert run(products(64)).floors.binds == "MFMA"


def test_a_barrier_waits_for_the_slowest():
    """One wave of four has nothing else to do; with barriers all go at one pace."""
    assert run(["s_barrier", *products(4), "s_barrier"]).cycles >= 4 * 16


@pytest.mark.parametrize("arch", RATES)
def test_passes_and_peaks_agree(arch):
    """Four units of ``operations / (4 passes)`` each reach the data sheet's peak."""
    shapes = {
        "gfx942": [(32, 32, 8, "bf16"), (16, 16, 16, "f16"), (32, 32, 16, "fp8_fp8"), (16, 16, 32, "fp8_bf8"),
                   (32, 32, 2, "f32"), (16, 16, 4, "f32"), (16, 16, 8, "xf32"), (16, 16, 4, "f64")],
        "gfx950": [(32, 32, 16, "bf16"), (16, 16, 32, "f16"), (16, 16, 128, "f8f6f4"), (32, 32, 64, "f8f6f4"),
                   (32, 32, 2, "f32"), (16, 16, 4, "f64")],
    }[arch]  # fmt: skip
    for m, n, k, types in shapes:
        mfma = Mfma(m, n, k, 1, types)
        assert 4 * mfma.operations / (4 * passes(mfma, arch)) == RATES[arch].peak(types), mfma
    assert RATES[arch].operations == PER_CYCLE[arch]


def test_narrow_operands_take_half_the_passes():
    assert passes(Mfma(16, 16, 128, 1, "f8f6f4", narrow=True), "gfx950") * 2 == passes(
        Mfma(16, 16, 128, 1, "f8f6f4"), "gfx950"
    )


def test_unpublished_rates_are_refused():
    with pytest.raises(
        ValueError, match=r"matrix instruction 64x64x64_bf16 on gfx942: its passes are not in the table"
    ):
        passes(Mfma(64, 64, 64, 1, "bf16"), "gfx942")
    with pytest.raises(ValueError, match=r"arch='gfx90a': rates are known of gfx942, gfx950"):
        run(products(1), arch="gfx90a")
    assert run(["v_mov_b32_e32 v1, v2"]) is None, "no loop multiplies"


@pytest.mark.parametrize(
    ("arch", "vgprs", "warps", "lds", "waves", "workers"),
    [
        ("gfx942", 512, 4, 65536, 1, 1),  # AMD's intra_wave, kernels/gemm/gfx942/README.md
        ("gfx942", 224, 8, 65536, 2, 1),  # and its inter_wave
        ("gfx942", 128, 4, 16384, 4, 4),
        ("gfx942", 129, 4, 1024, 3, 3),  # 136 of 512
        ("gfx942", 64, 4, 0, 8, 8),
        ("gfx950", 256, 8, 98304, 2, 1),
        ("gfx950", 128, 4, 40960, 4, 4),
        ("gfx950", 24, 1, 0, 8, 32),
        ("gfx942", 256, 8, 98304, 0, 0),  # more than there is
    ],
)  # fmt: skip
def test_occupancy(arch, vgprs, warps, lds, waves, workers):
    found = occupancy(parse(text(products(1), arch=arch, vgprs=vgprs)), warps, lds)
    assert (found.waves, found.workers) == (waves, workers)
    assert found.waves <= min(found.by_registers, found.by_lds, found.by_sgprs)
