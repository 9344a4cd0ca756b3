"""The CDNA kernel on an MI300X or an MI355X: numbers by the error rule. Nobody has run these yet.

Without an AMD GPU they are skipped. They ask for the kernel by name: where nobody does, the portable one runs.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import tilestream as ts
from error_rule import FNUZ, FP8, Maths, check, units_of
from tilestream.plan.policy.cdna_tiles import TILES, refusal

pytestmark = pytest.mark.skipif(torch.version.hip is None, reason="needs an AMD GPU")


def arch() -> str:
    from tilestream.runtime.properties import cuda_properties

    return cuda_properties().arch


@pytest.fixture(autouse=True)
def known():
    if arch() not in TILES:
        pytest.skip(f"no CDNA kernel for {arch()}")


def operand(rows: int, columns: int, letter: str, dtype: torch.dtype, batch: int = 0) -> torch.Tensor:
    shape = (rows, columns) if letter == "n" else (columns, rows)
    made = torch.randn((batch, *shape) if batch else shape, device="cuda").to(dtype)
    return made if letter == "n" else made.mT


def run(m, n, k, *, layout="nt", dtype=torch.bfloat16, batch=0, epilogue=False, **forced) -> None:
    a, b = operand(m, k, layout[0], dtype, batch), operand(k, n, layout[1], dtype, batch)
    more = {}
    if epilogue:
        shape = (batch, m, n) if batch else (m, n)
        more = {
            "bias": torch.randn(n, device="cuda").to(dtype), "residual": torch.randn(shape, device="cuda").to(dtype),
            "alpha": 0.5, "beta": 2.0, "activation": "gelu",
        }  # fmt: skip
    plan = ts.plan(m, n, k, batch=batch or 1, dtype=dtype, device="cuda", layout=layout, backend="cdna", **forced)
    assert plan.backend == "cdna"
    out = torch.full((batch, m, n) if batch else (m, n), float("nan"), dtype=dtype, device="cuda")
    check(plan.run(a, b, out=out, **more), Maths(a, b, **more))


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("at", range(11))
def test_every_tile_in_every_layout(at, layout):
    rows = TILES[arch()]
    if at >= len(rows):
        pytest.skip("no such tile")
    tile = rows[at]
    # Ragged rows and columns, and a rest of K.
    run(
        tile.block_m * 2 + 48, tile.block_n * 2 + 16, 4 * tile.block_k(2) + 16, layout=layout,
        tile=(tile.block_m, tile.block_n), variant=tile.copies,
    )  # fmt: skip


@pytest.mark.parametrize("steps", range(1, 9))
def test_any_number_of_steps(steps):
    for rest in (0, 16):
        run(256, 256, 128 * steps + rest, tile=(128, 128))


@pytest.mark.parametrize(
    ("schedule", "queues"), [("static", None), ("dynamic", None), ("dynamic", 8), ("stream_k", None)]
)
def test_schedules(schedule, queues):
    run(1040, 2064, 1040, schedule=schedule, queues=queues, tile=(128, 128), epilogue=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_epilogue_and_batches(dtype):
    run(528, 400, 272, dtype=dtype, batch=3, epilogue=True)


@pytest.mark.parametrize(("a", "b"), [*itertools.product(FP8, repeat=2), *itertools.product(FNUZ, repeat=2)])
def test_8_bits(a, b):
    m, n, k = 528, 400, 1040
    x, w = operand(m, k, "n", a), operand(k, n, "t", b)
    scale = torch.full((), 0.5, device="cuda")
    forced = {"dtype": a, "b_dtype": b, "device": "cuda", "scales": "tensor", "backend": "cdna"}
    if a not in units_of(x.device):
        with pytest.raises(NotImplementedError, match="the same bits are other numbers"):
            ts.plan(m, n, k, **forced)
        forced |= {"backend": "portable"}  # which converts
    plan = ts.plan(m, n, k, **forced)
    check(plan.run(x, w, scale_a=scale, scale_b=scale), Maths(x, w, scale_a=scale, scale_b=scale))


def test_rows_that_lie_far_apart():
    # Rows of 2**24 elements: 256 of them are beyond a buffer's offsets.
    wide = torch.empty(200, 2**24, dtype=torch.bfloat16, device="cuda")
    a, b = wide[:, :256].copy_(torch.randn(200, 256)), operand(256, 400, "t", torch.bfloat16)
    plan = ts.plan(200, 400, 256, dtype=torch.bfloat16, device="cuda", layout="nt", backend="cdna")
    check(plan.run(a, b), Maths(a, b))


def test_the_same_bits_each_time():
    a, b = operand(1040, 1040, "n", torch.bfloat16), operand(1040, 2064, "t", torch.bfloat16)
    plan = ts.plan(
        1040, 2064, 1040, dtype=torch.bfloat16, device="cuda", layout="nt", backend="cdna", schedule="stream_k"
    )
    first = plan.run(a, b)
    for _ in range(20):
        assert torch.equal(plan.run(a, b), first)


def test_speed_is_recorded(record_property):
    """Recorded, not asserted: of a kernel that nobody has run no speed is promised."""
    m = n = k = 8192
    a, b = operand(m, k, "n", torch.bfloat16), operand(k, n, "t", torch.bfloat16)
    for name in ("cdna", "portable"):
        plan = ts.plan(m, n, k, dtype=torch.bfloat16, device="cuda", layout="nt", backend=name)
        assert not refusal(plan.problem, plan.device)
        record_property(name, _tflops(lambda plan=plan: plan.run(a, b), m, n, k))
    record_property("torch", _tflops(lambda: a @ b, m, n, k))


def _tflops(call, m: int, n: int, k: int) -> float:
    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(10):
        call()
    end.record()
    end.synchronize()
    return 10 * 2 * m * n * k / begin.elapsed_time(end) / 1e9
