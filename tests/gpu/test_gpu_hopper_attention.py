"""The Hopper attention on a GPU, beyond what `test_gpu_attention` asks of every backend: each tile of the plan, with
turns and without, each kind of schedule; repeated launches; two streams.
"""

from __future__ import annotations

import math

import pytest
import torch
from gpu_cases import BF16, E4M3
from gpu_runs import ON_HOPPER, nan, poison, poison_around

if not ON_HOPPER:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from attention_maths import Call, Case, call_of, replace
from tilestream.core.operands import AttentionOperands
from tilestream.launch.hopper.attention_launch import HopperAttentionLaunch
from tilestream.ops.attention_gpu import layout_of
from tilestream.ops.attention_operands import Settings, problem_of
from tilestream.plan.attention_plan import AttentionPlan, of_candidate
from tilestream.plan.policy import hopper_attention
from tilestream.runtime.properties import cuda_properties

CASES = {
    "dense": Case((700,), (700, 700), (6, 2), (128, 128), "causal", dtype=BF16),
    "columns of 64": Case((513,), (900, 900), (4, 4), (64, 64), "full", dtype=BF16),
    "columns of 256": Case((300,), (700, 700), (4, 2), (256, 256), "all", dtype=BF16),
    "packed": Case((300, 0, 1, 700), (400, 30, 500, 700), (6, 2), (64, 64), "causal window", "packed", dtype=BF16),
    "in pages": Case((300, 70, 1), (400, 30, 500), (8, 2), (128, 128), "causal", "packed paged", 16, dtype=BF16),
    "few rows": Case((3,), (4000, 4000), (32, 4), (128, 128), "causal", dtype=BF16),
    "8 bits": Case((700,), (700, 700), (6, 2), (128, 128), "causal", dtype=E4M3, signed=True),
    "8 bits, columns of 64": Case((513,), (900, 900), (4, 4), (64, 64), "full", dtype=E4M3),
    "8 bits, columns of 96": Case((300,), (700, 700), (4, 2), (96, 96), "all", dtype=E4M3, signed=True),
}
for _name in ("packed", "in pages"):
    CASES[f"8 bits, {_name}"] = replace(CASES[_name], dtype=E4M3)


def operands_of(call: Call) -> tuple[AttentionOperands, Settings]:
    """A call as the op hands it to its launch."""
    x, options = call.tensors, call.options
    causal = options.get("causal", False)
    left, right = (-1 if side is None else side for side in options.get("window", (None, None)))
    scale = options.get("scale") or 1 / math.sqrt(x["q"].shape[-1])
    names = ("cu_seqlens_q", "cu_seqlens_k", "block_table", "seqlens_k", "scale_q", "scale_k", "scale_v")
    given = {"sinks": options.get("sinks"), **{name: x.get(name) for name in names}}
    settings = Settings(
        bool(causal), "top_left" if causal == "top_left" else "bottom_right", left, right,
        options.get("softcap") or 0.0, scale, return_lse=True,
    )  # fmt: skip
    out = nan(*x["q"].shape[:-1], x["v"].shape[-1])
    rows = out.shape[:-1]
    lse = nan(*(rows if len(rows) == 2 else (rows[0], rows[2], rows[1])), dtype=torch.float32)
    return AttentionOperands(x["q"], x["k"], x["v"], out, scale, lse, **given), settings


def plans(operands: AttentionOperands, settings: Settings, kind: str, variant: str) -> list[AttentionPlan]:
    device = cuda_properties(torch.cuda.current_device())
    problem = problem_of(operands, settings)
    found = hopper_attention.candidates(problem, device, device.workers, kind=kind, variant=variant)
    return [of_candidate(problem, device, "hopper", one, "a test's", ()) for one in found]


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("variant", ["turns", "apart"])
@pytest.mark.parametrize("name", CASES)
def test_every_tile(name, variant, kind):
    call = call_of(CASES[name], "cuda")
    operands, settings = operands_of(call)
    made = plans(operands, settings, kind, variant)
    assert made
    for plan in made:
        launch = HopperAttentionLaunch(plan, layout_of(operands))
        for _ in range(3):  # each launch finds counters and list as the one before left them
            poison(operands.out)
            poison(operands.lse)
            launch(operands)
            call.check(operands.out, operands.lse)


@pytest.mark.parametrize("name", ["dense", "packed", "8 bits"])
def test_launches_on_two_streams(name):
    call = call_of(CASES[name], "cuda")
    first, settings = operands_of(call)
    second = operands_of(call)[0]
    (plan, *_) = plans(first, settings, "dynamic", "apart")
    launch = HopperAttentionLaunch(plan, layout_of(first))
    launch(first)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for _ in range(20):
        launch(first)
        with torch.cuda.stream(side):
            launch(second)
    torch.cuda.synchronize()
    call.check(first.out, first.lse)
    call.check(second.out, second.lse)


@pytest.mark.parametrize("name", ["dense", "8 bits"])
def test_what_lies_around_an_operand_is_not_read(name):
    """Views in the middle of NaN: of rows, of heads and of columns."""
    call = call_of(CASES[name], "cuda")
    operands, settings = operands_of(call)
    around = {}
    for part in ("q", "k", "v", "out"):
        x = getattr(operands, part)
        edge = 16 // x.element_size()  # TMA's rule
        around[part] = poison_around(x, (0, 4, 1, edge), (0, 5, 1, edge))
    view = operands._replace(**around)
    for plan in plans(view, settings, "dynamic", "apart"):
        HopperAttentionLaunch(plan, layout_of(view))(view)
        call.check(view.out, view.lse)
