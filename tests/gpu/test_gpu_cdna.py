"""The CDNA kernel on an MI300X or an MI355X: numbers by the error rule. Not run yet; skipped without an AMD GPU.

The tests force backend "cdna": by itself a plan takes the portable kernel.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from gpu_cases import BF16, LAYOUTS
from gpu_runs import nan, randn

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
    made = randn(*((batch, *shape) if batch else shape), dtype=dtype)
    return made if letter == "n" else made.mT


def planned(m, n, k, *, layout="nt", dtype=BF16, batch=0, backend="cdna", **forced) -> ts.Plan:
    plan = ts.plan(m, n, k, batch=batch or 1, dtype=dtype, device="cuda", layout=layout, backend=backend, **forced)
    assert plan.backend == backend
    return plan


def run(m, n, k, *, layout="nt", dtype=BF16, batch=0, epilogue=False, **forced) -> None:
    a, b = operand(m, k, layout[0], dtype, batch), operand(k, n, layout[1], dtype, batch)
    shape, more = (batch, m, n) if batch else (m, n), {}
    if epilogue:
        more = {"bias": randn(n, dtype=dtype), "residual": randn(*shape, dtype=dtype)}
        more |= {"alpha": 0.5, "beta": 2.0, "activation": "gelu"}
    plan, out = planned(m, n, k, layout=layout, dtype=dtype, batch=batch, **forced), nan(*shape, dtype=dtype)
    check(plan.run(a, b, out=out, **more), Maths(a, b, **more))


@pytest.mark.parametrize("layout", LAYOUTS)
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


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
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
    wide = torch.empty(200, 2**24, dtype=BF16, device="cuda")
    a, b = wide[:, :256].copy_(torch.randn(200, 256)), operand(256, 400, "t", BF16)
    check(planned(200, 400, 256).run(a, b), Maths(a, b))


def test_the_same_bits_each_time():
    a, b = operand(1040, 1040, "n", BF16), operand(1040, 2064, "t", BF16)
    plan = planned(1040, 2064, 1040, schedule="stream_k")
    first = plan.run(a, b)
    for _ in range(20):
        assert torch.equal(plan.run(a, b), first)


def test_speed_is_recorded(record_property):
    """Recorded, not asserted: the kernel has not run yet, and no speed is promised."""
    m = n = k = 8192
    a, b = operand(m, k, "n", BF16), operand(k, n, "t", BF16)
    for name in ("cdna", "portable"):
        plan = planned(m, n, k, backend=name)
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
