"""Launches: order of work, streams, workspaces, graphs, what is allocated and kept.

Each test runs the kernel that the plan picks, and the portable one. `test_gpu_hopper` has more of Hopper's.
"""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
from gpu_cases import BF16, E4M3, E5M2, F32, KINDS
from gpu_runs import Differences, captured, check_allocations, nan, on_two_streams, poison, randn

import tilestream as ts
from device_order import check_order
from error_rule import ACTIVATIONS, Maths, check
from tilestream.core.operands import Epilogue, GemmOperands
from tilestream.launch.gemm_arguments import Layout
from tilestream.launch.launch import Probe
from tilestream.launch.portable.launch import GemmLaunch
from tilestream.runtime import device_workspace as workspaces

pytestmark = pytest.mark.usefixtures("backend")


def operands(m=1000, n=1104, k=512):
    return randn(m, k), randn(k, n)


@pytest.mark.parametrize("queues", [None, 2, 7], ids=lambda q: f"{q or 1}q")
@pytest.mark.parametrize("workers", [1, 5, 37, 132])
def test_device_order_is_the_hosts(kind, workers, queues, backend):
    if backend != "portable":
        pytest.skip("Hopper's is in test_gpu_hopper")
    if queues and kind != "dynamic":
        pytest.skip("only dynamic has several queues")
    m, n, k = 1000, 1400, 512
    plan = ts.plan(m, n, k, dtype=BF16, device="cuda", schedule=kind, workers=workers, queues=queues, tile=(64, 64))
    a, b = operands(m, n, k)
    for _ in range(3):  # on counters as the launch before left them
        out = nan(m, n)
        probe = Probe(workers, 4096, a.device)
        launch = GemmLaunch(plan, Layout((0, *a.stride()), (0, *b.stride()), (0, *out.stride())))
        launch(GemmOperands(a, b, out, Epilogue()), probe=probe)
        check_order(plan.schedule, [probe.log(worker) for worker in range(workers)])
        check(out, Maths(a, b))


