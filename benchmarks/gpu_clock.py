"""Device time of calls side by side, and the check that what is timed gives right answers.

A sample is: L2 flushed, a spin of the GPU long enough for the host to queue what follows, an event, the call, an event.
So host time is in no sample. The flush reads: one that writes leaves L2 full of dirty lines, whose way back to memory
is then timed, too.

Short calls are replayed from a CUDA graph, one call a graph, so that a call of several kernels has no gaps that a busy
host would leave. Both peers are then timed in graphs, or neither. What the events and the launch themselves add is the
same for all, and not subtracted: `GpuClock.empty` measures it.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from gemm_shapes import quartiles
from harness import errors

Call = Callable[[], Any]


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
    #: About 0.2 ms.
    SPIN_CYCLES = 400_000

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
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.sum(self._source, dim=0, out=self._sink)
        torch.cuda._sleep(self.SPIN_CYCLES)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3

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


def sampled_rows(m: int, most: int = 256) -> torch.Tensor:
    """Row numbers over all of ``m``, the first and the last among them."""
    return torch.linspace(0, m - 1, min(m, most), dtype=torch.float64).round().long().unique()


class Check:
    """The error rule on a sample of rows, and all of the answer against the peer's.

    Parameters
    ----------
    peer
        ``[M, N]``, the same maths by torch in the same dtype.
    rows
        Which rows ``reference`` has.
    reference
        ``[len(rows), N]`` float64.
    """

    def __init__(self, peer: torch.Tensor, rows: torch.Tensor, reference: torch.Tensor) -> None:
        self.peer, self.rows, self.reference = peer, rows.to(peer.device), reference

    @classmethod
    def of_product(cls, a: torch.Tensor, b: torch.Tensor, peer: torch.Tensor, finish: Call | None = None) -> Check:
        """For ``finish(a @ b)``, where ``finish`` takes float64 rows and their numbers."""
        rows = sampled_rows(a.shape[0]).to(a.device)
        few = a[rows].double()
        parts = [few @ part.double() for part in b.split(8192, dim=1)]
        reference = torch.cat(parts, dim=1)
        return cls(peer, rows, reference if finish is None else finish(reference, rows))

    def __call__(self, got: torch.Tensor) -> dict[str, float]:
        """The errors.

        Raises
        ------
        AssertionError
            If an element is not finite, the sampled rows break the error rule, or the rest is further from the peer
            than two answers that keep it can be.
        """
        figures = errors(got[self.rows], self.peer[self.rows], self.reference)
        scale, ulp = self.reference.abs().max().item(), torch.finfo(got.dtype).eps
        largest = apart = norm = 0.0
        for mine, theirs in zip(got.split(2048), self.peer.split(2048), strict=True):
            if not torch.isfinite(mine).all().item():
                raise AssertionError(f"wrong answer: {int((~torch.isfinite(mine)).sum())} elements are not finite")
            difference = mine.float() - theirs.float()
            largest = max(largest, difference.abs().max().item())
            apart += difference.double().square().sum().item()
            norm += theirs.double().square().sum().item()
        found = {"max": largest / scale, "frobenius": (apart / norm) ** 0.5}
        for kind, value in found.items():
            if not value <= 3 * figures[f"peer_{kind}"] + (4 if kind == "max" else 1) * ulp:
                raise AssertionError(f"wrong answer: {kind} distance of all rows to the peer's answer is {value:.3g}")
        return {name: float(f"{value:.3g}") for name, value in figures.items()}


def poison(m: int, n: int, dtype: torch.dtype, device: str) -> None:
    """Leave NaN where the next output of this shape will most likely be allocated."""
    torch.full((m, n), float("nan"), dtype=dtype, device=device)
