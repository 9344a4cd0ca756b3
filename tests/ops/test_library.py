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
from tilestream.ops import library

gemm, forward = torch.ops.tilestream.gemm.default, torch.ops.tilestream.gemm_forward.default
gemm_out = torch.ops.tilestream.gemm_out.default
arriving = torch.ops.tilestream.gemm_arriving.default
arriving_out = torch.ops.tilestream.gemm_arriving_out.default
clear = torch.ops.tilestream.clear_signals.default

#: What each sample is beside a plain product; with gradients, unless it says otherwise.
SAMPLES = {
    "plain": {"gradients": False},
    "plain with gradients": {},
    "bias": {"bias": True, "activation": "relu", "schedule": "dynamic", "workers": 2},
    "residual": {
        "residual": True, "alpha": 0.5, "beta": -2.0, "activation": "silu", "schedule": "static", "workers": 3,
    },
    "beta 0": {"residual": True, "beta": 0.0, "workers": 2},
    "both, 16 bits": {
        "bias": True, "residual": True, "alpha": 2.0, "beta": 0.5, "activation": "gelu", "dtype": torch.bfloat16,
        "out_dtype": torch.float32, "schedule": "stream_k", "workers": 2,
    },
    "batches": {
        "batch": (3,), "bias": True, "residual": True, "activation": "gelu_tanh", "schedule": "stream_k", "workers": 3,
    },
    **{
        f"{kind} scales, {dtype}, {batch}": {
            "batch": batch, "bias": True, "alpha": 1.5, "activation": "relu", "workers": 2, "dtype": dtype,
            "gradients": False, "scales": kind,
        }
        for kind in ("tensor", "row") for dtype in (torch.float8_e4m3fn, torch.bfloat16) for batch in ((), (3,))
    },
    "8 bits": {"dtype": torch.float8_e4m3fn, "gradients": False},
}  # fmt: skip


def operands(
    batch=(), bias=False, residual=False, alpha=1.0, beta=1.0, activation="none", dtype=torch.float32, out_dtype=None,
    schedule="auto", workers=0, gradients=True, scales="",
):  # fmt: skip
    """The arguments that all ops begin with, and those that they end with."""
    wide = dtype if dtype.itemsize > 1 else torch.float32

    def make(*shape, dtype=dtype):
        return rand(*shape, dtype=dtype).requires_grad_(gradients)

    last = {
        "": (), "tensor": (torch.tensor(0.75), torch.tensor([[3.0]]), False),
        "row": (rand(*batch, 9, 1).exp(), rand(*batch, 1, 7).exp(), False),
    }[scales]  # fmt: skip
    return (
        make(*batch, 9, 6), make(*batch, 6, 7), make(7, dtype=wide) if bias else None,
        make(*batch, 9, 7, dtype=wide) if residual else None, alpha, beta, activation, out_dtype, schedule, workers,
    ), last  # fmt: skip


def opcheck(op, args):
    # test_schema compares operands before and after by allclose, which does not know 8 bits.
    all_of = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, args, test_utils=all_of[args[0].dtype.itemsize == 1 :])


@pytest.mark.parametrize("sample", SAMPLES)
def test_opcheck_gemm(sample):
    first, last = operands(**SAMPLES[sample])
    opcheck(gemm, (*first, *last))


@pytest.mark.parametrize("sample", ["plain", "bias", "batches"])
def test_opcheck_gemm_forward(sample):
    (a, b, bias, *_), _ = operands(**SAMPLES[sample] | {"gradients": False})
    opcheck(forward, (a, b, bias, "gelu"))
    close = torch.testing.assert_close
    close(forward(a, b, bias, "gelu"), gemm(a, b, bias, None, 1.0, 1.0, "gelu", None, "auto", 0))


def test_a_gpu_is_given_no_operands_times_0(monkeypatch):
    """CPU kernels look at the factor; those of GPUs multiply by it."""
    given = []
    monkeypatch.setattr(library.gpu, "run", lambda x, *how: given.append((tuple(x.a.shape), tuple(x.b.shape))))
    monkeypatch.setattr(torch.Tensor, "is_cuda", torch.Tensor.is_cpu)
    first, _ = operands(**SAMPLES["plain"])
    for alpha in (0.5, 0.0):
        library._run(rand(9, 7), True, "", (*first[:4], alpha, *first[5:]), (), ())
    assert given == [((9, 6), (6, 7)), ((9, 0), (0, 7))]


SCALED = [sample for sample in SAMPLES if "scales" in sample]


