"""Ranks of a group on fake GPUs, in one process: what they share, and what their drivers would do."""

from __future__ import annotations

import contextlib
import ctypes
import time
import types

import pytest
import torch

from fake_cuda import FakeCuda, Until
from tilestream.core.errors import GroupBroken
from tilestream.core.protocols import gather
from tilestream.distributed import call_queue, copy_engines, gpu_reduce_scatter
from tilestream.distributed.call_queue import CallQueue
from tilestream.distributed.host_flags import LINE, RankFlags


class Memory:
    """Each rank's slots and words, in one process."""

    def __init__(self, ranks: int, slot_bytes: int, chunks: int = 0) -> None:
        self.slot_bytes, self.chunks = slot_bytes, chunks
        self.signals = [torch.zeros(gather.SLOTS * chunks, dtype=torch.int32) for _ in range(ranks)]
        self.slots = [torch.full((gather.SLOTS * slot_bytes,), 255, dtype=torch.uint8) for _ in range(ranks)]
        self.flags = torch.zeros(ranks * (ranks + 2) * LINE, dtype=torch.uint8)
        self.ranks = ranks

    def of(self, rank: int) -> types.SimpleNamespace:
        def slot(of: int, number: int) -> torch.Tensor:
            return self.slots[of][number * self.slot_bytes : (number + 1) * self.slot_bytes]

        def signals(number: int) -> torch.Tensor:
            return self.signals[rank][self.chunks * number : self.chunks * (number + 1)]

        def signal(of: int, number: int, chunk: int) -> int:
            assert 0 <= chunk < self.chunks
            return self.signals[of].data_ptr() + 4 * (self.chunks * number + chunk)

        flags = RankFlags(self.flags.data_ptr(), self.flags.data_ptr(), rank, self.ranks)
        return types.SimpleNamespace(
            slot_bytes=self.slot_bytes, chunks=self.chunks, signals=signals, signal=signal, slot=slot,
            address=lambda of, number: slot(of, number).data_ptr(), flags=flags,
        )  # fmt: skip


class GroupState:
    """As `group_state.GroupState`, as far as a gatherer asks."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.name, self.why = rank, world, "tp", None

    @property
    def broken(self) -> bool:
        return self.why is not None

    def check(self) -> None:
        if self.why:
            raise GroupBroken(self.name, self.why)

    def break_(self, why: str) -> GroupBroken:
        self.why = self.why or why
        return GroupBroken(self.name, self.why)


def pretend(cuda: FakeCuda, patch: pytest.MonkeyPatch) -> None:
    """Have the fake device do what ranks give to the driver."""

    def write(stream: int, address: int, value: int) -> None:
        cuda.streams[stream].give(lambda: setattr(ctypes.c_int32.from_address(address), "value", value))

    def wait(stream: int, address: int, value: int) -> None:
        cuda.streams[stream].give(Until(lambda: ctypes.c_int32.from_address(address).value >= value))

    @contextlib.contextmanager
    def at_once(device):
        stream = cuda.stream()
        with cuda.on(stream):
            yield stream
        stream.run()

    for module in (call_queue, copy_engines, gpu_reduce_scatter):
        for name, does in (
            ("stream_write", write), ("stream_wait", wait), ("copy_across", cuda._copy), ("copy_in", cuda._copy),
            ("aside", at_once),
        ):  # fmt: skip
            patch.setattr(module, name, does, raising=False)
    # Not lent: a gatherer of an earlier world, found by the garbage collector, would give its stream to this one.
    for module in (call_queue,):
        patch.setattr(module, "lend_to", lambda borrower, device: cuda.stream())
    patch.setattr(call_queue, "POLL_SECONDS", 0.01)
    # While the host sleeps the device runs.
    clock = types.SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: cuda.run())
    for module in (copy_engines, gpu_reduce_scatter, call_queue):
        patch.setattr(module, "time", clock)


def look(queue: CallQueue) -> None:
    """The watchdog, as often as it takes to be sure."""
    for _ in range(gpu_reduce_scatter.POLLS + 1):
        queue.poll()


def refused_once(
    monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda, ranks: list, shape: object, of: str, name: str
) -> None:
    """Two ranks call; the second's ``of.name`` finds no room, before its call is counted, and it calls again."""
    first, second = ranks
    first.call(shape)
    with monkeypatch.context() as patch:
        patch.setattr(getattr(second, of), name, lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(MemoryError):
            second.call(shape)
    second.shapes.clear()
    second.call(shape)  # the caller tries again
    cuda.run()
    for rank in ranks:
        assert not rank.state.broken
        assert rank.results[1].equal(rank.expected(1))
