"""What GPU tests share: poisoned tensors, launches of cases, captured launches, reports of missed deadlines."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu_cases import BF16, Case

import tilestream as ts
from attention_maths import Call
from error_rule import check, errors
from tilestream.core.operands import AttentionOperands
from tilestream.launch.cache import launch_cache
from tilestream.ops import attention_gpu, attention_library
from tilestream.ops.attention_operands import Settings
from tilestream.plan.plan import Plan
from tilestream.runtime import device_workspace as workspaces
from tilestream.runtime.driver import stream_wait
from tilestream.runtime.properties import cuda_properties
from tilestream.trace.record import current

ON_NVIDIA = torch.cuda.is_available() and torch.version.hip is None
ON_HOPPER = ON_NVIDIA and torch.cuda.get_device_capability() == (9, 0)
Operands = dict[str, torch.Tensor | None]


# Tensors -------------------------------------------------------------------------------------------------------------


def poison(x: torch.Tensor) -> torch.Tensor:
    """Fill a tensor of any float dtype with NaN."""
    if x.element_size() == 1:
        x.view(torch.uint8).fill_(0x7F)
    else:
        x.fill_(float("nan"))
    return x


def nan(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """An output that is not written yet."""
    return poison(torch.empty(shape, dtype=dtype, device="cuda"))


def nan_like(x: torch.Tensor) -> torch.Tensor:
    return poison(torch.empty_like(x))


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def rand(*shape: int) -> torch.Tensor:
    """Scales, none of them near 0."""
    return torch.rand(shape, device="cuda") + 0.5


def poison_around(like: torch.Tensor, before: tuple[int, ...], behind: tuple[int, ...]) -> torch.Tensor:
    """A copy of a tensor in the middle of NaN: so many elements of each dimension lie before and behind it."""
    shape = (sum(sizes) for sizes in zip(before, like.shape, behind, strict=True))
    store = torch.full(tuple(shape), float("nan"), device="cuda").to(like.dtype)
    return store[tuple(slice(b, b + n) for b, n in zip(before, like.shape, strict=True))].copy_(like)


def poison_scratch() -> None:
    """A launch must not pass on what an earlier one left there."""
    for space in workspaces._workspaces.values():
        if space._partials is not None:
            poison(space._partials)


def check_untouched(out: torch.Tensor, around: torch.Tensor) -> None:
    """All around the output is still NaN."""
    outside = torch.ones_like(around, dtype=torch.bool)
    outside.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(False)
    assert around[outside].isnan().all(), "written outside of the output"


# Launches ------------------------------------------------------------------------------------------------------------


class Run:
    """A case of a GEMM with its plan and its operands on this GPU; a call launches it."""

    def __init__(self, case: Case) -> None:
        self.case, self.operands = case, case.operands("cuda")
        self.plan: Plan = case.plan(cuda_properties())[0]
        self.how = {"alpha": case.alpha, "beta": case.beta, "activation": case.activation}

    def __call__(self, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.plan.run(**self.operands, out=out, **self.how)

    def check(self, out: torch.Tensor, around: torch.Tensor | None = None) -> None:
        """The answer keeps the error rule; float32 was not rounded to 16 bits. ``around``: see `check_untouched`."""
        case = self.case
        reference = check(out, case.maths(self.operands))
        if out.dtype == torch.float32 and not case.fp8 and not case.forced_tf32:
            worst, _ = errors(out, reference)
            assert worst <= 2e-4 * reference.abs().max().item(), f"{worst}: rounded to 16 bits on its way?"
        if around is not None:
            check_untouched(out, around)


def asked(call: Call) -> tuple[AttentionOperands, Settings]:
    """A call of attention as the op hands it to its launch, which is not issued; outputs are NaN."""
    found: list[tuple[Any, ...]] = []
    launch_cache.clear()
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((attention_gpu, "run"), (attention_library, "execute")):
            patch.setattr(module, name, lambda *given: found.append(given))
        ts.attention(**call.tensors, **call.options, return_lse=True)
    ((operands, settings, *_),) = found
    poison(operands.out)
    poison(operands.lse)
    return operands, settings


def twice(op: Callable[..., Any]) -> Callable[..., Any]:
    """A public op that makes each call twice, the first into an output of its own that lies as the given one does.

    Calls that wait for something, are compiled or recorded are made once.
    """

    def call(*args: Any, **options: Any) -> Any:
        waits = any(options.get(name) is not None for name in ("arrival", "weight_arrival", "publish", "deadline"))
        if not (waits or torch.compiler.is_compiling() or current() is not None):
            first, out = dict(options), options.get("out")
            if isinstance(out, torch.Tensor):
                first["out"] = _like(out)
                if options.get("residual") is out:
                    first["residual"] = first["out"]
            op(*args, **first)
        return op(*args, **options)

    return call


def _like(x: torch.Tensor) -> torch.Tensor:
    """A tensor of NaN with the strides of ``x``, as far from a multiple of 16 bytes."""
    offset = x.data_ptr() % 16 // x.element_size()
    room = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    store = poison(torch.empty(offset + room, dtype=x.dtype, device=x.device))
    return store.as_strided(x.shape, x.stride(), offset)


@contextlib.contextmanager
def captured() -> Iterator[torch.cuda.CUDAGraph]:
    """What the block launches is captured into a graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        yield graph


@contextlib.contextmanager
def held() -> Iterator[None]:
    """A block in which the current stream does nothing: it waits for a word that the host writes at the block's end.

    The block launches only kernels that have been launched before: at a kernel's first launch the driver loads it, and
    waits for every stream, this one too.
    """
    word, end = torch.zeros(1, dtype=torch.int32).pin_memory(), torch.cuda.Event()
    stream_wait(torch.cuda.current_stream().cuda_stream, word.data_ptr(), 1)
    end.record()
    try:
        yield
        assert not end.query(), "the stream went on"
    finally:  # else nothing ever ends
        word.fill_(1)
        end.synchronize()


def settle() -> None:
    """Wait for the GPU; no launch has reported anything."""
    torch.cuda.synchronize()
    ts.check()


def expired(match: str = "") -> ts.ArrivalTimeout:
    """Wait for the GPU: a launch has reported that its deadline passed. Returns the report."""
    torch.cuda.synchronize()
    with pytest.raises(ts.ArrivalTimeout, match=match) as caught:
        ts.check()
    return caught.value


class Differences:
    """Counts elements that differ, on the GPU: nothing is waited for until the end."""

    def __init__(self) -> None:
        self.count = torch.zeros((), dtype=torch.int64, device="cuda")

    def add(self, differ: torch.Tensor) -> None:
        """``differ``: of bools."""
        self.count += differ.sum()

    def none(self) -> bool:
        return self.count.item() == 0


def check_allocations(fresh: Callable[[], object], into: Callable[[], object] = lambda: None) -> None:
    """A call that is given its output allocates nothing; one that is not, its output alone."""

    def allocations() -> int:
        return torch.cuda.memory_stats()["allocation.all.allocated"]

    before = allocations()
    for _ in range(10):
        into()
    assert allocations() == before
    kept = [fresh() for _ in range(10)]
    assert allocations() == before + len(kept)


def run_apart(module: str, call: str, **variables: str) -> None:
    """Run ``call`` of a test module in a process of its own, with such environment variables."""
    code = f"import sys; sys.path[:0] = ['tests', 'tests/gpu']; import {module} as t; t.{call}"
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