@pytest.mark.parametrize("sample", ["plain", "both, 16 bits", "batches", *SCALED])
def test_opcheck_gemm_out(sample):
    first, last = operands(**SAMPLES[sample] | {"gradients": False})
    wide = first[0].dtype if first[0].dtype.itemsize > 1 else torch.bfloat16
    opcheck(gemm_out, (*first, torch.zeros(*first[0].shape[:-1], 7, dtype=first[7] or wide), *last))


def there(rows: int, per: int, words: torch.Tensor | None = None) -> ts.Arrival:
    arrival = ts.Arrival.uniform(per, -(-rows // per), signals=words)
    for chunk in range(arrival.num_chunks):
        arrival.signal(chunk)
    return arrival


def ints(arrival: ts.Arrival) -> list[int]:
    return [arrival.key, arrival.epoch, arrival.pivot, arrival.num_chunks, arrival.rows_per_chunk, *arrival.bounds]


@pytest.mark.parametrize("sample", ["plain", "bias", "batches", *SCALED])
@pytest.mark.parametrize("own_words", [False, True])
def test_opcheck_gemm_arriving(sample, own_words):
    first, last = operands(**SAMPLES[sample])
    rows = first[0].shape[:-1].numel()
    words = torch.ones(-(-rows // 4), dtype=torch.int32) if own_words else None
    row, column = there(rows, 4, words), there(7, 3)
    opcheck(arriving, (*first, words, ints(row), None, ints(column), 5.0, "mm", *last))
    opcheck(arriving, (*first, None, [], None, ints(column), 5.0, "mm", *last))
    if not last:
        plain = [t.detach() if isinstance(t, torch.Tensor) else t for t in first]
        out = torch.zeros(*first[0].shape[:-1], 7)
        opcheck(arriving_out, (*plain, words, ints(row), None, [], 5.0, "mm", out))


@pytest.mark.parametrize("own_words", [False, True])
def test_opcheck_gemm_published(own_words):
    first, last = operands(**SAMPLES["plain"] | {"gradients": False})
    words = torch.zeros(-(-first[0].shape[0] // 4), dtype=torch.int32) if own_words else None
    published = ts.Arrival.uniform(4, -(-first[0].shape[0] // 4), signals=words)
    out = torch.zeros(first[0].shape[0], 7)
    # Not those that call the op more than once: a chunk is published once.
    torch.library.opcheck(
        torch.ops.tilestream.gemm_published_out.default, (*first, words, ints(published), "mm", out, *last),
        test_utils=("test_autograd_registration", "test_schema"),
    )  # fmt: skip


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
    with FlopCounterMode(display=False) as counter:
        ts.mm(rand(30, 40), rand(40, 50), out=nans(30, 50), scale_a=torch.ones(30, 1))
    assert counter.get_total_flops() == 2 * 30 * 40 * 50


def test_the_graph_of_make_fx_holds_one_op():
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda x, y: ts.matmul(x, y, activation="relu"), tracing_mode="symbolic")(rand(5, 6), rand(6, 7))
    assert [node.target for node in graph.graph.nodes].count(gemm) == 1
    x, y = rand(9, 4), rand(4, 3)
    check(graph(x, y), Maths(x, y, activation="relu"))


def test_first_calls_on_the_cpu_import_nothing_large():
    """Sympy takes a second, of each process that calls anything; Triton 0.2."""
    code = (
        "import sys, torch; there = set(sys.modules); import tilestream as ts; x = torch.ones(2, 8, 8)\n"
        "ts.mm(x[0], x[0]); ts.linear(x, x[0]); ts.bmm(x, x); ts.attention(x[None], x[None], x[None])\n"
        "large = {'sympy', 'triton', 'torch._dynamo', 'torch.utils.flop_counter', 'torch.distributed.tensor'}\n"
        "assert not large & (set(sys.modules) - there), large & (set(sys.modules) - there)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "before",
    ["", "from torch.utils.flop_counter import FlopCounterMode", "ts.mm(x, x)",
     "ts.mm(x, x); import importlib.util; importlib.util.find_spec('torch.utils.flop_counter')"],
)  # fmt: skip
def test_flops_are_counted_whenever_the_counter_is_imported(before):
    code = (
        f"import sys, torch, tilestream as ts; x = torch.ones(4, 4); {before}\nts.mm\n"
        "from torch.utils.flop_counter import FlopCounterMode\n"
        "with FlopCounterMode(display=False) as counter: ts.mm(x, x)\n"
        "assert counter.get_total_flops() == 128, counter.get_total_flops()\n"
        "assert not [one for one in sys.meta_path if type(one).__module__.startswith('tilestream')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
