"""The shapes, layouts and dtypes of the GPU tests: data, so that their kernels can be compiled without a GPU."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch

from error_rule import Maths

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
E4M3, E5M2 = FP8 = torch.float8_e4m3fn, torch.float8_e5m2
LAYOUTS = ("nn", "nt", "tn", "tt")


class Product:
    """What `Case` and `hopper_cases.HopperCase` have in common."""

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

    def maths(self, operands: dict[str, torch.Tensor | None], **more: Any) -> Maths:
        """What the answer is an answer to."""
        how = {"alpha": self.alpha, "beta": self.beta, "activation": self.activation, "out_dtype": self.result}
        return Maths(**operands, **how, fast_accum=self.fast_accum, **more)


def dtype_names(*dtypes: torch.dtype | None) -> list[str]:
    return [str(dtype).removeprefix("torch.") for dtype in dtypes if dtype is not None]


@dataclass(frozen=True)
class Case(Product):
    """``[batch, m, k] @ [batch, k, n]``.

    ``layout`` says of a and b whether the last dimension is contiguous (n) or the one before (t). ``pad`` elements lie
    between rows, ``offset`` before the first. ``shared`` operands have batch stride 0. ``scales``: none, tensor, row,
    mixed (one a row of a, one for all of b), or odd (views of something wider).
    """

    m: int
    n: int
    k: int
    dtype: torch.dtype = BF16
    layout: str = "nn"
    batch: int = 0
    out_dtype: torch.dtype | None = None
    bias: bool = False
    residual: bool = False
    alpha: float = 1.0
    beta: float = 1.0
    activation: str | None = None
    schedule: str = "auto"
    workers: int | None = None
    tf32: bool = False
    pad: int = 0
    offset: int = 0
    shared: str = ""
    strided_out: bool = False
    b_dtype: torch.dtype | None = None
    scales: str = "none"
    fast_accum: bool = True

    @property
    def name(self) -> str:
        batch = f"{self.batch}x" if self.batch else ""
        rest = [
            str(value).removeprefix("torch.") if value is not True else name
            for name, value in (
                ("tf32", self.tf32), ("out", self.out_dtype), ("bias", self.bias), ("residual", self.residual),
                ("", self.activation), ("", self.schedule if self.schedule != "auto" else None),
                ("", f"{self.workers}w" if self.workers else None), ("", f"pad{self.pad}" if self.pad else None),
                ("", f"off{self.offset}" if self.offset else None),
                ("", f"shared-{self.shared}" if self.shared else None),
                ("strided-out", self.strided_out), ("", f"alpha{self.alpha}" if self.alpha != 1 else None),
                ("x", self.b_dtype), ("", f"{self.scales}-scales" if self.scales != "none" else None),
                ("", None if self.fast_accum else "precise"),
            )
            if value
        ]  # fmt: skip
        return "-".join([f"{batch}{self.m}x{self.n}x{self.k}", *dtype_names(self.dtype), self.layout, *rest])

    def matrix(
        self, rows: int, cols: int, how: str, device: str, shared: bool, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Fresh random numbers in the case's layout, with NaN between the rows."""
        batch = 1 if shared or not self.batch else self.batch
        outer, inner = (rows, cols) if how == "n" else (cols, rows)
        store = torch.full((self.offset + batch * outer * (inner + self.pad),), float("nan"), dtype=F32, device=device)
        x = store.to(dtype or self.dtype)[self.offset :].view(batch, outer, inner + self.pad)[:, :, :inner]
        if device != "meta":
            x.copy_(torch.randn(x.shape, device=device))
        x = x if how == "n" else x.transpose(1, 2)
        if not self.batch:
            return x[0]
        return x.expand(self.batch, rows, cols)

    def operands(self, device: str) -> dict[str, torch.Tensor | None]:
        """a, b, bias, residual."""
        return {
            "a": self.matrix(self.m, self.k, self.layout[0], device, "a" in self.shared),
            "b": self.matrix(self.k, self.n, self.layout[1], device, "b" in self.shared, self.b_dtype),
            "bias": torch.randn(self.n, device=device).to(self.addend) if self.bias else None,
            "residual": torch.randn((*self.lead, self.m, self.n), device=device).to(self.addend)
            if self.residual
            else None,
        }

    def scale(self, device: str) -> dict[str, torch.Tensor | None]:
        """scale_a and scale_b, as the registered ops take them: positive, of different magnitudes."""
        row, column = (torch.randn(*self.lead, *s, device=device).exp() for s in ((self.m, 1), (1, self.n)))
        a, b = {
            "none": (None, None),
            "tensor": (torch.full((), 0.75, device=device), torch.full((1, 1), 3.0, device=device)),
            "row": (row, column),
            "mixed": (row, torch.full((1,), 3.0, device=device)),
            "odd": (torch.cat([row, row], -1)[..., 1:], torch.cat([column, column], -2)[..., 1:, :]),
        }[self.scales]
        return {"scale_a": a, "scale_b": b}

    def output(self, device: str) -> torch.Tensor:
        """An output of NaN."""
        columns = 2 * self.n + 3 if self.strided_out else self.n
        rows = torch.full((*self.lead, self.m, columns), float("nan"), dtype=self.result, device=device)
        return rows[..., : 2 * self.n : 2] if self.strided_out else rows


