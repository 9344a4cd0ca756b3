"""One report from a machine with a GPU, to send back: ``python benchmarks/run.py amd selfcheck [FOLDER] [OPTIONS]``.

For a machine with an MI300X, on which nothing here was ever run; works on any GPU that torch sees. From the root of the
repository, with tilestream installed or ``src`` on PYTHONPATH, and pytest. FOLDER (default: selfcheck) gets
``report.json`` and ``report.md``, which are written again after each step and so hold what was found by then.

Steps, each in processes of its own under a time limit: a hang costs its test, or its shape, and is reported.

``machine``  device, driver, versions, commit, clocks; which backends run; the plan of a few shapes
``isa``      registers, spills, LDS and estimate of the kernels that the device has, by the Triton that is here
``tests``    tests/gpu, a process a file, and another one behind a test that hangs or kills its process: counts,
             failures, and the end of what was said
``speed``    plan.run beside torch.mm (hipBLASLt, cuBLAS), attention beside torch's: interleaved, L2 flushed, medians,
             answers checked, and what the cost model expected. Where ``machine`` has found a CDNA GPU, the CDNA kernels
             are timed too; no plan takes them by itself
``benchmarks`` the benchmarks that run on any GPU, their records whole

``--seconds`` bounds a test and a shape, four times that a benchmark, ``--total`` all of it; ``--steps tests,speed``
chooses; ``--quick`` takes few shapes.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.amd.outcomes import read, write
from benchmarks.core.paths import ROOT, command
from benchmarks.core.section import SUBJECTS, Section, sections

STEPS = ("machine", "isa", "tests", "speed", "benchmarks")
#: dtype, M, N, K: squares, a full wave of an MI300X's 304 units, short K, few rows.
SHAPES = (
    ("bfloat16", 4096, 4096, 4096), ("bfloat16", 8192, 8192, 8192), ("bfloat16", 4096, 4864, 8256),
    ("bfloat16", 8192, 8192, 1024), ("bfloat16", 512, 8192, 8192), ("bfloat16", 64, 8192, 8192),
    ("bfloat16", 1, 8192, 8192), ("float16", 4096, 4096, 4096), ("float32", 2048, 2048, 2048),
)  # fmt: skip
QUICK = (("bfloat16", 1024, 1024, 1024), ("bfloat16", 64, 2048, 2048))
#: Attention in bfloat16: sequences, heads, heads of keys, queries and keys, columns, causal.
ATTENTION = (
    (16, 16, 16, 4096, 128, False), (16, 16, 16, 4096, 128, True), (4, 32, 8, 8192, 128, True),
    (16, 16, 16, 4096, 64, True), (4, 16, 16, 4096, 256, True), (8, 64, 8, 1024, 128, True),
)  # fmt: skip
QUICK_ATTENTION = ((1, 8, 2, 1024, 128, True),)
#: Archs of the CDNA kernels.
CDNA = ("gfx942", "gfx950")
#: Seconds that a process may take to import, before its first test begins.
_START = 120
#: Characters of a process's output that are kept, from its end.
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


def run(arguments: list[str], seconds: float, progress: Path | None = None) -> Ran:
    """Run a command; kill it, and what it started, once nothing has happened for ``seconds``.

    Parameters
    ----------
    progress
        Something has happened where this file has changed; None: nothing ever does.
    """
    begin = changed = time.monotonic()
    before = None
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TILESTREAM_OUTCOMES": str(progress)}
    with tempfile.TemporaryFile(mode="w+", errors="replace") as said:
        process = subprocess.Popen(
            arguments, cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
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
    """What was found so far; it is written to disk."""

    def __init__(self, folder: Path, total: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._end = folder, time.monotonic() + total
        self.data: dict[str, Any] = {"name": "selfcheck", "date": time.strftime("%Y-%m-%d %H:%M:%S")}

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self._end - time.monotonic()

    def write(self) -> None:
        """Write both files, each whole or not at all."""
        for name, text in (("report.json", json.dumps(self.data, indent=1)), ("report.md", markdown(self.data))):
            new = self._folder / f"{name}.tmp"
            new.write_text(text + "\n", encoding="utf-8")
            new.replace(self._folder / name)


# Steps ----------------------------------------------------------------------------------------------------------------


def ask(what: str, *arguments: str, seconds: float) -> dict[str, Any]:
    """The answer of a process of `answers`, or why there is none."""
    ran = run(command("amd", "_answer", what, *arguments), seconds)
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
        tests = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
        tests += ["-p", "benchmarks.amd.outcomes", str(file)]
        while report.left > 0:
            last = run(tests, min(seconds, report.left), outcomes)
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


def check_speed(report: Report, seconds: float, shapes: dict[str, tuple[tuple[Any, ...], ...]]) -> None:
    """A process for each shape and backend."""
    rows = report.data["speed"] = []
    backends = ("", "cdna") if report.data.get("machine", {}).get("arch") in CDNA else ("",)
    asked = [(what, shape) for what, of_it in shapes.items() for shape in of_it]
    for (what, shape), backend in itertools.product(asked, backends):
        name = ("attention " if what == "attend" else "") + " ".join(map(str, shape))
        found = (
            ask(what, *map(str, shape), backend, seconds=min(seconds, report.left))
            if report.left > 0
            else {"error": "no time left"}
        )
        rows.append({"shape": f"{name} {backend}".rstrip(), **found})
        report.write()


def benchmarks() -> dict[str, Section]:
    """The sections that run on any GPU, by ``SUBJECT SECTION``."""
    return {
        f"{subject} {name}": section
        for subject in SUBJECTS
        for name, section in sections(subject).items()
        if section.gpus and not section.nvidia and not section.tool
    }


def check_benchmarks(report: Report, seconds: float) -> None:
    """Run each of `benchmarks` in a process; keep its records, even if it was killed."""
    found = report.data["benchmarks"] = {}
    here = report.data.get("machine", {}).get("devices", 1)
    for name, section in benchmarks().items():
        if section.gpus > here:
            found[name] = {"refused": f"it needs {section.gpus} GPUs, here is {here}"}
        elif report.left <= 0:
            found[name] = {"error": "no time left"}
        else:
            with tempfile.TemporaryDirectory() as folder:
                limit = min(seconds, report.left)
                ran = run(command(*name.split(), folder, "--seconds", f"{limit:.0f}"), limit)
                records = dict(_records(Path(folder)))
            found[name] = {"seconds": round(ran.seconds, 1), "records": records}
            if ran.how or not records:
                found[name] |= {"error": ran.how or "it left no record", "said": ran.said}
        report.write()


def _records(folder: Path) -> Iterator[tuple[str, Any]]:
    for file in sorted(folder.rglob("*.json")):
        with contextlib.suppress(ValueError):  # one that was being written
            yield file.name, json.loads(file.read_text(encoding="utf-8"))


# For people -----------------------------------------------------------------------------------------------------------


def markdown(data: dict[str, Any]) -> str:
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
    if "benchmarks" in data:
        yield from _benchmark_lines(data["benchmarks"])


def _benchmark_lines(found: dict[str, Any]) -> Iterator[str]:
    yield from ("", "## Benchmarks", "", "Their records are in report.json.", "")
    for name, one in found.items():
        said = one.get("error") or one.get("refused") or f"{one['seconds']} s"
        rows = sum(len(record.get("rows", ())) for record in one.get("records", {}).values())
        yield f"- {name}: {said}" + (f", {rows} rows" if rows else "")


def failed(data: dict[str, Any]) -> bool:
    parts = [data.get("machine", {}), data.get("isa", {}), *data.get("tests", {}).values(), *data.get("speed", [])]
    parts += data.get("benchmarks", {}).values()
    return any("error" in part or part.get("failed") for part in parts)


def main(arguments: list[str], tests: Path = ROOT / "tests" / "gpu") -> int:
    """Status 0 if all went well, 1 if not; the report is there either way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("selfcheck"))
    parser.add_argument("--steps", default=",".join(STEPS), help="of " + ", ".join(STEPS))
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
        quick = {"speed": QUICK, "attend": QUICK_ATTENTION}
        check_speed(report, given.seconds, quick if given.quick else {"speed": SHAPES, "attend": ATTENTION})
    if "benchmarks" in steps:
        check_benchmarks(report, 4 * given.seconds)
    report.write()
    print(f"{given.folder / 'report.md'} and report.json: please send both", flush=True)
    return int(failed(report.data))
