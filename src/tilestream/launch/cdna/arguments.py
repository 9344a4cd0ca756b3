"""The arguments of `tilestream.kernels.cdna.gemm.gemm` that a plan and a layout decide."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tilestream.kernels.cdna.gemm import gemm
from tilestream.kernels.config import CdnaConfig, Stage
from tilestream.launch.gemm_arguments import GemmArguments, Layout
from tilestream.plan.plan import Plan
from tilestream.plan.policy import cdna_tiles
from tilestream.plan.problem import ITEMSIZE

_INT31 = 2**31
#: Neighbouring columns of a row in one lane.
_LANE_COLUMNS = 4
#: Registers of a lane for a piece of the epilogue.
_PIECE_REGISTERS = 8
#: Versions of the matrix units' layouts.
VERSION = {"gfx942": 3, "gfx950": 4}


class Operand(NamedTuple):
    """An operand's layout in memory and in a stage."""

    stride: int  # the stride that is not 1
    k_major: bool  # whether the stride of K is 1
    turned: bool  # whether it is transposed in registers, into a K-major stage
    far: bool  # whether a tile of it needs 64-bit addresses
    swizzle: tuple[int, int, int]  # the swizzle of its stages: vector, every, period


def operand(rows: int, block_k: int, row_stride: int, k_stride: int, size: int, arch: str) -> Operand:
    """The layout of an operand ``[rows, K]`` whose stage has ``rows`` rows and ``block_k`` of K.

    Raises
    ------
    ValueError
        If neither stride is 1.
    """
    if 1 not in (row_stride, k_stride):
        raise ValueError(f"an operand of strides {row_stride}, {k_stride}: neither is 1, and it is read in vectors")
    k_major = k_stride == 1
    stride = row_stride if k_major else k_stride
    turned = not k_major and not cdna_tiles.READS_TRANSPOSED[arch]
    made = cdna_tiles.stage_swizzle(rows, block_k, size, arch, k_major or turned)
    far = cdna_tiles.is_far(rows, block_k, stride, size, k_major)
    return Operand(stride, k_major, turned, far, (made.vector, made.every, made.period))


def formats(dtypes: tuple[str, str], arch: str) -> tuple[str, str] | None:
    """The formats of 8-bit operands in gfx950's instruction for 128 of K; None without it."""
    names = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
    if arch != "gfx950" or dtypes[0] not in names:
        return None
    return names[dtypes[0]], names[dtypes[1]]


def vector_columns(strides: tuple[int, ...] | None, columns: int, aligned: bool) -> int:
    """The number of neighbouring columns of a row that form one vector of a lane, or 1."""
    if strides is None or strides[-1] != 1 or not aligned:
        return 1
    return math.gcd(_LANE_COLUMNS, columns, *strides[:-1])


def piece_of(block_m: int, block_n: int, warps: int, shape: tuple[int, int, int]) -> tuple[int, int]:
    """Rows and columns of a piece of the epilogue, which fits few registers; columns are cut first."""
    down, across = cdna_tiles.spread(block_m, block_n, warps)
    rows, columns = block_m, block_n
    while rows * columns > _PIECE_REGISTERS * cdna_tiles.LANES * warps and columns > across * shape[1]:
        columns //= 2
    while rows * columns > _PIECE_REGISTERS * cdna_tiles.LANES * warps and rows > down * shape[0]:
        rows //= 2
    return rows, columns


class Arguments(GemmArguments):
    """See `GemmArguments`. The kernel has no arrival order, and makes no copies.

    Parameters
    ----------
    aligned
        Whether the addresses of the output and of the residual are multiples of 16.

    Attributes
    ----------
    x, y
        The operands as rows of K.
    direct
        Whether copies bypass the registers. They cover a buffer's range, and cannot transpose an operand.
    """

    kernel: Any = gemm
    matrices = ("x", "y")

    def __init__(
        self, plan: Plan, layout: Layout, aligned: tuple[bool, bool] = (True, True), probe: bool = False
    ) -> None:
        block_m, block_n, block_k = plan.block
        self.size, self.arch = ITEMSIZE[plan.problem.dtype], plan.device.arch
        (_, am, ak), (_, bk, bn) = layout.a, layout.b
        self.x = operand(block_m, block_k, am, ak, self.size, self.arch)
        self.y = operand(block_n, block_k, bn, bk, self.size, self.arch)
        self.direct = plan.variant == "direct" and not any(o.far or o.turned for o in (self.x, self.y))
        self._aligned = aligned
        super().__init__(plan, layout, probe)
        #: Two warps a SIMD, for which the registers are counted.
        self.options = {"num_warps": plan.warps, "waves_per_eu": 2}

    @property
    def tile(self) -> cdna_tiles.Tile:
        """The plan's row of `tilestream.plan.policy.cdna_tiles.TILES`, or a row like it for another tile."""
        block_m, block_n, block_k = self.plan.block
        copies = "direct" if self.direct else "staged"
        stages = self.plan.stages
        return cdna_tiles.Tile(block_m, block_n, block_k * self.size // 64, self.plan.warps, stages, copies, 1.0)

    def _numbers(self) -> dict[str, Any]:
        batches = {"stride_xb": self.layout.a[0], "stride_yb": self.layout.b[0]}
        return {**super()._numbers(), **batches, "stride_x": self.x.stride, "stride_y": self.y.stride}

    def _config(self, **logs: bool) -> CdnaConfig:
        plan, layout, x, y = self.plan, self.layout, self.x, self.y
        problem = plan.problem
        block_m, block_n, block_k = plan.block
        vector = cdna_tiles.CELL_BYTES // self.size
        lane = cdna_tiles.lane_bytes(self.tile, self.arch) // self.size if self.direct else vector
        piece = piece_of(block_m, block_n, plan.warps, cdna_tiles.instruction(self.arch, self.size))
        return CdnaConfig.of(
            plan,
            layout,
            **logs,
            STAGES=self.tile.stages,
            STRIP=piece[1],
            STRIP_M=piece[0],
            DIRECT=self.direct,
            X=Stage(block_m, block_k, x.k_major, x.turned, x.swizzle, vector, lane, plan.warps, x.far),
            Y=Stage(block_n, block_k, y.k_major, y.turned, y.swizzle, vector, lane, plan.warps, y.far),
            OFFSETS_64BIT=self._far_out(),
            VERSION=VERSION[self.arch],
            SHAPE=cdna_tiles.instruction(self.arch, self.size),
            ACROSS=cdna_tiles.spread(block_m, block_n, plan.warps),
            WIDTH=vector,
            FORMATS=formats(problem.dtypes, self.arch),
            XCDS=plan.device.xcds,
            EVEN_K=problem.k % block_k == 0,
            VECTOR_C=vector_columns(layout.out, problem.n, self._aligned[0]),
            VECTOR_RESIDUAL=vector_columns(layout.residual, problem.n, self._aligned[1]),
        )

    def _far_out(self) -> bool:
        """Whether a tile of the output, or of the residual, exceeds a buffer's offsets."""
        block_m, block_n, _ = self.plan.block
        return any(
            ((block_m - 1) * strides[1] + (block_n - 1) * strides[2] + 1) * 4 >= _INT31
            for strides in (self.layout.out, self.layout.residual)
            if strides is not None
        )
