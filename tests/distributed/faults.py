"""What ranks do in the tests of faults: make another call, come late, do not come, die, or give invalid arguments.

``device`` is ``cpu`` or ``cuda``. What is for GPUs runs over gloo where there is none, with the same steps.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from jobs import random

import tilestream as ts
from rank_checks import hear, raised, told
from streaming import threads_at_work
from tilestream import distributed as tsd


def operands(device, rows=0):
    """A shard and B, both ones: ``rows`` more rows than usual."""
    shape, columns, dtype = ((256, 256), 256, torch.bfloat16) if device == "cuda" else ((4, 8), 6, torch.float32)
    where = device if torch.cuda.is_available() else "cpu"
    a = torch.ones(shape[0] + rows, shape[1], dtype=dtype, device=where)
    return a, torch.ones(shape[1], columns, dtype=dtype, device=where)


def gather(device, deadline=600.0, lacks=False):
    """The product of all shards of ones. Raises what the call raises, on a GPU what its kernels have reported.

    ``lacks``: the last rank's shard does not come.
    """
    a, b = operands(device)
    out = tsd.all_gather_matmul(a, b, form="fused", deadline=deadline)
    if out.is_cuda:
        torch.cuda.synchronize()
        assert not lacks or out[-len(a) :].isnan().all(), "what did not come is NaN"
        assert not lacks or out[: len(a)].eq(a.shape[1]).all(), "rank 0's rows have come"
        ts.check()
    return out


def error_of(device, call):
    """What a rank's calls raise that others have given up on. On a GPU it may have all parts of the first ones."""
    for _ in range(3 if device == "cuda" else 1):
        if (error := raised(call)) != "nothing":
            return error
    return "nothing"


def differs(rank, world, how, device="cpu"):
    """One rank makes another call: all raise, and the group stays usable."""
    if device == "cuda":
        a, b = operands(device, 64 * (rank == 1))
        text = raised(lambda: tsd.all_gather_matmul(a, b, form="fused", deadline=60))
        assert multiplies(rank, world, device)
        return text
    shape, dtype, dim, form = (4, 8), torch.float32, 0, "fused"
    if rank == 1:
        shape = (5, 8) if how == "rows" else shape
        dtype = torch.bfloat16 if how == "dtype" else dtype
        form = "unfused" if how == "form" else form
    a, b = torch.ones(shape, dtype=dtype), torch.ones(8, 6, dtype=dtype)
    if how == "op" and rank == 1:
        text = raised(lambda: tsd.matmul_reduce_scatter(torch.ones(4 * world, 8), b, form="fused", deadline=600))
    else:
        text = raised(lambda: tsd.all_gather_matmul(a, b, gather_dim=dim, form=form, deadline=600))
    again = tsd.all_gather_matmul(torch.ones(2, 8), torch.ones(8, 6), form="fused")
    assert again.eq(8).all()
    return text


def loses(rank, world, when, folder, device="cpu", deadline=600.0):
    """The last rank dies: the others raise, over gloo before the deadline, and at each later call."""
    gather(device)
    (Path(folder) / str(rank)).touch()
    if rank == world - 1:
        # Messages that an exiting process has not read reset its peers' connections, and lose what is in flight.
        end = time.monotonic() + 300
        while len(list(Path(folder).iterdir())) < world and time.monotonic() < end:
            time.sleep(0.002)
        if when == "before":
            os._exit(0)
        threading.Timer(0.3, lambda: os._exit(0)).start()
        time.sleep(600)  # until it ends
    begin = time.monotonic()
    first = raised(lambda: gather(device, deadline, lacks=True))
    waited = time.monotonic() - begin
    a, b = operands(device)
    second = raised(lambda: tsd.matmul_reduce_scatter(a[:1].repeat(world, 1), b, deadline=600))
    return first, second, waited


def expires(rank, world, op, device="cpu"):
    """The last rank does not call: the others give up at the deadline, and name it."""
    if device == "cuda":
        gather(device)  # the first call is collective
    a, b = operands(device)
    begin = time.monotonic()
    if rank == world - 1:
        hear(*(f"gave up {other}" for other in range(world - 1)))
        # Too late: the others have closed the connections.
        first = error_of(device, lambda: gather(device))
    elif op == "gather":
        first = raised(lambda: gather(device, 0.5, lacks=True))
    else:
        first = raised(lambda: tsd.matmul_reduce_scatter(torch.ones(world, 8), b, form="fused", deadline=0.5))
    told(f"gave up {rank}")
    second = raised(lambda: tsd.all_gather_matmul(a, b, deadline=600))
    alive = [t.name for t in threads_at_work() if t.name.startswith("tilestream")]
    assert not alive or device == "cuda", alive  # a GPU's watch stays
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
        thread.join(300)
        assert not thread.is_alive()
    assert all(torch.allclose(out, whole[i] @ b, atol=1e-4) for i in range(2) for out in outs[i])
    assert len(outs[0]) == len(outs[1]) == 20
    # One group breaks: the other stays usable.
    if rank == 0:
        text = raised(lambda: tsd.all_gather_matmul(whole[0][:8], b, group=groups[0], form="fused", deadline=0.3))
        assert text.startswith("ArrivalTimeout"), text
    dist.barrier()
    assert raised(lambda: tsd.all_gather_matmul(whole[0][:8], b, group=groups[0], deadline=600)).startswith(
        "GroupBroken"
    )
    out = tsd.all_gather_matmul(whole[1][8 * rank : 8 * rank + 8], b, group=groups[1], form="fused")
    return torch.allclose(out, whole[1] @ b, atol=1e-4)


