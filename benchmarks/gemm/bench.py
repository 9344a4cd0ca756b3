"""What the sections of `gpu_gemm` share: the time they have, their records, and the plans they ask for."""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import tilestream as ts
from benchmarks.core.clock import GpuClock, Timing, WallClock
from benchmarks.core.harness import GpuRecord
from benchmarks.core.paths import command
from benchmarks.gemm.shapes import Peaks, Shape, peaks_of
from tilestream.plan import Problem, plan_problem
from tilestream.plan import plan as ask

Row = dict[str, Any]
#: Failures without one success after which a section is given up.
HOPELESS = 4


class OutOfTime(BaseException):
    """The time is over: not an `Exception`, so that nothing that guards against errors keeps it."""


class Bench:
    """One run: where it writes, how it times, and until when.

    Parameters
    ----------
    out
        Folder of the records.
    seconds
        From now, for all sections.
    dry
        On the CPU, with small extents: the same code, and figures that mean nothing.
    """

    def __init__(self, out: Path, seconds: float, dry: bool = False) -> None:
        self.out, self.dry = out, dry
        self.end = self.section_end = time.monotonic() + seconds
        self.clock: GpuClock = WallClock() if dry else GpuClock()
        self.device = self.clock.device
        self.peaks = Peaks(1e18, 1e18) if dry else peaks_of(torch.cuda.get_device_name())
        self.bad = 0

    def alarm(self) -> None:
        """Have `OutOfTime` raised when the time is over, whatever is running then."""

        def ring(number: int, frame: object) -> None:
            raise OutOfTime

        signal.signal(signal.SIGALRM, ring)
        # And again: what is raised in a destructor is lost.
        signal.setitimer(signal.ITIMER_REAL, max(self.end - time.monotonic(), 0.1), 2.0)

    def begin(self, share: float) -> None:
        """Give the section that begins this share of the time that is left."""
        now = time.monotonic()
        self.section_end = now + share * (self.end - now)

    @property
    def left(self) -> float:
        """Seconds that the section has."""
        return self.section_end - time.monotonic()

    def shape(self, shape: Shape) -> Shape:
        """The shape; a small one of its kind in a dry run."""
        if not self.dry:
            return shape
        m, n, k = (max(1, extent // 64) + (extent % 2 if extent > 64 else 0) for extent in shape[:3])
        return shape._replace(m=m, n=n, k=-(-k // 16) * 16)

    def record(self, section: str, **extra: Any) -> GpuRecord:
        """A section's record."""
        found = _smi() if not self.dry else {}
        return GpuRecord(f"gpu_gemm_{section}", self.out, **found, **self.clock.about(), **extra)

    def rows(self, record: GpuRecord, items: Iterable[Any], measure: Callable[[Any], Row]) -> None:
        """Measure each item while there is time; write after each, keep what goes wrong and go on.

        A section whose first items all fail is given up: the others would, too.
        """
        items, begin, before = list(items), time.monotonic(), len(record.rows)
        lasting: list[float] = []
        earlier, done = list(record.data["missing"]), 0

        def write() -> list[str]:
            """With what is not done for missing: a run that is killed says so as well."""
            left = [_name(item) for item in items[done:]]
            record.data["missing"] = earlier + left
            record.write()
            return left

        write()
        try:
            for item in items:
                hopeless = done >= HOPELESS and len(record.rows) == before
                if hopeless or self.left < 1.2 * max(lasting[-4:], default=0.0):
                    break
                started = time.monotonic()
                try:
                    row = measure(item)
                except Exception as error:
                    self._failed(record, item, error)
                else:
                    record.rows.append(row)
                    print(f"{time.monotonic() - begin:6.1f} s  {summary(row)}", flush=True)
                done += 1
                if done > 1:  # the first one may have taken long to compile
                    lasting.append(time.monotonic() - started)
                record.data["seconds"] = round(time.monotonic() - begin, 1)
                write()
                gc.collect()
                self.clock.free()  # raises if the device is lost: then nothing more can be measured
        finally:
            if missing := write():
                print(f"not measured: {', '.join(missing)}", flush=True)

    def _failed(self, record: GpuRecord, item: Any, error: Exception) -> None:
        self.bad += 1
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error}"[:500]
        record.data["failures"].append({"what": _name(item), "error": what, "at": f"{where.filename}:{where.lineno}"})
        record.write()
        print(f"FAILED {_name(item)}: {what}", flush=True)
        if self.bad <= 3:
            traceback.print_exception(error)


def _name(item: Any) -> str:
    return " ".join(map(str, item)) if type(item) is tuple else str(item)


def summary(row: Row) -> str:
    """A row in a line."""
    parts = [str(row.get(key)) for key in ("shape", "name", "mode", "what", "activation", "plan") if row.get(key)]
    parts += [f"{key} {row[key]}" for key in ("us", "ratio", "of_best") if key in row]
    return "  ".join(parts)


def _smi() -> dict[str, str]:
    """The driver, and what power the GPU may draw."""
    query = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
    try:
        run = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    driver, _, power = run.stdout.strip().splitlines()[0].partition(", ")
    return {"driver": driver, "power_limit": power}


def rounded(seconds: dict[str, float]) -> dict[str, float]:
    """Microseconds."""
    return {name: round(1e6 * value, 2) for name, value in seconds.items()}


def rates(shape: Shape, timing: Timing, itemsize: int = 2) -> dict[str, dict[str, float]]:
    """TFLOP/s, and GB/s of the bytes that must move, of each."""
    medians = timing.medians()
    return {
        "tflops": {name: round(shape.operations / s * 1e-12, 1) for name, s in medians.items()},
        "gbps": {name: round(shape.bytes(itemsize) / s * 1e-9) for name, s in medians.items()},
    }


class PlanLog(logging.Handler):
    """Problems and plans as the planner logs them, once each: what an op makes of its operands can't be asked for."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.problems: dict[tuple[object, ...], Any] = {}
        self.labels: dict[tuple[object, ...], str] = {}
        logger = logging.getLogger("tilestream")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep them."""
        problem, *rest = record.args if isinstance(record.args, tuple) and record.args else (None,)
        if isinstance(problem, Problem) and rest:
            key = (problem.m, problem.n, problem.k, problem.dtype)
            self.problems[key], self.labels[key] = problem, str(rest[0])


_log: PlanLog | None = None


def plan_log() -> PlanLog:
    """The one there is; from now on it listens."""
    global _log
    _log = _log or PlanLog()
    return _log


def label(shape: Shape, dtype: str = "bfloat16") -> str:
    """How an op that has run went about it; empty where nobody knows."""
    return plan_log().labels.get((*shape[:3], dtype), "")


def operands(shape: Shape, device: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A ``[M, K]`` and a weight ``[N, K]``, bfloat16."""
    generator = torch.Generator(device).manual_seed(seed + shape.m + shape.n + shape.k)
    make = lambda rows: torch.randn(rows, shape.k, generator=generator, device=device, dtype=torch.bfloat16)  # noqa: E731
    return make(shape.m), make(shape.n)


def space(a: torch.Tensor, b: torch.Tensor) -> tuple[Any, list[Any]]:
    """The plan that `tilestream.mm` takes for such operands, and every plan of the search space.

    The problem is the one that the op makes of them, since what a layout allows is part of it.
    """
    shape = Shape(a.shape[0], b.shape[1], a.shape[1])
    log = plan_log()
    if (*shape[:3], "bfloat16") not in log.problems:
        ts.mm(a, b)
    asked = planned(shape, "cuda" if a.is_cuda else "cpu")
    problem = log.problems.get((*shape[:3], "bfloat16"), asked.problem)
    own = plan_problem(problem, device=asked.device)
    return own, list(every_plan(problem, asked.device))


def planned(shape: Shape, device: str) -> Any:
    """The plan for a Linear weight."""
    return ask(*shape[:3], dtype="bfloat16", device=device, layout="nt")


#: Plans that the model expects to take more than so many times its best are not run: ``--within``.
within = float("inf")


def every_plan(problem: Any, device: Any) -> Iterator[Any]:
    """The plan's own search space, as far as `within`; on a CPU, which has none, the schedules with small tiles."""
    if device.backend == "cpu":
        for kind in ("static", "dynamic", "stream_k"):
            yield plan_problem(problem, 2, kind, (16, 32), device=device)
        return
    from tilestream.plan import search_space

    found = list(search_space(problem, device))
    most = within * min(plan.predicted for plan in found)
    yield from (plan for plan in found if plan.predicted <= most)


def plan_fields(plan: Any) -> dict[str, int | float | str | bool]:
    """Every knob of a plan that is a number, a name or a tuple of numbers, nested ones by their path."""
    found: dict[str, int | float | str | bool] = {}
    for entry in dataclasses.fields(plan):
        if entry.name in ("problem", "device", "why", "refused", "grid"):
            continue
        value = getattr(plan, entry.name)
        if isinstance(value, bool | int | float | str):
            found[entry.name] = value
        elif isinstance(value, tuple) and all(isinstance(x, int) for x in value):
            found[entry.name] = "x".join(map(str, value))
        elif dataclasses.is_dataclass(value):
            nested = plan_fields(value)
            found |= {name if entry.name == "schedule" else f"{entry.name}.{name}": x for name, x in nested.items()}
    return found


#: Of a plan's knobs, those that a compiled kernel is given when it is launched.
RUN_TIME = (
    "workers", "queues", "shares", "first_batch", "predicted", "raster.first", "raster.band", "raster.group",
)  # fmt: skip


def kernel_of(plan: Any) -> str:
    """What tells the compiled kernel of a plan from others: its other knobs, and whether rows of C are aligned."""
    knobs = sorted((name, value) for name, value in plan_fields(plan).items() if name not in RUN_TIME)
    return repr((*knobs, plan.problem.n % 8 == 0, plan.problem.m == 1))


def here(*arguments: str) -> list[str]:
    """The command that runs this program again."""
    return command("gemm", "suites", *arguments)


def compile_ahead(bench: Bench, what: str, shapes: Iterable[Shape]) -> float:
    """Have what will be launched compiled on all cores at once, into Triton's cache; seconds. Saves time, no more."""
    if bench.dry:
        return 0.0
    begin, count = time.monotonic(), min(os.cpu_count() or 1, 16)
    text = ",".join(map(str, shapes))
    running = [
        subprocess.Popen(
            here("--within", str(within), "--compile", what, text, str(i), str(count)), stdout=subprocess.DEVNULL
        )
        for i in range(count)
    ]
    limit = begin + min(0.4 * bench.left, 150)
    try:
        for process in running:
            process.wait(max(limit - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        print(f"compiling {what} ahead was cut off", flush=True)
    finally:
        for process in running:
            process.kill()
            process.wait()
    print(f"{time.monotonic() - begin:.1f} s to compile ahead for {what}", flush=True)
    return time.monotonic() - begin


def compile_share(what: str, shapes: list[Shape], index: int, count: int) -> None:
    """The part of `compile_ahead` that one of ``count`` processes does: each kernel is one process's.

    ``what`` is ``mm``, ``fp8``, ``linear`` with either activation, ``space`` for all plans of each shape, or
    ``queues`` for those of that section.
    """
    tasks: dict[str, Callable[[], object]] = {}
    for shape in shapes:
        if what == "space":
            asked = planned(shape, "cuda")
            for found in every_plan(asked.problem, asked.device):
                tasks.setdefault(kernel_of(found), functools.partial(_run, shape, found.run))
        elif what == "queues":
            from benchmarks.gemm.queues import ways

            for _, found in ways(shape, "cuda"):
                tasks.setdefault(kernel_of(found), functools.partial(_run, shape, found.run))
        elif what == "fp8":
            for way in FP8_WAYS:
                tasks[f"{shape} {way}"] = functools.partial(_run_fp8, shape, *way)
        elif what == "mm":
            tasks.setdefault(kernel_of(planned(shape, "cuda")), functools.partial(_run, shape, ts.mm))
        else:
            for activation in ("gelu", "gelu_tanh"):
                run = functools.partial(_run, shape, ts.mm, activation=activation, biased=True)
                tasks.setdefault(kernel_of(planned(shape, "cuda")) + activation, run)
    failed = 0
    for key in sorted(tasks)[index::count]:
        try:
            tasks[key]()
            torch.cuda.synchronize()
        except Exception as error:
            failed += 1
            if failed <= 2:
                print(f"compiling ahead, {key}: {error}"[:400], file=sys.stderr)
        torch.cuda.empty_cache()


#: Scales, and whether products may be added up in the matrix units.
FP8_WAYS = tuple((scales, fast) for scales in ("tensor", "row") for fast in (True, False))


def fp8_operands(
    shape: Shape, device: str, scales: str, fast: bool
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """A, a weight's transpose, and what `torch._scaled_mm` and `tilestream.matmul` are given with them."""
    a, w = (x.to(torch.float8_e4m3fn) for x in operands(shape, device))
    extents = ((1,), (1,)) if scales == "tensor" else ((shape.m, 1), (1, shape.n))
    scale_a, scale_b = (torch.rand(extent, device=device) + 0.5 for extent in extents)
    given = {"scale_a": scale_a, "scale_b": scale_b, "use_fast_accum": fast, "out_dtype": torch.bfloat16}
    return a, w.t(), given


def _run(shape: Shape, function: Callable[..., object], biased: bool = False, **options: Any) -> None:
    a, w = (torch.empty(rows, shape.k, device="cuda", dtype=torch.bfloat16) for rows in (shape.m, shape.n))
    if biased:
        options["bias"] = torch.empty(shape.n, device="cuda", dtype=a.dtype)
    function(a, w.t(), **options)


def _run_fp8(shape: Shape, scales: str, fast: bool) -> None:
    a, b, given = fp8_operands(shape, "cuda", scales, fast)
    ts.matmul(a, b, **given)
