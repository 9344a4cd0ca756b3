"""Ranks of a mixture of experts in Triton's interpreter: their memory, and the whole call on fake GPUs."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tilestream.core.protocols import experts as text
from tilestream.core.protocols.replay import BROKEN, COUNT, MARKS, control_words
from tilestream.distributed.graph_experts import GraphExperts
from tilestream.launch.choices import Chosen, sort
from tilestream.launch.layout import Layout
from tilestream.launch.portable import experts, rank_calls
from tilestream.runtime.channel import Channel

sys.path.insert(0, str(Path(__file__).parents[2] / "distributed"))
from fake_graph_ranks import Memory, RankMemory, capture, graph_world
from fake_ranks import GroupState

from fake_cuda import DEVICE, FakeCuda, Until

FORM = 5


class Tokens(NamedTuple):
    """A rank's tokens of a call, and what they chose."""

    x: torch.Tensor
    weights: torch.Tensor
    choices: torch.Tensor

    @classmethod
    def random(cls, seed: int, count: int, layout: Layout, top_k: int, dtype: torch.dtype, skew: bool = False):
        made = torch.Generator().manual_seed(seed)
        choices = torch.randint(layout.world * layout.experts, (count, top_k), generator=made)
        if skew:
            choices = choices // 2 * 0 + 1
        x = torch.randn(count, layout.width, generator=made).to(dtype)
        return cls(x, torch.rand(count, top_k, generator=made), choices)

    def expected(self, count: int) -> torch.Tensor:
        """Expert e multiplies by e + 1; a choice of no expert (there are ``count``) makes its token NaN."""
        total = torch.zeros(self.x.shape)
        for chosen, weight in zip(self.choices.T, self.weights.T, strict=True):
            rows = (self.x.float() * (chosen[:, None] + 1)).to(self.x.dtype).float() * weight[:, None]
            total += torch.where(((chosen < 0) | (chosen >= count))[:, None], float("nan"), rows)
        return total.to(self.x.dtype)


