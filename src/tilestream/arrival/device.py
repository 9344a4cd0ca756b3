"""Signals on a GPU, as the launches that wait for them use them.

The words, the streams that touch them and their producers: `tilestream.arrival.device_words`. A matmul that signals the
chunks (``publish=``): `tilestream.arrival.publishing`.
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
from tilestream.runtime.streams import aside


class GateWords(NamedTuple):
    """What a launch is told of an operand's signals."""

    words: torch.Tensor  # ``int32[chunks]``
    quarantine: torch.Tensor  # ``int32[1]``, read and set by launches whose epoch is 0
    #: The epoch they are compared with; 0: any word that is not 0 has arrived, and they are zeroed at the end.
    epoch: int
    key: int  # what an error record knows the signals by


class SignalsAhead:
    """Stands in for the `DeviceSignals` of an operand on the meta device, where a launch compiles and does not wait."""

    local_rows = None

    @staticmethod
    def use(local_rows: bool = False) -> GateWords:
        """As `DeviceSignals.use`."""
        words = torch.empty(1, dtype=torch.int32, device="meta")
        return GateWords(words, words, 1, 0)


class LocalRows(NamedTuple):
    """Rows of an arriving operand that this GPU has already, in another tensor, where a launch may read them."""

    rows: torch.Tensor  # ``[n, K]``, contiguous: those of the first batch, of the next, and so on
    #: first, height: in each batch of the operand, the first of them, and how many there are.
    first: int
    height: int
    period: int  # rows of a batch of the operand
    #: For a launch that reads them where the others are: copies them there, on the current stream, once.
    bring: Callable[[], None]


class InGraph(NamedTuple):
    """A filling of a tensor that is captured in a graph, so that each replay makes it."""

    graph: int
    words: torch.Tensor  # ``int32[chunks]``, zeroed at each replay before anything else touches them
    #: Its copies and signals, behind that and beside the launches that wait for them.
    branch: Branch
    #: Handles of the graph's streams on which a launch waits for them.
    readers: set[int]

    def void_if_late(self, epoch: int) -> torch.Tensor:
        """As of `DeviceSignals`, of a launch that waits for this filling. A backward pass may have its own graph."""
        stream = torch.cuda.current_stream(self.words.device).cuda_stream
        if capture_id(stream) not in (0, self.graph):
            keep(stream, self.words)
        return torch.where((self.words < REPLAYED).any(), float("nan"), 0.0)


class DeviceSignals(Publishing):
    """The signals of one input on a GPU. Parameters as of `tilestream.arrival.device_words.DeviceWords`."""

    #: Local rows for the launches of the present epoch.
    local_rows: LocalRows | None = None
    #: The copies that a launch that waits may make itself.
    copies: KernelCopies | None = None
    #: The last filling that was captured.
    _in_a_graph: InGraph | None = None
    #: Signals of producers that failed, until a launch has reported it: the exception shall outlive the arrival.
    _failed: ClassVar[dict[int, DeviceSignals]] = {}

    @property
    def index(self) -> int:
        """The device's, as `torch.Tensor.get_device` says it."""
        return -1 if self._device.index is None else self._device.index

    @property
    def copied(self) -> int:
        """As of `Signals`."""
        return 0 if self.copies is None else self.copies.width

    # Launches ------------------------------------------------------------------------------------------------------

    def use(self, local_rows: bool = False) -> GateWords:
        """What a launch on the current stream waits for; eager or captured as the stream is.

        ``local_rows``: it reads the local rows in their own tensor.

        Raises
        ------
        RuntimeError
            If it is captured, and nothing would signal, or another launch of that graph zeroes the signals; or if
            another thread is about to issue the matmul that signals.
        """
        stream = torch.cuda.current_stream(self._device)
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
            self._waiting[stream.cuda_stream] = self.epoch
        return self.eager_words

    @property
    def eager_words(self) -> GateWords:
        """What an eager launch of the present epoch is told."""
        if self._theirs is not None:
            return GateWords(self._theirs, self._quarantine, 0, self.key)
        return GateWords(self._eager, self._quarantine, self.epoch, self.key)

    def _filling_of(self, graph: int) -> InGraph | None:
        found = self._in_a_graph
        return found if found is not None and found.graph == graph else None

    @contextlib.contextmanager
    def filling_in_graph(self) -> Iterator[torch.Tensor]:
        """The block has the current stream's graph copy and signal the chunks; yields the words, to be `REPLAYED`.

        The copies come behind the stream's earlier work, and behind the copies of this graph's filling before, whose
        launches may have given up. The stream's later work runs beside them: its launches wait for chunks at gates.
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
        """Whether a launch on the current stream waits for a filling of its graph; None where the graph has none."""
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
        """See `KernelCopies.launching`: around a launch whose kernel may make these copies."""
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
        """What a launch on the current stream copies, before `use`: see `KernelCopies.take`."""
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

    def fail(self, error: BaseException, epoch: int | None = None) -> None:
        """The producer cannot go on: the chunks whose signals were not issued are signalled as failed, at once.

        But after the launches of earlier epochs, which may not have looked at those words yet.
        """
        with self._bell:
            self.stopped()
            super().fail(error, epoch)
            if self._theirs is not None or epoch not in (None, self.epoch):
                return
            self._failed[self.key] = self
            with aside(self._device) as stream:  # beside the streams that wait
                self._settle(stream)
                for event in self._over.values():
                    stream.wait_event(event)
                missing = [chunk for chunk in range(self.count) if self._issued[chunk] < self.epoch]
                # Last those for which an earlier epoch's signal is still under way: the others do not wait for it.
                for chunk in sorted(missing, key=self._is_under_way):
                    self._follow(chunk, stream)
                    self._fail_chunks([chunk], stream)
                self._wrote(missing, stream)

    def _is_under_way(self, chunk: int) -> bool:
        last = self._last[chunk]
        return last is not None and not last.event.query()

    def overrule(self, error: BaseException) -> None:
        """As `fail`, for the chunks whose signals were issued, too, and have not come: their stream may be stuck.

        A caller that lets that stream go afterwards sees to it that the launches of this epoch have ended by then.
        """
        with self._bell:
            super().fail(error, None)
            self._failed[self.key] = self
            missing = [chunk for chunk, there in enumerate(self.state()) if not there]
            with aside(self._device) as stream:
                self._settle(stream)
                self._fail_chunks(missing, stream)

    def reported(self) -> None:
        """A launch has reported that the producer failed."""
        self._failed.pop(self.key, None)

    def reset(self) -> None:
        """End the quarantine: zero what captured launches look at, on the current stream."""
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

    Several may have the same words, as long as no two of them are of one epoch: words only grow.

    Parameters
    ----------
    words
        ``int32[count]`` on the device, of which none is more than the first epoch that is begun.
    """

    def __init__(self, words: torch.Tensor, device: torch.device) -> None:
        super().__init__(words.numel(), device, words)
        self._theirs, self._eager, self._flags, self.self_reset = None, words, words[:0], False

    def begin(self, epoch: int) -> None:
        """A launch that is issued from here on waits for ``epoch``. Those of this object's epoch before have ended."""
        with self._bell:
            self.epoch = epoch
            self._users.clear()
