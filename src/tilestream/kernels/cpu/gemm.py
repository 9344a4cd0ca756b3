"""GEMM on the CPU: persistent worker threads, each tile one BLAS call into its place in the output.

::

    whole tile:      out[tile] = epilogue(A[rows] @ B[:, columns])
    part of a tile:  slot = A[rows, k range] @ B[k range, columns];   last one: out[tile] = epilogue(sum of slots)
    inline:          out = epilogue(A @ B), of all batches in one BLAS call by the calling thread
    padded:          out[tile] = first rows of epilogue(A[rows] and zeros @ B[:, columns]): all calls have one shape

With everything arrived it reaches 0.92 to 1.0 of ``torch.mm`` with the same number of threads (2048^3, fp32: see
``benchmarks/results/``).

A plain product in the inputs' dtype accumulates in the BLAS's own precision, as ``torch.mm`` does. With an epilogue,
another output dtype or several parts, 16-bit inputs are multiplied and accumulated in fp32 and rounded once, at the
end. 8-bit inputs always are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilestream.core.grid import WorkItem
from tilestream.core.integers import cdiv
from tilestream.core.operands import Epilogue, GemmOperands
from tilestream.core.schedule import Schedule
from tilestream.kernels.cpu.convert import Scratch, widened
from tilestream.kernels.cpu.epilogue import apply, part, wide_dtype

#: Whether the BLAS gives equal rows equal bits, by operands, product, rows and columns.
_even: dict[tuple[object, ...], bool] = {}


def multiply(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, epilogue: Epilogue, dtype: torch.dtype,
    scratch: Scratch | None,
) -> torch.Tensor:  # fmt: skip
    """``epilogue(a @ b)`` in ``dtype``, into ``out``, or into a new tensor if that is None.

    Parameters
    ----------
    a, b
        ``[M, K]`` and ``[K, N]``, or ``[B, M, K]`` and ``[B, K, N]``, any strides.
    epilogue
        Its tensors broadcast to the result.
    scratch
        May be None if `needs_scratch` is False.
    """
    if epilogue.trivial and dtype == a.dtype:
        return product(a, b, out)
    wide = wide_dtype(a.dtype)
    if dtype == wide and not _is_residual(out, epilogue):
        acc = _accumulate(a, b, out, epilogue.alpha, wide, scratch)
        apply(epilogue, acc)
        return acc
    assert scratch is not None, "an accumulator of its own needs scratch"
    with scratch.borrow((*a.shape[:-1], b.shape[-1]), wide) as acc:
        _accumulate(a, b, acc, epilogue.alpha, wide, scratch)
        apply(epilogue, acc)
        return acc.to(dtype) if out is None else out.copy_(acc)


def needs_scratch(x: GemmOperands) -> bool:
    """Whether `multiply` converts an operand, or needs an accumulator other than the output."""
    if x.epilogue.trivial and x.out.dtype == x.a.dtype:
        return False
    wide = wide_dtype(x.a.dtype)
    return x.a.dtype != wide or x.out.dtype != wide or _is_residual(x.out, x.epilogue)


def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """``a @ b`` of two matrices or of two batches of them, in their dtype."""
    return torch.mm(a, b, out=out) if a.dim() == 2 else torch.bmm(a, b, out=out)


def _is_residual(out: torch.Tensor | None, epilogue: Epilogue) -> bool:
    """Whether the residual is the output, so that an accumulator in ``out`` would overwrite it.

    Any other residual does not overlap the output: see `tilestream.ops.operands.refuse_overlap`.
    """
    return out is not None and epilogue.residual is not None and epilogue.residual.data_ptr() == out.data_ptr()


def _accumulate(
    a: torch.Tensor, b: torch.Tensor, into: torch.Tensor | None, alpha: float, dtype: torch.dtype,
    scratch: Scratch | None,
) -> torch.Tensor:  # fmt: skip
    """The product in ``dtype``, into ``into`` or a new tensor; 0 if ``alpha`` is 0."""
    if a.dtype == dtype and alpha:
        return product(a, b, into)
    if into is None:
        into = torch.empty((*a.shape[:-1], b.shape[-1]), dtype=dtype, device="cpu")
    if not alpha:
        return into.zero_()  # as in torch.addmm, NaN in the operands has no effect
    assert scratch is not None, "operands that are converted need scratch"
    for one_a, one_b, one in zip(a, b, into, strict=True) if a.dim() == 3 else ((a, b, into),):
        with widened(one_a, dtype, scratch) as wide_a, widened(one_b, dtype, scratch) as wide_b:
            torch.mm(wide_a, wide_b, out=one)
    return into


class InlineBody:
    """``out = epilogue(a @ b)`` as one item: a `tilestream.launch.cpu.launch.Body`.

    Parameters
    ----------
    x
        Operands from `whole`.
    """

    def __init__(self, x: GemmOperands, scratch: Scratch) -> None:
        self._x, self._scratch = x, scratch

    def compute(self, item: WorkItem) -> None:
        """See `Body`."""
        x = self._x
        multiply(x.a, x.b, x.out, x.epilogue, x.out.dtype, self._scratch)

    def reduce(self, item: WorkItem, slots: Sequence[int]) -> None:
        """See `Body`: the item is whole."""
        raise AssertionError("a part of a tile, from a schedule that makes none")

    def poison(self, item: WorkItem) -> None:
        """See `Body`."""
        self._x.out.fill_(float("nan"))


def whole(x: GemmOperands) -> GemmOperands:
    """Canonical operands for `multiply`: a batch of one is a matrix, and nothing requires a gradient."""

    def seen(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()[0] if drops and tensor.dim() == 3 else tensor.detach()

    def read(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else seen(tensor)

    drops, e = x.a.dim() == 2 or x.a.shape[0] == 1, x.epilogue
    return GemmOperands(
        seen(x.a), seen(x.b), seen(x.out),
        e._replace(bias=read(e.bias), residual=read(e.residual), scale_a=read(e.scale_a), scale_b=read(e.scale_b)),
    )  # fmt: skip


class GemmBody:
    """Load, math and epilogue of ``out = epilogue(a @ b)`` by tiles: a `tilestream.launch.cpu.launch.Body`.

    Parameters
    ----------
    a, b, out
        ``[B, M, K]``, ``[B, K, N]``, ``[B, M, N]``, any strides (0 for an operand that batches share).
    block
        Rows and columns of a tile, and the extent of one K step.
    padded
        Whether each tile is computed with its full number of rows in a tensor of its own, for `tilestream.invariant`:
        the BLAS's bits depend on a call's shape, strides and alignment.

    Raises
    ------
    NotImplementedError
        If the BLAS gives equal rows of a padded tile different bits, so that it cannot keep the promise.
    """

    def __init__(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, epilogue: Epilogue, schedule: Schedule,
        block: tuple[int, int, int], workspace: Scratch, padded: bool = False,
    ) -> None:  # fmt: skip
        self._a, self._b, self._out, self._epilogue = a.detach(), b.detach(), out.detach(), epilogue
        self._block_m, self._block_n, self._block_k = block
        self._workspace = workspace
        self._slots: torch.Tensor | None = None
        if schedule.slots:
            self._slots = workspace.slots(schedule.slots, self._block_m, self._block_n, wide_dtype(a.dtype))
        self._padded = padded
        if padded and out.numel():
            self._refuse_places()

    def compute(self, item: WorkItem) -> None:
        """See `Body`."""
        rows, cols, depth = self._ranges(item)
        a, b = self._a[item.batch, rows, depth], self._b[item.batch, depth, cols]
        out = self._out[item.batch, rows, cols]
        if item.parts > 1:
            slot = self._slot(item.slot, out)
            _accumulate(a, b, slot, self._epilogue.alpha, slot.dtype, self._workspace)
        elif self._padded:
            out.copy_(self._multiply_padded(a, b, part(self._epilogue, item.batch, rows, cols))[: out.shape[0]])
        else:
            multiply(a, b, out, part(self._epilogue, item.batch, rows, cols), out.dtype, self._workspace)

    def reduce(self, item: WorkItem, slots: Sequence[int]) -> None:
        """See `Body`."""
        rows, cols, _ = self._ranges(item)
        out = self._out[item.batch, rows, cols]
        acc = self._slot(slots[0], out)
        for slot in slots[1:]:
            acc += self._slot(slot, out)
        apply(part(self._epilogue, item.batch, rows, cols), acc)
        out.copy_(acc)

    def poison(self, item: WorkItem) -> None:
        """See `Body`."""
        rows, cols, _ = self._ranges(item)
        self._out[item.batch, rows, cols].fill_(float("nan"))

    def _multiply_padded(self, a: torch.Tensor, b: torch.Tensor, e: Epilogue) -> torch.Tensor:
        """The product of a tile, with zeros for missing rows."""
        residual = None if e.residual is None else self._with_rows(e.residual)
        scale_a = e.scale_a if e.scale_a is None or e.scale_a.numel() == 1 else self._with_rows(e.scale_a)
        e = e._replace(residual=residual, scale_a=scale_a)
        return multiply(self._with_rows(a), b, None, e, self._out.dtype, self._workspace)

    def _with_rows(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` with a tile's number of rows, zeros at the end. Each row begins at a multiple of 16 elements."""
        made = x.new_zeros(self._block_m, cdiv(x.shape[1], 16) * 16)[:, : x.shape[1]]
        made[: x.shape[0]].copy_(x)
        return made

    def _refuse_places(self) -> None:
        """Raise unless the BLAS gives equal rows of a padded tile equal bits. Tested once for each kind of call."""
        plain, b = self._epilogue.trivial and self._out.dtype == self._a.dtype, self._b[0, :, : self._block_n]
        dtype = self._a.dtype if plain else wide_dtype(self._a.dtype)
        key = self._a.dtype, b.dtype, dtype, self._block_m, b.shape, b.stride()
        if key not in _even:
            made_b = torch.empty_strided(b.shape, b.stride(), dtype=b.dtype)
            # Random numbers use all bits of the dtype: sums of short numbers would be exact in any order.
            made_b.copy_(torch.arange(b.numel(), dtype=torch.float64).reshape(b.shape).cos())
            ramp, _even[key] = torch.arange(1, b.shape[0] + 1, dtype=torch.float64), True
            for turn in (1.0, 1.7, 0.3, 2.9, 0.7, 2.3):
                row = (turn * ramp).sin().to(self._a.dtype)
                rows = self._with_rows(row.expand(self._block_m, -1))
                made = multiply(rows, made_b, None, Epilogue(), dtype, self._workspace)
                _even[key] = _even[key] and torch.equal(made, made[:1].expand_as(made))
        if not _even[key]:
            raise NotImplementedError(
                f"tilestream.invariant: this machine's BLAS gives equal rows of a product of {self._block_m} rows "
                f"different bits ({self._a.dtype}, K={b.shape[0]}, N={b.shape[1]}); take another dtype, or a GPU"
            )

    def _ranges(self, item: WorkItem) -> tuple[slice, slice, slice]:
        # Slices clip at the end, so the last tile of a row, a column or K is smaller.
        return (
            slice(item.pm * self._block_m, (item.pm + 1) * self._block_m),
            slice(item.pn * self._block_n, (item.pn + 1) * self._block_n),
            slice(item.k_begin * self._block_k, item.k_end * self._block_k),
        )

    def _slot(self, slot: int, tile: torch.Tensor) -> torch.Tensor:
        assert self._slots is not None, "a part of a tile without a place for its partial result"
        return self._slots[slot, : tile.shape[0], : tile.shape[1]]
