"""The Hopper attention kernel's text, run on a machine of NumPy: the numbers it gives, for every kind of problem.

No GPU and no compiler: see `attention_machine`. The tolerance is the error rule's (`error_rule`) for what the machine
rounds as the kernel does: weights to fp16, sums in fp32.
"""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from attention_machine import Deadlock, Machine

from mutants import engine, kernel_text
from mutants.engine import Edit, at
from tilestream.core.chunks import Chunks
from tilestream.core.device import DeviceProperties
from tilestream.core.integers import cdiv
from tilestream.launch.attention_arguments import AttentionLayout
from tilestream.launch.hopper.attention_arguments import HopperAttentionArguments
from tilestream.plan.attention_plan import AttentionPlan, of_candidate
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.policy import hopper_attention as policy
from tilestream.plan.problem import Incoming
from tilestream.schedule import WorkItem
from tilestream_tools.verify.attention_protocol import (
    Ask,
    AttentionRing,
    ConvertPlaces,
    Copy,
    Empty,
    LoadPlaces,
    MathPlaces,
    Own,
    Pass,
    convert_turn,
    load_turn,
    math_turn,
)
from tilestream_tools.verify.protocol import Get, Next

H100 = DeviceProperties("an H100", "portable", 132, 5e11, 3.3e12, "a stub", "sm_90", 232448)
SCALE = 0.17
GUARD = 1000  # NaN around each tensor


def plan_of(problem: AttentionProblem, **how: Any) -> AttentionPlan:
    assert policy.refusal(problem, H100) == ""
    found = list(policy.candidates(problem, H100, 3, kind=how.pop("kind", "dynamic"), **how))
    return of_candidate(problem, H100, "hopper", found[-1], "a test's", ())