def test_own_order_of_tiles(kind):
    m, n, k = 500, 700, 128
    tiles = -(-m // 64) * -(-n // 64)
    order = torch.randperm(tiles).tolist()
    plan = ts.plan(m, n, k, dtype=BF16, device="cuda", schedule=kind, tile=(64, 64), order=order)
    a, b = operands(m, n, k)
    check(plan.run(a, b), Maths(a, b))


def test_a_thousand_launches_on_one_workspace():
    shapes = [operands(700 + 64 * i, 904, 256) for i in range(4)]
    want = [ts.matmul(a, b, schedule="static") for a, b in shapes]
    before = len(workspaces._workspaces)
    wrong = Differences()
    for i in range(1000):
        a, b = shapes[i % 4]
        out = nan(a.shape[0], b.shape[1])
        ts.matmul(a, b, out=out, schedule=KINDS[1 + i % 2], workers=(132, 17, 101)[i % 3])
        wrong.add((out - want[i % 4]).abs().nan_to_num(1e9) > 1)
    assert wrong.none()
    assert len(workspaces._workspaces) <= before + 1


def test_two_streams(kind):
    pairs = [operands(904 + 100 * i, 1304, 512) for i in range(2)]
    results = on_two_streams([functools.partial(ts.matmul, *pair, schedule=kind, workers=60) for pair in pairs])
    for (a, b), outs in zip(pairs, results, strict=True):
        check(outs[0], Maths(a, b))
        assert all(torch.equal(out, outs[0]) for out in outs)


def test_a_hundred_replays_of_a_graph(kind):
    a, b = operands()
    bias = randn(1104)
    ts.matmul(a, b, bias=bias, schedule=kind)  # compiled before it is captured
    with captured() as graph:
        out = ts.matmul(a, b, bias=bias, schedule=kind)
        twice = ts.matmul(out.t(), a, schedule=kind) if kind == "static" else None
    other = ts.matmul(a, b, schedule=kind)
    for i in range(100):
        a.normal_()
        poison(out)
        graph.replay()
        if i % 7 == 0:
            other = ts.matmul(a, b, schedule=kind)  # eager launches in between
        if i % 10 == 0:
            check(out, Maths(a, b, bias))
    check(out, Maths(a, b, bias))
    assert other.shape == out.shape
    assert twice is None or torch.isfinite(twice).all()


def test_graphs_and_eager_launches_share_no_words():
    a, b = operands()
    ts.matmul(a, b, schedule="dynamic")
    with captured() as graph:
        first = ts.matmul(a, b, schedule="dynamic")
        second = ts.matmul(a, b, schedule="stream_k")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(50):
        poison(first)
        poison(second)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            third = ts.matmul(a, b, schedule="dynamic")
        graph.replay()
        torch.cuda.synchronize()
        for out in (first, second, third):
            assert (out - first).abs().max() <= 1
    check(first, Maths(a, b))


def test_stream_k_gives_the_same_bits_each_run():
    a, b = operands(1000, 1104, 4096)
    first = ts.matmul(a, b, schedule="stream_k")
    assert all(torch.equal(ts.matmul(a, b, schedule="stream_k"), first) for _ in range(50))


def test_a_call_allocates_its_output_and_nothing_else(kind):
    a, b = operands()
    out = ts.matmul(a, b, schedule=kind)
    check_allocations(lambda: ts.matmul(a, b, out=out, schedule=kind), lambda: ts.matmul(a, b, schedule=kind))


def test_caches_hold_no_tensor_alive():
    a, b = operands()
    refs = [weakref.ref(a), weakref.ref(b)]
    out = ts.matmul(a, b, residual=torch.ones(1000, 1104, device="cuda", dtype=a.dtype), activation="gelu")
    refs.append(weakref.ref(out))
    del a, b, out
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


def test_a_call_like_an_earlier_one_is_looked_up_and_still_right():
    from tilestream.launch.cache import launch_cache

    a, b = operands(300, 200, 104)
    epilogue = {"bias": randn(200), "activation": "relu"}

    def check_call(x):
        check(ts.matmul(x, b, **epilogue), Maths(a, b, **epilogue))

    for _ in range(3):
        a.normal_()
        check_call(a)
    known = len(launch_cache.of("call"))
    # Other strides, addresses and dtypes are other calls.
    check_call(a.t().contiguous().t())
    check_call(torch.empty(300 * 104 + 1, device="cuda", dtype=BF16)[1:].view(300, 104).copy_(a))
    check(ts.matmul(a, b, out_dtype=F32), Maths(a, b, out_dtype=F32))
    assert len(launch_cache.of("call")) == known + 3
    # A dispatch mode of torch's sees the op; autograd works.
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        ts.matmul(a, b, **epilogue)
    assert counter.get_total_flops() == 2 * 300 * 200 * 104
    assert ts.matmul(a, b.clone().requires_grad_(), **epilogue).requires_grad
    with torch.autocast("cuda", torch.float16):
        assert ts.matmul(a, b, **epilogue).dtype == torch.float16
    with torch.inference_mode():
        assert ts.matmul(a, b, **epilogue).is_inference()


@pytest.mark.parametrize("form", ["tensor", "row", "vector"])
def test_a_call_on_8_bits_like_an_earlier_one_is_looked_up_and_still_right(form):
    from tilestream.launch.cache import launch_cache

    def scales():
        row, column = torch.rand(300, 1, device="cuda"), torch.rand(1, 208, device="cuda")
        if form == "tensor":
            row, column = row[:1], column[0, :1]
        return {"scale_a": row, "scale_b": column}

    def call(a, b, scale_a, scale_b, **how):
        given = (scale_a[:, 0], scale_b[0]) if form == "vector" else (scale_a, scale_b)
        answer = ts.matmul(a, b, scale_a=given[0], scale_b=given[1], **how)
        check(answer, Maths(a, b, scale_a=scale_a, scale_b=scale_b, fast_accum=how.get("use_fast_accum", True)))

    a, b = randn(300, 128, dtype=E4M3), randn(208, 128, dtype=E4M3)
    first = scales()
    call(a, b.t(), **first)
    known = len(launch_cache.of("call"))
    for _ in range(3):
        a.copy_(randn(*a.shape, dtype=F32))
        call(a, b.t(), **scales())
    assert len(launch_cache.of("call")) == known, "the same launch, other numbers"
    call(a, b.t(), **first, use_fast_accum=False)
    call(a, b.to(E5M2).t(), **first)
    assert len(launch_cache.of("call")) == known + 2
    with pytest.raises(RuntimeError, match="matmul: scale_a requires a gradient"):
        ts.matmul(a, b.t(), scale_a=first["scale_a"].clone().requires_grad_(), scale_b=first["scale_b"])


def test_opcheck():
    a, b = (t.requires_grad_() for t in operands(70, 90, 40))
    bias = randn(90).requires_grad_()
    for schedule in ("auto", "stream_k"):
        torch.library.opcheck(
            torch.ops.tilestream.gemm.default, (a, b, bias, None, 1.0, 1.0, "gelu", None, schedule, 0)
        )
    out = nan(70, 90)
    with torch.no_grad():
        torch.library.opcheck(
            torch.ops.tilestream.gemm_out.default,
            (a.detach(), b.detach(), None, None, 1.0, 1.0, "none", None, "auto", 0, out),
        )


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
def test_gradients(activation):
    tensors = [randn(*shape, dtype=F32) for shape in ((130, 96), (96, 70), (70,))]

    def grads(op, dtype):
        leaves = [t.detach().clone().to(dtype).requires_grad_() for t in tensors]
        op(*leaves).square().sum().backward()
        return [leaf.grad for leaf in leaves]

    mine = grads(lambda a, b, c: ts.matmul(a, b, bias=c, activation=activation), torch.float32)
    want = grads(lambda a, b, c: ACTIVATIONS[activation](a @ b + c), torch.float64)
    for x, y in zip(mine, want, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-3 * y.abs().max().item())


def test_torch_compile():
    a, b = operands(300, 200, 104)
    compiled = torch.compile(lambda x, y: ts.matmul(x * 2, y, activation="relu") + 1, fullgraph=True)
    torch.testing.assert_close(compiled(a, b), torch.relu((a * 2) @ b) + 1, rtol=2e-2, atol=1e-1)


def test_what_is_not_done_raises_before_anything_runs():
    a, b = operands(64, 64, 64)
    with pytest.raises(NotImplementedError, match="float64 on a GPU"):
        ts.matmul(a.double(), b.double())
    with pytest.raises(ValueError, match="one device"):
        ts.matmul(a, b.cpu())
    with pytest.raises(ValueError, match="overlaps"):
        ts.matmul(a, b, out=a)


def test_plan_explains_itself():
    text = ts.plan(4096, 4096, 4096, dtype=BF16, device="cuda").explain()
    assert "backend   " in text
    assert "refused" in text


def test_out_may_be_the_residual():
    a, b = operands()
    c = randn(1000, 1104)
    maths = Maths(a, b, residual=c.clone(), beta=2.0)
    ts.matmul(a, b, residual=c, beta=2.0, out=c)
    check(c, maths)
