"""The demonstration's measurements: the same file and the same matmul, five ways.

``read``: the file alone, cold, by the producer that also streams. ``multiply``: `ts.matmul` alone, with everything
there. ``torch``: torch.mm alone. ``sequential``: a cold read, then the multiply. ``streamed``: both at once,
``ts.matmul(x, w, arrival=...)``. All use the same buffers, so that page faults cost nobody, and take turns, so that a
change of the machine's speed meets them all.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

import tilestream as ts
from tilestream.cli.demo.check import Checker, Verdict
from tilestream.cli.demo.machine import available_memory
from tilestream.trace.record import LaunchTrace, Recorder, record

if TYPE_CHECKING:
    from collections.abc import Callable

    from tilestream.cli.demo.source import Source

WAYS = ("read", "multiply", "torch", "sequential", "streamed")
SAMPLE_SECONDS = 0.05  # between two looks at how far a launch is
_SEED = 7


@dataclass(frozen=True)
class Settings:
    """What the user may choose. ``n`` None: calibrated."""

    n: int | None = None
    repeats: int = 5
    workers: int | None = None
    schedule: str = "auto"
    rows_per_chunk: int | None = None


@dataclass
class Timings:
    """Seconds, a sample a repeat."""

    samples: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})

    def median(self, way: str) -> float:
        """The middle sample of ``way``."""
        return statistics.median(self.samples[way])

    @property
    def won(self) -> float:
        """Seconds that streaming saves over one after the other."""
        return self.median("sequential") - self.median("streamed")

    @property
    def hideable(self) -> float:
        """What could be saved at most: the smaller of read and multiply."""
        return min(self.median("read"), self.median("multiply"))

    @property
    def larger(self) -> float:
        """The larger of read and multiply: what no overlap can go below."""
        return max(self.median("read"), self.median("multiply"))


@dataclass
class Result:
    """All that the demonstration found out."""

    source: Source
    how: str
    n: int
    calibrated: bool
    chunks: int
    rows_per_chunk: int
    plan: ts.Plan
    timings: Timings
    verdict: Verdict
    trace: LaunchTrace
    read_cpu: float


class Bench:
    """The buffers of one problem, and each way to run it once. A context manager: leaving it stops the producer."""

    def __init__(self, source: Source, settings: Settings) -> None:
        self.source, self.settings = source, settings
        refuse_too_large(source)
        source.drop()
        self.stream = ts.stream_in(source.path, tensor=source.tensor, rows_per_chunk=settings.rows_per_chunk)
        self.x = self.stream.tensor.view(source.rows, source.columns)
        self.deadline = max(60.0, source.matrix.nbytes / 5e6)
        self.w = self.out = self.by_torch = torch.empty(0)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()

    @property
    def n(self) -> int:
        """Columns of the weight."""
        return self.w.shape[-1]

    def set_n(self, n: int) -> None:
        """Make the weight ``[K, n]``, scaled so that outputs are of the activations' size, and the outputs' buffers."""
        k, dtype = self.source.columns, self.x.dtype
        generator = torch.Generator().manual_seed(_SEED)
        self.w = torch.randn(k, n, generator=generator).mul_(k**-0.5).to(dtype)
        self.out = torch.full((self.source.rows, n), float("nan"), dtype=dtype)
        self.by_torch = torch.zeros_like(self.out)

    def options(self) -> dict[str, Any]:
        """What both matmuls and the plan are given."""
        return {"schedule": self.settings.schedule, "workers": self.settings.workers}

    def plan(self) -> ts.Plan:
        """The plan of the streamed matmul."""
        options = self.options()
        options["workers"] = options["workers"] or torch.get_num_threads()  # as ts.matmul does
        extents = self.source.rows, self.n, self.source.columns
        return ts.plan(*extents, dtype=self.x.dtype, arrival=self.stream.arrival, **options)

    # The five ways -------------------------------------------------------------------------------------------------

    def read(self) -> float:
        """Seconds of a cold read."""
        self._make_cold()
        begin = time.perf_counter()
        self.stream.restart()
        self.stream.wait(self.deadline)
        return time.perf_counter() - begin

    def multiply(self) -> float:
        """Seconds of the matmul with everything there."""
        begin = time.perf_counter()
        ts.matmul(self.x, self.w, out=self.out, **self.options())
        return time.perf_counter() - begin

    def torch_mm(self) -> float:
        """Seconds of torch.mm."""
        begin = time.perf_counter()
        torch.mm(self.x, self.w, out=self.by_torch)
        return time.perf_counter() - begin

    def sequential(self) -> float:
        """Seconds of a cold read, and the matmul after it."""
        self._make_cold()
        begin = time.perf_counter()
        self.stream.restart()
        self.stream.wait(self.deadline)
        ts.matmul(self.x, self.w, out=self.out, **self.options())
        return time.perf_counter() - begin

    def streamed(self) -> tuple[float, LaunchTrace]:
        """Seconds of both at once, and what each worker did."""
        with self.recording() as recorder:
            begin = time.perf_counter()
            self.stream.restart()
            self._streamed_matmul()
            end = time.perf_counter()
            self.stream.wait(self.deadline)
        return end - begin, self._trace_of(recorder)

    def watched(self, watcher: Callable[[int, int, int, int], None]) -> None:
        """Both at once, telling ``watcher`` every `SAMPLE_SECONDS` how far they are. Not for timing."""
        with self.recording() as recorder:
            over = threading.Event()
            sampler = threading.Thread(target=self._sample, args=(recorder, watcher, over), name="tilestream-progress")
            self.stream.restart()
            sampler.start()
            try:
                self._streamed_matmul()
                self.stream.wait(self.deadline)
            finally:
                over.set()
                sampler.join()

    def _streamed_matmul(self) -> None:
        ts.matmul(self.x, self.w, out=self.out, arrival=self.stream.arrival, deadline=self.deadline, **self.options())

    def _make_cold(self) -> None:
        # Poisoned: whoever reads a row before it has arrived reads NaN, not the round before.
        self.x.fill_(float("nan"))
        self.source.drop()

    def recording(self) -> contextlib.AbstractContextManager[Recorder]:
        """Ready for a streamed run: input and output poisoned, a recorder on."""
        self.out.fill_(float("nan"))
        self._make_cold()
        return record()

    def _trace_of(self, recorder: Recorder) -> LaunchTrace:
        launch = recorder.launches[-1]
        launch.started = {0: self.stream.started}
        return launch

    def _sample(self, recorder: Recorder, watcher: Callable[[int, int, int, int], None], over: threading.Event) -> None:
        arrival = self.stream.arrival
        last = False
        while True:
            arrived = sum(arrival.arrived(chunk) for chunk in range(arrival.num_chunks))
            launch = recorder.launches[-1] if recorder.launches else None
            done, tiles = (launch.tiles_done, launch.tiles) if launch is not None else (0, 0)
            watcher(arrived, arrival.num_chunks, done, tiles)
            if last:
                return
            last = over.wait(SAMPLE_SECONDS)


def refuse_too_large(source: Source) -> None:
    """Raise `ValueError` where the matrix would not fit into memory."""
    here = available_memory()
    if here is not None and source.matrix.nbytes > 0.8 * here:
        raise ValueError(
            f"{source.path}: tensor {source.matrix.name!r} has {source.matrix.nbytes / 2**30:.3g} GiB, "
            f"{here / 2**30:.3g} GiB of memory are available; the demonstration holds the whole matrix"
        )


def calibrate(bench: Bench) -> int:
    """Columns of the weight with which multiplying takes about as long as a cold read; the weight is set to them."""
    read = statistics.median(bench.read() for _ in range(3))
    least, most = 16, _most_columns(bench)
    n = min(256, most)
    for _ in range(3):
        if n != bench.n:
            bench.set_n(n)
        seconds = statistics.median(bench.multiply() for _ in range(3))
        wanted = n * read / seconds
        better = min(max(16 * round(wanted / 16), least), most)
        if abs(better - n) <= max(16, n // 16):
            break
        n = better
    if n != bench.n:
        bench.set_n(n)
    return n


def _most_columns(bench: Bench) -> int:
    """As many columns as leave memory for three outputs and the check."""
    here = available_memory()
    row = 4 * bench.x.element_size() * (bench.source.rows + bench.source.columns)
    most = 16384 if here is None else int(0.5 * here / row)
    return min(max(16, most // 16 * 16), 16384)


def run(
    source: Source,
    settings: Settings,
    tell: Callable[[str], None] = lambda _: None,
    watcher: Callable[[int, int, int, int], None] = lambda *_: None,
) -> Result:
    """Calibrate, run once under ``watcher``, then measure and check each streamed answer.

    Parameters
    ----------
    tell
        Called with what is being done.
    watcher
        Called with (chunks arrived, chunks, tiles done, tiles) during the first streamed run.
    """
    with Bench(source, settings) as bench:
        tell("reading once, to have every page of the buffers there")
        bench.stream.wait(bench.deadline)
        if settings.n is None:
            tell("calibrating: how long reading takes, how fast this machine multiplies")
            calibrate(bench)
        else:
            bench.set_n(settings.n)
        tell("streaming")
        bench.watched(watcher)
        bench.torch_mm()
        checker = Checker(bench.x, bench.w, bench.by_torch, bench.plan().tile)
        verdicts = [checker.check(bench.out)]
        timings, traces, cpu = Timings(), list[LaunchTrace](), list[float]()
        for repeat in range(settings.repeats):
            tell(f"measuring: round {repeat + 1} of {settings.repeats}")
            timings.samples["read"].append(bench.read())
            cpu.append(bench.stream.cpu_seconds)
            timings.samples["multiply"].append(bench.multiply())
            timings.samples["torch"].append(bench.torch_mm())
            timings.samples["sequential"].append(bench.sequential())
            seconds, trace = bench.streamed()
            timings.samples["streamed"].append(seconds)
            traces.append(trace)
            verdicts.append(checker.check(bench.out))
        middle = statistics.median_low(timings.samples["streamed"])
        return Result(
            source=source,
            how=bench.stream.explain(),
            n=bench.n,
            calibrated=settings.n is None,
            chunks=bench.stream.arrival.num_chunks,
            rows_per_chunk=bench.stream.arrival.rows_per_chunk,
            plan=bench.plan(),
            timings=timings,
            verdict=_worst(verdicts),
            trace=traces[timings.samples["streamed"].index(middle)],
            read_cpu=statistics.median(cpu),
        )


def _worst(verdicts: list[Verdict]) -> Verdict:
    """A wrong one if there is one, else the one with the largest error."""
    return max(verdicts, key=lambda verdict: (not verdict.right, verdict.missing, verdict.maximum))
