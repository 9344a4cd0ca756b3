"""Kernels launched through the driver: the same bytes as by Triton's own launch. Needs sm_90: tensor maps."""

from __future__ import annotations

import ctypes

import pytest
import torch
from gpu_runs import ON_NVIDIA, captured, nan_like, poison

if not (ON_NVIDIA and torch.cuda.get_device_capability() >= (9, 0)):
    pytest.skip("needs an NVIDIA GPU with tensor maps", allow_module_level=True)

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from streaming import run_together
from tilestream.launch.launcher import VARIES, Descriptor, Launcher, ptx_parameter_sizes
from tilestream.launch.tensor_map import SIZE, TensorMap
from tilestream.runtime.driver import cuda_function

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


def test_again_and_again_with_other_addresses():
    launch, _, _, words = matrices()
    pairs = [(x, nan_like(x)) for x in (matrix() for _ in range(20))]
    for tag in range(200):
        x, y = pairs[tag % len(pairs)]
        poison(y)
        launch(stream(), x.data_ptr(), y.data_ptr(), words.data_ptr(), tag, 2.0)
    assert all(torch.equal(x, y) for x, y in pairs)
    assert words.tolist() == [199, 398]


@pytest.mark.parametrize("batch", [1, B])
def test_a_batch(batch):
    x = matrix(torch.bfloat16, batch)
    by_triton, y = nan_like(x), nan_like(x)
    kernel = copy_batch[grid_of(x)](tritons(x), tritons(by_triton))
    Launcher(kernel, grid_of(x), (ours(x), ours(y)))(stream(), x.data_ptr(), y.data_ptr())
    assert torch.equal(by_triton, x)
    assert torch.equal(y, x)


@pytest.mark.parametrize("stride", [0, 1, 7, 2**50])
def test_a_batch_of_one_may_have_any_stride(stride):
    x = matrix(torch.bfloat16, 1)
    y = nan_like(x)
    kernel = copy_batch.warmup(tritons(x), tritons(y), grid=(1,))
    odd = Descriptor((1, M, N), (stride, N, 1))
    Launcher(kernel, grid_of(x), (odd, odd))(stream(), x.data_ptr(), y.data_ptr())
    assert torch.equal(y, x)


def test_rows_further_apart_than_they_are_long():
    wide = torch.randn(M, 2 * N, device="cuda").to(torch.bfloat16)
    x, out = wide[:, :N], torch.zeros_like(wide)
    y, words = out[:, N:], no_words()
    kernel = copy_matrix.warmup(tritons(x), tritons(y), words, 0, 2.5, grid=(1,))
    launch = Launcher(kernel, grid_of(x), (ours(x), ours(y), VARIES, VARIES, VARIES))
    launch(stream(), x.data_ptr(), y.data_ptr(), words.data_ptr(), 4, 2.5)
    assert torch.equal(y, x)
    assert not out[:, :N].any()


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


@pytest.mark.parametrize(
    ("shape", "small"), [((M, N), False), ((B, M, N), False), ((1, M, N), False), ((50, N), True), ((50, 8), True)]
)
@pytest.mark.parametrize("nan", [False, True])
def test_maps_are_tritons(shape, small, nan):
    if small and not ROUNDS:
        pytest.skip("Triton 3.6 leaves out what a small tensor's map needs on older drivers")
    x = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    box, padding = [1] * (x.dim() - 2) + [64, 64], int(nan)
    utils = triton.runtime.driver.active.utils
    fill = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor
    theirs = fill(x.data_ptr(), 3, 2, 9, box, list(x.shape), list(x.stride()), padding)
    found = TensorMap(9, 2, x.shape, x.stride(), box, 3, nan).at(x.data_ptr())
    assert len(found) == SIZE
    assert found in ctypes.string_at(id(theirs), type(theirs).__basicsize__), "in Triton's object, behind its header"


def test_parameters_lie_as_the_driver_says():
    launch, _, _, _ = matrices()
    try:
        info = cuda_function(
            "cuFuncGetParamInfo", ctypes.c_void_p, ctypes.c_size_t,
            ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t),
        )  # fmt: skip
    except AttributeError:
        pytest.skip("the driver is older than 12.4")
    offset, size, sizes = ctypes.c_size_t(), ctypes.c_size_t(), []
    while not info(launch._kernel.function, len(sizes), ctypes.byref(offset), ctypes.byref(size)):
        sizes.append(size.value)
    assert sizes == ptx_parameter_sizes(launch._kernel.asm["ptx"], launch._kernel.name)


def test_a_graph():
    launch, x, _, words = matrices()
    first, second = nan_like(x), nan_like(x)
    with captured() as graph:
        launch(stream(), x.data_ptr(), first.data_ptr(), words.data_ptr(), 7, 2.0)
        launch(stream(), first.data_ptr(), second.data_ptr(), words.data_ptr(), 8, 2.0)
    other = matrix()
    for _ in range(3):
        x.normal_()
        poison(first)
        launch(stream(), other.data_ptr(), first.data_ptr(), words.data_ptr(), 9, 2.0)  # what is captured is a copy
        graph.replay()
        assert torch.equal(second, x)
        assert words.tolist() == [8, 16]


def test_threads_on_streams_of_their_own():
    launch, _, _, _ = matrices()
    torch.cuda.synchronize()

    def run(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            words = no_words()
            for i in range(50):
                x = matrix()
                y = nan_like(x)
                launch(stream(), x.data_ptr(), y.data_ptr(), words.data_ptr(), 100 * number + i, 2.0)
                assert torch.equal(x, y)
                assert words[0].item() == 100 * number + i

    run_together(4, run)


def test_a_fresh_thread_that_used_nothing_of_cuda():
    launch, x, _, words = matrices()
    y, here = nan_like(x), stream()
    torch.cuda.synchronize()
    run_together(1, lambda _: launch(here, x.data_ptr(), y.data_ptr(), words.data_ptr(), 5, 2.0))
    torch.cuda.synchronize()
    assert torch.equal(y, x)


def test_a_launch_that_the_driver_refuses():
    launch, x, y, words = matrices()
    kernel = launch._kernel
    bad = Launcher(kernel, (1, 70000, 1), (ours(x), ours(y), VARIES, VARIES, VARIES))
    with pytest.raises(RuntimeError, match="did not launch copy_matrix: CUDA_ERROR_INVALID_VALUE"):
        bad(stream(), x.data_ptr(), y.data_ptr(), words.data_ptr(), 5, 2.0)
    launch(stream(), x.data_ptr(), y.data_ptr(), words.data_ptr(), 5, 2.0)
    assert torch.equal(y, x)
