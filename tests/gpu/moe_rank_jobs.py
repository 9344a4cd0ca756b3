"""What ranks do in ``test_gpu_moe_ranks.py``. Each rank can make the random inputs of all ranks."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from distributed_jobs import BF16, Worst, finish, give_up_on_the_last_rank, in_poisoned_slots, late_in_turn

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from moe_jobs import Mixture

import tilestream as ts
from error_rule import passes
from rank_checks import raised
from tilestream import distributed as tsd
from tilestream.distributed.group_state import state_of

DEADLINE = 20.0
TOKENS, TOP_K, EXPERTS, WIDTH, HIDDEN = 96, 2, 3, 256, 192


def mixture(world, seed, tokens=TOKENS, dtype=BF16, experts=EXPERTS, only=None, top_k=TOP_K) -> Mixture:
    counts = [tokens] * world if isinstance(tokens, int) else tokens[:world]
    made = Mixture.random(
        counts, top_k, experts * world, dtype, width=WIDTH, hidden=HIDDEN, only=only, seed=1000 * seed
    )
    return made.to(device="cuda")


def arguments(data: Mixture, rank: int, world: int):
    x, (weights, chosen), *w = data.own(rank, world)
    return x.detach(), (weights.detach(), chosen), *(one.detach() for one in w)


def call(data: Mixture, rank: int, world: int, most: int = TOKENS, **more):
    return tsd.moe(*arguments(data, rank, world), form="fused", most_tokens=most, deadline=DEADLINE, **more)


def matches(rank, world, cases):
    """(each rank's tokens, top_k, experts of a rank, dtype, only, activation): by the error rule, in memory of NaN."""
    said = ""
    for number, (tokens, top_k, experts, dtype, only, activation) in enumerate(cases):
        data = mixture(world, number, tokens, getattr(torch, dtype), experts, only, top_k)
        args = arguments(data, rank, world)
        how = {"activation": activation, "form": "fused", "most_tokens": max(tokens)}
        said = tsd.plan_moe(*args, **how).explain()
        tsd.moe(*args, **how, deadline=DEADLINE)
        first, second = in_poisoned_slots(2, lambda args=args, how=how: tsd.moe(*args, **how, deadline=DEADLINE))
        assert first.view(torch.int16).equal(second.view(torch.int16)), "the second result has other bits"
        finer, by_torch = (one.by_torch(activation)[rank] for one in (data.to(torch.float64), data))
        assert passes(first, finer, by_torch), (tokens, top_k, experts, dtype, only)
    return said


def gradients(rank, world):
    """Of a fused forward pass: those of the unfused one, nearly."""
    data = mixture(world, 3)
    grad, found = torch.ones(TOKENS, WIDTH, device="cuda", dtype=BF16), []
    for form in ("fused", "unfused"):
        x, (weights, chosen), *w = data.own(rank, world)
        tsd.moe(x, (weights, chosen), *w, form=form, most_tokens=TOKENS, deadline=DEADLINE).backward(grad)
        found.append([t.grad for t in (x, weights, *w)])
    finish()
    return all(map(torch.equal, *found))


def repeated(rank, world, halves, count):
    """Equal calls on two streams in turn: whether bits are those of the usual way, and how many were repeats."""
    _, _, w1, w2, w3 = arguments(mixture(world, 5), rank, world)
    if halves:
        w1, w3 = torch.cat([w1, w3], 1).chunk(2, 1)
    how = {"form": "fused", "most_tokens": TOKENS, "deadline": DEADLINE}
    streams, state = [torch.cuda.Stream(), torch.cuda.Stream()], state_of("a test", None)
    before, same, made = state.repeated, True, torch.Generator("cuda").manual_seed(rank)
    torch.cuda.synchronize()
    for step in range(count):
        with torch.cuda.stream(streams[step % 2]):
            x = torch.randn(TOKENS, WIDTH, device="cuda", dtype=BF16, generator=made)
            scores = torch.rand(TOKENS, EXPERTS * world, device="cuda", generator=made)
            chosen = scores.topk(TOP_K)
            outs = [tsd.moe(one, tuple(chosen), w1, w2, w3, **how) for one in (x, x.clone().requires_grad_())]
            streams[step % 2].synchronize()
            same &= outs[0].view(torch.int16).equal(outs[1].detach().view(torch.int16))
    finish()
    return same, state.repeated - before


def no_such_expert(rank, world):
    """Tokens that choose an expert that does not exist are NaN, others are not."""
    data = mixture(world, 4)
    data.chosen[rank][3, 1], data.chosen[rank][5, 0] = -1, EXPERTS * world
    out = call(data, rank, world)
    finish()
    return out.isnan().any(1).nonzero().flatten().tolist()


class Static(NamedTuple):
    """A captured call: what it reads, and its result."""

    graph: torch.cuda.CUDAGraph
    x: torch.Tensor
    weights: torch.Tensor
    chosen: torch.Tensor
    out: torch.Tensor
    eager: object

    def load(self, data: Mixture, rank: int) -> None:
        for to, source in zip((self.x, self.weights, self.chosen), data[:3], strict=False):
            to.copy_(source[rank])


def captured(rank, world, seed=7, deadline=DEADLINE, tokens=TOKENS) -> Static:
    """A call that was made before, in a graph. All mixtures of these shapes have the same experts."""
    data = mixture(world, seed, tokens)
    x, (weights, chosen), *w = arguments(data, rank, world)
    how = {"form": "fused", "most_tokens": tokens, "deadline": deadline}

    def eager() -> torch.Tensor:
        return tsd.moe(x, (weights, chosen), *w, **how)

    eager()
    finish()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        said = tsd.plan_moe(x, (weights, chosen), *w, form="fused", most_tokens=tokens).explain()
        out = eager()
    assert "fused: kernels push the rows" in said, said
    return Static(graph, x, weights, chosen, out, eager)


def replays(rank, world, count, mixed):
    """Replays of other tokens and choices each, ranks late in turn; ``mixed``: eager calls between on other ranks."""
    static, worst = captured(rank, world), Worst()
    data = [mixture(world, 20 + i, only=[1] if i == 2 else None) for i in range(4)]
    expected = [one.by_torch()[rank] for one in data]
    for i in range(count):
        late_in_turn(i, rank)
        static.load(data[i % 4], rank)
        if mixed and (i + rank) % 3 == 0:
            out = static.eager()
        else:
            static.graph.replay()
            out = static.out
        worst.add(out, expected[i % 4])
    return worst.get()


def grows(rank, world):
    """Calls of two sizes by turns, the larger one after a capture of the smaller; then the graph again."""
    static, worst = captured(rank, world), Worst()
    large = mixture(world, 9, 4 * TOKENS)
    wanted, first = large.by_torch()[rank], mixture(world, 7).by_torch()[rank]
    for i in range(12):
        late_in_turn(i, rank)
        worst.add(call(large, rank, world, 4 * TOKENS), wanted)
        static.graph.replay()
        worst.add(static.out, first)
    return worst.get()


def too_many(rank, world):
    """More tokens than the ranks agreed on."""
    return raised(lambda: call(mixture(world, 7), rank, world, TOKENS - 1))


def expires(rank, world, absent):
    """The last rank does not call, is stopped, or dies."""
    data = mixture(world, 7)
    args = arguments(data, rank, world)

    def made(deadline):
        return tsd.moe(*args, form="fused", most_tokens=TOKENS, deadline=deadline)

    for _ in range(3):
        made(DEADLINE)
    finish()
    dist.barrier()

    def check(out) -> None:
        assert out.isnan().all(), "what did not come is NaN"

    return give_up_on_the_last_rank(
        rank, world, absent, lambda: made(0.5), lambda: made(DEADLINE), lambda: made(DEADLINE), check
    )


def replay_expires(rank, world):
    """The last rank does not replay. Returns what was raised, and the seconds until then."""
    static = captured(rank, world, deadline=0.5)
    for _ in range(3):
        dist.barrier()
        static.graph.replay()
        finish()
    dist.barrier()
    if rank == world - 1:
        time.sleep(8)
        return "", 0.0
    begin = time.monotonic()
    static.graph.replay()
    torch.cuda.synchronize()
    waited = time.monotonic() - begin
    assert static.out.isnan().all()
    said = raised(ts.check)
    for _ in range(5):
        static.graph.replay()
    torch.cuda.synchronize()
    assert static.out.isnan().all(), "a broken group computes nothing"
    return said, waited
