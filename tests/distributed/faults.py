"""What ranks do in the tests of faults: make another call, come late, do not come, die, or give invalid arguments."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from jobs import random

from rank_checks import raised
from tilestream import distributed as tsd


def differs(rank, world, how):
    """One rank makes another call: all raise, and the group stays usable."""
    shape, dtype, dim, form = (4, 8), torch.float32, 0, "fused"
    if rank == 1:
        shape = (5, 8) if how == "rows" else shape
        dtype = torch.bfloat16 if how == "dtype" else dtype
        form = "unfused" if how == "form" else form
    a, b = torch.ones(shape, dtype=dtype), torch.ones(8, 6, dtype=dtype)
    if how == "op" and rank == 1:
        text = raised(lambda: tsd.matmul_reduce_scatter(torch.ones(4 * world, 8), b, form="fused", deadline=10))
    else:
        text = raised(lambda: tsd.all_gather_matmul(a, b, gather_dim=dim, form=form, deadline=10))
    again = tsd.all_gather_matmul(torch.ones(2, 8), torch.ones(8, 6), form="fused")
    assert again.eq(8).all()
    return text


def loses(rank, world, when, folder):
    """The last rank dies: the others raise before the deadline, and at each later call."""
    a, b = torch.ones(4, 8), torch.ones(8, 6)
    tsd.all_gather_matmul(a, b, form="fused")
    (Path(folder) / str(rank)).touch()
    if rank == world - 1:
        # Messages that an exiting process has not read reset its peers' connections, and lose what is in flight.
        end = time.monotonic() + 20
        while len(list(Path(folder).iterdir())) < world and time.monotonic() < end:
            time.sleep(0.002)
        if when == "before":
            os._exit(0)
        threading.Timer(0.3, lambda: os._exit(0)).start()
        time.sleep(5)
    begin = time.monotonic()
    first = raised(lambda: tsd.all_gather_matmul(a, b, form="fused", deadline=15))
    waited = time.monotonic() - begin
    second = raised(lambda: tsd.matmul_reduce_scatter(torch.ones(world, 8), b, deadline=15))
    return first, second, waited


def expires(rank, world, op):
    """The last rank does not call: the others give up at the deadline, and name it."""
    b = torch.ones(8, 6)
    begin = time.monotonic()
    if rank == world - 1:
        time.sleep(1.5)
        # Too late: the others have closed the connections.
        first = raised(lambda: tsd.all_gather_matmul(torch.ones(4, 8), b, form="fused", deadline=10))
    elif op == "gather":
        first = raised(lambda: tsd.all_gather_matmul(torch.ones(4, 8), b, form="fused", deadline=0.5))
    else:
        first = raised(lambda: tsd.matmul_reduce_scatter(torch.ones(world, 8), b, form="fused", deadline=0.5))
    second = raised(lambda: tsd.all_gather_matmul(torch.ones(4, 8), b, deadline=5))
    alive = [t.name for t in threading.enumerate() if t.name.startswith("tilestream")]
    assert not alive, alive
    return first, second, time.monotonic() - begin


def two_groups(rank, world):
    """Two groups of the same ranks at once, from two threads, in opposite order on two ranks."""
    groups = [dist.new_group(list(range(world))) for _ in range(2)]
    whole = [random(60 + i, 8 * world, 16) for i in range(2)]
    b = random(9, 16, 12)
    outs = [[], []]

    def go(i):
        for _ in range(20):
            mine = whole[i][8 * rank : 8 * rank + 8]
            outs[i].append(tsd.all_gather_matmul(mine, b, group=groups[i], form="fused"))

    threads = [threading.Thread(target=go, args=(i,)) for i in ((0, 1) if rank % 2 else (1, 0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert all(torch.allclose(out, whole[i] @ b, atol=1e-4) for i in range(2) for out in outs[i])
    assert len(outs[0]) == len(outs[1]) == 20
    # One group breaks: the other stays usable.
    if rank == 0:
        text = raised(lambda: tsd.all_gather_matmul(whole[0][:8], b, group=groups[0], form="fused", deadline=0.3))
        assert text.startswith("ArrivalTimeout"), text
    dist.barrier()
    assert raised(lambda: tsd.all_gather_matmul(whole[0][:8], b, group=groups[0], deadline=1)).startswith("GroupBroken")
    out = tsd.all_gather_matmul(whole[1][8 * rank : 8 * rank + 8], b, group=groups[1], form="fused")
    return torch.allclose(out, whole[1] @ b, atol=1e-4)


def differs_and_loses(rank, world):
    """One rank makes another call and another dies: the group is broken for the remaining ranks."""
    a, b = torch.ones(4 + (rank == 1), 8), torch.ones(8, 6)
    if rank == world - 1:
        os._exit(0)
    first = raised(lambda: tsd.all_gather_matmul(a, b, form="fused", deadline=5))
    second = raised(lambda: tsd.all_gather_matmul(b.t(), a.t(), form="fused", deadline=5))
    return first, second


def refuses(rank, world):
    """Invalid arguments raise on their rank, before anything is sent. Returns the errors."""
    ok, b = torch.ones(4, 8), torch.ones(8, 6)
    gather, scatter = tsd.all_gather_matmul, tsd.matmul_reduce_scatter
    before = tsd.plan_all_gather_matmul(ok, b)
    calls = {
        "gather_dim": lambda: gather(ok, b, gather_dim=2),
        "a vector": lambda: gather(torch.ones(8), b),
        "no b": lambda: gather(ok, []),
        "K": lambda: gather(ok, torch.ones(9, 6)),
        "dtype": lambda: gather(ok, b.bfloat16()),
        "b 3-D": lambda: gather(ok, torch.ones(2, 8, 6)),
        "bias count": lambda: gather(ok, [b, b], bias=[None]),
        "bias shape": lambda: gather(ok, b, bias=torch.ones(5)),
        "activation": lambda: gather(ok, b, activation="tanh"),
        "scale": lambda: gather(ok, b, scale_a=torch.ones(3, 1)),
        "scale dtype": lambda: gather(ok, b, scale_a=torch.ones(1).double()),
        "form": lambda: gather(ok, b, form="fast"),
        "deadline": lambda: gather(ok, b, deadline=0),
        "group": lambda: gather(ok, b, group="tp"),
        "device": lambda: gather(ok, b.to("meta")),
        "rows": lambda: scatter(torch.ones(world + 1, 8), b),
        "scatter_dim": lambda: scatter(torch.ones(world, 8), b, scatter_dim=1),
        "reduce_op": lambda: scatter(torch.ones(world, 8), b, reduce_op="max"),
        "int": lambda: gather(ok.int(), b.int()),
        "scale type": lambda: gather(ok, b, scale_a=1.0),
        "list": lambda: scatter(torch.ones(world, 8), [b]),
        "plan K": lambda: tsd.plan_all_gather_matmul(ok, torch.ones(9, 6)),
        "plan b 0-D": lambda: tsd.plan_all_gather_matmul(ok, torch.tensor(1.0)),
        "plan b 1-D": lambda: tsd.plan_all_gather_matmul(ok, torch.ones(8)),
        "plan device": lambda: tsd.plan_all_gather_matmul(ok, b.to("meta")),
        "plan int": lambda: tsd.plan_all_gather_matmul(ok.int(), b.int()),
        "plan scatter K": lambda: tsd.plan_matmul_reduce_scatter(torch.ones(world, 8), torch.ones(9, 6)),
        "plan scatter b 3-D": lambda: tsd.plan_matmul_reduce_scatter(torch.ones(world, 8), torch.ones(2, 8, 6)),
        "plan scatter device": lambda: tsd.plan_matmul_reduce_scatter(torch.ones(world, 8), b.to("meta")),
        "plan scatter list": lambda: tsd.plan_matmul_reduce_scatter(torch.ones(world, 8), [b]),
    }
    texts = {name: raised(call) for name, call in calls.items()}
    out = gather(ok, b, form="fused")
    assert out.eq(8).all(), "the group stays usable"
    assert before.case.world == world
    return texts
