"""Gradients of launches whose rows came late, or never: right, NaN, or an exception; never of what was there before."""

from __future__ import annotations

import pytest
import torch
from feeds import launch_first
from gpu_runs import held

import tilestream as ts

pytestmark = [pytest.mark.timeout(120), pytest.mark.gpu]

M, N, K = 512, 256, 256


def operands(own: bool = False, come: int = 1):
    """The rows of a matmul, its weight, and the arrival of the rows: ``come`` of two chunks are there."""
    x = torch.ones(M, K, device="cuda", dtype=torch.bfloat16)  # numbers: a gradient of them would look right
    weight = torch.randn(K, N, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    words = torch.zeros(2, dtype=torch.int32, device="cuda") if own else None
    arrival = ts.Arrival.uniform(M // 2, 2, signals=words, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for chunk in range(come):
            arrival.signal(chunk)
    side.synchronize()
    return x, weight, arrival


def launch(own: bool = False):
    """A matmul of which the second chunk of rows is missing, and its operands."""
    x, weight, arrival = operands(own)
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


@launch_first
def test_issued_before_the_expiry():
    """The stream is held until the backward pass is issued; the deadline begins then."""
    for _ in range(2):  # loads the kernels: of a first call, and of one like it
        x, weight, arrival = operands(come=2)
        ts.matmul(x, weight, arrival=arrival, deadline=0.2).sum().backward()
        torch.cuda.synchronize()
        torch.testing.assert_close(weight.grad, torch.full_like(weight, M))
    x, weight, arrival = operands()
    with held():
        ts.matmul(x, weight, arrival=arrival, deadline=0.2).sum().backward()
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
