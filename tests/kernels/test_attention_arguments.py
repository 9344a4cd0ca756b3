"""What the portable attention is launched with: in its order, and with no more said of addresses than is true."""

from __future__ import annotations

import pytest

from tilestream.core.device import DeviceProperties
from tilestream.launch.portable.attention_arguments import AttentionArguments, AttentionLayout, constants, padded
from tilestream.plan.attention_planner import plan_attention
from tilestream.plan.attention_problem import AttentionProblem

A100 = DeviceProperties("an A100", "portable", 108, 3e11, 1.5e12, "a stub", "sm_80", 166912)
MI300 = DeviceProperties("an MI300X", "portable", 304, 5e11, 5.3e12, "a stub", "gfx942", 65536)


def made(device: DeviceProperties = A100, out: tuple[int, int, int] = (4096, 256, 64), **more):
    problem = AttentionProblem(2, 4, 4, 16, 16, 64, **more)
    layout = AttentionLayout((4096, 256, 64), (4096, 256, 64), (4096, 256, 64), out, (64, 1, 16))
    return plan_attention.__wrapped__(problem, device=device), layout


def test_arguments_are_in_the_kernels_order():
    kernel = pytest.importorskip("tilestream.kernels.portable.attention").attention
    names = getattr(kernel, "arg_names", None) or list(kernel.signature.parameters)
    plan, layout = made(causal=True, window=(5, None), softcap=2.0)
    known = constants(plan, layout)
    assert names[-len(known) :] == list(known)
    operands = [f"operand {i}" for i in range(17)]
    filled = dict(zip(names, AttentionArguments(plan, layout).fill(*operands, 7, 1, 0.5), strict=True))
    assert filled["q"] == "operand 0"
    assert (filled["counters"], filled["log"]) == ("operand 15", "operand 16")
    assert (filled["base"], filled["reset"], filled["cap"]) == (7, 1, 2.0)
    assert filled["scale"] == pytest.approx(0.5 * 1.4426950408889634)
    assert (filled["left"], filled["right"], filled["top_left"]) == (5, 0, 0)
    assert (filled["stride_os"], filled["stride_lb"], filled["stride_ls"], filled["stride_lh"]) == (256, 64, 1, 16)
    assert (filled["num_m"], filled["num_n"], filled["packs"], filled["ratio"]) == (1, 8, 4, 1)
    assert filled["seqlen_q"] == 16


@pytest.mark.parametrize(
    ("out", "aligned"), [((4096, 256, 64), 8), ((4096, 256, 65), 1), ((4096, 257, 64), 1), ((4096, 264, 72), 8)]
)
def test_the_outputs_strides_are_its_own(out, aligned):
    known = constants(*made(out=out))
    assert (known["ALIGN"], known["ALIGN_OUT"]) == (8, aligned)


def test_8_bit_operands_have_an_output_of_16():
    known = constants(*made(MI300, dtype="float8_e4m3fn", scaled=True))
    assert (known["ALIGN"], known["ALIGN_OUT"]) == (16, 8)
    assert known["CONVERT"], "gfx942 knows other kinds of them"


@pytest.mark.parametrize(("out", "wide"), [((0, 2**26, 64), True), ((0, 2**16, 64), False), ((0, 64, 2**30), True)])
def test_strange_views_are_counted_in_64_bits(out, wide):
    assert constants(*made(out=out))["WIDE"] == wide


def test_columns_are_padded_to_a_power_of_two():
    assert [padded(n) for n in (8, 16, 24, 64, 72, 128, 192, 256)] == [16, 16, 32, 64, 128, 128, 256, 256]
