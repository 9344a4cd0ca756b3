"""A matmul on a GPU that signals each chunk of its output, for consumers that do not wait for its end.

The Hopper kernel publishes by itself: `tilestream.kernels.hopper.publish`. Where it does not take the problem (another
architecture, an operand that TMA cannot address), there is one launch a chunk, and the stream signals behind each.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from tilestream.arrival.chunks import Chunks
from tilestream.kernels.gate import PublishArguments
from tilestream.ops import gpu
from tilestream.ops.execute import make_epilogue
from tilestream.ops.operands import Options, multiply
from tilestream.plan.problem import Incoming
from tilestream.runtime.driver import stream_write

logger = logging.getLogger(__name__)


class Publication:
    """Signals of an output's chunks in a GPU's memory, and the counts behind them. Epochs only grow.

    Parameters
    ----------
    chunks
        How many there are at most.
    """

    def __init__(self, chunks: int, device: torch.device) -> None:
        self.chunks = chunks
        with torch.inference_mode(False):
            self._words = torch.zeros(2 * chunks, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()  # launches may be on any stream

    def at(self, epoch: int) -> PublishArguments:
        """What a launch is told that signals ``epoch``."""
        return PublishArguments(self._words[: self.chunks], self._words[self.chunks :], epoch)

    def address(self, chunk: int) -> int:
        """Of a chunk's signal: a 32-bit word, at least the epoch when the chunk is complete."""
        return self._words.data_ptr() + 4 * chunk

    def state(self) -> tuple[list[int], list[int]]:
        """Signals and counts. Waits for the current stream."""
        words: list[int] = self._words.tolist()
        return words[: self.chunks], words[self.chunks :]


def matmul_published(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    publication: Publication,
    epoch: int,
    rows_per_chunk: int,
    pivot: int = 0,
    *,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    fast_accum: bool = True,
    limit: int = 0,
    op: str = "matmul",
) -> str:
    """``out = scale_a * scale_b * (a @ b)``, each chunk of ``out``'s rows signalled with ``epoch`` when it is there.

    Chunks are computed from ``pivot`` on, and may be complete in any order. Issued on the current stream.

    Parameters
    ----------
    a, b, out
        ``[M, K]``, ``[K, N]``, ``[M, N]``, none of them empty, on one GPU.
    epoch
        Larger than that of the call before with this ``publication``.
    rows_per_chunk
        Of each chunk; the last has what is left.
    scale_a, scale_b, fast_accum, limit
        As canonical operands have them: see `tilestream.ops.gpu.run`.

    Returns
    -------
    str
        Why there is a launch a chunk; empty where the kernel publishes.
    """
    chunks = Chunks.uniform(out.shape[0], rows_per_chunk)
    if chunks.count > publication.chunks:
        raise ValueError(f"{op}: {chunks.count} chunks to publish; there are signals for {publication.chunks}")
    epilogue = make_epilogue(out, None, None, 1.0, 0.0, "none", scale_a, scale_b)
    publishes = Incoming(chunks, pivot)
    try:
        launch = gpu.find(
            a, b, out, epilogue, "auto", 0, chunking=(rows_per_chunk, pivot), fast_accum=fast_accum, limit=limit,
            publishes=publishes,
        )  # fmt: skip
    except NotImplementedError as error:  # the plan's refusal, before anything is launched
        why = str(error)
    else:
        launch(a, b, out, replace(epilogue, publish=publication.at(epoch)))
        return ""
    logger.info("%s: a launch for each chunk that is published: %s", op, why)
    stream = torch.cuda.current_stream(a.device).cuda_stream
    for i in range(chunks.count):
        begin, end = chunks.range_of((pivot + i) % chunks.count)
        rows = scale_a if scale_a is None or scale_a.numel() == 1 else scale_a[begin:end]
        options = Options(
            op, out=out[begin:end], out_dtype=out.dtype, scale_a=rows, scale_b=scale_b, fast_accum=fast_accum
        )
        multiply(a[begin:end], b, options)
        stream_write(stream, publication.address((pivot + i) % chunks.count), epoch)
    return why
