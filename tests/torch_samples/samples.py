"""Torch's own samples of matmuls and of attention (its OpInfo database), through this project's ops on the CPU.

Each check compares one call with torch's: ids such as ``out/matmul/float32/3/column-major``. What differs is listed in
``differences.json``, by patterns of ids, each list with its reason. A pattern is exact: every check it matches differs,
and every check that differs is matched. So the list can only shrink: an entry that no longer holds fails the test.

``python tests/torch_samples/samples.py`` runs every check and writes the counts into docs/torch_samples.md;
``--differences [PATTERN]`` prints what differs instead, and ``--time`` the seconds of each check.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_methods_invocations import op_db

import tilestream as ts
from error_rule import DTYPES, errors, one_ulp

Tensors = tuple[torch.Tensor, ...]
Op = Callable[..., torch.Tensor]
#: A difference in one line; empty: as torch has it.
Verdict = str

HERE = Path(__file__).resolve().parent
DIFFERENCES = HERE / "differences.json"
PAGE = HERE.parents[1] / "docs" / "torch_samples.md"


class Sample(NamedTuple):
    """One sample of an op and a dtype: the tensors, and both ops, which take them and what a check adds."""

    op: str
    name: str  # "op/dtype/number"
    tensors: Tensors
    ours: Op
    torchs: Op

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[-1].dtype

    @property
    def attends(self) -> bool:
        return self.op == "scaled_dot_product_attention"

    @property
    def fine(self) -> Sample:
        """The same of float64."""
        return self.of(tuple(x.double() for x in self.tensors))

    def of(self, tensors: Tensors) -> Sample:
        return self._replace(tensors=tensors)

    def compare(self, mine: Any, torchs: Any, fine: Any = None, strides: bool = True) -> Verdict:
        """`differs`, for these operands."""
        scale = max(x.detach().abs().max().item() for x in self.tensors) if self.attends else 0.0
        return differs(mine, torchs, fine, strides, scale)


Check = Iterator[tuple[str, Callable[[], Verdict]]]


# Samples --------------------------------------------------------------------------------------------------------------


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = False, dropout_p: float = 0.0, **more: Any
) -> torch.Tensor:
    """`tilestream.attention` called as torch's function is: queries and keys broadcast, a batch may be missing."""
    assert not dropout_p
    if not all(isinstance(x, torch.Tensor) and x.dim() >= 3 for x in (q, k, v)):
        return ts.attention(q, k, v, layout="bhsd")
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    q, k, v = (x.expand(*batch, *x.shape[-2:]) for x in (q, k, v))
    q, k, v = (x if x.dim() == 4 else x.unsqueeze(0) for x in (q, k, v))
    out = ts.attention(q, k, v, layout="bhsd", causal="top_left" if is_causal else False, **more)
    return out if len(batch) == 2 else out.squeeze(0)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **more: Any) -> torch.Tensor:
    return ts.linear(x, weight, bias, **more)


OURS: dict[str, Op] = {
    "mm": ts.mm, "addmm": ts.addmm, "bmm": ts.bmm, "mv": ts.matmul, "matmul": ts.matmul,
    "nn.functional.linear": _linear, "nn.functional.scaled_dot_product_attention": _attention,
}  # fmt: skip


def _has_form(kwargs: dict[str, Any]) -> bool:
    """Whether `tilestream.attention` has such a call: it has no mask of the caller's, and no dropout."""
    return "attn_mask" not in kwargs and not kwargs.get("dropout_p")


def _bound(op: Op, kwargs: dict[str, Any]) -> Op:
    return lambda *tensors, **more: op(*tensors, **kwargs, **more)


@cache
def samples(dtype: torch.dtype) -> tuple[Sample, ...]:
    """Every sample of a dtype."""
    made = []
    for info in op_db:
        if info.name not in OURS or dtype not in info.dtypes:
            continue
        name = ".".join(filter(None, (info.name.removeprefix("nn.functional."), info.variant_test_name)))
        torch.manual_seed(0)
        for number, sample in enumerate(info.sample_inputs("cpu", dtype)):
            if not _has_form(sample.kwargs):
                continue
            made.append(
                Sample(
                    name, f"{name}/{str(dtype)[6:]}/{number}", (sample.input, *sample.args),
                    _bound(OURS[info.name], sample.kwargs), _bound(info.op, sample.kwargs),
                )
            )  # fmt: skip
    return tuple(made)


