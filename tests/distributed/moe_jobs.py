"""What ranks do in the tests of `tilestream.distributed.moe`. Each rank can make all ranks' tokens and experts."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from jobs import random

from error_rule import ACTIVATIONS, check_gradient, passes
from rank_checks import hear, raised, slowest, told
from streaming import threads_at_work
from tilestream import distributed as tsd
from tilestream.distributed import moe_dispatch


class Mixture(NamedTuple):
    """All ranks' tokens, what each chose, and all experts."""

    xs: list[torch.Tensor]
    weights: list[torch.Tensor]
    chosen: list[torch.Tensor]
    w1: torch.Tensor
    w2: torch.Tensor
    w3: torch.Tensor

    @classmethod
    def random(cls, tokens, top_k, experts, dtype=torch.float32, width=12, hidden=10, only=None, seed=0):
        """``tokens``: each rank's; ``only``: the experts that any token chooses, of as many as ``experts``."""
        few = list(range(experts) if only is None else only)
        xs, weights, chosen = [], [], []
        for r, count in enumerate(tokens):
            xs.append(random(10 * r + seed, count, width, dtype=dtype))
            weights.append(random(10 * r + 1 + seed, count, top_k).softmax(-1))
            scores = random(10 * r + 2 + seed, count, max(len(few), top_k))
            chosen.append(torch.tensor(few)[scores.argsort(-1)[:, :top_k] % len(few)])
        shapes = (experts, hidden, width), (experts, width, hidden), (experts, hidden, width)
        w1, w2, w3 = (random(500 + i, *shape, dtype=dtype) / shape[2] ** 0.5 for i, shape in enumerate(shapes))
        return cls(xs, weights, chosen, w1, w2, w3)

    def to(self, dtype=None, device=None):
        lists = [[x.to(device, dtype if x.is_floating_point() else None) for x in one] for one in self[:3]]
        return Mixture(*lists, *(w.to(device, dtype) for w in self[3:]))

    def leaves(self):
        lists = [[x.clone().requires_grad_(x.is_floating_point()) for x in one] for one in self[:3]]
        return Mixture(*lists, *(w.clone().requires_grad_() for w in self[3:]))

    def own(self, rank, world):
        """A rank's arguments, leaves of their own."""
        part = len(self.w1) // world
        mine = (self.xs[rank], self.weights[rank], *(w[rank * part : (rank + 1) * part] for w in self[3:]))
        x, weights, *w = (t.clone().requires_grad_() for t in mine)
        return x, (weights, self.chosen[rank]), *w

    def by_torch(self, activation="silu"):
        """Each rank's result in plain torch: expert by expert."""
        outs = []
        for x, weights, chosen in zip(self.xs, self.weights, self.chosen, strict=True):
            out = x.new_zeros(x.shape)
            for expert in range(len(self.w1)):
                token, choice = (chosen == expert).nonzero(as_tuple=True)
                row = x[token]
                hidden = ACTIVATIONS[activation](row @ self.w1[expert].T) * (row @ self.w3[expert].T)
                row = hidden @ self.w2[expert].T * weights[token, choice, None]
                out = out.index_add(0, token, row.to(out.dtype))
            outs.append(out)
        return outs


def matches(rank, world, cases, device="cpu"):
    """Results and gradients by the error rule; twice, with the same bits. In one part, or a part an expert."""
    for number, (tokens, top_k, experts, dtype, form, extra) in enumerate(cases):
        dtype, activation = getattr(torch, dtype), extra.get("activation", "silu")
        sizes = {name: extra[name] for name in ("width", "hidden", "only") if name in extra}
        data = Mixture.random(tokens[:world], top_k, experts * world, dtype, **sizes).to(device=device)
        grads = [random(900 + r, *x.shape, dtype=dtype).to(device) for r, x in enumerate(data.xs)]
        found = []
        for _ in range(2):
            args = data.own(rank, world)
            with mock.patch.object(moe_dispatch, "PART_BYTES", 1 if number % 2 else 2**20):
                out = tsd.moe(*args, activation=activation, form=form)
                out.backward(grads[rank])
            found.append([out.detach(), *(t.grad for t in (args[0], args[1][0], *args[2:]))])
        assert all(map(torch.equal, *found)), "the second result has other bits"
        wanted = []
        for kind in (torch.float64, None):
            whole = (data if kind is None else data.to(kind)).leaves()
            outs = whole.by_torch(activation)
            torch.autograd.backward(outs, [g.to(out.dtype) for g, out in zip(grads, outs, strict=True)])
            part = slice(rank * experts, (rank + 1) * experts)
            of = [whole.xs[rank].grad, whole.weights[rank].grad, *(w.grad[part] for w in whole[3:])]
            wanted.append([outs[rank].detach(), *(torch.zeros_like(mine) if g is None else g for mine, g in
                                                   zip(found[0][1:], of, strict=True))])  # fmt: skip
        for i, (mine, finer, by_torch) in enumerate(zip(found[0], *wanted, strict=True)):
            where = (tokens, dtype, form, extra, i)
            if dtype == torch.float64:
                assert torch.allclose(mine.double(), finer), where
            elif i:
                assert mine.dtype == by_torch.dtype, where
                check_gradient(mine, finer, by_torch)
            else:
                assert passes(mine, finer, by_torch), where
    return True


