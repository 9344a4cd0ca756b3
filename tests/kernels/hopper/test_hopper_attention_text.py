"""The Hopper attention kernel's text, run on a machine of NumPy: the numbers it gives, for every kind of problem.

No GPU and no compiler: see `attention_machine`. The tolerance is the error rule's (`error_rule`) for what the machine
rounds as the kernel does: weights to fp16, sums in fp32.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from attention_machine import Deadlock, Machine
from attention_operands import Prepared, joined, listed, prepared
from turns import operations

from attention_maths import Case
from layouts import linear
from mutants import engine, kernel_text
from mutants.engine import Edit, at
from tilestream.core.chunks import Chunks
from tilestream.core.device import DeviceProperties
from tilestream.kernels.hopper.attention_softmax import LANES
from tilestream.kernels.hopper.epilogue import mma_layout
from tilestream.launch.hopper.attention_arguments import HopperAttentionArguments
from tilestream.ops.attention_gpu import layout_of
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
WORKERS = 3


def plan_of(problem: AttentionProblem, **how: Any) -> AttentionPlan:
    assert policy.refusal(problem, H100) == ""
    found = list(policy.candidates(problem, H100, WORKERS, kind=how.pop("kind", "dynamic"), **how))
    return of_candidate(problem, H100, "hopper", found[-1], "a test's", ())


def given(
    queries: int | tuple[int, ...], keys: int | tuple[int, ...], batch: int = 1, how: str = "dense", *,
    heads: tuple[int, int] = (2, 2), dims: tuple[int, int] = (64, 64), dtype: torch.dtype = torch.float16,
    page: int = 16, extra: int = 0, **features: Any,
) -> Prepared:  # fmt: skip
    """Operands of ``batch`` dense sequences; or of sequences with these queries and keys."""
    queries = (queries,) if isinstance(queries, int) else queries
    keys = (keys,) * batch if isinstance(keys, int) else keys
    case = Case(queries, keys, heads, dims, "full", how, page, extra, dtype, signed=True)
    return prepared(case, max_seqlen_k=max(keys) if how == "packed" else 0, **features)


def flat(x: torch.Tensor) -> np.ndarray:
    """All that a tensor's memory holds, in float64 or int32."""
    whole = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,))
    return whole.numpy() if x.dtype == torch.int32 else whole.double().numpy()


def run(
    case: Prepared, *, seed: int = 0, eager: bool = False, edits: tuple[Edit, ...] = (),
    plan: AttentionPlan | None = None, machines: list[Machine] | None = None, over_at: int | None = None,
    trace: bool = False, **how: Any,
) -> tuple[list[np.ndarray], list[np.ndarray]]:  # fmt: skip
    """``(outs, lses)`` by sequence, rows first, from the kernel's text."""
    p, x = case.problem, case.operands
    plan = plan or plan_of(p, **how)
    rows = p.tokens_q if p.varlen else p.batch * p.seqlen_q
    memory = {name: flat(y) for name, y in x._asdict().items() if isinstance(y, torch.Tensor)}
    memory |= {name: flat(y) for name, y in zip(("starts", "order"), listed(plan, x), strict=True) if y is not None}
    memory["out"] = np.full(plan.shares * rows * p.heads_q * p.head_dim_v, np.nan)
    memory["lse"] = np.full(plan.shares * rows * p.heads_q, np.nan)
    if plan.shares > 1:  # sinks are of the launch that joins the shares
        memory.pop("sinks", None)
    arguments = HopperAttentionArguments(plan, layout_of(x), trace)
    # Workers one after the other: which positions each takes is chance, their order is the queue's.
    shuffled = random.Random(seed)
    owner = [shuffled.randrange(WORKERS) for _ in range(plan.schedule.full_tiles)]
    for worker in range(WORKERS):
        taken = [position for position, its in enumerate(owner) if its == worker]
        machine = Machine(arguments, memory, taken, x.scale, seed + worker, eager, edits, over_at)
        if machines is not None:
            machines.append(machine)
    out, lse = memory["out"], memory["lse"]
    if plan.shares > 1:
        shape = (plan.shares, rows, p.heads_q)
        parts = (torch.from_numpy(one) for one in (out.reshape(*shape, -1), lse.reshape(shape)))
        out, lse = (one.numpy() for one in joined(*parts, x.sinks))
    elif not p.varlen:
        lse = lse.reshape(p.batch, p.heads_q, -1).transpose(0, 2, 1)
    out, lse = out.reshape(rows, p.heads_q, -1), lse.reshape(rows, p.heads_q)
    ends = np.cumsum([len(q) for q, _, _ in case.call.sequences])
    assert (out[ends[-1] :] == 0).all(), "rows of no sequence are 0"
    return np.split(out[: ends[-1]], ends[:-1]), np.split(lse[: ends[-1]], ends[:-1])


