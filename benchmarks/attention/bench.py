"""What the attention sections share: shapes and operands, peers, and a row's checks and times.

Calls take turns and L2 is flushed before each; the figures are medians. An answer is checked before it is timed, and a
peer that is missing or fails is named in the record.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilestream as ts
from benchmarks.core.records import Record, Row
from benchmarks.core.session import Session
from benchmarks.core.timing import HOPPER_PEAK, HiddenLaunchClock, WallClock, both_clocks, rates
from tilestream.core.operands import AttentionOperands
from tilestream.launch.attention_arguments import AttentionLayout
from tilestream.plan.attention_problem import AttentionProblem

TOKENS = 16384
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
DIMS = ((128, 16), (64, 32), (256, 8))
Calls = dict[str, Callable[[], torch.Tensor]]


class Shape(NamedTuple):
    """A dense call on 16k tokens: columns of a head, heads, length of a sequence."""

    dim: int
    heads: int
    length: int
    causal: bool
    heads_kv: int = 0

    @property
    def batch(self) -> int:
        """How many sequences."""
        return TOKENS // self.length

    @property
    def operations(self) -> float:
        """Floating-point operations; causal counts half."""
        return 4 * self.batch * self.heads * self.length**2 * self.dim * (0.5 if self.causal else 1.0)

    @property
    def name(self) -> str:
        """The name of its row."""
        return f"D{self.dim} {'causal' if self.causal else 'full'} S{self.length}"


SHAPES = [Shape(dim, heads, length, causal) for dim, heads in DIMS for causal in (True, False) for length in LENGTHS]


def problem_of_shape(shape: Shape) -> tuple[AttentionProblem, AttentionLayout]:
    """The plan's problem and the launch's layout."""
    kv = shape.heads_kv or shape.heads
    problem = AttentionProblem(
        shape.batch, shape.heads, kv, shape.length, shape.length, shape.dim, causal=shape.causal
    )  # fmt: skip
    lies = (shape.length * shape.heads * shape.dim, shape.heads * shape.dim, shape.dim)
    lies_kv = (shape.length * kv * shape.dim, kv * shape.dim, shape.dim)
    return problem, AttentionLayout(lies, lies_kv, lies_kv, lies)


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """``[B, S, H, D]``, as ours."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=k.shape[2] != q.shape[2]
        )
    return out.transpose(1, 2)


def launched(launch: Callable[[AttentionOperands], None], x: AttentionOperands) -> Callable[[], torch.Tensor]:
    """A call of a prepared launch on operands that hold their output."""

    def call() -> torch.Tensor:
        launch(x)
        return x.out

    return call


def flash() -> Callable[..., Any] | None:
    """FlashAttention 4's forward, where it is installed."""
    try:
        from flash_attn.cute.interface import flash_attn_func
    except ImportError:
        return None
    return lambda q, k, v, causal: flash_attn_func(q, k, v, causal=causal)[0]


def operands_of(shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kv = shape.heads_kv or shape.heads
    return tuple(  # type: ignore[return-value]
        torch.randn(shape.batch, shape.length, heads, shape.dim, device="cuda", dtype=torch.bfloat16)
        for heads in (shape.heads, kv, kv)
    )


def beside_cudnn(shape: Shape) -> Calls:
    """CuDNN and ours, on the same operands."""
    q, k, v = operands_of(shape)
    return {
        "cudnn": lambda: cudnn(q, k, v, shape.causal),
        "ts": lambda: ts.attention(q, k, v, causal=shape.causal),
    }


def refuse_wrong(out: torch.Tensor, right: torch.Tensor) -> None:
    """Raise if an answer is further from ``right`` than bf16, summed in another order, can be."""
    error = ((out.float() - right.float()).norm() / right.float().norm()).item()
    if not error < 1e-2:
        raise AssertionError(f"differs by {error:.3g}")


class Run(Session):
    """A run of attention sections. A dry run, on the CPU, is of `arrival` and `transformers` alone."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.clock: Any = WallClock() if self.dry else HiddenLaunchClock()
        self.flash = flash()

    def attention_record(self, name: str = "attention", **extra: Any) -> Record:
        """The record that sections share."""
        return self.record(name, peers={"fa4": self.flash is not None}, **extra)

    def time(self, calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
        """Milliseconds of each."""
        return self.clock.milliseconds(calls)

    def both_clocks(self, calls: dict[str, Callable[[], Any]]) -> dict[str, dict[str, float]]:
        """Milliseconds of each as called (``ms``), and with the host ahead (``gpu_ms``)."""
        found = both_clocks(calls, self.clock, rounds=3 if self.dry else 11, many=2 if self.dry else 10)
        return {clock: {name: round(ms, 3) for name, ms in of.items()} for clock, of in found.items()}

    def measure(self, section: str, shapes: Iterable[Shape], calls: Callable[[Shape], Calls],
                record: str = "attention") -> None:  # fmt: skip
        """A row a shape: the calls, checked and timed."""
        made = self.attention_record(record)
        items = {f"{section} {shape.name}".strip(): shape for shape in shapes}
        self.each(made, items, lambda name, shape: self.row(made, name, shape.operations, calls(shape),
                                                            **shape._asdict()))  # fmt: skip

    def each(self, record: Record, items: dict[str, Any], row: Callable[[str, Any], Row]) -> None:
        """A row an item, by its name."""
        self.rows(record, items, lambda name: row(name, items[name]))

    def row(
        self, record: Record, name: str, operations: float, calls: Calls, reference: torch.Tensor | None = None,
        **more: Any,
    ) -> Row:  # fmt: skip
        """Check the calls against one another, or ``reference``, and time those that are right."""
        return self.rated(record, name, operations, self.right(record, name, calls, reference), **more)

    def right(self, record: Record, name: str, calls: Calls, reference: torch.Tensor | None = None) -> Calls:
        """The calls whose answers are those of ``reference``, or of the first call; the others are failures."""
        kept: Calls = {}
        for what, call in calls.items():
            try:
                out = call()
                torch.cuda.synchronize()
                ts.check()
                reference = out.float() if reference is None else reference
                refuse_wrong(out, reference)
            except Exception as error:
                record.fail(f"{name} {what}: {type(error).__name__}: {error}")
            else:
                kept[what] = call
        return kept

    def rated(self, record: Record, name: str, operations: float, calls: Calls, peak: float = HOPPER_PEAK,
              **more: Any) -> Row:  # fmt: skip
        """Time calls that are right; a rate above the peak is a failure."""
        found = rates(operations, self.time(calls))
        for what in [what for what, rate in found.items() if rate > peak]:
            record.fail(f"{name} {what}: {found.pop(what)} TFLOP/s is above the peak")
        return {"name": name, "tflops": found, **more}
