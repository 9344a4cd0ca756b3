"""What ranks do in ``test_gpu_distributed.py``, of gathers alone: late by a call, and alternating shapes."""

from __future__ import annotations

import time

import torch
from distributed_jobs import Worst, finish, late_in_turn, random

from tilestream import distributed as tsd
from tilestream.distributed.dispatch import trial


def late_by_a_call(rank, world, ways):
    """Each rank in turn is so late that the others have issued the next call, too."""
    b, mine = random(1, 256, 256), []
    # Shards of partial tiles, and shards that the kernel reads in place.
    sizes = [(96, 128)[i // len(ways) % 2] for i in range(4 * world)]
    wholes = [random(1000 + i, size * world, 256) for i, size in enumerate(sizes)]
    for i, whole in enumerate(wholes):
        if i % world == rank:
            time.sleep(0.3)
        shard = whole[sizes[i] * rank : sizes[i] * (rank + 1)].clone()
        with trial(True, 1, ways[i % len(ways)]):
            mine.append(tsd.all_gather_matmul(shard, b, deadline=20))
        shard.fill_(float("nan"))  # the caller may overwrite it
    finish()
    return all(
        torch.allclose(out.float(), (whole @ b).float(), atol=1.0) for out, whole in zip(mine, wholes, strict=True)
    )


#: `alternates`: shape of a shard, gather_dim, dtype, chunks of a shard, way, what else.
SHAPES = (
    ((96, 256), 0, "bfloat16", 1, "push", ""),
    ((130, 256), 0, "float16", 4, "pull", "return_a"),
    ((3, 32, 256), 1, "bfloat16", 2, "push", ""),
    ((128, 256), 0, "float8_e4m3fn", 2, "pull", "scaled"),
    ((96, 256), 0, "bfloat16", 3, "push", "strided"),
    ((4096, 256), 0, "bfloat16", 1, None, ""),
    ((64, 256), 0, "float8_e4m3fn", 1, "pull", "scaled"),
    ((1, 256), 0, "float16", 1, "push", ""),
    ((128, 256), 0, "bfloat16", 2, "push", "return_a"),
    ((3, 128, 256), 1, "bfloat16", 2, "push", ""),
    ((128, 256), 0, "float8_e4m3fn", 1, "push", "scaled"),
)


def alternates(rank, world, count):
    """Many calls without a barrier in between, each with another shape and data; ranks are late in turn."""
    calls = []
    for i, (shape, dim, dtype, _, _, how) in enumerate(SHAPES):
        dtype, fp8 = getattr(torch, dtype), "float8" in dtype
        b, data = random(900 + i, 128, 256, dtype=dtype).t(), []
        for j in range(3):
            shards = [random(1000 + 100 * i + 10 * j + r, *shape, dtype=dtype) for r in range(world)]
            scales = [random(70 + j + r, *shape[:-1], 1, dtype=torch.float32).abs() + 0.5 for r in range(world)]
            whole = torch.cat([x.float() for x in shards], dim)
            expected = whole @ b.float()
            mine, scale = shards[rank], None
            if fp8:
                scale, expected = scales[rank], expected * torch.cat(scales, dim)
            if how == "strided":
                mine = torch.stack([mine, mine.neg()], -1).flatten(-2)[..., ::2]
                assert not mine.is_contiguous()
            data.append((mine, scale, whole.to(dtype), expected))
        calls.append((b, torch.ones(1, 128, device="cuda") if fp8 else None, data))
    worst = Worst()
    for i in range(count):
        _, dim, _, chunks, way, how = SHAPES[i % len(SHAPES)]
        b, scale_b, data = calls[i % len(SHAPES)]
        mine, scale, whole, expected = data[i // len(SHAPES) % 3]
        late_in_turn(i, rank)
        with trial(True, chunks, way):
            out = tsd.all_gather_matmul(
                mine, b, gather_dim=dim, scale_a=scale, scale_b=scale_b, use_fast_accum=False,
                return_a=how == "return_a", deadline=20,
            )  # fmt: skip
        a, out = out if how == "return_a" else (None, out)
        worst.add(out, expected, True if a is None else (a == whole).all())
    return worst.get()
