"""Device time of calls side by side.

A sample is: L2 flushed, a spin of the GPU long enough for the host to queue what follows, an event, the call, an event.
So host time is in no sample: a spin that was too short is doubled, and the sample is taken anew. The flush reads: one
that writes leaves L2 full of dirty lines, whose way back to memory is then timed, too.

Short calls are replayed from a CUDA graph, one call a graph, so that a call of several kernels has no gaps that a busy
host would leave. Both peers are then timed in graphs, or neither. What the events and the launch themselves add is the
same for all, and not subtracted: `GpuClock.empty` measures it.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Call = Callable[[], Any]


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The values a quarter and three quarters up."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return ordered[round(last / 4)], ordered[round(3 * last / 4)]


@dataclass
class Timing:
    """Seconds of each call by function, round by round."""

    seconds: dict[str, list[float]]
    mode: str
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        """How many."""
        return len(next(iter(self.seconds.values())))

    def median(self, name: str) -> float:
        """Seconds."""
        return statistics.median(self.seconds[name])

    def medians(self) -> dict[str, float]:
        """Seconds of each."""
        return {name: self.median(name) for name in self.seconds}

    def band(self, name: str, peer: str) -> tuple[float, float]:
        """Quartiles of the rounds' ratios, above 1 where ``name`` is the faster one."""
        pairs = zip(self.seconds[peer], self.seconds[name], strict=True)
        return quartiles([theirs / ours for theirs, ours in pairs])


class GpuClock:
    """Times calls on the current GPU."""

    device = "cuda"
    #: Several times the L2 of an H100 (50 MB) or H200 (60 MB).
    FLUSH_BYTES = 256 * 2**20
    #: About 0.2 ms; doubled, up to so many times, for calls that take the host longer.
    SPIN_CYCLES, DOUBLINGS = 400_000, 8
    #: Seconds of a cycle, at least: an H100's highest clock.
    CYCLE = 1 / 1.98e9

    def __init__(self) -> None:
        self._source = torch.ones(self.FLUSH_BYTES // 4, device=self.device)
        self._sink = torch.empty((), device=self.device)

    def about(self) -> dict[str, Any]:
        """How it times, for the record."""
        return {
            "flush": f"reads {self.FLUSH_BYTES >> 20} MiB before each call",
            "empty_us": {mode: round(1e6 * self.empty(mode), 2) for mode in ("eager", "graph")},
        }

    def empty(self, mode: str) -> float:
        """Seconds that a kernel reads which writes one word: what a sample holds beside the call."""
        word = torch.empty(1, device=self.device)
        timing = self.interleave({"empty": word.zero_}, rounds=25, graphs=mode == "graph")
        return timing.median("empty")

    def interleave(self, functions: dict[str, Call], *, rounds: int, warmup: int = 3, graphs: bool = False) -> Timing:
        """Time each, in turn, in another order each round.

        With ``graphs``, each is captured first, and ``results`` holds what the capture returned: the tensors that the
        graphs write. Where a capture fails, all are timed eagerly.
        """
        for function in functions.values():
            for _ in range(warmup):
                function()
        self.synchronize()
        calls, results, mode, kept = dict(functions), {}, "eager", []
        if graphs:
            try:
                for name, function in functions.items():
                    graph, results[name] = self._captured(function)
                    calls[name] = graph.replay
                    kept.append(graph)
                mode = "graph"
            except Exception as error:
                calls, results, mode = dict(functions), {}, f"eager: {type(error).__name__} in capture"
            for call in calls.values():
                for _ in range(warmup):
                    call()
            self.synchronize()
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        names, shuffle = list(calls), random.Random(0).shuffle
        for _ in range(rounds):
            shuffle(names)
            for name in names:
                seconds[name].append(self._sample(calls[name]))
        if mode == "graph":  # what the graphs write when they are replayed once more is what is checked
            for name, result in results.items():
                if isinstance(result, torch.Tensor) and result.is_floating_point():
                    result.fill_(float("nan"))
                    calls[name]()
            self.synchronize()
            results = {n: r.clone() if isinstance(r, torch.Tensor) else r for n, r in results.items()}
        return Timing(seconds, mode, results)

    def _sample(self, call: Call) -> float:
        for doubled in range(self.DOUBLINGS + 1):  # from the shortest on: most that are late are so once
            spin = self.SPIN_CYCLES << doubled
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.sum(self._source, dim=0, out=self._sink)
            begin = time.perf_counter()
            torch.cuda._sleep(spin)
            start.record()
            call()
            end.record()
            issued = time.perf_counter() - begin
            end.synchronize()
            if not self._is_late(issued >= 0.8 * spin * self.CYCLE):
                return float(start.elapsed_time(end)) * 1e-3
        raise RuntimeError(
            f"a call took the host {issued:.3g} s to issue, longer than the GPU is made to spin: does it wait?"
        )

    def _is_late(self, late: bool) -> bool:
        """Whether a sample is taken anew. Ranks whose calls communicate agree on it."""
        return late

    @staticmethod
    def _captured(function: Call) -> tuple[Any, Any]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = function()
        return graph, result

    def synchronize(self) -> None:
        """Wait for the GPU; raises what it has run into."""
        torch.cuda.synchronize()

    def free(self) -> None:
        """Give memory back to the device."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class WallClock(GpuClock):
    """The host's clock, on the CPU: to try what a GPU will run, and for nothing else."""

    device = "cpu"

    def __init__(self) -> None:
        pass

    def about(self) -> dict[str, Any]:
        """Nothing of a GPU."""
        return {"flush": "none", "empty_us": {"eager": 0.0, "graph": 0.0}}

    def interleave(self, functions: dict[str, Call], *, rounds: int, warmup: int = 3, graphs: bool = False) -> Timing:
        """A few rounds."""
        return super().interleave(functions, rounds=min(rounds, 3), warmup=1, graphs=False)

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def free(self) -> None:
        """Nothing to give back."""

    def _sample(self, call: Call) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin


def host_microseconds(
    functions: dict[str, Call], *, batch: int = 64, batches: int = 50, synchronize: Call | None = None
) -> tuple[dict[str, float], dict[str, str]]:
    """What a call costs the host: the median of batches that take turns; inside a batch nothing waits for the GPU.

    Returns
    -------
    tuple
        Microseconds of each call that works, and what is wrong with the others.
    """
    wait, works, refused = synchronize or torch.cuda.synchronize, dict(functions), {}
    for name, function in functions.items():
        try:
            for _ in range(20):
                function()
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {error}"[:200]
            del works[name]
    samples: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(batches):
        for name, function in works.items():
            wait()
            begin = time.perf_counter()
            for _ in range(batch):
                function()
            samples[name].append((time.perf_counter() - begin) / batch)
    return {name: round(1e6 * statistics.median(values), 2) for name, values in samples.items()}, refused
