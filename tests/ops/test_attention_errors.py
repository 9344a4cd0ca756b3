"""What `tilestream.attention` refuses, and in which words: before anything is computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tilestream as ts
from tilestream.ops import attention_request

with torch.inference_mode():
    FROZEN = torch.zeros(2, 6, 4, 16)


def tensors(**change):
    given = {"q": torch.zeros(2, 6, 4, 8), "k": torch.zeros(2, 9, 2, 8), "v": torch.zeros(2, 9, 2, 16)}
    return {**given, **change}


def packed(**change):
    given = {
        "q": torch.zeros(6, 4, 8), "k": torch.zeros(9, 2, 8), "v": torch.zeros(9, 2, 8),
        "cu_seqlens_q": torch.tensor([0, 2, 6], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 4, 9], dtype=torch.int32),
    }  # fmt: skip
    return {**given, **change}


def paged(**change):
    given = {
        "q": torch.zeros(2, 6, 4, 8), "k": torch.zeros(5, 4, 2, 8), "v": torch.zeros(5, 4, 2, 8),
        "block_table": torch.tensor([[0, 3], [1, 2]], dtype=torch.int32),
        "seqlens_k": torch.tensor([5, 8], dtype=torch.int32),
    }  # fmt: skip
    return {**given, **change}


ONE = torch.tensor([1, 2], dtype=torch.int32)
CASES = {
    "no tensor": (tensors(q=[1]), TypeError, r"attention: q is a list; it must be a torch\.Tensor"),
    "dtype": (tensors(q=torch.zeros(2, 6, 4, 8, dtype=torch.int8)), TypeError, r"q is torch\.int8; attention takes"),
    "dtypes": (tensors(k=torch.zeros(2, 9, 2, 8).half()), TypeError, r"q is torch\.float32, k is torch\.float16"),
    "dimensions": (tensors(q=torch.zeros(6, 4, 8)), ValueError, r"q has shape \[6, 4, 8\]; it must be \[B, S, H, D\]"),
    "columns differ": (tensors(k=torch.zeros(2, 9, 2, 16)), ValueError, "q has head dim 8, k has 16"),
    "columns": (
        {name: torch.zeros(1, 3, 1, 12) for name in "qkv"}, ValueError,
        "q has head dim 12; it must be a multiple of 8, at most 256: pad with zeros",
    ),
    "k and v": (tensors(v=torch.zeros(2, 8, 2, 8)), ValueError, "differ in more than the head dim"),
    "heads": (tensors(q=torch.zeros(2, 300, 3, 8)), ValueError, "q has 3 heads, k has 2; each head of keys serves"),
    "batches": (tensors(q=torch.zeros(3, 6, 4, 8)), ValueError, "k has 2 sequences, q has 3"),
    "strides": (
        tensors(k=torch.zeros(2, 9, 8, 2).transpose(2, 3)), ValueError,
        r"k has strides .*; a head's elements must be contiguous: k\.contiguous\(\)",
    ),
    "None": (tensors(k=None), TypeError, r"attention: k is None; it must be a torch\.Tensor"),
    "no columns": (
        {name: torch.zeros(1, 3, 1, 0) for name in "qkv"}, ValueError, "q has head dim 0; it must be a multiple",
    ),
    "wide window": (
        tensors(window=(2**70, 0)), ValueError,
        r"window=\(1180591620717411303424, 0\); a side is a whole number of keys, not negative and at most 2\*\*30",
    ),
    "long bound": (packed(max_seqlen_q=2**70), ValueError, r"max_seqlen_q=1180591620717411303424; .* at most 2\*\*30"),
    "too many workers": (tensors(workers=2**70), ValueError, r"workers=1180591620717411303424; it must be a positive"),
    "layout": (tensors(layout="sbhd"), ValueError, "layout='sbhd'; it must be one of bshd, bhsd"),
    "many heads": (
        {name: torch.zeros(1, 8, 512, 64) for name in "qkv"}, ValueError,
        r"layout='bshd' is \[B, S, H, D\], so q \[1, 8, 512, 64\] has 512 heads of 8 rows.*pass layout='bhsd'",
    ),
    "changed places": (
        {"q": torch.zeros(1, 4, 9, 8), "k": torch.zeros(1, 2, 7, 8), "v": torch.zeros(1, 2, 7, 8)}, ValueError,
        "which does not divide them; rows and heads seem to have changed places: pass layout='bhsd'",
    ),
    "packed bhsd": (packed(layout="bhsd"), ValueError, "layout='bhsd' with packed sequences"),
    "causal": (tensors(causal="lower"), ValueError, "causal='lower'; it must be False, True"),
    "an array for causal": (tensors(causal=np.ones((6, 4))), ValueError, r"causal=array.*; it must be False, True"),
    "window": (tensors(window=3), ValueError, r"window=3; it must be \(left, right\)"),
    "window side": (tensors(window=(-2, 1)), ValueError, r"window=\(-2, 1\); a side is a whole number"),
    "softcap": (tensors(softcap=0.0), ValueError, r"softcap=0\.0; it must be finite and positive, or None"),
    "a scale beyond every float": (tensors(scale=10**400), ValueError, "scale=10{400}; it must be finite, or None"),
    "scale": (tensors(scale=float("nan")), ValueError, "scale=nan; it must be finite, or None"),
    "scale of no number": (tensors(scale="1"), TypeError, "scale='1'; it must be a number, or None"),
    "scale is a bool": (tensors(scale=True), TypeError, "scale=True; it must be a number, or None"),
    "softcap is an array": (tensors(softcap=np.array(2.0)), TypeError, r"softcap=array\(2\.\); it must be a number"),
    "return_lse is a number": (tensors(return_lse=1), TypeError, "attention: return_lse=1; it must be True or False"),
    "return_lse of NumPy": (tensors(return_lse=np.True_), TypeError, r"return_lse=\S*True_?; it must be True or False"),
    "scales": (tensors(scale_q=torch.zeros(3)), ValueError, r"scale_q has shape \[3\]; it has one element"),
    "scales' dtype": (tensors(scale_k=torch.zeros(2).half()), TypeError, r"scale_k is torch\.float16; scales are"),
    "sinks": (tensors(sinks=torch.zeros(2)), ValueError, r"sinks has shape \[2\]; it must be \[4\]"),
    "sinks' dtype": (tensors(sinks=ONE), TypeError, r"sinks is torch\.int32; sinks are scores"),
    "lists' dtype": (
        packed(cu_seqlens_q=torch.tensor([0, 2, 6])), TypeError,
        r"cu_seqlens_q is torch\.int64; it must be torch\.int32: cu_seqlens_q\.int\(\)",
    ),
    "keys packed alone": (
        {**packed(), "cu_seqlens_q": None, "q": torch.zeros(2, 3, 4, 8)}, ValueError,
        "cu_seqlens_k= without cu_seqlens_q=",
    ),
    "lengths of packed keys": (packed(seqlens_k=ONE), ValueError, "seqlens_k= with cu_seqlens_k="),
    "pages without lengths": (paged(seqlens_k=None), ValueError, "block_table= without seqlens_k="),
    "page size": (
        paged(k=torch.zeros(5, 3, 2, 8), v=torch.zeros(5, 3, 2, 8)), ValueError,
        "has pages of 3 keys; a page has a power of two",
    ),
    "table": (paged(block_table=ONE), ValueError, r"block_table has shape \[2\]; it must be \[2, pages of a"),
    "length outside": (
        paged(seqlens_k=torch.tensor([5, 9], dtype=torch.int32)), ValueError,
        r"seqlens_k\[1\] is 9; a sequence has from 0 to 8 keys here",
    ),
    "page outside": (
        paged(block_table=torch.tensor([[0, 5], [1, 2]], dtype=torch.int32)), ValueError,
        r"block_table\[0\] names pages 0 to 5; there are 5, counted from 0",
    ),
    "falling": (
        packed(cu_seqlens_q=torch.tensor([0, 4, 2], dtype=torch.int32)), ValueError,
        r"cu_seqlens_q\[2\] is 2, after 4; cumulative lengths do not fall",
    ),
    "first": (
        packed(cu_seqlens_k=torch.tensor([1, 4, 9], dtype=torch.int32)), ValueError,
        r"cu_seqlens_k\[0\] is 1; the first sequence begins at row 0",
    ),
    "beyond": (
        packed(cu_seqlens_k=torch.tensor([0, 4, 10], dtype=torch.int32)), ValueError,
        r"cu_seqlens_k\[-1\] is 10; k has 9 rows",
    ),
    "longer than said": (packed(max_seqlen_q=3), ValueError, "max_seqlen_q=3; sequence 1 has 4 rows"),
    "bound without a list": (tensors(max_seqlen_k=3), ValueError, "max_seqlen_k=3 without cu_seqlens_k="),
    "schedule": (tensors(schedule="stream_k"), ValueError, "schedule='stream_k'; it must be one of auto, static"),
    "workers": (tensors(workers=0), ValueError, "workers=0"),
    "deadline": (tensors(deadline=-1.0), ValueError, "deadline=-1"),
    "out's shape": (tensors(out=torch.zeros(2, 6, 4, 8)), ValueError, r"out has shape .*; the result has \[2, 6, 4, 1"),
    "out's dtype": (tensors(out=torch.zeros(2, 6, 4, 16).half()), TypeError, r"out is torch\.float16, the result"),
    "out negated": (
        tensors(out=torch._neg_view(torch.zeros(2, 6, 4, 16))), ValueError, "attention: out is a negated view",
    ),
    "out of inference mode": (
        tensors(out=FROZEN), RuntimeError, "attention: out: Inplace update to inference tensor outside InferenceMode",
    ),
    "out quantized": (
        tensors(out=torch.quantize_per_tensor(torch.zeros(2, 6, 4, 16), 0.1, 0, torch.qint8)), TypeError,
        r"out is torch.qint8, a quantized tensor: out.dequantize\(\)",
    ),
    "sparse": (tensors(q=torch.zeros(2, 6, 4, 8).to_sparse()), TypeError, "q has layout torch.sparse_coo; tensors are"),
    "out arrives": (
        tensors(out=torch.zeros(2, 6, 16, 4).mT, arrival=ts.Arrival.uniform(9, 2)), ValueError,
        r"out has strides \[384, 64, 1, 4\]; with arrival= it is written in place.*whose last stride is 1, and copy it",
    ),
    "pages arrive": (
        paged(arrival=ts.Arrival.uniform(4, 5)), ValueError,
        "arrival= with block_table=; keys in pages arrive in no order of rows",
    ),
    "chunks": (
        tensors(arrival=ts.Arrival.uniform(4, 3)), ValueError,
        r"arrival: 3 chunks of 4 rows bring 9 to 12 rows, the input has 18",
    ),
    "nested": (
        tensors(q=torch.nested.nested_tensor([torch.zeros(3, 4, 8)])), TypeError, "q is nested: pack it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_refuses(case):
    given, error, message = CASES[case]
    with pytest.raises(error, match=f"(?s:{message})"):
        ts.attention(**given)


def test_no_gradient_of_what_has_none():
    q = torch.zeros(2, 6, 4, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="q requires a gradient, and keys are in pages; those get none"):
        ts.attention(**paged(q=q))
    with pytest.raises(RuntimeError, match=r"scale_k requires a gradient; scales get none: pass scale_k\.detach\(\)"):
        ts.attention(**tensors(scale_k=torch.ones(2, requires_grad=True)))
    with pytest.raises(RuntimeError, match="out= has no gradient"):
        ts.attention(**tensors(q=q, out=torch.zeros(2, 6, 4, 16)))


def test_out_of_no_elements_is_resized_where_all_else_is_right():
    out = torch.empty(0)
    with pytest.raises(ValueError, match="k has 2 sequences, q has 3"):
        ts.attention(**tensors(q=torch.zeros(3, 6, 4, 8), out=out))
    with pytest.raises(TypeError, match=r"out is torch\.float16, the result torch\.float32"):
        ts.attention(**tensors(out=out.half()))
    assert out.shape == (0,)
    assert ts.attention(**tensors(out=out)) is out
    assert out.shape == (2, 6, 4, 16)


def test_out_is_its_own():
    q = torch.zeros(2, 6, 4, 8)
    with pytest.raises(ValueError, match="out: overlaps q in memory"):
        ts.attention(**tensors(q=q, v=torch.zeros(2, 9, 2, 8), out=q))
    with pytest.raises(ValueError, match="several elements share a place"):
        ts.attention(**tensors(out=torch.zeros(1, 1, 1, 16).expand(2, 6, 4, 16)))


@pytest.mark.parametrize("transposed", [False, True])
def test_equal_rows_and_heads_are_pointed_out_once(caplog, transposed):
    """``torch.randn(2, 8, 8, 16)`` is right in either layout, and nothing says which is meant."""
    attention_request._point_out.cache_clear()
    plain, longer = torch.zeros(2, 6, 6, 8), torch.zeros(2, 9, 6, 8)
    ts.attention(plain, longer, longer)
    ts.attention(plain.transpose(1, 2), plain, plain, layout="bhsd")
    assert not caplog.records
    q = plain.transpose(1, 2) if transposed else plain
    for one in (q, q, q[:, :, :4], torch.zeros(2, 4, 4, 8)):
        ts.attention(one, one, one)
    (said,) = [record.message for record in caplog.records if record.name == attention_request.logger.name]
    assert said.startswith("attention: layout='bshd' is [B, S, H, D], and q has as many rows as heads")
    assert "pass layout='bhsd'" in said


def test_more_heads_than_rows_are_pointed_out_once(caplog):
    """As a caller of scaled_dot_product_attention passes them: 8 heads of 32 rows are read as 32 heads of 8 rows."""
    attention_request._point_out.cache_clear()
    one_row, prompt, long = (torch.zeros(1, rows, 32, 8) for rows in (1, 8, 40))
    for q, k in ((one_row, long), (prompt, long), (long, long), (prompt, prompt), (prompt[:, :4].contiguous(),) * 2):
        ts.attention(q, k, k)
    ts.attention(prompt, prompt, prompt, layout="bhsd")
    (said,) = [record.message for record in caplog.records if record.name == attention_request.logger.name]
    assert said.startswith("attention: layout='bshd' is [B, S, H, D], and q has more heads than rows; if it is")
