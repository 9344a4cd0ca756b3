"""A refused call is refused in the same words with the extension: no recipe of a right call launches a wrong one.

The refused calls are those of tests/ops. Everything in front of a GPU's launch is real; tensors say that they are on a
GPU, and the driver records.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from stand_ins import kernel, on_fake_gpu

import tilestream as ts
from tilestream.launch.launcher import VARIES, Launcher
from tilestream.launch.observe import observation
from tilestream.ops import attention_gpu, attention_request, gpu, native, request

OPS = ("matmul", "mm", "bmm", "addmm", "linear", "attention")


def module_of_tests(name: str) -> ModuleType:
    path = Path(__file__).parents[1] / "ops" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"refused_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


matmuls, attentions = module_of_tests("test_op_errors"), module_of_tests("test_attention_errors")
A, B, A8, B8, ROW, COLUMN = (getattr(matmuls, name) for name in ("A", "B", "A8", "B8", "ROW", "COLUMN"))
OUT, ROOM, HEADS = torch.zeros(6, 4), torch.zeros(64), torch.zeros(2, 6, 4, 8)


def attention(**given: Any) -> Callable[[], Any]:
    return lambda: ts.attention(**given)


WRONG: dict[str, Callable[[], Any]] = {
    **{f"{name}, row {i}": call for i, (name, call, *_) in enumerate(matmuls.BAD)},
    **{f"attention: {name}": attention(**given) for name, (given, *_) in attentions.CASES.items()},
    "out overlaps a": lambda: ts.mm(ROOM[:30].view(6, 5), B, out=ROOM[8:32].view(6, 4)),
    "out overlaps residual": lambda: ts.mm(A, B, residual=ROOM[:24].view(6, 4), out=ROOM[8:32].view(6, 4)),
    "out requires a gradient": lambda: ts.mm(A, B, out=OUT.clone().requires_grad_()),
    "attention: out is q": attention(**attentions.tensors(v=torch.zeros(2, 9, 2, 8), q=HEADS, out=HEADS)),
    "attention: out is expanded": attention(**attentions.tensors(out=torch.zeros(1, 1, 1, 16).expand(2, 6, 4, 16))),
    "attention: a scale's gradient": attention(**attentions.tensors(scale_k=torch.ones(2, requires_grad=True))),
    "attention: out= and a gradient": attention(
        **attentions.tensors(q=torch.zeros(2, 6, 4, 8, requires_grad=True), out=torch.zeros(2, 6, 4, 16))
    ),
}  # fmt: skip
#: Options of right calls: each differs from a wrong call's in what is wrong.
OF_MATMULS = (
    {}, {"bias": torch.zeros(4)}, {"residual": OUT}, {"residual": OUT, "beta": 0.5}, {"out": OUT.clone()},
    {"residual": OUT, "out": OUT.clone()}, {"activation": "relu"}, {"schedule": "static"}, {"workers": 1},
    {"workers": 2}, {"scale_a": ROW}, {"scale_b": COLUMN}, {"out_dtype": torch.float32},
)  # fmt: skip
OF_FP8 = ({}, {"scale_a": ROW}, {"scale_b": COLUMN}, {"use_fast_accum": False})
OF_ATTENTION = (
    {}, {"causal": True}, {"window": (3, 1)}, {"softcap": 2.0}, {"scale": 0.5}, {"workers": 1}, {"splits": 2},
    {"schedule": "static"}, {"sinks": torch.zeros(4)}, {"scale_k": torch.ones(2)},
)  # fmt: skip
SPACED = {"scale_a": torch.ones(6, 4)[:, :1], "out": OUT.clone(), "out_dtype": torch.float32}
RIGHT: dict[str, Callable[[], Any]] = {
    **{
        f"{op}, {a.dtype}, {', '.join(more)}": lambda op=op, a=a, b=b, more=more: getattr(ts, op)(a, b, **more)
        for op, (a, b, options) in itertools.product(("matmul", "mm"), ((A, B, OF_MATMULS), (A8, B8, OF_FP8)))
        for more in options
    },
    "a strided scale, out=": lambda: ts.matmul(A8, B8, **SPACED),
    "a scale of float32": lambda: ts.matmul(A8.float(), B8.float(), scale_b=COLUMN),
    "addmm": lambda: ts.addmm(OUT, A, B),
    "addmm, alpha": lambda: ts.addmm(OUT, A, B, alpha=0.5),
    "linear": lambda: ts.linear(A, B.t()),
    "linear, fp8": lambda: ts.linear(A8, B8.t(), scale_b=torch.ones(4, 1)),
    "bmm": lambda: ts.bmm(A[None], B[None]),
    "bmm, fp8": lambda: ts.bmm(A8[None], B8[None]),
    **{
        f"attention, {of.__name__}, {', '.join(more)}": attention(**of(**more))
        for of in (attentions.tensors, attentions.packed, attentions.paged)
        for more in OF_ATTENTION
    },
    "attention, packed, length": attention(**attentions.packed(max_seqlen_q=4)),
    "attention, out=": attention(**attentions.tensors(out=torch.zeros(2, 6, 4, 16))),
    "attention, out= like q": attention(**attentions.tensors(v=torch.zeros(2, 9, 2, 8), out=torch.zeros(2, 6, 4, 8))),
}


class PointerLaunch:
    """A launch whose kernel is given the addresses of its operands."""

    plan, needs = SimpleNamespace(), (0, 0, 0, 0, 0)

    def __init__(self, driver: Any, tensors: dict[str, torch.Tensor | None]) -> None:
        given = {name: x.data_ptr() for name, x in tensors.items() if x is not None}
        signature = {**dict.fromkeys(given, "*bf16"), "C": "constexpr"}
        Launcher(kernel(driver, signature, {}, []), (1, 1, 1), [*[VARIES] * len(given), None])(0, *given.values())
        if (seen := observation()) is not None:
            seen.launches.append(self)


@pytest.fixture
def on_gpu(extension, driver, monkeypatch) -> None:
    """Tensors say that they are on a GPU, where a launch gives the driver addresses."""

    def multiplied(x, *_):
        e = x.epilogue
        names = {"a": x.a, "b": x.b, "out": x.out, "bias": e.bias, "residual": e.residual}
        PointerLaunch(driver, {**names, "row_scale": e.scale_a, "column_scale": e.scale_b})

    def attended(x, *_):
        PointerLaunch(driver, {name: tensor for name, tensor in x._asdict().items() if name != "scale"})

    monkeypatch.setattr(gpu, "run", multiplied)
    monkeypatch.setattr(attention_gpu, "run", attended)
    for module in (request, attention_request):
        monkeypatch.setattr(module, "_signature", lambda r: None, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    on_fake_gpu(monkeypatch, None)


def said(call: Callable[[], Any]) -> str:
    """How a call is refused; empty if it is not."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Caught(Exception):
    """A public op was called."""


