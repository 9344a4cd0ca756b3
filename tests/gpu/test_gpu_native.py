"""The native call path on a GPU: Python's bits, on any stream and thread, in graphs, one launch behind another.

Needs the extension: ``python -m tilestream_tools.native_build``, on any machine, puts it into the source tree.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from gpu_runs import ON_HOPPER, randn

import tilestream as ts
from tilestream.arrival.device import LocalRows
from tilestream.launch.native import Extension, extension, why_not
from tilestream.ops import attention_library, attention_merge, attention_request, checks, library, native, request
from tilestream.runtime import device_workspace as device_workspaces
from tilestream.runtime.device_workspace import MOST_STREAMS
from tilestream.runtime.driver import create_stream

if extension() is None:
    pytest.skip(f"no native call path: {why_not()}", allow_module_level=True)

BF16 = torch.bfloat16
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def recipes(monkeypatch) -> Iterator[Extension]:
    """An empty table."""
    native._load()
    found = extension()
    assert found is not None
    found.clear()
    yield found
    torch.cuda.synchronize()
    ts.check()
    native._loaded.extension = found


@pytest.fixture
def python_calls(monkeypatch) -> list[str]:
    """The ops of calls that were made Python's way."""
    made: list[str] = []
    inner = request._multiply

    def noted(r: request.Request) -> torch.Tensor:
        made.append(r.op)
        return inner(r)

    attended = attention_request._attend

    def noted_attention(r: attention_request.AttentionRequest) -> attention_request.Answer:
        made.append("attention")
        return attended(r)

    merge_op = attention_merge.merge_attention_op

    def noted_merge(*x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made.append("merge_attention")
        answer: tuple[torch.Tensor, torch.Tensor] = merge_op(*x)
        return answer

    monkeypatch.setattr(attention_merge, "merge_attention_op", noted_merge)
    monkeypatch.setattr(request, "_multiply", noted)
    monkeypatch.setattr(attention_request, "_attend", noted_attention)
    return made


def by_python(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The result without the extension."""
    found, native._loaded.extension = native._loaded.extension, None
    try:
        return call().clone()
    finally:
        native._loaded.extension = found


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def half(*shape: int) -> torch.Tensor:
    return randn(*shape, dtype=BF16)


def made(name: str) -> Callable[[], torch.Tensor]:
    """A call whose operands are made once."""
    a, b, w, bias, residual = half(512, 256), half(256, 384), half(384, 256), half(384), half(512, 384)
    out, x, few = torch.empty(512, 384, device="cuda", dtype=BF16), half(2, 128, 256), half(5, 256)
    long_a, long_b = half(1152, 4096), half(4096, 1152)
    batched = half(3, 64, 256), half(3, 256, 128)
    a8, w8 = a.to(FP8), w.to(FP8)
    scales = {"scale_a": torch.rand(512, 1, device="cuda"), "scale_b": torch.rand(1, 384, device="cuda")}
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "mm": lambda: ts.mm(a, b),
        "mm of one tensor twice": lambda: ts.mm(b[:, :256], b[:, :256]),
        "mm, out=": lambda: ts.mm(a, b, out=out),
        "mm, static": lambda: ts.mm(a, b, schedule="static"),
        "mm, dynamic": lambda: ts.mm(a, b, schedule="dynamic"),
        "mm, stream-K": lambda: ts.mm(long_a, long_b, schedule="stream_k"),
        "mm, stream-K, 7 workers": lambda: ts.mm(long_a, long_b, schedule="stream_k", workers=7),
        "mm, odd strides": lambda: ts.mm(a[:, 1:], b[1:]),
        "matmul, 3-D": lambda: ts.matmul(x, b, bias=bias),
        "matmul, all": lambda: ts.matmul(a, b, bias=bias, residual=residual, beta=0.5, activation="gelu", **scales),
        "bmm": lambda: ts.bmm(*batched),
        "addmm": lambda: ts.addmm(residual, a, b, alpha=0.5, beta=2.0),
        "addmm of a row": lambda: ts.addmm(bias, a, b),
        "linear": lambda: ts.linear(a, w),
        "linear, few rows": lambda: ts.linear(few, w, bias),
        "linear, 3-D, bias": lambda: ts.linear(x, w, bias, activation="silu"),
        "linear, fp8": lambda: ts.linear(a8, w8, **scales),
        "mm, fp32": lambda: ts.mm(a.float(), b.float()),
    }
    return calls[name]


NAMES = (
    "mm", "mm, out=", "mm, static", "mm, dynamic", "mm, stream-K", "mm, stream-K, 7 workers",
    "matmul, 3-D", "matmul, all", "bmm", "addmm", "linear", "linear, few rows", "linear, 3-D, bias",
)  # fmt: skip
#: Calls that may need what no recipe has: a copy, a second kernel, a table.
MAYBE = ("mm of one tensor twice", "mm, odd strides", "addmm of a row", "mm, fp32")
FP8_TOO = ("linear, fp8",) if ON_HOPPER else ()


@pytest.mark.parametrize("name", [*NAMES, *MAYBE, *FP8_TOO])
def test_the_bits_are_those_of_pythons_way(python_calls, name):
    call = made(name)
    expected = by_python(call)
    python_calls.clear()
    for _ in range(4):
        assert torch.equal(bits(call()), bits(expected))
    if name in NAMES:
        assert len(python_calls) == 1, "the second equal call is native"


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def joined(answer: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The bits of an output and of its log-sum-exp, one behind the other."""
    return torch.cat([bits(one).flatten() for one in answer])


def attention_call(name: str) -> Callable[[], torch.Tensor]:
    """A call of attention whose operands are made once."""
    q, k, v, out = half(2, 256, 8, 128), half(2, 512, 2, 128), half(2, 512, 2, 128), half(2, 256, 8, 128)
    sinks, ends, keys = randn(8, dtype=torch.float32), ints(0, 100, 300, 512), ints(0, 300, 301, 1024)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    packed = q.view(512, 8, 128), k.view(1024, 2, 128), v.view(1024, 2, 128)
    pages = k.view(16, 64, 2, 128), v.view(16, 64, 2, 128)
    table, lengths = torch.randperm(16, device="cuda").int().view(2, 8), ints(512, 77)
    one, long_k, long_v = half(1, 1, 8, 128), half(1, 16384, 2, 128), half(1, 16384, 2, 128)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "dense": lambda: ts.attention(q, q, q),
        "grouped, causal": lambda: ts.attention(q, k, v, causal=True),
        "heads first": lambda: ts.attention(*heads_first, layout="bhsd"),
        "log-sum-exp": lambda: joined(ts.attention(q, k, v, return_lse=True)),
        "out=": lambda: ts.attention(q, k, v, out=out),
        "out=, log-sum-exp": lambda: joined(ts.attention(q, k, v, out=out, return_lse=True)),
        "sinks, window, cap": lambda: ts.attention(q, k, v, sinks=sinks, window=(64, 0), softcap=20.0, scale=0.2),
        "packed": lambda: ts.attention(*packed, cu_seqlens_q=ends, cu_seqlens_k=keys, causal=True),
        "packed, log-sum-exp": lambda: joined(
            ts.attention(*packed, cu_seqlens_q=ends, cu_seqlens_k=keys, max_seqlen_q=256, return_lse=True)
        ),
        "pages": lambda: ts.attention(q, *pages, block_table=table, seqlens_k=lengths, causal=True),
        "static": lambda: ts.attention(q, k, v, schedule="static"),
        "dynamic": lambda: ts.attention(q, k, v, schedule="dynamic", causal=True),
        "split": lambda: ts.attention(one, long_k, long_v, splits=4, sinks=sinks),
        "split by the plan": lambda: ts.attention(one, long_k, long_v),
        "fp32": lambda: ts.attention(q.float(), k.float(), v.float()),
    }
    if ON_HOPPER:
        scales = {"scale_q": torch.rand(8, device="cuda"), "scale_k": torch.rand(2, 2, device="cuda")}
        q8, k8, v8 = q.to(FP8), k.to(FP8), v.to(FP8)
        calls["fp8"] = lambda: ts.attention(q8, k8, v8, **scales)
    return calls[name]


ATTENTION = (
    "dense", "grouped, causal", "heads first", "log-sum-exp", "out=", "out=, log-sum-exp", "sinks, window, cap",
    "packed", "packed, log-sum-exp", "pages", "static", "dynamic", "split", "split by the plan",
)  # fmt: skip


@pytest.mark.parametrize("name", [*ATTENTION, "fp32", *(("fp8",) if ON_HOPPER else ())])
def test_the_bits_of_attention_are_those_of_pythons_way(python_calls, name):
    call = attention_call(name)
    expected = by_python(call)
    python_calls.clear()
    for _ in range(4):
        assert torch.equal(bits(call()), bits(expected))
    if name in ATTENTION:
        assert len(python_calls) == 1, "the second equal call is native"


def merge_call(name: str) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """A merge whose operands are made once."""
    o, lse, part = half(2, 5, 96, 8, 128), randn(2, 5, 8, 96, dtype=torch.float32), slice(None)
    lse[0, 0, 3] = lse[:, 1, 5] = float("-inf")
    o[0, 0, :, 3] = float("nan")
    options = {}
    if name == "heads first":
        o, options = o.transpose(2, 3), {"layout": "bhsd"}
    elif name == "packed":
        o, lse = o[:, 0], lse[:, 0].transpose(1, 2)
    elif name == "of columns":
        part = slice(3, 75)
    a, b = o[0][..., part], o[1][..., part]
    if name == "mixed":
        b = b.float()
    return lambda: ts.merge_attention(a, lse[0], b, lse[1], **options)


def merge_output(name: str) -> Callable[[], torch.Tensor]:
    """The same, and its output alone."""
    call = merge_call(name)
    return lambda: call()[0]


@pytest.mark.parametrize("name", ["rows first", "heads first", "packed", "of columns", "mixed"])
def test_the_bits_of_a_merge_are_those_of_pythons_way(python_calls, name):
    call = merge_call(name)
    expected = by_python(lambda: joined(call()))
    python_calls.clear()
    for _ in range(4):
        assert torch.equal(joined(call()), expected)
    assert python_calls == ["merge_attention"], "the second equal call is native"


@pytest.mark.parametrize("name", ["packed", "split", "dynamic"])
def test_launches_of_attention_take_turns_on_one_stream(name):
    """Native ones and Python's, each with lists, counters and shares of its own."""
    call = attention_call(name)
    expected = by_python(call)
    call()
    for _ in range(50):
        assert torch.equal(bits(call()), bits(expected))
        assert torch.equal(bits(by_python(call)), bits(expected))


def test_lengths_are_read_at_each_launch():
    q, k, v = half(512, 8, 128), half(512, 2, 128), half(512, 2, 128)
    ends = ints(0, 100, 512)
    for middle in (100, 200, 511):
        ends[1] = middle
        expected = by_python(lambda: ts.attention(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends))
        for _ in range(2):
            found = ts.attention(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends)
            assert torch.equal(bits(found), bits(expected))


def test_another_address_and_another_factor_are_read(python_calls):
    residual, b = half(512, 384), half(256, 384)
    for alpha in (0.5, 0.25, -3.0):
        a = half(512, 256)
        expected = by_python(lambda a=a, alpha=alpha: ts.addmm(residual, a, b, alpha=alpha))
        assert torch.equal(bits(ts.addmm(residual, a, b, alpha=alpha)), bits(expected))
    assert python_calls.count("addmm") == 4, "three for the comparison, and one"


@pytest.mark.parametrize("name", ["mm, dynamic", "mm, stream-K", "mm, static"])
def test_native_and_python_launches_take_turns_on_one_stream(name):
    call = made(name)
    expected = by_python(call)
    call()
    for _ in range(50):
        assert torch.equal(bits(call()), bits(expected))
        assert torch.equal(bits(by_python(call)), bits(expected))


@pytest.mark.parametrize("name", ["mm, dynamic", "mm, stream-K"])
def test_streams_do_not_share_words(python_calls, name):
    call = made(name)
    expected = by_python(call)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found = []
    for _ in range(40):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(call())
    torch.cuda.synchronize()
    assert all(torch.equal(bits(one), bits(expected)) for one in found)
    assert len(python_calls) == 1 + len(streams)


@pytest.mark.parametrize("name", ["mm, dynamic", "mm, stream-K"])
def test_endless_streams_of_others_share_the_words_of_few(recipes, name):
    """Streams that torch did not make: words are kept for those that launched last, and freed ones do no harm."""
    call = made(name)
    expected = by_python(call)
    streams = [torch.cuda.ExternalStream(create_stream()) for _ in range(3 * MOST_STREAMS)]
    torch.cuda.synchronize()
    found, allocated = [], []
    for stream in streams:
        with torch.cuda.stream(stream):
            found += [call() for _ in range(3)]
        allocated.append(torch.cuda.memory_allocated())
    torch.cuda.synchronize()
    assert all(torch.equal(bits(one), bits(expected)) for one in found)
    assert len(recipes._words) <= MOST_STREAMS + 1
    assert len(device_workspaces._workspaces) <= MOST_STREAMS + 1
    results = 3 * MOST_STREAMS * max(2**20, 512 * -(-found[0].nbytes // 512))  # which this test holds
    assert allocated[-1] - allocated[2 * MOST_STREAMS] < results


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_ops_are_right_without_the_extension():
    """The op tests of this folder run natively; here they do without."""
    files = [str(Path(__file__).with_name(f"test_gpu_{name}.py")) for name in ("matmul", "attention", "launches")]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu and not slow", "-p", "no:cacheprovider", *files],
        env={**os.environ, "TILESTREAM_NATIVE": "0"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout


def test_an_output_of_inference_mode_is_refused_outside_of_it(recipes):
    a, b, q = half(64, 64), half(64, 64), half(1, 64, 2, 64)
    with torch.inference_mode():
        out, heads = torch.zeros_like(a), torch.zeros_like(q)
        for _ in range(2):
            ts.mm(a, b, out=out)
            ts.attention(q, q, q, out=heads)
        before = out.clone(), heads.clone()
    for call in (lambda: ts.mm(a + 1, b, out=out), lambda: ts.attention(q, q, q + 1, out=heads)):
        with pytest.raises(RuntimeError, match="out: Inplace update to inference tensor outside InferenceMode"):
            call()
    assert all(map(torch.equal, before, (out, heads)))


@pytest.mark.parametrize("name", ["mm, dynamic", "mm, stream-K", "linear, 3-D, bias"])
def test_threads_on_one_stream_and_a_fresh_thread(name):
    call = made(name)
    expected = by_python(call)
    call()
    torch.cuda.synchronize()
    failed: list[object] = []

    def work() -> None:
        try:
            found = [call() for _ in range(50)]
            torch.cuda.synchronize()
            failed.extend(i for i, one in enumerate(found) if not torch.equal(bits(one), bits(expected)))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.parametrize(
    ("maker", "name"),
    [(made, name) for name in ("mm, static", "mm, dynamic", "mm, stream-K", "mm, out=")]
    + [(attention_call, name) for name in ("dense", "packed", "split")]
    + [(merge_output, "rows first")],
)
def test_a_graph_is_replayed_between_native_launches(maker, name):
    call = maker(name)
    expected = by_python(call)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for _ in range(10):
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(bits(captured), bits(expected))
        assert torch.equal(bits(call()), bits(expected))


def test_each_launch_sees_what_the_one_before_it_wrote(python_calls):
    """Programmatic launches begin before the one ahead has ended."""
    a, w, out = half(256, 256), half(256, 256) / 16, torch.empty(256, 256, device="cuda", dtype=BF16)

    def chain() -> torch.Tensor:
        x = a
        for _ in range(64):
            x = ts.mm(x, w)
            x = ts.linear(x, w, out=out).clone()
        return x

    expected = by_python(chain)
    python_calls.clear()
    assert all(torch.equal(bits(chain()), bits(expected)) for _ in range(5))
    assert len(python_calls) == 2


def test_overlap_is_refused_as_by_python():
    room = half(513, 256)
    ts.mm(half(256, 256), half(256, 256), out=torch.empty(256, 256, device="cuda", dtype=BF16))
    for _ in range(2):
        with pytest.raises(ValueError, match="overlaps a in memory"):
            ts.mm(room[:256], half(256, 256), out=room[1:257])


def test_a_limit_and_a_gradient_are_as_by_python(python_calls):
    a, b = half(512, 256), half(256, 384)
    expected = by_python(lambda: ts.mm(a, b))
    ts.mm(a, b)
    with ts.worker_limit(8):
        for _ in range(3):
            assert torch.equal(bits(ts.mm(a, b)), bits(expected))
    assert len(python_calls) == 3
    weight = b.clone().requires_grad_()
    for _ in range(2):
        ts.mm(a, weight).sum().backward()
    assert weight.grad is not None
    assert len(python_calls) == 4, "the product is native; the gradient's is, from the second one on"


@pytest.mark.parametrize("shape", [(256,), (2, 128)], ids=["2-D", "3-D"])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_training_a_linear_is_native_from_the_second_step_on(python_calls, shape, activation):
    leaves = [x.requires_grad_() for x in (half(*shape, 256), half(256, 256), half(256))]
    grad = half(*shape, 256)
    steps = []
    for _ in range(4):
        python_calls.clear()
        y = ts.linear(*leaves, activation=activation)
        steps.append((y, *torch.autograd.grad(y, leaves, grad), list(python_calls)))
    assert len(steps[0][-1]) >= 3, "the product and two of its gradient"
    assert [step[-1] for step in steps[1:]] == [[]] * 3
    for step in steps[1:]:
        assert all(torch.equal(bits(one), bits(other)) for one, other in zip(step[:-1], steps[0][:-1], strict=True))


def test_compiled_functions_are_as_by_python():
    a, b = half(512, 256), half(256, 384)
    ts.mm(a, b)
    expected = by_python(lambda: ts.mm(a, b))
    compiled = torch.compile(lambda x, y: ts.mm(x, y) + 1)
    for _ in range(3):
        torch.testing.assert_close(compiled(a, b), expected + 1)


def test_operands_of_a_factor_of_0_are_not_read():
    a, b, c = half(64, 128), half(128, 96), half(64, 96)
    a[3, 5] = b[7, 2] = float("nan")
    for alpha in (2.0, 0.0, 0.0):
        assert torch.equal(ts.addmm(c, a, b, alpha=alpha).isnan(), torch.addmm(c, a, b, alpha=alpha).isnan())
    torch.testing.assert_close(ts.addmm(c, a, b, alpha=0, beta=2.0), 2 * c)


def test_memory_stays_as_it_is_over_many_shapes(recipes):
    recipes.set_capacity(64)
    try:
        b = half(256, 64)
        room = half(512, 256)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for rows in range(1, 100):
            ts.mm(room[:rows], b)
            ts.mm(room[:rows], b)
        assert len(recipes) <= 64
        assert torch.cuda.memory_allocated() - before < 2**26
    finally:
        recipes.set_capacity(8192)


def test_a_written_output_is_another_version(python_calls):
    a, b, q = half(64, 64), half(64, 64), half(1, 64, 2, 64)
    for out, call in (
        (torch.empty_like(a), lambda out: ts.mm(a, b, out=out)),
        (torch.empty_like(q), lambda out: ts.attention(q, q, q, out=out)),
    ):
        versions = []
        for _ in range(3):
            call(out)
            versions.append(out._version)
        assert versions == sorted(set(versions))
    assert python_calls == ["mm", "attention"]


def test_the_ops_of_a_compiled_graph_are_native(monkeypatch):
    by_python = []
    for module in (library, attention_library):
        inner = module._run
        monkeypatch.setattr(module, "_run", lambda *args, inner=inner: (by_python.append(args), inner(*args)))

    def block(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = ts.linear(x, w, bias, activation="relu").view(2, 64, 2, 64)
        return ts.attention(y, y, y, causal=True)

    x, w, bias = half(2, 64, 128), half(128, 128), half(128)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        answers = [compiled(x, w, bias) for _ in range(3)]
        assert len(by_python) == 2
        x.normal_()
        assert torch.equal(bits(compiled(x, w, bias)), bits(block(x, w, bias)))
        assert all(torch.equal(bits(one), bits(answers[0])) for one in answers)


def test_calls_under_autocast_are_native_and_as_by_python(python_calls):
    x, w, bias, q = (randn(*shape, dtype=torch.float32) for shape in ((2, 64, 128), (96, 128), (96,), (2, 64, 4, 64)))
    calls = (lambda: ts.linear(x, w, bias), lambda: ts.bmm(x, x.mT), lambda: ts.attention(q, q, q))
    for call in calls:
        with torch.autocast("cuda", BF16):
            expected = by_python(call)
            python_calls.clear()
            for _ in range(3):
                assert torch.equal(bits(call()), bits(expected))
        assert expected.dtype == BF16
        assert len(python_calls) == 1, "the second equal call is native"


def test_autocast_converts_a_weight_once_a_block():
    w = randn(96, 128, dtype=torch.float32).requires_grad_()
    with torch.autocast("cuda", BF16):
        first, second = (checks.autocast("mm", False, w)[0] for _ in range(2))
        assert (first.dtype, first.shape, first.stride()) == (BF16, w.shape, w.stride())
        assert first.data_ptr() == second.data_ptr()
        torch.clear_autocast_cache()
        assert checks.autocast("mm", False, w)[0].data_ptr() != first.data_ptr()
    for _ in range(2):
        with torch.autocast("cuda", BF16):
            ts.linear(randn(64, 128), w).sum().backward()
    assert w.grad is not None
    assert (w.grad.dtype, w.grad.stride()) == (torch.float32, w.stride())


# What arrives ---------------------------------------------------------------------------------------------------------


def signalled(count: int, rows: int = 0, bounds: tuple[int, ...] = (), pivot: int = 0, own: bool = False) -> ts.Arrival:
    """An arrival on this GPU whose chunks are all there."""
    words = torch.zeros(count, device="cuda", dtype=torch.int32) if own else None
    made = ts.Arrival(count, rows_per_chunk=rows, bounds=bounds, pivot=pivot, signals=words, device="cuda")
    return again(made)


def again(arrival: ts.Arrival) -> ts.Arrival:
    """The next epoch, all chunks there."""
    arrival.advance()
    for chunk in range(arrival.num_chunks):
        arrival.signal(chunk)
    return arrival


def gated_call(name: str) -> Callable[[], torch.Tensor]:
    """A call that waits, whose operands and arrivals are made once."""
    a, b, w = half(1024, 256), half(256, 384), half(384, 256)
    out, odd = torch.empty(1024, 384, device="cuda", dtype=BF16), half(1024, 257)[:, 1:]
    q, k, v = half(2, 256, 8, 64), half(2, 512, 2, 64), half(2, 512, 2, 64)
    uniform, ragged = signalled(8, 128), signalled(5, bounds=(0, 100, 100, 513, 700, 1024), pivot=3)
    own, columns, keys = signalled(8, 128, own=True), signalled(4, 96), signalled(8, 128)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "rows": lambda: ts.matmul(a, b, arrival=again(uniform)),
        "rows, out=": lambda: ts.matmul(a, b, out=out, arrival=again(uniform), deadline=5),
        "rows, ragged": lambda: ts.matmul(a, b, arrival=again(ragged)),
        "rows, own words": lambda: ts.matmul(a, b, arrival=again(own)),
        "rows, stream-K": lambda: ts.matmul(a, b, arrival=again(uniform), schedule="stream_k"),
        "rows, portable": lambda: ts.matmul(odd, b, arrival=again(uniform)),
        "rows, one epoch": lambda: ts.matmul(a, b, arrival=uniform),
        "columns": lambda: ts.linear(a, w, weight_arrival=again(columns)),
        "both": lambda: ts.linear(a, w, arrival=again(uniform), weight_arrival=again(columns)),
        "keys": lambda: ts.attention(q, k, v, arrival=again(keys)),
        "keys, causal, out=": lambda: ts.attention(q, k, v, causal=True, out=torch.empty_like(q), arrival=again(keys)),
    }
    return calls[name]


@pytest.mark.parametrize(
    "name",
    [
        "rows", "rows, out=", "rows, ragged", "rows, own words", "rows, stream-K", "rows, portable", "rows, one epoch",
        "columns", "both", "keys", "keys, causal, out=",
    ],
)  # fmt: skip
def test_the_bits_of_what_arrives_are_those_of_pythons_way(python_calls, name):
    call = gated_call(name)
    expected = by_python(call)
    python_calls.clear()
    for _ in range(6):
        assert torch.equal(bits(call()), bits(expected))
    assert len(python_calls) == 1, "the second equal call is native"


@pytest.mark.parametrize("bounds", [(), (0, 100, 100, 513, 700, 1024)], ids=["uniform", "ragged"])
def test_what_is_published_natively_is_read_natively(python_calls, bounds):
    a, b, c, out = half(1024, 256), half(256, 256), half(256, 128), torch.empty(1024, 256, device="cuda", dtype=BF16)
    count = len(bounds) - 1 if bounds else 8
    arrival = ts.Arrival(count, rows_per_chunk=0 if bounds else 128, bounds=bounds, device="cuda")
    reader = torch.cuda.Stream()

    def pair() -> torch.Tensor:
        arrival.advance()
        out.fill_(float("nan"))
        reader.wait_stream(torch.cuda.current_stream())
        ts.matmul(a, b, out=out, publish=arrival)
        with torch.cuda.stream(reader):
            result = ts.matmul(out, c, arrival=arrival)
        torch.cuda.current_stream().wait_stream(reader)
        return result

    expected = by_python(pair)
    python_calls.clear()
    for _ in range(20):
        assert torch.equal(bits(pair()), bits(expected))
    if ON_HOPPER and not bounds:  # else there is a launch a chunk
        assert python_calls == ["matmul", "matmul"]


def test_a_chunk_that_is_late_and_one_that_never_comes(python_calls):
    a, b = half(1024, 256), half(256, 384)
    expected = ts.matmul(a, b)
    arrival = signalled(8, 128)
    ts.matmul(a, b, arrival=arrival)
    side = torch.cuda.Stream()
    python_calls.clear()
    for late in (0, 7):
        arrival.advance()
        with torch.cuda.stream(side):
            for chunk in range(8):
                if chunk != late:
                    arrival.signal(chunk)
        result = ts.matmul(a, b, arrival=arrival)
        time.sleep(0.01)
        with torch.cuda.stream(side):
            arrival.signal(late)
        torch.cuda.synchronize()
        assert torch.equal(bits(result), bits(expected))
    arrival.advance()
    with torch.cuda.stream(side):
        for chunk in range(7):
            arrival.signal(chunk)
    result = ts.matmul(a, b, arrival=arrival, deadline=0.05)
    torch.cuda.synchronize()
    with pytest.raises(ts.ArrivalTimeout, match="chunk 7"):
        ts.check()
    assert torch.equal(bits(result[: 7 * 128]), bits(expected[: 7 * 128]))
    assert result[7 * 128 :].isnan().all()
    assert not python_calls


@pytest.mark.parametrize("name", ["rows", "rows, stream-K", "keys"])
def test_waiting_launches_take_turns_with_pythons_and_between_streams(name):
    call = gated_call(name)
    expected = by_python(call)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    for i in range(40):
        with torch.cuda.stream(streams[i % 2]):
            streams[i % 2].wait_stream(streams[1 - i % 2])
            assert torch.equal(bits(call() if i % 3 else by_python(call)), bits(expected))


@pytest.mark.parametrize("in_place", [True, False])
def test_rows_that_are_here_already_are_read_where_they_are_or_brought(python_calls, in_place):
    """Tiles of the transposed product do not read them in place."""
    if not ON_HOPPER:
        pytest.skip("Hopper's kernel reads two places")
    arrival, how = signalled(8, 128), {"schedule": "static"}
    plans = (ts.plan(1024, n, 256, dtype=BF16, device="cuda", arrival=arrival, **how) for n in (384, 1152, 2048, 4096))
    n = next(plan.problem.n for plan in plans if plan.swap_ab != in_place)
    a, b = half(1024, 256), half(256, n)
    expected, gathered, brought = ts.matmul(a, b, **how), a.clone(), list[int]()

    def bring(turn: int, mine: torch.Tensor) -> None:
        gathered[256:512] = mine
        brought.append(turn)

    for turn in range(4):
        mine = a[256:512].clone()
        gathered[256:512] = float("nan")
        again(arrival)
        arrival._signals.local_rows = LocalRows(mine, 256, 256, 1024, functools.partial(bring, turn, mine))
        result = ts.matmul(gathered, b, arrival=arrival, **how)
        assert brought == ([] if in_place else [*range(turn + 1)])
        assert torch.equal(bits(result), bits(expected))
        arrival._signals.local_rows = None
    assert python_calls == ["matmul", "matmul"], "the plain one, and the first that waits"