def check(case: Prepared, **how: Any) -> None:
    """Assert that no row is void, and each is near its reference in float64."""
    check_whole_rows(case, *run(case, **how), most_void=0)


def check_whole_rows(
    case: Prepared, outs: list[np.ndarray], lses: list[np.ndarray], most_void: float = np.inf
) -> int:  # fmt: skip
    """Assert that each row is void or near its reference; how many are void."""
    voids = 0
    for out, lse, (right, right_lse) in zip(outs, lses, case.call.references(torch.float64), strict=True):
        right, right_lse = right.numpy(), right_lse.t().numpy()
        assert out.shape == right.shape
        void = np.isnan(out)
        assert (void.all(-1) == void.any(-1)).all(), "a row is void or whole"
        assert (np.isnan(lse) == void.all(-1)).all()
        assert np.abs(out - right)[~void].max(initial=0.0) < 3e-3 * max(1.0, np.abs(right).max(initial=0.0))
        np.testing.assert_allclose(lse[~np.isnan(lse)], right_lse[~np.isnan(lse)], rtol=1e-5, atol=2e-5)
        voids += int(void.any(-1).sum())
    assert voids <= most_void
    return voids


#: When copies land.
LANDING = pytest.mark.parametrize("eager", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["late", "eager"])
DENSE = {
    "full": given(300, 300),
    "causal": given(300, 300, causal=True),
    "one row": given(1, 700, causal=True),
    "one key": given(200, 1),
    "more queries": given(400, 150, causal=True),
    "more keys": given(130, 500, causal=True),
    "top left": given(130, 300, causal="top_left"),
    "top left, more queries": given(300, 130, causal="top_left"),
    "window": given(300, 420, window=(70, 30)),
    "left window, causal": given(400, 400, window=(130, None), causal=True),
    "wide window": given(500, 700, window=(400, 10)),
    "right window": given(300, 300, window=(None, 40)),
    "nothing seen": given(200, 300, window=(0, 0), causal="top_left"),
    "cap": given(150, 200, softcap=3.0, causal=True),
    "sinks": given(150, 200, sinks=True, causal=True),
    "sinks, nothing seen": given(300, 40, sinks=True, causal=True, window=(5, None)),
    "heads share": given(150, 200, heads=(6, 2), causal=True),
    "packed heads": given(9, 300, heads=(8, 2), causal=True),
    "packed, all on one": given(5, 300, 2, heads=(16, 1), causal=True),
    "batch": given(150, 140, 3, causal=True),
    "128": given(300, 300, dims=(128, 128), causal=True),
    "192, 128": given(150, 200, dims=(192, 128), causal=True),
    "256": given(150, 200, dims=(256, 256), causal=True),
    "80": given(150, 200, dims=(80, 80)),
    "24, 40": given(150, 200, dims=(24, 40), causal=True),
}


@LANDING
@pytest.mark.parametrize("name", DENSE)
def test_dense(name, eager):
    check(DENSE[name], eager=eager, seed=len(name))


