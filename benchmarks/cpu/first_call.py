"""Where the seconds of a process's first call go before the GPU has anything to do: imports and look-ups, on a CPU.

    PYTHONPATH=src:benchmarks python benchmarks/first_call.py [FOLDER]

A GPU's first call is in ``gpu_gemm_host*.json``, as a whole: what is Python of it takes place without a GPU, too. Here
it is taken apart, in fresh processes, in the order in which a call comes to it, torch imported before: the package;
its ops (and Triton with them); the Hopper kernels; the hash of Triton itself, by which its cache is asked, of every
file of it; the kernel, found in a cache that was filled by a process before; a call of a registered op, on the CPU.
Medians of ``PROCESSES``. Writes ``cpu_first_call.json``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.core.paths import command

PROCESSES = 7
#: What is taken apart, by whose it is.
STEPS = {
    "import tilestream": "ours",
    "its ops": "Triton's import and ours",
    "the Hopper kernels": "Gluon's import and ours",
    "hash of Triton": "Triton's",
    "the kernel, from a filled cache": "Triton's and ours",
    "first call of an op, on the CPU": "ours",
}


def process() -> dict[str, float]:
    """The steps, in this process, which has imported torch and no more: seconds of each."""
    import torch

    seconds: dict[str, float] = {}
    steps = iter(STEPS)
    begin = time.perf_counter()

    def done() -> None:
        nonlocal begin
        seconds[next(steps)] = time.perf_counter() - begin
        begin = time.perf_counter()

    import tilestream as ts

    done()
    _ = ts.mm
    done()
    import tilestream.kernels.hopper.launch

    done()
    from triton.runtime.cache import triton_key

    triton_key()
    done()
    from tilestream.isa.build import build
    from tilestream.isa.kernels import Question, source

    kernel, filled, options, *_ = source("hopper-gemm", Question("sm_90a", 4096, 4096, 4096))
    begin = time.perf_counter()
    build(kernel, filled, options, "sm_90a")
    done()
    a = torch.ones(64, 64)
    begin = time.perf_counter()
    ts.mm(a, a)
    done()
    return seconds


def main() -> None:
    """Fresh processes; the first fills the cache and is not counted."""
    if "--process" in sys.argv[1:]:
        print(json.dumps(process()))
        return
    import triton

    from benchmarks.core import harness

    seconds: dict[str, list[float]] = {step: [] for step in STEPS}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TRITON_CACHE_DIR": folder}
        for _ in range(PROCESSES + 1):
            run = subprocess.run(
                command("cpu", "first_call", "--process"), env=environment, capture_output=True, text=True, check=True
            )
            for step, took in json.loads(run.stdout.splitlines()[-1]).items():
                seconds[step].append(took)
    rows = [
        {"step": step, "whose": whose, "seconds": round(statistics.median(seconds[step][1:]), 3)}
        for step, whose in STEPS.items()
    ]
    if len(sys.argv) > 1:
        harness.RESULTS = Path(sys.argv[1])
    print(harness.record("cpu_first_call", rows, triton=triton.__version__, processes=PROCESSES))
    print(*rows, sep="\n")
