"""What CDNA's attention computes, by its own text on numpy: every mask and layout, both ways of the copies, both archs.

The machine rounds nothing to 16 bits, so its answers are held to the error rule of float32 (`attention_maths`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language")

from attention_operands import prepared
from emulated import FLOAT32, Machine, Tensor
from emulated_attention import AttentionMachine, run

from attention_maths import FEATURES, MIXES, Case
from tilestream.core.gpu_specs import named
from tilestream.core.operands import AttentionOperands
from tilestream.kernels.attention_config import Columns
from tilestream.kernels.cdna.attention_copy import VECTOR
from tilestream.kernels.cdna.ring import fetch_layout
from tilestream.launch.cdna.attention_arguments import CdnaAttentionArguments
from tilestream.ops.attention_gpu import layout_of
from tilestream.plan.attention_plan import AttentionCandidate, of_candidate, packed_heads, schedule_of

DEVICES = {"gfx942": named("mi300x"), "gfx950": named("mi355x")}
#: Architecture, copies, stages.
WAYS = (
    ("gfx942", "staged", 2),
    ("gfx950", "direct", 3),
    pytest.param("gfx942", "direct", 3, marks=pytest.mark.slow),
    pytest.param("gfx950", "staged", 2, marks=pytest.mark.slow),
)


def check(
    case: Case, arch: str = "gfx950", copies: str = "direct", stages: int = 3, *, warps: int = 2, block: int = 32,
    late: bool = True, kind: str = "dynamic", change=lambda x: x, damage=None,
) -> CdnaAttentionArguments:  # fmt: skip
    """What the kernel's text makes of a case, against the error rule; ``damage``: operands of no rule."""
    given = prepared(case)
    problem = replace(given.problem, dtype="float16")
    pack = packed_heads(problem, 32 * warps)
    schedule = schedule_of(problem, 32 * warps // pack, pack, 2, kind, 1)
    found = AttentionCandidate(copies, (32 * warps, block), schedule, 0.0, pack, warps, stages)
    plan = of_candidate(problem, DEVICES[arch], "cdna", found, "a test's", ())
    arguments = change(CdnaAttentionArguments(plan, layout_of(given.operands)))
    if damage is not None:
        damage(given.operands)
    run(plan, arguments, given.operands, late)
    if damage is None:
        given.check()
    return arguments


@pytest.mark.parametrize("features", [name for name in FEATURES if name != "scale"])
@pytest.mark.parametrize(("arch", "copies", "stages"), WAYS)
def test_masks(features, arch, copies, stages):
    # Ragged in queries and keys; the window's edge, plain blocks, the diagonal and the tail.
    check(Case((70,), (203, 203), (2, 1), (32, 32), features), arch, copies, stages)


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
@pytest.mark.parametrize(("arch", "copies", "stages"), [*WAYS, ("gfx950", "direct", 4)])
@pytest.mark.parametrize(("queries", "keys"), [((0, 3), (4, 300)), ((5, 0, 37, 1), (20, 7, 0, 33))])
def test_packed_sequences(queries, keys, arch, copies, stages, late):
    # Some see no key, some have no query, some rows belong to no sequence.
    case = Case(queries, keys, (4, 2), (32, 32), "causal", "packed", extra=9)
    check(case, arch, copies, stages, late=late)


@pytest.mark.parametrize("page", [4, 32, 128])
@pytest.mark.parametrize(("arch", "copies", "stages"), WAYS)
def test_pages(page, arch, copies, stages):
    # Pages that hold less than a block, as much and more; the table names none behind a sequence's last.
    for queries, keys in MIXES[:1]:
        case = Case(queries, keys, (2, 1), (32, 32), "all", "packed paged", page=page)
        made = check(case, arch, copies, stages)
        assert made.direct == (copies == "direct" and page >= 32)


@pytest.mark.parametrize("page", [4, 32])
@pytest.mark.parametrize(("arch", "copies", "stages"), WAYS)
def test_page_numbers_that_lead_outside_stay_inside(page, arch, copies, stages):
    """The host does not read the table. A page number out of range is clamped; the memory asserts its bounds."""

    def damage(operands: AttentionOperands) -> None:
        operands.block_table[:, ::2], operands.block_table[:, 1::2] = 2**30, -7

    case = Case((5, 20), (70, 33), (2, 1), (32, 32), "causal", "packed paged", page=page)
    check(case, arch, copies, stages, damage=damage)


@pytest.mark.parametrize(("arch", "copies", "stages"), WAYS)
def test_what_is_cut_off_lies_as_it_was_fetched(arch, copies, stages):
    """The machine has no lanes. Elements and the mask of those that count are of one layout, or nothing compiles."""
    C = check(Case((33,), (70,), (1, 1), (40, 72), "causal"), arch, copies, stages).config()
    fetch, vector = fetch_layout.fn, VECTOR.value
    for S, rows, k, k_major, turned in (
        (C.QUERY_STAGE, C.ROWS, C.Q.WIDTH, True, False), (C.KEY_STAGE, C.BLOCK, C.K.WIDTH, True, False),
        (C.VALUE_STAGE, C.V.WIDTH, C.BLOCK, False, C.TRANSPOSED_V and not C.DIRECT),
    ):  # fmt: skip
        own = fetch(S.ROWS, S.K, S.K_MAJOR, S.TURNED, S.VECTOR, S.WARPS)
        assert own == fetch(rows, k, k_major, turned, vector, C.WARPS)


@pytest.mark.parametrize(("arch", "copies", "stages"), WAYS)
def test_lengths_of_dense_sequences(arch, copies, stages):
    # What lies behind a sequence's last key is NaN.
    check(Case((40,), (90, 33, 7), (2, 2), (32, 32), "window", "lengths"), arch, copies, stages)


@pytest.mark.parametrize(
    ("dims", "parts"),
    [((96, 64), 3), ((192, 128), 3), ((80, 80), 3), ((40, 72), 1), ((128, 256), 2), ((8, 16), 1)],
    ids=str,
)
@pytest.mark.parametrize(("arch", "copies", "stages"), WAYS)
def test_columns_in_parts(dims, parts, arch, copies, stages):
    # Whole parts go past the registers; what is left of the last one of keys is zeros, which only registers hold.
    made = check(Case((33,), (70,), (1, 1), dims, "causal"), arch, copies, stages)
    assert made.direct == (copies == "direct" and dims[0] % 32 == 0)
    assert made.keys.parts == (1 if arch == "gfx942" and dims[0] == 128 else parts)


def test_queries_keys_and_values_each_have_a_swizzle():
    hows = [check(Case((33,), (70,), (1, 1), (192, 128)), "gfx942", "staged", 2, block=block) for block in (32, 64)]
    for made in hows:
        found = made.config()
        assert found.Q.SWIZZLE == found.K.SWIZZLE != found.V.SWIZZLE
    found = check(Case((33,), (70,), (1, 1), (96, 128))).config()
    assert found.Q.SWIZZLE == found.K.SWIZZLE == (8, 4, 4)
    assert found.V.SWIZZLE == (8, 2, 8)


@pytest.mark.parametrize(("rows", "heads"), [(3, (8, 1)), (1, (16, 2)), (16, (6, 1))])
@pytest.mark.parametrize(("arch", "copies", "stages"), WAYS)
def test_heads_side_by_side(rows, heads, arch, copies, stages):
    made = check(Case((rows,), (100, 100), heads, (32, 32), "sinks"), arch, copies, stages)
    assert made.plan.pack > 1


@pytest.mark.parametrize(("arch", "copies", "stages"), WAYS)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (64, 32), (65, 33), (130, 20), (20, 130), (64, 96)])
def test_edges_of_tiles_and_blocks(queries, keys, arch, copies, stages):
    for late in (True, False):
        check(Case((queries,), (keys,), (1, 1), (32, 32), "causal"), arch, copies, stages, late=late)


