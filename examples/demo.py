"""A matmul whose input is still on its way, measured against doing both in turn, and checked against float64.

``tilestream demo`` (its ``--help`` has the options) and ``make demo`` run this file. On a CPU the input is a file that
is read cold from the disk; on a GPU it is copied from pinned host memory.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tilestream as ts
from tilestream.arrival.files import drop_from_page_cache, find_matrix
from tilestream.core.whole_file import write_whole
from tilestream.plan.problem import FP8
from tilestream_tools.cli.doctor import available_memory, backend
from tilestream_tools.units import milliseconds, one_line, size

#: The default inputs: float32 in a file for the CPU, bfloat16 in pinned memory for a GPU; 256 MiB each.
FILE_SHAPE = (16384, 4096)
GPU_SHAPE, GPU_COLUMNS = (16384, 8192), 8192
GPU = "cuda"
SEED = 20250
COLUMN_STEP, MOST_COLUMNS = 16, 16384  # of a calibrated weight
#: Rows compared with float64: these, spread evenly, and as many that differ most from torch's result.
CHECKED_ROWS = 64


def demo(
    device: str = "auto",
    input: Path | None = None,
    tensor: str | None = None,
    n: int | None = None,
    rows: int | None = None,
    k: int | None = None,
    repeats: int = 5,
    rows_per_chunk: int | None = None,
    workers: int | None = None,
    schedule: str = "auto",
    out_dir: Path = Path("demo-out"),
    cache_dir: Path | None = None,
    figures_to: Path | None = None,
) -> bool:
    """Run the demonstration, whose options ``tilestream demo --help`` describes; whether the streamed result is right.

    Raises
    ------
    ValueError, TypeError, OSError
        If an option or the input file is not usable.
    """
    gpu = uses_gpu(device, file=input is not None or cache_dir is not None)
    if input is None and tensor is not None:
        raise ValueError(f"--tensor {tensor}: give the file that holds it with --input")
    for option, value in (("--rows", rows), ("--k", k)):
        if value is not None and (not gpu or input is not None):
            raise ValueError(f"{option} {value}: the input is a file's; --device cuda without --input makes one")
    if gpu and cache_dir is not None:
        raise ValueError(f"--cache-dir {cache_dir}: it holds the file that the CPU reads; a GPU's input is made anew")
    if not gpu:
        writable_folder(out_dir)  # fails now, not after minutes of measuring
    if figures_to is not None and not figures_to.parent.is_dir():
        raise ValueError(f"--figures {figures_to}: there is no folder {figures_to.parent}")
    options = {"schedule": schedule, "workers": workers}
    try:
        if gpu:
            host, origin = host_matrix(input, tensor, rows, k)
            stream = ts.stream_in(host, rows_per_chunk=rows_per_chunk, device=GPU)
            bench = Bench(stream, options, host.view(-1, host.shape[-1]))
        else:
            path = input or demo_file(cache_dir)
            matrix = usable_matrix(path, tensor)
            cold = drop_from_page_cache(path)
            how = "read cold from the disk" if cold else "perhaps read from memory: there is no posix_fadvise"
            origin = f"{path} ({size(matrix.nbytes)}), {how}"
            stream = ts.stream_in(path, tensor=tensor, rows_per_chunk=rows_per_chunk, device="cpu")
            bench = Bench(stream, options, file=path)
        with stream:
            timings, error = bench.measure(n, repeats)
            files = {} if gpu else bench.draw(out_dir)  # makes the folder: a run that failed leaves none behind
            report(bench, origin, timings, error, files)
            if figures_to is not None:
                figures_to.write_text(json.dumps(figures(bench, timings, error), indent=1) + "\n", encoding="utf-8")
    except torch.OutOfMemoryError as problem:
        raise ValueError(f"too little GPU memory: give smaller --rows, --k or --n ({one_line(problem)})") from None
    return error.right


def writable_folder(folder: Path) -> None:
    """Raise `OSError` where ``folder`` cannot be made or written."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there))


