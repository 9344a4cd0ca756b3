"""Tritons other than the one that is installed, each in a virtual environment of its own; and compile gates run by one.

They are kept under TILESTREAM_TRITONS (default: the user's cache).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

TRITONS = ("3.6.0", "3.7.1", "3.9.0")


def environment(cache: Path) -> dict[str, str]:
    """Of a process that compiles, with a cache of its own."""
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    # Triton 3.9 warns where the second is not set. It is part of the key of Triton's cache: only tests set it.
    return {**kept, "TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "1"}


def gate_rows(python: str, gate: Path, *arguments: str, cache: Path, seconds: float) -> list[dict]:
    """What a compile gate prints, a JSON object a line, run by ``python``."""
    run = subprocess.run(
        [python, str(gate), *arguments], env=environment(cache), capture_output=True, text=True, timeout=seconds,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def check(found: list[dict], wanted: int | list[str], faults: Callable[[dict], list[str]]) -> None:
    """Assert that these compiled, or at least so many, and that none has ``faults``."""
    if isinstance(wanted, int):
        assert len(found) >= wanted
    else:
        assert sorted(one["name"] for one in found) == sorted(wanted)
    broken = {one["name"]: (faults(one), one) for one in found if faults(one)}
    assert not broken, f"{len(broken)} of {len(found)}, such as {list(broken.items())[:3]}"


def processes() -> str:
    """How many processes a gate that asks may use."""
    return str(min(os.cpu_count() or 1, 4))


def triton(version: str) -> str:
    """A Python that has this Triton; made on first use."""
    root = Path(os.environ.get("TILESTREAM_TRITONS", Path.home() / ".cache" / "tilestream"))
    home = root / f"triton-{version}-py{sys.version_info.major}.{sys.version_info.minor}"
    python = home / "bin" / "python"
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f"{home.name}.lock"):  # tests run in several processes
        if not (home / "ready").exists():
            venv.create(home, with_pip=True, clear=True)
            run = subprocess.run([python, "-m", "pip", "install", "-q", f"triton=={version}"], check=False)
            if run.returncode:
                pytest.skip(f"no Triton {version} to be had here")
            (home / "ready").touch()
    return str(python)
