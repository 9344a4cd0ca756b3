"""What the launches in strips are given: scratch, grids, options; and who launches them. No GPU."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import strips_machine
from test_hopper_attention_text import given

import tilestream as ts
from tilestream.core.gpu_specs import named
from tilestream.launch import compiling
from tilestream.launch.hopper import attention_strips as launching
from tilestream.launch.hopper.attention_strips import StripLaunch
from tilestream.launch.trace import untraced
from tilestream.ops.attention_gpu import launch_of, layout_of
from tilestream.plan.policy import hopper_strips
from tilestream.runtime.device_workspace import Words
from tilestream_tools.warm.ahead import ahead

KERNELS = ["score_blocks", "weigh_blocks", "chain_strips"]


class Recorded:
    """A `Kernel` that keeps what it is launched with, by name."""

    def __init__(self, function: Any, grid: tuple[int, int, int], options: dict[str, Any]) -> None:
        self.function, self.grid, self.options = function, grid, options
        self.launches: list[dict[str, Any]] = []
        self.compiled = 0

    def compile(self, filled: Any) -> None:
        self.compiled += 1

    def take(self, values: Any) -> Any:
        return values

    def __call__(self, stream: int, filled: Any) -> None:
        self.launches.append(dict(zip(self.function.arg_names, filled, strict=True)))


@pytest.fixture
def launched(monkeypatch):
    """``(plan, kernels, operands, partials)`` after two calls of a batch of 3."""
    monkeypatch.setattr(launching, "Kernel", Recorded)
    monkeypatch.setattr(launching, "side_by_side", lambda *steps: [step() for step in steps])
    case = given(2, 300, 3, heads=(8, 2), dims=(64, 64), causal=True)
    plan = strips_machine.plan_of(case.problem)
    launch = launch_of(plan, layout_of(case.operands))
    assert isinstance(launch, StripLaunch)
    partials = torch.empty(launch.needs[3] + 999)
    for _ in range(2):
        launch.issue(0, case.operands, Words(None, None, partials, 0, 0, None), None, None)
    return plan, [kernel for kernel, _ in launch._kernels], case.operands, partials


def test_three_launches_have_a_program_for_each_block_or_strip(launched):
    _, kernels, _, _ = launched
    assert [one.function.fn.__name__ for one in kernels] == KERNELS
    assert [one.grid for one in kernels] == [(3, 6, 1), (3, 6, 1), (4, 6, 1)]
    assert [one.compiled for one in kernels] == [1, 1, 1]
    assert all(len(one.launches) == 2 and one.options["launch_pdl"] for one in kernels)
    assert [one.options["num_warps"] for one in kernels] == [4, 4, 4]
    assert kernels[2].launches[-1]["STAGES"] == 8


def test_they_share_scratch_that_does_not_overlap(launched):
    plan, kernels, x, partials = launched
    found: dict[str, torch.Tensor] = {}
    for kernel in kernels:
        for name, value in kernel.launches[-1].items():
            if isinstance(value, torch.Tensor):
                assert found.setdefault(name, value).data_ptr() == value.data_ptr()
    names = ("partials", "maxima", "weights", "rescales", "sums", "tops")
    parts = sorted((found[name] for name in names), key=torch.Tensor.data_ptr)
    assert found["partials"].data_ptr() == partials.data_ptr()
    assert found["weights"].dtype == x.q.dtype
    assert all((one.data_ptr() - partials.data_ptr()) % 128 == 0 for one in parts)
    assert all(a.data_ptr() + a.nbytes <= b.data_ptr() for a, b in pairwise(parts))
    rows, blocks = 3 * 2 * 8, 3
    for name, count in zip(names, (128 * blocks, blocks, 128 * blocks, blocks, blocks, 1), strict=True):
        assert found[name].numel() >= rows * count
    assert sum(one.nbytes for one in parts) == 4 * sum(hopper_strips.scratch_of(plan))
    assert all(found[name] is getattr(x, name) for name in ("q", "k", "v", "out", "lse"))


@pytest.mark.parametrize(
    ("block", "width", "stages"), [(64, 64, 8), (128, 64, 6), (128, 16, 8), (256, 64, 3), (256, 16, 5)]
)
def test_a_strip_has_as_many_stages_as_fit_the_shared_memory(block, width, stages):
    """Of weights of 64 rows and of values, 16 bits each, and of two floats a row; 8 at most."""
    stage = 2 * 64 * block + 2 * width * block + 2 * 4 * 64
    assert stages * stage <= 227 * 1024
    assert stages == 8 or (stages + 1) * stage > 227 * 1024
    assert hopper_strips.stages_of(block, width) == stages


def test_a_scratch_that_is_too_large_is_not_planned(monkeypatch):
    case = given(1, 300, heads=(4, 2))
    whole = sum(hopper_strips.scratch_of(strips_machine.plan_of(case.problem)))
    monkeypatch.setattr(hopper_strips.policy, "SCRATCH_BYTES", 4 * whole - 1)
    with pytest.raises(ValueError, match="not enough values"):
        strips_machine.plan_of(case.problem)


def test_a_trace_says_why_it_has_nothing(launched, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert "taken in strips has no work items" in untraced(launched[0])


@pytest.mark.slow
@pytest.mark.skipif(not compiling._STANDS_IN, reason="this Triton compiles for the GPU that is here alone")
def test_a_call_compiles_its_three_kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    q, k, v = (
        torch.empty(1, rows, heads, 128, dtype=torch.bfloat16, device="meta")
        for rows, heads in ((1, 32), (8192, 8), (8192, 8))
    )
    with ahead(named("h100")), torch.no_grad(), ts.invariant():
        ts.attention(q, k, v, causal=True)
    assert sorted(path.stem for path in tmp_path.glob("*/*.cubin")) == sorted(KERNELS)
