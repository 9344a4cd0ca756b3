"""What the report measures, as one JSON object: `page` shows it, and nothing else.

::

    doctor's findings; of each call its plan
    kernels that the calls launch: which are in Triton's cache; the others are compiled
    each call beside torch's, answers checked: by the device's clock, on a GPU by the host's, too
    one matmul whose input is on its way: moved alone, multiplied alone, in turn, streamed
    timelines of some of these
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F  # noqa: N812

from tilestream.core.device import DeviceProperties
from tilestream.plan.api import plan
from tilestream.plan.attention_plan import AttentionPlan
from tilestream.plan.attention_planner import attention_plan
from tilestream.plan.plan import Plan
from tilestream.trace.record import LaunchTrace, record
from tilestream_tools.cli import doctor
from tilestream_tools.installed import example
from tilestream_tools.sweep import run
from tilestream_tools.sweep.check import Check
from tilestream_tools.sweep.clock import Call as Callee
from tilestream_tools.sweep.clock import GpuClock, Timing, host_microseconds, quartiles
from tilestream_tools.trace.page import timeline
from tilestream_tools.units import one_line
from tilestream_tools.warm.calls import Attention, Gemm, parse
from tilestream_tools.warm.calls import Measured as Call

PACKAGE = Path(doctor.__file__).parents[2] / "tilestream"
KIND, SCHEMA = "tilestream report", 1
Data = dict[str, Any]
#: Told of the share that is done, and of what is done now.
Tell = Callable[[float, str], object]

#: What is measured where no call is named; the last of each is one that the device refuses.
DEFAULT = {
    "cpu": (
        "gemm 1024,1024,1024,float32", "gemm 16,4096,4096,float32", "attention 1,1024,8,8,64,float32,causal",
        "gemm 512,1001,777,float32,bias,gelu", "gemm 2048,2048,2048,float32", "gemm 1024,1024,1024,bfloat16",
        "attention 4,256,8,2,64,float32", "attention 1,1024,8,8,512,float32",
    ),
    "cuda": (
        "gemm 4096,4096,4096", "gemm 16,8192,8192", "attention 2,8192,16,16,128,causal", "gemm 8192,8192,1024",
        "gemm 4096,10240,8192", "gemm 2048,8192,2048,bias,gelu", "gemm 4096,4097,4096", "attention 4,4096,32,8,128",
        "gemm 1024,1024,1024,float8_e4m3fnuz",
    ),
}  # fmt: skip
#: With ``quick``: how many of these, and the refused one.
QUICK = 3
#: Of a report, unless the caller gives another: no measurement begins later.
SECONDS = {False: 180.0, True: 60.0}
#: Seconds of samples a call, and how many samples that may be.
SAMPLES = {False: 1.0, True: 0.4}
ROUNDS = 5, 60
#: Calls with a lower floor are replayed from CUDA graphs, as `tilestream tune` does.
GRAPH_BELOW = 50e-6
#: Bytes that are read to measure the memory's bandwidth: more than any cache holds.
READ = {"cpu": 2**28, "cuda": 2**31}
#: The streamed matmul: of a file on a CPU (rows, columns), of pinned memory on a GPU (rows, columns, weight's columns).
FILE = {False: (16384, 4096), True: (4096, 4096)}
PINNED = 8192, 8192, 4096

_ACTIVATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda x: x, "relu": F.relu, "gelu": F.gelu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}  # fmt: skip


class Beside(NamedTuple):
    """A call of ours and torch's on the same operands, and the check of an answer, as ``[rows, columns]``."""

    ours: Callee
    torch: Callee
    check: Check
    flat: Callable[[torch.Tensor], torch.Tensor]


