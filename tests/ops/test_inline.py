"""Equal calls on the CPU: looked up with the same bits, and gone through anew wherever something could differ."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import tilestream as ts
from error_rule import Maths, check, nans, rand
from tilestream.launch.cache import launch_cache
from tilestream.ops import inline, request

M, K, N = 6, 16, 10
SCALES = {"scale_a": torch.rand(M, 1) + 0.5, "scale_b": torch.rand(1, N) + 0.5}


@pytest.fixture
def checked(monkeypatch):
    """Whether calls went through their checks, in order; nothing is known at the beginning."""
    seen, real = [], request._multiply
    monkeypatch.setattr(request, "_multiply", lambda r: (seen.append(r.op), real(r))[1])
    launch_cache.clear()
    return seen


def of(dtype=torch.float32, *batch):
    return rand(*batch, M, K, dtype=dtype), rand(*batch, K, N, dtype=dtype)


#: A call of random operands, and what it is.
CALLS = {
    "mm": lambda t: ((a := of(t)), (lambda: ts.mm(*a), Maths(*a)))[1],
    "matmul, epilogue": lambda t: (
        (a := of(t)), (e := {"bias": rand(N, dtype=t), "residual": rand(M, N, dtype=t), "activation": "gelu"}),
        (lambda: ts.matmul(*a, **e, beta=0.5), Maths(*a, **e, beta=0.5)),
    )[-1],
    "matmul, out": lambda t: (
        (a := of(t)), (out := nans(M, N, dtype=t)), (lambda: ts.matmul(*a, out=out.fill_(float("nan"))), Maths(*a)),
    )[-1],
    "matmul, strided out": lambda t: (
        (a := of(t)), (out := nans(N, 2 * M, dtype=t)[:, ::2].t()),
        (lambda: ts.matmul(*a, out=out.fill_(float("nan"))), Maths(*a)),
    )[-1],
    "matmul, transposed": lambda t: (
        (a := (rand(K, M, dtype=t).t(), rand(N, K, dtype=t).t())), (lambda: ts.matmul(*a), Maths(*a)),
    )[-1],
    "matmul, vector": lambda t: (
        (a := of(t)), (lambda: ts.matmul(a[0][0], a[1])[None], Maths(a[0][:1], a[1])),
    )[-1],
    "matmul, broadcast": lambda t: (
        (a := rand(3, M, K, dtype=t)), (b := rand(K, N, dtype=t)), (lambda: ts.matmul(a, b), Maths(a, b)),
    )[-1],
    "matmul, shared a": lambda t: (
        (a := rand(M, K, dtype=t)), (b := rand(3, K, N, dtype=t)),
        (lambda: ts.matmul(a, b), Maths(a.expand(3, -1, -1), b)),
    )[-1],
    "matmul, scales": lambda t: ((a := of(t)), (lambda: ts.matmul(*a, **SCALES), Maths(*a, **SCALES)))[-1],
    "matmul, another dtype": lambda t: (
        (a := of(t)), (lambda: ts.matmul(*a, out_dtype=torch.float32), Maths(*a, out_dtype=torch.float32)),
    )[-1],
    "bmm, bias": lambda t: (
        (a := of(t, 3)), (bias := rand(N, dtype=t)), (lambda: ts.bmm(*a, bias=bias), Maths(*a, bias)),
    )[-1],
    "bmm, scales": lambda t: (
        (a := of(t, 2)), (s := torch.rand(2, M, 1) + 0.5),
        (lambda: ts.bmm(*a, scale_a=s, residual=a[0][..., :N]), Maths(*a, residual=a[0][..., :N], scale_a=s)),
    )[-1],
    "addmm": lambda t: (
        (a := of(t)), (c := rand(N, dtype=t)),
        (lambda: ts.addmm(c, *a, alpha=2, beta=3), Maths(*a, residual=c, alpha=2, beta=3)),
    )[-1],
    "addmm, beta 0": lambda t: (
        (a := of(t)), (c := nans(M, N, dtype=t)), (lambda: ts.addmm(c, *a, beta=0), Maths(*a)),
    )[-1],
    "addmm, alpha 0": lambda t: (
        (a := of(t)), (c := rand(M, N, dtype=t)), (lambda: ts.addmm(c, *a, alpha=0), Maths(*a, residual=c, alpha=0)),
    )[-1],
    "addmm in place": lambda t: (
        (a := of(t)), (c := rand(M, N, dtype=t)), (before := c.clone()),
        (lambda: ts.addmm(c.copy_(before), *a, out=c), Maths(*a, residual=before)),
    )[-1],
    "linear, 3-D, bias": lambda t: (
        (x := rand(2, M, K, dtype=t)), (w := rand(N, K, dtype=t)), (bias := rand(N, dtype=t)),
        (lambda: ts.linear(x, w, bias), Maths(x, w.t(), bias)),
    )[-1],
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_an_equal_call_is_looked_up_and_has_the_same_bits(name, dtype, checked):
    call, maths = CALLS[name](dtype)
    made = call()
    first, strides = made.clone(), made.stride()
    check(first, maths)
    assert len(checked) == 1
    for mode in (contextlib.nullcontext, torch.no_grad):
        with mode():
            again = call()
        assert torch.equal(again, first)
        assert (again.stride(), again.dtype, again.requires_grad) == (strides, first.dtype, False)
    assert len(checked) == 1, "an equal call was checked anew"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_operands_of_8_bits_are_looked_up(dtype, checked):
    a, b = (x.to(dtype) for x in of(torch.float32, 2))
    for _ in range(2):
        check(ts.bmm(a, b, scale_b=torch.tensor(0.5)), Maths(a, b, scale_b=torch.tensor(0.5)))
    assert len(checked) == 1


def test_other_numbers_of_the_same_shapes_give_their_own_product(checked):
    for _ in range(3):
        a, b = of()
        check(ts.matmul(a, b), Maths(a, b))
        x = rand(2, M, K)
        check(ts.linear(x, b.t().contiguous()), Maths(x, b))
    assert checked == ["matmul", "linear"]


A, B = of()
#: Each after an equal call that went through; its message is that of a call which nothing came before.
BAD = {
    "use_fast_accum is 1": (lambda: ts.matmul(A, B, use_fast_accum=1), "use_fast_accum=1; it is True or False"),
    "workers is 1.0": (lambda: ts.matmul(A, B, workers=1.0), "workers=1.0; it is a positive whole number"),
    "beta is complex": (lambda: ts.matmul(A, B, beta=1 + 0j), r"beta=\(1\+0j\); it is a number"),
    "activation": (lambda: ts.matmul(A, B, activation=["relu"]), r"activation=\['relu'\]; it is None or one of"),
    "schedule": (lambda: ts.matmul(A, B, schedule="none"), "schedule='none'; it is one of"),
    "a deadline": (lambda: ts.matmul(A, B, deadline=1.0), "without arrival=; nothing is waited for"),
    "sparse": (lambda: ts.matmul(A.to_sparse(), B), "has layout torch.sparse_coo"),
    "compressed": (lambda: ts.matmul(A.to_sparse_csr(), B), "has layout torch.sparse_csr"),
    "mkldnn": (lambda: ts.matmul(A.to_mkldnn(), B), "has layout torch._mkldnn"),
    "nested": (lambda: ts.matmul(torch.nested.nested_tensor([A, A]), B), "is nested"),
    "no tensor": (lambda: ts.matmul(A, B.tolist()), "b is a list; it is a torch.Tensor"),
    "dtypes": (lambda: ts.matmul(A.double(), B), "a is torch.float64, b is torch.float32"),
    "mm of a vector": (lambda: ts.mm(A[0], B), "it has 2 dimensions: use matmul for others"),
    "out overlaps a": (
        lambda: (x := torch.zeros(M, K + N), ts.matmul(x[:, :K], B, out=x[:, 1 : N + 1])),
        "out: overlaps a in memory",
    ),
    "out overlaps bias": (
        lambda: (x := torch.zeros(M, N), ts.matmul(A, B, bias=x[2], out=x)), "out: overlaps bias in memory",
    ),
    "out is negated": (
        lambda: ts.matmul(A, B, out=torch._neg_view(torch.zeros(M, N))), "out is a negated view",
    ),
    "out wants a gradient": (
        lambda: ts.matmul(A, B, out=torch.zeros(M, N, requires_grad=True)), "out= has no gradient",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_call_is_refused_after_good_ones(name, checked):
    wide = torch.zeros(M, K + N)
    for good in (
        {}, {"out": torch.zeros(M, N)}, {"bias": torch.zeros(N), "out": torch.zeros(M, N)}, {"activation": "relu"},
    ):  # fmt: skip
        ts.matmul(A, B, **good)
    ts.mm(A, B)
    ts.matmul(wide[:, :K], B, out=torch.zeros(M, K + N)[:, 1 : N + 1])
    call, message = BAD[name]
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        call()


class Watched(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def dual():
    with forward_ad.dual_level():
        yield


#: What has to see each call of its block.
WATCHING = {
    "a recording": ts.trace.record,
    "a dispatch mode": lambda: FlopCounterMode(display=False),
    "a function mode": Watched,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "forward derivatives": dual,
    "a limit": lambda: ts.worker_limit(1),
    "a default device": lambda: torch.device("cpu"),
}


@pytest.mark.parametrize("name", WATCHING)
def test_what_watches_sees_each_call(name, checked):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        ts.matmul(A, B)
        with WATCHING[name]() as watching:
            made = ts.matmul(A, B)
        ts.matmul(A, B)
    finally:
        torch.set_num_threads(threads)
    assert len(checked) == 2
    if name == "a recording":
        assert len(watching.launches) == 1
    if name == "a dispatch mode":
        assert watching.get_total_flops() == 2 * M * N * K
    if name == "a profiler":
        assert "tilestream::gemm" in {event.key for event in watching.key_averages()}
    assert made.dtype == (torch.bfloat16 if name == "autocast" else torch.float32)


def test_a_gradient_is_not_lost(checked):
    ts.matmul(A, B)
    a = A.clone().requires_grad_()
    ts.matmul(a, B).sum().backward()
    assert torch.allclose(a.grad, B.sum(1).expand(M, K))
    assert len(checked) == 2
    ts.matmul(torch.nn.Parameter(A, requires_grad=False), B)
    with torch.no_grad():
        assert not ts.matmul(a, B).requires_grad
    assert len(checked) == 2


def test_transforms_and_subclasses_see_the_call(checked):
    class Mine(torch.Tensor):
        pass

    ts.matmul(A, B)
    assert type(ts.matmul(A.as_subclass(Mine), B)) is Mine
    assert torch.equal(torch.vmap(lambda a: a * 2)(A), A * 2)
    traced = torch.jit.trace(ts.matmul, (A, B), check_trace=False)
    assert "tilestream::gemm" in str(traced.graph)
    assert len(checked) == 3


def test_an_output_of_inference_mode_is_written_there_only(checked):
    with torch.inference_mode():
        out = torch.zeros(M, N)
        ts.matmul(A, B, out=out)
        ts.matmul(A, B, out=out.zero_())
        check(out, Maths(A, B))
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
        ts.matmul(A, B, out=out)
    assert len(checked) == 1


@pytest.mark.parametrize("how", ["threads", "environment"])
def test_other_threads_or_limits_are_another_plan(how, checked, monkeypatch):
    ts.matmul(A, B)
    threads = torch.get_num_threads()
    if how == "threads":
        torch.set_num_threads(threads + 1)
    else:
        monkeypatch.setattr(inline, "limit", lambda: 7)
    try:
        ts.matmul(A, B)
    finally:
        torch.set_num_threads(threads)
    assert len(checked) == 2


def test_an_exception_leaves_no_old_numbers(checked, monkeypatch):
    out = torch.zeros(M, N)
    ts.matmul(A, B, out=out)
    monkeypatch.setattr(inline.gemm, "product", lambda *operands: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ts.matmul(A, B, out=out)
    assert len(checked) == 1
    assert out.isnan().all()


def test_what_is_copied_or_done_by_workers_is_checked_each_time(checked):
    a, b = rand(4, 3, M, K).transpose(0, 1), rand(3, 4, K, N)
    large = rand(64, 64)
    for _ in range(2):
        check(ts.matmul(a, b), Maths(a, b))  # its batches are no one dimension without a copy
        check(ts.matmul(large, large, workers=2), Maths(large, large))
    assert len(checked) == 4


def test_no_operand_is_kept_alive(checked):
    import weakref

    a, b = of()
    ts.matmul(a, b)
    alive = weakref.ref(a)
    del a
    assert alive() is None
    assert len(launch_cache) == 1
