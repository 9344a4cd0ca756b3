"""A matmul beside NCCL's all-reduce or all-gather, at once, on two GPUs or more.

::

    begin;  collective on its own stream;  head start;  matmul;  wait for the collective;  end

NCCL is told how many SMs it may have (a CTA each); the matmul is told nothing. With a head start the collective is in
flight when the matmul comes, as the collective of the layer before would be. Without one, both become possible at once
and the matmul's launch wins: workers, or torch's first wave, hold every SM, and the collective begins when the first
worker leaves. Only a matmul that was told to leave SMs free (``told``) lets it begin earlier. Each point has the time
of the collective alone, that of the matmul, and a lower bound for both: the collective's time, or the matmul's and what
it loses of the device while the collective runs.
"""

from __future__ import annotations

import datetime
import os
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, spawn

from tilestream.core.device import DeviceProperties
from tilestream_tools.sweep.check import Check
from tilestream_tools.sweep.clock import Call, GpuClock, Timing
from tilestream_tools.sweep.contention import refuse_count
from tilestream_tools.sweep.record import Sweep, read
from tilestream_tools.sweep.run import CpuClock, Spot, Way, about, answer, device_of, point_of, prepare
from tilestream_tools.sweep.suite import Suite

COLLECTIVES = ("all_reduce", "all_gather")
#: Seconds after which ranks that have not ended are ended.
DEADLINE = 300.0
#: Seconds that a collective needs to be on its SMs: an event between streams, and a launch.
HEAD_START = 20e-6


def floor(comm: float, matmul: float, taken: int, units: int) -> float:
    """Seconds that both take at least, if what NCCL holds is lost to the matmul while it runs, and nothing else is."""
    return max(comm, matmul + comm * taken / units)


class _Together:
    """A clock whose samples begin on all ranks at once, and are taken anew on all of them."""

    device: str
    group: dist.ProcessGroup

    def _sample(self, call: Call) -> float:
        dist.barrier(self.group)
        return super()._sample(call)  # type: ignore[misc, no-any-return]

    def _is_late(self, late: bool) -> bool:
        """Whether any rank is: each makes as many calls, since a collective is of all."""
        found = torch.tensor(int(late), device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX, self.group)
        return bool(found)


class _CpuClock(_Together, CpuClock):
    def pause(self, seconds: float) -> None:
        """Nothing: the host launches nothing here."""


class _GpuClock(_Together, GpuClock):
    def pause(self, seconds: float) -> None:
        """Hold the current stream for about so long."""
        if seconds:
            torch.cuda._sleep(int(seconds * torch.cuda.clock_rate() * 1e6))


