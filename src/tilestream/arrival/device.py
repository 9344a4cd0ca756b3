"""Signals on a GPU, from the side of the launches that wait for them.

`tilestream.arrival.device_words` has the words, their streams and their producers. `tilestream.arrival.publishing` has
the matmul that signals the chunks (``publish=``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import ClassVar, NamedTuple

import torch

from tilestream.arrival.device_words import REPLAYED, zero
from tilestream.arrival.kernel_copies import KernelCopies
from tilestream.arrival.publishing import Publishing
from tilestream.core.copy_items import CopyArguments
from tilestream.runtime.driver import capture_id, follow_nodes
from tilestream.runtime.graphs import Branch, keep
from tilestream.runtime.streams import aside, current_stream


class GateWords(NamedTuple):
    """A launch's arguments for an operand's signals."""

    words: torch.Tensor  # ``int32[chunks]``
    quarantine: torch.Tensor  # ``int32[1]``, read and set by launches whose epoch is 0
    #: The epoch that the words are compared with; 0: any nonzero word is a signal, and the launch zeroes them at its
    #: end.
    epoch: int
    key: int  # names the signals in an error record


class SignalsAhead:
    """Replaces the `DeviceSignals` of an operand on the meta device, where a launch is compiled without waiting."""

    local_rows = None

    @staticmethod
    def use(local_rows: bool = False) -> GateWords:
        """See `DeviceSignals.use`."""
        words = torch.empty(1, dtype=torch.int32, device="meta")
        return GateWords(words, words, 1, 0)


class LocalRows(NamedTuple):
    """Rows of an arriving operand that this GPU already has in another tensor. A launch may read them there."""

    rows: torch.Tensor  # ``[n, K]``, contiguous, batch after batch
    #: first, height: the first of these rows in each batch of the operand, and their number.
    first: int
    height: int
    period: int  # rows of a batch of the operand
    #: Copies the rows into the operand, on the current stream, once; for a launch that reads them there.
    bring: Callable[[], None]


class InGraph(NamedTuple):
    """A filling that a graph repeats at each replay."""

    graph: int
    words: torch.Tensor  # ``int32[chunks]``, zeroed at the beginning of each replay
    #: Its copies and signals, after the zeroing and parallel to the launches that wait for them.
    branch: Branch
    #: Handles of the graph's streams on which a launch waits for the signals.
    readers: set[int]

    def void_if_late(self, epoch: int, needs: torch.Tensor | None = None) -> torch.Tensor:
        """As of `DeviceSignals`, of a launch that waits for this filling. A backward pass may have its own graph."""
        stream = torch.cuda.current_stream(self.words.device).cuda_stream
        if capture_id(stream) not in (0, self.graph):
            keep(stream, self.words)
        late = self.words < REPLAYED
        return torch.where((late if needs is None else late & needs).any(), float("nan"), 0.0)


class DeviceSignals(Publishing):
    """The signals of one input on a GPU. For the parameters see `tilestream.arrival.device_words.DeviceWords`."""

    #: Local rows for the launches of the present epoch.
    local_rows: LocalRows | None = None
    #: The copies that a waiting launch may make itself.
    copies: KernelCopies | None = None
    #: The filling that was captured last.
    _in_a_graph: InGraph | None = None
    #: Signals of failed producers, until a launch has reported the failure: the exception must outlive the arrival.
    _failed: ClassVar[dict[int, DeviceSignals]] = {}

    @property
    def index(self) -> int:
        """The device's index, as in `torch.Tensor.get_device`."""
        return -1 if self._device.index is None else self._device.index

    @property
    def copied(self) -> int:
        """See `Signals`."""
        return 0 if self.copies is None else self.copies.width

    @property
    def linked(self) -> bool:
        """See `Signals`."""
        return self.streamed and self.copies is None

    # Launches ------------------------------------------------------------------------------------------------------

    def use(self, local_rows: bool = False) -> GateWords:
        """The words that a launch on the current stream waits for; the launch is captured if the stream is.

        ``local_rows``: whether the launch reads the local rows in their own tensor.

        Raises
        ------
        RuntimeError
            If the launch is captured, and nothing in the graph would signal, or another launch of the graph zeroes the
            signals; or if another thread is issuing the matmul that signals.
        """
        stream = current_stream(self._device)
        self._settle(stream)
        self._come_behind_matmul(stream)
        if self.local_rows is not None and not local_rows:
            self.local_rows.bring()
        captured = torch.cuda.is_current_stream_capturing()
        graph = capture_id(stream.cuda_stream) if captured else 0
        if captured and (filling := self._filling_of(graph)) is not None:
            if stream.cuda_stream != filling.branch.stream:
                follow_nodes(stream.cuda_stream, filling.branch.begin, False)
            filling.readers.add(stream.cuda_stream)
            return GateWords(filling.words, self._quarantine, REPLAYED, self.key)
        if captured:
            self._enter_graph(graph)
        elif self.copies is not None:
            self.copies.follow(stream, self)
        if self._theirs is not None:
            self._theirs.record_stream(stream)
        if captured:
            copied = None if self.copies is None else self.copies.signals_in(graph)
            return GateWords(self._flags if copied is None else copied, self._quarantine, 0, self.key)
        if self._theirs is None:
            self._waits_on(stream.cuda_stream)
        return self.eager_words

    @property
    def eager_words(self) -> GateWords:
        """The words that an eager launch of the present epoch waits for."""
        if self._theirs is not None:
            return GateWords(self._theirs, self._quarantine, 0, self.key)
        return GateWords(self._eager, self._quarantine, self.epoch, self.key)

    def _filling_of(self, graph: int) -> InGraph | None:
        found = self._in_a_graph
        return found if found is not None and found.graph == graph else None

    @contextlib.contextmanager
    def filling_in_graph(self) -> Iterator[torch.Tensor]:
        """The block issues copies and signals into the current stream's graph; yields the words, to become `REPLAYED`.

        The copies follow the stream's earlier work, and the copies of the graph's preceding filling, whose launches may
        have given up. Later work of the stream waits for the chunks at gates alone.
        """
        stream = torch.cuda.current_stream(self._device).cuda_stream
        graph = capture_id(stream)
        with torch.inference_mode(False):
            words = torch.empty(self.count, dtype=torch.int32, device=self._device)
        zero(words)
        # A filling that fails half way may copy beside launches that wait for the one before: there is none then.
        before, self._in_a_graph = self._filling_of(graph), None
        with Branch(stream, () if before is None else before.branch.end) as branch:
            yield words
        self._in_a_graph = InGraph(graph, words, branch, set())

    @property
    def is_in_graphs(self) -> bool:
        """Whether a filling was captured."""
        return self._in_a_graph is not None

    @property
    def is_read_in_graph(self) -> bool | None:
        """Whether a launch on the current stream waits for a filling of its graph; None if the graph has no filling."""
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        found = self._filling_of(capture_id(stream))
        return None if found is None else stream in found.readers

    def _enter_graph(self, graph: int) -> None:
        if self.streamed and (self.copies is None or self.copies.signals_in(graph) is None):
            again = "this launch makes no copies: take copies='engine', and " if self.copies is not None else ""
            raise RuntimeError(
                f"arrival: a CUDA graph is being captured, and what ts.stream_in copies is not in it; {again}call the "
                "Stream's restart() in the capture, before this: each replay copies then"
            )
        if graph in self._captures:
            raise RuntimeError(
                "arrival: a launch of this graph waits for these signals already, and zeroes them when it has seen "
                "them; give the second launch an Arrival of its own, and signal both, or make the two matmuls one"
            )
        self._captures.add(graph)
        self._keep(self._store, self._flags)

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """The block that issues a launch whose kernel may make these copies: see `KernelCopies.launching`."""
        if self.copies is None:
            yield
            return
        captures, epoch = set(self._captures), self.epoch

        def issued(stream: torch.cuda.Stream, end: torch.cuda.Event) -> None:
            with self._bell:
                self._signalled_by_launch(stream, end, epoch)

        with self.copies.launching(issued):
            try:
                yield
            except BaseException:
                self._captures = captures
                raise

    def take_copies(self, copiers: int) -> CopyArguments:
        """The copies of a launch on the current stream, to be taken before `use`: see `KernelCopies.take`."""
        if self.copies is None:
            raise RuntimeError("arrival: the plan has the kernel make the copies, and no stream has offered them")
        captured = torch.cuda.is_current_stream_capturing()
        stream = torch.cuda.current_stream(self._device)
        return self.copies.take(copiers, capture_id(stream.cuda_stream) if captured else 0)

    @property
    def of_captured(self) -> DeviceSignals | InGraph:
        """What says later, by `void_if_late`, whether a launch that is captured now has missed a chunk."""
        return self._filling_of(capture_id(torch.cuda.current_stream(self._device).cuda_stream)) or self

    # Ends ----------------------------------------------------------------------------------------------------------

    def error(self, epoch: int) -> BaseException | None:
        """See `Signals`."""
        if self.hear is not None:
            self.hear()
        return super().error(epoch)

    def fail(self, error: BaseException, epoch: int | None = None) -> None:
        """Report that the producer cannot continue: chunks without an issued signal are at once signalled as failed.

        These signals follow the launches of earlier epochs, which may not have read the words yet.
        """
        with self._bell:
            self.stopped()
            super().fail(error, epoch)
            if self._theirs is not None or epoch not in (None, self.epoch):
                return
            self._failed[self.key] = self
            with aside(self._device) as stream:  # parallel to the streams that wait
                self._settle(stream)
                for event in self._over.values():
                    stream.wait_event(event)
                if self._lane is not None:
                    self._lane.ready.hold(stream.cuda_stream)
                missing = [chunk for chunk in range(self.count) if self._issued[chunk] < self.epoch]
                # Chunks with an earlier epoch's signal in flight come last, so that no other chunk waits for it.
                for chunk in sorted(missing, key=self._is_under_way):
                    self._follow(chunk, stream)
                    self._fail_chunks([chunk], stream)
                self._wrote(missing, stream)

    def _is_under_way(self, chunk: int) -> bool:
        last = self._last[chunk]
        return last is not None and not last.event.query()

    def overrule(self, error: BaseException) -> None:
        """Like `fail`, but also for chunks whose signals were issued and have not come: their stream may be stuck.

        A caller that releases that stream afterwards must wait for the launches of this epoch to end first.
        """
        with self._bell:
            super().fail(error, None)
            self._failed[self.key] = self
            missing = [chunk for chunk, there in enumerate(self.state()) if not there]
            with aside(self._device) as stream:
                self._settle(stream)
                self._fail_chunks(missing, stream)

    def reported(self) -> None:
        """Note that a launch has reported the producer's failure."""
        self._failed.pop(self.key, None)

    def reset(self) -> None:
        """End the quarantine: zero the words that captured launches read, on the current stream."""
        with self._bell, torch.cuda.device(self._device):
            self._settle(torch.cuda.current_stream())
            zero(self._quarantine)
            if self._theirs is None:
                zero(self._flags)
            else:
                self._retire()
                self._wipe()
        if self.copies is not None:
            self.copies.reset()


class PeerSignals(DeviceSignals):
    """Signals whose words other GPUs can write, in memory that outlives this object. The caller counts the epochs.

    Several objects may share the words if no two have the same epoch: words only grow.

    Parameters
    ----------
    words
        ``int32[count]`` on the device, none of them greater than the first epoch that is begun.
    """

    def __init__(self, words: torch.Tensor, device: torch.device) -> None:
        super().__init__(words.numel(), device, words)
        self._theirs, self._eager, self._flags, self.self_reset = None, words, words[:0], False

    def begin(self, epoch: int) -> None:
        """Have later launches wait for ``epoch``. The launches of the object's previous epoch must have ended."""
        with self._bell:
            self.epoch = epoch
            self._users.clear()
