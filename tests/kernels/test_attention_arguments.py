"""What attention is launched with: by the kernels' own names, and with no more said of addresses than is true."""

from __future__ import annotations

import inspect

import pytest

from tilestream.core.device import DeviceProperties
from tilestream.kernels.attention_config import PortableAttentionConfig
from tilestream.launch.attention_arguments import GIVEN, AttentionLayout
from tilestream.launch.portable.attention_arguments import AttentionArguments, merge_shape, padded
from tilestream.plan.attention_planner import plan_attention
from tilestream.plan.attention_problem import AttentionProblem

A100 = DeviceProperties("an A100", "portable", 108, 3e11, 1.5e12, "a stub", "sm_80", 166912)
MI300 = DeviceProperties("an MI300X", "portable", 304, 5e11, 5.3e12, "a stub", "gfx942", 65536)


def made(device: DeviceProperties = A100, out: tuple[int, int, int] = (4096, 256, 64), **more):
    problem = AttentionProblem(2, 4, 4, 16, 16, 64, **more)
    layout = AttentionLayout((4096, 256, 64), (4096, 256, 64), (4096, 256, 64), out, (64, 1, 16))
    return plan_attention.__wrapped__(problem, device=device), layout


def config(*given) -> PortableAttentionConfig:
    return AttentionArguments(*given).config()


def test_arguments_are_found_by_the_kernels_names():
    kernel = pytest.importorskip("tilestream.kernels.portable.attention").attention
    names = list(inspect.signature(kernel.fn).parameters)
    plan, layout = made(causal=True, window=(5, None), softcap=2.0)
    arguments = AttentionArguments(plan, layout)
    operands = [f"the {name}" for name in GIVEN[:17]]
    filled = arguments.pack(kernel)((*operands, 7, 1, *arguments.scales(0.5)))
    known = dict(zip(names, filled, strict=True))
    assert names[-1] == "C"
    assert known["C"] == arguments.config()
    given = [name for name in GIVEN[:17] if name in names]
    assert given == list(GIVEN[:17])
    assert [known[name] for name in given] == [f"the {name}" for name in given]
    assert (known["base"], known["reset"], known["softcap_scale"]) == (7, 1, 0.25)
    assert known["scale"] == pytest.approx(2.0 * 1.4426950408889634)
    assert (known["left"], known["right"], known["C"].LEFT, known["C"].RIGHT) == (5, 0, True, True)
    assert not known["C"].TOP_LEFT
    assert (known["stride_or"], known["lse_batch"], known["lse_row"], known["lse_head"]) == (256, 64, 1, 16)
    assert (known["num_m"], known["num_n"], known["head_tiles"], known["q_heads_per_kv"]) == (1, 8, 4, 1)
    assert (known["sequences"], known["seqlen_q"]) == (3, 16)


@pytest.mark.parametrize(
    ("out", "aligned"), [((4096, 256, 64), 8), ((4096, 256, 65), 1), ((4096, 257, 64), 1), ((4096, 264, 72), 8)]
)
def test_the_outputs_strides_are_its_own(out, aligned):
    known = config(*made(out=out))
    assert (8, aligned) == (known.ALIGN, known.ALIGN_OUT)


def test_8_bit_operands_have_an_output_of_16():
    known = config(*made(MI300, dtype="float8_e4m3fn", scaled=True))
    assert (known.ALIGN, known.ALIGN_OUT) == (16, 8)
    assert known.CONVERT, "gfx942 knows other kinds of them"


@pytest.mark.parametrize(("out", "wide"), [((0, 2**26, 64), True), ((0, 2**16, 64), False), ((0, 64, 2**30), True)])
def test_strange_views_are_counted_in_64_bits(out, wide):
    assert wide == config(*made(out=out)).OFFSETS_64BIT


def test_columns_are_padded_to_a_power_of_two():
    assert [padded(n) for n in (8, 16, 24, 64, 72, 128, 192, 256)] == [16, 16, 32, 64, 128, 128, 256, 256]


def test_a_merge_reads_as_many_shares_as_there_are_and_16_at_most():
    """And has a warp for each 2048 numbers."""
    found = [merge_shape(shares, 128) for shares in (2, 3, 4, 5, 16, 17, 40)]
    assert found == [(2, 1), (4, 1), (4, 1), (8, 1), (16, 1), (16, 1), (16, 1)]
    assert [merge_shape(16, columns)[1] for columns in (16, 128, 256, 512)] == [1, 1, 2, 4]
