"""`stream_experts`: the weights of the experts that a step needs, most rows first. Each expert is a chunk.

::

    offsets on the host:   all copies are issued at once, in the order of `tilestream.core.groups.by_load`
    offsets on the GPU:    copied to pinned memory after the router; a thread, not the caller, waits for that copy
                           and issues the experts' copies in that order: `tilestream.arrival.routed`
    an expert's copy:      its signal follows it; experts without rows are not copied, nor signalled to a GPU

A kernel that reads the same offsets takes the groups in the same order, so it waits only for the next copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tilestream.arrival.arrival import Arrival
from tilestream.arrival.filling import Order
from tilestream.arrival.routed import OffsetsCopy, ordered
from tilestream.arrival.signals import Signals
from tilestream.arrival.sources import Job, Source, claim_nothing, unversioned
from tilestream.arrival.stream import Stream, onto, target_of
from tilestream.core.errors import kind_of

_OP = "stream_experts"
Claim = Callable[[int, int], Job]


def stream_experts(
    weights: torch.Tensor, offsets: torch.Tensor, *, device: str | torch.device | None = None
) -> Stream:  # fmt: skip
    """Start copying the weights of the experts that have rows, the expert with most rows first; returns at once.

    `tilestream.grouped_mm` takes the stream in the place of ``b``: each expert's product begins when its weights have
    arrived. Experts without rows are not copied; their part of the tensor is unchanged. The buffer is kept:
    `Stream.restart` fills it for the next step, or for another layer.

    ``offsets`` may still be in computation: on a GPU they are copied to the host after the current stream's earlier
    work, and a thread, not the caller, waits for that copy before it orders the experts' copies.

    Parameters
    ----------
    weights
        ``[G, K, N]`` on the CPU, contiguous, or the transpose (``.mT``) of a contiguous tensor: a matrix an expert.
        Pinned memory is copied at the link's full speed, and by the copy engine alone.
    offsets
        int32 ``[G]``, on the CPU or on ``device``: the end of each expert's rows, as for `tilestream.grouped_mm`. Give
        the same offsets to both. For rows of an expert that is not brought the CPU raises at once; a GPU waits until
        the deadline, then the rows are NaN and `ArrivalTimeout` names the expert as a chunk.
    device
        See `tilestream.stream_in`.

    Returns
    -------
    Stream
        Its ``tensor`` is ``[G, K, N]``, with the strides' order of ``weights``.

    Raises
    ------
    ValueError, TypeError
        If the weights or the offsets do not fit. If offsets on a GPU decrease or are negative, the call that waits for
        the experts raises.

    Examples
    --------
    >>> weights, x = torch.randn(4, 8, 6), torch.randn(5, 8)
    >>> ends = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    >>> with stream_experts(weights, ends) as experts:
    ...     y = tilestream.grouped_mm(x, experts, ends)
    """
    turned = _check_weights(weights)
    target = target_of(_OP, weights, device)
    count = weights.shape[0]
    host = weights.mT if turned else weights
    source = Source(host, lambda: f"{count} experts {list(weights.shape[1:])} {str(weights.dtype)[6:]}", claim_nothing)
    if target.type == "cpu":
        with torch.inference_mode(False):
            source.tensor = torch.empty(host.shape, dtype=host.dtype, device="cpu")
        source.claim = _copies(host, source.tensor)
    route = _Route(weights, target)
    order = route(source, offsets, None)
    chunked = Arrival.uniform(host.shape[1], count)
    if target.type == "cpu":
        return Stream(chunked.with_signals(Signals(count)), source, order=order, route=route, turned=turned)
    return onto(target, source, chunked, False, order=order, route=route, turned=turned)


def _check_weights(weights: torch.Tensor) -> bool:
    """Whether each matrix is stored as its transpose; raise if ``weights`` are not experts' weights."""
    if not isinstance(weights, torch.Tensor):
        raise TypeError(f"{_OP}: weights is {kind_of(weights)}; it must be a torch.Tensor [G, K, N]")
    if weights.device.type != "cpu":
        raise ValueError(f"{_OP}: weights is on {weights.device}; what is streamed is on the CPU: weights.cpu()")
    if weights.is_nested:  # torch has no shape of it to print
        raise TypeError(f"{_OP}: weights is nested; dense tensors are streamed: torch.stack(weights.unbind())")
    if weights.layout != torch.strided:
        raise TypeError(f"{_OP}: weights has layout {weights.layout}; dense tensors are streamed: weights.to_dense()")
    if weights.dim() != 3 or 0 in weights.shape:
        raise ValueError(f"{_OP}: weights has shape {list(weights.shape)}; it must be [G, K, N], none of them 0")
    if not weights.is_contiguous() and not weights.mT.is_contiguous():
        raise ValueError(
            f"{_OP}: weights has strides {weights.stride()}; experts lie in one piece, or as the transpose of such: "
            "weights.contiguous().pin_memory()"
        )
    return not weights.is_contiguous()