def small(*dtypes: torch.dtype) -> Iterator[Sample]:
    """Samples, without those of variants, which repeat an op's at larger sizes."""
    return (sample for dtype in dtypes for sample in samples(dtype) if "." not in sample.op)


# Comparison -----------------------------------------------------------------------------------------------------------


def differs(mine: Any, torchs: Any, fine: Any = None, strides: bool = True, scale: float = 0.0) -> Verdict:
    """How a tensor, or a tuple of them, differs from torch's.

    Parameters
    ----------
    fine
        The same of float64; None: torch's.
    scale
        Attention's largest operand: scores of hundreds are exponents of its weights, and its gradients are differences.
    """
    if isinstance(torchs, tuple | list):
        fine = fine or [None] * len(torchs)
        found = [differs(*three, strides, scale) for three in zip(mine, torchs, fine, strict=True)]
        return next((f"[{i}] {why}" for i, why in enumerate(found) if why), "")
    for what in ("shape", "dtype", "device"):
        one, other = (getattr(x, what) for x in (mine, torchs))
        if one != other:
            return f"{what} {one}, torch has {other}"
    if not mine.is_meta and mine.numel():
        mine, torchs, fine = mine.detach(), torchs.detach(), (torchs if fine is None else fine).detach()
        # Twice torch's own error and some ulps: sums of other orders, and BLAS libraries of other machines.
        summed = torch.promote_types(torchs.dtype, torch.float32)
        slack = 2 * one_ulp(fine, torchs.dtype) + 16 * one_ulp(fine, summed)
        if scale:
            largest = torch.tensor(scale)
            slack += 2 * one_ulp(largest, torchs.dtype) + 4096 * one_ulp(largest, summed)
        error, most = errors(mine, fine)[0], 2 * errors(torchs, fine)[0] + slack
        if not error <= most:  # NaN never passes
            return f"values: error {error:.2g}, at most {most:.2g}"
    if strides and mine.stride() != torchs.stride():
        return f"stride {mine.stride()}, torch has {torchs.stride()}"
    return ""


def attempt(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What a call gives, or raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call(), None
    except Exception as error:
        return None, error


def both(ours: Callable[[], Any], torchs: Callable[[], Any], compare: Callable[..., Verdict] = differs) -> Verdict:
    """Whether both give the same, or both raise."""
    (mine, failed), (theirs, refused) = attempt(ours), attempt(torchs)
    if failed is not None and not isinstance(failed, ValueError | TypeError | RuntimeError | NotImplementedError):
        return f"raises {type(failed).__name__}: {failed}"
    if (failed is None) != (refused is None):
        return f"raises {type(failed).__name__}: {failed}" if failed is not None else f"torch raises {refused}"
    return "" if failed is not None else compare(mine, theirs)


def spread(x: torch.Tensor) -> torch.Tensor:
    """As ``x``, every other element of a larger buffer, its dimensions in reverse order."""
    order = tuple(reversed(range(x.dim())))
    return torch.stack([x.permute(order)] * 2, -1)[..., 0].permute(order)


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as given": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "spread": spread,
    "negated": lambda x: torch._neg_view(-x),
}


def formed(sample: Sample, form: str) -> Sample:
    """A sample whose tensors lie otherwise; attention's heads keep their columns side by side, as it requires."""
    if sample.attends and form == "transposed":  # rows before heads
        return sample.of(tuple(x.transpose(-2, -3).contiguous().transpose(-2, -3) for x in sample.tensors))
    if sample.attends and form == "spread":
        return sample.of(tuple(torch.cat([x, x], -1)[..., : x.shape[-1]] for x in sample.tensors))
    return sample.of(tuple(FORMS[form](x) for x in sample.tensors))


