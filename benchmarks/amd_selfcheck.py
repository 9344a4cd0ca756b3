"""One report from a machine with a GPU, to send back: ``python benchmarks/amd_selfcheck.py [FOLDER] [OPTIONS]``.

For somebody with an MI300X, on which nothing here was ever run; works on any GPU that torch sees. From the root of the
repository, with tilestream installed or ``src`` on PYTHONPATH, and pytest. In FOLDER (default: selfcheck) it leaves
``report.json`` and ``report.md``, written anew after each step, so that what was found by then is there whatever
happens.

Steps, each in processes of its own under a time limit: a hang costs its test, or its shape, and is reported.

``machine``  device, driver, versions, commit, clocks; which backends run; the plan of a few shapes
``isa``      registers, spills, LDS and estimate of the kernels that the device has, by the Triton that is here
``tests``    tests/gpu, a process a file, and another one behind a test that hangs or kills its process: counts,
             failures, and the end of what was said
``speed``    plan.run beside torch.mm (hipBLASLt, cuBLAS): interleaved, L2 flushed, medians, answers checked, and what
             the cost model expected; where ``machine`` has found a CDNA GPU, by the CDNA kernel too, which no plan
             takes by itself

``--seconds`` bounds a test and a shape, ``--total`` all of it; ``--steps tests,speed`` chooses; ``--quick`` takes few
shapes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from selfcheck_outcomes import read, write

ROOT = Path(__file__).parent.parent
STEPS = ("machine", "isa", "tests", "speed")
#: dtype, M, N, K: squares, a full wave of an MI300X's 304 units, short K, few rows.
SHAPES = (
    ("bfloat16", 4096, 4096, 4096), ("bfloat16", 8192, 8192, 8192), ("bfloat16", 4096, 4864, 8256),
    ("bfloat16", 8192, 8192, 1024), ("bfloat16", 512, 8192, 8192), ("bfloat16", 64, 8192, 8192),
    ("bfloat16", 1, 8192, 8192), ("float16", 4096, 4096, 4096), ("float32", 2048, 2048, 2048),
)  # fmt: skip
QUICK = (("bfloat16", 1024, 1024, 1024), ("bfloat16", 64, 2048, 2048))
#: Archs of the CDNA kernel.
CDNA = ("gfx942", "gfx950")
#: Seconds until a process has imported what it needs, and its first test begins.
_START = 120
#: Characters of what a process said that are kept.
_KEPT = 4000


class Ran(NamedTuple):
    """A process that has ended, or was ended."""

    status: int | None
    said: str
    seconds: float

    @property
    def how(self) -> str:
        """In words; empty where all is well."""
        return "" if self.status == 0 else "timed out" if self.status is None else f"status {self.status}"


def run(command: list[str], seconds: float, progress: Path | None = None) -> Ran:
    """Run a command until nothing has happened for so long; it and what it started are killed then.

    Parameters
    ----------
    progress
        Something has happened where this file has changed; None: nothing ever does.
    """
    begin = changed = time.monotonic()
    before = None
    paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TILESTREAM_OUTCOMES": str(progress)}
    with tempfile.TemporaryFile(mode="w+", errors="replace") as said:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        while process.poll() is None and time.monotonic() - changed < (
            seconds if progress is None or before is not None else max(seconds, _START)
        ):
            time.sleep(0.05)
            now = progress.stat().st_size if progress is not None and progress.exists() else None
            if now != before:
                before, changed = now, time.monotonic()
        status = process.poll()
        if status is None:
            os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in the driver cannot be killed
                process.wait(timeout=10)
        said.seek(0)
        return Ran(status, said.read()[-_KEPT:], time.monotonic() - begin)


class Report:
    """What was found so far, on disk."""

    def __init__(self, folder: Path, total: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._end = folder, time.monotonic() + total
        self.data: dict[str, Any] = {"name": "selfcheck", "date": time.strftime("%Y-%m-%d %H:%M:%S")}

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()

    def write(self) -> None:
        """Both files, whole."""
        for name, text in (("report.json", json.dumps(self.data, indent=1)), ("report.md", markdown(self.data))):
            new = self._folder / f"{name}.tmp"
            new.write_text(text + "\n", encoding="utf-8")
            new.replace(self._folder / name)


# Steps ----------------------------------------------------------------------------------------------------------------


def ask(what: str, *arguments: str, seconds: float) -> dict[str, Any]:
    """What `answer` says of ``what``, in a process of its own; or why it said nothing."""
    ran = run([sys.executable, __file__, "--answer", what, *arguments], seconds)
    lines = [line for line in ran.said.splitlines() if line.startswith("{")]
    if ran.status == 0 and lines:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    return {"error": ran.how or "it said nothing", "said": ran.said}


def check_tests(report: Report, seconds: float, folder: Path) -> None:
    """The tests of each file, in as many processes as it takes."""
    found = report.data["tests"] = {}
    for file in sorted(folder.glob("test_*.py")):
        found[file.name] = _check_file(file, report, seconds)
        report.write()


def _check_file(file: Path, report: Report, seconds: float) -> dict[str, Any]:
    begin, last = time.monotonic(), Ran(None, "", 0.0)
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Path(folder) / "outcomes"
        command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
        command += ["-p", "selfcheck_outcomes", str(file)]
        while report.left > 0:
            last = run(command, min(seconds, report.left), outcomes)
            known = read(outcomes)
            hung = [name for name, line in known.items() if "outcome" not in line]
            for name in hung:
                write(outcomes, test=name, outcome="failed", message=f"it did not end: {last.how or 'its process did'}")
            if not hung:  # it came to its end, or to none that another process would come further than
                break
        lines = read(outcomes).values()
    counts: dict[str, Any] = {how: sum(x["outcome"] == how for x in lines) for how in ("passed", "failed", "skipped")}
    failures = [f"{x['test'].partition('::')[2]}: {x['message']}" for x in lines if x["outcome"] == "failed"]
    made = {**counts, "failures": failures, "seconds": round(time.monotonic() - begin, 1)}
    if report.left <= 0:
        made["error"] = "no time left"
    elif last.status not in (0, 1, 5):  # 1: some failed; 5: nothing is left to run
        made["error"] = last.how
    if "error" in made or failures:
        made["said"] = last.said
    return made


def check_speed(report: Report, seconds: float, shapes: tuple[tuple[Any, ...], ...]) -> None:
    """A process for each shape and backend."""
    rows = report.data["speed"] = []
    backends = ("", "cdna") if report.data.get("machine", {}).get("arch") in CDNA else ("",)
    for shape, backend in itertools.product(shapes, backends):
        name = " ".join(map(str, shape))
        found = (
            ask("speed", *map(str, shape), backend, seconds=min(seconds, report.left))
            if report.left > 0
            else {"error": "no time left"}
        )
        rows.append({"shape": f"{name} {backend}".rstrip(), **found})
        report.write()


# What the processes answer --------------------------------------------------------------------------------------------


def answer(what: str, arguments: list[str]) -> dict[str, Any]:
    """What a process of `ask` says."""
    answers: dict[str, Callable[..., dict[str, Any]]] = {"machine": machine, "isa": isa, "speed": speed}
    return answers[what](*arguments)


def machine() -> dict[str, Any]:
    """What is here."""
    import torch
    import triton

    import tilestream as ts
    from harness import gpu_about
    from tilestream.cli.doctor import BACKENDS, backend
    from tilestream.plan.ask import device_properties

    if not torch.cuda.is_available():
        return {"error": "torch sees no GPU here: nothing to check"}
    found = torch.cuda.get_device_properties(0)
    device = device_properties("cuda")
    plans = {
        f"{dtype} {m}x{n}x{k}": ts.plan(m, n, k, dtype=dtype, device="cuda", layout="nt").explain()
        for dtype, m, n, k in SHAPES[:3]
    }
    about = {key: value for key, value in gpu_about("selfcheck").items() if key not in ("name", "dtype")}
    return {
        **about,
        "devices": torch.cuda.device_count(),
        "arch": device.arch,
        "units": device.workers,
        "memory_gib": round(found.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "driver": driver(),
        "triton": triton.__version__,
        "properties": {"clock_ghz": device.clock / 1e9, "bandwidth_tb": device.bandwidth / 1e12, "xcds": device.xcds},
        "backends": {name: backend(name) for name in BACKENDS},
        "plans": plans,
    }


def driver() -> str:
    """The kernel driver's version, as the system has it."""
    for file in ("/sys/module/amdgpu/version", "/sys/module/nvidia/version", "/opt/rocm/.info/version"):
        if Path(file).is_file():
            return f"{file}: {Path(file).read_text(encoding='utf-8').strip()}"
    return "unknown"