def shapes_and_routers(rank, world):
    """Tokens of any leading dimensions, a function as router, frozen weights, autocast, and one graph."""
    data = Mixture.random([6] * world, 2, 2 * world)
    x, (weights, chosen), *w = data.own(rank, world)
    plain = tsd.moe(x, (weights, chosen), *w)
    for shape in ((2, 3), (1, 6, 1)):
        many = tsd.moe(
            x.view(*shape, 12), lambda t: (weights.view(*t.shape[:-1], 2), chosen.view(*t.shape[:-1], 2)), *w
        )
        assert many.equal(plain.view(*shape, 12))
    assert tsd.moe(x, (weights, chosen), *w, most_tokens=6).equal(plain), "memory on GPUs alone"
    frozen = [t.detach() for t in w]
    grads = [torch.autograd.grad(tsd.moe(x, (weights, chosen), *one).sum(), (x, weights)) for one in (w, frozen)]
    assert all(map(torch.equal, *grads))
    with torch.autocast("cpu", torch.bfloat16):
        assert tsd.moe(x, (weights, chosen), *w).dtype == torch.bfloat16
    compiled = torch.compile(lambda *args: tsd.moe(*args), backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        assert tsd.moe(x, (weights, chosen), *w).equal(plain)
    found = compiled(x, (weights, chosen), *w)
    assert found.equal(plain)
    assert torch.autograd.grad(found.sum(), x)[0].equal(grads[0][0])
    twice = torch.autograd.grad(tsd.moe(x, (weights, chosen), *w).sum(), x, create_graph=True)[0]
    assert raised(lambda: twice.sum().backward()).startswith("NotImplementedError: moe: it has no second derivative")
    return tsd.plan_moe(x, (weights, chosen), *w).explain()


def begins_with_the_first(rank, world, folder):
    """The last rank calls when the others have computed all rows but its own: they tell it so, by a file each."""
    from tilestream.distributed import moe_experts

    data = Mixture.random([4] * world, 2, world)
    args = data.own(rank, world)
    flags = [Path(folder) / str(r) for r in range(world - 1)]
    forward, calls = moe_experts.forward, []

    def counted(e, x, counts):
        made = forward(e, x, counts)
        calls.append(int(counts.sum()))
        if len(calls) == world - 1 and rank < world - 1:
            flags[rank].touch()
        return made

    moe_experts.forward = counted
    try:
        end = time.monotonic() + 300
        while rank == world - 1 and not all(flag.exists() for flag in flags):
            assert time.monotonic() < end, "the others wait for every rank"
            time.sleep(0.002)
        out = tsd.moe(*args, form="fused")
    finally:
        moe_experts.forward = forward
    assert sum(calls) == sum(int((chosen == rank).sum()) for chosen in data.chosen)
    return torch.allclose(out, data.by_torch()[rank], atol=1e-5)


def begins_with_the_first_expert(rank, world, folder):
    """Rank 1 sends its rows for the second expert when rank 0 has computed those for the first."""
    from tilestream.distributed import moe_experts

    data = Mixture.random([6] * world, 2, 2 * world)
    args, flag, forward = data.own(rank, world), Path(folder) / "computed", moe_experts.forward
    rounds, computed = moe_dispatch._Dispatch.rounds, []

    def slow(self, peer):
        for number, (incoming, outgoing) in enumerate(rounds(self, peer)):
            yield moe_dispatch.Round(incoming, by_and_by(outgoing) if (rank, peer, number) == (1, 0, 1) else outgoing)

    def by_and_by(outgoing):
        first, *rest = outgoing
        yield first
        end = time.monotonic() + 300
        while not flag.exists():
            assert time.monotonic() < end, "rank 0 waits for the rows of all experts"
            time.sleep(0.002)
        yield from rest

    def counted(e, x, counts):
        made = forward(e, x, counts)
        computed.append([int(counts[0]), int(counts[1])])
        if rank == 0 and len(computed) == 2:  # its own, and the first part
            assert computed[1][1] == 0 < computed[1][0]
            flag.touch()
        return made

    with (
        mock.patch.object(moe_dispatch, "PART_BYTES", 1), mock.patch.object(moe_experts, "forward", counted),
        mock.patch.object(moe_dispatch._Dispatch, "rounds", slow),
    ):  # fmt: skip
        out = tsd.moe(*args, form="fused")
    return torch.allclose(out, data.by_torch()[rank], atol=1e-5)


def differs(rank, world, how):
    """One rank makes another call: all raise, and the group stays usable."""
    data = Mixture.random([3] * world, 2, 2 * world, width=12 + 4 * (how == "width" and rank == 1))
    x, router, *w = (t.detach() if isinstance(t, torch.Tensor) else t for t in data.own(rank, world))
    form = "unfused" if how == "form" and rank == 1 else "fused"
    if how == "experts" and rank == 1:
        w = [torch.cat([t, t]) for t in w]
    if how == "op" and rank == 1:
        text = raised(lambda: tsd.all_gather_matmul(torch.ones(4, 8), torch.ones(8, 6), form="fused", deadline=600))
    else:
        text = raised(lambda: tsd.moe(x, router, *w, form=form, deadline=600))
    return text, works(rank, world)


def works(rank, world):
    """The group works."""
    data = Mixture.random([2 + r for r in range(world)], 1, world)
    return torch.allclose(tsd.moe(*data.own(rank, world), form="fused"), data.by_torch()[rank], atol=1e-5)


def loses(rank, world, when, folder):
    """The last rank dies: before its call, or when it has told how many rows it sends; the others raise in time."""
    from tilestream.distributed.moe_dispatch import _Dispatch

    assert works(rank, world)
    (Path(folder) / str(rank)).touch()
    args = Mixture.random([4] * world, 2, world).own(rank, world)
    if rank == world - 1:
        # Messages that an exiting process has not read reset its peers' connections, and lose what is in flight.
        end = time.monotonic() + 300
        while len(list(Path(folder).iterdir())) < world and time.monotonic() < end:
            time.sleep(0.002)
        if when == "before":
            os._exit(0)
        rounds = _Dispatch.rounds

        def counts_alone(self, peer):
            yield next(rounds(self, peer))
            time.sleep(0.2)
            os._exit(0)

        _Dispatch.rounds = counts_alone
    begin = time.monotonic()
    first = raised(lambda: tsd.moe(*args, form="fused", deadline=600))
    waited = time.monotonic() - begin
    second = raised(lambda: tsd.moe(*args, deadline=600))
    alive = [t.name for t in threads_at_work() if t.name.startswith("tilestream")]
    assert not alive, alive
    return first, second, waited


def expires(rank, world, form):
    """The last rank does not call: the others give up at the deadline, and name it."""
    args = Mixture.random([4] * world, 2, world).own(rank, world)
    if rank == world - 1:
        hear(*(f"gave up {other}" for other in range(world - 1)))
        first = raised(lambda: tsd.moe(*args, form=form, deadline=600))
    else:
        first = raised(lambda: tsd.moe(*args, form=form, deadline=0.5))
        told(f"gave up {rank}")
    return first, raised(lambda: tsd.moe(*args, deadline=600))


def backward_expires(rank, world):
    """The last rank calls no backward: the others' raises at the deadline."""
    args = Mixture.random([4] * world, 2, world).own(rank, world)
    deadline = slowest(0.7, lambda: tsd.moe(*args, form="fused"))
    out = tsd.moe(*args, form="fused", deadline=deadline)
    dist.barrier()
    if rank == world - 1:
        hear("gave up")
        return "absent"
    text = raised(lambda: out.sum().backward())
    told("gave up")
    return text


def refuses(rank, world):
    """Invalid arguments raise on their rank, before anything is sent, and in the plan, too."""
    import tilestream as ts

    x, router, w1, w2, w3 = Mixture.random([4] * world, 2, 2 * world).own(rank, world)
    x, (weights, chosen), *w = (t.detach() if isinstance(t, torch.Tensor) else t for t in (x, router, w1, w2, w3))
    weights = weights.detach()
    good = (x, (weights, chosen), *w)
    floats = "it must be one of torch.float16, torch.bfloat16, torch.float32, torch.float64"
    calls = [
        ({0: x.int()}, {}, f"TypeError: moe: x is torch.int32; {floats}"),
        ({0: 1.0}, {}, "TypeError: moe: x is a float; it must be a torch.Tensor"),
        ({0: x[0]}, {}, "ValueError: moe: x has 1 dimensions; it has at least 2: [..., H]: unsqueeze a token"),
        ({0: x.to("meta")}, {}, "on the others on meta"),
        ({0: x.to_sparse()}, {}, "x has layout torch.sparse_coo; dense tensors are multiplied: x.to_dense()"),
        ({1: weights}, {}, "TypeError: moe: router is a Tensor; it must be (weights, experts), as torch.topk"),
        ({1: lambda t: (t,)}, {}, "TypeError: moe: router made a tuple; it must be (weights, experts)"),
        ({1: (weights, weights)}, {}, "router's experts is torch.float32; it must be one of torch.int32, torch.int64"),
        ({1: (chosen, chosen)}, {}, f"router's weights is torch.int64; {floats}"),
        ({1: (weights[:2], chosen[:2])}, {}, "router: weights have shape [2, 2], experts [2, 2]; both are [4,"),
        ({1: (weights, chosen[:, :1])}, {}, "router: weights have shape [4, 2], experts [4, 1]; both are"),
        ({2: w[0][0]}, {}, "ValueError: moe: w1 has shape [10, 12]; it must be [E, I, 12] for x [4, 12], none of"),
        ({2: w[0][:, :, :8]}, {}, "w1 has shape [2, 10, 8]; it must be [E, I, 12]"),
        ({2: w[0][:0]}, {}, "w1 has shape [0, 10, 12]; it must be [E, I, 12]"),
        ({3: w[0]}, {}, "w2 has shape [2, 10, 12]; with w1 [2, 10, 12]: [2, 12, 10]"),
        ({4: w[1]}, {}, "w3 has shape [2, 12, 10]; with w1 [2, 10, 12]: [2, 10, 12]"),
        ({4: w[2].bfloat16()}, {}, "TypeError: moe: w3 is torch.bfloat16, x is torch.float32; they have one dtype"),
        (
            {0: x.view(2, 2, 12), 1: (weights.view(4, 1, 2), chosen.view(4, 1, 2))}, {},
            "router: weights have shape [4, 1, 2], experts [4, 1, 2]; both are [2, 2, 'top_k'], or [4, 'top_k']",
        ),
        *(({}, {"activation": no}, f"activation={no!r}; it must be None or one of relu") for no in ("", "none", 0, [])),
        ({}, {"activation": "tanh"}, "activation='tanh'; it must be None or one of relu, gelu, gelu_tanh, silu"),
        ({}, {"form": "fast"}, "form='fast'; it must be one of auto, fused, unfused"),
        ({}, {"most_tokens": 0}, "ValueError: moe: most_tokens=0; it must be a positive number of tokens, or None"),
        ({}, {"most_tokens": 4.0}, "most_tokens=4.0; it must be a positive number of tokens, or None"),
        ({}, {"most_tokens": 3}, "x has 4 tokens, and most_tokens=3: give the most that any rank gives, the same on"),
        ({}, {"group": "ep"}, "TypeError: moe: group is a str; it must be a torch.distributed.ProcessGroup or None"),
    ]  # fmt: skip
    for changes, options, message in calls:
        args = [changes.get(i, one) for i, one in enumerate(good)]
        for function in (tsd.moe, tsd.plan_moe):
            text = raised(lambda f=function, a=args, o=options: f(*a, **o))
            assert message in text or "on the others on" in message, (text, message)
            assert text.startswith(("ValueError", "TypeError")), text
    text = raised(lambda: tsd.moe(*good, deadline=0))
    assert "deadline=0; it must be a positive, finite number of seconds" in text, text
    for wrong in (-1, 2 * world):
        text = raised(lambda wrong=wrong: tsd.moe(x, (weights, torch.full_like(chosen, wrong)), *w))
        assert f"expert {wrong} is chosen; the {world} ranks have {2 * world}, numbered from 0" in text, text
    with ts.invariant():
        assert raised(lambda: tsd.moe(*good)).startswith("NotImplementedError: moe: tilestream.invariant")
    return works(rank, world)