def sweep_beside(
    suite: Suite, taken: Sequence[int], todo: Sequence[Way], *, world: int = 2, collective: str = "all_reduce",
    megabytes: int = 256, head_start: float = HEAD_START, rounds: int = 15, backend: str = "nccl",
    deadline: float = DEADLINE,
) -> Sweep:  # fmt: skip
    """All points of a suite beside a collective.

    Parameters
    ----------
    taken
        SMs that NCCL may have.
    world
        Ranks, a GPU each.
    megabytes
        Of the collective's tensor: what each rank gives to all-reduce, or has after all-gather, in units of 2**20.
    head_start
        Seconds from the collective's issue to the matmul's. They are in the time of both.
    backend
        ``"nccl"``; ``"gloo"`` does the same on the CPU, where nothing is taken and the times mean nothing.
    deadline
        Seconds for all.

    Raises
    ------
    ValueError
        If an argument is none that it can be, or there are not enough GPUs.
    RuntimeError
        If a rank fails, or the deadline passes: then all ranks are ended.
    """
    if collective not in COLLECTIVES:
        raise ValueError(f"collective={collective!r}; it must be one of {', '.join(COLLECTIVES)}")
    if not 0 <= head_start < 1:
        raise ValueError(f"head_start={head_start}: it is 0 or more seconds, and less than 1")
    if backend == "nccl" and torch.cuda.device_count() < world:
        raise ValueError(f"{world} ranks take {world} GPUs; there are {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        path, port = Path(folder) / "points.json", _free_port()
        job = _Job(suite, tuple(taken), tuple(todo), collective, megabytes, head_start, rounds, backend)
        context: Any = spawn(_rank, (world, port, str(path), job), nprocs=world, join=False)
        end = time.monotonic() + deadline
        try:
            while not context.join(timeout=1.0):
                if time.monotonic() > end:
                    raise RuntimeError(f"beside {collective}: the ranks have not ended in {deadline:g} s")
        except ProcessException as error:
            raise RuntimeError(f"beside {collective}: a rank failed: {error}") from error
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        return read(path)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class _Job(NamedTuple):
    """What each rank does: the arguments of `sweep_beside`."""

    suite: Suite
    taken: tuple[int, ...]
    todo: tuple[Way, ...]
    collective: str
    megabytes: int
    head_start: float
    rounds: int
    backend: str


def _rank(rank: int, world: int, port: int, path: str, job: _Job) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    on_gpus, bound = job.backend == "nccl", None
    if on_gpus:
        torch.cuda.set_device(rank)
        bound = torch.device("cuda", rank)
    else:
        torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group(job.backend, rank=rank, world_size=world, timeout=timeout, device_id=bound)
    device = device_of("gpu" if on_gpus else "cpu")
    sweep = Sweep(about(device) | {"world": world, "collective": job.collective, "megabytes": job.megabytes})
    sweep.about["head_start_us"] = round(1e6 * job.head_start, 3)
    for count in job.taken:
        refuse_count(device.workers, count)
        clock = _GpuClock() if on_gpus else _CpuClock()
        clock.group = _group(job.backend, count)
        for shape in job.suite.shapes:
            spot = Spot(shape, job.suite.dtype, "nccl", count, device.workers - count, device.workers, device.workers)
            _points(sweep, clock, device, spot, job)
    if rank == 0:
        sweep.write(path)
    dist.barrier()
    dist.destroy_process_group()


def _group(backend: str, count: int) -> dist.ProcessGroup:
    """A group whose collectives have so many CTAs."""
    options = None
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options.config.min_ctas = options.config.max_ctas = max(count, 1)
    group: dist.ProcessGroup = dist.new_group(pg_options=options)
    return group


def _points(sweep: Sweep, clock: _CpuClock | _GpuClock, device: DeviceProperties, spot: Spot, job: _Job) -> None:
    """All ways of one shape, beside a collective on so many SMs."""
    shape, group, world = spot.shape, clock.group, dist.get_world_size(clock.group)
    how = {"device": clock.device, "dtype": getattr(torch, spot.dtype)}
    a, w = (torch.randn(rows, shape.k, **how) for rows in (shape.m, shape.n))
    check = Check.of_product(a, w.t(), torch.mm(a, w.t()))
    data = torch.zeros(job.megabytes << 19, dtype=torch.bfloat16, device=clock.device)
    part = torch.zeros_like(data[: len(data) // world])

    def communicate() -> Any:
        if job.collective == "all_reduce":
            return dist.all_reduce(data, group=group, async_op=True)
        return dist.all_gather_into_tensor(data[: len(part) * world], part, group, async_op=True)

    def beside(call: Call) -> Call:
        def both() -> None:
            work = communicate()
            clock.pause(job.head_start)
            call()
            work.wait()

        return both

    prepared = {}
    for way in job.todo:
        prepared[way] = prepare(way, shape, spot.dtype, spot.left, a, w.t())
        check(answer(prepared[way]))
    calls: dict[str, Call] = {"comm": lambda: communicate().wait()}
    for way, one in prepared.items():
        calls |= {str(way): one.call, f"{way} beside": beside(one.call)}
    timing = _slowest(clock.interleave(calls, rounds=job.rounds))
    for way, one in prepared.items():
        beside(lambda one=one: answer(one))()  # type: ignore[misc]
        comm, alone = timing.median("comm"), timing.median(str(way))
        more = {"comm": comm, "matmul": alone, "floor": floor(comm, alone, spot.taken, spot.units)}
        error = check(one.out)["max"]
        sweep.points.append(point_of(spot, way, one, timing, error, device, f"{way} beside", **more))


def _slowest(timing: Timing) -> Timing:
    """Each sample's longest time of all ranks."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, timing.seconds)
    seconds = {name: [max(found) for found in zip(*(one[name] for one in every), strict=True)] for name in every[0]}
    return Timing(seconds, timing.mode)