def with_less(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """The call of a public op without one or two of its keyword arguments: without what is wrong, for one."""
    caught: list[Any] = []

    def catch(op: str) -> Callable[..., Any]:
        def caught_(*args: Any, **options: Any) -> Any:
            caught.append((op, args, options))
            raise Caught

        return caught_

    with monkeypatch.context() as patch, contextlib.suppress(Exception):
        for op in OPS:
            patch.setattr(ts, op, catch(op))
        call()
    for op, args, options in caught:
        for count in (1, 2):
            for left_out in itertools.combinations(options, count):
                rest = {name: value for name, value in options.items() if name not in left_out}
                yield lambda op=op, args=args, rest=rest: getattr(ts, op)(*args, **rest)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_wrong_call_is_refused_as_without_the_extension(on_gpu, extension, driver, monkeypatch):
    def outcome(name: str) -> tuple[str, int]:
        before = len(driver.launches())
        return said(WRONG[name]), len(driver.launches()) - before

    expected = {name: outcome(name) for name in WRONG}
    # On a GPU the contents of lists are the kernel's: such calls are right there.
    wrong = {name: found for name, found in expected.items() if found[0]}
    assert len(wrong) >= len(WRONG) - 12, sorted(set(WRONG) - set(wrong))
    assert not [name for name, (_, launches) in wrong.items() if launches]
    monkeypatch.setattr(native._loaded, "extension", extension)
    neighbours = [less for call in WRONG.values() for less in with_less(call, monkeypatch)]
    for call in (*RIGHT.values(), *neighbours):
        for _ in range(2):
            said(call)
    assert len(extension) >= len(RIGHT), "recipes of right calls"
    assert not [name for name, call in RIGHT.items() if said(call)]
    found = {name: outcome(name) for name in wrong}
    assert {name: (found[name], wrong[name]) for name in wrong if found[name] != wrong[name]} == {}


@pytest.mark.parametrize("call", RIGHT.values(), ids=RIGHT)
def test_a_right_call_of_these_is_launched_natively(on_gpu, extension, driver, monkeypatch, call):
    monkeypatch.setattr(native._loaded, "extension", extension)
    call()
    monkeypatch.setattr(gpu, "run", None)
    monkeypatch.setattr(attention_gpu, "run", None)
    call()
    assert len(driver.launches()) == 2