class _Route:
    """The `tilestream.arrival.stream.Route` of a step."""

    ends: Sequence[int] | None = None

    def __init__(self, weights: torch.Tensor, target: torch.device) -> None:
        self._like, self._target = (weights.shape, weights.stride(), weights.dtype), target
        self._copy: OffsetsCopy | None = None

    def __call__(self, source: Source, offsets: torch.Tensor, weights: torch.Tensor | None) -> Order:
        """See `Route`."""
        shape, strides, dtype = self._like
        if isinstance(offsets, torch.Tensor) and (offsets.is_nested or offsets.layout != torch.strided):
            what = "is nested" if offsets.is_nested else f"has layout {offsets.layout}"
            dense = "torch.cat(offsets.unbind())" if offsets.is_nested else "offsets.to_dense()"
            raise TypeError(f"{_OP}: offsets {what}; it must be a dense tensor torch.int32 {list(shape[:1])}: {dense}")
        if not isinstance(offsets, torch.Tensor) or offsets.dtype != torch.int32 or tuple(offsets.shape) != shape[:1]:
            what = (
                f"{list(offsets.shape)} {offsets.dtype}" if isinstance(offsets, torch.Tensor)
                else kind_of(offsets)
            )  # fmt: skip
            raise ValueError(
                f"{_OP}: offsets is {what}; it must be torch.int32 {list(shape[:1])}: where each expert's end"
            )
        if offsets.device.type != "cpu" and offsets.device != self._target:
            there = "" if self._target.type == "cpu" else f" or on {self._target}"
            raise ValueError(f"{_OP}: offsets is on {offsets.device}; it must be on the CPU{there}")
        ends = None if offsets.is_cuda else offsets.tolist()
        order = None if ends is None else ordered(ends)  # raises before anything is changed
        if weights is not None:
            turned = _check_weights(weights)
            if (weights.shape, weights.stride(), weights.dtype) != self._like:
                raise ValueError(
                    f"{_OP}: weights {list(weights.shape)} {weights.dtype}, strides {weights.stride()}; those of the "
                    f"stream are {list(shape)} {dtype}, strides {strides}"
                )
            host = weights.mT if turned else weights
            if self._target.type == "cpu":
                source.claim = _copies(host, source.tensor)
            else:
                source.tensor = host
        self.ends = ends
        if order is None:
            source.readers = 1
            return self._behind_the_router(offsets)
        # A copy on the CPU takes a core's time; a copy from pinned memory to the GPU is issued without waiting.
        source.readers = int(self._target.type == "cpu" or not source.tensor.is_pinned())
        return lambda: order

    def _behind_the_router(self, offsets: torch.Tensor) -> Order:
        """Copy offsets to the host on the current stream; the returned `Order` waits for the copy."""
        before = self._copy
        if before is not None and before.has_come:
            ends = before.ends
        else:
            with torch.inference_mode(False):
                ends = torch.empty(offsets.shape, dtype=torch.int32, pin_memory=True, device="cpu")
        self._copy = OffsetsCopy(offsets, ends)
        return self._copy


def _copies(host: torch.Tensor, into: torch.Tensor) -> Claim:
    """Copy rows of ``host`` to ``into``."""
    rows, places = host.detach().flatten(0, 1), unversioned(into)

    def claim(begin: int, end: int) -> Job:
        def copy() -> None:
            with torch.inference_mode():  # the source may be an inference tensor
                places[begin:end].copy_(rows[begin:end])

        return copy

    return claim
