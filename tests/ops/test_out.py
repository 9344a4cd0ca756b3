"""``out=``: where it may lie, what it may not overlap, and that it counts as written."""

from __future__ import annotations

import warnings

import pytest
import torch

import tilestream as ts
from error_rule import Maths, check, nans, rand

pytestmark = pytest.mark.usefixtures("small_tiles")

M, N, K = 35, 37, 40

HOW = [{}, {"workers": 2}, {"workers": 3, "schedule": "static"}, {"workers": 3, "schedule": "stream_k"}]

#: Ways an [M, N] output may lie: the whole buffer, and the view of it that is passed.
LAYOUTS = {
    "contiguous": lambda dtype: (whole := nans(M, N, dtype=dtype), whole),
    "transposed": lambda dtype: (whole := nans(N, M, dtype=dtype), whole.t()),
    "row slice": lambda dtype: (whole := nans(M + 5, N, dtype=dtype), whole[2 : M + 2]),
    "column slice": lambda dtype: (whole := nans(M, N + 9, dtype=dtype), whole[:, 4 : N + 4]),
    "every other": lambda dtype: (whole := nans(2 * M, 3 * N, dtype=dtype), whole[::2, 1::3]),
    "offset by one": lambda dtype: (whole := nans(M * N + 1, dtype=dtype), whole[1:].view(M, N)),
}