def leaves(sample: Sample, which: tuple[bool, ...] | None = None) -> Sample:
    """A sample whose tensors are leaves that require a gradient, all or some."""
    flags = which or (True,) * len(sample.tensors)
    return sample.of(tuple(x.detach().requires_grad_(flag) for x, flag in zip(sample.tensors, flags, strict=True)))


# Checks ---------------------------------------------------------------------------------------------------------------

WAYS = {"plan": {}, "2 workers": {"workers": 2}, "3 workers": {"workers": 3, "schedule": "dynamic"}}


def values() -> Check:
    """Values, shapes, dtypes and strides."""
    for dtype in DTYPES:
        for sample, form, way in itertools.product(samples(dtype), FORMS, WAYS):

            def run(s: Sample = sample, form: str = form, way: str = way) -> Verdict:
                s = formed(s, form)
                return s.compare(
                    s.ours(*s.tensors, **WAYS[way]), s.torchs(*s.tensors), s.torchs(*s.fine.tensors)
                )  # fmt: skip

            yield f"{sample.name}/{form}/{way}", run


def _outs(op: str, like: torch.Tensor, tensors: Tensors) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Outputs of all kinds for a result. Those that overlap what is read are in tests/ops/test_out.py."""
    shape, of = like.shape, {"dtype": like.dtype}

    def filled(x: torch.Tensor) -> torch.Tensor:
        return x.fill_(float("nan"))

    yield "of its own", lambda: filled(torch.empty(shape, **of))
    yield "spread", lambda: spread(filled(torch.empty(shape, **of)))
    yield "behind others", lambda: filled(torch.empty(like.numel() + 1, **of))[1:].view(shape)
    if like.dim() > 1:
        yield "column-major", lambda: filled(torch.empty(shape, **of).mT.contiguous()).mT
        yield "rows apart", lambda: filled(torch.empty(*shape[:-1], shape[-1] + 3, **of))[..., : shape[-1]]
        yield "first dimension last", lambda: filled(torch.empty(*shape[1:], shape[0], **of)).movedim(-1, 0)
    yield "no elements", lambda: torch.empty(0, **of)
    yield "no elements, more dimensions", lambda: torch.empty(2, 0, 3, 1, 1, **of)
    yield "another shape", lambda: torch.empty(7, **of)
    yield "another dtype", lambda: torch.empty(shape, dtype=torch.int32)
    yield "another device", lambda: torch.empty(shape, device="meta", **of)
    yield "requires a gradient", lambda: torch.empty(shape, **of).requires_grad_()
    if op.startswith("addmm") and tensors[0].shape == shape:
        yield "the input", lambda: tensors[0]


def out() -> Check:
    """``out=`` of all kinds: values, strides afterwards, and whether it is refused."""
    for dtype in DTYPES:
        for sample in samples(dtype):
            expected = sample.torchs(*sample.tensors)
            if sample.attends and expected.dim() != 4:
                continue
            for kind, _ in _outs(sample.op, expected, sample.tensors):

                def run(s: Sample = sample, kind: str = kind) -> Verdict:
                    def into(op: Op) -> torch.Tensor:
                        given = s.of(tuple(x.clone() for x in s.tensors))
                        out = dict(_outs(s.op, s.torchs(*s.tensors), given.tensors))[kind]()
                        assert op(*given.tensors, out=out) is out
                        return out

                    torchs = _copying(s.torchs) if s.attends else s.torchs
                    return both(lambda: into(s.ours), lambda: into(torchs), s.compare)

                yield f"{sample.name}/{kind}", run


def _copying(op: Op) -> Op:
    """An op of torch's that has no ``out=``, with one as torch's others have it."""

    def into(*tensors: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return torch.mul(op(*tensors), torch.ones((), dtype=tensors[0].dtype), out=out)

    return into


def _wrong(sample: Sample) -> Iterator[tuple[str, Callable[[torch.Tensor], Any]]]:
    """Ways to spoil a tensor of a sample."""
    other = torch.float64 if sample.dtype != torch.float64 else torch.float32
    yield "another dtype", lambda x: x.to(other)
    yield "a column less", lambda x: x[..., :-1] if x.dim() else x
    yield "a row more", lambda x: torch.cat([x, x[..., :1, :]], -2) if x.dim() > 1 and x.shape[-2] else x
    if not sample.attends:  # whose batches are not torch's
        yield "a dimension more", lambda x: x.unsqueeze(0)
        yield "a dimension less", lambda x: x[0] if x.dim() and x.shape[0] else x
        yield "two batches", lambda x: torch.stack([x, x])
    yield "None", lambda x: None
    yield "a list", lambda x: x.tolist()


def refusals() -> Check:
    """Errors: what torch refuses is refused, and what it takes gives the same; torch's own error samples, too."""
    for dtype in DTYPES[2:]:
        for sample in small(dtype):
            if sample.op == "mv":  # tilestream.matmul, which takes other dimensions, too
                continue
            for i, (kind, spoil) in itertools.product(range(len(sample.tensors)), _wrong(sample)):

                def run(s: Sample = sample, i: int = i, spoil: Callable[..., Any] = spoil) -> Verdict:
                    given = tuple(spoil(x) if i == j else x for j, x in enumerate(s.tensors))
                    return both(lambda: s.ours(*given), lambda: s.torchs(*given), s.compare)

                yield f"{sample.name}/{kind} of {i}", run
    for dtype in (torch.int64, torch.complex64):
        for sample in small(dtype):
            yield sample.name, lambda s=sample: both(lambda: s.ours(*s.tensors), lambda: s.torchs(*s.tensors))
    for info in op_db:  # torch 2.13 has no error samples of these ops
        for number, bad in enumerate(info.error_inputs("cpu") if info.name in OURS and info.error_inputs_func else ()):
            s = bad.sample_input
            yield (
                f"{info.name}/error sample/{number}",
                lambda s=s, info=info: both(
                    lambda: OURS[info.name](s.input, *s.args, **s.kwargs), lambda: info.op(s.input, *s.args, **s.kwargs)
                ),
            )


