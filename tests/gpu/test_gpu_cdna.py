"""The CDNA kernel on an MI300X or an MI355X: numbers by the error rule. Not run yet; skipped without an AMD GPU.

The tests force backend "cdna": by itself a plan takes the portable kernel.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from gpu_cases import BF16, FULL, LAYOUTS, Case
from gpu_runs import Run, randn

import tilestream as ts
from error_rule import FNUZ, FP8, Maths, check, units_of
from tilestream.plan.policy.cdna_tiles import TILES, refusal
from tilestream.runtime.properties import cuda_properties

pytestmark = pytest.mark.skipif(torch.version.hip is None, reason="needs an AMD GPU")


@pytest.fixture(autouse=True)
def arch():
    arch = cuda_properties().arch
    if arch not in TILES:
        pytest.skip(f"no CDNA kernel for {arch}")
    return arch


def run_of(m: int, n: int, k: int, **how: Any) -> Run:
    run = Run(Case(m, n, k, **{"layout": "nt", "backend": "cdna", **how}))
    assert run.plan.backend == run.case.backend
    return run


def check_run(*extents: int, **how: Any) -> None:
    run = run_of(*extents, **how)
    run.check(run(run.case.output("cuda")[0]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("at", range(11))
def test_every_tile_in_every_layout(at, layout, arch):
    if at >= len(TILES[arch]):
        pytest.skip("no such tile")
    tile = TILES[arch][at]
    # Ragged rows and columns, and a rest of K.
    check_run(
        tile.block_m * 2 + 48, tile.block_n * 2 + 16, 4 * tile.block_k(2) + 16, layout=layout,
        tile=(tile.block_m, tile.block_n), variant=tile.copies,
    )  # fmt: skip


@pytest.mark.parametrize("steps", range(1, 9))
def test_any_number_of_steps(steps):
    for rest in (0, 16):
        check_run(256, 256, 128 * steps + rest, tile=(128, 128))


@pytest.mark.parametrize(
    ("schedule", "queues"), [("static", None), ("dynamic", None), ("dynamic", 8), ("stream_k", None)]
)
def test_schedules(schedule, queues):
    check_run(1040, 2064, 1040, schedule=schedule, queues=queues, tile=(128, 128), activation="gelu", **FULL)


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_epilogue_and_batches(dtype):
    check_run(528, 400, 272, dtype=dtype, batch=3, activation="gelu", **FULL)


@pytest.mark.parametrize(("a", "b"), [*itertools.product(FP8, repeat=2), *itertools.product(FNUZ, repeat=2)])
def test_8_bits(a, b):
    m, n, k = 528, 400, 1040
    x, w = randn(m, k, dtype=a), randn(n, k, dtype=b).t()
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
    a, b = wide[:, :256].copy_(torch.randn(200, 256)), randn(400, 256).t()
    check(run_of(200, 400, 256).plan.run(a, b), Maths(a, b))


def test_the_same_bits_each_time():
    run = run_of(1040, 2064, 1040, schedule="stream_k")
    first = run()
    for _ in range(20):
        assert torch.equal(run(), first)


def test_speed_is_recorded(record_property):
    """Recorded, not asserted: the kernel has not run yet, and no speed is promised."""
    m = n = k = 8192
    for name in ("cdna", "portable"):
        run = run_of(m, n, k, backend=name)
        assert not refusal(run.plan.problem, run.plan.device)
        record_property(name, _tflops(run, m, n, k))
    record_property("torch", _tflops(lambda: run.operands["a"] @ run.operands["b"], m, n, k))


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
