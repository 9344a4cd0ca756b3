"""The cases of the GPU tests' GEMMs: data, so that they can be planned without a GPU. `hopper_cases` has Hopper's."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from typing import Any

import torch

from error_rule import Maths
from tilestream.core.chunks import Chunks
from tilestream.core.device import DeviceProperties
from tilestream.launch.gemm_arguments import Layout, is_aligned
from tilestream.ops import gpu
from tilestream.plan import tma
from tilestream.plan.arrival_order import OrderName, in_arrival_order
from tilestream.plan.candidate import Forced
from tilestream.plan.plan import Plan, of_candidate
from tilestream.plan.planner import plan_problem
from tilestream.plan.policy import hopper
from tilestream.plan.problem import Incoming, Problem, dtype_name, vector_of

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
E4M3, E5M2 = FP8 = torch.float8_e4m3fn, torch.float8_e5m2
LAYOUTS = ("nn", "nt", "tn", "tt")
KINDS = ("static", "dynamic", "stream_k")
#: How an output is laid out: rows at multiples of 16 bytes; rows without a gap; columns; rows of odd strides; every
#: second column; an odd address. TMA stores the first three if rows (columns) are multiples of 16 bytes long.
OUTS = ("rows", "tight", "columns", "odd", "strided", "offset")


@dataclass(frozen=True)
class Case:
    """``[batch, m, k] @ [batch, k, n]``, by what a call picks; with a backend, by a plan that takes what is given here.

    Attributes
    ----------
    layout
        Of a and b: whether the last dimension is contiguous (n) or the one before (t).
    pad, offset
        Elements, of NaN, between an operand's rows and before the first. None: such that TMA can address any extents.
    shared
        The operands that have batch stride 0.
    out, residual
        Of `OUTS`; whether a residual lies in ``rows`` or in ``columns``, empty for none.
    scales
        ``none``, ``tensor``, ``row``, ``mixed`` (a row's of a, one of b), or ``odd`` (views of something wider).
    tf32
        Whether torch's flag allows it; a plan with a backend does not ask.
    swapped
        Whether the operands are swapped, where there are two tiles of such rows and columns.
    rows, columns
        The bounds of the chunks in which A's rows (of all batches) and B's columns arrive.
    pivot
        The first chunk of the raster.
    """

    m: int
    n: int
    k: int
    dtype: torch.dtype = BF16
    layout: str = "nn"
    batch: int = 0
    b_dtype: torch.dtype | None = None
    out_dtype: torch.dtype | None = None
    pad: int | None = 0
    offset: int = 0
    shared: str = ""
    out: str = "tight"
    bias: bool = False
    residual: str = ""
    alpha: float = 1.0
    beta: float = 1.0
    activation: str | None = None
    scales: str = "none"
    fast_accum: bool = True
    tf32: bool = False
    schedule: str = "auto"
    workers: int | None = None
    backend: str | None = None
    variant: str | None = None
    tile: tuple[int, int] | None = None
    swapped: bool | None = None
    queues: int | None = None
    shares: int | None = None
    stages: int | None = None
    registers: tuple[int, int] | None = None
    order: tuple[int, ...] | OrderName | None = None
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    pivot: int = 0

    @property
    def name(self) -> str:
        """The extents, and what is not as in most cases."""
        rest = [(field.name, getattr(self, field.name)) for field in fields(self)[3:] if field.name != "pad"]
        usual = {field.name: field.default for field in fields(self)}
        said = [f"{name}={_short(value)}" for name, value in rest if value != usual[name]]
        said += [f"pad={self.pad}"] if self.pad else []
        return "-".join([f"{self.batch or 1}x{self.m}x{self.n}x{self.k}", *said])

    @property
    def lead(self) -> tuple[int, ...]:
        """The batch's extent, where there is a batch."""
        return (self.batch,) if self.batch else ()

    @property
    def fp8(self) -> bool:
        return self.dtype in FP8

    @property
    def addend(self) -> torch.dtype:
        """Of bias and residual."""
        return BF16 if self.fp8 else self.dtype

    @property
    def result(self) -> torch.dtype:
        return self.out_dtype or self.addend

    def _matrix(self, rows: int, cols: int, how: str, dtype: torch.dtype, device: str, shared: bool) -> torch.Tensor:
        """Fresh random numbers in NaN."""
        batch = 1 if shared or not self.batch else self.batch
        outer, inner = (rows, cols) if how == "n" else (cols, rows)
        if self.pad is None:
            offset = 16 // dtype.itemsize
            pitch = -(-(inner + 1) // offset) * offset
            step = (outer + 1) * pitch
        else:
            offset, pitch = self.offset, max(inner + self.pad, 1)
            step = outer * pitch
        x = poisoned(offset + batch * step, dtype, device).as_strided((batch, outer, inner), (step, pitch, 1), offset)
        if device != "meta":
            x.copy_(torch.randn(x.shape, device=device))
        x = x if how == "n" else x.transpose(1, 2)
        return x.expand(self.batch, rows, cols) if self.batch else x[0]

    def operands(self, device: str) -> dict[str, torch.Tensor | None]:
        """a, b, bias, residual, scale_a, scale_b: the scales are positive, of different magnitudes."""
        m, n, lead = self.m, self.n, self.lead
        residual = None
        if self.residual:
            residual = torch.randn((*lead, *((m, n) if self.residual == "rows" else (n, m))), device=device)
            residual = residual.to(self.addend)
        row, column = (torch.randn(*lead, *s, device=device).exp() for s in ((m, 1), (1, n)))
        scale_a, scale_b = {
            "none": (None, None),
            "tensor": (torch.full((), 0.75, device=device), torch.full((1, 1), 3.0, device=device)),
            "row": (row, column),
            "mixed": (row, torch.full((1,), 3.0, device=device)),
            "odd": (torch.cat([row, row], -1)[..., 1:], torch.cat([column, column], -2)[..., 1:, :]),
        }[self.scales]
        return {
            "a": self._matrix(m, self.k, self.layout[0], self.dtype, device, "a" in self.shared),
            "b": self._matrix(self.k, n, self.layout[1], self.b_dtype or self.dtype, device, "b" in self.shared),
            "bias": torch.randn(n, device=device).to(self.addend) if self.bias else None,
            "residual": residual.mT if residual is not None and self.residual == "columns" else residual,
            "scale_a": scale_a,
            "scale_b": scale_b,
        }

    def output(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """An output of NaN, and the larger piece of NaN that it is a view of."""
        batch, lead = max(self.batch, 1), 16 // self.result.itemsize
        outer, inner = (self.n, self.m) if self.out == "columns" else (self.m, self.n)
        pitch, apart, offset = -(-(inner + 1) // lead) * lead, 1, 2 * lead
        if self.out == "tight":
            pitch = max(inner, 1)
        elif self.out == "odd":
            pitch = next(p for p in itertools.count(inner + 1) if p * self.result.itemsize % 16)
        elif self.out == "strided":
            pitch, apart = 2 * inner + 3, 2
        elif self.out == "offset":
            offset += 1
        step = outer * pitch if self.out == "tight" else (outer + 1) * pitch
        store = poisoned(offset + batch * step + 2 * pitch, self.result, device)
        view = store.as_strided((batch, outer, inner), (step, pitch, apart), offset)
        view = view.transpose(1, 2) if self.out == "columns" else view
        return view if self.batch else view[0], store

    def plan(self, device: DeviceProperties) -> tuple[Plan, Layout]:
        """The plan, and the layout of the launch: without a GPU."""
        a, b, bias, residual, scale_a, scale_b = self.operands("meta").values()
        out, _ = self.output("meta")
        assert a is not None
        assert b is not None
        layout = Layout(
            gpu._strides(a), gpu._strides(b), gpu._strides(out), None if bias is None else 1,
            None if residual is None or self.beta == 0 else gpu._strides(residual), self.alpha != 1,
            self.activation or "none", gpu._scale_strides(scale_a, -2), gpu._scale_strides(scale_b, -1),
        )  # fmt: skip
        no_tma = gpu._no_tma(a, b, layout)
        plain = not (self.bias or self.residual or self.activation or self.alpha != 1 or self.scales != "none")
        problem = Problem(
            self.m, self.n, self.k, self.batch or 1, dtype_name(self.dtype), dtype_name(self.result),
            *(Incoming(chunks_of(bounds), self.pivot) if bounds else None for bounds in (self.rows, self.columns)),
            shared_rows=self.batch > 1 and a.stride(0) == 0, aligned=all(map(_is_aligned, (a, b))),
            vectors=(_vector_of(a), _vector_of(b)), no_tma=no_tma[0] or no_tma[1], not_by_tma=tma.which(*no_tma),
            plain=self.backend is not None or (plain and gpu._by_tma(out, layout)),
            b_dtype=dtype_name(b.dtype) if b.dtype != a.dtype else "", scales=self.scales,
            fast_accum=self.fast_accum or not self.fp8, tf32=self.tf32 or self.forced_tf32,
        )  # fmt: skip
        make = plan_problem if self.order is None else plan_problem.__wrapped__
        plan = make(
            problem, self.workers, self.schedule, self.tile, self.order, self.queues, self.shares, device=device,
            backend=self.backend, variant=self.variant, stages=self.stages, registers=self.registers,
        )  # fmt: skip
        if self.swapped not in (None, plan.swap_ab):
            forced = Forced(
                self.tile, None if isinstance(self.order, str) else self.order, self.queues, self.shares, self.variant,
                self.stages, self.registers,
            )  # fmt: skip
            found = hopper.candidates(
                problem, device, self.workers or device.workers, kinds=(self.schedule,), forced=forced
            )
            found = [one for one in found if one.swap_ab == self.swapped]
            if not found:
                raise NotImplementedError(f"no such tile for {self.name}")
            best = min(found, key=lambda one: one.predicted)
            if self.rows or self.columns:
                best, _ = in_arrival_order(problem, "hopper", best, False, None, self.queues)
            plan = of_candidate(problem, device, "hopper", best, "a test's")
        return plan, layout

    @property
    def forced_tf32(self) -> bool:
        """Whether float32 operands are rounded to tf32, whatever torch's flag says."""
        return self.backend == "hopper" and self.dtype == F32

    def maths(self, operands: dict[str, torch.Tensor | None]) -> Maths:
        """What the answer is an answer to."""
        return Maths(
            **operands, alpha=self.alpha, beta=self.beta, activation=self.activation, out_dtype=self.result,
            fast_accum=self.fast_accum, tf32=self.forced_tf32,
        )  # fmt: skip


def _is_aligned(x: torch.Tensor, width: int = 16) -> bool:
    batch, *strides = gpu._strides(x)
    rows, columns = x.shape[-2:]
    return is_aligned((rows, columns), tuple(strides), batch, x.storage_offset() * x.itemsize, width)


def _vector_of(x: torch.Tensor) -> int:
    return vector_of(x.itemsize, lambda width: _is_aligned(x, width))


def _short(value: Any) -> str:
    """A dtype without torch's name; of more than two numbers how many there are."""
    if isinstance(value, tuple) and len(value) > 2:
        return f"{len(value)} numbers"
    return str(value).removeprefix("torch.")


def by_name(case: Any) -> str:
    """For parametrize's ``ids``."""
    return case.name


def poisoned(count: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """``count`` NaNs."""
    return torch.full((count,), float("nan"), dtype=F32, device=device).to(dtype)


# What ops are called with ----------------------------------------------------------------------------------------

FULL: dict[str, Any] = {"bias": True, "residual": "rows", "alpha": 1.5, "beta": -0.5}


def _cases() -> list[Case]:
    cases = []
    # Every layout and dtype, aligned and ragged, every schedule.
    for dtype, layout in itertools.product((BF16, F16, F32), LAYOUTS):
        cases.append(Case(512, 768, 640, dtype, layout))
        cases.append(Case(333, 517, 201, dtype, layout))
    for layout, schedule in itertools.product(LAYOUTS, KINDS):
        cases.append(Case(1000, 1040, 800, BF16, layout, schedule=schedule))
    # tf32, as torch's flag allows it.
    cases += [Case(512, 768, 640, F32, layout, tf32=True) for layout in LAYOUTS]
    cases += [Case(333, 517, 201, F32, tf32=True), Case(1040, 1040, 800, F32, tf32=True, schedule="stream_k")]
    # Extents of one, of nothing, and around a tile's.
    for m, n, k in (
        (1, 1, 1), (1, 4096, 512), (4096, 1, 512), (16, 16, 16), (17, 15, 33), (127, 129, 63), (128, 256, 64),
        (129, 257, 65), (64, 4096, 4096), (2048, 2048, 2048), (3, 5, 10000), (5, 7, 0), (0, 7, 5), (5, 0, 7),
    ):  # fmt: skip
        cases.append(Case(m, n, k))
    # As a Linear has it: few rows, few columns, few tiles of a long K.
    cases += [
        Case(m, n, k, BF16, "nt")
        for m, n, k in ((1, 4096, 4096), (16, 4096, 2048), (200, 8192, 512), (8192, 128, 512), (128, 128, 8192))
    ]
    # Epilogues.
    for activation, schedule in itertools.product(("relu", "gelu", "gelu_tanh", "silu"), ("dynamic", "stream_k")):
        cases.append(Case(520, 776, 640, BF16, "nt", activation=activation, schedule=schedule, **FULL))
    cases += [
        Case(333, 517, 201, F16, activation="gelu", **FULL),
        Case(512, 768, 640, F32, activation="silu", **FULL),
        Case(512, 768, 640, BF16, out_dtype=F32),
        Case(512, 768, 640, F16, out_dtype=F32, activation="gelu", **FULL),
        Case(512, 768, 640, F32, out_dtype=BF16, bias=True),
        Case(512, 768, 640, BF16, out="strided"),
        Case(333, 517, 201, BF16, out="strided", schedule="stream_k"),
    ]
    # Batches, shared operands, strides, addresses.
    cases += [
        Case(130, 140, 96, BF16, batch=5),
        Case(130, 140, 96, BF16, batch=5, shared="a"),
        Case(130, 140, 96, BF16, "nt", batch=5, shared="b", schedule="stream_k", **FULL, activation="relu"),
        *(Case(130, 136, 96, BF16, layout, batch=5, shared=shared) for layout, shared in (("nn", "a"), ("nt", "b"))),
        Case(256, 256, 256, F16, "tn", batch=3),
        Case(65, 33, 100, F32, "tt", batch=7),
        Case(512, 768, 640, BF16, pad=16),
        Case(512, 768, 640, BF16, pad=3),
        Case(512, 768, 640, BF16, offset=1),
        Case(512, 768, 640, BF16, "tt", offset=8, pad=8),
    ]
    return cases


def _fp8_cases() -> list[Case]:
    cases = []
    # Every layout and pair, aligned and ragged, how products are added up, what they are scaled by.
    for layout, scales, fast in itertools.product(LAYOUTS, ("tensor", "row"), (True, False)):
        how = {"scales": scales, "fast_accum": fast}
        cases.append(Case(512, 768, 640, E4M3, layout, **how))
        cases.append(Case(333, 517, 201, E4M3, layout, **how))
    for (a, b), layout in itertools.product(((E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)), ("nn", "nt")):
        cases.append(Case(512, 768, 640, a, layout, b_dtype=b, scales="row"))
        cases.append(Case(333, 517, 201, a, layout, b_dtype=b, scales="tensor", fast_accum=False))
    for schedule, scales in itertools.product(KINDS, ("none", "row", "mixed", "odd")):
        cases.append(Case(1000, 1040, 800, E4M3, "nt", schedule=schedule, scales=scales))
    for m, n, k in (
        (1, 1, 1), (1, 4096, 512), (4096, 1, 512), (16, 16, 16), (17, 15, 33), (127, 129, 63), (128, 256, 128),
        (129, 257, 129), (64, 4096, 4096), (2048, 2048, 2048), (5, 7, 0), (0, 7, 5), (5, 0, 7),
    ):  # fmt: skip
        cases.append(Case(m, n, k, E4M3, "nt", scales="row"))
    for out, scales in itertools.product((BF16, F16, F32), ("tensor", "row")):
        # In float32 what the tensor cores drop is seen; how much that is depends on where a kernel cuts K.
        how = {"out_dtype": out, "scales": scales, "fast_accum": out != F32, **FULL}
        cases.append(Case(520, 784, 640, E4M3, "nt", activation="gelu", schedule="stream_k", **how))
        cases.append(Case(333, 517, 201, E5M2, "nn", activation="silu", b_dtype=E4M3, **how))
    cases += [
        Case(512, 768, 640, E4M3, "nt", out="strided", scales="row"),
        Case(144, 160, 96, E4M3, batch=5, scales="row"),
        Case(130, 140, 96, E4M3, "nt", batch=5, shared="a", scales="odd"),
        Case(144, 160, 96, E4M3, "nt", batch=5, shared="b", schedule="stream_k", scales="mixed"),
        Case(512, 768, 640, E4M3, "nt", pad=16, scales="row"),
        Case(512, 768, 640, E4M3, "nt", pad=3, scales="row"),
        Case(512, 768, 640, E4M3, "nt", offset=1, scales="row"),
        Case(512, 768, 640, E4M3, "tt", offset=16, pad=16, scales="tensor"),
        # Operands of more bits are scaled by the same code.
        Case(512, 768, 640, BF16, "nt", scales="row", schedule="stream_k", activation="relu", **FULL),
        Case(333, 517, 201, F32, scales="tensor"),
    ]  # fmt: skip
    return cases


CASES = _cases()
FP8_CASES = _fp8_cases()

# What arrives --------------------------------------------------------------------------------------------------------


def uniform(rows: int, size: int) -> tuple[int, ...]:
    """The bounds of chunks of one size, but for the last."""
    return (*range(0, rows, size), rows)


def chunks_of(bounds: tuple[int, ...]) -> Chunks:
    """Uniform where they are."""
    size = bounds[1] - bounds[0]
    return Chunks.uniform(bounds[-1], size) if size > 0 and bounds == uniform(bounds[-1], size) else Chunks(bounds)


#: One shape for all: its tiles straddle the chunks of `odd`, which are no multiple of any tile.
M, N, K = 1000, 1040, 512
BOUNDS_N = (0, 100, 100, 611, N)
CHUNKINGS = {"uniform": uniform(M, 128), "odd": uniform(M, 150), "ragged": (0, 10, 10, 300, 301, 777, M)}
