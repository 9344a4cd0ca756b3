"""Points that were never measured: a device of 132 SMs whose queue keeps its share."""

from __future__ import annotations

import pytest

from tilestream_tools.sweep.record import Point, Sweep

SHAPES = {"8192x8192x8192": "", "4096x8192x28672": "Llama-3 70B down"}
RATES = {"static": 0.6, "dynamic": 0.99, "torch": 0.9}


def point(shape="8192x8192x8192", taken=0, implementation="dynamic", queues=1, **more) -> Point:
    m, n, k = map(int, shape.split("x"))
    share = RATES.get(implementation, 0.9) if taken else 1.0
    rate = 750.0 * share * (132 - taken) / 132
    seconds = 2 * m * n * k / rate / 1e12
    given = {
        "shape": shape, "name": SHAPES.get(shape, ""), "dtype": "bfloat16", "by": "neighbour", "taken": taken,
        "left": 132 - taken, "units": 132, "implementation": implementation, "queues": queues, "seconds": seconds,
        "low": 0.99 * seconds, "high": 1.02 * seconds, "rounds": 9, "tflops": rate,
        "plan": f"hopper cooperative {implementation}", "error": 1.5e-3,
    }  # fmt: skip
    return Point(**{**given, **more})


@pytest.fixture
def make_point():
    return point


@pytest.fixture
def swept() -> Sweep:
    points = [
        point(shape, taken, implementation)
        for shape in SHAPES for taken in (0, 8, 64) for implementation in RATES
    ]  # fmt: skip
    about = {"device": "NVIDIA H100 80GB HBM3", "units": 132, "torch": "2.11.0", "triton": "3.6.0", "commit": "abc"}
    return Sweep(about, points, [{"way": "quack", "why": "a reason"}])