def isa() -> dict[str, Any]:
    """The report of the kernels that this device's arch has."""
    from dataclasses import asdict

    from tilestream.isa import report
    from tilestream.isa.kernels import KERNELS, Question
    from tilestream.plan.ask import device_properties

    arch = device_properties("cuda").arch
    arch = "sm_90a" if arch == "sm_90" else arch
    fit = [name for name, entry in KERNELS.items() if arch in entry.archs]
    made: dict[str, Any] = {"arch": arch}
    for name in fit:
        found = asdict(report.of(name, Question(arch)))
        made[name] = {key: found[key] for key in ("plan", "registers", "spilled", "shared", "loop", "cycles", "triton")}
    return made


def speed(dtype: str, m: str, n: str, k: str, backend: str = "") -> dict[str, Any]:
    """Ours beside torch.mm, B as a Linear weight lies; by ``backend``, or by the one that the plan takes."""
    import torch

    import tilestream as ts
    from gpu_matmul import host_us, interleave
    from harness import errors

    rows, columns, depth = int(m), int(n), int(k)
    kind = getattr(torch, dtype)
    a = torch.randn(rows, depth, device="cuda", dtype=kind)
    b = torch.randn(columns, depth, device="cuda", dtype=kind).t()
    out = torch.empty(rows, columns, device="cuda", dtype=kind)
    try:
        plan = ts.plan(rows, columns, depth, dtype=kind, device="cuda", layout="nt", backend=backend or None)
    except NotImplementedError as error:
        if not backend:
            raise
        return {"refused": str(error)}
    some = min(rows, 512)
    figures = errors(plan.run(a, b)[:some], torch.mm(a, b)[:some], a[:some].double() @ b.double())
    times = interleave({"ours": lambda: plan.run(a, b, out=out), "torch": lambda: torch.mm(a, b, out=out)})
    rates = {name: 2e-9 * rows * columns * depth / ms for name, ms in times.items()}
    peak = plan.device.peak(plan.problem.kind, plan.device.workers) / 1e12
    if max(rates.values()) > 1.1 * peak:
        return {"error": f"{rates} TFLOP/s are above the peak of {peak:.0f}: the answer or the timing is wrong"}
    return {
        "plan": plan.label,
        "ms": {name: round(ms, 4) for name, ms in times.items()},
        "tflops": {name: round(rate, 1) for name, rate in rates.items()},
        "of_torch": round(times["torch"] / times["ours"], 3),
        "expected_ms": round(plan.predicted * 1e3, 4),
        "host_us": round(host_us(lambda: plan.run(a, b, out=out)), 1),
        "errors": figures,
    }


