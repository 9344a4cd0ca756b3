"""The exceptions of running launches. Each names what the caller needs to act."""

from __future__ import annotations

from typing import Any

#: The item of an expiry that held up no item.
NO_ITEM = "none (a chunk that no tile reads)"


def tile_name(tile: int, pm: int, pn: int, batch: int | None) -> str:
    """A tile's name in messages; ``batch`` is None if there is only one."""
    where = f"batch {batch}, " if batch is not None else ""
    return f"tile {tile} ({where}row tile {pm}, column tile {pn})"


def source_name(source: int, group: int) -> str:
    """The name in messages of the tiles of a source's group; ``group`` -1: of all groups."""
    return f"source {source}" if group < 0 else f"source {source}, group {group}"


def kind_of(value: object) -> str:
    """What a value is, in messages on its type: ``a list``, ``an int``, ``None``, ``a NumPy array``."""
    name = "NumPy array" if type(value).__name__ == "ndarray" else type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


class TilestreamError(Exception):
    """Base of the exceptions that a running kernel reports. Bad arguments raise `ValueError` and `TypeError`."""


class ArrivalTimeout(TilestreamError, TimeoutError):
    """A chunk did not arrive before the launch's deadline. Tiles that were not computed are NaN.

    Attributes
    ----------
    op : str
        The operation that waited.
    worker : int
        The worker whose wait reached the deadline, from 0.
    chunk : int
        The chunk that did not arrive.
    item : str
        The first work item, in the schedule's order, that was not computed.
    waited : float
        Seconds that this worker waited for this chunk.
    deadline : float
        The launch's deadline in seconds.
    rank : int or None
        The rank that reports, if there are several.
    argument : str
        The argument that the chunk belongs to: ``arrival`` or ``weight_arrival``.
    source, group : int or None
        Of a `tilestream.SourceArrival`: the source and the group whose rows did not arrive; ``group`` is None if it is
        the source's counts. Else both are None.
    held : float
        Seconds that the driver held up a copy of a stream's producer; 0 if it held up none.
    """

    def __init__(
        self, op: str, worker: int, chunk: int, item: str, waited: float, deadline: float, rank: int | None = None,
        argument: str = "arrival", source: tuple[int, int] | None = None, held: float = 0.0,
    ) -> None:  # fmt: skip
        self.op, self.worker, self.chunk, self.item = op, worker, chunk, item
        self.waited, self.deadline, self.rank, self.argument, self.held = waited, deadline, rank, argument, held
        self.source: int | None = None
        self.group: int | None = None
        what = f"chunk {chunk}"
        if source is not None:
            self.source, self.group = source[0], source[1] if source[1] >= 0 else None
            what = source_name(*source) if self.group is not None else f"counts of {source_name(*source)}"
        where = f"rank {rank}, worker {worker}" if rank is not None else f"worker {worker}"
        way_out = "Check that the chunk's producer runs and signals it, or pass a larger deadline="
        if held:
            way_out = (
                f"The driver held up a copy of its producer for {held:.3f} s: while a thread copies from the GPU to "
                "pageable memory (tolist(), cpu(), numpy()) on the default stream, other threads' copies wait. Wait "
                "for the chunks before that (stream.wait()), or copy on another stream"
            )
        super().__init__(
            f"{op}: {argument}'s {what} did not arrive within the deadline of {deadline:g} s: {where} waited "
            f"{waited:.3f} s for it; first item not taken: {item}. What was not computed is NaN. "
            f"{way_out}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        where = (self.op, self.worker, self.chunk, self.item)
        group = -1 if self.group is None else self.group
        source = None if self.source is None else (self.source, group)
        return type(self), (*where, self.waited, self.deadline, self.rank, self.argument, source, self.held)


class ProducerStopped(TilestreamError):
    """A producer was closed before it had delivered every chunk. The missing chunks will not arrive."""


class GroupBroken(TilestreamError):
    """The process group of this name lost a peer, or one of its ranks gave up waiting. It cannot be used any more.

    Other groups are not affected. A new group of the remaining ranks works. ``reason`` says what happened, and where.
    """

    def __init__(self, group: str, reason: str) -> None:
        self.group, self.reason = group, reason
        super().__init__(
            f"process group {group!r} is broken: {reason}. Destroy it, and make a new one of the ranks that are left"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.group, self.reason)
