"""Compile what benchmarks launch, on all cores at once, before they run one by one.

``python tests/gpu/precompile.py [gemm] [distributed] [calls] [moe] [attention] [--count]``. It only saves time: a
kernel that it leaves out is compiled at its launch. ``distributed`` is of sections ``gather`` and ``all_reduce``,
``calls`` of those of single calls and of a Llama block. ``--count`` says how many kernels there are, and compiles none.
Tests need none of it: the processes of a pass of `record` compile at once. Without a GPU it compiles for an H100.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from benchmarks.gemm.shapes import EPILOGUE, FP8, QUACK, SEARCH, suite
from gates import hopper_attention as attention
from gates import hopper_gemm as hopper
from gates import portable_attention
from gates.hopper import no_gpu
from gpu_cases import E4M3, KINDS, Case, chunks_of, uniform

from tilestream.core.device import DeviceProperties
from tilestream.distributed.dispatch import Case as DispatchCase
from tilestream.distributed.dispatch import decide
from tilestream.launch.hopper.arguments import Arguments
from tilestream.plan.attention_plan import of_candidate
from tilestream.plan.planner import plan_problem, search_space
from tilestream.plan.policy import hopper_attention
from tilestream.plan.problem import Incoming
from tilestream_tools.isa.build import build
from tilestream_tools.isa.kernels import portable_source
from tilestream_tools.warm.ahead import compile_call, kernels_of
from tilestream_tools.warm.calls import Grouped

#: The device where there is no GPU. A plan depends a little on the clock.
STAND_IN = DeviceProperties(
    "an H100", "portable", 132, 256 * 1.98e9, 3.35e12, "a stand-in", "sm_90", 232448,
    (("float16", 4096 * 1.98e9), ("bfloat16", 4096 * 1.98e9), ("tf32", 2048 * 1.98e9), ("fp8", 8192 * 1.98e9)),
)  # fmt: skip


class Job(NamedTuple):
    """A launch of a GEMM or of attention; ``local_rows``: rows of A that the rank holds itself."""

    plan: Any
    layout: Any
    local_rows: int | None = None

    @property
    def attends(self) -> bool:
        return hasattr(self.plan, "shares")

    def filled(self) -> tuple[Any, dict[str, Any], tuple[Any, ...]]:
        """A kernel of this package's, and options and arguments of its launch, without addresses."""
        if self.attends:
            return attention.attend, *attention.fill(self.plan, self.layout)
        if self.plan.backend == "hopper":
            return hopper.gemm, *hopper.fill(self.plan, self.layout, local_rows=self.local_rows)
        kernel, filled, options = portable_source(self.plan, self.layout, self.plan.problem.aligned)
        return kernel, options, filled

    def key(self) -> str:
        """Of its compiled kernel; of a GEMM's made by Triton's own binder."""
        if self.attends and self.plan.backend == "portable":
            return repr(self)
        kernel, options, filled = self.filled()
        if self.attends:
            maps = [(x.block_shape, str(x.base.dtype)) for x in filled[:4]]
            return repr((options, maps, [x is None for x in filled[4:17]], filled[-1]))
        *_, bind = kernel.device_caches[0]
        _, specialization, _ = bind(*filled, **options, debug=False, instrumentation_mode="")
        return repr((self.plan.backend, options, specialization))

    def build(self) -> str | None:
        """Compile it. Returns what went wrong."""
        try:
            if self.attends and self.plan.backend == "portable":
                build(*portable_attention.attention_source(self.plan, self.layout), "sm_90a")
            else:
                kernel, options, filled = self.filled()
                build(kernel, filled, options, "sm_90a")
        except Exception as error:
            return f"{self.plan.label}: {type(error).__name__}: {error}"[-400:]
        return None


