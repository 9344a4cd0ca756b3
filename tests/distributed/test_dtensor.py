"""DTensor's strategies of the registered ops, between real ranks, over gloo."""

from __future__ import annotations

import itertools
import math

import dtensor_jobs as jobs
import pytest


def every(*placements):
    """All combinations of the placements of several tensors."""
    return list(itertools.product(*(x.split("|") for x in placements)))


#: (op, mesh): the shapes of the operands, and their placements.
AS_TORCHS = [
    ("mm", (2,), [((4, 6), (6, 8))], every("R|S0|S1|P", "R|S0|S1|P")),
    ("mm", (2,), [((5, 7), (7, 3))], [*every("R|S0|S1", "R|S0|S1"), ("A", "R"), ("R", "A"), ("A", "P")]),
    ("addmm", (2,), [((8,), (4, 6), (6, 8))], every("R|P", "R|S0|S1", "R|S0|S1")),
    ("addmm", (2,), [((4, 8), (4, 6), (6, 8))], every("R|S0|S1", "S0|S1", "R|S0")),
    ("bmm", (2,), [((4, 6, 8), (4, 8, 2)), ((3, 5, 7), (3, 7, 5))], every("R|S0|S1|S2", "R|S0|S1|S2")),
    ("linear", (2,), [((4, 6, 8), (10, 8)), ((3, 5, 7), (5, 7))], every("R|S0|S1|S2", "R|S0|S1")),
    ("linear", (2,), [((4, 6, 8), (10, 8), (10,))], every("R|S0|S1|S2|P", "R|S0|S1", "R")),
    ("linear", (2,), [((4, 8), (10, 8), (10,))], every("R|S0|S1", "S0", "S0")),
    ("matmul", (2,), [((8,), (8, 6)), ((6, 8), (8,)), ((8,), (8,))], every("R|S0", "R|S0")),
    ("matmul", (2,), [((2, 4, 4, 8), (2, 4, 8, 6))], every("S0|S1|S2|S3", "R|S0|S1")),
    ("matmul", (2,), [((4, 8), (2, 8, 6)), ((2, 2, 4, 8), (2, 8, 6))], every("R|S0|S1", "R|S0|S1")),
    # Shards without rows: 5 over 4 are 2, 2, 1 and none. And fewer rows than ranks.
    ("mm", (4,), [((5, 5), (5, 5)), ((3, 8), (8, 4))], every("S0|S1", "R|S0|S1")),
    ("mm", (2, 2), [((8, 12), (12, 16))], every("S0 R|R S1|S0 S0|S1 S0", "R S1|S0 S1|S1 S0")),
    ("linear", (2, 2), [((4, 6, 8), (12, 8), (12,))], [("S0 R", "R S0", "R S0"), ("S0 S2", "R S1", "R R")]),
]  # fmt: skip


def name_of(mesh):
    return "x".join(map(str, mesh)) + "-ranks"


@pytest.mark.parametrize(
    ("op", "mesh", "shapes", "placements"), AS_TORCHS,
    ids=[f"{op}-{name_of(mesh)}-{i}" for i, (op, mesh, *_) in enumerate(AS_TORCHS)],
)  # fmt: skip
def test_shards_are_multiplied_as_torchs_ops_do(ranks, op, mesh, shapes, placements):
    refused = ranks.run(math.prod(mesh), jobs.ours_as_torchs, op, mesh, list(itertools.product(shapes, placements)))
    assert max(refused) < len(placements) * len(shapes), "some are computed"


