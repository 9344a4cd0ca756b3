"""Products of operands that are copied first, since TMA cannot address them as they lie, or reads them slowly.

Poisoned scratch, launches one behind another on one workspace, two streams, graphs replayed on other numbers, the
native path; every answer by the error rule, and bit for bit that of the same operands made contiguous and wide.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu_runs import ON_HOPPER, poison_around, poison_scratch, rand, randn

if not ON_HOPPER:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

import tilestream as ts
from error_rule import Maths, check
from tilestream.core.operands import Epilogue, GemmOperands
from tilestream.ops import gpu
from tilestream.plan import plan_problem

BF16, F16, F32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
Pair = tuple[torch.Tensor, torch.Tensor]


def pair(m: int, n: int, k: int, layout: str, dtype: torch.dtype = BF16, batch: int = 0) -> Pair:
    """Contiguous A and B of a layout."""
    first = (batch,) if batch else ()
    a = randn(*first, *((m, k) if layout[0] == "n" else (k, m)), dtype=dtype)
    b = randn(*first, *((k, n) if layout[1] == "n" else (n, k)), dtype=dtype)
    return (a if layout[0] == "n" else a.mT), (b if layout[1] == "n" else b.mT)


#: Operands, and which of them are copied.
CASES: dict[str, tuple[Callable[[], Pair], str]] = {
    "odd K": (lambda: pair(700, 900, 1101, "nt"), "ab"),
    "even K": (lambda: pair(700, 900, 1102, "nt"), "ab"),
    "K of 4": (lambda: pair(700, 900, 1100, "nt"), "ab"),
    "odd N, B by rows": (lambda: pair(512, 901, 1024, "nn"), "b"),
    "short rows of B, copied along K": (lambda: pair(700, 19, 1024, "nn"), "b"),
    "odd M, A by columns": (lambda: pair(701, 512, 1024, "tt"), "a"),
    "float16": (lambda: pair(1001, 999, 777, "nn", F16), "ab"),
    "long K, stream-K": (lambda: pair(112, 96, 10865, "nt"), "ab"),
    "few rows": (lambda: pair(7, 4096, 1023, "nt"), "ab"),
    "short rows": (lambda: pair(4096, 2048, 19, "nt"), "ab"),
    "batches": (lambda: pair(250, 260, 515, "nn", batch=5), "a"),
    "a shared A": (lambda: (randn(1, 250, 515).expand(5, 250, 515), randn(5, 515, 256)), "a"),
    "columns of a wider matrix": (lambda: (randn(600, 1100)[:, 3:1027], randn(1024, 512)), "a"),
    "every other column": (lambda: (randn(600, 2048)[:, ::2], randn(1024, 512)), "a"),
    "an offset of an element": (lambda: (randn(600 * 1024 + 1)[1:].view(600, 1024), randn(1024, 512)), "a"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_answers_keep_the_error_rule_whatever_the_scratch_held(name):
    make, copied = CASES[name]
    a, b = make()
    out = torch.empty((*a.shape[:-1], b.shape[-1]), dtype=a.dtype, device="cuda")
    plan = gpu.find(GemmOperands(a, b, out, Epilogue()), gpu.How()).plan
    if plan.backend == "portable":  # the cost model expects more of it; the copies are launched all the same
        plan = plan_problem(plan.problem, device=plan.device, backend="hopper")
    assert set(copied) <= set(plan.realigned)
    for _ in range(3):
        poison_scratch()
        out.fill_(float("nan"))
        gpu.run(GemmOperands(a, b, out, Epilogue()), gpu.How(), plan)
        check(out, Maths(a, b))


@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_aligned_operands(name):
    a, b = CASES[name][0]()

    def aligned(x: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros(*x.shape[:-1], x.shape[-1] + -x.shape[-1] % 64, dtype=x.dtype, device="cuda")
        wide[..., : x.shape[-1]] = x
        return wide[..., : x.shape[-1]]

    with ts.invariant():
        assert ts.matmul(a, b).equal(ts.matmul(aligned(a), aligned(b)))


@pytest.mark.parametrize("dtype", [FP8, F32])
def test_operands_that_lie_across_k_are_transposed_on_the_way(dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    m, n, k = 768, 1280, 1024
    a, b = pair(m, n, k, "tn", F32)
    scales = {}
    if dtype == FP8:
        a, b = a.to(FP8), b.to(FP8)
        scales = {"scale_a": rand(m, 1), "scale_b": rand(1, n)}
    assert (a.stride(), b.stride()) == ((1, m), (n, 1))
    plan = ts.plan(
        m, n, k, dtype=dtype, device="cuda", layout="tn", backend="hopper", scales="row" if scales else "none"
    )
    assert plan.realigned == "ab"
    for _ in range(2):
        poison_scratch()
        check(plan.run(a, b, **scales), Maths(a, b, **scales, tf32=dtype == F32))


def test_an_epilogue_follows():
    a, b = pair(1000, 1003, 2047, "nt")
    bias, residual = randn(1003), randn(1000, 1003)
    got = ts.addmm(residual, a, b, beta=0.5, alpha=2.0)
    check(got, Maths(a, b, residual=residual, alpha=2.0, beta=0.5))
    got = ts.linear(a, b.T, bias, activation="gelu")
    check(got, Maths(a, b, bias=bias, activation="gelu"))


def test_a_view_in_the_middle_of_nan_reads_nothing_around_it():
    a, b = poison_around(randn(900, 1031), (2, 3), (1, 2)), poison_around(randn(1031, 777), (1, 1), (3, 5))
    check(ts.mm(a, b), Maths(a, b))


def test_calls_follow_one_another_and_each_reads_its_own_copy():
    """Equal calls are launched natively from the second on; each overwrites the scratch of the one before."""
    pairs = [pair(1024, 1024, 1025, "nt") for _ in range(4)]
    wanted = [ts.mm(a, b) for a, b in pairs]
    for (a, b), one in zip(pairs, wanted, strict=True):
        check(one, Maths(a, b))
    for _ in range(20):
        got = [ts.mm(a, b) for a, b in pairs]
        assert all(one.equal(other) for one, other in zip(got, wanted, strict=True))


def test_two_streams_have_their_own_copies():
    pairs = [pair(2048, 2048, 2049, "nt") for _ in range(2)]
    wanted = [ts.mm(a, b) for a, b in pairs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in pairs]
    found: list[list[torch.Tensor]] = [[], []]
    for _ in range(30):
        for stream, (a, b), kept in zip(streams, pairs, found, strict=True):
            with torch.cuda.stream(stream):
                kept.append(ts.mm(a, b))
    torch.cuda.synchronize()
    for kept, one in zip(found, wanted, strict=True):
        assert all(got.equal(one) for got in kept)


def test_a_graph_copies_what_the_operands_hold_at_each_replay():
    a, b = pair(1024, 1000, 1023, "nt")
    ts.mm(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = ts.mm(a, b)
        second = ts.mm(first.T.contiguous(), a)
    for _ in range(5):
        a.copy_(randn(*a.shape))
        b.copy_(randn(*b.shape))
        ts.mm(*pair(1024, 1000, 1023, "nt"))  # an eager call between replays has other scratch
        graph.replay()
        check(first, Maths(a, b))
        check(second, Maths(first.T.contiguous(), a))


@pytest.mark.parametrize("workers", [1, 3, 132])
def test_any_number_of_workers(workers):
    a, b = pair(515, 777, 1029, "nt")
    with ts.worker_limit(workers):
        check(ts.mm(a, b), Maths(a, b))


def test_gradients_are_products_of_such_operands_too():
    a, b = (x.detach().requires_grad_() for x in pair(600, 701, 1001, "nn"))
    change = randn(600, 701)
    ts.mm(a, b).backward(change)
    check(a.grad, Maths(change, b.detach().T))
    check(b.grad, Maths(a.detach().T, change))
