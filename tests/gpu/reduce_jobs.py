"""What ranks do in ``test_gpu_all_reduce.py``."""

from __future__ import annotations

import torch
from distributed_jobs import Worst, check_void, give_up_on_the_last_rank, late_in_turn, poison, random

import tilestream as ts
from rank_checks import check_sum, factors, same_on_every_rank
from tilestream import distributed as tsd


def reduces(rank, world, cases):
    """Each case against the exact sum; twice with the same bits, which are the same on every rank."""
    for rows, k, n, dtype, average, scaled in cases:
        dtype = getattr(torch, dtype)
        inputs = factors(random, world, rows, k, n, dtype)
        a, b = inputs[rank]
        bias, over = random(5, n, dtype=torch.float32), world if average else 1
        scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        products = [x.double() @ y.double() for x, y in inputs]
        if scaled:
            scales = tuple(random(7 + i, *s, dtype=torch.float32).abs() + 0.5 for i, s in enumerate(((*rows, 1), (n,))))
            products = [x * scales[0].double() * scales[1].double() for x in products]
        travels = torch.bfloat16 if dtype.itemsize == 1 else dtype
        exact = sum(products) / over + bias.double()
        theirs = sum(x.to(travels).float() for x in products) / over + bias
        outs = []
        for _ in range(4):
            poison()
            outs.append(tsd.matmul_all_reduce(
                a, b, bias=bias, scale_a=scales[0], scale_b=scales[1], reduce_op="avg" if average else "sum",
                form="fused", deadline=20,
            ))  # fmt: skip
            torch.cuda.synchronize()
            ts.check()
        assert all(x.view(torch.uint8).equal(outs[0].view(torch.uint8)) for x in outs), "another call has other bits"
        assert outs[0].dtype == travels
        check_sum(outs[0], exact, theirs, (rows, k, n))
        same_on_every_rank(outs[0])
    return tsd.plan_matmul_all_reduce(random(1, 64, 256), random(2, 256, 256).t(), form="fused").explain()


def iterates(rank, world, count):
    """Many calls without a barrier in between, on other data and from two streams; ranks are late in turn."""
    b = random(1, 256, 256).t() / 16
    wholes = [random(1000 + i, 48, 256) for i in range(8)]
    expected = [world * (x @ b).float() for x in wholes]
    worst, streams = [Worst(), Worst()], [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for i in range(count):
        with torch.cuda.stream(streams[i // 8 % 2]):
            late_in_turn(i, rank)
            out = tsd.matmul_all_reduce(wholes[i % 8], b, form="fused", deadline=20)
            worst[i // 8 % 2].add(out, expected[i % 8])
    return max(each.get() for each in worst)


def expires(rank, world, killed):
    """See `give_up_on_the_last_rank`."""
    a, b = random(rank, 64, 256), random(99, 256, 256)

    def call(deadline, form="fused"):
        return tsd.matmul_all_reduce(a, b, form=form, deadline=deadline)

    for _ in range(3):
        call(20)
    return give_up_on_the_last_rank(
        rank, world, killed, lambda: call(0.5), lambda: call(5), lambda: call(5, "auto"), check_void
    )


def captures(rank, world):
    """Under capture: unfused, and the plan says why; replays are right."""
    a, b = random(60, 64, 256), random(9, 256, 256)
    tsd.matmul_all_reduce(a, b, form="unfused", deadline=20)  # the ranks compare their calls before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        said = tsd.plan_matmul_all_reduce(a, b, form="fused").explain()
        out = tsd.matmul_all_reduce(a, b, form="unfused")
    for i in range(3):
        a.copy_(random(70 + i, 64, 256))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.allclose(out.float(), world * (a @ b).float(), atol=2.0)
    return said
