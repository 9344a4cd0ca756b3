"""The copy of a product's operands into rows that TMA can address: see `tilestream.plan.realign`.

A program copies a block of rows and columns of A or of B. Elements are copied as integers, several at a time where rows
and strides allow it. A copy may lie across: rows of the operand become columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Numbers of which no compiled kernel depends: it does on rows' and columns' strides alone.
_ANY = [f"{name}_{of}" for name in "ab" for of in ("rows", "columns", "batch", "to_batch", "begin", "blocks")]


@triton.jit(do_not_specialize=_ANY)
def realign(
    a, b, partials,
    a_rows, a_columns, a_batch, a_row, a_column, a_to_batch, a_to_row, a_to_column, a_begin, a_blocks,
    b_rows, b_columns, b_batch, b_row, b_column, b_to_batch, b_to_row, b_to_column, b_begin, b_blocks,
    A_WORD: tl.constexpr, B_WORD: tl.constexpr, A_BLOCK: tl.constexpr, B_BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy blocks of A, and then blocks of B: as many programs as both have.

    Parameters
    ----------
    a, b
        The operands; None: not copied.
    partials
        The launch's scratch, 128-byte aligned, which holds the copies.
    a_rows, a_columns
        Extents of one of A's matrices in words of ``A_WORD`` bytes; its columns are along the smaller stride.
    a_batch, a_row, a_column
        A's strides in words. ``a_to_``: the copy's.
    a_begin
        The words before A's copy in ``partials``.
    a_blocks
        The number of A's blocks.
    A_BLOCK
        Rows and columns of a block.
    """
    block = tl.program_id(0)
    if A_WORD:
        if block < a_blocks:
            copy_block(
                a, partials, block, (a_rows, a_columns), (a_batch, a_row, a_column),
                (a_to_batch, a_to_row, a_to_column), a_begin, A_WORD, A_BLOCK,
            )  # fmt: skip
    if B_WORD:
        if block >= a_blocks:
            copy_block(
                b, partials, block - a_blocks, (b_rows, b_columns), (b_batch, b_row, b_column),
                (b_to_batch, b_to_row, b_to_column), b_begin, B_WORD, B_BLOCK,
            )  # fmt: skip


@triton.jit
def copy_block(source, target, block, extents, strides, to, begin, WORD: tl.constexpr, BLOCK: tl.constexpr):
    """Copy one block of a batch of matrices; ``strides``, ``to``: of batch, row and column, in words."""
    rows, columns = extents
    WIDTH: tl.constexpr = tl.int8 if WORD == 1 else tl.int16 if WORD == 2 else tl.int32 if WORD == 4 else tl.int64
    across = tl.cdiv(columns, BLOCK[1])
    blocks = tl.cdiv(rows, BLOCK[0]) * across
    batch = (block // blocks).to(tl.int64)
    r = (block % blocks // across * BLOCK[0] + tl.arange(0, BLOCK[0]))[:, None]
    c = (block % across * BLOCK[1] + tl.arange(0, BLOCK[1]))[None, :]
    inside = (r < rows) & (c < columns)
    word = tl.pointer_type(WIDTH)
    read = source.to(word) + batch * strides[0] + r.to(tl.int64) * strides[1] + c.to(tl.int64) * strides[2]
    written = target.to(word) + begin + batch * to[0] + r.to(tl.int64) * to[1] + c.to(tl.int64) * to[2]
    tl.store(written, tl.load(read, mask=inside), mask=inside)
