"""`tilestream.invariant` as users meet it on the CPU: bits of rows, contexts, gradients, compiled functions."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

import tilestream as ts
from tilestream.kernels.cpu import gemm
from tilestream.plan import limit

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _forgets():
    yield
    limit._process.limit = None
    gemm._even.clear()


def rand(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def check_rows(call, a, places=((3, 4), (37, 70))):
    """Rows of ``call(rows)`` have the bits that they have in ``call(a)``."""
    whole = call(slice(None))
    for begin, end in places:
        assert torch.equal(call(slice(begin, end)), whole[begin:end]), (begin, end)
    return whole


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize(("k", "n"), [(33, 16), (64, 600)])
def test_a_row_of_a_product_has_its_own_bits(dtype, layout, k, n):
    a, w = rand(131, k, dtype=dtype), rand(n, k, dtype=dtype)
    b = w.t() if layout == "nt" else w.t().contiguous()
    with ts.invariant():
        made = check_rows(lambda rows: ts.matmul(a[rows], b), a)
    torch.testing.assert_close(made, a @ b, rtol=2e-2 if dtype.itemsize == 2 else 1e-4, atol=1e-1)


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_with_an_epilogue(activation):
    a, b, bias, residual = rand(131, 72), rand(72, 41), rand(41), rand(131, 41)
    with ts.invariant():
        check_rows(lambda rows: ts.matmul(a[rows], b, bias=bias, activation=activation), a)
        check_rows(lambda rows: ts.addmm(residual[rows], a[rows], b, beta=0.3, alpha=1.7), a)
        check_rows(lambda rows: ts.linear(a[rows], b.t().contiguous(), bias), a)


def test_eight_bits_with_scales():
    a, b = rand(131, 64, dtype=torch.float8_e4m3fn), rand(32, 64, dtype=torch.float8_e4m3fn).t()
    scale_a, scale_b = rand(131, 1).abs(), rand(1, 32).abs()
    with ts.invariant():
        check_rows(lambda rows: ts.matmul(a[rows], b, scale_a=scale_a[rows], scale_b=scale_b), a)


@pytest.mark.parametrize("how", [{"schedule": "static"}, {"schedule": "dynamic"}, {"workers": 1}, {"workers": 3}])
def test_whatever_the_schedule_and_the_workers(how):
    a, b = rand(200, 96), rand(96, 700)
    with ts.invariant():
        want = ts.matmul(a, b)
        assert torch.equal(ts.matmul(a, b, **how), want)
        assert torch.equal(ts.matmul(a[5:6], b, **how), want[5:6])


def test_whatever_the_layout_the_neighbours_and_the_arrival():
    a, b = rand(100, 96), rand(96, 70)
    with ts.invariant():
        want = ts.matmul(a, b)
        wide = torch.full((100, 200), float("nan"))
        wide[:, 7:103] = a
        assert torch.equal(ts.matmul(wide[:, 7:103], b), want)
        assert torch.equal(ts.matmul(a.t().contiguous().t(), b), want)
        others = a.clone()
        others[50:] = float("nan")
        assert torch.equal(ts.matmul(others, b)[:50], want[:50])
        arrival = ts.Arrival.uniform(17, 6)
        for chunk in (3, 0, 5, 1, 4, 2):
            arrival.signal(chunk)
        assert torch.equal(ts.matmul(a, b, arrival=arrival), want)


def test_batches():
    a, b = rand(3, 50, 40), rand(3, 40, 30)
    with ts.invariant():
        want = ts.bmm(a, b)
        assert torch.equal(ts.bmm(a[1:2, 4:9], b[1:2]), want[1:2, 4:9])


def test_gradients_are_promised_too():
    w = rand(40, 30)
    x = rand(70, 40).requires_grad_()

    def gradient(rows):
        with ts.invariant():
            made = ts.matmul(x[rows], w)
        return torch.autograd.grad(made, x, torch.ones_like(made))[0][rows]

    assert torch.equal(gradient(slice(8, 13)), gradient(slice(None))[8:13])


def test_a_compiled_function_keeps_it():
    a, b = rand(70, 40), rand(40, 30)
    torch._dynamo.reset()

    @torch.compile(backend="eager", fullgraph=True)
    def inside(a):
        with ts.invariant():
            return ts.matmul(a, b)

    with ts.invariant():
        want = ts.matmul(a, b)
    assert torch.equal(inside(a), want)
    assert torch.equal(inside(a[3:5]), want[3:5])
    around = torch.compile(lambda a: ts.matmul(a, b), backend="eager", fullgraph=True)
    with ts.invariant():
        assert torch.equal(around(a[3:5]), want[3:5])


def test_blocks_threads_and_the_process():
    seen = []
    with ts.invariant():
        other = threading.Thread(target=lambda: seen.append(ts.plan(8, 8, 8).promise))
        other.start()
        other.join(300)
    assert seen == [""]
    ts.invariant(True)
    assert ts.plan(8, 8, 8).promise
    with ts.invariant(False):
        assert not ts.plan(8, 8, 8).promise
        with ts.invariant():
            assert ts.plan(8, 8, 8).promise
    assert ts.plan(8, 8, 8).promise
    ts.invariant(False)
    assert not ts.plan(8, 8, 8).promise
    with pytest.raises(TypeError, match=r"invariant\(1\): it must be True or False"):
        ts.invariant(1)


@pytest.mark.parametrize(
    ("value", "says"), [("1", "True"), ("0", "False"), ("yes", "TILESTREAM_INVARIANT='yes': it is 1")]
)
def test_the_environment(value, says):
    import os

    program = "import tilestream as ts; print(bool(ts.plan(8, 8, 8).promise))"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False,
        env={**os.environ, "TILESTREAM_INVARIANT": value},
    )  # fmt: skip
    assert says in run.stdout + run.stderr


def test_what_cannot_be_promised_is_refused():
    a, b = rand(9, 8), rand(8, 16)
    free = ts.plan(9, 16, 8)
    with ts.invariant():
        with pytest.raises(NotImplementedError, match="stream_k cuts K by the numbers of tiles and workers"):
            ts.matmul(a, b, schedule="stream_k")
        with pytest.raises(NotImplementedError, match=r"float64 under tilestream\.invariant on the CPU"):
            ts.matmul(a.double(), b.double())
        with pytest.raises(NotImplementedError, match=r"tile=\(4, 4\) under tilestream.invariant"):
            ts.plan(9, 16, 8, tile=(4, 4))
        with pytest.raises(ValueError, match="the plan promises nothing"):
            free.run(a, b)
        assert torch.equal(ts.plan(9, 16, 8).run(a, b), ts.matmul(a, b))


def test_a_blas_whose_bits_depend_on_the_place_is_refused(monkeypatch):
    def uneven(a, b, out):
        made = torch.matmul(a, b) if out is None else torch.matmul(a, b, out=out)
        made[-1] += 1e-3 * made[-1].abs() + 1e-3
        return made

    monkeypatch.setattr(gemm, "product", uneven)
    with (
        ts.invariant(),
        pytest.raises(NotImplementedError, match="BLAS gives equal rows of a product of 64 rows differ"),
    ):
        ts.matmul(rand(5, 8), rand(8, 16))


def test_attention_whatever_the_arrival_of_keys():
    q, k, v = (rand(1, 40, heads, 16) for heads in (4, 2, 2))
    with ts.invariant():
        want = ts.attention(q, k, v, causal=True)
        arrival = ts.Arrival.uniform(7, 6)
        for chunk in (3, 0, 5, 1, 4, 2):
            arrival.signal(chunk)
        assert torch.equal(ts.attention(q, k, v, causal=True, arrival=arrival), want)
        assert torch.equal(ts.attention(q[:, 33:], k, v, causal=True), want[:, 33:])


@pytest.mark.parametrize("how", [{}, {"activation": "silu"}, {"activation": "swiglu"}, {"bias": True}], ids=str)
def test_a_row_of_a_group_has_its_bits_whatever_the_groups(how):
    """Its row's number, the sizes of its group and of others, and its group's number differ; and it has those of mm."""
    a, b = rand(90, 48), rand(3, 48, 32)
    how = how | ({"bias": rand(3, 32)} if "bias" in how else {})
    with ts.invariant():
        whole = ts.grouped_mm(a, b, torch.tensor([10, 73, 90], dtype=torch.int32), **how)
        for ends, rows in (((0, 63, 63), slice(10, 73)), ((30, 31, 90), slice(40, 41)), ((1, 9, 30), slice(60, 68))):
            mine = torch.cat([rand(ends[0], 48), a[rows], rand(90, 48)])
            made = ts.grouped_mm(mine, b, torch.tensor(ends, dtype=torch.int32), **how)
            assert torch.equal(made[ends[0] : ends[1]], whole[rows]), ends
        if not how:
            assert torch.equal(ts.mm(a[20:22], b[1]), whole[20:22])


def test_halves_of_a_group_have_their_bits_wherever_torch_shares_them_out():
    """Torch's silu computes the last numbers of a thread's share in another way: those of the row in the middle."""
    b, threads = rand(1, 64, 2200), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for seed in range(20):
            a = torch.randn(77, 64, generator=torch.Generator().manual_seed(seed))
            with ts.invariant():
                whole = ts.grouped_mm(a, b, torch.tensor([77], dtype=torch.int32), activation="swiglu")
                alone = ts.grouped_mm(a[38:39], b, torch.tensor([1], dtype=torch.int32), activation="swiglu")
            assert torch.equal(alone[0], whole[38]), seed
    finally:
        torch.set_num_threads(threads)


def test_groups_of_k_do_not_see_each_other():
    a, b = rand(20, 90), rand(90, 32)
    with ts.invariant():
        whole = ts.grouped_mm(a, b, torch.tensor([10, 73, 90], dtype=torch.int32))
        alone = ts.grouped_mm(a[3:5, 10:], b[10:], torch.tensor([63], dtype=torch.int32))
        assert torch.equal(alone[0], whole[1, 3:5])


def test_the_blas_is_looked_at_once_for_each_kind_of_call(monkeypatch):
    monkeypatch.setattr(gemm, "_even", {})
    a, b = (torch.ones(32, 32, dtype=torch.bfloat16) for _ in range(2))
    with ts.invariant():
        for _ in range(2):
            ts.mm(a, b)
            ts.mm(a, b, out_dtype=torch.float32)
    assert len(gemm._even) == 2, "16 bits are added up otherwise where the output has more"
