"""One launch of the Hopper GEMM under Triton's concurrency sanitizer: what `test_gpu_consan` runs, each in a process.

``python consan_program.py VARIANT [BUG]`` with TRITON_INSTRUMENTATION_MODE=consan and CUDA_LAUNCH_BLOCKING=1. The
sanitizer's checks are assertions on the device: they print what they found, and the launch fails. Likewise
``consan_attention.py``.

BUG names an entry of `BUGS`: the launch is then of a copy of the kernel in which the lines of that entry are changed.
With CONSAN_COMPILE=1 nothing is launched: compiling takes a core a minute or two, and leaves the kernel in Triton's
cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import importlib.util
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from hopper_cases import HopperCase

#: Seconds after which a launch is taken to hang: they take under one.
HANGS = 60.0
KERNELS = Path(__file__).parents[2] / "src" / "tilestream" / "kernels" / "hopper"

#: The smallest tile of each variant, more items than a ring has slots, more K steps than it has stages.
CASES = {
    "single": HopperCase(187, 32, 400, "single", (64, 32), schedule="static", stages=2, workers=1, layout="nt"),
    "cooperative": HopperCase(
        379, 16, 400, "cooperative", (128, 16), schedule="static", stages=2, workers=1, layout="nt"
    ),
    "ping_pong": HopperCase(187, 128, 200, "ping_pong", (64, 128), schedule="static", stages=2, workers=1, layout="nt"),
}


class Bug(NamedTuple):
    """A protocol broken.

    Attributes
    ----------
    module
        The file that is changed.
    changes
        Pieces of its text, and what stands there instead.
    found
        What the sanitizer says, one of these.
    """

    module: str
    changes: tuple[tuple[str, str], ...]
    found: tuple[str, ...]


class Sanitized(NamedTuple):
    """A kernel that is run so.

    Attributes
    ----------
    modules
        Its files, each of which imports those before it; the last has ``entry``.
    cases, bugs
        By name.
    run
        Launches a kernel of that text, and checks the answer of a case.
    always
        What is changed in each file, bug or none, so that the sanitized kernel can be compiled.
    """

    modules: tuple[str, ...]
    entry: str
    cases: Mapping[str, Any]
    bugs: Mapping[str, Bug]
    run: Callable[[Any, Any], None]
    always: Mapping[str, tuple[tuple[str, str], ...]] = {}


#: What it says. A deadlock it does not see here, though it has words for one: a barrier that counts an arrival too
#: many, or a turn that is not handed on, hangs. It judges what happens, in the order in which it happens: where another
#: wait covers it, a missing one goes unseen (for an empty slot of the item ring, for Q's buffer in attention). Those
#: are for `tilestream_tools.verify` to find, which sees every order.
READS, WRITES = "Buffer being accessed has outstanding reads", "Buffer being accessed has outstanding writes"
PENDING = "Accessing buffer with pending access"
_FIRST = "    accs = wait_mma(start_mma(x, y_stages, stage, accs, 0, False, Y_K_MAJOR), PARTS)\n"
_MORE = "        accs = wait_mma(start_mma(x, y_stages, stage, accs, 0, True, Y_K_MAJOR), PARTS)\n"
_RELEASE = _MORE + "        mbarrier.arrive(empty.index(before(stage, STAGES)))\n"
_NEXT = "        x = operand(x_stages, stage * HALVES + HALF, X_K_MAJOR, False)\n"
_LAST = "    accs = wait_mma(accs, 0)\n    mbarrier.arrive(empty.index(before(stage, STAGES)))\n"
BUGS = {
    # The multiplication that has just been started still reads what is given back.
    "a stage is released too early": Bug(
        "multiply",
        (
            (_FIRST, _FIRST + "    mbarrier.arrive(empty.index(stage))\n"),
            (_RELEASE, _RELEASE.replace("before(stage, STAGES)", "stage")),
            (_LAST, "    accs = wait_mma(accs, 0)\n"),
        ),
        (READS, PENDING),
    ),
    "no wait for an empty stage": Bug(
        "load", (("        mbarrier.wait(empty.index(stage), phase ^ 1)\n", ""),), (READS, WRITES, PENDING)
    ),
    "no wait for a full stage": Bug(
        "multiply", (("        mbarrier.wait(full.index(stage), phase)\n" + _NEXT + _MORE, _NEXT + _MORE),), (WRITES,)
    ),
    "an item is read without a wait": Bug(
        "gemm",
        (("        mbarrier.wait(item_full.index(slot), slot_phase)\n        steps", "        steps"),),
        (READS, WRITES, PENDING),
    ),
    "no wait for the store before": Bug(
        "epilogue", (("        tma.store_wait(PENDING)\n", ""),), (PENDING,)
    ),
}  # fmt: skip


def changed(text: str, changes: tuple[tuple[str, str], ...]) -> str:
    """``text`` with each change made, each in one place."""
    for old, new in changes:
        if text.count(old) != 1:
            raise ValueError(f"{text.count(old)} places, not one, read {old!r}")
        text = text.replace(old, new)
    return text


def seeded(of: Sanitized, bug: Bug | None, folder: Path) -> Any:
    """The kernel, with a bug or without, from copies of its files."""
    names = of.modules
    texts = {name: (KERNELS / f"{name}.py").read_text(encoding="utf-8") for name in names}
    for name, changes in of.always.items():
        texts[name] = changed(texts[name], changes)
    if bug is not None:
        texts[bug.module] = changed(texts[bug.module], bug.changes)
    for name in names:
        for other in names:
            texts[name] = texts[name].replace(f"from tilestream.kernels.hopper.{other} ", f"from seeded_{other} ")
        path = folder / f"seeded_{name}.py"
        path.write_text(texts[name], encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return getattr(module, of.entry)


def descriptor(made: Any, tensor: Any) -> Any:
    """What Triton launches with for a map."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from tilestream.launch.hopper.launch import described_by

    if made is None:
        return None
    alike = described_by(made, tensor.dtype)
    return TensorDescriptor(tensor, list(made.shape), list(made.strides), alike.block_shape, alike.layout)


