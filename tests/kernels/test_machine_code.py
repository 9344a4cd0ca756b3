"""The machine-code gate (`machine_code.py`): kernels compile to what the record `machine_code.json` has.

The quick tier takes a few kernels of each backend through the Triton that is installed, the slow one takes all of them
through Triton 3.6, 3.7 and 3.9.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton as installed

from tritons import TRITONS, environment, processes, triton

GATE = Path(__file__).parent / "machine_code.py"
RECORD = json.loads(GATE.with_suffix(".json").read_text(encoding="utf-8"))
INSTALLED = installed.__version__.partition("+")[0]
SAMPLE = (
    "sm_90a hopper gemm single 64x64 bfloat16 arriving nt", "sm_90a hopper attention 128-128 causal unordered 2x128",
    "sm_90a portable gemm bfloat16 64x64 arriving nt", "gfx942 portable attention bfloat16 128 128x64 worst",
    "gfx950 cdna gemm 32x64 direct bfloat16 arriving nt", "gfx942 cdna attention 128-128 256x32 staged causal",
)  # fmt: skip


def check(python: str, *arguments: str, cache: Path, seconds: float) -> None:
    """Assert that every hash is as recorded."""
    run = subprocess.run(
        [python, str(GATE), "check", f"--processes={min(int(processes()), 2)}", *arguments], env=environment(cache),
        capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip
    assert run.returncode == 0, (
        f"Machine code is not as recorded:\n{run.stdout}{run.stderr[-2000:]}\n"
        "A refactoring must not change it. Where a change is meant, run `python tests/kernels/machine_code.py record "
        "--triton all`, and give the reason in the commit's body, with a GPU run beside the old kernel."
    )


def test_the_record_has_the_same_kernels_of_every_triton():
    assert set(RECORD) == set(TRITONS)
    names = [{arch: set(hashes) for arch, hashes in RECORD[version].items()} for version in TRITONS]
    assert names[0] == names[1] == names[2]
    assert {arch: len(of) for arch, of in names[0].items()} == {"sm_90a": 72, "gfx942": 22, "gfx950": 22}


@pytest.mark.skipif(INSTALLED not in RECORD, reason=f"the record has no Triton {INSTALLED}")
def test_a_sample_is_as_recorded(tmp_path):
    check(sys.executable, *(f"--match={name}" for name in SAMPLE), cache=tmp_path, seconds=850)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("version", TRITONS)
def test_all_of_it_is_as_recorded(version, tmp_path):
    check(triton(version), cache=tmp_path, seconds=1180)


# What a hash depends on ----------------------------------------------------------------------------------------------

KERNEL = """
import triton
import triton.language as tl

@triton.jit
def scaled(x, factor):
    return x * factor + CONSTANT

@triton.jit
def kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.sort(scaled(tl.load(x + at, at < n), 3.0)), at < n)
"""
RENAMED = (
    ("import triton\n", "# A line.\nimport triton\n", 1), ("scaled", "scaled_by_a_factor", -1),
    ("def kernel(x, y, n,", "def another_kernel_of_a_longer_name(first, second, count,", 1),
    ("y + at", "second + at", 1), ("load(x + at, at < n)", "load(first + at, at < count)", 1),
    ("at < n)", "at < count)", 1),
)  # fmt: skip
HASHES = """
import importlib, json, sys
import machine_code
from tilestream_tools.isa.build import Pointer, build
found = {}
for text in sys.argv[1:]:
    module, name = text.split(":")
    kernel = getattr(importlib.import_module(module), name)
    given = (Pointer("float32"), Pointer("float32"), 1000, 256)
    found[module] = [machine_code.digest(build(kernel, given, {}, arch)[0]) for arch in ("sm_90a", "gfx942", "gfx950")]
print(json.dumps(found))
"""


def test_a_hash_is_of_the_code_and_not_of_names_and_lines(tmp_path):
    text = KERNEL.replace("CONSTANT", "1.0")
    renamed = text
    for old, new, count in RENAMED:
        assert old in renamed, old
        renamed = renamed.replace(old, new, count)
    texts = {"plain": text, "moved_and_renamed": renamed, "other": KERNEL.replace("CONSTANT", "1.5")}
    for name, each in texts.items():
        (tmp_path / f"{name}.py").write_text(each, encoding="utf-8")
    names = ("plain:kernel", "moved_and_renamed:another_kernel_of_a_longer_name", "other:kernel")
    run = subprocess.run(
        [sys.executable, "-c", HASHES, *names], cwd=GATE.parent, capture_output=True, text=True, check=True,
        env=environment(tmp_path / "cache") | {"PYTHONPATH": f"{tmp_path}:{GATE.parent}"},
    )  # fmt: skip
    found = json.loads(run.stdout)
    assert found["plain"] == found["moved_and_renamed"]
    assert all(one != other for one, other in zip(found["plain"], found["other"], strict=True))


def test_a_check_names_what_moved_appeared_and_vanished():
    code = (
        "import machine_code as m\n"
        "before = {'sm_90a': {'same': '0', 'changed': '1', 'old': '2', 'broken': '3'}}\n"
        "after = {'sm_90a': {'same': '0', 'changed': '4', 'broken': 'error: x'}, 'gfx942': {'new': '5'}}\n"
        "print(*m.compared(before, after), sep='\\n')"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=GATE.parent, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [
        "gfx942 new: appeared", "sm_90a broken: error: x", "sm_90a changed: moved", "sm_90a old: vanished",
    ]  # fmt: skip
