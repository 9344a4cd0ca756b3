"""The Hopper attention on a GPU, beyond what `test_gpu_attention` asks of every backend: each tile of the plan, with
turns and without, each kind of schedule; repeated launches; two streams.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gpu_cases import BF16, E4M3
from gpu_runs import ON_HOPPER, asked, poison, poison_around

if not ON_HOPPER:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from attention_maths import Case, call_of, replace
from tilestream.core.operands import AttentionOperands
from tilestream.launch.hopper.attention_launch import HopperAttentionLaunch
from tilestream.ops.attention_gpu import layout_of
from tilestream.ops.attention_operands import Settings, problem_of
from tilestream.plan.attention_plan import of_candidate
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
CASES |= {f"8 bits, {name}": replace(CASES[name], dtype=E4M3) for name in ("packed", "in pages")}


def launches(
    x: AttentionOperands, settings: Settings, kind: str = "dynamic", variant: str = "unordered"
) -> Iterator[HopperAttentionLaunch]:
    """One for each tile."""
    device, problem = cuda_properties(torch.cuda.current_device()), problem_of(x, settings)
    made = hopper_attention.candidates(problem, device, device.workers, kind=kind, variant=variant)
    assert made
    for one in made:
        plan = of_candidate(problem, device, "hopper", one, "a test's", ())
        yield HopperAttentionLaunch(plan, layout_of(x))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("variant", ["ordered", "unordered"])
@pytest.mark.parametrize("name", CASES)
def test_every_tile(name, variant, kind):
    call = call_of(CASES[name], "cuda")
    operands, settings = asked(call)
    for launch in launches(operands, settings, kind, variant):
        for _ in range(3):  # each launch finds counters and list as the one before left them
            poison(operands.out)
            poison(operands.lse)
            launch(operands)
            call.check(operands.out, operands.lse)


@pytest.mark.parametrize("name", ["dense", "8 bits"])
def test_what_lies_around_an_operand_is_not_read(name):
    """Views in the middle of NaN: of rows, of heads and of columns."""
    call = call_of(CASES[name], "cuda")
    operands, settings = asked(call)
    around = {}
    for part in ("q", "k", "v", "out"):
        x = getattr(operands, part)
        edge = 16 // x.element_size()  # TMA's rule
        around[part] = poison_around(x, (0, 4, 1, edge), (0, 5, 1, edge))
    view = operands._replace(**around)
    for launch in launches(view, settings):
        launch(view)
        call.check(view.out, view.lse)
