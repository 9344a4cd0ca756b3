"""torch's `_async_input_mm` on `tilestream.matmul`: on the CPU; for GPUs its registration."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
import torch.distributed._symmetric_memory  # defines the op

from error_rule import Maths, check, nans, rand
from tilestream.core.errors import ArrivalTimeout
from tilestream.distributed import async_input

pytestmark = pytest.mark.usefixtures("small_tiles")


@pytest.fixture
def small_tiles(monkeypatch):
    from small_tiles import use_small_tiles

    use_small_tiles(monkeypatch)


@contextlib.contextmanager
def registered():
    library = torch.library.Library("symm_mem", "IMPL")
    async_input.register(library)
    try:
        yield
    finally:
        library._destroy()


@pytest.fixture
def op():
    """The op as torch's code calls it, registered as while a handle is open."""
    with registered():
        yield torch.ops.symm_mem._async_input_mm


@pytest.mark.parametrize("dtype", [torch.uint32, torch.int32], ids=str)
@pytest.mark.parametrize("pivot", range(3))
def test_rows_are_read_when_their_chunk_has_arrived(op, pivot, dtype):
    source, b = rand(48, 40), rand(40, 37)
    a, words = nans(48, 40), torch.zeros(3, dtype=dtype)
    a[16 * pivot : 16 * pivot + 16] = source[16 * pivot : 16 * pivot + 16]
    words[pivot] = 1  # a rank's own shard
    begun = threading.Event()

    def feed():
        begun.wait(300)
        for chunk in ((pivot + 2) % 3, (pivot + 1) % 3):
            a[16 * chunk : 16 * chunk + 16] = source[16 * chunk : 16 * chunk + 16]
            words.view(torch.int32)[chunk] = 1

    thread = threading.Thread(target=feed)
    thread.start()
    begun.set()
    answer = op(a, b, words, pivot)
    thread.join(300)
    check(answer, Maths(source, b))
    assert not words.view(torch.int32).any(), "zeroed at the end"


def test_a_chunk_that_never_comes(op, monkeypatch):
    from tilestream.arrival import flat

    monkeypatch.setattr(flat, "DEFAULT_DEADLINE", 0.2)
    with pytest.raises(ArrivalTimeout):
        op(rand(8, 4), rand(4, 4), torch.tensor([1, 0], dtype=torch.uint32), 0)


def test_meta(op):
    made = op(rand(8, 4).to("meta"), rand(4, 6).to("meta"), torch.zeros(2, dtype=torch.uint32, device="meta"), 1)
    assert (made.shape, made.device.type) == ((8, 6), "meta")


A, B, WORDS = rand(8, 4), rand(4, 4), torch.ones(2, dtype=torch.uint32)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((A[0], B, WORDS, 0), ValueError, "a has 1 and b 2 dimensions; both have 2"),
        ((A, B[:3], WORDS, 0), ValueError, r"a \[8, 4\] and b \[3, 4\] differ in K"),
        ((A, B, WORDS.float(), 0), TypeError, r"a_chunk_signals is torch.float32 \[2\]; it must be uint32 \[chunks\]"),
        ((A[:7], B, WORDS, 0), ValueError, "7 rows of a in 2 chunks .*: give signals whose number divides the rows"),
        ((A, B, WORDS[:0], 0), ValueError, "8 rows of a in 0 chunks"),
        ((A, B, WORDS, 2), ValueError, "a_chunk_pivot=2; it must be one of the 2 chunks, 0 to 1"),
        ((A, B, WORDS, -1), ValueError, "a_chunk_pivot=-1; it must be one of the 2 chunks, 0 to 1"),
    ],
)
def test_invalid_arguments(op, given, error, message):
    with pytest.raises(error, match=f"_async_input_mm: {message}"):
        op(*given)


def test_it_is_registered_for_all_devices_and_given_back_to_torch():
    def here(key):
        return torch._C._dispatch_has_kernel_for_dispatch_key("symm_mem::_async_input_mm", key)

    before = here("CUDA")
    with registered():
        assert here("CPU")
        assert here("CUDA")
    assert here("CUDA") == before