def differs_and_loses(rank, world):
    """One rank makes another call and another dies: the group is broken for the remaining ranks."""
    a, b = torch.ones(4 + (rank == 1), 8), torch.ones(8, 6)
    if rank == world - 1:
        os._exit(0)
    first = raised(lambda: tsd.all_gather_matmul(a, b, form="fused", deadline=600))
    second = raised(lambda: tsd.all_gather_matmul(b.t(), a.t(), form="fused", deadline=600))
    return first, second


def refuses(rank, world):
    """Invalid arguments raise on their rank, before anything is sent; most of them in the plan, too."""
    ok, rows, b, cube = torch.ones(4, 8), torch.ones(world, 8), torch.ones(8, 6), torch.ones(2, 8, 6)
    gather, scatter, reduce = (tsd.all_gather_matmul,), (tsd.matmul_reduce_scatter,), (tsd.matmul_all_reduce,)
    gathers, scatters = (*gather, tsd.plan_all_gather_matmul), (*scatter, tsd.plan_matmul_reduce_scatter)
    reduces = *reduce, tsd.plan_matmul_all_reduce
    before = tsd.plan_all_gather_matmul(ok, b)
    one_b = "b is a list; it must be one torch.Tensor: torch.cat(b, -1)"
    calls = [
        (gathers, ok, b, {"gather_dim": 2}, "ValueError", "gather_dim=2; it must be a dimension of a_shard, -2 to 1"),
        (gathers, ok[0], b, {}, "ValueError", "a_shard has 1 dimensions; it has at least 2"),
        (gathers, ok, [], {}, "TypeError", "b is list; it must be a tensor, or a list of at least one"),
        (gathers, ok, torch.ones(9, 6), {}, "ValueError", "a [8, 8] and b [9, 6] differ in K"),
        (gathers, ok, b.bfloat16(), {}, "TypeError", "a is torch.float32, b is torch.bfloat16"),
        (gathers, ok, cube, {}, "ValueError", "b has shape [2, 8, 6]; it must be a matrix: [8, N]"),
        (gathers, ok, torch.tensor(1.0), {}, "ValueError", "b has shape []; it must be a matrix: [8, N]"),
        (gathers, ok, torch.ones(8), {}, "ValueError", "b has shape [8]; it must be a matrix: [8, N]"),
        (gather, ok, [b, b], {"bias": [None]}, "ValueError", "bias: 1 for 2 b; there is one for each"),
        (gather, ok, b, {"bias": torch.ones(5)}, "ValueError", "bias has shape [5]; it has one element a column: [6]"),
        (gather, ok, b, {"activation": "tanh"}, "ValueError", "activation='tanh'; it must be None or one of relu"),
        (gathers, ok, b, {"scale_a": torch.ones(3, 1)}, "ValueError",
         "scale_a has shape [3, 1]; it has one element, or one a row of a_shard"),
        (gathers, ok, b, {"scale_a": torch.ones(1).double()}, "", "scale_a is torch.float64; scales are torch.float32"),
        (gathers, ok, b, {"scale_a": 1.0}, "TypeError", "scale_a is a float; it must be a torch.Tensor or None"),
        (gathers, ok, b, {"form": "fast"}, "ValueError", "form='fast'; it must be one of auto, fused, unfused"),
        (gather, ok, b, {"deadline": 0}, "ValueError", "deadline=0; it must be a positive, finite number of seconds"),
        (gathers, ok, b, {"group": "tp"}, "TypeError",
         "group is a str; it must be a torch.distributed.ProcessGroup or None"),
        (gathers, ok, b.to("meta"), {}, "ValueError", "b is on meta, a on cpu; all are on one device"),
        (gathers, ok.int(), b.int(), {}, "TypeError", "a_shard: dtype: torch.int32; tilestream multiplies"),
        (scatters, torch.ones(world + 1, 8), b, {}, "ValueError",
         "has 3 rows along scatter_dim=0; it must be a multiple of the 2 ranks: pad it"),
        (scatters, rows, b, {"scatter_dim": 1}, "ValueError",
         "scatter_dim=1 is the last; one before it is cut: 0 to 0"),
        (scatter, rows, b, {"reduce_op": "max"}, "ValueError", "reduce_op='max'; it must be one of sum, avg"),
        (scatters, rows, [b], {}, "TypeError", one_b),
        (scatters, rows, torch.ones(9, 6), {}, "ValueError", "a [2, 8] and b [9, 6] differ in K"),
        (scatters, rows, cube, {}, "ValueError", "b has shape [2, 8, 6]; it must be a matrix: [8, N]"),
        (scatters, rows, b.to("meta"), {}, "ValueError", "b is on meta, a on cpu; all are on one device"),
        (reduce, ok, b, {"reduce_op": "max"}, "ValueError", "reduce_op='max'; it must be one of sum, avg"),
        (reduces, ok, [b], {}, "TypeError", one_b),
        (reduces, ok, torch.ones(7, 6), {}, "ValueError", "differ in K"),
        (reduce, ok, b, {"bias": torch.ones(5)}, "ValueError", "bias has shape [5]"),
        (reduces, ok[0], b, {}, "ValueError", "a has 1 dimensions; it has at least 2"),
    ]  # fmt: skip
    for functions, a, right, options, error, message in calls:
        for function in functions:
            text = raised(functools.partial(function, a, right, **options))
            op = function.__name__.removeprefix("plan_")
            assert text.startswith(error), text
            assert op in text or "deadline" in options, text
            assert message in text, (function.__name__, text)
    for function in (*gather, *reduce):
        terms = 8 * (world if function in reduce else 1)
        assert function(ok, b, form="fused").eq(terms).all(), "the group stays usable"
    assert before.case.world == world
    return True


