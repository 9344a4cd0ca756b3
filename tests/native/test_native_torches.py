"""The one library under the oldest torch that the package takes and the newest that there is.

Each gets an environment of its own, which is kept: several GB of packages.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from tilestream_tools import native_build

ROOT = Path(__file__).resolve().parents[2]
KEPT = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tilestream" / "torches"
OLDEST = ".".join(map(str, native_build.OLDEST))
TOOLS = ("pytest", "pytest-timeout", "hypothesis", "filelock", "numpy")


def environment(name: str, torch: str) -> Path:
    """The Python of an environment with that torch; skips the test where it cannot be installed."""
    folder = KEPT / f"{name}-{sys.implementation.cache_tag}"
    python = folder / "bin" / "python"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        options = ["--disable-pip-version-check", "--no-input", "-q", "--upgrade"]
        done = subprocess.run(
            [python, "-m", "pip", "install", *options, torch, *TOOLS], capture_output=True, text=True, check=False
        )
        there = subprocess.run([python, "-c", "import torch, hypothesis"], capture_output=True, check=False)
    if done.returncode and there.returncode:
        pytest.skip(f"{torch} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    return python


def test_the_oldest_torch_is_the_one_that_the_package_asks_for():
    assert f'dependencies = ["torch>={OLDEST}"]' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "torch"), [("oldest", f"torch=={OLDEST}.0"), ("newest", "torch")])
def test_the_library_runs_under_other_torches(libraries, name, torch):
    python = environment(name, torch)
    version = subprocess.run(
        [python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=True
    ).stdout
    assert version.startswith(OLDEST) or name == "newest", version
    tests = [Path(__file__).with_name(f"test_native_{subject}.py") for subject in ("calls", "errors", "ops")]
    given = os.pathsep.join(map(str, libraries))
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "TRITON_"))}
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests],
        env={**inherited, "PYTHONPATH": str(ROOT / "src"), "TILESTREAM_TEST_LIBRARIES": given},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) > 250, done.stdout[-2000:]
    assert " skipped" not in done.stdout.splitlines()[-1]
