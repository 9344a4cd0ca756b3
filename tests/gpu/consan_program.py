"""One launch of the Hopper GEMM under Triton's concurrency sanitizer: what `test_gpu_consan` runs, each in a process.

``python consan_program.py VARIANT [BUG]`` with TRITON_INSTRUMENTATION_MODE=consan and CUDA_LAUNCH_BLOCKING=1. The
sanitizer's checks are assertions on the device: they print what they found, and the launch fails. Likewise
``consan_attention.py``.

BUG names a row of `mutants.sanitized`: the launch is then of that mutant. With CONSAN_COMPILE=1 nothing is launched:
compiling takes a core a minute or two, and leaves the kernel in Triton's cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from gpu_cases import Case
from hopper_cases import hopper_case

from mutants.engine import load
from mutants.sanitized import GEMM, SanitizedKernel
from tilestream.plan.policy import hopper

#: Seconds after which a launch is taken to hang: they take under one.
HANGS = 60.0

#: Tiles that no plan has: of those that plans have a sanitized kernel takes too long to compile.
SMALL = {"TRIPLE": (hopper.Tile("triple", 192, 32),), "PAIRED": (hopper.Tile("paired", 256, 32),)}
#: The smallest tile of each variant, more items than a ring has slots, more K steps than it has stages. Three consumers
#: without C buffers: with them the sanitizer has more than 16 buffers, and is compiled for four times as long.
CASES = {
    case.variant: replace(case, schedule="static", stages=2, workers=2 if case.variant == "paired" else 1, layout="nt")
    for case in (
        hopper_case(187, 32, 400, "single", (64, 32)),
        hopper_case(379, 16, 400, "cooperative", (128, 16)),
        hopper_case(187, 128, 200, "ping_pong", (64, 128)),
        hopper_case(563, 32, 400, "triple", (192, 32), out="odd"),
        hopper_case(600, 72, 400, "paired", (256, 32)),
    )
}


def plan_of(case: Case, device: Any) -> tuple[Any, Any]:
    """The plan and the layout of a case, where there are `SMALL` tiles."""
    with mock.patch.multiple(hopper, **SMALL, _known_ways=hopper.ways):
        return case.plan(device)


@contextlib.contextmanager
def in_pairs() -> Iterator[None]:
    """What Triton compiles here is launched in clusters of two CTAs, and rewritten as `multicast` does it.

    That refuses jumps between its marks. The sanitizer writes some there; but each copy is still between its own marks.
    """
    from triton.backends.nvidia.compiler import CUDABackend

    from tilestream.launch.hopper import multicast

    make = CUDABackend.make_ptx

    def rewritten(*given: Any) -> str:
        ptx = make(*given)
        assert ptx.count("// multicast begins") == ptx.count("// multicast ends") == len(_LOADS.findall(ptx))
        cluster = r"\1\n.explicitcluster\n.reqnctapercluster 2, 1, 1\n"
        return re.sub(r"(\.reqntid [^\n]*)\n", cluster, multicast.for_pairs(ptx), count=1)

    with mock.patch.multiple(multicast, _JUMP=re.compile("(?!)")), mock.patch.multiple(CUDABackend, make_ptx=rewritten):
        yield


#: A part between marks that holds one load.
_LOADS = re.compile(
    r"// multicast begins\n(?:(?!// multicast|cp\.async\.bulk\.tensor).)*cp\.async\.bulk\.tensor"
    r"(?:(?!// multicast|cp\.async\.bulk\.tensor).)*// multicast ends", re.DOTALL,
)  # fmt: skip


def descriptor(made: Any, tensor: Any) -> Any:
    """What Triton launches with for a map."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from tilestream.launch.hopper.maps import described_by

    if made is None:
        return None
    alike = described_by(made, tensor.dtype)
    return TensorDescriptor(tensor, list(made.shape), list(made.strides), alike.block_shape, alike.layout)


def launch(kernel: Any, filled: tuple[Any, ...], grid: tuple[int, ...], options: dict[str, Any]) -> None:
    """A launch by Triton itself, which gives the sanitizer its memory; returns when it has ended."""
    import torch

    allocate()
    begin = time.monotonic()
    kernel.warmup(*filled, grid=grid, **options)
    print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    if os.environ.get("CONSAN_COMPILE"):
        raise SystemExit(0)
    with alone():
        kernel[grid](*filled, **options)
        torch.cuda.synchronize()


def allocate() -> None:
    """Give the sanitizer its memory."""
    import torch
    import triton

    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))


def _hangs() -> None:
    """Ends the process, and with it the lock that the others wait for."""
    print(f"the launch has not ended after {HANGS:g} s", flush=True)
    os._exit(3)


def run(kernel: Any, case: Case) -> None:
    """A launch, whose answer is checked."""
    from error_rule import passes
    from tilestream.launch.hopper.arguments import Arguments
    from tilestream.runtime.properties import cuda_properties

    plan, layout = plan_of(case, cuda_properties())
    arguments = Arguments(plan, layout)
    operands, (out, _) = case.operands("cuda"), case.output("cuda")
    a, b = operands["a"], operands["b"]
    x, y = (b, a) if plan.swap_ab else (a, b)
    parts = (descriptor(part, y) for part in arguments.y)
    maps = (descriptor(arguments.x, x), None, *parts, descriptor(arguments.out, out))
    filled = arguments.fill((*maps, out, *[None] * 9, 0, 0, 1.0, 1.0))
    with in_pairs() if plan.ctas > 1 else contextlib.nullcontext():
        launch(kernel, filled, (plan.schedule.workers * plan.ctas, 1, 1), arguments.options)
    maths = case.maths(operands)
    if not passes(out, maths.finer(), maths.by_torch()):
        raise SystemExit("a wrong answer")


@contextlib.contextmanager
def alone(seconds: float = HANGS) -> Iterator[None]:
    """Wait for the others that run this: a sanitized kernel has 32 KB of stack a thread, 9 GB in all. Then hurry."""
    with (Path(tempfile.gettempdir()) / "tilestream-consan.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        begin, watch = time.monotonic(), threading.Timer(seconds, _hangs)
        watch.start()
        try:
            yield
        finally:
            watch.cancel()
        print(f"ran for {time.monotonic() - begin:.0f} s", flush=True)


def main(of: SanitizedKernel, cases: Mapping[str, Any], run: Callable[[Any, Any], None]) -> None:
    """Launch what the command line names: a case, of the kernel or of a mutant of it."""
    variant, *name = sys.argv[1:]
    edits = of.always + (of.bugs[name[0]].edits if name else ())
    run(getattr(load(of.modules, edits)[of.modules[-1]], of.entry), cases[variant])
    print("clean")


if __name__ == "__main__":
    main(GEMM, CASES, run)
