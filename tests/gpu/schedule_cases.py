"""What `test_gpu_schedules` launches: data, so that it can be compiled beforehand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import tilestream as ts
from tilestream.plan import DeviceProperties
from tilestream.plan.plan import Plan

#: 81 tiles of 128 x 128, and 324 of 64 x 64; K long enough that stream-K has something to split.
M, N, K = 1100, 1136, 1024
BACKENDS = ("hopper", "portable")
#: A schedule, and queues of dynamic; Hopper has by itself a queue a worker.
KINDS = (
    ("static", None), ("dynamic", None), ("dynamic", 1), ("dynamic", 2), ("dynamic", 8), ("stream_k", None),
)  # fmt: skip
WORKERS = range(1, 133)
HELD = (1, 2, 4, 8, 16, 32, 64, 100, 120, 130, 131)
TILES = {"hopper": (128, 128), "portable": (64, 64)}


def plan_of(
    device: DeviceProperties | str, backend: str, kind: str, queues: int | None = None, workers: int | None = None
) -> Plan:
    variant = "cooperative" if backend == "hopper" else None
    return ts.plan(
        M, N, K, dtype="bfloat16", device=device, layout="nt", schedule=kind, queues=queues, workers=workers,
        tile=TILES[backend], backend=backend, variant=variant,
    )  # fmt: skip


def plans(device: DeviceProperties) -> Iterator[Plan]:
    """One of each kernel, but for traces."""
    for backend, (kind, queues) in itertools.product(BACKENDS, KINDS):
        for workers in (None, 50):  # with and without a remainder
            yield plan_of(device, backend, kind, queues, workers)
