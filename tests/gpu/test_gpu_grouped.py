"""Grouped matmuls on a GPU: groups of any size, by the picked kernel and the portable one, against torch.matmul."""

from __future__ import annotations

import itertools

import pytest
import torch
from gpu_runs import check_untouched, nan, rand, randn

import tilestream as ts
from error_rule import Maths, check
from grouped_cases import expected, offsets_of
from tilestream.core.operands import Epilogue, GroupedOperands
from tilestream.launch.cache import launch_cache
from tilestream.plan.grouped import plan_groups
from tilestream.runtime.driver import stream_wait, stream_write

BF16, F16, F32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
M, N, K = 1000, 328, 192
#: Sizes of eight groups: uneven; empty ones, at the ends too; all in one; none; fewer rows than there are; whole tiles.
SIZES = [
    (3, 0, 500, 1, 64, 127, 305, 0), (0, 0, 1000, 0, 0, 0, 0, 0), (0, 200, 0, 1, 0, 0, 799, 0), (0,) * 8,
    (7, 1, 129, 0, 255, 33, 2, 5), (128, 128, 128, 128, 128, 128, 128, 104),
]  # fmt: skip
FORMS = ("rows", "columns", "k")
pytestmark = pytest.mark.usefixtures("nothing_reported")


def operands(form, dtype=BF16, groups=8):
    """As a layer's and its gradients' lie."""
    if form == "rows":
        return randn(M, K, dtype=dtype), randn(groups, N, K, dtype=dtype).mT
    if form == "columns":
        return randn(groups, N, K, dtype=dtype), randn(M, K, dtype=dtype).t()
    return randn(M, K, dtype=dtype).t(), randn(M, N, dtype=dtype)


def parts(form, a, b, out, ends, bias=None, **more):
    """Each group's part of a result, and the maths that it answers."""
    begin = 0
    for group, end in enumerate(ends.tolist()):
        run = slice(begin, end)
        mine = None if bias is None else bias[group] if bias.dim() == 2 else bias[run]
        if form == "rows":
            yield out[run], Maths(a[run], b[group], mine, **more)
        elif form == "columns":
            yield out[:, run], Maths(a[group], b[:, run], mine, **more)
        else:
            yield out[group], Maths(a[:, run], b[run], mine, **more)
        begin = end


def check_all(form, a, b, out, ends, **more):
    for answer, maths in parts(form, a, b, out, ends, **more):
        check(answer, maths)
    last = int(ends[-1])
    behind = {"rows": out[last:], "columns": out[:, last:]}.get(form, out[:0])
    assert not behind.any(), "what no group has is zero"


@pytest.mark.parametrize("form", FORMS)
def test_groups_of_any_size(form, backend):
    a, b = operands(form)
    for sizes in SIZES:
        ends = offsets_of(sizes, "cuda")
        check_all(form, a, b, ts.grouped_mm(a, b, ends), ends)
    plans = [launch.plan for launch in launch_cache.of("grouped")]
    assert {plan.backend for plan in plans} <= {"hopper", "portable", "cdna"}
    if torch.cuda.get_device_capability() == (9, 0) and backend == "picked":
        assert any(plan.backend == "hopper" for plan in plans)


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_epilogue(activation, backend):
    a, b = operands("rows", F16)
    bias, ends = randn(8, N, dtype=F16), offsets_of(SIZES[4], "cuda")
    out = ts.grouped_mm(a, b, ends, bias=bias, activation=activation, out_dtype=F32)
    check_all("rows", a, b, out, ends, bias=bias, activation=activation, out_dtype=F32)


def test_a_bias_a_column_of_the_columns_form(backend):
    a, b = operands("columns")
    bias, ends = randn(M), offsets_of(SIZES[0], "cuda")
    check_all("columns", a, b, ts.grouped_mm(a, b, ends, bias=bias), ends, bias=bias)


def test_operands_of_8_bits_with_a_scale_a_row(backend):
    a, b = operands("rows", E4M3)
    scale_a, scale_b, ends = rand(M), rand(8, N), offsets_of(SIZES[0], "cuda")
    out = ts.grouped_mm(a, b, ends, scale_a=scale_a, scale_b=scale_b)
    begin = 0
    for group, end in enumerate(ends.tolist()):
        run = slice(begin, end)
        check(out[run], Maths(a[run], b[group], scale_a=scale_a[run, None], scale_b=scale_b[group, None]))
        begin = end


