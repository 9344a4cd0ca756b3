"""A small device for the interpreter, which takes milliseconds a K step: tiles of 16, and a few workers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from error_rule import Maths, check, rand
from tilestream.arrival.device import GateWords
from tilestream.arrival.flat import Awaited
from tilestream.core.chunks import Chunks
from tilestream.core.copy_items import COUNTERS, CopyArguments, Pieces, word_dtype
from tilestream.core.device import DeviceProperties
from tilestream.core.operands import Epilogue, GemmOperands
from tilestream.launch.trace import traced
from tilestream.plan.plan import Plan
from tilestream.plan.planner import plan_problem
from tilestream.plan.policy import portable
from tilestream.plan.problem import Incoming, Problem, dtype_name
from tilestream.runtime.device_workspace import DeviceWorkspace, captured_words
from tilestream.runtime.device_workspace import Words as DeviceWords
from tilestream.trace import Recorder
from tilestream.trace.record import LaunchTrace

DEVICE = DeviceProperties("an interpreter", "portable", 5, 1e12, 1e12, "a stub", "sm_90", 232448)
KINDS = ("static", "dynamic", "stream_k")


def small_tiles(monkeypatch: pytest.MonkeyPatch, block: int = 16) -> None:
    tile = portable.Tile(block, block, 16, 4, 2, 0.5)
    monkeypatch.setattr(portable, "TILES", dict.fromkeys(portable.TILES, (tile,)))


def plan_for(a: torch.Tensor, b: torch.Tensor, kind: str = "dynamic", workers: int = 5, **how) -> Plan:
    batch = a.shape[0] if a.dim() == 3 else 1
    vector = how.pop("vector", 1)  # of operands that are not aligned; a pair: of each
    vectors = vector if isinstance(vector, tuple) else (vector, vector)
    problem = Problem(
        a.shape[-2], b.shape[-1], a.shape[-1], batch, dtype_name(a.dtype), how.pop("out", dtype_name(a.dtype)),
        b_dtype=dtype_name(b.dtype), scales=how.pop("scales", "none"), fast_accum=how.pop("fast_accum", True),
        aligned=vectors == (1, 1), vectors=vectors,
    )  # fmt: skip
    return plan_problem.__wrapped__(problem, workers, kind, device=DEVICE, backend="portable", **how)


def strides(x: torch.Tensor) -> tuple[int, int, int]:
    return (0, *x.stride()) if x.dim() == 2 else tuple(x.stride())  # type: ignore[return-value]


def scale_strides(scale: torch.Tensor | None, dim: int) -> tuple[int, int]:
    if scale is None or scale.numel() == 1:
        return 0, 0
    return scale.stride(0) if scale.dim() == 3 else 0, scale.stride(dim)


def run(plan: Plan, a, b, out, epilogue: Epilogue | None = None, probe=None, incoming=None) -> None:
    """As `tilestream.ops.gpu.run` does it, on CPU tensors."""
    from tilestream.launch.gemm_arguments import Layout
    from tilestream.launch.portable.launch import launch_of

    epilogue = epilogue or Epilogue()
    layout = Layout(
        strides(a), strides(b), strides(out),
        None if epilogue.bias is None else epilogue.bias.stride(0),
        None if epilogue.residual is None else strides(epilogue.residual),
        epilogue.alpha != 1, epilogue.activation,
        scale_strides(epilogue.scale_a, -2), scale_strides(epilogue.scale_b, -1),
    )  # fmt: skip
    launch_of(plan, layout)(GemmOperands(a, b, out, epilogue), incoming, probe)


def nan_like(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.full((*a.shape[:-1], b.shape[-1]), float("nan"), dtype=dtype or a.dtype)


def product(
    plan: Plan, a: torch.Tensor, b: torch.Tensor, epilogue: Epilogue | None = None, *, start: float = math.nan, **how
) -> torch.Tensor:  # fmt: skip
    """What the kernel makes of operands, where ``start`` was."""
    out = nan_like(a, b, getattr(torch, plan.problem.out_dtype)).fill_(start)
    run(plan, a, b, out, epilogue, **how)
    return out


#: `product` where zeros were, so that NaN is what the kernel has stored.
voided = functools.partial(product, start=0.0)


def check_product(plan: Plan, a: torch.Tensor, b: torch.Tensor, epilogue: Epilogue | None = None, **how) -> None:
    """Assert the error rule for what the kernel makes of operands."""
    out = product(plan, a, b, epilogue, **how)
    check(out, maths_of(a, b, epilogue or Epilogue(), out.dtype))


def maths_of(a: torch.Tensor, b: torch.Tensor, epilogue: Epilogue, dtype: torch.dtype) -> Maths:
    activation = None if epilogue.activation == "none" else epilogue.activation
    return Maths(
        a, b, epilogue.bias, epilogue.residual, epilogue.alpha, epilogue.beta, activation, dtype,
        epilogue.scale_a, epilogue.scale_b,
    )  # fmt: skip


def laid_out(rows: int, cols: int, how: str, dtype: torch.dtype, pad: int = 3) -> torch.Tensor:
    """``how``: n, t (contiguous along rows), or s (along nothing); what lies between is NaN."""
    if how == "t":
        return laid_out(cols, rows, "n", dtype, pad).t()
    step = 2 if how == "s" else 1
    store = torch.full((rows, step * cols + pad), float("nan")).to(dtype)
    view = store[:, : step * cols : step]
    view.copy_(rand(rows, cols, dtype=dtype))
    return view


def recorded(op: str, plan: Any, issue: Callable[[Any], object], recorder: Recorder | None = None) -> LaunchTrace:
    """What a recorder has of a launch; ``issue(log)`` makes it."""
    recorder = recorder or Recorder()
    traced(recorder, op, plan, torch.device("cpu"), issue)
    recorder.finish()
    return recorder.launches[-1]


def captured(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> DeviceWords:
    """The counters of launches that a graph replays: those of every launch from now on."""
    own = captured_words(torch.device("cpu"), plan.schedule, plan.block)
    space = DeviceWorkspace(torch.device("cpu"))
    monkeypatch.setattr(space, "open", lambda *_: own)
    monkeypatch.setattr("tilestream.launch.launch.device_workspace", lambda *_: space)
    return own


@dataclass
class Words:
    """Signals as a launch sees them; ``epoch`` 0: any word will do."""

    chunks: int
    epoch: int = 1
    key: int = 10**6  # nobody's
    words: torch.Tensor = field(init=False)
    quarantine: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.words = torch.zeros(self.chunks, dtype=torch.int32)
        self.quarantine = torch.zeros(1, dtype=torch.int32)

    def arrive(self, *but: int, value: int = 0) -> Words:
        self.words[:] = value or self.epoch or 1
        self.words[list(but)] = 0
        return self

    @property
    def copied(self) -> int:
        return 0

    apart = None

    def use(self, apart: bool = False) -> GateWords:
        return GateWords(self.words, self.quarantine, self.epoch, self.key)


@dataclass
class Copied(Words):
    """Signals of rows that the kernel copies from ``source`` to ``target``, as `KernelCopies` offers them."""

    source: torch.Tensor = field(kw_only=True)
    target: torch.Tensor = field(kw_only=True)
    pieces: Pieces = field(kw_only=True)
    copiers: int = field(default=99, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.counts = torch.zeros(COUNTERS + self.chunks, dtype=torch.int32)
        self.table = torch.tensor(self.pieces.table(), dtype=torch.int32)
        self.takers = 0

    @property
    def word(self) -> int:
        """Bytes of a word."""
        return self.source.shape[1] * self.source.element_size() // self.pieces.row_words

    @property
    def copied(self) -> int:
        return self.word

    def copying(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def take_copies(self, copiers: int) -> CopyArguments:
        self.takers += 1
        dtype = getattr(torch, word_dtype(self.word))
        words = (x.view(-1).view(dtype) for x in (self.source, self.target))
        return CopyArguments(*words, self.table, self.counts, min(copiers, self.copiers))


def plan_of(
    m: int, n: int, k: int, kind: str = "dynamic", *, batch: int = 1, rows: Chunks | Copied | None = None,
    columns: Chunks | Copied | None = None, pivot: int = 0, workers: int = 3, **how: Any,
) -> Plan:  # fmt: skip
    """A plan of float32 operands whose rows, or columns, arrive in chunks or are copied by the kernel."""
    problem = Problem(
        m, n, k, batch, "float32", "float32", in_chunks(rows, pivot), in_chunks(columns, pivot), **how
    )  # fmt: skip
    return plan_problem.__wrapped__(problem, workers, kind, device=DEVICE)


def in_chunks(arriving: Chunks | Copied | None, pivot: int = 0) -> Incoming | None:
    if isinstance(arriving, Copied):
        return Incoming(arriving.pieces.chunks, arriving.pieces.pivot, arriving.word)
    return None if arriving is None else Incoming(arriving, pivot)


def awaited(rows: Words | None = None, columns: Words | None = None, deadline: float = 0.05) -> Awaited:
    return Awaited(rows, columns, deadline, "matmul")


def crossed(names: str, first: Sequence[Any], second: Sequence[Any], **how: Any) -> pytest.MarkDecorator:
    """Parameters ``names`` with each of ``first`` and each of ``second``; in the quick tests each value is met once."""
    quick = max(len(first), len(second))
    meets = {(i % len(first), i % len(second)) for i in range(quick)}
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(x, y, marks=() if (i, j) in meets else pytest.mark.slow)
            for (i, x), (j, y) in itertools.product(enumerate(first), enumerate(second))
        ],
        **how,
    )
