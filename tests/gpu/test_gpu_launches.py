"""Launches: order of work, streams, workspaces, graphs, what is allocated and kept; and what ops do around them."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace

import pytest
import torch
from gpu_cases import BF16, F32, KINDS, Case, by_name
from gpu_runs import ON_HOPPER, Differences, Run, captured, check_allocations, nan, poison, poison_scratch, randn
from hopper_cases import CHAINED_CASES, FEW, PROBE_CASES, REPEATED
from torch.utils.flop_counter import FlopCounterMode

import tilestream as ts
from device_order import check_order
from error_rule import ACTIVATIONS, Maths, check
from streaming import run_together
from tilestream.core.operands import Epilogue, GemmOperands
from tilestream.launch.launch import Probe
from tilestream.ops import gpu
from tilestream.runtime import device_workspace as workspaces

LAUNCHED = [Case(500, 304, 2000, schedule=kind, bias=True, backend="portable") for kind in KINDS]
PROBED = [
    Case(1000, 1400, 512, schedule=kind, queues=queues, backend="portable", tile=(64, 64))
    for kind, queues in (("static", None), ("dynamic", None), ("dynamic", 2), ("dynamic", 7), ("stream_k", None))
]
if ON_HOPPER:
    LAUNCHED, PROBED = REPEATED + LAUNCHED, PROBE_CASES + PROBED
each = pytest.mark.parametrize("case", LAUNCHED, ids=by_name)


def operands(m: int = 1000, n: int = 1104, k: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    return randn(m, k), randn(k, n)


# Launches of a plan --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 5, 37, 132])
@pytest.mark.parametrize("case", PROBED, ids=by_name)
def test_device_order_is_the_hosts(case, workers):
    run = Run(replace(case, workers=workers))
    for _ in range(3):  # on counters as the launch before left them
        out, around = case.output("cuda")
        probe = Probe(run.plan.workers, 4096, out.device)
        x = GemmOperands(run.operands["a"], run.operands["b"], out, Epilogue())
        gpu.find(x, gpu.How(), run.plan)(x, probe=probe)
        check_order(run.plan.schedule, [probe.log(worker) for worker in range(run.plan.workers)])
        run.check(out, around)


def test_own_order_of_tiles(kind):
    tiles = -(-500 // 64) * -(-700 // 64)
    order = tuple(random.Random(0).sample(range(tiles), tiles))
    run = Run(Case(500, 700, 128, schedule=kind, tile=(64, 64), order=order, backend="portable"))
    run.check(run())


@each
def test_a_hundred_launches_give_the_same_bits(case):
    run = Run(case)
    first = run()
    run.check(first)
    poison_scratch()
    differ, out = Differences(), torch.empty_like(first)
    for _ in range(100):
        differ.add(run(poison(out)) != first)
    assert differ.none()


def test_thousands_of_launches_of_all_kinds_on_one_workspace():
    many = [replace(case, workers=workers) for case in LAUNCHED for workers in (132, 101, 17)]
    many += [
        replace(case, workers=workers, queues=queues)
        for case in LAUNCHED
        if case.schedule == "dynamic"
        for workers, queues in ((1, None), (None, 2), (None, 8))
    ]
    runs = [Run(case) for case in many]
    wants, out = [run() for run in runs], nan(many[0].m, many[0].n)
    for run, want in zip(runs, wants, strict=True):
        run.check(want)
    before, differ = len(workspaces._workspaces), Differences()
    for i in range(5000):
        at = i * 7 % len(runs)
        if i % 10 == 0:
            poison(out)
        differ.add(runs[at](out) != wants[at])  # the same bits each time, of stream_k too
    assert differ.none()
    assert len(workspaces._workspaces) == before


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("variant", [row.variant for row in FEW])
def test_a_chain_in_which_each_launch_reads_what_the_one_before_wrote(variant):
    # Launches overlap by programmatic dependent launch: none may read, or overwrite, before the one before has ended.
    size = CHAINED_CASES[0].m
    weight = randn(size, size, dtype=F32).mul(size**-0.5).to(BF16)
    plans = [Run(case).plan for case in CHAINED_CASES if case.variant in (variant, FEW[0].variant)]
    start = randn(size, size)

    def chain(wait: bool) -> torch.Tensor:
        x, y = start.clone(), torch.empty_like(start)
        for i in range(60):
            plans[i % len(plans)].run(x, weight, out=y)
            x, y = y, x
            if i % 10 == 9:
                x.mul_(0.5).add_(start)  # torch's kernels read and write it as well
            if wait:
                torch.cuda.synchronize()
        return x

    want = chain(True)
    assert torch.isfinite(want).all()
    for _ in range(5):
        assert torch.equal(chain(False), want)


@pytest.mark.parametrize("workers", [60, None])
@each
def test_two_streams(case, workers):
    runs = [Run(replace(case, workers=workers)) for _ in range(2)]
    wants, streams = [run() for run in runs], [torch.cuda.Stream() for _ in runs]
    torch.cuda.synchronize()
    answers = []
    for _ in range(50):
        for stream, run in zip(streams, runs, strict=True):
            with torch.cuda.stream(stream):
                answers.append(run())
    torch.cuda.synchronize()
    for i, (run, want) in enumerate(zip(runs, wants, strict=True)):
        run.check(want)
        assert all(torch.equal(out, want) for out in answers[i::2])


@each
def test_a_hundred_replays_of_a_graph_beside_eager_launches(case):
    """They share no words."""
    run, other = Run(case), Run(next(one for one in LAUNCHED if one.schedule == "stream_k"))
    want = other()
    run()  # compiled before it is captured
    out, side = nan(case.m, case.n), torch.cuda.Stream()
    with captured() as graph:
        run(out)
        again = run()
    wrong = Differences()
    for i in range(100):
        run.operands["a"].normal_()
        poison(out)
        poison(again)
        side.wait_stream(torch.cuda.current_stream())
        graph.replay()
        if i % 3 == 0:  # a different one, and the same, while the graph runs
            with torch.cuda.stream(side):
                eager = other(), run()
            torch.cuda.current_stream().wait_stream(side)
            wrong.add(eager[0] != want)
            wrong.add(eager[1] != out)
        wrong.add(out != again)
        if i % 20 == 0:
            run.check(out)
        torch.cuda.synchronize()
    assert wrong.none()
    run.check(out)


@each
def test_a_launch_allocates_its_output_and_nothing_else(case):
    run = Run(case)
    out = run()
    check_allocations(run, lambda: run(out))


@each
def test_out_may_be_the_residual(case):
    run = Run(replace(case, bias=False, residual="rows", beta=2.0, workers=7))
    residual = run.operands["residual"]
    kept = residual.clone()
    run(residual)
    run.operands["residual"] = kept
    run.check(residual)


@pytest.mark.parametrize("which", ["bias", "residual"])
def test_addends_at_odd_addresses(which):
    run = Run(replace(LAUNCHED[0], bias=which == "bias", residual="rows" if which == "residual" else ""))
    for at in (0, 1, 8, 3):
        there = torch.empty(run.operands[which].numel() + 8, dtype=BF16, device="cuda")[at:]
        run.operands[which] = there[: run.operands[which].numel()].view_as(run.operands[which]).normal_()
        run.check(run())


def test_a_fresh_thread():
    run, found = Run(LAUNCHED[0]), []
    want = run()
    torch.cuda.synchronize()
    run_together(1, lambda _: found.append(run()))
    assert torch.equal(found[0], want)


# Ops -----------------------------------------------------------------------------------------------------------------


def test_caches_hold_no_tensor_alive(backend):
    a, b = operands()
    refs = [weakref.ref(a), weakref.ref(b)]
    out = ts.matmul(a, b, residual=torch.ones(1000, 1104, device="cuda", dtype=a.dtype), activation="gelu")
    refs.append(weakref.ref(out))
    del a, b, out
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


def test_a_call_like_an_earlier_one_is_looked_up_and_still_right(backend):
    a, b = operands(300, 200, 104)
    epilogue = {"bias": randn(200), "activation": "relu"}

    def check_call(x: torch.Tensor) -> torch.Tensor:
        out = ts.matmul(x, b, **epilogue)
        check(out, Maths(a, b, **epilogue))
        return out

    for _ in range(3):
        a.normal_()
        out = check_call(a)
    check_allocations(lambda: ts.matmul(a, b, **epilogue), lambda: ts.matmul(a, b, out=out, **epilogue))
    # Other strides, addresses and dtypes are other calls.
    check_call(a.t().contiguous().t())
    check_call(torch.empty(300 * 104 + 1, device="cuda", dtype=BF16)[1:].view(300, 104).copy_(a))
    check(ts.matmul(a, b, out_dtype=F32), Maths(a, b, out_dtype=F32))
    # A dispatch mode of torch's sees the op; autograd works.
    with FlopCounterMode(display=False) as counter:
        ts.matmul(a, b, **epilogue)
    assert counter.get_total_flops() == 2 * 300 * 200 * 104
    assert ts.matmul(a, b.clone().requires_grad_(), **epilogue).requires_grad
    with torch.autocast("cuda", torch.float16):
        assert ts.matmul(a, b, **epilogue).dtype == torch.float16
    with torch.inference_mode():
        assert ts.matmul(a, b, **epilogue).is_inference()


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize(("dtype", "rtol", "atol"), [(F32, 1e-4, 1e-3), (BF16, 1e-2, 1e-2)], ids=str)
def test_gradients(dtype, rtol, atol, activation):
    """On the thread of torch's autograd."""
    shapes = ((130, 96), (96, 72), (72,))

    def gradients(op, tensors):
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        op(*leaves).square().sum().backward()
        return [leaf.grad for leaf in leaves]

    given = [randn(*shape, dtype=dtype) for shape in shapes]
    mine = gradients(lambda a, b, c: ts.matmul(a, b, bias=c, activation=activation), given)
    want = gradients(lambda a, b, c: ACTIVATIONS[activation](a @ b + c), [x.double() for x in given])
    for x, y in zip(mine, want, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=rtol, atol=atol * y.abs().max().item())


def test_torch_compile():
    a, b = operands(300, 200, 104)
    compiled = torch.compile(lambda x, y: ts.matmul(x * 2, y, activation="relu") + 1, fullgraph=True)
    torch.testing.assert_close(compiled(a, b), torch.relu((a * 2) @ b) + 1, rtol=2e-2, atol=1e-1)
