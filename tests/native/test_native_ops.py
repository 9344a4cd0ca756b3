"""The public ops over the extension: which calls it makes, and which go through the registered ops."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from stand_ins import Attention, AttentionLaunch, Grouped, Launch, Matmul, Merge, on_fake_gpu
from torch.fx.experimental.proxy_tensor import make_fx

import tilestream as ts
from tilestream.launch.observe import observation
from tilestream.ops import attention_library, attention_merge, attention_request, grouped, library, native, request
from tilestream.ops.attention_operands import Settings
from tilestream.trace.record import record

BF16 = torch.bfloat16


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=BF16)


A, B, W, BIAS, OUT = zeros(16, 64), zeros(64, 32), zeros(32, 64), zeros(32), zeros(16, 32)
SCALES = {"scale_a": torch.ones(16, 1), "scale_b": torch.ones(1, 32)}


@pytest.fixture
def python_calls(extension, driver, monkeypatch) -> list[object]:
    """The calls that were made Python's way, by a stand-in for a GPU's launch; tensors say that they are on a GPU."""
    made: list[object] = []

    def observed(launch: object) -> None:
        if (seen := observation()) is not None:
            seen.launches.append(launch)

    def multiplied(r: request.Request) -> torch.Tensor:
        made.append(r)
        b = r.b.t() if r.op == "linear" else r.b
        b = b if b.dim() > 1 else b[:, None]
        shape = (*r.a.shape[:-1], b.shape[-1])
        out = torch.zeros(shape, dtype=r.out_dtype or r.a.dtype) if r.out is None else r.out
        x = Matmul(0, r.a.reshape(-1, r.a.shape[-1]), b.reshape(r.a.shape[-1], -1), r.bias, r.residual)
        x = x._replace(scale_a=r.scale_a, scale_b=r.scale_b, alpha=float(r.alpha), beta=float(r.beta))
        launch = Launch(driver, x)
        launch.issue(x, out)
        observed(launch)
        return out

    def attended(r: attention_request.AttentionRequest) -> attention_request.Answer:
        r.check()
        made.append(r)
        out = torch.zeros_like(r.q) if r.out is None else r.out
        lse = torch.zeros(r.q.shape[:-1]) if r.return_lse else None
        x = Attention(**{name: getattr(r, name) for name in r._fields[:11]})
        launch = AttentionLaunch(driver, x, r.return_lse)
        launch.issue(x, out, lse)
        observed(launch)
        return out if lse is None else (out, lse)

    def merged(o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor) -> tuple:
        """The registered op, which is given log-sum-exps in the order of the outputs' rows."""
        made.append("merge")
        out, lse = torch.zeros_like(o_a), torch.zeros_like(lse_a)
        x = Merge(o_a, lse_a, o_b, lse_b)
        launch = AttentionLaunch(driver, x, lse=True)
        launch.issue(x, out, lse)
        observed(launch)
        return out, lse

    def by_groups(a, b, offsets, out, bias, activation, out_dtype, scale_a, scale_b, *others) -> torch.Tensor:
        made.append("grouped")
        columns = b.shape[-1] // (2 if activation == "swiglu" else 1)
        shape = (a.shape[-2], columns) if b.dim() + a.dim() == 5 else (len(offsets), a.shape[0], columns)
        result = torch.zeros(shape, dtype=out_dtype or a.dtype) if out is None else out
        x = Grouped(a, b, offsets, 0, bias, scale_a, scale_b)
        if a.dim() == 3:
            x = Grouped(b, a, offsets, 0, bias, scale_b, scale_a)
        launch = AttentionLaunch(driver, x)
        launch.issue(x, result)
        observed(launch)
        return result

    monkeypatch.setattr(grouped, "_grouped", by_groups)
    monkeypatch.setattr(attention_merge, "merge_attention_op", merged)
    monkeypatch.setattr(request, "_multiply", multiplied)
    monkeypatch.setattr(attention_request, "_attend", attended)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    on_fake_gpu(monkeypatch, extension)
    return made


