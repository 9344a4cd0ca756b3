"""What ranks do in ``test_gpu_distributed.py``. Each rank can make the random inputs of all ranks."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import threading
import time

import torch
import torch.distributed as dist

import tilestream as ts
from rank_checks import Gathered, Summed, raised, same_on_every_rank
from tilestream import distributed as tsd
from tilestream.distributed.dispatch import trial
from tilestream.distributed.group_state import groups_of, state_of
from tilestream.runtime.properties import cuda_properties
from tilestream_tools.sweep.contention import Neighbour

BF16 = torch.bfloat16


def random(seed: int, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """The same numbers on each rank."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def finish() -> None:
    """Wait for the GPU, and raise what has expired."""
    torch.cuda.synchronize()
    ts.check()


def late_in_turn(i: int, rank: int) -> None:
    """In some calls a rank is late on the host, in others on the GPU."""
    if i % 16 == rank:
        time.sleep(0.002)
    if i % 16 == 8 + rank:
        torch.cuda._sleep(2_000_000)


class Worst:
    """The largest error of many calls, kept on the GPU: no call waits for another."""

    def __init__(self) -> None:
        self._error = torch.zeros((), device="cuda")

    def add(self, out: torch.Tensor, expected: torch.Tensor, right: torch.Tensor | bool = True) -> None:
        """Infinite where ``out`` is NaN, or not ``right``."""
        error = (out.float() - expected.float()).abs().nan_to_num(torch.inf).max()
        self._error = torch.maximum(self._error, error if right is True else torch.where(right, error, torch.inf))

    def get(self) -> float:
        """Wait for all calls, raise what they have reported, and return the error."""
        finish()
        return self._error.item()


def error_of_a_late_rank(call) -> str:
    """What a late rank's calls raise: of the first ones it may have all parts."""
    for _ in range(3):
        error = raised(lambda: (call(), finish()))
        if error != "nothing":
            return error
    return "nothing"


def poison(group=None) -> None:
    """Fill the slots with NaN while no rank is in a call; of a mesh, those of each node."""
    state = state_of("test", groups_of("test", group)[-1])
    torch.cuda.synchronize()
    dist.barrier()
    for queue in state.queues.values():
        for slot in range(queue.memory.slots if queue.memory.slot_bytes else 0):
            queue.memory.slot(state.rank, slot).view(BF16).fill_(float("nan"))
    torch.cuda.synchronize()
    dist.barrier()


def in_poisoned_slots(count, call, group=None) -> list:
    """The results of so many calls, each in slots full of NaN; raises what a call has reported."""
    outs = []
    for _ in range(count):
        poison(group)
        outs.append(call())
        finish()
    return outs


def gathers(rank, world, cases, group=None):
    """Each case against all shards side by side, multiplied by torch. Returns a plan in words."""
    for shape, dim, columns, dtype, form, extra in cases:
        dtype, options = getattr(torch, dtype), dict(extra)
        bias, scaled = BF16 if options.pop("bias", 0) else None, options.pop("scaled", "")
        data = Gathered.random(
            random, world, shape, dim, columns, dtype, bias=bias, scaled=scaled, k_contiguous=True
        )  # fmt: skip
        call = functools.partial(
            tsd.all_gather_matmul, data.shards[rank], data.bs, gather_dim=dim, form=form, group=group, deadline=20,
            **data.arguments(rank), **options,
        )  # fmt: skip
        for _ in range(2):
            [(a, outs)] = in_poisoned_slots(1, lambda call=call: call(return_a=True), group)
            data.check(outs, a, options.get("activation"))
            [outs] = in_poisoned_slots(1, call, group)
            data.check(outs, None, options.get("activation"))
    return tsd.plan_all_gather_matmul(random(1, 256, 256), random(2, 256, 256), form="fused", group=group).explain()


#: The ways of consecutive calls.
IN_TURN = ("push", "pull", "pull", "push")