M, K, N = 6, 8, 10
MATRICES = {"a": (M, K), "b": (K, N)}
BATCHES = {"a": (4, M, K), "b": (4, K, N)}
BIAS, RESIDUAL = {"bias": (N,)}, {"residual": (M, N)}
SCALES = {"scale_a": (M, 1), "scale_b": (1, N)}
#: Options, shapes, placements of the operands, and of the result.
EPILOGUES = [
    ({"activation": "gelu"}, MATRICES | BIAS | RESIDUAL, {"a": "S0", "b": "R", "bias": "R", "residual": "S0"}, "S0"),
    ({"activation": "gelu"}, MATRICES | BIAS | RESIDUAL, {"a": "R", "b": "S1", "bias": "S0", "residual": "S1"}, "S1"),
    ({"beta": 0.5}, MATRICES | BIAS | RESIDUAL, {"a": "S1", "b": "S0", "bias": "R", "residual": "R"}, "P"),
    ({"beta": 0.5}, MATRICES | BIAS | RESIDUAL, {"a": "S1", "b": "S0", "bias": "P", "residual": "P"}, "P"),
    ({"beta": 0.5}, MATRICES | BIAS | RESIDUAL, {"a": "P", "b": "R", "bias": "R", "residual": "P"}, "P"),
    # The same operands with and without an activation, which is not linear.
    ({}, MATRICES, {"a": "S1", "b": "S0"}, "P"),
    ({"activation": "relu"}, MATRICES, {"a": "S1", "b": "S0"}, "not P"),
    ({}, MATRICES, {"a": "P", "b": "R"}, "P"),
    ({"activation": "relu"}, MATRICES, {"a": "P", "b": "R"}, "not P"),
    ({}, MATRICES | SCALES, {"a": "S0", "b": "R", "scale_a": "S0", "scale_b": "R"}, "S0"),
    ({}, MATRICES | SCALES, {"a": "R", "b": "S1", "scale_a": "R", "scale_b": "S1"}, "S1"),
    ({}, MATRICES | SCALES | BIAS, {"a": "S1", "b": "S0", "scale_a": "R", "scale_b": "R", "bias": "R"}, "P"),
    ({}, MATRICES | {"scale_a": (1,), "scale_b": (N,)}, {"a": "R", "b": "S1", "scale_a": "R", "scale_b": "S0"}, "S1"),
    ({}, MATRICES | {"scale_a": (M,), "scale_b": ()}, {"a": "S0", "b": "R", "scale_a": "S0", "scale_b": "R"}, "S0"),
    ({"activation": "relu"}, BATCHES | BIAS | {"residual": (4, M, N)},
     {"a": "S0", "b": "S0", "bias": "R", "residual": "S0"}, "S0"),
    ({}, BATCHES | {"scale_a": (4, M, 1), "scale_b": (4, 1, N)},
     {"a": "S0", "b": "S0", "scale_a": "S0", "scale_b": "S0"}, "S0"),
    ({}, BATCHES | {"scale_a": (4, M, 1), "scale_b": (4, 1, N)},
     {"a": "R", "b": "S2", "scale_a": "R", "scale_b": "S2"}, "S2"),
    ({"dtype": "float8_e4m3fn"}, MATRICES | SCALES, {"a": "S0", "b": "R", "scale_a": "S0", "scale_b": "R"}, "S0"),
    ({"dtype": "float8_e4m3fn"}, MATRICES | SCALES, {"a": "R", "b": "S1", "scale_a": "R", "scale_b": "S1"}, "S1"),
    ({"dtype": "float8_e4m3fn"}, MATRICES | SCALES, {"a": "S1", "b": "S0", "scale_a": "R", "scale_b": "R"}, "P"),
]  # fmt: skip


def test_an_epilogue_is_sharded_with_its_product_and_added_once(ranks):
    assert ranks.run(2, jobs.epilogues, (2,), EPILOGUES) == [True] * 2


def heads(q, k, *, batch=3, layout="bshd"):
    """Shapes of q, k and v with so many heads."""
    shapes = [(batch, 5, q, 8), (batch, 7, k, 8), (batch, 7, k, 16)]
    return dict(zip("qkv", [(b, h, s, d) if layout == "bhsd" else (b, s, h, d) for b, s, h, d in shapes], strict=True))


def alike(placement, **others):
    """One placement for q, k and v."""
    return {**dict.fromkeys("qkv", placement), **others}


