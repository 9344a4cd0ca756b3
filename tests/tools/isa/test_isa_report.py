"""Reports of kernels that are really compiled, each in a process of its own; no GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from loops import gemm, text

pytest.importorskip("triton", exc_type=ImportError)

from tilestream.core.errors import TilestreamError
from tilestream.core.gpu_specs import named
from tilestream.plan.policy import portable
from tilestream_tools.isa import kernels, report
from tilestream_tools.isa.kernels import KERNELS, CompileRequest
from tilestream_tools.isa.report import of, of_amdgcn


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


def test_text_is_read_without_torch_and_triton():
    code = """
import sys
sys.modules.update(torch=None, triton=None)
from tilestream_tools.isa import report, sass
from tilestream_tools.isa.kernels import KERNELS, CompileRequest
print(report.of_amdgcn(sys.stdin.read()).cycles["binds"], CompileRequest("gfx942").problem.m, len(KERNELS))
"""
    run = subprocess.run(
        [sys.executable, "-c", code], input=text(gemm(128, 128)), capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["MFMA", "8192", str(len(KERNELS))]


@pytest.mark.parametrize(
    ("arch", "matrix", "limit"), [("gfx942", "32x32x8_bf16", 65536), ("gfx950", "32x32x16_bf16", 163840)]
)
def test_a_kernel_for_amd(arch, matrix, limit):
    found = of("portable-gemm", CompileRequest(arch, tile=(128, 128)), timeout=850)
    assert (found.kernel, found.arch, found.tile, found.warps) == ("portable-gemm", arch, (128, 128, 64), 8)
    assert not any(found.spilled.values())
    assert 0 < found.shared <= limit
    assert found.occupancy["workers"] >= 1
    assert found.registers["vgpr"] <= 512 // found.occupancy["waves"]
    # 128 x 128 x 64 multiply-adds of a worker's eight waves.
    shape = [int(x) for x in matrix.partition("_")[0].split("x")]
    assert found.loop["mfma"] == {matrix: 128 * 128 * 64 // (8 * shape[0] * shape[1] * shape[2])}
    # What goes through registers is loaded, and written: 32 KiB of a step, 16 bytes a lane.
    loads = found.loop["counts"].get("load 128", 0) + found.loop["counts"].get("load_to_lds 128", 0)
    assert loads == 2 * 128 * 64 * 2 // (8 * 64 * 16)
    assert found.loop["counts"]["barrier"] >= 1
    assert found.cycles["floor"]["mfma"] == 2 * 128 * 128 * 64 / {"gfx942": 2048, "gfx950": 4096}[arch]
    assert found.cycles["floor"]["mfma"] <= found.cycles["estimate"]
    assert 0 < found.cycles["share"] <= found.cycles["busy"] <= 1
    assert json.loads(found.to_json())["tile"] == [128, 128, 64]


def test_a_kernel_for_nvidia():
    found = of("hopper-gemm", CompileRequest("sm_90a", tile=(128, 256)), timeout=850)
    assert not any(found.spilled.values())
    # Four of each math loop; or eight, where the plan has the same tile the other way round.
    assert found.loop["mfma"] in ({"m64n256k16": 8}, {"m64n128k16": 16})
    # A step of 128 x 256 x 64, by two math loops.
    assert found.cycles["floor"]["wgmma"] == 2 * 128 * 256 * 64 / 4096
    assert found.shared <= 232448


def test_groups_of_rows_for_hopper():
    found = of("hopper-grouped", CompileRequest("sm_90a", tile=(128, 256)), timeout=850)
    assert (found.kernel, found.arch, found.tile) == ("hopper-grouped", "sm_90a", (128, 256, 64))
    assert not any(found.spilled.values())
    assert found.loop["mfma"] in ({"m64n256k16": 8}, {"m64n128k16": 16})
    assert found.cycles["floor"]["wgmma"] == 2 * 128 * 256 * 64 / 4096
    assert found.shared <= 232448


@pytest.mark.parametrize(
    ("arch", "unit", "shapes", "rate"),
    [
        ("sm_100", "tcgen05", {"m128n128k16": 4}, 8192),
        # 128 x 128 x 64 by eight warps; of a GeForce.
        ("sm_120", "mma", {"m16n8k16": 128 * 128 * 64 // (8 * 16 * 8 * 16)}, 512),
    ],
)
def test_a_kernel_for_nvidia_that_is_not_hopper(arch, unit, shapes, rate):
    found = of("portable-gemm", CompileRequest(arch, tile=(128, 128)), timeout=850)
    assert (found.arch, found.tile, found.warps) == (arch, (128, 128, 64), 8)
    assert not any(found.spilled.values())
    assert found.loop["mfma"] == shapes
    assert found.cycles["floor"] == {unit: pytest.approx(2 * 128 * 128 * 64 / rate)}
    assert 32768 < found.shared <= {"sm_100": 227, "sm_120": 99}[arch] * 1024


def test_memory_that_is_further_away_takes_longer():
    written = text(gemm(128, 128, stages=2))
    near, far = (of_amdgcn(written, memory_cycles=cycles) for cycles in (300, 2000))
    assert near.cycles["estimate"] < far.cycles["estimate"]
    assert near.cycles["floor"] == far.cycles["floor"]
    assert (near.warps, near.shared, near.plan) == (4, 131072, "")


@pytest.mark.parametrize(
    ("name", "how", "error", "message"),
    [
        (
            "gemm",
            {"arch": "gfx942"},
            ValueError,
            "KERNEL 'gemm'; there are portable-gemm, portable-grouped, cdna-gemm, cdna-attention",
        ),
        ("hopper-gemm", {"arch": "gfx942"}, ValueError, "arch='gfx942'; hopper-gemm compiles for sm_90a"),
        ("hopper-grouped", {"arch": "gfx942"}, ValueError, "hopper-grouped compiles for sm_90a"),
        (
            "hopper-grouped",
            {"arch": "sm_90a", "layout": "nn"},
            ValueError,
            "layout='nn'; groups of rows lie",
        ),
        ("hopper-grouped", {"arch": "sm_90a", "k": 8191}, NotImplementedError, "hopper"),
        ("portable-gemm", {"arch": "gfx90a"}, ValueError, "arch='gfx90a'; portable-gemm compiles for sm_90a, gfx942"),
        (
            "portable-gemm",
            {"arch": "gfx942", "layout": "xy"},
            ValueError,
            "layout='xy'; it must be one of nn, nt, tn, tt",
        ),
        (
            "portable-gemm",
            {"arch": "sm_90a", "dtype": "float8_e4m3fnuz"},
            NotImplementedError,
            "to which the same bits",
        ),
        ("portable-gemm", {"arch": "gfx942", "dtype": "int4"}, TypeError, "dtype: int4; tilestream multiplies"),
        (
            "portable-gemm",
            {"arch": "gfx942", "tile": (48, 48)},
            ValueError,
            r"tile=\(48, 48\): the portable kernel has 1",
        ),
    ],
)
def test_what_cannot_be_compiled_says_why(name, how, error, message):
    with pytest.raises(error, match=message):
        kernels.source(name, CompileRequest(**how))


@pytest.mark.parametrize(("name", "shape"), [("hopper-attention", "m64n128k16"), ("portable-attention", "m64n64k16")])
def test_attention_of_whole_sequences_is_compiled(name, shape):
    made = report.of(name, CompileRequest("sm_90a", 1024, 1024, 128))
    assert (made.arch, made.tile[0], made.spilled["bytes"]) == ("sm_90a", 128, 0)
    assert shape in made.loop["mfma"]
    assert "query rows" in made.plan


def test_errors_come_back_from_the_other_process():
    with pytest.raises(NotImplementedError, match="to which the same bits are other numbers"):
        of("portable-gemm", CompileRequest("sm_90a", dtype="float8_e4m3fnuz"), timeout=850)


def test_a_compilation_that_takes_too_long_is_ended():
    with pytest.raises(TilestreamError, match=r"portable-gemm for gfx942 did not compile within 0\.01 s"):
        of("portable-gemm", CompileRequest("gfx942"), timeout=0.01)


def test_a_kernel_joins_by_name(monkeypatch):
    monkeypatch.setattr(kernels, "KERNELS", dict(KERNELS))
    kernels.register("mine", ("gfx942",), f"{__name__}:_asked", "a test's")
    assert kernels.source("mine", CompileRequest("gfx942")) == ("made for", CompileRequest("gfx942"))
    assert "mine" not in KERNELS


def _asked(question):
    return "made for", question


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_the_plans_efficiencies_are_the_estimates(arch):
    """Each row of `tilestream.plan.policy.portable.CDNA`, by the Triton that is here: within a fifth, or two points."""
    wrong = {}
    own, other = ("float8_e4m3fnuz", "float8_e4m3fn")[:: 1 if arch == "gfx942" else -1]
    for kind, rows in portable.CDNA[arch].items():
        converted = "converted" in kind
        dtype = {"1": "bfloat16", "8": other if converted else own, "f": "float32"}[kind[0]]
        extent = 8193 if "unaligned" in kind else 8192
        for row in rows:
            found = of("portable-gemm", CompileRequest(arch, extent, extent, extent, dtype, tile=row[:2]), timeout=850)
            assert found.stages == row.stages
            assert not any(found.spilled.values())
            assert found.shared <= named(kernels.DEVICES[arch]).shared
            # What is converted is multiplied as float16, at half of the rate that the plan counts by.
            share = found.cycles["share"] / (2 if converted else 1)
            if share != pytest.approx(row.efficiency, rel=0.2, abs=0.02):
                wrong[kind, row[:2]] = (row.efficiency, share)
    assert not wrong


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_kernel_compiles_for_every_arch():
    for name, entry in KERNELS.items():
        for arch in entry.archs:
            assert not any(of(name, CompileRequest(arch, k=entry.k), timeout=850).spilled.values()), (name, arch)
    assert report.TIMEOUT > 200
