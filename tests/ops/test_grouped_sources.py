"""Grouped matmuls by source on the CPU: counts and rows that come late, in any order, twice, or never."""

from __future__ import annotations

import copy
import pickle
import random
import re
import threading

import pytest
import torch
from torch.autograd import forward_ad

import tilestream as ts
from error_rule import Maths, check, rand
from tilestream.arrival.flat import FlatArrival
from tilestream.core.errors import ArrivalTimeout, ProducerStopped

LONG = 300.0
SOURCES, GROUPS, CAPACITY, K, N = 4, 3, 12, 8, 6
COUNTS = ((3, 0, 5), (0, 0, 0), (1, 4, 1), (0, 12, 0))
NAN = float("nan")


def rows(source: int, group: int) -> slice:
    begin = source * CAPACITY + sum(COUNTS[source][:group])
    return slice(begin, begin + COUNTS[source][group])


def used() -> torch.Tensor:
    """Which rows there are."""
    return torch.cat([torch.arange(CAPACITY) < sum(counts) for counts in COUNTS])


class Producer:
    """Writes counts and rows, which are garbage before, and signals each."""

    def __init__(self, *, pivot: int = 0, signals: torch.Tensor | None = None, dtype=torch.float32):
        self.source = rand(SOURCES * CAPACITY, K).to(dtype)
        self.a = torch.full((SOURCES * CAPACITY, K), NAN).to(dtype)
        self.counts = torch.full((SOURCES, GROUPS), -7, dtype=torch.int32)
        self.arrival = ts.SourceArrival(self.counts, CAPACITY, pivot=pivot, signals=signals)

    def bring(self, source: int, group: int = -1, **more) -> None:
        if group < 0:
            self.counts[source] = torch.tensor(COUNTS[source], dtype=torch.int32)
            self.arrival.signal_counts(source, **more)
        else:
            self.a[rows(source, group)] = self.source[rows(source, group)]
            self.arrival.signal_rows(source, group, **more)

    def everything(self, *but) -> Producer:
        for source in range(SOURCES):
            for group in range(-1, GROUPS):
                if (source, group) not in but:
                    self.bring(source, group)
        return self

    def check(self, out: torch.Tensor, b: torch.Tensor, **more) -> None:
        check_all(self.source, out, b, **more)


def check_all(a, out, b, *, bias=None, scale_a=None, scale_b=None, **more) -> None:
    for source in range(SOURCES):
        for group in range(GROUPS):
            run = rows(source, group)
            check(out[run], Maths(
                a[run], b[group], None if bias is None else bias[group],
                scale_a=None if scale_a is None else scale_a[run, None],
                scale_b=None if scale_b is None else scale_b[group, None], **more,
            ))  # fmt: skip


def weights(n: int = N) -> torch.Tensor:
    return rand(GROUPS, K, n)


@pytest.mark.parametrize("seed", range(6))
def test_what_comes_in_any_order(seed):
    p, b, out = Producer(pivot=seed % SOURCES), weights(), torch.full((SOURCES * CAPACITY, N), 7.0)
    coming = [(s, g) for s in range(SOURCES) for g in range(-1, GROUPS)]
    random.Random(seed).shuffle(coming)

    def produce():
        for source, group in coming:
            p.bring(source, group)
            if (source + group) % 2:  # twice
                p.bring(source, group)

    thread = threading.Thread(target=produce)
    thread.start()
    assert ts.grouped_mm(p.a, b, arrival=p.arrival, deadline=LONG, out=out) is out
    thread.join()
    p.check(out, b)
    assert (out[~used()] == 7).all(), "rows behind a source's last one are not written"


def test_epochs_of_the_same_buffers():
    p, b = Producer(), weights()
    for epoch in range(1, 4):
        p.everything()
        p.check(ts.grouped_mm(p.a, b, arrival=p.arrival), b)
        assert p.arrival.advance() == epoch + 1
        p.bring(0, epoch=epoch)  # late
        assert not p.arrival.arrived(0)
        p.source = rand(SOURCES * CAPACITY, K, seed=epoch)
        p.a.fill_(NAN)


