"""A file, read cold from the disk into the memory of the CPU that multiplies it."""

from __future__ import annotations

import statistics
import threading
from typing import TYPE_CHECKING, Any

import torch

import tilestream as ts
from tilestream.cli import ui
from tilestream.cli.demo.bench import Bench
from tilestream.cli.demo.machine import available_memory
from tilestream.trace.record import LaunchTrace, Recorder, record

if TYPE_CHECKING:
    from tilestream.cli.demo.bench import Tell, Watcher
    from tilestream.cli.demo.settings import Settings
    from tilestream.cli.demo.source import Source

SAMPLE_SECONDS = 0.05  # between two looks at how far a launch is


class FileBench(Bench):
    """``read`` is cold, and streamed runs are traced.

    Parameters
    ----------
    written
        Where the file comes from, for people.
    """

    bring = "read"

    def __init__(self, source: Source, settings: Settings, written: str = "yours") -> None:
        refuse_too_large(source)
        self.source, self.written = source, written
        source.drop()
        stream = ts.stream_in(source.path, tensor=source.tensor, rows_per_chunk=settings.rows_per_chunk, device="cpu")
        super().__init__(stream, None, settings, deadline=max(60.0, source.matrix.nbytes / 5e6))

    def about(self) -> list[tuple[str, str]]:
        """See `Bench`."""
        source = self.source
        file = f"{source.path} ({ui.size(source.matrix.nbytes)}, {self.written})"
        return [("file", file), ("read", self.stream.explain()), ("", source.how)]

    def facts(self) -> dict[str, Any]:
        """See `Bench`."""
        how = {"how": self.stream.explain(), "cold": self.source.cold, "coldness": self.source.how}
        return {"file": {**self.source.facts(), **how}}

    def prepare(self, tell: Tell, watcher: Watcher) -> None:
        """See `Bench`."""
        tell("reading once, to have every page of the buffers there")
        self.stream.wait(self.deadline)
        if self.settings.n is None:
            tell("calibrating: how long reading takes, how fast this machine multiplies")
            calibrate(self)
            self.n_is = "calibrated"
        else:
            self.set_n(self.settings.n)
        torch.mm(self.x, self.w, out=self.by_torch)
        tell("streaming")
        self.watched(watcher)

    def streamed(self) -> float:
        """See `Bench`."""
        with record() as recorder:
            seconds = super().streamed()
        self.trace = self._trace_of(recorder)
        return seconds

    def watched(self, watcher: Watcher) -> None:
        """Both at once, telling ``watcher`` every `SAMPLE_SECONDS` how far they are. Not for timing."""
        self._forget_all()
        with record() as recorder:
            over = threading.Event()
            sampler = threading.Thread(target=self._sample, args=(recorder, watcher, over), name="tilestream-progress")
            self.stream.restart()
            sampler.start()
            try:
                self._multiply_arriving()
                self.stream.wait(self.deadline)
            finally:
                over.set()
                sampler.join()

    def _settle(self) -> None:
        """Nothing is under way when a call returns."""

    def _forget(self) -> None:
        super()._forget()
        self.source.drop()

    def _trace_of(self, recorder: Recorder) -> LaunchTrace:
        launch = recorder.launches[-1]
        launch.started = {0: self.stream.started}
        return launch

    def _sample(self, recorder: Recorder, watcher: Watcher, over: threading.Event) -> None:
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


def refuse_too_large(source: Source, copies: int = 1) -> None:
    """Raise `ValueError` where ``copies`` of the matrix would not fit into memory."""
    here = available_memory()
    if here is not None and copies * source.matrix.nbytes > 0.8 * here:
        whole = "the whole matrix" if copies == 1 else f"the whole matrix {copies} times"
        raise ValueError(
            f"{source.path}: tensor {source.matrix.name!r} has {source.matrix.nbytes / 2**30:.3g} GiB, "
            f"{here / 2**30:.3g} GiB of memory are available; the demonstration holds {whole}"
        )


def calibrate(bench: Bench) -> int:
    """Columns of the weight with which multiplying takes about as long as a cold read; the weight is set to them."""
    read = statistics.median(bench.bring_alone() for _ in range(3))
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
    row = 4 * bench.x.element_size() * sum(bench.x.shape)
    most = 16384 if here is None else int(0.5 * here / row)
    return min(max(16, most // 16 * 16), 16384)
