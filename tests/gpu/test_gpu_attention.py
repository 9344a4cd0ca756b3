"""`tilestream.attention` on a GPU: the grid of FlashAttention's and FlashInfer's own tests, on each backend.

``-k quick`` is a case of each kind. Calls that wait for chunks have deadlines.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterable

import pytest
import torch
from gpu_cases import BF16, E4M3, F16, F32
from gpu_runs import ON_HOPPER, captured, expired, nan, poison, poison_around, settle
from torch.nn import functional as F  # noqa: N812

import tilestream as ts
from attention_maths import FEATURES, MIXES, Case, call_of
from tilestream.core.device import DeviceProperties
from tilestream.core.schedule import Schedule
from tilestream.launch.cache import launch_cache
from tilestream.ops import attention_gpu
from tilestream.plan.attention_planner import plan_attention
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.trace import LaunchTrace, faults, record


def _known(backend: str) -> bool:
    device = DeviceProperties("an H100", "portable", 132, 5e11, 3.3e12, "a stub", "sm_90", 232448)
    try:
        plan_attention(AttentionProblem(1, 1, 1, 128, 128, 128), device=device, backend=backend)
    except (NotImplementedError, ValueError):
        return False
    return True


BACKENDS = [backend for backend in ("portable", "hopper") if _known(backend)]
if torch.version.hip is not None:
    BACKENDS = ["portable", "cdna"]
#: (rows, keys): at and around the edges of tiles and blocks, equal and not, longer and shorter.
LENGTHS = (
    (1, 1), (1, 239), (3, 799), (37, 64), (64, 37), (64, 128), (113, 203), (127, 512), (128, 128), (128, 217),
    (203, 113), (239, 1), (256, 512), (512, 256), (577, 577), (799, 3), (1023, 1024), (1024, 1023), (2048, 2048),
    (108, 4224), (4224, 108),
)  # fmt: skip
SHORT = tuple(lengths for lengths in LENGTHS if max(lengths) <= 600)
HEADS = ((6, 1), (6, 2), (6, 6), (32, 4))
DIMS = ((64, 64), (128, 128))
OTHER_DIMS = ((8, 8), (16, 16), (40, 40), (72, 64), (96, 96), (192, 128), (256, 256), (128, 64))


def _dense(lengths: tuple[int, int], dims: tuple[int, int] = (64, 64), features: str = "causal", **more) -> Case:
    """Two sequences of (rows, keys) each."""
    rows, keys = lengths
    return Case((rows,), (keys, keys), **{"heads": (6, 2), "dtype": BF16, "dims": dims, "features": features, **more})


def _either(
    how: str, queries: tuple[int, ...], keys: tuple[int, ...], dims: tuple[int, int] = (64, 64),
    features: str = "causal", dtype: torch.dtype = BF16,
) -> Case:  # fmt: skip
    """Sequences of such lengths; where ``how`` is ``dense``, two of 300 rows and 500 keys."""
    if how == "dense":
        return _dense((300, 500), dims, features, dtype=dtype)
    return Case(queries, keys, (6, 2), dims, features, how, dtype=dtype)


def _grid(*axes: Iterable, **more) -> list[Case]:
    """The product of lengths, dims and features."""
    return [_dense(*point, **more) for point in itertools.product(*axes)]


def _cases() -> dict[str, list[Case]]:
    packed = ("packed", "packed paged")
    return {
        "dense": [
            _dense(lengths, dims, features, heads=heads)
            for lengths, heads, dims, features in itertools.product(LENGTHS, HEADS[:3], DIMS, ("full", "causal"))
        ],
        "features": [
            _dense(*point, dtype=dtype) for *point, dtype in itertools.product(SHORT, DIMS, FEATURES, (F16, BF16))
        ],
        "columns": _grid(SHORT[::2], OTHER_DIMS, ("causal", "all"), heads=(4, 2)),
        "many heads": _grid(LENGTHS, ((128, 128),), ("causal",), heads=(32, 4), dtype=F16),
        "float32": _grid(SHORT[::2], DIMS, ("causal", "all"), heads=(4, 2), dtype=F32),
        "float8": _grid(LENGTHS, (*DIMS, (96, 96)), ("full", "causal"), dtype=E4M3),
        "float8 features": _grid(SHORT[::3], DIMS, FEATURES, heads=(6, 3), dtype=E4M3, signed=True),
        "float8 columns": [
            _dense(lengths, dims, heads=heads, dtype=E4M3)
            for lengths, (heads, dims) in itertools.product(
                SHORT[::4], (((6, 1), (64, 128)), ((4, 2), (128, 64)), ((6, 6), (80, 48)), ((32, 4), (32, 16)))
            )
        ],
        "float8 lists": [
            Case(*mix, heads=(6, 2), dims=dims, features=features, how=how, page=page, extra=3, dtype=E4M3)
            for mix, dims, features, (how, page) in itertools.product(
                MIXES, DIMS, ("causal", "all"), (("packed", 0), ("packed paged", 8), ("packed paged", 64))
            )
        ],
        "float8 pages": [
            Case((rows,), (300, 77), (8, 2), dims, "causal", how, page, dtype=E4M3)
            for rows, dims, (how, page) in itertools.product(
                (1, 64, 200), DIMS, (("paged", 16), ("paged", 256), ("lengths", 16))
            )
        ],
        "lists": [
            Case(*mix, heads=heads, dims=dims, features=features, how=how, page=page, extra=extra, dtype=BF16)
            for mix, heads, dims, features, (how, page), extra in itertools.product(
                MIXES, ((6, 2), (8, 1)), DIMS, FEATURES, itertools.product(packed, (16, 64)), (0, 3)
            )
            if not (how == "packed" and page == 64)
        ],
        "pages": [
            Case(queries, (300, 77), (4, 2), (128, 128), features, how, page, dtype=BF16)
            for page, features, (how, queries) in itertools.product(
                (1, 2, 4, 8, 16, 32, 64, 128, 256),
                ("full", "causal", "window"),
                (("packed paged", (200, 1)), ("paged", (64,))),
            )
        ],
        "lengths": [
            Case((rows,), keys, (4, 2), (64, 64), features, "lengths", dtype=BF16)
            for rows, keys, features in itertools.product((1, 64, 130), ((0, 300), (77, 1), (128, 256)), FEATURES)
        ],
    }


CASES = _cases()
assert sum(map(len, CASES.values())) >= 1500


def _name(case: Case) -> str:
    lengths = f"{'+'.join(map(str, case.queries))}x{'+'.join(map(str, case.keys))}"
    more = f" page {case.page}" if "paged" in case.how else ""
    dtype = str(case.dtype).removeprefix("torch.")
    signs = " signed" if case.signed else ""
    return f"{lengths} h{case.heads} d{case.dims} {case.features} {case.how}{more} +{case.extra} {dtype}{signs}"


#: The portable kernel runs every fourth case where Hopper's runs all: most of its time is compilation.
PORTABLE_STEP = 4 if ON_HOPPER else 1


def _each():
    for backend, (kind, cases) in itertools.product(BACKENDS, CASES.items()):
        for i, case in enumerate(cases):
            quick = " quick" if i in (len(cases) // 2, len(cases) - 1) else ""
            if quick or backend != "portable" or i % PORTABLE_STEP == 0:
                yield pytest.param(backend, case, id=f"{backend} {kind}: {_name(case)}{quick}")


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    """Plans are this backend's; a problem that it does not do is skipped, with the reason."""

    def plan(*args, **how):
        try:
            return plan_attention(*args, **how, backend=request.param)
        except NotImplementedError as error:
            pytest.skip(str(error))

    launch_cache.clear()
    monkeypatch.setattr(attention_gpu, "plan_attention", plan)
    yield request.param
    launch_cache.clear()


