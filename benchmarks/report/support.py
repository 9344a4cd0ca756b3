"""The support matrix, ``docs/support.md``: from records of tests, benchmarks and machine code, and from plans.

python benchmarks/run.py report support            # writes
python benchmarks/run.py report support --check    # status 1 if the page is not what the records say
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tilestream as ts
from benchmarks.core.paths import DOCS, RESULTS, ROOT
from benchmarks.core.records import Data, load, paths
from benchmarks.report.notes import Notes
from benchmarks.report.tables import device_of, table
from tilestream.core.gpu_specs import GPU_SPECS
from tilestream.plan import experimental

NOTES = Notes("support")
PAGE = DOCS / "support.md"
MACHINE_CODE = ROOT / "tests" / "kernels" / "machine_code.json"

DEVICES = ("cpu", *GPU_SPECS)
DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz")
#: What a pass of the GPU tests is about, by words of its name: the first that matches.
SUBJECTS = (
    ("native", "native calls"),
    ("sanitizer|racecheck|again", "sanitizers, interrupted launches"),
    ("attention", "attention"),
    ("ranks|nodes|distributed|all-reduce|shards|copies inside", "across ranks"),
    ("publish|copy items", "publishing, copy items"),
    ("hopper", "matmul, Hopper kernel"),
    ("alone", "tests that need the GPU alone"),
    ("", "portable matmul, arrivals, all other"),
)


def page(results: Path = RESULTS) -> str:
    tests = [data for path in paths(results, "tests.json") for data in [load(path)]]
    software = sorted({f"torch {data['torch']}, Triton {data['triton']}, CUDA {data['cuda']}" for data in tests})
    files = ", ".join(f"`benchmarks/results/{data['folder']}/tests.json`" for data in tests)
    parts = [
        NOTES("page", **requirements()),
        NOTES("kernels"), table(["operands", *DEVICES], kernels()),
        NOTES("tests", software=" and ".join(software), files=files), tested(tests),
        NOTES("compiled"), compiled(json.loads(MACHINE_CODE.read_text(encoding="utf-8"))),
        NOTES("measured"), table(["device", "torch", "Triton", "records"], measured(results)),
        NOTES("refused"), "\n".join(f"- {line}" for line in refused()),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def requirements() -> dict[str, str]:
    """What ``pyproject.toml`` declares."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    minors = [int(minor) for minor in re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', text)]
    torch = re.search(r'"torch>=([\d.]+)"', text)
    assert torch is not None
    return {"pythons": f"3.{min(minors)} to 3.{max(minors)}", "torch": f"torch {torch[1]} or newer"}


def kernels() -> Iterator[list[str]]:
    """The backend that the plan takes, by operands and device."""
    heads = {"heads_q": 32, "heads_kv": 8}
    for dtype in DTYPES:
        matmul = (taken(ts.plan, 4096, 4096, 4096, dtype=dtype, device=device, layout="nt") for device in DEVICES)
        yield [f"matmul, {dtype}", *matmul]
    for dtype in DTYPES:
        attention = (taken(ts.attention_plan, 4096, dtype=dtype, device=device, **heads) for device in DEVICES)
        yield [f"attention, {dtype}", *attention]


def taken(make: Callable[..., Any], *extents: int, **how: Any) -> str:
    """The backend of a plan, or ``refused``."""
    try:
        return str(make(*extents, **how).backend)
    except (NotImplementedError, TypeError, ValueError):
        return "refused"


def tested(tests: list[Data]) -> str:
    """A row a subject, a column a device: passed, skipped, failed."""
    counts: dict[str, dict[str, Counter[str]]] = {}
    for data in tests:
        for name, found in data["passes"].items():
            subject = next(subject for words, subject in SUBJECTS if re.search(words, name))
            row = counts.setdefault(subject, {}).setdefault(device_of(data), Counter())
            row.update({kind: found.get(kind, 0) for kind in ("passed", "skipped", "failed")})
    devices = [device_of(data) for data in tests]

    def cell(row: Counter[str] | None) -> str:
        if row is None:
            return "-"
        return ", ".join(f"{row[kind]:,} {kind}" for kind in ("passed", "skipped", "failed") if row[kind])

    rows = [[subject, *(cell(counts[subject].get(device)) for device in devices)]
            for _, subject in SUBJECTS if subject in counts]  # fmt: skip
    return table(["", *devices], rows)


def compiled(hashes: dict[str, dict[str, dict[str, str]]]) -> str:
    """A row a kernel, a column a Triton: how many variants of which architectures."""
    found: dict[str, dict[str, Counter[str]]] = {}
    for triton, archs in hashes.items():
        for arch, names in archs.items():
            for name in names:
                found.setdefault(" ".join(name.split()[:2]), {}).setdefault(triton, Counter())[arch] += 1
    rows = [
        [kernel, *(", ".join(f"{count} {arch}" for arch, count in sorted(by[triton].items())) for triton in hashes)]
        for kernel, by in sorted(found.items())
    ]
    return table(["kernel", *(f"Triton {triton}" for triton in hashes)], rows)


def measured(results: Path) -> Iterator[list[str]]:
    """A row for each device and software that a record names."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for path in paths(results, "*.json"):
        data = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(data, dict) and "torch" in data and "device" in data and path.stem != "tests":
            key = (str(data["device"]), str(data["torch"]), str(data.get("triton") or "-"))
            found.setdefault(key, []).append(f"`{path.stem}`")
    for key, names in found.items():
        yield [*key, ", ".join(names)]


def refused() -> Iterator[str]:
    """What the planners say of what they refuse."""
    calls: dict[str, Callable[[], object]] = {
        "a device without a backend": lambda: ts.plan(64, 64, 64, device="mps"),
        "integers": lambda: ts.plan(64, 64, 64, dtype="int8"),
        "head dim 260": lambda: ts.attention_plan(64, heads_q=1, head_dim=260),
        "the CDNA kernel in float32": lambda: ts.plan(64, 64, 64, dtype="float32", device="mi300x", backend="cdna"),
        "publishing beside an operand that arrives": lambda: ts.plan(
            64, 64, 64, arrival=ts.Arrival.uniform(32, 2), publish=ts.Arrival.uniform(32, 2)
        ),
        "publishing from a static schedule": lambda: ts.plan(
            64, 64, 64, publish=ts.Arrival.uniform(32, 2), schedule="static"
        ),
    }
    for what, call in calls.items():
        try:
            call()
        except (NotImplementedError, TypeError, ValueError) as error:
            yield f"**{what}**: `{type(error).__name__}`: {' '.join(str(error).split())}"


def main(arguments: list[str]) -> int:
    for kernel in experimental.KERNELS.values():  # the page is of a machine where nothing is switched on
        os.environ.pop(kernel.environment, None)
    made = page()
    if arguments == ["--check"]:
        stale = not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != made
        if stale:
            print("docs/support.md is stale: run python benchmarks/run.py report support", file=sys.stderr)
        return int(stale)
    PAGE.write_text(made, encoding="utf-8")
    return 0
