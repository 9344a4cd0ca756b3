"""Compile what attention's GPU tests and benchmark launch, of both kernels, on all cores at once: see `precompile`.

``python tests/gpu/precompile_attention.py [part of a test's name ...]``; ``benchmark``: what
benchmarks/attention launches in its sections `variants` and `fp8`. Nothing but time depends on this.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from gates import hopper_attention as gate
from gates import portable_attention as portable_gate
from precompile import compile_all, device_of_this_machine, went_wrong

import tilestream as ts
from tilestream.core.device import DeviceProperties
from tilestream.launch.attention_arguments import AttentionLayout
from tilestream.launch.portable.attention_arguments import AttentionArguments
from tilestream.ops import attention_library
from tilestream.ops.attention_gpu import layout_of
from tilestream.ops.attention_operands import problem_of
from tilestream.plan.attention_plan import AttentionPlan, of_candidate
from tilestream.plan.attention_planner import plan_attention
from tilestream.plan.policy import hopper_attention
from tilestream_tools.isa.build import build as compiled

Job = tuple[AttentionPlan, AttentionLayout]


def launched(call: Callable[[], Any], device: DeviceProperties, backend: str) -> list[Job]:
    """What a call on CPU tensors would launch of a backend's kernel if they were on ``device``."""
    found: list[Job] = []

    def note(x: Any, t: Any, s: Any, keys: Any, deadline: float, limit: int = 0) -> None:
        problem, layout = problem_of(t, s, keys), layout_of(x)
        no_tma = hopper_attention.refuse_strides(problem, layout.q, layout.k, layout.v, layout.out)
        try:
            plan = plan_attention(
                replace(problem, no_tma=no_tma), s.workers or limit or None, s.schedule, device=device,
                backend=backend, splits=s.splits or None,
            )  # fmt: skip
        except NotImplementedError:
            return
        found.append((plan, layout))

    run, attention_library.execute = attention_library.execute, note
    try:
        call()
    finally:
        attention_library.execute = run
    return found


def of_tests(device: DeviceProperties, parts: list[str]) -> Iterator[Job]:
    """Of `test_gpu_attention.test_numbers`, cases whose names hold one of ``parts``; all, if there are none."""
    import test_gpu_attention as tests

    from attention_maths import call_of

    for case in tests._each():
        if not parts or any(part in case.id for part in parts):
            backend, what = case.values
            call = call_of(what)
            how = {**call.tensors, **call.options, "return_lse": True}
            yield from launched(lambda how=how: ts.attention(**how), device, backend)


def of_benchmark(device: DeviceProperties) -> Iterator[Job]:
    """Of benchmarks/attention: every candidate, with and without turns; in 8 bits both kernels."""
    from benchmarks.attention import fp8 as gpu_attention_fp8
    from benchmarks.attention.bench import SHAPES, problem_of_shape

    for shape in SHAPES:
        for variant in ("turns", "apart"):
            problem, layout = problem_of_shape(shape)
            made = hopper_attention.candidates(problem, device, device.workers, kind="dynamic", variant=variant)
            for found in made:
                yield of_candidate(problem, device, "hopper", found, "a benchmark's", ()), layout
    for shape in gpu_attention_fp8.SHAPES:
        yield from gpu_attention_fp8.launches(shape, device).values()


def key(job: Job) -> str:
    """The key of its compiled kernel."""
    if job[0].backend == "portable":
        p = job[0].problem
        config = AttentionArguments(*job).config()
        return repr((config, job[0].warps, job[0].stages, job[1], p.return_lse, p.sinks, p.scaled, p.aligned))
    options, filled = gate.fill(*job)
    maps = [(x.block_shape, str(x.base.dtype)) for x in filled[:4]]
    return repr((options, maps, [x is None for x in filled[4:17]], filled[-1]))


def build(job: Job) -> str | None:
    """What went wrong."""
    if job[0].backend == "portable":
        return went_wrong(job[0].label, lambda: compiled(*portable_gate.attention_source(*job), "sm_90a"))
    options, filled = gate.fill(*job)
    return went_wrong(job[0].label, lambda: compiled(gate.attend, filled, options, "sm_90a"))


def main() -> None:
    begin = time.monotonic()
    device = device_of_this_machine()
    parts = [part for part in sys.argv[1:] if part != "benchmark"]
    jobs = list(of_benchmark(device)) if "benchmark" in sys.argv else []
    if parts or "benchmark" not in sys.argv:
        jobs += of_tests(device, parts)
    todo = {key(job): job for job in jobs}
    print(f"{len(jobs)} launches, {len(todo)} kernels", flush=True)
    compile_all(build, list(todo.values()), begin)


if __name__ == "__main__":
    main()