BHSD = {"layout": "bhsd"}
PACKED = {"q": (9, 4, 8), "k": (11, 2, 8), "v": (11, 2, 8)}
PACKS = {"cu_seqlens_q": [0, 4, 9], "cu_seqlens_k": [0, 8, 11]}
PAGES = {"q": (2, 3, 4, 8), "k": (5, 4, 2, 8), "v": (5, 4, 2, 8)}
TABLE = {"block_table": [[3, 0], [1, 4]], "seqlens_k": [5, 7]}
#: As above; the placements of the result and of the log-sum-exp, [B, H, S].
ATTENTIONS = [
    ({}, heads(4, 2), alike("S0"), ("S0", "S0")),
    ({}, heads(4, 2), alike("S2"), ("S2", "S1")),
    (BHSD, heads(4, 4, layout="bhsd"), alike("S0"), ("S0", "S0")),
    (BHSD, heads(4, 2, layout="bhsd"), alike("S1"), ("S1", "S1")),
    # Heads of one size are sharded unevenly; several to one head of keys are not.
    ({}, heads(3, 3), alike("S2"), ("S2", "S1")),
    ({}, heads(6, 3, batch=1), alike("S2"), ("R", "R")),
    ({}, heads(2, 1, batch=1), {"q": "S2", "k": "R", "v": "R"}, ("R", "R")),
    # Nothing is sharded by rows or columns.
    ({}, heads(2, 1, batch=1), alike("S1"), ("R", "R")),
    ({}, heads(2, 1, batch=1), alike("S3"), ("R", "R")),
    ({"causal": True, "softcap": 9.0}, heads(4, 2) | {"sinks": (4,)}, alike("S2", sinks="S0"), ("S2", "S1")),
    ({"window": (3, 0)}, heads(4, 2) | {"sinks": (4,)}, alike("S0", sinks="R"), ("S0", "S0")),
    ({"lists": {"seqlens_k": [7, 0, 3]}}, heads(4, 2), alike("S0", seqlens_k="S0"), ("S0", "S0")),
    ({}, heads(4, 2) | {"scale_q": (3, 4), "scale_k": (2,), "scale_v": (1,)},
     alike("S2", scale_q="S1", scale_k="S0", scale_v="R"), ("S2", "S1")),
    ({}, heads(4, 2) | {"scale_q": (3, 4), "scale_v": (2,)}, alike("S0", scale_q="S0", scale_v="R"), ("S0", "S0")),
    ({"lists": PACKS}, PACKED, alike("S1", cu_seqlens_q="R", cu_seqlens_k="R"), ("S1", "S1")),
    ({"lists": PACKS}, PACKED, alike("S0", cu_seqlens_q="S0", cu_seqlens_k="R"), ("R", "R")),
    ({"lists": TABLE}, PAGES, alike("S2", block_table="R", seqlens_k="R"), ("S2", "S1")),
    ({"lists": TABLE}, PAGES, {"q": "S0", "k": "R", "v": "R", "block_table": "S0", "seqlens_k": "S0"}, ("S0", "S0")),
]  # fmt: skip
ON_A_MESH = [
    ({"causal": True}, heads(4, 2, batch=2) | {"sinks": (4,)}, alike("S0 S2", sinks="R S0"), ("S0 S2", "S0 S1")),
    ({}, heads(4, 2, batch=2), alike("S2 S2"), ("S2 R", "S1 R")),
]


@pytest.mark.parametrize(("mesh", "cases"), [((2,), ATTENTIONS), ((2, 2), ON_A_MESH)], ids=["2-ranks", "2x2-ranks"])
def test_attention_is_sharded_by_batch_and_by_heads(ranks, mesh, cases):
    world = math.prod(mesh)
    assert ranks.run(world, jobs.attentions, mesh, cases) == [True] * world


def test_outputs_of_any_placements_are_written_and_chunks_refused(ranks):
    chunks = "is a DTensor, and chunks arrive or are published; they are rows of one rank's tensor: pass"
    for said in ranks.run(2, jobs.outputs):
        assert said[:3] == [
            f"TypeError: matmul: a {chunks} a.to_local()", f"TypeError: matmul: b {chunks} b.to_local()",
            f"TypeError: attention: q {chunks} q.to_local()",
        ]  # fmt: skip
        assert "got mixed torch.Tensor and DTensor" in said[3]
        assert said[4].startswith("ValueError: matmul: out has shape [3, 4, 7]; the result has [3, 4, 8]")
        assert said[5].startswith("ValueError: attention: out has shape [1, 4, 2, 8]; the result has [2, 4, 2, 8]")
        assert said[6].endswith("no output is resized in a compiled function, nor a DTensor")


def test_inference_mode_is_no_obstacle(ranks):
    assert all(ranks.run(2, jobs.infers))


@pytest.mark.parametrize(
    ("mesh", "how"), [((2,), "tp"), ((2,), "sequence tp"), ((2,), "fsdp"), ((2, 2), "fsdp tp")],
    ids=lambda x: x if isinstance(x, str) else name_of(x),
)  # fmt: skip
def test_a_model_of_torchs_parallel_styles_learns_as_torchs_own(ranks, mesh, how):
    world = math.prod(mesh)
    assert ranks.run(world, jobs.learns, mesh, how) == [True] * world


@pytest.mark.slow
def test_dtensors_are_compiled_to_one_graph(ranks):
    assert ranks.run(2, jobs.compiles) == [True] * 2
