"""The memory of a gather on GPUs: a slot's rows and scales, the own rows, and the copies that push them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from tilestream.arrival.device import LocalRows
from tilestream.core.protocols import gather
from tilestream.distributed.program import FIRST, SECOND
from tilestream.distributed.shards import Part, ScaledRows, Shards
from tilestream.distributed.symmetric import PeerMemory
from tilestream.runtime.sequence import CopyAcross, Operand

#: Scales begin at a multiple of this many bytes in a slot.
_ALIGN = 256
#: Bytes of a row's scale.
SCALE_BYTES = 4
#: The addresses of the caller's rows and scales, as values of an issue.
_ROWS, _SCALES = FIRST, SECOND


class Form(NamedTuple):
    """The values that decide the operations of a call."""

    shards: Shards
    dtype: torch.dtype
    scaled: bool
    way: gather.Way
    #: Whether the shard is sent from the own slot, since it is pulled or strided.
    from_slot: bool

    @property
    def size(self) -> int:
        """Bytes of all rows."""
        return math.prod(self.shards.shape) * self.dtype.itemsize

    @property
    def fills(self) -> bool:
        """Whether rows or scales are copied into the own slot before the call's kernel."""
        return self.from_slot or self.scaled


class Source(NamedTuple):
    """The rows or scales to send: bytes of a row, offset in a slot, address, and whether it is in the slot."""

    row_bytes: int
    at: int
    address: Operand
    from_slot: bool


class _Bring:
    """Copies the own rows into the slot, once for all launches of a call that read them in the slot."""

    def __init__(self, place: Callable[[torch.Tensor, torch.Tensor], None], *rows: torch.Tensor) -> None:
        self._place, self._rows, self.done = place, rows, False

    def __call__(self) -> None:
        if not self.done:
            self._place(*self._rows)
            self.done = True


def local_rows(rank: int, shards: Shards, mine: torch.Tensor, slot: torch.Tensor) -> LocalRows:
    """The own rows in the caller's tensor, with a copy into the slot for a launch that reads them there."""
    rows = shards.rows
    flat = mine.view(shards.batches * rows, shards.width)
    bring = _Bring(functools.partial(place, rank), slot, mine)
    return LocalRows(flat, rank * rows, rows, shards.world * rows, bring)


def is_brought(local: LocalRows) -> bool:
    """Whether a launch has had the own rows copied into the slot."""
    return isinstance(local.bring, _Bring) and local.bring.done


def place(rank: int, into: torch.Tensor, mine: torch.Tensor) -> None:
    """Copy the own rows to their place, batch by batch. Inside a GPU the driver copies by a kernel."""
    for there, source in zip(into[:, rank], mine, strict=True):
        copy(there, source)


def sources_of(memory: PeerMemory, rank: int, form: Form, slot: int) -> Iterator[Source]:
    """The rows and scales to send, from the caller's tensors or from the own slot."""
    address, row_bytes = memory.address(rank, slot), form.shards.width * form.dtype.itemsize
    yield Source(row_bytes, 0, address if form.from_slot else _ROWS, form.from_slot)
    if form.scaled:
        yield Source(SCALE_BYTES, scales_at(form), _SCALES, False)


def push(
    memory: PeerMemory, sources: Sequence[Source], shards: Shards, rank: int, part: Part, peer: int, slot: int,
    stream: Operand,
) -> Iterator[CopyAcross]:  # fmt: skip
    """The copies of a part of the own rows, and of its scales, to its place in a peer's slot."""
    target = memory.address(peer, slot)
    there, rows = shards.place(rank, part)
    for x in sources:
        first = there if x.from_slot else part.batch * shards.rows + part.begin
        source = x.address + first * x.row_bytes
        yield CopyAcross(stream, target + x.at + there * x.row_bytes, source, rows * x.row_bytes)


def slot_rows(memory: PeerMemory, rank: int, slot: int, form: Form) -> ScaledRows:
    """A slot as all ranks' rows, followed by their scales."""
    bytes_, shards, at = memory.slot(rank, slot), form.shards, scales_at(form)
    data = bytes_[: form.size].view(form.dtype).view(shards.shape)
    if not form.scaled:
        return ScaledRows(data, None)
    scales = bytes_[at : at + SCALE_BYTES * shards.total].view(torch.float32)
    return ScaledRows(data, scales.view(*shards.shape[:-1], 1))


def scales_at(form: Form) -> int:
    """The offset of all rows' scales in a slot."""
    return aligned(form.size)


def slot_size(shards: Shards, dtype: torch.dtype) -> int:
    """Bytes of a slot: all ranks' rows, and one scale a row."""
    return aligned(math.prod(shards.shape) * dtype.itemsize) + SCALE_BYTES * shards.total


def copy(to: torch.Tensor, source: torch.Tensor) -> None:
    """Copy on the current stream, for any strides."""
    to.copy_(source)


def aligned(size: int) -> int:
    """``size``, rounded up to the alignment of scales."""
    return -(-size // _ALIGN) * _ALIGN
