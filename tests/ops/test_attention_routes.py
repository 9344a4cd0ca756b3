"""Calls of torch's function that come to `tilestream.attention`, and those that do not."""

from __future__ import annotations

import logging
import sys

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import tilestream as ts
from tilestream.ops import attention_routes

sdpa = F.scaled_dot_product_attention


@pytest.fixture
def taken(monkeypatch):
    """How often attention was asked for here."""
    calls = []

    def counted(*args, **kwargs):
        calls.append(kwargs)
        return ts.attention(*args, **kwargs)

    monkeypatch.setattr(attention_routes, "attention", counted)
    attention_routes.say_once.cache_clear()
    return calls


def rand(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(
    "shapes", [((2, 4, 9, 16), (2, 4, 13, 16)), ((4, 9, 16), (4, 5, 16)), ((1, 6, 7, 8), (1, 2, 7, 8))]
)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_torchs_function_in_the_block(shapes, is_causal, scale, taken):
    q, k = (rand(*shape) for shape in shapes)
    how = {"is_causal": is_causal, "scale": scale, "enable_gqa": shapes[0][-3] != shapes[1][-3]}
    expected = sdpa(q, k, k, **how)
    with ts.use_attention(cpu=True):
        mine = F.scaled_dot_product_attention(q, k, k, **how)
    torch.testing.assert_close(mine, expected)
    assert len(taken) == 1
    sdpa(q, k, k, **how)
    assert len(taken) == 1, "outside of the block"


REFUSED = {
    "a mask": ({"attn_mask": torch.ones(9, 9, dtype=torch.bool)}, {}, "attn_mask= is any mask"),
    "dropout": ({"dropout_p": 0.5}, {}, r"dropout_p=0\.5"),
    "columns": ({}, {"columns": 12}, r"head dim \[12\]"),
    "dtype": ({}, {"dtype": torch.float64}, r"dtype torch\.float64"),
    "gradient": ({}, {"gradient": True}, "it needs a gradient"),
    "strides": ({}, {"turned": True}, "a head dim that is not contiguous"),
    "dimensions": ({}, {"batch": (2, 3)}, "5 dimensions"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_goes_to_torch_and_why(name, taken, caplog):
    how, make, why = REFUSED[name]
    q = rand(*make.get("batch", (2,)), 4, 9, make.get("columns", 16)).to(make.get("dtype", torch.float32))
    if make.get("turned"):
        q = q.transpose(-1, -2).contiguous().transpose(-1, -2)
    q.requires_grad_(make.get("gradient", False))
    with ts.use_attention(cpu=True), caplog.at_level(logging.INFO, "tilestream"):
        for _ in range(3):
            assert F.scaled_dot_product_attention(q, q, q, **how).shape == q.shape
    assert not taken
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1, "once"
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(lines[0])


def test_the_cpu_is_left_alone_and_why(taken, caplog):
    q = rand(1, 2, 9, 16)
    with ts.use_attention(), caplog.at_level(logging.INFO, "tilestream"):
        for _ in range(2):
            assert torch.equal(F.scaled_dot_product_attention(q, q, q), sdpa(q, q, q))
    assert not taken
    (line,) = (record.getMessage() for record in caplog.records)
    assert "goes to torch: on the CPU tilestream.attention runs torch's own kernel" in line


def test_the_promise_of_equal_bits_takes_calls_of_all_kinds_or_refuses_them(taken):
    q = rand(2, 2, 9, 16).requires_grad_()
    with ts.use_attention(), ts.invariant():
        whole = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        assert torch.equal(F.scaled_dot_product_attention(q[:1], q[:1], q[:1], is_causal=True), whole[:1])
        with pytest.raises(NotImplementedError, match=r"under tilestream\.invariant: dropout_p=0\.5"):
            F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    assert len(taken) == 2


def test_gradients_for_those_who_ask(taken):
    q = rand(1, 2, 9, 16).requires_grad_()
    with ts.use_attention(gradients=True, cpu=True):
        F.scaled_dot_product_attention(q, q, q, is_causal=True).square().sum().backward()
    mine, q.grad = q.grad, None
    sdpa(q, q, q, is_causal=True).square().sum().backward()
    torch.testing.assert_close(mine, q.grad)
    assert len(taken) == 1


def test_other_functions_are_torchs():
    with ts.use_attention():
        assert torch.add(torch.ones(2), 1).tolist() == [2, 2]


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"it registers with Hugging Face's transformers, 5\.4 or later"):
        ts.register_attention()


def test_as_many_heads_as_attention_takes():
    def why(heads: int) -> str:
        q, k = (torch.zeros(1, n, 2, 8) for n in (heads, 1))
        return attention_routes.unfit(q, k, k)

    assert why(attention_routes.MOST_HEADS) == ""
    assert why(attention_routes.MOST_HEADS + 1) == f"{attention_routes.MOST_HEADS + 1} heads"
