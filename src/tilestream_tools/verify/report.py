"""`run` explores all configurations of a level, on one or several processes, and makes the report."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from tilestream_tools.verify.faults import Violation
from tilestream_tools.verify.processes import NotAlikeError
from tilestream_tools.verify.search import check
from tilestream_tools.verify.sweep import MODELS, Case, Level, configurations

#: The number of states at which the search for the shortest trace gives up.
PLAIN_LIMIT = 2_000_000
#: The same number for ranks, which have four processes each, and for clusters, of up to eight. There the search with
#: reductions gives the trace.
LIMITS = {"gather": 5_000, "sums": 5_000, "cluster": 50_000, "pair": 20_000}


@dataclass(frozen=True)
class Result:
    """The result of one configuration: ``states`` of the search with reductions, and the violation or None.

    ``seconds`` is CPU time.
    """

    model: str
    configuration: str
    states: int
    seconds: float
    violation: Violation | None = None

    def __str__(self) -> str:
        verdict = "holds" if self.violation is None else f"VIOLATED: {self.violation.kind}"
        return f"{self.model}: {self.configuration}: {self.states:,} states, {self.seconds:.2f} s: {verdict}"


@dataclass(frozen=True)
class Report:
    """The report of `run`. ``results`` are in growing order of size for each model."""

    level: str
    results: tuple[Result, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether all properties hold in all configurations."""
        return not self.violations

    @property
    def violations(self) -> tuple[Violation, ...]:
        """For each failing model, the violation at its smallest failing size."""
        return tuple(r.violation for r in self.results if r.violation is not None)

    @property
    def states(self) -> int:
        """The number of explored states."""
        return sum(r.states for r in self.results)

    def __str__(self) -> str:
        lines = []
        for model in dict.fromkeys(r.model for r in self.results):
            own = [r for r in self.results if r.model == model]
            most = max(own, key=lambda r: r.states)
            verdict = "every property holds" if all(r.violation is None for r in own) else "VIOLATED"
            lines.append(
                f"{model:8} {len(own):4} configurations {sum(r.states for r in own):12,} states "
                f"{sum(r.seconds for r in own):7.1f} CPU s  {verdict}"
            )
            lines.append(f"{'':8} largest: {most.states:,} states: {most.configuration}")
        lines += [str(violation) for violation in self.violations]
        lines.append(f"{self.level}: {self.states:,} states in {self.seconds:.1f} s: {'OK' if self.ok else 'FAILED'}")
        return "\n".join(lines)


def explore(model: str, case: Case) -> Result:
    """Explore one configuration."""
    began = time.process_time()
    limit = LIMITS.get(model, PLAIN_LIMIT)
    try:
        violation, states = check(lambda reduce: case.build(reduce), str(case), limit)
    except NotAlikeError:  # the program depends on its worker's number, so workers are not interchangeable
        violation, states = check(lambda reduce: case.build(reduce, symmetry=False), str(case), limit)
    return Result(model, str(case), states, time.process_time() - began, violation)


def run(
    level: Level = "quick",
    progress: Callable[[Result, int, int], None] | None = None,
    *,
    models: Sequence[str] = MODELS,
    jobs: int = 1,
) -> Report:
    """Explore all configurations of ``level``. A model that fails is not explored at larger sizes.

    Parameters
    ----------
    level
        ``"quick"`` (three to four minutes of one core) or ``"full"`` (more).
    progress
        Called after each configuration with its result, the number of finished configurations, and the total.
    models
        The models to explore, from `tilestream_tools.verify.sweep.MODELS`.
    jobs
        The number of processes. With more than one, the caller's main module must be importable (spawn).

    Raises
    ------
    ValueError
        If level or a model is unknown, or jobs is not positive.
    """
    if jobs < 1:
        raise ValueError(f"jobs={jobs}; at least one process explores")
    began = time.perf_counter()
    work = [(model, case) for model in models for case in configurations(model, level)]
    results: list[Result] = []
    failed: set[str] = set()
    with contextlib.closing(_explored(work, jobs, failed)) as explored:
        for done, result in enumerate(explored, 1):
            if result is None or result.model in failed:
                continue
            results.append(result)
            if result.violation is not None:
                failed.add(result.model)
            if progress is not None:
                progress(result, done, len(work))
    return Report(level, tuple(results), time.perf_counter() - began)


def _explored(work: Sequence[tuple[str, Case]], jobs: int, failed: set[str]) -> Generator[Result | None, None, None]:
    """The results in the order of ``work``; None for configurations after a failure of their model."""
    if jobs == 1:
        for model, case in work:
            yield None if model in failed else explore(model, case)
        return
    with _processes(jobs) as pool:
        with _interrupts_held():  # the processes inherit this: Ctrl-C is for their parent, which ends them
            futures = [pool.submit(explore, model, case) for model, case in work]
        for (model, _), future in zip(work, futures, strict=True):
            if model in failed:
                future.cancel()
            yield None if future.cancelled() else future.result()


@contextlib.contextmanager
def _processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Processes for the duration of the block. If it ends by an exception they are killed at once."""
    others = set(multiprocessing.active_children())
    # Spawn, because the caller may have threads (torch's), which fork does not copy.
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield pool
    except BaseException:  # KeyboardInterrupt, or the end of a generator that the caller has left
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """A block in which Ctrl-C is deferred. Processes that begin in it ignore Ctrl-C."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