def launch(kernel: Any, filled: tuple[Any, ...], grid: tuple[int, ...], options: dict[str, Any]) -> None:
    """A launch by Triton itself, which gives the sanitizer its memory; returns when it has ended."""
    import torch
    import triton

    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    begin = time.monotonic()
    kernel.warmup(*filled, grid=grid, **options)
    print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    if os.environ.get("CONSAN_COMPILE"):
        raise SystemExit(0)
    with _alone():
        begin, watch = time.monotonic(), threading.Timer(HANGS, _hangs)
        watch.start()
        try:
            kernel[grid](*filled, **options)
            torch.cuda.synchronize()
        finally:
            watch.cancel()
        print(f"ran for {time.monotonic() - begin:.0f} s", flush=True)


def _hangs() -> None:
    """Ends the process, and with it the lock that the others wait for."""
    print(f"the launch has not ended after {HANGS:g} s", flush=True)
    os._exit(3)


def run(kernel: Any, case: HopperCase) -> None:
    """A launch, whose answer is checked."""
    from error_rule import passes
    from tilestream.launch.hopper.arguments import Arguments
    from tilestream.runtime.properties import cuda_properties

    plan, layout = case.plan(cuda_properties())
    arguments = Arguments(plan, layout)
    operands, (out, _) = case.operands("cuda"), case.output("cuda")
    a, b = operands["a"], operands["b"]
    x, y = (b, a) if plan.swap_ab else (a, b)
    parts = (descriptor(part, y) for part in arguments.y)
    maps = (descriptor(arguments.x, x), None, *parts, descriptor(arguments.out, out))
    filled = arguments.fill((*maps, out, *[None] * 9, 0, 0, 1.0, 1.0))
    launch(kernel, filled, (plan.workers, 1, 1), arguments.options)
    maths = case.maths(operands)
    if not passes(out, maths.finer(), maths.by_torch()):
        raise SystemExit("a wrong answer")


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Wait for the others that run this: a sanitized kernel has 32 KB of stack a thread, 9 GB in all."""
    with (Path(tempfile.gettempdir()) / "tilestream-consan.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


#: Each word of the item ring is a buffer that the sanitizer watches: of those, the ones that these cases use.
_FIELDS = {"ring": (("gl.constexpr = gl.constexpr(16)", "gl.constexpr = gl.constexpr(3)"),)}
GEMM = Sanitized(("ring", "epilogue", "multiply", "load", "gemm"), "gemm", CASES, BUGS, run, _FIELDS)


def main(of: Sanitized) -> None:
    """What the command line names, of a kernel."""
    variant, *name = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        if name or of.always:
            kernel = seeded(of, of.bugs[name[0]] if name else None, Path(folder))
        else:
            kernel = getattr(importlib.import_module(f"tilestream.kernels.hopper.{of.modules[-1]}"), of.entry)
        of.run(kernel, of.cases[variant])
    print("clean")


if __name__ == "__main__":
    main(GEMM)
