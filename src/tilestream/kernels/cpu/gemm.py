"""GEMM on the CPU: persistent worker threads, each tile one BLAS call into its place in the output.

::

    whole tile:      out[tile] = epilogue(A[rows] @ B[:, columns])
    part of a tile:  slot = A[rows, k range] @ B[k range, columns];   last one: out[tile] = epilogue(sum of slots)

With everything arrived it reaches 0.92 to 1.0 of ``torch.mm`` with the same number of threads (2048^3, fp32: see
``benchmarks/results/``).

Accumulation is in the BLAS's own precision for a plain product in the inputs' dtype, as ``torch.mm`` has it. As soon as
there is an epilogue, another output dtype or a part to be added, 16-bit inputs are multiplied and accumulated in fp32
and rounded once, at the end; 8-bit inputs always are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilestream.core.grid import WorkItem
from tilestream.core.operands import Epilogue
from tilestream.core.schedule import Schedule
from tilestream.kernels.cpu.convert import Scratch, widened
from tilestream.kernels.cpu.epilogue import apply


class GemmBody:
    """Load, math and epilogue of ``out = epilogue(a @ b)``: a `tilestream.launch.cpu.launch.Body`.

    Parameters
    ----------
    a, b, out
        ``[B, M, K]``, ``[B, K, N]``, ``[B, M, N]``, any strides (0 for an operand that batches share).
    block
        Rows and columns of a tile, and how much of K one K step is.
    """

    def __init__(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, epilogue: Epilogue, schedule: Schedule,
        block: tuple[int, int, int], workspace: Scratch,
    ) -> None:  # fmt: skip
        self._a, self._b, self._out, self._epilogue = a.detach(), b.detach(), out.detach(), epilogue
        self._block_m, self._block_n, self._block_k = block
        self._workspace = workspace
        self._acc_dtype = torch.float64 if a.dtype == torch.float64 else torch.float32
        self._plain = epilogue.trivial and out.dtype == a.dtype
        # The accumulator may lie in the output only if the epilogue does not read what it would overwrite.
        residual = epilogue.residual
        apart = residual is None or residual.data_ptr() != out.data_ptr()  # else it is the output: see `refuse_overlap`
        self._in_place = apart and out.dtype == self._acc_dtype
        self._slots: torch.Tensor | None = None
        if schedule.slots:
            self._slots = workspace.slots(schedule.slots, self._block_m, self._block_n, self._acc_dtype)

    def compute(self, item: WorkItem) -> None:
        """See `Body`."""
        rows, cols, depth = self._ranges(item)
        a, b = self._a[item.batch, rows, depth], self._b[item.batch, depth, cols]
        out = self._out[item.batch, rows, cols]
        if item.parts > 1:
            self._product(a, b, self._slot(item.slot, out))
        elif self._plain:
            torch.mm(a, b, out=out)
        elif self._in_place:
            self._product(a, b, out)
            apply(self._epilogue, out, item.batch, rows, cols)
        else:
            with self._workspace.borrow(out.shape, self._acc_dtype) as acc:
                self._product(a, b, acc)
                apply(self._epilogue, acc, item.batch, rows, cols)
                out.copy_(acc)

    def reduce(self, item: WorkItem, slots: Sequence[int]) -> None:
        """See `Body`."""
        rows, cols, _ = self._ranges(item)
        out = self._out[item.batch, rows, cols]
        acc = self._slot(slots[0], out)
        for slot in slots[1:]:
            acc += self._slot(slot, out)
        apply(self._epilogue, acc, item.batch, rows, cols)
        out.copy_(acc)

    def poison(self, item: WorkItem) -> None:
        """See `Body`."""
        rows, cols, _ = self._ranges(item)
        self._out[item.batch, rows, cols].fill_(float("nan"))

    def _ranges(self, item: WorkItem) -> tuple[slice, slice, slice]:
        # Slices clip at the end: the last tile of a row, a column or K is as small as it has to be.
        return (
            slice(item.pm * self._block_m, (item.pm + 1) * self._block_m),
            slice(item.pn * self._block_n, (item.pn + 1) * self._block_n),
            slice(item.k_begin * self._block_k, item.k_end * self._block_k),
        )

    def _product(self, a: torch.Tensor, b: torch.Tensor, into: torch.Tensor) -> None:
        if self._epilogue.alpha == 0:
            into.zero_()  # as torch.addmm has it: what is not a number in the operands does not count
            return
        if a.dtype == into.dtype:
            torch.mm(a, b, out=into)
            return
        with widened(a, into.dtype, self._workspace) as wide_a, widened(b, into.dtype, self._workspace) as wide_b:
            torch.mm(wide_a, wide_b, out=into)

    def _slot(self, slot: int, tile: torch.Tensor) -> torch.Tensor:
        assert self._slots is not None, "a part of a tile without a place for its partial result"
        return self._slots[slot, : tile.shape[0], : tile.shape[1]]
