"""The demonstration's measurements: the ways of a bench in turn, so that a change of the machine's speed meets all."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tilestream.cli.demo.check import Checker, Verdict

if TYPE_CHECKING:
    import tilestream as ts
    from tilestream.cli.demo.bench import Bench, Tell, Watcher
    from tilestream.trace.record import LaunchTrace


@dataclass
class Timings:
    """Seconds, a sample a round, by way; ``bring`` is the name of the first. See `tilestream.cli.demo.bench`."""

    bring: str
    samples: dict[str, list[float]] = field(default_factory=dict)

    def add(self, way: str, seconds: float) -> None:
        """One more sample of ``way``."""
        self.samples.setdefault(way, []).append(seconds)

    def median(self, way: str) -> float:
        """The middle sample of ``way``."""
        return statistics.median(self.samples[way])

    @property
    def won(self) -> float:
        """Seconds that streaming saves over one after the other."""
        return self.median("sequential") - self.median("streamed")

    @property
    def hideable(self) -> float:
        """What could be saved at most: the smaller of the input's time and the multiply's."""
        return min(self.median(self.bring), self.median("multiply"))

    @property
    def larger(self) -> float:
        """The larger of the two: what no overlap can go below."""
        return max(self.median(self.bring), self.median("multiply"))

    @property
    def over_larger(self) -> float:
        """Streamed over `larger`."""
        return self.median("streamed") / self.larger


@dataclass
class Result:
    """All that the demonstration found out.

    Attributes
    ----------
    about, facts
        Where the input comes from: names and what to say, and the same for JSON.
    nbytes
        Bytes of the input.
    n_is
        Whether n was ``given``, is the ``default``, or was ``calibrated``.
    plan
        Of the streamed matmul.
    trace
        Of the median streamed run, where launches are traced.
    bring_cpu
        Seconds of CPU time that the producer took alone.
    """

    about: list[tuple[str, str]]
    facts: dict[str, Any]
    nbytes: int
    n_is: str
    plan: ts.Plan
    timings: Timings
    verdict: Verdict
    trace: LaunchTrace | None
    bring_cpu: float


def run(bench: Bench, tell: Tell = lambda _: None, watcher: Watcher = lambda *_: None) -> Result:
    """Prepare, then measure, and check each streamed answer. The bench is closed at the end.

    Parameters
    ----------
    tell
        Called with what is being done.
    watcher
        Called with (chunks arrived, chunks, tiles done, tiles) during the first streamed run, where that can be seen.
    """
    with bench:
        bench.prepare(tell, watcher)
        checker = Checker(bench.truth, bench.w, bench.by_torch, bench.plan().tile)
        verdicts = [checker.check(bench.out)]
        timings, traces, cpu = Timings(bench.bring), list[Any](), list[float]()
        rounds = bench.settings.repeats
        for number in range(rounds):
            tell(f"measuring: round {number + 1} of {rounds}")
            for way, once in bench.ways().items():
                timings.add(way, once())
                if way == bench.bring:
                    cpu.append(bench.stream.cpu_seconds)
            traces.append(bench.trace)
            verdicts.append(checker.check(bench.out))
        middle = statistics.median_low(timings.samples["streamed"])
        return Result(
            about=bench.about(),
            facts=bench.facts(),
            nbytes=bench.x.nbytes,
            n_is=bench.n_is,
            plan=bench.plan(),
            timings=timings,
            verdict=_worst(verdicts),
            trace=traces[timings.samples["streamed"].index(middle)],
            bring_cpu=statistics.median(cpu),
        )


def _worst(verdicts: list[Verdict]) -> Verdict:
    """A wrong one if there is one, else the one with the largest error."""
    return max(verdicts, key=lambda verdict: (not verdict.right, verdict.missing, verdict.maximum))
