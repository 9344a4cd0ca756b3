"""The same bits, however often and whatever else the GPU is made to do: launches of small cases, hundreds of each.

A process beside takes turns with this one on the GPU, so that kernels are stopped in the middle and go on: alone,
nothing of that kind happens to a launch of microseconds. It found tickets that were lost on their way from the lane
that had drawn them to the others, by way of what had been a barrier: see `tilestream.kernels.hopper.ring`. The long
ones here are those that did so most, once in a hundred launches. Nothing here waits without a bound: launches end by
themselves, and so does the process, after `LASTS`.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from gpu_runs import ON_HOPPER, Run

if not ON_HOPPER:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from gpu_cases import by_name
from hopper_cases import hopper_case
from sanitize import ATTENTION, cases

import tilestream as ts
from attention_maths import Case, call_of

ROUNDS = 400
LONG_ROUNDS = 60
#: Seconds after which a process beside ends.
LASTS = 100
BESIDE = {
    "multiplies": "a = torch.randn(4096, 4096, device='cuda', dtype=torch.bfloat16); work = lambda: a @ a",
    # On every SM, for a turn and longer: the process with the next turn stops it in the middle.
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


def check_repeats(launch: Callable[[], object], out: torch.Tensor, rounds: int, traced: int = 0) -> None:
    """Each launch writes the same bits; ``traced``: launches of a recording, 0 for none."""
    launch()
    first, wrong = bits(out).clone(), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(rounds // (traced or rounds)):
        with ts.trace.record() if traced else contextlib.nullcontext():
            for _ in range(traced or rounds):
                out.fill_(float("nan"))
                launch()
                wrong += (bits(out) != first).any()
    ts.check()
    assert int(wrong) == 0, f"{int(wrong)} of {rounds} launches have other bits"


#: A turn long, or longer: the other process may have the GPU between any two of its instructions.
LONG_PRODUCTS = [
    hopper_case(16384, 16384, 2048, variant, tile, layout="nt", schedule=kind)
    for variant, tile in (("cooperative", (128, 256)), ("ping_pong", (64, 128)), ("single", (64, 64)))
    for kind in ("dynamic", "stream_k")
]


@pytest.mark.parametrize("case", [*LONG_PRODUCTS, *cases()], ids=by_name)
def test_products(case, beside):
    """Every tile of products, long ones among them whose workers are stopped in the middle, again and again."""
    run, (out, _) = Run(case), case.output("cuda")
    check_repeats(lambda: run(out), out, LONG_ROUNDS if case in LONG_PRODUCTS else ROUNDS)


#: Beside the small ones one of a few milliseconds, as long as a turn is.
LONG = Case((8192,), (8192,), (16, 4), (128, 128), "causal", "dense", 0, dtype=torch.bfloat16)
CALLS = [*(case for case, more in ATTENTION if not more), LONG]


@pytest.mark.parametrize("case", CALLS, ids=lambda case: f"{case.features}-{case.how}-{case.dims[0]}-{case.keys[0]}")
@pytest.mark.parametrize("traced", [0, 5], ids=["", "traced"])
def test_attention(case, traced, beside):
    call = call_of(case, "cuda")
    out = ts.attention(**call.tensors, **call.options)
    check_repeats(lambda: ts.attention(**call.tensors, **call.options, out=out), out, ROUNDS // 4, traced)
