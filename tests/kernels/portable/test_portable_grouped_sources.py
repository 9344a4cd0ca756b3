"""The portable grouped kernel by source in Triton's interpreter: counts and rows that come late, never, or are none."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest
import torch
from interpreted import DEVICE, Words, awaited, captured, crossed
from test_portable_arrival import expired

from error_rule import Maths, check, rand
from tilestream.core.errors import ProducerStopped, TilestreamError
from tilestream.core.operands import HALVES, Epilogue, GroupedOperands
from tilestream.core.sources import counts_word, rows_word
from tilestream.launch.gate import PublishArguments
from tilestream.ops.grouped_library import launch_of, problem_of
from tilestream.plan.grouped import plan_groups
from tilestream.runtime.channel import channel
from tilestream.runtime.device_workspace import DeviceWorkspace

CPU = torch.device("cpu")
F16, F32 = torch.float16, torch.float32
CAPACITY, K, N = 45, 24, 33
#: Rows of each group of each source: ragged; a source without rows; one with everything; all in one group.
COUNTS = {
    "ragged": ((3, 0, 17, 1), (16, 5, 0, 8), (0, 33, 0, 0)),
    "empty": ((0, 0, 0), (0, 4, 2), (0, 0, 0), (0, 0, 0)),
    "one source": ((0, 0), (12, 33), (0, 0)),
    "one": ((45,),),
    "none": ((0, 0), (0, 0)),
}


class Case:
    """Operands whose unused rows are NaN, and an output of sevens."""

    def __init__(self, counts, *, n=N, dtype=F32, epilogue=Epilogue(), capacity=CAPACITY, b=None):  # noqa: B008
        self.counts, self.capacity = counts, capacity
        rows, groups = len(counts) * capacity, len(counts[0])
        b = rand(groups, K, n).to(dtype) if b is None else b
        columns = b.shape[2] // (2 if epilogue.activation in HALVES else 1)
        kind = torch.bfloat16 if dtype.itemsize == 1 else dtype
        a = rand(rows, b.shape[1])
        self.used = torch.cat([torch.arange(capacity) < sum(counts_of) for counts_of in counts])
        a[~self.used] = float("nan")
        a = a.to(dtype)
        out = torch.full((rows, columns), 7.0, dtype=kind)
        self.x = GroupedOperands(a, b, out, epilogue, torch.tensor(counts, dtype=torch.int32))

    def plan(self, workers=5, arrives=True, pivot=0):
        problem = replace(problem_of(self.x), arrives=arrives, pivot=pivot)
        return plan_groups.__wrapped__(problem, workers, device=DEVICE, backend="portable")

    def rows(self, source, group):
        begin = source * self.capacity + sum(self.counts[source][:group])
        return slice(begin, begin + self.counts[source][group])

    def maths(self, source, group):
        run, e = self.rows(source, group), self.x.epilogue
        return self.x.out[run], Maths(
            self.x.a[run], self.x.b[group], None if e.bias is None else e.bias[group],
            activation=None if e.activation == "none" else e.activation, out_dtype=self.x.out.dtype,
            scale_a=None if e.scale_a is None else e.scale_a[run],
            scale_b=None if e.scale_b is None else e.scale_b[group],
        )  # fmt: skip

    def check(self, *but):
        for source, counts in enumerate(self.counts):
            for group in range(len(counts)):
                if (source, group) in but or (source, -1) in but:
                    place = slice(source * self.capacity, (source + 1) * self.capacity)
                    lost = place if (source, -1) in but else self.rows(source, group)
                    assert self.x.out[lost].isnan().all()
                else:
                    check(*self.maths(source, group))
        lost = [source for source, group in but if group < 0]
        for source in range(len(self.counts)):
            if source not in lost:
                place = slice(source * self.capacity, (source + 1) * self.capacity)
                assert (self.x.out[place][~self.used[place]] == 7).all(), "rows behind the last one are written"

    @property
    def words(self):
        return len(self.counts) * (len(self.counts[0]) + 1)

    def word(self, source, group):
        groups = len(self.counts[0])
        return counts_word(source, groups) if group < 0 else rows_word(source, group, groups)


def run(case, plan=None, incoming="arrived", **how):
    plan = plan or case.plan(**how)
    incoming = awaited(Words(case.words, 3).arrive()) if incoming == "arrived" else incoming
    launch_of(plan, case.x)(case.x, incoming)


@crossed("name, workers", [*COUNTS], [1, 2, 5, 16])
def test_sources_of_any_counts(name, workers):
    case = Case(COUNTS[name])
    run(case, workers=workers)
    case.check()


@pytest.mark.parametrize("name", COUNTS)
def test_everything_is_there(name):
    case = Case(COUNTS[name])
    run(case, incoming=None, arrives=False)
    case.check()


def test_every_pivot():
    for pivot in range(3):
        case = Case(COUNTS["ragged"], n=16)
        run(case, pivot=pivot)
        case.check()


@pytest.mark.parametrize("groups", [32, 300])
def test_many_groups_and_more_sources_than_there_are_bits(groups):
    counts = [[0] * groups for _ in range(40)]
    for source in range(0, 40, 5):
        for i in range(2):
            counts[source][(source * 7 + i * 31) % groups] += 1 + i
    case = Case(counts, n=16, capacity=7)
    run(case, workers=3)
    case.check()


ROWS, GROUPS = 3 * CAPACITY, 4
SCALES = {"scale_a": rand(ROWS, 1, seed=3).abs(), "scale_b": rand(GROUPS, 1, N)}
#: First the one whose columns have two halves: of a mutant's slow tests only the first cases run.
EPILOGUES = {
    "swiglu": {"epilogue": Epilogue(bias=rand(GROUPS, 1, 34), activation="swiglu"), "n": 34},
    "gelu": {"epilogue": Epilogue(bias=rand(GROUPS, 1, N), activation="gelu", **SCALES)},
    "half": {"dtype": F16},
    "fp8": {"dtype": torch.float8_e4m3fn, "epilogue": Epilogue(**SCALES)},
}


@crossed("what, arrives", [*EPILOGUES], [True, False])
def test_epilogues(what, arrives):
    case = Case(COUNTS["ragged"], **EPILOGUES[what])
    run(case, incoming="arrived" if arrives else None, arrives=arrives)
    case.check()


def test_scales_of_blocks():
    k, n, counts = 140, 130, ((1, 0, 17, 0), (3, 0, 0, 8), (0, 9, 0, 0))
    b = rand(GROUPS, n, k).to(torch.float8_e4m3fn).mT
    scale_a, scale_b = torch.exp2(rand(ROWS, 2).round()), torch.exp2(rand(GROUPS, 2, 2, seed=1).round())
    case = Case(counts, dtype=torch.float8_e4m3fn, b=b, epilogue=Epilogue(scale_a=scale_a, scale_b=scale_b))
    run(case)
    for source, of_source in enumerate(counts):
        for group in range(len(of_source)):
            run_, depth, column = case.rows(source, group), torch.arange(k) // 128, torch.arange(n) // 128
            a = case.x.a[run_].float() * scale_a[run_][:, depth]
            maths = Maths(a, b[group].float() * scale_b[group][depth[:, None], column], out_dtype=torch.bfloat16)
            check(case.x.out[run_], maths)


class Late(Words):
    """Words that a thread sets, with the counts and rows that they are of; both are garbage before."""

    def bring(self, case, coming, counts, rows):
        for source, group in coming:
            if group < 0:
                case.x.offsets[source] = counts[source]
            else:
                case.x.a[case.rows(source, group)] = rows[case.rows(source, group)]
            self.words[case.word(source, group)] = self.epoch or 1


@pytest.mark.parametrize("seed", range(6))
def test_what_comes_late_and_in_any_order(seed):
    name = ("ragged", "empty", "one source")[seed % 3]
    case = Case(COUNTS[name])
    rows, counts = case.x.a.clone(), case.x.offsets.clone()
    case.x.a.fill_(float("nan"))
    case.x.offsets.fill_(-5)
    coming = [(s, g) for s in range(len(counts)) for g in range(-1, counts.shape[1])]
    random.Random(seed).shuffle(coming)
    words = Late(case.words, epoch=3)
    words.words.fill_(2)  # of the epoch before
    thread = threading.Thread(target=words.bring, args=(case, coming, counts, rows))
    thread.start()
    run(case, incoming=awaited(words, deadline=600.0), workers=3, pivot=seed % len(counts))
    thread.join()
    case.x.a.copy_(rows)
    case.check()


@crossed("missing, workers", [(0, -1), (1, -1), (2, -1), (0, 2), (2, 1), (0, 1)], [1, 4], ids=str)
def test_what_never_comes_is_nan_and_named(missing, workers):
    case = Case(COUNTS["ragged"])
    source, group = missing
    if group < 0:
        case.x.offsets[source] = 999  # never read
    words = Words(case.words, 3).arrive(case.word(*missing))
    run(case, incoming=awaited(words), workers=workers)
    if group >= 0 and not COUNTS["ragged"][source][group]:
        case.check()  # no tile waits for a group without rows
        return
    error = expired("did not arrive within the deadline")
    assert error.chunk == case.word(*missing)
    case.x.offsets.copy_(torch.tensor(case.counts))
    late = case.x.out.isnan()
    place = slice(source * CAPACITY, (source + 1) * CAPACITY)
    assert late[place if group < 0 else case.rows(*missing)].all()
    assert not late[~case.used & ~in_range(late.shape[0], place if group < 0 else slice(0))].any()
    for s, counts in enumerate(case.counts):  # a worker may have given up beside others, whose tiles are right
        for g in range(len(counts)):
            out, maths = case.maths(s, g)
            if (s, g) != missing and s != (source if group < 0 else -1):
                there = ~out.isnan()
                torch.testing.assert_close(out[there], (maths.a @ maths.b)[there])


def in_range(count: int, run: slice) -> torch.Tensor:
    found = torch.zeros(count, dtype=torch.bool)
    found[run] = True
    return found


def test_one_worker_computes_all_that_is_there_before_it_gives_up():
    case = Case(COUNTS["ragged"])
    words = Words(case.words, 3).arrive(case.word(1, 0))
    run(case, incoming=awaited(words), workers=1)
    expired()
    case.check((1, 0))


def test_a_producer_that_fails():
    for missing in ((1, -1), (0, 2)):
        case = Case(COUNTS["ragged"])
        words = Words(case.words, 3).arrive()
        words.words[case.word(*missing)] = -3
        run(case, incoming=awaited(words, deadline=600.0), workers=2)
        report = channel(CPU)
        with pytest.raises(ProducerStopped):
            report.check()
        case.x.offsets.copy_(torch.tensor(case.counts))
        source, group = missing
        place = slice(source * CAPACITY, (source + 1) * CAPACITY)
        assert case.x.out[place if group < 0 else case.rows(*missing)].isnan().all()


@pytest.mark.parametrize("counts", [(-1, 2, 3, 0), (46, 0, 0, 0), (2**31 - 1, 2**31 - 1, 5, 7)], ids=str)
@pytest.mark.parametrize("arrives", [False, True])
def test_counts_that_are_none_make_a_place_nan_and_touch_nothing_else(counts, arrives):
    case = Case(COUNTS["ragged"])
    store = torch.full((case.x.out.numel() + 64,), 7.0)
    case.x = case.x._replace(out=store[32:-32].view(case.x.out.shape))
    case.x.offsets[1] = torch.tensor(counts, dtype=torch.int32)
    run(case, incoming="arrived" if arrives else None, arrives=arrives)
    case.check((1, -1))
    assert (store[:32] == 7).all()
    assert (store[-32:] == 7).all()


@pytest.mark.parametrize("arrives", [False, True])
def test_launches_on_one_workspace_and_by_a_graph(monkeypatch, arrives):
    case = Case(COUNTS["ragged"], n=16)
    plan = case.plan(arrives=arrives)
    launch = launch_of(plan, case.x)

    def again(words):
        for _ in range(2):
            case.x.out.fill_(7.0)
            launch(case.x, None if words is None else awaited(words.arrive()))
            case.check()

    space = DeviceWorkspace(CPU)
    monkeypatch.setattr("tilestream.launch.launch.device_workspace", lambda *_: space)
    again(Words(case.words, 3) if arrives else None)
    own = captured(monkeypatch, plan)
    words = Words(case.words, 0) if arrives else None
    again(words)
    assert not own.counters.any(), "the last worker out restores the counters"
    if words is not None:
        assert not words.words.any(), "and zeroes the signals that it has seen"
        launch(case.x, awaited(words.arrive(case.word(1, 2))))  # a group without rows: its signal may come later
        expired("did not arrive")
        assert words.quarantine.any()
        assert not own.counters.any()
        launch(case.x, awaited(words.arrive()))
        assert case.x.out[case.used].isnan().all()
        with pytest.raises(TilestreamError, match=r"call arrival\.reset"):
            channel(CPU).check()
        words.quarantine.zero_()
        again(words)


def test_a_failed_launch_leaves_the_next_alone():
    case = Case(COUNTS["ragged"], n=16)
    launch = launch_of(case.plan(workers=3), case.x)
    for missing in ((0, -1), (1, 1)):
        launch(case.x, awaited(Words(case.words, 3).arrive(case.word(*missing))))
        expired()
        case.x.out.fill_(7.0)
        launch(case.x, awaited(Words(case.words, 4).arrive()))
        case.check()


@crossed("name, workers", [*COUNTS], [1, 5])
def test_sources_are_signalled_when_their_rows_are_complete(name, workers):
    case = Case(COUNTS[name], n=18)
    sources = len(case.counts)
    signals, counts = torch.zeros(sources, dtype=torch.int32), torch.zeros(sources, dtype=torch.int32)
    for epoch in (5, 6):
        words = PublishArguments(signals, counts, epoch)
        case.x = case.x._replace(epilogue=Epilogue(publish=words))
        run(case, incoming=None, arrives=False, workers=workers)
        case.check()
        assert signals.tolist() == [epoch] * sources
        assert not counts.any(), "counts are restored"


def test_plans_say_what_they_are_of():
    case = Case(COUNTS["ragged"])
    text = case.plan(pivot=2).explain()
    for part in (
        "grouped_mm [3 x 45, 24] @ [4, 24, 33] by source", "counts are read on the device",
        "a queue for each group of a source", "rows by source, from source 2 on", "if they bring 45 rows in all",
    ):  # fmt: skip
        assert part in text