def ran_on(kernel):
    """Assert which kernel the last call's plan took."""
    assert {launch.plan.backend for launch in launch_cache.of("grouped")} == {kernel}


@pytest.mark.parametrize("dtype", [BF16, F16, E4M3], ids=str)
@pytest.mark.parametrize("half", [N // 2, 328, 500])
def test_swiglu_of_two_halves(half, dtype, kernel):
    a, b = randn(M, K, dtype=dtype), randn(8, 2 * half, K, dtype=dtype).mT
    for sizes in SIZES:
        ends = offsets_of(sizes, "cuda")
        check_all("rows", a, b, ts.grouped_mm(a, b, ends, activation="swiglu"), ends, activation="swiglu")
    bias, ends = randn(8, 2 * half), offsets_of(SIZES[0], "cuda")
    more = {"bias": bias, "activation": "swiglu", "out_dtype": F32}
    check_all("rows", a, b, ts.grouped_mm(a, b, ends, **more), ends, **more)
    few = offsets_of([i % 3 for i in range(8)], "cuda")
    check_all("rows", a[:8], b, ts.grouped_mm(a[:8], b, few, activation="swiglu"), few, activation="swiglu")
    ran_on(kernel)


def test_swiglu_of_outputs_of_any_strides_and_nothing_beside_them(kernel):
    a, b = randn(M, K), randn(8, 2 * N, K).mT
    ends = offsets_of(SIZES[0], "cuda")
    store = nan(M + 2, N + 24)
    out = store[1:-1, 8 : 8 + N]
    ts.grouped_mm(a, b, ends, activation="swiglu", out=out)
    check_all("rows", a, b, out, ends, activation="swiglu")
    check_untouched(out, store)
    across = nan(N, M)
    ts.grouped_mm(a, b, ends, activation="swiglu", out=across.t())
    check_all("rows", a, b, across.t(), ends, activation="swiglu")
    b = randn(8, K, 2 * N)  # whose columns lie side by side
    check_all("rows", a, b, ts.grouped_mm(a, b, ends, activation="swiglu"), ends, activation="swiglu")


def test_gradients_of_swiglu(kernel):
    a, b, ends = randn(M, K), randn(8, 2 * N, K).mT, offsets_of(SIZES[4], "cuda")
    inputs = [x.clone().requires_grad_() for x in (a, b)]
    out = ts.grouped_mm(*inputs, ends, activation="swiglu")
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, grad)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    pieces = [(maths.a @ maths.b).chunk(2, 1) for _, maths in parts("rows", *wide, out, ends)]
    whole = torch.cat([torch.nn.functional.silu(gate) * up for gate, up in pieces])
    wanted = torch.autograd.grad(whole, wide, grad[: len(whole)].double())
    for mine, reference in zip(found, wanted, strict=True):
        assert (mine.double() - reference).norm() <= 0.02 * reference.norm()


@pytest.mark.parametrize(("k", "n"), [(300, 200), (1024, 512), (128, 4096)])
def test_scales_of_blocks(k, n, kernel):
    k = k // 16 * 16
    a, b = randn(M, k, dtype=E4M3), randn(8, n, k, dtype=E4M3).mT
    of_k, of_n = -(-k // 128), -(-n // 128)
    scale_a, scale_b = rand(of_k, M).t() + 0.1, rand(8, of_n, of_k).mT + 0.1  # A's as DeepGEMM lays them out
    for sizes, activation in itertools.product(SIZES, ("none", "swiglu")):
        if activation == "swiglu" and n // 2 % 128 and kernel == "hopper":
            continue  # which goes to the portable kernel
        ends = offsets_of(sizes, "cuda")
        more = {} if activation == "none" else {"activation": activation}
        out = ts.grouped_mm(a, b, ends, scale_a=scale_a, scale_b=scale_b, **more)
        shape = GroupedOperands(a, b, out, Epilogue(activation=activation, scale_a=scale_a, scale_b=scale_b), ends)
        for answer, maths in expected(shape):
            check(answer, maths)
        assert not out[int(ends[-1]) :].any()
    few = offsets_of([1, 0, 2, 0, 0, 1, 3, 1], "cuda")
    out = ts.grouped_mm(a[:8], b, few, scale_a=scale_a[:8], scale_b=scale_b)
    for answer, maths in expected(GroupedOperands(a[:8], b, out, Epilogue(scale_a=scale_a[:8], scale_b=scale_b), few)):
        check(answer, maths)
    ran_on(kernel)


def test_equal_grouped_calls_are_native():
    from tilestream.ops import native

    if native._load() is None:
        pytest.skip("no native library")
    for form in FORMS:
        a, b = operands(form)
        ends = offsets_of(SIZES[0], "cuda")
        ts.grouped_mm(a, b, ends)
        before = native.loaded()
        assert before is not None
        assert before.try_grouped(*native._grouped_arguments(
            a, b, ends, None, None, None, None, None, True, "auto", None
        )) is not None, form  # fmt: skip
        for sizes in SIZES:
            ends = offsets_of(sizes, "cuda")
            check_all(form, a, b, ts.grouped_mm(a, b, ends), ends)


def test_equal_operands_of_rows_and_of_columns_are_two_calls():
    x, y, ends = randn(256, 192), randn(8, 192, 256), offsets_of((32,) * 6, "cuda")
    ends = torch.cat([ends, ends[-1:], ends[-1:]])
    for _ in range(3):
        check_all("rows", x, y, ts.grouped_mm(x, y, ends), ends)
        check_all("columns", y, x, ts.grouped_mm(y, x, ends), ends)


def test_many_groups(backend):
    groups = 256
    a, b = operands("rows", groups=groups)
    sizes = torch.randint(0, 9, (groups,))
    sizes[sizes.cumsum(0) > M] = 0
    ends = offsets_of(sizes.tolist(), "cuda")
    check_all("rows", a, b, ts.grouped_mm(a, b, ends), ends)
    if backend == "portable":
        b = randn(1024, N, 64).mT
        ends = offsets_of([0, 1] * 300 + [0] * 424, "cuda")
        check_all("rows", a[:, :64], b, ts.grouped_mm(a[:, :64].contiguous(), b, ends), ends)


def test_few_rows_a_group(backend):
    a, b = randn(24, K), randn(64, N, K).mT
    ends = offsets_of([i % 3 == 0 for i in range(64)], "cuda")
    check_all("rows", a, b, ts.grouped_mm(a, b, ends), ends)


@pytest.mark.parametrize("workers", [1, 7, 100])
@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_workers_and_schedules(workers, schedule):
    a, b = operands("rows")
    ends = offsets_of(SIZES[0], "cuda")
    check_all("rows", a, b, ts.grouped_mm(a, b, ends, schedule=schedule, workers=workers), ends)
    with ts.worker_limit(3):
        check_all("rows", a, b, ts.grouped_mm(a, b, ends, schedule=schedule), ends)


def test_strided_operands_and_outputs(backend):
    ends = offsets_of(SIZES[0], "cuda")
    a, b = randn(M, 2 * K + 8)[:, 8 : 8 + K], randn(8, N, K + 16)[:, :, :K].mT
    store = nan(M + 2, N + 24)
    out = store[1:-1, 8 : 8 + N]
    ts.grouped_mm(a, b, ends, out=out)
    check_all("rows", a, b, out, ends)
    check_untouched(out, store)
    odd = nan(M, 2 * N + 1)
    out = odd[:, 1 : 2 * N : 2]  # that no tensor map has
    ts.grouped_mm(a, b, ends, out=out)
    check_all("rows", a, b, out, ends)
    check_untouched(out, odd)
    across = nan(N, M)
    ts.grouped_mm(a, b, ends, out=across.t())
    check_all("rows", a, b, across.t(), ends)
    a = randn(K, M).t()
    check_all("rows", a, b, ts.grouped_mm(a, b, ends), ends)
    assert {one.plan.backend for one in launch_cache.of("grouped") if one.plan.problem.no_tma} <= {"portable"}
    a, b = randn(M + 1, K - 1)[1:, 1:], randn(8, K - 2, N)  # of extents and addresses that are multiples of nothing
    check_all("rows", a, b, ts.grouped_mm(a, b, ends), ends)


@pytest.mark.parametrize("form", ["rows", "k"])
def test_offsets_that_are_none_give_nan(form, backend):
    a, b = operands(form)
    store = nan(M + 2, N) if form == "rows" else None
    for ends in ([5, 3] + [9] * 6, [-1] + [9] * 7, [3] * 7 + [M + 1], [2**31 - 1] * 8):
        offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
        assert ts.grouped_mm(a, b, offsets).isnan().all()
        if store is not None:
            store.fill_(7.0)
            ts.grouped_mm(a, b, offsets, out=store[1:-1])
            assert store[1:-1].isnan().all()
            assert (store[[0, -1]] == 7).all()
    ends = offsets_of(SIZES[0], "cuda")
    check_all(form, a, b, ts.grouped_mm(a, b, ends), ends)  # the counters are as they were


@pytest.mark.parametrize("form", FORMS)
def test_repeated_launches_give_the_same_bits(form, backend):
    a, b = operands(form)
    all_ends = [offsets_of(sizes, "cuda") for sizes in SIZES]
    first = [ts.grouped_mm(a, b, ends) for ends in all_ends]
    for _ in range(10):
        for ends, wanted in zip(all_ends, first, strict=True):
            assert torch.equal(ts.grouped_mm(a, b, ends), wanted)


def test_two_streams(backend):
    a, b = operands("rows")
    all_ends = [offsets_of(sizes, "cuda") for sizes in SIZES]
    wanted = [ts.grouped_mm(a, b, ends) for ends in all_ends]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for i in range(24):
        with torch.cuda.stream(streams[i % 2]):
            found.append((i % 6, ts.grouped_mm(a, b, all_ends[i % 6])))
    torch.cuda.synchronize()
    for i, out in found:
        assert torch.equal(out, wanted[i])


@pytest.mark.parametrize("form", FORMS)
def test_a_graph_reads_the_offsets_of_each_replay(form, backend):
    a, b = operands(form)
    ends = offsets_of(SIZES[0], "cuda")
    ts.grouped_mm(a, b, ends)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ts.grouped_mm(a, b, ends)
    for sizes in (*SIZES, *SIZES):
        ends.copy_(offsets_of(sizes, "cuda"))
        out.fill_(float("nan"))
        graph.replay()
        check_all(form, a, b, out, ends)


def test_the_host_waits_for_nothing():
    a, b = operands("rows")
    ends = offsets_of(SIZES[0], "cuda")
    ts.grouped_mm(a, b, ends)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ts.grouped_mm(a, b, ends)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_empty_operands():
    ends = offsets_of((0, 0), "cuda")
    assert ts.grouped_mm(randn(0, K), randn(2, K, N), ends).shape == (0, N)
    assert not ts.grouped_mm(randn(9, 0), randn(2, 0, N), offsets_of((4, 5), "cuda")).any()
    assert not ts.grouped_mm(randn(9, K), randn(0, K, N), offsets_of((), "cuda").int()).any()
    assert ts.grouped_mm(randn(16, 0), randn(0, 32), ends).shape == (2, 16, 32)


@pytest.mark.parametrize("form", FORMS)
def test_gradients(form, backend):
    a, b = operands(form)
    ends = offsets_of(SIZES[4], "cuda")
    bias = randn(M) if form == "columns" else randn(8, N)
    inputs = [x.clone().requires_grad_() for x in (a, b, bias)]
    out = ts.grouped_mm(inputs[0], inputs[1], ends, bias=inputs[2], activation="silu")
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, grad)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    pieces = [maths.a @ maths.b + maths.bias for _, maths in parts(form, *wide[:2], out, ends, wide[2])]
    last = int(ends[-1])
    if form == "k":
        whole = torch.stack(pieces)
    else:
        whole = torch.cat(pieces, 0 if form == "rows" else 1)
        grad = grad[:last] if form == "rows" else grad[:, :last]
    wanted = torch.autograd.grad(torch.nn.functional.silu(whole), wide, grad.double())
    for mine, reference in zip(found, wanted, strict=True):
        assert mine.dtype == BF16
        assert (mine.double() - reference).norm() <= 0.02 * reference.norm()


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="a torch without grouped products")
@pytest.mark.parametrize("form", FORMS)
def test_as_torch_has_it(form):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("torch's own is for sm_90")
    a, b = operands(form)
    ends = offsets_of(SIZES[5], "cuda")
    theirs, ours = torch._grouped_mm(a, b, ends), ts.grouped_mm(a, b, ends)
    assert theirs.shape == ours.shape
    assert (theirs.float() - ours.float()).abs().max() <= 0.02 * theirs.float().abs().max()


def test_compiled():
    a, b = operands("rows")
    call = torch.compile(lambda a, b, ends: ts.grouped_mm(a, b, ends).relu(), fullgraph=True, backend="aot_eager")
    for sizes in SIZES[:3]:
        ends = offsets_of(sizes, "cuda")
        assert torch.equal(call(a, b, ends), ts.grouped_mm(a, b, ends).relu())


def test_the_plan_says_what_runs():
    a, b = operands("rows")
    ts.grouped_mm(a, b, offsets_of(SIZES[0], "cuda"))
    said = ts.grouped_plan(M, N, K, 8, device="cuda").explain()
    assert "grouped_mm [1000, 192] @ [8, 192, 328] by rows" in said
    assert plan_groups.cache_info().currsize


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_experts_that_arrive(sizes, where):
    """From pinned memory, offsets on the host or on the GPU; the same buffer for three layers."""
    a, ends = randn(M, K, dtype=BF16), offsets_of(sizes).cuda()
    layers = [torch.randn(8, N, K).to(BF16).pin_memory().mT for _ in range(3)]
    with ts.stream_experts(layers[0], ends.to(where), device="cuda") as stream:
        for layer, b in enumerate(layers):
            if layer:
                stream.restart(ends.to(where), b)
            out = nan(M, N, dtype=BF16)
            ts.grouped_mm(a, stream, ends, out=out)
            check_all("rows", a, b.cuda(), out, ends)
    ts.check()


