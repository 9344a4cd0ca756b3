"""The public ops over the extension: which calls it makes, and which go through the registered ops."""

from __future__ import annotations

import contextlib

import pytest
import torch
from stand_ins import Launch, Matmul

import tilestream as ts
from tilestream.launch.observe import observation
from tilestream.ops import native, request
from tilestream.trace.record import record

BF16 = torch.bfloat16


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=BF16)


A, B, W, BIAS, OUT = zeros(16, 64), zeros(64, 32), zeros(32, 64), zeros(32), zeros(16, 32)
SCALES = {"scale_a": torch.ones(16, 1), "scale_b": torch.ones(1, 32)}


@pytest.fixture
def python_calls(extension, driver, monkeypatch) -> list[request.Request]:
    """The calls that were made Python's way, by a stand-in for a GPU's launch; tensors say that they are on a GPU."""
    made: list[request.Request] = []

    def launched(r: request.Request) -> torch.Tensor:
        made.append(r)
        b = r.b if r.b.dim() > 1 else r.b[:, None]
        shape = (*r.a.shape[:-1], b.shape[-1])
        out = torch.zeros(shape, dtype=r.out_dtype or r.a.dtype) if r.out is None else r.out
        x = Matmul(0, r.a.reshape(-1, r.a.shape[-1]), b.reshape(r.a.shape[-1], -1), r.bias, r.residual)
        x = x._replace(scale_a=r.scale_a, scale_b=r.scale_b, alpha=float(r.alpha), beta=float(r.beta))
        launch = Launch(driver, x)
        launch.issue(x, out)
        if (seen := observation()) is not None:
            seen.launches.append(launch)
        return out

    monkeypatch.setattr(request, "_multiply_on_gpu", launched)
    monkeypatch.setattr(request, "_multiply", launched)
    monkeypatch.setattr(native._loaded, "asked", True)
    monkeypatch.setattr(native._loaded, "extension", extension)
    monkeypatch.setattr(native._loaded, "watched", lambda: False, raising=False)
    monkeypatch.setattr(native, "allows_tf32", lambda: False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return made


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
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_second_equal_call_is_launched_natively(python_calls, driver, call):
    first = call()
    second = call()
    assert len(python_calls) == 1
    assert (second.shape, second.dtype, second.stride()) == (first.shape, first.dtype, first.stride())
    assert len(driver.launches()) == 2


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
    with around():
        ts.mm(A, B)
        ts.mm(A, B)
    assert len(python_calls) == 3


def test_autocast_and_transforms_see_a_call(python_calls, monkeypatch):
    ts.mm(A, B)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
        ts.mm(A, B)
    torch.func.vmap(lambda x: ts.mm(A, B) + x)(torch.zeros(2, 16, 32))
    assert len(python_calls) == 3


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
    ts.mm(tensors.pop("a"), tensors.pop("b"), **tensors)
    assert len(python_calls) == calls + 1
    with torch.no_grad():
        ts.mm(A.clone().requires_grad_(), B, bias=BIAS, residual=OUT)
    assert len(python_calls) == calls + 1


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
        return native._arguments("mm", a, b, None, None, None, 1.0, 1.0, None, None, None, None, True, "auto", None)

    plain = asked()
    monkeypatch.setattr(native, "allows_tf32", lambda: True)
    assert plain[1:3] == asked()[1:3] == (a, b)
    assert len(asked()) > len(plain)


def test_without_the_extension_every_call_is_pythons(python_calls, monkeypatch):
    monkeypatch.setattr(native._loaded, "extension", None)
    assert torch.equal(ts.mm(A, B), ts.mm(A, B))
    assert len(python_calls) == 2
