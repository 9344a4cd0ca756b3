"""The arguments of the portable GEMMs that a plan and a layout decide."""

from __future__ import annotations

from typing import Any

from tilestream.core.exchange import cluster_of
from tilestream.kernels.config import PortableConfig
from tilestream.kernels.device.jit import INTERPRETED
from tilestream.kernels.portable.gemm import gemm
from tilestream.kernels.portable.one_tile import one_tile
from tilestream.launch.gemm_arguments import GemmArguments, Layout, is_aligned
from tilestream.launch.portable.options import options
from tilestream.plan.candidate import ONE_TILE
from tilestream.plan.plan import Plan
from tilestream.plan.policy.portable import adds_by_itself, converts, in_vectors, strip, sums_lose_bits

_INT31 = 2**31
#: The largest extent of K before an accumulator of 8-bit products is added to the float32 sum.
_PRECISE_K = 128
#: Floats of 16 bytes.
_FETCHED = 4


class Arguments(GemmArguments):
    """Those of `tilestream.kernels.portable.gemm.gemm`: see `GemmArguments`."""

    kernel: Any = gemm
    matrices: tuple[str, ...] = ("a", "b")

    def __init__(self, plan: Plan, layout: Layout, probe: bool = False, trace: bool = False) -> None:
        super().__init__(plan, layout, probe, trace)
        self.options = options(plan)
        self._check_steps()

    def _check_steps(self) -> None:
        """Raise `NotImplementedError` if a K step of an operand leaves 31 bits, in which the kernel counts it."""
        block_k = self.plan.block[2]
        for name, stride in (("a", self.layout.a[2]), ("b", self.layout.b[1])):
            if self.plan.problem.k > block_k and stride * block_k >= _INT31:
                raise NotImplementedError(
                    f"{name}: a stride of {stride} elements along K, in steps of {block_k}; the portable kernel counts "
                    f"a step in 31 bits: give {name}.contiguous()"
                )

    def _config(self, **logs: bool) -> PortableConfig:
        plan, problem, block_k = self.plan, self.plan.problem, self.plan.block[2]
        kinds = problem.dtypes if converts(problem.dtype, plan.device.arch) else ("", "")
        # The extent of K after which inexact sums are added in float32. With None Triton never does so.
        arch = plan.device.arch
        empties = problem.promoted and sums_lose_bits(arch)
        return PortableConfig.of(
            plan,
            self.layout,
            **logs,
            OFFSETS_64BIT=self._wide(),
            EVEN_K=problem.k > 0 and problem.k == plan.schedule.grid.k_steps * block_k,
            PRECISION="tf32" if problem.kind == "tf32" else "ieee",
            IMPRECISE=min(_PRECISE_K, block_k) if empties else None,
            PROMOTED=empties and adds_by_itself(arch),
            A_KIND=kinds[0],
            B_KIND=kinds[1],
            K_MAJOR=(self.layout.a[2] == 1, self.layout.b[1] == 1),
            **self._own(),
        )

    def _own(self) -> dict[str, Any]:
        """The fields in which kernels differ."""
        plan = self.plan
        columns = strip(plan.device.arch, plan.block[1], self._is_store(), plan.problem.dtype)
        return {"STRIP": columns, "VECTORS": self._vectors()}

    def _is_store(self) -> bool:
        """Whether a tile's end is a store, of what is at most scaled as a whole: it has no parts, and no epilogue."""
        x, problem = self.layout, self.plan.problem
        epilogue = x.bias is not None or x.residual is not None or x.scaled or x.activation != "none"
        return not epilogue and problem.scales in ("none", "tensor") and self.plan.schedule.kind != "stream_k"

    def _vectors(self) -> tuple[int, int]:
        """The plan's, which both operands have, if they lie so. See `_lie_so`."""
        problem = self.plan.problem
        if not in_vectors(problem, self.plan.device):
            return 1, 1
        vector = problem.vector if all(self._lie_so((problem.vector, problem.vector))) else 1
        return vector, vector

    def _lie_so(self, vectors: tuple[int, int]) -> list[bool]:
        """Whether A, and B, lie in vectors. What addresses are multiples of the compiler sees itself."""
        problem, (a, b) = self.plan.problem, self.layout[:2]
        shapes = (((problem.m, problem.k), a), ((problem.k, problem.n), b))
        return [
            is_aligned(extents, s[1:], s[0], 0, vector) for (extents, s), vector in zip(shapes, vectors, strict=True)
        ]

    def _wide(self) -> bool:
        """Whether an offset inside one batch exceeds 31 bits. Offsets past the end are masked and may do so."""
        s, (m, n, k) = self.layout, (self.plan.problem.m, self.plan.problem.n, self.plan.problem.k)
        reached: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
            ((m, k), s.a[1:]), ((k, n), s.b[1:]), ((m, n), s.out[1:]), ((m, n), (s.residual or (0, 0, 0))[1:]),
            ((m,), s.scale_a[1:]), ((n,), s.scale_b[1:]), ((n,), (s.bias or 0,)),
        ]  # fmt: skip
        return any(
            sum(max(extent - 1, 0) * stride for extent, stride in zip(extents, strides, strict=True)) >= _INT31
            for extents, strides in reached
        )


class OneTileArguments(Arguments):
    """Those of `tilestream.kernels.portable.one_tile.one_tile`."""

    kernel: Any = one_tile

    def _own(self) -> dict[str, Any]:
        """See `Arguments`. The CTAs of a cluster have few rows each: all of their columns are a strip."""
        plan, size = self.plan, 1 if INTERPRETED else cluster_of(self.plan.schedule)
        if size == 1:
            return super()._own()
        rows, columns, _ = plan.block
        held = rows // size * columns // (32 * plan.warps)
        own = {"STRIP": columns, "CLUSTER": size, "FETCHED": _FETCHED if held % _FETCHED == 0 and held else 1}
        return super()._own() | own

    def _vectors(self) -> tuple[int, int]:
        """Each operand's own: this kernel's tiles were compiled with either."""
        vectors = self.plan.problem.vectors
        if self.plan.problem.aligned:
            return 1, 1
        a, b = (vector if fits else 1 for vector, fits in zip(vectors, self._lie_so(vectors), strict=True))
        return a, b

    def _check_steps(self) -> None:
        """Do nothing: this kernel counts a wide step in 64 bits."""


def arguments_of(plan: Plan, layout: Layout) -> Arguments:
    """The arguments of a plan's kernel, without a trace."""
    return (OneTileArguments if plan.variant == ONE_TILE else Arguments)(plan, layout)
