"""Small launches for compute-sanitizer: of Hopper's GEMM each variant and store, stream_k, a batch, a gate, copy items,
operands that are copied first; of the portable one each way to read operands; of programs of a tile each, shares of
it, and clusters; of grouped products offsets, sources, K; of attention each tile, packed sequences, pages, heads side
by side, shares, keys that arrive, a trace.

``compute-sanitizer --tool memcheck|racecheck|synccheck|initcheck python tests/gpu/sanitize.py [SHARE/SHARES]``, or
``programs`` for those of a tile alone: `test_gpu_sanitize` runs it and reads the summary. Answers are checked on the
CPU, so that nothing else is sanitized that takes long. Without the tool it fills Triton's cache.
`tests/kernels/hopper/test_sanitizer_cases.py` says of what there must be a case.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import gpu_cases
from gpu_cases import BF16, E4M3, F32, FULL
from grouped_jobs import GROUPED
from hopper_cases import FEW, hopper_case, ways

from attention_maths import Case, call_of
from tilestream.core.device import DeviceProperties
from tilestream.plan import experimental
from tilestream.plan.plan import Plan, of_candidate
from tilestream.plan.policy import one_tile
from tilestream.plan.policy.hopper import PAIRED, TRIPLE
from tilestream.plan.problem import Problem


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


def products() -> Iterator[gpu_cases.Case]:
    """Those, tiles that plans take where they are forced, operands that are copied first, and portable kernels."""
    yield from cases()
    yield hopper_case(1019, 200, 457, "paired", ways(PAIRED[1])[0], schedule="static", workers=2)
    for row in TRIPLE:
        bm, bn = ways(row)[0]
        for kind, how in (("static", {}), ("dynamic", {"out": "odd"}), ("dynamic", {"layout": "tt", "bias": True})):
            yield hopper_case(3 * bm - 5, bn + 8, 201, "triple", (bm, bn), schedule=kind, workers=2, **how)
    yield from realigned_cases()
    yield from portable_cases()


def realigned_cases() -> Iterator[gpu_cases.Case]:
    """Operands that are copied first, in words of 1, 2, 4 and 8 bytes: along their rows, across them, a batch."""
    how: dict[str, Any] = {"variant": "cooperative", "tile": (128, 128), "workers": 2, "pad": 0}
    for k in (201, 202, 204):
        yield hopper_case(300, 136, k, layout="nt", **how)
    yield hopper_case(299, 137, 200, layout="tn", schedule="stream_k", **(how | {"workers": 5}))
    yield hopper_case(300, 136, 200, layout="tn", dtype=E4M3, scales="row", **how)
    yield hopper_case(130, 136, 203, layout="nn", batch=2, **how)


def portable_cases() -> Iterator[gpu_cases.Case]:
    """Each row of the plan's table of tiles: whole copies, vectors of 8, 4 and 2 elements, single elements; dtypes."""

    def case(k: int, tile: tuple[int, int] = (64, 64), kind: str = "dynamic", **how: Any) -> gpu_cases.Case:
        usual = {"backend": "portable", "layout": "nt", "workers": 2 if kind != "stream_k" else 5}
        return gpu_cases.Case(2 * tile[0] + 5, tile[1] + 8, k, tile=tile, schedule=kind, **(usual | how))

    for k, kind in ((208, "static"), (200, "dynamic"), (204, "stream_k"), (202, "dynamic"), (201, "stream_k")):
        yield case(k, kind=kind)
    for k in (204, 202):
        yield case(k, (128, 128), activation="gelu", **FULL)
    yield case(208, out="odd", batch=2, kind="stream_k")
    for k, fast in ((272, True), (272, False), (201, True)):
        yield case(k, dtype=E4M3, scales="row", fast_accum=fast)
    yield case(208, dtype=F32, tf32=True)
    yield case(208, dtype=F32)
    yield case(201, (32, 64), dtype=F32)


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
        (((140,), (200,)), (2, 1), (64, 64), "all", "dense", 0, {"backend": "portable"}),
        (((5, 130), (90, 150)), (2, 1), (128, 128), "causal", "packed paged", 16, {"backend": "portable"}),
    )
)


def attend(case: Case, more: dict[str, Any]) -> str:
    """A call of attention, checked on the CPU; its plan must be the Hopper kernel's, or that of a ``backend``."""
    import torch

    import tilestream as ts
    from tilestream.launch.cache import launch_cache
    from tilestream.ops import attention_gpu
    from tilestream.plan.attention_planner import plan_attention

    backend = more.get("backend", "hopper")
    attention_gpu.plan_attention = functools.partial(plan_attention, backend=backend)
    for kernel in experimental.KERNELS.values():
        os.environ[kernel.environment] = "1"  # what nobody has run is run here
    here = call_of(case)
    there = {name: _whole(t) for name, t in here.tensors.items()}
    options = {name: _whole(x) if isinstance(x, torch.Tensor) else x for name, x in here.options.items()}
    how = {name: value for name, value in more.items() if name not in ("backend", "chunks", "trace")}
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
    assert launch.plan.backend == backend, launch.plan.explain()
    here.check(result.cpu(), lse.cpu())
    return f"{launch.plan.label} {launch.plan.variant}"


