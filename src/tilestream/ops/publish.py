"""A matmul on a GPU that signals each chunk of its output, so that consumers begin before it ends.

The Hopper kernel signals by itself: `tilestream.kernels.hopper.publish`. For problems that it does not take (another
architecture, an operand that TMA cannot address), each chunk is a launch, and the stream signals after it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from tilestream.arrival.flat import DEFAULT_DEADLINE, FlatArrival
from tilestream.core.chunks import Chunks
from tilestream.core.operands import GemmOperands
from tilestream.launch.gate import PublishArguments
from tilestream.ops import gated, gpu
from tilestream.ops.operands import epilogue_of
from tilestream.plan import limit as limits
from tilestream.plan.problem import Incoming
from tilestream.runtime.channel import check_device
from tilestream.runtime.driver import stream_write

if TYPE_CHECKING:
    from tilestream.arrival.device import DeviceSignals
    from tilestream.launch.launch import GemmLaunch

logger = logging.getLogger(__name__)


class Publication:
    """Signals of an output's chunks in GPU memory, and the counts of their tiles. Epochs only grow.

    Parameters
    ----------
    chunks
        The largest number of chunks.
    """

    def __init__(self, chunks: int, device: torch.device) -> None:
        self.chunks = chunks
        with torch.inference_mode(False):
            self._words = torch.zeros(2 * chunks, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()  # launches may be on any stream

    def at(self, epoch: int) -> PublishArguments:
        """The arguments of a launch that signals ``epoch``."""
        return PublishArguments(self._words[: self.chunks], self._words[self.chunks :], epoch)

    def address(self, chunk: int) -> int:
        """The address of a chunk's signal: a 32-bit word that is at least the epoch once the chunk is complete."""
        return self._words.data_ptr() + 4 * chunk

    def state(self) -> tuple[list[int], list[int]]:
        """The signals and the counts. Waits for the current stream."""
        words: list[int] = self._words.tolist()
        return words[: self.chunks], words[self.chunks :]


def publish(x: GemmOperands, flat: FlatArrival, how: gpu.How, op: str) -> str:
    """``out = epilogue(a @ b)``. Each chunk of its rows is signalled in the arrival's present epoch.

    Returns when it is issued on the current stream of the operands' device. ``how`` and ``op`` as for
    `tilestream.ops.gpu.run`.

    Returns
    -------
    str
        Why each chunk is a launch; empty if one kernel signals all chunks.
    """
    device = x.a.device
    check_device(device.index)
    signals = cast("DeviceSignals", flat.signals(op, device))
    incoming = flat.published(x.out.shape[:-1].numel())
    with torch.cuda.device(device):
        launch, why = _kernel(x, incoming, how._replace(schedule="dynamic"), op)
        captured = torch.cuda.is_current_stream_capturing()
        words = PublishArguments(*signals.publish())
        try:
            if launch is not None:
                gpu.issue(launch, _published(x, words), None, op)
            else:
                for chunk in _chunk_by_chunk(x, incoming, how, op):
                    signals.set(chunk)
            signals.published(None if launch is None else incoming.pivot)
        except BaseException as error:
            if not captured:  # a failed capture has neither a graph nor readers
                signals.fail(error)  # readers that wait for the other chunks raise it
            raise
    return why


