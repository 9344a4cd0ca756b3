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
``speed``    plan.run beside torch.mm (hipBLASLt, cuBLAS), attention beside torch's: interleaved, L2 flushed, medians,
             answers checked, and what the cost model expected; where ``machine`` has found a CDNA GPU, by the CDNA
             kernels too, which no plan takes by itself
``benchmarks`` the benchmarks of this folder that need no NVIDIA GPU, their records whole: see `BENCHMARKS`

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.amd.outcomes import read, write
from benchmarks.core.paths import ROOT
from benchmarks.core.paths import command as command_of

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
#: Benchmarks that run on any GPU: GPUs that they need, and what follows the script's name. FOLDER is theirs.
BENCHMARKS = {
    "gemm portable": (1, ("FOLDER/gpu_matmul.json",)),
    "arrival stream": (1, ("FOLDER/gpu_stream.json",)),
    "contention neighbours": (1, ("held,idle,split,queues", "FOLDER", "--budget", "300")),
    "distributed all_gather": (2, ("--into", "FOLDER")),
    "distributed mlp": (2, ("--into", "FOLDER")),
    "distributed llama": (2, ("--into", "FOLDER")),
}
#: Those that do not, and why.
NVIDIA_ONLY = {
    "distributed all_reduce": "slots in torch's symmetric memory, beside its own one-shot and two-shot",
    "arrival signals": "it looks at TMA, and at the fence before it",
    "attention prefill": "beside cuDNN and FlashAttention 4; the step speed has attention beside torch's",
    "attention portable": "tiles for Hopper, beside cuDNN",
    "attention tiles": "tiles of the Hopper kernel, beside cuDNN",
    "attention fp8": "beside cuDNN; 8 bits in the Hopper kernel",
    "distributed copies": "copies over NVLink, by torch's symmetric memory",
    "gemm suites": "plans of the Hopper kernel; the step speed has the shapes",
}
#: Archs of the CDNA kernels.
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
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
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
    ran = run(command_of("amd", "selfcheck", "--answer", what, *arguments), seconds)
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
        command += ["-p", "benchmarks.amd.outcomes", str(file)]
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


def check_benchmarks(report: Report, seconds: float, scripts: list[str]) -> None:
    """A process for each of `BENCHMARKS`, and the records that it leaves, also where it was ended."""
    found = report.data["benchmarks"] = {}
    here = report.data.get("machine", {}).get("devices", 1)
    for name, (devices, arguments) in BENCHMARKS.items():
        if devices > here:
            found[name] = {"refused": f"it needs {devices} GPUs, here is {here}"}
        elif report.left <= 0:
            found[name] = {"error": "no time left"}
        else:
            with tempfile.TemporaryDirectory() as folder:
                given = [one.replace("FOLDER", folder) for one in arguments]
                command = [*scripts, *name.split(), *given]
                ran = run(command, min(seconds, report.left))
                records = dict(_records(Path(folder)))
            found[name] = {"seconds": round(ran.seconds, 1), "records": records}
            if ran.how or not records:
                found[name] |= {"error": ran.how or "it left no record", "said": ran.said}
        report.write()


def _records(folder: Path) -> Iterator[tuple[str, Any]]:
    for file in sorted(folder.glob("*.json")):
        with contextlib.suppress(ValueError):  # one that was being written
            yield file.name, json.loads(file.read_text(encoding="utf-8"))


# What the processes answer --------------------------------------------------------------------------------------------


def answer(what: str, arguments: list[str]) -> dict[str, Any]:
    """What a process of `ask` says."""
    answers: dict[str, Callable[..., dict[str, Any]]] = {
        "machine": machine, "isa": isa, "speed": speed, "attend": attend
    }  # fmt: skip
    return answers[what](*arguments)


def machine() -> dict[str, Any]:
    """What is here."""
    import torch
    import triton

    import tilestream as ts
    from benchmarks.core.harness import gpu_about
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
    from benchmarks.core.harness import errors

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
    operations = 2.0 * rows * columns * depth
    return timed(plan, operations, lambda: plan.run(a, b, out=out), lambda: torch.mm(a, b, out=out), figures)