def report(
    calls: Sequence[Call], *, device: str = "auto", quick: bool = False, seconds: float | None = None,
    tell: Tell = lambda share, what: None, folder: Path | None = None,
) -> Data:  # fmt: skip
    """Measure this machine.

    Parameters
    ----------
    calls
        What is measured beside torch; none: a default set for the device.
    device
        ``"cpu"``, ``"cuda"``, or ``"auto"``: a GPU where torch and Triton have one.
    quick
        Fewer of the default calls, fewer samples, a smaller stream.
    seconds
        No call's measurement begins later than this; None: `SECONDS`.
    tell
        Called as the report gets on.
    folder
        On the disk that a CPU's stream reads from; a file is written there and removed. None: the system's.

    Raises
    ------
    ValueError
        If there is no such device.
    """
    begin, where = time.perf_counter(), device_name(device)
    seconds = SECONDS[quick] if seconds is None else seconds
    found = run.device_of("cpu" if where == "cpu" else "gpu")
    chosen = list(calls) or default_calls(where, quick)
    steps = _Steps(tell, len(chosen) + 4)
    steps.next("looking at the machine")
    clock: GpuClock = run.CpuClock() if where == "cpu" else GpuClock()
    data: Data = {
        "kind": KIND, "schema": SCHEMA, "about": run.about(found), "quick": quick, "device": where,
        "machine": machine(found, clock, {getattr(call, "dtype", "") for call in chosen}),
        "doctor": [[title, [[name, at_home(value)] for name, value in rows]] for title, rows in doctor.sections()],
    }  # fmt: skip
    data["calls"] = [planned(call, where) for call in chosen]
    steps.next("compiling what the calls launch")
    runnable = [call for call, row in zip(chosen, data["calls"], strict=True) if "why" not in row]
    data["warm"] = (
        {"why": "a CPU runs what is installed: nothing is compiled"} if where == "cpu" else warm(runnable, found)
    )
    for call, row in zip(chosen, data["calls"], strict=True):
        steps.next(str(call))
        if "why" not in row:
            late = time.perf_counter() - begin > seconds
            row |= {"why": f"not measured: {seconds:.0f} s had passed"} if late else measured(call, row, clock, quick)
    steps.next("a matmul whose input is on its way")
    launches: list[tuple[str, LaunchTrace]] = []
    data["stream"] = _or_why(lambda: streamed(where, quick, folder, steps, launches))
    steps.next("timelines")
    for call in timed_again(runnable, where):
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):  # the page says what was recorded
            launches += [(str(call), launch) for launch in traced(call, where)]
    data["timelines"] = [timeline(launch, title=title) for title, launch in launches]
    data["seconds"] = round(time.perf_counter() - begin, 1)
    tell(1.0, "done")
    return data


def device_name(device: str) -> str:
    """``"cpu"`` or ``"cuda"``, of what the caller asked for."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={device!r}: it must be one of auto, cpu, cuda")
    there = doctor.backend("portable")
    if device == "cuda" and there.startswith("no: "):
        raise ValueError(f"device='cuda': {there.removeprefix('no: ')}; device='cpu' measures the CPU")
    return "cpu" if device == "cpu" or there.startswith("no: ") else "cuda"


def default_calls(where: str, quick: bool) -> list[Call]:
    """What is measured where no call is named."""
    texts = DEFAULT[where]
    kept = (*texts[:QUICK], texts[-1]) if quick else texts
    found: list[Any] = [parse(*text.split(" ", 1)) for text in kept]
    return found


def at_home(text: str) -> str:
    """A text without the names of folders where things are installed or run: reports are passed on."""
    for folder, name in ((PACKAGE, PACKAGE.name), (Path.cwd(), "."), (Path.home(), "~")):
        if folder != folder.parent:
            text = text.replace(f"{folder}/", f"{name}/")
    return text


class _Steps:
    """Shares of the report's steps, all counted alike; what a step says of itself keeps its share."""

    def __init__(self, tell: Tell, count: int) -> None:
        self._tell, self._count, self._done = tell, count, -1

    def next(self, what: str) -> None:
        self._done += 1
        self.say(what)

    def say(self, what: str) -> None:
        self._tell(self._done / self._count, what)


