"""Compile on all cores, into Triton's cache, what a run will launch. Saves time; no figure depends on it.

With COMPILED=1 nothing is compiled ahead: the cache has the kernels already.
"""

from __future__ import annotations

import os
import subprocess
import time

from benchmarks.core.paths import command


def compile_ahead(subject: str, *given: str, limit: float, section: str = "_compile") -> float:
    """Run a section of a subject in a process a core, for ``limit`` seconds at most; seconds it took.

    Each process is given ``given`` and, behind it, its index and the number of processes.
    """
    if os.environ.get("COMPILED") == "1":
        return 0.0
    begin, count = time.monotonic(), min(os.cpu_count() or 1, 16)
    running = [
        subprocess.Popen(command(subject, section, *given, str(index), str(count)), stdout=subprocess.DEVNULL)
        for index in range(count)
    ]
    try:
        for process in running:
            process.wait(max(begin + limit - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        print("compiling ahead was cut off", flush=True)
    finally:
        for process in running:
            process.kill()
            process.wait()
    took = time.monotonic() - begin
    print(f"{took:.1f} s to compile ahead for {' '.join(given)[:80] or subject}", flush=True)
    return took