Q, K, V, SINKS, HEADS = zeros(2, 8, 4, 16), zeros(2, 8, 2, 16), zeros(2, 8, 2, 16), torch.zeros(4), torch.ones(2)
ENDS, ROWS, PAGES = (torch.zeros(*shape, dtype=torch.int32) for shape in ((3,), (2,), (2, 4)))
LSE = torch.zeros(2, 4, 8)
EXPERTS, OFFSETS = zeros(3, 64, 32), torch.zeros(3, dtype=torch.int32)
CALLS = {
    "mm": lambda: ts.mm(A, B),
    "mm, bias": lambda: ts.mm(A, B, bias=BIAS),
    "mm, scale_b": lambda: ts.mm(A, B, scale_b=torch.ones(1, 32)),
    "mm, out=": lambda: ts.mm(A, B, out=OUT),
    "mm, schedule": lambda: ts.mm(A, B, schedule="stream_k"),
    "mm, workers": lambda: ts.mm(A, B, workers=3),
    "mm, not fast": lambda: ts.mm(A, B, use_fast_accum=False),
    "matmul": lambda: ts.matmul(A, B),
    "matmul, all": lambda: ts.matmul(A, B, bias=BIAS, residual=OUT, beta=0.5, activation="gelu", **SCALES),
    "matmul, out=": lambda: ts.matmul(A, B, out=OUT, out_dtype=BF16),
    "matmul, 3-D": lambda: ts.matmul(zeros(2, 8, 64), B),
    "bmm": lambda: ts.bmm(zeros(1, 16, 64), zeros(1, 64, 32)),
    "addmm": lambda: ts.addmm(OUT, A, B, alpha=0.5, beta=2),
    "linear": lambda: ts.linear(A, W),
    "linear, 3-D, bias": lambda: ts.linear(zeros(2, 8, 64), W, BIAS, activation="relu"),
    "linear, a scale a row of the weight": lambda: ts.linear(A, W, scale_b=torch.ones(32, 1)),
    "grouped": lambda: ts.grouped_mm(A, EXPERTS, OFFSETS),
    "grouped, columns": lambda: ts.grouped_mm(EXPERTS.mT, A.t(), OFFSETS),
    "grouped, K": lambda: ts.grouped_mm(A, B, OFFSETS),
    "grouped, out=": lambda: ts.grouped_mm(A, EXPERTS, OFFSETS, out=OUT),
    "grouped, swiglu": lambda: ts.grouped_mm(A, EXPERTS, OFFSETS, activation="swiglu"),
    "grouped, all": lambda: ts.grouped_mm(
        A, EXPERTS, OFFSETS, bias=zeros(3, 32), activation="gelu", scale_a=SCALES["scale_a"], scale_b=torch.ones(3, 32)
    ),
    "grouped, a scale a column": lambda: ts.grouped_mm(EXPERTS.mT, A.t(), OFFSETS, scale_b=torch.ones(16)),
    "grouped, workers": lambda: ts.grouped_mm(A, EXPERTS, OFFSETS, workers=3, schedule="static"),
    "grouped, not fast": lambda: ts.grouped_mm(A, EXPERTS, OFFSETS, use_fast_accum=False),
    "attention": lambda: ts.attention(Q, K, V),
    "attention, causal": lambda: ts.attention(Q, K, V, causal=True),
    "attention, top left": lambda: ts.attention(Q, K, V, causal="top_left"),
    "attention, [B, H, S, D]": lambda: ts.attention(Q, K, V, layout="bhsd"),
    "attention, lse": lambda: ts.attention(Q, K, V, return_lse=True)[0],
    "attention, out=": lambda: ts.attention(Q, K, V, out=zeros(2, 8, 4, 16)),
    "attention, out= and lse": lambda: ts.attention(Q, K, V, out=zeros(2, 8, 4, 16), return_lse=True)[0],
    "attention, sinks": lambda: ts.attention(Q, K, V, sinks=SINKS),
    "attention, a scale a head of k": lambda: ts.attention(Q, K, V, scale_k=HEADS),
    "attention, a scale a head of v": lambda: ts.attention(Q, K, V, scale_v=HEADS),
    "attention, a window": lambda: ts.attention(Q, K, V, window=(4, 0)),
    "attention, keys before": lambda: ts.attention(Q, K, V, window=(4, None)),
    "attention, a soft cap": lambda: ts.attention(Q, K, V, softcap=30),
    "attention, a scale": lambda: ts.attention(Q, K, V, scale=0.5),
    "attention, a scale of 0": lambda: ts.attention(Q, K, V, scale=0),
    "attention, packed": lambda: ts.attention(Q[0], K[0], V[0], cu_seqlens_q=ENDS, cu_seqlens_k=ENDS),
    "attention, packed, lengths": lambda: ts.attention(Q[0], K[0], V[0], cu_seqlens_q=ENDS, max_seqlen_q=8),
    "attention, packed, other lengths": lambda: ts.attention(Q[0], K[0], V[0], cu_seqlens_q=ENDS, max_seqlen_k=8),
    "attention, pages": lambda: ts.attention(Q, K, V, block_table=PAGES, seqlens_k=ROWS),
    "attention, lengths": lambda: ts.attention(Q, K, V, seqlens_k=ROWS),
    "attention, workers": lambda: ts.attention(Q, K, V, workers=3),
    "attention, splits": lambda: ts.attention(Q, K, V, splits=3),
    "attention, schedule": lambda: ts.attention(Q, K, V, schedule="static"),
    "merge": lambda: ts.merge_attention(Q, LSE, Q, LSE)[0],
    "merge, [B, H, S, D]": lambda: ts.merge_attention(Q, torch.zeros(2, 8, 4), Q, torch.zeros(2, 8, 4), layout="bhsd")[
        0
    ],
    "merge, packed": lambda: ts.merge_attention(Q[0], LSE[0].t(), Q[0], LSE[0].t())[0],
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_second_equal_call_is_launched_natively(python_calls, driver, call):
    first = call()
    second = call()
    assert len(python_calls) == 1
    assert (second.shape, second.dtype, second.stride()) == (first.shape, first.dtype, first.stride())
    assert len(driver.launches()) == 2


REGISTERED = {
    "gemm": lambda: library.gemm_op(A, B, BIAS, None, 1.0, 1.0, "relu", None, "auto", 0),
    "gemm, out=": lambda: library.gemm_out_op(A, B, None, None, 1.0, 1.0, "none", None, "auto", 0, OUT),
    "gemm, workers": lambda: library.gemm_op(A, B, None, OUT, 0.5, 2.0, "none", None, "static", 3),
    "gemm of a graph": lambda: library.gemm_forward_op(A, B, BIAS, "relu"),
    "gemm of a graph, plain": lambda: library.gemm_forward_op(A, B, None, "none"),
    "attention of a graph": lambda: attention_library.attention_forward_op(
        Q, K, V, True, "top_left", 0.5, "bhsd", True
    ),
    "attention of a graph, plain": lambda: attention_library.attention_forward_op(
        Q, K, V, False, "bottom_right", 0.25, "bshd", False
    ),
    "attention": lambda: attention_library.attention_op(Q, K, V, *[None] * 8, *NUMBERS),
    "attention, lse": lambda: attention_library.attention_op(Q, K, V, *[None] * 8, *NUMBERS._replace(return_lse=True)),
    "attention, behind": lambda: attention_library.attention_op(Q, K, V, *[None] * 8, *NUMBERS._replace(layout="bhsd")),
}
NUMBERS = Settings(True, "top_left", -1, -1, 0.0, 0.25)


@pytest.fixture
def registered(python_calls, driver, monkeypatch) -> None:
    """The registered ops have stand-ins for their launches, too."""

    def run(out: torch.Tensor, fresh: bool, kind: str, args: tuple, late: tuple, optional: tuple) -> None:
        a, b, bias, residual, alpha, beta, *_ = args
        x = Matmul(0, a, b, bias, residual, *optional[:2], alpha=alpha, beta=beta)
        launched(Launch(driver, x), x, out)

    def attend(x, s: Settings, out: torch.Tensor, lse: torch.Tensor | None, *others) -> None:
        given = Attention(**dict(zip(attention_library._INPUTS, x.inputs(), strict=True)))
        launched(AttentionLaunch(driver, given, lse is not None), given, out, lse)

    def launched(launch, x, *outputs) -> None:
        python_calls.append(x)
        launch.issue(x, *outputs)
        observation().launches.append(launch)

    monkeypatch.setattr(library, "_run", run)
    monkeypatch.setattr(attention_library, "_run", attend)


@pytest.mark.parametrize("call", REGISTERED.values(), ids=REGISTERED)
def test_so_is_that_of_a_registered_op(python_calls, registered, driver, call):
    """As compiled graphs call it."""
    first, second = call(), call()
    assert len(python_calls) == 1
    assert len(driver.launches()) == 2
    for one, other in zip(
        *(answer if isinstance(answer, tuple) else (answer,) for answer in (first, second)), strict=True
    ):
        assert (one is None) == (other is None)
        assert one is None or (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
    ts.mm(A, B)
    ts.attention(Q, K, V, causal="top_left")
    assert len(python_calls) == 3, "a public op's call is another one"


def test_a_public_op_whose_registered_op_was_called_before_is_native(python_calls, driver, monkeypatch):
    """The launch of the registered op inside is observed, and not left to its own recipe."""

    def run(out: torch.Tensor, fresh: bool, kind: str, args: tuple, *others: tuple) -> None:
        python_calls.append(args)
        x = Matmul(0, args[0], args[1])
        launch = Launch(driver, x)
        launch.issue(x, out)
        observation().launches.append(launch)

    def through(r: request.Request) -> torch.Tensor:
        return library.gemm_op(r.a, r.b, None, None, 1.0, 1.0, "none", None, "auto", 0)

    monkeypatch.setattr(library, "_run", run)
    monkeypatch.setattr(request, "_multiply", through)
    for op in (ts.mm, ts.matmul):
        for _ in range(3):
            op(A, B)
    library.gemm_op(A, B, None, None, 1.0, 1.0, "none", None, "auto", 0)
    library.gemm_op(A, B, None, None, 1.0, 1.0, "none", None, "auto", 0)
    assert len(python_calls) == 3
    assert len(driver.launches()) == 8


def steps(call: Callable[[], object]) -> int:
    """Functions that Python calls for a call that has been made before: its own, and torch's."""
    counted = []
    call()
    call()
    sys.setprofile(lambda frame, event, argument: counted.append(event) if event in ("call", "c_call") else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(counted)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mode_without_gradients_takes_no_more_steps(python_calls, call, mode):
    eager = steps(call)
    with mode():
        # Of a tensor that a call makes in inference mode one thing more is asked: whether the mode is on.
        assert steps(call) <= eager + (mode is torch.inference_mode)
    assert len(python_calls) == 1


@pytest.mark.parametrize(
    ("call", "graphs"),
    [
        (lambda: ts.linear(A, W, BIAS, activation="relu"), lambda: library.gemm_forward_op(A, W.t(), BIAS, "relu")),
        (
            lambda: ts.attention(Q, K, V, causal=True, return_lse=True),
            lambda: attention_library.attention_forward_op(Q, K, V, True, "bottom_right", 0.25, "bshd", True),
        ),
    ],
    ids=["linear", "attention"],
)
def test_a_graphs_op_takes_few_more_steps_than_the_public_one(registered, call, graphs):
    public = steps(call)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            assert steps(graphs) <= public + 8


def test_no_two_of_these_calls_are_taken_for_each_other(python_calls):
    for call in CALLS.values():
        call()
    assert len(python_calls) == len(CALLS)


@pytest.mark.parametrize(
    "other",
    [
        lambda: ts.mm(A, B, bias=BIAS.float()),
        lambda: ts.mm(A, B, activation="relu"),
        lambda: ts.mm(A, B, out_dtype=torch.float32),
        lambda: ts.matmul(A, B),
        lambda: ts.mm(A, B, schedule="dynamic"),
    ],
)
def test_another_option_is_another_call(python_calls, other):
    ts.mm(A, B)
    ts.mm(A, B, bias=BIAS)
    other()
    assert len(python_calls) == 3


@pytest.mark.parametrize("more", [{}, {"workers": 3}], ids=str)
def test_groups_of_rows_and_of_columns_of_the_same_operands_are_two_calls(python_calls, more):
    """One is rows [64, 32] by [3, 32, 64], the other [3, 32, 64] by columns [64, 32]."""
    rows, experts = zeros(64, 32), zeros(3, 32, 64)
    for _ in range(2):
        assert ts.grouped_mm(rows, experts, OFFSETS, **more).shape == (64, 64)
        assert ts.grouped_mm(experts, rows, OFFSETS, **more).shape == (32, 32)
    assert len(python_calls) == 2


@pytest.mark.parametrize("name", ["a", "b", "bias", "offsets", "scale_a", "out"])
def test_a_grouped_call_of_another_type_or_with_a_gradient_is_pythons(python_calls, name):
    given = {
        "a": A, "b": EXPERTS, "offsets": OFFSETS, "bias": zeros(3, 32), "scale_a": torch.ones(16), "out": OUT,
    }  # fmt: skip
    for _ in range(2):
        ts.grouped_mm(**given)
    assert len(python_calls) == 1
    ts.grouped_mm(**given | {name: given[name].as_subclass(Other)})
    assert len(python_calls) == 2
    if name != "offsets":
        ts.grouped_mm(**given | {name: given[name].clone().requires_grad_()})
        assert len(python_calls) == 3
    ts.grouped_mm(**given)
    assert len(python_calls) == 2 + (name != "offsets")


def test_the_log_sum_exp_is_given_natively(python_calls):
    first = ts.attention(Q, K, V, return_lse=True)
    second = ts.attention(Q, K, V, return_lse=True, out=(into := zeros(2, 8, 4, 16)))
    third = ts.attention(Q, K, V, return_lse=True)
    fourth = ts.attention(Q, K, V, return_lse=True, out=into)
    assert len(python_calls) == 2
    for out, lse in (first, second, third, fourth):
        assert (out.shape, lse.shape, lse.dtype) == (Q.shape, (2, 8, 4), torch.float32)
    assert second[0] is into
    assert fourth[0] is into


def test_the_log_sum_exp_of_a_merge_is_given_natively(python_calls):
    first, second = ts.merge_attention(Q, LSE, Q, LSE), ts.merge_attention(Q, LSE, Q, LSE)
    assert len(python_calls) == 1
    assert all(lse.shape == (2, 4, 8) and lse.stride() == LSE.stride() for _, lse in (first, second))
    assert second[1].data_ptr() != first[1].data_ptr()


@pytest.mark.parametrize("which", range(4))
def test_a_gradient_of_a_merge_is_for_torch(python_calls, which):
    tensors = [Q, LSE, Q, LSE]
    for _ in range(2):
        ts.merge_attention(*tensors)
    assert len(python_calls) == 1
    tensors[which] = tensors[which].clone().requires_grad_()
    ts.merge_attention(*tensors)
    assert len(python_calls) == 2
    with torch.no_grad():
        ts.merge_attention(*tensors)
    assert len(python_calls) == 2


@pytest.mark.parametrize("which", range(4))
def test_a_merge_of_another_type_is_of_torchs_operations(python_calls, which):
    tensors = [Q, LSE, Q, LSE]
    ts.merge_attention(*tensors)
    tensors[which] = tensors[which].as_subclass(Other)
    assert isinstance(ts.merge_attention(*tensors)[0], Other)
    assert len(python_calls) == 1


@pytest.mark.parametrize("layout", ["sbhd", [], None])
def test_a_layout_of_a_merge_that_may_be_wrong_is_checked_by_python(python_calls, layout):
    ts.merge_attention(Q, LSE, Q, LSE)
    with pytest.raises(ValueError, match="merge_attention: layout="):
        ts.merge_attention(Q, LSE, Q, LSE, layout=layout)


@pytest.mark.parametrize("which", ["q", "k", "v", "sinks", "out"])
def test_a_gradient_of_attention_is_for_torch(python_calls, which):
    tensors = {"q": Q, "k": K, "v": V, "sinks": SINKS} | ({"out": zeros(2, 8, 4, 16)} if which == "out" else {})
    for _ in range(2):
        ts.attention(**tensors)
    assert len(python_calls) == 1
    tensors[which] = tensors[which].clone().requires_grad_()
    ts.attention(**tensors)
    assert len(python_calls) == 2
    with torch.no_grad():
        ts.attention(**tensors)
    assert len(python_calls) == 2


# Calls that something else has to see ---------------------------------------------------------------------------------


class Mode(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "around",
    [Mode, record, torch.autograd.forward_ad.dual_level],
    ids=["a mode", "a recording", "forward AD"],
)
def test_a_block_that_has_to_see_a_call_sees_it(python_calls, around):
    ts.mm(A, B)
    ts.mm(A, B, activation="relu")
    ts.attention(Q, K, V)
    ts.attention(Q, K, V, sinks=SINKS)
    ts.merge_attention(Q, LSE, Q, LSE)
    with around():
        for _ in range(2):
            ts.mm(A, B)
            ts.mm(A, B, out=OUT)
            ts.mm(A, B, activation="relu")
            ts.attention(Q, K, V)
            ts.attention(Q, K, V, sinks=SINKS)
        merges = python_calls.count("merge")
        ts.merge_attention(Q, LSE, Q, LSE)
        assert python_calls.count("merge") - merges == (around is not torch.autograd.forward_ad.dual_level)
    assert len(python_calls) - python_calls.count("merge") == 14


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_autocast_sees_a_call_and_has_it_launched_natively(python_calls, driver, monkeypatch, call, dtype):
    """Operands of autocast's dtype are launched as they are, others in that dtype."""
    stray = torch.set_autocast_dtype, "cuda", torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", BF16)  # whose operands need no look at their device
    try:
        with torch.autocast("cpu", dtype):
            first, second = call(), call()
    finally:
        stray[0](*stray[1:])
    assert len(python_calls) == 1
    assert len(driver.launches()) == 2
    assert (second.shape, second.dtype, second.stride()) == (first.shape, first.dtype, first.stride())
    outside = call()
    assert len(python_calls) == 1 + (dtype != BF16 and python_calls[0] != "merge")
    assert outside.dtype == BF16


def test_gradients_under_autocast_are_of_native_calls(python_calls, driver):
    x, w, bias = (torch.zeros(*shape, requires_grad=True) for shape in ((2, 8, 64), (32, 64), (32,)))
    for _ in range(2):
        with torch.autocast("cpu", BF16):
            y = ts.linear(x, w, bias)
        y.backward(torch.zeros_like(y))
        assert y.dtype == BF16
        assert [leaf.grad.dtype for leaf in (x, w, bias)] == [torch.float32] * 3
    assert len(python_calls) == 3
    assert len(driver.launches()) == 6


@pytest.mark.parametrize(
    "see",
    [
        lambda: torch.func.vmap(lambda x: ts.mm(A, B) + x)(torch.zeros(2, 16, 32)),
        lambda: make_fx(lambda a: ts.mm(a, B))(A),
        lambda: make_fx(lambda a: ts.mm(a, B), pre_dispatch=True)(A),
        lambda: ts.mm(torch._neg_view(A), B),
        lambda: ts.mm(torch._to_functional_tensor(A), B),
        lambda: ts.mm(torch._efficientzerotensor((16, 64), dtype=BF16), B),
    ],
    ids=["a transform", "a trace", "a trace above dispatch", "a negated view", "a functional tensor", "zeros"],
)
def test_what_has_to_see_a_call_sees_it(python_calls, see):
    ts.mm(A, B)
    see()
    assert len(python_calls) == 2


@pytest.mark.parametrize(
    "trace",
    [
        lambda call: make_fx(call, pre_dispatch=True)(A).graph,
        lambda call: torch.jit.trace(call, (A,), check_trace=False).graph,
    ],
    ids=["a trace above dispatch", "torch.jit"],
)
def test_no_recipe_is_made_of_a_call_that_is_traced(python_calls, driver, extension, monkeypatch, trace):
    """The graph would take it in, with the addresses of this process."""
    launch, out = Launch(driver, Matmul(0, A, B)), zeros(16, 32)

    def multiplied(r: request.Request) -> torch.Tensor:
        launch.issue(Matmul(0, r.a, r.b), out)
        observation().launches.append(launch)
        return out

    monkeypatch.setattr(request, "_multiply", multiplied)
    assert "remember" not in str(trace(lambda a: ts.mm(a, B) + a.sum()))
    assert len(driver.launches()) == 1
    assert len(extension) == 0


def test_a_factor_of_0_is_not_another_factor(python_calls):
    """With it the operands are not read, whatever is in them."""
    for alpha in (0.5, 2.0, 0, 0.0, 0.5):
        ts.addmm(OUT, A, B, alpha=alpha)
    assert [r.alpha for r in python_calls] == [0.5, 0, 0.0]


@pytest.mark.parametrize("more", [{"alpha": 1e39}, {"alpha": 10**400}, {"beta": -1e39}], ids=["alpha", "int", "beta"])
def test_a_factor_beyond_float32_is_refused_by_python(python_calls, driver, monkeypatch, more):
    """The launch of another factor would multiply by infinity."""
    factors = {"alpha": 2.0, "beta": 2.0}
    ts.addmm(OUT, A, B, **factors)
    monkeypatch.setattr(request, "_multiply", request.Request.check)
    with pytest.raises(ValueError, match=r"it is applied in float32, and at most 3\.4e\+38"):
        ts.addmm(OUT, A, B, **factors | more)
    assert len(driver.launches()) == 1


def test_a_written_output_is_another_version(python_calls):
    for _ in range(2):
        before = OUT._version
        ts.mm(A, B, out=OUT)
    assert len(python_calls) == 1
    assert OUT._version > before


def test_an_output_of_inference_mode_is_written_there_alone(python_calls, driver):
    with torch.inference_mode():
        out, heads = zeros(16, 32), zeros(2, 8, 4, 16)
        for _ in range(2):
            ts.mm(A, B, out=out)
            ts.attention(Q, K, V, out=heads)
    assert len(python_calls) == 2
    ts.mm(A, B, out=out)
    with pytest.raises(RuntimeError, match="out: Inplace update to inference tensor outside InferenceMode"):
        ts.attention(Q, K, V, out=heads)
    assert len(python_calls) == 3, "Python refuses it; of a product this fixture leaves the checks out"


@pytest.mark.parametrize("number", [np.float32, np.float64, np.int64])
def test_numbers_of_numpy_are_native(python_calls, driver, number):
    for _ in range(2):
        ts.addmm(OUT, A, B, alpha=number(2), beta=number(3))
        ts.attention(Q, K, V, scale=number(1), softcap=number(30))
    assert len(python_calls) == 2
    ts.addmm(OUT, A, B, alpha=2.0, beta=3.0)
    ts.attention(Q, K, V, scale=1.0, softcap=30.0)
    assert len(python_calls) == 2, "the same key"


def test_a_limit_is_a_part_of_the_key(python_calls):
    ts.mm(A, B)
    with ts.worker_limit(3):
        ts.mm(A, B)
        assert len(python_calls) == 2
        ts.mm(A, B)
        assert len(python_calls) == 2
    ts.mm(A, B)
    assert len(python_calls) == 2


@pytest.mark.parametrize("which", ["a", "b", "bias", "residual", "out"])
def test_a_gradient_is_for_torch(python_calls, which):
    ts.mm(A, B, bias=BIAS, residual=OUT)
    ts.mm(A, B, bias=BIAS, residual=zeros(16, 32), out=OUT)
    tensors = {"a": A, "b": B, "bias": BIAS, "residual": zeros(16, 32)} | ({"out": OUT} if which == "out" else {})
    tensors[which] = tensors[which].clone().requires_grad_()
    calls = len(python_calls)
    made = ts.mm(tensors.pop("a"), tensors.pop("b"), **tensors)
    assert len(python_calls) == calls + (which == "out"), "what autograd alone sees is launched natively within it"
    assert made.requires_grad
    with torch.no_grad():
        ts.mm(A.clone().requires_grad_(), B, bias=BIAS, residual=OUT)
    assert len(python_calls) == calls + (which == "out")


class Other(torch.Tensor):
    """A tensor that another type says more of."""


@pytest.mark.parametrize(
    "call",
    [
        lambda: ts.mm(A.as_subclass(Other), B), lambda: ts.mm(A, B, bias=BIAS.as_subclass(Other)),
        lambda: ts.mm(A, B, beta=True), lambda: ts.mm(A, B, activation=["relu"]),
        lambda: ts.mm(A, B, schedule="other"), lambda: ts.mm(A, B, out_dtype=5), lambda: ts.mm(A, B, workers=0),
        lambda: ts.mm(A, B, workers=True), lambda: ts.mm(A, B, use_fast_accum=1),
        lambda: ts.mm(A, B, deadline=3.0), lambda: ts.matmul(A, B, beta=torch.tensor(1.0)),
    ],
)  # fmt: skip
def test_an_argument_that_may_be_wrong_is_checked_by_python(python_calls, call):
    ts.mm(A, B)
    ts.mm(A, B, bias=BIAS)
    ts.matmul(A, B)
    with contextlib.suppress(TypeError, ValueError, RuntimeError, AttributeError):
        call()
    assert len(python_calls) == 4


@pytest.mark.parametrize(
    "more",
    [
        {"k": K.as_subclass(Other)}, {"sinks": SINKS.as_subclass(Other)}, {"causal": 0}, {"causal": "other"},
        {"layout": "sbhd"}, {"layout": []}, {"return_lse": 0}, {"schedule": "stream_k"}, {"window": (True, 4)},
        {"window": [4, 0]}, {"window": (-2, 0)}, {"window": (4,)}, {"softcap": 0.0}, {"softcap": True}, {"scale": "1"},
        {"scale": 10**400}, {"softcap": 1e39},
        {"max_seqlen_q": 0.0}, {"max_seqlen_k": -1}, {"workers": 0}, {"workers": True}, {"splits": 0}, {"splits": 1.0},
        {"deadline": 3.0},
    ],
    ids=str,
)  # fmt: skip
def test_an_argument_of_attention_that_may_be_wrong_is_checked_by_python(python_calls, monkeypatch, more):
    plain = {"q": Q, "k": K, "v": V}
    for given in (plain, {**plain, "sinks": SINKS}, {**plain, "window": (4, 0)}):
        ts.attention(**given)
    seen = []
    monkeypatch.setattr(attention_request, "_attend", seen.append)
    with contextlib.suppress(TypeError, ValueError):
        ts.attention(**plain | more)
    assert len(seen) == 1


def test_what_the_extension_cannot_do_is_done_by_python(python_calls, driver):
    ts.mm(A, B)
    driver.state(launch=700)
    native._loaded.extension.clear()
    driver.state()
    ts.mm(A, B)
    assert len(python_calls) == 2


def test_profilers_of_triton_see_every_launch(python_calls, monkeypatch):
    ts.mm(A, B)
    monkeypatch.setattr(native._loaded, "watched", lambda: True)
    ts.mm(A, B)
    assert len(python_calls) == 2


def test_an_earlier_launch_that_failed_is_raised_first(python_calls, monkeypatch):
    ts.mm(A, B)

    def failed(index):
        raise ts.ArrivalTimeout("mm", 0, 0, (0, 0), 1.0, 1.0)

    monkeypatch.setattr(native, "check_device", failed)
    with pytest.raises(ts.ArrivalTimeout):
        ts.mm(A, B)
    assert len(python_calls) == 1


def test_rounding_to_tf32_is_another_call(python_calls, monkeypatch):
    a, b = torch.zeros(16, 64), torch.zeros(64, 32)

    def asked() -> tuple:
        return native._arguments("mm", a, b, None, None, 1.0, 1.0, None, None, None, None, True, "auto", None)

    exact = asked()
    monkeypatch.setattr(native, "allows_tf32", lambda: True)
    assert exact[1:3] == asked()[1:3] == (a, b)
    assert asked() != exact


def test_without_the_extension_every_call_is_pythons(python_calls, monkeypatch):
    monkeypatch.setattr(native._loaded, "extension", None)
    assert torch.equal(ts.mm(A, B), ts.mm(A, B))
    assert len(python_calls) == 2
