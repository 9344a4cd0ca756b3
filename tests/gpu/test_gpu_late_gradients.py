"""Gradients of launches whose rows came late, or never: right, NaN, or an exception; never of what was there before."""

from __future__ import annotations

import pytest
import torch

import tilestream as ts

pytestmark = [pytest.mark.timeout(120), pytest.mark.gpu]

M, N, K = 512, 256, 256


def launch(own: bool = False):
    """A matmul of which the second chunk of rows is missing, the rows that it multiplies, and its weight."""
    x = torch.ones(M, K, device="cuda", dtype=torch.bfloat16)  # numbers: a gradient of them would look right
    weight = torch.randn(K, N, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    words = torch.zeros(2, dtype=torch.int32, device="cuda") if own else None
    arrival = ts.Arrival.uniform(M // 2, 2, signals=words, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        arrival.signal(0)
    side.synchronize()
    return ts.matmul(x, weight, arrival=arrival, deadline=0.2), x, weight, arrival


@pytest.mark.parametrize("own", [False, True])
def test_after_the_expiry(own):
    y, _, weight, arrival = launch(own)
    torch.cuda.synchronize()
    with pytest.raises(ts.ArrivalTimeout):
        y.sum().backward()
    y, _, weight, arrival = launch(own)
    torch.cuda.synchronize()
    with pytest.raises(ts.ArrivalTimeout):
        ts.check()
    y.sum().backward()
    assert weight.grad.isnan().all()
    arrival.reset()


def test_issued_before_the_expiry():
    y, _, weight, _ = launch()
    y.sum().backward()
    torch.cuda.synchronize()
    assert weight.grad.isnan().all()
    with pytest.raises(ts.ArrivalTimeout):
        ts.check()


def test_rows_that_came_between_the_two():
    y, x, weight, arrival = launch()
    torch.cuda.synchronize()
    with pytest.raises(ts.ArrivalTimeout):
        ts.check()
    x.data[M // 2 :] = 2.0  # as a copy engine writes: autograd is not told
    arrival.signal(1)
    y.sum().backward()
    torch.testing.assert_close(weight.grad, torch.full_like(weight, 1.5 * M))


def test_keys():
    q, k, v = (torch.randn(1, 128, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    arrival = ts.Arrival.uniform(64, 2, device="cuda")
    out = ts.attention(q, k, v, arrival=arrival, deadline=0.2)
    torch.cuda.synchronize()
    with pytest.raises(ts.ArrivalTimeout):
        ts.check()
    out.sum().backward()
    assert all(one.grad.isnan().all() for one in (q, k, v))
