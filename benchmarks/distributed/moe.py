"""A mixture of experts over the ranks: ours, whose kernels push the rows, and by hand NCCL with torch's grouped matmul.

A row is a width, a number of tokens a rank, and a skew. Of each way, as in `calls`, the median over rounds and of that
the largest over ranks: ``host us`` to issue a call, ``wall us`` of one of many from idle to idle, and ``gpu us`` from
when all ranks have met. The host of ``nccl + grouped`` and of ``ours unfused`` reads the counts in the midst of a call,
so their ``gpu us`` has that wait in it; ``ours captured`` is replayed.

Alone, ``experts`` are the three grouped products of the rows that come to this rank, and ``rows`` NCCL's all-to-all of
them, both ways, with known counts: ``max(experts, rows) + 40 us`` is the target.

``moe_shared`` is a smoke: two ranks share a GPU, over gloo. Its times are of two processes by turns, and of no use.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import silu

import tilestream as ts
from benchmarks.core.session import Session
from benchmarks.distributed.all_gather import checked
from benchmarks.distributed.calls import Replayed, host_us, wall_us
from benchmarks.distributed.ranks import BF16, DEADLINE, Forms, MeetingClock, device, record_of, rows_of, slowest
from tilestream import distributed as tsd
from tilestream.launch.choices import sort

#: Name, width, hidden width, experts of all ranks, experts of a token.
WIDTHS = [("Mixtral 8x7B", 4096, 14336, 8, 2), ("Qwen3-30B-A3B", 2048, 768, 128, 8), ("gpt-oss-20b", 2880, 2880, 32, 4)]
TOKENS = (256, 1024, 4096, 16384)
#: Widths and tokens of a dry run.
DRY, DRY_TOKENS = [("dry", 64, 96, 8, 2)], (16,)
#: By what power of its rank an expert's share of the tokens falls: none, and Zipf's.
SKEWS = {"uniform": 0.0, "Zipf": 1.0}
_PAUSE = 6_000_000


def choices(tokens: int, experts: int, top_k: int, power: float, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a router of this skew chooses, the same in each run: weights, and experts that differ in a token."""
    seeded = torch.Generator(device()).manual_seed(100 + rank)
    logits = -power * torch.arange(1, experts + 1, device=device()).log()
    noise = torch.empty(tokens, experts, device=device()).exponential_(generator=seeded)
    _, chosen = (logits - noise.log()).topk(top_k)
    return torch.rand(tokens, top_k, generator=seeded, device=device()).softmax(-1), chosen


