"""Tritons other than the one that is installed, each in a virtual environment of its own.

They are kept under TILESTREAM_TRITONS (default: the user's cache).
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from filelock import FileLock


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
