"""The CPU backend with everything arrived, beside torch.mm with the same number of threads.

Floor: 2 M N K operations at the cores' peak; the bytes are far from binding. torch.mm is one BLAS call on all threads;
ours is a BLAS call a tile on each worker's single thread. Ours can lose by packing once a tile instead of once a call,
by the last wave, and by starting the workers. Predicted: 0.95 to 1.0 at 2048^3, less as calls get shorter; the plan's
own choice should never lose more than the cost of the op's own call.
"""

from __future__ import annotations

from typing import Any

import torch

import tilestream as ts
from benchmarks.core.session import Session
from benchmarks.core.timing import cpu_peak, interleave, medians, rates, refuse_impossible
from tilestream_tools.sweep.check import errors

SHAPES = (
    (2048, 2048, 2048), (1024, 1024, 1024), (512, 512, 512), (4096, 1024, 2048), (2000, 1536, 1111),
    (16384, 256, 4096), (300, 300, 8192),
)  # fmt: skip


def measure(m: int, n: int, k: int, rounds: int = 21) -> dict[str, Any]:
    """One row: torch.mm, each schedule on workers, and the plan's own choice."""
    torch.manual_seed(0)
    a, b = torch.randn(m, k), torch.randn(k, n)
    out = torch.empty(m, n)
    threads = torch.get_num_threads()
    peer = torch.mm(a, b)
    reference = a.double() @ b.double()
    functions = {"torch.mm": lambda: torch.mm(a, b, out=out), "auto": lambda: ts.matmul(a, b, out=out)}
    plans = {"auto": ts.plan(m, n, k).label}
    worst: dict[str, float] = {}
    for kind in ("static", "dynamic", "stream_k"):
        plan = ts.plan(m, n, k, schedule=kind, workers=threads)
        plans[kind] = plan.label
        functions[kind] = lambda plan=plan: plan.run(a, b, out=out)
    for name, function in functions.items():
        out.fill_(float("nan"))
        function()
        if name != "torch.mm":
            worst = max(worst, errors(out, peer, reference), key=lambda e: e.get("max", -1.0))
    times = medians(interleave(functions, rounds=rounds))
    refuse_impossible(f"{m}x{n}x{k}", rates(2 * m * n * k, times), cpu_peak())
    return {
        "shape": [m, n, k],
        "ms": times,
        "ratio": {name: times["torch.mm"] / ms for name, ms in times.items() if name != "torch.mm"},
        "gflops": {name: 2 * m * n * k / ms * 1e-6 for name, ms in times.items()},
        "plans": plans,
        "errors": worst,
    }


def matmul(session: Session) -> None:
    session.rows(session.record("matmul", cpu=True), SHAPES, lambda shape: measure(*shape))
