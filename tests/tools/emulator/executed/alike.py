"""Which tiles of a GEMM add alike: each is compiled, and executed on operands that name their own K.

A row of the record has the order in which a compiled kernel adds (`tilestream_tools.emulator.sums`) and how it rounds;
or, with an epilogue, a digest of what it makes of random operands. `executed.engine` has the command line.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from gates import cdna
from gates.engine import DEVICES

from error_rule import nans
from executed.problems import BASE, LINE, Built, Operands, answer
from tilestream.core.grid import Grid
from tilestream.core.schedule import Schedule
from tilestream.kernels.cdna.gemm import gemm as cdna_gemm
from tilestream.kernels.portable.gemm import gemm as portable_gemm
from tilestream.launch.cdna.arguments import Arguments as CdnaArguments
from tilestream.launch.gemm_arguments import Layout
from tilestream.launch.portable.arguments import Arguments
from tilestream.plan.candidate import Candidate
from tilestream.plan.plan import Plan, of_candidate
from tilestream.plan.planner import plan_problem
from tilestream.plan.policy import portable
from tilestream.plan.policy.cdna_tiles import TILES, fitting
from tilestream.plan.problem import FNUZ, ITEMSIZE, OCP, Problem, result_name
from tilestream.plan.raster import raster_of
from tilestream_tools.emulator import Fault
from tilestream_tools.emulator.sums import Sums, coded, digits, float_modes, joined, order_of

#: K: whole steps of each tile, several of them; of 8 bits twice as many. ``uneven`` has a part of a step more.
K, PART = 768, 16
#: Extents of the product with an epilogue.
M, N = 32, 48
#: Dtype (a number: of the architecture's kinds of 8 bits), layout, how. ``epilogue``: random operands, all of it.
OF_A_TILE: tuple[tuple[str | int, str, str], ...] = (
    ("bfloat16", "nt", "even"), ("bfloat16", "nn", "even"), ("bfloat16", "tn", "uneven"),
    ("bfloat16", "nt", "epilogue"), ("float16", "tt", "even"),
    (0, "nt", "even"), (0, "tn", "uneven"), (0, "nt", "epilogue"), (1, "nn", "even"),
)  # fmt: skip
#: Of float32, which only the portable kernel multiplies.
_SINGLE = (("float32", "nt", "even"), ("float32", "tn", "uneven"), ("float32", "nt", "epilogue"))
#: On gfx942, of tiles whose copies are direct, which they are in no other layout.
_DIRECT = (("bfloat16", "nt", "uneven"), ("float16", "nt", "even"), (0, "nt", "uneven"), (1, "nt", "even"))
#: The sample: backend, architecture, tile, dtype, layout, how.
QUICK = {
    ("cdna", "gfx942", "64x64x128 staged", "bfloat16", "nt", "even"),
    ("cdna", "gfx942", "64x64x64 direct", "bfloat16", "nt", "uneven"),
    ("cdna", "gfx950", "32x64x256 direct", "float8_e4m3fn", "nt", "even"),
    ("cdna", "gfx950", "64x64x128 staged", "bfloat16", "nn", "even"),
    ("cdna", "gfx950", "32x64x128 direct", "bfloat16", "nt", "epilogue"),
    ("portable", "gfx942", "16x128x64", "bfloat16", "nt", "even"),
    ("portable", "gfx942", "64x64x64", "bfloat16", "nt", "even"),
}  # fmt: skip


class Case(NamedTuple):
    """A compiled kernel. ``tile``: rows, columns and K of a step, and how CDNA's copies."""

    backend: str
    arch: str
    tile: str
    dtype: str
    layout: str
    how: str

    @property
    def k(self) -> int:
        return K * (2 if ITEMSIZE[self.dtype] == 1 else 1) + (PART if self.how == "uneven" else 0)

    @property
    def block(self) -> tuple[int, int, int]:
        m, n, k = map(int, self.tile.partition(" ")[0].split("x"))
        return m, n, k

    @property
    def plan(self) -> Plan:
        m, n = (M, N) if self.how == "epilogue" else self.block[:2]
        eight = ITEMSIZE[self.dtype] == 1
        problem = Problem(
            m, n, self.k, 1, self.dtype, "float32" if self.how == "epilogue" else result_name(self.dtype, None),
            scales="none" if not eight else "row" if self.how == "epilogue" else "tensor",
        )  # fmt: skip
        if self.backend == "portable":
            device = DEVICES[self.arch]
            made = plan_problem(problem, None, "dynamic", self.block[:2], device=device, backend="portable")
            return replace(made, schedule=replace(made.schedule, workers=1))
        tile = next(
            one for one in TILES[self.arch]
            if (*one[:2], one.block_k(ITEMSIZE[self.dtype])) == self.block and self.tile.endswith(one.copies)
        )  # fmt: skip
        grid = Grid.of(m, n, self.k, *self.block, batch=1)
        schedule = Schedule("dynamic", grid, raster_of(problem, grid, self.block, 8, None), 1, 1)
        found = Candidate(tile.copies, self.block, schedule, 0.0, tile.warps, tile.stages)
        return of_candidate(problem, cdna.DEVICES[self.arch], "cdna", found, "the emulator's")


