"""Kernels launched through the driver do what they do by Triton's own launch. Needs sm_90: tensor maps.

``tests/runtime/test_launcher.py`` compares what the driver is given, byte by byte. Graphs: `test_gpu_launches`.
"""

from __future__ import annotations

import pytest
import torch
from gpu_runs import ON_NVIDIA, nan_like

if not (ON_NVIDIA and torch.cuda.get_device_capability() >= (9, 0)):
    pytest.skip("needs an NVIDIA GPU with tensor maps", allow_module_level=True)

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilestream.launch.launcher import VARIES, Descriptor, Launcher

load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
ROUNDS = "round_f32_to_tf32" in TensorDescriptor.__dataclass_fields__  # not in Triton 3.6

M, N, B = 1000, 520, 3
BOX = (64, 64)


@gluon.jit
def copy_box(x, y, at):
    """A box of a tensor."""
    box = gl.allocate_shared_memory(x.dtype, x.block_type.shape, x.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, x.block_type.nbytes)
    load(x, at, bar, box)
    mbarrier.wait(bar, 0)
    store(y, at, box)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tag"])
def copy_matrix(x, y, words, tag, scale):
    """A box of a matrix a program; the last one's words are the tag and a product."""
    BM: gl.constexpr = x.block_type.shape[0]
    BN: gl.constexpr = x.block_type.shape[1]
    copy_box(x, y, [gl.program_id(0) * BM, gl.program_id(1) * BN])
    if gl.program_id(0) + gl.program_id(1) == 0:
        gl.store(words, tag)
        gl.store(words + 1, (tag * scale).to(gl.int64))


@gluon.jit
def copy_batch(x, y):
    """A box of a batch of matrices a program."""
    BM: gl.constexpr = x.block_type.shape[1]
    BN: gl.constexpr = x.block_type.shape[2]
    copy_box(x, y, [gl.program_id(2), gl.program_id(0) * BM, gl.program_id(1) * BN])


def matrix(dtype=torch.bfloat16, *lead: int) -> torch.Tensor:
    return torch.randn(*lead, M, N, device="cuda").to(dtype)


def no_words() -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int64, device="cuda")


def tritons(x: torch.Tensor, **how) -> TensorDescriptor:
    """Triton's own descriptor; the box is 128 bytes wide."""
    box = [1] * (x.dim() - 2) + [BOX[0], 128 // x.element_size()]
    dtype = {torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}[x.dtype]
    return TensorDescriptor.from_tensor(x, box, gl.NVMMASharedLayout.get_default_for(box, dtype), **how)


def ours(x: torch.Tensor, **how) -> Descriptor:
    return Descriptor(tuple(x.shape), x.stride(), **how)


def grid_of(x: torch.Tensor) -> tuple[int, int, int]:
    return triton.cdiv(M, BOX[0]), triton.cdiv(N, 128 // x.element_size()), x.shape[0] if x.dim() == 3 else 1


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def matrices(dtype=torch.bfloat16, tag: int = 0):
    """``(launcher, x, y, words)``; what Triton launched of it is in y."""
    x, y, words = matrix(dtype), nan_like(matrix(dtype)), no_words()
    kernel = copy_matrix[grid_of(x)](tritons(x), tritons(y), words, tag, 2.5)
    launch = Launcher(kernel, grid_of(x), (ours(x), ours(y), VARIES, VARIES, VARIES))
    return launch, x, y, words


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_matrix(dtype):
    launch, x, by_triton, words = matrices(dtype, tag=1)
    assert words.tolist() == [1, 2]
    y = nan_like(x)
    launch(stream(), x.data_ptr(), y.data_ptr(), words.data_ptr(), 4, 2.5)
    assert torch.equal(by_triton, x)
    assert torch.equal(y, x)
    assert words.tolist() == [4, 10]


@pytest.mark.parametrize("batch", [1, B])
def test_a_batch(batch):
    x = matrix(torch.bfloat16, batch)
    by_triton, y = nan_like(x), nan_like(x)
    kernel = copy_batch[grid_of(x)](tritons(x), tritons(by_triton))
    Launcher(kernel, grid_of(x), (ours(x), ours(y)))(stream(), x.data_ptr(), y.data_ptr())
    assert torch.equal(by_triton, x)
    assert torch.equal(y, x)


def test_rounding_to_tf32():
    _, x, _, words = matrices(torch.float32)
    y = nan_like(x)
    kernel = copy_matrix.warmup(tritons(x), tritons(y), words, 0, 2.5, grid=(1,))
    launch = Launcher(kernel, grid_of(x), (ours(x, tf32=True), ours(y), VARIES, VARIES, VARIES))
    launch(stream(), x.data_ptr(), y.data_ptr(), words.data_ptr(), 4, 2.5)
    assert not (y.view(torch.int32) & 0x1FFF).any(), "13 bits fewer"
    assert (y - x).abs().le(x.abs() * 2**-11).all(), "to the nearest"
    if ROUNDS:
        by_triton = nan_like(x)
        copy_matrix[grid_of(x)](tritons(x, round_f32_to_tf32=True), tritons(by_triton), words, 4, 2.5)
        assert torch.equal(y, by_triton)