def multiplies(rank, world, device="cpu"):
    """The group works."""
    (a, b), out = operands(device), gather(device)
    return tuple(out.shape) == (world * len(a), b.shape[1]) and out.eq(len(b)).all().item()


def comes_late(rank, world, seconds, device="cpu"):
    """The last rank calls after so many seconds: all have the product, and how long each waited."""
    multiplies(rank, world, device)
    if rank == world - 1:
        time.sleep(seconds)
    begin = time.monotonic()
    return multiplies(rank, world, device), time.monotonic() - begin


def mixture(rank, world):
    """A rank's arguments of a mixture of experts, two a rank."""
    from moe_jobs import Mixture

    return Mixture.random([3] * world, 2, 2 * world).own(rank, world)


def stops(rank, world, folder, deadline, op="gather", device="cpu"):
    """The last rank is stopped until the others have given up: they raise at their deadline, that rank after them."""
    (a, b), place = operands(device), Path(folder)
    calls = {
        "gather": lambda: gather(device, deadline, lacks=rank < world - 1),
        "sum": lambda: tsd.matmul_reduce_scatter(torch.ones(world, 8), b, form="fused", deadline=deadline),
        "moe": functools.partial(tsd.moe, *mixture(rank, world), form="fused", deadline=deadline),
    }
    multiplies(rank, world, device)
    if rank == world - 1:
        (place / "pid.new").write_text(str(os.getpid()))
        (place / "pid.new").replace(place / "pid")
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        while not (place / "pid").exists():
            time.sleep(0.002)
        pid = int((place / "pid").read_text())
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.002)
    begin = time.monotonic()
    first = error_of(device, calls[op])
    waited = time.monotonic() - begin
    (place / str(rank)).touch()
    if rank == 0:
        while not all((place / str(other)).exists() for other in range(world - 1)):
            time.sleep(0.002)
        os.kill(pid, signal.SIGCONT)
    return first, raised(lambda: tsd.all_gather_matmul(a, b, deadline=600)), waited


def reads_what_is_not_filled(rank, world):
    """What each op says of a tensor that `ts.stream_in` is filling, eager and compiled. The group stays usable."""
    go, group, rows = threading.Event(), dist.group.WORLD, random(rank, 4 * world, 8)

    def blocks():
        yield rows[:2]
        assert go.wait(600)
        yield rows[2:]

    b, w = random(7, 8, 8), random(8, 2, 8, 8)
    chosen = torch.ones(4 * world, 1), torch.zeros(4 * world, 1, dtype=torch.int64)
    calls = {
        "gather": lambda x: tsd.all_gather_matmul(x, [b, b], group=group)[0],
        "gather of b": lambda x: tsd.all_gather_matmul(b, [b, x[:8, :8]], group=group)[0],
        "scatter": lambda x: tsd.matmul_reduce_scatter(x, b, group=group),
        "reduce": lambda x: tsd.matmul_all_reduce(x, b, group=group),
        "moe": lambda x: tsd.moe(x, chosen, w, w, w, group),
        "torch's gather": lambda x: torch.ops.symm_mem.fused_all_gather_matmul(x, [b], 0, group.group_name)[1][0],
        "torch's scatter": lambda x: torch.ops.symm_mem.fused_matmul_reduce_scatter(x, b, "sum", 1, group.group_name),
    }
    said = []
    with ts.stream_in(blocks(), shape=(4 * world, 8), dtype=torch.float32, rows_per_chunk=2) as x, tsd.async_tp(group):
        for name, call in calls.items():
            said.append((name, raised(lambda: call(x.tensor))))  # noqa: B023  # called at once
            if not name.startswith("torch"):
                compiled = torch.compile(call, backend="eager")
                said.append((name, raised(lambda: compiled(x.tensor))))  # noqa: B023
        go.set()
        x.wait()
        for name, call in calls.items():
            assert torch.equal(call(x.tensor), call(rows)), name
    return said
