"""The cases of `test_gpu_hopper.py`: data, so that their kernels can be compiled without a GPU, too.

A kernel is compiled for a tile, a kind of schedule, dtypes, layouts and an epilogue; extents, strides and workers are
not compiled in. So each kernel has several cases.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from gpu_cases import BF16, E4M3, E5M2, F16, F32, KINDS, LAYOUTS, Case, Product, dtype_names

from error_rule import Maths
from tilestream.core.chunks import Chunks
from tilestream.core.device import DeviceProperties
from tilestream.core.schedule import Kind
from tilestream.launch.gemm_arguments import Layout
from tilestream.ops import gpu
from tilestream.plan.arrival_order import OrderName, in_arrival_order
from tilestream.plan.candidate import Forced
from tilestream.plan.plan import Plan, of_candidate
from tilestream.plan.planner import plan_problem
from tilestream.plan.policy import hopper
from tilestream.plan.policy.hopper import REGISTERS, TILES, Tile
from tilestream.plan.problem import Incoming, Problem, dtype_name

#: How an output is laid out: rows at multiples of 16 bytes; rows without a gap; columns; rows of odd strides; every
#: second column; an odd address. TMA stores the first three if rows (columns) are multiples of 16 bytes long.
OUTS = ("rows", "tight", "columns", "odd", "strided", "offset")


@dataclass(frozen=True)
class HopperCase(Product):
    """``[batch, m, k] @ [batch, k, n]`` by a plan that takes what is given here.

    ``swapped``: whether the operands are swapped, where there are two tiles of such rows and columns.

    Rows of operands are padded so that TMA can address any extents, and NaN surrounds each operand. ``layout`` as in
    `tilestream.plan`; ``shared`` operands have batch stride 0. ``rows``, ``columns``: the bounds of the chunks in which
    A's rows (of all batches) and B's columns arrive; ``pivot``: the first chunk of the raster.
    """

    m: int
    n: int
    k: int
    variant: str | None = None
    tile: tuple[int, int] | None = None
    swapped: bool | None = None
    dtype: torch.dtype = BF16
    b_dtype: torch.dtype | None = None
    out_dtype: torch.dtype | None = None
    layout: str = "nn"
    batch: int = 0
    shared: str = ""
    schedule: Kind = "dynamic"
    workers: int | None = None
    queues: int | None = None
    shares: int | None = None
    stages: int | None = None
    registers: tuple[int, int] | None = None
    order: tuple[int, ...] | OrderName | None = None
    out: str = "rows"
    bias: bool = False
    residual: str = ""
    alpha: float = 1.0
    beta: float = 1.0
    activation: str | None = None
    scales: str = "none"
    fast_accum: bool = True
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    pivot: int = 0

    @property
    def name(self) -> str:
        batch = f"{self.batch}x" if self.batch else ""
        tile = "x".join(map(str, self.tile[::-1] if self.swapped else self.tile)) if self.tile else ""
        tile += "swapped" if self.swapped else ""
        dtypes = dtype_names(self.dtype, self.b_dtype, self.out_dtype)
        rest = [
            f"{name}{value}" if value is not True else name
            for name, value in (
                ("", self.workers and f"{self.workers}w"), ("", self.queues and f"{self.queues}q"),
                ("", self.shares and f"{self.shares}shares"), ("", self.stages and f"{self.stages}stages"),
                ("", self.registers and f"{self.registers[0]}-{self.registers[1]}registers"),
                (self.order if isinstance(self.order, str) else "own-order", self.order is not None),
                ("shared-", self.shared), ("", self.out if self.out != "rows" else ""), ("bias", self.bias),
                ("residual-", self.residual), ("alpha", self.alpha if self.alpha != 1 else None),
                ("", self.activation), ("scales-", self.scales if self.scales != "none" else ""),
                ("precise", not self.fast_accum), ("rows", len(self.rows)), ("columns", len(self.columns)),
                ("pivot", self.pivot),
            )
            if value
        ]  # fmt: skip
        parts = [self.variant, tile, f"{batch}{self.m}x{self.n}x{self.k}", *dtypes, self.layout, self.schedule, *rest]
        return "-".join(part for part in parts if part)

    @property
    def tf32(self) -> bool:
        return self.dtype == F32

    def _matrix(self, rows: int, cols: int, how: str, dtype: torch.dtype, device: str, shared: bool) -> torch.Tensor:
        batch = 1 if shared or not self.batch else self.batch
        outer, inner = (rows, cols) if how == "n" else (cols, rows)
        lead = 16 // dtype.itemsize
        pitch = -(-(inner + 1) // lead) * lead
        step = (outer + 1) * pitch
        x = poisoned(lead + batch * step, dtype, device).as_strided((batch, outer, inner), (step, pitch, 1), lead)
        if device != "meta":
            x.copy_(torch.randn(x.shape, device=device))
        x = x if how == "n" else x.transpose(1, 2)
        return x.expand(self.batch, rows, cols) if self.batch else x[0]

    def operands(self, device: str) -> dict[str, torch.Tensor | None]:
        """a, b, bias, residual, scale_a, scale_b."""
        a = self._matrix(self.m, self.k, self.layout[0], self.dtype, device, "a" in self.shared)
        b = self._matrix(self.k, self.n, self.layout[1], self.b_dtype or self.dtype, device, "b" in self.shared)
        residual = None
        if self.residual == "rows":
            residual = torch.randn((*self.lead, self.m, self.n), device=device).to(self.addend)
        elif self.residual:
            residual = torch.randn((*self.lead, self.n, self.m), device=device).to(self.addend).mT
        of_a, of_b = {"row": ((*self.lead, self.m, 1), (*self.lead, 1, self.n))}.get(self.scales, ((), ()))
        scaled = self.scales != "none"
        return {
            "a": a,
            "b": b,
            "bias": torch.randn(self.n, device=device).to(self.addend) if self.bias else None,
            "residual": residual,
            "scale_a": torch.rand(of_a, device=device) + 0.5 if scaled else None,
            "scale_b": torch.rand(of_b, device=device) + 0.5 if scaled else None,
        }

    def output(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """An output of NaN, and the larger piece of NaN that it is a view of."""
        batch, m, n, size = max(self.batch, 1), self.m, self.n, self.result.itemsize
        lead = 16 // size
        outer, inner = (n, m) if self.out == "columns" else (m, n)
        pitch, apart, offset = -(-(inner + 1) // lead) * lead, 1, 2 * lead
        if self.out == "tight":
            pitch = inner
        elif self.out == "odd":
            pitch = next(p for p in itertools.count(inner + 1) if p * size % 16)
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
        """The plan, and the layout that `tilestream.ops.gpu` makes of such operands: without a GPU."""
        operands, (out, _) = self.operands("meta"), self.output("meta")
        a, b, bias, residual, scale_a, scale_b = operands.values()
        assert a is not None
        assert b is not None
        layout = Layout(
            gpu._strides(a), gpu._strides(b), gpu._strides(out), None if bias is None else 1,
            None if residual is None or self.beta == 0 else gpu._strides(residual), self.alpha != 1,
            self.activation or "none", gpu._scale_strides(scale_a, -2), gpu._scale_strides(scale_b, -1),
        )  # fmt: skip
        b_dtype = dtype_name(b.dtype) if b.dtype != a.dtype else ""
        problem = Problem(
            self.m, self.n, self.k, self.batch or 1, dtype_name(a.dtype), dtype_name(out.dtype),
            *(Incoming(chunks_of(bounds), self.pivot) if bounds else None for bounds in (self.rows, self.columns)),
            shared_rows=self.batch > 1 and a.stride(0) == 0, no_tma=gpu._no_tma(a, b, layout), b_dtype=b_dtype,
            scales=self.scales, fast_accum=self.fast_accum or not self.fp8, tf32=self.tf32,
        )  # fmt: skip
        make = plan_problem if self.order is None else plan_problem.__wrapped__
        plan = make(
            problem, self.workers, self.schedule, self.tile, self.order, self.queues, self.shares, device=device,
            backend="hopper", variant=self.variant, stages=self.stages, registers=self.registers,
        )  # fmt: skip
        if self.swapped not in (None, plan.swap_ab):
            found = hopper.candidates(
                problem, device, self.workers or device.workers, kinds=(self.schedule,), forced=Forced(
                    self.tile, None if isinstance(self.order, str) else self.order, self.queues, self.shares,
                    self.variant, self.stages, self.registers,
                ),
            )  # fmt: skip
            found = [one for one in found if one.swap_ab == self.swapped]
            if not found:
                raise NotImplementedError(f"no such tile for {self.name}")
            best = min(found, key=lambda one: one.predicted)
            if self.rows or self.columns:
                best, _ = in_arrival_order(problem, "hopper", best, False, None, self.queues)
            plan = of_candidate(problem, device, "hopper", best, "a test's")
        return plan, layout

    def maths(self, operands: dict[str, torch.Tensor | None], **more: Any) -> Maths:
        """Of float32 operands as rounded to tf32."""
        return super().maths(operands, tf32=self.tf32, **more)


def poisoned(count: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """``count`` NaNs."""
    return torch.full((count,), float("nan"), dtype=F32, device=device).to(dtype)


def chunks_of(bounds: tuple[int, ...]) -> Chunks:
    """Uniform where they are: all of one size, but for the last."""
    size, count = bounds[1] - bounds[0], len(bounds) - 1
    uniform = size > 0 and bounds == tuple(min(i * size, bounds[-1]) for i in range(count + 1))
    return Chunks.uniform(bounds[-1], size) if uniform else Chunks(bounds)


def ways(row: Tile) -> list[tuple[int, int]]:
    """The tiles of the output that a row of `TILES` makes: as it is, and with the operands swapped."""
    tiles = [(row.rows, row.columns), (row.columns, row.rows)]
    return tiles[: 1 if row.rows == row.columns else 2]


def _steps(row: Tile, dtype: torch.dtype = BF16) -> int:
    return row.block_k(dtype.itemsize)


def _row(variant: str, rows: int, columns: int) -> Tile:
    return next(row for row in TILES if row[:3] == (variant, rows, columns))


#: One tile a variant, and a few more: what most sections are run with. Of the last one the accumulator leaves no
#: registers for stream_k, nor for an epilogue that is to be fast.
FEW = tuple(_row(*name) for name in (("cooperative", 128, 128), ("ping_pong", 64, 128), ("single", 64, 64)))
MORE = tuple(
    _row(*name)
    for name in (
        ("cooperative", 128, 256), ("ping_pong", 128, 128), ("ping_pong", 64, 256), ("cooperative", 256, 96),
        ("cooperative", 256, 192),
    )
)  # fmt: skip
MANY = (*FEW, *MORE)
FULL = {"bias": True, "residual": "rows", "alpha": 1.5, "beta": -0.5}
_ANY = DeviceProperties("an H100", "portable", 132, 5e11, 3.3e12, "a stub", "sm_90", 232448)


def _case(row: Tile, m: int, n: int, k: int, *, swapped: bool = False, **how) -> HopperCase:
    return HopperCase(m, n, k, row.variant, ways(row)[swapped], swapped, **how)


def _has(row: Tile, **how) -> bool:
    """Whether the plan has such a tile for this."""
    try:
        _case(row, 512, 512, 512, **how).plan(_ANY)
    except NotImplementedError:
        return False
    return True


def _tiles() -> Iterator[HopperCase]:
    """Every tile, both ways round, every kind; the layouts in turn."""
    layouts = itertools.cycle(LAYOUTS)
    for row in TILES:
        for swapped, tile in enumerate(ways(row)):
            bm, bn, bk = *tile, row.block_k(2)
            how = {"swapped": bool(swapped), "layout": next(layouts)}
            # Several items a worker, the last tiles cut off; less than a tile, and than a stage. Stored by TMA.
            yield _case(row, 3 * bm - 5, 3 * bn - 8, 3 * bk + 9, workers=4, **how)
            yield _case(row, max(bm - 3, 1), 8, bk // 2 - 3, **how)
            # One row and a tile and more; an odd part of a tile. Stored from registers.
            yield _case(row, 1, 2 * bn + 1, 5 * bk + 1, schedule="static", **how)
            yield _case(row, bm // 2 + 1, bn // 2 + 1, bk // 2 - 3, schedule="static", **how)
            if _has(row, schedule="stream_k"):
                # Many steps of K, the last of them short, for fewer tiles than workers; one tile.
                yield _case(row, bm + 1, 2 * bn - 8, 13 * bk + 1, workers=7, schedule="stream_k", **how)
                yield _case(row, bm, 8, 5 * bk, schedule="stream_k", **how)


def _layouts() -> Iterator[HopperCase]:
    for row, layout in itertools.product(MANY, LAYOUTS):
        yield _case(row, 1000, 520, 264, layout=layout)
        yield _case(row, 129, 264, 1001, layout=layout)
        if row in FEW:
            yield _case(row, 300, 208, 333, swapped=len(ways(row)) > 1, layout=layout)


def _extents() -> Iterator[HopperCase]:
    """Extents of one, and around a tile's and a stage's."""
    shapes = (
        (1, 1, 1), (1, 1000, 512), (1000, 1, 512), (2, 3, 5000), (16, 16, 16), (17, 15, 33), (127, 129, 63),
        (128, 128, 64), (129, 257, 65), (255, 63, 129), (129, 264, 65), (1, 8, 1),
    )  # fmt: skip
    for row, (m, n, k) in itertools.product(FEW, shapes):
        yield _case(row, m, n, k)


def _rings() -> Iterator[HopperCase]:
    """Rings of few stages, with fewer steps than stages, as many, one more, and many."""
    for row, stages in itertools.product(FEW, (2, 3)):
        for steps in (1, stages, stages + 1, 17):
            yield _case(row, 700, 200, steps * row.block_k(2), stages=stages, workers=3)


def _registers() -> Iterator[HopperCase]:
    """The split that no plan chooses by itself."""
    for row, kind in itertools.product((*FEW[:2], *MORE), ("static", "dynamic")):
        yield _case(row, 700, 904, 1000, schedule=kind, registers=REGISTERS[1])
        yield _case(row, 333, 264, 1000, dtype=E4M3, layout="nt", scales="row", schedule=kind, registers=REGISTERS[1])
    for row in FEW[:2]:
        yield _case(row, 520, 264, 640, batch=3, bias=True, residual="rows", activation="gelu", registers=REGISTERS[1])
        yield _case(row, 1000, 704, 512, queues=1, registers=REGISTERS[1])


def _dtypes() -> Iterator[HopperCase]:
    for row in MANY:
        yield _case(row, 520, 264, 640, dtype=F16)
        yield _case(row, 333, 520, 201, dtype=F16)
        yield _case(row, 520, 264, 640, out_dtype=F32, workers=2)
        yield _case(row, 333, 516, 201, out_dtype=F32)
    for row in FEW:
        yield _case(row, 333, 264, 201, out_dtype=F16)
        yield _case(row, 333, 264, 201, dtype=F16, out_dtype=BF16, schedule="stream_k")
        yield _case(row, 333, 264, 201, dtype=F16, out_dtype=F32, schedule="stream_k", layout="tt")
        yield _case(row, 333, 517, 201, dtype=F16)
        yield _case(row, 333, 517, 201, out_dtype=F32)


def _fp8() -> Iterator[HopperCase]:
    pairs, scales = itertools.product((E4M3, E5M2), repeat=2), ("none", "tensor", "row")
    for (a, b), (row, scale), fast in itertools.product(pairs, zip(FEW, scales, strict=True), (True, False)):
        how = {"dtype": a, "b_dtype": None if a == b else b, "scales": scale, "fast_accum": fast, "layout": "nt"}
        yield _case(row, 333, 264, 640, **how)
        yield _case(row, 130, 72, 1999, schedule="stream_k" if a == b else "dynamic", **how)
    for row, fast in itertools.product(MANY, (True, False)):
        how = {"dtype": E4M3, "scales": "row", "fast_accum": fast, "layout": "nt"}
        if _has(row, **how):
            yield _case(row, 520, 776, 4096, workers=5, **how)
            yield _case(row, 77, 1033, 129, swapped=len(ways(row)) > 1, **how)
            yield _case(row, 200, 300, 1024, out_dtype=F32, **how)
    for row in FEW:
        how = {"dtype": E4M3, "scales": "row", "layout": "nt", "bias": True, "residual": "rows", "beta": 0.5}
        yield _case(row, 333, 264, 640, activation="gelu", **how)
        yield _case(row, 100, 120, 512, batch=3, schedule="stream_k", activation="gelu", **how)


def _tf32() -> Iterator[HopperCase]:
    """Every tile both ways round."""
    for row in TILES:
        bk = row.block_k(4)
        for swapped, (bm, bn) in enumerate(ways(row)):
            how = {"swapped": bool(swapped), "dtype": F32, "layout": "nt"}
            yield _case(row, 3 * bm - 5, 3 * bn - 8, 3 * bk + 9, workers=4, **how)
            if _has(row, dtype=F32, layout="nt", schedule="stream_k"):
                yield _case(row, bm + 1, 2 * bn - 7, 13 * bk + 1, workers=7, schedule="stream_k", **how)
    for row in FEW:
        how = {"dtype": F32, "layout": "nt"}
        yield _case(row, 520, 776, 4096, workers=5, **how)
        yield _case(row, 333, 264, 1999, out_dtype=BF16, **how)
        yield _case(row, 333, 517, 640, activation="gelu", **FULL, **how)
        yield _case(row, 130, 144, 96, batch=3, schedule="stream_k", activation="relu", **FULL, **how)
        for out in OUTS[2:]:
            yield _case(row, 304, 264, 200, out=out, **how)


def _epilogues() -> Iterator[HopperCase]:
    for row, activation in itertools.product(FEW, ("relu", "gelu", "gelu_tanh", "silu")):
        yield _case(row, 520, 776, 640, layout="nt", activation=activation, **FULL)
        yield _case(row, 333, 520, 201, layout="nt", activation=activation, **FULL)
    for row in FEW:
        for how in ({"bias": True}, {"residual": "rows", "beta": 2.0}, {"residual": "columns"}, {"alpha": -0.5}):
            yield _case(row, 333, 520, 201, **how)
        yield _case(row, 333, 517, 201, residual="rows", beta=0.0)
        yield _case(row, 333, 517, 201, activation="gelu", **FULL)
        yield _case(row, 520, 776, 640, swapped=len(ways(row)) > 1, schedule="stream_k", activation="gelu", **FULL)
        yield _case(row, 130, 1000, 333, swapped=len(ways(row)) > 1, schedule="stream_k", activation="gelu", **FULL)
        yield _case(row, 333, 516, 201, dtype=F16, out_dtype=F32, activation="gelu", **FULL)
        yield _case(row, 520, 776, 640, scales="row", activation="silu", **FULL)
        yield _case(row, 77, 520, 200, scales="tensor", swapped=len(ways(row)) > 1, schedule="stream_k")
    for row in MORE:
        yield _case(row, 520, 776, 640, activation="silu", **FULL)
        yield _case(row, 333, 517, 201, activation="silu", **FULL)
        if _has(row, schedule="stream_k"):
            yield _case(row, 333, 520, 201, activation="silu", schedule="stream_k", **FULL)


def _outs() -> Iterator[HopperCase]:
    for row, out in itertools.product(FEW, OUTS[1:]):
        for swapped in (False, True)[: len(ways(row))]:
            yield _case(row, 304, 264, 200, swapped=swapped, out=out)
            yield _case(row, 1000, 40, 129, swapped=swapped, out=out, workers=2)
            yield _case(row, 301, 33, 129, swapped=swapped, out=out)
    for row, out in itertools.product(MORE, ("columns", "odd")):
        yield _case(row, 304, 265, 200, out=out)
        if _has(row, schedule="stream_k"):
            yield _case(row, 304, 265, 200, out=out, schedule="stream_k")
    for row in FEW:
        yield _case(row, 300, 265, 200, out="columns", out_dtype=F32, activation="gelu", **FULL)
        yield _case(row, 300, 265, 200, out="odd", activation="gelu", **FULL)


def _batches() -> Iterator[HopperCase]:
    for row, kind in itertools.product(FEW, KINDS):
        for shared in ("", "a", "b"):
            yield _case(row, 130, 144, 96, batch=5, shared=shared, schedule=kind, workers=7)
        yield _case(row, 33, 8, 200, batch=2, schedule=kind)
    for row in FEW:
        yield _case(row, 33, 1, 200, batch=2)
        for out in ("columns", "odd"):
            yield _case(row, 136, 141, 96, batch=3, out=out)
        yield _case(row, 130, 144, 96, batch=3, layout="tt", activation="relu", schedule="stream_k", **FULL)
        yield _case(row, 130, 144, 96, batch=1)


def _orders() -> Iterator[HopperCase]:
    """Several queues, shares, and a caller's own order of tiles, which is a table."""
    for row, queues in itertools.product(FEW, (2, 7)):
        yield _case(row, 1000, 520, 200, queues=queues, workers=5)
    for row, shares in itertools.product(FEW, (1, 3, 40)):
        yield _case(row, 700, 304, 1000, schedule="stream_k", shares=shares, workers=11)
    for row, kind in itertools.product(FEW, KINDS):
        tiles = -(-500 // ways(row)[0][0]) * -(-704 // ways(row)[0][1])
        order = tuple(random.Random(tiles).sample(range(tiles), tiles))
        yield _case(row, 500, 704, 128, schedule=kind, workers=5, order=order)


SECTIONS = (_tiles, _layouts, _extents, _rings, _registers, _dtypes, _fp8, _tf32, _epilogues, _outs, _batches, _orders)
CASES = list({case.name: case for section in SECTIONS for case in section()}.values())

# What other tests launch ---------------------------------------------------------------------------------------------

#: Every number of workers: a shape, and a tile of each variant.
WORKERS_CASES = [_case(row, 700, 904, 256, schedule=kind, layout="nt") for row, kind in itertools.product(FEW, KINDS)]
#: The order of work, written down by a probe.
PROBE_CASES = [
    _case(row, 1000, 704, 512, schedule=kind, queues=queues)
    for row, (kind, queues) in itertools.product(
        FEW, [("static", None), ("dynamic", None), ("dynamic", 3), ("stream_k", None)]
    )
]
#: With everything forced that a plan can be told.
FORCED_CASES = [
    _case(row, 520, 264, 640, schedule=kind, stages=3, layout="nt", workers=7)
    for row, kind in itertools.product(FEW, KINDS)
]
#: A chain of launches, some on what the one before wrote; an output that is its own residual.
CHAINED_CASES = [_case(row, 768, 768, 768, schedule=kind) for row, kind in itertools.product(FEW, KINDS)]
OWN_RESIDUAL_CASES = [
    _case(row, 520, 776, 640, schedule=kind, residual="rows", beta=2.0, workers=7, layout="nt")
    for row, kind in itertools.product(FEW, KINDS)
]
#: Launched again and again: three contributors to a tile and more.
REPEATED = [_case(row, 500, 304, 2000, schedule=kind, bias=True) for row, kind in itertools.product(FEW, KINDS)]
#: More than 2**31 elements: of the output, through TMA and from registers, and of an operand.
LARGE = {
    "output": _case(FEW[0], 66000, 33000, 64),
    "output stored directly": _case(FEW[0], 66000, 33000, 64, out="odd"),
    "operand": _case(FEW[0], 2**20 + 1024, 64, 2048),
}


# What arrives --------------------------------------------------------------------------------------------------------


def _uniform(rows: int, size: int) -> tuple[int, ...]:
    return (*range(0, rows, size), rows)


#: In chunks that are no multiple of a tile, that are one, and in ragged ones, one of them without rows.
_M, _N, _K = 700, 520, 384
_ODD, _WHOLE, _RAGGED = _uniform(_M, 150), _uniform(_M, 256), (0, 10, 10, 300, 301, _M)
_RAGGED_N = (0, 100, 100, 411, _N)


def _arriving() -> Iterator[HopperCase]:
    """Each variant both ways round, every kind; layouts, chunks and pivots in turn. Half of the SMs stay free."""
    layouts = itertools.cycle(LAYOUTS)
    for row in FEW:
        for swapped, kind in itertools.product((False, True)[: len(ways(row))], KINDS):
            how = {"swapped": swapped, "schedule": kind, "workers": 61}
            yield _case(row, _M, _N, _K, layout=next(layouts), rows=_ODD, pivot=2, **how)
            yield _case(row, _M, _N, _K, layout=next(layouts), columns=_RAGGED_N, pivot=3, **how)
            both = {"rows": _RAGGED, "columns": _uniform(_N, 128)}
            if kind != "stream_k":
                yield _case(row, _M, _N, _K, layout=next(layouts), **both, **how)
    for row in FEW:
        how = {"workers": 61, "schedule": "stream_k"}
        yield _case(row, 130, 144, 96, batch=5, rows=_uniform(650, 150), pivot=1, workers=61)
        yield _case(row, _M, 517, _K, rows=_WHOLE, pivot=1, layout="nt", activation="relu", **FULL, **how)
        yield _case(
            row, 130, 72, 1999, dtype=E4M3, scales="row", fast_accum=False, layout="nt", rows=(0, 70, 130), **how
        )
    for row in MORE:
        yield _case(row, _M, _N, _K, rows=_ODD, pivot=4, workers=61)
    yield _case(FEW[0], _M, _N, _K, rows=_WHOLE, pivot=1, workers=61, queues=3)
    # Whatever arrives first; and, in arrival order, each chunk the pivot, and few workers, so that each has many items.
    for row in FEW:
        yield _case(row, _M, _N, _K, rows=_ODD, pivot=2, workers=61, schedule="dynamic", order="chunk_major")
        for pivot, workers in itertools.product(range(len(_RAGGED) - 1), (3, 61)):
            yield _case(row, _M, _N, _K, rows=_RAGGED, pivot=pivot, workers=workers, layout="nt", schedule="dynamic")
    yield _case(FEW[0], _M, _N, _K, dtype=F32, layout="nt", rows=_ODD, pivot=1, workers=61)


ARRIVING = list({case.name: case for case in _arriving()}.values())
_LAYOUTS_IN_TURN = itertools.cycle(("nt", "nn", "tn", "tt"))
#: Everything that the gate can do once, of each variant: chunks missing, words of the caller's own, graphs, a probe.
GATED = [
    _case(row, _M, _N, _K, schedule=kind, layout=next(_LAYOUTS_IN_TURN), rows=bounds, pivot=1, workers=61)
    for (row, bounds), kind in itertools.product(zip(FEW, (_ODD, _WHOLE, _RAGGED), strict=True), KINDS)
]


class ApartCase(NamedTuple):
    """What ranks gather, of which a rank's own rows stand apart; and whether the kernel reads them there."""

    case: HopperCase
    first: int
    height: int
    period: int
    there: bool = True

    def has(self, row: int) -> bool:
        """Whether a row of the operand stands apart."""
        return self.first <= row % self.period < self.first + self.height


def _apart() -> Iterator[ApartCase]:
    """Each variant; one batch and three, one chunk a shard and two, each rank's; shards that are no whole tiles."""
    for (i, row), (batches, parts) in itertools.product(enumerate(FEW), ((1, 1), (1, 2), (3, 1))):
        shard, world, rank = 2 * row.rows, 3, (i + parts + batches) % 3
        how = {"rows": _uniform(batches * world * shard, shard // parts), "pivot": rank * parts, "workers": 61}
        for kind, layout, dtype in zip(KINDS, ("nn", "nt", "nt"), (BF16, F16, E4M3), strict=True):
            if _has(row, dtype=dtype):
                case = _case(row, batches * world * shard, _N, _K, schedule=kind, layout=layout, dtype=dtype, **how)
                yield ApartCase(case, rank * shard, shard, world * shard, kind != "stream_k")
    for row in FEW:
        case = _case(row, 3 * 200, _N, _K, layout="nt", rows=_uniform(600, 200), pivot=1, workers=61)
        yield ApartCase(case, 200, 200, 600, there=False)
    swapped = _case(FEW[1], 768, _N, _K, layout="nt", swapped=True, rows=_uniform(768, 256), pivot=2, workers=61)
    yield ApartCase(swapped, 512, 256, 768, there=False)


APART = [*_apart()]

#: What the cost model chooses for, beside torch's own ops.
AUTO = [
    Case(4096, 4096, 1024), Case(2048, 2048, 2048, layout="nt"), Case(1000, 1000, 1000, layout="tn"),
    Case(1000, 1000, 1000, F16, "tt"), Case(1, 4096, 4096, layout="nt"), Case(16, 4096, 2048, layout="nt"),
    Case(64, 1024, 4096, layout="nt"), Case(4096, 1, 2048), Case(200, 8192, 512), Case(8192, 128, 512, F16),
    Case(128, 128, 8192), Case(136, 8, 8), Case(256, 256, 256, batch=8), Case(130, 136, 96, F16, batch=5),
    Case(130, 136, 96, batch=5, shared="a"), Case(130, 136, 96, layout="nt", batch=5, shared="b"),
    Case(1024, 1024, 1024, out_dtype=F32), Case(512, 768, 640, pad=16), Case(512, 768, 640, layout="tt", pad=8),
    Case(520, 776, 640, layout="nt", bias=True, residual=True, alpha=1.5, beta=-0.5, activation="gelu"),
    Case(520, 776, 640, F16, bias=True, activation="silu", schedule="stream_k"),
    Case(520, 777, 640, layout="nt", bias=True), Case(777, 520, 640, schedule="static"),
    Case(1000, 1040, 800, F32, "nt", tf32=True),
    Case(512, 768, 640, F32, "nt", tf32=True, bias=True, activation="gelu"),
]  # fmt: skip
#: Strides or addresses that TMA cannot address, and what the plan says of them.
UNALIGNED = {
    Case(520, 777, 640): "b has strides",
    Case(520, 776, 641): "a has strides",
    Case(777, 520, 640, layout="tn"): "a has strides",
    Case(512, 768, 640, pad=3): "a has strides",
    Case(512, 768, 640, offset=1): "a lies at an address",
    Case(512, 768, 640, F32, tf32=True): "b is not contiguous along K, and the tensor cores take tf32 only so",
    Case(512, 768, 640, F32, "nt"): "it multiplies float32 as tf32, which torch.backends.cuda.matmul does not allow",
}


def worker_cases(counts: range) -> Iterator[HopperCase]:
    """`WORKERS_CASES` with each count, the variants in turn."""
    for workers, (i, case) in itertools.product(counts, enumerate(WORKERS_CASES)):
        if (workers + i // len(KINDS)) % len(FEW) == 0:
            yield replace(case, workers=workers)


def launched() -> Iterator[HopperCase]:
    """What the tests launch, but for `PROBE_CASES`, `AUTO` and `UNALIGNED`, and with a probe."""
    yield from (*CASES, *WORKERS_CASES, *REPEATED, *FORCED_CASES, *CHAINED_CASES, *OWN_RESIDUAL_CASES, *LARGE.values())
    yield from (replace(REPEATED[0], bias=bias, residual=residual) for bias, residual in ((True, ""), (False, "rows")))