def _gradients(op: Op, tensors: Tensors, weighted: bool) -> Tensors:
    result = op(*tensors)
    seed = torch.ones((), dtype=result.dtype).expand(result.shape)
    if weighted:
        seed = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(result.dtype)
    return torch.autograd.grad(result, [x for x in tensors if x.requires_grad], seed)


def gradients() -> Check:
    """Gradients: values and strides, of a random and of an expanded gradient of the result."""
    for dtype in DTYPES:
        for sample, form, seed in itertools.product(small(dtype), FORMS, ("random", "expanded")):
            yield (
                f"{sample.name}/{form}/{seed}",
                lambda s=sample, form=form, seed=seed: _compare_gradients(leaves(formed(s, form)), seed == "random"),
            )
        for sample in small(dtype):
            for i in range(len(sample.tensors)):
                flags = tuple(i == j for j in range(len(sample.tensors)))
                yield f"{sample.name}/only {i}", lambda s=sample, f=flags: _compare_gradients(leaves(s, f), True)


def _compare_gradients(s: Sample, weighted: bool) -> Verdict:
    fine = leaves(s.fine, tuple(x.requires_grad for x in s.tensors))
    mine, torchs, fine = (
        _gradients(op, x.tensors, weighted) for op, x in ((s.ours, s), (s.torchs, s), (s.torchs, fine))
    )
    return s.compare(mine, torchs, fine)


