"""torch's ``symm_mem._async_input_mm``, a matmul whose left operand arrives while it runs, on `tilestream.matmul`.

Torch's own all-gather + matmul (``TORCH_SYMM_MEM_ENABLE_NATIVE_ASYNC_TP``) consists of copies, a stream write after
each, and this op. Torch's kernel exists only for Hopper, and waits without a bound. While a handle of
`tilestream.distributed.async_tp` is open, the op waits for chunks like `tilestream.matmul` with ``arrival=``: on the
CPU and on ROCm, too, and each wait has a bound.
"""

from __future__ import annotations

import torch

from tilestream.arrival import Arrival
from tilestream.ops.matmul import matmul

#: The op's registered name.
NAME = "_async_input_mm"


def register(library: torch.library.Library) -> None:
    """Register the op in ``library``, of ``symm_mem``, for the CPU and for GPUs (torch's key for ROCm is CUDA, too)."""
    for key in ("CPU", "CUDA", "Meta"):
        library.impl(NAME, async_input_mm, key, allow_override=True)


def async_input_mm(a: torch.Tensor, b: torch.Tensor, a_chunk_signals: torch.Tensor, a_chunk_pivot: int) -> torch.Tensor:
    """``a @ b``; each row of ``a`` is read after its chunk's signal.

    Parameters
    ----------
    a, b
        ``[M, K]``, ``[K, N]``.
    a_chunk_signals
        ``[chunks]`` of uint32 or int32, on ``a``'s device; nonzero once a chunk has arrived. Each chunk has
        ``M // chunks`` rows. The call zeroes the signals at its end, so each call needs its own, as in torch's caller.
    a_chunk_pivot
        The first chunk to be multiplied.

    Raises
    ------
    ValueError
        If the chunks do not divide the rows, the pivot is not a chunk, or the operands are not matrices of one K.
    TypeError
        If the signals are not 32-bit integers.
    ArrivalTimeout
        If a chunk does not arrive; on a GPU a later call raises it (see `tilestream.check`).
    """
    if a.dim() != 2 or b.dim() != 2:
        raise ValueError(f"{NAME}: a has {a.dim()} and b {b.dim()} dimensions; both have 2")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"{NAME}: a {list(a.shape)} and b {list(b.shape)} differ in K")
    if a_chunk_signals.dtype not in (torch.uint32, torch.int32) or a_chunk_signals.dim() != 1:
        raise TypeError(
            f"{NAME}: a_chunk_signals is {a_chunk_signals.dtype} {list(a_chunk_signals.shape)}; it must be "
            "uint32 [chunks]"
        )
    rows, chunks = a.shape[0], a_chunk_signals.numel()
    if not chunks or not rows or rows % chunks:
        raise ValueError(
            f"{NAME}: {rows} rows of a in {chunks} chunks (a_chunk_signals); each has as many: give signals whose "
            "number divides the rows"
        )
    if not 0 <= a_chunk_pivot < chunks:
        raise ValueError(
            f"{NAME}: a_chunk_pivot={a_chunk_pivot}; it must be one of the {chunks} chunks, 0 to {chunks - 1}"
        )
    if a.is_meta:
        return a.new_empty((rows, b.shape[1]))
    arrival = Arrival.uniform(rows // chunks, chunks, a_chunk_pivot, signals=a_chunk_signals.view(torch.int32))
    return matmul(a, b, arrival=arrival)