#: Queries and keys of several sequences.
MIX = ((130, 0, 1, 64, 70, 150), (130, 50, 200, 64, 0, 20))
RAGGED = {
    "varlen": given(*MIX, how="packed", causal=True),
    "varlen, full": given(*MIX, how="packed"),
    "varlen, window": given(*MIX, how="packed", window=(40, 3)),
    "varlen, heads share": given(*MIX, how="packed", heads=(4, 2), causal=True),
    "varlen, pages of 16": given(*MIX, how="packed paged", causal=True),
    "pages of 8": given(100, (320, 3, 0), how="paged", page=8),
    "pages of 64": given(70, (200, 129), how="paged", page=64, causal=True),
    "pages of 256": given(70, (257, 300), how="paged", page=256, causal=True),
    "lengths": given(100, (300, 77, 0), how="lengths", causal=True),
    "packed heads, lengths": given(4, (300, 77), how="lengths", heads=(8, 1), causal=True),
}


@LANDING
@pytest.mark.parametrize("name", RAGGED)
def test_what_has_no_rectangle_in_memory(name, eager):
    check(RAGGED[name], eager=eager, seed=len(name))


def arriving(case: Prepared, rows_per_chunk: int = 128) -> Prepared:
    """The same, with keys in chunks."""
    p = case.problem
    keys = Incoming(Chunks.uniform(p.tokens_k or p.batch * p.seqlen_k, rows_per_chunk))
    return replace(case, problem=replace(p, keys=keys))


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
    voids = check_whole_rows(case, outs, lses)
    assert voids or not any(len(machine.passed) > over_at for machine in machines)
    for found, whole in zip((outs, lses), run(case), strict=True):
        for one, right in zip(found, whole, strict=True):
            assert np.array_equal(one[~np.isnan(one)], right[~np.isnan(one)])


@pytest.mark.parametrize("over_at", [None, 1])
@pytest.mark.parametrize(
    "name", [name if name in ("window", "varlen") else pytest.param(name, marks=pytest.mark.slow) for name in LATE]
)
def test_the_promise_takes_keys_that_arrive_in_the_order_of_others(name, over_at):
    """A tile waits for all its keys before its first block, and its bits are those of keys that are there."""
    late, there, machines = LATE[name], {**DENSE, **RAGGED}[name], []
    plan = plan_of(late.problem, promises=True, splits=1)
    assert plan.downwards
    found = run(late, plan=plan, machines=machines, over_at=over_at, seed=len(name))
    whole = run(there, plan=replace(plan, problem=there.problem), seed=len(name))
    voids = check_whole_rows(late, *found)
    if over_at is None:
        assert not voids
        assert name == "nothing seen" or any(machine.passed for machine in machines)
    else:
        assert voids or not any(len(machine.passed) > over_at for machine in machines)
    for one, right in zip((*found[0], *found[1]), (*whole[0], *whole[1]), strict=True):
        assert np.array_equal(one[~np.isnan(one)], right[~np.isnan(one)])


SPLIT = ("one row", "more keys", "window", "sinks", "packed heads", "256", "varlen", "varlen, pages of 16", "lengths")