# For people -----------------------------------------------------------------------------------------------------------


def markdown(data: dict[str, Any]) -> str:
    """The report for people."""
    return "\n".join([f"# Self-check of tilestream, {data['date']}", "", *_lines(data)])


def _lines(data: dict[str, Any]) -> Iterator[str]:
    here = data.get("machine", {})
    if here:
        yield from ("## Machine", "")
        if "error" in here:
            yield f"**{here['error']}**"
        skip = ("plans", "backends", "properties", "said", "error")
        yield from (f"- {key}: {value}" for key, value in here.items() if key not in skip)
        yield from (f"- backend {name}: {text}" for name, text in here.get("backends", {}).items())
        yield ""
    if "isa" in data:
        yield from ("## Compiled here", "")
        for name, found in data["isa"].items():
            if isinstance(found, dict):
                share = found["cycles"].get("share")
                spills = sum(found["spilled"].values())
                estimate = "" if share is None else f", {share:.0%} of the peak estimated"
                resources = f"{found['registers']}, spilled {spills}, LDS {found['shared']}"
                yield f"- {name}: {found['plan']}; {resources}{estimate}"
            else:
                yield f"- {name}: {found}"
        yield ""
    if "tests" in data:
        yield from ("## Tests", "", "| file | passed | failed | skipped | seconds | |", "|---|---|---|---|---|---|")
        for name, one in data["tests"].items():
            counts = " | ".join(str(one.get(key, "")) for key in ("passed", "failed", "skipped", "seconds"))
            yield f"| {name} | {counts} | {one.get('error', '')} |"
        yield ""
        yield from (f"- {name}: {text}" for name, one in data["tests"].items() for text in one.get("failures", []))
        yield ""
    if "speed" in data:
        yield from ("## Speed", "", "| shape | plan | TFLOP/s | torch | ours / torch | expected ms | ms |")
        yield "|---|---|---|---|---|---|---|"
        for row in data["speed"]:
            if "error" in row or "refused" in row:
                yield f"| {row['shape']} | {row.get('error') or row['refused']} | | | | | |"
                continue
            rates = row["tflops"]
            yield (
                f"| {row['shape']} | {row['plan']} | {rates['ours']} | {rates['torch']} | {row['of_torch']} | "
                f"{row['expected_ms']} | {row['ms']['ours']} |"
            )


def failed(data: dict[str, Any]) -> bool:
    """Whether anything went wrong."""
    parts = [data.get("machine", {}), data.get("isa", {}), *data.get("tests", {}).values(), *data.get("speed", [])]
    return any("error" in part or part.get("failed") for part in parts)


def main(arguments: list[str] | None = None, tests: Path = ROOT / "tests" / "gpu") -> int:
    """Status 0 if all went well, 1 if not; the report is there either way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("selfcheck"))
    parser.add_argument("--steps", default=",".join(STEPS), help="of machine, isa, tests, speed")
    parser.add_argument("--seconds", type=float, default=300, help="of a test or a shape, at most")
    parser.add_argument("--total", type=float, default=3 * 3600, help="seconds in all, about")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args(arguments)
    steps = given.steps.split(",")
    if set(steps) - set(STEPS):
        parser.error(f"--steps {given.steps}: steps are {', '.join(STEPS)}")
    report = Report(given.folder.resolve(), given.total)
    for name in ("machine", "isa"):
        if name in steps:
            report.data[name] = ask(name, seconds=min(given.seconds, report.left))
            report.write()
    if "tests" in steps:
        check_tests(report, given.seconds, tests)
    if "speed" in steps:
        check_speed(report, given.seconds, QUICK if given.quick else SHAPES)
    report.write()
    print(f"{given.folder / 'report.md'} and report.json: please send both", flush=True)
    return int(failed(report.data))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--answer"]:
        print(json.dumps(answer(sys.argv[2], sys.argv[3:])), flush=True)
    else:
        sys.exit(main())
