"""Launches of random shapes, schedules and arrivals, for as long as is asked; what grows, and what slows down.

    PYTHONPATH=src:tests python -m soak.launches [--device cuda] [--seconds 100] [--seed N] [--out DIR]

A run draws `CASES` cases from its seed (by default the number of runs in the record), calls each once, checks the
answer against the error rule, and then launches cases in random order, in bursts, until its seconds are over. An answer
must have the bits of the case's first; a chunk that is withheld must end in `ArrivalTimeout`, and the call behind it
must be right. Between bursts it looks at memory, open files, threads, and the time of one call that is always the same.

Each run adds a row to DIR/<device>/soak.json. The exit status is 1 if anything was wrong or drifted.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

if str(Path(__file__).parents[2]) not in sys.path:
    sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.core.paths import RESULTS
from benchmarks.core.records import Record, folder_of

import tilestream as ts
from error_rule import Maths, check
from streaming import threads_at_work
from tilestream.launch.cpu import workers

CASES = 40
#: Samples of resources and speed before which all is warm: caches filled, threads started.
WARM = 5
#: Workers of a case at most, unless the default is more.
MOST_WORKERS = 3
#: Launches of a burst at most; of a case whose rows arrive, which the host feeds.
BURST, FED_BURST = 2000, 40
#: Seconds of a deadline that is to pass, and of one that is not.
SHORT, LONG = 0.02, 60.0
#: What the medians of the last samples may be over those of the first.
SLOWER = {"cpu": 3.0, "cuda": 1.25}
#: Bytes that the process and the device may grow by in a run, and a million launches: an allocator's pages.
GROWTH = 64 * 2**20


class Pulse:
    """A thread that wakes ten times a second, and so knows how long the process has not run.

    A deadline is in seconds of the machine's clock, which goes on while the process or the machine is stopped.
    """

    def __init__(self) -> None:
        self._ended, self._longest = threading.Event(), 0.0
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        before = time.monotonic()
        while not self._ended.wait(0.1):
            now = time.monotonic()
            self._longest, before = max(self._longest, now - before), now

    def longest(self) -> float:
        """The longest pause since the last call of this, in seconds."""
        time.sleep(0.3)  # it wakes after what was stopped with it
        found, self._longest = self._longest, 0.0
        return found

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


@dataclass(frozen=True)
class Case:
    """What one call is: the op, extents, dtype, layout, schedule, epilogue, and how its rows arrive."""

    op: str
    m: int
    n: int
    k: int
    dtype: torch.dtype
    b_is_transposed: bool
    schedule: str
    workers: int | None
    activation: str | None
    arrival: str  # "", "uniform", "ragged", "stream"
    chunks: int
    pivot: int

    def __str__(self) -> str:
        arrives = f" {self.chunks} chunks, {self.arrival}, from {self.pivot}" if self.arrival else ""
        how = f"{self.dtype} {self.schedule} {self.workers} {self.activation}"
        return f"{self.op} {self.m}x{self.n}x{self.k} {how}{arrives}"


def draw(rng: random.Random, device: str) -> Case:
    """A case; on a GPU larger ones, of few kernels: each is compiled once."""
    most = 2048 if device == "cuda" else 96
    step = 8 if device == "cuda" else 1
    m, n, k = (step * rng.randint(1, most // step) for _ in range(3))
    arrival = rng.choice(["", "", "", "uniform", "ragged", "stream"])
    chunks = rng.randint(1, min(8, m))
    return Case(
        op=rng.choice(["matmul", "linear"]), m=m, n=n, k=k,
        dtype=torch.bfloat16 if device == "cuda" else rng.choice([torch.float32, torch.float64]),
        b_is_transposed=rng.random() < 0.5, schedule=rng.choice(["auto", "static", "dynamic", "stream_k"]),
        workers=rng.choice([None, None, 1, 2, MOST_WORKERS] if device == "cpu" else [None, None, 64, 131]),
        activation=rng.choice([None, None, "silu"]), arrival=arrival, chunks=chunks, pivot=rng.randrange(chunks),
    )  # fmt: skip


class Call:
    """A case with its operands; `launch` makes the call, `ends` compares what was launched since with the first."""

    def __init__(self, case: Case, device: str, rng: random.Random) -> None:
        self.case, self.device, self.rng = case, device, rng
        source = torch.randn(case.m, case.k).to(case.dtype)
        self.source = source.pin_memory() if device == "cuda" else source
        w = torch.randn(case.n, case.k).to(device, case.dtype)
        self.b = w.t() if case.b_is_transposed else w.t().contiguous()
        self.feed: Any = None
        self.stream: ts.Stream | None = None
        self.x = self.source.to(device)
        if case.arrival == "stream":
            self.stream = ts.stream_in(self.source, device=device, rows_per_chunk=self._rows())
        elif case.arrival:
            self.feed = self._feed()
        self.out: torch.Tensor | None = None
        self.first: torch.Tensor | None = None
        self.differ = torch.zeros((), dtype=torch.int64, device=device)

    def _rows(self) -> int:
        return -(-self.case.m // self.case.chunks)

    def _feed(self) -> Any:
        m, rows, where = self.case.m, self._rows(), {"device": "cuda"} if self.device == "cuda" else {}
        chunks = -(-m // rows)
        pivot = self.case.pivot % chunks
        if self.case.arrival == "uniform":
            arrival = ts.Arrival.uniform(rows, chunks, pivot=pivot, **where)
        else:
            inner = sorted(self.rng.sample(range(1, m), chunks - 1)) if chunks > 1 else []
            arrival = ts.Arrival.ragged([0, *inner, m], pivot=pivot, **where)
        if self.device == "cuda":
            from feeds import Feed as GpuFeed

            return GpuFeed(arrival, self.source)
        from fault_table.engine import Feed

        return Feed(arrival, self.source)

    @property
    def is_fed(self) -> bool:
        return self.feed is not None or self.stream is not None

    def _multiply(self, x: Any, **how: Any) -> torch.Tensor:
        case = self.case
        how |= {"schedule": case.schedule, "workers": case.workers, "activation": case.activation}
        if case.op == "linear":
            return ts.linear(x, self.b.t(), out=self.out, **how)
        return ts.matmul(x, self.b, out=self.out, **how)

    def launch(self) -> None:
        """One call; rows that arrive come in a random order, on the CPU beside the call."""
        if self.stream is not None:
            self.stream.wait(LONG)
            self.stream.restart()
            made = self._multiply(self.stream, deadline=LONG)
        elif self.feed is not None:
            made = self._fed()
        else:
            made = self._multiply(self.x)
        if self.first is None:
            check(made, Maths(self.x, self.b, activation=self.case.activation))
            self.out, self.first = made, made.clone()
        else:
            self.differ += (made != self.first).any()

    def _order(self) -> list[int]:
        count = self.feed.arrival.num_chunks
        return self.rng.sample(range(count), count)

    def _fed(self) -> torch.Tensor:
        self.feed.again()
        order = self._order()
        if self.device == "cuda":
            made = self._multiply(self.feed.tensor, arrival=self.feed.arrival, deadline=LONG)
            self.feed(*order)
            return made
        soon = self.rng.randint(0, len(order))
        self.feed(*order[:soon])
        pauses = [self.rng.choice([0, 0, 1e-5, 1e-3]) for _ in order[soon:]]

        def rest() -> None:
            for chunk, pause in zip(order[soon:], pauses, strict=True):
                time.sleep(pause)
                self.feed(chunk)

        thread = threading.Thread(target=rest)
        thread.start()
        try:
            return self._multiply(self.feed.tensor, arrival=self.feed.arrival, deadline=LONG)
        finally:
            thread.join()

    def expire(self) -> bool:
        """A chunk does not come: whether that ended as it should. It comes afterwards, in the same epoch."""
        self.feed.again()
        *order, missing = self._order()
        begin, end = self.feed.arrival.chunks(self.case.m).range_of(missing)
        self.feed(*order)
        try:
            made = self._multiply(self.feed.tensor, arrival=self.feed.arrival, deadline=SHORT)
            settle(self.device)
        except ts.ArrivalTimeout as error:
            if error.chunk != missing:
                return False
        else:
            return begin == end
        self.feed(missing)
        made = self._multiply(self.feed.tensor, arrival=self.feed.arrival, deadline=LONG)
        settle(self.device)
        return bool((made == self.first).all())

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()


def settle(device: str) -> None:
    """Wait for the device, and raise what it has reported."""
    if device == "cuda":
        torch.cuda.synchronize()
    ts.check()


def sample(device: str) -> dict[str, float]:
    """What may grow: bytes of the process and of the device, open files, threads, idle workers beyond a case's."""
    gc.collect()
    most = max(MOST_WORKERS, torch.get_num_threads())
    found: dict[str, float] = {"threads": len(threads_at_work()), "workers": max(most, len(workers.pool.idle))}
    with contextlib.suppress(OSError):
        found["files"] = sum(1 for _ in Path("/proc/self/fd").iterdir())
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found["resident"] = pages * os.sysconf("SC_PAGE_SIZE")
    if device == "cuda":
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        found |= {"allocated": torch.cuda.memory_allocated(), "device": total - free}
    return found


