"""What ranks do in the tests of equal calls: those that are decided already, and those that something has to see."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from jobs import random
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rank_checks import raised
from tilestream import distributed as tsd
from tilestream.distributed import api
from tilestream.distributed.group_state import state_of


class Sees(TorchDispatchMode):
    """A mode that passes everything on."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class SeesFunctions(TorchFunctionMode):
    """The same, above the dispatcher."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    """A tensor that is not torch's own."""


@contextlib.contextmanager
def counting():
    """How often the registered ops are called."""
    counted, names = [], ("all_gather_matmul_op", "matmul_reduce_scatter_op", "matmul_all_reduce_op")
    before = {name: getattr(api, name) for name in names}
    for name, op in before.items():
        setattr(api, name, lambda *given, op=op, name=name: (counted.append(name), op(*given))[1])
    try:
        yield counted
    finally:
        for name, op in before.items():
            setattr(api, name, op)


def operands(rank, world, seed):
    """A shard, all ranks' rows, and a weight."""
    whole = torch.cat([random(seed + r, 4, 8) for r in range(world)])
    return whole[4 * rank : 4 * rank + 4].clone(), whole, random(seed + 50, 8, 6)


def repeats(rank, world, form):
    """Equal calls, on other tensors each time: the second does without the dispatcher, and is right."""
    for seed in (1, 100, 200):
        mine, whole, b = operands(rank, world, seed)
        bias, here = random(seed + 60, 6), slice(4 * rank, 4 * rank + 4)
        with counting() as counted:
            a, (out, other) = tsd.all_gather_matmul(
                mine, [b, b[:, :3]], bias=[bias, None], activation=["relu", None], return_a=True, form=form
            )
            part = tsd.matmul_reduce_scatter(whole, b, bias=bias, reduce_op="avg", form=form, deadline=seed)
            total = tsd.matmul_all_reduce(whole, b)
        assert len(counted) == (3 if seed == 1 else 0), counted
        assert a.equal(whole)
        assert torch.allclose(out, torch.relu(whole @ b + bias), atol=1e-4)
        assert torch.allclose(other, whole @ b[:, :3], atol=1e-4)
        assert torch.allclose(part, (whole @ b + bias)[here], atol=1e-4)
        assert torch.allclose(total, world * (whole @ b), atol=1e-4)
        for result in (a, out, other, part, total):
            result.mul_(torch.ones(result.shape[-1], requires_grad=True))  # a view of `no_grad` would refuse
    return True


def is_seen(rank, world):
    """A call that is equal to a decided one goes through the registered op where something has to see it."""
    mine, whole, b = operands(rank, world, 1)
    group, expected = dist.group.WORLD, whole @ b

    def call(a=mine, b=b, **how):
        return tsd.all_gather_matmul(a, b, group=group, **how)

    call(form="unfused")
    negated = torch.complex(torch.zeros_like(mine), -mine).conj().imag
    assert negated.is_neg()
    assert negated.stride() != mine.stride()
    call(torch.empty(4, 16)[:, ::2].copy_(mine), form="unfused")  # of the negated one's strides
    seen = [
        (lambda: call(form="unfused"), Sees()), (lambda: call(form="unfused"), SeesFunctions()),
        (lambda: call(form="unfused"), torch.autocast("cpu", torch.bfloat16)),
        (lambda: call(form="unfused"), torch.profiler.profile()),
        (lambda: call(mine.clone().requires_grad_(), form="unfused"), contextlib.nullcontext()),
        (lambda: call(b=b.clone().requires_grad_(), form="unfused"), contextlib.nullcontext()),
        (lambda: call(negated, form="unfused"), contextlib.nullcontext()),
        (lambda: call(mine.clone().as_subclass(Subclass), form="unfused"), contextlib.nullcontext()),
    ]  # fmt: skip
    for number, (function, block) in enumerate(seen):
        with counting() as counted, block:
            out = function()
        assert counted == ["all_gather_matmul_op"], number
        assert torch.allclose(out.detach().float(), expected, atol=0.1 if out.dtype == torch.bfloat16 else 1e-4), number
    for block in (contextlib.nullcontext(), torch.no_grad(), torch.inference_mode()):
        with counting() as counted, block:
            assert torch.allclose(call(form="unfused"), expected, atol=1e-4)
        assert not counted, block
    for block in (
        torch.inference_mode(),
        torch.no_grad(),
        contextlib.nullcontext(),
    ):  # memory that the first call makes
        with block:
            made = [call(mine[:2].clone(), form=form) for form in ("fused", "unfused")]
        assert torch.allclose(made[0], made[1], atol=1e-4)
    return True


def refuses(rank, world):
    """What is wrong is refused behind an equal call that was right; and a broken group refuses it, too."""
    mine, whole, b = operands(rank, world, 1)
    group = dist.new_group(list(range(world)))

    def call(a=mine, b=b, group=group, **how):
        return tsd.all_gather_matmul(a, b, group=group, **{"form": "unfused", **how})

    for _ in range(2):
        call(gather_dim=0)
        call(b=[b, b], bias=[whole[0, :6].clone()] * 2)
    wrong = [
        ({"gather_dim": False}, "ValueError: all_gather_matmul: gather_dim=False"),
        ({"gather_dim": 2}, "ValueError: all_gather_matmul: gather_dim=2"),
        ({"deadline": 0}, "ValueError: deadline=0"), ({"deadline": float("inf")}, "ValueError: deadline=inf"),
        ({"form": ["unfused"]}, "ValueError: all_gather_matmul: form=['unfused']"), ({"form": "no"}, "form='no'"),
        ({"group": "tp"}, "TypeError: all_gather_matmul: group is a str"),
        ({"b": b.to("meta")}, "ValueError: all_gather_matmul: b is on meta"),
        ({"b": [b, b], "bias": whole[0, :6].clone()}, "bias: 1 for 2 b"), ({"b": [b], "bias": []}, "bias: 0 for 1 b"),
        ({"b": b.double()}, "a is torch.float32, b is torch.float64"),
        ({"b": b.t()}, "differ in K"), ({"a": mine[:, :4]}, "differ in K"), ({"activation": "no"}, "activation='no'"),
        ({"activation": [["relu"]]}, "activation="), ({"bias": random(3, 5)}, "bias has shape [5]"),
        ({"a": mine.to_sparse()}, ""), ({"out_dtype": [torch.float32]}, ""),
    ]  # fmt: skip
    for how, message in wrong:
        said = raised(lambda how=how: call(**how))
        assert said != "nothing", how
        assert message in said, (how, said)
    assert torch.allclose(call(), whole @ b, atol=1e-4)
    state_of("test", group).break_("it is lost")
    assert raised(call).startswith("GroupBroken")
    assert torch.allclose(call(group=None), whole @ b, atol=1e-4)
    return True
