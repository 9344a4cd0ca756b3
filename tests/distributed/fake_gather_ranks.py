"""Ranks that gather on fake GPUs: their hosts and streams, and kernels that wait for chunks."""

from __future__ import annotations

import contextlib

import pytest
import torch
from fake_ranks import Memory, Rank, patch_driver

from fake_cuda import DEVICE, FakeCuda, Until, fake_cuda
from tilestream.arrival.arrival import Arrival
from tilestream.arrival.device import LocalRows
from tilestream.core.error_record import EXPIRED, FIELDS, RECORDS, Record, op_number
from tilestream.core.protocols import gather
from tilestream.distributed import copy_engines, slots
from tilestream.distributed.copy_engines import GatherQueue
from tilestream.distributed.shards import ScaledRows, Shards
from tilestream.runtime.channel import Channel


def report(channel: Channel, signals, chunk: int) -> None:
    """The record of a kernel that expires: see `tilestream.kernels.device.gate.end_launch`."""
    number = int(channel.claims[0])
    channel.claims[0] += 1
    at = number % RECORDS * FIELDS
    record = Record(
        EXPIRED, op_number("all_gather_matmul"), 5, 0, chunk, signals.key, signals.epoch, 7, -1, 1, 3, 10**9, 10**9
    )
    for i, word in enumerate(record):
        channel.records[at + 1 + i] = word
    channel.records[at] = number + 1


def read(slot: torch.Tensor, local: LocalRows | None) -> torch.Tensor:
    """The rows that a kernel reads: those of the slot, and the own ones where they stand apart."""
    rows = slot.clone()
    if local is not None:
        batches = rows.view(-1, local.period, rows.shape[-1])
        batches[:, local.first : local.first + local.height] = local.rows.view(len(batches), local.height, -1)
    return rows


class GatherRank(Rank):
    """A rank with its own error channel; a result is what the kernel read."""

    kind = GatherQueue

    def __init__(self, cuda: FakeCuda, memory: Memory, rank: int) -> None:
        self.channel = Channel(DEVICE)
        super().__init__(cuda, memory, rank)
        self.over: set[int] = set()  # calls whose deadline has passed
        self.outs: list[torch.Tensor] = []  # of the last call
        self.scales: torch.Tensor | None = None  # of the last call
        self.tensor: torch.Tensor | None = None  # the caller's: each call's shard is written to it
        self.dtype = torch.float32

    @contextlib.contextmanager
    def here(self):
        """All ranks are on one fake device: inside, this rank's channel is the device's."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(copy_engines, "channel", lambda device: self.channel)
            yield

    def data(self, rank: int, call: int, shards: Shards) -> torch.Tensor:
        return torch.full((shards.batches, shards.rows, shards.width), 100.0 * rank + call, dtype=self.dtype)

    def call(
        self, shards: Shards, gathered: torch.Tensor | None = None, *, strided=False, ways=("push",), fails=False,
        scales: torch.Tensor | None = None, local=True, products=1, loads=lambda: None,
    ) -> None:  # fmt: skip
        """Issue the next call.

        ``ways``: of each call in turn. ``local``: whether the kernel reads the own rows where they stand. ``products``:
        how many kernels read them. ``loads``: what the host does before it launches the kernel.
        """
        calling = self.calling
        self.shapes.append(shards)
        number = len(self.shapes)

        def kernel(rows: ScaledRows, arrival: Arrival) -> list[torch.Tensor]:
            loads()
            if fails:
                raise RuntimeError("out of memory")
            signals = arrival._signals
            words = [signals.use(local) for _ in range(products)][-1]
            own = signals.local_rows if local else None

            def ended() -> bool:
                found = words.words.tolist()
                late = [i for i, word in enumerate(found) if word < words.epoch]
                if not late:
                    self.results[number] = read(rows.data, own)
                    self.scales = None if rows.scales is None else rows.scales.clone()
                elif number in self.over or -words.epoch in found:
                    self.results[number] = None
                    report(self.channel, signals, late[0])
                return number in self.results

            calling.give(Until(ended))
            return [torch.zeros(shards.total, 3)]

        value = self.data(self.rank, number, shards)
        if self.tensor is None or self.tensor.shape != value.shape or self.tensor.is_contiguous() == strided:
            twice = torch.zeros(*value.shape[:-1], 2 * value.shape[-1], dtype=value.dtype)
            self.tensor = twice[..., ::2] if strided else value.clone()
        tensor = self.tensor
        calling.give(lambda: tensor.copy_(value))
        with self.cuda.on(calling), self.here():
            self.outs = self.queue.issue(
                shards, ScaledRows(tensor, scales), gathered, kernel, 1.0, ways[(number - 1) % len(ways)]
            )

    def room(self) -> bool:
        """A gather's host waits for kernels, not for streams."""
        under_way = [call for call in self.queue._under_way() if not call.kernel.query()]
        return len(under_way) <= gather.AHEAD and not self.state.broken

    def expected(self, call: int) -> torch.Tensor:
        shards = self.shapes[call - 1]
        return torch.stack([self.data(r, call, shards) for r in range(self.world)], 1)


@contextlib.contextmanager
def world(ranks: int):
    with fake_cuda() as cuda, pytest.MonkeyPatch.context() as patch:
        cuda.clock = patch_driver(cuda, patch)
        patch.setattr(slots, "copy", lambda to, source: cuda.current.give(lambda: to.copy_(source)))
        take_out = copy_engines.take_out

        def later(into, rows, signals, *rest):
            seen = SignalsOf(signals)
            cuda.current.give(lambda: take_out(into, rows, seen, *rest))

        patch.setattr(copy_engines, "take_out", later)
        memory = Memory(ranks, 512, 16)
        yield cuda, [GatherRank(cuda, memory, rank) for rank in range(ranks)]


class SignalsOf:
    """Signals with the epoch that they have now."""

    def __init__(self, signals) -> None:
        self.epoch, self.words = signals.epoch, signals.use(local_rows=True).words

    def use(self, local_rows):
        assert local_rows
        return self