Copies = Literal["engine", "kernel"]
#: Who copies what a GEMM waits for, and whose GEMM.
ARRIVALS: tuple[tuple[Copies, str], ...] = (
    ("engine", "hopper"), ("kernel", "hopper"), ("engine", "portable"), ("kernel", "portable"),
)  # fmt: skip


def arrive(copies: Copies, backend: str) -> str:
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
        how: dict[str, Any] = {"schedule": "dynamic", "workers": 2, "arrival": x.arrival, "backend": backend}
        plan = ts.plan(m, n, k, dtype=BF16, device="cuda", **how)
        assert (plan.backend, plan.copies) == (backend, "rows" if copies == "kernel" else "none"), plan.explain()
        plan.run(x.tensor, _whole(b), out=result, arrival=x.arrival, deadline=200.0)
        check(result.cpu(), Maths(a, b))
        assert torch.equal(x.tensor.cpu(), a)
    ts.check()
    return f"{m}x{n}x{k} copied by {copies}, {backend}"


#: Programs of a tile: parts of a tile's K, and the tile. 2, 4 and 8 are clusters, 3 go through global memory.
PROGRAMS = ((1, (64, 64)), (3, (64, 64)), (2, (64, 128)), (4, (16, 32)), (8, (64, 64)), (2, (128, 128)))


def plan_of_programs(parts: int, tile: tuple[int, int], device: DeviceProperties) -> Plan:
    """The plan of a product by programs of a tile, or of a part of one."""
    m, n, k = tile[0] + 9, tile[1] + 8, 2800 if parts > 1 else 200
    problem = Problem(m, n, k, dtype="bfloat16", out_dtype="bfloat16", aligned=k % 16 == 0, vectors=(8, 8))
    found = one_tile.candidates(problem, device, device.workers)
    best = next(one for one in found if one.tile == tile and one.workers == parts * one.tiles)
    return of_candidate(problem, device, "portable", best, "the sanitizer's")


def multiply(parts: int, tile: tuple[int, int]) -> str:
    """A product by programs of a tile, or a part of one, checked on the CPU."""
    import torch

    from error_rule import Maths, check
    from tilestream.runtime.properties import cuda_properties

    plan = plan_of_programs(parts, tile, cuda_properties())
    m, n, k = plan.problem.m, plan.problem.n, plan.problem.k
    a, b = torch.randn(m, k).to(BF16), torch.randn(n, k).to(BF16).t()
    result = _whole(torch.full((m, n), float("nan"), dtype=BF16))
    plan.run(_whole(a), _whole(b), out=result)
    check(result.cpu(), Maths(a, b))
    return plan.label


def product(case: gpu_cases.Case) -> str:
    """A case of a GEMM, checked on the CPU."""
    from error_rule import check
    from tilestream.runtime.properties import cuda_properties

    here = case.operands("cpu")
    if case.tf32:  # numbers that lose nothing: on the CPU no product is tf32's
        here = {name: None if t is None else t.copy_(t.to(BF16)) for name, t in here.items()}
    # Copied in one piece each, with the gaps: a kernel of torch's that fills them would be sanitized, too.
    there = {name: None if t is None else _whole(t) for name, t in here.items()}
    plan, result = case.plan(cuda_properties())[0], _whole(case.output("cpu")[0])
    plan.run(**there, out=result, alpha=case.alpha, beta=case.beta, activation=case.activation)
    check(result.cpu(), case.maths(here))
    return case.name


def jobs() -> Iterator[Callable[[], str]]:
    """Everything; each returns what it was."""
    from tilestream.runtime.properties import cuda_properties

    yield from (functools.partial(product, case) for case in products())
    yield from (functools.partial(case, cuda_properties(), _whole) for case in GROUPED)
    for run, those in ((arrive, ARRIVALS), (multiply, PROGRAMS), (attend, ATTENTION)):
        yield from (functools.partial(run, *one) for one in those)


def main() -> None:
    import torch

    torch.manual_seed(0)
    torch.zeros(1).cuda()  # without a context the driver refuses calls, which memcheck reports
    given = sys.argv[1] if len(sys.argv) > 1 else "0/1"
    if given == "programs":
        todo = [functools.partial(multiply, *one) for one in PROGRAMS]
    else:
        share, shares = map(int, given.split("/"))
        todo = list(itertools.islice(jobs(), share, None, shares))
    for job in todo:
        begin = time.monotonic()
        print(f"{job()}: {time.monotonic() - begin:.1f} s", flush=True)
    print("all right")


def _whole(tensor):
    """``tensor`` on the GPU, in a copy of all of its storage."""
    import torch

    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return storage.cuda().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


if __name__ == "__main__":
    main()