def by_name(case: Any) -> str:
    """For parametrize's ``ids``."""
    return case.name


def _cases() -> list[Case]:
    cases = []
    # Every layout and dtype, aligned and ragged, every schedule.
    for dtype, layout in itertools.product((BF16, F16, F32), LAYOUTS):
        cases.append(Case(512, 768, 640, dtype, layout))
        cases.append(Case(333, 517, 201, dtype, layout))
    for layout, schedule in itertools.product(LAYOUTS, ("static", "dynamic", "stream_k")):
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
    # Epilogues.
    full = {"bias": True, "residual": True, "alpha": 1.5, "beta": -0.5}
    for activation, schedule in itertools.product(("relu", "gelu", "gelu_tanh", "silu"), ("dynamic", "stream_k")):
        cases.append(Case(520, 776, 640, BF16, "nt", activation=activation, schedule=schedule, **full))
    cases += [
        Case(333, 517, 201, F16, activation="gelu", **full),
        Case(512, 768, 640, F32, activation="silu", **full),
        Case(512, 768, 640, BF16, out_dtype=F32),
        Case(512, 768, 640, F16, out_dtype=F32, activation="gelu", **full),
        Case(512, 768, 640, F32, out_dtype=BF16, bias=True),
        Case(512, 768, 640, BF16, strided_out=True),
        Case(333, 517, 201, BF16, strided_out=True, schedule="stream_k"),
    ]
    # Batches, shared operands, strides, addresses.
    cases += [
        Case(130, 140, 96, BF16, batch=5),
        Case(130, 140, 96, BF16, batch=5, shared="a"),
        Case(130, 140, 96, BF16, "nt", batch=5, shared="b", schedule="stream_k", **full, activation="relu"),
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
    for schedule, scales in itertools.product(("static", "dynamic", "stream_k"), ("none", "row", "mixed", "odd")):
        cases.append(Case(1000, 1040, 800, E4M3, "nt", schedule=schedule, scales=scales))
    for m, n, k in (
        (1, 1, 1), (1, 4096, 512), (4096, 1, 512), (16, 16, 16), (17, 15, 33), (127, 129, 63), (128, 256, 128),
        (129, 257, 129), (64, 4096, 4096), (2048, 2048, 2048), (5, 7, 0), (0, 7, 5), (5, 0, 7),
    ):  # fmt: skip
        cases.append(Case(m, n, k, E4M3, "nt", scales="row"))
    full = {"bias": True, "residual": True, "alpha": 1.5, "beta": -0.5}
    for out, scales in itertools.product((BF16, F16, F32), ("tensor", "row")):
        # In float32 what the tensor cores drop is seen; how much that is depends on where a kernel cuts K.
        how = {"out_dtype": out, "scales": scales, "fast_accum": out != F32, **full}
        cases.append(Case(520, 784, 640, E4M3, "nt", activation="gelu", schedule="stream_k", **how))
        cases.append(Case(333, 517, 201, E5M2, "nn", activation="silu", b_dtype=E4M3, **how))
    cases += [
        Case(512, 768, 640, E4M3, "nt", strided_out=True, scales="row"),
        Case(144, 160, 96, E4M3, batch=5, scales="row"),
        Case(130, 140, 96, E4M3, "nt", batch=5, shared="a", scales="odd"),
        Case(144, 160, 96, E4M3, "nt", batch=5, shared="b", schedule="stream_k", scales="mixed"),
        Case(512, 768, 640, E4M3, "nt", pad=16, scales="row"),
        Case(512, 768, 640, E4M3, "nt", pad=3, scales="row"),
        Case(512, 768, 640, E4M3, "nt", offset=1, scales="row"),
        Case(512, 768, 640, E4M3, "tt", offset=16, pad=16, scales="tensor"),
        # Operands of more bits are scaled by the same code.
        Case(512, 768, 640, BF16, "nt", scales="row", schedule="stream_k", activation="relu", **full),
        Case(333, 517, 201, F32, scales="tensor"),
    ]  # fmt: skip
    return cases


CASES = _cases()
FP8_CASES = _fp8_cases()
#: Worker counts; 1 to 132 is an H100's.
WORKERS = (1, 2, 3, 5, 7, 16, 31, 64, 100, 131, 132)
WORKER_CASES = [
    replace(Case(1100, 1300, 512, BF16, "nt"), workers=workers, schedule=schedule)
    for workers, schedule in itertools.product(WORKERS, ("static", "dynamic", "stream_k"))
]

# Arrivals ------------------------------------------------------------------------------------------------------------

#: One shape for all: its tiles straddle the chunks of `odd`, which are no multiple of any tile.
M, N, K = 1000, 1040, 512
KINDS = ("static", "dynamic", "stream_k")
UNIFORM = {"uniform": 128, "odd": 150}
BOUNDS = (0, 10, 10, 300, 301, 777, M)
BOUNDS_N = (0, 100, 100, 611, N)


def arrivals(chunking: str, device: str = "cuda"):
    """An `Arrival` of `M` rows for each pivot."""
    from tilestream.arrival import Arrival

    if chunking == "ragged":
        return (Arrival.ragged(BOUNDS, pivot, device=device) for pivot in range(len(BOUNDS) - 1))
    size = UNIFORM[chunking]
    count = -(-M // size)
    return (Arrival.uniform(size, count, pivot, device=device) for pivot in range(count))
