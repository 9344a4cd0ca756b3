"""The registered ops: opcheck, fake and meta, FLOP counts, functionalisation."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import tilestream as ts
import tilestream.ops  # the package itself imports them on first use
from error_rule import Maths, check, nans, rand

gemm = torch.ops.tilestream.gemm.default
gemm_out = torch.ops.tilestream.gemm_out.default
arriving = torch.ops.tilestream.gemm_arriving.default
arriving_out = torch.ops.tilestream.gemm_arriving_out.default
clear = torch.ops.tilestream.clear_signals.default

#: (batch, bias, residual, alpha, beta, activation, dtype, out_dtype, schedule, workers, gradients)
SAMPLES = {
    "plain": ((), False, False, 1.0, 1.0, "none", torch.float32, None, "auto", 0, False),
    "plain with gradients": ((), False, False, 1.0, 1.0, "none", torch.float32, None, "auto", 0, True),
    "bias": ((), True, False, 1.0, 1.0, "relu", torch.float32, None, "dynamic", 2, True),
    "residual": ((), False, True, 0.5, -2.0, "silu", torch.float32, None, "static", 3, True),
    "beta 0": ((), False, True, 1.0, 0.0, "none", torch.float32, None, "auto", 2, True),
    "both, 16 bits": ((), True, True, 2.0, 0.5, "gelu", torch.bfloat16, torch.float32, "stream_k", 2, True),
    "batches": ((3,), True, True, 1.0, 1.0, "gelu_tanh", torch.float32, None, "stream_k", 3, True),
}


def operands(batch, bias, residual, alpha, beta, activation, dtype, out_dtype, schedule, workers, gradients):
    def make(*shape):
        return rand(*shape, dtype=dtype).requires_grad_(gradients)

    return (
        make(*batch, 9, 6), make(*batch, 6, 7), make(7) if bias else None, make(*batch, 9, 7) if residual else None,
        alpha, beta, activation, out_dtype, schedule, workers,
    )  # fmt: skip


@pytest.mark.parametrize("sample", SAMPLES)
def test_opcheck_gemm(sample):
    torch.library.opcheck(gemm, operands(*SAMPLES[sample]))


@pytest.mark.parametrize("sample", ["plain", "both, 16 bits", "batches"])
def test_opcheck_gemm_out(sample):
    settings = (*SAMPLES[sample][:-1], False)
    args = operands(*settings)
    out = torch.zeros(*args[0].shape[:-1], 7, dtype=args[7] or args[0].dtype)
    torch.library.opcheck(gemm_out, (*args, out))


def there(rows: int, per: int, words: torch.Tensor | None = None) -> ts.Arrival:
    arrival = ts.Arrival.uniform(per, -(-rows // per), signals=words)
    for chunk in range(arrival.num_chunks):
        arrival.signal(chunk)
    return arrival


def ints(arrival: ts.Arrival) -> list[int]:
    return [arrival.key, arrival.epoch, arrival.pivot, arrival.num_chunks, arrival.rows_per_chunk, *arrival.bounds]


@pytest.mark.parametrize("sample", ["plain", "bias", "batches"])
@pytest.mark.parametrize("own_words", [False, True])
def test_opcheck_gemm_arriving(sample, own_words):
    args = operands(*SAMPLES[sample])
    rows = args[0].shape[:-1].numel()
    count = -(-rows // 4)
    words = torch.ones(count, dtype=torch.int32) if own_words else None
    row, column = there(rows, 4, words), there(7, 3)
    torch.library.opcheck(arriving, (*args, words, ints(row), None, ints(column), 5.0, "mm"))
    torch.library.opcheck(arriving, (*args, None, [], None, ints(column), 5.0, "mm"))
    out = torch.zeros(*args[0].shape[:-1], 7)
    plain = [t.detach() if isinstance(t, torch.Tensor) else t for t in args]
    torch.library.opcheck(arriving_out, (*plain, words, ints(row), None, [], 5.0, "mm", out))


def test_opcheck_clear_signals():
    torch.library.opcheck(clear, (torch.ones(4, dtype=torch.int32),))
    words = torch.ones(4, dtype=torch.int32)
    clear(words)
    assert words.tolist() == [0, 0, 0, 0]


def test_meta_tensors_have_shapes_and_compute_nothing():
    a, b = torch.empty(2, 30, 40, device="meta"), torch.empty(40, 50, device="meta", requires_grad=True)
    answer = ts.matmul(a, b, bias=torch.empty(50, device="meta"), activation="gelu")
    assert answer.device.type == "meta"
    assert answer.shape == (2, 30, 50)
    answer.sum().backward()
    assert b.grad.shape == (40, 50)
    out = torch.empty(2, 30, 50, device="meta")
    assert ts.matmul(a, b.detach(), out=out) is out
    assert ts.linear(a, b.t(), out_dtype=torch.float16).dtype == torch.float16
    with pytest.raises(ValueError, match="differ in K"):
        ts.matmul(a, a)


def test_fake_tensors_agree_with_real_ones():
    for shapes in (((30, 40), (40, 50)), ((3, 30, 40), (3, 40, 50)), ((40,), (2, 40, 5)), ((0, 4), (4, 3))):
        real = ts.matmul(*(rand(*s) for s in shapes))
        with FakeTensorMode():
            fake = ts.matmul(*(torch.empty(s) for s in shapes))
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.parametrize(
    ("shape_a", "shape_b"), [((30, 40), (40, 50)), ((3, 30, 40), (3, 40, 50)), ((3, 30, 40), (40, 50))], ids=str
)
def test_flops_are_counted_forward_and_backward(shape_a, shape_b):
    def count(op):
        tensors = [rand(*s).requires_grad_() for s in (shape_a, shape_b)]
        with FlopCounterMode(display=False) as counter:
            op(*tensors).sum().backward()
        return counter.get_total_flops()

    assert count(ts.matmul) == count(torch.matmul) > 0
    arrival = there(shape_a[0] * (shape_a[1] if len(shape_a) == 3 else 1), 10)
    assert count(lambda a, b: ts.matmul(a, b, arrival=arrival)) == count(torch.matmul)


def test_flops_are_counted_with_out():
    with FlopCounterMode(display=False) as counter:
        ts.mm(rand(30, 40), rand(40, 50), out=nans(30, 50))
    assert counter.get_total_flops() == 2 * 30 * 40 * 50


def test_the_graph_of_make_fx_holds_one_op():
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda x, y: ts.matmul(x, y, activation="relu"), tracing_mode="symbolic")(rand(5, 6), rand(6, 7))
    assert [node.target for node in graph.graph.nodes].count(gemm) == 1
    x, y = rand(9, 4), rand(4, 3)
    check(graph(x, y), Maths(x, y, activation="relu"))


def test_first_calls_do_not_import_sympy():
    """It takes a second, of each process that calls anything."""
    code = (
        "import sys, torch; there = 'sympy' in sys.modules; import tilestream as ts; x = torch.ones(2, 8, 8)\n"
        "ts.mm(x[0], x[0]); ts.linear(x, x[0]); ts.bmm(x, x); ts.attention(x[None], x[None], x[None])\n"
        "assert there or 'sympy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