def test_a_group_is_computed_before_others_come():
    p, b, out = Producer(pivot=1), weights(), torch.full((SOURCES * CAPACITY, N), NAN)
    thread = threading.Thread(target=lambda: ts.grouped_mm(p.a, b, arrival=p.arrival, deadline=LONG, out=out))
    thread.start()
    for source, group in ((2, 1), (0, 2), (2, 2), (0, 0), (3, 1), (2, 0)):
        p.bring(source, group)
        if not p.arrival.arrived(source):
            p.bring(source)
        while out[rows(source, group)].isnan().any():  # the pool's time limit bounds it
            thread.join(0.001)
    p.bring(1)
    thread.join()
    p.check(out, b)


@pytest.mark.parametrize("missing", [(3, -1), (0, -1), (0, 2), (2, 1), (1, -1)], ids=str)
def test_what_does_not_come_is_nan_and_named(missing):
    p, b, out = Producer().everything(missing), weights(), torch.full((SOURCES * CAPACITY, N), 7.0)
    with pytest.raises(ArrivalTimeout) as caught:
        ts.grouped_mm(p.a, b, arrival=p.arrival, deadline=0.01, out=out)
    source, group = missing
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.source, error.group) == (source, None if group < 0 else group)
    what = f"source {source}" + ("" if group < 0 else f", group {group}")
    assert f"{'counts of ' * (group < 0)}{what} did not arrive within the deadline of 0.01 s" in str(error)
    assert error.item == what
    place = slice(source * CAPACITY, (source + 1) * CAPACITY)
    lost = place if group < 0 else rows(source, group)
    assert out[lost].isnan().all()
    rest = torch.ones(SOURCES * CAPACITY, dtype=torch.bool)
    rest[lost] = False
    assert not out[rest].isnan().any()
    others = out.clone()
    others[lost] = ts.grouped_mm(p.source, b, counts=torch.tensor(COUNTS, dtype=torch.int32))[lost]
    check_all(p.source, others, b)


def test_groups_without_rows_need_no_signal():
    p, b = Producer().everything((0, 1), (1, 0), (1, 1), (1, 2), (3, 0), (3, 2)), weights()
    p.check(ts.grouped_mm(p.a, b, arrival=p.arrival, deadline=LONG), b)


def test_a_producer_that_fails():
    p, b = Producer().everything((2, -1)), weights()
    p.arrival.fail(ProducerStopped("rank 2 is lost"))
    out = torch.zeros(SOURCES * CAPACITY, N)
    with pytest.raises(ProducerStopped, match="rank 2 is lost"):
        ts.grouped_mm(p.a, b, arrival=p.arrival, deadline=LONG, out=out)
    assert out[2 * CAPACITY : 3 * CAPACITY].isnan().all()
    assert isinstance(p.arrival.error, ProducerStopped)
    p.arrival.advance()
    p.everything()
    p.check(ts.grouped_mm(p.a, b, arrival=p.arrival), b)


def test_own_words_serve_one_call():
    words = torch.zeros(SOURCES, GROUPS + 1, dtype=torch.int32)
    p, b = Producer(signals=words), weights()
    for _ in range(2):
        words.fill_(3)
        p.a.copy_(p.source)
        p.counts.copy_(torch.tensor(COUNTS))
        p.check(ts.grouped_mm(p.a, b, arrival=p.arrival, deadline=LONG), b)
        assert not words.any()
    words.fill_(1)
    words[1, 2] = 0  # without rows, but a signal that came later would be one of the next call
    with pytest.raises(ArrivalTimeout, match="source 1, group 1 did not arrive"):
        ts.grouped_mm(p.a, b, arrival=p.arrival, deadline=0.01)
    assert words.any()
    p.arrival.reset()
    assert not words.any()


