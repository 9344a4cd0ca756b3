"""The arguments of `tilestream.kernels.portable.realign.realign` that a plan and a layout decide."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

from tilestream.core.integers import cdiv
from tilestream.launch.gemm_arguments import Layout, Strides
from tilestream.plan.plan import Plan
from tilestream.plan.problem import ITEMSIZE
from tilestream.plan.realign import pitch_of
from tilestream.plan.tma import k_major_only, row_multiple

#: Rows and columns of a program's block: of long rows, of short ones, and where the copy lies across.
LONG, SHORT, ACROSS = (32, 128), (128, 32), (64, 64)
#: Bytes of the longest word that is copied, and that the beginnings of copies are multiples of.
_LONGEST, _ALIGNED = 8, 128
#: Bytes of an element of `tilestream.runtime.device_workspace.Words.partials`.
_FLOAT = 4
#: Arguments of an operand.
_NUMBERS = 10


class Copy(NamedTuple):
    """How an operand is copied.

    Attributes
    ----------
    begin, bytes
        The copy's place in the scratch, from the beginning of all copies, and its size.
    strides
        The copy's strides in elements, in the order of the operand's own.
    word
        Bytes that are copied at a time.
    numbers
        The arguments of `tilestream.kernels.portable.realign.realign`, without ``begin``: of rows, columns, strides.
    block, blocks
        The rows and columns of a block, and their number.
    """

    begin: int
    bytes: int
    strides: Strides
    word: int
    numbers: tuple[int, ...]
    block: tuple[int, int]
    blocks: int


def copy_of(
    extents: tuple[int, int], strides: Strides, batch: int, size: int, k: int, aligned: bool, begin: int
) -> Copy:
    """The copy of ``batch`` matrices of elements of ``size`` bytes.

    Parameters
    ----------
    strides
        Of batch, row and column; a batch's of 0 is one matrix.
    k
        The dimension of K, 0 or 1: rows of the copy are along it if the tensor cores take the dtype only so.
    aligned
        Whether the operand's address is a multiple of 16.
    begin
        See `Copy`.
    """
    of_batch, *pair = strides
    batch = batch if of_batch else 1
    # Elements of a dimension of 1 are not apart: its stride may be anything.
    apart = [stride if extent > 1 else math.inf for extent, stride in zip(extents, pair, strict=True)]
    inner = 1 if apart[1] <= apart[0] else 0
    major = k if k_major_only(size) else _major(extents, size, inner, k)
    outer, pitch = 1 - inner, pitch_of(extents[major], size)
    made = [0, 0]
    made[major], made[1 - major] = 1, pitch
    plane = extents[1 - major] * pitch
    word, together = size, major == inner and pair[inner] == 1 and aligned
    numbers = extents[outer], extents[inner], of_batch, pair[outer], pair[inner]
    to = plane, made[outer], made[inner]
    while together and word < _LONGEST and not any(x * size % (2 * word) for x in (*numbers[1:4], *to[:2])):
        word *= 2
    each = word // size
    counted = [numbers[0], *(x // each for x in numbers[1:4]), numbers[4], *(x // each for x in to[:2]), to[2]]
    block = ACROSS if major != inner else LONG if counted[1] >= LONG[1] else SHORT
    blocks = batch * cdiv(counted[0], block[0]) * cdiv(counted[1], block[1])
    of_copy = plane if of_batch else 0, made[0], made[1]
    return Copy(begin, batch * plane * size, of_copy, word, tuple(counted), block, blocks)


class RealignArguments:
    """The arguments of the copies of a plan's operands, but for addresses.

    Parameters
    ----------
    before
        Elements of the launch's partial results, behind which the copies lie.
    aligned
        Whether the addresses of A and of B are multiples of 16.

    Attributes
    ----------
    copies
        The operands that are copied, by name.
    layout
        The layout with the copies' strides.
    floats
        Elements of scratch, with what is before the copies.
    programs
        The programs of the launch.
    """

    def __init__(self, plan: Plan, layout: Layout, before: int, aligned: tuple[bool, bool]) -> None:
        problem, begin = plan.problem, _rounded(before * _FLOAT)
        extents = {"a": (problem.m, problem.k), "b": (problem.k, problem.n)}
        self.copies: dict[str, Copy] = {}
        for i, (name, dtype) in enumerate(zip("ab", problem.dtypes, strict=True)):
            if name in plan.realigned:
                made = copy_of(
                    extents[name], getattr(layout, name), problem.batch, ITEMSIZE[dtype], 1 - i, aligned[i], begin
                )  # fmt: skip
                self.copies[name], begin = made, begin + _rounded(made.bytes)
        of_a, of_b = (self.copies[name].strides if name in self.copies else None for name in "ab")
        self.layout = layout._replace(a=of_a or layout.a, b=of_b or layout.b)
        self.floats = begin // _FLOAT
        self.programs = sum(one.blocks for one in self.copies.values())
        given = [self.copies.get(name) for name in "ab"]
        self._numbers = [
            *itertools.chain.from_iterable(
                [0] * _NUMBERS if one is None else [*one.numbers, one.begin // one.word, one.blocks] for one in given
            ),
            *(0 if one is None else one.word for one in given),
            *((1, 1) if one is None else one.block for one in given),
        ]  # fmt: skip

    def fill(self, a: Any, b: Any, partials: Any) -> tuple[Any, ...]:
        """All arguments in the order of the kernel's entry; None for an operand that is not copied."""
        return (a, b, partials, *self._numbers)


def _major(extents: tuple[int, int], size: int, inner: int, k: int) -> int:
    """The dimension of a copy's rows: the operand's own, or K if these begin at less, or take more than twice as much.

    The cost model and the limit of bytes are of rows along K. Rows of few elements are mostly padding.
    """

    def of(major: int) -> tuple[int, int]:
        pitch = pitch_of(extents[major], size)
        return row_multiple(pitch * size), extents[1 - major] * pitch

    (begins, plane), (begins_k, plane_k) = of(inner), of(k)
    return inner if begins >= begins_k and plane <= 2 * plane_k else k


def _rounded(count: int) -> int:
    return cdiv(count, _ALIGNED) * _ALIGNED
