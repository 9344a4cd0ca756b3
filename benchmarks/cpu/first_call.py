"""A process's first call, taken apart: imports and look-ups before the GPU has anything to do, on a CPU.

``gemm_host`` has a GPU's first call as a whole; its Python part takes place without a GPU, too. Here it is taken apart
in fresh processes that have imported torch, in the order in which a call comes to it: the package; its ops (and Triton
with them); the Hopper kernels; the hash over all files of Triton, which is part of its cache's key; the kernel, found
in a cache that another process has filled; a call of a registered op, on the CPU. Medians of ``PROCESSES``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time

from benchmarks.core.paths import command
from benchmarks.core.session import Session

PROCESSES = 7
#: The steps, and whose code they are.
STEPS = {
    "import tilestream": "ours",
    "its ops": "Triton's import and ours",
    "the Hopper kernels": "Gluon's import and ours",
    "hash of Triton": "Triton's",
    "the kernel, from a filled cache": "Triton's and ours",
    "first call of an op, on the CPU": "ours",
}


def process(_: list[str]) -> None:
    """Print the seconds of each step in this process, which has imported torch and no more, as JSON."""
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
    import tilestream.launch.hopper.launch

    done()
    from triton.runtime.cache import triton_key

    triton_key()
    done()
    from tilestream_tools.isa.build import build
    from tilestream_tools.isa.kernels import CompileRequest, source

    kernel, filled, options, *_ = source("hopper-gemm", CompileRequest("sm_90a", 4096, 4096, 4096))
    begin = time.perf_counter()
    build(kernel, filled, options, "sm_90a")
    done()
    a = torch.ones(64, 64)
    begin = time.perf_counter()
    ts.mm(a, a)
    done()
    print(json.dumps(seconds))


def first_call(session: Session) -> None:
    """Fresh processes; the first fills the cache and is not counted."""
    seconds: dict[str, list[float]] = {step: [] for step in STEPS}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TRITON_CACHE_DIR": folder}
        for _ in range(PROCESSES + 1):
            run = subprocess.run(
                command("cpu", "_process"), env=environment, capture_output=True, text=True, check=True
            )
            for step, took in json.loads(run.stdout.splitlines()[-1]).items():
                seconds[step].append(took)
    record = session.record("first_call", cpu=True, processes=PROCESSES)
    for step, whose in STEPS.items():
        record.add({"step": step, "whose": whose, "seconds": round(statistics.median(seconds[step][1:]), 3)})