def outside(whole: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """The elements of ``whole`` that are not in ``view``."""
    mask = torch.ones_like(whole, dtype=torch.bool)
    torch.as_strided(mask, view.shape, view.stride(), view.storage_offset()).fill_(False)
    return whole[mask]


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts(layout, dtype, how):
    a, b, bias = rand(M, K, dtype=dtype), rand(K, N, dtype=dtype), rand(N, dtype=dtype)
    for options in ({}, {"bias": bias, "activation": "relu"}):
        whole, out = LAYOUTS[layout](dtype)
        result = ts.matmul(a, b, out=out, **options, **how)
        assert result is out
        check(out, Maths(a, b, **options))
        assert outside(whole, out).isnan().all(), "written outside the output"


def test_batched_outputs():
    a, b = rand(3, M, K), rand(3, K, N)
    big = nans(6, M, N + 4)
    check(ts.bmm(a, b, out=big[::2, :, 2:-2], workers=2), Maths(a, b))
    assert big[1::2].isnan().all()
    permuted = nans(N, 3, M).permute(1, 2, 0)
    check(ts.bmm(a, b, out=permuted, workers=2), Maths(a, b))
    rows = nans(3, M, N)
    check(ts.matmul(a, b[0], out=rows, workers=2), Maths(a, b[0]))
    scalar = nans()
    made = ts.matmul(a[0, 0], b[0, :, 0], out=scalar)
    assert made is scalar
    # As a matrix: of one number, torch's dot may happen to be nearer by more than the rule allows.
    check(made.view(1, 1), Maths(a[0, :1], b[0, :, :1]))
    vector = nans(2 * M)[::2]
    check(ts.matmul(a[0], b[0, :, 0], out=vector, workers=2), Maths(a[0], b[0, :, 0]))


#: Ways a [2, 3, 18, 20] output may lie: the whole buffer, and the view of it that is passed.
BATCHED = {
    "column-major": lambda: (whole := nans(2, 3, 20, 18), whole.mT),
    "rows apart": lambda: (whole := nans(2, 3, 36, 20), whole[:, :, ::2]),
    "batches exchanged": lambda: (whole := nans(3, 2, 18, 20), whole.transpose(0, 1)),
    "reversed": lambda: (whole := nans(20, 18, 3, 2), whole.permute(3, 2, 1, 0)),
    "every other batch": lambda: (whole := nans(2, 6, 18, 21), whole[:, 1::2, :, 1:]),
}


@pytest.mark.parametrize("how", HOW[:2], ids=str)
@pytest.mark.parametrize("form", ["matmul", "linear", "vector"])
@pytest.mark.parametrize("layout", BATCHED)
def test_batched_layouts(layout, form, how):
    a, b, bias, residual = rand(2, 3, 18, K), rand(2, 3, K, 20), rand(20), rand(18, 20)
    whole, out = BATCHED[layout]()
    if form == "linear":  # one matrix for all batches: rows of all of them, where the output allows it
        b = b[0, 0]
        maths = Maths(a, b, bias, residual.expand(2, 3, 18, 20), activation="relu")
        result = ts.linear(a, b.t(), bias, residual=residual, activation="relu", out=out, **how)
    elif form == "matmul":
        maths = Maths(a, b, bias, residual.expand(2, 3, 18, 20), activation="relu")
        result = ts.matmul(a, b, bias=bias, residual=residual, activation="relu", out=out, **how)
    else:
        out, maths = out[..., 3], Maths(a, b[0, 0, :, 0])
        result = ts.matmul(a, b[0, 0, :, 0], out=out, **how)
    assert result is out
    check(out, maths)
    assert outside(whole, out).isnan().all(), "written outside the output"
    a.neg_()  # an equal call
    if form == "vector":
        check(ts.matmul(a, b[0, 0, :, 0], out=out, **how), Maths(a, b[0, 0, :, 0]))


def test_strided_outputs_are_still_checked_for_overlap():
    a, b, biases = rand(2, 3, 18, K), rand(K, 20), rand(3, 2, 18, 20)
    for name, tensor in {"a": a, "bias": biases}.items():
        shared = tensor.reshape(-1)[: biases.numel()].view(3, 2, 18, 20).transpose(0, 1)
        before = shared.clone()
        with pytest.raises(ValueError, match=rf"out: overlaps {name} in memory"):
            ts.matmul(a, b, bias=biases[2, 1, 7], out=shared)
        assert torch.equal(shared, before)
    into = rand(3, 2, 18, 20).transpose(0, 1)  # the residual may be the output, however it lies
    maths = Maths(a, b, None, into.clone(), beta=0.5)
    check(ts.matmul(a, b, residual=into, beta=0.5, out=into, workers=2), maths)


def test_strided_outputs_of_inference_mode():
    a, b = rand(2, 3, 18, K), rand(K, 20)
    with torch.inference_mode():
        out = nans(3, 2, 18, 20).transpose(0, 1)
        ts.matmul(a, b, out=out)
        check(out, Maths(a, b))


@pytest.mark.parametrize("how", ["arrival", "publish"])
def test_what_arrives_or_is_published_is_written_in_place(how):
    a, b = rand(2, 3, 18, K), rand(2, 3, K, 20)
    with pytest.raises(
        ValueError,
        match=r"out: stride \(.*\) for shape \[2, 3, 18, 20\]: its leading dimensions cannot be seen as one, and with "
        r"arrival= or publish= it is written in place; give a contiguous output and copy it",
    ):
        ts.matmul(a, b, out=nans(3, 2, 18, 20).transpose(0, 1), **{how: ts.Arrival.uniform(18, 6)})
    chunks = ts.Arrival.uniform(18, 6)
    for chunk in range(6):
        chunks.signal(chunk)
    whole, out = BATCHED["column-major"]()
    check(ts.matmul(a, b[0, 0], out=out, arrival=chunks, workers=2), Maths(a, b[0, 0]))
    assert not whole.isnan().any()


@pytest.mark.parametrize("shape", [(0,), (0, N), (3, 0, 7)], ids=str)
@pytest.mark.parametrize("op", ["mm", "bmm", "matmul", "vector", "addmm", "linear"])
def test_an_output_of_no_elements_is_resized(op, shape):
    a, b, bias, residual = rand(2, M, K), rand(2, K, N), rand(N), rand(M, N)
    call, maths = {
        "mm": (lambda out: ts.mm(a[0], b[0], out=out), Maths(a[0], b[0])),
        "bmm": (lambda out: ts.bmm(a, b, out=out, workers=2), Maths(a, b)),
        "matmul": (lambda out: ts.matmul(a, b[0], out=out), Maths(a, b[0])),
        "vector": (lambda out: ts.matmul(a[0, 0], b, out=out), Maths(a[0, 0], b)),
        "addmm": (lambda out: ts.addmm(residual, a[0], b[0], out=out), Maths(a[0], b[0], None, residual)),
        "linear": (lambda out: ts.linear(a, b[0].t(), bias, out=out), Maths(a, b[0], bias)),
    }[op]
    for _ in range(2):  # the second is equal to the first
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns of outputs that have elements only
            out = torch.empty(shape)
            assert call(out) is out
        check(out, maths)
        assert out.is_contiguous()


def test_an_output_is_resized_where_all_else_is_right():
    out = torch.empty(0)
    for bad in ({"bias": rand(N + 1)}, {"scale_a": torch.ones(3)}, {"out_dtype": torch.float16}):
        with pytest.raises((ValueError, TypeError)):
            ts.matmul(rand(M, K), rand(K, N), out=out, **bad)
        assert out.shape == (0,)
    a = rand(M, M)
    with pytest.raises(ValueError, match="out: overlaps a in memory"):
        ts.matmul(a, rand(M, M), out=a[:0])
    chunks = ts.Arrival.uniform(M, 1)
    chunks.signal(0)
    check(ts.matmul(a, rand(M, N, seed=2), out=out, arrival=chunks), Maths(a, rand(M, N, seed=2)))


def test_a_compiled_function_resizes_nothing():
    @torch.compile(backend="eager", fullgraph=True)
    def compiled(a, b, out):
        return ts.matmul(a, b, out=out)

    with pytest.raises(
        Exception, match=r"out has shape \[0\]; the result has .*no output is resized in a compiled function"
    ):
        compiled(rand(M, K), rand(K, N), torch.empty(0))


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_residual_is_out(how, activation, batch):
    for dtype in (torch.float32, torch.float16):
        a, b = rand(*batch, M, K, dtype=dtype), rand(*batch, K, N, dtype=dtype)
        for out in (rand(*batch, M, N, dtype=dtype, seed=3), rand(*batch, N, M, dtype=dtype, seed=3).mT):
            maths = Maths(a, b, None, out.clone(), beta=0.5, activation=activation)
            assert ts.matmul(a, b, residual=out, out=out, beta=0.5, activation=activation, **how) is out
            check(out, maths)
    if not batch:
        maths = Maths(a, b, None, out.clone(), alpha=2.0, beta=-1.0, activation=activation)
        check(ts.addmm(out, a, b, alpha=2, beta=-1, out=out, activation=activation, **how), maths)


@pytest.mark.parametrize("how", [{"workers": 1}, {"workers": 2}], ids=str)
@pytest.mark.parametrize("kind", ["rows shifted", "columns shifted", "transposed", "one row for all"])
def test_residual_overlaps_out_elsewhere(kind, how):
    # A tile would overwrite what another tile still adds. torch.addmm refuses too.
    size = 64
    buffer = rand(size + 1, size + 1)
    a, b = rand(size, K), rand(K, size)
    residual, out = {
        "rows shifted": (buffer[:-1, 1:], buffer[1:, 1:]),
        "columns shifted": (buffer[1:, :-1], buffer[1:, 1:]),
        "transposed": (buffer[1:, 1:].t(), buffer[1:, 1:]),
        "one row for all": (buffer[1:2, 1:].expand(size, size), buffer[1:, 1:]),
    }[kind]
    before = buffer.clone()
    with pytest.raises(ValueError, match=r"out: overlaps residual in memory"):
        ts.matmul(a, b, residual=residual, out=out, **how)
    assert torch.equal(buffer, before)


#: What is given beside or instead of a, b and a fresh output; the exception, and what it says.
REFUSED = {
    "shape": (lambda: {"out": nans(N, M)}, ValueError, rf"out has shape \[{N}, {M}\]; the result has \[{M}, {N}\]"),
    "a batch": (lambda: {"out": nans(1, M, N)}, ValueError, rf"out has shape \[1, {M}, {N}\]"),
    "one element": (
        lambda: {"out": torch.empty(1)}, ValueError,
        r"out has shape \[1\]; the result has .*: give an out of that shape, or one of no elements, which is resized",
    ),
    "dtype": (
        lambda: {"out": nans(M, N, dtype=torch.float16)}, TypeError,
        r"out is torch.float16, the result torch.float32; pass out_dtype=torch.float16",
    ),
    "out_dtype": (
        lambda: {"out_dtype": torch.float16}, TypeError, r"out is torch.float32, the result torch.float16",
    ),
    "expanded": (
        lambda: {"out": nans(1, N).expand(M, N)}, ValueError,
        r"out: stride .* several elements share a place; pass out.clone\(\)",
    ),
    "a": (
        lambda: {"a": (x := rand(M, M)), "b": rand(M, M), "out": x}, ValueError,
        r"out: overlaps a in memory; give an output of its own",
    ),
    "b": (lambda: {"a": rand(M, M), "b": (x := rand(M, M)), "out": x}, ValueError, r"out: overlaps b in memory"),
    "a row further": (
        lambda: {"a": (x := rand(M + 1, M))[1:], "b": rand(M, M), "out": x[:-1]}, ValueError,
        r"out: overlaps a in memory",
    ),
    "transposed": (
        lambda: {"a": (x := rand(M, M)).t(), "b": rand(M, M), "out": x}, ValueError, r"out: overlaps a in memory",
    ),
    "bias": (lambda: {"bias": (x := rand(M, N))[3], "out": x}, ValueError, r"out: overlaps bias in memory"),
    "device": (
        lambda: {"out": torch.empty(M, N, device="meta")}, ValueError, r"matmul: out is on meta, the others on cpu",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_errors_name_out_and_come_before_anything_is_written(name):
    make, error, message = REFUSED[name]
    given = {"a": rand(M, K), "b": rand(K, N), "out": nans(M, N), **make()}
    out, before = given["out"], given["out"].clone()
    with pytest.raises(error, match=message):
        ts.matmul(given.pop("a"), given.pop("b"), workers=2, **given)
    assert out.is_meta or torch.equal(before.nan_to_num(), out.nan_to_num())


@pytest.mark.parametrize("which", ["a", "b", "bias", "residual", "out"])
def test_out_has_no_gradient_and_says_so(which):
    tensors = {"a": rand(M, K), "b": rand(K, N), "bias": rand(N), "residual": rand(M, N), "out": nans(M, N)}
    tensors[which].requires_grad_()
    with pytest.raises(
        RuntimeError, match=r"matmul: out= has no gradient, .*leave out= away, or use torch.no_grad\(\)"
    ):
        ts.matmul(**tensors)
    with torch.no_grad():
        ts.matmul(**tensors, workers=2)
    tensors["out"].requires_grad_(False)
    tensors = {name: t.detach() for name, t in tensors.items()}
    check(tensors["out"], Maths(*(tensors[name] for name in ("a", "b", "bias", "residual"))))


@pytest.mark.parametrize("how", HOW, ids=str)
def test_writing_out_counts_as_a_change_for_autograd(how):
    # A tensor that autograd keeps for a backward pass, then overwritten: the backward pass must notice.
    kept, weight = rand(M, N), rand(M, N).requires_grad_()
    loss = (kept * weight).sum()
    ts.matmul(rand(M, K), rand(K, N), out=kept, **how)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_empty_outputs():
    for m, n in ((0, 5), (5, 0), (0, 0)):
        out = torch.empty(m, n)
        assert ts.matmul(torch.empty(m, 3), torch.empty(3, n), out=out) is out


def test_any_two_views_of_one_buffer_are_refused_or_right():
    # Whatever the strides: an answer that is given is the right one.
    import random

    chance, refused, right = random.Random(0), 0, 0

    def view(buffer, rows, columns):
        while True:
            stride = [chance.choice([1, 2, 3, 5, 7, 9, 12, 20, 36, 40]) for _ in range(2)]
            room = buffer.numel() - ((rows - 1) * stride[0] + (columns - 1) * stride[1] + 1)
            if room >= 0:
                return buffer.as_strided((rows, columns), stride, chance.randint(0, room))

    for seed in range(400):
        buffer = rand(600, seed=seed)
        m, n, k = (chance.randint(1, 20) for _ in range(3))
        out, a, b, residual = view(buffer, m, n), view(buffer, m, k), view(buffer, k, n), view(buffer, m, n)
        if len(set(torch.arange(600).as_strided(out.shape, out.stride()).flatten().tolist())) < m * n:
            continue  # an output that meets itself: torch cannot always tell either
        which = chance.choice(["a", "b", "residual"])
        a, b = a if which == "a" else a.clone(), b if which == "b" else b.clone()
        residual = residual if which == "residual" else residual.clone()
        maths = Maths(a.clone(), b.clone(), None, residual.clone())
        complaint = ""
        try:
            ts.matmul(a, b, residual=residual, out=out, workers=2)
        except ValueError as error:
            complaint = str(error)
        if complaint:
            assert f"out: overlaps {which}" in complaint
            refused += 1
        else:
            check(out.clone(), maths)
            right += 1
    assert refused > 50
    assert right > 50


def test_views_of_one_buffer_beside_each_other():
    # As torch allows it: the input in the first columns, the output in the others (a growing feature buffer); or rows.
    buffer, b, residual = rand(M, K + N), rand(K, N), rand(2 * M, N, seed=4)
    a, maths = buffer[:, :K], Maths(buffer[:, :K].clone(), b, None, residual[:M].clone())
    check(ts.matmul(a, b, residual=residual[:M], out=residual[M:], workers=2), maths)
    ts.matmul(a, b, out=buffer[:, K:], workers=2)
    check(buffer[:, K:].clone(), Maths(maths.a, b))
