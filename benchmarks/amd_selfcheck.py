"""One report from a machine with a GPU, to send back: ``python benchmarks/amd_selfcheck.py [FOLDER] [OPTIONS]``.

For somebody with an MI300X, on which nothing here was ever run; works on any GPU that torch sees. From the root of the
repository, with tilestream installed or ``src`` on PYTHONPATH, and pytest. In FOLDER (default: selfcheck) it leaves
``report.json`` and ``report.md``, written anew after each step, so that what was found by then is there whatever
happens.

Steps, each in processes of its own under a time limit: a hang costs its file, or its shape, and is reported.

``machine``  device, driver, versions, commit, clocks; which backends run; the plan of a few shapes
``isa``      registers, spills, LDS and estimate of the kernel that the device's plan picks, by the Triton that is here
``tests``    tests/gpu, a process a file: counts, failures and the end of what they said
``speed``    plan.run beside torch.mm (hipBLASLt, cuBLAS): interleaved, L2 flushed, medians, answers checked, and what
             the cost model expected

``--seconds`` bounds a process, ``--total`` all of it; ``--steps tests,speed`` chooses; ``--quick`` takes few shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
STEPS = ("machine", "isa", "tests", "speed")
#: dtype, M, N, K: squares, a full wave of an MI300X's 304 units, short K, few rows.
SHAPES = (
    ("bfloat16", 4096, 4096, 4096), ("bfloat16", 8192, 8192, 8192), ("bfloat16", 4096, 4864, 8256),
    ("bfloat16", 8192, 8192, 1024), ("bfloat16", 512, 8192, 8192), ("bfloat16", 64, 8192, 8192),
    ("bfloat16", 1, 8192, 8192), ("float16", 4096, 4096, 4096), ("float32", 2048, 2048, 2048),
)  # fmt: skip
QUICK = (("bfloat16", 1024, 1024, 1024), ("bfloat16", 64, 2048, 2048))
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


def run(command: list[str], seconds: float) -> Ran:
    """Run a command for so long at most; it and what it started are killed then."""
    begin = time.monotonic()
    paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=max(seconds, 0.1))
        return Ran(process.returncode, said[-_KEPT:], time.monotonic() - begin)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        try:
            said, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:  # a process that hangs in the driver cannot be killed
            said = ""
        return Ran(None, said[-_KEPT:], time.monotonic() - begin)


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
    """A process for each file of tests; pytest's own limit a test applies where pytest-timeout is there."""
    found = report.data["tests"] = {}
    for file in sorted(folder.glob("test_*.py")):
        if report.left <= 0:
            found[file.name] = {"error": "no time left"}
            continue
        results = report._folder / f"{file.stem}.xml"
        ran = run(
            [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider",
             f"--junitxml={results}", str(file)],
            min(seconds, report.left),
        )  # fmt: skip
        found[file.name] = {**outcomes(results), "seconds": round(ran.seconds, 1)}
        if ran.status not in (0, 5):  # 5: nothing collected
            found[file.name] |= {"error": ran.how, "said": ran.said}
        results.unlink(missing_ok=True)
        report.write()


def outcomes(results: Path) -> dict[str, Any]:
    """Counts, and the names and messages of what failed, of pytest's JUnit file; none where there is no such file."""
    counts: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": []}
    try:
        cases = list(ET.parse(results).iter("testcase"))
    except (OSError, ET.ParseError):
        return counts
    for case in cases:
        bad = [part for part in case if part.tag in ("failure", "error")]
        kind = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
        counts[kind] += 1
        if bad:
            message = (bad[0].get("message") or "").splitlines()
            counts["failures"].append(f"{case.get('name')}: {message[0][:200] if message else ''}")
    return counts


def check_speed(report: Report, seconds: float, shapes: tuple[tuple[Any, ...], ...]) -> None:
    """A process for each shape."""
    rows = report.data["speed"] = []
    for shape in shapes:
        name = " ".join(map(str, shape))
        found = (
            ask("speed", *map(str, shape), seconds=min(seconds, report.left))
            if report.left > 0
            else {"error": "no time left"}
        )
        rows.append({"shape": name, **found})
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


def speed(dtype: str, m: str, n: str, k: str) -> dict[str, Any]:
    """Ours beside torch.mm, B as a Linear weight lies."""
    import torch

    import tilestream as ts
    from gpu_matmul import host_us, interleave
    from harness import errors

    rows, columns, depth = int(m), int(n), int(k)
    kind = getattr(torch, dtype)
    a = torch.randn(rows, depth, device="cuda", dtype=kind)
    b = torch.randn(columns, depth, device="cuda", dtype=kind).t()
    out = torch.empty(rows, columns, device="cuda", dtype=kind)
    plan = ts.plan(rows, columns, depth, dtype=kind, device="cuda", layout="nt")
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
            if "error" in row:
                yield f"| {row['shape']} | {row['error']} | | | | | |"
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
    parser.add_argument("--seconds", type=float, default=900, help="of a process, at most")
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