def multiplied(rank: int, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """A rank's experts on rows that end at ``ends``; what lies behind is 0."""
    made, begin = torch.zeros_like(rows), 0
    for expert, end in enumerate(ends.tolist()):
        made[begin:end] = (rows[begin:end].float() * (rank * len(ends) + expert + 1)).to(rows.dtype)
        begin = end
    return made


def words_for(world: int, layout: Layout) -> tuple[list[torch.Tensor], ...]:
    """Memory, signals and control words of all ranks: shared with processes that are forked."""
    sizes = layout.size, 4 * text.signals(world, layout.experts), 4 * control_words(world)
    return tuple(
        [torch.zeros(-(-size // 16) * 4, dtype=torch.int32).share_memory_() for _ in range(world)] for size in sizes
    )


class Ranks:
    """The memory of all ranks, each with an error channel of its own; the kernels of a call, step by step."""

    def __init__(self, layout: Layout, dtype: torch.dtype = torch.float32, workers: int = 3) -> None:
        self.layout, self.dtype, self.workers, world = layout, dtype, workers, layout.world
        self.memory, self.signals, self.control = words_for(world, layout)
        control = self.control
        self.places = torch.tensor([*(x.data_ptr() for x in control), *(x[BROKEN:].data_ptr() for x in control)])
        slots = torch.tensor([x.data_ptr() for x in (*self.memory, *self.signals)])
        e = layout.experts
        self.local = [
            experts.Local(
                torch.zeros(world * e, dtype=torch.int32), *torch.zeros(2, world, 4, dtype=torch.int32).unbind(),
                torch.full((world, -(-e // 4) * 4), -1, dtype=torch.int32), slots,
            ) for _ in range(world)
        ]  # fmt: skip
        self.channels = [Channel(torch.device("cpu")) for _ in range(world)]

    def words(self, rank: int, form: int = FORM) -> rank_calls.SlotWords:
        channel = self.channels[rank]
        experts.records_of = rank_calls.records_of = lambda device: (channel.records, channel.claims)
        return rank_calls.SlotWords(
            self.signals[rank], self.control[rank], self.places, rank, self.layout.world, "moe", 40 + rank, form
        )

    def rows(self, rank: int, source: int) -> torch.Tensor:
        layout = self.layout
        size = layout.capacity * layout.width * layout.itemsize
        memory = self.memory[rank].view(torch.uint8)
        return memory[source * size : (source + 1) * size].view(self.dtype).view(layout.capacity, layout.width)

    def results(self, rank: int) -> torch.Tensor:
        layout = self.layout
        size, memory = layout.capacity * layout.width * layout.itemsize, self.memory[rank].view(torch.uint8)
        return memory[layout.results : layout.results + size].view(self.dtype).view(layout.capacity, layout.width)

    def begin(self, rank: int, tokens: Tokens, seconds: float = 20.0, form: int = FORM) -> Chosen:
        layout = self.layout
        chosen = sort(tokens.choices, layout.world * layout.experts)
        rank_calls.begin_call(self.words(rank, form), seconds, 0, 1)
        top_k = tokens.choices.shape[1]
        experts.push_rows(
            self.words(rank), layout, self.local[rank], tokens.x, top_k, chosen, self.workers, self.workers + 1
        )
        return chosen

    def take(self, rank: int, source: int, seconds: float = 20.0) -> None:
        experts.take_rows(self.words(rank), self.layout, self.local[rank], source, seconds)

    def give_back(self, rank: int, source: int) -> None:
        local = self.local[rank]
        made = multiplied(rank, self.rows(rank, source), local.ends[source, : self.layout.experts])
        experts.push_results(self.words(rank), self.layout, local, source, made, self.workers)

    def end(self, rank: int, tokens: Tokens, chosen: Chosen, seconds: float = 20.0) -> torch.Tensor:
        out = torch.empty_like(tokens.x)
        experts.take_results(self.words(rank), self.layout, seconds)
        rank_calls.end_call(self.words(rank))
        experts.add_results(self.words(rank), self.results(rank), tokens.weights, chosen, out)
        return out

    def whole(self, rank: int, tokens: Tokens, seconds: float = 20.0) -> torch.Tensor:
        """A rank's call, where other ranks' run beside it."""
        chosen = self.begin(rank, tokens, seconds)
        for source in text.sources(rank, self.layout.world):
            self.take(rank, source, seconds)
            self.give_back(rank, source)
        return self.end(rank, tokens, chosen, seconds)

    def call(self, tokens: list[Tokens], backwards: bool = False) -> list[torch.Tensor]:
        """One call of all ranks, in lock step; ``backwards``: the last rank begins."""
        ranks = range(self.layout.world)
        chosen = {rank: self.begin(rank, tokens[rank]) for rank in (reversed(ranks) if backwards else ranks)}
        for rank in ranks:
            for source in text.sources(rank, self.layout.world):
                self.take(rank, source)
                self.give_back(rank, source)
        return [self.end(rank, tokens[rank], chosen[rank]) for rank in ranks]

    def broken(self) -> list[int]:
        return [int(x[BROKEN]) for x in self.control]

    def records(self, rank: int) -> list:
        found = []
        while (taken := self.channels[rank].take()) is not None:
            found.append(taken[1])
        return found


class ExpertRank:
    """A rank on a fake GPU, which runs the real kernels as work of its streams; a graph of one call; its results."""

    def __init__(self, cuda: FakeCuda, memory: Memory, rank: int, layout: Layout, top_k: int) -> None:
        self.cuda, self.rank, self.layout, self.top_k = cuda, rank, layout, top_k
        self.state, self.calling, self.channel = GroupState(rank, layout.world), cuda.stream(), Channel(DEVICE)
        self.impatient, self.form, self.graph = False, FORM, None
        with cuda.on(self.calling), self.here():
            self.queue = GraphExperts(self.state, DEVICE, RankMemory(memory, rank))
            self.queue._watchdog.wake = lambda: None
            self.queue.reserve(layout.size, text.signals(layout.world, layout.experts))
        tokens = self.tokens(0)
        self.x, self.weights, self.chosen = tokens.x.clone(), tokens.weights.clone(), self.sorted(tokens)
        self.results: list[torch.Tensor] = []
        self.issued = 0

    def tokens(self, call: int) -> Tokens:
        """Of a call: as many as a graph holds, with other choices each time."""
        seed, count = 100 * self.rank + call, 3 + self.rank
        return Tokens.random(seed, count, self.layout, self.top_k, torch.float32, call % 3 == 1)

    def sorted(self, tokens: Tokens) -> Chosen:
        return sort(tokens.choices, self.layout.world * self.layout.experts)

    def expected(self, call: int) -> torch.Tensor:
        return self.tokens(call).expected(self.layout.world * self.layout.experts)

    @property
    def gpu(self) -> ExpertRank:
        """What has a channel and patience; of other ranks it is an object of its own."""
        return self

    @property
    def streams(self) -> list:
        return [self.calling, self.queue._side, self.queue._graph_side]

    @property
    def idle(self) -> bool:
        return all(stream.query() for stream in self.streams)

    def kernel(self, real, there):
        """``real``, as work of the current stream; it is begun when ``there`` or something that ends its wait is."""

        def launch(words, *args):
            args, at = list(args), next((i for i, x in enumerate(args) if isinstance(x, float)), None)

            def ready() -> bool:
                return self.impatient or bool(words.control[BROKEN]) or there(words, *args)

            def run() -> None:
                if at is not None:
                    args[at] = 20.0 if there(words, *args) else 1e-6
                experts.records_of = rank_calls.records_of = lambda device: (self.channel.records, self.channel.claims)
                real(words, *args)

            self.cuda.current.give(Until(ready))
            self.cuda.current.give(run)

        return launch

    @contextlib.contextmanager
    def here(self):
        """All ranks are on one fake device: inside, its kernels are this rank's."""
        world, e = self.layout.world, self.layout.experts
        always = lambda *args: True  # noqa: E731

        def taken(words, *args) -> bool:
            peers = [rank for rank in range(world) if rank != words.rank]
            return all(int(words.control[MARKS + world + rank]) >= int(words.control[COUNT]) for rank in peers)

        def rows(words, layout, local, source, seconds) -> bool:
            own = words.signals[world + source * e : world + (source + 1) * e]
            return bool(words.signals[source]) and bool(own.all())

        def results(words, layout, seconds) -> bool:
            return bool(words.signals[world * (1 + e) : world * (2 + e)].all())

        with pytest.MonkeyPatch.context() as patch:
            for module, name, there in (
                (rank_calls, "begin_call", taken), (rank_calls, "end_call", always), (experts, "add_results", always),
                (experts, "push_rows", always), (experts, "take_rows", rows), (experts, "push_results", always),
                (experts, "take_results", results),
            ):  # fmt: skip
                patch.setattr(module, name, self.kernel(getattr(module, name), there))
            yield

    def call(self) -> torch.Tensor:
        """Issue a call, or capture it. Returns its result."""

        def compute(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            made = torch.full_like(rows, -7.0)
            self.cuda.current.give(lambda: made.copy_(multiplied(self.rank, rows, ends)))
            return made

        with self.cuda.on(self.calling), self.here():
            return self.queue.mix(self.layout, 2, 3, self.x, self.weights, self.chosen, compute, 1.0, self.form)

    def capture(self) -> None:
        """Capture a call."""
        with capture(self.cuda) as self.graph:
            self.out = self.call()

    def next(self, replays: bool) -> None:
        """The caller writes its tokens and choices, and calls or replays; then reads the result."""
        self.issued += 1
        tokens = self.tokens(self.issued)
        fresh = tokens.x, tokens.weights, *self.sorted(tokens)

        def write() -> None:
            for to, source in zip((self.x, self.weights, *self.chosen), fresh, strict=True):
                to.copy_(source)

        self.calling.give(write)
        if replays:
            self.graph.replay()
            out = self.out
        else:
            out = self.call()
        self.calling.give(lambda: self.results.append(out.clone()))


@contextlib.contextmanager
def expert_world(layout: Layout, top_k: int):
    """A fake device and the ranks on it."""
    with graph_world(0, None, None) as (cuda, _):  # type: ignore[arg-type]
        memory = Memory(layout.world)
        yield cuda, [ExpertRank(cuda, memory, rank, layout, top_k) for rank in range(layout.world)]
