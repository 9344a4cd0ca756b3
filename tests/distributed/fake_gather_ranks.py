"""Ranks that gather, on fake GPUs: their hosts, calling and side streams, and kernels that wait for what comes."""

from __future__ import annotations

import contextlib

import pytest
import torch
from fake_ranks import GroupState, Memory, look, pretend

from fake_cuda import DEVICE, FakeCuda, Until, fake_cuda
from tilestream.arrival.arrival import Arrival
from tilestream.arrival.device import Apart
from tilestream.core.error_record import EXPIRED, FIELDS, RECORDS, Record, op_number
from tilestream.core.protocols import gather
from tilestream.distributed import copy_engines
from tilestream.distributed.copy_engines import GatherQueue
from tilestream.distributed.gathered import ScaledRows
from tilestream.distributed.shards import Shards
from tilestream.runtime.channel import Channel


def report(channel: Channel, signals, chunk: int) -> None:
    """What a kernel writes that gives up: see `tilestream.kernels.device.gate.end_launch`."""
    number = int(channel.claims[0])
    channel.claims[0] += 1
    at = number % RECORDS * FIELDS
    record = Record(
        EXPIRED, op_number("all_gather_matmul"), 5, 0, chunk, signals.key, signals.epoch, 7, -1, 1, 3, 10**9, 10**9
    )
    for i, word in enumerate(record):
        channel.records[at + 1 + i] = word
    channel.records[at] = number + 1


def read(slot: torch.Tensor, apart: Apart | None) -> torch.Tensor:
    """What a kernel reads: rows that stand apart, and of the slot the others."""
    rows = slot.clone()
    if apart is not None:
        batches = rows.view(-1, apart.period, rows.shape[-1])
        batches[:, apart.first : apart.first + apart.height] = apart.rows.view(len(batches), apart.height, -1)
    return rows


class Gathering:
    """A rank: its gatherer, its calling stream, its own error channel, and what its kernels have handed in."""

    def __init__(self, cuda: FakeCuda, memory: Memory, rank: int) -> None:
        self.cuda, self.rank = cuda, rank
        self.state = GroupState(rank, memory.ranks)
        self.calling = cuda.stream()
        self.channel = Channel(DEVICE)
        self.over: set[int] = set()  # calls whose kernel has expired
        self.shapes: list[Shards] = []
        self.results: dict[int, torch.Tensor | None] = {}
        self.outs: list[torch.Tensor] = []  # of the last call
        self.scales: torch.Tensor | None = None  # of the last of them
        self.tensor: torch.Tensor | None = None  # the caller's: he writes each call's shard to it
        with cuda.on(self.calling), self.here():
            self.gatherer = GatherQueue(self.state, DEVICE, memory.of(rank))
        self.gatherer._watchdog.wake = lambda: None  # the test looks
        self.side = self.gatherer._side

    @contextlib.contextmanager
    def here(self):
        """All ranks are on one fake device: this one's channel is the device's for the length of the block."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(copy_engines, "channel", lambda device: self.channel)
            yield

    def data(self, rank: int, call: int, shards: Shards) -> torch.Tensor:
        return torch.full((shards.batches, shards.rows, shards.width), 100.0 * rank + call)

    def call(
        self, shards: Shards, whole: torch.Tensor | None = None, *, strided=False, ways=("push",), fails=False,
        scales: torch.Tensor | None = None, apart=True, products=1, loads=lambda: None,
    ) -> None:  # fmt: skip
        """The next call: a kernel that hands in what is gathered, or None where it has expired.

        ``ways``: call by call, and from the first on again. ``apart``: whether the kernel reads rows that stand apart
        where they stand. ``products``: how often what is waited for is asked for. ``loads``: what the host does before
        it launches the kernel.
        """
        self.shapes.append(shards)
        number, calling = len(self.shapes), self.calling

        def kernel(gathered: ScaledRows, arrival: Arrival) -> list[torch.Tensor]:
            loads()
            if fails:
                raise RuntimeError("out of memory")
            seen, signals = gathered.data, arrival._signals
            words = [signals.use(apart) for _ in range(products)][-1]
            own = signals.apart if apart else None

            def ended() -> bool:
                state = words.words.tolist()
                late = [i for i, word in enumerate(state) if word < words.epoch]
                if not late:
                    self.results[number] = read(seen, own)
                    self.scales = None if gathered.scales is None else gathered.scales.clone()
                elif number in self.over or -words.epoch in state:
                    self.results[number] = None
                    report(self.channel, signals, late[0])
                return number in self.results

            calling.give(Until(ended))
            return [torch.zeros(shards.total, 3)]

        value = self.data(self.rank, number, shards)
        if self.tensor is None or self.tensor.shape != value.shape or self.tensor.is_contiguous() == strided:
            self.tensor = torch.zeros(*value.shape[:-1], 2 * value.shape[-1])[..., ::2] if strided else value.clone()
        tensor = self.tensor
        calling.give(lambda: tensor.copy_(value))
        with self.cuda.on(calling), self.here():
            self.outs = self.gatherer.issue(
                shards, ScaledRows(tensor, scales), whole, kernel, 1.0, ways[(number - 1) % len(ways)]
            )

    def poll(self) -> None:
        with self.here():
            look(self.gatherer)

    def room(self) -> bool:
        """The host of a real rank would wait where its kernel is further behind."""
        under_way = [call for call in self.gatherer._under_way() if not call.kernel.query()]
        return len(under_way) <= gather.AHEAD

    def run(self, which: int, count: int | None = None) -> None:
        """Run the calling stream, or the side stream."""
        (self.calling, self.side)[which % 2].run(count)

    def expected(self, call: int) -> torch.Tensor:
        shards = self.shapes[call - 1]
        return torch.stack([self.data(r, call, shards) for r in range(self.state.world)], 1)

    @property
    def idle(self) -> bool:
        return self.calling.query() and self.side.query()


@contextlib.contextmanager
def world(ranks: int):
    with fake_cuda() as cuda, pytest.MonkeyPatch.context() as patch:
        pretend(cuda, patch)
        patch.setattr(copy_engines, "copy", lambda to, source: cuda.current.give(lambda: to.copy_(source)))
        take_out = copy_engines.take_out

        def later(whole, gathered, signals, *rest):
            epoch = signals.epoch
            cuda.current.give(lambda: take_out(whole, gathered, Then(signals, epoch), *rest))

        patch.setattr(copy_engines, "take_out", later)
        memory = Memory(ranks, 512, 16)
        yield cuda, [Gathering(cuda, memory, rank) for rank in range(ranks)]


class Then:
    """Signals as they were when a call was issued."""

    def __init__(self, signals, epoch: int) -> None:
        self.epoch, self.words = epoch, signals.use(apart=True).words

    def use(self, apart):
        assert apart
        return self
