"""What the GEMM sections share: the clock, shapes of a dry run, plans, and compiling ahead."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import subprocess
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

import tilestream as ts
from benchmarks.core.compiling import compile_ahead
from benchmarks.core.records import Record, Row
from benchmarks.core.session import Session
from benchmarks.core.timing import GpuClock, Timing, WallClock
from benchmarks.gemm.draw import Draw
from benchmarks.gemm.shapes import Peaks, Shape, parse, peaks_of
from tilestream.plan import Problem, plan_problem
from tilestream.plan import plan as ask

__all__ = ["Bench", "Row"]


class Bench(Session):
    """A run of GEMM sections. A dry run is on the CPU, with small extents: the same code, meaningless figures."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        torch.set_grad_enabled(False)
        if self.dry:
            torch.set_num_threads(1)
        self.clock: GpuClock = WallClock() if self.dry else GpuClock()
        self.device = self.clock.device
        self.peaks = Peaks(1e18, 1e18) if self.dry else peaks_of(torch.cuda.get_device_name())
        plan_log()  # before the first plan is made
        self.alarm()

    def shape(self, shape: Shape) -> Shape:
        """The shape; a small one of its kind in a dry run."""
        if not self.dry:
            return shape
        m, n, k = (max(1, extent // 64) + (extent % 2 if extent > 64 else 0) for extent in shape[:3])
        return shape._replace(m=m, n=n, k=-(-k // 16) * 16)

    def shapes(self, usual: Iterable[Shape]) -> list[Shape]:
        """The shapes of ``--shapes``, or the section's own."""
        given = self.options.shapes
        return [self.shape(shape) for shape in (parse(given) if given else usual)]

    def measure(self, section: str, items: Iterable[Any], row: Callable[[Any], Row], **extra: Any) -> None:
        """Measure a section: one row an item, into the record ``gemm_<section>``."""
        items = list(items)
        self.rows(self.gemm_record(section, planned=len(items), **extra), items, row)

    def gemm_record(self, section: str, **extra: Any) -> Record:
        """A section's record."""
        found = _smi() if not self.dry else {}
        return self.record(f"gemm_{section}", **found, **self.clock.about(), **extra)

    def compile_ahead(self, what: str, shapes: Iterable[Shape | str]) -> float:
        """Have what will be launched compiled on all cores at once; seconds. See `compiling.compile_share`."""
        shapes = list(shapes)
        if self.dry or not shapes:
            return 0.0
        text, limit = ",".join(map(str, shapes)), min(0.4 * self.left, 150)
        return compile_ahead("gemm", what, text, str(self.options.within), limit=limit)

    def unmeasured(self, record: Record, problems: dict[Draw, int]) -> dict[Draw, int]:
        """The problems that ``--resume`` has no rows of, with their numbers."""
        done = {row["shape"] for row in record.rows}
        return {problem: number for problem, number in problems.items() if str(problem) not in done}

    def free(self) -> None:
        """Give memory back."""
        self.clock.free()


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


def rates(shape: Shape | Draw, timing: Timing, itemsize: int = 2) -> dict[str, dict[str, float]]:
    """TFLOP/s, and GB/s of the bytes that must move, of each."""
    medians = timing.medians()
    return {
        "tflops": {name: round(shape.operations / s * 1e-12, 1) for name, s in medians.items()},
        "gbps": {name: round(shape.bytes(itemsize) / s * 1e-9) for name, s in medians.items()},
    }


class PlanLog(logging.Handler):
    """Problems and plans as the planner logs them: no call returns the problem that an op makes of its operands."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.problems: dict[tuple[object, ...], Any] = {}
        self.labels: dict[tuple[object, ...], str] = {}
        logger = logging.getLogger("tilestream")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the problem and its plan's label."""
        problem, *rest = record.args if isinstance(record.args, tuple) and record.args else (None,)
        if isinstance(problem, Problem) and rest:
            key = (problem.m, problem.n, problem.k, problem.dtype)
            self.problems[key], self.labels[key] = problem, str(rest[0])


_log: PlanLog | None = None


def plan_log() -> PlanLog:
    """The process's log; it listens from the first call on."""
    global _log
    _log = _log or PlanLog()
    return _log


def label(shape: Shape, dtype: str = "bfloat16") -> str:
    """The plan that an op has run; empty if none was logged."""
    return plan_log().labels.get((*shape[:3], dtype), "")


def operands(shape: Shape, device: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A ``[M, K]`` and a weight ``[N, K]``, bfloat16."""
    generator = torch.Generator(device).manual_seed(seed + shape.m + shape.n + shape.k)
    make = lambda rows: torch.randn(rows, shape.k, generator=generator, device=device, dtype=torch.bfloat16)  # noqa: E731
    return make(shape.m), make(shape.n)


def space(a: torch.Tensor, b: torch.Tensor, within: float) -> tuple[Any, list[Any]]:
    """The plan that `tilestream.mm` takes for such operands, and `every_plan`.

    The problem is the one that the op makes of the operands: what their layout allows is part of it.
    """
    shape = Shape(a.shape[0], b.shape[1], a.shape[1])
    log = plan_log()
    if (*shape[:3], "bfloat16") not in log.problems:
        ts.mm(a, b)
    asked = planned(shape, "cuda" if a.is_cuda else "cpu")
    problem = log.problems.get((*shape[:3], "bfloat16"), asked.problem)
    own = plan_problem(problem, device=asked.device)
    return own, list(every_plan(problem, asked.device, within))


def planned(shape: Shape, device: str) -> Any:
    return ask(*shape[:3], dtype="bfloat16", device=device, layout="nt")


def every_plan(problem: Any, device: Any, within: float = float("inf")) -> Iterator[Any]:
    """The search space of the planner; on a CPU, which has none, the schedules with small tiles.

    Plans that the model expects to take more than ``within`` times its best are left out.
    """
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


#: Knobs of a plan that a compiled kernel gets at launch.
RUN_TIME = (
    "workers", "queues", "shares", "first_batch", "predicted", "raster.first", "raster.band", "raster.group",
)  # fmt: skip


def kernel_of(plan: Any) -> str:
    """A key of the plan's compiled kernel: its compile-time knobs, and whether rows of C are aligned."""
    knobs = sorted((name, value) for name, value in plan_fields(plan).items() if name not in RUN_TIME)
    return repr((*knobs, plan.problem.n % 8 == 0, plan.problem.m == 1))


#: Scales, and `use_fast_accum`.
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