class Case:
    """A problem with its operands: sequences of some lengths, where they lie as the problem says."""

    def __init__(self, problem: AttentionProblem, lengths: list[tuple[int, int]], seed: int = 0) -> None:
        p, self.lengths = problem, lengths
        made = np.random.default_rng(seed)
        self.q = [made.standard_normal((sq, p.heads_q, p.head_dim)).astype(np.float16) for sq, _ in lengths]
        self.k = [made.standard_normal((sk, p.heads_kv, p.head_dim)).astype(np.float16) for _, sk in lengths]
        self.v = [made.standard_normal((sk, p.heads_kv, p.head_dim_v)).astype(np.float16) for _, sk in lengths]
        self.sinks = made.standard_normal(p.heads_q) if p.sinks else None
        #: Of q, k and v, by sequence and head.
        self.scales = [made.uniform(-2.0, 2.0, (len(lengths), n)) for n in (p.heads_q, p.heads_kv, p.heads_kv)]
        if p.dtype == "float8_e4m3fn":
            for x in (self.q, self.k, self.v):
                x[:] = [torch.from_numpy(one).to(torch.float8_e4m3fn).to(torch.float16).numpy() for one in x]
        self.problem = p

    def reference(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """``(out, lse)`` of a sequence, in float64, by the rule of `tilestream.plan.attention_problem`."""
        p = self.problem
        q, k, v = (x[i].astype(np.float64) for x in (self.q, self.k, self.v))
        if p.scaled:
            q, k, v = (
                x * scale[i].astype(np.float32)[:, None] for x, scale in zip((q, k, v), self.scales, strict=True)
            )
        k, v = (np.repeat(x, p.ratio, axis=1) for x in (k, v))
        s = np.einsum("qhd,khd->hqk", q, k) * SCALE
        if p.softcap:
            s = p.softcap * np.tanh(s / p.softcap)
        shift = len(k) - len(q) if p.alignment == "bottom_right" else 0
        at, key = np.arange(len(q))[:, None] + shift, np.arange(len(k))[None, :]
        seen = np.ones((len(q), len(k)), bool)
        if p.left is not None:
            seen &= key >= at - p.left
        if p.right is not None:
            seen &= key <= at + p.right
        s = np.where(seen, s, -np.inf)
        extra = np.full((*s.shape[:2], 1), -np.inf)
        if self.sinks is not None:
            extra = np.broadcast_to(self.sinks[:, None, None], extra.shape)
        both = np.concatenate([s, extra], axis=2)
        top = both.max(2)
        shifted = np.where(np.isfinite(top), top, 0.0)
        with np.errstate(divide="ignore"):
            lse = np.where(np.isfinite(top), shifted + np.log(np.exp(both - shifted[..., None]).sum(2)), -np.inf)
        weights = np.where(np.isfinite(lse)[..., None], np.exp(s - np.where(np.isfinite(lse), lse, 0.0)[..., None]), 0)
        return np.einsum("hqk,khd->qhd", weights, v), lse.T  # rows first


def dense(rows: list[np.ndarray], room: int, junk: float = np.nan) -> tuple[np.ndarray, tuple[int, int, int]]:
    """``[B, room, H, D]`` with NaN behind each sequence's rows, and strides of batch, row, head."""
    heads, columns = rows[0].shape[1:]
    made = np.full((len(rows), room, heads, columns), junk)
    for i, x in enumerate(rows):
        made[i, : len(x)] = x
    return made.reshape(-1), (room * heads * columns, heads * columns, columns)


def run(
    case: Case, *, seed: int = 0, eager: bool = False, edits: tuple[Edit, ...] = (), plan: AttentionPlan | None = None,
    machines: list[Machine] | None = None, over_at: int | None = None, trace: bool = False, **how: Any,
) -> tuple[list[np.ndarray], list[np.ndarray]]:  # fmt: skip
    """``(outs, lses)`` by sequence, from the kernel's text."""
    p = case.problem
    plan = plan or plan_of(p, **how)
    shuffled = random.Random(seed)
    operands: dict[str, Any] = {}
    if p.varlen:
        q, q_strides = dense([np.concatenate(case.q)], p.tokens_q)
        out = np.full(plan.shares * p.tokens_q * p.heads_q * p.head_dim_v, np.nan)
        lse = np.full(plan.shares * p.tokens_q * p.heads_q, np.nan)
        q_strides, out_strides = (0, *q_strides[1:]), (0, p.heads_q * p.head_dim_v, p.head_dim_v)
        lse_strides = (0, p.heads_q, 1)
        operands["cu_seqlens_q"] = np.cumsum([0, *[len(x) for x in case.q]]).astype(np.int32)
    else:
        q, q_strides = dense(case.q, p.seqlen_q)
        out = np.full(plan.shares * p.batch * p.seqlen_q * p.heads_q * p.head_dim_v, np.nan)
        lse = np.full(plan.shares * p.batch * p.heads_q * p.seqlen_q, np.nan)
        out_strides = (p.seqlen_q * p.heads_q * p.head_dim_v, p.heads_q * p.head_dim_v, p.head_dim_v)
        lse_strides = (p.heads_q * p.seqlen_q, 1, p.seqlen_q)
    table = 0
    if p.page_size:
        most = cdiv(p.seqlen_k, p.page_size)
        table, pages = most, list(range(p.pages))
        shuffled.shuffle(pages)
        filled = []
        found = np.full((p.batch, most), p.pages + 99, np.int32)  # what is not needed is out of range
        k_rows = np.full((p.pages, p.page_size, p.heads_kv, p.head_dim), np.nan)
        v_rows = np.full((p.pages, p.page_size, p.heads_kv, p.head_dim_v), np.nan)
        for i, x in enumerate(case.k):
            for j in range(cdiv(len(x), p.page_size)):
                page = found[i, j] = pages.pop()
                part = slice(j * p.page_size, min((j + 1) * p.page_size, len(x)))
                k_rows[page, : part.stop - part.start] = x[part]
                v_rows[page, : part.stop - part.start] = case.v[i][part]
                filled.append(page)
        operands["block_table"] = found.reshape(-1)
        k, v = k_rows.reshape(-1), v_rows.reshape(-1)
        k_strides, v_strides = (
            (p.page_size * p.heads_kv * d, p.heads_kv * d, d) for d in (p.head_dim, p.head_dim_v)
        )  # fmt: skip
    elif p.tokens_k:
        (k, k_strides), (v, v_strides) = (dense([np.concatenate(x)], p.tokens_k) for x in (case.k, case.v))
        k_strides, v_strides = (0, *k_strides[1:]), (0, *v_strides[1:])
        operands["cu_seqlens_k"] = np.cumsum([0, *[len(x) for x in case.k]]).astype(np.int32)
    else:
        (k, k_strides), (v, v_strides) = (dense(x, p.seqlen_k) for x in (case.k, case.v))
    if p.lengths:
        operands["seqlens_k"] = np.array([len(x) for x in case.k], np.int32)
    if p.varlen:
        packs = p.heads_q // plan.pack
        keys = [len(x) for x in case.k] + [0]
        rows = [len(x) for x in case.q] + [p.tokens_q - sum(len(x) for x in case.q)]
        order = sorted(range(len(keys)), key=lambda i: (-keys[i], i))
        tiles = [plan.shares * packs * cdiv(rows[i], plan.positions) for i in order]
        operands["starts"] = np.cumsum([0, *tiles]).astype(np.int32)
        operands["order"] = np.array(order, np.int32)
        assert operands["starts"][-1] <= plan.schedule.full_tiles, "the grid holds the list"
    operands |= {"q": q, "k": k, "v": v, "out": out}
    if p.return_lse:
        operands["lse"] = lse
    if case.sinks is not None and plan.shares == 1:
        operands["sinks"] = case.sinks
    scales: list[Any] = [None] * 3
    if p.scaled:
        scales = [(n, 1) for n in (p.heads_q, p.heads_kv, p.heads_kv)]
        for name, scale in zip(("scale_q", "scale_k", "scale_v"), case.scales, strict=True):
            operands[name] = scale.astype(np.float32).reshape(-1)
    layout = AttentionLayout(
        q_strides, k_strides, v_strides, out_strides, lse_strides if p.return_lse else None, table, *scales
    )  # fmt: skip
    arguments = HopperAttentionArguments(plan, layout, trace)
    # Workers one after the other: which positions each takes is chance, their order is the queue's.
    owner = [shuffled.randrange(3) for _ in range(plan.schedule.full_tiles)]
    for worker in range(3):
        taken = [t for t, who in enumerate(owner) if who == worker]
        machine = Machine(arguments, operands, taken, SCALE, seed + worker, eager, edits, over_at)
        if machines is not None:
            machines.append(machine)
    if plan.shares > 1:
        out, lse = joined(case, out.reshape(plan.shares, -1, p.heads_q, p.head_dim_v), lse.reshape(plan.shares, -1))
    outs, lses = [], []
    first = 0
    for i, (sq, _) in enumerate(case.lengths):
        if p.varlen:
            at = slice(first, first + sq)
            outs.append(out.reshape(p.tokens_q, p.heads_q, p.head_dim_v)[at])
            lses.append(lse.reshape(p.tokens_q, p.heads_q)[at])
            first += sq
        else:
            outs.append(out.reshape(p.batch, p.seqlen_q, p.heads_q, p.head_dim_v)[i])
            lses.append(lse.reshape(p.batch, p.heads_q, p.seqlen_q)[i].T)
    if p.varlen and first < p.tokens_q:
        assert (out.reshape(p.tokens_q, -1)[first:] == 0).all(), "rows of no sequence are 0"
    return outs, lses


def joined(case: Case, outs: np.ndarray, lses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What the launch behind makes of shares: flat, and laid out as `run` lays out what is not split."""
    p = case.problem
    lse = lses.reshape(*outs.shape[:-1]).astype(np.float64)  # shares, rows, heads
    with np.errstate(divide="ignore", invalid="ignore"):  # of what sees nothing, and of what is void
        own = np.log(np.exp(lse).sum(0))
        sink = -np.inf if case.sinks is None else case.sinks
        whole = np.logaddexp(own, sink)
    weights = np.where(whole == -np.inf, 0.0, np.exp(lse - np.where(whole == -np.inf, 0.0, whole)))
    out = (weights[..., None] * outs).sum(0)
    if not p.varlen:
        whole = whole.reshape(p.batch, p.seqlen_q, p.heads_q).transpose(0, 2, 1)
    return out.reshape(-1), whole.reshape(-1)


def check(case: Case, **how: Any) -> None:
    outs, lses = run(case, **how)
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        right, right_lse = case.reference(i)
        assert out.shape == right.shape
        assert not np.isnan(out).any()
        assert np.abs(out - right).max(initial=0.0) < 3e-3 * max(1.0, np.abs(right).max(initial=0.0))
        if case.problem.return_lse:
            np.testing.assert_allclose(lse, right_lse, rtol=1e-5, atol=2e-5)


def problem(sq: int, sk: int, batch: int = 1, **more: Any) -> AttentionProblem:
    base = {"heads_q": 2, "heads_kv": 2, "head_dim": 64, "dtype": "float16", "return_lse": True}
    return AttentionProblem(batch, seqlen_q=sq, seqlen_k=sk, **(base | more))


def same(sq: int, sk: int, batch: int = 1, **more: Any) -> Case:
    """A dense case whose sequences have all rows."""
    return Case(problem(sq, sk, batch, **more), [(sq, sk)] * batch)


#: When copies land.
LANDING = pytest.mark.parametrize("eager", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["late", "eager"])
DENSE = {
    "full": same(300, 300),
    "causal": same(300, 300, causal=True),
    "one row": same(1, 700, causal=True),
    "one key": same(200, 1),
    "more queries": same(400, 150, causal=True),
    "more keys": same(130, 500, causal=True),
    "top left": same(130, 300, causal=True, alignment="top_left"),
    "top left, more queries": same(300, 130, causal=True, alignment="top_left"),
    "window": same(300, 420, window=(70, 30)),
    "left window, causal": same(400, 400, window=(130, None), causal=True),
    "wide window": same(500, 700, window=(400, 10)),
    "right window": same(300, 300, window=(None, 40)),
    "nothing seen": same(200, 300, window=(0, 0), alignment="top_left", batch=1),
    "cap": same(150, 200, softcap=3.0, causal=True),
    "sinks": same(150, 200, sinks=True, causal=True),
    "sinks, nothing seen": same(300, 40, sinks=True, causal=True, window=(5, None)),
    "heads share": same(150, 200, heads_q=6, heads_kv=2, causal=True),
    "packed heads": same(9, 300, heads_q=8, heads_kv=2, causal=True),
    "packed, all on one": same(5, 300, 2, heads_q=16, heads_kv=1, causal=True),
    "batch": same(150, 140, 3, causal=True),
    "128": same(300, 300, head_dim=128, causal=True),
    "192, 128": same(150, 200, head_dim=192, head_dim_v=128, causal=True),
    "256": same(150, 200, head_dim=256, causal=True),
    "80": same(150, 200, head_dim=80),
    "24, 40": same(150, 200, head_dim=24, head_dim_v=40, causal=True),
}


@LANDING
@pytest.mark.parametrize("name", DENSE)
def test_dense(name, eager):
    check(DENSE[name], eager=eager, seed=len(name))


def packed(rows: list[tuple[int, int]], rest: int = 0, **more: Any) -> Case:
    tokens_q, tokens_k = sum(q for q, _ in rows) + rest, sum(k for _, k in rows)
    made = problem(tokens_q, max(k for _, k in rows), len(rows), varlen=True, tokens_q=tokens_q, **more)
    return Case(made if made.page_size else replace(made, tokens_k=tokens_k), rows)


MIX = [(130, 130), (0, 50), (1, 200), (64, 64), (70, 0), (150, 20)]
RAGGED = {
    "varlen": packed(MIX, causal=True),
    "varlen, full": packed(MIX),
    "varlen, window": packed(MIX, window=(40, 3)),
    "varlen, heads share": packed(MIX, heads_q=4, heads_kv=2, causal=True),
    "varlen, pages of 16": packed(MIX, causal=True, page_size=16, pages=40, lengths=True),
    "pages of 8": Case(problem(100, 320, 3, page_size=8, pages=130, lengths=True), [(100, 320), (100, 3), (100, 0)]),
    "pages of 64": Case(
        problem(70, 256, 2, page_size=64, pages=9, lengths=True, causal=True), [(70, 200), (70, 129)]
    ),
    "pages of 256": Case(
        problem(70, 512, 2, page_size=256, pages=5, lengths=True, causal=True), [(70, 257), (70, 300)]
    ),
    "lengths": Case(problem(100, 300, 3, lengths=True, causal=True), [(100, 300), (100, 77), (100, 0)]),
    "packed heads, lengths": Case(
        problem(4, 300, 2, lengths=True, causal=True, heads_q=8, heads_kv=1), [(4, 300), (4, 77)]
    ),
}  # fmt: skip


@LANDING
@pytest.mark.parametrize("name", RAGGED)
def test_what_has_no_rectangle_in_memory(name, eager):
    check(RAGGED[name], eager=eager, seed=len(name))


def arriving(case: Case, rows_per_chunk: int = 128) -> Case:
    """The same, with keys in chunks."""
    p = case.problem
    rows = p.tokens_k or p.batch * p.seqlen_k
    case = copy.copy(case)
    case.problem = replace(p, keys=Incoming(Chunks.uniform(rows, rows_per_chunk)))
    return case


LATE = {
    name: arriving(case)
    for name, case in (DENSE | RAGGED).items()
    if not case.problem.page_size and policy.columns_of(case.problem) <= 128  # more leave no registers for a gate
}
LATE_SOON = ("full", "window", "more queries", "varlen", "lengths", "packed heads")


@pytest.mark.parametrize(
    "name", [name if name in LATE_SOON else pytest.param(name, marks=pytest.mark.slow) for name in LATE]
)
def test_keys_that_arrive_are_taken_from_the_first_on(name):
    machines: list[Machine] = []
    check(LATE[name], machines=machines, seed=len(name))
    assert name == "nothing seen" or any(machine.passed for machine in machines)
    for machine in machines:
        rows = LATE[name].problem.keys.chunks.rows
        assert all(0 <= row < end <= rows for row, end in machine.passed)


@pytest.mark.parametrize("over_at", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2, 5))])
@pytest.mark.parametrize("name", ["causal", "packed heads", "window"])
def test_what_the_launchs_end_leaves_undone_is_nan(name, over_at):
    case, machines = LATE[name], []
    outs, lses = run(case, machines=machines, over_at=over_at)
    whole, whole_lses = run(case)
    for out, lse, right, right_lse in zip(outs, lses, whole, whole_lses, strict=True):
        void = np.isnan(out)
        assert void.any() or not any(len(machine.passed) > over_at for machine in machines)
        assert (void.all(-1) == void.any(-1)).all(), "a row is void or whole"
        assert (np.isnan(lse) == void.all(-1)).all()
        assert np.array_equal(out[~void], right[~void])
        assert np.array_equal(lse[~np.isnan(lse)], right_lse[~np.isnan(lse)])


SPLIT = ("one row", "more keys", "window", "sinks", "packed heads", "256", "varlen", "varlen, pages of 16", "lengths")


@pytest.mark.parametrize("splits", [2, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SPLIT)
def test_keys_in_shares(name, splits):
    case = {**DENSE, **RAGGED}[name]
    case = copy.copy(case)
    case.problem = replace(case.problem, return_lse=True)
    plan = plan_of(case.problem, splits=splits)
    assert plan.shares == splits
    check(case, plan=plan, seed=len(name))


@pytest.mark.parametrize("over_at", [None, 2])
@pytest.mark.parametrize(
    "name", [name if name in ("causal", "varlen") else pytest.param(name, marks=pytest.mark.slow) for name in LATE]
)
def test_shares_of_keys_that_arrive(name, over_at):
    case = LATE[name]
    plan = plan_of(case.problem, splits=3)
    assert plan.shares == 3
    outs, lses = run(case, plan=plan, over_at=over_at, seed=len(name))
    waits_so_often = name != "sinks, nothing seen"
    assert any(np.isnan(out).any() for out in outs) == (over_at is not None and waits_so_often)
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        right, _ = case.reference(i)
        void = np.isnan(out)
        assert (void.all(-1) == void.any(-1)).all()
        assert (np.isnan(lse) == void.all(-1)).all()
        assert np.abs(out - right)[~void].max(initial=0.0) < 3e-3 * max(1.0, np.abs(right).max(initial=0.0))


E4M3 = {"dtype": "float8_e4m3fn", "scaled": True}
NARROW = {
    "full": same(200, 300, **E4M3),
    "causal, no scales": same(200, 300, causal=True, dtype="float8_e4m3fn"),
    "128": same(150, 300, 2, causal=True, head_dim=128, heads_q=4, **E4M3),
    "window": same(150, 200, window=(70, 30), softcap=3.0, sinks=True, **E4M3),
    "80, 48": same(150, 200, head_dim=80, head_dim_v=48, **E4M3),
    "varlen": packed(MIX, rest=3, causal=True, **E4M3),
    "varlen, pages of 16": packed(MIX, causal=True, page_size=16, pages=40, lengths=True, **E4M3),
    "pages of 8": Case(
        problem(100, 320, 3, page_size=8, pages=130, lengths=True, **E4M3), [(100, 320), (100, 3), (100, 0)]
    ),
}


@LANDING
@pytest.mark.parametrize("name", NARROW)
def test_values_of_8_bits_are_converted(name, eager):
    check(NARROW[name], eager=eager, seed=len(name))


@pytest.mark.parametrize("name", ["full", "varlen"])
def test_values_of_8_bits_in_shares(name):
    plan = plan_of(NARROW[name].problem, splits=2)
    assert plan.shares == 2
    check(NARROW[name], plan=plan, seed=len(name))


@pytest.mark.parametrize("variant", ["turns", "apart"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_consumers_in_any_order(variant, seed):
    check(same(400, 400, causal=True, window=(150, None)), variant=variant, seed=seed)


@pytest.mark.parametrize("variant", ["turns", "apart"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("keys", [(700, 700), (300, 420), (420, 300), (70, 200), (37, 200)])
def test_every_tile(keys, dim, variant):
    case = same(*keys, causal=True, head_dim=dim)
    made = list(policy.candidates(case.problem, H100, 3, kind="dynamic", variant=variant, splits=1))
    # Where there are fewer queries than a small block has keys, such a block is no choice.
    assert len(made) == {64: 3, 128: 2, 256: 1}[dim] - (dim < 256 and keys[0] <= 64)
    for found in made:
        check(case, plan=of_candidate(case.problem, H100, "hopper", found, "a test's", ()))


def test_what_256_columns_subtract_need_not_be_the_largest():
    # Larger scores in each block, first by less than is worth a multiplication, then by more.
    for step in (3.0, 30.0):
        case = same(130, 512, head_dim=256)
        for q, k in zip(case.q, case.k, strict=True):
            q[..., 0] = 1.0
            k[..., 0] = np.repeat(np.arange(8.0)[::-1], 64)[:, None] * step  # the last keys come first
        check(case)


def test_static():
    check(same(300, 300, 2, causal=True), kind="static")


@pytest.mark.parametrize("over_at", [None, 1])
@pytest.mark.parametrize("name", ["causal", "varlen", "packed heads"])
def test_each_item_is_written_down_once_by_everyone_who_ends_it(name, over_at):
    case = DENSE[name] if name in DENSE else RAGGED[name]
    case = case if over_at is None else arriving(case)
    machines: list[Machine] = []
    run(case, machines=machines, over_at=over_at, trace=True)
    for machine in machines:
        spans, count = machine.spans, machine.config.CONSUMERS
        told = [tile for what, tile, *_ in spans if what == "begin"]
        assert len(told) == len(set(told)) == sum(blocks > 0 for blocks in machine.told)
        ends = [tuple(more) for what, *more in spans if what == "end"]
        assert {(tile, who) for tile, who, _ in ends} == {(tile, who) for tile in told for who in range(count)}
        assert len(ends) == count * len(told)
        ready = [tile for what, tile, *_ in spans if what == "ready"]
        assert len(ready) == len(set(ready))
        if over_at is None:
            assert ready == told
            assert all(whole for *_, whole in ends)
        else:
            waited = [(tile, *more) for what, tile, *more in spans if what == "chunk"]
            assert [tile for tile, _ in waited] == ready
            rows = dict(waited)
            firsts = [rows[tile] for tile in ready]
            assert set(firsts) <= {end - 1 for _, end in machine.passed}
            assert len(machine.passed) <= over_at or not all(whole for *_, whole in ends)


#: How `last_values_of` says what rows they are.
SEEN_BY = (
    same(300, 420, causal=True, window=(150, None), heads_q=4, head_dim=128),
    same(300, 300, 2, causal=True, softcap=3.0),
    same(6, 300, 2, heads_q=8, heads_kv=2),
    same(400, 400),
    packed(MIX, causal=True, page_size=16, pages=40, lengths=True),
    RAGGED["pages of 256"],
    same(300, 300, 2, head_dim=256),  # room for the queries of one item
    arriving(same(300, 420, causal=True, window=(150, None))),
    arriving(same(300, 420, causal=True)),
    NARROW["causal, no scales"],
    same(400, 130, causal=True),  # items without key blocks, and with few
    packed(MIX, causal=True),
    same(200, 265, causal=True, head_dim=256),  # a last row whose diagonal begins a block
)


def wrong(edits: tuple[Edit, ...]) -> bool:
    """Whether an edited text is seen to be wrong."""
    for case in SEEN_BY:
        try:
            check(case, edits=edits)
            if case.problem.keys is not None:
                whole, _ = run(case)
                for over_at in (1, 6):  # at first, and when stages hold what earlier blocks have left
                    outs, _ = run(case, edits=edits, over_at=over_at)
                    void = np.isnan(outs[0])
                    assert void.any(), "what does not arrive is not computed"
                    assert np.array_equal(outs[0][~void], whole[0][~void]), "nor taken for a number"
        except AssertionError:
            return True
    return False


@pytest.mark.slow
def test_a_text_that_says_the_same_is_not_seen():
    assert not wrong(at(kernel_text.STEP, engine.replace("sums.row_sum * rescale", "rescale * sums.row_sum")))


#: Of each sort one, that are found soon; the others are slow.
SOON = (
    "V is not waited for", "Q's phase stays", "the diagonal is one off", "stores read on",
    "a strip is stored, and not fenced",
)  # fmt: skip


@pytest.mark.parametrize(
    "edits",
    [
        pytest.param(edits, id=name, marks=() if name in SOON else pytest.mark.slow)
        for name, edits in kernel_text.HOPPER_ATTENTION.items()
    ],
)
def test_an_edited_text_is_seen(edits):
    assert wrong(edits)


def test_a_loop_that_waits_for_ever_is_a_deadlock():
    with pytest.raises(Deadlock):
        run(same(100, 100), edits=kernel_text.ENDLESS)


# What the checker explores ------------------------------------------------------------------------------------------


def explored(
    turn: Any, ring: AttentionRing, *who: int, blocks: list[int], over_at: int | None = None,
    own: list[tuple[int, int]] | None = None,
) -> list[tuple[Any, ...]]:  # fmt: skip
    """A loop's operations in `tilestream_tools.verify.attention_protocol` for items of so many key blocks, by name.

    ``over_at``: of how many waits at the gate the next one ends with the launch. ``own``: how many of each item's first
    and last blocks the consumer leaves out.
    """
    items = [WorkItem(i, 0, 0, 0, 0, count) for i, count in enumerate(blocks)]
    state: Any = ConvertPlaces() if turn is convert_turn else MathPlaces() if who else LoadPlaces()
    log: list[tuple[Any, ...]] = []
    passed = 0
    for item in (*items, None):
        loop, answer = turn(ring, *who, state), None
        while True:
            try:
                op = loop.send(answer)
            except StopIteration as end:
                state = end.value
                break
            answer = item if isinstance(op, Next | Get) else 0
            name = {"Mark": "Put", "Look": "Get", "Empty": "Arrive"}.get(type(op).__name__, type(op).__name__)
            if isinstance(op, Ask):
                answer = int(over_at is not None and passed >= over_at)
            if isinstance(op, Pass):
                answer, passed = int(passed == over_at), passed + 1
            if name == "Done":
                name = "Fence"  # of the strips of the output, one after the other
            if isinstance(op, Own):
                assert own is not None
                answer = own[item.tile]
            if name in ("Next", "Convert", "Own", "Leave"):
                continue
            if name == "Fence":
                # Of what four warps have written each thread fences its own, before one of them says so.
                log += [("Fence",), ("Meet",)] if turn is convert_turn else [("Fence",)]
                continue
            if name in ("Ask", "Pass"):
                log.append((name,))
                continue
            of = op.barrier if isinstance(op, Copy | Empty) else op[0]
            log.append((name, str(of) if name not in ("Put", "Get", "Retire") else of))
            if name == "WaitBarrier":
                log[-1] += (op.parity,)
            if len(log) > 1 and log[-2] == log[-1] and name in ("Put", "Get"):
                log.pop()
    return log


def done_by(machine: Machine, who: int, parts: int) -> list[tuple[Any, ...]]:
    """What a loop of the kernel has done: parts of a product, copies of a load, fields of an item, strips are one."""
    log: list[tuple[Any, ...]] = []
    starts = 0
    for op in machine.logs[who]:
        if op[:2] == ("Start", "k"):
            starts += 1
            if starts % parts:
                continue
        if not (log and log[-1] == op and op[0] in ("Copy", "Put", "Get", "Fence")):
            log.append(op)
    return log


def left_out(machine: Machine, who: int, arriving: bool = False) -> list[tuple[int, int]]:
    """Of each item how many of the blocks that come first, and last, none of a consumer's rows sees: by hand."""
    config = machine.config
    block, pack, found = config.BLOCK, config.PACK, []
    rows = 64 // pack
    for item in machine.items:
        if item[0] < 2:
            found += [(0, 0)] * (item[0] == 1)
            continue
        blocks = range(item[2], item[2] + item[0] - 1)
        positions = range(item[1] + who * rows, item[1] + (who + 1) * rows)
        until = [min(i + item[6], item[5]) if config.RIGHT else item[5] for i in positions]
        since = [max(i + item[7], 0) if config.LEFT else 0 for i in positions]
        seen = [
            j for j in blocks
            if any(max(low, j * block) < min(high, (j + 1) * block) for low, high in zip(since, until, strict=True))
        ]  # fmt: skip
        if seen:
            low, high = min(seen) - blocks.start, blocks.stop - 1 - max(seen)
        else:  # one of them all the same: the nearest
            low = len(blocks) - 1 if min(since) >= blocks.stop * block else 0
            high = len(blocks) - 1 - low
        found.append((low, high) if arriving else (high, low))
    return found


def own_of(config: Any) -> str:
    """Which blocks consumers leave out, as `AttentionRing` says it: where a tile may have such."""
    offset = (config.CONSUMERS - 1) * (64 // config.PACK)
    masked = (config.LEFT or config.RIGHT) and not (config.LEFT and config.CAPPED)
    if not masked or offset < config.BLOCK:
        return ""
    first, last = config.RIGHT, config.LEFT  # from the last key on
    if config.KEYS != "none":
        first, last = last, first
    return "both" if first and last else "first" if first else "last"


@pytest.mark.parametrize("variant", ["turns", "apart"])
@pytest.mark.parametrize("left", [200, None])
@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("keys", [(700, 300), (700, 700)])
def test_loops_do_what_is_explored(keys, dim, left, variant):
    # Of the queries of the second half most see nothing: items without key blocks are among them. Where rows are cut
    # off at the left the load warp takes no item ahead.
    case = same(*keys, causal=True, window=(left, None), head_dim=dim)
    plan = plan_of(case.problem, variant=variant)
    machines: list[Machine] = []
    run(case, plan=plan, machines=machines)
    sides: set[tuple[bool, bool]] = set()
    for machine in machines:
        config = machine.config
        own = own_of(config)
        ring = AttentionRing(config.STAGES, config.QUERIES, config.CONSUMERS, config.ORDERED, own=own)
        assert own == ("both" if left else "first")
        blocks = [count - 1 for count in machine.told if count]
        assert {str(bar): n for bar, n in ring.barriers().items()} == {b.name: b.count for b in machine.barriers}
        assert done_by(machine, ring.consumers, 1) == explored(load_turn, ring, blocks=blocks)
        for who in range(ring.consumers):
            left_by = left_out(machine, who)
            sides |= {(before > 0, after > 0) for before, after in left_by}
            assert done_by(machine, who, config.PARTS) == explored(math_turn, ring, who, blocks=blocks, own=left_by)
    told = [count for machine in machines for count in machine.told]
    assert keys == (700, 700) or 1 in told
    assert max(told) > 2
    assert (True, False) in sides
    assert left is None or keys != (700, 700) or (False, True) in sides


@pytest.mark.parametrize("variant", ["turns", "apart"])
@pytest.mark.parametrize("left", [200, None])
def test_loops_do_what_is_explored_where_values_are_converted(left, variant):
    case = same(700, 300, causal=True, window=(left, None), **E4M3)
    machines: list[Machine] = []
    run(case, machines=machines, variant=variant)
    machine = machines[0]
    config = machine.config
    assert (variant == "turns") == config.ORDERED
    ring = AttentionRing(
        config.STAGES, config.QUERIES, config.CONSUMERS, config.ORDERED, converting=True,
        own=own_of(config),
    )  # fmt: skip
    blocks = [count - 1 for count in machine.told if count]
    assert 0 in blocks
    assert max(blocks) > 1
    assert {str(bar): count for bar, count in ring.barriers().items()} == {b.name: b.count for b in machine.barriers}
    assert done_by(machine, ring.consumers + 1, 1) == explored(load_turn, ring, blocks=blocks)
    assert done_by(machine, ring.consumers, 1) == explored(convert_turn, ring, blocks=blocks)
    for who in range(ring.consumers):
        assert done_by(machine, who, config.PARTS) == explored(
            math_turn, ring, who, blocks=blocks, own=left_out(machine, who)
        )


@pytest.mark.parametrize("variant", ["apart", pytest.param("turns", marks=pytest.mark.slow)])
@pytest.mark.parametrize("over_at", [None, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 4))])
@pytest.mark.parametrize("block", [128, 64])
def test_loops_do_what_is_explored_where_keys_arrive(block, over_at, variant):
    # A chunk is a block, so that each block is asked for. Smaller ones are for windows.
    window = (None, None) if block == 128 else (300, None)
    case = arriving(same(260, 400, 2, causal=True, head_dim=128, window=window), block)
    plan = plan_of(case.problem, variant=variant, splits=1)
    assert plan.block[1] == block
    machines: list[Machine] = []
    run(case, plan=plan, machines=machines, over_at=over_at)
    machine = machines[0]
    config = machine.config
    ring = AttentionRing(
        config.STAGES, config.QUERIES, config.CONSUMERS, config.ORDERED, arriving=True,
        own=own_of(config),
    )  # fmt: skip
    assert ring.own == ("both" if block == 64 else "")
    blocks = [count - 1 for count in machine.told if count]
    assert len(blocks) > 1
    assert {str(bar): count for bar, count in ring.barriers().items()} == {b.name: b.count for b in machine.barriers}
    assert done_by(machine, ring.consumers, 1) == explored(load_turn, ring, blocks=blocks, over_at=over_at)
    for who in range(ring.consumers):
        assert done_by(machine, who, config.PARTS) == explored(
            math_turn, ring, who, blocks=blocks, own=left_out(machine, who, arriving=True)
        )
