"""Products, moves and atomics of Triton, compiled for AMD, executed, and compared with numpy's own.

All numbers are exact: products are of small integers, so that the order of sums does not matter, and a lane or an
element of another place shows.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from executed.problems import Built, Operands, answer

SIZE = 64
#: By architecture: what its matrix units multiply.
DTYPES = {
    "gfx942": (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    "gfx950": (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2),
}
#: Rows of a matrix instruction; 4 warps of them are at most the product's rows.
ROWS = (16, 32)


@triton.jit
def _product(x, y, out, ROWS_A: tl.constexpr, ROWS_B: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr):
    i, k = tl.arange(0, 2 * SIZE), tl.arange(0, K)
    a = tl.load(x + (i[:, None] * K + k[None, :] if ROWS_A else k[None, :] * 2 * SIZE + i[:, None]))
    b = tl.load(y + (k[:, None] * 2 * SIZE + i[None, :] if ROWS_B else i[None, :] * K + k[:, None]))
    before = i[:, None] * 2.0 - i[None, :]
    tl.store(out + i[:, None] * 2 * SIZE + i[None, :], tl.dot(a, b, acc=before, input_precision="ieee"))


@triton.jit
def _turned(x, out, SIZE: tl.constexpr):
    """A square turned over its diagonal; where a mask is off, nothing is read, and a column stays as it was."""
    i = tl.arange(0, SIZE)
    whole = i[:, None] * SIZE + i[None, :]
    square = tl.load(x + whole, mask=i[:, None] != 5, other=7)
    tl.store(out + whole, tl.trans(square), mask=i[None, :] != 3)


@triton.jit
def _atomics(words, before, TIMES: tl.constexpr):
    """Of a word each, so many times: as the kernels have them, by one lane."""
    kind: tl.constexpr = words.dtype.element_ty
    for n in range(TIMES):
        x = (n * 7).to(kind)
        tl.store(before + 8 * n, tl.atomic_add(words, x))
        tl.store(before + 8 * n + 1, tl.atomic_max(words + 1, x - 50))
        tl.store(before + 8 * n + 2, tl.atomic_xchg(words + 2, x))
        tl.store(before + 8 * n + 3, tl.atomic_or(words + 3, x))
        tl.store(before + 8 * n + 4, tl.atomic_cas(words + 4, x // 2, x + 1000))
        tl.store(before + 8 * n + 5, tl.atomic_and(words + 5, x))
        tl.store(before + 8 * n + 6, tl.atomic_xor(words + 6, x))
        tl.store(before + 8 * n + 7, tl.atomic_min(words + 7, x - 50))


@triton.jit
def _converted(x, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + i).to(tl.float16))


def _left(words: list[int], times: int) -> tuple[list[int], list[int]]:
    """What `_atomics` leaves of eight words, and what was there before each."""
    before = []
    for n in range(times):
        x = n * 7
        before += words
        add, most, _, either, at, both, one, least = words
        words = [add + x, max(most, x - 50), x, either | x, x + 1000 if at == x // 2 else at, both & x, one ^ x,
                 min(least, x - 50)]  # fmt: skip
    return words, before


def rows(arch: str) -> list[dict[str, Any]]:
    """Operation by operation: how many elements are not numpy's."""
    return [*_products(arch), *_moves(arch), *_all_atomics(arch), *_conversions(arch)]


def _row(arch: str, operation: str, found: np.ndarray, wanted: np.ndarray) -> dict[str, Any]:
    wrong = found != wanted
    return {"arch": arch, "operation": operation, "wrong": int(wrong.sum()), "at": str(np.argwhere(wrong)[:1])}


def _products(arch: str) -> list[dict[str, Any]]:
    made, generator = [], torch.Generator().manual_seed(3)
    for dtype, instruction, (rows_a, rows_b) in itertools.product(DTYPES[arch], ROWS, ((True, False), (False, True))):
        k = 4 * SIZE if dtype.itemsize == 1 else SIZE
        a, b = (torch.randint(-4, 5, shape, generator=generator).float() for shape in ((2 * SIZE, k), (k, 2 * SIZE)))
        o, i = Operands(), torch.arange(2 * SIZE)
        x = o.of((a if rows_a else a.t().contiguous()).to(dtype), "A")
        y = o.of((b if rows_b else b.t().contiguous()).to(dtype), "B")
        like = torch.full((2 * SIZE, 2 * SIZE), torch.nan)
        out = o.of(like, "the product")
        options = {"num_warps": 4, "matrix_instr_nonkdim": instruction}
        Built(_product, options, arch).launch((x, y, out, rows_a, rows_b, k, SIZE), o.memory, 1, seed=5)
        wanted = a.double() @ b.double() + (i[:, None] * 2.0 - i[None, :])
        how = f"{'rows' if rows_a else 'columns'} of A, {'rows' if rows_b else 'columns'} of B"
        made.append(_row(
            arch, f"product {dtype}, {instruction} rows, {how}", answer(out, like).numpy(), wanted.numpy()
        ))  # fmt: skip
    return made


def _moves(arch: str) -> list[dict[str, Any]]:
    made, generator = [], np.random.default_rng(7)
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        x = torch.from_numpy(generator.integers(-100, 100, (SIZE, SIZE))).to(dtype)
        o, like = Operands(), torch.full((SIZE, SIZE), 99, dtype=dtype)
        given, out = o.of(x.view(dtype), "the square"), o.of(like, "the square, turned")
        # Bytes of one dword that several waves write are a race to the emulator.
        Built(_turned, {"num_warps": 1 if dtype.itemsize < 4 else 4}, arch).launch(
            (given, out, SIZE), o.memory, 1, seed=6
        )
        wanted = x.clone()
        wanted[5] = 7
        wanted = wanted.t().contiguous()
        wanted[:, 3] = 99
        made.append(_row(arch, f"turned {dtype}", answer(out, like).numpy(), wanted.numpy()))
    return made


def _all_atomics(arch: str) -> list[dict[str, Any]]:
    made, times = [], 12
    for dtype in (torch.int32, torch.int64):
        words = [70, -60, 5, 3, 0, 127, 99, 60]
        o, like = Operands(), torch.zeros(8 * times, dtype=dtype)
        given, before = o.of(torch.tensor(words, dtype=dtype), "the words"), o.of(like, "what was there")
        Built(_atomics, {"num_warps": 1}, arch).launch((given, before, times), o.memory, 1, seed=9)
        found = torch.cat((answer(given, like), answer(before, like)))
        wanted = [*itertools.chain(*_left(words, times))]
        made.append(_row(arch, f"atomics {dtype}", found.numpy(), np.array(wanted)))
    return made


def _conversions(arch: str) -> list[dict[str, Any]]:
    """All 256 numbers of each kind of 8 bits that the matrix units take."""
    made = []
    for dtype in DTYPES[arch][3:]:
        x = torch.arange(256, dtype=torch.uint8).view(dtype)
        o, like = Operands(), torch.zeros(256, dtype=torch.float16)
        given, out = o.of(x, "bytes"), o.of(like, "halves")
        Built(_converted, {"num_warps": 1}, arch).launch((given, out, 256), o.memory, 1, seed=4)
        found, wanted = answer(out, like), x.half()
        row = _row(arch, f"converted {dtype}", found.view(torch.int16).numpy(), wanted.view(torch.int16).numpy())
        row["wrong"] = int(((found != wanted) & ~(found.isnan() & wanted.isnan())).sum())
        made.append(row)
    return made