def poisoned(call) -> tuple[torch.Tensor, torch.Tensor]:
    """The answer of a call whose output was NaN before."""
    q, v = call.tensors["q"], call.tensors["v"]
    out = nan(*q.shape[:-1], v.shape[-1], dtype=BF16 if q.dtype == E4M3 else q.dtype)
    answer, lse = ts.attention(**call.tensors, **call.options, out=out, return_lse=True)
    assert answer is out
    return answer, lse


@pytest.mark.parametrize(("backend", "case"), list(_each()), indirect=["backend"])
def test_numbers(case, backend):
    call = call_of(case, "cuda")
    out, lse = poisoned(call)
    ts.check()
    call.check(out, lse)


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("how", ["packed", "dense"])
def test_quick_the_same_bits_each_time(how, dtype, backend):
    call = call_of(_either(how, (300, 70), (500, 300), (128, 128), "all", dtype=dtype), "cuda")
    first = ts.attention(**call.tensors, **call.options, return_lse=True)
    for _ in range(100):
        again = ts.attention(**call.tensors, **call.options, return_lse=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("workers", [1, 3, 17, 131, 132, 264])
@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_quick_every_number_of_workers(schedule, workers, backend):
    for how in ("dense", "packed"):
        case = _either(how, *MIXES[1])
        call = call_of(case, "cuda")
        call.check(*ts.attention(**call.tensors, causal=True, return_lse=True, schedule=schedule, workers=workers))


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "spread", "unaligned"])
def test_quick_layouts(layout, backend):
    call = call_of(_dense((130, 200), heads=(4, 2)), "cuda")
    tensors = dict(call.tensors)
    if layout == "bhsd":
        tensors = {name: x.transpose(1, 2).contiguous() for name, x in tensors.items()}
        out, lse = ts.attention(**tensors, causal=True, layout="bhsd", return_lse=True)
        call.check(out.transpose(1, 2), lse)
        return
    if layout in ("spread", "unaligned"):
        more = 16 if layout == "spread" else 5
        tensors = {name: poison_around(x, (0, 0, 0, more), (0, 0, 0, 0)) for name, x in tensors.items()}
    call.check(*ts.attention(**tensors, causal=True, return_lse=True))