def _or_why(measure: Callable[[], Data]) -> Data:
    """What was measured, or why nothing was: a report of what else there is beats none."""
    try:
        return measure()
    except (NotImplementedError, ValueError, TypeError) as error:  # ours: they say what is wrong
        return {"why": one_line(error)}
    except Exception as error:
        return {"why": f"{type(error).__name__}: {one_line(error)}"}


# The machine ----------------------------------------------------------------------------------------------------------


def machine(device: DeviceProperties, clock: GpuClock, dtypes: set[str]) -> Data:
    """The roofs: peaks as the data sheet or the CPU's flags say, and the bandwidth that a read reaches."""
    data = torch.ones(READ[clock.device] // 4, device=clock.device)
    sink = torch.empty((), device=clock.device)
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else 0.0
    timing = clock.interleave({"read": lambda: torch.sum(data, dim=0, out=sink)}, rounds=7)
    return {
        "name": device.name, "backend": device.backend, "workers": device.workers, "source": device.source,
        "load": load, "cores": run.device_of("cpu").workers, "bandwidth": device.bandwidth,
        "read": data.nbytes / min(timing.seconds["read"]),
        "peaks": {dtype: device.peak(dtype, device.workers) for dtype in sorted(dtypes)},
    }  # fmt: skip


def warm(calls: Sequence[Call], device: DeviceProperties) -> Data:
    """Which of the calls' kernels were in Triton's cache; the others are compiled now, on all cores."""

    def look() -> Data:
        from tilestream_tools.warm import ahead, kernel_cache

        # In a process of its own: one that compiles ahead launches nothing.
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            keys = pool.submit(ahead.kernels_of, calls, device).result()
        rows = [[str(call), kernel_cache.is_cached(key)] for key, call in keys.items()]
        missing = list(dict.fromkeys(call for (key, call), row in zip(keys.items(), rows, strict=True) if not row[1]))
        begin = time.perf_counter()
        if missing:
            with ProcessPoolExecutor(min(len(missing), run.device_of("cpu").workers), mp_context=spawn) as pool:
                for done in [pool.submit(ahead.compile_call, call, device) for call in missing]:
                    done.result()
        return {"cache": at_home(str(kernel_cache.folder())), "kernels": rows, "seconds": time.perf_counter() - begin}

    return _or_why(look)


# Calls beside torch's -------------------------------------------------------------------------------------------------


def plan_of(call: Call, device: str) -> Plan | AttentionPlan:
    """The plan of a call.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        If nothing on the device does it.
    """
    how: Data = {"dtype": call.dtype, "device": device}
    if isinstance(call, Gemm):
        how |= {"layout": "nt" if call.layout == "linear" else call.layout, "scales": call.scales}
        return plan(call.m, call.n, call.k, arrival=call.options(_meta)["arrival"], **how)
    how |= {"causal": call.mask, "layout": call.layout, "return_lse": call.lse, "heads_kv": call.heads_kv}
    keys = call.keys or call.rows
    return attention_plan(call.rows, keys, batch=call.batch, heads_q=call.heads, head_dim=call.columns, **how)


def planned(call: Call, device: str) -> Data:
    """What is known of a call before it is run: its plan, what that refused, and the roofline's two bounds."""

    def facts() -> Data:
        made = plan_of(call, device)
        floor = made.floor
        return {
            "plan": made.label, "explain": made.explain(), "refused": [[one.what, one.why] for one in made.refused],
            "operations": floor.operations, "bytes": floor.bytes, "floor": floor.seconds, "binds": floor.binds,
            "peak": made.device.peak(made.problem.kind, made.device.workers),
        }  # fmt: skip

    return {"call": str(call), "dtype": call.dtype} | _or_why(facts)


def measured(call: Call, row: Data, clock: GpuClock, quick: bool) -> Data:
    """A call beside torch's: seconds by each clock, the answer checked, the first call apart."""

    def measure() -> Data:
        refuse_unpaired(call)
        make = functools.partial(_random, device=clock.device)
        begin = time.perf_counter()
        pair = beside(call, make)
        clock.synchronize()
        begin = time.perf_counter()
        first = pair.ours()
        clock.synchronize()
        first_seconds = time.perf_counter() - begin
        errors = pair.check(pair.flat(first))
        calls = {"torch": pair.torch, "tilestream": pair.ours}
        begin = time.perf_counter()
        for one in calls.values():
            one()
        clock.synchronize()
        each = time.perf_counter() - begin
        rounds = max(ROUNDS[0], min(ROUNDS[1], int(SAMPLES[quick] / (each + 5e-4))))
        graphs = clock.device == "cuda" and row["floor"] < GRAPH_BELOW
        timing = clock.interleave(calls, rounds=rounds, warmup=2, graphs=graphs)
        if isinstance(again := timing.results.get("tilestream"), torch.Tensor):
            pair.check(pair.flat(again))
        rate = row["operations"] / min(timing.medians().values())
        if clock.device == "cuda" and rate > row["peak"]:
            raise AssertionError(f"{rate:.4g} operations a second, above the peak of {row['peak']:.4g}")
        clocks = {"device": _told(timing)}
        if clock.device == "cuda":
            batch = max(4, min(64, int(0.02 / each)))
            us, _ = host_microseconds(calls, batch=batch, batches=9)
            clocks["host"] = {name: 1e-6 * one for name, one in us.items()} | {"ratio": us["torch"] / us["tilestream"]}
        return {"first": first_seconds, "errors": errors, "clocks": clocks, "mode": timing.mode, "rounds": rounds}

    found = _or_why(measure)
    clock.free()
    return found


def refuse_unpaired(call: Call) -> None:
    """Raise `ValueError` for what has no peer here: the plan says what there is to say of it."""
    what = []
    if call.chunk:
        what.append("rows that arrive are measured by the stream")
    if isinstance(call, Gemm) and (call.scales != "none" or call.dtype.startswith("float8")):
        what.append("operands of 8 bits and scales are measured by no peer here")
    if isinstance(call, Gemm) and call.backward:
        what.append("forward passes are measured: leave backward away")
    if isinstance(call, Attention) and call.causal and call.rows > (call.keys or call.rows):
        what.append("rows that see no key have no answer")
    if what:
        raise ValueError("; ".join(what))


def beside(call: Call, make: Callable[..., torch.Tensor]) -> Beside:
    """A call and torch's on random operands; torch's has been run for the check."""
    if isinstance(call, Attention):
        return _attention(call, make)
    a, b = call.operands(make)
    options = call.options(make)
    bias, act = options["bias"], _ACTIVATIONS[call.activation]

    def theirs() -> torch.Tensor:
        if call.layout == "linear":
            return act(F.linear(a, b.t(), bias))
        return act(torch.mm(a, b) if bias is None else torch.addmm(bias, a, b))

    def finish(rows: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return act(rows if bias is None else rows + bias.double())

    check = Check.of_product(a, b, theirs(), finish)
    return Beside(lambda: call.product(a, b, **options), theirs, check, lambda out: out)


def _attention(call: Attention, make: Callable[..., torch.Tensor]) -> Beside:
    q, k, v = call.operands(make)
    by_heads = [x if call.layout == "bhsd" else x.transpose(1, 2) for x in (q, k, v)]
    query, key, value = by_heads
    by_rows = [x.transpose(1, 2) for x in by_heads]
    how: Data = {"is_causal": call.causal, "enable_gqa": call.heads != call.heads_kv}
    if call.mask is True and call.keys not in (0, call.rows):
        from torch.nn.attention.bias import causal_lower_right

        how = {"attn_mask": causal_lower_right(call.rows, call.keys), "enable_gqa": how["enable_gqa"]}

    def theirs() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, **how)

    def flat(out: torch.Tensor) -> torch.Tensor:
        return (out.transpose(1, 2) if call.layout == "bhsd" else out).reshape(call.batch * call.rows, -1)

    peer = theirs().transpose(1, 2).reshape(call.batch * call.rows, -1)
    check = Check.of_attention(by_rows[0], by_rows[1], by_rows[2], peer, call.mask)
    return Beside(lambda: call.attend(q, k, v), theirs, check, flat)


def _random(dtype: str, *shape: int, device: str) -> torch.Tensor:
    return torch.randn(shape, device=device).to(getattr(torch, dtype))


def _meta(dtype: str, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def _told(timing: Timing) -> Data:
    """Seconds as quartiles and median, and the ratio, above 1 where ours is the faster."""
    spread = {name: [quartiles(seconds)[0], timing.median(name), quartiles(seconds)[1]]
              for name, seconds in timing.seconds.items()}  # fmt: skip
    ratio = statistics.median(x / y for x, y in zip(timing.seconds["torch"], timing.seconds["tilestream"], strict=True))
    return {**spread, "ratio": ratio, "band": list(timing.band("tilestream", "torch"))}


def geomean(ratios: Sequence[float]) -> float:
    """Geometric mean; NaN of nothing."""
    return math.exp(statistics.fmean(map(math.log, ratios))) if ratios else math.nan


# The stream -----------------------------------------------------------------------------------------------------------


def streamed(
    where: str, quick: bool, folder: Path | None, steps: _Steps, launches: list[tuple[str, LaunchTrace]]
) -> Data:  # fmt: skip
    """The demonstration's measurement: each way of bringing and multiplying; ``launches`` gets a launch.

    Raises
    ------
    AssertionError
        If a streamed answer is wrong.
    """
    demo = example("demo")
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(_Said(steps.say)))
        if where == "cpu":
            kept = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
            path = demo.demo_file(kept, FILE[quick])
            bench = demo.Bench(demo.ts.stream_in(path, device="cpu"), {}, file=path)
            origin = f"{bench.x.nbytes >> 20} MiB of a file, read cold"
        else:
            host, origin = demo.host_matrix(None, None, *PINNED[:2])
            bench = demo.Bench(demo.ts.stream_in(host, device="cuda"), {}, host)
        stack.enter_context(bench.stream)
        timings, error = bench.measure(None if where == "cpu" else PINNED[2], 3 if quick else 5)
        if not error.right:
            raise AssertionError(f"the streamed answer is wrong: {error}")
        figures: Data = demo.figures(bench, timings, error)
        launches.append(
            (f"streamed {'from a file' if where == 'cpu' else 'from pinned memory'}", _traced_stream(bench))
        )
    return {**figures, "bring": bench.bring, "origin": origin}


def _traced_stream(bench: Any) -> LaunchTrace:
    """The launch of one more streamed run of the demo's; on a GPU of the second, the first compiles what records."""
    with record() as recorder:
        for _ in range(2 if bench.file is None else 1):
            bench.seconds("streamed")
    launch = recorder.launches[-1]
    if bench.file is not None:
        launch.started = {0: bench.stream.started}
    return launch


class _Said(io.TextIOBase):
    """A stream whose lines are told as what is done now."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say

    def write(self, text: str) -> int:
        if line := text.strip().removeprefix("- "):
            self._say(line)
        return len(text)


# Timelines ------------------------------------------------------------------------------------------------------------


def timed_again(calls: Sequence[Call], where: str) -> Iterator[Call]:
    """The calls that are drawn: the largest matmul, and on a GPU the first attention; nothing of them arrives."""
    gemms = [call for call in calls if isinstance(call, Gemm) and not call.chunk]
    yield from sorted(gemms, key=lambda call: -call.m * call.n * call.k)[:1]
    if where == "cuda":
        yield from [call for call in calls if isinstance(call, Attention) and not call.chunk][:1]


def traced(call: Call, where: str) -> list[LaunchTrace]:
    """The launch of one more call; on a CPU by worker threads, whose tiles are recorded."""
    operands = call.operands(functools.partial(_random, device=where))
    with record() as recorder:
        for _ in range(2):  # the first compiles the kernel that records
            if isinstance(call, Attention):
                call.attend(*operands)
            else:
                how: Data = {"schedule": "dynamic"} if where == "cpu" else {}
                call.product(*operands, **how)
    return recorder.launches[-1:]