def attend(
    batch: str, heads: str, heads_kv: str, length: str, dim: str, causal: str, backend: str = ""
) -> dict[str, Any]:
    """`tilestream.attention` beside torch's; by ``backend``, or by the one that the plan takes."""
    os.environ["TILESTREAM_CDNA"] = "1" if backend == "cdna" else "0"
    import torch
    from torch.nn import functional

    import tilestream as ts
    from benchmarks.core.harness import errors

    sequences, rows, columns, masked = int(batch), int(length), int(dim), causal == "True"
    shape = {"batch": sequences, "heads_q": int(heads), "heads_kv": int(heads_kv), "head_dim": columns}
    try:
        plan = ts.attention_plan(rows, **shape, causal=masked, device="cuda", backend=backend or None)
    except NotImplementedError as error:
        if not backend:
            raise
        return {"refused": str(error)}
    q, k, v = (
        torch.randn(sequences, rows, int(of), columns, device="cuda", dtype=torch.bfloat16)
        for of in (heads, heads_kv, heads_kv)
    )
    turned = [x.transpose(1, 2) for x in (q, k, v)]

    def theirs() -> Any:
        return functional.scaled_dot_product_attention(*turned, is_causal=masked, enable_gqa=heads != heads_kv)

    # The last queries of one head, which see the most keys.
    some = slice(max(rows - 512, 0), rows)
    scores = q[0, some, 0].double() @ k[0, :, 0].double().t() * columns**-0.5
    if masked:
        position = torch.arange(rows, device=q.device)
        seen = position[None] <= position[some, None]
        scores = scores.masked_fill(~seen, float("-inf"))
    figures = errors(
        ts.attention(q, k, v, causal=masked)[0, some, 0], theirs()[0, 0, some], scores.softmax(1) @ v[0, :, 0].double()
    )
    operations = 4.0 * sequences * int(heads) * rows * rows * columns * (0.5 if masked else 1.0)
    return timed(plan, operations, lambda: ts.attention(q, k, v, causal=masked), theirs, figures)


def timed(
    plan: Any, operations: float, ours: Callable[[], object], theirs: Callable[[], object], figures: Any
) -> dict[str, Any]:
    """Both, in turn."""
    from benchmarks.gemm.portable import host_us, interleave

    times = interleave({"ours": ours, "torch": theirs})
    rates = {name: 1e-9 * operations / ms for name, ms in times.items()}
    kind = getattr(plan.problem, "kind", plan.problem.dtype)
    peak = plan.device.peak(kind, plan.device.workers) / 1e12
    if max(rates.values()) > 1.1 * peak:
        return {"error": f"{rates} TFLOP/s are above the peak of {peak:.0f}: the answer or the timing is wrong"}
    return {
        "plan": plan.label,
        "ms": {name: round(ms, 4) for name, ms in times.items()},
        "tflops": {name: round(rate, 1) for name, rate in rates.items()},
        "of_torch": round(times["torch"] / times["ours"], 3),
        "expected_ms": round(plan.predicted * 1e3, 4),
        "host_us": round(host_us(ours), 1),
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
    if "benchmarks" in data:
        yield from _benchmark_lines(data["benchmarks"])


def _benchmark_lines(found: dict[str, Any]) -> Iterator[str]:
    yield from ("", "## Benchmarks", "", "Their records are in report.json.", "")
    for name, one in found.items():
        said = one.get("error") or one.get("refused") or f"{one['seconds']} s"
        rows = sum(len(record.get("rows", ())) for record in one.get("records", {}).values())
        yield f"- {name}: {said}" + (f", {rows} rows" if rows else "")


def failed(data: dict[str, Any]) -> bool:
    """Whether anything went wrong."""
    parts = [data.get("machine", {}), data.get("isa", {}), *data.get("tests", {}).values(), *data.get("speed", [])]
    parts += data.get("benchmarks", {}).values()
    return any("error" in part or part.get("failed") for part in parts)


def main(arguments: list[str] | None = None, tests: Path = ROOT / "tests" / "gpu") -> int:
    """Status 0 if all went well, 1 if not; the report is there either way."""
    if sys.argv[1:2] == ["--answer"]:
        print(json.dumps(answer(sys.argv[2], sys.argv[3:])), flush=True)
        return 0
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
        check_benchmarks(report, 4 * given.seconds, command_of())
    report.write()
    print(f"{given.folder / 'report.md'} and report.json: please send both", flush=True)
    return int(failed(report.data))
