"""What benchmarks across GPUs share: a process a GPU, and a call timed on all of them at once."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

#: Bytes that are written to flush L2.
_FLUSH = 256 << 20


def on_each_gpu(function: Callable[..., None], *arguments: Any, seconds: float = 60) -> None:
    """``function(rank, world, *arguments)`` in a process for each GPU, in a group whose timeout is ``seconds``."""
    world = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(world, f"{folder}/store", seconds, function, arguments), nprocs=world)


def _rank(
    rank: int, world: int, where: str, seconds: float, function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{where}", rank=rank, world_size=world,
        timeout=timedelta(seconds=seconds),
    )  # fmt: skip
    function(rank, world, *arguments)
    dist.barrier()
    dist.destroy_process_group()


class MeetingClock:
    """Times a call on its stream, from when all ranks have met there: L2 is flushed, and the host's part is hidden.

    Parameters
    ----------
    pause
        Cycles that the GPU sleeps while the host issues the call.
    """

    def __init__(self, pause: int) -> None:
        self._flush = torch.empty(_FLUSH, dtype=torch.uint8, device="cuda")
        self._meet, self._pause = torch.zeros(1, device="cuda"), pause

    def __call__(self, function: Callable[[], Any]) -> tuple[float, float]:
        """Milliseconds of one call, and what issuing it cost the host."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.all_reduce(self._meet)  # so that no rank is still at the call before
        torch.cuda.synchronize()
        self._flush.zero_()
        torch.cuda._sleep(self._pause)
        dist.all_reduce(self._meet)
        begin.record()
        issue = time.perf_counter()
        function()
        host = (time.perf_counter() - issue) * 1e3
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end), host


def slowest(times: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each, and of those the largest over ranks."""
    medians = torch.tensor([statistics.median(of) for of in times.values()]).cuda()
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return {name: round(ms, 4) for name, ms in zip(times, medians.tolist(), strict=True)}