def gradchecks() -> Check:
    """Torch's gradcheck and gradgradcheck, of reverse and of forward mode."""
    kinds: dict[str, Callable[[Op, Tensors], bool]] = {
        "gradcheck": lambda op, x: gradcheck(op, x, fast_mode=True),
        "batched grad": lambda op, x: gradcheck(op, x, check_batched_grad=True, fast_mode=True),
        "gradgradcheck": lambda op, x: gradgradcheck(op, x, fast_mode=True),
        "batched gradgrad": lambda op, x: gradgradcheck(op, x, check_batched_grad=True, fast_mode=True),
        "forward AD": lambda op, x: gradcheck(op, x, check_forward_ad=True, check_backward_ad=False, fast_mode=True),
        "batched forward AD": lambda op, x: gradcheck(
            op, x, check_forward_ad=True, check_backward_ad=False, check_batched_forward_grad=True,
            check_undefined_grad=False, fast_mode=True,
        ),
        "forward over reverse": lambda op, x: gradgradcheck(
            op, x, check_fwd_over_rev=True, check_rev_over_rev=False, fast_mode=True
        ),
    }  # fmt: skip
    for sample, form, kind in itertools.product(small(torch.float64), ("as given", "transposed"), kinds):

        def run(s: Sample = sample, form: str = form, kind: str = kind) -> Verdict:
            s = leaves(formed(s, form))
            _, mine = attempt(lambda: kinds[kind](s.ours, s.tensors))
            if mine is None:
                return ""
            _, theirs = attempt(lambda: kinds[kind](s.torchs, s.tensors))
            return "" if theirs is not None else f"raises {type(mine).__name__}: {str(mine).splitlines()[0]}"

        yield f"{sample.name}/{form}/{kind}", run


def fake() -> Check:
    """Without data: FakeTensor, the meta device, symbolic shapes."""

    def faked(op: Op, tensors: Tensors) -> torch.Tensor:
        with FakeTensorMode() as mode:
            return op(*(mode.from_tensor(x) for x in tensors)).to("meta")

    def symbolic(op: Op, tensors: Tensors) -> torch.Tensor:
        return make_fx(op, tracing_mode="symbolic")(*tensors)(*tensors)  # type: ignore[no-any-return]

    for dtype, form in itertools.product((torch.float32, torch.bfloat16), ("as given", "spread")):
        for sample in small(dtype):

            def run(kind: str, s: Sample = sample, form: str = form) -> Verdict:
                s = formed(s, form)
                real = s.torchs(*s.tensors)
                if kind == "symbolic":
                    return s.compare(symbolic(s.ours, s.tensors), real, s.torchs(*s.fine.tensors))
                if kind == "meta":
                    return differs(s.ours(*(x.to("meta") for x in s.tensors)), real.to("meta"))
                return differs(faked(s.ours, s.tensors), real.to("meta"))

            for kind in ("fake", "meta", "symbolic"):
                yield f"{sample.name}/{form}/{kind}", lambda run=run, kind=kind: run(kind)


def vmaps() -> Check:
    """`torch.vmap` over any of the operands, along the first or the last dimension."""
    for dtype in (torch.float32, torch.bfloat16):
        for sample in small(dtype):
            for mapped in itertools.product((None, 0, -1), repeat=len(sample.tensors)):
                if all(dim is None for dim in mapped):
                    continue

                def run(s: Sample = sample, mapped: tuple[int | None, ...] = mapped) -> Verdict:
                    pairs = list(zip(s.tensors, mapped, strict=True))
                    given = [x if dim is None else torch.stack([x, x / 2, -x], dim) for x, dim in pairs]
                    slices = [
                        s.of(tuple(x if d is None else x.select(d, i) for x, d in zip(given, mapped, strict=True)))
                        for i in range(3)
                    ]  # fmt: skip
                    torchs = torch.stack([one.torchs(*one.tensors) for one in slices])
                    fine = torch.stack([one.torchs(*one.fine.tensors) for one in slices])
                    return s.compare(torch.vmap(s.ours, mapped)(*given), torchs, fine, strides=False)

                yield f"{sample.name}/{', '.join(map(str, mapped))}", run


