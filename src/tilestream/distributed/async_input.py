"""torch's ``symm_mem._async_input_mm``, a product whose left operand arrives, on our matmul.

torch's own all-gather + matmul (``TORCH_SYMM_MEM_ENABLE_NATIVE_ASYNC_TP``) is copies, a stream write behind each, and
this op. Its kernel is for Hopper, and waits without a bound; a ROCm build has none, and the CPU has none. While a
handle of `tilestream.distributed.async_tp` is open the op is ours: the product waits for chunks as `tilestream.matmul`
with ``arrival=`` does, with a bound on each wait.
"""

from __future__ import annotations

import torch

from tilestream.arrival import Arrival
from tilestream.ops.matmul import matmul

#: As it is registered.
NAME = "_async_input_mm"


def register(library: torch.library.Library) -> None:
    """Register the op in ``library``, of ``symm_mem``: for the CPU and for GPUs (ROCm's, too, are "CUDA" to torch)."""
    for key in ("CPU", "CUDA", "Meta"):
        library.impl(NAME, async_input_mm, key, allow_override=True)


def async_input_mm(a: torch.Tensor, b: torch.Tensor, a_chunk_signals: torch.Tensor, a_chunk_pivot: int) -> torch.Tensor:
    """``a @ b``, each row of ``a`` read after its chunk's signal.

    Parameters
    ----------
    a, b
        ``[M, K]``, ``[K, N]``.
    a_chunk_signals
        ``[chunks]`` of uint32 or int32, on ``a``'s device: not 0 once a chunk is there. Chunks are of ``M // chunks``
        rows. Zeroed once all were seen: one call uses them, as torch's own caller does.
    a_chunk_pivot
        The chunk to begin with.

    Raises
    ------
    ValueError
        If the chunks do not divide the rows, there is no such chunk, or the operands are no matrices of one K.
    TypeError
        If the signals are no words of 32 bits.
    ArrivalTimeout
        If a chunk does not come: on a GPU, by a later call (see `tilestream.check`).
    """
    if a.dim() != 2 or b.dim() != 2:
        raise ValueError(f"{NAME}: a has {a.dim()} and b {b.dim()} dimensions; both have 2")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"{NAME}: a {list(a.shape)} and b {list(b.shape)} differ in K")
    if a_chunk_signals.dtype not in (torch.uint32, torch.int32) or a_chunk_signals.dim() != 1:
        raise TypeError(
            f"{NAME}: a_chunk_signals is {a_chunk_signals.dtype} {list(a_chunk_signals.shape)}; it is uint32 [chunks]"
        )
    rows, chunks = a.shape[0], a_chunk_signals.numel()
    if not chunks or not rows or rows % chunks:
        raise ValueError(
            f"{NAME}: {rows} rows of a in {chunks} chunks (a_chunk_signals); each has as many: give signals whose "
            "number divides the rows"
        )
    if not 0 <= a_chunk_pivot < chunks:
        raise ValueError(f"{NAME}: a_chunk_pivot={a_chunk_pivot}; it is one of the {chunks} chunks, 0 to {chunks - 1}")
    if a.is_meta:
        return a.new_empty((rows, b.shape[1]))
    arrival = Arrival.uniform(rows // chunks, chunks, a_chunk_pivot, signals=a_chunk_signals.view(torch.int32))
    return matmul(a, b, arrival=arrival)
