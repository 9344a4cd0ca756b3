"""The Hopper grouped kernel's texts, run as plain Python on tensors: SwiGLU of two halves, and scales of blocks.

No GPU has run these yet (`tilestream.plan.experimental`). What a launch is given is that of real plans: the config, the
strides, the boxes of the tensor maps. The kernel's own text loads, multiplies and stores each item of each group, on
stand-ins for what the hardware does: a copy clips and fills with zeros, a multiplication is torch's. So where the parts
of a tile are read, which scale a product has, and what is stored where, is compared with a plain loop.
"""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hopper_threads import Box, Boxes, Pointer, TensorMap, load, operand
from texts import bind, jitted_of, structs_of

from error_rule import check, passes, rand
from grouped_cases import expected, offsets_of
from mutants.engine import at, replace
from tilestream.core import ring as ring_rules
from tilestream.core import structs
from tilestream.core.gpu_specs import named
from tilestream.core.operands import SCALE_BLOCK, Epilogue, GroupedOperands
from tilestream.core.structs import Item, Loads, LocalRows, Matrix, Place, Ring, Span, Vector
from tilestream.kernels.device import epilogue as formula_text
from tilestream.kernels.device.items import with_steps
from tilestream.kernels.hopper import block_scales as scales_text
from tilestream.kernels.hopper import epilogue as epilogue_text
from tilestream.kernels.hopper import grouped as grouped_text
from tilestream.kernels.hopper import load as load_text
from tilestream.kernels.hopper import multiply as multiply_text
from tilestream.ops.grouped_library import launch_of, problem_of
from tilestream.plan.candidate import Asked
from tilestream.plan.grouped import hopper_candidates
from tilestream.plan.plan import of_candidate

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
MODULES = (scales_text, grouped_text, load_text, multiply_text, epilogue_text, formula_text)
DEVICE = named("h100")
BEYOND = 2**30
EPILOGUE = "tilestream.kernels.hopper.epilogue"
BLOCKS, GROUPED = "tilestream.kernels.hopper.block_scales", "tilestream.kernels.hopper.grouped"
#: Rows of each group: one in a tile and one that is several, none, and rows that belong to none.
SIZES = (70, 0, 3)


def tma_load(tensor_map: TensorMap, place: list[Any], bar: Any, box: Box) -> None:
    batch, row, k = (int(x) for x in place)
    rows, depth = tensor_map.box
    found = tensor_map.tensor[batch, row : row + rows, k : k + depth].float()
    box.value = torch.zeros(rows, depth)
    box.value[: found.shape[0], : found.shape[1]] = found


def tma_store(tensor_map: TensorMap, place: list[Any], box: Box) -> None:
    first, end, row, column = (int(x) for x in place)
    assert first == BEYOND, "the map clips"
    row, rows = row - BEYOND + end, box.value.shape[0]
    found = tensor_map.tensor[row : min(row + rows, end), column : column + box.value.shape[1]]
    assert found.isnan().all(), "nothing is stored twice"
    found.copy_(box.value[: found.shape[0], : found.shape[1]])


