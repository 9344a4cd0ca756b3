"""What ranks do in ``test_gpu_repeats.py``: equal calls, issued by one native call each."""

from __future__ import annotations

import time

import torch
from distributed_jobs import Worst, error_of_a_late_rank, finish, random

from tilestream import distributed as tsd
from tilestream.distributed import repeats
from tilestream.distributed.group_state import state_of

#: Calls of each kind: enough for all slots to be prepared, and to be used again.
CALLS = 12


def _kinds(rank: int, world: int):
    """By name: a call of data number ``i``."""
    columns = [random(7 + j, 512, n) for j, n in enumerate((256, 136, 64))]
    parts = [random(17, 512 * world, 384)[512 * r : 512 * (r + 1)] for r in range(world)]

    def shard(i: int, *shape: int) -> torch.Tensor:
        return random(100 * i + rank, *shape)

    how = {"form": "fused", "deadline": 20}
    yield "gather", lambda i: tsd.all_gather_matmul(shard(i, 128, 512), columns[0], **how)
    yield "ragged gather", lambda i: tsd.all_gather_matmul(shard(i, 130, 512), columns[0], **how)
    yield "three products", lambda i: tsd.all_gather_matmul(shard(i, 256, 512), columns, **how)
    yield "gather along 1", lambda i: tsd.all_gather_matmul(shard(i, 2, 64, 512), columns[0], gather_dim=1, **how)
    yield "transposed b", lambda i: tsd.all_gather_matmul(shard(i, 128, 512), random(5, 256, 512).t(), **how)
    yield "float32 out", lambda i: tsd.all_gather_matmul(shard(i, 128, 512), columns[0], out_dtype=torch.float32, **how)
    rows = how | {"return_a": True}
    yield "gathered rows", lambda i: tsd.all_gather_matmul(shard(i, 128, 512), columns[0], **rows)
    yield "ragged rows", lambda i: tsd.all_gather_matmul(shard(i, 2, 65, 512), columns[:2], gather_dim=1, **rows)
    wide = random(9, 8192, 3584)  # the table has such gathers pulled
    yield "pulled gather", lambda i: tsd.all_gather_matmul(shard(i, 4096 // world, 8192), wide, **how)
    yield "pulled rows", lambda i: tsd.all_gather_matmul(shard(i, 4096 // world, 8192), wide, **rows)
    yield "sum", lambda i: tsd.matmul_reduce_scatter(shard(i, 256 * world, 512), parts[rank], **how)
    yield (
        "average",
        lambda i: tsd.matmul_reduce_scatter(shard(i, 128 * world, 512), parts[rank], reduce_op="avg", **how),
    )
    yield (
        "sum along 1",
        lambda i: tsd.matmul_reduce_scatter(shard(i, 2, 64 * world, 512), parts[rank], scatter_dim=1, **how),
    )
    yield "all-reduce", lambda i: tsd.matmul_all_reduce(shard(i, 64, 512), parts[rank], **how)
    yield from _with_extras(rank, world, columns, parts, shard, how)
    unfused = {"form": "unfused"}
    yield "unfused gather", lambda i: tsd.all_gather_matmul(shard(i, 128, 512), columns, **unfused)
    whole = unfused | {"return_a": True}
    yield "unfused rows", lambda i: tsd.all_gather_matmul(shard(i, 128, 512), columns, **whole)
    yield "unfused sum", lambda i: tsd.matmul_reduce_scatter(shard(i, 256 * world, 512), parts[rank], **unfused)
    yield "unfused all-reduce", lambda i: tsd.matmul_all_reduce(shard(i, 64, 512), parts[rank], **unfused)
    yield "all-reduce of one row", lambda i: tsd.matmul_all_reduce(shard(i, 1, 512), parts[rank], **how)


def _with_extras(rank: int, world: int, columns, parts, shard, how):
    """The same with biases, activations and scales of their own in each call, fused and unfused."""

    def bias(i: int, n: int) -> torch.Tensor:
        return random(1000 * i + n, n)

    def f8(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float8_e4m3fn)

    def scale(i: int, *shape: int) -> torch.Tensor:
        return random(2000 * i + rank, *shape, dtype=torch.float32).abs() + 0.1

    weight, part = (f8(x.t().contiguous()).t() for x in (columns[0], parts[rank]))

    def scaled(op, this, rows: int, b: torch.Tensor, one: bool):
        """An op on 8-bit operands, with a scale, or one a row."""
        n = b.shape[1]
        return lambda i: op(
            f8(shard(i, rows, 512)), b, scale_a=scale(i, 1) if one else scale(i, rows, 1), scale_b=scale(i, 1, n),
            bias=bias(i, n), out_dtype=torch.bfloat16, **this,
        )  # fmt: skip

    def biased(op, this, rows: int, b, **more):
        """An op with a bias; of several products the first has one."""
        n = (b[0] if isinstance(b, list) else b).shape[1]

        def call(i: int):
            added = [bias(i, n), None] if isinstance(b, list) else bias(i, n)
            return op(shard(i, rows, 512), b, bias=added, **more, **this)

        return call

    gather, scatter, reduce = tsd.all_gather_matmul, tsd.matmul_reduce_scatter, tsd.matmul_all_reduce
    for form in ("fused", "unfused"):
        this = how | {"form": form}
        yield f"{form}: gather, bias and gelu", biased(gather, this, 128, columns[0], activation="gelu")
        yield f"{form}: gather, a bias of two", biased(gather, this, 256, columns[:2], activation=["relu", None])
        yield f"{form}: gather, its rows, bias", biased(gather, this, 128, columns[0], return_a=True)
        yield f"{form}: sum, bias", biased(scatter, this, 256 * world, parts[rank])
        if form == "fused":  # others are not repeated
            yield "fused: average, bias", biased(scatter, this, 256 * world, parts[rank], reduce_op="avg")
        yield f"{form}: all-reduce, bias", biased(reduce, this, 64, parts[rank])
        for one in (False, True):
            scales = "one scale" if one else "scales of rows"
            yield f"{form}: 8-bit gather, {scales}", scaled(gather, this, 128, weight, one)
            yield f"{form}: 8-bit sum, {scales}", scaled(scatter, this, 128 * world, part, one)
            yield f"{form}: 8-bit all-reduce, {scales}", scaled(reduce, this, 64, part, one)


def _flat(made) -> list[torch.Tensor]:
    if isinstance(made, tuple):  # with ``return_a``
        gathered, made = made
        return [gathered, *_flat(made)]
    return made if isinstance(made, list) else [made]


def _repeated() -> int:
    return state_of("test", None).repeated


def same_bits(rank, world):
    """By kind: whether a repeated call has the bits of the usual way, and how many calls were repeated."""
    found = {}
    for name, call in _kinds(rank, world):
        before = _repeated()
        repeated = [_flat(call(i)) for i in range(CALLS)]
        count = _repeated() - before
        repeats._blocks = True
        usual = [_flat(call(i)) for i in range(CALLS)]
        repeats._blocks = False
        finish()
        pairs = [pair for one, other in zip(repeated, usual, strict=True) for pair in zip(one, other, strict=True)]
        same = all(x.shape == y.shape and x.stride() == y.stride() and x.equal(y) for x, y in pairs)
        found[name] = same and not any(x.isnan().any() for x, _ in pairs), count
    return found


def compiled(rank, world):
    """By op: the largest difference of a compiled function from eager calls, and how many calls were repeated."""
    found = {}
    b, part = random(3, 512, 256), random(17 + rank, 512, 384)
    ops = {
        "gather": (128, lambda x: tsd.all_gather_matmul(x, b, form="fused")),
        "gather of two": (128, lambda x: torch.cat(tsd.all_gather_matmul(x, [b, b[:, :64]], form="fused"), 1)),
        "sum": (128 * world, lambda x: tsd.matmul_reduce_scatter(x, part, form="fused")),
        "all-reduce": (64, lambda x: tsd.matmul_all_reduce(x, part, form="fused")),
        "unfused all-reduce": (64, lambda x: tsd.matmul_all_reduce(x, part, form="unfused")),
        "gather, bias": (128, lambda x: tsd.all_gather_matmul(x, b, bias=b[0], activation="relu", form="fused")),
        "sum, bias": (128 * world, lambda x: tsd.matmul_reduce_scatter(x, part, bias=part[0], form="fused")),
    }
    for name, (rows, op) in ops.items():
        step, worst = torch.compile(lambda x, op=op: op(x * 2) + 1, dynamic=False), Worst()
        expected = [op(2 * random(100 * i + rank, rows, 512)) + 1 for i in range(CALLS)]
        before = _repeated()
        with torch.no_grad():
            for i in range(CALLS):
                worst.add(step(random(100 * i + rank, rows, 512)), expected[i])
        found[name] = worst.get(), _repeated() - before
    return found


def in_turn(rank, world, count):
    """The largest error of calls of all kinds in turn, without a barrier, on two streams; and the repeated ones."""
    kinds, worst = dict(_kinds(rank, world)), Worst()
    expected = {name: [_flat(call(i)) for i in range(3)] for name, call in kinds.items()}
    finish()
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    before = _repeated()
    for i in range(count):
        for name, call in kinds.items():
            number = i % 3
            stream = streams[i // 5 % 2]
            stream.wait_stream(streams[(i // 5 + 1) % 2])
            with torch.cuda.stream(stream):
                for out, right in zip(_flat(call(number)), expected[name][number], strict=True):
                    worst.add(out, right)
        if i % 16 == rank:
            time.sleep(0.002)
    streams[0].wait_stream(streams[1])
    return worst.get(), _repeated() - before


def late(rank, world, op):
    """What each rank raises where the last rank is late in a call that would be repeated."""
    call = dict(_kinds(rank, world))[op]
    for i in range(CALLS):
        call(i)
    finish()
    before = _repeated()
    assert before, "no call was repeated"
    x, b = random(rank, 128 * (1 if op == "gather" else world), 512), random(3, 512, 256)
    short = {"form": "fused", "deadline": 0.5}
    ops = {
        "gather": lambda: tsd.all_gather_matmul(x, b, **short),
        "sum": lambda: tsd.matmul_reduce_scatter(x, b, **short),
        "all-reduce": lambda: tsd.matmul_all_reduce(x, b, **short),
    }
    for _ in range(CALLS):
        ops[op]()
    finish()
    assert _repeated() > before
    torch.distributed.barrier()
    if rank == world - 1:
        time.sleep(3.0)
    return error_of_a_late_rank(ops[op])