def func() -> Check:
    """The transforms of `torch.func`."""

    def grad(op: Op, x: Tensors) -> Any:
        return torch.func.grad(lambda *y: op(*y).square().sum(), tuple(range(len(x))))(*x)

    def vjp(op: Op, x: Tensors) -> Any:
        result, pull = torch.func.vjp(op, *x)
        return result, *pull(result)

    def jvp(op: Op, x: Tensors) -> Any:
        return torch.func.jvp(op, x, tuple(y.cos() for y in x))

    def vmap_grad(op: Op, x: Tensors) -> Any:
        one = torch.func.grad(lambda *y: op(*y).square().sum(), tuple(range(len(x))))
        return torch.vmap(one)(*(torch.stack([y, -y]) for y in x))

    def hessian(op: Op, x: Tensors) -> Any:
        return torch.func.hessian(lambda y: op(*x[:-1], y).square().sum())(x[-1])

    def linearize(op: Op, x: Tensors) -> Any:
        result, push = torch.func.linearize(op, *x)
        return result, push(*(y.cos() for y in x))

    transforms: dict[str, Callable[[Op, Tensors], Any]] = {
        "grad": grad, "vjp": vjp, "jvp": jvp, "vmap(grad)": vmap_grad, "linearize": linearize,
        "jacrev": lambda op, x: torch.func.jacrev(op, len(x) - 1)(*x),
        "jacfwd": lambda op, x: torch.func.jacfwd(op, len(x) - 1)(*x),
        "hessian": hessian,
        "functional_call": lambda op, x: grad(lambda *y: torch.func.functional_call(_Module(op), {}, y), x),
    }  # fmt: skip
    for sample, name in itertools.product(small(torch.float64), transforms):

        def run(s: Sample = sample, name: str = name) -> Verdict:
            theirs, refused = attempt(lambda: transforms[name](s.torchs, s.tensors))
            if refused is not None:  # torch has no such derivative of its own: its result is of the maths backend
                with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                    theirs = transforms[name](s.torchs, s.tensors)
            # The sine and the cosine magnify the last bits of what they are taken of, as attention's exponents do.
            largest = max((x.detach().abs().max().item() for x in s.tensors if x.numel()), default=0.0)
            return differs(transforms[name](s.ours, s.tensors), theirs, strides=False, scale=2 * largest)

        yield f"{sample.name}/{name}", run


class _Module(torch.nn.Module):
    def __init__(self, op: Op) -> None:
        super().__init__()
        self.op = op

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.op(*tensors)


