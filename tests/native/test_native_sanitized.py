"""The tests of native calls once more, in a process whose extension is compiled with a sanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilestream_tools import native_build

#: The libraries that are loaded before Python, and how the sanitizer is kept to what concerns the extension. Python and
#: torch are not compiled with it: Python keeps memory until its end, and torch's own threads look unordered to it.
SANITIZERS = {
    # libstdc++: the sanitizer looks for its exceptions when Python starts, which has no C++ in it.
    "address": (("libasan.so", "libstdc++.so"), {"ASAN_OPTIONS": "detect_leaks=0:log_path={reports}"}),
    "thread": (
        ("libtsan.so",),
        {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:log_path={reports}", "OMP_NUM_THREADS": "1"},
    ),
}
#: Freed memory is held back to be watched; kernels and ends of processes have processes of their own.
LEFT_OUT = (
    "not memory_does_not_grow and not a_real_kernel and not an_end_of_a_process and not a_process_ends and not forked"
)
FILES = "test_native_calls.py", "test_native_producer.py"


def path_of(library: str) -> Path:
    """Where the compiler has it; a relative path if it has none."""
    asked = [*native_build.compiler(), f"-print-file-name={library}"]
    return Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_a_sanitizer_finds_nothing_in_native_calls(libraries, sanitizer, tmp_path):
    names, options = SANITIZERS[sanitizer]
    found = [path_of(name) for name in names]
    if missing := [name for name, path in zip(names, found, strict=True) if not path.is_absolute()]:
        pytest.skip(f"the compiler has no {', '.join(missing)}")
    options = {name: value.format(reports=tmp_path / "report") for name, value in options.items()}
    preloaded = {**os.environ, **options, "LD_PRELOAD": " ".join(str(path.resolve()) for path in found)}
    started = subprocess.run([sys.executable, "-c", ""], env=preloaded, capture_output=True, text=True, check=False)
    if started.returncode:
        pytest.skip(f"Python does not start with {', '.join(names)}: {started.stderr[-300:]}")
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow",
            "-k", LEFT_OUT, *(Path(__file__).with_name(name) for name in FILES),
        ],
        env=preloaded | {"TILESTREAM_TEST_SANITIZER": sanitizer},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )  # fmt: skip
    reports = [path.read_text() for path in tmp_path.glob("report*")]
    assert not reports, "\n".join(reports)[:6000]
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout
