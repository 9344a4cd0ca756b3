"""Launches of the Hopper kernels, small, for compute-sanitizer: of the GEMM each variant and store, stream_k, a batch,
a gate, copy items; of programs of a tile each, shares of it, and clusters; of attention each tile, packed sequences,
pages, heads side by side, shares, keys that arrive, a trace.

``compute-sanitizer --tool memcheck|racecheck|synccheck|initcheck python tests/gpu/sanitize.py [SHARE/SHARES]``, or
``programs`` for those of a tile alone: `test_gpu_sanitize` runs it and reads the summary. Answers are checked on the
CPU, so that nothing else is sanitized that takes long. Without the tool it fills Triton's cache.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import gpu_cases
from gpu_cases import BF16, E4M3, FULL
from hopper_cases import FEW, hopper_case, ways

from attention_maths import Case, call_of
from tilestream.plan import experimental


def cases() -> Iterator[gpu_cases.Case]:
    """Each variant, two workers, several items each, of which the last is cut off in all directions."""
    for row in FEW:
        bm, bn = ways(row)[0]
        case = (3 * bm - 5, bn + 8, 3 * row.block_k(2) + 9, row.variant, (bm, bn))
        for kind, out in itertools.product(("static", "dynamic", "stream_k"), ("rows", "odd")):
            yield hopper_case(*case, schedule=kind, out=out, workers=2 if kind != "stream_k" else 5, stages=3)
        yield hopper_case(*case, out="columns", bias=True, activation="relu", layout="tt", workers=2)
        yield hopper_case(*case, batch=3, schedule="stream_k", workers=7, residual="rows", beta=2.0)
        yield hopper_case(*case, dtype=E4M3, layout="nt", scales="row", workers=2)
    for how in ({}, {"out": "odd"}, {"layout": "nn", "stages": 2}):
        yield hopper_case(507, 264, 457, "paired", (256, 256), schedule="static", workers=2, **how)
    yield hopper_case(200, 136, 200, FEW[0].variant, ways(FEW[0])[0], layout="nt", activation="gelu", **FULL)


#: Of attention, each with what it is asked for beside: two workers, several items each, of which the last is cut off.
ATTENTION: tuple[tuple[Case, dict[str, Any]], ...] = tuple(
    (Case(*lengths, heads, dims, features, how, page, dtype=more.pop("dtype", BF16)), more)
    for lengths, heads, dims, features, how, page, more in (
        (((190,), (300, 300)), (2, 2), (64, 64), "full", "dense", 0, {}),  # three consumers, in turns
        (((200,), (300,)), (2, 1), (64, 64), "all", "dense", 0, {}),
        (((200,), (300,)), (2, 1), (128, 128), "causal", "dense", 0, {"schedule": "static"}),
        (((140,), (200,)), (2, 1), (128, 128), "window", "dense", 0, {}),
        (((140,), (200,)), (2, 2), (256, 256), "causal", "dense", 0, {}),
        (((130, 0, 7), (150, 30, 90)), (2, 1), (64, 64), "causal", "packed", 0, {}),
        (((5, 130), (90, 150)), (2, 1), (128, 128), "sinks", "packed paged", 8, {}),
        (((3,), (150, 77)), (8, 2), (64, 64), "causal", "paged", 16, {}),
        (((3,), (500,)), (4, 1), (128, 128), "sinks", "dense", 0, {"splits": 3}),
        (((130,), (200,)), (2, 1), (128, 128), "causal", "dense", 0, {"chunks": 4}),
        (((130,), (200,)), (2, 1), (128, 128), "causal", "dense", 0, {"trace": True}),
        (((140,), (300,)), (2, 1), (128, 128), "causal", "dense", 0, {"dtype": E4M3}),
        (((5, 130), (90, 150)), (2, 1), (64, 64), "all", "packed paged", 16, {"dtype": E4M3}),
        (((3,), (500,)), (4, 1), (128, 128), "sinks", "dense", 0, {"splits": 3, "dtype": E4M3}),
    )
)


def attend(case: Case, more: dict[str, Any]) -> None:
    """A call of attention, checked on the CPU; its plan must be the Hopper kernel's."""
    import torch

    import tilestream as ts
    from tilestream.launch.cache import launch_cache

    for kernel in experimental.KERNELS.values():
        os.environ[kernel.environment] = "1"  # what nobody has run is run here
    here = call_of(case)
    there = {name: _whole(t) for name, t in here.tensors.items()}
    options = {name: _whole(x) if isinstance(x, torch.Tensor) else x for name, x in here.options.items()}
    how = {name: value for name, value in more.items() if name not in ("chunks", "trace")}
    if chunks := more.get("chunks"):
        rows = there["k"].shape[0] * there["k"].shape[1]
        arrival = ts.Arrival.uniform(-(-rows // chunks), chunks, device="cuda")
        how |= {"arrival": arrival, "deadline": 200.0}
        for chunk in range(chunks):
            arrival.signal(chunk)
    result = _whole(torch.full((*here.tensors["q"].shape[:-1], case.dims[1]), float("nan"), dtype=BF16))
    launch_cache.clear()
    with ts.trace.record() if more.get("trace") else contextlib.nullcontext():
        _, lse = ts.attention(**there, **options, **how, out=result, return_lse=True, workers=2)
    ts.check()
    (launch,) = launch_cache.of("attention")
    assert launch.plan.backend == "hopper", launch.plan.explain()
    here.check(result.cpu(), lse.cpu())
    print(launch.plan.label, launch.plan.variant, flush=True)


Copies = Literal["engine", "kernel"]
#: Who copies what a GEMM waits for.
ARRIVALS: tuple[Copies, ...] = ("engine", "kernel")


def arrive(copies: Copies) -> None:
    """A GEMM whose rows arrive in three chunks, checked on the CPU. What the engine copies is there before."""
    import torch

    import tilestream as ts
    from error_rule import Maths, check

    m, n, k = 300, 136, 200
    a, b = (torch.randn(shape).to(BF16) for shape in ((m, k), (k, n)))
    result = _whole(torch.full((m, n), float("nan"), dtype=BF16))
    with ts.stream_in(a.pin_memory(), rows_per_chunk=128, pivot=1, copies=copies) as x:
        if copies == "engine":
            x.wait(100.0)
        plan = ts.plan(m, n, k, dtype=BF16, device="cuda", schedule="dynamic", workers=2, arrival=x.arrival)
        assert (plan.backend, plan.copies) == ("hopper", "rows" if copies == "kernel" else "none"), plan.explain()
        plan.run(x.tensor, _whole(b), out=result, arrival=x.arrival, deadline=200.0)
        check(result.cpu(), Maths(a, b))
        assert torch.equal(x.tensor.cpu(), a)
    ts.check()
    print(f"{m}x{n}x{k} copied by {copies}", flush=True)


#: Programs of a tile: parts of a tile's K, and the tile. 2, 4 and 8 are clusters, 3 go through global memory.
PROGRAMS = ((1, (64, 64)), (3, (64, 64)), (2, (64, 128)), (4, (16, 32)), (8, (64, 64)), (2, (128, 128)))


def multiply(parts: int, tile: tuple[int, int]) -> None:
    """A product by programs of a tile, or a part of one, checked on the CPU."""
    import torch

    import tilestream as ts
    from error_rule import Maths, check
    from tilestream.plan.plan import of_candidate
    from tilestream.plan.policy import one_tile

    m, n, k = tile[0] + 9, tile[1] + 8, 2800 if parts > 1 else 200
    a, b = torch.randn(m, k).to(BF16), torch.randn(n, k).to(BF16).t()
    asked = ts.plan(m, n, k, dtype=BF16, layout="nt", device="cuda")
    found = one_tile.candidates(asked.problem, asked.device, asked.device.workers)
    best = next(one for one in found if one.tile == tile and one.workers == parts * one.tiles)
    plan = of_candidate(asked.problem, asked.device, "portable", best, "the sanitizer's")
    result = _whole(torch.full((m, n), float("nan"), dtype=BF16))
    plan.run(_whole(a), _whole(b), out=result)
    check(result.cpu(), Maths(a, b))
    print(plan.label, flush=True)


def main() -> None:
    import torch

    from error_rule import check
    from tilestream.runtime.properties import cuda_properties

    torch.manual_seed(0)
    if sys.argv[1:] == ["programs"]:
        for parts, tile in PROGRAMS:
            multiply(parts, tile)
        print("all right")
        return
    share, shares = map(int, (sys.argv[1] if len(sys.argv) > 1 else "0/1").split("/"))
    for case in itertools.islice(cases(), share, None, shares):
        here = case.operands("cpu")
        # Copied in one piece each, with the gaps: a kernel of torch's that fills them would be sanitized, too.
        there = {name: None if t is None else _whole(t) for name, t in here.items()}
        plan, result = case.plan(cuda_properties())[0], _whole(case.output("cpu")[0])
        plan.run(**there, out=result, alpha=case.alpha, beta=case.beta, activation=case.activation)
        check(result.cpu(), case.maths(here))
        print(case.name, flush=True)
    for copies in ARRIVALS[share::shares]:
        arrive(copies)
    for parts, tile in PROGRAMS[share::shares]:
        multiply(parts, tile)
    for one, more in ATTENTION[share::shares]:
        attend(one, more)
    print("all right")


def _whole(tensor):
    """``tensor`` on the GPU, in a copy of all of its storage."""
    import torch

    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return storage.cuda().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


if __name__ == "__main__":
    main()
