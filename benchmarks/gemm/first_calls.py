"""The first calls of a process, of which `host` starts some. Imports nothing that a call would have to import."""

from __future__ import annotations

import json
import time


def first_calls(arguments: list[str]) -> None:
    """Print seconds of the import, and of the first and the second call of each shape, as JSON."""
    text, device = arguments
    begin = time.perf_counter()
    import tilestream as ts

    found = {"import_tilestream_s": round(time.perf_counter() - begin, 3), "shapes": []}
    import torch

    from benchmarks.gemm.bench import operands
    from benchmarks.gemm.shapes import parse

    torch.set_grad_enabled(False)
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    small = torch.ones(64, 64, device=device, dtype=torch.bfloat16)
    torch.mm(small, small)  # what the device and cuBLAS do once
    synchronize()
    for shape in parse(text):
        a, w = operands(shape, device)
        b = w.t()
        synchronize()
        seconds = []
        for _ in range(2):
            begin = time.perf_counter()
            ts.mm(a, b)
            synchronize()
            seconds.append(round(time.perf_counter() - begin, 5))
        found["shapes"].append({"shape": str(shape), "first_s": seconds[0], "second_s": seconds[1]})
    print(json.dumps(found))
