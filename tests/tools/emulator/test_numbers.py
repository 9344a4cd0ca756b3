"""The emulator's arithmetic against others: torch's conversions, exact fractions, Gluon's linear maps."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from tilestream_tools.emulator import numbers
from tilestream_tools.emulator.instructions.matrix import in_registers, matrix
from tilestream_tools.emulator.numbers import LANES

KINDS = {
    ("fp8", False): torch.float8_e4m3fn, ("fp8", True): torch.float8_e4m3fnuz, ("bf8", False): torch.float8_e5m2,
    ("bf8", True): torch.float8_e5m2fnuz,
}  # fmt: skip
#: All float16 numbers, and float32 numbers between and around them.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
HALVES = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
with np.errstate(invalid="ignore"):
    NEAR = np.concatenate([HALVES, *(np.nextafter(HALVES, np.float32(to)) for to in (np.inf, -np.inf))])


@pytest.mark.parametrize(("kind", "dtype"), KINDS.items())
def test_bytes_mean_what_torch_says(kind, dtype):
    mine = numbers.fp8_values(*kind)
    theirs = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(("kind", "dtype"), KINDS.items())
def test_numbers_become_the_bytes_that_torch_makes(kind, dtype):
    # Beyond its largest number, torch's e4m3fn has that; the instruction gives NaN.
    near = NEAR[~(np.abs(NEAR) > 464)] if dtype == torch.float8_e4m3fn else NEAR
    mine = numbers.fp8_values(*kind)[numbers.to_fp8(near, *kind)]
    theirs = torch.from_numpy(near).to(dtype).float().numpy()
    np.testing.assert_array_equal(mine, theirs)
    zero = mine == 0
    np.testing.assert_array_equal(np.signbit(mine[zero]), np.signbit(theirs[zero]), "signs of zeros")


def test_beyond_the_largest_number_there_is_nan():
    beyond = np.float32([464, np.nextafter(np.float32(464), np.float32(500)), -1e9, np.inf])
    assert numbers.to_fp8(beyond, "fp8", False).tolist() == [0x7E, 0x7F, 0xFF, 0x7F]


def test_bfloat16_is_torchs():
    exact = np.arange(0, 2**32, 4099, dtype=np.uint64).astype(np.uint32).view(np.float32)
    ties = (np.arange(2**16, dtype=np.uint32) << 16 | np.uint32(0x8000)).view(np.float32)
    for x in (exact[: exact.size // LANES * LANES], ties, NEAR):
        x = x.reshape(-1, LANES)
        mine = numbers.from_bf16(numbers.to_bf16(x))
        np.testing.assert_array_equal(mine, torch.from_numpy(x).bfloat16().float().numpy())


def test_float16_towards_zero():
    found = numbers.to_f16_down(NEAR).astype(np.uint16).view(np.float16)
    finite = np.isfinite(found) & np.isfinite(NEAR)
    up = np.nextafter(found[finite], np.where(NEAR[finite] > 0, np.inf, -np.inf).astype(np.float16))
    assert (np.abs(found[finite].astype(np.float64)) <= np.abs(NEAR[finite].astype(np.float64))).all()
    assert (np.abs(up.astype(np.float64)) > np.abs(NEAR[finite].astype(np.float64))).all()


def rounded(x: Fraction) -> np.float32:
    """The nearest float32, ties to even."""
    near = np.float32(float(x))
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    return min(around, key=lambda y: (abs(Fraction(float(y)) - x), int(np.array(y).view(np.uint32)) & 1))


def test_a_fused_multiply_add_is_rounded_once():
    generator = np.random.default_rng(0)
    a, b, c = (generator.standard_normal(2046).astype(np.float32) for _ in range(3))
    c *= np.exp2(generator.integers(-40, 40, 2046)).astype(np.float32)
    # Sums that are near ties of float32, and just off: twice rounded they go the other way.
    one, tiny = np.float32(1 + 2.0**-12), np.float32(2.0**-60)
    a, b, c = np.append(a, [one, one]), np.append(b, [one, one]), np.append(c, [tiny, -tiny])
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    found = numbers.fma(*(x.astype(np.float32).reshape(-1, LANES) for x in (a, b, c)))
    assert found.ravel().tolist() == [float(rounded(x)) for x in exact]


def test_integers_bit_by_bit():
    x = np.random.default_rng(1).integers(0, 2**32, 512, dtype=np.uint64).astype(np.uint32)
    x[:3] = 0, 1, 0xFFFFFFFF
    whole = x.tolist()
    assert numbers.reversed_bits(x).tolist() == [int(f"{y:032b}"[::-1], 2) for y in whole]
    assert numbers.leading_zeros(x).tolist() == [32 - y.bit_length() if y else 0xFFFFFFFF for y in whole]
    assert numbers.trailing_zeros(x).tolist() == [(y & -y).bit_length() - 1 if y else 0xFFFFFFFF for y in whole]
    signed = numbers.extract_signed(x.reshape(-1, LANES), numbers.uniform(5), numbers.uniform(9)).view(np.int32)
    assert signed.ravel().tolist() == [(y >> 5 & 511) - (512 if y >> 13 & 1 else 0) for y in whole]
    for table in (0x00, 0xFF, 0x96, 0xE8, 0xCA):
        got = numbers.truth_table(table)(x, x[::-1], np.roll(x, 7)).tolist()
        parts = zip(whole, whole[::-1], np.roll(x, 7).tolist(), strict=True)
        halves = numbers.truth_table(table)(*(y.astype(np.uint16) for y in (x, x[::-1], np.roll(x, 7))))
        assert halves.dtype == np.uint16
        assert halves.tolist() == [y & 0xFFFF for y in got]
        assert got == [
            sum((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32))
            for a, b, c in parts
        ]  # fmt: skip
        low = numbers.truth_table(table)(*(y.astype(np.uint16) for y in (x, x[::-1], np.roll(x, 7))))
        assert low.dtype == np.uint16
        assert low.tolist() == [y & 0xFFFF for y in got]


def test_bytes_are_permuted():
    high, low = (np.full(LANES, x, np.uint32) for x in (0x8877F655, 0x44332211))
    for select, wanted in ((0x07060504, 0x8877F655), (0x00010203, 0x11223344), (0x0C0D0504, 0x00FFF655),
                           (0x0B0A0908, 0xFFFF0000)):  # fmt: skip
        for lanes in (numbers.uniform(select), np.full(LANES, select, np.uint32)):
            assert numbers.permuted_bytes(high, low, lanes).tolist() == [wanted] * LANES, hex(select)


@pytest.mark.parametrize("rows", [16, 32])
def test_a_matrix_instructions_result_lies_where_gluon_says(rows):
    pytest.importorskip("triton")
    from triton.experimental.gluon import language as gl

    from layouts import holdings

    layout = gl.amd.AMDMFMALayout(4, [rows, rows, 16 if rows == 32 else 32], False, [1, 1])
    (lanes,) = holdings(layout, [rows, rows])
    places = in_registers(np.arange(rows * rows).reshape(rows, rows))
    mine = [[divmod(int(place), rows) for place in places[:, lane]] for lane in range(LANES)]
    assert mine == lanes


@pytest.mark.parametrize(
    ("rows", "k", "kind"),
    [
        (16, 4, "f32"), (32, 2, "f32"), (16, 16, "f16"), (32, 8, "f16"), (16, 32, "f16"), (32, 16, "f16"),
        (16, 16, "bf16"), (32, 8, "bf16"), (16, 32, "bf16"), (32, 16, "bf16"), (16, 32, "fp8"), (32, 16, "fp8"),
        (16, 32, "bf8"), (32, 16, "bf8"),
    ],
)  # fmt: skip
def test_a_matrix_instructions_operands_lie_where_gluon_says(rows, k, kind):
    """Of the widest instructions, K may be in another order: in that of both operands, which changes no sum."""
    pytest.importorskip("triton")
    from triton.experimental.gluon import language as gl

    from layouts import holdings

    made = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "fp8": np.uint8, "bf8": np.uint8}[kind]
    parent = gl.amd.AMDMFMALayout(4, [rows, rows, k], False, [1, 1])
    for operand, shape in ((0, [rows, k]), (1, [k, rows])):
        (lanes,) = holdings(gl.DotOperandLayout(operand, parent, k * rows // LANES), shape)
        for axis in (0, 1):  # of which the lanes' elements are told
            told = np.array([[place[axis] for place in lane] for lane in lanes], np.float32)
            if kind == "bf16":
                elements = (told.view(np.uint32) >> 16).astype(np.uint16)
            else:
                elements = told.astype(made)  # of 8 bits: a byte's number, not its value
            registers = np.ascontiguousarray(elements.view(np.uint32).T)
            found = matrix(registers.tobytes(), rows, kind, False)
            wanted = np.indices(shape)[axis]
            if kind in ("fp8", "bf8"):
                wanted = numbers.fp8_values(kind, False)[wanted]
            np.testing.assert_array_equal(found, wanted if operand == 0 else wanted.T)
