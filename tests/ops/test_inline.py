"""Equal calls on the CPU: looked up with the same bits, and gone through anew wherever something could differ."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import tilestream as ts
from error_rule import Maths, check, nans, passes, rand
from tilestream.kernels.cpu import attention
from tilestream.launch import cache
from tilestream.launch.cache import launch_cache
from tilestream.ops import attention_request, inline, request
from tilestream.ops.inline import inline_cache

M, K, N = 6, 16, 10
SCALES = {"scale_a": torch.rand(M, 1) + 0.5, "scale_b": torch.rand(1, N) + 0.5}


@pytest.fixture
def checked(monkeypatch):
    """Whether calls went through their checks, in order; nothing is known at the beginning."""
    seen, multiply, attend = [], request._multiply, attention_request._attend
    monkeypatch.setattr(request, "_multiply", lambda r: (seen.append(r.op), multiply(r))[1])
    monkeypatch.setattr(attention_request, "_attend", lambda r: (seen.append("attention"), attend(r))[1])
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
    "use_fast_accum is 1": (lambda: ts.matmul(A, B, use_fast_accum=1), "use_fast_accum=1; it must be True or False"),
    "workers is 1.0": (lambda: ts.matmul(A, B, workers=1.0), "workers=1.0; it must be a positive whole number"),
    "beta is complex": (lambda: ts.matmul(A, B, beta=1 + 0j), r"beta=\(1\+0j\); it must be a number"),
    "activation": (lambda: ts.matmul(A, B, activation=["relu"]), r"activation=\['relu'\]; it must be None or one of"),
    "schedule": (lambda: ts.matmul(A, B, schedule="none"), "schedule='none'; it must be one of"),
    "a deadline": (lambda: ts.matmul(A, B, deadline=1.0), "without arrival=; nothing is waited for"),
    "sparse": (lambda: ts.matmul(A.to_sparse(), B), "has layout torch.sparse_coo"),
    "compressed": (lambda: ts.matmul(A.to_sparse_csr(), B), "has layout torch.sparse_csr"),
    "mkldnn": (lambda: ts.matmul(A.to_mkldnn(), B), "has layout torch._mkldnn"),
    "nested": (lambda: ts.matmul(torch.nested.nested_tensor([A, A]), B), "is nested"),
    "no tensor": (lambda: ts.matmul(A, B.tolist()), "b is a list; it must be a torch.Tensor"),
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
    assert len(checked) == 2, "refused by the checks"


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


def test_an_output_of_no_elements_is_resized_each_time(checked):
    x, w = rand(2, M, K), rand(N, K)
    for _ in range(2):
        check(ts.linear(x, w, out=torch.empty(0)), Maths(x, w.t()))
        q = rand(1, 9, 2, 16)
        assert torch.equal(ts.attention(q, q, q, out=torch.empty(0)), ts.attention(q, q, q))
    assert checked == ["linear", "attention", "attention", "linear", "attention"]


def test_no_operand_is_kept_alive(checked):
    import weakref

    a, b = of()
    ts.matmul(a, b)
    alive = weakref.ref(a)
    del a
    assert alive() is None
    assert len(inline_cache) == 1


def test_shapes_of_the_cpu_leave_the_launches_of_gpus(checked, monkeypatch):
    """8,192 shapes of the CPU emptied the cache of both: the next call of a GPU planned and compiled anew."""
    monkeypatch.setattr(cache, "_MOST", 4)
    launch_cache.insert("a launch on a GPU", "compiled", launch_cache.generation)
    for n in range(1, 8):
        ts.matmul(torch.ones(2, 3), torch.ones(3, n))
        assert len(inline_cache) <= 4
    assert launch_cache.get("a launch on a GPU") == "compiled"
    launch_cache.clear()
    assert not inline_cache, "what is cleared by hand is cleared everywhere"


# Attention ------------------------------------------------------------------------------------------------------------


def heads(*shape, dtype=torch.float32):
    return rand(*shape, dtype=dtype)


#: q, k and the options of calls that torch's kernel computes as a whole; "bshd" unless another layout is given.
ATTENTION = {
    "square": ((2, 20, 4, 16), (2, 20, 4, 16), {}),
    "causal": ((2, 20, 4, 16), (2, 20, 4, 16), {"causal": True}),
    "shared heads": ((1, 20, 4, 16), (1, 20, 2, 16), {"causal": True}),
    "shared heads, two sequences": ((2, 20, 4, 16), (2, 20, 2, 16), {}),
    "more keys": ((1, 9, 2, 16), (1, 40, 2, 16), {"scale": 0.3}),
    "scale below 0": ((1, 9, 2, 16), (1, 40, 2, 16), {"scale": -0.5}),
    "top left, more keys": ((1, 9, 2, 16), (1, 40, 2, 16), {"causal": "top_left"}),
    "top left, more queries": ((1, 40, 2, 16), (1, 9, 2, 16), {"causal": "top_left"}),
    "top left, one query": ((2, 1, 2, 16), (2, 40, 2, 16), {"causal": "top_left"}),
    "one query": ((2, 1, 2, 16), (2, 40, 2, 16), {"causal": True}),
    "bhsd": ((2, 4, 20, 16), (2, 4, 20, 16), {"layout": "bhsd", "causal": True}),
    "bhsd, shared heads": ((1, 4, 20, 16), (1, 1, 20, 16), {"layout": "bhsd"}),
}


def expected(q, k, v, dtype, layout="bshd", causal=False, scale=None):
    """Output in the caller's layout, and log-sum-exp ``[B, H, S]``, in torch's operations."""
    q, k, v = (x.to(dtype) if layout == "bhsd" else x.to(dtype).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        shift = 0 if causal == "top_left" else k.shape[2] - q.shape[2]
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(shift + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    out = scores.softmax(-1) @ v
    return out if layout == "bhsd" else out.transpose(1, 2), scores.logsumexp(-1)


@pytest.mark.parametrize("causal", [True, "top_left"])
@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_scale_that_is_not_positive_leaves_the_mask_as_it_is(scale, causal):
    q, k, v = (heads(2, 20, 4, 16, dtype=torch.float64) + i for i in range(3))
    out, lse = ts.attention(q, k, v, causal=causal, scale=scale, return_lse=True)
    right, right_lse = expected(q, k, v, torch.float64, causal=causal, scale=scale)
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(lse, right_lse, check_dtype=False)


@pytest.mark.parametrize("into", [False, True], ids=["new", "out="])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ATTENTION)
def test_equal_attention_is_looked_up_and_has_the_same_bits(name, dtype, into, checked):
    of_q, of_k, options = ATTENTION[name]
    q, k, v = heads(*of_q, dtype=dtype), heads(*of_k, dtype=dtype), rand(*of_k, dtype=dtype, seed=7)
    out = {"out": nans(*of_q, dtype=dtype)} if into else {}
    fine, by_torch = (expected(q, k, v, kind, **options) for kind in (torch.float64, dtype))

    def call(**more):
        if into:
            out["out"].fill_(float("nan"))
        return ts.attention(q, k, v, **options, **out, **more)

    alone, (both, lse) = call().clone(), call(return_lse=True)
    both, strides = both.clone(), (both.stride(), lse.stride())
    if dtype == torch.float64:  # the reference is no finer
        torch.testing.assert_close((alone, lse), fine, rtol=1e-13, atol=1e-14)
    else:
        assert passes(alone, fine[0], by_torch[0])
        assert passes(lse, fine[1], by_torch[1].to(lse.dtype))
    assert torch.equal(alone, both)
    with ts.trace.record() as recorder:
        assert torch.equal(call(), alone), "a recording sees other bits"
    assert [launch.tiles_done for launch in recorder.launches] == [1]
    before = len(checked)
    for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        if mode is torch.inference_mode and into:
            continue
        with mode():
            again, (both_again, lse_again) = call(), call(return_lse=True)
        assert torch.equal(again, alone)
        assert torch.equal(both_again, alone)
        assert torch.equal(lse_again, lse)
        assert (both_again.stride(), lse_again.stride()) == strides
    # Heads that share keys are a call of the kernel a sequence: looked up where there is one.
    known = name != "shared heads, two sequences"
    assert (len(checked) == before) == known


UNLIKE_TORCH = {
    "a window": {"window": (3, 3)}, "a soft cap": {"softcap": 2.0}, "sinks": {"sinks": torch.zeros(2)},
    "workers": {"workers": 2}, "a schedule": {"schedule": "static"}, "lengths": {"seqlens_k": torch.tensor([5]).int()},
    "a diagonal": {"causal": True},
}  # fmt: skip


@pytest.mark.parametrize("name", UNLIKE_TORCH)
def test_what_torchs_kernel_does_not_compute_is_not_asked_of_it(name, checked):
    q, k = heads(1, 9, 2, 16), heads(1, 40, 2, 16)
    plain = ts.attention(q, k, k)
    with ts.trace.record() as recorder:
        made = ts.attention(q, k, k, **UNLIKE_TORCH[name])
    assert "torch" not in recorder.launches[0].label
    assert torch.allclose(made, plain, rtol=1e-5, atol=1e-6) == (name in ("workers", "a schedule"))
    ts.attention(q, k, k, **UNLIKE_TORCH[name])
    assert len(checked) == 3


BAD_ATTENTION = {
    "return_lse": (lambda q: ts.attention(q, q, q, deadline=1.0), "without arrival=; nothing is waited for"),
    "causal": (lambda q: ts.attention(q, q, q, causal=["top_left"]), r"causal=\['top_left'\]; it must be False"),
    "scale": (lambda q: ts.attention(q, q, q, scale=True), "scale=True; it must be a number"),
    "layout": (lambda q: ts.attention(q, q, q, layout="hbsd"), "layout='hbsd'; it must be one of"),
    "workers": (lambda q: ts.attention(q, q, q, workers=1.0), "workers=1.0; it must be a positive whole number"),
    "dtype": (lambda q: ts.attention(q, q.double(), q), "they have one dtype"),
    "sparse": (lambda q: ts.attention(q.to_sparse(), q, q), "attention: q has layout torch.sparse_coo"),
    "overlap": (lambda q: ts.attention(q, q, q, out=q), "out: overlaps q in memory"),
    "strides": (lambda q: ts.attention(q, q.mT.contiguous().mT, q), "a head's elements must be contiguous"),
}


@pytest.mark.parametrize("name", BAD_ATTENTION)
def test_bad_attention_is_refused_after_good_ones(name, checked):
    q = heads(1, 20, 2, 16)
    for good in ({}, {"scale": 1.0}, {"causal": "top_left"}, {"out": torch.zeros_like(q)}):
        ts.attention(q, q, q, **good)
    call, message = BAD_ATTENTION[name]
    with pytest.raises((TypeError, ValueError), match=message):
        call(q)


def test_attention_that_differs_in_one_thing_has_a_key_of_its_own(monkeypatch):
    q, k, v, out = (rand(2, 4, 4, 16) for _ in range(4))
    plain = {"layout": "bshd", "causal": False, "scale": None, "return_lse": False, "schedule": "auto"}
    others = [{"layout": "bhsd"}, {"causal": True}, {"scale": 0.5}, {"return_lse": True}]
    longer, half, turned = torch.cat((q, q), 1), q.half(), q.transpose(1, 2)
    given = [(q, k, v, None), *((*three, x) for three in [(q, k, v)] for x in (out, out.half(), turned, longer))]
    given += [
        tuple(x if i == at else y for i, y in enumerate((q, k, v, None)))
        for at in range(3)
        for x in (longer, half, turned)
    ]
    keys = [inline._key_of_attention((q, k, v, None), **plain | other) for other in others]
    keys += [inline._key_of_attention(one, **plain) for one in given]
    for name, number in (("_num_threads", 77), ("limit", 5)):
        with monkeypatch.context() as patch:
            patch.setattr(inline, name, lambda number=number: number)
            keys.append(inline._key_of_attention((q, k, v, None), **plain))
    assert None not in keys
    assert len({*keys}) == len(keys)


def test_attention_that_wants_a_gradient_has_it(checked):
    q = heads(1, 20, 2, 16)
    ts.attention(q, q, q)
    mine = q.clone().requires_grad_()
    ts.attention(mine, q, q).sum().backward()
    theirs = q.clone().requires_grad_()
    expected(theirs, q, q, torch.float32)[0].sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)
    assert len(checked) == 2


def test_a_failure_of_torchs_kernel_leaves_no_old_numbers(checked, monkeypatch):
    q, out = heads(1, 20, 2, 16), torch.zeros(1, 20, 2, 16)
    ts.attention(q, q, q, out=out)
    for module in (inline, attention):
        monkeypatch.setattr(module, "flash", lambda *operands: 1 / 0)
    for how in (contextlib.nullcontext, ts.trace.record):
        out.zero_()
        with how(), pytest.raises(ZeroDivisionError):
            ts.attention(q, q, q, out=out)
        assert out.isnan().all()
    assert checked == ["attention"] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (700, 0), "sinks": torch.zeros(2)}], ids=str)
def test_a_tile_has_the_same_bits_on_any_number_of_workers(options, dtype):
    q, k = heads(1, 300, 2, 16, dtype=dtype), heads(1, 1100, 1, 16, dtype=dtype)
    made = [ts.attention(q, k, k, workers=workers, return_lse=True, **options) for workers in (1, 2, 3)]
    for out, lse in made[1:]:
        assert torch.equal(out, made[0][0])
        assert torch.equal(lse, made[0][1])
    if not options:
        fine, by_torch = (expected(q, k, k, kind) for kind in (torch.float64, dtype))
        assert passes(made[0][0], fine[0], by_torch[0])


def test_keys_by_the_thousand_are_given_to_the_kernel_in_stretches(monkeypatch):
    q, k, v = heads(1, 5, 1, 16), heads(1, 1700, 1, 16), rand(1, 1700, 1, 16, seed=3)
    lengths, real = [], attention.flash
    monkeypatch.setattr(attention, "FLASH_KEYS", 1024)
    monkeypatch.setattr(attention, "flash", lambda q, k, *more: (lengths.append(k.shape[2]), real(q, k, *more))[1])
    made = ts.attention(q, k, v, workers=1)
    assert lengths == [1024, 512], "the last 164 keys fill no block"
    fine, by_torch = (expected(q, k, v, kind) for kind in (torch.float64, torch.float32))
    assert passes(made, fine[0], by_torch[0])