class Mixture:
    """A layer and its tokens on this rank."""

    def __init__(self, rank: int, world: int, tokens: int, power: float, shape: tuple[int, int, int, int]) -> None:
        width, hidden, experts, self.top_k = shape
        self.world, self.experts, self.tokens = world, experts, tokens
        seeded = torch.Generator(device()).manual_seed(rank)

        def made(*of: int) -> torch.Tensor:
            return (torch.randn(*of, generator=seeded, device=device()) * of[-1] ** -0.5).to(BF16)

        own = experts // world
        self.w13 = made(own, 2 * hidden, width)  # stacked, as vLLM and SGLang keep them
        self.w1, self.w3 = self.w13.chunk(2, 1)
        self.w2 = made(own, width, hidden)
        self.x = torch.randn(tokens, width, generator=seeded, device=device()).to(BF16)
        self.weights, self.chosen = choices(tokens, experts, self.top_k, power, rank)

    def ours(self, form: str = "fused") -> torch.Tensor:
        """By the op."""
        return tsd.moe(
            self.x, (self.weights, self.chosen), self.w1, self.w2, self.w3, form=form,  # type: ignore[arg-type]
            most_tokens=self.tokens, deadline=DEADLINE,
        )  # fmt: skip

    def plan(self) -> str:
        """The op's plan in words."""
        return tsd.plan_moe(
            self.x, (self.weights, self.chosen), self.w1, self.w2, self.w3, form="fused", most_tokens=self.tokens
        ).explain()

    def dispatched(self) -> tuple[torch.Tensor, list[int], list[int], torch.Tensor, torch.Tensor]:
        """By NCCL: the rows by expert, what was sent and received, the order of both. The host reads the counts."""
        found = sort(self.chosen, self.experts)
        counts = found.starts.diff()
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent, received = torch.stack([x.view(self.world, -1).sum(1) for x in (counts, theirs)]).tolist()
        rows = self.x.new_empty(sum(received), self.x.shape[1])
        dist.all_to_all_single(rows, self.x[found.order // self.top_k], received, sent)
        expert = torch.arange(len(self.w1), device=device()).repeat(self.world)
        expert = expert.repeat_interleave(theirs.long(), output_size=len(rows))
        order = expert.argsort(stable=True)
        ends = theirs.view(self.world, -1).sum(0).cumsum(0).int()
        return rows[order], sent, received, order, ends

    def multiplied(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """By torch's grouped matmul."""
        gate, up = torch._grouped_mm(rows, self.w13.mT, ends).chunk(2, -1)
        return torch._grouped_mm(silu(gate) * up, self.w2.mT, ends)

    def by_nccl(self) -> torch.Tensor:
        """All of it by hand."""
        rows, sent, received, order, ends = self.dispatched()
        back = torch.empty_like(rows)
        back[order] = self.multiplied(rows, ends)
        results = self.x.new_empty(sum(sent), rows.shape[1])
        dist.all_to_all_single(results, back, sent, received)
        each = results[sort(self.chosen, self.experts).place].view(self.tokens, self.top_k, -1)
        return (each.float() * self.weights[:, :, None]).sum(1).to(BF16)

    def exact(self) -> torch.Tensor:
        """In float64, expert by expert; each rank's weights are sent to all."""
        out = torch.zeros(self.x.shape, dtype=torch.float64, device=device())
        for rank in range(self.world):
            for e in range(len(self.w1)):
                w1, w3, w2 = (w[e].clone() for w in (self.w1, self.w3, self.w2))
                for w in (w1, w3, w2):
                    dist.broadcast(w, rank)
                token, choice = (self.chosen == rank * len(self.w1) + e).nonzero(as_tuple=True)
                row = self.x[token].double()
                h = silu(row @ w1.double().T) * (row @ w3.double().T)
                out.index_add_(0, token, h @ w2.double().T * self.weights[token, choice, None].double())
        return out


def _ways(mixture: Mixture, shared: bool) -> tuple[Forms, Forms]:
    """The ways of a call, and its parts alone."""
    ways: Forms = {"ours": mixture.ours, "ours captured": Replayed(mixture.ours)}
    if shared:
        return {**ways, "ours unfused": lambda: mixture.ours("unfused")}, {}
    rows, sent, received, _, ends = mixture.dispatched()
    there, back = torch.empty_like(rows), rows.new_empty(sum(sent), rows.shape[1])

    def travel() -> None:
        dist.all_to_all_single(there, back, received, sent)
        dist.all_to_all_single(back, there, sent, received)

    return {**ways, "ours unfused": lambda: mixture.ours("unfused"), "nccl + grouped": mixture.by_nccl}, {
        "experts": lambda: mixture.multiplied(rows, ends), "rows": travel,
    }  # fmt: skip


def moe(rank: int, world: int, session: Session) -> None:
    """All of it; a smoke where ranks share a GPU."""
    shared = not session.dry and torch.cuda.device_count() < world
    record = record_of(session, rank, "moe_shared" if shared else "moe")
    clock, shuffle = MeetingClock(_PAUSE), random.Random(0).shuffle
    widths = {name: shape for name, *shape in (DRY if session.dry else WIDTHS)}
    counts = DRY_TOKENS if session.dry else TOKENS[:2] if shared else TOKENS

    def measure(item: tuple[str, int, str]) -> dict[str, Any]:
        name, tokens, skew = item
        shape = widths[name]
        mixture = Mixture(rank, world, tokens, SKEWS[skew], tuple(shape))  # type: ignore[arg-type]
        said, exact = mixture.plan(), mixture.exact()
        ways, alone = _ways(mixture, shared)
        right, errors, failures = checked(ways, exact)
        del exact
        row: dict[str, Any] = {
            "op": "moe", "of": name, "skew": skew, "tokens": tokens, "width": shape[0], "hidden": shape[1],
            "experts": shape[2], "top_k": shape[3], "plan": said, "errors": errors, "failures": failures,
        }  # fmt: skip
        return row | _measured({**right, **alone}, clock, shuffle, session.options.rounds or 9)

    rows_of(session, record, [(name, n, skew) for n in counts for name in widths for skew in SKEWS], measure)


def _measured(
    forms: Forms, clock: MeetingClock, shuffle: Callable[[list[str]], None], rounds: int
) -> dict[str, dict[str, float]]:
    """Microseconds by measure and way."""
    measures: dict[str, Callable[[Callable[[], Any]], float]] = {
        "host us": host_us, "wall us": wall_us, "gpu us": lambda call: clock(call)[0] * 1e3,
    }  # fmt: skip
    samples: dict[str, dict[str, list[float]]] = {what: {name: [] for name in forms} for what in measures}
    names = list(forms)
    for name in names:
        for _ in range(4):
            forms[name]()
    for _ in range(rounds):
        shuffle(names)
        for name in names:
            for what, measure in measures.items():
                samples[what][name].append(measure(forms[name]))
    ts.check()
    return {what: slowest(found) for what, found in samples.items()}