@pytest.mark.parametrize("more", [1, 3, 8])
def test_quick_layouts_of_the_output(more, backend):
    call = call_of(_dense((130, 200), heads=(4, 2)), "cuda")
    store = nan(2, 130, 4, 64 + more)
    out = store[..., :64]
    ts.attention(**call.tensors, causal=True, out=out)
    call.check(out, None)
    assert store[..., 64:].isnan().all(), "wrote beside the output"


@pytest.mark.parametrize("how", ["dense", "packed", "packed paged"])
def test_quick_graphs(how, backend):
    check_replays(_either(how, *MIXES[1]))


def check_replays(case: Case, **how) -> None:
    """A graph replayed between eager calls, which have counters and scratch of their own, on other numbers."""
    call = call_of(case, "cuda")
    how = {**call.options, **how, "return_lse": True}
    ts.attention(**call.tensors, **how)
    with captured() as graph:
        out, lse = ts.attention(**call.tensors, **how)
    for seed in (0, 1, 0):
        now = call_of(case, "cuda", seed)
        for name, x in now.tensors.items():
            call.tensors[name].copy_(x)
        poison(out)
        graph.replay()
        ts.attention(**now.tensors, **how)
        now.check(out, lse)


def test_quick_compiled_whole(backend):
    call = call_of(_dense((130, 200), heads=(4, 2)), "cuda")
    compiled = torch.compile(functools.partial(ts.attention, causal=True, return_lse=True), fullgraph=True)
    call.check(*compiled(**call.tensors))


