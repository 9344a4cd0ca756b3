"""The plugins of vLLM and SGLang: what holds without the engines, and the cases with them where they are installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint, PackageNotFoundError, version
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
GROUPS = {"vllm.general_plugins": "vllm", "sglang.srt.plugins": "sglang"}


@pytest.mark.parametrize("group", GROUPS)
def test_entry_points_name_functions_and_import_nothing_of_the_engine(group):
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][group]
    assert list(declared) == ["tilestream"]
    loaded = f"from importlib.metadata import EntryPoint as E; f = E('x', {declared['tilestream']!r}, 'g').load(); "
    check = f"import sys; assert callable(f) and {GROUPS[group]!r} not in sys.modules"
    subprocess.run([sys.executable, "-c", loaded + check], check=True)
    assert EntryPoint("x", declared["tilestream"], group).attr == "register"


@pytest.mark.parametrize(("engine", "cases"), [("vllm", 24), ("sglang", 29)])
def test_the_cases_with_the_engine(engine, cases):
    try:
        version(engine)  # not what imports it: another test of the process may have had a stand-in
    except PackageNotFoundError:
        pytest.skip(f"needs {engine}: tests/integrations/README.md")
    file = str(Path(__file__).with_name(f"{engine}_cases.py"))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=850, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-1000:]
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) >= cases