def speed(probe: Call, device: str) -> float:
    """Seconds of one call that is always the same, the least of five means of 20; on the CPU those of CPU time."""
    clock, best = time.process_time if device == "cpu" else time.perf_counter, float("inf")
    for _ in range(5):
        settle(device)
        begin = clock()
        for _ in range(20):
            probe.launch()
        settle(device)
        best = min(best, (clock() - begin) / 20)
    return best


def drifts(samples: Sequence[dict[str, float]], device: str, launches: int) -> list[str]:
    """What has grown, or slowed down, from the first samples that are warm to the last."""
    warm = samples[WARM:]
    if len(warm) < 4:
        return []
    part = max(2, len(warm) // 5)
    found = []
    for name in warm[0]:
        first, last = (statistics.median(one[name] for one in some) for some in (warm[:part], warm[-part:]))
        if name == "seconds":
            grown = last > SLOWER[device] * first
        elif name in ("resident", "device"):
            grown = last - first > GROWTH * max(1.0, launches / 1e6)
        else:
            grown = last > first
        if grown:
            found.append(f"{name}: {first:g} at first, {last:g} in the end")
    return found


def soak(device: str, seconds: float, seed: int, count: int = CASES) -> dict[str, Any]:
    """One run; a row of the record."""
    began, cpu = time.monotonic(), time.process_time()
    rng = random.Random(f"soak {device} {seed}")
    torch.manual_seed(seed)
    calls, wrong, made = [], [], Counter[str]()
    pulse = Pulse()
    paused: list[float] = []
    for _ in range(count):
        case = draw(rng, device)
        try:
            call = Call(case, device, rng)
            call.launch()
            settle(device)
            calls.append(call)
        except Exception as error:
            wrong.append(f"{case}: {type(error).__name__}: {error}")
    fed = [one for one in calls if one.feed is not None and one.feed.arrival.num_chunks > 1]
    probe = next((one for one in calls if not one.is_fed), calls[0])
    warm, samples, expired = time.monotonic() - began, [], 0
    refused = len(wrong)
    while time.monotonic() - began < seconds and len(wrong) == refused:
        for call in rng.sample(calls, len(calls)):
            times = rng.randint(1, FED_BURST if call.is_fed else BURST if device == "cuda" else FED_BURST)
            try:
                for _ in range(times):
                    call.launch()
                settle(device)
            except Exception as error:
                pause = pulse.longest() if isinstance(error, ts.ArrivalTimeout) else 0.0
                if pause > LONG / 2:  # nothing ran, the feeding threads neither: this case ends here
                    paused.append(round(pause, 1))
                    calls.remove(call)
                    fed = [one for one in fed if one is not call]
                    break
                wrong.append(f"{call.case}: {type(error).__name__}: {error}")
                break
            made[call.case.arrival or "plain"] += times
            if time.monotonic() - began > seconds:
                break
        if fed and len(wrong) == refused:
            call = rng.choice(fed)
            expired += 1
            if not call.expire():
                wrong.append(f"{call.case}: a chunk that was withheld did not end as it should")
        samples.append(sample(device) | {"seconds": speed(probe, device)})
    wrong += [f"{one.case}: {int(one.differ)} answers differ from the first" for one in calls if int(one.differ)]
    for one in calls:
        one.close()
    pulse.end()
    drifted = drifts(samples, device, made.total())
    spent = {"seconds": round(time.monotonic() - began, 1), "cpu_seconds": round(time.process_time() - cpu, 1)}
    return {
        "seed": seed, **spent, "warm_seconds": round(warm, 1), "cases": len(calls), "launches": made.total(),
        "of": dict(made), "expired": expired, "paused": paused, "samples": len(samples),
        "first": _rounded(samples[WARM:][:1]), "last": _rounded(samples[-1:]), "wrong": wrong[:10], "drifted": drifted,
    }  # fmt: skip


def _rounded(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for one in samples for name, value in one.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Launch for a while, and look at what grows.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--seed", type=int, help="default: the number of runs in the record")
    parser.add_argument("--cases", type=int, default=CASES)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the records")
    given = parser.parse_args(arguments)
    if given.device == "cuda":
        sys.path.append(str(Path(__file__).parents[1] / "gpu"))
    return add(
        given.device, given.out, "soak", given.seed, lambda seed: soak(given.device, given.seconds, seed, given.cases)
    )


def add(device: str, out: Path, name: str, seed: int | None, run: Any) -> int:
    """Add a run's row to the record, behind those of earlier runs; 1 if the run says what is wrong."""
    folder = "cpu" if device == "cpu" else folder_of(torch.cuda.get_device_name())
    path = out / folder / f"{name}.json"
    earlier = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    row = run(len(earlier) if seed is None else seed)
    record = Record(name, out, cpu=device == "cpu")
    row["commit"] = record.data["commit"]
    for one in (*earlier, row):
        record.add(one)
    print(json.dumps(row))
    return int(bool(row["wrong"] or row.get("drifted")))


if __name__ == "__main__":
    sys.exit(main())
