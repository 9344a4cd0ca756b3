"""The order of a sum, read from matrix instructions: of single ones, of compiled kernels, and beside the record.

The record (``benchmarks/results/amd/alike.json``) is made by ``python tests/tools/emulator/executed alike --record``.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton")

from test_executed import executed

from tilestream_tools.emulator import Fault
from tilestream_tools.emulator.machine import Step
from tilestream_tools.emulator.registers import Registers
from tilestream_tools.emulator.sums import CONVERTED, Addition, Sums, coded, digits, joined, order_of, runs

RECORD = Path(__file__).parents[3] / "benchmarks" / "results" / "amd" / "alike.json"
CASE = ("backend", "arch", "tile", "dtype", "layout", "how")
#: Two instructions that add 32 of K into 16 x 16, and one that adds them at once.
NARROW = ("f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], 0", "f32_16x16x16_bf16 v[0:3], v[8:9], v[10:11], v[0:3]")
WIDE = ("f32_16x16x32_bf16 v[0:3], v[4:7], v[8:11], 0",)


def put(w: Registers, first: int, places: list[int], of_b: bool, size: int = 2, digit: int = 0) -> None:
    """Write the elements of these places of K into the registers of an operand of 16 rows."""
    every = coded(64, of_b, size, digit)
    row = every[places].reshape(4, -1)  # by group of 16 lanes
    lanes = np.repeat(row, 16, axis=0).reshape(64, -1)
    words = np.ascontiguousarray(lanes).view(np.uint32)
    w.v[first : first + words.shape[1]] = words.T


def ran(lines: tuple[str, ...], operands: list[tuple[int, list[int], bool]], size: int = 2) -> Sums:
    w, sums = Registers(), Sums(size)
    for first, places, of_b in operands:
        put(w, first, places, of_b, size)
    for one in lines:
        step = Step(lambda w: None, frozenset(), frozenset(), "", f"v_mfma_{one}", 0)
        sums.traced([step])[0].act(w)
    return sums


def test_two_instructions_and_one_add_in_different_orders():
    low, high = list(range(16)), list(range(16, 32))
    sums = ran(NARROW, [(4, low, False), (6, low, True), (8, high, False), (10, high, True)])
    assert order_of(joined([sums.chain(256)], 2), 32) == ("f32_16x16x16_bf16", "A", 16, "0-15", 32)
    sums = ran(WIDE, [(4, low + high, True), (8, low + high, False)])
    assert order_of(joined([sums.chain(256)], 2), 32) == ("f32_16x16x32_bf16", "B", 32, "0-31", 32)


def test_waves_may_compute_a_tile_more_than_once_but_all_of_it():
    low = list(range(16))
    operands = [(4, low, False), (6, low, True)]
    assert len(ran(NARROW[:1] * 2, operands).chain(256)) == 1
    with pytest.raises(Fault, match="adds to 256 elements, of 192"):
        ran(NARROW[:1], operands).chain(192)
    again = NARROW[1].replace("v[8:9], v[10:11]", "v[4:5], v[6:7]")
    with pytest.raises(Fault, match="adds to 512 elements, of 256"):
        ran((NARROW[0], NARROW[0], again), operands).chain(256)


@pytest.mark.parametrize(
    ("operands", "why"),
    [
        ([(4, 0, False), (6, 16, True)], "multiplies different places of K"),
        ([(4, 0, False), (6, 0, False)], "multiplies an operand with itself"),
    ],
)
def test_what_is_no_product_along_k_is_refused(operands, why):
    with pytest.raises(Fault, match=why):
        ran(NARROW[:1], [(at, list(range(k, k + 16)), of_b) for at, k, of_b in operands])


def test_rows_with_other_places_of_k_are_refused():
    w, sums = Registers(), Sums(2)
    put(w, 4, list(range(16)), False)
    put(w, 6, list(range(16)), True)
    w.v[4, 3] ^= 1
    step = Step(lambda w: None, frozenset(), frozenset(), "", f"v_mfma_{NARROW[0]}", 0)
    with pytest.raises(Fault, match="rows of one instruction have different places"):
        sums.traced([step])[0].act(w)


@pytest.mark.parametrize(("exponent", "refused"), [(127, False), (126, True)])
def test_scales_are_1(exponent, refused):
    w, sums = Registers(), Sums(1)
    places = list(range(128))
    for first, of_b in ((4, False), (12, True)):
        put(w, first, [x % 64 for x in places], of_b, 1)
    w.v[20] = w.v[21] = 0x500 | exponent
    text = "v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], 0, v20, v21 op_sel_hi:[0,0,0]"
    (step,) = sums.traced([Step(lambda w: None, frozenset(), frozenset(), "", text, 0)])
    if refused:
        with pytest.raises(Fault, match="a scale other than 1"):
            step.act(w)
    else:
        step.act(w)
        assert [one.instruction for one in sums.chain(256)] == ["scale_f32_16x16x128_f8f6f4 of scales"]


def test_sums_that_nothing_began_and_those_of_a_part_are_refused():
    low = list(range(16))
    with pytest.raises(Fault, match="with different sums, or with none"):
        ran(NARROW[1:], [(8, low, False), (10, low, True)])
    sums = ran(NARROW[:1], [(4, low, False), (6, low, True)])
    with pytest.raises(Fault, match="adds to 256 elements, of 512"):
        sums.chain(512)
    with pytest.raises(Fault, match=CONVERTED):
        ran(NARROW[:1], [], size=1)


def addition(*places: int, name: str = "x", rows: str = "B") -> Addition:
    return Addition(name, rows, places)


def test_the_rule_behind_an_order():
    steps = [addition(0, 2), addition(1, 3), addition(4, 6), addition(5, 7)]
    assert order_of(steps, 8) == ("x", "B", 4, "0 2; 1 3", 8)
    padded = [*steps[:2], addition(4, -1), addition(5, -1)]
    assert order_of(padded, 6).end == 8
    for wrong in (steps[::-1], [*steps[:3], addition(7, 5)], [*steps[:3], addition(5, 7, name="y")], padded):
        with pytest.raises(Fault, match="no regular order"):
            order_of(wrong, 7)
    with pytest.raises(Fault, match="change places"):
        order_of([*steps[:3], addition(5, 7, rows="A")], 8)
    assert runs((0, 1, 2, 8, 9, 4)) == "0-2 8-9 4"


def test_bytes_name_k_in_two_launches():
    assert [digits(size) for size in (1, 2, 4)] == [2, 1, 1]
    low, high = (coded(1000, True, 1, digit).astype(int) for digit in (0, 1))
    assert (low + ((high & 127) << 8)).tolist() == list(range(1, 1001))
    assert (high >= 128).all()
    for size, k in ((1, 2**15), (2, 2**15)):
        with pytest.raises(ValueError, match="cannot name so many"):
            coded(k, False, size, 0)


# Beside the record ----------------------------------------------------------------------------------------------------


def check(found: list[dict], count: int) -> None:
    kept = {tuple(row[name] for name in CASE): row for row in json.loads(RECORD.read_text(encoding="utf-8"))["rows"]}
    assert len(found) >= count
    other = [row for row in found if kept[tuple(row[name] for name in CASE)] != row]
    assert not other, f"{len(other)} of {len(found)} are not as in the record, such as {other[:2]}"


def test_a_sample_is_compiled_as_the_record_says(tmp_path):
    check(executed("alike-quick", cache=tmp_path, seconds=850), 7)


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_all_tiles_are_compiled_as_the_record_says(tmp_path):
    check(executed("alike", cache=tmp_path, seconds=5300), 291)