def uses_gpu(device: str, *, file: bool) -> bool:
    """Whether ``--device`` means the GPU; ``auto`` with a ``file`` means the CPU, which multiplies while it reads."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {device}: it is one of auto, cpu, cuda")
    if device == "cpu" or (device == "auto" and file):
        return False
    found = backend("portable")
    if found.startswith("no: ") and device == "cuda":
        raise ValueError(f"--device cuda: {found.removeprefix('no: ')}; --device cpu streams from the disk to the CPU")
    return found.startswith("yes")


def usable_matrix(path: Path, tensor: str | None, copies: int = 1) -> Any:
    """The matrix in a file; refused where it has no elements, has 8 bits, or ``copies`` of it do not fit memory."""
    matrix = find_matrix(path, tensor)
    where = f"{path}: tensor {matrix.name!r}"
    if not matrix.nbytes:
        raise ValueError(f"{where} has shape {list(matrix.shape)}: there is nothing to read")
    if matrix.dtype in FP8:
        raise TypeError(f"{where} is {matrix.dtype}; torch.mm, to compare with, takes 16 bits or more: convert it")
    refuse_too_large(where, copies * matrix.nbytes)
    return matrix


def refuse_too_large(what: str, nbytes: int) -> None:
    """Raise `ValueError` where ``nbytes`` would take more than 80 % of the available memory."""
    available = available_memory()
    if available is not None and nbytes > 0.8 * available:
        raise ValueError(f"{what} takes {size(nbytes)} of memory, {size(available)} are available")


def demo_file(folder: Path | None, shape: tuple[int, int] | None = None) -> Path:
    """The demonstration's own file in ``folder``, or in the user's cache; written where it is missing or cut off."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))  # where relative, to be ignored (freedesktop.org)
    folder = folder or (base if base.is_absolute() else Path.home() / ".cache") / "tilestream"
    rows, columns = shape = shape or FILE_SHAPE
    path = folder / f"activations-{rows}x{columns}-float32.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError, ValueError, TypeError):
        found = find_matrix(path, "x")
        if (found.shape, found.dtype) == (shape, "float32"):
            return path
    need, free = 4 * rows * columns + 2**16, shutil.disk_usage(folder).free
    if free < need:
        message = f"{size(free)} free, the file takes {size(need)}; give another folder with --cache-dir"
        raise OSError(errno.ENOSPC, message, str(folder))
    from safetensors.torch import save

    print(f"- writing {size(4 * rows * columns)} of random activations, once")
    write_whole(path, save({"x": torch.randn(shape, generator=torch.Generator().manual_seed(SEED))}))
    return path


def host_matrix(input: Path | None, tensor: str | None, rows: int | None, k: int | None) -> tuple[torch.Tensor, str]:
    """The input in pinned memory: random, or the matrix of a file; and what it is, for the report."""
    if input is not None:
        matrix = usable_matrix(input, tensor, copies=2)  # as read, and pinned
        with ts.stream_in(input, tensor=tensor, device="cpu") as stream:
            return pinned(stream.wait()), f"{input} ({size(matrix.nbytes)}), read into pinned memory first"
    shape = rows or GPU_SHAPE[0], k or GPU_SHAPE[1]
    nbytes = 2 * math.prod(shape)
    refuse_too_large(f"--rows {shape[0]} --k {shape[1]}: the input", nbytes)
    # The GPU draws the numbers: the host would take seconds.
    values = torch.randn(shape, dtype=torch.bfloat16, device=GPU, generator=torch.Generator(GPU).manual_seed(SEED))
    return pinned(values), f"{size(nbytes)} of random bfloat16 in pinned memory, the same each time"


def pinned(values: torch.Tensor) -> torch.Tensor:
    """A copy in memory that the GPU's copy engines read directly."""
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=GPU == "cuda").copy_(values)


@dataclass
class Error:
    """Errors against float64, ``(maximum, Frobenius)`` each: twice torch.mm's and one ulp are allowed, and no NaN."""

    missing: int
    ours: tuple[float, float]
    torch: tuple[float, float]
    allowed: tuple[float, float]

    @property
    def right(self) -> bool:
        """Whether the result passes."""
        return not self.missing and self.ours[0] <= self.allowed[0] and self.ours[1] <= self.allowed[1]


def check(x: torch.Tensor, w: torch.Tensor, by_torch: torch.Tensor, out: torch.Tensor) -> Error:
    """Compare ``out`` with ``x @ w`` in float64, on rows spread evenly and on those that differ most from torch's."""
    finite = by_torch.isfinite()
    missing = int((out.isnan() & finite).sum())
    differs = torch.where(finite, (out - by_torch).abs().nan_to_num(nan=math.inf), 0).amax(1)
    count = min(CHECKED_ROWS, len(out))
    spread = torch.linspace(0, len(out) - 1, count, device=out.device).long()
    rows = torch.cat([spread, differs.topk(count).indices]).unique()
    reference = x[rows.to(x.device)].to(w.device).double() @ w.double()
    known = reference.isfinite()  # elsewhere there is no error to measure
    reference, ours, theirs = reference[known], out[rows][known].double(), by_torch[rows][known].double()
    if not reference.numel():
        return Error(missing, (0.0, 0.0), (0.0, 0.0), (0.0, 0.0))
    epsilon, scale = torch.finfo(out.dtype).eps, float(reference.abs().max())
    ulps = epsilon * 2.0 ** math.floor(math.log2(scale or 1)), epsilon * float(reference.norm())

    def errors(values: torch.Tensor) -> tuple[float, float]:
        return float((values - reference).abs().max()), float((values - reference).norm())

    others = errors(theirs)
    return Error(missing, errors(ours), others, (2 * others[0] + ulps[0], 2 * others[1] + ulps[1]))