class Ahead(NamedTuple):
    """A call on the meta device, whose kernels are compiled as `tilestream warm` does it."""

    call: Any
    device: DeviceProperties

    def build(self) -> str | None:
        """Compile them. Returns what went wrong."""
        try:
            compile_call(self.call, self.device)
        except Exception as error:
            return f"{self.call}: {type(error).__name__}: {error}"[-400:]
        return None


# What is launched ----------------------------------------------------------------------------------------------------


def of_gemm(device: DeviceProperties) -> Iterator[Job]:
    """Of benchmarks/gemm: what `tilestream` picks there, and the search space; random problems compile their own."""
    for kind, layout in itertools.product((*KINDS, "auto"), ("nn", "nt")):
        for size in (2048, 4096, 8192):
            yield Job(*Case(size, size, size, layout=layout, schedule=kind).plan(device))
    for shape in (*suite(), *QUACK, *SEARCH):
        yield Job(*Case(*shape[:3], layout="nt").plan(device))
    for shape, activation in EPILOGUE:
        yield Job(*Case(*shape[:3], layout="nt", bias=True, activation=activation).plan(device))
    for shape in SEARCH:
        plan, layout = Case(*shape[:3], layout="nt").plan(device)
        yield from (Job(plan, layout) for plan in search_space(plan.problem, device))
    for shape, scales, fast in itertools.product(FP8, ("tensor", "row"), (True, False)):
        yield Job(*Case(*shape[:3], E4M3, "nt", scales=scales, fast_accum=fast).plan(device))