def test_quick_gradients():
    q, k, v = (torch.randn(2, 130, 4, 64, device="cuda", requires_grad=True) for _ in range(3))
    ts.attention(q, k, v, causal=True).square().sum().backward()
    mine = [x.grad.clone() for x in (q, k, v)]
    wide = [x.detach().double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    F.scaled_dot_product_attention(*wide, is_causal=True).square().sum().backward()
    for x, y in zip(mine, wide, strict=True):
        torch.testing.assert_close(x.double(), y.grad.transpose(1, 2), rtol=1e-3, atol=1e-3)


# Few queries over many keys -------------------------------------------------------------------------------------------

FEW = {
    "decode": _dense((1, 4224), (128, 128), heads=(32, 4)),
    "a few rows": _dense((5, 2048), features="all", dtype=F16),
    "columns": _dense((3, 1024), (40, 72), "sinks", heads=(4, 2)),
    "wide": _dense((16, 1024), (256, 256), "full", heads=(4, 1)),
    "nothing seen": _dense((9, 300), features="window", heads=(4, 2)),
    "lengths": Case((2,), (3000, 1, 0, 700), (8, 2), (128, 128), "causal", "lengths", dtype=BF16),
    "pages": Case((1,), (1500, 77, 900), (16, 2), (128, 128), "sinks", "paged", 16, dtype=BF16),
    "packed": Case((1, 3, 0, 17), (900, 40, 7, 2048), (8, 2), (64, 64), "causal", "packed", extra=3, dtype=BF16),
    "packed pages": Case((1, 1, 2), (900, 4000, 17), (32, 4), (128, 128), "all", "packed paged", 64, dtype=BF16),
    "8 bits": _dense((5, 2048), (128, 128), "sinks", dtype=E4M3, signed=True),
}


@pytest.mark.parametrize("splits", [None, 1, 2, 7, 40, 128])
@pytest.mark.parametrize("name", FEW)
def test_quick_keys_in_shares(name, splits, backend):
    call = call_of(FEW[name], "cuda")
    how = {**call.tensors, **call.options, "splits": splits, "return_lse": True}
    for _ in range(2):  # the second is a call like an earlier one
        out, lse = ts.attention(**how)
        call.check(out, lse)
    for _ in range(20):
        again, lse_again = ts.attention(**how)
        assert torch.equal(again, out)
        assert torch.equal(lse_again, lse)


def test_quick_shares_in_a_graph(backend):
    check_replays(FEW["decode"], splits=16)


# Keys that arrive -----------------------------------------------------------------------------------------------------

#: A deadline in seconds for chunks that come: other processes may have the GPU most of the time.
PATIENCE = 120.0


def arriving(call, arrival: ts.Arrival, **how):
    return ts.attention(**call.tensors, **call.options, arrival=arrival, return_lse=True, **how)


CHUNKINGS = {
    "uniform": lambda rows: ts.Arrival.uniform(100, -(-rows // 100), device="cuda"),
    "ragged": lambda rows: ts.Arrival.ragged([0, 7, 7, 300, rows], device="cuda"),
    "small": lambda rows: ts.Arrival.uniform(8, -(-rows // 8), device="cuda"),
}


@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("how", ["dense", "packed"])
@pytest.mark.parametrize("features", ["full", "causal", "window"])
@pytest.mark.parametrize("splits", [None, 1], ids=["split", "whole"])
def test_quick_keys_that_arrive_while_the_kernel_runs(splits, features, how, chunking, backend):
    call = call_of(_either(how, (300, 70), (500, 300), features=features), "cuda")
    k, v = call.tensors["k"], call.tensors["v"]
    flat = [x.reshape(-1, *x.shape[-2:]) for x in (k, v)]
    source = [x.cpu().pin_memory() for x in flat]  # by a copy engine: no SM may be free
    arrival = CHUNKINGS[chunking](flat[0].shape[0])
    chunks = arrival.chunks(flat[0].shape[0])
    side = torch.cuda.Stream()
    for epoch in range(3):
        if epoch:
            arrival.advance()
        for x in flat:
            poison(x)
        torch.cuda.synchronize()
        out, lse = arriving(call, arrival, deadline=PATIENCE, splits=splits)
        with torch.cuda.stream(side):
            for chunk in range(chunks.count):
                begin, end = chunks.range_of(chunk)
                for x, y in zip(flat, source, strict=True):
                    x[begin:end].copy_(y[begin:end], non_blocking=True)
                arrival.signal(chunk)
        settle()
        call.check(out, lse)


@pytest.mark.parametrize("splits", [None, 1], ids=["split", "whole"])
@pytest.mark.parametrize("missing", [0, 4, 9])
def test_quick_a_chunk_that_does_not_come(missing, splits, backend):
    """What was not computed is NaN, the rest is right; and the call after is."""
    call = call_of(_dense((300, 500), features="full"), "cuda")
    arrival = ts.Arrival.uniform(100, 10, device="cuda")
    for chunk in range(10):
        if chunk != missing:
            arrival.signal(chunk)
    out, lse = arriving(call, arrival, deadline=0.2, splits=splits)
    expired(f"attention: arrival's chunk {missing} did not arrive")
    sequence = missing // 5
    assert out[sequence].isnan().all(), "each tile of that sequence reads the chunk"
    assert lse[sequence].isnan().all()
    void = out.isnan()
    whole, _ = ts.attention(**call.tensors, **call.options, return_lse=True)
    assert torch.equal(void.all(-1), void.any(-1))
    torch.testing.assert_close(out[~void], whole[~void], rtol=2e-2, atol=2e-2)
    arrival = ts.Arrival.uniform(100, 10, device="cuda")
    for chunk in range(10):
        arrival.signal(chunk)
    call.check(*arriving(call, arrival, deadline=PATIENCE))
    ts.check()


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)])
def test_quick_one_chunk_at_a_time_is_seen(dims, backend):
    """A tile that reads many chunks waits for each of them: those not there yet are NaN."""
    call = call_of(_dense((128, 1024), dims, "full", heads=(4, 4)), "cuda")
    k, v = (call.tensors[name].reshape(2048, *call.tensors[name].shape[-2:]) for name in "kv")
    source = [x.cpu().pin_memory() for x in (k, v)]
    arrival = ts.Arrival.uniform(64, 32, device="cuda")
    for x in (k, v):
        poison(x)
    torch.cuda.synchronize()
    out, lse = arriving(call, arrival, deadline=PATIENCE)
    side = torch.cuda.Stream()
    for chunk in torch.randperm(32, generator=torch.Generator().manual_seed(0)).tolist():
        with torch.cuda.stream(side):
            rows = slice(64 * chunk, 64 * chunk + 64)
            for x, y in zip((k, v), source, strict=True):
                x[rows].copy_(y[rows], non_blocking=True)
            arrival.signal(chunk)
        side.synchronize()
    settle()
    call.check(out, lse)


# Traces ---------------------------------------------------------------------------------------------------------------


def recorded(call, **how) -> tuple[LaunchTrace, Schedule, torch.Tensor, torch.Tensor]:
    """The trace of a call, the schedule of its plan, and its answer."""
    launch_cache.clear()
    ts.attention(**call.tensors, **call.options, return_lse=True, **how)  # compiled, and not traced
    with record() as recorder:
        out, lse = ts.attention(**call.tensors, **call.options, return_lse=True, **how)
    (trace,), (launch,) = recorder.launches, launch_cache.of("attention")
    assert trace.workers == launch.plan.workers
    return trace, launch.plan.schedule, out, lse


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
def test_quick_a_trace_has_each_item_once(dims, schedule, backend):
    call = call_of(_dense((1500, 1500), dims), "cuda")
    trace, plan, out, lse = recorded(call, schedule=schedule)
    call.check(out, lse)
    assert not faults(trace, plan)
    units = torch.cuda.get_device_properties(0).multi_processor_count
    for own in trace.by_worker:
        assert len({span.unit for span in own}) <= 1, "a worker stays where it is"
        assert all(0 <= span.unit < units for span in own)
        assert all(trace.begin <= span.begin <= span.end <= trace.end for span in own)
    assert 0 < trace.end - trace.begin < 0.1


@pytest.mark.parametrize("rows", [1500, 16384])
def test_quick_no_bit_depends_on_a_trace_or_on_the_calls_before(rows, backend):
    """Consecutive calls: the tickets and buffers that one leaves to the next do not change the numbers."""
    call = call_of(_dense((rows, rows), (128, 128), heads=(4, 2)), "cuda")
    first = ts.attention(**call.tensors, **call.options)
    for _ in range(5):
        assert torch.equal(ts.attention(**call.tensors, **call.options), first)
    with record():
        ts.attention(**call.tensors, **call.options)  # compiled
    with record():
        outs = [ts.attention(**call.tensors, **call.options) for _ in range(5)]
    assert [int((out != first).sum()) for out in outs] == [0] * 5


def test_quick_a_trace_of_packed_sequences_has_the_items_that_there_are(backend):
    call = call_of(_either("packed", (300, 0, 1, 700), (400, 30, 500, 700)), "cuda")
    trace, _, out, lse = recorded(call)
    call.check(out, lse)
    done = [(span.pm, span.pn) for span in trace.spans]
    assert len(done) == len(set(done)) >= 3 * 6
    assert {at for at, _ in done} == set(range(len(done))), "the list's positions, without a gap"


def test_quick_a_trace_of_shares(backend):
    call = call_of(FEW["decode"], "cuda")
    trace, plan, out, lse = recorded(call, splits=16)
    call.check(out, lse)
    assert not faults(trace, plan)


def test_quick_a_trace_says_who_waited_for_which_chunk(backend):
    call = call_of(_dense((300, 500), features="full"), "cuda")
    arrival = ts.Arrival.uniform(100, 10, device="cuda")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with record() as recorder:
        out, lse = arriving(call, arrival, deadline=PATIENCE)
        time.sleep(0.02)  # the kernel waits so long for its first chunk
        for chunk in range(10):
            with torch.cuda.stream(side):
                arrival.signal(chunk)
    ts.check()
    call.check(out, lse)
    (trace,) = recorder.launches
    (launch,) = launch_cache.of("attention")
    assert not faults(trace, launch.plan.schedule)
    assert trace.arrivals == {0: (None,) * 10}
    assert {span.chunk for span in trace.spans} <= set(range(10))
    waits = [span for span in trace.spans if span.kind == "wait"]
    assert sum(span.end - span.begin for span in waits) > 1e-4
    chunks = {span.chunk for span in trace.spans}
    assert min(chunks) < 5 <= max(chunks), "of either sequence's first keys"


def test_quick_what_is_captured_is_not_recorded(backend, caplog):
    call = call_of(_dense((130, 200), heads=(4, 2)), "cuda")
    ts.attention(**call.tensors, causal=True)
    with record() as recorder, captured():
        ts.attention(**call.tensors, causal=True)
    assert not recorder.launches
    assert "attention: a launch that is captured into a graph is not recorded" in caplog.text