def test_rows_that_lie_far_apart_go_by_64_bits():
    def far(arguments: CdnaAttentionArguments) -> CdnaAttentionArguments:
        arguments._far_q = arguments._far_keys = True
        arguments.direct = False
        made = replace(arguments.config(), OUT_64BIT=True)
        arguments.config = lambda: made
        return arguments

    check(Case((70,), (150,), (4, 2), (32, 32), "causal"), change=far)
    check(Case((3,), (150,), (4, 1), (32, 32), "causal"), "gfx942", "staged", 2, change=far)


def test_a_static_schedule():
    check(Case((200,), (90, 90), (2, 1), (32, 32), "top left"), kind="static")


CAUSAL = Case((70,), (203,), (1, 1), (32, 32), "causal window")


def changed(**change):
    def change_all(arguments: CdnaAttentionArguments) -> CdnaAttentionArguments:
        made = arguments.config()
        assert all(getattr(made, name) != value for name, value in change.items())
        arguments.config = lambda: replace(made, **change)
        return arguments

    return change_all


@pytest.mark.parametrize(
    "change", [{"STAGES": 5}, {"K": Columns(1, 32, 32, (8, 1, 4), 8)}, {"V": Columns(1, 32, 32, (8, 2, 4), 8)}], ids=str
)
def test_another_depth_and_another_swizzle_are_right_too(change):
    check(CAUSAL, change=changed(**change))