def matmul_published(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, publication: Publication, epoch: int, rows_per_chunk: int,
    pivot: int = 0, *, scale_a: torch.Tensor | None = None, scale_b: torch.Tensor | None = None,
    fast_accum: bool = True, limit: int = 0, op: str = "matmul",
) -> str:  # fmt: skip
    """``out = scale_a * scale_b * (a @ b)``. Each chunk of ``out``'s rows is signalled with ``epoch`` when complete.

    Chunks are computed from ``pivot`` on and may be completed in any order. Issued on the current stream.

    Parameters
    ----------
    a, b, out
        ``[M, K]``, ``[K, N]``, ``[M, N]``, none of them empty, on one GPU.
    epoch
        Larger than that of the previous call with this ``publication``.
    rows_per_chunk
        Rows of each chunk; the last chunk may have fewer.

    Returns
    -------
    str
        As from `publish`.
    """
    chunks = Chunks.uniform(out.shape[0], rows_per_chunk)
    if chunks.count > publication.chunks:
        raise ValueError(f"{op}: {chunks.count} chunks to publish; there are signals for {publication.chunks}")
    why = ""

    def issue() -> torch.Tensor:
        nonlocal why
        x = GemmOperands(a, b, out, epilogue_of(out, scale_a=scale_a, scale_b=scale_b))
        publishes, how = Incoming(chunks, pivot), gpu.How(fast_accum=fast_accum, limit=limit)
        why = _issue(x, publishes, how, publication, epoch, op)
        return out

    gate = None
    if limit == limits.limit():
        number = gated.number("a sum's", pivot, chunks.count, rows_per_chunk)
        published = cast("DeviceSignals", _Epoch(publication.at(epoch)))
        gate = gated.Gate(None, None, published, [0, 0, number, 0], pivot, DEFAULT_DEADLINE, op, checks=False)
    call = "matmul", a, b, out, None, None, 1.0, 1.0, None, None, scale_a, scale_b, fast_accum, "auto", None
    gated.product(call, gate, issue)
    return why


class _Epoch(NamedTuple):
    """An epoch of a `Publication` in the place of an `Arrival`'s signals. Nothing is done around the launch."""

    eager_publication: PublishArguments

    def publish(self) -> None:
        """Before the launch."""

    def published(self, first: int | None) -> None:
        """After the launch."""

    def stopped(self) -> None:
        """After a launch that the extension has refused: the Python path issues it."""


def _issue(x: GemmOperands, publishes: Incoming, how: gpu.How, publication: Publication, epoch: int, op: str) -> str:
    """Issue a product that is published. Returns why each chunk is a launch; empty if one kernel signals all."""
    launch, why = _kernel(x, publishes, how, op)
    if launch is not None:
        launch(_published(x, publication.at(epoch)))
        return ""
    stream = torch.cuda.current_stream(x.a.device).cuda_stream
    for chunk in _chunk_by_chunk(x, publishes, how, op):
        stream_write(stream, publication.address(chunk), epoch)
    return why


def _published(x: GemmOperands, publish: PublishArguments) -> GemmOperands:
    return x._replace(epilogue=x.epilogue._replace(publish=publish))


def _kernel(x: GemmOperands, publishes: Incoming, how: gpu.How, op: str) -> tuple[GemmLaunch | None, str]:
    """The launch that computes all chunks and signals them; or None and why, which is logged."""
    try:
        return gpu.find(x, how, publishes=publishes), ""
    except NotImplementedError as error:  # the plan's refusal, before anything is launched
        logger.info("%s: a launch for each chunk that is published: %s", op, error)
        return None, str(error)


def _chunk_by_chunk(x: GemmOperands, publishes: Incoming, how: gpu.How, op: str) -> Iterator[int]:
    """Launch the chunks one by one, from the pivot on. Yields each chunk after its last launch."""
    a, b, out, epilogue = x
    chunks, m = publishes.chunks, out.shape[-2]
    residual, scale_a, scale_b = epilogue.residual, epilogue.scale_a, epilogue.scale_b

    def of_batch(y: torch.Tensor, batch: int) -> torch.Tensor:
        return y if y.dim() < 3 else y[batch if y.shape[0] > 1 else 0]

    for i in range(chunks.count):
        chunk = (publishes.pivot + i) % chunks.count
        begin, end = chunks.range_of(chunk)
        while begin < end:  # a batch at a time
            batch, row = divmod(begin, m)
            rows = slice(row, min(m, row + end - begin))
            own = epilogue._replace(
                residual=None if residual is None else of_batch(residual, batch)[rows].unsqueeze(0),
                scale_a=scale_a if scale_a is None or scale_a.numel() == 1 else of_batch(scale_a, batch)[rows],
                scale_b=None if scale_b is None else of_batch(scale_b, batch),
            )
            part = GemmOperands(of_batch(a, batch)[rows], of_batch(b, batch), of_batch(out, batch)[rows], own)
            gpu.run(part, how, op=op)
            begin += rows.stop - rows.start
        yield chunk