def test_an_expert_that_does_not_come():
    """The copies come behind a word that is written after the deadline."""
    a, ends, b = randn(M, K, dtype=BF16), offsets_of(SIZES[0]).cuda(), torch.randn(8, N, K).to(BF16).pin_memory().mT
    on_host, word = ends.cpu(), torch.zeros(1, dtype=torch.int32, device="cuda")
    stream = ts.stream_experts(b, on_host, device="cuda")
    check_all("rows", a, b.cuda(), ts.grouped_mm(a, stream, ends), ends)  # compiled: the deadline is the kernel's alone
    late, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    stream_wait(late.cuda_stream, word.data_ptr(), 1)
    try:
        with torch.cuda.stream(late):
            stream.restart(on_host)
        out = ts.grouped_mm(a, stream, ends, deadline=0.1)
        torch.cuda.current_stream().synchronize()
        with pytest.raises(ts.ArrivalTimeout, match="weight_arrival's chunk"):
            ts.check()
        assert out.isnan().all(), "no row has an expert"
    finally:  # else nothing ever ends
        stream_write(other.cuda_stream, word.data_ptr(), 1)
    stream.wait()
    check_all("rows", a, b.cuda(), ts.grouped_mm(a, stream, ends), ends)


def test_rows_of_an_expert_that_is_not_brought_are_nan():
    a, b = randn(M, K, dtype=BF16), torch.randn(8, N, K).to(BF16).pin_memory().mT
    with ts.stream_experts(b, offsets_of(SIZES[1]), device="cuda") as stream:
        stream.wait()
        out = ts.grouped_mm(a, stream, offsets_of(SIZES[5], "cuda"), deadline=0.1)
        torch.cuda.synchronize()
        with pytest.raises(ts.ArrivalTimeout, match="weight_arrival's chunk"):
            ts.check()
        assert out[:256].isnan().all()
        assert out[384:].isnan().all()
        few = offsets_of((0, 0, M, 0, 0, 0, 0, 0), "cuda")
        check_all("rows", a, b.cuda(), ts.grouped_mm(a, stream, few), few)


def test_swiglu_of_experts_that_arrive():
    a, ends, b = randn(M, K, dtype=BF16), offsets_of(SIZES[0], "cuda"), torch.randn(8, N, K).to(BF16).pin_memory().mT
    with ts.stream_experts(b, ends, device="cuda") as stream:
        out = ts.grouped_mm(a, stream, ends, activation="swiglu")
        check_all("rows", a, b.cuda(), out, ends, activation="swiglu")
    ts.check()


def test_gradients_of_rows_whose_experts_arrive():
    """The copies are no modification of what the launch saved; other contents are one."""
    a, ends = randn(M, K, dtype=BF16).requires_grad_(), offsets_of(SIZES[0]).cuda()
    b = torch.randn(8, N, K).to(BF16).pin_memory().mT
    (wanted,) = torch.autograd.grad(ts.grouped_mm(a, b.cuda(), ends).sum(), a)
    stream = ts.stream_experts(b, ends, device="cuda")
    for where in ("cuda", "cpu", "cuda"):
        out = ts.grouped_mm(a, stream, ends)
        (found,) = torch.autograd.grad(out.sum(), a, retain_graph=True)
        assert torch.equal(found, wanted)
        stream.restart(ends.to(where))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out.sum(), a)
    stream.wait()