def iterates(rank, world, count):
    """Many calls without a barrier between, each on other data; ranks are late in turn, on the host or on the GPU."""
    b = random(1, 256, 256)
    # Shards of partial tiles, and shards that the kernel reads in place.
    sizes = [(96, 128)[i // 2 % 2] for i in range(8)]
    wholes = [random(1000 + i, size * world, 256) for i, size in enumerate(sizes)]
    expected = [whole @ b for whole in wholes]
    worst = Worst()
    for i in range(count):
        late_in_turn(i, rank)
        whole, size = wholes[i % 8], sizes[i % 8]
        with trial(True, 1, IN_TURN[i % len(IN_TURN)]):
            out = tsd.all_gather_matmul(whole[size * rank : size * (rank + 1)], b, deadline=20)
        worst.add(out, expected[i % 8])
    return worst.get()


def stay_away(absent, seconds):
    """Sleep for so many seconds; ``absent``: die ("killed"), or be stopped meanwhile, watchdogs and all ("stopped")."""
    if absent == "killed":
        os._exit(0)
    if absent == "stopped":
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        time.sleep(seconds)


def give_up_on_the_last_rank(rank, world, absent, timed, late, again, check):
    """The last rank does not come, is stopped, or dies: the others give up, and their GPUs stay usable.

    ``timed``: the others' call; ``check`` examines its result. ``late``: the last rank's call, if it is not killed.
    ``again``: the others' next call. Returns the errors of both, whether the GPU works, and the seconds of the first.
    """
    torch.cuda.synchronize()
    if rank == world - 1:
        stay_away(absent, 4)
        return "", error_of_a_late_rank(late), True, 0.0
    begin = time.monotonic()
    result = timed()
    torch.cuda.synchronize()
    waited = time.monotonic() - begin
    first = raised(ts.check)
    check(result)
    a, b = random(1, 256, 256), random(2, 256, 256)
    product = ts.matmul(a, b)
    torch.cuda.synchronize()
    assert torch.allclose(product.float(), (a @ b).float(), atol=1.0), "the GPU stays usable"
    return first, raised(again), product.isfinite().all().item(), waited


def expires(rank, world, absent, way):
    """A gather: what does not come is NaN, and the own rows are computed."""
    a, b = random(rank, 256, 256), random(99, 256, 256)

    def call(deadline, which=None, **more):
        with trial(True, 1, which) if which else contextlib.nullcontext():
            return tsd.all_gather_matmul(a, b, deadline=deadline, **more)

    def check(result):
        gathered, out = result
        mine = slice(256 * rank, 256 * rank + 256)
        assert out[mine].isfinite().all(), "its own rows are computed"
        assert gathered[mine].equal(a)
        for x in (gathered, out):
            assert x[-256:].isnan().all(), "what did not come is NaN"

    for either in ("push", "pull", way):
        call(20, either)
    return give_up_on_the_last_rank(
        rank, world, absent, lambda: call(0.5, way, return_a=True), lambda: call(5), lambda: call(5), check
    )


def check_void(total):
    """Without one of its parts."""
    assert total.isnan().all(), "a sum without one of its parts is NaN"


def two_groups(rank, world):
    """Two groups of the same ranks, in opposite order on two ranks, on a stream each."""
    groups = [dist.new_group(list(range(world))) for _ in range(2)]
    b = random(9, 256, 256)
    wholes = [random(60 + i, 128 * world, 256) for i in range(2)]
    # The first call of each kind is collective: in one order on all ranks.
    for i, way in ((0, "push"), (0, "pull"), (1, "push"), (1, "pull")):
        with trial(True, 1, way):
            tsd.all_gather_matmul(wholes[i][:128], b, group=groups[i], deadline=20)
    for i in (0, 1):
        tsd.matmul_reduce_scatter(wholes[i], b, group=groups[i], form="fused", deadline=20)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    outs, sums, here = [[], []], [[], []], slice(128 * rank, 128 * rank + 128)
    for j in range(10):
        for i in (0, 1) if rank % 2 else (1, 0):
            with torch.cuda.stream(streams[i]), trial(True, 1, IN_TURN[j % len(IN_TURN)]):
                mine = wholes[i][here]
                outs[i].append(tsd.all_gather_matmul(mine, b, group=groups[i], deadline=20))
                sums[i].append(tsd.matmul_reduce_scatter(wholes[i], b, group=groups[i], form="fused", deadline=20))
    finish()
    products = [(whole @ b).float() for whole in wholes]
    right = all(torch.allclose(o.float(), products[i], atol=1.0) for i in range(2) for o in outs[i])
    added = all(torch.allclose(o.float(), world * products[i][here], atol=world) for i in range(2) for o in sums[i])
    return right and added


def streams(rank, world):
    """Calls from twelve streams in turn."""
    b, whole = random(9, 256, 256), random(60, 128 * world, 256)
    mine, outs = whole[128 * rank : 128 * rank + 128], []
    torch.cuda.synchronize()
    for i, stream in enumerate([torch.cuda.Stream() for _ in range(12)]):
        with torch.cuda.stream(stream), trial(True, 1, IN_TURN[i % len(IN_TURN)]):
            outs.append(tsd.all_gather_matmul(mine, b, deadline=20))
    finish()
    return all(torch.allclose(out.float(), (whole @ b).float(), atol=1.0) for out in outs)


def captures(rank, world):
    """Under capture: unfused, and the plans say why; replays are right."""
    b, whole = random(9, 256, 256), random(60, 128 * world, 256)
    here = slice(128 * rank, 128 * rank + 128)
    mine = whole[here].clone()
    tsd.all_gather_matmul(mine, b, form="unfused", deadline=20)  # the ranks compare their calls before the capture
    tsd.matmul_reduce_scatter(whole, b, form="unfused", deadline=20)
    tsd.matmul_all_reduce(whole, b, form="unfused", deadline=20)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        said = [
            tsd.plan_all_gather_matmul(mine, b, form="fused").explain(),
            tsd.plan_matmul_reduce_scatter(whole, b, form="fused").explain(),
            tsd.plan_matmul_all_reduce(whole, b, form="fused").explain(),
        ]
        out = tsd.all_gather_matmul(mine, b, form="unfused")
        part = tsd.matmul_reduce_scatter(whole, b, form="unfused")
        total = tsd.matmul_all_reduce(whole, b, form="unfused")
    others = [random(70 + i, 128 * world, 256) for i in range(4)]
    for i in range(100):
        other = others[i % 4]
        mine.copy_(other[here])
        whole.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        product = (other @ b).float()
        assert torch.allclose(out.float(), product, atol=1.0)
        assert torch.allclose(part.float(), world * product[here], atol=1.0 * world)
        assert torch.allclose(total.float(), world * product, atol=1.0 * world)
    return said


def neighbour(rank, world):
    """Another kernel holds most SMs during the calls, the same number on each rank."""
    b, whole = random(9, 512, 512), random(60, 512 * world, 512)
    mine, here = whole[512 * rank : 512 * rank + 512], slice(512 * rank, 512 * rank + 512)
    product = (whole @ b).float()
    beside, right = Neighbour(cuda_properties(), deadline=25.0), True

    def calls(count: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        outs, sums = [], []
        for i in range(count):
            with trial(True, 1, IN_TURN[i % len(IN_TURN)]):
                outs.append(tsd.all_gather_matmul(mine, b, deadline=20))
            sums.append(tsd.matmul_reduce_scatter(whole, b, form="fused", deadline=20))
        return outs, sums

    calls(8)  # beside the neighbour no kernel is loaded, and no memory allocated
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    for held in (16, 100, beside.units - 1):
        with beside.taking(held):
            outs, sums = calls(6)
            torch.cuda.current_stream().synchronize()
        ts.check()
        right &= all(torch.allclose(out.float(), product, atol=2.0) for out in outs)
        right &= all(torch.allclose(out.float(), world * product[here], atol=2.0 * world) for out in sums)
    return right


def scatters(rank, world, cases, group=None, ulps=1):
    """Each case against the exact sum, by the error rule beside NCCL's; twice. Returns a plan in words.

    The second time with the same bits; over nodes if it is fused.
    """
    for (*rows, k), dim, n, dtype, form, extra in cases:
        dtype, options = getattr(torch, dtype), dict(extra)
        rows[dim] *= world
        bias, strided = torch.float32 if options.pop("bias", 0) else None, options.pop("strided", False)
        data = Summed.random(random, world, rows, k, n, dtype, bias=bias, **options)
        a, b = data.operands[rank]
        if strided:  # like what torch's compiler gathers along a later dimension
            a = a.transpose(0, dim).contiguous().transpose(0, dim)
        call = functools.partial(
            tsd.matmul_reduce_scatter, a, b, scatter_dim=dim, form=form, group=group, deadline=20, **data.arguments()
        )
        outs = in_poisoned_slots(2, call, group)
        data.check(outs[0], (rows, dim, dtype, form), dim=dim, rank=rank, ulps=ulps)
        assert outs[0].equal(outs[1]) or (group is not None and form != "fused"), (rows, dim, form)
    a, b = random(1, 256 * world, 256), random(2, 256, 256)
    return tsd.plan_matmul_reduce_scatter(a, b, form="fused", group=group).explain()


def reduces(rank, world, cases, group=None, form="fused", ulps=1):
    """Each case against the exact sum; four times, the same on every rank. Returns a plan in words.

    If it is fused, each time with the same bits.
    """
    for rows, k, n, dtype, extra in cases:
        data = Summed.random(random, world, rows, k, n, getattr(torch, dtype), bias=torch.float32, **extra)
        call = functools.partial(
            tsd.matmul_all_reduce, *data.operands[rank], form=form, group=group, deadline=20, **data.arguments()
        )
        outs = in_poisoned_slots(4 if form == "fused" else 1, call, group)
        assert all(x.view(torch.uint8).equal(outs[0].view(torch.uint8)) for x in outs), "another call has other bits"
        data.check(outs[0], (rows, k, n), ulps=ulps)
        same_on_every_rank(outs[0])
    return tsd.plan_matmul_all_reduce(random(1, 64, 256), random(2, 256, 256).t(), form=form, group=group).explain()


def adds_up(rank, world, count):
    """Many sums without a barrier between, each of other data; ranks are late in turn, on the host or on the GPU."""
    b = random(1, 256, 192)
    inputs = [[random(1000 + 10 * i + r, 160 * world, 256) for r in range(world)] for i in range(8)]
    expected = [sum(x.float() @ b.float() for x in of)[160 * rank : 160 * rank + 160] for of in inputs]
    first, worst = {}, Worst()
    for i in range(count):
        late_in_turn(i, rank)
        out = tsd.matmul_reduce_scatter(inputs[i % 8][rank], b, form="fused", deadline=20)
        worst.add(out, expected[i % 8], (out == first.setdefault(i % 8, out)).all())  # the same bits each time
    return worst.get()


def reduces_in_turn(rank, world, count):
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


def blocks(rank, world, count, group=None):
    """A gather and a sum in turn, as a layer has them, without a barrier between; ranks are late in turn."""
    wholes, here = [random(1000 + i, 96 * world, 256) for i in range(4)], slice(96 * rank, 96 * rank + 96)
    w1 = [random(40 + r, 256, 128) / 16 for r in range(world)]
    w2 = [random(60 + r, 128, 256) / 16 for r in range(world)]
    expected = [sum(((x @ a).relu() @ b).float() for a, b in zip(w1, w2, strict=True))[here] for x in wholes]
    worst, how = Worst(), {"form": "fused", "group": group, "deadline": 20}
    for i in range(count):
        late_in_turn(i, rank)
        up = tsd.all_gather_matmul(wholes[i % 4][here], w1[rank], activation="relu", **how)
        worst.add(tsd.matmul_reduce_scatter(up, w2[rank], **how), expected[i % 4])
    return worst.get()


def sum_expires(rank, world, absent, op):
    """A sum."""
    a, b = random(rank, (64 if op == "matmul_all_reduce" else 128 * world), 256), random(99, 256, 256)

    def call(deadline, form="fused"):
        return getattr(tsd, op)(a, b, form=form, deadline=deadline)

    for _ in range(3):
        call(20)
    return give_up_on_the_last_rank(
        rank, world, absent, lambda: call(0.5), lambda: call(5), lambda: call(5, "auto"), check_void
    )


def forgets(rank, world):
    """Nothing keeps a destroyed group, and its watchdogs end. Returns what is left, and its referrers."""
    import gc
    import weakref

    def watchdogs():
        return {t for t in threading.enumerate() if t.name == "tilestream-watchdog"}

    before = watchdogs()  # of earlier groups, which may be ending
    group = dist.new_group(list(range(world)))
    tsd.all_gather_matmul(random(1, 128, 256), random(2, 256, 256), group=group, form="fused", deadline=20)
    tsd.matmul_reduce_scatter(random(1, 128, 256), random(2, 256, 256), group=group, form="fused", deadline=20)
    torch.cuda.synchronize()
    state, weakly = weakref.ref(state_of("test", group)), weakref.ref(group)
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    end = time.monotonic() + 10
    while (state() is not None or watchdogs() - before) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.05)
    held = [] if weakly() is None else [str(type(x)) + str(x)[:200] for x in gc.get_referrers(weakly())]
    return state() is None, len(watchdogs() - before), held


def torch_shapes(rank, world):
    """torch's fused ops, called as in its own tests, against its implementation with plain collectives."""
    from torch.distributed import _symmetric_memory as symmetric

    group, ops = dist.group.WORLD, torch.ops.symm_mem
    name, done = group.group_name, []

    def near(ours, theirs, what):
        assert ours.shape == theirs.shape, (what, ours.shape, theirs.shape)
        assert ours.dtype == theirs.dtype, what
        error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        assert error < (1e-5 if theirs.dtype == torch.float32 else 1e-2), (what, error.item())
        done.append(what)

    batch, m, n, k = 8, 64, 16, 32
    with tsd.async_tp(group) as handle:
        for dim in (0, 1):
            for dtype in (torch.float32, BF16):
                a = random(42 + rank, batch, m // world, k, dtype=dtype)
                bs = [random(50 + 7 * rank + i, k, n, dtype=dtype) for i in range(3)]
                whole, outs = ops.fused_all_gather_matmul(a, bs, dim, name)
                their_whole, their_outs = symmetric._fused_all_gather_matmul_fallback(a, bs, dim, name)
                assert whole.equal(their_whole)
                for mine, theirs in zip(outs, their_outs, strict=True):
                    near(mine, theirs, f"all_gather_matmul, dim {dim}, {dtype}")
                a, b = random(60 + rank, batch * world, m * world, k, dtype=dtype), random(70, k, n, dtype=dtype)
                near(
                    ops.fused_matmul_reduce_scatter(a, b, "avg", dim, name),
                    symmetric._fused_matmul_reduce_scatter_fallback(a, b, "avg", dim, name),
                    f"matmul_reduce_scatter, dim {dim}, {dtype}",
                )
            fp8 = torch.float8_e4m3fn
            a = random(42 + rank, batch, m // world, k, dtype=fp8)
            bs = [random(80 + i, n, k, dtype=fp8).t() for i in range(3)]
            for rows in (False, True):
                scale = torch.full((batch, m // world, 1), 0.1, device="cuda") if rows else torch.tensor(0.1).cuda()
                scales = [torch.full((1, n), 0.1, device="cuda") if rows else torch.tensor(0.1).cuda() for _ in bs]
                how = (scales, dim, name, [None] * 3, [None] * 3, [BF16] * 3, [False] * 3)
                whole, outs = ops.fused_all_gather_scaled_matmul(a, bs, scale, *how)
                exact = whole.double()
                for mine, b in zip(outs, bs, strict=True):
                    near(mine, (exact @ b.double() * 0.01).to(BF16), f"all_gather_scaled_matmul, {dim}, {rows}")
        return done, [str(site) for site in handle.report()]


def llama(rank, world, whole=False):
    """A small Llama with torch's parallel styles. Returns its losses eager, and compiled on tilestream; and the sites.

    ``whole``: with its embedding and its head, as people who train have it; else its blocks, on numbers.
    """
    import torch._inductor.config as inductor
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    inductor.force_disable_caches = True  # a graph from the cache is not reported
    dim, heads, hidden, length, words = 512, 8, 1024, 512, 1024

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

        def forward(self, x):
            q, k, v = (w(x).unflatten(-1, (-1, dim // heads)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
            out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.wo(out.transpose(1, 2).flatten(2))

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.w1, self.w3 = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
            self.w2 = nn.Linear(hidden, dim, bias=False)

        def forward(self, x):
            return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
            self.attention, self.mlp = Attention(), Mlp()

        def forward(self, x):
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.norm = nn.Embedding(words, dim), nn.RMSNorm(dim)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.head = nn.Linear(dim, words, bias=False)

        def forward(self, x):
            x = self.embedding(x)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    mesh = init_device_mesh("cuda", (world,))
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    styles = {
        "norm1": SequenceParallel(), "norm2": SequenceParallel(), "attention": gathered, "mlp": gathered,
        **{f"attention.w{x}": ColwiseParallel() for x in "qkv"},
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "mlp.w1": ColwiseParallel(), "mlp.w3": ColwiseParallel(), "mlp.w2": RowwiseParallel(output_layouts=Shard(1)),
    }  # fmt: skip
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }

    def made():
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = Llama().to(BF16) if whole else nn.Sequential(Block(), Block()).to(BF16)
        for block in model.blocks if whole else model:
            parallelize_module(block, mesh, dict(styles))
        return parallelize_module(model, mesh, ends) if whole else model

    def loss_of(step, i):
        if whole:
            generator = torch.Generator("cuda").manual_seed(100 + i % 3)
            read = torch.randint(words, (2, length), device="cuda", generator=generator)
            # Its own words, shifted by one: a step of SGD lowers the loss.
            said = step(read)[:, :-1].flatten(0, 1).float()
            return nn.functional.cross_entropy(said, read[:, 1:].flatten())
        # Two sequences: a single one is gathered by a view, which torch's pass does not know.
        x = random(100 + i % 3, 2, length, dim).chunk(world, 1)[rank].contiguous()
        return (step(x).float() - 1).square().mean()

    def losses(compiled):
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        step = torch.compile(model) if compiled else model
        said = []
        for i in range(50):
            loss = loss_of(step, i)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            said.append(total.item() / world)
        return said

    plain = losses(False)
    with tsd.async_tp() as handle:
        ours = losses(True)
        finish()
        return plain, ours, [str(site) for site in handle.report()]


def called(sites):
    """The ops that a handle's report lists as called."""
    return {site.split()[0] for site in sites if ": left in " not in site}


def llama_holds(plain, ours, sites):
    """It learned as without tilestream, and both ops ran on tilestream."""
    assert all(abs(x - y) < 0.02 * abs(x) for x, y in zip(plain, ours, strict=True)), (plain, ours)
    assert ours[-1] < ours[0]
    assert called(sites) == {"fused_all_gather_matmul", "fused_matmul_reduce_scatter"}, sites
