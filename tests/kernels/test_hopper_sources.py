"""The Hopper grouped kernel by source: its whole text in threads (`hopper_threads`), as real plans launch it.

What chooses and waits for tiles is the portable kernel's text, which `portable/test_portable_grouped_sources.py` runs
in Triton's interpreter. Here it runs in the load warp: what it takes goes through the item ring to the math warps.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hopper_threads import Deadlock, Machine, Pointer, TensorMap

from error_rule import Maths, check, passes, rand
from mutants.engine import at
from mutants.engine import replace as exchanged
from tilestream.arrival.device import GateWords
from tilestream.arrival.flat import Awaited
from tilestream.core import error_record
from tilestream.core.gpu_specs import named
from tilestream.core.operands import HALVES, Epilogue, GroupedOperands
from tilestream.core.sources import counts_word, rows_word
from tilestream.kernels.device.schedule import LINE
from tilestream.launch.gate import NO_PUBLISH, PublishArguments
from tilestream.launch.launch import gate_of
from tilestream.launch.trace import SpanLog
from tilestream.ops.grouped_library import launch_of, problem_of
from tilestream.plan.candidate import Asked
from tilestream.plan.grouped import hopper_candidates
from tilestream.plan.plan import of_candidate
from tilestream.runtime.device_workspace import Words as DeviceWords

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
DEVICE = named("h100")
CAPACITY, K, N = 150, 104, 136
#: Rows of each group of each source: several tiles and few rows; none; all in one group.
COUNTS = ((3, 0, 130, 1), (0, 0, 0, 0), (0, 150, 0, 0))
COOPERATIVE, PING_PONG = ("cooperative", (128, 128)), ("ping_pong", (64, 128))
SINGLE, SWAPPED = ("single", (64, 32)), ("single", (16, 64))
SOURCES = "tilestream.kernels.hopper.grouped_sources"
GROUPED, WAITING = "tilestream.kernels.hopper.grouped", "tilestream.kernels.device.sources"


@dataclass
class Words:
    """Signals as a launch sees them, most of them there."""

    count: int
    epoch: int = 3
    words: torch.Tensor = field(init=False)
    quarantine: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.words = torch.full((self.count,), self.epoch or 1, dtype=torch.int32)
        self.quarantine = torch.zeros(1, dtype=torch.int32)

    def use(self) -> GateWords:
        return GateWords(self.words, self.quarantine, self.epoch, 10**6)


class Case:
    """Operands whose unused rows are NaN, and an output of sevens."""

    def __init__(
        self, counts: Any = COUNTS, *, k: int = K, n: int = N, dtype: torch.dtype = BF16, e: Epilogue = Epilogue(),  # noqa: B008
    ) -> None:  # fmt: skip
        self.counts, rows, groups = counts, len(counts) * CAPACITY, len(counts[0])
        a, b = rand(rows, k), rand(groups, n, k, seed=1).to(dtype).mT
        a[~self.used] = float("nan")
        out = torch.full((rows, n // 2 if e.activation in HALVES else n), 7.0, dtype=BF16)
        self.x = GroupedOperands(a.to(dtype), b, out, e, torch.tensor(counts, dtype=torch.int32))
        self.words = Words(len(counts) * (groups + 1))
        size = 64 * LINE.value + len(counts) * (groups + 1)
        self.counters = torch.full((size,), 55, dtype=torch.int64)  # what an earlier launch has left
        self.records = torch.zeros(error_record.RECORDS * error_record.FIELDS, dtype=torch.int64)
        self.claims = torch.zeros(4 * LINE.value, dtype=torch.int64)

    @property
    def used(self) -> torch.Tensor:
        return torch.cat([torch.arange(CAPACITY) < sum(of_source) for of_source in self.counts])

    def rows(self, source: int, group: int) -> slice:
        begin = source * CAPACITY + sum(self.counts[source][:group])
        return slice(begin, begin + self.counts[source][group])

    def word(self, source: int, group: int) -> int:
        groups = len(self.counts[0])
        return counts_word(source, groups) if group < 0 else rows_word(source, group, groups)

    def run(
        self, how: tuple[str, tuple[int, int]] = COOPERATIVE, *, arrives: bool = True, workers: int = 2,
        deadline: float = 60.0, base: int = 55, publish: PublishArguments = NO_PUBLISH, edits: Any = (),
        trace: bool = False,
    ) -> SpanLog:  # fmt: skip
        """Launch the kernel's text; a step of the clock is a nanosecond. With ``trace`` it writes the log."""
        x = self.x
        if publish is not NO_PUBLISH:
            x = x._replace(epilogue=x.epilogue._replace(publish=publish))
        problem = replace(problem_of(x), arrives=arrives, pivot=1)
        variant, tile = how
        fit = hopper_candidates(problem, DEVICE, workers, Asked(tile=tile))
        plan = of_candidate(problem, DEVICE, "hopper", next(one for one in fit if one.variant == variant), "a test's")
        made, swap = launch_of(plan, x)._made[trace], plan.swap_ab
        log = SpanLog(plan, torch.device("cpu"))
        operands: list[Any] = [(made.x, x.b.mT if swap else x.a[None])]
        operands += [(one, x.a[None] if swap else x.b.mT) for one in made.y]
        maps = [None if one is None else TensorMap(tensor, one.box[-2:]) for one, tensor in operands]
        out = None if made.out is None else TensorMap(x.out, made.out.box[-2:])
        if out is not None:
            out.dtype = x.out.dtype
        e = x.epilogue
        scales = (e.scale_b, e.scale_a) if swap else (e.scale_a, e.scale_b)
        awaited = Awaited(self.words, None, deadline, "x") if arrives else None
        gate = gate_of(torch.device("meta"), awaited, "row")
        gate = gate._replace(records=self.records, claims=self.claims) if arrives else gate
        given = made.fill((
            *maps, out, x.offsets, x.out, e.bias, None, *scales, None, None, self.counters, None,
            log.words if trace else None, base, int(not base), 1.0, 1.0,
        ), gate=gate, publish=publish)  # fmt: skip

        def signalled(word: Pointer) -> None:
            if word.memory.data_ptr() == publish.signals.data_ptr():
                place = slice(int(word.offset) * CAPACITY, (int(word.offset) + 1) * CAPACITY)
                assert (out.stored[place][self.used[place]] == 1).all(), "a source is signalled before its last tile"

        machine = Machine(edits, signalled if publish is not NO_PUBLISH else lambda _: None, log.words)
        machine.launch(
            made.kernel, plan.schedule.workers,
            [Pointer(one) if isinstance(one, torch.Tensor) else one for one in given],
        )  # fmt: skip
        assert out is None or (out.stored <= 1).all(), "an element is stored twice"
        return log

    def parts(self) -> Any:
        x, e = self.x, self.x.epilogue
        activation = None if e.activation == "none" else e.activation
        a, b = x.a, x.b
        if x.scales == "block":
            depth, column = torch.arange(a.shape[1]) // 128, torch.arange(b.shape[2]) // 128
            a = a.float() * e.scale_a[:, depth]
            b = b.float() * e.scale_b[:, depth[:, None], column]
            e = e._replace(scale_a=None, scale_b=None)
        for source, counts in enumerate(self.counts):
            for group in range(len(counts)):
                run = self.rows(source, group)
                yield (source, group), x.out[run], Maths(
                    a[run], b[group], None if e.bias is None else e.bias[group], activation=activation,
                    scale_a=None if e.scale_a is None else e.scale_a[run],
                    scale_b=None if e.scale_b is None else e.scale_b[group], out_dtype=x.out.dtype,
                )  # fmt: skip

    def check(self, *but: tuple[int, int]) -> None:
        """Each group's rows are right, those of ``but`` are NaN (group -1: the source's whole place)."""
        for name, out, maths in self.parts():
            if name in but:
                assert out.isnan().all()
            elif (name[0], -1) not in but:
                check(out, maths)
        for source in range(len(self.counts)):
            place = slice(source * CAPACITY, (source + 1) * CAPACITY)
            if (source, -1) in but:
                assert self.x.out[place].isnan().all()
            else:
                assert (self.x.out[place][~self.used[place]] == 7).all(), "rows behind the last one are written"

    def is_right(self) -> bool:
        return all(passes(out, maths.finer(), maths.by_torch()) for _, out, maths in self.parts())


