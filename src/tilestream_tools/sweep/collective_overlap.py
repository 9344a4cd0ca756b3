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
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, spawn

from tilestream.core.device import DeviceProperties
from tilestream_tools.sweep.check import Check
from tilestream_tools.sweep.clock import Call, GpuClock, Timing, quartiles
from tilestream_tools.sweep.contention import refuse_count
from tilestream_tools.sweep.record import Point, Sweep, read
from tilestream_tools.sweep.run import CpuClock, Way, about, answer, device_of, prepare
from tilestream_tools.sweep.suite import Shape, Suite

COLLECTIVES = ("all_reduce", "all_gather")
#: Seconds after which ranks that have not ended are ended.
DEADLINE = 300.0
#: Seconds that a collective needs to be on its SMs: an event between streams, and a launch.
HEAD_START = 20e-6


def floor(comm: float, matmul: float, taken: int, units: int) -> float:
    """Seconds that both take at least, if what NCCL holds is lost to the matmul while it runs, and nothing else is."""
    return max(comm, matmul + comm * taken / units)


class _Together:
    """A clock whose samples begin on all ranks at once."""

    group: dist.ProcessGroup

    def _sample(self, call: Call) -> float:
        dist.barrier(self.group)
        return super()._sample(call)  # type: ignore[misc, no-any-return]


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
        raise ValueError(f"collective={collective!r}; it is one of {', '.join(COLLECTIVES)}")
    if not 0 <= head_start < 1:
        raise ValueError(f"head_start={head_start}: it is 0 or more seconds, and less than 1")
    if backend == "nccl" and torch.cuda.device_count() < world:
        raise ValueError(f"{world} ranks take {world} GPUs; there are {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        path, port = Path(folder) / "points.json", _free_port()
        given = (world, port, str(path), backend, suite, tuple(taken), tuple(todo))
        how = (collective, megabytes, head_start, rounds)
        context: Any = spawn(_rank, (*given, how), nprocs=world, join=False)
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


def _rank(
    rank: int, world: int, port: int, path: str, backend: str, suite: Suite, taken: tuple[int, ...],
    todo: tuple[Way, ...], how: tuple[str, int, float, int],
) -> None:  # fmt: skip
    collective, megabytes, head_start, rounds = how
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    bound = torch.device(device) if backend == "nccl" else None
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=timeout, device_id=bound)
    properties = device_of("cpu" if backend == "gloo" else "gpu")
    sweep = Sweep(about(properties) | {"world": world, "collective": collective, "megabytes": megabytes})
    sweep.about["head_start_us"] = round(1e6 * head_start, 3)
    for count in taken:
        refuse_count(properties.workers, count)
        clock = _CpuClock() if backend == "gloo" else _GpuClock()
        clock.group = _group(backend, count)
        for shape in suite.shapes:
            _points(
                sweep, clock, properties, shape, suite.dtype, count, todo, collective, megabytes << 20, head_start,
                rounds, device,
            )  # fmt: skip
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


def _points(
    sweep: Sweep, clock: _CpuClock | _GpuClock, properties: DeviceProperties, shape: Shape, dtype: str, count: int,
    todo: Sequence[Way], collective: str, size: int, head_start: float, rounds: int, device: str,
) -> None:  # fmt: skip
    how = {"device": device, "dtype": getattr(torch, dtype)}
    a, w = (torch.randn(rows, shape.k, **how) for rows in (shape.m, shape.n))
    check, group = Check.of_product(a, w.t(), torch.mm(a, w.t())), clock.group
    units, left = properties.workers, properties.workers - count
    data = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
    part = torch.zeros_like(data[: len(data) // dist.get_world_size(group)])

    def communicate() -> Any:
        if collective == "all_reduce":
            return dist.all_reduce(data, group=group, async_op=True)
        return dist.all_gather_into_tensor(data[: len(part) * dist.get_world_size(group)], part, group, async_op=True)

    def beside(call: Call) -> Call:
        def both() -> None:
            work = communicate()
            clock.pause(head_start)
            call()
            work.wait()

        return both

    prepared = {}
    for way in todo:
        prepared[way] = prepare(way, shape, dtype, left, a, w.t())
        check(answer(prepared[way]))
    calls: dict[str, Call] = {"comm": lambda: communicate().wait()}
    for way, one in prepared.items():
        calls |= {str(way): one.call, f"{way} beside": beside(one.call)}
    timing = _slowest(clock.interleave(calls, rounds=rounds))
    for way, one in prepared.items():
        beside(lambda one=one: answer(one))()  # type: ignore[misc]
        errors, comm, alone = check(one.out), timing.median("comm"), timing.median(str(way))
        seconds = timing.median(f"{way} beside")
        low, high = quartiles(timing.seconds[f"{way} beside"])
        rate = shape.operations / seconds
        if rate > properties.peak(dtype, units):
            raise AssertionError(f"{shape}, {way}: {rate / 1e12:.4g} TFLOP/s, above the device's peak")
        more = {
            "comm": comm, "matmul": alone, "floor": floor(comm, alone, count, units),
        }  # fmt: skip
        sweep.points.append(Point(
            str(shape), shape.name, dtype, "nccl", count, left, units, way.implementation, way.queues,
            seconds, low, high, timing.rounds, rate / 1e12, one.plan, errors["max"], more,
        ))  # fmt: skip


def _slowest(timing: Timing) -> Timing:
    """Each sample's longest time of all ranks."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, timing.seconds)
    seconds = {name: [max(found) for found in zip(*(one[name] for one in every), strict=True)] for name in every[0]}
    return Timing(seconds, timing.mode)
