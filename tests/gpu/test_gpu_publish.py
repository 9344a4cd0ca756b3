"""Published outputs: a chunk that is signalled is there, whoever reads it; counts are left as they were found."""

from __future__ import annotations

import pytest
import torch

import tilestream as ts
from error_rule import Maths, check
from tilestream.ops.publish import Publication, matmul_published
from tilestream.runtime.driver import stream_wait
from tilestream.runtime.streams import aside

#: M, N, K, rows of a chunk, pivot: whole tiles, tails, tiles in several chunks, few rows, few columns.
CASES = [
    (2048, 1024, 512, 1024, 1), (2048, 1024, 4096, 512, 3), (1000, 776, 512, 250, 2), (1030, 520, 256, 103, 9),
    (16, 4096, 1024, 8, 1), (4096, 16, 1024, 1024, 0), (96, 256, 256, 48, 1), (4096, 4096, 1024, 2048, 1),
]  # fmt: skip


def operands(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(m, k, device="cuda").to(dtype), torch.randn(n, k, device="cuda").to(dtype).t()


@pytest.mark.parametrize(("m", "n", "k", "rows", "pivot"), CASES)
def test_each_chunk_is_read_as_soon_as_it_is_signalled(m, n, k, rows, pivot):
    a, b = operands(m, n, k)
    chunks = -(-m // rows)
    publication = Publication(chunks, a.device)
    for epoch in range(1, 6):
        a.normal_()
        out, copy = (torch.full((m, n), float("nan"), device="cuda", dtype=a.dtype) for _ in range(2))
        torch.cuda.synchronize()
        why = matmul_published(a, b, out, publication, epoch, rows, pivot)
        assert torch.cuda.get_device_capability()[0] != 9 or not why, why
        with aside(a.device) as stream:  # behind the launch, of which it waits for nothing but the words
            for i in range(chunks):
                chunk = (pivot + i) % chunks
                stream_wait(stream.cuda_stream, publication.address(chunk), epoch)
                copy[chunk * rows : (chunk + 1) * rows].copy_(out[chunk * rows : (chunk + 1) * rows])
        torch.cuda.synchronize()
        ts.check()
        assert copy.equal(out)
        assert publication.state() == ([epoch] * chunks, [0] * chunks)
    check(out, Maths(a, b))


def test_what_the_kernel_does_not_take_is_published_a_launch_a_chunk():
    a, b = operands(300, 130, 129)  # a stride that TMA cannot address
    publication, out = Publication(3, a.device), torch.empty(300, 130, device="cuda", dtype=a.dtype)
    assert matmul_published(a, b, out, publication, 1, 100, 2)
    assert publication.state() == ([1, 1, 1], [0, 0, 0])
    check(out, Maths(a, b))


@pytest.mark.parametrize("kind", ["tensor", "row"])
def test_fp8_with_scales(kind):
    a, b = operands(512, 256, 512, torch.float8_e4m3fn)
    one = kind == "tensor"
    scale_a = torch.rand(1 if one else 512, 1, device="cuda") + 0.5
    scale_b = torch.rand(1, 1 if one else 256, device="cuda") + 0.5
    publication, out = Publication(2, a.device), torch.empty(512, 256, device="cuda", dtype=torch.bfloat16)
    matmul_published(a, b, out, publication, 1, 256, 1, scale_a=scale_a, scale_b=scale_b)
    assert publication.state() == ([1, 1], [0, 0])
    check(out, Maths(a, b, scale_a=scale_a, scale_b=scale_b))


def test_more_chunks_than_signals_are_refused():
    a, b = operands(256, 64, 64)
    with pytest.raises(ValueError, match="4 chunks to publish; there are signals for 2"):
        matmul_published(a, b, torch.empty(256, 64, device="cuda", dtype=a.dtype), Publication(2, a.device), 1, 64)