@pytest.mark.parametrize("counts", [(-1, 2, 3), (13, 0, 0), (2**31 - 1, 2**31 - 1, 5)], ids=str)
def test_counts_that_are_none(counts):
    p, b, out = Producer().everything(), weights(), torch.zeros(SOURCES * CAPACITY, N)
    p.counts[2] = torch.tensor(counts, dtype=torch.int32)
    text = re.escape(f"counts[2]={list(counts)}; they are not negative, and come to 12 rows at most")
    with pytest.raises(ValueError, match=text):
        ts.grouped_mm(p.a, b, counts=p.counts, out=out)
    assert not out.any(), "nothing is computed"
    with pytest.raises(ValueError, match=text):
        ts.grouped_mm(p.a, b, arrival=p.arrival, out=out)
    assert out[2 * CAPACITY : 3 * CAPACITY].isnan().all()
    assert not out[: 2 * CAPACITY].isnan().any()


OPTIONS = {
    "bias": {"bias": rand(GROUPS, N), "activation": "gelu"},
    "rows": {"scale_a": rand(SOURCES * CAPACITY).abs(), "scale_b": rand(GROUPS, N)},
    "float64": {"dtype": torch.float64},
    "bfloat16": {"dtype": torch.bfloat16, "out_dtype": torch.float32},
    "swiglu": {"bias": rand(GROUPS, N), "activation": "swiglu"},
    "workers": {"workers": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    more = dict(OPTIONS[name])
    dtype = more.pop("dtype", torch.float32)
    p, b = Producer(dtype=dtype).everything(), weights().to(dtype)
    found = ts.grouped_mm(p.a, b, arrival=p.arrival, **more)
    again = ts.grouped_mm(p.source, b, counts=p.counts, **more)
    assert found[used()].equal(again[used()])
    more.pop("workers", None)
    p.check(found, b, **more)


def test_scales_of_blocks():
    k, n = 200, 130
    a = rand(SOURCES * CAPACITY, k).to(torch.float8_e4m3fn)
    b = rand(GROUPS, n, k).to(torch.float8_e4m3fn).mT
    more = {"scale_a": rand(SOURCES * CAPACITY, 2).abs(), "scale_b": rand(GROUPS, 2, 2).abs(), "activation": "silu"}
    found = ts.grouped_mm(a, b, counts=torch.tensor(COUNTS, dtype=torch.int32), bias=(bias := rand(GROUPS, n)), **more)
    for source in range(SOURCES):
        counts = torch.tensor(COUNTS[source])
        place = slice(source * CAPACITY, source * CAPACITY + int(counts.sum()))
        mine = more | {"scale_a": more["scale_a"][place]}
        wanted = ts.grouped_mm(a[place], b, counts.cumsum(0).int(), bias=bias, **mine)
        assert found[place].equal(wanted)


def test_sources_are_published():
    a, b, counts = rand(SOURCES * CAPACITY, K), weights(), torch.tensor(COUNTS, dtype=torch.int32)
    publish = ts.Arrival.uniform(CAPACITY, SOURCES, pivot=2)
    check_all(a, ts.grouped_mm(a, b, counts=counts, publish=publish), b)
    assert all(publish.arrived(source) for source in range(SOURCES))
    times = publish.times
    assert times[1] < times[2] < times[3] < times[0], "one without rows first, then from the pivot on"
    with pytest.raises(ValueError, match="is signalled already"):
        ts.grouped_mm(a, b, counts=counts, publish=publish)
    publish.advance()
    counts[0, 0] = 99
    with pytest.raises(ValueError, match="counts"):
        ts.grouped_mm(a, b, counts=counts, publish=publish)
    assert not any(publish.arrived(source) for source in range(SOURCES))


def test_one_place_with_everything_and_no_rows_at_all():
    b = weights()
    a, counts = rand(20, K), torch.tensor([[0, 20, 0]], dtype=torch.int32)
    check(ts.grouped_mm(a, b, counts=counts), Maths(a, b[1]))
    assert ts.grouped_mm(a[:0], b, counts=torch.zeros(5, 3, dtype=torch.int32)).shape == (0, N)
    out = torch.full((20, N), 3.0)
    ts.grouped_mm(a, b, counts=counts * 0, out=out)
    assert (out == 3).all()


@pytest.mark.parametrize(("with_arrival", "activation"), [(False, "relu"), (True, "relu"), (True, "swiglu")])
def test_compiled(with_arrival, activation):
    p, b = Producer().everything(), weights()
    how = {"arrival": p.arrival} if with_arrival else {"counts": p.counts}
    fn = torch.compile(lambda a, b: ts.grouped_mm(a, b, activation=activation, **how), backend="aot_eager")
    p.check(fn(p.a, b), b, activation=activation)


A, B, C = rand(SOURCES * CAPACITY, K), weights(), torch.tensor(COUNTS, dtype=torch.int32)


def arrival(counts=C, capacity=CAPACITY, **more):
    return ts.SourceArrival(counts, capacity, **more)


REFUSED = [
    ({"arrival": ts.Arrival.uniform(4, 12)}, TypeError, "arrival is an Arrival; it must be a tilestream.SourceArrival"),
    ({"counts": C, "offsets": C[0]}, ValueError, "offsets beside counts"),
    ({"arrival": arrival(), "offsets": C[0]}, ValueError, "offsets beside arrival"),
    ({"arrival": arrival(), "counts": C}, ValueError, "counts beside arrival"),
    ({"arrival": arrival(), "publish": ts.Arrival.uniform(12, 4)}, ValueError, "publish= with arrival="),
    ({"publish": ts.Arrival.uniform(12, 4)}, ValueError, "publish= without counts="),
    ({"counts": C, "publish": ts.Arrival.uniform(24, 2)}, ValueError, r"each source is a chunk: Arrival.uniform\(12"),
    ({"counts": C, "publish": 3}, TypeError, "publish is an int; it must be a tilestream.Arrival"),
    ({"counts": C, "publish": ts.Arrival.uniform(12, 4), "schedule": "static"}, ValueError, "with publish="),
    ({"counts": C, "deadline": 3.0}, ValueError, "deadline=3.0 without arrival="),
    ({"arrival": arrival(), "deadline": -3.0}, ValueError, "deadline=-3.0; it must be a positive"),
    ({"counts": C.long()}, TypeError, "counts is torch.int64; it must be torch.int32"),
    ({"counts": C[0]}, ValueError, r"counts has shape \[3\]; it must be \[sources, groups\]"),
    ({"counts": C.t().contiguous().t()}, ValueError, "counts has stride .*: counts.contiguous"),
    ({"counts": C[:, :2].contiguous()}, ValueError, "counts have 2 groups, b 3"),
    ({"counts": [[1]]}, TypeError, "counts is a list; it must be a torch.Tensor"),
    ({"counts": C.to("meta")}, ValueError, "counts is on meta, the others on cpu"),
    ({"arrival": arrival(capacity=13)}, ValueError, "a has 48 rows; 4 sources have places of 13: 52 rows"),
    ({"counts": torch.zeros(5, 3, dtype=torch.int32)}, ValueError, "a has 48 rows, which are no equal places of 5"),
    ({"counts": C, "a": A[None]}, ValueError, r"they are \[M, K\] and \[G, K, N\]"),
    ({"counts": C, "a": A[:, :5]}, ValueError, "differ in K: 5 and 8"),
    ({"counts": C, "bias": rand(N)}, ValueError, "bias has shape .*; it has one row a group"),
    ({"counts": C, "scale_a": rand(7)}, ValueError, "scale_a has shape"),
    ({"counts": C, "activation": "tanh"}, ValueError, "activation='tanh'"),
    ({"counts": C, "activation": "swiglu", "b": rand(3, K, 5)}, ValueError, "it has an even number"),
    ({"counts": C, "schedule": "stream_k"}, ValueError, "schedule='stream_k' with rows by source"),
    ({"arrival": arrival(), "schedule": "static"}, ValueError, "schedule='static' with rows by source"),
    ({"counts": C, "out": A}, ValueError, "out has shape"),
    ({"counts": C, "a": A.clone().requires_grad_()}, RuntimeError, "requires a gradient; rows by source have no deriv"),
    ({"counts": C, "bias": rand(3, N).requires_grad_()}, RuntimeError, "pack the rows and pass offsets="),
]  # fmt: skip


@pytest.mark.parametrize(("given", "kind", "text"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_refused(given, kind, text):
    given = {"a": A, "b": B} | given
    with pytest.raises(kind, match=text):
        ts.grouped_mm(given.pop("a"), given.pop("b"), given.pop("offsets", None), **given)


def test_other_calls_refuse_it():
    with pytest.raises(TypeError, match=r"arrival is a SourceArrival; it must be a tilestream\.Arrival"):
        ts.matmul(A, B[0], arrival=arrival())
    with pytest.raises(NotImplementedError, match=r"tilestream\.invariant promises"), ts.invariant():
        ts.grouped_mm(A, B, counts=C)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="rows by source have no derivative"):
        ts.grouped_mm(forward_ad.make_dual(A, A), B, counts=C)
    with ts.stream_experts(B, C[0].cumsum(0).int()) as stream, pytest.raises(TypeError, match="b is a Stream, and a's"):
        ts.grouped_mm(A, stream, counts=C)
    out = rand(SOURCES * CAPACITY, K)
    with pytest.raises(ValueError, match="grouped_mm: out: overlaps a in memory"):
        ts.grouped_mm(out, rand(GROUPS, K, K), counts=C, out=out)


@pytest.mark.parametrize(("given", "kind", "text"), [
    ({"capacity": 0}, ValueError, "capacity=0: a source has a place of a positive whole number of rows"),
    ({"capacity": 2**30}, ValueError, "rows are counted in 31 bits"),
    ({"pivot": 4}, ValueError, "pivot=4: workers start from one of the 4 sources, 0 to 3"),
    ({"signals": torch.zeros(4, 3, dtype=torch.int32)}, ValueError, r"shape \(4, 3\); there is one word a chunk"),
    ({"signals": torch.zeros(4, 4)}, TypeError, "signal words are torch.int32 or torch.uint32"),
    ({"counts": torch.zeros(0, 3, dtype=torch.int32)}, ValueError, "none of them 0"),
])  # fmt: skip
def test_arrivals_that_are_none(given, kind, text):
    with pytest.raises(kind, match=text):
        arrival(**given)


def test_an_arrival_says_what_it_is():
    one = arrival(pivot=2)
    assert repr(one) == "SourceArrival(sources=4, groups=3, capacity=12, pivot=2, device=cpu, epoch=1)"
    assert copy.copy(one) is one
    assert FlatArrival.of(one).num_chunks == SOURCES * (GROUPS + 1), "one a signal"
    for name in ("counts", "capacity", "signals"):
        with pytest.raises(AttributeError, match=f"{name} is final"):
            setattr(one, name, None)
    with pytest.raises(TypeError, match="is not pickled"):
        pickle.dumps(one)
    for call in (one.signal_counts, one.signal_rows, one.arrived):
        with pytest.raises(IndexError, match="source=4; there are 4 sources, from 0"):
            call(4)
    with pytest.raises(IndexError, match="group=-1; there are 3 groups"):
        one.signal_rows(0, -1)
    with pytest.raises(ValueError, match="the present epoch is 1"):
        one.signal_counts(0, epoch=2)