class Bench:
    """The buffers of one problem, and each way to run it once; all ways use the same buffers.

    ``truth`` is a GPU's input on the host; ``file`` is the CPU's input file, made cold before each read.
    """

    def __init__(
        self, stream: ts.Stream, options: dict[str, Any], truth: torch.Tensor | None = None, file: Path | None = None
    ) -> None:
        self.stream, self.options, self.file = stream, options, file
        self.x = stream.tensor.view(-1, stream.tensor.shape[-1])
        self.truth = self.x if truth is None else truth
        self.bring = "read" if file else "copy"
        self.deadline = max(60.0, self.x.nbytes / 5e6)

    def set_columns(self, n: int) -> None:
        """Make the weight, scaled so that outputs are of the input's size, and the outputs."""
        (rows, k), device = self.x.shape, self.x.device
        generator = torch.Generator(device).manual_seed(SEED)
        self.w = torch.randn(k, n, generator=generator, device=device).mul_(k**-0.5).to(self.x.dtype)
        self.out = torch.full((rows, n), math.nan, dtype=self.x.dtype, device=device)
        self.by_torch = torch.empty_like(self.out)

    def plan(self) -> ts.Plan:
        """The plan of the streamed matmul."""
        (rows, k), given = self.x.shape, {"arrival": self.stream.arrival, **self.options}
        return ts.plan(rows, self.w.shape[1], k, dtype=self.x.dtype, device=self.x.device, **given)

    def ways(self) -> dict[str, Callable[[], None]]:
        """Each way by its name: issues the work of one run."""
        return {
            self.bring: self.land,
            "multiply": self.multiply,
            "torch.mm": lambda: torch.mm(self.x, self.w, out=self.by_torch),
            "in turn": self.in_turn,
            "streamed": self.at_once,
        }

    def land(self) -> None:
        """Wait for all of the input."""
        self.stream.restart()
        self.stream.wait(self.deadline if self.file else None)  # on a GPU a timeout would make it poll

    def multiply(self) -> None:
        """Multiply with everything there."""
        ts.matmul(self.x, self.w, out=self.out, **self.options)

    def in_turn(self) -> None:
        """One after the other; on a GPU one plain copy, and the matmul behind it in the same stream."""
        if self.file is None:
            self.x.copy_(self.truth, non_blocking=True)
        else:
            self.land()
        self.multiply()

    def at_once(self) -> None:
        """Both at once: the matmul waits for each chunk that it reads."""
        self.stream.restart()
        ts.matmul(self.x, self.w, out=self.out, arrival=self.stream.arrival, deadline=self.deadline, **self.options)

    def seconds(self, way: str) -> float:
        """Seconds of one run, by the host's clock."""
        if way not in ("multiply", "torch.mm"):
            self.x.fill_(math.nan)  # a row that is read before it has arrived gives NaN, not the last run's number
            if self.file is not None:
                drop_from_page_cache(self.file)
        if way == "streamed":
            self.out.fill_(math.nan)
        settle()
        begin = time.perf_counter()
        self.ways()[way]()
        settle()
        seconds = time.perf_counter() - begin
        if way == "streamed":
            self.stream.wait(self.deadline)
        return seconds

    def calibrated_columns(self) -> int:
        """Columns with which multiplying takes about as long as reading: then overlap has the most to win."""
        fit = (available_memory() or 2**40) // (8 * self.x.element_size() * sum(self.x.shape))
        most = min(max(1, fit // COLUMN_STEP) * COLUMN_STEP, MOST_COLUMNS)
        read, n = min(self.seconds("read") for _ in range(2)), min(256, most)
        for _ in range(2):
            self.set_columns(n)
            wanted = n * read / min(self.seconds("multiply") for _ in range(2))
            n = min(max(COLUMN_STEP * round(wanted / COLUMN_STEP), COLUMN_STEP), most)
        return n

    def measure(self, n: int | None, repeats: int) -> tuple[dict[str, list[float]], Error]:
        """Run all ways in turn, ``repeats`` times; seconds by way, and the worst error of the streamed results."""
        self.stream.wait()  # every page of the buffers is there
        if n is None and self.file is not None:
            print("- calibrating: how long reading takes, how fast this machine multiplies")
            n = self.calibrated_columns()
        self.set_columns(n or GPU_COLUMNS)
        self.plan()  # raises what the plan refuses before anything is compiled
        self.in_turn()  # a plain copy on a GPU, so that a stream that brings wrong rows is found
        expected = torch.mm(self.x, self.w)
        print("- each way once, to compile and to warm up")
        for way in self.ways():
            self.seconds(way)
        found = [check(self.truth, self.w, expected, self.out)]
        timings: dict[str, list[float]] = {way: [] for way in self.ways()}
        for number in range(repeats):
            print(f"- measuring: round {number + 1} of {repeats}")
            for way, samples in timings.items():
                samples.append(self.seconds(way))
            found.append(check(self.truth, self.w, expected, self.out))
        return timings, max(found, key=lambda error: (not error.right, error.missing, error.ours))

    def draw(self, folder: Path) -> dict[str, str]:
        """Trace one more streamed run, of the CPU; the files of the trace and its picture."""
        with ts.trace.record() as recorder:
            self.seconds("streamed")
        launch = recorder.launches[-1]
        launch.started = {0: self.stream.started}
        folder.mkdir(parents=True, exist_ok=True)
        try:
            timeline = str(ts.trace.draw(launch, folder / "timeline.png"))
        except ImportError as error:
            timeline = f"none: {one_line(error)}"
        trace = ts.trace.export(launch, folder / "trace.json")
        return {"timeline": timeline, "trace": f"{trace}: open it at https://ui.perfetto.dev"}


def settle() -> None:
    """Wait until the GPU is idle."""
    if GPU == "cuda" and torch.cuda.is_available():
        torch.cuda.synchronize()


def figures(bench: Bench, timings: dict[str, list[float]], error: Error) -> dict[str, Any]:
    """Everything that was measured, for JSON."""
    plan, median = bench.plan(), {way: statistics.median(samples) for way, samples in timings.items()}
    work, problem = plan.floor.operations, plan.problem
    won, hideable = median["in turn"] - median["streamed"], min(median[bench.bring], median["multiply"])
    return {
        "device": plan.device.name,
        "versions": {"tilestream": ts.__version__, "torch": torch.__version__},
        "problem": {"m": problem.m, "n": problem.n, "k": problem.k, "dtype": problem.dtype},
        "plan": plan.label,
        "median_ms": {way: 1e3 * seconds for way, seconds in median.items()},
        "samples_ms": {way: [1e3 * seconds for seconds in samples] for way, samples in timings.items()},
        "gb_per_s": {bench.bring: bench.x.nbytes / median[bench.bring] / 1e9},
        "tflop_per_s": {way: work / median[way] / 1e12 for way in ("multiply", "torch.mm")},
        "overlap_won_ms": 1e3 * won,
        "overlap_won_share": won / hideable,
        "streamed_over_larger": median["streamed"] / max(median[bench.bring], median["multiply"]),
        "answer": {"right": error.right, **vars(error)},
    }


def report(bench: Bench, origin: str, timings: dict[str, list[float]], error: Error, files: dict[str, str]) -> None:
    """Print what was found."""
    found, plan = figures(bench, timings, error), bench.plan()
    m, n, k, dtype = found["problem"].values()
    print(f"\ninput     {origin}\n{bench.bring:<9} {bench.stream.explain()}")
    print(f"multiply  [{m}, {k}] @ [{k}, {n}], {dtype}\n")
    rates = {way: f"{1e3 * rate:,.0f} GFLOP/s" for way, rate in found["tflop_per_s"].items()}
    rates[bench.bring] = f"{found['gb_per_s'][bench.bring]:.2f} GB/s"
    print(f"{'':<10}{'median ms':>10}{'least':>10}{'most':>10}{'rate':>16}")
    for way, samples in timings.items():
        times = "".join(f"{milliseconds(x):>10}" for x in (statistics.median(samples), min(samples), max(samples)))
        print(f"{way:<10}{times}{rates.get(way, ''):>16}")
    won, share = found["overlap_won_ms"] / 1e3, found["overlap_won_share"]
    if won > 0:
        unsteady = "; more than all of it: the machine was slower while one was measured alone" * (share > 1)
        print(f"\noverlap won {milliseconds(won)} ms: {share:.0%} of what could be hidden{unsteady}")
    else:
        print(f"\nno overlap won: streamed took {milliseconds(-won)} ms longer than in turn")
    print(f"streamed takes {found['streamed_over_larger']:.2f} times the larger of {bench.bring} and multiply")
    print(f"\n{'answer right' if error.right else 'ANSWER WRONG'}, in every streamed run, against float64:")
    for name, *values in zip(("maximum", "Frobenius"), error.ours, error.torch, error.allowed, strict=True):
        print("  {:<17}{:.3g} (torch.mm {:.3g}, allowed {:.3g})".format(f"{name} error", *values))
    print(f"  left NaN         {error.missing} of all elements\n\n{plan.explain()}\n")
    for name, path in files.items():
        print(f"{name:<9} {path}")


if __name__ == "__main__":
    demo()
