"""Publishing on a GPU: a matmul that signals the chunks of its output, and the launches there that read them.

A reader must not take the SMs that the matmul still needs (invariant 10). So the matmul is issued first, and

- *words of ours*: a reader's stream waits for the first chunk's signal: the matmul has begun then, and its schedule is
  dynamic, so one worker of it is enough. That wait needs no bound (invariant 5): the launch that writes the word has
  been issued and waits for nothing, and words that only grow are never taken back. Where several launches make the
  output, the reader's stream waits for the last one's end;
- *a caller's own words*: others may write them, and a stream that waits for a word that is taken back is held for ever.
  So a reader's stream waits for the matmul's end. Each publication begins with zeros, behind all earlier uses and
  before all later ones, so no reader mistakes what the one before has left for a signal;
- *under capture* the reader comes behind the matmul's end, too, and each replay begins with zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilestream.arrival.device_words import DeviceWords, event_on
from tilestream.runtime.driver import capture_id, stream_wait


class PublishWords(NamedTuple):
    """What a launch is told that signals the chunks of its output."""

    #: signals, counts: ``int32[chunks]`` each.
    signals: torch.Tensor
    counts: torch.Tensor
    epoch: int  # the value that a signal is written as


class _Published(NamedTuple):
    """A matmul that signals the chunks of an epoch, as its readers must know it."""

    #: epoch, stream, end: which, on which stream, and behind its last launch.
    epoch: int
    stream: int
    end: torch.cuda.Event
    #: The address of the signal that says that it has begun, and the least value that says so; None where only the end
    #: does.
    first: tuple[int, int] | None = None
    graph: int = 0  # the capture that it is in; 0 outside


class Publishing(DeviceWords):
    """The part of `tilestream.arrival.device.DeviceSignals` that concerns a matmul that signals, and its readers."""

    #: Counts of the eager launches; made when one is first needed.
    _counts: torch.Tensor | None = None
    #: The last matmul that was issued, and the last that was captured.
    _published: _Published | None = None
    _in_graph: _Published | None = None
    #: The stream of one that is being issued.
    _underway: torch.cuda.Stream | None = None

    def __init__(self, count: int, device: torch.device, words: torch.Tensor | None = None) -> None:
        super().__init__(count, device, words)
        self._captures: set[int] = set()  # of launches that wait

    def publish(self) -> PublishWords:
        """What a launch on the current stream is told that signals this epoch; `published` says that it was issued.

        It comes behind the launches that wait for earlier epochs, since it may write what they read. A caller's own
        words may be published again without `advance`.

        Raises
        ------
        ValueError
            If a chunk of this epoch is signalled already, or, captured, published by this graph; or if a
            `tilestream.Stream` signals them.
        RuntimeError
            If a launch waits for it already: it may hold the SMs that the matmul would need.
        """
        with self._bell:
            stream = torch.cuda.current_stream(self._device)
            self._settle(stream)
            self._check_unpublished(())
            if torch.cuda.is_current_stream_capturing():
                return self._publish_in_graph(capture_id(stream.cuda_stream))
            if self._underway is not None:
                raise RuntimeError(
                    "publish: another thread is issuing a matmul that signals these chunks; call one after the other, "
                    "with arrival.advance() between"
                )
            if self._theirs is None:
                self._check_unpublished([chunk for chunk, epoch in enumerate(self._issued) if epoch >= self.epoch])
            if self._users and not self._known():
                again = "" if self._theirs is None else (
                    "; where others have signalled what it reads, call arrival.advance() before this"
                )  # fmt: skip
                raise RuntimeError(
                    f"publish: a launch that waits for epoch {self.epoch} was issued before the matmul that signals "
                    f"it, and may hold the SMs that this one needs; issue them in the other order{again}"
                )
            if self._counts is None:
                with torch.inference_mode(False):
                    self._counts = torch.zeros(self.count, dtype=torch.int32, device=self._device)
            self._counts.record_stream(stream)
            if self._theirs is None:
                self._come_behind_all(stream)
            else:
                self._retire()
                self._wipe()
            self._underway = stream
            return self.eager_publication

    @property
    def eager_publication(self) -> PublishWords:
        """What an eager launch is told that signals the present epoch."""
        assert self._counts is not None
        if self._theirs is not None:
            return PublishWords(self._theirs, self._counts, 1)
        return PublishWords(self._eager, self._counts, self.epoch)

    def _known(self) -> bool:
        """Whether the matmul of this epoch was issued. Readers of a caller's own words have come behind it then."""
        return self._published is not None and self._published.epoch == self.epoch

    def _publish_in_graph(self, graph: int) -> PublishWords:
        if self._in_graph is not None and self._in_graph.graph == graph:
            raise ValueError(
                "publish: a matmul of this graph signals these chunks already; give the second one an Arrival of its "
                "own"
            )
        if graph in self._captures:
            raise RuntimeError(
                "publish: a launch of this graph that waits for these chunks was captured before the matmul that "
                "signals them, and may hold the SMs that this one needs; capture them in the other order"
            )
        # One set of counts a captured launch: a replay may run beside an eager one.
        counts = torch.zeros(self.count, dtype=torch.int32, device=self._device)
        self._keep(counts, self._store, self._flags)
        self._wipe()
        return PublishWords(self._flags, counts, 1)

    @property
    def by_matmul(self) -> bool:
        """Whether it is an eager matmul that signals: what it writes may be of its stream's memory."""
        return self._published is not None

    def published(self, first: int | None) -> None:
        """The launch was issued, or the last of several, and nothing after it on this stream.

        Parameters
        ----------
        first
            The chunk that it begins with, where one launch with a dynamic schedule does it all; else None.
        """
        with self._bell:
            stream = torch.cuda.current_stream(self._device)
            found = _Published(self.epoch, stream.cuda_stream, event_on(stream))
            if torch.cuda.is_current_stream_capturing():
                self._in_graph = found._replace(graph=capture_id(stream.cuda_stream))
                return
            self._underway = None
            if self._theirs is None:
                self._signalled_by_launch(stream, found.end, self.epoch)
                if first is not None:
                    found = found._replace(first=(self._eager.data_ptr() + 4 * first, self.epoch))
            self._published = found

    def stopped(self) -> None:
        """The call that was issuing the matmul has failed. What it did issue still writes a caller's own words."""
        stream, self._underway = self._underway, None
        if stream is not None and self._theirs is not None:
            self._published = _Published(self.epoch, stream.cuda_stream, event_on(stream))

    def _signal_ends(self, stream: torch.cuda.Stream) -> frozenset[torch.cuda.Event]:
        """The matmul's end, too."""
        ends = super()._signal_ends(stream)
        return ends if self._published is None else ends | {self._published.end}

    def _come_behind_matmul(self, stream: torch.cuda.Stream) -> None:
        """Before a launch on ``stream`` that reads what a matmul of this GPU publishes: it has begun by then.

        Raises
        ------
        RuntimeError
            If another thread is about to issue it.
        """
        if torch.cuda.is_current_stream_capturing():
            found = self._in_graph
            if found is None or found.graph != capture_id(stream.cuda_stream):
                return  # another replay's
        else:
            with self._bell:
                if self._underway is not None:
                    raise RuntimeError(
                        "arrival: another thread is issuing the matmul that signals these chunks, and this launch "
                        "might take the SMs that it needs; read when that call has returned"
                    )
                self._users[stream.cuda_stream] = stream
                found = self._published if self._known() else None
        if found is None or found.stream == stream.cuda_stream:
            return
        if found.first is None:
            stream.wait_event(found.end)
        else:
            stream_wait(stream.cuda_stream, *found.first)
