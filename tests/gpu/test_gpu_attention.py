"""`tilestream.attention` on a GPU: the grid of FlashAttention's and FlashInfer's own tests, on each backend.

``-k quick`` is a case of each kind. Calls that wait for chunks have deadlines.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from gpu_cases import BF16, E4M3, F16, F32
from gpu_runs import ON_HOPPER, captured, expired, nan, poison, poison_around, settle
from torch.nn import functional as F  # noqa: N812

import tilestream as ts
from attention_maths import FEATURES, MIXES, Call, Case, call_of, replace
from error_rule import passes
from tilestream.core.schedule import Schedule
from tilestream.launch.cache import launch_cache
from tilestream.ops import attention_gpu
from tilestream.ops.attention_merge import formula, merge_attention_op
from tilestream.plan.attention_planner import plan_attention
from tilestream.runtime.properties import cuda_properties
from tilestream.trace import LaunchTrace, faults, record

pytestmark = pytest.mark.usefixtures("way")

BACKENDS = ["portable", "hopper"] if ON_HOPPER else ["portable"]
if torch.version.hip is not None:
    BACKENDS = ["portable", "cdna"]
#: (rows, keys): at and around the edges of tiles and blocks, equal and not, longer and shorter.
LENGTHS = (
    (1, 1), (1, 239), (3, 799), (37, 64), (64, 37), (64, 128), (113, 203), (127, 512), (128, 128), (128, 217),
    (203, 113), (239, 1), (256, 512), (512, 256), (577, 577), (799, 3), (1023, 1024), (1024, 1023), (2048, 2048),
    (108, 4224), (4224, 108),
)  # fmt: skip
SHORT = tuple(lengths for lengths in LENGTHS if max(lengths) <= 600)
HEADS = ((6, 1), (6, 2), (6, 6))
DIMS = ((64, 64), (128, 128))
OTHER_DIMS = ((8, 8), (16, 16), (40, 40), (72, 64), (96, 96), (192, 128), (256, 256), (128, 64))


def _dense(lengths: tuple[int, int], dims: tuple[int, int] = (64, 64), features: str = "causal", **more: Any) -> Case:
    """Two sequences of (rows, keys) each."""
    rows, keys = lengths
    return Case((rows,), (keys, keys), dims=dims, features=features, **{"heads": (6, 2), "dtype": BF16, **more})


def _lists(
    how: str, queries: tuple[int, ...], keys: tuple[int, ...], dims: tuple[int, int] = (64, 64),
    features: str = "causal", **more: Any,
) -> Case:  # fmt: skip
    """Sequences of such lengths; where ``how`` is ``dense``, two of 300 rows and 500 keys."""
    if how == "dense":
        return _dense((300, 500), dims, features, **more)
    return Case(
        queries, keys, **{"heads": (6, 2), "dtype": BF16, "dims": dims, "features": features, "how": how, **more}
    )


def _grid(*axes: Iterable[Any], **more: Any) -> list[Case]:
    """The product of lengths, dims and features."""
    return [_dense(*point, **more) for point in itertools.product(*axes)]


def _cases() -> dict[str, list[Case]]:
    """Dims, features, dtypes and page sizes, which are compiled in, in all combinations; the rest in some."""
    packed = ("packed", "packed paged")
    return {
        "dense": [case for heads in HEADS for case in _grid(LENGTHS, DIMS, ("full", "causal"), heads=heads)],
        "features": [
            *_grid(SHORT[::2], DIMS, FEATURES, dtype=F16),
            *_grid(SHORT[1::2], DIMS, FEATURES),
        ],
        "columns": _grid(SHORT[::2], OTHER_DIMS, ("causal", "all"), heads=(4, 2)),
        "many heads": _grid(LENGTHS, ((128, 128),), ("causal",), heads=(32, 4), dtype=F16),
        "float32": _grid(SHORT[::2], DIMS, ("causal", "all"), heads=(4, 2), dtype=F32),
        "float8": _grid(LENGTHS, (*DIMS, (96, 96)), ("full", "causal"), dtype=E4M3),
        "float8 features": _grid(SHORT[::3], DIMS, FEATURES, heads=(6, 3), dtype=E4M3, signed=True),
        "float8 columns": [
            case
            for heads, dims in (((6, 1), (64, 128)), ((4, 2), (128, 64)), ((6, 6), (80, 48)), ((32, 4), (32, 16)))
            for case in _grid(SHORT[::4], (dims,), heads=heads, dtype=E4M3)
        ],
        "float8 lists": [
            _lists(how, *mix, dims, features, page=page, extra=3, dtype=E4M3)
            for mix, dims, features, (how, page) in itertools.product(
                MIXES, DIMS, ("causal", "all"), (("packed", 0), ("packed paged", 8), ("packed paged", 64))
            )
        ],
        "float8 pages": [
            _lists(how, (rows,), (300, 77), dims, heads=(8, 2), page=page, dtype=E4M3)
            for rows, dims, (how, page) in itertools.product(
                (1, 64, 200), DIMS, (("paged", 16), ("paged", 256), ("lengths", 16))
            )
        ],
        "lists": [
            _lists(how, *mix, dims, features, heads=heads, page=page, extra=extra)
            for mix, dims, features, (how, page), (heads, extra) in itertools.product(
                MIXES, DIMS, FEATURES, itertools.product(packed, (16, 64)), (((6, 2), 0), ((8, 1), 3))
            )
            if not (how == "packed" and page == 64)
        ],
        "pages": [
            _lists(how, queries, (300, 77), (128, 128), features, heads=(4, 2), page=page)
            for page, features, (how, queries) in itertools.product(
                (1, 2, 4, 8, 16, 32, 64, 128, 256),
                ("full", "causal", "window"),
                (("packed paged", (200, 1)), ("paged", (64,))),
            )
        ],
        "lengths": [
            _lists("lengths", (rows,), keys, features=features, heads=(4, 2))
            for rows, keys, features in itertools.product((1, 64, 130), ((0, 300), (77, 1), (128, 256)), FEATURES)
        ],
    }


CASES = _cases()
assert sum(map(len, CASES.values())) >= 1500
#: The portable kernel runs every fifth case where Hopper's runs all: most of its time is compilation. Five divides no
#: number of combinations of dims and features, so that all of them have their turn.
PORTABLE_STEP = 5 if ON_HOPPER else 1


def _name(case: Case) -> str:
    lengths = f"{'+'.join(map(str, case.queries))}x{'+'.join(map(str, case.keys))}"
    more = f" page {case.page}" if "paged" in case.how else ""
    dtype = str(case.dtype).removeprefix("torch.")
    signs = " signed" if case.signed else ""
    return f"{lengths} h{case.heads} d{case.dims} {case.features} {case.how}{more} +{case.extra} {dtype}{signs}"


def _each() -> Iterator[Any]:
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


def attend(call: Call, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return ts.attention(**call.tensors, **call.options, return_lse=True, **how)


@pytest.mark.parametrize(("backend", "case"), list(_each()), indirect=["backend"])
def test_numbers(case, backend):
    call = call_of(case, "cuda")
    q, v = call.tensors["q"], call.tensors["v"]
    out = nan(*q.shape[:-1], v.shape[-1], dtype=BF16 if q.dtype == E4M3 else q.dtype)
    answer, lse = attend(call, out=out)
    assert answer is out
    ts.check()
    call.check(out, lse)


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("how", ["packed", "dense"])
def test_quick_the_same_bits_each_time(how, dtype, backend):
    call = call_of(_lists(how, (300, 70), (500, 300), (128, 128), "all", dtype=dtype), "cuda")
    first = attend(call)
    for _ in range(100):
        assert all(torch.equal(x, y) for x, y in zip(first, attend(call), strict=True))


@pytest.mark.parametrize("workers", [1, 3, 17, 131, 132, 264])
@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_quick_every_number_of_workers(schedule, workers, backend):
    for how in ("dense", "packed"):
        call = call_of(_lists(how, *MIXES[1]), "cuda")
        call.check(*attend(call, schedule=schedule, workers=workers))


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "spread", "unaligned"])
def test_quick_layouts(layout, backend):
    call = call_of(_dense((130, 200), heads=(4, 2)), "cuda")
    if layout == "bhsd":
        tensors = {name: x.transpose(1, 2).contiguous() for name, x in call.tensors.items()}
        out, lse = ts.attention(**tensors, causal=True, layout="bhsd", return_lse=True)
        call.check(out.transpose(1, 2), lse)
        return
    if more := {"spread": 16, "unaligned": 5}.get(layout):
        call.tensors = {name: poison_around(x, (0, 0, 0, more), (0, 0, 0, 0)) for name, x in call.tensors.items()}
    call.check(*attend(call))


@pytest.mark.parametrize("more", [1, 3, 8])
def test_quick_layouts_of_the_output(more, backend):
    call = call_of(_dense((130, 200), heads=(4, 2)), "cuda")
    store = nan(2, 130, 4, 64 + more)
    out = store[..., :64]
    ts.attention(**call.tensors, causal=True, out=out)
    call.check(out, None)
    assert store[..., 64:].isnan().all(), "wrote beside the output"


def test_quick_compiled_whole(backend):
    call = call_of(_dense((130, 200), heads=(4, 2)), "cuda")
    compiled = torch.compile(functools.partial(ts.attention, causal=True, return_lse=True), fullgraph=True)
    call.check(*compiled(**call.tensors))


# Few queries over many keys, graphs ----------------------------------------------------------------------------------

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
    first = attend(call, splits=splits)
    call.check(*first)
    for _ in range(20):
        assert all(torch.equal(x, y) for x, y in zip(first, attend(call, splits=splits), strict=True))


@pytest.mark.parametrize("how", ["dense", "packed", "packed paged", "in shares"])
def test_quick_graphs(how, backend):
    """A graph replayed between eager calls, which have counters and scratch of their own, on other numbers."""
    shares = how == "in shares"
    case, more = (FEW["decode"], {"splits": 16}) if shares else (_lists(how, *MIXES[1]), {})
    call = call_of(case, "cuda")
    attend(call, **more)
    with captured() as graph:
        out, lse = attend(call, **more)
    for seed in (0, 1, 0):
        now = call_of(case, "cuda", seed)
        for name, x in now.tensors.items():
            call.tensors[name].copy_(x)
        poison(out)
        graph.replay()
        attend(now, **more)
        now.check(out, lse)


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("how", ["dense", "packed", "in shares"])
def test_quick_two_streams(how, dtype, backend):
    """Each stream has counters, a list and scratch of its own."""
    shares = how == "in shares"
    case = replace(FEW["decode"], dtype=dtype) if shares else _lists(how, *MIXES[1], dtype=dtype)
    call, more = call_of(case, "cuda"), {"splits": 16} if shares else {}
    want = attend(call, **more)
    call.check(*want)
    streams, found = [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(attend(call, **more))
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for answer in found for x, y in zip(want, answer, strict=True))


def test_quick_gradients(backend):
    """Those of a log-sum-exp that the kernel wrote, on the thread of torch's autograd."""
    q, k, v = (torch.randn(2, 130, 4, 64, device="cuda").to(BF16).requires_grad_() for _ in range(3))
    ts.attention(q, k, v, causal=True).float().square().sum().backward()
    wide = [x.detach().double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    F.scaled_dot_product_attention(*wide, is_causal=True).square().sum().backward()
    for x, y in zip((q, k, v), wide, strict=True):
        want = y.grad.transpose(1, 2)
        torch.testing.assert_close(x.grad.double(), want, rtol=1e-2, atol=0.01 * want.abs().max().item())


# Keys that arrive -----------------------------------------------------------------------------------------------------

#: A deadline in seconds for chunks that come: other processes may have the GPU most of the time.
PATIENCE = 120.0
#: By the number of rows.
CHUNKINGS = {
    "uniform": lambda rows: ts.Arrival.uniform(100, -(-rows // 100), device="cuda"),
    "ragged": lambda rows: ts.Arrival.ragged([0, 7, 7, 300, rows], device="cuda"),
    "small": lambda rows: ts.Arrival.uniform(8, -(-rows // 8), device="cuda"),
    "tiles": lambda rows: ts.Arrival.uniform(64, -(-rows // 64), device="cuda"),
}


class Keys:
    """The keys and values of a call, NaN until they are brought: by a copy engine, since no SM may be free."""

    def __init__(self, case: Case, chunking: str) -> None:
        self.call = call_of(case, "cuda")
        self.rows = [x.reshape(-1, *x.shape[-2:]) for x in (self.call.tensors["k"], self.call.tensors["v"])]
        self.source = [x.cpu().pin_memory() for x in self.rows]
        self.arrival = CHUNKINGS[chunking](self.rows[0].shape[0])
        self.bounds = self.arrival.chunks(self.rows[0].shape[0]).bounds
        self.stream = torch.cuda.Stream()

    def attend(self, deadline: float = PATIENCE, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return attend(self.call, arrival=self.arrival, deadline=deadline, **how)

    def take_away(self) -> None:
        for x in self.rows:
            poison(x)
        torch.cuda.synchronize()

    def bring(self, *chunks: int) -> None:
        with torch.cuda.stream(self.stream):
            for chunk in chunks:
                part = slice(*self.bounds[chunk : chunk + 2])
                for x, y in zip(self.rows, self.source, strict=True):
                    x[part].copy_(y[part], non_blocking=True)
                self.arrival.signal(chunk)


@pytest.mark.parametrize("chunking", ["uniform", "ragged", "small"])
@pytest.mark.parametrize("how", ["dense", "packed"])
@pytest.mark.parametrize("features", ["full", "causal", "window"])
@pytest.mark.parametrize("splits", [None, 1], ids=["split", "whole"])
def test_quick_keys_that_arrive_while_the_kernel_runs(splits, features, how, chunking, backend):
    keys = Keys(_lists(how, (300, 70), (500, 300), features=features), chunking)
    for epoch in range(3):
        if epoch:
            keys.arrival.advance()
        keys.take_away()
        out, lse = keys.attend(splits=splits)
        keys.bring(*range(keys.arrival.num_chunks))
        settle()
        keys.call.check(out, lse)


@pytest.mark.parametrize("splits", [None, 1], ids=["split", "whole"])
@pytest.mark.parametrize("missing", [0, 4, 9])
def test_quick_a_chunk_that_does_not_come(missing, splits, backend):
    """What was not computed is NaN, the rest is right; and the call after is."""
    keys = Keys(_dense((300, 500), features="full"), "uniform")
    for chunk in range(10):
        if chunk != missing:
            keys.arrival.signal(chunk)
    out, lse = keys.attend(0.2, splits=splits)
    expired(f"attention: arrival's chunk {missing} did not arrive")
    sequence = missing // 5
    assert out[sequence].isnan().all(), "each tile of that sequence reads the chunk"
    assert lse[sequence].isnan().all()
    void = out.isnan()
    whole, _ = attend(keys.call)
    assert torch.equal(void.all(-1), void.any(-1))
    torch.testing.assert_close(out[~void], whole[~void], rtol=2e-2, atol=2e-2)
    keys = Keys(keys.call.case, "uniform")
    keys.bring(*range(10))
    keys.call.check(*keys.attend())
    ts.check()


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)])
def test_quick_one_chunk_at_a_time_is_seen(dims, backend):
    """A tile that reads many chunks waits for each of them: those not there yet are NaN."""
    keys = Keys(_dense((128, 1024), dims, "full", heads=(4, 4)), "tiles")
    keys.take_away()
    out, lse = keys.attend()
    for chunk in torch.randperm(32, generator=torch.Generator().manual_seed(0)).tolist():
        keys.bring(chunk)
        keys.stream.synchronize()
    settle()
    keys.call.check(out, lse)


# Traces ---------------------------------------------------------------------------------------------------------------


def recorded(call: Call, **how: Any) -> tuple[LaunchTrace, Schedule]:
    """The trace of a call, whose answer is checked, and the schedule of its plan."""
    launch_cache.clear()
    attend(call, **how)  # compiled, and not traced
    with record() as recorder:
        answer = attend(call, **how)
    (trace,), (launch,) = recorder.launches, launch_cache.of("attention")
    assert trace.workers == launch.plan.workers
    call.check(*answer)
    return trace, launch.plan.schedule


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
def test_quick_a_trace_has_each_item_once(dims, schedule, backend):
    trace, plan = recorded(call_of(_dense((1500, 1500), dims), "cuda"), schedule=schedule)
    assert not faults(trace, plan)
    for own in trace.by_worker:
        assert len({span.unit for span in own}) <= 1, "a worker stays where it is"
        assert all(0 <= span.unit < cuda_properties().workers for span in own)
        assert all(trace.begin <= span.begin <= span.end <= trace.end for span in own)
    assert 0 < trace.end - trace.begin < 0.1


@pytest.mark.parametrize("rows", [1500, 16384])
def test_quick_no_bit_depends_on_a_trace_or_on_the_calls_before(rows, backend):
    """Consecutive calls: the tickets and buffers that one leaves to the next do not change the numbers."""
    call = call_of(_dense((rows, rows), (128, 128), heads=(4, 2)), "cuda")
    first, _ = attend(call)
    for _ in range(5):
        assert torch.equal(attend(call)[0], first)
    with record():
        attend(call)  # compiled
    with record():
        outs = [attend(call)[0] for _ in range(5)]
    assert [int((out != first).sum()) for out in outs] == [0] * 5


def test_quick_a_trace_of_packed_sequences_has_the_items_that_there_are(backend):
    trace, _ = recorded(call_of(_lists("packed", (300, 0, 1, 700), (400, 30, 500, 700)), "cuda"))
    done = [(span.pm, span.pn) for span in trace.spans]
    assert len(done) == len(set(done)) >= 3 * 6
    assert {at for at, _ in done} == set(range(len(done))), "the list's positions, without a gap"


def test_quick_a_trace_of_shares(backend):
    assert not faults(*recorded(call_of(FEW["decode"], "cuda"), splits=16))


def test_quick_a_trace_says_who_waited_for_which_chunk(backend):
    keys = Keys(_dense((300, 500), features="full"), "uniform")
    torch.cuda.synchronize()
    with record() as recorder:
        out, lse = keys.attend()
        time.sleep(0.02)  # the kernel waits so long for its first chunk
        keys.bring(*range(10))
    ts.check()
    keys.call.check(out, lse)
    (trace,), (launch,) = recorder.launches, launch_cache.of("attention")
    assert not faults(trace, launch.plan.schedule)
    assert trace.arrivals == {0: (None,) * 10}
    assert {span.chunk for span in trace.spans} <= set(range(10))
    waits = [span for span in trace.spans if span.kind == "wait"]
    assert sum(span.end - span.begin for span in waits) > 1e-4
    chunks = {span.chunk for span in trace.spans}
    assert min(chunks) < 5 <= max(chunks), "of either sequence's first keys"


# Two attentions joined ------------------------------------------------------------------------------------------------


def two(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Random parts; some rows of each saw nothing, and are NaN."""
    parts = []
    for share in (0.3, 0.5):
        o, lse = torch.randn(shape, device="cuda", dtype=dtype), 5 * torch.randn(shape[:-1], device="cuda")
        nothing = torch.rand(shape[:-1], device="cuda") < share
        parts += [o.masked_fill_(nothing[..., None], float("nan")), lse.masked_fill_(nothing, float("-inf"))]
    return tuple(parts)


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("shape", [(2, 577, 6, 128), (1, 1, 32, 64), (3, 65, 2, 40), (2, 33, 3, 320), (8193, 16, 72)])
def test_quick_two_attentions_are_joined(shape, dtype):
    x = two(shape, dtype)
    (out, lse), (by_torch, logs) = merge_attention_op(*x), formula(*x)
    finer, finer_logs = formula(*(one.double() for one in x))
    assert passes(out, finer, by_torch)
    assert torch.equal(lse == float("-inf"), finer_logs == float("-inf"))
    assert passes(*(one.clamp_min(-99) for one in (lse, finer_logs, logs)))


def test_quick_two_attentions_of_views_are_joined_with_gradients():
    for layout in ("bshd", "bhsd"):
        o_a, lse_a, o_b, lse_b = two((2, 6, 65, 64), F32)
        x = [o_a.transpose(1, 2)[..., :40], lse_a, o_b.transpose(1, 2)[..., 24:], lse_b]
        x = [o_a[..., 1:41], lse_a, o_b[..., :40], lse_b] if layout == "bhsd" else x
        grads = []
        for wide in (False, True):
            leaves = [(one.double() if wide else one).detach().requires_grad_() for one in x]
            out, lse = ts.merge_attention(*leaves, layout=layout)
            (out.square().sum() + lse.masked_fill(lse == float("-inf"), 0).sum()).backward()
            grads.append([out, *(one.grad for one in leaves)])
        for mine, finer in zip(*grads, strict=True):
            torch.testing.assert_close(mine.double(), finer, rtol=1e-4, atol=1e-4)


def test_two_attentions_of_more_than_2_to_the_31_elements_are_joined():
    if torch.cuda.get_device_properties(0).total_memory < 30e9:
        pytest.skip("needs 20 GB of the GPU's memory")
    x = two((2**20 + 9, 16, 128), BF16)
    out, lse = merge_attention_op(*x)
    for rows in (slice(0, 99), slice(2**20 - 50, None)):
        found = formula(*(one[rows] for one in x))
        torch.testing.assert_close(out[rows], found[0], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse[rows], found[1])


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize(("rows", "keys"), [(70, 130), (1, 8192)], ids=["whole", "split"])
def test_quick_sinks_of_16_bits_have_the_bits_of_float32s(rows, keys, dtype, way):
    """They are read as they are, so that an equal call is launched natively."""
    from tilestream.ops import native

    q, k, v = (torch.randn(2, count, heads, 64, device="cuda", dtype=BF16) for count, heads in
               ((rows, 16), (keys, 2), (keys, 2)))  # fmt: skip
    sinks = torch.randn(16, device="cuda").to(dtype)
    expected = ts.attention(q, k, v, sinks=sinks.float(), causal=True)
    for _ in range(3):
        assert torch.equal(ts.attention(q, k, v, sinks=sinks, causal=True), expected)
    if native.loaded() is not None:
        call = (q, k, v, sinks, *[None] * 8, "bshd", True, *[None] * 5, False, None, "auto", None)
        assert torch.equal(native.attention(*call), expected), "it is not native"