@pytest.mark.parametrize("splits", [2, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SPLIT)
def test_keys_in_shares(name, splits):
    case = {**DENSE, **RAGGED}[name]
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
    voids = check_whole_rows(case, *run(case, plan=plan, over_at=over_at, seed=len(name)))
    waits_so_often = name != "sinks, nothing seen"
    assert (voids > 0) == (over_at is not None and waits_so_often)


E4M3 = {"dtype": torch.float8_e4m3fn}
NARROW = {
    "full": given(200, 300, **E4M3),
    "causal, no scales": given(200, 300, causal=True, scaled=False, **E4M3),
    "128": given(150, 300, 2, causal=True, dims=(128, 128), heads=(4, 2), **E4M3),
    "window": given(150, 200, window=(70, 30), softcap=3.0, sinks=True, **E4M3),
    "80, 48": given(150, 200, dims=(80, 48), **E4M3),
    "varlen": given(*MIX, how="packed", extra=3, causal=True, **E4M3),
    "varlen, pages of 16": given(*MIX, how="packed paged", causal=True, **E4M3),
    "pages of 8": given(100, (320, 3, 0), how="paged", page=8, **E4M3),
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


@pytest.mark.parametrize("variant", ["ordered", "unordered"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_consumers_in_any_order(variant, seed):
    check(given(400, 400, causal=True, window=(150, None)), variant=variant, seed=seed)


@pytest.mark.parametrize("variant", ["ordered", "unordered"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("keys", [(700, 700), (300, 420), (420, 300), (70, 200), (37, 200)])
def test_every_tile(keys, dim, variant):
    case = given(*keys, causal=True, dims=(dim, dim))
    made = list(policy.candidates(case.problem, H100, WORKERS, kind="dynamic", variant=variant, splits=1))
    # Where there are fewer queries than a small block has keys, such a block is no choice.
    assert len(made) == {64: 3, 128: 2, 256: 1}[dim] - (dim < 256 and keys[0] <= 64)
    for found in made:
        check(case, plan=of_candidate(case.problem, H100, "hopper", found, "a test's", ()))


@pytest.mark.parametrize("step", [3.0, 30.0])
def test_what_256_columns_subtract_need_not_be_the_largest(step):
    # Larger scores in each block, first by less than is worth a multiplication, then by more: the last keys come first.
    case = given(130, 512, dims=(256, 256))
    ladder = torch.arange(8.0).flip(0).repeat_interleave(64) * step
    for q, k in (case.call.sequences[0][:2], case.operands[:2]):
        q[..., 0] = 1.0
        k[..., 0] = ladder[:, None]
    check(case)


@pytest.mark.parametrize("block", [64, 128])
def test_a_mask_takes_a_threads_place_out_of_its_columns(block):
    """The bits of a column that the lanes of a warp give: without them a thread's columns are constants."""
    lanes = linear(mma_layout.fn(block), [64, block]).lane_bases
    assert LANES.value == sum(column for _, column in lanes)


def test_static():
    check(given(300, 300, 2, causal=True), kind="static")


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
    given(300, 420, causal=True, window=(150, None), heads=(4, 2), dims=(128, 128)),
    given(300, 300, 2, causal=True, softcap=3.0),
    given(6, 300, 2, heads=(8, 2)),
    given(400, 400),
    RAGGED["varlen, pages of 16"],
    RAGGED["pages of 256"],
    given(300, 300, 2, dims=(256, 256)),  # room for the queries of one item
    arriving(given(300, 420, causal=True, window=(150, None))),
    arriving(given(300, 420, causal=True)),
    NARROW["causal, no scales"],
    given(400, 130, causal=True),  # items without key blocks, and with few
    RAGGED["varlen"],
    given(200, 265, causal=True, dims=(256, 256)),  # a last row whose diagonal begins a block
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
        run(given(100, 100), edits=kernel_text.ENDLESS)


# What the checker explores ------------------------------------------------------------------------------------------


#: The kernel's names. Done: a fence of the strips of the output, one after the other.
_NAMES = {"Mark": "Put", "Look": "Get", "Empty": "Arrive", "Done": "Fence"}


def explored(
    turn: Any, ring: AttentionRing, *who: int, blocks: list[int], over_at: int | None = None,
    own: list[tuple[int, int]] | None = None,
) -> list[tuple[Any, ...]]:  # fmt: skip
    """A loop's operations in `tilestream_tools.verify.attention_protocol` for items of so many key blocks, by name.

    ``over_at``: of how many waits at the gate the next one ends with the launch. ``own``: how many of each item's first
    and last blocks the consumer leaves out.
    """
    items = [*(WorkItem(i, 0, 0, 0, 0, count) for i, count in enumerate(blocks)), None]
    state: Any = ConvertPlaces() if turn is convert_turn else MathPlaces() if who else LoadPlaces()
    log: list[tuple[Any, ...]] = []
    passed = 0

    def answer(item: WorkItem | None, op: Any) -> Any:
        nonlocal passed
        if isinstance(op, Next | Get):
            return item
        if isinstance(op, Own):
            assert own is not None
            return own[item.tile]
        if isinstance(op, Ask):
            return int(over_at is not None and passed >= over_at)
        passed += isinstance(op, Pass)
        return int(isinstance(op, Pass) and passed - 1 == over_at)

    for item in items:
        done, state = operations(turn(ring, *who, state), partial(answer, item))
        for op in done:
            name = _NAMES.get(type(op).__name__, type(op).__name__)
            if name == "Fence":
                # Of what four warps have written each thread fences its own, before one of them says so.
                log += [("Fence",), ("Meet",)] if turn is convert_turn else [("Fence",)]
            elif name in ("Ask", "Pass"):
                log.append((name,))
            elif name not in ("Next", "Convert", "Own", "Leave"):
                of = op.barrier if isinstance(op, Copy | Empty) else op[0]
                parity = (op.parity,) if name == "WaitBarrier" else ()
                one = (name, of if name in ("Put", "Get", "Retire") else str(of), *parity)
                if name not in ("Put", "Get") or log[-1:] != [one]:
                    log.append(one)
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


def check_explored(
    machine: Machine, own: str, *, converting: bool = False, arriving: bool = False, over_at: int | None = None
) -> list[tuple[int, int]]:  # fmt: skip
    """Assert that a worker did what is explored; what its consumers left out of each item, first and last blocks."""
    config = machine.config
    assert own_of(config) == own
    ring = AttentionRing(
        config.STAGES, config.QUERIES, config.CONSUMERS, config.ORDERED, arriving=arriving, converting=converting,
        own=own,
    )  # fmt: skip
    blocks = [count - 1 for count in machine.told if count]
    assert {str(bar): count for bar, count in ring.barriers().items()} == {b.name: b.count for b in machine.barriers}
    load = ring.consumers + converting
    assert done_by(machine, load, 1) == explored(load_turn, ring, blocks=blocks, over_at=over_at)
    if converting:
        assert done_by(machine, ring.consumers, 1) == explored(convert_turn, ring, blocks=blocks)
    left = [left_out(machine, who, arriving) for who in range(ring.consumers)]
    for who, own_blocks in enumerate(left):
        done = done_by(machine, who, config.PARTS)
        assert done == explored(math_turn, ring, who, blocks=blocks, own=own_blocks)
    return [pair for of_who in left for pair in of_who]


@pytest.mark.parametrize("variant", ["ordered", "unordered"])
@pytest.mark.parametrize("left", [200, None])
@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("keys", [(700, 300), (700, 700)])
def test_loops_do_what_is_explored(keys, dim, left, variant):
    # Of the queries of the second half most see nothing: items without key blocks are among them. Where rows are cut
    # off at the left the load warp takes no item ahead.
    case = given(*keys, causal=True, window=(left, None), dims=(dim, dim))
    machines: list[Machine] = []
    run(case, plan=plan_of(case.problem, variant=variant), machines=machines)
    omitted = [pair for machine in machines for pair in check_explored(machine, "both" if left else "first")]
    told = [count for machine in machines for count in machine.told]
    assert keys == (700, 700) or 1 in told
    assert max(told) > 2
    assert any(first and not last for first, last in omitted)
    assert left is None or keys != (700, 700) or any(last and not first for first, last in omitted)


@pytest.mark.parametrize("variant", ["ordered", "unordered"])
@pytest.mark.parametrize("left", [200, None])
def test_loops_do_what_is_explored_where_values_are_converted(left, variant):
    machines: list[Machine] = []
    run(given(700, 300, causal=True, window=(left, None), **E4M3), machines=machines, variant=variant)
    machine = machines[0]
    assert (variant == "ordered") == machine.config.ORDERED
    assert 1 in machine.told
    assert max(machine.told) > 2
    check_explored(machine, own_of(machine.config), converting=True)


@pytest.mark.parametrize("variant", ["unordered", pytest.param("ordered", marks=pytest.mark.slow)])
@pytest.mark.parametrize("over_at", [None, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 4))])
@pytest.mark.parametrize("block", [128, 64])
def test_loops_do_what_is_explored_where_keys_arrive(block, over_at, variant):
    # A chunk is a block, so that each block is asked for. Smaller ones are for windows.
    window = (None, None) if block == 128 else (300, None)
    case = arriving(given(260, 400, 2, causal=True, dims=(128, 128), window=window), block)
    plan = plan_of(case.problem, variant=variant, splits=1)
    assert plan.block[1] == block
    machines: list[Machine] = []
    run(case, plan=plan, machines=machines, over_at=over_at)
    assert len([count for count in machines[0].told if count]) > 1
    check_explored(machines[0], "both" if block == 64 else "", arriving=True, over_at=over_at)