def of_distributed(device: DeviceProperties) -> Iterator[Job]:
    """Of benchmarks/distributed/all_gather.py, between as many ranks as there are GPUs."""
    import torch
    from benchmarks.distributed import all_gather as bench

    world = max(2, torch.cuda.device_count())
    for m, n, k in bench.gathers(world):
        for chunks in bench.chunk_counts(m // world):
            yield from gathered(device, world, m // world, n, k, chunks)
            yield from gathered(device, world, m // world, 8, k, chunks, "nn")
        yield Job(*Case(m, n, k, layout="nt").plan(device))
    for m, n, k in bench.scatters(world):
        yield from summed(device, world, m, n, k, bench.chunk_counts(m // world))


def of_calls(device: DeviceProperties) -> Iterator[Job]:
    """Of benchmarks/distributed/calls.py and block.py, in as many chunks as the table says, and in one."""
    import torch
    from benchmarks.distributed import block, calls

    world = max(2, torch.cuda.device_count())
    shapes = {*calls.ROWS, *calls.CAPTURED}
    for width, hidden, queries, keys in (block.MODELS[model] for model in block.RUNS[False][0]):
        head, columns = block._HEAD, (queries + 2 * keys) * block._HEAD
        into = ((columns // world, width), (2 * hidden // world, width))
        out_of = ((width, queries * head // world), (width, hidden // world))
        for tokens in block.PREFILL:
            shapes |= {("gather", tokens, n, k) for n, k in into} | {("sum", tokens, n, k) for n, k in out_of}
        for tokens in block.DECODE:
            shapes |= {("all_reduce", tokens, n, k) for n, k in (*into, *out_of)}
    for op, m, n, k in sorted(shapes):
        rows = m // world
        if op == "all_reduce":
            yield Job(*Case(m, n, k, layout="nt").plan(device))
            continue
        full = "all_gather_matmul" if op == "gather" else "matmul_reduce_scatter"
        said = decide(
            DispatchCase(full, rows, n, k, k if op == "gather" else n, world, "bfloat16", 2, "sm_90"), "fused"
        )
        counts = sorted({1, said.chunks})
        if op == "gather":
            for chunks in counts:
                yield from gathered(device, world, rows, n, k, chunks)
            yield Job(*Case(m, n, k, layout="nt").plan(device))
        else:
            yield from summed(device, world, m, n, k, [c for c in counts if rows % c == 0])


def of_moe(device: DeviceProperties) -> Iterator[tuple[str, Ahead]]:
    """Of benchmarks/distributed/moe.py: grouped products of a source's rows, and of all that come to a rank."""
    import torch
    from benchmarks.distributed import moe

    world, found = max(2, torch.cuda.device_count()), []
    for _, width, hidden, experts, top_k in moe.WIDTHS:
        for tokens, share in itertools.product(moe.TOKENS, (1, 2)):
            rows = tokens * top_k * share // 2  # a source's rows come here all, or half of them: also of all sources
            found.append(Grouped(rows, 2 * hidden, width, experts // world, activation="swiglu"))
            found.append(Grouped(rows, width, hidden, experts // world))
    yield from ((key, Ahead(call, device)) for key, call in kernels_of(found, device).items())


def summed(
    device: DeviceProperties, world: int, m: int, n: int, k: int, counts: Iterable[int]
) -> Iterator[Job]:  # fmt: skip
    """What a sum of so many rows launches: its product, and in so many chunks the one that publishes."""
    plan, layout = Case(m, n, k, layout="nt").plan(device)
    yield Job(plan, layout)
    for chunks in counts:
        problem = replace(plan.problem, publishes=Incoming(chunks_of(uniform(m, m // world // chunks))))
        published = plan_problem(problem, device=device)
        if published.backend == "hopper":  # else: a launch a chunk
            yield Job(published, layout)


def gathered(
    device: DeviceProperties, world: int, rows: int, n: int, k: int, chunks: int, layout: str = "nt"
) -> Iterator[Job]:
    """What a gather of so many rows a rank launches: the own rows in the slot, and as local rows."""
    from tilestream.distributed.shards import Shards

    shards = Shards(1, world, rows, k, min(chunks, rows))
    bounds = uniform(shards.total, rows // chunks) if rows % chunks == 0 else tuple(shards.bounds())
    made = Job(*Case(shards.total, n, k, layout=layout, rows=bounds).plan(device))
    yield made
    if made.plan.backend != "hopper":
        return
    if Arguments(made.plan, made.layout).local_tiles(rows, rows, world * rows) is not None:
        yield made._replace(local_rows=rows)


def of_attention(device: DeviceProperties) -> Iterator[Job]:
    """Of benchmarks/attention: every candidate, with and without turns; in 8 bits both kernels."""
    from benchmarks.attention import fp8
    from benchmarks.attention.bench import SHAPES, problem_of_shape

    for shape, variant in itertools.product(SHAPES, ("ordered", "unordered")):
        problem, layout = problem_of_shape(shape)
        for found in hopper_attention.candidates(problem, device, device.workers, kind="dynamic", variant=variant):
            yield Job(of_candidate(problem, device, "hopper", found, "a benchmark's", ()), layout)
    for shape in fp8.SHAPES:
        yield from (Job(*launch) for launch in fp8.launches(shape, device).values())


SECTIONS: dict[str, Any] = {
    "gemm": of_gemm, "distributed": of_distributed, "calls": of_calls, "moe": of_moe, "attention": of_attention,
}  # fmt: skip


def _build(one: Job | Ahead) -> str | None:
    return one.build()


def main() -> None:
    import torch

    from tilestream.runtime.properties import cuda_properties

    begin = time.monotonic()
    device = cuda_properties(0) if torch.cuda.is_available() else STAND_IN
    no_gpu()
    todo: dict[str, Any] = {}
    names = [name for name in sys.argv[1:] if name != "--count"]
    for name in names or SECTIONS:
        before, launches = len(todo), list(SECTIONS[name](device))
        todo |= dict(one if type(one) is tuple else (one.key(), one) for one in launches)
        print(f"{name}: {len(launches)} launches, {len(todo) - before} more kernels", flush=True)
    if "--count" in sys.argv:
        return
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        failed = [error for error in pool.imap_unordered(_build, todo.values(), 1) if error]
    print(f"{len(todo)} kernels compiled in {time.monotonic() - begin:.0f} s; {len(failed)} failed: {failed[:3]}")


if __name__ == "__main__":
    main()