@pytest.mark.parametrize("how", [COOPERATIVE, PING_PONG, SINGLE, SWAPPED], ids=str)
@pytest.mark.parametrize("arrives", [True, False])
def test_each_form_of_the_math_loops(how, arrives):
    case = Case()
    case.run(how, arrives=arrives)
    case.check()


@pytest.mark.parametrize("how", [COOPERATIVE, PING_PONG, SWAPPED], ids=str)
@pytest.mark.parametrize("arrives", [True, False])
def test_the_trace_has_each_tile_once(how, arrives):
    case, (_, (block, columns)) = Case(), how
    log = case.run(how, arrives=arrives, trace=True)
    case.check()
    done = log.done()
    wanted = [
        (source, pm, pn)
        for source, counts in enumerate(COUNTS)
        for pm in range(sum(-(-rows // block) for rows in counts))
        for pn in range(-(-N // columns))
    ]
    assert [(one.item.batch, one.item.pm, one.item.pn) for one in done] == wanted
    halves = 2 if how is COOPERATIVE else 1
    assert {(one.times, one.complete) for one in done} == {(1, halves)}
    assert all(one.begin < one.ready < one.end for one in done)
    tiles_of_130 = -(-130 // block) * -(-N // columns)
    words = [one.chunk for one in done]
    assert words.count(case.word(0, 2)) == (tiles_of_130 if arrives else 0)
    assert arrives or set(words) == {-1}


ROWS, GROUPS = len(COUNTS) * CAPACITY, len(COUNTS[0])
SCALES = {"scale_a": rand(ROWS, 1, seed=2), "scale_b": rand(GROUPS, 1, N, seed=3)}
OF_BLOCKS = {
    "scale_a": torch.exp2(rand(ROWS, 2, seed=2).round()), "scale_b": torch.exp2(rand(GROUPS, 2, 2, seed=3).round()),
}  # fmt: skip
EPILOGUES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gelu": (COOPERATIVE, {"e": Epilogue(bias=rand(GROUPS, 1, N), activation="gelu", **SCALES)}),
    "swapped": (SWAPPED, {"e": Epilogue(bias=rand(GROUPS, 1, N), activation="silu", **SCALES)}),
    "two halves": (COOPERATIVE, {"e": Epilogue(activation="swiglu"), "n": 160}),
    "without TMA": (PING_PONG, {"n": 132}),
    "blocks": (COOPERATIVE, {"e": Epilogue(**OF_BLOCKS), "dtype": E4M3, "k": 144}),
}


@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues(name):
    how, made = EPILOGUES[name]
    case = Case(**made)
    case.run(how)
    case.check()


@pytest.mark.parametrize("groups", [64, 256])
def test_a_lane_looks_at_several_groups(groups):
    counts = [[0] * groups for _ in range(3)]
    for source, group, rows in ((0, groups - 1, 3), (0, 33, 1), (2, 5, 70)):
        counts[source][group] = rows
    case = Case(counts, k=16, n=32)
    case.run(SINGLE)
    case.check()


@pytest.mark.parametrize("seed", range(3))
def test_what_comes_late_and_in_any_order(seed):
    case = Case()
    rows, counts = case.x.a.clone(), case.x.offsets.clone()
    case.x.a.fill_(float("nan"))
    case.x.offsets.fill_(-5)
    case.words.words.fill_(2)  # of the epoch before
    coming = [(s, g) for s in range(len(counts)) for g in range(-1, counts.shape[1])]
    random.Random(seed).shuffle(coming)

    def bring() -> None:
        for source, group in coming:
            if group < 0:
                case.x.offsets[source] = counts[source]
            else:
                case.x.a[case.rows(source, group)] = rows[case.rows(source, group)]
            case.words.words[case.word(source, group)] = 3

    thread = threading.Thread(target=bring)
    thread.start()
    case.run((COOPERATIVE, PING_PONG, SINGLE)[seed], workers=3)
    thread.join()
    case.x.a.copy_(rows)
    case.check()


@pytest.mark.parametrize("missing", [(0, -1), (2, -1), (0, 2)], ids=str)
@pytest.mark.parametrize("how", [COOPERATIVE, PING_PONG], ids=str)
def test_what_never_comes_is_nan_and_named(missing, how):
    case = Case()
    case.words.words[case.word(*missing)] = 2  # of the epoch before
    case.run(how, deadline=1e-6, workers=1)
    case.check(missing)
    assert (case.records[1], case.records[5]) == (error_record.EXPIRED, case.word(*missing))


def test_counts_that_are_none_make_a_place_nan():
    case = Case()
    case.x.offsets[0, 1] = CAPACITY
    case.run(arrives=False)
    case.check((0, -1))


def test_a_captured_launch_leaves_its_words_as_they_were():
    case = Case()
    case.words.epoch = 0
    case.counters.zero_()
    for _ in range(2):
        case.words.words.fill_(1)
        case.x.out.fill_(7.0)
        case.run(PING_PONG, base=0)
        case.check()
        assert not case.counters.any()
        assert not case.words.words.any()


@pytest.mark.parametrize("how", [COOPERATIVE, PING_PONG, SINGLE], ids=str)
def test_sources_are_signalled_when_their_rows_are_complete(how):
    case = Case()
    signals, counts = (torch.zeros(3, dtype=torch.int32) for _ in range(2))
    case.run(how, arrives=False, publish=PublishArguments(signals, counts, 9))
    case.check()
    assert signals.tolist() == [9] * 3
    assert not counts.any(), "counts are restored"


@pytest.mark.parametrize("arrives", [True, False])
@pytest.mark.parametrize("publishes", [True, False])
def test_a_launch_is_given_what_its_kernel_waits_for_and_publishes(arrives, publishes, monkeypatch):
    """In the order of the kernel's parameters, those that it does not have left out."""
    x = Case().x
    signals, counts = torch.zeros(3, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    if publishes:
        x = x._replace(epilogue=x.epilogue._replace(publish=PublishArguments(signals, counts, 9)))
    problem = replace(problem_of(x), arrives=arrives)
    fit = hopper_candidates(problem, DEVICE, 2, Asked(tile=(128, 128)))
    launch = launch_of(of_candidate(problem, DEVICE, "hopper", next(fit), "a test's"), x)
    compiled, made = [], []
    monkeypatch.setattr(launch, "_compiled", lambda *given: compiled.append(given) or (lambda *own: made.append(own)))
    words, words_that_come = DeviceWords(torch.zeros(64, dtype=torch.int64), None, None, 7, 0), Words(15)
    for _ in range(2):
        launch.issue(5, x, words, Awaited(words_that_come, None, 60.0, "x") if arrives else None, None)
    gate = compiled[0][3]
    assert len(compiled) == 1, "the same launch is compiled once"
    assert (gate.row_signals is words_that_come.words) == arrives
    expected = [5, x.a.data_ptr(), *[x.b.data_ptr()] * sum(one is not None for one in launch._made[False].y)]
    expected += [x.out.data_ptr(), x.offsets.data_ptr(), x.out.data_ptr(), words.counters.data_ptr()]
    if arrives:
        expected += [one.data_ptr() for one in gate.pointers if one is not None]
    if publishes:
        expected += [signals.data_ptr(), counts.data_ptr()]
    expected += [7, 0]
    if arrives:
        expected += [3, gate.row_key, gate.allowed, gate.op]
    assert list(made[1]) == expected + [9] * publishes


def published(case: Case, **how: Any) -> bool:
    signals, counts = (torch.zeros(3, dtype=torch.int32) for _ in range(2))
    case.run(arrives=False, publish=PublishArguments(signals, counts, 9), **how)
    return bool((signals == 9).all()) and not counts.any()


def all_but_one(case: Case, **how: Any) -> bool:
    """Whether rows that never come cost no others theirs."""
    case.words.words[case.word(0, 2)] = 2
    case.run(deadline=1e-6, workers=1, **how)
    return all(passes(out, maths.finer(), maths.by_torch()) for name, out, maths in case.parts() if name != (0, 2))


def lost(case: Case, **how: Any) -> bool:
    case.words.words[case.word(2, 1)] = 0
    case.run(deadline=1e-6, workers=1, **how)
    return bool(case.x.out[case.rows(2, 1)].isnan().all())


def right(case: Case, **how: Any) -> bool:
    case.run(**how)
    return case.is_right()


FAULTS = {
    "a void tile is handed on forwards": (lost, SOURCES + ":load_loop", "1 - its.valid", "its.valid * 0"),
    "a tile that came too late is valid": (
        lost, WAITING + ":next_tile", "tl.where(passed.over != 0, 0, valid)", "valid",
    ),
    "rows of the epoch before are there": (
        all_but_one, WAITING + ":tiles_left", "(coming.epoch == 0) & (word != 0)",
        "(coming.epoch == 0) | (word != 0)",
    ),
    "a tile is clipped at its source's place": (
        right, WAITING + ":tile_of", "its.begin + its.rows", "its.begin + its.rows * 2",
    ),
    "a tile has another group's matrix": (
        right, WAITING + ":tile_of", "Item(its.group, pm, pn, zero, zero + k_steps, zero, zero + 1, zero - 1, zero)",
        "Item(its.group * 0, pm, pn, zero, zero + k_steps, zero, zero + 1, zero - 1, zero)",
    ),
    "halves of a tile count as whole ones": (
        published, GROUPED + ":math_loop", "tiles * C.HALVES", "tiles",
    ),
    "a tile counts for another source": (
        published, SOURCES + ":load_loop", "put(items.slots, slot.at, SOURCE, its.source, 1)",
        "put(items.slots, slot.at, SOURCE, its.source * 0, 1)",
    ),
    "STOP is not handed on": (
        right, GROUPED + ":hand_on_group", "hand_on(items, slot, found, item, C)",
        "hand_on(items, slot, found, item, C) if found else slot",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_text_is_seen(fault):
    what, where, find, text = FAULTS[fault]
    assert what(Case())
    try:
        seen = not what(Case(), edits=at(where, exchanged(find, text)))
    except (Deadlock, AssertionError):
        seen = True
    assert seen
