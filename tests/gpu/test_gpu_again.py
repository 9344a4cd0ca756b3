"""The same bits, however often and whatever else the GPU is made to do: launches of small cases, hundreds of each.

A process beside takes turns with this one on the GPU, so that kernels are stopped in the middle and go on: alone,
nothing of that kind happens to a launch of microseconds. It found tickets that were lost on their way from the lane
that had drawn them to the others, by way of what had been a barrier: see `tilestream.kernels.hopper.ring`. The long
ones here are those that did so most, once in a hundred launches. Nothing here waits without a bound: launches end by
themselves, and so does the process, after `LASTS`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from gpu_runs import ON_HOPPER

if not ON_HOPPER:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from hopper_cases import HopperCase
from sanitize import ATTENTION, cases

import tilestream as ts
from attention_maths import Case, call_of
from tilestream.runtime.properties import cuda_properties

ROUNDS = 400
LONG_ROUNDS = 60
#: Seconds after which a process beside ends.
LASTS = 100
BESIDE = {
    "multiplies": "a = torch.randn(4096, 4096, device='cuda', dtype=torch.bfloat16); work = lambda: a @ a",
    # On every SM, for as long as a turn and longer: whoever has the next turn stops it in the middle.
    "holds": "work = lambda: torch.cuda._sleep(30_000_000)",
}


@pytest.fixture(scope="module", params=["alone", *BESIDE])
def beside(request) -> Iterator[str]:
    if request.param == "alone":
        yield request.param
        return
    text = f"import time, torch; {BESIDE[request.param]}\nend = time.time() + {LASTS}\nprint('begins', flush=True)\n"
    text += "while time.time() < end:\n    [work() for _ in range(4)]; torch.cuda.synchronize()"
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        yield request.param
        assert process.poll() is None, "it ended before the tests beside it did"
        process.kill()


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


#: As long as a turn is, or longer: between any two of its instructions somebody else may have the GPU.
LONG_PRODUCTS = [
    HopperCase(16384, 16384, 2048, variant, tile, layout="nt", schedule=kind)
    for variant, tile in (("cooperative", (128, 256)), ("ping_pong", (64, 128)), ("single", (64, 64)))
    for kind in ("dynamic", "stream_k")
]


@pytest.mark.parametrize("case", LONG_PRODUCTS, ids=lambda case: case.name)
def test_long_products(case, beside):
    """Every tile of products whose workers are stopped in the middle, again and again."""
    a, b = (torch.randn(16384, 2048, device="cuda").bfloat16() for _ in range(2))
    out = torch.full((16384, 16384), float("nan"), device="cuda", dtype=torch.bfloat16)
    plan, _ = case.plan(cuda_properties())
    plan.run(a, b.t(), out=out)
    first, wrong = bits(out).clone(), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(LONG_ROUNDS):
        out.fill_(float("nan"))
        plan.run(a, b.t(), out=out)
        wrong += (bits(out) != first).any()
    ts.check()
    assert int(wrong) == 0, f"{int(wrong)} of {LONG_ROUNDS} launches have other bits"


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_products(case, beside):
    operands, (out, _) = case.operands("cuda"), case.output("cuda")
    plan, _ = case.plan(cuda_properties())
    how = {"alpha": case.alpha, "beta": case.beta, "activation": case.activation}
    plan.run(**operands, out=out, **how)
    first, wrong = bits(out).clone(), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(ROUNDS):
        out.fill_(float("nan"))
        plan.run(**operands, out=out, **how)
        wrong += (bits(out) != first).any()
    ts.check()
    assert int(wrong) == 0, f"{int(wrong)} of {ROUNDS} launches have other bits"


#: Beside the small ones one of a few milliseconds, as long as a turn is.
LONG = Case((8192,), (8192,), (16, 4), (128, 128), "causal", "dense", 0, dtype=torch.bfloat16)
CALLS = [*(case for case, more in ATTENTION if not more), LONG]


@pytest.mark.parametrize("case", CALLS, ids=lambda case: f"{case.features}-{case.how}-{case.dims[0]}-{case.keys[0]}")
@pytest.mark.parametrize("traced", [False, True], ids=["", "traced"])
def test_attention(case, traced, beside):
    call = call_of(case, "cuda")
    out = ts.attention(**call.tensors, **call.options)
    first = bits(out).clone()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def repeat(rounds: int) -> None:
        nonlocal wrong
        for _ in range(rounds):
            out.fill_(float("nan"))
            ts.attention(**call.tensors, **call.options, out=out)
            wrong += (bits(out) != first).any()

    rounds = ROUNDS // 4
    if traced:
        for _ in range(rounds // 5):
            with ts.trace.record():
                repeat(5)
    else:
        repeat(rounds)
    ts.check()
    assert int(wrong) == 0, f"{int(wrong)} of {rounds} calls have other bits"