def cases(quick: bool) -> Iterator[Case]:
    for arch, backend in itertools.product(("gfx942", "gfx950"), ("cdna", "portable")):
        kinds = FNUZ if arch == "gfx942" else OCP
        for which in (*OF_A_TILE, *_SINGLE, *_DIRECT):
            dtype = kinds[which[0]] if isinstance(which[0], int) else which[0]
            for tile in tiles_of(backend, arch, dtype):
                case = Case(backend, arch, tile, dtype, *which[1:])
                left_out = which in _DIRECT and not (arch == "gfx942" and tile.endswith("direct"))
                if not left_out and (not quick or tuple(case) in QUICK):
                    yield case


def tiles_of(backend: str, arch: str, dtype: str) -> list[str]:
    size = ITEMSIZE[dtype]
    if backend == "portable":
        rows = portable.tiles(Problem(512, 512, K, 1, dtype, result_name(dtype, None)), DEVICES[arch])
        return ["x".join(map(str, one[:3])) for one in rows]
    fit = () if size == 4 else fitting(TILES[arch], cdna.DEVICES[arch], size)
    return [f"{one.block_m}x{one.block_n}x{one.block_k(size)} {one.copies}" for one in fit]


def row(case: Case) -> dict[str, Any]:
    """What came of a case; ``fault``: why its order cannot be read."""
    try:
        return _row(case)
    except Fault as fault:
        return dict(case._asdict(), k=case.k, fault=str(fault).rpartition(": ")[2])


def _row(case: Case) -> dict[str, Any]:
    size = ITEMSIZE[case.dtype]
    made: dict[str, Any] = dict(case._asdict(), k=case.k)
    if case.how == "epilogue":
        bits, built = _launched(case, _random(case), None)
        made["digest"] = hashlib.sha256(bits.numpy().tobytes()).hexdigest()[:16]
    else:
        chains = []
        for digit in range(digits(size)):
            sums = Sums(size, digit)
            rows = [torch.from_numpy(coded(case.k, of_b, size, digit).view(f"i{size}")) for of_b in (False, True)]
            a, b = (one.expand(count, -1) for one, count in zip(rows, case.block, strict=False))
            _, built = _launched(case, {"a": a, "b": b.t()}, sums)
            chains.append(sums.chain(case.block[0] * case.block[1]))
        made |= order_of(joined(chains, size), case.k)._asdict()
    return made | {"modes": float_modes(built.text)}


def _random(case: Case) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(29)

    def rand(*shape: int, dtype: Any = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    dtype = getattr(torch, case.dtype)
    made = {"a": rand(M, case.k, dtype=dtype), "b": rand(case.k, N, dtype=dtype), "bias": rand(N, dtype=torch.bfloat16)}
    made["residual"] = rand(M, N, dtype=torch.bfloat16)
    if dtype.itemsize == 1:
        made |= {"scale_a": rand(M), "scale_b": rand(N)}
    return made


def _launched(case: Case, x: dict[str, torch.Tensor], sums: Sums | None) -> tuple[torch.Tensor, Built]:
    """The product, by one worker; its kernel is compiled.

    LDS is in order: of 128x256 on gfx942 Triton lets half of the waves write where reads of the others are under way.
    """
    plan, o = case.plan, Operands()
    m, n, k = plan.problem.m, plan.problem.n, case.k
    a = x["a"].contiguous() if case.layout[0] == "n" else x["a"].t().contiguous()
    b = x["b"].contiguous() if case.layout[1] == "n" else x["b"].t().contiguous()
    strides = Layout(
        (m * k, k, 1) if case.layout[0] == "n" else (m * k, 1, m),
        (k * n, n, 1) if case.layout[1] == "n" else (k * n, 1, k), (0, n, 1),
    )  # fmt: skip
    if case.how == "epilogue":
        strides = strides._replace(bias=1, residual=(0, n, 1), scaled=True, activation="gelu")
        if "scale_a" in x:
            strides = strides._replace(scale_a=(0, 1), scale_b=(0, 1))
    one = torch.ones(1)
    is_eight = ITEMSIZE[case.dtype] == 1
    out = nans(m, n, dtype=getattr(torch, plan.problem.out_dtype))
    to = o.of(out, "the output")
    scales = [o.of(x.get(name, one), name) if is_eight else None for name in ("scale_a", "scale_b")]
    tensors = [o.of(one, name) for one, name in ((a, "A"), (b, "B"))]
    for tensor in tensors:
        tensor.dtype = type(tensor.dtype)(case.dtype)
    counters = torch.arange(3 * LINE) * 37 % (BASE + 1)
    given = (
        *tensors, to, o.of(x.get("bias"), "the bias"), o.of(x.get("residual"), "the residual"), *scales,
        None, None, o.of(counters, "the counters"), None, None, BASE, 0, 1.5 if "bias" in x else 1.0,
        0.5 if "bias" in x else 0.0,
    )  # fmt: skip
    arguments = (Arguments if case.backend == "portable" else CdnaArguments)(plan, strides)
    built = Built(portable_gemm if case.backend == "portable" else cdna_gemm, arguments.options, case.arch)
    built.launch(arguments.fill(given), o.memory, 1, landing="late", lds_in_order=True, replaced=sums and sums.traced)
    return answer(to, out), built


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write a record of all cases: the new rows, and the file's for the others."""
    kept = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
    by_case = {tuple(one[name] for name in Case._fields): one for one in (*kept, *rows)}
    lines = ",\n".join(f"  {json.dumps(by_case[case])}" for case in cases(False) if case in by_case)
    version = triton.__version__.partition("+")[0]
    file.write_text(f'{{\n "triton": "{version}",\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")
