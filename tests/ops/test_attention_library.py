"""The registered ops of attention: opcheck, fake and meta, torch.compile, gradients, FLOP counts."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import tilestream as ts
import tilestream.ops  # the package itself imports them on first use
from attention_maths import FEATURES, Case, attention_by_torch, call_of
from tilestream.core.operands import AttentionOperands
from tilestream.ops import attention_library
from tilestream.ops.attention_operands import Settings

ops = torch.ops.tilestream
CASES = {
    "dense": Case((5,), (7, 7), (2, 1), (8, 16), "causal"),
    "sinks": Case((5,), (7, 7), (2, 1), (8, 8), "all"),
    "packed": Case((5, 2), (7, 3), (2, 1), (8, 8), "causal", "packed"),
    "paged": Case((5,), (7, 3), (2, 1), (8, 8), "causal", "paged", 4),
    "8 bits": Case((5,), (7, 3), (2, 1), (8, 8), "causal", "lengths", dtype=torch.float8_e4m3fn),
}


def arguments(case: Case, *, gradients: bool = False, return_lse: bool = True) -> tuple:
    call = call_of(case)
    sinks = call.options.get("sinks")
    inputs = AttentionOperands(**call.tensors, sinks=None if sinks is None else sinks.float()).inputs()
    if gradients:
        inputs = [x.requires_grad_() if x is not None and i < 4 else x for i, x in enumerate(inputs)]
    left = call.options.get("window", (None, None))[0]
    s = Settings(True, "bottom_right", -1 if left is None else left, -1, call.options.get("softcap", 0.0), 0.3,
                 return_lse=return_lse)  # fmt: skip
    return *inputs, *s


@pytest.mark.parametrize("name", ["dense", "sinks", "paged"])
def test_opcheck(name):
    gradients = name in ("dense", "sinks", "packed")
    torch.library.opcheck(ops.attention.default, arguments(CASES[name], gradients=gradients))
    if not gradients:
        return
    args = arguments(CASES[name])
    out, lse = ops.attention.default(*args)
    torch.library.opcheck(ops.attention_backward.default, (torch.ones_like(out), None, out, lse, *args))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_opcheck_forward(layout):
    q, k, v = arguments(CASES["dense"])[:3]
    numbers = (True, "top_left", 0.3, layout, True)
    torch.library.opcheck(ops.attention_forward.default, (q, k, v, *numbers))
    s = Settings(True, "top_left", -1, -1, 0.0, 0.3, layout=layout, return_lse=True)
    full = ops.attention(q, k, v, *[None] * 8, *s)
    for one, other in zip(ops.attention_forward(q, k, v, *numbers), full, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


@pytest.mark.parametrize("name", ["dense", "paged"])
def test_opcheck_out(name):
    args = arguments(CASES[name])
    out, lse = (torch.zeros_like(x) for x in ops.attention.default(*args))
    torch.library.opcheck(ops.attention_out.default, (*args, out, lse))


def test_an_op_refuses_an_lse_that_does_not_fit():
    args = arguments(CASES["dense"])
    out, lse = (torch.zeros_like(x) for x in ops.attention.default(*args))
    without = arguments(CASES["dense"], return_lse=False)
    for given, wrong in ((args, lse[:, :1].clone()), (args, lse.mT.contiguous()), (args, None), (without, lse)):
        with pytest.raises(
            ValueError, match=r"lse: given with return_lse=True, and only with it, of shape \[2, 2, 5\]"
        ):
            ops.attention_out.default(*given, out, wrong)
    assert not out.any(), "nothing was computed"


def test_opcheck_arriving():
    args = arguments(CASES["dense"])
    arrival = ts.Arrival.uniform(4, 4)
    for chunk in range(4):
        arrival.signal(chunk)
    ints = [arrival.key, arrival.epoch, arrival.pivot, arrival.num_chunks, arrival.rows_per_chunk]
    torch.library.opcheck(ops.attention_arriving.default, (*args, None, ints, 5.0))
    out, lse = (torch.zeros_like(x) for x in ops.attention.default(*args))
    torch.library.opcheck(ops.attention_arriving_out.default, (*args, None, ints, 5.0, out, lse))


def test_fake_and_meta_tensors_agree_with_real_ones():
    for name, case in CASES.items():
        call = call_of(case)
        real = ts.attention(**call.tensors, return_lse=True)
        with FakeTensorMode() as mode:
            fake = ts.attention(**{k: mode.from_tensor(x) for k, x in call.tensors.items()}, return_lse=True)
        meta = ts.attention(**{k: x.to("meta") for k, x in call.tensors.items()}, return_lse=True)
        for other in (fake, meta):
            for x, y in zip(other, real, strict=True):
                assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride()), name


@pytest.mark.parametrize("device", ["cuda", "meta", "cpu"])
def test_sinks_of_16_bits_lie_anywhere(device):
    """The op takes contiguous ones; others are converted."""
    with FakeTensorMode(), torch.no_grad():
        q = torch.empty(1, 5, 4, 16, device=device, dtype=torch.bfloat16)
        for dtype in (torch.bfloat16, torch.float16):
            new = functools.partial(torch.empty, device=device, dtype=dtype)
            for sinks in (new(4), new(1).expand(4), new(4, 2).select(1, 1)):
                assert ts.attention(q, q, q, sinks=sinks).shape == q.shape


@pytest.mark.parametrize("name", ["dense", "packed"])
def test_compiled_whole(name):
    call = call_of(CASES[name])
    compiled = torch.compile(
        lambda **x: ts.attention(**x, causal=True, return_lse=True), fullgraph=True, backend="aot_eager"
    )
    call.check(*compiled(**call.tensors))


def test_compiled_with_gradients():
    q, k, v = (torch.randn(1, 9, 2, 8, requires_grad=True) for _ in range(3))
    compiled = torch.compile(lambda *x: ts.attention(*x, causal=True).sum(), fullgraph=True, backend="aot_eager")
    compiled(q, k, v).backward()
    mine = q.grad.clone()
    q.grad = None
    ts.attention(q, k, v, causal=True).sum().backward()
    torch.testing.assert_close(mine, q.grad)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("how", ["dense", "packed", "lengths"])
def test_gradients(how, features):
    queries, keys = ((9,), (11, 11)) if how == "dense" else ((9, 5), (11, 4))
    call = call_of(Case(queries if how == "packed" else queries[:1], keys, (4, 2), (8, 16), features, how))
    call.tensors |= {name: call.tensors[name].double().nan_to_num().requires_grad_() for name in "qkv"}
    leaves = {name: call.tensors[name] for name in "qkv"}
    options = dict(call.options)
    if "sinks" in options:
        leaves["sinks"] = options["sinks"] = options["sinks"].double().requires_grad_()
    out, lse = ts.attention(**call.tensors, **options, return_lse=True)
    weight, weight_lse = torch.randn_like(out), torch.randn_like(lse).masked_fill(lse == -math.inf, 0.0)
    ((out * weight).sum() + (lse.masked_fill(lse == -math.inf, 0.0) * weight_lse).sum()).backward()
    mine = {name: x.grad for name, x in leaves.items()}
    for x in leaves.values():
        x.grad = None
    total, row, key = 0.0, 0, 0
    for i, (one, keys, _) in enumerate(call.sequences):
        if how == "packed":
            at, of, logs_of = (
                slice(row, row + len(one)),
                slice(key, key + len(keys)),
                weight_lse[row : row + len(one)].t(),
            )
            row, key = at.stop, of.stop
        else:
            at, of, logs_of = (i,), (i, slice(0, len(keys))), weight_lse[i]
        o, logs = attention_by_torch(leaves["q"][at], leaves["k"][of], leaves["v"][of], **options)
        total = total + (o * weight[at]).sum() + (logs.masked_fill(logs == -math.inf, 0.0) * logs_of).sum()
    total.backward()
    for name, x in leaves.items():
        # Not of rows that see nothing: there torch's own gradient of a logarithm of 0 is NaN.
        torch.testing.assert_close(mine[name], x.grad.nan_to_num(), rtol=1e-9, atol=1e-9)


def test_rows_that_see_nothing_have_no_gradient_but_of_their_sink():
    q, k = torch.randn(1, 5, 1, 8, requires_grad=True), torch.randn(1, 0, 1, 8)
    sinks = torch.randn(1, requires_grad=True)
    out, lse = ts.attention(q, k, k, sinks=sinks, return_lse=True)
    (out.sum() + lse.sum()).backward()
    assert not q.grad.any()
    assert sinks.grad.item() == pytest.approx(5.0)


def test_autocast():
    call = call_of(CASES["dense"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ts.attention(**call.tensors).dtype == torch.bfloat16


def test_flops_are_torchs_own():
    q, k, v = torch.ones(2, 4, 6, 8), torch.ones(2, 4, 10, 8), torch.ones(2, 4, 10, 8)
    with FlopCounterMode(display=False) as torchs:
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
    with FlopCounterMode(display=False) as ours:
        ts.attention(q, k, v, layout="bhsd")
    assert ours.get_total_flops() == 2 * 2 * 4 * 6 * 10 * (8 + 8)
    assert torchs.get_total_flops() in (0, ours.get_total_flops())  # it counts some of its kernels


def test_the_short_op_of_graphs_takes_numbers_alone():
    """A bound that is a symbol of the graph is no default, whatever it is compared with."""

    class Symbol(int):
        pass

    q, k, v = (torch.empty(2, 8, 4, 16) for _ in range(3))
    settings = attention_library._settings(False, "bottom_right", 0.25, "bshd", False)
    others = [None] * (len(attention_library._INPUTS) - 3)
    found = attention_library._in_graphs(q, k, v, *others, *settings)
    assert found is not None
    assert found[0] is attention_library.attention_forward_op
    for name in ("left", "right", "max_seqlen_q", "max_seqlen_k"):
        symbolic = settings._replace(**{name: Symbol(getattr(settings, name))})
        assert attention_library._in_graphs(q, k, v, *others, *symbolic) is None, name