def compiled() -> Check:
    """`torch.compile` of a whole graph, static and dynamic, forward and backward; ``out=`` inside; `torch.export`."""

    def forward(s: Sample, dynamic: bool) -> Verdict:
        torch._dynamo.reset()
        s = leaves(s)
        once = torch.compile(s.ours, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        return s.compare(once(*s.tensors), s.torchs(*s.tensors)) or s.compare(
            _gradients(once, s.tensors, True), _gradients(s.torchs, s.tensors, True), strides=False
        )

    def into(s: Sample) -> Verdict:
        torch._dynamo.reset()
        expected = s.torchs(*s.tensors)
        given = spread(torch.empty(expected.shape, dtype=expected.dtype))
        once = torch.compile(lambda *x: s.ours(*x[:-1], out=x[-1]).shape, fullgraph=True, backend="aot_eager")
        once(*s.tensors, given)
        return s.compare(given, expected, strides=False)

    def exported(s: Sample) -> Verdict:
        program = torch.export.export(_Module(s.ours), s.tensors)
        return s.compare(program.module()(*s.tensors), s.torchs(*s.tensors))

    kinds: dict[str, Callable[[Sample], Verdict]] = {
        "compile": lambda s: forward(s, False), "compile, dynamic": lambda s: forward(s, True),
        "compile, out=": into, "export": exported,
    }  # fmt: skip
    for sample, kind in itertools.product(small(torch.float64), kinds):
        if sample.attends and sample.tensors[0].dim() != 4 and kind == "compile, out=":
            continue
        yield f"{sample.name}/{kind}", lambda s=sample, kind=kind: kinds[kind](s)


#: name -> the check, what it compares, and the one of how many that the quick test runs.
CHECKS: dict[str, tuple[Callable[[], Check], int]] = {
    "values": (values, 80), "out": (out, 40), "errors": (refusals, 20), "gradients": (gradients, 60),
    "gradchecks": (gradchecks, 60), "fake": (fake, 20), "vmap": (vmaps, 20), "func": (func, 30),
    "compile": (compiled, 20),
}  # fmt: skip


# Running --------------------------------------------------------------------------------------------------------------


class Count(NamedTuple):
    """What became of a check's comparisons: ``reasons`` counts those that may differ, and do."""

    ran: int
    agreed: int
    reasons: dict[str, int]
    problems: list[str]
    found: dict[str, str]


@cache
def allowed() -> dict[str, str]:
    """Pattern of ids -> why they differ. ``a{1,2}b`` stands for two patterns, ``a1b`` and ``a2b``."""
    found = {}
    for entry in json.loads(DIFFERENCES.read_text(encoding="utf-8")):
        for pattern in entry["ids"]:
            first, _, rest = pattern.partition("{")
            choices, _, last = rest.partition("}")
            found.update({f"{first}{choice}{last}": entry["reason"] for choice in choices.split(",")})
    return found


def run(name: str, whole: bool = True) -> Count:
    """Run a check, all of it or a part, in which each pattern of differences has a comparison."""
    torch._C._functorch._set_vmap_fallback_warning_enabled(False)
    check, every = CHECKS[name]
    patterns = {pattern: why for pattern, why in allowed().items() if pattern.startswith(f"{name}/")}
    left, ran, agreed = set(patterns), 0, 0
    reasons: dict[str, int] = {}
    problems: list[str] = []
    found: dict[str, str] = {}
    for end, thunk in check():
        identity = f"{name}/{end}"
        matched = [pattern for pattern in patterns if fnmatch.fnmatchcase(identity, pattern)]
        if not whole and zlib.crc32(identity.encode()) % every and not left.intersection(matched):
            continue
        left.difference_update(matched)
        why, error = attempt(thunk)
        if error is not None:
            why = f"raises {type(error).__name__}: {error}"
        ran, agreed = ran + 1, agreed + (not why)
        if why:
            found[identity] = why.strip().splitlines()[0][:160]
        if why and matched:
            reasons[patterns[matched[0]]] = reasons.get(patterns[matched[0]], 0) + 1
        elif why:
            problems.append(f"{identity}: {found[identity]}")
        elif matched:
            problems.append(f"{identity}: no longer differs; narrow {matched[0]!r} in {DIFFERENCES.name}, or remove it")
    problems += [f"{pattern!r} in {DIFFERENCES.name} matches no check; remove it" for pattern in left]
    return Count(ran, agreed, reasons, problems, found)


def page(counts: dict[str, Count]) -> str:
    """docs/torch_samples.md."""
    compared = [
        f"| {name} | {count.agreed:,} of {count.ran:,} | {(CHECKS[name][0].__doc__ or '').strip().replace('``', '`')} |"
        for name, count in counts.items()
    ]
    reasons = [f"| {name} | {n:,} | {why} |" for name, count in counts.items() for why, n in count.reasons.items()]
    table = "\n".join(("| check | as torch | compared |", "|---|---|---|", *compared))
    others = "\n".join(("| check | calls | why |", "|---|---|---|", *reasons))
    return f"""# Torch's own samples

Torch tests its ops with samples of its own (OpInfo). `tests/torch_samples` gives those of `mm`, `addmm`, `bmm`, `mv`,
`matmul`, `linear` and `scaled_dot_product_attention` to this project's ops on the CPU, and compares each call with
torch's. Samples with a mask or with dropout are left out: `tilestream.attention` has neither.

{table}

Values pass where they are within twice torch's own error of the result in float64, plus 2 ulps. The calls that differ
from torch's:

{others}

Made by `python tests/torch_samples/samples.py` with torch {torch.__version__.split("+")[0]}. `make test` runs a part of
the checks, `make test-all` all of them; both fail where a call differs that is not listed in
`tests/torch_samples/differences.json`, and where a listed one no longer differs.
"""


def main(arguments: list[str]) -> None:
    """Run all checks; write the page, or print what differs."""
    names = [name for name in CHECKS if not arguments[1:] or any(a.startswith(name) for a in arguments[1:])]
    counts = {}
    for name in names:
        start = time.process_time()
        counts[name] = count = run(name)
        print(f"{name}: {count.agreed} of {count.ran} as torch, {time.process_time() - start:.0f} s", flush=True)
        shown = [f"{i}: {why}" for i, why in count.found.items()] if "--differences" in arguments else count.problems
        print("".join(f"    {line}\n" for line in shown), end="", flush=True)
    if not arguments:
        PAGE.write_text(page(counts), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
