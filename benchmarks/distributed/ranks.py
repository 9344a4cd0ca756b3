"""What benchmarks across GPUs share: a process a GPU, a call timed on all at once, the profiler's activities.

With ``--dry`` the ranks are two of the CPU, over gloo, and extents are small: the same code, meaningless figures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tilestream as ts
from benchmarks.core.records import Record
from benchmarks.core.section import Section
from benchmarks.core.session import Session, name_of

#: Bytes that are written to flush L2.
_FLUSH = 256 << 20


T = TypeVar("T")
BF16 = torch.bfloat16
#: Seconds that a call of ours may wait for a peer, and that NCCL and gloo may.
DEADLINE, TIMEOUT = 10.0, 120
#: Calls, by what the record calls them.
Forms = dict[str, Callable[[], Any]]


class Ranks(Session):
    """A run whose sections are functions of ``(rank, world, session)``, called in a process for each GPU.

    Only rank 0's session makes records: see `record_of`.
    """

    def call(self, section: Section) -> None:
        """Start the processes, and wait for them."""
        world = max(torch.cuda.device_count(), 2)  # a section that one GPU suffices for has two ranks on it
        with tempfile.TemporaryDirectory() as folder:
            given = world, f"{folder}/store", section, self.options, self.section_end
            mp.spawn(_rank, args=given, nprocs=world)


def device() -> str:
    """Where operands are: a dry run has none of GPUs."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    """Wait for this rank's GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def pause(cycles: int) -> None:
    """The GPU does nothing for so many cycles."""
    if torch.cuda.is_available():
        torch.cuda._sleep(cycles)


def give_back() -> None:
    """Give memory of the allocator back to the GPU."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def small(session: Session, extent: int) -> int:
    """An extent; a small one in a dry run."""
    return max(extent // 64 // 8 * 8, 8) if session.dry else extent


def some(session: Session, items: Sequence[Any]) -> Sequence[Any]:
    """All items; of a dry run the first and the last, which are of different kinds."""
    return [items[0], items[-1]] if session.dry else items


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A ``[m, k]``, and a Linear's weight as ``[k, n]``; bf16."""
    a, w = torch.randn(m, k, device=device()), torch.randn(n, k, device=device()) * k**-0.5
    return a.to(BF16), w.to(BF16).t()


def rows_of(
    session: Session, record: Record | None, items: Iterable[Any], measure: Callable[[Any], dict[str, Any]]
) -> None:  # fmt: skip
    """Measure items on all ranks while rank 0 has time; those that rank 0's record has rows of are left out.

    Rank 0 writes after each row. ``measure`` returns a row whose ``failures`` are by form. An item is begun if the
    section's time is not over by then, and twice the longest one so far fits in.
    """
    items, longest, begin = list(items), 0.0, time.monotonic()
    there = set() if record is None else record.earlier
    if record is not None:
        record.data["missing"] = [name_of(item) for item in items if name_of(item) not in there]
        record.write()
    for item in items:
        going: list[Any] = [name_of(item) not in there, session.left > 2 * longest]
        dist.broadcast_object_list(going, 0)
        if not going[0]:
            continue
        if not going[1]:
            break
        started = time.monotonic()
        row = measure(item)
        longest = max(longest, time.monotonic() - started)
        give_back()
        if record is not None:
            record.data["missing"].remove(name_of(item))
            record.data["seconds"] = round(time.monotonic() - begin, 1)
            failures = row.get("failures", {})
            record.data["failures"] += [f"{name_of(item)} {name}: {text}" for name, text in failures.items()]
            record.add({"item": name_of(item), **row})
            shown = {name: value for name, value in row.items() if name not in ("errors", "plan", "why")}
            print(f"{record.data['seconds']:6.1f} s ", shown, flush=True)


def record_of(session: Session, rank: int, name: str, **extra: Any) -> Record | None:
    """The record on rank 0, named with the number of ranks behind it; None on the others."""
    world = dist.get_world_size()
    return session.record(f"{name}_x{world}", world=world, **extra) if rank == 0 else None


def _rank(
    rank: int, world: int, where: str, section: Section, options: argparse.Namespace, end: float
) -> None:  # fmt: skip
    shared = torch.cuda.device_count() < world
    if options.dry:
        torch.set_num_threads(1)
        torch.cuda.is_available = lambda: False
    else:
        if shared:
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        torch.cuda.set_device(0 if shared else rank)
    dist.init_process_group(
        "gloo" if shared else "cpu:gloo,cuda:nccl", init_method=f"file://{where}", rank=rank, world_size=world,
        timeout=timedelta(seconds=TIMEOUT),
    )  # fmt: skip
    session = Session(options)
    session.end = session.section_end = end
    section.load()(rank, world, session)
    dist.barrier()
    dist.destroy_process_group()


class MeetingClock:
    """Times a call on its stream once all ranks have met there, with L2 flushed and the host's part hidden.

    Parameters
    ----------
    pause
        Cycles that the GPU sleeps while the host issues the call.
    """

    def __init__(self, pause: int) -> None:
        on_gpu = torch.cuda.is_available()
        self._flush = torch.empty(_FLUSH if on_gpu else 0, dtype=torch.uint8, device=device())
        self._meet, self._pause = torch.zeros(1, device=device()), pause

    def __call__(self, function: Callable[[], Any]) -> tuple[float, float]:
        """Milliseconds of one call, and what issuing it cost the host."""
        if not torch.cuda.is_available():
            dist.all_reduce(self._meet)
            issue = time.perf_counter()
            function()
            return (ms := (time.perf_counter() - issue) * 1e3), ms
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
    medians = torch.tensor([statistics.median(of) for of in times.values()], device=device())
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return {name: round(ms, 4) for name, ms in zip(times, medians.tolist(), strict=True)}


class Activity(NamedTuple):
    """What a GPU did from ``begin`` to ``end``, nanoseconds by the host's clock; ``size`` of a copy, else 0."""

    name: str
    stream: int
    begin: float
    end: float
    size: int


def activities(document: dict[str, Any]) -> list[Activity]:
    """Kernels and copies of torch's profiler, from its Chrome trace, in order."""
    base = float(document.get("baseTimeNanoseconds", 0))
    found = []
    for event in document["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy"):
            begin, more = base + 1e3 * event["ts"], event.get("args", {})
            size = int(more.get("bytes", 0)) if event["cat"] == "gpu_memcpy" else 0
            found.append(Activity(event["name"], int(more.get("stream", -1)), begin, begin + 1e3 * event["dur"], size))
    return sorted(found, key=lambda one: one.begin)


def kernel_of(found: Sequence[Activity]) -> Activity:
    """The matmul among a GPU's activities: the longest kernel, of those of that name if there are any."""
    kernels = [one for one in found if not one.size]
    matmuls = [one for one in kernels if "gemm" in one.name.lower()]
    return max(matmuls or kernels, key=lambda one: one.end - one.begin)


def profiled(call: Callable[[], T]) -> tuple[T, list[Activity]]:
    """What a call returns, and what this GPU did. All ranks begin together."""
    torch.cuda.synchronize()
    dist.barrier()
    return seen_by_profiler(call)


def seen_by_profiler(call: Callable[[], T]) -> tuple[T, list[Activity]]:
    """What a call returns, and what this GPU did."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        result = call()
        torch.cuda.synchronize()
    ts.check()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/trace.json"
        profiler.export_chrome_trace(path)
        return result, activities(json.loads(Path(path).read_text(encoding="utf-8")))