@pytest.mark.parametrize("change", [{"LEFT": False}, {"RIGHT": False}, {"TOP_LEFT": True}, {"PACK": 2}], ids=str)
def test_another_mask_is_wrong(change):
    with pytest.raises(AssertionError):
        check(CAUSAL, change=changed(**change))


def test_a_wait_for_a_group_less_is_wrong(monkeypatch):
    check(CAUSAL)
    monkeypatch.setattr(AttentionMachine, "wait", lambda self, left: Machine.wait(self, left + 1))
    with pytest.raises(AssertionError):
        check(CAUSAL)


def test_a_copy_into_the_stage_that_is_read_is_wrong(monkeypatch):
    # Into the block's own stage, not the one before it: its values are read after that.
    monkeypatch.setattr(AttentionMachine, "before", staticmethod(lambda stage, depth: stage))
    for late in (True, False):
        with pytest.raises(AssertionError):
            check(CAUSAL, late=late)


@pytest.mark.parametrize(("arch", "copies", "stages"), WAYS)
@pytest.mark.parametrize("features", ["causal", "causal window"])
def test_a_row_has_its_bits_wherever_its_tile_begins(features, arch, copies, stages, monkeypatch):
    """In float32: what each operation gives is rounded once; the keys of all calls are the same."""

    def rounded(x):
        return Tensor(np.asarray(x, np.float32).astype(float), FLOAT32)

    def multiply(self, other):
        return rounded(self.data * (other.data if isinstance(other, Tensor) else other))

    def subtract(self, other):
        return rounded(self.data - (other.data if isinstance(other, Tensor) else other))

    def add(self, other):
        return rounded(self.data + (other.data if isinstance(other, Tensor) else other))

    exact = AttentionMachine.fma
    monkeypatch.setattr(AttentionMachine, "fma", staticmethod(lambda x, y, z: rounded(exact(x, y, z).data)))
    made = []

    def same(operands: AttentionOperands) -> None:
        if made:
            operands.q.copy_(made[0].q[:, -operands.q.shape[1] :])
            operands.k.copy_(made[0].k)
            operands.v.copy_(made[0].v)
        made.append(operands)

    monkeypatch.setattr(
        Machine, "multiply_add", staticmethod(lambda a, b, acc, _: rounded(acc.data + a.data @ b.data))
    )  # fmt: skip
    floats = {"mul": multiply, "sub": subtract, "add": add}
    for name, of_floats in floats.items():
        of_ints = getattr(Tensor, f"__{name}__")
        monkeypatch.setattr(
            Tensor, f"__{name}__",
            lambda self, other, f=of_floats, i=of_ints: (f if self.dtype == FLOAT32 else i)(self, other),
        )  # fmt: skip
    for queries in (150, 137, 70):
        check(Case((queries,), (150,), (1, 1), (32, 32), features), arch, copies, stages, damage=same)
    for part in made[1:]:
        queries = part.q.shape[1]
        assert torch.equal(part.lse, made[0].lse[..., -queries:])
        assert torch.equal(part.out, made[0].out[:, -queries:])