def run(x: GroupedOperands, tile: tuple[int, int], variant: str, edits: tuple[Any, ...] = ()) -> None:
    """Compute all items of all groups by the kernel's text."""
    problem = problem_of(x)
    fit = hopper_candidates(problem, DEVICE, 132, Asked(schedule="static", tile=tile))
    found = of_candidate(problem, DEVICE, "hopper", next(one for one in fit if one.variant == variant), "the test's")
    made = launch_of(found, x)._made[False]
    # As many stages as there may be steps: a stage's turn is the checker's matter.
    C, numbers, swap_ab = dataclasses.replace(made.config, STAGES=64), made._numbers(), found.swap_ab
    assert C.STORE == "tma"
    names: dict[str, Any] = {
        **structs_of(structs, load_text),
        "gl": SimpleNamespace(
            static_range=range, constexpr=None, load=load, arange=lambda a, b, _=None: torch.arange(a, b),
            SliceLayout=lambda *_: None, BlockedLayout=lambda *_: None, int64=torch.int64, float32=torch.float32,
            minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)), expand_dims=torch.unsqueeze,
            inline_asm_elementwise=lambda *_, **__: None, int32=None,
        ),
        "tl": SimpleNamespace(
            cast=lambda v, _: torch.as_tensor(v), int64=None, int32=None, constexpr=None,
            minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)), abs=torch.abs,
            where=torch.where, load=load,
        ),
        "mbarrier": SimpleNamespace(wait=lambda *_: None, arrive=lambda *_, count=1: None, expect=lambda *_: None),
        "tma": SimpleNamespace(store_wait=lambda _: None), "fence_async_shared": lambda: None,
        "tma_load": tma_load, "tma_store": tma_store, "viewed": lambda box, _: box, "barrier": lambda: None,
        "mma_layout": lambda *_: None, "SCALE_BLOCK": SCALE_BLOCK, "BEYOND": BEYOND,
        "zero": lambda rows, width, _: torch.zeros(rows, width), "step": ring_rules.step, "before": ring_rules.before,
        "mma_operand": operand,
        "warpgroup_mma": lambda x, y, acc, is_async, use_acc: x @ y + (acc if use_acc else 0),
        "warpgroup_mma_wait": lambda _, values: values if len(values) > 1 else values[0],
        "columns_of": lambda acc, first, _, strip, __: acc[:, first : first + strip],
        "reciprocal": lambda y: 1 / y, "power_of_2": torch.exp2, "is_mine": lambda steps, *_: steps != 0,
        "await_turn": lambda *_: None, "range": range, "len": len, "float": float, "max": max, "sum": sum, "next": next,
        "BEGIN": "begin", "END": "end",
    }  # fmt: skip
    for name in ("start_of", "pending", "part_of"):
        names[name] = getattr(epilogue_text, name).fn
    bind(names, (*jitted_of(*MODULES), with_steps), edits)
    operands = [TensorMap(x.a[None]), TensorMap(x.b.mT)]
    boxed = [tuple(one.box[-2:]) for one in made.maps if one is not None]
    map_x, map_y = (operands[1], operands[0]) if swap_ab else operands
    map_x.box = boxed[0]
    maps_y = tuple(TensorMap(map_y.tensor, box) for box, _ in zip(boxed[1:], C.WIDTHS, strict=False))
    bits = 8 * x.a.element_size()
    e = x.epilogue
    scales = (e.scale_b, e.scale_a) if swap_ab else (e.scale_a, e.scale_b)
    at_scales = [None if one is None else Pointer(one) for one in scales]
    s = SimpleNamespace(**numbers)
    of_blocks = None
    vectors = [Vector(at_scales[0], s.stride_sb, s.stride_sr), Vector(at_scales[1], s.stride_tb, s.stride_tc)]
    if C.SCALES == "block":
        of_blocks = (
            Matrix(at_scales[0], s.stride_sb, s.stride_sr, s.stride_sk),
            Matrix(at_scales[1], s.stride_tb, s.stride_tc, s.stride_tk),
        )
        vectors = [Vector(None, 0, 0)] * 2
    out_map = TensorMap(x.out)
    out_map.dtype = x.out.dtype
    epilogue = structs.Epilogue(
        Matrix(None, 0, 0, 0), Matrix(None, 0, 0, 0),
        Vector(None if e.bias is None else Pointer(e.bias), s.stride_bias_batch, s.stride_bias), *vectors, 1.0, 1.0,
        s.rows, s.columns, out_map, Boxes(bits),
    )  # fmt: skip
    steps, begin = -(-x.a.shape[1] // C.BLOCK_K), 0
    C_ring = ring_of(C, bits)
    for group, end in enumerate(x.offsets.tolist()):
        grid = -(-(end - begin) // C.BLOCK_M), found.schedule.grid.num_n
        for pm, pn in itertools.product(*map(range, grid)):
            item = Item(torch.tensor(group), pm, pn, 0, steps, 0, 1, 0, 0)
            loads = Loads(
                map_x, maps_y, LocalRows(None, 0, 0, 0), s.x_batched, s.y_batched, s.columns if C.TWO_HALVES else 0
            )
            span = Span(group, begin, end)
            names["load_group_steps"](item, span, loads, C_ring, Place(0, 0), 0, steps, C)
            handed_on = item._replace(pm=pn, pn=pm) if swap_ab else item  # of the accumulator
            for who in range(C.HALVES):
                handed = iter([(steps, handed_on, Place(0, 0)), (0, handed_on, Place(0, 0))])
                names["receive"] = lambda *_, handed=handed: next(handed)
                names["get"] = lambda _, __, field, ___, span=span: {"begin": span.begin, "end": span.end}[field]
                items = SimpleNamespace(full=Boxes(0), slots=None)
                words = SimpleNamespace(partials=None, log=None)
                names["math_loop"](who, C_ring, items, None, words, epilogue, of_blocks, None, C)
        begin = end


def ring_of(C: Any, bits: int) -> Ring:
    return Ring(Boxes(bits), tuple(Boxes(bits) for _ in C.WIDTHS), Boxes(0), Boxes(0))


def made(k: int, n: int, dtype: torch.dtype, activation: str = "none", bias: bool = False, scales: str = "none"):
    rows, groups = sum(SIZES) + 5, len(SIZES)
    a, b = rand(rows, k).to(dtype), rand(groups, n, k, seed=1).to(dtype).mT
    scale_a = scale_b = None
    if scales == "block":
        of_k, of_n = -(-k // 128), -(-n // 128)
        scale_a = torch.exp2(rand(rows, of_k, seed=2).clamp(-2, 2).round())
        scale_b = torch.exp2(rand(groups, of_n, of_k, seed=3).clamp(-2, 2).round()).mT
    elif scales == "row":
        scale_a, scale_b = rand(rows, 1, seed=2), rand(groups, 1, n, seed=3)
    e = Epilogue(
        bias=rand(groups, n, seed=4)[:, None] if bias else None, activation=activation, scale_a=scale_a, scale_b=scale_b
    )
    out = torch.full((rows, n // 2 if activation == "swiglu" else n), float("nan"), dtype=BF16)
    return GroupedOperands(a, b, out, e, offsets_of(SIZES))


CASES = {
    "two halves": (made(128, 192, BF16, "swiglu"), (128, 128), "cooperative"),
    "two halves, everything": (made(192, 272, BF16, "swiglu", True, "row"), (128, 128), "cooperative"),
    "two halves, small": (made(64, 80, BF16, "swiglu", True), (64, 32), "single"),
    "blocks": (made(272, 272, E4M3, scales="block"), (128, 128), "cooperative"),
    "blocks, an epilogue": (made(256, 144, E4M3, "gelu", True, "block"), (64, 128), "single"),
    "blocks, swapped": (made(272, 400, E4M3, scales="block"), (64, 128), "cooperative"),
    "blocks, two halves": (made(272, 512, E4M3, "swiglu", True, "block"), (128, 128), "cooperative"),
}


def answer(x: GroupedOperands, *how: Any) -> GroupedOperands:
    x = x._replace(out=torch.full_like(x.out, float("nan")))
    run(x, *how)
    return x


@pytest.mark.parametrize("name", CASES)
def test_the_text_computes_what_a_loop_does(name):
    x = answer(*CASES[name])
    for part, maths in expected(x):
        check(part, maths)
    assert x.out[sum(SIZES) :].isnan().all(), "rows of no group are cleared elsewhere"


FAULTS = {
    "the second half begins a column early": (
        "two halves", load_text.__name__ + ":load_steps", "source.column + i * loads.half",
        "source.column + i * (loads.half - 1)",
    ),
    "tiles are as far apart as of one half": (
        "two halves", GROUPED + ":math_loop", "item.pn * C.OUT_COLUMNS", "item.pn * C.COLUMNS",
    ),
    "both halves have the bias of the first": (
        "two halves, everything", formula_text.__name__ + ":swiglu",
        "bias.at + tl.cast(e.columns, tl.int64) * bias.step", "bias.at",
    ),
    "the halves are taken for each other": (
        "two halves", EPILOGUE + ":store_strip",
        "swiglu(acc[0], acc[1], e, region, C, load_rows, load_columns, load_tile)",
        "swiglu(acc[1], acc[0], e, region, C, load_rows, load_columns, load_tile)",
    ),
    "all steps have the scales of the first block": (
        "blocks", BLOCKS + ":multiply_scaled", "tl.minimum(k + 1, steps - 1)", "k * 0",
    ),
    "all parts have the scales of the first columns": (
        "blocks, two halves", BLOCKS + ":load_factors", "i * scales.column_end", "i * 0",
    ),
    "a group has the scales of the first": (
        "blocks", BLOCKS + ":of_block", "tl.cast(batch, tl.int64) * m.batch", "0",
    ),
    "rows have the scales of those before them": (
        "blocks", BLOCKS + ":of_each", "gl.minimum(i, end - 1)", "gl.minimum(i - (i > 0) * 1, end - 1)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=pytest.mark.slow if i else ()) for i, fault in enumerate(FAULTS)]
)
def test_a_fault_in_the_text_is_seen(fault):
    name, where, find, text = FAULTS[fault]
    x = answer(*CASES[name], at(where, replace(find, text)))
    assert not all(passes(part, maths.finer(), maths.by_torch()) for part, maths in expected(x))
