"""The portable kernel in Triton's interpreter: operands of 8 bits, and scales of operands of any dtype."""

from __future__ import annotations

import dataclasses
import itertools

import interpreted
import pytest
import torch
import triton
import triton.language as tl
from interpreted import KINDS, check_product, laid_out, nan_like, plan_for, run

from error_rule import FNUZ, FP8, NARROW, Maths, check, rand
from tilestream.core.operands import Epilogue
from tilestream.kernels.portable.convert import to_float16
from tilestream.plan.policy import portable

PAIRS = list(itertools.product(FP8, FP8))
F32 = torch.float32


@pytest.fixture(autouse=True)
def _deeper_tiles(monkeypatch, _small_tiles):
    # An 8-bit dot takes 32 of K at least, as the hardware does.
    tiles = {
        kind: tuple(row._replace(block_k=32) for row in rows) if kind.startswith("8-bit") else rows
        for kind, rows in portable.TILES.items()
    }
    monkeypatch.setattr(portable, "TILES", tiles)


def scales(kind: str, m: int, n: int, batch: tuple[int, ...] = ()) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """What a test scales by: positive, of different magnitudes."""
    if kind == "none":
        return None, None
    if kind == "tensor":
        return torch.tensor([[0.75]]), torch.tensor(3.0)
    return rand(*batch, m, 1).exp(), rand(*batch, 1, n).exp()


def multiply(a, b, scale_a=None, scale_b=None, kind="dynamic", out_dtype=F32, fast_accum=True, **how) -> None:
    epilogue = Epilogue(scale_a=scale_a, scale_b=scale_b, **how)
    plan = plan_for(a, b, kind, out=str(out_dtype)[6:], scales=epilogue.scales, fast_accum=fast_accum)
    check_product(plan, a, b, epilogue)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt", "ss"])
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_layouts(dtypes, layout):
    a, b = laid_out(37, 70, layout[0], dtypes[0]), laid_out(70, 50, layout[1], dtypes[1])
    multiply(a, b)


@pytest.mark.parametrize("fast_accum", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scaled", ["none", "tensor", "row"])
def test_scales_and_schedules(scaled, kind, fast_accum):
    a, b = rand(37, 100, dtype=FP8[0]), rand(100, 50, dtype=FP8[1])
    multiply(a, b, *scales(scaled, 37, 50), kind=kind, fast_accum=fast_accum)


def test_sums_that_the_kernel_adds_to_its_accumulator(monkeypatch):
    """As on Ada, where Triton does not empty the matrix units' sums: four K steps, of which the last is ragged."""
    monkeypatch.setattr(interpreted, "DEVICE", dataclasses.replace(interpreted.DEVICE, arch="sm_89"))
    a, b = rand(37, 100, dtype=FP8[0]), rand(100, 50, dtype=FP8[1])
    multiply(a, b, *scales("row", 37, 50), kind="stream_k", fast_accum=False)


@pytest.mark.parametrize("out_dtype", [torch.float16, F32], ids=str)
@pytest.mark.parametrize("scaled", ["tensor", "row"])
def test_the_whole_epilogue(scaled, out_dtype):
    a, b = rand(20, 40, dtype=FP8[0]), rand(40, 33, dtype=FP8[0])
    bias, residual = rand(33, dtype=torch.float16), rand(20, 33)
    for kind in ("dynamic", "stream_k"):
        multiply(
            a, b, *scales(scaled, 20, 33), kind=kind, out_dtype=out_dtype,
            alpha=1.5, bias=bias, residual=residual, beta=-0.5, activation="silu",
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, F32], ids=str)
@pytest.mark.parametrize("scaled", ["tensor", "row"])
def test_operands_of_any_dtype_are_scaled(scaled, dtype):
    multiply(rand(20, 40, dtype=dtype), rand(40, 33, dtype=dtype), *scales(scaled, 20, 33), kind="stream_k")


def test_one_scale_and_none_and_views_of_scales():
    a, b = rand(20, 40, dtype=FP8[0]), rand(40, 33, dtype=FP8[0])
    row, column = scales("row", 20, 33)
    for scale_a, scale_b in (
        (row, None), (None, column), (row, torch.tensor(2.0)), (torch.tensor([3.0]), column), (None, torch.tensor(5.0)),
        (row.expand(20, 7)[:, 3:4], torch.cat([column, column])[1:]), (row[:1].expand(20, 1), column),
        (torch.stack([row, -row], 1)[:, 1], column.t().contiguous().t()),
    ):  # fmt: skip
        multiply(a, b, scale_a, scale_b)


@pytest.mark.parametrize("shared", ["", "a", "b"])
def test_batches(shared):
    a, b = rand(3, 20, 40, dtype=FP8[0]), rand(3, 40, 18, dtype=FP8[1])
    a, b = (x[:1].expand(3, -1, -1) if name in shared else x for name, x in (("a", a), ("b", b)))
    scale_a, scale_b = scales("row", 20, 18, (3,))
    multiply(a, b, scale_a, scale_b)
    multiply(a, b, scale_a[:1].expand(3, -1, -1), scale_b, kind="stream_k")


def test_every_small_size():
    for m, n, k in itertools.product((1, 16, 17), (1, 16, 33), (0, 1, 32, 33)):
        multiply(rand(m, k, dtype=FP8[0]), rand(k, n, dtype=FP8[0]), *scales("row", m, n))


def test_a_product_of_scales_does_not_overflow_on_the_way():
    a, b = rand(20, 40, dtype=FP8[0]), rand(40, 33, dtype=FP8[0])
    multiply(a, b, torch.full((20, 1), 1e38), torch.full((1, 33), 1e-38))


# Those that the matrix units do not take ------------------------------------------------------------------------------


@triton.jit
def _convert(bits, halves, KIND: tl.constexpr):
    i = tl.arange(0, 256)
    tl.store(halves + i, to_float16(tl.load(bits + i), KIND))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_each_of_the_256_values_is_a_float16(dtype):
    bits, halves = torch.arange(256, dtype=torch.uint8), torch.zeros(256, dtype=torch.float16)
    _convert[(1,)](bits, halves, str(dtype).removeprefix("torch."))
    right = bits.view(dtype).float()
    torch.testing.assert_close(halves.float(), right, rtol=0, atol=0, equal_nan=True)
    there = ~right.isnan()
    assert torch.equal(torch.signbit(halves)[there], torch.signbit(right)[there]), "of zero, too"


@pytest.mark.parametrize(
    ("arch", "dtypes"),
    [*itertools.product(("gfx942",), PAIRS), *itertools.product(("gfx950",), itertools.product(FNUZ, FNUZ))],
    ids=str,
)
def test_what_is_converted_is_multiplied_exactly(arch, dtypes, monkeypatch):
    small = (portable.Tile(16, 16, 32, 4, 2, 0.5),)
    monkeypatch.setattr(portable, "CDNA", {arch: {"8-bit, converted": small}})
    monkeypatch.setattr(interpreted, "DEVICE", dataclasses.replace(interpreted.DEVICE, arch=arch))
    for kind in KINDS:
        a, b = rand(37, 70, dtype=dtypes[0]), rand(70, 50, dtype=dtypes[1])
        row, column = scales("row", 37, 50)
        plan = plan_for(a, b, kind, out="float32", scales="row")
        out = nan_like(a, b, F32)
        # The interpreter does not know the fnuz kinds: the kernel is given the bits.
        run(plan, a.view(torch.uint8), b.view(torch.uint8), out, Epilogue(scale_a=row, scale_b=column))
        check(out, Maths(a, b, out_dtype=F32, scale_a=row, scale_b=column))
